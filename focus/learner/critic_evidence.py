"""A step's rollouts to the critic's evidence: one row a state and outcome (method: targets).

A state of a trajectory learns from that trajectory's outcome; a branched state learns, besides,
from the mean of its continuations. The two are different outcomes and make different rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from focus.critic.losses import evidence_id, fold_of
from focus.critic.state import Evidence
from focus.critic.targets import branch_targets, cost_targets, trajectory_targets
from focus.types import CreditBatch, Trajectory


@functools.partial(jax.jit, static_argnames=("truncation", "discount", "lambda_"))
def _targets(batch, value, is_branch, tokens, censored, *, truncation, discount, lambda_):
    trajectory = jax.vmap(
        functools.partial(
            trajectory_targets, truncation=truncation, discount=discount, lambda_=lambda_
        )
    )(
        value,
        batch.segment_reward,
        batch.outcome,
        batch.segment_mask & batch.row_mask[:, None],
        truncated=batch.truncated,
        is_branch=is_branch,
    )
    cost = jax.vmap(cost_targets)(tokens, batch.segment_mask, censored=censored)
    branched = jax.vmap(branch_targets)(batch.mc_return, batch.mc_mask)
    return trajectory, cost, branched


def make_evidence(
    trajectories: Sequence[Trajectory],
    batch: CreditBatch,
    hidden: np.ndarray,
    value: np.ndarray,
    *,
    size: int,
    num_folds: int,
    truncation: str,
    discount: float,
    lambda_: float,
) -> tuple[Evidence, np.ndarray]:
    """Lays out all that a step has to teach the critic.

    Args:
      trajectories: base rollouts, then branches: the rows of `batch`.
      batch: with the channels `mc_return` and `mc_mask`.
      hidden: [B, >= S + 1, H] hidden states at states, as the critic reads them.
      value: [B, S + 1] critic values, for the targets of cut trajectories and lambda < 1.
      size: rows are padded to this times a power of two.
      num_folds: see `CriticConfig.num_folds`.
      truncation: what a cut trajectory teaches, see `trajectory_targets`.
      discount: gamma per segment.
      lambda_: lambda of the critic's TD(lambda) targets; 1 for Monte Carlo returns.

    Returns:
      Evidence of n rows (NumPy), and the trajectory and state that each is about, [n, 2].
    """
    rows, segments = batch.segment_mask.shape
    is_branch, censored = np.zeros(rows, bool), np.zeros(rows, bool)
    tokens = np.zeros((rows, segments), np.float32)
    outcome_id, branch_id = np.zeros((2, rows, segments), np.uint32)
    fold = np.zeros(rows, np.int32)
    for b, trajectory in enumerate(trajectories):
        is_branch[b] = trajectory.parent is not None
        censored[b] = trajectory.end in ("budget", "failed")
        count = len(trajectory.segments)
        tokens[b, :count] = [segment.num_tokens for segment in trajectory.segments]
        outcome_id[b] = evidence_id(trajectory.id)
        branch_id[b, :count] = [evidence_id(f"{trajectory.id}/{j}") for j in range(count)]
        fold[b] = fold_of(trajectory.task_id, num_folds)
    trajectory, cost, branched = jax.device_get(
        _targets(
            *jax.device_put((batch, value, is_branch, tokens, censored)),
            truncation=truncation,
            discount=discount,
            lambda_=lambda_,
        )
    )
    hidden = hidden[:, :segments]
    no_cost = np.zeros((rows, segments), np.float32)
    # The cost of a branch's first state is its parent's state's: counted in the branch's row.
    blocks = [
        (trajectory, outcome_id, np.where(cost.mask, cost.target, 0), cost.weight),
        (branched, branch_id, no_cost, no_cost),
    ]
    columns: dict[str, list[np.ndarray]] = {}
    for targets, ids, cost_target, cost_weight in blocks:
        kept = targets.mask | (cost_weight > 0)
        block = {
            "features": hidden[kept],
            "target": targets.target[kept],
            "weight": targets.weight[kept],
            "cost": cost_target[kept],
            "cost_weight": cost_weight[kept],
            "bootstrap_id": ids[kept],
            "fold": np.broadcast_to(fold[:, None], kept.shape)[kept],
            "mask": np.ones(int(kept.sum()), bool),
            "index": np.argwhere(kept),
        }
        for name, column in block.items():
            columns.setdefault(name, []).append(column)
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    count = len(joined["mask"])
    while size < count:
        size *= 2
    padded = {
        name: np.pad(column, [(0, size - count)] + [(0, 0)] * (column.ndim - 1))
        for name, column in joined.items()
    }
    index = padded.pop("index")
    return Evidence(**padded), index
