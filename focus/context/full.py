"""Keeps everything. The engine's context limit is what ends an episode that grows too long."""

from __future__ import annotations

from collections.abc import Sequence

from focus.context.base import ChatEncoder, Context, append_turn


class Full:
    """The manager that never compacts.

    Args:
      chat: encodes messages.
    """

    summary_tokens = 0
    closing = False

    def __init__(self, chat: ChatEncoder):
        self._chat = chat

    def start(self, system: str, question: str) -> Context:
        """System message and question."""
        return Context(self._chat.encode_start(system, question), system, question)

    def observe(self, context: Context, output_ids: Sequence[int], observation: str) -> Context:
        """See `append_turn`."""
        return append_turn(self._chat, context, output_ids, observation)

    def needs_compaction(self, context: Context) -> bool:
        """Never."""
        del context
        return False

    def summary_prompt(self, context: Context) -> tuple[int, ...]:
        """There is none; `needs_compaction` is never true.

        Raises:
          RuntimeError: always.
        """
        raise RuntimeError("the full context is never compacted; use context 'summarize'")

    def compact(self, context: Context, summary: str) -> Context:
        """There is none; `needs_compaction` is never true.

        Raises:
          RuntimeError: always.
        """
        raise RuntimeError("the full context is never compacted; use context 'summarize'")

    def citations(self, context: Context, summary: str) -> None:
        """None are asked for."""
        del context, summary

    def phrase(self, context: Context, notes: str, sources: Sequence[int]) -> str:
        """The notes."""
        del context, sources
        return notes
