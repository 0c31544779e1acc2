"""The run's ledger, and numbers and settings as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from focus.report import figures
from focus.report.record import Run

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
            per_step = format_number(total / len(metrics))
            token_rows.append((label, format_number(total), per_step, share))
    budget = _total(metrics, ["budget"])
    if generated is not None and budget:
        used = f"{100 * generated / budget:.1f} % used"
        per_step = format_number(budget / len(metrics))
        token_rows.append(("generation budget", format_number(budget), per_step, used))

    seconds = seconds_by_phase(run)
    total_s = sum(seconds.values())
    time_rows = []
    for phase, phase_s in seconds.items():
        in_steps = _total(metrics, [f"time/{phase}"])
        per_step = "" if in_steps is None else format_number(in_steps / len(metrics))
        share = f"{100 * phase_s / total_s:.1f} %" if total_s else ""
        time_rows.append((figures.phase_label(phase), format_number(phase_s), per_step, share))

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
    number = number or format_number
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
    return f"{100 * value:.1f} %" if is_share else format_number(value)


def seconds_by_phase(run: Run) -> dict[str, float]:
    """Wall seconds by phase: the summary's, which hold what comes before and after the steps."""
    seconds = run.summary.get("wall_s") or {
        phase: _total(run.metrics, [f"time/{phase}"]) for phase in figures.phases(run.metrics)
    }
    return {phase: seconds[phase] for phase in figures.ordered_phases(seconds)}


def _total(metrics: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> float | None:
    values = [row[key] for row in metrics for key in keys if row.get(key) is not None]
    return float(np.sum(values)) if values else None


def format_number(value: float) -> str:
    """Whole numbers with thousands separators, others with four significant digits."""
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
