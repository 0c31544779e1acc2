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

from focus.run import experiment, plugins
from focus.run.command_line import Parser
from focus.tpu import plan
from focus.tpu.chips import GPUS, TPUS, parse_topology
from focus.tpu.estimate import layout_of


def flags():
    """The command line, read."""
    parser = Parser(__doc__)
    parser.add_config("the run")
    chips = parser.add_mutually_exclusive_group()
    chips.add_argument(
        "--chip", default="v5p", choices=sorted(TPUS), help="of the learner, to search slices of"
    )
    chips.add_argument("--topology", help="one slice instead, such as v5p:4x4x4")
    parser.add_argument("--gpu", default="H100", choices=sorted(GPUS), help="of rollout servers")
    parser.add_argument("--servers", type=int, help="GPU servers; default: chips do not wait")
    parser.add_argument(
        "--report", type=Path, help="JSON of scripts/compile_tpu.py, with --topology"
    )
    parser.add_argument(
        "--extra-cost",
        type=float,
        default=0.25,
        help="chip- and GPU-seconds that a fast step may cost more than the cheapest (0.25)",
    )
    for field in dataclasses.fields(plan.Assumptions):
        name, default = field.name.replace("_", "-"), field.default
        what = f"see focus.tpu.plan.Assumptions ({default:g})"
        parser.add_argument(f"--{name}", type=type(default), default=default, help=what)
    options = parser.parse_args()
    if options.report and not options.topology:
        parser.error("--report is of one slice: give its --topology, too")
    return options


def main():
    options = flags()
    config, gpu, console = options.config, GPUS[options.gpu], rich.console.Console()
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(plan.Assumptions)}
    chosen_by = {"servers": options.servers, "assumptions": plan.Assumptions(**values)}
    try:
        plugins.load(config.plugins)
        experiment.validate(config, has_servers=False)
        if options.topology:
            report = json.loads(options.report.read_text()) if options.report else None
            layout = layout_of(config, parse_topology(options.topology))
            chosen = plan.make_plan(config, layout, gpu, report=report, **chosen_by)
        else:
            plans = plan.search(config, TPUS[options.chip], gpu, **chosen_by)
            chosen = plan.choose(plans, options.extra_cost)
            plan.show_search(plans, chosen, config.budget, gpu, console)
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    plan.show(chosen, config.budget, gpu, console)


if __name__ == "__main__":
    main()
