"""The report's figures: rows of metrics and branches in, `Chart`s out.

A figure whose inputs a run did not record comes back without a drawing and says so in its
note; the page prints the note in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from focus.critic.calibration import calibration
from focus.report.svg import Chart, Plot, round_ticks, short, widened

Rows = Sequence[Mapping[str, Any]]

MAX_BARS = 48
MAX_POINTS = 400
MAX_CELLS = 16
VALUE_BINS = 10
MIN_GROUP = 8
Z_95 = 1.96

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


def calibration_chart(branches: Rows, column: str, title: str, css: str, note: str) -> Chart:
    """Predicted value against the mean outcome of the continuations sampled there.

    Bars are 95 % Wilson intervals of a bin's pooled outcomes.

    Args:
      branches: rows of `branches.jsonl`.
      column: "value" or "refined".
      title: heading.
      css: series class.
      note: how to read it.
    """
    rows = [r for r in branches if None not in (r.get(column), r.get("mean")) and r.get("count")]
    if not rows:
        return Chart(title, note="no branched states with outcomes were recorded.")
    predicted = np.array([r[column] for r in rows], float)
    means = np.array([r["mean"] for r in rows], float)
    counts = np.array([r["count"] for r in rows], float)
    if predicted.min() < 0 or predicted.max() > 1 or means.min() < 0 or means.max() > 1:
        return Chart(title, note="only drawn for rewards and values between 0 and 1.")
    bins = calibration(predicted, means, counts, VALUE_BINS)
    x_label = "critic value V" if column == "value" else "refined value V*"
    plot = Plot((0, 1), (0, 1), x_label, "mean outcome of continuations")
    plot.line((0, 1), (0, 1), "muted", dashed=True)
    largest = bins["bin_count"].max()
    for index, count in enumerate(bins["bin_count"]):
        if count == 0:
            continue
        x, y = float(bins["bin_value"][index]), float(bins["bin_outcome"][index])
        low, high = wilson_interval(y, count)
        edges = (index + 0.1) / VALUE_BINS, (index + 0.9) / VALUE_BINS
        text = f"value {x:.2f}, outcome {y:.2f} [{low:.2f}, {high:.2f}], n = {count:.0f}"
        plot.box(edges, (0, 0.16 * count / largest), "muted", text, opacity=0.35)
        plot.interval(x, low, high, css)
        plot.dot(x, y, css, text, radius=4.5)
    total = int(counts.sum())
    return Chart(
        title,
        plot.render(),
        legend=((css, "dot", "bin mean, 95 % interval"), ("muted", "box", "outcomes in the bin")),
        note=(
            f"{len(rows):,} states, {total:,} outcomes; mean gap "
            f"{float(bins['calibration_error']):.3f}, tallest bar {int(largest):,}. {note}"
        ),
    )


def uncertainty_chart(branches: Rows) -> Chart:
    """The critic's stated variance against the squared error that branches reveal.

    States are sorted by variance into groups of equal size. For each the mean of
    `(m - V)^2 - m (1 - m) / (k - 1)`, the squared error without the noise of k outcomes, is set
    against the mean variance; bars are 95 % intervals of that mean. The controller spends
    tokens by this variance, so its order matters more than its scale.
    """
    title = "Is the critic's uncertainty honest?"
    rows = [
        r
        for r in branches
        if None not in (r.get("value"), r.get("std"), r.get("mean")) and r.get("count", 0) >= 2
    ]
    if len(rows) < 2 * MIN_GROUP:
        return Chart(title, note=f"needs {2 * MIN_GROUP} states with at least 2 outcomes each.")
    value, std, mean, count = (
        np.array([r[name] for r in rows], float) for name in ("value", "std", "mean", "count")
    )
    error = (mean - value) ** 2 - mean * (1 - mean) / (count - 1)
    groups = np.array_split(np.argsort(std, kind="stable"), min(8, len(rows) // MIN_GROUP))
    points = []
    for group in groups:
        half = Z_95 * np.std(error[group], ddof=1) / np.sqrt(len(group))
        points.append((np.mean(std[group] ** 2), np.mean(error[group]), half, len(group)))
    right = 1.1 * max(x for x, *_ in points)
    low = min(0.0, 1.05 * min(y - half for _, y, half, _ in points))
    high = max(right, 1.05 * max(y + half for _, y, half, _ in points))
    plot = Plot((0, right), (low, high), "critic's variance of V", "squared error of V")
    plot.line((0, right), (0, right), "muted", dashed=True)
    for x, y, half, number in points:
        plot.interval(x, y - half, y + half, "s5")
        plot.dot(x, y, "s5", f"variance {x:.4f}, error {y:.4f}, {number} states", radius=4.5)
    return Chart(
        title,
        plot.render(),
        legend=(("s5", "dot", "states grouped by variance, 95 % interval"),),
        note=(
            f"{len(rows):,} states with k of 2 or more; the noise of k outcomes is subtracted. "
            "Rising points mean that branches go where the error is; on the line the scale is "
            "right too."
        ),
    )


def branch_map(branches: Rows) -> Chart:
    """Where continuations were spent: turn of the state by the critic's value."""
    title = "Where continuations went"
    rows = [r for r in branches if r.get("value") is not None]
    if not rows:
        return Chart(title, note="no branched states were recorded.")
    turns = np.array([r["turn"] for r in rows])
    values = np.array([r["value"] for r in rows], float)
    counts = np.array([r["count"] for r in rows], float)
    low, high = min(0.0, values.min()), max(1.0, values.max())
    turn_edges = _integer_edges(int(turns.max()))
    value_edges = np.linspace(low, high, VALUE_BINS + 1)
    totals, _, _ = np.histogram2d(turns, values, (turn_edges, value_edges), weights=counts)
    plot = _heat_plot(turn_edges, (low, high), "turn of the state", "critic value V")
    for i, j in np.argwhere(totals > 0):
        cell = (turn_edges[i], turn_edges[i + 1]), (value_edges[j], value_edges[j + 1])
        _heat_cell(plot, cell, totals[i, j] / totals.max(), short(totals[i, j]), "continuations")
    return Chart(
        title,
        plot.render(),
        note=f"Numbers are continuations with an outcome, {int(counts.sum()):,} in all steps.",
    )


def branch_turns(branches: Rows) -> Chart:
    """How the turn at which the controller branches moves over training."""
    title = "Branching turn over training"
    if not branches:
        return Chart(title, note="no branched states were recorded.")
    steps = np.array([r["step"] for r in branches])
    turns = np.array([r["turn"] for r in branches])
    counts = np.array([r["count"] for r in branches], float)
    step_edges = np.linspace(
        steps.min(), steps.max() + 1, min(MAX_CELLS, int(np.ptp(steps)) + 1) + 1
    )
    turn_edges = _integer_edges(int(turns.max()))
    totals, _, _ = np.histogram2d(steps, turns, (step_edges, turn_edges), weights=counts)
    share = totals / np.maximum(totals.sum(1, keepdims=True), 1)
    centres = (turn_edges[:-1] + turn_edges[1:]) / 2
    plot = Plot(
        (step_edges[0], step_edges[-1]),
        (turn_edges[0], turn_edges[-1]),
        "training step",
        "turn of the state",
        x_ticks=_whole_ticks(step_edges[0], step_edges[-1]),
        y_ticks=[(c, _span_label(a, b)) for c, a, b in zip(centres, turn_edges, turn_edges[1:])],
        grid=False,
    )
    for i, j in np.argwhere(share > 0):
        cell = (step_edges[i], step_edges[i + 1]), (turn_edges[j], turn_edges[j + 1])
        percent = f"{100 * share[i, j]:.0f}"
        _heat_cell(plot, cell, share[i, j] / share.max(), percent, "% of the continuations")
    return Chart(
        title, plot.render(), note="Share of a column's continuations, in percent, by turn."
    )


def branch_counts(branches: Rows) -> Chart:
    """How many states got how many continuations."""
    title = "Continuations per branched state"
    if not branches:
        return Chart(title, note="no branched states were recorded.")
    ks, states = np.unique([int(r["count"]) for r in branches], return_counts=True)
    if len(ks) > MAX_CELLS:
        edges = np.unique(np.linspace(ks.min(), ks.max() + 1, MAX_CELLS + 1).astype(int))
        states, _ = np.histogram(ks, edges, weights=states)
        labels = [_span_label(a - 0.5, b - 0.5) for a, b in zip(edges, edges[1:])]
    else:
        labels = [str(k) for k in ks]
    plot = Plot(
        (-0.5, len(labels) - 0.5),
        (0, 1.12 * states.max()),
        "k, continuations with an outcome",
        "states",
        x_ticks=list(enumerate(labels)),
    )
    for index, (label, number) in enumerate(zip(labels, states)):
        plot.box((index - 0.35, index + 0.35), (0, number), "s2", f"k = {label}: {number} states")
        plot.text(index, number, f"{int(number):,}", dy=-5)
    return Chart(title, plot.render(), note=f"{int(states.sum()):,} branched states in all steps.")


def branch_costs(branches: Rows) -> Chart:
    """Predicted against actual tokens of one continuation."""
    title = "Predicted cost of a continuation"
    rows = [r for r in branches if None not in (r.get("cost_predicted"), r.get("cost_actual"))]
    if not rows:
        return Chart(title, note="no predicted and actual costs were recorded.")
    predicted = np.array([r["cost_predicted"] for r in rows], float)
    actual = np.array([r["cost_actual"] for r in rows], float)
    top = 1.05 * max(predicted.max(), actual.max(), 1.0)
    plot = Plot((0, top), (0, top), "predicted tokens", "actual tokens, mean of k")
    # Evenly spaced over the run, so that a long one stays light without favouring its start.
    for index in np.unique(np.linspace(0, len(rows) - 1, MAX_POINTS).astype(int)):
        text = f"step {rows[index]['step']}: predicted {predicted[index]:.0f}, "
        plot.dot(predicted[index], actual[index], "s1 faint", text + f"actual {actual[index]:.0f}")
    plot.line((0, top), (0, top), "ink", dashed=True)
    ratio = predicted.sum() / max(actual.sum(), 1.0)
    return Chart(
        title,
        plot.render(),
        note=f"Sum of predictions over sum of actual tokens: {ratio:.2f} (1 is calibrated).",
    )


def wilson_interval(share: float, count: float, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval of a binomial share.

    Args:
      share: successes / count, in [0, 1].
      count: number of outcomes, >= 1.
      z: normal quantile.

    Returns:
      Lower and upper end, inside [0, 1].
    """
    scale = 1 + z**2 / count
    centre = (share + z**2 / (2 * count)) / scale
    half = z * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / scale
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def normal_interval(share: float, std_error: float) -> tuple[float, float]:
    """95 % interval of a share, `share +- 1.96 std_error`, cut to [0, 1]."""
    return max(0.0, share - Z_95 * std_error), min(1.0, share + Z_95 * std_error)


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
        x_ticks=_whole_ticks(*x_range),
    )
    legend = []
    if train:
        xs, ys = zip(*train)
        window = max(1, len(ys) // 12)
        plot.line(xs, ys, "s4 faint" if window > 1 else "s4")
        if window > 1:
            plot.line(xs, _trailing_mean(ys, window), "s4")
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
    return Chart(title, plot.render(), tuple(legend))


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
        x_ticks=_whole_ticks(min(xs), max(xs)),
    )
    if min(ys) < 0:
        plot.line((min(xs), max(xs)), (0, 0), "ink")
    for points, css, label in present:
        plot.line(*zip(*points), css)
        if len(points) <= MAX_BARS:
            for x, y in points:
                plot.dot(x, y, css, f"step {x}: {label} {y:.4g}", radius=2.5)
    legend = tuple((css, "line", label) for _, css, label in present)
    return Chart(title, plot.render(), legend if len(present) > 1 else (), note)


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
    x_ticks = _whole_ticks(*x_range)
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
    return Chart(title, plot.render(), tuple(legend), note)


def _heat_plot(turn_edges: np.ndarray, y_range, x_label: str, y_label: str) -> Plot:
    centres = (turn_edges[:-1] + turn_edges[1:]) / 2
    ticks = [(c, _span_label(a, b)) for c, a, b in zip(centres, turn_edges, turn_edges[1:])]
    return Plot(
        (turn_edges[0], turn_edges[-1]), y_range, x_label, y_label, x_ticks=ticks, grid=False
    )


def _heat_cell(plot: Plot, cell, share: float, text: str, what: str) -> None:
    (left, right), (bottom, top) = cell
    plot.box((left, right), (bottom, top), "heat", f"{text} {what}", opacity=0.08 + 0.72 * share)
    plot.text((left + right) / 2, (bottom + top) / 2, text)


def _whole_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Ticks for an axis of steps: there is no step 2.5."""
    return [(t, short(t)) for t in round_ticks(*widened(low, high)) if t == int(t)]


def _integer_edges(largest: int) -> np.ndarray:
    """Edges half-way between integers 0 ... largest, at most `MAX_CELLS` bins."""
    width = -(-(largest + 1) // MAX_CELLS)
    return np.arange(-0.5, largest + width + 0.5, width)


def _span_label(low: float, high: float) -> str:
    first, last = int(low + 0.5), int(high - 0.5)
    return f"{first}" if first == last else f"{first}-{last}"


def _trailing_mean(values: Sequence[float], window: int) -> list[float]:
    return [float(np.mean(values[max(0, i + 1 - window) : i + 1])) for i in range(len(values))]
