"""The embedded engine with a recurrent model: the same promises, and memories that fit."""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_engine
from families import FAMILIES, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from small_engine import OPTIONS, prompt_of, run

from focus.engine.embedded.engine import EmbeddedEngine
from focus.engine.embedded.snapshot_store import SnapshotStore
from focus.policy import model as models

MODEL = dataclasses.replace(FAMILIES["qwen3_5"], vocab_size=23, max_context=48)
PARAMS = make_params(MODEL)
request = functools.partial(small_engine.request, temperature=0.0)


@functools.cache
def _engine():
    engine = EmbeddedEngine(MODEL, PARAMS, **OPTIONS)
    engine.warmup(filtered=False)
    return engine


def fresh_engine():
    """The one engine of this file, emptied."""
    _engine().flush_cache()
    return _engine()


@jax.jit
def _logp(tokens):
    hidden = models.hidden_states(MODEL, PARAMS, tokens[None])[0]
    return jax.nn.log_softmax(models.unembed(MODEL, PARAMS, hidden))


def naive_greedy(prompt, count):
    """Tokens, and log-probs, of a whole forward pass for every token."""
    tokens, logps = list(prompt), []
    for _ in range(count):
        padded = np.zeros(MODEL.max_context, np.int32)
        padded[: len(tokens)] = tokens
        logp = np.asarray(_logp(jnp.asarray(padded)))[len(tokens) - 1]
        tokens.append(int(logp.argmax()))
        logps.append(logp.max())
    return tuple(tokens[len(prompt) :]), logps


def assert_naive(result, prompt):
    tokens, logps = naive_greedy(prompt, len(result.output_ids))
    assert result.output_ids == tokens
    np.testing.assert_allclose(result.output_logp, logps, atol=1e-4)


def test_greedy_is_the_naive_loop_for_ragged_requests_beyond_the_slots():
    """Prompts that fill chunks and spill, up to the end of the context; slots that wait ended."""
    engine = fresh_engine()
    programs = engine.compilations
    lengths = [1, 2, 4, 5, 9, 13, 16, 22, 31, 40, 45, 47]
    requests = [request(f"{i}", prompt_of(i, n), 1 + (5 * i) % 13) for i, n in enumerate(lengths)]
    for asked, result in zip(requests, run(engine, *requests)):
        room = MODEL.max_context - len(asked.input_ids)
        assert len(result.output_ids) == min(asked.sampling.max_new_tokens, room)
        assert_naive(result, asked.input_ids)
    assert engine.compilations == programs


def test_turns_go_on_where_they_ended_and_branches_leave_where_prompts_ended():
    engine = fresh_engine()
    first = prompt_of(1, 10)
    (turn,) = run(engine, request("1", first, 6))
    second = first + turn.output_ids + prompt_of(2, 5)
    (next_turn,) = run(engine, request("2", second, 6))
    # The last sampled token was never fed, so it is computed with the observation.
    assert next_turn.cached_tokens == len(first) + 5
    other = (second[-1] + 1) % 23
    asked = {
        "from the first state": (first, len(first) - 1),
        "from the second state": (second, len(second) - 1),
        "behind the second state": (second + (other, 3), len(second) - 1),
        "before the second state": (second[:-2] + (other, other), len(first) - 1),
        "before the first state": (first[:-2] + (other, other), 0),
    }
    requests = [request(name, prompt, 6) for name, (prompt, _) in asked.items()]
    for result in run(engine, *requests):
        prompt, cached = asked[result.rid]
        assert result.cached_tokens == cached, result.rid
        assert_naive(result, prompt)
    (third,) = run(engine, request("3", second + next_turn.output_ids + (5,), 6))
    assert third.cached_tokens == len(second) + 5
    assert_naive(third, second + next_turn.output_ids + (5,))


def test_a_group_computes_its_shared_prompt_once_even_within_one_admission():
    prompt = prompt_of(7, 30)
    results = run(fresh_engine(), *(request(f"{i}", prompt, 3) for i in range(4)))
    assert sorted(r.cached_tokens for r in results) == [0, 29, 29, 29]
    for result in results:
        assert_naive(result, prompt)


def test_a_memory_that_has_seen_dropped_tokens_is_not_reused():
    engine, prompt = fresh_engine(), prompt_of(3, 9)
    tokens, _ = naive_greedy(prompt, 8)
    (stopped,) = run(engine, request("1", prompt, 8, stop=(f"<{tokens[1]}>",)))
    kept = len(stopped.output_ids)
    assert kept < 5  # the block of five that was sampled reached further
    longer = prompt + stopped.output_ids + (4, 2)
    (result,) = run(engine, request("2", longer, 6))
    assert result.cached_tokens == len(prompt) - 1
    assert_naive(result, longer)


@pytest.mark.parametrize("snapshots", [0, 1])
def test_few_snapshots_cost_time_and_nothing_else(snapshots):
    engine = EmbeddedEngine(MODEL, PARAMS, **OPTIONS, snapshots=snapshots)
    prompts = [prompt_of(i, 8) for i in range(2)]
    results = run(engine, *(request(f"{i}", p, 4) for i, p in enumerate(prompts)))
    again = run(engine, *(request(f"again {i}", p, 4) for i, p in enumerate(prompts)))
    assert sum(r.cached_tokens for r in again) == 7 * snapshots
    for result, repeated, prompt in zip(results, again, prompts):
        assert result.output_ids == repeated.output_ids
        longer = prompt + result.output_ids + (1,)
        (more,) = run(engine, request("more", longer, 3))
        assert_naive(more, longer)


def test_new_weights_forget_all_memories():
    engine = EmbeddedEngine(MODEL, PARAMS, **OPTIONS)
    prompt = prompt_of(5, 12)
    run(engine, request("1", prompt, 4))
    other = make_params(MODEL, seed=1)
    asyncio.run(engine.set_params(other, "v1"))
    (result,) = run(engine, request("2", prompt, 4))
    assert result.cached_tokens == 0
    fresh = EmbeddedEngine(MODEL, other, **OPTIONS)
    assert run(fresh, request("2", prompt, 4))[0].output_ids == result.output_ids
    rows = OPTIONS["max_running"] + OPTIONS["retained"]
    delta = models.init_cache(MODEL, rows + 2 + 4 * rows, 1).delta
    assert engine.cache_bytes > sum(x.nbytes for x in jax.tree.leaves(delta))


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_memory_has_seen_exactly_the_prefix_that_is_reused(data):
    """Memories as the tokens that they have seen, moved as placements say."""
    rows, snapshots, length = 4, data.draw(st.integers(0, 4)), 9
    store = SnapshotStore(rows, length, snapshots, wave_cost=data.draw(st.integers(0, 2)))
    memory = {i: () for i in range(rows + 2 + snapshots)}
    columns = {i: () for i in range(rows)}
    running, reused = {}, 0

    def admit(prompts):
        placed = []
        for prompt in prompts:
            placement = store.place(np.array(prompt, np.int32))
            if placement is not None:
                placed.append((placement, prompt))
        store.settle()
        for wave in range(max((p.wave for p, _ in placed), default=-1) + 1):
            members = [(p, prompt) for p, prompt in placed if p.wave == wave]
            for p, _ in members:
                if p.source is not None:
                    columns[p.row] = columns[p.source]
            for p, _ in members:
                if p.memory is not None:
                    memory[p.row] = memory[p.memory]
            for p, prompt in members:
                assert memory[p.row] == prompt[: p.cached] == columns[p.row][: p.cached]
                memory[p.row] = columns[p.row] = prompt[:-1]
            for p, _ in members:
                if p.snapshot is not None:
                    assert p.snapshot >= rows + 2
                    memory[p.snapshot] = memory[p.row]
        return placed

    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["admit", "decode", "release", "flush"]))
        if kind == "admit":
            tokens = st.lists(st.integers(0, 1), min_size=1, max_size=length - 3).map(tuple)
            held = st.sampled_from([*memory.values()]).map(lambda m: (m + (1,))[: length - 3])
            prompts = data.draw(st.lists(tokens | held, min_size=1, max_size=3))
            for p, prompt in admit(prompts):
                running[p.row] = prompt
                reused += p.cached
        elif kind == "decode" and running:
            row = data.draw(st.sampled_from(sorted(running)))
            known = running[row]
            new = data.draw(st.lists(st.integers(0, 1), max_size=length - len(known)).map(tuple))
            if new:
                store.append(row, len(known) - 1, np.array(new))
                running[row] = known + new
                memory[row] = columns[row] = (known + new)[:-1]
        elif kind == "release" and running:
            row = data.draw(st.sampled_from(sorted(running)))
            kept = running.pop(row)
            store.release(row, data.draw(st.integers(max(1, len(kept) - 2), len(kept))))
        elif kind == "flush":
            store.flush()
    assert memory[rows + 1] == ()
