"""Which tokens' keys and values the rows of a cache hold, and which row a new prompt gets.

Plain NumPy bookkeeping: the arrays themselves are the engine's. Every row is either busy (a
sequence is running in it) or idle, and an idle row keeps what it holds until somebody else
needs the room, least recently used first.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where a prompt goes.

    Attributes:
      row: the row that it owns from now on.
      source: row whose first `cached` tokens must be copied to `row` first; None when they are
        there already or when nothing is reused.
      cached: tokens that need not be computed.
      wave: 0 when the source is complete now, else one more than the wave of the source: it is
        itself filled in the same admission.
      memory: of a recurrent model, the memory to start from; None to go on with the row's own.
      snapshot: of a recurrent model, where to keep the memory at the end of the prompt.
    """

    row: int
    source: int | None
    cached: int
    wave: int
    memory: int | None = None
    snapshot: int | None = None


class PrefixStore:
    """Prefix lookup and least-recently-used eviction over rows of equal length.

    Args:
      rows: number of rows.
      row_length: tokens a row has room for.
      wave_cost: tokens that must be saved to make waiting for a row of the same admission
        worth a device call of its own.
    """

    def __init__(self, rows: int, row_length: int, wave_cost: int = 0):
        self._wave_cost = wave_cost
        self._tokens = np.zeros((rows, row_length), np.int32)
        self._length = np.zeros(rows, np.int64)
        self._busy = np.zeros(rows, bool)
        self._last_used = np.zeros(rows, np.int64)  # a counter: no wall clock in decisions
        self._pinned = np.zeros(rows, bool)
        self._wave = np.full(rows, -1, np.int64)
        self._clock = 0

    def match(self, prompt: np.ndarray) -> tuple[int, int]:
        """Row with the longest prefix in common with all but the last token of the prompt.

        The last token is always computed: its hidden state gives the first logits. A row that
        is itself being filled counts `wave_cost` less for every wave that it waits for.

        Returns:
          `(row, common)`; between equals a row that the prompt merely extends comes first.
        """
        usable = prompt[:-1]
        equal = self._tokens[:, : len(usable)] == usable
        common = np.minimum(np.logical_and.accumulate(equal, axis=1).sum(axis=1), self._length)
        common = self._reusable(common)
        extends = ~self._busy & (common == self._length)
        saved = common - self._wave_cost * (self._wave + 1)
        row = int(np.argmax(2 * saved + extends))
        return row, int(common[row])

    def place(self, prompt: np.ndarray, found: tuple[int, int] | None = None) -> Placement | None:
        """Gives a prompt a row and records its tokens as held there.

        Rows placed before `settle` form one admission; they may be each other's sources.

        Args:
          prompt: [L] int32.
          found: what `match` says of it now, where that is known.

        Returns:
          The placement, or None when every idle row is a source of this admission: try again
          after `settle`.
        """
        source, cached = found or self.match(prompt)
        row = None
        if cached and not self._busy[source] and cached == self._length[source]:
            row = source
        else:
            idle = ~self._busy & ~self._pinned
            others = idle.copy()
            if cached:
                others[source] = False
            if others.any():
                row = int(np.argmin(np.where(others, self._last_used, np.iinfo(np.int64).max)))
            elif idle.any():
                row = source  # the last idle row is the source: cut it back to what is shared
        if row is None:
            return None
        wave = int(self._wave[source]) + 1 if cached else 0
        copied_from = source if cached and row != source else None
        if copied_from is not None:
            self._pinned[source] = True
            self._touch(source)
        self._tokens[row, : len(prompt)] = prompt
        self._length[row] = len(prompt) - 1
        self._busy[row] = True
        self._wave[row] = wave
        self._touch(row)
        return Placement(row=row, source=copied_from, cached=cached, wave=wave)

    def settle(self) -> None:
        """Ends an admission: everything placed has been computed."""
        self._pinned[:] = False
        self._wave[:] = -1

    def append(self, row: int, held: int, tokens: np.ndarray) -> None:
        """Records sampled tokens of a row that held `held` and one more that was known.

        Decoding computes the known token and all sampled ones but the last.
        """
        self._tokens[row, held + 1 : held + 1 + len(tokens)] = tokens
        self._length[row] = held + len(tokens)

    def release(self, row: int, length: int) -> None:
        """Ends a sequence: the row keeps at most its first `length` tokens and becomes idle."""
        self._length[row] = min(self._length[row], length)
        self._busy[row] = False
        self._touch(row)

    def flush(self) -> None:
        """Forgets everything that idle rows hold (new weights)."""
        self._length[~self._busy] = 0
        self._last_used[~self._busy] = 0

    def _reusable(self, common: np.ndarray) -> np.ndarray:
        """How much of what rows have in common with a prompt it can start from: all of it."""
        return common

    def _touch(self, row: int) -> None:
        self._clock += 1
        self._last_used[row] = self._clock
