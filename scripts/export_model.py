"""Writes the policy that a config starts from as a model directory, for servers to start with.

python scripts/export_model.py --config configs/quickstart_sglang.py --out models/quickstart
"""

import sys

from absl import app, flags
from ml_collections import config_flags

from focus.formats import hf
from focus.formats.hf_config import DTYPES
from focus.run import experiment, warm_start

_CONFIG = config_flags.DEFINE_config_file("config", None, "Of the run.", lock_config=True)
_OUT = flags.DEFINE_string("out", None, "Directory to write.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "float32", sorted(DTYPES), "Of the weights that are written.")
flags.mark_flag_as_required("config")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    config = _CONFIG.value
    try:
        experiment.validate(config)
        start = warm_start.load_or_make(config, experiment.make_env(config))
        model = experiment.model_config(config)
        hf.save_checkpoint(_OUT.value, model, start.params, dtype=_DTYPE.value)
        hf.save_tokenizer(_OUT.value, start.chat)
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"{_OUT.value}: contexts of {model.max_context} tokens, {_DTYPE.value}")


if __name__ == "__main__":
    app.run(main)
