"""What is known about the states of a step: critic belief, evidence, and their fusion.

Trajectories are ragged, the functions in `focus.branching` and `focus.credit` want arrays of a
fixed shape. `StateBeliefs` stands between the two: its rows are a grid of tasks, rollouts of a
task and states of a rollout, padded, so that planning and refinement compile once and not once
per step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from focus.branching.features import StateFeatures, cut_points, state_weights
from focus.branching.plan import Plan, plan
from focus.branching.prediction import predicted_gains
from focus.credit import errors
from focus.credit.errors import Posterior
from focus.credit.refine import (
    RefineMode,
    StateValues,
    outcome_noise,
    posterior_features,
    refine_pool,
)
from focus.credit.structure import structured_errors
from focus.types import STATE_ARRAYS, Array, StateBelief, Trajectory

Weight = Literal["score_norm", "tokens"]
WEIGHTS: tuple[Weight, ...] = ("score_norm", "tokens")


@dataclasses.dataclass(frozen=True)
class StateBeliefs:
    """Beliefs over all states of base trajectories; S = G R N rows (NumPy).

    Row (g R + i) N + j is state j of the i-th rollout of task g. Rows without a state are
    padding.

    Attributes:
      index: [S, 2] trajectory and state of each row, -1 for padding.
      first: [B] int32 row of each trajectory's first state.
      shape: (B, N') of the ragged form: trajectories and largest number of states.
      grid: (G, R, N).
      mean: [S] critic mean before any outcome of this step.
      error_features: [S, D] of ensemble or posterior.
      noise_var: [S] variance of one outcome around the mean.
      cost: [S] tokens.
      weight: [S] how much an error here matters, see `make_beliefs`; sums to 1.
      exists: [S] bool, states that have a value.
      branchable: [S] bool, states that can be continued.
      branch_count: [S] int32 continuations with an outcome.
      branch_sum: [S] sum of their outcomes.
      base_count: [S] int32, 1 at the first state of a rollout whose outcome counts as evidence.
      base_sum: [S] that outcome.
      scales: see `StateBelief`.
      signals: what rules read of the policy, by channel of `StateFeatures`; [S] each.
    """

    index: np.ndarray
    first: np.ndarray
    shape: tuple[int, int]
    grid: tuple[int, int, int]
    mean: np.ndarray
    error_features: np.ndarray
    noise_var: np.ndarray
    cost: np.ndarray
    weight: np.ndarray
    exists: np.ndarray
    branchable: np.ndarray
    branch_count: np.ndarray
    branch_sum: np.ndarray
    base_count: np.ndarray
    base_sum: np.ndarray
    scales: Any
    signals: dict[str, np.ndarray]

    @property
    def branch_mean(self) -> np.ndarray:
        """[S] mean outcome of the continuations, 0 where there is none."""
        return (self.branch_sum / np.maximum(self.branch_count, 1)).astype(np.float32)

    def row(self, trajectory: int, state: int) -> int:
        """The row of a state of a base trajectory."""
        return int(self.first[trajectory]) + state

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

    def with_evidence_of(self, other: StateBeliefs) -> StateBeliefs:
        """The outcomes that `other` has seen from the same states."""
        return dataclasses.replace(
            self, branch_count=other.branch_count, branch_sum=other.branch_sum
        )

    def _arguments(self) -> tuple[Any, ...]:
        """What the compiled functions read, on the device."""
        count = self.branch_count + self.base_count
        total = self.branch_sum + self.base_sum
        mean = (total / np.maximum(count, 1)).astype(np.float32)
        arrays = (self.scales, self.error_features, self.noise_var, self.exists)
        return jax.device_put((*arrays, self.mean, mean, count.astype(np.int32)))

    def prior(self) -> tuple[np.ndarray, np.ndarray]:
        """Epistemic variance and variance of one outcome, [S] each, before any evidence."""
        return jax.device_get(_prior(*self._arguments()[:4], grid=self.grid))

    def values(self, mode: RefineMode) -> tuple[StateValues, Posterior]:
        """Critic and outcomes fused, each value without the outcome of its own rollout.

        Returns:
          values [S], not clipped, and the belief after all evidence; on the device.
        """
        counted = np.repeat(self.base_count[:: self.grid[2]] > 0, self.grid[2])
        start = np.arange(len(self.mean)) // self.grid[2] * self.grid[2]
        own = (np.where(counted, start, -1).astype(np.int32), self.base_sum[start])
        return _values(*self._arguments(), *jax.device_put(own), grid=self.grid, mode=mode)

    def refine(
        self, mode: RefineMode, value_range: tuple[float, float] = (-np.inf, np.inf)
    ) -> tuple[np.ndarray, np.ndarray]:
        """Critic and all outcomes fused: what is known of the states, not what is a baseline.

        Returns:
          refined values [S] and the variances that are left [S]; 0 where there is no state.
        """
        refined, variance = _refine(*self._arguments(), grid=self.grid, mode=mode)
        refined, variance = jax.device_get((refined, variance))
        return np.where(self.exists, np.clip(refined, *value_range), 0.0), variance

    def features(self, value_range: tuple[float, float]) -> StateFeatures:
        """What the next round plans with: every outcome so far is in it.

        Always the joint posterior, whatever mode refines the values: what a branch has already
        taught must not be paid for twice.
        """
        mean, _ = self.refine("joint", value_range)
        after, noise_var = _after(*self._arguments(), grid=self.grid)
        pool = (mean, self.cost, self.weight, self.branchable, self.signals)
        mean, cost, weight, mask, signals = jax.device_put(pool)
        return StateFeatures(
            mean=mean,
            error_features=after,
            noise_var=noise_var,
            cost=cost,
            weight=weight,
            mask=mask,
            **signals,
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

    def predicted_gains(self, plan: Plan, value_range: tuple[float, float]) -> np.ndarray:
        """[S] what each state of a round's plan was chosen for, see `predicted_gains`."""
        chosen = jax.device_put((plan.count, plan.order))
        return jax.device_get(_gains(self.features(value_range), *chosen))

    def to_trajectories(self, values: np.ndarray, fill: float = 0.0) -> np.ndarray:
        """Row values [S] back to [B, N'], `fill` where there is no state with a value."""
        ragged = np.full(self.shape, fill, values.dtype)
        trajectory, state = self.index[self.exists].T
        ragged[trajectory, state] = values[self.exists]
        return ragged


def make_beliefs(
    trajectories: Sequence[Trajectory],
    scores: StateBelief,
    *,
    env_branchable: bool,
    max_context: int,
    smallest_bucket: int = 256,
    rollouts: int | None = None,
    states: int | None = None,
    weight: Weight = "tokens",
    siblings: bool = False,
) -> StateBeliefs:
    """Lays out the states of base trajectories, with no evidence but their own outcomes yet.

    A state has a value if something can still happen after it, so not where the environment
    ended the episode; a trajectory that failed teaches nothing and is left out. A state can be
    continued if, moreover, a segment followed it and its prompt leaves room for one.

    The weight is this project's rule: what is summed over the two segments that touch a state,
    normalised to sum 1, because theirs are the advantages that its value enters. See
    `focus.branching.features.state_weights`.

    Args:
      trajectories: base rollouts.
      scores: the critic's belief about them.
      env_branchable: whether the environment can be continued twice from one state.
      max_context: the engine's, in tokens.
      smallest_bucket: S is about this times a power of two.
      rollouts: R, most rollouts of a task; None: as many as there are.
      states: N, most states of a rollout; None: as many as there are.
      weight: what is summed, the score norms of `scores.signals` or policy tokens.
      siblings: whether the outcome of a rollout counts as evidence about its first state, and
        so about its siblings.

    Returns:
      Beliefs of S rows.

    Raises:
      ValueError: scores do not cover the trajectories, or are not finite where they must be;
        a weight that needs signals without them; more rollouts or states than there is room for.
    """
    if weight not in WEIGHTS:
        raise ValueError(f"weight {weight!r} is unknown; choose one of {WEIGHTS}")
    if weight == "score_norm" and scores.signals is None:
        raise ValueError(
            "weight 'score_norm' reads the policy's score norms, and the scorer gave no signals; "
            "use weight 'tokens' (branching.weight)"
        )
    num_states = [len(trajectory.states) for trajectory in trajectories]
    shape = (len(trajectories), max(num_states, default=0))
    if scores.mean.shape[0] != shape[0] or scores.mean.shape[1] < shape[1]:
        raise ValueError(
            f"scores of shape {scores.mean.shape} do not cover {shape[0]} trajectories of up to "
            f"{shape[1]} states; score exactly the trajectories that were passed in"
        )
    grid, first = _grid(trajectories, shape[1], rollouts, states, smallest_bucket)
    size = grid[0] * grid[1] * grid[2]
    index = np.full((size, 2), -1, np.int32)
    for b, count in enumerate(num_states):
        index[first[b] : first[b] + count] = [(b, j) for j in range(count)]
    there = index[:, 0] >= 0
    exists, branchable, tokens = np.zeros(size, bool), np.zeros(size, bool), np.zeros(size)
    for row in np.flatnonzero(there):
        trajectory, state = trajectories[index[row, 0]], int(index[row, 1])
        exists[row], branchable[row] = _exists(trajectory, state, max_context)
        if state < len(trajectory.segments):
            tokens[row] = trajectory.segments[state].num_tokens

    def flat(array: np.ndarray, kept: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
        """[B, N', ...] at the rows of `kept`; 0 elsewhere."""
        rows = np.zeros((size, *array.shape[2:]), dtype)
        rows[kept] = array[index[kept, 0], index[kept, 1]]
        return rows

    by_state = {name: flat(getattr(scores, name), exists) for name in STATE_ARRAYS}
    for name, values in by_state.items():
        bad = ~np.isfinite(values).reshape(size, -1).all(axis=1)
        if bad.any():
            b, j = index[np.argmax(bad)]
            raise ValueError(
                f"{name} of state {j} of trajectory {trajectories[b].id} is not finite; the "
                "critic has diverged: restore a checkpoint and lower critic.learning_rate"
            )
    signals = _signals(scores, index, exists, grid, flat)
    amount = signals["score_norm"] if weight == "score_norm" else tokens
    touching = jax.device_get(_touching(*jax.device_put((amount.astype(np.float32), there)), grid))
    touching = np.where(exists, touching, 0.0)
    total = touching.sum()
    base_count, base_sum = np.zeros(size, np.int32), np.zeros(size, np.float32)
    for b, trajectory in enumerate(trajectories):
        if siblings and trajectory.outcome is not None and exists[first[b]]:
            base_count[first[b]], base_sum[first[b]] = 1, trajectory.outcome
    return StateBeliefs(
        index=index,
        first=first,
        shape=shape,
        grid=grid,
        **{name: by_state[name] for name in ("mean", "error_features", "noise_var", "cost")},
        weight=(touching / total if total else touching).astype(np.float32),
        exists=exists,
        branchable=branchable & env_branchable,
        branch_count=np.zeros(size, np.int32),
        branch_sum=np.zeros(size, np.float32),
        base_count=base_count,
        base_sum=base_sum,
        scales=scores.scales,
        signals=signals,
    )


def bucket_size(count: int, smallest: int) -> int:
    """The smallest `smallest * 2^i` that holds `count`."""
    size = smallest
    while size < count:
        size *= 2
    return size


def _grid(
    trajectories: Sequence[Trajectory],
    longest: int,
    rollouts: int | None,
    states: int | None,
    smallest_bucket: int,
) -> tuple[tuple[int, int, int], np.ndarray]:
    """(G, R, N), and the row of each trajectory's first state."""
    tasks: dict[int, int] = {}
    place = []
    members: dict[int, int] = {}
    for trajectory in trajectories:
        task = tasks.setdefault(trajectory.group_id, len(tasks))
        place.append((task, members.get(task, 0)))
        members[task] = members.get(task, 0) + 1
    most = max(members.values(), default=1)
    rollouts, states = rollouts or most, states or max(longest, 1)
    if most > rollouts or longest > states:
        raise ValueError(
            f"{most} rollouts of one task with up to {longest} states do not fit into a grid of "
            f"{rollouts} rollouts with {states} states a task"
        )
    blocks = bucket_size(len(tasks), max(1, smallest_bucket // (rollouts * states)))
    first = np.array([(g * rollouts + i) * states for g, i in place], np.int32)
    return (blocks, rollouts, states), first


def _exists(trajectory: Trajectory, state: int, max_context: int) -> tuple[bool, bool]:
    """Whether a state has a value, and whether it can be continued."""
    prompt_tokens = len(trajectory.states[state].prompt_ids)
    exists = prompt_tokens > 0 and trajectory.end != "failed"
    followed = state < len(trajectory.segments)
    return exists, exists and followed and prompt_tokens < max_context


def _signals(scores, index, exists, grid, flat) -> dict[str, np.ndarray]:
    """Channels of `StateFeatures` that come from the policy and from where states lie."""
    rows = np.arange(len(index))
    next_exists = np.append(exists[1:], False) & (rows % grid[2] < grid[2] - 1)
    signals = {
        "next_state": np.where(exists & next_exists, rows + 1, -1).astype(np.int32),
        "rollout": (rows // grid[2]).astype(np.int32),
    }
    if scores.signals is None:
        return signals
    for name in ("score_norm", "entropy", "nll", "log_ratio"):
        signals[name] = flat(getattr(scores.signals, name), index[:, 0] >= 0)
    uncertain = flat(scores.signals.uncertain, index[:, 0] >= 0, np.int32)
    cuts = jax.device_get(_cuts(*jax.device_put((uncertain, index[:, 0] >= 0)), grid))
    return signals | {"cut": cuts}


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


# Compiled; all of them take what `StateBeliefs._arguments` gives, in its order.


def _model(scales, ensemble, spread, exists, grid) -> tuple[Any, Array]:
    """Error features of the pool and the variance of one outcome given the state."""
    if scales is None:
        return errors.masked(ensemble, exists), spread
    features = structured_errors(
        scales, ensemble.reshape(*grid, ensemble.shape[-1]), spread.reshape(grid)
    )
    features = errors.masked(features, exists)
    return features, outcome_noise(spread, errors.variances(features))


@functools.partial(jax.jit, static_argnames="grid")
def _prior(scales, ensemble, spread, exists, *, grid):
    features, noise_var = _model(scales, ensemble, spread, exists, grid)
    return errors.variances(features), noise_var


@functools.partial(jax.jit, static_argnames=("grid", "mode"))
def _refine(scales, ensemble, spread, exists, mean, outcome_mean, count, *, grid, mode):
    features, noise_var = _model(scales, ensemble, spread, exists, grid)
    values, _ = refine_pool(
        mean, features, noise_var, outcome_mean, count, exists, states=grid[2], mode=mode
    )
    return values.value, values.variance


@functools.partial(jax.jit, static_argnames=("grid", "mode"))
def _values(
    scales, ensemble, spread, exists, mean, outcome_mean, count, own_state, own_outcome,
    *, grid, mode,
):  # fmt: skip
    features, noise_var = _model(scales, ensemble, spread, exists, grid)
    return refine_pool(
        mean,
        features,
        noise_var,
        outcome_mean,
        count,
        exists,
        states=grid[2],
        mode=mode,
        own_state=own_state,
        own_outcome=own_outcome,
    )


@functools.partial(jax.jit, static_argnames="grid")
def _after(scales, ensemble, spread, exists, mean, outcome_mean, count, *, grid):
    features, noise_var = _model(scales, ensemble, spread, exists, grid)
    return posterior_features(features, noise_var, count, exists), noise_var


@functools.partial(jax.jit, static_argnames="grid")
def _touching(amount, there, grid):
    amount, there = (x.reshape(-1, grid[2]) for x in (amount, there))
    return jax.vmap(state_weights)(amount, there)[:, :-1].reshape(-1)


@functools.partial(jax.jit, static_argnames="grid")
def _cuts(uncertain, there, grid):
    uncertain, there = (x.reshape(-1, grid[2]) for x in (uncertain, there))
    return jax.vmap(cut_points)(uncertain, there)[:, :-1].reshape(-1)


_gains = jax.jit(predicted_gains)


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
