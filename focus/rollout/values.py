"""Values of a step's states: what the critic believes, fused with what outcomes have shown."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from focus.credit.baselines import fallback_baseline
from focus.credit.errors import Posterior
from focus.credit.refine import leave_one_out_values, outcome_noise
from focus.credit.structure import prior_variance, refine_branches
from focus.rollout.belief import StateBeliefs, make_beliefs
from focus.rollout.controller import Collected
from focus.rollout.step import StepConfig
from focus.types import StateBelief, Trajectory


@dataclasses.dataclass(frozen=True)
class Values:
    """Values of all states of a step, before and after refinement; [B, S + 1] each.

    Rows are those of `RolloutTree.trajectories`, padded; entries without a state are NaN in
    `mean` and in `refined`.

    Attributes:
      mean: critic mean.
      variance: its epistemic variance.
      refined: without the outcome of the row's own trajectory.
      refined_variance: what is left.
      covariance: of the errors of a state and the next one, after refinement.
      baseline: [B] what stands in for the critic where it is not trusted, NaN elsewhere.
    """

    mean: np.ndarray
    variance: np.ndarray
    refined: np.ndarray
    refined_variance: np.ndarray
    covariance: np.ndarray
    baseline: np.ndarray

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
    return Values(*[nothing] * 5, np.full(rows, np.nan))


def refine_values(
    collected: Collected,
    belief: StateBelief,
    config: StepConfig,
    *,
    max_context: int,
    trusted: bool = True,
) -> Values:
    """Critic fused with outcomes, so that no outcome reaches its own baseline.

    States of base rollouts read all branches, and with `config.siblings` what the other rollouts
    of their task came to. The first state of a branch reads its siblings' outcomes and not its
    own. With a fitted covariance and joint refinement, its later states read whatever all
    outcomes but its own say of them; otherwise the critic alone.

    Args:
      collected: the step's rollouts.
      belief: the critic's belief about all their states.
      config: of the step; `config.refine` says how the two are fused.
      max_context: of the engine.
      trusted: whether the critic is to be used; see `Values.baseline`.

    Returns:
      Values.
    """
    tree = collected.tree
    exists = np.zeros(belief.mean.shape, bool)
    for b, trajectory in enumerate(tree.trajectories):
        exists[b, : len(trajectory.states)] = [bool(s.prompt_ids) for s in trajectory.states]
    mean = np.where(exists, belief.mean, np.nan)
    variance = np.where(exists, _variance_of(belief), 0.0)
    values = Values(
        mean=mean,
        variance=variance,
        refined=mean.copy(),
        refined_variance=variance.copy(),
        covariance=np.zeros(mean.shape),
        baseline=np.full(len(mean), np.nan),
    )
    if not trusted:
        values.baseline[: len(tree.trajectories)] = _fallback(tree.trajectories, len(mean))
    base = len(tree.base)
    if not base or config.refine == "none":
        return values
    beliefs = make_beliefs(
        tree.base,
        belief.rows(base),
        env_branchable=True,
        max_context=max_context,
        smallest_bucket=config.state_bucket,
        rollouts=config.group_size,
        states=config.max_states,
        siblings=config.siblings,
    )
    if collected.beliefs is not None:
        beliefs = beliefs.with_evidence_of(collected.beliefs)
    found, posterior = beliefs.values(config.refine)
    found = jax.device_get(found)
    states = beliefs.shape[1]
    there = exists[:base, :states]
    into = (values.refined, values.refined_variance, values.covariance)
    for array, new in zip(into, (found.value, found.variance, found.covariance)):
        array[:base, :states][there] = beliefs.to_trajectories(new)[there]
    if tree.branches:
        rows = _parent_rows(collected, beliefs)
        if belief.scales is not None and config.refine == "joint":
            _refine_branches(collected, belief, beliefs, posterior, rows, exists, into)
        else:
            _refine_first_states(collected, belief, beliefs, rows, variance, into)
    np.clip(values.refined, *config.value_range, out=values.refined)
    return values


def _variance_of(belief: StateBelief) -> np.ndarray:
    if belief.scales is None:
        return belief.variance
    args = jax.device_put((belief.scales, belief.variance, belief.noise_var))
    return jax.device_get(_prior_variance(*args))


def _fallback(trajectories: tuple[Trajectory, ...], rows: int) -> np.ndarray:
    """[B] mean outcomes of other rollouts; padded to `rows` while they are computed."""
    outcome, group = np.full(rows, np.nan, np.float32), np.full(rows, -1, np.int32)
    is_base = np.zeros(rows, bool)
    for b, trajectory in enumerate(trajectories):
        group[b], is_base[b] = trajectory.group_id, trajectory.parent is None
        outcome[b] = np.nan if trajectory.outcome is None else trajectory.outcome
    found = _baseline(*jax.device_put((outcome, group, is_base, np.isfinite(outcome))))
    return jax.device_get(found)[: len(trajectories)]


def _parent_rows(collected: Collected, beliefs: StateBeliefs) -> list[int]:
    """The row of the pool that each branch left."""
    index_of = {t.id: b for b, t in enumerate(collected.tree.base)}
    return [beliefs.row(index_of[b.parent], b.parent_state) for b in collected.tree.branches]


def _refine_branches(
    collected: Collected,
    belief: StateBelief,
    beliefs: StateBeliefs,
    posterior: Posterior,
    rows: list[int],
    exists: np.ndarray,
    into: tuple[np.ndarray, ...],
) -> None:
    """Writes values, variances and covariances of all states of branches."""
    base, count = len(collected.tree.base), len(collected.tree.branches)
    end = base + count
    # As many as the belief has rows, which come in few sizes: this compiles once for each.
    size = len(belief.mean)
    row, outcome = np.zeros(size, np.int32), np.full(size, np.nan, np.float32)
    mask = np.zeros_like(exists)
    row[base:end], mask[base:end] = rows, exists[base:end]
    for b, branch in enumerate(collected.tree.branches, start=base):
        outcome[b] = np.nan if branch.outcome is None else branch.outcome
    _, noise_var = beliefs.prior()
    arrays = (belief.mean, belief.error_features, belief.noise_var, row, outcome)
    args = jax.device_put((belief.scales, *arrays, noise_var[row], mask))
    scales, *rest = args
    _, rollouts, states = beliefs.grid
    found = _of_branches(scales, posterior, *rest, rollouts=rollouts, states=states)
    found = jax.device_get((found.value, found.variance, found.covariance))
    there = mask[base:end]
    for array, new in zip(into, found):
        array[base:end][there] = new[base:end][there]


def _refine_first_states(
    collected: Collected,
    belief: StateBelief,
    beliefs: StateBeliefs,
    rows: list[int],
    variance: np.ndarray,
    into: tuple[np.ndarray, ...],
) -> None:
    """Writes value and variance of branches' first states alone."""
    refined, refined_variance, _ = into
    base, end = len(collected.tree.base), len(collected.tree.trajectories)
    count, total = np.zeros((2, len(belief.mean)), np.float32)
    for b, (branch, row) in enumerate(zip(collected.tree.branches, rows), start=base):
        scored = branch.outcome is not None
        count[b] = beliefs.branch_count[row] - scored
        total[b] = beliefs.branch_sum[row] - (branch.outcome if scored else 0.0)
    tau2, noise_var = variance[:, 0], belief.noise_var[:, 0]
    if belief.scales is not None:
        noise_var = jax.device_get(_outcome_noise(*jax.device_put((noise_var, tau2))))
    args = (belief.mean[:, 0], tau2, noise_var, total, count)
    first = jax.device_get(_leave_one_out(*jax.device_put(args)))
    left = tau2 / (1.0 + tau2 * count / noise_var)
    refined[base:end, 0], refined_variance[base:end, 0] = first[base:end], left[base:end]


_baseline = jax.jit(fallback_baseline)
_leave_one_out = jax.jit(leave_one_out_values)
_outcome_noise = jax.jit(outcome_noise)
_prior_variance = jax.jit(prior_variance)
_of_branches = jax.jit(refine_branches, static_argnames=("rollouts", "states"))
