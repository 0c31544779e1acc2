r"""Tool calls as text, in the two layouts that open models are trained on.

`hermes` (Hermes, Qwen2.5, Qwen3): one JSON object a call.

    <tool_call>
    {"name": "open", "arguments": {"page": 3}}
    </tool_call>

`qwen` (Qwen3-Coder, Qwen3.5): tags, with values as plain text, so that code needs no escapes.

    <tool_call>
    <function=open>
    <parameter=page>
    3
    </parameter>
    </function>
    </tool_call>

A policy writes bad calls, above all early in training. `parse` never raises on them: each comes
back as `Malformed` with a reason that can be shown to the policy or counted.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_THINK, _END_OF_THINKING = "<think>", "</think>"
_MARK = re.compile("|".join(map(re.escape, (OPEN, _THINK, _END_OF_THINKING))))
_SPACE = re.compile(r"\s*")
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
_FUNCTION_END = re.compile(r"\s*</function>")
_PARAMETER_END = "</parameter>"
_QWEN_TAGS = (OPEN, CLOSE, "</function>", _PARAMETER_END)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call.

    Attributes:
      name: of the tool.
      arguments: JSON values by parameter; parsed from `qwen`, all of them are strings.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Malformed:
    """What was meant as a call and cannot be read as one.

    Attributes:
      text: from the opening tag to the closing tag, or to the next call or the end without one.
      reason: what is wrong, in words that tell how to do it right.
    """

    text: str
    reason: str


def parse(text: str, format: str) -> list[ToolCall | Malformed]:
    """Reads the calls in an output, in order. Text around them is passed over.

    A call must be closed: one that was cut by its length never runs with half its arguments.

    Args:
      text: what the policy wrote; see `parse_spoken` for a policy that thinks.
      format: "hermes" or "qwen".

    Raises:
      ValueError: unknown format. Never because of `text`.
    """
    layout = _layout(format)
    found: list[ToolCall | Malformed] = []
    start = text.find(OPEN)
    while start >= 0:
        call, end = _read_call(layout, text, start)
        found.append(call)
        start = text.find(OPEN, end)
    return found


def parse_spoken(text: str, format: str) -> list[ToolCall | Malformed]:
    """As `parse`, without the calls that the policy only thinks of.

    A call inside `<think>` ... `</think>` is none, and so is everything before a `</think>` that
    nothing has opened: a chat template may open the thinking in the prompt. Thinking that never
    ends goes on to the end of the text. Inside of a call that can be read both tags are text like
    any other: a policy that searches for "</think>" has not stopped to think.

    Args:
      text: what the policy wrote.
      format: "hermes" or "qwen".

    Raises:
      ValueError: unknown format. Never because of `text`.
    """
    layout = _layout(format)
    found: list[ToolCall | Malformed] = []
    at = 0
    while mark := _MARK.search(text, at):
        at = mark.end()
        if mark[0] == OPEN:
            call, end = _read_call(layout, text, mark.start())
            found.append(call)
            at = end if isinstance(call, ToolCall) else at
        elif mark[0] == _THINK:
            end = text.find(_END_OF_THINKING, at)
            at = len(text) if end < 0 else end + len(_END_OF_THINKING)
        else:
            found.clear()
    return found


def render(calls: Sequence[ToolCall], format: str) -> str:
    """Writes calls as a model of this format would; `parse` reads them back.

    In `qwen` values that are not strings are written as JSON, and read back as that text.

    Args:
      calls: in order.
      format: "hermes" or "qwen".

    Raises:
      ValueError: unknown format, a value that JSON cannot hold, or a name or value that holds
        a tag of the `qwen` format, which has no escapes.
    """
    write = _layout(format).write
    return "\n".join(f"{OPEN}\n{write(call)}\n{CLOSE}" for call in calls)


def render_responses(contents: Sequence[str], format: str) -> str:
    """Writes tools' answers into one message; both formats lay them out alike.

    For chat templates without a layout for the role "tool". The templates of Qwen add these
    tags themselves.

    Args:
      contents: what each tool printed, in the order of the calls.
      format: "hermes" or "qwen".

    Raises:
      ValueError: unknown format.
    """
    response = _layout(format).response
    return "\n".join(response.format(content) for content in contents)


class _BadCallError(Exception):
    """Why a call cannot be read."""


def _read_call(layout: _Layout, text: str, start: int) -> tuple[ToolCall | Malformed, int]:
    """The call whose opening tag stands at `start`, and where it ends."""
    body = start + len(OPEN)
    try:
        call, end = layout.read(text, body)
        return call, _closed(text, end)
    except _BadCallError as error:
        end = _end_of_bad_call(text, body)
        return Malformed(text[start:end], str(error)), end


def _closed(text: str, at: int) -> int:
    """Where a call ends whose content ends at `at`."""
    at = _skip_space(text, at)
    if text.startswith(CLOSE, at):
        return at + len(CLOSE)
    if at == len(text):
        raise _BadCallError(f"the call is not closed; end it with {CLOSE}")
    raise _BadCallError(f"{CLOSE} must follow the call, found {text[at : at + 20]!r}")


def _end_of_bad_call(text: str, body: int) -> int:
    close, following = text.find(CLOSE, body), text.find(OPEN, body)
    ends = [len(text)]
    if close >= 0:
        ends.append(close + len(CLOSE))
    if following >= 0:
        ends.append(following)
    return min(ends)


def _skip_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()


# Hermes.


def _read_hermes(text: str, at: int) -> tuple[ToolCall, int]:
    at = _skip_space(text, at)
    if at == len(text):
        raise _BadCallError(f"the call is empty and not closed; end it with {CLOSE}")
    try:
        value, end = _DECODER.raw_decode(text, at)
        # Finds what Python's reader lets through and no one can write: 1e999, lone surrogates.
        _dump(value).encode()
    except RecursionError:
        raise _BadCallError("the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _BadCallError(f"not JSON: {error.msg} at character {error.pos - at}") from None
    except UnicodeEncodeError:
        raise _BadCallError("a string holds half of a surrogate pair") from None
    except ValueError as error:  # e.g. a number with too many digits
        raise _BadCallError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _BadCallError(f"a call is a JSON object, got {_json_type(value)}")
    if set(value) != {"name", "arguments"}:
        keys = ", ".join(map(repr, value)) or "none"
        raise _BadCallError(f'a call has the keys "name" and "arguments", got {keys}')
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str) or not name:
        raise _BadCallError(f"name must be a string that is not empty, got {_dump(name)}")
    if not isinstance(arguments, dict):
        raise _BadCallError(f"arguments must be a JSON object, got {_json_type(arguments)}")
    return ToolCall(name, arguments), end


def _write_hermes(call: ToolCall) -> str:
    # Readers that look for the closing tag first must not find one inside a string.
    value = _dump({"name": call.name, "arguments": call.arguments})
    return value.replace(CLOSE, CLOSE.replace("/", "\\/"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_mapping)


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError(f"{value!r} is no JSON value; give str, number, bool, None, list or dict")


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


# Qwen.


def _read_qwen(text: str, at: int) -> tuple[ToolCall, int]:
    function = _FUNCTION.match(text, at)
    if function is None:
        raise _BadCallError(f"<function=name> must follow {OPEN}")
    at = function.end()
    arguments: dict[str, str] = {}
    while parameter := _PARAMETER.match(text, at):
        name = parameter[1]
        end = text.find(_PARAMETER_END, parameter.end())
        if end < 0:
            raise _BadCallError(f"parameter {name!r} is not closed; end it with {_PARAMETER_END}")
        if name in arguments:
            raise _BadCallError(f"parameter {name!r} stands twice")
        arguments[name] = text[parameter.end() : end].removesuffix("\n")
        at = end + len(_PARAMETER_END)
    close = _FUNCTION_END.match(text, at)
    if close is None:
        raise _BadCallError("<parameter=name> or </function> must follow")
    return ToolCall(function[1], arguments), close.end()


def _write_qwen(call: ToolCall) -> str:
    lines = [f"<function={_qwen_name(call.name)}>"]
    for name, value in call.arguments.items():
        text = value if isinstance(value, str) else _dump(value)
        tags = [tag for tag in _QWEN_TAGS if tag in text]
        if tags:
            raise ValueError(
                f"argument {name!r} of {call.name!r} holds {tags}, which the qwen format cannot "
                "escape; leave it out or use the hermes format"
            )
        lines.append(f"<parameter={_qwen_name(name)}>\n{text}\n{_PARAMETER_END}")
    return "\n".join((*lines, "</function>"))


def _qwen_name(name: str) -> str:
    if not name or set(name) & set("<>\n"):
        raise ValueError(
            f"the qwen format cannot write the name {name!r}; use letters, digits, _ and -"
        )
    return name


@dataclasses.dataclass(frozen=True)
class _Layout:
    read: Callable[[str, int], tuple[ToolCall, int]]  # text, start -> call, end
    write: Callable[[ToolCall], str]
    response: str


_RESPONSE = "<tool_response>\n{}\n</tool_response>"
_LAYOUTS = {
    "hermes": _Layout(_read_hermes, _write_hermes, _RESPONSE),
    "qwen": _Layout(_read_qwen, _write_qwen, _RESPONSE),
}
FORMATS = tuple(_LAYOUTS)


def _layout(format: str) -> _Layout:
    if format not in _LAYOUTS:
        raise ValueError(f"unknown tool-call format {format!r}; formats are {FORMATS}")
    return _LAYOUTS[format]
