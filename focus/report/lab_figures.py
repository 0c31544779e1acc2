"""Figures of the laboratory: records of `focus.lab.analysis` in, drawings and their numbers out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from focus.report.svg import Chart, Plot, short

Analysis = Mapping[str, Any]

COLOURS = ("s2", "s1", "s3", "s4", "s5", "s8", "s9", "s10", "s6", "s7")


@dataclasses.dataclass(frozen=True)
class Figure:
    """A drawing with the numbers in it.

    Attributes:
      chart: the drawing.
      columns: names of the numbers.
      rows: the numbers, or words.
    """

    chart: Chart
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


class LabPlot(Plot):
    """Axes that also draw bands, horizontal intervals and text beside a point."""

    def band(
        self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], css: str
    ) -> None:
        """The area between two lines."""
        points = [*zip(xs, lows), *reversed(list(zip(xs, highs)))]
        text = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self._add(f'<polygon class="{css} fill" points="{text}" fill-opacity="0.15"/>')

    def span(self, low: float, high: float, y: float, css: str) -> None:
        """A horizontal interval."""
        low_px, high_px, y_px = self.x(low), self.x(high), self.y(y)
        self._add(
            f'<path class="{css} stroke" d="M{low_px:.1f} {y_px:.1f}H{high_px:.1f}'
            f"M{low_px:.1f} {y_px - 3:.1f}v6M{high_px:.1f} {y_px - 3:.1f}v6"
            f'"/>'
        )

    def cross(self, x: float, y: float, css: str, title: str) -> None:
        """A small diamond."""
        x_px, y_px = self.x(x), self.y(y)
        self._add(
            f'<path class="{css} fill" d="M{x_px:.1f} {y_px - 5:.1f}l4 5l-4 5l-4 -5z">'
            f"<title>{escape(title)}</title></path>"
        )

    def name(self, y: float, text: str) -> None:
        """Text at the left end, above a line of the plot."""
        self._add(
            f'<text class="small" x="{self.x(self.x_range[0]) + 4:.1f}" y="{self.y(y) - 7:.1f}">'
            f"{escape(text)}</text>"
        )


def colour_of(arms: Sequence[str]) -> dict[str, str]:
    """One colour for each arm, the same in all figures."""
    return {arm: COLOURS[i % len(COLOURS)] for i, arm in enumerate(arms)}


def learning_curves(analysis: Analysis) -> list[Figure]:
    """Success against generated tokens, one figure for each world."""
    colours = colour_of(analysis["arms"])
    figures = []
    for world in analysis["worlds"]:
        if world in analysis["points"]:
            continue  # the map shows it
        found = [row for row in analysis["curves"] if row["world"] == world]
        top = max(max(row["high"]) for row in found)
        right = max(row["tokens"][-1] for row in found)
        plot = LabPlot(
            (0, right), (0, min(1.0, 1.05 * max(top, 0.02))), "generated tokens", "success"
        )
        for row in found:
            css = colours[row["arm"]]
            low = [max(0.0, y) for y in row["low"]]
            high = [min(1.0, y) for y in row["high"]]
            plot.band(row["tokens"], low, high, css)
        for row in found:
            plot.line(row["tokens"], row["success"], colours[row["arm"]])
            plot.dot(
                row["tokens"][-1],
                row["success"][-1],
                colours[row["arm"]],
                f"{row['arm']} after {row['tokens'][-1]:,.0f} tokens: {row['success'][-1]:.3f} "
                f"[{row['low'][-1]:.3f}, {row['high'][-1]:.3f}]",
            )
        legend = tuple((colours[row["arm"]], "line", row["arm"]) for row in found)
        figures.append(
            Figure(
                Chart(world, plot.render(), legend, "Mean over seeds; bands: 95 %, at each step."),
                ("arm", "step", "tokens", "success", "low", "high"),
                [
                    (row["arm"], step, *values)
                    for row in found
                    for step, values in enumerate(
                        zip(row["tokens"], row["success"], row["low"], row["high"])
                    )
                ],
            )
        )
    return figures


def interquartile_means(analysis: Analysis) -> list[Figure]:
    """Interquartile mean of each arm over all worlds."""
    rows = analysis["aggregates"]
    if not rows:
        return []
    colours = colour_of(analysis["arms"])
    return [
        _forest(
            "Area under the curve",
            "interquartile mean of all runs",
            [(r["arm"], r["iqm"], r["iqm_low"], r["iqm_high"], colours[r["arm"]]) for r in rows],
            note="Over all seeds and worlds; intervals: 95 %, seeds drawn anew in each world.",
            columns=("arm", "iqm", "low", "high", "mean", "mean_low", "mean_high"),
            table=[
                (r["arm"], r["iqm"], r["iqm_low"], r["iqm_high"])
                + (r["mean"], r["mean_low"], r["mean_high"])
                for r in rows
            ],
        )
    ]


def improvement(analysis: Analysis) -> list[Figure]:
    """Our arm against every other over all worlds: how much better, and how often."""
    pairs = analysis["pairs"]
    if not pairs:
        return []
    colours, ours = colour_of(analysis["arms"]), pairs[0]["ours"]
    whole = [r for r in pairs if r["world"] is None] or pairs
    columns = ("world", "ours", "theirs", "value", "low", "high")

    def forest(key: str, title: str, x_label: str, zero: float, note: str) -> Figure:
        return _forest(
            title,
            x_label,
            [
                (f"against {r['theirs']}", r[key], r[f"{key}_low"], r[f"{key}_high"])
                + (colours[r["theirs"]],)
                for r in whole
            ],
            note=note,
            zero=zero,
            columns=columns,
            table=[
                (r["world"] or "all", r["ours"], r["theirs"], r[key])
                + (r[f"{key}_low"], r[f"{key}_high"])
                for r in pairs
            ],
        )

    return [
        forest(
            "difference",
            f"How much better {ours} is",
            "difference of areas under the curve",
            0.0,
            "Paired by seed, mean over worlds.",
        ),
        forest(
            "improvement",
            f"How often {ours} is better",
            "probability of improvement",
            0.5,
            "That a run of ours beats one of theirs in the same world; ties count half.",
        ),
    ]


def profile(analysis: Analysis) -> list[Figure]:
    """Share of runs above a threshold."""
    found = analysis["profiles"]
    if not found:
        return []
    colours, thresholds = colour_of(analysis["arms"]), found["thresholds"]
    plot = LabPlot((0, 1), (0, 1), "area under the curve", "share of runs above it")
    for arm, row in found["arms"].items():
        plot.band(thresholds, row["low"], row["high"], colours[arm])
    for arm, row in found["arms"].items():
        plot.line(thresholds, row["share"], colours[arm])
    legend = tuple((colours[arm], "line", arm) for arm in found["arms"])
    note = "All seeds and worlds; an arm whose line lies above another's is better at that level."
    return [
        Figure(
            Chart("Performance profile", plot.render(), legend, note),
            ("arm", "threshold", "share", "low", "high"),
            [
                (arm, *values)
                for arm, row in found["arms"].items()
                for values in zip(thresholds, row["share"], row["low"], row["high"])
            ],
        )
    ]


def regime_maps(analysis: Analysis) -> list[Figure]:
    """Horizon by start success, one map for each delay and comparison."""
    rows = analysis["regime"]
    figures = []
    for key, versus in (("gain", "the better baseline"), ("selected", "random branches")):
        limit = max((abs(row[key]) for row in rows), default=0.0)
        for delay in sorted({row["delay"] for row in rows}):
            here = [row for row in rows if row["delay"] == delay]
            seen = "at the next state" if delay == 1 else f"after {delay} turns"
            figures.append(
                Figure(
                    Chart(
                        f"Against {versus}; a loss is seen {seen}",
                        _heat_map(here, key, limit),
                        (("s1", "box", "ours is better"), ("s2", "box", "it is worse")),
                        "Difference of areas under the curve. * where the 95 % interval leaves "
                        "out 0.",
                    ),
                    ("horizon", "start", "start_success", "delay", "difference", "low", "high")
                    + ("best_baseline", "ours_auc"),
                    [
                        tuple(r[c] for c in ("horizon", "start", "start_success", "delay"))
                        + (r[key], r[f"{key}_low"], r[f"{key}_high"])
                        + (r["best_baseline"], r["ours_auc"])
                        for r in here
                    ],
                )
            )
    return figures


def _heat_map(rows: Sequence[Mapping[str, Any]], key: str, limit: float) -> Markup:
    starts = sorted({row["start"] for row in rows})
    horizons = sorted({row["horizon"] for row in rows})
    plot = LabPlot(
        (0, len(starts)),
        (0, len(horizons)),
        "success of the first policy",
        "turns",
        x_ticks=[(i + 0.5, f"{start:g}") for i, start in enumerate(starts)],
        y_ticks=[(i + 0.5, f"{horizon}") for i, horizon in enumerate(horizons)],
        grid=False,
    )
    for row in rows:
        x, y = starts.index(row["start"]), horizons.index(row["horizon"])
        value, low, high = row[key], row[f"{key}_low"], row[f"{key}_high"]
        text = (
            f"{row['horizon']} turns, start {row['start_success']:.3f}: {value:+.3f} "
            f"[{low:+.3f}, {high:+.3f}]; better baseline {row['best_baseline']}"
        )
        share = abs(value) / limit if limit > 0 else 0.0
        css = "s1" if value >= 0 else "s2"
        plot.box((x + 0.02, x + 0.98), (y + 0.02, y + 0.98), css, text, opacity=0.06 + 0.6 * share)
        mark = "*" if low > 0 or high < 0 else ""
        plot.text(x + 0.5, y + 0.5, f"{value:+.3f}{mark}".replace("-", "−"), css="cell")
    return plot.render()


def error_reduction(analysis: Analysis) -> list[Figure]:
    """By how much branches lower the critic's error, one figure for each world."""
    figures = []
    names = ("reduction", "expected", "residual_variance")
    for world in analysis["worlds"]:
        rows = [row for row in analysis["rules"] if row["world"] == world]
        if not rows or world in analysis["points"]:
            continue
        ordered = sorted(rows, key=lambda row: -row["reduction"])
        figures.append(
            _forest(
                world,
                "fall of squared error per 1,000 tokens of branches",
                [
                    (_after_rule(r), r["reduction"], r["reduction_low"], r["reduction_high"], "s2")
                    for r in ordered
                ],
                zero=0.0,
                crosses=[r["expected"] for r in ordered],
                legend=(("s2", "dot", "against exact values, 95 %"), ("s1", "box", "expected")),
                note="Error of V before and of V* after the branches, weighted by what an error "
                "there matters to the policy; all steps.",
                columns=("world", "arm", "rule")
                + tuple(f"{name}{end}" for name in names for end in ("", "_low", "_high")),
                table=[
                    (world, r["arm"], r["rule"])
                    + tuple(r[f"{name}{end}"] for name in names for end in ("", "_low", "_high"))
                    for r in ordered
                ],
            )
        )
    return figures


def _after_rule(row: Mapping[str, Any]) -> str:
    """An arm with its rule, where its name does not say it."""
    named = row["rule"] in row["arm"] or not row["rule"]
    return row["arm"] if named else f"{row['arm']}: {row['rule']}"


def learning_rates(analysis: Analysis) -> list[Figure]:
    """What each arm's sweep found, one figure for each world."""
    colours = colour_of(analysis["arms"])
    figures = []
    for world in analysis["worlds"]:
        rows = [row for row in analysis["sweeps"] if row["world"] == world and row["auc"]]
        if not rows or world in analysis["points"]:
            continue
        logs = [math.log10(rate) for row in rows for rate in row["learning_rates"]]
        top = max(max(row["auc"]) for row in rows)
        low, high = min(logs), max(logs)
        ticks = sorted({rate for row in rows for rate in row["learning_rates"]})
        plot = LabPlot(
            (low - 0.05, high + 0.05),
            (0, min(1.0, 1.1 * max(top, 0.02))),
            "learning rate",
            "area under the curve",
            x_ticks=[(math.log10(t), short(t)) for t in ticks[:: -(-len(ticks) // 9)]],
        )
        for row in rows:
            css, xs = colours[row["arm"]], [math.log10(rate) for rate in row["learning_rates"]]
            plot.line(xs, row["auc"], css)
            best = row["learning_rates"].index(row["learning_rate"])
            said = ", at the end of what was tried" if row["at_border"] else ""
            plot.dot(
                xs[best], row["auc"][best], css, f"{row['arm']}: {row['learning_rate']:g}{said}"
            )
        figures.append(
            Figure(
                Chart(
                    world,
                    plot.render(),
                    tuple((colours[row["arm"]], "line", row["arm"]) for row in rows),
                    "Mean over seeds that no other figure uses; a dot is the rate that was taken.",
                ),
                ("arm", "learning_rate", "auc"),
                [
                    (row["arm"], rate, auc)
                    for row in rows
                    for rate, auc in zip(row["learning_rates"], row["auc"])
                ],
            )
        )
    return figures


def _forest(
    title: str,
    x_label: str,
    rows: Sequence[tuple[str, float, float, float, str]],
    *,
    note: str,
    columns: tuple[str, ...],
    table: Sequence[Sequence[Any]],
    zero: float | None = None,
    crosses: Sequence[float] = (),
    legend: tuple[tuple[str, str, str], ...] = (),
) -> Figure:
    """Estimates with horizontal intervals, a line each.

    Args:
      title, x_label, note: of the drawing.
      rows: `(name, value, low, high, css class)`.
      columns, table: the numbers behind it.
      zero: where a line says "no difference".
      crosses: a second value of each row.
      legend: see `Chart`.
    """
    ends = [*(v for row in rows for v in row[1:4]), *crosses, *([] if zero is None else [zero])]
    ends = [v for v in ends if math.isfinite(v)]
    left, right = min(ends), max(ends)
    margin = 0.06 * (right - left) or 0.1
    plot = LabPlot(
        (left - margin, right + margin), (0, len(rows)), x_label, "", y_ticks=[], grid=False
    )
    plot.label = f"{title}: {x_label}"
    if zero is not None:
        plot.line((zero, zero), (0, len(rows)), "muted", dashed=True)
    for i, (name, value, low, high, css) in enumerate(reversed(rows)):
        text = f"{name}: {value:.4g} [{low:.4g}, {high:.4g}]"
        plot.span(low, high, i + 0.35, css)
        plot.dot(value, i + 0.35, css, text)
        plot.name(i + 0.35, name)
    for i, value in enumerate(reversed(crosses)):
        plot.cross(value, i + 0.35, "s1", f"expected {value:.4g}")
    return Figure(Chart(title, plot.render(), legend, note), columns, table)
