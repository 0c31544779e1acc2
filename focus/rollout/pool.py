"""Many plays at once: a shared token account, retries, and a bounded pool in a fixed order.

Nothing here decides by the clock: with a deterministic engine, who is granted what and in which
order results come back is the same in every run. Only a timeout, which is a failure, looks at
the time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from focus.branching.budget import TokenBudget
from focus.engine.protocol import Engine, EngineError, FleetDead, GenerateRequest, GenerateResult
from focus.types import Trajectory

# Longest wait for the answer to an abort; the request is lost either way.
_ABORT_S = 10.0


class Account(Protocol):
    """Where a play gets its tokens from."""

    async def reserve(self, want: int) -> int:
        """Grants up to `want` tokens; 0 means that the budget is spent."""

    def settle(self, granted: int, used: int) -> None:
        """Returns what was granted and not used. Exactly one call for each grant."""


class TokenAccount:
    """A `TokenBudget` that plays in flight share, first come, first served.

    A request that cannot have all it wants waits while others still hold grants, because most
    requests stop long before their cap and hand tokens back. It gets less than it wants only
    when nobody is left to wait for. Those behind it wait with it, small requests included, so
    that the order of requests alone decides.

    Args:
      total: tokens that may be generated; never passed, not by one.
      on_waiting: told how many requests wait, whenever that may have changed.
    """

    def __init__(self, total: int, on_waiting: Callable[[int], None] | None = None):
        self._budget = TokenBudget(total)
        self._on_waiting = on_waiting
        self._waiting: collections.deque[tuple[int, asyncio.Future[int]]] = collections.deque()

    @property
    def budget(self) -> TokenBudget:
        """The books as they stand."""
        return self._budget

    async def reserve(self, want: int) -> int:
        """Waits for a grant.

        Args:
          want: tokens the request may generate at most, >= 1.

        Returns:
          `want`, or what is left when nothing else is in flight, which may be 0.

        Raises:
          ValueError: `want` is not positive.
        """
        if want < 1:
            raise ValueError(f"a request must want at least 1 token, got {want}")
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((want, future))
        self._grant()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.settle(future.result(), 0)
            raise

    def settle(self, granted: int, used: int) -> None:
        """Books what a request has used and serves those who wait.

        Raises:
          BudgetExceeded: the engine generated more than it was asked for.
        """
        self._budget = self._budget.settle(granted, used)
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            want, future = self._waiting[0]
            if not future.cancelled():
                if self._budget.available < want and self._budget.reserved > 0:
                    break
                granted, self._budget = self._budget.reserve(want)
                future.set_result(granted)
            self._waiting.popleft()
        if self._on_waiting is not None:
            self._on_waiting(len(self._waiting))


class UnlimitedAccount:
    """Grants everything and counts; for evaluation, which no budget pays for."""

    def __init__(self):
        self.spent = 0

    async def reserve(self, want: int) -> int:
        """Grants `want`."""
        return want

    def settle(self, granted: int, used: int) -> None:
        """Adds `used` to what was spent."""
        del granted
        self.spent += used


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """What to do when an engine fails.

    Attributes:
      attempts: tries of one request before its trajectory counts as failed.
      backoff_s: seconds before the second try; doubled before each further one.
      timeout_s: seconds after which a request counts as failed.
    """

    attempts: int = 3
    backoff_s: float = 1.0
    timeout_s: float = 600.0

    def __post_init__(self):
        if self.attempts < 1:
            raise ValueError(f"rollout.attempts must be >= 1, got {self.attempts}")
        if self.backoff_s < 0:
            raise ValueError(f"rollout.backoff_s must be >= 0, got {self.backoff_s}")
        if not self.timeout_s > 0:
            raise ValueError(f"rollout.timeout_s must be > 0, got {self.timeout_s}")


class Retries(Protocol):
    """How often and at which distance something is tried."""

    @property
    def attempts(self) -> int:
        """Tries in all."""

    @property
    def backoff_s(self) -> float:
        """Seconds before the second try; doubled before each further one."""


class Patience:
    """How long a step waits for rollouts whose engine or tool has failed.

    Only those: a rollout that is long is waited for in any case, or short ones would be trained
    on more often than they are played.

    Args:
      fraction: once this share of the rollouts has ended well, or could go on if only it had the
        tokens that others hold, requests that have failed are not tried again; None: every
        request has all its attempts.
    """

    def __init__(self, fraction: float | None = None):
        if fraction is not None and not 0 < fraction <= 1:
            raise ValueError(f"rollout.proceed_fraction must be in (0, 1], got {fraction}")
        self._fraction = fraction
        self._launched = 0
        self._well = 0
        self._waiting = 0
        self._over = asyncio.Event()
        self._scopes: set[asyncio.Timeout] = set()

    @property
    def over(self) -> bool:
        """Whether the step goes on without what has failed."""
        return self._over.is_set()

    def launched(self, count: int) -> None:
        """Counts rollouts that the step wants."""
        self._launched += count

    def waiting(self, count: int) -> None:
        """Notes how many rollouts wait for tokens: what has failed may be holding them."""
        self._waiting = count
        self._look()

    def ended(self, trajectory: Trajectory) -> None:
        """Counts a rollout that ended; a technical failure has not ended well."""
        self._well += trajectory.end != "failed"
        self._look()

    def _look(self) -> None:
        well = self._well + self._waiting
        if self._fraction is None or not well or well < self._fraction * self._launched:
            return
        self._over.set()
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    async def another(self, tries: int, policy: Retries) -> bool:
        """Whether there is one more try after `tries` that failed; pauses before it says so."""
        if tries >= policy.attempts:
            return False
        await self.pause(policy.backoff_s * 2 ** (tries - 1))
        return not self.over

    async def pause(self, seconds: float) -> None:
        """Sleeps, but not beyond the end of patience."""
        if self._fraction is None:
            return await asyncio.sleep(seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()

    @contextlib.asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """`asyncio.timeout` that also ends with the patience."""
        async with asyncio.timeout(0 if self.over else seconds) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)


async def generate_with_retries(
    engine: Engine,
    request: GenerateRequest,
    policy: RetryPolicy,
    patience: Patience | None = None,
) -> GenerateResult:
    """Sends a request until it is answered, the same seed every time.

    Args:
      engine: where to.
      request: its `rid` gets a suffix from the second try on, since the first may still run.
      policy: how often and how long.
      patience: whether the step still waits for a request that has failed once.

    Returns:
      The first answer.

    Raises:
      EngineError: every attempt failed or timed out, the step goes on without it, or it cannot be
        served as it is; that would be so again.
      FleetDead: no engine is left; trying again is no use.
    """
    patience = patience or Patience()
    attempts = 0
    while not attempts or await patience.another(attempts, policy):
        rid = request.rid if attempts == 0 else f"{request.rid}~{attempts}"
        # What has not failed yet has all the time there is.
        limit = patience.limit if attempts else asyncio.timeout
        attempts += 1
        try:
            # No task of its own: an engine that batches sees all requests of a moment at once.
            async with limit(policy.timeout_s):
                return await engine.generate(dataclasses.replace(request, rid=rid))
        except TimeoutError:
            # The slot must not go on burning for an answer that nobody waits for.
            await _abort_quietly(engine, rid, min(policy.timeout_s, _ABORT_S))
            error = EngineError(f"no answer within {policy.timeout_s} s")
        except FleetDead:
            raise
        except EngineError as failure:
            error = failure
        except ValueError as refusal:
            raise EngineError(f"request {rid} cannot be served: {refusal}") from refusal
    raise EngineError(f"request {request.rid} failed {attempts} times, at last: {error}") from error


async def _abort_quietly(engine: Engine, rid: str, timeout_s: float) -> None:
    """Aborts; a server that just timed out may well not answer this either."""
    try:
        async with asyncio.timeout(timeout_s):
            await engine.abort(rid)
    except (TimeoutError, EngineError):
        pass


class Slots:
    """Places for plays, shared by the steps in flight: the oldest step is served first.

    Args:
      size: most plays that run at once.
    """

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"rollout.concurrency must be >= 1, got {size}")
        self._free = size
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @contextlib.asynccontextmanager
    async def held(self, step: int = 0) -> AsyncIterator[None]:
        """Waits for a place, within a step first come, first served."""
        await self._take(step)
        try:
            yield
        finally:
            self._release()

    async def _take(self, step: int) -> None:
        if self._free:
            self._free -= 1
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (step, next(self._arrivals), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            *_, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                return
        self._free += 1


class Pool:
    """Runs plays, so many at once; results come in the order of submission.

    `on_finished` may submit more.

    Args:
      slots: where plays find a place; or how many run at once.
      on_finished: called with each trajectory as it ends, in order of ending.
      step: that the plays belong to, for `slots`.
    """

    def __init__(
        self,
        slots: Slots | int,
        on_finished: Callable[[Trajectory], None] | None = None,
        *,
        step: int = 0,
    ):
        self._slots = Slots(slots) if isinstance(slots, int) else slots
        self._on_finished = on_finished
        self._step = step
        self._tasks: list[asyncio.Task[Trajectory]] = []

    def submit(self, play: Callable[[], Awaitable[Trajectory]]) -> None:
        """Queues a play; `play()` is called when a slot is free."""
        self._tasks.append(asyncio.get_running_loop().create_task(self._run(play)))

    async def join(self) -> list[Trajectory]:
        """Waits for all plays, those that are submitted meanwhile included.

        Returns:
          Their trajectories, in order of submission.

        Raises:
          Exception: what the first play to fail unexpectedly raised; the others are cancelled.
            (A technical failure of engine or tool is no exception here: it ends its trajectory.)
        """
        try:
            while pending := [task for task in self._tasks if not task.done()]:
                await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
                if any(task.done() and task.exception() for task in pending):
                    break
            return [task.result() for task in self._tasks if task.done()]
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, play: Callable[[], Awaitable[Trajectory]]) -> Trajectory:
        async with self._slots.held(self._step):
            trajectory = await play()
        if self._on_finished is not None:
            self._on_finished(trajectory)
        return trajectory
