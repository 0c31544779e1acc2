"""Plug-ins: Python files and modules of a user's own that add to what can be named in a config.

`config.plugins` lists them. They are imported before the config is checked, and put entries into
the dicts of `REGISTRIES`, as the library's own modules do. A run keeps the source of what it has
imported, so that whoever reads its directory later needs nothing else:

    workdir/plugins/plugins.json    name and SHA-256 of each, in their order
    workdir/plugins/0/my_file.py    the first one
    workdir/plugins/1/my_package/   the second one, with all Python files of its package

What a run is, is what these files say and not where they lie: a run resumes from its copies when
the originals are gone, and refuses to when they say something else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from focus.branching.acquisition import RULES, AcquisitionRule
from focus.context import CONTEXT_MANAGERS
from focus.credit import ESTIMATORS, EstimatorSpec
from focus.journal import write_atomically
from focus.learner import hosts
from focus.tasks.registry import TASKS

# What a plug-in may add to, by what one entry is called.
REGISTRIES: dict[str, dict[str, Any]] = {
    "task": TASKS,
    "estimator": ESTIMATORS,
    "rule": RULES,
    "context manager": CONTEXT_MANAGERS,
}
_KINDS = {"estimator": EstimatorSpec, "rule": AcquisitionRule}
DIRECTORY = "plugins"
_INDEX = "plugins.json"
# A plug-in is a user's own code, not a library that happens to be installed.
_MOST_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Plugin:
    """The source of one plug-in.

    Attributes:
      name: as the config has it: the path of a .py file, or the name of a module.
      root: directory that it is imported from.
      files: content by path relative to `root`; of a module, its whole top-level package.
    """

    name: str
    root: Path
    files: Mapping[str, bytes]

    @property
    def is_file(self) -> bool:
        """Whether it is named by a path."""
        return self.name.endswith(".py")

    @functools.cached_property
    def checksum(self) -> str:
        """SHA-256 of what a file says; of a package, of its files and their paths."""
        digest = hashlib.sha256()
        for path, content in sorted(self.files.items()):
            name = "" if self.is_file else path
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class _Entry:
    kind: str
    key: str
    value: Any


# What the plug-ins of this process have registered. None is run twice, so that functions keep their
# identity, and with it what JAX has compiled of them.
_REGISTERED: dict[tuple[str, str], tuple[_Entry, ...]] = {}
_active: list[tuple[Plugin, tuple[_Entry, ...]]] = []
_last: dict[tuple[str, str], Any] = {}  # (kind, key) -> what it has stood for last
_packages: dict[str, str] = {}  # package that a plug-in was imported from -> checksum


def load(names: Sequence[str], workdir: str | Path | None = None) -> tuple[Plugin, ...]:
    """Imports the plug-ins of a config; those of another config are taken out again.

    Args:
      names: `config.plugins`: paths of .py files, relative to the working directory, and names of
        modules.
      workdir: of a run, which may have begun with them.

    Returns:
      What was imported, in order.

    Raises:
      ValueError: a plug-in is missing, fails when it is imported, registers a name that is there
        already or something of the wrong kind, or is not what the run has begun with.
    """
    if isinstance(names, str):
        raise ValueError(f"plugins={names!r} must be a tuple of names: ({names!r},)")
    kept = None if workdir is None else _read(Path(workdir))
    found = [find(name) for name in names]
    if kept is not None and len(kept) != len(names):
        raise ValueError(
            f"the run in {workdir} has begun with plugins={[p.name for p in kept]}, and now they "
            f"are {list(names)}; set them back, or use another workdir"
        )
    plugins = []
    for i, (name, plugin) in enumerate(zip(names, found)):
        own = None if kept is None else kept[i]
        if plugin is None:
            if own is None or own.name != name:
                raise ValueError(_missing(name))
            plugin = own
        elif own is not None and own.checksum != plugin.checksum:
            raise ValueError(
                f"plug-in {name} has changed since the run in {workdir} began with it (SHA-256 "
                f"{own.checksum[:12]} there, {plugin.checksum[:12]} here): put it back, a copy is "
                f"in {own.root}, or use another workdir"
            )
        plugins.append(plugin)
    hosts.agree("plug-ins", [plugin.checksum for plugin in plugins])
    _activate(plugins)
    return tuple(plugins)


def load_kept(workdir: str | Path) -> tuple[Plugin, ...]:
    """Imports the plug-ins that a run keeps, whatever has become of their originals.

    Raises:
      ValueError: as `load`; or a copy has been changed.
    """
    plugins = _read(Path(workdir)) or ()
    _activate(plugins)
    return plugins


def keep(plugins: Sequence[Plugin], workdir: str | Path) -> None:
    """Copies plug-ins into the directory of a run, unless it has them."""
    target = Path(workdir) / DIRECTORY
    if not plugins or not hosts.is_first() or (target / _INDEX).is_file():
        return
    shutil.rmtree(target, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(dir=workdir, prefix=".plugins-"))
    for i, plugin in enumerate(plugins):
        for path, content in plugin.files.items():
            file = partial / str(i) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    index = [{"name": plugin.name, "sha256": plugin.checksum} for plugin in plugins]
    write_atomically(partial / _INDEX, json.dumps(index, indent=2) + "\n")
    partial.chmod(0o755)
    os.rename(partial, target)


def provider(kind: str, key: str) -> Plugin | None:
    """The plug-in that has registered a name, None if the library has."""
    for plugin, entries in _active:
        if any((entry.kind, entry.key) == (kind, key) for entry in entries):
            return plugin
    return None


def find(name: str) -> Plugin | None:
    """The source of a plug-in as it is now; None if there is none.

    Raises:
      ValueError: it is no plug-in: a module without source, or a large library.
    """
    if name.endswith(".py"):
        path = Path(name).expanduser()
        return Plugin(name, path.parent, {path.name: path.read_bytes()}) if path.is_file() else None
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        package = Path(next(iter(spec.submodule_search_locations)))
        paths, root = sorted(package.rglob("*.py")), package.parent
    elif spec.origin is not None and spec.origin.endswith(".py"):
        paths, root = [Path(spec.origin)], Path(spec.origin).parent
    else:
        raise ValueError(f"plug-in {name} is no Python source ({spec.origin}); name a .py file")
    if (size := sum(path.stat().st_size for path in paths)) > _MOST_BYTES:
        raise ValueError(
            f"plug-in {name} belongs to a package with {size / 1e6:.0f} MB of source, and a run "
            "keeps a copy of it: put what you register into a file or package of its own"
        )
    return Plugin(name, root, {str(path.relative_to(root)): path.read_bytes() for path in paths})


def _missing(name: str) -> str:
    if name.endswith(".py"):
        return (
            f"plug-in {name}: no such file; the path is taken from the working directory, "
            f"{Path.cwd()}"
        )
    hint = "" if os.sep not in name else "; a file's name ends with .py"
    return f"plug-in {name}: no such module in this Python's path{hint}"


def _read(workdir: Path) -> tuple[Plugin, ...] | None:
    """The plug-ins that a run keeps; None where no run has begun.

    Raises:
      ValueError: they are not what the run has begun with.
    """
    index, config = workdir / DIRECTORY / _INDEX, workdir / "config.json"
    if not index.is_file():
        # Killed between the two files, a run has not begun either.
        has_none = config.is_file() and not json.loads(config.read_text()).get("plugins")
        return () if has_none else None
    plugins = []
    for i, record in enumerate(json.loads(index.read_text())):
        root = index.parent / str(i)
        files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.py")}
        plugins.append(Plugin(record["name"], root, files))
        if plugins[-1].checksum != record["sha256"]:
            raise ValueError(
                f"the copy of plug-in {record['name']} in {root} is not what the run has begun "
                "with: put the files there back as they were"
            )
    return tuple(plugins)


def _activate(plugins: Sequence[Plugin]) -> None:
    """Makes the registries hold the library's entries and those of `plugins`."""
    while _active:
        for entry in _active.pop()[1]:
            if REGISTRIES[entry.kind].get(entry.key) is entry.value:
                del REGISTRIES[entry.kind][entry.key]
    for plugin in plugins:
        # A file is what it says, wherever it lies; two modules may be of one package.
        known = ("" if plugin.is_file else plugin.name, plugin.checksum)
        if known in _REGISTERED:
            for entry in _REGISTERED[known]:
                _check(plugin, entry, REGISTRIES[entry.kind])
            for entry in _REGISTERED[known]:
                REGISTRIES[entry.kind][entry.key] = entry.value
        else:
            _REGISTERED[known] = _import(plugin)
        _active.append((plugin, _REGISTERED[known]))
    entries = {(e.kind, e.key): e.value for _, found in _active for e in found}
    if any(_last.get(name, value) is not value for name, value in entries.items()):
        jax.clear_caches()  # another function of the same name, by which programs are known
    _last.update(entries)


def _import(plugin: Plugin) -> tuple[_Entry, ...]:
    """Runs a plug-in: what it has registered. Registries are as before if it fails."""
    before = {kind: dict(registry) for kind, registry in REGISTRIES.items()}
    entries = []
    try:
        with _told_in_one_line(plugin):
            (_run_file if plugin.is_file else _run_module)(plugin)
        for kind, registry in REGISTRIES.items():
            if gone := before[kind].keys() - registry.keys():
                raise ValueError(f"plug-in {plugin.name} removes the {kind} {min(gone)!r}")
            for key, value in registry.items():
                entry = _Entry(kind, key, value)
                if before[kind].get(key) is not value:
                    _check(plugin, entry, before[kind])
                    entries.append(entry)
                elif _is_of_module(plugin, entry):  # the user's program had imported it before
                    entries.append(entry)
    except BaseException:
        for kind, registry in REGISTRIES.items():
            registry.clear()
            registry.update(before[kind])
        raise
    return tuple(entries)


def _is_of_module(plugin: Plugin, entry: _Entry) -> bool:
    """Whether a plug-in's package has made an entry that no other plug-in has registered."""
    value = entry.value
    made_by = getattr(value, {"estimator": "fn", "rule": "scores"}.get(entry.kind, ""), value)
    module = getattr(made_by, "__module__", "") or ""
    of_package = module.partition(".")[0] == plugin.name.partition(".")[0]
    return not plugin.is_file and of_package and provider(entry.kind, entry.key) is None


def _check(plugin: Plugin, entry: _Entry, others: Mapping[str, Any]) -> None:
    if entry.key in others:
        owner = provider(entry.kind, entry.key)
        whose = "the library" if owner is None else f"plug-in {owner.name}"
        raise ValueError(
            f"plug-in {plugin.name} registers the {entry.kind} {entry.key!r}, which {whose} has "
            "already; give it another name"
        )
    wanted = _KINDS.get(entry.kind)
    if not (callable(entry.value) if wanted is None else isinstance(entry.value, wanted)):
        said = "a class or function that makes one" if wanted is None else f"an {wanted.__name__}"
        raise ValueError(
            f"plug-in {plugin.name}: the {entry.kind} {entry.key!r} must be {said}, got a "
            f"{type(entry.value).__name__}"
        )


def _run_file(plugin: Plugin) -> None:
    ((path, content),) = plugin.files.items()
    file = plugin.root / path
    # By content: two files of one name are two modules, and pickling finds each.
    module = types.ModuleType(f"focus_plugin_{file.stem}_{plugin.checksum[:8]}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    exec(compile(content, str(file), "exec"), module.__dict__)


def _run_module(plugin: Plugin) -> None:
    top = plugin.name.partition(".")[0]
    loaded = _packages.get(top)
    if loaded is None and top in sys.modules:  # by the user's own program
        source = find(plugin.name)
        loaded = source and source.checksum
    if loaded not in (None, plugin.checksum):  # of an earlier run, or changed since
        for name in [n for n in sys.modules if n.partition(".")[0] == top]:
            del sys.modules[name]
    _packages[top] = plugin.checksum
    root = str(plugin.root.resolve())
    sys.path.insert(0, root)
    importlib.invalidate_caches()
    try:
        importlib.import_module(plugin.name)
    finally:
        sys.path.remove(root)


@contextlib.contextmanager
def _told_in_one_line(plugin: Plugin) -> Iterator[None]:
    """Turns what a plug-in raises while it is imported into one line: where, and what."""
    try:
        yield
    except (Exception, SystemExit) as error:
        said = str(error)
        if isinstance(error, SyntaxError):
            place, said = f"{error.filename}, line {error.lineno}", error.msg
        else:
            own = {str(plugin.root / path) for path in plugin.files}
            own |= {str(plugin.root.resolve() / path) for path in plugin.files}
            frames = traceback.extract_tb(error.__traceback__)
            last = next((f for f in reversed(frames) if f.filename in own), frames[-1])
            place = f"{last.filename}, line {last.lineno}"
        raise ValueError(
            f"plug-in {plugin.name} cannot be imported: {place}: {type(error).__name__}: "
            f"{' '.join(said.split())}"
        ) from error
