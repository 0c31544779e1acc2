"""Summaries that cite turns, so that a policy says itself which of them mattered (Self-Credit).

Every tool answer carries the number of its turn, and a summary must end with a line that cites
turns of the span that it closes:

    tool       [3] Peru: capital Lima. ...
    summary    Lima, mayor; open(Lima)
               turns: 2, 3

The line is read and taken away: the next span sees the notes alone. A summary without such a
line, or with turns that are not of the span, breaks the format, and its rollout has outcome 0.
When the episode is over a last summary is asked for, whose only use is its citation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from focus.context.base import ChatEncoder, Context, append_turn
from focus.context.summarize import HEADING, Summarize

EXAMPLE = "turns: 1, 2"
INSTRUCTION = (
    "Write down all that you need to go on. In a last line, cite the turns that mattered most, "
    f"as in {EXAMPLE}"
)
_CITATION = re.compile(r"turns: *([0-9]{1,4}(?: *, *[0-9]{1,4})*)")


@dataclasses.dataclass(frozen=True, slots=True)
class CitedContext(Context):
    """A context that counts turns.

    Attributes:
      turn: turns so far.
      first_turn: the one that the span began with; the first of an episode is 0, and shown as 1.
    """

    turn: int = 0
    first_turn: int = 0


class CiteSummary(Summarize):
    """`Summarize`, whose summaries cite turns.

    Args:
      chat: encodes messages.
      limit: see `Summarize`.
      citations: fewest and most turns of a citation. A span with fewer turns than that may cite
        all that it has.
      closing: whether a summary is asked for when the episode is over.
      summary_tokens, instruction, heading: see `Summarize`.

    Raises:
      ValueError: a limit is not positive, or `citations` is no range from 1 on.
    """

    def __init__(
        self,
        chat: ChatEncoder,
        *,
        limit: int,
        citations: tuple[int, int] = (2, 5),
        closing: bool = True,
        summary_tokens: int = 256,
        instruction: str = INSTRUCTION,
        heading: str = HEADING,
    ):
        super().__init__(
            chat,
            limit=limit,
            summary_tokens=summary_tokens,
            instruction=instruction,
            heading=heading,
        )
        if len(citations) != 2 or not 1 <= citations[0] <= citations[1]:
            raise ValueError(
                f"context.citations must be the fewest and most turns of a citation, from 1 on, "
                f"got {tuple(citations)}"
            )
        self.closing = closing
        self._fewest, self._most = citations

    def start(self, system: str, question: str) -> CitedContext:
        """See `Summarize.start`."""
        return CitedContext(super().start(system, question).prompt_ids, system, question)

    def observe(
        self, context: CitedContext, output_ids: Sequence[int], observation: str
    ) -> CitedContext:
        """See `append_turn`; the number of the turn stands before the tool's answer."""
        turn = context.turn + 1
        context = append_turn(self._chat, context, output_ids, f"[{turn}] {observation}")
        return dataclasses.replace(context, turn=turn)

    def compact(self, context: CitedContext, summary: str) -> CitedContext:
        """See `Summarize.compact`; the citation is left out."""
        notes, _ = _split(summary)
        return dataclasses.replace(super().compact(context, notes), first_turn=context.turn)

    def citations(self, context: CitedContext, summary: str) -> tuple[int, ...]:
        """Turns that the last line cites; () if it breaks the format."""
        span = range(context.first_turn, context.turn)
        _, cited = _split(summary)
        fewest = min(self._fewest, len(span))
        if not fewest <= len(cited) <= self._most or not cited <= set(span):
            return ()
        return tuple(sorted(cited))

    def phrase(self, context: CitedContext, notes: str, sources: Sequence[int]) -> str:
        """The notes and a citation of `sources`: the latest of the span, others if too few."""
        span = range(context.first_turn, context.turn)
        of_span = sorted(set(sources) & set(span))[-self._most :]
        others = [turn for turn in reversed(span) if turn not in of_span]
        missing = max(0, min(self._fewest, len(span)) - len(of_span))
        cited = sorted([*of_span, *others[:missing]])
        return f"{notes}\nturns: {', '.join(str(turn + 1) for turn in cited)}"


def _split(summary: str) -> tuple[str, frozenset[int]]:
    """Notes and cited turns; no turns if the last line cites none."""
    notes, _, line = summary.strip().rpartition("\n")
    match = _CITATION.fullmatch(line.strip())
    if match is None:
        return summary, frozenset()
    return notes, frozenset(int(number) - 1 for number in match[1].split(","))
