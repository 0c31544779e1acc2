"""Whole runs whose rollouts go on while the learner works, in this process and over HTTP."""

import collections
import threading
import time

import pytest
import tiny
from serving import MergingService, ServerThread
from test_train import journal

from focus.engine import FleetDead
from focus.engine.embedded.engine import EmbeddedEngine
from focus.evaluate import evaluate_run
from focus.metrics import read_metrics
from focus.run import experiment
from focus.train import train
from focus.types import version_step


def check_accounts(workdir, summary, *, depth):
    """Ledger, journal and versions tell one story; nothing that was paid for is missing."""
    lines, records = journal(workdir), read_metrics(workdir)
    assert [record["step"] for record in records] == list(range(summary["steps"]))
    last = collections.defaultdict(int)  # the attempt whose rollouts a step was trained on
    for line in lines:
        last[line["step"]] = max(last[line["step"]], line["attempt"])
    kept = [line for line in lines if line["attempt"] == last[line["step"]]]
    tokens = collections.Counter()
    lags = collections.Counter()
    for line in kept:
        count = sum(line["tokens"].values())
        tokens[line["step"]] += count
        spans = line["versions"]
        assert [0, *(end for _, _, end in spans)][-1] == count
        for version, start, end in spans:
            lags[line["step"] - int(version[1:].split("-")[0])] += end - start
    assert [tokens[step] for step in range(summary["steps"])] == [
        record["tokens/spent"] for record in records
    ]
    assert sum(tokens.values()) == sum(summary["generated_tokens"].values())
    replayed = [line for line in lines if line["attempt"] != last[line["step"]]]
    assert summary["replayed"] == {
        "rollouts": len(replayed),
        "tokens": sum(sum(line["tokens"].values()) for line in replayed),
    }
    assert len({(line["attempt"], line["id"]) for line in lines}) == len(lines)
    # Never a token of weights that are not there yet, never one older than is allowed.
    assert min(lags) >= 0 and max(lags) <= depth
    assert summary["staleness"]["tokens"] == {str(lag): lags[lag] for lag in sorted(lags)}
    assert max(record["tokens/spent"] for record in records) <= summary["budget_per_step"]
    return lags


def check_agreement(records):
    """Engine and trainer agree where they have the same weights; with older ones they need not."""
    for record in records:
        if record["logp_difference/max"] is not None:
            assert record["logp_difference/max"] < 1e-4
        if record["logp_difference/mean_stale"] is not None:
            assert record["logp_difference/mean_stale"] > 1e-4
            assert record["policy/importance_ess"] < 1


def test_with_depth_one_branches_are_fresh_and_base_rollouts_at_most_one_step_old(
    finished, prepare
):
    run = finished("focus", steps=4, **{"rollout.async_depth": 1})
    lags = check_accounts(run.workdir, run.summary, depth=1)
    assert lags[0] > 0 and lags[1] > 0
    for line in journal(run.workdir):
        steps = {int(version[1:]) for version, _, _ in line["versions"]}
        if line["id"].count("/") == 2:
            assert steps <= {line["step"]}
        else:
            assert steps <= {line["step"], max(line["step"] - 1, 0)}
    check_agreement(read_metrics(run.workdir))
    assert run.summary["recompilations_after_warmup"] == 0
    # As many tasks as in a strict run's steps, in the same order: none is left out.
    first = [line["task"] for line in journal(run.workdir) if line["id"].count("/") == 1]
    order = [task.id for task in _tasks(run.config, prepare, len(set(first)))]
    assert set(first) <= set(order) | {None}


def _tasks(config, prepare, count):
    import itertools

    from focus.run.trainer import Trainer

    return itertools.islice(Trainer(config, *prepare(config)).task_order().draw(0), count + 64)


class DyingEngine(EmbeddedEngine):
    """Nobody answers any more, from a request of step 2 on."""

    dead = True

    async def generate(self, request):
        if self.dead and request.rid.startswith("2/"):
            raise FleetDead("no server for 300 s")
        return await super().generate(request)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_run_whose_servers_are_gone_saves_itself_and_goes_on_when_they_are_back(
    depth, prepare, monkeypatch, tmp_path
):
    config = tiny.get_config("grpo")
    config.steps, config.checkpoint.every, config.rollout.async_depth = 4, 10, depth
    prepare(config)
    monkeypatch.setattr("focus.run.backends.EmbeddedEngine", DyingEngine)
    with pytest.raises(FleetDead, match="no server for 300 s. The run stands at step 2 and is"):
        train(config, tmp_path)
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1]
    assert (tmp_path / "checkpoints" / "00000002" / "checkpoint.json").is_file()
    monkeypatch.setattr(DyingEngine, "dead", False)
    summary = train(config, tmp_path)
    check_accounts(tmp_path, summary, depth=depth)
    if depth == 0:
        straight = train(config, tmp_path / "straight")
        assert summary["generated_tokens"] == straight["generated_tokens"]
        assert summary["success_after"] == straight["success_after"]


def test_old_tokens_that_nothing_corrects_for_are_said_once_at_the_start(prepare, capfd, tmp_path):
    """Pitfall 38."""
    config = tiny.get_config("grpo")
    config.steps, config.rollout.async_depth, config.evaluate.every = 2, 1, 0
    config.learner.importance_cap = None
    prepare(config)
    capfd.readouterr()
    train(config, tmp_path)
    said = capfd.readouterr().err
    assert said.count("nothing corrects for it") == 1
    assert said.startswith("note: rollout.async_depth=1 trains on tokens of older weights")
    assert not experiment.notices(tiny.get_config("grpo"))
    config.learner.importance_range = (0.5, 2.0)
    assert not experiment.notices(config)
    config.learner.importance_range, config.rollout.async_depth = (), 0
    assert not experiment.notices(config)


# Over HTTP.


def server_config(url, **overrides):
    config = tiny.get_config("grpo")
    config.steps, config.evaluate.every = 4, 4
    config.rollout.update(engine="sglang", urls=(url,), async_depth=1, attempts=2)
    config.update_from_flattened_dict(overrides)
    return config


def kill_after(server, workdir, steps):
    """Kills a server as soon as a run has written so many steps."""

    def watch():
        while len(read_metrics(workdir)) < steps:
            time.sleep(0.05)
        server.kill()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_run_over_http_loses_its_server_saves_itself_and_ends_with_another(prepare, tmp_path):
    config = server_config("http://127.0.0.1:1", **{"rollout.dead_after_s": 3.0})
    _, start = prepare(config)
    server = ServerThread(experiment.model_config(config), start, config.rollout, token_s=0.002)
    config.rollout.urls = (server.url,)
    with server:
        watcher = kill_after(server, tmp_path, 2)
        with pytest.raises(FleetDead, match="The run stands at step"):
            train(config, tmp_path)
        watcher.join()
        saved = len(read_metrics(tmp_path))
        assert 2 <= saved < 4
        server.start()  # with the weights it was built with
        summary = train(config, tmp_path)
        versions = {v for line in journal(tmp_path) for v, _, _ in line["versions"]}
        assert {0, 1} <= {version_step(v) for v in versions}
        runs = {v.partition("-")[2] for v in versions}
        assert len(runs) == 2 and "" not in runs  # before and after the stop, and no one else's
        lags = check_accounts(tmp_path, summary, depth=1)
        assert lags[1] > 0
        records = read_metrics(tmp_path)
        check_agreement(records)
        assert records[-1]["servers/fit"] == records[-1]["servers/all"] == 1
        # The newest version alone is on disk, and what an evaluation of the run plays with.
        (directory,) = (tmp_path / "weights").iterdir()
        assert directory.name.startswith("v4-") and directory.name.partition("-")[2] in runs
        assert evaluate_run(tmp_path)["success"] == pytest.approx(summary["success_after"])


@pytest.mark.slow
def test_a_run_pushes_adapters_alone_also_to_a_server_that_was_away(prepare, tmp_path):
    overrides = {"rollout.push": "adapter", "learner.lora.rank": 8}
    config = server_config("http://127.0.0.1:1", **overrides)
    _, start = prepare(config)
    options = {"token_s": 0.002, "service": MergingService}
    server = ServerThread(experiment.model_config(config), start, config.rollout, **options)
    config.rollout.urls = (server.url,)
    with server:

        def restart():
            kill_after(server, tmp_path, 2).join()
            server.start()

        watcher = threading.Thread(target=restart)
        watcher.start()
        summary = train(config, tmp_path)
        watcher.join()
        lags = check_accounts(tmp_path, summary, depth=1)
        assert lags[1] > 0
        # What the server samples with base and adapter is what the learner scores.
        check_agreement(records := read_metrics(tmp_path))
        assert records[-1]["servers/updates"] > 1 + config.steps + 1  # and again after the restart
        names = sorted(d.name.split("-")[0] for d in (tmp_path / "weights").iterdir())
        assert names == ["base", "v3", "v4"]
        assert evaluate_run(tmp_path)["success"] == pytest.approx(summary["success_after"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rollout.urls": ()}, "needs the URL of every server"),
        ({"rollout.engine": "embedded"}, "the embedded engine is in this process"),
        ({"rollout.async_depth": -1}, "async_depth must be a whole number >= 0"),
        ({"rollout.mixed_versions": "mix"}, "rollout.mixed_versions must be one of keep, drop"),
        ({"rollout.on_failure": "panic"}, "rollout.on_failure must be one of wait, proceed"),
        ({"learner.importance_level": "turn"}, "importance_level must be one of token"),
        ({"learner.importance_range": (2.0, 3.0)}, "must hold 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(overrides, message):
    config = server_config("http://127.0.0.1:1", **overrides)
    with pytest.raises(ValueError, match=message):
        experiment.validate(config)
