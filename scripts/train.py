"""Trains an agent.

    python scripts/train.py --config configs/quickstart.py --workdir runs/focus
    python scripts/train.py --config configs/quickstart.py:grpo --workdir runs/grpo --config.seed=1

The same command again goes on where the run was stopped. Ctrl-C saves what is done.

On several hosts the same command runs on each, with one workdir that all of them see:

    python scripts/train.py ... --coordinator=host0:1234 --num-processes=2 --process-id=0
    python scripts/train.py ... --num-processes=0   # TPU pods and clusters that know the rest
"""

import os
import shlex
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


def run(options, start):
    """Trains; what a message says by itself ends in one line."""
    with start.part("packages"):
        from focus.engine import EngineError
        from focus.learner import hosts, sharding
        from focus.train import train
    # A traceback would add nothing.
    said = (ValueError, ImportError, FloatingPointError, OSError)
    said += (EngineError, hosts.OtherProcessFailed)
    try:
        if options.cpu_devices:
            sharding.split_cpu(options.cpu_devices)
        hosts.initialize(options.coordinator, options.num_processes, options.process_id)
        train(options.config, options.workdir, start=start)
    except said as error:
        sys.exit(f"{type(error).__name__}: {error}")


def main():
    options = flags()
    try:
        run(options, Start(quiet=bool(options.process_id)))
    except KeyboardInterrupt as stop:
        command = os.environ.get("FOCUS_COMMAND") or shlex.join(["python", *sys.argv])
        where = str(stop) or "stopped before the first step"
        print(f"{where}. To go on:\n  {command}", file=sys.stderr)
        sys.exit(128 + getattr(stop, "signum", signal.SIGINT))


if __name__ == "__main__":
    main()
