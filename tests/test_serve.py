"""Our own server: the API beyond what the client uses, the program, and the check of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import subprocess
import sys

import aiohttp
import backends
import pytest
from fake_server import VOCAB, FakeServer, fake_greedy

from focus.engine.protocol import GenerateRequest, SamplingParams
from focus.engine.servers.check import Load, check_fleet


@dataclasses.dataclass
class Caller:
    """What a person with curl can do."""

    url: str
    session: aiohttp.ClientSession

    async def __call__(self, method, path, body=None, data=None):
        async with self.session.request(method, self.url + path, json=body, data=data) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text


@contextlib.asynccontextmanager
async def served(**options):
    async with FakeServer(**options) as server, aiohttp.ClientSession() as session:
        yield server, Caller(server.url, session)


def body(prompt, count=4, **fields):
    sampling = {"max_new_tokens": count, "ignore_eos": True} | fields.pop("sampling", {})
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True} | fields


async def test_a_batch_comes_back_in_order_with_ids_of_its_own():
    async with served() as (_, call):
        status, replies = await call("POST", "/generate", body([[2, 3], [4, 5]], rid=["a", "b"]))
        assert status == 200 and [r["meta_info"]["id"] for r in replies] == ["a", "b"]
        for prompt, reply in zip(((2, 3), (4, 5)), replies, strict=True):
            assert tuple(reply["output_ids"]) == fake_greedy(prompt, 4, "default")
        _, one = await call("POST", "/generate", body([2, 3]))
        assert one["output_ids"] == replies[0]["output_ids"] and one["meta_info"]["id"]


async def test_several_completions_of_a_prompt_come_prompt_after_prompt():
    async with served() as (server, call):
        sampling = {"n": 3, "sampling_seed": 7, "temperature": 1.0}
        asked = body([2, 3], rid="a", sampling=sampling)
        status, replies = await call("POST", "/generate", asked)
        assert status == 200 and [r["meta_info"]["id"] for r in replies] == ["a-0", "a-1", "a-2"]
        seeds = [request.seed for request in server.model.asked]
        assert len(set(seeds)) == 3 and seeds[0] == 7
        await call("POST", "/generate", asked)
        assert [request.seed for request in server.model.asked[3:]] == seeds
        status, replies = await call("POST", "/generate", body([[2, 3], [4, 5]], sampling={"n": 2}))
        assert [tuple(r["output_ids"]) for r in replies] == [
            fake_greedy(prompt, 4, "default") for prompt in ((2, 3), (2, 3), (4, 5), (4, 5))
        ]
        _, one = await call("POST", "/generate", body([2, 3], rid="b", sampling={"n": 1}))
        assert one["meta_info"]["id"] == "b"


async def test_an_abort_by_the_id_of_the_whole_ends_all_of_its_completions():
    async with served(token_s=0.005) as (server, call):
        asked = body([[2, 3], [2, 4]], 200, rid="a", sampling={"n": 2})
        other = asyncio.create_task(call("POST", "/generate", body([2, 5], 20, rid="ab")))
        task = asyncio.create_task(call("POST", "/generate", asked))
        while len(server.model.running) < 5:
            await asyncio.sleep(0.002)
        await call("POST", "/abort_request", {"rid": "a"})
        _, replies = await task
        assert {r["meta_info"]["finish_reason"]["type"] for r in replies} == {"abort"}
        assert (await other)[1]["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (dict(data="{]"), "not valid JSON"),
        (dict(body=body([2], sampling={"n": 0})), "n must be a whole number >= 1"),
        (dict(body=body([2], sampling={"n": True})), "n must be a whole number >= 1"),
        (dict(body=body([2]) | {"sampling_params": [1]}), "sampling_params must be a JSON object"),
        (dict(data="[1]"), "must be a JSON object"),
        (dict(body=body([2], n=1)), "unknown fields {'n': 1}"),
        (dict(body=body([])), "input_ids is empty"),
        (dict(body=body([VOCAB])), "outside the vocabulary"),
        (dict(body=body([[2], [3]], rid=["a"])), "as many as the 2 prompts"),
        (dict(body=body("text")), "list of token ids"),
        (dict(body=body([2], stream=True)), "stream can only be False"),
    ],
)
async def test_what_cannot_be_served_is_a_400_that_says_why(sent, message):
    async with served() as (_, call):
        status, answer = await call("POST", "/generate", **sent)
        assert status == 400 and message in answer["error"]["message"]
        assert (await call("POST", "/generate", body([2, 3])))[0] == 200


async def test_a_full_queue_is_a_503_and_a_twin_is_refused():
    async with served(token_s=0.01) as (server, call):
        server.service._max_queued = 2
        asks = [body([2, i], 50, rid=f"{i}") for i in range(3)]
        tasks = [asyncio.create_task(call("POST", "/generate", b)) for b in asks[:2]]
        while len(server.model.running) < 2:
            await asyncio.sleep(0.005)
        assert (await call("POST", "/generate", asks[2]))[0] == 503
        server.service._max_queued = 3
        status, answer = await call("POST", "/generate", asks[0])
        assert status == 400 and "in flight already" in answer["error"]["message"]
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]


async def test_a_pause_holds_requests_back_until_it_is_over(tmp_path):
    async with served(token_s=0.005) as (server, call):
        first = asyncio.create_task(call("POST", "/generate", body([2, 3], 40, rid="first")))
        while server.tokens < 5:
            await asyncio.sleep(0.002)
        assert (await call("POST", "/pause_generation", {"mode": "in_place"}))[0] == 400
        assert (await call("POST", "/pause_generation", {"mode": "retract"}))[0] == 200
        second = asyncio.create_task(call("POST", "/generate", body([2, 4], rid="second")))
        third = asyncio.create_task(call("POST", "/generate", body([2, 5], rid="third")))
        await asyncio.sleep(0.1)
        assert not first.done() and not second.done() and not server.model.running
        await call("POST", "/abort_request", {"rid": "third"})
        _, aborted = await third
        assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
        update = {"model_path": str(tmp_path), "weight_version": "v7"}
        assert (await call("POST", "/update_weights_from_disk", update))[1]["success"] is True
        await call("POST", "/continue_generation", {})
        _, cut = await first
        spans = cut["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["default", "v7"]
        assert spans[-1]["end"] == 40 == len(cut["output_ids"])
        assert (await second)[1]["meta_info"]["weight_version"] == "v7"


async def test_a_pause_that_aborts_answers_at_once():
    async with served(token_s=0.005) as (server, call):
        task = asyncio.create_task(call("POST", "/generate", body([2, 3], 200)))
        while server.tokens < 5:
            await asyncio.sleep(0.002)
        await call("POST", "/pause_generation", {"mode": "abort"})
        _, reply = await task
        assert reply["meta_info"]["finish_reason"]["type"] == "abort" and reply["output_ids"]


async def test_an_update_that_fails_says_so_and_changes_nothing():
    async with served(version="v0") as (_, call):
        update = {"model_path": "/nowhere", "weight_version": "v1"}
        status, answer = await call("POST", "/update_weights_from_disk", update)
        assert status == 400 and answer["success"] is False and "/nowhere" in answer["message"]
        stale = update | {"flush_cache": False}
        assert (await call("POST", "/update_weights_from_disk", stale))[0] == 400
        for path in ("/model_info", "/get_model_info"):
            assert (await call("GET", path))[1]["weight_version"] == "v0"
        info = (await call("GET", "/server_info"))[1]
        assert info["vocab_size"] == VOCAB and info["max_req_input_len"] == 255
        for path in ("/health", "/ready", "/health_generate"):
            assert (await call("GET", path))[0] == 200


# --- the program ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return backends.export(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def programs(paths, tmp_path):
    """Two servers as programs, with the first weights."""
    started = [backends.serve_process(paths["v0"], tmp_path / f"{i}.log") for i in range(2)]
    try:
        for process in started:
            process.start()
        for process in started:
            process.wait()
        yield started
    finally:
        for process in started:
            process.kill()


def ask(rid, prompt, count):
    params = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid, prompt, params)


async def everyone(engine):
    async with asyncio.timeout(300):
        while set(engine.states().values()) != {"fit"}:
            await asyncio.sleep(0.05)


async def test_a_program_that_is_killed_comes_back_and_one_that_is_told_to_stop_stops(
    programs, paths
):
    async with backends.client([p.url for p in programs]) as engine:
        await everyone(engine)
        await engine.load_weights(paths["v1"], "v1")
        asked = [ask(f"{i}", (2, 3 + i), 60) for i in range(6)]
        tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
        await asyncio.sleep(0.3)
        programs[0].kill()
        for r, task in zip(asked, tasks, strict=True):
            assert (await task).output_ids == backends.model_greedy(r.input_ids, 60, "v1")
        programs[0].start()
        await everyone(engine)
        assert set(engine.versions().values()) == {"v1"}
    programs[1].signal(signal.SIGTERM)
    assert programs[1].process.wait(timeout=60) == 0


@pytest.mark.sglang
async def test_the_real_router_works_in_front_of_our_own_servers(programs, paths, tmp_path):
    router = backends.router_process([p.url for p in programs], tmp_path / "router.log")
    router.start()
    try:
        await asyncio.to_thread(router.wait)
        urls = [p.url for p in programs]
        async with backends.client(urls, router_url=router.url) as engine:
            await everyone(engine)
            await engine.load_weights(paths["v1"], "v1")
            for i in range(6):
                r = ask(f"{i}", (2, 3 + i), 20)
                result = await engine.generate(r)
                assert result.output_ids == backends.model_greedy(r.input_ids, 20, "v1")
            assert engine.stats.failures == 0
    finally:
        router.kill()


# --- is a fleet fit? -----------------------------------------------------------------------------


def by_name(findings):
    return {finding.name: finding for finding in findings}


LOAD = Load(requests=4, prompt_tokens=16, new_tokens=24)


async def test_a_check_finds_a_sound_fleet_fit_and_leaves_it_as_it_was(paths):
    async with backends.our_server(paths) as url:
        async with backends.client([url]) as engine:  # two at once would fight over the weights
            await engine.load_weights(paths["v1"], "v1")
        findings = await check_fleet([url], paths["v0"], load=LOAD, limits=backends.PATIENT)
        assert all(f.fit for f in findings), findings
        names = "workers model weights log-probs prefixes throughput restored".split()
        assert list(by_name(findings)) == names
        assert "v1" in by_name(findings)["restored"].text


async def test_a_check_finds_servers_that_nobody_started(paths):
    limits = dataclasses.replace(backends.PATIENT, dead_after_s=1.0)
    url = f"http://127.0.0.1:{backends.free_port()}"
    (finding,) = await check_fleet([url], paths["v0"], load=LOAD, limits=limits)
    assert not finding.fit and "no server has been fit" in finding.text


async def test_a_check_finds_servers_of_different_weights(paths):
    async with FakeServer(version="a") as one, FakeServer(version="b") as other:
        findings = await check_fleet(
            [one.url, other.url], paths["v0"], load=LOAD, limits=backends.PATIENT
        )
        assert not by_name(findings)["model"].fit and "different" in findings[-1].text


async def test_a_check_finds_log_probs_that_are_not_the_trainers(paths):
    """A server that is sound in every other way, and makes its tokens up."""
    async with FakeServer(version="v0", vocab_size=backends.MODEL.vocab_size) as server:
        findings = await check_fleet([server.url], paths["v0"], load=LOAD, limits=backends.PATIENT)
        assert by_name(findings)["weights"].fit and not by_name(findings)["log-probs"].fit
        assert "another dtype, or other weights" in by_name(findings)["log-probs"].text


async def test_the_scripts_exit_status_says_whether_the_fleet_is_fit(paths):
    async with backends.our_server(paths) as url:
        for model, status in ((paths["v0"], 0), (paths["v0"] + "/nothing", 1)):
            command = ["scripts/check_server.py", url, "--model-path", model]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                "--requests=2",
                cwd=backends.ROOT,
                env=backends.ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            out, err = await process.communicate()
            assert process.returncode == status, (out, err)
            assert (b"log-probs" in out) == (status == 0) and b"Traceback" not in err
