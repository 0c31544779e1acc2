"""Runs an experiment of the laboratory: arms against worlds with exact values.

    python scripts/lab.py --config configs/lab.py --workdir runs/lab
    python scripts/lab.py --config configs/lab.py:claims --workdir runs/claims
    python scripts/lab.py --config configs/lab.py:smoke --workdir runs/smoke --config.seed=1
    python scripts/lab.py --config configs/lab.py --workdir runs/mine \
      --config.arms="('ppo', 'focus', 'often: focus base_fraction=0.75')"

configs/lab.py says what there is to set: basic, smoke, claims, league, regime. The same command
again goes on where the run was stopped. WORKDIR gets results.json, analysis.json, league.json and
lab.html.
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from focus.laboratory import run

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The experiment: a file with get_config(), and :ARGUMENT for its variant."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory of the experiment. What is finished there is not run again."
)
_WORKERS = flags.DEFINE_integer("workers", 0, "Processes; 0: one for each core.", lower_bound=0)
flags.mark_flags_as_required(["config", "workdir"])
# A traceback would add nothing.
_SAID_BY_THEIR_MESSAGE = (ValueError, FloatingPointError, OSError, RuntimeError)


def parse(argv):
    """Reads the flags; ml_collections answers an unknown key with a chain of exceptions."""
    try:
        return app.parse_flags_with_usage(argv)
    except AttributeError as error:
        cause = error
        while cause.args and isinstance(cause.args[0], Exception):
            cause = cause.args[0]
        sys.exit(f"--config has no such key: {' '.join(str(cause.args[0]).split())}")
    except ValueError as error:  # a variant that is not there
        sys.exit(f"error: {' '.join(str(error).split())}")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # of libraries that use absl; ours is the progress bar
    try:
        report = run(_CONFIG.value, _WORKDIR.value, workers=_WORKERS.value)
    except KeyboardInterrupt:
        sys.exit("stopped; what is finished is kept, and the same command goes on")
    except _SAID_BY_THEIR_MESSAGE as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    print(f"report: {report}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
