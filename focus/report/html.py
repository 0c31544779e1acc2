"""One self-contained HTML page per run: no network, no assets, opens from a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from focus.report import branch_figures, figures, trees
from focus.report.intervals import normal_interval
from focus.report.record import Run, read_run
from focus.report.svg import Chart

REPORT_FILE = "report.html"
MAX_BYTES = 5_000_000

# (path in summary.json, label, whether it is a share)
HEALTH_ROWS = (
    (("controller_share",), "controller's share of the time of a step", True),
    (("prefix_recomputed_share",), "branch prefix computed again", True),
    (("packing_efficiency",), "packing efficiency", True),
    (("recompilations_after_warmup",), "recompilations after warm-up", False),
    (("technical_failures",), "technical failures", False),
    (("replayed", "rollouts"), "rollouts played again after a resume", False),
    (("replayed", "tokens"), "tokens of rollouts played again", False),
)
TOKEN_ROWS = (
    ("tokens/base", "generated: base rollouts"),
    ("tokens/branch", "generated: branches"),
    ("tokens/summary", "generated: summaries"),
    ("tokens/observation", "read: tools and observations"),
    ("tokens/prefill", "prefill: prompts"),
    ("tokens/cached", "prefill served from cache"),
    ("dose/tokens", "dose: tokens with a gradient"),
    ("dose/steps", "dose: optimiser steps"),
)


def build_report(workdir: str | Path, out: str | Path | None = None) -> Path:
    """Writes a run's report.

    `summary.json` and `config.json` are shown as they are. Of the summary's keys the header
    knows `method`, `task`, `seed`, `versions`, `success_before`, `success_after`,
    `success_std_error`, `budget_per_step` and `wall_s`, and derives what it can from config and
    metrics where one is missing; the ledger knows those of `HEALTH_ROWS`. Parts that the run
    did not record are left out with one line saying so. Trees that would take the page past
    `MAX_BYTES` are left out evenly over the run, and the page says how many.

    Args:
      workdir: directory of the run, see `focus.report.record`.
      out: file to write, `workdir/report.html` by default.

    Returns:
      The path of the page.

    Raises:
      ValueError: the directory holds nothing to report on, or a file in it is corrupt.
    """
    run = read_run(workdir)
    page = render(run)
    path = Path(out) if out is not None else run.workdir / REPORT_FILE
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def render(run: Run, max_bytes: int = MAX_BYTES) -> str:
    """The page as text, with as many of the run's trees as fit into `max_bytes`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _format
    environment.filters["signed"] = lambda x: f"{x:+.3f}".replace("-", "−")
    environment.filters["percent"] = lambda x: f"{100 * x:.1f}"
    template = environment.get_template("template.html.j2")
    fixed = {
        "header": header(run),
        "summary": flatten(run.summary),
        "config": flatten(run.config, number=str),
        "sections": sections(run),
        "ledger": ledger(run),
    }
    keep = len(run.trees)
    while True:
        chosen = np.unique(np.linspace(0, len(run.trees) - 1, keep).round().astype(int))
        records = [run.trees[i] for i in chosen]
        limit = trees.advantage_limit(records)
        page = template.render(
            **fixed,
            tasks=[trees.task_view(record, limit) for record in records],
            num_recorded=len(run.trees),
            limit=limit,
            scale=[
                (f * limit, trees.advantage_colour(f * limit, limit)) for f in (-1, -0.5, 0, 0.5, 1)
            ],
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
                branch_figures.branch_map(branches),
                branch_figures.branch_turns(branches),
                branch_figures.branch_counts(branches),
                branch_figures.branch_costs(branches),
            ],
        ),
        ("policy", "Policy update", figures.policy_panels(metrics)),
    ]
    if not has_branches:
        note = "this method sampled no branches, so there is nothing to show."
        parts[2] = ("branching", "Branching", [Chart("Branches", note=note)])
    return parts


def header(run: Run) -> dict[str, Any]:
    """What the top of the page says; a missing fact is None.

    A run that has no summary yet is described by its config and metrics. Only the summary knows
    the success before training, as no step comes before it.
    """
    task = run.config.get("task")
    last_evaluation = _last(run.metrics, "heldout/success", "heldout/std_error")
    derived = {
        "method": run.config.get("method"),
        "task": task.get("name") if isinstance(task, Mapping) else task,
        "seed": run.config.get("seed"),
        "versions": None,
        "success_before": None,
        "success_after": last_evaluation["heldout/success"],
        "success_std_error": last_evaluation["heldout/std_error"],
        "budget_per_step": _last(run.metrics, "budget")["budget"],
    }
    facts = {
        name: run.summary[name] if run.summary.get(name) is not None else value
        for name, value in derived.items()
    }
    facts["success_interval"] = None
    if None not in (facts["success_after"], facts["success_std_error"]):
        facts["success_interval"] = normal_interval(
            facts["success_after"], facts["success_std_error"]
        )
    seconds = _seconds(run)
    facts["wall_s"] = sum(seconds.values()) if seconds else None
    facts["steps"] = len(run.metrics) or run.summary.get("steps")
    facts["tokens"] = _last(run.metrics, "tokens/cumulative")["tokens/cumulative"]
    return facts


def ledger(run: Run) -> list[tuple[str, list[tuple[str, str, str, str]]]]:
    """The run's ledger: groups of `(label, total, per step, share)`, all as text."""
    metrics = run.metrics
    if not metrics:
        return []
    generated = _total(metrics, [key for key, _, _ in figures.BUDGET_SERIES])
    token_rows = []
    for key, label in TOKEN_ROWS:
        total = _total(metrics, [key])
        if total is not None:
            is_generated = key in {k for k, _, _ in figures.BUDGET_SERIES}
            share = f"{100 * total / generated:.1f} %" if is_generated and generated else ""
            per_step = _format(total / len(metrics))
            token_rows.append((label, _format(total), per_step, share))
    budget = _total(metrics, ["budget"])
    if generated is not None and budget:
        used = f"{100 * generated / budget:.1f} % used"
        per_step = _format(budget / len(metrics))
        token_rows.append(("generation budget", _format(budget), per_step, used))

    seconds = _seconds(run)
    total_s = sum(seconds.values())
    time_rows = []
    for phase, phase_s in seconds.items():
        in_steps = _total(metrics, [f"time/{phase}"])
        per_step = "" if in_steps is None else _format(in_steps / len(metrics))
        share = f"{100 * phase_s / total_s:.1f} %" if total_s else ""
        time_rows.append((figures.phase_label(phase), _format(phase_s), per_step, share))

    health_rows = [
        (label, _health(run.summary, path, is_share), "", "")
        for path, label, is_share in HEALTH_ROWS
        if run.summary
    ]
    groups = [("Tokens", token_rows), ("Wall seconds", time_rows), ("Health", health_rows)]
    return [(name, rows) for name, rows in groups if rows]


def flatten(
    mapping: Mapping[str, Any], prefix: str = "", *, number: Callable[[float], str] | None = None
) -> list[tuple[str, str]]:
    """Nested settings as `("learner.learning_rate", "0.001")` pairs, in their own order.

    `number` writes numbers, rounded and with thousands separators by default.
    """
    number = number or _format
    pairs = []
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            pairs.extend(flatten(value, f"{prefix}{key}.", number=number))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            pairs.append((f"{prefix}{key}", number(value)))
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            pairs.append((f"{prefix}{key}", text))
    return pairs


def _health(summary: Mapping[str, Any], path: Sequence[str], is_share: bool) -> str:
    value: Any = summary
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None:
        return "not recorded"
    return f"{100 * value:.1f} %" if is_share else _format(value)


def _seconds(run: Run) -> dict[str, float]:
    """Wall seconds by phase: the summary's, which hold what comes before and after the steps."""
    seconds = run.summary.get("wall_s") or {
        phase: _total(run.metrics, [f"time/{phase}"]) for phase in figures.phases(run.metrics)
    }
    return {phase: seconds[phase] for phase in figures.ordered_phases(seconds)}


def _last(metrics: Sequence[Mapping[str, Any]], *keys: str) -> dict[str, Any]:
    """Values of `keys` in the last row that holds the first of them, else None."""
    row = next((r for r in reversed(metrics) if r.get(keys[0]) is not None), {})
    return {key: row.get(key) for key in keys}


def _total(metrics: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> float | None:
    values = [row[key] for row in metrics for key in keys if row.get(key) is not None]
    return float(np.sum(values)) if values else None


def _format(value: float) -> str:
    """Whole numbers with thousands separators, others with four significant digits."""
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
