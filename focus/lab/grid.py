"""A grid with a trap: walls of it, and one way through."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from focus.lab.world import CALL, World, draw_whole, initial_logits, seed_key, share, whole
from focus.types import Array

UP, RIGHT, DOWN, LEFT = range(4)


def grid_trap(
    *,
    tasks: int = 12,
    size: int = 8,
    length: int = 40,
    slip: float = 0.1,
    noise: float = 0.95,
    p0: float = 0.45,
    seed: Array | int = 0,
) -> World:
    """A square in which tasks start at the left and end at a goal in the rightmost column.

    The middle column is a trap but for one gap: who steps into it stays there until the turn
    limit, for everyone to see. A move goes astray with probability `slip`, to either side alike;
    moves out of the square do nothing. Reaching the goal ends the episode, a success with
    probability `noise`. Gap, goal and starts are drawn with the seed. All tasks share the goal,
    and the policy's row is the cell; the critic sees cell and turn. The right action of a cell
    goes straight to the gap's row or, behind the gap, the goal's, then right. A move is a token.

    Success of the initial policy is about .07.

    Args:
      tasks: C.
      size: rows and columns, at least 3.
      length: T, the turn limit.
      slip: probability that a move goes to one of its sides instead.
      noise: probability that reaching the goal is a success.
      p0: first probability of a cell's right action; see `initial_logits`.
      seed: of everything drawn; an int or a traced uint32.

    Raises:
      ValueError: an option out of range.
    """
    name = "grid_trap"
    options = {
        "tasks": tasks,
        "size": size,
        "length": length,
        "slip": slip,
        "noise": noise,
        "p0": p0,
    }
    whole(name, "tasks", tasks, 1)
    whole(name, "size", size, 3)
    whole(name, "length", length, 1)
    share(name, "slip", slip)
    share(name, "noise", noise)
    share(name, "p0", p0, inside=True)
    place_key, start_key, logit_key = jax.random.split(seed_key(name, seed), 3)
    gap, goal_row = draw_whole(place_key, size, 2)
    cells = size * size
    i, j = np.divmod(np.arange(cells), size)
    wall = size // 2
    is_trap = (j == wall) & (i != gap)
    goal = goal_row * size + size - 1

    steps_i, steps_j = np.array([-1, 0, 1, 0]), np.array([0, 1, 0, -1])
    moves = np.clip(i[:, None] + steps_i, 0, size - 1) * size
    moves += np.clip(j[:, None] + steps_j, 0, size - 1)  # [cells, 4]
    ways = (np.arange(4)[:, None] + (np.array([0, -1, 1]) if slip else np.array([0]))) % 4
    odds = np.array([1 - slip, slip / 2, slip / 2] if slip else [1.0], np.float32)
    stays = np.arange(cells)[:, None, None]
    after = jnp.where(is_trap[:, None, None], stays, moves[:, ways])  # [cells, A, K]
    arrives = after == goal

    aim = jnp.where(j < wall, gap, goal_row)
    right = jnp.where((i < aim) & (j != wall), DOWN, jnp.where((i > aim) & (j != wall), UP, RIGHT))
    shape = (length, *after.shape)
    last = np.arange(length) == length - 1
    return World(
        next_state=jnp.broadcast_to(after, shape).astype(jnp.int32),
        prob=jnp.broadcast_to(odds, shape),
        reward=jnp.broadcast_to(jnp.where(arrives, noise, 0.0), shape),
        done=arrives | last[:, None, None, None],
        tokens=jnp.ones(shape[:-1], jnp.int32),
        kind=jnp.full(shape[:-1], CALL, jnp.int8),
        policy_row=jnp.broadcast_to(jnp.arange(cells, dtype=jnp.int32), shape[:2]),
        seen=jnp.arange(length * cells, dtype=jnp.int32).reshape(length, cells),
        look=jnp.arange(length * cells, dtype=jnp.int32),
        boundary=jnp.zeros(shape[:2], bool),
        start=draw_whole(start_key, size, tasks) * size,
        logits=initial_logits(logit_key, right, 4, p0),
        features=None,
        policy_features=None,
        num_seen=length * cells,
        num_looks=length * cells,
        name=name,
        options=tuple(sorted(options.items())),
    )
