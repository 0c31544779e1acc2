"""What is known about a method of the credit library without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

Evidence = Literal["code", "paper", "reconstructed"]
Granularity = Literal["trajectory", "segment", "token"]
Kind = Literal["estimator", "loss", "controller", "targets"]


@dataclasses.dataclass(frozen=True)
class EstimatorSpec:
    """One entry of the credit library.

    Attributes:
      fn: an estimator is `fn(batch, **hparams) -> Credit`; other kinds say in their docstring
        what they take.
      inputs: channels of the batch that it reads beyond the masks. A conditional one (needed by
        one setting of a hyperparameter) is checked by `fn`.
      default_inputs: what it reads besides under the defaults of its hyperparameters, and not
        under every setting; of channels that can replace each other, the one that is asked for.
      hparams: name -> default.
      reference: paper.
      evidence: how the definition is known: released "code", the "paper"'s text, or
        "reconstructed" by this project.
      family: "td", "group", "monte_carlo", "tree", "learned", ...
      granularity: what one scalar of credit covers.
      min_group_size: base rollouts per task below which the estimator has no signal.
      cost: what it needs beyond rollouts and one policy update, in a few words.
      kind: "estimator" (advantages), "loss" (a weight or term of the policy loss), "controller"
        (where to sample) or "targets" (what a critic learns from).
    """

    fn: Callable[..., Any]
    inputs: tuple[str, ...]
    hparams: Mapping[str, Any]
    reference: str
    evidence: Evidence
    family: str
    granularity: Granularity
    min_group_size: int = 1
    cost: str = "none"
    kind: Kind = "estimator"
    default_inputs: tuple[str, ...] = ()


# What almost every estimator reads: a row's return, and what it is compared with.
RETURN = ("outcome", "segment_reward")
GROUP = (*RETURN, "group_id")


def describe(
    fn: Callable[..., Any],
    inputs: tuple[str, ...],
    reference: str,
    evidence: Evidence,
    family: str,
    granularity: Granularity,
    **fields: Any,
) -> EstimatorSpec:
    """The spec of `fn`, whose keyword-only arguments are its hyperparameters.

    Args:
      fn, inputs, reference, evidence, family, granularity: see `EstimatorSpec`.
      **fields: the others; a method that reads `group_id` needs two rows a group if nothing else
        is said.

    Returns:
      The spec.
    """
    fields.setdefault("min_group_size", 2 if "group_id" in inputs else 1)
    return EstimatorSpec(
        fn=fn,
        inputs=inputs,
        hparams=dict(fn.__kwdefaults__ or {}),
        reference=reference,
        evidence=evidence,
        family=family,
        granularity=granularity,
        **fields,
    )
