"""Random rollouts for tests: turns, compactions, branches, branches of branches."""

import random

from focus.types import Generation, Segment, State, Trajectory

VOCAB = 16


def make_trajectory(
    rng,
    id_,
    start=None,
    *,
    turns=3,
    compact_after=None,
    end="terminal",
    parent=None,
    parent_state=None,
    outcome=1.0,
    prompt=None,
    task=0,
):
    """A random rollout from a start state, with a compaction after a turn if asked for."""

    def draw(low, high):
        return tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(low, high)))

    state = start or State(None, None, prompt or draw(2, 5), 0)
    states, segments = [state], []
    for turn in range(turns):
        act = draw(1, 4)
        logp = tuple(-rng.random() for _ in act)
        generations = [Generation("act", state.prompt_ids, act, logp, "stop", span=state.span)]
        ids, span = state.prompt_ids + act + draw(1, 3), state.span
        last = turn == turns - 1
        if turn == compact_after and not last:
            ask = ids + draw(1, 2)
            summary = draw(1, 3)
            generations.append(
                Generation("summary", ask, summary, (-0.5,) * len(summary), "stop", span=span)
            )
            ids, span = draw(2, 3) + summary, span + 1
        segments.append(Segment(tuple(generations), "", ""))
        ids = () if last and end == "terminal" else ids
        state = State(None, None, ids, turn + 1, span)
        states.append(state)
    return Trajectory(
        id_,
        "t",
        task,
        tuple(states),
        tuple(segments),
        outcome,
        True,
        end,
        parent=parent,
        parent_state=parent_state,
    )


def make_forest(seed, bases=3, branches=4):
    """Base rollouts (some of one task), branches from any state, branches of branches."""
    rng = random.Random(seed)
    shared = (3, 1, 4, 1)
    out = []
    for i in range(bases):
        out.append(
            make_trajectory(
                rng,
                f"b{i}",
                turns=rng.randint(1, 4),
                compact_after=rng.choice([None, 0, 1]),
                end=rng.choice(["terminal", "turn_limit"]),
                prompt=shared if i < 2 else None,
            )
        )
    for i in range(branches):
        parent = rng.choice(out)
        j = rng.choice([j for j, s in enumerate(parent.states) if s.prompt_ids])
        out.append(
            make_trajectory(
                rng,
                f"{parent.id}/{i}",
                parent.states[j],
                turns=rng.randint(0, 3),
                compact_after=rng.choice([None, 0]),
                end=rng.choice(["terminal", "turn_limit"]),
                parent=parent.id,
                parent_state=j,
            )
        )
    return out
