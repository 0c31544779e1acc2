"""One set of promises, kept by every engine: the protocol of `focus.engine.protocol`."""

from __future__ import annotations

import asyncio

import backends
import numpy as np
import pytest

from focus.engine.protocol import Engine, EngineError, GenerateRequest, SamplingParams


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Directories of three versions of the small model."""
    return backends.export(tmp_path_factory.mktemp("weights"))


@pytest.fixture(
    params=[
        "embedded",
        "served",
        "fake",
        pytest.param("sglang", marks=pytest.mark.sglang),
    ]
)
async def backend(request, paths):
    """An engine with the weights "v0" and an empty cache."""
    options = {}
    if request.param == "sglang":
        options["urls"] = request.getfixturevalue("real_fleet").urls[:1]
    async with getattr(backends, request.param)(paths, **options) as made:
        await made.engine.load_weights(paths["v0"], "v0")
        yield made


def prompt_of(seed, length, vocab_size):
    return tuple(int(i) for i in np.random.default_rng(seed).integers(2, vocab_size, length))


def ask(rid, prompt, count=8, *, seed=0, **sampling):
    sampling = {"temperature": 0.0, "ignore_eos": True} | sampling
    params = SamplingParams(max_new_tokens=count, **sampling)
    return GenerateRequest(rid, tuple(prompt), params, seed=seed)


async def all_of(engine, requests):
    return await asyncio.gather(*(engine.generate(r) for r in requests))


async def test_it_is_an_engine_and_says_what_it_serves(backend):
    assert isinstance(backend.engine, Engine)
    info = backend.engine.info()
    assert (info.weight_version, info.vocab_size) == ("v0", backend.vocab_size)
    assert info.max_context == backend.max_context and info.max_running >= 1


async def test_greedy_is_the_naive_loop_for_ragged_requests(backend):
    requests = [
        ask(f"{i}", prompt_of(i, 1 + 7 * i % 40, backend.vocab_size), 1 + 5 * i % 13)
        for i in range(12)
    ]
    for asked, result in zip(requests, await all_of(backend.engine, requests), strict=True):
        count = asked.sampling.max_new_tokens
        assert result.output_ids == backend.greedy(asked.input_ids, count, "v0")
        assert result.rid == asked.rid and result.prompt_tokens == len(asked.input_ids)
        assert result.text == backend.text_of(result.output_ids)
        assert (result.finish_reason.type, result.finish_reason.length) == ("length", count)
        assert result.weight_versions == (("v0", 0, count),)
        assert 0 <= result.cached_tokens < max(len(asked.input_ids), 1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_logp_is_that_of_the_full_distribution_whatever_the_support(backend, temperature):
    whole = dict(temperature=temperature)
    cut = dict(temperature=temperature, top_p=0.7, top_k=5)
    requests = [
        ask(f"{i}", prompt_of(i, 9, backend.vocab_size), 24, seed=i, **(cut if i % 2 else whole))
        for i in range(6)
    ]
    differences = []
    for asked, result in zip(requests, await all_of(backend.engine, requests), strict=True):
        expected = backend.logp(asked.input_ids, result.output_ids, temperature, "v0")
        differences.append(np.abs(np.array(result.output_logp) - expected))
    print(f"logp at T={temperature}: mean {np.mean(differences):.1e} max {np.max(differences):.1e}")
    assert np.max(differences) < 1e-4


async def test_a_stop_token_is_kept_and_an_ignored_one_is_not_obeyed(backend):
    prompt = prompt_of(1, 6, backend.vocab_size)
    output = backend.greedy(prompt, 8, "v0")
    stop = output[4]
    kept = output[: output.index(stop) + 1]
    by_request, ignored = await all_of(
        backend.engine,
        [ask("a", prompt, stop_token_ids=(stop,), ignore_eos=False), ask("b", prompt)],
    )
    assert by_request.output_ids == kept and len(by_request.output_logp) == len(kept)
    assert (by_request.finish_reason.type, by_request.finish_reason.matched) == ("stop", stop)
    assert by_request.text == backend.text_of(kept[:-1])
    assert ignored.output_ids == output


async def test_a_stop_string_ends_at_the_token_that_completes_it(backend):
    for seed in range(100):
        prompt = prompt_of(seed, 6, backend.vocab_size)
        output = backend.greedy(prompt, 10, "v0")
        pieces = [backend.text_of(output[: i + 1]) for i in range(10)]
        stop = pieces[4][len(pieces[2]) :]
        if pieces[-1].isascii() and len(stop) > 1 and stop not in pieces[3]:
            break
    else:
        pytest.fail("the model says nothing that could be stopped at")
    (result,) = await all_of(backend.engine, [ask("a", prompt, 10, stop=("never said", stop))])
    assert result.output_ids == output[:5] and len(result.output_logp) == 5
    assert result.finish_reason.matched == stop
    assert result.text == pieces[4][: pieces[4].index(stop)]


async def test_a_continued_and_a_forked_prompt_reuse_what_is_shared(backend):
    prompt = prompt_of(4, 30, backend.vocab_size)
    (turn,) = await all_of(backend.engine, [ask("a", prompt, 6)])
    assert turn.cached_tokens <= 1
    longer = prompt + turn.output_ids + prompt_of(5, 7, backend.vocab_size)
    other = 2 + (prompt[20] - 1) % (backend.vocab_size - 2)
    branch = (*prompt[:20], other, *prompt_of(6, 8, backend.vocab_size))
    next_turn, fork = await all_of(backend.engine, [ask("b", longer), ask("c", branch)])
    assert next_turn.cached_tokens >= len(prompt) + len(turn.output_ids) - 1
    assert fork.cached_tokens == 20
    assert next_turn.output_ids == backend.greedy(longer, 8, "v0")
    assert fork.output_ids == backend.greedy(branch, 8, "v0")


async def test_an_abort_answers_with_what_there_is(backend):
    prompt = prompt_of(1, 4, backend.vocab_size)
    engine = backend.engine
    running = asyncio.create_task(engine.generate(ask("run", prompt, 100)))
    await engine.abort("nobody")
    while not running.done():  # over HTTP, an abort may arrive before its request
        await asyncio.sleep(0.002)
        await engine.abort("run")
    result = await running
    count = len(result.output_ids)
    assert count == len(result.output_logp) < 100 and result.finish_reason.type == "abort"
    assert result.output_ids == backend.greedy(prompt, count, "v0")
    assert result.weight_versions == ((("v0", 0, count),) if count else ())
    (after,) = await all_of(engine, [ask("run", prompt, 3)])
    assert after.output_ids == backend.greedy(prompt, 3, "v0")


async def test_a_cancelled_call_leaves_the_engine_usable(backend):
    prompt = prompt_of(1, 4, backend.vocab_size)
    task = asyncio.create_task(backend.engine.generate(ask("x", prompt, 100)))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (result,) = await all_of(backend.engine, [ask("x", prompt, 3)])
    assert result.output_ids == backend.greedy(prompt, 3, "v0")


async def test_completions_fill_the_context_to_the_last_token_and_no_further(backend):
    prompt = prompt_of(11, backend.max_context - 3, backend.vocab_size)
    full = prompt_of(12, backend.max_context - 1, backend.vocab_size)
    three, one = await all_of(backend.engine, [ask("a", prompt, 99), ask("b", full, 99)])
    assert three.output_ids == backend.greedy(prompt, 3, "v0")
    assert (three.finish_reason.type, three.finish_reason.length) == ("length", 3)
    assert one.output_ids == backend.greedy(full, 1, "v0")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda b: (1, b.vocab_size), r"token id \d+ at position 1 is outside the vocabulary"),
        (lambda b: (-1,), "token id -1"),
        (lambda b: (), "empty"),
        (lambda b: (2,) * b.max_context, "leaves no room in a context of"),
    ],
)
async def test_requests_that_cannot_be_served_say_why(backend, bad, message):
    with pytest.raises(ValueError, match=message):
        await backend.engine.generate(ask("bad", bad(backend)))
    assert len((await backend.engine.generate(ask("good", (2, 3), 3))).output_ids) == 3


async def test_a_request_id_can_be_in_flight_once(backend):
    with pytest.raises(ValueError, match="'twin' is in flight"):
        await all_of(backend.engine, [ask("twin", (2, 3)), ask("twin", (2, 3))])


async def test_new_weights_change_tokens_version_and_cache(backend):
    prompt = prompt_of(12, 12, backend.vocab_size)
    (old,) = await all_of(backend.engine, [ask("old", prompt, 12)])
    await backend.engine.load_weights(backend.paths["v1"], "v1")
    assert backend.engine.info().weight_version == "v1"
    (new,) = await all_of(backend.engine, [ask("new", prompt, 12)])
    assert old.output_ids == backend.greedy(prompt, 12, "v0")
    assert new.output_ids == backend.greedy(prompt, 12, "v1") != old.output_ids
    assert old.weight_versions == (("v0", 0, 12),) and new.weight_versions == (("v1", 0, 12),)
    assert new.cached_tokens == 0


async def test_every_token_of_a_running_request_is_of_the_version_that_it_is_labelled_with(backend):
    prompts = [prompt_of(i, 8, backend.vocab_size) for i in range(4)]
    tasks = [
        asyncio.create_task(backend.engine.generate(ask(f"{i}", p, 100, temperature=1.0, seed=i)))
        for i, p in enumerate(prompts)
    ]
    await asyncio.sleep(0.1)
    await backend.engine.load_weights(backend.paths["v1"], "v1")
    for prompt, task in zip(prompts, tasks, strict=True):
        result = await task
        spans = result.weight_versions
        assert spans[0][1] == 0 and spans[-1][2] == len(result.output_ids) == 100
        for (_, _, end), (_, start, _) in zip(spans, spans[1:], strict=False):
            assert end == start
        for version, start, end in spans:
            logp = backend.logp(
                prompt + result.output_ids[:start], result.output_ids[start:end], 1.0, version
            )
            np.testing.assert_allclose(result.output_logp[start:end], logp, atol=1e-4)


async def test_weights_that_cannot_be_read_are_an_error_and_the_old_ones_stay(backend, tmp_path):
    with pytest.raises(EngineError):
        await backend.engine.load_weights(str(tmp_path / "nothing"), "v9")
    assert backend.engine.info().weight_version == "v0"
    prompt = prompt_of(3, 5, backend.vocab_size)
    (result,) = await all_of(backend.engine, [ask("a", prompt, 4)])
    assert result.output_ids == backend.greedy(prompt, 4, "v0")
    assert result.weight_versions == (("v0", 0, 4),)
