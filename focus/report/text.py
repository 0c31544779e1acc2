"""An episode as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from focus.report.earned import earned_changes, turning_point
from focus.report.trees import GLYPHS, verdict


def episode_lines(
    task: Mapping[str, Any], trajectory: Mapping[str, Any], *, width: int = 88
) -> Iterator[str]:
    """Question, turns with the value before each, and the end.

    What a model or a tool has printed cannot move the cursor: control characters are shown.

    Args:
      task: see `focus.report.record.task_record`.
      trajectory: one of its `trajectories`.
      width: columns that texts are wrapped to.
    """
    gold = "" if task["gold"] is None else f", gold answer {plain(task['gold'])}"
    yield from _wrapped(plain(task["question"]), width, "")
    yield from _wrapped(f"task {plain(task['task_id'])}{gold}", width, "")
    changes = earned_changes(trajectory)
    turning = turning_point(changes)
    for index, segment in enumerate(trajectory["segments"]):
        state, change = trajectory["states"][index], changes[index]
        facts = [f"turn {state['turn']}", *_value(state)]
        if change is not None:
            facts.append(
                f"{change:+.2f} over this turn{', the largest' if index == turning else ''}"
            )
        if segment.get("error"):
            facts.append(f"error: {plain(segment['error'])}")
        yield ""
        yield from _wrapped("  ".join(facts), width, "")
        yield from _wrapped(plain(segment["text"]), width, "  > ")
        yield from _wrapped(plain(segment["observation"]), width, "    ")
        if segment["summary"] is not None:
            yield from _wrapped(f"summary: {plain(segment['summary'])}", width, "  = ")
    kind = verdict(trajectory)
    outcome = trajectory["outcome"]
    outcome = "no outcome" if outcome is None else f"outcome {outcome:g}"
    yield ""
    ended = "technical failure" if kind == "error" else kind
    text = f"{GLYPHS[kind]} {ended}, {outcome}, {trajectory['tokens']:,} tokens"
    yield from _wrapped(f"{text}; ended by: {trajectory['end'].replace('_', ' ')}", width, "")
    if trajectory["error"]:
        yield from _wrapped(plain(trajectory["error"]), width, "  ")


def plain(text: str) -> str:
    """Text whose control characters, but for line breaks, are shown instead of obeyed."""
    return "".join(
        c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode()
        for c in text.replace("\r\n", "\n").replace("\t", "    ")
    )


def _value(state: Mapping[str, Any]) -> list[str]:
    if state["value"] is None:
        return []
    text = f"V {state['value']:.2f}"
    if state["std"] is not None:
        text += f" ± {state['std']:.2f}"
    if state["refined"] is not None and f"{state['refined']:.2f}" != f"{state['value']:.2f}":
        text += f" -> V* {state['refined']:.2f}"
    return [text]


def _wrapped(text: str, width: int, prefix: str) -> Iterator[str]:
    for line in text.split("\n") if text else ():
        pieces = textwrap.wrap(line, width - len(prefix), replace_whitespace=False) or [""]
        for piece in pieces:
            yield f"{prefix}{piece}".rstrip()
            prefix = " " * len(prefix)
