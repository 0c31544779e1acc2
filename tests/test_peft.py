"""Adapters in the files of PEFT: layout, the library itself, and what is refused."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from adapters import (
    DENSE,
    FAMILIES,
    LORA,
    assert_equal_bits,
    each_family,
    hidden,
    make_adapters,
    tokens_of,
)
from families import FAMILIES as ALL
from families import make_params

from focus.formats import hf, peft
from focus.policy import lora
from focus.policy import model as models
from focus.policy.lora import LoraConfig


@each_family
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_load_save_is_equal_byte_by_byte(family, dtype, tmp_path):
    config, adapters = FAMILIES[family], make_adapters(FAMILIES[family])
    peft.save_adapter(tmp_path / "a", config, LORA, adapters, dtype=dtype)
    found, loaded = peft.load_adapter(tmp_path / "a", config, dtype=dtype)
    assert found == dataclasses.replace(LORA, targets=lora.projections(config))
    assert_equal_bits(loaded, jax.tree.map(lambda x: x.astype(dtype), adapters))
    peft.save_adapter(tmp_path / "b", config, found, loaded, dtype=dtype)
    peft.save_adapter(tmp_path / "b", config, found, loaded, dtype=dtype)  # in place of the old one
    files = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}
    assert files.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}


def test_names_and_layout_are_those_of_peft(tmp_path):
    few = LoraConfig(2, 5.0, ("v_proj", "q_proj"))
    adapters = make_adapters(DENSE, few)
    peft.save_adapter(tmp_path, DENSE, few, adapters, base_model="some/model")
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert tensors.keys() == {
        f"base_model.model.model.layers.{i}.self_attn.{name}_proj.lora_{factor}.weight"
        for i, name, factor in itertools.product((0, 1), "qv", "AB")
    }
    module = "base_model.model.model.layers.1.self_attn.q_proj"
    adapter = adapters["layers"]["q_proj"]
    np.testing.assert_array_equal(tensors[f"{module}.lora_A.weight"], adapter.a[1].T)
    np.testing.assert_array_equal(tensors[f"{module}.lora_B.weight"], adapter.b[1].T)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert fields["peft_type"] == "LORA" and fields["base_model_name_or_path"] == "some/model"
    assert (fields["r"], fields["lora_alpha"]) == (2, 5)
    assert fields["target_modules"] == ["q_proj", "v_proj"]


PEFT_FAMILIES = FAMILIES | {name: ALL[name] for name in ("qwen2", "llama")}


@pytest.mark.parametrize("family", PEFT_FAMILIES)
def test_peft_reads_our_adapters_and_we_read_its(family, tmp_path):
    torch = pytest.importorskip("torch", reason="parity needs the dev extra")
    transformers = pytest.importorskip("transformers", reason="parity needs the dev extra")
    theirs = pytest.importorskip("peft", reason="parity needs the dev extra")
    config = PEFT_FAMILIES[family]
    params, adapters, tokens = make_params(config), make_adapters(config), tokens_of(5, 2, 20)
    hf.save_checkpoint(tmp_path / "base", config, params, dtype="float32")
    peft.save_adapter(tmp_path / "ours", config, LORA, adapters)

    def load_base():
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    def check(model, adapters):
        with torch.no_grad():
            want = model.eval()(torch.tensor(np.asarray(tokens))).logits.numpy()
        got = hidden(config, lora.attach(params, adapters), tokens)
        got = models.unembed(config, params, got)
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())

    model = theirs.PeftModel.from_pretrained(load_base(), tmp_path / "ours")
    check(model, adapters)
    # Back again: not a bit is lost, and the files are the same.
    model.save_pretrained(tmp_path / "again")
    assert_equal_bits(peft.load_adapter(tmp_path / "again", config)[1], adapters)
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    # And one that PEFT has made.
    torch.manual_seed(0)
    few = theirs.LoraConfig(
        r=2, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    for setting, targets in (
        (few, ("q_proj", "down_proj")),
        (dataclasses.replace(few, target_modules="all-linear"), lora.projections(config)),
    ):
        model = theirs.get_peft_model(load_base(), setting)
        model.save_pretrained(tmp_path / "theirs")
        found, loaded = peft.load_adapter(tmp_path / "theirs", config)
        assert (found.rank, found.scale, set(found.targets)) == (2, 2.5, set(targets))
        check(model, loaded)


@pytest.fixture
def saved(tmp_path):
    peft.save_adapter(tmp_path / "adapter", DENSE, LORA, make_adapters(DENSE))
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, r"peft_type = 'LOHA' is not supported; known: \['LORA'\]"),
        ({"use_dora": True}, "use_dora = True is not supported.*[Mm]erge"),
        ({"use_rslora": True}, "use_rslora = True is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern = .* is not supported"),
        ({"use_newest": True, "scale_by": 2}, "not understood: scale_by = 2, use_newest = True"),
        ({"bias": "all"}, "bias = 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .* is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not supported"),
        ({"r": None}, r"lacks \['r'\]"),
        (
            {"r": 2},
            r"lora_A.weight .* has shape \(3, 16\), and this base asks for \(2, 16\)",
        ),
    ],
)
def test_adapters_that_compute_something_else_are_refused(saved, fields, message):
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        peft.load_adapter(saved, DENSE)


def test_files_that_do_not_fit_are_refused(saved, tmp_path):
    file = saved / "adapter_model.safetensors"
    wider = dataclasses.replace(DENSE, d_ff=32)
    with pytest.raises(ValueError, match=r"gate_proj.* belongs to another base"):
        peft.load_adapter(saved, wider)
    with pytest.raises(ValueError, match=r"missing \['.*layers.2.*in all layers or in none"):
        peft.load_adapter(saved, dataclasses.replace(DENSE, num_layers=3))
    tensors = safetensors.numpy.load_file(file)
    extra = {"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((3, 48), np.float32)}
    safetensors.numpy.save_file(tensors | extra, file)
    with pytest.raises(ValueError, match=r"unexpected \['.*lora_embedding_A'\]"):
        peft.load_adapter(saved, DENSE)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="cut or damaged"):
        peft.load_adapter(saved, DENSE)
    file.unlink()
    with pytest.raises(ValueError, match="no adapter_model.safetensors"):
        peft.load_adapter(saved, DENSE)
    with pytest.raises(ValueError, match="no adapter_config.json"):
        peft.load_adapter(tmp_path / "nowhere", DENSE)
    with pytest.raises(ValueError, match="adapters are not those of the config"):
        peft.save_adapter(tmp_path / "x", wider, LORA, make_adapters(DENSE))
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        peft.save_adapter(tmp_path / "x", DENSE, LORA, make_adapters(DENSE), dtype="int8")
    assert not (tmp_path / "x").exists()
