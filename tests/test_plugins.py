"""Plug-ins: what they register, what a run keeps of them, and what is said when they are wrong."""

import importlib
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from conftest import REPOSITORY

from focus.branching import RULES, StateFeatures
from focus.branching.plan import plan
from focus.context import CONTEXT_MANAGERS, Full, Summarize
from focus.credit import ESTIMATORS
from focus.learner import losses
from focus.run import experiment, plugins, warm_start
from focus.tasks.registry import TASKS

MANAGER = """
from focus.context import CONTEXT_MANAGERS, Summarize
class Noted(Summarize):
    pass
CONTEXT_MANAGERS["noted"] = Noted
"""
RULE = """
import jax.numpy as jnp
from focus.branching import RULES, AcquisitionRule
def scores(features, key=None):
    return jnp.where(features.mask, SIGN * features.mean, -jnp.inf)
RULES["by_mean"] = AcquisitionRule(scores, "ranked", "a test")
"""
ESTIMATOR = """
import dataclasses
from focus.credit import ESTIMATORS
ESTIMATORS["mine"] = dataclasses.replace(ESTIMATORS["rloo"])
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A user's working directory; what plug-ins register goes again."""
    before = [dict(registry) for registry in plugins.REGISTRIES.values()]
    monkeypatch.setattr(plugins, "_REGISTERED", {})
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    plugins.load(())
    assert [dict(registry) for registry in plugins.REGISTRIES.values()] == before


def test_entries_are_those_of_the_plugins_that_were_loaded_last(here):
    (here / "a.py").write_text(MANAGER)
    (here / "b.py").write_text(ESTIMATOR)
    plugins.load(("a.py", "b.py"))
    noted, mine = CONTEXT_MANAGERS["noted"], ESTIMATORS["mine"]
    assert plugins.provider("context manager", "noted").name == "a.py"
    assert plugins.provider("estimator", "mine").name == "b.py"
    assert plugins.provider("estimator", "rloo") is None
    plugins.load(("b.py",))
    assert "noted" not in CONTEXT_MANAGERS and ESTIMATORS["mine"] is mine
    plugins.load(("a.py",))
    assert CONTEXT_MANAGERS["noted"] is noted  # not run again: JAX knows functions by identity
    assert "mine" not in ESTIMATORS


def test_a_config_is_checked_with_what_its_plugins_register(here):
    (here / "a.py").write_text(MANAGER)
    config = tiny.get_config("grpo")
    config.context.manager = "noted"
    with pytest.raises(ValueError, match="context.manager must be one of .*; got 'noted'"):
        experiment.validate(config)
    plugins.load(("a.py",))
    experiment.validate(config)
    assert experiment.context_options(config).keys() == {"limit", "summary_tokens"}


@pytest.mark.parametrize(
    "source, message",
    [
        ("x = 1\ny = unknown\n", "bad.py, line 2: NameError: name 'unknown' is not defined"),
        ("x = (\n", "bad.py, line 1: SyntaxError: '\\(' was never closed"),
        ("import nowhere_to_be_found\n", "line 1: ModuleNotFoundError: No module named 'nowhere_"),
        ("\nraise SystemExit('enough')\n", "bad.py, line 2: SystemExit: enough"),
        (
            "import focus.credit.spec as s\n\n\ns.describe(1, 2)\n",
            "bad.py, line 4: TypeError: describe\\(\\) missing",
        ),
        (
            "from focus.credit import ESTIMATORS\nESTIMATORS['grpo'] = ESTIMATORS['rloo']\n",
            "registers the estimator 'grpo', which the library has already; give it another name",
        ),
        (
            "from focus.credit import ESTIMATORS\nESTIMATORS['mine'] = lambda batch: None\n",
            "the estimator 'mine' must be an EstimatorSpec, got a function",
        ),
        (
            "from focus.branching import RULES\nRULES['mine'] = len\n",
            "the rule 'mine' must be an AcquisitionRule, got a builtin",
        ),
        (
            "from focus.tasks.registry import TASKS\nTASKS['mine'] = 'deep_search'\n",
            "the task 'mine' must be a class or function that makes one, got a str",
        ),
        (
            "from focus.credit import ESTIMATORS\ndel ESTIMATORS['grpo']\n",
            "removes the estimator 'g",
        ),
    ],
)
def test_what_is_wrong_with_a_plugin_is_said_and_changes_nothing(here, source, message):
    (here / "bad.py").write_text(source)
    before = [dict(registry) for registry in plugins.REGISTRIES.values()]
    with pytest.raises(ValueError, match=f"plug-in bad.py.*{message}") as error:
        plugins.load(("bad.py",))
    assert "\n" not in str(error.value)
    assert [dict(registry) for registry in plugins.REGISTRIES.values()] == before


def test_two_plugins_of_one_name_are_refused_whichever_was_imported_before(here):
    (here / "a.py").write_text(ESTIMATOR)
    (here / "b.py").write_text(ESTIMATOR + "\n")
    for names in (("a.py", "b.py"), ("b.py", "a.py")):
        message = f"{names[1]} registers the estimator 'mine', which plug-in {names[0]} has"
        with pytest.raises(ValueError, match=message):
            plugins.load(names)


@pytest.mark.parametrize(
    "names, message",
    [
        (("nowhere.py",), "plug-in nowhere.py: no such file; .* the working directory, .*tmp"),
        (("nowhere",), "plug-in nowhere: no such module in this Python's path$"),
        (("lab/nowhere",), "plug-in lab/nowhere: no such module .*; a file's name ends with .py"),
        (("sys",), "plug-in sys is no Python source"),
        (("jax",), "plug-in jax belongs to a package with .* MB of source"),
        ("a.py", r"plugins='a.py' must be a tuple of names: \('a.py',\)"),
    ],
)
def test_what_is_no_plugin_is_said(here, names, message):
    with pytest.raises(ValueError, match=message):
        plugins.load(names)


def run_of(here, names, name="run"):
    """The directory of a run that has begun with plug-ins."""
    workdir = here / name
    loaded = plugins.load(names, workdir)
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps({"plugins": list(names)}))
    plugins.keep(loaded, workdir)
    return workdir


def test_a_run_keeps_its_plugins_and_holds_them_by_what_they_say(here):
    (here / "a.py").write_text(ESTIMATOR)
    workdir = run_of(here, ("a.py",))
    assert (workdir / "plugins" / "0" / "a.py").read_text() == ESTIMATOR
    # Elsewhere, the same; gone, the copy; anything else is refused.
    (here / "moved.py").write_text(ESTIMATOR)
    plugins.load(("moved.py",), workdir)
    (here / "a.py").unlink()
    (gone,) = plugins.load(("a.py",), workdir)
    assert gone.root == workdir / "plugins" / "0" and "mine" in ESTIMATORS
    (here / "a.py").write_text(ESTIMATOR.replace("rloo", "grpo"))
    with pytest.raises(
        ValueError, match="plug-in a.py has changed since the run in .* another wor"
    ):
        plugins.load(("a.py",), workdir)
    with pytest.raises(ValueError, match=r"begun with plugins=\['a.py'\], and now they are \[\]"):
        plugins.load((), workdir)
    with pytest.raises(ValueError, match=r"begun with plugins=\[\], and now they are \['a.py'\]"):
        plugins.load(("a.py",), run_of(here, (), "without"))
    with pytest.raises(ValueError, match="plug-in other.py: no such file"):
        plugins.load(("other.py",), workdir)
    assert [plugin.name for plugin in plugins.load_kept(workdir)] == ["a.py"]
    assert plugins.load_kept(here / "nothing") == ()
    (workdir / "plugins" / "0" / "a.py").write_text(MANAGER)
    with pytest.raises(ValueError, match="the copy of plug-in a.py in .* is not what the run has"):
        plugins.load_kept(workdir)


def test_a_run_that_was_killed_before_it_kept_its_plugins_begins_anew(here):
    (here / "a.py").write_text(ESTIMATOR)
    (here / "run").mkdir()
    (here / "run" / "config.json").write_text(json.dumps({"plugins": ["a.py"]}))
    (plugin,) = plugins.load(("a.py",), here / "run")
    plugins.keep((plugin,), here / "run")
    assert plugins.load_kept(here / "run")[0].checksum == plugin.checksum


def test_a_run_of_before_there_were_plugins_has_none(here):
    (here / "run").mkdir()
    (here / "run" / "config.json").write_text("{}")
    assert plugins.load((), here / "run") == () == plugins.load_kept(here / "run")


@pytest.fixture
def package(here, monkeypatch):
    """A package of a user's own, of which one module registers what another one defines."""
    lab = here / "installed" / "my_lab"
    (lab / "deep").mkdir(parents=True)
    (lab / "__init__.py").write_text("")
    (lab / "deep" / "__init__.py").write_text("SIGN = 1\n")
    rule = RULE.replace("SIGN", "sign()")
    (lab / "rules.py").write_text(
        "from my_lab import deep\nsign = lambda: deep.SIGN\n" + rule.lstrip()
    )
    (lab / "estimators.py").write_text(ESTIMATOR)
    (lab / "notes.txt").write_text("no source")
    monkeypatch.syspath_prepend(str(lab.parent))
    yield lab
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]
    plugins._packages.pop("my_lab", None)


_KEPT = """
import sys
from focus.run import plugins
from focus.branching import RULES
loaded = plugins.load_kept(sys.argv[1])
import my_lab
print([p.name for p in loaded], RULES["by_mean"].scores.__module__, my_lab.__file__)
"""


def test_of_a_module_the_whole_package_is_kept(here, package):
    loaded = plugins.load(("my_lab.rules", "my_lab.estimators"))
    assert plugins.provider("rule", "by_mean") is loaded[0]
    assert plugins.provider("estimator", "mine") is loaded[1]
    workdir = run_of(here, ("my_lab.rules", "my_lab.estimators"))
    kept = {str(p.relative_to(workdir / "plugins")) for p in (workdir / "plugins").rglob("*.*")}
    files = ("__init__.py", "deep/__init__.py", "estimators.py", "rules.py")
    assert kept == {"plugins.json"} | {f"{i}/my_lab/{name}" for i in (0, 1) for name in files}
    # A process that cannot find the package otherwise.
    done = subprocess.run(
        [sys.executable, "-c", _KEPT, str(workdir)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['my_lab.rules', 'my_lab.estimators'] my_lab.rules ")
    assert str(workdir / "plugins") in done.stdout
    # Any file of it counts.
    (package / "deep" / "__init__.py").write_text("SIGN = -1\n")
    with pytest.raises(ValueError, match="plug-in my_lab.rules has changed since"):
        plugins.load(("my_lab.rules", "my_lab.estimators"), workdir)


def best(rule):
    """State that a rule picks first, among three with values .1 .5 .9."""
    features = StateFeatures(
        mean=jnp.array([0.1, 0.5, 0.9]),
        error_features=jnp.ones((3, 1)),
        noise_var=jnp.full(3, 0.25),
        cost=jnp.ones(3),
        weight=jnp.ones(3),
        mask=jnp.ones(3, bool),
    )
    planned = jax.jit(plan, static_argnames=("rule", "ks", "max_picks"))
    return int(planned(features, 1.0, rule=rule, ks=(1,), max_picks=1).order[0])


def test_another_rule_of_a_name_is_another_program(here, package):
    (here / "low.py").write_text(RULE.replace("SIGN", "-1"))
    assert (plugins.load(("my_lab.rules",)), best("by_mean"))[1] == 2
    assert (plugins.load(("low.py",)), best("by_mean"))[1] == 0
    plugins.load(())
    assert "by_mean" not in RULES
    # The package was changed in between: it is read again.
    (package / "deep" / "__init__.py").write_text("SIGN = -1\n")
    assert (plugins.load(("my_lab.rules",)), best("by_mean"))[1] == 0


def test_a_package_that_the_program_has_imported_itself_is_known_as_a_plugin(here, package):
    importlib.import_module("my_lab.rules")
    assert "by_mean" in RULES and plugins.provider("rule", "by_mean") is None
    (plugin,) = plugins.load(("my_lab.rules",))
    assert plugins.provider("rule", "by_mean") is plugin


# --- what a warm start is named by ----------------------------------------------------------------


def test_a_warm_start_is_named_by_the_plugin_that_it_reads_and_by_no_other(here):
    config = tiny.get_config("grpo")
    name = warm_start.fingerprint(config)
    (here / "a.py").write_text(MANAGER)
    (here / "b.py").write_text(ESTIMATOR)
    plugins.load(("a.py", "b.py"))
    config.credit.estimator = "mine"
    assert warm_start.fingerprint(config) == name
    config.context.manager = "noted"
    noted = warm_start.fingerprint(config)
    assert noted != name
    (here / "a.py").write_text(MANAGER + "\n# changed\n")
    plugins.load(("a.py", "b.py"))
    assert warm_start.fingerprint(config) != noted


def test_managers_that_are_not_used_and_the_policys_loss_leave_it_alone(monkeypatch):
    config = tiny.get_config("grpo")
    name = warm_start.fingerprint(config)
    monkeypatch.setitem(CONTEXT_MANAGERS, "new", Summarize)
    monkeypatch.setattr(losses, "policy_loss", None)
    config.context.limit += 1  # which the full context does not read
    config.credit.lambda_, config.learner.clip_high = 0.5, 0.5
    assert warm_start.fingerprint(config) == name
    config.context.manager = "summarize"
    assert warm_start.fingerprint(config) != name


def test_what_the_programs_compute_names_it(monkeypatch):
    config = tiny.get_config("grpo")
    name = warm_start.fingerprint(config)
    real = losses.supervised_loss

    def renamed(logp, weights, mask, *, denominator):
        return real(logp, weights, mask, denominator=denominator)

    def twice(logp, weights, mask, *, denominator):
        loss, metrics = real(logp, weights, mask, denominator=denominator)
        return 2 * loss, metrics

    monkeypatch.setattr(losses, "supervised_loss", renamed)
    assert warm_start.fingerprint(config) == name
    monkeypatch.setattr(losses, "supervised_loss", twice)
    assert warm_start.fingerprint(config) != name


def test_the_file_that_a_world_is_read_from_names_it(here):
    config = tiny.get_config("grpo")
    config.task.world = str(here / "world.json")
    (here / "world.json").write_text("[1]")
    one = warm_start.fingerprint(config)
    (here / "world.json").write_text("[2]")
    assert warm_start.fingerprint(config) != one


@pytest.mark.parametrize("change", ["products", "learning_rate", "batch_rows"])
def test_what_imitation_is_told_names_it(change):
    config = tiny.get_config("grpo")
    name = warm_start.fingerprint(config)
    config.warm_start[change] = {"products": None, "learning_rate": 1e-3, "batch_rows": 4}[change]
    assert warm_start.fingerprint(config) != name


def test_managers_and_tasks_of_the_program_itself_have_names_too(monkeypatch):
    class Own(Full):
        pass

    monkeypatch.setitem(CONTEXT_MANAGERS, "own", Own)
    config = tiny.get_config("grpo")
    config.context.manager = "own"
    name = warm_start.fingerprint(config)
    assert name != warm_start.fingerprint(tiny.get_config("grpo"))
    monkeypatch.setitem(TASKS, "deep_search", lambda **options: np.nan)
    assert warm_start.fingerprint(config) != name
