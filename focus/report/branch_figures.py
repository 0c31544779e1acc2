"""The report's figures of branches: where they were spent, and what they say of the critic.

Rows of branches in, `Chart`s out. One without inputs says so, as in `focus.report.figures`.
"""

from __future__ import annotations

import numpy as np

from focus.critic.calibration import calibration
from focus.report import reasons
from focus.report.figures import Rows
from focus.report.intervals import Z_95, wilson_interval
from focus.report.svg import Chart, Plot, short, whole_ticks

MAX_POINTS = 400
MAX_CELLS = 16
VALUE_BINS = 10
MIN_GROUP = 8


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
    return plot.chart(
        title,
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
    return plot.chart(
        title,
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
    return plot.chart(
        title,
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
        x_ticks=whole_ticks(step_edges[0], step_edges[-1]),
        y_ticks=[(c, _span_label(a, b)) for c, a, b in zip(centres, turn_edges, turn_edges[1:])],
        grid=False,
    )
    for i, j in np.argwhere(share > 0):
        cell = (step_edges[i], step_edges[i + 1]), (turn_edges[j], turn_edges[j + 1])
        percent = f"{100 * share[i, j]:.0f}"
        _heat_cell(plot, cell, share[i, j] / share.max(), percent, "% of the continuations")
    return plot.chart(title, note="Share of a column's continuations, in percent, by turn.")


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
    return plot.chart(title, note=f"{int(states.sum()):,} branched states in all steps.")


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
    return plot.chart(
        title,
        note=f"Sum of predictions over sum of actual tokens: {ratio:.2f} (1 is calibrated).",
    )


def branch_gains(branches: Rows) -> Chart:
    """Predicted error reduction per token, by which states were chosen, against what came.

    What came is the prediction times the squared standardised residual of the branch mean; see
    `focus.branching.prediction`. Groups of equal size in the order of the prediction; bars are
    95 % intervals of a group's mean.
    """
    title = "Why states were branched"
    known = [why for row in branches if (why := reasons.reason(row)) and why.predicted is not None]
    if len(known) < 2 * MIN_GROUP:
        return Chart(
            title,
            note=f"needs {2 * MIN_GROUP} branched states with a recorded prediction and outcomes.",
        )
    # Millionths of the outcome's squared unit, per token.
    predicted = 1e6 * np.array([why.predicted for why in known])
    came = 1e6 * np.array([why.came for why in known])
    points = []
    order = np.argsort(predicted, kind="stable")
    for group in np.array_split(order, min(8, len(known) // MIN_GROUP)):
        half = Z_95 * np.std(came[group], ddof=1) / np.sqrt(len(group))
        points.append((np.mean(predicted[group]), np.mean(came[group]), half, len(group)))
    right = 1.1 * max(x for x, *_ in points)
    low = min(0.0, 1.05 * min(y - half for _, y, half, _ in points))
    high = max(right, 1.05 * max(y + half for _, y, half, _ in points))
    plot = Plot((0, right), (low, high), "predicted, millionths per token", "came, per token")
    plot.line((0, right), (0, right), "muted", dashed=True)
    for x, y, half, number in points:
        plot.interval(x, y - half, y + half, "s2")
        plot.dot(x, y, "s2", f"predicted {x:.3g}, came {y:.3g}, {number} states", radius=4.5)
    return plot.chart(
        title,
        (("s2", "dot", "states grouped by prediction, 95 % interval"),),
        f"{len(known):,} states. Reduction of the weighted squared error of V per generated "
        "token. On the line branches taught what they were sampled for; a group below it was "
        "chosen for an uncertainty that was not there.",
    )


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


def _integer_edges(largest: int) -> np.ndarray:
    """Edges half-way between integers 0 ... largest, at most `MAX_CELLS` bins."""
    width = -(-(largest + 1) // MAX_CELLS)
    return np.arange(-0.5, largest + width + 0.5, width)


def _span_label(low: float, high: float) -> str:
    first, last = int(low + 0.5), int(high - 0.5)
    return f"{first}" if first == last else f"{first}-{last}"
