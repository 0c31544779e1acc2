"""Two real processes with four devices each do what one process with eight does."""

import collections
import dataclasses
import functools
import json
import math
import signal
import subprocess
import sys
import time

import jax
import learner_steps
import numpy as np
import pytest
from families import FAMILIES, make_params
from learner_steps import born, evidence_of, forest
from processes import JOIN, TESTS, environment, free_port, together

from focus.critic.head import CriticConfig
from focus.formats import hf, hf_config
from focus.journal import read_json_lines
from focus.learner import hosts, losses, scoring, sharding, state, update
from focus.learner.critic_on_policy import CriticLearner, CriticOptions
from focus.learner.critic_own_backbone import BackboneCritic, BackboneOptions
from focus.metrics import read_metrics
from focus.policy import model as models
from focus.policy import transformer

MICRO_ROWS = 8
CONFIG = FAMILIES["qwen3"]
KEY = jax.random.key(0)
HEADS = CriticConfig(feature_dim=16, num_members=8, hidden_dim=8)
pack = functools.partial(learner_steps.pack, rows_multiple=MICRO_ROWS // 2)


# The learner.


def join(trees):
    return jax.tree.map(lambda *x: np.concatenate(x), *trees)


def learner_report():
    """Numbers that the learner gives on two forests, of which a process may hold one or both."""
    forests = [forest(0, 3, 5), forest(1, 3, 5)]
    forests = forests if hosts.count() == 1 else [forests[hosts.index()]]
    mesh = sharding.make_mesh(-1, 2, 2)
    model = scoring.policy_model(CONFIG)
    optimizer = state.make_optimizer(state.OptimizerConfig(learning_rate=1e-2))
    score = scoring.make_score_fn(model, mesh=mesh, micro_rows=MICRO_ROWS)

    def init(key):
        return state.init_state(transformer.init_params(CONFIG, key), optimizer)

    train_state, shardings = sharding.init_sharded(init, KEY, mesh=mesh)
    report = critic_report(mesh, score, train_state, forests)
    report |= backbone_report(mesh, model, train_state, forests)

    rows = join([pack(trajectories).rows for trajectories in forests])
    scores = score(train_state.params, rows)
    kept = rows.generated_mask
    report["logp"] = hosts.moments(scores.logp[kept])
    report["entropy"] = hosts.moments(scores.entropy[kept])
    # A function of the tokens, so that it does not matter who holds them.
    advantages = 10 * np.cos(3.0 * rows.tokens + rows.positions).astype(np.float32)
    batch = update.PolicyBatch(rows, kept, advantages, scores.logp, scores.logp + 0.1)
    step = update.make_policy_update(
        model,
        optimizer,
        losses.PolicyLossConfig(entropy_coefficient=0.01),
        update.UpdateConfig(micro_rows=MICRO_ROWS, minibatches=3),
        mesh=mesh,
        shardings=shardings,
    )
    for i in range(2):
        train_state, metrics = step(train_state, batch)
        report |= {f"update{i}/{name}": value for name, value in metrics.items()}
    params = jax.device_get(hosts.local(train_state.params))
    report["params"] = [float(np.abs(x).sum()) for x in jax.tree.leaves(params)]
    return report


def critic_report(mesh, score, train_state, forests):
    """Heads with a posterior, on the policy's hidden states."""
    options = CriticOptions(
        minibatch_size=32, capacity=256, uncertainty="posterior", posterior_features=8
    )
    critic = CriticLearner(HEADS, options, score, mesh=mesh)
    critic_state = born(critic, mesh, train_state.params)
    packed = [pack(trajectories) for trajectories in forests]
    hidden = [
        p.states_to_trajectories(critic.features(train_state, p.rows), (8, 5)) for p in packed
    ]
    masks = [p.state_mask((8, 5)) for p in packed]
    critic_state = critic.fit_standardisation(
        critic_state, np.concatenate(hidden), np.concatenate(masks)
    )
    evidence = join([evidence_of(*pair)[0] for pair in zip(forests, hidden)])
    report = {}
    for i in range(2):
        critic_state, metrics = critic.learn(
            critic_state, evidence, jax.random.key(i), packed=None, index=None
        )
        report |= {f"critic{i}/{name}": value for name, value in metrics.items()}
    beliefs = [critic.belief(critic_state, h).mean[mask] for h, mask in zip(hidden, masks)]
    report["belief"] = hosts.moments(np.concatenate(beliefs))
    return report


def backbone_report(mesh, model, train_state, forests):
    """A critic with a backbone of its own; all rows make one minibatch."""
    trajectories = [trajectory for part in forests for trajectory in part]
    critic = BackboneCritic(
        HEADS,
        BackboneOptions(micro_rows=MICRO_ROWS, epochs=2),
        model,
        train_state.params,
        mesh=mesh,
    )
    critic_state = born(critic, mesh, train_state.params)
    report = {}
    for i in range(2):
        packed = pack(trajectories)
        hidden = critic.features(dataclasses.replace(train_state, critic=critic_state), packed.rows)
        hidden = packed.states_to_trajectories(hidden, (8 * len(forests), 5))
        evidence, index = evidence_of(trajectories, hidden)
        critic_state, metrics = critic.learn(
            critic_state, evidence, jax.random.key(i), packed=packed, index=index
        )
        report |= {f"backbone{i}/{name}": value for name, value in metrics.items()}
    return report


LEARNER = (
    JOIN
    + """
import json, test_multihost
print("report", json.dumps(test_multihost.learner_report(), default=float), flush=True)
"""
)


def reports(outputs):
    for _, err, code in outputs:
        assert code == 0, err[-4000:]
    return [json.loads(out.split("report ")[1]) for out, _, _ in outputs]


@pytest.mark.slow
def test_two_processes_learn_what_one_learns():
    (want,) = reports(together(LEARNER, processes=1))
    first, second = reports(together(LEARNER))
    assert set(want) == set(first)
    for name, value in want.items():
        np.testing.assert_allclose(first[name], second[name], rtol=0, err_msg=name)
        np.testing.assert_allclose(first[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


# Exchanges.


def test_one_process_keeps_what_it_has():
    items = list(range(5))
    assert hosts.gather("mine") == ["mine"]
    assert hosts.deal(items) == hosts.undeal(items) == items
    assert hosts.split(7, turn=3) == hosts.total(7) == 7
    assert hosts.mean(0.1, 3) == 0.1
    values = np.array([1.0, 2.0, 6.0])
    assert hosts.moments(values) == (3, 3.0, 14.0)
    own, most = hosts.shares(np.array([2, 0, 1]), [3])
    assert own.tolist() == [2, 0, 1] and most == 3
    assert hosts.concatenate(values) is hosts.local(values) is hosts.replicate(values, None)
    hosts.agree("anything", values[0])


EXCHANGES = (
    JOIN
    + """
import numpy as np
with hosts.together():
    assert hosts.gather(index) == [0, 1]
    assert [len(x) for x in hosts.gather(bytes((3 << 20) + index))] == [3 << 20, (3 << 20) + 1]
    assert hosts.deal(range(5)) == ([0, 2, 4] if index == 0 else [1, 3])
    assert hosts.undeal(hosts.deal(range(5))) == [0, 1, 2, 3, 4]
    assert [hosts.split(7, turn) for turn in range(2)] == ([4, 3] if index == 0 else [3, 4])
    assert hosts.total(hosts.split(7)) == 7
    assert hosts.mean([1.0, 4.0][index], [2, 1][index]) == 2.0
    assert hosts.moments([[1.0], [2.0, 6.0]][index]) == (3, 3.0, 14.0)
    own, most = hosts.shares(np.array([3, 0, 4, 2]), [2, 3])
    assert own.tolist() == [[0], [1, 2, 0]][index] and most == 3
    joined = hosts.concatenate(np.arange(1, 3 + index))
    assert joined.tolist() == [1, 2, 0, 1, 2, 3]
    try:
        hosts.agree("config", index)
    except ValueError as error:
        assert "config differs between process 0 and processes [1]" in str(error)
    if index == 1:
        raise ValueError("the disk is full")
    hosts.barrier()
"""
)


def test_two_processes_exchange_and_fail_together():
    first, second = together(EXCHANGES, devices=2)
    assert second[2] != 0 and second[1].rstrip().endswith("ValueError: the disk is full")
    assert first[2] != 0
    assert "OtherProcessFailed: process 1 failed: ValueError: the disk is full" in first[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("localhost:1", None, 0), "num_processes missing"),
        (("localhost:1", 2, 2), r"process_id must lie in \[0, num_processes\), got 2 of 2"),
        (("localhost", 2, 0), "coordinator must be host:port"),
        (("localhost:1", 0, None), "asks the cluster"),
    ],
)
def test_bad_addresses_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        hosts.initialize(*arguments)


# Weights in files.


def check_weights(directory, elsewhere):
    """Loads into shards of all processes and saves from them; runs in every process."""
    read, written = collections.Counter(), []
    read_tensor, write_file = hf_config.Tensor.read, hf._write_file

    def counting(self, source, index, dtype):
        value = read_tensor(self, source, index, dtype)
        read[self.name] += value.size
        return value

    def noting(path, *arguments, mine):
        if mine:
            written.append(path.name)
        write_file(path, *arguments, mine=mine)

    hf_config.Tensor.read, hf._write_file = counting, noting
    mesh = sharding.make_mesh(1, 4, 2)
    report = {}
    for family, config in FAMILIES.items():
        read.clear()
        written.clear()
        shapes = jax.eval_shape(lambda key, c=config: models.init_params(c, key), KEY)
        places = sharding.shardings_of(shapes, mesh)
        loaded, params = hf.load_checkpoint(directory / family, shardings=places)
        assert loaded == config
        assert jax.tree.map(lambda x: x.sharding, params) == places
        for tensor in hf_config.tensors(config):
            if "fsdp" in hf._sharding_of(places, tensor.parameter).spec:  # lies across processes
                assert read[tensor.name] == math.prod(tensor.shape) // 2, tensor.name
        hf.save_checkpoint(
            directory / f"{family}-again", config, params, dtype="float32", max_file_bytes=4000
        )
        report[family] = list(written)
    with pytest.raises(ValueError, match=r"processes \[1\] do not see .*all processes share"):
        hf.save_checkpoint(elsewhere, config, params, dtype="float32")
    return report


WEIGHTS = (
    JOIN
    + """
import json, pathlib, test_multihost
directory = pathlib.Path(sys.argv[4])
report = test_multihost.check_weights(directory, directory / str(index) / "model")
print("report", json.dumps(report), flush=True)
"""
)


def test_two_processes_load_their_shards_and_write_their_share_of_the_files(tmp_path):
    for family, config in FAMILIES.items():
        params = make_params(config)
        hf.save_checkpoint(tmp_path / family, config, params, dtype="float32", max_file_bytes=4000)
    first, second = reports(together(WEIGHTS, tmp_path))
    for family in FAMILIES:
        want, got = (
            {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
            for name in (family, f"{family}-again")
        )
        assert got == want
        files = sorted(name for name in want if name.endswith(".safetensors"))
        assert sorted(first[family] + second[family]) == files
        assert abs(len(first[family]) - len(second[family])) <= 1


# Whole runs.


def train_together(workdir, port, steps):
    """Starts two processes of a tiny run; their logs lie beside the workdir."""
    started = []
    for i in range(2):
        log = open(workdir.with_name(f"log{i}.txt"), "ab")
        started.append(
            subprocess.Popen(
                [
                    sys.executable,
                    str(TESTS.parent / "scripts" / "train.py"),
                    f"--config={TESTS / 'tiny.py'}:focus",
                    f"--workdir={workdir}",
                    f"--coordinator=localhost:{port}",
                    "--num-processes=2",
                    f"--process-id={i}",
                    f"--config.steps={steps}",
                    "--config.learner.micro_rows=8",
                    "--config.mesh.fsdp=2",
                    "--config.warm_start.steps=40",
                    "--config.warm_start.episodes=100",
                ],
                env=environment(4),
                stdout=log,
                stderr=log,
            )
        )
        log.close()
    return started


def journals(workdir):
    names = ("rollouts.jsonl", "rollouts.1.jsonl")
    return [read_json_lines(workdir / name)[0] for name in names]


@pytest.mark.slow
def test_a_run_of_two_processes_ends_and_goes_on_after_kill_9(tmp_path, cache_dir):
    workdir, steps = tmp_path / "run", 3
    processes = train_together(workdir, free_port(), steps)

    def both_have_gone_on():
        return (workdir / "checkpoints" / "00000001" / "checkpoint.json").exists() and all(
            any(line["step"] == 1 for line in lines) for lines in journals(workdir)
        )

    while not both_have_gone_on() and all(p.poll() is None for p in processes):
        time.sleep(0.01)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    logs = [tmp_path / f"log{i}.txt" for i in range(2)]
    assert [p.wait() for p in processes] == [-signal.SIGKILL] * 2, logs[0].read_text()[-4000:]

    processes = train_together(workdir, free_port(), steps)
    codes = [p.wait(timeout=400) for p in processes]
    assert codes == [0, 0], "\n".join(log.read_text()[-4000:] for log in logs)
    assert "resuming at step" in logs[0].read_text()
    summary = json.loads((workdir / "summary.json").read_text())
    records = read_metrics(workdir)
    assert [record["step"] for record in records] == list(range(steps))
    config = json.loads((workdir / "config.json").read_text())
    for record in records:
        assert 0 < record["tokens/spent"] <= config["budget"]
    assert summary["max_step_tokens"] <= config["budget"]
    assert summary["replayed"]["rollouts"] > 0
    paid = [line for lines in journals(workdir) for line in lines]
    tokens = sum(sum(line["tokens"].values()) for line in paid)
    assert tokens == sum(summary["generated_tokens"].values()) + summary["replayed"]["tokens"]
    for lines in journals(workdir):
        assert {line["step"] for line in lines} == set(range(steps))
    # No two rollouts of an attempt share a name, whoever played them.
    names = [(line["attempt"], line["id"]) for line in paid]
    assert len(set(names)) == len(names)
