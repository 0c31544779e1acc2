"""Compiles a run for a TPU slice without a TPU, and predicts memory, step time and MFU.

    pip install -e '.[tpu]'
    python scripts/compile_tpu.py --config configs/tpu_pod.py:qwen3_8b --topology v5p:4x4x4

Exit code 1, with the reason, if it does not fit.
"""

import json
import sys
from pathlib import Path

import rich.console
from absl import app, flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run: FILE or FILE:ARGUMENT.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "Chips, such as v5p:4x4x4 or v5e:8x8.")
_PROGRAMS = flags.DEFINE_list("programs", [], "Only these: gradient, optimizer, score, critic.")
_CACHE = flags.DEFINE_string("cache", None, "Directory for compiled programs, to read them again.")
_JSON = flags.DEFINE_string("json", None, "File for all figures.")
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the tables.")
flags.mark_flags_as_required(["config", "topology"])


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    from focus.tpu.report import show, to_markdown
    from focus.tpu.run import compile_config

    console = rich.console.Console()
    name = flags.FLAGS["config"].config_filename
    try:
        result = compile_config(
            _CONFIG.value,
            _TOPOLOGY.value,
            name=Path(name).stem if ":" not in name else name.rsplit(":", 1)[1],
            only=_PROGRAMS.value,
            cache=Path(_CACHE.value) if _CACHE.value else None,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except ValueError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    show(result, console)
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(result, indent=2) + "\n")
    if _MARKDOWN.value:
        command = f"python scripts/compile_tpu.py --config {name} --topology {_TOPOLOGY.value}"
        Path(_MARKDOWN.value).write_text(to_markdown(result, command))


if __name__ == "__main__":
    app.run(main)
