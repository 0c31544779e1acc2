"""The gated delta rule on keys that resemble each other: chunks of any length, held against steps.

Texts repeat themselves. So keys are equal, or nearly so, memories hardly fade, and what is stored
is corrected fully: the triangular system of a chunk is then far from the identity, though its
solution stays of the size of the values.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, make_params

from focus.policy import gated_delta
from focus.policy import model as models

LENGTH, KEY_DIM, VALUE_DIM = 132, 12, 5


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _keys(kind, rng):
    noise = rng.normal(size=(LENGTH, KEY_DIM))
    if kind == "equal":
        return np.repeat(_unit(np.ones((1, KEY_DIM))), LENGTH, axis=0)
    if kind == "slowly varying":
        return _unit(np.cumsum(0.03 * noise, axis=0) + 1.0)
    if kind == "repeated":
        return np.resize(_unit(noise[:3]), (LENGTH, KEY_DIM))
    if kind == "positive":
        return _unit(np.abs(noise))
    return _unit(noise)


# name: keys, beta, log_decay
STRUCTURES = {
    "one token again and again": ("equal", 1.0, 0.0),
    "one token, decay near 1": ("equal", 0.999, -1e-4),
    "slowly varying": ("slowly varying", 0.98, -1e-3),
    "three tokens": ("repeated", 1.0, -1e-3),
    "positive": ("positive", 0.7, -0.01),
    "positive, full correction": ("positive", 1.0, 0.0),
    "random": ("random", 0.5, -1.5),
    # Most of the memory is lost at every seventh token, and hardly anything in between.
    "resets": ("slowly varying", 0.9, "resets"),
}


def structured():
    """`(q, k, v, log_decay, beta)`, each structure a head, and a memory."""
    rng = np.random.default_rng(0)
    arrays = []
    for keys, beta, log_decay in STRUCTURES.values():
        k = _keys(keys, rng)
        q = k if keys == "equal" else _unit(k + 0.1 * rng.normal(size=k.shape))
        v = 1.0 + 0.3 * rng.normal(size=(LENGTH, VALUE_DIM))
        if log_decay == "resets":
            log_decay = np.where(np.arange(LENGTH) % 7 == 3, -1e4, -0.01)
        arrays.append((q, k, v, np.full(LENGTH, log_decay), np.full(LENGTH, beta)))
    inputs = tuple(jnp.asarray(np.stack(x)[None], jnp.float32) for x in zip(*arrays))
    shape = (1, len(STRUCTURES), KEY_DIM, VALUE_DIM)
    return inputs, jnp.asarray(rng.normal(size=shape), jnp.float32)


DOCUMENT = jnp.asarray(np.repeat([0, 3, 4], [101, 20, LENGTH - 121])[None], jnp.int32)
INPUTS, MEMORY = structured()


def by_steps(inputs, memory):
    def step(carry, x):
        memory, current = carry
        *inputs, document = x
        memory = jnp.where((document != current)[:, None, None, None], 0.0, memory)
        out, memory = gated_delta.delta_step(*inputs, memory)
        return (memory, document), out

    along = (*(jnp.moveaxis(x, 2, 0) for x in inputs), DOCUMENT.T)
    (memory, _), out = jax.lax.scan(step, (memory, jnp.zeros(1, jnp.int32)), along)
    return jnp.moveaxis(out, 0, 2), memory


def by_chunks(chunk):
    def rule(inputs, memory):
        return gated_delta.chunked_delta_rule(*inputs, DOCUMENT, memory, chunk=chunk)

    return rule


@functools.cache
def results(rule):
    """Output, memory, and their gradient along fixed random directions."""
    rng = np.random.default_rng(1)
    weights = jnp.asarray(rng.normal(size=(1, len(STRUCTURES), LENGTH, VALUE_DIM)), jnp.float32)

    def loss(inputs, memory):
        out, after = rule(inputs, memory)
        return jnp.sum(weights * out) + jnp.sum(after * MEMORY), (out, after)

    run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    return jax.device_get(run(INPUTS, MEMORY))


@pytest.mark.parametrize("chunk", [1, 17, 32, 64, 128])
def test_chunks_are_as_exact_as_steps_however_alike_the_keys_are(chunk):
    (got_grads, got), (want_grads, want) = results(by_chunks(chunk)), results(by_steps)
    for head, name in enumerate(STRUCTURES):
        for a, b in zip(got, want):
            np.testing.assert_allclose(a[:, head], b[:, head], atol=1e-5, err_msg=name)
        largest = max(np.abs(x[:, head]).max() for x in jax.tree.leaves(want_grads))
        for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(want_grads)):
            np.testing.assert_allclose(
                a[:, head] / largest, b[:, head] / largest, atol=3e-5, err_msg=f"gradient, {name}"
            )


SIZES = [*range(1, 6), 15, 16, 17, 32, 33, 48, 63, 64, 65, 100, 128]


@pytest.mark.parametrize("size", SIZES)
def test_inverses_of_every_size_are_exact_and_small(size):
    """Those of `beta_t exp(sum log_decay) k_t . k_s`; float64 is the reference."""
    *_, k, _, log_decay, beta = (np.asarray(x[0, :, :size], np.float64) for x in INPUTS)
    total = np.cumsum(np.maximum(log_decay, -40.0), axis=-1)
    decay = np.exp(np.minimum(total[..., :, None] - total[..., None, :], 0.0))
    lower = np.tril(beta[..., None] * decay * (k @ k.mT), -1)
    want = np.linalg.inv(np.eye(size) + lower)
    got = jax.jit(gated_delta.unit_lower_inverse)(jnp.asarray(lower, jnp.float32))
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert np.abs(got).max() <= 1.0 + 1e-6


def test_one_key_and_one_value_again_and_again_are_recalled_exactly():
    """Every output is the value itself, at any length: nothing is left to correct."""
    ones = jnp.ones((1, 1, 64, 1))
    out, memory = gated_delta.chunked_delta_rule(
        ones, ones, ones, jnp.zeros((1, 1, 64)), jnp.ones((1, 1, 64)),
        jnp.zeros((1, 64), jnp.int32), jnp.zeros((1, 1, 1, 1)),
    )  # fmt: skip
    np.testing.assert_array_equal(out, ones)
    np.testing.assert_array_equal(memory, jnp.ones((1, 1, 1, 1)))


def test_a_model_reads_a_text_that_repeats_itself_as_it_would_write_it():
    """64 equal tokens, memories that hardly fade: whole rows and prefill against single steps."""
    config = FAMILIES["qwen3_5"]
    params = make_params(config)
    linear = params["linear_layers"]
    params["linear_layers"] = linear | {"A_log": jnp.full_like(linear["A_log"], -6.0)}
    tokens = jnp.full((1, 64), 7)
    layers = models.layer_list(config, params)

    @jax.jit
    def continued(lengths, tokens, cache):
        hidden, cache = models.extend(config, params, layers, tokens, lengths, cache)
        return jax.nn.log_softmax(models.unembed(config, params, hidden)), cache

    def by_token(cache):
        steps = []
        for t in range(64):
            logp, cache = continued(jnp.full(1, t), tokens[:, t : t + 1], cache)
            steps.append(logp)
        return jnp.concatenate(steps, 1)

    empty = models.init_cache(config, 1, 64)
    want = by_token(empty)
    hidden = jax.jit(functools.partial(models.hidden_states, config))(params, tokens)
    row = jax.nn.log_softmax(models.unembed(config, params, hidden))
    prefill, _ = continued(jnp.zeros(1, jnp.int32), tokens, empty)
    np.testing.assert_allclose(row, want, atol=1e-4)
    np.testing.assert_allclose(prefill, want, atol=1e-4)
