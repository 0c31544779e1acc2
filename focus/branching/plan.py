"""Spends a token budget on continuations: which states, and how many from each.

One call is one round. Between rounds the caller turns the outcomes into a new belief
(`refine.refine_values` for the means, `refine.posterior_features` for the error features) and
plans again with what is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp

from focus.branching.acquisition import RULES
from focus.branching.features import StateFeatures, clean
from focus.credit.errors import (
    as_errors,
    condition,
    covariances,
    influence,
    variances,
    weighted_covariance,
)
from focus.credit.refine import posterior_features
from focus.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What to sample.

    Attributes:
      count: [S] int32 new continuations per state.
      expected_cost: scalar, tokens that they are predicted to generate; never above the budget.
      gain: scalar, by how much the weighted epistemic variance `sum w tau2` is expected to fall.
      order: [max_picks] int32 state of each pick, in order; -1 after the last.
    """

    count: Array
    expected_cost: Array
    gain: Array
    order: Array


def _greedy(pool: StateFeatures, budget: Array, ks: Array, room: Array, max_picks: int):
    """Takes the (state, k) of the largest gain per token that fits until nothing does.

    The numerators q(s) of the gain are carried along rather than computed afresh: with
    `Cov' = Cov - b Cov(., u) Cov(u, .)`, and h = sum_{s'} w(s') Cov(., s') Cov(s', u),

        q'(s) = q(s) - 2 b Cov(s, u) h(s) + b^2 Cov(s, u)^2 q(u)

    so a pick costs as much as the features have entries. Every so many picks they are computed
    afresh, which keeps that cost on average and keeps rounding from piling up. The two loops are
    nested, not a `cond` in one: under `vmap` both sides of a `cond` are computed every time.
    """
    features = as_errors(pool.error_features)
    between = max(1, features.shared.shape[1] + features.block_size + features.local.shape[2])

    def best_pick(features, q, count, left):
        spread = ks * variances(features)[:, None] + pool.noise_var[:, None]
        density = q[:, None] / spread / pool.cost[:, None]
        fits = (ks * pool.cost[:, None] <= left) & (count[:, None] + ks <= room[:, None])
        density = jnp.where(fits & pool.mask[:, None], density, -jnp.inf)
        best = jnp.argmax(density)
        return best, density.ravel()[best]

    def go_on(picks, best_density):
        return (picks < max_picks) & (best_density > 0)

    def pick(carry):
        since, picks, features, q, count, order, spent, best, _ = carry
        state, k = best // ks.size, ks[best % ks.size]
        noise = pool.noise_var[state] / k
        covariance = covariances(features, state)
        precision = 1.0 / (covariance[state] + noise)
        gain = precision * covariance
        q -= 2.0 * gain * influence(features, pool.weight * covariance)
        q = jnp.maximum(q + jnp.square(gain) * carry[3][state], 0.0)
        features = condition(features, state, noise)
        count = count.at[state].add(k)
        order = order.at[picks].set(state.astype(jnp.int32))
        spent = spent + k * pool.cost[state]
        best = best_pick(features, q, count, budget - spent)
        return since + 1, picks + 1, features, q, count, order, spent, *best

    def some_picks(carry):
        picks, features, count, order, spent, *_ = carry
        q = weighted_covariance(features, pool.weight)
        best = best_pick(features, q, count, budget - spent)
        start = (jnp.int32(0), picks, features, q, count, order, spent, *best)
        inner = jax.lax.while_loop(lambda c: (c[0] < between) & go_on(c[1], c[-1]), pick, start)
        _, picks, features, _, count, order, spent, _, density = inner
        return picks, features, count, order, spent, density

    start = (
        jnp.int32(0),
        features,
        jnp.zeros(pool.mask.shape, jnp.int32),
        jnp.full((max_picks,), -1, jnp.int32),
        jnp.zeros((), pool.cost.dtype),
        jnp.asarray(jnp.inf, pool.cost.dtype),
    )
    _, _, count, order, spent, _ = jax.lax.while_loop(
        lambda c: go_on(c[0], c[-1]), some_picks, start
    )
    return count, spent, order


def _ranked(
    pool: StateFeatures, scores: Array, budget: Array, ks: Array, room: Array, max_picks: int
):
    """Goes down the scores; each state gets the largest k it has room for, if that still fits."""
    allowed = jnp.max(jnp.where(ks <= room[:, None], ks, 0), axis=1)
    price = allowed * pool.cost
    eligible = (allowed > 0) & (scores > -jnp.inf)
    ranking = jnp.argsort(-scores, stable=True)

    def visit(carry, state):
        spent, picks = carry
        take = eligible[state] & (spent + price[state] <= budget) & (picks < max_picks)
        slot = jnp.where(take, picks, max_picks)  # max_picks is out of bounds: dropped below
        return (spent + take * price[state], picks + take), (take, slot)

    start = (jnp.zeros((), price.dtype), jnp.int32(0))
    (spent, _), (take, slot) = jax.lax.scan(visit, start, ranking)
    taken = jnp.where(take, allowed[ranking], 0)
    count = jnp.zeros(allowed.shape, jnp.int32).at[ranking].set(taken)
    order = jnp.full((max_picks,), -1, jnp.int32)
    return count, spent, order.at[slot].set(ranking.astype(jnp.int32), mode="drop")


def _repeated(
    features: StateFeatures, rule: str, key, budget: Array, ks: Array, room: Array, max_picks: int
):
    """Takes the best state again and again, with one pick more in `branch_count` each time."""
    pool, existing, k = clean(features), features.branch_count, ks[0]

    def best_pick(count, left):
        counted = dataclasses.replace(features, branch_count=existing + count)
        scores = RULES[rule].scores(counted, key)
        fits = (k * pool.cost <= left) & (count + k <= room)
        scores = jnp.where(fits, scores, -jnp.inf)
        best = jnp.argmax(scores)
        return best, scores[best]

    def go_on(carry):
        return (carry[0] < max_picks) & (carry[-1] > -jnp.inf)

    def pick(carry):
        picks, count, order, spent, state, _ = carry
        count = count.at[state].add(k)
        order = order.at[picks].set(state.astype(jnp.int32))
        spent = spent + k * pool.cost[state]
        return picks + 1, count, order, spent, *best_pick(count, budget - spent)

    count = jnp.zeros(pool.mask.shape, jnp.int32)
    order = jnp.full((max_picks,), -1, jnp.int32)
    start = (jnp.int32(0), count, order, jnp.zeros((), pool.cost.dtype))
    _, count, order, spent, *_ = jax.lax.while_loop(
        go_on, pick, (*start, *best_pick(count, budget))
    )
    return count, spent, order


def plan(
    features: StateFeatures,
    budget: Array | int | float,
    *,
    rule: str,
    ks: Sequence[int] = (1, 2, 4, 8),
    max_picks: int = 256,
    key: Array | None = None,
    existing_count: Array | None = None,
    max_per_state: int | None = None,
) -> Plan:
    """Chooses continuations for one round.

    "expected_error_reduction" is greedy. Sampling k continuations at s lowers every variance, so

        U(s, k) = sum_{s'} w(s') Cov(s', s)^2 / (tau2(s) + noise2(s) / k)

    is gained for k c(s) tokens; the (s, k) with the largest U / (k c) that fits is taken, the
    error features are conditioned on it (`condition`), and so on until nothing fits or nothing
    is left to gain. U / k falls with k: the smallest k leads while there is room, so `ks` sets
    how finely the budget is spread; a state may be picked again.

    "variance_reduction" is the same without covariances between states. "carl" and "trace" take
    the best state again and again, the smallest k each time, as their scores fall with what a
    state has been given. All others go once down the order of their scores and put the largest
    k for which a state has room on each; a state that does not fit whole is passed over.

    Every rule takes and returns the same. Compile with `jax.jit` holding `rule`, `ks`,
    `max_picks` and `max_per_state` static.

    Args:
      features: the pool of S states.
      budget: scalar, tokens that may be generated.
      rule: key of `acquisition.RULES`.
      ks: numbers of continuations that one pick may add, all >= 1.
      max_picks: most picks of this round. Set it to budget / smallest cost or more to make sure
        that only the budget binds.
      key: a `jax.random.key`, consumed by "random" and unused by the others.
      existing_count: [S] int32 continuations sampled in earlier rounds; they fill
        `max_per_state`, and `branch_count` where `features` has none. Their evidence must be in
        `features` already.
      max_per_state: most continuations of one state over all rounds; None for no limit.

    Returns:
      `Plan`.

    Raises:
      ValueError: unknown rule, empty or non-positive `ks`, non-positive `max_picks` or
        `max_per_state`, "random" without a key, a rule without a channel that it reads.
    """
    if rule not in RULES:
        raise ValueError(f"acquisition rule {rule!r} is unknown; choose one of {sorted(RULES)}")
    if not ks or min(ks) < 1:
        raise ValueError(f"ks={tuple(ks)} must hold at least one number, all >= 1")
    if max_picks < 1:
        raise ValueError(f"max_picks must be >= 1, got {max_picks}")
    if max_per_state is not None and max_per_state < 1:
        raise ValueError(f"max_per_state must be >= 1 or None for no limit, got {max_per_state}")
    chex.assert_rank(features.mean, 1)
    chex.assert_equal_shape([features.mean, features.noise_var, features.cost, features.weight])
    pool = clean(features)
    budget = jnp.asarray(budget, pool.cost.dtype)
    sizes = jnp.asarray(sorted(set(ks)), jnp.int32)
    cap = jnp.iinfo(jnp.int32).max if max_per_state is None else max_per_state
    existing = 0 if existing_count is None else existing_count
    room = jnp.broadcast_to(cap - jnp.asarray(existing, jnp.int32), pool.mask.shape)

    if features.branch_count is None:
        sampled = jnp.broadcast_to(jnp.asarray(existing, jnp.int32), pool.mask.shape)
        features = dataclasses.replace(features, branch_count=sampled)

    planner, view = RULES[rule].planner, RULES[rule].view
    if planner == "greedy":
        seen = pool if view is None else view(pool)
        count, cost, order = _greedy(seen, budget, sizes, room, max_picks)
    elif planner == "repeated":
        count, cost, order = _repeated(features, rule, key, budget, sizes, room, max_picks)
    else:
        scores = RULES[rule].scores(features, key)
        count, cost, order = _ranked(pool, scores, budget, sizes, room, max_picks)
    after = posterior_features(pool.error_features, pool.noise_var, count)
    fall = variances(pool.error_features) - variances(after)
    return Plan(count=count, expected_cost=cost, gain=pool.weight @ fall, order=order)
