"""Where published methods spend rollouts: their rules as pure functions of arrays.

A rule says what to sample; launching it within a budget is the rollout layer's part. Defaults are
the papers', and each function names the method that it belongs to.
"""

from __future__ import annotations

from typing import Literal

import chex
import jax
import jax.numpy as jnp

from focus.types import Array

# Continuations, or candidate actions, from every visited state.
FAN_OUT = {"vineppo": 9, "pro_cua": 8, "sweet_rl": 16}
# What is played in the place of a segment, or asked beside it.
ARMS = {
    "cvt_rl": ("delete", "semantic_swap", "evidence_swap", "tool_noise"),
    "taco": ("with_call", "without_call"),
}


# --- the same everywhere -------------------------------------------------------------------------


def per_state(segment_mask: Array, count: int) -> Array:
    """`count` samples from every state that a segment starts from (VinePPO, PRO-CUA, SWEET-RL).

    Args:
      segment_mask: [B, S] bool.
      count: see `FAN_OUT`.

    Returns:
      [B, S] int32.
    """
    return jnp.where(segment_mask, count, 0).astype(jnp.int32)


def arms(segment_mask: Array, method: Literal["cvt_rl", "taco"], is_call: Array) -> Array:
    """Which interventions of `ARMS[method]` are played at which segment.

    Deleting and swapping work anywhere; noise in a tool's answer, and probes of a call, need one.

    Args:
      segment_mask, is_call: [B, S] bool.
      method: key of `ARMS`.

    Returns:
      [B, S, arms] bool.

    Raises:
      ValueError: unknown method.
    """
    if method not in ARMS:
        raise ValueError(f"no interventions of {method!r}; choose one of {sorted(ARMS)}")
    needs_call = jnp.array([method == "taco" or arm == "tool_noise" for arm in ARMS[method]])
    return segment_mask[..., None] & (is_call[..., None] | ~needs_call)


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


# --- by score ------------------------------------------------------------------------------------


def top_mask(score: Array, mask: Array, count: Array | int) -> Array:
    """Marks the `count` kept entries of the largest score; ties go to the earlier. [N] bool."""
    order = jnp.argsort(jnp.where(mask, -score, jnp.inf), stable=True)
    rank = jnp.zeros(score.size, jnp.int32).at[order].set(jnp.arange(score.size, dtype=jnp.int32))
    return mask & (rank < count)


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


def at2po_scores(entropy: Array, branches: Array, *, penalty: float = 0.05) -> Array:
    """AT2PO's score of a node, entropy - penalty * branches (arXiv:2601.04767). [N]."""
    return entropy - penalty * branches


def at2po_nodes(
    entropy: Array, branches: Array, mask: Array, *, count: int = 6, penalty: float = 0.05
) -> Array:
    """Nodes that AT2PO branches in one of its two iterations, after 10 first rollouts.

    10 + 2 * 6 = 22 leaves are kept (arXiv:2601.04767). Evidence: code.

    Args:
      entropy: [N] mean token entropy of each node.
      branches: [N] branches that it has.
      mask: [N] bool, nodes that can be branched.
      count: nodes of one iteration.
      penalty: of a branch.

    Returns:
      [N] bool.
    """
    return top_mask(at2po_scores(entropy, branches, penalty=penalty), mask, count)


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


def sweet_rl_pairs(advantage: Array, mask: Array, *, pairs: int = 4) -> tuple[Array, Array]:
    """Candidates of one state that SWEET-RL prefers, and those it prefers them to.

    arXiv:2503.15478. Evidence: code.

    Args:
      advantage: [N] of the candidate actions.
      mask: [N] bool.
      pairs: best and worst candidates taken; at most half of those there are.

    Returns:
      (chosen [N] bool, rejected [N] bool), disjoint and equally many.
    """
    half = jnp.minimum(pairs, jnp.sum(mask) // 2)
    return top_mask(advantage, mask, half), top_mask(-advantage, mask, half)


def pivoarl_forks(success: Array, pivot_segment: Array, mask: Array) -> Array:
    """Segment [B] int32 where each failed row is retried once, -1 for none (PivoARL)."""
    return jnp.where(mask & ~success & (pivot_segment >= 0), pivot_segment, -1)


# --- CBPO ----------------------------------------------------------------------------------------


def cbpo_entropy_rise(entropy: Array, mask: Array, *, window: int = 20) -> Array:
    """Mean entropy of the `window` tokens from each token on, minus that of those before it.

    arXiv:2608.24300. Evidence: reconstructed (where the windows lie).

    Args:
      entropy: [L] of one row's policy tokens.
      mask: [L] bool.
      window: tokens.

    Returns:
      [L], 0 where either window is not full.
    """
    chex.assert_equal_shape([entropy, mask])
    total = jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.where(mask, entropy, 0.0))])
    count = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(mask, dtype=jnp.int32)])
    here = jnp.arange(entropy.size)
    before, after = jnp.maximum(here - window, 0), jnp.minimum(here + window, entropy.size)
    rise = (total[after] - 2 * total[here] + total[before]) / window
    full = (count[after] - count[here] == window) & (count[here] - count[before] == window)
    return jnp.where(full, rise, 0.0)


def cbpo_priority(
    entropy_rise: Array, path_branches: Array, node_branches: Array, *, slope: float = 2.0
) -> Array:
    """CBPO's priority of a branch point (arXiv:2608.24300); 0.25 and above is accepted.

    clip(0.2 + slope dH, 0, 1) / ((1 + path_branches)^0.2 (1 + node_branches)^0.2)
    """
    crowd = (1.0 + path_branches) ** 0.2 * (1.0 + node_branches) ** 0.2
    return jnp.clip(0.2 + slope * entropy_rise, 0.0, 1.0) / crowd


def cbpo_branch_points(
    entropy_rise: Array,
    path_branches: Array,
    node_branches: Array,
    mask: Array,
    *,
    candidates: int = 10,
    accept: float = 0.25,
    spacing: int = 64,
    max_nodes: int = 3,
    max_per_node: int = 3,
    max_path: int = 4,
) -> Array:
    """Tokens of one rollout that CBPO branches at, best first, apart from one another.

    arXiv:2608.24300. Evidence: paper. 6 rollouts start a task, 16 are played in all; slots that
    find no branch point are fresh rollouts.

    Args:
      entropy_rise: [L] see `cbpo_entropy_rise`.
      path_branches: [L] branches that led to the rollout's prefix there.
      node_branches: [L] branches that leave that token already.
      mask: [L] bool.
      candidates: tokens of the largest rise that are looked at.
      accept: smallest priority.
      spacing: tokens between two branch points.
      max_nodes: branch points of a rollout.
      max_per_node, max_path: branches of a token, and along a path.

    Returns:
      [L] bool.
    """
    priority = cbpo_priority(entropy_rise, path_branches, node_branches)
    room = (node_branches < max_per_node) & (path_branches < max_path)
    open_ = top_mask(entropy_rise, mask, candidates) & room & (priority >= accept)
    position = jnp.arange(entropy_rise.size)

    def pick(_, carry):
        chosen, open_ = carry
        best = jnp.argmax(jnp.where(open_, priority, -1.0))
        there = open_[best]
        chosen = chosen.at[best].set(chosen[best] | there)
        return chosen, open_ & (~there | (jnp.abs(position - best) >= spacing))

    return jax.lax.fori_loop(0, max_nodes, pick, (jnp.zeros_like(mask), open_))[0]


# --- TIGPO ---------------------------------------------------------------------------------------


def tigpo_revisit(last_seen: Array, update: int | Array, *, delay: int = 10) -> Array:
    """Tasks [N] bool that may be revisited: last explored `delay` updates ago or more (TIGPO).

    Args:
      last_seen: [N] int32 update in which the task was explored, -1 for never.
      update: the current one.
      delay: in updates.
    """
    return (last_seen >= 0) & (update - last_seen >= delay)


def tigpo_schedule(
    last_seen: Array, update: int | Array, *, explore: int = 8, revisit: int = 8, delay: int = 10
) -> tuple[Array, Array]:
    """Tasks of one update: never seen ones to explore, the longest unseen ones to revisit.

    arXiv:2609.03383. Evidence: paper.

    Args:
      last_seen, update, delay: see `tigpo_revisit`.
      explore, revisit: how many.

    Returns:
      (explore [N] bool, revisit [N] bool), disjoint.
    """
    due = tigpo_revisit(last_seen, update, delay=delay)
    fresh = last_seen < 0
    return (
        top_mask(jnp.zeros(last_seen.shape), fresh, explore),
        top_mask(-last_seen.astype(jnp.float32), due, revisit),
    )
