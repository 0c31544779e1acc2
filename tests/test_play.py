"""One episode in the terminal: played with a checkpoint, or read from what a run recorded."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY

from focus.report.record import read_run
from focus.report.text import episode_lines, plain
from focus.run.play import find_task, play_episode, recorded_episode


@pytest.fixture(scope="module")
def run(finished):
    return finished("focus", steps=6)


def test_a_greedy_episode_is_the_same_twice_and_has_the_critics_values(run):
    step, (task, episode) = play_episode(run.workdir, task="1", temperature=0.0)
    assert step == 6
    again = play_episode(run.workdir, task=task["task_id"], temperature=0.0, seed=5)
    assert again == (step, (task, episode)), "greedy tokens do not depend on a seed"
    assert task["question"] and task["gold"]
    values = [state["value"] for state in episode["states"][:-1]]
    assert all(0 <= value <= 1 for value in values)
    text = "\n".join(episode_lines(task, episode))
    for state, segment in zip(episode["states"], episode["segments"]):
        assert f"turn {state['turn']}  V {state['value']:.2f} ± {state['std']:.2f}" in text
        assert segment["text"].split("\n")[0][:40] in text


def test_a_method_without_a_critic_plays_without_values(finished):
    run = finished("grpo")
    _, (task, episode) = play_episode(run.workdir, split="train", task="0")
    assert all(state["value"] is None for state in episode["states"])
    text = "\n".join(episode_lines(task, episode))
    assert "turn 0" in text and " V " not in text


def test_a_recorded_rollout_is_shown_as_it_was_recorded(run):
    record = read_run(run.workdir).trees[-1]
    trajectory = record["trajectories"][-1]
    step, (task, episode) = recorded_episode(run.workdir, trajectory["id"])
    assert (step, task, episode) == (record["step"], record, trajectory)
    command = [sys.executable, "scripts/play.py", f"--workdir={run.workdir}"]
    done = subprocess.run(
        [*command, f"--show={trajectory['id']}"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "\n".join(episode_lines(task, episode)) in done.stdout
    done = subprocess.run([*command, "--show=none"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1 and "recorded no rollout 'none'" in done.stderr


def test_tasks_are_found_by_id_or_place_and_else_named():
    from focus.tasks.base import Task

    tasks = (Task("heldout/7", "a", {}), Task("1", "b", {}), Task("x", "c", {}))
    assert find_task(tasks, "x", "heldout").prompt == "c"
    assert find_task(tasks, "1", "heldout").prompt == "b", "an id comes before a place"
    assert find_task(tasks, "0", "heldout").prompt == "a"
    for wanted in ("3", "y", "-1"):
        with pytest.raises(ValueError, match="a place from 0 to 2"):
            find_task(tasks, wanted, "heldout")


def test_what_a_model_prints_cannot_steer_the_terminal():
    hostile = "a\x1b[2J\x07\r\nb\tc\x9b31m\u202edone"
    shown = plain(hostile)
    assert all(c == "\n" or c.isprintable() for c in shown)
    assert shown.startswith("a\\x1b[2J\\x07\nb    c\\x9b31m")
    assert plain("Zürich, 東京\nx") == "Zürich, 東京\nx"


def test_long_texts_are_wrapped_and_nothing_is_lost():
    state = {"turn": 0, "value": None, "std": None, "refined": None}
    words = [f"w{i}" for i in np.random.default_rng(0).integers(0, 10**6, 200)]
    segment = {"text": "act()", "observation": " ".join(words), "summary": None, "reward": 0.0}
    trajectory = {
        "states": [state, state], "segments": [segment], "outcome": None, "success": False,
        "end": "budget", "error": None, "tokens": 3,
    }  # fmt: skip
    task = {"task_id": "t", "question": "q " * 100, "gold": None}
    lines = list(episode_lines(task, trajectory, width=40))
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines).split()).count(" ".join(words)) == 1
    assert "cut, no outcome, 3 tokens" in " ".join(lines)
