"""Scoring checkpoints of a finished run."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import REPOSITORY

from focus.evaluate import evaluate_run
from focus.learner.checkpoint import Checkpointer
from focus.metrics import read_metrics


@pytest.fixture(scope="module")
def run(finished):
    """Six steps, evaluated after the third and the sixth."""
    return finished("focus", steps=6)


def test_the_newest_checkpoint_scores_what_the_run_says_of_itself(run):
    result = evaluate_run(run.workdir)
    assert result["step"] == 6
    assert result["success"] == run.summary["success_after"]
    assert result["std_error"] == run.summary["success_std_error"]
    assert result["num_tasks"] == run.config.evaluate.num_tasks
    assert result["technical_failures"] == 0
    last = read_metrics(run.workdir)[-1]
    assert result["heldout/tokens"] == last["heldout/tokens"]
    assert result["heldout/turns"] == last["heldout/turns"]
    assert evaluate_run(run.workdir) == result


def test_best_and_numbers_name_checkpoints(run):
    scores = {
        record["step"] + 1: record["heldout/success"]
        for record in read_metrics(run.workdir)
        if "heldout/success" in record
    }
    best = max(scores, key=lambda step: (scores[step], step))
    found = evaluate_run(run.workdir, step="best")
    assert found["step"] == best
    assert found["success"] == scores[best]
    before_last = Checkpointer(run.workdir).steps[-2]
    assert evaluate_run(run.workdir, step=before_last)["step"] == before_last


def test_fewer_tasks_and_another_temperature(run):
    config = (run.workdir / "config.json").read_text()
    greedy = evaluate_run(run.workdir, num_tasks=3, temperature=0.0)
    assert greedy["num_tasks"] == 3
    assert greedy["temperature"] == 0.0
    assert 0 <= greedy["success"] <= 1
    assert (run.workdir / "config.json").read_text() == config


@pytest.mark.parametrize(
    "options, message",
    [
        ({"step": 99}, r"no checkpoint 99 .* there are steps \[.*6\]"),
        ({"step": "newest"}, r"no checkpoint 'newest' .* there are steps"),
        ({"num_tasks": 0}, "evaluate.num_tasks must be a whole number >= 1, got 0"),
        ({"num_tasks": 9}, "num_tasks 9 is more than the 8 held-out tasks"),
        ({"temperature": -1.0}, "evaluate.temperature must be a number >= 0, got -1"),
    ],
)
def test_what_cannot_be_scored_is_said(run, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate_run(run.workdir, **options)


def test_a_run_without_checkpoints_is_said(run, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(run.workdir, workdir)
    shutil.rmtree(workdir / "checkpoints")
    with pytest.raises(ValueError, match="there are no checkpoints in .*: they were deleted, or"):
        evaluate_run(workdir)


def test_a_directory_without_a_run_is_said(tmp_path):
    with pytest.raises(ValueError, match="no run in .*: config.json is missing; give a workdir"):
        evaluate_run(tmp_path / "nothing")


def test_the_script_prints_the_result_or_one_line(run):
    script = [sys.executable, str(REPOSITORY / "scripts" / "evaluate.py")]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

    def call(*flags):
        return subprocess.run([*script, *flags], env=env, capture_output=True, text=True)

    done = call(f"--workdir={run.workdir}", "--step=6")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == evaluate_run(run.workdir, step=6)
    assert not re.search(r"\b(INFO|absl|orbax)\b|^I\d{4} ", done.stderr, re.MULTILINE), done.stderr
    wrong = call(f"--workdir={run.workdir / 'nothing'}")
    assert wrong.returncode == 1
    assert "config.json is missing" in wrong.stderr
    assert "Traceback" not in wrong.stderr
