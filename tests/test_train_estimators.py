"""Runs of the shrunk quickstart with estimators of the credit library, by name."""

import numpy as np
import pytest

from focus.metrics import read_metrics

# Estimators that compare rollouts of a task; continuations that are cut points; trees, whose
# branches are trained too.
GROUPS = {"rollout.group_size": 4}
CONTINUATIONS = {"budget": 500}
TREES = {"credit.train_on_branches": True, **CONTINUATIONS}
RUNS = {
    "gigpo": ("grpo", GROUPS),
    "tempo": ("grpo", GROUPS),
    "at2po": ("vineppo", TREES),
    "proxmo": ("grpo", GROUPS),
    "pgpo": ("grpo", GROUPS),
    "spo_chain": ("vineppo", CONTINUATIONS),
    "spo_tree": ("vineppo", TREES),
    "cbpo": ("vineppo", {"rollout.group_size": 2, **TREES}),
    "pivoarl": ("vineppo", {"rollout.group_size": 2, **TREES}),
    "a3": ("grpo", GROUPS),
    "g2po": ("grpo", GROUPS),
    "spro": ("grpo", GROUPS),
    "reinforce_pp": ("grpo", GROUPS),
}
FIRST = ("gigpo", "tempo", "at2po")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in FIRST else pytest.mark.long) for n in RUNS],
)
def test_it_trains(name, finished):
    method, overrides = RUNS[name]
    run = finished(method, **{"credit.estimator": name, "evaluate.every": 9, **overrides})
    records = read_metrics(run.workdir)
    assert len(records) == run.config.steps
    assert sum(record["dose/tokens"] for record in records) > 0
    for record in records:
        assert np.isfinite(record["policy/loss"]) and np.isfinite(record["credit/std"])
    assert run.summary["recompilations_after_warmup"] == 0
