"""The report's figures of a run over time: rows of metrics in, `Chart`s out.

A figure whose inputs a run did not record comes back without a drawing and says so in its
note; the page prints the note in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from focus.report.intervals import normal_interval
from focus.report.svg import Chart, Plot, whole_ticks

Rows = Sequence[Mapping[str, Any]]

MAX_BARS = 48

BUDGET_SERIES = (
    ("tokens/base", "s1", "base"),
    ("tokens/branch", "s2", "branches"),
    ("tokens/summary", "s3", "summaries"),
)
# Phases in the order of a run, with their labels; others are shown after these by their names.
PHASE_LABELS = {
    "warm_start": "warm start",
    "compile": "compilation",
    "rollout": "rollouts",
    "score": "scoring",
    "controller": "controller",
    "critic": "critic",
    "credit": "credit",
    "update": "policy update",
    "push": "weights to the engine",
    "record": "recording",
    "evaluate": "evaluation",
    "checkpoint": "checkpoints",
}
PHASE_COLOURS = ("s1", "s4", "s2", "s5", "s8", "s3", "s9", "s10", "s6", "s7")


def success_by_step(metrics: Rows, before: float | None = None) -> Chart:
    """Training and held-out success over finished training steps.

    Args:
      metrics: rows of `metrics.jsonl`. Step t plays with the weights after t updates and is
        evaluated after one more.
      before: held-out success before the first step.
    """
    return _success(
        metrics,
        "Success by step",
        "finished training steps",
        before,
        lambda row: (row["step"], row["step"] + 1),
    )


def success_by_tokens(metrics: Rows, before: float | None = None) -> Chart:
    """Training and held-out success over the tokens generated so far.

    Args:
      metrics: rows of `metrics.jsonl`.
      before: held-out success before the first step.
    """
    return _success(
        metrics,
        "Success by generated tokens",
        "generated tokens, cumulative",
        before,
        lambda row: (row.get("tokens/cumulative"),) * 2,
    )


def budget(metrics: Rows) -> Chart:
    """What each step's generation budget was spent on."""
    return _stacked(
        metrics, BUDGET_SERIES, "Generation budget by kind", "tokens per step", "tokens"
    )


def wall_time(metrics: Rows) -> Chart:
    """Where the seconds of each step went."""
    series = tuple(
        (f"time/{phase}", PHASE_COLOURS[i % len(PHASE_COLOURS)], phase_label(phase))
        for i, phase in enumerate(phases(metrics))
    )
    if not series:
        return Chart("Wall time by phase", note="this run recorded no time/* metrics.")
    return _stacked(metrics, series, "Wall time by phase", "seconds per step", "s")


def phases(metrics: Rows) -> list[str]:
    """Phases with a `time/<phase>` in any row, in the order of `ordered_phases`."""
    keys = {key for row in metrics for key, value in row.items() if value is not None}
    return ordered_phases(key.removeprefix("time/") for key in keys if key.startswith("time/"))


def ordered_phases(names: Iterable[str]) -> list[str]:
    """Known phases in the order of a run, then all others by name."""
    known = list(PHASE_LABELS)
    return sorted(names, key=lambda n: (known.index(n) if n in known else len(known), n))


def phase_label(phase: str) -> str:
    """What a page calls a phase."""
    return PHASE_LABELS.get(phase, phase.replace("_", " "))


def critic_error(metrics: Rows) -> Chart:
    """Squared error and Brier score of the critic over training."""
    return _lines(
        metrics,
        "Critic error",
        "squared error",
        (
            ("critic/error", "s2", "squared error of V, noise-corrected"),
            ("critic/brier", "s4", "Brier score"),
        ),
        note=(
            "Against the outcomes of fresh continuations. The noise of k outcomes is subtracted "
            "from the squared error, so single steps may fall below 0; the Brier score keeps it."
        ),
    )


def critic_variance(metrics: Rows) -> Chart:
    """Standardised residuals of fresh branches: are the critic's variances any good?"""
    return _lines(
        metrics,
        "Variances against fresh branches",
        "variance of standardised residuals",
        (("critic/residual_variance", "s2", "residuals"),),
        note=(
            "Branch mean minus V, over the standard deviation that V and the noise of the outcomes "
            "should have: 1 where the belief is calibrated, above where it is overconfident."
        ),
    )


def error_reduction(metrics: Rows) -> Chart:
    """What refinement took off the squared error, and what it was expected to."""
    return _lines(
        metrics,
        "Error reduction by refinement",
        "squared error",
        (
            ("critic/error_reduction", "s2", "realised"),
            ("critic/error_reduction_expected", "s4", "expected"),
        ),
        note=(
            "At branched states, each outcome judging the value that all others give. Realised "
            "below 0: refinement made values worse."
        ),
    )


def covariance_scales(metrics: Rows) -> Chart:
    """Scales of the error covariance that were fitted to recent misses."""
    return _lines(
        metrics,
        "What the critic's errors share",
        "share of V (1 - V)",
        (
            ("critic/scale_task", "s1", "states of a task"),
            ("critic/scale_episode", "s3", "neighbours in an episode"),
            ("critic/scale_state", "s5", "the state alone"),
        ),
    )


def policy_panels(metrics: Rows) -> list[Chart]:
    """Entropy, clipping, gradient norm and the gap between engine and trainer."""
    return [
        _lines(metrics, "Policy entropy", "nats", (("policy/entropy", "s1", "entropy"),)),
        _lines(metrics, "Gradient norm", "norm", (("policy/grad_norm", "s5", "gradient norm"),)),
        _lines(
            metrics,
            "Clipped tokens",
            "share of tokens",
            (("policy/clip_fraction", "s3", "clipped share"),),
        ),
        _lines(
            metrics,
            "Log-probs, engine against trainer",
            "absolute difference, nats",
            (("logp_difference/mean", "s1", "mean"), ("logp_difference/max", "s2", "largest")),
        ),
    ]


def _success(
    metrics: Rows,
    title: str,
    x_label: str,
    before: float | None,
    xs_of: Callable[[Mapping[str, Any]], tuple[float | None, float | None]],
) -> Chart:
    """`xs_of` gives where a row's training and its held-out success belong."""
    placed = [(*xs_of(row), row) for row in metrics]
    train = [
        (x, row["train/success"])
        for x, _, row in placed
        if x is not None and row.get("train/success") is not None
    ]
    heldout = [] if before is None else [(0, before, None)]
    heldout += [
        (x, row["heldout/success"], row.get("heldout/std_error"))
        for _, x, row in placed
        if x is not None and row.get("heldout/success") is not None
    ]
    if not (train or heldout):
        return Chart(title, note="no success rates were recorded.")
    intervals = [(x, *normal_interval(y, error)) for x, y, error in heldout if error is not None]
    xs = [x for x, *_ in train + heldout]
    highest = max([y for _, y, *_ in train + heldout] + [high for *_, high in intervals])
    x_range = min(xs), max(xs)
    plot = Plot(
        x_range,
        (0, min(1.0, max(0.1, 1.15 * highest))),
        x_label,
        "success rate",
        x_ticks=whole_ticks(*x_range),
    )
    legend = []
    if train:
        xs, ys = zip(*train)
        window = max(1, len(ys) // 12)
        plot.line(xs, ys, "s4 faint" if window > 1 else "s4", label="training success")
        if window > 1:
            plot.line(xs, _trailing_mean(ys, window), "s4", label=f"mean of {window} steps")
        label = f"training, mean of {window} steps" if window > 1 else "training"
        legend.append(("s4", "line", label))
    if heldout:
        plot.line([x for x, *_ in heldout], [y for _, y, _ in heldout], "s2")
        for interval in intervals:
            plot.interval(*interval, "s2")
        for x, y, error in heldout:
            text = f"{x_label} {x:,}: held-out {y:.3f}"
            if error is not None:
                low, high = normal_interval(y, error)
                text += f" [{low:.3f}, {high:.3f}]"
            plot.dot(x, y, "s2", text)
        legend.append(("s2", "dot", "held-out, 95 % interval" if intervals else "held-out"))
    return plot.chart(title, legend)


def _lines(metrics: Rows, title: str, y_label: str, series, note: str = "") -> Chart:
    present = []
    for key, css, label in series:
        points = [(r["step"], r[key]) for r in metrics if r.get(key) is not None]
        if points:
            present.append((points, css, label))
    if not present:
        keys = " or ".join(key for key, _, _ in series)
        return Chart(title, note=f"this run recorded no {keys}.")
    xs = [x for points, _, _ in present for x, _ in points]
    ys = [y for points, _, _ in present for _, y in points]
    span = max(ys) - min(min(ys), 0.0)
    plot = Plot(
        (min(xs), max(xs)),
        (min(0.0, min(ys)), max(ys) + 0.06 * span),
        "training step",
        y_label,
        x_ticks=whole_ticks(min(xs), max(xs)),
    )
    if min(ys) < 0:
        plot.line((min(xs), max(xs)), (0, 0), "ink")
    for points, css, label in present:
        plot.line(*zip(*points), css, label=label)
    legend = tuple((css, "line", label) for _, css, label in present)
    chart = plot.chart(title, legend, note)
    return chart if len(present) > 1 else dataclasses.replace(chart, legend=())


def _stacked(metrics: Rows, series, title: str, y_label: str, unit: str) -> Chart:
    present = [s for s in series if any(r.get(s[0]) for r in metrics)]
    if not present:
        return Chart(title, note=f"this run recorded no {series[0][0].split('/')[0]}/* metrics.")
    groups = np.array_split(np.arange(len(metrics)), min(MAX_BARS, len(metrics)))
    heights = np.array(
        [
            [np.mean([metrics[i].get(key) or 0.0 for i in group]) for key, _, _ in present]
            for group in groups
        ]
    )
    limits = [r["budget"] for r in metrics if r.get("budget")] if unit == "tokens" else []
    top = 1.06 * max([heights.sum(1).max(), *limits])
    first, last = metrics[0]["step"], metrics[-1]["step"]
    width = (last - first) / max(len(groups) - 1, 1) or 1.0
    x_range = first - width / 2, last + width / 2
    x_ticks = whole_ticks(*x_range)
    plot = Plot(x_range, (0, top), "training step", y_label, x_ticks=x_ticks)
    for index, group in enumerate(groups):
        centre = first + index * width
        name = f"step {metrics[group[0]]['step']}"
        if len(group) > 1:
            name = f"steps {metrics[group[0]]['step']} to {metrics[group[-1]]['step']}, mean"
        below = 0.0
        for (_, css, label), height in zip(present, heights[index]):
            if height > 0:
                edges = (centre - 0.42 * width, centre + 0.42 * width)
                text = f"{name}: {label} {height:,.4g} {unit}"
                plot.box(edges, (below, below + height), css, text)
                below += height
    legend = [(css, "box", label) for _, css, label in present]
    if limits:
        steps = [r["step"] for r in metrics if r.get("budget")]
        plot.line(
            [x_range[0], *steps, x_range[1]],
            [limits[0], *limits, limits[-1]],
            "ink",
            dashed=True,
        )
        legend.append(("ink", "dash", "budget"))
    note = f"Each bar is the mean of up to {len(groups[0])} steps." if len(groups[0]) > 1 else ""
    return plot.chart(title, legend, note)


def _trailing_mean(values: Sequence[float], window: int) -> list[float]:
    return [float(np.mean(values[max(0, i + 1 - window) : i + 1])) for i in range(len(values))]
