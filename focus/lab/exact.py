"""Exact values of a policy in a world, by dynamic programming over its layers.

Every function takes one world and `policy [R, A]`, the probabilities of each row's actions;
batch with `jax.vmap`. Success is the probability that an episode ends as one, so values lie in
[0, 1] and nothing is discounted.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from focus.lab.world import World
from focus.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactValues:
    """Values of every state and action, reached by the policy or not.

    Attributes:
      v: [T + 1, N] probability of success from each state; 0 behind the last layer.
      q: [T, N, A] the same after each action.
      a: [T, N, A] advantage q - v.
    """

    v: Array
    q: Array
    a: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeenValues:
    """Values of what the critic can see: expectations over the states that look the same.

    Attributes:
      v: [num_seen] probability of success given what is seen; 0 where `weight` is.
      q: [num_seen, A] the same given the action too; 0 where the action is never taken there.
      a: [num_seen, A] advantage q - v; 0 where the action is never taken there.
      weight: [num_seen] expected number of times that an episode comes by.
    """

    v: Array
    q: Array
    a: Array
    weight: Array


def _check_policy(world: World, policy: Array) -> None:
    chex.assert_rank(world.next_state, 4)
    chex.assert_shape(policy, world.logits.shape)


def _action_values(next_state: Array, prob: Array, reward: Array, done: Array, v: Array) -> Array:
    """[N, A] from one layer's transitions and the next layer's values [N]."""
    return jnp.sum(prob * (reward + jnp.where(done, 0.0, v[next_state])), axis=-1)


def _backwards(world: World, policy: Array, keep: bool) -> tuple[Array, tuple[Array, Array] | None]:
    """Values [N] of layer 0, and, if kept, those of all layers and their actions."""

    def layer(v, x):
        next_state, prob, reward, done, row = x
        q = _action_values(next_state, prob, reward, done, v)
        v = jnp.sum(policy[row] * q, axis=-1)
        return v, (v, q) if keep else None

    end = jnp.zeros(world.num_states, policy.dtype)
    xs = (world.next_state, world.prob, world.reward, world.done, world.policy_row)
    return jax.lax.scan(layer, end, xs, reverse=True)


def values(world: World, policy: Array) -> ExactValues:
    """Values of all states and actions.

        q(s, a) = sum_k p_k (reward_k + [not done_k] v(s'_k)),   v(s) = sum_a pi(a | row(s)) q(s, a)

    Args:
      world: one world.
      policy: [R, A] probabilities.
    """
    _check_policy(world, policy)
    _, (v, q) = _backwards(world, policy, keep=True)
    v = jnp.concatenate([v, jnp.zeros_like(v[:1])])
    return ExactValues(v=v, q=q, a=q - v[:-1, :, None])


def success(world: World, policy: Array) -> Array:
    """Scalar probability that an episode succeeds, the mean over tasks.

    Args:
      world: one world.
      policy: [R, A] probabilities.
    """
    _check_policy(world, policy)
    v, _ = _backwards(world, policy, keep=False)
    return jnp.mean(v[world.start])


def occupancy(world: World, policy: Array) -> Array:
    """Probability that an episode of a task drawn at random is in each state.

    A layer's sum is the probability that the episode has not ended before it.

    Args:
      world: one world.
      policy: [R, A] probabilities.

    Returns:
      [T, N].
    """
    _check_policy(world, policy)

    def layer(here, x):
        next_state, prob, done, row = x
        flow = (here[:, None] * policy[row])[..., None] * jnp.where(done, 0.0, prob)
        return jnp.zeros_like(here).at[next_state].add(flow), here

    start = jnp.zeros(world.num_states, policy.dtype).at[world.start].add(1 / world.num_tasks)
    _, here = jax.lax.scan(
        layer, start, (world.next_state, world.prob, world.done, world.policy_row)
    )
    return here


def seen_values(world: World, policy: Array) -> SeenValues:
    """Values given only what the critic sees.

        v(o)    = sum_{s in o} d(s) v(s) / sum_{s in o} d(s)
        q(o, a) = sum_{s in o} d(s) pi(a | s) q(s, a) / sum_{s in o} d(s) pi(a | s)

    with d the occupancy of the policy: the exact expectation over the hidden part of the state.
    The action is weighed by how often it is taken in each of the states, because it tells about
    them where the policy sees what the critic does not.

    Args:
      world: one world.
      policy: [R, A] probabilities.
    """
    exact = values(world, policy)
    here = occupancy(world, policy)
    taken = here[..., None] * policy[world.policy_row]
    num_actions = policy.shape[-1]
    weight = jnp.zeros(world.num_seen).at[world.seen].add(here)
    v = jnp.zeros(world.num_seen).at[world.seen].add(here * exact.v[:-1])
    weight_a = jnp.zeros((world.num_seen, num_actions)).at[world.seen].add(taken)
    q = jnp.zeros((world.num_seen, num_actions)).at[world.seen].add(taken * exact.q)
    v = _ratio(v, weight)
    q = _ratio(q, weight_a)
    return SeenValues(v=v, q=q, a=jnp.where(weight_a > 0, q - v[:, None], 0.0), weight=weight)


def _ratio(total: Array, weight: Array) -> Array:
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)


def policy_gradient(world: World, policy: Array) -> Array:
    """Gradient of `success` with respect to the logits of the policy's rows.

        dJ / dlogits[r, a] = sum_{s: row(s) = r} d(s) pi(a | r) a(s, a)

    The policy gradient theorem with exact advantages; for a linear policy multiply with
    `world.policy_features` from the left, transposed.

    Args:
      world: one world.
      policy: [R, A] probabilities, a softmax of logits.

    Returns:
      [R, A].
    """
    flow = occupancy(world, policy)[..., None] * values(world, policy).a
    return policy * jnp.zeros_like(policy).at[world.policy_row].add(flow)


def goal_distance(world: World) -> Array:
    """Turns to a success on the shortest way there is, whatever its probability.

    Args:
      world: one world.

    Returns:
      [T + 1, N], at least 1; inf where none leads there, and behind the last layer.
    """

    def layer(distance, x):
        next_state, prob, reward, done = x
        way = jnp.where(done, jnp.where(reward > 0, 1.0, jnp.inf), 1 + distance[next_state])
        distance = jnp.min(jnp.where(prob > 0, way, jnp.inf), axis=(-2, -1))
        return distance, distance

    end = jnp.full(world.num_states, jnp.inf)
    _, distance = jax.lax.scan(
        layer, end, (world.next_state, world.prob, world.reward, world.done), reverse=True
    )
    return jnp.concatenate([distance, end[None]])
