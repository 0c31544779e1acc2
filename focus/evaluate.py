"""Success on held-out tasks."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from focus.learner import hosts
from focus.rollout import (
    Agent,
    AllRolloutsFailed,
    EpisodeStart,
    Pool,
    Rollout,
    UnlimitedAccount,
    play,
)
from focus.run.backends import alive_everywhere
from focus.run.restored import restore_run
from focus.tasks.base import Task
from focus.terminal import Start
from focus.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What playing each task once gave.

    Attributes:
      success: share of the tasks that were solved, of those that have an outcome.
      std_error: of that share (binomial).
      trajectories: one per task.
      technical_failures: rollouts without an outcome; they are no failures of the policy.
    """

    success: float
    std_error: float
    trajectories: tuple[Trajectory, ...]
    technical_failures: int

    def to_dict(self) -> dict[str, Any]:
        """Flat metrics."""
        scored = [t for t in self.trajectories if t.outcome is not None]
        return {
            "heldout/success": self.success,
            "heldout/std_error": self.std_error,
            "heldout/tokens": float(np.mean([t.num_tokens for t in scored])),
            "heldout/turns": float(np.mean([len(t.segments) for t in scored])),
        }


async def evaluate(
    agent: Agent, tasks: Sequence[Task], *, name: str, concurrency: int
) -> Evaluation:
    """Plays every task once, outside of any budget; several processes share them.

    Args:
      agent: plays, with the weights that its engine holds.
      tasks: what to play.
      name: part of every trajectory's id. Equal names draw equal random numbers, so two
        policies are compared on the same luck.
      concurrency: most episodes at once.

    Returns:
      Evaluation.

    Raises:
      AllRolloutsFailed: not a single rollout has an outcome.
      FleetDead: nobody samples any more.
    """
    pool = Pool(concurrency)
    for i, task in hosts.deal(list(enumerate(tasks))):
        rollout = Rollout(f"{name}/{i}.0", task.id, i)
        start = EpisodeStart(agent, task)
        pool.submit(functools.partial(play, agent, start, rollout, UnlimitedAccount()))
    trajectories = tuple(hosts.undeal(await alive_everywhere(pool.join())))
    outcomes = [t.outcome for t in trajectories if t.outcome is not None]
    if not outcomes:
        errors = (t.error for t in trajectories)
        raise AllRolloutsFailed(f"none of {len(tasks)} held-out rollouts has an outcome", errors)
    success = float(np.mean([t.success for t in trajectories if t.outcome is not None]))
    return Evaluation(
        success=success,
        std_error=float(np.sqrt(success * (1 - success) / len(outcomes))),
        trajectories=trajectories,
        technical_failures=len(trajectories) - len(outcomes),
    )


def evaluate_run(
    workdir: str | Path,
    *,
    step: int | str = "latest",
    num_tasks: int | None = None,
    temperature: float | None = None,
    start: Start | None = None,
) -> dict[str, Any]:
    """Scores a checkpoint of a run.

    Args:
      workdir: of the run.
      step: "latest", "best" or the number of a checkpoint.
      num_tasks: held-out tasks; None for the config's.
      temperature: of sampling; None for the config's, 0 for greedy.
      start: says how far it is; None: nobody does.

    Returns:
      Step, success, its standard error, number of tasks, mean tokens and turns.

    Raises:
      ValueError: no run there, no such checkpoint, more tasks than there are, or other contents
        of the files that the run reads.
    """
    start = start or Start(quiet=True)
    restored = restore_run(workdir, step, start=start, temperature=temperature, num_tasks=num_tasks)
    config, trainer = restored.config, restored.trainer

    async def run() -> Evaluation:
        async with trainer.engine:
            push = trainer.backend.publisher(Path(workdir) / "evaluation")
            await push(trainer.rollout_params(restored.state), restored.step)
            return await evaluate(
                trainer.eval_agent,
                trainer.heldout_tasks,
                name="heldout",
                concurrency=config.rollout.max_running,
            )

    with start.part(f"{config.evaluate.num_tasks} held-out tasks"):
        result = asyncio.run(run())
    start.close()
    return {
        "step": restored.step,
        "temperature": config.evaluate.temperature,
        "num_tasks": len(result.trajectories),
        "success": result.success,
        "std_error": result.std_error,
        "technical_failures": result.technical_failures,
        **{k: v for k, v in result.to_dict().items() if k.endswith(("tokens", "turns"))},
    }
