"""Critic-free estimators that ask what would have happened, or what led to it.

The rules of `rows` hold; a truncated row counts as ended.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from focus.credit import primitives
from focus.credit.rows import (
    group_advantage,
    group_of_segments,
    key_in_group,
    policy_tokens,
    returns,
    scored_rows,
    segments_of,
    to_credit,
    token_credit,
    tokens_per_segment,
)
from focus.credit.spec import GROUP, EstimatorSpec, describe
from focus.types import Array, Credit, CreditBatch


def doubly_robust(
    outcome: Array, selected: Array, m1: Array, m0: Array, propensity: Array, gate: Array
) -> Array:
    """Effect of keeping a segment, right if either the outcome models or the propensity are.

        m1 - m0 + gate (selected / e (Y - m1) - (1 - selected) / (1 - e) (Y - m0))

    Args:
      outcome: Y, any shape that broadcasts with the others.
      selected: bool, the segment was kept.
      m1: predicted outcome when kept.
      m0: predicted outcome when replaced.
      propensity: e, probability that it is kept.
      gate: bool, False leaves the correction out.

    Returns:
      The effect.
    """
    e = jnp.where(gate, propensity, 0.5)
    kept = jnp.where(selected & gate, (outcome - m1) / e, 0.0)
    replaced = jnp.where(~selected & gate, (outcome - m0) / (1 - e), 0.0)
    return m1 - m0 + kept - replaced


def cvt_rl(batch: CreditBatch, *, weight: float = 0.5, ddof: int = 1, eps: float = 1e-6) -> Credit:
    """CVT-RL: GRPO plus what replacing the segment costs, averaged over valid interventions.

        PCCC = E[Y | keep] - E[Y | do(i)],   A = A_grpo + weight mean_i PCCC

    arXiv:2606.05263. Evidence: reconstructed; the weight is not stated. See `doubly_robust` for
    the corrected effect.

    Args:
      batch: reads `mc_return`, `mc_mask` [B, S, K] (the keep arm), `do_return`, `do_mask`
        [B, S, I, K] and `do_valid` [B, S, I].
      weight: of the counterfactual term.
      ddof: see `baselines.grpo`.
      eps: see `baselines.grpo`.

    Returns:
      `Credit`; aux["pccc"] [B, S], 0 where an arm has no sample.

    Raises:
      ValueError: a channel is missing.
    """
    needed = ("mc_return", "mc_mask", "do_return", "do_mask", "do_valid")
    primitives.require_channels(batch, needed, "cvt_rl")
    rows = scored_rows(batch)
    keep = primitives.masked_mean(batch.mc_return, batch.mc_mask, axis=2)
    replaced = primitives.masked_mean(batch.do_return, batch.do_mask, axis=3)
    seen = jnp.any(batch.mc_mask, axis=2)[:, :, None] & jnp.any(batch.do_mask, axis=3)
    effect = primitives.masked_mean(keep[:, :, None] - replaced, seen & batch.do_valid, axis=2)
    advantages = group_advantage(batch, rows, ddof=ddof, eps=eps)[:, None] + weight * effect
    return to_credit(batch, advantages, rows, aux={"pccc": effect})


def dual_step(multiplier: Array, violation: Array, *, step_size: float) -> Array:
    """CVT-RL's multipliers of constraints after one update: max(multiplier + step c, 0)."""
    return jnp.maximum(multiplier + step_size * violation, 0.0)


def constraint_penalty(multiplier: Array, violation: Array, *, rho: float) -> Array:
    """CVT-RL adds -sum_k (mu_k c_k + rho / 2 max(0, c_k)^2), over the last axis, to the reward."""
    return -jnp.sum(multiplier * violation + rho / 2 * jnp.maximum(violation, 0) ** 2, axis=-1)


def _others_sum(x: Array, start: Array) -> Array:
    """Sum [B, L] over the other rows of a group; rows sorted, `start` [B] marks a group's first.

    Sums from both sides, because a total minus the row's own share would cancel.
    """

    def running(values, resets):
        def combine(left, right):
            return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]

        return jax.lax.associative_scan(combine, (values, resets[:, None]))[0]

    zero = jnp.zeros_like(x[:1])
    before = jnp.concatenate([zero, running(x, start)[:-1]])
    end = jnp.concatenate([start[1:], jnp.ones(1, bool)])
    after = jnp.concatenate([running(x[::-1], end[::-1])[::-1][1:], zero])
    return jnp.where(start[:, None], 0.0, before) + jnp.where(end[:, None], 0.0, after)


def craft(
    batch: CreditBatch,
    *,
    clip: float = 5.0,
    temperature: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """CRAFT: what a teacher's preference among siblings says about a token's position.

        c_{i,t} = sum_j w_j A_j - mean_j A_j,   w_j ~ exp(clip(gap_{j,t}) / temperature)
        gap = teacher_logp - behaviour_logp,   j the siblings of i that have a token t

    arXiv:2606.29476. Evidence: reconstructed; siblings are aligned by position.

    Args:
      batch: reads `teacher_logp` [B, L].
      clip: largest |gap|.
      temperature: of the weights.
      ddof: see `baselines.grpo`.
      eps: see `baselines.grpo`.

    Returns:
      `Credit` whose advantages are c alone; 0 for equal gaps. Segments hold their tokens' mean.

    Raises:
      ValueError: a channel is missing.
    """
    primitives.require_channels(batch, ("teacher_logp",), "craft")
    rows = scored_rows(batch)
    advantage = group_advantage(batch, rows, ddof=ddof, eps=eps)
    kept = policy_tokens(batch, rows)
    gap = jnp.where(kept, batch.teacher_logp, 0.0) - jnp.where(kept, batch.behaviour_logp, 0.0)
    weight = jnp.where(kept, jnp.exp(jnp.clip(gap, -clip, clip) / temperature), 0.0)
    order = jnp.argsort(batch.group_id, stable=True)
    back = jnp.argsort(order)
    group = batch.group_id[order]
    start = jnp.concatenate([jnp.ones(1, bool), group[1:] != group[:-1]])

    def others(x):
        return _others_sum(x[order], start)[back]

    def ratio(top, bottom):
        return jnp.where(bottom > 0, top / jnp.where(bottom > 0, bottom, 1.0), 0.0)

    mean = ratio(others(kept * advantage[:, None]), others(kept.astype(gap.dtype)))
    preferred = ratio(others(weight * advantage[:, None]), others(weight))
    token = jnp.where(kept, preferred - mean, 0.0)

    return token_credit(batch, token, rows)


def taco(batch: CreditBatch, *, scale: str = "std", ddof: int = 1, eps: float = 1e-6) -> Credit:
    """TACO: a call's probed gain, plus the outcome where both have the same sign.

        calls: norm_g(delta) + A_grpo [A's row succeeded and delta > 0, or failed and delta < 0]
        answers: A_grpo;   others: 0

    arXiv:2606.30251. Evidence: paper; that answers always learn is assumed.

    Args:
      batch: reads `probe_delta`, `is_call`, `is_answer` [B, S].
      scale: "std", or "none" to only centre.
      ddof: see `baselines.grpo`.
      eps: see `baselines.grpo`.

    Returns:
      `Credit`; aux["routed"] [B, S] is the outcome's share.

    Raises:
      ValueError: unknown `scale`, or a channel is missing.
    """
    primitives.require_channels(batch, ("probe_delta", "is_call", "is_answer"), "taco")
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    calls = segments & batch.is_call
    delta = jnp.where(calls, batch.probe_delta, 0.0)
    group = group_of_segments(batch)
    probed = primitives.group_normalise(delta, group, calls, scale=scale, ddof=ddof, eps=eps)
    agrees = jnp.where(batch.success[:, None], delta > 0, delta < 0)
    open_ = (calls & agrees) | (segments & batch.is_answer)
    routed = jnp.where(
        open_, group_advantage(batch, rows, scale=scale, ddof=ddof, eps=eps)[:, None], 0.0
    )
    return to_credit(batch, probed + routed, rows, aux={"routed": routed})


def hpo(batch: CreditBatch, *, tolerance: float = 1e-6) -> Credit:
    """HPO: intents that successes show more often than the group does.

        f = sign(h - p) / 2,   credit(k) = f(k) - sum_k p(k) f(k)

    p are the group's frequencies of intents, h the same weighted by returns; f is the dual
    potential of W1(h, p) under the 0/1 metric. arXiv:2607.16257. Evidence: reconstructed.

    Args:
      batch: reads `intent` [B, S]. Negative returns count as 0.
      tolerance: frequencies closer than this are equal.

    Returns:
      `Credit`; a segment without an intent gets 0.

    Raises:
      ValueError: a channel is missing.
    """
    primitives.require_channels(batch, ("intent",), "hpo")
    rows = scored_rows(batch)
    kept = segments_of(batch, rows) & (batch.intent >= 0)
    total = jnp.maximum(returns(batch, rows), 0.0)
    weight = jnp.broadcast_to(total[:, None], kept.shape)
    group = group_of_segments(batch)
    key = key_in_group(batch, batch.intent)
    of_intent = primitives.group_statistics(weight, key, kept)
    of_group = primitives.group_statistics(weight, group, kept)
    frequency = of_intent.count / jnp.maximum(of_group.count, 1)
    # h - p = p (mean weight of the intent / mean weight of the group - 1)
    paid = of_group.mean > 0
    lift = of_intent.mean / jnp.where(paid, of_group.mean, 1.0) - 1
    change = jnp.where(paid & kept, frequency * lift, 0.0)
    potential = jnp.where(jnp.abs(change) > tolerance, 0.5 * jnp.sign(change), 0.0)
    credit = primitives.group_normalise(potential, group, kept, scale="none")
    return to_credit(batch, credit, rows)


def iapo(
    batch: CreditBatch,
    *,
    kappa: float = 1.0,
    lowest: float = 0.5,
    highest: float = 2.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """IAPO: GRPO, weighted by how much of what followed used a segment.

        w = clip(1 + kappa u, lowest, highest), scaled so that sum n w = sum n
        u = uses of the segment / the row's most; support-uses in successes, else failed-uses

    arXiv:2608.24588. Evidence: reconstructed; the map from uses to weights is this project's.

    Args:
      batch: reads `edge` [B, S, S].
      kappa: gain of a use.
      lowest: smallest weight before scaling, > 0.
      highest: largest weight before scaling.
      ddof: see `baselines.grpo`.
      eps: see `baselines.grpo`.

    Returns:
      `Credit`; signs and token totals as GRPO's. aux["weight"] [B, S].

    Raises:
      ValueError: `lowest` is not positive, or a channel is missing.
    """
    if lowest <= 0:
        raise ValueError(f"lowest={lowest} must be > 0, or a weight could change a sign")
    primitives.require_channels(batch, ("edge",), "iapo")
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    kind = jnp.where(batch.success, 1, 2)[:, None, None]
    uses = jnp.sum((batch.edge == kind) & segments[:, None, :], axis=2) * segments
    share = uses / jnp.maximum(jnp.max(uses, axis=1, keepdims=True), 1)
    weight = jnp.clip(1 + kappa * share, lowest, highest)
    weight = primitives.reweight(
        jnp.ones_like(weight), weight, tokens_per_segment(batch, rows), segments, conserve=True
    )
    advantages = group_advantage(batch, rows, ddof=ddof, eps=eps)[:, None] * weight
    aux = {"weight": weight}
    return to_credit(batch, advantages, rows, aux=aux)


SPECS: dict[str, EstimatorSpec] = {
    "cvt_rl": describe(
        cvt_rl, (*GROUP, "mc_return", "mc_mask", "do_return", "do_mask", "do_valid"),
        "CVT-RL, arXiv:2606.05263", "reconstructed", "counterfactual", "segment",
        cost="continuations per intervention",
    ),
    "craft": describe(
        craft, (*GROUP, "behaviour_logp", "teacher_logp"), "CRAFT, arXiv:2606.29476",
        "reconstructed", "counterfactual", "token", cost="a teacher's forward pass",
    ),
    "taco": describe(
        taco, (*GROUP, "success", "probe_delta", "is_call", "is_answer"), "TACO, arXiv:2606.30251",
        "paper", "counterfactual", "segment", cost="two probe decodes per call",
    ),
    "hpo": describe(
        hpo, (*GROUP, "intent"), "HPO, arXiv:2607.16257", "reconstructed", "counterfactual",
        "segment", cost="intent labels",
    ),
    "iapo": describe(
        iapo, (*GROUP, "success", "edge"), "IAPO, arXiv:2608.24588", "reconstructed",
        "counterfactual", "segment", cost="an annotator per rollout",
    ),
}  # fmt: skip
