"""Serves an engine over HTTP with the part of SGLang's API that a run needs.

    python -m focus.engine.servers.serve --model-path DIR --port 30000 --weight-version v0

Two of these on one machine rehearse the setting of a training job and its servers, faults and
all, without a GPU. What is not served is refused rather than ignored: streams, penalties,
grammars, the pause mode "in_place".

It trusts whoever can reach it: anyone may load weights from any directory. It therefore listens
on this machine alone unless told otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from focus.chat.tokens import TextCodec, read_tokenizer
from focus.engine.embedded.engine import EmbeddedEngine
from focus.engine.protocol import (
    Engine,
    EngineError,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    admissible,
)
from focus.engine.servers.parts import Parts, seed_of_copy
from focus.engine.wire import from_payload, to_reply
from focus.formats import hf

_MOST_BYTES = 2**28  # of a request: a batch of long prompts


@dataclasses.dataclass
class _Request:
    """A request in the engine, or held back by a pause.

    Attributes:
      batch: id of the request that it is one completion of.
      part: id under which the engine has it; None while it is held back.
      cut: whether a pause has taken it out of the engine, to go on later.
      aborted: whether its caller wants no more of it.
    """

    batch: str
    part: str | None = None
    cut: bool = False
    aborted: bool = False


class Service:
    """The routes, and what a pause means for an engine that knows none.

    Args:
      engine: what is served.
      model_path: where its weights came from.
      decode: token ids to text, for completions that a pause has cut in two.
      eos_token_ids: as the engine has them.
      max_queued: requests at once beyond which one is told 503.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model_path: str,
        decode: Callable[[Sequence[int]], str],
        eos_token_ids: Sequence[int] = (),
        max_queued: int = 1024,
    ):
        self.engine = engine
        self._model_path = model_path
        self._text_of = decode
        self._eos = tuple(eos_token_ids)
        self._max_queued = max_queued
        self._paused = False
        self._turn = asyncio.Condition()  # told of every end of a pause, and of every abort
        self._requests: dict[str, _Request] = {}

    def application(self) -> web.Application:
        """The HTTP application."""
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[_errors_as_json])
        for path in ("/health", "/ready"):
            app.router.add_get(path, self._health)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        app.router.add_get("/health_generate", self._health_generate)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/abort_request", self._abort)
        return app

    # Generation.

    async def _generate(self, http: web.Request) -> web.Response:
        body = await _json(http)
        several, requests = _single_requests(body)
        replies = await asyncio.gather(*itertools.starmap(self._answer, requests))
        return _reply(list(replies) if several else replies[0])

    async def _answer(self, body: dict[str, Any], batch: str = "") -> dict[str, Any]:
        """One completion; `batch` is the id of the request that it belongs to."""
        request = from_payload(body, rid=uuid.uuid4().hex)
        if len(self._requests) >= self._max_queued:
            raise web.HTTPServiceUnavailable(text="The request queue is full.")
        if request.rid in self._requests:
            raise ValueError(f"rid {request.rid!r} is in flight already: request ids are unique")
        self._requests[request.rid] = _Request(batch or request.rid)
        try:
            result = await self._complete(request, self._requests[request.rid])
        finally:
            del self._requests[request.rid]
        return to_reply(result, self.engine.info().weight_version)

    async def _complete(self, request: GenerateRequest, state: _Request) -> GenerateResult:
        """Generates; what a pause cuts goes on after it, with what is left."""
        info = self.engine.info()
        request = admissible(request, info.vocab_size, info.max_context)
        parts, reason = Parts(request, self._text_of, self._eos), FinishReason("abort")
        state.cut = True
        while state.cut and not parts.finished:
            async with self._turn:
                await self._turn.wait_for(lambda: state.aborted or not self._paused)
            if state.aborted:
                break
            state.cut, state.part = False, uuid.uuid4().hex
            part = parts.ask(state.part)
            try:
                result = await self.engine.generate(part)
            finally:
                state.part = None
            parts.add(result)
            reason = result.finish_reason
        return parts.result(reason)

    async def _abort(self, http: web.Request) -> web.Response:
        body = await _json(http)
        await self._cut(None if body.get("abort_all") else body.get("rid"), aborted=True)
        return _reply({"success": True})

    async def _cut(self, rid: str | None, *, aborted: bool) -> None:
        """Takes one request, or all, out of the engine: for good, or until a pause is over."""
        for name, state in list(self._requests.items()):
            if rid is None or rid in (name, state.batch):
                state.aborted |= aborted
                state.cut = not state.aborted
                if state.part is not None:
                    await self.engine.abort(state.part)
        async with self._turn:
            self._turn.notify_all()

    # Weights and pauses.

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await _json(http)).get("mode", "abort")
        if mode not in ("abort", "retract"):
            raise ValueError(f"mode must be 'abort' or 'retract', got {mode!r}")
        self._paused = True
        await self._cut(None, aborted=mode == "abort")
        return _reply({"status": "ok", "message": f"Generation paused ({mode})."})

    async def _continue(self, http: web.Request) -> web.Response:
        del http
        self._paused = False
        async with self._turn:
            self._turn.notify_all()
        return _reply({"status": "ok", "message": "Generation goes on."})

    async def _update(self, http: web.Request) -> web.Response:
        body = await _json(http)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str):
            raise ValueError(f"model_path must name a directory, got {path!r}")
        if not body.get("flush_cache", True):
            raise ValueError("flush_cache=false would leave keys and values of the old weights")
        if body.get("abort_all_requests"):
            await self._cut(None, aborted=True)
        version = self.engine.info().weight_version if version is None else str(version)
        try:
            await self.engine.load_weights(path, version)
        except (EngineError, ValueError) as error:
            return _reply({"success": False, "message": str(error)}, status=400)
        self._model_path = path
        return _reply({"success": True, "message": f"Loaded {path}.", "num_paused_requests": 0})

    async def _flush(self, http: web.Request) -> web.Response:
        del http
        self.engine.flush_cache()
        return _reply({"success": True})

    # What is asked of it.

    async def _health(self, http: web.Request) -> web.Response:
        del http
        return web.Response()

    async def _health_generate(self, http: web.Request) -> web.Response:
        del http
        ids = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        await self._answer(ids)
        return web.Response()

    async def _model_info(self, http: web.Request) -> web.Response:
        del http
        return _reply(
            {
                "model_path": self._model_path,
                "is_generation": True,
                "weight_version": self.engine.info().weight_version,
            }
        )

    async def _server_info(self, http: web.Request) -> web.Response:
        del http
        info = self.engine.info()
        return _reply(
            {
                "model_path": self._model_path,
                "weight_version": info.weight_version,
                "context_length": info.max_context,
                "max_req_input_len": info.max_context - 1,
                "max_running_requests": info.max_running,
                "vocab_size": info.vocab_size,
            }
        )


def _single_requests(body: dict[str, Any]) -> tuple[bool, list[tuple[dict[str, Any], str]]]:
    """The completions that a body asks for, each as a body of its own.

    As SGLang has it: a list of prompts, or `n` completions of each, are answered by a list, prompt
    after prompt. Every completion has an id of its own, and of several completions of one prompt
    each but the first a seed of its own.

    Returns:
      Whether the answer is a list; `(body, id of the whole)` of each completion.

    Raises:
      ValueError: lists of different lengths, or an `n` that is none.
    """
    prompts, rid, sampling = body.get("input_ids"), body.get("rid"), body.get("sampling_params")
    is_batch = isinstance(prompts, list) and any(isinstance(ids, list) for ids in prompts)
    if not is_batch:
        prompts, rid, sampling = [prompts], [rid] if rid else None, [sampling]
    if any(isinstance(x, list) and len(x) != len(prompts) for x in (rid, sampling)):
        raise ValueError(f"rid and sampling_params must be as many as the {len(prompts)} prompts")
    if not isinstance(sampling, list):
        sampling = [sampling] * len(prompts)
    if not all(params is None or isinstance(params, dict) for params in sampling):
        raise ValueError("sampling_params must be a JSON object, or one of each prompt")
    sampling = [dict(params or {}) for params in sampling]
    counts = {params.pop("n", 1) for params in sampling}
    count = counts.pop()
    if counts or type(count) is not int or count < 1:
        raise ValueError(f"n must be a whole number >= 1, the same of all prompts; got {count!r}")
    requests = []
    for i, (ids, params) in enumerate(zip(prompts, sampling, strict=True)):
        whole = rid[i] if isinstance(rid, list) else f"{rid or uuid.uuid4().hex}-{i}"
        for k in range(count):
            name = whole if count == 1 else f"{whole}-{k}"
            own = dict(params)
            if k:
                own["sampling_seed"] = seed_of_copy(params.get("sampling_seed") or 0, k)
            one = body | {"input_ids": ids, "rid": name, "sampling_params": own}
            requests.append((one, whole if isinstance(rid, list) or not rid else rid))
    return is_batch or count > 1, requests


@web.middleware
async def _errors_as_json(
    http: web.Request, handler: Callable[[web.Request], Awaitable[web.Response]]
) -> web.Response:
    try:
        return await handler(http)
    except ValueError as error:
        return _reply({"error": {"message": str(error)}}, status=400)
    except EngineError as error:
        return _reply({"error": {"message": str(error)}}, status=500)


def _reply(body: Any, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


async def _json(http: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await http.read() or b"{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


# The program.


def open_engine(
    path: str | Path,
    *,
    weight_version: str,
    max_running: int = 16,
    context_length: int | None = None,
) -> tuple[EmbeddedEngine, TextCodec, tuple[int, ...]]:
    """The embedded engine with the model and the tokenizer of a directory.

    Args:
      path: as `focus.formats.hf` reads it, with a `tokenizer.json`.
      weight_version: name of its weights.
      max_running: completions that decode together.
      context_length: longest prompt plus completion; None for the model's.

    Returns:
      `(engine, tokenizer, ids that end a completion)`. The engine loads other weights of the same
      model.

    Raises:
      ValueError: the directory lacks something or holds a model that the engine cannot serve.
    """
    codec = TextCodec(read_tokenizer(path))
    config, params = hf.load_checkpoint(path)
    codec.check_model(config.vocab_size)
    eos = _eos_token_ids(Path(path))

    def load(other: str) -> Any:
        if hf.read_config(other) != hf.read_config(path):
            raise ValueError(f"{other} holds another model than {path}")
        return hf.load_checkpoint(other)[1]

    engine = EmbeddedEngine(
        config,
        params,
        decode=codec.decode,
        eos_token_ids=eos,
        max_running=max_running,
        cache_length=context_length,
        weight_version=weight_version,
        loader=load,
    )
    return engine, codec, eos


def _eos_token_ids(path: Path) -> tuple[int, ...]:
    """As SGLang finds them: in the generation config, else in the model's."""
    for name in ("generation_config.json", "config.json"):
        fields = json.loads((path / name).read_text()) if (path / name).is_file() else {}
        ids = fields.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until it is told to stop."""
    parser = argparse.ArgumentParser(
        prog="python -m focus.engine.servers.serve", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model-path", required=True, help="directory of a model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine alone")
    parser.add_argument("--weight-version", default="default", help="name of the first weights")
    parser.add_argument("--max-running-requests", type=int, default=16)
    parser.add_argument("--max-queued-requests", type=int, default=1024)
    parser.add_argument("--context-length", type=int, help="default: the model's")
    parser.add_argument("--skip-server-warmup", action="store_true", help="compile when needed")
    options = parser.parse_args(arguments)
    engine, codec, eos = open_engine(
        options.model_path,
        weight_version=options.weight_version,
        max_running=options.max_running_requests,
        context_length=options.context_length,
    )
    if not options.skip_server_warmup:
        engine.warmup()
    service = Service(
        engine,
        model_path=options.model_path,
        decode=codec.decode,
        eos_token_ids=eos,
        max_queued=options.max_queued_requests,
    )
    web.run_app(
        service.application(),
        host=options.host,
        port=options.port,
        handler_cancellation=True,  # a caller that hangs up frees its slot
        shutdown_timeout=1.0,
        access_log=None,
    )


if __name__ == "__main__":
    main()
