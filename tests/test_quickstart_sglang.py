"""A training run on the real servers, one of which is killed and restarted in the middle."""

from __future__ import annotations

import threading
import time

import backends
import pytest
import tiny

from configs import quickstart_sglang
from focus.journal import read_json_lines
from focus.train import train
from focus.types import version_step

pytestmark = pytest.mark.sglang


def tiny_config(fleet):
    """The config, with the sizes of `tiny` and the addresses of the fleet."""
    config = quickstart_sglang.get_config()
    small = tiny.get_config()
    for section in ("task", "model", "warm_start", "context", "critic", "learner", "evaluate"):
        config[section] = small[section]
    # As in `backends.MODEL`, which is what the servers have been started with.
    config.model.update(qk_norm=True, rope_theta=backends.MODEL.rope_theta)
    config.budget, config.steps, config.checkpoint.every = small.budget, 6, 1
    served = config.rollout
    config.rollout = small.rollout
    config.rollout.update(
        engine=served.engine, urls=tuple(fleet.urls), router_url=fleet.router.url, timeout_s=300.0
    )
    config.rollout.dead_after_s = 900.0  # longer than it takes to start a server here
    return config


def kill_and_restart(worker, workdir, log):
    """kill -9 once two steps are done, and a new process at once."""
    while len(read_json_lines(workdir / "metrics.jsonl")[0]) < 2:
        time.sleep(0.05)
    worker.kill()
    log.append(time.monotonic())
    worker.start()
    worker.wait("/ready")
    log.append(time.monotonic())


def test_a_run_survives_a_worker_that_is_killed_and_restarted(real_fleet, prepare, tmp_path):
    for process in (*real_fleet.workers, real_fleet.router):
        process.wait()
    config = tiny_config(real_fleet)
    prepare(config)
    workdir, log = tmp_path / "run", []
    killer = threading.Thread(
        target=kill_and_restart, args=(real_fleet.workers[0], workdir, log), daemon=True
    )
    killer.start()
    summary = train(config, workdir)
    assert log, "the run was over before the worker was killed"
    killer.join()

    # The ledger's invariants, as for a run in one process.
    assert summary["steps"] == 6 and summary["max_step_tokens"] <= config.budget
    rollouts, torn = read_json_lines(workdir / "rollouts.jsonl")
    assert not torn and {r["step"] for r in rollouts} == set(range(6))
    noted = sum(sum(r["tokens"].values()) for r in rollouts)
    assert noted == sum(summary["generated_tokens"].values())
    assert summary["replayed"] == {"rollouts": 0, "tokens": 0}
    # No technical failure has become an outcome, and no token is of other weights than its step's.
    assert all(r["outcome"] is None for r in rollouts if r["end"] == "failed")
    assert summary["technical_failures"] == sum(r["end"] == "failed" for r in rollouts) == 0
    for rollout in rollouts:
        assert {version_step(version) for version, _, _ in rollout["versions"]} <= {rollout["step"]}
        assert sum(end - start for _, start, end in rollout["versions"]) == sum(
            rollout["tokens"].values()
        )
    metrics, _ = read_json_lines(workdir / "metrics.jsonl")
    assert max(row["logp_difference/max"] for row in metrics) < 1e-4
    print({name: value for name, value in metrics[-1].items() if name.startswith("servers/")})
