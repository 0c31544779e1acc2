"""What a step's states are worth: the critic's belief, refined by branches, and its learning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from focus.branching.acquisition import RULES
from focus.critic.confidence import Confidence
from focus.critic.covariance import Residuals, fitted_scales, update_fit
from focus.critic.losses import evidence_id, fold_of
from focus.critic.state import Evidence
from focus.critic.trust import explained_variance, trusted, update_gate
from focus.learner import hosts
from focus.learner.batches import bucket
from focus.learner.critic_evidence import make_evidence
from focus.learner.critic_on_policy import CriticReader
from focus.learner.packing import PackedRows
from focus.learner.scoring import Scores
from focus.learner.signals import policy_signals
from focus.learner.state import TrainState
from focus.rollout import Collected, StepConfig, uninformed_scores
from focus.rollout.step import NO_BRANCHES
from focus.rollout.values import Values, refine_values, unknown_values
from focus.types import CreditBatch, StateBelief, Trajectory


class Valuation:
    """A run's critic and its dealings with a step's rollouts; without one, nothing is known.

    Args:
      config: of the run.
      critic: None for a method that has none.
      step_config: how a step spends its budget.
      pack: trajectories to rows.
      score: rows to the policy's scores.
      max_turns: of an episode.
      max_context: of the engine, in tokens.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        critic: CriticReader | None,
        step_config: StepConfig,
        pack: Callable[[Sequence[Trajectory]], PackedRows],
        score: Callable[[Any, Any], Scores],
        *,
        max_turns: int,
        max_context: int,
    ):
        self.critic = critic
        self._config, self._step_config = config, step_config
        self._pack, self._score = pack, score
        self._max_turns, self._max_context = max_turns, max_context
        self._fitted = config.critic.covariance == "fitted"
        self._scales = jax.jit(fitted_scales)
        self._add = jax.jit(_add)

    def features(
        self, state: TrainState, packed: PackedRows, scores: Scores | None = None
    ) -> np.ndarray | None:
        """[B, S + 1, H] hidden states at states, as the critic reads them; None without one.

        Args:
          state: holds the model that is read.
          packed: rows with the states.
          scores: the policy's of these rows, where they are at hand.
        """
        if self.critic is None:
            return None
        hidden = self.critic.features(state, packed.rows, scores)
        buckets = tuple(self._config.learner.row_buckets)
        rows = bucket(packed.num_trajectories, buckets, "learner.row_buckets")
        return packed.states_to_trajectories(hidden, (rows, self._max_turns + 1))

    def belief(
        self,
        state: TrainState,
        trajectories: Sequence[Trajectory],
        hidden: np.ndarray | None,
        *,
        own_fold: bool = False,
    ) -> StateBelief | None:
        """What the critic believes of all states; None without a critic.

        Args:
          state: holds the critic.
          trajectories: rows of `hidden`.
          hidden: [B, S + 1, H], see `features`.
          own_fold: with cross-fitting, read a task's states with the members that never train
            on it.
        """
        if self.critic is None:
            return None
        fold = None
        if self.critic.config.num_folds > 1 and own_fold:
            fold = np.zeros(hidden.shape[0], np.int32)
            fold[: len(trajectories)] = [
                fold_of(t.task_id, self.critic.config.num_folds) for t in trajectories
            ]
        belief = self.critic.belief(state.critic, hidden, fold)
        if not self._fitted:
            return belief
        scales = self._scales(hosts.local(state.confidence.covariance))
        return dataclasses.replace(belief, scales=jax.device_get(scales))

    @property
    def reads_policy(self) -> bool:
        """Whether planning reads what the policy's scoring pass says of segments."""
        step = self._step_config
        if step.rule == NO_BRANCHES:
            return False
        read = {"score_norm", "entropy", "nll", "log_ratio", "cut"} & set(RULES[step.rule].channels)
        return step.weight == "score_norm" or bool(read)

    def score_states(self, state: TrainState, base: Sequence[Trajectory]) -> StateBelief:
        """The forward pass that planning reads: `Scorer` of the controller."""
        scores, packed = None, None
        if self.critic is not None or self.reads_policy:
            packed = self._pack(base)
        if self.reads_policy:
            scores = self._score(state.params, packed.rows)
        if self.critic is None:
            belief = uninformed_scores(base)
        else:
            belief = self.belief(state, base, self.features(state, packed, scores)).rows(len(base))
        if scores is None:
            return belief
        signals = policy_signals(base, packed, scores, belief.mean.shape)
        return dataclasses.replace(belief, signals=signals)

    def fit(self, state: TrainState, trajectories: Sequence[Trajectory]) -> TrainState:
        """Sets the critic's feature scale from first rollouts; their outcomes are not read."""
        if self.critic is None:
            return state
        packed = self._pack(hosts.deal(trajectories))
        hidden = self.features(state, packed)
        mask = packed.state_mask(hidden.shape[:2])
        critic = self.critic.fit_standardisation(state.critic, hidden, mask)
        return dataclasses.replace(state, critic=critic)

    def refine(self, state: TrainState, collected: Collected, belief: StateBelief | None) -> Values:
        """Critic fused with outcomes; all unknown without a critic."""
        if belief is None:
            return unknown_values(len(collected.tree.trajectories), self._max_turns + 1)
        use = not self._config.critic.gate or bool(
            np.all(jax.device_get(trusted(hosts.local(state.confidence.gate))))
        )
        return refine_values(
            collected, belief, self._step_config, max_context=self._max_context, trusted=use
        )

    def calibrate(
        self, state: TrainState, collected: Collected, belief: StateBelief
    ) -> tuple[Confidence, dict[str, float]]:
        """What a step's outcomes say of the critic that had not learnt from them.

        Args:
          state: holds the confidence before.
          collected: the step's rollouts.
          belief: of that critic about them.

        Returns:
          The confidence after, for the next step, and metrics.
        """
        size = self._config.critic.evidence_bucket
        residuals = hosts.concatenate(_padded(residuals_of(collected, belief), size))
        misses = hosts.concatenate(_padded(misses_of(collected, belief), size))
        new = self._add(hosts.local(state.confidence), *jax.device_put((residuals, misses)))
        scales = jax.device_get(self._scales(new.covariance))
        metrics = {
            f"scale_{field.name}": float(getattr(scales, field.name))
            for field in dataclasses.fields(scales)
        }
        metrics["explained_variance"] = float(explained_variance(new.gate)[0])
        return self.critic.replicate(new), metrics

    def pretrain(self, state: TrainState, evidence: dict[str, np.ndarray]) -> TrainState:
        """Lets the critic learn from episodes that were there before the first step.

        Args:
          state: with the critic as drawn.
          evidence: see `focus.run.head_start.state_evidence`.
        """
        c = self._config
        columns = {
            "features": evidence["features"].astype(np.float32),
            "target": evidence["outcome"] * c.credit.discount ** (evidence["segments_left"] - 1.0),
            "weight": evidence["share"],
            "cost": evidence["cost"],
            "cost_weight": np.ones_like(evidence["cost"]),
            "bootstrap_id": evidence["episode"],
            "fold": (evidence["task"] % self.critic.config.num_folds).astype(np.int32),
            "mask": np.ones(len(evidence["cost"]), bool),
        }
        critic = self.critic.pretrain(
            state.critic,
            Evidence(**columns),
            jax.random.fold_in(jax.random.key(c.seed), 2**31 - 1),
            epochs=c.critic.pretrain_epochs,
        )
        return dataclasses.replace(state, critic=critic)

    def learn(
        self,
        state: TrainState,
        trajectories: Sequence[Trajectory],
        packed: PackedRows,
        batch: CreditBatch,
        hidden: np.ndarray,
        belief: StateBelief,
    ) -> tuple[Any, dict[str, float]]:
        """One step's evidence into the critic."""
        c = self._config
        evidence, index = make_evidence(
            trajectories,
            batch,
            hidden,
            belief.mean[: len(batch.row_mask)],
            size=c.critic.evidence_bucket,
            num_folds=self.critic.config.num_folds,
            truncation=c.credit.truncation,
            discount=c.credit.discount,
            lambda_=c.critic.lambda_,
        )
        step = int(jax.device_get(state.step))
        key = jax.random.fold_in(jax.random.key(c.seed), step)
        return self.critic.learn(state.critic, evidence, key, packed=packed, index=index)


def _padded(columns: dict[str, np.ndarray], smallest: int) -> dict[str, np.ndarray]:
    """Rows padded to `smallest` times a power of two; padding has `mask` False."""
    count, size = len(columns["mask"]), smallest
    while size < count:
        size *= 2
    return {
        name: np.pad(x, [(0, size - count)] + [(0, 0)] * (x.ndim - 1))
        for name, x in columns.items()
    }


def _add(confidence: Confidence, residuals: dict, misses: dict) -> Confidence:
    return Confidence(
        covariance=update_fit(confidence.covariance, Residuals(**residuals)),
        gate=update_gate(confidence.gate, **misses),
    )


def residuals_of(collected: Collected, belief: StateBelief) -> dict[str, np.ndarray]:
    """Fields of `Residuals`: branched states, and the outcomes of base rollouts at their start."""
    base = collected.tree.base
    index_of = {t.id: b for b, t in enumerate(base)}
    seen: dict[tuple[int, int, bool], list[float]] = {}
    for b, trajectory in enumerate(base):
        if trajectory.outcome is not None and trajectory.states[0].prompt_ids:
            seen[b, 0, True] = [trajectory.outcome]
    for branch in collected.tree.branches:
        if branch.outcome is not None:
            place = index_of[branch.parent], branch.parent_state, False
            seen.setdefault(place, []).append(branch.outcome)
    places = list(seen)
    row, state, is_base = (np.array(x) for x in zip(*places)) if places else np.zeros((3, 0), int)
    outcomes = [np.array(y, np.float64) for y in seen.values()]
    task = [evidence_id(base[b].task_id) >> 1 for b in row.tolist()]  # 31 bits
    return {
        "value": belief.mean[row, state].astype(np.float32),
        "mean": np.array([y.mean() for y in outcomes], np.float32),
        "count": np.array([y.size for y in outcomes], np.int32),
        "outcome_variance": np.array(
            [y.var(ddof=1) if y.size > 1 else 0.0 for y in outcomes], np.float32
        ),
        "spread": belief.noise_var[row, state].astype(np.float32),
        "ensemble": belief.error_features[row, state].astype(np.float32),
        "task": np.array(task, np.int32),
        "rollout": row.astype(np.int32),
        "position": state.astype(np.int32),
        "is_base": is_base.astype(bool),
        "mask": np.ones(len(places), bool),
    }


def misses_of(collected: Collected, belief: StateBelief) -> dict[str, np.ndarray]:
    """Arguments of `update_gate`: all states of base rollouts with an outcome."""
    rows = []
    for b, trajectory in enumerate(collected.tree.base):
        count = len(trajectory.segments)
        if trajectory.outcome is not None and count:
            rows += [(belief.mean[b, j], trajectory.outcome, 1.0 / count) for j in range(count)]
    value, outcome, weight = np.array(rows, np.float32).reshape(-1, 3).T
    return {"value": value, "outcome": outcome, "weight": weight, "mask": np.ones(len(rows), bool)}
