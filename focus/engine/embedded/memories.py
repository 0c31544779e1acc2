"""Recurrent memories in the engine's cache; nothing of this is there for other models.

A row of keys and values has a live memory of the same number. The array of memories is longer
than the rows: behind them lie an empty one and the snapshots of
`focus.engine.embedded.snapshot_store`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from focus.policy import model as models
from focus.policy import qwen3_5

Array = jax.Array


def init_cache(config: models.Config, rows: int, length: int, memories: int) -> Any:
    """An empty cache of `rows` rows of `length` tokens, and of `memories` memories."""
    cache = models.init_cache(config, rows, length)
    if not models.is_recurrent(config):
        return cache
    return dataclasses.replace(cache, delta=models.init_cache(config, memories, 1).delta)


def take(cache: Any, row: Array) -> dict[str, Any]:
    """Fields of a working cache that hold the memories of some rows [N]."""
    if not isinstance(cache, qwen3_5.Cache):
        return {}
    return {"delta": jax.tree.map(lambda x: x[row], cache.delta)}


def put(cache: Any, work: Any, row: Array) -> dict[str, Any]:
    """Fields of the whole cache after the memories of some rows [N] have gone on."""
    if not isinstance(cache, qwen3_5.Cache):
        return {}
    return {"delta": jax.tree.map(lambda old, new: old.at[row].set(new), cache.delta, work.delta)}


def copy(cache: qwen3_5.Cache, source: Array, target: Array, count: Array) -> qwen3_5.Cache:
    """Copies memory `source[i]` over `target[i]` for the first `count[0]` pairs, in order."""

    def one(i, delta):
        return jax.tree.map(lambda x: x.at[target[i]].set(x[source[i]]), delta)

    return dataclasses.replace(cache, delta=jax.lax.fori_loop(0, count[0], one, cache.delta))


def real(config: models.Config, counts: Array) -> dict[str, Array]:
    """Arguments of `models.extend` that say how many tokens of each row are real.

    Keys and values of padding are overwritten before they are read; a memory would keep them.
    """
    return {"counts": counts} if models.is_recurrent(config) else {}
