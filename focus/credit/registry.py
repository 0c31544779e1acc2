"""Estimators by name, with what they read and where they come from.

To add one: write a pure function `CreditBatch -> Credit` and one entry in `ESTIMATORS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from focus.credit import baselines
from focus.credit.primitives import require_channels
from focus.types import Credit, CreditBatch

Evidence = Literal["code", "paper", "reconstructed"]
Granularity = Literal["trajectory", "segment", "token"]


@dataclasses.dataclass(frozen=True)
class EstimatorSpec:
    """What is known about an estimator without running it.

    Attributes:
      fn: `fn(batch, **hparams) -> Credit`.
      inputs: channels of the batch that it reads beyond the masks. A conditional one (needed by
        one setting of a hyperparameter) is checked by `fn`.
      hparams: name -> default.
      reference: paper.
      evidence: how the definition is known: released "code", the "paper"'s text, or
        "reconstructed" by this project.
      family: "td", "group" or "monte_carlo".
      granularity: what one scalar of credit covers.
      min_group_size: base rollouts per task below which the estimator has no signal.
    """

    fn: Callable[..., Credit]
    inputs: tuple[str, ...]
    hparams: Mapping[str, Any]
    reference: str
    evidence: Evidence
    family: str
    granularity: Granularity
    min_group_size: int = 1


ESTIMATORS: dict[str, EstimatorSpec] = {
    "focus": EstimatorSpec(
        fn=baselines.focus,
        inputs=("outcome", "segment_reward", "truncated", "value"),
        hparams={
            "discount": 1.0,
            "lambda_": 0.95,
            "lambda_mode": "fixed",
            "truncation": "bootstrap",
        },
        reference="FOCUS: TD(lambda) over branch-refined critic values",
        evidence="reconstructed",
        family="td",
        granularity="segment",
    ),
    "ppo": EstimatorSpec(
        fn=baselines.ppo,
        inputs=("outcome", "segment_reward", "truncated", "value"),
        hparams={"discount": 1.0, "lambda_": 0.95, "truncation": "bootstrap"},
        reference="Schulman et al., arXiv:1707.06347 and arXiv:1506.02438, over turns",
        evidence="code",
        family="td",
        granularity="segment",
    ),
    "grpo": EstimatorSpec(
        fn=baselines.grpo,
        inputs=("outcome", "segment_reward", "group_id"),
        hparams={"ddof": 1, "eps": 1e-6, "singleton": "keep"},
        reference="Shao et al., DeepSeekMath, arXiv:2402.03300",
        evidence="code",
        family="group",
        granularity="trajectory",
        min_group_size=2,
    ),
    "dr_grpo": EstimatorSpec(
        fn=baselines.dr_grpo,
        inputs=("outcome", "segment_reward", "group_id"),
        hparams={"singleton": "keep"},
        reference="Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783",
        evidence="code",
        family="group",
        granularity="trajectory",
        min_group_size=2,
    ),
    "rloo": EstimatorSpec(
        fn=baselines.rloo,
        inputs=("outcome", "segment_reward", "group_id"),
        hparams={"singleton": "zero"},
        reference="Ahmadian et al., Back to Basics, arXiv:2402.14740",
        evidence="code",
        family="group",
        granularity="trajectory",
        min_group_size=2,
    ),
    "vineppo": EstimatorSpec(
        fn=baselines.vineppo,
        inputs=("outcome", "segment_reward", "mc_return", "mc_mask"),
        hparams={"gaps": "fill"},
        reference="Kazemnejad et al., VinePPO, arXiv:2410.01679",
        evidence="code",
        family="monte_carlo",
        granularity="segment",
    ),
}


def estimate(name: str, batch: CreditBatch, **hparams: Any) -> Credit:
    """Turns outcomes into advantages with the estimator called `name`.

    Args:
      name: key of `ESTIMATORS`.
      batch: what the estimator may look at.
      **hparams: overrides of `ESTIMATORS[name].hparams`.

    Returns:
      `Credit`; never normalised over the batch.

    Raises:
      ValueError: unknown name or hyperparameter, or a channel that the batch lacks.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"estimator {name!r} is unknown; choose one of {sorted(ESTIMATORS)}")
    spec = ESTIMATORS[name]
    unknown = sorted(set(hparams) - set(spec.hparams))
    if unknown:
        raise ValueError(
            f"{name} has no hyperparameter {', '.join(unknown)}; it has {sorted(spec.hparams)}"
        )
    require_channels(batch, spec.inputs, name)
    return spec.fn(batch, **{**spec.hparams, **hparams})
