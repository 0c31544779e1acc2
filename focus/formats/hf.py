"""Models in the layout of Hugging Face: `config.json` and safetensors, in and out.

No host ever holds a whole model. On the way in every device reads the slices that it keeps; on
the way out one tensor of one layer at a time is brought to the host and appended to its file.

    config, params = load_checkpoint("path/to/model", dtype="bfloat16", shardings=shardings)
    save_checkpoint("path/to/export", config, params, dtype="bfloat16")
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from focus.chat import files as chat_files
from focus.formats import hf_config
from focus.formats.hf_config import DTYPES, Tensor, check_dtype

Params = dict[str, Any]

MAX_FILE_BYTES = 4 * 2**30
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 4096  # of a tensor that is compared with another, at a time
_DTYPE_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def load_checkpoint(
    path: str | Path, *, dtype: str = "float32", shardings: Any = None
) -> tuple[Any, Params]:
    """Reads a model directory, each device its own part.

    Args:
      path: directory with `config.json` and one or more safetensors files.
      dtype: of the parameters, and of the computation in the returned config.
      shardings: a tree of `NamedSharding` of the structure of the parameters, or one for all of
        them; None puts everything on the default device.

    Returns:
      `(config, params)`: the config of the family and its parameters.

    Raises:
      ValueError: the architecture or a feature of it is unknown, tensors are missing, left over
        or of another shape, a head beside tied embeddings differs from them, or a file is
        damaged. Nothing has been allocated then.
    """
    check_dtype(dtype)
    path = Path(path)
    config = dataclasses.replace(read_config(path), dtype=dtype)
    tensors = hf_config.tensors(config)
    with contextlib.ExitStack() as stack:
        files = _our_names(path, config, _open_files(path, stack))
        _check_tensors(path, config, tensors, files)
        if config.tie_embeddings and _HEAD in files:
            _check_tied(path, files)
        target = np.dtype(DTYPES[dtype])
        params = {
            name: _load(parts, files, target, _sharding_of(shardings, name))
            for name, parts in _by_parameter(tensors).items()
        }
    return config, _nested(params)


def read_config(path: str | Path) -> Any:
    """Our config of the model in a directory.

    Raises:
      ValueError: there is no `config.json`, or it describes what no family here computes.
    """
    path = Path(path) / "config.json"
    if not path.is_file():
        raise ValueError(f"no config.json in {path.parent}; give the directory of a model export")
    try:
        fields = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"cannot read {path} ({error}); export the model again") from error
    try:
        return hf_config.from_json(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def save_checkpoint(
    path: str | Path,
    config: Any,
    params: Params,
    *,
    dtype: str,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a model directory that Hugging Face, SGLang and `load_checkpoint` read.

    With several processes all of them call this with the same arguments and a path that all of
    them see; each writes its share of the files. A directory that is new appears complete or
    not at all. In one that exists, files are replaced one by one, `config.json` last, and files
    that are no weights stay.

    Args:
      path: directory to write.
      config: as from `load_checkpoint`.
      params: parameters, sharded in any way.
      dtype: of the files.
      max_file_bytes: no file is larger, unless it holds a single tensor.

    Raises:
      ValueError: `params` are not those of `config`, `dtype` is unknown, or a process does not
        see the directory.
    """
    check_dtype(dtype)
    flat = _flat(params)
    tensors = hf_config.tensors(config)
    _check_params(flat, tensors)
    path = Path(path)
    fields = hf_config.to_json(config, dtype)
    files = _plan_files(tensors, np.dtype(DTYPES[dtype]).itemsize, max_file_bytes)
    partial = path.parent / f".partial-{path.name}"
    rank, count = jax.process_index(), jax.process_count()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _check_shared(partial)
    for number, (name, members) in enumerate(files.items()):
        _write_file(partial / name, members, flat, dtype, mine=number % count == rank)
    if rank == 0:
        _write_text(partial / "config.json", json.dumps(fields, indent=2) + "\n")
        if len(files) > 1:
            _write_text(partial / "model.safetensors.index.json", _index(files, dtype))
    _barrier("files")
    if rank == 0:
        _publish(partial, path)
    _barrier("published")


def save_tokenizer(path: str | Path, chat: Any) -> None:
    """Writes a tokenizer beside a model, as transformers and SGLang read it.

    A chat in a layout of ours comes with what says the same in Hugging Face's words: a chat
    template, and the tokens that end a turn and fill rows.

    Args:
      path: directory of a model.
      chat: `focus.chat.tokens.Chat` or anything with its `save`, which writes `tokenizer.json`.
    """
    path = Path(path)
    chat.save(path)
    config = path / "tokenizer_config.json"
    fields = json.loads(config.read_text()) if config.is_file() else {}
    layout = getattr(chat, "format", None)
    if layout is not None:
        fields |= {"eos_token": layout.end_of_turn, "pad_token": layout.pad}
        ids = {"eos_token_id": list(chat.stop_token_ids), "pad_token_id": chat.pad_id}
        _write_text(path / "chat_template.jinja", chat_files.template_of(layout))
        _write_text(path / "generation_config.json", json.dumps(ids, indent=2) + "\n")
    fields |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,  # decoding must not move a character
    }
    _write_text(config, json.dumps(fields, indent=2) + "\n")


# In.


def _open_files(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Tensor name -> lazy slice. Only headers are read."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"cannot read {index} ({error!r}); export the model again") from error
        names = sorted(set(weight_map.values()))
    elif (path / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        raise ValueError(
            f"no model.safetensors and no model.safetensors.index.json in {path}; other formats "
            "are not read, save the model with safe_serialization"
        )
    slices = {}
    for name in names:
        if not (path / name).is_file():
            raise ValueError(f"{index} names {name}, which is not in {path}; fetch it again")
        try:
            file = stack.enter_context(safetensors.safe_open(path / name, framework="numpy"))
        except Exception as error:  # the library raises one of its own for each way to be broken
            raise ValueError(
                f"cannot read {path / name} ({error}); the file is cut or damaged, copy it again"
            ) from error
        slices |= {tensor: file.get_slice(tensor) for tensor in file.keys()}
    return slices


def _our_names(path: Path, config: Any, files: Mapping[str, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, tensor in files.items():
        ours = hf_config.our_name(config, name)
        if ours in renamed:
            raise ValueError(f"{path} holds {ours} twice, under two names; export the model again")
        renamed[ours] = tensor
    return renamed


def _check_tensors(
    path: Path, config: Any, tensors: Sequence[Tensor], files: Mapping[str, Any]
) -> None:
    wanted = {t.name: t.file_shape for t in tensors}
    missing = [name for name in wanted if name not in files]
    ignored = hf_config.ignored(config)
    extra = [
        name
        for name in files
        if name not in wanted and not any(re.fullmatch(pattern, name) for pattern in ignored)
    ]
    if missing or extra:
        raise ValueError(
            f"the tensors in {path} are not those of its config.json: missing "
            f"{_some(missing)}, unexpected {_some(extra)}; the files belong to another model or "
            "the export is incomplete"
        )
    for name, shape in wanted.items():
        found = tuple(files[name].get_shape())
        if found != shape:
            raise ValueError(
                f"{name} in {path} has shape {found}, and config.json asks for {shape}; the "
                "files belong to another model"
            )
        code = files[name].get_dtype()
        if code not in _DTYPE_CODES.values():
            raise ValueError(
                f"{name} in {path} is stored as {code}; readable are "
                f"{sorted(_DTYPE_CODES.values())}, quantised models have to be dequantised first"
            )


def _check_tied(path: Path, files: Mapping[str, Any]) -> None:
    """A head beside tied embeddings has to be a copy of them."""
    embed, head = files[_EMBED], files[_HEAD]
    rows = embed.get_shape()[0]

    def part(tensor, at):
        return tensor[at : min(at + _ROWS, rows)].astype(np.float32)

    same = embed.get_shape() == head.get_shape() and all(
        np.array_equal(part(embed, at), part(head, at)) for at in range(0, rows, _ROWS)
    )
    if not same:
        raise ValueError(
            f"{_HEAD} in {path} differs from {_EMBED}, and config.json says tie_word_embeddings: "
            "the model has a head of its own; set tie_word_embeddings to false, or take the "
            "tensor out of the file"
        )


def _load(parts: Sequence[Tensor], files: Mapping, dtype: np.dtype, sharding: Any) -> jax.Array:
    """One parameter; `parts` are its layers in order, or the one tensor that it is."""
    stacked = parts[0].layer is not None
    shape = ((len(parts),) if stacked else ()) + parts[0].shape

    def read(index: tuple[slice, ...]) -> np.ndarray:
        index = tuple(slice(*s.indices(n)) for s, n in zip(index, shape))
        if not stacked:
            return parts[0].read(files[parts[0].name], index, dtype)
        out = np.empty([s.stop - s.start for s in index], dtype)
        for row, part in zip(out, parts[index[0]]):
            row[...] = part.read(files[part.name], index[1:], dtype)
        return out

    if sharding is None:
        return jnp.asarray(read(tuple(slice(None) for _ in shape)))
    return jax.make_array_from_callback(shape, sharding, read, dtype=dtype)


# Out.


def _plan_files(
    tensors: Sequence[Tensor], itemsize: int, max_file_bytes: int
) -> dict[str, list[Tensor]]:
    """File name -> its tensors, in the order of the model."""
    groups, size = [[]], 0
    for tensor in tensors:
        num_bytes = math.prod(tensor.file_shape) * itemsize
        if groups[-1] and size + num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{i:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }


def _write_file(
    path: Path, tensors: Sequence[Tensor], flat: Params, dtype: str, *, mine: bool
) -> None:
    """Appends tensor by tensor. Every process takes part: bringing a tensor together is
    something that all of them do, and one of them writes it."""
    target = np.dtype(DTYPES[dtype])
    with contextlib.ExitStack() as stack:
        if mine:
            file = stack.enter_context(open(path, "wb"))
            file.write(_header(tensors, dtype))
        for tensor in tensors:
            value = _whole(flat[tensor.parameter], tensor.layer)
            if mine:
                file.write(tensor.to_file(np.asarray(value), target).tobytes())
        if mine:
            file.flush()
            os.fsync(file.fileno())


def _header(tensors: Sequence[Tensor], dtype: str) -> bytes:
    """Header of a safetensors file: its length, then names, types, shapes and places as JSON."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, itemsize = 0, np.dtype(DTYPES[dtype]).itemsize
    for tensor in tensors:
        end = at + math.prod(tensor.file_shape) * itemsize
        fields[tensor.name] = {
            "dtype": _DTYPE_CODES[dtype],
            "shape": list(tensor.file_shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    return len(text).to_bytes(8, "little") + text


@functools.partial(jax.jit, static_argnames="sharding")
def _replicated(x: jax.Array, layer: jax.Array | None, sharding: NamedSharding) -> jax.Array:
    x = x if layer is None else jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
    return jax.lax.with_sharding_constraint(x, sharding)


def _whole(leaf: Any, layer: int | None) -> Any:
    """A tensor of one layer on this host; a collective where other processes hold parts."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf if layer is None else leaf[layer]
    sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    index = None if layer is None else np.int32(layer)
    return _replicated(leaf, index, sharding).addressable_data(0)


def _index(files: Mapping[str, Sequence[Tensor]], dtype: str) -> str:
    count = sum(math.prod(t.file_shape) for members in files.values() for t in members)
    return json.dumps(
        {
            "metadata": {"total_size": count * np.dtype(DTYPES[dtype]).itemsize},
            "weight_map": {t.name: name for name, members in files.items() for t in members},
        },
        indent=2,
    )


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _publish(partial: Path, path: Path) -> None:
    sync_to_disk(partial)  # the names of its files are on disk before its own is
    if not path.exists():
        os.rename(partial, path)
    else:
        written = {file.name for file in partial.iterdir()}
        for name in sorted(
            written, key=lambda name: (name.endswith(".json"), name == "config.json")
        ):
            os.replace(partial / name, path / name)
        for old in path.glob("model*.safetensors*"):
            if old.name not in written:
                old.unlink()
        partial.rmdir()
        sync_to_disk(path)
    sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a directory, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_params(flat: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    wanted = {}
    for name, parts in _by_parameter(tensors).items():
        stacked = () if parts[0].layer is None else (len(parts),)
        wanted[name] = stacked + parts[0].shape
    missing = [name for name in wanted if name not in flat]
    extra = [name for name in flat if name not in wanted]
    if missing or extra:
        raise ValueError(
            f"params are not those of the config: missing {_some(missing)}, unexpected "
            f"{_some(extra)}"
        )
    for name, shape in wanted.items():
        if tuple(flat[name].shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(flat[name].shape)}, the config asks for {shape}"
            )


def _check_shared(directory: Path) -> None:
    """Waits for process 0 to make the directory, and finds out whether all of them see it."""
    if jax.process_count() == 1:
        return
    _barrier("directory")
    seen = multihost_utils.process_allgather(np.array(directory.is_dir()))
    if not seen.all():
        raise ValueError(
            f"processes {np.flatnonzero(~seen).tolist()} do not see {directory}, which process 0 "
            "has made; save to a path that all processes share"
        )


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"save_checkpoint {name}")


# Trees. The name of a parameter is its path, joined by slashes.


def _by_parameter(tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    parts: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.parameter, []).append(tensor)
    return parts


def _flat(tree: Any) -> dict[str, Any]:
    def walk(prefix: str, node: Any) -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            if isinstance(value, Mapping):
                yield from walk(f"{prefix}{key}/", value)
            else:
                yield prefix + key, value

    return dict(walk("", tree))


def _nested(flat: Mapping[str, Any]) -> Params:
    tree: Params = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _sharding_of(shardings: Any, name: str) -> Any:
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        return shardings
    for part in name.split("/"):
        if part not in shardings:
            raise ValueError(f"shardings has no entry for {name}; build them for this config")
        shardings = shardings[part]
    return shardings


def _some(names: Sequence[str], limit: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{names[:limit]}{more}" if names else "none"
