"""Every model family behind one set of functions: the type of the config says which.

dense     `transformer.ModelConfig`: Qwen2, Qwen2.5, Qwen3, Llama 3, SmolLM2
hybrid    `qwen3_5.Qwen3_5Config`: Qwen3.5 text
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import jax

from focus.policy import attention, layers, qwen3_5, transformer

Array = jax.Array
Params = dict[str, Any]
Config = transformer.ModelConfig | qwen3_5.Qwen3_5Config

FAMILIES: dict[str, type] = {"dense": transformer.ModelConfig, "hybrid": qwen3_5.Qwen3_5Config}
_MODULES: dict[type, ModuleType] = {
    transformer.ModelConfig: transformer,
    qwen3_5.Qwen3_5Config: qwen3_5,
}


def module_of(config: Config) -> ModuleType:
    """The module that implements a config.

    Raises:
      ValueError: it is no model config.
    """
    module = _MODULES.get(type(config))
    if module is None:
        known = ", ".join(kind.__name__ for kind in _MODULES)
        raise ValueError(f"{type(config).__name__} is no model config; there are {known}")
    return module


def make_config(family: str = "dense", **options: Any) -> Config:
    """The config of a family by name.

    Raises:
      ValueError: no such family.
    """
    if family not in FAMILIES:
        raise ValueError(f"model.family must be one of {', '.join(FAMILIES)}; got {family!r}")
    return FAMILIES[family](**options)


def is_recurrent(config: Config) -> bool:
    """Whether a model keeps a memory beside, or in place of, keys and values."""
    return isinstance(config, qwen3_5.Qwen3_5Config)


def shares_prefixes(config: Config) -> bool:
    """Whether rows may be prefix trees; else they hold whole sequences side by side."""
    return not is_recurrent(config) and config.attention not in attention.DOCUMENTS_ONLY


def param_shapes(config: Config) -> Params:
    """Shapes of all parameters, as a tree of tuples."""
    return module_of(config).param_shapes(config)


def logical_axes(config: Config) -> Params:
    """Names of all axes, as a tree of tuples of the structure of the parameters."""
    return module_of(config).logical_axes(config)


def num_params(config: Config) -> int:
    """Number of parameters."""
    shapes = jax.tree.leaves(param_shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    return sum(math.prod(shape) for shape in shapes)


def init_params(config: Config, key: Array) -> Params:
    """Draws float32 parameters; `key` is consumed."""
    return module_of(config).init_params(config, key)


def hidden_states(config: Config, params: Params, tokens: Array, **packing: Any) -> Array:
    """Final hidden states of packed rows, see `transformer.hidden_states`."""
    return module_of(config).hidden_states(config, params, tokens, **packing)


def unembedding(config: Config, params: Params) -> Array:
    """[V, H] matrix from hidden states to logits."""
    return layers.unembedding(config, params)


def unembed(config: Config, params: Params, hidden: Array) -> Array:
    """[..., H] hidden states to [..., V] float32 logits."""
    return layers.unembed(unembedding(config, params), hidden)


def init_cache(config: Config, slots: int, length: int) -> Any:
    """An empty cache of `slots` rows of `length` tokens."""
    return module_of(config).init_cache(config, slots, length)


def layer_list(config: Config, params: Params) -> list[Params]:
    """Parameters of each layer on its own: do this once, outside a decoding loop."""
    return module_of(config).layer_list(config, params)


def extend(config: Config, params: Params, *args: Any, **kwargs: Any) -> tuple[Array, Any]:
    """Appends tokens behind a cache, see `transformer.extend`."""
    return module_of(config).extend(config, params, *args, **kwargs)
