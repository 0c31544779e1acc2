"""Tasks by name.

To add one: write a function of keyword options that returns an environment (see
`focus.tasks.base`) and one entry here, or in `TASKS` directly.
"""

from __future__ import annotations

from collections.abc import Callable

from focus.tasks.base import Environment
from focus.tasks.deep_search import make_deep_search

# name -> factory(**options); the options are the other keys of config.task
TASKS: dict[str, Callable[..., Environment]] = {"deep_search": make_deep_search}
