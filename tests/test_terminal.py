"""What people see before the first step."""

import io
import re

import pytest
import rich.console

from focus.terminal import Start


def started(*, terminal, quiet=False, width=100):
    output, now = io.StringIO(), [0.0]
    console = rich.console.Console(file=output, force_terminal=terminal, width=width)
    start = Start(console=console, quiet=quiet, clock=lambda: now[0])
    with start.part("packages"):
        now[0] += 2.0
    with start.part("warm start"):
        start.update("1/2  loss 3.0")
        start.update("2/2  loss 2.0", milestone=True)
        now[0] += 10.0
    with start.part("compiling"):
        start.say("resuming at step 4")
        now[0] += 1.0
    with start.part("compiling"):
        now[0] += 0.5
    start.finish()
    return output.getvalue()


def test_without_a_terminal_each_part_is_a_line_when_it_begins():
    assert started(terminal=False).splitlines() == [
        "packages ...",
        "warm start ...",
        "warm start 2/2  loss 2.0",
        "compiling ...",
        "resuming at step 4",
        "ready after 13.5 s: packages 2.0 s, warm start 10.0 s, compiling 1.5 s",
    ]


def test_on_a_terminal_one_line_moves_and_goes():
    text = started(terminal=True)
    assert text.index("packages") < text.index("warm start") < text.index("compiling")
    assert "\x1b[2K" in text  # the live line is erased
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "\rresuming at step 4\n" in plain
    assert plain.rstrip().endswith("packages 2.0 s, warm start 10.0 s, compiling 1.5 s")


@pytest.mark.parametrize("terminal", [True, False])
def test_other_processes_say_nothing(terminal):
    assert started(terminal=terminal, quiet=True) == ""


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_the_line_is_gone_before_an_error_is_printed(error):
    output = io.StringIO()
    start = Start(console=rich.console.Console(file=output, force_terminal=True, width=80))
    with pytest.raises(type(error)):
        with start.part("tasks"):
            raise error
    written = output.getvalue()
    start.close()
    assert output.getvalue() == written and "\x1b[?25h" in written  # the cursor is back
