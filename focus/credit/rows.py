"""What the rows, segments and tokens of a batch are to an estimator, and how credit is packed.

All estimators share three rules.
  * The outcome is added to the reward of the row's last valid segment.
  * A row takes part only if `row_mask` keeps it and it has policy tokens; the others get no
    advantage, leave the loss mask, and stay out of every baseline.
  * A truncated row, which ran into a limit of ours, may lack an outcome (NaN). Estimators that
    cannot bootstrap treat it as a row without a score. The environment's own turn limit cuts
    nothing: it is an outcome, the same for every estimator.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from focus.credit import primitives
from focus.credit.hparams import is_off
from focus.types import Array, Credit, CreditBatch

# --- who takes part ------------------------------------------------------------------------------


def playing_rows(batch: CreditBatch) -> Array:
    """Rows [B] bool that may get an advantage: kept, with at least one policy token."""
    return batch.row_mask & jnp.any(batch.token_mask, axis=1)


def scored_rows(batch: CreditBatch) -> Array:
    """Playing rows [B] bool that have an outcome; a truncated row may lack one."""
    return playing_rows(batch) & ~(batch.truncated & jnp.isnan(batch.outcome))


def only_compared(batch: CreditBatch, rows: Array, advantages: Array) -> Array:
    """Advantages [B, S] of those of `rows` [B] whose group has another of them, 0 of the others.

    A method that compares the segments of a group would compare a lone row's with each other.
    """
    count = primitives.group_statistics(jnp.zeros(rows.shape), batch.group_id, rows).count
    return jnp.where(count[:, None] > 1, advantages, 0.0)


def segments_of(batch: CreditBatch, rows: Array) -> Array:
    """Segments [B, S] bool that exist in `rows` [B]."""
    return batch.segment_mask & rows[:, None]


def policy_tokens(batch: CreditBatch, rows: Array) -> Array:
    """Policy tokens [B, L] bool of the segments of `rows` [B]."""
    inside = primitives.broadcast_to_tokens(segments_of(batch, rows), batch.token_segment)
    return batch.token_mask & inside


def tokens_per_segment(batch: CreditBatch, rows: Array) -> Array:
    """Number [B, S] float of policy tokens of each segment of `rows` [B]."""
    mask = policy_tokens(batch, rows)
    count = mask.astype(jnp.float32)
    return primitives.reduce_by_segment(
        count, batch.token_segment, mask, batch.segment_mask.shape[1]
    )


# --- rewards and groups --------------------------------------------------------------------------


def segment_rewards(batch: CreditBatch, rows: Array, outcome: Array) -> Array:
    """Rewards [B, S] with each row's `outcome` [B] on its last valid segment, 0 off `rows`."""
    rewards = jnp.where(batch.segment_mask, batch.segment_reward, 0.0)
    rewards = rewards + jnp.where(
        primitives.last_segment(batch.segment_mask), outcome[:, None], 0.0
    )
    return jnp.where(rows[:, None], rewards, 0.0)


def token_rewards(batch: CreditBatch, rows: Array, mask: Array, *, kl_coef: float = 0.0) -> Array:
    """Rewards [B, L]: segment rewards and outcome on last tokens, minus a KL penalty on each.

    Raises:
      ValueError: `kl_coef` is not 0 and the batch has no `ref_logp`.
    """
    rewards = segment_rewards(batch, rows, batch.outcome)
    rewards = primitives.put_on_last_token(
        rewards, segments_of(batch, rows), batch.token_segment, mask
    )
    if not is_off(kl_coef):
        primitives.require_channels(batch, ("ref_logp",), f"kl_coef={kl_coef}")
        rewards -= primitives.log_ratio(batch.behaviour_logp, batch.ref_logp, mask, beta=kl_coef)
    return rewards


def returns(batch: CreditBatch, rows: Array) -> Array:
    """Undiscounted return [B] of each row, outcome included; 0 off `rows`."""
    rewards = jnp.sum(jnp.where(batch.segment_mask, batch.segment_reward, 0.0), axis=1)
    return jnp.where(rows, batch.outcome + rewards, 0.0)


def returns_to_go(batch: CreditBatch, rows: Array, *, discount: float = 1.0) -> Array:
    """Discounted return [B, S] from each segment on, outcome included; 0 off `rows`.

    Equal where as much follows, to the last bit: rows of any length are compared by state.
    """
    rewards = segment_rewards(batch, rows, batch.outcome)
    segments = segments_of(batch, rows)
    return primitives.reward_to_go(rewards, segments, discount=discount, in_order=True)


def group_of_segments(batch: CreditBatch) -> Array:
    """The row's group [B, S] int32 for each segment."""
    return jnp.broadcast_to(batch.group_id[:, None], batch.segment_mask.shape)


def key_in_group(batch: CreditBatch, key: Array) -> Array:
    """A key [B, S] made distinct between groups; -1 where it is missing."""
    return primitives.joint_key(group_of_segments(batch), key)


def group_advantage(
    batch: CreditBatch,
    rows: Array,
    *,
    center: primitives.Center = "mean",
    scale: primitives.Scale = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: primitives.Singleton = "zero",
) -> Array:
    """Return [B] of each row compared with its group's; see `primitives.group_normalise`."""
    return primitives.group_normalise(
        returns(batch, rows),
        batch.group_id,
        rows,
        center=center,
        scale=scale,
        ddof=ddof,
        eps=eps,
        singleton=singleton,
    )


# --- credit --------------------------------------------------------------------------------------


def to_credit(
    batch: CreditBatch,
    segment_advantages: Array,
    rows: Array,
    *,
    targets: dict[str, Array] | None = None,
    aux: dict[str, Array] | None = None,
) -> Credit:
    """Broadcasts segment advantages to tokens and masks what takes no part.

    A token stays in the loss if it is the policy's own, its segment exists and its row is among
    `rows` [B].

    Args:
      batch: the batch.
      segment_advantages: [B, S], or [B, 1] for all segments of a row.
      rows: [B] bool.
      targets, aux: of the credit.

    Returns:
      `Credit`.
    """
    segment_advantages = jnp.where(segments_of(batch, rows), segment_advantages, 0.0)
    mask = policy_tokens(batch, rows)
    advantages = primitives.broadcast_to_tokens(segment_advantages, batch.token_segment)
    return Credit(
        advantages=jnp.where(mask, advantages, 0.0),
        segment_advantages=segment_advantages,
        mask=mask,
        targets=targets or {},
        aux={"rows_used": jnp.sum(rows), **(aux or {})},
    )


def token_credit(
    batch: CreditBatch,
    advantages: Array,
    rows: Array,
    *,
    targets: dict[str, Array] | None = None,
    aux: dict[str, Array] | None = None,
) -> Credit:
    """Packs advantages [B, L]; a segment's advantage is the mean over its tokens."""
    mask = policy_tokens(batch, rows)
    advantages = jnp.where(mask, advantages, 0.0)
    return Credit(
        advantages=advantages,
        segment_advantages=primitives.reduce_by_segment(
            advantages, batch.token_segment, mask, batch.segment_mask.shape[1], rule="mean"
        ),
        mask=mask,
        targets=targets or {},
        aux={"rows_used": jnp.sum(rows), **(aux or {})},
    )


def keep_tokens(credit: Credit, kept: Array) -> Credit:
    """The credit without tokens outside `kept` [B, L] bool: they leave the loss."""
    mask = credit.mask & kept
    return dataclasses.replace(
        credit, advantages=jnp.where(mask, credit.advantages, 0.0), mask=mask
    )


def without_copied(batch: CreditBatch, credit: Credit) -> Credit:
    """The credit without tokens that a row shares with its parent, which are trained there."""
    return credit if batch.copied is None else keep_tokens(credit, ~batch.copied)
