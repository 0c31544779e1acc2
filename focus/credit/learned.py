"""Family A: credit from learned evaluators (critics, process reward models, judges).

Training an evaluator is its method's larger half and isn't here. Each function is the rule that
turns an evaluator's outputs into advantages, and where there is one, into regression targets.
The rules of `baselines` hold; a truncated row counts as ended.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from focus.credit import primitives
from focus.credit.hparams import is_off
from focus.credit.rows import (
    group_advantage,
    group_of_segments,
    key_in_group,
    policy_tokens,
    returns,
    scored_rows,
    segment_rewards,
    segments_of,
    to_credit,
    token_credit,
    token_rewards,
)
from focus.credit.spec import GROUP, RETURN, EstimatorSpec, describe
from focus.types import Array, Credit, CreditBatch


def archer(batch: CreditBatch, *, discount: float = 0.95) -> Credit:
    """Twin action values minus twin state values.

        A_j = min(q, q2) - min(v, v2),   yQ = r + discount V(s_{j+1}),   yV = min(q, q2)

    ArCHer (arXiv:2402.19446). Evidence: code; the released trainer's discount is .9. The values
    are the target networks' for the targets; replay and Polyak averages are outside.

    Args:
      batch: reads `q`, `q2` [B, S], `value`, `v2` [B, S + 1].
      discount: per segment.

    Returns:
      `Credit`; targets["q"] and targets["value"], [B, S].
    """
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    q = jnp.where(segments, jnp.minimum(batch.q, batch.q2), 0.0)
    v = jnp.where(segments, jnp.minimum(batch.value, batch.v2)[:, :-1], 0.0)
    rewards = segment_rewards(batch, rows, batch.outcome)
    target = jnp.where(segments, rewards + discount * primitives.next_value(v, segments), 0.0)
    return to_credit(batch, q - v, rows, targets={"q": target, "value": q})


def step_agent(
    batch: CreditBatch,
    *,
    form: Literal["implicit", "irl"] = "implicit",
    beta: float = 0.1,
    discount: float = 1.0,
) -> Credit:
    """Rewards each segment for looking like an expert's.

        implicit: r_j = -beta (log-ratio of the expert's action - log-ratio of the agent's)
        irl:      r_j = log D_j - log(1 - D_j)

    StepAgent (arXiv:2411.03817). Evidence: reconstructed; the margin's sign is turned so that
    what the expert prefers by less is worth more. Rewards and outcome are summed to go.

    Args:
      batch: reads `expert_score` [B, S]: the expert action's log-ratio, or D in (0, 1);
        "implicit" also reads `ref_logp` [B, L].
      form: "implicit" or "irl".
      beta: of the implicit margin.
      discount: per segment.

    Returns:
      `Credit`; aux["reward"] [B, S].

    Raises:
      ValueError: unknown `form`, or "implicit" without `ref_logp`.
    """
    primitives.require_choice("form", form, ("implicit", "irl"))
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    mask = policy_tokens(batch, rows)
    if form == "implicit":
        primitives.require_channels(batch, ("ref_logp",), "step_agent with form='implicit'")
        ratio = primitives.log_ratio(batch.behaviour_logp, batch.ref_logp, mask)
        agent = primitives.reduce_by_segment(ratio, batch.token_segment, mask, segments.shape[1])
        reward = -beta * (jnp.where(segments, batch.expert_score, 0.0) - agent)
    else:
        # Half is no evidence either way; it also keeps padding out of the logarithms.
        chance = jnp.where(segments, batch.expert_score, 0.5)
        reward = jnp.log(chance) - jnp.log1p(-chance)
    reward = jnp.where(segments, reward, 0.0)
    total = reward + segment_rewards(batch, rows, batch.outcome)
    advantages = primitives.reward_to_go(total, segments, discount=discount)
    return to_credit(batch, advantages, rows, aux={"reward": reward})


def sweet_rl(batch: CreditBatch, *, beta: float = 1.0) -> Credit:
    """Mean log-ratio of a critic that sees the answer to the reference.

        A_j = beta mean_{t in j} (priv_logp_t - ref_logp_t)

    SWEET-RL (arXiv:2503.15478). Evidence: code, which scales by .1 in the critic's own loss.
    Ranking candidates and the preference loss on pairs are outside.

    Args:
      batch: reads `priv_logp` and `ref_logp`, [B, L].
      beta: scale.

    Returns:
      `Credit`.
    """
    rows = scored_rows(batch)
    mask = policy_tokens(batch, rows)
    ratio = primitives.log_ratio(batch.priv_logp, batch.ref_logp, mask, beta=beta)
    advantages = primitives.reduce_by_segment(
        ratio, batch.token_segment, mask, batch.segment_mask.shape[1], rule="mean"
    )
    return to_credit(batch, advantages, rows)


def spa_rl(
    batch: CreditBatch,
    *,
    grounding: float = 0.5,
    discount: float = 1.0,
    lambda_: float = 1.0,
    critic: bool = False,
) -> Credit:
    """Progress of each segment plus a bonus for calls that were executed.

        r_j = c_j + grounding valid_j,   A = GAE(r, V)

    SPA-RL (arXiv:2505.20732). Evidence: code; its WebShop script replaces c by the return minus
    the mean of the task's other rows. The outcome isn't added: the c of a row sum to it.

    Args:
      batch: reads `score` (c) and `valid`, [B, S]; `value` [B, S + 1] when `critic`.
      grounding: bonus.
      discount, lambda_: per segment.
      critic: whether V is `value`; otherwise 0.

    Returns:
      `Credit`; aux["reward"] [B, S], aux["progress_loss"] [B], `(sum c - R)^2`.

    Raises:
      ValueError: `critic` without `value`.
    """
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    progress = jnp.where(segments, batch.score, 0.0)
    reward = progress + jnp.where(segments & batch.valid, grounding, 0.0)
    value = jnp.zeros_like(reward)
    if critic:
        primitives.require_channels(batch, ("value",), "spa_rl with critic=True")
        value = batch.value[:, :-1]
    advantages = primitives.masked_gae(value, reward, segments, discount=discount, lambda_=lambda_)
    error = jnp.sum(progress, axis=1) - returns(batch, rows)
    aux = {"reward": reward, "progress_loss": jnp.square(error)}
    targets = {"value": jnp.where(segments, advantages + value, 0.0)} if critic else {}
    return to_credit(batch, advantages, rows, targets=targets, aux=aux)


def agent_prm(batch: CreditBatch, *, discount: float = 1.0, lambda_: float = 0.95) -> Credit:
    """GAE with the promise of actions in the place of state values.

        delta_j = r_j + discount Q_{j+1} - Q_j,   A_j = delta_j + discount lambda A_{j+1}

    AgentPRM (arXiv:2511.08325). Evidence: paper.

    Args:
      batch: reads `q` [B, S].
      discount, lambda_: per segment.

    Returns:
      `Credit`; targets["q"] [B, S] is A + Q.
    """
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    rewards = segment_rewards(batch, rows, batch.outcome)
    advantages = primitives.masked_gae(
        batch.q, rewards, segments, discount=discount, lambda_=lambda_
    )
    target = jnp.where(segments, advantages + batch.q, 0.0)
    return to_credit(batch, advantages, rows, targets={"q": target})


def critic_search(
    batch: CreditBatch,
    *,
    weight: float = 0.25,
    mix: Literal["convex", "add"] = "convex",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """GRPO mixed with a judge's labels, standardised over all segments of the group.

        A_ij = (1 - weight) A_i + weight (label_ij - mean_g) / (std_g + eps)

    CriticSearch (arXiv:2511.12159). Evidence: reconstructed (the mixing).

    Args:
      batch: reads `score` [B, S], the labels.
      weight: of the labels.
      mix: "convex" as above, or "add": GRPO keeps weight 1.
      ddof, eps: see `baselines.grpo`.

    Returns:
      `Credit`.

    Raises:
      ValueError: unknown `mix`.
    """
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    norm = {"ddof": ddof, "eps": eps}
    overall = group_advantage(batch, rows, **norm)
    group = group_of_segments(batch)
    local = primitives.group_normalise(batch.score, group, segments, **norm)
    return to_credit(batch, primitives.mix(overall[:, None], local, weight, rule=mix), rows)


def swe_trace(
    batch: CreditBatch, *, outcome_weight: float = 0.6, ddof: int = 1, eps: float = 1e-6
) -> Credit:
    """GRPO over a mixture of success and a rubric's score.

        R' = outcome_weight success + (1 - outcome_weight) rubric

    SWE-TRACE (arXiv:2604.14820). Evidence: paper; the weight's default is this project's.

    Args:
      batch: reads `success` [B] and `score` [B, S], whose last valid entry is the row's rubric
        score in [0, 1].
      outcome_weight: above .5 any success outranks any failure; 1 is GRPO on success.
      ddof, eps: see `baselines.grpo`.

    Returns:
      `Credit`; aux["reward"] [B].
    """
    rows = scored_rows(batch)
    last = primitives.last_segment(batch.segment_mask)
    rubric = jnp.sum(jnp.where(last, batch.score, 0.0), axis=1)
    reward = outcome_weight * batch.success + (1 - outcome_weight) * rubric
    reward = jnp.where(rows, reward, 0.0)
    scalar = primitives.group_normalise(reward, batch.group_id, rows, ddof=ddof, eps=eps)
    return to_credit(
        batch,
        scalar[:, None],
        rows,
        aux={"reward": reward},
    )


def pro_cua(batch: CreditBatch, *, ddof: int = 1, eps: float = 1e-6) -> Credit:
    """Scores of candidate actions, standardised among those from one state.

        A_j = (score_j - mean_s) / (std_s + eps)

    PRO-CUA (arXiv:2605.29119). Evidence: code. Sampling the candidates is a controller's.

    Args:
      batch: reads `score` and `state_key`, [B, S]; a state belongs to one group.
      ddof, eps: see `baselines.grpo`.

    Returns:
      `Credit`; a candidate alone in its state gets 0.
    """
    rows = scored_rows(batch)
    segments, key = segments_of(batch, rows), key_in_group(batch, batch.state_key)
    return to_credit(
        batch, primitives.group_normalise(batch.score, key, segments, ddof=ddof, eps=eps), rows
    )


def vis_critic_score(
    success: Array,
    progress: Array,
    error: Array,
    *,
    success_weight: float = 1.0,
    progress_weight: float = 1.0,
    error_weight: float = 1.0,
) -> Array:
    """Channel `score` [B, S] from three heads, `w_s success + w_p progress - w_e error`.

    VisCritic (arXiv:2606.24525). Evidence: reconstructed.
    """
    return success_weight * success + progress_weight * progress - error_weight * error


def vis_critic(
    batch: CreditBatch, *, discount: float = 1.0, ddof: int = 1, eps: float = 1e-6
) -> Credit:
    """Scores to go, standardised over all segments of the group.

        G_j = score_j + r_j + discount G_{j+1},   A = (G - mean_g) / (std_g + eps)

    VisCritic (arXiv:2606.24525). Evidence: reconstructed.

    Args:
      batch: reads `score` [B, S], see `vis_critic_score`.
      discount: per segment.
      ddof, eps: see `baselines.grpo`.

    Returns:
      `Credit`.
    """
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    total = jnp.where(segments, batch.score, 0.0)
    total = total + segment_rewards(batch, rows, batch.outcome)
    to_go = primitives.reward_to_go(total, segments, discount=discount, in_order=True)
    group = group_of_segments(batch)
    return to_credit(
        batch, primitives.group_normalise(to_go, group, segments, ddof=ddof, eps=eps), rows
    )


def hygae(
    batch: CreditBatch,
    *,
    weight: float = 0.5,
    discount: float = 1.0,
    lambda_: float = 0.95,
) -> Credit:
    """Convex mixture of GAE over segments and GAE over tokens.

        A = weight A_segment + (1 - weight) A_token

    HyGAE (arXiv:2607.23605). Evidence: paper. A segment of n tokens discounts by discount^n; its
    value is read at its last token. Inside a segment the target of the segment level is
    discounted backwards from there.

    Args:
      batch: reads `token_value` [B, L].
      weight: of the segment level.
      discount: per token.
      lambda_: trace decay of both levels.

    Returns:
      `Credit`; targets["token_value"] [B, L].
    """
    rows = scored_rows(batch)
    mask = policy_tokens(batch, rows)
    width = batch.segment_mask.shape[1]
    count = primitives.reduce_by_segment(mask * 1.0, batch.token_segment, mask, width)
    played = segments_of(batch, rows) & (count > 0)
    values = primitives.at_last_token(batch.token_value, batch.token_segment, mask, width)
    rewards = token_rewards(batch, rows, mask)
    local = primitives.masked_gae(
        batch.token_value, rewards, mask, discount=discount, lambda_=lambda_
    )
    coarse = primitives.masked_gae(
        values,
        primitives.reduce_by_segment(rewards, batch.token_segment, mask, width),
        played,
        discount=jnp.power(discount, count),
        lambda_=lambda_,
    )

    def spread(x):
        return primitives.broadcast_to_tokens(x, batch.token_segment)

    place = jnp.cumsum(mask, axis=1)
    last = spread(primitives.at_last_token(place * 1.0, batch.token_segment, mask, width))
    remaining = jnp.where(mask, last - place, 0.0)
    target = weight * spread(coarse + values) * jnp.power(discount, remaining)
    target = target + (1 - weight) * (local + batch.token_value)
    return token_credit(
        batch,
        primitives.mix(local, spread(coarse), weight),
        rows,
        targets={"token_value": jnp.where(mask, target, 0.0)},
    )


def sapo_value(
    positive_logit: Array, negative_logit: Array, *, max_return: float = 1.0,
    temperature: float = 4.0,
) -> Array:  # fmt: skip
    """A value read from two vocabulary logits, `max_return clip(gap / temperature, -1, 1)`.

    SAPO (arXiv:2608.19842). Evidence: paper; both defaults are this project's.
    """
    gap = (positive_logit - negative_logit) / temperature
    return max_return * jnp.clip(gap, -1.0, 1.0)


def sapo_2608_19842(
    batch: CreditBatch,
    *,
    discount: float = 1.0,
    lambda_: float = 0.95,
    whiten: bool = True,
    ddof: int = 0,
    eps: float = 1e-6,
    invalid_penalty: float = 0.0,
) -> Credit:
    """GAE over segments with values that the policy itself reads out.

        A = whiten(GAE(r, V)),   yV = GAE + V,   yQ = r + discount Q_{j+1}

    SAPO (arXiv:2608.19842); two other methods share its name. Evidence: paper. Works with one
    rollout per task.

    Args:
      batch: reads `value` [B, S + 1] before and `q` [B, S] after the action, see `sapo_value`;
        `valid` [B, S] when `invalid_penalty` is not 0.
      discount, lambda_: per segment.
      whiten: standardise over all valid segments of the batch.
      ddof, eps: of that.
      invalid_penalty: taken from the reward of segments that are not `valid`.

    Returns:
      `Credit`; targets["value"] and targets["q"], [B, S].

    Raises:
      ValueError: `invalid_penalty` without `valid`.
    """
    rows = scored_rows(batch)
    segments = segments_of(batch, rows)
    rewards = segment_rewards(batch, rows, batch.outcome)
    if not is_off(invalid_penalty):
        primitives.require_channels(batch, ("valid",), f"invalid_penalty={invalid_penalty}")
        rewards = rewards - jnp.where(segments & ~batch.valid, invalid_penalty, 0.0)
    value = jnp.where(segments, batch.value[:, :-1], 0.0)
    advantages = primitives.masked_gae(value, rewards, segments, discount=discount, lambda_=lambda_)
    targets = {
        "value": advantages + value,
        "q": jnp.where(
            segments, rewards + discount * primitives.next_value(batch.q, segments), 0.0
        ),
    }
    if whiten:
        everyone = jnp.zeros(segments.shape, jnp.int32)
        size = jnp.abs(value) * segments.shape[1]  # of what is subtracted, and adds up along a row
        advantages = primitives.group_normalise(
            advantages, everyone, segments, ddof=ddof, eps=eps, size=size
        )
    return to_credit(batch, advantages, rows, targets=targets)


SPECS: dict[str, EstimatorSpec] = {
    "archer": describe(
        archer, (*RETURN, "q", "q2", "value", "v2"), "ArCHer, arXiv:2402.19446", "code", "learned",
        "segment", cost="twin critics, replay",
    ),
    "step_agent": describe(
        step_agent, (*RETURN, "expert_score"), "StepAgent, arXiv:2411.03817", "reconstructed",
        "learned", "segment", cost="expert actions or discriminator",
        default_inputs=("behaviour_logp", "ref_logp"),
    ),
    "sweet_rl": describe(
        sweet_rl, ("priv_logp", "ref_logp"), "SWEET-RL, arXiv:2503.15478", "code", "learned",
        "segment", cost="critic that sees the answer",
    ),
    "spa_rl": describe(
        spa_rl, (*RETURN, "score", "valid"), "SPA-RL, arXiv:2505.20732", "code", "learned",
        "segment", cost="progress head",
    ),
    "agent_prm": describe(
        agent_prm, (*RETURN, "q"), "AgentPRM, arXiv:2511.08325", "paper", "learned", "segment",
        cost="action-value model",
    ),
    "critic_search": describe(
        critic_search, (*GROUP, "score"), "CriticSearch, arXiv:2511.12159", "reconstructed",
        "learned", "segment", cost="judge with the answer",
    ),
    "swe_trace": describe(
        swe_trace, ("success", "group_id", "score"), "SWE-TRACE, arXiv:2604.14820", "paper",
        "learned", "trajectory", cost="rubric judge",
    ),
    "pro_cua": describe(
        pro_cua, ("group_id", "score", "state_key"), "PRO-CUA, arXiv:2605.29119", "code", "learned",
        "segment", cost="candidates per state, judge",
    ),
    "vis_critic": describe(
        vis_critic, (*GROUP, "score"), "VisCritic, arXiv:2606.24525", "reconstructed", "learned",
        "segment", cost="vision critic",
    ),
    "hygae": describe(
        hygae, (*RETURN, "token_value"), "HyGAE, arXiv:2607.23605", "paper", "learned", "token",
        cost="critic on tokens",
    ),
    "sapo_2608_19842": describe(
        sapo_2608_19842, (*RETURN, "value", "q"), "SAPO, arXiv:2608.19842", "paper", "learned",
        "segment", cost="none: values read from the policy",
    ),
}  # fmt: skip
