"""What each state of a plan was chosen for: the error reduction that its branches promise."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from focus.branching.features import StateFeatures, clean
from focus.credit.errors import as_errors, condition, covariances
from focus.types import Array


def predicted_gains(features: StateFeatures, count: Array, order: Array) -> Array:
    """By how much the branches of each state are expected to reduce `sum_s w(s) tau2(s)`.

        gain(s) = sum_{s'} w(s') Cov(s', s)^2 / (tau2(s) + noise2(s) / k(s))

    State after state in the order of the picks, each after what those before it have found out;
    all of a state's branches count at its first pick. The sum is the plan's `gain`.

    By the law of total variance this is also the expected value of `sum_s w(s) (V*(s) - V(s))^2`:
    with the standardised residual `z^2 = (m - V)^2 / (tau2 + noise2 / k)` of a branch mean, what
    came is `gain z^2`. This project's rule.

    Args:
      features: the pool before the round.
      count: [S] int32 continuations that the round samples, see `Plan`.
      order: [P] int32 states in the order of the picks; negative entries end it.

    Returns:
      [S], 0 where nothing is sampled.
    """
    pool = clean(features)

    def add(carry, state):
        errors, gains = carry
        first = (state >= 0) & (gains[state] == 0.0) & (count[state] > 0)

        def observe(errors, gains):
            noise = pool.noise_var[state] / jnp.maximum(count[state], 1)
            covariance = covariances(errors, state)
            gain = pool.weight @ jnp.square(covariance) / (covariance[state] + noise)
            return condition(errors, state, noise), gains.at[state].set(gain)

        return jax.lax.cond(first, observe, lambda *same: same, errors, gains), None

    start = as_errors(pool.error_features), jnp.zeros(pool.noise_var.shape)
    (_, gains), _ = jax.lax.scan(add, start, order)
    return gains
