"""Adapters in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

The directory is what `peft.PeftModel.from_pretrained` and servers with LoRA support read: for a
model of billions of parameters some megabytes in place of its weights.

    save_adapter("path/to/adapter", config, lora, adapters)
    lora, adapters = load_adapter("path/to/adapter", config)
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from focus.formats import hf_config
from focus.formats.hf import sync_to_disk
from focus.formats.hf_config import DTYPES, Tensor, check_dtype
from focus.policy import model as models
from focus.policy.lora import LoraConfig, LoraWeight, Params, adapter_shapes, projections

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTORS = {"a": "lora_A", "b": "lora_B"}

# Fields of adapter_config.json that would change what an adapter computes, with the values under
# which it is that of `focus.policy.lora`; the first one is that of a field which is absent.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "lora_bias": (False, None),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "monteclora_config": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    # Others start from a base that they have changed.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


# Fields that do not: how it was trained, for what, and on which files.
_NOTES = frozenset(
    """auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config
    exclude_modules inference_mode layers_pattern layers_to_transform loftq_config lora_alpha
    lora_dropout lora_ga_config megatron_config megatron_core peft_version qalora_group_size r
    revision target_modules task_type velora_config""".split()
)


def save_adapter(
    path: str | Path,
    config: models.Config,
    lora: LoraConfig,
    adapters: Params,
    *,
    dtype: str = "float32",
    base_model: str | None = None,
) -> None:
    """Writes an adapter as PEFT does, all of it or nothing.

    With several processes one of them calls it, with arrays that it holds as a whole.

    Args:
      path: directory to write; files of an older adapter are replaced.
      config: of the base.
      lora: what the adapters are.
      adapters: as from `lora.init_adapters`.
      dtype: of the file.
      base_model: name or path of the base, as a note to whoever loads the adapter.

    Raises:
      ValueError: adapters that are not those of `config` and `lora`, or an unknown dtype.
    """
    check_dtype(dtype)
    shapes = adapter_shapes(config, lora)
    found = jax.tree.map(lambda x: tuple(x.shape), adapters)
    wanted = jax.tree.map(lambda x: tuple(x.shape), shapes)
    if found != wanted:
        raise ValueError(
            f"adapters are not those of the config and of {lora}: expected shapes {wanted}, got "
            f"{found}"
        )
    tensors = {
        name: np.ascontiguousarray(
            np.asarray(getattr(adapter, factor)[tensor.layer]).T, dtype=DTYPES[dtype]
        )
        for tensor, adapter in _adapted(config, adapters)
        for factor, name in _names(tensor)
    }
    adapted = {name for tree in shapes.values() for name in tree}
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "target_modules": [name for name in projections(config) if name in adapted],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    path = Path(path)
    partial = path.parent / f".partial-{path.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    safetensors.numpy.save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
    (partial / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n")
    # What is announced to servers must be there for them, and after a loss of power.
    for written in (partial / WEIGHTS_FILE, partial / CONFIG_FILE, partial):
        sync_to_disk(written)
    if path.exists():
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            os.replace(partial / name, path / name)
        partial.rmdir()
        sync_to_disk(path)
    else:
        os.rename(partial, path)
    sync_to_disk(path.parent)


def load_adapter(
    path: str | Path, config: models.Config, *, dtype: str = "float32"
) -> tuple[LoraConfig, Params]:
    """Reads an adapter that PEFT or `save_adapter` has written.

    Args:
      path: directory with `adapter_config.json` and `adapter_model.safetensors`.
      config: of the base that it belongs to.
      dtype: of the adapters.

    Returns:
      `(lora, adapters)`; `lora.targets` are the projections that the file holds factors of.

    Raises:
      ValueError: no adapter there, one that computes something else than
        `focus.policy.lora`, or one of another base. No array has been read then.
    """
    check_dtype(dtype)
    path = Path(path)
    rank, alpha = _read_config(path / CONFIG_FILE)
    if not (path / WEIGHTS_FILE).is_file():
        raise ValueError(f"no {WEIGHTS_FILE} in {path}; give the directory of an adapter")
    try:
        file = safetensors.safe_open(path / WEIGHTS_FILE, framework="numpy")
    except Exception as error:  # the library raises one of its own for each way to be broken
        raise ValueError(
            f"cannot read {path / WEIGHTS_FILE} ({error}); the file is cut or damaged, copy it "
            "again"
        ) from error
    with file:
        stored = {_our_name(config, name): file.get_slice(name) for name in file.keys()}
        present = {part for name in stored for part in name.split(".")[-3:-2]}
        targets = tuple(name for name in projections(config) if name in present)
        lora = LoraConfig(rank, alpha, targets or tuple(sorted(present)))
        shapes = adapter_shapes(config, lora)
        _check_tensors(path, config, shapes, stored)

        def read(factor: str, tensors: list[Tensor]) -> jax.Array:
            names = [dict(_names(tensor))[factor] for tensor in tensors]
            layers = [stored[_our_name(config, name)][:].T for name in names]
            return jnp.asarray(np.stack(layers).astype(DTYPES[dtype]))

        layers: dict[str, list[Tensor]] = {}
        for tensor, _ in _adapted(config, shapes):
            layers.setdefault(tensor.parameter, []).append(tensor)
        adapters: Params = {}
        for parameter, tensors in layers.items():
            group, name = parameter.split("/")
            factors = {factor: read(factor, tensors) for factor in _FACTORS}
            adapters.setdefault(group, {})[name] = LoraWeight(None, **factors, scale=lora.scale)
    return lora, adapters


def _read_config(path: Path) -> tuple[int, float]:
    """Rank and alpha."""
    if not path.is_file():
        raise ValueError(f"no {path.name} in {path.parent}; give the directory of an adapter")
    try:
        fields = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"cannot read {path} ({error}); export the adapter again") from error
    for name, allowed in _SUPPORTED.items():
        if (value := fields.get(name, allowed[0])) not in allowed:
            raise ValueError(
                f"{path}: {name} = {value!r} is not supported; known: {list(allowed)}. Merge such "
                "an adapter into its base with PEFT and load the result as a model"
            )
    hf_config.check_known(fields, _NOTES.union(_SUPPORTED), str(path))
    missing = [name for name in ("r", "lora_alpha") if fields.get(name) is None]
    if missing:
        raise ValueError(f"{path} lacks {missing}; export the adapter again")
    return fields["r"], fields["lora_alpha"]


def _adapted(config: models.Config, adapters: Params) -> Iterator[tuple[Tensor, LoraWeight]]:
    """Every tensor of the base that has an adapter, one layer after the other."""
    for tensor in hf_config.tensors(config):
        group, _, name = tensor.parameter.partition("/")
        if name in adapters.get(group, {}):
            yield tensor, adapters[group][name]


def _names(tensor: Tensor) -> Iterator[tuple[str, str]]:
    """Each factor, and what PEFT calls it."""
    module = tensor.name.removesuffix(".weight")
    for factor, theirs in _FACTORS.items():
        yield factor, f"{_PREFIX}{module}.{theirs}.weight"


def _our_name(config: models.Config, name: str) -> str:
    """A tensor's name under which `_names` gives it; models inside of others nest deeper."""
    return _PREFIX + hf_config.our_name(config, name.removeprefix(_PREFIX))


def _check_tensors(
    path: Path, config: models.Config, shapes: Params, stored: Mapping[str, Any]
) -> None:
    wanted = {
        name: getattr(adapter, factor).shape[:0:-1]
        for tensor, adapter in _adapted(config, shapes)
        for factor, name in _names(tensor)
    }
    missing = [name for name in wanted if name not in stored]
    extra = [name for name in stored if name not in wanted]
    if missing or extra:
        raise ValueError(
            f"the adapter in {path} is not one of this model: missing {missing[:8]}, unexpected "
            f"{extra[:8]}; a projection has an adapter in all layers or in none"
        )
    for name, shape in wanted.items():
        if (found := tuple(stored[name].get_shape())) != shape:
            raise ValueError(
                f"{name} in {path} has shape {found}, and this base asks for {shape}; the adapter "
                "belongs to another base"
            )
        if stored[name].get_dtype() not in ("F32", "BF16", "F16"):
            raise ValueError(
                f"{name} in {path} is stored as {stored[name].get_dtype()}; readable are F32, "
                "BF16 and F16"
            )
