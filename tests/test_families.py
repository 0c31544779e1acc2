"""Every family against Hugging Face transformers on tiny random checkpoints, and against itself."""

import dataclasses

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from focus.formats import hf
from focus.policy import model as models
from focus.policy import token_logprobs

torch = pytest.importorskip("torch", reason="parity with Hugging Face; pip install -e '.[dev]'")
transformers = pytest.importorskip("transformers", reason="parity; pip install -e '.[dev]'")

VOCAB = 61
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, num_hidden_layers=3),
    "qwen3": lambda: transformers.Qwen3Config(
        **SIZES, num_hidden_layers=3, head_dim=12, tie_word_embeddings=True
    ),
    "llama3": lambda: transformers.LlamaConfig(
        **SIZES, num_hidden_layers=3, rope_parameters=LLAMA3
    ),
    "smollm2": lambda: transformers.LlamaConfig(
        **SIZES, num_hidden_layers=3, tie_word_embeddings=True
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
        **SIZES,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """A Hugging Face model, and our config and parameters read from its files."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param]()).eval()
    with torch.no_grad():  # vectors at their initial 0 or 1 would hide mistakes
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.2 if p.ndim == 1 else 0.04))
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return model, *hf.load_checkpoint(path)


def tokens_of(seed, *shape):
    return np.random.default_rng(seed).integers(0, VOCAB, shape)


hidden = jax.jit(models.hidden_states, static_argnums=0)
extend = jax.jit(models.extend, static_argnums=0)


def test_logits_and_log_probs_are_those_of_transformers(pair):
    model, config, params = pair
    tokens = tokens_of(0, 2, 150)
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits
    got = models.unembed(config, params, hidden(config, params, jnp.asarray(tokens)))
    np.testing.assert_allclose(got, want.numpy(), atol=1e-4)
    logp = torch.log_softmax(want / 0.7, -1)[:, :-1]
    want = logp.gather(-1, torch.tensor(tokens)[:, 1:, None])[..., 0]
    got = token_logprobs(config, params, jnp.asarray(tokens), temperature=0.7)
    np.testing.assert_allclose(got[:, 1:], want.numpy(), atol=1e-4)
    assert not got[:, 0].any()


def test_gradients_are_those_of_transformers(pair, tmp_path):
    model, config, params = pair
    tokens = tokens_of(1, 2, 70)
    model.zero_grad()
    model(torch.tensor(tokens), labels=torch.tensor(tokens)).loss.backward()
    # Exchanged through files as if they were weights, so that names and layout are ours.
    gradient = type(model)(model.config)
    gradient.load_state_dict({n: p.grad for n, p in model.named_parameters()}, strict=False)
    gradient.save_pretrained(tmp_path)
    want = hf.load_checkpoint(tmp_path)[1]

    def loss(params):
        return -token_logprobs(config, params, jnp.asarray(tokens))[:, 1:].mean()

    got = jax.jit(jax.grad(loss))(params)

    def close(a, b):
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b) + 1e-7

    jax.tree.map(close, got, want)


def test_decoding_and_padded_prefill_equal_the_whole_row(pair):
    _, config, params = pair
    tokens = tokens_of(2, 2, 90)
    want = hidden(config, params, jnp.asarray(tokens))
    layers, cache = models.layer_list(config, params), models.init_cache(config, 2, 96)
    counts = np.array([70, 66])
    prompt = np.where(np.arange(72) < counts[:, None], tokens[:, :72], 7)
    kwargs = {"counts": jnp.asarray(counts)} if models.is_recurrent(config) else {}
    got, cache = extend(
        config, params, layers, jnp.asarray(prompt), jnp.zeros(2, int), cache, **kwargs
    )
    for row, count in enumerate(counts):
        np.testing.assert_allclose(got[row, :count], want[row, :count], atol=1e-4)
    for step in range(20):
        at = counts + step
        token = jnp.asarray(tokens[[0, 1], at][:, None])
        got, cache = extend(config, params, layers, token, jnp.asarray(at), cache)
        np.testing.assert_allclose(got[:, 0], want[[0, 1], at], atol=1e-4)


def test_packed_rows_equal_separate_ones_and_padding_changes_nothing(pair):
    _, config, params = pair
    lengths = (37, 5, 1, 66, 11)  # borders in the middle of a chunk, and a chunk with three
    tokens = tokens_of(3, 1, sum(lengths) + 8)
    segment_ids = np.repeat([*range(len(lengths)), -1], [*lengths, 8])[None]
    score = jax.jit(token_logprobs, static_argnums=0)
    got = score(config, params, jnp.asarray(tokens), segment_ids=jnp.asarray(segment_ids))
    start = 0
    for length in lengths:
        part = jnp.asarray(tokens[:, start : start + length])
        np.testing.assert_allclose(
            got[:, start : start + length], token_logprobs(config, params, part), atol=1e-4
        )
        start += length
    assert not got[:, start:].any()
    other = np.where(segment_ids < 0, (tokens + 1) % VOCAB, tokens)
    again = score(config, params, jnp.asarray(other), segment_ids=jnp.asarray(segment_ids))
    np.testing.assert_array_equal(got, again)


def test_backends_and_rematerialisation_change_nothing(pair):
    _, config, params = pair
    tokens = jnp.asarray(tokens_of(4, 2, 70))
    segment_ids = jnp.asarray(np.repeat([0, 1, -1], [40, 22, 8])[None].repeat(2, 0))

    def gradient(config):
        def loss(params):
            return token_logprobs(config, params, tokens, segment_ids=segment_ids).sum()

        return jax.jit(jax.value_and_grad(loss))(params)

    value, want = gradient(config)
    for change in (
        {"attention": "blockwise"},
        {"remat": "full"},
        {"remat": "dots"},
        {"remat": "chunks"},
        {"scan_unroll": 2},
    ):
        same, got = gradient(dataclasses.replace(config, **change))
        np.testing.assert_allclose(same, value, rtol=1e-5)

        def close(a, b):
            assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b) + 1e-6

        jax.tree.map(close, got, want)


# Rounding to bfloat16 would show in these; products, and what is added to them, may be rounded.
IN_FLOAT32 = {"exp", "log", "log1p", "rsqrt", "reduce_sum", "reduce_max", "cumsum", "sin", "cos"}


def equations(jaxpr):
    """All of a program's equations, those of loops and calls included."""
    for equation in jaxpr.eqns:
        yield equation
        is_program = lambda x: hasattr(x, "eqns")  # noqa: E731
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from equations(inner)


def test_bfloat16_rounds_products_and_computes_the_rest_in_float32(pair):
    _, config, params = pair
    tokens = jnp.asarray(tokens_of(5, 4, 64))
    low = dataclasses.replace(config, dtype="bfloat16")
    traced = jax.make_jaxpr(lambda p: token_logprobs(low, p, tokens))(params)
    seen, products = set(), set()
    for equation in equations(traced.jaxpr):
        kinds = {v.aval.dtype.name for v in equation.invars if v.aval.dtype.kind in "fV"}
        if equation.primitive.name in IN_FLOAT32 and kinds:
            assert kinds == {"float32"}, equation
            seen.add(equation.primitive.name)
        if equation.primitive.name == "dot_general":
            products |= kinds
            if VOCAB in equation.outvars[0].aval.shape:
                assert equation.outvars[0].aval.dtype == jnp.float32
    assert {"exp", "log", "rsqrt", "reduce_sum", "reduce_max", "sin"} <= seen
    assert "bfloat16" in products

    # 8 bits of mantissa, a dozen products deep: log-probs move by hundredths, without a bias.
    score = jax.jit(token_logprobs, static_argnums=0)
    got, want = score(low, params, tokens), score(config, params, tokens)
    assert got.dtype == jnp.float32
    moved = np.asarray(got - want)[:, 1:]
    assert 0 < np.sqrt(np.square(moved).mean()) < 0.05
    assert np.abs(moved).max() < 0.3 and abs(moved.mean()) < 0.01

    def loss(params, config):
        return -token_logprobs(config, params, tokens)[:, 1:].mean()

    low_grad, grad = (jax.jit(jax.grad(loss), static_argnums=1)(params, c) for c in (low, config))
    got, want = (jax.flatten_util.ravel_pytree(g)[0] for g in (low_grad, grad))
    assert got.dtype == jnp.float32
    assert jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)


def test_prefix_trees_are_refused_where_they_would_be_read_wrongly(pair):
    _, config, params = pair
    tokens = jnp.asarray(tokens_of(6, 1, 128))
    tree = {"node_id": jnp.zeros((1, 128), int), "visible_until": jnp.full((1, 1, 1), 128)}
    if models.is_recurrent(config):
        with pytest.raises(ValueError, match="recurrent layers know documents .* share_prefixes"):
            models.hidden_states(config, params, tokens, **tree)
    config = dataclasses.replace(config, attention="splash")
    with pytest.raises(ValueError, match="documents side by side .* share_prefixes=False"):
        models.hidden_states(config, params, tokens, **tree)


def test_parameters_have_the_declared_shapes_and_axes(pair):
    _, config, params = pair
    shapes, axes = models.param_shapes(config), models.logical_axes(config)
    assert jax.tree.map(jnp.shape, params) == shapes
    drawn = models.init_params(config, jax.random.key(0))
    assert jax.tree.map(jnp.shape, drawn) == shapes
    leaves = jax.tree.leaves(params)
    assert models.num_params(config) == sum(leaf.size for leaf in leaves)
    is_tuple = lambda x: isinstance(x, tuple)  # noqa: E731
    jax.tree.map(
        lambda s, a: len(s) == len(a) or pytest.fail(f"{s} {a}"), shapes, axes, is_leaf=is_tuple
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remat": "some"}, "remat must be one of none, full, chunks, dots; got 'some'"),
        ({"attention": "flash"}, "attention must be one of .*; got 'flash'"),
        ({"num_heads": 3}, "num_heads 3 must be a multiple of num_kv_heads 2"),
    ],
)
def test_impossible_shapes_are_refused(pair, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(pair[1], **change)
