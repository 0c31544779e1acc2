"""A run opened again: its config, its compiled parts and one of its checkpoints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_collections

from focus.learner.checkpoint import Checkpointer
from focus.learner.state import TrainState
from focus.run import experiment, warm_start
from focus.run.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class RestoredRun:
    """What a checkpoint of a run comes to.

    Attributes:
      config: of the run.
      trainer: its functions and fixed shapes.
      state: the checkpoint's.
      step: finished training steps of the checkpoint.
    """

    config: ml_collections.ConfigDict
    trainer: Trainer
    state: TrainState
    step: int

    def plain_params(self) -> Any:
        """Parameters of the trained policy, with adapters merged into them."""
        adapters = self.trainer.adapters
        return self.state.params if adapters is None else adapters.merge(self.state)


def read_config(workdir: str | Path) -> ml_collections.ConfigDict:
    """The config of a run.

    Raises:
      ValueError: no run there.
    """
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise ValueError(f"no run in {workdir}: config.json is missing; give a workdir of train.py")
    return ml_collections.ConfigDict(json.loads(path.read_text()))


def restore_run(workdir: str | Path, step: int | str = "latest") -> RestoredRun:
    """Opens a checkpoint of a run; the run's directory is only read.

    Args:
      workdir: of the run.
      step: "latest", "best" or the number of a checkpoint.

    Raises:
      ValueError: no run there, or no such checkpoint.
    """
    config = read_config(workdir)
    experiment.validate(config)
    env = experiment.make_env(config)
    trainer = Trainer(config, env, warm_start.load_or_make(config, env))
    checkpointer = Checkpointer(workdir)
    try:
        restored = checkpointer.restore(trainer.init_state(), step=step)
    finally:
        checkpointer.close()
    return RestoredRun(config, trainer, restored.state, restored.step)
