"""Is the critic any good? Its values against the outcomes of branches, on the host."""

from __future__ import annotations

import numpy as np


def calibration(
    values: np.ndarray, outcome_means: np.ndarray, counts: np.ndarray, num_bins: int = 10
) -> dict[str, np.ndarray]:
    """Compares values with means of 0/1 outcomes of fresh continuations.

    A branch mean m of k outcomes is itself noisy: E (m - V)^2 = (p - V)^2 + p (1 - p) / k for
    the true success probability p. Since E m (1 - m) / (k - 1) = p (1 - p) / k,

        (m - V)^2 - m (1 - m) / (k - 1)

    is an unbiased estimate of the squared error (p - V)^2. It may be negative for single
    states; only its mean is meant to be read. It needs k >= 2 and 0/1 outcomes.

    Args:
      values: [n] critic values, from before the critic saw these outcomes.
      outcome_means: [n] means of k outcomes.
      counts: [n] k >= 1.
      num_bins: reliability bins over [0, 1].

    Returns:
      `value_mse`: mean of the corrected squared error over states with k >= 2 (NaN without
      any); `value_mse_states`: their number; `brier`: mean squared error against single
      outcomes; `calibration_error`: mean gap between value and outcome over bins, weighted by
      outcomes; `bin_value`, `bin_outcome`, `bin_count`: [num_bins] for a reliability diagram,
      NaN where a bin is empty.

    Raises:
      ValueError: shapes differ, nothing to compare, or a number outside of [0, 1].
    """
    values, means, counts = (np.asarray(x, np.float64) for x in (values, outcome_means, counts))
    if not values.shape == means.shape == counts.shape or values.ndim != 1:
        raise ValueError(
            f"values, outcome_means and counts must be [n], got {values.shape}, {means.shape}, "
            f"{counts.shape}"
        )
    if values.size == 0 or np.any(counts < 1):
        raise ValueError("calibration needs branched states only: leave out those with count 0")
    for name, x in (("values", values), ("outcome_means", means)):
        if not np.all((x >= 0) & (x <= 1)):
            bad = x[~((x >= 0) & (x <= 1))][0]
            raise ValueError(f"{name} must be in [0, 1], got {bad}; rescale other rewards first")

    squared = (means - values) ** 2
    spread = means * (1 - means)
    repeated = counts >= 2
    corrected = squared[repeated] - spread[repeated] / (counts[repeated] - 1)

    index = np.minimum((values * num_bins).astype(int), num_bins - 1)
    total = np.bincount(index, counts, num_bins)
    with np.errstate(invalid="ignore"):
        bin_value = np.bincount(index, counts * values, num_bins) / total
        bin_outcome = np.bincount(index, counts * means, num_bins) / total
    gap = np.abs(bin_value - bin_outcome)[total > 0]
    return {
        "value_mse": np.mean(corrected) if corrected.size else np.float64(np.nan),
        "value_mse_states": np.int64(corrected.size),
        "brier": np.sum(counts * (squared + spread)) / np.sum(counts),
        "calibration_error": np.sum(gap * total[total > 0]) / np.sum(total),
        "bin_value": bin_value,
        "bin_outcome": bin_outcome,
        "bin_count": total,
    }
