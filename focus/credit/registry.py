"""Methods of the credit library by name.

To add one: write a pure function `CreditBatch -> Credit` and one entry in its module's `SPECS`,
or in `ESTIMATORS` directly.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from focus.credit.hparams import check_kind, check_range
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


def check_hparams(name: str, hparams: Mapping[str, Any], *, user: str = "") -> None:
    """Checks names, kinds and ranges (`hparams.RANGES`) of hyperparameters.

    Args:
      name: key of `ESTIMATORS`.
      hparams: overrides of its hyperparameters.
      user: who set them, for the message.

    Raises:
      ValueError: an unknown one, one of another kind than its default, or out of range.
    """
    defaults = ESTIMATORS[name].hparams
    unknown = sorted(set(hparams) - set(defaults))
    if unknown:
        raise ValueError(
            f"{user}{name} has no hyperparameter {', '.join(unknown)}; it has {sorted(defaults)}"
        )
    for key, value in hparams.items():
        try:
            check_kind(defaults[key], value)
            check_range(key, value)
        except ValueError as error:
            raise ValueError(f"{user}{name}: {key}={value!r} {error}") from None


def estimate(name: str, batch: CreditBatch, **hparams: Any) -> Credit:
    """Turns outcomes into advantages with the estimator called `name`.

    Args:
      name: key of `ESTIMATORS`.
      batch: what the estimator may look at; JAX or NumPy arrays.
      **hparams: overrides of `ESTIMATORS[name].hparams`.

    Returns:
      `Credit`. Advantages are normalised over the batch by those methods alone that are defined
      so, and have an argument `whiten` that says it.

    Raises:
      ValueError: unknown name or hyperparameter, a hyperparameter of another kind than its
        default or out of range, no estimator, or a channel that the batch lacks.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"estimator {name!r} is unknown; choose one of {sorted(ESTIMATORS)}")
    spec = ESTIMATORS[name]
    if spec.kind != "estimator":
        raise ValueError(
            f"{name} is a {spec.kind}, not an estimator: call {spec.fn.__module__}."
            f"{spec.fn.__name__} itself"
        )
    check_hparams(name, hparams)
    require_channels(batch, spec.inputs, name)
    batch = jax.tree.map(jnp.asarray, batch)
    return spec.fn(batch, **{**spec.hparams, **hparams})
