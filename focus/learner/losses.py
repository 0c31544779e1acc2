"""Losses of the policy, as sums over tokens over a denominator that is given.

A mean over tokens is exact under every split into micro-batches and devices only if nobody
divides by the number of tokens it happens to hold. So the caller counts the kept tokens of the
whole minibatch once, each part returns `sum / denominator`, and parts add up.

Masked-out entries may hold anything. They are replaced before any arithmetic, not after, so that
neither a value nor a gradient ever sees a NaN.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from focus.types import Array

# exp(20) = 5e8 is far beyond any ratio that a clip keeps; the bound is against overflow. The
# gradient through a bounded log-ratio is 0: such a token is rejected.
_MAX_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig:
    """How the clipped policy loss is made; hashable.

    Attributes:
      clip_low: ratios below `1 - clip_low` earn nothing more.
      clip_high: ratios above `1 + clip_high` earn nothing more.
      dual_clip: bound `c > 1` on the loss of a token with a negative advantage, `c |A|`; None
        leaves it unbounded.
      importance_cap: bound on the weight that corrects for the difference between the engine's
        and the trainer's log-probs; None turns the correction off.
      kl_coefficient: weight of the KL divergence from the reference policy.
      entropy_coefficient: weight of the entropy bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    importance_cap: float | None = 2.0
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0

    def __post_init__(self):
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"clip_low must be in (0, 1], got {self.clip_low}")
        if self.clip_high <= 0:
            raise ValueError(f"clip_high must be > 0, got {self.clip_high}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be > 1 or None, got {self.dual_clip}")
        if self.importance_cap is not None and self.importance_cap <= 0:
            raise ValueError(f"importance_cap must be > 0 or None, got {self.importance_cap}")
        if self.kl_coefficient < 0:
            raise ValueError(f"kl_coefficient must be >= 0, got {self.kl_coefficient}")


def masked_sum(x: Array, mask: Array) -> Array:
    """Sum of the entries that are kept; the others may be NaN."""
    return jnp.sum(jnp.where(mask, x, 0.0))


def masked_mean(x: Array, mask: Array) -> Array:
    """Mean of the entries that are kept, 0 if there are none; the others may be NaN."""
    return masked_sum(x, mask) / jnp.maximum(jnp.sum(mask), 1)


def k3_divergence(log_ratio: Array) -> Array:
    """Schulman's estimate `r - 1 - log r >= 0` of KL(p, q), with `log r = log q - log p`.

    Unbiased for samples of p, and of lower variance than `-log r`.
    Reference: Schulman 2020, "Approximating KL divergence".

    Args:
      log_ratio: [...] log-probs of the sampled tokens under q minus those under p.

    Returns:
      [...].
    """
    log_ratio = jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return jnp.exp(log_ratio) - 1.0 - log_ratio


def policy_loss(
    logp: Array,
    old_logp: Array,
    behaviour_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    denominator: Array,
    config: PolicyLossConfig,
    entropy: Array | None = None,
    ref_logp: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """Clipped policy loss with a truncated correction for the engine's log-probs.

    `r = exp(logp - old_logp)`, `w = min(exp(old_logp - behaviour_logp), cap)`,
    `loss = sum w max(-A r, -A clip(r, 1 - low, 1 + high)) / denominator`, for A < 0 at most
    `dual_clip |A|`; plus `kl_coefficient` k3(ref_logp - logp) minus `entropy_coefficient`
    entropy, over the same denominator. `w` carries no gradient.

    References: Schulman et al. 2017 (clip), Ye et al. 2020 (dual clip), Yu et al. 2025
    (asymmetric clip), Yao et al. 2025 (truncated importance sampling between engine and trainer).

    Args:
      logp: [...] log-probs under the parameters that are differentiated.
      old_logp: [...] under the parameters at the start of the step, by the trainer.
      behaviour_logp: [...] as the rollout engine returned them.
      advantages: [...].
      mask: [...] bool, tokens that enter the loss.
      denominator: [] kept tokens of the whole minibatch, over all its micro-batches and devices.
      config: see `PolicyLossConfig`.
      entropy: [...] entropy of each token's distribution; needed by the bonus, else a metric.
      ref_logp: [...] under the reference policy; needed by a KL coefficient above 0.

    Returns:
      `(loss [], metrics)`. Metrics are sums over kept tokens; those named `*_max` are maxima.
      Merge with `merge_metrics`, divide with `mean_metrics`.

    Raises:
      ValueError: a coefficient is set whose input is missing.
    """
    chex.assert_equal_shape([logp, old_logp, behaviour_logp, advantages, mask])
    if config.kl_coefficient and ref_logp is None:
        raise ValueError(
            f"kl_coefficient = {config.kl_coefficient} needs ref_logp: score the rows with the "
            "reference parameters, or set it to 0"
        )
    if config.entropy_coefficient and entropy is None:
        raise ValueError(f"entropy_coefficient = {config.entropy_coefficient} needs entropy")

    def kept(x):
        return jnp.where(mask, x, 0.0)

    logp, old_logp, behaviour_logp, advantages = map(
        kept, (logp, old_logp, behaviour_logp, advantages)
    )
    log_ratio = jnp.clip(logp - old_logp, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    per_token = jnp.maximum(-advantages * ratio, -advantages * clipped)
    if config.dual_clip is not None:
        bound = jnp.where(advantages < 0, -config.dual_clip * advantages, jnp.inf)
        per_token = jnp.minimum(per_token, bound)
    engine_gap = jax.lax.stop_gradient(old_logp - behaviour_logp)
    if config.importance_cap is not None:
        # The minimum is taken in log space: exp never sees more than the cap.
        log_cap = jnp.log(config.importance_cap)
        per_token = per_token * jnp.exp(jnp.minimum(engine_gap, log_cap))
    total = masked_sum(per_token, mask)
    metrics = {
        "tokens": jnp.sum(mask),
        "clip_fraction": jnp.sum(-advantages * ratio < -advantages * clipped),
        "ratio": masked_sum(ratio, mask),
        "ratio_max": jnp.max(kept(ratio)),
        "old_kl": masked_sum(k3_divergence(log_ratio), mask),
        "engine_kl": masked_sum(k3_divergence(engine_gap), mask),
        "engine_gap_max": jnp.max(jnp.abs(engine_gap)),
        "clipped_loss": total,
    }
    if config.importance_cap is not None:
        metrics["importance_capped"] = jnp.sum(engine_gap > log_cap)
    if entropy is not None:
        entropy = kept(entropy)
        metrics["entropy"] = jnp.sum(entropy)
        total -= config.entropy_coefficient * jnp.sum(entropy)
    if ref_logp is not None:
        divergence = masked_sum(k3_divergence(kept(ref_logp) - logp), mask)
        metrics["ref_kl"] = divergence
        total += config.kl_coefficient * divergence
    return total / denominator, jax.lax.stop_gradient(metrics)


def supervised_loss(
    logp: Array, weights: Array, mask: Array, *, denominator: Array
) -> tuple[Array, dict[str, Array]]:
    """Weighted cross entropy, `-sum weights logp / denominator`.

    Args:
      logp: [...] log-probs of the demonstrated tokens.
      weights: [...]; 1 for plain imitation.
      mask: [...] bool, tokens that enter the loss.
      denominator: [] kept tokens of the whole minibatch.

    Returns:
      `(loss [], metrics)`, metrics as those of `policy_loss`.
    """
    chex.assert_equal_shape([logp, weights, mask])
    nll = -jnp.where(mask, logp, 0.0)
    weights = jnp.where(mask, weights, 0.0)
    metrics = {"tokens": jnp.sum(mask), "nll": jnp.sum(nll)}
    return jnp.sum(weights * nll) / denominator, jax.lax.stop_gradient(metrics)


def merge_metrics(first: dict[str, Array], second: dict[str, Array]) -> dict[str, Array]:
    """Metrics of two parts as those of the whole: maxima for `*_max`, sums for the others."""
    return {
        name: jnp.maximum(first[name], second[name])
        if name.endswith("_max")
        else first[name] + second[name]
        for name in first
    }


def mean_metrics(metrics: dict[str, Array]) -> dict[str, Array]:
    """Sums to means per token; `tokens` and the maxima stay as they are."""
    tokens = max(float(metrics["tokens"]), 1.0)
    return {
        name: float(x) if name == "tokens" or name.endswith("_max") else float(x) / tokens
        for name, x in metrics.items()
    }
