"""Adapters on slices that are not there: FLOPs, programs, memory and collectives, plans."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AbstractMesh, AxisType
from tpu_models import HYBRID, SMALL, count_products, fake_report, logits, shapes_of

from configs import tpu_pod
from focus.learner import packing, sharding, update
from focus.learner.adapters import Adapters
from focus.learner.scoring import policy_model
from focus.learner.state import init_state, make_optimizer
from focus.policy import layers, lora
from focus.policy import model as models
from focus.policy.lora import LoraConfig
from focus.run import experiment, learning
from focus.tpu import estimate, flops, plan
from focus.tpu.chips import GPUS, parse_topology
from focus.tpu.compile import Compiled, programs
from focus.tpu.report import report, to_markdown

# Narrow projections of the hybrid's have no rank of 16.
WIDE = ("gate_proj", "down_proj", "in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "o_proj")
EVERYWHERE = {
    "dense": (SMALL, LoraConfig(16)),
    "dense, two": (SMALL, LoraConfig(16, targets=("q_proj", "v_proj"))),
    "hybrid": (HYBRID, LoraConfig(16, targets=WIDE)),
}
each_model = pytest.mark.parametrize("name", EVERYWHERE)


def adapted(rank=4, backbone="policy"):
    config = tiny.get_config()
    config.mesh.data = 1
    config.learner.lora.rank = rank
    config.critic.backbone = backbone
    return config


def programs_of(config):
    mesh = sharding.make_mesh(**config.mesh.to_dict(), devices=jax.devices()[:1])
    return {program.name: program for program in programs(config, mesh)}


def sizes(config):
    """P and N."""
    model, setting = experiment.model_config(config), experiment.lora_config(config)
    return models.num_params(model), lora.num_adapter_params(model, setting)


# FLOPs.


def gradient_products(config, setting, length):
    """FLOPs of a token."""
    params, tokens = shapes_of(config, length)
    adapters = jax.eval_shape(lambda: lora.init_adapters(config, setting, jax.random.key(0)))

    def loss(adapters, params, tokens):
        return jnp.sum(logits(config, lora.attach(params, adapters), tokens) ** 2)

    return count_products(jax.grad(loss), adapters, params, tokens) / (2 * length)


@pytest.mark.parametrize(
    ("name", "remat"),
    [*(("dense", r) for r in layers.REMAT), *(("hybrid", r) for r in ("dots", "chunks"))]
    + [("dense, two", "full")],
)
def test_the_backward_formula_is_what_is_computed(name, remat):
    config, setting = EVERYWHERE[name]
    config, length = dataclasses.replace(config, attention="blockwise", remat=remat), 1024
    executed = flops.train_flops(config, length, setting)[1]
    # The update computes logits a second time, this loss does not.
    executed -= flops.row_flops(config, length).unembedding
    # Exact but for the convolutions and triangular solves of recurrent layers.
    exact = isinstance(config, type(SMALL))
    counted = gradient_products(config, setting, length)
    assert executed == pytest.approx(counted, rel=1e-9 if exact else 0.01)


@each_model
def test_the_forward_formula_is_what_is_computed(name):
    config, setting = EVERYWHERE[name]
    params, tokens = shapes_of(config, 128)
    adapters = jax.eval_shape(lambda: lora.init_adapters(config, setting, jax.random.key(0)))
    forward = functools.partial(logits, config)
    plain = count_products(forward, params, tokens)
    applied = count_products(forward, lora.attach(params, adapters), tokens) - plain
    formula = np.subtract(flops.score_flops(config, 128, setting), flops.score_flops(config, 128))
    assert applied / tokens.size == formula[0] == formula[1]
    assert formula[0] == 2 * lora.num_adapter_params(config, setting)


@each_model
def test_model_flops_are_needed_under_every_setting(name):
    config, setting = EVERYWHERE[name]
    for remat in layers.REMAT:
        config = dataclasses.replace(config, remat=remat)
        model, hardware = flops.train_flops(config, 512, setting)
        row = flops.row_flops(config, 512)
        weights, others = row.layers + row.unembedding, row.attention + row.recurrence
        assert model == 2 * weights + 3 * others + 6 * lora.num_adapter_params(config, setting)
        assert model <= hardware < flops.train_flops(config, 512)[1]


# Programs.


def test_programs_are_those_of_an_update(monkeypatch):
    """Down to the letter, for parameters that are there."""
    config = adapted()
    mesh = sharding.make_mesh(**config.mesh.to_dict(), devices=jax.devices()[:1])
    model, setting = experiment.model_config(config), experiment.lora_config(config)
    params = jax.device_get(models.init_params(model, jax.random.key(0)))
    adapters = Adapters(model, setting, params, 0, mesh=mesh)
    optimizer = make_optimizer(learning.optimizer_config(config), experiment.trained_axes(config))
    state, shardings = sharding.init_sharded(
        lambda: init_state(adapters.init(jax.random.key(0))[0], optimizer), mesh=mesh
    )
    found = {}

    def watched(name, make, outcome):
        """Reads what is run, and does not run it."""

        def made(*args):
            function = make(*args)

            def run(*args):
                found[name] = function.lower(*args).as_text()
                return outcome(function, *args)

            return run

        return made

    def no_gradient(function, params, gradient, *rest):
        _, *others = jax.eval_shape(function, params, gradient, *rest)
        # Not of 0: a step without a gradient is none.
        gradient = jax.tree.map(jnp.ones_like, gradient)
        return gradient, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), others)

    def no_step(function, params, opt_state, gradient):
        return params, opt_state

    accumulate, apply = update.jit_accumulate, update.jit_apply
    monkeypatch.setattr(update, "jit_accumulate", watched("gradient", accumulate, no_gradient))
    monkeypatch.setattr(update, "jit_apply", watched("optimizer", apply, no_step))
    train = update.make_policy_update(
        policy_model(model),
        optimizer,
        learning.loss_config(config),
        learning.update_config(config),
        mesh=mesh,
        shardings=shardings,
        frozen=adapters.frozen,
    )
    c = config.learner
    rows = packing.empty_rows(c.micro_rows, c.row_length, c.max_nodes, c.max_states)
    numbers = np.zeros(rows.tokens.shape, np.float32)
    train(state, update.PolicyBatch(rows, numbers == 0, numbers, numbers, numbers))
    compiled = programs_of(config)
    for name, text in found.items():
        assert compiled[name].lower().as_text() == text
    assert set(found) == {"gradient", "optimizer"}


def test_what_is_frozen_has_no_gradient():
    """Of the vocabulary's matrix, the largest: no product gives its shape."""
    for rank, gradients in ((0, 1), (4, 0)):
        text = programs_of(adapted(rank))["gradient"].lower().as_text()
        shapes = re.findall(r"dot_general .*-> tensor<([0-9x]+)xf32>", text)
        sides = [sorted(side for side in shape.split("x") if side != "1") for shape in shapes]
        assert sides.count(["32", "512"]) == gradients


def argument_bytes(program):
    arguments = jax.tree.leaves(program.lower().args_info)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arguments)


def test_memory_of_programs_is_that_of_adapters_and_their_base():
    config = adapted()
    params, numbers = sizes(config)
    found, plain = programs_of(config), programs_of(adapted(0))
    bytes_of = {name: argument_bytes(found[name]) for name in ("gradient", "optimizer", "score")}
    without = {name: argument_bytes(plain[name]) for name in bytes_of}
    assert bytes_of["gradient"] - without["gradient"] == 4 * params + 8 * numbers - 8 * params
    assert bytes_of["score"] - without["score"] == 4 * numbers
    assert bytes_of["optimizer"] - without["optimizer"] == 16 * (numbers - params)
    resident = {name: program.resident_bytes for name, program in found.items()}
    assert resident["gradient"] == resident["score"]
    # Moments wait while a gradient is computed, and the base while they move.
    moments = 8 * numbers + 8  # and two counters
    assert resident["optimizer"] - resident["gradient"] == 4 * params - moments
    assert resident["critic"] == 4 * params + 4 * numbers + moments


def test_a_critic_with_a_backbone_of_its_own_trains_all_of_it():
    config = adapted(backbone="own")
    params, numbers = sizes(config)
    critic, plain = (programs_of(c)["critic"] for c in (config, adapted(0, "own")))
    assert critic.hardware_flops == plain.hardware_flops
    assert critic.lower().as_text() == plain.lower().as_text()
    assert critic.resident_bytes - plain.resident_bytes == pytest.approx(
        12 * numbers + 4 * params - 12 * params, rel=0.01
    )
    assert programs_of(config)["gradient"].hardware_flops < critic.hardware_flops


def test_a_report_says_what_is_trained():
    config = adapted()
    params, numbers = sizes(config)
    slice_ = parse_topology("v5e:1x1")
    mesh = sharding.make_mesh(**config.mesh.to_dict(), devices=jax.devices()[:1])
    compiled = [Compiled(programs_of(config)["score"], 1, 1, 1, 1, (), ())]
    result = report("tiny", compiled, slice_, mesh, num_params=params, num_adapter_params=numbers)
    text = to_markdown(json.loads(json.dumps(result)), "command")
    assert f"Trained are adapters of {numbers:,} numbers ({numbers / params:.2%})" in text
    assert "adapters" not in to_markdown(
        report("tiny", compiled, slice_, mesh, num_params=params), "command"
    )


# Formulas.


def layout(config, topology="v5p:4x4x4", tensor=1):
    config.mesh.tensor = tensor
    return estimate.layout_of(config, parse_topology(topology))


def pod(rank=32, preset="qwen3_8b", **changes):
    config = tpu_pod.get_config(preset)
    config.learner.lora.rank = rank
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize("preset", ["qwen3_8b", "qwen3_5_9b"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_a_chip_holds_what_the_sharding_rules_give_it(preset, tensor):
    config = pod(preset=preset)
    chips = layout(config, tensor=tensor)
    model, setting = experiment.model_config(config), experiment.lora_config(config)
    mesh = AbstractMesh((1, chips.fsdp, tensor, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 4)
    shapes = lora.adapter_shapes(model, setting)
    parts = jax.tree.map(
        lambda leaf, place: math.prod(place.shard_shape(leaf.shape)),
        shapes,
        sharding.shardings_of(shapes, mesh),
    )
    held = estimate.trained_per_chip(model, chips, setting)
    assert held == sum(jax.tree.leaves(parts))
    state = estimate.memory_bytes(config, chips)["state"]
    assert state == 4 * models.num_params(model) / 64 + 16 * held
    run = estimate.run_seconds(config, chips, 1.0)["optimizer"]
    assert run.compute == 32 * held / chips.slice_.chip.hbm_bytes_per_s


def test_adapters_take_less_of_everything_than_all_weights():
    for rows in (64, 128):
        plain, config = (pod(rank, **{"learner.micro_rows": rows}) for rank in (0, 32))
        for tensor in (1, 2):
            chips = layout(config, tensor=tensor)
            assert estimate.peak_bytes(config, chips) < estimate.peak_bytes(plain, chips)
            before, now = (estimate.run_seconds(c, chips, 0.6) for c in (plain, config))
            for name in ("gradient", "optimizer"):
                assert now[name].total < before[name].total
            # Scoring has the adapters on top.
            assert before["score"].total < now["score"].total < 1.03 * before["score"].total


# As `COMPILED` in test_plan.py, of adapters of rank 32 on all projections.
COMPILED = {("qwen3_8b", "v5p:4x4x4"): (10.83, 0.101), ("qwen3_5_9b", "v5p:4x4x4"): (16.06, 0.109)}


@pytest.mark.parametrize(("preset", "topology"), COMPILED)
def test_formulas_agree_with_what_was_compiled(preset, topology):
    config = pod(preset=preset)
    chips = layout(config, topology)
    peak_gib, collectives_s = COMPILED[preset, topology]
    assert estimate.peak_bytes(config, chips) / 2**30 == pytest.approx(peak_gib, rel=0.25)
    run = estimate.run_seconds(config, chips, 1.0)["gradient"]
    assert run.collectives == pytest.approx(collectives_s, rel=0.25)


@pytest.mark.slow
def test_formulas_agree_with_a_small_slice():
    pytest.importorskip("libtpu", reason="compiles for TPUs; pip install -e '.[tpu]'")
    from focus.tpu.run import compile_config

    config = adapted(rank=8)
    config.model.update(dtype="bfloat16", d_model=256, head_dim=128, d_ff=512, num_layers=4)
    config.mesh.update(data=1, fsdp=4)
    config.critic.enabled = False
    config.branching.update(rule="none", base_fraction=1.0)
    config.credit.estimator, config.rollout.group_size = "grpo", 2
    result = compile_config(config, "v5e:2x2", name="tiny", only=("gradient", "optimizer"))
    gradient, optimizer = (result["programs"][name] for name in ("gradient", "optimizer"))
    _, numbers = sizes(config)
    assert result["num_adapter_params"] == numbers
    kinds = {c["kind"]: c for c in gradient["collectives"]}
    # The base is gathered twice, and the gradients of adapters are all that is added up.
    assert kinds["all-gather"]["count"] >= 2 * 7 * 4
    assert kinds["all-reduce"]["num_bytes"] == pytest.approx(2 * numbers, rel=0.01)
    assert "reduce-scatter" not in kinds
    chips = layout(config, "v5e:2x2")
    run = estimate.run_seconds(config, chips, 1.0)
    collectives = gradient["time"]["collective_s"]
    assert run["gradient"].collectives == pytest.approx(collectives, rel=0.1)
    # What stays in memory, padding of narrow arrays aside; much else of so small a model does not
    # come near it.
    state = estimate.memory_bytes(config, chips)["state"]
    assert gradient["argument_bytes"] + gradient["resident_bytes"] == pytest.approx(state, rel=0.05)
    assert run["optimizer"].compute == pytest.approx(optimizer["time"]["memory_s"], rel=0.2)


def test_gradients_of_the_base_are_never_moved():
    config = pod()
    params, numbers = sizes(config)
    chips = layout(config)
    rings = 6 * chips.slice_.chip.link_bytes_per_s  # three axes, both ways
    once = 2 * 63 / 64 / rings * 2  # bfloat16, and twice that in three dimensions
    run = estimate.run_seconds(config, chips, 1.0)
    low, high = (2 * params + k * numbers for k in (2, 4))
    assert low * once < run["gradient"].collectives < high * once
    assert params * once < run["score"].collectives < (params + numbers) * once


def test_a_critic_with_a_backbone_of_its_own_costs_what_it_does_without_adapters():
    own = {"critic.backbone": "own"}
    plain, config = pod(0, **own), pod(**own)
    chips = layout(config)
    runs, before = (estimate.run_seconds(c, chips, 0.6) for c in (config, plain))
    assert runs["critic"] == before["critic"] == before["gradient"]
    params, _ = sizes(config)
    state = estimate.memory_bytes(config, chips)["state"]
    held = estimate.trained_per_chip(
        experiment.model_config(config), chips, experiment.lora_config(config)
    )
    assert state == 20 * params / 64 + 12 * held
    seconds = {
        c.learner.lora.rank: plan.make_plan(c, chips, GPUS["H100"], servers=2).seconds
        for c in (plain, config)
    }
    assert seconds[32]["update"] < 0.9 * seconds[0]["update"]
    assert seconds[32]["critic"] == pytest.approx(seconds[0]["critic"], rel=0.01)


def test_adapters_are_pushed_alone_if_the_run_says_so():
    pushes = {}
    for push in ("weights", "adapter"):
        config = pod(**{"rollout.push": push})
        pushes[push] = plan.make_plan(config, layout(config), GPUS["H100"]).seconds["push"]
    params, numbers = sizes(pod())
    assert pushes["weights"] == pytest.approx(2 * 2 * params / 2e9)
    assert pushes["adapter"] == pytest.approx(2 * 4 * numbers / 2e9)


def test_a_search_finds_smaller_slices_for_adapters():
    smallest = {
        rank: plan.search(pod(rank, "qwen3_32b"), parse_topology("v5p:4x4x4").chip, GPUS["H100"])[0]
        for rank in (0, 32)
    }
    chips = {rank: found.layout.slice_.num_chips for rank, found in smallest.items()}
    assert chips[32] < chips[0]


def test_a_report_of_other_adapters_is_refused():
    programs = dict.fromkeys(("gradient", "optimizer", "score"), (3.0, 10))
    result = fake_report(pod(), layout(pod()), programs)
    result["num_adapter_params"] = sizes(pod())[1]

    def make(config, result):
        return plan.make_plan(config, layout(config), GPUS["H100"], report=result)

    assert make(pod(), result).peak_bytes == 10
    with pytest.raises(ValueError, match=r"trains adapters of \d+ numbers .* trains all weights"):
        make(pod(0), result)
    with pytest.raises(ValueError, match=f"of {sizes(pod(8))[1]} numbers; compile with the same"):
        make(pod(8), result)
    del result["num_adapter_params"]
    with pytest.raises(ValueError, match="of a run that trains all weights"):
        make(pod(), result)
    with pytest.raises(ValueError, match="the report lacks critic"):
        make(pod(0, **{"critic.backbone": "own"}), result)
