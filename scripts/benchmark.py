"""Tokens per second of an update, of scoring, or of decoding, alone or beside another library.

    python scripts/benchmark.py update --size tiny --against hf
    python scripts/benchmark.py decode --size smollm2 --rows 64 --json decode.json

Speeds of two sides come from processes that take turns on this machine; read the ratio.
"""

import argparse
import json
import sys
from pathlib import Path

import rich.console

from focus import benchmark


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=benchmark.TASKS)
    parser.add_argument("--size", choices=benchmark.SIZES, default="tiny", help="random weights")
    parser.add_argument("--model-path", help="Hugging Face directory instead of --size")
    parser.add_argument("--against", choices=["hf"], help="the other side (extra: dev)")
    parser.add_argument("--rows", type=int, help="rows, or requests (8; decode: 64)")
    parser.add_argument("--length", type=int, help="tokens of a row, or prompt (256; decode: 32)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a request")
    parser.add_argument("--repeats", type=int, default=3, help="timed, in a process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    decode = options.task == "decode"
    try:
        work = benchmark.Work(
            options.task,
            rows=options.rows or (64 if decode else 8),
            length=options.length or (32 if decode else 256),
            new_tokens=options.new_tokens,
            repeats=options.repeats,
        )
        figures = benchmark.compare(
            work,
            size=options.size,
            model_path=options.model_path,
            against=options.against,
            rounds=options.rounds,
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    rich.console.Console().print(benchmark.table(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
