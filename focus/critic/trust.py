"""Is the critic better than no critic? Explained variance over recent steps, by class of task.

A critic that explains nothing of fresh outcomes adds noise to advantages where it is a baseline,
and bias where it is bootstrapped from. Where that is so, the mean of other rollouts is the better
baseline and the outcome the better target, until evidence says otherwise. In the spirit of EVPO
(arXiv:2604.19485); accumulation and classes are this project's rule.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from focus.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrustGate:
    """Running sums over outcomes that the critic had not learnt from; [C] each, one a class.

    Attributes:
      weight: outcomes.
      total: their sum.
      squares: sum of their squares.
      missed: sum of squared differences to the critic's values.
    """

    weight: Array
    total: Array
    squares: Array
    missed: Array


def init_gate(num_classes: int = 1) -> TrustGate:
    """No evidence, and so no trust."""
    zeros = jnp.zeros((num_classes,))
    return TrustGate(zeros, zeros, zeros, zeros)


def update_gate(
    gate: TrustGate,
    value: Array,
    outcome: Array,
    weight: Array,
    mask: Array,
    task_class: Array | None = None,
    *,
    retention: float = 0.9,
) -> TrustGate:
    """Forgets a little, then adds a step's outcomes.

    Args:
      gate: before.
      value: [n] critic mean at a state, from before the outcomes were learnt.
      outcome: [n] what followed.
      weight: [n] share of an outcome that the row stands for: 1 over the states of a trajectory.
      mask: [n] bool; other rows may hold anything.
      task_class: [n] int32 in [0, C); all of one class when None.
      retention: share of the old sums that is kept.

    Returns:
      TrustGate.
    """
    classes = gate.weight.shape[0]
    kind = jnp.zeros(mask.shape, jnp.int32) if task_class is None else task_class
    member = (kind[:, None] == jnp.arange(classes)) & mask[:, None]
    share = jnp.where(member, weight[:, None], 0.0)
    outcome, value = (jnp.where(mask, x, 0.0) for x in (outcome, value))

    def add(old, x):
        return retention * old + x @ share

    return TrustGate(
        weight=add(gate.weight, jnp.ones_like(outcome)),
        total=add(gate.total, outcome),
        squares=add(gate.squares, jnp.square(outcome)),
        missed=add(gate.missed, jnp.square(outcome - value)),
    )


def explained_variance(gate: TrustGate) -> Array:
    """1 - E (y - V)^2 / Var y of each class, [C]; 0 where nothing varies or nothing was seen."""
    weight = jnp.maximum(gate.weight, 1e-6)
    variance = gate.squares / weight - jnp.square(gate.total / weight)
    missed = gate.missed / weight
    varies = variance > 1e-6
    return jnp.where(varies, 1.0 - missed / jnp.where(varies, variance, 1.0), 0.0)


def trusted(gate: TrustGate, *, least_weight: float = 20.0) -> Array:
    """Which classes the critic may be used for, [C] bool.

    A class of which fewer than `least_weight` outcomes are remembered goes by all classes
    together, and without that many in all there is no trust.

    Args:
      gate: of recent steps.
      least_weight: outcomes.
    """
    overall = jax.tree.map(lambda x: jnp.sum(x, keepdims=True), gate)
    known = gate.weight >= least_weight
    anything = (overall.weight >= least_weight) & (explained_variance(overall) > 0)
    return jnp.where(known, explained_variance(gate) > 0, anything)
