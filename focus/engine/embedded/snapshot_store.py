"""Prefix reuse for recurrent models: a memory fits only where somebody has kept it.

Keys and values of a prefix are columns that can be copied; a recurrent memory is one array that
has seen a whole prefix and cannot be cut back. So beside its live memory, which has seen all that
a row holds, there are *snapshots*: the memory at the end of each prompt, which is where the turns
of an episode end and where branches leave. A prompt reuses the longest prefix that has a memory.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from focus.engine.embedded.prefix_store import Placement, PrefixStore


class SnapshotStore(PrefixStore):
    """A `PrefixStore` whose prefixes end at memories.

    Memories are numbered: those of the rows first, the scratch row's behind them, then one that is
    always empty, then snapshots.

    Args:
      rows: number of rows.
      row_length: tokens a row has room for.
      snapshots: memories that are kept beside the live ones.
      wave_cost: see `PrefixStore`.
    """

    def __init__(self, rows: int, row_length: int, snapshots: int, wave_cost: int = 0):
        super().__init__(rows, row_length, wave_cost)
        self._empty = rows + 1
        self._live = np.zeros(rows, np.int64)  # tokens that a row's own memory has seen
        # Of each snapshot: the row whose prefix it has seen, how long that is, its last use.
        self._row = np.full(snapshots, -1, np.int64)
        self._position = np.zeros(snapshots, np.int64)
        self._snapshot_used = np.zeros(snapshots, np.int64)
        self._kept = np.zeros(snapshots, bool)  # read or written by this admission

    def place(self, prompt: np.ndarray, found: tuple[int, int] | None = None) -> Placement | None:
        """As `PrefixStore.place`; the placement says which memories to copy, too."""
        found = found or self.match(prompt)
        source, cached = found
        placement = super().place(prompt, found)
        if placement is None:
            return None
        row, held = placement.row, len(prompt) - 1
        memory, read = self._empty, -1  # the second: which snapshot, if it is one
        if cached:
            goes_on = row == source and cached == self._live[row]
            memory, read = (None, -1) if goes_on else self._snapshot_at(source, cached)
        kept = cached if row == source else 0
        self._row[(self._row == row) & (self._position > kept)] = -1
        snapshot = None
        if read >= 0:
            self._kept[read] = True
            self._use(read)
        # A prompt that ends at a snapshot needs no second one.
        there = (self._row == row) & (self._position == held)
        if held > 0 and not there.any() and (read < 0 or cached < held):
            snapshot = self._take(row, held)
        self._live[row] = held
        return dataclasses.replace(placement, memory=memory, snapshot=snapshot)

    def settle(self) -> None:
        """Ends an admission: everything placed has been computed."""
        super().settle()
        self._kept[:] = False

    def append(self, row: int, held: int, tokens: np.ndarray) -> None:
        """As `PrefixStore.append`; the live memory has seen the same tokens."""
        super().append(row, held, tokens)
        self._live[row] = self._length[row]

    def flush(self) -> None:
        """Forgets everything that idle rows hold (new weights)."""
        super().flush()
        self._live[~self._busy] = 0
        idle = (self._row >= 0) & ~self._busy[self._row]
        self._row[idle] = -1

    def _reusable(self, common: np.ndarray) -> np.ndarray:
        live = ~self._busy & (self._live == self._length) & (common == self._length)
        usable = np.where(live, common, 0)
        fits = (self._row >= 0) & (self._position <= common[self._row])
        np.maximum.at(usable, self._row[fits], self._position[fits])
        return usable

    def _snapshot_at(self, row: int, position: int) -> tuple[int, int]:
        """Number among all memories, and among snapshots."""
        found = int(np.flatnonzero((self._row == row) & (self._position == position))[0])
        return self._empty + 1 + found, found

    def _take(self, row: int, position: int) -> int | None:
        """A place for a new snapshot, or None where this admission needs all of them."""
        idle = np.flatnonzero(~self._kept)
        if not len(idle):
            return None
        # Free ones first, then the least recently used.
        order = np.where(self._row[idle] < 0, -1, self._snapshot_used[idle])
        chosen = int(idle[np.argmin(order)])
        self._row[chosen], self._position[chosen], self._kept[chosen] = row, position, True
        self._use(chosen)
        return self._empty + 1 + chosen

    def _use(self, snapshot: int) -> None:
        self._snapshot_used[snapshot] = self._clock
