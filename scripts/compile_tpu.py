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

from focus.run.command_line import Parser, as_flags
from focus.tpu.chips import TPUS

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the chips need not be there


def main():
    parser = Parser(__doc__)
    parser.add_config("the run")
    parser.add_argument(
        "--topology",
        required=True,
        help="chips and their shape: "
        + "; ".join(f"{chip.name}:{', '.join(chip.slices)}" for chip in TPUS.values()),
    )
    parser.add_argument(
        "--programs",
        type=lambda text: [name for name in text.split(",") if name],
        default=[],
        help="only these, with commas between them: gradient, optimizer, score, critic",
    )
    parser.add_argument("--cache", type=Path, help="directory in which compiled programs are kept")
    parser.add_argument(
        "--out", type=Path, help="directory for the report: tables (.md), figures (.json)"
    )
    options = parser.parse_args()
    from focus.tpu.report import show, to_markdown
    from focus.tpu.run import compile_config

    file, _, variant = options.config_name.partition(":")
    try:
        result = compile_config(
            options.config,
            options.topology,
            name=variant or Path(file).stem,
            only=options.programs,
            cache=options.cache,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except ValueError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    show(result, rich.console.Console())
    if options.out:
        rank = options.config.learner.lora.rank
        what = f"{result['config']}_lora{rank}" if rank else result["config"]
        stem = options.out / f"{what}_{result['topology'].replace(':', '_')}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        command = ["python", "scripts/compile_tpu.py", *as_flags(options)]
        command += ["--topology", options.topology]
        stem.with_suffix(".md").write_text(to_markdown(result, shlex.join(command)))
        stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
