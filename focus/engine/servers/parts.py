"""One completion out of several: a request that was aborted goes on with what is left of it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from focus.engine.completion import TextOf, find_stop, spoken
from focus.engine.protocol import EngineError, FinishReason, GenerateRequest, GenerateResult
from focus.engine.wire import BadReply


class Parts:
    """The parts of a completion between aborts, joined.

    It ends at its first stop token or string. A server may go on for some tokens (it looks for
    strings in one part alone, and several tokens may come out of one step); those are dropped,
    since the policy was never to write them.

    Attributes:
      dropped: tokens behind the end.

    Args:
      request: what was asked; its budget is that of all parts together.
      text_of: token ids to text.
      eos_token_ids: end a completion unless the request ignores them.
    """

    def __init__(
        self, request: GenerateRequest, text_of: TextOf, eos_token_ids: Sequence[int] = ()
    ):
        self.dropped = 0
        self._request = request
        self._text_of = text_of
        sampling = request.sampling
        self._stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._stop_ids |= frozenset(eos_token_ids)
        self._output: list[int] = []
        self._logp: list[float] = []
        self._spans: list[tuple[str, int, int]] = []
        self._cached = 0
        self._finish: FinishReason | None = None

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self._request.sampling.max_new_tokens - len(self._output)

    @property
    def started(self) -> bool:
        """Whether there is a token yet."""
        return bool(self._output)

    @property
    def finished(self) -> bool:
        """Whether it ended other than by an abort."""
        return self._finish is not None

    def ask(self, rid: str) -> GenerateRequest:
        """The request for the next part: everything so far as its prompt, what is left to generate.

        From the second part on it has another seed, because a resume must not draw the same
        numbers.

        Args:
          rid: its own id; a server may still know that of the last part.
        """
        request = self._request
        return dataclasses.replace(
            request,
            rid=rid,
            input_ids=request.input_ids + tuple(self._output),
            sampling=dataclasses.replace(request.sampling, max_new_tokens=self.left),
            seed=_seed_after(request.seed, len(self._output)),
        )

    def add(self, result: GenerateResult) -> None:
        """Takes an answer to the last `ask`.

        Raises:
          BadReply: it says that it stopped, and not at what, and holds no stop: a server has taken
            the end of turn away, which then would never be trained. Nothing of it is taken.
        """
        known = len(self._output)
        output = [*self._output, *result.output_ids]
        reason, strings = result.finish_reason, self._request.sampling.stop
        # A server may know a token that ends completions and this process not.
        stop_ids = self._stop_ids | ({reason.matched} if isinstance(reason.matched, int) else set())
        stop = find_stop(output, known, stop_ids, strings, self._text_of)
        if reason.type == "stop" and reason.matched is None and stop is None:
            raise BadReply(
                f"request {result.rid} stopped at nothing: of its {len(result.output_ids)} tokens "
                f"none is of {sorted(self._stop_ids)}, and no stop string is in them. The server "
                "leaves the end of turn out of output_ids; FOCUS trains on it"
            )
        self._output = output
        self._logp += result.output_logp
        for version, start, end in result.weight_versions:
            if self._spans and self._spans[-1][0] == version:
                self._spans[-1] = (version, self._spans[-1][1], end + known)
            else:
                self._spans.append((version, start + known, end + known))
        if not known:  # a part that was aborted in the queue has looked nothing up
            self._cached = result.cached_tokens
        if reason.type == "abort":
            self._finish = None if self.left else self._by_length()
        else:
            self._finish = self._by_length() if reason.type == "length" else reason
        if stop is not None:
            self._end(*stop)

    def result(self, reason: FinishReason | None = None) -> GenerateResult:
        """The completion as it is now.

        Args:
          reason: why it ends, where its parts have not ended it.

        Raises:
          EngineError: it was stopped by a string that its text does not contain.
        """
        reason = self._finish or reason
        text = self._text_of(self._output[: spoken(self._output, self._stop_ids)])
        if isinstance(reason.matched, str):
            if reason.matched not in text:
                raise EngineError(
                    f"request {self._request.rid} was stopped by {reason.matched!r}, but its "
                    f"tokens read {text!r}: the server has another tokenizer than this run"
                )
            text = text[: text.index(reason.matched)]
        return GenerateResult(
            rid=self._request.rid,
            text=text,
            output_ids=tuple(self._output),
            output_logp=tuple(self._logp),
            finish_reason=reason,
            prompt_tokens=len(self._request.input_ids),
            cached_tokens=self._cached,
            weight_versions=tuple(self._spans),
        )

    def _by_length(self) -> FinishReason:
        return FinishReason("length", length=len(self._output))

    def _end(self, keep: int, matched: int | str) -> None:
        """Ends it after `keep` tokens."""
        self.dropped += len(self._output) - keep
        del self._output[keep:], self._logp[keep:]
        self._spans = [(v, start, min(end, keep)) for v, start, end in self._spans if start < keep]
        self._finish = FinishReason("stop", matched=matched)


def _seed_after(seed: int, tokens: int) -> int:
    """The seed of a part that begins after `tokens` tokens; the request's own for the first."""
    return _mixed(f"{seed}|{tokens}") if tokens else seed


def seed_of_copy(seed: int | str, copy: int) -> int:
    """The seed of the `copy`-th of several completions that one request asks for."""
    return _mixed(f"{seed}|copy {copy}")


def _mixed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
