"""One self-contained HTML page per run: no network, no assets, opens from a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from focus.report import figures, trees
from focus.report.record import Run, read_run
from focus.report.svg import Chart

REPORT_FILE = "report.html"
MAX_BYTES = 5_000_000

# (name in summary.json or last part of a metric's name, label, how steps add up)
HEALTH_ROWS = (
    ("prefix_recomputed_share", "branch prefix computed again", "mean"),
    ("packing_efficiency", "packing efficiency", "mean"),
    ("recompilations", "recompilations after warm-up", "sum"),
    ("technical_failures", "technical failures", "sum"),
    ("replayed", "rollouts played again after a resume", "sum"),
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

    `summary.json` and `config.json` are shown as they are; of their keys the header knows
    `method`, `task`, `seed`, `heldout_before`, `heldout_after`, `wall_s`, `budget` and
    `versions`, and derives what it can from the metrics where one is missing. Parts that the
    run did not record are left out with one line saying so. Trees that would take the page
    past `MAX_BYTES` are left out evenly over the run, and the page says how many.

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
                figures.success_by_step(metrics),
                figures.success_by_tokens(metrics),
                figures.budget(metrics),
                figures.wall_time(metrics),
            ],
        ),
        (
            "critic",
            "Critic",
            [
                figures.critic_error(metrics),
                figures.calibration_chart(
                    branches,
                    "value",
                    "Calibration before refinement",
                    "s4",
                    "A fair test: the critic had not seen these outcomes.",
                ),
                figures.calibration_chart(
                    branches,
                    "refined",
                    "Calibration after refinement",
                    "s2",
                    "Not a test: the refined value has read these outcomes; it shows how far "
                    "they moved it.",
                ),
                figures.uncertainty_chart(branches),
            ],
        ),
        (
            "branching",
            "Branching",
            [
                figures.branch_map(branches),
                figures.branch_turns(branches),
                figures.branch_counts(branches),
                figures.branch_costs(branches),
            ],
        ),
        ("policy", "Policy update", figures.policy_panels(metrics)),
    ]
    if not has_branches:
        note = "this method sampled no branches, so there is nothing to show."
        parts[2] = ("branching", "Branching", [Chart("Branches", note=note)])
    return parts


def header(run: Run) -> dict[str, Any]:
    """What the top of the page says; a missing fact is None."""
    evaluations = [
        row["heldout/success"] for row in run.metrics if row.get("heldout/success") is not None
    ]
    # A single evaluation is a result, not a change.
    derived = {
        "heldout_before": evaluations[0] if len(evaluations) > 1 else None,
        "heldout_after": evaluations[-1] if evaluations else None,
        "wall_s": _total(run.metrics, [key for key, _, _ in figures.TIME_SERIES]),
        "budget": run.metrics[-1].get("budget") if run.metrics else None,
    }
    names = ("method", "task", "seed", "versions", *derived)
    facts = {}
    for name in names:
        sources = (run.summary, run.config, derived)
        facts[name] = next((s[name] for s in sources if s.get(name) is not None), None)
    if isinstance(facts["task"], Mapping):
        facts["task"] = facts["task"].get("name")
    facts["steps"] = len(run.metrics) or None
    facts["tokens"] = next(
        (
            row["tokens/cumulative"]
            for row in reversed(run.metrics)
            if row.get("tokens/cumulative") is not None
        ),
        None,
    )
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

    seconds = _total(metrics, [key for key, _, _ in figures.TIME_SERIES])
    time_rows = []
    for key, _, label in figures.TIME_SERIES:
        total = _total(metrics, [key])
        if total is not None and seconds:
            share = f"{100 * total / seconds:.1f} %"
            time_rows.append((label, _format(total), _format(total / len(metrics)), share))

    health_rows = []
    for name, label, how in HEALTH_ROWS:
        value = _health(run, name, how)
        text = "not recorded" if value is None else _format(value)
        if value is not None and how == "mean":
            text = f"{100 * value:.1f} %"
        health_rows.append((label, text, "", ""))
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


def _health(run: Run, name: str, how: str) -> float | None:
    if run.summary.get(name) is not None:
        return run.summary[name]
    values = [
        value
        for row in run.metrics
        for key, value in row.items()
        if key.split("/")[-1] == name and value is not None
    ]
    if not values:
        return None
    return float(np.mean(values) if how == "mean" else np.sum(values))


def _total(metrics: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> float | None:
    values = [row[key] for row in metrics for key in keys if row.get(key) is not None]
    return float(np.sum(values)) if values else None


def _format(value: float) -> str:
    """Whole numbers with thousands separators, others with four significant digits."""
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
