"""Plays an episode with a trained policy, or shows one that a run recorded, in the terminal.

python scripts/play.py --workdir runs/focus --step best --task 3 --temperature 0
python scripts/play.py --workdir runs/focus --show 12/3.0
"""

import shutil
import sys

from absl import app, flags, logging

from focus.report.text import episode_lines
from focus.run.play import play_episode, recorded_episode

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of a run.", required=True)
_STEP = flags.DEFINE_string("step", "latest", "latest, best, or the number of a checkpoint.")
_SPLIT = flags.DEFINE_enum("split", "heldout", ["heldout", "train"], "Where the task is from.")
_TASK = flags.DEFINE_string("task", "0", "Id of a task, or its place in the split.")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Default: the config's; 0 is greedy.")
_SEED = flags.DEFINE_integer("seed", 0, "Of sampling.")
_SHOW = flags.DEFINE_string("show", None, "Id of a recorded rollout; nothing is played then.")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # of libraries that use absl
    try:
        if _SHOW.value is not None:
            step, episode = recorded_episode(_WORKDIR.value, _SHOW.value)
            title = f"rollout {_SHOW.value} of training step {step}"
        else:
            step, episode = play_episode(
                _WORKDIR.value,
                step=int(_STEP.value) if _STEP.value.isdigit() else _STEP.value,
                split=_SPLIT.value,
                task=_TASK.value,
                temperature=_TEMPERATURE.value,
                seed=_SEED.value,
            )
            title = f"weights after {step} training steps"
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    width = min(shutil.get_terminal_size().columns, 100)
    print(title, "", *episode_lines(*episode, width=width), sep="\n")


if __name__ == "__main__":
    app.run(main)
