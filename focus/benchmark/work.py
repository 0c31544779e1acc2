"""The work that is timed: how agents play, drawn once and the same for every side.

    dense      rows of one length, nothing shared, every token trained: raw speed
    rollouts   agents that write a turn, read an observation and go on, each with branches from
               one of its states: prefixes are shared, lengths differ, and only what the policy
               wrote is trained

`rollouts` draws uniformly: prompts of 24 to 48 tokens, 2 to 7 turns of 4 to 20 tokens, each but
the last followed by an observation of 10 to 40 tokens, and for each base rollout 1, 2 or 4
continuations from one state. A side is paid for tokens that the policy wrote and for nothing else.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from focus.policy.transformer import ModelConfig
from focus.types import Generation, Segment, State, Trajectory

TASKS = ("update", "score", "decode")
SHAPES = ("dense", "rollouts")
SIZES = {
    "tiny": ModelConfig(  # the quickstart's
        vocab_size=768,
        d_model=192,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        d_ff=512,
        max_context=512,
    ),
    "smollm2": ModelConfig(
        vocab_size=49152,
        d_model=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        d_ff=1536,
        max_context=512,
        rope_theta=1e5,
        qk_norm=False,
    ),
}
ROLLOUT_TOKENS = 48 + 7 * 20 + 6 * 40  # of the longest sequence that `rollouts` can draw


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the policy writes, and what it reads before its next turn."""

    written: tuple[int, ...]
    read: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Play:
    """One rollout.

    Attributes:
      prompt: tokens before the first turn; of a branch, those that its parent had there.
      turns: at least one.
      parent: index of the rollout that a branch left, None for a base rollout.
      parent_turn: the parent's turns before the state that it left from.
    """

    prompt: tuple[int, ...]
    turns: tuple[Turn, ...]
    parent: int | None = None
    parent_turn: int = 0

    def contexts(self) -> list[tuple[int, ...]]:
        """Tokens before each turn."""
        out = [self.prompt]
        for turn in self.turns[:-1]:
            out.append(out[-1] + turn.written + turn.read)
        return out

    def sequence(self) -> tuple[np.ndarray, np.ndarray]:
        """`(tokens [n], written [n] bool)`: the whole text, and what the policy wrote of it."""
        contexts = self.contexts()
        tokens = contexts[-1] + self.turns[-1].written
        written = np.zeros(len(tokens), bool)
        for context, turn in zip(contexts, self.turns):
            written[len(context) : len(context) + len(turn.written)] = True
        return np.array(tokens, np.int32), written


@dataclasses.dataclass(frozen=True)
class Work:
    """How much of what.

    Attributes:
      task: one of `TASKS`.
      shape: one of `SHAPES`.
      rows: dense rows, or base rollouts.
      length: tokens of a dense row, or of the prompt of a dense request.
      new_tokens: of a dense request.
      in_flight: requests that decode together.
      repeats: timed repetitions in a process.
    """

    task: str
    shape: str = "dense"
    rows: int = 8
    length: int = 256
    new_tokens: int = 64
    in_flight: int = 64
    repeats: int = 3

    def __post_init__(self):
        for name, known in (("task", TASKS), ("shape", SHAPES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}"
                )
        for name in ("rows", "new_tokens", "in_flight", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.length < 2:
            raise ValueError(f"length must be >= 2, got {self.length}: one token predicts another")

    def draw(self, vocab_size: int) -> list[Play]:
        """Rollouts of random tokens; base rollouts first."""
        random = np.random.default_rng(0)

        def tokens(low: int, high: int | None = None) -> tuple[int, ...]:
            count = low if high is None else random.integers(low, high + 1)
            return tuple(random.integers(0, vocab_size, count).tolist())

        if self.shape == "dense":
            prompt, written = self.length, self.new_tokens
            if self.task != "decode":
                prompt, written = 1, self.length - 1
            return [Play(tokens(prompt), (Turn(tokens(written), ()),)) for _ in range(self.rows)]

        def turns(most: int) -> tuple[Turn, ...]:
            count = random.integers(min(2, most), most + 1)
            return tuple(Turn(tokens(4, 20), tokens(10, 40)) for _ in range(count))

        plays = [Play(tokens(24, 48), turns(7)) for _ in range(self.rows)]
        for parent in range(self.rows):
            contexts = plays[parent].contexts()
            at = int(random.integers(len(contexts)))
            for _ in range(random.choice([1, 2, 4])):
                plays.append(Play(contexts[at], turns(7 - at), parent, at))
        return plays


def trajectories(plays: list[Play]) -> list[Trajectory]:
    """Rollouts as the learner takes them."""
    out = []
    for index, play in enumerate(plays):
        contexts, segments = play.contexts(), []
        states = [State(None, None, c, play.parent_turn + j) for j, c in enumerate(contexts)]
        if play.parent is not None:
            states[0] = out[play.parent].states[play.parent_turn]
        states.append(State(None, None, (), play.parent_turn + len(contexts)))
        for context, turn in zip(contexts, play.turns):
            logp = (0.0,) * len(turn.written)
            act = Generation("act", context, turn.written, logp, "stop")
            segments.append(Segment((act,), "", ""))
        out.append(
            Trajectory(
                id=str(index),
                task_id=str(index if play.parent is None else play.parent),
                group_id=index if play.parent is None else play.parent,
                states=tuple(states),
                segments=tuple(segments),
                outcome=1.0,
                success=True,
                end="terminal",
                parent=None if play.parent is None else str(play.parent),
                parent_state=None if play.parent is None else play.parent_turn,
            )
        )
    return out
