"""Trains an agent.

    python scripts/train.py --config configs/quickstart.py --workdir runs/focus
    python scripts/train.py --config configs/quickstart.py:grpo --workdir runs/grpo --config.seed=1

The same command again goes on where the run was stopped.

On several hosts the same command runs on each, with one workdir that all of them see:

    python scripts/train.py ... --coordinator=host0:1234 --num_processes=2 --process_id=0
    python scripts/train.py ... --num_processes=0   # TPU pods and clusters that know the rest
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from focus.engine import EngineError
from focus.learner import hosts, sharding
from focus.train import train

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The experiment: a file with get_config(), and :ARGUMENT for its variant."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory of the run: checkpoints, metrics, report. Resumes what is there."
)
_CPU_DEVICES = flags.DEFINE_integer(
    "cpu_devices",
    0,
    "Devices that a CPU is made to look like, for config.mesh to spread rows over; 0: leave it. "
    "On two cores, two devices train and score faster than one.",
    lower_bound=0,
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "Processes of the run; 0: the cluster knows, as on TPU pods."
)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")
flags.mark_flags_as_required(["config", "workdir"])
# A traceback would add nothing.
_SAID_BY_THEIR_MESSAGE = (
    ValueError,
    FloatingPointError,
    OSError,
    EngineError,
    hosts.OtherProcessFailed,
)


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
    logging.set_verbosity(logging.WARNING)  # of libraries that use absl; ours is the progress bar
    if _CPU_DEVICES.value:
        sharding.split_cpu(_CPU_DEVICES.value)
    try:
        hosts.initialize(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
        train(_CONFIG.value, _WORKDIR.value)
    except _SAID_BY_THEIR_MESSAGE as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
