"""Chains of turns with forks in them: a wrong action at a fork loses the episode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from focus.lab.world import (
    CALL,
    World,
    draw_bits,
    draw_whole,
    initial_logits,
    seed_key,
    share,
    whole,
)
from focus.types import Array

# Turns at the end of a chain that hold no fork, so that a loss is followed by something.
TAIL = 3


def _statuses(delay: int, length: int) -> int:
    """How many statuses a task has in a layer: 0 alive, then turns since the loss.

    The last one is "lost, and seen"; before it come the `delay - 1` turns in which a loss is not
    seen yet. A loss that is never seen within the chain needs one status.
    """
    return 2 if delay >= length else 1 + delay


def fork_chain(
    *,
    tasks: int = 200,
    length: int = 40,
    forks: int = 8,
    actions: int = 4,
    rows: int = 60,
    delay: int = 1,
    noise: float = 0.95,
    p0: float = 0.7,
    seed: Array | int = 0,
) -> World:
    """Tasks of `length` turns, `forks` of which are decided by what the policy does there.

    Every turn of every task has a row of the policy, drawn uniformly, and every row has one right
    action. Another action at a fork loses the episode; elsewhere actions change nothing. Forks
    are drawn without replacement from all turns but the last three. An episode that was not lost
    succeeds with probability `noise`, one that was lost fails; both are played to their end, one
    token a turn. The critic sees the task, the turn, and, from `delay` turns after it, the loss.

    Success of the initial policy, mean over 600 seeds of 50 tasks:

        length  forks  p0   noise  success
        40      8      .7   .95    .049
        20      6      .5   .95    .014
        20      5      .6   .95    .069
        20      5      .68  .95    .128
        8       4      .8   .95    .370

    Args:
      tasks: C.
      length: T.
      forks: forks of a task, at most `length - 3`.
      actions: A, at least 2.
      rows: R, shared among the turns of all tasks.
      delay: turns after which a loss is seen; 1: at the next state; `length` or more: never.
      noise: probability of success of an episode that was not lost.
      p0: first probability of a row's right action; see `initial_logits`.
      seed: of forks, rows, right actions and initial logits; an int or a traced uint32.

    Raises:
      ValueError: an option out of range.
    """
    name = "fork_chain"
    whole(name, "tasks", tasks, 1)
    whole(name, "length", length, TAIL + 1)
    whole(name, "forks", forks, 0, length - TAIL)
    whole(name, "actions", actions, 2)
    whole(name, "rows", rows, 1)
    whole(name, "delay", delay, 1)
    share(name, "noise", noise)
    share(name, "p0", p0, inside=True)
    options = {
        "tasks": tasks,
        "length": length,
        "forks": forks,
        "actions": actions,
        "rows": rows,
        "delay": delay,
        "noise": noise,
        "p0": p0,
    }
    fork_key, row_key, right_key, logit_key = jax.random.split(seed_key(seed), 4)
    is_fork = draw_forks(fork_key, tasks, length, forks)
    row = draw_whole(row_key, rows, length, tasks)
    right = draw_whole(right_key, actions, rows)
    statuses = _statuses(delay, length)

    # State = task * statuses + status. Where a lost task stands next does not depend on actions.
    status = np.arange(statuses)
    older = np.minimum(status + 1, statuses - 1)
    older[0] = 0
    loses = is_fork[:, :, None] & (jnp.arange(actions) != right[row][:, :, None])  # [T, C, A]
    next_status = jnp.broadcast_to(older[:, None], (length, tasks, statuses, actions))
    next_status = next_status.at[:, :, 0, :].set(loses.astype(next_status.dtype))
    next_state = np.arange(tasks)[:, None, None] * statuses + next_status
    last = np.arange(length) == length - 1
    shape = (length, tasks * statuses, actions)
    done = np.broadcast_to(last[:, None, None], shape)
    succeeds = last[:, None, None, None] & (next_status == 0)
    is_seen = (status == statuses - 1) & (delay < length) & (status > 0)
    seen = (np.arange(length)[:, None, None] * tasks + np.arange(tasks)[:, None]) * 2 + is_seen
    return World(
        next_state=next_state.reshape(*shape, 1).astype(jnp.int32),
        prob=jnp.ones((*shape, 1)),
        reward=jnp.where(succeeds, noise, 0.0).reshape(*shape, 1),
        done=jnp.asarray(done)[..., None],
        tokens=jnp.ones(shape, jnp.int32),
        kind=jnp.full(shape, CALL, jnp.int8),
        policy_row=jnp.repeat(row, statuses, axis=1),
        seen=jnp.asarray(seen.reshape(length, -1), jnp.int32),
        boundary=jnp.zeros(shape[:2], bool),
        start=jnp.arange(tasks, dtype=jnp.int32) * statuses,
        logits=initial_logits(logit_key, right, actions, p0),
        features=None,
        policy_features=None,
        num_seen=length * tasks * 2,
        name=name,
        options=tuple(sorted(options.items())),
    )


def draw_forks(key: Array, tasks: int, length: int, forks: int) -> Array:
    """[T, C] bool: `forks` turns of every task, none of the last `TAIL`."""
    turns = length - TAIL
    # The lowest bits are replaced by the turn: no two draws of a task are equal.
    mask = np.uint32((1 << turns.bit_length()) - 1)
    draws = draw_bits(key, turns, tasks) & ~mask | np.arange(turns, dtype=np.uint32)[:, None]
    rank = jnp.sum(draws[:, None] < draws[None], axis=0)
    return jnp.concatenate([rank < forks, jnp.zeros((TAIL, tasks), bool)])
