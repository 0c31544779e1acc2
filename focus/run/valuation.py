"""What a step's states are worth: the critic's belief, refined by branches, and its learning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from focus.critic.losses import fold_of
from focus.learner import hosts
from focus.learner.batches import bucket
from focus.learner.critic_evidence import make_evidence
from focus.learner.critic_on_policy import CriticReader
from focus.learner.packing import PackedRows
from focus.learner.scoring import Scores
from focus.learner.state import TrainState
from focus.rollout import Collected, StepConfig, uninformed_scores
from focus.rollout.values import Values, refine_values, unknown_values
from focus.types import CreditBatch, StateBelief, Trajectory


class Valuation:
    """A run's critic and its dealings with a step's rollouts; without one, nothing is known.

    Args:
      config: of the run.
      critic: None for a method that has none.
      step_config: how a step spends its budget.
      pack: trajectories to rows.
      max_turns: of an episode.
      max_context: of the engine, in tokens.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        critic: CriticReader | None,
        step_config: StepConfig,
        pack: Callable[[Sequence[Trajectory]], PackedRows],
        *,
        max_turns: int,
        max_context: int,
    ):
        self.critic = critic
        self._config, self._step_config, self._pack = config, step_config, pack
        self._max_turns, self._max_context = max_turns, max_context

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
        return self.critic.belief(state.critic, hidden, fold)

    def score_states(self, state: TrainState, base: Sequence[Trajectory]) -> StateBelief:
        """The forward pass that planning reads: `Scorer` of the controller."""
        if self.critic is None:
            return uninformed_scores(base)
        belief = self.belief(state, base, self.features(state, self._pack(base)))
        return belief.rows(len(base))

    def fit(self, state: TrainState, trajectories: Sequence[Trajectory]) -> TrainState:
        """Sets the critic's feature scale from first rollouts; their outcomes are not read."""
        if self.critic is None:
            return state
        packed = self._pack(hosts.deal(trajectories))
        hidden = self.features(state, packed)
        mask = packed.state_mask(hidden.shape[:2])
        critic = self.critic.fit_standardisation(state.critic, hidden, mask)
        return dataclasses.replace(state, critic=critic)

    def refine(self, collected: Collected, belief: StateBelief | None) -> Values:
        """Critic fused with branch outcomes; all unknown without a critic."""
        if belief is None:
            return unknown_values(len(collected.tree.trajectories), self._max_turns + 1)
        return refine_values(collected, belief, self._step_config, max_context=self._max_context)

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
