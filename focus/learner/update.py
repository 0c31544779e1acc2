"""Updating the policy on packed rows.

A minibatch is one optimiser step: its micro-batches add their gradients, each already divided by
the number of kept tokens of the whole minibatch, which makes the split invisible. What is frozen
under adapters is passed as in `focus.learner.scoring`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from focus.learner import hosts, losses, sharding
from focus.learner.packing import Rows, take_rows
from focus.learner.scoring import PolicyModel, blocks, check_rows, complete, row_logprobs
from focus.learner.state import TrainState
from focus.types import Array

Params = Any
Metrics = dict[str, float]
LossFn = Callable[[Params, Any, Array], tuple[Array, dict[str, Array]]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyBatch:
    """Rows with all that the policy loss reads; NumPy arrays.

    Attributes:
      rows: packed rows.
      mask: [R, L] bool, tokens that enter the loss.
      advantages: [R, L].
      old_logp: [R, L] by the score pass of this step.
      behaviour_logp: [R, L] by the rollout engine.
      ref_logp: [R, L] by a score pass with the reference parameters, or None.
      importance_log_ratio: [R, L] of each token's trajectory, see `losses.sequence_log_ratio`, or
        None.
    """

    rows: Rows
    mask: Array
    advantages: Array
    old_logp: Array
    behaviour_logp: Array
    ref_logp: Array | None = None
    importance_log_ratio: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SupervisedBatch:
    """Rows of demonstrations.

    Attributes:
      rows: packed rows.
      mask: [R, L] bool, tokens that enter the loss.
      weights: [R, L], 1 for plain imitation.
    """

    rows: Rows
    mask: Array
    weights: Array


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """How a batch is split into optimiser steps.

    Attributes:
      micro_rows: rows that go through the model at a time; a multiple of data * fsdp.
      minibatches: optimiser steps per epoch; fewer where there are fewer rows.
      epochs: passes over the batch.
      temperature: that of the rollouts.
      seed: of the order of rows, together with the state's step.
    """

    micro_rows: int
    minibatches: int = 1
    epochs: int = 1
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name in ("micro_rows", "minibatches", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"learner.{name} must be >= 1, got {getattr(self, name)}")


def make_policy_loss(
    model: PolicyModel, loss_config: losses.PolicyLossConfig, temperature: float
) -> LossFn:
    """The clipped policy loss: `(params, PolicyBatch, denominator) -> (loss, metrics)`."""

    def loss(params, batch, denominator):
        hidden = model.hidden(params, batch.rows)
        logp, entropy = row_logprobs(model, params, batch.rows, hidden, batch.mask, temperature)
        return losses.policy_loss(
            logp,
            batch.old_logp,
            batch.behaviour_logp,
            batch.advantages,
            batch.mask,
            denominator=denominator,
            config=loss_config,
            entropy=entropy,
            ref_logp=batch.ref_logp,
            importance_log_ratio=batch.importance_log_ratio,
        )

    return loss


def make_supervised_loss(
    model: PolicyModel, temperature: float = 1.0, *, most_tokens: bool = False
) -> LossFn:
    """Weighted cross entropy: `(params, SupervisedBatch, denominator) -> (loss, metrics)`.

    With `most_tokens` nearly all tokens of a row enter the loss: those that do not are computed
    along with the others rather than sorted out.
    """

    def loss(params, batch, denominator):
        hidden = model.hidden(params, batch.rows)
        wanted = None if most_tokens else batch.mask
        logp, _ = row_logprobs(model, params, batch.rows, hidden, wanted, temperature)
        return losses.supervised_loss(logp, batch.weights, batch.mask, denominator=denominator)

    return loss


def make_policy_update(
    model: PolicyModel,
    optimizer: optax.GradientTransformation,
    loss_config: losses.PolicyLossConfig,
    config: UpdateConfig,
    *,
    mesh: Mesh,
    shardings: TrainState,
    frozen: Params | None = None,
) -> Callable[[TrainState, PolicyBatch], tuple[TrainState, Metrics]]:
    """The clipped policy update.

    Args:
      model: the model.
      optimizer: as from `make_optimizer`.
      loss_config: the loss.
      config: the split into optimiser steps.
      mesh: the mesh.
      shardings: where each array of the state lies, as from `init_sharded`.
      frozen: base of the adapters that the state's parameters are, or None.

    Returns:
      `update(state, batch) -> (state, metrics)`. The arrays of the state that goes in are
      donated: copy what has to outlive it. Metrics are means over kept tokens; `loss` and
      `grad_norm` are means over minibatches, `tokens` counts kept tokens once per epoch. It
      raises `FloatingPointError` at a loss or gradient that is not finite, before that optimiser
      step is taken; at the first one of a call, the state that went in is still whole.

      A minibatch whose gradient is exactly 0 (all advantages are, and nothing else is in the
      loss) takes no optimiser step: momentum and weight decay would move parameters that nobody
      has an opinion about. It is no dose, and the schedule does not count it: `optimizer_steps`
      are those that were taken, `idle_steps` the others.
    """

    loss = make_policy_loss(model, loss_config, config.temperature)
    update = _make_update(model, loss, optimizer, config, mesh, shardings, frozen)
    if loss_config.importance_range is None or loss_config.importance_rejected != "drop":
        return update

    def update_without_rejected(state: TrainState, batch: PolicyBatch):
        log_ratio = batch.importance_log_ratio
        if loss_config.importance_level == "token":
            log_ratio = batch.old_logp - batch.behaviour_logp
        rejected = losses.rejected_tokens(log_ratio, batch.mask, loss_config)
        before, dropped = (hosts.total(int(x.sum())) for x in (batch.mask, rejected))
        state, metrics = update(state, dataclasses.replace(batch, mask=batch.mask & ~rejected))
        return state, metrics | {"importance_masked": dropped / max(before, 1)}

    return update_without_rejected


def make_supervised_update(
    model: PolicyModel,
    optimizer: optax.GradientTransformation,
    config: UpdateConfig,
    *,
    mesh: Mesh,
    shardings: TrainState,
    frozen: Params | None = None,
    most_tokens: bool = False,
) -> Callable[[TrainState, SupervisedBatch], tuple[TrainState, Metrics]]:
    """Weighted cross entropy on demonstrations; arguments and result as `make_policy_update`.

    `most_tokens` is that of `make_supervised_loss`.
    """

    loss = make_supervised_loss(model, config.temperature, most_tokens=most_tokens)
    return _make_update(model, loss, optimizer, config, mesh, shardings, frozen)


def jit_accumulate(loss: LossFn, mesh: Mesh, param_shardings: Any) -> Callable[..., Any]:
    """The compiled part of a gradient: adds that of one micro-batch.

    Args:
      loss: `(params, micro-batch, denominator) -> (loss, metrics)`.
      mesh: the mesh.
      param_shardings: where gradients lie.

    Returns:
      `(params, gradient, micro-batch, denominator, frozen=None) -> (gradient, loss, metrics)`;
      the gradient that goes in is donated.
    """
    replicated = NamedSharding(mesh, PartitionSpec())

    def accumulate(params, gradient, batch, denominator, frozen=None):
        def value_of(params):
            return loss(complete(params, frozen), batch, denominator)

        (value, metrics), new = jax.value_and_grad(value_of, has_aux=True)(params)
        return jax.tree.map(jnp.add, gradient, new), value, metrics

    return jax.jit(
        sharding.on_mesh(accumulate, mesh),
        donate_argnums=1,
        out_shardings=(param_shardings, replicated, replicated),
    )


def jit_apply(optimizer: optax.GradientTransformation, shardings: TrainState) -> Callable[..., Any]:
    """The optimiser step, compiled: `(params, opt_state, gradient) -> (params, opt_state)`.

    Parameters and optimiser state that go in are donated.
    """

    def apply(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(
        apply,
        donate_argnums=(0, 1),
        out_shardings=(shardings.params, shardings.opt_state),
    )


def make_gradient_fn(
    loss: LossFn,
    mesh: Mesh,
    micro_rows: int,
    param_shardings: Any,
    frozen: Params | None = None,
):
    """Gradient of a minibatch, micro-batch by micro-batch.

    Args:
      loss: `(params, micro-batch, denominator) -> (loss, metrics)`.
      mesh: the mesh.
      micro_rows: rows of a micro-batch.
      param_shardings: where gradients lie.
      frozen: base of the adapters that `params` are, or None.

    Returns:
      `gradient(params, batch, index) -> (gradient, loss, metrics)` of the rows at `index`;
      loss and metrics are read from the device. With several processes, each brings its own
      `batch`, and `index` counts through the rows of all of them.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    own_rows = len(sharding.rows_of_process(mesh, micro_rows))

    def zeros(params):
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

    zeros = jax.jit(zeros, out_shardings=param_shardings)
    accumulate = jit_accumulate(loss, mesh, param_shardings)

    def gradient(params, batch, index):
        tokens = hosts.gather(batch.mask.sum(axis=1))
        denominator = jax.device_put(np.float32(np.concatenate(tokens)[index].sum()), replicated)
        own, most = hosts.shares(index, [len(rows) for rows in tokens])
        total, parts = zeros(params), []
        for block in blocks(own, own_rows, most):
            micro = sharding.shard_rows(_take(batch, block, own_rows), mesh)
            total, value, metrics = accumulate(params, total, micro, denominator, frozen)
            parts.append((value, metrics))
        parts = jax.device_get(parts)
        metrics = parts[0][1]
        for _, more in parts[1:]:
            metrics = losses.merge_metrics(metrics, more)
        return total, float(sum(value for value, _ in parts)), metrics

    return gradient


def _make_update(
    model: PolicyModel,
    loss: LossFn,
    optimizer: optax.GradientTransformation,
    config: UpdateConfig,
    mesh: Mesh,
    shardings: TrainState,
    frozen: Params | None,
):
    gradient = make_gradient_fn(loss, mesh, config.micro_rows, shardings.params, frozen)
    norm = jax.jit(optax.global_norm)
    increment = jax.jit(lambda step: step + 1, out_shardings=shardings.step)
    apply = jit_apply(optimizer, shardings)

    def update(state: TrainState, batch) -> tuple[TrainState, Metrics]:
        check_rows(model, batch.rows)
        step = int(jax.device_get(state.step))
        params, opt_state = state.params, state.opt_state
        total, values, norms, taken = None, [], [], 0
        for index in _minibatches(batch.mask, config, step):
            grads, value, metrics = gradient(params, batch, index)
            grad_norm = float(jax.device_get(norm(grads)))
            if not (math.isfinite(value) and math.isfinite(grad_norm)):
                raise FloatingPointError(
                    f"step {step}: loss {value}, gradient norm {grad_norm}; the optimiser step "
                    "was not taken. Look for log-probs or advantages that are not finite"
                )
            if grad_norm > 0:
                params, opt_state = apply(params, opt_state, grads)
                taken += 1
            total = metrics if total is None else losses.merge_metrics(total, metrics)
            values.append(value)
            norms.append(grad_norm)
        summary = {
            "optimizer_steps": float(taken),
            "idle_steps": float(len(values) - taken),
            "tokens": 0.0,
        }
        if values:
            summary |= losses.mean_metrics(total)
            summary |= {"loss": float(np.mean(values)), "grad_norm": float(np.mean(norms))}
        state = dataclasses.replace(
            state, step=increment(state.step), params=params, opt_state=opt_state
        )
        return state, summary

    return update


def _minibatches(mask: np.ndarray, config: UpdateConfig, step: int) -> Iterator[np.ndarray]:
    """Row indices of each optimiser step; rows without a kept token cost nothing."""
    kept = np.flatnonzero(np.concatenate(hosts.gather(np.asarray(mask).any(axis=1))))
    for epoch in range(config.epochs):
        order = np.random.default_rng((config.seed, step, epoch)).permutation(kept)
        for index in np.array_split(order, config.minibatches):
            if len(index):
                yield index


def _take(batch, index: np.ndarray, num_rows: int):
    """The rows at `index` of a batch, followed by empty ones up to `num_rows`."""
    padding = [(0, num_rows - len(index)), (0, 0)]
    arrays = {
        field.name: np.pad(value[index], padding)
        for field in dataclasses.fields(batch)
        if field.name != "rows" and (value := getattr(batch, field.name)) is not None
    }
    return dataclasses.replace(batch, rows=take_rows(batch.rows, index, num_rows), **arrays)
