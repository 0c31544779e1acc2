"""Pieces that estimators share, in one place: moments, time, trees, shaping, tokens, and by key.

Entries outside a mask are never read, NaN included, and gradients stay finite under the mask.
Nothing here normalises unless its name says so.
"""

from __future__ import annotations

from typing import Literal

import chex
import jax
import jax.numpy as jnp

from focus.credit import td
from focus.credit.channels import CHANNEL_PRODUCERS, require_channels, require_choice
from focus.credit.keyed import (
    Center,
    GroupStatistics,
    Scale,
    Singleton,
    group_mad,
    group_median,
    group_normalise,
    group_statistics,
    joint_key,
    kernel_baseline,
    leave_one_out,
    lookup_by_key,
    mean_of_others,
    value_by_key,
    without_rounding,
)
from focus.types import Array

__all__ = [
    "CHANNEL_PRODUCERS",
    "Backup",
    "Center",
    "GroupStatistics",
    "Scale",
    "Singleton",
    "at_last_token",
    "broadcast_to_tokens",
    "group_mad",
    "group_median",
    "group_normalise",
    "group_statistics",
    "joint_key",
    "kernel_baseline",
    "last_segment",
    "last_token",
    "leave_one_out",
    "log_ratio",
    "lookup_by_key",
    "masked_gae",
    "masked_mean",
    "masked_whiten",
    "mean_of_others",
    "mix",
    "next_value",
    "potential_difference",
    "put_on_last_token",
    "reduce_by_segment",
    "require_channels",
    "require_choice",
    "reverse_recurrence",
    "reward_to_go",
    "reweight",
    "route",
    "softmin_weights",
    "squash",
    "tree_backup",
    "tree_sum",
    "value_by_key",
    "without_rounding",
]

Backup = Literal["child_mean", "leaf_mean", "child_softmax"]


# --- masked moments ----------------------------------------------------------------------------


def masked_mean(x: Array, mask: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Mean of the kept entries, of equal ones exactly their value; 0 where none is kept.

    Args:
      x: any shape.
      mask: bool, the shape of `x`; True entries are kept.
      axis: axes to reduce, all when None.

    Returns:
      `x` reduced over `axis`.
    """
    chex.assert_equal_shape([x, mask])
    count = jnp.sum(mask, axis=axis, keepdims=True)
    lowest = jnp.min(jnp.where(mask, x, jnp.inf), axis=axis, keepdims=True)
    lowest = jax.lax.stop_gradient(jnp.where(count > 0, lowest, 0.0))
    above = jnp.sum(jnp.where(mask, x - lowest, 0.0), axis=axis, keepdims=True)
    return jnp.squeeze(lowest + above / jnp.maximum(count, 1), axis=axis)


def masked_whiten(x: Array, mask: Array, *, eps: float = 1e-8, size: Array | float = 0.0) -> Array:
    """Shifts and scales the kept entries to mean 0 and variance 1 over the whole array.

        y = (x - mean) / sqrt(var + eps),   var with n - 1 in the denominator

    A separate step on purpose: estimators call it only where their source does, as an argument
    that is written down (`whiten`). Apply it to the global batch; statistics of a shard are
    another function.

    Args:
      x: any shape.
      mask: bool, the shape of `x`; True entries are kept.
      eps: added to the variance.
      size: magnitude of the numbers that `x` is a difference of, where larger than itself; see
        `without_rounding`.

    Returns:
      The shape of `x`, 0 outside the mask; 0 too where a single entry is kept, or all are equal
      but for rounding.
    """
    largest = jnp.max(jnp.where(mask, jnp.maximum(jnp.abs(x), size), 0.0))
    centred = jnp.where(mask, x - masked_mean(x, mask), 0.0)
    centred = without_rounding(centred, jax.lax.stop_gradient(largest))
    variance = jnp.sum(jnp.square(centred)) / jnp.maximum(jnp.sum(mask) - 1, 1)
    return centred * jax.lax.rsqrt(variance + eps)


# --- along time --------------------------------------------------------------------------------


def reverse_recurrence(b: Array, a: Array, *, in_order: bool = False) -> Array:
    """Solves `y_t = b_t + a_t y_{t+1}`, `y_T = 0`, along the last axis in logarithmic depth.

    Args:
      b, a: [..., T].
      in_order: step by step from the end instead, T steps deep: what follows alike is rounded
        alike, wherever it stands in a row and whatever the row is padded with.

    Returns:
      [..., T].
    """
    chex.assert_equal_shape([b, a])
    if in_order:

        def step(following, x):
            current = x[0] + x[1] * following
            return current, current

        along = jnp.moveaxis(b, -1, 0), jnp.moveaxis(a, -1, 0)
        return jnp.moveaxis(
            jax.lax.scan(step, jnp.zeros_like(b[..., 0]), along, reverse=True)[1], 0, -1
        )

    def combine(later, earlier):
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    return jax.lax.associative_scan(combine, (a, b), reverse=True, axis=b.ndim - 1)[1]


def reward_to_go(
    r: Array, mask: Array, *, discount: Array | float = 1.0, in_order: bool = False
) -> Array:
    """Discounted sum of this and all later rewards; absent steps do not discount.

    Args:
      r: [..., T].
      mask: [..., T] bool, steps that exist.
      discount: scalar or [..., T], per existing step.
      in_order: see `reverse_recurrence`.

    Returns:
      [..., T], 0 on absent steps.
    """
    decay = jnp.where(mask, discount, 1.0).astype(r.dtype)
    r = jnp.where(mask, r, 0.0)
    return jnp.where(mask, reverse_recurrence(r, decay, in_order=in_order), 0.0)


def next_value(v: Array, mask: Array) -> Array:
    """Value of the next existing step, 0 after the last.

    Args:
      v: [..., T].
      mask: [..., T] bool, steps that exist.

    Returns:
      [..., T], on absent steps too.
    """
    coming = reverse_recurrence(jnp.where(mask, v, 0.0), jnp.where(mask, 0.0, 1.0).astype(v.dtype))
    return jnp.concatenate([coming[..., 1:], jnp.zeros_like(coming[..., :1])], axis=-1)


def masked_gae(
    v: Array,
    r: Array,
    mask: Array,
    *,
    discount: Array | float = 1.0,
    lambda_: Array | float = 1.0,
    reset: Array | None = None,
) -> Array:
    """Generalised advantage estimation that steps over absent entries.

        delta_t = r_t + discount v_{t'} - v_t,   A_t = delta_t + discount lambda A_{t'}

    where t' is the next existing step; after the last the value is 0. Masked equals filtered.

    Args:
      v: [..., T] value before each step.
      r: [..., T] reward of each step.
      mask: [..., T] bool, steps that exist.
      discount, lambda_: scalars or [..., T].
      reset: [..., T] bool, steps that end a stretch: nothing flows back over them.

    Returns:
      [..., T], 0 on absent steps.
    """
    chex.assert_equal_shape([v, r, mask])
    after = next_value(v, mask)
    v, r = jnp.where(mask, v, 0.0), jnp.where(mask, r, 0.0)
    going_on = jnp.ones_like(mask) if reset is None else ~reset
    delta = r + jnp.where(going_on, discount * after, 0.0) - v
    decay = jnp.where(mask, jnp.where(going_on, discount * lambda_, 0.0), 1.0).astype(v.dtype)
    advantages = reverse_recurrence(jnp.where(mask, delta, 0.0), decay)
    return jnp.where(mask, advantages, 0.0)


def potential_difference(
    before: Array, after: Array, *, reward: Array | float = 0.0, discount: float = 1.0
) -> Array:
    """Change of a potential over a step, `reward + discount after - before`, elementwise."""
    return reward + discount * after - before


# --- trees -------------------------------------------------------------------------------------


def tree_sum(x: Array, parent: Array, weight: Array) -> Array:
    """Adds to each node the weighted totals of its children, from the leaves up.

        y_m = x_m + sum_{c child of m} weight_c y_c

    Args:
      x: [M].
      parent: [M] int32, -1 at a root; parents precede children.
      weight: [M] of each node in its parent.

    Returns:
      [M].
    """
    chex.assert_equal_shape([x, parent, weight])
    x, parent, weight = map(jnp.asarray, (x, parent, weight))

    def step(i, y):
        node = x.shape[0] - 1 - i
        above = parent[node]
        share = jnp.where(above >= 0, weight[node] * y[node], 0.0)
        return y.at[jnp.maximum(above, 0)].add(share)

    return jax.lax.fori_loop(0, x.shape[0], step, x)


def tree_backup(
    leaf_value: Array,
    leaf_mask: Array,
    parent: Array,
    *,
    rule: Backup = "child_mean",
    entropy: Array | None = None,
) -> tuple[Array, Array]:
    """Values of all nodes from those of the leaves.

    Args:
      leaf_value: [M], read where `leaf_mask` is True.
      leaf_mask: [M] bool, leaves with a score.
      parent: [M] int32, -1 at a root; parents precede children.
      rule: "child_mean", "leaf_mean" (every leaf below counts the same) or "child_softmax"
        (children weighted by the softmax of their `entropy`).
      entropy: [M], read by "child_softmax".

    Returns:
      value: [M], 0 for nodes without a scored leaf.
      known: [M] bool, nodes with a scored leaf below; the others do not count for their parent.

    Raises:
      ValueError: unknown `rule`, or "child_softmax" without `entropy`.
    """
    require_choice("rule", rule, ("child_mean", "leaf_mean", "child_softmax"))
    if rule == "child_softmax" and entropy is None:
        raise ValueError("rule='child_softmax' needs the nodes' entropy; pass entropy=[M]")
    nodes, ones = parent.shape[0], jnp.ones(parent.shape, leaf_value.dtype)
    scored = jnp.where(leaf_mask, leaf_value, 0.0)
    leaves = tree_sum(leaf_mask.astype(scored.dtype), parent, ones)
    known = leaves > 0
    if rule == "leaf_mean":
        return tree_sum(scored, parent, ones) / jnp.maximum(leaves, 1), known
    # Roots are sent to a bucket of their own: a root is nobody's child.
    above = jnp.where(parent >= 0, parent, nodes)
    weight = known.astype(scored.dtype)
    if entropy is not None and rule == "child_softmax":
        logits = jnp.where(known, entropy, -jnp.inf)
        top = jax.ops.segment_max(logits, above, nodes + 1)[above]
        weight = jnp.where(known, jnp.exp(jnp.where(known, logits - top, 0.0)), 0.0)
    total = jax.ops.segment_sum(weight, above, nodes + 1)[above]
    weight = weight / jnp.where(total > 0, total, 1.0)
    return tree_sum(scored, parent, weight), known


# --- shaping -----------------------------------------------------------------------------------


def reweight(
    x: Array, weight: Array, count: Array, mask: Array, *, conserve: bool = False
) -> Array:
    """Multiplies credit by weights, row by row, optionally keeping the weights' token total.

        y = x w c,   c = sum(count) / sum(count w) if `conserve` else 1

    Args:
      x, weight: [..., T].
      count: [..., T] tokens of each entry.
      mask: [..., T] bool.
      conserve: whether the total weight of a row stays its token count.

    Returns:
      [..., T], 0 outside the mask. A row whose weights add up to 0 gets 0.
    """
    weight, count = jnp.where(mask, weight, 0.0), jnp.where(mask, count, 0)
    if conserve:
        total = jnp.sum(count * weight, axis=-1, keepdims=True)
        whole = jnp.sum(count, axis=-1, keepdims=True)
        weight = weight * jnp.where(total > 0, whole / jnp.where(total > 0, total, 1.0), 0.0)
    return jnp.where(mask, x, 0.0) * weight


def route(x: Array, gate: Array) -> Array:
    """Keeps credit where `gate` (bool, the shape of `x`) is open, 0 elsewhere."""
    return jnp.where(gate, x, 0.0)


def mix(
    first: Array, second: Array, weight: float, *, rule: Literal["convex", "add"] = "convex"
) -> Array:
    """`(1 - weight) first + weight second` ("convex") or `first + weight second` ("add").

    Raises:
      ValueError: unknown `rule`.
    """
    require_choice("rule", rule, ("convex", "add"))
    return first * (1.0 if rule == "add" else 1.0 - weight) + weight * second


def log_ratio(logp: Array, ref_logp: Array, mask: Array, *, beta: float = 1.0) -> Array:
    """`beta (logp - ref_logp)` on kept tokens, 0 elsewhere; any shape."""
    return beta * (jnp.where(mask, logp, 0.0) - jnp.where(mask, ref_logp, 0.0))


def softmin_weights(x: Array, mask: Array, *, temperature: float) -> Array:
    """Weights `softmax(-x / temperature)` over the kept entries of the last axis.

    Args:
      x: [..., T].
      mask: [..., T] bool.
      temperature: > 0; towards 0 all weight goes to the smallest entry.

    Returns:
      [..., T], 0 outside the mask; rows without kept entries are 0.
    """
    logits = jnp.where(mask, -x / temperature, -1e30)
    return jnp.where(mask, jax.nn.softmax(logits, axis=-1), 0.0)


def squash(x: Array, bound: float) -> Array:
    """Bounds credit smoothly: `bound tanh(x / bound)`."""
    return bound * jnp.tanh(x / bound)


# --- rows, segments, tokens --------------------------------------------------------------------


def last_segment(segment_mask: Array) -> Array:
    """Marks the last valid segment of each row.

    Args:
      segment_mask: [B, S] bool.

    Returns:
      [B, S] bool; a row without segments has no mark.
    """
    return jax.vmap(td.following_state)(segment_mask)[1]


def broadcast_to_tokens(segment_values: Array, token_segment: Array) -> Array:
    """Gives each token the value of its segment, row by row.

    Args:
      segment_values: [B, S].
      token_segment: [B, L] int32, -1 outside.

    Returns:
      [B, L], 0 (False) where `token_segment` is -1.
    """
    return jax.vmap(td.segments_to_tokens)(segment_values, token_segment)


def reduce_by_segment(
    x: Array,
    token_segment: Array,
    token_mask: Array,
    num_segments: int,
    *,
    rule: Literal["sum", "mean"] = "sum",
) -> Array:
    """Sum or mean of the kept tokens of each segment, row by row.

    Args:
      x: [B, L].
      token_segment: [B, L] int32, -1 outside.
      token_mask: [B, L] bool.
      num_segments: S.
      rule: "sum" or "mean".

    Returns:
      [B, S], 0 for segments without tokens.

    Raises:
      ValueError: unknown `rule`.
    """
    require_choice("rule", rule, ("sum", "mean"))
    kept = token_mask & (token_segment >= 0)
    index = jnp.where(kept, token_segment, num_segments)

    def one_row(values, index):
        return jax.ops.segment_sum(values, index, num_segments + 1)[:-1]

    total = jax.vmap(one_row)(jnp.where(kept, x, 0.0), index)
    if rule == "sum":
        return total
    return total / jnp.maximum(jax.vmap(one_row)(kept.astype(x.dtype), index), 1)


def last_token(token_segment: Array, token_mask: Array, num_segments: int) -> Array:
    """Index of the last kept token at or before the end of each segment.

    A segment without tokens takes the last token of an earlier one; -1 when there is none.

    Args:
      token_segment: [B, L] int32, -1 outside.
      token_mask: [B, L] bool.
      num_segments: S.

    Returns:
      [B, S] int32.
    """
    kept = token_mask & (token_segment >= 0)
    position = jnp.where(kept, jnp.arange(kept.shape[1], dtype=jnp.int32), -1)
    index = jnp.where(kept, token_segment, num_segments)
    last = jax.vmap(lambda p, i: jax.ops.segment_max(p, i, num_segments + 1)[:-1])(position, index)
    return jax.lax.cummax(jnp.maximum(last, -1), axis=1)


def put_on_last_token(
    segment_values: Array, segment_mask: Array, token_segment: Array, token_mask: Array
) -> Array:
    """Adds the value of each segment to its last token, see `last_token`.

    Args:
      segment_values, segment_mask: [B, S].
      token_segment, token_mask: [B, L].

    Returns:
      [B, L]; a value that no token precedes is left out: nothing could have caused it.
    """
    where = last_token(token_segment, token_mask, segment_mask.shape[1])
    values = jnp.where(segment_mask & (where >= 0), segment_values, 0.0)

    def one_row(values, where):
        return jnp.zeros(token_mask.shape[1], values.dtype).at[jnp.maximum(where, 0)].add(values)

    return jax.vmap(one_row)(values, where)


def at_last_token(x: Array, token_segment: Array, token_mask: Array, num_segments: int) -> Array:
    """Reads `x` [B, L] at the last token of each segment -> [B, S]; 0 where there is none."""
    where = last_token(token_segment, token_mask, num_segments)
    read = jnp.take_along_axis(jnp.where(token_mask, x, 0.0), jnp.maximum(where, 0), axis=1)
    return jnp.where(where >= 0, read, 0.0)
