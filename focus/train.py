"""The training loop: rollouts, learning, weights to the engine, over and over.

What one step does is in `focus/steps.py`. With `rollout.async_depth` > 0 base rollouts of the
next steps are played while the learner works.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import platform
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import ml_collections
import rich.console

from focus import experiment, warm_start
from focus.branching.budget import Ledger
from focus.engines import alive_everywhere
from focus.evaluate import Evaluation, evaluate
from focus.journal import Journal, write_atomically
from focus.learner import hosts
from focus.learner.checkpoint import Checkpointer, open_workdir
from focus.learner.state import TrainState
from focus.metrics import MetricsWriter, ProgressBar, format_summary
from focus.report import build_report, record_trees, write_branches, write_trees
from focus.rollout import (
    BaseRollouts,
    Collected,
    FleetDead,
    RolloutsAhead,
    Slots,
    StepPlay,
    Stopwatch,
    Tally,
)
from focus.steps import LAG, Learned, Progress, collect_step, learn, note, step_metrics, tally_step
from focus.trainer import Trainer

# Takes a step and its metrics.
Write = Callable[[int, dict[str, Any]], None]


def train(config: ml_collections.ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Trains, or goes on where an earlier process with this config and workdir was stopped.

    Several processes call it together, after `hosts.initialize`. They play different tasks with
    parts of one budget; the first writes what is not a checkpoint, the others keep a journal.

    Args:
      config: see `configs/`.
      workdir: gets checkpoints, metrics, the journal of rollouts, trajectory trees, the summary
        and the report; with learner.lora, the adapter as PEFT has it. One directory for all
        processes.

    Returns:
      The summary, as written to `summary.json`.

    Raises:
      ValueError: a config or workdir that cannot work; before any work is done.
      FloatingPointError: a loss that is not finite; the last checkpoint is intact.
      FleetDead: no server has answered for `rollout.dead_after_s`; the run is saved.
    """
    with hosts.together():
        return asyncio.run(_train(config, workdir))


async def _train(config: ml_collections.ConfigDict, workdir: str | Path) -> dict[str, Any]:
    hosts.agree("config", config.to_json())
    experiment.validate(config)
    env = experiment.make_env(config)
    if config.model.get("path"):
        experiment.read_chat(config, env)
    # Only now: a config that cannot work must not claim the workdir.
    workdir = open_workdir(workdir, json.loads(config.to_json()), may_differ=experiment.MAY_DIFFER)
    for remark in experiment.remarks(config):
        rich.console.Console(stderr=True, quiet=not hosts.is_first()).print(remark, style="yellow")
    clock = Stopwatch()
    with clock.phase("warm_start"):
        warm = warm_start.load_or_make(config, env)
        hosts.agree("warm start", warm.checksum())
    with clock.phase("compile"):
        trainer = Trainer(config, env, warm)
    checkpointer = Checkpointer(
        workdir, keep_last=config.checkpoint.keep_last, keep_best=config.checkpoint.keep_best
    )
    journal = Journal(workdir, hosts.index())
    journal.attempt = max(hosts.gather(journal.attempt))
    start = _resume(config, trainer, checkpointer, journal)
    async with trainer.engine:
        run = _Run(trainer, start, journal, checkpointer, workdir)
        latest = await run.train(clock)
    trainer.save_adapter(workdir / "adapter", run.state)
    checkpointer.close()
    journal.close()
    return _finish(config, workdir, run.progress, latest, trainer)


class _Run:
    """One process's attempt at a run, from a checkpoint or the beginning to the end.

    Attributes:
      state: arrays after `done` steps.
      done: finished steps.
      progress: everything else that a checkpoint holds.
    """

    def __init__(
        self,
        trainer: Trainer,
        start: tuple[TrainState, Progress, int],
        journal: Journal,
        checkpointer: Checkpointer,
        workdir: Path,
    ):
        self.trainer, self.config, self.workdir = trainer, trainer.config, workdir
        self.state, self.progress, self.done = start
        self._first = self.done
        self._sizes: set[int] = set()  # padded numbers of trajectories that steps had so far
        self._journal, self._checkpointer = journal, checkpointer
        self._push = trainer.backend.publisher(workdir)
        self._order = trainer.task_order(self.progress.cursor, self.progress.owed)
        self._slots = Slots(self.config.rollout.max_running)
        self._plays: dict[int, StepPlay] = {}
        self._saved = self.done
        self._unwritten: dict[str, Any] | None = None

    async def train(self, clock: Stopwatch) -> Evaluation:
        """All steps that are left; the run's last evaluation.

        Raises:
          FleetDead: see `focus.train.train`.
        """
        latest = await self._begin(clock)
        depth = self.config.rollout.async_depth
        with _writer(self.config, self.workdir, self._first) as write:
            async with RolloutsAhead(self._play_base, depth=depth, end=self.config.steps) as ahead:
                try:
                    while self.done < self.config.steps:
                        latest = await self._step(ahead, write) or latest
                except FleetDead as error:
                    self._stop(error, write)
        return latest or await self._evaluate(clock)  # a run that had already finished

    async def _begin(self, clock: Stopwatch) -> Evaluation | None:
        """Weights to the engine; before the first step of a run, how good the policy is."""
        latest = None
        await self._publish(clock)
        with clock.phase("compile"):
            self.trainer.backend.warmup()
        if self.progress.success_before is None:
            latest = await self._evaluate(clock)
            self.progress.success_before = latest.success
            self.state = self.trainer.fit_critic(self.state, latest.trajectories)
        self.progress.ledger += Ledger(seconds=clock.seconds)
        return latest

    async def _step(self, ahead: RolloutsAhead, write: Write) -> Evaluation | None:
        """One step of the method, and what is due after it."""
        config, trainer, progress, step = self.config, self.trainer, self.progress, self.done
        clock, compiled = Stopwatch(), trainer.compilations

        # 1-3. Base rollouts, the critic's belief about their states, branches where they teach.
        play = self._play(step)
        collected = await collect_step(trainer, self.state, play, ahead, clock)
        tally = await tally_step(collected, play, self._order)
        tally.ledger.remaining(config.budget)  # raises if the budget was passed

        # 4-7. Values, critic, credit, policy; meanwhile, base rollouts of the next steps.
        ahead.learn(step)
        learned = await asyncio.to_thread(learn, trainer, self.state, collected, step, clock)
        self.state, self.done = learned.state, step + 1
        del self._plays[step]
        for phase, seconds in collected.ledger.seconds.items():
            clock.seconds[phase] = clock.seconds.get(phase, 0.0) + seconds
        note(progress, tally, learned, self._order)
        metrics = self._unwritten = step_metrics(tally, learned, progress, config.budget)

        # 8. New weights to the engine, under a new version.
        await self._publish(clock)
        with clock.phase("record"):
            self._record(step, collected, tally, learned)

        latest, last = None, self.done == config.steps
        every = config.evaluate.every
        if last or (every and self.done % every == 0):
            latest = await self._evaluate(clock)
            metrics |= latest.to_dict()
            progress.add(technical_failures=latest.technical_failures)
        # Estimators compile once per size that learner.row_buckets allows, whenever it comes first.
        size = len(learned.segment_advantages)
        if size in self._sizes and step >= self._first + self._warmup_steps:
            progress.add(recompilations=trainer.compilations - compiled)
        self._sizes.add(size)
        metrics |= trainer.backend.metrics()
        metrics |= {f"time/{phase}": s for phase, s in clock.seconds.items()}
        progress.ledger += Ledger(seconds=clock.seconds)
        write(step, metrics)
        self._unwritten = None
        if last or self.done % config.checkpoint.every == 0:
            self._save(metrics)
        return latest

    @property
    def _warmup_steps(self) -> int:
        """Steps of this process in which programs may still compile: shapes that only come with
        branches, and the policy update once the critic has warmed up."""
        critic = self.config.critic
        return max(2, critic.warmup_steps + 1 - self._first if critic.enabled else 0)

    def _play(self, step: int) -> StepPlay:
        """What the rollouts of a step have in common; the same for base rollouts and branches."""
        if step not in self._plays:
            trainer, journal = self.trainer, self._journal
            budget = hosts.split(self.config.budget, step)
            self._plays[step] = StepPlay(
                dataclasses.replace(trainer.step_config, budget=budget),
                trainer.agent,
                step,
                self.progress.episode_cost,
                on_finished=lambda trajectory: journal.append(step, trajectory),
                screen=trainer.screen(step),
                slots=self._slots,
                process=hosts.index(),
                num_processes=hosts.count(),
            )
        return self._plays[step]

    def _play_base(self, step: int) -> Awaitable[BaseRollouts]:
        return self._play(step).base(self._order.draw(step))

    async def _publish(self, clock: Stopwatch) -> None:
        with clock.phase("push"):
            params = self.trainer.rollout_params(self.state)
            await alive_everywhere(self._push(params, self.done))

    async def _evaluate(self, clock: Stopwatch) -> Evaluation:
        with clock.phase("evaluate"):
            result = await evaluate(
                self.trainer.eval_agent,
                self.trainer.heldout_tasks,
                name="heldout",
                concurrency=self.config.rollout.max_running,
            )
            self.trainer.backend.forget()
            return result

    def _record(self, step: int, collected: Collected, tally: Tally, learned: Learned) -> None:
        """What the report shows of a step; the first process writes."""
        if not hosts.is_first():
            return
        stats = [{"step": step, **stat.to_dict()} for stat in tally.branch_stats]
        write_branches(self.workdir, step, stats)
        if not self.config.log.tree_tasks:
            return
        trees = record_trees(
            collected.tree,
            collected.tasks,
            **learned.values.for_report(),
            segment_advantages=learned.segment_advantages,
            max_tasks=self.config.log.tree_tasks,
            decode=self.trainer.start.chat.decode,
        )
        write_trees(self.workdir, step, trees)

    def _save(self, metrics: dict[str, Any]) -> None:
        clock, progress = Stopwatch(), self.progress
        with clock.phase("checkpoint"):
            progress.owed = sorted(itertools.chain(*hosts.gather(self._order.owed)))
            self._checkpointer.save(
                self.done,
                self.state,
                host=progress.to_dict(),
                metrics={k: v for k, v in metrics.items() if v is not None},
            )
        self._saved = self.done
        progress.ledger += Ledger(seconds=clock.seconds)

    def _stop(self, error: FleetDead, write: Write) -> NoReturn:
        """Saves what is done and says so."""
        metrics = self._unwritten or {}
        if metrics:
            write(self.done - 1, metrics)
        if self.done > self._saved:
            self._save(metrics)
        raise FleetDead(
            f"{error}. The run stands at step {self.done} and is saved; bring servers back and "
            "start the same command again"
        ) from error


@contextlib.contextmanager
def _writer(config: ml_collections.ConfigDict, workdir: Path, first: int) -> Iterator[Write]:
    """Where a step's metrics go; the first process writes."""
    if not hosts.is_first():
        yield lambda step, metrics: None
        return
    writer = MetricsWriter(
        workdir,
        start_step=first,
        tensorboard=config.log.tensorboard,
        wandb={"project": config.log.wandb} if config.log.wandb else None,
    )
    with writer, ProgressBar(config.steps, start_step=first) as bar:

        def write(step: int, metrics: dict[str, Any]) -> None:
            writer.write(step, metrics)
            bar.update(step, metrics)

        yield write


def _resume(
    config: ml_collections.ConfigDict,
    trainer: Trainer,
    checkpointer: Checkpointer,
    journal: Journal,
) -> tuple[TrainState, Progress, int]:
    """The newest checkpoint, or the beginning; work that was cut off is accounted for."""
    state = trainer.init_state()
    progress, first, saved_by = Progress(0, trainer.episode_cost), 0, 0
    if checkpointer.latest_step is not None:
        restored = checkpointer.restore(state)
        state, first = restored.state, restored.step
        progress = Progress.from_dict(restored.host)
        saved_by = progress.attempt
    if journal.attempt:
        lost = journal.interrupted(first, saved_by=saved_by)
        rollouts, tokens = hosts.total(lost.rollouts), hosts.total(lost.tokens)
        progress.lost["rollouts"] += rollouts
        progress.lost["tokens"] += tokens
        rich.console.Console(stderr=True, quiet=not hosts.is_first()).print(
            f"resuming at step {first}; {rollouts} finished rollouts ({tokens} tokens) "
            "of later steps are counted as replayed and played again",
            highlight=False,
        )
    progress.attempt = journal.attempt
    return state, progress, first


def _finish(
    config: ml_collections.ConfigDict,
    workdir: Path,
    progress: Progress,
    latest: Evaluation,
    trainer: Trainer,
) -> dict[str, Any]:
    """Writes the summary and the report."""
    ledger, sums = progress.ledger, progress.sums
    lags = {
        int(name.removeprefix(LAG)): int(count)
        for name, count in sums.items()
        if name.startswith(LAG)
    }
    steps = max(sums.get("steps", 0), 1)
    step_phases = ("rollout", "score", "controller", "critic", "credit", "update", "push", "record")
    step_seconds = sum(ledger.seconds.get(phase, 0.0) for phase in step_phases)
    report = workdir / "report.html"
    summary = {
        "method": config.method,
        "task": trainer.env.name,
        "seed": config.seed,
        "steps": config.steps,
        "success_before": progress.success_before,
        "success_after": latest.success,
        "success_std_error": latest.std_error,
        "budget_per_step": config.budget,
        "max_step_tokens": int(sums.get("max_step_tokens", 0)),
        "generated_tokens": {k: getattr(ledger, k) for k in ("base", "branch", "summary")},
        "other_tokens": {k: getattr(ledger, k) for k in ("observation", "prefill", "cached")},
        "replayed": progress.lost,
        "dose": {
            "tokens": int(sums.get("dose_tokens", 0)),
            "optimizer_steps": int(sums.get("dose_steps", 0)),
        },
        "staleness": {
            "tokens": {str(lag): count for lag, count in sorted(lags.items())},
            "max": max(lags, default=0),
            "mixed_rollouts": int(sums.get("mixed", 0)),
            "dropped_rollouts": int(sums.get("dropped", 0)),
            "dropped_tokens": int(sums.get("dropped_tokens", 0)),
        },
        "citations": {
            "asked": int(sums.get("citations_asked", 0)),
            "valid": int(sums.get("citations_valid", 0)),
        },
        "wall_s": {phase: round(s, 2) for phase, s in sorted(ledger.seconds.items())},
        "controller_share": ledger.seconds.get("controller", 0.0) / max(step_seconds, 1e-9),
        "prefix_recomputed_share": sums.get("recomputed_share", 0.0)
        / max(sums.get("branch_steps", 0), 1),
        "packing_efficiency": sums.get("packing_efficiency", 0.0) / steps,
        "recompilations_after_warmup": int(sums.get("recompilations", 0)),
        "technical_failures": int(sums.get("technical_failures", 0)),
        "num_parameters": trainer.num_parameters,
        "versions": {
            "python": platform.python_version(),
            **{
                name: importlib.metadata.version(name) for name in ("focus", "jax", "flax", "optax")
            },
        },
        "report": str(report),
    }
    if not hosts.is_first():
        return summary
    write_atomically(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    build_report(workdir, report)
    rich.console.Console().print(format_summary(summary, title=f"{config.method}, {workdir}"))
    return summary
