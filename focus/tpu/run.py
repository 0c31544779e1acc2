"""From a config and the name of a slice to its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_collections

from focus.learner import sharding
from focus.policy import lora
from focus.policy import model as models
from focus.run import experiment, plugins
from focus.tpu.chips import parse_topology
from focus.tpu.compile import compile_program, programs, topology_devices
from focus.tpu.report import report


def compile_config(
    config: ml_collections.ConfigDict,
    topology: str,
    *,
    name: str = "run",
    only: Sequence[str] = (),
    cache: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compiles the programs of a run for a slice.

    Args:
      config: of the run.
      topology: such as "v5p:4x4x4".
      name: of the config, for the report.
      only: names of programs; empty for all of them.
      cache: directory in which compiled programs are kept and looked for; None for none.
      progress: called with a line per program.

    Returns:
      The report, see `focus.tpu.report.report`, with the compiler's version.

    Raises:
      DoesNotFit: a program needs more memory than a chip has.
      ValueError: unknown topology or program, sizes that do not fit together, or a config that
        no run would take.
    """
    slice_ = parse_topology(topology)
    plugins.load(config.plugins)
    experiment.validate(config, has_servers=False)
    model = experiment.model_config(config)
    mesh = sharding.make_mesh(**config.mesh.to_dict(), devices=topology_devices(slice_))
    chosen = programs(config, mesh)
    unknown = set(only) - {program.name for program in chosen}
    if unknown:
        names = ", ".join(program.name for program in chosen)
        raise ValueError(f"no program {', '.join(sorted(unknown))}: choose among {names}")
    kept = None if cache is None else cache / slice_.name.replace(":", "_")
    compiled = []
    for program in chosen:
        if not only or program.name in only:
            began = time.perf_counter()
            compiled.append(compile_program(program, slice_.chip.hbm_bytes, kept))
            seconds = time.perf_counter() - began
            progress(f"{program.name}: compiled in {seconds:.0f} s")
    adapters = experiment.lora_config(config)
    result = report(
        name,
        compiled,
        slice_,
        mesh,
        num_params=models.num_params(model),
        num_adapter_params=adapters and lora.num_adapter_params(model, adapters),
    )
    return result | {"versions": {p: metadata.version(p) for p in ("jax", "libtpu")}}
