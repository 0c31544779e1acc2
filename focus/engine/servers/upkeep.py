"""What keeps a fleet of servers fit to serve: probes, repairs, and the push of new weights.

One task looks after each worker and one after the router. They find out who is there and which
weights it holds, bring back a worker that has the wrong ones, and keep the router's list to those
that may be sampled from. Adapters on these weights are looked after in
`focus.engine.servers.fleet_adapters`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Sequence

import aiohttp

from focus.engine.protocol import EngineError
from focus.engine.servers.connection import Connection, Interrupted, Refused, Rejected
from focus.engine.servers.fleet import Fleet, Limits, Worker
from focus.engine.servers.fleet_adapters import Adapter, AdapterUpkeep

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
      discarded_tokens: sampled, and thrown away: with a reply that could not be believed, or
        because they stood behind the end of their completion.
      updates: weights and adapters that a worker has loaded.
      failed_updates: weights and adapters that a worker could not load.
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


class Upkeep:
    """A fleet, its connections, and the tasks that look after it.

    Args:
      urls: of every worker.
      router_url: of the router in front of them, or None.
      max_context: contexts that a worker must have room for.
      limits: patience.
      pushes: whether this process changes weights.
      stats: where updates are counted.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        router_url: str | None,
        max_context: int,
        limits: Limits,
        pushes: bool,
        stats: ServerStats,
    ):
        self.fleet = Fleet(urls, limits, follows=not pushes)
        self.router = Worker(router_url.rstrip("/")) if router_url else None
        self.adapters = AdapterUpkeep(self.fleet, self.at, limits)
        self.closed = False
        self.swapping = False
        self._max_context = max_context
        self._limits = limits
        self._pushes = pushes
        self._stats = stats
        # Versions in the order in which they were made current, and where the last one lies.
        self._history: list[str] = []
        self._path: str | None = None
        self._one_swap = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self._connections: dict[str, Connection] = {}
        self._tasks: set[asyncio.Task] = set()

    @property
    def version(self) -> str | None:
        """The current version; None before the first push."""
        if self.adapters.current is not None:
            return self.adapters.current.name
        return self._history[-1] if self._history else None

    @property
    def reachable(self) -> list[Worker]:
        """Workers that answer, fit or not."""
        return [worker for worker in self.fleet.workers.values() if worker.closed]

    def current_from_now(self) -> Callable[[], list[str | None]]:
        """A function that lists the versions that were current between now and its call.

        None among them stands for whatever a worker served before the first push.
        """
        since = max(len(self._history) - 1 - self.swapping, 0)
        unnamed = [] if len(self._history) > self.swapping else [None]
        return lambda: unnamed + self._history[since:]

    def start(self) -> None:
        """Opens connections and begins to look after the servers; once is enough.

        Raises:
          EngineError: it has been closed.
        """
        if self.closed:
            raise EngineError("the engine is closed")
        if self._session is not None:
            return
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._limits.connect_timeout_s),
        )
        for worker in self.fleet.workers.values():
            self.spawn(self._watch(worker, self._look_after))
        if self.router is not None:
            self.spawn(self._watch(self.router, self._look_after_router))

    async def close(self) -> None:
        """Stops looking after the servers and closes all connections."""
        self.closed = True
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def at(self, worker: Worker) -> Connection:
        """The API of a server."""
        if worker.url not in self._connections:
            self._connections[worker.url] = Connection(
                worker.url, self._session, self._limits.control_timeout_s
            )
        return self._connections[worker.url]

    def spawn(self, coroutine: Coroutine) -> None:
        """Runs something to its end, or to that of the engine."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Weights.

    async def load_weights(self, path: str, version: str) -> None:
        """See `SGLangEngine.load_weights`."""
        async with self._one_swap:
            while not (reachable := self.reachable):
                await self.fleet.wait()
            self.adapters.forget()
            old_path, self._path, self.swapping = self._path, path, True
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
                self.swapping = False

    async def load_adapter(self, path: str, version: str) -> None:
        """See `SGLangEngine.load_adapter`."""
        async with self._one_swap:
            if not self._history:
                raise ValueError(
                    f"adapter {version!r} needs the weights that it belongs to: load those first"
                )
            while not (reachable := self.reachable):
                await self.fleet.wait()
            adapter = Adapter(version, path, base=self._history[-1])
            if not self._pushes:
                await self.adapters.follow(adapter)
                return
            failed = await self.adapters.push(reachable, adapter)
            self._stats.updates += len(reachable) - len(failed)
            self._stats.failed_updates += len(failed)
            for url, error in failed.items():
                _LOG.warning("%s gets no requests: it %s", url, error)
            if failed and self.router is not None:
                with contextlib.suppress(EngineError):
                    await self._look_after_router(self.router)
            await asyncio.gather(*(self.adapters.tidy(worker) for worker in reachable))

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
        connection, error = self.at(worker), None
        async with worker.update_lock:
            self.fleet.begin_update(worker)
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
                    if self.router is not None:
                        with contextlib.suppress(EngineError):
                            await self._look_after_router(self.router)
                await self._go_on(worker, clean=error is None)
                self.fleet.end_update(worker, version, error)
        if error is None:
            self._stats.updates += 1
        else:
            self._stats.failed_updates += 1
        return error

    async def _go_on(self, worker: Worker, *, clean: bool) -> None:
        """Ends a worker's pause. What it was doing is lost if its weights may be anything."""
        try:
            async with asyncio.timeout(self._limits.probe_timeout_s):
                if not clean:
                    await self.at(worker).abort(None)
                await self.at(worker).resume()
        except TimeoutError:
            self.fleet.silent(worker, Interrupted(f"{worker.url} does not go on after a pause"))
        except EngineError as error:
            self.fleet.silent(worker, error, refused=isinstance(error, Refused))

    async def _await_version(self, version: str) -> None:
        """Waits until a worker serves what another process has pushed."""
        try:
            async with asyncio.timeout(self._limits.update_timeout_s):
                while not any(w.version == version for w in self.fleet.fit):
                    await self.fleet.wait()
        except TimeoutError as error:
            raise EngineError(
                f"no worker serves {version!r} after {self._limits.update_timeout_s:g} s: "
                f"{dict(self.fleet.states())}"
            ) from error

    # Health.

    async def _watch(self, worker: Worker, look: Callable[[Worker], Coroutine]) -> None:
        while True:
            if self.fleet.is_due(worker):
                try:
                    await look(worker)
                except EngineError as error:
                    if str(error) != worker.error:
                        _LOG.warning("%s", error)
                    self.fleet.silent(worker, error, refused=isinstance(error, Refused))
            await asyncio.sleep(self._limits.probe_every_s)

    async def _look_after(self, worker: Worker) -> None:
        """Probes a worker; brings it to the current weights if it has others."""
        connection, patience_s = self.at(worker), self._limits.probe_timeout_s
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
        # Before the first update has gone through, any version is right.
        named = len(self._history) > self.swapping
        expected = self._history[-1 - self.swapping :] if named else ()
        self.fleet.answered(worker, info.get("weight_version"), expected)
        await self.adapters.look_after(worker)
        if self.swapping or not self._pushes:
            return
        if self.fleet.needs_repair(worker):
            await self._repair(worker)
        await self.adapters.tidy(worker)

    async def _repair(self, worker: Worker) -> None:
        """Loads what a worker wants: the weights first, since the adapter belongs to them."""
        if worker.unfit is not None:
            path, version = self._path, self._history[-1]
            _LOG.warning("%s %s; loading %s again", worker.url, worker.unfit, version)
            await self._update(worker, path, version)
        if worker.unfit is None and worker.lacks is not None:
            error = await self.adapters.repair(worker)
            self._stats.updates += error is None
            self._stats.failed_updates += error is not None

    async def _look_after_router(self, router: Worker) -> None:
        """Probes the router and makes its list that of the workers that may be sampled from.

        One that is only unreachable stays: the router looks after that itself.
        """
        connection, patience_s = self.at(router), self._limits.probe_timeout_s
        await connection.call("GET", "/health", timeout_s=patience_s)
        self.fleet.answered(router, None, ())
        if not self._pushes:
            return
        listed = await self._listed(router)
        for worker in self.fleet.workers.values():
            if worker.fit and worker.url not in listed:
                await connection.call("POST", "/workers", {"url": worker.url})
            elif worker.wanting is not None and worker.url in listed:
                await connection.call("DELETE", f"/workers/{listed[worker.url]}")

    async def _listed(self, router: Worker) -> dict[str, str]:
        """The router's own id of each of its workers, by URL."""
        answer = await self.at(router).call(
            "GET", "/workers", timeout_s=self._limits.probe_timeout_s
        )
        try:
            return {entry["url"].rstrip("/"): entry["id"] for entry in answer["workers"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise Interrupted(f"{router.url}/workers: {error!r} in {answer}") from error
