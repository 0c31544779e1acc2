"""One small model of every family, and parameters in which nothing stands at its start value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from focus.policy import model as models
from focus.policy.qwen3_5 import Qwen3_5Config
from focus.policy.transformer import ModelConfig

SMALL = ModelConfig(
    vocab_size=48,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=24,
    max_context=64,
)
FAMILIES = {
    "qwen3": SMALL,
    "qwen2": dataclasses.replace(SMALL, qk_norm=False, attention_bias=True, head_dim=4),
    "llama": dataclasses.replace(SMALL, qk_norm=False, tie_embeddings=False),
    "llama3": dataclasses.replace(
        SMALL, qk_norm=False, rope_theta=1e4, rope_llama3=(8.0, 1.0, 4.0, 16)
    ),
    "qwen3_5": Qwen3_5Config(
        vocab_size=48,
        d_model=16,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        d_ff=24,
        max_context=64,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=8,
        linear_key_dim=4,
        linear_value_dim=4,
    ),
}


def make_params(config, seed=0):
    """Of a usual size, norms and biases random too: a tensor that is lost must show."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(0.3 * rng.standard_normal(shape, np.float32)),
        models.param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )
