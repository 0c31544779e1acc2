"""What training changes, and how it changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from focus.critic.confidence import Confidence, init_confidence
from focus.types import Array

SCHEDULES = ("constant", "cosine", "wsd")
DECAY_FRACTION = 1 / 3  # of the steps, at the end of "wsd"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Arrays only; the optimiser and the model's functions are closed over by the update.

    Attributes:
      step: [] int32, updates done.
      params: what is trained of the policy: its parameters, or adapters (`focus.policy.lora`).
      opt_state: state of the policy's optimiser.
      critic: the critic's own state, any pytree; the policy update passes it on untouched.
      confidence: how far the critic is believed, `critic.confidence.Confidence`; None without one.
      base_checksum: [] uint32, of the frozen parameters that adapters belong to, so that they
        are never put on others; None where all parameters are trained.
    """

    step: Array
    params: Any
    opt_state: Any
    critic: Any = None
    base_checksum: Array | None = None
    confidence: Confidence | None = None


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a warm-up and a clipped gradient.

    Attributes:
      learning_rate: peak.
      schedule: "constant"; "cosine" down to `final_fraction` of the peak; or "wsd" (warm-up,
        stable, decay; Hu et al. 2024): constant, then linearly down over the last third.
      warmup_steps: optimiser steps of linear warm-up from 0.
      total_steps: optimiser steps that "cosine" and "wsd" are laid out for, warm-up included.
      final_fraction: share of the peak that they end with.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled; matrices only, see `decays`.
      max_grad_norm: global norm that a gradient is clipped to.
    """

    learning_rate: float = 1e-4
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule must be one of {', '.join(SCHEDULES)}; got {self.schedule!r}"
            )
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"a {self.schedule} schedule needs total_steps > warmup_steps, got "
                f"{self.total_steps} and {self.warmup_steps}"
            )
        if self.max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be > 0, got {self.max_grad_norm}")


def make_schedule(config: OptimizerConfig) -> Callable[[Array], Array]:
    """Optimiser step to learning rate."""
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            0.0 if config.warmup_steps else config.learning_rate,
            config.learning_rate,
            config.warmup_steps,
            config.total_steps,
            config.learning_rate * config.final_fraction,
        )
    rise = optax.constant_schedule(config.learning_rate)
    if config.warmup_steps:
        rise = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    if config.schedule == "constant":
        return rise
    # A decay that would begin during the warm-up begins at its end.
    decay_start = max(round(config.total_steps * (1 - DECAY_FRACTION)), config.warmup_steps)
    fall = optax.linear_schedule(
        config.learning_rate,
        config.learning_rate * config.final_fraction,
        config.total_steps - decay_start,
    )
    return optax.join_schedules([rise, fall], [decay_start])


def decays(axes: Any) -> Any:
    """Which parameters are decayed: those whose role is a matrix's, from one space to another.

    The role is what the axes of one layer are called, and not the array's rank: layers are
    stacked, and a vector of each (a norm, a bias, the rates `A_log` of a memory) has rank 2.

    Args:
      axes: names of all axes, as from `models.logical_axes` or `lora.adapter_axes`.

    Returns:
      A tree of bools.
    """

    def is_matrix(names):
        return sum(name != "layers" for name in names) >= 2

    return jax.tree.map(is_matrix, axes, is_leaf=lambda x: isinstance(x, tuple))


def make_optimizer(config: OptimizerConfig, axes: Any = None) -> optax.GradientTransformation:
    """Gradient clipping, then AdamW.

    Args:
      config: its settings.
      axes: names of the axes of all that is trained, see `decays`; not needed without a decay.

    Raises:
      ValueError: a weight decay without `axes`.
    """
    if config.weight_decay and axes is None:
        raise ValueError(
            f"weight_decay {config.weight_decay} is for matrices only: pass the logical axes of "
            "what is trained, models.logical_axes(config) or lora.adapter_axes(config, setting)"
        )
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            make_schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=None if axes is None else decays(axes),
        ),
    )


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    critic: Any = None,
    base_checksum: Array | None = None,
) -> TrainState:
    """A state at step 0; run it under `sharding.init_sharded` so that it is born sharded."""
    opt_state = optimizer.init(params)
    confidence = None if critic is None else init_confidence()
    step = jnp.zeros((), jnp.int32)
    return TrainState(step, params, opt_state, critic, base_checksum, confidence)
