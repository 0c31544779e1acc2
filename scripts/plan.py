"""Plans a run: chips, GPU servers, where the time of a step goes, and which side waits.

python scripts/plan.py --config configs/tpu_pod.py:qwen3_5_9b --chip v5p --gpu H100
python scripts/plan.py --config configs/tpu_pod.py:qwen3_5_9b --topology v5p:4x4x4 --servers 2
python scripts/plan.py --config configs/tpu_pod.py:qwen3_5_9b --topology v5p:4x4x4 \\
    --report docs/tpu/qwen3_5_9b_v5p_4x4x4.json

The first searches the slices of a chip: a table of them, and the step of the chosen one. The second
plans one slice with the config's own mesh. The third takes traffic and collectives of compiled
programs, the JSON of scripts/compile_tpu.py, instead of formulas. Formulas and assumptions:
focus/tpu/plan.py and focus/tpu/estimate.py.
"""

import dataclasses
import json
import sys
from pathlib import Path

import rich.console
from absl import app, flags
from ml_collections import config_flags

from focus.run import experiment
from focus.tpu import plan
from focus.tpu.chips import GPUS, TPUS, parse_topology
from focus.tpu.estimate import layout_of

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run: FILE or FILE:ARGUMENT.")
_CHIP = flags.DEFINE_enum("chip", "v5p", sorted(TPUS), "Chips of the learner, to search slices of.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "One slice instead, such as v5p:4x4x4.")
_GPU = flags.DEFINE_enum("gpu", "H100", sorted(GPUS), "GPUs of the rollout servers.")
_SERVERS = flags.DEFINE_integer("servers", None, "GPU servers; default: chips do not wait.")
_REPORT = flags.DEFINE_string("report", None, "JSON of scripts/compile_tpu.py, with --topology.")
_EXTRA_COST = flags.DEFINE_float(
    "extra_cost", 0.25, "Chip- and GPU-seconds that a fast step may cost more than the cheapest."
)
for field in dataclasses.fields(plan.Assumptions):
    define = flags.DEFINE_integer if isinstance(field.default, int) else flags.DEFINE_float
    define(field.name, field.default, "See focus.tpu.plan.Assumptions.")
flags.mark_flag_as_required("config")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    if _REPORT.value and not _TOPOLOGY.value:
        raise app.UsageError("--report is of one slice: give its --topology, too")
    config, gpu = _CONFIG.value, GPUS[_GPU.value]
    console = rich.console.Console()
    console.width = max(console.width, 120)  # the table of slices is wide
    values = {f.name: flags.FLAGS[f.name].value for f in dataclasses.fields(plan.Assumptions)}
    options = {"servers": _SERVERS.value, "assumptions": plan.Assumptions(**values)}
    try:
        experiment.validate(config, has_servers=False)
        if _TOPOLOGY.value:
            report = json.loads(Path(_REPORT.value).read_text()) if _REPORT.value else None
            layout = layout_of(config, parse_topology(_TOPOLOGY.value))
            chosen = plan.make_plan(config, layout, gpu, report=report, **options)
        else:
            plans = plan.search(config, TPUS[_CHIP.value], gpu, **options)
            chosen = plan.choose(plans, _EXTRA_COST.value)
            plan.show_search(plans, chosen, config.budget, gpu, console)
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    plan.show(chosen, config.budget, gpu, console)


if __name__ == "__main__":
    app.run(main)
