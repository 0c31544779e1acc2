"""Dense credit without a trained critic: cut points, prefixes, spans, and log-ratios.

The rules of `rows` hold; a truncated row counts as ended.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from focus.credit import primitives
from focus.credit.rows import (
    group_advantage,
    playing_rows,
    policy_tokens,
    returns,
    scored_rows,
    segments_of,
    to_credit,
    token_credit,
    token_rewards,
)
from focus.credit.spec import GROUP, RETURN, EstimatorSpec, describe
from focus.types import Array, Credit, CreditBatch

TraceProfile = Literal["recent", "both", "terminal"]


def spo_chain(batch: CreditBatch, *, prob_threshold: float = 0.9) -> Credit:
    """Difference of values between consecutive cut points; sure tokens get 0.

        A_t = V(next cut, or the return at the end) - V(latest cut at or before t)

    SPO-chain (arXiv:2505.23564). Evidence: code.

    Args:
      batch: reads `cut`, `cut_value`, `cut_mask` [B, C]: values of the states just before token
        `cut`, in any order; 0 is the prompt's end.
      prob_threshold: tokens sampled with a higher probability get 0; 1 keeps all.

    Returns:
      `Credit`; tokens before the first cut get 0, and a row without cuts nothing at all.
    """
    rows = scored_rows(batch)
    mask = policy_tokens(batch, rows)
    length = mask.shape[1]
    valued = batch.cut_mask & (batch.cut >= 0) & (batch.cut < length)
    where = jnp.where(valued, batch.cut, length)

    def one_row(where, value, valued, total):
        known = jnp.zeros(length + 1, bool).at[where].set(True)[:length]
        value = jnp.where(valued, value, 0.0)
        values = jnp.zeros(length + 1, value.dtype).at[where].set(value)[:length]
        position = jnp.arange(length)
        latest = jax.lax.cummax(jnp.where(known, position, -1))
        coming = jax.lax.cummin(jnp.where(known, position, length), reverse=True)
        coming = jnp.append(coming[1:], length)
        ahead = jnp.where(coming < length, values[jnp.minimum(coming, length - 1)], total)
        return jnp.where(latest >= 0, ahead - values[jnp.maximum(latest, 0)], 0.0)

    total = returns(batch, rows)
    advantages = jax.vmap(one_row)(where, batch.cut_value, valued, total)
    unsure = jnp.exp(jnp.where(mask, batch.behaviour_logp, 0.0)) <= prob_threshold
    return token_credit(batch, primitives.route(advantages, unsure), rows)


def spo_cut_points(batch: CreditBatch, *, interval: int = 5, prob_threshold: float = 0.9) -> Array:
    """Tokens [B, L] bool before which SPO-chain samples a value.

    Every `interval`-th policy token whose probability is below `prob_threshold`
    (arXiv:2505.23564). Evidence: code.

    Raises:
      ValueError: `interval` is below 1.
    """
    if interval < 1:
        raise ValueError(f"interval={interval} must be at least 1")
    mask = policy_tokens(batch, playing_rows(batch))
    unsure = mask & (jnp.exp(jnp.where(mask, batch.behaviour_logp, 0.0)) < prob_threshold)
    return unsure & (jnp.cumsum(unsure, axis=1) % interval == 0)


def grpo_lambda(
    batch: CreditBatch,
    *,
    profile: TraceProfile = "recent",
    lambda_: float = 0.99,
    discount: float = 1.0,
    trace_floor: float = 0.0,
    negative_floor: float = -0.1,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """GRPO with tokens weighted by how much of the later policy ratio they carry.

        A_tj = max(A_i, negative_floor) w_j,   w_j = sum_{t >= j} trace(t, j),   c = discount lambda
        recent: trace = c^(t-j);  both: max(c^(t-j), c^j);  terminal: w_j = c^(L-1-j)

    GRPO-lambda (arXiv:2510.00194). Evidence: code for "recent" and "both", which there act on the
    log-ratios in the loss: on policy the gradient is the same. "terminal" is found in other
    implementations and has the opposite profile in time.

    Args:
      batch: core channels only.
      profile: as above.
      lambda_, discount: per policy token, each in [0, 1].
      trace_floor: smallest trace, for "recent" and "both".
      negative_floor: smallest advantage of a row; -inf for none.
      ddof, eps: see `baselines.grpo`.

    Returns:
      `Credit`.

    Raises:
      ValueError: unknown `profile`.
    """
    primitives.require_choice("profile", profile, ("recent", "both", "terminal"))
    decay = discount * lambda_
    rows = scored_rows(batch)
    mask = policy_tokens(batch, rows)
    scalar = group_advantage(batch, rows, ddof=ddof, eps=eps)
    scalar = jnp.maximum(scalar, negative_floor)
    place = jnp.cumsum(mask, axis=1) - 1
    remaining = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True) - 1 - place, 0)
    place = jnp.maximum(place, 0)
    if profile == "terminal":
        weight = jnp.power(decay, remaining)
    else:
        trace = jnp.maximum(jnp.power(decay, jnp.arange(mask.shape[1])), trace_floor)
        summed = jnp.cumsum(trace)
        if profile == "recent":
            weight = summed[remaining]
        else:
            # c^(t-j) wins while t - j <= j; from there on c^j does.
            weight = summed[jnp.minimum(remaining, place)]
            weight = weight + jnp.maximum(remaining - place, 0) * trace[place]
    return token_credit(batch, scalar[:, None] * weight, rows)


def tempo(batch: CreditBatch, *, ddof: int = 0, eps: float = 1e-6) -> Credit:
    """GRPO plus the change of the mean return of rows that share the prefix.

        A_it = (R_i - mean_g + V(prefix_{t+1}) - V(prefix_t)) / (std_g + eps)

    TEMPO (arXiv:2509.18314). Evidence: paper.

    Args:
      batch: reads `prefix_key` [B, L + 1], distinct between groups.
      ddof, eps: see `baselines.grpo`.

    Returns:
      `Credit`; the second part is 0 wherever no row leaves the prefix.
    """
    rows = scored_rows(batch)
    mask = policy_tokens(batch, rows)
    total = returns(batch, rows)
    statistics = primitives.group_statistics(total, batch.group_id, rows, ddof=ddof)
    # Behind a row's last token no prefix of its own is left, whatever the padding says.
    length = jnp.max(jnp.where(mask, jnp.arange(1, mask.shape[1] + 1), 0), axis=1)
    own = jnp.arange(batch.prefix_key.shape[1]) <= length[:, None]
    reached = (batch.prefix_key >= 0) & own & rows[:, None]
    value = primitives.value_by_key(
        jnp.broadcast_to(statistics.centred[:, None], reached.shape), batch.prefix_key, reached
    )
    known = reached[:, 1:] & reached[:, :-1]
    step = jnp.where(known, primitives.potential_difference(value[:, :-1], value[:, 1:]), 0.0)
    raw = jnp.where(mask, statistics.centred[:, None] + step, 0.0)
    return token_credit(batch, raw / (statistics.std[:, None] + eps), rows)


def shapley_values(coalition: Array) -> Array:
    """Exact Shapley values from the worth of every subset.

        phi_i = sum_{S without i} |S|! (n - |S| - 1)! / n! (v(S + i) - v(S))

    Args:
      coalition: [B, 2^n], bit i of the index for player i.

    Returns:
      [B, n]; a row adds up to v(all) - v(none).

    Raises:
      ValueError: the width is no power of two.
    """
    size = coalition.shape[1]
    players = size.bit_length() - 1
    if size != 2**players:
        raise ValueError(f"coalition has {size} entries a row; it needs 2^n, one per subset")
    subset = np.arange(size)
    members = np.array([s.bit_count() for s in range(size)])
    share = [1 / (players * math.comb(players - 1, k)) for k in range(players)]
    weights = np.zeros((size, players), np.float32)
    for player in range(players):
        inside = (subset >> player & 1) == 1
        weights[inside, player] = [share[m - 1] for m in members[inside]]
        weights[~inside, player] = [-share[m] for m in members[~inside]]
    return jnp.matmul(coalition, weights, precision="highest")


def _at_span_ends(x: Array, span: Array, mask: Array) -> Array:
    """Values [B, n] of spans on their last tokens, [B, L]; of empty ones on the row's last."""
    players, position = x.shape[1], jnp.arange(mask.shape[1])
    kept = mask & (span >= 0) & (span < players)

    def one_row(x, span, kept, mask):
        at = jnp.where(kept, position, -1)
        last = jax.ops.segment_max(at, jnp.where(kept, span, players), players + 1)[:-1]
        whole = jnp.max(jnp.where(mask, position, -1))
        where = jnp.where(last >= 0, last, whole)
        worth = jnp.where(whole >= 0, x, 0.0)
        return jnp.zeros(mask.shape, x.dtype).at[jnp.maximum(where, 0)].add(worth)

    return jax.vmap(one_row)(x, span, kept, mask)


def scar(
    batch: CreditBatch, *, alpha: float = 1.0, discount: float = 1.0, lambda_: float = 1.0,
    critic: bool = False,
) -> Credit:  # fmt: skip
    """Shapley values of text spans as rewards at their ends.

        r = alpha phi(span) at its last token + (1 - alpha) R at the row's last token

    Spans may stand in any order. One without a policy token of its own has its worth at the row's
    last token, so that the rewards of a row always add up. SCAR (arXiv:2505.20417). Evidence:
    reconstructed (the mixing).

    Args:
      batch: reads `coalition` [B, 2^n] and `segment_id` [B, L]; `token_value` when `critic`.
      alpha: share of the Shapley values.
      discount, lambda_: per token.
      critic: GAE over `token_value`; else the rewards to go.

    Returns:
      `Credit`; aux["shapley"] [B, n].

    Raises:
      ValueError: `critic` without `token_value`, or a bad width of `coalition`.
    """
    rows = scored_rows(batch)
    mask = policy_tokens(batch, rows)
    phi = shapley_values(jnp.where(rows[:, None], batch.coalition, 0.0))
    dense = _at_span_ends(phi, batch.segment_id, mask)
    rewards = alpha * dense + (1 - alpha) * token_rewards(batch, rows, mask)
    value = jnp.zeros_like(rewards)
    if critic:
        primitives.require_channels(batch, ("token_value",), "scar with critic=True")
        value = batch.token_value
    advantages = primitives.masked_gae(value, rewards, mask, discount=discount, lambda_=lambda_)
    return token_credit(batch, advantages, rows, aux={"shapley": phi})


def spro(
    batch: CreditBatch,
    *,
    beta: float = 1.0,
    baseline: Literal["mean", "loo"] = "mean",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """GRPO plus the cumulative log-ratio compared with the group's at the same token.

        A_it = GRPO_i + c_it - mean_g c_t,   c_it = sum_{j <= t} beta (logp_j - ref_logp_j)

    SPRO (arXiv:2507.01551). Evidence: paper; beta is not stated there.

    Args:
      batch: reads `ref_logp` [B, L].
      beta: of the log-ratio; 0 is GRPO.
      baseline: "mean" over rows that reach the token, or "loo", the mean of the others.
      ddof, eps: see `baselines.grpo`.

    Returns:
      `Credit`.

    Raises:
      ValueError: unknown `baseline`.
    """
    primitives.require_choice("baseline", baseline, ("mean", "loo"))
    rows = scored_rows(batch)
    mask = policy_tokens(batch, rows)
    scalar = group_advantage(batch, rows, ddof=ddof, eps=eps)
    ratio = primitives.log_ratio(batch.behaviour_logp, batch.ref_logp, mask, beta=beta)
    group = jnp.broadcast_to(batch.group_id[:, None], mask.shape)
    key = primitives.joint_key(group, jnp.cumsum(mask, axis=1, dtype=jnp.int32))
    process = primitives.group_normalise(
        jnp.cumsum(ratio, axis=1), key, mask, center=baseline, scale="none"
    )
    return token_credit(batch, scalar[:, None] + process, rows)


def pure(
    batch: CreditBatch,
    *,
    temperature: float = 0.1,
    form: Literal["softmin", "min"] = "softmin",
    baseline: Literal["segment", "token", "none"] = "segment",
    outcome_coef: float = 1.0,
) -> Credit:
    """Process scores counted by their minimum instead of their sum.

        r_j = p_j softmax(-p / temperature)_j - baseline,   A_j = sum_{k >= j} r_k
        and outcome_coef (solved_i - mean of the others' solved) on the last segment

    PURE (arXiv:2504.08662). Evidence: code. Separators belong outside `token_mask`.

    Args:
      batch: reads `score` [B, S] in [-1, 1] and `success` [B].
      temperature: towards 0 the minimum alone counts, towards infinity the mean.
      form: "min" gives the exact `min_{k >= j} p_k` as the return of segment j.
      baseline: mean over the group's other rows of their reward per "segment", or per "token"
        times the segment's tokens; or "none".
      outcome_coef: weight of the outcome.

    Returns:
      `Credit`; aux["process_reward"] [B, S].

    Raises:
      ValueError: unknown `form` or `baseline`.
    """
    primitives.require_choice("form", form, ("softmin", "min"))
    primitives.require_choice("baseline", baseline, ("segment", "token", "none"))
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    score = jnp.where(segments, batch.score, 0.0)
    if form == "softmin":
        weights = primitives.softmin_weights(score, segments, temperature=temperature)
        process = weights * score
    else:
        lowest = jax.lax.cummin(jnp.where(segments, score, jnp.inf), axis=1, reverse=True)
        lowest = jnp.where(jnp.isfinite(lowest), lowest, 0.0)
        following = jnp.concatenate([lowest[:, 1:], jnp.zeros_like(lowest[:, :1])], axis=1)
        process = jnp.where(segments, lowest - following, 0.0)
    size = segments * 1.0
    if baseline == "token":
        mask = policy_tokens(batch, rows)
        size = primitives.reduce_by_segment(
            mask * 1.0, batch.token_segment, mask, segments.shape[1]
        )
    rewards = process
    if baseline != "none":
        rate = jnp.sum(process, axis=1) / jnp.maximum(jnp.sum(size, axis=1), 1)
        rewards = rewards - size * primitives.mean_of_others(rate, batch.group_id, rows)[:, None]
    solved = jnp.where(rows, batch.success, False) * 1.0
    outcome = outcome_coef * (
        solved - 1 - primitives.mean_of_others(solved - 1, batch.group_id, rows)
    )
    last = primitives.last_segment(segments)
    rewards = rewards + jnp.where(last, outcome[:, None], 0.0)
    return to_credit(
        batch,
        primitives.reward_to_go(rewards, segments),
        rows,
        aux={"process_reward": process},
    )


SPECS: dict[str, EstimatorSpec] = {
    "spo_chain": describe(
        spo_chain, (*RETURN, "cut", "cut_value", "cut_mask"), "SPO, arXiv:2505.23564", "code",
        "monte_carlo", "token", cost="continuations at cut points",
    ),
    "grpo_lambda": describe(
        grpo_lambda, GROUP, "GRPO-lambda, arXiv:2510.00194", "code", "group", "token",
    ),
    "tempo": describe(
        tempo, (*GROUP, "prefix_key"), "TEMPO, arXiv:2509.18314", "paper", "tree", "token",
        cost="prefixes hashed on the host",
    ),
    "scar": describe(
        scar, (*RETURN, "coalition", "segment_id"), "SCAR, arXiv:2505.20417", "reconstructed",
        "monte_carlo", "token", cost="2^n reward model calls",
    ),
    "spro": describe(
        spro, (*GROUP, "behaviour_logp", "ref_logp"), "SPRO, arXiv:2507.01551", "paper", "group",
        "token", cost="reference log-probs",
    ),
    "pure": describe(
        pure, ("success", "group_id", "score"), "PURE, arXiv:2504.08662", "code", "group",
        "segment", cost="process reward model",
    ),
}  # fmt: skip
