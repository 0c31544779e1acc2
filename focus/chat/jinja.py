"""Runs the chat templates of published models: jinja2 in a sandbox, with their helpers."""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: marks what to train on, for other trainers. Its body is kept."""

    tags = frozenset(("generation",))

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, now: datetime.datetime) -> jinja2.Template:
    """Compiles a chat template, with all that templates of published models expect.

    Args:
      source: jinja2; it can neither reach Python nor change what it is given.
      now: what `strftime_now` tells.

    Raises:
      ValueError: the source cannot be read.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": now.strftime}
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"cannot read the chat template: {error}") from error


def _to_json(
    value: Any,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
    ensure_ascii: bool = False,
) -> str:
    # Jinja's own escapes HTML and sorts keys, and no model was trained on that.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
