"""Planning: the formulas, their laws, and a run on this machine held against them."""

import dataclasses
import time

import jax
import numpy as np
import pytest

from configs import quickstart, tpu_pod
from focus import experiment
from focus.learner import packing, sharding
from focus.learner.state import init_state, make_optimizer
from focus.learner.update import (
    PolicyBatch,
    make_policy_update,
    make_score_fn,
    policy_model,
)
from focus.policy import transformer
from focus.tpu import flops, plan
from focus.tpu.chips import GPUS, TPUS, Chip

CHIP, GPU = TPUS["v5p"], GPUS["H100"]


def make(config=None, **options):
    config = tpu_pod.get_config("qwen3_8b") if config is None else config
    return plan.make_plan(config, CHIP, GPU, **{"chips": 64} | options)


def test_bytes_of_a_known_model():
    model = experiment.model_config(tpu_pod.get_config("qwen3_8b"))
    assert plan.weight_bytes(model) == pytest.approx(2 * 8.19e9, rel=0.01)
    assert plan.kv_bytes(model) == 2 * 36 * 8 * 128 * 2


def test_the_update_takes_what_the_compile_reports_flops_say():
    config = tpu_pod.get_config("qwen3_8b")
    result = make(config)
    model = experiment.model_config(config)
    hardware = flops.train_flops(model, config.learner.row_length)[1]
    # Two minibatches of whole micro-batches of 2^20 tokens.
    tokens = 2 * -(-result.row_tokens // 2**21) * 2**20
    expected = tokens * hardware / (64 * CHIP.flops_per_s * 0.6)
    assert result.seconds["update"] == pytest.approx(expected)


def test_a_compile_report_replaces_the_formulas():
    config = tpu_pod.get_config("qwen3_8b")
    programs = {
        "gradient": {"tokens": 2**20, "time": {"total_s": 3.0}},
        "optimizer": {"tokens": 0, "time": {"total_s": 0.1}},
        "score": {"tokens": 2**20, "time": {"total_s": 0.7}},
    }
    result = make(config, report={"chips": 64, "programs": programs})
    micro_batches = -(-result.row_tokens // 2**20)
    assert result.seconds["score"] == pytest.approx(0.7 * micro_batches)
    assert result.seconds["update"] == pytest.approx(3.0 * micro_batches + 0.1 * 2)
    with pytest.raises(ValueError, match="report is of 32 chips"):
        make(config, report={"chips": 32, "programs": programs})


def test_the_fewest_servers_leave_no_chip_waiting():
    result = make()
    assert result.waits[0] == "servers"
    fewer = make(servers=result.servers - 1)
    assert fewer.waits[0] == "chips"
    assert fewer.overlapped_s > result.overlapped_s


def test_more_of_anything_is_never_slower():
    for option in ("chips", "servers"):
        seconds = [make(**{"servers": 4} | {option: n}).serial_s for n in (64, 128, 256)]
        assert seconds == sorted(seconds, reverse=True)
    config = tpu_pod.get_config("qwen3_8b")
    config.budget *= 10
    small, large = make(servers=4), make(config, servers=4)
    for phase in ("decode", "prefill", "score", "update"):
        assert large.seconds[phase] == pytest.approx(10 * small.seconds[phase], rel=0.06)
    assert large.seconds["push"] == small.seconds["push"]


def test_decoding_is_bound_by_memory_and_large_batches_pay():
    config = tpu_pod.get_config("qwen3_8b")
    config.rollout.max_running = 1
    alone, batch = plan.rollout_seconds(config, GPU, 1, plan.Assumptions())
    assert batch == 1
    model = experiment.model_config(config)
    reading = plan.weight_bytes(model) + config.model.max_context / 2 * plan.kv_bytes(model)
    per_token = reading / (8 * GPU.hbm_bytes_per_s * 0.6)
    assert alone["decode"] == pytest.approx(config.budget * per_token)
    together, _ = plan.rollout_seconds(tpu_pod.get_config(), GPU, 1, plan.Assumptions())
    assert together["decode"] < alone["decode"] / 10


def test_a_critic_with_a_backbone_of_its_own_costs_as_much_as_a_policy():
    config = tpu_pod.get_config("qwen3_8b")
    config.critic.backbone = "own"
    result = make(config)
    assert result.seconds["critic"] > config.critic.epochs * result.seconds["update"]
    assert plan.fewest_chips(config, CHIP) > plan.fewest_chips(tpu_pod.get_config(), CHIP)


def test_what_cannot_hold_the_model_is_refused():
    with pytest.raises(ValueError, match="use at least 3"):
        make(chips=2)
    with pytest.raises(ValueError, match="no room for a context of 16384"):
        plan.make_plan(
            tpu_pod.get_config("qwen3_32b"),
            CHIP,
            dataclasses.replace(GPU, hbm_bytes=75e9),
            chips=128,
            assumptions=plan.Assumptions(gpus_per_server=1),
            servers=1,
        )


def test_a_measured_step():
    """Seconds of an update, predicted from the arithmetic per second that scoring reaches here.

    The policy and the rows are the quickstart's. The stated factor is 3, either way: the backward
    pass, the optimiser and a busy machine are in it.
    """
    config = quickstart.get_config()
    model, c = experiment.model_config(config), config.learner
    mesh = sharding.make_mesh(data=1, devices=jax.devices()[:1])
    optimizer = make_optimizer(experiment.optimizer_config(config))
    state, shardings = sharding.init_sharded(
        lambda: init_state(transformer.init_params(model, jax.random.key(0)), optimizer), mesh=mesh
    )
    policy = policy_model(model)
    score = make_score_fn(policy, mesh=mesh, micro_rows=c.micro_rows)
    update = make_policy_update(
        policy,
        optimizer,
        experiment.loss_config(config),
        experiment.update_config(config),
        mesh=mesh,
        shardings=shardings,
    )
    rows = packing.empty_rows(3 * c.micro_rows, c.row_length, c.max_nodes, c.max_states)
    numbers = np.zeros(rows.tokens.shape, np.float32)
    batch = PolicyBatch(rows, numbers == 0, numbers, numbers, numbers)
    seconds = {"score": [], "update": []}
    for _ in range(3):  # the first time compiles
        began = time.perf_counter()
        score(state.params, rows)
        scored = time.perf_counter()
        state, _ = update(state, batch)
        jax.block_until_ready(state.params)
        seconds["score"].append(scored - began)
        seconds["update"].append(time.perf_counter() - scored)
    measured = {name: min(s[1:]) for name, s in seconds.items()}
    arithmetic = rows.tokens.size * flops.score_flops(model, c.row_length)[1]
    chip = Chip("cpu", arithmetic / measured["score"], 2**34, 1e10, 1e9, wrap=1)
    predicted = plan.learner_seconds(config, chip, 1, rows.tokens.size, 1.0)
    assert predicted["score"] == pytest.approx(measured["score"])
    assert predicted["update"] / 3 < measured["update"] < 3 * predicted["update"]
