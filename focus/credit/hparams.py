"""Hyperparameters of estimators: their kinds and ranges, and values that are traced.

Numbers may be traced, so that one program sweeps over them; what selects the program, words and
flags, may not. Ranges are checked wherever a value is known.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

# Kind of a default -> kinds that may stand in its place, and how to say so.
_KINDS = {
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a word"),
}

# Name -> (least, most), of all methods that have it; "(" leaves the end itself out.
_SHARE, _POSITIVE, _NOT_NEGATIVE = "[0, 1]", "(0, inf)", "[0, inf)"
RANGES: dict[str, str] = {
    **dict.fromkeys(
        ("discount", "lambda_", "segment_discount", "segment_lambda", "distance_discount"), _SHARE
    ),
    **dict.fromkeys(("prob_threshold", "outcome_weight", "trace_floor", "ddof"), _SHARE),
    **dict.fromkeys(("temperature", "phi", "bound", "mad_floor", "clip"), _POSITIVE),
    **dict.fromkeys(("lowest", "highest"), _POSITIVE),
    **dict.fromkeys(
        ("eps", "kl_coef", "invalid_penalty", "shrinkage", "tolerance", "weight_range"),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(("max_length", "eta"), _NOT_NEGATIVE),
    **dict.fromkeys(("buffer", "iterations"), "[1, inf)"),
    "negative_floor": "[-inf, 0]",
}


def is_traced(value: Any) -> bool:
    """Whether a value will only be known when the program runs."""
    return isinstance(value, Tracer)


def is_off(value: Any) -> bool:
    """Whether a coefficient is known to be 0, so that what it weighs is not read."""
    return not is_traced(value) and not np.any(value)


def check_kind(default: Any, value: Any) -> None:
    """Checks that a value is of the kind of a default.

    Raises:
      ValueError: it is not, or is traced and selects a program.
    """
    kinds, said = _KINDS.get(type(default), ((), ""))
    if kinds and _kind(value) not in kinds:
        raise ValueError(f"must be {said}; the default is {default!r}")
    if isinstance(default, bool) and is_traced(value):
        raise ValueError("selects the program: mark it as static, a traced flag cannot")


def check_range(name: str, value: Any) -> None:
    """Checks a number where it is known.

    Raises:
      ValueError: it is not finite, or not in the range of `name`.
    """
    if isinstance(value, (bool, str)) or value is None or is_traced(value):
        return
    if not (isinstance(value, (int, float)) or hasattr(value, "dtype")):
        return
    bounds = RANGES.get(name, "(-inf, inf)")
    least, most = (float(x) for x in bounds[1:-1].split(","))
    inside = (np.asarray(value) >= least) if bounds[0] == "[" else (np.asarray(value) > least)
    inside &= (np.asarray(value) <= most) if bounds[-1] == "]" else (np.asarray(value) < most)
    if not np.all(inside):
        within = "finite" if bounds == "(-inf, inf)" else f"in {bounds}"
        raise ValueError(f"must be {within}")


def _kind(value: Any) -> type | None:
    """Of a Python value or of an array, which may be traced; None: no hyperparameter has it."""
    if not hasattr(value, "dtype"):
        too_large = type(value) is int and abs(value) >= 2**31
        return type(value) if type(value) in _KINDS and not too_large else None
    families = ((bool, np.bool_), (int, jnp.integer), (float, jnp.floating))
    return next((kind for kind, family in families if jnp.issubdtype(value.dtype, family)), None)
