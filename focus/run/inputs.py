"""What a run reads besides its config, known by content: a world file, a model directory.

A config names files by their paths, and a path says nothing about what lies there. So a run writes
down the checksums of its inputs when it begins, and refuses to go on with others; what is kept in
the cache carries them in its name. A file that has only been moved is the same input.
(Plug-ins are known by content, too: `focus.run.plugins`, where a run has some.)
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_collections

from focus.journal import write_atomically
from focus.learner import hosts
from focus.run import ranges

_FILE = "inputs.json"
# What `focus.formats.hf` and the chat read of a model directory.
_MODEL_SUFFIXES = (".json", ".jinja", ".safetensors")


@dataclasses.dataclass(frozen=True)
class Input:
    """A file, or a directory, that a config names.

    Attributes:
      path: as the config has it.
      checksum: BLAKE2b of its content, and of the names of files in a directory.
    """

    path: str
    checksum: str


def find(config: ml_collections.ConfigDict) -> dict[str, Input]:
    """The inputs of a config, by key; all processes must see the same.

    Those are `model.path`, and whatever option of the task names a file or directory that is there.
    """
    found = {}
    for key, value in ranges.leaves(config):
        if not isinstance(value, str) or not (key == "model.path" or key.startswith("task.")):
            continue
        path = Path(value)
        is_path = key == "model.path" or path.suffix or os.sep in value  # a word is no path
        if is_path and path.exists():
            suffixes = _MODEL_SUFFIXES if key == "model.path" else ()
            found[key] = Input(value, _checksum(path, suffixes))
    hosts.agree("inputs", {key: entry.checksum for key, entry in found.items()})
    return found


def moved(inputs: Mapping[str, Input], workdir: str | Path) -> tuple[str, ...]:
    """Keys whose path is not the one that the run in a directory has begun with.

    Only the directory may be another; a file's name may be part of what it is (a world's is).
    """
    begun = _read(Path(workdir))
    return tuple(
        key
        for key, entry in inputs.items()
        if key in begun and Path(entry.path).name == Path(begun[key].path).name
    )


def check(inputs: Mapping[str, Input], workdir: str | Path) -> None:
    """Compares inputs with those that the run in a directory has begun with, if there is one.

    Raises:
      ValueError: one has another content; names both.
    """
    begun = _read(Path(workdir))
    for key, entry in inputs.items():
        if key in begun and begun[key].checksum != entry.checksum:
            raise ValueError(
                f"{key}={entry.path}: the content has changed since the run in {workdir} began "
                f"({begun[key].checksum[:12]} then, {entry.checksum[:12]} now). Put back what was "
                "there to go on with it, or use another workdir"
            )


def keep(inputs: Mapping[str, Input], workdir: str | Path) -> None:
    """Writes inputs down, for a run that begins; the first process does."""
    path = Path(workdir) / _FILE
    if hosts.is_first() and not path.is_file():
        records = {key: dataclasses.asdict(entry) for key, entry in inputs.items()}
        write_atomically(path, json.dumps(records, indent=2, sort_keys=True) + "\n")


def by_content(
    section: Mapping[str, Any], prefix: str, inputs: Mapping[str, Input]
) -> dict[str, Any]:
    """A section's keys and values, in which inputs stand for their content and not their paths."""
    return {
        key: inputs[prefix + key].checksum if prefix + key in inputs else value
        for key, value in ranges.leaves(section)
    }


def _read(workdir: Path) -> dict[str, Input]:
    """The inputs of the run in a directory; none where none were written down."""
    path = workdir / _FILE
    if not path.is_file():
        return {}
    return {key: Input(**record) for key, record in json.loads(path.read_text()).items()}


def _checksum(path: Path, suffixes: tuple[str, ...]) -> str:
    """That of a file, or of the files in a directory: with `suffixes` only of those, at its top."""
    if path.is_file():
        return _digest(path)
    files: Iterable[Path] = path.iterdir() if suffixes else path.rglob("*")
    files = sorted(f for f in files if f.is_file() and (not suffixes or f.suffix in suffixes))
    # Hashing is done outside of the interpreter's lock, and large models come in many files.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digests = list(pool.map(_digest, files))
    whole = hashlib.blake2b(digest_size=32)
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"{file.relative_to(path).as_posix()}\0{digest}\n".encode())
    return whole.hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
