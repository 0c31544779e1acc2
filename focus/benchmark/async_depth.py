"""What it brings to play rollouts while the learner works: wall time and success, by depth.

A server of this machine is made slow on purpose: every completion takes so many seconds for each
of its tokens, whoever else is served, as on hardware of its own. The learner's time is real. All
runs get the same budget of tokens, and each is a whole run of `focus.train`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_collections
import numpy as np
import rich.table
from aiohttp import web

from focus.engine.servers.serve import Service, open_engine
from focus.formats import hf
from focus.metrics import read_metrics
from focus.run import experiment, warm_start
from focus.train import train

# Programs are compiled in the first steps of a run; they are left out of the times.
_FIRST_STEPS = 2
_START_S = 600.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """A run.

    Attributes:
      depth: its `rollout.async_depth`.
      seed: its seed.
      wall_s: of its steps but the first two, evaluation and checkpoints left out.
      steps: their number.
      waited_s: of `wall_s`, waiting for rollouts.
      success_before: held-out success of the warm start.
      success: held-out success at the end.
      tokens: that were generated.
      staleness: mean training steps that the weights of a token were behind.
    """

    depth: int
    seed: int
    wall_s: float
    steps: int
    waited_s: float
    success_before: float
    success: float
    tokens: int
    staleness: float


def measure(
    config: ml_collections.ConfigDict,
    workdir: str | Path,
    *,
    depths: Sequence[int],
    seeds: Sequence[int],
    token_s: float,
) -> list[Measured]:
    """Trains with every depth and seed, one run after the other, on one slow server.

    Args:
      config: of all runs, but for engine, depth and seed.
      workdir: gets a directory for each run. One that has finished is not run again.
      depths: values of `rollout.async_depth`.
      seeds: of the runs.
      token_s: seconds that a token takes at the server.
    """
    workdir = Path(workdir)
    measured = []
    with slow_server(config, workdir / "served", token_s) as url:
        for seed in seeds:
            for depth in depths:
                run = ml_collections.ConfigDict(config.to_dict())
                run.seed = seed
                run.rollout.update(engine="sglang", urls=(url,), async_depth=depth)
                summary = train(run, workdir / f"depth{depth}-seed{seed}")
                measured.append(_measured(run, summary, workdir / f"depth{depth}-seed{seed}"))
    return measured


def _measured(config: ml_collections.ConfigDict, summary: dict, workdir: Path) -> Measured:
    records = read_metrics(workdir)[_FIRST_STEPS:]
    apart = ("time/ahead", "time/evaluate", "time/checkpoint")
    walls = [
        sum(s for name, s in record.items() if name.startswith("time/") and name not in apart)
        for record in records
    ]
    lags = {int(lag): count for lag, count in summary["staleness"]["tokens"].items()}
    return Measured(
        depth=config.rollout.async_depth,
        seed=config.seed,
        wall_s=sum(walls),
        steps=len(walls),
        waited_s=sum(record["time/rollout"] for record in records),
        success_before=summary["success_before"],
        success=summary["success_after"],
        tokens=sum(summary["generated_tokens"].values()),
        staleness=sum(lag * count for lag, count in lags.items()) / max(sum(lags.values()), 1),
    )


def table(measured: Sequence[Measured]) -> rich.table.Table:
    """One line for each run, and one for the mean of each depth."""
    names = ("depth", "seed", "s/step", "waiting", "tokens", "staleness", "before", "success")
    result = rich.table.Table(*names)
    for depth in sorted({m.depth for m in measured}):
        runs = [m for m in measured if m.depth == depth]
        for m in runs:
            result.add_row(str(depth), str(m.seed), *_cells([m]))
        result.add_row(str(depth), "mean", *_cells(runs), end_section=True)
    return result


def _cells(runs: Sequence[Measured]) -> list[str]:
    def mean(values) -> float:
        return float(np.mean(list(values)))

    success = [m.success for m in runs]
    spread = f" ± {np.std(success, ddof=1):.3f}" if len(runs) > 1 else ""
    return [
        f"{mean(m.wall_s / m.steps for m in runs):.2f}",
        f"{mean(m.waited_s / m.wall_s for m in runs):.0%}",
        f"{mean(m.tokens for m in runs):.0f}",
        f"{mean(m.staleness for m in runs):.2f}",
        f"{mean(m.success_before for m in runs):.3f}",
        f"{mean(success):.3f}{spread}",
    ]


# The server.


@contextlib.contextmanager
def slow_server(
    config: ml_collections.ConfigDict, directory: Path, token_s: float
) -> Iterator[str]:
    """A process that serves the config's warm start, slowly; its URL."""
    start = warm_start.load_or_make(config, experiment.make_env(config))
    hf.save_checkpoint(directory, experiment.model_config(config), start.params, dtype="float32")
    start.chat.save(directory)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(str(directory), port, token_s, config.rollout.max_running)
    )
    process.start()
    try:
        _await(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join()


def _await(port: int, process: multiprocessing.process.BaseProcess) -> None:
    deadline = time.monotonic() + _START_S
    while process.is_alive() and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.2)
    raise RuntimeError("the server has not started; its messages say why")


def _serve(path: str, port: int, token_s: float, max_running: int) -> None:
    engine, codec, eos = open_engine(path, weight_version="default", max_running=max_running)
    engine.warmup(filtered=False)

    @web.middleware
    async def slow(http: web.Request, handler) -> web.StreamResponse:
        answer = await handler(http)
        if http.path == "/generate" and answer.status == 200:
            tokens = json.loads(answer.body)["meta_info"]["completion_tokens"]
            await asyncio.sleep(token_s * tokens)
        return answer

    service = Service(engine, model_path=path, decode=codec.decode, eos_token_ids=eos)
    app = service.application()
    app.middlewares.append(slow)
    web.run_app(
        app,
        host="127.0.0.1",
        port=port,
        handler_cancellation=True,
        access_log=None,
        print=None,
    )
