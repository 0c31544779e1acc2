"""The device mesh, and which array lies where.

Four axes: `data` (copies of the model), `fsdp` (parameters cut up, gathered layer by layer),
`tensor` (matrix products cut up), `sequence` (tokens of a row cut up). Rows are spread over the
first two. A parameter's place follows from its path: one list of (regular expression,
PartitionSpec) covers parameters and every optimiser moment, whose path ends with the name of its
parameter.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from focus.learner import hosts
from focus.policy.splash import LANES

AXES = ("data", "fsdp", "tensor", "sequence")
ROW_SPEC = PartitionSpec(("data", "fsdp"))

Rules = Sequence[tuple[str, PartitionSpec]]

# First match wins. A spec is that of a matrix as one layer has it: it stands for the last axes of
# an array, and the axes before them, over which layers are stacked, are never cut.
RULES: Rules = (
    (r"(^|/)(embed|lm_head)$", PartitionSpec("tensor", "fsdp")),
    # Adapters of low rank: cut where their matrix is, the rank is whole.
    (r"(^|/)(o|down|out)_proj/a$", PartitionSpec("tensor", None)),
    (r"(^|/)(o|down|out)_proj/b$", PartitionSpec(None, "fsdp")),
    (r"_proj(_\w+)?/a$", PartitionSpec("fsdp", None)),
    (r"_proj(_\w+)?/b$", PartitionSpec(None, "tensor")),
    (r"(^|/)(o|down|out)_proj$", PartitionSpec("tensor", "fsdp")),
    (r"(^|/)(q|k|v|gate|up)_proj$", PartitionSpec("fsdp", "tensor")),
    (r"(^|/)in_proj_\w+$", PartitionSpec("fsdp", "tensor")),
    (r"(^|/)(q|k|v)_bias$", PartitionSpec("tensor")),
    (r"(^|/)conv1d$", PartitionSpec("tensor", None)),
    (r"(^|/)(A_log|dt_bias)$", PartitionSpec()),  # one number a head
    (r"norm$", PartitionSpec()),
    # Last: a transformer of the critic's own lies like the policy's, its heads are small.
    (r"(^|/)(critic|confidence)(/|$)", PartitionSpec()),
)

# Of what comes with rows, by path. The rest has one entry per token.
ROW_RULES: Rules = (
    (r"(^|/)(visible_until|state_pos|evidence)(/|$)", ROW_SPEC),
    (r"", PartitionSpec(*ROW_SPEC, "sequence")),
)

# Attention backends that are right, and lean, when the tokens of a row are cut up. "plain" is
# gathered by the compiler: right everywhere, with memory quadratic in the length.
SEQUENCE_BACKENDS = ("plain", "allgather")
# Backends that run on each device by themselves, with whole heads.
LOCAL_BACKENDS = ("allgather", "splash")

# Devices that a CPU is made to look like share a pool of threads, which is as large as their number
# or that of the cores. A thread that has come to a collective waits in it for the other devices.
# One of the program and one of a loop in it may be met at a time and by each device in another
# order: with fewer threads, all of them can end up waiting for a device that none is left to run.
CPU_THREADS_PER_DEVICE = 2


def num_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def split_cpu(devices: int) -> None:
    """Makes the CPU look like several devices; call it before any other use of JAX.

    They get the threads that they need, see `CPU_THREADS_PER_DEVICE`; so do those of the
    environment variables JAX_NUM_CPU_DEVICES and XLA_FLAGS. A pool that is wanted larger, or
    smaller, is named by the environment variable PJRT_NPROC.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    _spare_threads()


def _spare_threads() -> None:
    """Threads for the devices that the CPU will look like, whoever has said so."""
    flag = re.search(_FORCED_DEVICES, os.environ.get("XLA_FLAGS", ""))
    devices = max(jax.config.jax_num_cpu_devices, int(flag[1]) if flag else 1)
    if devices > 1 and os.environ.get("PJRT_NPROC") in (None, *_spared):
        _spared.append(str(max(num_cores(), CPU_THREADS_PER_DEVICE * devices)))
        os.environ["PJRT_NPROC"] = _spared[-1]


_FORCED_DEVICES = r"--xla_force_host_platform_device_count=(\d+)"
_spared: list[str] = []  # pools that were asked for here, not by the user
_spare_threads()  # whoever spreads anything over devices imports this module before it has any


def make_mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    sequence: int = 1,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh with the axes data, fsdp, tensor and sequence.

    Args:
      data: devices along each axis; one of the four may be -1, "what is left".
      fsdp: see `data`.
      tensor: see `data`.
      sequence: see `data`.
      devices: None for all of them, those of other processes included.

    Returns:
      A mesh whose axes are left to the compiler (`AxisType.Auto`).

    Raises:
      ValueError: the numbers do not multiply to the number of devices, or one row would lie on
        several processes.
    """
    devices = jax.devices() if devices is None else devices
    sizes, count = [data, fsdp, tensor, sequence], len(devices)
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
    mesh = jax.make_mesh(
        tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )
    for places in mesh.devices.reshape(num_row_shards(mesh), -1):
        if len(processes := {device.process_index for device in places}) > 1:
            raise ValueError(
                f"mesh {shape}: the devices of one row belong to processes {sorted(processes)}, "
                "and a process contributes whole rows; choose tensor and sequence so that their "
                f"product divides the {len(jax.local_devices())} devices of a process"
            )
    return mesh


def check_mesh(
    mesh: Mesh, *, micro_rows: int, row_length: int, attention: str, num_kv_heads: int
) -> None:
    """Checks that rows and heads can be spread over a mesh.

    Args:
      mesh: the mesh.
      micro_rows: rows that go through the model at a time.
      row_length: tokens of a row.
      attention: name of the attention backend.
      num_kv_heads: key heads of the model.

    Raises:
      ValueError: names the key, its value, and what would be right.
    """
    shards, sequence = num_row_shards(mesh), mesh.shape["sequence"]
    if micro_rows % shards:
        raise ValueError(
            f"learner.micro_rows={micro_rows} rows cannot be spread over {shards} devices "
            f"(data x fsdp); make it a multiple of {shards}"
        )
    if row_length % sequence:
        raise ValueError(
            f"learner.row_length={row_length} cannot be cut into mesh.sequence={sequence} equal "
            "parts; make it a multiple"
        )
    if sequence > 1 and attention not in SEQUENCE_BACKENDS:
        raise ValueError(
            f"model.attention={attention!r} wants whole rows, and mesh.sequence={sequence} cuts "
            f"them; use one of {', '.join(SEQUENCE_BACKENDS)}, or mesh.sequence=1"
        )
    if attention in LOCAL_BACKENDS and num_kv_heads % mesh.shape["tensor"]:
        raise ValueError(
            f"model.attention={attention!r}: {num_kv_heads} key heads (model.num_kv_heads) cannot "
            f"be spread over mesh.tensor={mesh.shape['tensor']} devices; make it a divisor, or use "
            "'plain'"
        )
    if attention == "splash" and row_length % LANES:
        raise ValueError(
            f"learner.row_length={row_length}: model.attention='splash' wants a multiple of {LANES}"
        )


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
        if any(spec):
            spec = PartitionSpec(*(None,) * (len(leaf.shape) - len(spec)), *spec)
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


def on_mesh(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """A function that is traced with `mesh` as the ambient one, so that models can pin arrays."""

    @functools.wraps(function)
    def placed(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return placed


def num_row_shards(mesh: Mesh) -> int:
    """Devices that rows are spread over."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def rows_of_process(mesh: Mesh, num_rows: int) -> np.ndarray:
    """Which of `num_rows` rows lie on this process's devices, in order."""
    places = NamedSharding(mesh, ROW_SPEC).addressable_devices_indices_map((num_rows,))
    return np.unique(np.concatenate([np.arange(num_rows)[rows] for (rows,) in places.values()]))


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Puts arrays with a leading axis of rows on the mesh, spread over data and fsdp.

    Arrays with an entry per token are cut along their rows, too, over sequence.

    Args:
      tree: rows; of several processes, each gives its own, and equally many.
      mesh: the mesh.

    Raises:
      ValueError: the number of rows is not a multiple of `data * fsdp`, or their length not one
        of `sequence`.
    """
    shards, sequence = num_row_shards(mesh), mesh.shape["sequence"]

    def place(path, leaf):
        rows, *rest = np.shape(leaf)
        if rows * hosts.count() % shards:
            raise ValueError(
                f"{rows * hosts.count()} rows cannot be spread over {shards} devices "
                "(data x fsdp); make learner.micro_rows a multiple"
            )
        name = path_name(path)
        spec = next(spec for pattern, spec in ROW_RULES if re.search(pattern, name))
        if sequence == 1 or not rest:
            spec = ROW_SPEC
        elif len(spec) > 1 and rest[0] % sequence:
            raise ValueError(
                f"rows of {rest[0]} tokens cannot be cut into {sequence} parts (sequence); make "
                "learner.row_length a multiple"
            )
        return NamedSharding(mesh, spec)

    return hosts.contribute(tree, jax.tree_util.tree_map_with_path(place, tree))
