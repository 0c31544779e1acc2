"""Baselines whose credit is computed on tokens: REINFORCE++, PPO, bi-level GAE, OPO, DAPO, GSPO.

The rules of `baselines` hold. A truncated row counts as ended: with an outcome it takes part,
without one it leaves the loss. Whitening is the sources' default here, and an argument.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from focus.credit import primitives
from focus.credit.hparams import is_off, is_traced
from focus.credit.rows import (
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


def reinforce_pp(
    batch: CreditBatch, *, discount: float = 1.0, kl_coef: float = 0.0, whiten: bool = True
) -> Credit:
    """Return-to-go of each token, standardised over all policy tokens of the batch.

        A = whiten(sum_{k >= t} discount^(k - t) (r_k - kl_coef (logp_k - ref_logp_k)))

    REINFORCE++ (arXiv:2501.03262). Evidence: code.

    Args:
      batch: reads `ref_logp` [B, L] when `kl_coef` is not 0.
      discount: per token.
      kl_coef: weight of the penalty inside the reward.
      whiten: False leaves the returns as they are.

    Returns:
      `Credit`.

    Raises:
      ValueError: `kl_coef` without `ref_logp`.
    """
    rows = scored_rows(batch)
    mask = policy_tokens(batch, rows)
    rewards = token_rewards(batch, rows, mask, kl_coef=kl_coef)
    advantages = primitives.reward_to_go(rewards, mask, discount=discount)
    if whiten:
        advantages = primitives.masked_whiten(advantages, mask)
    return token_credit(batch, advantages, rows)


def reinforce_pp_baseline(batch: CreditBatch, *, whiten: bool = True) -> Credit:
    """Return minus the group's mean, standardised over all policy tokens of the batch.

        A = whiten(R_i - mean_g R)

    REINFORCE++ with a group baseline (arXiv:2501.03262). Evidence: code.

    Args:
      batch: core channels only.
      whiten: False leaves the differences as they are (then it is Dr. GRPO).

    Returns:
      `Credit`.
    """
    rows = scored_rows(batch)
    mask = policy_tokens(batch, rows)
    centred = primitives.group_normalise(returns(batch, rows), batch.group_id, rows, scale="none")
    advantages = jnp.broadcast_to(centred[:, None], mask.shape)
    if whiten:
        advantages = primitives.masked_whiten(advantages, mask)
    return token_credit(batch, advantages, rows)


def ppo_token(
    batch: CreditBatch,
    *,
    discount: float = 1.0,
    lambda_: float = 0.95,
    kl_coef: float = 0.0,
    whiten: bool = True,
) -> Credit:
    """Generalised advantage estimation over policy tokens, stepping over observations.

        delta_t = r_t + discount V_{t'} - V_t,   A_t = delta_t + discount lambda A_{t'}

    PPO (arXiv:1707.06347) and GAE (arXiv:1506.02438) on tokens. Evidence: code.

    Args:
      batch: reads `token_value` [B, L]; `ref_logp` [B, L] when `kl_coef` is not 0.
      discount: per token.
      lambda_: trace decay, per token.
      kl_coef: see `reinforce_pp`.
      whiten: standardise over all policy tokens of the batch; targets never are.

    Returns:
      `Credit`; targets["token_value"] [B, L] is A + V before whitening.

    Raises:
      ValueError: `kl_coef` without `ref_logp`.
    """
    rows = scored_rows(batch)
    mask = policy_tokens(batch, rows)
    rewards = token_rewards(batch, rows, mask, kl_coef=kl_coef)
    advantages = primitives.masked_gae(
        batch.token_value, rewards, mask, discount=discount, lambda_=lambda_
    )
    targets = jnp.where(mask, advantages + batch.token_value, 0.0)
    if whiten:
        size = jnp.where(mask, jnp.abs(batch.token_value), 0.0)
        advantages = primitives.masked_whiten(advantages, mask, size=size)
    return token_credit(batch, advantages, rows, targets={"token_value": targets})


def bilevel_gae(
    batch: CreditBatch,
    *,
    discount: float = 1.0,
    lambda_: float = 0.95,
    segment_discount: float = 0.95,
    segment_lambda: float = 0.95,
    whiten: bool = True,
) -> Credit:
    """GAE over segments, whose result is the reward of a GAE inside each segment.

        r_t = A_j + V_j at the last token of segment j, else 0;   token traces stop at its borders

    VAGEN (arXiv:2510.16907). Evidence: code. A segment's value is read at its last token.

    Args:
      batch: reads `token_value` [B, L].
      discount, lambda_: of the token level.
      segment_discount, segment_lambda: of the segment level.
      whiten: standardise over all policy tokens of the batch.

    Returns:
      `Credit`; targets["token_value"] [B, L] is A + V before whitening. At the last token of a
      segment A is the segment's own advantage.
    """
    rows = scored_rows(batch)
    mask = policy_tokens(batch, rows)
    width = batch.segment_mask.shape[1]
    has_tokens = primitives.reduce_by_segment(mask * 1.0, batch.token_segment, mask, width) > 0
    values = primitives.at_last_token(batch.token_value, batch.token_segment, mask, width)
    played = segments_of(batch, rows) & has_tokens
    ends = primitives.put_on_last_token(played * 1.0, played, batch.token_segment, mask) > 0
    # Rewards of segments without tokens move to the segment before them.
    on_tokens = token_rewards(batch, rows, mask)
    rewards = primitives.reduce_by_segment(on_tokens, batch.token_segment, mask, width)
    segment_advantages = primitives.masked_gae(
        values, rewards, played, discount=segment_discount, lambda_=segment_lambda
    )
    inner = primitives.broadcast_to_tokens(segment_advantages + values, batch.token_segment)
    advantages = primitives.masked_gae(
        batch.token_value,
        jnp.where(ends, inner, 0.0),
        mask,
        discount=discount,
        lambda_=lambda_,
        reset=ends,
    )
    targets = jnp.where(mask, advantages + batch.token_value, 0.0)
    if whiten:
        size = jnp.where(mask, jnp.abs(batch.token_value), 0.0)
        advantages = primitives.masked_whiten(advantages, mask, size=size)
    return token_credit(batch, advantages, rows, targets={"token_value": targets})


def opo(batch: CreditBatch) -> Credit:
    """Return minus a baseline that weights the group's rows by their lengths.

        A_i = R_i - sum_g len R / sum_g len

    OPO (arXiv:2505.23585). Evidence: code. The weights stand for squared gradient norms.

    Args:
      batch: core channels only; a row's length is its number of policy tokens.

    Returns:
      `Credit`. A row alone with its task gets 0.
    """
    rows = scored_rows(batch)
    total = returns(batch, rows)
    length = jnp.sum(policy_tokens(batch, rows), axis=1).astype(total.dtype)
    # Centred first, so that a group of equal returns gives exactly 0.
    centred = primitives.group_statistics(total, batch.group_id, rows).centred
    weighted = primitives.value_by_key(length * centred, batch.group_id, rows)
    mean_length = primitives.value_by_key(length, batch.group_id, rows)
    baseline = jnp.where(mean_length > 0, weighted / jnp.maximum(mean_length, 1e-9), 0.0)
    scalar = jnp.where(rows, centred - baseline, 0.0)
    return to_credit(batch, scalar[:, None], rows)


def overlong_penalty(length: Array, *, max_length: int, buffer: int, factor: float = 1.0) -> Array:
    """Reward for staying short, `min(-(length - (max_length - buffer)) / buffer factor, 0)`.

    DAPO (arXiv:2503.14476). Evidence: code.

    Args:
      length: [B] tokens.
      max_length: tokens at which the penalty reaches `factor`.
      buffer: tokens over which it grows.
      factor: size of the penalty.

    Returns:
      [B], <= 0.

    Raises:
      ValueError: `buffer` is not in [1, max_length].
    """
    if not (is_traced(buffer) or is_traced(max_length)) and not 1 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer} must lie in [1, max_length={max_length}]")
    return jnp.minimum(-(length - (max_length - buffer)) / buffer * factor, 0.0)


def groups_with_spread(batch: CreditBatch) -> Array:
    """Rows [B] bool of groups whose returns are not all equal.

    The filter of DAPO (arXiv:2503.14476); the others teach nothing and are sampled again.
    Evidence: code.
    """
    rows = scored_rows(batch)
    total = returns(batch, rows)
    return primitives.group_statistics(total, batch.group_id, rows, ddof=0).std > 0


def dapo(
    batch: CreditBatch,
    *,
    max_length: int = 0,
    buffer: int = 1,
    factor: float = 1.0,
    drop_flat_groups: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """GRPO over returns with a length penalty, without groups that agree.

        R'_i = R_i + min(-(len_i - (max_length - buffer)) / buffer factor, 0)

    DAPO (arXiv:2503.14476). Evidence: code. Its clip range (.2, .28) and mean over tokens belong
    to the loss.

    Args:
      batch: core channels only.
      max_length, buffer, factor: see `overlong_penalty`; `max_length` 0 is without penalty.
        Traced, they are not checked.
      drop_flat_groups: tokens of groups whose returns, before the penalty, are all equal leave
        the loss. The sampler that refills the batch is a controller.
      ddof, eps: see `baselines.grpo`.

    Returns:
      `Credit`; aux["kept"] [B] bool are the rows that stay.

    Raises:
      ValueError: see `overlong_penalty`.
    """
    rows = scored_rows(batch)
    total = returns(batch, rows)
    if not is_off(max_length):
        length = jnp.sum(policy_tokens(batch, rows), axis=1)
        penalty = overlong_penalty(length, max_length=max_length, buffer=buffer, factor=factor)
        total = total + jnp.where(max_length > 0, penalty, 0.0)
    if drop_flat_groups:
        rows = rows & groups_with_spread(batch)
    scalar = primitives.group_normalise(total, batch.group_id, rows, ddof=ddof, eps=eps)
    return to_credit(
        batch,
        scalar[:, None],
        rows,
        aux={"kept": rows},
    )


def gspo_objective(
    logp: Array,
    behaviour_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Array:
    """Clipped objective with one importance ratio for a whole sequence.

        s = exp(mean_t (logp_t - behaviour_logp_t)),   s_t = sg(s) exp(logp_t - sg(logp_t))
        J = mean_i mean_t min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)

    GSPO (arXiv:2507.18071), with the advantages of GRPO. Evidence: code. To be maximised.

    Args:
      logp: [B, L] of the current policy.
      behaviour_logp, advantages: [B, L], constants.
      mask: [B, L] bool, tokens in the loss.
      clip_low, clip_high: clip range around 1.

    Returns:
      Scalar; rows without tokens do not count.
    """
    difference = jnp.where(mask, logp, 0.0) - jnp.where(mask, behaviour_logp, 0.0)
    sequence = jnp.exp(primitives.masked_mean(difference, mask, axis=1))[:, None]
    local = jnp.exp(jnp.where(mask, logp - jax.lax.stop_gradient(logp), 0.0))
    ratio = jax.lax.stop_gradient(sequence) * local
    advantages = jnp.where(mask, advantages, 0.0)
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    per_token = jnp.minimum(ratio * advantages, clipped * advantages)
    return primitives.masked_mean(
        primitives.masked_mean(per_token, mask, axis=1), jnp.any(mask, axis=1)
    )


SPECS: dict[str, EstimatorSpec] = {
    "reinforce_pp": describe(
        reinforce_pp, RETURN, "Hu et al., REINFORCE++, arXiv:2501.03262", "code", "group", "token",
    ),
    "reinforce_pp_baseline": describe(
        reinforce_pp_baseline, GROUP, "Hu et al., REINFORCE++, arXiv:2501.03262", "code", "group",
        "trajectory",
    ),
    "ppo_token": describe(
        ppo_token, (*RETURN, "token_value"),
        "Schulman et al., arXiv:1707.06347 and arXiv:1506.02438", "code", "td", "token",
        cost="critic on tokens",
    ),
    "bilevel_gae": describe(
        bilevel_gae, (*RETURN, "token_value"), "Wang et al., VAGEN, arXiv:2510.16907", "code", "td",
        "token", cost="critic on tokens",
    ),
    "opo": describe(opo, GROUP, "Hao et al., OPO, arXiv:2505.23585", "code", "group", "trajectory"),
    "dapo": describe(
        dapo, GROUP, "Yu et al., DAPO, arXiv:2503.14476", "code", "group", "trajectory",
        cost="groups sampled again",
    ),
    "gspo": describe(
        gspo_objective, ("behaviour_logp",), "Zheng et al., GSPO, arXiv:2507.18071", "code",
        "group", "trajectory", min_group_size=2, kind="loss",
    ),
}  # fmt: skip
