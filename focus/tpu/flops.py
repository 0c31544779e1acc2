"""Floating-point operations of the models, by formula. A multiply and an add are two.

Of one token in a forward pass through a model with P weights in the matrices of its layers, H
attention heads of width D in each of its A attention layers, vocabulary V and width M:

    layers       2 P
    attention    4 A H D c       c: tokens that it attends to, itself included
    unembedding  2 V M

In a row of L tokens c is (L + 1) / 2 on average. A backend that computes masked pairs as well
spends c = L, one that passes over masked blocks of N tokens c = (L + N) / 2.

A gated delta layer has no c. With H heads of values, keys of width K and values of width W the
recurrence takes for every head and token three products of a vector with the memory,

    recurrence   6 H K W

Rows are computed in chunks of C tokens, in which that is joined by scores and corrections between
the tokens of a chunk, and by the inverse of a triangular matrix (`gated_delta.unit_lower_inverse`)
from those of its C / B blocks of B rows, whose own take 2 (log2(B) - 1) products:

    chunks       H (6 K W + 4 C (K + W) + 4 B^2 (log2(B) - 1) + 2 (C^2 - B^2) / 3)

The gradient of the inverse takes two products, 4 C^2.

*Model* FLOPs are what the mathematics needs: c = (L + 1) / 2, the recurrence, and a backward pass
of twice the forward. They are what MFU counts. *Hardware* FLOPs are what is executed on top of
it: masked pairs, chunks, logits that are computed again, attention weights that are computed
again by a kernel which does not keep them, and the forward pass of rematerialised layers. Both
count the unembedding for every token, as if the policy had written all of them; what it has only
read costs less (`focus.policy.logprobs`).

Adapters of N numbers (`focus.policy.lora`) take part in every pass, and what lies below them has
no gradient: the backward pass goes through a frozen matrix once, to its input, and not twice.
Model FLOPs of training are then

    2 P + 2 V M + 2 N              forward
    2 P + 2 V M + 4 N              backward
    3 (attention + recurrence)     both: nothing in there is frozen

about two thirds of those without adapters where rows are short. MFU counts these and no others: a
gradient that nobody wants is no useful work, and what is saved shows in the time of a step, not in
its MFU. A thin product counts like any other, although an array of multipliers that is wider than
the rank is idle for the rest of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from focus.policy import attention, blockwise, gated_delta, lora, qwen3_5, splash, transformer
from focus.policy import model as models

# Matrix products of a backward pass through attention, in units of the forward's two: dv, dp, dq
# and dk; a kernel that keeps no weights computes q k^T again, and splash does so in each of its two
# kernels, with dp.
_BACKWARD_PRODUCTS = {"plain": 4, "blockwise": 5, "allgather": 5, "splash": 7}
# Tokens of a block in a row of so many, of those that pass over blocks which the mask hides.
_BLOCK = {
    "plain": attention.plain_block,
    "blockwise": functools.partial(min, blockwise.BLOCK),
    "splash": functools.partial(min, splash.BLOCK),
}


def _last_products(config: Any) -> int:
    """Weights of the matrices whose product ends a layer."""
    return config.num_layers * config.d_ff * config.d_model


def _adapter_weights(config: Any, adapters: lora.LoraConfig | None) -> tuple[int, int, int]:
    """Numbers of adapters: all, those of second factors, and of these in a layer's last product."""
    if adapters is None:
        return 0, 0, 0
    seconds = [
        (name, math.prod(adapter.b.shape))
        for tree in lora.adapter_shapes(config, adapters).values()
        for name, adapter in tree.items()
    ]
    last = sum(size for name, size in seconds if name == "down_proj")
    return lora.num_adapter_params(config, adapters), sum(size for _, size in seconds), last


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one token.

    Attributes:
      layers: products with the weights of the layers.
      attention: products of queries with keys, and of weights with values.
      recurrence: products with and for the memories of recurrent layers.
      unembedding: logits.
    """

    layers: float
    attention: float
    recurrence: float
    unembedding: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.layers + self.attention + self.recurrence + self.unembedding


def _weights(params: Any) -> int:
    """Weights in stacked matrices; vectors such as norms and biases are left out."""
    stacked = {name: tree for name, tree in params.items() if name not in ("embed", "lm_head")}
    shapes = jax.tree.leaves(stacked, is_leaf=lambda x: isinstance(x, tuple))
    return sum(math.prod(shape) for shape in shapes if len(shape) >= 3)


def attention_layers(config: Any) -> int:
    """Layers whose cost grows with the context.

    Raises:
      ValueError: a family without a formula.
    """
    if isinstance(config, qwen3_5.Qwen3_5Config):
        return config.num_groups
    if isinstance(config, transformer.ModelConfig):
        return config.num_layers
    raise ValueError(f"no FLOP formula for {type(config).__name__}: add its family here")


def recurrence_flops(config: Any, chunk: int = 1) -> float:
    """FLOPs of one token with the memories of all recurrent layers, forward.

    Args:
      config: shape of the model.
      chunk: tokens that are treated together; 1 is the recurrence itself.
    """
    layers = config.num_layers - attention_layers(config)
    if not layers:
        return 0.0
    keys, values = config.linear_key_dim, config.linear_value_dim
    head = 6.0 * keys * values
    if chunk > 1:
        head += 4.0 * chunk * (keys + values) + _inverse_flops(chunk)
    return layers * config.linear_num_value_heads * head


def _inverse_flops(chunk: int) -> float:
    """FLOPs of one token of a chunk in the inverse of one head, forward."""
    block, count = gated_delta.inverse_blocks(chunk)
    total = count * 4.0 * block**3 * max(math.log2(block) - 1, 0)
    while count > 1:
        count //= 2
        total += count * 4.0 * block**3
        block *= 2
    return total / chunk


def _inverse_gradient_flops(config: Any, length: int) -> float:
    """What the backward pass of one token through inverses takes beyond twice the forward's."""
    chunk = min(gated_delta.CHUNK, length)
    layers = config.num_layers - attention_layers(config)
    if not layers or chunk == 1:
        return 0.0
    return layers * config.linear_num_value_heads * (4.0 * chunk**2 - 2 * _inverse_flops(chunk))


def forward_flops(config: Any, context: float) -> Flops:
    """Model FLOPs of one token in a forward pass.

    Args:
      config: shape of the model.
      context: tokens that the token attends to, itself included.

    Returns:
      Its FLOPs; those of `unembedding` only where logits are wanted.

    Raises:
      ValueError: a family without a formula.
    """
    pairs = attention_layers(config) * config.num_heads * config.head_dim
    return Flops(
        layers=2.0 * _weights(models.param_shapes(config)),
        attention=4.0 * pairs * context,
        recurrence=recurrence_flops(config),
        unembedding=2.0 * config.vocab_size * config.d_model,
    )


def row_flops(config: Any, length: int) -> Flops:
    """Model FLOPs of one token of a row in a forward pass, on average.

    Args:
      config: shape of the model.
      length: tokens of the row, one causal sequence; a row of shorter sequences needs less.
    """
    return forward_flops(config, (length + 1) / 2)


def _executed(config: Any, length: int) -> Flops:
    """What a forward pass over rows executes."""
    block = _BLOCK[config.attention](length) if config.attention in _BLOCK else length
    chunk = min(gated_delta.CHUNK, length)
    return dataclasses.replace(
        forward_flops(config, (length + block) / 2), recurrence=recurrence_flops(config, chunk)
    )


def score_flops(
    config: Any, length: int, adapters: lora.LoraConfig | None = None
) -> tuple[float, float]:
    """FLOPs of one token in a scoring pass.

    Args:
      config: shape of the model.
      length: tokens of a row.
      adapters: that the model has; None: it has none.

    Returns:
      `(model, hardware)`.
    """
    applied = 2.0 * _adapter_weights(config, adapters)[0]
    executed = _executed(config, length)
    return row_flops(config, length).total + applied, executed.total + applied


def train_flops(
    config: Any, length: int, adapters: lora.LoraConfig | None = None
) -> tuple[float, float]:
    """FLOPs of one token in a forward and backward pass.

    Args:
      config: shape of the model; `remat` and `attention` say what is computed twice.
      length: tokens of a row.
      adapters: that are trained on frozen weights; None: all weights are trained.

    Returns:
      `(model, hardware)`.
    """
    needed, executed = row_flops(config, length), _executed(config, length)
    numbers, seconds, last = _adapter_weights(config, adapters)
    # A product with weights, its gradient to its input, and that to the weights.
    passes = 3 if adapters is None else 2
    # The forward pass of a layer, again: "dots" keeps products with weights, not attention, not
    # memories and not what the second factors of adapters give; of "full" the last product is
    # spared, because no gradient reads its result.
    again = {
        "none": (0.0, 0.0, 0.0),
        "dots": (0.0, 2.0 * (seconds - last), 1.0),
        "full": (executed.layers - 2.0 * _last_products(config), 2.0 * (numbers - last), 1.0),
    }
    layers, applied, others = again["full" if config.remat == "chunks" else config.remat]
    chunks = 1.0 if config.remat == "chunks" else 0.0
    hardware = (
        passes * executed.layers
        + layers
        + 6.0 * numbers
        + applied
        + executed.attention * (1 + others + _BACKWARD_PRODUCTS[config.attention] / 2)
        + executed.recurrence * (3 + others + chunks)
        + _inverse_gradient_flops(config, length)
        + executed.unembedding * (passes + 1)
    )
    model = (
        passes * (needed.layers + needed.unembedding)
        + 6.0 * numbers
        + 3 * (needed.attention + needed.recurrence)
    )
    return model, hardware
