"""What the critic is trained towards: targets, and how many outcomes each stands for.

A state of a trajectory learns from that trajectory's one outcome, which all its states share, so
together they weigh as much as one outcome. A branched state learns, besides, from the mean of k
fresh outcomes and weighs k. One trajectory at a time; batch with `jax.vmap`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from focus.credit.td import following_state, segment_advantages
from focus.types import Array

Truncation = Literal["bootstrap", "fail", "mask"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
    """Regression targets of the states that precede each segment.

    Attributes:
      target: [S], 0 where `mask` is False.
      weight: [S] outcomes that the target stands for, 0 where `mask` is False.
      mask: [S] bool, which states have a target.
    """

    target: Array
    weight: Array
    mask: Array


def _targets(target: Array, weight: Array, mask: Array) -> Targets:
    return Targets(jnp.where(mask, target, 0.0), jnp.where(mask, weight, 0.0), mask)


def trajectory_targets(
    values: Array,
    rewards: Array,
    outcome: Array,
    mask: Array,
    *,
    truncated: Array | bool = False,
    is_branch: Array | bool = False,
    truncation: Truncation = "bootstrap",
    discount: float = 1.0,
    lambda_: float = 1.0,
) -> Targets:
    """TD(lambda) targets of one trajectory; Monte Carlo returns at `lambda_=1`.

        G_j = r_j + gamma ((1 - lambda) V(s_{j+1}) + lambda G_{j+1}),   weight 1 / n

    with the outcome in the last reward, for the n states that learn from the trajectory. The
    first state of a branch is left out: `branch_targets` counts its outcome there already. A
    trajectory without a score contributes nothing (None is not 0), unless it was cut and
    bootstraps.

    Args:
      values: [S + 1] critic values; the last valid one is of the state where it ended.
      rewards: [S] segment rewards without the outcome.
      outcome: [] final reward, NaN where there is no score.
      mask: [S] bool, segments that exist; elsewhere anything may stand, NaN included.
      truncated: [] whether a limit of ours cut it, see `Trajectory.truncated`.
      is_branch: [] whether it continues from a state of another trajectory.
      truncation: targets of a cut trajectory: "bootstrap", its outcome is replaced by the value
        of the state where it was cut; "fail", the outcome stands as scored; "mask", none.
      discount: gamma per segment.
      lambda_: lambda_critic in [0, 1].

    Returns:
      Targets [S].

    Raises:
      ValueError: unknown `truncation`.
    """
    if truncation not in ("bootstrap", "fail", "mask"):
        raise ValueError(f"truncation must be 'bootstrap', 'fail' or 'mask', got {truncation!r}")
    chex.assert_rank([values, rewards, outcome, mask], [1, 1, 0, 1])
    chex.assert_equal_shape([values[1:], rewards, mask])
    truncated, is_branch = jnp.asarray(truncated), jnp.asarray(is_branch)

    scored = jnp.isfinite(outcome)
    bootstraps = truncated & (truncation == "bootstrap")
    contributes = bootstraps | (scored & ~(truncated & (truncation == "mask")))
    score = jnp.where(scored & ~bootstraps, outcome, 0.0)

    _, is_last = following_state(mask)
    advantages = segment_advantages(
        values,
        rewards + jnp.where(is_last, score, 0.0),
        mask,
        discount=discount,
        lambda_=lambda_,
        truncated=bootstraps,
    )

    is_first = mask & (jnp.cumsum(mask) == 1)
    learns = mask & contributes & ~(is_branch & is_first)
    share = 1.0 / jnp.maximum(jnp.sum(learns), 1)
    return _targets(values[:-1] + advantages, share, learns)


def branch_targets(returns: Array, returns_mask: Array) -> Targets:
    """Mean of the k continuations sampled from each state, with weight k.

    Args:
      returns: [S, K] returns of continuations, from the state to their end.
      returns_mask: [S, K] bool, continuations that exist and have a score.

    Returns:
      Targets [S].
    """
    chex.assert_rank([returns, returns_mask], 2)
    count = jnp.sum(returns_mask, axis=-1)
    total = jnp.sum(jnp.where(returns_mask, returns, 0.0), axis=-1)
    return _targets(total / jnp.maximum(count, 1), count.astype(jnp.float32), count > 0)


def cost_targets(segment_tokens: Array, mask: Array, *, censored: Array | bool = False) -> Targets:
    """Tokens that were generated from each state to the end of the trajectory, with weight 1.

    Every state weighs the same, for the predictions are read per state and must add up over
    the states of a step.

    Args:
      segment_tokens: [S] policy-generated tokens of each segment.
      mask: [S] bool, segments that exist.
      censored: [] whether it stopped for a reason that a new continuation would not meet (the
        step's budget, a technical failure), so that its length is only a lower bound; such a
        trajectory has no cost targets. A turn or context limit is met by all alike: not
        censored.

    Returns:
      Targets [S], in tokens.
    """
    chex.assert_rank([segment_tokens, mask], 1)
    tokens = jnp.where(mask, segment_tokens, 0).astype(jnp.float32)
    remaining = jnp.cumsum(tokens[::-1])[::-1]
    return _targets(remaining, jnp.ones_like(tokens), mask & ~jnp.asarray(censored))
