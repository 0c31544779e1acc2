"""Models whose FLOPs are counted, counting them, and reports of runs that were never compiled."""

import math

import jax
import jax.numpy as jnp

from focus.policy import model as models
from focus.policy import qwen3_5, transformer
from focus.run import experiment

SMALL = transformer.ModelConfig(
    vocab_size=1000,
    d_model=256,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    d_ff=768,
    max_context=256,
    tie_embeddings=False,
    scan_unroll=3,
)

HYBRID = qwen3_5.Qwen3_5Config(
    vocab_size=1000,
    d_model=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    d_ff=768,
    max_context=256,
    full_attention_interval=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_dim=64,
    linear_value_dim=128,
    scan_unroll=2,
)


def shapes_of(config, length):
    """Parameters, and two rows of tokens."""
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        models.param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return params, jax.ShapeDtypeStruct((2, length), jnp.int32)


def fake_report(config, chips, programs):
    """What a compile report says of a run; `programs`: seconds of arithmetic, and peak bytes."""
    tokens = config.learner.micro_rows * config.learner.row_length
    return {
        "topology": chips.slice_.name,
        "num_params": models.num_params(experiment.model_config(config)),
        "mesh": {"fsdp": chips.fsdp, "tensor": chips.tensor},
        "programs": {
            name: {
                "time": {"compute_s": seconds, "memory_s": 1.0, "collective_s": 0.5},
                "peak_bytes": peak_bytes,
                "tokens": tokens,
            }
            for name, (seconds, peak_bytes) in programs.items()
        },
    }


def logits(config, params, tokens):
    """All of them."""
    return models.unembed(config, params, models.hidden_states(config, params, tokens))


def _products(jaxpr) -> float:
    """FLOPs of the matrix products of a program, those in scans as often as they run."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        for inner in jax.core.jaxprs_in_params(equation.params):
            total += equation.params.get("length", 1) * _products(inner)
    return total


def count_products(function, *shapes) -> float:
    """FLOPs of the matrix products of a function."""
    return _products(jax.make_jaxpr(function)(*shapes).jaxpr)
