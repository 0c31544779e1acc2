"""Two real processes with four devices each do what one process with eight does."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from random_trajectories import make_forest

from focus.critic.head import CriticConfig
from focus.journal import read_json_lines
from focus.learner import hosts, losses, sharding, state, update
from focus.learner.backbone import BackboneCritic, BackboneOptions
from focus.learner.batches import credit_batch
from focus.learner.critic import CriticLearner, CriticOptions
from focus.learner.evidence import make_evidence
from focus.learner.packing import pack_trajectories
from focus.metrics import read_metrics
from focus.policy import transformer

TESTS = Path(__file__).parent
MICRO_ROWS = 8
CONFIG = transformer.ModelConfig(
    vocab_size=16,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=32,
    max_context=64,
)
HEADS = CriticConfig(feature_dim=16, num_members=8, hidden_dim=8)


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def environment(devices):
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
        "OPENBLAS_NUM_THREADS": "1",
    }


def together(source, *arguments, processes=2, devices=8, wait=True):
    """Runs a program in several processes that share `devices`; their outputs, or the processes."""
    address = f"localhost:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", source, address, str(processes), str(i), *map(str, arguments)],
            env=environment(devices // processes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    if not wait:
        return started
    try:
        return [(*p.communicate(timeout=400), p.returncode) for p in started]
    finally:
        for process in started:
            process.kill()


JOIN = """
import sys
from focus.learner import hosts
address, count, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if count > 1:
    hosts.initialize(address, count, index)
"""


# The learner.


def forest(seed):
    """Rollouts with ids of their own, that end well or badly by their first token."""

    def renamed(name):
        return name and f"{seed}-{name}"

    return [
        dataclasses.replace(
            t,
            id=renamed(t.id),
            parent=renamed(t.parent),
            outcome=float(t.states[0].prompt_ids[0] % 2),
        )
        for t in make_forest(seed, 3, 5)
    ]


def join(trees):
    return jax.tree.map(lambda *x: np.concatenate(x), *trees)


def pack(trajectories):
    return pack_trajectories(
        trajectories, row_length=32, max_nodes=6, max_states=12, rows_multiple=MICRO_ROWS // 2
    )


def learner_report():
    """Numbers that the learner gives on two forests, of which a process may hold one or both."""
    forests = [forest(0), forest(1)]
    forests = forests if hosts.count() == 1 else [forests[hosts.index()]]
    mesh = sharding.make_mesh(-1, 2, 2)
    model = update.policy_model(CONFIG)
    optimizer = state.make_optimizer(state.OptimizerConfig(learning_rate=1e-2))
    score = update.make_score_fn(model, mesh=mesh, micro_rows=MICRO_ROWS)

    def init(key):
        return state.init_state(transformer.init_params(CONFIG, key), optimizer)

    train_state, shardings = sharding.init_sharded(init, jax.random.key(0), mesh=mesh)
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


def evidence_of(trajectories, hidden):
    batch = credit_batch(
        trajectories, num_segments=4, num_tokens=64, num_rows=len(hidden), num_continuations=8
    )
    return make_evidence(
        trajectories,
        batch,
        hidden,
        np.zeros(hidden.shape[:2], np.float32),
        size=64,
        num_folds=1,
        truncation="bootstrap",
        discount=1.0,
        lambda_=1.0,
    )


def born(critic, mesh, params):
    """A critic's first state, and where it lies."""
    shapes = jax.eval_shape(critic.init, jax.random.key(1), params)
    places = sharding.shardings_of({"critic": shapes}, mesh)["critic"]
    return jax.jit(critic.init, out_shardings=places)(jax.random.key(1), params)


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
                    "--num_processes=2",
                    f"--process_id={i}",
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
