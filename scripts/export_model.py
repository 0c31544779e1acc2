"""Writes a policy as a model directory: the one that a run trained, or the one that it starts from.

python scripts/export_model.py --workdir runs/focus --step best --out models/focus
python scripts/export_model.py --config configs/quickstart_sglang.py --out models/quickstart
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from focus.formats import hf
from focus.formats.hf_config import DTYPES
from focus.run import experiment, warm_start
from focus.run.restored import restore_run

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Of a run: writes the policy that it starts from.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Of a run: writes the policy that it trained.")
_STEP = flags.DEFINE_string("step", "latest", "latest, best, or the number of a checkpoint.")
_OUT = flags.DEFINE_string("out", None, "Directory to write.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "float32", sorted(DTYPES), "Of the weights that are written.")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    if (_CONFIG.value is None) == (_WORKDIR.value is None):
        raise app.UsageError("give either --workdir, of a run, or --config")
    logging.set_verbosity(logging.WARNING)  # of libraries that use absl
    try:
        if _WORKDIR.value is not None:
            step = int(_STEP.value) if _STEP.value.isdigit() else _STEP.value
            run = restore_run(_WORKDIR.value, step)
            model, params, chat = run.trainer.model, run.plain_params(), run.trainer.start.chat
            what = f"weights after {run.step} training steps"
        else:
            config = _CONFIG.value
            experiment.validate(config)
            start = warm_start.load_or_make(config, experiment.make_env(config))
            model, params, chat = experiment.model_config(config), start.params, start.chat
            what = "weights before training"
        hf.save_checkpoint(_OUT.value, model, params, dtype=_DTYPE.value)
        hf.save_tokenizer(_OUT.value, chat)
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"{_OUT.value}: {what}, contexts of {model.max_context} tokens, {_DTYPE.value}")


if __name__ == "__main__":
    app.run(main)
