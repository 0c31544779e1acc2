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


def standardised_residuals(
    values: np.ndarray,
    variances: np.ndarray,
    noise_variances: np.ndarray,
    outcome_means: np.ndarray,
    counts: np.ndarray,
) -> dict[str, float]:
    """Are the critic's variances any good? Residuals of fresh means over what was promised.

        z = (m - V) / sqrt(tau2 + noise2 / k)

    have variance 1 if both are right. Above 1 the belief is overconfident: refinement then
    contradicts its own evidence; below 1 it throws away what the critic knows.

    Args:
      values: [n] critic values, from before the critic saw these outcomes.
      variances: [n] epistemic variances tau2 of the same belief.
      noise_variances: [n] variance of one outcome given the state.
      outcome_means: [n] means of k outcomes.
      counts: [n] k >= 1.

    Returns:
      `residual_variance`: mean of z^2, NaN without states; `residual_mean`: mean of z;
      `residual_states`: how many.

    Raises:
      ValueError: shapes differ, or a count below 1.
    """
    arrays = (values, variances, noise_variances, outcome_means, counts)
    values, variances, noise, means, counts = (np.asarray(x, np.float64) for x in arrays)
    if len({x.shape for x in (values, variances, noise, means, counts)}) > 1 or values.ndim != 1:
        raise ValueError(f"all arguments must be [n], got {[np.shape(x) for x in arrays]}")
    if np.any(counts < 1):
        raise ValueError("residuals need branched states only: leave out those with count 0")
    if not values.size:
        return {"residual_variance": np.nan, "residual_mean": np.nan, "residual_states": 0}
    z = (means - values) / np.sqrt(variances + noise / counts)
    return {
        "residual_variance": float(np.mean(z**2)),
        "residual_mean": float(np.mean(z)),
        "residual_states": values.size,
    }


def error_reduction(
    values: np.ndarray,
    variances: np.ndarray,
    refined: np.ndarray,
    refined_variances: np.ndarray,
    noise_variances: np.ndarray,
    outcomes: np.ndarray,
) -> dict[str, float]:
    """Does refinement deliver what it promises? Each outcome judges the value without it.

    An outcome y of a branched state is independent of the value that all others give, V*_-y, so

        (y - V)^2 - (y - V*_-y)^2

    is an unbiased estimate of by how much the squared error fell: the noise of y drops out.
    Promised is the fall of the variance, tau2 - tau2_-y. Means over outcomes and then states.

    Args:
      values: [n] critic mean before; variances: [n] tau2 before.
      refined: [n] values after all outcomes, not clipped; refined_variances: [n] after.
      noise_variances: [n] of one outcome, as refinement counted it.
      outcomes: [n, K] of each state, NaN where there is none; at least one a state.

    Returns:
      `error_reduction` and `error_reduction_expected`; NaN without states.

    Raises:
      ValueError: a state without an outcome.
    """
    outcomes = np.asarray(outcomes, np.float64)
    there = np.isfinite(outcomes)
    if np.any(~there.any(axis=1)):
        raise ValueError("error_reduction needs branched states only, with an outcome each")
    if not len(outcomes):
        return {"error_reduction": np.nan, "error_reduction_expected": np.nan}
    columns = (values, variances, refined, refined_variances, noise_variances)
    value, variance, after, left, noise = (np.asarray(x, np.float64)[:, None] for x in columns)
    y = np.where(there, outcomes, 0.0)
    room = np.maximum(noise - left, 1e-4 * noise)  # see credit.errors.without_outcome
    alone = after - left / room * (y - after)
    alone_variance = left + left**2 / room
    count = there.sum(axis=1)
    realised = np.where(there, (y - value) ** 2 - (y - alone) ** 2, 0.0).sum(axis=1) / count
    expected = np.where(there, variance - alone_variance, 0.0).sum(axis=1) / count
    return {
        "error_reduction": float(realised.mean()),
        "error_reduction_expected": float(expected.mean()),
    }
