"""Checkpoints that are there as a whole or not at all, and the config that a workdir belongs to.

    workdir/config.json                       the config of the run
    workdir/checkpoints/<step>/state/         arrays (orbax)
    workdir/checkpoints/<step>/checkpoint.json  everything else, written last

A checkpoint exists once `checkpoint.json` does. It is renamed into place after the arrays are on
disk and holds their checksums, so a save that was killed half way leaves a directory without it,
and a file that changed later is found out. Older checkpoints go only after that.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp

from focus.journal import write_atomically
from focus.learner import hosts

PyTree = Any


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not fit."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpointer.restore` gives back.

    Attributes:
      step: number of finished training steps.
      state: arrays, in the structure and shardings of the target.
      host: the dict that was saved beside them.
      metrics: the metrics it was saved with.
    """

    step: int
    state: PyTree
    host: dict[str, Any]
    metrics: dict[str, float]


class Checkpointer:
    """Saves and restores the state of a run; keeps the newest and the best.

    All processes of a multi-process run call the same methods; process 0 writes what is not an
    array.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        best_metric: str = "heldout/success",
    ):
        """Opens the checkpoints of `workdir`. Nothing is changed until the first `save`.

        Args:
          workdir: directory of the run, absolute or relative.
          keep_last: how many of the newest checkpoints stay, at least 1.
          keep_best: how many of the best stay besides.
          best_metric: the metric that ranks them; larger is better. Checkpoints saved without
            it (no evaluation in that step) are never the best.

        Attributes:
          unfinished: directories of saves that were killed; the next `save` removes them.

        Raises:
          ValueError: a count is out of range.
        """
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                f"keep_last must be >= 1 and keep_best >= 0, got {keep_last} and {keep_best}"
            )
        self._root = Path(workdir).resolve() / "checkpoints"
        self._keep_last, self._keep_best, self._best_metric = keep_last, keep_best, best_metric
        self._orbax = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        self._at: int | None = None  # step that this process restored or saved last
        self.unfinished = self._unfinished()

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps with a complete checkpoint, in order."""
        return tuple(sorted(int(d.name) for d in self._directories() if _is_complete(d)))

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint's step, None if there is none."""
        return max(self.steps, default=None)

    @property
    def best_step(self) -> int | None:
        """The best checkpoint's step (the newer of equals), None if none has `best_metric`."""
        return next(iter(self._ranking()), None)

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        host: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Writes a checkpoint, then removes those that need not be kept.

        Checkpoints of later steps belong to a history that a resume from an earlier step has
        given up; they are removed too.

        Args:
          step: number of finished training steps.
          state: pytree of arrays; typed PRNG keys are fine.
          host: JSON-able values: task order, ledger totals, attempt ...
          metrics: metrics of the step; `best_metric` is looked up here.

        Raises:
          ValueError: `step` is not after the last one, earlier checkpoints of the workdir were
            not restored, or `host` is not JSON.
          CheckpointError: it could not be written; the older ones are intact.
        """
        if self._at is None and self.steps:
            raise ValueError(
                f"{self._root} holds checkpoints up to step {self.latest_step}, but this run "
                "started without restoring one; resume from them or use another workdir"
            )
        if self._at is not None and step <= self._at:
            raise ValueError(
                f"cannot save step {step} after step {self._at} was restored or saved; a "
                "checkpoint's step is the number of finished steps and must grow"
            )
        try:
            json.dumps(host)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"host is not JSON ({error}); convert arrays with .tolist() or put them into state"
            ) from error
        directory = self._directory(step)
        leaves = _named_leaves(state)
        hosts.barrier()  # nobody looks at the directories any more
        if hosts.is_first():
            for leftover in self._unfinished():
                shutil.rmtree(leftover)
            if directory.exists():  # of a history given up; the one resumed from is older
                _remove(directory)
            directory.mkdir(parents=True)
        hosts.barrier()
        try:
            self._orbax.save(directory / "state", args=ocp.args.StandardSave(leaves))
            if hosts.is_first():
                record = {
                    "step": step,
                    "metrics": {k: float(v) for k, v in (metrics or {}).items()},
                    "host": dict(host),
                    "arrays": {name: _describe(leaf) for name, leaf in leaves.items()},
                    "crc32": _checksums(directory / "state"),
                }
                write_atomically(directory / "checkpoint.json", _with_checksum(record))
        # Orbax and TensorStore report a full disk with whatever exception class is at hand.
        except Exception as error:
            free_mb = shutil.disk_usage(self._root).free / 1e6
            raise CheckpointError(
                f"checkpoint {directory} could not be written ({_first_line(error)}); "
                f"{free_mb:.0f} MB are free there. Make room and start the same command again. "
                + self._fallback(step)
            ) from error
        hosts.barrier()  # it is committed
        self._at = step
        if hosts.is_first():
            self._remove_old(step)
        hosts.barrier()

    def restore(
        self, target: PyTree, *, step: int | Literal["latest", "best"] = "latest"
    ) -> Restored:
        """Reads a checkpoint straight into the shardings of `target`.

        Args:
          target: pytree of arrays or `jax.ShapeDtypeStruct`; a leaf without a sharding goes to
            the default device.
          step: which one.

        Returns:
          State, host dict and metrics.

        Raises:
          CheckpointError: there is none, it is damaged, or it holds other arrays than `target`.
        """
        found = step
        if step == "latest":
            found = self.latest_step
        elif step == "best":
            found = self.best_step
        if not self.steps:
            raise CheckpointError(
                f"there are no checkpoints in {self._root}: they were deleted, or the run was "
                "stopped before its first one; the command that started it plays it again"
            )
        if found is None or found not in self.steps:
            raise CheckpointError(
                f"no checkpoint {step!r} in {self._root}; there are steps {list(self.steps)}"
                + (f", none of them with {self._best_metric!r}" if step == "best" else "")
            )
        directory = self._directory(found)
        record = self._read_record(directory)
        wanted, treedef = _named_leaves(target), jax.tree.structure(target)
        differing = _differences(
            record["arrays"], {name: _describe(leaf) for name, leaf in wanted.items()}
        )
        if differing:
            raise CheckpointError(
                f"checkpoint {directory} holds other arrays than this config makes:\n"
                + differing
                + "\nRestore it with the config it was saved with, or use another workdir"
            )
        try:
            leaves = self._orbax.restore(
                directory / "state",
                args=ocp.args.StandardRestore({n: _abstract(leaf) for n, leaf in wanted.items()}),
            )
        except Exception as error:
            raise self._damaged(directory, _first_line(error)) from error
        self._at = found
        state = jax.tree.unflatten(treedef, [leaves[name] for name in wanted])
        return Restored(found, state, record["host"], record["metrics"])

    def close(self) -> None:
        """Releases orbax's resources."""
        self._orbax.close()

    def _directory(self, step: int) -> Path:
        return self._root / f"{step:08d}"

    def _directories(self) -> list[Path]:
        return [d for d in sorted(self._root.glob("*")) if d.is_dir() and d.name.isdigit()]

    def _unfinished(self) -> tuple[Path, ...]:
        return tuple(d for d in self._directories() if not _is_complete(d))

    def _ranking(self) -> list[int]:
        """Steps with a value of `best_metric`, best first, newer first among equals."""
        scored = []
        for step in self.steps:
            value = self._read_record(self._directory(step), verify=False)["metrics"].get(
                self._best_metric, math.nan
            )
            if not math.isnan(value):
                scored.append((value, step))
        return [step for _, step in sorted(scored, reverse=True)]

    def _remove_old(self, step: int) -> None:
        before = [s for s in self.steps if s <= step]
        best = [s for s in self._ranking() if s <= step][: self._keep_best]
        for old in set(self.steps) - set(before[-self._keep_last :]) - set(best):
            _remove(self._directory(old))

    def _read_record(self, directory: Path, *, verify: bool = True) -> dict[str, Any]:
        """Reads `checkpoint.json`; with `verify`, compares all checksums."""
        try:
            record = json.loads((directory / "checkpoint.json").read_text())
            intact = zlib.crc32(_canonical(record["record"])) == record["crc32"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(directory, f"checkpoint.json: {_first_line(error)}") from error
        if not intact:
            raise self._damaged(directory, "checkpoint.json does not match its checksum")
        record = record["record"]
        if verify:
            found = _checksums(directory / "state")
            for name, checksum in record["crc32"].items():
                if name not in found:
                    raise self._damaged(directory, f"state/{name} is missing")
                if found[name] != checksum:
                    raise self._damaged(directory, f"state/{name} does not match its checksum")
        return record

    def _damaged(self, directory: Path, reason: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {directory} is damaged ({reason}). Delete that directory. "
            + self._fallback(int(directory.name))
        )

    def _fallback(self, step: int) -> str:
        others = [s for s in self.steps if s != step]
        if others:
            return f"The run then resumes from step {max(others)}"
        return "No other checkpoint is left: the run then starts from the beginning"


def open_workdir(
    workdir: str | Path, config: Mapping[str, Any], *, may_differ: Sequence[str] = ()
) -> Path:
    """Makes `workdir` the directory of a run with `config`, or checks that it is.

    Args:
      workdir: created if it is not there.
      config: nested mapping of JSON-able values; `config.json` is its text.
      may_differ: dotted keys that a resume may change (steps, logging ...); a key stands for
        everything below it. `config.json` takes their new values.

    Returns:
      The directory.

    Raises:
      ValueError: the workdir belongs to another config; the message lists the keys that differ.
    """
    workdir = Path(workdir)
    path = workdir / "config.json"
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    if path.is_file():

        def fixed(tree):
            return {
                key: value
                for key, value in _flatten(tree).items()
                if not any(key == free or key.startswith(free + ".") for free in may_differ)
            }

        differing = _differences(fixed(json.loads(path.read_text())), fixed(json.loads(text)))
        if differing:
            raise ValueError(
                f"{workdir} belongs to a run with another config:\n{differing}\n"
                "Set these values back to resume it, or use another workdir"
            )
    hosts.barrier()  # all have compared
    if hosts.is_first():
        workdir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    hosts.barrier()
    return workdir


def _is_complete(directory: Path) -> bool:
    return (directory / "checkpoint.json").is_file()


def _remove(directory: Path) -> None:
    """Removes a complete checkpoint; killed in between, it counts as unfinished."""
    (directory / "checkpoint.json").unlink()
    shutil.rmtree(directory)


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by dotted path, in the order of `jax.tree.leaves`."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in paths}
    if len(named) != len(paths):
        raise ValueError("two leaves of the state have the same dotted path; rename one")
    for name, leaf in named.items():
        if not hasattr(leaf, "dtype"):
            raise ValueError(
                f"state.{name} is a {type(leaf).__name__}; a state holds arrays only: put other "
                "values into host"
            )
    return named


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _checksums(directory: Path) -> dict[str, int]:
    """CRC-32 of every file below `directory`, by relative path."""

    def checksum(file: Path) -> int:
        value = 0
        with open(file, "rb") as stream:
            while block := stream.read(1 << 22):
                value = zlib.crc32(block, value)
        return value

    files = sorted(file for file in directory.rglob("*") if file.is_file())
    with concurrent.futures.ThreadPoolExecutor() as pool:  # crc32 releases the interpreter lock
        return dict(
            zip((str(file.relative_to(directory)) for file in files), pool.map(checksum, files))
        )


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def _with_checksum(record: Mapping[str, Any]) -> str:
    return json.dumps({"record": record, "crc32": zlib.crc32(_canonical(record))}) + "\n"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings to dotted keys; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """One line for each key whose values differ, "" if none does."""
    absent = "(absent)"
    return "\n".join(
        f"  {key}: {there.get(key, absent)!r} there, {here.get(key, absent)!r} here"
        for key in sorted({*there, *here})
        if (key in there) != (key in here) or there[key] != here[key]
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[
        :300
    ]
