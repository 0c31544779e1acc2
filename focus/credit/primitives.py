"""Pieces that estimators share: statistics by key, masked moments, segments to tokens.

Entries outside a mask are never read, NaN included, and gradients stay finite under the mask.
Nothing here normalises unless its name says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp

from focus.credit import td
from focus.types import Array, CreditBatch

Center = Literal["mean", "loo", "none"]
Scale = Literal["std", "none"]
Singleton = Literal["zero", "keep"]

# Who fills each optional channel of a `CreditBatch`; said when an estimator misses one.
CHANNEL_PRODUCERS = {
    "value": "run a critic (critic.enabled)",
    "value_variance": "run a critic with error features (critic.enabled) and keep the variance "
    "that value refinement returns",
    "mc_return": "sample continuations (branching.rule)",
    "mc_mask": "sample continuations (branching.rule)",
}


def require_channels(batch: CreditBatch, names: Sequence[str], user: str) -> None:
    """Checks that the optional channels an estimator reads are there.

    Args:
      batch: the batch.
      names: channel names, fields of `CreditBatch`.
      user: who reads them, for the message.

    Raises:
      ValueError: a channel is None; the message says who produces it.
    """
    for name in names:
        if getattr(batch, name) is None:
            producer = CHANNEL_PRODUCERS.get(name, "every batch has it")
            raise ValueError(f"{user} needs the channel {name}, which is None: {producer}")


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Checks a hyperparameter that is one of a few words.

    Raises:
      ValueError: `value` is none of `choices`.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {tuple(choices)}")


# --- masked moments ----------------------------------------------------------------------------


def masked_mean(x: Array, mask: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Mean of the kept entries; 0 where none is kept.

    Args:
      x: any shape.
      mask: bool, the shape of `x`; True entries are kept.
      axis: axes to reduce, all when None.

    Returns:
      `x` reduced over `axis`.
    """
    chex.assert_equal_shape([x, mask])
    count = jnp.sum(mask, axis=axis)
    return jnp.sum(jnp.where(mask, x, 0.0), axis=axis) / jnp.maximum(count, 1)


def masked_whiten(x: Array, mask: Array, *, eps: float = 1e-8) -> Array:
    """Shifts and scales the kept entries to mean 0 and variance 1 over the whole array.

        y = (x - mean) / sqrt(var + eps),   var with n - 1 in the denominator

    A separate step on purpose: no estimator calls it. Apply it to the global batch; statistics
    of a shard are another function.

    Args:
      x: any shape.
      mask: bool, the shape of `x`; True entries are kept.
      eps: added to the variance.

    Returns:
      The shape of `x`, 0 outside the mask; 0 too when a single entry is kept.
    """
    centred = jnp.where(mask, x - masked_mean(x, mask), 0.0)
    variance = jnp.sum(jnp.square(centred)) / jnp.maximum(jnp.sum(mask) - 1, 1)
    return centred * jax.lax.rsqrt(variance + eps)


# --- statistics by key -------------------------------------------------------------------------


class GroupStatistics(NamedTuple):
    """Statistics of an entry's group, repeated for each of its entries (same shape as `x`).

    Attributes:
      count: kept entries with the same key; 0 for entries that are not kept.
      mean: their mean.
      std: their standard deviation, 0 when the count does not exceed `ddof`.
      centred: the entry minus the mean; exactly 0 when the whole group is equal.
    """

    count: Array
    mean: Array
    std: Array
    centred: Array


def group_statistics(x: Array, key: Array, mask: Array, *, ddof: int = 1) -> GroupStatistics:
    """Mean and standard deviation over the entries that share a key.

    Args:
      x: any shape.
      key: int32, the shape of `x`; any integers, equal within a group. Negative: no group.
      mask: bool, the shape of `x`; entries that count.
      ddof: 1 divides by n - 1, 0 by n.

    Returns:
      `GroupStatistics`, each of the shape of `x`, 0 for entries that are in no group.
    """
    chex.assert_equal_shape([x, key, mask])
    chex.assert_type(x, float)
    shape, size = x.shape, x.size
    kept = (mask & (key >= 0)).ravel()
    # Keys are compacted here, so that a key beyond the array's size is not silently dropped.
    _, group = jnp.unique(
        jnp.where(kept, key.ravel(), -1), return_inverse=True, size=size, fill_value=-1
    )
    group = group.ravel()

    def total(values):
        return jax.ops.segment_sum(jnp.where(kept, values, 0.0), group, size)[group]

    count = total(jnp.ones(size, x.dtype))
    safe_count = jnp.maximum(count, 1.0)
    flat = jnp.where(kept, x.ravel(), 0.0)
    # Measured from a member of the group, so that rounding cannot tell equal entries apart.
    anchor = jax.ops.segment_min(jnp.where(kept, flat, jnp.inf), group, size)[group]
    offset = jnp.where(kept, flat - jax.lax.stop_gradient(anchor), 0.0)
    centred = jnp.where(kept, offset - total(offset) / safe_count, 0.0)
    variance = total(jnp.square(centred)) / jnp.maximum(count - ddof, 1.0)
    spread = variance > 0
    std = jnp.where(spread, jnp.sqrt(jnp.where(spread, variance, 1.0)), 0.0)
    fields = (count, flat - centred, std, centred)
    return GroupStatistics(*(jnp.where(kept, f, 0.0).reshape(shape) for f in fields))


def leave_one_out(x: Array, key: Array, mask: Array, *, singleton: Singleton = "zero") -> Array:
    """Each entry minus the mean of the others that share its key.

        y_i = x_i - mean_{j != i} x_j = n / (n - 1) (x_i - mean)

    Args:
      x: any shape.
      key: int32, the shape of `x`; negative: no group.
      mask: bool, the shape of `x`; entries that count.
      singleton: an entry without others gives "zero", or "keep" its own x.

    Returns:
      The shape of `x`, 0 for entries that are in no group.
    """
    return group_normalise(x, key, mask, center="loo", scale="none", singleton=singleton)


def group_normalise(
    x: Array,
    key: Array,
    mask: Array,
    *,
    center: Center = "mean",
    scale: Scale = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Array:
    """Compares each entry with the others that share its key.

        y_i = (x_i - center_g) / (std_g + eps)

    Args:
      x: any shape.
      key: int32, the shape of `x`; negative: no group.
      mask: bool, the shape of `x`; entries that count.
      center: "mean" of the group, "loo" (mean of the others) or "none".
      scale: "std" of the group or "none".
      ddof: for the standard deviation; 1 divides by n - 1, 0 by n.
      eps: added to the standard deviation.
      singleton: an entry alone in its group gives "zero", or "keep" its own x, unscaled.

    Returns:
      The shape of `x`, 0 for entries that are in no group. A group of equal entries gives
      exactly 0 when centred.

    Raises:
      ValueError: unknown `center`, `scale` or `singleton`.
    """
    require_choice("center", center, ("mean", "loo", "none"))
    require_choice("scale", scale, ("std", "none"))
    require_choice("singleton", singleton, ("zero", "keep"))
    statistics = group_statistics(x, key, mask, ddof=ddof)
    grouped, alone = statistics.count > 0, statistics.count == 1
    y = {
        "mean": statistics.centred,
        "loo": statistics.centred * statistics.count / jnp.maximum(statistics.count - 1, 1),
        "none": x,
    }[center]
    if scale == "std":
        y = y / (statistics.std + eps)
    y = jnp.where(alone, x if singleton == "keep" else 0.0, y)
    return jnp.where(grouped, y, 0.0)


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
