"""A run opened again: its config, its compiled parts and one of its checkpoints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_collections

from focus.learner import compilations
from focus.learner.checkpoint import Checkpointer
from focus.learner.state import TrainState
from focus.run import experiment, inputs, plugins, warm_start
from focus.run.trainer import Trainer
from focus.terminal import Start


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


def restore_run(
    workdir: str | Path,
    step: int | str = "latest",
    *,
    start: Start | None = None,
    **evaluate: Any,
) -> RestoredRun:
    """Opens a checkpoint of a run; the run's directory is only read.

    Args:
      workdir: of the run.
      step: "latest", "best" or the number of a checkpoint.
      start: says how far it is; None: nobody does.
      **evaluate: keys of `config.evaluate` that are to differ from the run's; None leaves them.

    Raises:
      ValueError: no run there, no such checkpoint, more tasks than there are, or other contents
        of the files that the run reads.
    """
    config, start = read_config(workdir), start or Start(quiet=True)
    config.evaluate.update({key: value for key, value in evaluate.items() if value is not None})
    compilations.keep(experiment.cache_dir(config) / "jax")
    plugins.load_kept(workdir)
    experiment.validate(config)
    with start.part("tasks"):
        inputs.check(inputs.find(config), workdir)
        env = experiment.make_env(config)
        experiment.heldout_tasks(config, env)  # refuses more than there are
    with start.part("warm start"):
        warm = warm_start.load_or_make(config, env, start)
    with start.part("compiling"):
        trainer = Trainer(config, env, warm)
    with start.part("checkpoint"):
        checkpointer = Checkpointer(workdir)
        try:
            restored = checkpointer.restore(trainer.init_state(), step=step)
        finally:
            checkpointer.close()
    return RestoredRun(config, trainer, restored.state, restored.step)
