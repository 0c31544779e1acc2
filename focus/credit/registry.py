"""Methods of the credit library by name.

To add one: write a pure function `CreditBatch -> Credit` and one entry in its module's `SPECS`,
or in `ESTIMATORS` directly.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from focus.credit import (
    baselines,
    counterfactual,
    forks,
    grouping,
    learned,
    reasoning,
    self_credit,
    token_level,
)
from focus.credit.primitives import require_channels
from focus.credit.spec import EstimatorSpec
from focus.types import Credit, CreditBatch

ESTIMATORS: dict[str, EstimatorSpec] = {
    **baselines.SPECS,
    **token_level.SPECS,
    **reasoning.SPECS,
    **learned.SPECS,
    **grouping.SPECS,
    **forks.SPECS,
    **counterfactual.SPECS,
    **self_credit.SPECS,
}


def estimate(name: str, batch: CreditBatch, **hparams: Any) -> Credit:
    """Turns outcomes into advantages with the estimator called `name`.

    Args:
      name: key of `ESTIMATORS`.
      batch: what the estimator may look at; JAX or NumPy arrays.
      **hparams: overrides of `ESTIMATORS[name].hparams`.

    Returns:
      `Credit`; never normalised over the batch.

    Raises:
      ValueError: unknown name or hyperparameter, no estimator, or a channel that the batch lacks.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"estimator {name!r} is unknown; choose one of {sorted(ESTIMATORS)}")
    spec = ESTIMATORS[name]
    if spec.kind != "estimator":
        raise ValueError(
            f"{name} is a {spec.kind}, not an estimator: call {spec.fn.__module__}."
            f"{spec.fn.__name__} itself"
        )
    unknown = sorted(set(hparams) - set(spec.hparams))
    if unknown:
        raise ValueError(
            f"{name} has no hyperparameter {', '.join(unknown)}; it has {sorted(spec.hparams)}"
        )
    require_channels(batch, spec.inputs, name)
    batch = jax.tree.map(jnp.asarray, batch)
    return spec.fn(batch, **{**spec.hparams, **hparams})
