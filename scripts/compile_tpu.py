"""Compiles a run for a TPU slice without a TPU, and predicts memory, step time and MFU.

    pip install -e '.[tpu]'
    python scripts/compile_tpu.py --config configs/tpu_pod.py:qwen3_5_9b --topology v5p:4x4x4

The programs are those of the trainer: the gradient of a micro-batch, the optimiser step, the
scoring pass and the critic, with their shardings. A large slice takes a core a quarter of an hour;
with --cache what was compiled once is read again. Any value of the config can be given, such as
--config.learner.micro_rows=128, --config.mesh.tensor=2 or --config.learner.lora.rank=32.

Exit code 0 if everything fits; 1, with the reason and the way out, if a program does not fit or
the topology, the mesh or a program's name is wrong.
"""

import json
import os
import shlex
import sys
from pathlib import Path

import rich.console
from absl import app, flags
from ml_collections import config_flags

from focus.tpu.chips import TPUS

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the chips need not be there

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run: FILE or FILE:ARGUMENT.")
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "Chips and their shape: "
    + "; ".join(f"{chip.name}:{', '.join(chip.slices)}" for chip in TPUS.values()),
)
_PROGRAMS = flags.DEFINE_list("programs", [], "Only these: gradient, optimizer, score, critic.")
_CACHE = flags.DEFINE_string("cache", None, "Directory in which compiled programs are kept.")
_OUT = flags.DEFINE_string("out", None, "Directory for the report: tables (.md), figures (.json).")
flags.mark_flags_as_required(["config", "topology"])


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    from focus.tpu.report import show, to_markdown
    from focus.tpu.run import compile_config

    name = flags.FLAGS["config"].config_filename
    try:
        result = compile_config(
            _CONFIG.value,
            _TOPOLOGY.value,
            name=name.rsplit(":", 1)[1] if ":" in name else Path(name).stem,
            only=_PROGRAMS.value,
            cache=Path(_CACHE.value) if _CACHE.value else None,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except ValueError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    show(result, rich.console.Console())
    if _OUT.value:
        rank = _CONFIG.value.learner.lora.rank
        what = f"{result['config']}_lora{rank}" if rank else result["config"]
        stem = Path(_OUT.value) / f"{what}_{result['topology'].replace(':', '_')}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        command = ["python", "scripts/compile_tpu.py", "--config", name]
        command += ["--topology", _TOPOLOGY.value]
        values = config_flags.get_override_values(flags.FLAGS["config"])
        command += [f"--config.{key}={value}" for key, value in values.items()]
        stem.with_suffix(".md").write_text(to_markdown(result, shlex.join(command)))
        stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
