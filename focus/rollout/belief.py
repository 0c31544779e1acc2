"""What is known about the states of a step: critic belief, branch evidence, and their fusion.

Trajectories are ragged, the functions in `focus.branching` and `focus.credit` want flat arrays
of a fixed length. `StateBeliefs` stands between the two: rows are states, padded to a bucket so
that planning and refinement compile once and not once per step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from focus.branching.acquisition import StateFeatures
from focus.branching.plan import Plan, plan
from focus.credit.refine import RefineMode, posterior_features, refine_values
from focus.types import StateBelief, Trajectory


@dataclasses.dataclass(frozen=True)
class StateBeliefs:
    """Beliefs over all states of base trajectories, one row each, S rows with padding.

    Attributes:
      index: [n, 2] (trajectory, state) of row i; rows from n on are padding.
      shape: (B, N) of the ragged form: trajectories and largest number of states.
      mean: [S] critic mean before any branch of this step.
      error_features: [S, D].
      noise_var: [S].
      cost: [S] tokens.
      weight: [S] how much an error here moves the advantages; sums to 1.
      exists: [S] bool, states that have a value.
      branchable: [S] bool, states that can be continued.
      branch_count: [S] int32 continuations with an outcome.
      branch_sum: [S] sum of their outcomes.
    """

    index: np.ndarray
    shape: tuple[int, int]
    mean: np.ndarray
    error_features: np.ndarray
    noise_var: np.ndarray
    cost: np.ndarray
    weight: np.ndarray
    exists: np.ndarray
    branchable: np.ndarray
    branch_count: np.ndarray
    branch_sum: np.ndarray

    @property
    def branch_mean(self) -> np.ndarray:
        """[S] mean outcome of the continuations, 0 where there is none."""
        return (self.branch_sum / np.maximum(self.branch_count, 1)).astype(np.float32)

    def observe(self, rows: Sequence[int], outcomes: Sequence[float | None]) -> StateBeliefs:
        """Adds outcomes of continuations.

        Args:
          rows: the state that each continuation left.
          outcomes: None for a continuation without a score; it is no evidence, least of all 0.
        """
        scored = [(row, y) for row, y in zip(rows, outcomes, strict=True) if y is not None]
        count, total = self.branch_count.copy(), self.branch_sum.copy()
        for row, outcome in scored:
            count[row] += 1
            total[row] += outcome
        return dataclasses.replace(self, branch_count=count, branch_sum=total)

    def refine(
        self, mode: RefineMode, value_range: tuple[float, float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Critic and branches fused: see `focus.credit.refine.refine_values`.

        Returns:
          refined values [S] and the variances that are left [S].
        """
        arrays = jax.device_put(
            (self.mean, self.error_features, self.noise_var, self.branch_mean, self.branch_count)
        )
        refined, variance = _refine(
            *arrays, mode=mode, value_range=value_range, mask=jax.device_put(self.exists)
        )
        return jax.device_get(refined), jax.device_get(variance)

    def features(self, value_range: tuple[float, float]) -> StateFeatures:
        """What the next round plans with: every outcome so far is in it.

        Always the joint posterior, whatever mode refines the values: what a branch has already
        taught must not be paid for twice.
        """
        mean, _ = self.refine("joint", value_range)
        errors = _posterior(
            *jax.device_put((self.error_features, self.noise_var, self.branch_count, self.exists))
        )
        return StateFeatures(
            mean=jax.device_put(mean),
            error_features=errors,
            noise_var=jax.device_put(self.noise_var),
            cost=jax.device_put(self.cost),
            weight=jax.device_put(self.weight),
            mask=jax.device_put(self.branchable),
        )

    def plan(
        self,
        budget: int,
        *,
        rule: str,
        ks: tuple[int, ...],
        max_picks: int,
        max_per_state: int | None,
        sampled_count: np.ndarray,
        seed: int,
        value_range: tuple[float, float],
    ) -> Plan:
        """One round of `focus.branching.plan.plan`.

        Args:
          budget: tokens that the round may plan for.
          rule: see `focus.branching.acquisition.RULES`.
          ks: see `plan`.
          max_picks: see `plan`.
          max_per_state: see `plan`.
          sampled_count: [S] continuations that were started, those without an outcome included.
          seed: for rules that draw.
          value_range: range of outcomes.

        Returns:
          The plan, on the host.
        """
        return jax.device_get(
            _plan(
                self.features(value_range),
                *jax.device_put((np.float32(budget), np.uint32(seed), sampled_count)),
                rule=rule,
                ks=ks,
                max_picks=max_picks,
                max_per_state=max_per_state,
            )
        )

    def to_trajectories(self, values: np.ndarray, fill: float = 0.0) -> np.ndarray:
        """Row values [S] back to [B, N], `fill` where there is no state with a value."""
        ragged = np.full(self.shape, fill, values.dtype)
        there = self.exists[: len(self.index)]
        trajectory, state = self.index[there].T
        ragged[trajectory, state] = values[: len(self.index)][there]
        return ragged


def make_beliefs(
    trajectories: Sequence[Trajectory],
    scores: StateBelief,
    *,
    env_branchable: bool,
    max_context: int,
    smallest_bucket: int = 256,
) -> StateBeliefs:
    """Lays out the states of base trajectories, with no evidence yet.

    A state has a value if something can still happen after it, so not where the environment
    ended the episode; a trajectory that failed teaches nothing and is left out. A state can be
    continued if, moreover, a segment followed it and its prompt leaves room for one.

    The weight is this project's rule: policy tokens of the two segments that touch a state,
    which are the tokens whose advantage its value enters, normalised to sum 1.

    Args:
      trajectories: base rollouts.
      scores: the critic's belief about them.
      env_branchable: whether the environment can be continued twice from one state.
      max_context: the engine's, in tokens.
      smallest_bucket: S is this times a power of two.

    Returns:
      Beliefs of S rows.

    Raises:
      ValueError: scores do not cover the trajectories, or are not finite where they must be.
    """
    num_states = [len(trajectory.states) for trajectory in trajectories]
    shape = (len(trajectories), max(num_states, default=0))
    if scores.mean.shape[0] != shape[0] or scores.mean.shape[1] < shape[1]:
        raise ValueError(
            f"scores of shape {scores.mean.shape} do not cover {shape[0]} trajectories of up to "
            f"{shape[1]} states; score exactly the trajectories that were passed in"
        )
    index = np.array(
        [(b, j) for b, count in enumerate(num_states) for j in range(count)], np.int32
    ).reshape(-1, 2)
    rows = np.array([_row(t, j, max_context) for t in trajectories for j in range(len(t.states))])
    tokens, exists, open_ = rows.reshape(-1, 3).T
    exists = exists.astype(bool)
    size = bucket_size(len(index), smallest_bucket)

    def flat(array: np.ndarray, dtype=np.float32) -> np.ndarray:
        values = np.where(_like(exists, array), array, 0)
        padding = np.zeros((size - len(index), *array.shape[1:]), dtype)
        return np.concatenate([values.astype(dtype), padding])

    by_state = {
        name: getattr(scores, name)[index[:, 0], index[:, 1]]
        for name in ("mean", "error_features", "noise_var", "cost")
    }
    for name, values in by_state.items():
        bad = exists & ~np.isfinite(values).reshape(len(index), -1).all(axis=1)
        if bad.any():
            b, j = index[np.argmax(bad)]
            raise ValueError(
                f"{name} of state {j} of trajectory {trajectories[b].id} is not finite; the "
                "critic has diverged: restore a checkpoint and lower critic.learning_rate"
            )
    total = tokens[exists].sum()
    return StateBeliefs(
        index=index,
        shape=shape,
        **{name: flat(values) for name, values in by_state.items()},
        weight=flat(tokens / total if total else tokens),
        exists=flat(exists, bool),
        branchable=flat(open_.astype(bool) & env_branchable, bool),
        branch_count=np.zeros(size, np.int32),
        branch_sum=np.zeros(size, np.float32),
    )


def bucket_size(count: int, smallest: int) -> int:
    """The smallest `smallest * 2^i` that holds `count`."""
    size = smallest
    while size < count:
        size *= 2
    return size


def _row(trajectory: Trajectory, state: int, max_context: int) -> tuple[int, bool, bool]:
    """Policy tokens that touch a state, whether it has a value, whether it can be continued."""
    touching = trajectory.segments[max(state - 1, 0) : state + 1]
    tokens = sum(segment.num_tokens for segment in touching)
    prompt_tokens = len(trajectory.states[state].prompt_ids)
    exists = prompt_tokens > 0 and trajectory.end != "failed"
    followed = state < len(trajectory.segments)
    return tokens, exists, exists and followed and prompt_tokens < max_context


def _like(mask: np.ndarray, array: np.ndarray) -> np.ndarray:
    """`mask` with trailing axes, to broadcast against `array`."""
    return mask.reshape(mask.shape + (1,) * (array.ndim - 1))


_refine = jax.jit(refine_values, static_argnames=("mode", "value_range"))
_posterior = jax.jit(posterior_features)


@functools.partial(jax.jit, static_argnames=("rule", "ks", "max_picks", "max_per_state"))
def _plan(features, budget, seed, sampled_count, *, rule, ks, max_picks, max_per_state) -> Plan:
    return plan(
        features,
        budget,
        rule=rule,
        ks=ks,
        max_picks=max_picks,
        key=jax.random.key(seed),
        existing_count=sampled_count,
        max_per_state=max_per_state,
    )


def uninformed_scores(trajectories: Sequence[Trajectory]) -> StateBelief:
    """Scores for rules that need no critic: nothing is known but what continuations cost.

    The cost of a state is the mean over this step's rollouts of what they generated from the
    same turn on.

    Args:
      trajectories: base rollouts.
    """
    shape = (len(trajectories), max((len(t.states) for t in trajectories), default=0))
    left = np.full(shape, np.nan)
    for b, trajectory in enumerate(trajectories):
        tokens = [segment.num_tokens for segment in trajectory.segments]
        left[b, : len(tokens)] = np.cumsum(tokens[::-1])[::-1]
    played = np.isfinite(left)
    by_turn = np.where(played, left, 0.0).sum(axis=0) / np.maximum(played.sum(axis=0), 1)
    return StateBelief(
        mean=np.full(shape, 0.5),
        error_features=np.zeros((*shape, 1)),
        variance=np.zeros(shape),
        noise_var=np.full(shape, 0.25),
        cost=np.broadcast_to(np.maximum(by_turn, 1.0), shape),
    )
