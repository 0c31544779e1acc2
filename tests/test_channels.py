"""Channels that a run makes for its estimator from its own rollouts."""

import dataclasses
import random

import numpy as np
import pytest
import tiny
from random_trajectories import make_forest, make_trajectory

from focus.credit import ESTIMATORS, estimate
from focus.learner import signals as channels
from focus.learner.batches import credit_batch
from focus.learner.packing import pack_trajectories
from focus.run import experiment

SHAPE = {"num_segments": 4, "num_tokens": 40, "num_rows": 12}


def make_source(trajectories, **fields):
    packed = pack_trajectories(
        trajectories, row_length=128, max_nodes=32, max_states=64, rows_multiple=1
    )
    batch = credit_batch(trajectories, **SHAPE, num_continuations=6)
    entropy = np.random.default_rng(0).uniform(size=packed.rows.tokens.shape).astype(np.float32)
    defaults = {
        "trajectories": trajectories,
        "batch": batch,
        "state_key": lambda state: state,
        "packed": packed,
        "entropy": entropy,
        "ref_logp": lambda: -entropy,
        "progress": 0.25,
    }
    return channels.Source(**{**defaults, **fields})


def made_by_producers():
    return {c for producer in channels.PRODUCERS for c in producer.channels}


@pytest.mark.parametrize("seed", range(3))
def test_what_is_filled_has_the_shape_that_was_promised(seed):
    source = make_source(make_forest(seed))
    names = made_by_producers()
    batch = channels.fill(names, source)
    rows, width, tokens = 12, 4, 40
    sizes = {"B": rows, "S": width, "L": tokens, "L+1": tokens + 1, "M": rows * (width + 2),
             "D": channels.EMBEDDING_SIZE, "scopes": 4}  # fmt: skip
    for name, (axes, dtype) in channels.available(["critic", "branches", "citations"]).items():
        if name in names:
            got = getattr(batch, name)
            assert got.shape == tuple(sizes[a] for a in axes.split()), name
            assert got.dtype == dtype, name
            assert np.all(np.isfinite(got))
    assert channels.fill((), source) == source.batch


def histories(trajectories):
    """All that each token was conditioned on: generations so far, and the prompt in front of it."""
    at_state, out = {}, {}
    for b, trajectory in enumerate(trajectories):
        past = at_state.get((trajectory.parent, trajectory.parent_state), (trajectory.group_id,))
        at_state[trajectory.id, 0] = past
        place = 0
        for j, segment in enumerate(trajectory.segments):
            for generation in segment.generations:
                past = (*past, generation.prompt_ids)
                for token in generation.output_ids:
                    out[b, place] = past
                    place, past = place + 1, (*past, token)
            at_state[trajectory.id, j + 1] = past
        out[b, place] = past
    return out


@pytest.mark.parametrize("seed", range(4))
def test_prefix_keys_are_equal_where_everything_before_is(seed):
    trajectories = make_forest(seed, bases=4)
    key = channels.fill(["prefix_key"], make_source(trajectories)).prefix_key
    past = histories(trajectories)
    assert {(b, t) for b, t in np.argwhere(key >= 0).tolist()} == set(past)
    for a in past:
        for b in past:
            assert (key[a] == key[b]) == (past[a] == past[b])


def test_a_branch_hangs_from_the_segment_that_led_to_its_state():
    rng = random.Random(0)
    base = make_trajectory(rng, "b", turns=3)
    branch = make_trajectory(
        rng, "b/0", base.states[2], turns=2, parent="b", parent_state=2, outcome=0.0
    )
    other = make_trajectory(rng, "c", turns=1, task=1)
    first = make_trajectory(rng, "b/1", base.states[0], turns=1, parent="b", parent_state=0)
    batch = channels.fill(made_by_producers(), make_source([base, other, branch, first]))
    node, parent = batch.node_of_segment, batch.parent
    assert parent[node[2, 0]] == node[0, 1]
    assert parent[node[0, 2]] == node[0, 1]
    assert parent[node[3, 0]] == parent[node[0, 0]] != parent[node[1, 0]]
    used = np.flatnonzero((parent >= 0) | (batch.tree_id >= 0))
    assert np.all(parent[used] < used)
    for row, trajectory in enumerate((base, other, branch, first)):
        (leaf,) = np.flatnonzero(batch.leaf_traj == row)
        assert parent[leaf] == node[row, len(trajectory.segments) - 1]
        assert batch.tree_id[leaf] == trajectory.group_id
    assert batch.parent_traj[:5].tolist() == [-1, -1, 0, 0, -1]
    assert batch.fork_segment[:5].tolist() == [-1, -1, 2, 0, -1]
    credit = estimate("spo_tree", batch)
    # Two of three ways on from the start are right, one of two from the second segment.
    np.testing.assert_allclose(credit.aux["node_value"][node[0, :3]], [0.5, 0.5, 1.0])
    np.testing.assert_allclose(credit.segment_advantages[0, :3], [-0.25, 0.0, 0.5])
    assert np.all(np.isfinite(estimate("at2po", batch, backup="child_softmax").advantages))


@pytest.mark.parametrize("seed", range(3))
def test_cut_points_at_all_sampled_states_say_what_vineppo_says(seed):
    source = make_source(make_forest(seed, bases=3, branches=6))
    batch = channels.fill(["cut", "cut_value", "cut_mask"], source)
    got = estimate("spo_chain", batch, prob_threshold=1.0)
    expected = estimate("vineppo", batch, gaps="merge")
    np.testing.assert_allclose(got.advantages, expected.advantages, atol=1e-6)


def test_states_and_actions_have_keys_within_their_task():
    rng = random.Random(1)
    rows = [make_trajectory(rng, f"b{i}", turns=3, task=i // 2) for i in range(4)]

    def played(trajectory, texts, envs):
        segments = [
            dataclasses.replace(s, text=t, info={"tool": t.split()[0], "error": e})
            for s, (t, e) in zip(trajectory.segments, texts)
        ]
        states = [dataclasses.replace(s, env=e) for s, e in zip(trajectory.states, envs)]
        return dataclasses.replace(trajectory, segments=tuple(segments), states=tuple(states))

    search, other, answer = (("search old town", None), ("search old", "usage"), ("answer x", None))
    rows = [
        played(rows[0], [search, other, answer], "abcd"),
        played(rows[1], [search, search, answer], "abbz"),
        played(rows[2], [search, search, answer], "abcd"),
        played(rows[3], [other, other, other], "abcd"),
    ]
    batch = channels.fill(made_by_producers(), make_source(rows))
    state, following, action = batch.state_key, batch.next_state_key, batch.action_key
    assert state[0, 0] == state[1, 0] and state[0, 1] == state[1, 1] == state[1, 2]
    assert state[0, 2] != state[1, 2] and not set(state[0, :3]) & set(state[2, :3])
    np.testing.assert_array_equal(following[:, :2], state[:, 1:3])
    assert following[0, 2] not in state and following[0, 2] != following[1, 2]
    assert action[0, 0] == action[1, 0] == action[1, 1] != action[0, 1]
    first, two, three, whole = np.moveaxis(batch.cluster, 2, 0)
    assert first[0, 0] == first[0, 1] and two[0, 0] == two[0, 1]
    assert three[0, 0] != three[0, 1]
    np.testing.assert_array_equal(whole, action)
    assert np.all(state[:, 3] == -1) and np.all(state[4:] == -1)
    np.testing.assert_array_equal(batch.valid[0, :3], [True, False, True])
    np.testing.assert_array_equal(batch.is_answer[0, :3], [False, False, True])
    np.testing.assert_array_equal(batch.is_call[0, :3], [True, True, False])


def test_embeddings_compare_what_the_policy_read():
    rng = random.Random(2)
    rows = [make_trajectory(rng, f"b{i}", turns=1, prompt=p)
            for i, p in enumerate(((1, 2, 3), (3, 2, 1), (9, 9)))]  # fmt: skip
    emb = channels.fill(["emb"], make_source(rows)).emb[:3, 0]
    unit = emb / np.linalg.norm(emb, axis=1, keepdims=True)
    np.testing.assert_allclose(unit @ unit.T, [[1, 1, 0], [1, 1, 0], [0, 0, 1]], atol=1e-6)


# --- before a run --------------------------------------------------------------------------------

RUNS = {name for name in ESTIMATORS if ESTIMATORS[name].kind == "estimator"}


def test_a_run_knows_what_its_estimator_reads():
    def reads(name, **hparams):
        core = channels.read_channels(name, hparams, ["branches"])
        return core - set(channels._CORE)

    assert reads("gigpo") == {"state_key"}
    assert reads("tempo") == {"prefix_key"}
    assert reads("proxmo") == {"emb"}
    assert reads("at2po") == {"parent", "leaf_traj", "tree_id", "node_of_segment"}
    assert reads("at2po", backup="child_softmax") == reads("at2po") | {"node_entropy"}
    assert reads("spo_chain") == {"cut", "cut_value", "cut_mask"}
    cited = {"cited", "match_class", "is_answer", "summary_mask", "progress"}
    core = channels.read_channels("self_credit", {}, ["citations"])
    assert core - set(channels._CORE) == cited
    # A reference pass is paid for only where it is read.
    assert reads("reinforce_pp") == set()
    assert reads("reinforce_pp", kl_coef=0.1) == {"ref_logp"}


@pytest.mark.parametrize(
    "method, estimator, options, message",
    [
        ("grpo", "ppo", "", r"'ppo' reads value, .*critic\.enabled"),
        ("grpo", "spo_chain", "", r"reads cut, cut_value.*continuations.*branching\.rule"),
        ("grpo", "cbpo", "", r"reads parent_traj, fork_segment.*left which.*branching\.rule"),
        ("grpo", "tigpo", "", r"dist_goal, hist_score.*keep a graph of states per task"),
        ("grpo", "hpo", "", r"intent.*cluster the actions"),
        ("grpo", "self_credit", "", r"reads cited.*context\.manager=cite_summary"),
        ("grpo", "gigpo", "mode=fancy", r"mode='fancy'.*mean_norm"),
        ("grpo", "gigpo", "weight=2", r"gigpo has no hyperparameter weight.*step_weight"),
        ("grpo", "gigpo", "step_weight", r"write 'step_weight' as name=value"),
        ("grpo", "gspo", "", r"credit\.estimator: gspo is a loss"),
        ("grpo", "grpo", "eps=abc", r"credit\.options: grpo: eps='abc' must be a number.*1e-06"),
        ("grpo", "grpo", "ddof=1.5", r"ddof=1\.5 must be a whole number"),
        ("grpo", "grpo", "eps={[]}", r"eps='\{\[\]\}' must be a number"),
        ("grpo", "grpo", f"ddof={10**20}", r"ddof=10+ must be a whole number"),
        ("grpo", "grpo", "ddof=True", r"ddof=True must be a whole number"),
        ("grpo", "grpo", "singleton=0", r"singleton=0 must be a word.*'zero'"),
        ("grpo", "dapo", "drop_flat_groups=1", r"drop_flat_groups=1 must be True or False"),
        ("grpo", "grpo", "eps=1 ddof=0 eps=2", r"gives eps twice"),
    ],
)
def test_an_estimator_that_cannot_run_is_refused_at_the_start(method, estimator, options, message):
    config = tiny.get_config(method)
    config.credit.estimator, config.credit.options = estimator, options
    with pytest.raises(ValueError, match=message):
        experiment.validate(config)


def test_options_reach_the_estimator_and_papers_keep_their_defaults():
    config = tiny.get_config("grpo")
    config.credit.discount = 0.5
    config.credit.estimator = "gigpo"
    config.credit.options = "mode=mean_norm step_weight=0.5 ddof=0"
    assert experiment.estimator_hparams(config) == {
        "mode": "mean_norm", "step_weight": 0.5, "ddof": 0,
    }  # fmt: skip
    config = tiny.get_config("focus")
    config.credit.discount = 0.5
    assert experiment.estimator_hparams(config)["discount"] == 0.5


def test_every_estimator_runs_or_says_what_is_missing():
    """With everything that a run can make, this much of the library trains."""
    trains = set()
    for name in RUNS:
        try:
            channels.read_channels(name, {}, ["critic", "branches"])
            trains.add(name)
        except ValueError as error:
            assert f"{name!r} reads" in str(error)
    assert trains >= {
        "gigpo", "proxmo", "pgpo", "tempo", "at2po", "spo_chain", "spo_tree", "a3", "g2po",
        "gagpo", "cbpo", "pivoarl", "spro", "grpo_lambda", "dapo", "opo", "reinforce_pp",
        "reinforce_pp_baseline",
    }  # fmt: skip
