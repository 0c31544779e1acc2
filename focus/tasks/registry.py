"""Tasks by name.

To add one: write a function of keyword options that returns an environment (see
`focus.tasks.base`) and one entry here, or in `TASKS` directly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from focus.tasks.base import Environment
from focus.tasks.deep_search import make_deep_search

# name -> factory(**options); the options are the other keys of config.task
TASKS: dict[str, Callable[..., Environment]] = {"deep_search": make_deep_search}


def task_options(task: Mapping[str, Any]) -> dict[str, Any]:
    """What the factory of a task is given.

    Args:
      task: `config.task`: the name, and options.

    Returns:
      The options.

    Raises:
      ValueError: the task takes no such option, or needs another one.
    """
    name, options = task["name"], {k: v for k, v in task.items() if k != "name"}
    signature = inspect.signature(TASKS[name])
    takes = signature.parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
    if not open_ended and (unknown := sorted(options.keys() - takes.keys())):
        raise ValueError(
            f"task {name!r} takes no option {', '.join(unknown)}: config.task holds the task's "
            f"name and its own options alone, which are {', '.join(takes) or 'none'}; replace it "
            "in a config file of yours"
        )
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ValueError(f"task {name!r}: {error} in config.task") from error
    return options
