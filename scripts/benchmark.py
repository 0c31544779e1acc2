"""Tokens per second of an update, of scoring, or of decoding, alone or beside another library.

    python scripts/benchmark.py update --shape rollouts --against hf --out docs/benchmarks.md
    python scripts/benchmark.py update --against tunix --python .venv-tunix/bin/python
    python scripts/benchmark.py decode --size smollm2 --rows 64 --json decode.json

Speeds of two sides come from processes that take turns on this machine; read the ratio. Both must
find the same losses, log-probabilities or tokens, or there is no ratio.
"""

import argparse
import json
import sys
from pathlib import Path

import rich.console

from focus.benchmark import compare
from focus.benchmark.work import SHAPES, SIZES, TASKS, Work


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--shape", choices=SHAPES, default="dense", help="see focus.benchmark.work")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="random weights")
    parser.add_argument("--model-path", help="Hugging Face directory instead of --size")
    parser.add_argument(
        "--against",
        choices=["hf", "tunix"],
        help="the other side: transformers (extra: dev), or tunix (extra: tunix; update of Qwen3 "
        "models with rotary theta 1e6 only, which is all that its model computes)",
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter of the other side")
    parser.add_argument(
        "--rows", type=int, help="rows, requests or base rollouts (8, decode: 64, rollouts: 16)"
    )
    parser.add_argument("--length", type=int, help="of a dense row, or prompt (256; decode: 32)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a dense request")
    parser.add_argument("--in-flight", type=int, default=64, help="requests that decode together")
    parser.add_argument("--repeats", type=int, default=3, help="timed, in a process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--out", type=Path, help="Markdown report to add the comparison to")
    options = parser.parse_args()
    decode = options.task == "decode"
    rows = 16 if options.shape == "rollouts" else 64 if decode else 8
    try:
        work = Work(
            options.task,
            options.shape,
            rows=options.rows or rows,
            length=options.length or (32 if decode else 256),
            new_tokens=options.new_tokens,
            in_flight=options.in_flight,
            repeats=options.repeats,
        )
        figures = compare.compare(
            work,
            size=options.size,
            model_path=options.model_path,
            against=options.against,
            python=options.python,
            rounds=options.rounds,
        )
        rich.console.Console().print(compare.table(figures))
        if options.out:
            compare.write_report(options.out, figures)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
