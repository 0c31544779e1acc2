"""What a task environment is: a pure function over immutable states.

`step(state, action)` returns a new state and never changes the old one, so continuing twice
from one state is free and cannot leak. The engine's text goes in, the tool's answer comes out;
how either becomes tokens is not the environment's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One question.

    Attributes:
      id: stable and unique over splits, e.g. "train/00042".
      prompt: what the agent is asked, as text (the user's message).
      data: whatever the environment needs (gold answer, chain ...); never shown to the policy.
    """

    id: str
    prompt: str
    data: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What one action did.

    Attributes:
      state: the new environment state.
      observation: the tool's answer as text; "" after the end.
      reward: reward of this step without the outcome.
      done: whether the environment ended the episode.
      outcome: final reward in [0, 1] when `done`, else None.
      info: facts about the turn: "tool", "argument", "documents" (ids seen), "opened", "error".
    """

    state: Any
    observation: str
    reward: float = 0.0
    done: bool = False
    outcome: float | None = None
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Demonstration:
    """One episode to imitate.

    Attributes:
      task: what was asked.
      actions: what was done, turn by turn, as text.
      observations: the environment's answers; the last one, after the end, may be "".
      outcome: of the episode.
      notes: `notes[i]` is what the agent would have written down before `actions[i]`, had it been
        asked to compact its context. () from a task whose contexts are never compacted.
      sources: `sources[i]` are the turns from which it knows that.
    """

    task: Task
    actions: tuple[str, ...]
    observations: tuple[str, ...]
    outcome: float
    notes: tuple[str, ...] = ()
    sources: tuple[tuple[int, ...], ...] = ()


@runtime_checkable
class Environment(Protocol):
    """Tasks and the pure transition over their states.

    `reset` and `step` are called on the event loop, where nothing else goes on meanwhile: right for
    functions of this process that take a millisecond. An environment that waits (for a search
    engine, a sandbox, a server) sets `blocking = True` and is called in threads, many at once, or
    writes them as `async def`. Either may fail: see `focus.rollout.tools`.
    """

    name: str
    max_turns: int
    branchable: bool  # whether a state can be continued from more than once

    def tasks(self, split: str) -> tuple[Task, ...]:
        """The tasks of "train" or "heldout", in a fixed order."""

    def system_prompt(self) -> str:
        """The system message, "" for none."""

    def reset(self, task: Task) -> Any:
        """The initial state of a task."""

    def step(self, state: Any, action: str) -> StepResult:
        """Applies one action (the policy's text). Pure; never raises on bad actions."""


@runtime_checkable
class DemonstratedEnvironment(Environment, Protocol):
    """An environment that shows how it is played: a small policy can begin by imitating that."""

    def demonstrations(self, num: int, seed: int) -> Iterable[Demonstration]:
        """Episodes on train tasks, good ones and others: what is imitated is also how to go on
        after an error. Equal arguments give equal episodes."""


@runtime_checkable
class ToolEnvironment(Environment, Protocol):
    """An environment whose actions may also come as tool calls that somebody else has read."""

    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """JSON schemas of the tools, as chat templates take them."""

    def call(self, state: Any, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Applies one call. Pure; never raises on bad calls."""

    def reject(self, state: Any, reason: str) -> StepResult:
        """Takes a turn for an action that holds no call; `reason` is the observation."""
