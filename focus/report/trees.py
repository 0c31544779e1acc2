"""Trajectory trees as a page shows them: branches under their states, credit as colour."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from focus.report import reasons
from focus.report.earned import (
    against_branches,
    earned_changes,
    teaching,
    trained_with,
    turning_point,
    widest,
)

# Both ends keep their hue under the common kinds of colour blindness; the sign is printed too.
POSITIVE_RGB = (33, 102, 172)
NEGATIVE_RGB = (217, 95, 2)
MAX_OPACITY = 0.5

GLYPHS = {"solved": "✓", "failed": "✗", "cut": "cut", "error": "!"}


@dataclasses.dataclass(frozen=True)
class Scales:
    """Sizes at which the two colours of a turn saturate, > 0.

    Attributes:
      earned: of the change of V*.
      trained: of the advantage trained with.
    """

    earned: float
    trained: float

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Scales:
        """The 95th percentile of each size over the page.

        One scale for all trees makes colours comparable, and a few large numbers must not wash
        out the rest.
        """
        trajectories = [t for record in records for t in record["trajectories"]]
        return cls(
            earned=_limit(change for t in trajectories for change in earned_changes(t)),
            trained=_limit(trained_with(s) for t in trajectories for s in t["segments"]),
        )

    def legend(self, name: str) -> list[tuple[float, str]]:
        """Numbers and colours from one end of a scale to the other."""
        limit = getattr(self, name)
        return [(f * limit, advantage_colour(f * limit, limit)) for f in (-1, -0.5, 0, 0.5, 1)]


def advantage_colour(advantage: float | None, limit: float) -> str:
    """Background of a segment: blue above 0, orange below, as strong as |A| / limit.

    Args:
      advantage: the segment's advantage, or what it earned; None is transparent.
      limit: |advantage| of full strength, > 0.

    Returns:
      A CSS colour whose opacity is the same for A and -A.
    """
    if not advantage:
        return "transparent"
    red, green, blue = POSITIVE_RGB if advantage > 0 else NEGATIVE_RGB
    opacity = MAX_OPACITY * min(1.0, abs(advantage) / limit)
    return f"rgba({red},{green},{blue},{opacity:.3f})"


def ranked(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Recorded trees in the order in which a page keeps them: what they teach, newest first.

    The most telling tree of every step comes before the second of any; see
    `focus.report.earned.teaching`.
    """
    of_step: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        of_step.setdefault(record["step"], []).append(record)
    placed = [
        (place, -step, record)
        for step, members in of_step.items()
        for place, record in enumerate(sorted(members, key=teaching, reverse=True))
    ]
    return [record for *_, record in sorted(placed, key=lambda entry: entry[:2])]


def task_view(
    record: Mapping[str, Any],
    scales: Scales,
    rows: Mapping[tuple[int, str, int], Mapping[str, Any]],
) -> dict[str, Any]:
    """A task's record, nested: base rollouts, their states, the branches of each state.

    Args:
      record: one element of `record_trees`, with its "step".
      scales: see `Scales`.
      rows: of `branches.jsonl`, by step, trajectory and state.

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
    page = _Page(record["step"], children, scales, rows)
    rollouts = [
        page.rollout(trajectory)
        for trajectory in record["trajectories"]
        if trajectory["parent"] is None
    ]
    return {
        "step": record["step"],
        "task_id": record["task_id"],
        "question": record["question"],
        "gold": record["gold"],
        "hops": record.get("hops"),
        "rollouts": rollouts,
        "num_branches": sum(rollout["num_branches"] for rollout in rollouts),
        "tokens": sum(trajectory["tokens"] for trajectory in record["trajectories"]),
        "change": teaching(record)[1],
        "widest": widest(record),
    }


def verdict(trajectory: Mapping[str, Any]) -> str:
    """One of "solved", "failed", "cut" (no outcome: None is not 0), "error" (technical)."""
    if trajectory["end"] == "failed":
        return "error"
    if trajectory["outcome"] is None:
        return "cut"
    return "solved" if trajectory["success"] else "failed"


@dataclasses.dataclass(frozen=True)
class _Page:
    """What all rollouts of a task are drawn with."""

    step: int
    children: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
    scales: Scales
    rows: Mapping[tuple[int, str, int], Mapping[str, Any]]

    def rollout(self, trajectory: Mapping[str, Any]) -> dict[str, Any]:
        """A rollout and, below its states, its branches."""
        segments, states = trajectory["segments"], trajectory["states"]
        changes = earned_changes(trajectory)
        turning = turning_point(changes)
        branched = [(trajectory["id"], j) in self.children for j in range(len(states))]
        points = [
            self._state(trajectory, j)
            | {
                "segment": None
                if j == len(segments)
                else self._segment(
                    trajectory, j, changes[j], branched[j] or branched[j + 1], turning == j
                )
            }
            for j in range(len(states))
        ]
        below = [branch for point in points for branch in point["branches"]]
        shown = [point["segment"] for point in points[:-1]]
        kind = verdict(trajectory)
        return {
            "id": trajectory["id"],
            "verdict": kind,
            "glyph": GLYPHS[kind],
            "outcome": trajectory["outcome"],
            "end": trajectory["end"].replace("_", " "),
            "error": trajectory["error"],
            "tokens": trajectory["tokens"],
            "branch_tokens": sum(b["tokens"] + b["branch_tokens"] for b in below),
            "num_segments": len(segments),
            "num_branches": sum(1 + branch["num_branches"] for branch in below),
            "from_state": trajectory["parent_state"],
            "turning": None if turning is None else _turn(shown[turning], points[turning]["best"]),
            "against": any(s["against"] for s in shown) or any(b["against"] for b in below),
            "troubled": kind == "error"
            or any(s.get("error") for s in shown)
            or any(b["troubled"] for b in below),
            "strip": shown,
            "points": points,
        }

    def _state(self, trajectory: Mapping[str, Any], index: int) -> dict[str, Any]:
        state = trajectory["states"][index]
        previous = trajectory["states"][max(index - 1, 0)]
        branches = [self.rollout(c) for c in self.children.get((trajectory["id"], index), ())]
        outcomes = [b["outcome"] for b in branches if b["outcome"] is not None]
        row = self.rows.get((self.step, trajectory["id"], index))
        notes = () if row is None else (reasons.choice(row), reasons.sentence(row))
        best = state["value"] if state["refined"] is None else state["refined"]
        return dict(state) | {
            "index": index,
            "compacted": state["span"] > previous["span"],
            "moved": _moved(state),
            "gauge": _gauge(state),
            "best": best,
            "branches": branches,
            "branch_mean": float(np.mean(outcomes)) if outcomes else None,
            "num_scored": len(outcomes),
            "branch_tokens": sum(b["tokens"] + b["branch_tokens"] for b in branches),
            "why": [note for note in notes if note],
        }

    def _segment(
        self,
        trajectory: Mapping[str, Any],
        index: int,
        change: float | None,
        branched: bool,
        turning: bool,
    ) -> dict[str, Any]:
        segment = trajectory["segments"][index]
        observation, trained = segment["observation"], trained_with(segment)
        return dict(segment) | {
            "anchor": f"{trajectory['id']}:{index}",
            "turn": trajectory["states"][index]["turn"],
            "earned": change,
            "trained": trained,
            "is_trained": "trained" in segment,
            "error": segment.get("error"),
            "against": against_branches(change, trained, branched=branched),
            "turning": turning,
            "earned_colour": advantage_colour(change, self.scales.earned),
            "trained_colour": advantage_colour(trained, self.scales.trained),
            "long": len(observation) > 320 or observation.count("\n") > 6,
            "replaced": _replaced(trajectory, index) if segment["summary"] is not None else None,
        }


def _turn(segment: Mapping[str, Any], before: float) -> dict[str, Any]:
    """A turning point as a headline: when, from where, to where."""
    after = before + segment["earned"] - (segment["reward"] or 0.0)
    return {"turn": segment["turn"], "before": before, "after": after}


def _replaced(trajectory: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The turns since the last compaction, which a summary at the end of a segment stands for.

    Those before a branch left are its parent's, and are only counted.
    """
    states, segments = trajectory["states"], trajectory["segments"]
    first = index
    while first > 0 and states[first - 1]["span"] == states[index]["span"]:
        first -= 1
    texts = [
        f"> {segment['text']}\n{segment['observation']}".strip()
        for segment in segments[first : index + 1]
    ]
    inherited = states[0]["turn"] if first == 0 and trajectory["parent"] is not None else 0
    return {
        "text": "\n".join(texts),
        "first": states[first]["turn"],
        "last": states[index]["turn"],
        "inherited": inherited,
    }


def _limit(values: Iterable[float | None]) -> float:
    sizes = [abs(value) for value in values if value]
    return float(np.quantile(sizes, 0.95)) if sizes else 1.0


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
