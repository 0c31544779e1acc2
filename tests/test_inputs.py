"""Pitfall 44: what a run reads is known by its content."""

import dataclasses
import json
import shutil

import ml_collections
import pytest
import tiny

from focus.evaluate import evaluate_run
from focus.metrics import read_metrics
from focus.run import inputs, warm_start
from focus.tasks.facts import fictional_countries
from focus.train import train


def write_world(path, seed):
    path.parent.mkdir(exist_ok=True)
    countries = fictional_countries(seed, 12)
    path.write_text(json.dumps([dataclasses.asdict(country) for country in countries]))


@pytest.fixture
def config(tmp_path):
    config = tiny.get_config("grpo")
    write_world(tmp_path / "worlds" / "mine.json", 0)
    config.task.world = str(tmp_path / "worlds" / "mine.json")
    config.warm_start.update(episodes=60, steps=10)
    config.steps, config.evaluate.every = 1, 0
    return config


def test_a_world_that_was_replaced_is_another_run_and_one_that_was_moved_is_the_same(
    config, cache_dir, tmp_path
):
    world, run = tmp_path / "worlds" / "mine.json", tmp_path / "run"
    train(config, run)
    begun = json.loads((run / "inputs.json").read_text())
    assert begun["task.world"]["path"] == str(world)

    config.steps = 2
    before = world.read_text()
    write_world(world, 1)
    for call in (lambda: train(config, run), lambda: evaluate_run(run)):
        with pytest.raises(ValueError, match=r"task\.world=.*mine\.json: the content has changed"):
            call()
    assert len(read_metrics(run)) == 1  # nothing was played

    world.write_text(before)
    evaluate_run(run)
    (tmp_path / "elsewhere").mkdir()
    config.task.world = str(shutil.move(world, tmp_path / "elsewhere" / "mine.json"))
    assert train(config, run)["steps"] == 2
    assert json.loads((run / "inputs.json").read_text()) == begun
    renamed = config.copy_and_resolve_references()
    renamed.task.world = str(shutil.copy(config.task.world, tmp_path / "other.json"))
    with pytest.raises(ValueError, match=r"belongs to a run with another config:\n.*task\.world"):
        train(renamed, run)


def test_a_warm_start_is_named_after_what_the_world_says(config, tmp_path):
    name = warm_start.fingerprint(config)
    copy = config.copy_and_resolve_references()
    copy.task.world = str(shutil.copy(config.task.world, tmp_path / "mine.json"))
    assert warm_start.fingerprint(copy) == name
    write_world(tmp_path / "worlds" / "mine.json", 1)
    assert warm_start.fingerprint(config) != name == warm_start.fingerprint(copy)


def model_config(path):
    return ml_collections.ConfigDict({"model": {"path": str(path)}, "task": {"world": "real"}})


def test_a_model_directory_is_what_its_files_say(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "a.safetensors"):
        (model / name).write_text(name)
    config = model_config(model)
    first = inputs.find(config)
    assert set(first) == {"model.path"}
    (model / "README.md").write_text("changes nothing")
    (model / "logs").mkdir()
    assert inputs.find(config) == first
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "a.safetensors"):
        old = (model / name).read_text()
        (model / name).write_text(old + ".")
        assert inputs.find(config) != first, name
        (model / name).write_text(old)
    (model / "b.safetensors").write_text("a.safetensors")
    assert inputs.find(config) != first
    (model / "b.safetensors").unlink()
    (model / "a.safetensors").rename(model / "c.safetensors")
    assert inputs.find(config) != first


def test_only_paths_that_are_there_are_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()  # a word that is also a directory is still a word
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.txt").write_text("1")
    config = ml_collections.ConfigDict({"task": {"world": "real", "name": "deep_search"}})
    assert inputs.find(config) == {}
    config.task.data = ml_collections.ConfigDict({"folder": "./data", "file": "data/none.txt"})
    found = inputs.find(config)
    assert set(found) == {"task.data.folder"}
    section = inputs.by_content(config.task, "task.", found)
    assert section["data.folder"] == found["task.data.folder"].checksum
    (tmp_path / "data" / "one.txt").write_text("2")
    assert inputs.find(config) != found
