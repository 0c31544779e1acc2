"""Rules of published rollout controllers: their worked numbers."""

import numpy as np
import pytest

from focus.branching import controllers


def test_dapo_refills_the_group_without_spread():
    got = controllers.dapo_refill(
        np.array([1.0, 0, 1, 1]), np.array([0, 0, 1, 1]), np.ones(4, bool)
    )
    assert got.tolist() == [False, False, True, True]


def test_spo_tree():
    assert controllers.spo_tree_leaves() == (6, 36, 216)
    with pytest.raises(ValueError, match="factors"):
        controllers.spo_tree_leaves((6, 0))


def test_at2po_scores():
    got = controllers.at2po_scores(np.array([1, 1.02, 0.5]), np.array([0, 1, 0]))
    np.testing.assert_allclose(got, [1, 0.97, 0.5])
    assert controllers.top_mask(got, np.ones(3, bool), 1).tolist() == [True, False, False]


def test_patr_branches_high_and_stops_low():
    branch, stop = controllers.patr_choice(
        np.array([0.9, 0.2, 0.6, np.nan]), np.array([1, 1, 1, 0], bool), branch=2, stop_below=0.3
    )
    assert branch.tolist() == [True, False, True, False]
    assert stop.tolist() == [False, True, False, False]


def test_pivoarl_retries_failures_at_the_pivot():
    got = controllers.pivoarl_forks(
        np.array([0, 1, 0], bool), np.array([2, 1, -1]), np.ones(3, bool)
    )
    assert got.tolist() == [2, -1, -1]


def test_cbpo_priority():
    got = controllers.cbpo_priority(np.array([0.3, 0.1, -0.2]), np.zeros(3), np.zeros(3))
    np.testing.assert_allclose(got, [0.8, 0.4, 0], atol=1e-6)
    np.testing.assert_allclose(controllers.cbpo_priority(0.3, 1, 0), 0.696440, atol=2e-5)


def test_tigpo_waits():
    got = controllers.tigpo_revisit(np.array([-1, 5, 6]), 15)
    assert got.tolist() == [False, True, False]
