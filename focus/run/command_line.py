"""The command line of the scripts: flags, and a config whose keys are flags.

    parser = Parser(__doc__)
    parser.add_config("The run")
    parser.add_argument("--workdir", required=True, help="directory of the run")
    options = parser.parse_args()
    options.config         # the ConfigDict, locked
    options.config_name    # FILE or FILE:VARIANT, as it was given
    options.overrides      # {key: value} of what was set

    python scripts/train.py --config FILE[:VARIANT] --config.KEY=VALUE ...

What is wrong is said in one line, with the name that is nearest to what was written. Flags are
written with hyphens; underscores are read, too. Nothing here needs a device, so that help and
mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import runpy
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import absl.logging
import ml_collections

from focus.run import ranges
from focus.run.spelling import did_you_mean

_PREFIX = "--config."
_OFF_PREFIX = "--noconfig."
_TRUE, _FALSE = ("true", "t", "1", "yes"), ("false", "f", "0", "no")
# An assignment of a config file, and what is said of it.
_ASSIGNMENT = re.compile(r"^\s*c\.(?P<key>[\w.]+) = .*?(?:\s# (?P<comment>.*))?$")
_COMMENT = re.compile(r"^\s*# (?P<comment>.*)$")


class ConfigError(ValueError):
    """A config file, a variant or a key that is not there, or a value that a key cannot take."""


def checkpoint(text: str) -> int | str:
    """latest, best, or the number of a checkpoint"""
    return int(text) if text.isdigit() else text


class Parser(argparse.ArgumentParser):
    """argparse, with a config, both spellings of a flag, and mistakes in one line.

    Args:
      description: the script's docstring.
    """

    def __init__(self, description: str | None):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._has_config = False

    def add_config(self, help: str, *, to: Any = None) -> None:
        """Adds --config, --config.KEY=VALUE and --helpconfig; `to`: a group of flags."""
        self._has_config = True
        (to or self).add_argument(
            "--config",
            required=to is None,
            metavar="FILE[:VARIANT]",
            help=f"{help}: a Python file with get_config(), and the argument that it is given. "
            "--config.KEY=VALUE sets one of its keys",
        )
        self.add_argument(
            "--helpconfig",
            action="store_true",
            help="list every key of --config, its value and what it means, and exit",
        )

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Reads the flags, and the config, if there is one.

        Returns:
          The namespace; `config` holds the ConfigDict.
        """
        args = list(sys.argv[1:] if args is None else args)
        # Of libraries that use absl, orbax above all; ours is the progress bar.
        absl.logging.set_verbosity(absl.logging.WARNING)
        if not self._has_config:
            return super().parse_args(self._hyphened(args), namespace)
        args, overrides = _split(args)
        if "--helpconfig" in args and not any(a.partition("=")[0] == "--config" for a in args):
            args += ["--config", os.path.relpath(_default_config())]
        helped = "--helpconfig" in args
        if helped:  # other flags may be missing
            for action in self._actions:
                action.required = action.dest == "config"
        options = super().parse_args(self._hyphened(args), namespace)
        options.config_name = options.config
        if options.config is None and overrides:
            self.error(f"{overrides[0][0]} is a key of --config, which is missing")
        if options.config is None:
            return options
        try:
            options.config = read_config(options.config_name)
            options.overrides = set_keys(options.config, overrides)
        except ConfigError as error:
            self.exit(2, f"{self.prog}: {' '.join(str(error).split())}\n")
        if helped:
            try:
                print(describe(options.config, options.config_name), flush=True)
            except BrokenPipeError:  # read as far as was wanted
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.exit()
        del options.helpconfig
        return options

    def error(self, message: str) -> NoReturn:
        """Says what is wrong in one line, and exits with status 2."""
        message = " ".join(message.split())
        if unknown := re.match(r"unrecognized arguments: (.*)", message):
            first = unknown[1].split()[0].partition("=")[0]
            known = [name for action in self._actions for name in action.option_strings]
            message += did_you_mean(first, known) if first.startswith("-") else ""
        self.exit(2, f"{self.prog}: {message}; --help lists the flags\n")

    def _hyphened(self, args: Sequence[str]) -> list[str]:
        """Flags in the spelling that they were defined in."""
        known = {name.replace("_", "-"): name for name in self._option_string_actions}
        spelled = []
        for arg in args:
            name, equals, value = arg.partition("=")
            if name.startswith("--"):
                name = known.get(name.replace("_", "-"), name)
            spelled.append(name + equals + value)
        return spelled


def _split(args: Sequence[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Takes the keys of the config out of the flags.

    Returns:
      The other flags, and `(key, value)` in order; value None for a key that stands alone.
    """
    others, overrides = [], []
    at = 0
    while at < len(args):
        name, equals, value = args[at].partition("=")
        at += 1
        if name.startswith(_OFF_PREFIX):
            overrides.append((name.removeprefix(_OFF_PREFIX), "false"))
        elif not name.startswith(_PREFIX):
            others.append(args[at - 1])
        elif equals:
            overrides.append((name.removeprefix(_PREFIX), value))
        elif at < len(args) and not args[at].startswith("--"):
            overrides.append((name.removeprefix(_PREFIX), args[at]))
            at += 1
        else:
            overrides.append((name.removeprefix(_PREFIX), None))
    return others, overrides


def read_config(name: str) -> ml_collections.ConfigDict:
    """What `get_config` of a file returns, locked.

    Args:
      name: FILE, or FILE:VARIANT, which is what `get_config` is called with.

    Raises:
      ConfigError: no such file or variant, or the file fails; in one line.
    """
    path, colon, variant = name.partition(":")
    if not Path(path).is_file():
        # Of the same directory, else of the ones beside it.
        folder = Path(path).parent
        there = [folder] if folder.is_dir() else [p for p in Path().iterdir() if p.is_dir()]
        files = [str(file) for directory in there for file in sorted(directory.glob("*.py"))]
        raise ConfigError(f"--config: no file {path!r}{did_you_mean(path, files)}")
    try:
        # By the name of a module, so that it is not taken for a program.
        get_config = runpy.run_path(path).get("get_config")
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--config: {_where(error, path)}") from error
    if not callable(get_config):
        raise ConfigError(f"--config: {path} has no function get_config()")
    try:
        inspect.signature(get_config).bind(*([variant] if colon else []))
    except TypeError as error:
        wants = "takes no variant" if colon else "wants a variant"
        raise ConfigError(f"--config: {path} {wants} ({error})") from error
    try:
        config = get_config(*([variant] if colon else []))
    except ValueError as error:
        if not colon:
            raise ConfigError(f"--config: {_where(error, path)}") from error
        known = re.findall(r"[\w.-]+", str(error).replace(repr(variant), ""))
        hint = did_you_mean(variant, known)
        raise ConfigError(f"--config: {path}:{variant}: {error}{hint}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--config: {_where(error, path)}") from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise ConfigError(f"--config: get_config() of {path} returned no ConfigDict: {config!r}")
    return config.lock()


def set_keys(
    config: ml_collections.ConfigDict, overrides: Iterable[tuple[str, str | None]]
) -> dict[str, Any]:
    """Sets keys of a config to values that were given as text.

    A tuple may be given as one ("(1, 2)"), or one entry at a time by naming its key repeatedly. A
    key that may be None (`focus.run.ranges.optional`) takes the word None.

    Args:
      config: is changed.
      overrides: `(key, text)` in order; no text is True, for a key that is true or false.

    Returns:
      What was set.

    Raises:
      ConfigError: no such key, or its value is of another kind.
    """
    given: dict[str, list[str | None]] = {}
    for key, text in overrides:
        given.setdefault(key, []).append(text)
    values = {}
    for key, texts in given.items():
        section, name = _find(config, key)
        values[key] = _read_value(key, texts, section[name])
        section[name] = values[key]
    return values


def _find(config: ml_collections.ConfigDict, key: str) -> tuple[ml_collections.ConfigDict, str]:
    """The section that holds a key, and the key's name in it."""
    known = [name for name, _ in ranges.leaves(config)]
    if key in known:
        *path, name = key.split(".")
        for part in path:
            config = config[part]
        return config, name
    if any(name.startswith(f"{key}.") for name in known):
        inside = [name for name in known if name.startswith(f"{key}.")]
        raise ConfigError(f"--config.{key} is a section: set one of its keys, as {inside[0]}")
    last = key.rpartition(".")[2]
    alike = [name for name in known if name.rpartition(".")[2] == last]
    if last == key and alike:  # its section is missing
        hint = f"; did you mean {' or '.join(alike)}?"
    else:
        hint = did_you_mean(key, alike or known, last)
    raise ConfigError(f"--config.{key}: no such key{hint or '; --helpconfig lists them'}")


def _read_value(key: str, texts: Sequence[str | None], old: Any) -> Any:
    """A value of the kind that the key has."""
    if len(texts) == 1 and texts[0] == "None":
        if not ranges.optional(key):
            raise ConfigError(f"--config.{key} cannot be None; it is {old!r}")
        return None
    if isinstance(old, tuple | list):
        return tuple(entry for text in texts for entry in _read_entries(key, text))
    text = texts[-1]
    if isinstance(old, bool):
        word = "true" if text is None else text.lower()
        if word not in _TRUE + _FALSE:
            raise ConfigError(f"--config.{key} takes true or false, got {text!r}")
        return word in _TRUE
    if text is None:
        raise ConfigError(f"--config.{key} takes a value: --config.{key}=VALUE")
    if isinstance(old, str):
        return text
    if old is None:  # what kind it is, only its range says
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
    kind, wanted = (int, "a whole number") if isinstance(old, int) else (float, "a number")
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"--config.{key} takes {wanted}, got {text!r}") from None


def _read_entries(key: str, text: str | None) -> tuple:
    """Entries of a tuple: those of a literal, or the word as it is."""
    if text is None:
        raise ConfigError(f"--config.{key} takes a value: --config.{key}=VALUE")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return (text,)
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def describe(config: ml_collections.ConfigDict, name: str) -> str:
    """Every key of a config, one a line: its value, and what its files say of it."""
    comments = read_comments(_default_config()) | read_comments(Path(name.partition(":")[0]))
    lines = [f"Keys of {name}: --config.KEY=VALUE"]
    for key, value in ranges.leaves(config):
        said = comments.get(key, "")
        lines.append(f"  {key} = {value!r}" + (f"  # {said}" if said else ""))
    return "\n".join(lines)


def read_comments(path: Path) -> dict[str, str]:
    """What a config file says of its keys: comments on the line, and on the lines above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        if comment := _COMMENT.match(line):
            above.append(comment["comment"])
            continue
        if assignment := _ASSIGNMENT.match(line):
            said = " ".join([*above, *filter(None, [assignment["comment"]])])
            # The first one sets the default; later ones are of variants.
            found.setdefault(assignment["key"], said)
        above = []
    return {key: said for key, said in found.items() if said}


def _default_config() -> Path:
    """The file in which every key stands."""
    configs = Path(__file__).parents[2] / "configs"
    return next(p for n in ("default.py", "quickstart.py") if (p := configs / n).is_file())


def _where(error: BaseException, path: str) -> str:
    """What a config file has raised, and in which of its lines."""
    said = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: SyntaxError: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _same(f.filename, path)]
    place = f"{path}, line {frames[-1].lineno}" if frames else path
    return f"{place}: {type(error).__name__}: {said}"


def _same(one: str, other: str) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)


def as_flags(options: Any) -> list[str]:
    """The flags that give a config again."""
    keys: Mapping[str, Any] = options.overrides
    return ["--config", options.config_name, *(f"--config.{k}={v}" for k, v in keys.items())]
