"""Losses of the critic: value and cost, as weighted means over evidence.

Every loss takes its denominator from outside, so that the sum over any split of the rows
(micro-batches, devices) is the same number as the loss of all rows at once. Rows outside `mask`
may hold anything, NaN included.
"""

from __future__ import annotations

import hashlib

import chex
import jax
import jax.numpy as jnp

from focus.critic.head import (
    CriticConfig,
    bin_edges,
    expected_cost,
    member_folds,
    member_values,
    smoothing_std,
)
from focus.types import Array


def evidence_id(name: str) -> int:
    """Stable 32-bit id of a trajectory, or of the branches of one state, by its name.

    States that share an outcome share the id, and with it the members that train on it.
    """
    return int.from_bytes(hashlib.blake2s(name.encode(), digest_size=4).digest(), "little")


def fold_of(task_id: str, num_folds: int) -> int:
    """The fold of a task: the members that never train on it share the number."""
    return evidence_id(task_id) % num_folds


def bootstrap_masks(config: CriticConfig, ids: Array) -> Array:
    """Which members train on which evidence, a pure function of (seed, id, member).

    Args:
      config: number of members, rate and seed.
      ids: [n] uint32, see `evidence_id`.

    Returns:
      [n, M] bool; rows of equal id are equal.
    """
    chex.assert_rank(ids, 1)
    key = jax.random.key(config.bootstrap_seed)

    def one(id_):
        return jax.random.bernoulli(
            jax.random.fold_in(key, id_), config.bootstrap_rate, (config.num_members,)
        )

    return jax.vmap(one)(ids.astype(jnp.uint32))


def training_masks(config: CriticConfig, ids: Array, fold: Array) -> Array:
    """Bootstrap masks, and with folds no member on a task of its own fold.

    Cross-fitting is this project's rule: `belief(..., fold=fold)` reads a task's states with
    the members that never trained on that task, so no outcome reaches its own baseline.

    Args:
      config: `num_folds` 1 means no cross-fitting.
      ids: [n] uint32, see `evidence_id`.
      fold: [n] int32 of the task, see `fold_of`.

    Returns:
      [n, M] bool.
    """
    masks = bootstrap_masks(config, ids)
    if config.num_folds == 1:
        return masks
    return masks & (member_folds(config) != fold[:, None])


def hl_gauss_probs(config: CriticConfig, target: Array) -> Array:
    """Target distribution: a Gaussian around the target, integrated over each bin.

        p_b = (Phi((edge_{b+1} - y) / sigma) - Phi((edge_b - y) / sigma)) / normaliser

    Reference: Imani and White 2018 (histogram loss), Farebrother et al. 2024.

    Args:
      config: bins and range.
      target: [...] inside the value range.

    Returns:
      [..., bins], sums to 1; its mean is the target.
    """
    edges = (bin_edges(config) - target[..., None]) / smoothing_std(config)
    cdf = jax.scipy.stats.norm.cdf(edges)
    return jnp.diff(cdf, axis=-1) / (cdf[..., -1:] - cdf[..., :1])


def value_weight(weight: Array, bootstrap_mask: Array, mask: Array) -> Array:
    """Denominator of `value_loss`: total weight over rows and members.

    Args:
      weight: [n].
      bootstrap_mask: [n, M] bool.
      mask: [n] bool.

    Returns:
      Scalar.
    """
    return jnp.sum(jnp.where(mask[:, None] & bootstrap_mask, weight[:, None], 0.0))


def value_loss(
    config: CriticConfig,
    value_logits: Array,
    target: Array,
    weight: Array,
    bootstrap_mask: Array,
    mask: Array,
    denominator: Array,
) -> tuple[Array, dict[str, Array]]:
    """Weighted mean cross-entropy between soft targets and every member that trains on them.

        sum_{n,m} mask_n boot_nm weight_n CE(y_n, logits_nm) / denominator

    CE is the binary cross-entropy for "bernoulli" (for y a mean of 0/1 outcomes it has the
    gradient of the mean of their losses) and the categorical one against the HL-Gauss
    distribution for "hl_gauss". No temperature appears anywhere: how tokens were sampled is
    no business of their value.

    Args:
      config: what the critic is.
      value_logits: [n, M] or [n, M, bins].
      target: [n]; clipped to the value range, see metric `target_clipped`.
      weight: [n] outcomes that a row stands for.
      bootstrap_mask: [n, M] bool.
      mask: [n] bool, which rows exist.
      denominator: total weight of the whole batch, `value_weight` summed over its splits.

    Returns:
      Scalar loss, and metrics over the rows given: `value_loss` (= the loss), `value_mse` of
      the ensemble mean against targets, `value_mean`, `target_mean` (all weighted means) and
      `target_clipped`, the share of rows whose target lay outside the range.
    """
    chex.assert_rank([target, weight, bootstrap_mask, mask], [1, 1, 2, 1])
    chex.assert_shape(bootstrap_mask, (target.shape[0], config.num_members))
    low, high = config.value_range
    row = mask.reshape(mask.shape + (1,) * (value_logits.ndim - 1))
    logits = jnp.where(row, value_logits, 0.0)
    raw_target = jnp.where(mask, target, low)
    target = jnp.clip(raw_target, low, high)
    weight = jnp.where(mask, weight, 0.0)

    if config.value == "bernoulli":
        cross_entropy = jax.nn.softplus(logits) - target[:, None] * logits
    else:
        probs = hl_gauss_probs(config, target)
        cross_entropy = -jnp.einsum("nb,nmb->nm", probs, jax.nn.log_softmax(logits, axis=-1))

    scale = 1.0 / jnp.maximum(denominator, 1e-12)
    loss = jnp.sum(weight[:, None] * bootstrap_mask * cross_entropy) * scale

    mean = jnp.mean(member_values(config, jax.lax.stop_gradient(logits)), axis=-1)
    rows_scale = 1.0 / jnp.maximum(jnp.sum(weight), 1e-12)
    tolerance = 1e-4 * (high - low)
    clipped = mask & (jnp.abs(raw_target - target) > tolerance)
    metrics = {
        "value_loss": loss,
        "value_mse": jnp.sum(weight * (mean - target) ** 2) * rows_scale,
        "value_mean": jnp.sum(weight * mean) * rows_scale,
        "target_mean": jnp.sum(weight * target) * rows_scale,
        "target_clipped": jnp.sum(clipped) / jnp.maximum(jnp.sum(mask), 1),
    }
    return loss, metrics


def cost_loss(
    config: CriticConfig,
    log_cost: Array,
    cost: Array,
    weight: Array,
    mask: Array,
    denominator: Array,
) -> tuple[Array, dict[str, Array]]:
    """Weighted mean Poisson loss of the predicted number of tokens.

        sum_n mask_n weight_n (exp(z_n) - y_n z_n) / denominator,   y = tokens / cost_scale

    Poisson with a log link and not squared error of the logarithm: that one would predict the
    geometric mean, too little for a budget, while here the gradient of the bias vanishes
    exactly when predicted and actual tokens have the same sum.

    Args:
      config: scale of the costs.
      log_cost: [n] from the head.
      cost: [n] tokens generated from the state to the end of its trajectory.
      weight: [n].
      mask: [n] bool, which rows exist.
      denominator: total weight of the whole batch.

    Returns:
      Scalar loss, and metrics: `cost_loss` and `cost_ratio`, predicted over actual tokens.
    """
    chex.assert_rank([log_cost, cost, weight, mask], 1)
    z = jnp.where(mask, log_cost, 0.0)
    tokens = jnp.where(mask, cost, 0.0)
    weight = jnp.where(mask, weight, 0.0)
    predicted = expected_cost(config, z)
    per_row = (predicted - tokens * z) / config.cost_scale
    loss = jnp.sum(weight * per_row) / jnp.maximum(denominator, 1e-12)
    ratio = jnp.sum(weight * predicted) / jnp.maximum(jnp.sum(weight * tokens), 1e-12)
    return loss, {"cost_loss": loss, "cost_ratio": ratio}
