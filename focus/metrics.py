"""Where numbers go: a file always, TensorBoard and W&B on request, a progress bar for people.

And under which name: that of what was run.
"""

from __future__ import annotations

import importlib
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import rich.console
import rich.progress
import rich.table

from focus.journal import JsonLines, keep_json_lines, read_json_lines

# What the methods of configs/default.py set: estimator, rule, context manager.
METHODS = {
    "focus": ("focus", "expected_error_reduction", "full"),
    "focus_summarize": ("focus", "expected_error_reduction", "summarize"),
    "grpo": ("grpo", "none", "full"),
    "vineppo": ("vineppo", "uniform", "full"),
    "ppo": ("ppo", "none", "full"),
    "self_credit": ("self_credit", "none", "cite_summary"),
}


def run_name(config: Mapping[str, Any]) -> str | None:
    """A run's name: "gigpo" for a GRPO config with that estimator, "focus, random branches".

    A method where estimator, rule and context manager are that method's; else the estimator, with
    what is not as usual for it. A `method` of the user's own stands before that: "mine: gigpo".

    Args:
      config: nested, as in `config.json`; a run may be read whose config lacks parts, and then
        its method is its name.

    Returns:
      The name; None if the config says nothing of a method.
    """
    method = config.get("method")
    ran = estimator, rule, manager = (
        _get(config, "credit", "estimator"),
        _get(config, "branching", "rule"),
        _get(config, "context", "manager"),
    )
    if None in ran:
        return None if method is None else str(method)
    name = next((known for known, sets in METHODS.items() if sets == ran), None)
    if name is None:
        _, usual_rule, usual_manager = METHODS.get(estimator, ("", "none", "full"))
        parts = [str(estimator)]
        if rule != usual_rule:
            words = "no" if rule == "none" else str(rule).replace("_", " ")
            parts.append(f"{words} branches")
        if manager != usual_manager:
            parts.append("full context" if manager == "full" else str(manager).replace("_", " "))
        name = ", ".join(parts)
    return name if method is None or method in METHODS or method == name else f"{method}: {name}"


def _get(config: Mapping[str, Any], section: str, key: str) -> Any:
    part = config.get(section)
    return part.get(key) if isinstance(part, Mapping) else None


def read_metrics(workdir: str | Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl`, in order of their steps; a torn last line is left out."""
    return read_json_lines(Path(workdir) / "metrics.jsonl")[0]


def check_writers(log: Mapping[str, Any]) -> None:
    """Checks before a run that what `config.log` asks for is there.

    Raises:
      ImportError: a package is missing.
      ValueError: W&B has no key.
    """
    if log["tensorboard"]:
        _import("tensorboardX", "tensorboard")
    if log["wandb"]:
        wandb = _import("wandb", "wandb")
        if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
            return
        try:
            wandb.login()
        except Exception as error:
            raise ValueError(
                f"log.wandb={log['wandb']!r}: {' '.join(str(error).split())} Set WANDB_API_KEY, or "
                "WANDB_MODE=offline to send what the run writes down later"
            ) from error


def wandb_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `wandb.init` for a run: project, what the run is called, and its config."""
    name = f"{run_name(config)}, seed {config['seed']}"
    return {"project": config["log"]["wandb"], "name": name, "config": dict(config)}


class MetricsWriter:
    """Writes one line of metrics a step.

    `metrics.jsonl` holds flat records `{"step": ..., name: number or null, ...}`. A number that
    is not finite is written as null and its name is listed under "nonfinite".
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        start_step: int = 0,
        tensorboard: bool = False,
        wandb: Mapping[str, Any] | None = None,
    ):
        """Opens the writers; lines of `start_step` and later are of a lost attempt and go.

        Args:
          workdir: directory of the run.
          start_step: first step that will be written: 0, or the checkpoint's on a resume.
          tensorboard: also write `workdir/tensorboard`.
          wandb: also log to Weights & Biases, with these arguments of `wandb.init`, e.g.
            `{"project": "focus", "mode": "offline"}`. A resumed run continues under its id; W&B
            keeps what it already has of a step, so repeated steps are not logged there twice.

        Attributes:
          removed: number of lines that were cut.

        Raises:
          ImportError: a writer's package is not installed.
        """
        workdir = Path(workdir)
        tensorboardx = _import("tensorboardX", "tensorboard") if tensorboard else None
        wandb_module = _import("wandb", "wandb") if wandb is not None else None
        path = workdir / "metrics.jsonl"
        self.removed = keep_json_lines(path, lambda record: record["step"] < start_step)
        self._last_step = start_step - 1
        self._lines = JsonLines(path)
        self._tensorboard = self._wandb = None
        if tensorboardx is not None:
            self._tensorboard = tensorboardx.SummaryWriter(
                str(workdir / "tensorboard"), purge_step=start_step or None
            )
        if wandb_module is not None:
            self._wandb = wandb_module.init(
                **{"dir": str(workdir), "id": _wandb_run_id(workdir), "resume": "allow", **wandb}
            )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics of one step, flushed before it returns.

        Args:
          step: larger than the last one.
          metrics: numbers by name (Python, NumPy or JAX scalars), None for "not measured".

        Raises:
          ValueError: a step that was there, or a value that is not a number.
          OSError: the line could not be written, e.g. on a full disk.
        """
        if step <= self._last_step:
            raise ValueError(
                f"step {step} is not after step {self._last_step}; write each step once, in order"
            )
        values = {name: _number(name, value) for name, value in metrics.items()}
        nonfinite = sorted(n for n, v in values.items() if v is not None and not math.isfinite(v))
        record = {"step": step, **values, **dict.fromkeys(nonfinite)}
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._lines.append(record)
        self._last_step = step
        measured = {name: value for name, value in values.items() if value is not None}
        if self._tensorboard is not None:
            for name, value in measured.items():
                self._tensorboard.add_scalar(name, value, global_step=step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(measured, step=step)

    def close(self) -> None:
        """Closes all writers."""
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class ProgressBar:
    """Shows where a run is: a live line on a terminal, plain lines every few steps elsewhere."""

    def __init__(
        self,
        num_steps: int,
        *,
        start_step: int = 0,
        title: str = "",
        every: int = 10,
        console: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Opens the display; use as a context manager.

        Args:
          num_steps: steps of the whole run.
          start_step: steps that earlier attempts have finished.
          title: what the run is called.
          every: steps between two lines when the output is not a terminal.
          console: where to print, standard error if None.
          clock: seconds, for the time left.
        """
        if every < 1:
            raise ValueError(f"every must be >= 1, got {every}")
        self._num_steps, self._start_step, self._every = num_steps, start_step, every
        self._title = f"{title}  " if title else ""
        self._console = console or rich.console.Console(stderr=True)
        self._clock = clock
        self._started = clock()
        self._seen: dict[str, float] = {}
        self._live: rich.progress.Progress | None = None
        if self._console.is_terminal:
            line = rich.table.Column(no_wrap=True, overflow="ellipsis", ratio=1)
            self._live = rich.progress.Progress(
                rich.progress.SpinnerColumn(finished_text="+"),
                rich.progress.BarColumn(bar_width=12),
                rich.progress.TextColumn("{task.description}", table_column=line, markup=False),
                console=self._console,
                expand=True,
            )
            self._task = self._live.add_task(
                f"{self._title}step {start_step}/{num_steps}  programs compile in the first step",
                total=num_steps,
                completed=start_step,
            )

    def __enter__(self) -> ProgressBar:
        self._started = self._clock()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of a finished step.

        Args:
          step: the step, counted from 0; `step + 1` are finished.
          metrics: as for `MetricsWriter.write`; looked up are "train/success",
            "heldout/success", "critic/error" and "tokens/base", "/branch", "/summary". A value
            that a step does not have stays as it was.
        """
        for name in _SHOWN:
            value = metrics.get(name)
            if value is not None:
                self._seen[name] = float(value)
        line = self._line(step + 1)
        if self._live is not None:
            self._live.update(self._task, completed=step + 1, description=line)
        elif (step + 1) % self._every == 0 or step + 1 == self._num_steps:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _line(self, finished: int) -> str:
        done = finished - self._start_step
        seconds = (self._clock() - self._started) / max(done, 1) * (self._num_steps - finished)
        parts = [f"{self._title}step {finished}/{self._num_steps}", f"{short_time(seconds)} left"]
        for name, (label, format_spec) in _SHOWN.items():
            if name in self._seen and not name.startswith("tokens/"):
                parts.append(f"{label} {self._seen[name]:{format_spec}}")
        kinds = [
            f"{_SHOWN[name][0]} {_short_count(self._seen[name])}"
            for name in _SHOWN
            if name.startswith("tokens/") and self._seen.get(name)
        ]
        if kinds:
            parts.append("tokens " + " ".join(kinds))
        return "  ".join(parts)


# Name -> label and format, in the order shown.
_SHOWN = {
    "train/success": ("success", ".1%"),
    "heldout/success": ("held-out", ".1%"),
    "critic/error": ("critic error", ".4f"),
    "tokens/base": ("base", ""),
    "tokens/branch": ("branch", ""),
    "tokens/summary": ("summary", ""),
}


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The end of a run in six lines; all else is in `summary.json`.

    Args:
      summary: as `focus.train.train` returns it.
    """
    generated, dose, replayed = (summary[k] for k in ("generated_tokens", "dose", "replayed"))
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in generated.items() if count)
    # "ahead" passes at the same time as others.
    phases = [item for item in summary["wall_s"].items() if item[0] != "ahead"]
    spent = sorted(phases, key=lambda item: -item[1])
    longest = ", ".join(f"{k.replace('_', ' ')} {short_time(s)}" for k, s in spent[:4] if s >= 1)
    trouble = {
        "rollouts without an outcome": summary["technical_failures"],
        "rollouts played again after a stop": replayed["rollouts"],
        "programs compiled late": summary["recompilations_after_warmup"],
    }
    report = Path(summary["report"])
    return [
        f"{summary['name']} on {summary['task']}, seed {summary['seed']}: {summary['steps']} steps",
        f"success   {summary['success_before']:.3f} before, {summary['success_after']:.3f} after "
        f"(held-out tasks, standard error {summary['success_std_error']:.3f})",
        f"tokens    {sum(generated.values()):,} generated ({kinds}), {dose['tokens']:,} trained in "
        f"{dose['optimizer_steps']:,} optimiser steps",
        f"time      {short_time(sum(seconds for _, seconds in spent))}"
        + (f" ({longest})" if longest else ""),
        "trouble   " + (", ".join(f"{n} {what}" for what, n in trouble.items() if n) or "none"),
        f"report    {report}; all figures: {report.parent / 'summary.json'}",
    ]


def _number(name: str, value: Any) -> int | float | None:
    """A Python number; booleans become 0 and 1."""
    if value is None:
        return None
    try:
        number = value.item() if hasattr(value, "item") else value
        return int(number) if isinstance(number, (bool, int)) else float(number)
    except (TypeError, ValueError):
        raise ValueError(
            f"metric {name!r} is {value!r}, not a number; reduce it to a scalar first"
        ) from None


def _short_count(count: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.1f}{suffix}"
    return f"{count:.0f}"


def short_time(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any: 0:07, 12:40, 1:02:33."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _import(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this writer needs the package {module}; install it with "
            f"pip install -e '.[{extra}]', or switch the writer off"
        ) from error


def _wandb_run_id(workdir: Path) -> str:
    """The id under which a run continues after a resume, made at its start."""
    path = workdir / "wandb_run_id"
    if not path.is_file():
        workdir.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8] + "\n")
    return path.read_text().strip()
