"""Floating-point operations of the models, by formula. A multiply and an add are two.

Of one token in a forward pass through a model with P weights in the matrices of its layers, H
attention heads of width D in each of its A attention layers, vocabulary V and width M:

    layers       2 P
    attention    4 A H D c       c: tokens that it attends to, itself included
    unembedding  2 V M

In a row of L tokens c is (L + 1) / 2 on average; a backend that computes masked pairs as well
spends c = L. A gated delta layer has no c: with Hv heads, keys of width K and values of width W
the recurrence takes 6 Hv K W. Products inside of chunks, which is how rows are computed, come on
top of it and are not counted: less than a hundredth of a 9B model.

*Model* FLOPs are what the mathematics needs: c = (L + 1) / 2, the recurrence, and a backward pass
of twice the forward. They are what MFU counts. *Hardware* FLOPs are what is executed on top of
it: masked pairs, logits that are computed again, attention weights that are computed
again by a kernel which does not keep them, and the forward pass of rematerialised layers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from focus.policy import model as models
from focus.policy import qwen3_5, transformer

# Matrix products of a backward pass through attention, in units of the forward's two: dv, dp, dq
# and dk; a kernel that keeps no weights computes q k^T again, and splash does so in each of its two
# kernels, with dp.
_BACKWARD_PRODUCTS = {"plain": 4, "blockwise": 5, "allgather": 5, "splash": 7}
# These skip what the causal mask hides; the others compute every pair.
_SKIPS_MASKED = ("blockwise", "splash")


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one token.

    Attributes:
      layers: products with the weights of the layers.
      attention: products of attention, and the scan of recurrent layers.
      unembedding: logits.
    """

    layers: float
    attention: float
    unembedding: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.layers + self.attention + self.unembedding


def _weights(params: Any) -> int:
    """Weights in stacked matrices; vectors such as norms and biases are left out."""
    stacked = {name: tree for name, tree in params.items() if name not in ("embed", "lm_head")}
    shapes = jax.tree.leaves(stacked, is_leaf=lambda x: isinstance(x, tuple))
    return sum(math.prod(shape) for shape in shapes if len(shape) >= 3)


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
    if not isinstance(config, transformer.ModelConfig | qwen3_5.Qwen3_5Config):
        raise ValueError(f"no FLOP formula for {type(config).__name__}: add its family here")
    attention_layers, recurrent = config.num_layers, 0.0
    if isinstance(config, qwen3_5.Qwen3_5Config):
        attention_layers //= config.full_attention_interval
        state = config.linear_num_value_heads * config.linear_key_dim * config.linear_value_dim
        recurrent = 6.0 * (config.num_layers - attention_layers) * state
    pairs = attention_layers * config.num_heads * config.head_dim
    return Flops(
        layers=2.0 * _weights(models.param_shapes(config)),
        attention=4.0 * pairs * context + recurrent,
        unembedding=2.0 * config.vocab_size * config.d_model,
    )


def row_flops(config: Any, length: int) -> Flops:
    """Model FLOPs of one token of a row in a forward pass, on average.

    Args:
      config: shape of the model.
      length: tokens of the row, one causal sequence; a row of shorter sequences needs less.
    """
    return forward_flops(config, (length + 1) / 2)


def _executed(config: Any, length: int, backend: str) -> Flops:
    """What a forward pass over rows executes."""
    return forward_flops(config, (length + 1) / 2 if backend in _SKIPS_MASKED else length)


def score_flops(config: Any, length: int) -> tuple[float, float]:
    """FLOPs of one token in a scoring pass.

    Args:
      config: shape of the model.
      length: tokens of a row.

    Returns:
      `(model, hardware)`.
    """
    executed = _executed(config, length, config.attention)
    return row_flops(config, length).total, executed.total


def train_flops(config: Any, length: int) -> tuple[float, float]:
    """FLOPs of one token in a forward and backward pass.

    Args:
      config: shape of the model; `remat` and `attention` say what is computed twice.
      length: tokens of a row.

    Returns:
      `(model, hardware)`.
    """
    backend = config.attention
    executed = _executed(config, length, backend)
    # "dots" keeps products with weights, not attention.
    products, attention = {"none": (3, 1), "dots": (3, 2), "full": (4, 2)}[config.remat]
    hardware = (
        executed.layers * products
        + executed.attention * (attention + _BACKWARD_PRODUCTS[backend] / 2)
        + executed.unembedding * 4
    )
    return 3 * row_flops(config, length).total, hardware
