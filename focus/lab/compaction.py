"""Episodes in several contexts: what a summary keeps of one is all that the next one has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from focus.lab.world import (
    CALL,
    SUMMARY,
    World,
    draw_whole,
    flag,
    initial_logits,
    looks_of_tasks,
    seed_key,
    share,
    whole,
)
from focus.types import Array

# Tokens of a turn of work and of a summary.
WORK_TOKENS, SUMMARY_TOKENS = 1, 4


def compaction(
    *,
    tasks: int = 24,
    spans: int = 4,
    span_length: int = 4,
    actions: int = 4,
    rows: int = 20,
    find: float = 0.7,
    guess: float = 0.1,
    noise: float = 0.95,
    visible: bool = True,
    p0: float = 0.45,
    seed: Array | int = 0,
) -> World:
    """`spans` stretches of work with a summary between each and the next.

    In each span there is one fact to be found: in every turn of work the right action finds it
    with probability `find`. The summary that closes a span (a turn of its own, `SUMMARY`) keeps
    the fact if it was found and the action is the right one for this task and span; else it is
    dropped for good. The states behind a summary are the boundaries. The episode ends after the
    last span's work, a success with probability `noise` times `guess` for each fact that is not
    there. So the work decides little, as a fact that was not found can still be, and a summary
    decides much: branches from the state behind it show what it was worth.

    The policy's rows are those of work and of summaries, each drawn uniformly for every task and
    span from `rows` of their own. The critic sees the task, the turn, whether this span's fact
    was found and, if `visible`, how many were dropped. Success of the initial policy is about
    .05.

    Args:
      tasks: C.
      spans: contexts of an episode, at least 2.
      span_length: turns of work in each; T is `spans * (span_length + 1) - 1`.
      actions: A, at least 2.
      rows: rows of work, and of summaries; R is twice this.
      find: probability that the right action finds the fact.
      guess: factor of success for each fact that is not there at the end.
      noise: probability of success when all are.
      visible: the critic sees what summaries dropped.
      p0: first probability of a row's right action; see `initial_logits`.
      seed: of everything drawn; an int or a traced uint32.

    Raises:
      ValueError: an option out of range.
    """
    name = "compaction"
    options = {
        "tasks": tasks,
        "spans": spans,
        "span_length": span_length,
        "actions": actions,
        "rows": rows,
        "find": find,
        "guess": guess,
        "noise": noise,
        "visible": visible,
        "p0": p0,
    }
    whole(name, "tasks", tasks, 1)
    whole(name, "spans", spans, 2)
    whole(name, "span_length", span_length, 1)
    whole(name, "actions", actions, 2)
    whole(name, "rows", rows, 1)
    for option in ("find", "guess", "noise"):
        share(name, option, options[option])
    share(name, "p0", p0, inside=True)
    flag(name, "visible", visible)

    length = spans * (span_length + 1) - 1
    turn = np.arange(length)
    span, place = np.divmod(turn, span_length + 1)
    closes, opens = place == span_length, (place == 0) & (span > 0)
    row_key, right_key, logit_key = jax.random.split(seed_key(name, seed), 3)
    row_of = draw_whole(row_key, rows, 2, tasks, spans) + np.array([0, rows])[:, None, None]
    row = row_of[closes.astype(int), :, span]  # [T, C]
    right = draw_whole(right_key, actions, 2 * rows)
    is_right = jnp.arange(actions) == right[row][..., None]  # [T, C, A]

    # Parts of a task's state: facts dropped, and whether this span's is found.
    dropped, has = np.divmod(np.arange(2 * spans), 2)
    parts = len(has)
    kept = is_right[:, :, None] & (has[:, None] == 1)  # [T, C, parts, A]
    # Behind the last summary no more than all earlier facts are dropped.
    after_summary = 2 * jnp.minimum(dropped[:, None] + ~kept, spans - 1)
    found = np.stack([2 * dropped + 1, 2 * dropped + has], axis=-1)  # [parts, K]
    is_summary = closes[:, None, None, None, None]
    next_part = jnp.where(is_summary, after_summary[..., None], found[:, None])
    finds = jnp.where(is_right & ~closes[:, None, None], find, 0.0)[:, :, None]
    prob = jnp.stack([finds, 1 - finds], axis=-1)
    missing = next_part // 2 + 1 - next_part % 2
    last = turn == length - 1
    ends = last[:, None, None, None, None]
    reward = jnp.where(ends, noise * jnp.float32(guess) ** missing, 0.0)

    states = tasks * parts
    shape = (length, states, actions, 2)
    full = (length, tasks, parts, actions, 2)
    next_state = next_part + (np.arange(tasks) * parts)[:, None, None, None]
    looks = np.arange(parts) if visible else has
    num_looks = parts if visible else 2
    seen = np.arange(length * tasks).reshape(length, tasks, 1) * num_looks + looks
    per_turn = (length, states, actions)
    return World(
        next_state=jnp.broadcast_to(next_state, full).reshape(shape).astype(jnp.int32),
        prob=jnp.broadcast_to(prob, full).reshape(shape),
        reward=jnp.broadcast_to(reward, full).reshape(shape),
        done=jnp.broadcast_to(last[:, None, None, None], shape),
        tokens=jnp.broadcast_to(
            jnp.where(closes, SUMMARY_TOKENS, WORK_TOKENS)[:, None, None], per_turn
        ),
        kind=jnp.broadcast_to(
            jnp.where(closes, SUMMARY, CALL).astype(jnp.int8)[:, None, None], per_turn
        ),
        policy_row=jnp.repeat(row, parts, axis=1),
        seen=jnp.asarray(seen.reshape(length, states), jnp.int32),
        look=looks_of_tasks(length, tasks, num_looks),
        boundary=jnp.broadcast_to(opens[:, None], shape[:2]),
        start=jnp.arange(tasks, dtype=jnp.int32) * parts,
        logits=initial_logits(logit_key, right, actions, p0),
        features=None,
        policy_features=None,
        num_seen=length * tasks * num_looks,
        num_looks=length * num_looks,
        name=name,
        options=tuple(sorted(options.items())),
    )
