"""Packing keeps every token and state, once, and rows mean the same as separate sequences."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trajectories import VOCAB, make_forest, make_trajectory

from focus.learner.batches import credit_batch
from focus.learner.packing import pack_trajectories, take_rows
from focus.policy import transformer
from focus.policy.logprobs import chunked_logprobs
from focus.types import Generation, Segment, State, Trajectory

CONFIG = transformer.ModelConfig(
    vocab_size=VOCAB,
    d_model=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=24,
    max_context=128,
)
PARAMS = transformer.init_params(CONFIG, jax.random.key(0))


def pack(trajectories, row_length=64, max_nodes=8, max_states=16, rows_multiple=1):
    return pack_trajectories(
        trajectories,
        row_length=row_length,
        max_nodes=max_nodes,
        max_states=max_states,
        rows_multiple=rows_multiple,
    )


@jax.jit
def row_values(params, rows):
    """Log-prob of every token given its parent, entropy, and hidden states at states."""
    hidden = transformer.hidden_states(
        CONFIG,
        params,
        rows.tokens,
        positions=rows.positions,
        node_id=rows.node_id,
        visible_until=rows.visible_until,
    )
    before = jnp.take_along_axis(hidden, jnp.maximum(rows.parent, 0)[..., None], axis=1)
    logp, _ = chunked_logprobs(before, transformer.unembedding(CONFIG, params), rows.tokens)
    at_states = jnp.take_along_axis(hidden, jnp.maximum(rows.state_pos, 0)[..., None], axis=1)
    return logp, at_states


def separate_rows(forest, length=48):
    """The definition: every generation on its own prompt and every state's prompt, one per row.

    Returns ids [G, length], and per trajectory the (row, place) of its tokens and its states.
    """
    rows, tokens, states = [], [], []
    for trajectory in forest:
        at = []
        for segment in trajectory.segments:
            for g in segment.generations:
                first = len(g.prompt_ids)
                at += [(len(rows), first + i) for i in range(len(g.output_ids))]
                rows.append(g.prompt_ids + g.output_ids)
        tokens.append(at)
        states.append({})
        for j, state in enumerate(trajectory.states):
            if state.prompt_ids:
                states[-1][j] = (len(rows), len(state.prompt_ids) - 1)
                rows.append(state.prompt_ids)
    ids = np.zeros((128, length), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return ids, tokens, states


@jax.jit
def separate_values(params, ids):
    """Log-prob of every token of plain causal rows, and their hidden states."""
    hidden = transformer.hidden_states(CONFIG, params, ids)
    logp = jax.nn.log_softmax(transformer.unembed(CONFIG, params, hidden[:, :-1]))
    logp = jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(logp, ((0, 0), (1, 0))), hidden


@pytest.mark.parametrize(
    "seed,row_length,max_nodes,repeats", [(0, 64, 8, False), (7, 30, 8, True), (5, 40, 3, True)]
)
def test_packed_rows_mean_the_same_as_separate_sequences(seed, row_length, max_nodes, repeats):
    """Log-probs, hidden states at states and gradients; shared prefixes count once (pitfall 22)."""
    forest = make_forest(seed)
    packed = pack(forest, row_length, max_nodes)
    assert bool(packed.repeated_tokens) == repeats
    ids, tokens, states = separate_rows(forest)
    logp, at_states = (np.asarray(x) for x in row_values(PARAMS, packed.rows))
    want_logp, want_hidden = (np.asarray(x) for x in separate_values(PARAMS, ids))
    got_logp = packed.to_trajectories(logp)
    got_states = packed.states_to_trajectories(at_states)
    for b in range(len(forest)):
        want = [want_logp[place] for place in tokens[b]]
        np.testing.assert_allclose(got_logp[b, : len(want)], want, atol=1e-5)
        for j, place in states[b].items():
            np.testing.assert_allclose(got_states[b, j], want_hidden[place], atol=1e-5)

    once = np.zeros(ids.shape, bool)
    once[tuple(np.array([place for at in tokens for place in at]).T)] = True

    def packed_loss(params):
        return jnp.mean(row_values(params, packed.rows)[0], where=packed.rows.generated_mask)

    def separate_loss(params):
        return jnp.mean(separate_values(params, ids)[0], where=once)

    got, want = jax.jit(jax.grad(packed_loss))(PARAMS), jax.jit(jax.grad(separate_loss))(PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), row_length=st.sampled_from([36, 64, 128]))
def test_every_generated_token_and_every_state_is_stored_once(seed, row_length):
    """Ids that are trained are the ids that were sampled (pitfall 20), each exactly once."""
    forest = make_forest(seed, bases=4, branches=6)
    packed = pack(forest, row_length, rows_multiple=3)
    rows = packed.rows
    assert rows.num_rows % 3 == 0
    assert rows.generated_mask.sum() == sum(t.num_tokens for t in forest)
    assert len(np.unique(packed.token_place, axis=0)) == len(packed.token_place)
    ids = packed.to_trajectories(rows.tokens, fill=-1)
    for b, trajectory in enumerate(forest):
        sampled = [x for s in trajectory.segments for g in s.generations for x in g.output_ids]
        np.testing.assert_array_equal(ids[b, : len(sampled)], sampled)
    # Following `parent` from a state's position spells the state's prompt.
    for (b, j), (r, p) in zip(packed.state_index, packed.state_place):
        at, spelled = rows.state_pos[r, p], []
        while at >= 0:
            spelled.append(int(rows.tokens[r, at]))
            assert (
                rows.positions[r, at] == rows.positions[r, rows.parent[r, at]] + 1
                or rows.parent[r, at] == -1
            )
            at = rows.parent[r, at]
        assert tuple(reversed(spelled)) == forest[b].states[j].prompt_ids
    with_prompt = {
        (b, j) for b, t in enumerate(forest) for j, s in enumerate(t.states) if s.prompt_ids
    }
    assert {tuple(x) for x in packed.state_index.tolist()} == with_prompt
    distinct = {(forest[b].states[j].prompt_ids, forest[b].states[j].span) for b, j in with_prompt}
    assert len(distinct) <= (rows.state_pos >= 0).sum() <= len(with_prompt)
    assert (rows.node_id >= 0).sum() == packed.used_tokens
    values = np.random.default_rng(seed).normal(size=(len(forest), packed.num_tokens))
    mask = packed.to_trajectories(np.ones(rows.tokens.shape, bool), fill=False)
    np.testing.assert_array_equal(
        packed.to_trajectories(packed.to_rows(values)), np.where(mask, values, 0.0)
    )


def test_a_shared_prefix_is_stored_once_and_repeated_only_across_rows():
    """k branches of one state cost k tails, not k prefixes (pitfall 22)."""
    rng = random.Random(0)
    base = make_trajectory(rng, "b", turns=3)
    branches = [
        make_trajectory(rng, f"b/{k}", base.states[2], turns=1, parent="b", parent_state=2)
        for k in range(4)
    ]
    tails = sum(b.num_tokens for b in branches)
    whole = len(base.segments[-1].generations[0].prompt_ids) + len(
        base.segments[-1].generations[0].output_ids
    )
    packed = pack([base, *branches])
    assert packed.used_tokens == whole + tails and packed.repeated_tokens == 0
    assert packed.rows.num_rows == 1
    # One slot for the shared state, seen by the base and all four branches.
    same = {
        tuple(p)
        for (b, j), p in zip(packed.state_index.tolist(), packed.state_place.tolist())
        if (b == 0 and j == 2) or (b > 0 and j == 0)
    }
    assert len(same) == 1
    few_nodes = pack([base, *branches], max_nodes=3)
    prefix = len(base.states[2].prompt_ids)
    extra_rows = few_nodes.rows.num_rows - 1
    assert extra_rows == 1 and few_nodes.repeated_tokens == prefix * extra_rows
    assert few_nodes.rows.generated_mask.sum() == packed.rows.generated_mask.sum()


def test_order_of_trajectories_and_empty_rows_change_nothing():
    forest = make_forest(5, bases=4, branches=5)
    packed, padded = pack(forest), pack(forest, rows_multiple=7)
    order = np.random.default_rng(0).permutation(len(forest))
    shuffled = pack([forest[i] for i in order])
    want = packed.to_trajectories(np.asarray(row_values(PARAMS, packed.rows)[0]))
    got = shuffled.to_trajectories(np.asarray(row_values(PARAMS, shuffled.rows)[0]))
    np.testing.assert_allclose(got, want[order], atol=1e-5)
    logp = np.asarray(row_values(PARAMS, padded.rows)[0])
    np.testing.assert_allclose(padded.to_trajectories(logp), want, atol=1e-5)
    assert np.isfinite(logp).all()
    assert padded.packing_efficiency < packed.packing_efficiency <= 1


def test_padding_may_be_poison():
    """Values at padding, NaN included, never reach a trajectory."""
    packed = pack(make_forest(1), rows_multiple=4)
    values = np.where(packed.rows.generated_mask, 1.0, np.nan)
    np.testing.assert_array_equal(
        packed.to_trajectories(values).sum(), packed.rows.generated_mask.sum()
    )


def test_the_real_end_of_turn_token_is_trained_and_pads_are_not():
    """Pad and end-of-sequence share id 0 (pitfall 16): the mask comes from what was sampled."""
    generation = Generation("act", (5, 6), (7, 0), (-0.1, -0.2), "stop")
    state = State(None, None, (5, 6), 0)
    trajectory = Trajectory(
        "b",
        "t",
        0,
        (state, State(None, None, (), 1)),
        (Segment((generation,), "", ""),),
        1.0,
        True,
        "terminal",
    )
    rows = pack([trajectory], row_length=8).rows
    np.testing.assert_array_equal(rows.tokens[0], [5, 6, 7, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(rows.generated_mask[0], [0, 0, 1, 1, 0, 0, 0, 0])


def test_a_long_trajectory_of_short_turns_keeps_all_of_its_tokens():
    """No per-turn cap is applied to the merged trajectory (pitfall 21)."""
    trajectory = make_trajectory(random.Random(0), "b", turns=30)
    packed = pack([trajectory], row_length=256, max_states=40)
    assert packed.rows.generated_mask.sum() == trajectory.num_tokens > 4 * 10


def test_messages_name_the_numbers_and_the_way_out():
    rng = random.Random(0)
    base = make_trajectory(rng, "b", turns=3)
    with pytest.raises(ValueError, match=r"a row holds 6; raise learner.row_length"):
        pack([base], row_length=6)
    with pytest.raises(ValueError, match=r"3 states .* row of 2; raise learner.max_states"):
        pack([base], max_states=2)
    branch = make_trajectory(rng, "b/0", base.states[1], turns=1, parent="b", parent_state=1)
    with pytest.raises(ValueError, match=r"2 nested nodes .* row of 1; raise learner.max_nodes"):
        pack([base, branch], max_nodes=1)
    wrong = dataclasses.replace(branch, parent_state=2)
    with pytest.raises(ValueError, match="does not start with the prompt of state 2 of b"):
        pack([base, wrong])
    first = base.segments[1].generations[0]
    retokenised = dataclasses.replace(first, prompt_ids=(0,) + first.prompt_ids[1:])
    segments = list(base.segments)
    segments[1] = dataclasses.replace(segments[1], generations=(retokenised,))
    with pytest.raises(ValueError, match="does not extend the .* part at token 0"):
        pack([dataclasses.replace(base, segments=tuple(segments))])


def test_a_cut_state_longer_than_a_row_is_read_at_the_last_token_that_fits():
    trajectory = make_trajectory(random.Random(0), "b", turns=2, end="context_limit")
    last = trajectory.states[-1]
    final = dataclasses.replace(last, prompt_ids=last.prompt_ids + (9,) * 100)
    packed = pack([dataclasses.replace(trajectory, states=(*trajectory.states[:-1], final))], 40)
    assert packed.clipped_states == 1
    (b, j), (r, p) = packed.state_index[-1], packed.state_place[-1]
    assert (b, j) == (0, 2) and packed.rows.state_pos[r, p] == 39


def test_taken_rows_are_followed_by_empty_ones():
    packed = pack(make_forest(3), row_length=40)
    taken = take_rows(packed.rows, np.array([0]), 3)
    np.testing.assert_array_equal(taken.tokens[0], packed.rows.tokens[0])
    assert (taken.node_id[1:] == -1).all() and (taken.state_pos[1:] == -1).all()
    assert not taken.generated_mask[1:].any()


def test_credit_batch_lays_out_tokens_segments_and_missing_outcomes():
    rng = random.Random(0)
    base = make_trajectory(rng, "b", turns=3, compact_after=0, outcome=0.25)
    cut = make_trajectory(rng, "c", turns=2, end="budget", outcome=None)
    failed = dataclasses.replace(make_trajectory(rng, "d", turns=1), end="failed", outcome=0.0)
    unscored = make_trajectory(rng, "e", turns=1, outcome=None)
    wins = [
        make_trajectory(
            rng, f"b/{k}", base.states[1], turns=2, parent="b", parent_state=1, outcome=o
        )
        for k, o in enumerate([1.0, None, 0.5])
    ]
    batch = credit_batch(
        [base, cut, failed, unscored],
        num_segments=(2, 4),
        num_tokens=(2, 64),
        num_rows=(4, 8),
        num_continuations=2,
        continuations=wins,
        value=np.ones((4, 3)),
    )
    assert batch.segment_mask.shape == (4, 4) and batch.token_mask.shape == (4, 64)
    np.testing.assert_array_equal(batch.row_mask, [True, True, False, False])
    np.testing.assert_array_equal(batch.truncated, [False, True, False, False])
    np.testing.assert_array_equal(batch.outcome, [0.25, np.nan, 0.0, np.nan])
    np.testing.assert_array_equal(
        batch.token_mask.sum(1), [t.num_tokens for t in (base, cut, failed, unscored)]
    )
    # Summary tokens belong to the segment that they close.
    assert (
        (batch.token_segment[0] == 0).sum()
        == base.segments[0].num_tokens
        > len(base.segments[0].generations[0].output_ids)
    )
    assert (batch.token_segment[~batch.token_mask] == -1).all()
    np.testing.assert_array_equal(batch.mc_mask[0, 1], [True, True])
    np.testing.assert_array_equal(batch.mc_return[0, 1], [1.0, 0.5])
    assert batch.mc_mask.sum() == 2
    np.testing.assert_array_equal(batch.value[0], [1, 1, 1, 0, 0])
    with pytest.raises(ValueError, match=r"3 does not fit .* learner.segment_buckets = \[2\]"):
        credit_batch([base], num_segments=2, num_tokens=64, num_rows=1)


def test_the_token_axis_of_a_batch_is_that_of_the_rows():
    forest = make_forest(4)
    packed = pack(forest)
    batch = credit_batch(forest, num_segments=8, num_tokens=64, num_rows=16)
    rows = packed.to_rows(batch.behaviour_logp)
    assert (rows[packed.rows.generated_mask] < 0).all()
    np.testing.assert_array_equal(
        packed.to_trajectories(rows, batch.token_mask.shape), batch.behaviour_logp
    )
