"""A run that is asked to end: SIGINT (Ctrl-C) and SIGTERM.

Before the first step there is nothing to save, and the first signal ends the run where it is.
Later it is noted: what can be played again is given up, an update that has begun is brought to its
end, the step that is done is saved, and then the run ends. A second signal ends it at once, as
`kill` would: the last checkpoint is whole at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal has ended the run; the message says where it stands.

    Attributes:
      signum: which.
    """

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.signum = signum


class StopRequested(Exception):
    """A signal asks for the end, and nothing stands in the way.

    Attributes:
      signum: which.
    """

    def __init__(self, signum: int):
        super().__init__(signum)
        self.signum = signum


class StopSignals:
    """The signals of a block, see `listen`.

    Attributes:
      asked: the first signal, None so far.
      where: what `Stopped` says of one that comes before `defer`.
    """

    def __init__(self):
        self.asked: int | None = None
        self.where = "stopped before the first step"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    def defer(self) -> None:
        """From here on, signals wait for `unless_asked`; called in the event loop."""
        self._loop = asyncio.get_running_loop()

    @property
    def deferred(self) -> bool:
        """Whether signals wait."""
        return self._loop is not None

    async def wait(self) -> None:
        """Returns when a signal has come."""
        await self._event.wait()

    def heard(self, signum: int, frame: FrameType | None) -> None:
        """The handler: runs in the main thread, between any two instructions."""
        del frame
        if self.asked is not None:
            _end_now(signum)
        self.asked = signum
        if self._loop is None:
            raise Stopped(self.where, signum)
        self._loop.call_soon_threadsafe(self._note)

    def _note(self) -> None:
        print("stopping, and saving what is done; once more ends it at once", file=sys.stderr)
        self._event.set()


_current: contextvars.ContextVar[StopSignals | None] = contextvars.ContextVar(
    "signals", default=None
)


@contextlib.contextmanager
def listen() -> Iterator[StopSignals]:
    """A block in which SIGINT and SIGTERM stop a run; outside of the main thread they do not."""
    signals = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {signum: signal.signal(signum, signals.heard) for signum in _SIGNALS}
    token = _current.set(signals)
    try:
        yield signals
    finally:
        _current.reset(token)
        for signum, handler in before.items():
            signal.signal(signum, handler)


async def unless_asked(work: Awaitable[T]) -> T:
    """Waits for work that can be given up.

    Raises:
      StopRequested: a signal has come first; the work is cancelled.
    """
    signals = _current.get()
    if signals is None or not signals.deferred:
        return await work
    asked = asyncio.ensure_future(signals.wait())
    await asyncio.sleep(0)  # a signal that came before is known now, and the work does not begin
    task = asyncio.ensure_future(work)
    try:
        if not asked.done():
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise StopRequested(signals.asked)
    finally:
        asked.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})  # whatever it still says, nobody waits for it


def _end_now(signum: int) -> None:
    """Ends the process by the signal itself, with the cursor back that a live line has hidden."""
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        sys.__stderr__.write("\x1b[?25h\n")
        sys.__stderr__.flush()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
