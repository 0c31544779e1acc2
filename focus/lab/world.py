"""What a world of the laboratory is: arrays that say where every action leads.

A world is finite, episodic and unrolled in time: layer t holds the states in which turn t may
begin, and every action leads to layer t + 1 or ends the episode. What the turn limit cuts ends
there too: the limit is an outcome. Letters of the axes in this package:

    T  layers (turns of the longest episode)
    N  states of a layer
    A  actions
    K  outcomes that chance may choose between, after an action
    C  tasks
    R  rows of the policy's table

The policy sees less than the world holds: it has one row of logits for all states that share a
`policy_row`. So does the critic: it sees the `seen` of a state and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from focus.types import Array

# Kinds of actions, `World.kind`.
CALL, ANSWER, SUMMARY = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class World:
    """One world; see the module for its axes. Arrays are leaves, so worlds of seeds are vmapped.

    What stands in states that no action leads to is valid but means nothing.

    Attributes:
      next_state: [T, N, A, K] int32 state in layer t + 1; any index where the episode ends.
      prob: [T, N, A, K] probability of each outcome, sums to 1 over K.
      reward: [T, N, A, K] probability in [0, 1] that an episode which ends here is a success; 0
        where it goes on.
      done: [T, N, A, K] bool, the episode ends here; True throughout the last layer.
      tokens: [T, N, A] int32 tokens that the action generates, at least 1.
      kind: [T, N, A] int8, `CALL`, `ANSWER` or `SUMMARY`.
      policy_row: [T, N] int32 in [0, R), what the policy sees.
      seen: [T, N] int32 in [0, num_seen), what the critic sees.
      look: [num_seen] int32 in [0, num_looks), what of it other tasks show, too: the turn and what
        has been found, but not the task.
      boundary: [T, N] bool, states that a compaction made.
      start: [C] int32 state of layer 0 that each task starts in.
      logits: [R, A] the initial policy, a softmax.
      features: [num_seen, F] what a linear critic reads; None: a one-hot code of `seen`.
      policy_features: [R, P] what a linear policy reads, its logits are
        `logits + policy_features @ weights`; None: a one-hot code of the row, a table.
      num_seen: how many different things the critic can see.
      num_looks: how many of them differ in more than the task.
      name: key of `WORLDS`.
      options: what it was built with, but for the seed, sorted by name.
    """

    next_state: Array
    prob: Array
    reward: Array
    done: Array
    tokens: Array
    kind: Array
    policy_row: Array
    seen: Array
    look: Array
    boundary: Array
    start: Array
    logits: Array
    features: Array | None
    policy_features: Array | None
    num_seen: int = dataclasses.field(metadata={"static": True})
    num_looks: int = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True})
    options: tuple[tuple[str, Any], ...] = dataclasses.field(metadata={"static": True})

    @property
    def num_layers(self) -> int:
        """T, turns of the longest episode."""
        return self.next_state.shape[-4]

    @property
    def num_states(self) -> int:
        """N, states of one layer."""
        return self.next_state.shape[-3]

    @property
    def num_actions(self) -> int:
        """A."""
        return self.next_state.shape[-2]

    @property
    def num_tasks(self) -> int:
        """C."""
        return self.start.shape[-1]


def reset(world: World, key: Array, task: Array) -> Array:
    """The state in layer 0 that an episode of each task starts in.

    Args:
      world: one world.
      key: unused, every task has one start; chance enters with the first action.
      task: [...] int32 in [0, C).

    Returns:
      [...] int32 states.
    """
    del key
    return world.start[task]


def step(
    world: World, t: Array | int, state: Array, action: Array, key: Array
) -> tuple[Array, Array, Array]:
    """Plays one action in each of many episodes, which may stand in different layers.

    Args:
      world: one world.
      t: [...] or scalar int32 layer of each episode.
      state: [...] int32 state in that layer.
      action: [...] int32.
      key: a `jax.random.key`, consumed.

    Returns:
      state: [...] int32 state in layer t + 1, a valid index also where the episode ended.
      outcome: [...] float32, 1 where the episode ended as a success, else 0.
      done: [...] bool, whether it ended.
    """
    return advance(world, t, state, action, *draw_uniform(key, 2, *jnp.shape(state)))


def advance(
    world: World, t: Array | int, state: Array, action: Array, chance: Array, luck: Array
) -> tuple[Array, Array, Array]:
    """`step` with what is drawn given: uniform in [0, 1), the shape of `state`.

    Args:
      world, t, state, action: see `step`.
      chance: which outcome of the action it is.
      luck: whether an episode that ends is a success.
    """
    where = (t, state, action)
    if world.prob.shape[-1] > 1:
        below = jnp.cumsum(world.prob[where], axis=-1)[..., :-1]
        where += (jnp.sum(below <= chance[..., None], axis=-1),)
    else:
        where += (0,)
    done = world.done[where]
    success = done & (luck < world.reward[where])
    return world.next_state[where], success.astype(jnp.float32), done


def check(world: World) -> None:
    """Checks one world, on the host; for those who write one of their own.

    Raises:
      ValueError: arrays that do not fit each other, indices or probabilities out of range, a
        reward where the episode goes on, a last layer in which it goes on, actions of no token,
        or numbers that are not finite.
    """
    shapes = {
        "next_state": "TNAK",
        "prob": "TNAK",
        "reward": "TNAK",
        "done": "TNAK",
        "tokens": "TNA",
        "kind": "TNA",
        "policy_row": "TN",
        "seen": "TN",
        "look": "S",
        "boundary": "TN",
        "start": "C",
        "logits": "RA",
        "features": "SF",
        "policy_features": "RP",
    }
    sizes: dict[str, int] = {"S": world.num_seen}
    arrays = {}
    for name, axes in shapes.items():
        value = getattr(world, name)
        if value is None and name in ("features", "policy_features"):
            continue
        array = arrays[name] = np.asarray(value)
        if array.ndim != len(axes) or any(
            sizes.setdefault(axis, size) != size
            for axis, size in zip(axes, array.shape, strict=True)
        ):
            expected = [sizes.get(axis, axis) for axis in axes]
            raise ValueError(f"{world.name}: {name} has shape {array.shape}, expected {expected}")

    def refuse(wrong: np.ndarray, said: str) -> None:
        if wrong.any():
            where = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(f"{world.name}: {said}, first at index {where}")

    for name, size in (
        ("next_state", sizes["N"]),
        ("policy_row", sizes["R"]),
        ("seen", world.num_seen),
        ("look", world.num_looks),
        ("start", sizes["N"]),
    ):
        refuse((arrays[name] < 0) | (arrays[name] >= size), f"{name} outside [0, {size})")
    prob, reward, done = arrays["prob"], arrays["reward"], arrays["done"]
    refuse(~((prob >= 0) & (prob <= 1)), "prob outside [0, 1]")
    refuse(~(np.abs(prob.sum(-1) - 1) < 1e-5), "prob that does not sum to 1")
    refuse(~((reward >= 0) & (reward <= 1)), "reward outside [0, 1]")
    refuse((reward > 0) & ~done, "reward where the episode goes on")
    refuse(~done[-1], "the last layer does not end the episode")
    refuse(arrays["tokens"] < 1, "an action of less than one token")
    for name in ("logits", "features", "policy_features"):
        if name in arrays:
            refuse(~np.isfinite(arrays[name]), f"{name} that is not finite")


def whole(world: str, option: str, value: Any, low: int, high: int | None = None) -> int:
    """An option that is a whole number in [low, high], or a ValueError that says so."""
    said = f"at least {low}" if high is None else f"in [{low}, {high}]"
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Integral)
        or not low <= value
        or (high is not None and value > high)
    ):
        raise ValueError(f"{world}: {option}={value!r} must be a whole number {said}")
    return int(value)


def share(world: str, option: str, value: Any, *, inside: bool = False) -> float:
    """An option in [0, 1], or in (0, 1) where `inside`, or a ValueError that says so."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not (0 < value < 1 if inside else 0 <= value <= 1):
        interval = "(0, 1)" if inside else "[0, 1]"
        raise ValueError(f"{world}: {option}={value!r} must be a number in {interval}")
    return float(value)


def flag(world: str, option: str, value: Any) -> bool:
    """An option that is True or False, or a ValueError that says so."""
    if not isinstance(value, bool):
        raise ValueError(f"{world}: {option}={value!r} must be True or False")
    return value


def seed_key(world: str, seed: Array | int) -> Array:
    """The key of a world's seed, the same for an int and for an array that holds it.

    Raises:
      ValueError: a number that is not whole or not in [0, 2^32), or an array of such.
    """
    if not isinstance(seed, jax.Array):
        whole(world, "seed", seed, 0, 2**32 - 1)
    elif not jnp.issubdtype(seed.dtype, jnp.integer):
        raise ValueError(f"{world}: seed of {seed.dtype} must hold whole numbers")
    return jax.random.key(jnp.asarray(seed, jnp.uint32))


def draw_bits(key: Array, *shape: int) -> Array:
    """Uniform uint32; drawn flat, because XLA takes ten times as long to compile other shapes."""
    return jax.random.bits(key, (math.prod(shape),)).reshape(shape)


def draw_whole(key: Array, bound: int, *shape: int) -> Array:
    """Uniform int32 in [0, bound), for small bounds."""
    return (draw_bits(key, *shape) % np.uint32(bound)).astype(jnp.int32)


def draw_uniform(key: Array, *shape: int) -> Array:
    """Uniform float32 in [0, 1)."""
    return jax.random.uniform(key, (math.prod(shape),)).reshape(shape)


def draw_normal(key: Array, *shape: int) -> Array:
    """Standard normal float32."""
    return jax.random.normal(key, (math.prod(shape),)).reshape(shape)


def initial_logits(key: Array, right: Array, num_actions: int, p0: float) -> Array:
    """A policy that prefers the right action of every row, more or less.

        logits[r, a] = Normal(0, .3) + log((A - 1) p0 / (1 - p0)) [a = right_r]

    Without the noise every right action has probability `p0` and the others share the rest.

    Args:
      key: a `jax.random.key`, consumed.
      right: [R] int32.
      num_actions: A.
      p0: probability in (0, 1).

    Returns:
      [R, A] logits.
    """
    noise = 0.3 * draw_normal(key, right.shape[0], num_actions)
    lead = np.log((num_actions - 1) * p0 / (1 - p0))
    return noise + lead * jax.nn.one_hot(right, num_actions)


def looks_of_tasks(layers: int, tasks: int, looks: int) -> Array:
    """`World.look` where `seen` is `(t * tasks + task) * looks + look`: a look for every turn."""
    look = np.arange(layers)[:, None, None] * looks + np.arange(looks)
    return jnp.asarray(np.broadcast_to(look, (layers, tasks, looks)).reshape(-1), jnp.int32)
