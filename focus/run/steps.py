"""One step of the method, in the order it is written down, and what is noted about it.

`collect_step` waits for a step's rollouts on the event loop; `learn` is all that the devices do
with them, and runs in a thread, so that the rollouts of other steps go on meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from focus.branching.budget import Ledger
from focus.critic.calibration import calibration, error_reduction, standardised_residuals
from focus.engine import EngineError
from focus.learner import hosts
from focus.learner.packing import PackedRows
from focus.learner.scoring import Scores
from focus.learner.state import TrainState
from focus.learner.update import PolicyBatch
from focus.rollout import Collected, EpisodeCost, RolloutsAhead, StepPlay, Stopwatch, Tally
from focus.rollout.values import Values
from focus.run.backends import alive_everywhere
from focus.run.task_order import TaskOrder
from focus.run.trainer import Trainer
from focus.types import CreditBatch, Trajectory

# Running sums of tokens, by training steps that their weights were behind.
LAG = "tokens_lag_"


@dataclasses.dataclass
class Progress:
    """What a run knows of itself besides its arrays; saved with every checkpoint.

    Attributes:
      cursor: tasks drawn so far, by steps that are finished.
      episode_cost: predicted tokens of one base episode, and the weight of the prediction.
      owed: places before the cursor that steps in flight have drawn, see `TaskOrder`.
      ledger: totals of all finished steps.
      lost: rollouts and tokens of steps that were cut off and played again.
      attempt: process that wrote this, see `Journal`.
      success_before: held-out success of the warm start.
      sums: running sums for the summary (budget use, recomputed prefixes, packing ...).
    """

    cursor: int
    episode_cost: EpisodeCost
    owed: list[int] = dataclasses.field(default_factory=list)
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


# Rollouts.


async def collect_step(
    trainer: Trainer, state: TrainState, play: StepPlay, ahead: RolloutsAhead, clock: Stopwatch
) -> Collected:
    """The step's base rollouts, and branches where they teach most.

    Args:
      trainer: of the run.
      state: holds the critic whose belief says where.
      play: of the step.
      ahead: has its base rollouts, or plays them now.
      clock: is told how long base rollouts were played before they were waited for.

    Raises:
      FleetDead: nobody samples any more.
    """
    base, waited_s = await alive_everywhere(ahead.take(play.step))
    clock.seconds["ahead"] = max(base.seconds - waited_s, 0.0)
    scorer = functools.partial(trainer.valuation.score_states, state)
    return await alive_everywhere(play.branch(base, scorer, waited_s=min(waited_s, base.seconds)))


async def tally_step(collected: Collected, play: StepPlay, order: TaskOrder) -> Tally:
    """What the rollouts of all processes come to; the step's tasks are settled.

    Raises:
      BudgetExceeded: they generated more than the step may.
    """
    own = Tally.of(collected, play.screen), order.drawn
    tallies, drawn = zip(*await asyncio.to_thread(hosts.gather, own))
    order.settle(play.step, max(drawn))
    return functools.reduce(operator.add, tallies)


# Learning.


class EngineMismatch(EngineError):
    """The engine samples from another model than the one that is trained."""


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a step has taught.

    Attributes:
      state: after the update.
      values: of all states of the step.
      segment_advantages: [B, S], as the estimator gave them.
      trained_advantages: [B, S] mean advantage of a segment's tokens as the policy was trained
        with it: normalised and weighted. NaN where no token of the segment was trained.
      metrics: numbers to be logged.
      dose: tokens with a gradient, over all processes.
      packing_efficiency: see `PackedRows`, of all processes.
    """

    state: TrainState
    values: Values
    segment_advantages: np.ndarray
    trained_advantages: np.ndarray
    metrics: dict[str, float | None]
    dose: int
    packing_efficiency: float


def learn(
    trainer: Trainer, state: TrainState, collected: Collected, step: int, clock: Stopwatch
) -> Learned:
    """Critic, credit and policy, from the rollouts of one step.

    Args:
      trainer: of the run.
      state: before the step; its arrays are donated.
      collected: the rollouts.
      step: which; the weights that are trained are those after `step` steps.
      clock: measures the phases.

    Raises:
      FloatingPointError: a loss that is not finite.
      EngineMismatch: the engine samples from another model than is trained.
    """
    config, valuation, assignment = trainer.config, trainer.valuation, trainer.assignment
    trajectories = collected.tree.trajectories

    # One forward pass over everything, branches included, each shared prefix once.
    with clock.phase("score"):
        packed = trainer.pack(trajectories)
        scores = trainer.score(state.params, packed.rows)
        hidden = valuation.features(state, packed, scores)
        belief = valuation.belief(state, trajectories, hidden)
        # Estimator and loss may both want it, or neither.
        reference = functools.cache(functools.partial(trainer.reference_logp, packed))

    # 4. The critic as it stood before this step's outcomes, refined by branches.
    # 5. The critic learns from old and new evidence.
    with clock.phase("critic"):
        values = valuation.refine(state, collected, belief)
        against_outcomes = _against_outcomes(collected.tree.base, values.mean)
        batch = assignment.batch(trajectories, version=step)
        if config.critic.enabled:
            new_critic, critic_metrics = valuation.learn(
                state, trajectories, packed, batch, hidden, belief
            )
            confidence, misses = valuation.calibrate(state, collected, belief)
            state = dataclasses.replace(state, critic=new_critic)
            if config.critic.values_from != "before":
                hidden = valuation.features(state, packed, scores)
                belief = valuation.belief(state, trajectories, hidden, own_fold=True)
                values = valuation.refine(state, collected, belief)
            # Only now: what is subtracted from this step's outcomes must not know them.
            state = dataclasses.replace(state, confidence=confidence)
            critic_metrics |= misses
        else:
            critic_metrics = {}

    # 6. Segment advantages, spread over tokens.
    with clock.phase("credit"):
        batch = assignment.with_values(batch, trajectories, values)
        batch = assignment.with_channels(batch, trajectories, packed, scores, reference, step)
        credits = assignment.estimate(batch)

    # 7. Clipped policy update.
    with clock.phase("update"):
        policy_batch = assignment.policy_batch(
            trajectories, packed, scores, reference, batch, credits, step
        )
        state, update_metrics = trainer.update(state, policy_batch)

    dose = hosts.total(int(np.count_nonzero(policy_batch.mask & (policy_batch.advantages != 0))))
    agreement = _agreement(packed, scores, batch, policy_batch)
    _check_agreement(agreement["logp_difference/mean"], config.rollout.max_logp_difference)
    return Learned(
        state=state,
        values=values,
        segment_advantages=np.asarray(credits.segment_advantages),
        trained_advantages=_trained_advantages(packed, policy_batch, batch),
        metrics={
            **{f"policy/{name}": value for name, value in update_metrics.items()},
            **{f"critic/{name}": value for name, value in critic_metrics.items()},
            **against_outcomes,
            **agreement,
            "credit/std": _advantage_std(policy_batch),
            "dose/tokens": dose,
            "dose/steps": update_metrics["optimizer_steps"],
        },
        dose=dose,
        packing_efficiency=hosts.mean(packed.packing_efficiency, 1.0),
    )


def _against_outcomes(base: Sequence[Trajectory], mean: np.ndarray) -> dict[str, float | None]:
    """Squared errors of V and of a constant, against the outcomes of the step's base rollouts.

    V is from before these outcomes were learnt; the constant is their mean, the best there is.
    Over all states of all processes, so that long episodes count for more in both.
    """
    pairs = [
        (trajectory.outcome, value)
        for trajectory, values in zip(base, mean)
        for value in values
        if trajectory.outcome is not None and np.isfinite(value)
    ]
    outcomes, values = np.array(pairs).reshape(-1, 2).T
    count, _, of_constant = hosts.moments(outcomes)
    _, bias, spread = hosts.moments(outcomes - values)
    if not count:
        return {"critic/outcome_error": None, "critic/constant_error": None}
    return {
        "critic/outcome_error": float(spread / count + bias**2),
        "critic/constant_error": float(of_constant / count),
    }


def _trained_advantages(
    packed: PackedRows, policy_batch: PolicyBatch, batch: CreditBatch
) -> np.ndarray:
    trained = np.where(policy_batch.mask, policy_batch.advantages, np.nan)
    trained = packed.to_trajectories(trained, batch.token_mask.shape, fill=np.nan)
    segments = np.asarray(batch.token_segment)
    rows, tokens = np.nonzero(np.isfinite(trained) & (segments >= 0))
    places = rows, segments[rows, tokens]
    total, count = np.zeros((2, *batch.segment_mask.shape))
    np.add.at(total, places, trained[rows, tokens])
    np.add.at(count, places, 1)
    return np.where(count, total / np.maximum(count, 1), np.nan)


def _advantage_std(batch: PolicyBatch) -> float:
    count, _, squares = hosts.moments(np.append(batch.advantages[batch.mask], 0.0))
    return float(np.sqrt(squares / count))


def _agreement(
    packed: PackedRows, scores: Scores, batch: CreditBatch, policy_batch: PolicyBatch
) -> dict[str, float | None]:
    """Engine's against trainer's log-probs, and the policy's entropy.

    Where both had the same weights, the difference is the engine's arithmetic; where the
    engine's were older, the policy has moved besides.
    """
    generated = packed.rows.generated_mask  # all False in a step whose engine was dead
    difference = np.abs(scores.logp - policy_batch.behaviour_logp)
    stale = packed.to_rows(batch.staleness) > 0
    same = difference[generated & ~stale]
    mean, largest = _mean(same), max(hosts.gather(float(same.max(initial=0.0))))
    return {
        "policy/entropy": _mean(scores.entropy[generated]),
        "logp_difference/mean": mean,
        "logp_difference/max": None if mean is None else largest,
        "logp_difference/mean_stale": _mean(difference[generated & stale]),
    }


def _check_agreement(mean: float | None, most: float) -> None:
    if mean is not None and mean > most:
        raise EngineMismatch(
            f"log-probs of sampled tokens differ by {mean:.2g} on average between engine and "
            f"trainer, and rollout.max_logp_difference is {most:g}: the engine runs another model "
            "(a config.json that differs in rope_theta or norms loads the same weights without a "
            "complaint). scripts/check_server.py compares a server with a directory; nothing of "
            "this step was trained"
        )


def _mean(values: np.ndarray) -> float | None:
    """Mean over the values of all processes; None where there is none."""
    if not hosts.total(values.size):
        return None
    return hosts.mean(float(values.mean()) if values.size else 0.0, values.size)


# Accounts.


def note(progress: Progress, tally: Tally, learned: Learned, order: TaskOrder) -> None:
    """Adds a step that is done to what the run knows of itself."""
    progress.cursor = order.cursor
    progress.episode_cost = progress.episode_cost.updated(tally.base)
    progress.ledger += tally.ledger
    versions = tally.versions
    progress.add(
        steps=1,
        packing_efficiency=learned.packing_efficiency,
        technical_failures=tally.technical_failures,
        branch_steps=bool(tally.branches),
        recomputed_share=tally.recomputed_share,
        citations_asked=tally.citations_asked,
        citations_valid=tally.citations_valid,
        dose_tokens=learned.dose,
        dose_steps=learned.metrics["dose/steps"],
        mixed=versions.mixed,
        dropped=sum(versions.dropped.values()),
        dropped_tokens=versions.dropped_tokens,
        **{f"{LAG}{lag}": count for lag, count in versions.tokens.items()},
    )
    progress.sums["max_step_tokens"] = max(
        progress.sums.get("max_step_tokens", 0), tally.ledger.spent
    )


def step_metrics(tally: Tally, learned: Learned, progress: Progress, budget: int) -> dict[str, Any]:
    """All that is logged of a step but its evaluation and its times."""
    return {
        **_rollout_metrics(tally, budget),
        **tally.versions.to_dict(),
        **learned.metrics,
        "packing_efficiency": learned.packing_efficiency,
        "tokens/cumulative": progress.ledger.spent,
    }


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
        "tools/calls": tally.tool_calls,
        "tools/faults": tally.tool_faults,
        "rollouts/turns": float(np.mean([t.num_segments for t in tally.base] or [0])),
        "citations/valid": tally.valid_citations,
        "branches/states": len(tally.branch_stats),
        "branches/recomputed_share": tally.recomputed_share,
        **{f"cached/{kind}": share for kind, share in tally.cached_shares.items()},
    }
    branched = [s for s in tally.branch_stats if s.count]
    if branched:
        report = calibration(
            *(np.array([getattr(s, n) for s in branched]) for n in ("value", "mean", "count"))
        )
        columns = {
            name: np.array([getattr(s, name) for s in branched])
            for name in ("value", "std", "shift", "refined_std", "noise_var", "mean", "count")
        }
        value, tau2, noise = columns["value"], columns["std"] ** 2, columns["noise_var"]
        residuals = standardised_residuals(value, tau2, noise, columns["mean"], columns["count"])
        outcomes = np.full((len(branched), max(s.count for s in branched)), np.nan)
        for row, stat in zip(outcomes, branched):
            row[: stat.count] = stat.outcomes
        refined = value + columns["shift"], columns["refined_std"] ** 2
        reduction = error_reduction(value, tau2, *refined, noise, outcomes)
        costs = [(s.cost_predicted * s.count, s.cost_actual * s.count) for s in branched]
        predicted, actual = np.sum(costs, axis=0)
        metrics |= {
            "critic/error": float(report["value_mse"]),
            "critic/brier": float(report["brier"]),
            "critic/calibration_error": float(report["calibration_error"]),
            **{f"critic/{name}": number for name, number in (residuals | reduction).items()},
            "branches/cost_ratio": float(predicted / max(actual, 1)),
        }
    return metrics
