"""Weights in and out: bitwise round trips, parity with transformers, errors before allocation."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from families import FAMILIES, SMALL, make_params
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processes import run_program

from focus.formats import hf, hf_config
from focus.policy import model as models
from focus.policy import transformer

each_family = pytest.mark.parametrize("family", sorted(FAMILIES))


def assert_equal_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def files_of(path):
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())}


@each_family
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_file_bytes", [2**30, 4000])
def test_save_load_save_is_equal_byte_by_byte(family, dtype, max_file_bytes, tmp_path):
    config, params = FAMILIES[family], make_params(FAMILIES[family])
    hf.save_checkpoint(tmp_path / "a", config, params, dtype=dtype, max_file_bytes=max_file_bytes)
    loaded_config, loaded = hf.load_checkpoint(tmp_path / "a", dtype=dtype)
    assert loaded_config == dataclasses.replace(config, dtype=dtype)
    assert_equal_bits(loaded, jax.tree.map(lambda x: x.astype(dtype), params))
    hf.save_checkpoint(
        tmp_path / "b", loaded_config, loaded, dtype=dtype, max_file_bytes=max_file_bytes
    )
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    single = "model.safetensors" in files_of(tmp_path / "a")
    assert single == (max_file_bytes > 4000)
    for file in tmp_path.glob("a/*.safetensors"):
        tensors = safetensors.numpy.load_file(file)  # the library's own reader agrees
        size = sum(x.nbytes for x in tensors.values())
        assert size <= max_file_bytes or len(tensors) == 1
        assert ("lm_head.weight" in tensors) <= (not config.tie_embeddings)


@each_family
def test_transformers_reads_our_export_and_agrees(family, tmp_path):
    torch = pytest.importorskip("torch", reason="parity needs the dev extra")
    transformers = pytest.importorskip("transformers", reason="parity needs the dev extra")
    config, params = FAMILIES[family], make_params(FAMILIES[family])
    hf.save_checkpoint(tmp_path / "ours", config, params, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 40))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    hidden = models.hidden_states(config, params, jnp.asarray(tokens, jnp.int32))
    ours = models.unembed(config, params, hidden)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)

    model.save_pretrained(tmp_path / "theirs")
    back_config, back = hf.load_checkpoint(tmp_path / "theirs")
    assert back_config == config
    assert_equal_bits(back, params)


def shardings_of(config, devices):
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )
    specs = {1: (), 2: ("tensor", "fsdp"), 3: (None, "fsdp", "tensor")}

    def place(shape):
        rank = len(shape)
        divisible = rank > 1 and all(n % 2 == 0 for n in shape[-2:]) and min(shape[-2:]) > 2
        return NamedSharding(mesh, PartitionSpec(*specs[rank]) if divisible else PartitionSpec())

    shapes = transformer.param_shapes(config)
    return jax.tree.map(place, shapes, is_leaf=lambda x: isinstance(x, tuple))


def check_slices(family, tmp_path):
    """Loads onto four devices and counts what each of them reads; runs in its own process."""
    config, params = FAMILIES[family], make_params(FAMILIES[family])
    hf.save_checkpoint(tmp_path / "a", config, params, dtype="float32")
    read = {}
    original = hf_config.Tensor.read

    def spy(self, source, index, dtype):
        value = original(self, source, index, dtype)
        read.setdefault(self.name, []).append(value.size)
        return value

    hf_config.Tensor.read = spy
    shardings = shardings_of(config, jax.devices()[:4])
    _, loaded = hf.load_checkpoint(tmp_path / "a", shardings=shardings)
    assert_equal_bits(loaded, params)
    for tensor in hf_config.tensors(config):
        sharding = hf._sharding_of(shardings, tensor.parameter)
        parts = 1 if sharding.is_fully_replicated else 4
        assert max(read[tensor.name]) == np.prod(tensor.shape) // parts
    assert jax.tree.map(lambda x: x.sharding, loaded) == shardings
    hf.save_checkpoint(tmp_path / "b", config, loaded, dtype="float32")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_each_device_reads_its_own_slices(tmp_path):
    program = (
        "import pathlib, sys, test_hf\n"
        "for family in ('qwen2', 'llama'):\n"
        "    test_hf.check_slices(family, pathlib.Path(sys.argv[1]) / family)\n"
    )
    run_program(program, tmp_path, devices=4)


def test_an_existing_directory_keeps_what_is_no_weight(tmp_path):
    config, params = FAMILIES["llama"], make_params(FAMILIES["llama"])
    hf.save_checkpoint(tmp_path / "a", config, params, dtype="float32", max_file_bytes=4000)
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    hf.save_checkpoint(tmp_path / "a", config, make_params(config, 7), dtype="float32")
    assert sorted(files_of(tmp_path / "a")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    _, loaded = hf.load_checkpoint(tmp_path / "a")
    assert_equal_bits(loaded, make_params(config, 7))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.fixture
def saved(tmp_path):
    hf.save_checkpoint(tmp_path / "m", SMALL, make_params(SMALL), dtype="float32")
    return tmp_path / "m"


def edit_config(path, **fields):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(path, change):
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"model_type": "mamba"},
            "unknown architecture 'mamba'; known are qwen2, qwen3, llama, qwen3_5_text, qwen3_5",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        (
            {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 1.0, "rope_type": "yarn"}},
            "rope_type 'yarn'",
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 1.0, "mrope_section": [1]}},
            "mrope_section",
        ),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"model_type": "qwen3_5_text", "quantization_config": {"bits": 4}}, "quantised"),
        (
            {"model_type": "qwen3_5", "text_config": {"quantization_config": {"bits": 4}}},
            "quantised",
        ),
        ({"head_dim": None}, "head_dim"),
        ({"num_key_value_heads": None}, "lacks num_key_value_heads"),
        (
            {"model_type": "qwen2", "num_key_value_heads": None},
            "lacks num_key_value_heads",
        ),
        ({"hidden_size": None}, r"lacks \['hidden_size'\]"),
        ({"intermediate_size": 25}, r"gate_proj.weight .* \(24, 16\), .* \(25, 16\)"),
        ({"num_hidden_layers": 3}, r"missing \['model.layers.2.input_layernorm.weight'.* more"),
        ({"num_hidden_layers": 1}, r"unexpected \['model.layers.1"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_before_anything_is_read(
    saved, fields, message, monkeypatch
):
    monkeypatch.setattr(hf_config.Tensor, "read", None)
    edit_config(saved, **fields)
    with pytest.raises(ValueError, match=message):
        hf.load_checkpoint(saved)


CHANGES_THE_FUNCTION = [
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ({"rope_theta": 5e5}, r"rope_theta is given twice and differently, .*500000.0"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is given twice and diff"),
    ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_type 'dynamic'"),
    ({"rope_parameters": {"rope_type": "default", "factor": 8.0}}, "'default' .*factor = 8.0"),
    ({"rope_parameters": {"rope_type": "default", "beta": 8.0}}, "rope_parameters.*beta = 8.0"),
    ({"layer_types": ["full_attention"]}, "layer_types = .* known: full_attention in all"),
    ({"layer_types": ["chunked_attention"] * 2}, "layer_types"),
    ({"logit_scale": 0.1, "no_rope_layers": [1, 0]}, r"logit_scale = 0.1, no_rope_layers = \[1, 0"),
    ({"query_pre_attn_scalar": 64}, "not understood: query_pre_attn_scalar = 64; .* Take out"),
]


@pytest.mark.parametrize("fields, message", CHANGES_THE_FUNCTION)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_pitfall_37_what_changes_the_function_and_is_not_understood_is_refused(
    family, fields, message, tmp_path
):
    config = FAMILIES[family]
    hf.save_checkpoint(tmp_path, config, make_params(config), dtype="float32")
    edit_config(tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        hf.read_config(tmp_path)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"full_attention_interval": 3}, "full_attention_interval .* 2 and 3"),
        ({"rope_theta": 5.0}, "rope_theta is given twice"),
        ({"num_experts": 8}, "num_experts = 8"),
    ],
)
def test_pitfall_37_holds_of_the_hybrid_family(fields, message, tmp_path):
    config = FAMILIES["qwen3_5"]
    hf.save_checkpoint(tmp_path, config, make_params(config), dtype="float32")
    text = json.loads((tmp_path / "config.json").read_text())
    for whole in (
        text | fields,
        {"model_type": "qwen3_5", "vision_config": {}, "text_config": text | fields},
    ):
        (tmp_path / "config.json").write_text(json.dumps(whole))
        with pytest.raises(ValueError, match=message):
            hf.read_config(tmp_path)
    nested = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    with pytest.raises(ValueError, match="tie_word_embeddings is given twice"):
        hf.read_config(tmp_path)


def test_fields_that_change_nothing_and_those_that_are_off_are_read_over(tmp_path):
    """Both spellings of rotary embeddings, notes of libraries, features that are off."""
    config = FAMILIES["llama3"]
    hf.save_checkpoint(tmp_path, config, make_params(config), dtype="float32")
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    rope["type"] = rope.pop("rope_type")
    edit_config(
        tmp_path, rope_scaling=rope, pretraining_tp=1, use_cache=True, rope_interleaved=False,
        is_llama_config=True, pad_token_id=2, neftune=None, partial_rotary_factor=1.0,
        attention_dropout=0.0, some_list=[], **{"transformers.js_config": {"dtype": "q4"}},
    )  # fmt: skip
    assert hf.read_config(tmp_path) == config


def test_a_text_model_beside_a_vision_tower(tmp_path):
    config, params = FAMILIES["qwen3_5"], make_params(FAMILIES["qwen3_5"])
    hf.save_checkpoint(tmp_path, config, params, dtype="float32")
    fields = json.loads((tmp_path / "config.json").read_text())
    nested = {"model_type": "qwen3_5", "text_config": fields}
    (tmp_path / "config.json").write_text(json.dumps(nested))

    def nest(tensors):
        for name in [n for n in tensors if n.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.patch_embed.proj.weight"] = np.zeros(2, np.float32)
        tensors["mtp.fc.weight"] = np.zeros(2, np.float32)

    edit_tensors(tmp_path, nest)
    loaded_config, loaded = hf.load_checkpoint(tmp_path)
    assert loaded_config == config
    assert_equal_bits(loaded, params)
    twice = {"model.norm.weight": np.ones(16, np.float32)}
    edit_tensors(tmp_path, lambda t: t.update(twice))
    with pytest.raises(ValueError, match="holds model.norm.weight twice"):
        hf.load_checkpoint(tmp_path)


def test_llama_without_grouped_heads_needs_no_field_for_them(tmp_path):
    config = dataclasses.replace(FAMILIES["llama"], num_kv_heads=4)
    hf.save_checkpoint(tmp_path, config, make_params(config), dtype="float32")
    edit_config(tmp_path, num_key_value_heads=None)
    assert hf.read_config(tmp_path) == config


def test_missing_extra_and_tied_tensors(saved):
    edit_tensors(saved, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    hf.load_checkpoint(saved)  # a tied copy is tolerated
    edit_tensors(saved, lambda t: t.update({"lm_head.weight": t["lm_head.weight"][::-1].copy()}))
    with pytest.raises(ValueError, match="lm_head.weight .* differs from model.embed_tokens"):
        hf.load_checkpoint(saved)
    edit_tensors(saved, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    edit_tensors(saved, lambda t: t.update({"visual.patch": np.zeros(2, np.float32)}))
    with pytest.raises(ValueError, match=r"missing none, unexpected \['visual.patch'\]"):
        hf.load_checkpoint(saved)
    edit_tensors(saved, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\]"):
        hf.load_checkpoint(saved)


def test_damaged_files(saved, tmp_path):
    with pytest.raises(ValueError, match="unknown dtype 'int8'.*bfloat16"):
        hf.load_checkpoint(saved, dtype="int8")
    with pytest.raises(ValueError, match="unknown dtype 'fp32'"):
        hf.save_checkpoint(tmp_path / "x", SMALL, make_params(SMALL), dtype="fp32")
    file = saved / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="cut or damaged"):
        hf.load_checkpoint(saved)
    file.unlink()
    with pytest.raises(ValueError, match="no model.safetensors"):
        hf.load_checkpoint(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read .*config.json"):
        hf.load_checkpoint(saved)
    with pytest.raises(ValueError, match="no config.json"):
        hf.load_checkpoint(tmp_path / "nowhere")
    bad = make_params(SMALL) | {"extra": np.zeros(1)}
    with pytest.raises(ValueError, match=r"unexpected \['extra'\]"):
        hf.save_checkpoint(tmp_path / "x", SMALL, bad, dtype="float32")
    assert not (tmp_path / "x").exists()
