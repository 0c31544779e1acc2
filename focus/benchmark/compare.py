"""Sides in turn, whether they agree, how fast they are, and a report to keep.

Each side runs in a process of its own, and the processes take turns, so that what else the
machine does hits all of them. Compilation and a first round are not counted. Reported are medians
of tokens per second, and the median of the ratios of neighbouring processes.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import rich.console
import rich.progress
import rich.table

from focus.benchmark.sides import SIDES
from focus.benchmark.work import SIZES, Work
from focus.formats import hf
from focus.learner.sharding import num_cores
from focus.policy import model as models

TOLERANCE = 1e-3
_ROOT = Path(__file__).parent.parent.parent
_COLUMNS = (
    "task",
    "shape",
    "model",
    "against",
    "ours tokens/s",
    "theirs tokens/s",
    "ratio",
    "difference",
    "load",
    "date",
)
_LIBRARIES = ("jax", "jaxlib", "torch", "transformers", "google-tunix")


def _measure(side: str, directory: Path, work: Work, python: str) -> dict:
    """One side in a process of its own."""
    command = [python, "-m", "focus.benchmark.sides", side, str(directory)]
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    if side == "ours":
        # Where JAX has nothing but a CPU: what scripts/quickstart.sh makes of it.
        environment |= {"JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(
        [*command, json.dumps(dataclasses.asdict(work))],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise ValueError(f"{side} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def difference(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    """Largest difference between what two sides found, relative where numbers are above 1.

    Args:
      ours: name -> numbers.
      theirs: the same of the other side.

    Returns:
      `max |a - b| / max(1, |b|)`.

    Raises:
      ValueError: they found different things, or differ by more than `TOLERANCE`: the work was
        not the same.
    """
    if ours.keys() != theirs.keys() or any(len(ours[k]) != len(theirs[k]) for k in ours):
        sizes = [{k: len(v) for k, v in side.items()} for side in (ours, theirs)]
        raise ValueError(f"the sides found different things: {sizes[0]} and {sizes[1]} numbers")
    largest = 0.0
    for name in ours:
        a, b = np.array(ours[name]), np.array(theirs[name])
        gap = float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b)), initial=0.0))
        if not gap <= TOLERANCE:
            raise ValueError(
                f"the sides differ by {gap:.2g} in {name}, {TOLERANCE:g} is allowed: they do not "
                "do the same work, and their speeds cannot be compared"
            )
        largest = max(largest, gap)
    return largest


def compare(
    work: Work,
    *,
    size: str = "tiny",
    model_path: str | None = None,
    against: str | None = None,
    python: str = sys.executable,
    rounds: int = 3,
) -> dict:
    """Measures ours, and the other side where one is named, in turn.

    Args:
      work: what to do.
      size: one of `SIZES`, with random weights; not read with `model_path`.
      model_path: Hugging Face directory.
      against: "hf", "tunix" or None.
      python: interpreter of the other side, where it lives in an environment of its own.
      rounds: processes of each side.

    Returns:
      Figures for JSON: per side all rates and their median, and the `load` per core; of two sides
      also `ratio`, the `ratios` of all rounds, and the `difference` between their results.

    Raises:
      ValueError: an unknown name, a side that fails, or sides whose results differ.
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}; got {size!r}")
    sides = ["ours"] + ([against] if against else [])
    for side in sides:
        if side not in SIDES:
            raise ValueError(f"--against must be one of {', '.join(SIDES)}; got {side!r}")
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    results: dict[str, list[dict]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(model_path) if model_path else Path(scratch) / "model"
        if not model_path:
            params = models.init_params(SIZES[size], jax.random.key(0))
            hf.save_checkpoint(directory, SIZES[size], params, dtype="float32")
        console = rich.console.Console(stderr=True)
        order = [(r, side) for r in range(rounds) for side in sides]
        for _, side in rich.progress.track(order, description=work.task, console=console):
            interpreter = sys.executable if side == "ours" else python
            results[side].append(_measure(side, directory, work, interpreter))
    figures: dict = {"work": dataclasses.asdict(work), "model": model_path or size}
    figures["load"] = os.getloadavg()[0] / (os.cpu_count() or 1)
    for side, parts in results.items():
        rates = [part["rates"] for part in parts]
        figures[side] = {
            "tokens_per_second": statistics.median(x for part in rates for x in part),
            "all": rates,
        }
    if against:
        pairs = list(zip(results["ours"], results[against]))
        ratios = [statistics.median(a["rates"]) / statistics.median(b["rates"]) for a, b in pairs]
        figures |= {
            "against": against,
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "difference": max(difference(a["found"], b["found"]) for a, b in pairs),
        }
    return figures


def table(figures: dict) -> rich.table.Table:
    """What `compare` found."""
    work = figures["work"]
    out = rich.table.Table(
        title=f"{work['task']}, {work['shape']}, {figures['model']}, {work['rows']} rows"
    )
    for column in ("side", "tokens/s", "ratio", "difference"):
        out.add_column(column, justify="left" if column == "side" else "right")
    for side in SIDES:
        if side in figures:
            compared = side == "ours" and "ratio" in figures
            more = [f"{figures['ratio']:.2f}", f"{figures['difference']:.1e}"] if compared else []
            out.add_row(side, f"{figures[side]['tokens_per_second']:,.0f}", *more)
    return out


def machine() -> str:
    """Processor, cores and library versions, as a heading of the report."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            x.split(":", 1)[1].strip()
            for x in cpuinfo.read_text().splitlines()
            if "model name" in x
        ]
        model = names[0] if names else model
    versions = []
    for name in _LIBRARIES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return (
        f"{model}, {num_cores()} cores, Python {platform.python_version()}, {', '.join(versions)}"
    )


_HEAD = """\
# Benchmarks

Written by `python scripts/benchmark.py TASK --shape SHAPE --against SIDE --out FILE`. A line is
replaced when the same comparison is measured again on the same machine with the same versions.

- tokens/s counts tokens that the policy wrote (dense rows: all but the first of a row), the same
  on both sides. The ratio is the median over processes that took turns; where other programs ran
  on the machine, speeds are low on both sides and the ratio is what counts.
- difference: the largest between what both sides found. Losses and gradient norms of every step
  (update), log-probabilities of all trained tokens (score), greedy first tokens (decode).
- load: programs that wanted a core at the end, per core (1 is the benchmark alone). Far above 1,
  a side whose threads wait for one another at every operation loses more than the other.
- What the shapes are stands in `focus/benchmark/work.py`, how each side does the work in
  `focus/benchmark/sides.py`.
"""


def write_report(path: Path, figures: dict, heading: str | None = None) -> None:
    """Adds a comparison to a Markdown file, or replaces the line of the same one.

    Args:
      path: made where it does not exist.
      figures: as from `compare`, of two sides.
      heading: what the machine is; None asks it.

    Raises:
      ValueError: only one side was measured.
    """
    if "ratio" not in figures:
        raise ValueError("a report compares two sides: name the other one with --against")
    heading = heading or machine()
    sections: dict[str, dict[tuple[str, ...], str]] = {}
    rows: dict[tuple[str, ...], str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("## "):
            rows = sections.setdefault(line[3:], {})
        elif line.startswith("| ") and not line.startswith(f"| {_COLUMNS[0]} |"):
            rows[tuple(cell.strip() for cell in line.split("|")[1:5])] = line
    work, against = figures["work"], figures["against"]
    key = (work["task"], work["shape"], str(figures["model"]), against)
    cells = (
        *key,
        f"{figures['ours']['tokens_per_second']:,.0f}",
        f"{figures[against]['tokens_per_second']:,.0f}",
        f"{figures['ratio']:.2f}",
        f"{figures['difference']:.1e}",
        f"{figures['load']:.1f}",
        datetime.date.today().isoformat(),
    )
    sections.setdefault(heading, {})[key] = f"| {' | '.join(cells)} |"
    lines = [_HEAD]
    for title, section in sections.items():
        lines += [f"## {title}", "", f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
        lines += [section[key] for key in sorted(section)] + [""]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
