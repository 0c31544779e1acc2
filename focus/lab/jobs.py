"""Jobs in this process, or in several with cores of their own.

Imports no JAX: a worker is given its cores before the backend counts them.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

# Takes the share of a job that is done, in [0, 1], and a few words about it.
Note = Callable[[float, str], None]
# Can be pickled where there are several workers, and keeps its results itself.
Job = Callable[[Note], None]

_POLL_S = 0.1
_notes: Any = None  # the queue of a worker


def num_workers(wanted: int, jobs: int) -> int:
    """Processes that `run_jobs` is worth: no more than jobs or cores.

    Args:
      wanted: 0 means one for each core that this process may use.
      jobs: that are left.

    Raises:
      ValueError: a negative number.
    """
    if wanted < 0:
        raise ValueError(f"workers must be >= 0 (0: one a core), got {wanted}")
    return max(1, min(wanted or len(cores()), jobs))


def cores() -> list[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int = 1,
    notify: Callable[[int, float, str], None],
    setup: Callable[[], None] | None = None,
) -> None:
    """Runs all jobs, in their order as far as there are workers.

    Args:
      jobs: see `Job`.
      workers: processes; with 1 they run here, one after the other.
      notify: takes a job's index and what it noted; called in this process.
      setup: called once in each worker, not in this process; can be pickled.

    Raises:
      RuntimeError: a worker was killed.
      Exception: of the first job that failed; the others are stopped.
    """
    if workers == 1:
        for index, job in enumerate(jobs):
            job(lambda share, text, index=index: notify(index, share, text))
            notify(index, 1.0, "")
        return
    context = multiprocessing.get_context("spawn")
    # Written before a job is done: what it notes comes before its end.
    notes, places = context.SimpleQueue(), context.SimpleQueue()
    mine = cores()
    for place in range(workers):
        # As many cores for each as there are; where there are too few, all share all.
        places.put(mine[place::workers] if len(mine) >= workers else mine)
    before = set(multiprocessing.active_children())
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start, (notes, places, setup))
    try:
        futures = {pool.submit(_run, index, job) for index, job in enumerate(jobs)}
        while futures:
            done, futures = concurrent.futures.wait(
                futures, _POLL_S, concurrent.futures.FIRST_COMPLETED
            )
            _drain(notes, notify)
            for future in done:
                notify(future.result(), 1.0, "")
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker was killed, perhaps for memory: what is finished is kept, and the same "
            "command goes on; take smaller chunks or fewer workers"
        ) from error
    except BaseException:
        # Those that run would be waited for, minutes perhaps; what they finished is kept.
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _drain(notes: Any, notify: Callable[[int, float, str], None]) -> None:
    while not notes.empty():
        notify(*notes.get())


def _start(notes: Any, places: Any, setup: Callable[[], None] | None) -> None:
    global _notes
    _notes = notes
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, places.get())
    if setup is not None:
        setup()


def _run(index: int, job: Job) -> int:
    job(lambda share, text: _notes.put((index, share, text)))
    return index
