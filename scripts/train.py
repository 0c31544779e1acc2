"""Trains an agent.

    python scripts/train.py --config configs/quickstart.py --workdir runs/focus
    python scripts/train.py --config configs/quickstart.py:grpo --workdir runs/grpo --config.seed=1

The same command again goes on where the run was stopped.

On several hosts the same command runs on each, with one workdir that all of them see:

    python scripts/train.py ... --coordinator=host0:1234 --num-processes=2 --process-id=0
    python scripts/train.py ... --num-processes=0   # TPU pods and clusters that know the rest
"""

import sys

from focus.engine import EngineError
from focus.learner import hosts, sharding
from focus.run.command_line import Parser
from focus.train import train

# A traceback would add nothing.
_SAID_BY_THEIR_MESSAGE = (
    ValueError,
    FloatingPointError,
    OSError,
    EngineError,
    hosts.OtherProcessFailed,
)


def flags():
    """The command line, read."""
    parser = Parser(__doc__)
    parser.add_config("the experiment")
    parser.add_argument(
        "--workdir",
        required=True,
        help="directory of the run: checkpoints, metrics, report; resumes what is there",
    )
    parser.add_argument(
        "--cpu-devices",
        type=int,
        default=0,
        help="devices that a CPU is made to look like, for config.mesh to spread rows over; 0: "
        "leave it. On two cores, two devices train and score faster than one",
    )
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument(
        "--num-processes", type=int, help="of the run; 0: the cluster knows, as on TPU pods"
    )
    parser.add_argument("--process-id", type=int, help="which of them this is, from 0")
    return parser.parse_args()


def main():
    options = flags()
    try:
        if options.cpu_devices:
            sharding.split_cpu(options.cpu_devices)
        hosts.initialize(options.coordinator, options.num_processes, options.process_id)
        train(options.config, options.workdir)
    except _SAID_BY_THEIR_MESSAGE as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
