"""A server that speaks SGLang's API, makes its tokens up, and goes wrong when it is told to.

What it says is a function of the weights' version, the prompt and what it said before: a
completion that was cut and resumed under the same weights is the one that was never cut.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import hashlib
import json
import os
import socket

from aiohttp import web

from focus.engine.protocol import EngineError, EngineInfo, FinishReason, GenerateResult, admissible
from focus.engine.servers.serve import Service

VOCAB = 97
EOS = 1


def text_of(ids):
    return "".join(f"<{i}>" for i in ids)


def _number(*values):
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def next_token(version, ids):
    """What comes after `ids`; never EOS unless it is long overdue."""
    return 2 + _number(version, tuple(ids)) % (VOCAB - 2)


def fake_greedy(prompt, count, version):
    """What the fake model says, whatever the temperature."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(version, ids))
    return tuple(ids[len(prompt) :])


def logp_of(version, ids, token, temperature):
    """A made-up log-prob of `token` after `ids`."""
    return -0.1 - (_number(version, tuple(ids), token, temperature) % 1000) / 250


# The adapter that the request of this task is sampled with.
ADAPTER = contextvars.ContextVar("adapter", default=None)


class FakeModel:
    """Tokens out of nowhere, one every `token_s` seconds; an `Engine`.

    With an adapter it says what weights of that version say.
    """

    def __init__(
        self, *, version="default", max_context=256, vocab_size=VOCAB, token_s=0.0, load_s=0.0
    ):
        self.version, self.max_context, self.vocab_size = version, max_context, vocab_size
        self.token_s, self.load_s = token_s, load_s
        self.generated = 0
        self.held = []  # prompts and completions, as a cache would hold them
        self.running, self.asked = set(), []
        self._aborted = set()

    def info(self):
        return EngineInfo(self.version, self.vocab_size, self.max_context, 64)

    async def abort(self, rid):
        self._aborted.add(rid)

    def flush_cache(self):
        self.held.clear()

    async def load_weights(self, path, version):
        while self.running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(self.load_s)
        if not os.path.isdir(path):
            raise EngineError(f"could not load weights from {path!r}: no such directory")
        self.version = version
        self.flush_cache()

    async def generate(self, request):
        request = admissible(request, self.vocab_size, self.max_context)
        self.asked.append(request)
        sampling, prompt = request.sampling, request.input_ids
        stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        cached = min(self._shared(prompt), len(prompt) - 1)
        ids, logp, version = list(prompt), [], self.version
        source = ADAPTER.get() or version
        finish = None
        self.running.add(request.rid)
        try:
            while finish is None:
                await asyncio.sleep(self.token_s)
                if request.rid in self._aborted:
                    finish = FinishReason("abort", message="aborted")
                    break
                token = next_token(source, ids)
                logp.append(logp_of(source, ids, token, sampling.temperature))
                ids.append(token)
                self.generated += 1
                output = ids[len(prompt) :]
                found = [s for s in sampling.stop if s in text_of(output)]
                if token in stop_ids:
                    finish = FinishReason("stop", matched=token)
                elif found:
                    finish = FinishReason("stop", matched=found[0])
                elif len(output) == sampling.max_new_tokens:
                    finish = FinishReason("length", length=len(output))
        finally:
            self.running.discard(request.rid)
            self.held.append((ADAPTER.get(), tuple(ids)))
        output = tuple(ids[len(prompt) :])
        return GenerateResult(
            rid=request.rid,
            text=text_of(output),
            output_ids=output,
            output_logp=tuple(logp),
            finish_reason=finish,
            prompt_tokens=len(prompt),
            cached_tokens=cached,
            weight_versions=((version, 0, len(output)),) if output else (),
        )

    def _shared(self, prompt):
        longest = 0
        for adapter, other in self.held:
            if adapter != ADAPTER.get():
                continue
            common = next((i for i, (a, b) in enumerate(zip(prompt, other)) if a != b), None)
            longest = max(longest, min(len(prompt), len(other)) if common is None else common)
        return longest


class FakeService(Service):
    """Our own server's routes, and those for adapters, as SGLang answers them.

    Attributes:
      adapters: directories, by name.
      used: adapters of the requests that are running.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.adapters, self.used = {}, collections.Counter()
        self._one_change = asyncio.Lock()

    def application(self):
        app = super().application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/load_lora_adapter", self._load_adapter)
        app.router.add_post("/unload_lora_adapter", self._unload_adapter)
        return app

    async def _answer(self, body, *rest):
        name = body.get("lora_path")
        if name is None:
            return await super()._answer(body, *rest)
        if name not in self.adapters:
            raise ValueError(f"Got LoRA adapter that has never been loaded: {name}")
        token = ADAPTER.set(name)
        self.used[name] += 1
        try:
            body = {k: v for k, v in body.items() if k != "lora_path"}
            return await super()._answer(body, *rest)
        finally:
            self.used[name] -= 1
            ADAPTER.reset(token)

    async def _models(self, http):
        entries = [{"id": "fake", "root": "fake", "parent": None}]
        entries += [
            {"id": name, "root": path, "parent": "fake"} for name, path in self.adapters.items()
        ]
        return web.json_response({"object": "list", "data": entries})

    async def _load_adapter(self, http):
        body = await http.json()
        name, path = body["lora_name"], body["lora_path"]
        async with self._one_change:
            if name in self.adapters or not os.path.isdir(path):
                return self._changed(f"Failed to load LoRA adapter {name}")
            self.adapters[name] = path
            return self._changed()

    async def _unload_adapter(self, http):
        name = (await http.json())["lora_name"]
        async with self._one_change:
            if self.adapters.pop(name, None) is None:
                return self._changed(f"LoRA with name {name} does not exist")
            while self.used[name]:
                await asyncio.sleep(0.001)
            return self._changed()

    def _changed(self, error=""):
        answer = {"success": not error, "error_message": error, "loaded_adapters": self.adapters}
        return web.json_response(answer, status=400 if error else 200)


class FakeServer:
    """A worker on a port of its own. `async with` starts it; `kill` and `start` as often as wanted.

    Faults of the next generations are queued in `faults`, by name:

        reset      half an answer, then the connection is cut
        hang       no answer at all
        slow       the answer, a second late
        500  503   an error of the server; its queue is full
        truncated  the first half of the answer, said to be whole
        invalid    not JSON
        count      one output id is missing
        logprobs   one log-prob is missing
        version    the answer of weights that nobody has asked for
        too_long   more tokens than were allowed
        trimmed    says that it stopped, and has taken away what at

    `update_faults` are those of weight updates: "500", "hang", "version" (loads, and keeps the
    old name), "400"; `adapter_faults` those of loading an adapter: "500", "hang", "slow", "400",
    "lost" (says that it has, and has not). With `frozen` set nothing is answered any more, as
    by a stopped process.
    """

    def __init__(self, **options):
        self._options = options
        self.port = None
        self.faults = collections.deque()
        self.update_faults = collections.deque()
        self.adapter_faults = collections.deque()
        self.frozen = False
        self.calls = []  # (path, body) of every request
        self._runner = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def generations(self):
        """Bodies of the generations that were asked for, health checks left out."""
        return [b for path, b in self.calls if path == "/generate"]

    @property
    def tokens(self):
        """Tokens that it has made up since it was started, those of health checks left out."""
        return self.model.generated - self.health_checks

    async def start(self, **options):
        """Starts with fresh weights, as a process would."""
        self.model = FakeModel(**(self._options | options))
        self.frozen, self.health_checks = False, 0
        self.service = FakeService(
            self.model, model_path="/tmp", decode=text_of, eos_token_ids=(EOS,)
        )
        app = self.service.application()
        app.middlewares.append(self._misbehave)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self.port or 0))
        self.port = listening.getsockname()[1]
        await web.SockSite(self._runner, listening).start()

    async def kill(self):
        """Ends as kill -9 does: every connection is cut, nobody listens any more."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for connection in list(runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *unused):
        await self.kill()

    @web.middleware
    async def _misbehave(self, http, handler):
        body = await http.read()
        with contextlib.suppress(ValueError):  # what is not JSON is for the service to refuse
            self.calls.append((http.path, json.loads(body) if body else None))
        while self.frozen:
            await asyncio.sleep(0.01)
        self.health_checks += http.path == "/health_generate"
        if http.path == "/generate":
            fault = self.faults.popleft() if self.faults else None
        elif http.path == "/update_weights_from_disk":
            fault = self.update_faults.popleft() if self.update_faults else None
        elif http.path == "/load_lora_adapter":
            fault = self.adapter_faults.popleft() if self.adapter_faults else None
        else:
            return await handler(http)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "slow":
            await asyncio.sleep(1.0)
        if fault in ("400", "500", "503"):
            return web.json_response({"error": {"message": "on purpose"}}, status=int(fault))
        if fault == "invalid":
            return web.Response(text="{]", content_type="application/json")
        if fault == "version" and http.path == "/update_weights_from_disk":
            return web.json_response({"success": True, "message": "as if"})
        if fault == "lost":
            return web.json_response({"success": True, "error_message": "", "loaded_adapters": {}})
        answer = await handler(http)
        if fault in (None, "slow"):
            return answer
        if fault == "truncated":
            return web.Response(
                body=answer.body[: len(answer.body) // 2], content_type="application/json"
            )
        if fault == "reset":
            return await self._cut_off(http, answer)
        reply = json.loads(answer.body)
        garble(reply, fault)
        return web.json_response(reply)

    async def _cut_off(self, http, answer):
        stream = web.StreamResponse()
        stream.content_length = len(answer.body)
        await stream.prepare(http)
        await stream.write(answer.body[: len(answer.body) // 2])
        http.transport.abort()
        return stream


def garble(reply, fault):
    """Makes a reply contradict itself or its request."""
    meta = reply["meta_info"]
    if fault == "count":
        reply["output_ids"].pop()
    elif fault == "logprobs":
        meta["output_token_logprobs"].pop()
    elif fault == "version":
        meta["weight_version"] = "of another run"
        meta["weight_versions"] = None
    elif fault == "too_long":
        reply["output_ids"].append(5)
        meta["output_token_logprobs"].append([-1.0, 5, None])
        meta["completion_tokens"] += 1
        meta["weight_versions"][-1]["end"] += 1
    elif fault == "trimmed":
        meta["finish_reason"] = {"type": "stop"}
    else:
        raise ValueError(f"unknown fault {fault!r}")


@contextlib.asynccontextmanager
async def fake_fleet(count, **options):
    """Several fake workers, started."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeServer(**options)) for _ in range(count)]
