"""What a real run, shrunk, leaves for its report."""

import json

import numpy as np
import pytest
from report_runs import Outline

from focus.metrics import read_metrics
from focus.report import build_comparison, read_run
from focus.report.reasons import reason


@pytest.fixture(scope="module")
def run(finished):
    return finished("focus", steps=6)


def test_evaluations_are_those_of_the_metrics(run):
    evaluations = {e["step"]: e["tasks"] for e in read_run(run.workdir).evaluations}
    assert list(evaluations) == [0, 3, 6], "before training, and every third step"
    expected = {0: run.summary["success_before"]} | {
        m["step"] + 1: m["heldout/success"]
        for m in read_metrics(run.workdir)
        if "heldout/success" in m
    }
    for step, tasks in evaluations.items():
        assert len(tasks) == run.config.evaluate.num_tasks
        scored = [t["ending"] == "solved" for t in tasks if t["outcome"] is not None]
        assert np.mean(scored) == pytest.approx(expected[step])
        assert all(t["hops"] == 1 and t["segments"] and t["gold"] for t in tasks)


def test_turns_are_recorded_with_what_the_loss_read(run):
    """Whitened over the step's tokens: of the estimator's sign up to one shift, not its size."""
    segments = [
        (record["step"], s)
        for record in read_run(run.workdir).trees
        for t in record["trajectories"]
        for s in t["segments"]
        if s["trained"] is not None and s["advantage"] is not None
    ]
    assert len(segments) > 20
    for step in {step for step, _ in segments}:
        own = [(s["advantage"], s["trained"]) for at, s in segments if at == step]
        given, trained = np.array(own).T
        if np.ptp(given) < 1e-3:
            continue
        slope, shift = np.polyfit(given, trained, 1)
        weight = run.config.credit.branch_weight
        if weight == 1.0:
            np.testing.assert_allclose(trained, slope * given + shift, atol=2e-3)
        assert slope > 0
        assert slope != pytest.approx(1.0, abs=1e-3), "the estimator's own numbers were recorded"


def test_branches_know_what_they_were_chosen_for(run):
    rows = [json.loads(line) for line in (run.workdir / "branches.jsonl").open()]
    whys = [why for row in rows if (why := reason(row))]
    assert len(whys) > 5
    assert all(row["gain"] > 0 and row["noise_var"] > 0 for row in rows)
    assert all(why.predicted > 0 and why.came >= 0 for why in whys)


def test_the_page_of_a_run_answers_and_two_of_them_are_compared(run, finished, tmp_path):
    page = Outline((run.workdir / "report.html").read_text())
    assert len(page.verdicts) == 5 and set(page.verdicts) <= {"yes", "no", "unclear", "unknown"}
    other = finished("grpo")
    both = build_comparison([run.workdir, other.workdir], tmp_path / "both.html").read_text()
    text = "".join(Outline(both).text)
    assert "focus, seed 0" in text and "grpo, seed 0" in text
    assert "held-out tasks that both have played" in text
