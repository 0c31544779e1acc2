"""Why a state was branched, what came of it, and why V* is not simply what its branches say.

Rows of `branches.jsonl` in, numbers and sentences out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Differences between V* and a state's own branches that a page explains.
TELLING = 0.05
# What runs assumed of an outcome's variance before they recorded it: Bernoulli, floored.
NOISE_FLOOR = 1e-2


@dataclasses.dataclass(frozen=True)
class Reason:
    """How a branched state's value came about.

    Attributes:
      weight: of the state's own branches against the critic, `tau2 / (tau2 + noise2 / k)`.
      alone: where they alone would put V*, `V + weight (m - V)`.
      pull: by how much the branches of other states moved it from there.
      surprise: standardised residual of the branch mean; its square is 1 on average where the
        critic's variances are honest.
      predicted: expected reduction of the weighted error per generated token; None if it was not
        recorded.
      came: `predicted * surprise^2`, the reduction that came, by the tokens that were paid.
    """

    weight: float
    alone: float
    pull: float
    surprise: float
    predicted: float | None
    came: float | None


def noise_variance(row: Mapping[str, Any]) -> float:
    """Variance of one outcome of a branched state, as recorded or as it was assumed."""
    if row.get("noise_var") is not None:
        return float(row["noise_var"])
    return max(row["value"] * (1 - row["value"]), NOISE_FLOOR)


def reason(row: Mapping[str, Any]) -> Reason | None:
    """The account of a branched state; None without an outcome or a value.

    Args:
      row: of `branches.jsonl`.
    """
    if not row.get("count") or None in (row.get("value"), row.get("std"), row.get("mean")):
        return None
    noise = noise_variance(row) / row["count"]
    variance = row["std"] ** 2
    weight = variance / (variance + noise)
    residual = row["mean"] - row["value"]
    alone = row["value"] + weight * residual
    surprise = residual / (variance + noise) ** 0.5
    predicted = came = None
    if row.get("gain") is not None and row["cost_predicted"]:
        predicted = row["gain"] / (row["started"] * row["cost_predicted"])
        tokens = row["cost_actual"] or row["cost_predicted"]
        came = row["gain"] * surprise**2 / (row["started"] * tokens)
    return Reason(weight, alone, row["refined"] - alone, surprise, predicted, came)


def sentence(row: Mapping[str, Any]) -> str | None:
    """Why V* differs from the mean of a state's own branches; None where it hardly does.

    Args:
      row: of `branches.jsonl`.
    """
    why = reason(row)
    if why is None or abs(row["refined"] - row["mean"]) < TELLING:
        return None
    count = row["count"]
    branches = f"{count} branch{'es' if count > 1 else ''}"
    text = (
        f"V* {row['refined']:.2f} is not the mean {row['mean']:.2f} of its {branches}: against a "
        f"critic at {row['value']:.2f} ± {row['std']:.2f} they weigh {100 * why.weight:.0f} % and "
        f"alone would give {why.alone:.2f}"
    )
    if abs(why.pull) >= TELLING / 2:
        text += f"; branches of other states pull it by {signed(why.pull)}"
    return text + "."


def choice(row: Mapping[str, Any]) -> str | None:
    """Why a state was branched and what came of it; None where that was not recorded.

    Args:
      row: of `branches.jsonl`.
    """
    why = reason(row)
    if why is None or why.predicted is None:
        return None
    return (
        f"Chosen for {1e6 * why.predicted:.3g} millionths of error reduction per token; "
        f"{1e6 * why.came:.3g} came, from a branch mean {abs(why.surprise):.1f} standard "
        f"deviations from V."
    )


def signed(number: float) -> str:
    """Two decimals with a sign that is as wide as a plus."""
    return f"{number:+.2f}".replace("-", "−")
