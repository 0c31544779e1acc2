"""One episode of a trained policy, or one that a run recorded."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from focus.report import read_run, record_trees
from focus.rollout import Rollout, UnlimitedAccount, play
from focus.run.restored import RestoredRun, restore_run
from focus.tasks.base import Task
from focus.types import RolloutTree, Trajectory

Episode = tuple[Mapping[str, Any], Mapping[str, Any]]  # a task and a trajectory, as recorded


def play_episode(
    workdir: str | Path,
    *,
    step: int | str = "latest",
    split: str = "heldout",
    task: str = "0",
    temperature: float | None = None,
    seed: int = 0,
) -> tuple[int, Episode]:
    """Plays one task with a checkpoint of a run, and asks its critic about every state.

    Args:
      workdir: of the run; only read.
      step: "latest", "best" or the number of a checkpoint.
      split: "train" or "heldout".
      task: id of a task, or its place in the split.
      temperature: of sampling; None for the config's, 0 for greedy.
      seed: other seeds draw other tokens.

    Returns:
      Finished training steps of the weights; task and trajectory, as in `record_trees`. Values
      are the critic's; None without one.

    Raises:
      ValueError: no run there, no such checkpoint, split or task.
    """
    restored = restore_run(workdir, step)
    trainer = restored.trainer
    chosen = find_task(trainer.env.tasks(split), task, split)
    agent = dataclasses.replace(trainer.eval_agent, run_seed=seed)
    if temperature is not None:
        sampling = dataclasses.replace(agent.sampling, temperature=temperature)
        agent = dataclasses.replace(agent, sampling=sampling)

    async def run() -> Trajectory:
        async with trainer.engine:
            push = trainer.backend.publisher(Path(workdir) / "play")
            await push(trainer.rollout_params(restored.state), restored.step)
            rollout = Rollout("play/0.0", chosen.id, 0)
            return await play(agent, agent.start(chosen), rollout, UnlimitedAccount())

    return restored.step, _record(restored, chosen, asyncio.run(run()))


def recorded_episode(workdir: str | Path, rollout: str) -> tuple[int, Episode]:
    """A rollout that a run wrote down, with the values of that time.

    Args:
      workdir: of the run.
      rollout: id of a rollout or branch, as in the report.

    Returns:
      The training step; task and trajectory.

    Raises:
      ValueError: no such rollout.
    """
    records = read_run(workdir).trees
    for record in records:
        for trajectory in record["trajectories"]:
            if trajectory["id"] == rollout:
                return record["step"], (record, trajectory)
    known = [t["id"] for record in records for t in record["trajectories"]]
    some = f"e.g. {', '.join(known[:3])}" if known else "it recorded none"
    raise ValueError(f"{workdir} recorded no rollout {rollout!r}; {some}")


def find_task(tasks: Sequence[Task], wanted: str, split: str) -> Task:
    """A task by its id or its place.

    Raises:
      ValueError: no such task.
    """
    for task in tasks:
        if task.id == wanted:
            return task
    if wanted.isdigit() and int(wanted) < len(tasks):
        return tasks[int(wanted)]
    first = f", as {tasks[0].id!r}," if tasks else ""
    raise ValueError(
        f"no task {wanted!r} in {split!r}: give an id{first} or a place from 0 to {len(tasks) - 1}"
    )


def _record(restored: RestoredRun, task: Task, trajectory: Trajectory) -> Episode:
    shape = 1, len(trajectory.states)
    mean, std = np.full(shape, np.nan), np.full(shape, np.nan)
    valuation = restored.trainer.valuation
    if valuation.critic is not None:
        belief = valuation.score_states(restored.state, [trajectory])
        there = np.array([[bool(state.prompt_ids) for state in trajectory.states]])
        mean[there] = belief.mean[:1, : shape[1]][there]
        std[there] = np.sqrt(belief.variance[:1, : shape[1]])[there]
    (record,) = record_trees(
        RolloutTree((trajectory,)),
        {task.id: task},
        values=mean,
        stds=std,
        refined=mean,
        refined_stds=std,
        segment_advantages=np.full((1, len(trajectory.segments)), np.nan),
        max_tasks=1,
        decode=restored.trainer.start.chat.decode,
    )
    return record, record["trajectories"][0]
