"""The device mesh, and which array lies where.

Three axes: `data` (copies of the model), `fsdp` (parameters cut up, gathered layer by layer),
`tensor` (matrix products cut up). Rows are spread over the first two. A parameter's place
follows from its path: one list of (regular expression, PartitionSpec) covers parameters and
every optimiser moment, whose path ends with the name of its parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROW_SPEC = PartitionSpec(("data", "fsdp"))

Rules = Sequence[tuple[str, PartitionSpec]]

# First match wins. Stacked layers have a leading axis, which is never cut.
RULES: Rules = (
    (r"(^|/)(embed|lm_head)$", PartitionSpec("tensor", "fsdp")),
    (r"(^|/)(q|k|v|gate|up)_proj$", PartitionSpec(None, "fsdp", "tensor")),
    (r"(^|/)(o|down)_proj$", PartitionSpec(None, "tensor", "fsdp")),
    (r"(^|/)(q|k|v)_bias$", PartitionSpec(None, "tensor")),
    (r"norm$", PartitionSpec()),
    # Last: a transformer of the critic's own lies like the policy's, its heads are small.
    (r"(^|/)critic(/|$)", PartitionSpec()),
)


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh with the axes data, fsdp and tensor.

    Args:
      data: devices along each axis; one of the three may be -1, "what is left".
      fsdp: see `data`.
      tensor: see `data`.
      devices: None for all of them.

    Returns:
      A mesh whose axes are left to the compiler (`AxisType.Auto`).

    Raises:
      ValueError: the numbers do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes, count = [data, fsdp, tensor], len(devices)
    shape = "x".join(f"{axis}={size}" for axis, size in zip(AXES, sizes))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh {shape}: sizes are positive, and at most one of them is -1")
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        if count % known:
            raise ValueError(
                f"mesh {shape}: {count} devices cannot be divided by {known}; choose sizes whose "
                "product divides the number of devices"
            )
        sizes[sizes.index(-1)] = count // known
    if math.prod(sizes) != count:
        raise ValueError(
            f"mesh {shape} has {math.prod(sizes)} places for {count} devices; set one size to -1 "
            "to use what is left"
        )
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def path_name(path: Sequence[Any]) -> str:
    """A tree path as "opt_state/1/mu/layers/q_proj"."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def shardings_of(tree: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Where each array of a tree lies.

    Args:
      tree: arrays or their shapes (`jax.eval_shape`).
      mesh: the mesh.
      rules: (regular expression, spec) pairs, searched in the path; the first match wins.
        Scalars need no rule.

    Returns:
      A tree of `NamedSharding` of the same structure.

    Raises:
      ValueError: no rule matches, or a rule does not fit the shape.
    """

    def place(path, leaf):
        name = path_name(path)
        if not leaf.shape:
            return NamedSharding(mesh, PartitionSpec())
        spec = next((spec for pattern, spec in rules if re.search(pattern, name)), None)
        if spec is None:
            raise ValueError(f"no sharding rule for {name} of shape {leaf.shape}; add one")
        if len(spec) > len(leaf.shape):
            raise ValueError(f"{name}: {spec} has more axes than the shape {leaf.shape}")
        for size, axis in zip(leaf.shape, spec):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"{name} of shape {leaf.shape}: {size} cannot be cut into {mesh.shape[axis]} "
                    f"along {axis!r}; make mesh.{axis} a divisor or change the rule"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, tree)


def init_sharded(
    init: Callable[..., Any], *args: Any, mesh: Mesh, rules: Rules = RULES
) -> tuple[Any, Any]:
    """Runs `init(*args)` so that every array is born in its place.

    Args:
      init: makes a tree of arrays.
      *args: its arguments.
      mesh: the mesh.
      rules: see `shardings_of`.

    Returns:
      `(tree, shardings)`.
    """
    shardings = shardings_of(jax.eval_shape(init, *args), mesh, rules)
    return jax.jit(init, out_shardings=shardings)(*args), shardings


def num_row_shards(mesh: Mesh) -> int:
    """Devices that rows are spread over."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Puts arrays with a leading axis of rows on the mesh, spread over data and fsdp.

    Raises:
      ValueError: the number of rows is not a multiple of `data * fsdp`.
    """
    shards = num_row_shards(mesh)
    for leaf in jax.tree.leaves(tree):
        if np.shape(leaf)[0] % shards:
            raise ValueError(
                f"{np.shape(leaf)[0]} rows cannot be spread over {shards} devices (data x fsdp); "
                "make learner.micro_rows a multiple"
            )
    return jax.device_put(tree, NamedSharding(mesh, ROW_SPEC))
