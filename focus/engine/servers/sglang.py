"""Rollouts on SGLang servers: a client of one or many, or of a router in front of them.

    async with SGLangEngine(urls, vocab_size=..., max_context=..., decode=chat.decode) as engine:
        await engine.load_weights("weights/v7", "v7")
        result = await engine.generate(request)

Generations go to the router, if there is one, else to the worker that holds the session's prefix;
control calls always go to every worker, since a router passes none of them on.

What a caller may rely on, whatever the servers do:

  * A completion is never longer than its request allows, however often it was interrupted: what
    an aborted reply brought is kept, and the rest asked for with what is left.
  * Its tokens are of versions that were current while it ran. A reply that says otherwise, or
    that contradicts itself, is thrown away and counted.
  * A worker whose update failed, or that came back with other weights, gets no request until an
    update of it has succeeded. The engine tries that by itself.
  * A request fails after `Limits.attempts` failures. While no worker is fit to serve it waits,
    up to `Limits.dead_after_s`, and then raises FleetDead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from focus.engine.protocol import (
    EngineError,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    admissible,
)
from focus.engine.servers.connection import Busy, Interrupted, Refused, Rejected
from focus.engine.servers.fleet import Limits, Worker
from focus.engine.servers.fleet_adapters import Adapter
from focus.engine.servers.parts import Parts
from focus.engine.servers.upkeep import ServerStats, Upkeep
from focus.engine.wire import BadReply, from_reply, to_payload

_LOG = logging.getLogger(__name__)


class SGLangEngine:
    """A rollout engine on servers, behind the `Engine` protocol.

    Args:
      urls: of every worker: "http://HOST:PORT".
      router_url: where generations go; None sends them to the workers, by session.
      vocab_size: ids that the model has. A server may die of one outside, so they are checked
        here.
      max_context: longest prompt plus completion, in tokens.
      decode: token ids to text.
      eos_token_ids: end a completion unless its request ignores them.
      max_running: what `info` says of it.
      limits: patience; None for the defaults.
      pushes: whether this process changes weights. Where several share a fleet exactly one does;
        the others' `load_weights` waits for what it has done.

    Raises:
      ValueError: no worker, or one twice.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        router_url: str | None = None,
        vocab_size: int,
        max_context: int,
        decode: Callable[[Sequence[int]], str],
        eos_token_ids: Sequence[int] = (),
        max_running: int = 64,
        limits: Limits | None = None,
        pushes: bool = True,
    ):
        self.stats = ServerStats()
        self._limits = Limits() if limits is None else limits
        self._upkeep = Upkeep(
            urls,
            router_url=router_url,
            max_context=max_context,
            limits=self._limits,
            pushes=pushes,
            stats=self.stats,
        )
        self._fleet = self._upkeep.fleet
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._text_of = decode
        self._eos = tuple(eos_token_ids)
        self._max_running = max_running
        self._calls: dict[str, asyncio.Event] = {}
        self._name, self._sent = uuid.uuid4().hex[:8] + ".", 0

    # What callers see.

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Samples one completion.

        `max_new_tokens` is cut to what the context has room for; the completion then ends with
        finish reason "length". Cancelling the call frees its slot on the server.

        Raises:
          ValueError: empty or over-long prompt, id outside the vocabulary, an `rid` that is in
            flight, stop tokens together with `ignore_eos` (the server would ignore them, too), or
            a setting that the server does not take.
          EngineError: every attempt failed, or the engine is closed.
          FleetDead: no worker has been fit for `dead_after_s`.
        """
        if request.rid in self._calls:
            raise ValueError(f"rid {request.rid!r} is in flight already: request ids are unique")
        if request.sampling.ignore_eos and request.sampling.stop_token_ids:
            raise ValueError(
                f"stop_token_ids {request.sampling.stop_token_ids} do not go with ignore_eos=True: "
                "SGLang then ignores both; leave one of them out"
            )
        request = admissible(request, self._vocab_size, self._max_context)
        self._upkeep.start()
        parts = Parts(request, self._text_of, self._eos)
        aborted = self._calls[request.rid] = asyncio.Event()
        try:
            await self._complete(parts, request, aborted)
        finally:
            del self._calls[request.rid]
        if self._upkeep.closed:
            raise EngineError("the engine is closed")
        result = parts.result(FinishReason("abort", message="aborted by the caller"))
        self.stats.requests += 1
        self.stats.prompt_tokens += result.prompt_tokens
        self.stats.cached_tokens += result.cached_tokens
        self.stats.generated_tokens += result.completion_tokens
        self.stats.discarded_tokens += parts.dropped
        return result

    async def abort(self, rid: str) -> None:
        """Ends a running request with what it has; an unknown `rid` is no error."""
        if rid in self._calls:
            self._calls[rid].set()

    async def load_weights(self, path: str, version: str) -> None:
        """Makes every worker serve the weights at `path`, a directory that all of them see.

        Each pauses, loads, says which version it serves, and goes on. Those that cannot are left
        out until they can. Requests that are running go on with the new weights.

        Raises:
          EngineError: no worker has taken them.
          FleetDead: no worker has answered for `dead_after_s`.
        """
        self._upkeep.start()
        await self._upkeep.load_weights(path, version)

    async def load_adapter(self, path: str, version: str) -> None:
        """Makes every worker sample with the adapter at `path`, on the weights loaded last.

        The directory has the layout of PEFT and all of them see it. Requests that are running end
        with the adapter that they began with; tokens of later ones are of `version`. Workers that
        cannot load it are left out until they can.

        Raises:
          ValueError: no weights have been loaded.
          EngineError: no worker has taken it.
          FleetDead: no worker has answered for `dead_after_s`.
        """
        self._upkeep.start()
        await self._upkeep.load_adapter(path, version)

    async def flush_cache(self) -> None:
        """Forgets the prefixes that the workers hold."""
        self._upkeep.start()
        await asyncio.gather(
            *(self._upkeep.at(worker).flush() for worker in self._upkeep.reachable)
        )

    def versions(self) -> Mapping[str, str | None]:
        """The version that each worker last reported, by URL; None if it never did."""
        return self._fleet.versions()

    def adapters(self) -> Mapping[str, Mapping[str, str]]:
        """The adapters that each worker last reported, by URL: directories, by name."""
        return {url: worker.adapters for url, worker in self._fleet.workers.items()}

    def states(self) -> Mapping[str, str]:
        """Why each worker gets no requests, or "fit", by URL."""
        return self._fleet.states()

    def info(self) -> EngineInfo:
        """What the workers are serving now."""
        version = self._upkeep.version
        reported = next((v for v in self.versions().values() if v is not None), "")
        return EngineInfo(
            weight_version=reported if version is None else version,
            vocab_size=self._vocab_size,
            max_context=self._max_context,
            max_running=self._max_running,
        )

    async def ready(self) -> None:
        """Waits for a worker that is fit to serve.

        Raises:
          FleetDead: there has been none for `dead_after_s`.
        """
        self._upkeep.start()
        while not self._fleet.fit:
            await self._fleet.wait()

    async def close(self) -> None:
        """Stops; requests that are running fail."""
        self._upkeep.closed = True
        for aborted in self._calls.values():
            aborted.set()
        await self._upkeep.close()

    async def __aenter__(self) -> SGLangEngine:
        self._upkeep.start()
        return self

    async def __aexit__(self, *unused) -> None:
        await self.close()

    # One completion.

    async def _complete(
        self, parts: Parts, request: GenerateRequest, aborted: asyncio.Event
    ) -> None:
        """Asks until the completion is over: what was interrupted is resumed, or tried again."""
        failures, refused, tried = 0, 0, ()
        while not (parts.finished or aborted.is_set()):
            worker = await self._choose(request.session, tried, aborted)
            if worker is None:
                return
            resumes = parts.started
            try:
                result = await self._ask(worker, parts.ask(self._new_rid(request.rid)), aborted)
                if result is not None:
                    self._take(parts, result)
            except Rejected as error:
                raise ValueError(str(error)) from error
            except Busy as error:
                self.stats.busy += 1
                refused += 1
                last, pause_s = error, self._limits.backoff_s * 2 ** min(refused - 1, 4)
            except EngineError as error:
                self.stats.failures += 1
                failures += 1
                if failures == self._limits.attempts:
                    raise
                last, pause_s = error, self._limits.backoff_s * 2 ** (failures - 1)
            else:
                if result is not None:
                    self.stats.resumed += resumes
                    failures = refused = 0
                tried = ()
                continue
            _LOG.info("trying again in %g s: %s", pause_s, last)
            tried = (worker,)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await aborted.wait()

    def _take(self, parts: Parts, result: GenerateResult) -> None:
        try:
            parts.add(result)
        except BadReply:
            self.stats.discarded_tokens += result.completion_tokens
            raise

    async def _choose(
        self, session: str, tried: Sequence[Worker], aborted: asyncio.Event
    ) -> Worker | None:
        """Where to send the next request; None if the caller aborts while there is nowhere."""
        while (worker := self._fleet.choose(session, tried)) is None:
            await _first(self._fleet.wait(), aborted)
            if aborted.is_set():
                return None
        router = self._upkeep.router
        return router if router is not None and router.closed and router not in tried else worker

    async def _ask(
        self, worker: Worker, request: GenerateRequest, aborted: asyncio.Event
    ) -> GenerateResult | None:
        """One request to one server; None if the caller aborts and the server does not answer."""
        with self._upkeep.adapters.use() as adapter:
            try:
                return await self._ask_for(adapter, worker, request, aborted)
            except Rejected as error:
                if adapter is None or not adapter.is_meant_by(error):
                    raise
                if worker is not self._upkeep.router:
                    self._upkeep.adapters.refused(worker, adapter)
                raise Interrupted(f"request {request.rid}: {error}") from error

    async def _ask_for(
        self,
        adapter: Adapter | None,
        worker: Worker,
        request: GenerateRequest,
        aborted: asyncio.Event,
    ) -> GenerateResult | None:
        """The same, with the adapter to sample with."""
        versions = self._upkeep.current_from_now()
        payload = to_payload(request, None if adapter is None else adapter.name)
        worker.in_flight += 1
        try:
            body = await self._post(worker, request.rid, payload, aborted)
            if body is None:
                return None
            current = versions()
            result = from_reply(body, request, vocab_size=self._vocab_size, current=current)
            self._check_origin(worker, result, current)
            if adapter is not None:
                result = adapter.labelled(result)
        except (Busy, Rejected):
            raise
        except EngineError as error:
            if isinstance(error, BadReply):
                self.stats.discarded_tokens += _count(body)
            self._fleet.failed(worker, error, refused=isinstance(error, Refused))
            raise
        finally:
            worker.in_flight -= 1
        self._fleet.succeeded(worker)
        fruitless = result.finish_reason.type == "abort" and not result.output_ids
        if fruitless and not (aborted.is_set() or self._upkeep.swapping or worker.updating):
            raise Interrupted(f"request {request.rid}: {result.finish_reason.message or 'aborted'}")
        return result

    def _check_origin(
        self, worker: Worker, result: GenerateResult, current: Sequence[str | None]
    ) -> None:
        """Only tokens of current weights, from a worker whose weights are what it says."""
        versions = {version for version, _, _ in result.weight_versions}
        if None not in current and not versions <= set(current):
            why = f"serves weights {sorted(versions)}, not {' or '.join(current)}"
            if worker is not self._upkeep.router:
                self._fleet.distrust(worker, why)
            raise BadReply(f"{worker.url} {why}")
        if worker.unfit is not None:
            raise BadReply(f"{worker.url} answered while it was unfit: {worker.unfit}")

    async def _post(
        self, worker: Worker, rid: str, payload: dict[str, Any], aborted: asyncio.Event
    ) -> Any:
        """Sends a generation and waits for the answer, the caller's abort, or the worker's end.

        Returns:
          The body, or None after an abort that the server did not answer.
        """
        lost = worker.lost
        posted = asyncio.create_task(self._upkeep.at(worker).generate(payload))
        signals = [asyncio.create_task(event.wait()) for event in (aborted, lost)]
        try:
            while not posted.done():
                done, _ = await asyncio.wait(
                    (posted, *signals),
                    timeout=self._limits.request_timeout_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done and not worker.updating:  # loading weights is not the server's fault
                    raise Interrupted(
                        f"{worker.url}: no answer to {rid} within "
                        f"{self._limits.request_timeout_s:g} s"
                    )
                if lost.is_set() and not posted.done():
                    raise Interrupted(f"{worker.url} went away: {worker.error}")
                if aborted.is_set() and not posted.done():
                    if self._upkeep.closed:
                        return None
                    await self._abort_at(worker, rid)
                    await asyncio.wait((posted,), timeout=self._limits.control_timeout_s)
                    if not posted.done():
                        return None
            return posted.result()
        finally:
            for signal in signals:
                signal.cancel()
            if not (posted.done() or lost.is_set() or self._upkeep.closed):
                # Whoever waited does so no more; the slot must not go on burning.
                self._upkeep.spawn(self._abort_at(worker, rid))
            posted.cancel()
            posted.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _abort_at(self, worker: Worker, rid: str) -> None:
        """Aborts a request where it may be running; a server that is gone has aborted it, too."""
        workers = [worker]
        if worker is self._upkeep.router:
            workers = self._upkeep.reachable
        await asyncio.gather(
            *(self._upkeep.at(w).abort(rid) for w in workers), return_exceptions=True
        )

    def _new_rid(self, rid: str) -> str:
        """An id that no server has seen: one that was cut off may still be known there, also from
        a process that has been killed and does the same work again."""
        self._sent += 1
        return f"{rid}#{self._name}{self._sent}"


async def _first(coroutine: Coroutine, event: asyncio.Event) -> None:
    """Runs `coroutine` until it is over or `event` is set."""
    tasks = [asyncio.create_task(coroutine), asyncio.create_task(event.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] in done:
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def _count(body: Any) -> int:
    """Tokens in a reply that may be anything."""
    output = body.get("output_ids") if isinstance(body, dict) else None
    return len(output) if isinstance(output, list) else 0
