"""One step's rollouts of a policy with every channel that a world can feed, and the truth.

What the league reads. The critics (of states and of actions) are counts, learned from earlier
rollouts of the same policy. Nothing here knows exact values but `Collected.truth`: what needs a
teacher, a judge of text, an expert or a counterfactual stays None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from focus.lab import critic, exact
from focus.lab.arms import Arm
from focus.lab.loop import (
    Rollouts,
    action_probs,
    any_world,
    collect_rollouts,
    credit_batch,
    sizes_of,
    states_of,
)
from focus.lab.play import Episodes, play, take_state
from focus.lab.world import ANSWER, CALL, SUMMARY, World
from focus.types import Array, CreditBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Collected:
    """A batch, and what is true of it. Base rows first, then branches.

    Attributes:
      batch: the channels.
      episodes: what was played; a segment is one action.
      policy_row: [B, S] int32 of each state.
      truth: [B, S] exact advantage of each action, 0 where none was played.
      num_base: rows of base rollouts.
      sizes: T, N and A of the world.
    """

    batch: CreditBatch
    episodes: Episodes
    policy_row: Array
    truth: Array
    num_base: int = dataclasses.field(metadata={"static": True})
    sizes: tuple[int, int, int] = dataclasses.field(metadata={"static": True})


def make_collect(
    world_name: str,
    world_options: Mapping[str, Any],
    arm: Arm,
    *,
    tokens_per_step: int,
    history_steps: int = 4,
) -> Callable[[World, Array, Array], Collected]:
    """A function that plays a step of an arm; see `focus.lab.loop.make_run`.

    Args:
      world_name: key of `WORLDS`.
      world_options: of its builder, without `seed`.
      arm: whose rollouts, branches and refined values the batch holds.
      tokens_per_step: budget of the step.
      history_steps: steps of base rollouts, of a whole budget each, that the critics have learned
        from. They cost nothing here: all estimators read the same critics.

    Returns:
      `collect(world, policy, key) -> Collected`, pure, for one world; batch with `jax.vmap`.

    Raises:
      ValueError: unknown world or options, or a budget that holds no group of rollouts.
    """
    if history_steps < 1:
        raise ValueError(f"history_steps must be >= 1, got {history_steps}")
    sizes = sizes_of(any_world(world_name, world_options), arm, tokens_per_step)
    earlier = max(1, int(history_steps * sizes.base / arm.base_fraction))

    def collect(world, policy, key):
        task_key, history_key, key = jax.random.split(key, 3)
        order = jax.random.permutation(task_key, world.num_tasks)
        # A world of few tasks is gone through again.
        tasks = order[jnp.arange(sizes.groups) % world.num_tasks].astype(jnp.int32)
        history = _play_tasks(world, policy, order[jnp.arange(earlier) % order.size], history_key)
        counts = critic.learn(critic.init_counts(world), world, history, kept=1.0)
        played = collect_rollouts(world, policy, counts, arm, sizes, tasks, arm.base_fraction, key)
        batch = credit_batch(world, policy, arm, played)
        batch = dataclasses.replace(
            batch,
            row_mask=played.rows,
            **_values(world, arm, counts, history, played, batch),
            **_keys(world, played),
            **_scores(world, policy, played.episodes),
            **_kinds(world, played.episodes),
            **_trees(world, policy, played, sizes.base),
            **_cuts(batch),
            # A first step: no task was there before, and none has earlier scores.
            progress=jnp.float32(0.0),
            hist_score=jnp.zeros(1),
            hist_group=jnp.full(1, -1, jnp.int32),
            is_revisit=jnp.zeros(played.rows.size, bool),
        )
        layer, state = states_of(played.episodes)
        true = take_state(exact.values(world, policy).a, layer, state)
        true = jnp.take_along_axis(true, played.episodes.action[..., None], axis=-1)[..., 0]
        return Collected(
            batch=batch,
            episodes=played.episodes,
            policy_row=take_state(world.policy_row, layer, state),
            truth=jnp.where(played.episodes.mask, true, 0.0),
            num_base=sizes.base,
            sizes=(world.num_layers, world.num_states, world.num_actions),
        )

    return collect


def _play_tasks(world: World, policy: Array, task: Array, key: Array) -> Episodes:
    task = task.astype(jnp.int32)
    start = jnp.zeros_like(task), world.start[task]
    return play(world, policy, task, *start, jnp.ones(task.size, bool), key)


def _sight(world: World, episodes: Episodes) -> Array:
    return take_state(world.seen, *states_of(episodes))


def _action_values(
    world: World, arm: Arm, history: Episodes, rows: Array, prior: Array, episodes: Episodes
) -> Array:
    """[B, S] values of actions where the critic sees them: counts around its value of the state."""
    won = jnp.where(history.mask & rows[:, None], history.outcome[:, None], 0.0)
    there = (history.mask & rows[:, None]).astype(jnp.float32)
    counts = jnp.zeros((world.num_seen, world.num_actions, 2))
    where = (_sight(world, history), history.action)
    counts = counts.at[where].add(jnp.stack([there, won], axis=-1))
    number, successes = jnp.moveaxis(counts[_sight(world, episodes), episodes.action], -1, 0)
    return (successes + arm.weight * prior) / (number + arm.weight)


def _values(
    world: World,
    arm: Arm,
    counts: critic.Counts,
    history: Episodes,
    played: Rollouts,
    batch: CreditBatch,
) -> dict[str, Array]:
    """Critics: of tokens, of actions, and their twins, which have seen every other rollout.

    The score of a segment is what a process reward model that was trained on outcomes says: the
    value of its action.
    """
    episodes = played.episodes
    layer, state = states_of(episodes)
    look = {"look_weight": arm.look_weight, "weight": arm.weight}
    everyone = jnp.ones(history.task.size, bool)
    half = jnp.arange(history.task.size) % 2 == 0
    twin = critic.learn(critic.init_counts(world), world, history.keep(half), kept=1.0)
    value, _ = critic.belief(counts, world, layer, state, **look)
    value2, _ = critic.belief(twin, world, layer, state, **look)
    mask = episodes.mask
    q = jnp.where(mask, _action_values(world, arm, history, everyone, value, episodes), 0.0)
    q2 = jnp.where(mask, _action_values(world, arm, history, half, value2, episodes), 0.0)
    values = batch.value if batch.value is not None else _padded(jnp.where(mask, value, 0.0))
    return {
        "value": values,
        "token_value": values[:, :-1],
        "v2": _padded(jnp.where(mask, value2, 0.0)),
        "q": q,
        "q2": q2,
        "score": q,
    }


def _padded(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (0, 1)))


def _keys(world: World, played: Rollouts) -> dict[str, Array]:
    """What is the same state, action or prefix: as far as can be seen, and within a task."""
    episodes, mask = played.episodes, played.episodes.mask
    sight = _sight(world, episodes)
    goes_on = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    after = jnp.where(goes_on, jnp.roll(sight, -1, axis=1), world.num_seen)  # the end looks alike
    both = jnp.stack([sight, jnp.where(mask, after, 0)])
    both = both + (world.num_seen + 1) * played.group[:, None]
    keys = _dense(both, jnp.stack([mask, mask]))
    action = jnp.where(mask, episodes.action, -1)
    looks = jax.nn.one_hot(world.look[sight], world.num_looks)
    embedding = looks if world.features is None else world.features[sight]
    distance = take_state(exact.goal_distance(world), episodes.layer[:, 1:], episodes.state[:, 1:])
    won = ~goes_on & (episodes.outcome > 0.5)[:, None]
    distance = jnp.where(goes_on, distance, jnp.where(won, 0.0, jnp.inf))
    return {
        "state_key": keys[0],
        "next_state_key": keys[1],
        "action_key": action,
        "cluster": action[..., None],
        "prefix_key": _prefixes(played),
        "emb": jnp.where(mask[..., None], embedding, 0.0),
        "dist_goal": jnp.where(mask, distance, jnp.inf),
    }


def _dense(ids: Array, mask: Array) -> Array:
    """Whole numbers as ids from 0, -1 outside the mask."""
    most = jnp.iinfo(ids.dtype).max
    _, dense = jnp.unique(
        jnp.where(mask, ids, most), return_inverse=True, size=ids.size, fill_value=most
    )
    return jnp.where(mask, dense.reshape(ids.shape), -1).astype(jnp.int32)


def _prefixes(played: Rollouts) -> Array:
    """[B, S + 1] ids of a task and all that came before a state; a branch goes on from its parent.

    Histories are told apart by a 32-bit hash: two of a batch's thousands agree by chance about
    once in a thousand batches.
    """
    episodes = played.episodes
    base = played.mean.shape[0]

    def mixed(h, x):
        h = (h ^ x.astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
        return h ^ (h >> 15)

    def along(first, rows):
        def turn(h, x):
            action, state = x
            h = mixed(mixed(h, action + 1), state + 1)
            return h, h

        moves = episodes.action[rows].T, episodes.state[rows, 1:].T
        _, later = jax.lax.scan(turn, first, moves)
        return jnp.concatenate([first[None], later]).T

    starts = mixed(jnp.full(played.group.shape, 7, jnp.uint32), played.group + 1)
    whole = along(starts[:base], slice(None, base))
    branches = along(whole[played.parent, played.segment], slice(base, None))
    hashes = jnp.concatenate([whole, branches])
    reached = jnp.pad(episodes.mask, ((0, 0), (1, 0)), constant_values=True)
    return _dense((hashes >> 1).astype(jnp.int32), reached & played.rows[:, None])


def _scores(world: World, policy: Array, episodes: Episodes) -> dict[str, Array]:
    """Entropies, and log-probs under the reference, which is the world's first policy."""
    probs, mask = action_probs(world, policy, episodes), episodes.mask
    entropy = -jnp.sum(probs * jnp.log(jnp.maximum(probs, 1e-30)), axis=-1)
    entropy = jnp.where(mask, entropy, 0.0)
    first = jax.nn.log_softmax(world.logits)[take_state(world.policy_row, *states_of(episodes))]
    first = jnp.take_along_axis(first, episodes.action[..., None], axis=-1)[..., 0]
    return {
        "entropy": entropy,
        "segment_entropy": entropy,
        "ref_logp": jnp.where(mask, first, 0.0),
    }


def _kinds(world: World, episodes: Episodes) -> dict[str, Array]:
    layer, state = states_of(episodes)
    kind = world.kind[jnp.minimum(layer, world.num_layers - 1), state, episodes.action]
    mask = episodes.mask
    return {
        "is_call": mask & (kind == CALL),
        "is_answer": mask & (kind == ANSWER),
        "is_summary": mask & (kind == SUMMARY),
        "valid": mask,  # every action of a world can be carried out
    }


def _cuts(batch: CreditBatch) -> dict[str, Array]:
    """Cut points at the states that were branched, valued by the mean of their branches."""
    if batch.mc_return is None:
        return {}
    number = jnp.sum(batch.mc_mask, axis=2)
    total = jnp.sum(jnp.where(batch.mc_mask, batch.mc_return, 0.0), axis=2)
    turns = jnp.arange(number.shape[1], dtype=jnp.int32)
    return {
        "cut": jnp.broadcast_to(turns, number.shape),
        "cut_value": total / jnp.maximum(number, 1),
        "cut_mask": number > 0,
    }


def _trees(world: World, policy: Array, played: Rollouts, base: int) -> dict[str, Array]:
    """A tree a task: its root, a node for every segment of every row, a leaf for every row.

    A branch hangs from the node that led to the state it left; in its own row nothing is copied.
    """
    rows, turns = played.episodes.mask.shape
    branches = rows - base
    roots = played.group  # nodes 0 to rows - 1, of which those of groups are used
    first = rows
    node = first + jnp.arange(rows * turns, dtype=jnp.int32).reshape(rows, turns)
    fork_row = jnp.concatenate([jnp.full(base, -1, jnp.int32), played.parent])
    fork_segment = jnp.concatenate([jnp.full(base, -1, jnp.int32), played.segment])
    before = jnp.maximum(fork_segment, 1) - 1
    came_from = jnp.where(fork_segment > 0, node[jnp.maximum(fork_row, 0), before], roots)
    above = jnp.concatenate([came_from[:, None], node[:, :-1]], axis=1)
    exists = played.episodes.mask & played.rows[:, None]
    length = jnp.sum(exists, axis=1)
    last = jnp.take_along_axis(node, jnp.maximum(length, 1)[:, None] - 1, axis=1)[:, 0]
    leaf_above = jnp.where(length > 0, last, -1)
    nowhere = jnp.full(rows, -1, jnp.int32)
    number = jnp.arange(rows, dtype=jnp.int32)
    entropy = _scores(world, policy, played.episodes)["segment_entropy"]
    flat = jnp.zeros(rows)
    used = jnp.zeros(rows, bool).at[roots].max(played.rows)
    there = played.rows & (length > 0)
    tree = jnp.broadcast_to(played.group[:, None], exists.shape)
    found = {
        "parent": jnp.concatenate(
            [nowhere, jnp.where(exists, above, -1).ravel(), jnp.where(there, leaf_above, -1)]
        ),
        "leaf_traj": jnp.concatenate(
            [nowhere, jnp.full(rows * turns, -1, jnp.int32), jnp.where(there, number, -1)]
        ),
        "tree_id": jnp.concatenate(
            [
                jnp.where(used, number, -1),
                jnp.where(exists, tree, -1).ravel(),
                jnp.where(there, played.group, -1),
            ]
        ),
        "node_entropy": jnp.concatenate([flat, entropy.ravel(), flat]),
        "node_of_segment": jnp.where(exists, node, -1),
    }
    if branches:
        found |= {"parent_traj": fork_row, "fork_segment": fork_segment}
        found["copied"] = jnp.zeros_like(exists)
    return found
