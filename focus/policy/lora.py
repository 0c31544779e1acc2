"""Adapters of low rank on named projections (LoRA; Hu et al. 2021).

A projection W [in, out] is frozen and gets two small factors, a [in, rank] and b [rank, out]:

    y = x W + (alpha / rank) (x a) b

Gradients, optimiser moments, checkpoints and what is sent to servers exist for the factors alone.
They start with b = 0, so that an adapted model begins as its base.

    adapters = init_adapters(config, LoraConfig(rank=8), key)   # what is trained
    hidden_states(config, attach(params, adapters), tokens)     # every family reads it as it is
    merge(params, adapters)                                     # plain parameters, for an engine

Models multiply by a `LoraWeight` as by the matrix that it stands for. The factors are applied to
activations and not merged into the matrix first: a merged matrix is a copy of W in every layer,
and its gradient, another one, costs as much as training W would. Applied, a token saves the
2 in out FLOPs of that gradient and pays 6 rank (in + out). As compiled, the gradient of a small
model (4 x 256 tokens, width 192, rank 8) takes 5.2 GFLOP applied, 6.7 merged, and 7.2 without
adapters.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from focus.policy import model as models

Array = jax.Array
Params = dict[str, Any]

ALL_LINEAR = "all-linear"  # as PEFT calls it: every projection, but no embedding


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which projections get an adapter, and of what size.

    Attributes:
      rank: numbers that an adapter passes on, at most the smaller side of its projection.
      alpha: the adapter's output is multiplied by `alpha / rank`.
      targets: names of projections, as PEFT and `projections` have them: ("q_proj", "v_proj");
        or ("all-linear",).
    """

    rank: int
    alpha: float = 16.0
    targets: tuple[str, ...] = (ALL_LINEAR,)

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"learner.lora.rank must be >= 1, got {self.rank}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"learner.lora.alpha must be > 0, got {self.alpha}")
        if isinstance(self.targets, str) or not self.targets:
            raise ValueError(
                f"learner.lora.targets is a tuple of names such as ('q_proj', 'v_proj') or "
                f"('{ALL_LINEAR}',), got {self.targets!r}"
            )

    @property
    def scale(self) -> float:
        """What the adapters' outputs are multiplied by."""
        return self.alpha / self.rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraWeight:
    """A projection with its adapter; models multiply by it as by a matrix.

    Attributes:
      base: [..., in, out] frozen matrix; None in an adapter that is apart from its model.
      a: [..., in, rank].
      b: [..., rank, out].
      scale: factor on `a @ b`.
    """

    base: Array | None
    a: Array
    b: Array
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the projection."""
        return (*self.a.shape[:-1], self.b.shape[-1])

    def astype(self, dtype: Any) -> LoraWeight:
        """All of it in another dtype."""
        return jax.tree.map(lambda x: x.astype(dtype), self)

    def __rmatmul__(self, x: Array) -> Array:
        """`x @ base + scale * (x @ a) @ b`, the whole matrix never made."""
        inner = self.scale * (x @ self.a)
        # Products with a batch axis are computed again by remat="dots", which would otherwise
        # keep two activations of every projection in place of one.
        (outer,) = jax.vmap(jnp.matmul)(inner[None], self.b[None])
        return x @ self.base + outer

    def merged(self) -> Array:
        """`base + scale * a @ b`, multiplied and added in float32."""
        a, b = self.a.astype(jnp.float32), self.b.astype(jnp.float32)
        product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        return (self.base.astype(jnp.float32) + self.scale * product).astype(self.base.dtype)


def projections(config: models.Config) -> tuple[str, ...]:
    """Names of the projections of a family, as in Hugging Face's modules and PEFT's targets."""
    stacked = [tree for tree in models.param_shapes(config).values() if isinstance(tree, dict)]
    return tuple(dict.fromkeys(name for tree in stacked for name in tree if "_proj" in name))


def _for_each(config: models.Config, lora: LoraConfig, leaf: Callable[..., Any]) -> Params:
    """`leaf(group, name)` at every projection that has an adapter, in the model's structure.

    Raises:
      ValueError: a target that this family does not have.
    """
    known = projections(config)
    unknown = [name for name in lora.targets if name not in (*known, ALL_LINEAR)]
    if unknown:
        raise ValueError(
            f"lora.targets {unknown}: this model has no such projection; it has "
            f"{', '.join(known)}, and '{ALL_LINEAR}' is all of them"
        )
    chosen = known if ALL_LINEAR in lora.targets else lora.targets
    found = {
        group: {name: leaf(group, name) for name in tree if name in chosen}
        for group, tree in models.param_shapes(config).items()
        if isinstance(tree, dict)
    }
    return {group: tree for group, tree in found.items() if tree}


def adapter_shapes(config: models.Config, lora: LoraConfig) -> Params:
    """Shapes of all adapters.

    Args:
      config: shape of the model.
      lora: which projections.

    Returns:
      A tree of `LoraWeight` with `jax.ShapeDtypeStruct` in place of arrays and no base, at the
      paths that the projections have in the parameters.

    Raises:
      ValueError: an unknown target, or a rank beyond a projection's smaller side.
    """
    shapes = models.param_shapes(config)

    def leaf(group: str, name: str) -> LoraWeight:
        *stacked, rows, columns = shapes[group][name]
        if lora.rank > min(rows, columns):
            raise ValueError(
                f"learner.lora.rank {lora.rank} is more than {name} of shape [{rows}, {columns}] "
                f"has: use at most {min(rows, columns)}, or leave {name} out of "
                "learner.lora.targets"
            )
        a = jax.ShapeDtypeStruct((*stacked, rows, lora.rank), jnp.float32)
        b = jax.ShapeDtypeStruct((*stacked, lora.rank, columns), jnp.float32)
        return LoraWeight(None, a, b, lora.scale)

    return _for_each(config, lora, leaf)


def adapter_axes(config: models.Config, lora: LoraConfig) -> Params:
    """Names of all axes: those of the projection, and "rank". Structure of `adapter_shapes`."""
    axes = models.logical_axes(config)

    def leaf(group: str, name: str) -> LoraWeight:
        *stacked, rows, columns = axes[group][name]
        return LoraWeight(None, (*stacked, rows, "rank"), (*stacked, "rank", columns), lora.scale)

    return _for_each(config, lora, leaf)


def num_adapter_params(config: models.Config, lora: LoraConfig) -> int:
    """Number of parameters of all adapters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(adapter_shapes(config, lora)))


def init_adapters(config: models.Config, lora: LoraConfig, key: Array) -> Params:
    """Draws adapters that change nothing yet: a uniform within 1/sqrt(in), as PEFT does, b zero.

    Args:
      config: shape of the model.
      lora: which projections.
      key: a `jax.random.key`, consumed.

    Returns:
      float32 adapters, see `adapter_shapes`.

    Raises:
      ValueError: an unknown target, or a rank beyond a projection's smaller side.
    """

    def one(path: Any, adapter: LoraWeight) -> LoraWeight:
        fold = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        bound = adapter.a.shape[-2] ** -0.5
        a = jax.random.uniform(fold, adapter.a.shape, jnp.float32, -bound, bound)
        return dataclasses.replace(adapter, a=a, b=jnp.zeros(adapter.b.shape, jnp.float32))

    return jax.tree_util.tree_map_with_path(one, adapter_shapes(config, lora), is_leaf=_is_adapter)


def attach(params: Params, adapters: Params) -> Params:
    """Parameters as a model reads them, each adapter beside its projection; nothing is copied.

    Args:
      params: of the base.
      adapters: as from `init_adapters`.

    Returns:
      `params` with a `LoraWeight` in place of each projection that has an adapter.

    Raises:
      ValueError: adapters of another base.
    """

    def one(group: str, name: str, adapter: LoraWeight) -> LoraWeight:
        base = params.get(group, {}).get(name)
        if base is None or tuple(base.shape) != tuple(adapter.shape):
            found = "no such projection" if base is None else f"shape {tuple(base.shape)}"
            raise ValueError(
                f"the adapter of {group}/{name} is for a projection of shape "
                f"{tuple(adapter.shape)}, and the base has {found}; use the base that it was "
                "trained on"
            )
        return dataclasses.replace(adapter, base=base)

    return params | {
        group: params.get(group, {}) | {n: one(group, n, adapter) for n, adapter in tree.items()}
        for group, tree in adapters.items()
    }


def detach(params: Params) -> tuple[Params, LoraConfig, Params]:
    """Inverse of `attach`.

    Args:
      params: of a base with adapters attached.

    Returns:
      `(base, setting, adapters)`.

    Raises:
      ValueError: nothing is attached.
    """
    base = jax.tree.map(lambda x: x.base if _is_adapter(x) else x, params, is_leaf=_is_adapter)
    adapters: Params = {}
    for group, tree in params.items():
        for name, leaf in tree.items() if isinstance(tree, dict) else ():
            if _is_adapter(leaf):
                adapters.setdefault(group, {})[name] = dataclasses.replace(leaf, base=None)
    if not adapters:
        raise ValueError("these parameters have no adapters; attach some, or push them as they are")
    names = dict.fromkeys(name for tree in adapters.values() for name in tree)
    one = next(iter(next(iter(adapters.values())).values()))
    rank = one.a.shape[-1]
    return base, LoraConfig(rank, one.scale * rank, tuple(names)), adapters


def merge(params: Params, adapters: Params) -> Params:
    """Plain parameters that compute what base and adapters compute together.

    In bfloat16 a merged matrix rounds small adapters away that an applied one keeps: merge
    float32 parameters, and cast afterwards.

    Args:
      params: of the base.
      adapters: as from `init_adapters`.

    Returns:
      Parameters in the structure and dtypes of `params`.

    Raises:
      ValueError: adapters of another base.
    """
    return jax.tree.map(
        lambda leaf: leaf.merged() if _is_adapter(leaf) else leaf,
        attach(params, adapters),
        is_leaf=_is_adapter,
    )


def _is_adapter(leaf: Any) -> bool:
    return isinstance(leaf, LoraWeight)
