"""Worlds of the regime map: how long, how rare a success at the start, how soon a loss is seen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from focus.lab.specs import WorldSpec

NOISE = 0.95
TASKS = 200


def regime_worlds(
    horizons: Sequence[int], start_success: Sequence[float], delays: Sequence[int]
) -> list[tuple[WorldSpec, dict[str, Any]]]:
    """Fork chains for every combination, and where each stands on the map.

    A fifth of a chain's turns, at least four, are forks. With F of them the first policy's
    probability of the right action is `(start / noise)^(1 / F)`; what it then succeeds with is
    measured.

    Args:
      horizons: turns of an episode.
      start_success: success of the first policy, below the outcome's noise of .95.
      delays: turns after which a loss is seen, 1: at the next state.

    Raises:
      ValueError: a success that no policy has.
    """
    found = []
    for delay, horizon, start in itertools.product(delays, horizons, start_success):
        if not 0 < start < NOISE:
            raise ValueError(
                f"regime.start_success must lie between 0 and {NOISE}, the success of a policy "
                f"that is always right; got {start}"
            )
        forks = max(4, horizon // 5)
        options = {
            "length": horizon,
            "forks": forks,
            "delay": delay,
            "tasks": TASKS,
            "noise": NOISE,
            "p0": round((start / NOISE) ** (1 / forks), 4),
        }
        label = f"T={horizon} start={start:g} delay={delay}"
        point = {"horizon": horizon, "start": start, "delay": delay}
        found.append((WorldSpec("fork_chain", tuple(options.items()), label), point))
    return found
