"""Scores a checkpoint of a run on held-out tasks.

python scripts/evaluate.py --workdir runs/focus
python scripts/evaluate.py --workdir runs/focus --step best --num-tasks 200 --temperature 0
"""

import json
import signal
import sys

from focus.run.command_line import Parser, checkpoint
from focus.terminal import Start  # the others are imported where that can be seen


def main():
    parser = Parser(__doc__)
    parser.add_argument("--workdir", required=True, help="directory of a run")
    parser.add_argument("--step", type=checkpoint, default="latest", help=checkpoint.__doc__)
    parser.add_argument("--num-tasks", type=int, help="held-out tasks; default: the config's")
    parser.add_argument("--temperature", type=float, help="default: the config's; 0 is greedy")
    options = parser.parse_args()
    start = Start()
    try:
        with start.part("packages"):
            from focus.engine import EngineError
            from focus.evaluate import evaluate_run
        result = evaluate_run(
            options.workdir,
            step=options.step,
            num_tasks=options.num_tasks,
            temperature=options.temperature,
            start=start,
        )
    except (ValueError, OSError, EngineError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
