"""Owns the weights and the cache on the device, and lays work out in bucketed batches.

Between the scheduler, which thinks in completions and rows, and the programs, which exist for a
few shapes only: lists are cut and padded here. Padding reads and writes one scratch row.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import jax
import numpy as np

from focus.policy import model as models
from focus.rollout import memories, sampling
from focus.rollout.completion import Completion
from focus.rollout.programs import Programs, Slots


class Runner:
    """Runs fork, remember, prefill and decode over rows of one cache.

    Args:
      model: shape of the model.
      rows: rows that completions may use.
      row_length: tokens a row has room for.
      snapshots: memories of a recurrent model beside those of the rows.
      max_running: most completions of one decode call and most pairs of one fork.
      cache_buckets: numbers of cache columns that a call may attend to.
      prefill_buckets: lengths of a prefill chunk, none above the smallest cache bucket.
      batch_buckets: numbers of rows of a call.
      decode_steps: tokens a completion may gain in one decode call.
      max_stop_ids: most stop token ids of a completion.

    Raises:
      ValueError: a bucket below 1.
    """

    def __init__(
        self,
        model: models.Config,
        *,
        rows: int,
        row_length: int,
        snapshots: int,
        max_running: int,
        cache_buckets: Sequence[int],
        prefill_buckets: Sequence[int],
        batch_buckets: Sequence[int],
        decode_steps: int,
        max_stop_ids: int,
    ):
        self._model = model
        self._rows = rows
        # A memory must not see a token twice, so chunks that spill cannot move left.
        spill = max(prefill_buckets) if models.is_recurrent(model) else 0
        self._row_length = row_length = row_length + spill
        self._num_memories = rows + 2 + snapshots
        self._max_running = max_running
        self._max_stop_ids = max_stop_ids
        self._cache_buckets = _buckets("cache_buckets", cache_buckets, row_length)
        narrowest = self._cache_buckets[0]
        longest_chunk = min(max(prefill_buckets), narrowest)
        self._prefill_buckets = _buckets("prefill_buckets", prefill_buckets, longest_chunk)
        self._batch_buckets = _buckets("batch_buckets", batch_buckets, max_running)
        self._steps = min(decode_steps, narrowest)
        self._device = jax.local_devices()[0]
        self.programs = Programs(
            model,
            rows=rows + 1,
            row_length=row_length,
            num_memories=self._num_memories,
            steps=self._steps,
            max_stop_ids=max_stop_ids,
            max_forks=max_running,
            device=self._device,
        )
        self.prefill_calls = 0
        self.decode_calls = 0
        self.reset()

    @property
    def smallest_chunk(self) -> int:
        """Tokens that a prefill call computes for a row at least."""
        return self._prefill_buckets[0]

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values on the device."""
        return sum(x.nbytes for x in jax.tree.leaves(self._cache))

    def reset(self) -> None:
        """Makes an empty cache; a failed call may have lost the one that it was given."""
        self._cache = None  # free the old one before its successor is made
        cache = memories.init_cache(
            self._model, self._rows + 1, self._row_length, self._num_memories
        )
        self._cache = jax.device_put(cache, self._device)

    def install(self, params: models.Params) -> None:
        """Serves copies of these parameters from now on."""
        params = jax.device_put(params, self._device)
        self._weights = self.programs.unstack(params)(params)

    def warmup(self, *, filtered: bool) -> None:
        """Compiles the programs of all buckets; with `filtered` also those that sort."""
        self.programs.fork()
        if models.is_recurrent(self._model):
            self.programs.remember()
        for size in self._batch_buckets:
            for length in self._cache_buckets:
                for chunk in self._prefill_buckets:
                    self.programs.prefill(size, chunk, length)
                for cut in (False, True) if filtered else (False,):
                    self.programs.decode(size, length, cut)

    def fork(self, pairs: list[tuple[int, int]]) -> None:
        """Copies rows: `(source, target)`, at most `max_running` pairs."""
        if pairs:
            self._cache = self.programs.fork()(self._cache, *self._pairs(pairs))

    def remember(self, pairs: list[tuple[int, int]]) -> None:
        """Copies memories: `(source, target)`, at most `max_running` pairs."""
        if pairs:
            self._cache = self.programs.remember()(self._cache, *self._pairs(pairs))

    def _pairs(self, pairs: list[tuple[int, int]]) -> tuple[jax.Array, ...]:
        padded = np.full((2, self._max_running), self._rows, np.int32)
        padded[:, : len(pairs)] = np.array(pairs, np.int32).T
        return jax.device_put((padded[0], padded[1], np.int32(len(pairs))), self._device)

    def prefill(self, spans: list[tuple[int, int, np.ndarray]]) -> None:
        """Computes keys and values of known tokens, in chunks.

        Args:
          spans: `(row, start, tokens)`: the row holds `tokens[:start]` and lacks the rest.
        """
        largest = self._prefill_buckets[-1]
        while spans := [span for span in spans if span[1] < len(span[2])]:
            chunks = collections.defaultdict(list)
            for span in spans:
                need = min(len(span[2]) - span[1], largest)
                chunks[_bucket(self._prefill_buckets, need)].append(span)
            for chunk, members in sorted(chunks.items()):
                for batch in _batches(members, self._batch_buckets):
                    self._prefill_batch(chunk, batch)
            spans = [(row, start + largest, tokens) for row, start, tokens in spans]

    def _prefill_batch(self, chunk: int, spans: list[tuple[int, int, np.ndarray]]) -> None:
        need = min(max(start for _, start, _ in spans) + chunk, self._row_length)
        length = _bucket(self._cache_buckets, need)
        size = _bucket(self._batch_buckets, len(spans))
        row = np.full(size, self._rows, np.int32)
        window = np.zeros((size, chunk), np.int32)
        first, counts = np.zeros((2, size), np.int32)
        for i, (target, start, tokens) in enumerate(spans):
            # At the end of the context the chunk moves left and repeats a few known columns.
            row[i], first[i] = target, min(start, length - chunk)
            known = tokens[first[i] : first[i] + chunk]
            window[i, : len(known)], counts[i] = known, len(known)
        arguments = jax.device_put((row, window, first, counts), self._device)
        program = self.programs.prefill(size, chunk, length)
        self._cache = program(self._weights, self._cache, *arguments)
        self.prefill_calls += 1

    def decode(self, running: list[Completion]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Samples 1 to `decode_steps` tokens for every completion.

        Returns:
          `(tokens [n], logp [n])` for each; the call ends early when a quarter has ended.
        """
        # One column more than it has left: an ended slot keeps writing behind its tokens.
        need = max(s.held + min(self._steps, s.budget - len(s.output) + 1) for s in running)
        size = _bucket(self._batch_buckets, len(running))
        length = _bucket(self._cache_buckets, need)
        program = self.programs.decode(size, length, any(s.filtered for s in running))
        # A quarter gone pays for leaving: callers may come back, or a smaller batch go on.
        leave_after = np.int32(max(1, len(running) // 4))
        arguments = jax.device_put((self._slots(running, size), leave_after), self._device)
        self._cache, *sampled = program(self._weights, self._cache, *arguments)
        tokens, logp, count = jax.device_get(sampled)
        self.decode_calls += 1
        new = [int(count[i]) - len(s.output) for i, s in enumerate(running)]
        return [(tokens[i, :n], logp[i, :n]) for i, n in enumerate(new)]

    def _slots(self, running: list[Completion], size: int) -> Slots:
        """Lays completions out as arrays; padding has nothing to generate."""
        slots = Slots(
            row=np.full(size, self._rows, np.int32),
            token=np.zeros(size, np.int32),
            length=np.zeros(size, np.int32),
            count=np.zeros(size, np.int32),
            budget=np.zeros(size, np.int32),
            stop_ids=np.full((size, self._max_stop_ids), -1, np.int32),
            temperature=np.ones(size, np.float32),
            top_p=np.ones(size, np.float32),
            top_k=np.full(size, self._model.vocab_size, np.int32),
            seed=np.zeros((size, 2), np.uint32),
        )
        for i, completion in enumerate(running):
            params = completion.request.sampling
            slots.row[i] = completion.row
            slots.token[i] = completion.last_token
            slots.length[i] = completion.held
            slots.count[i] = len(completion.output)
            slots.budget[i] = completion.budget
            slots.stop_ids[i, : len(completion.stop_ids)] = sorted(completion.stop_ids)
            slots.temperature[i] = params.temperature
            slots.top_p[i] = params.top_p
            if params.top_k != -1:
                slots.top_k[i] = params.top_k
            slots.seed[i] = sampling.seed_words(completion.request.seed)
        return slots


def _buckets(name: str, sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    """Sizes below `largest` in rising order, and `largest`."""
    if any(size < 1 for size in sizes):
        raise ValueError(f"{name} must be >= 1, got {tuple(sizes)}")
    return (*sorted({size for size in sizes if size < largest}), largest)


def _bucket(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds `size`."""
    return next(bucket for bucket in buckets if bucket >= size)


def _batches(items: list, buckets: tuple[int, ...]) -> list[list]:
    """Cuts a list so that only the last batch may fill less than half of its bucket."""
    batches = []
    while items:
        above = next((bucket for bucket in buckets if bucket >= len(items)), buckets[-1])
        below = [bucket for bucket in buckets if bucket <= len(items)]
        size = above if 2 * len(items) >= above or not below else below[-1]
        batches.append(items[:size])
        items = items[size:]
    return batches
