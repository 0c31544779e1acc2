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
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import numpy as np

Array = jax.Array
# The default of an optional channel. Methods check that what they read is there, once and by
# name (`credit.channels.require_channels`), and then take it for the array that it is.
ABSENT: Any = None

GenerationKind = Literal["act", "summary"]
TrajectoryEnd = Literal["terminal", "turn_limit", "context_limit", "format", "budget", "failed"]
# (version of the weights, first token, one behind the last)
VersionSpan = tuple[str, int, int]


def version_name(step: int, run: str = "") -> str:
    """Name of the weights after `step` training steps, e.g. "v12".

    Args:
      step: finished training steps.
      run: hexadecimal digits of the process that trains, where weights outlive it. Servers may
        still hold what another run, or this one before it was resumed, called by the same step.
        "v12-5f0c3a91".
    """
    return f"v{step}-{run}" if run else f"v{step}"


def version_step(name: str) -> int:
    """The training step of a version's name.

    Raises:
      ValueError: the name is not one of `version_name`'s.
    """
    match = re.fullmatch(r"v(\d+)(-[0-9a-f]+)?", name)
    if match is None:
        raise ValueError(
            f"weights are called {name!r}, which is not a version of this run (v<step>): push the "
            "run's weights to the engine before rollouts start"
        )
    return int(match[1])


def merged_spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Spans in order, neighbours of one version joined."""
    merged: list[VersionSpan] = []
    for version, start, end in spans:
        if merged and merged[-1][0] == version and merged[-1][2] == start:
            start = merged.pop()[1]
        merged.append((version, start, end))
    return tuple(merged)


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
      weight_versions: spans over `output_ids`, which they cover; empty where it is not known.
      cached_tokens: prompt tokens whose keys and values were already there.
      span: see `State.span`.
    """

    kind: GenerationKind
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logp: tuple[float, ...]
    finish_reason: str
    weight_versions: tuple[VersionSpan, ...] = ()
    cached_tokens: int = 0
    span: int = 0

    def __post_init__(self):
        if len(self.output_ids) != len(self.logp):
            raise ValueError(
                f"a generation has {len(self.output_ids)} tokens but {len(self.logp)} log-probs"
            )
        ends = [0, *(end for _, _, end in self.weight_versions)]
        starts = [*(start for _, start, _ in self.weight_versions), len(self.output_ids)]
        if self.weight_versions and ends != starts:
            raise ValueError(
                f"weight_versions {self.weight_versions} do not cover {len(self.output_ids)} "
                "tokens one after the other"
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
      cites: turns that its summary cites, numbered as `State.turn` before they were taken; () if
        the summary breaks the format, None if there is none or its manager asks for no citation.
    """

    generations: tuple[Generation, ...]
    text: str
    observation: str
    reward: float = 0.0
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cites: tuple[int, ...] | None = None

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
        """Whether we cut it: the context had no room, or the budget was spent.

        The environment's own turn limit is no cut but a rule of the task: who has not finished by
        then has failed, under every method.
        """
        return self.end in ("context_limit", "budget")

    @property
    def num_tokens(self) -> int:
        """Policy-generated tokens, summaries included."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def weight_versions(self) -> tuple[VersionSpan, ...]:
        """Spans over the policy-generated tokens, of all generations in order."""
        spans, offset = [], 0
        for segment in self.segments:
            for generation in segment.generations:
                spans += [(v, offset + a, offset + b) for v, a, b in generation.weight_versions]
                offset += len(generation.output_ids)
        return merged_spans(spans)


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutTree:
    """All rollouts of one training step: base trajectories and the branches from their states."""

    base: tuple[Trajectory, ...]
    branches: tuple[Trajectory, ...] = ()

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Base trajectories first, then branches: the order of the B axis."""
        return self.base + self.branches


@dataclasses.dataclass(frozen=True)
class PolicySignals:
    """What the scoring pass says of the segments of trajectories (NumPy, [B, N]).

    Column j is about the segment that leaves state j; 0 where none does.

    Attributes:
      score_norm: sum over its tokens of `1 - sum_a pi(a)^2`, the expected squared norm of the
        score in the logits: how far the segment can move the policy.
      entropy: mean entropy of its tokens, nats.
      nll: their mean negative log-prob.
      uncertain: number of its tokens with a probability below .9.
      log_ratio: of the trainer's to the engine's probabilities from its first token on,
        discounted by .99 a token.
    """

    score_norm: np.ndarray
    entropy: np.ndarray
    nll: np.ndarray
    uncertain: np.ndarray
    log_ratio: np.ndarray


@dataclasses.dataclass(frozen=True)
class StateBelief:
    """What a critic believes of the states of trajectories (NumPy); N is at least their number.

    Entries of states that have no prompt (where the environment ended the episode) and padding
    may hold anything.

    Attributes:
      mean: [B, N] critic mean.
      error_features: [B, N, D] with `e(s) . e(s') = Cov[V(s), V(s')]`, as ensemble or posterior
        have it.
      variance: [B, N] epistemic variance, `|e(s)|^2`.
      noise_var: [B, N] variance of one outcome around the mean.
      cost: [B, N] tokens that one continuation is expected to generate.
      signals: of the policy, where they were asked for.
      scales: `credit.structure.CovarianceScales` of a fitted covariance, which has `variance` as
        one part and shares `noise_var` between error and noise; None takes both as they are.
    """

    mean: np.ndarray
    error_features: np.ndarray
    variance: np.ndarray
    noise_var: np.ndarray
    cost: np.ndarray
    signals: PolicySignals | None = None
    scales: Any = None

    def rows(self, count: int) -> StateBelief:
        """The belief about the first `count` trajectories."""
        cut = {f: getattr(self, f)[:count] for f in STATE_ARRAYS}
        signals = self.signals
        if signals is not None:
            fields = dataclasses.fields(signals)
            signals = PolicySignals(**{f.name: getattr(signals, f.name)[:count] for f in fields})
        return dataclasses.replace(self, **cut, signals=signals)


# The arrays of a `StateBelief` that have an entry for every state.
STATE_ARRAYS = ("mean", "error_features", "variance", "noise_var", "cost")


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
      truncated: [B] bool, cut by a limit of ours; the environment's turn limit is an outcome.
      staleness: [B, L] int32, training steps between the weights that sampled a token and those
        that are trained.
      value: [B, S + 1] critic or refined value of each state; column S_i is where row i ended.
      value_variance: [B, S + 1] epistemic variance of `value`.
      value_covariance: [B, S] covariance of its errors at the state before a segment and the
        state after it.
      baseline: [B] what stands in for the critic in rows where it is not to be trusted; NaN in
        all others.
      mc_return: [B, S, K] returns of the continuations sampled from the start of a segment.
      mc_mask: [B, S, K] bool, which of them exist.

    Scores of tokens, [B, L]:
      ref_logp: log-prob under the reference policy.
      teacher_logp: log-prob under a teacher.
      priv_logp: log-prob under a model that sees what the policy does not (a gold answer).
      entropy: of the distribution that the token was drawn from, nats.
      token_value: critic value of the state before the token.
      summary_mask: bool, tokens of summaries that the policy wrote.
      copied: bool, tokens shared with the parent rollout; never trained twice.
      segment_id: int32 id of the text span that a coalition is made of, -1 outside.
      prefix_key: [B, L + 1] int32 id of the group and the row's first l tokens.

    Scores of segments, [B, S] where nothing else is said:
      score: of a process reward model, a judge or a progress head.
      valid: bool, the call was executed, or is grounded.
      q: critic value of the action in its state.
      q2, v2: the twin critics; v2 [B, S + 1].
      expert_score: log-ratio of the expert's action, or a discriminator's probability.
      segment_entropy: mean token entropy of the segment, nats.
      is_call, is_answer, is_summary: bool, what kind of segment it is.
      probe_delta: answer reward with the call minus without it.
      cited: bool, the rollout's own summary cites the segment.
      dist_goal: graph distance from the segment's end to the goal; inf if unreachable.

    Identities, [B, S] int32 ids compact within the batch, -1 for none:
      state_key, next_state_key, action_key: of the state before, the state after, the action.
      match_class: segments of a group that did the same thing.
      intent: what the action is for.
      cluster: [B, S, C] action clusters, one id per scope.

    Relations:
      edge: [B, S, S] int8, entry [b, s, t]: t uses s (1 support-use, 2 failed-use, 0 none).
      sim: [B * S, B * S] similarity of states; emb: [B, S, D] their embeddings.
      match: [B * S, B * S] bool, pairs of segments that did the same thing (not transitive).

    Interventions, [B, S, I]; do_return and do_mask [B, S, I, K]:
      do_return: returns after replacing the segment; do_mask: bool, which exist.
      do_valid: bool; propensity, m1, m0: for the doubly robust form.

    Trees, [M] nodes:
      parent: int32 index of the parent node, -1 at a root; parents precede children.
      leaf_traj: int32 row that a leaf ends, -1 at inner nodes.
      node_entropy: mean token entropy, nats. tree_id: int32. node_of_segment: [B, S] int32.

    Forks, [B] int32, -1 for a fresh rollout:
      parent_traj, fork_segment, fork_token: where a row left which other row.
      pivot_segment: the segment that a reflection blames.

    Others:
      coalition: [B, 2^n] reward of every subset of n text spans, bit i for span i.
      cut: [B, C] int32 token indices; cut_value, cut_mask: [B, C] value there, and if it exists.
      hist_score, hist_group: [H] earlier scores of tasks. is_revisit: [B] bool.
      progress: [] share of training done, for what is annealed.
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
    staleness: Array = ABSENT
    value: Array = ABSENT
    value_variance: Array = ABSENT
    value_covariance: Array = ABSENT
    baseline: Array = ABSENT
    mc_return: Array = ABSENT
    mc_mask: Array = ABSENT
    ref_logp: Array = ABSENT
    teacher_logp: Array = ABSENT
    priv_logp: Array = ABSENT
    entropy: Array = ABSENT
    token_value: Array = ABSENT
    summary_mask: Array = ABSENT
    copied: Array = ABSENT
    segment_id: Array = ABSENT
    prefix_key: Array = ABSENT
    score: Array = ABSENT
    valid: Array = ABSENT
    q: Array = ABSENT
    q2: Array = ABSENT
    v2: Array = ABSENT
    expert_score: Array = ABSENT
    segment_entropy: Array = ABSENT
    is_call: Array = ABSENT
    is_answer: Array = ABSENT
    is_summary: Array = ABSENT
    probe_delta: Array = ABSENT
    cited: Array = ABSENT
    dist_goal: Array = ABSENT
    state_key: Array = ABSENT
    next_state_key: Array = ABSENT
    action_key: Array = ABSENT
    match_class: Array = ABSENT
    intent: Array = ABSENT
    cluster: Array = ABSENT
    edge: Array = ABSENT
    sim: Array = ABSENT
    emb: Array = ABSENT
    match: Array = ABSENT
    do_return: Array = ABSENT
    do_mask: Array = ABSENT
    do_valid: Array = ABSENT
    propensity: Array = ABSENT
    m1: Array = ABSENT
    m0: Array = ABSENT
    parent: Array = ABSENT
    leaf_traj: Array = ABSENT
    node_entropy: Array = ABSENT
    tree_id: Array = ABSENT
    node_of_segment: Array = ABSENT
    parent_traj: Array = ABSENT
    fork_segment: Array = ABSENT
    fork_token: Array = ABSENT
    pivot_segment: Array = ABSENT
    coalition: Array = ABSENT
    cut: Array = ABSENT
    cut_value: Array = ABSENT
    cut_mask: Array = ABSENT
    hist_score: Array = ABSENT
    hist_group: Array = ABSENT
    is_revisit: Array = ABSENT
    progress: Array = ABSENT


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
