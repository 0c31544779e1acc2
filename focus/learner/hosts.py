"""Several processes, one training run.

Every process plays its share of a step's tasks with an engine of its own, and all of them take
part in every program that runs on the whole mesh. What has to be known everywhere (how many rows
there are, what a mean is taken over, whether somebody has failed) is exchanged here. On a single
process each function gives back what it was given.

Exchanges go through JAX's coordination service, numbered in the order of their calls, so all
processes must make the same calls. A process that fails hands in its error in place of its next
contribution: the others raise it at that place instead of waiting for something that never comes.
Arrays of equal shape go over the devices' network.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost

T = TypeVar("T")

# Longest that one process may be behind another, e.g. because its episodes are longer.
WAIT_S = 3600
# A message of the coordination service is limited to 4 MiB.
_CHUNK_BYTES = 1 << 20

_exchanges = itertools.count()


class OtherProcessFailed(RuntimeError):
    """Another process of the run raised; its own message says why."""


def initialize(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the processes of a run; call it before any other use of JAX.

    Args:
      coordinator: "host:port" of process 0. None: a run of one process, unless
        `num_processes` is 0.
      num_processes: how many there are; 0: coordinator, number and id are found out from the
        cluster's environment (TPU pods, Slurm ...).
      process_id: 0 to `num_processes - 1`.

    Raises:
      ValueError: some of the arguments are missing, or out of range.
    """
    if num_processes == 0:
        if coordinator is not None or process_id is not None:
            raise ValueError(
                "num_processes=0 asks the cluster for coordinator and process_id; leave them out, "
                f"got {coordinator!r} and {process_id}"
            )
        jax.distributed.initialize()
        return
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if missing:
        raise ValueError(
            f"{', '.join(missing)} missing: several processes need coordinator (host:port of "
            "process 0), num_processes and process_id, or num_processes=0 alone on a cluster "
            "that knows them"
        )
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id must lie in [0, num_processes), got {process_id} of {num_processes}"
        )
    if ":" not in coordinator:
        raise ValueError(f"coordinator must be host:port of process 0, got {coordinator!r}")
    jax.distributed.initialize(coordinator, num_processes, process_id)


def count() -> int:
    """Number of processes."""
    return jax.process_count()


def index() -> int:
    """Which one this is, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return index() == 0


# Exchanges.


def gather(value: T) -> list[T]:
    """What every process has to say, in the order of processes.

    Args:
      value: anything that can be pickled; numbers and short records, see `concatenate`.

    Raises:
      OtherProcessFailed: another process has failed, or is `WAIT_S` behind.
    """
    if count() == 1:
        return [value]
    return _exchange(value)


def barrier() -> None:
    """Waits for all processes."""
    gather(None)


def agree(what: str, value: Any) -> None:
    """Checks that all processes have the same value.

    Args:
      what: its name, for the message.
      value: comparable and small.

    Raises:
      ValueError: they differ.
    """
    values = gather(value)
    if any(other != values[0] for other in values):
        differing = [i for i, other in enumerate(values) if other != values[0]]
        raise ValueError(
            f"{what} differs between process 0 and processes {differing}; start all processes with "
            "the same command, code and files"
        )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A block that fails in all processes if it fails in one.

    An error is handed in at the next exchange. One that strikes between an exchange and a
    program on the whole mesh is found by the runtime, which then ends all processes.
    """
    if count() == 1:
        yield
        return
    try:
        yield
    except OtherProcessFailed:
        raise
    except Exception as error:
        _publish(next(_exchanges), ("error", f"{type(error).__name__}: {error}"))
        raise


def concatenate(tree: Any) -> Any:
    """Arrays of all processes, one after the other along the leading axis.

    Args:
      tree: NumPy arrays of one length. Shorter ones of other processes are padded with zeros,
        so every process finds its own at `index() * longest`.
    """
    if count() == 1:
        return tree
    longest = max(gather(len(jax.tree.leaves(tree)[0])))

    def padded(x):
        return np.pad(x, [(0, longest - len(x))] + [(0, 0)] * (x.ndim - 1))

    whole = multihost_utils.process_allgather(jax.tree.map(padded, tree), tiled=True)
    return jax.tree.map(np.asarray, whole)


# Sharing out.


def split(total: int, turn: int = 0) -> int:
    """This process's part of a whole number; what is left over goes round.

    Args:
      total: e.g. a step's tokens.
      turn: e.g. the step; the first of those that get one more.

    Returns:
      `total // P`, or one more; over all processes they add up to `total`.
    """
    whole, rest = divmod(total, count())
    return whole + ((index() - turn) % count() < rest)


def deal(items: Sequence[T]) -> list[T]:
    """Every P-th item, from this process's own on."""
    return list(items[index() :: count()])


def undeal(items: Sequence[T]) -> list[T]:
    """Inverse of `deal`: the items of all processes in the order they were dealt from."""
    hands = itertools.zip_longest(*gather(items), fillvalue=None)
    return [item for hand in hands for item in hand if item is not None]


def shares(rows: np.ndarray, sizes: Sequence[int]) -> tuple[np.ndarray, int]:
    """Which of some rows are this process's own.

    Args:
      rows: numbers that count through the rows of all processes.
      sizes: how many rows each process has.

    Returns:
      Numbers within this process's rows, and the largest number of rows that a process has.
    """
    ends = np.cumsum(sizes)
    parts = [rows[(rows >= end - n) & (rows < end)] - (end - n) for n, end in zip(sizes, ends)]
    return parts[index()], max(map(len, parts))


# Statistics.


def total(value: float) -> float:
    """Sum over processes."""
    return sum(gather(value))


def mean(value: float, weight: float) -> float:
    """Mean over processes of values of some weight; `value` itself on a single one."""
    if count() == 1:
        return value
    pairs = [(v, w) for v, w in gather((value, weight)) if w]
    return sum(v * w for v, w in pairs) / sum(w for _, w in pairs) if pairs else value


def moments(values: np.ndarray) -> tuple[int, float, float]:
    """Number, mean and sum of squared deviations of the values of all processes.

        N = sum n_p,   M = sum n_p m_p / N,   S = sum s_p + n_p (m_p - M)^2

    Args:
      values: [n] of this process; n may be 0 and may differ.
    """
    values = np.asarray(values, np.float64)
    own = values.mean() if values.size else 0.0
    squares = np.square(values - own).sum()
    if count() == 1:
        return values.size, own, squares
    parts = np.array(gather((values.size, own, squares)))
    number = parts[:, 0].sum()
    average = parts[:, 0] @ parts[:, 1] / max(number, 1)
    return int(number), average, parts[:, 2].sum() + parts[:, 0] @ (parts[:, 1] - average) ** 2


# Arrays.


def contribute(rows: Any, places: Any) -> Any:
    """Rows of all processes as arrays of the whole mesh.

    Args:
      rows: arrays whose leading axis holds this process's rows, equally many in each.
      places: tree of shardings under which a row lies on devices of one process.
    """
    if count() == 1:
        return jax.device_put(rows, places)

    def one(x, place):
        shape = (np.shape(x)[0] * count(), *np.shape(x)[1:])
        return jax.make_array_from_process_local_data(place, x, shape)

    return jax.tree.map(one, rows, places)


def local(tree: Any) -> Any:
    """Arrays of the whole mesh as arrays that this process can use alone.

    All processes call it. On a single one the arrays stay where they are.
    """
    if count() == 1:
        return tree

    def one(x):
        if x.is_fully_replicated:
            return x.addressable_data(0)
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(one, tree)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Inverse of `local`: equal arrays of all processes as replicated arrays of the mesh."""
    if count() == 1:
        return tree
    place = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(place, np.asarray(x), np.shape(x)), tree
    )


def _exchange(value: Any) -> list[Any]:
    number = next(_exchanges)
    _publish(number, ("value", value))
    answers = []
    for process in range(count()):
        kind, answer = ("value", value) if process == index() else _receive(number, process)
        if kind == "error":
            raise OtherProcessFailed(f"process {process} failed: {answer}")
        answers.append(answer)
    # Everybody has passed the exchange before: what was said there has been read.
    if number:
        _client().key_value_delete(f"focus/{number - 1}/{index()}")
    return answers


def _client() -> Any:
    return multihost.get_jax_distributed_client()


def _publish(number: int, message: tuple[str, Any]) -> None:
    data = pickle.dumps(message)
    chunks = [data[i : i + _CHUNK_BYTES] for i in range(0, len(data), _CHUNK_BYTES)]
    prefix = f"focus/{number}/{index()}"
    for i, chunk in enumerate(chunks):
        _client().key_value_set_bytes(f"{prefix}/{i}", chunk)
    _client().key_value_set_bytes(f"{prefix}/count", str(len(chunks)).encode())


def _receive(number: int, process: int) -> tuple[str, Any]:
    prefix = f"focus/{number}/{process}"

    def read(name: str) -> bytes:
        return _client().blocking_key_value_get_bytes(f"{prefix}/{name}", WAIT_S * 1000)

    try:
        chunks = [read(str(i)) for i in range(int(read("count")))]
    except Exception as error:  # the runtime's errors have no class of their own
        raise OtherProcessFailed(
            f"process {process} has not been heard of for {WAIT_S} s, or is gone: {error}"
        ) from error
    return pickle.loads(b"".join(chunks))
