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
import numpy as np

from focus.types import Array

# exp(20) = 5e8 is far beyond any ratio that a clip keeps; the bound is against overflow. The
# gradient through a bounded log-ratio is 0: such a token is rejected.
_MAX_LOG_RATIO = 20.0

# What an importance ratio is taken over: see `sequence_log_ratio`.
IMPORTANCE_LEVELS = ("token", "sequence", "geometric")
# What becomes of tokens outside of the importance range.
IMPORTANCE_REJECTED = ("count", "drop")


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig:
    """How the clipped policy loss is made; hashable.

    Attributes:
      clip_low: ratios below `1 - clip_low` earn nothing more.
      clip_high: ratios above `1 + clip_high` earn nothing more.
      dual_clip: bound `c > 1` on the loss of a token with a negative advantage, `c |A|`; None
        leaves it unbounded.
      importance_level: what the ratio between the trainer's and the engine's policy is taken
        over: "token", "sequence" (product over the tokens of a trajectory) or "geometric" (their
        geometric mean).
      importance_cap: bound on the weight that this ratio gives to a token; None: no bound.
      importance_range: `(low, high)`, tokens with a ratio outside get weight 0; None keeps all.
        With neither a cap nor a range nothing is corrected.
      importance_rejected: "count": tokens outside stay in the denominator, as in NeMo-RL and
        OpenRLHF, so that a step with many of them is a smaller step; "drop": they leave the loss
        before it is counted, as in slime, and the others make up for them. A dropped token has
        no entropy bonus or KL penalty either.
      kl_coefficient: weight of the KL divergence from the reference policy.
      entropy_coefficient: weight of the entropy bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    importance_level: str = "token"
    importance_cap: float | None = 2.0
    importance_range: tuple[float, float] | None = None
    importance_rejected: str = "count"
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
        if self.importance_level not in IMPORTANCE_LEVELS:
            raise ValueError(
                f"importance_level must be one of {', '.join(IMPORTANCE_LEVELS)}; got "
                f"{self.importance_level!r}"
            )
        if self.importance_rejected not in IMPORTANCE_REJECTED:
            raise ValueError(
                f"importance_rejected must be one of {', '.join(IMPORTANCE_REJECTED)}; got "
                f"{self.importance_rejected!r}"
            )
        if self.importance_range is not None:
            low, high = self.importance_range
            if not 0 <= low <= 1 <= high:
                raise ValueError(
                    "importance_range must hold 1, the ratio of a token that was sampled on "
                    f"policy: 0 <= low <= 1 <= high, got {self.importance_range}"
                )
        if self.kl_coefficient < 0:
            raise ValueError(f"kl_coefficient must be >= 0, got {self.kl_coefficient}")

    @property
    def corrects(self) -> bool:
        """Whether tokens are weighted for having been sampled from another policy."""
        return self.importance_cap is not None or self.importance_range is not None


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


def sequence_log_ratio(
    old_logp: Array, behaviour_logp: Array, token_mask: Array, level: str
) -> Array:
    """Log of one importance ratio for each trajectory, spread over its tokens.

        sequence    log rho = sum_i (old_i - behaviour_i)       the ratio of whole trajectories
        geometric   log rho = mean_i (old_i - behaviour_i)      its root, comparable over lengths

    The first is unbiased and varies more the longer a trajectory is; the second is biased and does
    not.
    References: Precup et al. 2000 (per-decision and trajectory ratios), Zheng et al. 2025 (GSPO,
    the geometric mean).

    Args:
      old_logp: [B, L] under the parameters at the start of the step, by the trainer.
      behaviour_logp: [B, L] as the rollout engine returned them.
      token_mask: [B, L] bool, tokens of the trajectory that the policy generated.
      level: "sequence" or "geometric".

    Returns:
      [B, L], the same for all tokens of a row.

    Raises:
      ValueError: another level; that of a token is `old_logp - behaviour_logp`.
    """
    if level not in IMPORTANCE_LEVELS[1:]:
        raise ValueError(f"level must be one of {', '.join(IMPORTANCE_LEVELS[1:])}; got {level!r}")
    chex.assert_equal_shape([old_logp, behaviour_logp, token_mask])
    gap = jnp.where(token_mask, old_logp, 0.0) - jnp.where(token_mask, behaviour_logp, 0.0)
    total = jnp.sum(gap, axis=-1, keepdims=True)
    if level == "geometric":
        total /= jnp.maximum(jnp.sum(token_mask, axis=-1, keepdims=True), 1)
    return jnp.broadcast_to(total, gap.shape)


def _outside(ratio: Array, bounds: tuple[float, float]) -> Array:
    return (ratio < bounds[0]) | (ratio > bounds[1])


def rejected_tokens(
    log_ratio: np.ndarray, mask: np.ndarray, config: PolicyLossConfig
) -> np.ndarray:
    """Tokens that leave the loss because their importance ratio is out of range; on the host.

    Args:
      log_ratio: [...] see `importance_weights`.
      mask: [...] bool, tokens that enter the loss.
      config: nothing is rejected unless it has a range and `importance_rejected` is "drop".

    Returns:
      [...] bool, among `mask`.
    """
    if config.importance_range is None or config.importance_rejected != "drop":
        return np.zeros_like(mask)
    log_ratio = np.where(mask, log_ratio, 0.0)
    ratio = np.exp(np.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    return mask & _outside(ratio, config.importance_range)


def importance_weights(
    log_ratio: Array, mask: Array, config: PolicyLossConfig
) -> tuple[Array, dict[str, Array]]:
    """Weights of tokens that another policy sampled, truncated and masked.

        w = min(rho, cap) where low <= rho <= high, else 0;   rho = exp(log_ratio)

    A masked token still counts in the loss's denominator: it is a token that teaches nothing.
    Those of `importance_rejected="drop"` have left the mask before, see `rejected_tokens`.

    References: Espeholt et al. 2018 and Yao et al. 2025 (truncation), Ling Team 2025 (IcePop, the
    range), Hilton et al. 2021 (a ratio to the behaviour policy beside that of the clip).

    Args:
      log_ratio: [...] log of trainer's over engine's probability, of tokens or of sequences.
      mask: [...] bool, tokens that enter the loss.
      config: `importance_cap` and `importance_range`.

    Returns:
      `(weights [...], metrics)`, metrics as those of `policy_loss`: the ratio before and after,
      the shares of tokens that were truncated and masked, and what the effective sample size is
      made of.
    """
    log_ratio = jnp.where(mask, log_ratio, 0.0)
    log_cap = _MAX_LOG_RATIO if config.importance_cap is None else jnp.log(config.importance_cap)
    # The minimum is taken in log space: exp never sees more than the cap.
    weights = jnp.exp(jnp.minimum(log_ratio, log_cap))
    ratio = jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    metrics = {"importance_ratio": masked_sum(ratio, mask)}
    if config.importance_cap is not None:
        metrics["importance_capped"] = jnp.sum(mask & (log_ratio > log_cap))
    if config.importance_range is not None:
        outside = _outside(ratio, config.importance_range)
        weights = jnp.where(outside, 0.0, weights)
        metrics["importance_masked"] = jnp.sum(mask & outside)
    metrics["importance_weight"] = masked_sum(weights, mask)
    metrics["importance_square"] = masked_sum(jnp.square(weights), mask)
    return weights, metrics


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
    importance_log_ratio: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """Clipped policy loss with a correction for tokens that another policy has sampled.

    `r = exp(logp - old_logp)`, `w` from `importance_weights` of `old_logp - behaviour_logp` (the
    engine's arithmetic, and weights that were older than those of this step),
    `loss = sum w max(-A r, -A clip(r, 1 - low, 1 + high)) / denominator`, for A < 0 at most
    `dual_clip |A|`; plus `kl_coefficient` k3(ref_logp - logp) minus `entropy_coefficient`
    entropy, over the same denominator. `w` carries no gradient.

    References: Schulman et al. 2017 (clip), Ye et al. 2020 (dual clip), Yu et al. 2025
    (asymmetric clip); of the weights, see `importance_weights`.

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
      importance_log_ratio: [...] from `sequence_log_ratio`; needed by an importance level other
        than "token".

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
    of_sequences = config.corrects and config.importance_level != "token"
    if of_sequences and importance_log_ratio is None:
        raise ValueError(
            f"importance_level = {config.importance_level!r} needs "
            'importance_log_ratio: see sequence_log_ratio, or use "token"'
        )

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
    importance_metrics = {}
    if config.corrects:
        log_weight = jax.lax.stop_gradient(importance_log_ratio) if of_sequences else engine_gap
        weights, importance_metrics = importance_weights(log_weight, mask, config)
        per_token = per_token * weights
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
        **importance_metrics,
    }
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
    """Sums to means per token; `tokens` and the maxima stay as they are.

    With importance weights, `importance_ess` takes the place of their squares: the effective
    sample size `(sum w)^2 / (n sum w^2)` as a share of the tokens (Kong 1992), 1 on policy.
    """
    tokens = max(float(metrics["tokens"]), 1.0)
    means = {
        name: float(x) if name == "tokens" or name.endswith("_max") else float(x) / tokens
        for name, x in metrics.items()
    }
    if "importance_square" in means:
        square = means.pop("importance_square")
        means["importance_ess"] = means["importance_weight"] ** 2 / square if square else 0.0
    return means
