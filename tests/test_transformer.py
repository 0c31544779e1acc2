"""The transformer against a slow NumPy reference, and four ways to compute the same numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from focus.policy.model import num_params
from focus.policy.transformer import (
    ModelConfig,
    extend,
    hidden_states,
    init_cache,
    init_params,
    layer_list,
    logical_axes,
    param_shapes,
    unembed,
)

# Tiny shapes that each run once: almost all the time goes into compiling, so compile plainly.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
forward = jit(hidden_states, static_argnums=0)
extend_cache = jit(extend, static_argnums=0)

QWEN3 = ModelConfig(
    vocab_size=23,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    d_ff=20,
    max_context=32,
    rope_theta=1e4,
)
LLAMA = dataclasses.replace(QWEN3, qk_norm=False, tie_embeddings=False)
QWEN2 = dataclasses.replace(QWEN3, qk_norm=False, attention_bias=True)
each_family = pytest.mark.parametrize(
    "config", [QWEN3, QWEN2, LLAMA], ids=["qwen3", "qwen2", "llama"]
)


def random_params(config, seed=0):
    """Every tensor drawn at random, norms and biases too, so that none can be left out."""
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        values = 0.3 * rng.standard_normal(shape).astype(np.float32)
        return values + path[-1].key.endswith("norm")

    shapes = param_shapes(config)
    return jax.tree_util.tree_map_with_path(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def random_tokens(*shape, seed=1):
    rng = np.random.default_rng(seed)
    return rng.integers(0, QWEN3.vocab_size, shape).astype(np.int32)


def numpy_forward(config, params, tokens):
    """Logits of one sequence [L] in float64, one head and one position at a time."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    length, half = len(tokens), config.head_dim // 2
    group = config.num_heads // config.num_kv_heads

    def norm(x, w):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.rms_eps) * w

    def rotate(x, position):
        angle = position * config.rope_theta ** (-np.arange(half) / half)
        a, b = x[:half], x[half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos])

    x = params["embed"][tokens]
    for i in range(config.num_layers):
        w = {name: p[i] for name, p in params["layers"].items()}
        h = norm(x, w["attn_norm"])
        q, k, v = (h @ w[f"{n}_proj"] + w.get(f"{n}_bias", 0.0) for n in "qkv")
        q = q.reshape(length, config.num_heads, config.head_dim)
        k = k.reshape(length, config.num_kv_heads, config.head_dim)
        v = v.reshape(length, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
        q = np.stack([[rotate(q[t, n], t) for n in range(config.num_heads)] for t in range(length)])
        k = np.stack(
            [[rotate(k[t, n], t) for n in range(config.num_kv_heads)] for t in range(length)]
        )
        out = np.zeros_like(q)
        for t in range(length):
            for n in range(config.num_heads):
                kv = n // group
                logits = k[: t + 1, kv] @ q[t, n] / np.sqrt(config.head_dim)
                weights = np.exp(logits - logits.max())
                out[t, n] = weights / weights.sum() @ v[: t + 1, kv]
        x = x + out.reshape(length, -1) @ w["o_proj"]
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate_proj"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up_proj"])) @ w["down_proj"]
    x = norm(x, params["final_norm"])
    return x @ params["embed" if config.tie_embeddings else "lm_head"].T


@each_family
def test_logits_equal_the_numpy_reference(config):
    params, tokens = random_params(config), random_tokens(2, 9)
    logits = unembed(config, params, forward(config, params, tokens))
    for row in range(2):
        np.testing.assert_allclose(
            logits[row], numpy_forward(config, params, tokens[row]), atol=1e-4
        )


@each_family
def test_prefill_and_decode_behind_a_cache_equal_the_whole_row(config):
    params, tokens = random_params(config), random_tokens(3, 12)
    whole = forward(config, params, tokens)
    starts = np.array([4, 6, 1], np.int32)  # every slot has its own length
    layers = layer_list(config, params)
    cache = init_cache(config, slots=3, length=16)
    _, cache = extend_cache(config, params, layers, tokens[:, :6], jnp.zeros(3, jnp.int32), cache)
    # Entries behind `starts` are now garbage: the pieces below must overwrite them.
    lengths = starts
    for count in (2, 1, 1):  # a chunk of prefill, then decoding
        index = lengths[:, None] + np.arange(count)
        piece = np.take_along_axis(tokens, index, axis=1)
        hidden, cache = extend_cache(config, params, layers, piece, jnp.asarray(lengths), cache)
        expected = np.take_along_axis(np.asarray(whole), index[:, :, None], axis=1)
        np.testing.assert_allclose(hidden, expected, atol=1e-4)
        lengths = lengths + count


def test_a_forked_cache_row_continues_as_the_original():
    params, tokens = random_params(QWEN3), random_tokens(1, 10)
    layers = layer_list(QWEN3, params)
    cache = init_cache(QWEN3, slots=1, length=12)
    _, cache = extend_cache(QWEN3, params, layers, tokens[:, :7], jnp.zeros(1, jnp.int32), cache)
    fork = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), cache)
    tails = np.concatenate([tokens[:, 7:], random_tokens(1, 3, seed=5)])
    hidden, _ = extend_cache(QWEN3, params, layers, tails, jnp.full(2, 7), fork)
    for tail, row in zip(tails, hidden):
        whole = forward(QWEN3, params, np.concatenate([tokens[0, :7], tail])[None])
        np.testing.assert_allclose(row, whole[0, 7:], atol=1e-4)


def test_packed_rows_equal_separate_rows_whatever_the_padding():
    params = random_params(QWEN3)
    first, second = random_tokens(5), random_tokens(7, seed=2)
    separate = [forward(QWEN3, params, x[None])[0] for x in (first, second)]
    segment_ids = np.array([0] * 5 + [1] * 7 + [-1] * 4)
    node_id = jnp.asarray(segment_ids)
    positions = np.concatenate([np.arange(5), np.arange(7), np.zeros(4)]).astype(np.int32)
    for seed in (3, 4):
        tokens = np.concatenate([first, second, random_tokens(4, seed=seed)])
        packed = forward(
            QWEN3,
            params,
            tokens[None],
            positions=positions[None],
            node_id=node_id[None],
        )[0]
        np.testing.assert_allclose(packed[:5], separate[0], atol=1e-4)
        np.testing.assert_allclose(packed[5:12], separate[1], atol=1e-4)
        assert np.isfinite(packed).all()


def tree_row(trunk, branches):
    """Packs a trunk and `(parent node, depth, continuation)` branches into one row.

    Returns the row's arguments and the whole sequence that ends in each node.
    """
    nodes = len(branches) + 1
    tokens, positions, node_id = [trunk], [np.arange(len(trunk))], [np.zeros(len(trunk), int)]
    sequences, spans = [trunk], [[(0, len(trunk), 0)]]  # (node, row end, row start) of each path
    visible_until = np.zeros((nodes, nodes), np.int32)
    visible_until[0, 0] = 10**6
    at = len(trunk)
    for n, (parent, depth, continuation) in enumerate(branches, start=1):
        path, left = [], depth
        for node, stop, start in spans[parent]:
            length = min(left, stop - start)
            path.append((node, start + length, start))
            visible_until[n, node] = start + length
            left -= length
        visible_until[n, n] = 10**6
        spans.append([*path, (n, at + len(continuation), at)])
        tokens.append(continuation)
        positions.append(depth + np.arange(len(continuation)))  # rotary: depth, not row index
        node_id.append(np.full(len(continuation), n))
        sequences.append(np.concatenate([sequences[parent][:depth], continuation]))
        at += len(continuation)
    row = {
        "tokens": np.concatenate(tokens)[None],
        "positions": np.concatenate(positions).astype(np.int32)[None],
        "node_id": np.concatenate(node_id).astype(np.int32)[None],
        "visible_until": visible_until[None],
    }
    return row, sequences


def test_tree_rows_equal_separate_rows():
    """A trunk, two branches from inside it, and a branch from a branch: each prefix once."""
    params = random_params(QWEN3)
    trunk = random_tokens(8)
    branches = [
        (0, 3, random_tokens(4, seed=2)),
        (0, 6, random_tokens(3, seed=3)),
        (1, 5, random_tokens(4, seed=4)),  # two tokens into branch 1
        (1, 2, random_tokens(2, seed=5)),  # leaves before branch 1 begins: trunk only
    ]
    row, sequences = tree_row(trunk, branches)
    hidden = forward(QWEN3, params, **row)[0]
    node_id = row["node_id"][0]
    for node, sequence in enumerate(sequences):
        whole = forward(QWEN3, params, sequence[None])[0]
        own = np.flatnonzero(node_id == node)
        np.testing.assert_allclose(hidden[own], whole[-len(own) :], atol=1e-4)


def test_gradients_are_finite_with_padding_and_do_not_see_it():
    node_id = jnp.asarray([0] * 6 + [-1] * 6)
    params = random_params(QWEN3)

    def loss(params, tokens, length):
        hidden = hidden_states(
            QWEN3,
            params,
            tokens[None, :length],
            node_id=node_id[None, :length],
        )
        return jnp.sum(jnp.square(unembed(QWEN3, params, hidden)[0, :6]))

    gradient = jit(jax.grad(loss), static_argnums=2)
    padded = gradient(params, random_tokens(12), 12)
    short = gradient(params, random_tokens(12), 6)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(padded))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3, rtol=1e-3), padded, short)
    # Every tensor takes part: a parameter without a gradient would be a wire not connected.
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(padded))


def test_rematerialisation_changes_nothing():
    params, tokens = random_params(QWEN3), random_tokens(1, 6)

    def loss(config, params):
        return jnp.sum(jnp.square(hidden_states(config, params, tokens)))

    plain = jit(jax.grad(lambda p: loss(QWEN3, p)))(params)
    with_remat = dataclasses.replace(QWEN3, remat="full")
    remat = jit(jax.grad(lambda p: loss(with_remat, p)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), plain, remat)


def test_family_flags_decide_which_parameters_exist():
    def names(config):
        shapes = param_shapes(config)
        return set(shapes["layers"]) | set(shapes)

    qk_norms, biases = {"q_norm", "k_norm"}, {"q_bias", "k_bias", "v_bias"}
    plain = names(dataclasses.replace(LLAMA, tie_embeddings=True))
    assert names(QWEN3) - plain == qk_norms
    assert names(QWEN2) - plain == biases
    assert names(LLAMA) - plain == {"lm_head"}
    for config in (QWEN3, QWEN2, LLAMA):
        params = jax.eval_shape(lambda config=config: init_params(config, jax.random.key(0)))
        assert num_params(config) == sum(p.size for p in jax.tree.leaves(params))
        named = jax.tree.map(lambda p, axes: p.ndim == len(axes), params, logical_axes(config))
        assert all(jax.tree.leaves(named))


def test_initial_parameters_differ_by_name_and_seed():
    init = jit(init_params, static_argnums=0)
    params, other = (init(QWEN3, jax.random.key(seed, impl="rbg")) for seed in (0, 1))
    layers = params["layers"]
    assert not np.array_equal(layers["gate_proj"], layers["up_proj"])
    assert not np.array_equal(layers["q_proj"][0], layers["q_proj"][1])
    assert not np.array_equal(params["embed"], other["embed"])


def test_errors_name_the_value():
    with pytest.raises(ValueError, match="num_heads 4 must be a multiple of num_kv_heads 3"):
        dataclasses.replace(QWEN3, num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim must be even .* got 5"):
        dataclasses.replace(QWEN3, head_dim=5)
    with pytest.raises(ValueError, match="give node_id as well"):
        hidden_states(QWEN3, {}, random_tokens(1, 3), visible_until=jnp.zeros((1, 1, 1), jnp.int32))
