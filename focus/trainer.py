"""The compiled parts of a run, and how a step's rollouts pass through them.

A `Trainer` is made once from a config. It holds functions and fixed shapes; everything that
changes is in the `TrainState` that goes in and comes out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from focus import experiment
from focus.credit import estimate
from focus.credit.primitives import masked_whiten
from focus.critic.losses import fold_of
from focus.engines import ENGINES
from focus.learner import channels, hosts, losses, packing, sharding
from focus.learner.adapters import Adapters
from focus.learner.batches import bucket, credit_batch, padded
from focus.learner.compilations import compilations
from focus.learner.critic import StateBelief
from focus.learner.evidence import make_evidence
from focus.learner.scoring import Scores, make_score_fn, policy_model
from focus.learner.state import TrainState, init_state, make_optimizer
from focus.learner.update import PolicyBatch, make_policy_update
from focus.policy import model as models
from focus.rollout import (
    Collected,
    Engine,
    EpisodeCost,
    Freshness,
    StateScores,
    uninformed_scores,
)
from focus.task_order import TaskOrder
from focus.tasks.base import Environment
from focus.types import Array, Credit, CreditBatch, Trajectory
from focus.values import Values, refine_values, state_scores, unknown_values
from focus.warm_start import WarmStart


class Trainer:
    """Compiled functions of a run, and the engine and agents that play.

    Args:
      config: of the run, validated.
      env: the environment.
      start: tokenizer and initial parameters.

    Raises:
      ValueError: sizes that do not fit together.
    """

    def __init__(self, config: ml_collections.ConfigDict, env: Environment, start: WarmStart):
        self.config, self.env, self.start = config, env, start
        self.model = model = experiment.model_config(config)
        start.chat.check_model(model.vocab_size)
        self.num_parameters = models.num_params(model)
        self.step_config = experiment.step_config(config)
        self.episode_cost = EpisodeCost(float(config.rollout.episode_tokens))
        self.mesh = sharding.make_mesh(**config.mesh.to_dict())
        sharding.check_mesh(
            self.mesh,
            micro_rows=config.learner.micro_rows,
            row_length=config.learner.row_length,
            attention=model.attention,
            num_kv_heads=model.num_kv_heads,
        )
        self._optimizer = make_optimizer(
            experiment.optimizer_config(config), experiment.trained_axes(config)
        )
        policy = policy_model(model, logprob_chunk=config.learner.logprob_chunk or None)
        self.adapters = self._make_adapters()
        frozen = None if self.adapters is None else self.adapters.frozen
        self.score = make_score_fn(
            policy,
            mesh=self.mesh,
            micro_rows=config.learner.micro_rows,
            temperature=config.rollout.temperature,
            frozen=frozen,
        )
        self.critic = None
        if config.critic.enabled:
            self.critic = experiment.make_critic(
                config, model, policy, start.params, score=self.score, mesh=self.mesh
            )
        self.state_shardings = sharding.shardings_of(
            jax.eval_shape(self._init, start.params), self.mesh
        )
        self._loss_config = experiment.loss_config(config)
        self.update = make_policy_update(
            policy,
            self._optimizer,
            self._loss_config,
            experiment.update_config(config),
            mesh=self.mesh,
            shardings=self.state_shardings,
            frozen=frozen,
        )
        hparams = experiment.estimator_hparams(config)
        self._estimate = jax.jit(functools.partial(estimate, config.credit.estimator, **hparams))
        self._channels = experiment.estimator_channels(config)
        self._whiten = jax.jit(masked_whiten)
        self._sequence_log_ratio = jax.jit(
            functools.partial(losses.sequence_log_ratio, level=self._loss_config.importance_level)
        )
        self.backend = ENGINES[config.rollout.engine](config, model, start.chat, start.params)
        make_agent = functools.partial(
            experiment.make_agent, config, env, start.chat, self.engine, retry=self.backend.retry
        )
        self.agent = make_agent(temperature=config.rollout.temperature, run_seed=config.seed)
        # Held-out tasks are played with the same random numbers in every run and at every step.
        self.eval_agent = make_agent(
            temperature=config.evaluate.temperature, run_seed=0, closing=False
        )
        self._train_tasks = env.tasks("train")
        self.heldout_tasks = env.tasks("heldout")[: config.evaluate.num_tasks]

    @property
    def compilations(self) -> int:
        """Programs that this process has compiled."""
        return compilations()

    def rollout_params(self, state: TrainState) -> Any:
        """The parameters that the engine is to sample with, adapters merged or, where they are
        pushed apart from their base, attached."""
        if self.adapters is None:
            return state.params
        apart = self.config.rollout.push == "adapter"
        return self.adapters.attach(state) if apart else self.adapters.merge(state)

    def save_adapter(self, path: Path, state: TrainState) -> None:
        """Writes the adapters in the layout of PEFT; nothing where all parameters are trained."""
        if self.adapters is not None:
            self.adapters.save(path, state, self.config.model.get("path") or None)

    @property
    def engine(self) -> Engine:
        """Where rollouts are sampled."""
        return self.backend.engine

    def task_order(self, cursor: int = 0, owed: Sequence[int] = ()) -> TaskOrder:
        """The order of training tasks, from a place on; see `TaskOrder`."""
        return TaskOrder(self._train_tasks, self.config.seed, cursor=cursor, owed=owed)

    def screen(self, step: int) -> Freshness:
        """What is not trained on in a step."""
        c = self.config.rollout
        return Freshness(step, max_lag=c.async_depth, mixed=c.mixed_versions)

    def init_state(self) -> TrainState:
        """The state before the first step, born sharded."""
        return jax.jit(self._init, out_shardings=self.state_shardings)(self.start.params)

    def _init(self, params: Any) -> TrainState:
        critic = None
        if self.critic is not None:
            critic = self.critic.init(jax.random.key(self.config.seed), params)
        params, checksum = self._trained(params)
        return init_state(params, self._optimizer, critic, checksum)

    def _trained(self, params: Any) -> tuple[Any, Array | None]:
        """What is trained of the policy, before the first step, and the checksum of the rest."""
        if self.adapters is None:
            return params, None
        return self.adapters.init(jax.random.key(self.config.seed))

    def _make_adapters(self) -> Adapters | None:
        setting = experiment.lora_config(self.config)
        if setting is None:
            return None
        start = self.start
        return Adapters(self.model, setting, start.params, start.checksum(), mesh=self.mesh)

    # Shapes.

    def pack(self, trajectories: Sequence[Trajectory]) -> packing.PackedRows:
        """Trajectories to rows, every shared prefix once where the model allows it."""
        c = self.config.learner
        return packing.pack_trajectories(
            trajectories,
            row_length=c.row_length,
            max_nodes=c.max_nodes,
            max_states=c.max_states,
            rows_multiple=c.micro_rows // hosts.count(),
            share_prefixes=models.shares_prefixes(self.model),
        )

    def credit_batch(
        self, trajectories: Sequence[Trajectory], version: int | None = None
    ) -> CreditBatch:
        """What the critic and estimators read of trajectories, one row each; no values yet.

        Args:
          trajectories: base rollouts, then branches.
          version: see `focus.learner.batches.credit_batch`.
        """
        c = self.config
        per_turn = c.rollout.max_turn_tokens + self.agent.contexts.summary_tokens
        return credit_batch(
            trajectories,
            num_segments=self.env.max_turns,
            num_tokens=self.env.max_turns * per_turn,
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
        row_mask = batch.row_mask.copy()
        if not self.config.credit.train_on_branches:
            row_mask[: len(trajectories)] &= [t.parent is None for t in trajectories]
        batch = dataclasses.replace(batch, row_mask=row_mask)
        if self.critic is None:
            return batch
        shape = (len(row_mask), batch.segment_mask.shape[1] + 1)
        return dataclasses.replace(
            batch,
            value=padded(np.nan_to_num(values.refined), shape, "value"),
            value_variance=padded(values.refined_variance, shape, "value_variance"),
        )

    def with_channels(
        self,
        batch: CreditBatch,
        trajectories: Sequence[Trajectory],
        packed: packing.PackedRows,
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
          reference: see `reference_logp`; called if the estimator reads it.
          step: which.
        """
        source = channels.Source(
            trajectories=trajectories,
            batch=batch,
            state_key=getattr(self.env, "state_key", lambda state: state),
            packed=packed,
            entropy=scores.entropy,
            ref_logp=reference,
            # Not of `steps`, which a resumed run may change.
            progress=min(1.0, step / self.config.learner.schedule_steps),
        )
        return channels.fill(self._channels, source)

    # The critic.

    def state_features(
        self, state: TrainState, packed: packing.PackedRows, scores: Scores | None = None
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
        buckets = tuple(self.config.learner.row_buckets)
        rows = bucket(packed.num_trajectories, buckets, "learner.row_buckets")
        return packed.states_to_trajectories(hidden, (rows, self.env.max_turns + 1))

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
          hidden: [B, S + 1, H], see `state_features`.
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

    def score_states(self, state: TrainState, base: Sequence[Trajectory]) -> StateScores:
        """The forward pass that planning reads: `Scorer` of the controller."""
        if self.critic is None:
            return uninformed_scores(base)
        belief = self.belief(state, base, self.state_features(state, self.pack(base)))
        return state_scores(belief, len(base))

    def fit_critic(self, state: TrainState, trajectories: Sequence[Trajectory]) -> TrainState:
        """Sets the critic's feature scale from first rollouts; their outcomes are not read."""
        if self.critic is None:
            return state
        packed = self.pack(hosts.deal(trajectories))
        hidden = self.state_features(state, packed)
        mask = packed.state_mask(hidden.shape[:2])
        critic = self.critic.fit_standardisation(state.critic, hidden, mask)
        return dataclasses.replace(state, critic=critic)

    def refine(self, collected: Collected, belief: StateBelief | None) -> Values:
        """Critic fused with branch outcomes; all unknown without a critic."""
        if belief is None:
            return unknown_values(len(collected.tree.trajectories), self.env.max_turns + 1)
        max_context = self.engine.info().max_context
        return refine_values(collected, belief, self.step_config, max_context=max_context)

    def learn_critic(
        self,
        state: TrainState,
        trajectories: Sequence[Trajectory],
        packed: packing.PackedRows,
        batch: CreditBatch,
        hidden: np.ndarray,
        belief: StateBelief,
    ) -> tuple[Any, dict[str, float]]:
        """One step's evidence into the critic."""
        c = self.config
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

    # Credit and the policy.

    def estimate(self, batch: CreditBatch) -> Credit:
        """Advantages of the configured estimator (NumPy), whitened if the config says so."""
        credit = self._estimate(jax.device_put(batch))
        if self.config.credit.whiten:
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
        state: TrainState,
        trajectories: Sequence[Trajectory],
        packed: packing.PackedRows,
        scores: Scores,
        reference: Callable[[], np.ndarray],
        batch: CreditBatch,
        credit: Credit,
    ) -> PolicyBatch:
        """Credit on the trajectory axis to the rows that the model reads.

        Args:
          state: before the update.
          trajectories: the first rows of the batch.
          packed: the rows.
          scores: the policy's of these rows.
          reference: see `reference_logp`; called if the loss reads it.
          batch: what the estimator has read.
          credit: what it has found.
        """
        c, c_rollout = self.config.credit, self.config.rollout
        weight = np.ones((len(batch.row_mask), 1), np.float32)
        for b, trajectory in enumerate(trajectories):
            if trajectory.parent is not None:
                weight[b] = c.branch_weight
        mask = packed.to_rows(np.asarray(credit.mask))
        if self.critic is not None and jax.device_get(state.step) < self.config.critic.warmup_steps:
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
            ref_logp=reference() if self.config.learner.kl_coefficient else None,
            importance_log_ratio=self._importance_log_ratio(packed, scores, batch),
        )

    def _importance_log_ratio(
        self, packed: packing.PackedRows, scores: Scores, batch: CreditBatch
    ) -> np.ndarray | None:
        """That of each token's whole trajectory, where the loss corrects by trajectories."""
        if not self._loss_config.corrects or self._loss_config.importance_level == "token":
            return None
        old_logp = packed.to_trajectories(scores.logp, batch.token_mask.shape)
        ratios = self._sequence_log_ratio(
            *jax.device_put((old_logp, batch.behaviour_logp, batch.token_mask))
        )
        return packed.to_rows(jax.device_get(ratios))

    def reference_logp(self, packed: packing.PackedRows) -> np.ndarray:
        """[R, L] log-probs under the warm start: a forward pass over all rows."""
        return self.score(self._reference_params, packed.rows).logp

    @functools.cached_property
    def _reference_params(self) -> Any:
        trained = jax.jit(
            lambda params: self._trained(params)[0], out_shardings=self.state_shardings.params
        )
        return trained(self.start.params)
