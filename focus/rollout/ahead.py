"""Base rollouts of the next steps, played while the learner works.

The rollouts of step s start at the earliest when the weights after s - depth steps are sampled
from, so no token is ever more than `depth` steps older than the weights that it trains. Depth 0
is the strict loop: rollouts, then learning, nothing at the same time.

A step is made of the groups that were launched for it, and of all of them. What is finished first
is not trained first: short episodes would crowd out long ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from focus.rollout.controller import BaseRollouts

PlayBase = Callable[[int], Awaitable[BaseRollouts]]


class RolloutsAhead:
    """Starts base rollouts in time and hands them out step by step.

    What is in flight at the end of an `async with` block is cancelled.

    Args:
      play: plays the base rollouts of a step.
      depth: most steps whose base rollouts are under way while the learner works.
      end: one behind the last step of the run; no rollout is started that would not be trained on.
    """

    def __init__(self, play: PlayBase, *, depth: int, end: int):
        if depth < 0:
            raise ValueError(f"rollout.async_depth must be >= 0, got {depth}")
        self._play = play
        self._depth = depth
        self._end = end
        self._tasks: dict[int, asyncio.Task[BaseRollouts]] = {}

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Steps whose base rollouts were started and not taken."""
        return tuple(sorted(self._tasks))

    def learn(self, step: int) -> None:
        """Says that the learner begins with the rollouts of `step`: those of later ones may start.

        Their weights are at least those before `step`, which are not more than `depth` behind
        those that the last of them will train.
        """
        for later in range(step + 1, min(step + self._depth + 1, self._end)):
            if later not in self._tasks:
                self._tasks[later] = asyncio.create_task(self._play(later))

    async def take(self, step: int) -> tuple[BaseRollouts, float]:
        """The base rollouts of a step, played now if they were not started.

        Returns:
          The rollouts, and the seconds that were waited for them.

        Raises:
          Exception: what playing them raised.
        """
        start = time.perf_counter()
        task = self._tasks.pop(step, None)
        rollouts = await (self._play(step) if task is None else task)
        return rollouts, time.perf_counter() - start

    async def close(self) -> None:
        """Cancels what is in flight."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def __aenter__(self) -> RolloutsAhead:
        return self

    async def __aexit__(self, *unused) -> None:
        await self.close()
