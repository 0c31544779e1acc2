"""Worlds by name.

To add one: write a builder that takes `seed` and returns a `World`, run `check` on it, and add
it to `WORLDS`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from focus.lab.chains import fork_chain, noisy_forks
from focus.lab.compaction import compaction
from focus.lab.grid import grid_trap
from focus.lab.tool_search import tool_search
from focus.lab.world import ANSWER, CALL, SUMMARY, World, check, reset, step

__all__ = [
    "ANSWER",
    "CALL",
    "SUMMARY",
    "WORLDS",
    "World",
    "check",
    "compaction",
    "fork_chain",
    "grid_trap",
    "make_world",
    "noisy_forks",
    "reset",
    "step",
    "tool_search",
    "world_options",
]

WORLDS: dict[str, Callable[..., World]] = {
    "fork_chain": fork_chain,
    "noisy_forks": noisy_forks,
    "grid_trap": grid_trap,
    "tool_search": tool_search,
    "compaction": compaction,
}


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"did you mean {close[0]!r}? There are {', '.join(known)}"


def world_options(name: str) -> dict[str, Any]:
    """What the world called `name` is built with when nothing else is said, but for its seed.

    Raises:
      ValueError: no such world; the message names the nearest one.
    """
    if name not in WORLDS:
        raise ValueError(f"there is no world {name!r}: {_nearest(name, sorted(WORLDS))}")
    parameters = inspect.signature(WORLDS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.name != "seed"}


def make_world(name: str, **options: Any) -> World:
    """Builds the world called `name`.

    Args:
      name: key of `WORLDS`.
      **options: of its builder, `seed` among them.

    Raises:
      ValueError: no such world or option (the message names the nearest), or one out of range.
    """
    known = [*world_options(name), "seed"]
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}: {_nearest(option, known)}")
    return WORLDS[name](**options)
