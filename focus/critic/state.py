"""The critic in training: its evidence, its state and its update.

All pytrees of arrays and pure functions. Evidence goes into a buffer of fixed capacity and is
replayed with a weight that decays with age, because the hidden states it was recorded with go
stale as the policy moves. The update runs over the whole buffer in one `lax.scan`; its shapes
depend on the capacity alone, so it compiles once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from focus.critic.head import (
    CriticConfig,
    CriticParams,
    apply_critic,
    belief,
    init_critic,
    standardised_features,
)
from focus.critic.losses import cost_loss, training_masks, value_loss, value_weight
from focus.critic.posterior import Posterior, init_posterior, project_features, update_posterior
from focus.types import Array


class GradientTransformation(Protocol):
    """The part of an optax optimiser that is used here."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Evidence:
    """Rows to learn from: one state with one target each. n rows, some of them padding.

    A branched state of a base trajectory gives two rows, one for the outcome of its own
    trajectory and one for its branches: they are different outcomes and reach different members.

    Attributes:
      features: [n, H] hidden states of the policy.
      target: [n] value targets.
      weight: [n] outcomes a row stands for.
      cost: [n] tokens from the state to the end.
      cost_weight: [n] weight of the cost target, 0 where there is none.
      bootstrap_id: [n] uint32 of the outcome, see `losses.evidence_id`.
      fold: [n] int32 of the task, see `losses.training_masks`.
      mask: [n] bool, rows that exist; the others may hold anything.
    """

    features: Array
    target: Array
    weight: Array
    cost: Array
    cost_weight: Array
    bootstrap_id: Array
    fold: Array
    mask: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReplayBuffer:
    """Recent evidence, a fixed number of rows.

    Attributes:
      evidence: `capacity` rows.
      age: [capacity] int32, training steps since a row was recorded.
    """

    evidence: Evidence
    age: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CriticState:
    """Everything about a critic that a checkpoint must hold; arrays only.

    Attributes:
      critic: parameters and priors.
      opt_state: optimiser state of `critic.trained`.
      buffer: evidence to replay.
      posterior: last-layer belief, None where the ensemble is the only source of uncertainty.
    """

    critic: CriticParams
    opt_state: Any
    buffer: ReplayBuffer
    posterior: Posterior | None


def init_buffer(capacity: int, feature_dim: int, dtype: Any = jnp.float32) -> ReplayBuffer:
    """An empty buffer.

    Args:
      capacity: rows.
      feature_dim: H.
      dtype: of the stored features; bfloat16 halves the memory of a wide policy's.

    Returns:
      ReplayBuffer without valid rows.
    """
    zeros = jnp.zeros((capacity,), jnp.float32)
    integers = jnp.zeros((capacity,), jnp.int32)
    evidence = Evidence(
        features=jnp.zeros((capacity, feature_dim), dtype),
        target=zeros,
        weight=zeros,
        cost=zeros,
        cost_weight=zeros,
        bootstrap_id=jnp.zeros((capacity,), jnp.uint32),
        fold=integers,
        mask=jnp.zeros((capacity,), bool),
    )
    return ReplayBuffer(evidence=evidence, age=integers)


def age_buffer(buffer: ReplayBuffer, max_age: int) -> ReplayBuffer:
    """Makes every row one step older and drops those older than `max_age` steps."""
    age = buffer.age + 1
    evidence = dataclasses.replace(buffer.evidence, mask=buffer.evidence.mask & (age <= max_age))
    return ReplayBuffer(evidence=evidence, age=age)


def add_evidence(buffer: ReplayBuffer, evidence: Evidence) -> ReplayBuffer:
    """Adds rows at age 0; the oldest make room, of equal age those of least weight.

    Args:
      buffer: with capacity c.
      evidence: n rows, any n; pad it to few sizes, each compiles once.

    Returns:
      The c rows that stay, in order of age.
    """
    old = buffer.evidence
    evidence = jax.tree.map(lambda new, kept: new.astype(kept.dtype), evidence, old)
    rows = jax.tree.map(lambda new, kept: jnp.concatenate([new, kept]), evidence, old)
    age = jnp.concatenate([jnp.zeros_like(evidence.fold), buffer.age])
    order = jnp.lexsort((-jnp.where(rows.mask, rows.weight, 0.0), age, ~rows.mask))
    keep = order[: buffer.age.shape[0]]
    return ReplayBuffer(evidence=jax.tree.map(lambda x: x[keep], rows), age=age[keep])


def decayed_evidence(buffer: ReplayBuffer, decay: float) -> Evidence:
    """The buffer's rows with both weights multiplied by decay^age."""
    factor = decay ** buffer.age.astype(jnp.float32)
    evidence = buffer.evidence
    return dataclasses.replace(
        evidence, weight=evidence.weight * factor, cost_weight=evidence.cost_weight * factor
    )


def minibatch_indices(key: Array, mask: Array, minibatch_size: int) -> Array:
    """A random order of the rows, those that exist first, cut into minibatches.

    Args:
      key: consumed.
      mask: [n] bool, rows that exist; n is a multiple of `minibatch_size`.
      minibatch_size: rows of a minibatch.

    Returns:
      [n / minibatch_size, minibatch_size] int32.
    """
    order = jnp.argsort(jax.random.uniform(key, mask.shape) + ~mask)
    return order.reshape(-1, minibatch_size)


def critic_objective(
    config: CriticConfig,
    critic: CriticParams,
    evidence: Evidence,
    training_mask: Array,
    value_denominator: Array,
    cost_denominator: Array,
    *,
    stop_gradient: bool = True,
) -> tuple[Array, dict[str, Array]]:
    """Value loss plus cost loss on some rows of evidence.

    A critic with a backbone of its own calls it with `stop_gradient=False` and fresh hidden
    states in `evidence.features`, and differentiates through them.

    Args:
      config: what the critic is.
      critic: its arrays.
      evidence: n rows.
      training_mask: [n, M] bool, see `losses.training_masks`.
      value_denominator: total weight of the batch that the rows are a part of.
      cost_denominator: total cost weight of that batch.
      stop_gradient: whether the features are constants.

    Returns:
      Scalar loss, and the metrics of `value_loss` and `cost_loss`.
    """
    # Padding may hold NaN, and a NaN input turns even a zero gradient into NaN.
    features = jnp.where(evidence.mask[:, None], evidence.features, 0.0)
    output = apply_critic(config, critic, features, stop_gradient=stop_gradient)
    value, value_metrics = value_loss(
        config,
        output.value_logits,
        evidence.target,
        evidence.weight,
        training_mask,
        evidence.mask,
        value_denominator,
    )
    cost, cost_metrics = cost_loss(
        config,
        output.log_cost,
        evidence.cost,
        evidence.cost_weight,
        evidence.mask,
        cost_denominator,
    )
    return value + config.cost_loss_weight * cost, value_metrics | cost_metrics


def init_critic_state(
    config: CriticConfig,
    optimizer: GradientTransformation,
    key: Array,
    *,
    capacity: int,
    posterior_features: int | None = None,
    feature_dtype: Any = jnp.float32,
) -> CriticState:
    """A critic before its first evidence.

    Args:
      config: what the critic is.
      optimizer: of the trained parameters.
      key: consumed.
      capacity: rows of the replay buffer.
      posterior_features: D of a last-layer posterior; None for no posterior.
      feature_dtype: see `init_buffer`.

    Returns:
      CriticState.
    """
    critic_key, posterior_key = jax.random.split(key)
    critic = init_critic(config, critic_key)
    posterior = None
    if posterior_features is not None:
        posterior = init_posterior(posterior_key, config.feature_dim, posterior_features)
    return CriticState(
        critic=critic,
        opt_state=optimizer.init(critic.trained),
        buffer=init_buffer(capacity, config.feature_dim, feature_dtype),
        posterior=posterior,
    )


def condition_posterior(
    config: CriticConfig,
    critic: CriticParams,
    posterior: Posterior,
    evidence: Evidence,
    *,
    retention: float = 0.9,
) -> Posterior:
    """The posterior after one training step's evidence.

    Args:
      config: what the critic is.
      critic: its arrays.
      posterior: before.
      evidence: n new rows.
      retention: share of the old evidence that is kept.

    Returns:
      Posterior.
    """
    features = jnp.where(evidence.mask[:, None], evidence.features, 0.0)
    output = apply_critic(config, critic, features)
    return update_posterior(
        posterior,
        project_features(posterior, standardised_features(critic, features)),
        belief(config, output.value_logits).noise_variance,
        evidence.weight,
        evidence.mask,
        retention=retention,
    )


def observe(
    config: CriticConfig,
    state: CriticState,
    evidence: Evidence,
    *,
    max_age: int = 8,
    retention: float = 0.9,
) -> CriticState:
    """Takes in one training step's evidence, once: ages the buffer, adds rows, conditions.

    Args:
      config: what the critic is.
      state: before.
      evidence: n new rows.
      max_age: steps after which evidence is dropped.
      retention: share of the posterior's old evidence that is kept per step.

    Returns:
      State with the evidence; the networks are untouched.
    """
    posterior = state.posterior
    if posterior is not None:
        posterior = condition_posterior(
            config, state.critic, posterior, evidence, retention=retention
        )
    buffer = add_evidence(age_buffer(state.buffer, max_age), evidence)
    return dataclasses.replace(state, buffer=buffer, posterior=posterior)


def make_critic_update(
    config: CriticConfig,
    optimizer: GradientTransformation,
    *,
    num_epochs: int = 4,
    minibatch_size: int = 256,
    age_decay: float = 0.8,
) -> Callable[[CriticState, Array], tuple[CriticState, dict[str, Array]]]:
    """Builds the update: `num_epochs` passes over the buffer in random minibatches.

    Every minibatch divides by the weight that a full one has on average and not by its own, so
    each gradient is an unbiased estimate of the gradient of the buffer's weighted mean loss. A
    minibatch without rows takes no optimiser step: momentum must not move an idle critic.

    Args:
      config: what the critic is.
      optimizer: of the trained parameters.
      num_epochs: passes over the buffer.
      minibatch_size: rows; the buffer's capacity must be a multiple of it.
      age_decay: factor on a row's weight per step of age.

    Returns:
      `update(state, key) -> (state, metrics)`, pure; jit it. Metrics are those of the losses
      over the whole buffer after the update, `value_loss_before`, mean `grad_norm`,
      `num_updates`, `evidence_rows` and their mean `evidence_age` in steps.
    """

    def update(state: CriticState, key: Array) -> tuple[CriticState, dict[str, Array]]:
        capacity = state.buffer.age.shape[0]
        if capacity % minibatch_size:
            raise ValueError(
                f"the buffer's capacity {capacity} must be a multiple of "
                f"minibatch_size {minibatch_size}"
            )
        evidence = decayed_evidence(state.buffer, age_decay)
        masks = training_masks(config, evidence.bootstrap_id, evidence.fold)
        num_rows = jnp.sum(evidence.mask)
        value_total = value_weight(evidence.weight, masks, evidence.mask)
        cost_total = jnp.sum(jnp.where(evidence.mask, evidence.cost_weight, 0.0))
        share = minibatch_size / jnp.maximum(num_rows, 1)

        def loss_fn(trained, rows, row_masks, value_denominator, cost_denominator):
            critic = CriticParams(trained, state.critic.fixed)
            return critic_objective(
                config, critic, rows, row_masks, value_denominator, cost_denominator
            )

        def minibatch_step(carry, index):
            trained, opt_state = carry
            rows = jax.tree.map(lambda x: x[index], evidence)
            grads = jax.grad(loss_fn, has_aux=True)(
                trained, rows, masks[index], value_total * share, cost_total * share
            )[0]
            updates, opt_state = optimizer.update(grads, opt_state, trained)
            trained = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), trained, updates)
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
            return (trained, opt_state), (norm, jnp.int32(1))

        def maybe_step(carry, index):
            def skip(carry, _):
                return carry, (jnp.float32(0.0), jnp.int32(0))

            has_rows = jnp.any(evidence.mask[index])
            return jax.lax.cond(has_rows, minibatch_step, skip, carry, index)

        indices = jax.vmap(lambda k: minibatch_indices(k, evidence.mask, minibatch_size))(
            jax.random.split(key, num_epochs)
        )
        (trained, opt_state), (norms, steps) = jax.lax.scan(
            maybe_step,
            (state.critic.trained, state.opt_state),
            indices.reshape(-1, minibatch_size),
        )

        whole_buffer = (evidence, masks, value_total, cost_total)
        _, before = loss_fn(state.critic.trained, *whole_buffer)
        _, metrics = loss_fn(trained, *whole_buffer)
        age = jnp.sum(jnp.where(evidence.mask, state.buffer.age, 0))
        metrics |= {
            "value_loss_before": before["value_loss"],
            "grad_norm": jnp.sum(norms) / jnp.maximum(jnp.sum(steps), 1),
            "num_updates": jnp.sum(steps),
            "evidence_rows": num_rows,
            "evidence_age": age / jnp.maximum(num_rows, 1),
        }
        critic = CriticParams(trained, state.critic.fixed)
        return dataclasses.replace(state, critic=critic, opt_state=opt_state), metrics

    return update
