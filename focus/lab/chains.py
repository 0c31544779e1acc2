"""Chains of turns with forks in them: a wrong action at a fork loses the episode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from focus.lab.world import (
    CALL,
    World,
    draw_bits,
    draw_normal,
    draw_whole,
    initial_logits,
    looks_of_tasks,
    seed_key,
    share,
    whole,
)
from focus.types import Array

# Turns at the end of a chain that hold no fork, so that a loss is followed by something.
TAIL = 3


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
    _check(name, options)
    row, is_fork, is_wrong, logits = _draw(seed_key(name, seed), options)
    loses = is_fork[..., None] & is_wrong
    return _chain(name, options, row, loses[..., None], jnp.ones((*loses.shape, 1)), logits)


def noisy_forks(
    *,
    tasks: int = 24,
    length: int = 20,
    forks: int = 6,
    actions: int = 4,
    rows: int = 40,
    delay: int = 1,
    noise: float = 0.95,
    hazard: float = 0.8,
    slip: float = 0.02,
    overlap: float = 0.7,
    width: int = 32,
    p0: float = 0.53,
    seed: Array | int = 0,
) -> World:
    """Fork chains in which chance has a say at forks, for critics and policies that are linear.

    At a fork a wrong action loses the episode with probability `hazard`, the right one with
    probability `slip`. A critic reads `features`, random codes of what it sees that overlap:

        x_0 = e_0,   x_{t+1} = overlap x_t + sqrt(1 - overlap^2) e_{t+1}   while no loss is seen
        y_t = overlap x_t + sqrt(1 - overlap^2) z_t                        when one is

    with z a walk like x, and e Gaussian with variance 1 / `width` in each coordinate. So the
    expected cosine is `overlap` between consecutive states of a task and between the two sides
    of a fork, and 0 between tasks: at 0 every state is a case of its own, as far as the width
    allows, and at 1 a critic knows the task and nothing else. The rows that a policy reads have
    the cosine `overlap` with each other. Everything else is as in `fork_chain`; success of the
    initial policy is about .05.

    Args:
      tasks: C.
      length: T.
      forks: forks of a task, at most `length - 3`.
      actions: A, at least 2.
      rows: R, shared among the turns of all tasks.
      delay: turns after which a loss is seen; 1: at the next state; `length` or more: never.
      noise: probability of success of an episode that was not lost.
      hazard: probability that a wrong action at a fork loses the episode.
      slip: probability that the right one does.
      overlap: in [0, 1], see above.
      width: F, coordinates of a critic's features.
      p0: first probability of a row's right action; see `initial_logits`.
      seed: of everything drawn; an int or a traced uint32.

    Raises:
      ValueError: an option out of range.
    """
    name = "noisy_forks"
    options = {
        "tasks": tasks,
        "length": length,
        "forks": forks,
        "actions": actions,
        "rows": rows,
        "delay": delay,
        "noise": noise,
        "hazard": hazard,
        "slip": slip,
        "overlap": overlap,
        "width": width,
        "p0": p0,
    }
    _check(name, options)
    share(name, "hazard", hazard)
    share(name, "slip", slip)
    share(name, "overlap", overlap)
    whole(name, "width", width, 1)
    key = seed_key(name, seed)
    row, is_fork, is_wrong, logits = _draw(key, options)
    risk = jnp.where(is_fork[..., None], jnp.where(is_wrong, hazard, slip), 0.0)
    prob = jnp.stack([1 - risk, risk], axis=-1)
    loses = jnp.broadcast_to(jnp.array([False, True]), prob.shape)

    # Two walks, whose step t is the sum of all earlier steps' noise, weighted by row t of `mix`.
    fresh = np.sqrt(1 - overlap**2)
    age = np.arange(length)[:, None] - np.arange(length)
    mix = np.where(age >= 0, float(overlap) ** np.maximum(age, 0), 0.0)
    mix[:, 1:] *= fresh
    noises = draw_normal(jax.random.fold_in(key, 4), 2, length, tasks * width) / np.sqrt(width)
    x, z = jnp.einsum("ts,nsw->ntw", mix.astype(np.float32), noises)
    codes = jnp.stack([x, overlap * x + fresh * z]).reshape(2, length, tasks, width)
    policy_features = np.hstack(
        [np.full((rows, 1), np.sqrt(overlap)), np.sqrt(1 - overlap) * np.eye(rows)]
    )
    return _chain(
        name,
        options,
        row,
        loses,
        prob,
        logits,
        features=jnp.moveaxis(codes, 0, 2).reshape(-1, width),
        policy_features=jnp.asarray(policy_features, jnp.float32),
    )


def _check(name: str, options: dict[str, Any]) -> None:
    """The options that both chains have."""
    whole(name, "tasks", options["tasks"], 1)
    length = whole(name, "length", options["length"], TAIL + 1)
    whole(name, "forks", options["forks"], 0, length - TAIL)
    whole(name, "actions", options["actions"], 2)
    whole(name, "rows", options["rows"], 1)
    whole(name, "delay", options["delay"], 1)
    share(name, "noise", options["noise"])
    share(name, "p0", options["p0"], inside=True)


def _draw(key: Array, options: dict[str, Any]) -> tuple[Array, Array, Array, Array]:
    """What both chains draw: rows and forks [T, C], wrong actions [T, C, A], logits [R, A]."""
    tasks, length, actions = options["tasks"], options["length"], options["actions"]
    fork_key, row_key, right_key, logit_key = jax.random.split(key, 4)
    row = draw_whole(row_key, options["rows"], length, tasks)
    right = draw_whole(right_key, actions, options["rows"])
    return (
        row,
        _draw_forks(fork_key, tasks, length, options["forks"]),
        jnp.arange(actions) != right[row][..., None],
        initial_logits(logit_key, right, actions, options["p0"]),
    )


def _chain(
    name: str,
    options: dict[str, Any],
    row: Array,
    loses: Array,
    prob: Array,
    logits: Array,
    features: Array | None = None,
    policy_features: Array | None = None,
) -> World:
    """A chain from what actions do in it.

    State = task * statuses + status. Status 0 is not lost; then come the turns since the loss in
    which it is not seen, `delay - 1` of them; the last is lost and seen. A loss that the chain
    never shows needs one status. What a lost episode does next is the same for all actions.

    Args:
      name: of the world.
      options: of the world.
      row: [T, C] int32.
      loses: [T, C, A, K] bool, the outcome loses an episode that was not lost.
      prob: [T, C, A, K] of these outcomes.
      logits: [R, A].
      features: see `World`; those of turn t, task c are (t * C + c) * 2 without a loss in sight,
        and the next with one.
      policy_features: see `World`.
    """
    length, tasks, actions, outcomes = prob.shape
    delay = options["delay"]
    is_shown = delay < length
    statuses = 1 + delay if is_shown else 2
    older = np.minimum(np.arange(1, statuses) + 1, statuses - 1)
    lost_shape = (length, tasks, statuses - 1, actions, outcomes)
    next_status = jnp.concatenate(
        [loses[:, :, None].astype(jnp.int32), jnp.broadcast_to(older[:, None, None], lost_shape)], 2
    )
    last = np.arange(length) == length - 1
    succeeds = last[:, None, None, None, None] & (next_status == 0)
    looks_lost = is_shown & (np.arange(statuses) == statuses - 1)
    seen = np.arange(length * tasks).reshape(length, tasks, 1) * 2 + looks_lost
    shape = (length, tasks * statuses, actions)
    return World(
        next_state=(next_status + np.arange(tasks)[:, None, None, None] * statuses)
        .reshape(*shape, outcomes)
        .astype(jnp.int32),
        prob=jnp.repeat(prob, statuses, axis=1),
        reward=jnp.where(succeeds, options["noise"], 0.0).reshape(*shape, outcomes),
        done=jnp.broadcast_to(last[:, None, None, None], (*shape, outcomes)),
        tokens=jnp.ones(shape, jnp.int32),
        kind=jnp.full(shape, CALL, jnp.int8),
        policy_row=jnp.repeat(row, statuses, axis=1),
        seen=jnp.asarray(seen.reshape(length, -1), jnp.int32),
        look=looks_of_tasks(length, tasks, 2),
        boundary=jnp.zeros(shape[:2], bool),
        start=jnp.arange(tasks, dtype=jnp.int32) * statuses,
        logits=logits,
        features=features,
        policy_features=policy_features,
        num_seen=length * tasks * 2,
        num_looks=length * 2,
        name=name,
        options=tuple(sorted(options.items())),
    )


def _draw_forks(key: Array, tasks: int, length: int, forks: int) -> Array:
    """[T, C] bool: `forks` turns of every task, none of the last `TAIL`."""
    turns = length - TAIL
    # The lowest bits are replaced by the turn: no two draws of a task are equal.
    mask = np.uint32((1 << turns.bit_length()) - 1)
    draws = draw_bits(key, turns, tasks) & ~mask | np.arange(turns, dtype=np.uint32)[:, None]
    rank = jnp.sum(draws[:, None] < draws[None], axis=0)
    return jnp.concatenate([rank < forks, jnp.zeros((TAIL, tasks), bool)])
