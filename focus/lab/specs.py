"""Worlds and arms as they are written in a config: `label: name option=value option=value`."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class WorldSpec:
    """A world by its name.

    Attributes:
      name: key of `WORLDS`.
      options: of its builder, in the order in which they were written.
      label: what a report calls it.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    label: str


def read_spec(text: str, kind: str, names: Collection[str]) -> tuple[str, str, dict[str, Any]]:
    """Parts of `label: name option=value ...`; without a label, the text is its own.

    Args:
      text: as written.
      kind: what it names, for messages.
      names: that exist.

    Returns:
      `(label, name, options)`; a value is a Python literal, or a word.

    Raises:
      ValueError: an unknown name, or an option that is not written as name=value.
    """
    label, colon, rest = text.partition(":")
    words = (rest if colon else label).split()
    if not words or (colon and not label.strip()):
        raise ValueError(f"{text!r} names no {kind}; write NAME option=value or LABEL: NAME ...")
    name, *written = words
    if name not in names:
        raise ValueError(f"{kind} {name!r} is unknown; choose one of {', '.join(sorted(names))}")
    options: dict[str, Any] = {}
    for option in written:
        key, equals, value = option.partition("=")
        if not (key and equals and value):
            raise ValueError(f"{kind} {text!r}: write {option!r} as name=value, without spaces")
        if key in options:
            raise ValueError(f"{kind} {text!r} gives {key} twice")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return (label.strip() if colon else " ".join(words)), name, options


def read_world(text: str, worlds: Mapping[str, Callable[..., Any]]) -> WorldSpec:
    """The world of `label: name option=value ...`.

    Args:
      text: as written.
      worlds: `focus.lab.worlds.WORLDS`.

    Raises:
      ValueError: an unknown world, an option that its builder does not have (`seed` is every run's
        own), or a value out of range.
    """
    label, name, options = read_spec(text, "world", worlds)
    takes = sorted(set(inspect.signature(worlds[name]).parameters) - {"seed"})
    unknown = sorted(set(options) - set(takes))
    if unknown:
        raise ValueError(f"world {name} has no option {', '.join(unknown)}; it has {takes}")
    jax.eval_shape(functools.partial(worlds[name], **options))  # builds nothing, refuses values
    return WorldSpec(name, tuple(options.items()), label)


def read_arm(text: str, arms: Mapping[str, Any]) -> Any:
    """The arm of `label: name field=value ...`, called by its label.

    Args:
      text: as written.
      arms: `focus.lab.arms.ARMS`; a field replaces that of the arm.

    Raises:
      ValueError: an unknown arm or field, or a value that the arm refuses.
    """
    label, name, options = read_spec(text, "arm", arms)
    fields = {f.name for f in dataclasses.fields(arms[name])} - {"name"}
    unknown = sorted(set(options) - fields)
    if unknown:
        raise ValueError(f"arm {name} has no field {', '.join(unknown)}; it has {sorted(fields)}")
    return dataclasses.replace(arms[name], **options, name=label)


def slug(label: str) -> str:
    """A label as a directory's name; labels that differ give names that differ."""
    words = re.sub(r"[^A-Za-z0-9.=+-]+", "_", label).strip("_.")[:60]
    return words if words == label else f"{words}-{zlib.crc32(label.encode()):08x}"
