"""Chunked log-probs equal the plain ones, in value, gradient and meaning, in less memory."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from processes import run_program

from focus.learner import sharding
from focus.policy import token_logprobs, transformer
from focus.policy.logprobs import (
    chunked_logprobs,
    default_chunk,
    token_scores,
    wanted_first,
)
from focus.policy.placement import ROWS
from focus.tpu import hlo


def plain(hidden, unembedding, targets, temperature):
    logits = hidden @ unembedding.T / (temperature if temperature > 0 else 1.0)
    logp = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    return jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0], entropy


def inputs(seed, rows, length, vocab, width=8):
    keys = jax.random.split(jax.random.key(seed), 5)
    return (
        jax.random.normal(keys[0], (rows, length, width)),
        jax.random.normal(keys[1], (vocab, width)),
        jax.random.randint(keys[2], (rows, length), 0, vocab),
        jax.random.normal(keys[3], (rows, length)),
        jax.random.normal(keys[4], (rows, length)),
    )


@pytest.mark.parametrize("length,chunk,temperature", [(5, 2, 0.7), (4, 1, 0.0), (6, None, 1.0)])
def test_chunks_change_neither_values_nor_gradients(length, chunk, temperature):
    """Pitfall 17, with cotangents for the log-prob and for the entropy."""
    hidden, unembedding, targets, g_logp, g_entropy = inputs(length, 2, length, 11)

    @functools.partial(jax.jit, static_argnums=0)
    def pull(function):
        out, vjp = jax.vjp(function, hidden, unembedding)
        return out, vjp((g_logp, g_entropy))

    got = pull(lambda h, w: chunked_logprobs(h, w, targets, temperature=temperature, chunk=chunk))
    want = pull(lambda h, w: plain(h, w, targets, temperature))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), got, want)


@pytest.mark.parametrize("chunk", [1, 3, None])
def test_what_is_not_wanted_is_zero_and_changes_nothing_else(chunk):
    hidden, unembedding, targets, *cotangents = inputs(3, 2, 9, 11)
    wanted = jnp.arange(9) % 4 == jnp.array([[0], [1]])

    @functools.partial(jax.jit, static_argnums=0)
    def pull(function):
        out, vjp = jax.vjp(function, hidden, unembedding)
        return out, vjp(tuple(cotangents))

    def masked(h, w):
        return tuple(jnp.where(wanted, x, 0.0) for x in plain(h, w, targets, 1.0))

    got = pull(lambda h, w: chunked_logprobs(h, w, targets, wanted=wanted, chunk=chunk))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), got, pull(masked)
    )


def test_chunks_without_a_wanted_token_are_never_read():
    """What is not finite there would be seen in every gradient if it were multiplied."""
    hidden, unembedding, targets, *_ = inputs(4, 2, 12, 11)
    wanted = jnp.zeros((2, 12), bool).at[:, 1::5].set(True)

    def loss(h, w, wanted):
        order = wanted_first(wanted)
        h, y, wanted = (
            jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)
            for x in (h, targets, wanted)
        )
        logp, entropy = chunked_logprobs(h, w, y, wanted=wanted, chunk=3)
        return jnp.sum(jnp.square(logp) + entropy)

    spoilt = jnp.where(wanted[..., None], hidden, jnp.nan)
    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(spoilt, unembedding, wanted)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)
    np.testing.assert_array_equal(grads[0] != 0, jnp.broadcast_to(wanted[..., None], hidden.shape))
    want, want_grads = jax.value_and_grad(loss, argnums=(0, 1))(hidden, unembedding, wanted)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, want_grads)
    nothing = jax.grad(loss, argnums=1)(spoilt * jnp.nan, unembedding, jnp.zeros_like(wanted))
    assert not np.any(nothing)


def test_wanted_tokens_come_first_in_the_order_that_they_have():
    wanted = jnp.array([[0, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]], bool)
    want = [[1, 4, 5, 0, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    np.testing.assert_array_equal(wanted_first(wanted), want)


@pytest.mark.parametrize("masked", [False, True])
def test_a_frozen_unembedding_costs_no_gradient(masked):
    hidden, unembedding, targets, *_ = inputs(5, 2, 12, 64)
    wanted = jnp.ones((2, 12), bool) if masked else None

    def loss(h, w):
        return chunked_logprobs(h, w, targets, wanted=wanted, chunk=3)[0].sum()

    def flops(arguments):
        gradient = jax.jit(jax.grad(loss, argnums=arguments)).lower(hidden, unembedding)
        return gradient.compile().cost_analysis()["flops"]

    assert flops(0) < 0.8 * flops((0, 1))  # three products of the four


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0,)])
def test_no_tokens_have_no_log_probs(shape):
    unembedding, wanted = jnp.ones((11, 4)), jnp.zeros(shape, bool)
    for asked in (None, wanted):
        got = chunked_logprobs(
            jnp.zeros((*shape, 4)), unembedding, jnp.zeros(shape, jnp.int32), wanted=asked
        )
        assert [x.shape for x in got] == [shape, shape]
    if len(shape) == 2:
        assert wanted_first(wanted).shape == shape
    assert default_chunk(2, 0, 11) == 1


def test_a_chunk_has_tokens():
    hidden, unembedding, targets, *_ = inputs(0, 1, 5, 11)
    with pytest.raises(ValueError, match="chunk must be >= 1 token.*got 0"):
        chunked_logprobs(hidden, unembedding, targets, chunk=0)


@pytest.mark.parametrize("chunk,temperature", [(2, 0.7), (None, 0.0)])
def test_score_norms_are_the_expected_squared_norm_of_the_score(chunk, temperature):
    hidden, unembedding, targets, *_ = inputs(5, 2, 7, 11)
    unembedding = unembedding.at[0].mul(9.0)  # some tokens are all but certain
    wanted = jnp.arange(7) % 3 != jnp.array([[0], [1]])
    settings = {"wanted": wanted, "temperature": temperature, "chunk": chunk}
    logp, entropy, norm = jax.jit(lambda: token_scores(hidden, unembedding, targets, **settings))()
    for got, want in zip(
        (logp, entropy), chunked_logprobs(hidden, unembedding, targets, **settings)
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)
    probs = jax.nn.softmax(hidden @ unembedding.T / (temperature or 1.0))
    gradient = jnp.eye(11) - probs[..., None, :]  # of log pi(a) by the logits, a on axis -2
    expected = jnp.sum(probs * jnp.sum(jnp.square(gradient), axis=-1), axis=-1)
    np.testing.assert_allclose(norm, jnp.where(wanted, expected, 0.0), atol=1e-5)
    assert float(norm.min()) >= 0 and float(norm.max()) < 1
    empty = token_scores(hidden[:, :0], unembedding, targets[:, :0])
    assert [x.shape for x in empty] == [(2, 0)] * 3


def test_one_row_needs_no_leading_axis():
    hidden, unembedding, targets, *_ = inputs(0, 1, 5, 11)
    got = chunked_logprobs(hidden[0], unembedding, targets[0], chunk=2)
    want = plain(hidden[0], unembedding, targets[0], 1.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_large_logits_stay_finite():
    hidden = jnp.array([[1e4, -1e4]])
    got = chunked_logprobs(hidden, jnp.eye(2), jnp.array([1]))
    np.testing.assert_allclose(got, ([-2e4], [0.0]))
    grad = jax.grad(lambda h: jnp.sum(sum(chunked_logprobs(h, jnp.eye(2), jnp.array([1])))))
    assert np.isfinite(grad(hidden)).all()


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    """Pitfall 17: forward and backward, temporary memory of the compiled program."""
    vocab, width, chunk = 4096, 8, 16

    def temporary_bytes(length, function):
        shapes = (
            jax.ShapeDtypeStruct((length, width), jnp.float32),
            jax.ShapeDtypeStruct((vocab, width), jnp.float32),
            jax.ShapeDtypeStruct((length,), jnp.int32),
        )
        loss = jax.grad(lambda h, w, y: function(h, w, y)[0].sum(), argnums=(0, 1))
        return jax.jit(loss).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    def chunked(h, w, y):
        return chunked_logprobs(h, w, y, chunk=chunk)

    logits = 4 * 512 * vocab
    small, large = temporary_bytes(64, chunked), temporary_bytes(512, chunked)
    assert large - small < logits / 20
    assert large < logits / 4 < temporary_bytes(512, lambda h, w, y: plain(h, w, y, 1.0))


# On meshes of eight devices, in a process of its own.


def compare_meshes():
    """Every way to cut rows, their tokens, width and vocabulary gives the numbers of one device."""
    hidden, unembedding, targets, *cotangents = inputs(0, 8, 24, 256, width=16)
    # Chunks that nobody wants, that all devices want, and that only some of them do.
    wanted = (jnp.arange(24) % 6 < 2) & (jnp.arange(24) + jnp.arange(8)[:, None] > 10)

    def pull(hidden, unembedding, targets, g_logp, g_entropy):
        def function(h, w):
            return chunked_logprobs(h, w, targets, wanted=wanted, temperature=0.7, chunk=2)

        out, vjp = jax.vjp(function, hidden, unembedding)
        return out, vjp((g_logp, g_entropy))

    want = jax.jit(pull)(hidden, unembedding, targets, *cotangents)
    shapes = [s for s in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(s) == 8]
    for shape in shapes:
        mesh = sharding.make_mesh(*shape)
        tokens = NamedSharding(mesh, PartitionSpec(ROWS, "sequence"))
        vocabulary = NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
        program = jax.jit(
            sharding.on_mesh(pull, mesh),
            in_shardings=(tokens, vocabulary, tokens, tokens, tokens),
            out_shardings=((tokens, tokens), (tokens, vocabulary)),
        )
        compiled = program.lower(hidden, unembedding, targets, *cotangents).compile()
        got = compiled(hidden, unembedding, targets, *cotangents)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), got, want)
        check_program(hlo.parse(compiled.as_text()), mesh, sizes=(8, 24, 16, 256), chunk=2)
        print("same", shape, flush=True)

    def gradient(h, w):
        return jax.grad(lambda *x: chunked_logprobs(*x, targets[:3])[0].sum(), (0, 1))(h, w)

    some = hidden[:3], unembedding  # three rows for four places
    got = jax.jit(sharding.on_mesh(gradient, sharding.make_mesh(2, 2, 2, 1)))(*some)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, gradient(*some))
    print("same, undivided", flush=True)


def check_program(module, mesh, *, sizes, chunk):
    """No device holds logits beyond its part of a chunk, or rows of the vocabulary of others."""
    rows, length, width, vocab = sizes
    vocab //= mesh.shape["tensor"]
    tokens = rows * length // (sharding.num_row_shards(mesh) * mesh.shape["sequence"])
    logits = rows // sharding.num_row_shards(mesh) * chunk * vocab
    instructions = [i for body in module.computations.values() for i in body]
    assert any(i.opcode == "while" for i in instructions)
    largest = max(hlo.shape_bytes(i.shape) // 4 for i in instructions if "(" not in i.shape)
    assert largest <= max(logits, vocab * width, tokens * width) < tokens * vocab
    gathered = [hlo.shape_bytes(i.shape) // 4 for i in instructions if "all-gather" in i.opcode]
    assert max(gathered, default=0) <= vocab * width
    if mesh.shape["tensor"] > 1:
        assert mesh.shape["fsdp"] > 1 or not gathered


def test_every_mesh_gives_the_numbers_of_one_device_and_no_device_sees_more_than_its_part():
    out = run_program("import test_logprobs; test_logprobs.compare_meshes()")
    assert out.count("same") == 20 + 1


def test_default_chunk_bounds_the_logits_and_wastes_little():
    assert default_chunk(16, 256, 768) == 256  # small enough to be taken at once
    for length in (1000, 4096, 32768):
        chunk = default_chunk(2, length, 151936)
        assert 2 * chunk * 151936 <= 2**22
        assert -(-length // chunk) * chunk - length < chunk
    # Finer where chunks can be left out, but never to crumbs.
    assert default_chunk(2, 512, 768, skips=True) == 64
    assert default_chunk(2, 128, 768, skips=True) == 64
    assert default_chunk(8, 512, 768, skips=True) == 64
    assert default_chunk(1, 16384, 151936, "bfloat16", skips=True) == 1639
    assert default_chunk(1, 4096, 151936, "bfloat16", skips=True) == 1024


CONFIG = transformer.ModelConfig(
    vocab_size=13,
    d_model=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=24,
    max_context=32,
)
PARAMS = jax.jit(transformer.init_params, static_argnums=0)(CONFIG, jax.random.key(0))
score = jax.jit(token_logprobs, static_argnums=0, static_argnames="temperature")


@jax.jit
def full_logits(tokens):
    return transformer.unembed(CONFIG, PARAMS, transformer.hidden_states(CONFIG, PARAMS, tokens))


def test_packed_sequences_score_as_they_do_alone():
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 13, 5), rng.integers(0, 13, 5)
    tokens = np.concatenate([first, second, [0, 0]])[None]
    segment_ids = np.array([[0] * 5 + [1] * 5 + [-1] * 2])
    got = score(CONFIG, PARAMS, tokens, segment_ids=segment_ids, temperature=0.7)[0]
    for sequence, part in ((first, got[:5]), (second, got[5:10])):
        alone = score(CONFIG, PARAMS, sequence[None], temperature=0.7)[0]
        np.testing.assert_allclose(part, alone, atol=1e-5)
        logp = jax.nn.log_softmax(full_logits(sequence[None])[0] / 0.7)
        want = logp[np.arange(len(sequence) - 1), sequence[1:]]
        np.testing.assert_allclose(part[1:], want, atol=1e-5)
        assert part[0] == 0
    assert (got[10:] == 0).all()


def test_given_positions_are_used():
    tokens = np.array([[1, 2, 3, 4]])
    far = score(CONFIG, PARAMS, tokens, positions=np.array([[0, 9, 1, 20]]))
    near = score(CONFIG, PARAMS, tokens)
    # Rotary embeddings see differences of positions: a shift is invisible, a stretch is not.
    shifted = score(CONFIG, PARAMS, tokens, positions=np.array([[3, 4, 5, 6]]))
    np.testing.assert_allclose(near, shifted, atol=1e-5)
    assert np.abs(near - far).max() > 1e-6
    with pytest.raises(AssertionError):
        chunked_logprobs(jnp.zeros((3, 4, 8)), jnp.zeros((5, 8)), jnp.zeros((3, 5), int))
