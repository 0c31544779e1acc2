"""The embedded engine behind HTTP, in a thread with an event loop of its own."""

import asyncio
import socket
import threading

from aiohttp import web

from focus.engines import embedded_sizes
from focus.policy import hf
from focus.rollout.embedded import EmbeddedEngine
from focus.rollout.serve import Service


class SlowEngine(EmbeddedEngine):
    """Takes `token_s` more seconds for each token, as a larger model would."""

    token_s = 0.0

    async def generate(self, request):
        result = await super().generate(request)
        await asyncio.sleep(self.token_s * result.completion_tokens)
        return result


class ServerThread:
    """A server for a run's config; `with` starts and stops it, `kill` and `start` do so between.

    Args:
      model: shape of the policy.
      start: the warm start. What is served first is another model under the name "v0", as another
        run may have left it: nothing of it may be taken for the run's own.
      rollout: `config.rollout`.
      token_s: see `SlowEngine`.
    """

    def __init__(self, model, start, rollout, token_s=0.0):
        self._model, self._start, self._rollout = model, start, rollout
        self._token_s = token_s
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
        service = Service(engine, model_path="/none", decode=chat.decode)
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
