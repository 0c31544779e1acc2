"""The text model of Qwen3.5: gated delta layers, with gated attention in every n-th.

Three of four layers keep a memory of fixed size (`focus.policy.gated_delta`) behind a short
convolution; the fourth is attention whose output passes a sigmoid gate and whose rotary
embeddings turn a quarter of the channels. All norms are zero-centred (`x_hat * (1 + w)`) but the
one behind the memory. Layers of a kind are stacked: `linear_layers` and `full_layers`.

A memory cannot be cut out of a row, so rows hold whole sequences: documents side by side, told
apart by `node_id`, and no prefix trees (`share_prefixes=False` in packing).
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp

from focus.policy import attention, layers
from focus.policy.gated_delta import (
    CHUNK,
    causal_conv,
    chunked_delta_rule,
    delta_step,
    l2_normalise,
)
from focus.policy.layers import project
from focus.policy.placement import constrain_tokens

Array = jax.Array
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Qwen3_5Config:
    """Shape of a model; the fields of `transformer.ModelConfig`, and those of the delta layers.

    Attributes:
      full_attention_interval: every n-th layer is attention; divides `num_layers`.
      rotary_fraction: share of a head's channels that rotary embeddings turn.
      linear_num_key_heads: heads of queries and keys of a delta layer.
      linear_num_value_heads: its heads of values, a multiple of the former.
      linear_key_dim: width of its keys, and
      linear_value_dim: of its values.
      conv_width: tokens that its convolution sees.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_context: int
    rope_theta: float = 1e7
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    dtype: str = "float32"
    remat: str = "none"
    scan_unroll: int = 1
    attention: str = "plain"
    full_attention_interval: int = 4
    rotary_fraction: float = 0.25
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_dim: int = 128
    linear_value_dim: int = 128
    conv_width: int = 4

    def __post_init__(self):
        layers.check_remat(self.remat)
        attention.check_backend(self.attention)
        for many, few in (
            ("num_layers", "full_attention_interval"),
            ("num_heads", "num_kv_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                raise ValueError(
                    f"{many} {getattr(self, many)} must be a multiple of {few} {getattr(self, few)}"
                )
        if self.rotary_dim % 2:
            raise ValueError(
                f"rotary_fraction {self.rotary_fraction} of head_dim {self.head_dim} turns "
                f"{self.rotary_dim} channels; it must be an even number"
            )

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def num_groups(self) -> int:
        """Attention layers; each follows `full_attention_interval - 1` delta layers."""
        return self.num_layers // self.full_attention_interval

    @property
    def conv_channels(self) -> int:
        """Channels of a delta layer's convolution: queries, keys and values."""
        keys = self.linear_num_key_heads * self.linear_key_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_dim


def _mlp_shapes(config: Qwen3_5Config) -> layers.Shapes:
    d, ff = config.d_model, config.d_ff
    return {
        "mixer_norm": ((d,), ("embed",)),
        "mlp_norm": ((d,), ("embed",)),
        "gate_proj": ((d, ff), ("embed", "mlp")),
        "up_proj": ((d, ff), ("embed", "mlp")),
        "down_proj": ((ff, d), ("mlp", "embed")),
    }


def _full_shapes(config: Qwen3_5Config) -> layers.Shapes:
    d, hd = config.d_model, config.head_dim
    q, kv = config.num_heads * hd, config.num_kv_heads * hd
    return _mlp_shapes(config) | {
        "q_proj": ((d, 2 * q), ("embed", "heads")),  # per head: the query, then the gate
        "k_proj": ((d, kv), ("embed", "kv_heads")),
        "v_proj": ((d, kv), ("embed", "kv_heads")),
        "o_proj": ((q, d), ("heads", "embed")),
        "q_norm": ((hd,), ("head_dim",)),
        "k_norm": ((hd,), ("head_dim",)),
    }


def _linear_shapes(config: Qwen3_5Config) -> layers.Shapes:
    d, heads = config.d_model, config.linear_num_value_heads
    values = heads * config.linear_value_dim
    return _mlp_shapes(config) | {
        "in_proj_qkv": ((d, config.conv_channels), ("embed", "heads")),
        "in_proj_z": ((d, values), ("embed", "heads")),
        "in_proj_b": ((d, heads), ("embed", "heads")),
        "in_proj_a": ((d, heads), ("embed", "heads")),
        "conv1d": ((config.conv_channels, config.conv_width), ("heads", "conv")),
        "dt_bias": ((heads,), ("heads",)),
        "A_log": ((heads,), ("heads",)),
        "value_norm": ((config.linear_value_dim,), ("head_dim",)),
        "out_proj": ((values, d), ("heads", "embed")),
    }


def _top_shapes(config: Qwen3_5Config) -> layers.Shapes:
    matrix = ((config.vocab_size, config.d_model), ("vocab", "embed"))
    shapes = {"embed": matrix, "final_norm": ((config.d_model,), ("embed",))}
    return shapes if config.tie_embeddings else shapes | {"lm_head": matrix}


def _tree(config: Qwen3_5Config, which: int) -> Params:
    full = config.num_groups
    linear = config.num_layers - full
    lead = (lambda n: (n,)) if which == 0 else (lambda n: ("layers",))
    tree: Params = {name: entry[which] for name, entry in _top_shapes(config).items()}
    for kind, count, shapes in (
        ("linear_layers", linear, _linear_shapes(config)),
        ("full_layers", full, _full_shapes(config)),
    ):
        tree[kind] = {name: lead(count) + entry[which] for name, entry in shapes.items()}
    return tree


def param_shapes(config: Qwen3_5Config) -> Params:
    """Shapes of all parameters, as a tree of tuples."""
    return _tree(config, 0)


def logical_axes(config: Qwen3_5Config) -> Params:
    """Names of all axes, as a tree of tuples of the structure of the parameters."""
    return _tree(config, 1)


def init_params(config: Qwen3_5Config, key: Array) -> Params:
    """Draws float32 parameters, see `layers.draw`; zero-centred norms start at 0.

    Decays start slow (`A = 1`, `dt_bias = 1` as a plain start). `key` is consumed.
    """
    ones = ("value_norm", "dt_bias")
    return layers.draw(
        param_shapes(config), key, depth=config.num_layers, ones=lambda name: name in ones
    )


def _norm(x: Array, weight: Array, eps: float) -> Array:
    """Zero-centred: `x / rms(x) * (1 + weight)`, all of it in float32."""
    scaled = layers.rms_norm(x.astype(jnp.float32), 1.0 + weight.astype(jnp.float32), eps)
    return scaled.astype(x.dtype)


def _feed_forward(config: Qwen3_5Config, layer: Params, x: Array) -> Array:
    return x + layers.swiglu(layer, _norm(x, layer["mlp_norm"], config.rms_eps))


# --- attention layers ----------------------------------------------------------------------------


def _qkv(config: Qwen3_5Config, layer: Params, x: Array, cos: Array, sin: Array):
    """q [B, L, heads, hd], its gate [B, L, heads * hd], k and v [B, kv_heads, L, hd]."""
    batch, length, _ = x.shape
    h = _norm(x, layer["mixer_norm"], config.rms_eps)
    q = project(h, layer["q_proj"]).reshape(batch, length, config.num_heads, -1)
    q, gate = jnp.split(q, 2, axis=-1)
    k, v = (
        project(h, layer[f"{n}_proj"]).reshape(batch, length, config.num_kv_heads, -1) for n in "kv"
    )
    q = layers.rotate(_norm(q, layer["q_norm"], config.rms_eps), cos, sin)
    k = layers.rotate(_norm(k, layer["k_norm"], config.rms_eps), cos, sin)
    gate = gate.reshape(batch, length, -1)
    return q, gate, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def _finish_attention(layer: Params, x: Array, attended: Array, gate: Array) -> Array:
    attended = attended.reshape(gate.shape) * jax.nn.sigmoid(gate)
    return x + project(attended, layer["o_proj"])


# --- delta layers --------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaState:
    """What a delta layer remembers of the tokens so far.

    Attributes:
      window: [B, conv_width - 1, channels] latest inputs of the convolution.
      memory: [B, value_heads, key_dim, value_dim] float32.
    """

    window: Array
    memory: Array


def _empty_state(config: Qwen3_5Config, batch: int) -> DeltaState:
    shape = (
        batch,
        config.linear_num_value_heads,
        config.linear_key_dim,
        config.linear_value_dim,
    )
    window = jnp.zeros((batch, config.conv_width - 1, config.conv_channels), config.dtype)
    return DeltaState(window, jnp.zeros(shape, jnp.float32))


def _delta_mixer(
    config: Qwen3_5Config,
    layer: Params,
    x: Array,
    document: Array,
    real: Array,
    state: DeltaState,
) -> tuple[Array, DeltaState]:
    """One delta layer without its feed-forward block.

    `document` [B, L] says where memories begin (0 goes on from `state`); tokens that are not
    `real` [B, L] come last and leave the memory as it is.
    """
    batch, length, _ = x.shape
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    h = _norm(x, layer["mixer_norm"], config.rms_eps)
    inputs = project(h, layer["in_proj_qkv"])
    mixed = jax.nn.silu(causal_conv(inputs, layer["conv1d"], document, state.window))
    keys = key_heads * config.linear_key_dim
    q, k, v = jnp.split(mixed.astype(jnp.float32), [keys, 2 * keys], axis=-1)
    q, k = (
        jnp.repeat(
            l2_normalise(y.reshape(batch, length, key_heads, -1)), heads // key_heads, axis=2
        )
        for y in (q, k)
    )
    q = q * config.linear_key_dim**-0.5
    v = v.reshape(batch, length, heads, -1)
    beta = jax.nn.sigmoid(project(h, layer["in_proj_b"]).astype(jnp.float32))
    rate = jax.nn.softplus(
        project(h, layer["in_proj_a"]).astype(jnp.float32) + layer["dt_bias"].astype(jnp.float32)
    )
    log_decay = -jnp.exp(layer["A_log"].astype(jnp.float32)) * rate
    beta = jnp.where(real[..., None], beta, 0.0)
    log_decay = jnp.where(real[..., None], log_decay, 0.0)
    if length == 1:
        out, memory = delta_step(
            q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], beta[:, 0], state.memory
        )
        out = out[:, None]
    else:
        out, memory = chunked_delta_rule(
            *(jnp.moveaxis(y, 1, 2) for y in (q, k, v, log_decay, beta)),
            document,
            state.memory,
            chunk=min(CHUNK, length),
            remat=config.remat == "chunks",
        )
        out = jnp.moveaxis(out, 1, 2)
    z = project(h, layer["in_proj_z"]).reshape(out.shape).astype(jnp.float32)
    out = layers.rms_norm(out, layer["value_norm"], config.rms_eps) * jax.nn.silu(z)
    out = project(out.reshape(batch, length, -1).astype(x.dtype), layer["out_proj"])
    # The last inputs that are real, those of the old window where there are fewer.
    count = jnp.sum(real, axis=1)
    index = count[:, None] + jnp.arange(config.conv_width - 1)
    window = jnp.concatenate([state.window, inputs.astype(state.window.dtype)], axis=1)
    window = jnp.take_along_axis(window, index[..., None], axis=1)
    return x + out, DeltaState(window, memory)


# --- whole rows ----------------------------------------------------------------------------------


def hidden_states(
    config: Qwen3_5Config,
    params: Params,
    tokens: Array,
    *,
    positions: Array | None = None,
    node_id: Array | None = None,
    visible_until: Array | None = None,
) -> Array:
    """Final hidden states of packed rows; arguments as `transformer.hidden_states`.

    Every node is a document: the memories of delta layers begin empty there.

    Raises:
      ValueError: `visible_until` is given; a memory cannot look into a part of another node.
    """
    if visible_until is not None:
        raise ValueError(
            "recurrent layers know documents side by side (node_id) and no prefix trees: leave "
            "visible_until out, and pack with share_prefixes=False"
        )
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    cos, sin = layers.rotary(
        positions, layers.inverse_frequencies(config.rotary_dim, config.rope_theta)
    )
    attend = attention.row_attention(
        config.attention, (batch, length), node_id, None, config.head_dim**-0.5
    )
    document = jnp.zeros((batch, length), jnp.int32) if node_id is None else node_id
    real = document >= 0
    empty = _empty_state(config, batch)

    def linear_block(x, layer):
        x, _ = _delta_mixer(config, layer, x, document, real, empty)
        return constrain_tokens(_feed_forward(config, layer, x)), None

    def full_block(x, layer):
        q, gate, k, v = _qkv(config, layer, x, cos, sin)
        x = _finish_attention(layer, x, attend(q, k, v), gate)
        return constrain_tokens(_feed_forward(config, layer, x))

    linear_block = layers.rematerialised(linear_block, config.remat)
    full_block = layers.rematerialised(full_block, config.remat)

    def group(x, stacked):
        linear, full = stacked
        x, _ = jax.lax.scan(linear_block, x, linear)
        return full_block(x, full), None

    linear = jax.tree.map(
        lambda p: p.reshape(config.num_groups, -1, *p.shape[1:]), params["linear_layers"]
    )
    x = constrain_tokens(params["embed"].astype(config.dtype)[tokens])
    x, _ = jax.lax.scan(group, x, (linear, params["full_layers"]), unroll=config.scan_unroll)
    return _norm(x, params["final_norm"], config.rms_eps)


# --- decoding ------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Slots of a decoder.

    Attributes:
      k: per attention layer [slots, kv_heads, length, head_dim], rotary already applied.
      v: per attention layer [slots, kv_heads, length, head_dim].
      delta: per delta layer.
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    delta: tuple[DeltaState, ...]


def init_cache(config: Qwen3_5Config, slots: int, length: int) -> Cache:
    """An empty cache of `slots` rows of `length` tokens."""
    shape = (slots, config.num_kv_heads, length, config.head_dim)
    zeros = tuple(jnp.zeros(shape, config.dtype) for _ in range(config.num_groups))
    linear = range(config.num_layers - config.num_groups)
    delta = tuple(_empty_state(config, slots) for _ in linear)
    return Cache(k=zeros, v=tuple(jnp.zeros_like(z) for z in zeros), delta=delta)


def layer_list(config: Qwen3_5Config, params: Params) -> list[Params]:
    """Parameters of each layer on its own, in order: do this once, outside a decoding loop."""
    every, out = config.full_attention_interval, []
    for i in range(config.num_layers):
        group, place = divmod(i, every)
        kind, at = (
            ("full_layers", group)
            if place == every - 1
            else ("linear_layers", group * (every - 1) + place)
        )
        out.append(jax.tree.map(operator.itemgetter(at), params[kind]))
    return out


def extend(
    config: Qwen3_5Config,
    params: Params,
    layer_params: list[Params],
    tokens: Array,
    lengths: Array,
    cache: Cache,
    counts: Array | None = None,
) -> tuple[Array, Cache]:
    """Appends tokens behind a cache; arguments as `transformer.extend`, and

    Args:
      config: shape of the model.
      params: parameters (embedding and final norm are read here).
      layer_params: `layer_list(config, params)`.
      tokens: [B, C] int32 new tokens, padded at the end.
      lengths: [B] int32 tokens already in each slot.
      cache: B slots.
      counts: [B] int32 how many of `tokens` are real, since a memory cannot forget padding;
        None: all.

    Returns:
      `(hidden [B, C, H] after the final norm, cache)`.
    """
    batch, count = tokens.shape
    positions = lengths[:, None] + jnp.arange(count)
    real = jnp.ones(tokens.shape, bool)
    if counts is not None:
        real = jnp.arange(count) < counts[:, None]
    document = jnp.zeros(tokens.shape, jnp.int32)
    cos, sin = layers.rotary(
        positions, layers.inverse_frequencies(config.rotary_dim, config.rope_theta)
    )
    mask = jnp.arange(cache.k[0].shape[2]) <= positions[:, :, None]
    x = params["embed"].astype(config.dtype)[tokens]
    keys, values, delta = [], [], []
    for i, layer in enumerate(layer_params):
        if (i + 1) % config.full_attention_interval:
            state = cache.delta[len(delta)]
            x, state = _delta_mixer(config, layer, x, document, real, state)
            delta.append(state)
        else:
            q, gate, k, v = _qkv(config, layer, x, cos, sin)
            keys.append(layers.write_cache(cache.k[len(keys)], k, lengths))
            values.append(layers.write_cache(cache.v[len(values)], v, lengths))
            attended = attention.attend(q, keys[-1], values[-1], mask, config.head_dim**-0.5)
            x = _finish_attention(layer, x, attended, gate)
        x = _feed_forward(config, layer, x)
    hidden = _norm(x, params["final_norm"], config.rms_eps)
    return hidden, Cache(k=tuple(keys), v=tuple(values), delta=tuple(delta))
