"""Acquisition rules: how much each state is worth branching.

A rule maps `StateFeatures` to one score per state, higher first. Three kinds of planner use it
(see `plan`): "greedy" rules are re-evaluated after every pick, because what a branch teaches
about one state it also teaches about the states whose errors correlate; "repeated" rules are
re-evaluated because they count how often a state was continued; "ranked" rules are evaluated
once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from focus.branching import published
from focus.branching.features import StateFeatures, clean, require_channels
from focus.credit.errors import (
    ErrorFeatures,
    as_errors,
    pair_covariances,
    variances,
    weighted_covariance,
)
from focus.types import Array


def expected_error_reduction(features: StateFeatures, key: Array | None = None) -> Array:
    """Expected reduction of the critic's weighted error per token, for one continuation.

        score(s) = sum_{s'} w(s') Cov(s', s)^2 / (tau2(s) + noise2(s)) / c(s)

    This project's rule (expected error reduction under a Gaussian belief). The numerator counts
    every state whose error correlates with the one at s, so that one branch can serve many. As a
    greedy rule it is re-evaluated after each pick for every number of continuations.

    Args:
      features: the pool.
      key: unused.

    Returns:
      [S] reduction of weighted variance per generated token, -inf for absent states.
    """
    del key
    pool = clean(features)
    gain = weighted_covariance(pool.error_features, pool.weight) / (
        variances(pool.error_features) + pool.noise_var
    )
    return jnp.where(pool.mask, gain / pool.cost, -jnp.inf)


def own_errors(features: StateFeatures) -> StateFeatures:
    """The pool as if no two states had an error in common: variances stay, covariances go."""
    errors = as_errors(features.error_features)
    alone = ErrorFeatures(errors.shared[:, :0], errors.local[:, :, :0], variances(errors))
    return dataclasses.replace(features, error_features=alone)


def variance_reduction(features: StateFeatures, key: Array | None = None) -> Array:
    """What one continuation takes off the state's own variance, weighted, per token.

        score(s) = w(s) tau2(s)^2 / (tau2(s) + noise2(s)) / c(s)

    `expected_error_reduction` without what the branch says of other states: what selection is
    worth without a model of how errors go together. This project's rule.

    Args:
      features: the pool.
      key: unused.

    Returns:
      [S], -inf for absent states.
    """
    return expected_error_reduction(own_errors(features), key)


def epistemic(features: StateFeatures, key: Array | None = None) -> Array:
    """The variance of the critic's error.

        score(s) = tau2(s)

    Uncertainty sampling. It does not ask what a branch would tell, or cost.

    Args:
      features: the pool.
      key: unused.

    Returns:
      [S], -inf for absent states.
    """
    del key
    pool = clean(features)
    return jnp.where(pool.mask, variances(pool.error_features), -jnp.inf)


def policy_improvement(features: StateFeatures, key: Array | None = None) -> Array:
    """Expected improvement of the policy by a continuation that is trained on, per token.

        score(s_j) = sum_{l >= j} f_l E[(V(s_{l+1}) - V(s_l))^2] / c(s_j)

    To first order a gradient step on a segment improves the policy by the squared norm of its
    expected gradient: the score norm f_l of its tokens times the square of its advantage. How
    far the value will move is told by the continuation that was seen, with what is not known of
    either value: the difference of means squared plus the variance of the difference; at the
    rollout's end, by the spread of the outcome. States with V near 0 or 1, and those behind
    which the policy has made up its mind, have nothing to gain. This project's rule.

    Args:
      features: the pool with `score_norm` and `next_state`; rows that are next are read even
        where they may not be branched themselves.
      key: unused.

    Returns:
      [S], -inf for absent states.

    Raises:
      ValueError: no `score_norm` or `next_state`.
    """
    del key
    require_channels(features, "policy_improvement", "score_norm", "next_state")
    pool = clean(features)
    follows = pool.next_state >= 0
    after = jnp.where(follows, pool.next_state, 0)
    # A state that is next has a value, whether or not it may be branched.
    counts = pool.mask | jnp.zeros_like(pool.mask).at[after].max(follows)
    errors = clean(dataclasses.replace(features, mask=counts))
    tau2 = variances(errors.error_features)
    rows = jnp.arange(pool.mask.size)
    step = jnp.square(errors.mean[after] - errors.mean) + tau2[after] + tau2
    step -= 2.0 * pair_covariances(errors.error_features, rows, after)
    spread = jnp.where(follows, jnp.maximum(step, 0.0), pool.noise_var + tau2)
    gain = jnp.where(pool.mask, pool.score_norm * spread, 0.0)
    # Sums along chains of successors, by jumps that double in length.
    pointer = jnp.where(follows, after, rows.size)
    for _ in range(max(1, math.ceil(math.log2(max(rows.size, 2))))):
        gain += jnp.append(gain, 0.0)[pointer]
        pointer = jnp.append(pointer, rows.size)[pointer]
    return jnp.where(pool.mask, gain / pool.cost, -jnp.inf)


def uniform(features: StateFeatures, key: Array | None = None) -> Array:
    """Every state alike; when not all fit, an even thinning of the pool.

    Equal branching at every state as in VinePPO (arXiv:2410.01679). The order is this project's
    rule: the r-th existing state is ranked by the fractional part of r times the golden ratio.
    Any prefix of that order is spread evenly over the pool (at most three different gaps), and
    unlike a fixed stride it cannot lock on to one turn of trajectories of equal length.

    Args:
      features: the pool, in trajectory order.
      key: unused.

    Returns:
      [S] minus that fractional part, -inf for absent states.
    """
    del key
    return jnp.where(features.mask, -published.golden_order(features.mask), -jnp.inf)


def random(features: StateFeatures, key: Array | None = None) -> Array:
    """States in uniformly random order.

    Args:
      features: the pool.
      key: a `jax.random.key`, consumed.

    Returns:
      [S] scores in [0, 1), -inf for absent states.

    Raises:
      ValueError: no key.
    """
    if key is None:
        raise ValueError("the random rule needs key=jax.random.key(...), got None")
    return jnp.where(features.mask, jax.random.uniform(key, features.mask.shape), -jnp.inf)


@dataclasses.dataclass(frozen=True)
class AcquisitionRule:
    """One entry of `RULES`.

    Attributes:
      scores: `scores(features, key) -> [S]`, -inf for states that must not be picked.
      planner: "greedy" re-evaluates the expected error reduction after every pick; "repeated"
        evaluates the scores again with one more continuation in `branch_count`; "ranked" goes
        down the order of the scores once.
      reference: where the rule comes from.
      evidence: "code", "paper" or "reconstructed", as for estimators; "own" for this project's.
      channels: optional channels of `StateFeatures` that it reads.
      view: what a greedy planner sees of the pool; all of it when None.
    """

    scores: Callable[[StateFeatures, Array | None], Array]
    planner: Literal["greedy", "repeated", "ranked"]
    reference: str
    evidence: Literal["code", "paper", "reconstructed", "own"] = "own"
    channels: tuple[str, ...] = ()
    view: Callable[[StateFeatures], StateFeatures] | None = None


_OWN = "this project's rule"

RULES: dict[str, AcquisitionRule] = {
    "expected_error_reduction": AcquisitionRule(expected_error_reduction, "greedy", _OWN, "own"),
    "variance_reduction": AcquisitionRule(
        variance_reduction, "greedy", _OWN, "own", view=own_errors
    ),
    "policy_improvement": AcquisitionRule(
        policy_improvement, "ranked", _OWN, "own", ("score_norm", "next_state")
    ),
    "epistemic": AcquisitionRule(epistemic, "ranked", "uncertainty sampling", "own"),
    "bernoulli": AcquisitionRule(
        published.bernoulli, "ranked", "e.g. VSPO, arXiv:2512.07478", "reconstructed"
    ),
    "mixed_outcome": AcquisitionRule(
        published.mixed_outcome, "ranked", "DAPO, arXiv:2503.14476, at states", "reconstructed"
    ),
    "policy_entropy": AcquisitionRule(
        published.policy_entropy, "ranked", "e.g. ARPO, arXiv:2507.19849", "reconstructed",
        ("entropy",),
    ),
    "at2po": AcquisitionRule(
        published.at2po, "ranked", "AT2PO, arXiv:2601.04767", "code", ("entropy", "branch_count")
    ),
    "appo": AcquisitionRule(
        published.appo, "ranked", "APPO, arXiv:2606.12384", "code",
        ("entropy", "log_ratio", "rollout"),
    ),
    "patr": AcquisitionRule(
        published.patr, "ranked", "PATR, arXiv:2607.15610", "reconstructed", ("score",)
    ),
    "carl": AcquisitionRule(
        published.carl, "repeated", "CARL, arXiv:2512.04949", "paper", ("nll", "branch_count")
    ),
    "trace": AcquisitionRule(
        published.trace, "repeated", "TRACE, arXiv:2606.11119", "reconstructed",
        ("branch_count",),
    ),
    "spo": AcquisitionRule(
        published.spo, "ranked", "SPO, arXiv:2505.23564", "code", ("cut",)
    ),
    "uniform": AcquisitionRule(uniform, "ranked", "VinePPO, arXiv:2410.01679", "code"),
    "random": AcquisitionRule(random, "ranked", "control", "own"),
}  # fmt: skip
