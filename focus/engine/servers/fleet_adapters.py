"""Adapters instead of weights: what a fleet is given in a run that trains LoRA.

The base is pushed once, as weights are. Then every version is an adapter that servers load beside
those they have, while they go on sampling; a request names the one it wants. From this follows
what a caller may rely on:

  * A request is sampled with one adapter from its first token to its last. No pause is needed,
    and prefixes are not mixed up: a server keeps those of each adapter apart.
  * A server refuses a request for an adapter that it does not have, so that an answer is of the
    adapter that was asked for. Its reply still names the base alone.
  * A worker that could not load an adapter, or has lost it in a restart, gets no request until it
    has it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath

from focus.engine.protocol import EngineError, GenerateResult
from focus.engine.servers.connection import Connection, Rejected
from focus.engine.servers.fleet import Fleet, Limits, Worker
from focus.engine.wire import BadReply

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter and the weights that it belongs to.

    Attributes:
      name: the version of tokens that are sampled with it.
      path: its directory.
      base: version of the weights below it.
    """

    name: str
    path: str
    base: str

    def labelled(self, result: GenerateResult) -> GenerateResult:
        """A completion under the adapter's name in place of the base's.

        Raises:
          BadReply: some of it was sampled on another base.
        """
        spans = result.weight_versions
        if others := {version for version, _, _ in spans} - {self.base}:
            raise BadReply(
                f"request {result.rid}: {self.name!r} belongs on {self.base!r}, and was sampled on "
                f"{sorted(others)}"
            )
        whole = ((self.name, 0, result.completion_tokens),) if spans else ()
        return dataclasses.replace(result, weight_versions=whole)

    def is_meant_by(self, refusal: Rejected) -> bool:
        """Whether a server has refused a request for not having this adapter.

        There is no code for it; every text of such a refusal names the adapter.
        """
        return "lora" in str(refusal).lower() and self.name in str(refusal)


class AdapterUpkeep:
    """Who of a fleet has the current adapter, and who must still be given it.

    The current adapter and the one before it stay loaded: a process that shares the fleet changes
    over a little later than the one that pushes. Older ones are unloaded.

    Args:
      fleet: the workers.
      at: the API of each.
      limits: patience.

    Attributes:
      current: what requests ask for; None: the bare weights.
    """

    def __init__(self, fleet: Fleet, at: Callable[[Worker], Connection], limits: Limits):
        self._fleet, self._at, self._limits = fleet, at, limits
        self.current: Adapter | None = None
        self._previous: Adapter | None = None
        self._coming: Adapter | None = None
        self._in_use: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def use(self) -> Iterator[Adapter | None]:
        """The current adapter, which is not unloaded before the end of the block."""
        adapter = self.current
        if adapter is None:
            yield None
            return
        self._in_use[adapter.name] += 1
        try:
            yield adapter
        finally:
            self._in_use[adapter.name] -= 1

    async def push(self, workers: Sequence[Worker], adapter: Adapter) -> dict[str, str]:
        """Loads an adapter into workers, side by side, and makes it the current one.

        Returns:
          Who could not load it, and why, by URL; the rest is enough.

        Raises:
          EngineError: nobody could. The current adapter is then the old one.
        """
        self._coming = adapter
        try:
            errors = await asyncio.gather(*(self._give(worker, adapter) for worker in workers))
        finally:
            self._coming = None
        failed = {w.url: e for w, e in zip(workers, errors, strict=True) if e is not None}
        if len(failed) == len(workers):
            raise EngineError(f"no worker has taken adapter {adapter.name!r}: {failed}")
        self._switch(adapter)
        for worker in workers:
            self._fleet.lacks(worker, failed.get(worker.url))
        return failed

    async def follow(self, adapter: Adapter) -> None:
        """Waits until a worker has the adapter that another process pushes; makes it current.

        Raises:
          EngineError: nobody has it after `Limits.update_timeout_s`.
        """
        self._coming = adapter
        try:
            async with asyncio.timeout(self._limits.update_timeout_s):
                while not any(_has(w, adapter) for w in self._fleet.workers.values() if w.closed):
                    await self._fleet.wait()
        except TimeoutError as error:
            raise EngineError(
                f"no worker has adapter {adapter.name!r} after "
                f"{self._limits.update_timeout_s:g} s: {dict(self._fleet.states())}"
            ) from error
        finally:
            self._coming = None
        self._switch(adapter)

    def _switch(self, adapter: Adapter) -> None:
        self._previous, self.current = self.current, adapter
        self._compare(self._fleet.workers.values())

    def refused(self, worker: Worker, adapter: Adapter) -> None:
        """It has refused a request for an adapter that it does not have."""
        if adapter is self.current:
            self._fleet.lacks(worker, _lacks(adapter))

    def forget(self) -> None:
        """Requests ask for the bare weights again."""
        self.current = self._previous = None
        for worker in self._fleet.workers.values():
            self._fleet.lacks(worker, None)

    async def look_after(self, worker: Worker) -> None:
        """Asks a worker what it has; finds out whether it has lost the current adapter."""
        if (self._coming or self.current) is None:
            return
        patience_s = self._limits.probe_timeout_s
        async with worker.update_lock:  # or it may answer what has changed meanwhile
            self._fleet.reports(worker, await self._at(worker).adapters(timeout_s=patience_s))
        self._compare([worker])

    def _compare(self, workers: Iterable[Worker]) -> None:
        """By what they report: who lacks the current adapter."""
        if self.current is not None:
            for worker in workers:
                has = _has(worker, self.current)
                self._fleet.lacks(worker, None if has else _lacks(self.current))

    async def repair(self, worker: Worker) -> str | None:
        """Gives a worker the current adapter: None, or what went wrong."""
        adapter = self.current
        _LOG.warning("%s %s; loading it", worker.url, worker.lacks)
        error = await self._give(worker, adapter)
        if adapter is self.current:
            self._fleet.lacks(worker, error)
        return error

    async def tidy(self, worker: Worker) -> None:
        """Unloads older adapters of this run; those that are in use, or stay, are tried again."""
        async with worker.update_lock:
            if self.current is None:
                return
            wanted = (self._coming, self.current, self._previous)
            kept = {adapter.name for adapter in wanted if adapter is not None}
            beside = PurePath(self.current.path).parent
            for name, path in list(worker.adapters.items()):
                if name in kept or self._in_use[name] or PurePath(path).parent != beside:
                    continue
                try:
                    patience_s = self._limits.probe_timeout_s
                    await self._at(worker).unload_adapter(name, timeout_s=patience_s)
                except EngineError as error:
                    _LOG.info("%s keeps adapter %s for now: %s", worker.url, name, error)
                    return
                left = {n: p for n, p in worker.adapters.items() if n != name}
                self._fleet.reports(worker, left)

    async def _give(self, worker: Worker, adapter: Adapter) -> str | None:
        """Loads an adapter into a worker: None, or what went wrong."""
        connection, error = self._at(worker), None
        async with worker.update_lock:
            try:
                self._fleet.reports(worker, await connection.adapters())
                if not _has(worker, adapter):  # it may, by a try whose answer was lost
                    timeout_s = self._limits.update_timeout_s
                    await connection.load_adapter(adapter.name, adapter.path, timeout_s=timeout_s)
                    self._fleet.reports(worker, await connection.adapters())
                if not _has(worker, adapter):
                    error = f"lists {sorted(worker.adapters)} after loading {adapter.name!r}"
            except EngineError as failure:
                error = str(failure)
        if error is None:
            worker.failed_updates = 0
            return None
        self._fleet.postpone(worker)
        return f"could not be given adapter {adapter.name!r}: {error}"


def _has(worker: Worker, adapter: Adapter) -> bool:
    return worker.adapters.get(adapter.name) == adapter.path


def _lacks(adapter: Adapter) -> str:
    return f"lacks adapter {adapter.name!r}"
