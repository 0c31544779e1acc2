"""Statistics of the laboratory against scipy.stats and slow loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from focus.lab import statistics
from focus.lab.statistics import interval


def runs(seed, num_seeds=20, num_worlds=3):
    """[N, W] scores whose worlds differ in difficulty."""
    rng = np.random.default_rng(seed)
    means = np.linspace(0.2, 0.8, num_worlds)
    return np.clip(rng.normal(means, 0.1, (num_seeds, num_worlds)), 0, 1)


scores = st.tuples(st.integers(2, 12), st.integers(1, 4)).flatmap(
    lambda shape: st.lists(
        # Few values, so that there are ties.
        st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
        min_size=shape[0] * shape[1],
        max_size=shape[0] * shape[1],
    ).map(lambda values: np.reshape(values, shape))
)


@given(scores)
def test_the_interquartile_mean_is_the_trimmed_mean(x):
    np.testing.assert_allclose(
        statistics.interquartile_mean(x), stats.trim_mean(x, 0.25, axis=None), atol=1e-12
    )


@given(scores, st.randoms(use_true_random=False))
def test_the_probability_of_improvement_is_mann_whitneys(x, random):
    y = np.reshape(random.sample(list(x.ravel()), x.size), x.shape) + random.choice([0, 0.25])
    wanted = np.mean(
        [stats.mannwhitneyu(a, b).statistic / (len(a) * len(b)) for a, b in zip(x.T, y.T)]
    )
    found = statistics.probability_of_improvement(x, y)
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    np.testing.assert_allclose(found + statistics.probability_of_improvement(y, x), 1)


@pytest.mark.parametrize(
    "statistic",
    [statistics.mean, statistics.interquartile_mean],
)
def test_leading_axes_are_resamples(statistic):
    x = np.stack([runs(0), runs(1)])
    np.testing.assert_allclose(statistic(x), [statistic(x[0]), statistic(x[1])])


def test_statistics_of_two_arms_broadcast_over_resamples():
    x, y = np.stack([runs(0), runs(1)]), np.stack([runs(2), runs(3)])
    for statistic in (
        statistics.mean_difference,
        statistics.mean_ratio,
        statistics.probability_of_improvement,
    ):
        wanted = [statistic(a, b) for a, b in zip(x, y)]
        np.testing.assert_allclose(statistic(x, y), wanted)


def test_a_ratio_to_nothing_is_infinite():
    assert statistics.mean_ratio(runs(0), np.zeros((20, 3))) == np.inf


def test_a_profile_counts_runs_above_a_threshold():
    x, thresholds = runs(0), np.array([-0.1, 0.3, 0.5, 1.0])
    wanted = [sum(v > t for v in x.ravel()) / x.size for t in thresholds]
    np.testing.assert_allclose(statistics.performance_profile(x, thresholds), wanted)
    both = statistics.performance_profile(np.stack([x, x / 2]), thresholds)
    assert both.shape == (2, 4)
    np.testing.assert_allclose(both[0], wanted)


@pytest.mark.parametrize("num_seeds", [2, 5, 9])
def test_few_seeds_get_students_interval(num_seeds):
    x = runs(1, num_seeds, 1)[:, 0]
    found = interval(statistics.mean, x)
    wanted = stats.t.interval(0.95, num_seeds - 1, np.mean(x), stats.sem(x))
    np.testing.assert_allclose((found.low, found.high), wanted)
    assert found.value == pytest.approx(np.mean(x))
    # Of several worlds, a seed's mean over them is what is independent; 90 % is narrower.
    many = runs(2, num_seeds)
    found = interval(statistics.mean, many, level=0.9)
    per_seed = many.mean(axis=1)
    wanted = stats.t.interval(0.9, num_seeds - 1, np.mean(per_seed), stats.sem(per_seed))
    np.testing.assert_allclose((found.low, found.high), wanted)


def test_few_paired_seeds_get_students_interval_of_their_differences():
    x, y = runs(3, 6), runs(4, 6)
    difference = (x - y).mean(axis=1)
    found = interval(statistics.mean_difference, x, y)
    wanted = stats.t.interval(0.95, 5, np.mean(difference), stats.sem(difference))
    np.testing.assert_allclose((found.low, found.high), wanted)


def test_many_seeds_get_the_percentile_bootstrap():
    x = runs(5, 40, 1)
    found = interval(statistics.mean, x, resamples=20_000)
    wanted = stats.bootstrap(
        (x[:, 0],), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    np.testing.assert_allclose((found.low, found.high), wanted, atol=1e-3)


def test_the_bootstrap_is_stratified_by_world():
    """Worlds that differ are not resampled: seeds that do not differ leave no uncertainty."""
    x = np.tile([[0.1, 0.9]], (30, 1))
    found = interval(statistics.mean, x)
    np.testing.assert_allclose((found.low, found.high), 0.5)
    # Worlds are drawn independently: the variance of the mean over worlds adds up.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4))
    found = interval(statistics.mean, x, resamples=4000)
    wanted = 2 * stats.norm.ppf(0.975) * np.sqrt(np.sum(np.var(x, axis=0)) / 400) / 4
    assert found.high - found.low == pytest.approx(wanted, rel=0.06)


def test_a_difference_is_paired_by_seed():
    """What a seed does to both arms cancels."""
    hard = np.random.default_rng(0).normal(size=(40, 2))
    found = interval(statistics.mean_difference, hard + 0.1, hard)
    np.testing.assert_allclose((found.value, found.low, found.high), 0.1)
    # And under the bootstrap of a ratio likewise.
    found = interval(statistics.mean_ratio, 3 * runs(0), runs(0))
    np.testing.assert_allclose((found.value, found.low, found.high), 3.0)


def test_intervals_cover_what_they_claim():
    rng = np.random.default_rng(0)
    for num_seeds in (5, 30):
        hits = 0
        for _ in range(300):
            found = interval(statistics.mean, rng.exponential(size=(num_seeds, 2)), resamples=400)
            hits += found.low <= 1 <= found.high
        assert 0.87 <= hits / 300 <= 0.99


def test_draws_depend_on_the_seed_alone():
    x = runs(6)
    assert interval(statistics.interquartile_mean, x) == interval(statistics.interquartile_mean, x)
    assert interval(statistics.mean, x, seed=1) != interval(statistics.mean, x)


def test_blocks_of_resamples_change_nothing(monkeypatch):
    x = runs(7)
    whole = interval(statistics.mean, x, resamples=50)
    monkeypatch.setattr(statistics, "_BLOCK", 7 * x.size)
    assert interval(statistics.mean, x, resamples=50) == whole


@pytest.mark.parametrize(
    "arms, message",
    [
        ((np.ones((1, 3)),), "at least 2 seeds, got 1"),
        ((np.ones((3, 2)), np.ones((4, 2))), "same seeds and worlds"),
        ((np.ones((3, 0)),), "same seeds and worlds"),
        ((np.array([[1.0], [np.nan]]),), "arm 0 has the score nan with seed 1 in world 0"),
    ],
)
def test_scores_without_an_interval_are_refused(arms, message):
    statistic = statistics.mean if len(arms) == 1 else statistics.mean_difference
    with pytest.raises(ValueError, match=message):
        interval(statistic, *arms)


def test_a_level_is_a_share():
    with pytest.raises(ValueError, match="level must lie between 0 and 1, got 95"):
        interval(statistics.mean, runs(0), level=95)
