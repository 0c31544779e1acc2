"""Writes the policy that a config starts from as a model directory, for servers to start with.

python scripts/export_model.py --config configs/quickstart_sglang.py --out models/quickstart
"""

import sys

from focus.formats import hf
from focus.formats.hf_config import DTYPES
from focus.run import experiment, plugins, warm_start
from focus.run.command_line import Parser


def main():
    parser = Parser(__doc__)
    parser.add_config("of the run")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument(
        "--dtype", default="float32", choices=sorted(DTYPES), help="of the weights in the file"
    )
    options = parser.parse_args()
    config = options.config
    try:
        plugins.load(config.plugins)
        experiment.validate(config)
        start = warm_start.load_or_make(config, experiment.make_env(config))
        model = experiment.model_config(config)
        hf.save_checkpoint(options.out, model, start.params, dtype=options.dtype)
        hf.save_tokenizer(options.out, start.chat)
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"{options.out}: contexts of {model.max_context} tokens, {options.dtype}")


if __name__ == "__main__":
    main()
