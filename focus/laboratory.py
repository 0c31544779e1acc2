"""An experiment of the laboratory, from its config to `results.json` and the report."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import rich.console
import rich.progress
import rich.table
import rich.text

import focus
from focus.journal import write_atomically
from focus.lab import analysis
from focus.lab.arms import ARMS
from focus.lab.jobs import num_workers, run_jobs
from focus.lab.league import LeagueJob, LeagueSettings, find_estimators, overall
from focus.lab.loop import make_run
from focus.lab.regime import regime_worlds
from focus.lab.specs import WorldSpec, read_arm, read_world
from focus.lab.sweep import Cell, CellResult, Settings, result_row
from focus.lab.worlds import WORLDS
from focus.learner import compilations
from focus.learner.checkpoint import open_workdir
from focus.metrics import short_time
from focus.report.lab import build_lab_report
from focus.run.experiment import cache_dir

RESULTS_FILE = "results.json"
ANALYSIS_FILE = "analysis.json"
LEAGUE_FILE = "league.json"
# What the same workdir may be given again with: a cell knows for itself what it was computed for.
MAY_DIFFER = ("worlds", "arms", "ours", "claims", "regime", "league.worlds")
# Whose text decides what a cell computes.
_SOURCES = ("types.py", "credit", "branching", "critic", "lab")


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a config says, checked.

    Attributes:
      settings: of all cells.
      worlds: in which every arm is run.
      arms: of `focus.lab.arms`, each with its name.
      claims: that are judged.
      points: label of a world of the regime map -> its coordinates.
      league: None if there is none.
      league_worlds: in which the estimators are compared.
      rates: learning rates of an earlier experiment, None where each cell has its sweep.
    """

    settings: Settings
    worlds: tuple[WorldSpec, ...]
    arms: tuple[Any, ...]
    claims: tuple[analysis.Claim, ...]
    points: Mapping[str, Mapping[str, Any]]
    league: LeagueSettings | None
    league_worlds: tuple[WorldSpec, ...]
    rates: Mapping[str, float] | None = None

    def cells(self, workdir: Path) -> list[Cell]:
        """Every arm in every world."""
        return [
            Cell(world, arm, self._settings(world, arm), workdir, make_run)
            for world in self.worlds
            for arm in self.arms
        ]

    def _settings(self, world: WorldSpec, arm: Any) -> Settings:
        if self.rates is None:
            return self.settings
        rate = self.rates[_cell_name(world.name, dict(world.options), arm.name)]
        return dataclasses.replace(self.settings, learning_rates=(rate,))

    def league_jobs(self, workdir: Path) -> list[LeagueJob]:
        """The league in each of its worlds."""
        return [LeagueJob(world, self.league, workdir) for world in self.league_worlds]


def read_parts(config: ml_collections.ConfigDict) -> Parts:
    """Reads and checks a config; no work is done.

    Raises:
      ValueError: names what cannot work: an unknown world, arm, rule or estimator, an option or
        number out of range, a claim or comparison about an arm that is not run, or nothing to do.
    """
    c = config
    settings = Settings(
        steps=c.steps,
        tokens_per_step=c.tokens_per_step,
        seeds=c.seeds,
        sweep_seeds=c.sweep_seeds,
        learning_rates=tuple(float(rate) for rate in c.learning_rates),
        widenings=c.widenings,
        chunk=c.chunk,
        seed=c.seed,
    )
    regime = regime_worlds(c.regime.horizons, c.regime.start_success, c.regime.delays)
    worlds = [read_world(text, WORLDS) for text in c.worlds] + [world for world, _ in regime]
    arms = [read_arm(text, ARMS) for text in c.arms]
    _check_labels("world", [world.label for world in worlds])
    names = [arm.name for arm in arms]
    _check_labels("arm", names)
    if bool(worlds) != bool(arms):
        raise ValueError(f"worlds={c.worlds} without arms={c.arms}: give both, or neither")
    compared = (c.ours, *((*c.regime.baselines, c.regime.random) if regime else ()))
    for arm in compared if arms else ():
        if arm not in names:
            raise ValueError(f"arm {arm!r} is compared with others, but is none of {names}")
    labels = [world.label for world in worlds]
    league_worlds = [read_world(text, WORLDS) for text in c.league.worlds]
    _check_labels("league world", [world.label for world in league_worlds])
    league = None
    if league_worlds:
        league = LeagueSettings(
            estimators=find_estimators(c.league.estimators),
            arm=read_arm(c.league.arm, ARMS),
            seeds=c.league.seeds,
            batches=c.league.batches,
            chunk=c.league.chunk,
            tokens=c.league.tokens,
            seed=c.seed,
        )
    if not (worlds or league_worlds):
        raise ValueError("nothing to do: worlds, regime.horizons and league.worlds are all empty")
    return Parts(
        settings=settings,
        worlds=tuple(worlds),
        arms=tuple(arms),
        claims=tuple(analysis.read_claim(text, labels, names) for text in c.claims),
        points={world.label: point for world, point in regime},
        league=league,
        league_worlds=tuple(league_worlds),
        rates=read_rates(Path(c.sweep_from), worlds, arms) if c.sweep_from else None,
    )


def _cell_name(world: str, options: Mapping[str, Any], arm: str) -> str:
    return json.dumps([world, options, arm], sort_keys=True)


def read_rates(path: Path, worlds: Sequence[WorldSpec], arms: Sequence[Any]) -> dict[str, float]:
    """Learning rates of an earlier experiment, for every cell of this one.

    Args:
      path: its `results.json`.
      worlds, arms: of this one.

    Raises:
      ValueError: it cannot be read, or the sweep of an arm in a world never ran there.
    """
    try:
        rows = json.loads(path.read_text())
        found = {
            _cell_name(r["world"], r["world_options"], r["arm"]): float(r["learning_rate"])
            for r in rows
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"sweep_from={str(path)!r} is no results.json ({error})") from error
    for world in worlds:
        for arm in arms:
            if _cell_name(world.name, dict(world.options), arm.name) not in found:
                raise ValueError(
                    f"sweep_from={str(path)!r}: the sweep of arm {arm.name!r} in world "
                    f"{world.label!r} never ran there; take it out, or set sweep_from=''"
                )
    return found


def _check_labels(kind: str, labels: Sequence[str]) -> None:
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ValueError(f"{kind} {', '.join(twice)} is there twice; give each a label of its own")


def code_version() -> str:
    """A fingerprint of the code that decides what a cell computes."""
    root = Path(focus.__file__).parent
    digest = hashlib.sha256()
    for source in _SOURCES:
        path = root / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def run(
    config: ml_collections.ConfigDict,
    workdir: str | Path,
    *,
    workers: int = 0,
    console: rich.console.Console | None = None,
) -> Path:
    """Runs an experiment, or what is left of it.

    Args:
      config: see `configs/lab.py`.
      workdir: gets `cells/` and `league/` while it runs, then `results.json` (a row for each arm in
        each world), `analysis.json` (curves, comparisons, claims), `league.json` and the report.
      workers: processes; 0: one for each core.
      console: for progress and the tables at the end; standard error and output if None.

    Returns:
      The path of the report.

    Raises:
      ValueError: a config that cannot work, or a workdir of another config or of other code.
    """
    parts = read_parts(config)
    num_workers(workers, 1)  # refuses a negative number before the workdir is made
    keep_programs = functools.partial(compilations.keep, cache_dir(config) / "jax")
    keep_programs()
    identity = {**json.loads(config.to_json()), "code": code_version()}
    workdir = open_workdir(workdir, identity, may_differ=MAY_DIFFER)
    cells, league = parts.cells(workdir), parts.league_jobs(workdir)
    for job in (*cells, *league):
        job.claim()
    left = [job for job in (*cells, *league) if not job.finished]
    with LabProgress(
        [job.title for job in left], earlier=len(cells) + len(league) - len(left), console=console
    ) as progress:
        number = num_workers(workers, len(left))
        run_jobs(left, workers=number, notify=progress.update, setup=keep_programs)
    results = [cell.read() for cell in cells]
    rows = [result_row(result, parts.settings) for result in results]
    said = analyse(parts, config, results)
    _write(workdir / RESULTS_FILE, rows)
    _write(workdir / ANALYSIS_FILE, said)
    judged = [row for job in league for row in job.read()]
    over_worlds = overall(judged)
    if judged:
        _write(workdir / LEAGUE_FILE, {"rows": judged, "overall": over_worlds})
    report = build_lab_report(workdir)
    out = console or rich.console.Console()
    for table in summary_tables(said, over_worlds):
        out.print(table)
    return report


def analyse(
    parts: Parts, config: ml_collections.ConfigDict, results: Sequence[CellResult]
) -> dict[str, Any]:
    """Everything that the report says beside the league, as plain numbers."""
    table = analysis.Table(results)
    if not results:
        names = ("cells", "curves", "sweeps", "aggregates", "pairs", "regime", "rules", "claims")
        return {"worlds": [], "arms": [], "points": [], "profiles": {}, **{n: [] for n in names}}
    points = parts.points
    # The map's worlds are one picture; averages and profiles are of the others, if there are any.
    named = [r for r in results if r.world.label not in points] or results
    chosen = analysis.Table(named)
    return {
        "worlds": table.worlds,
        "arms": table.arms,
        "points": list(points),
        "cells": analysis.cells(table),
        "curves": analysis.curves(table),
        "sweeps": analysis.sweeps(table),
        "aggregates": analysis.aggregates(chosen),
        "pairs": analysis.pairs(chosen, config.ours),
        "profiles": analysis.profiles(chosen),
        "regime": analysis.regime(
            table, points, config.ours, config.regime.baselines, config.regime.random
        ),
        "rules": analysis.error_reduction(table, {arm.name: arm.rule for arm in parts.arms}),
        "claims": [row for claim in parts.claims for row in analysis.judge(claim, table)],
    }


def summary_tables(
    said: Mapping[str, Any], league: Sequence[Mapping[str, Any]], *, best: int = 10
) -> list[rich.table.Table]:
    """What a terminal shows at the end: results, claims, the head of the league.

    Args:
      said: of `analyse`.
      league: rows over all worlds, best first.
      best: rows of the league that are shown.
    """
    tables = []
    if said["cells"]:
        table = rich.table.Table(title="Area under the curve of success, 95 % intervals")
        for name in ("world", "arm"):
            table.add_column(name)
        for name in ("learning rate", "area", "interval", "end", "dose"):
            table.add_column(name, justify="right")
        before = None
        for row in said["cells"]:
            table.add_row(
                rich.text.Text("" if row["world"] == before else row["world"]),
                rich.text.Text(row["arm"]),
                f"{row['learning_rate']:g}{'*' if row['at_border'] else ''}",
                f"{row['auc']:.3f}",
                f"{row['auc_low']:.3f} to {row['auc_high']:.3f}",
                f"{row['final']:.3f}",
                f"{row['dose_tokens']:,.0f}",
            )
            before = row["world"]
        if any(row["at_border"] for row in said["cells"]):
            table.caption = "* the best rate is at the end of those tried: raise config.widenings"
        tables.append(table)
    if said["claims"]:
        table = rich.table.Table(title="Claims")
        for name, justify in (("claim", "left"), ("world", "left"), ("measured", "right")):
            table.add_column(name, justify=justify)
        table.add_column("holds")
        for row in said["claims"]:
            measured = f"{row['value']:.3f} ({row['value_low']:.3f} to {row['value_high']:.3f})"
            verdict = "yes" if row["holds"] else "no"
            table.add_row(
                rich.text.Text(row["claim"]), rich.text.Text(row["world"]), measured, verdict
            )
        tables.append(table)
    if league:
        table = rich.table.Table(title="League, best gradients first")
        table.add_column("estimator")
        for name in ("worlds", "correlation", "sign", "cosine", "signal / noise of the best"):
            table.add_column(name, justify="right")
        for row in league[:best]:
            table.add_row(
                row["estimator"],
                f"{row['worlds']}",
                *(f"{row[key]:.2f}" for key in ("correlation", "sign_agreement", "cosine", "snr")),
            )
        tables.append(table)
    return tables


class LabProgress:
    """Where an experiment is: a live line on a terminal, elsewhere a line for each cell."""

    def __init__(
        self,
        titles: Sequence[str],
        *,
        earlier: int = 0,
        console: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Opens the display; use as a context manager.

        Args:
          titles: of the jobs that are left.
          earlier: jobs that earlier attempts have finished.
          console: where to print, standard error if None.
          clock: seconds, for the time left.
        """
        self._titles, self._earlier, self._clock = titles, earlier, clock
        self._console = console or rich.console.Console(stderr=True)
        self._shares = [0.0] * len(titles)
        self._started = clock()
        self._live: rich.progress.Progress | None = None
        if self._console.is_terminal and titles:
            self._live = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(bar_width=20),
                console=self._console,
            )
            self._task = self._live.add_task("starting, compiling", total=len(titles))

    def __enter__(self) -> LabProgress:
        self._started = self._clock()
        if self._live is not None:
            self._live.start()
        elif self._titles:
            self._say(f"{len(self._titles)} cells to run, {self._earlier} are finished")
        return self

    def __exit__(self, *_) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, index: int, share: float, text: str) -> None:
        """Shows what a job noted.

        Args:
          index: of the job.
          share: of it that is done; 1 ends it.
          text: what it is at.
        """
        ended = share >= 1 and not text
        self._shares[index] = share
        line = self._line(index, "" if ended else text)
        if self._live is not None:
            self._live.update(self._task, completed=sum(self._shares), description=line)
        elif ended:
            self._say(line)

    def _line(self, index: int, text: str) -> str:
        finished = sum(share >= 1 for share in self._shares) + self._earlier
        parts = [f"{finished}/{len(self._titles) + self._earlier}", self._titles[index], text]
        done = sum(self._shares)
        if 0 < done:
            seconds = (self._clock() - self._started) / done * (len(self._shares) - done)
            parts.append(f"{short_time(seconds)} left")
        return "  ".join(part for part in parts if part)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _write(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
