"""Records that every layer shares, and the letters of their axes.

Axes, declared here once and used in every docstring:

    B  trajectories (base rollouts and branches alike)
    S  segments of a trajectory; states have S + 1 entries, the last is where it ended
    L  tokens: policy-generated tokens of a trajectory, or positions of a packed row
    K  continuations sampled from one state
    D  error features of the critic
    M  members of the critic's ensemble
    H  hidden width of the policy
    R  packed rows, N nodes of the prefix trees in a row, P state positions in a row

Host records (`State` ... `RolloutTree`) are immutable Python values: an environment state or a
context state can be continued from any number of times, which is what makes a branch free.
Device records (`CreditBatch`, `Credit`) are frozen pytrees of arrays with masks; padding may
hold anything, NaN included, and must never reach a result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax

Array = jax.Array

GenerationKind = Literal["act", "summary"]
TrajectoryEnd = Literal["terminal", "turn_limit", "context_limit", "budget", "failed"]


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """A point at which the policy is about to generate.

    Attributes:
      env: the environment's own immutable state.
      context: the context manager's own immutable state.
      prompt_ids: exactly what the policy reads next; the next request's `input_ids`.
      turn: environment turns taken so far.
      span: how many compactions lie behind; prompts of one span extend one another.
    """

    env: Any
    context: Any
    prompt_ids: tuple[int, ...]
    turn: int
    span: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """One request to the engine and what came back, token in, token out.

    Attributes:
      kind: "act" (a turn) or "summary" (written by the policy to compact its context).
      prompt_ids: the tokens it was conditioned on.
      output_ids: the tokens that were sampled; trained on exactly as they are.
      logp: behaviour log-probability of each output token, as the engine defines it.
      finish_reason: "stop", "length" or "abort".
      weight_versions: spans `(version, start, end)` over `output_ids`.
      cached_tokens: prompt tokens whose keys and values were already there.
      span: see `State.span`.
    """

    kind: GenerationKind
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logp: tuple[float, ...]
    finish_reason: str
    weight_versions: tuple[tuple[str, int, int], ...] = ()
    cached_tokens: int = 0
    span: int = 0

    def __post_init__(self):
        if len(self.output_ids) != len(self.logp):
            raise ValueError(
                f"a generation has {len(self.output_ids)} tokens but {len(self.logp)} log-probs"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Everything generated and observed between two consecutive states.

    One turn by default; a summary belongs to the segment that it closes.

    Attributes:
      generations: the turn's action and, if a compaction followed, the summary.
      text: the action as text (for people; never re-tokenised).
      observation: what the environment answered, as text.
      reward: environment reward of the turn; the outcome is kept on the trajectory.
      info: facts about the turn from the environment (tool, documents, error ...).
    """

    generations: tuple[Generation, ...]
    text: str
    observation: str
    reward: float = 0.0
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Policy-generated tokens of the segment."""
        return sum(len(g.output_ids) for g in self.generations)


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """A rollout from a task's start, or a branch from a state of another trajectory.

    Attributes:
      id: unique in the run, e.g. "12/3.0" (step 12, task 3, member 0) or "12/3.0/2.1".
      task_id: which task; rollouts of one task form a group.
      group_id: dense index of the task in this step.
      states: S + 1 states; `states[j]` precedes `segments[j]`, the last is where it ended.
      segments: S segments.
      outcome: final reward, or None when there is no score (technical failure, cut by the
        budget): None is not 0.
      success: whether the task was solved.
      end: why it stopped.
      parent: id of the trajectory a branch left, None for a base rollout.
      parent_state: index j of the parent's state that it left from.
      error: what failed, when `end == "failed"`.
    """

    id: str
    task_id: str
    group_id: int
    states: tuple[State, ...]
    segments: tuple[Segment, ...]
    outcome: float | None
    success: bool
    end: TrajectoryEnd
    parent: str | None = None
    parent_state: int | None = None
    error: str | None = None

    def __post_init__(self):
        if len(self.states) != len(self.segments) + 1:
            raise ValueError(
                f"trajectory {self.id}: {len(self.segments)} segments need "
                f"{len(self.segments) + 1} states, got {len(self.states)}"
            )

    @property
    def truncated(self) -> bool:
        """Whether it was cut rather than ended by the environment."""
        return self.end in ("turn_limit", "context_limit", "budget")

    @property
    def num_tokens(self) -> int:
        """Policy-generated tokens, summaries included."""
        return sum(segment.num_tokens for segment in self.segments)


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutTree:
    """All rollouts of one training step: base trajectories and the branches from their states."""

    base: tuple[Trajectory, ...]
    branches: tuple[Trajectory, ...] = ()

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Base trajectories first, then branches: the order of the B axis."""
        return self.base + self.branches


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CreditBatch:
    """What an estimator may look at. Core channels always, the others None when absent.

    The token axis lists the policy-generated tokens of a trajectory in order; observation
    tokens may be interleaved with `token_mask` 0 and `token_segment` -1.

    Attributes:
      group_id: [B] int32, dense id of the task.
      outcome: [B] final reward.
      success: [B] bool, verified success.
      row_mask: [B] bool, False for padding rows and rollouts without a score.
      segment_mask: [B, S] bool.
      segment_reward: [B, S] reward of each segment without the outcome.
      token_segment: [B, L] int32 segment of each token, -1 outside.
      token_mask: [B, L] bool, True on policy-generated tokens.
      behaviour_logp: [B, L] log-prob under the policy that sampled it.
      truncated: [B] bool, cut by a limit, not ended by the environment.
      value: [B, S + 1] critic or refined value of each state; column S_i is where row i ended.
      value_variance: [B, S + 1] epistemic variance of `value`.
      mc_return: [B, S, K] returns of the continuations sampled from the start of a segment.
      mc_mask: [B, S, K] bool, which of them exist.
    """

    group_id: Array
    outcome: Array
    success: Array
    row_mask: Array
    segment_mask: Array
    segment_reward: Array
    token_segment: Array
    token_mask: Array
    behaviour_logp: Array
    truncated: Array
    value: Array | None = None
    value_variance: Array | None = None
    mc_return: Array | None = None
    mc_mask: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Credit:
    """What an estimator returns.

    Attributes:
      advantages: [B, L], 0 where `mask` is False.
      segment_advantages: [B, S], 0 outside `segment_mask`.
      mask: [B, L] bool: tokens that enter the policy loss. Dropped is not zero: the loss
        denominator counts only kept tokens.
      targets: regression targets for critics, by name.
      aux: diagnostics, by name.
    """

    advantages: Array
    segment_advantages: Array
    mask: Array
    targets: dict[str, Array] = dataclasses.field(default_factory=dict)
    aux: dict[str, Array] = dataclasses.field(default_factory=dict)
