"""Runs an experiment of the laboratory: arms against worlds with exact values.

    python scripts/lab.py --config configs/lab.py --workdir runs/lab
    python scripts/lab.py --config configs/lab.py:claims --workdir runs/claims
    python scripts/lab.py --config configs/lab.py:smoke --workdir runs/smoke --config.seed=1
    python scripts/lab.py --config configs/lab.py --workdir runs/mine \
      --config.arms=ppo --config.arms=focus --config.arms='often: focus base_fraction=0.75'

configs/lab.py says what experiments and keys there are. The same command again goes on where it
was stopped. The directory gets results.json, analysis.json, league.json and lab.html.
"""

import signal
import sys

from focus.run.command_line import Parser
from focus.terminal import Start  # the others are imported where that can be seen


def flags():
    """The command line, read."""
    parser = Parser(__doc__)
    parser.add_config("the experiment")
    parser.add_argument(
        "--workdir",
        required=True,
        help="directory of the experiment; what is finished there is not run again",
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="processes; 0, the default: one for each core"
    )
    return parser.parse_args()


def main():
    options = flags()
    start = Start()
    try:
        with start.part("packages"):
            from focus import laboratory
        report = laboratory.run(options.config, options.workdir, workers=options.workers)
    except (ValueError, FloatingPointError, OSError, RuntimeError) as error:
        # A traceback would add nothing.
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        print("stopped; what is finished is kept, the same command goes on", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    print(f"report: {report}")


if __name__ == "__main__":
    main()
