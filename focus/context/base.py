"""What a context manager is: pure functions from one immutable context to the next.

A context is all that the policy can see. A manager decides what enters it and when it is
compacted; it knows nothing of budgets, branches or values. So a context, like an environment
state, can be continued from any number of times, and the boundary that a compaction creates is
a state like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class ChatEncoder(Protocol):
    """The part of `focus.chat.tokens.Chat` that managers need."""

    end_of_turn_id: int

    def encode_start(self, system: str, user: str) -> tuple[int, ...]:
        """First prompt of a span."""

    def encode_observation(self, text: str, *, closed: bool) -> tuple[int, ...]:
        """What stands between the policy's last output token and its next one."""

    def encode_user(self, text: str, *, closed: bool) -> tuple[int, ...]:
        """The same for a user's message."""


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What the policy sees, and what a manager needs to go on from here.

    Attributes:
      prompt_ids: what the policy reads next.
      system: system message, "" for none.
      question: what the agent was asked.
      span: compactions so far. Within a span every prompt extends the one before it.
    """

    prompt_ids: tuple[int, ...]
    system: str
    question: str
    span: int = 0


@runtime_checkable
class ContextManager(Protocol):
    """Everything the agent loop asks of a manager."""

    summary_tokens: int  # most tokens of one summary
    closing: bool  # whether the end of an episode is summarised too

    def start(self, system: str, question: str) -> Context:
        """The context before the first turn."""

    def observe(self, context: Context, output_ids: Sequence[int], observation: str) -> Context:
        """Appends one turn: what the policy wrote, exactly as sampled, and the tool's answer."""

    def needs_compaction(self, context: Context) -> bool:
        """Whether the policy must summarise before it may go on."""

    def summary_prompt(self, context: Context) -> tuple[int, ...]:
        """The context's prompt, extended by the request for a summary."""

    def compact(self, context: Context, summary: str) -> Context:
        """The first context of the next span."""

    def citations(self, context: Context, summary: str) -> tuple[int, ...] | None:
        """Turns that a summary of `context` cites, counted from 0 at the start of the episode.

        None from a manager that asks for none; () if the summary breaks the format, after which
        the rollout is over and has outcome 0.
        """

    def phrase(self, context: Context, notes: str, sources: Sequence[int]) -> str:
        """Puts notes into the format of a summary, for demonstrations.

        Args:
          context: what is summarised.
          notes: what its writer would keep.
          sources: turns from which the writer has what it knows.
        """


def append_turn(
    chat: ChatEncoder, context: Context, output_ids: Sequence[int], observation: str
) -> Context:
    """Appends output and observation, token in, token out.

    Whether the output closed its own message is read from its last token, not from the finish
    reason: a stop string ends a generation too, and leaves the message open.

    Args:
      chat: encodes the observation.
      context: read by the policy when it wrote the output.
      output_ids: the tokens that were sampled.
      observation: the tool's answer.

    Returns:
      A context whose prompt starts with the old prompt and the output.
    """
    output_ids = tuple(output_ids)
    closed = output_ids[-1:] == (chat.end_of_turn_id,)
    answer = chat.encode_observation(observation, closed=closed)
    return dataclasses.replace(context, prompt_ids=context.prompt_ids + output_ids + answer)
