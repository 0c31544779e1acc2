"""The estimators that every comparison starts from: FOCUS, turn-level PPO, the group-relative
family and VinePPO.

All share three rules.
  * The outcome is added to the reward of the row's last valid segment.
  * A row takes part only if `row_mask` keeps it and it has policy tokens; the others get no
    advantage, leave the loss mask, and stay out of every baseline.
  * A truncated row may lack an outcome (NaN). Estimators that cannot bootstrap treat it as a
    row without a score. The environment's own turn limit truncates nothing.
None of them normalises over the batch; see `primitives.masked_whiten`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from focus.credit import primitives, refine, td
from focus.credit.rows import (
    group_advantage,
    playing_rows,
    returns,
    scored_rows,
    segment_rewards,
    segments_of,
    to_credit,
)
from focus.credit.spec import GROUP, RETURN, EstimatorSpec, describe
from focus.types import Array, Credit, CreditBatch

LambdaMode = Literal["fixed", "trust"]
Truncation = Literal["bootstrap", "fail", "mask"]
Gaps = Literal["fill", "merge"]


# --- temporal-difference estimators --------------------------------------------------------------


def _td_credit(
    batch: CreditBatch, lambda_: Array, *, discount: float, truncation: Truncation
) -> Credit:
    """TD(lambda) over `value` with per-segment `lambda_` [B, S] and one rule for cut rows."""
    primitives.require_choice("truncation", truncation, ("bootstrap", "fail", "mask"))
    rows, outcome = playing_rows(batch), batch.outcome
    cut = jnp.zeros_like(batch.truncated)
    if truncation == "bootstrap":
        cut = batch.truncated
        outcome = jnp.where(batch.truncated, 0.0, outcome)
    elif truncation == "fail":
        outcome = jnp.where(batch.truncated & jnp.isnan(outcome), 0.0, outcome)
    else:
        rows = rows & ~batch.truncated

    def one_row(values, rewards, mask, lambda_row, truncated):
        return td.segment_advantages(
            values, rewards, mask, discount=discount, lambda_=lambda_row, truncated=truncated
        )

    segments = segments_of(batch, rows)
    rewards = segment_rewards(batch, rows, outcome)
    advantages = jax.vmap(one_row)(batch.value, rewards, segments, lambda_, cut)
    targets = jnp.where(segments, advantages + batch.value[:, :-1], 0.0)
    aux = {"lambda": jnp.where(segments, lambda_, 0.0)}
    return to_credit(batch, advantages, rows, targets={"value": targets}, aux=aux)


def fallback_baseline(outcome: Array, group_id: Array, is_base: Array, scored: Array) -> Array:
    """The best baseline that needs no critic: what other rollouts of the task came to.

        b_i = mean outcome of the other base rollouts of its group, or else of all other groups

    Branches are not counted: what they come to depends on what the rollout that they left did
    before. This project's rule.

    Args:
      outcome: [B]; not read where `scored` is False.
      group_id: [B] int32.
      is_base: [B] bool, rollouts from the task's start.
      scored: [B] bool, rows with an outcome.

    Returns:
      [B]; 1/2 for a row that is alone.
    """
    counted = is_base & scored
    score = jnp.where(counted, outcome, 0.0)
    others = counted[None] & ~jnp.eye(outcome.size, dtype=bool)
    siblings = others & (group_id[:, None] == group_id[None])

    def mean(of, otherwise):
        number = jnp.sum(of, axis=1)
        return jnp.where(number > 0, of @ score / jnp.maximum(number, 1), otherwise)

    return mean(siblings, mean(others, 0.5))


def focus(
    batch: CreditBatch,
    *,
    discount: float = 1.0,
    lambda_: float = 0.95,
    lambda_mode: LambdaMode = "fixed",
    truncation: Truncation = "bootstrap",
) -> Credit:
    """TD(lambda) advantages of the segments between states, from refined values.

        delta_j = r_j + discount V*(s_{j+1}) - V*(s_j),   A_j = delta_j + discount lambda_j A_{j+1}

    `value` holds the refined values (`refine.refine_values`), so that branch evidence reaches
    the segments on both sides of a branched state. Values must not have seen the row's own
    outcome. Where the critic is not to be trusted (`baseline` is a number) that number is the
    value of all states of the row, and lambda is 1: what is left is the outcome against it.
    FOCUS (its paper has no arXiv number here). Evidence: reconstructed.

    Args:
      batch: reads `value`, `value_variance` when `lambda_mode` is "trust" (and then
        `value_covariance`, if it is there), and `baseline`, if it is there.
      discount: per segment.
      lambda_: read when `lambda_mode` is "fixed".
      lambda_mode: "fixed", or "trust": per segment from `td.trust_lambda`, with Bernoulli noise
        of outcomes in [0, 1]; with `value_covariance` less what the value's own error accounts
        for (`refine.outcome_noise`).
      truncation: what a row counts as that we cut (budget, context). "bootstrap": the value
        where it was cut stands in for its outcome, which isn't read. "fail": its outcome counts,
        0 if it has none. "mask": it takes no part and its tokens leave the loss.

    Returns:
      `Credit`; targets["value"] [B, S] are the lambda-returns, aux["lambda"] [B, S] what was used.

    Raises:
      ValueError: unknown `lambda_mode` or `truncation`, or no `value_variance` for "trust".
    """
    primitives.require_choice("lambda_mode", lambda_mode, ("fixed", "trust"))
    if lambda_mode == "fixed":
        weights = jnp.full(batch.segment_mask.shape, lambda_, batch.value.dtype)
    else:
        primitives.require_channels(batch, ("value_variance",), "focus with lambda_mode='trust'")
        noise_var = refine.bernoulli_noise_var(batch.value)
        if batch.value_covariance is not None:
            noise_var = refine.outcome_noise(noise_var, batch.value_variance)
        weights = jax.vmap(td.trust_lambda)(
            batch.value_variance, noise_var, batch.segment_mask, batch.value_covariance
        )
    if batch.baseline is not None:
        replaced = jnp.isfinite(batch.baseline)[:, None]
        baseline = jnp.where(replaced, batch.baseline[:, None], 0.0)
        batch = dataclasses.replace(batch, value=jnp.where(replaced, baseline, batch.value))
        weights = jnp.where(replaced, 1.0, weights)
    return _td_credit(batch, weights, discount=discount, truncation=truncation)


def ppo(
    batch: CreditBatch,
    *,
    discount: float = 1.0,
    lambda_: float = 0.95,
    truncation: Truncation = "bootstrap",
) -> Credit:
    """Turn-level generalised advantage estimation over the critic's values.

        delta_j = r_j + discount V(s_{j+1}) - V(s_j),   A_j = delta_j + discount lambda A_{j+1}

    The same recursion as `focus`; what differs is the content of `value`, the critic alone.
    A step is a segment, not a token, and no whitening follows. PPO (arXiv:1707.06347) and GAE
    (arXiv:1506.02438) over turns. Evidence: code.

    Args:
      batch: reads `value`.
      discount: per segment.
      lambda_: trace decay.
      truncation: see `focus`.

    Returns:
      `Credit`; targets["value"] [B, S] are the lambda-returns.

    Raises:
      ValueError: unknown `truncation`.
    """
    weights = jnp.full(batch.segment_mask.shape, lambda_, batch.value.dtype)
    return _td_credit(batch, weights, discount=discount, truncation=truncation)


# --- group-relative estimators -------------------------------------------------------------------


def _group_credit(batch: CreditBatch, **normalisation) -> Credit:
    """One scalar per row, its return compared with its group's, on all of its segments."""
    rows = scored_rows(batch)
    return to_credit(batch, group_advantage(batch, rows, **normalisation)[:, None], rows)


def grpo(
    batch: CreditBatch,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: primitives.Singleton = "zero",
) -> Credit:
    """Return of a row, standardised within its group.

        A_i = (R_i - mean_g R) / (std_g R + eps)

    GRPO (arXiv:2402.03300). Evidence: code.

    Args:
      batch: core channels only; R is the outcome plus any segment rewards.
      ddof: 1 for the sample standard deviation, 0 for the population's.
      eps: added to the standard deviation.
      singleton: the advantage of a row whose peers have no score: "zero", since nothing was
        compared, or its own R ("keep").

    Returns:
      `Credit`; sums to 0 over a group.

    Raises:
      ValueError: unknown `singleton`.
    """
    return _group_credit(batch, center="mean", scale="std", ddof=ddof, eps=eps, singleton=singleton)


def dr_grpo(batch: CreditBatch, *, singleton: primitives.Singleton = "zero") -> Credit:
    """Return of a row minus its group's mean, without the division that favours easy groups.

        A_i = R_i - mean_g R

    The method also divides the loss by a constant instead of a sequence's own length; that is
    the loss's part, not done here. Dr. GRPO (arXiv:2503.20783). Evidence: code.

    Args:
      batch: core channels only; R is the outcome plus any segment rewards.
      singleton: see `grpo`.

    Returns:
      `Credit`; sums to 0 over a group.

    Raises:
      ValueError: unknown `singleton`.
    """
    return _group_credit(batch, center="mean", scale="none", singleton=singleton)


def rloo(batch: CreditBatch, *, singleton: primitives.Singleton = "zero") -> Credit:
    """Return of a row minus the mean of the others in its group.

        A_i = R_i - mean_{j != i} R_j = n / (n - 1) (R_i - mean_g R)

    RLOO (arXiv:2402.14740). Evidence: code.

    Args:
      batch: core channels only; R is the outcome plus any segment rewards.
      singleton: see `grpo`.

    Returns:
      `Credit`.

    Raises:
      ValueError: unknown `singleton`.
    """
    return _group_credit(batch, center="loo", scale="none", singleton=singleton)


# --- Monte Carlo values --------------------------------------------------------------------------


def vineppo(batch: CreditBatch, *, gaps: Gaps = "fill") -> Credit:
    """Difference of Monte Carlo values between consecutive states.

        V(s_j) = mean_k mc_return[j, k],   A_j = r_j + V(s_{j+1}) - V(s_j),   V(end) = 0

    A state without continuations takes `V(s_j) = r_j + V(s_{j+1})`, backwards from the end of
    the row. So its own segment gets 0, and the difference between two estimated states goes to
    the first segment after the earlier one. Segments before the first estimated state get 0.
    VinePPO (arXiv:2410.01679). Evidence: code.

    Args:
      batch: reads `mc_return` and `mc_mask`.
      gaps: "fill" as above (the method's own rule for a row's end); advantages of a row add up
        to `R - V(s_0)`. "merge" gives the difference between two estimated states to all
        segments between them, as one long segment would get it; the choice for continuations at
        every n-th state, where "fill" would leave most segments without any signal.

    Returns:
      `Credit`; aux["value"] [B, S] are the values used, aux["estimated"] [B, S] bool where
      they were sampled.

    Raises:
      ValueError: unknown `gaps`.
    """
    primitives.require_choice("gaps", gaps, ("fill", "merge"))
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    estimated = segments & jnp.any(batch.mc_mask, axis=2)
    estimate = primitives.masked_mean(batch.mc_return, batch.mc_mask, axis=2)
    rewards = segment_rewards(batch, rows, batch.outcome)

    def backward(following, x):
        reward, value, known, exists = x
        reached = jnp.where(exists, reward, 0.0) + following
        current = jnp.where(known, value, reached)
        return current, (current, reached - current)

    def one_row(rewards, estimate, estimated, segments):
        _, (values, advantages) = jax.lax.scan(
            backward, jnp.zeros(()), (rewards, estimate, estimated, segments), reverse=True
        )
        if gaps == "merge":
            position = jnp.arange(estimated.shape[0])
            latest = jax.lax.cummax(jnp.where(estimated, position, -1))
            advantages = jnp.where(latest >= 0, advantages[jnp.maximum(latest, 0)], 0.0)
        return values, advantages

    values, advantages = jax.vmap(one_row)(rewards, estimate, estimated, segments)
    largest = jnp.maximum(jnp.max(jnp.abs(values), axis=1), jnp.abs(returns(batch, rows)))
    advantages = primitives.without_rounding(advantages, largest[:, None])
    aux = {"value": jnp.where(segments, values, 0.0), "estimated": estimated}
    return to_credit(batch, advantages, rows, aux=aux)


SPECS: dict[str, EstimatorSpec] = {
    "focus": describe(
        focus, (*RETURN, "truncated", "value"),
        "FOCUS: TD(lambda) over branch-refined critic values", "reconstructed", "td", "segment",
        cost="critic; branches for refined values",
    ),
    "ppo": describe(
        ppo, (*RETURN, "truncated", "value"),
        "Schulman et al., arXiv:1707.06347 and arXiv:1506.02438, over turns", "code", "td",
        "segment", cost="critic",
    ),
    "grpo": describe(
        grpo, GROUP, "Shao et al., DeepSeekMath, arXiv:2402.03300", "code", "group", "trajectory",
    ),
    "dr_grpo": describe(
        dr_grpo, GROUP, "Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783", "code",
        "group", "trajectory",
    ),
    "rloo": describe(
        rloo, GROUP, "Ahmadian et al., Back to Basics, arXiv:2402.14740", "code", "group",
        "trajectory",
    ),
    "vineppo": describe(
        vineppo, (*RETURN, "mc_return", "mc_mask"), "Kazemnejad et al., VinePPO, arXiv:2410.01679",
        "code", "monte_carlo", "segment", cost="continuations at every state",
    ),
}  # fmt: skip
