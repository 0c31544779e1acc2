"""One completion on its way through the embedded engine: what it has, and how it ends."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Sequence

import numpy as np

from focus.engine.protocol import FinishReason, GenerateRequest, GenerateResult

TextOf = Callable[[Sequence[int]], str]


def spoken(output: Sequence[int], stop_ids: Collection[int]) -> int:
    """Number of output tokens that are text: all but a stop token."""
    return len(output) - bool(output and output[-1] in stop_ids)


def find_stop_string(
    output: Sequence[int], known: int, strings: Sequence[str], text_of: TextOf
) -> tuple[int, str] | None:
    """Finds the token that completes a stop string.

    Args:
      output: sampled tokens, a stop token left out.
      known: how many of them were searched before.
      strings: what ends a completion.
      text_of: token ids to text.

    Returns:
      `(tokens to keep, string)`, or None.
    """
    if not strings:
        return None
    text = text_of(output)
    if not any(string in text for string in strings):
        return None
    for keep in range(known + 1, len(output) + 1):
        text = text_of(output[:keep])
        found = [(text.index(string), string) for string in strings if string in text]
        if found:
            return keep, min(found)[1]
    return None


def find_stop(
    output: Sequence[int],
    known: int,
    stop_ids: Collection[int],
    strings: Sequence[str],
    text_of: TextOf,
) -> tuple[int, int | str] | None:
    """Finds the end of a completion: its first stop token or string, whichever comes first.

    Args:
      output: sampled tokens, possibly some behind that end.
      known: how many of them were searched before.
      stop_ids: tokens that end a completion.
      strings: texts that end one.
      text_of: token ids to text.

    Returns:
      `(tokens to keep, token or string)`, or None.
    """
    end = next((i for i in range(known, len(output)) if output[i] in stop_ids), None)
    match = find_stop_string(output[:end], known, strings, text_of)
    if match is not None or end is None:
        return match
    return end + 1, output[end]


@dataclasses.dataclass(eq=False)
class Completion:
    """A request and its tokens; waiting while `row` is None, running after.

    Attributes:
      request: what was asked.
      future: what the caller waits for.
      prompt: [L] int32.
      stop_ids: tokens that end it.
      budget: tokens to generate at most.
      device: number of the device that it runs on.
      row: its row of that device's cache.
      cached: prompt tokens that were reused.
      output: sampled tokens.
      logp: log-probability of each.
    """

    request: GenerateRequest
    future: asyncio.Future
    prompt: np.ndarray
    stop_ids: frozenset[int]
    budget: int
    device: int | None = None
    row: int | None = None
    cached: int = 0
    output: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)

    @property
    def last_token(self) -> int:
        """The last known token: sampled, or of the prompt."""
        return self.output[-1] if self.output else int(self.prompt[-1])

    @property
    def held(self) -> int:
        """Tokens in the cache: all but the last known one."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def filtered(self) -> bool:
        """Whether top-p or top-k cuts its support."""
        return self.request.sampling.top_p < 1 or self.request.sampling.top_k != -1

    def receive(self, tokens: np.ndarray, logp: np.ndarray, text_of: TextOf) -> FinishReason | None:
        """Takes new tokens; drops those behind the token that ended the completion.

        Args:
          tokens: [n] int32 sampled tokens.
          logp: [n] float32.
          text_of: token ids to text.

        Returns:
          Why the completion has ended, or None when it goes on.
        """
        known = len(self.output)
        self.output.extend(tokens.tolist())
        self.logp.extend(logp.tolist())
        strings = self.request.sampling.stop
        stop = find_stop(self.output, known, self.stop_ids, strings, text_of)
        if stop is not None:
            keep, matched = stop
            del self.output[keep:], self.logp[keep:]
            return FinishReason("stop", matched=matched)
        if len(self.output) == self.budget:
            return FinishReason("length", length=self.budget)
        return None

    def result(self, reason: FinishReason, version: str, text_of: TextOf) -> GenerateResult:
        """The completion as it is now."""
        text = text_of(self.output[: spoken(self.output, self.stop_ids)])
        if isinstance(reason.matched, str):
            text = text[: text.index(reason.matched)]
        return GenerateResult(
            rid=self.request.rid,
            text=text,
            output_ids=tuple(self.output),
            output_logp=tuple(self.logp),
            finish_reason=reason,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            weight_versions=((version, 0, len(self.output)),) if self.output else (),
        )
