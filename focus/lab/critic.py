"""A critic for worlds: counts of what became of everything that it can see.

The critic sees `World.seen`. Its belief about the value of one such sight is a Beta distribution
around the mean of all sights that look the same in other tasks, and theirs is one around the mean
of all. Old outcomes count less and less, because the policy moves.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from focus.lab.play import Episodes, take_state
from focus.lab.world import World
from focus.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """What has been seen.

    Attributes:
      seen: [num_seen, 2] failures and successes by sight.
      look: [num_looks, 2] the same by what tasks have in common.
    """

    seen: Array
    look: Array


def init_counts(world: World) -> Counts:
    """Nothing has been seen."""
    return Counts(jnp.zeros((world.num_seen, 2)), jnp.zeros((world.num_looks, 2)))


def learn(counts: Counts, world: World, episodes: Episodes, *, kept: float) -> Counts:
    """Counts the outcome of each row at every state that it came by.

    Args:
      counts: before.
      world: one world.
      episodes: with outcomes.
      kept: share of the old counts that stays.
    """
    sight = take_state(world.seen, episodes.layer[:, :-1], episodes.state[:, :-1])
    won = jnp.where(episodes.mask, episodes.outcome[:, None], 0.0)
    amount = jnp.stack([jnp.where(episodes.mask, 1.0 - won, 0.0), won], axis=-1)
    return Counts(
        seen=(kept * counts.seen).at[sight].add(amount),
        look=(kept * counts.look).at[world.look[sight]].add(amount),
    )


def belief(
    counts: Counts, world: World, layer: Array, state: Array, *, look_weight: float, weight: float
) -> tuple[Array, Array]:
    """Mean and variance of the value of states, as the critic sees them.

        m(all)  = (successes + 1) / (all + 2)
        m(look) = (successes + look_weight m(all)) / (n + look_weight)
        m(seen) = (successes + weight m(look)) / (n + weight)
        tau2    = m (1 - m) / (n + weight + 1)

    Args:
      counts: of outcomes.
      world: one world.
      layer: [...] int32.
      state: [...] int32.
      look_weight: outcomes that the mean of all is worth.
      weight: outcomes that the mean of a look is worth.

    Returns:
      mean and epistemic variance, [...].
    """
    everything = jnp.sum(counts.look, axis=0)
    base = (everything[1] + 1.0) / (jnp.sum(everything) + 2.0)
    look_mean = (counts.look[:, 1] + look_weight * base) / (counts.look.sum(-1) + look_weight)
    sight = take_state(world.seen, layer, state)
    number = jnp.sum(counts.seen, axis=-1)[sight]
    mean = (counts.seen[sight, 1] + weight * look_mean[world.look[sight]]) / (number + weight)
    return mean, mean * (1.0 - mean) / (number + weight + 1.0)
