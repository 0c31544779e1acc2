"""What a rollout engine is: one protocol, spoken in the request and reply schema of SGLang.

Engines are interchangeable: the in-process sampler, an HTTP client for servers, a fake one in
tests. Semantics they share:

  * `output_ids` hold every sampled token, a stop token included; `text` is trimmed at a stop
    string and has no stop token.
  * log-probs are `log_softmax(logits / temperature)` over the full vocabulary, not
    renormalised after top-p or top-k; raw logits at temperature 0.
  * an abort answers with the tokens sampled so far.
  * every reply names the weight version(s) it was sampled with.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample one completion. Every value is sent; nothing is left to a server's default."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k must be -1 (all) or >= 1, got {self.top_k}")


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """One prompt, one completion.

    Attributes:
      rid: unique request id; also what `abort` takes.
      input_ids: the prompt. Every id must lie in the vocabulary.
      sampling: how to sample.
      seed: makes the completion reproducible where the engine supports it (the embedded one).
      session: requests of one session share prefixes; servers may route by it.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    session: str = ""


@dataclasses.dataclass(frozen=True)
class FinishReason:
    """Why a completion ended.

    `type` is "stop" (`matched` holds the token id or string), "length" (`length` tokens were
    asked for) or "abort" (`message` says why).
    """

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """A completion.

    Attributes:
      rid: the request's id.
      text: decoded completion, trimmed at a stop string, without the stop token.
      output_ids: every sampled token.
      output_logp: log-prob of each.
      finish_reason: why it ended.
      prompt_tokens: length of the prompt.
      cached_tokens: how much of the prompt's keys and values was reused.
      weight_versions: spans `(version, start, end)` over `output_ids`.
    """

    rid: str
    text: str
    output_ids: tuple[int, ...]
    output_logp: tuple[float, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    weight_versions: tuple[tuple[str, int, int], ...]

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.output_ids)


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """What an engine says of itself."""

    weight_version: str
    vocab_size: int
    max_context: int
    max_running: int


class EngineError(RuntimeError):
    """A technical failure of an engine. Never a reward of 0: retry, or count it."""


class FleetDead(EngineError):
    """No server has been fit to answer for longer than a run may wait. Not for retrying."""


def admissible(request: GenerateRequest, vocab_size: int, max_context: int) -> GenerateRequest:
    """Checks a prompt before anything of it reaches a device or a server.

    Args:
      request: what is asked.
      vocab_size: ids that the model has.
      max_context: longest prompt plus completion, in tokens.

    Returns:
      The request, `max_new_tokens` cut to what the context has room for.

    Raises:
      ValueError: the prompt is empty, too long, or has an id outside the vocabulary.
    """
    ids = request.input_ids
    if not ids:
        raise ValueError("input_ids is empty: a prompt needs at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        where = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise ValueError(
            f"token id {ids[where]} at position {where} is outside the vocabulary of "
            f"{vocab_size}: encode with the tokenizer of this model"
        )
    room = max_context - len(ids)
    if room < 1:
        raise ValueError(
            f"a prompt of {len(ids)} tokens leaves no room in a context of "
            f"{max_context}: compact it or raise cache_length"
        )
    sampling = request.sampling
    if sampling.max_new_tokens <= room:
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(sampling, max_new_tokens=room))


@runtime_checkable
class Engine(Protocol):
    """The one interface rollouts are written against."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Samples one completion.

        Raises:
          ValueError: the request cannot be served as it is (id out of the vocabulary, prompt
            too long).
          EngineError: a technical failure.
        """

    async def abort(self, rid: str) -> None:
        """Ends a running request; its `generate` returns what was sampled so far."""

    async def load_weights(self, path: str, version: str) -> None:
        """Loads the weights at `path`; later tokens carry `version`."""

    def info(self) -> EngineInfo:
        """What the engine is serving now."""
