"""The critic with its own backbone: what only it can learn, exact under every split, compiled
once, sharded like the policy, part of every checkpoint."""

import dataclasses
import json
import random

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import AbstractMesh, AxisType
from learner_steps import born, evidence_of, forest, named, pack
from random_trajectories import VOCAB, make_trajectory

from focus.critic import head
from focus.learner import critic_own_backbone as backbone
from focus.learner import scoring, sharding, state
from focus.learner.critic_on_policy import CriticLearner, CriticOptions
from focus.policy import transformer
from focus.run import experiment
from focus.train import train

MODEL_CONFIG = transformer.ModelConfig(
    vocab_size=VOCAB,
    d_model=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    d_ff=24,
    max_context=64,
    tie_embeddings=False,
)
MODEL = scoring.policy_model(MODEL_CONFIG)
MESH = sharding.make_mesh(devices=jax.devices()[:1])
HEADS = head.CriticConfig(feature_dim=16, hidden_dim=16, cost_scale=4.0)
PARAMS = jax.jit(lambda key: transformer.init_params(MODEL_CONFIG, key))(jax.random.key(0))
KEY = jax.random.key(1)


def make_critic(model=MODEL, mesh=MESH, **options):
    return backbone.BackboneCritic(
        HEADS,
        backbone.BackboneOptions(**{"micro_rows": 2, "epochs": 1} | options),
        model,
        PARAMS,
        mesh=mesh,
    )


def read(critic, critic_state, packed, params=PARAMS):
    """[B, S + 1, H] hidden states, as the trainer lays them out."""
    train_state = state.TrainState(np.int32(0), params, None, critic_state)
    hidden = critic.features(train_state, packed.rows)
    return packed.states_to_trajectories(hidden, (32, 6))


def learn(critic, trajectories, critic_state=None, *, key=KEY, params=PARAMS):
    packed = pack(trajectories)
    if critic_state is None:
        critic_state = born(critic, MESH, params)
    hidden = read(critic, critic_state, packed, params)
    mean = critic.belief(critic_state, hidden).mean
    evidence, index = evidence_of(trajectories, hidden, mean)
    return critic.learn(critic_state, evidence, key, packed=packed, index=index)


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def test_the_backbone_starts_as_a_copy_of_the_policy_and_all_of_it_is_trained():
    critic = make_critic()
    start = born(critic, MESH, PARAMS)
    copied = {name: x for name, x in PARAMS.items() if name != "lm_head"}
    jax.tree.map(np.testing.assert_array_equal, start.backbone, copied)
    packed = pack(forest())
    scores = scoring.make_score_fn(MODEL, mesh=MESH, micro_rows=2)(PARAMS, packed.rows)
    train_state = state.TrainState(np.int32(0), None, None, start)
    at_states = packed.rows.state_pos >= 0
    hidden = critic.features(train_state, packed.rows)
    np.testing.assert_allclose(hidden[at_states], scores.state_hidden[at_states], atol=1e-6)

    policy = jax.tree.map(np.array, PARAMS)
    new, metrics = learn(critic, forest())
    for name, now in named((new.backbone, new.critic.trained)).items():
        before = named((start.backbone, start.critic.trained))[name]
        assert np.abs(now - before).max() > 0, name
    jax.tree.map(np.testing.assert_array_equal, new.critic.fixed, start.critic.fixed)
    jax.tree.map(np.testing.assert_array_equal, PARAMS, policy)
    assert metrics["num_updates"] == 1 and metrics["grad_norm"] > 0


def episodes(seed, count=24):
    """One-turn episodes that go well where the first token is 1 and badly where it is 2."""
    out = []
    for i in range(count):
        rng = random.Random(f"{seed}.{i}")
        first = rng.choice((1, 2))
        prompt = (first, *(rng.randrange(3, 9) for _ in range(3)), 9)
        episode = make_trajectory(rng, f"{seed}.{i}", turns=1, prompt=prompt)
        out.append(dataclasses.replace(episode, outcome=float(first == 1)))
    return out


def test_it_learns_a_value_that_the_policys_hidden_states_do_not_carry():
    """A policy without attention sees the last token of a state, and all end with the same."""
    layers = PARAMS["layers"]
    blind = {**PARAMS, "layers": {**layers, "o_proj": 0 * layers["o_proj"]}}

    def train_and_test(critic):
        critic_state = born(critic, MESH, blind)
        packed = pack(episodes(0))
        critic_state = critic.fit_standardisation(
            critic_state, read(critic, critic_state, packed, blind), packed.state_mask((32, 6))
        )
        for step in range(32):
            key = jax.random.key(step)
            critic_state, _ = learn(critic, episodes(step), critic_state, key=key, params=blind)
        unseen = episodes("unseen")
        hidden = read(critic, critic_state, pack(unseen), blind)
        belief = critic.belief(critic_state, hidden)
        error = belief.mean[: len(unseen), 0] - [t.outcome for t in unseen]
        cost = belief.cost[: len(unseen), 0].sum() / sum(t.num_tokens for t in unseen)
        return np.mean(error**2), cost

    score = scoring.make_score_fn(MODEL, mesh=MESH, micro_rows=2)
    frozen, _ = train_and_test(
        CriticLearner(HEADS, CriticOptions(minibatch_size=64, capacity=256), score, mesh=MESH)
    )
    own, cost_ratio = train_and_test(
        make_critic(micro_rows=8, epochs=2, learning_rate=3e-3, backbone_learning_rate=1e-2)
    )
    assert frozen > 0.2  # as good as not knowing: a variance of 1/4
    assert own < 0.02, own
    assert 0.7 < cost_ratio < 1.4


def test_neither_micro_batches_nor_crowded_rows_change_an_update(monkeypatch):
    """Pitfall 11 for the critic: outcomes weigh differently and meet in few rows."""
    laid_out, sizes = backbone.evidence_rows, []

    def narrow(packed, evidence, index, width):
        batches = [laid_out(packed, evidence, index, w) for w in (width, 2)]
        sizes.extend(b.rows.num_rows for b in batches)
        return batches[1]

    results = [learn(make_critic(micro_rows=n), forest()) for n in (1, 5)]
    monkeypatch.setattr(backbone, "evidence_rows", narrow)
    results.append(learn(make_critic(), forest()))
    assert sizes[1] > sizes[0]  # rows were repeated
    want, metrics = results[0]
    for got, more in results[1:]:
        # First moments are the gradients, up to a factor; Adam's quotient hides their size.
        assert_close(got.opt_state, want.opt_state, rtol=1e-3, atol=1e-7)
        assert_close(more, metrics, rtol=1e-4)


def test_minibatches_of_a_pass_are_equal_in_the_mean():
    """However the rows are split, every gradient is that of the step's weighted mean loss."""
    critic = make_critic()
    for minibatches in (1, 2, 3, 20):
        options = dataclasses.replace(critic.options, minibatches=minibatches, epochs=2)
        critic.options = options
        parts = list(critic._minibatches(7, KEY))
        assert len(parts) == 2 * min(minibatches, 7)
        np.testing.assert_allclose(sum(share for _, share in parts), 2.0)
        for each in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):
            assert sorted(np.concatenate([rows for rows, _ in each])) == list(range(7))


def test_evidence_lies_beside_the_row_of_its_state():
    trajectories = forest()
    critic = make_critic()
    critic_state = born(critic, MESH, PARAMS)
    packed = pack(trajectories)
    hidden = read(critic, critic_state, packed)
    mean = critic.belief(critic_state, hidden).mean
    evidence, index = evidence_of(trajectories, hidden, mean)
    batch = backbone.evidence_rows(packed, evidence, index, width=3)
    # Read where the rows say, every piece has the hidden state that it was made with.
    everything = np.asarray(jax.jit(MODEL.hidden)(PARAMS, batch.rows))
    row, column = np.nonzero(batch.evidence.mask)
    laid_out = everything[row, batch.evidence.features[row, column]]

    def pieces(features, e, at):
        columns = (e.target, e.weight, e.cost, e.cost_weight, e.bootstrap_id)
        table = np.column_stack([c[at] for c in columns] + [features])
        return table[np.lexsort(np.round(table, 3).T)]

    got = pieces(laid_out, batch.evidence, (row, column))
    want = pieces(evidence.features[evidence.mask], evidence, evidence.mask)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert len(got) > 20 and (batch.evidence.mask.sum(axis=1) > 0).all()
    with pytest.raises(ValueError, match="state 5 of trajectory 0, which is in no packed row"):
        backbone.evidence_rows(packed, evidence, np.full_like(index, [0, 5]), width=3)


def test_padding_reaches_nothing_and_a_step_without_evidence_changes_nothing():
    trajectories = forest()
    critic = make_critic(uncertainty="posterior")
    critic_state = born(critic, MESH, PARAMS)
    packed = pack(trajectories)
    hidden = read(critic, critic_state, packed)
    mean = critic.belief(critic_state, hidden).mean
    evidence, index = evidence_of(trajectories, hidden, mean)
    floats = ("features", "target", "weight", "cost", "cost_weight")

    def poisoned(mask):
        return dataclasses.replace(
            evidence,
            mask=mask,
            **{
                name: np.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, np.nan)
                for name in floats
                if (x := getattr(evidence, name)) is not None
            },
        )

    want = critic.learn(critic_state, evidence, KEY, packed=packed, index=index)
    got = critic.learn(critic_state, poisoned(evidence.mask), KEY, packed=packed, index=index)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.abs(want[0].posterior.precision - critic_state.posterior.precision).max() > 0
    nothing = poisoned(np.zeros_like(evidence.mask))
    got, metrics = critic.learn(critic_state, nothing, KEY, packed=packed, index=index)
    for name in ("critic", "backbone", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(got, name), getattr(critic_state, name))
    assert metrics["num_updates"] == 0 and np.isfinite(list(metrics.values())).all()


def test_steps_of_any_size_are_traced_once():
    traces = []

    def hidden(params, rows):
        traces.append(rows.tokens.shape)
        return MODEL.hidden(params, rows)

    critic = make_critic(dataclasses.replace(MODEL, hidden=hidden), minibatches=2)
    critic_state = None
    sizes = [(2, 1), (6, 6), (12, 12)]
    assert len({pack(forest(i, *size)).rows.num_rows for i, size in enumerate(sizes)}) == 3
    for i, size in enumerate(sizes):
        critic_state, _ = learn(critic, forest(i, *size), critic_state)
    assert len(traces) == 2, "one to read, one for the gradient"


def test_a_loss_that_is_not_finite_leaves_the_state_alone():
    critic = make_critic(epochs=3, backbone_learning_rate=1e20)
    start = born(critic, MESH, PARAMS)
    before = jax.tree.map(np.array, start)
    with pytest.raises(FloatingPointError, match="not replaced. Lower .*backbone_learning_rate"):
        learn(critic, forest(), start)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, start))


def test_a_backbone_lies_like_the_policy_and_heads_everywhere():
    mesh = AbstractMesh((1, 2, 2, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 4)
    optimizer = state.make_optimizer(state.OptimizerConfig())
    critic = make_critic(uncertainty="posterior")
    shapes = jax.eval_shape(
        lambda params: state.init_state(params, optimizer, critic.init(KEY, params)), PARAMS
    )
    specs = {name: x.spec for name, x in named(sharding.shardings_of(shapes, mesh)).items()}
    for name in named(PARAMS):
        tail = f"/{name}"
        places = [spec for path, spec in specs.items() if path.endswith(tail)]
        assert len(places) == (3 if name == "lm_head" else 6), name
        assert set(places) == {specs[f"params/{name}"]}, name
    heads = [s for p, s in specs.items() if p.startswith("critic/") and "backbone" not in p]
    assert len(heads) > 20 and not any(heads)


def test_a_run_goes_on_with_its_own_backbone_after_a_stop(tmp_path, cache_dir):
    """Two steps at once equal one, a new process's restore, and one: to the bit."""

    def run(name, steps):
        config = tiny.get_config("focus")
        config.steps = steps
        config.critic.update(backbone="own", uncertainty="posterior", pretrain_episodes=0)
        summary = train(config, tmp_path / name)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        kept = [
            {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "heldout/"))}
            for line in lines
        ]
        return summary, kept

    summary, straight = run("straight", 2)
    run("stopped", 1)
    _, resumed = run("stopped", 2)
    assert len(straight) == 2 and straight == resumed
    assert straight[1]["critic/num_updates"] > 0 and straight[1]["critic/evidence_rows"] > 0
    assert summary["max_step_tokens"] <= summary["budget_per_step"]


def test_a_shared_backbone_cannot_be_cross_fitted():
    config = tiny.get_config("focus")
    config.critic.update(backbone="own", values_from="crossfit")
    with pytest.raises(ValueError, match="share a backbone that does; use values_from='before'"):
        experiment.validate(config)


def test_a_backbone_of_its_own_cannot_be_pretrained_on_the_policys_hidden_states():
    config = tiny.get_config("focus")
    config.critic.backbone = "own"
    with pytest.raises(ValueError, match="cannot be pretrained .* set critic.pretrain_episodes=0"):
        experiment.validate(config)
