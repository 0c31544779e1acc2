"""Which server a request goes to: prefixes, health, and who holds which weights.

A worker is fit to serve when it answers, its circuit is closed and it holds the current weights.
One that is not gets no traffic: an open circuit waits for a probe, wrong or unknown weights wait
for an update. Nothing here speaks HTTP; `focus.engine.servers.sglang` reports what it has seen.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from focus.engine.protocol import FleetDead

_SESSIONS = 2**16  # homes that are remembered; the least recently used goes first


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long to wait, how often to try, and when to give up.

    Attributes:
      connect_timeout_s: seconds for a connection.
      request_timeout_s: seconds for one generation; time in which its worker is being updated
        does not count.
      control_timeout_s: seconds for a call that only sets or reads something.
      update_timeout_s: seconds for loading weights.
      probe_every_s: seconds between two looks at a worker.
      probe_timeout_s: seconds that such a look may take.
      attempts: failures of one request, on whichever workers, before it has failed.
      backoff_s: seconds before the second try; doubled before each further one.
      break_after: requests or probes in a row that fail and open a worker's circuit.
      break_s: seconds that it stays open; doubled each time in a row, at most to the
        8-fold.
      dead_after_s: seconds without a fit worker after which there is no hope left.
      pause_mode: what becomes of running requests when weights change. "retract": the server puts
        them back in its queue and goes on with the new weights; "abort": they come back as they
        are and are sent again from here.
    """

    connect_timeout_s: float = 5.0
    request_timeout_s: float = 300.0
    control_timeout_s: float = 30.0
    update_timeout_s: float = 600.0
    probe_every_s: float = 2.0
    probe_timeout_s: float = 10.0
    attempts: int = 4
    backoff_s: float = 0.5
    break_after: int = 3
    break_s: float = 2.0
    dead_after_s: float = 300.0
    pause_mode: str = "retract"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "pause_mode":
                if value not in ("retract", "abort"):
                    raise ValueError(f"pause_mode must be 'retract' or 'abort', got {value!r}")
            elif field.name in ("attempts", "break_after"):
                if value < 1:
                    raise ValueError(f"{field.name} must be >= 1, got {value}")
            elif not value > 0:
                raise ValueError(f"{field.name} must be > 0, got {value}")


@dataclasses.dataclass(eq=False)
class Worker:
    """One server as seen from here.

    Attributes:
      url: where it listens.
      version: weights that it last reported; None when it is not known.
      adapters: directories of the adapters that it last reported, by name.
      in_flight: requests that it has of ours.
      failures: requests in a row that failed.
      missed: probes in a row that failed.
      tried: whether it has been asked anything, and the outcome is known.
      trips: how often in a row its circuit has opened.
      closed: whether the circuit is; False until it has answered for the first time.
      open_until: time before which an open circuit is not probed.
      restarted: whether its circuit has opened since its last update, so that it may hold the
        weights it starts with under the right name.
      unfit: why its weights must not be sampled from; None when they may.
      lacks: why the current adapter must not be asked for; None when it may, or there is none.
      error: what went wrong last.
      updating: whether its weights are being changed now.
      failed_updates: in a row.
      update_after: time before which no repair is tried.
      update_lock: one update at a time.
      lost: becomes done when the circuit opens: whoever waits for an answer need not any more.
    """

    url: str
    version: str | None = None
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    in_flight: int = 0
    failures: int = 0
    missed: int = 0
    tried: bool = False
    trips: int = 0
    closed: bool = False
    open_until: float = 0.0
    restarted: bool = False
    unfit: str | None = None
    lacks: str | None = None
    error: str = "has not answered yet"
    updating: bool = False
    failed_updates: int = 0
    update_after: float = 0.0
    update_lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    lost: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def wanting(self) -> str | None:
        """What has to be loaded before it may be sampled from; None when nothing has."""
        return self.unfit or self.lacks

    @property
    def fit(self) -> bool:
        """Whether it may be given a request."""
        return self.closed and self.wanting is None and not self.updating

    @property
    def state(self) -> str:
        """For people: why it gets requests or does not."""
        if not self.closed:
            return self.error
        if self.updating:
            return "is being updated"
        return self.wanting or "fit"


class Fleet:
    """Workers, and the one that a session's next request goes to.

    A session stays where its prefix is, as long as that worker is fit and not overloaded: then
    it moves to the fit worker with the fewest requests, and stays there. Workers are compared in
    an order that depends on the session, so that equally loaded ones share new sessions.

    Args:
      urls: of the workers.
      limits: when a circuit opens and when the fleet is dead.
      follows: whether weights are changed by somebody else. Then a worker is taken at its word
        about its version, since its updates are not seen from here.
      now: a monotonic clock, seconds.
      overload: a worker is overloaded when it has this many times the requests of the least
        loaded one, and `overload_by` more.
      overload_by: see there.

    Raises:
      ValueError: no worker, or one twice.
    """

    def __init__(
        self,
        urls: Sequence[str],
        limits: Limits = Limits(),
        *,
        follows: bool = False,
        now: Callable[[], float] = time.monotonic,
        overload: float = 1.5,
        overload_by: int = 32,
    ):
        urls = [url.rstrip("/") for url in urls]
        if not urls:
            raise ValueError("a fleet needs the URL of at least one worker, got none")
        if len(set(urls)) < len(urls):
            raise ValueError(f"every worker once, got {urls}")
        self.workers = {url: Worker(url) for url in urls}
        self._limits = limits
        self._follows = follows
        self._now = now
        self._overload, self._overload_by = overload, overload_by
        self._homes: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._unfit_since: float | None = now()
        self._changed = asyncio.Event()
        self.moves = 0

    def versions(self) -> Mapping[str, str | None]:
        """The version that each worker last reported, by URL."""
        return {url: worker.version for url, worker in self.workers.items()}

    def states(self) -> Mapping[str, str]:
        """ "fit", or why not, by URL."""
        return {url: worker.state for url, worker in self.workers.items()}

    @property
    def fit(self) -> list[Worker]:
        """Workers that may be given requests."""
        return [worker for worker in self.workers.values() if worker.fit]

    # Choosing.

    def choose(self, session: str, exclude: Collection[Worker] = ()) -> Worker | None:
        """The worker for a session's next request; None when none is fit.

        Args:
          session: requests of one session share prefixes; "" shares none.
          exclude: workers to take only if there is no other.
        """
        fit = [w for w in self.fit if w not in exclude] or self.fit
        if not fit:
            return None
        least = min(worker.in_flight for worker in fit)
        home = self.workers[self._homes[session]] if session in self._homes else None
        worker = home
        if home not in fit or home.in_flight > max(
            self._overload * least, least + self._overload_by
        ):
            worker = min(fit, key=lambda w: (w.in_flight, _rank(session, w.url)))
            self.moves += home is not None
        if session:
            self._homes[session] = worker.url
            self._homes.move_to_end(session)
            if len(self._homes) > _SESSIONS:
                self._homes.popitem(last=False)
        return worker

    async def wait(self) -> None:
        """Waits for a change: a worker that has become fit, or is no longer.

        Raises:
          FleetDead: there has been no fit worker for `dead_after_s`.
        """
        left = self.seconds_to_live()
        if left <= 0:
            raise FleetDead(self.obituary())
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if left == math.inf else left):
                await changed.wait()

    def seconds_to_live(self) -> float:
        """Seconds until the fleet counts as dead; infinite while a worker is fit."""
        if self._unfit_since is None:
            return math.inf
        left = self._unfit_since + self._limits.dead_after_s - self._now()
        # A loop that was busy all the time, as with compiling, has not heard anybody yet.
        tried = all(worker.tried for worker in self.workers.values())
        return left if tried else max(left, self._limits.probe_timeout_s)

    def obituary(self) -> str:
        """What to tell a person when there is nobody left."""
        states = "; ".join(f"{url}: {state}" for url, state in self.states().items())
        return (
            f"no server has been fit to answer for {self._limits.dead_after_s:g} s ({states}); "
            "start servers at these addresses and run the same command again, or raise dead_after_s"
        )

    # What was seen.

    def succeeded(self, worker: Worker) -> None:
        """It has answered as it should."""
        worker.failures = 0
        if worker.closed:
            worker.trips = 0

    def failed(self, worker: Worker, error: Exception, *, refused: bool = False) -> None:
        """A request to it has failed.

        Args:
          worker: which.
          error: how.
          refused: whether nobody listens there: no use in trying more often.
        """
        worker.failures += 1
        self._consider(worker, error, refused)

    def silent(self, worker: Worker, error: Exception, *, refused: bool = False) -> None:
        """A probe of it has failed; as `failed`."""
        worker.missed += 1
        self._consider(worker, error, refused)

    def answered(self, worker: Worker, version: str | None, expected: Collection[str]) -> None:
        """A probe of it went well: the circuit closes, its weights are compared.

        Args:
          worker: which.
          version: the version that it says it serves.
          expected: versions that are right; empty if any is.
        """
        worker.missed, worker.tried = 0, True
        if not worker.closed:
            worker.closed, worker.failures = True, 0
        if not worker.updating:  # else it may have answered before
            worker.version = version
            if not expected or (self._follows and version in expected):
                worker.unfit, worker.restarted = None, False
            elif version not in expected:
                worker.unfit = f"serves weights {version!r}, not {' or '.join(sorted(expected))}"
            elif worker.restarted and worker.unfit is None:
                worker.unfit = "was away, and may be back with the weights that it starts with"
        self._note()

    def distrust(self, worker: Worker, why: str) -> None:
        """Its weights are not what they should be; no traffic until an update succeeds."""
        worker.unfit = why
        self._note()

    def reports(self, worker: Worker, adapters: Mapping[str, str]) -> None:
        """It says which adapters it has: directories, by name."""
        worker.adapters = dict(adapters)
        self._note()

    def lacks(self, worker: Worker, why: str | None) -> None:
        """The current adapter is not there; no traffic until it is. None: it is there."""
        worker.lacks = why
        self._note()

    def begin_update(self, worker: Worker) -> None:
        """Its weights are about to change; no new requests meanwhile."""
        worker.updating = True
        self._note()

    def end_update(self, worker: Worker, version: str, error: str | None) -> None:
        """They have changed, or may be anything if there was an error."""
        worker.updating = False
        worker.unfit = error
        if error is None:
            worker.version, worker.restarted = version, False
            worker.closed = True
            worker.failures = worker.missed = worker.failed_updates = 0
        else:
            self.postpone(worker)
        self._note()

    def postpone(self, worker: Worker) -> None:
        """Something could not be loaded into it: the next try waits, longer each time in a row."""
        worker.update_after = self._now() + self._pause_s(worker.failed_updates)
        worker.failed_updates += 1

    def needs_repair(self, worker: Worker) -> bool:
        """Whether it answers, must not serve, and it is time to try an update."""
        wanting = worker.closed and worker.wanting is not None and not worker.updating
        return wanting and self._now() >= worker.update_after

    def is_due(self, worker: Worker) -> bool:
        """Whether it is time to probe it."""
        return not worker.updating and (worker.closed or self._now() >= worker.open_until)

    def _consider(self, worker: Worker, error: Exception, refused: bool) -> None:
        worker.error, worker.tried = str(error), True
        if refused or max(worker.failures, worker.missed) >= self._limits.break_after:
            self._open(worker)
        self._note()

    def _open(self, worker: Worker) -> None:
        # Nobody sees how short an absence was: it may have been started anew in it.
        worker.closed, worker.restarted = False, True
        worker.open_until = self._now() + self._pause_s(worker.trips)
        worker.trips += 1
        worker.lost.set()
        worker.lost = asyncio.Event()

    def _pause_s(self, times: int) -> float:
        return self._limits.break_s * 2 ** min(times, 3)

    def _note(self) -> None:
        """Starts or stops the clock of the fleet's death and wakes those who wait."""
        # A fit worker that is being updated is alive; one that is only being repaired is not yet.
        if any(w.closed and w.wanting is None for w in self.workers.values()):
            self._unfit_since = None
        elif self._unfit_since is None:
            self._unfit_since = self._now()
        self._changed.set()
        self._changed = asyncio.Event()


def _rank(session: str, url: str) -> bytes:
    """An order of workers that differs from session to session and is the same in every process."""
    return hashlib.blake2b(f"{session}|{url}".encode(), digest_size=8).digest()
