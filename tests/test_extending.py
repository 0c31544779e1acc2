"""docs/extending.md is true: every file in it is written down, named in a config, and trained."""

import json
import re

import pytest
import tiny
from conftest import REPOSITORY

from focus.credit import ESTIMATORS
from focus.evaluate import evaluate_run
from focus.metrics import read_metrics
from focus.report import build_report
from focus.run import plugins, warm_start
from focus.run.experiment import make_env, validate
from focus.train import train

DOCUMENT = (REPOSITORY / "docs" / "extending.md").read_text()


def files():
    """The examples by the name that their first line gives them."""
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    return {re.match(r"# (\w+\.py)\n", block)[1]: block for block in blocks}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory of a user's, with all files of the document; what they register goes again."""
    for name, source in files().items():
        (tmp_path / name).write_text(source)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    plugins.load(())


def small(method, flags):
    """The shrunk quickstart with the flags of the document, for a step."""
    config = tiny.get_config(method)
    for name, value in re.findall(r"--config\.([\w.]+)=(\S+)", flags):
        section, _, key = name.rpartition(".")
        part = config[section] if section else config
        part[key] = (value,) if isinstance(part[key], tuple) else type(part[key])(value)
    config.steps = 1
    return config


def flags_after(name):
    """The indented lines below an example."""
    return DOCUMENT.split(f"# {name}\n")[1].split("```\n")[1].split("\n\n```")[0].split("\n## ")[0]


def test_the_document_has_an_example_of_everything_that_can_be_registered():
    assert set(files()) == {
        "my_estimator.py",
        "my_rule.py",
        "my_context.py",
        "my_task.py",
        "my_config.py",
    }
    for words in ("ESTIMATORS[", "RULES[", "CONTEXT_MANAGERS[", "TASKS["):
        assert sum(words in source for source in files().values()) == 1


def test_the_estimator_trains_and_its_run_needs_its_file_no_more(here, prepare):
    config = small("grpo", flags_after("my_estimator.py"))
    assert config.credit.estimator == "turn_outcome" and config.credit.options == "power=0.5"
    plugins.load(config.plugins)
    prepare(config)
    workdir = here / "run"
    summary = train(config, workdir)
    assert summary["name"] == "turn_outcome" and summary["dose"]["tokens"] > 0

    # The run alone: what this process has imported is forgotten, and the file is gone.
    (here / "my_estimator.py").unlink()
    plugins.load(())
    plugins._REGISTERED.clear()
    assert "turn_outcome" not in ESTIMATORS
    assert evaluate_run(workdir)["success"] == summary["success_after"]
    assert ESTIMATORS["turn_outcome"].fn.__module__.startswith("focus_plugin_my_estimator")
    assert build_report(workdir).is_file()
    config.steps = 2
    assert train(config, workdir)["steps"] == 2
    # Another file of that name is not the one that the run has begun with.
    (here / "my_estimator.py").write_text(files()["my_estimator.py"] + "\n# changed\n")
    config.steps = 3
    with pytest.raises(ValueError, match="plug-in my_estimator.py has changed since the run in"):
        train(config, workdir)


def test_the_rule_branches_where_it_says(here, prepare):
    config = small("focus", flags_after("my_rule.py"))
    plugins.load(config.plugins)
    prepare(config)
    summary = train(config, here / "run")
    assert summary["name"] == "focus, openness branches"
    assert summary["generated_tokens"]["branch"] > 0
    (metrics,) = read_metrics(here / "run")
    assert metrics["branches/states"] > 0


def test_the_context_manager_forgets_and_has_a_warm_start_of_its_own(here):
    config = small("grpo", flags_after("my_context.py"))
    assert config.context.manager == "sliding"
    config.context.limit = 40
    # Enough that some guesses are right: outcomes that are all alike take no optimiser step.
    config.warm_start.update(steps=150, episodes=200)
    plugins.load(config.plugins)
    summary = train(config, here / "run")
    assert summary["name"] == "grpo, sliding"
    (trees,) = (here / "run" / "trees").iterdir()
    tasks = json.loads(trees.read_text())["tasks"]
    spans = {s["span"] for task in tasks for t in task["trajectories"] for s in t["states"]}
    assert max(spans) >= 1  # it did forget
    # Its source counts, that of others does not.
    name = warm_start.fingerprint(config)
    (here / "my_context.py").write_text(files()["my_context.py"] + "\n# another\n")
    plugins.load(config.plugins)
    assert warm_start.fingerprint(config) != name


def test_the_task_is_learnt_from_its_own_demonstrations(here):
    """With the sizes of the shrunk quickstart; task, plug-ins and tasks are the document's."""
    namespace = {}
    exec(compile(files()["my_config.py"], "my_config.py", "exec"), namespace)
    wanted = namespace["get_config"]("grpo")
    plugins.load(wanted.plugins)
    validate(wanted)
    config = tiny.get_config("grpo")
    config.plugins, config.task = wanted.plugins, wanted.task
    config.model.vocab_size = wanted.model.vocab_size
    config.steps = 1
    config.evaluate.num_tasks = 8
    # Enough that some guesses are right: outcomes that are all alike take no optimiser step.
    config.warm_start.update(steps=150, episodes=200)
    summary = train(config, here / "run")
    assert summary["task"] == "number_hunt" and summary["dose"]["optimizer_steps"] > 0
    # A policy that has not learnt to play knows at least how to guess.
    env = make_env(config)
    task = env.tasks("heldout")[6]
    state = env.reset(task)
    assert env.step(state, "guess(3)").observation == "higher"
    assert env.step(state, "guess(7)").outcome == 1.0
    assert sum(d.outcome for d in env.demonstrations(200, 0)) > 50
    # Options of other tasks are none of its own.
    config.task.hops = (1, 2)
    with pytest.raises(ValueError, match="task 'number_hunt' takes no option hops: .* are largest"):
        validate(config)
    del config.task.hops, config.task.largest
    with pytest.raises(ValueError, match="'number_hunt': missing a required .*'largest' in config"):
        validate(config)
