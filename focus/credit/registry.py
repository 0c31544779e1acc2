"""Methods of the credit library by name.

To add one: write a pure function `CreditBatch -> Credit` and one entry in its module's `SPECS`,
or in `ESTIMATORS` directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


# Kind of a default -> kinds that may stand in its place, and how to say so.
_KINDS = {
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a word"),
}


def _kind(value: Any) -> type | None:
    """Of a Python value or of an array, which may be traced; None: no hyperparameter has it."""
    if not hasattr(value, "dtype"):
        too_large = type(value) is int and abs(value) >= 2**31
        return type(value) if type(value) in _KINDS and not too_large else None
    families = ((bool, np.bool_), (int, jnp.integer), (float, jnp.floating))
    return next((kind for kind, family in families if jnp.issubdtype(value.dtype, family)), None)


def check_hparams(name: str, hparams: Mapping[str, Any], *, user: str = "") -> None:
    """Checks names and kinds of hyperparameters.

    Args:
      name: key of `ESTIMATORS`.
      hparams: overrides of its hyperparameters.
      user: who set them, for the message.

    Raises:
      ValueError: an unknown one, or one of another kind than its default.
    """
    defaults = ESTIMATORS[name].hparams
    unknown = sorted(set(hparams) - set(defaults))
    if unknown:
        raise ValueError(
            f"{user}{name} has no hyperparameter {', '.join(unknown)}; it has {sorted(defaults)}"
        )
    for key, value in hparams.items():
        kinds, said = _KINDS.get(type(defaults[key]), ((), ""))
        if kinds and _kind(value) not in kinds:
            raise ValueError(
                f"{user}{name}: {key}={value!r} must be {said}; the default is {defaults[key]!r}"
            )


def estimate(name: str, batch: CreditBatch, **hparams: Any) -> Credit:
    """Turns outcomes into advantages with the estimator called `name`.

    Args:
      name: key of `ESTIMATORS`.
      batch: what the estimator may look at; JAX or NumPy arrays.
      **hparams: overrides of `ESTIMATORS[name].hparams`.

    Returns:
      `Credit`; never normalised over the batch.

    Raises:
      ValueError: unknown name or hyperparameter, a hyperparameter of another kind than its
        default, no estimator, or a channel that the batch lacks.
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
