"""What the credit library holds, as text for a terminal: `python -m focus.credit [METHOD]`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from focus.credit import ESTIMATORS, EstimatorSpec
from focus.credit.channels import CHANNEL_PRODUCERS
from focus.learner.signals import available
from focus.metrics import METHODS
from focus.types import CreditBatch

_CORE = {f.name for f in dataclasses.fields(CreditBatch) if f.default is dataclasses.MISSING}
# Part of a run -> what configures it, and a method of configs/default.py that has it. The last
# method of the parts that an estimator wants has all of them.
_PARTS = {"critic": ("ppo", "a critic"), "branches": ("focus", "branches")}
_CITATIONS = ("self_credit", "citations")
_WIDE = 110  # columns from which the reference has room, too
_PIPED = 120


def _reads(spec: EstimatorSpec) -> tuple[str, ...]:
    """Channels that a method reads as it is, before any option is changed."""
    return (*spec.inputs, *spec.default_inputs)


def wants(spec: EstimatorSpec) -> tuple[str, ...] | None:
    """Parts of a run that an estimator reads; None if no run fills all that it reads."""
    left = [channel for channel in _reads(spec) if channel not in _CORE]
    for parts in ((), ("critic",), ("branches",), ("critic", "branches"), ("citations",)):
        if all(channel in available(parts) for channel in left):
            return parts if spec.kind == "estimator" else None
    return None


def trains(spec: EstimatorSpec) -> str:
    """Whether a run can train with a method, and with what; or what no run fills."""
    if spec.kind != "estimator":
        return f"no: a {spec.kind}, called by itself"
    if (parts := wants(spec)) is None:
        return f"no: reads {', '.join(_unfilled(spec))}"
    words = [dict(_PARTS, citations=_CITATIONS)[part][1] for part in parts]
    return "yes" + (f", with {' and '.join(words)}" if words else "")


def _unfilled(spec: EstimatorSpec) -> list[str]:
    filled = available(("critic", "branches", "citations"))
    return [channel for channel in _reads(spec) if channel not in _CORE and channel not in filled]


def table(width: int) -> list[str]:
    """One line per method, none longer than `width`."""
    head = ("method", "credit for", "known from", "trains", "reference")
    rows = [
        (name, spec.granularity, spec.evidence, trains(spec), spec.reference)
        for name, spec in ESTIMATORS.items()
    ]
    sizes = [max(len(row[i]) for row in (head, *rows)) for i in range(3)]
    left = width - sum(sizes) - 2 * len(sizes)
    # What a method wants comes first, and is cut last.
    sizes += [left, 0] if width < _WIDE else [left * 3 // 5 - 2, left - left * 3 // 5]
    lines = []
    for row in (head, *rows):
        cells = (_cut(cell, size).ljust(size) for cell, size in zip(row, sizes) if size)
        lines.append("  ".join(cells).rstrip())
    count = sum(wants(spec) is not None for spec in ESTIMATORS.values())
    foot = (
        f"{len(ESTIMATORS)} methods; {count} train as they are (credit.estimator), the others in "
        "a run that fills what they read. Options of one: python -m focus.credit METHOD"
    )
    return [*lines, "", *textwrap.wrap(foot, width)]


def details(name: str, width: int) -> list[str]:
    """What is known about one method, its options and their defaults, and how it is trained.

    Raises:
      ValueError: no such method.
    """
    if name not in ESTIMATORS:
        close = difflib.get_close_matches(name, ESTIMATORS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "python -m focus.credit has all"
        raise ValueError(f"no method {name!r}: {hint}")
    spec = ESTIMATORS[name]
    about = inspect.cleandoc(spec.fn.__doc__ or "").split("\n\nArgs:")[0].split("\n\n")
    facts = {
        "reference": spec.reference,
        "known from": {"code": "released code", "paper": "the paper's text"}.get(
            spec.evidence, "this project's reconstruction"
        ),
        "credit for": f"a {spec.granularity}",
        "reads": ", ".join(_reads(spec)),
        "costs": "nothing besides rollouts" if spec.cost == "none" else spec.cost,
        "trains": trains(spec),
    }
    if spec.min_group_size > 1:
        facts["rollouts"] = f"at least {spec.min_group_size} of a task (rollout.group_size)"
    if spec.kind == "estimator":
        facts |= {f"  {channel}": CHANNEL_PRODUCERS[channel] for channel in _unfilled(spec)}
    lines = [name, ""]
    for paragraph in about:
        if paragraph.startswith(" "):  # formulas, line by line
            for line in paragraph.splitlines():
                lines += textwrap.wrap(line, width, subsequent_indent=" " * 6)
        else:
            lines += textwrap.wrap(paragraph, width)
        lines.append("")
    for key, value in facts.items():
        lines += textwrap.wrap(
            value, width, initial_indent=f"{key:<12}", subsequent_indent=" " * 12
        )
    lines += ["", "options (credit.options) and their defaults" if spec.hparams else "no options"]
    lines += [f"  {key}={default!r}" for key, default in spec.hparams.items()]
    if (parts := wants(spec)) is not None:
        lines += ["", *_command(name, spec, parts)]
    return lines


def _command(name: str, spec: EstimatorSpec, parts: Sequence[str]) -> list[str]:
    """Of a run that trains with a method, one flag a line."""
    method = dict(_PARTS, citations=_CITATIONS)[parts[-1]][0] if parts else "grpo"
    method = name if name in METHODS else method
    flags = [f"--config configs/quickstart.py:{method}", f"--workdir runs/{name}"]
    if name != method:
        flags.append(f"--config.credit.estimator={name}")
    if method in ("focus", "ppo") and spec.min_group_size > 1:
        flags.append(f"--config.rollout.group_size={spec.min_group_size}")
    if spec.hparams and name != method:
        key, default = next(iter(spec.hparams.items()))
        flags.append(f"--config.credit.options={key}={default}")
    return [
        ("python scripts/train.py " if i == 0 else "  ")
        + flag
        + (" \\" if flag != flags[-1] else "")
        for i, flag in enumerate(flags)
    ]


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"


def main(arguments: Sequence[str]) -> int:
    """Prints the table, or one method; the exit status."""
    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        print("usage: python -m focus.credit [METHOD]")
        return 0 if arguments[0] in ("-h", "--help") else 2
    width = shutil.get_terminal_size((_PIPED, 24)).columns
    try:
        _write(details(arguments[0], width) if arguments else table(width))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _write(lines: Iterable[str]) -> None:
    """Prints to whoever reads; one who has read enough, as `head`, is no error."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
