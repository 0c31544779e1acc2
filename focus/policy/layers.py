"""Pieces that several model families share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

# What the backward pass finds ready, by name; the rest is computed again, layer by layer.
# "dots" keeps matrix products with weights, "full" nothing but the input of each layer; "chunks" is
# "full", with the inside of recurrent layers computed again chunk by chunk: the least memory.
REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "chunks": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def check_remat(name: str) -> None:
    """Raises ValueError for a rematerialisation policy that does not exist."""
    if name not in REMAT:
        raise ValueError(f"remat must be one of {', '.join(REMAT)}; got {name!r}")


def rematerialised(block: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`block` under the rematerialisation policy called `name`."""
    return block if name == "none" else jax.checkpoint(block, policy=REMAT[name])


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """`x / rms(x) * weight` over the last axis, statistics in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def inverse_frequencies(
    dim: int, theta: float, llama3: tuple[float, float, float, int] | None = None
) -> Array:
    """Angular frequencies of rotary embeddings.

    Args:
      dim: even number of rotated channels.
      theta: base of the wavelengths.
      llama3: None, or (factor, low_freq_factor, high_freq_factor, original length): wavelengths
        beyond `length / low` are stretched by `factor`, those below `length / high` are kept,
        and those between are blended (Llama 3.1).

    Returns:
      [dim // 2] float32.
    """
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    if llama3 is None:
        return frequency
    factor, low, high, length = llama3
    turns = length * frequency / (2 * math.pi)  # over the context of pre-training
    share = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (share + (1 - share) / factor)


def rotary(positions: Array, frequency: Array) -> tuple[Array, Array]:
    """Cosines and sines of rotary embeddings, half-split layout.

    Args:
      positions: [B, L] int32.
      frequency: [D // 2], see `inverse_frequencies`.

    Returns:
      `(cos, sin)`, each [B, L, 1, D // 2] float32.
    """
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the first channels of [B, L, heads, D], as many as `cos` and `sin` cover."""
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width].astype(jnp.float32), x[..., width:]
    first, second = jnp.split(turned, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return turned if width == x.shape[-1] else jnp.concatenate([turned, rest], axis=-1)


def project(x: Array, weight: Array) -> Array:
    """`x @ weight` as one two-dimensional product; `weight` may be a `lora.LoraWeight`.

    The gradient of a product with two batch axes is several times slower on CPUs than that of
    the flat one; everywhere else they are the same.
    """
    flat = x.reshape(-1, x.shape[-1]) @ weight.astype(x.dtype)
    return flat.reshape(*x.shape[:-1], weight.shape[-1])


def swiglu(layer: dict[str, Any], h: Array) -> Array:
    """`down(silu(gate(h)) * up(h))`."""
    gate = jax.nn.silu(project(h, layer["gate_proj"]))
    return project(gate * project(h, layer["up_proj"]), layer["down_proj"])


@jax.vmap
def write_cache(old: Array, new: Array, at: Array) -> Array:
    """Puts [B, kv_heads, C, D] into [B, kv_heads, length, D] from index `at` [B] on."""
    return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, at, 0))


def unembedding(config: Any, params: dict[str, Array]) -> Array:
    """[V, H] matrix from hidden states to logits."""
    return params["embed"] if config.tie_embeddings else params["lm_head"]


def unembed(matrix: Array, hidden: Array) -> Array:
    """[..., H] hidden states and [V, H] to [..., V] float32 logits."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = jnp.einsum(
        "th,vh->tv", flat, matrix.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    return logits.reshape(*hidden.shape[:-1], matrix.shape[0])


Shapes = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]


def draw(shapes: Any, key: Array, *, depth: int, ones: Callable[[str], bool]) -> Any:
    """Draws parameters: matrices normal with 1/sqrt(fan in), vectors at 0 or 1.

    Embeddings have norm 1 and residual projections are scaled down by 2 * depth (this
    project's rule): at the start the residual stream says which token stands where rather than
    what the random layers make of it, and copying, the skill of an agent that reads, is learnt
    in a quarter of the tokens.

    Args:
      shapes: nested dict of shapes, stacked over layers below the top.
      key: a `jax.random.key`, consumed.
      depth: number of layers.
      ones: names of vectors that start at 1; other vectors start at 0.

    Returns:
      float32 parameters.
    """

    def one(path, shape):
        name = path[-1].key
        if name.endswith(("norm", "bias", "A_log")):
            return jnp.full(shape, 1.0 if ones(name) else 0.0, jnp.float32)
        group = "/".join(step.key for step in path if step.key != "layers")
        fold = jax.random.fold_in(key, sum(ord(c) * 31**i for i, c in enumerate(group)) % 2**31)
        fan_in = shape[-1] if name in ("embed", "lm_head", "conv1d") else shape[-2]
        scale = fan_in**-0.5
        if name in ("o_proj", "down_proj", "out_proj"):
            scale /= 2 * depth
        return scale * jax.random.truncated_normal(fold, -3.0, 3.0, shape, jnp.float32)

    return jax.tree_util.tree_map_with_path(one, shapes, is_leaf=lambda x: isinstance(x, tuple))
