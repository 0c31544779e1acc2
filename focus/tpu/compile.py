"""Compiles the programs of a run for a TPU slice that is not there.

`libtpu` compiles ahead of time for a named topology on any host. What is compiled is what
`focus.run.trainer` runs: the gradient of a micro-batch, the optimiser step, the scoring pass and
the critic, with their shardings, on arrays that have a shape and a place but no contents. Where
adapters are trained, their base is one more argument of the first and the third, in float32 and
cut up like parameters, and stays in memory during the others.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from focus.critic.state import Evidence
from focus.learner import packing, sharding
from focus.learner.critic_on_policy import CriticLearner
from focus.learner.critic_own_backbone import EvidenceRows
from focus.learner.scoring import jit_score, policy_model
from focus.learner.state import init_state, make_optimizer
from focus.learner.update import PolicyBatch, jit_accumulate, jit_apply, make_policy_loss
from focus.policy import lora
from focus.policy import model as models
from focus.run import experiment, learning
from focus.tpu import flops, hlo
from focus.tpu.chips import Slice


@dataclasses.dataclass(frozen=True)
class Program:
    """A program before it is compiled.

    Attributes:
      name: what it does.
      lower: lowers it.
      tokens: tokens of the rows that it reads; 0 where it reads none.
      model_flops: what MFU counts, all chips together.
      hardware_flops: what is executed, all chips together.
      resident_bytes: per chip, of arrays that stay in memory while it runs but are not its own.
    """

    name: str
    lower: Callable[[], Any]
    tokens: int
    model_flops: float
    hardware_flops: float
    resident_bytes: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of a program; bytes are per chip.

    Attributes:
      program: what was compiled.
      argument_bytes: arrays that go in.
      output_bytes: arrays that come out, without those that take the place of one that went in.
      temporary_bytes: largest total of everything in between.
      hbm_bytes: traffic to memory in one run.
      collectives: all of them.
      unknown_loops: loops whose trip count is not known; their bodies count once.
    """

    program: Program
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    hbm_bytes: int
    collectives: tuple[hlo.Collective, ...]
    unknown_loops: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """Memory of a chip while the program runs."""
        own = self.argument_bytes + self.output_bytes + self.temporary_bytes
        return own + self.program.resident_bytes


_WAY_OUT = (
    "use more chips, fewer learner.micro_rows to a chip, model.remat='full' (hybrid: 'chunks'), or "
    "a larger mesh.tensor"
)


class DoesNotFit(ValueError):
    """A program needs more memory than a chip has."""


def topology_devices(slice_: Slice) -> list[Any]:
    """Devices of a slice, for compilation only.

    Raises:
      ValueError: libtpu is not installed, or knows no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("compiling for a TPU needs libtpu: pip install -e '.[tpu]'")
    # Off a TPU host libtpu would wait for a metadata server, and it lets one process in at a time.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    try:
        devices = topologies.get_topology_desc(slice_.name, "tpu").devices
    except Exception as error:
        raise ValueError(
            f"libtpu has no topology {slice_.name!r}; choose a shape such as "
            f"{', '.join(slice_.chip.slices)} ({error})"
        ) from error
    return list(devices)


def bytes_per_chip(tree: Any) -> int:
    """Bytes of the part of abstract arrays that lies on one chip."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _abstract(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        tree,
        shardings,
    )


def programs(config: ml_collections.ConfigDict, mesh: Mesh) -> list[Program]:
    """The programs of a step of a run, as `focus.run.trainer` makes them.

    Args:
      config: of the run.
      mesh: of real devices or of a topology's.

    Returns:
      "gradient" of one micro-batch, "optimizer", "score" of one micro-batch, and the critic's.

    Raises:
      ValueError: sizes that do not fit together.
    """
    c = config
    model, adapters = experiment.model_config(c), experiment.lora_config(c)
    sharding.check_mesh(
        mesh,
        micro_rows=c.learner.micro_rows,
        row_length=c.learner.row_length,
        attention=model.attention,
        num_kv_heads=model.num_kv_heads,
    )
    policy = policy_model(model, logprob_chunk=c.learner.logprob_chunk or None)
    optimizer = make_optimizer(learning.optimizer_config(c), experiment.trained_axes(c))
    replicated = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        models.param_shapes(model),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    critic = None
    if c.critic.enabled:
        critic = learning.make_critic(c, model, policy, params, score=None, mesh=mesh)

    def init(params):
        key = jax.random.key(0)
        critic_state = None if critic is None else critic.init(key, params)
        if adapters is not None:
            params = lora.init_adapters(model, adapters, key)
        return init_state(params, optimizer, critic_state)

    state = jax.eval_shape(init, params)
    frozen = None
    if adapters is not None:
        frozen = _abstract(params, sharding.shardings_of(params, mesh))
    shardings = sharding.shardings_of(state, mesh)
    state = _abstract(state, shardings)
    batch = _policy_batch(c, mesh)
    denominator = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
    gradient = state.params
    loss = make_policy_loss(policy, learning.loss_config(c), c.rollout.temperature)
    accumulate = jit_accumulate(loss, mesh, shardings.params)
    apply = jit_apply(optimizer, shardings)
    score = jit_score(policy, mesh=mesh, temperature=c.rollout.temperature)
    tokens, length = math.prod(batch.mask.shape), c.learner.row_length
    trained = [tokens * x for x in flops.train_flops(model, length, adapters)]
    scored = [tokens * x for x in flops.score_flops(model, length, adapters)]
    critic_bytes, moments = bytes_per_chip(state.critic), bytes_per_chip(state.opt_state)
    base = bytes_per_chip(frozen)
    reference = bytes_per_chip(state.params) if c.learner.kl_coefficient else 0
    found = [
        Program(
            "gradient",
            lambda: accumulate.lower(state.params, gradient, batch, denominator, frozen),
            tokens,
            *trained,
            resident_bytes=moments + critic_bytes + reference,
        ),
        Program(
            "optimizer",
            lambda: apply.lower(state.params, state.opt_state, gradient),
            0,
            0.0,
            0.0,
            resident_bytes=critic_bytes + reference + base,
        ),
        Program(
            "score",
            lambda: score.lower(state.params, batch.rows, frozen),
            tokens,
            *scored,
            resident_bytes=moments + critic_bytes + reference,
        ),
    ]
    others = bytes_per_chip(state.params) + moments + reference + base
    if isinstance(critic, CriticLearner):
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated)
        found.append(
            Program("critic", lambda: critic.update.lower(state.critic, key), 0, 0.0, 0.0, others)
        )
    elif critic is not None:
        trained_arrays = {"heads": state.critic.critic.trained, "backbone": state.critic.backbone}
        evidence = _evidence_rows(c, batch.rows, mesh)
        fitted = [tokens * x for x in flops.train_flops(model, length)]  # never by adapters
        found.append(
            Program(
                "critic",
                lambda: critic.accumulate.lower(
                    trained_arrays,
                    state.critic.critic.fixed,
                    trained_arrays,
                    evidence,
                    [denominator, denominator],
                ),
                tokens,
                *fitted,
                resident_bytes=others + bytes_per_chip(state.critic.opt_state),
            )
        )
    return found


def _on_rows(tree: Any, mesh: Mesh) -> Any:
    """Abstract arrays where `sharding.shard_rows` puts real ones."""

    def place(path, leaf):
        name = sharding.path_name(path)
        spec = next(s for pattern, s in sharding.ROW_RULES if re.search(pattern, name))
        spec = sharding.ROW_SPEC if mesh.shape["sequence"] == 1 else spec
        return NamedSharding(mesh, spec)

    return _abstract(tree, jax.tree_util.tree_map_with_path(place, tree))


def _policy_batch(c: ml_collections.ConfigDict, mesh: Mesh) -> PolicyBatch:
    """A micro-batch without contents."""
    rows, length = c.learner.micro_rows, c.learner.row_length
    one = packing.empty_rows(1, length, c.learner.max_nodes, c.learner.max_states)
    numbers = jax.ShapeDtypeStruct((rows, length), jnp.float32)
    batch = PolicyBatch(
        rows=jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), one),
        mask=jax.ShapeDtypeStruct((rows, length), jnp.bool_),
        advantages=numbers,
        old_logp=numbers,
        behaviour_logp=numbers,
        ref_logp=numbers if c.learner.kl_coefficient else None,
    )
    return _on_rows(batch, mesh)


def _evidence_rows(c: ml_collections.ConfigDict, rows: packing.Rows, mesh: Mesh) -> EvidenceRows:
    """Rows with evidence, without contents."""
    shape = (c.learner.micro_rows, 2 * c.learner.max_states)
    dtypes = {
        "features": jnp.int32,
        "bootstrap_id": jnp.uint32,
        "fold": jnp.int32,
        "mask": jnp.bool_,
    }
    evidence = Evidence(
        **{
            field.name: jax.ShapeDtypeStruct(shape, dtypes.get(field.name, jnp.float32))
            for field in dataclasses.fields(Evidence)
        }
    )
    return _on_rows(EvidenceRows(rows, evidence), mesh)


def _compile(name: str, lowered: Any) -> tuple[str, dict[str, int]]:
    """Optimised text of a program, and the compiler's own count of its memory."""
    with tempfile.TemporaryDirectory() as directory:
        # The dump, because the text of a compiled TPU program cannot always be asked for.
        options = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = re.search("Ran out of memory.*?HBM \\([^)]*\\)", str(error), re.DOTALL)
            raise DoesNotFit(
                f"{name} does not fit: {reason.group() if reason else error}; {_WAY_OUT}"
            ) from error
        text = next(Path(directory).glob("*after_optimizations.txt")).read_text()
    memory = compiled.memory_analysis()
    sizes = {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }
    return text, sizes


def _kept(lowered: Any, cache: Path) -> Path:
    """File of a compiled program; another program or compiler has another one."""
    versions = [importlib.metadata.version(name) for name in ("jax", "libtpu")]
    key = "\n".join([*versions, lowered.as_text()])
    return cache / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.gz"


def _compile_or_read(name: str, lowered: Any, cache: Path | None) -> tuple[str, dict[str, int]]:
    path = None if cache is None else _kept(lowered, cache)
    if path is not None and path.exists():
        sizes, text = gzip.decompress(path.read_bytes()).decode().split("\n", 1)
        return text, json.loads(sizes)
    text, sizes = _compile(name, lowered)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(gzip.compress(f"{json.dumps(sizes)}\n{text}".encode()))
        part.rename(path)
    return text, sizes


def compile_program(program: Program, hbm_bytes: float, cache: Path | None = None) -> Compiled:
    """Compiles a program and reads what became of it.

    Args:
      program: to compile.
      hbm_bytes: memory of a chip.
      cache: directory of programs that were compiled before for these chips, None for none.

    Returns:
      Its memory, traffic and collectives.

    Raises:
      DoesNotFit: it needs more memory than there is, alone or beside what stays there.
    """
    text, sizes = _compile_or_read(program.name, program.lower(), cache)
    module = hlo.parse(text)
    result = Compiled(
        program=program,
        **sizes,
        hbm_bytes=hlo.hbm_bytes(module),
        collectives=tuple(hlo.collectives(module)),
        unknown_loops=hlo.unknown_loops(module),
    )
    if result.peak_bytes > hbm_bytes:
        raise DoesNotFit(
            f"{program.name} needs {result.peak_bytes / 2**30:.1f} GiB per chip "
            f"(arguments {result.argument_bytes / 2**30:.1f}, outputs "
            f"{result.output_bytes / 2**30:.1f}, temporaries "
            f"{result.temporary_bytes / 2**30:.1f}, other arrays of the run "
            f"{program.resident_bytes / 2**30:.1f}), a chip has {hbm_bytes / 2**30:.1f}; "
            f"{_WAY_OUT}"
        )
    return result
