"""Where published methods spend rollouts: their rules as pure functions of arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from focus.types import Array


def dapo_refill(outcome: Array, group_id: Array, mask: Array) -> Array:
    """Rows [B] bool whose group has equal outcomes and is to be sampled again (DAPO).

    Args:
      outcome: [B].
      group_id: [B] int32 in [0, B).
      mask: [B] bool, rows that count.
    """
    size = outcome.size
    top = jax.ops.segment_max(jnp.where(mask, outcome, -jnp.inf), group_id, size)[group_id]
    bottom = jax.ops.segment_min(jnp.where(mask, outcome, jnp.inf), group_id, size)[group_id]
    return mask & (top == bottom)


def spo_tree_leaves(branching: tuple[int, ...] = (6, 6, 6)) -> tuple[int, ...]:
    """Nodes at each depth of SPO's fixed segment tree (arXiv:2505.23564), the leaves last.

    Raises:
      ValueError: a branching factor is below 1.
    """
    if not branching or min(branching) < 1:
        raise ValueError(f"branching={branching} must hold factors >= 1")
    counts, nodes = [], 1
    for factor in branching:
        nodes *= factor
        counts.append(nodes)
    return tuple(counts)


def top_mask(score: Array, mask: Array, count: int) -> Array:
    """Marks the `count` kept entries of the largest score; ties go to the earlier. [N] bool."""
    order = jnp.argsort(jnp.where(mask, -score, jnp.inf), stable=True)
    rank = jnp.zeros(score.size, jnp.int32).at[order].set(jnp.arange(score.size, dtype=jnp.int32))
    return mask & (rank < count)


def at2po_scores(entropy: Array, branches: Array, *, penalty: float = 0.05) -> Array:
    """AT2PO's score of a node, entropy - penalty * branches (arXiv:2601.04767). [N]."""
    return entropy - penalty * branches


def patr_choice(
    score: Array, mask: Array, *, branch: int, stop_below: float
) -> tuple[Array, Array]:
    """PATR: branches the best process scores, stops the worst (arXiv:2607.15610).

    Evidence: reconstructed; the thresholds were not found, so they have no defaults.

    Args:
      score: [N] process scores.
      mask: [N] bool, rollouts that are running.
      branch: how many to branch.
      stop_below: a score below this stops a rollout.

    Returns:
      (branch [N] bool, stop [N] bool), disjoint.
    """
    stop = mask & (score < stop_below)
    return top_mask(score, mask & ~stop, branch), stop


def pivoarl_forks(success: Array, pivot_segment: Array, mask: Array) -> Array:
    """Segment [B] int32 where each failed row is retried once, -1 for none (PivoARL)."""
    return jnp.where(mask & ~success & (pivot_segment >= 0), pivot_segment, -1)


def cbpo_priority(
    entropy_rise: Array, path_branches: Array, node_branches: Array, *, slope: float = 2.0
) -> Array:
    """CBPO's priority of a branch point (arXiv:2608.24300); 0.25 and above is accepted.

    clip(0.2 + slope dH, 0, 1) / ((1 + path_branches)^0.2 (1 + node_branches)^0.2)
    """
    crowd = (1.0 + path_branches) ** 0.2 * (1.0 + node_branches) ** 0.2
    return jnp.clip(0.2 + slope * entropy_rise, 0.0, 1.0) / crowd


def tigpo_revisit(last_seen: Array, update: int | Array, *, delay: int = 10) -> Array:
    """Tasks [N] bool that may be revisited: last explored `delay` updates ago or more (TIGPO).

    Args:
      last_seen: [N] int32 update in which the task was explored, -1 for never.
      update: the current one.
      delay: in updates.
    """
    return (last_seen >= 0) & (update - last_seen >= delay)
