"""Adapters: laws of the factors, training on a frozen base, every mesh, whole runs."""

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
import tiny
from adapters import (
    DENSE,
    FAMILIES,
    LORA,
    assert_equal_bits,
    each_family,
    hidden,
    make_adapters,
    tokens_of,
)
from conftest import REPOSITORY
from families import make_params
from processes import run_program
from random_trajectories import make_forest

from focus.evaluate import evaluate_run
from focus.formats import peft
from focus.learner import losses, scoring, sharding, state, update
from focus.learner.checkpoint import Checkpointer
from focus.learner.packing import pack_trajectories
from focus.metrics import read_metrics
from focus.policy import lora, token_logprobs
from focus.policy import model as models
from focus.policy.lora import LoraConfig
from focus.run import experiment
from focus.run.trainer import Trainer
from focus.train import train

DENSE_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HYBRID_NAMES = (
    *("gate_proj", "up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("q_proj", "k_proj", "v_proj", "o_proj"),
)
extend = jax.jit(models.extend, static_argnums=0)


def copy(tree):
    return jax.tree.map(np.array, tree)


# --- laws ----------------------------------------------------------------------------------------


@each_family
def test_a_new_adapter_changes_nothing_at_all(family):
    config, tokens = FAMILIES[family], tokens_of(0, 1, 6)
    params = make_params(config)
    adapters = lora.init_adapters(config, LORA, jax.random.key(0))
    attached = lora.attach(params, adapters)
    with jax.disable_jit():  # the compiler may add in another order
        got = models.hidden_states(config, attached, tokens)
        np.testing.assert_array_equal(got, models.hidden_states(config, params, tokens))
    np.testing.assert_allclose(hidden(config, attached, tokens), got, rtol=1e-4, atol=1e-5)
    assert_equal_bits(lora.merge(params, adapters), params)
    factors = [x for x in jax.tree.leaves(adapters, is_leaf=lora._is_adapter)]
    for adapter in factors:
        bound = adapter.shape[-2] ** -0.5
        assert 0.8 * bound < float(jnp.abs(adapter.a).max()) <= bound
    drawn = [np.asarray(f.a).ravel()[:4].tobytes() for f in factors]
    assert len(set(drawn)) == len(drawn)


@each_family
def test_applied_equals_merged(family):
    config, tokens = FAMILIES[family], tokens_of(1, 2, 20)
    params, adapters = make_params(config), make_adapters(config)
    plain, attached = lora.merge(params, adapters), lora.attach(params, adapters)
    assert jax.tree.structure(plain) == jax.tree.structure(params)
    want, base = hidden(config, plain, tokens), hidden(config, params, tokens)
    scale = float(jnp.abs(want).max())
    np.testing.assert_allclose(hidden(config, attached, tokens), want, atol=1e-5 * scale)
    assert float(jnp.abs(want - base).max()) > 0.1
    # Decoding reads an adapted model as well.
    cache = models.init_cache(config, 2, 24)
    layers = models.layer_list(config, attached)
    got, _ = extend(config, attached, layers, tokens, jnp.zeros(2, int), cache)
    np.testing.assert_allclose(got, want, atol=1e-4 * scale)


@each_family
def test_gradients_of_factors_are_projections_of_the_whole_gradient(family):
    """dL/da = s dL/dW b^T and dL/db = s a^T dL/dW, at the merged matrix W."""
    config, tokens = FAMILIES[family], tokens_of(2, 2, 20)
    params, adapters = make_params(config), make_adapters(config)

    def loss(params):
        return -token_logprobs(config, params, tokens).mean()

    got = jax.jit(jax.grad(lambda x: loss(lora.attach(params, x))))(adapters)
    whole = jax.jit(jax.grad(loss))(lora.merge(params, adapters))
    for group, tree in adapters.items():
        for name, adapter in tree.items():
            full = whole[group][name]
            want_a = LORA.scale * jnp.einsum("lio,lro->lir", full, adapter.b)
            want_b = LORA.scale * jnp.einsum("lir,lio->lro", adapter.a, full)
            for a, b in ((got[group][name].a, want_a), (got[group][name].b, want_b)):
                assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b) + 1e-7, (group, name)


@pytest.mark.parametrize("change", [{"remat": "full"}, {"remat": "dots"}, {"scan_unroll": 2}])
def test_rematerialisation_changes_nothing(change):
    config, tokens = DENSE, tokens_of(3, 2, 20)
    params, adapters = make_params(config), make_adapters(config)

    def gradient(config):
        def loss(x):
            return token_logprobs(config, lora.attach(params, x), tokens).mean()

        return jax.jit(jax.grad(loss))(adapters)

    want, got = gradient(config), gradient(dataclasses.replace(config, **change))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, want)


def test_bfloat16_is_computed_in_bfloat16():
    config = dataclasses.replace(DENSE, dtype="bfloat16")
    attached = lora.attach(make_params(config), make_adapters(config))
    assert hidden(config, attached, tokens_of(4, 2, 8)).dtype == jnp.bfloat16
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params(config))
    assert {x.dtype.name for x in jax.tree.leaves(lora.merge(low, make_adapters(config)))} == {
        "bfloat16"
    }


# --- which projections ---------------------------------------------------------------------------


@each_family
def test_targets_are_the_names_of_hugging_face(family):
    config = FAMILIES[family]
    names = HYBRID_NAMES if family == "hybrid" else DENSE_NAMES
    assert lora.projections(config) == names
    everything = lora.adapter_shapes(config, LORA)
    assert {name for tree in everything.values() for name in tree} == set(names)
    assert_equal_structure(everything, lora.adapter_axes(config, LORA))
    few = lora.adapter_shapes(config, LoraConfig(2, targets=("v_proj", "q_proj")))
    assert {name for tree in few.values() for name in tree} == {"q_proj", "v_proj"}
    for group, tree in everything.items():
        for name, adapter in tree.items():
            assert adapter.shape == models.param_shapes(config)[group][name]
            axes = lora.adapter_axes(config, LORA)[group][name]
            whole = models.logical_axes(config)[group][name]
            assert axes.a == (*whole[:-1], "rank") and axes.b == (whole[0], "rank", whole[-1])
    assert lora.num_adapter_params(config, LORA) == sum(
        x.size for x in jax.tree.leaves(make_adapters(config))
    )


def assert_equal_structure(a, b):
    is_leaf = lora._is_adapter
    assert jax.tree.structure(a, is_leaf=is_leaf) == jax.tree.structure(b, is_leaf=is_leaf)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("dense", {"rank": 0}, "lora.rank must be >= 1, got 0"),
        ("dense", {"rank": 4, "alpha": 0.0}, "lora.alpha must be > 0, got 0.0"),
        ("dense", {"rank": 4, "alpha": math.nan}, "lora.alpha must be > 0, got nan"),
        ("dense", {"rank": 4, "targets": "q_proj"}, "tuple of names .* got 'q_proj'"),
        ("dense", {"rank": 4, "targets": ()}, "tuple of names .* got ()"),
        ("dense", {"rank": 17}, r"lora.rank 17 .* q_proj of shape \[16, 32\] .* at most 16"),
        (
            "dense",
            {"rank": 4, "targets": ("q_proj", "in_proj_qkv", "lm_head")},
            r"\['in_proj_qkv', 'lm_head'\].* it has q_proj, k_proj, .*down_proj, and 'all-linear'",
        ),
        ("hybrid", {"rank": 4, "targets": ("qkv_proj",)}, "it has gate_proj, .*in_proj_qkv"),
        ("hybrid", {"rank": 9}, r"in_proj_b of shape \[16, 8\] .* leave in_proj_b out"),
    ],
)
def test_adapters_that_cannot_be_are_refused(family, options, message):
    with pytest.raises(ValueError, match=message):
        lora.adapter_shapes(FAMILIES[family], LoraConfig(**options))


def test_adapters_of_another_base_are_refused():
    adapters = make_adapters(DENSE)
    wider = make_params(dataclasses.replace(DENSE, d_ff=32))
    with pytest.raises(ValueError, match=r"layers/down_proj is for .*\(2, 24, 16\).*\(2, 32, 16\)"):
        lora.attach(wider, adapters)
    with pytest.raises(ValueError, match=r"layers/\w+ .* no such projection"):
        lora.merge(make_params(FAMILIES["hybrid"]), adapters)


# --- training ------------------------------------------------------------------------------------

MESH = sharding.make_mesh(devices=jax.devices()[:1])
OPTIMIZER = state.make_optimizer(state.OptimizerConfig(learning_rate=1e-2))


def packed(config, seed=0):
    return pack_trajectories(
        make_forest(seed, 4, 4),
        row_length=32,
        max_nodes=6,
        max_states=12,
        rows_multiple=2,
        share_prefixes=models.shares_prefixes(config),
    )


def training(config, model=None):
    """Base parameters, a state of adapters, and the functions that score and update it."""
    model = model or scoring.policy_model(config)
    base = make_params(config)
    train_state, shardings = sharding.init_sharded(
        lambda key: state.init_state(lora.init_adapters(config, LORA, key), OPTIMIZER),
        jax.random.key(0),
        mesh=MESH,
    )
    score = scoring.make_score_fn(model, mesh=MESH, micro_rows=2, frozen=base)
    step = update.make_policy_update(
        model,
        OPTIMIZER,
        losses.PolicyLossConfig(),
        update.UpdateConfig(micro_rows=2),
        mesh=MESH,
        shardings=shardings,
        frozen=base,
    )
    return base, train_state, score, step


@each_family
def test_only_adapters_are_trained_and_the_base_stays_bit_for_bit(family):
    config, rows = FAMILIES[family], packed(FAMILIES[family]).rows
    traces, model = [], scoring.policy_model(config)

    def counted(params, rows):
        traces.append(1)
        return model.hidden(params, rows)

    base, train_state, score, step = training(
        config, scoring.PolicyModel(counted, model.unembedding)
    )
    before, first = copy(base), copy(train_state.params)
    old = score(train_state.params, rows)
    plain = scoring.make_score_fn(model, mesh=MESH, micro_rows=2)
    np.testing.assert_allclose(old.logp, plain(base, rows).logp, atol=1e-5)
    sign = np.where(rows.tokens % 2, 1.0, -1.0).astype(np.float32)
    mask = rows.generated_mask
    for _ in range(3):
        batch = update.PolicyBatch(rows, mask, sign, old.logp, old.logp)
        train_state, metrics = step(train_state, batch)
    assert metrics["grad_norm"] > 0 and len(traces) == 2, "one trace of the score, one of the loss"
    assert_equal_bits(copy(base), before)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), first, copy(train_state.params))
    assert all(jax.tree.leaves(moved))
    # Moments exist for the factors alone.
    size = lora.num_adapter_params(config, LORA)
    assert sum(x.size for x in jax.tree.leaves(train_state.opt_state) if x.ndim) == 2 * size
    # Log-probs, entropies and what a critic reads are those of the adapted model.
    new = score(train_state.params, rows)
    merged = plain(lora.merge(base, train_state.params), rows)
    change = (new.logp - old.logp)[mask]
    assert change[sign[mask] > 0].mean() > 0 > change[sign[mask] < 0].mean()
    at_states = rows.state_pos >= 0
    for got, want, was in (
        (new.logp[mask], merged.logp[mask], old.logp[mask]),
        (new.entropy[mask], merged.entropy[mask], old.entropy[mask]),
        (new.state_hidden[at_states], merged.state_hidden[at_states], old.state_hidden[at_states]),
    ):
        np.testing.assert_allclose(got, want, atol=1e-4)
        assert np.abs(got - was).max() > 1e-3


def test_no_gradient_of_the_base_is_computed():
    """Neither a product nor any other result of the backward pass has a frozen matrix's shape."""
    # Sizes that occur nowhere else, and no casts, which would have the shape as well.
    config = dataclasses.replace(DENSE, vocab_size=46, d_ff=38)
    model, rows = scoring.policy_model(config), packed(config).rows
    loss = update.make_policy_loss(model, losses.PolicyLossConfig(), 1.0)
    base, adapters = make_params(config), make_adapters(config)
    shape = rows.tokens.shape
    batch = update.PolicyBatch(rows, rows.generated_mask, *(np.zeros(shape, np.float32),) * 3)

    def text(params, frozen):
        accumulate = update.jit_accumulate(loss, MESH, None)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return accumulate.lower(params, zeros, batch, 1.0, frozen).compile().as_text()

    def made(text):
        """Shapes of a frozen matrix that some instruction of the program adds up or multiplies."""
        results = re.findall(r"= f32\[([\d,]+)\]\S* (dot|add|multiply|scatter)\(", text)
        matrices = {(46, 16), (38, 16), (16, 38), (2, 38, 16), (2, 16, 38)}
        return {tuple(map(int, s.split(","))) for s, _ in results} & matrices

    assert (46, 16) in made(text(base, None)) and len(made(text(base, None))) > 1
    assert not made(text(adapters, base))


EIGHT_DEVICES = """
import json, sys
import jax, numpy as np
from focus.learner import losses, scoring, sharding, state, update
from focus.policy import lora
import test_lora

config = test_lora.FAMILIES[sys.argv[1]]
rows = test_lora.packed(config).rows
rng = np.random.default_rng(0)
ADVANTAGES = rng.normal(size=rows.tokens.shape).astype(np.float32)
model = scoring.policy_model(config)
# Small steps: Adam makes full ones of the noise of gradients near 0, and the next pass sees it.
OPTIMIZER = state.make_optimizer(state.OptimizerConfig(learning_rate=1e-3))
assert len(jax.devices()) == 8


def run(devices, *shape):
    mesh = sharding.make_mesh(*shape, devices=devices)
    params = test_lora.make_params(config)
    places = sharding.shardings_of(params, mesh)
    base = jax.device_put(params, places)
    train_state, shardings = sharding.init_sharded(
        lambda key: state.init_state(lora.init_adapters(config, test_lora.LORA, key),
                                     OPTIMIZER),
        jax.random.key(0), mesh=mesh)
    for group, tree in train_state.params.items():
        for name, adapter in tree.items():
            cut = places[group][name].spec
            assert adapter.a.sharding.spec[1:] == (cut[1], None), name
            assert adapter.b.sharding.spec[1:] == (None, cut[2]), name
    score = scoring.make_score_fn(model, mesh=mesh, micro_rows=8, frozen=base)
    old = score(train_state.params, rows)
    step = update.make_policy_update(
        model, OPTIMIZER, losses.PolicyLossConfig(entropy_coefficient=0.01),
        update.UpdateConfig(micro_rows=8), mesh=mesh, shardings=shardings, frozen=base)
    batch = update.PolicyBatch(rows, rows.generated_mask, ADVANTAGES, old.logp, old.logp)
    metrics = []
    for _ in range(2):
        train_state, more = step(train_state, batch)
        metrics.append(more)
    jax.tree.map(lambda x, s: np.testing.assert_(x.sharding.is_equivalent_to(s, x.ndim)),
                 train_state, shardings)
    merged = jax.jit(lora.merge, out_shardings=places)(base, train_state.params)
    return score(train_state.params, rows), metrics, jax.device_get((train_state, merged))


want_scores, want_metrics, want = run(jax.devices()[:1], 1, 1, 1, 1)
mask = rows.generated_mask
for shape in json.loads(sys.argv[2]):
    scores, metrics, got = run(jax.devices(), *shape)
    np.testing.assert_allclose(scores.logp[mask], want_scores.logp[mask], atol=2e-4)
    for a, b in zip(metrics, want_metrics):
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, err_msg=name)
    # First moments are the gradients, up to a factor; Adam's quotient would hide their size.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max()),
        got[0].opt_state, want[0].opt_state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), got[1], want[1])
    print("same", shape, flush=True)
"""
# Every way to write 8 devices as data x fsdp x tensor x sequence.
SHAPES = [s for s in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(s) == 8]


def check_shapes(family, shapes):
    out = run_program(EIGHT_DEVICES, family, json.dumps(shapes), timeout=1200)
    assert out.count("same") == len(shapes)


def test_one_device_and_eight_train_the_same_adapters():
    check_shapes("dense", [(1, 2, 2, 2), (2, 4, 1, 1)])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mesh_of_eight_devices_trains_the_same_adapters(family):
    # Keys and values have two heads of 16 columns, and so have tensors of 8 devices a cut.
    check_shapes(family, SHAPES)


# --- whole runs ----------------------------------------------------------------------------------

OVERRIDES = {"steps": 4, "learner.lora.rank": 8, "learner.kl_coefficient": 0.01}


@pytest.fixture(scope="module")
def run(finished):
    """A run that trains adapters, with the base as the reference of its loss."""
    return finished("focus", **OVERRIDES)


@pytest.fixture(scope="module")
def trained(run, prepare):
    """The run's trainer, and its last state."""
    trainer = Trainer(run.config, *prepare(run.config))
    return trainer, restored(trainer, run.workdir)


def restored(trainer, workdir):
    checkpointer = Checkpointer(workdir)
    found = checkpointer.restore(trainer.init_state()).state
    checkpointer.close()
    return found


def test_a_run_trains_adapters_and_compiles_nothing_after_the_first_steps(run, trained):
    assert run.summary["recompilations_after_warmup"] == 0
    assert run.summary["dose"]["tokens"] > 0
    trainer, last = trained
    first = copy(trainer.init_state().params)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), first, copy(last.params))
    assert all(jax.tree.leaves(moved))
    size = lora.num_adapter_params(trainer.model, LoraConfig(8))
    assert sum(x.size for x in jax.tree.leaves(last.params)) == size
    record = json.loads(next(run.workdir.glob("checkpoints/*/checkpoint.json")).read_text())
    assert not {n for n in record["record"]["arrays"] if "embed" in n or n.endswith(".base")}
    # The engine samples from what the learner scores: merged there, applied here.
    records = read_metrics(run.workdir)
    assert all(record["logp_difference/max"] < 1e-3 for record in records)
    # The reference of the loss is the base, which the policy leaves.
    divergences = [r["policy/ref_kl"] for r in records if "policy/ref_kl" in r]
    assert 0 <= divergences[0] < divergences[-1] < 1


def test_the_engine_gets_merged_weights_and_evaluation_too(run, trained, monkeypatch):
    trainer, last = trained
    weights = trainer.rollout_params(last)
    base = trainer.start.params
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        copy(weights),
        copy(lora.merge(base, last.params)),
    )
    np.testing.assert_array_equal(weights["embed"], base["embed"])
    assert np.any(weights["layers"]["q_proj"] != base["layers"]["q_proj"])
    pushed = []
    merged = Trainer.rollout_params
    spy = lambda *args: pushed.append(merged(*args)) or pushed[-1]  # noqa: E731
    monkeypatch.setattr(Trainer, "rollout_params", spy)
    result = evaluate_run(run.workdir, num_tasks=4)
    assert result["step"] == run.config.steps and 0 <= result["success"] <= 1
    assert_equal_bits(copy(pushed[0]), copy(weights))


def test_a_run_leaves_its_adapter_as_peft_has_it(run, trained):
    trainer, last = trained
    found, loaded = peft.load_adapter(run.workdir / "adapter", trainer.model)
    assert (found.rank, found.scale) == (8, 2.0)
    assert_equal_bits(copy(loaded), copy(last.params))
    model = sum(x.nbytes for x in jax.tree.leaves(trainer.start.params))
    assert (run.workdir / "adapter" / "adapter_model.safetensors").stat().st_size < model


def test_adapters_are_not_put_on_another_base(run, trained, prepare):
    trainer, last = trained
    env, start = prepare(run.config)
    other = dataclasses.replace(start, params=jax.tree.map(lambda x: x * 1.5, start.params))
    with pytest.raises(ValueError, match="trained on parameters with checksum .* now starts from"):
        Trainer(run.config, env, other).rollout_params(last)


@pytest.mark.slow
def test_the_command_of_the_readme_trains_and_a_resume_changes_not_a_bit(
    run, trained, prepare, tmp_path
):
    readme = (REPOSITORY / "README.md").read_text()
    (line,) = (s for s in readme.splitlines() if "learner.lora" in s and s.startswith("python"))
    command = line.replace("configs/quickstart.py", "tests/tiny.py").split()
    command[0] = sys.executable
    command[command.index("--workdir") + 1] = str(tmp_path)
    extra = {k: v for k, v in OVERRIDES.items() if f"--config.{k}=" not in line} | {"steps": 2}
    assert len(extra) == len(OVERRIDES) - 1, "the README sets the rank"
    done = subprocess.run(
        [*command, *(f"--config.{k}={v}" for k, v in extra.items())],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert peft.load_adapter(tmp_path / "adapter", trained[0].model)[0].rank == 8
    train(run.config, tmp_path)
    assert_equal_bits(copy(restored(trained[0], tmp_path)), copy(trained[1]))
    assert (tmp_path / "adapter/adapter_model.safetensors").read_bytes() == (
        run.workdir / "adapter/adapter_model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": -1}, "lora.rank must be a whole number >= 0, got -1"),
        ({"rank": 4, "targets": ()}, "lora.targets is a tuple of names"),
        ({"rank": 4, "targets": ("wq",)}, "no such projection; it has q_proj"),
        ({"rank": 64}, "lora.rank 64 is more than q_proj"),
    ],
)
def test_a_config_that_cannot_be_is_refused_before_anything_is_made(change, message):
    config = tiny.get_config("focus")
    config.learner.lora.update(change)
    with pytest.raises(ValueError, match=message):
        experiment.validate(config)


def test_a_config_that_was_read_from_json_has_the_same_adapters():
    config = tiny.get_config("focus")
    assert experiment.lora_config(config) is None
    config.learner.lora.rank = 4
    again = ml_collections.ConfigDict(json.loads(config.to_json()))
    want = LoraConfig(4, 16.0, ("all-linear",))
    assert experiment.lora_config(config) == experiment.lora_config(again) == want
