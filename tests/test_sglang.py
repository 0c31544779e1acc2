"""The unmodified SGLang, behind its own router, in the hands of our client: prefixes and faults.

What a single server promises is in `test_engines.py`; faults in all their variety, with a server
that makes its tokens up, in `test_server_faults.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal

import backends
import numpy as np
import pytest

from focus.engine.protocol import GenerateRequest, SamplingParams
from focus.engine.servers.check import Load, check_fleet
from focus.engine.servers.fleet import Limits

pytestmark = pytest.mark.sglang

# A busy machine may take long to answer a probe, and loses workers that are alive.
LIMITS = Limits(
    attempts=20,
    request_timeout_s=300.0,
    control_timeout_s=120.0,
    probe_timeout_s=20.0,
    probe_every_s=1.0,
    break_after=2,
    break_s=1.0,
    dead_after_s=1800.0,
)


def ask(rid, prompt, count, *, session="", temperature=1.0):
    params = SamplingParams(max_new_tokens=count, temperature=temperature, ignore_eos=True)
    return GenerateRequest(rid, tuple(prompt), params, session=session)


def prompts(count, length, seed=0):
    drawn = np.random.default_rng(seed).integers(0, backends.MODEL.vocab_size, (count, length))
    return [tuple(row) for row in drawn.tolist()]


async def everyone(engine, timeout_s=1800.0):
    async with asyncio.timeout(timeout_s):
        while set(engine.states().values()) != {"fit"}:
            await asyncio.sleep(0.2)


def check(result, asked, *versions):
    """Whole, and every token what the trainer makes of it under the version it is labelled with."""
    assert len(result.output_ids) == asked.sampling.max_new_tokens
    spans = result.weight_versions
    assert spans[0][1] == 0 and spans[-1][2] == len(result.output_ids)
    for version, start, end in spans:
        assert version in versions
        before = asked.input_ids + result.output_ids[:start]
        logp = backends.model_logp(before, result.output_ids[start:end], 1.0, version)
        np.testing.assert_allclose(result.output_logp[start:end], logp, atol=1e-4)


async def all_of(engine, asked, *versions):
    """Asks all at once and checks every answer."""
    for r, result in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
        check(result, r, *versions)


async def play(engine, name, prompt, turns=3, words=8, observed=12):
    """Turns of an episode; its states."""
    states = []
    for turn in range(turns):
        states.append(prompt)
        said = await engine.generate(ask(f"{name}:{turn}", prompt, words, session=name))
        prompt += said.output_ids + prompts(1, observed, seed=hash((name, turn)) % 2**31)[0]
    return states


@pytest.mark.parametrize("routed", [False, True], ids=["by session", "by router"])
async def test_branches_recompute_at_most_a_twentieth_of_their_prefixes(real_fleet, routed):
    router = real_fleet.router.url if routed else None
    async with backends.client(real_fleet.urls, limits=LIMITS, router_url=router) as engine:
        await everyone(engine)
        await engine.load_weights(real_fleet.paths["v0"], "v0")
        starts = prompts(8, 24, seed=1 + routed)
        episodes = await asyncio.gather(
            *(play(engine, f"{routed}/{i}", prompt) for i, prompt in enumerate(starts))
        )
        shared, recomputed = 0, 0
        for i, states in enumerate(episodes):
            branches = [
                ask(f"{routed}/{i}/{j}", p, 4, session=f"{routed}/{i}")
                for j, p in enumerate(states)
            ]
            for result in await asyncio.gather(*map(engine.generate, branches)):
                shared += result.prompt_tokens - 1
                recomputed += result.prompt_tokens - 1 - result.cached_tokens
        print(f"recomputed {'by router' if routed else 'by session'}: {recomputed / shared:.1%}")
        assert recomputed <= 0.05 * shared


async def test_a_check_of_the_fleet_finds_it_fit_and_leaves_it_as_it_was(real_fleet):
    async with backends.client(real_fleet.urls, limits=LIMITS) as engine:
        await everyone(engine)
        await engine.load_weights(real_fleet.paths["v1"], "v1")
    findings = await check_fleet(
        real_fleet.urls,
        real_fleet.paths["v0"],
        router_url=real_fleet.router.url,
        load=Load(requests=8, prompt_tokens=32, new_tokens=48),
        limits=LIMITS,
    )
    print(*(f"{f.name}: {f.text}" for f in findings), sep="\n")
    assert all(finding.fit for finding in findings) and len(findings) == 7
    assert "v1" in findings[-1].text


async def test_a_worker_is_killed_and_restarted_under_load(real_fleet):
    """kill -9 in the middle: everything ends well, and it is back with the current weights."""
    victim = real_fleet.workers[0]
    async with backends.client(real_fleet.urls, limits=LIMITS) as engine:
        await everyone(engine)
        await engine.load_weights(real_fleet.paths["v1"], "v1")
        asked = [ask(f"k{i}", p, 90, session=f"k{i}") for i, p in enumerate(prompts(12, 8, 3))]
        tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
        await asyncio.sleep(1.0)
        victim.kill()
        for r, task in zip(asked, tasks, strict=True):
            check(await task, r, "v1")
        assert engine.stats.failures > 0
        # Under the right name, but with the weights that it starts with; and with a short queue.
        victim.start(
            "--weight-version", "v1", "--max-running-requests", "2", "--max-queued-requests", "1"
        )
        await everyone(engine)
        assert engine.stats.updates == 3
        asked = [ask(f"b{i}", p, 40, session=f"b{i}") for i, p in enumerate(prompts(16, 8, 4))]
        for r, result in zip(
            asked, await asyncio.gather(*map(engine.generate, asked)), strict=True
        ):
            check(result, r, "v1")
        print(f"busy: {engine.stats.busy}")
        assert engine.stats.busy > 0  # 503 queue full


async def test_a_worker_that_hangs_is_left_and_comes_back_stale(real_fleet):
    """SIGSTOP: its requests move, an update goes on without it, and it is brought up to date."""
    frozen = real_fleet.workers[1]
    limits = dataclasses.replace(LIMITS, probe_timeout_s=5.0)
    async with backends.client(real_fleet.urls, limits=limits) as engine:
        await everyone(engine)
        await engine.load_weights(real_fleet.paths["v1"], "v1")
        asked = [ask(f"h{i}", p, 60, session=f"h{i}") for i, p in enumerate(prompts(8, 8, 5))]
        tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
        await asyncio.sleep(0.5)
        frozen.signal(signal.SIGSTOP)
        try:
            for r, task in zip(asked, tasks, strict=True):
                check(await task, r, "v1")
            async with asyncio.timeout(600):
                while engine.states()[frozen.url] == "fit":
                    await asyncio.sleep(0.1)
            await engine.load_weights(real_fleet.paths["v2"], "v2")
        finally:
            frozen.signal(signal.SIGCONT)
        await everyone(engine)
        assert set(engine.versions().values()) == {"v2"}
        asked = [ask(f"i{i}", p, 10, session=f"i{i}") for i, p in enumerate(prompts(8, 8, 6))]
        for r, result in zip(
            asked, await asyncio.gather(*map(engine.generate, asked)), strict=True
        ):
            check(result, r, "v2")


async def test_the_router_is_killed_and_restarted_under_load(real_fleet):
    """Without it requests go to the workers themselves."""
    router = real_fleet.router
    async with backends.client(real_fleet.urls, limits=LIMITS, router_url=router.url) as engine:
        await everyone(engine)
        await engine.load_weights(real_fleet.paths["v0"], "v0")
        asked = [ask(f"r{i}", p, 60, session=f"r{i}") for i, p in enumerate(prompts(8, 8, 7))]
        tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
        await asyncio.sleep(0.5)
        router.kill()
        for r, task in zip(asked, tasks, strict=True):
            check(await task, r, "v0")
        router.start()
        router.wait()
        await all_of(engine, [ask(f"s{i}", p, 10) for i, p in enumerate(prompts(4, 8, 8))], "v0")
