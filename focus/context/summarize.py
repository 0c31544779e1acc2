"""The policy compacts its own context: it writes a summary and goes on from that.

The summary is a generation like any other: sampled, paid from the budget and trained. Its
tokens belong to the segment that it closes. What it leaves is the first state of a new span:

    system | question + summary | ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from focus.context.base import ChatEncoder, Context, append_turn

INSTRUCTION = "Your context is full. Write down all that you need to go on."
HEADING = "Notes so far:"


class Summarize:
    """Compacts as soon as a prompt is longer than `limit`.

    Args:
      chat: encodes messages.
      limit: longest prompt, in tokens, that is not compacted. The prompt that passes it must
        still fit into the engine's context together with the instruction and the summary.
      summary_tokens: most tokens of one summary.
      instruction: the request for a summary, as a user's message.
      heading: stands between the question and the summary.

    Raises:
      ValueError: a limit is not positive.
    """

    closing = False

    def __init__(
        self,
        chat: ChatEncoder,
        *,
        limit: int,
        summary_tokens: int = 256,
        instruction: str = INSTRUCTION,
        heading: str = HEADING,
    ):
        for name, value in (("limit", limit), ("summary_tokens", summary_tokens)):
            if value < 1:
                raise ValueError(f"context.{name} must be >= 1 token, got {value}")
        self.limit = limit
        self.summary_tokens = summary_tokens
        self._chat = chat
        self._instruction = instruction
        self._heading = heading

    def start(self, system: str, question: str) -> Context:
        """System message and question.

        Raises:
          ValueError: they alone pass the limit, so that every turn would be a compaction.
        """
        prompt_ids = self._chat.encode_start(system, question)
        if len(prompt_ids) > self.limit:
            raise ValueError(
                f"the first prompt has {len(prompt_ids)} tokens, context.limit is {self.limit}; "
                "raise context.limit or leave the task out"
            )
        return Context(prompt_ids, system, question)

    def observe(self, context: Context, output_ids: Sequence[int], observation: str) -> Context:
        """See `append_turn`."""
        return append_turn(self._chat, context, output_ids, observation)

    def needs_compaction(self, context: Context) -> bool:
        """Whether the prompt is longer than the limit."""
        return len(context.prompt_ids) > self.limit

    def summary_prompt(self, context: Context) -> tuple[int, ...]:
        """The prompt, whose generation prompt is left empty, and the instruction.

        The open assistant message stays in place, empty and closed, because a prompt may only
        grow within a span: what was read once is never taken back.
        """
        return context.prompt_ids + self._chat.encode_user(self._instruction, closed=False)

    def compact(self, context: Context, summary: str) -> Context:
        """System message, question and summary, one span on.

        Args:
          context: what was summarised.
          summary: decoded. Its ids here are context; those that are trained are the sampled
            ones, in the generation that wrote it.
        """
        user = f"{context.question}\n{self._heading} {summary.strip()}"
        return dataclasses.replace(
            context,
            prompt_ids=self._chat.encode_start(context.system, user),
            span=context.span + 1,
        )

    def citations(self, context: Context, summary: str) -> None:
        """None are asked for."""
        del context, summary

    def phrase(self, context: Context, notes: str, sources: Sequence[int]) -> str:
        """The notes."""
        del context, sources
        return notes
