"""What a table of scores says: aggregates over seeds and worlds, with intervals.

Scores are [N, W]: N seeds of W worlds, one number a run, in NumPy and without a loop over
resamples. As Agarwal et al. recommend (arXiv:2108.13264; their package `rliable` is archived):
the interquartile mean beside the mean, intervals from a bootstrap that is stratified by world,
the probability of improvement, and performance profiles. Arms that share seeds are resampled
together, so that a difference is paired. A bootstrap of few seeds is too narrow: with fewer than
`MIN_BOOTSTRAP` of them the interval is Student's t.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy.special import stdtrit

MIN_BOOTSTRAP = 10
RESAMPLES = 2000
# At most so many numbers of all resamples are held at a time.
_BLOCK = 4_000_000

# Takes arrays [..., N, W] of one or more arms and gives [...].
Statistic = Callable[..., np.ndarray]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A statistic and its interval.

    Attributes:
      value: of the scores as they are.
      low, high: ends of the interval.
    """

    value: float
    low: float
    high: float


def mean(scores: np.ndarray) -> np.ndarray:
    """Mean over seeds and worlds, [..., N, W] -> [...]."""
    return np.mean(scores, axis=(-2, -1))


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Mean of the middle half of all runs, [..., N, W] -> [...].

    A quarter is cut at either end, rounded down to whole runs (`scipy.stats.trim_mean`).
    """
    runs = np.reshape(scores, (*scores.shape[:-2], -1))
    cut, size = runs.shape[-1] // 4, runs.shape[-1]
    middle = np.partition(runs, (cut, size - cut - 1), axis=-1)[..., cut : size - cut]
    return np.mean(middle, axis=-1)


def mean_difference(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """How much better one arm is, [..., N, W] each -> [...]."""
    return mean(ours) - mean(theirs)


def mean_ratio(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """How many times as good one arm is, [..., N, W] each -> [...]; inf where the other has 0."""
    below = mean(theirs)
    return np.divide(mean(ours), below, out=np.full_like(below, np.inf), where=below != 0)


def probability_of_improvement(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Chance that a run of one arm beats a run of the other in the same world, [...].

    Over all pairs of their seeds, ties count half (Mann-Whitney's U / N^2), averaged over worlds.
    """
    ours, theirs = (np.moveaxis(np.sort(x, axis=-2), -1, -2) for x in (ours, theirs))
    # A place in the order of both arms together says how many of the others lie below a run.
    size = ours.shape[-1]
    both = np.concatenate([ours, theirs], axis=-1)
    places = _mid_ranks(both)[..., :size]
    below = np.sum(places, axis=-1) - size * (size + 1) / 2
    return np.mean(below / (size * theirs.shape[-1]), axis=-1)


def _mid_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 along the last axis; equal values share the mean of theirs."""
    order = np.argsort(values, axis=-1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=-1)
    places = np.arange(1.0, values.shape[-1] + 1)
    new = np.concatenate(
        [np.ones((*values.shape[:-1], 1), bool), ordered[..., 1:] != ordered[..., :-1]], axis=-1
    )
    last = np.concatenate([new[..., 1:], np.ones((*values.shape[:-1], 1), bool)], axis=-1)
    first_place = np.maximum.accumulate(np.where(new, places, 0.0), axis=-1)
    last_place = np.flip(
        np.minimum.accumulate(np.flip(np.where(last, places, np.inf), axis=-1), axis=-1), axis=-1
    )
    ranks = np.empty_like(ordered, dtype=float)
    np.put_along_axis(ranks, order, (first_place + last_place) / 2, axis=-1)
    return ranks


def performance_profile(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Share of runs with a score above each threshold, [..., N, W] and [T] -> [..., T]."""
    runs = np.reshape(scores, (*scores.shape[:-2], -1))
    return np.mean(runs[..., None] > thresholds, axis=-2)


def interval(
    statistic: Statistic,
    *scores: np.ndarray,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """A statistic of one or more arms with its confidence interval.

    Seeds of a world are drawn anew, from all arms the same ones, and of each world by itself
    (percentile bootstrap). With fewer than `MIN_BOOTSTRAP` seeds, `value +- t s`: s is the
    jackknife's standard error, leaving a seed out of all worlds at a time, and t Student's
    quantile of N - 1 degrees of freedom; of a mean it is Student's interval.

    Args:
      statistic: of this module, or like them.
      *scores: [N, W] or [N] for each arm, in the order of the statistic's arguments; row n of all
        arms has the same seed.
      level: of confidence, in (0, 1).
      resamples: of the bootstrap.
      seed: of the bootstrap's draws.

    Raises:
      ValueError: fewer than two seeds, arms of different shapes, or scores that are not finite.
    """
    arms = check_scores(*scores)
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    num_seeds, num_worlds = arms[0].shape
    if num_seeds < 2:
        raise ValueError(
            f"an interval needs at least 2 seeds, got {num_seeds}; run more (--config.seeds)"
        )
    value = float(statistic(*arms))
    if num_seeds < MIN_BOOTSTRAP:
        others = ~np.eye(num_seeds, dtype=bool)
        rows = np.tile(np.arange(num_seeds), (num_seeds, 1))[others]
        rows = rows.reshape(num_seeds, num_seeds - 1)
        left_out = statistic(*(arm[rows] for arm in arms))
        error = np.sqrt((num_seeds - 1) * np.mean(np.square(left_out - np.mean(left_out))))
        half = float(stdtrit(num_seeds - 1, (1 + level) / 2) * error)
        return Estimate(value, value - half, value + half)
    rng = np.random.default_rng(seed)
    block = max(1, _BLOCK // (arms[0].size * len(arms)))
    drawn = []
    for start in range(0, resamples, block):
        size = (min(block, resamples - start), num_seeds, num_worlds)
        rows = rng.integers(0, num_seeds, size)
        drawn.append(statistic(*(arm[rows, np.arange(num_worlds)] for arm in arms)))
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(drawn), [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def check_scores(*scores: np.ndarray) -> list[np.ndarray]:
    """Arms as [N, W].

    Raises:
      ValueError: no arm, one with other axes than N and W, or that has no scores, arms of
        different shapes, or scores that are not finite.
    """
    arms = [np.asarray(s, dtype=float) for s in scores]
    arms = [arm[:, None] if arm.ndim == 1 else arm for arm in arms]
    shapes = sorted({arm.shape for arm in arms})
    if len(shapes) != 1 or len(shapes[0]) != 2 or 0 in shapes[0]:
        raise ValueError(f"arms need the same seeds and worlds, [seeds, worlds]; got {shapes}")
    for number, arm in enumerate(arms):
        if not np.all(np.isfinite(arm)):
            seed, world = np.argwhere(~np.isfinite(arm))[0]
            raise ValueError(
                f"arm {number} has the score {arm[seed, world]} with seed {seed} in world {world}"
            )
    return arms
