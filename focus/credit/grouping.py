"""Critic-free estimators that compare segments of a group by the states they leave or reach.

The rules of `rows` hold; a truncated row counts as ended.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from focus.credit import keyed, primitives
from focus.credit.rows import (
    group_advantage,
    group_of_segments,
    key_in_group,
    only_compared,
    returns,
    returns_to_go,
    scored_rows,
    segment_rewards,
    segments_of,
    to_credit,
)
from focus.credit.spec import GROUP, EstimatorSpec, describe
from focus.types import Array, Credit, CreditBatch


def _episode(batch, rows, segments, total, episode_stats, **normalisation):
    """Group comparison of returns, [B, 1] over trajectories or [B, S] over their segments."""
    primitives.require_choice("episode_stats", episode_stats, ("traj", "turn"))
    if episode_stats == "traj":
        return group_advantage(batch, rows, **normalisation)[:, None]
    repeated = jnp.broadcast_to(total[:, None], segments.shape)
    return primitives.group_normalise(repeated, group_of_segments(batch), segments, **normalisation)


def gigpo(
    batch: CreditBatch,
    *,
    discount: float = 0.95,
    step_weight: float = 1.0,
    mode: str = "mean_std_norm",
    episode_stats: str = "traj",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """GiGPO: the episode's group comparison plus one among visits of the same state.

        A = norm_g(R) + step_weight norm_{g, state}(G_discount)

    arXiv:2505.10978. Evidence: code, which takes the episode statistics over segments ("turn"),
    so that long episodes count more; the paper takes them over trajectories.

    Args:
      batch: reads `state_key` [B, S].
      discount: of the return to go G.
      step_weight: weight of the state comparison.
      mode: "mean_std_norm", or "mean_norm" without the division.
      episode_stats: "traj" or "turn".
      ddof: see `baselines.grpo`.
      eps: see `baselines.grpo`.

    Returns:
      `Credit`; GRPO (or Dr. GRPO) when no state repeats.

    Raises:
      ValueError: unknown `mode` or `episode_stats`, or a channel is missing.
    """
    primitives.require_choice("mode", mode, ("mean_std_norm", "mean_norm"))
    primitives.require_channels(batch, ("state_key",), "gigpo")
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    total, to_go = returns(batch, rows), returns_to_go(batch, rows, discount=discount)
    norm = {"scale": "std" if mode == "mean_std_norm" else "none", "ddof": ddof, "eps": eps}
    episode = _episode(batch, rows, segments, total, episode_stats, **norm)
    key = key_in_group(batch, batch.state_key)
    step = primitives.group_normalise(to_go, key, segments, **norm)
    advantages = only_compared(batch, rows, episode + step_weight * step)
    return to_credit(batch, advantages, rows)


def proxmo(
    batch: CreditBatch,
    *,
    discount: float = 0.95,
    step_weight: float = 1.0,
    alpha: float = 4.0,
    weight_range: float = 0.05,
    temperature: float = 0.1,
    mode: str = "mean_norm",
    episode_stats: str = "traj",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """ProxMO: GiGPO with difficulty weights and a soft match of states.

        A = norm_g(R) w + step_weight (G - softmax(sim / temperature) G)
        w = 1 + beta (sigmoid(x) - 1/2),   x = (1 - p)^alpha for a success, -p^alpha for a failure
        beta = weight_range / (sigmoid(1) - 1/2),   p the group's success rate

    arXiv:2602.19225. Evidence: code. Its scripts set alpha 4 and range 0.05, the defaults here;
    its function defaults are 5 and 0.2. It takes episode statistics over segments ("turn").

    Args:
      batch: reads `sim` [B * S, B * S], or `emb` [B, S, D] (cosine similarity) without it.
      discount: of the return to go G.
      step_weight: weight of the state comparison.
      alpha: exponent of the success rate.
      weight_range: largest |w - 1|.
      temperature: of the softmax.
      mode: "mean_norm", or "mean_std_norm" to divide the episode term by the deviation.
      episode_stats: "traj" or "turn".
      ddof: see `baselines.grpo`.
      eps: see `baselines.grpo`.

    Returns:
      `Credit`.

    Raises:
      ValueError: unknown `mode` or `episode_stats`, or neither `sim` nor `emb` is there.
    """
    primitives.require_choice("mode", mode, ("mean_norm", "mean_std_norm"))
    if batch.sim is None:
        primitives.require_channels(batch, ("emb",), "proxmo without sim")
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    total, to_go = returns(batch, rows), returns_to_go(batch, rows, discount=discount)
    norm = {"scale": "std" if mode == "mean_std_norm" else "none", "ddof": ddof, "eps": eps}
    episode = _episode(batch, rows, segments, total, episode_stats, **norm)
    group = group_of_segments(batch)
    won = batch.success.astype(to_go.dtype)
    if episode_stats == "traj":
        rate = primitives.value_by_key(won, batch.group_id, rows)[:, None]
    else:
        rate = primitives.value_by_key(
            jnp.broadcast_to(won[:, None], segments.shape), group, segments
        )
    rate = jnp.clip(rate, 0.0, 1.0)
    signal = jnp.where(batch.success[:, None], (1 - rate) ** alpha, -(rate**alpha))
    beta = weight_range / (jax.nn.sigmoid(1.0) - 0.5)
    weight = 1 + beta * (jax.nn.sigmoid(signal) - 0.5)
    if batch.sim is not None:

        def similarity(index):
            return batch.sim[index]
    else:
        flat = jnp.where(segments[..., None], batch.emb, 0.0).reshape(segments.size, -1)
        square = jnp.sum(jnp.square(flat), axis=1, keepdims=True)
        unit = flat * jax.lax.rsqrt(jnp.maximum(square, 1e-12))

        def similarity(index):
            return unit @ unit[index]

    step = primitives.kernel_baseline(
        to_go.ravel(), similarity, group.ravel(), segments.ravel(), temperature=temperature
    ).reshape(segments.shape)
    advantages = only_compared(batch, rows, episode * weight + step_weight * step)
    return to_credit(batch, advantages, rows)


def pgpo(
    batch: CreditBatch,
    *,
    discount: float = 0.95,
    alpha: float = 2.0,
    beta: float = 1.0,
    potential: str = "zscore",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """PGPO: state comparison plus the change of an empirical potential, strong on hard tasks.

        Phi(s) = mean return to go over visits of s in the group
        delta_t = Phi(s_{t+1}) - Phi(s_t);   the last one R - Phi(s_T)
        A = z_{g, s}(G) + beta (1 - p_g)^alpha z_{g, s}(delta)

    arXiv:2609.02236. Evidence: paper. Segment rewards before the last are added to delta. The
    deltas of a row sum to its return minus Phi(s_0).

    Args:
      batch: reads `state_key` [B, S].
      discount: of the return to go G.
      alpha: exponent of the failure rate.
      beta: weight of the potential term.
      potential: "zscore", or "raw" delta.
      ddof: see `baselines.grpo`.
      eps: see `baselines.grpo`.

    Returns:
      `Credit`; aux["potential"] and aux["delta"] [B, S].

    Raises:
      ValueError: unknown `potential`, or a channel is missing.
    """
    primitives.require_choice("potential", potential, ("zscore", "raw"))
    primitives.require_channels(batch, ("state_key",), "pgpo")
    rows = scored_rows(batch)
    segments, to_go = segments_of(batch, rows), returns_to_go(batch, rows, discount=discount)
    key = key_in_group(batch, batch.state_key)
    phi = jnp.where(key >= 0, primitives.value_by_key(to_go, key, segments), to_go)
    phi = jnp.where(segments, phi, 0.0)
    rewards = segment_rewards(batch, rows, batch.outcome)
    after = primitives.next_value(phi, segments)
    size = jnp.abs(phi) + jnp.abs(after) + jnp.abs(rewards)
    delta = primitives.potential_difference(phi, after, reward=rewards)
    delta = jnp.where(segments, primitives.without_rounding(delta, size), 0.0)
    norm = {"ddof": ddof, "eps": eps}
    step = primitives.group_normalise(to_go, key, segments, **norm)
    change = delta
    if potential == "zscore":
        change = primitives.group_normalise(delta, key, segments, size=size, **norm)
    won = batch.success.astype(to_go.dtype)
    rate = jnp.clip(primitives.value_by_key(won, batch.group_id, rows), 0.0, 1.0)
    advantages = step + beta * ((1 - rate) ** alpha)[:, None] * change
    advantages = only_compared(batch, rows, advantages)
    return to_credit(batch, advantages, rows, aux={"potential": phi, "delta": delta})


def tigpo(
    batch: CreditBatch,
    *,
    distance_discount: float = 0.1,
    goal_value: float = 1.0,
    step_weight: float = 1.0,
    episode_weight: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """TIGPO: progress in a persistent task graph, and revisits measured against earlier scores.

        q = goal_value distance_discount^{d(s', goal)}, 0 if unreachable
        A = step_weight norm_{g, s}(q) + episode_weight norm(R)

    The return of a revisit is compared with the group's revisits and its history, others among
    themselves. arXiv:2609.03383. Evidence: paper; goal_value is not stated. It uses distance
    discounts 0.1 (ALFWorld) and 0.2 (WebShop).

    Args:
      batch: reads `dist_goal`, `state_key` [B, S], `hist_score`, `hist_group` [H],
        `is_revisit` [B].
      distance_discount: per edge.
      goal_value: q at the goal.
      step_weight: weight of the graph term.
      episode_weight: weight of the return term.
      ddof: see `baselines.grpo`.
      eps: see `baselines.grpo`.

    Returns:
      `Credit`; aux["q"] [B, S].

    Raises:
      ValueError: a channel is missing.
    """
    needed = ("dist_goal", "state_key", "hist_score", "hist_group", "is_revisit")
    primitives.require_channels(batch, needed, "tigpo")
    rows = scored_rows(batch)
    segments, total = segments_of(batch, rows), returns(batch, rows)
    norm = {"ddof": ddof, "eps": eps}
    reachable = segments & jnp.isfinite(batch.dist_goal)
    distance = jnp.where(reachable, batch.dist_goal, 0.0)
    q = jnp.where(reachable, goal_value * jnp.power(distance_discount, distance), 0.0)
    key = key_in_group(batch, batch.state_key)
    step = primitives.group_normalise(q, key, segments, **norm)
    scores = jnp.concatenate([total, batch.hist_score.astype(total.dtype)])
    groups = jnp.concatenate([batch.group_id, batch.hist_group])
    kept = jnp.concatenate([rows & batch.is_revisit, batch.hist_group >= 0])
    again = primitives.group_normalise(scores, groups, kept, **norm)[: total.size]
    fresh = primitives.group_normalise(total, batch.group_id, rows & ~batch.is_revisit, **norm)
    episode = jnp.where(batch.is_revisit, again, fresh)
    advantages = step_weight * step + episode_weight * episode[:, None]
    return to_credit(batch, advantages, rows, aux={"q": q})


def _robust(x: Array, key: Array, mask: Array, floor: float) -> Array:
    centred = jnp.where(mask, x, 0.0) - primitives.group_median(x, key, mask)
    spread = keyed.MAD_TO_STD * primitives.group_mad(x, key, mask)
    return jnp.where(mask, jnp.tanh(centred / jnp.maximum(spread, floor)), 0.0)


def a3(
    batch: CreditBatch,
    *,
    discount: float = 0.9,
    shrinkage: float = 0.1,
    mad_floor: float = 0.5,
    trie_weight: float = 0.65,
    tree_weight: float = 1.0,
    bound: float = 1.1,
    trie_rows: str = "first",
    single_action: Literal["support", "none"] = "support",
) -> Credit:
    """A3: a robust outcome, a residual among similar actions, and gains down a tree of them.

        c1 = tanh((R - med) / max(1.4826 MAD, mad_floor))
        c2 = the same of mean_scope (R - mean of the others with its turn and cluster)
        c3 = support / (support + shrinkage) * return; return and support are discounted sums of
             n/(n + shrinkage) (mean R of the action - mean R of the state) and n/(n + shrinkage)
        A  = bound tanh((c1/|c1| + trie_weight c2/|c2| + tree_weight c3/|c3|) / bound)

    |c| is the mean absolute value over the batch's segments; a component that is 0 throughout
    stays 0. arXiv:2605.08013. Evidence: code, which reads the residual of a row's first segment
    for all of it (trie_rows="first"). Whether a state that all its visits left by one action has
    support is open in the formula, and implementations differ (`single_action`).

    Args:
      batch: reads `cluster` [B, S, C], `state_key`, `action_key` [B, S].
      discount: of gains along a row.
      shrinkage: pseudo-count.
      mad_floor: smallest spread.
      trie_weight: of c2.
      tree_weight: of c3.
      bound: largest |A|.
      trie_rows: "first" or "all" segments have a residual of their own.
      single_action: a state with one action only gives its gain of 0 "support" n/(n + shrinkage),
        or "none".

    Returns:
      `Credit`; aux has "backbone", "trie" and "tree", [B, S].

    Raises:
      ValueError: unknown `trie_rows` or `single_action`, or a channel is missing.
    """
    primitives.require_choice("trie_rows", trie_rows, ("first", "all"))
    primitives.require_choice("single_action", single_action, ("support", "none"))
    primitives.require_channels(batch, ("cluster", "state_key", "action_key"), "a3")
    rows = scored_rows(batch)
    segments, total = segments_of(batch, rows), returns(batch, rows)
    outcome = jnp.broadcast_to(total[:, None], segments.shape)
    group = group_of_segments(batch)
    turn = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    backbone = jnp.broadcast_to(
        _robust(total, batch.group_id, rows, mad_floor)[:, None], segments.shape
    )

    scopes = batch.cluster.shape[2]
    residual = jnp.zeros_like(outcome)
    for scope in range(scopes):
        key = primitives.joint_key(group, turn, batch.cluster[:, :, scope])
        residual = residual + primitives.leave_one_out(outcome, key, segments) / scopes
    if trie_rows == "first":
        first = rows & segments[:, 0]
        trie = _robust(residual[:, 0], batch.group_id, first, mad_floor)
        trie = jnp.broadcast_to(trie[:, None], segments.shape)
    else:
        trie = _robust(residual, group, segments, mad_floor)

    parent = primitives.joint_key(group, turn, batch.state_key)
    child = primitives.joint_key(parent, batch.action_key)
    peers = primitives.group_statistics(outcome, child, segments)
    above = primitives.group_statistics(outcome, parent, segments)
    # A state that one row visits has nothing to compare, hence no support.
    known = segments & (child >= 0) & (above.count > 1)
    if single_action == "none":
        known = known & (peers.count < above.count)
    shrink = jnp.where(known, peers.count / (peers.count + shrinkage), 0.0)
    gap = primitives.without_rounding(
        peers.mean - above.mean, jnp.abs(peers.mean) + jnp.abs(above.mean)
    )
    gain = jnp.where(known, shrink * gap, 0.0)
    support = primitives.reward_to_go(shrink, segments, discount=discount)
    gain = primitives.reward_to_go(gain, segments, discount=discount)
    tree = support / (support + shrinkage) * gain

    def scaled(component):
        size = primitives.masked_mean(jnp.abs(component), segments)
        return jnp.where(size > 0, component / jnp.where(size > 0, size, 1.0), 0.0)

    mixed = scaled(backbone) + trie_weight * scaled(trie) + tree_weight * scaled(tree)
    aux = {"backbone": backbone, "trie": trie, "tree": tree}
    advantages = only_compared(batch, rows, bound * jnp.tanh(mixed / bound))
    return to_credit(batch, advantages, rows, aux=aux)


def g2po(
    batch: CreditBatch,
    *,
    weight: float = 1.0,
    discount: float = 0.95,
    scale: Literal["std", "none"] = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """GRPO plus the value of the state reached, compared with others that left the same state.

        V(s') = mean of the returns to go of segments that reach s'
        A_j = GRPO_i + weight normalise_{s_j}(V(s_{j+1}))

    G2PO, on the graph of a group's states (no arXiv number is known here). Evidence:
    reconstructed.

    Args:
      batch: reads `state_key` and `next_state_key`, [B, S].
      weight: of the second part.
      discount: per segment.
      scale, ddof, eps: of both normalisations; see `primitives.group_normalise`.

    Returns:
      `Credit`.
    """
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    to_go = returns_to_go(batch, rows, discount=discount)
    value = primitives.value_by_key(to_go, key_in_group(batch, batch.next_state_key), segments)
    norm = {"scale": scale, "ddof": ddof, "eps": eps}
    known = segments & (batch.next_state_key >= 0)
    local = primitives.group_normalise(value, key_in_group(batch, batch.state_key), known, **norm)
    overall = group_advantage(batch, rows, **norm)
    advantages = primitives.mix(overall[:, None], local, weight, rule="add")
    return to_credit(batch, only_compared(batch, rows, advantages), rows)


def gagpo(
    batch: CreditBatch,
    *,
    discount: float = 0.95,
    lambda_: float = 0.95,
    scale: Literal["std", "none"] = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """GAE over empirical values of states, standardised over the group's segments.

        V(s) = mean return to go over the group's visits of s,   A = normalise_g(GAE(r, V))

    GAGPO (no arXiv number is known here). Evidence: reconstructed.

    Args:
      batch: reads `state_key` [B, S]; a segment without a key is a state of its own.
      discount, lambda_: per segment.
      scale, ddof, eps: see `primitives.group_normalise`.

    Returns:
      `Credit`; aux["value"] [B, S].
    """
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    rewards = segment_rewards(batch, rows, batch.outcome)
    to_go = returns_to_go(batch, rows, discount=discount)
    key = key_in_group(batch, batch.state_key)
    value = jnp.where(key >= 0, primitives.value_by_key(to_go, key, segments), to_go)
    advantages = primitives.masked_gae(value, rewards, segments, discount=discount, lambda_=lambda_)
    # Sums of differences of values: what is rounded is as large as these.
    advantages = primitives.group_normalise(
        advantages, group_of_segments(batch), segments, scale=scale, ddof=ddof, eps=eps,
        size=jnp.abs(value) * segments.shape[1],
    )  # fmt: skip
    return to_credit(batch, only_compared(batch, rows, advantages), rows, aux={"value": value})


SPECS: dict[str, EstimatorSpec] = {
    "gigpo": describe(
        gigpo, (*GROUP, "state_key"), "GiGPO, arXiv:2505.10978", "code", "group", "segment",
    ),
    "proxmo": describe(
        proxmo, (*GROUP, "success"), "ProxMO, arXiv:2602.19225", "code", "group", "segment",
        cost="similarity of all pairs of segments", default_inputs=("emb",),
    ),
    "pgpo": describe(
        pgpo, (*GROUP, "success", "state_key"), "PGPO, arXiv:2609.02236", "paper", "group",
        "segment",
    ),
    "tigpo": describe(
        tigpo, (*GROUP, "dist_goal", "state_key", "hist_score", "hist_group", "is_revisit"),
        "TIGPO, arXiv:2609.03383", "paper", "group", "segment", cost="a stored graph per task",
    ),
    "a3": describe(
        a3, (*GROUP, "cluster", "state_key", "action_key"), "A3, arXiv:2605.08013", "code", "group",
        "segment", cost="clusters of actions",
    ),
    "g2po": describe(
        g2po, (*GROUP, "state_key", "next_state_key"), "G2PO", "reconstructed", "group", "segment",
    ),
    "gagpo": describe(gagpo, (*GROUP, "state_key"), "GAGPO", "reconstructed", "group", "segment"),
}  # fmt: skip
