"""Mesh and placement: one device and eight give the same numbers, state lies where rules say."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from families import FAMILIES
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from learner_steps import born, evidence_of, forest, named, pack
from processes import run_program

from focus.critic.head import CriticConfig
from focus.learner import losses, scoring, sharding, state, update
from focus.learner.critic_on_policy import CriticLearner, CriticOptions
from focus.learner.critic_own_backbone import BackboneCritic, BackboneOptions
from focus.policy import model as models
from focus.policy import transformer

CONFIG = dataclasses.replace(FAMILIES["qwen2"], tie_embeddings=False)
KEY = jax.random.key(0)
HEADS = CriticConfig(feature_dim=16, num_members=8, hidden_dim=8)
MICRO_ROWS = 8
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
    good = {"micro_rows": 8, "row_length": 32, "attention": "allgather", "num_kv_heads": 2}
    sharding.check_mesh(mesh, **good)
    for change, message in (
        ({"micro_rows": 6}, "learner.micro_rows=6 .* make it a multiple of 4"),
        ({"row_length": 33}, "learner.row_length=33 .* mesh.sequence=2"),
        ({"attention": "splash"}, "model.attention='splash' wants whole rows.*allgather"),
    ):
        with pytest.raises(ValueError, match=message):
            sharding.check_mesh(mesh, **(good | change))
    kernels, mesh = good | {"attention": "splash", "row_length": 256}, abstract_mesh(2, 2, 2)
    sharding.check_mesh(mesh, **kernels)
    with pytest.raises(ValueError, match="learner.row_length=192: .* wants a multiple of 128"):
        sharding.check_mesh(mesh, **(kernels | {"row_length": 192}))
    for options in (kernels, good):
        with pytest.raises(ValueError, match="3 key heads .* mesh.tensor=2 devices"):
            sharding.check_mesh(mesh, **(options | {"num_kv_heads": 3}))
    sharding.check_mesh(mesh, **(good | {"num_kv_heads": 3, "attention": "plain"}))


def test_rows_that_do_not_divide_are_refused_before_they_are_placed():
    with pytest.raises(ValueError, match="6 rows cannot be spread over 4 devices"):
        sharding.shard_rows(np.zeros((6, 4)), abstract_mesh(2, 2, 1, 2))
    with pytest.raises(ValueError, match="rows of 3 tokens cannot be cut into 2 parts"):
        sharding.shard_rows(np.zeros((8, 3)), abstract_mesh(2, 2, 1, 2))


# One device and eight. What runs on eight runs in processes of its own.


def learner_steps_on(config, mesh):
    """Numbers that scoring, two updates of the policy and one of each critic give."""
    model = scoring.policy_model(config)
    # Adam makes full steps of the noise of gradients near 0: they are small here, and what is
    # compared closely is the gradient before them.
    optimizer = state.make_optimizer(state.OptimizerConfig(learning_rate=1e-3))
    trajectories = forest(0, 8, 8)
    packed = pack(trajectories, share_prefixes=models.shares_prefixes(config))
    rows, traces = packed.rows, []

    def hidden(params, rows):
        traces.append(1)
        return model.hidden(params, rows)

    counted = dataclasses.replace(model, hidden=hidden)
    train_state, shardings = sharding.init_sharded(
        lambda key: state.init_state(models.init_params(config, key), optimizer), KEY, mesh=mesh
    )
    assert_placed(train_state, shardings, mesh)
    score = scoring.make_score_fn(counted, mesh=mesh, micro_rows=MICRO_ROWS)
    scores = score(train_state.params, rows)
    report = {
        "logp": scores.logp[rows.generated_mask],
        "entropy": scores.entropy[rows.generated_mask],
        "hidden": scores.state_hidden[rows.state_pos >= 0],
    }
    report |= critic_steps(model, score, train_state, trajectories, packed, mesh)

    normal = 0.1 * np.random.default_rng(0).normal(size=(2, *rows.tokens.shape)).astype(np.float32)
    batch = update.PolicyBatch(
        rows, rows.generated_mask, 10 * normal[0], scores.logp, scores.logp + normal[1]
    )
    step = update.make_policy_update(
        counted,
        optimizer,
        losses.PolicyLossConfig(entropy_coefficient=0.01),
        update.UpdateConfig(micro_rows=MICRO_ROWS),
        mesh=mesh,
        shardings=shardings,
    )
    for i in range(2):
        train_state, metrics = step(train_state, batch)
        report |= {f"update{i}/{name}": value for name, value in metrics.items()}
        if i == 0:
            report |= gradients(train_state.opt_state)
    assert len(traces) == 2, "one trace of the score, one of the loss"
    assert_placed(train_state, shardings, mesh)
    return report


def critic_steps(model, score, train_state, trajectories, packed, mesh):
    """What the critic with the policy's hidden states learns, and the one with its own."""
    report, shape = {}, (len(trajectories), packed.num_states)
    for name, critic in {
        "heads": CriticLearner(
            HEADS, CriticOptions(minibatch_size=32, capacity=256, epochs=1), score, mesh=mesh
        ),
        "backbone": BackboneCritic(
            HEADS,
            BackboneOptions(micro_rows=MICRO_ROWS, epochs=1),
            model,
            train_state.params,
            mesh=mesh,
        ),
    }.items():
        start = born(critic, mesh, train_state.params)
        hidden = critic.features(dataclasses.replace(train_state, critic=start), packed.rows)
        hidden = packed.states_to_trajectories(hidden, shape)
        evidence, index = evidence_of(trajectories, hidden)
        end, metrics = critic.learn(start, evidence, KEY, packed=packed, index=index)
        report |= {f"{name}/{metric}": value for metric, value in metrics.items()}
        report |= gradients(end.opt_state, name)
    shapes = jax.eval_shape(critic.init, KEY, train_state.params)
    assert_placed(end, sharding.shardings_of({"critic": shapes}, mesh)["critic"], mesh)
    return report


def gradients(opt_state, prefix=""):
    """First moments: the gradients up to a factor. Adam's quotient would hide their size."""
    moments = {name: x for name, x in named(jax.device_get(opt_state)).items() if "/mu/" in name}
    assert moments
    return {f"{prefix}/mu/{name}": x for name, x in moments.items()}


def assert_placed(tree, shardings, mesh):
    """Every array lies where the rules say, and a device holds its part only."""
    places = named(shardings)
    for name, x in named(tree).items():
        assert x.sharding.is_equivalent_to(places[name], x.ndim), name
        cut = math.prod(mesh.shape[axis] for axis in places[name].spec if axis)
        assert x.addressable_shards[0].data.size * cut == x.size, name


def compare_meshes(family, shapes):
    """Fails unless meshes of eight devices give the numbers of one device."""
    assert len(jax.devices()) == 8
    config = FAMILIES[family]
    want = learner_steps_on(config, sharding.make_mesh(devices=jax.devices()[:1]))
    assert want["update0/grad_norm"] > 0 and want["backbone/grad_norm"] > 0
    for shape in shapes:
        mesh = sharding.make_mesh(*shape)
        by_shares = mesh.shape["sequence"] > 1 and config.num_kv_heads % mesh.shape["tensor"] == 0
        attention = "allgather" if by_shares else "plain"
        got = learner_steps_on(dataclasses.replace(config, attention=attention), mesh)
        assert set(got) == set(want)
        for name, value in want.items():
            tolerance = {"rtol": 1e-4, "atol": 5e-5 * np.abs(value).max() + 1e-9}
            if name in ("update0/loss", "update0/grad_norm", "backbone/grad_norm"):
                tolerance = {"rtol": 1e-5}
            np.testing.assert_allclose(got[name], value, **tolerance, err_msg=f"{shape} {name}")
        print("same", shape, flush=True)


def check_meshes(family, shapes):
    program = f"import test_sharding as t; t.compare_meshes({family!r}, {shapes})"
    out = run_program(program, timeout=3000)
    assert out.count("same") == len(shapes)


def test_a_cpu_of_several_devices_has_threads_to_wait_in(monkeypatch):
    """Collectives wait in the threads that the devices share: with one a device, all can wait."""
    program = (
        "import os, sys; from focus.learner import sharding; sharding.split_cpu(int(sys.argv[1]));"
        "import jax; print(len(jax.devices()), os.environ['PJRT_NPROC'])"
    )
    variables = processes.environment(1)
    del variables["PJRT_NPROC"], variables["JAX_NUM_CPU_DEVICES"]
    monkeypatch.setattr(processes, "environment", lambda devices: variables)
    devices, threads = map(int, run_program(program, 64).split())
    assert devices == 64 and threads >= 2 * devices
    variables["PJRT_NPROC"] = "5"
    assert run_program(program, 2) == "2 5\n"


@pytest.mark.parametrize(
    "setting",
    [{"JAX_NUM_CPU_DEVICES": "48"}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=48"}],
)
def test_a_cpu_that_the_environment_splits_has_them_too(setting, monkeypatch):
    program = (
        "import os; from focus.learner import sharding;"
        "import jax; print(len(jax.devices()), os.environ['PJRT_NPROC'])"
    )
    variables = processes.environment(1)
    del variables["PJRT_NPROC"], variables["JAX_NUM_CPU_DEVICES"]
    monkeypatch.setattr(processes, "environment", lambda devices: variables | setting)
    devices, threads = map(int, run_program(program).split())
    assert devices == 48 and threads >= 2 * devices


def test_one_device_and_eight_give_the_same_losses_and_gradients():
    check_meshes("qwen2", [(8, 1, 1, 1), (1, 2, 2, 2), (2, 4, 1, 1)])


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_5"])
def test_every_mesh_of_eight_devices_gives_the_same_losses_and_gradients(family):
    assert len(SHAPES) == 20
    check_meshes(family, SHAPES)
