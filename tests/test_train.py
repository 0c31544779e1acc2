"""Whole runs of the quickstart, shrunk: what they leave, and how they stop, resume and break."""

import asyncio
import dataclasses
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny
from conftest import REPOSITORY

from focus.engine import EngineError
from focus.engine.embedded.engine import EmbeddedEngine
from focus.journal import read_json_lines
from focus.learner import compilations
from focus.learner.checkpoint import Checkpointer
from focus.metrics import read_metrics
from focus.rollout import AllRolloutsFailed, Stopwatch, collect
from focus.run import warm_start
from focus.run.steps import learn
from focus.run.trainer import Trainer
from focus.tasks.deep_search import DeepSearch
from focus.train import train

STEPS = 6  # a checkpoint after each, an evaluation after the third and the last


def journal(workdir):
    return read_json_lines(workdir / "rollouts.jsonl")[0]


def without_time(record):
    return {name: value for name, value in record.items() if not name.startswith("time/")}


def metrics(workdir):
    return [without_time(record) for record in read_metrics(workdir)]


def played(workdir):
    """What was played: everything of a rollout but the attempt that played it."""
    return [{k: v for k, v in line.items() if k != "attempt"} for line in journal(workdir)]


@pytest.fixture(scope="module")
def parameters(prepare):
    """Function from a config and workdir to the arrays of the newest checkpoint."""

    def read(config, workdir):
        trainer = Trainer(config, *prepare(config))
        checkpointer = Checkpointer(workdir)
        state = checkpointer.restore(trainer.init_state()).state
        checkpointer.close()
        return jax.tree.map(np.asarray, jax.device_get(state))

    return read


def assert_equal_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


# Every method.


@pytest.fixture(params=tiny.METHODS)
def run(request, finished):
    """A finished run of every method; that of `focus` is longer and serves other tests too."""
    steps = STEPS if request.param == "focus" else 3
    return finished(request.param, steps=steps)


def test_every_method_trains_and_sums_its_run_up(run):
    summary = json.loads((run.workdir / "summary.json").read_text())
    assert summary == run.summary
    assert summary["method"] == run.config.method
    assert summary["seed"] == run.config.seed
    assert 0 <= summary["success_before"] <= 1 and 0 <= summary["success_after"] <= 1
    assert summary["generated_tokens"].keys() == {"base", "branch", "summary"}
    assert summary["generated_tokens"]["base"] > 0
    assert {"warm_start", "rollout", "update", "evaluate"} <= summary["wall_s"].keys()
    assert all(seconds >= 0 for seconds in summary["wall_s"].values())
    assert 0 <= summary["controller_share"] < 1
    assert 0 <= summary["prefix_recomputed_share"] <= 1
    assert 0 < summary["packing_efficiency"] <= 1
    assert summary["technical_failures"] == 0
    assert summary["replayed"] == {"rollouts": 0, "tokens": 0}
    assert summary["report"] == str(run.workdir / "report.html")
    assert run.config.method in (run.workdir / "report.html").read_text()


def test_no_step_passes_the_budget_and_the_ledger_is_the_journal(run):
    lines, records = journal(run.workdir), read_metrics(run.workdir)
    assert [record["step"] for record in records] == list(range(run.config.steps))
    kinds = ("base", "branch", "summary")
    totals = dict.fromkeys(kinds, 0)
    spent = []
    for step, record in enumerate(records):
        of_step = [line["tokens"] for line in lines if line["step"] == step]
        tokens = {kind: sum(line.get(kind, 0) for line in of_step) for kind in kinds}
        assert tokens == {kind: record[f"tokens/{kind}"] for kind in kinds}
        spent.append(sum(tokens.values()))
        totals = {kind: totals[kind] + tokens[kind] for kind in kinds}
    assert run.summary["generated_tokens"] == totals
    assert run.summary["budget_per_step"] == run.config.budget
    assert run.summary["max_step_tokens"] == max(spent) <= run.config.budget


def test_a_method_generates_what_it_is_named_for(run):
    tokens, method = run.summary["generated_tokens"], run.config.method
    assert (tokens["branch"] > 0) == (method not in ("grpo", "ppo", "self_credit"))
    assert (tokens["summary"] > 0) == (method in ("focus_summarize", "self_credit"))


def test_every_method_moves_the_policy(run, prepare, parameters):
    before = prepare(run.config)[1].params
    after = parameters(run.config, run.workdir).params
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert all(jax.tree.leaves(moved)), moved
    assert run.summary["dose"]["tokens"] > 0


def test_while_the_critic_warms_up_the_policy_stands_still(prepare, parameters, tmp_path):
    config = tiny.get_config("ppo")
    config.steps, config.critic.warmup_steps = 2, 1
    summary = train(config, tmp_path)
    first, second = read_metrics(tmp_path)
    assert first["dose/tokens"] == 0 and first["policy/optimizer_steps"] == 0
    assert first["critic/num_updates"] > 0
    assert second["dose/tokens"] > 0 and second["policy/optimizer_steps"] > 0
    assert summary["recompilations_after_warmup"] == 0


def test_nothing_compiles_after_the_first_steps(finished):
    summary = finished("focus", steps=STEPS).summary
    assert summary["recompilations_after_warmup"] == 0


def test_the_counter_of_compilations_counts():
    before = loop_compilations()
    jax.jit(lambda x: 3 * x)(np.arange(1013))
    assert loop_compilations() == before + 1


def loop_compilations():
    return compilations.compilations()


# Resuming.


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_stopping_and_resuming_changes_not_a_bit(stop, finished, parameters, tmp_path):
    """Pitfalls 24 and 25; tasks come from a second and a third epoch on the way."""
    straight = finished("focus", steps=STEPS)
    config = tiny.get_config("focus")
    assert len({line["task"] for line in journal(straight.workdir)}) == config.task.num_train
    config.steps = stop
    train(config, tmp_path)
    config.steps = STEPS
    summary = train(config, tmp_path)

    assert played(tmp_path) == played(straight.workdir)
    for one, other in zip(metrics(tmp_path), metrics(straight.workdir), strict=True):
        if one["step"] == stop - 1:  # the last step of a process is always evaluated
            one = {k: v for k, v in one.items() if k in other or not k.startswith("heldout/")}
        assert one == other
    assert_equal_bits(parameters(config, tmp_path), parameters(config, straight.workdir))
    differing = {"wall_s", "controller_share", "report"}
    for name in straight.summary.keys() - differing:
        assert summary[name] == straight.summary[name], name


def test_a_finished_run_is_not_trained_again_and_says_so(monkeypatch, capfd, tmp_path):
    config = tiny.get_config("grpo")
    config.steps = 1
    first = train(config, tmp_path)
    before = metrics(tmp_path), journal(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("focus.train.Trainer", None)  # nothing is compiled for it
        capfd.readouterr()
        assert train(config, tmp_path) == first
        assert f"{tmp_path} has already finished: 1 steps, held-out success" in (
            capfd.readouterr().err
        )
    assert (metrics(tmp_path), journal(tmp_path)) == before
    # One that was killed before its summary was written is brought to its end.
    (tmp_path / "summary.json").unlink()
    again = train(config, tmp_path)
    assert (metrics(tmp_path), journal(tmp_path)) == before
    assert again["success_after"] == first["success_after"]
    assert again["generated_tokens"] == first["generated_tokens"]


def test_tasks_follow_one_another_over_the_borders_of_epochs(prepare):
    """Pitfall 25: the step that begins on a border draws from the next epoch."""
    config = tiny.get_config("grpo")
    env, start = prepare(config)
    trainer = Trainer(config, env, start)
    size = config.task.num_train

    def tasks_from(cursor, count):
        return [task.id for task in itertools.islice(trainer.task_order(cursor).draw(0), count)]

    order = tasks_from(0, 3 * size)
    for cursor in range(2 * size):
        assert tasks_from(cursor, size) == order[cursor:][:size]
    epochs = [order[i : i + size] for i in (0, size, 2 * size)]
    assert all(sorted(epoch) == sorted(task.id for task in env.tasks("train")) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


# Killed.


def command(workdir, *flags):
    return [
        sys.executable,
        str(REPOSITORY / "scripts" / "train.py"),
        f"--config={REPOSITORY / 'tests' / 'tiny.py'}:focus",
        f"--workdir={workdir}",
        *flags,
    ]


def kill_when(moment, arguments, log, signum=signal.SIGKILL):
    """Runs a command and sends it a signal as soon as `moment()`; its exit status."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with open(log, "wb") as output:
        process = subprocess.Popen(arguments, env=env, stdout=output, stderr=output)
        while process.poll() is None and not moment():
            time.sleep(0.002)
        process.send_signal(signum)
        return process.wait()


def test_the_same_command_goes_on_after_kill_9_at_any_moment(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))  # its warm start is killed too
    workdir, log = tmp_path / "killed", tmp_path / "log.txt"
    flags = [f"--config.steps={STEPS}", "--config.checkpoint.every=2"]
    flags += ["--config.warm_start.steps=60", "--config.warm_start.episodes=100"]

    def has(path):
        return (workdir / path).exists()

    moments = {
        "warm start": lambda: b"warm start 24/60" in log.read_bytes(),
        "step 0": lambda: has("rollouts.jsonl") and len(journal(workdir)) >= 3,
        "a checkpoint": lambda: has("checkpoints/00000002/checkpoint.json"),
        "between checkpoints": lambda: len(read_metrics(workdir)) >= 3,
        "the next step": lambda: any(line["step"] == 4 for line in journal(workdir)),
    }
    for name, moment in moments.items():
        asked = name == "between checkpoints"  # to stop, instead of being killed
        signum = signal.SIGINT if asked else signal.SIGKILL
        status = kill_when(moment, command(workdir, *flags), log, signum)
        assert status == (128 + signum if asked else -signum), log.read_text()
        if asked:
            assert Checkpointer(workdir).latest_step >= 3
            again = shlex.join(["python", *command(workdir, *flags)[1:]])
            assert log.read_text().endswith(f"saved in {workdir}. To go on:\n  {again}\n")
        if name == "warm start":
            assert not list((tmp_path / "cache" / "warm_start").glob("[!.]*"))
    before = len(journal(workdir))
    arguments = command(workdir, *flags)
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(arguments, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resuming at step" in done.stderr
    assert len(journal(workdir)) > before

    config = tiny.get_config("focus")
    config.steps, config.checkpoint.every = STEPS, 2
    config.warm_start.update(steps=60, episodes=100)
    straight = train(config, tmp_path / "straight")

    assert metrics(workdir) == metrics(tmp_path / "straight")
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["success_after"] == straight["success_after"]
    assert summary["generated_tokens"] == straight["generated_tokens"]
    # What was paid for is in the run or counted as replayed; nothing is lost, nothing twice.
    paid, kept = journal(workdir), journal(tmp_path / "straight")
    assert summary["replayed"]["rollouts"] == len(paid) - len(kept) > 0
    assert summary["replayed"]["tokens"] == sum(
        sum(line["tokens"].values()) for line in paid
    ) - sum(sum(line["tokens"].values()) for line in kept)


@pytest.mark.parametrize(
    "change", ["learner.max_nodes", "learner.max_states", "rollout.max_summary_tokens"]
)
def test_a_warm_start_is_named_by_what_its_rows_and_contexts_are_made_with(change):
    config = tiny.get_config("focus_summarize")
    name = warm_start.fingerprint(config)
    config.learner.learning_rate *= 2  # of the run, not of its start
    assert warm_start.fingerprint(config) == name
    part, key = change.split(".")
    config[part][key] += 1
    assert warm_start.fingerprint(config) != name


# The leak rule.


def with_outcome(collected, index, outcome):
    base = list(collected.tree.base)
    base[index] = dataclasses.replace(base[index], outcome=outcome, success=outcome == 1.0)
    tree = dataclasses.replace(collected.tree, base=tuple(base))
    return dataclasses.replace(collected, tree=tree)


def baselines(trainer, collected, monkeypatch):
    """Refined values that a step of the real loop gives to its estimator."""
    seen, real = [], trainer.assignment.with_values

    def with_values(batch, trajectories, values):
        seen.append(values)
        return real(batch, trajectories, values)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.assignment, "with_values", with_values)
        learn(trainer, trainer.init_state(), collected, 0, Stopwatch())
    (values,) = seen
    return values.refined


@pytest.mark.parametrize("values_from", ["before", "crossfit", "after"])
async def test_an_outcome_reaches_the_baselines_of_its_own_states_only_if_asked_to(
    values_from, prepare, monkeypatch
):
    config = tiny.get_config("focus")
    # The outcomes of other rollouts are evidence about a task, whoever plays it: off here.
    config.critic.update(values_from=values_from, siblings=False)
    trainer = Trainer(config, *prepare(config))
    async with trainer.engine:
        state = trainer.init_state()
        collected = await collect(
            trainer.step_config,
            trainer.agent,
            trainer.task_order().draw(0),
            step=0,
            episode_cost=trainer.episode_cost,
            scorer=lambda base: trainer.valuation.score_states(state, base),
        )
        index, trajectory = next(
            (b, t) for b, t in enumerate(collected.tree.base) if t.outcome is not None
        )
        flipped = with_outcome(collected, index, 1.0 - trajectory.outcome)
        one = baselines(trainer, collected, monkeypatch)
        again = baselines(trainer, collected, monkeypatch)
        other = baselines(trainer, flipped, monkeypatch)
    np.testing.assert_array_equal(one, again)
    own = slice(0, len(trajectory.segments))
    assert np.isfinite(one[index, own]).all()
    # Leaving an outcome out is exact up to rounding: it is counted first.
    changed = not np.allclose(one[index, own], other[index, own], atol=1e-4)
    assert changed == (values_from == "after")
    # The outcome does teach: others' baselines may know it, if they are read after learning.
    assert np.array_equal(one, other, equal_nan=True) == (values_from == "before")


# An engine that fails.


class FailingEngine(EmbeddedEngine):
    """Fails requests as `fails(rid)` says."""

    @staticmethod
    def fails(rid):
        raise NotImplementedError

    async def generate(self, request):
        if self.fails(request.rid):
            raise EngineError(f"{request.rid} went wrong")
        return await super().generate(request)


def with_failures(monkeypatch, fails):
    engine = type("Engine", (FailingEngine,), {"fails": staticmethod(fails)})
    monkeypatch.setattr("focus.run.backends.EmbeddedEngine", engine)
    real = asyncio.sleep
    monkeypatch.setattr("focus.rollout.pool.asyncio.sleep", lambda seconds: real(0))


def test_requests_that_fail_once_are_retried_and_change_nothing(finished, monkeypatch, tmp_path):
    """Pitfall 28."""
    failed = []

    def fails(rid):
        if rid.startswith(("0/0.0", "1/1.1", "2/")) and "~" not in rid:
            failed.append(rid)
            return True
        return False

    with_failures(monkeypatch, fails)
    config = tiny.get_config("grpo")
    summary = train(config, tmp_path)
    assert failed
    assert summary["technical_failures"] == 0
    straight = finished("grpo", steps=3)
    assert {line["id"] for line in journal(tmp_path)} == {
        line["id"] for line in journal(straight.workdir)
    }
    assert all(line["end"] != "failed" for line in journal(tmp_path))


@pytest.mark.parametrize("method", ["grpo", "focus"])
def test_rollouts_that_fail_for_good_are_counted_and_never_scored(method, monkeypatch, tmp_path):
    """Pitfall 28: in step 0 some base rollouts and some branches, later none."""

    def fails(rid):
        name = rid.split(":")[0]
        return name.startswith("0/") and name.endswith(("0.1", "1.0", "/0.0"))

    with_failures(monkeypatch, fails)
    summary = train(tiny.get_config(method), tmp_path)
    failed = [line for line in journal(tmp_path) if line["end"] == "failed"]
    assert summary["technical_failures"] == len(failed) > 0
    assert {line["step"] for line in failed} == {0}
    assert all(line["outcome"] is None and "went wrong" in line["error"] for line in failed)
    base = [line for line in journal(tmp_path) if line["step"] == 0 and "base" in line["tokens"]]
    scored = [line["success"] for line in base if line["outcome"] is not None]
    assert 0 < len(scored) < len(base)
    assert read_metrics(tmp_path)[0]["train/success"] == pytest.approx(np.mean(scored))


@pytest.mark.parametrize("method", ["grpo", "focus"])
def test_a_step_whose_engine_is_dead_teaches_nothing_and_is_soon_over(
    method, monkeypatch, tmp_path
):
    """Pitfalls 28 and 29: it neither asks for task after task nor uses them up."""
    with_failures(monkeypatch, lambda rid: rid.startswith("1/"))
    config = tiny.get_config(method)
    summary = train(config, tmp_path)
    records = read_metrics(tmp_path)
    dead = [line for line in journal(tmp_path) if line["step"] == 1]
    assert all(line["end"] == "failed" and line["outcome"] is None for line in dead)
    assert summary["technical_failures"] == len(dead) <= 2 * records[0]["rollouts/base"]
    assert records[1]["train/success"] is None
    assert records[1]["dose/tokens"] == 0
    assert records[2]["train/success"] is not None


def test_tools_that_are_gone_for_two_steps_stop_the_run_and_lose_nothing(
    prepare, monkeypatch, tmp_path
):
    """Pitfall 39: said with the rollout's id and the call, saved, and gone on with."""
    config = tiny.get_config("grpo")
    config.steps, config.checkpoint.every, config.rollout.async_depth = 5, 10, 1
    config.rollout.tools.backoff_s, config.evaluate.every = 0.0, 0
    prepare(config)
    real, dead = DeepSearch.step, []

    def step(self, state, action):
        if len(read_metrics(tmp_path)) >= 2 and "search" in action and not dead:
            raise ConnectionRefusedError(111, "connection refused")
        return real(self, state, action)

    monkeypatch.setattr(DeepSearch, "step", step)
    with pytest.raises(AllRolloutsFailed) as error:
        train(config, tmp_path)
    said = str(error.value)
    assert re.search(r"^all rollouts of steps \d and \d failed; the first: rollout \d/0\.0, ", said)
    assert re.search(r"turn 0: deep_search\.step\('search\(.*'\) failed 3 times, at last: ", said)
    assert "ConnectionRefusedError: [Errno 111] connection refused" in said
    done = int(re.search(r"The run stands at step (\d) and is saved; mend that and start", said)[1])
    records = read_metrics(tmp_path)
    assert len(records) == done in (3, 4)
    assert records[-1]["dose/tokens"] == 0 and records[-1]["tools/faults"] > 0
    assert (tmp_path / "checkpoints" / f"0000000{done}" / "checkpoint.json").is_file()
    dead.append("no more")
    config.rollout.tools.timeout_s = 30.0  # which may be changed
    summary = train(config, tmp_path)
    assert summary["steps"] == 5 and read_metrics(tmp_path)[-1]["tools/faults"] == 0
    assert read_metrics(tmp_path)[-1]["dose/tokens"] > 0 and summary["wall_s"]["tools"] > 0


# Devices.

_FIRST_STEP = """
import json, sys
from focus.learner import sharding
sharding.split_cpu(int(sys.argv[1]))
import tiny
from focus.metrics import read_metrics
from focus.run.steps import learn
from focus.train import train
config = tiny.get_config("ppo")
config.steps, config.learner.micro_rows, config.mesh.data = 1, 8, int(sys.argv[1])
config.learner.minibatches = 1
train(config, sys.argv[2])
"""


@pytest.mark.slow
def test_eight_devices_learn_what_one_learns(prepare, tmp_path):
    """Sums over eight shards are added in another order: float32 rounding, far below 1e-4.

    Of a method that does not branch: which of two states with nearly equal gains is branched may
    hang on that rounding.

    Only numbers of the first optimiser step are compared: Adam's first step has the sign of each
    gradient, so where a gradient is zero but for rounding, weights part by twice the learning
    rate. Later rollouts are sampled with those weights, and a single token that comes out
    otherwise changes all that follows.
    """
    prepare(tiny.get_config("ppo"))
    env = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    env.pop("XLA_FLAGS", None)
    env["JAX_PLATFORMS"] = "cpu"
    records = []
    for devices in ("1", "8"):
        workdir = tmp_path / devices
        arguments = [sys.executable, "-c", _FIRST_STEP, devices, str(workdir)]
        done = subprocess.run(arguments, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        records.append(metrics(workdir)[0])
    one, eight = records
    for name in ("policy/loss", "policy/grad_norm", "policy/entropy", "critic/value_loss_before"):
        assert eight[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    for name in ("tokens/base", "dose/tokens", "train/success"):
        assert eight[name] == one[name], name
