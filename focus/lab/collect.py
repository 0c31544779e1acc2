"""One batch of a world with everything that an estimator could read of it, and what is true.

What a run fills from its rollouts (`focus.learner.signals`) is filled here from arrays, with the
same meaning. Left out is what nobody has in a world: judges, reward models, embeddings, teachers,
replaced actions, what a summary cites.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from focus.lab import critic, exact
from focus.lab.arms import Arm
from focus.lab.loop import (
    Rollouts,
    Sizes,
    action_probs,
    collect_rollouts,
    credit_batch,
    states_of,
)
from focus.lab.play import play, take_state
from focus.lab.world import ANSWER, CALL, SUMMARY, World
from focus.types import Array, CreditBatch

# Episodes of the same policy that the critic has learnt from before.
CRITIC_EPISODES = 400


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Collected:
    """A batch and the truth about it. Letters: B rows, S segments.

    Attributes:
      batch: what estimators read.
      truth: [B, S] exact advantage of each action in its state.
      state_action: [B, S] int32 in [0, T N A).
      policy_row: [B, S] int32.
      action: [B, S] int32.
      segment_tokens: [B, S] int32 tokens of each action, 0 where nothing was played.
      tokens: scalar, generated in all.
    """

    batch: CreditBatch
    truth: Array
    state_action: Array
    policy_row: Array
    action: Array
    segment_tokens: Array
    tokens: Array


def collect(world: World, policy: Array, key: Array, *, arm: Arm, sizes: Sizes) -> Collected:
    """Plays a step of an arm and fills every channel that its rollouts can.

    Args:
      world: one world.
      policy: [R, A] probabilities.
      key: a `jax.random.key`, consumed.
      arm: whose base rollouts, branches and critic they are.
      sizes: as from `focus.lab.loop.sizes_of`.
    """
    task_key, warm_key, step_key = jax.random.split(key, 3)
    order = jax.random.permutation(task_key, world.num_tasks)
    tasks = order[jnp.arange(sizes.groups) % world.num_tasks].astype(jnp.int32)
    earlier = jnp.arange(CRITIC_EPISODES, dtype=jnp.int32) % world.num_tasks
    shown = play(
        world, policy, earlier, jnp.zeros_like(earlier), world.start[earlier],
        jnp.ones(earlier.size, bool), warm_key,
    )  # fmt: skip
    counts = critic.learn(critic.init_counts(world), world, shown, kept=1.0)
    played = collect_rollouts(world, policy, counts, arm, sizes, tasks, arm.base_fraction, step_key)
    batch = credit_batch(world, policy, arm, played)
    layer, state = states_of(played.episodes)
    action, mask = played.episodes.action, played.episodes.mask
    here = jnp.minimum(layer, world.num_layers - 1)
    return Collected(
        batch=_with_channels(world, policy, batch, played),
        truth=exact.values(world, policy).a[here, state, action],
        state_action=((here * world.num_states) + state) * world.num_actions + action,
        policy_row=take_state(world.policy_row, layer, state),
        action=action,
        segment_tokens=jnp.where(mask, played.episodes.tokens, 0),
        tokens=jnp.sum(jnp.where(played.rows, played.episodes.cost, 0)),
    )


def _compact(ids: Array, mask: Array) -> Array:
    """Ids numbered from 0 within the batch, -1 where there is none."""
    flat = jnp.where(mask, ids, -1).reshape(-1)
    _, dense = jnp.unique(flat, return_inverse=True, size=flat.size, fill_value=-2)
    ranks = dense.reshape(ids.shape).astype(jnp.int32)
    # Absent entries are the smallest value; where there are some, they have taken number 0.
    first = jnp.any(~mask).astype(jnp.int32)
    return jnp.where(mask, ranks - first, -1)


def _with_channels(
    world: World, policy: Array, batch: CreditBatch, played: Rollouts
) -> CreditBatch:
    """See the module."""
    episodes, base = played.episodes, played.mean.shape[0]
    mask, (rows, turns) = episodes.mask, episodes.mask.shape
    layer, state = states_of(episodes)
    probs = action_probs(world, policy, episodes)
    entropy = -jnp.sum(probs * jnp.log(jnp.maximum(probs, 1e-30)), axis=-1)
    entropy = jnp.where(mask, entropy, 0.0)
    kind = world.kind[jnp.minimum(layer, world.num_layers - 1), state, episodes.action]
    first = jax.nn.softmax(world.logits)[take_state(world.policy_row, layer, state)]
    ref_logp = jnp.log(jnp.take_along_axis(first, episodes.action[..., None], axis=-1)[..., 0])

    # The end of an episode is a state like any other, the same for all of a task.
    sight = take_state(world.seen, layer, state)
    after = take_state(world.seen, episodes.layer[:, 1:], episodes.state[:, 1:])
    goes_on = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    after = jnp.where(goes_on, after, world.num_seen)
    of_group = played.group[:, None] * (world.num_seen + 1)
    both = jnp.stack([of_group + sight, of_group + after])
    keys = _compact(both, jnp.broadcast_to(mask, both.shape))
    action_key = _compact(played.group[:, None] * world.num_actions + episodes.action, mask)

    fork, parent_row = jnp.full((2, rows), -1, jnp.int32)
    fork = fork.at[base:].set(jnp.where(played.rows[base:], played.segment, -1))
    parent_row = parent_row.at[base:].set(jnp.where(played.rows[base:], played.parent, -1))
    distance = exact.goal_distance(world)[episodes.layer[:, 1:], episodes.state[:, 1:]]
    won = episodes.outcome[:, None] > 0
    extra = {
        "entropy": entropy,
        "segment_entropy": entropy,
        "ref_logp": jnp.where(mask, ref_logp, 0.0),
        "token_value": played.values[:, :-1],
        "valid": mask,
        "is_call": mask & (kind == CALL),
        "is_answer": mask & (kind == ANSWER),
        "is_summary": mask & (kind == SUMMARY),
        "state_key": keys[0],
        "next_state_key": keys[1],
        "action_key": action_key,
        "cluster": action_key[..., None],
        "dist_goal": jnp.where(
            goes_on, distance, jnp.where(episodes.outcome[:, None] > 0, 0, jnp.inf)
        ),
        "parent_traj": parent_row,
        "fork_segment": fork,
        "progress": jnp.zeros(()),
        # A first step: no earlier scores, and no task was there before.
        "hist_score": jnp.zeros(1),
        "hist_group": jnp.full(1, -1, jnp.int32),
        "is_revisit": jnp.zeros(rows, bool),
        "prefix_key": _prefixes(played, state, base),
        **_tree(played, entropy),
    }
    if batch.mc_mask is not None:
        known = mask & batch.mc_mask.any(axis=2)
        total = jnp.where(batch.mc_mask, batch.mc_return, 0.0).sum(axis=2)
        extra |= {
            "cut": jnp.broadcast_to(jnp.arange(turns, dtype=jnp.int32), mask.shape),
            "cut_value": total / jnp.maximum(batch.mc_mask.sum(axis=2), 1),
            "cut_mask": known,
        }
    if batch.value is None:
        extra |= {"value": played.values, "value_variance": played.variance}
    return dataclasses.replace(batch, **extra)


def _prefixes(played: Rollouts, state: Array, base: int) -> Array:
    """[B, S + 1] ids of a task and all that was done and met in it; branches go on from theirs."""
    episodes = played.episodes

    def mix(code, x):
        """One round of a 32-bit multiplicative hash."""
        code = (code ^ x.astype(jnp.uint32)) * np.uint32(0x9E3779B1)
        return code ^ (code >> np.uint32(15))

    def walk(start, rows):
        def turn(code, x):
            action, following, played = x
            code = jnp.where(played, mix(mix(code, action + 1), following + 1), code)
            return code, code

        xs = (episodes.action[rows].T, episodes.state[rows, 1:].T, episodes.mask[rows].T)
        _, codes = jax.lax.scan(turn, start, xs)
        return jnp.concatenate([start[:, None], codes.T], axis=1)

    root = mix(jnp.full(played.group.shape, 17, jnp.uint32), played.group)
    codes = walk(root[:base], slice(0, base))
    if played.parent.size:
        branch = walk(codes[played.parent, played.segment], slice(base, None))
        codes = jnp.concatenate([codes, branch])
    length = jnp.sum(episodes.mask, axis=1)
    there = (jnp.arange(codes.shape[1]) <= length[:, None]) & played.rows[:, None]
    return _compact(jax.lax.bitcast_convert_type(codes >> np.uint32(1), jnp.int32), there)


def _tree(played: Rollouts, entropy: Array) -> dict[str, Array]:
    """A tree a task: roots, one node a segment, and a leaf of its own for every row."""
    episodes, base = played.episodes, played.mean.shape[0]
    mask, (rows, turns) = episodes.mask, episodes.mask.shape
    groups = rows  # at most
    node = groups + jnp.arange(rows * turns, dtype=jnp.int32).reshape(rows, turns)
    above = jnp.concatenate([played.group[:, None].astype(jnp.int32), node[:, :-1]], axis=1)
    if played.parent.size:
        left = jnp.where(
            played.segment > 0,
            node[played.parent, jnp.maximum(played.segment - 1, 0)],
            played.group[base:].astype(jnp.int32),
        )
        above = above.at[base:, 0].set(left)
    length = jnp.sum(mask, axis=1)
    last = jnp.take_along_axis(node, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
    is_leaf = played.rows & (length > 0)
    is_root = jnp.zeros(groups, bool).at[played.group].max(played.rows)
    segment_of = jnp.where(mask, node, -1)

    def nodes(of_roots, of_segments, of_leaves):
        return jnp.concatenate([of_roots, of_segments.reshape(-1), of_leaves])

    numbers = jnp.arange(groups, dtype=jnp.int32)
    group = played.group.astype(jnp.int32)
    return {
        "parent": nodes(jnp.full(groups, -1, jnp.int32), jnp.where(mask, above, -1),
                        jnp.where(is_leaf, last, -1)),
        "tree_id": nodes(jnp.where(is_root, numbers, -1),
                         jnp.where(mask, group[:, None], -1), jnp.where(is_leaf, group, -1)),
        "leaf_traj": nodes(jnp.full(groups, -1, jnp.int32), jnp.full(mask.shape, -1, jnp.int32),
                           jnp.where(is_leaf, jnp.arange(rows, dtype=jnp.int32), -1)),
        "node_entropy": nodes(jnp.zeros(groups), entropy, jnp.zeros(rows)),
        "node_of_segment": segment_of,
    }  # fmt: skip
