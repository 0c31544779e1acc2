"""95 % intervals of shares."""

from __future__ import annotations

import numpy as np

Z_95 = 1.96


def wilson_interval(share: float, count: float, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval of a binomial share.

    Args:
      share: successes / count, in [0, 1].
      count: number of outcomes, >= 1.
      z: normal quantile.

    Returns:
      Lower and upper end, inside [0, 1].
    """
    scale = 1 + z**2 / count
    centre = (share + z**2 / (2 * count)) / scale
    half = z * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / scale
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def normal_interval(share: float, std_error: float) -> tuple[float, float]:
    """95 % interval of a share, `share +- 1.96 std_error`, cut to [0, 1]."""
    return max(0.0, share - Z_95 * std_error), min(1.0, share + Z_95 * std_error)
