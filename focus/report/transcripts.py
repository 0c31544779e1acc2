"""Held-out episodes of an evaluation: how each ended, and what was said in some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from focus.report.record import EVALUATIONS_DIRECTORY, clip, segment_record, task_record, write_step
from focus.tasks.base import Task
from focus.types import Trajectory

# Transcripts of the first tasks: the same in every evaluation and every run, so that two of them
# can be read side by side, and not selected by how they went.
MAX_TRANSCRIPTS = 32

ENDINGS = {
    "solved": "solved",
    "wrong": "ended with a wrong answer",
    "turn_limit": "out of turns",
    "context_limit": "context ran full",
    "format": "summary broke its format",
    "cut": "cut, no outcome",
    "error": "technical failure",
}


def record_evaluation(
    trajectories: Sequence[Trajectory],
    tasks: Sequence[Task],
    *,
    max_transcripts: int = MAX_TRANSCRIPTS,
    max_chars: int = 2000,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> list[dict[str, Any]]:
    """Describes the episodes of an evaluation.

    Args:
      trajectories: one per task, in any order.
      tasks: those that were played.
      max_transcripts: so many of the first tasks are described turn by turn.
      max_chars: longer texts keep their beginning and say how much was left out.
      decode: text of token ids, for summaries.

    Returns:
      One mapping per task, in the order of `tasks`: see `focus.report.record.task_record`, and
      `ending` (a key of `ENDINGS`), `outcome`, `error`, `turns`, `tokens` and `segments` (None
      for tasks that are only counted).

    Raises:
      ValueError: a task without a trajectory.
    """
    by_task = {t.task_id: t for t in trajectories}
    missing = [task.id for task in tasks if task.id not in by_task]
    if missing:
        raise ValueError(f"no trajectory of task {missing[0]!r}: pass the tasks that were played")
    records = []
    for place, task in enumerate(tasks):
        trajectory = by_task[task.id]
        segments = None
        if place < max_transcripts:
            segments = [segment_record(s, max_chars, decode) for s in trajectory.segments]
        records.append(
            task_record(task, max_chars)
            | {
                "ending": ending(trajectory),
                "outcome": trajectory.outcome,
                "error": None if trajectory.error is None else clip(trajectory.error, max_chars),
                "turns": len(trajectory.segments),
                "tokens": trajectory.num_tokens,
                "segments": segments,
            }
        )
    return records


def ending(trajectory: Trajectory) -> str:
    """How an episode ended: one of `ENDINGS`."""
    if trajectory.success:
        return "solved"
    if trajectory.end == "failed":
        return "error"
    if trajectory.outcome is None:
        return "cut"
    return trajectory.end if trajectory.end in ENDINGS else "wrong"


def write_evaluation(workdir: str | Path, step: int, records: Sequence[Mapping[str, Any]]) -> Path:
    """Writes an evaluation to `evaluations/step_NNNNNN.json`; an earlier one of the step goes.

    Args:
      workdir: directory of the run.
      step: finished training steps of the weights that played; 0 before training.
      records: see `record_evaluation`.
    """
    return write_step(Path(workdir) / EVALUATIONS_DIRECTORY, step, records)
