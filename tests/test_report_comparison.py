"""Several runs on one page."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from report_runs import HOSTILE, Outline, make_evaluation, make_workdir

from focus.report import build_comparison, record_evaluation, write_evaluation
from focus.report.comparison import common_tokens, evaluation_at, name_runs, side_by_side
from focus.report.record import read_run


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    """A long run with branches and a shorter one without, evaluated on the same tasks."""
    root = tmp_path_factory.mktemp("runs")
    return (
        make_workdir(root / "a", num_steps=14, record_every=7),
        make_workdir(root / "b", num_steps=11, record_every=5, branched=False, seed=0),
    )


@pytest.fixture(scope="module")
def page(workdirs):
    return build_comparison(workdirs).read_text(encoding="utf-8")


def test_runs_are_compared_where_the_shorter_one_ends(workdirs, page):
    runs = name_runs([read_run(workdir) for workdir in workdirs])
    tokens = common_tokens(runs)
    ends = [run.run.metrics[-1]["tokens/cumulative"] for run in runs]
    assert tokens == min(ends) < max(ends)
    found = evaluation_at(runs[0].run, tokens)
    later = [m for m in runs[0].run.metrics if "heldout/success" in m]
    assert found["tokens/cumulative"] <= tokens < later[-1]["tokens/cumulative"]
    assert evaluation_at(runs[0].run, None)["step"] == later[-1]["step"]
    text = " ".join("".join(Outline(page).text).split())
    assert "focus, seed 0" in text and "grpo, seed 0" in text
    assert f"at {tokens:,.0f} generated tokens each" in text
    for run in runs:
        assert f"{100 * evaluation_at(run.run, tokens)['heldout/success']:.1f} %" in text


def test_curves_hold_every_run_over_tokens(workdirs, page):
    tables = Outline(page).tables
    rows = list(csv.DictReader("".join(tables["Held-out success at equal tokens"]).splitlines()))
    for workdir, name in zip(workdirs, ("focus, seed 0", "grpo, seed 0")):
        metrics = read_run(workdir).metrics
        expected = [(0.0, 0.26)] + [
            (m["tokens/cumulative"], m["heldout/success"])
            for m in metrics
            if "heldout/success" in m
        ]
        drawn = [
            (float(r["generated tokens"]), float(r["heldout/success"]))
            for r in rows
            if r["series"] == name
        ]
        np.testing.assert_allclose(drawn, expected, rtol=1e-5)


def test_one_task_is_read_side_by_side_and_those_that_differ_come_first(workdirs, page):
    runs = name_runs([read_run(workdir) for workdir in workdirs])
    tasks = side_by_side(runs, common_tokens(runs))
    differ = [task["differ"] for task in tasks]
    assert len(tasks) == 32 and differ == sorted(differ, reverse=True)
    outline = Outline(page)
    assert outline.tags.count("section") == 2 * len(tasks)
    text = "".join(outline.text)
    for task in tasks:
        assert task["question"] in text
        assert {e["task_id"] for e in task["episodes"]} == {task["task_id"]}
        for episode in task["episodes"]:
            assert all(segment["text"] in text for segment in episode["segments"])


def test_the_paired_difference_is_that_of_common_tasks(tmp_path):
    runs = []
    for name, chance in (("a", 0.3), ("b", 0.8)):
        workdir = tmp_path / name
        workdir.mkdir()
        trajectories, tasks = make_evaluation(np.random.default_rng(3), chance, num_tasks=60)
        write_evaluation(workdir, 1, record_evaluation(trajectories, tasks))
        row = {"step": 0, "heldout/success": 0.5, "tokens/cumulative": 10}
        (workdir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        runs.append({t.task_id: (t.success, t.outcome) for t in trajectories})
    text = "".join(Outline(build_comparison([tmp_path / "a", tmp_path / "b"]).read_text()).text)
    pairs = [(a[0], runs[1][k][0]) for k, a in runs[0].items() if None not in (a[1], runs[1][k][1])]
    gained, lost = sum(b > a for a, b in pairs), sum(a > b for a, b in pairs)
    assert f"{100 * (gained - lost) / len(pairs):+.1f} ±" in text
    assert f"points on the {len(pairs)} held-out tasks" in text
    assert f"{gained} solved by run (b) alone, {lost} by run (a) alone" in text


def test_settings_that_differ_are_listed_and_no_others(workdirs, page):
    text = "".join(Outline(page).text)
    settings = text[text.rindex("Settings that differ") :]
    assert "method" in settings and "steps" in settings
    assert "learning_rate" not in settings


def test_missing_parts_and_hostile_text_do_no_harm(workdirs, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 0, "train/success": 0.5}\n')
    (bare / "config.json").write_text(json.dumps({"method": HOSTILE, HOSTILE: HOSTILE}))
    text = build_comparison([workdirs[0], bare], tmp_path / "page.html").read_text()
    outline = Outline(text)
    assert outline.tags.count("script") == 1 and "img" not in outline.tags
    assert "The runs recorded no held-out task in common." in "".join(outline.text)
    assert "".join(outline.text).count("<script>alert('x')</script>") >= 5

    shutil.copytree(workdirs[1], tmp_path / "hostile")
    for path in (tmp_path / "hostile" / "evaluations").iterdir():
        content = json.loads(path.read_text())
        for task in content["tasks"]:
            task |= {"question": HOSTILE, "gold": HOSTILE, "error": HOSTILE}
            for segment in task["segments"] or ():
                segment |= {"text": HOSTILE, "observation": HOSTILE, "summary": HOSTILE}
                segment["error"] = HOSTILE
        path.write_text(json.dumps(content))
    shutil.copytree(tmp_path / "hostile", tmp_path / "again")
    outline = Outline(build_comparison([tmp_path / "hostile", tmp_path / "again"]).read_text())
    assert outline.tags.count("script") == 1 and "img" not in outline.tags
    assert not any(name.startswith("on") for attrs in outline.attributes for name in attrs)


def test_the_script_takes_one_run_or_several(workdirs, tmp_path):
    script = Path(__file__).parents[1] / "scripts" / "report.py"

    def call(*arguments):
        command = [sys.executable, str(script), *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=script.parents[1], env={"PYTHONPATH": "."}
        )

    done = call(*workdirs, "--out", tmp_path / "both.html")
    assert done.returncode == 0 and "2 runs compared" in (tmp_path / "both.html").read_text()
    done = call(workdirs[0], "--out", tmp_path / "one.html")
    assert done.returncode == 0 and "run report" in (tmp_path / "one.html").read_text()
    for arguments, said in (((), "no run"), ((workdirs[0], workdirs[0]), "given twice")):
        done = call(*arguments)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
