"""Scores a checkpoint of a run on held-out tasks.

python scripts/evaluate.py --workdir runs/focus
python scripts/evaluate.py --workdir runs/focus --step best --num_tasks 200 --temperature 0
"""

import json
import signal
import sys

from absl import app, flags

from focus.terminal import Start  # the others are imported where that can be seen

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of a run.", required=True)
_STEP = flags.DEFINE_string("step", "latest", "latest, best, or the number of a checkpoint.")
_NUM_TASKS = flags.DEFINE_integer("num_tasks", None, "Held-out tasks; default: the config's.")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Default: the config's; 0 is greedy.")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    step = int(_STEP.value) if _STEP.value.isdigit() else _STEP.value
    start = Start()
    try:
        with start.part("packages"):
            from focus.evaluate import evaluate_run
        result = evaluate_run(
            _WORKDIR.value,
            step=step,
            num_tasks=_NUM_TASKS.value,
            temperature=_TEMPERATURE.value,
            start=start,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    app.run(main)
