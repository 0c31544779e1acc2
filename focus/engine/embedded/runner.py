"""Owns the weights and the cache on the devices, and lays work out in bucketed batches.

Between the scheduler, which thinks in completions and rows, and the programs, which exist for a
few shapes only: lists are cut and padded here. Padding reads and writes one scratch row. All
devices run the same program at the same time, each on rows of its own, so the longest list and
the longest sequence among them decide which.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import jax
import numpy as np

from focus.engine.completion import Completion
from focus.engine.embedded import sampling
from focus.engine.embedded.programs import Programs, Slots
from focus.policy import model as models


class Runner:
    """Runs fork, remember, prefill and decode over rows of a cache.

    Args:
      model: shape of the model.
      devices: what to run on; numbers of rows and memories are those of one of them.
      rows: rows that completions may use.
      row_length: tokens a row has room for.
      snapshots: memories of a recurrent model beside those of the rows.
      max_running: most completions of one decode call and most pairs of one fork.
      cache_buckets: numbers of cache columns that a call may attend to.
      prefill_buckets: lengths of a prefill chunk, none above the smallest cache bucket.
      batch_buckets: numbers of rows of a call.
      decode_steps: tokens a completion may gain in one decode call.
      max_stop_ids: stop token ids of a completion that its program looks for.

    Raises:
      ValueError: a bucket below 1.
    """

    def __init__(
        self,
        model: models.Config,
        *,
        devices: Sequence[jax.Device],
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
        self._num_devices = len(devices)
        self.programs = Programs(
            model,
            rows=rows + 1,
            row_length=row_length,
            num_memories=self._num_memories,
            steps=self._steps,
            max_stop_ids=max_stop_ids,
            max_forks=max_running,
            devices=devices,
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
        self._cache = self.programs.new_cache()

    def install(self, params: models.Params) -> None:
        """Serves copies of these parameters from now on."""
        params = self.programs.replicate(params)
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

    def fork(self, pairs: list[tuple[int, int, int]]) -> None:
        """Copies rows: `(device, source, target)`, at most `max_running` pairs a device."""
        if pairs:
            self._cache = self.programs.fork()(self._cache, *self._pairs(pairs))

    def remember(self, pairs: list[tuple[int, int, int]]) -> None:
        """Copies memories: `(device, source, target)`, at most `max_running` pairs a device."""
        if pairs:
            self._cache = self.programs.remember()(self._cache, *self._pairs(pairs))

    def _pairs(self, pairs: list[tuple[int, int, int]]) -> tuple[jax.Array, ...]:
        source, target = np.full((2, self._num_devices, self._max_running), self._rows, np.int32)
        count = np.zeros(self._num_devices, np.int32)
        for device, *pair in pairs:
            source[device, count[device]], target[device, count[device]] = pair
            count[device] += 1
        return self.programs.spread(source.ravel(), target.ravel(), count)

    def prefill(self, spans: list[tuple[int, int, int, np.ndarray]]) -> None:
        """Computes keys and values of known tokens, in chunks.

        Args:
          spans: `(device, row, start, tokens)`: the row holds `tokens[:start]` and lacks the rest.
        """
        largest = self._prefill_buckets[-1]
        while spans := [span for span in spans if span[2] < len(span[3])]:
            chunks = collections.defaultdict(lambda: [[] for _ in range(self._num_devices)])
            for device, row, start, tokens in spans:
                need = min(len(tokens) - start, largest)
                chunk = _bucket(self._prefill_buckets, need)
                chunks[chunk][device].append((row, start, tokens))
            for chunk, members in sorted(chunks.items()):
                for batch in _batches(members, self._batch_buckets):
                    self._prefill_batch(chunk, batch)
            spans = [(device, row, start + largest, t) for device, row, start, t in spans]

    def _prefill_batch(self, chunk: int, spans: list[list[tuple[int, int, np.ndarray]]]) -> None:
        furthest = max(start for of_device in spans for _, start, _ in of_device)
        length = _bucket(self._cache_buckets, min(furthest + chunk, self._row_length))
        size = _bucket(self._batch_buckets, max(map(len, spans)))
        row = np.full((self._num_devices, size), self._rows, np.int32)
        window = np.zeros((self._num_devices, size, chunk), np.int32)
        first, counts = np.zeros((2, self._num_devices, size), np.int32)
        for device, of_device in enumerate(spans):
            for i, (target, start, tokens) in enumerate(of_device):
                # At the end of the context the chunk moves left and repeats a few known columns.
                at = (device, i)
                row[at], first[at] = target, min(start, length - chunk)
                known = tokens[first[at] : first[at] + chunk]
                window[at][: len(known)], counts[at] = known, len(known)
        arguments = self.programs.spread(
            row.ravel(), window.reshape(-1, chunk), first.ravel(), counts.ravel()
        )
        program = self.programs.prefill(size, chunk, length)
        self._cache = program(self._weights, self._cache, *arguments)
        self.prefill_calls += 1

    def decode(self, running: list[Completion]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Samples up to `decode_steps` tokens for every completion, one or more on each device.

        Returns:
          `(tokens [n], logp [n])` for each; a device leaves early when a third has ended.
        """
        by_device = [
            [s for s in running if s.device == device] for device in range(self._num_devices)
        ]
        # One column more than it has left: an ended slot keeps writing behind its tokens.
        need = max(s.held + min(self._steps, s.budget - len(s.output) + 1) for s in running)
        size = _bucket(self._batch_buckets, max(map(len, by_device)))
        length = _bucket(self._cache_buckets, need)
        program = self.programs.decode(size, length, any(s.filtered for s in running))
        # A third gone pays for leaving: callers may come back, or a smaller batch go on.
        leave_after = np.array([max(1, len(s) // 3) for s in by_device], np.int32)
        slots = [self._slots(of_device, size) for of_device in by_device]
        slots = jax.tree.map(lambda *x: np.concatenate(x), *slots)
        arguments = self.programs.spread(slots, leave_after)
        self._cache, *sampled = program(self._weights, self._cache, *arguments)
        tokens, logp, count = jax.device_get(sampled)
        self.decode_calls += 1
        place = {
            completion: device * size + i
            for device, of_device in enumerate(by_device)
            for i, completion in enumerate(of_device)
        }
        new = [(place[s], int(count[place[s]]) - len(s.output)) for s in running]
        return [(tokens[i, :n], logp[i, :n]) for i, n in new]

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
            known = sorted(completion.stop_ids)[: self._max_stop_ids]
            slots.stop_ids[i, : len(known)] = known
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


def _batches(lists: list[list], buckets: tuple[int, ...]) -> list[list[list]]:
    """Cuts lists alike, so that the longest part of only the last batch may fill less than half
    of its bucket."""
    batches = []
    while most := max(map(len, lists)):
        above = next((bucket for bucket in buckets if bucket >= most), buckets[-1])
        below = [bucket for bucket in buckets if bucket <= most]
        size = above if 2 * most >= above or not below else below[-1]
        batches.append([items[:size] for items in lists])
        lists = [items[size:] for items in lists]
    return batches
