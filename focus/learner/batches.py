"""Trajectories to the padded arrays that estimators read.

Shapes come from short lists of buckets, so that a run compiles an estimator a few times and not
once per step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from focus.types import CreditBatch, Trajectory, version_step


def bucket(size: int, buckets: Sequence[int] | int, what: str) -> int:
    """The smallest bucket that holds `size`.

    Args:
      size: what has to fit.
      buckets: allowed sizes in any order, or a single one.
      what: name of the config key that lists them, for the message.

    Returns:
      One of `buckets`.

    Raises:
      ValueError: `size` is larger than all of them.
    """
    buckets = [buckets] if isinstance(buckets, int) else sorted(buckets)
    for candidate in buckets:
        if size <= candidate:
            return candidate
    raise ValueError(f"{size} does not fit into any bucket of {what} = {buckets}; add a larger one")


def continuation_return(trajectory: Trajectory, discount: float = 1.0) -> float:
    """Return of a rollout from its first state.

    `sum_j discount^j r_j`, where the outcome is part of the last segment's reward.

    Args:
      trajectory: a rollout with an outcome and at least one segment.
      discount: per segment.

    Returns:
      The return from `states[0]`.
    """
    rewards = [segment.reward for segment in trajectory.segments]
    rewards[-1] += trajectory.outcome
    return float(sum(r * discount**j for j, r in enumerate(rewards)))


def credit_batch(
    trajectories: Sequence[Trajectory],
    *,
    num_segments: Sequence[int] | int,
    num_tokens: Sequence[int] | int,
    num_rows: Sequence[int] | int,
    num_continuations: int = 0,
    continuations: Sequence[Trajectory] | None = None,
    discount: float = 1.0,
    version: int | None = None,
    value: np.ndarray | None = None,
    value_variance: np.ndarray | None = None,
) -> CreditBatch:
    """Lays trajectories out on the axes B, S and L.

    The token axis lists a trajectory's policy-generated tokens in order, summaries included: the
    same axis as that of `PackedRows.to_rows` and `to_trajectories`.

    A missing outcome is NaN, never 0. Such a row is left out (`row_mask` False), except a
    truncated one: there `truncated` says so and the estimator decides. Failed rollouts are left
    out always.

    Args:
      trajectories: rows of the batch, in order.
      num_segments: buckets for S (config key learner.segment_buckets).
      num_tokens: buckets for L (learner.token_buckets).
      num_rows: buckets for B (learner.row_buckets).
      num_continuations: K, most continuations of one state; 0 leaves the channel out.
      continuations: where continuations are looked up; None: among `trajectories`. Those that
        have no outcome are left out.
      discount: per segment, for `mc_return`.
      version: training step of the weights that are trained, for `staleness`; None leaves the
        channel out.
      value: [<=B, <=S + 1] values of states, padded here.
      value_variance: of the same shape.

    Returns:
      A batch of NumPy arrays.

    Raises:
      ValueError: something does not fit into its buckets; a token whose weights are not known, or
        newer than `version`.
    """
    rows = bucket(len(trajectories), num_rows, "learner.row_buckets")
    segments = bucket(
        max((len(t.segments) for t in trajectories), default=0),
        num_segments,
        "learner.segment_buckets",
    )
    tokens = bucket(
        max((t.num_tokens for t in trajectories), default=0), num_tokens, "learner.token_buckets"
    )
    batch = CreditBatch(
        group_id=np.full((rows,), -1, np.int32),
        outcome=np.full((rows,), np.nan, np.float32),
        success=np.zeros((rows,), bool),
        row_mask=np.zeros((rows,), bool),
        segment_mask=np.zeros((rows, segments), bool),
        segment_reward=np.zeros((rows, segments), np.float32),
        token_segment=np.full((rows, tokens), -1, np.int32),
        token_mask=np.zeros((rows, tokens), bool),
        behaviour_logp=np.zeros((rows, tokens), np.float32),
        truncated=np.zeros((rows,), bool),
        staleness=None if version is None else np.zeros((rows, tokens), np.int32),
        value=padded(value, (rows, segments + 1), "value"),
        value_variance=padded(value_variance, (rows, segments + 1), "value_variance"),
        **_monte_carlo(
            trajectories,
            trajectories if continuations is None else continuations,
            (rows, segments, num_continuations),
            discount,
        ),
    )
    for b, trajectory in enumerate(trajectories):
        count = len(trajectory.segments)
        scored = trajectory.outcome is not None
        batch.group_id[b] = trajectory.group_id
        batch.outcome[b] = trajectory.outcome if scored else np.nan
        batch.success[b] = trajectory.success
        batch.row_mask[b] = (scored or trajectory.truncated) and trajectory.end != "failed"
        batch.truncated[b] = trajectory.truncated
        batch.segment_mask[b, :count] = True
        batch.segment_reward[b, :count] = [s.reward for s in trajectory.segments]
        length = trajectory.num_tokens
        batch.token_mask[b, :length] = True
        batch.token_segment[b, :length] = np.repeat(
            np.arange(count), [s.num_tokens for s in trajectory.segments]
        )
        batch.behaviour_logp[b, :length] = [
            x for s in trajectory.segments for g in s.generations for x in g.logp
        ]
        if version is not None:
            batch.staleness[b, :length] = version - token_versions(trajectory)
    if version is not None and batch.staleness.min(initial=0) < 0:
        raise ValueError(
            f"tokens of weights v{version - batch.staleness.min()} came to a learner that has only "
            f"v{version}; one run, one fleet of engines"
        )
    return batch


def token_versions(trajectory: Trajectory) -> np.ndarray:
    """[L] int32 training step of the weights that sampled each token.

    Raises:
      ValueError: it is not known of some token.
    """
    versions = np.full((trajectory.num_tokens,), -1, np.int32)
    for name, start, end in trajectory.weight_versions:
        versions[start:end] = version_step(name)
    if versions.min(initial=0) < 0:
        raise ValueError(
            f"trajectory {trajectory.id} has tokens whose weights are not known, and a token is "
            "only trained with what it was sampled from; an engine names the version in its reply"
        )
    return versions


def padded(values: np.ndarray | None, shape: tuple[int, int], name: str) -> np.ndarray | None:
    """A channel of fewer rows or states in the shape of a batch, filled up with 0; None is None."""
    if values is None:
        return None
    values = np.asarray(values, np.float32)
    if values.ndim != 2 or any(n > s for n, s in zip(values.shape, shape)):
        raise ValueError(f"{name} of shape {values.shape} does not fit into {shape}")
    return np.pad(values, [(0, s - n) for n, s in zip(values.shape, shape)])


def _monte_carlo(trajectories, continuations, shape, discount):
    """The channels `mc_return` and `mc_mask`."""
    if not shape[2]:
        return {}
    returns, mask = np.zeros(shape, np.float32), np.zeros(shape, bool)
    index = {trajectory.id: b for b, trajectory in enumerate(trajectories)}
    for branch in continuations:
        if branch.parent not in index or branch.outcome is None or not branch.segments:
            continue
        b, j = index[branch.parent], branch.parent_state
        if j >= len(trajectories[b].segments):
            continue  # it left the state where its parent was cut: no segment starts there
        k = int(mask[b, j].sum())
        if k == shape[2]:
            raise ValueError(
                f"state {j} of {branch.parent} has more than num_continuations = {k} outcomes"
            )
        returns[b, j, k] = continuation_return(branch, discount)
        mask[b, j, k] = True
    return {"mc_return": returns, "mc_mask": mask}
