"""The device programs of the embedded engine, each compiled once for its bucket of shapes.

    fork      copies rows of the cache
    remember  copies recurrent memories, of models that have them
    prefill   appends a chunk of known tokens behind rows
    decode    samples tokens behind rows until enough of them have ended

Prefill never samples: it fills a prompt up to its last token, and decoding starts by feeding
that one. Both work on a contiguous copy of the rows and columns in use, made once a call, so
that a short sequence does not pay for the longest one that the cache has room for, and write
back only what is new. The cache itself is donated and updated in place.

Rows are spread over devices, and every device runs the same program on rows of its own: arguments
are cut along their first axis, weights are whole everywhere, and nobody waits for anybody else
inside a program. What follows is written for one device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from focus.engine.embedded import memories, sampling
from focus.policy import model as models

Array = jax.Array
Cache = Any  # of the model's family, see `models.init_cache`
Params = models.Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters as the engine reads them: one tree a layer, cast to the model's dtype."""

    top: Params
    layers: list[Params]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Sequences that are decoding. A padding slot has `budget` 0 and the scratch row.

    Attributes:
      row: [N] int32 row of the cache.
      token: [N] int32 last known token; its keys and values are not in the cache yet.
      length: [N] int32 tokens in the cache.
      count: [N] int32 tokens generated so far.
      budget: [N] int32 tokens to generate in all.
      stop_ids: [N, E] int32, padded with -1.
      temperature: [N] float32, 0 for greedy.
      top_p: [N] float32.
      top_k: [N] int32, the vocabulary's size for all.
      seed: [N, 2] uint32 from `sampling.seed_words`.
    """

    row: Any
    token: Any
    length: Any
    count: Any
    budget: Any
    stop_ids: Any
    temperature: Any
    top_p: Any
    top_k: Any
    seed: Any


def unstack(config: models.Config, params: Params) -> Weights:
    """Splits stacked layers. Copies everything: a trainer may donate its own parameters."""
    copied = jax.tree.map(lambda p: jnp.array(p, config.dtype, copy=True), params)
    top = {name: value for name, value in copied.items() if not isinstance(value, dict)}
    return Weights(top=top, layers=models.layer_list(config, copied))


def take_rows(cache: Cache, row: Array, length: int) -> Cache:
    """The first `length` columns of some rows, as a cache of their own: [N, kv, length, hd].

    Memories come whole.
    """

    def take(x):
        sizes = (1, x.shape[1], length, x.shape[3])
        return jax.vmap(lambda r: jax.lax.dynamic_slice(x, (r, 0, 0, 0), sizes)[0])(row)

    k, v = jax.tree.map(take, (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v, **memories.take(cache, row))


def put_columns(cache: Cache, work: Cache, row: Array, start: Array, count: int) -> Cache:
    """Writes columns `start .. start + count` of `work` back to the rows it was taken from."""

    def one(i, columns):
        def put(old, new):
            sizes = (1, new.shape[1], count, new.shape[3])
            window = jax.lax.dynamic_slice(new, (i, 0, start[i], 0), sizes)
            return jax.lax.dynamic_update_slice(old, window, (row[i], 0, start[i], 0))

        return jax.tree.map(put, columns, (work.k, work.v))

    k, v = jax.lax.fori_loop(0, row.shape[0], one, (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v, **memories.put(cache, work, row))


def fork(cache: Cache, source: Array, target: Array, count: Array) -> Cache:
    """Copies row `source[i]` over row `target[i]` for the first `count[0]` pairs, in order."""

    def one(i, columns):
        def copy(x):
            whole = jax.lax.dynamic_slice(x, (source[i], 0, 0, 0), (1, *x.shape[1:]))
            return jax.lax.dynamic_update_slice(x, whole, (target[i], 0, 0, 0))

        return jax.tree.map(copy, columns)

    k, v = jax.lax.fori_loop(0, count[0], one, (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v)


def prefill(
    config: models.Config,
    weights: Weights,
    cache: Cache,
    row: Array,
    tokens: Array,
    start: Array,
    counts: Array,
    *,
    length: int,
) -> Cache:
    """Computes keys and values of known tokens.

    Args:
      config: shape of the model.
      weights: parameters.
      cache: the whole cache, donated.
      row: [N] int32 rows.
      tokens: [N, C] int32, token `start + c` of each row.
      start: [N] int32, `start + C <= length`.
      counts: [N] int32 how many of the tokens are real; the others stand behind them.
      length: static number of columns to attend to.

    Returns:
      The cache with columns `start .. start + C` of the rows filled.
    """
    work = take_rows(cache, row, length)
    real = memories.real(config, counts)
    _, work = models.extend(config, weights.top, weights.layers, tokens, start, work, **real)
    return put_columns(cache, work, row, start, tokens.shape[1])


def decode(
    config: models.Config,
    weights: Weights,
    cache: Cache,
    slots: Slots,
    leave_after: Array,
    *,
    length: int,
    steps: int,
    filtered: bool,
) -> tuple[Cache, Array, Array, Array]:
    """Samples up to `steps` tokens a slot, and leaves early once `leave_after` slots have ended.

    Args:
      config: shape of the model.
      weights: parameters.
      cache: the whole cache, donated.
      slots: N slots.
      leave_after: [1] int32 >= 1.
      length: static number of columns; every slot needs
        `slots.length + min(steps, what it has left + 1) <= length`: a slot that has ended
        keeps writing one column behind its tokens.
      steps: static upper bound on the tokens of one call, at most `length`.
      filtered: static, see `sampling.sample`.

    Returns:
      `(cache, tokens [N, steps], logp [N, steps], count [N])`; the first
      `count - slots.count` entries of a row are new.
    """
    entered = slots.count < slots.budget

    def alive(state):
        step, _, _, _, active, _, _ = state
        ended = jnp.sum(entered & ~active)
        return (step < steps) & jnp.any(active) & (ended < leave_after[0])

    def body(state):
        step, work, token, count, active, tokens, logps = state
        at = slots.length + count - slots.count
        real = memories.real(config, active.astype(jnp.int32))
        hidden, work = models.extend(
            config, weights.top, weights.layers, token[:, None], at, work, **real
        )
        logits = models.unembed(config, weights.top, hidden[:, 0])
        key = jax.vmap(sampling.token_key)(slots.seed, count)
        draw = jax.vmap(functools.partial(sampling.sample, filtered=filtered))
        drawn, logp = draw(logits, key, slots.temperature, slots.top_p, slots.top_k)
        token = jnp.where(active, drawn, token)
        tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (0, step))
        logps = jax.lax.dynamic_update_slice(logps, logp[:, None], (0, step))
        count = count + active
        stopped = jnp.any(token[:, None] == slots.stop_ids, axis=1)
        active = active & ~stopped & (count < slots.budget)
        return step + 1, work, token, count, active, tokens, logps

    size = slots.row.shape[0]
    work = take_rows(cache, slots.row, length)
    blank = jnp.zeros((size, steps), jnp.int32), jnp.zeros((size, steps), jnp.float32)
    state = (jnp.int32(0), work, slots.token, slots.count, entered, *blank)
    _, work, _, count, _, tokens, logps = jax.lax.while_loop(alive, body, state)
    # A window that would spill moves left; the columns it then repeats are unchanged.
    start = jnp.minimum(slots.length, length - steps)
    return put_columns(cache, work, slots.row, start, steps), tokens, logps, count


class Programs:
    """Compiles each program for each bucket at most once and counts the compilations.

    Compiled ahead of time, so a call with another shape is an error, never a recompilation.

    Args:
      config: shape of the model.
      rows: rows of the cache that a device has, the scratch row included.
      row_length: columns of the cache.
      num_memories: recurrent memories of a device, those of the rows included.
      steps: tokens of one decode call.
      max_stop_ids: width of `Slots.stop_ids`.
      max_forks: pairs of one fork call and device.
      devices: what to run on. Sizes of calls are those of one device.
    """

    def __init__(
        self,
        config: models.Config,
        *,
        rows: int,
        row_length: int,
        num_memories: int,
        steps: int,
        max_stop_ids: int,
        max_forks: int,
        devices: Sequence[jax.Device],
    ):
        self._config = config
        self._steps = steps
        self._max_stop_ids = max_stop_ids
        self._max_forks = max_forks
        # A trainer's mesh may be the context; these programs must not be compiled for it.
        self._mesh = jax.make_mesh(
            (len(devices),),
            ("engine",),
            axis_types=(jax.sharding.AxisType.Auto,),
            devices=devices,
        )
        self._spread = NamedSharding(self._mesh, PartitionSpec("engine"))
        self._whole = NamedSharding(self._mesh, PartitionSpec())
        self._compiled: dict[tuple, Callable] = {}
        size = len(devices)
        self._new_cache = functools.partial(
            memories.init_cache, config, size * rows, row_length, size * num_memories
        )
        self._cache = _placed(jax.eval_shape(self._new_cache), self._spread)
        self._weights: Weights | None = None

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def new_cache(self) -> Cache:
        """An empty cache, spread over the devices."""
        return jax.device_put(self._new_cache(), self._spread)

    def spread(self, *arguments: Any) -> Any:
        """NumPy arguments of a program, [devices * n, ...], cut up along their first axis."""
        return jax.device_put(arguments, self._spread)

    def replicate(self, params: Params) -> Params:
        """Parameters on every device."""
        return jax.device_put(params, self._whole)

    def unstack(self, params: Params) -> Callable:
        """Program `params -> Weights` for parameters of these dtypes."""
        dtypes = tuple(str(p.dtype) for p in jax.tree.leaves(params))
        function = functools.partial(unstack, self._config)
        described = _placed(params, self._whole)
        if self._weights is None:
            self._weights = _placed(jax.eval_shape(function, described), self._whole)
        return self._get(("unstack", dtypes), function, (), described, out=self._whole)

    def fork(self) -> Callable:
        """Program `(cache, source, target, count) -> cache`."""
        pairs = self._array((self._max_forks,))
        return self._get(("fork",), fork, (0,), self._cache, pairs, pairs, self._array((1,)))

    def remember(self) -> Callable:
        """Program `(cache, source, target, count) -> cache`."""
        pairs = self._array((self._max_forks,))
        return self._get(
            ("remember",), memories.copy, (0,), self._cache, pairs, pairs, self._array((1,))
        )

    def prefill(self, size: int, chunk: int, length: int) -> Callable:
        """Program `(weights, cache, row, tokens [size, chunk], start, counts) -> cache`."""
        function = functools.partial(prefill, self._config, length=length)
        whole = self._array((size,))
        shapes = whole, self._array((size, chunk)), whole, whole
        key = ("prefill", size, chunk, length)
        return self._get(key, function, (1,), self._weights, self._cache, *shapes)

    def decode(self, size: int, length: int, filtered: bool) -> Callable:
        """Program `(weights, cache, slots, leave_after) -> (cache, tokens, logp, count)`."""
        function = functools.partial(
            decode, self._config, length=length, steps=self._steps, filtered=filtered
        )
        whole, real = self._array((size,)), self._array((size,), jnp.float32)
        slots = Slots(
            row=whole,
            token=whole,
            length=whole,
            count=whole,
            budget=whole,
            stop_ids=self._array((size, self._max_stop_ids)),
            temperature=real,
            top_p=real,
            top_k=whole,
            seed=self._array((size, 2), jnp.uint32),
        )
        key = ("decode", size, length, filtered)
        return self._get(key, function, (1,), self._weights, self._cache, slots, self._array((1,)))

    def _get(
        self,
        key: tuple,
        function: Callable,
        donated: tuple[int, ...],
        *shapes: Any,
        out: NamedSharding | None = None,
    ) -> Callable:
        if key not in self._compiled:
            mapped = jax.shard_map(
                function,
                mesh=self._mesh,
                in_specs=jax.tree.map(lambda x: x.sharding.spec, shapes),
                out_specs=(out or self._spread).spec,
                check_vma=False,
            )
            with jax.set_mesh(self._mesh):
                jitted = jax.jit(mapped, donate_argnums=donated)
                self._compiled[key] = jitted.lower(*shapes).compile()
        return self._compiled[key]

    def _array(self, shape: tuple[int, ...], dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        """An argument of which each device gets this shape."""
        shape = (shape[0] * self._mesh.size, *shape[1:])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._spread)


def _placed(tree: Any, sharding: NamedSharding) -> Any:
    """Shapes and dtypes of a tree, as arguments that lie so."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
