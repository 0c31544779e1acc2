"""The gated delta rule: chunks against the definition, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.policy import gated_delta


def draw(seed, batch, heads, length, key_dim=6, value_dim=5):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, k = (gated_delta.l2_normalise(normal(batch, heads, length, key_dim)) for _ in "qk")
    v = normal(batch, heads, length, value_dim)
    log_decay = -jnp.asarray(rng.uniform(0, 3, (batch, heads, length)), jnp.float32)
    beta = jnp.asarray(rng.uniform(size=(batch, heads, length)), jnp.float32)
    return (q, k, v, log_decay, beta), normal(batch, heads, key_dim, value_dim)


step = jax.jit(gated_delta.delta_step)


def one_by_one(inputs, document, memory):
    """The definition: a new document begins with an empty memory, document 0 with `memory`."""
    outputs, current = [], np.zeros(len(document), int)
    for t in range(document.shape[1]):
        fresh = document[:, t] != current
        memory = jnp.where(fresh[:, None, None, None], 0.0, memory)
        current = document[:, t]
        out, memory = step(*(x[:, :, t] for x in inputs), memory)
        outputs.append(out)
    return jnp.stack(outputs, 2), memory


chunked = jax.jit(gated_delta.chunked_delta_rule, static_argnames="chunk")


@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    chunk=st.sampled_from([1, 4, 8, 32]),
    first=st.sampled_from([0, 3]),
)
@settings(deadline=None, max_examples=10)
def test_chunks_equal_the_definition_wherever_documents_begin(seed, lengths, chunk, first):
    document = np.repeat(np.arange(len(lengths)) + first, lengths)[None].repeat(2, 0)
    inputs, memory = draw(seed, 2, 3, document.shape[1])
    want, left = one_by_one(inputs, document, memory)
    got, after = chunked(*inputs, jnp.asarray(document), memory, chunk=chunk)
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_allclose(after, left, atol=2e-5)


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_equal_those_of_the_definition_and_stay_finite_at_strong_decay(remat):
    document = np.repeat([0, 1, 2], [5, 11, 7])[None]
    inputs, memory = draw(1, 1, 2, document.shape[1])
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(1, 2, 23, 5)), jnp.float32)

    def loss(rule):
        return lambda inputs, memory: jnp.sum(weights * rule(inputs, memory))

    def by_chunks(inputs, memory):
        rule = functools.partial(gated_delta.chunked_delta_rule, chunk=8, remat=remat)
        return rule(*inputs, jnp.asarray(document), memory)[0]

    def by_steps(inputs, memory):
        return one_by_one(inputs, document, memory)[0]

    got = jax.grad(loss(by_chunks), argnums=(0, 1))(inputs, memory)
    want = jax.grad(loss(by_steps), argnums=(0, 1))(inputs, memory)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5), got, want)
    strong = (*inputs[:3], inputs[3] - 200.0, inputs[4])
    grads = jax.grad(loss(by_chunks), argnums=(0, 1))(strong, memory)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(grads))


def test_chunks_that_are_computed_again_are_not_kept():
    inputs, memory = draw(3, 1, 2, 1024)
    document = jnp.zeros((1, 1024), jnp.int32)

    def temporaries(remat):
        def loss(inputs):
            return gated_delta.chunked_delta_rule(*inputs, document, memory, remat=remat)[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(remat=True) < 0.5 * temporaries(remat=False)


def test_a_full_correction_recalls_what_was_stored_last_under_a_key():
    key = jnp.eye(4)[None, None]  # four orthogonal keys, no decay
    value = jnp.arange(12.0).reshape(1, 1, 4, 3)
    zeros, ones = jnp.zeros((1, 1, 4)), jnp.ones((1, 1, 4))
    out, memory = gated_delta.chunked_delta_rule(
        key, key, value, zeros, ones, jnp.zeros((1, 4), int), jnp.zeros((1, 1, 4, 3)), chunk=4
    )
    np.testing.assert_allclose(out, value)
    np.testing.assert_allclose(memory, value)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 64])
def test_the_inverse_of_a_unit_lower_matrix(size):
    lower = np.tril(np.random.default_rng(size).normal(size=(3, size, size)) * 0.3, -1)
    inverse = gated_delta.unit_lower_inverse(jnp.asarray(lower, jnp.float32))
    eye = np.eye(size)
    np.testing.assert_allclose(
        inverse @ (eye + lower), np.broadcast_to(eye, lower.shape), atol=1e-4
    )


def test_the_convolution_is_causal_stops_at_borders_and_continues_from_its_window():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(1, 9, 2)), rng.normal(size=(2, 4))
    window = rng.normal(size=(1, 3, 2))
    document = jnp.asarray(np.repeat([0, 4], [5, 4])[None], jnp.int32)
    got = gated_delta.causal_conv(
        jnp.asarray(x), jnp.asarray(weight), document, jnp.asarray(window)
    )
    want = np.zeros_like(x)
    before = np.concatenate([window, x], axis=1)[0]
    for t in range(9):
        for i in range(4):
            inside = t - i >= 5 if t >= 5 else True
            if inside:
                want[0, t] += weight[:, 3 - i] * before[3 + t - i]
    np.testing.assert_allclose(got, want, atol=1e-5)
