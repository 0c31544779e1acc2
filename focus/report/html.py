"""One self-contained HTML page per run: no network, no assets, opens from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from focus.metrics import run_name
from focus.report import branch_figures, figures, heldout, trees, verdict
from focus.report.intervals import normal_interval
from focus.report.ledger import flatten, format_number, ledger, seconds_by_phase
from focus.report.record import Run, read_run
from focus.report.svg import Chart

REPORT_FILE = "report.html"
MAX_BYTES = 5_000_000


def build_report(workdir: str | Path, out: str | Path | None = None) -> Path:
    """Writes a run's report, whether the run is over or going on.

    `summary.json` and `config.json` are shown as they are, folded. Of the summary's keys the
    header knows `method`, `task`, `seed`, `versions`, `success_before`, `success_after`,
    `success_std_error`, `budget_per_step` and `wall_s`, and derives what it can from config and
    metrics where one is missing; the ledger knows those of `HEALTH_ROWS`. Parts that the run
    did not record are left out with one line saying so. Of trees that would take the page past
    `MAX_BYTES` the most telling of each step stay, and the page says how many are left out.

    Args:
      workdir: directory of the run, see `focus.report.record`.
      out: file to write, `workdir/report.html` by default.

    Returns:
      The path of the page.

    Raises:
      ValueError: the directory holds nothing to report on, or a file in it is corrupt.
    """
    run = read_run(workdir)
    path = Path(out) if out is not None else run.workdir / REPORT_FILE
    return write_page(path, render(run))


def write_page(path: Path, page: str) -> Path:
    """Writes a page, complete or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def environment() -> jinja2.Environment:
    """Templates of the pages; everything that they print is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = format_number
    environment.filters["signed"] = lambda x: f"{x:+.3f}".replace("-", "−")
    environment.filters["percent"] = lambda x: f"{100 * x:.1f}"
    return environment


def render(run: Run, max_bytes: int = MAX_BYTES) -> str:
    """The page as text, with as many of the run's trees as fit into `max_bytes`."""
    template = environment().get_template("run.html.j2")
    fixed = {
        "header": header(run),
        "verdicts": verdict.verdicts(run),
        "summary": flatten(run.summary),
        "config": flatten(run.config, number=str),
        "sections": sections(run),
        "transcripts": heldout.transcripts(run.evaluations),
        "ledger": ledger(run),
        "num_recorded": len(run.trees),
    }
    ranked = trees.ranked(run.trees)
    rows = {(row["step"], row["trajectory"], row["state"]): row for row in run.branches}
    keep = len(ranked)
    while True:
        # The newest first; of a step, the most telling.
        records = sorted(ranked[:keep], key=lambda record: -record["step"])
        scales = trees.Scales.of(records)
        page = template.render(
            **fixed,
            tasks=[trees.task_view(record, scales, rows) for record in records],
            scales=scales,
        )
        size = len(page.encode())
        if size <= max_bytes or keep == 0:
            return page
        keep = min(keep - 1, int(0.95 * keep * max_bytes / size))


def sections(run: Run) -> list[tuple[str, str, list[Chart]]]:
    """Anchor, heading and charts of each part of the page above the trees."""
    metrics, branches = run.metrics, run.branches
    has_branches = bool(branches) or any(row.get("tokens/branch") for row in metrics)
    parts = [
        (
            "learning",
            "Learning",
            [
                figures.success_by_step(metrics, run.summary.get("success_before")),
                figures.success_by_tokens(metrics, run.summary.get("success_before")),
                figures.budget(metrics),
                figures.wall_time(metrics),
            ],
        ),
        (
            "critic",
            "Critic",
            [
                figures.critic_error(metrics),
                figures.critic_variance(metrics),
                figures.error_reduction(metrics),
                figures.covariance_scales(metrics),
                branch_figures.calibration_chart(
                    branches,
                    "value",
                    "Calibration before refinement",
                    "s4",
                    "A fair test: the critic had not seen these outcomes.",
                ),
                branch_figures.calibration_chart(
                    branches,
                    "refined",
                    "Calibration after refinement",
                    "s2",
                    "Not a test: the refined value has read these outcomes; it shows how far "
                    "they moved it.",
                ),
                branch_figures.uncertainty_chart(branches),
            ],
        ),
        (
            "branching",
            "Branching",
            [
                branch_figures.branch_gains(branches),
                branch_figures.branch_map(branches),
                branch_figures.branch_turns(branches),
                branch_figures.branch_counts(branches),
                branch_figures.branch_costs(branches),
            ],
        ),
        ("policy", "Policy update", figures.policy_panels(metrics)),
        (
            "heldout",
            "Held-out episodes",
            [heldout.success_by_hops(run.evaluations), heldout.endings(run.evaluations)],
        ),
    ]
    if not has_branches:
        note = "this method sampled no branches, so there is nothing to show."
        parts[2] = ("branching", "Branching", [Chart("Branches", note=note)])
    return parts


def header(run: Run) -> dict[str, Any]:
    """What the top of the page says; a missing fact is None.

    A run that has no summary yet, or has gone on since it was written, is described by its config
    and metrics. Only the summary knows the success before training, as no step comes before it.
    """
    task = run.config.get("task")
    last_evaluation = _last(run.metrics, "heldout/success", "heldout/std_error")
    planned, written = run.config.get("steps"), run.summary.get("steps")
    stale = written is not None and len(run.metrics) > written
    derived = {
        "name": run_name(run.config) or run.summary.get("method"),
        "task": task.get("name") if isinstance(task, Mapping) else task,
        "seed": run.config.get("seed"),
        "versions": None,
        "success_before": None,
        "success_after": last_evaluation["heldout/success"],
        "success_std_error": last_evaluation["heldout/std_error"],
        "budget_per_step": _last(run.metrics, "budget")["budget"],
    }
    measured = {"success_after", "success_std_error"} if stale else set()
    facts = {
        name: run.summary[name]
        if run.summary.get(name) is not None and name not in {"name", *measured}
        else value
        for name, value in derived.items()
    }
    facts["success_interval"] = None
    if None not in (facts["success_after"], facts["success_std_error"]):
        facts["success_interval"] = normal_interval(
            facts["success_after"], facts["success_std_error"]
        )
    seconds = seconds_by_phase(run)
    facts["wall_s"] = sum(seconds.values()) if seconds else None
    facts["steps"] = len(run.metrics) or written
    facts["planned_steps"] = planned if planned and (facts["steps"] or 0) < planned else None
    facts["tokens"] = _last(run.metrics, "tokens/cumulative")["tokens/cumulative"]
    return facts


def _last(metrics: Sequence[Mapping[str, Any]], *keys: str) -> dict[str, Any]:
    """Values of `keys` in the last row that holds the first of them, else None."""
    row = next((r for r in reversed(metrics) if r.get(keys[0]) is not None), {})
    return {key: row.get(key) for key in keys}
