"""Episodes in a world, many at once, from any state: what rollouts and branches are made of."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from focus.lab.world import World, advance, draw_uniform
from focus.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Episodes:
    """B episodes; segment j of a row is its j-th turn, wherever the row began.

    Attributes:
      task: [B] int32.
      layer: [B, S + 1] int32 layer of each state.
      state: [B, S + 1] int32 state in that layer.
      action: [B, S] int32.
      tokens: [B, S] int32 generated tokens, 0 where nothing was played.
      mask: [B, S] bool, turns that were played.
      outcome: [B] 0 or 1.
    """

    task: Array
    layer: Array
    state: Array
    action: Array
    tokens: Array
    mask: Array
    outcome: Array

    @property
    def cost(self) -> Array:
        """[B] generated tokens of each row."""
        return jnp.sum(self.tokens, axis=1)

    def keep(self, rows: Array) -> Episodes:
        """The same with only `rows` [B] bool; the others have not been played."""
        mask = self.mask & rows[:, None]
        return dataclasses.replace(self, mask=mask, tokens=jnp.where(mask, self.tokens, 0))


def take_state(array: Array, layer: Array, state: Array) -> Array:
    """Entries of a [T, N, ...] array of a world; a layer behind the last gives the last's."""
    return array[jnp.minimum(layer, array.shape[0] - 1), state]


def play(
    world: World, policy: Array, task: Array, layer: Array, state: Array, rows: Array, key: Array
) -> Episodes:
    """Plays every row to its end.

    Args:
      world: one world.
      policy: [R, A] probabilities.
      task: [B] int32.
      layer: [B] int32 in which each row begins.
      state: [B] int32 in that layer.
      rows: [B] bool, rows that are played.
      key: a `jax.random.key`, consumed.
    """
    layers = world.num_layers
    cumulative = jnp.cumsum(policy, axis=-1)[:, :-1]

    def turn(carry, drawn_of_turn):
        layer, state, goes_on, outcome = carry
        drawn, chance, luck = drawn_of_turn
        here = jnp.minimum(layer, layers - 1)
        goes_on &= layer < layers
        action = jnp.sum(cumulative[world.policy_row[here, state]] <= drawn[:, None], axis=-1)
        following, success, done = advance(world, here, state, action, chance, luck)
        tokens = jnp.where(goes_on, world.tokens[here, state, action], 0)
        record = layer, state, action, goes_on, tokens
        outcome = jnp.where(goes_on & done, success, outcome)
        state = jnp.where(goes_on, following, state)
        return (layer + goes_on, state, goes_on & ~done, outcome), record

    start = layer, state, rows, jnp.zeros(task.size)
    # Drawn at once: XLA takes seconds to compile a draw inside of the loop.
    end, record = jax.lax.scan(turn, start, draw_uniform(key, layers, 3, task.size))
    layers_seen, states, actions, mask, tokens = (jnp.moveaxis(x, 0, 1) for x in record)
    return Episodes(
        task=task,
        layer=jnp.concatenate([layers_seen, end[0][:, None]], axis=1),
        state=jnp.concatenate([states, end[1][:, None]], axis=1),
        action=actions,
        tokens=tokens,
        mask=mask,
        outcome=end[3],
    )


def launched(cost: Array, most: Array | int, budget: Array | int, group: int = 1) -> Array:
    """Rows that a budget lets be played, one group after the other, never passing it.

    A group is launched where the dearest that it could become fits beside what those before it
    have cost, so that no row is left out for what it turned out to cost.

    Args:
      cost: [B] tokens that each row generates if it is played.
      most: tokens that a row can generate at most; of each group, or of all.
      budget: of all rows.
      group: rows of a group, consecutive.

    Returns:
      [B] bool.
    """
    costs = cost.reshape(-1, group).sum(axis=1)
    worst = jnp.broadcast_to(group * jnp.asarray(most), costs.shape)

    def launch(spent, row):
        cost, worst = row
        fits = spent + worst <= budget
        return spent + jnp.where(fits, cost, 0), fits

    _, fits = jax.lax.scan(launch, jnp.zeros((), costs.dtype), (costs, worst))
    return jnp.repeat(fits, group)
