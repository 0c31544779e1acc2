"""Held-out episodes on the page: success by hops, how episodes ended, transcripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from focus.report.intervals import wilson_interval
from focus.report.svg import Chart, Plot, whole_ticks
from focus.report.transcripts import ENDINGS

Evaluations = Sequence[Mapping[str, Any]]

COLOURS = ("s1", "s2", "s3", "s4", "s5", "s8", "s9")


def success_by_hops(evaluations: Evaluations) -> Chart:
    """Success of each evaluation, by how many hops a task's answer is away."""
    title = "Held-out success by hops"
    hops = sorted({t["hops"] for e in evaluations for t in e["tasks"] if t["hops"] is not None})
    if not hops:
        return Chart(title, note="no evaluation recorded how many hops its tasks have.")
    steps = [e["step"] for e in evaluations]
    plot = Plot(
        (min(steps), max(steps)),
        (0, 1),
        "finished training steps",
        "success rate",
        x_ticks=whole_ticks(min(steps), max(steps)),
    )
    legend = []
    for css, count in zip(COLOURS, hops):
        points = []
        for evaluation in evaluations:
            scored = _scored(evaluation, count)
            if scored:
                points.append((evaluation["step"], _share(scored), len(scored)))
        label = f"{count} hop{'s' if count != 1 else ''}, {points[-1][2]} tasks"
        plot.line([x for x, *_ in points], [y for _, y, _ in points], css)
        for x, y, number in points:
            low, high = wilson_interval(y, number)
            plot.dot(x, y, css, f"step {x}, {label}: {y:.3f} [{low:.3f}, {high:.3f}]", radius=2.8)
        legend.append((css, "line", label))
    return plot.chart(title, legend, "Brackets under the mouse are 95 % intervals.")


def endings(evaluations: Evaluations) -> Chart:
    """How the episodes of each evaluation ended."""
    title = "How held-out episodes ended"
    evaluations = [e for e in evaluations if e["tasks"]]
    if not evaluations:
        return Chart(title, note="no evaluation was recorded.")
    counts = [Counter(t["ending"] for t in e["tasks"]) for e in evaluations]
    kinds = [kind for kind in ENDINGS if any(c[kind] for c in counts)]
    plot = Plot(
        (-0.5, len(evaluations) - 0.5),
        (0, 1),
        "finished training steps",
        "share of tasks",
        x_ticks=_thinned([(i, str(e["step"])) for i, e in enumerate(evaluations)]),
    )
    for place, (evaluation, count) in enumerate(zip(evaluations, counts)):
        below, total = 0.0, len(evaluation["tasks"])
        for css, kind in zip(COLOURS, kinds):
            if count[kind]:
                text = f"step {evaluation['step']}: {count[kind]} of {total} {ENDINGS[kind]}"
                above = below + count[kind] / total
                plot.box((place - 0.4, place + 0.4), (below, above), css, text)
                below = above
    return plot.chart(title, [(css, "box", ENDINGS[k]) for css, k in zip(COLOURS, kinds)])


def transcripts(evaluations: Evaluations) -> list[dict[str, Any]]:
    """Tasks whose episodes were written down, as the page shows them.

    Returns:
      One mapping per task of the last evaluation that has a transcript: its record, with
      `history`, `(step, ending)` of the same task in every evaluation, and `changed`, whether its
      first and last ending differ in success.
    """
    if not evaluations:
        return []
    history: dict[str, list[tuple[int, str]]] = {}
    for evaluation in evaluations:
        for task in evaluation["tasks"]:
            history.setdefault(task["task_id"], []).append((evaluation["step"], task["ending"]))
    shown = []
    for task in evaluations[-1]["tasks"]:
        if task["segments"] is not None:
            past = history[task["task_id"]]
            changed = (past[0][1] == "solved") != (past[-1][1] == "solved")
            shown.append(
                task | {"history": past, "changed": changed, "ending_text": ENDINGS[task["ending"]]}
            )
    return shown


def _scored(evaluation: Mapping[str, Any], hops: int) -> list[Mapping[str, Any]]:
    return [t for t in evaluation["tasks"] if t["hops"] == hops and t["outcome"] is not None]


def _share(tasks: Sequence[Mapping[str, Any]]) -> float:
    return sum(t["ending"] == "solved" for t in tasks) / len(tasks)


def _thinned(ticks: Sequence[tuple[int, str]], most: int = 10) -> list[tuple[int, str]]:
    return list(ticks[:: -(-len(ticks) // most)])
