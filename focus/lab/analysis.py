"""What the cells of an experiment say: plain numbers for a report, nothing is run here.

All comparisons are paired by seed. A cell is one arm in one world, see `focus.lab.sweep`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from focus.lab import statistics
from focus.lab.statistics import Estimate, interval
from focus.lab.sweep import CellResult, area

Record = dict[str, Any]

_CLAIM = re.compile(
    r"^(?P<ours>.+?) (?P<sign>[-/]) (?P<theirs>.+?) >= (?P<least>\S+)( in (?P<world>.+))?$"
)
PROFILE_POINTS = 51


class Table:
    """Finished cells by world and arm; every arm was run in every world.

    Args:
      results: cells, in any order.

    Attributes:
      worlds: labels, in the order of `results`.
      arms: names, likewise.
    """

    def __init__(self, results: Sequence[CellResult]):
        self._cells = {(r.world.label, r.arm): r for r in results}
        self.worlds = list(dict.fromkeys(r.world.label for r in results))
        self.arms = list(dict.fromkeys(r.arm for r in results))

    def __getitem__(self, key: tuple[str, str]) -> CellResult:
        return self._cells[key]

    def scores(self, arm: str, worlds: Sequence[str] | None = None) -> np.ndarray:
        """[N, W] areas under the curve, of all worlds or of some."""
        return np.stack([self[w, arm].scores for w in worlds or self.worlds], axis=1)


def estimate_fields(name: str, estimate: Estimate) -> Record:
    """An estimate as `{name, name_low, name_high}`."""
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def curves(table: Table) -> list[Record]:
    """Mean success against generated tokens, with Student's 95 % interval at every step."""
    rows = []
    for world in table.worlds:
        for arm in table.arms:
            fields = table[world, arm].curves
            success = fields["success"].astype(np.float64)
            spent = np.mean(np.cumsum(fields["tokens"], axis=1, dtype=np.float64), axis=0)
            mean = np.mean(success, axis=0)
            error = np.std(success, axis=0, ddof=1) / np.sqrt(len(success))
            half = stdtrit(len(success) - 1, 0.975) * error
            rows.append(
                {
                    "world": world,
                    "arm": arm,
                    "tokens": [0.0, *spent.tolist()],
                    "success": mean.tolist(),
                    "low": (mean - half).tolist(),
                    "high": (mean + half).tolist(),
                }
            )
    return rows


def sweeps(table: Table) -> list[Record]:
    """Which learning rates every cell tried, and whether the best is inside them."""
    return [
        {
            "world": world,
            "arm": arm,
            "learning_rates": list(sweep.learning_rates),
            "auc": list(sweep.auc) if len(sweep.auc) > 1 else [],
            "learning_rate": sweep.learning_rate,
            "at_border": sweep.at_border,
        }
        for world in table.worlds
        for arm in table.arms
        for sweep in [table[world, arm].sweep]
    ]


def aggregates(table: Table) -> list[Record]:
    """Of every arm over all worlds: interquartile mean and mean of the area under the curve."""
    return [
        {
            "arm": arm,
            **estimate_fields("iqm", interval(statistics.interquartile_mean, table.scores(arm))),
            **estimate_fields("mean", interval(statistics.mean, table.scores(arm))),
        }
        for arm in table.arms
    ]


def pairs(table: Table, ours: str) -> list[Record]:
    """One arm against every other, in each world and over all of them (world None)."""
    rows = []
    for world in [*table.worlds, *([None] if len(table.worlds) > 1 else [])]:
        worlds = table.worlds if world is None else [world]
        for theirs in table.arms:
            if theirs == ours:
                continue
            both = table.scores(ours, worlds), table.scores(theirs, worlds)
            chance = interval(statistics.probability_of_improvement, *both)
            rows.append(
                {
                    "world": world,
                    "ours": ours,
                    "theirs": theirs,
                    **estimate_fields("difference", interval(statistics.mean_difference, *both)),
                    **estimate_fields("improvement", chance),
                }
            )
    return rows


def profiles(table: Table) -> Record:
    """Share of runs whose area under the curve is above a threshold, for thresholds in [0, 1]."""
    thresholds = np.linspace(0, 1, PROFILE_POINTS)
    rows = {}
    for arm in table.arms:
        scores = table.scores(arm)
        bands = [
            interval(lambda x, at=at: np.mean(x > at, axis=(-2, -1)), scores, resamples=500)
            for at in thresholds
        ]
        rows[arm] = {
            "share": statistics.performance_profile(scores, thresholds).tolist(),
            "low": [max(0.0, band.low) for band in bands],
            "high": [min(1.0, band.high) for band in bands],
        }
    return {"thresholds": thresholds.tolist(), "arms": rows}


def cells(table: Table) -> list[Record]:
    """Every arm in every world in a line: what it reached, and what that took.

    `auc` and its interval, success at the end, tokens generated and dose of a whole run, and
    `dose_auc`: the area as far as the smallest dose of the world. Dose is what an arm has trained
    on, tokens with an advantage that is not zero; each run's success is averaged over its dose
    from 0 to the smallest total (mean over seeds) of all arms in that world, as if it had been
    stopped there. A run that ends below it stays where it ended.
    """
    rows = []
    for world in table.worlds:
        doses = {arm: _cumulative(table[world, arm].curves["dose"]) for arm in table.arms}
        limit = min(float(np.mean(dose[:, -1])) for dose in doses.values())
        for arm in table.arms:
            cell = table[world, arm]
            success = cell.curves["success"].astype(np.float64)
            at = np.linspace(0, limit, 4 * success.shape[1])
            matched = [area(np.interp(at, d, s)) for d, s in zip(doses[arm], success)]
            tokens = np.sum(cell.curves["tokens"], axis=1, dtype=np.float64)
            rows.append(
                {
                    "world": world,
                    "arm": arm,
                    "learning_rate": cell.sweep.learning_rate,
                    "at_border": cell.sweep.at_border,
                    **estimate_fields("auc", interval(statistics.mean, cell.scores)),
                    "final": float(np.mean(success[:, -1])),
                    "tokens": float(np.mean(tokens)),
                    "dose_tokens": float(np.mean(doses[arm][:, -1])),
                    "dose": limit,
                    **estimate_fields("dose_auc", interval(statistics.mean, np.array(matched))),
                    "seconds": cell.seconds,
                }
            )
    return rows


def _cumulative(per_step: np.ndarray) -> np.ndarray:
    """[N, steps] -> [N, steps + 1], from 0."""
    return np.pad(np.cumsum(per_step, axis=1, dtype=np.float64), ((0, 0), (1, 0)))


@dataclasses.dataclass(frozen=True)
class Claim:
    """`OURS - THEIRS >= x` or `OURS / THEIRS >= x` of areas under the curve.

    Attributes:
      text: as written.
      ours, theirs: arms.
      sign: "-" or "/".
      least: x.
      world: label of the world, or None: in every world.
    """

    text: str
    ours: str
    theirs: str
    sign: str
    least: float
    world: str | None


def read_claim(text: str, worlds: Sequence[str], arms: Sequence[str]) -> Claim:
    """The claim of `focus / grpo >= 3 in WORLD`; without `in WORLD`, in every world.

    Raises:
      ValueError: it is written otherwise, or names what is not there.
    """
    found = _CLAIM.match(text)
    try:
        least = float(found["least"])
    except (TypeError, ValueError):
        raise ValueError(
            f"claim {text!r}: write 'ARM - ARM >= x' or 'ARM / ARM >= x', and 'in WORLD' behind it "
            "if it is about one"
        ) from None
    for arm in (found["ours"], found["theirs"]):
        if arm not in arms:
            raise ValueError(f"claim {text!r}: arm {arm!r} is none of {', '.join(arms)}")
    if found["world"] is not None and found["world"] not in worlds:
        raise ValueError(f"claim {text!r}: world {found['world']!r} is none of {', '.join(worlds)}")
    return Claim(text, found["ours"], found["theirs"], found["sign"], least, found["world"])


def judge(claim: Claim, table: Table) -> list[Record]:
    """The claim in each of its worlds.

    It holds where the estimate reaches the bound and, if the claim is that an arm is better, the
    interval says so too (above 0, or above 1 for a ratio). "surely": the interval's lower end
    reaches the bound.
    """
    statistic, nothing = {
        "-": (statistics.mean_difference, 0.0),
        "/": (statistics.mean_ratio, 1.0),
    }[claim.sign]
    rows = []
    for world in [claim.world] if claim.world else table.worlds:
        scores = table.scores(claim.ours, [world]), table.scores(claim.theirs, [world])
        found = interval(statistic, *scores)
        better = found.low > nothing or claim.least <= nothing
        rows.append(
            {
                "claim": claim.text,
                "world": world,
                **estimate_fields("value", found),
                "least": claim.least,
                "holds": bool(found.value >= claim.least and better),
                "surely": bool(found.low >= claim.least),
            }
        )
    return rows


def better_of(table: Table, world: str, arms: Sequence[str]) -> str:
    """The arm with the largest mean area in a world."""
    return max(arms, key=lambda arm: float(np.mean(table.scores(arm, [world]))))


def regime(
    table: Table, points: Mapping[str, Record], ours: str, baselines: Sequence[str], random: str
) -> list[Record]:
    """The regime map: ours against the better of the baselines and against random branches.

    Args:
      table: cells.
      points: label of a world -> its coordinates.
      ours, random: arms.
      baselines: arms, of which the better one in each world counts.
    """
    rows = []
    for world, point in points.items():
        best = better_of(table, world, baselines)
        mine = table.scores(ours, [world])
        gain = interval(statistics.mean_difference, mine, table.scores(best, [world]))
        selected = interval(statistics.mean_difference, mine, table.scores(random, [world]))
        success = table[world, ours].curves["success"]
        rows.append(
            {
                "world": world,
                **point,
                "start_success": float(np.mean(success[:, 0], dtype=np.float64)),
                "best_baseline": best,
                "ours_auc": float(np.mean(mine)),
                **estimate_fields("gain", gain),
                **estimate_fields("selected", selected),
            }
        )
    return rows


def error_reduction(table: Table, rules: Mapping[str, str]) -> list[Record]:
    """By how much branches lowered the error of the values, per 1,000 of their tokens.

    Of every arm that branched, over all steps, weighted by what each step spent on branches:
    what happened (`reduction`, against exact values) and what the belief had expected
    (`expected`), and `residual_variance`, the mean squared standardised residual of branch means:
    1 if the belief's variances are honest.

    Args:
      table: cells.
      rules: arm -> its acquisition rule.
    """
    rows = []
    for world in table.worlds:
        for arm in table.arms:
            fields = table[world, arm].curves
            spent = fields["branch_tokens"].astype(np.float64)
            if not np.any(spent):
                continue
            total = np.sum(spent, axis=1)
            row = {"world": world, "arm": arm, "rule": rules.get(arm, "")}
            for name, field in (
                ("reduction", "error_reduction"),
                ("expected", "expected_reduction"),
                ("residual_variance", "residual_variance"),
            ):
                weighted = np.sum(spent * fields[field], axis=1)
                row |= estimate_fields(name, interval(statistics.mean_ratio, weighted, total))
            rows.append(row)
    return rows
