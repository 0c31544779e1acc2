"""Time and memory of every estimator of the credit library, beside one pass over its inputs.

    python scripts/benchmark_credit.py
    python scripts/benchmark_credit.py grpo tempo --rows 4096 --segments 256 --tokens 4096
    python scripts/benchmark_credit.py --rows 4096 --segments 256 --tokens 65536 --plan

With --plan nothing is allocated: the compiler says what each would need.
"""

import argparse
import json
import sys
from pathlib import Path

import rich.console
import rich.progress

from focus.benchmark import credit as benchmark_credit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("estimators", nargs="*", help="default: all")
    parser.add_argument("--rows", type=int, default=256, help="trajectories")
    parser.add_argument("--segments", type=int, default=32, help="of a trajectory")
    parser.add_argument("--tokens", type=int, default=2048, help="of a trajectory")
    parser.add_argument("--repeats", type=int, default=3, help="timed")
    parser.add_argument("--plan", action="store_true", help="compile only")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    try:
        size = benchmark_credit.Size(options.rows, options.segments, options.tokens)
        names = benchmark_credit.names(options.estimators)
    except ValueError as error:
        sys.exit(f"error: {error}")
    console = rich.console.Console()
    figures = [
        benchmark_credit.measure(name, size, repeats=options.repeats, plan_only=options.plan)
        for name in rich.progress.track(names, console=rich.console.Console(stderr=True))
    ]
    console.print(benchmark_credit.table(figures, size))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
