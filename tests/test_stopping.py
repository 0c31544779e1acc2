"""Signals that end a run: what is given up, what is waited for, and what the second one does."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import tiny
from conftest import REPOSITORY

from focus.learner.checkpoint import Checkpointer
from focus.metrics import read_metrics
from focus.run import stopping
from focus.run.stopping import Stopped, StopRequested, unless_asked
from focus.train import train


def handlers():
    return [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_before_the_first_step_a_signal_ends_a_run_where_it_is(signum):
    before = handlers()
    with pytest.raises(Stopped, match="stopped before the first step") as stopped:
        with stopping.listen():
            signal.raise_signal(signum)
    assert stopped.value.signum == signum
    assert handlers() == before


def after_a_signal(work, *, signum=signal.SIGTERM, begun=True):
    """What becomes of work when a signal comes while, or before, it is waited for."""

    async def main():
        signals.defer()
        if not begun:
            signal.raise_signal(signum)
            await asyncio.sleep(0)
        else:
            asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signum)
        return await unless_asked(work())

    with stopping.listen() as signals:
        return asyncio.run(main())


def test_work_in_progress_is_given_up_and_cleans_up(capfd):
    cleaned = []

    async def forever():
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    with pytest.raises(StopRequested) as request:
        after_a_signal(forever)
    assert request.value.signum == signal.SIGTERM and cleaned == [True]
    assert capfd.readouterr().err.count("stopping, and saving what is done") == 1


def test_work_that_has_not_begun_does_not_begin():
    begun = []

    async def work():
        begun.append(True)
        await asyncio.sleep(60)

    with pytest.raises(StopRequested):
        after_a_signal(work, begun=False)
    assert not begun


def test_work_that_is_done_is_kept_and_its_errors_are_its_own():
    async def done():
        return 7

    async def wrong():
        raise ValueError("wrong")

    async def main(work):
        signals.defer()
        return await unless_asked(work())

    with stopping.listen() as signals:
        assert asyncio.run(main(done)) == 7
    with stopping.listen() as signals, pytest.raises(ValueError, match="wrong"):
        asyncio.run(main(wrong))
    assert asyncio.run(unless_asked(done())) == 7  # without anybody who listens


def test_outside_of_the_main_thread_signals_are_left_alone():
    before, seen = handlers(), []

    def elsewhere():
        with stopping.listen():
            seen.append(handlers())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


_STUBBORN = """
import asyncio, signal, sys, time
from focus.run import stopping
async def main():
    signals.defer()
    signal.raise_signal(signal.SIGINT)
    await asyncio.sleep(0)
    await asyncio.to_thread(print, "learning", flush=True)
    signal.raise_signal(int(sys.argv[1]))
    await asyncio.to_thread(time.sleep, 60)
with stopping.listen() as signals:
    asyncio.run(main())
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(signum):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _STUBBORN, str(int(signum))],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (-signum, "learning\n")
    assert time.monotonic() - began < 30


def test_a_run_that_is_stopped_is_saved_where_it_stands_and_goes_on(finished, tmp_path):
    """No checkpoint is due: what is there afterwards, the signal has saved."""
    straight = finished("focus", steps=6)
    config = tiny.get_config("focus")
    config.steps, config.checkpoint.every = 6, 100

    def when_two_steps_are_done():
        while len(read_metrics(tmp_path)) < 2:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=when_two_steps_are_done, daemon=True).start()
    with pytest.raises(Stopped, match=rf"stopped after step \d of 6, saved in {tmp_path}"):
        train(config, tmp_path)
    stood = Checkpointer(tmp_path).latest_step
    assert 2 <= stood < 6 and len(read_metrics(tmp_path)) == stood
    summary = train(config, tmp_path)
    for name in ("success_after", "generated_tokens", "dose"):
        assert summary[name] == straight.summary[name]

    def numbers(workdir):  # but the evaluation that the signal may have cut off
        return [
            {k: v for k, v in r.items() if not k.startswith(("time/", "heldout/"))}
            for r in read_metrics(workdir)
        ]

    assert numbers(tmp_path) == numbers(straight.workdir)
