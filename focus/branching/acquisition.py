"""Acquisition rules: how much each state is worth branching.

A rule maps `StateFeatures` to one score per state, higher first. Two kinds of planner use it
(see `plan`): "greedy" rules are re-evaluated after every pick, because what a branch teaches
about one state it also teaches about the states whose errors correlate; "ranked" rules are
evaluated once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from focus.credit.errors import ErrorFeatures, masked, variances, weighted_covariance
from focus.credit.refine import MIN_NOISE_VAR
from focus.types import Array

# A continuation generates at least one token; also keeps a gain per token finite.
MIN_COST_TOKENS = 1.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateFeatures:
    """The pool: what is known about every state that may be branched.

    Padding (`mask` False) may hold anything. Optional channels are None when absent; a rule that
    lacks one raises a ValueError.

    Attributes:
      mean: [S] critic mean V.
      error_features: [S, D] with `e(s) . e(s') = Cov[V(s), V(s')]`, so `tau2(s) = |e(s)|^2`; or
        `ErrorFeatures`, where tasks and states have errors of their own.
      noise_var: [S] variance of one outcome given the state, floored at `MIN_NOISE_VAR`.
      cost: [S] tokens that one continuation is predicted to generate; below 1 counts as 1.
      weight: [S] how much an error of V at the state matters, >= 0.
      mask: [S] bool, states that exist and may be branched.
      entropy: [S] policy entropy of the turn that left the state.
      turns_left: [S] turns until the limit.
      depth: [S] branchings between the task's start and the state.
    """

    mean: Array
    error_features: Array | ErrorFeatures
    noise_var: Array
    cost: Array
    weight: Array
    mask: Array
    entropy: Array | None = None
    turns_left: Array | None = None
    depth: Array | None = None


def clean(features: StateFeatures) -> StateFeatures:
    """Replaces the core channels of absent states by harmless numbers and floors noise and cost."""
    mask = features.mask
    return dataclasses.replace(
        features,
        mean=jnp.where(mask, features.mean, 0.0),
        error_features=masked(features.error_features, mask),
        noise_var=jnp.where(mask, jnp.maximum(features.noise_var, MIN_NOISE_VAR), 1.0),
        cost=jnp.where(mask, jnp.maximum(features.cost, MIN_COST_TOKENS), MIN_COST_TOKENS),
        weight=jnp.where(mask, features.weight, 0.0),
    )


def expected_error_reduction(features: StateFeatures, key: Array | None = None) -> Array:
    """Expected reduction of the critic's weighted error per token, for one continuation.

        score(s) = sum_{s'} w(s') Cov(s', s)^2 / (tau2(s) + noise2(s)) / c(s)

    This project's rule (expected error reduction under a Gaussian belief). The numerator counts
    every state whose error correlates with the one at s, so that one branch can serve many. As a
    greedy rule it is re-evaluated after each pick for every number of continuations.

    Args:
      features: the pool.
      key: unused.

    Returns:
      [S] reduction of weighted variance per generated token, -inf for absent states.
    """
    del key
    pool = clean(features)
    gain = weighted_covariance(pool.error_features, pool.weight) / (
        variances(pool.error_features) + pool.noise_var
    )
    return jnp.where(pool.mask, gain / pool.cost, -jnp.inf)


def uniform(features: StateFeatures, key: Array | None = None) -> Array:
    """Every state alike; when not all fit, an even thinning of the pool.

    Equal branching at every state as in VinePPO (arXiv:2410.01679). The order is this project's
    rule: the r-th existing state is ranked by the fractional part of r times the golden ratio.
    Any prefix of that order is spread evenly over the pool (at most three different gaps), and
    unlike a fixed stride it cannot lock on to one turn of trajectories of equal length.

    Args:
      features: the pool, in trajectory order.
      key: unused.

    Returns:
      [S] minus that fractional part, -inf for absent states.
    """
    del key
    rank = (jnp.cumsum(features.mask) - 1).astype(jnp.uint32)
    golden = jnp.uint32(2654435769)  # 2^32 / golden ratio: the fraction in exact integers
    fraction = (rank * golden).astype(jnp.float32) / 2.0**32
    return jnp.where(features.mask, -fraction, -jnp.inf)


def random(features: StateFeatures, key: Array | None = None) -> Array:
    """States in uniformly random order.

    Args:
      features: the pool.
      key: a `jax.random.key`, consumed.

    Returns:
      [S] scores in [0, 1), -inf for absent states.

    Raises:
      ValueError: no key.
    """
    if key is None:
        raise ValueError("the random rule needs key=jax.random.key(...), got None")
    return jnp.where(features.mask, jax.random.uniform(key, features.mask.shape), -jnp.inf)


@dataclasses.dataclass(frozen=True)
class AcquisitionRule:
    """One entry of `RULES`.

    Attributes:
      scores: `scores(features, key) -> [S]`, -inf for states that must not be picked.
      planner: "greedy" re-evaluates after every pick (only error reduction does), "ranked" goes
        down the order of the scores once.
      reference: where the rule comes from.
    """

    scores: Callable[[StateFeatures, Array | None], Array]
    planner: Literal["greedy", "ranked"]
    reference: str


RULES: dict[str, AcquisitionRule] = {
    "expected_error_reduction": AcquisitionRule(
        scores=expected_error_reduction, planner="greedy", reference="this project's rule"
    ),
    "uniform": AcquisitionRule(
        scores=uniform, planner="ranked", reference="VinePPO, arXiv:2410.01679"
    ),
    "random": AcquisitionRule(scores=random, planner="ranked", reference="control"),
}
