"""What acquisition rules may look at: the pool of states of a step, and helpers that fill it."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from focus.credit.errors import ErrorFeatures, masked
from focus.credit.refine import MIN_NOISE_VAR
from focus.types import ABSENT, Array

# A continuation generates at least one token; also keeps a gain per token finite.
MIN_COST_TOKENS = 1.0

# Who fills an optional channel, for the message where it is missing.
CHANNELS = {
    "score_norm": "1 - sum_a pi(a)^2 of the segment that left the state, from the scoring pass",
    "next_state": "the row of the state that follows along the rollout, -1 at its end",
    "entropy": "mean token entropy of the segment that left the state, from the scoring pass",
    "nll": "length-normalised negative log-prob of the segment that left the state",
    "log_ratio": "discounted log-ratio of current policy to rollout policy from the state on",
    "rollout": "the rollout that the state lies on",
    "branch_count": "continuations sampled so far, or existing_count of the plan",
    "score": "of a process reward model or judge",
    "cut": "states that a cut point lies before, see `cut_points`",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateFeatures:
    """The pool: what is known about every state that may be branched.

    Padding (`mask` False) may hold anything. Optional channels are None when absent; a rule that
    lacks one raises a ValueError that names it.

    Attributes:
      mean: [S] critic mean V.
      error_features: [S, D] with `e(s) . e(s') = Cov[V(s), V(s')]`, so `tau2(s) = |e(s)|^2`; or
        `ErrorFeatures`, where tasks and states have errors of their own.
      noise_var: [S] variance of one outcome given the state, floored at `MIN_NOISE_VAR`.
      cost: [S] tokens that one continuation is predicted to generate; below 1 counts as 1.
      weight: [S] how much an error of V at the state matters, >= 0; see `state_weights`.
      mask: [S] bool, states that exist and may be branched.
      entropy: [S] policy entropy of the turn that left the state.
      turns_left: [S] turns until the limit.
      depth: [S] branchings between the task's start and the state.
      score_norm: [S] sum over the tokens of the segment that left the state of
        `1 - sum_a pi(a)^2`.
      next_state: [S] int32 row of the state after that segment, -1 where the rollout ended.
      nll: [S] mean negative log-prob of that segment's tokens.
      log_ratio: [S] APPO's discounted log-ratio of the current policy to the one that sampled.
      rollout: [S] int32 rollout that the state lies on.
      branch_count: [S] continuations sampled so far.
      score: [S] process score.
      cut: [S] bool, states that SPO would cut at.
    """

    mean: Array
    error_features: Array | ErrorFeatures
    noise_var: Array
    cost: Array
    weight: Array
    mask: Array
    entropy: Array = ABSENT
    turns_left: Array = ABSENT
    depth: Array = ABSENT
    score_norm: Array = ABSENT
    next_state: Array = ABSENT
    nll: Array = ABSENT
    log_ratio: Array = ABSENT
    rollout: Array = ABSENT
    branch_count: Array = ABSENT
    score: Array = ABSENT
    cut: Array = ABSENT


def require_channels(features: StateFeatures, rule: str, *names: str) -> None:
    """Checks that a rule has what it reads.

    Raises:
      ValueError: a channel is None; the message says what would fill it.
    """
    for name in names:
        if getattr(features, name) is None:
            raise ValueError(
                f"acquisition rule {rule!r} needs the channel {name!r} of StateFeatures "
                f"({CHANNELS[name]}), which is None"
            )


def clean(features: StateFeatures) -> StateFeatures:
    """Replaces what stands at absent states by harmless numbers and floors noise and cost."""
    mask = features.mask

    def there(x, fill=0.0):
        return None if x is None else jnp.where(mask, x, jnp.asarray(fill, jnp.asarray(x).dtype))

    optional = {name: there(getattr(features, name)) for name in CHANNELS if name != "next_state"}
    following = features.next_state
    if following is not None:
        # A state that may not be branched still is what comes next, and its value is read.
        optional["next_state"] = jnp.where(mask, following, -1)
    return dataclasses.replace(
        features,
        mean=there(features.mean),
        error_features=masked(features.error_features, mask),
        noise_var=jnp.where(mask, jnp.maximum(features.noise_var, MIN_NOISE_VAR), 1.0),
        cost=jnp.where(mask, jnp.maximum(features.cost, MIN_COST_TOKENS), MIN_COST_TOKENS),
        weight=there(features.weight),
        **optional,
    )


def state_weights(segment_amount: Array, segment_mask: Array) -> Array:
    """How much a trajectory's states matter: what lies in the two segments that touch each.

        w(s_j) = amount_{j-1} + amount_j

    An error of V(s_j) enters the advantages of exactly those segments. With `amount` the sum
    over their tokens of `1 - sum_a pi(a)^2`, the expected squared norm of the score in the
    logits, this is how far the error can move the policy (this project's rule); with the number
    of tokens, how many it reaches. Normalise over the pool.

    Args:
      segment_amount: [N] of each segment.
      segment_mask: [N] bool, segments that exist; the others may hold anything.

    Returns:
      [N + 1].
    """
    chex.assert_rank([segment_amount, segment_mask], 1)
    amount = jnp.where(segment_mask, segment_amount, 0.0)
    return jnp.pad(amount, (1, 0)) + jnp.pad(amount, (0, 1))


def cut_points(uncertain: Array, segment_mask: Array, *, every: int = 5) -> Array:
    """States of a trajectory that SPO-chain would cut at (arXiv:2505.23564), moved to turns.

    The method cuts at every fifth token of probability below .9. A state is a cut point if one
    of those lies in the segment that led to it; the start is one, too.

    Args:
      uncertain: [N] int32 tokens of each segment with a probability below .9.
      segment_mask: [N] bool.
      every: uncertain tokens between two cuts.

    Returns:
      [N + 1] bool.

    Raises:
      ValueError: `every` below 1.
    """
    if every < 1:
        raise ValueError(f"every must be >= 1 token, got {every}")
    total = jnp.cumsum(jnp.where(segment_mask, uncertain, 0))
    crossed = total // every > (total - jnp.where(segment_mask, uncertain, 0)) // every
    return jnp.pad(segment_mask & crossed, (1, 0), constant_values=True)
