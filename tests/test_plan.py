"""Planning: the formulas, their laws, and a run on this machine held against them."""

import dataclasses
import io
import json
import math
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import rich.console
from conftest import REPOSITORY
from tpu_models import fake_report

from configs import quickstart, tpu_pod
from focus.learner import packing, sharding
from focus.learner.scoring import make_score_fn, policy_model
from focus.learner.state import init_state, make_optimizer
from focus.learner.update import PolicyBatch, make_policy_update
from focus.policy import model as models
from focus.policy import transformer
from focus.run import experiment, learning
from focus.tpu import estimate, flops, plan
from focus.tpu.chips import GPUS, TPUS, Chip, Slice, parse_topology
from focus.tpu.run import compile_config

GPU = GPUS["H100"]
REPORTS = sorted((REPOSITORY / "docs" / "tpu").glob("*.json"))


def layout(config, topology="v5p:4x4x4"):
    return estimate.layout_of(config, parse_topology(topology))


def make(config=None, topology="v5p:4x4x4", **options):
    config = tpu_pod.get_config("qwen3_8b") if config is None else config
    return plan.make_plan(config, layout(config, topology), GPU, **options)


def test_bytes_of_known_models():
    model = experiment.model_config(tpu_pod.get_config("qwen3_8b"))
    assert plan.weight_bytes(model) == pytest.approx(2 * 8.19e9, rel=0.01)
    assert plan.kv_bytes(model) == 2 * 36 * 8 * 128 * 2
    hybrid = experiment.model_config(tpu_pod.get_config("qwen3_5_9b"))
    assert plan.weight_bytes(hybrid) == pytest.approx(2 * 8.95e9, rel=0.01)
    assert plan.kv_bytes(hybrid) == 2 * 8 * 4 * 256 * 2  # eight layers of attention


# The learner's formulas.


def test_the_update_takes_what_is_executed():
    config = tpu_pod.get_config("qwen3_8b")
    model, chips = experiment.model_config(config), layout(config)
    hardware = flops.train_flops(model, config.learner.row_length)[1]
    run = estimate.run_seconds(config, chips, 0.6)
    rate = 64 * TPUS["v5p"].flops_per_s * 0.6
    assert run["gradient"].compute == pytest.approx(2**20 * hardware / rate)
    # Two minibatches of whole micro-batches of 2^20 tokens.
    micro_batches = 2 * -(-plan.row_tokens(config, plan.Assumptions()) // 2**21)
    assert make(config).seconds["update"] == pytest.approx(
        micro_batches * run["gradient"].total + 2 * run["optimizer"].total
    )


def test_collectives_of_a_mesh():
    config = tpu_pod.get_config("qwen3_8b")
    slice_ = parse_topology("v5p:4x4x4")
    whole, halves = (
        estimate.run_seconds(config, estimate.Layout(slice_, tensor, 64), 1.0) for tensor in (1, 2)
    )
    # Three closed rings bring in the weights: twice for the products, and their gradients go out;
    # in three dimensions, at twice the bytes.
    weights = 2 * models.num_params(experiment.model_config(config))
    assert whole["gradient"].collectives == pytest.approx(
        2 * 3 * weights * 63 / 64 / (6 * slice_.chip.link_bytes_per_s)
    )
    # A layer of two chips: each gathers the other's half of the activations four times.
    activations = 2 * 64 / 32 * 16384 * 4096 / 2 / slice_.chip.link_bytes_per_s
    halved = 2 * weights / 2 * 31 / 32 / (5 * slice_.chip.link_bytes_per_s)
    assert halves["score"].collectives == pytest.approx(halved + 4 * 36 * activations)
    assert whole["gradient"].compute == halves["gradient"].compute


def test_what_a_chip_holds():
    config = tpu_pod.get_config("qwen3_8b")
    parts = estimate.memory_bytes(config, layout(config))
    assert parts["state"] == pytest.approx(16 * 8.19e9 / 64, rel=0.01)
    assert parts["activations"] == 2 * 16384 * 4096 * 36
    config.model.remat = "dots"
    outputs = 4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096
    assert estimate.memory_bytes(config, layout(config))["activations"] == pytest.approx(
        parts["activations"] + 2 * 16384 * 36 * outputs
    )
    config.critic.backbone = "own"
    assert estimate.memory_bytes(config, layout(config))["state"] == parts["state"] * 28 / 16


def test_a_layout_that_does_not_fit_its_chips_is_refused():
    config = tpu_pod.get_config("qwen3_8b")
    config.learner.micro_rows = 60
    with pytest.raises(ValueError, match="micro_rows=60 .* multiple of 64"):
        layout(config)
    config.mesh.fsdp = 7
    with pytest.raises(ValueError, match="does not make 64 chips"):
        layout(config)
    config.mesh.sequence = 2
    with pytest.raises(ValueError, match="set mesh.sequence=1"):
        layout(config)


# GiB at the peak and seconds of collectives of a gradient, as scripts/compile_tpu.py gave them with
# jax 0.10.2 and libtpu 0.0.52.
COMPILED = {("qwen3_8b", "v5p:4x4x4"): (13.03, 0.155), ("qwen3_5_9b", "v5p:4x4x4"): (17.40, 0.160)}


@pytest.mark.parametrize(("preset", "topology"), COMPILED)
def test_formulas_agree_with_what_was_compiled(preset, topology):
    config = tpu_pod.get_config(preset)
    chips = layout(config, topology)
    peak_gib, collectives_s = COMPILED[preset, topology]
    assert estimate.peak_bytes(config, chips) / 2**30 == pytest.approx(peak_gib, rel=0.25)
    run = estimate.run_seconds(config, chips, 1.0)["gradient"]
    assert run.collectives == pytest.approx(collectives_s, rel=0.25)


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.stem)
def test_formulas_agree_with_compiled_programs(path):
    """Within a factor of 1.5 for memory and 2 for collectives; arithmetic is the same formula."""
    report = json.loads(path.read_text())
    config = tpu_pod.get_config(report["config"])
    chips = layout(config, report["topology"])
    assert report["mesh"] == {"data": 1, "fsdp": chips.fsdp, "tensor": chips.tensor, "sequence": 1}
    programs = report["programs"]
    peak = programs["gradient"]["peak_bytes"]
    assert peak / 1.5 < estimate.peak_bytes(config, chips) < 1.5 * peak
    for name, run in estimate.run_seconds(config, chips, 1.0).items():
        compiled = programs[name]["time"]
        if name == "optimizer":
            assert run.compute == pytest.approx(compiled["memory_s"], rel=0.2)
        else:
            assert run.compute == pytest.approx(compiled["compute_s"])
            assert run.collectives / 2 < compiled["collective_s"] < 2 * run.collectives


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.stem)
def test_a_plan_from_a_report_is_near_the_one_from_formulas(path):
    report = json.loads(path.read_text())
    config = tpu_pod.get_config(report["config"])
    compiled = make(config, report["topology"], servers=2, report=report)
    chips = layout(config, report["topology"])
    if compiled.peak_bytes > plan.USABLE_MEMORY * chips.slice_.chip.hbm_bytes:
        # Formulas leave a tenth of the memory free; a compiler's own count need not.
        with pytest.raises(ValueError, match="use more chips"):
            make(config, report["topology"], servers=2)
        return
    formulas = make(config, report["topology"], servers=2)
    assert compiled.learner_s == pytest.approx(formulas.learner_s, rel=0.2)
    assert compiled.seconds["decode"] == formulas.seconds["decode"]


def a_report(**options):
    config = tpu_pod.get_config("qwen3_8b")
    programs = {"gradient": (3.0, 10), "optimizer": (0.0, 10), "score": (0.6, 20)}
    return fake_report(config, layout(config), programs) | options


def test_a_compile_report_replaces_the_formulas():
    result = make(report=a_report())
    micro_batches = -(-result.row_tokens // 2**20)
    assert result.seconds["score"] == pytest.approx(1.5 * micro_batches)  # at 0.6 of the peak
    assert result.seconds["update"] == pytest.approx(5.5 * micro_batches + 1.5 * 2)
    assert result.peak_bytes == 20


def test_a_report_of_something_else_is_refused():
    with pytest.raises(ValueError, match="report is of v5e:8x8"):
        make(report=a_report(topology="v5e:8x8"))
    report = a_report()
    del report["programs"]["score"]
    with pytest.raises(ValueError, match="lacks score"):
        make(report=report)


@pytest.mark.parametrize(
    "preset,changes,message",
    [
        ("qwen3_8b", {}, "parameters: 8953803264 in the report"),
        ("qwen3_5_9b", {"mesh.tensor": 4, "mesh.fsdp": 16}, "mesh.fsdp: 64 in the report and 16"),
        ("qwen3_5_9b", {"learner.micro_rows": 256}, "tokens of a micro-batch: 1048576"),
        ("qwen3_5_9b", {"critic.backbone": "own"}, "tokens of the critic's: 0 in the report"),
    ],
)
def test_a_report_of_another_run_is_refused(preset, changes, message):
    report = json.loads(next(p for p in REPORTS if "9b_v5p" in p.name).read_text())
    config = tpu_pod.get_config(preset)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        make(config, report=report)


def test_adapters_are_pushed_where_there_are_any():
    config = tpu_pod.get_config("qwen3_8b")
    config.rollout.push = "adapter"
    with pytest.raises(ValueError, match="learner.lora.rank >= 1"):
        make(config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rollout.push", "adaptor", "rollout.push must be one of weights, adapter; got 'adaptor'"),
        ("learner.minibatches", 0, "learner.minibatches must be >= 1, got 0"),
        ("mesh.tensor", 0, "mesh.tensor must be >= 1, or -1 for what is left; got 0"),
        ("learner.lora.rank", 9999, "learner.lora.rank 9999 is more than q_proj .* at most 4096"),
    ],
)
def test_no_plan_is_made_for_a_run_that_would_be_refused(key, value, message):
    command = [sys.executable, "scripts/plan.py", "--config=configs/tpu_pod.py:qwen3_8b"]
    command.append(f"--config.{key}={value}")
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stdout
    assert re.search(message, done.stderr), done.stderr
    config = tpu_pod.get_config("qwen3_8b")
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=message):
        compile_config(config, "v5p:4x4x4")


def test_a_plan_does_not_ask_this_machine_for_its_devices():
    config = tpu_pod.get_config("qwen3_8b")
    config.rollout.devices = 4
    experiment.validate(config, has_servers=False)


# Both sides.


def test_the_fewest_servers_leave_no_chip_waiting():
    result = make(topology="v5p:4x4x8", config=larger(8))
    assert result.servers > 1
    assert result.waits[0] == "servers"
    fewer = make(topology="v5p:4x4x8", config=larger(8), servers=result.servers - 1)
    assert fewer.waits[0] == "chips"
    assert fewer.overlapped_s > result.overlapped_s


def larger(factor):
    """More tokens in a step, and 128 rows at a time."""
    config = tpu_pod.get_config("qwen3_8b")
    config.budget *= factor
    config.learner.micro_rows = 128
    return config


def test_where_no_number_of_servers_is_enough_few_are_asked_for():
    config = tpu_pod.get_config("qwen3_8b")
    config.rollout.episode_tokens = config.budget // 3  # one at a time
    result = make(config)
    assert result.waits[0] == "chips"
    most = make(config, servers=plan.Assumptions().max_servers)
    assert result.servers < 10
    assert result.rollout_s <= 1.1 * most.rollout_s


def test_more_of_anything_is_never_slower():
    seconds = [make(servers=n).serial_s for n in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    small, large = make(larger(4), "v5p:4x4x8", servers=4), make(larger(40), "v5p:4x4x8", servers=4)
    for phase in ("prefill", "score", "update"):
        assert large.seconds[phase] == pytest.approx(10 * small.seconds[phase], rel=0.06)
    assert large.seconds["push"] == small.seconds["push"]
    # More rollouts at a time share each reading of the weights.
    assert small.seconds["decode"] < large.seconds["decode"] < 10 * small.seconds["decode"]


def test_decoding_is_bound_by_memory_and_large_batches_pay():
    config = tpu_pod.get_config("qwen3_8b")
    config.rollout.max_running = 1
    alone, batch = plan.rollout_seconds(config, GPU, 1, plan.Assumptions())
    assert batch == 1
    model = experiment.model_config(config)
    reading = plan.weight_bytes(model) + config.model.max_context / 2 * plan.kv_bytes(model)
    per_token = reading / (8 * GPU.hbm_bytes_per_s * 0.6)
    assert alone["decode"] == pytest.approx(config.budget * per_token)
    together, _ = plan.rollout_seconds(tpu_pod.get_config("qwen3_8b"), GPU, 1, plan.Assumptions())
    assert together["decode"] < alone["decode"] / 10


def test_rounds_of_branches_are_played_one_after_the_other():
    config = tpu_pod.get_config("qwen3_8b")
    config.budget //= 2
    rollouts = config.budget / config.rollout.episode_tokens
    _, batch = plan.rollout_seconds(config, GPU, 1, plan.Assumptions())
    assert batch == math.ceil(rollouts / (1 + config.branching.rounds))
    config.branching.rule = "none"
    _, batch = plan.rollout_seconds(config, GPU, 1, plan.Assumptions())
    assert batch == math.ceil(rollouts)


def test_a_critic_with_a_backbone_of_its_own_costs_as_much_as_a_policy():
    config = tpu_pod.get_config("qwen3_8b")
    config.critic.backbone = "own"
    result = make(config)
    assert result.seconds["critic"] > config.critic.epochs * result.seconds["update"]
    assert result.peak_bytes > make().peak_bytes


def test_what_cannot_hold_the_model_is_refused():
    config = tpu_pod.get_config("qwen3_32b")
    config.learner.micro_rows = 4
    with pytest.raises(ValueError, match=r"v5p:2x2x1 .* needs .* for state.*use more chips"):
        make(config, "v5p:2x2x1")
    small = dataclasses.replace(GPU, hbm_bytes=75e9)
    with pytest.raises(ValueError, match="no room for a context of 16384"):
        plan.rollout_seconds(config, small, 1, plan.Assumptions(gpus_per_server=1))
    chip = dataclasses.replace(TPUS["v5e"], slices=("2x2",))
    with pytest.raises(ValueError, match="no slice of v5e holds the run.*2x2"):
        plan.search(config, chip, GPU)


# The search.


def test_a_search_finds_the_fastest_layout_of_every_slice():
    config = tpu_pod.get_config("qwen3_8b")
    plans = plan.search(config, TPUS["v5p"], GPU, servers=2)
    chips = [p.layout.slice_.num_chips for p in plans]
    assert chips == sorted(chips) and 64 in chips
    found = next(p for p in plans if p.layout.slice_.name == "v5p:4x4x4")
    assert found.learner_s <= make(config, servers=2).learner_s
    assert all(p.peak_bytes < TPUS["v5p"].hbm_bytes for p in plans)
    # Slices that are too small for the state are left out.
    assert plan.search(config, TPUS["v5e"], GPU)[0].layout.slice_.num_chips > 16


def test_the_choice_is_the_fastest_that_is_not_much_dearer():
    plans = plan.search(tpu_pod.get_config("qwen3_8b"), TPUS["v5p"], GPU)
    cheapest = min(p.device_s for p in plans)
    assert plan.choose(plans, 0.0).device_s == cheapest
    chosen = plan.choose(plans, 0.25)
    assert chosen.device_s <= 1.25 * cheapest
    assert all(
        p.overlapped_s >= chosen.overlapped_s for p in plans if p.device_s <= 1.25 * cheapest
    )
    fastest = min(plans, key=lambda p: p.overlapped_s)
    assert plan.choose(plans, 1e9) is fastest


def test_more_tokens_want_more_chips():
    def wanted(budget):
        config = tpu_pod.get_config("qwen3_8b")
        config.budget = budget
        return plan.choose(plan.search(config, TPUS["v5p"], GPU), 0.25).layout.slice_.num_chips

    sizes = [wanted(budget) for budget in (100_000, 2_000_000, 40_000_000)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_the_tables_say_who_waits():
    config = tpu_pod.get_config("qwen3_8b")
    plans = plan.search(config, TPUS["v5p"], GPU)
    chosen = plan.choose(plans, 0.25)
    console = rich.console.Console(width=120, record=True, file=io.StringIO())
    plan.show_search(plans, chosen, config.budget, GPU, console)
    plan.show(chosen, config.budget, GPU, console)
    text = console.export_text()
    (marked,) = [line for line in text.splitlines() if "->" in line]
    assert chosen.layout.slice_.name in marked and chosen.waits[0] in marked
    for phase in chosen.seconds:
        assert phase in text
    assert f"the {chosen.waits[0]} wait {chosen.waits[1]:.0%}" in text.replace("\n", " ")


# This machine.


def test_a_measured_step():
    """Seconds of an update, predicted from the arithmetic per second that scoring reaches here.

    The policy and the rows are the quickstart's. The stated factor is 3, either way: the backward
    pass, the optimiser and a busy machine are in it.
    """
    config = quickstart.get_config()
    model, c = experiment.model_config(config), config.learner
    mesh = sharding.make_mesh(data=1, devices=jax.devices()[:1])
    optimizer = make_optimizer(learning.optimizer_config(config), experiment.trained_axes(config))
    state, shardings = sharding.init_sharded(
        lambda: init_state(transformer.init_params(model, jax.random.key(0)), optimizer), mesh=mesh
    )
    policy = policy_model(model)
    score = make_score_fn(policy, mesh=mesh, micro_rows=c.micro_rows)
    update = make_policy_update(
        policy,
        optimizer,
        learning.loss_config(config),
        learning.update_config(config),
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
    alone = estimate.Layout(Slice(chip, (1,)), tensor=1, micro_rows=c.micro_rows)
    predicted = plan.learner_seconds(config, alone, rows.tokens.size, 1.0)
    assert predicted["score"] == pytest.approx(measured["score"])
    assert predicted["update"] / 3 < measured["update"] < 3 * predicted["update"]
