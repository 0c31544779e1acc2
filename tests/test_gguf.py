"""GGUF files in: weights bit by bit, tokenizers, errors before anything is written."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.chat.tokens import CHATML, Chat
from focus.formats import hf
from focus.policy import model as models
from focus.policy.transformer import ModelConfig

llama_cpp = pytest.importorskip("gguf", reason="reads GGUF; pip install -e '.[smollm2]'")
from focus.formats import gguf  # noqa: E402  (needs the package above)

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
TOKENS = CONTROL + BYTES + [merge.replace(" ", "") for merge in MERGES]
TYPES = [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL))
CONFIG = ModelConfig(
    vocab_size=len(TOKENS),
    d_model=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    d_ff=32,
    max_context=64,
    rope_theta=1e5,
    rms_eps=1e-5,
    qk_norm=False,
)
FAMILIES = {
    "llama": dataclasses.replace(CONFIG, tie_embeddings=False),
    "qwen2": dataclasses.replace(CONFIG, attention_bias=True),
    "qwen3": dataclasses.replace(CONFIG, qk_norm=True, head_dim=32),
}


def make_params(config):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: rng.standard_normal(shape, np.float32),
        models.param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def neighbours(rows, num_heads):
    """Rows in the order of llama.cpp: of a head, first half and second half alternate."""
    out = np.empty_like(rows)
    head_dim = len(rows) // num_heads
    for h in range(num_heads):
        for i in range(head_dim // 2):
            out[h * head_dim + 2 * i] = rows[h * head_dim + i]
            out[h * head_dim + 2 * i + 1] = rows[h * head_dim + head_dim // 2 + i]
    return out


def write(path, config, params, architecture, *, quantised=None, edit=None, leave_out=(), **fields):
    """A GGUF file with `fields` over the usual ones; `edit` changes its tensors."""
    tensors = {"token_embd.weight": params["embed"], "output_norm.weight": params["final_norm"]}
    if not config.tie_embeddings:
        tensors["output.weight"] = params["lm_head"]
    names = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "o_proj": "attn_output"}
    names |= {f"{x}_{kind}": f"attn_{x}" for x in "qkv" for kind in ("proj", "bias")}
    names |= {f"{x}_norm": f"attn_{x}_norm" for x in "qk"}
    names |= {f"{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    for ours, stacked in params["layers"].items():
        for i, value in enumerate(stacked):
            value = value.T if ours.endswith("_proj") else value
            if architecture == "llama" and ours in heads:
                value = neighbours(value, heads[ours])
            end = "bias" if ours.endswith("_bias") else "weight"
            tensors[f"blk.{i}.{names[ours]}.{end}"] = value
    if edit:
        edit(tensors)
    writer = llama_cpp.GGUFWriter(path, architecture)
    usual = {
        f"{architecture}.embedding_length": config.d_model,
        f"{architecture}.feed_forward_length": config.d_ff,
        f"{architecture}.block_count": config.num_layers,
        f"{architecture}.attention.head_count": config.num_heads,
        f"{architecture}.attention.head_count_kv": config.num_kv_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.context_length": config.max_context,
        f"{architecture}.rope.freq_base": config.rope_theta,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in (usual | fields).items():
        if name not in leave_out:
            adders.get(type(value), writer.add_array)(name, value)
    for name, value in tensors.items():
        if quantised and value.ndim == 2:
            kind = llama_cpp.GGMLQuantizationType[quantised]
            writer.add_tensor(name, llama_cpp.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", FAMILIES)
def test_weights_and_config_come_through_bit_by_bit(architecture, tmp_path):
    config = FAMILIES[architecture]
    params = make_params(config)
    file = write(tmp_path / "m.gguf", config, params, architecture)
    assert gguf.convert(file, tmp_path / "out", dtype="float32") == config
    loaded_config, loaded = hf.load_checkpoint(tmp_path / "out")
    assert loaded_config == config
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(loaded))


def q4_1(blocks):
    """Values of blocks of 32: half-precision scale and offset, then 16 bytes, low nibbles first."""
    scale, offset = blocks[..., :4].copy().view(np.float16).astype(np.float32).swapaxes(0, -1)
    nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)
    return (scale.T[..., None] * nibbles + offset.T[..., None]).reshape(len(blocks), -1)


def test_quantised_weights_have_the_values_that_their_blocks_say(tmp_path):
    config = FAMILIES["llama"]
    params = make_params(config)
    file = write(tmp_path / "m.gguf", config, params, "llama", quantised="Q4_1")
    gguf.convert(file, tmp_path / "out", dtype="float32")
    _, loaded = hf.load_checkpoint(tmp_path / "out")
    raw = {t.name: np.array(t.data) for t in llama_cpp.GGUFReader(file).tensors}
    blocks = raw["blk.1.ffn_gate.weight"]
    want = q4_1(blocks.reshape(len(blocks), -1, 20))
    np.testing.assert_array_equal(loaded["layers"]["gate_proj"][1], want.T)
    error = np.abs(np.asarray(loaded["layers"]["q_proj"]) - params["layers"]["q_proj"])
    assert 0 < error.max() < 0.5  # a fifteenth of the range of a block, not rows mixed up


def converted_tokenizer(tmp_path, **fields):
    file = write(tmp_path / "m.gguf", CONFIG, make_params(CONFIG), "llama", **fields)
    gguf.convert(file, tmp_path / "out", dtype="bfloat16")
    read = lambda name: json.loads((tmp_path / "out" / name).read_text())  # noqa: E731
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    return tokenizer, read("tokenizer_config.json"), read("generation_config.json")


def test_the_tokenizer_splits_merges_and_knows_its_special_tokens(tmp_path):
    tokenizer, config, generation = converted_tokenizer(tmp_path)
    assert tokenizer.encode("<|im_start|>hello w12").tokens == [
        "<|im_start|>",
        "hello",
        "Ġw",
        "1",  # digits are cut apart before merges are looked at
        "2",
    ]
    assert tokenizer.encode("<|im_end|>").ids == [2]
    text = "hello wörld 12 \n\t<b>日本 🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert config["chat_template"] == "{{ messages }}"
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    # The file pads with its end of turn; here nothing that ends a turn may be padding.
    assert (config["pad_token"], generation["pad_token_id"]) == ("<|endoftext|>", 0)
    assert generation["eos_token_id"] == 2
    chat = Chat.load(tmp_path / "out", CHATML)
    assert chat.encode_start("", "he")[:1] == (1,)
    assert (chat.pad_id, chat.end_of_turn_id) == (0, 2)


def test_a_pad_token_of_its_own_stays(tmp_path):
    fields = {"tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    _, config, _ = converted_tokenizer(tmp_path, **fields)
    assert (config["pad_token"], config["eos_token"]) == ("<|endoftext|>", "<|im_start|>")


@pytest.fixture(scope="module")
def qwen2_pieces(tmp_path_factory):
    tokenizer, _, _ = converted_tokenizer(
        tmp_path_factory.mktemp("qwen2"), **{"tokenizer.ggml.pre": "qwen2"}
    )
    return tokenizer


@settings(deadline=None, max_examples=30)
@given(st.text(alphabet="aZé'sll 12\n\r\t.,_-日🙂\u0301", max_size=30))
def test_words_of_qwen2_are_those_of_its_own_tokenizer(qwen2_pieces, text):
    qwen2 = pytest.importorskip(
        "transformers.models.qwen2.tokenization_qwen2", reason="parity needs the dev extra"
    )
    pre = tokenizers.pre_tokenizers
    theirs = pre.Sequence(
        [
            pre.Split(tokenizers.Regex(qwen2.PRETOKENIZE_REGEX), "isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert qwen2_pieces.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.parametrize(
    "architecture, options, message",
    [
        ("mamba", {}, "architecture 'mamba' is not converted; known are llama, qwen2, qwen3"),
        ("llama", {"tokenizer.ggml.pre": "dbrx"}, "pre-tokenizer 'dbrx' is not converted.*smollm"),
        ("llama", {"tokenizer.ggml.model": "llama"}, "tokenizer 'llama'"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "scaled rotary embeddings .yarn."),
        ("llama", {"llama.rope.dimension_count": 8}, "rope.dimension_count = 8 differs"),
        ("llama", {"llama.logit_scale": 8}, "not understood: llama.logit_scale = 8"),
        ("llama", {"llama.feed_forward_length": 33}, r"ffn_gate.weight has shape \(64, 32\)"),
        ("llama", {"leave_out": ["llama.rope.freq_base"]}, r"lacks \['llama.rope.freq_base'\]"),
        (
            "llama",
            {"edit": lambda t: t.pop("blk.1.ffn_up.weight")},
            "lacks the tensor blk.1.ffn_up.weight",
        ),
        (
            "llama",
            {"edit": lambda t: t.update({"blk.0.ffn_gate_inp.weight": np.zeros(2, np.float32)})},
            "blk.0.ffn_gate_inp.weight.* not of architecture 'llama'",
        ),
        (
            "llama",
            {"edit": lambda t: t.update({"rope_freqs.weight": np.ones(8, np.float32)})},
            "scaled rotary embeddings",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_before_anything_is_written(
    architecture, options, message, tmp_path
):
    file = write(tmp_path / "m.gguf", CONFIG, make_params(CONFIG), architecture, **options)
    with pytest.raises(ValueError, match=message):
        gguf.convert(file, tmp_path / "out", dtype="float32")
    assert not (tmp_path / "out").exists()


def test_damaged_and_missing_files(tmp_path):
    file = write(tmp_path / "m.gguf", CONFIG, make_params(CONFIG), "llama")
    with pytest.raises(ValueError, match="unknown dtype 'int4'"):
        gguf.convert(file, tmp_path / "out", dtype="int4")
    with pytest.raises(ValueError, match="no file .*nowhere.gguf"):
        gguf.convert(tmp_path / "nowhere.gguf", tmp_path / "out", dtype="float32")
    whole = file.read_bytes()
    for part in (whole[:-1000], whole[:100], b"no GGUF at all, whatever its name"):
        file.write_bytes(part)
        with pytest.raises(ValueError, match="cut, damaged or no GGUF"):
            gguf.convert(file, tmp_path / "out", dtype="float32")
    assert not (tmp_path / "out").exists()


def test_files_in_packages(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no package 'no_such_package'"):
        gguf.find_in_package("no_such_package")
    package = tmp_path / "carrier"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="holds 0 GGUF files"):
        gguf.find_in_package("carrier")
    (package / "m.gguf").touch()
    assert gguf.find_in_package("carrier") == package / "m.gguf"
