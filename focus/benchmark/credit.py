"""What each estimator costs, beside one pass over its inputs, and the memory it asks for.

Times are medians after compilation. The pass is a NumPy copy of the same arrays, so the ratio says
how far an estimator is from reading its inputs once. Memory is what the compiler plans: inputs,
results and temporaries; it needs no allocation, so sizes that this machine cannot hold can be
planned too.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import rich.table

from focus.credit import ESTIMATORS, estimate
from focus.types import CreditBatch

SLOW = 20.0  # passes over the inputs above which a time is flagged
GROUP_SIZE = 16
CONTINUATIONS = 4
SCOPES = 4
EMBEDDING = 32

# Beyond what the specs name: read by a default.
DEFAULTS_READ = {
    "proxmo": ("emb",),
    "self_credit": ("match_class",),
    "step_agent": ("ref_logp",),
}
_INTEGERS = {
    "group_id", "token_segment", "state_key", "next_state_key", "action_key", "match_class",
    "intent", "cluster", "prefix_key", "segment_id", "parent", "leaf_traj", "tree_id",
    "node_of_segment", "parent_traj", "fork_segment", "hist_group", "cut", "edge",
}  # fmt: skip
_BOOLS = {
    "success", "row_mask", "segment_mask", "token_mask", "truncated", "valid", "is_call",
    "is_answer", "cited", "mc_mask", "do_mask", "do_valid", "cut_mask", "is_revisit",
}  # fmt: skip
_CORE = tuple(f.name for f in dataclasses.fields(CreditBatch) if f.default is dataclasses.MISSING)


@dataclasses.dataclass(frozen=True)
class Size:
    """Trajectories, segments of a trajectory, policy tokens of a trajectory."""

    rows: int = 256
    segments: int = 32
    tokens: int = 2048

    def __post_init__(self):
        if min(self.rows, self.segments) < 1 or self.tokens < self.segments:
            raise ValueError(f"{self}: at least one of each, and a token for every segment")

    def shape(self, channel: str) -> tuple[int, ...]:
        """Shape of a channel of `CreditBatch`."""
        b, s, n = self.rows, self.segments, self.tokens
        nodes = b * (s + 1) + b // GROUP_SIZE + 1
        special = {
            **dict.fromkeys(("value", "value_variance", "v2"), (b, s + 1)),
            **dict.fromkeys(("mc_return", "mc_mask"), (b, s, CONTINUATIONS)),
            **dict.fromkeys(("do_return", "do_mask"), (b, s, 2, CONTINUATIONS)),
            "do_valid": (b, s, 2),
            "prefix_key": (b, n + 1),
            "cluster": (b, s, SCOPES),
            "emb": (b, s, EMBEDDING),
            "edge": (b, s, s),
            "coalition": (b, 2**6),
            **dict.fromkeys(("parent", "leaf_traj", "tree_id", "node_entropy"), (nodes,)),
            **dict.fromkeys(("hist_score", "hist_group"), (b,)),
            "progress": (),
        }
        if channel in special:
            return special[channel]
        rows = ("group_id", "outcome", "success", "row_mask", "truncated", "parent_traj",
                "fork_segment", "is_revisit", "baseline")  # fmt: skip
        tokens = ("token_segment", "token_mask", "behaviour_logp", "ref_logp", "teacher_logp",
                  "priv_logp", "token_value", "segment_id")  # fmt: skip
        return (b,) if channel in rows else (b, n) if channel in tokens else (b, s)

    def dtype(self, channel: str) -> Any:
        """Its dtype."""
        if channel in _INTEGERS:
            return np.int8 if channel == "edge" else np.int32
        return bool if channel in _BOOLS else np.float32


def channels_of(name: str) -> tuple[str, ...]:
    """Channels that the estimator called `name` is given."""
    more = DEFAULTS_READ.get(name, ())
    return tuple(dict.fromkeys((*_CORE, *ESTIMATORS[name].inputs, *more)))


def abstract_batch(name: str, size: Size) -> CreditBatch:
    """Shapes of the inputs of the estimator called `name`."""
    return CreditBatch(
        **{c: jax.ShapeDtypeStruct(size.shape(c), size.dtype(c)) for c in channels_of(name)}
    )


def random_batch(name: str, size: Size, seed: int = 0) -> CreditBatch:
    """Full rows of random channels for the estimator called `name`; NumPy."""
    rng = np.random.default_rng(seed)
    rows = np.arange(size.rows, dtype=np.int32)
    group = rows // GROUP_SIZE
    segment = (np.arange(size.tokens) * size.segments // size.tokens).astype(np.int32)
    nodes = np.arange(size.shape("parent")[0], dtype=np.int32)
    trees = size.rows // GROUP_SIZE + 1
    # Roots first, then a chain of nodes for each row, one segment after the other.
    above = np.where(nodes < trees + size.rows, (nodes - trees) // GROUP_SIZE, nodes - size.rows)
    leaf_from = len(nodes) - size.rows
    fixed = {
        "group_id": group,
        "row_mask": np.ones(size.rows, bool),
        "segment_mask": np.ones((size.rows, size.segments), bool),
        "segment_reward": np.zeros((size.rows, size.segments), np.float32),
        "token_segment": np.tile(segment, (size.rows, 1)),
        "token_mask": np.ones((size.rows, size.tokens), bool),
        "truncated": np.zeros(size.rows, bool),
        "outcome": rng.integers(0, 2, size.rows).astype(np.float32),
        "parent": np.where(nodes < trees, -1, above).astype(np.int32),
        "leaf_traj": np.where(nodes < leaf_from, -1, nodes - leaf_from).astype(np.int32),
        "tree_id": np.where(nodes < trees, nodes, (nodes - trees) % size.rows // GROUP_SIZE)
        .astype(np.int32),
        "parent_traj": np.where(rows % GROUP_SIZE < 8, -1, group * GROUP_SIZE).astype(np.int32),
        "fork_segment": np.where(rows % GROUP_SIZE < 8, -1, rows % size.segments),
    }  # fmt: skip

    def make(channel):
        shape, dtype = size.shape(channel), size.dtype(channel)
        if channel in fixed:
            return fixed[channel].astype(dtype)
        if channel == "node_of_segment":
            return trees + rows[:, None] + size.rows * np.arange(size.segments, dtype=np.int32)
        if channel == "cut":
            return np.tile(np.arange(size.segments) * (size.tokens // size.segments),
                           (size.rows, 1)).astype(dtype)  # fmt: skip
        if channel == "progress":
            return np.float32(0.5)
        if dtype is bool:
            return rng.random(shape, np.float32) < 0.5
        if channel in _INTEGERS:
            return rng.integers(0, 2 if channel == "edge" else size.segments, shape, dtype)
        x = rng.random(shape, np.float32)
        return -x if channel.endswith("logp") else x

    return CreditBatch(**{channel: make(channel) for channel in channels_of(name)})


def measure(name: str, size: Size, *, repeats: int = 3, plan_only: bool = False) -> dict[str, Any]:
    """Figures of one estimator.

    Args:
      name: key of `ESTIMATORS`.
      size: of the batch.
      repeats: timed calls.
      plan_only: only what the compiler says; nothing is allocated.

    Returns:
      name, input_bytes, result_bytes, temporary_bytes and, if it ran, seconds, copy_seconds and
      their ratio.
    """
    # The token axis of results is as long as the inputs': its bytes are the compiler's.
    compiled = (
        jax.jit(functools.partial(estimate, name)).lower(abstract_batch(name, size)).compile()
    )
    memory = compiled.memory_analysis()
    figures: dict[str, Any] = {
        "name": name,
        "input_bytes": memory.argument_size_in_bytes,
        "result_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }
    if plan_only:
        return figures
    batch = random_batch(name, size)
    on_device = jax.device_put(batch)
    seconds, copies = [], []
    jax.block_until_ready(compiled(on_device))
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(on_device))
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        for leaf in jax.tree.leaves(batch):
            np.copy(leaf)
        copies.append(time.perf_counter() - start)
    figures["seconds"], figures["copy_seconds"] = map(statistics.median, (seconds, copies))
    figures["ratio"] = figures["seconds"] / max(figures["copy_seconds"], 1e-9)
    return figures


def names(chosen: Sequence[str] = ()) -> tuple[str, ...]:
    """The estimators to measure.

    Raises:
      ValueError: one of `chosen` is no estimator.
    """
    every = tuple(name for name, spec in ESTIMATORS.items() if spec.kind == "estimator")
    unknown = sorted(set(chosen) - set(every))
    if unknown:
        raise ValueError(f"no estimators: {', '.join(unknown)}; choose among {', '.join(every)}")
    return tuple(chosen) or every


def table(figures: Sequence[dict[str, Any]], size: Size) -> rich.table.Table:
    """One line an estimator."""
    title = f"{size.rows} trajectories x {size.segments} segments x {size.tokens} tokens"
    out = rich.table.Table(title=title)
    for column in ("estimator", "ms", "passes", "", "inputs MB", "results MB", "temporary MB"):
        out.add_column(column, justify="left" if column in ("estimator", "") else "right")
    for f in figures:
        ran = "seconds" in f
        out.add_row(
            f["name"],
            f"{f['seconds'] * 1e3:.2f}" if ran else "-",
            f"{f['ratio']:.1f}" if ran else "-",
            f"above {SLOW:.0f}" if ran and f["ratio"] > SLOW else "",
            *(f"{f[k] / 1e6:.1f}" for k in ("input_bytes", "result_bytes", "temporary_bytes")),
        )
    return out
