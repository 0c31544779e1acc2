"""How good is an estimator's credit? Held against exact advantages, and as a policy gradient.

All estimators read the same rollouts of one policy. For each the league says how its credit
goes with the true advantage (correlation, sign), what of it is systematic and what is chance
(bias and variance given state and action), and what gradient it makes: its direction, and the
signal along the true gradient against the noise, per token that was generated.

Batches of one world are independent draws, and every figure that is a square of an expectation
is estimated from products of different batches: few batches make it noisy, not biased.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from focus.types import Array

# True advantages below this are nobody's merit: their sign is not asked for.
MIN_ADVANTAGE = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sample:
    """What one estimator says of one batch, and what is true. Letters: B rows, S segments.

    Attributes:
      estimate: [B, S] mean advantage of the segment's tokens.
      truth: [B, S] exact advantage of its action in its state.
      weight: [B, S] tokens of the segment that enter the loss, 0 where there are none.
      state_action: [B, S] int32 in [0, M), which state and action of the world it is.
      policy_row: [B, S] int32 in [0, R).
      action: [B, S] int32 in [0, A).
      tokens: scalar, tokens that were generated for the batch.
    """

    estimate: Array
    truth: Array
    weight: Array
    state_action: Array
    policy_row: Array
    action: Array
    tokens: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the batches of one world, for one estimator.

    Attributes:
      batches: number of them.
      tokens: that were generated.
      moments: [6] over segments: count, e, t, e^2, t^2, e t; e is the estimate, t the truth.
      signs: [2] number of segments with a true sign, and of those that the estimate has too.
      cells: [4, M] over batches, for each state and action: visits n, n^2, sum s of (e - t), s^2.
      error: [M] sum of (e - t)^2.
      gradient: [R, A] sum of the batches' gradients.
      squared_norm: sum of their squared norms.
      along: [2] sum of their projections on the true gradient's direction, and of the squares.
    """

    batches: Array
    tokens: Array
    moments: Array
    signs: Array
    cells: Array
    error: Array
    gradient: Array
    squared_norm: Array
    along: Array


def no_sums(num_state_actions: int, policy: Array) -> Sums:
    """Before the first batch."""
    zero = jnp.zeros(())
    return Sums(
        batches=zero,
        tokens=zero,
        moments=jnp.zeros(6),
        signs=jnp.zeros(2),
        cells=jnp.zeros((4, num_state_actions)),
        error=jnp.zeros(num_state_actions),
        gradient=jnp.zeros_like(policy),
        squared_norm=zero,
        along=jnp.zeros(2),
    )


def add_batch(sums: Sums, sample: Sample, policy: Array, true_gradient: Array) -> Sums:
    """Adds one batch of a world.

    The batch's gradient is that of its loss, up to a factor that is the same for all:
    `g = sum over segments of weight * estimate * grad log pi(action | row)`.

    Args:
      sums: so far.
      sample: the batch.
      policy: [R, A] probabilities.
      true_gradient: [R, A] of success with respect to the logits.
    """
    played = sample.weight > 0
    e = jnp.where(played, sample.estimate, 0.0)
    t = jnp.where(played, sample.truth, 0.0)
    count = played.astype(e.dtype)
    moments = jnp.stack([jnp.sum(x) for x in (count, e, t, e * e, t * t, e * t)])
    decided = played & (jnp.abs(t) > MIN_ADVANTAGE)
    agrees = jnp.where(e == 0, 0.5, jnp.sign(e) == jnp.sign(t))
    signs = jnp.stack([jnp.sum(decided), jnp.sum(jnp.where(decided, agrees, 0.0))])

    visits = jnp.zeros_like(sums.error).at[sample.state_action].add(count)
    excess = jnp.zeros_like(sums.error).at[sample.state_action].add(e - t)
    error = jnp.zeros_like(sums.error).at[sample.state_action].add(jnp.square(e - t))

    score = jax.nn.one_hot(sample.action, policy.shape[-1]) - policy[sample.policy_row]
    push = jnp.where(played, sample.weight, 0.0) * e
    gradient = jnp.zeros_like(policy).at[sample.policy_row].add(push[..., None] * score)
    direction = true_gradient / jnp.maximum(jnp.linalg.norm(true_gradient), 1e-30)
    along = jnp.sum(gradient * direction)
    return Sums(
        batches=sums.batches + 1,
        tokens=sums.tokens + sample.tokens,
        moments=sums.moments + moments,
        signs=sums.signs + signs,
        cells=sums.cells + jnp.stack([visits, visits**2, excess, excess**2]),
        error=sums.error + error,
        gradient=sums.gradient + gradient,
        squared_norm=sums.squared_norm + jnp.sum(jnp.square(gradient)),
        along=sums.along + jnp.stack([along, along**2]),
    )


def read_sums(sums: Sums) -> dict[str, Array]:
    """What the batches of one world say, as scalars; averages over worlds are made of these.

    Returns:
      correlation: of estimates and truth over all segments; 0 where either does not vary.
      sign_agreement: share of segments; an estimate of 0 counts half.
      squared_bias: mean over segments of (E[e | state, action] - t)^2.
      squared_error: mean over the same segments of (e - t)^2.
      along: mean projection of a batch's gradient on the direction of the true one.
      squared_along: square of that expectation.
      squared_gradient: squared norm of the expected gradient.
      noise: expected squared distance of a batch's gradient from its expectation.
      tokens: of a batch.
    """
    n, e, t, ee, tt, et = sums.moments
    spread = (n * ee - e * e) * (n * tt - t * t)
    # A spread that is rounding alone is none.
    varies = spread > 1e-10 * (n * ee) * (n * tt)
    correlation = jnp.where(
        varies, (n * et - e * t) / jnp.sqrt(jnp.where(varies, spread, 1.0)), 0.0
    )
    visits, visits_sq, excess, excess_sq = sums.cells
    # Pairs of visits in different batches: their errors are independent given state and action.
    pairs = visits**2 - visits_sq
    known = pairs > 0.5
    bias = jnp.where(known, (excess**2 - excess_sq) / jnp.where(known, pairs, 1.0), 0.0)
    weight = jnp.where(known, visits, 0.0)
    total = jnp.maximum(jnp.sum(weight), 1.0)
    b = sums.batches
    between = b * (b - 1)
    squared_gradient = (jnp.sum(sums.gradient**2) - sums.squared_norm) / between
    return {
        "correlation": correlation,
        "sign_agreement": sums.signs[1] / jnp.maximum(sums.signs[0], 1.0),
        "squared_bias": jnp.sum(weight * bias) / total,
        "squared_error": jnp.sum(jnp.where(known, sums.error, 0.0)) / total,
        "along": sums.along[0] / b,
        "squared_along": (sums.along[0] ** 2 - sums.along[1]) / between,
        "squared_gradient": squared_gradient,
        "noise": sums.squared_norm / b - squared_gradient,
        "tokens": sums.tokens / b,
    }
