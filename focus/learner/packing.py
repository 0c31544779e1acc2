"""Ragged trajectories to rows of fixed shape, and back.

A trajectory is one token sequence per span (a compaction starts a new one). A branch shares the
tokens of its parent up to the state that it left from, and rollouts of one task share their
first prompt. Cut at those points the sequences become *pieces* that hang on one another:

    prompt ── rollout 0 ─┬────────────────          a piece is one node of a row's prefix tree;
          │              └── branch 0.1              each of its tokens is stored once
          └── rollout 1 ───────────

Subtrees of pieces are packed into rows, each at the place where it costs the fewest tokens.
A piece in another row than the piece it hangs on needs that prefix as context: it is repeated
there, is not trained again, and its states are not counted again.

Everything here runs on the host in NumPy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from focus.learner import sequences
from focus.types import Array, Trajectory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed rows, as the model reads them.

    Attributes:
      tokens: [R, L] int32, 0 at padding.
      positions: [R, L] int32 rotary position: depth in the token's own sequence.
      parent: [R, L] int32 row index of the token before, -1 at the start and at padding.
      node_id: [R, L] int32, -1 at padding.
      visible_until: [R, N, N] int32, see `focus.policy.attention`.
      generated_mask: [R, L] bool, tokens that the policy generated: each once over all rows.
      state_pos: [R, P] int32 row index of the last prompt token of a state, -1 where none.
    """

    tokens: Array
    positions: Array
    parent: Array
    node_id: Array
    visible_until: Array
    generated_mask: Array
    state_pos: Array

    @property
    def num_rows(self) -> int:
        """R, empty rows included."""
        return self.tokens.shape[0]


def empty_rows(num_rows: int, row_length: int, max_nodes: int, max_states: int) -> Rows:
    """Rows of nothing but padding."""
    return Rows(
        tokens=np.zeros((num_rows, row_length), np.int32),
        positions=np.zeros((num_rows, row_length), np.int32),
        parent=np.full((num_rows, row_length), -1, np.int32),
        node_id=np.full((num_rows, row_length), -1, np.int32),
        visible_until=np.zeros((num_rows, max_nodes, max_nodes), np.int32),
        generated_mask=np.zeros((num_rows, row_length), bool),
        state_pos=np.full((num_rows, max_states), -1, np.int32),
    )


def take_rows(rows: Rows, indices: np.ndarray, num_rows: int) -> Rows:
    """The rows at `indices`, followed by empty ones up to `num_rows`."""
    padding = empty_rows(
        num_rows - len(indices),
        rows.tokens.shape[1],
        rows.visible_until.shape[1],
        rows.state_pos.shape[1],
    )
    return jax.tree.map(lambda x, pad: np.concatenate([x[indices], pad]), rows, padding)


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Packed rows with the way back to trajectories.

    Attributes:
      rows: what the model reads.
      token_index: [n, 2] trajectory and place on its token axis, of each generated token.
      token_place: [n, 2] row and row index of the same token.
      state_index: [m, 2] trajectory and state, of each state that has a position.
      state_place: [m, 2] row and p in [0, P) of the same state; a branch's first state is the
        state of its parent and has the same place.
      num_trajectories: B.
      num_tokens: policy-generated tokens of the longest trajectory.
      num_states: states of the trajectory with the most, S + 1.
      used_tokens: tokens in the rows that are not padding.
      repeated_tokens: those of them that stand in another row, too, and are context here.
      clipped_states: final states whose prompt is longer than a row. Nothing was generated
        from them; their value is read at the last token that fits.
    """

    rows: Rows
    token_index: np.ndarray
    token_place: np.ndarray
    state_index: np.ndarray
    state_place: np.ndarray
    num_trajectories: int
    num_tokens: int
    num_states: int
    used_tokens: int
    repeated_tokens: int
    clipped_states: int

    @property
    def packing_efficiency(self) -> float:
        """Tokens that are there for the first time, as a share of R * L."""
        return (self.used_tokens - self.repeated_tokens) / self.rows.tokens.size

    def to_rows(self, values: np.ndarray) -> np.ndarray:
        """[B, L] on the token axis of trajectories to [R, L] on rows; 0 elsewhere."""
        values = np.asarray(values)
        self._check_rank(values, 2)
        out = np.zeros(self.rows.tokens.shape, values.dtype)
        out[tuple(self.token_place.T)] = values[tuple(self.token_index.T)]
        return out

    def to_trajectories(
        self, values: np.ndarray, shape: tuple[int, int] | None = None, fill: float = 0.0
    ) -> np.ndarray:
        """[R, L] on rows to [B, L] on the token axis of trajectories.

        Args:
          values: [R, L].
          shape: `(B, L)` of the result, as of a `CreditBatch`; None is as small as possible.
          fill: what stands where there is no token.

        Returns:
          [B, L] in the dtype of `values`.
        """
        values = np.asarray(values)
        self._check_rank(values, 2)
        shape = shape or (self.num_trajectories, self.num_tokens)
        return self._scatter(values, shape, self.token_index, self.token_place, fill)

    def states_to_trajectories(
        self, values: np.ndarray, shape: tuple[int, int] | None = None, fill: float = 0.0
    ) -> np.ndarray:
        """[R, P, ...] at states of rows to [B, S + 1, ...] at states of trajectories.

        Args:
          values: [R, P, ...].
          shape: `(B, S + 1)` of the result; None is as small as possible.
          fill: what stands at states without a position (terminal ones and padding).

        Returns:
          [B, S + 1, ...] in the dtype of `values`.
        """
        shape = shape or (self.num_trajectories, self.num_states)
        return self._scatter(np.asarray(values), shape, self.state_index, self.state_place, fill)

    def state_mask(self, shape: tuple[int, int] | None = None) -> np.ndarray:
        """[B, S + 1] bool: states that have a position."""
        return self.states_to_trajectories(np.ones(self.rows.state_pos.shape, bool), shape, False)

    def _check_rank(self, values: np.ndarray, rank: int) -> None:
        if values.ndim != rank:
            raise ValueError(f"expected {rank} axes, got an array of shape {values.shape}")

    def _scatter(self, values, shape, index, place, fill):
        needed = tuple(index.max(axis=0) + 1) if len(index) else (0, 0)
        if any(n > s for n, s in zip(needed, shape)):
            raise ValueError(
                f"shape {tuple(shape)} is too small for {tuple(int(n) for n in needed)}: "
                "use the bucket that the batch was made with"
            )
        out = np.full((*shape, *values.shape[2:]), fill, values.dtype)
        out[tuple(index.T)] = values[tuple(place.T)]
        return out


class _Row:
    """A row being filled: which pieces it holds, and how many tokens of each."""

    def __init__(self):
        self.held: dict[int, int] = {}  # piece -> tokens, from its start
        self.own: set[int] = set()  # pieces placed here; the others are context
        self.tokens = 0
        self.states = 0


class _Packer:
    """Places subtrees of pieces into rows."""

    def __init__(self, pieces: Sequence[sequences.Piece], row_length, max_nodes, max_states):
        self.pieces = pieces
        self.limits = (row_length, max_nodes, max_states)
        self.rows: list[_Row] = []
        self.children: list[list[int]] = [[] for _ in pieces]
        self.subtree: list[list[int]] = [[i] for i in range(len(pieces))]
        self.size = [len(p.tokens) for p in pieces]
        for i in reversed(range(len(pieces))):  # a piece comes after the one it hangs on
            self.children[i].sort(key=lambda c: (-self.size[c], c))
            if (parent := pieces[i].parent) is not None:
                self.children[parent].append(i)
                self.subtree[parent].extend(self.subtree[i])
                self.size[parent] += self.size[i]

    def pack(self) -> list[_Row]:
        roots = [i for i, piece in enumerate(self.pieces) if piece.parent is None]
        for root in sorted(roots, key=lambda i: (-self.size[i], i)):
            self._place(root)
        return self.rows

    def _place(self, root: int) -> None:
        """The whole subtree into one row if it fits anywhere, else its pieces one by one."""
        if self._place_together(self.subtree[root]):
            return
        if not self._place_together([root]):
            self._refuse(root)
        for child in self.children[root]:
            self._place(child)

    def _place_together(self, members: list[int]) -> bool:
        best = None
        for row in self.rows:
            added = self._added(row, members)
            if added is not None:
                # Fewest new tokens (a prefix that is there need not be repeated), then best fit.
                rank = (added, self.limits[0] - row.tokens - added)
                if best is None or rank < best[0]:
                    best = (rank, row)
        if best is None:
            if self._added(_Row(), members) is None:
                return False
            best = (None, _Row())
            self.rows.append(best[1])
        self._add(best[1], members)
        return True

    def _context(self, row: _Row, members: list[int]) -> dict[int, int]:
        """Tokens of other pieces that `members` look into and that `row` does not hold yet."""
        inside, needed = set(members), {}
        for i in members:
            piece = self.pieces[i]
            while piece.parent is not None and piece.parent not in inside:
                parent, cut = piece.parent, piece.cut
                if max(row.held.get(parent, 0), needed.get(parent, 0)) >= cut:
                    break
                needed[parent] = cut
                piece = self.pieces[parent]
        return needed

    def _added(self, row: _Row, members: list[int]) -> int | None:
        """Tokens that placing `members` would add to `row`; None if they do not fit."""
        row_length, max_nodes, max_states = self.limits
        own = sum(len(self.pieces[i].tokens) for i in members)
        if row.tokens + own > row_length:
            return None
        states = row.states + sum(len(self.pieces[i].states) for i in members)
        context = self._context(row, members)
        nodes = len(row.held.keys() | context.keys()) + len(members)
        added = own + sum(n - row.held.get(i, 0) for i, n in context.items())
        if row.tokens + added > row_length or nodes > max_nodes or states > max_states:
            return None
        return added

    def _add(self, row: _Row, members: list[int]) -> None:
        row.tokens += self._added(row, members)
        row.held.update(self._context(row, members))
        row.held.update({i: len(self.pieces[i].tokens) for i in members})
        row.own.update(members)
        row.states += sum(len(self.pieces[i].states) for i in members)

    def _refuse(self, index: int) -> None:
        _, max_nodes, max_states = self.limits
        piece, ancestors = self.pieces[index], len(self._context(_Row(), [index]))
        if len(piece.states) > max_states:
            raise ValueError(
                f"trajectory {piece.owner}: {len(piece.states)} states in one sequence do not fit "
                f"into a row of {max_states}; raise learner.max_states"
            )
        raise ValueError(
            f"trajectory {piece.owner}: a sequence of {ancestors + 1} nested nodes does not fit "
            f"into a row of {max_nodes}; raise learner.max_nodes"
        )


def pack_trajectories(
    trajectories: Sequence[Trajectory],
    *,
    row_length: int,
    max_nodes: int,
    max_states: int,
    rows_multiple: int = 1,
    share_prefixes: bool = True,
) -> PackedRows:
    """Packs trajectories and their branches into rows, every shared prefix once.

    Largest subtrees first; each goes to the row where it adds the fewest tokens, ties to the
    fullest one (best fit decreasing, this project's rule for shared prefixes).

    Args:
      trajectories: B of them, base rollouts and branches. A branch whose parent is not among
        them is packed as a sequence of its own, its prompt being context.
      row_length: L.
      max_nodes: N, prefix-tree nodes of a row.
      max_states: P, states of a row.
      rows_multiple: R is rounded up to a multiple of it with empty rows; at least one multiple.
      share_prefixes: False stores every sequence whole, one node each, for recurrent models,
        whose memory cannot begin in the middle of a row.

    Returns:
      Packed rows; row order and content depend on nothing but the arguments.

    Raises:
      ValueError: a sequence is longer than a row; a prompt does not extend what came before it
        in its span; a branch does not start with its parent's tokens.
    """
    pieces, clipped = sequences.cut_into_pieces(trajectories, row_length, share_prefixes)
    packed = _Packer(pieces, row_length, max_nodes, max_states).pack()
    num_rows = max(1, -(-len(packed) // rows_multiple)) * rows_multiple
    rows = empty_rows(num_rows, row_length, max_nodes, max_states)
    token_index, token_place, state_index, state_place = [], [], [], []
    for r, row in enumerate(packed):
        starts = _lay_out(rows, r, row, pieces)
        slot = 0
        for i in sorted(row.own):
            for run in pieces[i].generated:
                offsets = np.arange(run.length)
                places = starts[i] + run.start + offsets
                rows.generated_mask[r, places] = True
                token_place.append(np.stack([np.full_like(places, r), places], 1))
                token_index.append(
                    np.stack([np.full_like(places, run.trajectory), run.first + offsets], 1)
                )
            for at, aliases in sorted(pieces[i].states.items()):
                rows.state_pos[r, slot] = starts[i] + at
                state_index.extend(aliases)
                state_place.extend([(r, slot)] * len(aliases))
                slot += 1
    used = sum(row.tokens for row in packed)
    return PackedRows(
        rows=rows,
        token_index=np.concatenate([np.zeros((0, 2), np.int64), *token_index]),
        token_place=np.concatenate([np.zeros((0, 2), np.int64), *token_place]),
        state_index=np.array(state_index, np.int64).reshape(-1, 2),
        state_place=np.array(state_place, np.int64).reshape(-1, 2),
        num_trajectories=len(trajectories),
        num_tokens=max((t.num_tokens for t in trajectories), default=0),
        num_states=max((len(t.states) for t in trajectories), default=0),
        used_tokens=used,
        repeated_tokens=used - sum(len(piece.tokens) for piece in pieces),
        clipped_states=clipped,
    )


def _lay_out(rows: Rows, r: int, row: _Row, pieces: Sequence[sequences.Piece]) -> dict[int, int]:
    """Writes the tokens of one row; returns the row index at which each piece starts."""
    starts, nodes, end = {}, {}, 0
    for node, i in enumerate(sorted(row.held)):  # pieces are numbered parents first
        piece, count = pieces[i], row.held[i]
        at = slice(end, end + count)
        rows.tokens[r, at] = piece.tokens[:count]
        rows.positions[r, at] = piece.depth + np.arange(count)
        rows.parent[r, at] = np.arange(end - 1, end + count - 1)
        rows.node_id[r, at] = node
        if piece.parent is None:
            rows.parent[r, end] = -1
        else:
            above, cut = nodes[piece.parent], starts[piece.parent] + piece.cut
            rows.parent[r, end] = cut - 1
            rows.visible_until[r, node] = rows.visible_until[r, above]
            rows.visible_until[r, node, above] = cut
        rows.visible_until[r, node, node] = rows.tokens.shape[1]
        starts[i], nodes[i] = end, node
        end += count
    return starts
