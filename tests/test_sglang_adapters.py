"""Adapters on the unmodified SGLang, behind its router: they compute what merged weights do."""

from __future__ import annotations

import asyncio
import os

import backends
import numpy as np
import pytest
from adapters import make_adapters
from test_publish import directories
from test_sglang import LIMITS, ask, everyone, prompts

from focus.engine.protocol import EngineError
from focus.engine.servers.connection import Connection
from focus.learner.publish import AdapterPublisher
from focus.policy import lora
from focus.policy.lora import LoraConfig

pytestmark = pytest.mark.sglang

LORA = LoraConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A worker with room for adapters, and a router."""
    root = tmp_path_factory.mktemp("sglang-lora")
    paths = backends.export(root, ("v0",))
    flags = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules")
    flags += lora.projections(backends.MODEL)
    worker = backends.sglang_process(paths["v0"], root / "worker.log", "launch", flags)
    router = backends.router_process([worker.url], root / "router.log")
    try:
        for process in (worker, router):
            process.start()
        for process in (worker, router):
            process.wait()
        yield worker, router
    finally:
        for process in (router, worker):
            process.kill()


def weights(step):
    """Parameters of a step, with adapters attached: the base is that of "v2"."""
    return lora.attach(backends.params("v2"), make_adapters(backends.MODEL, LORA, seed=step))


def merged_logp(asked, result, step):
    """What the trainer makes of a completion with merged weights."""
    base, _, adapters = lora.detach(weights(step))
    tokens = np.zeros((1, backends.MODEL.max_context), np.int32)
    whole = asked.input_ids + result.output_ids
    tokens[0, : len(whole)] = whole
    temperature = float(asked.sampling.temperature)
    logp = backends._logp(lora.merge(base, adapters), tokens, temperature)
    return np.asarray(logp)[0, len(asked.input_ids) : len(whole)]


async def check(engine, name, step, version, count=6):
    asked = [ask(f"{name}{i}", p, 24, session=f"{i}") for i, p in enumerate(prompts(count, 10))]
    results = await asyncio.gather(*map(engine.generate, asked))
    for a, result in zip(asked, results, strict=True):
        assert result.weight_versions == ((version, 0, 24),)
        np.testing.assert_allclose(result.output_logp, merged_logp(a, result, step), atol=1e-4)
    return results


async def test_an_adapter_computes_what_merged_weights_compute_and_old_ones_go(fleet, tmp_path):
    worker, router = fleet
    async with backends.client([worker.url], limits=LIMITS, router_url=router.url) as engine:
        await everyone(engine)
        push = AdapterPublisher(tmp_path, backends.MODEL, engine, dtype="float32", run="a")
        for step in range(3):
            await push(weights(step), step)
            results = await check(engine, f"p{step}", step, f"v{step}-a")
            # No prefix of another adapter is taken for one of this.
            assert all(result.cached_tokens <= 1 for result in results)
            again = await check(engine, f"q{step}", step, f"v{step}-a")
            assert all(result.cached_tokens >= 9 for result in again)
        assert directories(tmp_path) == ["base-a", "v1-a", "v2-a"]
        api = Connection(worker.url, engine._upkeep._session, 60.0)
        assert await api.adapters() == {n: str(tmp_path / n) for n in ("v1-a", "v2-a")}
        with pytest.raises(EngineError, match="no worker has taken adapter 'v9': .*"):
            await engine.load_adapter(str(tmp_path / "nowhere"), "v9")
        assert engine.stats.failures == 0


async def test_a_request_that_runs_across_a_push_keeps_its_adapter(fleet, tmp_path):
    worker, _ = fleet
    async with backends.client([worker.url], limits=LIMITS) as engine:
        await everyone(engine)
        push = AdapterPublisher(tmp_path, backends.MODEL, engine, dtype="float32", run="b")
        await push(weights(0), 0)
        asked = ask("long", prompts(1, 10, seed=3)[0], 150)
        running = asyncio.create_task(engine.generate(asked))
        await asyncio.sleep(0.3)
        await push(weights(1), 1)
        await check(engine, "after", 1, "v1-b", count=2)
        result = await running
        assert result.weight_versions == (("v0-b", 0, 150),)
        np.testing.assert_allclose(result.output_logp, merged_logp(asked, result, 0), atol=1e-4)


async def test_a_worker_that_is_killed_gets_weights_and_adapter_again(fleet, tmp_path):
    worker, router = fleet
    async with backends.client([worker.url], limits=LIMITS, router_url=router.url) as engine:
        await everyone(engine)
        push = AdapterPublisher(tmp_path, backends.MODEL, engine, dtype="float32", run="c")
        await push(weights(5), 5)
        worker.kill()
        asked = asyncio.create_task(check(engine, "back", 5, "v5-c", count=2))
        worker.start()
        await asked
        assert engine.states() == {worker.url: "fit"} and engine.stats.updates == 4
        assert os.path.isdir(tmp_path / "base-c")
