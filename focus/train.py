"""The training loop: rollouts, learning, weights to the engine, over and over.

What one step does is in `focus/run/steps.py`. With `rollout.async_depth` > 0 base rollouts of the
next steps are played while the learner works.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import ml_collections

from focus.branching.budget import Ledger
from focus.engine import FleetDead
from focus.evaluate import Evaluation, evaluate
from focus.journal import Journal, write_atomically
from focus.learner import compilations, hosts
from focus.learner.checkpoint import Checkpointer, open_workdir
from focus.learner.state import TrainState
from focus.metrics import (
    MetricsWriter,
    ProgressBar,
    check_writers,
    run_name,
    summary_lines,
    wandb_options,
)
from focus.report import (
    build_report,
    record_evaluation,
    record_trees,
    write_branches,
    write_evaluation,
    write_trees,
)
from focus.rollout import (
    AllRolloutsFailed,
    BaseRollouts,
    Collected,
    RolloutsAhead,
    Slots,
    StepPlay,
    Stopwatch,
    Tally,
)
from focus.run import experiment, head_start, inputs, plugins, stopping, warm_start
from focus.run.backends import alive_everywhere
from focus.run.steps import (
    Learned,
    Progress,
    collect_step,
    learn,
    note,
    step_metrics,
    tally_step,
)
from focus.run.stopping import Stopped, StopRequested, StopSignals
from focus.run.summary import summarise
from focus.run.trainer import Trainer
from focus.terminal import Start

# Takes a step and its metrics.
Write = Callable[[int, dict[str, Any]], None]


def train(
    config: ml_collections.ConfigDict, workdir: str | Path, *, start: Start | None = None
) -> dict[str, Any]:
    """Trains, or goes on where an earlier process with this config and workdir was stopped.

    SIGINT (Ctrl-C) and SIGTERM save what is done and end the run, see `focus.run.stopping`. What
    JAX compiles is kept below `cache_dir`, see `focus.learner.compilations`.

    Several processes call it together, after `hosts.initialize`. They play different tasks with
    parts of one budget; the first writes what is not a checkpoint, the others keep a journal.

    Args:
      config: see `configs/`.
      workdir: gets checkpoints, metrics, the journal of rollouts, trajectory trees, the summary
        and the report; with learner.lora, the adapter as PEFT has it. One directory for all
        processes.
      start: says what is done before the first step; None for one that prints it.

    Returns:
      The summary, as written to `summary.json`.

    Raises:
      ValueError: a config or workdir that cannot work; before any work is done.
      ImportError: a package that `config.log` needs is missing; before any work is done.
      Stopped: a signal has ended the run.
      FloatingPointError: a loss that is not finite; the last checkpoint is intact.
      FleetDead: no server has answered for `rollout.dead_after_s`; the run is saved.
      AllRolloutsFailed: no rollout came back, two steps in a row; the run is saved.
    """
    compilations.keep(experiment.cache_dir(config) / "jax")
    start = start or Start()
    start.quiet = start.quiet or not hosts.is_first()
    with stopping.listen() as signals, hosts.together():
        return asyncio.run(_train(config, workdir, start, signals))


async def _train(
    config: ml_collections.ConfigDict, workdir: str | Path, start: Start, signals: StopSignals
) -> dict[str, Any]:
    hosts.agree("config", config.to_json())
    loaded = plugins.load(config.plugins, workdir)
    experiment.validate(config)
    if hosts.is_first():
        check_writers(config.log)
    with start.part("tasks"):
        env = experiment.make_env(config)
        experiment.heldout_tasks(config, env)  # refuses more than there are
        if config.model.get("path"):
            experiment.read_chat(config, env)
    read = inputs.find(config)
    inputs.check(read, workdir)
    # Only now: a config that cannot work must not claim the workdir.
    may_differ = (*experiment.MAY_DIFFER, *inputs.moved(read, workdir))
    for notice in experiment.notices(config):
        start.say(f"note: {notice}")
    workdir = open_workdir(workdir, json.loads(config.to_json()), may_differ=may_differ)
    plugins.keep(loaded, workdir)
    inputs.keep(read, workdir)
    checkpointer = Checkpointer(
        workdir, keep_last=config.checkpoint.keep_last, keep_best=config.checkpoint.keep_best
    )
    if (summary := _finished(config, workdir, checkpointer, start)) is not None:
        return summary
    clock = Stopwatch()
    with clock.phase("warm_start"), start.part("warm start"):
        warm = warm_start.load_or_make(config, env, start)
        hosts.agree("warm start", warm.checksum())
    with clock.phase("compile"), start.part("compiling"):
        trainer = Trainer(config, env, warm)
        journal = Journal(workdir, hosts.index())
        journal.attempt = max(hosts.gather(journal.attempt))
        begin = _resume(config, trainer, checkpointer, journal, start)
    if begin[2]:
        signals.where = f"stopped where it began, at step {begin[2]} of {config.steps}"
    async with trainer.engine:
        run = _Run(trainer, begin, journal, checkpointer, workdir)
        latest = await run.train(clock, start, signals)
    trainer.save_adapter(workdir / "adapter", run.state)
    checkpointer.close()
    journal.close()
    return _finish(config, workdir, run.progress, latest, trainer)


def _finished(
    config: ml_collections.ConfigDict, workdir: Path, checkpointer: Checkpointer, start: Start
) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do, which is said; None of any other."""
    path, done = workdir / "summary.json", checkpointer.latest_step or 0
    summary = json.loads(path.read_text()) if path.is_file() else {}
    if not all(hosts.gather(done >= config.steps <= summary.get("steps", 0))):
        return None
    checkpointer.close()
    start.close()
    start.say(
        f"{workdir} has already finished: {done} steps, held-out success "
        f"{summary['success_after']:.3f}. For more of them give --config.steps; its report is "
        f"{workdir / 'report.html'}"
    )
    return summary


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
        self._failed_steps = 0  # in a row, up to now
        self._unwritten: dict[str, Any] | None = None

    async def train(self, clock: Stopwatch, start: Start, signals: StopSignals) -> Evaluation:
        """All steps that are left; the run's last evaluation.

        Raises:
          FleetDead, AllRolloutsFailed, Stopped: see `focus.train.train`.
        """
        latest = await self._begin(clock, start)
        start.finish()
        signals.defer()
        depth, steps = self.config.rollout.async_depth, self.config.steps
        with _writer(self.config, self.workdir, self._first) as write:
            async with RolloutsAhead(self._play_base, depth=depth, end=steps) as ahead:
                try:
                    while self.done < steps:
                        latest = await self._step(ahead, write) or latest
                    # Only of a run that was stopped between its last step and its end.
                    return latest or await self._evaluate(clock)
                except (FleetDead, AllRolloutsFailed) as error:
                    self._save_now(write)
                    mend = "bring servers back" if isinstance(error, FleetDead) else "mend that"
                    raise type(error)(
                        f"{error}. The run stands at step {self.done} and is saved; {mend} and "
                        "start the same command again"
                    ) from error
                except StopRequested as request:
                    self._save_now(write)
                    raise Stopped(
                        f"stopped after step {self.done} of {steps}, saved in {self.workdir}",
                        request.signum,
                    ) from None

    async def _begin(self, clock: Stopwatch, start: Start) -> Evaluation | None:
        """Weights to the engine; before the first step of a run, how good the policy is."""
        latest = None
        with start.part("compiling"):
            await self._publish(clock)
            with clock.phase("compile"):
                self.trainer.backend.warmup()
        if self.progress.success_before is None:
            with start.part("held-out tasks"):
                latest = await self._evaluate(clock)
                self.progress.success_before = latest.success
            with clock.phase("critic"):
                self.state = self._prepare_critic(latest, start)
        self.progress.ledger += Ledger(seconds=clock.seconds)
        return latest

    def _prepare_critic(self, latest: Evaluation, start: Start) -> TrainState:
        """What the critic can know before the first step."""
        trainer, c = self.trainer, self.config.critic
        if not (c.enabled and c.pretrain_episodes):
            return trainer.valuation.fit(self.state, latest.trajectories)
        with start.part("critic"):
            evidence = head_start.load_or_make(self.config, trainer.env, trainer.start, start)
            return trainer.valuation.pretrain(self.state, evidence)

    async def _step(self, ahead: RolloutsAhead, write: Write) -> Evaluation | None:
        """One step of the method, and what is due after it."""
        config, trainer, progress, step = self.config, self.trainer, self.progress, self.done
        clock, compiled = Stopwatch(), trainer.compilations

        # 1-3. Base rollouts, the critic's belief about their states, branches where they teach.
        play = self._play(step)
        collected = await collect_step(trainer, self.state, play, ahead, clock)
        tally = await tally_step(collected, play, self._order)
        tally.ledger.remaining(config.budget)  # raises if the budget was passed
        self._check_failures(step, tally)

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
        if hosts.is_first() and self.config.log.tree_tasks:
            records = record_evaluation(
                result.trajectories,
                self.trainer.heldout_tasks,
                decode=self.trainer.start.chat.decode,
            )
            write_evaluation(self.workdir, self.done, records)
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
            trained_advantages=learned.trained_advantages,
            max_tasks=self.config.log.tree_tasks,
            decode=self.trainer.start.chat.decode,
        )
        write_trees(self.workdir, step, trees)

    def _check_failures(self, step: int, tally: Tally) -> None:
        """A step that is lost as a whole teaches nothing; after a second one nothing ever will."""
        self._failed_steps = self._failed_steps + 1 if tally.all_failed else 0
        if self._failed_steps == 2:
            errors = (episode.error for episode in tally.base)
            raise AllRolloutsFailed(f"all rollouts of steps {step - 1} and {step} failed", errors)

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

    def _save_now(self, write: Write) -> None:
        """Saves what is done, in the middle of a step that is not."""
        metrics = self._unwritten or {}
        if metrics:
            write(self.done - 1, metrics)
        if self.done > self._saved:
            self._save(metrics)


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
        wandb=wandb_options(config.to_dict()) if config.log.wandb else None,
    )
    title = run_name(config.to_dict())
    with writer, ProgressBar(config.steps, start_step=first, title=title) as bar:

        def write(step: int, metrics: dict[str, Any]) -> None:
            writer.write(step, metrics)
            bar.update(step, metrics)

        yield write


def _resume(
    config: ml_collections.ConfigDict,
    trainer: Trainer,
    checkpointer: Checkpointer,
    journal: Journal,
    start: Start,
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
        again = (
            f"; {rollouts} finished rollouts ({tokens} tokens) of later steps are counted as "
            "replayed and played again"
        )
        start.say(f"resuming at step {first}{again if rollouts else ''}")
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
    report = workdir / "report.html"
    figures = summarise(trainer, progress, success=latest.success, std_error=latest.std_error)
    summary = figures | {"report": str(report)}
    if hosts.is_first():
        write_atomically(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
        build_report(workdir, report)
        for line in summary_lines(summary):
            print(line)
    return summary
