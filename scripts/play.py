"""Plays an episode with a trained policy, or shows one that a run recorded, in the terminal.

python scripts/play.py --workdir runs/focus --step best --task 3 --temperature 0
python scripts/play.py --workdir runs/focus --show 12/3.0
"""

import shutil
import sys

from focus.report.text import episode_lines
from focus.run.command_line import Parser, checkpoint
from focus.run.play import play_episode, recorded_episode


def flags():
    """The command line, read."""
    parser = Parser(__doc__)
    parser.add_argument("--workdir", required=True, help="directory of a run")
    parser.add_argument("--step", type=checkpoint, default="latest", help=checkpoint.__doc__)
    parser.add_argument(
        "--split", default="heldout", choices=("heldout", "train"), help="where the task is from"
    )
    parser.add_argument("--task", default="0", help="id of a task, or its place in the split")
    parser.add_argument("--temperature", type=float, help="default: the config's; 0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--show", help="id of a recorded rollout; nothing is played then")
    return parser.parse_args()


def main():
    options = flags()
    try:
        if options.show is not None:
            step, episode = recorded_episode(options.workdir, options.show)
            title = f"rollout {options.show} of training step {step}"
        else:
            step, episode = play_episode(
                options.workdir,
                step=options.step,
                split=options.split,
                task=options.task,
                temperature=options.temperature,
                seed=options.seed,
            )
            title = f"weights after {step} training steps"
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    width = min(shutil.get_terminal_size().columns, 100)
    print(title, "", *episode_lines(*episode, width=width), sep="\n")


if __name__ == "__main__":
    main()
