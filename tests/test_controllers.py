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


def test_tigpo_explores_and_revisits_the_longest_unseen():
    last_seen = np.array([-1, 3, 0, 14, -1, 1, -1])
    explore, revisit = controllers.tigpo_schedule(last_seen, 15, explore=2, revisit=2)
    assert explore.tolist() == [True, False, False, False, True, False, False]
    assert revisit.tolist() == [False, False, True, False, False, True, False]


def test_vineppo_continues_from_every_state():
    mask = np.array([[True, True, True], [True, False, False]])
    got = controllers.per_state(mask, controllers.FAN_OUT["vineppo"])
    assert got.sum() == 9 * 4 and got[1, 1] == 0
    assert controllers.FAN_OUT["pro_cua"] == 8 and controllers.FAN_OUT["sweet_rl"] == 16


def test_interventions_need_a_call_where_they_change_one():
    mask, call = np.array([[True, True, False]]), np.array([[True, False, True]])
    kinds = controllers.arms(mask, "cvt_rl", call)
    assert kinds[0].tolist() == [[True] * 4, [True, True, True, False], [False] * 4]
    probes = controllers.arms(mask, "taco", call)
    assert probes[0].tolist() == [[True] * 2, [False] * 2, [False] * 2]
    with pytest.raises(ValueError, match="'cbpo'.*taco"):
        controllers.arms(mask, "cbpo", call)


def test_at2po_keeps_22_leaves():
    picked = controllers.at2po_nodes(np.linspace(0, 1, 10), np.zeros(10), np.ones(10, bool))
    assert picked.tolist() == [False] * 4 + [True] * 6
    assert 10 + 2 * int(picked.sum()) == 22


def test_sweet_rl_pairs_the_best_with_the_worst():
    advantage = np.array([0.3, -1, 2, 0, np.nan])
    chosen, rejected = controllers.sweet_rl_pairs(
        advantage, np.array([1, 1, 1, 1, 0], bool), pairs=4
    )
    assert chosen.tolist() == [True, False, True, False, False]
    assert rejected.tolist() == [False, True, False, True, False]


def test_cbpo_measures_a_rise_of_entropy():
    entropy = np.where(np.arange(60) < 30, 0.5, 1.5)
    rise = controllers.cbpo_entropy_rise(entropy, np.ones(60, bool))
    np.testing.assert_allclose(rise[30], 1.0, atol=1e-5)
    np.testing.assert_allclose(rise[25], 0.75, atol=1e-5)
    assert not rise[:20].any() and not rise[41:].any()


def test_cbpo_branches_apart_and_only_where_it_is_worth_it():
    rise = np.full(200, -1.0)
    rise[[10, 20, 100, 199]] = [0.3, 0.4, 0.1, 0.0]
    none, every = np.zeros(200), np.ones(200, bool)
    got = np.flatnonzero(controllers.cbpo_branch_points(rise, none, none, every))
    # 10 is too near to 20; 199 has a priority of .2.
    assert got.tolist() == [20, 100]
    crowded = np.flatnonzero(controllers.cbpo_branch_points(rise, none, 3 * (rise == 0.4), every))
    assert crowded.tolist() == [10, 100]
    assert not controllers.cbpo_branch_points(rise, none + 4, none, every).any()
