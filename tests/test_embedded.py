"""The embedded engine against a naive sampler, and the promises that callers build on."""

from __future__ import annotations

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from small_engine import prompt_of, request, run, text_of

from focus.engine.embedded import sampling
from focus.engine.embedded.engine import EmbeddedEngine
from focus.engine.embedded.prefix_store import PrefixStore
from focus.engine.protocol import Engine, EngineError
from focus.policy import transformer

MODEL = transformer.ModelConfig(
    vocab_size=23,
    d_model=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=24,
    max_context=48,
)


@functools.cache
def params(seed=0):
    # Three times the usual size: a model that has preferences, so that mistakes show.
    drawn = transformer.init_params(MODEL, jax.random.key(seed))
    return jax.tree.map(lambda p: 3 * p, drawn)


EOS = 7
OPTIONS = small_engine.OPTIONS | dict(
    eos_token_ids=(EOS,),
    loader=lambda path: params(int(path)),
)
SINGLE = OPTIONS | dict(max_running=1, retained=1, cache_buckets=(), prefill_buckets=(8,))


@functools.cache
def _warm_engine(single):
    engine = EmbeddedEngine(MODEL, params(), **(SINGLE if single else OPTIONS))
    engine.warmup(filtered=not single)
    return engine


def fresh_engine(single=False):
    """The one engine of its kind (compiled once for the whole file), emptied."""
    engine = _warm_engine(single)
    if engine.info().weight_version != "v0":
        asyncio.run(engine.set_params(params(), "v0"))
    engine.flush_cache()
    return engine


def make_engine(**overrides):
    """An engine of its own, compiled only as far as it is used."""
    return EmbeddedEngine(MODEL, params(), **(OPTIONS | overrides))


async def until_decoding(engine):
    calls = engine.stats.decode_calls
    while engine.stats.decode_calls == calls:
        await asyncio.sleep(0)


@functools.partial(jax.jit, static_argnums=0)
def _logits(seed, tokens):
    hidden = transformer.hidden_states(MODEL, params(seed), tokens[None])[0]
    return transformer.unembed(MODEL, params(seed), hidden)


def full_logits(tokens, seed=0):
    padded = np.zeros(MODEL.max_context, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_logits(seed, padded))[: len(tokens)]


def naive_greedy(prompt, count, seed=0):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(full_logits(tokens, seed)[-1])))
    return tuple(tokens[len(prompt) :])


def full_logp(result, prompt, temperature, seed=0):
    logits = full_logits(prompt + result.output_ids, seed)[len(prompt) - 1 : -1]
    logp = np.asarray(jax.nn.log_softmax(logits / (temperature or 1.0)))
    return logp[np.arange(len(result.output_ids)), list(result.output_ids)]


def test_greedy_is_the_naive_loop_for_ragged_requests_beyond_the_slots():
    engine = fresh_engine()
    before = engine.stats
    assert isinstance(engine, Engine)
    requests = [
        request(f"{i}", prompt_of(i, 1 + (7 * i) % 30), 1 + (5 * i) % 13, temperature=0.0)
        for i in range(12)
    ]
    for asked, result in zip(requests, run(engine, *requests)):
        expected = naive_greedy(asked.input_ids, asked.sampling.max_new_tokens)
        assert result.output_ids == expected
        assert result.rid == asked.rid and result.text == text_of(expected)
        assert (result.finish_reason.type, result.finish_reason.length) == ("length", len(expected))
        np.testing.assert_allclose(
            result.output_logp, full_logp(result, asked.input_ids, 0.0), atol=1e-4
        )
    assert engine.stats.requests - before.requests == 12
    assert engine.stats.generated_tokens - before.generated_tokens == sum(
        r.sampling.max_new_tokens for r in requests
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logp_is_that_of_the_full_distribution_whatever_the_support(temperature):
    prompt = prompt_of(1, 9)
    cut = dict(temperature=temperature, top_p=0.7, top_k=5)
    free = dict(temperature=temperature)
    for result in run(
        fresh_engine(), request("cut", prompt, seed=3, **cut), request("free", prompt, 8, 4, **free)
    ):
        expected = full_logp(result, prompt, temperature)
        np.testing.assert_allclose(result.output_logp, expected, atol=1e-4)


def test_top_k_of_one_is_greedy():
    prompt = prompt_of(2, 6)
    (result,) = run(fresh_engine(), request("k", prompt, temperature=1.3, top_k=1))
    assert result.output_ids == naive_greedy(prompt, 8)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 999), top_p=st.floats(0.01, 1.0), top_k=st.integers(1, 9))
def test_support_is_the_slow_definition(seed, top_p, top_k):
    logp = np.asarray(
        jax.nn.log_softmax(jnp.asarray(np.random.default_rng(seed).normal(size=9) * 2))
    )
    expected, mass = np.zeros(9, bool), 0.0
    for rank, token in enumerate(np.argsort(-logp, kind="stable")):
        expected[token] = rank < top_k and (mass < top_p - 1e-6 or top_p == 1.0)
        edge = abs(mass - top_p) <= 1e-6 and top_p < 1
        mass += np.exp(logp[token])
        if edge:
            return  # rounding decides here
    np.testing.assert_array_equal(sampling.support(logp, top_p, top_k), expected)


@pytest.mark.parametrize("filtered", [False, True])
def test_samples_follow_the_distribution(filtered):
    logits = jnp.array([0.3, -1.0, 1.2, 0.0, -jnp.inf, 0.5])
    top_k = 4 if filtered else 6
    draws, temperature = 20_000, 0.8
    draw = jax.vmap(
        functools.partial(sampling.sample, filtered=filtered), (None, 0, None, None, None)
    )
    words = jnp.array([0, 7], jnp.uint32)
    keys = jax.vmap(sampling.token_key, (None, 0))(words, jnp.arange(draws))
    tokens, logp = jax.jit(draw)(logits, keys, temperature, 1.0, top_k)
    counts = np.bincount(tokens, minlength=6)
    full = np.asarray(jax.nn.softmax(logits / temperature))
    kept = np.where(np.argsort(np.argsort(-full)) < top_k, full, 0)
    expected = draws * kept / kept.sum()
    assert counts[expected == 0].sum() == 0
    live = expected > 0
    chi_square = ((counts - expected)[live] ** 2 / expected[live]).sum()
    assert chi_square < 20.5  # p = 0.001 at 5 degrees of freedom
    np.testing.assert_allclose(logp, np.log(full[tokens]), rtol=1e-5)


def test_a_seed_names_one_completion_whatever_runs_beside_it():
    wanted = request("wanted", prompt_of(3, 7), 9, seed=2**40 + 5, temperature=1.0)
    (alone,) = run(fresh_engine(), wanted)
    mates = [request(f"{i}", prompt_of(i, 3 + i), 3 + i, i, top_p=0.8) for i in range(6)]
    engine = fresh_engine()
    crowded = run(engine, *mates[:3], wanted, *mates[3:])[3]
    assert crowded.output_ids == alone.output_ids
    other_seed = request("other", prompt_of(3, 7), 9, seed=5, temperature=1.0)
    assert run(engine, other_seed)[0].output_ids != alone.output_ids


def test_the_same_requests_in_the_same_order_give_the_same_bits():
    requests = [request(f"{i}", prompt_of(i // 2, 5 + i), 4 + i % 5, i) for i in range(10)]
    first, second = run(fresh_engine(), *requests), run(fresh_engine(), *requests)
    assert first == second


def test_a_continued_and_a_forked_prompt_reuse_all_but_what_is_new():
    prompt = prompt_of(4, 10)
    engine = fresh_engine()
    (turn,) = run(engine, request("a", prompt, 6, seed=1))
    assert turn.cached_tokens == 0
    longer = prompt + turn.output_ids + prompt_of(5, 7)
    branch = prompt[:8] + ((prompt[8] + 1) % 23,) + prompt_of(6, 8)
    # The last sampled token was never fed, so it is computed with the observation.
    (next_turn, fork) = run(engine, request("b", longer, 6, 2), request("c", branch, 6, 3))
    assert next_turn.cached_tokens == len(prompt) + len(turn.output_ids) - 1
    assert fork.cached_tokens == 8
    (again,) = run(engine, request("d", longer, 6, 2))
    assert again.cached_tokens == len(longer) - 1
    for result, asked, seed in ((next_turn, longer, 2), (fork, branch, 3), (again, longer, 2)):
        (fresh,) = run(fresh_engine(), request("e", asked, 6, seed))
        assert fresh.cached_tokens == 0 and fresh.output_ids == result.output_ids
        np.testing.assert_allclose(fresh.output_logp, result.output_logp, atol=1e-5)


def test_a_group_computes_its_shared_prompt_once_even_within_one_admission():
    prompt = prompt_of(7, 30)
    results = run(fresh_engine(), *(request(f"{i}", prompt, 3, seed=i) for i in range(4)))
    assert sorted(r.cached_tokens for r in results) == [0, 29, 29, 29]
    for i, result in enumerate(results):
        (fresh,) = run(fresh_engine(), request("x", prompt, 3, seed=i))
        assert fresh.output_ids == result.output_ids


def test_the_least_recently_used_row_is_evicted():
    engine = fresh_engine(single=True)
    first, second, third = (prompt_of(i, 12) for i in (10, 11, 12))
    for i, prompt in enumerate((first, second, first, third)):
        run(engine, request(f"{i}", prompt, 2))
    assert run(engine, request("kept", first, 2))[0].cached_tokens == 11
    assert run(engine, request("gone", second, 2))[0].cached_tokens < 3


def test_base_rollouts_survive_until_their_branches_have_run():
    engine = make_engine(max_running=4, retained=None)
    bases = [prompt_of(100 + i, 12) for i in range(10)]
    run(engine, *(request(f"{i}", p, 2) for i, p in enumerate(bases)))
    branches = run(
        engine, *(request(f"b{i}", p[:9] + prompt_of(i, 5), 2) for i, p in enumerate(bases))
    )
    assert all(r.cached_tokens >= 9 for r in branches)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_placement_reuses_true_prefixes_and_never_overwrites_a_row_in_use(data):
    """A model of the device replays every placement; rows must hold what the store says."""
    rows, length = 4, 12
    store = PrefixStore(rows, length, wave_cost=data.draw(st.integers(0, 2)))
    device, running = [[] for _ in range(rows)], {}
    for _ in range(data.draw(st.integers(1, 6))):
        placed = []
        for _ in range(data.draw(st.integers(0, rows - len(running)))):
            prompt = np.array(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=length)))
            placement = store.place(prompt)
            if placement is None:
                assert placed
                break
            assert placement.row not in running and placement.cached <= len(prompt) - 1
            running[placement.row] = list(prompt)
            placed.append((placement, list(prompt)))
        store.settle()
        for wave in range(len(placed)):
            members = [(p, prompt) for p, prompt in placed if p.wave == wave]
            for placement, _ in members:
                if placement.source is not None:
                    device[placement.row] = list(device[placement.source])
            for placement, prompt in members:
                assert device[placement.row][: placement.cached] == prompt[: placement.cached]
                device[placement.row] = prompt[:-1]
        for row in [r for r in running if data.draw(st.booleans())]:
            store.release(row, len(running.pop(row)))


def test_a_stop_token_is_kept_and_an_ignored_one_is_not_obeyed():
    prompts = (prompt_of(seed, 5) for seed in range(100))
    prompt = next(p for p in prompts if EOS in naive_greedy(p, 8)[1:7])
    greedy = naive_greedy(prompt, 8)
    kept = greedy[: greedy.index(EOS) + 1]
    engine = fresh_engine()
    by_eos, ignored, by_request = run(
        engine,
        request("a", prompt, temperature=0.0, ignore_eos=False),
        request("b", prompt, temperature=0.0),
        request("c", prompt, temperature=0.0, stop_token_ids=(EOS,)),
    )
    for result in (by_eos, by_request):
        assert result.output_ids == kept and len(result.output_logp) == len(kept)
        assert (result.finish_reason.type, result.finish_reason.matched) == ("stop", EOS)
        assert result.text == text_of(kept[:-1])
    assert ignored.output_ids == greedy and ignored.finish_reason.type == "length"


def test_a_stop_string_ends_at_the_token_that_completes_it():
    prompt = prompt_of(9, 5)
    greedy = naive_greedy(prompt, 8)
    stop = f"{greedy[2]}><{greedy[3]}"
    assert stop not in text_of(greedy[:3])
    engine = fresh_engine()
    before = engine.stats
    (result,) = run(engine, request("a", prompt, temperature=0.0, stop=("never", stop)))
    assert result.output_ids == greedy[:4] and len(result.output_logp) == 4
    assert result.text == text_of(greedy[:4])[: text_of(greedy[:4]).index(stop)]
    assert result.finish_reason.matched == stop
    assert engine.stats.generated_tokens - before.generated_tokens == 4
    assert engine.stats.discarded_tokens > before.discarded_tokens
    # What was dropped is not taken for a prefix, and what was kept is.
    follow_up = prompt + result.output_ids + prompt_of(1, 3)
    (next_turn,) = run(engine, request("b", follow_up, 4, temperature=0.0))
    assert next_turn.cached_tokens == len(prompt) + 4
    assert next_turn.output_ids == naive_greedy(follow_up, 4)


@pytest.mark.parametrize("position", [0, 3, 4, 7])
def test_any_number_of_stop_tokens_ends_a_completion_at_the_first(position):
    """The device looks for some of them; the host finds the rest, and drops what came behind."""
    prompt = prompt_of(31, 6)
    greedy = naive_greedy(prompt, 8)
    others = [i for i in range(MODEL.vocab_size) if i not in greedy]
    first = next(i for i in range(8) if greedy[i] == greedy[position])
    for stop in ((*others, greedy[position]), (greedy[position],)):
        engine = fresh_engine()
        before = engine.stats.generated_tokens
        asked = request("a", prompt, 8, temperature=0.0, stop_token_ids=stop)
        (result,) = run(engine, asked)
        assert result.output_ids == greedy[: first + 1] and len(result.output_logp) == first + 1
        assert result.finish_reason.matched == greedy[position]
        assert engine.stats.generated_tokens - before == first + 1
        follow_up = prompt + result.output_ids + prompt_of(1, 3)
        (next_turn,) = run(engine, request("b", follow_up, 4, temperature=0.0))
        # What was dropped is no prefix; of a token that ended it, nothing was computed.
        assert next_turn.cached_tokens in (len(prompt) + first, len(prompt) + first + 1)
        assert next_turn.output_ids == naive_greedy(follow_up, 4)


def test_abort_answers_with_what_there_is():
    async def main():
        engine = fresh_engine(single=True)
        running = asyncio.create_task(engine.generate(request("run", prompt_of(1, 4), 40)))
        queued = asyncio.create_task(engine.generate(request("queue", prompt_of(2, 4), 40)))
        after = asyncio.create_task(engine.generate(request("after", prompt_of(3, 4), 3)))
        await until_decoding(engine)
        await engine.abort("queue")
        await engine.abort("run")
        await engine.abort("nobody")
        return await asyncio.gather(running, queued, after)

    running, queued, after = asyncio.run(main())
    assert running.finish_reason.type == queued.finish_reason.type == "abort"
    assert 1 <= len(running.output_ids) < 40 and len(running.output_logp) == len(running.output_ids)
    assert running.weight_versions == (("v0", 0, len(running.output_ids)),)
    assert queued.output_ids == () and queued.weight_versions == ()
    assert len(after.output_ids) == 3


def test_a_cancelled_call_frees_its_slot():
    async def main():
        engine = fresh_engine(single=True)
        task = asyncio.create_task(engine.generate(request("x", prompt_of(1, 4), 40)))
        await until_decoding(engine)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await engine.generate(request("x", prompt_of(1, 4), 3, temperature=0.0))

    assert asyncio.run(main()).output_ids == naive_greedy(prompt_of(1, 4), 3)


def test_completions_fill_the_context_to_the_last_token_and_no_further():
    prompt = prompt_of(11, 45)
    engine = fresh_engine()
    (result,) = run(engine, request("a", prompt, 99, temperature=0.0))
    assert result.output_ids == naive_greedy(prompt, 3)
    assert (result.finish_reason.type, result.finish_reason.length) == ("length", 3)
    # A chunk that would spill over the end moves left instead.
    (again,) = run(engine, request("b", prompt[:44] + (0, 1, 2), 9, temperature=0.0))
    assert again.cached_tokens == 44
    assert again.output_ids == naive_greedy(prompt[:44] + (0, 1, 2), 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(prompt=(1, 23)), "token id 23 at position 1 is outside the vocabulary of 23"),
        (dict(prompt=(-1,)), "token id -1"),
        (dict(prompt=()), "empty"),
        (dict(prompt=(1,) * 48), "48 tokens leaves no room in a context of 48"),
    ],
)
def test_requests_that_cannot_be_served_say_why(bad, message):
    engine = fresh_engine()
    with pytest.raises(ValueError, match=message):
        run(engine, request("bad", bad.pop("prompt"), **bad))
    assert len(run(engine, request("good", (1, 2), 3))[0].output_ids) == 3


def test_a_request_id_can_be_in_flight_once():
    with pytest.raises(ValueError, match="'twin' is in flight"):
        run(fresh_engine(), request("twin", (1, 2)), request("twin", (1, 2)))


def test_new_weights_wait_for_running_requests_then_change_tokens_and_version():
    prompt = prompt_of(12, 8)

    engine = fresh_engine()

    async def main():
        old = asyncio.create_task(engine.generate(request("old", prompt, 12, temperature=0.0)))
        await until_decoding(engine)
        swap = asyncio.create_task(engine.load_weights("1", "v1"))
        await asyncio.sleep(0)
        new = await engine.generate(request("new", prompt, 12, temperature=0.0))
        await swap
        return await old, new

    old, new = asyncio.run(main())
    assert engine.info().weight_version == "v1"
    assert old.output_ids == naive_greedy(prompt, 12) and old.weight_versions == (("v0", 0, 12),)
    assert new.output_ids == naive_greedy(prompt, 12, seed=1) != old.output_ids
    assert new.weight_versions == (("v1", 0, 12),)
    assert new.cached_tokens == 0


def test_weights_of_another_model_and_unreadable_ones_leave_the_old_in_place():
    def loader(path):
        raise OSError("torn file")

    engine = make_engine(loader=loader)
    other = dict(params(), final_norm=jnp.ones(3))
    with pytest.raises(ValueError, match="another model"):
        asyncio.run(engine.set_params(other, "v1"))
    with pytest.raises(EngineError, match="torn file"):
        asyncio.run(engine.load_weights("w", "v1"))
    with pytest.raises(ValueError, match="no loader"):
        asyncio.run(make_engine(loader=None).load_weights("w", "v1"))
    assert engine.info().weight_version == "v0"


def test_the_trainer_may_donate_its_parameters():
    engine = fresh_engine()
    own = jax.tree.map(jnp.copy, params(1))
    asyncio.run(engine.set_params(own, "v1"))
    jax.tree.map(lambda p: p.delete(), own)
    (result,) = run(engine, request("a", prompt_of(1, 4), 3, temperature=0.0))
    assert result.output_ids == naive_greedy(prompt_of(1, 4), 3, seed=1)


def test_nothing_compiles_after_warmup_and_no_transfer_is_implicit():
    engine = fresh_engine()
    programs = engine.warmup()
    assert programs == engine.compilations == 1 + 1 + 2 * 2 * (2 + 2)
    random = np.random.default_rng(0)
    with jax.transfer_guard("disallow"):
        for burst in range(4):
            run(
                engine,
                *(
                    request(
                        f"{burst}.{i}",
                        prompt_of(random.integers(4), random.integers(1, 47)),
                        int(random.integers(1, 30)),
                        seed=i,
                        temperature=float(random.choice([0.0, 0.7, 1.0])),
                        top_k=int(random.choice([-1, 3])),
                    )
                    for i in range(random.integers(1, 9))
                ),
            )
        asyncio.run(engine.set_params(params(1), "v1"))
    assert engine.compilations == programs


def test_no_program_copies_the_whole_cache():
    engine = make_engine(retained=200)
    for program in (
        engine._runner.programs.fork(),
        engine._runner.programs.prefill(2, 8, 24),
        engine._runner.programs.decode(2, 24, True),
    ):
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= engine.cache_bytes
        assert memory.temp_size_in_bytes < engine.cache_bytes / 4


def test_a_fault_of_the_device_reaches_every_caller_and_the_engine_recovers(monkeypatch):
    engine = fresh_engine(single=True)

    def broken(weights, cache, *unused):
        jax.tree.map(lambda x: x.delete(), cache)  # donated, and nothing came back
        raise RuntimeError("out of memory")

    async def main():
        asked = [
            asyncio.create_task(engine.generate(request(f"{i}", (1, 2, i), 30))) for i in range(3)
        ]
        await until_decoding(engine)
        monkeypatch.setattr(engine._runner.programs, "decode", lambda *key: broken)
        swap = engine.set_params(params(1), "v1")  # waits for the first of them
        return await asyncio.wait_for(asyncio.gather(*asked, swap, return_exceptions=True), 30)

    errors = asyncio.run(main())
    monkeypatch.undo()
    assert len(errors) == 4
    for error in errors:
        assert isinstance(error, EngineError) and "out of memory" in str(error)
    (result,) = run(engine, request("0", (1, 2, 0), 4, temperature=0.0))
    assert result.output_ids == naive_greedy((1, 2, 0), 4)


def test_weights_that_are_not_finite_are_an_error_not_a_completion():
    engine = fresh_engine()
    broken = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params())
    asyncio.run(engine.set_params(broken, "diverged"))
    with pytest.raises(EngineError, match="not finite under weights 'diverged'"):
        run(engine, request("a", (1, 2), 3))


def test_a_tokenizer_that_fails_does_not_leave_its_caller_waiting():
    def decode(ids):
        raise KeyError("unknown piece")

    async def main():
        engine = make_engine(decode=decode)
        return await asyncio.wait_for(engine.generate(request("a", (1, 2), 3)), 30)

    with pytest.raises(EngineError, match="unknown piece"):
        asyncio.run(main())


def test_close_ends_what_waits_and_refuses_more():
    async def main():
        async with make_engine() as engine:
            task = asyncio.create_task(engine.generate(request("a", (1, 2), 40)))
            await until_decoding(engine)
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request("b", (1, 2), 4))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(cache_length=49), r"\[2, 48\].*got 49"),
        (dict(max_running=0), "max_running >= 1"),
        (dict(decode_steps=0), "decode_steps must be >= 1"),
        (dict(prefill_buckets=(0, 4)), "prefill_buckets must be >= 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_engine(**options)
