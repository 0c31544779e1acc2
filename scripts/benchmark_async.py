"""Measures what `rollout.async_depth` brings when rollouts are slow.

    python scripts/benchmark_async.py --config configs/quickstart.py:ppo --workdir runs/async

Every depth and seed is a whole run at the config's budget, on a server that takes --token-s
seconds for a token. Printed are seconds a step and held-out success of each run; a run that has
finished in an earlier call is read from its directory.
"""

import argparse
import sys

import rich.console

from focus.benchmark.async_depth import measure, table
from focus.run.command_line import Parser


def main():
    parser = Parser(__doc__)
    parser.add_config("of all runs")
    parser.add_argument("--workdir", required=True, help="gets a directory for each run")
    parser.add_argument(
        "--depth", type=int, action="append", help="to compare; repeat it (default: 0 and 1)"
    )
    parser.add_argument("--seeds", type=_positive, default=3, help="of each depth (3)")
    parser.add_argument(
        "--token-s", type=float, default=0.02, help="seconds of a token at the server (0.02)"
    )
    options = parser.parse_args()
    try:
        measured = measure(
            options.config,
            options.workdir,
            depths=options.depth or [0, 1],
            seeds=range(options.seeds),
            token_s=options.token_s,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    rich.console.Console().print(table(measured))


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


if __name__ == "__main__":
    main()
