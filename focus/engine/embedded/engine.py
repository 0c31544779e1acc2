"""The in-process engine: continuous batching on JAX devices, spoken to like a server.

One asyncio task owns the devices. It admits waiting requests to free slots, fills what their
prompts do not share with a row that the cache already holds, decodes a block of tokens for all
running slots, hands out what has ended, and starts over; it ends when there is nothing to do.

Device calls block the event loop on purpose. What a batch is made of then depends only on the
order in which requests arrive, never on the clock: the same requests in the same order give the
same tokens and bit-equal log-probs. A completion is a function of (seed, prompt, weights);
batch mates change it by floating-point rounding alone.

With several devices each has rows of its own, and a completion stays where its prefix is. All of
them do the same thing at the same time, so that still nothing depends on the clock.

Memory: `rows * row_bytes`, where a row takes `2 * layers * kv_heads * cache_length * head_dim`
numbers and there are `max_running + retained` rows and one a device (scratch room for padding),
plus one working copy of the running rows during a call. See `EmbeddedEngine.cache_bytes`. A
recurrent model has a memory per row and per snapshot beside
(`focus.engine.embedded.snapshot_store`).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from focus.engine.completion import Completion
from focus.engine.embedded.prefix_store import Placement, PrefixStore
from focus.engine.embedded.runner import Runner
from focus.engine.embedded.snapshot_store import SnapshotStore
from focus.engine.protocol import (
    EngineError,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    admissible,
)
from focus.policy import model as models
from focus.policy.model import Config, Params

# Passes of the event loop without a new request after which callers are taken to be waiting.
_QUIET_PASSES = 4


@dataclasses.dataclass
class EngineStats:
    """Running totals.

    Attributes:
      requests: completions handed out, aborted ones included.
      prompt_tokens: length of their prompts.
      cached_tokens: prompt tokens whose keys and values were reused.
      generated_tokens: tokens handed out.
      discarded_tokens: tokens sampled behind a stop string, or a stop token that the device did
        not know.
      prefill_calls: prefill programs run.
      decode_calls: decode programs run.
      aborted: completions that were aborted.
      flushes: times that the prefix store was emptied.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    prefill_calls: int = 0
    decode_calls: int = 0
    aborted: int = 0
    flushes: int = 0

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.cached_tokens


def num_devices(wanted: int, max_running: int) -> int:
    """Local devices that an engine runs on: `wanted` of them, or for -1 as many as it can use.

    Raises:
      ValueError: there are not so many, or more than completions that run together.
    """
    most = min(jax.local_device_count(), max_running)
    if wanted != -1 and not 1 <= wanted <= most:
        raise ValueError(
            f"rollout.devices must be -1 or lie in [1, {most}] (local devices, and not more than "
            f"max_running), got {wanted}"
        )
    return most if wanted == -1 else wanted


class EmbeddedEngine:
    """A rollout engine in this process, behind the `Engine` protocol.

    Args:
      model: shape of the model.
      params: its parameters; copied, so a trainer may donate its own.
      decode: token ids to text, for `text` and stop strings.
      eos_token_ids: end a completion unless the request ignores them.
      devices: number of local devices to spread over; -1 takes all.
      max_running: slots that decode together, on all devices.
      retained: rows beyond those, which keep finished completions for reuse. The default,
        4 * max_running, holds the base rollouts of a step until their branches have run.
      snapshots: of a recurrent model, memories that are kept at the ends of prompts, where turns
        end and branches leave; without one, nothing of a prefix is reused. Default 4 per row.
      cache_length: longest prompt plus completion, in tokens; default the model's context.
      cache_buckets: numbers of cache columns that a call may attend to; default 128, 256, 384,
        then doubling, up to `cache_length`.
      prefill_buckets: lengths of a prefill chunk; longer suffixes go in pieces.
      batch_buckets: numbers of rows of a call, on all devices, up to `max_running`.
      decode_steps: tokens a slot may gain in one decode call.
      max_stop_ids: stop token ids (end-of-sequence ids included) that the device knows of a
        request. Of one with more, up to `decode_steps` tokens are sampled behind some of them and
        thrown away.
      weight_version: name of `params`.
      loader: reads parameters from a path, for `load_weights`.

    Raises:
      ValueError: sizes that do not fit together, parameters of another model.
    """

    def __init__(
        self,
        model: Config,
        params: Params,
        *,
        decode: Callable[[Sequence[int]], str],
        eos_token_ids: Sequence[int] = (),
        devices: int = 1,
        max_running: int = 64,
        retained: int | None = None,
        snapshots: int | None = None,
        cache_length: int | None = None,
        cache_buckets: Sequence[int] | None = None,
        prefill_buckets: Sequence[int] = (16, 64),
        batch_buckets: Sequence[int] = (8, 32, 64),
        decode_steps: int = 16,
        max_stop_ids: int = 8,
        weight_version: str = "v0",
        loader: Callable[[str], Params] | None = None,
    ):
        length = model.max_context if cache_length is None else cache_length
        retained = 4 * max_running if retained is None else retained
        if max_running < 1 or retained < 0:
            raise ValueError(
                f"need max_running >= 1 and retained >= 0, got {max_running} and {retained}"
            )
        if not 2 <= length <= model.max_context:
            raise ValueError(
                f"cache_length must lie in [2, {model.max_context}] (the model's max_context), "
                f"got {length}"
            )
        devices = num_devices(devices, max_running)
        if decode_steps < 1:
            raise ValueError(f"decode_steps must be >= 1, got {decode_steps}")
        if cache_buckets is None:
            cache_buckets = [128, 256, 384] + [512 << i for i in range(length.bit_length())]
        self._model = model
        self._text_of = decode
        self._eos = frozenset(eos_token_ids)
        self._max_running = max_running
        # Of each device.
        self._slots = -(-max_running // devices)
        self._rows = self._slots + -(-retained // devices)
        self._snapshots = 0
        if models.is_recurrent(model):
            self._snapshots = 4 * self._rows if snapshots is None else -(-snapshots // devices)
        self._length = length
        self._loader = loader
        self._runner = Runner(
            model,
            devices=jax.local_devices()[:devices],
            rows=self._rows,
            row_length=length,
            snapshots=self._snapshots,
            max_running=self._slots,
            cache_buckets=cache_buckets,
            prefill_buckets=prefill_buckets,
            batch_buckets=[-(-size // devices) for size in batch_buckets],
            decode_steps=decode_steps,
            max_stop_ids=max_stop_ids,
        )
        self._stores = self._new_stores(devices)
        self._install(params, weight_version)
        self._totals = EngineStats()
        self._waiting: collections.deque[Completion] = collections.deque()
        self._running: list[Completion] = []
        self._in_flight: dict[str, Completion] = {}
        self._swaps: collections.deque[tuple[Params, str, asyncio.Future]] = collections.deque()
        self._arrivals = 0
        self._task: asyncio.Task | None = None
        self._closed = False

    # What callers see.

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Samples one completion.

        `max_new_tokens` is cut to what the context has room for; the completion then ends with
        finish reason "length". Cancelling the call frees its slot.

        Raises:
          ValueError: empty or over-long prompt, id outside the vocabulary, an `rid` that is in
            flight.
          EngineError: the device loop failed or the engine is closed.
        """
        completion = self._admissible(request)
        self._in_flight[request.rid] = completion
        self._waiting.append(completion)
        self._arrivals += 1
        self._ensure_task()
        try:
            return await completion.future
        except asyncio.CancelledError:
            self._retire(completion)
            raise

    async def abort(self, rid: str) -> None:
        """Ends a waiting or running request with what it has; an unknown `rid` is no error."""
        completion = self._in_flight.get(rid)
        if completion is not None:
            self._totals.aborted += 1
            self._finish(completion, FinishReason("abort", message="aborted by the caller"))

    async def load_weights(self, path: str, version: str) -> None:
        """Reads parameters with `loader`, then as `set_params`.

        Raises:
          ValueError: the engine has no loader, or the file holds another model.
          EngineError: reading failed; the old weights stay.
        """
        if self._loader is None:
            raise ValueError(
                f"cannot load {path!r}: this engine has no loader; pass loader= or use set_params"
            )
        try:
            params = self._loader(path)
        except Exception as error:
            raise EngineError(f"could not load weights from {path!r}: {error}") from error
        await self.set_params(params, version)

    async def set_params(self, params: Params, version: str) -> None:
        """Waits for running requests, swaps the weights and empties the prefix store.

        Requests that are still waiting start with the new weights, so no completion ever spans
        two versions.

        Raises:
          ValueError: parameters of another model.
          EngineError: the device loop failed or the engine is closed.
        """
        self._check_params(params)
        future = asyncio.get_running_loop().create_future()
        self._swaps.append((params, version, future))
        self._ensure_task()
        await future

    def flush_cache(self) -> None:
        """Forgets the keys and values of finished sequences; running ones keep theirs."""
        for store in self._stores:
            store.flush()
        self._totals.flushes += 1

    def info(self) -> EngineInfo:
        """What the engine is serving now."""
        return EngineInfo(
            weight_version=self._version,
            vocab_size=self._model.vocab_size,
            max_context=self._length,
            max_running=self._max_running,
        )

    @property
    def stats(self) -> EngineStats:
        """A copy of the running totals."""
        return dataclasses.replace(
            self._totals,
            prefill_calls=self._runner.prefill_calls,
            decode_calls=self._runner.decode_calls,
        )

    @property
    def compilations(self) -> int:
        """Device programs compiled so far; constant after `warmup`."""
        return self._runner.programs.compilations

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that the engine holds on the device."""
        return self._runner.cache_bytes

    def warmup(self, *, filtered: bool = True) -> int:
        """Compiles every program that a request can need.

        Args:
          filtered: whether requests with top-p or top-k will come.

        Returns:
          The number of programs, which does not grow any more.
        """
        self._runner.warmup(filtered=filtered)
        return self.compilations

    async def close(self) -> None:
        """Stops the device loop; whoever still waits gets an EngineError."""
        self._closed = True
        if self._task is not None:
            task = self._task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def __aenter__(self) -> EmbeddedEngine:
        return self

    async def __aexit__(self, *unused) -> None:
        await self.close()

    # Host side of one request.

    def _admissible(self, request: GenerateRequest) -> Completion:
        """Checks a request before anything of it reaches the device."""
        if self._closed:
            raise EngineError("the engine is closed")
        if request.rid in self._in_flight:
            raise ValueError(f"rid {request.rid!r} is in flight already: request ids are unique")
        request = admissible(request, self._model.vocab_size, self._length)
        params = request.sampling
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._eos
        return Completion(
            request=request,
            future=asyncio.get_running_loop().create_future(),
            prompt=np.asarray(request.input_ids, np.int32),
            stop_ids=stop_ids,
            budget=params.max_new_tokens,
        )

    def _receive(self, completion: Completion, tokens: np.ndarray, logp: np.ndarray) -> None:
        """Takes new tokens of a running completion and finishes it where it has ended."""
        if not np.isfinite(logp).all():
            raise FloatingPointError(
                f"log-probs of request {completion.request.rid!r} are not finite under weights "
                f"{self._version!r}: load sound weights"
            )
        self._stores[completion.device].append(completion.row, completion.held, tokens)
        before = len(completion.output)
        reason = completion.receive(tokens, logp, self._text_of)
        self._totals.discarded_tokens += before + len(tokens) - len(completion.output)
        if reason is not None:
            self._finish(completion, reason)

    def _finish(self, completion: Completion, reason: FinishReason) -> None:
        """Hands out a completion and leaves its row behind for reuse."""
        result = completion.result(reason, self._version, self._text_of)
        self._retire(completion)
        self._totals.requests += 1
        self._totals.prompt_tokens += result.prompt_tokens
        self._totals.cached_tokens += result.cached_tokens
        self._totals.generated_tokens += result.completion_tokens
        if not completion.future.done():
            completion.future.set_result(result)

    def _retire(self, completion: Completion) -> None:
        """Takes a completion out of the queues; its row becomes idle."""
        if self._in_flight.pop(completion.request.rid, None) is None:
            return
        if completion.row is None:
            self._waiting.remove(completion)
        else:
            self._running.remove(completion)
            held = len(completion.prompt) + len(completion.output)
            self._stores[completion.device].release(completion.row, held)

    # The task that owns the device.

    def _ensure_task(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Works until nothing is waiting or running, so an idle engine holds no task."""
        error = EngineError("the engine was closed, or its event loop ended")
        try:
            while self._in_flight or self._swaps:
                await self._hear_callers()
                if self._swaps and not self._running:
                    self._swap()
                if not self._swaps:
                    self._admit()
                if self._running:
                    self._decode()
        except Exception as raised:
            error = EngineError(f"the device loop failed: {raised!r}")
            error.__cause__ = raised
        finally:
            self._task = None
            self._abandon(error)

    async def _hear_callers(self) -> None:
        """Lets callers act on what they got until none has a new request."""
        quiet = 0
        while quiet < _QUIET_PASSES:
            seen = self._arrivals
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._arrivals == seen else 0

    def _abandon(self, error: EngineError) -> None:
        """Fails whatever is left; the donated cache may be gone, so it starts afresh."""
        if not self._in_flight and not self._swaps:
            return
        futures = [s.future for s in self._in_flight.values()] + [f for *_, f in self._swaps]
        self._waiting.clear()
        self._running.clear()
        self._in_flight.clear()
        self._swaps.clear()
        self._runner.reset()
        self._stores = self._new_stores(len(self._stores))
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _new_stores(self, devices: int) -> list[PrefixStore]:
        # A wave costs a device call, which computes at least a chunk for a row anyway.
        wave_cost = self._runner.smallest_chunk
        if models.is_recurrent(self._model):
            size = self._rows, self._length, self._snapshots, wave_cost
            return [SnapshotStore(*size) for _ in range(devices)]
        return [PrefixStore(self._rows, self._length, wave_cost) for _ in range(devices)]

    def _swap(self) -> None:
        params, version, future = self._swaps[0]
        self._install(params, version)
        self.flush_cache()
        self._swaps.popleft()
        if not future.done():
            future.set_result(None)

    def _check_params(self, params: Params) -> None:
        expected = models.param_shapes(self._model)
        shapes = jax.tree.map(lambda p: tuple(p.shape), params)
        if shapes != expected:
            raise ValueError(
                f"parameters of another model: expected shapes {expected}, got {shapes}"
            )

    def _install(self, params: Params, version: str) -> None:
        self._check_params(params)
        self._runner.install(params)
        self._version = version

    def _admit(self) -> None:
        """Moves waiting requests to free slots and computes what their prompts do not share."""
        admitted: list[tuple[int, Placement, np.ndarray]] = []
        for completion in list(self._waiting):
            if len(self._running) == self._max_running:
                break
            found = [store.match(completion.prompt) for store in self._stores]
            device = self._choose([cached for _, cached in found], len(completion.prompt))
            if device is None:
                continue  # until there is room where its prefix is
            placement = self._stores[device].place(completion.prompt, found[device])
            if placement is None:
                break
            self._waiting.remove(completion)
            completion.device, completion.row = device, placement.row
            completion.cached = placement.cached
            self._running.append(completion)
            admitted.append((device, placement, completion.prompt[:-1]))
        for store in self._stores:
            store.settle()
        for wave in range(max((p.wave for _, p, _ in admitted), default=-1) + 1):
            members = [(d, p, tokens) for d, p, tokens in admitted if p.wave == wave]
            self._runner.fork([(d, p.source, p.row) for d, p, _ in members if p.source is not None])
            self._runner.remember(
                [(d, p.memory, p.row) for d, p, _ in members if p.memory is not None]
            )
            self._runner.prefill([(d, p.row, p.cached, tokens) for d, p, tokens in members])
            self._runner.remember(
                [(d, p.row, p.snapshot) for d, p, _ in members if p.snapshot is not None]
            )

    def _choose(self, cached: Sequence[int], length: int) -> int | None:
        """The device for a prompt; None if it has to wait for the one that holds its prefix.

        That is the one that can reuse most of it, if that is half of the prompt or more; else
        the one with the fewest running (this project's rule).

        Args:
          cached: tokens of the prompt that each device could reuse.
          length: of the prompt.
        """
        busy = [sum(c.device == device for c in self._running) for device in range(len(cached))]
        best, idlest = int(np.argmax(cached)), int(np.argmin(busy))
        device = best if 2 * cached[best] >= length - 1 else idlest
        return device if busy[device] < self._slots else None

    def _decode(self) -> None:
        """Samples a block of tokens for all running completions and hands out what has ended."""
        running = list(self._running)
        for completion, (tokens, logp) in zip(running, self._runner.decode(running)):
            self._receive(completion, tokens, logp)
