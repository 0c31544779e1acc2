"""What two states have in common, written as error features, and a step's values refined by it.

    Cov(s, s') = ensemble e(s) . e(s')
                 + sqrt(spread(s) spread(s')) (task [same task] + episode rho^|s - s'| [same task]
                                               + state [s = s'])

with `spread = V (1 - V)`, floored: a value near 0 or 1 can't be far off if it is right on
average. |s - s'| counts segments along the tree that the rollouts of a task make: they part at
s_0, and a branch parts from its parent where it left. The scales are fitted to evidence
(`focus.critic.covariance`). This project's rule.

States lie in a grid of G tasks, R rollouts of each and N states of each; row (g R + i) N + j of
a pool is state j of rollout i of task g.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from focus.credit import errors
from focus.credit.errors import ErrorFeatures, Posterior, without_outcome
from focus.credit.refine import MIN_NOISE_VAR, StateValues
from focus.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CovarianceScales:
    """How large each part of the covariance is; scalars, >= 0.

    Attributes:
      ensemble: factor on the covariance that ensemble or posterior claim.
      task: share of the spread that all states of a task have in common.
      episode: share that fades with the distance between states.
      state: share of the state alone.
      rho: what is left of the episode's part one segment on, in [0, 1).
    """

    ensemble: Array
    task: Array
    episode: Array
    state: Array
    rho: Array


def ensemble_scales() -> CovarianceScales:
    """The ensemble (or posterior) taken at its word, and nothing beside it."""
    one, zero = jnp.float32(1.0), jnp.float32(0.0)
    return CovarianceScales(one, zero, zero, zero, zero)


def _unit_features(scales: CovarianceScales, rollouts: int, states: int) -> Array:
    """Local features [R, N, E] of a task's states at spread 1, E = 3 + R (N - 1).

    Columns: the task; the error at s_0; what is new at s_0 for the state part, because s_0 is
    one state however many rollouts start there; what is new in the episode's part at each later
    state of each rollout, x_j = rho x_{j-1} + sqrt(1 - rho^2) new_j.
    """
    later = jnp.arange(states)
    lag = later[:, None] - later[None, 1:]
    fresh = jnp.sqrt(1.0 - jnp.square(scales.rho))
    path = jnp.where(lag >= 0, fresh * scales.rho ** jnp.maximum(lag, 0), 0.0)
    start = scales.rho**later
    task = jnp.sqrt(scales.task) * jnp.ones((rollouts, states, 1))
    common = jnp.sqrt(scales.episode) * jnp.broadcast_to(start[:, None], (rollouts, states, 1))
    first = jnp.sqrt(scales.state) * jnp.broadcast_to((later == 0)[:, None], common.shape)
    own = jnp.einsum("ab,ic->aibc", jnp.eye(rollouts), jnp.ones((states, 1)))[..., None]
    own = jnp.sqrt(scales.episode) * own[:, :, :, 0] * path[None, :, None, :]
    return jnp.concatenate([task, common, first, own.reshape(rollouts, states, -1)], axis=2)


def prior_variance(scales: CovarianceScales, ensemble_variance: Array, spread: Array) -> Array:
    """Variance of a state's error before any evidence of the step; elementwise."""
    shares = scales.task + scales.episode + scales.state
    return scales.ensemble * ensemble_variance + shares * spread


def structured_errors(scales: CovarianceScales, ensemble: Array, spread: Array) -> ErrorFeatures:
    """Error features of a step's base rollouts, tasks as blocks.

    Args:
      scales: of the parts.
      ensemble: [G, R, N, D] error features of ensemble or posterior.
      spread: [G, R, N] variance of one outcome around V, see `refine.bernoulli_noise_var`.

    Returns:
      Features of S = G R N states. Absent states may hold anything; mask them
      (`errors.masked`).
    """
    chex.assert_rank([ensemble, spread], [4, 3])
    chex.assert_equal_shape_prefix([ensemble, spread], 3)
    tasks, rollouts, states = spread.shape
    unit = _unit_features(scales, rollouts, states).reshape(1, rollouts * states, -1)
    local = jnp.sqrt(spread).reshape(tasks, -1, 1) * unit
    own = spread * scales.state * (jnp.arange(states) > 0)
    return ErrorFeatures(
        shared=jnp.sqrt(scales.ensemble) * ensemble.reshape(-1, ensemble.shape[-1]),
        local=local,
        own=own.reshape(-1),
    )


def branch_errors(
    scales: CovarianceScales,
    ensemble: Array,
    spread: Array,
    row: Array,
    depth: Array,
    *,
    rollouts: int,
    states: int,
) -> tuple[Array, Array, Array, Array]:
    """Features of states inside branches, for `errors.posterior_at`.

    Args:
      scales: of the parts.
      ensemble: [Q, D] error features of ensemble or posterior.
      spread: [Q].
      row: [Q] int32 row of the state that the branch left.
      depth: [Q] segments behind it, >= 1; at 0 the state is the row itself.
      rollouts, states: R and N of the pool.

    Returns:
      shared [Q, D], local [Q, E], own [Q] and block [Q].
    """
    unit = _unit_features(scales, rollouts, states)
    size = rollouts * states
    there = unit.reshape(size, -1)[row % size]
    faded = scales.rho ** depth.astype(jnp.float32)
    factor = jnp.broadcast_to(faded[:, None], there.shape)
    factor = factor.at[:, 0].set(1.0).at[:, 2].set(0.0)
    fresh = scales.episode * (1.0 - jnp.square(faded)) + scales.state
    local = jnp.sqrt(spread)[:, None] * factor * there
    return jnp.sqrt(scales.ensemble) * ensemble, local, spread * fresh, row // size


# --- a step's values -----------------------------------------------------------------------------


def refine_branches(
    scales: CovarianceScales,
    belief: Posterior,
    mean: Array,
    ensemble: Array,
    spread: Array,
    row: Array,
    outcome: Array,
    noise_var: Array,
    mask: Array,
    *,
    rollouts: int,
    states: int,
) -> StateValues:
    """Refines the values of branches' states by all evidence but each branch's own outcome.

    The first state of a branch is the state that it left, and its siblings' outcomes are
    evidence about that; what they say of later states fades with the distance.

    Args:
      scales: of the covariance.
      belief: of the pool after all evidence, see `refine_pool`.
      mean: [Q, N'] critic mean of the branches' states, the first one included.
      ensemble: [Q, N', D]; spread: [Q, N'].
      row: [Q] int32 row of the pool that each branch left.
      outcome: [Q] of each branch, counted there; NaN where it has none.
      noise_var: [Q] variance of that outcome as it was counted.
      mask: [Q, N'] bool, states that exist; the others may hold anything.
      rollouts, states: R and N of the pool.

    Returns:
      Values [Q, N'].
    """
    chex.assert_rank([mean, ensemble, row], [2, 3, 1])
    branches, length = mean.shape
    later = jnp.arange(length)
    spread = jnp.where(mask, spread, 0.0)
    mean = jnp.where(mask, mean, 0.0)
    ensemble = jnp.where(mask[..., None], ensemble, 0.0)

    def at(depth, ensemble, spread):
        features = branch_errors(
            scales, ensemble, spread, row, jnp.full((branches,), depth),
            rollouts=rollouts, states=states,
        )  # fmt: skip
        return errors.posterior_at(belief, *features)

    query = jax.vmap(at, in_axes=(0, 1, 1), out_axes=1)(later, ensemble, spread)
    pool, first = belief.errors, later == 0
    here = pool.shared[row], pool.local_rows[row]
    shared, local = (
        jnp.where(first[:, None], x[:, None], y)
        for x, y in zip(here, (query.shared, query.local), strict=True)
    )
    tau2 = errors.variances(pool)[row]
    value = mean + jnp.where(first, belief.shift[row][:, None], query.shift)
    variance = jnp.where(first, tau2[:, None], query.variance)

    # What two later states have of their own since the branch left: x_t = rho^(t-d) x_d + ...
    faded = scales.rho**later
    fresh = scales.episode * scales.rho * (1.0 - jnp.square(faded))
    fresh = fresh[:-1] * jnp.sqrt(spread[:, :-1] * spread[:, 1:])
    common = jnp.sum(shared[:, :-1] * shared[:, 1:], axis=2)
    common += jnp.sum(local[:, :-1] * local[:, 1:], axis=2)
    covariance = jnp.pad(common + fresh, [(0, 0), (0, 1)])

    with_own = jnp.einsum("qnd,qd->qn", shared, here[0]) + jnp.einsum("qne,qe->qn", local, here[1])
    with_own += jnp.where(first, pool.own[row][:, None], 0.0)
    counted = jnp.isfinite(outcome)[:, None]
    args = (value[:, :1], tau2[:, None], jnp.maximum(noise_var, MIN_NOISE_VAR)[:, None])
    more = with_own[:, :-1] * with_own[:, 1:] / errors.room(args[2], args[1])
    covariance += jnp.where(counted, jnp.pad(more, [(0, 0), (0, 1)]), 0.0)
    y = jnp.where(counted, outcome[:, None], 0.0)
    alone, alone_variance = without_outcome(value, variance, with_own, y, *args)
    follows = mask & jnp.pad(mask[:, 1:], [(0, 0), (0, 1)])
    return StateValues(
        value=jnp.where(mask, jnp.where(counted, alone, value), 0.0),
        variance=jnp.where(mask, jnp.where(counted, alone_variance, variance), 0.0),
        covariance=jnp.where(follows, covariance, 0.0),
    )
