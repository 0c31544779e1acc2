"""What Hugging Face calls things: `config.json` of every family, and names of tensors.

A family is three functions: fields of config.json to our config, back, and the
list of tensors. A feature that no family here computes is refused by name, never ignored; so is a
field that nobody here has heard of, unless it is off, and one that is given twice and differently.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from focus.policy import qwen3_5, transformer
from focus.policy.qwen3_5 import Qwen3_5Config
from focus.policy.transformer import ModelConfig

Llama3 = tuple[float, float, float, int]  # as `ModelConfig.rope_llama3`

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

DENSE = ("qwen2", "qwen3", "llama")
HYBRID = ("qwen3_5_text", "qwen3_5")  # the latter nests the former beside a vision tower
_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}

_LLAMA3_NAMES = ("factor", "low_freq_factor", "high_freq_factor")

# Fields that do not change what a model computes: who wrote the file, how it was trained and is
# sampled from, what else libraries return.
_NOTES = frozenset(
    """_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures
    attention_dropout auto_map bos_token_id chunk_size_feed_forward do_sample dtype eos_token_id
    finetuning_task id2label initializer_range is_llama_config label2id language_model_only
    max_length max_new_tokens model_type output_attentions output_hidden_states pad_token_id
    pretraining_tp problem_type quantization_config repetition_penalty return_dict
    task_specific_params temperature tokenizer_class top_k top_p torch_dtype transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_cache""".split()
)
_SHARED = frozenset(
    """attention_bias head_dim hidden_act hidden_size intermediate_size layer_types
    max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads
    partial_rotary_factor rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings
    vocab_size""".split()
)
_SLIDING = frozenset({"max_window_layers", "sliding_window", "use_sliding_window"})
_DENSE_KNOWN = _NOTES | _SHARED | {"mlp_bias"}
_ROPE_KNOWN = frozenset({"partial_rotary_factor", "rope_theta", "rope_type", "type"})

# Parts of Qwen3.5 exports that the text model does without.
_IGNORED_HYBRID = (r"mtp\..*", r"(model\.)?visual\..*")

# Buffers that old exports carry along, and the second name of a tied embedding.
_IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file and the parameter, or layer of it, that it becomes.

    Attributes:
      name: in the file.
      parameter: path of ours, joined by slashes.
      layer: index on the stacked axis; None for parameters outside of layers.
      shape: of one layer in our layout.
      transposed: whether the file has [out, in] for our [in, out].
      unit_axis: whether the file has an axis of length 1 in second place.
    """

    name: str
    parameter: str
    layer: int | None
    shape: tuple[int, ...]
    transposed: bool = False
    unit_axis: bool = False

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        if self.unit_axis:
            return (self.shape[0], 1, *self.shape[1:])
        return self.shape[::-1] if self.transposed else self.shape

    def read(self, source: Any, index: Sequence[slice], dtype: np.dtype) -> np.ndarray:
        """The part `index` (of our layout) from a lazy slice, and nothing else."""
        index = tuple(index)
        if self.unit_axis:
            return source[(index[0], slice(0, 1), *index[1:])][:, 0].astype(dtype)
        value = source[index[::-1] if self.transposed else index]
        return (value.T if self.transposed else value).astype(dtype)

    def to_file(self, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Our array as the file has it."""
        value = value.T if self.transposed else value.reshape(self.file_shape)
        return np.ascontiguousarray(value, dtype=dtype)


def check_dtype(dtype: str) -> None:
    """Raises ValueError for a dtype that weights are not kept in."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; weights are kept as one of {sorted(DTYPES)}")


def from_json(fields: Mapping[str, Any]) -> Any:
    """Our config from the fields of a config.json.

    Raises:
      ValueError: unknown architecture, or a feature that is not computed here.
    """
    model_type = fields.get("model_type")
    nested = fields.get("text_config") or {}
    if fields.get("quantization_config") or nested.get("quantization_config"):
        raise ValueError("quantised weights are not supported; export the model in bfloat16")
    if model_type in DENSE:
        return _dense_from_json(fields)
    if model_type in HYBRID:
        return _hybrid_from_json(fields)
    known = ", ".join((*DENSE, *HYBRID))
    raise ValueError(f"unknown architecture {model_type!r}; known are {known}")


def to_json(config: Any, dtype: str) -> dict[str, Any]:
    """Fields of a config.json that describes `config` with weights in `dtype`."""
    hybrid = isinstance(config, Qwen3_5Config)
    fields = _hybrid_to_json(config) if hybrid else _dense_to_json(config)
    return fields | {"dtype": dtype, "torch_dtype": dtype}


def tensors(config: Any) -> list[Tensor]:
    """All tensors of a model, in the order of its layers."""
    return _hybrid_tensors(config) if isinstance(config, Qwen3_5Config) else _dense_tensors(config)


def ignored(config: Any) -> tuple[str, ...]:
    """Patterns of names that a file may have and that are not read."""
    names = _IGNORED_HYBRID if isinstance(config, Qwen3_5Config) else _IGNORED
    return (*names, r"lm_head\.weight") if config.tie_embeddings else names


def our_name(config: Any, name: str) -> str:
    """Name in `tensors` of what a file calls `name`.

    Exports of Qwen3.5 with its vision tower keep the text model one level further down.
    """
    if isinstance(config, Qwen3_5Config):
        return re.sub(r"^model\.language_model\.", "model.", name)
    return name


def _require(fields: Mapping[str, Any], *names: str) -> list[Any]:
    missing = [name for name in names if fields.get(name) is None]
    if missing:
        raise ValueError(f"config.json lacks {missing}; export the model again")
    return [fields[name] for name in names]


def _refuse(fields: Mapping[str, Any], name: str, allowed: Sequence[Any]) -> None:
    """Absent fields have the value that is allowed first."""
    value = fields.get(name, allowed[0])
    if value not in allowed:
        raise ValueError(f"{name} = {value!r} is not supported; known: {list(allowed)}")


def check_known(fields: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuses fields that may change what a model computes in a way that is not known here.

    Args:
      fields: of a file.
      known: names of those that are read, or are known to change nothing.
      where: what to call the file.

    Raises:
      ValueError: names the others, but those that are off: None, False or empty.
    """
    unknown = {
        name: value
        for name, value in fields.items()
        if name not in known and not (value is None or value is False or value in ("", [], {}))
    }
    if unknown:
        raise ValueError(
            f"{where} has fields that are not understood: "
            + ", ".join(f"{name} = {value!r}" for name, value in sorted(unknown.items()))
            + "; they may change what the model computes. Take out those that do not"
        )


def _agreed(name: str, *values: Any) -> Any:
    """The value that a field has wherever it is given; None where it is not."""
    given = [value for value in values if value is not None]
    for value in given[1:]:
        if value != given[0]:
            raise ValueError(
                f"{name} is given twice and differently, {given[0]!r} and {value!r}; leave the one "
                "that the model was trained with"
            )
    return given[0] if given else None


def _rope_fields(fields: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """What is said of rotary embeddings, in the older and the newer spelling and beside both.

    `rope_type` is always there.
    """
    parts = [dict(fields.get(name) or {}) for name in ("rope_parameters", "rope_scaling")]
    for part in parts:
        if "type" in part:
            part["rope_type"] = _agreed("rope_type", part.pop("type"), part.get("rope_type"))
    parts.append({name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor")})
    names = dict.fromkeys(name for part in parts for name in part)
    rope = {name: _agreed(name, *(part.get(name) for part in parts)) for name in names}
    rope["rope_type"] = rope.get("rope_type") or "default"
    check_known(rope, known, "rope_parameters")
    if rope["rope_theta"] is None:
        raise ValueError("config.json lacks rope_theta; export the model again")
    return rope


def _rope(fields: Mapping[str, Any]) -> tuple[float, Llama3 | None]:
    """Base and scaling of rotary embeddings."""
    llama3 = (*_LLAMA3_NAMES, "original_max_position_embeddings")
    rope = _rope_fields(fields, {*_ROPE_KNOWN, *llama3, "mrope_section"})
    theta, kind = rope["rope_theta"], rope["rope_type"]
    if "mrope_section" in rope:
        raise ValueError("multimodal rotary embeddings (mrope_section) are not supported")
    _refuse(rope, "partial_rotary_factor", (1.0, None))
    if kind == "default":
        check_known(rope, _ROPE_KNOWN, "rope_parameters of rope_type 'default'")
        return float(theta), None
    if kind == "llama3":
        values = _require(rope, *llama3)
        return float(theta), (*map(float, values[:3]), int(values[3]))
    raise ValueError(f"rope_type {kind!r} is not supported; known: default, llama3")


def _dense_from_json(fields: Mapping[str, Any]) -> ModelConfig:
    model_type = fields["model_type"]
    sliding = frozenset() if model_type == "llama" else _SLIDING
    _refuse(fields, "hidden_act", ("silu",))
    _refuse(fields, "use_sliding_window", (False, None))
    if model_type != "qwen2":
        _refuse(fields, "attention_bias", (False, None))
    _refuse(fields, "mlp_bias", (False, None))
    check_known(fields, _DENSE_KNOWN | sliding, "config.json")
    vocab, d, ff, layers, heads, context, eps = _require(
        fields,
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    types = fields.get("layer_types")
    if types is not None and types != ["full_attention"] * layers:
        raise ValueError(f"layer_types = {types} is not supported; known: full_attention in all")
    kv_heads = fields.get("num_key_value_heads")
    if kv_heads is None and model_type == "llama":
        kv_heads = heads  # files older than grouped heads
    elif kv_heads is None:
        raise ValueError("config.json lacks num_key_value_heads; export the model again")
    if fields.get("head_dim") is None and model_type == "qwen3":
        raise ValueError("config.json lacks head_dim, which Qwen3 does not derive from its width")
    theta, scaling = _rope(fields)
    return ModelConfig(
        vocab_size=vocab,
        d_model=d,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.get("head_dim") or d // heads,
        d_ff=ff,
        max_context=context,
        rope_theta=theta,
        rope_llama3=scaling,
        rms_eps=eps,
        qk_norm=model_type == "qwen3",
        attention_bias=model_type == "qwen2",
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
    )


def _dense_to_json(config: ModelConfig) -> dict[str, Any]:
    if config.qk_norm and config.attention_bias:
        raise ValueError("qk_norm with attention_bias is no family of Hugging Face; choose one")
    model_type = "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_llama3 is not None:
        names = (*_LLAMA3_NAMES, "original_max_position_embeddings")
        rope |= {"rope_type": "llama3"} | dict(zip(names, config.rope_llama3))
    return {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,  # read by libraries older than rope_parameters
        "rope_scaling": None if config.rope_llama3 is None else rope,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        # Which ids open and close a text is the tokenizer's to say.
        "bos_token_id": None,
        "eos_token_id": None,
    }


_DENSE_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o_proj": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}
_DENSE_TOP_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}


def _dense_tensors(config: ModelConfig) -> list[Tensor]:
    shapes = transformer.param_shapes(config)
    top = {
        name: Tensor(_DENSE_TOP_NAMES[name], name, None, shape)
        for name, shape in shapes.items()
        if name != "layers"
    }
    layers = [
        Tensor(
            f"model.layers.{i}.{_DENSE_LAYER_NAMES[name]}",
            f"layers/{name}",
            i,
            shape[1:],
            transposed=name.endswith("_proj"),
        )
        for i in range(config.num_layers)
        for name, shape in shapes["layers"].items()
    ]
    return [top.pop("embed"), *layers, *top.values()]


# Of the towers and the head for several tokens, which the text model does without.
_BESIDE_TEXT = frozenset(
    """text_config vision_config image_token_id video_token_id vision_start_token_id
    vision_end_token_id""".split()
)
# Fields of ours and of config.json that mean the same.
_HYBRID_FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ff": "intermediate_size",
    "max_context": "max_position_embeddings",
    "rms_eps": "rms_norm_eps",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim",
    "linear_value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}

_HYBRID_KNOWN = (
    _NOTES
    | _SHARED
    | set(_HYBRID_FIELDS.values())
    | {"attn_output_gate", "full_attention_interval", "mamba_ssm_dtype"}
    | {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}  # that head is not read
)


def _layer_types(num_layers: int, interval: int) -> list[str]:
    return [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)
    ]


def _hybrid_from_json(fields: Mapping[str, Any]) -> Qwen3_5Config:
    tied = fields.get("tie_word_embeddings")
    if fields["model_type"] == "qwen3_5":
        check_known(fields, _NOTES | _BESIDE_TEXT | {"tie_word_embeddings"}, "config.json")
        (fields,) = _require(fields, "text_config")
        tied = _agreed("tie_word_embeddings", tied, fields.get("tie_word_embeddings"))
    _refuse(fields, "hidden_act", ("silu",))
    _refuse(fields, "attention_bias", (False, None))
    _refuse(fields, "attn_output_gate", (True, None))
    _refuse(fields, "mamba_ssm_dtype", ("float32", None))
    check_known(fields, _HYBRID_KNOWN, "config.json")
    _, types = _require(fields, "rope_parameters", "layer_types")
    # How positions of images are mixed: those of text are all the same.
    rope = _rope_fields(fields, _ROPE_KNOWN | {"mrope_section", "mrope_interleaved"})
    _refuse(rope, "rope_type", ("default",))
    theta, fraction = _require(rope, "rope_theta", "partial_rotary_factor")
    interval = types.index("full_attention") + 1 if "full_attention" in types else 0
    _agreed("full_attention_interval", interval, fields.get("full_attention_interval"))
    if not interval or types != _layer_types(len(types), interval):
        raise ValueError(
            f"layer_types = {types} is not supported; known: full_attention in every n-th layer"
        )
    values = dict(zip(_HYBRID_FIELDS, _require(fields, *_HYBRID_FIELDS.values())))
    return Qwen3_5Config(
        **values,
        rope_theta=float(theta),
        rotary_fraction=fraction,
        full_attention_interval=interval,
        tie_embeddings=bool(tied),
    )


def _hybrid_to_json(config: Qwen3_5Config) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **{theirs: getattr(config, ours) for ours, theirs in _HYBRID_FIELDS.items()},
        "rope_parameters": {
            "rope_theta": config.rope_theta,
            "rope_type": "default",
            "partial_rotary_factor": config.rotary_fraction,
        },
        "layer_types": _layer_types(config.num_layers, config.full_attention_interval),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
    }


_HYBRID_LAYER_NAMES = _DENSE_LAYER_NAMES | {
    "mixer_norm": "input_layernorm.weight",
    "conv1d": "linear_attn.conv1d.weight",
    "dt_bias": "linear_attn.dt_bias",
    "A_log": "linear_attn.A_log",
    "value_norm": "linear_attn.norm.weight",
    "out_proj": "linear_attn.out_proj.weight",
    **{f"in_proj_{x}": f"linear_attn.in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")},
}


def _hybrid_tensors(config: Qwen3_5Config) -> list[Tensor]:
    shapes = qwen3_5.param_shapes(config)
    interval = config.full_attention_interval
    found = [Tensor(_DENSE_TOP_NAMES["embed"], "embed", None, shapes["embed"])]
    for i in range(config.num_layers):
        full = (i + 1) % interval == 0
        kind = "full_layers" if full else "linear_layers"
        found += [
            Tensor(
                f"model.layers.{i}.{_HYBRID_LAYER_NAMES[name]}",
                f"{kind}/{name}",
                i // interval if full else i - i // interval,
                shape[1:],
                transposed="_proj" in name,
                unit_axis=name == "conv1d",
            )
            for name, shape in shapes[kind].items()
        ]
    names = ("final_norm",) if config.tie_embeddings else ("final_norm", "lm_head")
    return found + [Tensor(_DENSE_TOP_NAMES[n], n, None, shapes[n]) for n in names]
