"""How a run's critic and policy learn, from its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_collections
from jax.sharding import Mesh

from focus.critic.head import CriticConfig
from focus.learner.critic_on_policy import CriticLearner, CriticOptions
from focus.learner.critic_own_backbone import BackboneCritic, BackboneOptions
from focus.learner.losses import PolicyLossConfig
from focus.learner.scoring import PolicyModel
from focus.learner.state import OptimizerConfig
from focus.learner.update import UpdateConfig
from focus.policy import model as models


def make_critic(
    c: ml_collections.ConfigDict,
    model: models.Config,
    policy: PolicyModel,
    params: Any,
    *,
    score: Callable | None,
    mesh: Mesh,
) -> CriticLearner | BackboneCritic:
    """The critic of `config.critic`.

    Args:
      c: of the run.
      model: shape of the policy.
      policy: its functions.
      params: its first parameters; a backbone of the critic's own starts from them.
      score: as from `make_score_fn`; None where no features are computed.
      mesh: the mesh.
    """
    shape = critic_config(c, model)
    if c.critic.backbone == "own":
        return BackboneCritic(shape, backbone_options(c), policy, params, mesh=mesh)
    return CriticLearner(shape, critic_options(c), score, mesh=mesh)


def critic_config(c: ml_collections.ConfigDict, model: models.Config) -> CriticConfig:
    """Shape of the critic of a policy."""
    return CriticConfig(
        feature_dim=model.d_model,
        num_members=c.critic.members,
        hidden_dim=c.critic.width,
        prior_scale=c.critic.prior_scale,
        value=c.critic.value,
        cost_scale=float(c.rollout.episode_tokens),
        num_folds=2 if c.critic.values_from == "crossfit" else 1,
        bootstrap_seed=c.seed,
    )


def critic_options(c: ml_collections.ConfigDict) -> CriticOptions:
    """How a critic that reads the policy's hidden states learns."""
    return CriticOptions(
        learning_rate=c.critic.learning_rate,
        epochs=c.critic.epochs,
        capacity=c.critic.capacity,
        replay_steps=c.critic.replay_steps,
        uncertainty=c.critic.uncertainty,
    )


def backbone_options(c: ml_collections.ConfigDict) -> BackboneOptions:
    """How a critic with a backbone of its own learns."""
    return BackboneOptions(
        learning_rate=c.critic.learning_rate,
        backbone_learning_rate=c.critic.backbone_learning_rate,
        epochs=c.critic.epochs,
        minibatches=c.learner.minibatches,
        micro_rows=c.learner.micro_rows,
        uncertainty=c.critic.uncertainty,
    )


def optimizer_config(c: ml_collections.ConfigDict) -> OptimizerConfig:
    """The policy's optimiser; its schedule counts optimiser steps, the config's training steps."""
    idle_steps = c.critic.warmup_steps if c.critic.enabled else 0
    training_steps = c.learner.schedule_steps - idle_steps
    return OptimizerConfig(
        learning_rate=c.learner.learning_rate,
        schedule=c.learner.schedule,
        total_steps=training_steps * c.learner.minibatches * c.learner.epochs,
        warmup_steps=c.learner.warmup_steps,
        weight_decay=c.learner.weight_decay,
        max_grad_norm=c.learner.max_grad_norm,
    )


def _pair(values) -> tuple[float, float] | None:
    """A config's (low, high); an empty one is None."""
    return tuple(values) or None


def loss_config(c: ml_collections.ConfigDict) -> PolicyLossConfig:
    """The policy's loss."""
    return PolicyLossConfig(
        clip_low=c.learner.clip_low,
        clip_high=c.learner.clip_high,
        importance_level=c.learner.importance_level,
        importance_cap=c.learner.importance_cap,
        importance_range=_pair(c.learner.importance_range),
        importance_rejected=c.learner.importance_rejected,
        kl_coefficient=c.learner.kl_coefficient,
        entropy_coefficient=c.learner.entropy_coefficient,
    )


def update_config(c: ml_collections.ConfigDict) -> UpdateConfig:
    """How a step's rows are split into optimiser steps."""
    return UpdateConfig(
        micro_rows=c.learner.micro_rows,
        minibatches=c.learner.minibatches,
        epochs=c.learner.epochs,
        temperature=c.rollout.temperature,
        seed=c.seed,
    )
