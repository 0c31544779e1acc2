"""Self-Credit: the policy's own citations say which segments carry the outcome."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from focus.credit import baselines, primitives
from focus.credit.rows import (
    key_in_group,
    scored_rows,
    segments_of,
    to_credit,
    tokens_per_segment,
)
from focus.credit.spec import GROUP, EstimatorSpec, describe
from focus.types import Array, Credit, CreditBatch


def failure_weight(progress: Array, *, start: float = 1.5, end: float = 1.0) -> Array:
    """Weight of failure-only classes, linear in the share of training done [] in [0, 1]."""
    return start + (end - start) * jnp.clip(progress, 0.0, 1.0)


def _counts_by_class(batch: CreditBatch, cited: Array, rows: Array, count_self: bool):
    """Rows of the group, successful and failed, that cite the segment's class: two [B, S]."""
    shape = batch.segment_mask.shape
    key = key_in_group(batch, batch.match_class)
    row = jnp.broadcast_to(jnp.arange(shape[0], dtype=jnp.int32)[:, None], shape)
    used = (cited & (key >= 0)).ravel()
    size = used.size
    # A row counts once for a class, however often it cites it.
    own = primitives.joint_key(row, jnp.where(used.reshape(shape), key, -1)).ravel()
    slot = jnp.where(own >= 0, own, size)
    index = jnp.arange(size, dtype=jnp.int32)
    first = used & (jax.ops.segment_min(index, slot, size + 1)[slot] == index)
    class_slot = jnp.where(key.ravel() >= 0, key.ravel(), size)
    itself = 0 if count_self else used.reshape(shape).astype(jnp.int32)

    def count(kind):
        chosen = (first & jnp.broadcast_to(kind[:, None], shape).ravel()).astype(jnp.int32)
        total = jax.ops.segment_sum(chosen, class_slot, size + 1)[class_slot].reshape(shape)
        return jnp.where(key >= 0, total - itself * kind[:, None], 0)

    return count(batch.success & rows), count(~batch.success & rows)


def _counts_by_match(batch: CreditBatch, cited: Array, rows: Array, count_self: bool):
    """The same from pairs; a segment matches itself."""
    num_rows, num_segments = batch.segment_mask.shape
    same_group = batch.group_id[:, None] == batch.group_id[None, :]
    pairs = batch.match.reshape(num_rows, num_segments, num_rows, num_segments)
    cites = jnp.any(pairs & cited[None, None], axis=3) & same_group[:, None]
    itself = jnp.eye(num_rows, dtype=bool)[:, None]
    cites = (cites | itself & cited[:, :, None]) if count_self else (cites & ~itself)

    def count(kind):
        return jnp.sum(cites & kind[None, None], axis=2)

    return count(batch.success & rows), count(~batch.success & rows)


def self_credit(
    batch: CreditBatch,
    *,
    success_weight: float = 2.5,
    failure_start: float = 1.5,
    failure_end: float = 1.0,
    cited_weight: float = 1.5,
    matching: str = "class",
    count_self: bool = True,
    conserve: bool = False,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """GRPO, weighted by how citations of a segment agree over the group.

        A_{j,t} = A_j w_{j,t};   with n+ (n-) successful (failed) rows that cite the class of t:
        w = success_weight   n+ >= 2, n- = 0
            w_f              n- >= 2, n+ = 0;  linear from failure_start to failure_end
            1                both > 0, or not cited
            cited_weight     other cited segments of rows with A > 0, else 1

    In successes, the answer (`is_answer`) and tokens of summaries (`summary_mask`) count as cited
    and unmatched where the batch has those channels. Such tokens belong to a segment whose turn
    has a weight of its own; with `conserve` they share it. Self-Credit (no arXiv number is known
    here). Evidence: paper; the standard deviation and whether a row counts itself are not stated
    there. Weights are positive, so signs stay.

    Args:
      batch: reads `cited` [B, S], `progress` [] and `match_class` [B, S] or, with
        matching="pairs", `match` [B * S, B * S].
      success_weight: of classes that only successes cite.
      failure_start: w_f at the start of training.
      failure_end: w_f at its end.
      cited_weight: of other citations in rows with A > 0.
      matching: "class", where matches are closed transitively, or "pairs", where they are not.
      count_self: whether a row counts among n+ and n-.
      conserve: scale weights so that a row's token total stays what it was.
      ddof: see `baselines.grpo`.
      eps: see `baselines.grpo`.

    Returns:
      `Credit`; aux["weight"] [B, S].

    Raises:
      ValueError: unknown `matching`, or a channel is missing.
    """
    primitives.require_choice("matching", matching, ("class", "pairs"))
    channel = "match_class" if matching == "class" else "match"
    primitives.require_channels(batch, ("cited", "progress", channel), "self_credit")
    base = baselines.grpo(batch, ddof=ddof, eps=eps).segment_advantages
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    cited = batch.cited & segments
    counts = _counts_by_class if matching == "class" else _counts_by_match
    won, lost = counts(batch, cited, rows, count_self)
    closing = jnp.zeros_like(cited) if batch.is_answer is None else batch.is_answer
    closing = closing & segments & batch.success[:, None]
    won, lost = (jnp.where(closing, 0, n) for n in (won, lost))
    w_f = failure_weight(batch.progress, start=failure_start, end=failure_end)
    weight = jnp.where(base > 0, cited_weight, 1.0)
    weight = jnp.where((won > 0) & (lost > 0), 1.0, weight)
    weight = jnp.where((won >= 2) & (lost == 0), success_weight, weight)
    weight = jnp.where((lost >= 2) & (won == 0), w_f, weight)
    weight = jnp.where(cited | closing, weight, 1.0)
    weight = primitives.reweight(
        jnp.ones_like(weight), weight, tokens_per_segment(batch, rows), segments, conserve=conserve
    )
    credit = to_credit(batch, base * weight, rows, aux={"weight": weight})
    if conserve or batch.summary_mask is None:
        return credit
    # A segment is a turn and the summary that closed it; the summary has a weight of its own.
    plain = to_credit(batch, base, rows).advantages
    summary = plain * jnp.where(batch.success[:, None] & (plain > 0), cited_weight, 1.0)
    return dataclasses.replace(
        credit, advantages=jnp.where(batch.summary_mask, summary, credit.advantages)
    )


SPECS: dict[str, EstimatorSpec] = {
    "self_credit": describe(
        self_credit, (*GROUP, "success", "cited", "progress"), "Self-Credit", "paper", "group",
        "segment", cost="a summary that cites", default_inputs=("match_class",),
    ),
}  # fmt: skip
