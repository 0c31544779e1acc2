"""Mesh and placement: one device and eight give the same numbers, state lies where rules say."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from focus.learner import sharding, state
from focus.policy import model as models
from focus.policy import qwen3_5, transformer

CONFIG = transformer.ModelConfig(
    vocab_size=16,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=32,
    max_context=64,
    attention_bias=True,
    tie_embeddings=False,
)
KEY = jax.random.key(0)
FAMILIES = {
    "qwen3": dataclasses.replace(CONFIG, attention_bias=False),
    "qwen2": dataclasses.replace(CONFIG, qk_norm=False, tie_embeddings=True),
    "llama": dataclasses.replace(CONFIG, qk_norm=False, attention_bias=False),
    "qwen3_5": qwen3_5.Qwen3_5Config(
        vocab_size=16,
        d_model=16,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        d_ff=32,
        max_context=64,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=8,
        linear_key_dim=4,
        linear_value_dim=4,
    ),
}
# Every way to write 8 devices as data x fsdp x tensor x sequence.
SHAPES = [s for s in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(s) == 8]


def abstract_mesh(data, fsdp, tensor, sequence=1):
    return AbstractMesh(
        (data, fsdp, tensor, sequence), sharding.AXES, axis_types=(AxisType.Auto,) * 4
    )


def abstract_state():
    optimizer = state.make_optimizer(state.OptimizerConfig())
    return jax.eval_shape(
        lambda key: state.init_state(
            transformer.init_params(CONFIG, key), optimizer, critic={"heads": jnp.zeros((3, 5))}
        ),
        jax.random.key(0),
    )


def test_rules_place_every_parameter_its_moments_and_the_critic():
    placed = sharding.shardings_of(abstract_state(), abstract_mesh(1, 2, 2))
    specs = {sharding.path_name(p): s.spec for p, s in jax.tree_util.tree_leaves_with_path(placed)}
    assert specs["params/layers/q_proj"] == PartitionSpec(None, "fsdp", "tensor")
    assert specs["params/layers/down_proj"] == PartitionSpec(None, "tensor", "fsdp")
    assert specs["params/embed"] == specs["params/lm_head"] == PartitionSpec("tensor", "fsdp")
    assert specs["critic/heads"] == specs["step"] == PartitionSpec()
    for name, spec in specs.items():
        if name.startswith("params/"):
            tails = tuple(f"/{m}/{name.removeprefix('params/')}" for m in ("mu", "nu"))
            moments = [s for n, s in specs.items() if n.endswith(tails)]
            assert moments == [spec, spec], name


def test_rules_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="no sharding rule for router of shape"):
        sharding.shardings_of({"router": np.zeros((2, 2))}, abstract_mesh(1, 1, 1))
    with pytest.raises(ValueError, match="embed .*: 9 cannot be cut into 2 along 'tensor'"):
        sharding.shardings_of({"embed": np.zeros((9, 4))}, abstract_mesh(1, 1, 2))
    with pytest.raises(ValueError, match="more axes than the shape"):
        sharding.shardings_of({"q_proj": np.zeros(4)}, abstract_mesh(1, 1, 1))


def test_mesh_sizes_are_inferred_or_refused():
    device = jax.devices()[:1]
    assert dict(sharding.make_mesh(devices=device).shape) == dict.fromkeys(sharding.AXES, 1)
    with pytest.raises(ValueError, match="at most one of them is -1"):
        sharding.make_mesh(-1, -1, 1, devices=device)
    with pytest.raises(ValueError, match="1 devices cannot be divided by 2"):
        sharding.make_mesh(-1, 2, 1, devices=device)
    with pytest.raises(ValueError, match="data=2xfsdp=1xtensor=1xsequence=1 has 2 places"):
        sharding.make_mesh(2, 1, 1, devices=device)


def test_a_spec_stands_for_the_last_axes_however_layers_are_stacked():
    mesh = abstract_mesh(1, 2, 2)
    tree = {
        "q_proj": np.zeros((4, 4)),
        "layers": {
            "q_proj": np.zeros((3, 4, 4)),
            "linear": {
                "in_proj_qkv": np.zeros((2, 3, 4, 8)),
                "out_proj": np.zeros((2, 3, 8, 4)),
                "A_log": np.zeros((2, 3, 3)),
                "dt_bias": np.zeros((2, 3, 3)),
            },
        },
    }
    specs = jax.tree.map(lambda x: tuple(x.spec), sharding.shardings_of(tree, mesh))
    assert specs["q_proj"] == ("fsdp", "tensor")
    assert specs["layers"]["q_proj"] == (None, "fsdp", "tensor")
    linear = specs["layers"]["linear"]
    assert linear["in_proj_qkv"] == (None, None, "fsdp", "tensor")
    assert linear["out_proj"] == (None, None, "tensor", "fsdp")
    assert linear["A_log"] == linear["dt_bias"] == ()


def test_only_vectors_lie_on_every_device():
    """A matrix that no rule cuts would cost its whole size on every chip."""
    for config in FAMILIES.values():
        shapes = jax.eval_shape(lambda key, c=config: models.init_params(c, key), KEY)
        placed = sharding.shardings_of(shapes, abstract_mesh(1, 2, 2))
        for (path, _), place in zip(
            jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(placed)
        ):
            name = sharding.path_name(path)
            assert any(place.spec) or name.endswith(("norm", "A_log", "dt_bias")), name


def test_rows_that_a_mesh_cannot_hold_are_refused():
    mesh = abstract_mesh(2, 2, 1, 2)
    good = {"micro_rows": 8, "row_length": 32, "attention": "allgather"}
    sharding.check_mesh(mesh, **good)
    for change, message in (
        ({"micro_rows": 6}, "learner.micro_rows=6 .* make it a multiple of 4"),
        ({"row_length": 33}, "learner.row_length=33 .* mesh.sequence=2"),
        ({"attention": "splash"}, "model.attention='splash' wants whole rows.*allgather"),
    ):
        with pytest.raises(ValueError, match=message):
            sharding.check_mesh(mesh, **(good | change))
    sharding.check_mesh(abstract_mesh(2, 2, 2), **(good | {"attention": "splash"}))


EIGHT_DEVICES = """
import json, sys
import jax, numpy as np
from focus.learner import losses, sharding, state, update
from focus.learner.packing import pack_trajectories
from focus.policy import model as models
from random_trajectories import make_forest
import test_sharding

assert len(jax.devices()) == 8
mesh = sharding.make_mesh(-1, 2, 1, 2)
assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 1, "sequence": 2}
try:
    sharding.shard_rows(np.zeros((6, 3)), mesh)
except ValueError as error:
    assert "6 rows cannot be spread over 4 devices" in str(error)
else:
    raise AssertionError("6 rows on 4 devices")

config, shapes = test_sharding.FAMILIES[sys.argv[1]], json.loads(sys.argv[2])
model = update.policy_model(config)
optimizer = state.make_optimizer(state.OptimizerConfig(learning_rate=1e-2))
rows = pack_trajectories(
    make_forest(0, 8, 8), row_length=32, max_nodes=8, max_states=12,
    share_prefixes=models.shares_prefixes(config)).rows
rng = np.random.default_rng(0)
normal = lambda: 0.1 * rng.normal(size=rows.tokens.shape).astype(np.float32)


def init(key):
    return state.init_state(models.init_params(config, key), optimizer)


def run(devices, *shape):
    mesh = sharding.make_mesh(*shape, devices=devices)
    train_state, shardings = sharding.init_sharded(init, jax.random.key(0), mesh=mesh)
    jax.tree.map(lambda x, s: np.testing.assert_(x.sharding.is_equivalent_to(s, x.ndim)),
                 train_state, shardings)
    for (path, x), place in zip(
        jax.tree_util.tree_leaves_with_path(train_state), jax.tree.leaves(shardings)
    ):
        cut = np.prod([mesh.shape[axis] for axis in place.spec if axis])
        assert x.addressable_shards[0].data.size * cut == x.size, path
        assert x.ndim < 2 or any(place.spec) or path[-1].key.endswith(
            ("norm", "A_log", "dt_bias")), path
    traces = []

    def hidden(params, rows):
        traces.append(1)
        return model.hidden(params, rows)

    counted = update.PolicyModel(hidden, model.unembedding)
    scores = update.make_score_fn(counted, mesh=mesh, micro_rows=8)(train_state.params, rows)
    step = update.make_policy_update(
        counted, optimizer, losses.PolicyLossConfig(entropy_coefficient=0.01),
        update.UpdateConfig(micro_rows=8), mesh=mesh, shardings=shardings)
    batch = update.PolicyBatch(
        rows, rows.generated_mask, ADVANTAGES, scores.logp, scores.logp + GAP)
    metrics = []
    for _ in range(2):
        train_state, more = step(train_state, batch)
        metrics.append(more)
    assert len(traces) == 2, "one trace of the score, one of the loss"
    jax.tree.map(lambda x, s: np.testing.assert_(x.sharding.is_equivalent_to(s, x.ndim)),
                 train_state, shardings)
    return scores, metrics, jax.device_get(train_state)


ADVANTAGES, GAP = 10 * normal(), normal()
want_scores, want_metrics, want_state = run(jax.devices()[:1], 1, 1, 1, 1)
states = rows.state_pos >= 0
for shape in shapes:
    scores, metrics, train_state = run(jax.devices(), *shape)
    mask = rows.generated_mask
    np.testing.assert_allclose(scores.logp[mask], want_scores.logp[mask], atol=1e-5)
    np.testing.assert_allclose(
        scores.state_hidden[states], want_scores.state_hidden[states], atol=1e-4)
    for got, want in zip(metrics, want_metrics):
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-5, err_msg=name)
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, err_msg=name)
    # First moments are the gradients, up to a factor; Adam's quotient would hide their size.
    for path, a in jax.tree_util.tree_leaves_with_path(train_state.opt_state):
        b = want_state.opt_state
        for key in path:
            b = b[key.idx] if hasattr(key, "idx") else (
                b[key.key] if hasattr(key, "key") else getattr(b, key.name))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-5 * np.abs(b).max())
    print("same", shape, flush=True)
"""


def check_shapes(family, shapes):
    """Mesh shapes in a process with 8 virtual devices; nothing compiles twice."""
    tests = Path(__file__).parent
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        # Little optimisation: these programs run a few times, compiling them is what costs.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES, family, json.dumps(shapes)],
        env=env,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("same") == len(shapes)


def test_one_device_and_eight_give_the_same_losses_and_gradients():
    check_shapes("qwen2", [(8, 1, 1, 1), (1, 2, 2, 2), (2, 4, 1, 1)])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mesh_of_eight_devices_gives_the_same_losses_and_gradients(family):
    assert len(SHAPES) == 20
    check_shapes(family, SHAPES)
