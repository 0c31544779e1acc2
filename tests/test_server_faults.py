"""Whatever servers do: completions are whole, within their budget, and of current weights."""

from __future__ import annotations

import asyncio
import time

import pytest
from fake_server import EOS, VOCAB, fake_fleet, logp_of, next_token, text_of

from focus.engine.protocol import EngineError, FleetDead, GenerateRequest, SamplingParams
from focus.engine.servers.fleet import Limits
from focus.engine.servers.sglang import SGLangEngine
from focus.rollout.pool import RetryPolicy, generate_with_retries

# Times that have to run out in a test are set there; these are long, for machines that stall.
PATIENT = dict(
    connect_timeout_s=20.0,
    request_timeout_s=60.0,
    control_timeout_s=20.0,
    update_timeout_s=20.0,
    probe_every_s=0.02,
    probe_timeout_s=10.0,
    backoff_s=0.01,
    break_s=0.02,
    dead_after_s=60.0,
)
FAULTS = (
    "reset",
    "hang",
    "slow",
    "500",
    "503",
    "truncated",
    "invalid",
    "count",
    "logprobs",
    "version",
    "too_long",
    "trimmed",
)
GARBLED = ("count", "logprobs", "version", "too_long", "trimmed")


def client(servers, *, router=None, max_context=256, pushes=True, **limits):
    return SGLangEngine(
        [server.url for server in servers],
        router_url=router,
        vocab_size=VOCAB,
        max_context=max_context,
        decode=text_of,
        eos_token_ids=(EOS,),
        limits=Limits(**(PATIENT | limits)),
        pushes=pushes,
    )


def request(rid="r", prompt=(5, 6, 7), count=8, *, session="", **options):
    options = {"temperature": 1.0, "ignore_eos": True} | options
    return GenerateRequest(
        rid, tuple(prompt), SamplingParams(max_new_tokens=count, **options), session=session
    )


def check(result, asked, *versions):
    """Every token is what the version that it is labelled with says after what comes before it."""
    labels = [v for v, start, end in result.weight_versions for _ in range(start, end)]
    assert len(labels) == len(result.output_ids) <= asked.sampling.max_new_tokens
    assert set(labels) <= set(versions)
    ids = list(asked.input_ids)
    for label, token, logp in zip(labels, result.output_ids, result.output_logp, strict=True):
        assert token == next_token(label, ids)
        assert logp == logp_of(label, ids, token, asked.sampling.temperature)
        ids.append(token)
    assert result.rid == asked.rid and result.prompt_tokens == len(asked.input_ids)


async def until(condition, timeout_s=60.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def last_of(values, wanted):
    return len(values) - 1 - values[::-1].index(wanted)


async def everyone(engine):
    await until(lambda: set(engine.states().values()) == {"fit"})


def sent(servers):
    return [body for server in servers for body in server.generations()]


@pytest.fixture
def weights(tmp_path):
    """Two directories: the fake model looks no further than whether they are there."""
    (tmp_path / "v1").mkdir()
    (tmp_path / "v2").mkdir()
    return tmp_path


# --- one request ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_costs_another_try_and_nothing_else(fault, weights):
    limits = dict(request_timeout_s=0.7, attempts=20)  # "slow" takes a second
    async with fake_fleet(2) as servers, client(servers, **limits) as engine:
        await everyone(engine)
        await engine.load_weights(str(weights / "v1"), "v1")
        for server in servers:
            server.faults.append(fault)
        asked = request()
        result = await engine.generate(asked)
        check(result, asked, "v1")
        assert len(result.output_ids) == 8
        tries = sent(servers)
        assert len(tries) > 1 and len({body["rid"] for body in tries}) == len(tries)
        assert bool(engine.stats.busy) == (fault == "503") != bool(engine.stats.failures)
        assert bool(engine.stats.discarded_tokens) == (fault in GARBLED)
        assert engine.stats.generated_tokens == 8


async def test_a_request_fails_after_its_attempts_and_says_why():
    async with fake_fleet(2) as servers, client(servers, attempts=3) as engine:
        for server in servers:
            server.faults.extend(["500"] * 9)
        with pytest.raises(EngineError, match="500 on purpose"):
            await engine.generate(request())
        assert len(sent(servers)) == 3 == engine.stats.failures


async def test_the_second_try_goes_to_another_worker():
    async with fake_fleet(2) as servers, client(servers, break_after=9) as engine:
        await everyone(engine)
        for server in servers:
            server.faults.append("500")
        await engine.generate(request(session="s"))
        counts = sorted(len(server.generations()) for server in servers)
        assert counts == [1, 2]


async def test_a_full_queue_is_waited_for_and_does_not_use_up_attempts():
    async with fake_fleet(1) as servers, client(servers, attempts=1) as engine:
        servers[0].faults.extend(["503"] * 5)
        assert len((await engine.generate(request())).output_ids) == 8
        assert engine.stats.busy == 5


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(prompt=(1, VOCAB)), f"token id {VOCAB} at position 1"),
        (dict(prompt=(-1,)), "token id -1"),
        (dict(prompt=()), "empty"),
        (dict(prompt=(2,) * 256), "leaves no room"),
        (dict(stop_token_ids=(3,)), "do not go with ignore_eos=True"),
    ],
)
async def test_nothing_that_could_hurt_a_server_is_sent(bad, message):
    async with fake_fleet(1) as servers, client(servers) as engine:
        with pytest.raises(ValueError, match=message):
            await engine.generate(request(**bad))
        assert not sent(servers)


async def test_every_sampling_value_is_sent():
    async with fake_fleet(1) as servers, client(servers) as engine:
        asked = request(temperature=0.6, top_p=0.9, top_k=7, stop_token_ids=(3,), ignore_eos=False)
        await engine.generate(asked)
        (body,) = sent(servers)
        assert body["return_logprob"] is True and "logprob_start_len" not in body
        assert body["sampling_params"] == {
            "max_new_tokens": 8,
            "temperature": 0.6,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "n": 1,
            "stop": [],
            "stop_token_ids": [3],
            "ignore_eos": False,
            "skip_special_tokens": True,
            "no_stop_trim": False,
            "sampling_seed": 0,
        }


async def test_what_a_server_rejects_is_the_callers_mistake():
    async with fake_fleet(1) as servers, client(servers) as engine:
        servers[0].faults.append("400")
        with pytest.raises(ValueError, match="400 on purpose"):
            await engine.generate(request())
        assert len(sent(servers)) == 1


async def test_a_server_of_shorter_contexts_is_not_used_and_told_how_to_start():
    async with fake_fleet(1, max_context=16) as servers:
        async with client(servers, dead_after_s=0.5) as engine:
            with pytest.raises(FleetDead, match="prompts of 15 tokens.*--context-length 264"):
                await engine.generate(request())
        assert not sent(servers)


async def test_a_callers_timeout_frees_the_slot_on_the_server():
    async with fake_fleet(1, token_s=0.02) as servers, client(servers) as engine:
        policy = RetryPolicy(attempts=1, timeout_s=0.1)
        with pytest.raises(EngineError, match="no answer within 0.1 s"):
            await generate_with_retries(engine, request(count=200), policy)
        await until(lambda: not servers[0].model.running)
        assert servers[0].tokens < 50


# --- aborts and resumes --------------------------------------------------------------------------


async def test_an_abort_by_the_caller_keeps_what_there_is():
    async with fake_fleet(1, token_s=0.01) as servers, client(servers) as engine:
        asked = request(count=200)
        task = asyncio.create_task(engine.generate(asked))
        await until(lambda: servers[0].tokens > 3)
        await engine.abort("nobody")
        await engine.abort("r")
        result = await task
        check(result, asked, "default")
        assert result.finish_reason.type == "abort" and 3 < len(result.output_ids) < 200


async def test_an_abort_does_not_wait_for_a_server_that_does_not_answer():
    limits = dict(request_timeout_s=600.0, control_timeout_s=0.2)
    async with fake_fleet(1) as servers, client(servers, **limits) as engine:
        servers[0].faults.append("hang")
        task = asyncio.create_task(engine.generate(request()))
        await until(lambda: sent(servers))
        await engine.abort("r")
        result = await asyncio.wait_for(task, 60)
        assert (result.output_ids, result.finish_reason.type) == ((), "abort")


async def test_an_abort_ends_even_a_request_that_has_nowhere_to_go():
    async with fake_fleet(1) as servers:
        await servers[0].kill()
        async with client(servers) as engine:
            task = asyncio.create_task(engine.generate(request()))
            await asyncio.sleep(0.05)
            await engine.abort("r")
            assert (await asyncio.wait_for(task, 60)).finish_reason.type == "abort"


async def test_what_a_server_aborts_goes_on_with_what_is_left_of_its_budget():
    async with fake_fleet(1, token_s=0.005) as servers, client(servers) as engine:
        asked = request(count=30)
        task = asyncio.create_task(engine.generate(asked))
        for enough in (4, 12, 20):  # somebody else at the server cuts everything off
            await until(lambda: servers[0].tokens >= enough)  # noqa: B023
            for rid in list(servers[0].model.running):
                await servers[0].model.abort(rid)
        result = await task
        check(result, asked, "default")
        assert result.finish_reason.type == "length" and len(result.output_ids) == 30
        assert result.weight_versions == (("default", 0, 30),)
        asks = [
            (len(body["input_ids"]), body["sampling_params"]["max_new_tokens"])
            for body in sent(servers)
        ]
        assert len(asks) == 4 and all(prompt + left == 33 for prompt, left in asks)
        assert len({body["sampling_params"]["sampling_seed"] for body in sent(servers)}) == 4
        assert servers[0].tokens == 30 and engine.stats.resumed == 3


async def test_a_stop_string_is_found_across_an_abort():
    whole = [5, 6, 7]
    while len(whole) < 15:
        whole.append(next_token("default", whole))
    output = whole[3:]
    stop = f"{output[4]}><{output[5]}"
    assert stop not in text_of(output[:5])
    async with fake_fleet(1, token_s=0.02) as servers, client(servers) as engine:
        task = asyncio.create_task(engine.generate(request(count=12, stop=(stop,))))
        await until(lambda: servers[0].tokens == 5)
        for rid in list(servers[0].model.running):
            await servers[0].model.abort(rid)
        result = await task
        assert engine.stats.resumed == 1
        assert result.output_ids == tuple(output[:6]) and len(result.output_logp) == 6
        assert result.finish_reason.matched == stop
        assert result.text == text_of(output[:6])[: text_of(output[:6]).index(stop)]
        assert result.weight_versions == (("default", 0, 6),)


async def test_a_server_that_aborts_everything_is_not_asked_for_ever():
    async with fake_fleet(1, token_s=0.02) as servers, client(servers, attempts=3) as engine:

        async def vandalise():
            while True:
                for rid in list(servers[0].model.running):
                    await servers[0].model.abort(rid)
                await asyncio.sleep(0)

        vandal = asyncio.create_task(vandalise())
        with pytest.raises(EngineError, match="aborted"):
            await engine.generate(request())
        vandal.cancel()
        assert len(sent(servers)) == 3


# --- workers that go, and come back --------------------------------------------------------------


async def test_a_killed_workers_requests_move_and_it_returns_with_current_weights(weights):
    async with fake_fleet(2, token_s=0.005) as servers, client(servers) as engine:
        await everyone(engine)
        await engine.load_weights(str(weights / "v1"), "v1")
        asked = [request(f"{i}", (5, i), 20, session=f"{i}") for i in range(12)]
        tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
        await until(lambda: all(server.tokens for server in servers))
        await servers[0].kill()
        for r, task in zip(asked, tasks, strict=True):
            check(await task, r, "v1")
        assert engine.versions()[servers[1].url] == "v1"
        # As "v1" by name, but with whatever it starts with: it must be brought up to date.
        await until(lambda: engine.states()[servers[0].url] != "fit")
        before = len(servers[0].calls)
        await servers[0].start(version="v1")
        await until(lambda: engine.states()[servers[0].url] == "fit")
        assert "/update_weights_from_disk" in [path for path, _ in servers[0].calls[before:]]
        assert engine.stats.updates == 3
        check(await engine.generate(asked[0]), asked[0], "v1")


async def test_a_frozen_worker_is_noticed_before_its_requests_run_out():
    async with fake_fleet(2, token_s=0.01) as servers:
        async with client(servers, probe_timeout_s=0.5, request_timeout_s=600.0) as engine:
            await everyone(engine)
            asked = [request(f"{i}", (5, i), 20) for i in range(4)]
            tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
            await until(lambda: all(server.tokens for server in servers))
            servers[0].frozen = True
            async with asyncio.timeout(60):
                for r, task in zip(asked, tasks, strict=True):
                    check(await task, r, "default")
            servers[0].frozen = False
            await until(lambda: engine.states()[servers[0].url] == "fit")


async def test_a_worker_that_only_fails_to_generate_is_left_alone():
    async with fake_fleet(2) as servers, client(servers, break_s=30.0) as engine:
        await everyone(engine)
        servers[0].faults.extend(["500"] * 100)
        for i in range(20):
            asked = request(f"{i}", (5, i), session=f"{i}")
            check(await engine.generate(asked), asked, "default")
        assert len(servers[0].generations()) == 3  # break_after
        assert "500" in engine.states()[servers[0].url]


async def test_everybody_gone_for_a_while_is_waited_for(weights):
    async with fake_fleet(2, token_s=0.005) as servers, client(servers) as engine:
        await everyone(engine)
        await engine.load_weights(str(weights / "v1"), "v1")
        asked = [request(f"{i}", (5, i), 20) for i in range(6)]
        tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
        await until(lambda: all(server.tokens for server in servers))
        for server in servers:
            await server.kill()
        await asyncio.sleep(1.0)  # a minute, scaled: fifty probes
        assert not any(task.done() for task in tasks)
        await servers[1].start()
        for r, task in zip(asked, tasks, strict=True):
            check(await task, r, "v1")


async def test_nobody_for_longer_than_dead_after_is_the_end_and_says_so():
    async with fake_fleet(2) as servers, client(servers, dead_after_s=0.5) as engine:
        await engine.ready()
        for server in servers:
            await server.kill()
        began = time.monotonic()
        policy = RetryPolicy(attempts=5, backoff_s=60.0, timeout_s=60.0)
        with pytest.raises(FleetDead, match=r"no server has been fit .* 0.5 s .*Connect call"):
            await generate_with_retries(engine, request(), policy)
        assert time.monotonic() - began < 50.0  # death is not retried


async def test_servers_may_start_after_the_client():
    async with fake_fleet(1) as servers:
        await servers[0].kill()
        async with client(servers) as engine:
            task = asyncio.create_task(engine.generate(request()))
            await asyncio.sleep(0.1)
            await servers[0].start()
            check(await task, request(), "default")


async def test_close_ends_what_waits_and_refuses_more():
    async with fake_fleet(1) as servers:
        async with client(servers, request_timeout_s=60.0) as engine:
            servers[0].faults.append("hang")
            running = asyncio.create_task(engine.generate(request()))
            await until(lambda: sent(servers))
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(running, 60)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request())


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_running_requests_go_on_with_new_weights_and_say_where(mode, weights):
    async with fake_fleet(2, token_s=0.01) as servers, client(servers, pause_mode=mode) as engine:
        await everyone(engine)
        await engine.load_weights(str(weights / "v1"), "v1")
        asked = [request(f"{i}", (5, i), 30, session=f"{i}") for i in range(6)]
        tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
        await until(lambda: all(server.tokens > 9 for server in servers))
        await engine.load_weights(str(weights / "v2"), "v2")
        for r, task in zip(asked, tasks, strict=True):
            result = await task
            check(result, r, "v1", "v2")
            assert [v for v, _, _ in result.weight_versions] == ["v1", "v2"]
            assert len(result.output_ids) == 30
        assert sum(server.tokens for server in servers) == 6 * 30
        assert set(engine.versions().values()) == {"v2"} and engine.info().weight_version == "v2"
        assert engine.stats.discarded_tokens == 0


@pytest.mark.parametrize("fault", ["400", "500", "hang", "version"])
async def test_a_worker_whose_update_failed_gets_no_traffic_until_one_succeeds(fault, weights):
    limits = dict(break_s=0.3, update_timeout_s=1.0 if fault == "hang" else 20.0)
    async with fake_fleet(2) as servers, client(servers, **limits) as engine:
        await everyone(engine)
        await engine.load_weights(str(weights / "v1"), "v1")
        servers[0].update_faults.append(fault)
        servers[0].calls.clear()
        await engine.load_weights(str(weights / "v2"), "v2")
        assert engine.stats.failed_updates == 1
        for i in range(8):
            asked = request(f"{i}", (5, i), session=f"{i}")
            check(await engine.generate(asked), asked, "v2")
        await everyone(engine)  # repaired
        assert servers[0].model.version == "v2" == engine.versions()[servers[0].url]
        paths = [path for path, _ in servers[0].calls]
        assert "/generate" not in paths[: 1 + last_of(paths, "/update_weights_from_disk")]


async def test_what_a_worker_of_unknown_weights_still_says_is_thrown_away(weights):
    async with fake_fleet(2, token_s=0.01) as servers, client(servers, break_s=9.0) as engine:
        await everyone(engine)
        await engine.load_weights(str(weights / "v1"), "v1")
        asked = [request(f"{i}", (5, i), 20, session=f"{i}") for i in range(4)]
        tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
        await until(lambda: all(server.tokens > 4 for server in servers))
        servers[0].update_faults.append("500")
        await engine.load_weights(str(weights / "v2"), "v2")
        for r, task in zip(asked, tasks, strict=True):
            check(await task, r, "v1", "v2")
        assert engine.stats.discarded_tokens > 0


async def test_weights_that_nobody_takes_are_an_error_and_the_old_ones_come_back(weights):
    async with fake_fleet(2) as servers, client(servers) as engine:
        await everyone(engine)
        await engine.load_weights(str(weights / "v1"), "v1")
        with pytest.raises(EngineError, match="taken weights 'v9'.*no such directory"):
            await engine.load_weights(str(weights / "v9"), "v9")
        assert engine.info().weight_version == "v1"
        check(await engine.generate(request()), request(), "v1")


async def test_a_worker_that_is_away_during_an_update_is_stale_when_it_is_back(weights):
    limits = dict(break_after=1, break_s=0.2, probe_timeout_s=0.5)
    async with fake_fleet(2) as servers, client(servers, **limits) as engine:
        await everyone(engine)
        await engine.load_weights(str(weights / "v1"), "v1")
        servers[0].frozen = True
        await until(lambda: engine.states()[servers[0].url] != "fit")
        await engine.load_weights(str(weights / "v2"), "v2")
        before = len(servers[0].generations())
        servers[0].frozen = False
        await until(lambda: engine.states()[servers[0].url] == "fit")
        assert servers[0].model.version == "v2" and len(servers[0].generations()) == before


async def test_a_process_that_does_not_push_follows_the_one_that_does(weights):
    async with fake_fleet(2) as servers:
        async with client(servers) as pusher, client(servers, pushes=False) as follower:
            await everyone(pusher)
            both = (e.load_weights(str(weights / "v1"), "v1") for e in (pusher, follower))
            await asyncio.gather(*both)
            check(await follower.generate(request()), request(), "v1")
            updates = [p for s in servers for p, _ in s.calls if p == "/update_weights_from_disk"]
            assert len(updates) == 2 and follower.info().weight_version == "v1"
        async with client(servers, pushes=False, update_timeout_s=0.5) as follower:
            with pytest.raises(EngineError, match="no worker serves 'v2' after 0.5 s"):
                await follower.load_weights(str(weights / "v2"), "v2")


async def test_loading_takes_as_long_as_it_takes(weights):
    """The time that a worker spends on new weights is not held against its requests."""
    async with fake_fleet(1, token_s=0.01, load_s=6.0) as servers:
        async with client(servers, request_timeout_s=5.0) as engine:
            await engine.ready()
            asked = request(count=8)
            task = asyncio.create_task(engine.generate(asked))
            await until(lambda: servers[0].tokens > 3)
            await engine.load_weights(str(weights / "v1"), "v1")
            check(await task, asked, "default", "v1")
            assert engine.stats.failures == 0
