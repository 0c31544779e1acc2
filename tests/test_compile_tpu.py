"""Ahead-of-time compilation: what is read from programs, FLOP formulas, and whole slices."""

import dataclasses
import functools
import itertools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tpu_models import HYBRID, SMALL, count_products, logits, shapes_of

from focus.learner import sharding
from focus.policy import gated_delta, layers
from focus.policy import model as models
from focus.run import experiment
from focus.tpu import flops, hlo
from focus.tpu.chips import TPUS, Slice, parse_topology
from focus.tpu.compile import DoesNotFit, compile_program, programs
from focus.tpu.report import collective_seconds, report, to_markdown

REPOSITORY = Path(__file__).parent.parent

# Two nested loops, the inner one inside of a call: 5 x 3 executions of the gather. The trip count
# of one is noted beside it, that of the other is in its condition.
LOOPS = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner_condition (p.1: (s32[], f32[8,4])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) parameter(0)
  %limit.1 = s32[]{:T(128)} constant(3)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %lt.1 = pred[] compare(%i.1, %limit.1), direction=LT
}

%inner_body (p.2: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.2 = (s32[], f32[8,4]{1,0}) parameter(0)
  %x.2 = f32[8,4]{1,0:T(8,128)S(1)} get-tuple-element(%p.2), index=1
  %g.2 = f32[32,4]{1,0:T(8,128)} all-gather(%x.2), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  ROOT %t.2 = (s32[], /*index=1*/f32[8,4]{1,0}) tuple(%p.2, %g.2)
}

%called (p.3: f32[8,4]) -> f32[8,4] {
  %p.3 = f32[8,4]{1,0} parameter(0)
  %loop.3 = (s32[], f32[8,4]{1,0}) while(%p.3), condition=%inner_condition, body=%inner_body
  ROOT %r.3 = f32[8,4]{1,0} get-tuple-element(%loop.3), index=1
}

%outer_condition (p.4: (s32[], f32[8,4])) -> pred[] {
  %p.4 = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %never.4 = pred[] custom-call(%p.4), custom_call_target="more"
}

%outer_body (p.5: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.5 = (s32[], f32[8,4]{1,0}) parameter(0)
  %call.5 = f32[8,4]{1,0} call(%p.5), to_apply=%called
  %scatter.5 = bf16[16,4]{1,0} fusion(%call.5), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %t.5 = (s32[], f32[8,4]{1,0}) tuple(%p.5, %call.5)
}

%all-reduce-scatter.1 (p.6: bf16[64,4]) -> bf16[16,4] {
  %p.6 = bf16[64,4]{1,0} parameter(0)
  %ar.6 = bf16[64,4]{1,0} all-reduce(%p.6), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
  ROOT %ds.6 = bf16[16,4]{1,0} dynamic-slice(%ar.6), dynamic_slice_sizes={16,4}
}

ENTRY %main (arg: f32[8,4]) -> f32[8,4] {
  %arg = f32[8,4]{1,0} parameter(0)
  %loop.7 = (s32[], f32[8,4]{1,0}) while(%arg), condition=%outer_condition, body=%outer_body, \
backend_config={"known_trip_count":{"n":"5"}}
  %s.7 = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[]) collective-permute-start(%arg), \
source_target_pairs={{0,1},{1,0}}
  %d.7 = f32[8,4]{1,0} collective-permute-done(%s.7)
  ROOT %ar.7 = f32[8,4]{1,0} all-reduce(%d.7), replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""


def test_collectives_count_as_often_as_their_loops_run():
    found = {c.kind: c for c in hlo.collectives(hlo.parse(LOOPS))}
    assert {kind: (c.count, c.num_bytes) for kind, c in found.items()} == {
        "all-gather": (15, 32 * 4 * 4),
        "reduce-scatter": (5, 64 * 4 * 2),  # what goes in is larger
        "collective-permute": (1, 8 * 4 * 4),
        "all-reduce": (1, 8 * 4 * 4),
    }


# A gather that starts before a loop, goes on inside a product of each of its 7 rounds, and ends
# behind it, as the TPU compiler hides gathers of weights behind what is computed meanwhile.
OVERLAPPED = """HloModule jit_overlapped, is_scheduled=true

%start (p.1: bf16[8,4]) -> (bf16[8,4], bf16[32,4]) {
  %p.1 = bf16[8,4]{1,0} parameter(0)
  %g.1 = bf16[32,4]{1,0} all-gather(%p.1), channel_id=1, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_end":"-1","flag_start":"-1"}}
  ROOT %t.1 = (bf16[8,4]{1,0}, bf16[32,4]{1,0}) tuple(%p.1, %g.1)
}

%step (p.2: bf16[8,4], q.2: bf16[32,4], x.2: f32[16]) -> (f32[16], bf16[8,4], bf16[32,4]) {
  %p.2 = bf16[8,4]{1,0} parameter(0)
  %q.2 = bf16[32,4]{1,0} parameter(1)
  %x.2 = f32[16]{0} parameter(2)
  %y.2 = f32[16]{0} negate(%x.2)
  %g.2 = bf16[32,4]{1,0} all-gather(%p.2), channel_id=1, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_end":"8","flag_start":"2"}}
  ROOT %t.2 = (f32[16]{0}, bf16[8,4]{1,0}, bf16[32,4]{1,0}) tuple(%y.2, %p.2, %g.2)
}

%body (p.3: (f32[16], bf16[8,4], bf16[32,4])) -> (f32[16], bf16[8,4], bf16[32,4]) {
  %p.3 = (f32[16]{0}, bf16[8,4]{1,0}, bf16[32,4]{1,0}) parameter(0)
  %x.3 = f32[16]{0} get-tuple-element(%p.3), index=0
  %a.3 = bf16[8,4]{1,0} get-tuple-element(%p.3), index=1
  %b.3 = bf16[32,4]{1,0} get-tuple-element(%p.3), index=2
  ROOT %f.3 = (f32[16]{0}, bf16[8,4]{1,0}, bf16[32,4]{1,0}) fusion(%a.3, %b.3, %x.3), \
kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}, calls=%step
}

%condition (p.4: (f32[16], bf16[8,4], bf16[32,4])) -> pred[] {
  %p.4 = (f32[16]{0}, bf16[8,4]{1,0}, bf16[32,4]{1,0}) parameter(0)
  ROOT %more.4 = pred[] custom-call(%p.4), custom_call_target="more"
}

%done (p.5: bf16[8,4], q.5: bf16[32,4]) -> bf16[32,4] {
  %p.5 = bf16[8,4]{1,0} parameter(0)
  %q.5 = bf16[32,4]{1,0} parameter(1)
  ROOT %g.5 = bf16[32,4]{1,0} all-gather(%p.5), channel_id=1, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_end":"8","flag_start":"2"}}
}

ENTRY %main (a: bf16[8,4], x: f32[16]) -> bf16[32,4] {
  %a = bf16[8,4]{1,0} parameter(0)
  %x = f32[16]{0} parameter(1)
  %s = (bf16[8,4]{1,0}, bf16[32,4]{1,0}) fusion(%a), kind=kCustom, \
output_to_operand_aliasing={{0}: (0, {})}, calls=%start
  %a.6 = bf16[8,4]{1,0} get-tuple-element(%s), index=0
  %g.6 = bf16[32,4]{1,0} get-tuple-element(%s), index=1
  %t.6 = (f32[16]{0}, bf16[8,4]{1,0}, bf16[32,4]{1,0}) tuple(%x, %a.6, %g.6)
  %loop = (f32[16]{0}, bf16[8,4]{1,0}, bf16[32,4]{1,0}) while(%t.6), condition=%condition, \
body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %a.7 = bf16[8,4]{1,0} get-tuple-element(%loop), index=1
  %g.7 = bf16[32,4]{1,0} get-tuple-element(%loop), index=2
  ROOT %d = bf16[32,4]{1,0} fusion(%a.7, %g.7), kind=kCustom, \
output_to_operand_aliasing={{}: (1, {})}, calls=%done
}
"""


def test_a_collective_that_is_spread_over_a_loop_happens_once():
    (gather,) = hlo.collectives(hlo.parse(OVERLAPPED))
    assert (gather.kind, gather.count, gather.num_bytes) == ("all-gather", 1, 32 * 4 * 2)
    # Each round reads and writes what it negates. The gather itself moves bytes at its ends.
    ends = hlo.hbm_bytes(hlo.parse(OVERLAPPED)) - 7 * 2 * 16 * 4
    assert 32 * 4 * 2 <= ends <= 2 * (32 + 8) * 4 * 2
    # Without the mark every round counts.
    unmarked = OVERLAPPED.replace('"flag_start":"2"', '"flag_start":"-1"')
    assert sum(c.count for c in hlo.collectives(hlo.parse(unmarked))) == 9


def test_groups_are_read_in_every_notation():
    found = {c.kind: c.group for c in hlo.collectives(hlo.parse(LOOPS))}
    assert found["all-gather"] == (0, 2, 4, 6)  # columns of a 4 x 2 array
    assert found["reduce-scatter"] == (0, 1, 2, 3)  # along the last axis of a 2 x 4 mesh
    assert found["all-reduce"] == (0, 1)


def test_a_loop_of_unknown_length_is_named():
    text = LOOPS.replace('"known_trip_count"', '"something_else"')
    module = hlo.parse(text)
    assert hlo.unknown_loops(module) == ("loop.7",)
    assert {c.kind: c.count for c in hlo.collectives(module)}["all-gather"] == 3
    assert hlo.unknown_loops(hlo.parse(LOOPS)) == ()


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("nothing")


@pytest.mark.parametrize(
    ("shape", "expected", "in_hbm"),
    [
        ("bf16[4,128]{1,0:T(8,128)(2,1)}", 1024, 1024),
        ("bf16[4,128]{1,0:T(8,128)(2,1)S(1)}", 1024, 0),
        ("(f32[2]{0}, (s32[], pred[3]{0:S(2)}))", 15, 12),
        ("s4[3]{0}", 2, 2),
        ("f8e4m3fn[5]{0}", 5, 5),
        ("f32[<=8]{0}", 32, 32),
        ("token[]", 0, 0),
    ],
)
def test_shape_bytes(shape, expected, in_hbm):
    assert hlo.shape_bytes(shape) == expected
    assert hlo.shape_bytes(shape, hbm_only=True) == in_hbm


@pytest.mark.parametrize("length", [3, 7])
def test_a_scan_reads_each_of_its_slices_once(length):
    size = 256

    def product(x, matrices):
        return jax.lax.scan(lambda x, m: (jnp.tanh(x @ m), None), x, matrices)[0]

    shapes = (
        jax.ShapeDtypeStruct((size, size), jnp.float32),
        jax.ShapeDtypeStruct((length, size, size), jnp.float32),
    )
    text = jax.jit(product).lower(*shapes).compile().as_text()
    matrix = 4 * size**2
    moved = hlo.hbm_bytes(hlo.parse(text))
    # At least a slice and what it is multiplied with; never the whole stack in every iteration.
    assert 2 * length * matrix <= moved <= (10 * length + 4) * matrix


# A fusion holds fusions: one slices, behind a view, a stack that the outer one takes whole; another
# puts a result into a stack.
NESTED = """HloModule jit_step

%view (p.1: f32[64,256]) -> f32[64,256] {
  %p.1 = f32[64,256]{1,0:T(8,128)} parameter(0)
  ROOT %c.1 = f32[64,256]{1,0:T(4,128)} copy(%p.1)
}

%inner (p.2: f32[64,256], i.2: s32[]) -> f32[1,256] {
  %p.2 = f32[64,256]{1,0} parameter(0)
  %v.2 = f32[64,256]{1,0} fusion(%p.2), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, \
calls=%view
  %i.2 = s32[] parameter(1)
  ROOT %s.2 = f32[1,256]{1,0} dynamic-slice(%v.2, %i.2), dynamic_slice_sizes={1,256}
}

%put (p.3: f32[64,256], u.3: f32[1,256], i.3: s32[]) -> f32[64,256] {
  %p.3 = f32[64,256]{1,0} parameter(0)
  %u.3 = f32[1,256]{1,0} parameter(1)
  %i.3 = s32[] parameter(2)
  ROOT %d.3 = f32[64,256]{1,0} dynamic-update-slice(%p.3, %u.3, %i.3)
}

%outer (p.4: f32[64,256], q.4: f32[64,256], i.4: s32[]) -> f32[64,256] {
  %p.4 = f32[64,256]{1,0} parameter(0)
  %q.4 = f32[64,256]{1,0} parameter(1)
  %i.4 = s32[] parameter(2)
  %s.4 = f32[1,256]{1,0} fusion(%p.4, %i.4), kind=kLoop, calls=%inner
  ROOT %d.4 = f32[64,256]{1,0} fusion(%q.4, %s.4, %i.4), kind=kLoop, calls=%put
}

ENTRY %main (a: f32[64,256], b: f32[64,256], i: s32[]) -> f32[64,256] {
  %a = f32[64,256]{1,0} parameter(0)
  %b = f32[64,256]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[64,256]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%outer
}
"""


def test_fusions_inside_of_fusions_read_and_write_what_they_slice():
    # One line is read, one is written, and the index is read.
    assert hlo.hbm_bytes(hlo.parse(NESTED)) == 2 * 4 * 256 + 4
    whole = NESTED.replace("dynamic-slice(%v.2, %i.2)", "negate(%v.2)")
    assert hlo.hbm_bytes(hlo.parse(whole)) == 4 * 64 * 256 + 4 * 256 + 4


# FLOPs.


def _counted(function, *shapes):
    analysis = jax.jit(function).lower(*shapes).compile().cost_analysis()
    return (analysis[0] if isinstance(analysis, list) else analysis)["flops"]


@pytest.mark.parametrize(
    ("config", "length"), [(SMALL, 256), (HYBRID, 64)], ids=["dense", "hybrid"]
)
def test_the_forward_formula_is_what_xla_counts(config, length, monkeypatch):
    # XLA counts the body of a loop once: no loops, then.
    monkeypatch.setattr(jax.lax, "scan", functools.partial(jax.lax.scan, unroll=True))
    counted = _counted(functools.partial(logits, config), *shapes_of(config, length)) / (2 * length)
    assert flops.score_flops(config, length)[1] == pytest.approx(counted, rel=0.06)


@pytest.mark.parametrize("remat", ["none", "dots", "full", "chunks"])
@pytest.mark.parametrize("attention", ["plain", "blockwise"])
@pytest.mark.parametrize("config", [SMALL, HYBRID], ids=["dense", "hybrid"])
def test_the_backward_formula_is_what_is_computed(config, attention, remat):
    length = 1024
    config = dataclasses.replace(config, attention=attention, remat=remat)

    def loss(params, tokens):
        return jnp.sum(logits(config, params, tokens) ** 2)

    counted = count_products(jax.grad(loss), *shapes_of(config, length))
    executed = flops.train_flops(config, length)[1]
    # The update computes logits a second time, this loss does not.
    executed -= flops.row_flops(config, length).unembedding
    assert executed == pytest.approx(counted / (2 * length), rel=0.02)


@pytest.mark.parametrize("chunk", [16, 64])
def test_the_formula_of_a_chunk_is_exact(chunk):
    length, heads = 128, HYBRID.linear_num_value_heads
    keys, values = (1, heads, length, 64), (1, heads, length, 128)
    numbers = [jnp.zeros(shape) for shape in (keys, keys, values, keys[:3], keys[:3])]
    document, memory = jnp.zeros((1, length), jnp.int32), jnp.zeros((1, heads, 64, 128))
    rule = functools.partial(gated_delta.chunked_delta_rule, chunk=chunk)
    counted = count_products(rule, *numbers, document, memory)
    recurrent = HYBRID.num_layers - flops.attention_layers(HYBRID)
    assert recurrent * counted == length * flops.recurrence_flops(HYBRID, chunk)


@given(length=st.integers(1, 4096))
@settings(max_examples=20, deadline=None)
def test_model_flops_are_the_least_that_is_executed(length):
    for shape, remat in itertools.product((SMALL, HYBRID), layers.REMAT):
        config = dataclasses.replace(shape, remat=remat)
        model, hardware = flops.train_flops(config, length)
        assert model == 3 * flops.row_flops(config, length).total
        assert hardware >= model
        assert flops.score_flops(config, length)[1] >= flops.score_flops(config, length)[0]


def test_a_row_is_the_sum_of_its_tokens():
    length = 37
    tokens = [flops.forward_flops(SMALL, context).total for context in range(1, length + 1)]
    assert sum(tokens) == pytest.approx(length * flops.row_flops(SMALL, length).total)


def test_a_family_without_a_formula_is_named():
    with pytest.raises(ValueError, match="no FLOP formula for dict"):
        flops.forward_flops({}, 1)


# Slices.


def test_topologies():
    slice_ = parse_topology("v5p:4x4x8")
    assert (slice_.num_chips, slice_.name) == (128, "v5p:4x4x8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9:2x2", "v5e, v5p, v6e"),
        ("v5e:2x2x2", "v5e:4x4"),
        ("v5p:4x4", "v5p:2x2x1"),
        ("v5e", "2 axes"),
    ],
)
def test_a_wrong_topology_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_topology(text)


def test_closed_rings_have_twice_the_bandwidth_of_lines():
    link = TPUS["v5p"].link_bytes_per_s
    slice_ = Slice(TPUS["v5p"], (4, 4, 2))
    ring = [(x, 0, 0) for x in range(4)]
    assert slice_.ring_bytes_per_s(ring) == 2 * link
    assert slice_.ring_bytes_per_s(ring[:2]) == link
    assert slice_.ring_bytes_per_s([(x, y, 0) for x in range(4) for y in range(4)]) == 4 * link
    assert slice_.ring_bytes_per_s([(0, 0, z) for z in range(2)]) == link


def test_collective_times():
    chip = dataclasses.make_dataclass("Device", ["coords"])
    slice_ = parse_topology("v5p:4x4x4")
    mesh = dataclasses.make_dataclass("Mesh", ["devices"])(
        np.array([chip((0, 0, z)) for z in range(4)], dtype=object)
    )

    def seconds(kind):
        group = (0, 1, 2, 3)
        return collective_seconds(hlo.Collective(kind, 1, 800, group, ""), slice_, mesh)

    bandwidth = 2 * slice_.chip.link_bytes_per_s
    assert seconds("all-gather") == pytest.approx(600 / bandwidth)
    assert seconds("all-reduce") == pytest.approx(2 * seconds("reduce-scatter"))


# Programs, compiled for this machine.


@pytest.fixture(scope="module")
def small():
    config = tiny.get_config()
    config.mesh.data = 1
    return config, sharding.make_mesh(**config.mesh.to_dict(), devices=jax.devices()[:1])


def test_a_program_that_does_not_fit_says_why(small):
    score = next(p for p in programs(*small) if p.name == "score")
    fits = compile_program(score, 2**40)
    with pytest.raises(DoesNotFit, match=r"score needs .* GiB per chip .*learner.micro_rows"):
        compile_program(score, fits.peak_bytes - 1)
    assert compile_program(score, fits.peak_bytes) == fits


def test_arrays_that_stay_are_counted_beside_a_programs_own(small):
    by_name = {p.name: p for p in programs(*small)}
    optimizer = compile_program(by_name["optimizer"], 2**40)
    num_params = models.num_params(experiment.model_config(small[0]))
    # Parameters, gradient and two moments go in; what comes out takes their place.
    assert optimizer.argument_bytes == pytest.approx(16 * num_params, rel=0.01)
    assert optimizer.output_bytes < 0.01 * optimizer.argument_bytes
    # While a gradient is computed, the moments wait.
    assert by_name["gradient"].resident_bytes - by_name["optimizer"].resident_bytes == (
        pytest.approx(8 * num_params, rel=0.01)
    )


@pytest.mark.parametrize("backbone", ["policy", "own"])
def test_the_critic_is_among_the_programs(small, backbone):
    config = small[0].copy_and_resolve_references()
    config.critic.backbone = backbone
    critic = next(p for p in programs(config, small[1]) if p.name == "critic")
    assert compile_program(critic, 2**40).argument_bytes > 0
    assert bool(critic.tokens) == (backbone == "own")


def test_micro_rows_that_do_not_divide_are_refused():
    mesh = dataclasses.make_dataclass("Mesh", ["shape"])
    config = tiny.get_config()
    config.learner.micro_rows = 6
    with pytest.raises(ValueError, match="micro_rows"):
        programs(config, mesh({"data": 4, "fsdp": 1, "tensor": 1, "sequence": 1}))


# Programs, compiled for a slice.


@pytest.mark.slow
def test_a_small_slice(tmp_path):
    pytest.importorskip("libtpu", reason="compiles for TPUs; pip install -e '.[tpu]'")
    from focus.tpu.run import compile_config

    config = tiny.get_config()
    config.model.update(dtype="bfloat16", d_model=256, head_dim=128, d_ff=512, num_layers=4)
    config.mesh.update(data=1, fsdp=4)
    result = compile_config(config, "v5e:2x2", name="tiny", only=("gradient", "optimizer"))
    gradient = result["programs"]["gradient"]
    kinds = {c["kind"]: c for c in gradient["collectives"]}
    # Weights are gathered in the forward and in the backward pass of each of the four layers,
    # and their gradients are added and cut up again.
    weights = 2 * 7 * 4
    assert kinds["all-gather"]["count"] >= weights
    assert kinds["reduce-scatter"]["num_bytes"] > 0
    # Rows lie where they belong: no chip sums up partial activations of all rows. What is summed
    # is the gradient of the unembedding, once and not once per chunk of tokens.
    activations = config.learner.micro_rows * config.learner.row_length * config.model.d_model * 2
    unembedding = 4 * config.model.vocab_size * config.model.d_model
    summed = kinds.get("all-reduce", {"num_bytes": 0})["num_bytes"]
    assert summed < unembedding + activations
    assert not gradient["unknown_loops"]
    state_bytes = 16 * result["num_params"] / 4
    assert gradient["peak_bytes"] > state_bytes
    assert 0 < result["step"]["mfu"] < result["step"]["mfu_best"] < 1
    assert "MFU" in to_markdown(result, "command")


@pytest.mark.slow
def test_what_does_not_fit_ends_the_script_with_the_reason():
    pytest.importorskip("libtpu", reason="compiles for TPUs; pip install -e '.[tpu]'")
    command = [sys.executable, "scripts/compile_tpu.py", "--topology=v5e:2x2"]
    command += ["--config=configs/tpu_pod.py:qwen3_32b", "--programs=optimizer"]
    command += ["--config.learner.micro_rows=4"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "DoesNotFit: optimizer" in result.stderr
    assert "use more chips" in result.stderr
    command[2:] = ["--topology=v5e:3x3", "--config=configs/tpu_pod.py:qwen3_8b"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "no topology 'v5e:3x3'; choose a shape such as 1x1, 2x2" in result.stderr


def test_a_report_is_complete(small):
    compiled = [
        compile_program(p, 2**40) for p in programs(*small) if p.name in ("gradient", "optimizer")
    ]
    slice_ = Slice(TPUS["v5e"], (1, 1))
    result = report("tiny", compiled, slice_, small[1], num_params=1)
    step, gradient = result["step"], result["programs"]["gradient"]
    assert step["tokens"] == 4 * 192
    assert step["mfu"] == pytest.approx(
        gradient["model_flops"] / (step["seconds"] * slice_.chip.flops_per_s)
    )
    assert "| gradient |" in to_markdown(result, "command")
