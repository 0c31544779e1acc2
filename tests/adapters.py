"""Adapters that have been trained, on small models of both kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES as ALL
from families import SMALL as DENSE

from focus.policy import lora
from focus.policy import model as models
from focus.policy.lora import LoraConfig

FAMILIES = {"dense": DENSE, "hybrid": ALL["qwen3_5"]}
LORA = LoraConfig(rank=3, alpha=6.0)
each_family = pytest.mark.parametrize("family", FAMILIES)
hidden = jax.jit(models.hidden_states, static_argnums=0)


def make_adapters(config, setting=LORA, seed=0):
    """b is not zero any more."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape, np.float32)),
        lora.adapter_shapes(config, setting),
    )


def tokens_of(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 48, shape), jnp.int32)


def assert_equal_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)
