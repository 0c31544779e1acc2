"""Adapters to servers: honest versions, no traffic without the current one, no leftovers."""

from __future__ import annotations

import asyncio
import json

import jax
import numpy as np
import pytest
import tiny
from adapters import LORA, make_adapters
from fake_server import fake_fleet
from test_hf import SMALL, make_params
from test_publish import directories
from test_server_faults import check, client, everyone, request, sent, until

from focus.engine.protocol import EngineError, FinishReason, GenerateResult
from focus.engine.servers.connection import Rejected
from focus.engine.servers.fleet_adapters import Adapter
from focus.engine.wire import BadReply
from focus.formats import hf, peft
from focus.learner.publish import AdapterPublisher
from focus.policy import lora
from focus.run import experiment


@pytest.fixture
def paths(tmp_path):
    """Directories: the fake model looks no further than whether they are there."""
    for name in ("base", "v0", "v1", "v2", "v3"):
        (tmp_path / name).mkdir()
    return {entry.name: str(entry) for entry in tmp_path.iterdir()}


async def give(engine, paths, *names):
    for name in names:
        await engine.load_adapter(paths[name], name)


async def begin(engine, paths, *names):
    """Everybody has the base and some adapters."""
    await everyone(engine)
    await engine.load_weights(paths["base"], "base")
    await give(engine, paths, *names)


def posts(server, path):
    return [body for called, body in server.calls if called == path]


# --- versions ------------------------------------------------------------------------------------


async def test_an_adapter_samples_what_merged_weights_of_its_version_sample(paths):
    asked = request(count=12)
    async with fake_fleet(1) as servers, client(servers) as engine:
        await everyone(engine)
        await engine.load_weights(paths["v1"], "v1")
        merged = await engine.generate(asked)
    async with fake_fleet(1) as servers, client(servers) as engine:
        await begin(engine, paths, "v0", "v1")
        result = await engine.generate(asked)
        assert [body["lora_path"] for body in sent(servers)] == ["v1"]
    assert result == merged
    assert result.weight_versions == (("v1", 0, 12),)


async def under_way(engine, servers, rid):
    """A request of 40 tokens some of which are there."""
    asked = request(rid, count=40)
    task = asyncio.create_task(engine.generate(asked))
    await until(lambda: servers[0].tokens > 5)
    return asked, task


async def test_weights_travel_once_and_adapters_need_no_pause(paths):
    async with fake_fleet(2) as servers, client(servers) as engine:
        await begin(engine, paths, "v0", "v1", "v2")
        assert engine.info().weight_version == "v2"
        for server in servers:
            assert len(posts(server, "/update_weights_from_disk")) == 1
            assert len(posts(server, "/pause_generation")) == 1
            names = [body["lora_name"] for body in posts(server, "/load_lora_adapter")]
            assert names == ["v0", "v1", "v2"]
        assert engine.stats.updates == 8 and engine.stats.failed_updates == 0


async def test_a_running_request_ends_with_the_adapter_that_it_began_with(paths):
    async with fake_fleet(1, token_s=0.01) as servers, client(servers) as engine:
        await begin(engine, paths, "v0")
        running = request("long", count=60)
        task = asyncio.create_task(engine.generate(running))
        await until(lambda: sent(servers))
        await give(engine, paths, "v1", "v2", "v3")
        later = request("later")
        check(await engine.generate(later), later, "v3")
        assert not task.done()
        check(await task, running, "v0")
        # It was kept for that request, and is taken away after it.
        await until(lambda: set(servers[0].service.adapters) == {"v2", "v3"})


async def test_requests_go_on_while_a_slow_worker_loads(paths):
    async with fake_fleet(2) as servers, client(servers) as engine:
        await begin(engine, paths, "v0")
        servers[0].adapter_faults.append("slow")
        task = asyncio.create_task(give(engine, paths, "v1"))
        await until(lambda: "v1" in servers[1].service.adapters)
        while not task.done():
            asked = request()
            before = engine.info().weight_version
            check(await engine.generate(asked), asked, before)
            await asyncio.sleep(0.05)
        # Who was ready first has kept what is not current yet.
        assert all(len(posts(server, "/load_lora_adapter")) == 2 for server in servers)
        assert engine.stats.failures == 0


async def test_an_aborted_request_goes_on_with_the_adapter_of_now(paths):
    async with fake_fleet(1, token_s=0.01) as servers, client(servers) as engine:
        await begin(engine, paths, "v0")
        asked, task = await under_way(engine, servers, "cut")
        await give(engine, paths, "v1")
        for body in sent(servers):  # by the server, not by the caller
            await servers[0].service._cut(body["rid"], aborted=True)
        result = await task
        check(result, asked, "v0", "v1")
        assert [version for version, _, _ in result.weight_versions] == ["v0", "v1"]


async def test_prefixes_are_those_of_one_adapter(paths):
    async with fake_fleet(1) as servers, client(servers) as engine:
        await begin(engine, paths, "v0")
        prompt = tuple(range(2, 22))
        first = await engine.generate(request("a", prompt, session="s"))
        again = await engine.generate(request("b", prompt, session="s"))
        await give(engine, paths, "v1")
        other = await engine.generate(request("c", prompt, session="s"))
        assert (first.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, 19, 0)


async def test_other_weights_end_the_adapters_that_belong_to_the_old_ones(paths):
    async with fake_fleet(1, token_s=0.01) as servers, client(servers) as engine:
        await begin(engine, paths, "v0")
        asked, task = await under_way(engine, servers, "across")
        await engine.load_weights(paths["v2"], "v2")
        assert engine.info().weight_version == "v2"
        # What was sampled with an adapter on a base that changed below it is thrown away.
        check(await task, asked, "v2")
        assert engine.stats.discarded_tokens > 0


def test_a_reply_is_labelled_only_if_it_is_of_the_base():
    adapter = Adapter("v3", "/there", base="base")

    def result(*spans):
        return GenerateResult("r", "", (5, 6), (-1.0, -1.0), FinishReason("length"), 3, 0, spans)

    assert adapter.labelled(result(("base", 0, 2))).weight_versions == (("v3", 0, 2),)
    assert adapter.labelled(result()).weight_versions == ()
    with pytest.raises(BadReply, match=r"'v3' belongs on 'base', and was sampled on \['v0'\]"):
        adapter.labelled(result(("base", 0, 1), ("v0", 1, 2)))


# What the real server, 0.5.23, says of an adapter that it has not, or cannot have.
@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Got LoRA adapter that has never been loaded: v3\nAll loaded adapters: dict_keys([]).", 1),
        ("Failed to implicitly load LoRA adapter v3: Repo id must be in the form", 1),
        ("LoRA adapter 'v3' was requested, but LoRA is not enabled.", 1),
        ("max_new_tokens must be at least 0, got -1.", 0),
    ],
)
def test_a_refusal_that_names_the_adapter_is_about_it(text, meant):
    refusal = Rejected(f"POST http://there/generate: 400 {text}")
    assert Adapter("v3", "/there", base="base").is_meant_by(refusal) == bool(meant)


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["500", "400", "hang", "lost"])
async def test_a_worker_that_could_not_load_an_adapter_gets_no_request_until_it_has(fault, paths):
    async with fake_fleet(2) as servers, client(servers, update_timeout_s=1.0) as engine:
        await begin(engine, paths, "v0")
        good, bad = servers
        bad.adapter_faults.extend([fault] * 3)
        await give(engine, paths, "v1")
        assert "v1" in engine.states()[bad.url] and engine.states()[good.url] == "fit"
        before = len(bad.generations())
        for i in range(6):
            asked = request(f"{i}", session=f"{i}")
            check(await engine.generate(asked), asked, "v1")
            if bad.adapter_faults:
                assert len(bad.generations()) == before
        await everyone(engine)
        assert engine.stats.failed_updates == 3
        assert len(posts(bad, "/update_weights_from_disk")) == 1  # its weights were never wrong
        for i in range(6):
            asked = request(f"+{i}", session=f"+{i}")
            check(await engine.generate(asked), asked, "v1")
        assert {body["lora_path"] for body in bad.generations()[before:]} == {"v1"}


async def test_an_adapter_that_nobody_takes_is_an_error_and_the_old_one_stays(paths, tmp_path):
    async with fake_fleet(2) as servers, client(servers) as engine:
        await begin(engine, paths, "v0")
        with pytest.raises(EngineError, match="no worker has taken adapter 'v9'"):
            await engine.load_adapter(str(tmp_path / "nowhere"), "v9")
        assert engine.info().weight_version == "v0"
        asked = request()
        check(await engine.generate(asked), asked, "v0")


async def test_an_adapter_without_weights_below_it_is_refused(paths):
    async with fake_fleet(1) as servers, client(servers) as engine:
        await everyone(engine)
        with pytest.raises(ValueError, match="'v0' needs the weights that it belongs to"):
            await give(engine, paths, "v0")


@pytest.mark.parametrize("version", ["default", "base"], ids=["stale", "under the right name"])
async def test_a_restarted_worker_gets_weights_and_adapter_again(version, paths):
    async with fake_fleet(2) as servers, client(servers) as engine:
        await begin(engine, paths, "v0", "v1")
        victim = servers[0]
        await victim.kill()
        await until(lambda: engine.states()[victim.url] != "fit")
        await victim.start(version=version)
        await everyone(engine)
        assert victim.model.version == "base" and "v1" in victim.service.adapters
        assert len(posts(victim, "/update_weights_from_disk")) == 2
        for i in range(8):
            asked = request(f"{i}", session=f"{i}")
            check(await engine.generate(asked), asked, "v1")
        assert victim.tokens > 0


async def test_a_restart_that_nobody_saw_costs_another_try_and_nothing_else(paths):
    """The worker is back before a probe has missed it: a request finds out."""
    async with fake_fleet(1) as servers, client(servers, probe_every_s=0.5) as engine:
        await begin(engine, paths, "v0")
        await asyncio.sleep(0.01)
        servers[0].service.adapters.clear()
        asked = request()
        check(await engine.generate(asked), asked, "v0")
        refused, answered = sent(servers)
        assert refused["lora_path"] == answered["lora_path"] == "v0"
        assert engine.stats.updates == 3


async def test_a_worker_that_was_away_during_a_push_is_given_what_it_missed(paths):
    async with fake_fleet(2) as servers, client(servers, probe_timeout_s=0.5) as engine:
        await begin(engine, paths, "v0")
        servers[1].frozen = True
        await until(lambda: engine.states()[servers[1].url] != "fit")
        await give(engine, paths, "v1")
        servers[1].frozen = False
        await everyone(engine)
        assert "v1" in servers[1].service.adapters


async def test_an_answer_that_was_lost_is_asked_for_and_adapters_of_others_stay(paths):
    async with fake_fleet(1) as servers, client(servers) as engine:
        held = servers[0].service.adapters
        held.update(v0=paths["v0"], theirs="/of/another/run/theirs")
        await begin(engine, paths, "v0", "v1", "v2")
        assert set(held) == {"theirs", "v1", "v2"}
        names = [body["lora_name"] for body in posts(servers[0], "/load_lora_adapter")]
        assert names == ["v1", "v2"]


async def test_a_process_that_does_not_push_follows_the_one_that_does(paths):
    async with fake_fleet(2) as servers, client(servers) as engine:
        async with client(servers, pushes=False) as other:
            await everyone(other)
            await asyncio.gather(
                engine.load_weights(paths["base"], "base"),
                other.load_weights(paths["base"], "base"),
            )
            for name in ("v0", "v1", "v2"):
                await asyncio.gather(give(engine, paths, name), give(other, paths, name))
                asked = request(f"after {name}")
                check(await other.generate(asked), asked, name)
            await everyone(other)
            assert other.stats.updates == 0 and other.stats.failures == 0
        async with client(servers, pushes=False, update_timeout_s=0.3) as other:
            await everyone(other)
            await other.load_weights(paths["base"], "base")
            with pytest.raises(EngineError, match="no worker has adapter 'v3' after 0.3 s"):
                await give(other, paths, "v3")


# --- what lies on disk ---------------------------------------------------------------------------


def attached(seed):
    return lora.attach(make_params(SMALL), make_adapters(SMALL, seed=seed))


async def test_a_run_writes_its_base_once_and_two_adapters_at_a_time(tmp_path):
    root = tmp_path / "weights"
    async with fake_fleet(2) as servers, client(servers) as engine:
        await everyone(engine)
        push = AdapterPublisher(root, SMALL, engine, dtype="float32", run="a")
        for step in range(4):
            await push(attached(step), step)
            assert engine.info().weight_version == f"v{step}-a"
            kept = [f"v{i}-a" for i in range(max(step - 1, 0), step + 1)]
            assert directories(root) == ["base-a", *kept]
            assert all(set(server.service.adapters) == set(kept) for server in servers)
        config, base = hf.load_checkpoint(root / "base-a")
        jax.tree.map(np.testing.assert_array_equal, base, make_params(SMALL))
        setting, adapters = peft.load_adapter(root / "v3-a", config)
        assert (setting.rank, setting.alpha) == (LORA.rank, LORA.alpha)
        jax.tree.map(np.testing.assert_array_equal, adapters, make_adapters(SMALL, seed=3))
        fields = json.loads((root / "v3-a" / "adapter_config.json").read_text())
        assert fields["base_model_name_or_path"] == str(root / "base-a")
        size = sum(file.stat().st_size for file in (root / "v3-a").iterdir())
        assert size < sum(file.stat().st_size for file in (root / "base-a").iterdir())


async def test_a_resumed_run_has_names_of_its_own_and_clears_away_the_old_ones(tmp_path):
    async with fake_fleet(1) as servers, client(servers) as engine:
        await everyone(engine)
        await AdapterPublisher(tmp_path, SMALL, engine, dtype="float32", run="a")(attached(0), 5)
        again = AdapterPublisher(tmp_path, SMALL, engine, dtype="float32", run="b")
        await again(attached(1), 5)
        assert servers[0].model.version == "base-b"
        assert directories(tmp_path) == ["base-b", "v5-b"]
        assert servers[0].service.adapters == {"v5-b": str(tmp_path / "v5-b")}


async def test_plain_parameters_are_no_adapters(tmp_path):
    push = AdapterPublisher(tmp_path, SMALL, None, dtype="float32", run="a")
    with pytest.raises(ValueError, match="no adapters"):
        await push(make_params(SMALL), 0)
    assert directories(tmp_path) == []


def test_detached_adapters_are_those_that_were_attached():
    params, adapters = make_params(SMALL), make_adapters(SMALL)
    base, setting, found = lora.detach(lora.attach(params, adapters))
    jax.tree.map(np.testing.assert_array_equal, base, params)
    jax.tree.map(np.testing.assert_array_equal, found, adapters)
    assert lora.adapter_shapes(SMALL, setting) == lora.adapter_shapes(SMALL, LORA)


# --- configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "engine", "push", "message"),
    [
        (0, "sglang", "adapter", "learner.lora.rank=0 and rollout.engine='sglang'"),
        (4, "embedded", "adapter", "learner.lora.rank=4 and rollout.engine='embedded'"),
        (4, "sglang", "half", "rollout.push must be one of weights, adapter; got 'half'"),
    ],
)
def test_a_config_that_cannot_push_adapters_is_refused(rank, engine, push, message):
    config = tiny.get_config("focus")
    config.learner.lora.rank = 4
    config.rollout.update(engine="sglang", urls=("http://127.0.0.1:1",), push="adapter")
    experiment.validate(config)
    config.learner.lora.rank = rank
    config.rollout.update(engine=engine, push=push)
    config.rollout.urls = ("http://127.0.0.1:1",) if engine == "sglang" else ()
    with pytest.raises(ValueError, match=message):
        experiment.validate(config)
