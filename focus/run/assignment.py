"""Credit for a step's tokens: from rollouts and values to the batch that the policy learns from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import ml_collections
import numpy as np

from focus.credit import estimate
from focus.credit.primitives import masked_whiten
from focus.learner import hosts, losses, signals
from focus.learner.batches import credit_batch, padded
from focus.learner.packing import PackedRows
from focus.learner.scoring import Scores
from focus.learner.update import PolicyBatch
from focus.rollout import Agent
from focus.rollout.values import Values
from focus.run import experiment, learning
from focus.tasks.base import Environment
from focus.types import Array, Credit, CreditBatch, Trajectory


class Assignment:
    """The estimator of a run, what it reads, and what becomes of what it says.

    Args:
      config: of the run.
      env: whose states have keys.
      agent: knows how many tokens a turn may have.
    """

    def __init__(self, config: ml_collections.ConfigDict, env: Environment, agent: Agent):
        self._config, self._env, self._agent = config, env, agent
        hparams = experiment.estimator_hparams(config)
        self._estimate = jax.jit(functools.partial(estimate, config.credit.estimator, **hparams))
        self._channels = experiment.estimator_channels(config)
        self._whiten = jax.jit(masked_whiten)
        self._loss_config = learning.loss_config(config)
        self._sequence_log_ratio = jax.jit(
            functools.partial(losses.sequence_log_ratio, level=self._loss_config.importance_level)
        )

    def batch(self, trajectories: Sequence[Trajectory], version: int | None = None) -> CreditBatch:
        """What the critic and estimators read of trajectories, one row each; no values yet.

        Args:
          trajectories: base rollouts, then branches.
          version: see `focus.learner.batches.credit_batch`.
        """
        c = self._config
        per_turn = c.rollout.max_turn_tokens + self._agent.contexts.summary_tokens
        return credit_batch(
            trajectories,
            num_segments=self._env.max_turns,
            num_tokens=self._env.max_turns * per_turn,
            num_rows=tuple(c.learner.row_buckets),
            num_continuations=c.branching.max_per_state,
            discount=c.credit.discount,
            version=version,
        )

    def with_values(
        self, batch: CreditBatch, trajectories: Sequence[Trajectory], values: Values
    ) -> CreditBatch:
        """The batch that the estimator reads: refined values, and the rows to train on.

        Branches leave the rows (not the continuations) if the policy is not trained on them.
        """
        c, row_mask = self._config, batch.row_mask.copy()
        if not c.credit.train_on_branches:
            row_mask[: len(trajectories)] &= [t.parent is None for t in trajectories]
        batch = dataclasses.replace(batch, row_mask=row_mask)
        if not c.critic.enabled:
            return batch
        shape = (len(row_mask), batch.segment_mask.shape[1] + 1)
        return dataclasses.replace(
            batch,
            value=padded(np.nan_to_num(values.refined), shape, "value"),
            value_variance=padded(values.refined_variance, shape, "value_variance"),
            value_covariance=(
                padded(values.covariance, shape, "value_covariance")[:, :-1]
                if c.critic.covariance == "fitted"
                else None
            ),
            baseline=_for_rows(values.baseline, len(row_mask)) if c.critic.gate else None,
        )

    def with_channels(
        self,
        batch: CreditBatch,
        trajectories: Sequence[Trajectory],
        packed: PackedRows,
        scores: Scores,
        reference: Callable[[], np.ndarray],
        step: int,
    ) -> CreditBatch:
        """The batch with what else the estimator reads, made from the step's rollouts.

        Args:
          batch: core channels, and values.
          trajectories: the first rows of the batch.
          packed: the rows that the model reads.
          scores: the policy's of these rows.
          reference: [R, L] log-probs under the warm start; called if the estimator reads it.
          step: which.
        """
        source = signals.Source(
            trajectories=trajectories,
            batch=batch,
            state_key=getattr(self._env, "state_key", lambda state: state),
            packed=packed,
            entropy=scores.entropy,
            ref_logp=reference,
            # Not of `steps`, which a resumed run may change.
            progress=min(1.0, step / self._config.learner.schedule_steps),
        )
        return signals.fill(self._channels, source)

    def estimate(self, batch: CreditBatch) -> Credit:
        """Advantages of the configured estimator (NumPy), whitened if the config says so."""
        credit = self._estimate(jax.device_put(batch))
        if self._config.credit.whiten:
            advantages = self._whitened(credit.advantages, credit.mask)
            credit = dataclasses.replace(credit, advantages=advantages)
        return jax.device_get(credit)

    def _whitened(self, advantages: Array, mask: Array) -> Array:
        """`masked_whiten` over the advantages of all processes."""
        if hosts.count() == 1:
            return self._whiten(advantages, mask)
        everything = jax.device_put(hosts.concatenate(jax.device_get((advantages, mask))))
        rows = len(mask)
        # Each finds its own rows at a multiple of the longest.
        first = hosts.index() * (len(everything[1]) // hosts.count())
        return self._whiten(*everything)[first : first + rows]

    def policy_batch(
        self,
        trajectories: Sequence[Trajectory],
        packed: PackedRows,
        scores: Scores,
        reference: Callable[[], np.ndarray],
        batch: CreditBatch,
        credit: Credit,
        step: int,
    ) -> PolicyBatch:
        """Credit on the trajectory axis to the rows that the model reads.

        Args:
          trajectories: the first rows of the batch.
          packed: the rows.
          scores: the policy's of these rows.
          reference: [R, L] log-probs under the warm start; called if the loss reads it.
          batch: what the estimator has read.
          credit: what it has found.
          step: which.
        """
        c, c_rollout = self._config.credit, self._config.rollout
        weight = np.ones((len(batch.row_mask), 1), np.float32)
        for b, trajectory in enumerate(trajectories):
            if trajectory.parent is not None:
                weight[b] = c.branch_weight
        mask = packed.to_rows(np.asarray(credit.mask))
        if self._config.critic.enabled and step < self._config.critic.warmup_steps:
            # A critic that has seen nothing turns noise into advantages.
            mask = np.zeros_like(mask)
        if batch.staleness is not None and batch.staleness.max(initial=0) > c_rollout.async_depth:
            raise ValueError(
                f"tokens {batch.staleness.max()} versions old, more than rollout.async_depth = "
                f"{c_rollout.async_depth}, came to the policy's loss; screen rollouts first"
            )
        return PolicyBatch(
            rows=packed.rows,
            mask=mask,
            advantages=packed.to_rows(np.asarray(credit.advantages) * weight),
            old_logp=scores.logp,
            behaviour_logp=packed.to_rows(batch.behaviour_logp),
            ref_logp=reference() if self._config.learner.kl_coefficient else None,
            importance_log_ratio=self._importance_log_ratio(packed, scores, batch),
        )

    def _importance_log_ratio(
        self, packed: PackedRows, scores: Scores, batch: CreditBatch
    ) -> np.ndarray | None:
        """That of each token's whole trajectory, where the loss corrects by trajectories."""
        if not self._loss_config.corrects or self._loss_config.importance_level == "token":
            return None
        old_logp = packed.to_trajectories(scores.logp, batch.token_mask.shape)
        ratios = self._sequence_log_ratio(
            *jax.device_put((old_logp, batch.behaviour_logp, batch.token_mask))
        )
        return packed.to_rows(jax.device_get(ratios))


def _for_rows(values: np.ndarray, rows: int) -> np.ndarray:
    """[<= B] as [B], NaN behind the end."""
    out = np.full(rows, np.nan, np.float32)
    out[: len(values)] = values
    return out
