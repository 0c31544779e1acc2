"""Measures what `rollout.async_depth` brings when rollouts are slow.

    python scripts/benchmark_async.py --config configs/quickstart.py:ppo --workdir runs/async

Every depth and seed is a whole run at the config's budget, on a server that takes --token_s
seconds for a token. Printed are seconds a step and held-out success of each run; a run that has
finished in an earlier call is read from its directory.
"""

import rich.console
from absl import app, flags
from ml_collections import config_flags

from focus.benchmark.async_depth import measure, table

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config of all runs.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Gets a directory for each run.")
_DEPTHS = flags.DEFINE_multi_integer("depth", [0, 1], "Depths to compare.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of each depth.", lower_bound=1)
_TOKEN_S = flags.DEFINE_float("token_s", 0.02, "Seconds of a token at the server.")
flags.mark_flags_as_required(["config", "workdir"])


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    measured = measure(
        _CONFIG.value,
        _WORKDIR.value,
        depths=_DEPTHS.value,
        seeds=range(_SEEDS.value),
        token_s=_TOKEN_S.value,
    )
    rich.console.Console().print(table(measured))


if __name__ == "__main__":
    app.run(main)
