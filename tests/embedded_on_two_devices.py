"""The embedded engine on several devices: the answers of one, prefixes found where they lie.

`test_embedded_devices.py` runs these tests in a process that has two devices.
"""

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest
from families import FAMILIES, make_params
from small_engine import OPTIONS, prompt_of, request, run

from focus.engine.embedded.engine import EmbeddedEngine

MODELS = {
    name: dataclasses.replace(FAMILIES[name], vocab_size=23, max_context=48)
    for name in ("qwen3", "qwen3_5")
}
SIZES = OPTIONS | dict(retained=8)


@functools.cache
def _engine(family, devices):
    engine = EmbeddedEngine(MODELS[family], make_params(MODELS[family]), devices=devices, **SIZES)
    engine.warmup(filtered=False)
    return engine


def fresh_engine(family, devices=2):
    _engine(family, devices).flush_cache()
    return _engine(family, devices)


@pytest.mark.parametrize("family", MODELS)
def test_two_devices_answer_as_one_does(family):
    rng = np.random.default_rng(0)
    requests = [
        request(
            f"{i}",
            prompt_of(i // 2, int(rng.integers(2, 25))),  # half of them share a beginning
            int(rng.integers(1, 12)),
            seed=i,
            temperature=float(rng.choice([0.0, 1.0])),
        )
        for i in range(14)
    ]
    one, two = (run(fresh_engine(family, n), *requests) for n in (1, 2))
    for alone, spread in zip(one, two):
        assert alone.output_ids == spread.output_ids
        np.testing.assert_allclose(alone.output_logp, spread.output_logp, atol=1e-5)
    assert two == run(fresh_engine(family, 2), *requests)  # and to the bit, every time


@pytest.mark.parametrize("family", MODELS)
def test_turns_and_branches_go_where_their_prefix_is(family):
    engine = fresh_engine(family)
    prompts = [prompt_of(100 + i, 12) for i in range(4)]
    turns = run(engine, *(request(f"{i}", p, 5, seed=i) for i, p in enumerate(prompts)))
    assert all(turn.cached_tokens == 0 for turn in turns)
    # One branch of each first: what goes where depends on what is held there, not on the order.
    branches = run(engine, *(request(f"b{i}", p, 3, 9) for i, p in enumerate(prompts[::-1])))
    assert [b.cached_tokens for b in branches] == [11] * 4
    longer = [p + t.output_ids + prompt_of(i, 6) for i, (p, t) in enumerate(zip(prompts, turns))]
    nexts = run(engine, *(request(f"n{i}", p, 3) for i, p in enumerate(longer)))
    assert all(n.cached_tokens >= 11 for n in nexts)
    for i, (prompt, result) in enumerate(zip(longer, nexts)):
        (fresh,) = run(fresh_engine(family, 1), request(f"{i}", prompt, 3))
        assert fresh.output_ids == result.output_ids


def test_completions_are_spread_evenly_and_nothing_compiles_after_the_warmup():
    engine = fresh_engine("qwen3")
    programs, most = engine.compilations, np.zeros(2, int)
    decode = engine._runner.decode

    def counted(running):
        busy = [sum(c.device == device for c in running) for device in range(2)]
        np.maximum(most, busy, out=most)
        return decode(running)

    engine._runner.decode = counted
    try:
        for wave in range(3):
            # Other lengths each time: every bucket, and devices that have nothing to do.
            run(
                engine,
                *(
                    request(f"{wave}.{i}", prompt_of(31 * wave + i, 3 + 7 * wave), 2 + 3 * i)
                    for i in range(1 + 4 * wave)
                ),
            )
            asyncio.run(engine.set_params(make_params(MODELS["qwen3"], wave), f"v{wave + 1}"))
    finally:
        del engine._runner.decode
    asyncio.run(engine.set_params(make_params(MODELS["qwen3"]), "v0"))
    assert most.tolist() == [2, 2]
    assert engine.compilations == programs


def test_a_branch_waits_for_the_device_of_its_prefix_and_others_overtake_it():
    engine = fresh_engine("qwen3")
    base = prompt_of(5, 20)
    run(engine, request("base", base, 1))
    ended = []

    async def note(asked):
        result = await engine.generate(asked)
        ended.append(asked.rid)
        return result

    async def main():
        branches = [
            request(f"b{i}", base, 12, seed=i) for i in range(3)
        ]  # one device has two slots
        return await asyncio.gather(*map(note, [*branches, request("other", prompt_of(6, 20), 2)]))

    results = asyncio.run(main())
    assert [r.cached_tokens for r in results[:3]] == [19] * 3
    assert results[3].cached_tokens < 5 and ended[0] == "other"


def test_every_device_holds_an_equal_share():
    engine = fresh_engine("qwen3")
    leaves = jax.tree.leaves(engine._runner._cache)
    assert all(len(leaf.sharding.device_set) == 2 for leaf in leaves)
    # Two slots, four retained rows and a scratch row on each.
    assert {leaf.addressable_shards[0].data.shape[0] for leaf in leaves} == {7}
