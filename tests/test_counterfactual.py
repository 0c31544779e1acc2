"""Critic-free estimators: the worked numbers of each, and laws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_estimators import make_batch

from focus.credit import baselines, counterfactual, forks, grouping


def close(got, expected):
    np.testing.assert_allclose(got, expected, atol=2e-5)


def ints(x):
    return np.asarray(x, np.int32)


def run(fn, batch, **hparams):
    return jax.jit(lambda b: fn(b, **hparams))(batch)


def test_gigpo_numbers():
    batch = make_batch([1, 0], state_key=ints([[0, 1], [0, 2]]))
    got = run(grouping.gigpo, batch, mode="mean_norm").segment_advantages
    close(got, [[0.975, 0.5], [-0.975, -0.5]])
    got = run(grouping.gigpo, batch).segment_advantages
    close(got, [[1.414213, 0.707106], [-1.414213, -0.707106]])


def test_gigpo_statistics_over_turns_and_the_grpo_limit():
    key = ints([[0, 1, 2], [3, -1, -1]])
    batch = make_batch([1, 0], num_segments=[3, 1], state_key=key)
    got = run(grouping.gigpo, batch, mode="mean_norm", episode_stats="turn").segment_advantages
    close(got, [[0.25, 0.25, 0.25], [-0.75, 0, 0]])
    close(run(grouping.gigpo, batch).advantages, baselines.grpo(batch).advantages)


def test_proxmo_numbers():
    sim = np.zeros((4, 4), np.float32) + np.eye(4, dtype=np.float32)
    batch = make_batch([1, 0, 0, 0], num_segments=[1] * 4, sim=sim)
    got = run(grouping.proxmo, batch, step_weight=0.0).segment_advantages[:, 0]
    close(got[:2], [0.762732, -0.249947])
    sim = np.array([[1, 0.9, 0], [0.9, 1, 0], [0, 0, 1]], np.float32)
    batch = make_batch([1, 0, 0.5], num_segments=[1] * 3, sim=sim)
    whole = run(grouping.proxmo, batch).segment_advantages
    episode = run(grouping.proxmo, batch, step_weight=0.0).segment_advantages
    np.testing.assert_allclose((whole - episode)[:, 0], [0.268949, -0.268949, 0], atol=2e-5)


def test_pgpo_numbers():
    batch = make_batch([1, 0, 0], state_key=ints([[0, 1], [0, 1], [0, 2]]))
    got = run(grouping.pgpo, batch, discount=1.0)
    close(
        got.segment_advantages,
        [[1.411298, 1.021375], [-0.320750, -1.021375], [-1.090548, 0]],
    )
    close(got.aux["potential"], [[1 / 3, 0.5], [1 / 3, 0.5], [1 / 3, 0]])
    close(got.aux["delta"], [[1 / 6, 0.5], [1 / 6, -0.5], [-1 / 3, 0]])
    close(got.aux["delta"].sum(1), np.array([1, 0, 0]) - got.aux["potential"][:, 0])


def test_tigpo_numbers():
    batch = make_batch(
        [1, 0, 0],
        num_segments=[1] * 3,
        state_key=ints([[0]] * 3),
        dist_goal=np.array([[1], [2], [np.inf]], np.float32),
        hist_score=np.array([0, 0, 1, 0], np.float32),
        hist_group=ints([0] * 4),
        is_revisit=np.array([True, True, False]),
    )
    got = run(grouping.tigpo, batch, distance_discount=0.2, episode_weight=0.0)
    close(got.aux["q"][:, 0], [0.2, 0.04, 0])
    close(got.segment_advantages[:, 0], [1.133893, -0.377964, -0.755929])
    got = run(grouping.tigpo, batch, step_weight=0.0)
    close(got.segment_advantages[:2, 0], [1.290994, -0.645497])


def test_a3_numbers():
    actions = ints([[0, 0], [0, 1], [1, 1]])
    batch = make_batch(
        [1, 0, 0],
        cluster=actions[..., None],
        action_key=actions,
        state_key=ints([[0, 1], [0, 1], [0, 2]]),
    )
    got = run(grouping.a3, batch)
    close(got.aux["backbone"][:, 0], [0.964027, 0, 0])
    close(got.aux["trie"][:, 0], [0.587926, -0.587926, 0])
    close(got.aux["tree"], [[0.537465, 0.4095], [-0.236976, -0.4095], [-0.273, 0]])
    close(
        got.segment_advantages,
        [[1.099931, 1.099854], [-1.010275, -1.066397], [-0.7291, 0]],
    )


def test_cvt_rl_numbers():
    keep = np.array([1, 1, 0, 1], np.float32)
    do = np.array([[0, 1, 0, 0], [1, 0, 1, 0]], np.float32)
    batch = make_batch(
        [1, 0],
        num_segments=[1, 1],
        mc_return=np.tile(keep, (2, 1, 1)),
        mc_mask=np.ones((2, 1, 4), bool),
        do_return=np.tile(do, (2, 1, 1, 1)),
        do_mask=np.ones((2, 1, 2, 4), bool),
        do_valid=np.ones((2, 1, 2), bool),
    )
    got = run(counterfactual.cvt_rl, batch, ddof=0)
    close(got.segment_advantages[0], [1.1875])
    close(got.aux["pccc"], [[0.375], [0.375]])
    for gate, expected in ((True, 1.0), (False, 0.4)):
        effect = counterfactual.doubly_robust(*map(jnp.asarray, (1.0, True, 0.7, 0.3, 0.5, gate)))
        close(effect, expected)


def test_cvt_rl_reads_the_models_of_the_doubly_robust_form():
    batch = make_batch(
        [1, 0],
        num_segments=[1, 1],
        mc_return=np.ones((2, 1, 1), np.float32),
        mc_mask=np.ones((2, 1, 1), bool),
        do_return=np.zeros((2, 1, 2, 1), np.float32),
        do_mask=np.ones((2, 1, 2, 1), bool),
        do_valid=np.array([[[True, False]], [[True, True]]]),
        propensity=np.full((2, 1, 2), 0.5, np.float32),
        m1=np.full((2, 1, 2), 0.7, np.float32),
        m0=np.full((2, 1, 2), 0.3, np.float32),
    )
    got = run(counterfactual.cvt_rl, batch, effect="doubly_robust", ddof=0)
    close(got.aux["pccc"], [[1.0], [-1.0]])  # .4 + (1 - .7) / .5, .4 + (0 - .7) / .5
    close(got.segment_advantages, [[1.5], [-1.5]])
    with pytest.raises(ValueError, match="effect='doubly_robust' needs the channel m1"):
        counterfactual.cvt_rl(dataclasses.replace(batch, m1=None), effect="doubly_robust")


def test_craft_numbers():
    gap = np.array([[0, 0], [np.log(3), 0], [0, 0]], np.float32)
    batch = make_batch([0.5, 1, 0], num_segments=[1] * 3, teacher_logp=gap)
    close(run(counterfactual.craft, batch).advantages, [[0.5, 0], [0, 0], [0.25, 0]])


def test_taco_numbers():
    call = np.array([[1, 1, 0], [1, 1, 0], [1, 0, 0]], bool)
    batch = make_batch(
        [1, 0, 1],
        num_segments=[3, 3, 2],
        probe_delta=np.array([[1, 0, np.nan], [-1, 0, np.nan], [0, np.nan, np.nan]], np.float32),
        is_call=call,
        is_answer=np.array([[0, 0, 1], [0, 0, 1], [0, 1, 0]], bool),
    )
    got = run(counterfactual.taco, batch, scale="none")
    close(got.aux["routed"], [[1 / 3, 0, 1 / 3], [-2 / 3, 0, -2 / 3], [0, 1 / 3, 0]])
    close(got.segment_advantages, [[4 / 3, 0, 1 / 3], [-5 / 3, 0, -2 / 3], [0, 1 / 3, 0]])


def test_pivoarl_numbers():
    batch = make_batch(
        [0, 1], num_segments=[3, 3], parent_traj=ints([-1, 0]), fork_segment=ints([-1, 2])
    )
    got = run(forks.pivoarl, batch)
    close(got.segment_advantages, [[0.5, 0.5, -0.5], [0, 0, 0.5]])
    close(got.aux["reflection_return"], [0, 1])
    assert got.mask[1].tolist() == [False] * 4 + [True] * 2
    got = run(forks.pivoarl, batch, prefix="zero").segment_advantages
    close(got, [[0, 0, -0.5], [0, 0, 0.5]])


@pytest.mark.parametrize("fork_rows", ["whole", "suffix"])
def test_pivoarls_retry_of_a_retry_belongs_to_the_same_original(fork_rows):
    """Lost; retried from segment 1, lost; that retried from segment 2, won."""
    whole = fork_rows == "whole"
    batch = make_batch(
        [0, 0, 1],
        num_segments=[3] * 3 if whole else [3, 2, 1],
        width=3,
        parent_traj=ints([-1, 0, 1]),
        fork_segment=ints([-1, 1, 2 if whole else 1]),
    )
    got = run(forks.pivoarl, batch, fork_rows=fork_rows).segment_advantages
    won, lost = 2 / 3, -1 / 3
    want = [[won, lost, lost], [0, won, lost], [0, 0, won]]
    for row, start in enumerate([0, 1, 2]):
        close(got[row][start if whole else 0 :][: 3 - start], want[row][start:])
    zero = run(forks.pivoarl, batch, fork_rows=fork_rows, prefix="zero").segment_advantages
    close(zero[0], [0, lost, lost])


def test_hpo_numbers():
    # The one paid row has frequencies h = [.2, .3, .5], both together p = [.5, .3, .2].
    paid = [0] * 2 + [1] * 3 + [2] * 5
    unpaid = [0] * 13 + [1] * 6 + [2]
    intent = ints([[*paid, *[-1] * 10], unpaid])
    batch = make_batch([1, 0], num_segments=[20, 20], intent=intent)
    got = run(counterfactual.hpo, batch)
    close(got.segment_advantages[0, :10], np.array([-0.35, 0.15, 0.65])[paid])
    close(got.segment_advantages[0, 10:], 0)
    close(got.aux["w1"], [0.3, 0.3])


@pytest.mark.parametrize(
    "cost, w1",
    [(1 - np.eye(3), 0.3), (np.abs(np.subtract.outer(range(3), range(3))), 0.6)],
)
def test_the_potential_of_a_general_metric_finds_the_distance(cost, w1):
    h, p = jnp.array([0.2, 0.3, 0.5]), jnp.array([0.5, 0.3, 0.2])
    f = np.asarray(counterfactual.wasserstein_potential(h, p, jnp.asarray(cost * 1.0)))
    assert np.all(f[:, None] - f <= cost + 1e-5)
    np.testing.assert_allclose(f @ (h - p), w1, atol=5e-3)


def test_hpo_under_a_line_of_intents_praises_in_order():
    paid, unpaid = [0] * 2 + [1] * 3 + [2] * 5, [0] * 13 + [1] * 6 + [2]
    intent = ints([[*paid, *[-1] * 10], unpaid])
    batch = make_batch([1, 0], num_segments=[20, 20], intent=intent)
    line = ((0.0, 1.0, 2.0), (1.0, 0.0, 1.0), (2.0, 1.0, 0.0))
    got = run(counterfactual.hpo, batch, cost=line)
    np.testing.assert_allclose(got.aux["w1"], 0.6, atol=5e-3)
    np.testing.assert_allclose(got.segment_advantages[0, [0, 2, 5]], [-0.7, 0.3, 1.3], atol=2e-2)
    with pytest.raises(ValueError, match="one row and column per intent"):
        counterfactual.hpo(batch, cost=((0.0, 1.0),))


def test_crafts_gate_moves_weight_from_the_penalty_to_the_teacher():
    gap, mask = jnp.array([[0.1, -0.1, 2.0, jnp.nan]]), jnp.array([[True, True, True, False]])
    activity, distil, kl = counterfactual.craft_weights(gap, mask, jnp.float32(0.5), decay=0.9)
    close(activity, 0.45 + 0.1 * 2 / 3)
    close(distil + kl, 1.0)
    busier = counterfactual.craft_weights(gap + 1, mask, jnp.float32(0.5), decay=0.9)
    assert busier[1] > distil and busier[2] < kl


def test_crafts_divergence_follows_the_sign_of_the_credit():
    p, q = np.array([0.9, 0.1]), np.array([0.5, 0.5])  # policy, teacher
    logp = jnp.log(jnp.array([[p, p, [jnp.nan, jnp.nan]]]))
    teacher = jnp.log(jnp.array([[q, q, q]]))
    mask = jnp.array([[True, True, False]])
    for credit, want in (
        ([[1.0, 1.0, 1.0]], np.sum(q * np.log(q / p))),
        ([[-1.0, -1.0, 1.0]], np.sum(p * np.log(p / q))),
    ):
        got = counterfactual.craft_divergence(logp, teacher, jnp.array(credit), mask)
        close(got, want)
        grad = jax.grad(counterfactual.craft_divergence)(logp, teacher, jnp.array(credit), mask)
        assert np.all(np.isfinite(grad))


def test_cbpo_numbers():
    batch = make_batch(
        [1, 0, 1, 0],
        num_segments=[3] * 4,
        parent_traj=ints([-1, 0, 0, -1]),
        fork_segment=ints([-1, 1, 2, -1]),
    )
    got = run(forks.cbpo, batch)
    close(
        got.segment_advantages,
        [[0, 1.05, 0.9], [0, -1.1, -1.1], [0, 0, 0.9], [-1, -1, -1]],
    )
    close(got.aux["z"], [0, 1, -1, 0])
    alone = dataclasses.replace(batch, parent_traj=jnp.full(4, -1))
    close(run(forks.cbpo, alone).advantages, baselines.grpo(alone, ddof=0).advantages)


@pytest.mark.parametrize("fn", [forks.pivoarl, forks.cbpo])
def test_forks_that_hold_their_suffix_alone_get_the_same_credit(fn):
    outcome, start = [1, 0, 1, 0, 0], [-1, 1, 2, -1, 2]
    parent = ints([-1, 0, 0, -1, 0])
    whole = make_batch(outcome, num_segments=[3] * 5, parent_traj=parent, fork_segment=ints(start))
    lengths = [3 - max(s, 0) for s in start]
    suffix = make_batch(outcome, num_segments=lengths, parent_traj=parent, fork_segment=ints(start))
    expected, got = run(fn, whole), run(fn, suffix, fork_rows="suffix")
    for row, length in enumerate(lengths):
        close(got.segment_advantages[row, :length], expected.segment_advantages[row, 3 - length :])
    assert got.mask.sum() == expected.mask.sum()
    with pytest.raises(ValueError, match="fork_rows='half'"):
        fn(whole, fork_rows="half")


def test_iapo_numbers():
    edge = np.zeros((2, 3, 3), np.int8)
    edge[0, 0, 2] = 1
    segment = ints([[0, 0, 1, 1, 1, 1, 2, 2]] * 2)
    batch = make_batch(
        [1, 0],
        num_segments=[3, 3],
        edge=edge,
        token_segment=segment,
        token_mask=segment >= 0,
        behaviour_logp=np.zeros(segment.shape, np.float32),
    )
    got = run(counterfactual.iapo, batch)
    close(got.aux["weight"], [[1.6, 0.8, 0.8], [1, 1, 1]])
    close(got.advantages.sum(1), baselines.grpo(batch).advantages.sum(1))


@pytest.mark.parametrize(
    "backup, advantage, expected",
    [
        (
            "child_mean",
            "node_value",
            [-0.176777, 0.353553, -0.707107, 1.414214, -0.707107, -0.707107],
        ),
        ("child_mean", "diff_parent", [-0.176777, 0.530330, -0.530330, 1.060660, -1.060660, 0]),
        (
            "child_mean",
            "diff_global",
            [-0.176777, 0.530330, -0.530330, 1.590990, -0.530330, -0.530330],
        ),
        (
            "child_mean",
            "diff_localglobal",
            [-0.176777, 1.060660, -1.060660, 2.651650, -1.590990, -0.530330],
        ),
        (
            "child_softmax",
            "node_value",
            [0.088388, 0.883883, -0.707107, 1.414214, -0.707107, -0.707107],
        ),
        ("leaf_mean", "node_value", [0, 0.353553, -0.707107, 1.414214, -0.707107, -0.707107]),
    ],
)
def test_at2po_numbers(backup, advantage, expected):
    batch = make_batch(
        [1, 0, 0],
        parent=ints([-1, 0, 0, 1, 1, 2]),
        leaf_traj=ints([-1, -1, -1, 0, 1, 2]),
        tree_id=ints([0] * 6),
        node_entropy=np.array([0, 0, 0, np.log(3), 0, 0], np.float32),
        node_of_segment=ints([[1, 3], [1, 4], [2, 5]]),
    )
    got = run(forks.at2po, batch, backup=backup, advantage=advantage)
    close(got.aux["node_advantage"], expected)
    close(got.segment_advantages[0], np.array(expected)[[1, 3]])
