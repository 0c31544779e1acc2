"""Trajectory trees as a page shows them: branches under their states, credit as colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

# Both ends keep their hue under the common kinds of colour blindness; the sign is printed too.
POSITIVE_RGB = (33, 102, 172)
NEGATIVE_RGB = (217, 95, 2)
MAX_OPACITY = 0.5

GLYPHS = {"solved": "✓", "failed": "✗", "cut": "cut", "error": "!"}


def advantage_limit(records: Sequence[Mapping[str, Any]]) -> float:
    """Advantage at which the colour saturates: the 95th percentile of |A| over the page.

    One scale for all trees makes colours comparable, and a few large advantages must not wash
    out the rest.
    """
    sizes = [
        abs(segment["advantage"])
        for record in records
        for trajectory in record["trajectories"]
        for segment in trajectory["segments"]
        if segment["advantage"]
    ]
    return float(np.quantile(sizes, 0.95)) if sizes else 1.0


def advantage_colour(advantage: float | None, limit: float) -> str:
    """Background of a segment: blue above 0, orange below, as strong as |A| / limit.

    Args:
      advantage: the segment's advantage; None is transparent.
      limit: |advantage| of full strength, > 0.

    Returns:
      A CSS colour whose opacity is the same for A and -A.
    """
    if not advantage:
        return "transparent"
    red, green, blue = POSITIVE_RGB if advantage > 0 else NEGATIVE_RGB
    opacity = MAX_OPACITY * min(1.0, abs(advantage) / limit)
    return f"rgba({red},{green},{blue},{opacity:.3f})"


def task_view(record: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """A task's record, nested: base rollouts, their states, the branches of each state.

    Args:
      record: one element of `record_trees`, with its "step".
      limit: see `advantage_colour`.

    Returns:
      What the template's tree macros read.

    Raises:
      ValueError: a branch whose parent is not in the record.
    """
    ids = {trajectory["id"] for trajectory in record["trajectories"]}
    children: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for trajectory in record["trajectories"]:
        if trajectory["parent"] is None:
            continue
        if trajectory["parent"] not in ids:
            raise ValueError(
                f"step {record['step']}: branch {trajectory['id']} leaves {trajectory['parent']}, "
                "which was not recorded; record a task's base rollouts with its branches"
            )
        key = (trajectory["parent"], trajectory["parent_state"])
        children.setdefault(key, []).append(trajectory)
    rollouts = [
        _rollout_view(trajectory, children, limit)
        for trajectory in record["trajectories"]
        if trajectory["parent"] is None
    ]
    return {
        "step": record["step"],
        "task_id": record["task_id"],
        "question": record["question"],
        "gold": record["gold"],
        "rollouts": rollouts,
        "num_branches": sum(rollout["num_branches"] for rollout in rollouts),
        "tokens": sum(trajectory["tokens"] for trajectory in record["trajectories"]),
    }


def verdict(trajectory: Mapping[str, Any]) -> str:
    """One of "solved", "failed", "cut" (no outcome: None is not 0), "error" (technical)."""
    if trajectory["end"] == "failed":
        return "error"
    if trajectory["outcome"] is None:
        return "cut"
    return "solved" if trajectory["success"] else "failed"


def _rollout_view(trajectory, children, limit) -> dict[str, Any]:
    points = []
    for index, state in enumerate(trajectory["states"]):
        last = index == len(trajectory["segments"])
        branches = [
            _rollout_view(child, children, limit)
            for child in children.get((trajectory["id"], index), ())
        ]
        outcomes = [b["outcome"] for b in branches if b["outcome"] is not None]
        previous = trajectory["states"][max(index - 1, 0)]
        points.append(
            state
            | {
                "index": index,
                "compacted": state["span"] > previous["span"],
                "moved": _moved(state),
                "gauge": _gauge(state),
                "branches": branches,
                "branch_mean": float(np.mean(outcomes)) if outcomes else None,
                "num_scored": len(outcomes),
                "segment": None if last else _segment_view(trajectory["segments"][index], limit),
            }
        )
    kind = verdict(trajectory)
    return {
        "id": trajectory["id"],
        "verdict": kind,
        "glyph": GLYPHS[kind],
        "outcome": trajectory["outcome"],
        "end": trajectory["end"].replace("_", " "),
        "error": trajectory["error"],
        "tokens": trajectory["tokens"],
        "num_segments": len(trajectory["segments"]),
        "num_branches": sum(
            1 + branch["num_branches"] for point in points for branch in point["branches"]
        ),
        "from_state": trajectory["parent_state"],
        "strip": [point["segment"] for point in points[:-1]],
        "points": points,
    }


def _segment_view(segment: Mapping[str, Any], limit: float) -> dict[str, Any]:
    observation = segment["observation"]
    return dict(segment) | {
        "colour": advantage_colour(segment["advantage"], limit),
        "long": len(observation) > 320 or observation.count("\n") > 6,
    }


def _moved(state: Mapping[str, Any]) -> bool:
    """Whether refinement changed what two decimals show."""
    if state["refined"] is None:
        return False
    pairs = ((state["value"], state["refined"]), (state["std"], state["refined_std"]))
    return any(f"{a or 0.0:.2f}" != f"{b or 0.0:.2f}" for a, b in pairs)


def _gauge(state: Mapping[str, Any]) -> Markup:
    """V above, V* below, one standard deviation to each side, on a scale from 0 to 1."""
    marks = []
    for y, css, value, std in (
        (0, "before", state["value"], state["std"]),
        (8, "after", state["refined"] if _moved(state) else None, state["refined_std"]),
    ):
        if value is None or not 0 <= value <= 1:
            continue
        low, high = max(0.0, value - (std or 0.0)), min(1.0, value + (std or 0.0))
        marks.append(
            f'<rect class="{css}" x="{100 * low:.1f}" y="{y + 1}" '
            f'width="{max(100 * (high - low), 0.5):.1f}" height="4"/>'
            f'<rect class="{css} at" x="{100 * value - 1:.1f}" y="{y}" width="2" height="6"/>'
        )
    if not marks:
        return Markup("")
    return Markup(
        '<svg class="gauge" viewBox="-1 0 102 14" aria-hidden="true">'
        '<path class="rule" d="M0 7H100"/>' + "".join(marks) + "</svg>"
    )
