"""Which task is played next, when several steps draw tasks at the same time."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from focus.learner import hosts
from focus.tasks.base import Task


class TaskOrder:
    """Deals tasks to steps; every epoch is a permutation of its own, fixed by the seed.

    Places count through all epochs. Process p of P draws every P-th, from p on. A step owns what
    it has drawn until it is settled: what steps in flight own goes into a checkpoint and is drawn
    first by a run that resumes, so that no task is left out.

    Args:
      tasks: those of an epoch.
      seed: of the permutations.
      cursor: first place that was never drawn.
      owed: places before it whose tasks have to be played again.
    """

    def __init__(
        self, tasks: Sequence[Task], seed: int, *, cursor: int = 0, owed: Sequence[int] = ()
    ):
        self._tasks = tasks
        self._seed = seed
        self._first = cursor
        self._owed = collections.deque(hosts.deal(sorted(owed)))
        self._of_step: dict[int, list[int]] = {}
        self._settled = 0
        self.drawn = 0  # of this process, owed ones not counted

    def at(self, place: int) -> Task:
        """The task at a place."""
        epoch, index = divmod(place, len(self._tasks))
        return self._tasks[_permutation(self._seed, epoch, len(self._tasks))[index]]

    def draw(self, step: int) -> Iterator[Task]:
        """This process's next tasks, without end; each is drawn when it is asked for.

        Args:
          step: that plays them.
        """
        places = self._of_step.setdefault(step, [])
        while True:
            if self._owed:
                place = self._owed.popleft()
            else:
                place = self._first + self.drawn * hosts.count() + hosts.index()
                self.drawn += 1
            places.append(place)
            yield self.at(place)

    def settle(self, step: int, drawn: int) -> None:
        """Ends a step: its tasks are played.

        Args:
          step: which.
          drawn: the largest number that a process has drawn. A slower one goes on behind the same
            place as the others: what it had no time for in this epoch, it leaves out.
        """
        del self._of_step[step]
        self.drawn = max(self.drawn, drawn)
        self._settled = max(self._settled, drawn)

    @property
    def cursor(self) -> int:
        """First place that, as far as all processes know, was never drawn."""
        return self._first + self._settled * hosts.count()

    @property
    def owed(self) -> list[int]:
        """Places before the cursor that this process has not settled."""
        places = [*self._owed, *(place for drawn in self._of_step.values() for place in drawn)]
        return sorted(place for place in places if place < self.cursor)


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)
