"""What each state of a plan was chosen for: the error reduction that its branches promise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def predicted_gains(
    error_features: np.ndarray,
    noise_var: np.ndarray,
    weight: np.ndarray,
    count: np.ndarray,
    order: Sequence[int],
) -> np.ndarray:
    """By how much the branches of each state are expected to reduce `sum_s w(s) tau2(s)`.

        gain(s) = sum_{s'} w(s') Cov(s', s)^2 / (tau2(s) + noise2(s) / k(s))

    State after state in the order of the picks, each after what those before it have found out;
    all of a state's branches count at its first pick. The sum is the plan's `gain`.

    By the law of total variance this is also the expected value of `sum_s w(s) (V*(s) - V(s))^2`:
    with the standardised residual `z^2 = (m - V)^2 / (tau2 + noise2 / k)` of a branch mean, what
    came is `gain z^2`. This project's rule.

    Args:
      error_features: [S, D] before the round, with `e(s) . e(s') = Cov[V(s), V(s')]`.
      noise_var: [S] variance of one outcome, > 0.
      weight: [S] how much an error at a state matters.
      count: [S] continuations that the round samples.
      order: states in the order of the picks; negative entries end it.

    Returns:
      [S], 0 where nothing is sampled.
    """
    errors = np.array(error_features, np.float64)
    gains = np.zeros(len(count))
    picked = [int(s) for s in order if s >= 0]
    for state in dict.fromkeys([*picked, *np.flatnonzero(count).tolist()]):
        if not count[state]:
            continue
        direction = errors[state].copy()
        covariance = errors @ direction
        noise = float(noise_var[state]) / float(count[state])
        precision = 1.0 / (covariance[state] + noise)
        gains[state] = precision * np.sum(weight * np.square(covariance))
        # The rank-one downdate of `focus.branching.plan.condition`.
        scale = precision / (1.0 + np.sqrt(noise * precision))
        errors -= scale * np.outer(covariance, direction)
    return gains
