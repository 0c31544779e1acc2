"""Several runs on one page: curves at equal tokens, what differs, and one task side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from focus.report import html, verdict
from focus.report.intervals import Z_95, normal_interval
from focus.report.ledger import flatten
from focus.report.record import Run, read_run
from focus.report.svg import Chart, Plot
from focus.report.transcripts import ENDINGS

COMPARISON_FILE = "comparison.html"
COLOURS = ("s1", "s2", "s3", "s4", "s5", "s8", "s9", "s10", "s6", "s7")


@dataclasses.dataclass(frozen=True)
class Named:
    """A run with what the page calls it.

    Attributes:
      label: its name and seed, and its directory where that is not enough.
      css: its colour.
      run: what was read.
    """

    label: str
    css: str
    run: Run


def build_comparison(workdirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes one page about several runs, finished or not.

    Args:
      workdirs: directories of two to ten runs.
      out: file to write; `comparison.html` beside the first run by default.

    Returns:
      The path of the page.

    Raises:
      ValueError: fewer than two runs or more than there are colours for, the same one twice, or
        one that `read_run` refuses.
    """
    paths = [Path(workdir).resolve() for workdir in workdirs]
    if not 2 <= len(paths) <= len(COLOURS):
        raise ValueError(f"{len(paths)} runs to compare: give 2 to {len(COLOURS)}")
    if len(set(paths)) < len(paths):
        raise ValueError(f"one run was given twice: {', '.join(map(str, workdirs))}")
    runs = name_runs([read_run(path) for path in paths])
    path = Path(out) if out is not None else paths[0].parent / COMPARISON_FILE
    return html.write_page(path, render(runs))


def name_runs(runs: Sequence[Run]) -> list[Named]:
    """Names that tell the runs apart."""
    names = []
    for run in runs:
        header = html.header(run)
        seed = "" if header["seed"] is None else f", seed {header['seed']}"
        names.append(f"{header['name'] or 'run'}{seed}")
    return [
        Named(name if names.count(name) == 1 else f"{name} ({run.workdir.name})", css, run)
        for name, css, run in zip(names, COLOURS, runs)
    ]


def render(runs: Sequence[Named]) -> str:
    """The page as text."""
    common = common_tokens(runs)
    return (
        html.environment()
        .get_template("runs.html.j2")
        .render(
            runs=runs,
            rows=[_row(named, common) for named in runs],
            common=common,
            charts=[
                _curves(runs, "heldout/success", "Held-out success at equal tokens", common),
                _curves(runs, "train/success", "Training success at equal tokens", common),
                _curves(runs, "critic/error", "Critic error at equal tokens", common),
                _curves(runs, "policy/entropy", "Policy entropy at equal tokens", common),
            ],
            paired=[_paired(runs[0], other, common) for other in runs[1:]],
            verdicts=[(named, verdict.verdicts(named.run)) for named in runs],
            settings=_differing_settings(runs),
            tasks=side_by_side(runs, common),
            endings=ENDINGS,
        )
    )


def common_tokens(runs: Sequence[Named]) -> float | None:
    """Generated tokens that every run has reached; None if one did not record them."""
    reached = [
        max((row.get("tokens/cumulative") or 0 for row in named.run.metrics), default=0)
        for named in runs
    ]
    return float(min(reached)) if min(reached) > 0 else None


def evaluation_at(run: Run, tokens: float | None) -> dict[str, Any] | None:
    """The last evaluation that had cost at most `tokens` (None: any).

    Returns:
      Its metrics with `done`, the finished training steps; None if there is none.
    """
    found = [
        dict(row) | {"done": row["step"] + 1}
        for row in run.metrics
        if row.get("heldout/success") is not None
        and (tokens is None or (row.get("tokens/cumulative") or 0) <= tokens)
    ]
    return found[-1] if found else None


def side_by_side(runs: Sequence[Named], tokens: float | None) -> list[dict[str, Any]]:
    """Held-out tasks that all runs have played and written down, the ones they differ on first.

    Args:
      runs: to compare.
      tokens: evaluations are those at so many generated tokens.

    Returns:
      One mapping per task: its record, `episodes` (one per run, in their order) and `differ`.
    """
    recorded = [_recorded_at(named.run, tokens) for named in runs]
    shared = [
        task_id
        for task_id, task in recorded[0].items()
        if all(
            task_id in tasks
            and tasks[task_id]["segments"] is not None
            and tasks[task_id]["question"] == task["question"]
            for tasks in recorded
        )
    ]
    tasks = []
    for task_id in shared:
        episodes = [tasks_of[task_id] for tasks_of in recorded]
        solved = {episode["ending"] == "solved" for episode in episodes}
        tasks.append(dict(episodes[0]) | {"episodes": episodes, "differ": len(solved) > 1})
    return sorted(tasks, key=lambda task: not task["differ"])


def _recorded_at(run: Run, tokens: float | None) -> dict[str, Mapping[str, Any]]:
    row = evaluation_at(run, tokens)
    for evaluation in reversed(run.evaluations):
        if row is None or evaluation["step"] <= row["done"]:
            return {task["task_id"]: task for task in evaluation["tasks"]}
    return {}


def _row(named: Named, common: float | None) -> dict[str, Any]:
    """A run's line in the table."""
    header = html.header(named.run)
    at_common = evaluation_at(named.run, common)
    branch = sum(row.get("tokens/branch") or 0 for row in named.run.metrics)
    interval = None
    if at_common is not None and at_common.get("heldout/std_error") is not None:
        interval = normal_interval(at_common["heldout/success"], at_common["heldout/std_error"])
    return header | {
        "label": named.label,
        "css": named.css,
        "workdir": str(named.run.workdir),
        "at_common": None if at_common is None else at_common["heldout/success"],
        "common_interval": interval,
        "branch_share": branch / header["tokens"] if header["tokens"] else None,
    }


def _curves(runs: Sequence[Named], key: str, title: str, common: float | None) -> Chart:
    lines = []
    for named in runs:
        points = [
            (row["tokens/cumulative"], row[key])
            for row in named.run.metrics
            if row.get("tokens/cumulative") is not None and row.get(key) is not None
        ]
        before = named.run.summary.get("success_before")
        if key == "heldout/success" and before is not None:
            points.insert(0, (0, before))
        if points:
            lines.append((named, points))
    if not lines:
        return Chart(title, note=f"no run recorded {key} over tokens.")
    xs = [x for _, points in lines for x, _ in points]
    ys = [y for _, points in lines for _, y in points]
    low = min(0.0, min(ys))
    plot = Plot((0, max(xs)), (low, max(ys) + 0.06 * (max(ys) - low)), "generated tokens", key)
    for named, points in lines:
        steps, values = zip(*points)
        if key != "heldout/success":
            window = max(1, len(values) // 12)
            values = [np.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
        plot.line(steps, values, named.css, label=named.label)
    if common is not None and common < max(xs):
        plot.line((common, common), plot.y_range, "ink", dashed=True)
    note = "Trailing mean of a twelfth of the run." if key != "heldout/success" else ""
    if common is not None and common < max(xs):
        note += " The dashed line is where the shortest run ends."
    return plot.chart(title, [(n.css, "line", n.label) for n, _ in lines], note.strip())


def _paired(first: Named, other: Named, tokens: float | None) -> str:
    """The difference of two runs on the held-out tasks that both have played, as a sentence."""
    ours, theirs = (_recorded_at(named.run, tokens) for named in (first, other))
    pairs = [
        (ours[task_id]["ending"] == "solved", theirs[task_id]["ending"] == "solved")
        for task_id in ours
        if task_id in theirs
        and ours[task_id]["question"] == theirs[task_id]["question"]
        and None not in (ours[task_id]["outcome"], theirs[task_id]["outcome"])
    ]
    if len(pairs) < 2:
        return f"{other.label} against {first.label}: they recorded no held-out tasks in common."
    differences = np.array([float(b) - float(a) for a, b in pairs])
    half = Z_95 * np.std(differences, ddof=1) / np.sqrt(len(differences))
    mean = f"{100 * np.mean(differences):+.1f}".replace("-", "−")
    return (
        f"{other.label} against {first.label}: {mean} ± {100 * half:.1f} points on the "
        f"{len(pairs)} held-out tasks that both have played; "
        f"{int(np.sum(differences > 0))} solved by {other.label} alone, "
        f"{int(np.sum(differences < 0))} by {first.label} alone."
    )


def _differing_settings(runs: Sequence[Named]) -> list[tuple[str, list[str]]]:
    """Keys of the configs whose values differ, with the value of each run."""
    configs = [dict(flatten(named.run.config, number=str)) for named in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [config.get(key, "–") for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
