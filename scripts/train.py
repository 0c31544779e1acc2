"""Trains an agent.

    python scripts/train.py --config configs/quickstart.py --workdir runs/focus
    python scripts/train.py --config configs/quickstart.py:grpo --workdir runs/grpo --config.seed=1

The same command again goes on where the run was stopped.
"""

import sys

from absl import app, flags
from ml_collections import config_flags

from focus.train import train

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The experiment: a file with get_config(), and :ARGUMENT for its variant."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory of the run: checkpoints, metrics, report. Resumes what is there."
)
flags.mark_flags_as_required(["config", "workdir"])


def parse(argv):
    """Reads the flags; ml_collections answers an unknown key with a chain of exceptions."""
    try:
        return app.parse_flags_with_usage(argv)
    except AttributeError as error:
        cause = error
        while cause.args and isinstance(cause.args[0], Exception):
            cause = cause.args[0]
        sys.exit(f"--config has no such key: {' '.join(str(cause.args[0]).split())}")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    try:
        train(_CONFIG.value, _WORKDIR.value)
    except (ValueError, FloatingPointError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
