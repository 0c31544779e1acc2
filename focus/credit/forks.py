"""Estimators that read where rollouts part: trees of segments, retries, branches.

The rules of `rows` hold; a truncated row counts as ended. Forks lie between segments. Tokens that
a row shares with its parent are trained there and leave its mask.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from focus.credit import primitives
from focus.credit.rows import (
    group_advantage,
    keep_tokens,
    returns,
    scored_rows,
    to_credit,
    without_copied,
)
from focus.credit.spec import GROUP, RETURN, EstimatorSpec, describe
from focus.types import Array, Credit, CreditBatch

ForkRows = Literal["whole", "suffix"]


def spo_tree(
    batch: CreditBatch,
    *,
    scale: Literal["none", "std"] = "none",
    eps: float = 1e-8,
    drop_zero: bool = True,
) -> Credit:
    """Value of a tree node minus its parent's, on the segment that leads to it.

        V(node) = mean of its children's,   A(node) = V(node) - V(parent)

    SPO-tree (arXiv:2505.23564). Evidence: code.

    Args:
      batch: reads `parent`, `leaf_traj` [M] and `node_of_segment` [B, S] (-1: no node).
      scale: "std" divides by the population's standard deviation of the siblings' values.
      eps: added to it.
      drop_zero: tokens of edges without advantage leave the loss.

    Returns:
      `Credit`; aux["node_value"] [M].

    Raises:
      ValueError: unknown `scale`.
    """
    primitives.require_choice("scale", scale, ("none", "std"))
    rows = scored_rows(batch)
    total = returns(batch, rows)
    at = jnp.maximum(batch.leaf_traj, 0)
    scored = (batch.leaf_traj >= 0) & rows[at]
    value, known = primitives.tree_backup(total[at], scored, batch.parent)
    # A parent's value is the mean of its children's: each is compared with its siblings.
    has_parent = known & (batch.parent >= 0)
    siblings = primitives.group_statistics(value, batch.parent, has_parent, ddof=0)
    edge = siblings.centred
    if scale == "std":
        edge = edge / (siblings.std + eps)
    node = batch.node_of_segment
    advantages = jnp.where(node >= 0, edge[jnp.maximum(node, 0)], 0.0)
    credit = to_credit(batch, advantages, rows, aux={"node_value": value})
    return keep_tokens(credit, credit.advantages != 0) if drop_zero else credit


def at2po(
    batch: CreditBatch,
    *,
    backup: primitives.Backup = "leaf_mean",
    advantage: str = "node_value",
    eps: float = 1e-6,
) -> Credit:
    """AT2PO: standardised leaves, backed up a tree of segments.

        z = (R - mean) / (std_0 + eps) over the leaves of a tree
        V(node) = mean over its children, mean over its leaves, or children weighted by
                  softmax(entropy)
        A = V | V - V(parent) | V - V(root) | 2 V - V(root) - V(parent);   a root keeps its V

    arXiv:2601.04767. Evidence: code; the released script uses backup="child_softmax". The
    method's loss, a clipped ratio per turn, is separate.

    Args:
      batch: reads `parent`, `leaf_traj`, `tree_id` [M], `node_of_segment` [B, S] and, for
        "child_softmax", `node_entropy` [M].
      backup: "leaf_mean", "child_mean" or "child_softmax".
      advantage: "node_value", "diff_parent", "diff_global" or "diff_localglobal".
      eps: added to the standard deviation.

    Returns:
      `Credit`; copied tokens leave the mask. aux["node_value"] and aux["node_advantage"] [M].

    Raises:
      ValueError: unknown `backup` or `advantage`, or a channel is missing.
    """
    primitives.require_choice("backup", backup, ("leaf_mean", "child_mean", "child_softmax"))
    choices = ("node_value", "diff_parent", "diff_global", "diff_localglobal")
    primitives.require_choice("advantage", advantage, choices)
    needed = ("parent", "leaf_traj", "tree_id", "node_of_segment")
    needed += ("node_entropy",) if backup == "child_softmax" else ()
    primitives.require_channels(batch, needed, "at2po")
    rows = scored_rows(batch)
    total = returns(batch, rows)
    row = jnp.clip(batch.leaf_traj, 0, rows.size - 1)
    leaf = (batch.leaf_traj >= 0) & rows[row]
    z = primitives.group_normalise(total[row], batch.tree_id, leaf, ddof=0, eps=eps)
    value, reached = primitives.tree_backup(
        z, leaf, batch.parent, rule=backup, entropy=batch.node_entropy
    )
    num_nodes = batch.parent.size
    is_root = batch.parent < 0
    above = value[jnp.where(is_root, 0, batch.parent)]
    tree = primitives.joint_key(batch.tree_id)
    root_slot = jnp.where(is_root & reached & (tree >= 0), tree, num_nodes)
    root = jax.ops.segment_sum(value, root_slot, num_nodes + 1)[jnp.maximum(tree, 0)]
    of_node = {
        "node_value": value,
        "diff_parent": value - above,
        "diff_global": value - root,
        "diff_localglobal": 2 * value - root - above,
    }[advantage]
    of_node = primitives.without_rounding(of_node, jnp.max(jnp.abs(z)))
    of_node = jnp.where(reached, jnp.where(is_root, value, of_node), 0.0)
    index = batch.node_of_segment
    advantages = jnp.where(index >= 0, of_node[jnp.maximum(index, 0)], 0.0)
    aux = {"node_value": value, "node_advantage": of_node}
    return without_copied(batch, to_credit(batch, advantages, rows, aux=aux))


def _forks(batch: CreditBatch, rows: Array, fork_rows: ForkRows):
    """Forks [B] bool whose parent counts too, their parents [B], which of the parent's segments
    came before the fork [B, S], and which of a row's own segments are not a copy of those [B, S].
    """
    primitives.require_choice("fork_rows", fork_rows, ("whole", "suffix"))
    parent = jnp.clip(batch.parent_traj, 0, rows.size - 1)
    fork = rows & (batch.parent_traj >= 0) & (batch.fork_segment >= 0) & rows[parent]
    position = jnp.arange(batch.segment_mask.shape[1])
    before = (batch.parent_traj >= 0)[:, None] & (position < batch.fork_segment[:, None])
    own = jnp.ones_like(before) if fork_rows == "suffix" else ~before
    return fork, parent, before, own


def _own_tokens(batch: CreditBatch, credit: Credit, own: Array) -> Credit:
    """Leaves the copied prefix of a fork to its parent."""
    kept = primitives.broadcast_to_tokens(own, batch.token_segment)
    return without_copied(batch, keep_tokens(credit, kept))


def pivoarl(
    batch: CreditBatch,
    *,
    prefix: Literal["credit", "zero"] = "credit",
    scale: Literal["none", "std"] = "none",
    fork_rows: ForkRows = "whole",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """PivoARL: a retry from the blamed segment clears what came before it.

        A_i = norm(R) among an original and its retries; rows without a retry: in their group
        original, t < p: max(A_original, A_retry);   t >= p and the retry's suffix: own A

    A retry of a retry belongs to the same original, and clears what it shares with either.
    arXiv:2607.03702. Evidence: reconstructed; the formula was not found.

    Args:
      batch: reads `parent_traj`, `fork_segment` [B].
      prefix: "credit" as above, or "zero": a prefix that a retry shares learns nothing.
      scale: "none" or "std".
      fork_rows: a fork's row holds the "whole" way from the start, or the "suffix" after the fork.
      ddof: see `baselines.grpo`.
      eps: see `baselines.grpo`.

    Returns:
      `Credit`; copied prefixes leave the mask. aux["reflection_return"] [B] is a retry's return
      minus its original's.

    Raises:
      ValueError: unknown `prefix`, `scale` or `fork_rows`, or a channel is missing.
    """
    primitives.require_choice("prefix", prefix, ("credit", "zero"))
    primitives.require_channels(batch, ("parent_traj", "fork_segment"), "pivoarl")
    rows = scored_rows(batch)
    total = returns(batch, rows)
    fork, parent, before, own = _forks(batch, rows, fork_rows)
    size = rows.size
    above = jnp.where(fork, parent, jnp.arange(size))
    rounds = max((size - 1).bit_length(), 1)  # of doubling: ancestors 1, 2, 4 ... forks away
    family = above
    for _ in range(rounds):
        family = family[family]
    retried = jax.ops.segment_max(fork.astype(jnp.int32), family, size)[family] > 0
    norm = {"scale": scale, "ddof": ddof, "eps": eps}
    within = primitives.group_normalise(total, family, rows & retried, **norm)
    fresh = rows & (batch.parent_traj < 0)
    alone = primitives.group_normalise(total, batch.group_id, fresh, **norm)
    scalar = jnp.where(retried, within, alone)
    # The best of a row and of all that share its segment, by ancestors ever further away.
    best, covered = jnp.broadcast_to(scalar[:, None], before.shape), jnp.zeros_like(before)
    position, shares = jnp.arange(before.shape[1]), jnp.where(fork, batch.fork_segment, 0)
    for _ in range(rounds):
        shared = position < shares[:, None]
        # A row without its prefix shares all of that with those that leave it.
        push = best if fork_rows == "whole" else jnp.max(best, axis=1, keepdims=True)
        found = jax.ops.segment_max(jnp.where(shared, push, -jnp.inf), above, size)
        covered = covered | jnp.isfinite(found)
        best = jnp.maximum(best, found)
        further = shares[above]
        shares = jnp.minimum(shares, further) if fork_rows == "whole" else further
        above = above[above]
    if prefix == "zero":
        best = jnp.where(covered, 0.0, scalar[:, None])
    advantages = jnp.where(own, best, 0.0)
    reflection = jnp.where(fork, total - total[parent], 0.0)
    credit = to_credit(batch, advantages, rows, aux={"reflection_return": reflection})
    return _own_tokens(batch, credit, own)


def cbpo(
    batch: CreditBatch,
    *,
    eta: float = 0.2,
    phi: float = 2.0,
    fork_rows: ForkRows = "whole",
    ddof: int = 0,
    eps: float = 1e-6,
) -> Credit:
    """CBPO: GRPO, stronger after forks whose outcomes differ, shared before them.

        Z = standardised std_0(R) of each fork (a parent and its branches there) over the batch
        A_fin = A + eta sign(A) clip(Z, +-|A| / phi);   A_shared = mean A at the fork
        parent: A_shared_1, then (A_fin_j + A_shared_{j+1}) / 2, last A_fin_J;  branch: A_fin

    arXiv:2608.24300. Evidence: paper. Forks lie between segments here.

    Args:
      batch: reads `parent_traj`, `fork_segment` [B].
      eta: strength.
      phi: |A_fin - A| <= eta |A| / phi.
      fork_rows: see `pivoarl`.
      ddof: see `baselines.grpo`.
      eps: see `baselines.grpo`; also added to the deviation of Z.

    Returns:
      `Credit`; copied prefixes leave the mask. aux["z"] [B] of each fork's node.

    Raises:
      ValueError: unknown `fork_rows`, or a channel is missing.
    """
    primitives.require_channels(batch, ("parent_traj", "fork_segment"), "cbpo")
    rows = scored_rows(batch)
    base = group_advantage(batch, rows, ddof=ddof, eps=eps)
    total = returns(batch, rows)
    fork, parent, _, own = _forks(batch, rows, fork_rows)
    size, width = batch.segment_mask.shape
    node = primitives.joint_key(jnp.where(fork, parent, -1), batch.fork_segment)
    slot = jnp.where(fork, node, size)

    def at_nodes(values, reduce=jax.ops.segment_sum):
        return reduce(values, slot, size + 1)[:size]

    branches = at_nodes(fork.astype(total.dtype))
    valid = branches > 0
    head = jnp.where(valid, at_nodes(parent, jax.ops.segment_max), 0)
    place = jnp.where(valid, at_nodes(batch.fork_segment, jax.ops.segment_max), 0)
    count = branches + 1
    shared = (at_nodes(base) + base[head]) / count
    mean = (at_nodes(total) + total[head]) / count
    off = jnp.square(total - mean[jnp.where(fork, node, 0)])
    spread = (at_nodes(jnp.where(fork, off, 0)) + jnp.square(total[head] - mean)) / count
    spread = jnp.where(valid & (spread > 0), jnp.sqrt(jnp.where(spread > 0, spread, 1.0)), 0.0)
    everywhere = jnp.where(valid, 0, -1)
    spread = primitives.group_statistics(
        spread, everywhere, valid, ddof=0, size=jnp.abs(mean) + spread
    )
    z = spread.centred / (spread.std + eps)

    def final(advantage, z):
        limit = jnp.abs(advantage) / phi
        return advantage + eta * jnp.sign(advantage) * jnp.clip(z, -limit, limit)

    branch_final = final(base, jnp.where(fork, z[jnp.where(fork, node, 0)], 0.0))
    # Events along a row: its own fork, then the forks that leave it.
    row_index = jnp.arange(size)
    event = jnp.full((size, width), -1, jnp.int32)
    event = event.at[jnp.where(valid, head, size), place].set(row_index, mode="drop")
    position = jnp.arange(width)
    last = jax.lax.cummax(jnp.where(event >= 0, position, -1), axis=1)
    ahead = jax.lax.cummin(jnp.where(event >= 0, position, width), axis=1, reverse=True)
    ahead = jnp.concatenate([ahead[:, 1:], jnp.full((size, 1), width)], axis=1)
    previous = jnp.take_along_axis(event, jnp.maximum(last, 0), axis=1)
    following = jnp.take_along_axis(event, jnp.minimum(ahead, width - 1), axis=1)
    has_previous, has_next = last >= 0, ahead < width
    after_parent = final(base[:, None], z[jnp.maximum(previous, 0)])
    after = jnp.where(has_previous, after_parent, branch_final[:, None])
    has_after = has_previous | fork[:, None]
    before = shared[jnp.maximum(following, 0)]
    advantages = jnp.where(has_next, jnp.where(has_after, (after + before) / 2, before), after)
    advantages = jnp.where(own, advantages, 0.0)
    aux = {"z": jnp.where(fork, z[jnp.where(fork, node, 0)], 0.0)}
    return _own_tokens(batch, to_credit(batch, advantages, rows, aux=aux), own)


SPECS: dict[str, EstimatorSpec] = {
    "spo_tree": describe(
        spo_tree, (*RETURN, "parent", "leaf_traj", "node_of_segment"), "SPO, arXiv:2505.23564",
        "code", "tree", "segment", cost="tree of rollouts",
    ),
    "at2po": describe(
        at2po, (*RETURN, "parent", "leaf_traj", "tree_id", "node_of_segment"),
        "AT2PO, arXiv:2601.04767", "code", "tree", "segment", cost="tree of rollouts",
    ),
    "pivoarl": describe(
        pivoarl, (*GROUP, "parent_traj", "fork_segment"), "PivoARL, arXiv:2607.03702",
        "reconstructed", "counterfactual", "segment", cost="a reflection and a retry per failure",
    ),
    "cbpo": describe(
        cbpo, (*GROUP, "parent_traj", "fork_segment"), "CBPO, arXiv:2608.24300", "paper",
        "counterfactual", "segment", cost="branches",
    ),
}  # fmt: skip
