"""What each turn earned: the change of the refined value that it brought about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# A change of V* that a reader would call one; below it two signs may differ by chance.
TELLING = 0.1


def earned_changes(trajectory: Mapping[str, Any]) -> list[float | None]:
    """By how much each segment moved what the episode was worth.

        earned_j = r_j + V*(s_{j+1}) - V*(s_j),   V*(end) = outcome

    Without discount and without lambda: the temporal difference that advantages are made of, as
    the refined values tell it. An end without an outcome counts with the value of its state.

    Args:
      trajectory: as in `record_trees`.

    Returns:
      One number per segment; None where a value is not known.
    """
    values = [state["refined"] for state in trajectory["states"]]
    if trajectory["outcome"] is not None:
        values[-1] = trajectory["outcome"]
    return [
        None if before is None or after is None else (segment["reward"] or 0.0) + after - before
        for segment, before, after in zip(trajectory["segments"], values, values[1:])
    ]


def turning_point(changes: Sequence[float | None]) -> int | None:
    """The segment with the largest change in size, the first of equals; None if none changed."""
    known = [(abs(change), -j) for j, change in enumerate(changes) if change]
    return -max(known)[1] if known else None


def teaching(record: Mapping[str, Any]) -> tuple[bool, float]:
    """How much a task's tree has to teach: whether it was branched, and its largest change of V*.

    Args:
      record: one element of `record_trees`.
    """
    largest = 0.0
    for trajectory in record["trajectories"]:
        if trajectory["parent"] is None:
            known = [abs(change) for change in earned_changes(trajectory) if change]
            largest = max([largest, *known])
    return any(t["parent"] is not None for t in record["trajectories"]), largest


def widest(record: Mapping[str, Any]) -> float:
    """The largest standard deviation of V among the states of a task's base rollouts."""
    return max(
        (
            state["std"] or 0.0
            for trajectory in record["trajectories"]
            if trajectory["parent"] is None
            for state in trajectory["states"]
        ),
        default=0.0,
    )


def trained_with(segment: Mapping[str, Any]) -> float | None:
    """The advantage that a segment's tokens were trained with, None if they were not.

    Runs recorded before that was kept know the estimator's advantage only.
    """
    return segment["trained"] if "trained" in segment else segment["advantage"]


def against_branches(change: float | None, trained: float | None, *, branched: bool) -> bool:
    """Whether a turn was pushed against what branches say of it.

    Args:
      change: what the turn earned.
      trained: the advantage that it was trained with.
      branched: whether the state before or after it was branched.
    """
    if not branched or not change or not trained or abs(change) < TELLING:
        return False
    return math.copysign(1.0, change) != math.copysign(1.0, trained)
