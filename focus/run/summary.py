"""What a run comes to at its end, as `summary.json` has it."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import focus
from focus.metrics import run_name
from focus.run.steps import LAG, Progress
from focus.run.trainer import Trainer


def summarise(
    trainer: Trainer, progress: Progress, *, success: float, std_error: float
) -> dict[str, Any]:
    """All figures of a finished run but those of single steps.

    Args:
      trainer: of the run.
      progress: as it stands after the last step.
      success: on held-out tasks, by the last evaluation.
      std_error: of that.

    Returns:
      JSON-able values by name; `focus.metrics.summary_lines` says the most of it in six lines.
    """
    config, ledger, sums = trainer.config, progress.ledger, progress.sums
    lags = {
        int(name.removeprefix(LAG)): int(count)
        for name, count in sums.items()
        if name.startswith(LAG)
    }
    steps = max(sums.get("steps", 0), 1)
    step_phases = ("rollout", "tools", "score", "controller", "critic", "credit", "update", "push")
    step_seconds = sum(ledger.seconds.get(phase, 0.0) for phase in (*step_phases, "record"))
    return {
        "name": run_name(config.to_dict()),
        "method": config.method,
        "task": trainer.env.name,
        "seed": config.seed,
        "steps": config.steps,
        "success_before": progress.success_before,
        "success_after": success,
        "success_std_error": std_error,
        "budget_per_step": config.budget,
        "max_step_tokens": int(sums.get("max_step_tokens", 0)),
        "generated_tokens": {k: getattr(ledger, k) for k in ("base", "branch", "summary")},
        "other_tokens": {k: getattr(ledger, k) for k in ("observation", "prefill", "cached")},
        "replayed": progress.lost,
        "dose": {
            "tokens": int(sums.get("dose_tokens", 0)),
            "optimizer_steps": int(sums.get("dose_steps", 0)),
        },
        "staleness": {
            "tokens": {str(lag): count for lag, count in sorted(lags.items())},
            "max": max(lags, default=0),
            "mixed_rollouts": int(sums.get("mixed", 0)),
            "dropped_rollouts": int(sums.get("dropped", 0)),
            "dropped_tokens": int(sums.get("dropped_tokens", 0)),
        },
        "citations": {
            "asked": int(sums.get("citations_asked", 0)),
            "valid": int(sums.get("citations_valid", 0)),
        },
        "wall_s": {phase: round(s, 2) for phase, s in sorted(ledger.seconds.items())},
        "controller_share": ledger.seconds.get("controller", 0.0) / max(step_seconds, 1e-9),
        "prefix_recomputed_share": sums.get("recomputed_share", 0.0)
        / max(sums.get("branch_steps", 0), 1),
        "packing_efficiency": sums.get("packing_efficiency", 0.0) / steps,
        "recompilations_after_warmup": int(sums.get("recompilations", 0)),
        "technical_failures": int(sums.get("technical_failures", 0)),
        "num_parameters": trainer.num_parameters,
        "versions": {
            "python": platform.python_version(),
            "focus": focus.__version__,
            **{name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
        },
    }
