"""Weights to servers, through a directory that the learner and all of them see.

    weights/v12-5f0c3a91/          a model in the layout of Hugging Face, complete or not there
    weights/.partial-v13-5f0c3a91  being written

Adapters go the same way: the base once, as `weights/base-5f0c3a91`, then every version as a
directory in the layout of PEFT, of megabytes where a model has gigabytes.

A version is written under another name, forced to disk, renamed and only then announced: a store
shared by several hosts need not show them a file as soon as it is written. It is deleted when no
server says that it has it and it is not the newest.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from focus.formats import hf, peft
from focus.learner import hosts
from focus.policy import lora
from focus.types import version_name

# (directory, version) -> when servers have it
Load = Callable[[str, str], Awaitable[None]]


class Servers(Protocol):
    """What takes the weights: an engine's client."""

    async def load_weights(self, path: str, version: str) -> None:
        """Loads a directory; returns when new tokens are of `version`."""

    async def load_adapter(self, path: str, version: str) -> None:
        """Loads an adapter onto the weights loaded last; later tokens are of `version`."""

    def versions(self) -> Mapping[str, str | None]:
        """The version that each server last reported."""

    def adapters(self) -> Mapping[str, Mapping[str, str]]:
        """The adapters that each server last reported: directories, by name."""


class Publisher:
    """Writes versions, has them loaded, and deletes those that nobody has any more.

    All processes of a run call it, with parameters in any sharding; each file is written by one
    of them.

    Args:
      root: directory of the versions.
      model: config of the model's family.
      servers: who loads them; in every process a client of the same fleet.
      dtype: of the files.
      run: see `version_name`.
    """

    def __init__(self, root: str | Path, model: Any, servers: Servers, *, dtype: str, run: str):
        self._root = Path(root).resolve()
        self._model = model
        self._servers = servers
        self._dtype = dtype
        self._run = run
        self._kept: list[str] = []  # what stays even if nobody has it now

    async def __call__(self, params: Any, step: int) -> None:
        """Publishes the weights after `step` training steps.

        Raises:
          EngineError: no server has taken them.
          OSError: they could not be written.
        """
        version = version_name(step, self._run)
        await self._hand_over(version, self._write, self._servers.load_weights, params)
        await asyncio.to_thread(self._clean_up, version)

    async def _hand_over(
        self, name: str, write: Callable[..., None], load: Load, *contents: Any
    ) -> None:
        path = self._root / name
        # Files take their time, and rollouts of other steps are going on.
        await asyncio.to_thread(write, path, *contents)
        await load(str(path), name)

    def _write(self, path: Path, params: Any) -> None:
        if hosts.is_first():
            self._root.mkdir(parents=True, exist_ok=True)
        hosts.barrier()
        hf.save_checkpoint(path, self._model, params, dtype=self._dtype)

    def _clean_up(self, version: str) -> None:
        if not hosts.is_first():
            return
        needed = {version, *self._kept, *self._servers.versions().values()}
        needed.update(*self._servers.adapters().values())
        for directory in self._root.iterdir():
            if directory.is_dir() and directory.name not in needed:
                shutil.rmtree(directory)


class AdapterPublisher(Publisher):
    """The same for parameters with adapters attached (`focus.policy.lora.attach`).

    What lies below the adapters is published with the first of them, and never changes.
    """

    async def __call__(self, params: Any, step: int) -> None:
        """Publishes the adapters after `step` training steps.

        Raises:
          EngineError: no server has taken them.
          OSError: they could not be written.
          ValueError: `params` have no adapters.
        """
        base, setting, adapters = lora.detach(params)
        if not self._kept:
            name = f"base-{self._run}"
            await self._hand_over(name, self._write, self._servers.load_weights, base)
            self._kept.append(name)
        version = version_name(step, self._run)
        load = self._servers.load_adapter
        await self._hand_over(version, self._write_adapter, load, setting, adapters)
        await asyncio.to_thread(self._clean_up, version)

    def _write_adapter(self, path: Path, setting: lora.LoraConfig, adapters: Any) -> None:
        whole = hosts.local(adapters)
        if hosts.is_first():
            base = str(self._root / self._kept[0])
            peft.save_adapter(path, self._model, setting, whole, base_model=base)
        hosts.barrier()
