"""Values of a step's states: what the critic believes, fused with what branches have found."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from focus.credit.refine import leave_one_out_values
from focus.rollout.belief import make_beliefs
from focus.rollout.controller import Collected
from focus.rollout.step import StepConfig
from focus.types import StateBelief

_leave_one_out = jax.jit(leave_one_out_values)


@dataclasses.dataclass(frozen=True)
class Values:
    """Values of all states of a step, before and after refinement; [B, S + 1] each.

    Rows are those of `RolloutTree.trajectories`, padded; entries without a state are NaN in
    `mean` and in `refined`.
    """

    mean: np.ndarray
    variance: np.ndarray
    refined: np.ndarray
    refined_variance: np.ndarray

    def for_report(self) -> dict[str, np.ndarray]:
        """Arguments of `focus.report.record_trees`."""
        return {
            "values": self.mean,
            "stds": np.sqrt(self.variance),
            "refined": self.refined,
            "refined_stds": np.sqrt(self.refined_variance),
        }


def unknown_values(rows: int, states: int) -> Values:
    """Those of a run without a critic."""
    nothing = np.full((rows, states), np.nan)
    return Values(nothing, nothing, nothing, nothing)


def refine_values(
    collected: Collected, belief: StateBelief, config: StepConfig, *, max_context: int
) -> Values:
    """Critic fused with branch outcomes, so that no outcome reaches its own baseline.

    States of base rollouts read all branches. The first state of a branch reads its siblings'
    outcomes and not its own; its later states read the critic alone, because what a branch has
    found out about its parent's states contains its own outcome.

    Args:
      collected: the step's rollouts.
      belief: the critic's belief about all their states.
      config: of the step; `config.refine` says how the two are fused.
      max_context: of the engine.

    Returns:
      Values.
    """
    tree = collected.tree
    exists = np.zeros(belief.mean.shape, bool)
    for b, trajectory in enumerate(tree.trajectories):
        exists[b, : len(trajectory.states)] = [bool(s.prompt_ids) for s in trajectory.states]
    mean = np.where(exists, belief.mean, np.nan)
    variance = np.where(exists, belief.variance, 0.0)
    refined, refined_variance = mean.copy(), variance.copy()
    if collected.beliefs is not None and config.refine != "none":
        base = len(tree.base)
        beliefs = make_beliefs(
            tree.base,
            belief.rows(base),
            env_branchable=True,
            max_context=max_context,
            smallest_bucket=config.state_bucket,
        )
        beliefs = dataclasses.replace(
            beliefs,
            branch_count=collected.beliefs.branch_count,
            branch_sum=collected.beliefs.branch_sum,
        )
        new, left = beliefs.refine(config.refine, config.value_range)
        states = beliefs.shape[1]
        there = exists[:base, :states]
        refined[:base, :states][there] = beliefs.to_trajectories(new)[there]
        refined_variance[:base, :states][there] = beliefs.to_trajectories(left)[there]
        _refine_branches(collected, belief, refined)
    return Values(mean, variance, refined, refined_variance)


def _refine_branches(collected: Collected, belief: StateBelief, refined: np.ndarray) -> None:
    """Writes the values of branches' first states into `refined`."""
    tree, base = collected.tree, len(collected.tree.base)
    beliefs = collected.beliefs
    row_of = {tuple(index): row for row, index in enumerate(beliefs.index.tolist())}
    index_of = {t.id: b for b, t in enumerate(tree.base)}
    count, total, own = np.zeros((3, belief.mean.shape[0]), np.float32)
    for b, branch in enumerate(tree.branches, start=base):
        row = row_of[index_of[branch.parent], branch.parent_state]
        scored = branch.outcome is not None
        count[b] = beliefs.branch_count[row] - scored
        own[b] = branch.outcome if scored else 0.0
        total[b] = beliefs.branch_sum[row] - own[b]
    first = jax.device_get(
        _leave_one_out(
            *jax.device_put(
                (belief.mean[:, 0], belief.variance[:, 0], belief.noise_var[:, 0], total, count)
            )
        )
    )
    refined[base : base + len(tree.branches), 0] = first[base : base + len(tree.branches)]
