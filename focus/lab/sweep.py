"""Arms against worlds: a learning-rate sweep for each pair, then runs with seeds of their own.

A cell is one arm in one world. All of its runs, of the sweep and of the evaluation, go through one
compiled program, `chunk` runs at a time. What a cell has finished lies in the work directory at
once, so that a run that was killed goes on; what was there is never computed again.
"""

from __future__ import annotations

import dataclasses
import json
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from focus.journal import write_atomically
from focus.lab import statistics
from focus.lab.jobs import Note
from focus.lab.specs import WorldSpec, slug

IDENTITY_FILE = "cell.json"
SWEEP_FILE = "sweep.json"
RUNS_FILE = "runs.npz"
# Between the seeds of `seed=N` and `seed=N + 1`; the upper half of each is the sweep's.
SEED_STRIDE = 1_000_000
MAX_SEED = 2**32 // SEED_STRIDE - 1

# Programs of minutes: half the time to compile them is worth a tenth of the time they run.
QUICK_COMPILE = {"xla_backend_optimization_level": 1}

# `make_run(world, options, arm, steps=, tokens_per_step=)` -> `run(seed, learning_rate)`, pure,
# which gives a History: a dataclass of arrays. See `focus.lab.loop`.
MakeRun = Callable[..., Callable[[Any, Any], Any]]
# Name of a field of History -> [runs, ...].
Curves = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How all cells are run.

    Attributes:
      steps: training steps of a run.
      tokens_per_step: budget of a step.
      seeds: runs of the evaluation.
      sweep_seeds: runs for each learning rate of the sweep, of other seeds.
      learning_rates: grid of the sweep, ascending. A single one is taken as it is.
      widenings: rates that may be added beyond the grid while the best is at its end.
      chunk: runs that are computed at a time; memory grows with it.
      seed: shifts all seeds.
    """

    steps: int
    tokens_per_step: int
    seeds: int
    sweep_seeds: int
    learning_rates: tuple[float, ...]
    widenings: int
    chunk: int
    seed: int

    def __post_init__(self):
        least = {"steps": 1, "tokens_per_step": 1, "seeds": 2, "sweep_seeds": 1, "chunk": 1}
        for name, low in {**least, "widenings": 0, "seed": 0}.items():
            value = getattr(self, name)
            if value < low:
                why = ": an interval needs two" if name == "seeds" else ""
                raise ValueError(f"{name} must be >= {low}, got {value}{why}")
        if self.seed > MAX_SEED or max(self.seeds, self.sweep_seeds) > SEED_STRIDE // 2:
            raise ValueError(
                f"seed must be <= {MAX_SEED} and seeds and sweep_seeds <= {SEED_STRIDE // 2}, got "
                f"{self.seed}, {self.seeds} and {self.sweep_seeds}"
            )
        rates = self.learning_rates
        if not rates:
            raise ValueError("learning_rates is empty: an arm whose sweep never ran has no rate")
        if min(rates) <= 0 or not np.all(np.isfinite(rates)) or list(rates) != sorted(set(rates)):
            raise ValueError(f"learning_rates must be positive and ascending, got {rates}")

    @property
    def evaluation_seeds(self) -> np.ndarray:
        """[seeds] uint32, the same for every cell."""
        return np.arange(self.seeds, dtype=np.uint32) + np.uint32(self.seed * SEED_STRIDE)

    @property
    def tuning_seeds(self) -> np.ndarray:
        """[sweep_seeds] uint32, none of the evaluation's."""
        start = np.uint32(self.seed * SEED_STRIDE + SEED_STRIDE // 2)
        return np.arange(self.sweep_seeds, dtype=np.uint32) + start


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What the learning rates of a cell gave.

    Attributes:
      learning_rates: all that were tried, ascending.
      auc: of each, the mean over the sweep's seeds.
      best: index of the one that is taken.
    """

    learning_rates: tuple[float, ...]
    auc: tuple[float, ...]
    best: int

    @property
    def learning_rate(self) -> float:
        """The one that is taken."""
        return self.learning_rates[self.best]

    @property
    def at_border(self) -> bool:
        """Whether a rate beyond those that were tried might be better."""
        return len(self.auc) > 1 and self.best in (0, len(self.auc) - 1)


@dataclasses.dataclass(frozen=True)
class CellResult:
    """A finished cell.

    Attributes:
      world: in which.
      arm: name of the arm.
      sweep: of its learning rate.
      curves: fields of History, [seeds, ...], in the order of `Settings.evaluation_seeds`.
      seconds: that its runs took, compiling included.
    """

    world: WorldSpec
    arm: str
    sweep: Sweep
    curves: Curves
    seconds: float

    @property
    def scores(self) -> np.ndarray:
        """[seeds] area under each run's curve of success, the start included."""
        return area(self.curves["success"])


def area(success: np.ndarray) -> np.ndarray:
    """Mean success over the curve, [..., steps + 1] -> [...]."""
    return np.mean(success, axis=-1, dtype=np.float64)


def best_of(auc: Mapping[float, float]) -> Sweep:
    """The sweep of what was tried; of equally good rates, the one nearest to the middle."""
    rates = tuple(sorted(auc))
    middle = (len(rates) - 1) / 2
    best = max(range(len(rates)), key=lambda i: (auc[rates[i]], -abs(i - middle)))
    return Sweep(rates, tuple(auc[rate] for rate in rates), best)


def next_rate(sweep: Sweep) -> float | None:
    """The rate beyond the end of the grid at which the best one lies, None if it is inside.

    As far from the end as the end is from its neighbour, on a logarithmic scale.
    """
    if not sweep.at_border:
        return None
    rates = sweep.learning_rates
    end, neighbour = (rates[0], rates[1]) if sweep.best == 0 else (rates[-1], rates[-2])
    return float(f"{end * end / neighbour:.4g}")


def find_learning_rate(
    auc_of: Callable[[Sequence[float]], Sequence[float]],
    grid: Sequence[float],
    widenings: int,
) -> Sweep:
    """Tries a grid, then rates beyond the end at which the best one lies, one at a time.

    Args:
      auc_of: takes learning rates and gives what each is worth.
      grid: ascending.
      widenings: most rates that are added.
    """
    tried = dict(zip(grid, auc_of(grid)))
    for _ in range(widenings if len(grid) > 1 else 0):
        rate = next_rate(best_of(tried))
        if rate is None:
            break
        tried[rate] = auc_of([rate])[0]
    return best_of(tried)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One arm in one world, as a job.

    Attributes:
      world: which.
      arm: of `focus.lab.arms`; only its `name` is read here.
      settings: how it is run.
      workdir: gets `cells/<world>/<arm>/`.
      make_run: see `MakeRun`.
    """

    world: WorldSpec
    arm: Any
    settings: Settings
    workdir: Path
    make_run: MakeRun

    @property
    def title(self) -> str:
        """What progress calls it."""
        return f"{self.arm.name} in {self.world.label}"

    @property
    def directory(self) -> Path:
        """Where the cell keeps what it has finished."""
        return self.workdir / "cells" / slug(self.world.label) / slug(self.arm.name)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return (self.directory / RUNS_FILE).is_file()

    def claim(self) -> None:
        """Makes the directory this cell's, or checks that it is.

        Raises:
          ValueError: another world or arm had this label, or it was run in another way.
        """
        path = self.directory / IDENTITY_FILE
        identity = {
            "world": [self.world.name, dict(self.world.options)],
            "arm": dataclasses.asdict(self.arm),
            "settings": dataclasses.asdict(self.settings),
        }
        text = json.dumps(identity, default=str, sort_keys=True, indent=1)
        if not path.is_file():
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        elif path.read_text() != text:
            raise ValueError(
                f"{self.directory} was computed for another {self.world.label!r} or "
                f"{self.arm.name!r} (see {IDENTITY_FILE} there): give this one another label, or "
                "delete that directory"
            )

    def __call__(self, note: Note) -> None:
        """Runs what is left of the cell."""
        self.claim()
        if self.finished:
            return
        started, s = time.monotonic(), self.settings
        run = _Chunked(self.make_run, self.world, self.arm, s)
        kept = _read_sweep(self.directory)
        total = len(s.learning_rates) * s.sweep_seeds * (len(s.learning_rates) > 1) + s.seeds
        done = 0

        def noting(text: str) -> Callable[[int], None]:
            def of_chunk(runs: int) -> None:
                nonlocal done
                done += runs
                note(min(done / total, 1.0), text)

            return of_chunk

        def auc_of(rates: Sequence[float]) -> list[float]:
            nonlocal done
            left = [rate for rate in rates if rate not in kept]
            done += (len(rates) - len(left)) * s.sweep_seeds
            if left:
                seeds = np.tile(s.tuning_seeds, len(left))
                text = "learning rate " + ", ".join(f"{rate:g}" for rate in left)
                curves = run(seeds, np.repeat(left, s.sweep_seeds), noting(text))
                scores = area(curves["success"]).reshape(len(left), s.sweep_seeds)
                kept.update(zip(left, scores.tolist()))
                _write_sweep(self.directory, kept)
            return [float(np.mean(kept[rate])) for rate in rates]

        if len(s.learning_rates) > 1:
            rate = find_learning_rate(auc_of, s.learning_rates, s.widenings).learning_rate
        else:
            rate = s.learning_rates[0]
        rates = np.full(s.seeds, rate)
        curves = run(s.evaluation_seeds, rates, noting(f"evaluation, learning rate {rate:g}"))
        seconds = time.monotonic() - started
        _write_runs(self.directory, {**curves, "_rate": rate, "_seconds": seconds})

    def read(self) -> CellResult:
        """The finished cell.

        Raises:
          ValueError: it has not finished, or a file of it is damaged.
        """
        path = self.directory / RUNS_FILE
        try:
            with np.load(path) as file:
                curves = dict(file)
            seconds, rate = float(curves.pop("_seconds")), float(curves.pop("_rate"))
        except FileNotFoundError as error:
            raise ValueError(f"{path} is missing: the cell has not finished") from error
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{path} is damaged ({error}): delete its directory, and start the same command "
                "again to compute the cell anew"
            ) from error
        auc = {rate: float(np.mean(scores)) for rate, scores in _read_sweep(path.parent).items()}
        # A single learning rate was taken as it is: there is no sweep, and no worth of it.
        sweep = best_of(auc) if auc else Sweep((rate,), (float("nan"),), 0)
        return CellResult(self.world, self.arm.name, sweep, curves, seconds)


def result_row(result: CellResult, settings: Settings) -> dict[str, Any]:
    """The row of `results.json`.

    `auc` is the mean over seeds of the mean success over the curve, `auc_low` and `auc_high` its
    95 % interval over seeds, `final` the mean success at the end, `dose_tokens` the tokens of a
    whole run whose advantage was not zero, its mean over seeds.
    """
    auc = statistics.interval(statistics.mean, result.scores)
    return {
        "world": result.world.name,
        "world_options": dict(result.world.options),
        "arm": result.arm,
        "learning_rate": result.sweep.learning_rate,
        "seeds": settings.seeds,
        "tokens_per_step": settings.tokens_per_step,
        "steps": settings.steps,
        "auc": auc.value,
        "auc_low": auc.low,
        "auc_high": auc.high,
        "final": float(np.mean(result.curves["success"][:, -1], dtype=np.float64)),
        "dose_tokens": float(np.mean(np.sum(result.curves["dose"], axis=1, dtype=np.float64))),
    }


class _Chunked:
    """Runs of one cell through one compiled program; the last chunk is filled up."""

    def __init__(self, make_run: MakeRun, world: WorldSpec, arm: Any, settings: Settings):
        run = make_run(
            world.name,
            dict(world.options),
            arm,
            steps=settings.steps,
            tokens_per_step=settings.tokens_per_step,
        )
        self._run = jax.jit(jax.vmap(run), compiler_options=QUICK_COMPILE)
        self._chunk = settings.chunk

    def __call__(
        self, seeds: np.ndarray, rates: np.ndarray, finished: Callable[[int], None]
    ) -> Curves:
        """Fields of History, [runs, ...]; `finished` takes the number of runs of each chunk."""
        parts = []
        for start in range(0, len(seeds), self._chunk):
            # Repeats of the first run are computed and dropped: no second shape compiles.
            index = np.arange(start, start + self._chunk)
            real = index < len(seeds)
            index = np.where(real, index, 0)
            history = self._run(
                jnp.asarray(seeds[index], jnp.uint32), jnp.asarray(rates[index], jnp.float32)
            )
            arrays = {f.name: getattr(history, f.name) for f in dataclasses.fields(history)}
            parts.append({name: np.asarray(a)[real] for name, a in arrays.items() if a is not None})
            finished(int(np.sum(real)))
        curves = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        success = curves["success"]
        if not np.all(np.isfinite(success)):
            run, step = np.argwhere(~np.isfinite(success))[0]
            raise FloatingPointError(
                f"success is {success[run, step]} after {step} steps with seed {seeds[run]} and "
                f"learning rate {rates[run]:g}"
            )
        return curves


def _read_sweep(directory: Path) -> dict[float, list[float]]:
    path = directory / SWEEP_FILE
    if not path.is_file():
        return {}
    try:
        return {float(rate): scores for rate, scores in json.loads(path.read_text()).items()}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, it is computed anew") from error


def _write_sweep(directory: Path, scores: Mapping[float, Sequence[float]]) -> None:
    write_atomically(directory / SWEEP_FILE, json.dumps({str(k): v for k, v in scores.items()}))


def _write_runs(directory: Path, arrays: Mapping[str, Any]) -> None:
    path = directory / RUNS_FILE
    temporary = path.with_name("." + path.name)
    np.savez_compressed(temporary, **arrays)
    temporary.replace(path)
