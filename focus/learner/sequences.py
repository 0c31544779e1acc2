"""Trajectories as token sequences, cut into pieces where sequences part.

Token in, token out: the tokens of a span are its last prompt and output, and every prompt of
the span must extend the previous prompt and output, token for token. Nothing is re-tokenised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from focus.types import State, Trajectory


@dataclasses.dataclass(frozen=True)
class GeneratedRun:
    """Consecutive tokens that the policy generated.

    Attributes:
      start: index in the piece (in the sequence, before it is cut).
      length: number of tokens.
      trajectory: index of the trajectory.
      first: place of the run's first token on that trajectory's token axis.
    """

    start: int
    length: int
    trajectory: int
    first: int


@dataclasses.dataclass
class Piece:
    """Tokens that are stored once, and the piece that they hang on.

    Attributes:
      owner: id of the trajectory they come from, for messages.
      tokens: the tokens.
      depth: tokens that precede the piece in its sequence.
      parent: index of the piece that holds the token before the first one, None at a start.
      cut: how many tokens of `parent` precede the first one; at least 1 where there is a parent.
      generated: runs of policy-generated tokens, in order.
      states: index of a state's last prompt token -> the (trajectory, state) pairs it stands for.
    """

    owner: str
    tokens: tuple[int, ...]
    depth: int = 0
    parent: int | None = None
    cut: int = 0
    generated: list[GeneratedRun] = dataclasses.field(default_factory=list)
    states: dict[int, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Sequence:
    """One span of a trajectory before it is cut."""

    tokens: list[int]
    generated: list[GeneratedRun]
    states: list[tuple[int, int]]  # (state, index of its last prompt token)


def _spans(index: int, trajectory: Trajectory, row_length: int) -> tuple[list[_Sequence], int]:
    """Sequences of a trajectory, and 1 if its final state had to be clipped to the row."""
    sequences: list[_Sequence] = []
    span, first, clipped = None, 0, 0

    def extend(prompt: tuple[int, ...], new_span: int, what: str) -> _Sequence:
        nonlocal span
        if new_span != span:
            sequences.append(_Sequence([], [], []))
            span = new_span
        sequence = sequences[-1]
        known = len(sequence.tokens)
        if list(prompt[:known]) != sequence.tokens:
            differs = next(
                (i for i, (a, b) in enumerate(zip(prompt, sequence.tokens)) if a != b), len(prompt)
            )
            raise ValueError(
                f"trajectory {trajectory.id}: {what} does not extend the {known} tokens before it "
                f"in span {span}: they part at token {differs}. Prompts must be built from token "
                "ids, never from text; a context manager that rewrites its past starts a new span"
            )
        sequence.tokens.extend(prompt[known:])
        return sequence

    def add_state(j: int, state: State, prompt: tuple[int, ...]) -> None:
        if prompt:
            sequence = extend(prompt, state.span, f"the prompt of state {j}")
            sequence.states.append((j, len(sequence.tokens) - 1))

    for j, segment in enumerate(trajectory.segments):
        add_state(j, trajectory.states[j], trajectory.states[j].prompt_ids)
        for generation in segment.generations:
            what = f"the {generation.kind} prompt of segment {j}"
            sequence = extend(generation.prompt_ids, generation.span, what)
            if not sequence.tokens:
                raise ValueError(f"trajectory {trajectory.id}: segment {j} has an empty prompt")
            length = len(generation.output_ids)
            sequence.generated.append(GeneratedRun(len(sequence.tokens), length, index, first))
            sequence.tokens.extend(generation.output_ids)
            first += length
    for number, sequence in enumerate(sequences):
        if len(sequence.tokens) > row_length:
            raise ValueError(
                f"trajectory {trajectory.id}: span {number} has {len(sequence.tokens)} tokens but "
                f"a row holds {row_length}; raise learner.row_length or lower the context limit"
            )
    final = trajectory.states[-1]
    if len(final.prompt_ids) > row_length:
        clipped = 1
    add_state(len(trajectory.segments), final, final.prompt_ids[:row_length])
    return sequences, clipped


def cut_into_pieces(
    trajectories: Sequence[Trajectory], row_length: int, share_prefixes: bool = True
) -> tuple[list[Piece], int]:
    """Cuts the sequences of all trajectories at the points where they part.

    A branch hangs on its parent at the state that it left from. Base trajectories with the same
    first prompt hang on one piece that holds it.

    Args:
      trajectories: base rollouts and branches in any order.
      row_length: longest allowed sequence.
      share_prefixes: False leaves every sequence whole.

    Returns:
      Pieces, each after the one it hangs on, and the number of clipped final states.

    Raises:
      ValueError: see `focus.learner.packing.pack_trajectories`.
    """
    ids = {trajectory.id: i for i, trajectory in enumerate(trajectories)}
    if len(ids) != len(trajectories):
        raise ValueError("two trajectories have the same id; ids are unique in a run")
    pieces: list[Piece] = []
    # Per trajectory and state: the piece and the index there of the state's last prompt token.
    places: list[dict[int, tuple[int, int]]] = [{} for _ in trajectories]
    shared_prompts = _shared_first_prompts(trajectories, ids)
    trunks: dict[tuple[int, ...], tuple[int, int]] = {}
    clipped = 0
    for index in _parents_first(trajectories, ids):
        trajectory = trajectories[index]
        sequences, was_clipped = _spans(index, trajectory, row_length)
        clipped += was_clipped
        hang_on = None
        prompt = trajectory.states[0].prompt_ids
        if not share_prefixes:
            pass
        elif trajectory.parent in ids:
            hang_on = _branch_point(pieces, places[ids[trajectory.parent]], trajectory)
        elif prompt in shared_prompts:
            if prompt not in trunks:
                pieces.append(Piece(trajectory.id, prompt[:row_length]))
                trunks[prompt] = (len(pieces) - 1, len(pieces[-1].tokens) - 1)
            hang_on = trunks[prompt]
        for sequence in sequences:
            _add_piece(pieces, places[index], index, trajectory.id, sequence, hang_on)
            hang_on = None  # after a compaction nothing is shared
    return pieces, clipped


def _branch_point(pieces, parent_places, branch: Trajectory) -> tuple[int, int]:
    """Piece and index of the last token that a branch shares with its parent."""
    place = parent_places.get(branch.parent_state)
    state = f"state {branch.parent_state} of {branch.parent}"
    if place is None:
        raise ValueError(f"branch {branch.id} left {state}, which has no prompt to continue from")
    if _tokens_up_to(pieces, *place) != list(branch.states[0].prompt_ids):
        raise ValueError(f"branch {branch.id} does not start with the prompt of {state}")
    return place


def _add_piece(pieces, places, index, owner, sequence, hang_on) -> None:
    """Stores what a sequence adds to the piece it hangs on, `hang_on = (piece, last index)`."""
    depth = 0
    if hang_on is not None:
        depth = pieces[hang_on[0]].depth + hang_on[1] + 1
    if len(sequence.tokens) > depth:
        pieces.append(
            Piece(
                owner=owner,
                tokens=tuple(sequence.tokens[depth:]),
                depth=depth,
                parent=None if hang_on is None else hang_on[0],
                cut=0 if hang_on is None else hang_on[1] + 1,
                generated=[
                    dataclasses.replace(run, start=run.start - depth)
                    for run in sequence.generated
                    if run.length
                ],
            )
        )
    for state, at in sequence.states:
        place = hang_on if at < depth else (len(pieces) - 1, at - depth)
        places[state] = place
        pieces[place[0]].states.setdefault(place[1], []).append((index, state))


def _shared_first_prompts(trajectories, ids) -> set[tuple[int, ...]]:
    """First prompts that two or more sequences without a parent start with."""
    seen, shared = set(), set()
    for trajectory in trajectories:
        if trajectory.parent not in ids and (prompt := trajectory.states[0].prompt_ids):
            (shared if prompt in seen else seen).add(prompt)
    return shared


def _parents_first(trajectories, ids) -> list[int]:
    """Indices in an order in which every parent precedes its branches."""
    order: list[int] = []
    done: set[int] = set()
    for index in range(len(trajectories)):
        chain = []
        while index is not None and index not in done:
            if index in chain:
                raise ValueError(f"trajectory {trajectories[index].id} is its own ancestor")
            chain.append(index)
            index = ids.get(trajectories[index].parent)
        order.extend(reversed(chain))
        done.update(chain)
    return order


def _tokens_up_to(pieces: list[Piece], piece: int, last: int) -> list[int]:
    """The sequence from its start to token `last` of a piece."""
    parts = []
    while piece is not None:
        parts.append(pieces[piece].tokens[: last + 1])
        piece, last = pieces[piece].parent, pieces[piece].cut - 1
    return [token for part in reversed(parts) for token in part]
