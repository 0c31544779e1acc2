"""Memory and time of the learner by formula, for layouts that nobody has compiled.

C chips are a mesh of `fsdp` x `tensor`; n_f and n_t are its sizes. A micro-batch of R rows of L
tokens lays t = R L / n_f tokens on each group of n_t chips. With P parameters, P_1 of them in the
largest layer, vocabulary V, width M and A layers, a chip holds, in bytes,

    state        16 P / (n_f n_t)      float32 weights, two moments, a gradient; 28 with a critic
                                       that has a backbone of its own
    activations  2 t M A               inputs of layers, bfloat16; remat "dots" keeps what the
                                       products of a layer give as well, 2 t O A / n_t
    layer        8 P_1 / n_t + 2 t O / n_t x 3
                                       weights of two layers, gathered, with their gradients; what a
                                       layer computes, and its gradient; of a gated delta layer
                                       with H heads, keys of width K, values of width W and chunks
                                       of C tokens also t H (4 K W / C + 20 (K + W) + 40 C) / n_t,
                                       with remat "chunks" without the last term
    logits       6 V M / n_t + 12 min(n, t V / n_t)
                                       the unembedding, gathered, and its float32 gradient; logits
                                       of a chunk (`focus.policy.logprobs`: n = 2^28), thrice

O is the width of what a layer's products give, together. "layer" and "logits" are not alive at the
same time: the larger counts. The times of a micro-batch are, with `flops` as executed
(`focus.tpu.flops`) and b_f, b_t the bandwidths of the groups' rings (`Slice.ring_bytes_per_s`),

    compute      flops / (C F e_f)
    weights      6 P / n_t (n_f - 1) / n_f / b_f
                                       bfloat16, gathered forward and backward; gradients scattered;
                                       twice that in three dimensions, where the compiler gathers
                                       by adding up parts that are zero elsewhere
    activations  2 t M x 4 A x (2 or 3) (n_t - 1) / n_t / b_t
                                       a layer gathers and scatters twice forward (and again where
                                       it is rematerialised) and backward

Scoring is a forward pass: no gradient, weights gathered once. An optimiser step reads and writes
parameters and moments and reads the gradient twice, for its norm first: 32 bytes a number.

Adapters (`focus.policy.lora`) change what is trained. N_f of their numbers belong to factors on the
side of the model's width, N_t to those on the other side; the first are cut along fsdp alone, the
second along tensor alone, so a chip holds N' = N_f / n_f + N_t / n_t of them and

    state        4 P / (n_f n_t) + 16 N'
                                       the base, float32 and frozen; with a backbone of the critic's
                                       own its gradient needs most, 20 P / (n_f n_t) + 12 N'
    layer        4 P_1 / n_t and what is computed; 8 where the critic's backbone is trained
    logits       2 V M / n_t and logits
    weights      (4 P / n_t + 8 N_f + 4 N_t / n_t) (n_f - 1) / n_f / b_f
                                       the base is gathered twice and nothing of it scattered; N_f
                                       are gathered as well, and gradients of all are added up on
                                       every chip; in three dimensions twice that, as above
    optimiser    32 bytes for each of N'

Collectives are taken not to overlap with arithmetic, as in `focus.tpu.report`, whose figures for
compiled programs these formulas are held against in the tests.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_collections

from focus.policy import gated_delta, logprobs, lora
from focus.policy import model as models
from focus.run import experiment
from focus.tpu import flops
from focus.tpu.chips import Chip, Slice


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a learner lies on its chips.

    Attributes:
      slice_: the chips.
      tensor: of each group of this many, every chip has a part of each matrix product; the rest
        of the mesh is `fsdp`.
      micro_rows: rows that go through the model at a time.
    """

    slice_: Slice
    tensor: int
    micro_rows: int

    @property
    def fsdp(self) -> int:
        """Groups of chips, each with rows of its own."""
        return self.slice_.num_chips // self.tensor

    @property
    def mesh(self) -> str:
        """As written in a table."""
        return f"fsdp {self.fsdp}" + (f" x tensor {self.tensor}" if self.tensor > 1 else "")


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Time of one run of a program.

    Attributes:
      compute: arithmetic, at the share of the peak that is assumed.
      collectives: waiting for other chips.
    """

    compute: float
    collectives: float

    @property
    def total(self) -> float:
        """One after the other."""
        return self.compute + self.collectives


def layout_of(config: ml_collections.ConfigDict, slice_: Slice) -> Layout:
    """The layout that a config asks for.

    Raises:
      ValueError: its mesh does not fit the chips, or has axes that are not planned.
    """
    mesh, rows = config.mesh, config.learner.micro_rows
    chips = slice_.num_chips
    for axis in ("data", "sequence"):
        if mesh[axis] != 1:
            raise ValueError(
                f"mesh.{axis}={mesh[axis]}: plans know fsdp and tensor; set mesh.{axis}=1, or "
                "compile with scripts/compile_tpu.py and read its report"
            )
    tensor = chips // mesh.fsdp if mesh.tensor == -1 else mesh.tensor
    layout = Layout(slice_, tensor, rows)
    if layout.fsdp * tensor != chips or mesh.fsdp not in (-1, layout.fsdp):
        raise ValueError(
            f"mesh fsdp={mesh.fsdp} x tensor={mesh.tensor} does not make {chips} chips; set one "
            "of them to -1"
        )
    if rows % layout.fsdp:
        raise ValueError(
            f"learner.micro_rows={rows} rows cannot be spread over {layout.fsdp} groups of chips; "
            f"make it a multiple of {layout.fsdp}"
        )
    return layout


def layouts(config: ml_collections.ConfigDict, slice_: Slice) -> Iterator[Layout]:
    """Layouts of a slice that are worth a look: up to 8 chips to a product, up to 8 rows to a chip.

    Args:
      config: of the run; its own mesh and micro-batch are not read.
      slice_: the chips.
    """
    model = experiment.model_config(config)
    for tensor, rows in itertools.product((1, 2, 4, 8), repeat=2):
        along_an_axis = any(size % tensor == 0 for size in slice_.shape)
        if along_an_axis and model.num_kv_heads % tensor == 0:
            yield Layout(slice_, tensor, rows * slice_.num_chips // tensor)


def _stacks(model: Any) -> list[Mapping[str, tuple[int, ...]]]:
    """Shapes of each kind of layer, stacked."""
    return [tree for tree in models.param_shapes(model).values() if isinstance(tree, dict)]


def has_own_backbone(config: ml_collections.ConfigDict) -> bool:
    """Whether the critic trains a transformer of its own."""
    return config.critic.enabled and config.critic.backbone == "own"


def _tokens(config: ml_collections.ConfigDict, layout: Layout) -> int:
    """t."""
    return layout.micro_rows // layout.fsdp * config.learner.row_length


def _adapter_sides(model: Any, adapters: lora.LoraConfig | None) -> tuple[int, int]:
    """N_f and N_t."""
    sides = [0, 0]
    if adapters is not None:
        shapes = jax.tree.leaves(lora.adapter_shapes(model, adapters))
        axes = jax.tree.leaves(
            lora.adapter_axes(model, adapters), is_leaf=lambda x: isinstance(x, tuple)
        )
        for shape, names in zip(shapes, axes, strict=True):
            sides["embed" not in names] += math.prod(shape.shape)
    return sides[0], sides[1]


def trained_per_chip(model: Any, layout: Layout, adapters: lora.LoraConfig | None = None) -> float:
    """Numbers that a chip holds of what the optimiser changes: N', or P / (n_f n_t)."""
    if adapters is None:
        return models.num_params(model) / layout.slice_.num_chips
    beside, across = _adapter_sides(model, adapters)
    return beside / layout.fsdp + across / layout.tensor


def optimizer_seconds(chip: Chip, numbers: float) -> float:
    """Time of an optimiser step over so many numbers on each chip; see the module."""
    return 32 * numbers / chip.hbm_bytes_per_s


def _inside(model: Any) -> float:
    """Bytes that the chunks of a gated delta layer keep for its backward pass, a token."""
    keys, values, chunk = model.linear_key_dim, model.linear_value_dim, gated_delta.CHUNK
    kept = 4 * keys * values / chunk + 20 * (keys + values)
    if model.remat != "chunks":
        kept += 40 * chunk
    return model.linear_num_value_heads * kept


def memory_bytes(config: ml_collections.ConfigDict, layout: Layout) -> dict[str, float]:
    """Memory of a chip while a gradient is computed, by what takes it; see the module.

    Args:
      config: of the run; its own mesh and micro-batch are not read.
      layout: on which chips.

    Returns:
      "state", "activations", "layer" and "logits"; of the last two only one is alive at a time.
    """
    model, adapters = experiment.model_config(config), experiment.lora_config(config)
    own = has_own_backbone(config)
    tokens, tensor = _tokens(config, layout), layout.tensor
    kept, layer = 2.0 * tokens * model.d_model * model.num_layers, 0.0
    per_weight = 8 if adapters is None or own else 4
    for stack in _stacks(model):
        count = next(iter(stack.values()))[0]
        weights = sum(math.prod(shape) for shape in stack.values()) / count
        outputs = sum(shape[-1] for name, shape in stack.items() if "proj" in name)
        inside = tokens * _inside(model) if "A_log" in stack else 0.0
        layer = max(layer, (per_weight * weights + 6 * tokens * outputs + inside) / tensor)
        if model.remat not in ("full", "chunks"):
            kept += 2.0 * count * tokens * outputs / tensor
    chunk = config.learner.logprob_chunk * (tokens / config.learner.row_length)  # of all rows
    most = chunk * model.vocab_size / tensor if chunk else logprobs.LOGITS_PER_CHUNK[model.dtype]
    logits = min(most, tokens * model.vocab_size / tensor)
    if adapters is None:
        state = (28 if own else 16) * trained_per_chip(model, layout)
    else:
        state = (20 if own else 4) * trained_per_chip(model, layout)
        state += (12 if own else 16) * trained_per_chip(model, layout, adapters)
    per_logit_weight = 6 if adapters is None else 2
    return {
        "state": state,
        "activations": kept,
        "layer": layer,
        "logits": per_logit_weight * model.vocab_size * model.d_model / tensor + 12 * logits,
    }


def peak_bytes(config: ml_collections.ConfigDict, layout: Layout) -> float:
    """The most that a chip holds at a time."""
    parts = memory_bytes(config, layout)
    return parts["state"] + parts["activations"] + max(parts["layer"], parts["logits"])


def _groups(layout: Layout) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Places of the chips of one group along fsdp, and of one along tensor."""
    shape, tensor = layout.slice_.shape, layout.tensor
    axis = next(i for i, size in enumerate(shape) if size % tensor == 0)
    everything = [range(size) for size in shape]
    beside = [r if i != axis else r[::tensor] for i, r in enumerate(everything)]
    inside = [range(1) if i != axis else r[:tensor] for i, r in enumerate(everything)]
    return list(itertools.product(*beside)), list(itertools.product(*inside))


def run_seconds(
    config: ml_collections.ConfigDict, layout: Layout, flops_share: float
) -> dict[str, Seconds]:
    """Time of one run of each program of the policy; see the module.

    Args:
      config: of the run; its own mesh and micro-batch are not read.
      layout: on which chips.
      flops_share: e_f, of the peak that matrix products reach.

    Returns:
      "gradient" and "score" of a micro-batch, and "optimizer"; with a critic that has a backbone of
      its own also "critic", its gradient of a micro-batch, counted like that of a policy.
    """
    model, slice_ = experiment.model_config(config), layout.slice_
    adapters = experiment.lora_config(config)
    length, chip = config.learner.row_length, slice_.chip
    params, sides = models.num_params(model), _adapter_sides(model, adapters)
    rate = slice_.num_chips * chip.flops_per_s * flops_share
    beside, inside = _groups(layout)

    def gathered(num_bytes, group):
        sent = num_bytes * (len(group) - 1) / len(group)
        in_space = all(len(set(places)) > 1 for places in zip(*group)) and len(group[0]) == 3
        return (2 if in_space else 1) * sent / slice_.ring_bytes_per_s(group)

    weights = gathered(2 * params / layout.tensor, beside)
    width, across = (
        gathered(2 * numbers, beside) for numbers in (sides[0], sides[1] / layout.tensor)
    )
    activations = gathered(2 * _tokens(config, layout) * model.d_model, inside)
    activations *= 4 * model.num_layers
    again = 0 if model.remat == "none" else 1
    row_tokens = layout.micro_rows * length

    def gradient(trained: lora.LoraConfig | None, moved: float) -> Seconds:
        executed = flops.train_flops(model, length, trained)[1]
        return Seconds(row_tokens * executed / rate, moved + (2 + again) * activations)

    moved = 3 * weights if adapters is None else 2 * (weights + width) + 2 * (width + across)
    executed = flops.score_flops(model, length, adapters)[1]
    runs = {
        "gradient": gradient(adapters, moved),
        "score": Seconds(row_tokens * executed / rate, weights + width + activations),
        "optimizer": Seconds(
            optimizer_seconds(chip, trained_per_chip(model, layout, adapters)), 0.0
        ),
    }
    return runs | ({"critic": gradient(None, 3 * weights)} if has_own_backbone(config) else {})
