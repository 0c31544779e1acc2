"""Plans a run: chips, GPU servers, where the time of a step goes, and which side waits.

python scripts/plan.py --config configs/tpu_pod.py:qwen3_8b --topology v5p:4x4x4 --gpu H100
python scripts/plan.py --config configs/tpu_pod.py:qwen3_8b --topology v5p:4x4x4 --report r.json

Formulas and assumptions: focus/tpu/plan.py. With --report, the JSON of scripts/compile_tpu.py for
the same config and topology, the learner's times are those of the compiled programs.
"""

import dataclasses
import json
import sys
from pathlib import Path

import rich.console
from absl import app, flags
from ml_collections import config_flags

from focus.tpu.chips import GPUS, parse_topology
from focus.tpu.plan import Assumptions, make_plan, show

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run: FILE or FILE:ARGUMENT.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "The learner's chips, such as v5p:4x4x4.")
_GPU = flags.DEFINE_enum("gpu", "H100", sorted(GPUS), "GPUs of the rollout servers.")
_SERVERS = flags.DEFINE_integer("servers", None, "GPU servers; default: chips never wait.")
_REPORT = flags.DEFINE_string("report", None, "JSON of scripts/compile_tpu.py.")
for field in dataclasses.fields(Assumptions):
    define = flags.DEFINE_integer if isinstance(field.default, int) else flags.DEFINE_float
    define(field.name, field.default, "See focus.tpu.plan.Assumptions.")
flags.mark_flags_as_required(["config", "topology"])


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    gpu = GPUS[_GPU.value]
    values = {f.name: flags.FLAGS[f.name].value for f in dataclasses.fields(Assumptions)}
    try:
        slice_ = parse_topology(_TOPOLOGY.value)
        plan = make_plan(
            _CONFIG.value,
            slice_.chip,
            gpu,
            chips=slice_.num_chips,
            servers=_SERVERS.value,
            assumptions=Assumptions(**values),
            report=json.loads(Path(_REPORT.value).read_text()) if _REPORT.value else None,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    show(plan, _CONFIG.value.budget, slice_.chip, gpu, rich.console.Console())


if __name__ == "__main__":
    app.run(main)
