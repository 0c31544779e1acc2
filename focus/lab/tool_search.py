"""A search for the links of a hidden chain, with tools that miss and pages that mislead."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from focus.lab.world import (
    ANSWER,
    CALL,
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

# Tokens of a query, of a check and of an answer.
QUERY_TOKENS, CHECK_TOKENS, ANSWER_TOKENS = 3, 2, 1
# What an action can be, in `_transitions`.
_VAIN, _APT, _TEMPTING, _CHECK, _ANSWER = range(5)


def tool_search(
    *,
    tasks: int = 24,
    hops: int = 4,
    length: int = 20,
    queries: int = 3,
    rows: int = 20,
    miss: float = 0.3,
    mislead: float = 0.1,
    detect: float = 0.7,
    guess: float = 0.05,
    noise: float = 0.95,
    visible: bool = False,
    p0: float = 0.4,
    seed: Array | int = 0,
) -> World:
    """Questions over `hops` links; one link is found after the other, and then it is answered.

    Actions are `queries` kinds of query, a check, and the answer. Every link of every task has a
    topic, drawn uniformly, and every topic has one apt query, one tempting one, and others in
    vain. A query that is not in vain finds nothing with probability `miss`; else the apt one
    finds the link, or, with probability `mislead`, a page with a wrong one, as the tempting one
    always does. A wrong link looks like a right one, and so does all that follows from it. A
    check of an episode that was misled finds that out with probability `detect`, and throws away
    the first wrong link and what came after it; else it shows nothing. The answer is a success
    with probability `noise` times `guess` for each link that is missing, and never if misled;
    with no answer within `length` turns the episode fails.

    The policy's row is the topic of the next link, or one that all tasks share once it has as
    many links as it needs; the critic sees task, turn and number of links. Whether some are wrong
    is hidden from both, unless the critic is privileged (`visible`). Success of the initial
    policy is about .06.

    Args:
      tasks: C.
      hops: links of a chain.
      length: T, the turn limit.
      queries: kinds of query, at least 2; A is this and 2.
      rows: topics; R is this and 1.
      miss: probability that a query finds nothing.
      mislead: probability that what the apt query finds is wrong.
      detect: probability that a check finds that out.
      guess: factor of the answer's success for each missing link.
      noise: probability of success of an answer with all links, and right ones.
      visible: the critic sees which link was the first wrong one.
      p0: first probability of the apt query, and of the answer once all links are there; see
        `initial_logits`.
      seed: of everything drawn; an int or a traced uint32.

    Raises:
      ValueError: an option out of range.
    """
    name = "tool_search"
    options = {
        "tasks": tasks,
        "hops": hops,
        "length": length,
        "queries": queries,
        "rows": rows,
        "miss": miss,
        "mislead": mislead,
        "detect": detect,
        "guess": guess,
        "noise": noise,
        "visible": visible,
        "p0": p0,
    }
    whole(name, "tasks", tasks, 1)
    whole(name, "hops", hops, 1)
    whole(name, "length", length, 1)
    whole(name, "queries", queries, 2)
    whole(name, "rows", rows, 1)
    for option in ("miss", "mislead", "detect", "guess", "noise"):
        share(name, option, options[option])
    share(name, "p0", p0, inside=True)
    flag(name, "visible", visible)

    # Parts of a task's state: links found, and the first wrong one among them (0: none).
    found, wrong = np.array([(h, m) for h in range(hops + 1) for m in range(h + 1)]).T
    parts, actions = len(found), queries + 2
    topic_key, apt_key, tempting_key, logit_key = jax.random.split(seed_key(name, seed), 4)
    topic = draw_whole(topic_key, rows, tasks, hops)
    row = jnp.concatenate([topic, jnp.full((tasks, 1), rows, jnp.int32)], axis=1)[:, found]
    apt = draw_whole(apt_key, queries, rows)
    tempting = (apt + 1 + draw_whole(tempting_key, queries - 1, rows)) % queries
    # [R, A]; with all links every query is in vain.
    action = np.arange(actions)
    what = jnp.where(action == apt[:, None], _APT, _VAIN)
    what = jnp.where(action == tempting[:, None], _TEMPTING, what)
    what = jnp.concatenate([what, jnp.full((1, actions), _VAIN)])
    what = jnp.where(action == queries, _CHECK, jnp.where(action == queries + 1, _ANSWER, what))

    next_part, prob, reward = _transitions(found, wrong, options)
    here = (what[row], np.arange(parts)[:, None])  # [C, parts, A] and [parts, 1]
    states = tasks * parts
    shape = (length, states, actions, 3)
    next_state = next_part[here] + (np.arange(tasks) * parts)[:, None, None, None]
    last = np.arange(length) == length - 1
    answers = np.broadcast_to((action == queries + 1)[:, None], shape)
    tokens = np.full(actions, QUERY_TOKENS)
    tokens[-2:] = CHECK_TOKENS, ANSWER_TOKENS
    looks = np.arange(parts) if visible else found
    num_looks = parts if visible else hops + 1
    seen = np.arange(length * tasks).reshape(length, tasks, 1) * num_looks + looks
    return World(
        next_state=jnp.broadcast_to(next_state.reshape(shape[1:]), shape),
        prob=jnp.broadcast_to(prob[here].reshape(shape[1:]), shape),
        reward=jnp.broadcast_to(reward[here].reshape(shape[1:]), shape),
        done=jnp.asarray(answers | last[:, None, None, None]),
        tokens=jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), shape[:3]),
        kind=jnp.asarray(np.where(answers[..., 0], ANSWER, CALL), jnp.int8),
        policy_row=jnp.broadcast_to(row.reshape(-1), shape[:2]),
        seen=jnp.asarray(seen.reshape(length, states), jnp.int32),
        look=looks_of_tasks(length, tasks, num_looks),
        boundary=jnp.zeros(shape[:2], bool),
        start=jnp.arange(tasks, dtype=jnp.int32) * parts,
        logits=initial_logits(logit_key, jnp.append(apt, queries + 1), actions, p0),
        features=None,
        policy_features=None,
        num_seen=length * tasks * num_looks,
        num_looks=length * num_looks,
        name=name,
        options=tuple(sorted(options.items())),
    )


def _transitions(found, wrong, options) -> tuple[Array, Array, Array]:
    """What the five kinds of action do: next part, probability and reward, [5, parts, K]."""
    hops, miss, mislead = options["hops"], options["miss"], options["mislead"]
    part = {here: number for number, here in enumerate(zip(found.tolist(), wrong.tolist()))}
    next_part = np.zeros((5, len(found), 3), np.int32)
    prob = np.zeros((5, len(found), 3), np.float32)
    reward = np.zeros((5, len(found), 3), np.float32)
    for (h, m), n in part.items():
        next_part[:, n] = n
        if h < hops:
            next_part[[_APT, _TEMPTING], n, :2] = part[h + 1, m], part[h + 1, m or h + 1]
        prob[[_VAIN, _ANSWER], n] = 0, 0, 1
        prob[_APT, n] = (1 - miss) * (1 - mislead), (1 - miss) * mislead, miss
        prob[_TEMPTING, n] = 0, 1 - miss, miss
        next_part[_CHECK, n, 0] = part[max(m - 1, 0), 0]
        prob[_CHECK, n] = (options["detect"], 0, 1 - options["detect"]) if m else (0, 0, 1)
        if m == 0:
            reward[_ANSWER, n] = options["noise"] * options["guess"] ** (hops - h)
    return jnp.asarray(next_part), jnp.asarray(prob), jnp.asarray(reward)
