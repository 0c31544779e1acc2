"""What people see of a command: what it does before its first step, and for how long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.progress


class Start:
    """Says what a process is at until it is under way.

    On a terminal one line moves: the part, how long it has lasted, how far it is. Elsewhere each
    part is a line when it begins. `finish` sums them up in one line that stays.

    Args:
      console: where to print; standard error if None.
      quiet: prints nothing, as in all processes of a run but the first.
      clock: seconds.
    """

    def __init__(
        self,
        *,
        console: rich.console.Console | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console = console or rich.console.Console(stderr=True)
        self._clock = clock
        self._live: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._part = ""
        self.quiet = quiet
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A block that is one part of the start; parts of equal name are summed up together."""
        began = self._clock()
        try:
            self._show(name)
            yield
        except BaseException:
            self.close()
            raise
        self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - began

    def update(self, detail: str, *, milestone: bool = False) -> None:
        """Says how far the part is; where nothing can be redrawn, milestones alone are lines."""
        if self._live is not None:
            self._live.update(self._task, detail=detail)
        elif milestone:
            self.say(f"{self._part} {detail}")

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        if not self.quiet:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def finish(self) -> None:
        """Ends the display and says what took how long."""
        self.close()
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        self.say(f"ready after {sum(self.seconds.values()):.1f} s: {parts}")

    def close(self) -> None:
        """Ends the display."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, name: str) -> None:
        repeated, self._part = name == self._part, name
        if self.quiet:
            self.close()
        elif not self._console.is_terminal:
            if not repeated:
                self.say(f"{name} ...")
        elif self._live is None:
            self._live = rich.progress.Progress(
                rich.progress.SpinnerColumn(),
                rich.progress.TextColumn("{task.description}"),
                rich.progress.TimeElapsedColumn(),
                rich.progress.TextColumn("{task.fields[detail]}"),
                console=self._console,
                transient=True,
            )
            self._task = self._live.add_task(name, total=None, detail="")
            self._live.start()
        elif not repeated:
            self._live.reset(self._task, description=name, detail="")
