"""Many plays at once: a shared token account, retries, and a bounded pool in a fixed order.

Nothing here decides by the clock: with a deterministic engine, who is granted what and in which
order results come back is the same in every run. Only a timeout, which is a failure, looks at
the time.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Protocol

from focus.branching.budget import TokenBudget
from focus.rollout.engine import Engine, EngineError, FleetDead, GenerateRequest, GenerateResult
from focus.types import Trajectory


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
    """

    def __init__(self, total: int):
        self._budget = TokenBudget(total)
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
                    return
                granted, self._budget = self._budget.reserve(want)
                future.set_result(granted)
            self._waiting.popleft()


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


async def generate_with_retries(
    engine: Engine, request: GenerateRequest, policy: RetryPolicy
) -> GenerateResult:
    """Sends a request until it is answered, the same seed every time.

    Args:
      engine: where to.
      request: its `rid` gets a suffix from the second try on, since the first may still run.
      policy: how often and how long.

    Returns:
      The first answer.

    Raises:
      FleetDead: there is nobody left to ask.
      EngineError: every attempt failed or timed out.
    """
    for attempt in range(policy.attempts):
        if attempt:
            await asyncio.sleep(policy.backoff_s * 2 ** (attempt - 1))
        rid = request.rid if attempt == 0 else f"{request.rid}~{attempt}"
        try:
            # No task of its own: an engine that batches sees all requests of a moment at once.
            async with asyncio.timeout(policy.timeout_s):
                return await engine.generate(dataclasses.replace(request, rid=rid))
        except TimeoutError:
            # The slot must not go on burning for an answer that nobody waits for.
            await _abort_quietly(engine, rid, policy.timeout_s)
            error = EngineError(f"no answer within {policy.timeout_s} s")
        except FleetDead:
            raise
        except EngineError as failure:
            error = failure
    raise EngineError(
        f"request {request.rid} failed {policy.attempts} times, at last: {error}"
    ) from error


async def _abort_quietly(engine: Engine, rid: str, timeout_s: float) -> None:
    """Aborts; a server that just timed out may well not answer this either."""
    try:
        async with asyncio.timeout(timeout_s):
            await engine.abort(rid)
    except (TimeoutError, EngineError):
        pass


class Pool:
    """Runs plays, at most `concurrency` at once; results come in the order of submission.

    `on_finished` may submit more.

    Args:
      concurrency: most plays that run at once.
      on_finished: called with each trajectory as it ends, in order of ending.
    """

    def __init__(self, concurrency: int, on_finished: Callable[[Trajectory], None] | None = None):
        if concurrency < 1:
            raise ValueError(f"rollout.concurrency must be >= 1, got {concurrency}")
        self._slots = asyncio.Semaphore(concurrency)
        self._on_finished = on_finished
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
            (An engine's technical failure is no exception here: it ends its trajectory.)
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
        async with self._slots:
            trajectory = await play()
        if self._on_finished is not None:
            self._on_finished(trajectory)
        return trajectory
