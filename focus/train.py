"""The training loop. `_step` is one step of the method, in the order it is written down:

base rollouts, a forward pass, branches where they teach most, refined values, the critic,
segment advantages, the policy update, weights to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import operator
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
import rich.console

from focus import experiment, warm_start
from focus.branching.budget import Ledger
from focus.critic.calibration import calibration
from focus.evaluate import Evaluation, evaluate
from focus.journal import Journal, write_atomically
from focus.learner import hosts
from focus.learner.checkpoint import Checkpointer, open_workdir
from focus.learner.state import TrainState
from focus.metrics import MetricsWriter, ProgressBar, format_summary
from focus.report import build_report, record_trees, write_branches, write_trees
from focus.rollout import EpisodeCost, Stopwatch, Tally, collect
from focus.trainer import Trainer


@dataclasses.dataclass
class Progress:
    """What a run knows of itself besides its arrays; saved with every checkpoint.

    Attributes:
      cursor: tasks drawn so far.
      episode_cost: predicted tokens of one base episode, and the weight of the prediction.
      ledger: totals of all finished steps.
      lost: rollouts and tokens of steps that were cut off and played again.
      attempt: process that wrote this, see `Journal`.
      success_before: held-out success of the warm start.
      sums: running sums for the summary (budget use, recomputed prefixes, packing ...).
    """

    cursor: int
    episode_cost: EpisodeCost
    ledger: Ledger = Ledger()
    lost: dict[str, int] = dataclasses.field(default_factory=lambda: {"rollouts": 0, "tokens": 0})
    attempt: int = 0
    success_before: float | None = None
    sums: dict[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Progress:
        """Inverse of `to_dict`."""
        return cls(
            **{
                **record,
                "episode_cost": EpisodeCost(**record["episode_cost"]),
                "ledger": Ledger(**record["ledger"]),
            }
        )

    def add(self, **values: float) -> None:
        """Adds to the running sums."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value


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
    clock = Stopwatch()
    with clock.phase("warm_start"):
        start = warm_start.load_or_make(config, env)
        hosts.agree("warm start", start.checksum())
    with clock.phase("compile"):
        trainer = Trainer(config, env, start)
    checkpointer = Checkpointer(
        workdir, keep_last=config.checkpoint.keep_last, keep_best=config.checkpoint.keep_best
    )
    journal = Journal(workdir, hosts.index())
    journal.attempt = max(hosts.gather(journal.attempt))
    state, progress, first = _resume(config, trainer, checkpointer, journal)

    async with trainer.engine:
        with clock.phase("push"):
            await trainer.engine.set_params(hosts.local(trainer.rollout_params(state)), f"v{first}")

        async def evaluation() -> Evaluation:
            with clock.phase("evaluate"):
                result = await evaluate(
                    trainer.eval_agent,
                    trainer.heldout_tasks,
                    name="heldout",
                    concurrency=config.rollout.max_running,
                )
                # What it leaves in the cache would be gone after a resume: the next step would
                # compute other prefixes, and a resumed run would not equal an unbroken one.
                trainer.engine.flush_cache()
                return result

        with clock.phase("compile"):
            trainer.engine.warmup(filtered=trainer.filtered)
        latest: Evaluation | None = None
        if progress.success_before is None:
            latest = await evaluation()
            progress.success_before = latest.success
            state = trainer.fit_critic(state, latest.trajectories)
        progress.ledger += Ledger(seconds=clock.seconds)
        # Steps of this process in which programs may still compile: shapes that only come with
        # branches, and the policy update once the critic has warmed up.
        warmup_steps = 2
        if config.critic.enabled:
            warmup_steps = max(warmup_steps, config.critic.warmup_steps + 1 - first)
        with _writer(config, workdir, first) as write:
            for step in range(first, config.steps):
                clock = Stopwatch()
                compiled = trainer.compilations
                state, metrics = await _step(
                    trainer, state, progress, step, journal, clock, workdir
                )
                last = step + 1 == config.steps
                if last or (step + 1) % config.evaluate.every == 0:
                    latest = await evaluation()
                    metrics |= latest.to_dict()
                    progress.add(technical_failures=latest.technical_failures)
                if step >= first + warmup_steps:
                    progress.add(recompilations=trainer.compilations - compiled)
                metrics |= {f"time/{phase}": s for phase, s in clock.seconds.items()}
                progress.ledger += Ledger(seconds=clock.seconds)
                write(step, metrics)
                if last or (step + 1) % config.checkpoint.every == 0:
                    with clock.phase("checkpoint"):
                        checkpointer.save(
                            step + 1,
                            state,
                            host=progress.to_dict(),
                            metrics={k: v for k, v in metrics.items() if v is not None},
                        )
                    progress.ledger += Ledger(seconds={"checkpoint": clock.seconds["checkpoint"]})
        if latest is None:  # the run had already finished
            latest = await evaluation()
    trainer.save_adapter(workdir / "adapter", state)
    checkpointer.close()
    journal.close()
    return _finish(config, workdir, progress, latest, trainer)


@contextlib.contextmanager
def _writer(
    config: ml_collections.ConfigDict, workdir: Path, first: int
) -> Iterator[Callable[[int, dict[str, Any]], None]]:
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


async def _step(
    trainer: Trainer,
    state: TrainState,
    progress: Progress,
    step: int,
    journal: Journal,
    clock: Stopwatch,
    workdir: Path,
) -> tuple[TrainState, dict[str, Any]]:
    config = trainer.config

    # 1-3. Base rollouts, the critic's belief about their states, branches where they teach most.
    tasks = trainer.tasks_from(progress.cursor)
    budget = hosts.split(config.budget, step)
    collected = await collect(
        dataclasses.replace(trainer.step_config, budget=budget),
        trainer.agent,
        tasks,
        step=step,
        episode_cost=progress.episode_cost,
        scorer=lambda base: trainer.score_states(state, base),
        on_finished=lambda trajectory: journal.append(step, trajectory),
        process=hosts.index(),
        num_processes=hosts.count(),
    )
    tally = functools.reduce(operator.add, hosts.gather(Tally.of(collected)))
    tally.ledger.remaining(config.budget)  # raises if the budget was passed
    trajectories = collected.tree.trajectories

    # One forward pass over everything, branches included, each shared prefix once.
    with clock.phase("score"):
        packed = trainer.pack(trajectories)
        scores = trainer.score(state.params, packed.rows)
        hidden = trainer.state_features(state, packed, scores)
        belief = trainer.belief(state, trajectories, hidden)

    # 4. The critic as it stood before this step's outcomes, refined by branches.
    # 5. The critic learns from old and new evidence.
    with clock.phase("critic"):
        values = trainer.refine(collected, belief)
        batch = trainer.credit_batch(trajectories)
        if config.critic.enabled:
            new_critic, critic_metrics = trainer.learn_critic(
                state, trajectories, packed, batch, hidden, belief
            )
            state = dataclasses.replace(state, critic=new_critic)
            if config.critic.values_from != "before":
                hidden = trainer.state_features(state, packed, scores)
                belief = trainer.belief(state, trajectories, hidden, own_fold=True)
                values = trainer.refine(collected, belief)
        else:
            critic_metrics = {}

    # 6. Segment advantages, spread over tokens.
    with clock.phase("credit"):
        batch = trainer.with_values(batch, trajectories, values)
        credits = trainer.estimate(batch)

    # 7. Clipped policy update.
    with clock.phase("update"):
        policy_batch = trainer.policy_batch(state, trajectories, packed, scores, batch, credits)
        state, update_metrics = trainer.update(state, policy_batch)

    # 8. New weights to the engine, under a new version.
    with clock.phase("push"):
        await trainer.engine.set_params(hosts.local(trainer.rollout_params(state)), f"v{step + 1}")

    with clock.phase("record"):
        if hosts.is_first():
            stats = [{"step": step, **stat.to_dict()} for stat in tally.branch_stats]
            write_branches(workdir, step, stats)
        if hosts.is_first() and config.log.tree_tasks:
            write_trees(
                workdir,
                step,
                record_trees(
                    collected.tree,
                    tasks,
                    **values.for_report(),
                    segment_advantages=np.asarray(credits.segment_advantages),
                    max_tasks=config.log.tree_tasks,
                    decode=trainer.start.chat.decode,
                ),
            )
    for phase, seconds in collected.ledger.seconds.items():
        clock.seconds[phase] = clock.seconds.get(phase, 0.0) + seconds
    # Tasks were dealt out in turn: some that others had time for, a slower process has not played.
    progress.cursor += tally.most_tasks * hosts.count()
    progress.episode_cost = progress.episode_cost.updated(tally.base)
    progress.ledger += tally.ledger
    dose = hosts.total(int(np.count_nonzero(policy_batch.mask & (policy_batch.advantages != 0))))
    packing_efficiency = hosts.mean(packed.packing_efficiency, 1.0)
    progress.add(
        steps=1,
        packing_efficiency=packing_efficiency,
        technical_failures=tally.technical_failures,
        branch_steps=bool(tally.branches),
        recomputed_share=tally.recomputed_share,
        dose_tokens=dose,
        dose_steps=update_metrics["optimizer_steps"],
    )
    progress.sums["max_step_tokens"] = max(
        progress.sums.get("max_step_tokens", 0), tally.ledger.spent
    )
    generated = packed.rows.generated_mask  # all False in a step whose engine was dead
    difference = np.abs(scores.logp - policy_batch.behaviour_logp)[generated]
    count, _, squares = hosts.moments(np.append(policy_batch.advantages[policy_batch.mask], 0.0))
    largest = max(hosts.gather(float(difference.max(initial=0.0))))
    difference, entropy = _mean(difference), _mean(scores.entropy[generated])
    metrics = {
        **_rollout_metrics(tally, config.budget),
        **{f"policy/{name}": value for name, value in update_metrics.items()},
        **{f"critic/{name}": value for name, value in critic_metrics.items()},
        "policy/entropy": entropy,
        "logp_difference/mean": difference,
        "logp_difference/max": None if difference is None else largest,
        "credit/std": float(np.sqrt(squares / count)),
        "dose/tokens": dose,
        "dose/steps": update_metrics["optimizer_steps"],
        "packing_efficiency": packing_efficiency,
        "tokens/cumulative": progress.ledger.spent,
    }
    return state, metrics


def _mean(values: np.ndarray) -> float | None:
    """Mean over the values of all processes; None where there is none."""
    if not hosts.total(values.size):
        return None
    return hosts.mean(float(values.mean()) if values.size else 0.0, values.size)


def _rollout_metrics(tally: Tally, budget: int) -> dict[str, Any]:
    """What the rollouts of a step say: success, ledger, and the critic held against branches."""
    scored = [t for t in tally.base if t.outcome is not None]
    ledger = tally.ledger.to_dict()
    metrics = {name: value for name, value in ledger.items() if name.startswith("tokens/")}
    metrics |= {
        "budget": budget,
        "train/success": float(np.mean([t.success for t in scored])) if scored else None,
        "rollouts/base": len(tally.base),
        "rollouts/branch": tally.branches,
        "rollouts/cut": tally.cut,
        "rollouts/tasks": tally.num_tasks,
        "rollouts/technical_failures": tally.technical_failures,
        "rollouts/turns": float(np.mean([t.num_segments for t in tally.base])),
        "branches/states": len(tally.branch_stats),
        "branches/recomputed_share": tally.recomputed_share,
    }
    branched = [s for s in tally.branch_stats if s.count]
    if branched:
        report = calibration(
            *(np.array([getattr(s, n) for s in branched]) for n in ("value", "mean", "count"))
        )
        costs = [(s.cost_predicted * s.count, s.cost_actual * s.count) for s in branched]
        predicted, actual = np.sum(costs, axis=0)
        metrics |= {
            "critic/error": float(report["value_mse"]),
            "critic/brier": float(report["brier"]),
            "critic/calibration_error": float(report["calibration_error"]),
            "branches/cost_ratio": float(predicted / max(actual, 1)),
        }
    return metrics


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
