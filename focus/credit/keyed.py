"""Statistics over the entries that share a key: the group of a row, the state of a segment.

A key is any int32, negative for "no group". Entries outside a mask are never read, NaN included;
gradients stay finite under it. Memory is linear in the entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp

from focus.credit.channels import require_choice
from focus.types import Array

Center = Literal["mean", "loo", "median", "none"]
Scale = Literal["std", "mad", "none"]
Singleton = Literal["zero", "keep"]

# Makes the median absolute deviation of a normal sample estimate its standard deviation.
MAD_TO_STD = 1.4826
# A scale may be 0 where the data are not: the median absolute deviation as soon as half of a group
# agree, a standard deviation where nothing is centred. Its floor is this share of the group's
# standard deviation, or root mean square, in the units of the data (this project's rule).
SCALE_FLOOR = 0.5
# A difference of so many units in the last place is rounding and no difference.
ROUNDING = 8 * float(jnp.finfo(jnp.float32).eps)


def without_rounding(x: Array, size: Array) -> Array:
    """`x`, or 0 where it is no more than what rounding leaves of numbers as large as `size`.

    Two ways to compute one number differ by units in the last place. A comparison that is divided
    by its own spread would make credit of them.

    Args:
      x: differences, any shape.
      size: magnitude of what was subtracted; broadcasts with `x`.

    Returns:
      The shape of `x`.
    """
    return jnp.where(jnp.abs(x) <= ROUNDING * size, 0.0, x)


def joint_key(*keys: Array) -> Array:
    """Numbers the distinct tuples that entries of several keys form.

    Args:
      *keys: int32 of one shape; negative: no group.

    Returns:
      int32 of that shape in [0, size): equal exactly where all keys are; -1 where one is negative.
    """
    chex.assert_equal_shape(keys)
    known = jnp.all(jnp.stack([key >= 0 for key in keys]), axis=0).ravel()
    flat = [jnp.where(known, key.ravel(), -1) for key in keys]
    order = jnp.lexsort(flat)
    changed = jnp.zeros(flat[0].shape, bool)
    for key in flat:
        ordered = key[order]
        changed = changed | jnp.append(False, ordered[1:] != ordered[:-1])
    # Entries without a group come first and share a number, which is given back.
    number = jnp.cumsum(changed, dtype=jnp.int32) - jnp.any(~known).astype(jnp.int32)
    ids = jnp.zeros(flat[0].shape, jnp.int32).at[order].set(number)
    return jnp.where(known, ids, -1).reshape(keys[0].shape)


class GroupStatistics(NamedTuple):
    """Statistics of an entry's group, repeated for each of its entries (same shape as `x`).

    Attributes:
      count: kept entries with the same key; 0 for entries that are not kept.
      mean: their mean, one number for all of them.
      std: their standard deviation, 0 when the count does not exceed `ddof`.
      centred: the entry minus the mean; exactly 0 where that is rounding alone.
    """

    count: Array
    mean: Array
    std: Array
    centred: Array


def group_statistics(
    x: Array, key: Array, mask: Array, *, ddof: int = 1, size: Array | None = None
) -> GroupStatistics:
    """Mean and standard deviation over the entries that share a key.

    Args:
      x: any shape.
      key: int32, the shape of `x`; any integers, equal within a group. Negative: no group.
      mask: bool, the shape of `x`; entries that count.
      ddof: 1 divides by n - 1, 0 by n.
      size: the shape of `x`, magnitude of the numbers that it is a difference of, where these are
        larger than itself; see `without_rounding`.

    Returns:
      `GroupStatistics`, each of the shape of `x`, 0 for entries that are in no group.
    """
    chex.assert_equal_shape([x, key, mask])
    chex.assert_type(x, float)
    shape, slots = x.shape, x.size + 1
    kept = (mask & (key >= 0)).ravel()
    # Keys are compacted here, so that a key beyond the array's size is not silently dropped.
    group = jnp.where(kept, joint_key(jnp.where(kept, key.ravel(), -1)), x.size)

    def total(values):
        return jax.ops.segment_sum(jnp.where(kept, values, 0.0), group, slots)[group]

    count = total(jnp.ones(x.size, x.dtype))
    safe_count = jnp.maximum(count, 1.0)
    flat = jnp.where(kept, x.ravel(), 0.0)
    # Measured from a member of the group, so that rounding cannot tell equal entries apart.
    anchor = jax.ops.segment_min(jnp.where(kept, flat, jnp.inf), group, slots)[group]
    anchor = jax.lax.stop_gradient(jnp.where(kept, anchor, 0.0))
    offset = jnp.where(kept, flat - anchor, 0.0)
    mean_offset = total(offset) / safe_count
    magnitude = jnp.abs(flat)
    if size is not None:
        magnitude = jnp.maximum(
            magnitude, jnp.where(kept, jnp.broadcast_to(size, shape).ravel(), 0)
        )
    magnitude = jax.ops.segment_max(jnp.where(kept, magnitude, 0.0), group, slots)[group]
    centred = jnp.where(kept, offset - mean_offset, 0.0)
    centred = without_rounding(centred, jax.lax.stop_gradient(magnitude))
    variance = total(jnp.square(centred)) / jnp.maximum(count - ddof, 1.0)
    spread = variance > 0
    std = jnp.where(spread, jnp.sqrt(jnp.where(spread, variance, 1.0)), 0.0)
    fields = (count, anchor + mean_offset, std, centred)
    return GroupStatistics(*(jnp.where(kept, f, 0.0).reshape(shape) for f in fields))


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
    size: Array | None = None,
) -> Array:
    """Compares each entry with the others that share its key.

        y_i = (x_i - center_g) / (scale_g + eps)

    Args:
      x: any shape.
      key: int32, the shape of `x`; negative: no group.
      mask: bool, the shape of `x`; entries that count.
      center: "mean" of the group, "loo" (mean of the others), the lower "median" or "none".
      scale: "std" of the group, "mad" (1.4826 times the median absolute deviation) or "none". At
        least half the standard deviation, or half the root mean square where `center` is "none".
      ddof: for the standard deviation; 1 divides by n - 1, 0 by n.
      eps: added to the standard deviation.
      singleton: an entry alone in its group gives "zero", or "keep" its own x, unscaled.
      size: see `group_statistics`.

    Returns:
      The shape of `x`, 0 for entries that are in no group. A group of entries that are equal but
      for rounding gives exactly 0 when centred.

    Raises:
      ValueError: unknown `center`, `scale` or `singleton`.
    """
    require_choice("center", center, ("mean", "loo", "median", "none"))
    require_choice("scale", scale, ("std", "mad", "none"))
    require_choice("singleton", singleton, ("zero", "keep"))
    statistics = group_statistics(x, key, mask, ddof=ddof, size=size)
    grouped, alone = statistics.count > 0, statistics.count == 1
    if center == "mean":
        y = statistics.centred
    elif center == "loo":
        y = statistics.centred * statistics.count / jnp.maximum(statistics.count - 1, 1)
    elif center == "median":
        y = jnp.where(grouped, x, 0.0) - group_median(x, key, mask)
    else:
        y = x
    if scale != "none":
        mad = scale == "mad"
        spread = MAD_TO_STD * group_mad(x, key, mask) if mad else statistics.std
        typical = statistics.std
        if center == "none":
            square = jnp.square(typical) + jnp.square(statistics.mean)
            typical = jnp.sqrt(jnp.where(square > 0, square, 1.0)) * (square > 0)
        spread = jnp.maximum(spread, SCALE_FLOOR * typical)
        y = jnp.where(typical > 0, y / (spread + eps), 0.0)
    y = jnp.where(alone, x if singleton == "keep" else 0.0, y)
    return jnp.where(grouped, y, 0.0)


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


def mean_of_others(x: Array, key: Array, mask: Array) -> Array:
    """Mean of the other entries that share an entry's key.

    Args:
      x: any shape.
      key: int32, the shape of `x`; negative: no group.
      mask: bool, the shape of `x`; entries that count.

    Returns:
      The shape of `x`, 0 for entries without others.
    """
    statistics = group_statistics(x, key, mask)
    mean = statistics.mean - statistics.centred / jnp.maximum(statistics.count - 1, 1)
    return jnp.where(statistics.count > 1, mean, 0.0)


def group_median(x: Array, key: Array, mask: Array) -> Array:
    """Lower median over the entries that share a key.

    Args:
      x: any shape.
      key: int32, the shape of `x`; negative: no group.
      mask: bool, the shape of `x`; entries that count.

    Returns:
      The shape of `x`: of an even count the smaller middle entry; 0 for entries in no group.
    """
    chex.assert_equal_shape([x, key, mask])
    size = x.size
    kept = (mask & (key >= 0)).ravel()
    flat = jnp.where(kept, x.ravel(), 0.0)
    group = jnp.where(kept, joint_key(jnp.where(kept, key.ravel(), -1)), size)
    order = jnp.lexsort((jax.lax.stop_gradient(flat), group))
    count = jax.ops.segment_sum(kept.astype(jnp.int32), group, size + 1)
    first = jax.ops.segment_min(jnp.arange(size), group[order], size + 1)
    middle = jnp.where(kept, first[group] + jnp.maximum(count[group] - 1, 0) // 2, 0)
    return jnp.where(kept, flat[order[middle]], 0.0).reshape(x.shape)


def group_mad(x: Array, key: Array, mask: Array) -> Array:
    """Lower median of the absolute distances from the lower median, by key.

    Args:
      x, key, mask: see `group_median`.

    Returns:
      The shape of `x`, 0 for entries that are in no group; 0 too where more than half of a group
      agree, so that whoever divides by it needs a floor.
    """
    kept = mask & (key >= 0)
    centred = jnp.where(kept, x, 0.0) - group_median(x, key, mask)
    return group_median(jnp.abs(centred), key, mask)


def value_by_key(x: Array, key: Array, mask: Array) -> Array:
    """Empirical value: the mean of `x` over the entries that share a key.

    Args:
      x: any shape.
      key: int32, the shape of `x`; negative: no group.
      mask: bool, the shape of `x`; entries that count.

    Returns:
      The shape of `x`, 0 for entries that are in no group.
    """
    return group_statistics(x, key, mask).mean


def lookup_by_key(query: Array, x: Array, key: Array, mask: Array) -> tuple[Array, Array]:
    """Empirical value of keys that may belong to other entries than those asked about.

    Args:
      query: int32, any shape; negative: nothing is asked.
      x, key, mask: see `value_by_key`.

    Returns:
      value: the shape of `query`, 0 for keys that nobody has.
      known: bool, the shape of `query`.
    """
    kept = (mask & (key >= 0)).ravel()
    group = joint_key(jnp.concatenate([jnp.where(kept, key.ravel(), -1), query.ravel()]))
    slot = jnp.where(group >= 0, group, group.size)
    theirs, ours = slot[: key.size], slot[key.size :]
    slots = group.size + 1
    total = jax.ops.segment_sum(jnp.where(kept, x.ravel(), 0.0), theirs, slots)[ours]
    count = jax.ops.segment_sum(kept.astype(x.dtype), theirs, slots)[ours]
    known = (query.ravel() >= 0) & (count > 0)
    value = jnp.where(known, total / jnp.maximum(count, 1), 0.0)
    return value.reshape(query.shape), known.reshape(query.shape)


def kernel_baseline(
    x: Array,
    similarity: Callable[[Array], Array],
    key: Array,
    mask: Array,
    *,
    temperature: float,
    batch_size: int = 64,
) -> Array:
    """Each entry minus the mean of its group, weighted by a softmax of similarities.

        y_i = x_i - sum_j softmax_j(similarity_ij / temperature) x_j,   j in i's group, i included

    Args:
      x: [N].
      similarity: index -> [N] similarities to that entry, so that no [N, N] array is built; of a
        matrix, its `__getitem__`.
      key: [N] int32; negative: no group.
      mask: [N] bool.
      temperature: > 0; towards 0 only the most similar entries count.
      batch_size: entries computed at once.

    Returns:
      [N], 0 for entries that are in no group.
    """
    key = jnp.asarray(key)
    kept = mask & (key >= 0)
    x = jnp.where(kept, x, 0.0)

    def one(index):
        peers = kept & kept[index] & (key == key[index])
        logits = jnp.where(peers, similarity(index) / temperature, -jnp.inf)
        top = jnp.where(kept[index], jnp.max(logits), 0.0)
        weight = jnp.where(peers, jnp.exp(jnp.where(peers, logits - top, 0.0)), 0.0)
        total = jnp.where(kept[index], jnp.sum(weight), 1.0)
        # The difference of each is weighted: that of equal entries is exactly 0.
        return jnp.where(kept[index], jnp.sum(weight * (x[index] - x)) / total, 0.0)

    return jax.lax.map(one, jnp.arange(x.size), batch_size=batch_size)
