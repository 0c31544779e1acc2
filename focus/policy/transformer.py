"""Decoder-only transformers of the Qwen2, Qwen3 and Llama families as pure functions.

Parameters are a plain nested dict with all layers stacked on a leading axis; `logical_axes`
gives the meaning of every axis beside it, which is all that sharding rules need. Three ways in:

    hidden_states   whole packed rows (training, scoring), `lax.scan` over layers
    extend          new tokens behind a key-value cache (prefill and decoding)
    unembed         hidden states to logits
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp

from focus.policy import attention, layers
from focus.policy.layers import project, rms_norm, rotary, rotate, unembedding, write_cache
from focus.policy.placement import constrain_tokens

Array = jax.Array
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a model. `qk_norm` makes it Qwen3, `attention_bias` Qwen2, neither Llama.

    `remat` names what the backward pass keeps (`layers.REMAT`), `attention` the backend for
    whole rows (`attention.BACKENDS`), `rope_llama3` the stretched wavelengths of Llama 3.1
    (`layers.inverse_frequencies`).
    """

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
    remat: str = "none"
    scan_unroll: int = 1
    attention: str = "plain"
    rope_llama3: tuple[float, float, float, int] | None = None

    def __post_init__(self):
        layers.check_remat(self.remat)
        attention.check_backend(self.attention)
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


def init_params(config: ModelConfig, key: Array) -> Params:
    """Draws float32 parameters, see `layers.draw`. `key` is consumed."""
    return layers.draw(
        param_shapes(config), key, depth=config.num_layers, ones=lambda name: name.endswith("norm")
    )


def _frequency(config: ModelConfig) -> Array:
    return layers.inverse_frequencies(config.head_dim, config.rope_theta, config.rope_llama3)


def _qkv(config: ModelConfig, layer: Params, x: Array, cos: Array, sin: Array):
    """Projections of one layer: q [B, L, heads, hd], k and v [B, kv_heads, L, hd]."""
    batch, length, _ = x.shape
    h = rms_norm(x, layer["attn_norm"], config.rms_eps)
    q, k, v = (project(h, layer[f"{n}_proj"]) for n in "qkv")
    if config.attention_bias:
        q, k, v = (y + layer[f"{n}_bias"].astype(h.dtype) for n, y in zip("qkv", (q, k, v)))
    q = q.reshape(batch, length, config.num_heads, config.head_dim)
    k = k.reshape(batch, length, config.num_kv_heads, config.head_dim)
    v = v.reshape(batch, length, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.rms_eps)
        k = rms_norm(k, layer["k_norm"], config.rms_eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def _finish_layer(config: ModelConfig, layer: Params, x: Array, attended: Array) -> Array:
    """Output projection and feed-forward block with their residuals."""
    batch, length, _ = x.shape
    x = x + project(attended.reshape(batch, length, -1), layer["o_proj"])
    return x + layers.swiglu(layer, rms_norm(x, layer["mlp_norm"], config.rms_eps))


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
    cos, sin = rotary(positions, _frequency(config))
    attend = attention.row_attention(
        config.attention, (batch, length), node_id, visible_until, config.head_dim**-0.5
    )

    def block(x, layer):
        q, k, v = _qkv(config, layer, x, cos, sin)
        return constrain_tokens(_finish_layer(config, layer, x, attend(q, k, v))), None

    block = layers.rematerialised(block, config.remat)
    x = constrain_tokens(params["embed"].astype(config.dtype)[tokens])
    x, _ = jax.lax.scan(block, x, params["layers"], unroll=config.scan_unroll)
    return rms_norm(x, params["final_norm"], config.rms_eps)


def unembed(config: ModelConfig, params: Params, hidden: Array) -> Array:
    """[..., H] hidden states to [..., V] float32 logits."""
    return layers.unembed(unembedding(config, params), hidden)


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
    layers = params["layers"]
    return [jax.tree.map(operator.itemgetter(i), layers) for i in range(config.num_layers)]


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
    cos, sin = rotary(positions, _frequency(config))
    mask = jnp.arange(cache.k[0].shape[2]) <= positions[:, :, None]
    x = params["embed"].astype(config.dtype)[tokens]
    keys, values = [], []
    for layer, k_cache, v_cache in zip(layers, cache.k, cache.v):
        q, k, v = _qkv(config, layer, x, cos, sin)
        k_cache, v_cache = write_cache(k_cache, k, lengths), write_cache(v_cache, v, lengths)
        attended = attention.attend(q, k_cache, v_cache, mask, config.head_dim**-0.5)
        x = _finish_layer(config, layer, x, attended)
        keys.append(k_cache)
        values.append(v_cache)
    hidden = rms_norm(x, params["final_norm"], config.rms_eps)
    return hidden, Cache(k=tuple(keys), v=tuple(values))
