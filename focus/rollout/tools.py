"""How an environment is called: a slow tool stops no other rollout, and a broken one no step.

`Environment.step` and `reset` are tools in the widest sense: they search, run code, ask a server.
An environment says how it wants to be called:

  * by default on the event loop, at once. That is for pure functions in this process: a hop to a
    thread and back costs more than many of them, and what an engine batches then depends on the
    order of requests alone, never on the clock;
  * `blocking = True`: in threads, so many at once, each with a timeout. For whatever waits;
  * a coroutine (`async def step`): on the event loop, so many at once, each with a timeout.

A call that raises, does not answer in time or answers with what is no answer is tried again, the
same action from the same state. If it fails for good, that is a technical failure of its rollout
and never a reward of 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import inspect
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from focus.rollout.pool import Patience, Slots
from focus.tasks.base import StepResult

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

# Calls on the event loop that take longer hold up all rollouts; said when there were so many.
_SLOW_S, _SLOW_CALLS = 0.05, 8


class ToolError(RuntimeError):
    """A call of an environment that failed for good. The message says whose and why."""


@dataclasses.dataclass(frozen=True)
class ToolLimits:
    """What calls of an environment may take.

    Attributes:
      attempts: tries of one call before its rollout counts as failed.
      backoff_s: seconds before the second try; doubled before each further one.
      timeout_s: seconds after which a try counts as failed. It cannot end a call that holds the
        event loop.
      at_once: most calls that wait at a time; others queue up.
    """

    attempts: int = 3
    backoff_s: float = 1.0
    timeout_s: float = 60.0
    at_once: int = 64

    def __post_init__(self):
        for name in ("attempts", "at_once"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.tools.{name} must be >= 1, got {getattr(self, name)}")
        if not self.backoff_s >= 0:
            raise ValueError(f"rollout.tools.backoff_s must be >= 0, got {self.backoff_s}")
        if not self.timeout_s > 0:
            raise ValueError(f"rollout.tools.timeout_s must be > 0, got {self.timeout_s}")


@dataclasses.dataclass
class ToolUse:
    """What the tools of a step's rollouts have cost so far.

    Attributes:
      calls: tries, good or bad.
      faults: tries that failed.
      seconds: wall seconds in which rollouts waited for tools and for nothing else; time in which
        others were sampled for meanwhile is not lost. A call on the event loop stops everything.
    """

    calls: int = 0
    faults: int = 0
    seconds: float = 0.0
    _calling: int = 0
    _sampling: int = 0
    _since: float = 0.0

    @contextlib.contextmanager
    def calling(self):
        """Around a call that others go on beside."""
        self._change(calling=1)
        try:
            yield
        finally:
            self._change(calling=-1)

    @contextlib.contextmanager
    def sampling(self):
        """Around a request to the engine."""
        self._change(sampling=1)
        try:
            yield
        finally:
            self._change(sampling=-1)

    def held_loop(self, start: float, end: float) -> None:
        """Adds a call that nothing went on beside."""
        self._change(now=start)
        self.seconds += end - start
        self._since = end

    def _change(self, calling: int = 0, sampling: int = 0, now: float | None = None) -> None:
        now = time.perf_counter() if now is None else now
        if self._calling and not self._sampling:
            self.seconds += now - self._since
        self._since = now
        self._calling += calling
        self._sampling += sampling


class Tools:
    """Calls environments for all rollouts of a run.

    Args:
      limits: of all calls together.
    """

    def __init__(self, limits: ToolLimits | None = None):
        self.limits = ToolLimits() if limits is None else limits
        self._slots = Slots(self.limits.at_once)
        self._threads: list[threading.Thread] = []
        self._slow_calls = 0

    async def step(
        self, env: Any, state: Any, action: str, *, of: str, patience: Patience, use: ToolUse
    ) -> StepResult:
        """`env.step(state, action)`.

        Args:
          env: the environment.
          state: before the action.
          action: what the policy wrote.
          of: whose call it is, for messages.
          patience: of the step that is played.
          use: what it costs is added here.

        Raises:
          ToolError: it failed for good.
        """
        what = f"{of}: {env.name}.step({_short(action)})"
        return await self._call(what, env, "step", (state, action), _check_step, patience, use)

    async def reset(self, env: Any, task: Any, *, of: str, patience: Patience, use: ToolUse) -> Any:
        """`env.reset(task)`; arguments and errors as those of `step`."""
        what = f"{of}: {env.name}.reset({task.id})"
        return await self._call(what, env, "reset", (task,), None, patience, use)

    async def _call(
        self,
        what: str,
        env: Any,
        method: str,
        arguments: tuple,
        check: Callable[[Any], None] | None,
        patience: Patience,
        use: ToolUse,
    ) -> Any:
        """Calls until there is an answer."""
        function, blocking = getattr(env, method), getattr(env, "blocking", False)
        tries, error = 0, None
        while not tries or await patience.another(tries, self.limits):
            # What has not failed yet has all the time there is.
            limit = patience.limit if tries else asyncio.timeout
            tries += 1
            use.calls += 1
            try:
                if blocking:
                    answer = await self._wait(self._in_thread, function, arguments, limit, use)
                else:
                    answer = self._on_loop(env, function, arguments, use)
                if inspect.isawaitable(answer):
                    answer = await self._wait(_awaited, answer, (), limit, use)
                if check is not None:
                    check(answer)
                return answer
            except Exception as failure:  # a tool is a program of somebody else
                use.faults += 1
                error = failure
        raise ToolError(f"{what} failed {tries} times, at last: {_said(error)}") from error

    def _on_loop(self, env: Any, function: Callable, arguments: tuple, use: ToolUse) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            end = time.perf_counter()
            use.held_loop(start, end)
            if end - start > _SLOW_S:
                self._slow_calls += 1
                if self._slow_calls == _SLOW_CALLS:
                    _LOG.warning(
                        "environment %r holds up all rollouts for %.0f ms a call; set its "
                        "attribute blocking = True, and it is called in threads",
                        env.name,
                        1e3 * (end - start),
                    )

    async def _wait(
        self, start: Callable, function: Any, arguments: tuple, limit: Callable, use: ToolUse
    ) -> Any:
        """Waits for a call that others go on beside, as soon as there is a place for it."""
        try:
            async with self._slots.held():
                with use.calling():
                    async with limit(self.limits.timeout_s):
                        return await start(function, *arguments)
        except TimeoutError as error:
            if error.args:  # the tool's own
                raise
            raise TimeoutError(f"no answer within {self.limits.timeout_s:g} s") from error
        finally:
            if inspect.iscoroutine(function):
                function.close()  # one that never got its place

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls in a thread of its own; a call that nobody waits for any more goes on in it.

        Not in a pool of `concurrent.futures`: Python waits for its threads before it ends, and a
        tool that hangs would hang the run's end.
        """
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= 2 * self.limits.at_once:
            raise RuntimeError(
                f"{len(self._threads)} calls run in threads, of which at most "
                f"{self.limits.at_once} are waited for: those that ran out of time never end; "
                "give them a timeout of their own"
            )
        loop = asyncio.get_running_loop()
        future, context = loop.create_future(), contextvars.copy_context()

        def run() -> None:
            answer, error = None, None
            try:
                answer = context.run(function, *arguments)
            except StopIteration as failure:  # which no future can hold
                error = RuntimeError(repr(failure))
            except Exception as failure:
                error = failure
            except BaseException as failure:  # SystemExit ends a thread and not the run
                error = RuntimeError(repr(failure))
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(_hand_over, future, answer, error)

        thread = threading.Thread(target=run, name="focus-tool", daemon=True)
        self._threads.append(thread)
        thread.start()
        return await future


def _hand_over(future: asyncio.Future, answer: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)


async def _awaited(answer: Any) -> Any:
    return await answer


def _check_step(answer: Any) -> None:
    """Refuses what would only be noticed far from its cause."""
    if not isinstance(answer, StepResult):
        raise TypeError(f"a StepResult was due, not {type(answer).__name__}")
    if not isinstance(answer.observation, str):
        raise TypeError(f"observation must be text, not {type(answer.observation).__name__}")
    outcome = 0.0 if answer.outcome is None else answer.outcome
    if not (math.isfinite(answer.reward) and math.isfinite(outcome)):
        raise ValueError(
            f"reward {answer.reward} and outcome {answer.outcome} must be finite numbers"
        )


def _said(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else repr(error)


def _short(text: str, most: int = 80) -> str:
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[:most]}..."
