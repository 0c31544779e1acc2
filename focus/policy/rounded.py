"""Weights whose products round both operands: float32 sums at the speed of a shorter format.

TPUs multiply float32 matrices this way unless told otherwise. CPUs with instructions for
bfloat16 matrices do it at several times their float32 rate; activations, norms, softmax and the
parameters themselves stay in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

FORMATS = ("bfloat16", "float16")


def check_format(name: str) -> None:
    """Raises ValueError for a format that operands cannot be rounded to."""
    if name not in FORMATS:
        raise ValueError(f"products must be None or one of {', '.join(FORMATS)}; got {name!r}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(dtype: str, x: Array, weight: Array) -> Array:
    """`x @ weight` with operands rounded to `dtype` and sums in float32, in both passes.

    The cotangent is rounded as well, so the two products of the backward pass run at the same rate.

    Args:
      dtype: name of a floating-point format.
      x: [T, in] float32.
      weight: [in, out] float32.

    Returns:
      [T, out] float32.
    """
    return _forward(dtype, x, weight)[0]


def _forward(dtype, x, weight):
    x, weight = x.astype(dtype), weight.astype(dtype)
    return jnp.dot(x, weight, preferred_element_type=jnp.float32), (x, weight)


def _backward(dtype, operands, g):
    x, weight = operands
    g = g.astype(dtype)
    g_x = jnp.einsum("to,io->ti", g, weight, preferred_element_type=jnp.float32)
    g_weight = jnp.einsum("ti,to->io", x, g, preferred_element_type=jnp.float32)
    return g_x, g_weight


product.defvjp(_forward, _backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundedWeight:
    """A float32 projection that models multiply by as by a matrix.

    Attributes:
      weight: [..., in, out] float32.
      dtype: name of the format that operands are rounded to.
    """

    weight: Array
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the projection."""
        return self.weight.shape

    def astype(self, dtype: Any) -> RoundedWeight:
        """Itself: what it is computed in is `self.dtype`."""
        if jnp.dtype(dtype) != jnp.float32:
            raise ValueError(
                f"products are rounded to {self.dtype} for a float32 model; this one computes in "
                f"{jnp.dtype(dtype).name} already: leave the products at the model's dtype"
            )
        return self

    def __rmatmul__(self, x: Array) -> Array:
        """`product` of [T, in] activations."""
        return product(self.dtype, x, self.weight)


def attach(params: Any, dtype: str) -> Any:
    """Parameters of a model with every projection as a `RoundedWeight`; adapters stay as they are.

    Args:
      params: nested dict of float32 parameters; projections are those with "_proj" in their name.
      dtype: name of a floating-point format.
    """

    def one(path, leaf):
        return RoundedWeight(leaf, dtype) if "_proj" in getattr(path[-1], "key", "") else leaf

    return jax.tree_util.tree_map_with_path(one, params)
