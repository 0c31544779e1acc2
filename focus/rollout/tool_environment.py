"""Actions as tool calls, in the layout that a model was trained on."""

from __future__ import annotations

from typing import Any

from focus.chat import tool_calls
from focus.tasks.base import StepResult, ToolEnvironment


class ToolCalls:
    """An environment that is acted on by tool calls; all else is the environment's own.

    One call a turn: text around it is passed over, a call inside of the thinking is none (see
    `focus.chat.tool_calls.parse_spoken`), and what cannot be read is answered with the reason.

    Args:
      env: whose tools are called.
      format: layout of a call, one of `focus.chat.tool_calls.FORMATS`.

    Raises:
      ValueError: `env` has no tools, or there is no such format.
    """

    def __init__(self, env: ToolEnvironment, format: str):
        if format not in tool_calls.FORMATS:
            raise ValueError(
                f"unknown tool-call format {format!r}; formats are {tool_calls.FORMATS}"
            )
        if not isinstance(env, ToolEnvironment):
            raise ValueError(
                f"environment {env.name!r} has no tools to be called in the {format!r} format; set "
                "chat.tool_calls=''"
            )
        self._env = env
        self._format = format

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, state: Any, action: str) -> StepResult:
        """Applies the one call in `action`. Pure; never raises on bad actions."""
        calls = tool_calls.parse_spoken(action, self._format)
        if len(calls) != 1:
            reason = f"error: write one {tool_calls.OPEN} a turn, not {len(calls)}"
            return self._env.reject(state, reason)
        (call,) = calls
        if isinstance(call, tool_calls.Malformed):
            return self._env.reject(state, f"error: {call.reason}")
        return self._env.call(state, call.name, call.arguments)
