"""Critic-free estimators that ask what would have happened, or what led to it.

The rules of `rows` hold; a truncated row counts as ended.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from focus.credit import primitives
from focus.credit.hparams import is_traced
from focus.credit.rows import (
    group_advantage,
    group_of_segments,
    key_in_group,
    only_compared,
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


def cvt_rl(
    batch: CreditBatch,
    *,
    weight: float = 0.5,
    effect: Literal["sampled", "doubly_robust"] = "sampled",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """CVT-RL: GRPO plus what replacing the segment costs, averaged over valid interventions.

        PCCC = E[Y | keep] - E[Y | do(i)],   A = A_grpo + weight mean_i PCCC

    arXiv:2606.05263. Evidence: reconstructed; the weight is not stated.

    Args:
      batch: reads `mc_return`, `mc_mask` [B, S, K] (the keep arm), `do_return`, `do_mask`
        [B, S, I, K] and `do_valid` [B, S, I]; `propensity`, `m1`, `m0` [B, S, I] for
        "doubly_robust".
      weight: of the counterfactual term.
      effect: "sampled" as above, or "doubly_robust": `doubly_robust` of the row's own return, in
        which every segment was kept, over its valid interventions.
      ddof: see `baselines.grpo`.
      eps: see `baselines.grpo`.

    Returns:
      `Credit`; aux["pccc"] [B, S], 0 where an arm has no sample.

    Raises:
      ValueError: unknown `effect`, or a channel is missing.
    """
    primitives.require_choice("effect", effect, ("sampled", "doubly_robust"))
    needed = ("mc_return", "mc_mask", "do_return", "do_mask", "do_valid")
    primitives.require_channels(batch, needed, "cvt_rl")
    rows = scored_rows(batch)
    keep = primitives.masked_mean(batch.mc_return, batch.mc_mask, axis=2)
    replaced = primitives.masked_mean(batch.do_return, batch.do_mask, axis=3)
    seen = jnp.any(batch.mc_mask, axis=2)[:, :, None] & jnp.any(batch.do_mask, axis=3)
    difference = keep[:, :, None] - replaced
    if effect == "doubly_robust":
        primitives.require_channels(batch, ("propensity", "m1", "m0"), f"effect={effect!r}")
        total, everything = returns(batch, rows)[:, None, None], jnp.ones_like(seen)
        models = batch.m1, batch.m0, batch.propensity
        difference = doubly_robust(total, everything, *models, gate=batch.do_valid)
        seen = everything
    pccc = primitives.masked_mean(difference, seen & batch.do_valid, axis=2)
    advantages = group_advantage(batch, rows, ddof=ddof, eps=eps)[:, None] + weight * pccc
    return to_credit(batch, advantages, rows, aux={"pccc": pccc})


def dual_step(multiplier: Array, violation: Array, *, step_size: float) -> Array:
    """CVT-RL's multipliers of constraints after one update: max(multiplier + step c, 0)."""
    return jnp.maximum(multiplier + step_size * violation, 0.0)


def constraint_penalty(multiplier: Array, violation: Array, *, rho: float) -> Array:
    """CVT-RL adds -sum_k (mu_k c_k + rho / 2 max(0, c_k)^2), over the last axis, to the reward."""
    return -jnp.sum(multiplier * violation + rho / 2 * jnp.maximum(violation, 0) ** 2, axis=-1)


def _weighted_mean_of_others(x: Array, logits: Array, start: Array) -> Array:
    """Mean [B, L] of `x` [B, 1] over the other rows of a group, by the softmax of their `logits`.

    Rows are sorted, `start` [B] marks a group's first; a row with a logit of -inf does not count,
    and where there is none the mean is 0. Sums run from both sides and carry their own maximum: a
    total minus the row's own share would cancel, and one maximum for all would leave nothing of
    the others.
    """

    def merge(left, right):
        top = jnp.maximum(left[0], right[0])
        safe = jnp.where(jnp.isfinite(top), top, 0.0)
        shares = (jnp.exp(part[0] - safe) for part in (left, right))
        a, b = shares
        return top, a * left[1] + b * right[1], a * left[2] + b * right[2]

    def running(parts, resets):
        def combine(left, right):
            merged = merge(left[0], right[0])
            fresh = (jnp.where(right[1], r, m) for r, m in zip(right[0], merged))
            return tuple(fresh), left[1] | right[1]

        return jax.lax.associative_scan(combine, (parts, resets[:, None]))[0]

    kept = logits > -jnp.inf
    parts = (logits, kept * 1.0, jnp.where(kept, x, 0.0))
    nothing = (jnp.full_like(logits[:1], -jnp.inf), *(jnp.zeros_like(logits[:1]),) * 2)
    end = jnp.concatenate([start[1:], jnp.ones(1, bool)])

    def shifted(totals, at_border):
        moved = (jnp.concatenate([n, t[:-1]]) for n, t in zip(nothing, totals))
        return tuple(jnp.where(at_border[:, None], n, m) for n, m in zip(nothing, moved))

    before = shifted(running(parts, start), start)
    backwards = running(tuple(p[::-1] for p in parts), end[::-1])
    after = tuple(p[::-1] for p in shifted(backwards, end[::-1]))
    _, total, weighted = merge(before, after)
    return jnp.where(total > 0, weighted / jnp.where(total > 0, total, 1.0), 0.0)


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
    order = jnp.argsort(batch.group_id, stable=True)
    back = jnp.argsort(order)
    group = batch.group_id[order]
    start = jnp.concatenate([jnp.ones(1, bool), group[1:] != group[:-1]])

    def of_others(preference):
        logits = jnp.where(kept, preference, -jnp.inf)
        return _weighted_mean_of_others(advantage[order, None], logits[order], start)[back]

    mean = of_others(jnp.zeros_like(gap))
    preferred = of_others(jnp.clip(gap, -clip, clip) / temperature)
    difference = primitives.without_rounding(preferred - mean, jnp.max(jnp.abs(advantage)))
    token = jnp.where(kept, difference, 0.0)

    return token_credit(batch, token, rows)


def craft_weights(
    gap: Array,
    mask: Array,
    activity: Array,
    *,
    decay: float = 0.9,
    slope: float = 5.0,
    distil_weight: float = 1.0,
    kl_weight: float = 1.0,
) -> tuple[Array, Array, Array]:
    """CRAFT's second part: the busier the teacher's gate, the more distillation and the less KL.

        activity <- decay activity + (1 - decay) share of tokens with sigmoid(slope gap) > 1/2

    The weights are `distil_weight activity` and `kl_weight (1 - activity)`. arXiv:2606.29476.
    Evidence: reconstructed; the gate is that of released code, the two maps are this project's.

    Args:
      gap: [B, L] `teacher_logp - behaviour_logp`.
      mask: [B, L] bool.
      activity: [] moving average so far, in [0, 1]; start with 0.
      decay: of the average.
      slope: of the gate.
      distil_weight, kl_weight: largest weights.

    Returns:
      (activity, weight of the distillation, weight of the KL penalty), all [].
    """
    gate = jax.nn.sigmoid(slope * jnp.where(mask, gap, 0.0))
    activity = decay * activity + (1 - decay) * primitives.masked_mean((gate > 0.5) * 1.0, mask)
    return activity, distil_weight * activity, kl_weight * (1 - activity)


def craft_divergence(logp: Array, teacher_logp: Array, credit: Array, mask: Array) -> Array:
    """CRAFT's third part, a loss: the sign of a token's credit picks the divergence.

        credit >= 0: KL(teacher || policy), credit < 0: KL(policy || teacher)

    Praised tokens spread over all that the teacher would say; blamed ones are drawn to what it
    says most. arXiv:2606.29476. Evidence: reconstructed; which sign picks which is not stated.

    Args:
      logp: [B, L, V] log-probs of the policy over the vocabulary.
      teacher_logp: [B, L, V] of the teacher, constants.
      credit: [B, L] of `craft`.
      mask: [B, L] bool.

    Returns:
      Scalar mean over kept tokens, to be minimised.
    """
    logp = jnp.where(mask[..., None], logp, 0.0)
    teacher_logp = jnp.where(mask[..., None], teacher_logp, 0.0)
    forward = jnp.sum(jnp.exp(teacher_logp) * (teacher_logp - logp), axis=-1)
    reverse = jnp.sum(jnp.exp(logp) * (logp - teacher_logp), axis=-1)
    return primitives.masked_mean(jnp.where(credit >= 0, forward, reverse), mask)


def taco(
    batch: CreditBatch, *, scale: primitives.Scale = "std", ddof: int = 1, eps: float = 1e-6
) -> Credit:
    """TACO: a call's probed gain, plus the outcome where both have the same sign.

        A = norm_g(delta) + A_grpo [the row succeeded and delta > 0, or failed and delta < 0]
            of calls;   A = A_grpo of answers;   0 of the others

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


def wasserstein_potential(
    h: Array, p: Array, cost: Array, *, temperature: float = 0.01, iterations: int = 200
) -> Array:
    """Dual potential of the Wasserstein-1 distance of two distributions, by Sinkhorn's iteration.

        f = argmax sum_k f_k (h_k - p_k)   with   f_i - f_j <= cost_ij

    In the log domain; towards temperature 0 it is exact. The result is made 1-Lipschitz by a last
    hard minimum, `f_i = min_j cost_ij - v_j`, so that it is defined off the supports too.

    Args:
      h, p: [K], each adds up to 1.
      cost: [K, K] a metric.
      temperature: of the entropic smoothing, in units of the cost.
      iterations: how often both potentials are updated.

    Returns:
      [K], up to a constant.
    """
    log_h, log_p = (jnp.where(q > 0, jnp.log(jnp.where(q > 0, q, 1.0)), -jnp.inf) for q in (h, p))

    def update(_, v):
        u = -temperature * jax.nn.logsumexp((v - cost) / temperature + log_p, axis=1)
        return -temperature * jax.nn.logsumexp((u - cost.T) / temperature + log_h, axis=1)

    v = jax.lax.fori_loop(0, iterations, update, jnp.zeros_like(p))
    return jnp.min(jnp.where(p > 0, cost - v, jnp.inf), axis=1)


def hpo(
    batch: CreditBatch,
    *,
    cost: tuple[tuple[float, ...], ...] | None = None,
    temperature: float = 0.01,
    iterations: int = 200,
    tolerance: float = 1e-6,
) -> Credit:
    """HPO: intents that successes show more often than the group does.

        credit(k) = f(k) - sum_k p(k) f(k),   f the dual potential of W1(h, p)

    p are the group's frequencies of intents, h the same weighted by returns. Under the 0/1 metric
    `f = sign(h - p) / 2`. arXiv:2607.16257. Evidence: reconstructed.

    Args:
      batch: reads `intent` [B, S]. Negative returns count as 0.
      cost: K x K distances between intents, whose ids then are 0 ... K - 1; None: the 0/1 metric.
      temperature, iterations: see `wasserstein_potential`; read with `cost`.
      tolerance: frequencies closer than this are equal, under the 0/1 metric.

    Returns:
      `Credit`; a segment without an intent gets 0. aux["w1"] [B] is the distance in the row's
      group.

    Raises:
      ValueError: `cost` is not square.
    """
    rows = scored_rows(batch)
    kept = segments_of(batch, rows) & (batch.intent >= 0)
    paid = jnp.broadcast_to(jnp.maximum(returns(batch, rows), 0.0)[:, None], kept.shape)
    group = group_of_segments(batch)
    of_group = primitives.group_statistics(paid, group, kept)
    # h - p = p (mean return of the intent / mean return of the group - 1)
    rewarded = of_group.mean > 0
    lift = jnp.where(rewarded, paid / jnp.where(rewarded, of_group.mean, 1.0) - 1, 0.0)
    if cost is None:
        of_intent = primitives.group_statistics(lift, key_in_group(batch, batch.intent), kept)
        change = of_intent.count / jnp.maximum(of_group.count, 1) * of_intent.mean
        potential = jnp.where(jnp.abs(change) > tolerance, 0.5 * jnp.sign(change), 0.0)
    else:
        potential = _group_potentials(batch, kept, lift, cost, temperature, iterations)
    credit = primitives.group_normalise(potential, group, kept, scale="none")
    # sum_k f(k) (h(k) - p(k)), as a mean over the group's segments.
    distance = primitives.value_by_key(potential * lift, group, kept)
    aux = {"w1": jnp.max(jnp.where(kept, distance, 0.0), axis=1)}
    return to_credit(batch, only_compared(batch, rows, credit), rows, aux=aux)


def _group_potentials(batch, kept, lift, cost, temperature, iterations) -> Array:
    """`wasserstein_potential` of each group, read at the segments' intents, [B, S]."""
    cost = jnp.asarray(cost)
    if cost.ndim != 2 or cost.shape[0] != cost.shape[1]:
        raise ValueError(f"cost has shape {cost.shape}; it needs one row and column per intent")
    size, kinds = batch.group_id.size, cost.shape[0]
    kept = kept & (batch.intent < kinds)
    group = primitives.joint_key(group_of_segments(batch))
    slot = jnp.where(kept & (group >= 0), group * kinds + batch.intent, size * kinds).ravel()

    def frequencies(weight):
        mass = jax.ops.segment_sum(jnp.where(kept, weight, 0.0).ravel(), slot, size * kinds + 1)[
            :-1
        ].reshape(size, kinds)
        total = jnp.sum(mass, axis=1, keepdims=True)
        return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1 / kinds)

    p, h = frequencies(jnp.ones_like(lift)), frequencies(lift + 1)
    potential = jax.vmap(
        lambda h, p: wasserstein_potential(
            h, p, cost, temperature=temperature, iterations=iterations
        )
    )(h, p)
    place = jnp.where(kept, group, 0), jnp.where(kept, batch.intent, 0)
    return jnp.where(kept, potential[place], 0.0)


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
      ValueError: `lowest` is not positive or above `highest`, or a channel is missing.
    """
    # A weight of 0 or less could change a sign.
    if not (is_traced(lowest) or is_traced(highest)) and not 0 < lowest <= highest:
        raise ValueError(f"lowest={lowest} must be > 0 and at most highest={highest}")
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
