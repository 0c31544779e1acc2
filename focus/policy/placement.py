"""Where activations lie on the ambient mesh.

The compiler spreads whatever it is not told about. Left alone it cuts activations the way it
finds the embedding cut, along their width, and then every chip works on every row. So models pin
the few arrays that decide: tokens lie where their rows lie.
"""

from __future__ import annotations

import math

import jax
from jax.sharding import PartitionSpec

Array = jax.Array
Axis = str | tuple[str, ...] | None

ROWS = ("data", "fsdp")


def axis_size(axis: Axis) -> int:
    """Devices along axes of the ambient mesh; 1 for those that it does not have."""
    mesh = jax.sharding.get_abstract_mesh()
    names = (axis,) if isinstance(axis, str) else axis or ()
    return math.prod(mesh.shape.get(name, 1) for name in names)


def constrain(x: Array, *axes: Axis) -> Array:
    """Pins an array to axes of the ambient mesh; does nothing where there is no mesh.

    Args:
      x: any array.
      *axes: mesh axis or axes of each dimension, None for dimensions that are not cut; axes that
        the ambient mesh does not have are left out.

    Returns:
      `x`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x

    def present(axis: Axis) -> Axis:
        names = (axis,) if isinstance(axis, str) else axis or ()
        return tuple(name for name in names if name in mesh.axis_names) or None

    return jax.lax.with_sharding_constraint(x, PartitionSpec(*map(present, axes)))


def constrain_tokens(x: Array) -> Array:
    """Pins [B, L, ...] activations: rows over data and fsdp, tokens of a row over sequence."""
    return constrain(x, ROWS, "sequence", *(None,) * (x.ndim - 2))
