"""Fuses what the critic believes with what branches returned.

The critic's belief over the values of all states of a step is Gaussian, with the covariance
written as inner products of *error features* (`focus.credit.errors`). So every computation takes
place in their dimensions, and no matrix over states is ever formed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from focus.credit import errors
from focus.credit.errors import ErrorFeatures, Posterior, as_errors, like, without_outcome
from focus.types import Array

RefineMode = Literal["none", "local", "joint"]
REFINE_MODES: tuple[RefineMode, ...] = ("none", "local", "joint")

# Keeps the evidence k / noise_var finite in float32 when an outcome is declared noise-free.
MIN_NOISE_VAR = 1e-6


def bernoulli_noise_var(
    value: Array, *, value_range: tuple[float, float] = (0.0, 1.0), floor: float = 1e-2
) -> Array:
    """Variance of one outcome given its mean, for outcomes at either end of a range.

        noise2 = max((V - low) (high - V), floor)

    Exact for two-valued outcomes, an upper bound for any other outcome in the range. The floor
    keeps a single branch from settling a state that the critic calls certain.

    Args:
      value: mean outcome, any shape.
      value_range: `(low, high)` of the outcome.
      floor: smallest variance, in squared units of the outcome.

    Returns:
      Variance, the shape of `value`.
    """
    low, high = value_range
    return jnp.maximum((value - low) * (high - value), floor)


def outcome_noise(spread: Array, variance: Array, *, least: float = 0.1) -> Array:
    """Variance of one outcome around the *true* value, where V is known up to `variance`.

        noise2 = max(spread - tau2, least spread)

    This project's rule. `spread = V (1 - V)` is the variance of an outcome around V, all told; of
    that, tau2 is V's own error, if V is right on average. Counting it in both places makes
    evidence look noisier than it is.

    Args:
      spread: variance of one outcome around V, see `bernoulli_noise_var`; any shape.
      variance: tau2, the epistemic variance of V.
      least: share of the spread that always counts as noise.
    """
    return jnp.maximum(spread - variance, least * spread)


def _evidence_precision(noise_var: Array, branch_count: Array, mask: Array) -> Array:
    """Precision [S] of each state's branch mean."""
    branched = mask & (branch_count > 0)
    noise = jnp.maximum(jnp.where(branched, noise_var, 1.0), MIN_NOISE_VAR)
    return jnp.where(branched, branch_count / noise, 0.0)


def posterior_features(
    error_features: Array | ErrorFeatures,
    noise_var: Array,
    branch_count: Array,
    mask: Array | None = None,
) -> Array | ErrorFeatures:
    """Error features of the belief after the branches, whatever their outcomes were.

        Lambda = I + sum_b (k_b / noise2_b) e(b) e(b)^T = L L^T,    e'(s) = L^-1 e(s)

    Their inner products are the posterior covariance of a Gaussian belief (the information form
    of `Cov(s, s') - Cov(s, B) (Cov(B, B) + diag(noise2 / k))^-1 Cov(B, s')`).

    Args:
      error_features: [S, D] features before, or `ErrorFeatures`.
      noise_var: [S] variance of one outcome; values below `MIN_NOISE_VAR` count as that.
      branch_count: [S] number of continuations sampled at each state, 0 for none.
      mask: [S] bool, states that exist; all when None.

    Returns:
      Features after, of the same kind; 0 for absent states.
    """
    chex.assert_rank([noise_var, branch_count], 1)
    mask = jnp.ones(noise_var.shape, bool) if mask is None else mask
    precision = _evidence_precision(noise_var, branch_count, mask)
    after = errors.posterior(errors.masked(error_features, mask), precision).errors
    return like(error_features, after)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateValues:
    """What is known of some states, each without the outcome of its own trajectory.

    Attributes:
      value: V*, not clipped.
      variance: epistemic variance that is left.
      covariance: of the errors of a state and the next one of its trajectory; 0 at the last.
    """

    value: Array
    variance: Array
    covariance: Array


def refine_pool(
    mean: Array,
    features: Array | ErrorFeatures,
    noise_var: Array,
    branch_mean: Array,
    branch_count: Array,
    mask: Array,
    *,
    states: int,
    mode: RefineMode = "joint",
    own_state: Array | None = None,
    own_outcome: Array | None = None,
) -> tuple[StateValues, Posterior]:
    """Refines the values of base rollouts: `refine_values` with what the errors have in common.

    Args:
      mean: [S] critic mean V.
      features: error features of the pool, N rows of each rollout one after the other.
      noise_var: [S] variance of one outcome given the state.
      branch_mean: [S] mean of the outcomes seen from each state; never read where there are none.
      branch_count: [S] their number.
      mask: [S] bool, states that exist.
      states: N, rows of a rollout.
      mode: "none", "local" or "joint", see `refine_values`.
      own_state: [S] int32 row at which the outcome of the state's own rollout was counted, -1
        where it was not; None for none.
      own_outcome: [S] that outcome; not read where `own_state` is -1.

    Returns:
      Values [S], and the belief after all evidence, own outcomes included; in the modes "none"
      and "local" that of the critic alone.

    Raises:
      ValueError: unknown mode.
    """
    if mode not in REFINE_MODES:
        raise ValueError(f"refine mode {mode!r} is unknown; choose one of {REFINE_MODES}")
    mean = jnp.where(mask, mean, 0.0)
    before = errors.masked(errors.as_errors(features), mask)
    seen = mask & (branch_count > 0)
    noise = jnp.maximum(jnp.where(seen, noise_var, 1.0), MIN_NOISE_VAR)
    precision = jnp.where(seen, branch_count / noise, 0.0)
    surprise = jnp.where(seen, branch_mean - mean, 0.0)
    belief = errors.posterior(before, precision * (mode == "joint"), surprise)

    rows = jnp.arange(mean.size)
    after = jnp.minimum(rows + 1, mean.size - 1)
    follows = mask & mask[after] & (rows % states < states - 1)
    covariance = errors.pair_covariances(belief.errors, rows, after)
    variance = errors.variances(belief.errors)
    shift = belief.shift
    kept = jnp.ones_like(mean)
    if mode == "local":
        kept = 1.0 / (1.0 + variance * precision)
        shift, variance = (1.0 - kept) * surprise, kept * variance
        covariance *= kept * kept[after]
    value = mean + shift
    if own_state is not None and own_outcome is not None and mode != "none":
        there = jnp.maximum(own_state, 0)
        counted = mask & (own_state >= 0)
        if mode == "joint":
            with_own = errors.pair_covariances(belief.errors, rows, there)
        else:
            with_own = jnp.where(there == rows, variance, 0.0)
        outcome = jnp.where(counted, own_outcome, 0.0)
        args = (value[there], variance[there], jnp.where(counted, noise[there], 1.0))
        # Both states of a pair belong to one rollout, and miss the same outcome.
        more = with_own * with_own[after] / errors.room(args[2], args[1])
        covariance += jnp.where(counted & counted[after], more, 0.0)
        alone, alone_variance = without_outcome(value, variance, with_own, outcome, *args)
        value = jnp.where(counted, alone, value)
        variance = jnp.where(counted, alone_variance, variance)
    zero = jnp.zeros_like(mean)
    values = StateValues(
        value=jnp.where(mask, value, zero),
        variance=jnp.where(mask, variance, zero),
        covariance=jnp.where(follows, covariance, zero),
    )
    return values, belief


def refine_values(
    mean: Array,
    error_features: Array | ErrorFeatures,
    noise_var: Array,
    branch_mean: Array,
    branch_count: Array,
    *,
    mode: RefineMode,
    value_range: tuple[float, float] = (0.0, 1.0),
    mask: Array | None = None,
    own_state: Array | None = None,
    own_outcome: Array | None = None,
) -> tuple[Array, Array]:
    """Refined values V* and their variances, over all states of a step.

    With B the states with evidence, m the means of their outcomes and k their counts:

        none:   V* = V
        local:  V*(b) = V(b) + tau2_b / (tau2_b + noise2_b / k_b) (m_b - V(b)) at those states
        joint:  V*(s) = V(s) + Cov(s, B) (Cov(B, B) + diag(noise2 / k))^-1 (m - V(B))

    `local` is the precision-weighted mean of critic and Monte Carlo; `joint` also moves every
    state whose error correlates with a branched one. Both are this project's rule.

    Rollouts of one task are evidence about their common first state, and so about each other.
    Count the outcome of each at its s_0, and name that row in `own_state` for all states of the
    rollout: each state's value is then what all outcomes but its own say
    (`errors.without_outcome`), exactly as if it had been refined alone.

    Args:
      mean: [S] critic mean V.
      error_features: [S, D] with `e(s) . e(s') = Cov[V(s), V(s')]`, or `ErrorFeatures`.
      noise_var: [S] variance of one outcome; values below `MIN_NOISE_VAR` count as that.
      branch_mean: [S] mean outcome of the continuations; never read where the count is 0.
      branch_count: [S] number of continuations, 0 where the state was not branched.
      mode: "none", "local" or "joint".
      value_range: `(low, high)`; refined values are clipped to it, in every mode.
      mask: [S] bool, states that exist; all when None. Absent states may hold NaN.
      own_state: [S] int32 row at which the outcome of the state's own trajectory was counted,
        -1 where it was not; None for none.
      own_outcome: [S] that outcome; not read where `own_state` is -1.

    Returns:
      refined: [S] values V*, 0 for absent states.
      variance: [S] epistemic variance that is left, 0 for absent states.

    Raises:
      ValueError: unknown mode, or `own_state` without `own_outcome`.
    """
    if (own_state is None) != (own_outcome is None):
        raise ValueError("own_state and own_outcome go together: give both or neither")
    chex.assert_rank([mean, noise_var, branch_mean, branch_count], 1)
    chex.assert_equal_shape([mean, noise_var, branch_mean, branch_count])
    features = as_errors(error_features)
    chex.assert_equal_shape_prefix([mean, features.shared], 1)
    mask = jnp.ones(mean.shape, bool) if mask is None else mask
    values, _ = refine_pool(
        mean,
        features,
        noise_var,
        branch_mean,
        branch_count,
        mask,
        states=mean.size,
        mode=mode,
        own_state=own_state,
        own_outcome=own_outcome,
    )
    refined = jnp.clip(values.value, *value_range)
    return jnp.where(mask, refined, 0.0), values.variance


def leave_one_out_values(
    mean: Array, variance: Array, noise_var: Array, other_sum: Array, other_count: Array
) -> Array:
    """Value of the state that a branch left, refined by its siblings and not by itself.

        V* = V + tau2 / (tau2 + noise2 / k) (m - V),   m = mean outcome of the k siblings

    The outcome of a branch is evidence about the state it left. A baseline for the branch's own
    first segment must do without it. This project's rule; the `local` mode of `refine_values`
    with one outcome left out.

    Args:
      mean: [...] critic mean V.
      variance: [...] its epistemic variance tau2.
      noise_var: [...] variance of one outcome, > 0.
      other_sum: [...] sum of the siblings' outcomes.
      other_count: [...] k, 0 where there is no sibling: the value is V there.

    Returns:
      [...].
    """
    k = jnp.maximum(other_count, 1)
    gain = jnp.where(other_count > 0, variance / (variance + noise_var / k), 0.0)
    return mean + gain * (other_sum / k - mean)
