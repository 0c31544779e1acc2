"""Append-only JSON lines that survive `kill -9`, and the journal of a run's rollouts in them.

A line is one `os.write` on a file opened for appending: it is there as a whole or, if the
process died in it, it is a tail without a newline, which the reader drops and counts and the
next writer cuts off.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from focus.types import Trajectory


def read_json_lines(path: str | Path) -> tuple[list[dict[str, Any]], int]:
    """Reads a file of JSON lines.

    Args:
      path: may be absent, which reads as empty.

    Returns:
      `(records, torn)`: `torn` is 1 if a torn last line was dropped, else 0.

    Raises:
      ValueError: a line that is whole is not JSON.
    """
    path = Path(path)
    if not path.exists():
        return [], 0
    *lines, tail = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}); it was changed from outside: "
                "restore the file or delete that line"
            ) from error
    return records, int(bool(tail))


def keep_json_lines(path: str | Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Rewrites a file of JSON lines to the records that `keep` accepts, atomically.

    Returns:
      Number of records removed.
    """
    path = Path(path)
    records, _ = read_json_lines(path)
    kept = [record for record in records if keep(record)]
    if len(kept) < len(records):
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
    return len(records) - len(kept)


def write_atomically(path: str | Path, text: str) -> None:
    """Replaces a file's content: readers see the old text or the new, never a part."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class JsonLines:
    """Writes records to the end of a file, each as one whole line."""

    def __init__(self, path: str | Path):
        """Opens `path` for appending and cuts off a torn last line.

        Attributes:
          torn: 1 if a torn line was cut off, else 0.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = _end_of_last_line(self._fd)
        self.torn = int(os.fstat(self._fd).st_size > self._size)
        os.ftruncate(self._fd, self._size)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record.

        Raises:
          ValueError: the record is not JSON (NaN included).
          OSError: it could not be written, e.g. on a full disk; the file is as it was before.
        """
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            written = os.write(self._fd, line)
            if written < len(line):
                # The kernel names the reason only when nothing at all could be written.
                written += os.write(self._fd, line[written:])
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            free_mb = shutil.disk_usage(self.path.parent).free / 1e6
            raise OSError(
                error.errno,
                f"{error.strerror}: cannot append to {self.path} ({free_mb:.1f} MB free). Free "
                "some space and start the same command again: it resumes from the last "
                "checkpoint, and what the file held is intact",
            ) from error
        self._size += written

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def _end_of_last_line(fd: int, block: int = 1 << 16) -> int:
    """Offset behind the last newline of a file, 0 if it has none."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(end - block, 0)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """Work that a resume has to do again.

    Attributes:
      rollouts: number of rollouts that had finished.
      tokens: tokens the policy had generated in them; the ledger's `replayed`.
    """

    rollouts: int
    tokens: int


class Journal:
    """One line in `rollouts.jsonl` for every rollout the run has finished.

    Each process of a run keeps its own, the others in `rollouts.1.jsonl` and so on.

    Training state lives in checkpoints. The journal keeps what a checkpoint cannot: the
    rollouts between the last checkpoint and a crash, whose tokens were paid for all the same.
    """

    def __init__(self, workdir: str | Path, process: int = 0):
        """Opens the journal of a run; every opening is a new attempt.

        Args:
          workdir: of the run.
          process: which of its processes this is.

        Attributes:
          attempt: 0 for the first process that ran in `workdir`, then counts up. Store it with
            every checkpoint, see `interrupted`. Several processes agree on the largest.
          torn: 1 if the previous attempt died while writing a line, else 0.
        """
        path = Path(workdir) / (f"rollouts.{process}.jsonl" if process else "rollouts.jsonl")
        self._earlier, _ = read_json_lines(path)
        self._lines = JsonLines(path)
        self.torn = self._lines.torn
        self.attempt = 0
        if self._earlier:
            self.attempt = max(record["attempt"] for record in self._earlier) + 1

    def append(self, step: int, trajectory: Trajectory) -> None:
        """Notes a finished rollout, failed ones included, with what weights sampled its tokens.

        Args:
          step: training step it was made for, counted from 0.
          trajectory: base rollout or branch.

        Raises:
          OSError: see `JsonLines.append`.
        """
        acts = "base" if trajectory.parent is None else "branch"
        tokens = {acts: 0, "summary": 0}
        for segment in trajectory.segments:
            for generation in segment.generations:
                kind = acts if generation.kind == "act" else "summary"
                tokens[kind] += len(generation.output_ids)
        self._lines.append(
            {
                "step": step,
                "attempt": self.attempt,
                "id": trajectory.id,
                "task": trajectory.task_id,
                "end": trajectory.end,
                "outcome": trajectory.outcome,
                "success": trajectory.success,
                "tokens": tokens,
                "versions": [list(span) for span in trajectory.weight_versions],
                "error": trajectory.error,
            }
        )

    def interrupted(self, step: int, *, saved_by: int = 0) -> Interrupted:
        """What earlier attempts had finished beyond the checkpoint a resume starts from.

        Args:
          step: the checkpoint's step: number of finished steps, so the first one to run again.
          saved_by: attempt that wrote the checkpoint. Older attempts' losses were accounted
            for when that attempt resumed, and are in its ledger already.

        Returns:
          Rollouts of steps >= `step`, and their generated tokens.
        """
        lost = [r for r in self._earlier if r["step"] >= step and r["attempt"] >= saved_by]
        return Interrupted(len(lost), sum(sum(r["tokens"].values()) for r in lost))

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()
