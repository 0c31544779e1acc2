"""Experiments of the laboratory as a whole: from a config to results, report and tables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lab_fakes
import numpy as np
import pytest
import rich.console

from configs import lab as configs
from focus import laboratory
from focus.lab.arms import ARMS
from focus.lab.sweep import Cell

ROOT = Path(__file__).parent.parent
ROW = (
    *("world", "world_options", "arm", "learning_rate", "seeds", "tokens_per_step", "steps"),
    *("auc", "auc_low", "auc_high", "final", "dose_tokens"),
)


@pytest.fixture
def fakes(monkeypatch):
    """Worlds and arms whose runs take no time."""
    monkeypatch.setattr(laboratory, "WORLDS", lab_fakes.WORLDS)
    monkeypatch.setattr(laboratory, "ARMS", lab_fakes.ARMS)
    monkeypatch.setattr(laboratory, "make_run", lab_fakes.make_run)


def fake_config(**overrides):
    c = configs.get_config("smoke")
    c.worlds, c.arms, c.ours = ("easy", "more: easy bonus=0.1"), ("slow", "fast"), "fast"
    c.learning_rates, c.widenings = (1.0, 3.0), 1
    c.seeds, c.sweep_seeds, c.chunk, c.steps = 10, 2, 8, 3
    c.claims = ("fast - slow >= 0.01", "fast / slow >= 9 in more")
    c.league.worlds = ()
    c.update_from_flattened_dict(overrides)
    return c


def run(config, workdir):
    """The experiment, and what it has printed."""
    console = rich.console.Console(file=open(os.devnull, "w"), record=True, width=160)
    report = laboratory.run(config, workdir, workers=1, console=console)
    return report, console.export_text()


def read(workdir, name="results.json"):
    return json.loads((workdir / name).read_text())


def test_an_experiment_leaves_results_tables_and_a_report(fakes, tmp_path):
    report, said = run(fake_config(), tmp_path)
    rows = read(tmp_path)
    assert [tuple(row) for row in rows] == [ROW] * 4
    assert [(row["world_options"], row["arm"]) for row in rows] == [
        ({}, "slow"),
        ({}, "fast"),
        ({"bonus": 0.1}, "slow"),
        ({"bonus": 0.1}, "fast"),
    ]
    for row in rows:
        assert row["world"] == "easy" and row["seeds"] == 10 and row["steps"] == 3
        assert row["auc_low"] < row["auc"] < row["auc_high"]
    assert {row["learning_rate"] for row in rows} == {1.0, 3.0}
    assert report == tmp_path / "lab.html" and "more" in report.read_text()
    claims = read(tmp_path, "analysis.json")["claims"]
    assert [(c["world"], c["holds"]) for c in claims] == [
        ("easy", True),
        ("more", True),
        ("more", False),
    ]
    for words in ("4 cells to run, 0 are finished", "4/4", "more", "fast / slow >= 9 in more"):
        assert words in said
    assert not (tmp_path / "league.json").exists()


def test_a_stopped_experiment_goes_on_and_equals_one_that_ran_straight(
    fakes, tmp_path, monkeypatch
):
    run(fake_config(), tmp_path / "straight")
    real, started = Cell.__call__, []

    def stops(cell, note):
        started.append(cell.title)
        if len(started) == 3:
            raise KeyboardInterrupt
        real(cell, note)

    monkeypatch.setattr(Cell, "__call__", stops)
    with pytest.raises(KeyboardInterrupt):
        run(fake_config(), tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "results.json").exists()
    _, said = run(fake_config(), tmp_path / "stopped")
    assert "2 cells to run, 2 are finished" in said
    assert len(started) == 5  # the two that had finished did not run again
    assert read(tmp_path / "stopped") == read(tmp_path / "straight")


def test_arms_may_be_added_and_results_of_another_config_are_refused(fakes, tmp_path):
    run(fake_config(), tmp_path)
    before = read(tmp_path)
    _, said = run(fake_config(arms=("slow", "fast", "edge")), tmp_path)
    assert "2 cells to run, 4 are finished" in said
    assert [row for row in read(tmp_path) if row["arm"] != "edge"] == before
    for change in ({"seeds": 11}, {"seed": 1}, {"steps": 4}, {"tokens_per_step": 9}):
        with pytest.raises(ValueError, match="belongs to a run with another config"):
            run(fake_config(**change), tmp_path)
    with pytest.raises(ValueError, match="was computed for another"):
        run(fake_config(arms=("slow", "fast: fast speed=0.3")), tmp_path)
    assert len(read(tmp_path)) == 6


def test_results_of_other_code_are_refused(fakes, tmp_path, monkeypatch):
    run(fake_config(), tmp_path)
    monkeypatch.setattr(laboratory, "code_version", lambda: "other")
    with pytest.raises(ValueError, match="code: .* there, 'other' here"):
        run(fake_config(), tmp_path)


def test_the_seed_shifts_all_runs(fakes, tmp_path):
    run(fake_config(), tmp_path / "0")
    run(fake_config(seed=1), tmp_path / "1")
    zero, one = read(tmp_path / "0"), read(tmp_path / "1")
    assert all(a["auc"] != b["auc"] for a, b in zip(zero, one))
    np.testing.assert_allclose(
        [a["auc"] for a in zero], [b["auc"] for b in one], atol=0.08
    )  # the same question


def test_learning_rates_of_an_earlier_experiment_can_be_taken(fakes, tmp_path):
    run(fake_config(), tmp_path / "first")
    earlier = str(tmp_path / "first" / "results.json")
    run(fake_config(sweep_from=earlier, seed=1), tmp_path / "second")
    rates = [[row["learning_rate"] for row in read(tmp_path / d)] for d in ("first", "second")]
    assert rates[0] == rates[1]
    assert not list((tmp_path / "second").rglob("sweep.json"))
    with pytest.raises(ValueError, match="sweep of arm 'edge' in world 'easy' never ran there"):
        run(fake_config(sweep_from=earlier, arms=("fast", "edge"), claims=()), tmp_path / "third")
    with pytest.raises(ValueError, match=r"sweep_from='nowhere' is no results\.json"):
        run(fake_config(sweep_from="nowhere"), tmp_path / "third")


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"worlds": ("esay",)}, "world 'esay' is unknown; choose one of easy"),
        ({"arms": ("slow", "fsat")}, "arm 'fsat' is unknown"),
        (
            {"ours": "edge"},
            r"arm 'edge' is compared with others, but is none of \['slow', 'fast'\]",
        ),
        ({"worlds": ("easy", "easy")}, "world easy is there twice"),
        ({"arms": ("fast", "fast")}, "arm fast is there twice"),
        ({"arms": ()}, r"without arms"),
        ({"worlds": (), "arms": ()}, "nothing to do"),
        ({"seeds": 1}, "seeds must be >= 2, got 1"),
        ({"learning_rates": ()}, "an arm whose sweep never ran has no rate"),
        ({"claims": ("fast - edge >= 1",)}, "arm 'edge' is none of slow, fast"),
        ({"league.worlds": ("easy",), "league.seeds": 1}, "league.seeds must be >= 2"),
        ({"league.worlds": ("easy",), "league.estimators": ("gpro",)}, "estimator 'gpro'"),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_anything_is_written(
    fakes, tmp_path, overrides, message
):
    monkey = {"league.arm": "fast"} if "league.worlds" in overrides else {}
    with pytest.raises(ValueError, match=message):
        run(fake_config(**overrides, **monkey), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("experiment", configs.EXPERIMENTS)
def test_every_experiment_can_be_read(experiment):
    parts = laboratory.read_parts(configs.get_config(experiment))
    assert parts.worlds or parts.league_worlds
    for claim in parts.claims:
        assert {claim.ours, claim.theirs} <= set(ARMS)
    if experiment == "league":
        assert len(parts.league_worlds) >= 5 and parts.league.seeds >= 30
        assert len(parts.league.estimators) > 40
    if experiment == "claims":
        assert parts.settings.seeds == 100
        assert dict(parts.worlds[0].options) == {"length": 40, "forks": 8, "delay": 1, "tasks": 200}


def test_a_rule_without_its_channel_is_refused():
    c = configs.get_config("smoke")
    c.arms, c.ours = ("vineppo rule=none",), "vineppo rule=none"
    with pytest.raises(ValueError, match="reads continuations, and rule='none' samples none"):
        laboratory.read_parts(c)


def test_real_arms_and_the_league_run(tmp_path):
    """Smaller than the smoke experiment, for what compiles."""
    c = configs.get_config("smoke")
    c.arms = ("ppo",)
    c.ours = "ppo"
    c.seeds, c.sweep_seeds, c.chunk, c.steps = 2, 2, 4, 2
    c.learning_rates = (1.0,)
    c.league.worlds = c.worlds = ("fork_chain length=6 forks=2 tasks=3 rows=4",)
    c.league.estimators, c.league.tokens = ("grpo", "scar"), 160
    c.league.arm = "ppo group_size=4"
    c.league.seeds = c.league.chunk = 2
    report, _ = run(c, tmp_path)
    (row,) = read(tmp_path)
    assert tuple(row) == ROW and 0 < row["auc"] < 1
    league = read(tmp_path, "league.json")
    assert [r["missing"] for r in league["rows"]] == ["", "coalition, segment_id"]
    assert [r["estimator"] for r in league["overall"]] == ["grpo"]
    assert "coalition" in report.read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--config.worlds=chess",), "ValueError: world 'chess' is unknown"),
        (("--config.arms=focus rule=oracle",), "ValueError: arm focus rule=oracle: rule='oracle'"),
        (("--config.sedes=3",), "did you mean"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments, message, tmp_path):
    command = [sys.executable, "scripts/lab.py", "--config", "configs/lab.py:smoke"]
    found = subprocess.run(
        [*command, "--workdir", str(tmp_path / "run"), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode != 0 and "Traceback" not in found.stderr
    assert message in found.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()
