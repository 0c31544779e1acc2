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
import dataclasses
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import aiohttp

from focus.rollout.connection import Busy, Connection, Interrupted, Refused, Rejected
from focus.rollout.engine import (
    EngineError,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    admissible,
)
from focus.rollout.fleet import Fleet, Limits, Worker
from focus.rollout.parts import Parts
from focus.rollout.wire import BadReply, from_reply, to_payload

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass
class ServerStats:
    """Running totals.

    Attributes:
      requests: completions handed out.
      prompt_tokens: length of their prompts.
      cached_tokens: prompt tokens whose keys and values were reused.
      generated_tokens: tokens handed out.
      failures: requests to a server that failed, to be tried again.
      busy: requests that a server had no room for.
      resumed: times that a completion went on after an interruption.
      discarded_tokens: sampled, and thrown away with a reply that could not be believed.
      updates: weights that a worker has loaded.
      failed_updates: weights that a worker could not load.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    failures: int = 0
    busy: int = 0
    resumed: int = 0
    discarded_tokens: int = 0
    updates: int = 0
    failed_updates: int = 0


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
        self._limits = limits = Limits() if limits is None else limits
        self._fleet = Fleet(urls, limits, follows=not pushes)
        self._router = Worker(router_url.rstrip("/")) if router_url else None
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._text_of = decode
        self._eos = tuple(eos_token_ids)
        self._max_running = max_running
        self._pushes = pushes
        # Versions in the order in which they were made current, and where the last one lies.
        self._history: list[str] = []
        self._path: str | None = None
        self._swapping = False
        self._one_swap = asyncio.Lock()
        self._calls: dict[str, asyncio.Event] = {}
        self._session: aiohttp.ClientSession | None = None
        self._connections: dict[str, Connection] = {}
        self._tasks: set[asyncio.Task] = set()
        self._closed = False
        self._name, self._sent = uuid.uuid4().hex[:8] + ".", 0
        self.stats = ServerStats()

    # What callers see.

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Samples one completion.

        `max_new_tokens` is cut to what the context has room for; the completion then ends with
        finish reason "length". Cancelling the call frees its slot on the server.

        Raises:
          ValueError: empty or over-long prompt, id outside the vocabulary, an `rid` that is in
            flight, or a setting that the server does not take.
          EngineError: every attempt failed, or the engine is closed.
          FleetDead: no worker has been fit for `dead_after_s`.
        """
        if request.rid in self._calls:
            raise ValueError(f"rid {request.rid!r} is in flight already: request ids are unique")
        request = admissible(request, self._vocab_size, self._max_context)
        self._start()
        parts = Parts(request, self._text_of, self._eos)
        aborted = self._calls[request.rid] = asyncio.Event()
        try:
            await self._complete(parts, request, aborted)
        finally:
            del self._calls[request.rid]
        if self._closed:
            raise EngineError("the engine is closed")
        result = parts.result(FinishReason("abort", message="aborted by the caller"))
        self.stats.requests += 1
        self.stats.prompt_tokens += result.prompt_tokens
        self.stats.cached_tokens += result.cached_tokens
        self.stats.generated_tokens += result.completion_tokens
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
        self._start()
        async with self._one_swap:
            while not (reachable := self._reachable):
                await self._fleet.wait()
            old_path, self._path, self._swapping = self._path, path, True
            self._history.append(version)
            try:
                if self._pushes:
                    await self._push(reachable, path, version)
                else:
                    await self._await_version(version)
            except EngineError:
                self._history.pop()
                self._path = old_path
                raise
            finally:
                self._swapping = False

    async def flush_cache(self) -> None:
        """Forgets the prefixes that the workers hold."""
        self._start()
        await asyncio.gather(*(self._at(worker).flush() for worker in self._reachable))

    def versions(self) -> Mapping[str, str | None]:
        """The version that each worker last reported, by URL; None if it never did."""
        return self._fleet.versions()

    def states(self) -> Mapping[str, str]:
        """ "fit", or why a worker gets no requests, by URL."""
        return self._fleet.states()

    def info(self) -> EngineInfo:
        """What the workers are serving now."""
        reported = next((v for v in self.versions().values() if v is not None), "")
        return EngineInfo(
            weight_version=self._history[-1] if self._history else reported,
            vocab_size=self._vocab_size,
            max_context=self._max_context,
            max_running=self._max_running,
        )

    async def ready(self) -> None:
        """Waits for a worker that is fit to serve.

        Raises:
          FleetDead: there has been none for `dead_after_s`.
        """
        self._start()
        while not self._fleet.fit:
            await self._fleet.wait()

    async def close(self) -> None:
        """Stops; requests that are running fail."""
        self._closed = True
        for aborted in self._calls.values():
            aborted.set()
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> SGLangEngine:
        self._start()
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
                    parts.add(result)
                    self.stats.resumed += resumes
                    failures = refused = 0
                tried = ()
                continue
            _LOG.info("trying again in %g s: %s", pause_s, last)
            tried = (worker,)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await aborted.wait()

    async def _choose(
        self, session: str, tried: Sequence[Worker], aborted: asyncio.Event
    ) -> Worker | None:
        """Where to send the next request; None if the caller aborts while there is nowhere."""
        while (worker := self._fleet.choose(session, tried)) is None:
            await _first(self._fleet.wait(), aborted)
            if aborted.is_set():
                return None
        if self._router is not None and self._router.closed and self._router not in tried:
            return self._router
        return worker

    async def _ask(
        self, worker: Worker, request: GenerateRequest, aborted: asyncio.Event
    ) -> GenerateResult | None:
        """One request to one server; None if the caller aborts and the server does not answer."""
        since = max(len(self._history) - 1 - self._swapping, 0)
        unnamed = [] if self._history else [None]  # what it served before the first update
        worker.in_flight += 1
        try:
            body = await self._post(worker, request, aborted)
            if body is None:
                return None
            current = unnamed + self._history[since:]
            result = from_reply(body, request, vocab_size=self._vocab_size, current=current)
            self._check_origin(worker, result, current)
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
        if fruitless and not (aborted.is_set() or self._swapping or worker.updating):
            raise Interrupted(f"request {request.rid}: {result.finish_reason.message or 'aborted'}")
        return result

    def _check_origin(
        self, worker: Worker, result: GenerateResult, current: Sequence[str | None]
    ) -> None:
        """Only tokens of current weights, from a worker whose weights are what it says."""
        versions = {version for version, _, _ in result.weight_versions}
        if None not in current and not versions <= set(current):
            why = f"serves weights {sorted(versions)}, not {' or '.join(current)}"
            if worker is not self._router:
                self._fleet.distrust(worker, why)
            raise BadReply(f"{worker.url} {why}")
        if worker.unfit is not None:
            raise BadReply(f"{worker.url} answered while it was unfit: {worker.unfit}")

    async def _post(self, worker: Worker, request: GenerateRequest, aborted: asyncio.Event) -> Any:
        """Sends a generation and waits for the answer, the caller's abort, or the worker's end.

        Returns:
          The body, or None after an abort that the server did not answer.
        """
        lost = worker.lost
        posted = asyncio.create_task(self._at(worker).generate(to_payload(request)))
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
                        f"{worker.url}: no answer to {request.rid} within "
                        f"{self._limits.request_timeout_s:g} s"
                    )
                if lost.is_set() and not posted.done():
                    raise Interrupted(f"{worker.url} went away: {worker.error}")
                if aborted.is_set() and not posted.done():
                    if self._closed:
                        return None
                    await self._abort_at(worker, request.rid)
                    await asyncio.wait((posted,), timeout=self._limits.control_timeout_s)
                    if not posted.done():
                        return None
            return posted.result()
        finally:
            for signal in signals:
                signal.cancel()
            if not (posted.done() or lost.is_set() or self._closed):
                # Whoever waited does so no more; the slot must not go on burning.
                self._spawn(self._abort_at(worker, request.rid))
            posted.cancel()
            posted.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _abort_at(self, worker: Worker, rid: str) -> None:
        """Aborts a request where it may be running; a server that is gone has aborted it, too."""
        workers = [worker]
        if worker is self._router:
            workers = self._reachable
        await asyncio.gather(*(self._at(w).abort(rid) for w in workers), return_exceptions=True)

    # Weights.

    async def _push(self, workers: Sequence[Worker], path: str, version: str) -> None:
        """Loads weights into workers, side by side; one that has taken them is enough."""
        errors = await asyncio.gather(*(self._update(w, path, version) for w in workers))
        failed = {w.url: e for w, e in zip(workers, errors, strict=True) if e is not None}
        if len(failed) == len(workers):
            raise EngineError(f"no worker has taken weights {version!r}: {failed}")
        for url, error in failed.items():
            _LOG.warning("%s gets no requests until it has loaded %s: %s", url, version, error)

    async def _update(self, worker: Worker, path: str, version: str) -> str | None:
        """Loads weights into a worker: None, or what went wrong."""
        connection, error = self._at(worker), None
        async with worker.update_lock:
            self._fleet.begin_update(worker)
            try:
                await connection.pause(self._limits.pause_mode)
                await connection.load(path, version, timeout_s=self._limits.update_timeout_s)
                served = (await connection.model_info()).get("weight_version")
                if served != version:
                    error = f"says that it serves {served!r} after loading {version!r}"
            except EngineError as failure:
                error = str(failure)
            except asyncio.CancelledError:
                error = "its update was cancelled"
                raise
            finally:
                if error is not None:
                    error = f"could not be brought to {version!r}: {error}"
                    worker.unfit = error  # before it goes on sampling from it knows what
                    if self._router is not None:
                        with contextlib.suppress(EngineError):
                            await self._look_after_router(self._router)
                await self._go_on(worker, clean=error is None)
                self._fleet.end_update(worker, version, error)
        if error is None:
            self.stats.updates += 1
        else:
            self.stats.failed_updates += 1
        return error

    async def _go_on(self, worker: Worker, *, clean: bool) -> None:
        """Ends a worker's pause. What it was doing is lost if its weights may be anything."""
        try:
            async with asyncio.timeout(self._limits.probe_timeout_s):
                if not clean:
                    await self._at(worker).abort(None)
                await self._at(worker).resume()
        except TimeoutError:
            self._fleet.silent(worker, Interrupted(f"{worker.url} does not go on after a pause"))
        except EngineError as error:
            self._fleet.silent(worker, error, refused=isinstance(error, Refused))

    async def _await_version(self, version: str) -> None:
        """Waits until a worker serves what another process has pushed."""
        try:
            async with asyncio.timeout(self._limits.update_timeout_s):
                while not any(w.version == version for w in self._fleet.fit):
                    await self._fleet.wait()
        except TimeoutError as error:
            raise EngineError(
                f"no worker serves {version!r} after {self._limits.update_timeout_s:g} s: "
                f"{dict(self.states())}"
            ) from error

    # Health: one task looks after each server.

    def _start(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._session is not None:
            return
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._limits.connect_timeout_s),
        )
        for worker in self._fleet.workers.values():
            self._spawn(self._watch(worker, self._look_after))
        if self._router is not None:
            self._spawn(self._watch(self._router, self._look_after_router))

    async def _watch(self, worker: Worker, look: Callable[[Worker], Coroutine]) -> None:
        while True:
            if self._fleet.is_due(worker):
                try:
                    await look(worker)
                except EngineError as error:
                    if str(error) != worker.error:
                        _LOG.warning("%s", error)
                    self._fleet.silent(worker, error, refused=isinstance(error, Refused))
            await asyncio.sleep(self._limits.probe_every_s)

    async def _look_after(self, worker: Worker) -> None:
        """Probes a worker; brings it to the current weights if it has others."""
        connection, patience_s = self._at(worker), self._limits.probe_timeout_s
        lost = worker.lost
        if not worker.closed:
            await connection.generates(timeout_s=patience_s)
            longest = (await connection.server_info(timeout_s=patience_s)).get("max_req_input_len")
            if longest is not None and longest < self._max_context - 1:
                raise Rejected(
                    f"{worker.url} takes prompts of {longest} tokens, and this run has contexts "
                    f"of {self._max_context}; start it with --context-length "
                    f"{self._max_context + 8} or more"
                )
        info = await connection.model_info(timeout_s=patience_s)
        if lost.is_set():  # its circuit has opened meanwhile, for a reason
            return
        expected = self._history[-1 - self._swapping :]
        self._fleet.answered(worker, info.get("weight_version"), expected)
        if self._swapping or not (self._pushes and self._fleet.needs_repair(worker)):
            return
        path, version = self._path, self._history[-1]
        _LOG.warning("%s %s; loading %s again", worker.url, worker.unfit, version)
        await self._update(worker, path, version)

    async def _look_after_router(self, router: Worker) -> None:
        """Probes the router and makes its list that of the workers that may be sampled from.

        One that is only unreachable stays: the router looks after that itself.
        """
        connection, patience_s = self._at(router), self._limits.probe_timeout_s
        await connection.call("GET", "/health", timeout_s=patience_s)
        self._fleet.answered(router, None, ())
        if not self._pushes:
            return
        listed = await self._listed(router)
        for worker in self._fleet.workers.values():
            if worker.fit and worker.url not in listed:
                await connection.call("POST", "/workers", {"url": worker.url})
            elif worker.unfit is not None and worker.url in listed:
                await connection.call("DELETE", f"/workers/{listed[worker.url]}")

    async def _listed(self, router: Worker) -> dict[str, str]:
        """The router's own id of each of its workers, by URL."""
        answer = await self._at(router).call(
            "GET", "/workers", timeout_s=self._limits.probe_timeout_s
        )
        try:
            return {entry["url"].rstrip("/"): entry["id"] for entry in answer["workers"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise Interrupted(f"{router.url}/workers: {error!r} in {answer}") from error

    # Plumbing.

    @property
    def _reachable(self) -> list[Worker]:
        return [worker for worker in self._fleet.workers.values() if worker.closed]

    def _new_rid(self, rid: str) -> str:
        """An id that no server has seen: one that was cut off may still be known there, also from
        a process that has been killed and does the same work again."""
        self._sent += 1
        return f"{rid}#{self._name}{self._sent}"

    def _at(self, worker: Worker) -> Connection:
        if worker.url not in self._connections:
            self._connections[worker.url] = Connection(
                worker.url, self._session, self._limits.control_timeout_s
            )
        return self._connections[worker.url]

    def _spawn(self, coroutine: Coroutine) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


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
