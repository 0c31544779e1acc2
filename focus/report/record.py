"""What a run leaves behind for its report: branched states and trajectory trees, as JSON.

Once a step the training loop hands what `BranchedState.to_dict` of `focus.rollout` says of each
branched state to `write_branches`, and what `record_trees` makes of the rollouts to
`write_trees`; `read_run` collects everything a report needs. A resumed run writes some steps
again: the later writing of a step replaces the earlier one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from focus.report.earned import teaching
from focus.tasks.base import Task
from focus.types import RolloutTree, Segment, Trajectory

METRICS_FILE = "metrics.jsonl"
BRANCHES_FILE = "branches.jsonl"
TREES_DIRECTORY = "trees"
EVALUATIONS_DIRECTORY = "evaluations"
SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.json"

# Where a task keeps its gold answer, the first one that exists.
GOLD_KEYS = ("gold", "answer")


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything a report reads; a part that the run did not write is empty.

    Attributes:
      workdir: where it was read from.
      metrics: one flat mapping per step, by step.
      branches: one mapping per branched state, see `write_branches`.
      trees: one mapping per recorded task and step, see `record_trees`, each with its "step".
      evaluations: one mapping per evaluation, see `focus.report.transcripts`: its "step", counted
        in finished training steps, and "tasks".
      summary: `summary.json`.
      config: `config.json`.
    """

    workdir: Path
    metrics: tuple[Mapping[str, Any], ...] = ()
    branches: tuple[Mapping[str, Any], ...] = ()
    trees: tuple[Mapping[str, Any], ...] = ()
    evaluations: tuple[Mapping[str, Any], ...] = ()
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def record_trees(
    tree: RolloutTree,
    tasks: Mapping[str, Task] | Iterable[Task],
    *,
    values: np.ndarray,
    stds: np.ndarray,
    refined: np.ndarray,
    refined_stds: np.ndarray,
    segment_advantages: np.ndarray,
    max_tasks: int,
    trained_advantages: np.ndarray | None = None,
    max_chars: int = 4000,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> list[dict[str, Any]]:
    """Describes the rollouts of a step's most telling tasks, down to the text of every turn.

    Branched tasks first, then those whose refined value changed most in a single turn, see
    `focus.report.earned.teaching`. The curves are about all tasks; trees are for reading.

    Args:
      tree: the step's rollouts.
      tasks: by id, or any iterable that covers the tasks of `tree`.
      values: [B, S + 1] critic means in the order of `tree.trajectories`; NaN where unknown.
      stds: [B, S + 1] epistemic standard deviations of `values`.
      refined: [B, S + 1] refined values.
      refined_stds: [B, S + 1] their standard deviations.
      segment_advantages: [B, S], as the estimator gave them.
      max_tasks: how many tasks to describe.
      trained_advantages: [B, S] as the policy was trained with them, NaN where it was not.
      max_chars: longer texts keep their beginning and say how much was left out.
      decode: text of token ids. Without it the page tells only how long a summary is.

    Returns:
      One mapping per task, the most telling first: `task_id`, `question`, `gold` (None if the
      task's data has none of `GOLD_KEYS`) and `trajectories`, base rollouts first. Not-a-number
      becomes None.

    Raises:
      ValueError: an array that does not cover the tree, or a task that is missing.
    """
    arrays = {"value": values, "std": stds, "refined": refined, "refined_std": refined_stds}
    _check_state_arrays(tree, arrays)
    credit = {"advantage": np.asarray(segment_advantages)}
    if trained_advantages is not None:
        credit["trained"] = np.asarray(trained_advantages)
    _check_segment_arrays(tree, credit)
    if not isinstance(tasks, Mapping):
        tasks = {task.id: task for task in tasks}

    records: dict[str, dict[str, Any]] = {}
    for task_id in dict.fromkeys(t.task_id for t in tree.base):
        if task_id not in tasks:
            raise ValueError(
                f"no task {task_id!r} among the {len(tasks)} given: pass the tasks of this step"
            )
        records[task_id] = task_record(tasks[task_id], max_chars) | {"trajectories": []}
    for row, trajectory in enumerate(tree.trajectories):
        if trajectory.task_id in records:
            records[trajectory.task_id]["trajectories"].append(
                _trajectory_record(
                    trajectory,
                    {name: array[row] for name, array in arrays.items()},
                    {name: array[row] for name, array in credit.items()},
                    max_chars,
                    decode,
                )
            )
    return sorted(records.values(), key=teaching, reverse=True)[:max_tasks]


def task_record(task: Task, max_chars: int) -> dict[str, Any]:
    """What a page says of a task, whoever played it."""
    gold = next((task.data[key] for key in GOLD_KEYS if key in task.data), None)
    return {
        "task_id": task.id,
        "question": clip(task.prompt, max_chars),
        "gold": None if gold is None else clip(str(gold), max_chars),
        "hops": task.data.get("hops"),
    }


def write_branches(workdir: str | Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends a step's rows to `branches.jsonl`, after cutting this and later steps.

    Steps that are there already come from before a resume. The file is read only in that case
    and when its last line is torn.

    Args:
      workdir: directory of the run.
      step: the training step.
      rows: one per branched state: `BranchedState.to_dict()` and its "step".
    """
    path = Path(workdir) / BRANCHES_FILE
    lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    last = _last_step(path)
    if last is not None and last >= step:
        kept = []
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
            torn = not line.endswith(b"\n")
            if not torn and _parse(line.decode(), f"{path}, line {number}")["step"] < step:
                kept.append(line)
        _write_atomically(path, b"".join(kept))
    with open(path, "ab") as file:
        file.write(lines)


def write_trees(workdir: str | Path, step: int, records: Sequence[Mapping[str, Any]]) -> Path:
    """Writes a step's trees to `trees/step_NNNNNN.json`; an earlier file of the step goes."""
    return write_step(Path(workdir) / TREES_DIRECTORY, step, records)


def write_step(directory: Path, step: int, records: Sequence[Mapping[str, Any]]) -> Path:
    """Writes a step's records to `step_NNNNNN.json`, complete or not at all."""
    path = directory / f"step_{step:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"step": step, "tasks": list(records)}
    _write_atomically(path, json.dumps(content, ensure_ascii=False, allow_nan=False).encode())
    return path


def read_run(workdir: str | Path) -> Run:
    """Reads what a run left in its directory; parts that are not there stay empty.

    A run that is going on is read like any other: a last line that is being written is left out.

    Raises:
      ValueError: no such directory, nothing in it to report on, or a file that is not JSON
        (names the file and the line).
    """
    workdir = Path(workdir)
    if not workdir.is_dir():
        raise ValueError(f"no run directory at {workdir}: give the workdir of a training run")
    metrics = _read_lines(workdir / METRICS_FILE)
    trees = [
        {"step": content["step"]} | record
        for content in _read_steps(workdir / TREES_DIRECTORY)
        for record in content["tasks"]
    ]
    run = Run(
        workdir=workdir,
        metrics=tuple(sorted(metrics, key=lambda row: row["step"])),
        branches=tuple(_read_lines(workdir / BRANCHES_FILE)),
        trees=tuple(trees),
        evaluations=tuple(_read_steps(workdir / EVALUATIONS_DIRECTORY)),
        summary=_read_object(workdir / SUMMARY_FILE),
        config=_read_object(workdir / CONFIG_FILE),
    )
    if not (run.metrics or run.trees or run.branches or run.summary):
        raise ValueError(
            f"nothing to report in {workdir}: expected {METRICS_FILE}, {BRANCHES_FILE}, "
            f"{TREES_DIRECTORY}/ or {SUMMARY_FILE}; is this the workdir of a run?"
        )
    return run


def _trajectory_record(
    trajectory: Trajectory,
    state_arrays: Mapping[str, np.ndarray],
    credit: Mapping[str, np.ndarray],
    max_chars: int,
    decode: Callable[[Sequence[int]], str] | None,
) -> dict[str, Any]:
    states = [
        {"turn": state.turn, "span": state.span, "prompt_tokens": len(state.prompt_ids)}
        | {name: _number(array[j]) for name, array in state_arrays.items()}
        for j, state in enumerate(trajectory.states)
    ]
    segments = [
        segment_record(segment, max_chars, decode)
        | {name: _number(array[j]) for name, array in credit.items()}
        for j, segment in enumerate(trajectory.segments)
    ]
    return {
        "id": trajectory.id,
        "parent": trajectory.parent,
        "parent_state": trajectory.parent_state,
        "outcome": None if trajectory.outcome is None else _number(trajectory.outcome),
        "success": bool(trajectory.success),
        "end": trajectory.end,
        "error": trajectory.error,
        "tokens": trajectory.num_tokens,
        "states": states,
        "segments": segments,
    }


def segment_record(
    segment: Segment, max_chars: int, decode: Callable[[Sequence[int]], str] | None
) -> dict[str, Any]:
    """What a page says of a turn; credit comes on top of it."""
    acts = [g for g in segment.generations if g.kind == "act"]
    summary_ids = [i for g in segment.generations if g.kind == "summary" for i in g.output_ids]
    summary = decode(summary_ids) if decode is not None and summary_ids else None
    error = segment.info.get("error")
    return {
        "text": clip(segment.text, max_chars),
        "observation": clip(segment.observation, max_chars),
        "summary": None if summary is None else clip(summary, max_chars),
        "act_tokens": sum(len(g.output_ids) for g in acts),
        "summary_tokens": len(summary_ids),
        "cut": any(g.finish_reason != "stop" for g in segment.generations),
        "reward": _number(segment.reward),
        "error": None if error is None else clip(str(error), max_chars),
    }


def _check_state_arrays(tree: RolloutTree, arrays: Mapping[str, np.ndarray]) -> None:
    num_states = max((len(t.states) for t in tree.trajectories), default=0)
    for name, array in arrays.items():
        shape = np.shape(array)
        if len(shape) != 2 or shape[0] < len(tree.trajectories) or shape[1] < num_states:
            raise ValueError(
                f"the array of each state's {name} has shape {shape}, but the tree needs at "
                f"least [{len(tree.trajectories)}, {num_states}]: one row per trajectory"
            )


def _check_segment_arrays(tree: RolloutTree, arrays: Mapping[str, np.ndarray]) -> None:
    num_segments = max((len(t.segments) for t in tree.trajectories), default=0)
    for name, array in arrays.items():
        shape = array.shape
        if len(shape) != 2 or shape[0] < len(tree.trajectories) or shape[1] < num_segments:
            raise ValueError(
                f"segment_advantages has shape {shape} ({name}), but the tree needs at least "
                f"[{len(tree.trajectories)}, {num_segments}]: one row per trajectory"
            )


def _number(value: Any) -> float | None:
    """Five decimals are more than a page shows; JSON has no NaN."""
    value = float(value)
    return round(value, 5) if math.isfinite(value) else None


def clip(text: str, max_chars: int) -> str:
    """The text, or its beginning and how much is left out."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]} [... {len(text) - max_chars} characters left out]"


def _last_step(path: Path) -> float | None:
    """Step of the file's last line; infinity when that line is torn, None without lines."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        tail = file.read()
    if not tail.endswith(b"\n"):
        return math.inf
    return json.loads(tail.splitlines()[-1])["step"]


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = _parse(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold one JSON object, got {type(content).__name__}")
    return content


def _read_steps(directory: Path) -> list[dict[str, Any]]:
    contents = []
    for path in sorted(directory.glob("step_*.json")):
        content = _read_object(path)
        if not {"step", "tasks"} <= content.keys():
            raise ValueError(f"{path} lacks 'step' or 'tasks': which program wrote it?")
        contents.append(content)
    return contents


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines; one without an end is being written, and is left out."""
    if not path.exists():
        return []
    rows = []
    *lines, torn = path.read_bytes().split(b"\n")
    if torn and _is_json(torn):
        lines.append(torn)
    for number, line in enumerate((line.decode() for line in lines), start=1):
        if line.strip():
            row = _parse(line, f"{path}, line {number}")
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError(f"{path}, line {number}: expected an object with an integer step")
            rows.append(row)
    return rows


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON ({error.msg} at column {error.colno}); mend or delete it and "
            "build the report again"
        ) from error
