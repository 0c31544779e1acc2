"""Decoder-only transformers of the Qwen2, Qwen3 and Llama families as pure functions.

Parameters are a plain nested dict with all layers stacked on a leading axis; `logical_axes`
gives the meaning of every axis beside it, which is all that sharding rules need. Three ways in:

    hidden_states   whole packed rows (training, scoring), `lax.scan` over layers
    extend          new tokens behind a key-value cache (prefill and decoding)
    unembed         hidden states to logits
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from focus.policy import attention

Array = jax.Array
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a model. `qk_norm` makes it Qwen3, `attention_bias` Qwen2, neither Llama."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_context: int
    rope_theta: float = 1e6
    rms_eps: float = 1e-6
    qk_norm: bool = True
    attention_bias: bool = False
    tie_embeddings: bool = True
    dtype: str = "float32"
    remat: bool = False
    scan_unroll: int = 1

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and logical axes of every tensor of one layer."""
    d, q, kv = config.d_model, config.num_heads, config.num_kv_heads
    hd, ff = config.head_dim, config.d_ff
    shapes = {
        "attn_norm": ((d,), ("embed",)),
        "q_proj": ((d, q * hd), ("embed", "heads")),
        "k_proj": ((d, kv * hd), ("embed", "kv_heads")),
        "v_proj": ((d, kv * hd), ("embed", "kv_heads")),
        "o_proj": ((q * hd, d), ("heads", "embed")),
        "mlp_norm": ((d,), ("embed",)),
        "gate_proj": ((d, ff), ("embed", "mlp")),
        "up_proj": ((d, ff), ("embed", "mlp")),
        "down_proj": ((ff, d), ("mlp", "embed")),
    }
    if config.qk_norm:
        shapes |= {"q_norm": ((hd,), ("head_dim",)), "k_norm": ((hd,), ("head_dim",))}
    if config.attention_bias:
        shapes |= {
            "q_bias": ((q * hd,), ("heads",)),
            "k_bias": ((kv * hd,), ("kv_heads",)),
            "v_bias": ((kv * hd,), ("kv_heads",)),
        }
    return shapes


def _top_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    shapes = {
        "embed": ((config.vocab_size, config.d_model), ("vocab", "embed")),
        "final_norm": ((config.d_model,), ("embed",)),
    }
    if not config.tie_embeddings:
        shapes["lm_head"] = ((config.vocab_size, config.d_model), ("vocab", "embed"))
    return shapes


def param_shapes(config: ModelConfig) -> Params:
    """Shapes of all parameters, as a tree of tuples."""
    layers = {k: (config.num_layers, *s) for k, (s, _) in _layer_shapes(config).items()}
    return {k: s for k, (s, _) in _top_shapes(config).items()} | {"layers": layers}


def logical_axes(config: ModelConfig) -> Params:
    """Names of all axes, as a tree of tuples of the structure of the parameters."""
    layers = {k: ("layers", *a) for k, (_, a) in _layer_shapes(config).items()}
    return {k: a for k, (_, a) in _top_shapes(config).items()} | {"layers": layers}


def num_params(config: ModelConfig) -> int:
    """Number of parameters."""
    total = 0
    for shape in jax.tree.leaves(param_shapes(config), is_leaf=lambda x: isinstance(x, tuple)):
        size = 1
        for n in shape:
            size *= n
        total += size
    return total


def init_params(config: ModelConfig, key: Array) -> Params:
    """Draws parameters: norms at 1, biases at 0, matrices normal with 1/sqrt(fan in).

    Embeddings have norm 1 and residual projections are scaled down by 2 * layers (this
    project's rule): at the start the residual stream says which token stands where rather than
    what the random layers make of it, and copying, the skill of an agent that reads, is learnt
    in a quarter of the tokens.

    Args:
      config: shape of the model.
      key: a `jax.random.key`, consumed.

    Returns:
      float32 parameters.
    """
    depth_scale = 1 / (2 * config.num_layers)

    def draw(path, shape):
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(shape, jnp.float32)
        if name.endswith("bias"):
            return jnp.zeros(shape, jnp.float32)
        fold = jax.random.fold_in(key, sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31)
        fan_in = shape[-1] if name in ("embed", "lm_head") else shape[-2]
        scale = fan_in**-0.5
        if name in ("o_proj", "down_proj"):
            scale *= depth_scale
        return scale * jax.random.truncated_normal(fold, -3.0, 3.0, shape, jnp.float32)

    return jax.tree_util.tree_map_with_path(
        draw, param_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """`x / rms(x) * weight` over the last axis, statistics in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def rotary(positions: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Cosines and sines of rotary embeddings, half-split layout.

    Args:
      positions: [B, L] int32.
      head_dim: even width of a head.
      theta: base of the wavelengths.

    Returns:
      `(cos, sin)`, each [B, L, 1, head_dim // 2] float32.
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _project(x: Array, weight: Array) -> Array:
    """`x @ weight` as one two-dimensional product.

    The gradient of a product with two batch axes is several times slower on CPUs than that of
    the flat one; everywhere else they are the same.
    """
    flat = x.reshape(-1, x.shape[-1]) @ weight.astype(x.dtype)
    return flat.reshape(*x.shape[:-1], weight.shape[-1])


def _qkv(config: ModelConfig, layer: Params, x: Array, cos: Array, sin: Array):
    """Projections of one layer: q [B, L, heads, hd], k and v [B, kv_heads, L, hd]."""
    batch, length, _ = x.shape
    h = rms_norm(x, layer["attn_norm"], config.rms_eps)
    q, k, v = (_project(h, layer[f"{n}_proj"]) for n in "qkv")
    if config.attention_bias:
        q, k, v = (y + layer[f"{n}_bias"].astype(h.dtype) for n, y in zip("qkv", (q, k, v)))
    q = q.reshape(batch, length, config.num_heads, config.head_dim)
    k = k.reshape(batch, length, config.num_kv_heads, config.head_dim)
    v = v.reshape(batch, length, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.rms_eps)
        k = rms_norm(k, layer["k_norm"], config.rms_eps)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    return q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def _finish_layer(config: ModelConfig, layer: Params, x: Array, attended: Array) -> Array:
    """Output projection and feed-forward block with their residuals."""
    batch, length, _ = x.shape
    x = x + _project(attended.reshape(batch, length, -1), layer["o_proj"])
    h = rms_norm(x, layer["mlp_norm"], config.rms_eps)
    gate = jax.nn.silu(_project(h, layer["gate_proj"]))
    return x + _project(gate * _project(h, layer["up_proj"]), layer["down_proj"])


def hidden_states(
    config: ModelConfig,
    params: Params,
    tokens: Array,
    *,
    positions: Array | None = None,
    node_id: Array | None = None,
    visible_until: Array | None = None,
) -> Array:
    """Final hidden states of packed rows, after the last norm.

    Args:
      config: shape of the model.
      params: parameters as from `init_params`.
      tokens: [B, L] int32.
      positions: [B, L] int32 rotary positions; None counts from 0 along the row.
      node_id: [B, L] int32 and
      visible_until: [B, N, N] int32: who sees whom, see `focus.policy.attention`. None for
        both: plain causal rows.

    Returns:
      [B, L, H] in `config.dtype`.
    """
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    if (node_id is None) != (visible_until is None):
        raise ValueError("node_id and visible_until describe a packing together: give both")
    if node_id is None:
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    else:
        mask = jax.vmap(attention.tree_mask)(node_id, visible_until)
    cos, sin = rotary(positions, config.head_dim, config.rope_theta)
    scale = config.head_dim**-0.5

    def block(x, layer):
        q, k, v = _qkv(config, layer, x, cos, sin)
        x = _finish_layer(config, layer, x, attention.attend(q, k, v, mask, scale))
        return x, None

    if config.remat:
        block = jax.checkpoint(block)
    x = params["embed"].astype(config.dtype)[tokens]
    x, _ = jax.lax.scan(block, x, params["layers"], unroll=config.scan_unroll)
    return rms_norm(x, params["final_norm"], config.rms_eps)


def unembedding(config: ModelConfig, params: Params) -> Array:
    """[V, H] matrix from hidden states to logits."""
    return params["embed"] if config.tie_embeddings else params["lm_head"]


def unembed(config: ModelConfig, params: Params, hidden: Array) -> Array:
    """[..., H] hidden states to [..., V] float32 logits."""
    matrix = unembedding(config, params).astype(hidden.dtype)
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = jnp.einsum("th,vh->tv", flat, matrix, preferred_element_type=jnp.float32)
    return logits.reshape(*hidden.shape[:-1], matrix.shape[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of slots, one array per layer so that decoding updates them in place.

    Attributes:
      k: per layer [slots, kv_heads, length, head_dim], rotary already applied.
      v: per layer [slots, kv_heads, length, head_dim].
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]


def init_cache(config: ModelConfig, slots: int, length: int) -> Cache:
    """An empty cache of `slots` rows of `length` tokens."""
    shape = (slots, config.num_kv_heads, length, config.head_dim)
    zeros = tuple(jnp.zeros(shape, config.dtype) for _ in range(config.num_layers))
    return Cache(k=zeros, v=tuple(jnp.zeros_like(z) for z in zeros))


def layer_list(config: ModelConfig, params: Params) -> list[Params]:
    """Parameters of each layer on its own: do this once, outside a decoding loop."""
    return [
        {name: stacked[i] for name, stacked in params["layers"].items()}
        for i in range(config.num_layers)
    ]


def extend(
    config: ModelConfig,
    params: Params,
    layers: list[Params],
    tokens: Array,
    lengths: Array,
    cache: Cache,
) -> tuple[Array, Cache]:
    """Appends tokens behind a cache and returns their hidden states.

    Prefill is a call with many tokens a slot, decoding one with a single token. Entries behind
    a slot's true end may be garbage: the next call overwrites them before anything reads them.

    Args:
      config: shape of the model.
      params: parameters (embedding and final norm are read here).
      layers: `layer_list(config, params)`.
      tokens: [B, C] int32 new tokens, padded at the end.
      lengths: [B] int32 tokens already in each slot; `lengths + C` must fit into the cache.
      cache: B slots.

    Returns:
      `(hidden [B, C, H] after the final norm, cache)`.
    """
    count = tokens.shape[1]
    positions = lengths[:, None] + jnp.arange(count)
    cos, sin = rotary(positions, config.head_dim, config.rope_theta)
    mask = jnp.arange(cache.k[0].shape[2]) <= positions[:, :, None]
    write = jax.vmap(
        lambda old, new, at: jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, at, 0))
    )
    x = params["embed"].astype(config.dtype)[tokens]
    keys, values = [], []
    for layer, k_cache, v_cache in zip(layers, cache.k, cache.v):
        q, k, v = _qkv(config, layer, x, cos, sin)
        k_cache, v_cache = write(k_cache, k, lengths), write(v_cache, v, lengths)
        attended = attention.attend(q, k_cache, v_cache, mask, config.head_dim**-0.5)
        x = _finish_layer(config, layer, x, attended)
        keys.append(k_cache)
        values.append(v_cache)
    hidden = rms_norm(x, params["final_norm"], config.rms_eps)
    return hidden, Cache(k=tuple(keys), v=tuple(values))
