"""Where training starts: a policy that imitates demonstrations, or a pretrained model.

A warm start is made once and kept under a hash of all that it reads: its part of the config, the
programs that devices run for it, the source of what plays the demonstrations and lays out their
tokens, and the versions of libraries. What it does not read, such as the policy's loss or other
context managers, may change: it stays what it is.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import shutil
import tempfile
import types
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
import safetensors.numpy

from focus.chat.template_chat import TemplateChat
from focus.chat.tokens import Chat
from focus.context import CONTEXT_MANAGERS, cite_summary, summarize
from focus.formats import hf
from focus.learner import hosts, sharding, update
from focus.policy import model as models
from focus.run import experiment, inputs, plugins
from focus.run.imitation import make, programs, seed_of
from focus.tasks.base import DemonstratedEnvironment, Environment
from focus.tasks.deep_search import DeepSearch
from focus.tasks.registry import TASKS
from focus.terminal import Start

# What no program shows: how episodes become batches. Whole modules, and single functions.
_SOURCES = ("focus.run.imitation", "focus.learner.packing", "focus.chat.tokens")
_FUNCTIONS = (update.make_gradient_fn, update._make_update, update._minibatches, update._take)
_LIBRARIES = ("jax", "numpy", "optax", "tokenizers", "countryinfo", "bm25s")


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """What a run begins with.

    Attributes:
      chat: tokenizer and chat format, or chat template.
      params: parameters of the policy (NumPy).
      directory: where it is kept.
      made: whether it was made now; False if it was there.
    """

    chat: Chat | TemplateChat
    params: Any
    directory: Path
    made: bool

    def checksum(self) -> int:
        """CRC-32 of the parameters."""
        return functools.reduce(
            lambda crc, leaf: zlib.crc32(np.ascontiguousarray(leaf), crc),
            jax.tree.leaves(self.params),
            0,
        )


def fingerprint(config: ml_collections.ConfigDict) -> str:
    """Hash of everything that a warm start reads."""
    manager = config.context.manager
    parts = {name: config[name].to_dict() for name in ("task", "model", "warm_start")}
    parts["context"] = {"manager": manager} | experiment.context_options(config)
    parts["task"] = inputs.by_content(parts["task"], "task.", inputs.find(config))
    parts["rows"] = [config.learner.max_nodes, config.learner.max_states]
    parts["seed"] = seed_of(config)
    parts["versions"] = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    # The tokenizer is trained on these whatever manager is used.
    parts["texts"] = [summarize.INSTRUCTION, summarize.HEADING]
    if manager == "cite_summary":
        parts["texts"] += [cite_summary.INSTRUCTION, cite_summary.EXAMPLE]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    digest.update(programs(config).encode())
    for function in _FUNCTIONS:
        digest.update(inspect.getsource(function).encode())
    roots = ["focus.tasks.scripted"] if config.task.name == "deep_search" else []
    for text in (
        *_sources(_SOURCES, _SOURCES + ("focus.learner.sequences",)),
        *_sources(roots, ("focus.tasks",)),
        *_sources_of("task", config.task.name, TASKS, "focus.tasks"),
        *_sources_of("context manager", manager, CONTEXT_MANAGERS, "focus.context"),
    ):
        digest.update(text)
    return digest.hexdigest()[:16]


def _sources_of(kind: str, key: str, registry: dict[str, Any], package: str) -> Iterator[bytes]:
    """What decides what an entry of a registry does: its module, or the whole plug-in, and the
    modules of `package` that it imports."""
    plugin = plugins.provider(kind, key)
    if plugin is not None:
        yield plugin.checksum.encode()
        roots = {name for content in plugin.files.values() for name in _imported(content)}
        yield from _sources(sorted(roots), (package,))
    elif (module := registry[key].__module__).startswith("focus."):
        yield from _sources([module], (package,))
    else:  # of the program that calls this
        yield inspect.getsource(registry[key]).encode()


def _sources(modules: Iterable[str], within: tuple[str, ...]) -> Iterator[bytes]:
    """Sources of modules and of all that they import, as far as it is one of `within`, or below."""

    def wanted(name: str) -> bool:
        return any(name == top or name.startswith(f"{top}.") for top in within)

    left, seen = [name for name in modules if wanted(name)], set()
    while left:
        name = left.pop(0)
        if name not in seen:
            seen.add(name)
            content = Path(importlib.util.find_spec(name).origin).read_bytes()
            yield content
            left += [other for other in _imported(content) if wanted(other)]


def _imported(source: bytes) -> list[str]:
    """Modules of this library that a source imports, by where they define what it takes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("focus.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("focus."):
            module = importlib.import_module(node.module)
            for alias in node.names:
                taken = getattr(module, alias.name, None)
                if isinstance(taken, types.ModuleType):
                    found.append(taken.__name__)
                else:  # a package hands on what one of its modules defines
                    found.append(getattr(taken, "__module__", node.module))
    return found


def load_or_make(
    config: ml_collections.ConfigDict, env: Environment, start: Start | None = None
) -> WarmStart:
    """The warm start of a config, from the cache if it is there; or the model of `model.path`.

    Args:
      config: of the run.
      env: the environment to be learnt.
      start: is told how far it is; None: nobody is.

    Returns:
      WarmStart.

    Raises:
      ValueError: the task has no scripted agent, or files are missing or damaged.
    """
    if config.model.get("path"):
        return _from_directory(config, env)
    directory = experiment.cache_dir(config) / "warm_start" / fingerprint(config)
    if all(hosts.gather(directory.is_dir())):  # else all processes make it together
        chat, params = _read(directory, config)
        return WarmStart(chat, params, directory, made=False)
    if not isinstance(env, DeepSearch | DemonstratedEnvironment):
        raise ValueError(
            f"task {env.name!r} has no demonstrations to imitate: give it a method "
            "demonstrations(num, seed), or start from a pretrained model with model.path"
        )
    chat, params = make(config, env, start or Start(quiet=True))
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Written under another name first: a killed run must not leave half a warm start.
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".partial-"))
    chat.save(partial)
    safetensors.numpy.save_file(_flat(params), partial / "params.safetensors")
    try:
        os.rename(partial, directory)
    except OSError:  # another run or process was faster; both made the same
        shutil.rmtree(partial)
    return WarmStart(chat, params, directory, made=True)


def _from_directory(config: ml_collections.ConfigDict, env: Environment) -> WarmStart:
    path = Path(config.model.path)
    chat = experiment.read_chat(config, env)
    _, params = hf.load_checkpoint(path)  # float32, whatever is computed in
    return WarmStart(chat, jax.device_get(params), path, made=False)


def _flat(params: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {sharding.path_name(path): np.asarray(leaf) for path, leaf in leaves}


def _read(directory: Path, config: ml_collections.ConfigDict) -> tuple[Chat, Any]:
    try:
        flat = safetensors.numpy.load_file(directory / "params.safetensors")
        chat = Chat.load(directory)
    except Exception as error:
        raise ValueError(
            f"the warm start in {directory} cannot be read ({error}); delete that directory and "
            "it is made again"
        ) from error
    shapes = models.param_shapes(experiment.model_config(config))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(
        shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    return chat, treedef.unflatten([flat[sharding.path_name(path)] for path, _ in leaves])
