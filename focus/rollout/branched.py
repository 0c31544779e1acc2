"""What branching a step's states has brought, state by state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from focus.credit.errors import ErrorFeatures
from focus.credit.refine import MIN_NOISE_VAR, RefineMode
from focus.rollout.belief import StateBeliefs
from focus.rollout.step import StepConfig
from focus.types import Trajectory

# Of the states whose branches moved another one's value, so many are noted by name.
MOST_PULLS = 3


@dataclasses.dataclass(frozen=True)
class BranchedState:
    """What branching one state has brought.

    Attributes:
      trajectory: id of the base rollout.
      task_id: its task.
      state: index of the state.
      turn: environment turns before it.
      value: critic mean before the branches.
      std: its epistemic standard deviation.
      refined: value after all branches of the step.
      refined_std: what is left of the deviation.
      started: continuations played.
      count: those with an outcome.
      mean: their mean outcome, None if there is none.
      cost_predicted: tokens that one continuation was predicted to generate.
      cost_actual: mean tokens of those with an outcome, None if there is none.
      noise_var: variance of one outcome given the state, as the plan assumed it.
      shift: by how much all evidence moves the value, before it is clipped to its range.
      outcomes: of the continuations.
      gain: predicted reduction of the weighted epistemic variance, see `predicted_gains`.
      weight: of `mean` in the refined value; critic and other rollouts have the rest.
      pulls: by how much the branches of other states moved it, `(trajectory, state, pull)`; the
        largest.
    """

    trajectory: str
    task_id: str
    state: int
    turn: int
    value: float
    std: float
    refined: float
    refined_std: float
    started: int
    count: int
    mean: float | None
    cost_predicted: float
    cost_actual: float | None
    noise_var: float | None = None
    gain: float | None = None
    shift: float | None = None
    outcomes: tuple[float, ...] = ()
    weight: float | None = None
    pulls: tuple[tuple[str, int, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self)


def branched_states(
    config: StepConfig,
    base: Sequence[Trajectory],
    beliefs: StateBeliefs,
    rows: Sequence[int],
    branches: Sequence[Trajectory],
    kept: Sequence[bool],
    gains: np.ndarray,
) -> tuple[BranchedState, ...]:
    """Sums up what a step's branches have brought.

    Args:
      config: of the step.
      base: its base rollouts.
      beliefs: about their states, with all evidence.
      rows: the state that each branch left.
      branches: all that were played.
      kept: which of them are evidence.
      gains: [S], see `predicted_gains`.

    Returns:
      One entry per branched state, in the order of rows.
    """
    refined, variance = beliefs.refine(config.refine)
    prior_variance, noise_var = beliefs.prior()
    of_row: dict[int, list[tuple[Trajectory, bool]]] = {}
    for row, branch, is_kept in zip(rows, branches, kept, strict=True):
        of_row.setdefault(row, []).append((branch, is_kept))
    branched = sorted(of_row)
    weights = influence(beliefs, branched, config.refine)
    seen = beliefs.branch_count[branched] > 0
    surprise = np.where(seen, (beliefs.branch_mean - beliefs.mean)[branched], 0.0)
    places = [(base[b].id, int(j)) for b, j in beliefs.index[branched]]
    stats = []
    for i, row in enumerate(branched):
        members = [branch for branch, _ in of_row[row]]
        scored = [b for b, is_kept in of_row[row] if is_kept and b.outcome is not None]
        parent, state = base[beliefs.index[row, 0]], int(beliefs.index[row, 1])
        stats.append(
            BranchedState(
                trajectory=parent.id,
                task_id=parent.task_id,
                state=state,
                turn=parent.states[state].turn,
                value=float(beliefs.mean[row]),
                std=float(np.sqrt(prior_variance[row])),
                refined=float(np.clip(refined[row], *config.value_range)),
                refined_std=float(np.sqrt(variance[row])),
                started=len(members),
                count=len(scored),
                mean=float(np.mean([b.outcome for b in scored])) if scored else None,
                cost_predicted=float(beliefs.cost[row]),
                cost_actual=float(np.mean([b.num_tokens for b in scored])) if scored else None,
                noise_var=float(noise_var[row]),
                gain=float(gains[row]),
                shift=float(refined[row] - beliefs.mean[row]),
                outcomes=tuple(float(b.outcome) for b in scored),
                weight=float(weights[i, i]),
                pulls=_pulls(weights[i] * surprise, i, places),
            )
        )
    return tuple(stats)


def influence(beliefs: StateBeliefs, rows: Sequence[int], mode: RefineMode) -> np.ndarray:
    """How much each state's branches say in the value of each state.

    Before it is clipped, V* is linear in the branch means m: those of row j move row i by

        G[i, j] (m(j) - V(j)),   G[i, j] = Cov'(i, j) k(j) / noise2(j)

    with the covariance Cov' after all evidence. So G[i, i] is what a state's own branches weigh,
    and the rest of row i what it hears from those of others; "local" refinement hears none.

    Args:
      beliefs: with all evidence.
      rows: the n states to look at.
      mode: of refinement.

    Returns:
      G [n, n].
    """
    rows = np.asarray(rows, int)
    if mode == "none" or not rows.size:
        return np.zeros((rows.size, rows.size))
    features, noise_var = beliefs.posterior()
    precision = beliefs.branch_count[rows] / np.maximum(noise_var[rows], MIN_NOISE_VAR)
    if mode == "local":
        return np.diag(beliefs.refine(mode)[1][rows] * precision)
    if isinstance(features, ErrorFeatures):
        block = rows // features.block_size
        local = features.local_rows[rows]
        covariance = features.shared[rows] @ features.shared[rows].T
        covariance = covariance + (block[:, None] == block) * (local @ local.T)
        covariance = covariance + np.diag(features.own[rows])
    else:
        covariance = features[rows] @ features[rows].T
    return covariance * precision


def _pulls(
    parts: np.ndarray, own: int, places: Sequence[tuple[str, int]]
) -> tuple[tuple[str, int, float], ...]:
    others = [i for i in np.argsort(-np.abs(parts), kind="stable") if i != own and parts[i]]
    return tuple((*places[i], round(float(parts[i]), 5)) for i in others[:MOST_PULLS])
