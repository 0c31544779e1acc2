"""Writes a policy as a model directory: the one that a run trained, or the one that it starts from.

python scripts/export_model.py --workdir runs/focus --step best --out models/focus
python scripts/export_model.py --config configs/quickstart_sglang.py --out models/quickstart
"""

import sys

from focus.formats import hf
from focus.formats.hf_config import DTYPES
from focus.run import experiment, plugins, warm_start
from focus.run.command_line import Parser, checkpoint
from focus.run.restored import restore_run


def flags():
    """The command line, read."""
    parser = Parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    parser.add_config("of a run, to write the policy that it starts from", to=source)
    source.add_argument("--workdir", help="of a run, to write the policy that it trained")
    parser.add_argument("--step", type=checkpoint, default="latest", help=checkpoint.__doc__)
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument(
        "--dtype", default="float32", choices=sorted(DTYPES), help="of the weights in the file"
    )
    return parser.parse_args()


def main():
    options = flags()
    try:
        if options.workdir:
            run = restore_run(options.workdir, options.step)
            model, params, chat = run.trainer.model, run.plain_params(), run.trainer.start.chat
            what = f"weights after {run.step} training steps"
        else:
            config = options.config
            plugins.load(config.plugins)
            experiment.validate(config)
            start = warm_start.load_or_make(config, experiment.make_env(config))
            model, params, chat = experiment.model_config(config), start.params, start.chat
            what = "weights before training"
        hf.save_checkpoint(options.out, model, params, dtype=options.dtype)
        hf.save_tokenizer(options.out, chat)
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"{options.out}: {what}, contexts of {model.max_context} tokens, {options.dtype}")


if __name__ == "__main__":
    main()
