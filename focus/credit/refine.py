"""Fuses what the critic believes with what branches returned.

The critic's belief over the values of all states of a step is Gaussian, with the covariance
written as inner products of *error features*: `e(s) . e(s') = Cov[V(s), V(s')]`. So every
computation takes place in their D dimensions, and no matrix over states is ever formed.
"""

from __future__ import annotations

from typing import Literal

import chex
import jax
import jax.numpy as jnp

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


def _evidence(
    error_features: Array, noise_var: Array, branch_count: Array, mask: Array
) -> tuple[Array, Array]:
    """Precision of each state's branch mean, and features that are safe to sum over."""
    branched = mask & (branch_count > 0)
    noise = jnp.maximum(jnp.where(branched, noise_var, 1.0), MIN_NOISE_VAR)
    precision = jnp.where(branched, branch_count / noise, 0.0)
    return precision, jnp.where(mask[:, None], error_features, 0.0)


def _belief_root(features: Array, precision: Array) -> Array:
    """Lower Cholesky factor [D, D] of `I + sum_b precision_b e_b e_b^T`; its pivots are >= 1."""
    information = jnp.einsum("sd,s,se->de", features, precision, features)
    return jnp.linalg.cholesky(information + jnp.eye(features.shape[1], dtype=features.dtype))


def _whiten_by(root: Array, vectors: Array) -> Array:
    """Rows x of `vectors` [N, D] mapped to root^-1 x."""
    return jax.scipy.linalg.solve_triangular(root, vectors.T, lower=True).T


def posterior_features(
    error_features: Array, noise_var: Array, branch_count: Array, mask: Array | None = None
) -> Array:
    """Error features of the belief after the branches, whatever their outcomes were.

        Lambda = I + sum_b (k_b / noise2_b) e(b) e(b)^T = L L^T,    e'(s) = L^-1 e(s)

    Their inner products are the posterior covariance of a Gaussian belief (the information form
    of `Cov(s, s') - Cov(s, B) (Cov(B, B) + diag(noise2 / k))^-1 Cov(B, s')`).

    Args:
      error_features: [S, D] features before.
      noise_var: [S] variance of one outcome; values below `MIN_NOISE_VAR` count as that.
      branch_count: [S] number of continuations sampled at each state, 0 for none.
      mask: [S] bool, states that exist; all when None.

    Returns:
      [S, D] features after; 0 for absent states.
    """
    chex.assert_rank([error_features, noise_var, branch_count], [2, 1, 1])
    mask = jnp.ones(noise_var.shape, bool) if mask is None else mask
    precision, features = _evidence(error_features, noise_var, branch_count, mask)
    return _whiten_by(_belief_root(features, precision), features)


def refine_values(
    mean: Array,
    error_features: Array,
    noise_var: Array,
    branch_mean: Array,
    branch_count: Array,
    *,
    mode: RefineMode,
    value_range: tuple[float, float] = (0.0, 1.0),
    mask: Array | None = None,
) -> tuple[Array, Array]:
    """Refined values V* and their variances, over all states of a step.

    With B the branched states, m their branch means and k their counts:

        none:   V* = V
        local:  V*(b) = V(b) + tau2_b / (tau2_b + noise2_b / k_b) (m_b - V(b)) at branched states
        joint:  V*(s) = V(s) + Cov(s, B) (Cov(B, B) + diag(noise2 / k))^-1 (m - V(B))

    `local` is the precision-weighted mean of critic and Monte Carlo; `joint` also moves every
    state whose error correlates with a branched one. Both are this project's rule.

    Args:
      mean: [S] critic mean V.
      error_features: [S, D] with `e(s) . e(s') = Cov[V(s), V(s')]`.
      noise_var: [S] variance of one outcome; values below `MIN_NOISE_VAR` count as that.
      branch_mean: [S] mean outcome of the continuations; never read where the count is 0.
      branch_count: [S] number of continuations, 0 where the state was not branched.
      mode: "none", "local" or "joint".
      value_range: `(low, high)`; refined values are clipped to it, in every mode.
      mask: [S] bool, states that exist; all when None. Absent states may hold NaN.

    Returns:
      refined: [S] values V*, 0 for absent states.
      variance: [S] epistemic variance that is left, 0 for absent states.

    Raises:
      ValueError: unknown mode.
    """
    if mode not in REFINE_MODES:
        raise ValueError(f"refine mode {mode!r} is unknown; choose one of {REFINE_MODES}")
    chex.assert_rank([mean, error_features, noise_var, branch_mean, branch_count], [1, 2, 1, 1, 1])
    chex.assert_equal_shape([mean, noise_var, branch_mean, branch_count])
    chex.assert_equal_shape_prefix([mean, error_features], 1)
    mask = jnp.ones(mean.shape, bool) if mask is None else mask
    mean = jnp.where(mask, mean, 0.0)
    precision, features = _evidence(error_features, noise_var, branch_count, mask)
    surprise = jnp.where(precision > 0, branch_mean - mean, 0.0)
    prior_variance = jnp.sum(jnp.square(features), axis=1)

    if mode == "none":
        shift, variance = jnp.zeros_like(mean), prior_variance
    elif mode == "local":
        gain = prior_variance * precision / (1.0 + prior_variance * precision)
        shift, variance = gain * surprise, (1.0 - gain) * prior_variance
    else:
        root = _belief_root(features, precision)
        whitened = _whiten_by(root, features)
        evidence = (precision * surprise) @ whitened
        shift, variance = whitened @ evidence, jnp.sum(jnp.square(whitened), axis=1)
    refined = jnp.clip(mean + shift, *value_range)
    return jnp.where(mask, refined, 0.0), variance


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
