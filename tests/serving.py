"""The embedded engine behind HTTP, in a thread with an event loop of its own."""

import asyncio
import socket
import threading

from aiohttp import web
from fake_server import FakeService

from focus.engine.embedded.engine import EmbeddedEngine
from focus.engine.servers.serve import Service
from focus.formats import hf, peft
from focus.policy import lora
from focus.run.backends import embedded_sizes


class SlowEngine(EmbeddedEngine):
    """Takes `token_s` more seconds for each token, as a larger model would."""

    token_s = 0.0

    async def generate(self, request):
        result = await super().generate(request)
        await asyncio.sleep(self.token_s * result.completion_tokens)
        return result


class MergingService(FakeService):
    """Samples with adapters by merging the one that is asked for, one after the other."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._merged, self._running, self._change = None, 0, asyncio.Condition()

    async def _answer(self, body, *rest):
        name = body.get("lora_path")
        if name is not None and name not in self.adapters:
            return await super()._answer(body, *rest)  # refuses
        async with self._change:
            await self._change.wait_for(lambda: name == self._merged or not self._running)
            if name != self._merged:
                await self.engine.set_params(self._with(name), self.engine.info().weight_version)
                self._merged = name
            self._running += 1
        try:
            return await super()._answer(body, *rest)
        finally:
            self._running -= 1
            async with self._change:
                self._change.notify_all()

    async def _update(self, http):
        self._merged = None
        return await super()._update(http)

    def _with(self, name):
        config, params = hf.load_checkpoint(self._model_path)
        if name is None:
            return params
        return lora.merge(params, peft.load_adapter(self.adapters[name], config)[1])


class ServerThread:
    """A server for a run's config; `with` starts and stops it, `kill` and `start` do so between.

    Args:
      model: shape of the policy.
      start: the warm start. What is served first is another model under the name "v0", as another
        run may have left it: nothing of it may be taken for the run's own.
      rollout: `config.rollout`.
      token_s: see `SlowEngine`.
      service: its routes.
    """

    def __init__(self, model, start, rollout, token_s=0.0, service=Service):
        self._model, self._start, self._rollout = model, start, rollout
        self._token_s, self._service = token_s, service
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = None

    def start(self):
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)))
        self._thread.start()
        assert ready.wait(timeout=300)

    def kill(self):
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._thread = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *unused):
        self.kill()

    async def _serve(self, ready):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        chat = self._start.chat
        engine = SlowEngine(
            self._model,
            self._start.params | {"final_norm": -self._start.params["final_norm"]},
            decode=chat.decode,
            **embedded_sizes(self._rollout),
            weight_version="v0",
            loader=lambda path: hf.load_checkpoint(path)[1],
        )
        engine.token_s = self._token_s
        service = self._service(engine, model_path="/none", decode=chat.decode)
        runner = web.AppRunner(
            service.application(), shutdown_timeout=0.01, handler_cancellation=True
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        ready.set()
        await self._stop.wait()
        for connection in list(runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()
        await engine.close()
