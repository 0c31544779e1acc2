"""A generation as JSON: what goes to `POST /generate` of an SGLang server, and what comes back.

Both directions of both ends are here, so that client and server cannot drift apart. A reply is
believed only if everything in it fits together: a count that is off by one today is a token
trained with another token's log-prob tomorrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from focus.engine.protocol import (
    EngineError,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
)

# What is not ours to choose, sent all the same: a server's default may come from a file that lies
# beside the model.
_FIXED_SAMPLING = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "skip_special_tokens": True,
    "no_stop_trim": False,
}
_OWN_SAMPLING = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "sampling_seed",
)
_FIXED_FIELDS = {"return_logprob": True, "stream": False}
_WITHOUT_EFFECT = ("log_metrics", "no_logs")

Spans = tuple[tuple[str, int, int], ...]


class BadReply(EngineError):
    """A reply whose parts contradict each other or the request."""


def to_payload(request: GenerateRequest, adapter: str | None = None) -> dict[str, Any]:
    """The body of the request.

    `logprob_start_len` is left out: any value makes the server score the prompt, and then it
    reuses no prefix.

    Args:
      request: what is asked.
      adapter: name of the adapter to sample with, which the server has loaded.
    """
    sampling = request.sampling
    chosen = {} if adapter is None else {"lora_path": adapter}
    return {
        "rid": request.rid,
        "input_ids": list(request.input_ids),
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": request.seed,
            **_FIXED_SAMPLING,
        },
        **_FIXED_FIELDS,
        **chosen,
    }


def from_payload(body: Any, *, rid: str) -> GenerateRequest:
    """The request in a body.

    Args:
      body: parsed JSON of one prompt, not of a batch.
      rid: id of a request that has none.

    Raises:
      ValueError: an unknown field, a value of the wrong type, or a setting that the embedded
        engine cannot follow.
    """
    if not isinstance(body, Mapping):
        raise ValueError(f"the body must be a JSON object, got {type(body).__name__}")
    known = {"rid", "input_ids", "sampling_params", *_FIXED_FIELDS, *_WITHOUT_EFFECT}
    # A router fills in whatever the API has; what is off or null asks for nothing.
    unknown = {n: body[n] for n in sorted(set(body) - known) if body[n] not in (None, False)}
    if unknown:
        raise ValueError(f"unknown fields {unknown}")
    sampling = dict(body.get("sampling_params") or {})
    for name, only in (*_FIXED_SAMPLING.items(), *_FIXED_FIELDS.items()):
        given = (sampling if name in _FIXED_SAMPLING else body).get(name, only)
        # Log-probs are computed in any case; who does not want them leaves them.
        if name != "return_logprob" and given != only:
            raise ValueError(f"{name} can only be {only!r} here, got {given!r}")
    unknown = set(sampling) - {*_OWN_SAMPLING, *_FIXED_SAMPLING}
    if unknown:
        raise ValueError(f"unknown sampling_params {sorted(unknown)}")
    stop = sampling.get("stop") or ()
    try:
        return GenerateRequest(
            rid=str(body.get("rid") or rid),
            input_ids=tuple(_ids(body.get("input_ids"), "input_ids")),
            sampling=SamplingParams(
                max_new_tokens=int(sampling.get("max_new_tokens", 128)),
                temperature=float(sampling.get("temperature", 1.0)),
                top_p=float(sampling.get("top_p", 1.0)),
                top_k=int(sampling.get("top_k", -1)),
                stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
                stop_token_ids=tuple(_ids(sampling.get("stop_token_ids") or [], "stop_token_ids")),
                ignore_eos=bool(sampling.get("ignore_eos", False)),
            ),
            seed=int(sampling.get("sampling_seed") or 0),
        )
    except TypeError as error:
        raise ValueError(f"a value of the wrong type: {error}") from error


def to_reply(result: GenerateResult, version: str) -> dict[str, Any]:
    """The body of the reply.

    Args:
      result: the completion.
      version: that of the weights now; what a reply without tokens is labelled with.
    """
    finish = {"type": result.finish_reason.type}
    for name in ("matched", "length", "message"):
        value = getattr(result.finish_reason, name)
        if value is not None:
            finish[name] = value
    spans = result.weight_versions
    return {
        "text": result.text,
        "output_ids": list(result.output_ids),
        "meta_info": {
            "id": result.rid,
            "finish_reason": finish,
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": result.completion_tokens,
            "cached_tokens": result.cached_tokens,
            "weight_version": spans[-1][0] if spans else version,
            "weight_versions": [
                {"version": name, "start": start, "end": end} for name, start, end in spans
            ],
            "output_token_logprobs": [
                [logp, token, None]
                for logp, token in zip(result.output_logp, result.output_ids, strict=True)
            ],
        },
    }


def from_reply(
    body: Any, request: GenerateRequest, *, vocab_size: int, current: Sequence[str | None]
) -> GenerateResult:
    """A completion from the body of a reply; `text` is left empty.

    Args:
      body: parsed JSON.
      request: what was asked.
      vocab_size: ids lie in [0, vocab_size).
      current: versions that were served while the request was running. With several of them the
        reply has to say which tokens are whose.

    Raises:
      BadReply: anything is missing, of the wrong type, or does not fit.
    """
    try:
        return _checked(body, request, vocab_size, current)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadReply(f"request {request.rid}: the reply lacks or garbles {error}") from error


def _checked(
    body: Any, request: GenerateRequest, vocab_size: int, current: Sequence[str | None]
) -> GenerateResult:
    def check(fits: bool, complaint: str) -> None:
        if not fits:
            raise BadReply(f"request {request.rid}: {complaint}")

    output, meta = tuple(_ids(body["output_ids"], "output_ids")), body["meta_info"]
    count = len(output)
    check(meta["id"] == request.rid, f"the reply is that of request {meta['id']!r}")
    check(
        meta["completion_tokens"] == count,
        f"{count} output_ids but completion_tokens {meta['completion_tokens']}",
    )
    check(
        count <= request.sampling.max_new_tokens,
        f"{count} tokens were generated, and {request.sampling.max_new_tokens} allowed",
    )
    check(all(0 <= i < vocab_size for i in output), f"an id outside the vocabulary of {vocab_size}")
    scored = meta.get("output_token_logprobs") or []
    check(len(scored) == count, f"{count} output_ids but {len(scored)} log-probs")
    check(tuple(entry[1] for entry in scored) == output, "log-probs of other ids than output_ids")
    logp = tuple(float(entry[0]) for entry in scored)
    check(all(math.isfinite(x) and x < 1e-3 for x in logp), "a log-prob that is none")
    prompt_tokens, cached = meta["prompt_tokens"], meta["cached_tokens"]
    check(
        prompt_tokens == len(request.input_ids),
        f"a prompt of {len(request.input_ids)} ids was read as {prompt_tokens}",
    )
    check(
        isinstance(cached, int) and 0 <= cached <= prompt_tokens,
        f"cached_tokens {cached!r} of a prompt of {prompt_tokens}",
    )
    return GenerateResult(
        rid=request.rid,
        text="",
        output_ids=output,
        output_logp=logp,
        finish_reason=_finish(meta["finish_reason"], output, request),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached,
        weight_versions=_spans(meta, count, current, request.rid),
    )


def _finish(
    fields: Mapping[str, Any], output: tuple[int, ...], request: GenerateRequest
) -> FinishReason:
    kind = fields["type"]
    if kind == "stop":
        matched = fields.get("matched")
        if isinstance(matched, int) and matched not in output:
            raise BadReply(f"request {request.rid}: stopped by token {matched}, which it lacks")
        if isinstance(matched, str) and matched not in request.sampling.stop:
            raise BadReply(f"request {request.rid}: stopped by {matched!r}, which was not asked")
        return FinishReason("stop", matched=matched)
    if kind == "length":
        if not output:
            raise BadReply(f"request {request.rid}: ended by its length without a token")
        return FinishReason("length", length=len(output))
    if kind == "abort":
        return FinishReason("abort", message=fields.get("message"))
    raise BadReply(f"request {request.rid}: unknown finish reason {kind!r}")


def _spans(meta: Mapping[str, Any], count: int, current: Sequence[str | None], rid: str) -> Spans:
    """Spans over the output, from the reply's own or from its one version."""
    version = meta["weight_version"]
    if not isinstance(version, str):
        raise BadReply(f"request {rid}: weight_version {version!r} is no text")
    entries = meta.get("weight_versions")
    if entries is None:
        if count and len(set(current)) > 1:
            raise BadReply(
                f"request {rid} ran across a change of weights, and the server does not say which "
                "tokens are whose; use pause_mode='abort'"
            )
        entries = [{"version": version, "start": 0, "end": count}]
    spans = tuple((str(e["version"]), int(e["start"]), int(e["end"])) for e in entries)
    spans = tuple(span for span in spans if span[1] != span[2])
    ends = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != ends[:-1] or ends[-1] != count:
        raise BadReply(f"request {rid}: weight_versions {spans} do not cover {count} tokens")
    return spans


def _ids(values: Any, name: str) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise ValueError(f"{name} must be a list of token ids")
    return values
