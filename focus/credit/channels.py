"""Checks of what an estimator is given, and who fills each optional channel of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from focus.types import CreditBatch

# Said when an estimator misses a channel.
CHANNEL_PRODUCERS = {
    "value": "run a critic (critic.enabled)",
    "value_variance": "run a critic with error features (critic.enabled) and keep the variance "
    "that value refinement returns",
    "value_covariance": "run a critic with error features (critic.enabled)",
    "baseline": "average the outcomes of other rollouts (credit.baselines.fallback_baseline)",
    **dict.fromkeys(("mc_return", "mc_mask"), "sample continuations (branching.rule)"),
    "ref_logp": "score the rows with the reference parameters",
    "teacher_logp": "score the rows with a teacher",
    "priv_logp": "score the rows with a model that sees the gold answer",
    **dict.fromkeys(("entropy", "segment_entropy"), "keep the entropies of the score pass"),
    "token_value": "run a critic on every token",
    "copied": "mark the tokens that a fork shares with its parent",
    **dict.fromkeys(("segment_id", "coalition"), "score every subset of text spans (reward model)"),
    "prefix_key": "hash the token prefixes of each group",
    "score": "run a process reward model, a judge or a progress head",
    "valid": "take it from the environment's info: the call was executed",
    **dict.fromkeys(("q", "q2", "v2"), "run a critic of actions, and its twin"),
    "expert_score": "score an expert's actions, or run a discriminator",
    **dict.fromkeys(("is_call", "is_answer", "is_summary"), "say what kind each segment is"),
    "probe_delta": "ask for the answer with and without each call",
    **dict.fromkeys(
        ("cited", "summary_mask"), "let summaries cite turns: context.manager=cite_summary"
    ),
    "dist_goal": "keep a graph of states per task, and measure in it",
    **dict.fromkeys(("state_key", "next_state_key"), "take the environment's state keys"),
    **dict.fromkeys(("action_key", "cluster", "intent"), "cluster the actions of each group"),
    **dict.fromkeys(("match", "match_class"), "match the turns of each group"),
    "edge": "annotate which segment uses which",
    **dict.fromkeys(("sim", "emb"), "embed the states"),
    **dict.fromkeys(
        ("do_return", "do_mask", "do_valid", "propensity", "m1", "m0"),
        "sample continuations after replacing a segment",
    ),
    **dict.fromkeys(
        ("parent", "leaf_traj", "node_entropy", "tree_id", "node_of_segment"),
        "lay out the tree of base rollouts and branches",
    ),
    **dict.fromkeys(
        ("parent_traj", "fork_segment", "fork_token"),
        "say where a rollout left which other (branching.rule)",
    ),
    "pivot_segment": "ask for a reflection that blames a segment",
    **dict.fromkeys(
        ("cut", "cut_value", "cut_mask"), "sample continuations at cut points (branching.rule)"
    ),
    **dict.fromkeys(("hist_score", "hist_group", "is_revisit"), "keep earlier scores of tasks"),
    "progress": "say which share of training is done",
    "staleness": "say which weights sampled each token (rollout versions)",
}


def missing_channels(batch: CreditBatch, names: Sequence[str]) -> dict[str, str]:
    """Channels among `names` that are None, and who produces each."""
    return {
        name: CHANNEL_PRODUCERS.get(name, f"fill CreditBatch.{name}")
        for name in names
        if getattr(batch, name) is None
    }


def require_channels(batch: CreditBatch, names: Sequence[str], user: str) -> None:
    """Checks that the optional channels an estimator reads are there.

    Args:
      batch: the batch.
      names: channel names, fields of `CreditBatch`.
      user: who reads them, for the message.

    Raises:
      ValueError: a channel is None; the message says who produces it.
    """
    for name, producer in missing_channels(batch, names).items():
        raise ValueError(f"{user} needs the channel {name}, which is None: {producer}")


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Checks a hyperparameter that is one of a few words.

    Raises:
      ValueError: `value` is none of `choices`.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {tuple(choices)}")
