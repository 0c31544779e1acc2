"""Laws of the critic: ensemble, priors, beliefs, losses, replay and training."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.critic import head, losses, posterior, state
from focus.critic.calibration import calibration
from focus.critic.head import CriticConfig, CriticParams

CONFIG = CriticConfig(feature_dim=12, hidden_dim=16)
HL_GAUSS = dataclasses.replace(CONFIG, value="hl_gauss", value_range=(-1.0, 2.0))
BOTH = pytest.mark.parametrize("config", [CONFIG, HL_GAUSS], ids=["bernoulli", "hl_gauss"])

# Jitted once: op by op they would compile a hundred small programs.
init_critic = jax.jit(head.init_critic, static_argnums=0)
apply_critic = jax.jit(head.apply_critic, static_argnums=0)
get_belief = jax.jit(head.belief, static_argnums=0)


def make_evidence(features, target, *, weight=None, cost=None, ids=None, fold=None, mask=None):
    n = len(target)
    return state.Evidence(
        features=jnp.asarray(features, jnp.float32),
        target=jnp.asarray(target, jnp.float32),
        weight=jnp.ones(n) if weight is None else jnp.asarray(weight, jnp.float32),
        cost=jnp.full(n, 100.0) if cost is None else jnp.asarray(cost, jnp.float32),
        cost_weight=jnp.ones(n),
        bootstrap_id=jnp.arange(n, dtype=jnp.uint32) if ids is None else jnp.asarray(ids),
        fold=jnp.zeros(n, jnp.int32) if fold is None else jnp.asarray(fold, jnp.int32),
        mask=jnp.ones(n, bool) if mask is None else jnp.asarray(mask),
    )


def random_evidence(config, n, seed=0):
    rng = np.random.default_rng(seed)
    low, high = config.value_range
    return make_evidence(
        rng.normal(size=(n, config.feature_dim)),
        rng.uniform(low, high, n),
        weight=rng.uniform(0.1, 4, n),
        cost=rng.integers(1, 500, n),
    )


def objective(config, critic, evidence, denominators=None, stop_gradient=True):
    masks = losses.training_masks(config, evidence.bootstrap_id, evidence.fold)
    if denominators is None:
        denominators = (
            losses.value_weight(evidence.weight, masks, evidence.mask),
            jnp.sum(jnp.where(evidence.mask, evidence.cost_weight, 0)),
        )
    return state.critic_objective(
        config, critic, evidence, masks, *denominators, stop_gradient=stop_gradient
    )[0]


# Head.


def test_the_ensemble_is_m_separate_networks_each_with_its_own_prior():
    critic = init_critic(CONFIG, jax.random.key(0))
    features = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)
    out = apply_critic(CONFIG, critic, jnp.asarray(features))

    centred = features - features.mean(-1, keepdims=True)
    x = centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-6)

    def mlp(params, m):
        p = {name: np.asarray(array[m]) for name, array in params.items()}
        return np.asarray(jax.nn.gelu(x @ p["w_in"] + p["b_in"])) @ p["w_out"] + p["b_out"]

    for m in range(8):
        alone = mlp(critic.trained["value"], m) + mlp(critic.fixed["prior"], m)
        np.testing.assert_allclose(out.value_logits[:, m], alone[:, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        out.log_cost, mlp(critic.trained["cost"], 0)[:, 0], rtol=1e-4, atol=1e-5
    )


@BOTH
def test_priors_set_untrained_members_apart_and_scale_with_prior_scale(config):
    features = jax.random.normal(jax.random.key(1), (256, 12))
    critic = init_critic(config, jax.random.key(0))
    spreads = []
    for prior_scale in (0.0, 1.0):
        c = dataclasses.replace(config, prior_scale=prior_scale)
        out = apply_critic(c, critic, features)
        spreads.append(float(jnp.sqrt(jnp.mean(get_belief(c, out.value_logits).variance))))
    low, high = config.value_range
    assert spreads[0] < 0.05 * (high - low)
    assert 0.1 * (high - low) < spreads[1] < 0.35 * (high - low)


@BOTH
def test_error_features_reproduce_the_members_sample_covariance(config):
    logits = 2 * jax.random.normal(jax.random.key(0), (6, 8, config.num_logits))
    logits = logits if config.value == "hl_gauss" else logits[..., 0]
    belief = get_belief(config, logits)
    values = np.asarray(head.member_values(config, logits), np.float64)
    np.testing.assert_allclose(
        belief.error_features @ belief.error_features.T, np.cov(values), atol=1e-6
    )
    np.testing.assert_allclose(belief.variance, values.var(-1, ddof=1), rtol=1e-4)
    np.testing.assert_allclose(belief.mean, values.mean(-1), rtol=1e-5)


def test_outcome_noise_is_bernoulli_and_floored():
    belief = get_belief(CONFIG, jnp.array([[0.0] * 8, [30.0] * 8]))
    np.testing.assert_allclose(belief.noise_variance, [0.25, CONFIG.noise_floor])


def test_hl_gauss_recovers_mean_and_outcome_noise_over_the_whole_range():
    targets = jnp.array([-1.0, -0.97, 0.1234, 1.5, 2.0])
    probs = losses.hl_gauss_probs(HL_GAUSS, targets)
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(probs @ head.bin_centres(HL_GAUSS), targets, atol=2e-3)
    # Outcomes -1 and 2, half of the time each: mean 0.5, variance 2.25.
    mixture = (probs[0] + probs[-1]) / 2
    logits = jnp.broadcast_to(jnp.log(mixture + 1e-20), (1, 8, HL_GAUSS.num_bins))
    belief = get_belief(HL_GAUSS, logits)
    np.testing.assert_allclose(belief.mean, [0.5], atol=2e-3)
    np.testing.assert_allclose(belief.noise_variance, [2.25], rtol=0.01)
    # A certain outcome is left with the floor: the smoothing is not noise.
    certain = jnp.broadcast_to(jnp.log(probs[2] + 1e-20), (1, 8, HL_GAUSS.num_bins))
    np.testing.assert_allclose(get_belief(HL_GAUSS, certain).noise_variance, [0.01], rtol=0.2)


def test_standardisation_removes_what_all_states_share():
    rng = np.random.default_rng(0)
    shared, own = rng.normal(size=12) * 10, rng.normal(size=(400, 12)) * 0.05
    mask = np.arange(400) < 300
    features = jnp.asarray(np.where(mask[:, None], shared + own, np.nan))
    critic = head.fit_standardisation(
        init_critic(CONFIG, jax.random.key(0)), features, jnp.asarray(mask)
    )
    x = np.asarray(head.standardised_features(critic, features))[mask]
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(x.std(0), 1, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_members": 4}, "num_members must be >= 8"),
        ({"value": "gauss"}, "'gauss'"),
        ({"value_range": (0.0, 2.0)}, "hl_gauss"),
        ({"bootstrap_rate": 0.0}, "bootstrap_rate"),
        ({"num_folds": 3}, "num_folds must divide"),
        ({"num_folds": 4}, "raise num_members"),
    ],
)
def test_a_wrong_config_says_so(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


# Posterior.


def test_posterior_is_bayesian_linear_regression():
    rng = np.random.default_rng(0)
    belief = posterior.init_posterior(jax.random.key(0), 12, 6, prior_variance=0.2)
    phi = np.asarray(posterior.project_features(belief, jnp.asarray(rng.normal(size=(9, 12)))))
    np.testing.assert_allclose(np.linalg.norm(phi, axis=-1), 1, rtol=1e-5)
    noise, weight = rng.uniform(0.05, 0.25, 9), rng.uniform(0.2, 8, 9)
    mask = np.arange(9) < 7
    updated = posterior.update_posterior(
        belief,
        jnp.asarray(np.where(mask[:, None], phi, np.nan)),
        jnp.asarray(np.where(mask, noise, 0.0)),
        jnp.asarray(np.where(mask, weight, np.nan)),
        jnp.asarray(mask),
    )
    # Dense reference in function space: condition the prior covariance on noisy observations.
    prior = 0.2 * phi @ phi.T
    seen = prior[:, mask]
    gain = seen @ np.linalg.inv(prior[np.ix_(mask, mask)] + np.diag((noise / weight)[mask]))
    errors = np.asarray(posterior.error_features(updated, jnp.asarray(phi)))
    np.testing.assert_allclose(errors @ errors.T, prior - gain @ seen.T, atol=1e-5)
    untouched = np.asarray(posterior.error_features(belief, jnp.asarray(phi)))
    np.testing.assert_allclose(untouched @ untouched.T, prior, atol=1e-6)


def test_forgetting_returns_to_the_prior_and_never_beyond():
    belief = posterior.init_posterior(jax.random.key(0), 12, 6, prior_variance=0.2)
    phi = posterior.project_features(belief, jax.random.normal(jax.random.key(1), (4, 12)))
    one, none = jnp.ones(4), jnp.zeros(4, bool)

    def variance(b):
        return np.sum(np.asarray(posterior.error_features(b, phi)) ** 2, -1)

    seen = posterior.update_posterior(belief, phi, 0.1 * one, 8 * one, ~none)
    trail = [variance(seen)]
    for _ in range(60):
        seen = posterior.update_posterior(seen, phi, one, one, none, retention=0.8)
        trail.append(variance(seen))
    assert np.all(trail[0] < 0.02)
    assert np.all(np.diff(trail, axis=0) > -1e-6)
    np.testing.assert_allclose(trail[-1], 0.2, rtol=1e-3)


def test_posterior_belief_keeps_mean_and_noise():
    critic_belief = get_belief(CONFIG, jax.random.normal(jax.random.key(0), (4, 8)))
    gaussian = posterior.init_posterior(jax.random.key(0), 12, 6)
    phi = posterior.project_features(gaussian, jax.random.normal(jax.random.key(1), (4, 12)))
    belief = posterior.posterior_belief(critic_belief, gaussian, phi)
    np.testing.assert_allclose(belief.mean, critic_belief.mean)
    np.testing.assert_allclose(belief.noise_variance, critic_belief.noise_variance)
    np.testing.assert_allclose(belief.variance, [0.1] * 4, rtol=1e-5)
    assert belief.error_features.shape == (4, 6)


# Losses.


@BOTH
def test_loss_and_gradient_do_not_depend_on_the_split(config):
    # Pitfall 11 for the critic: any assignment of rows to parts gives the same sum.
    critic = init_critic(config, jax.random.key(0))
    evidence = random_evidence(config, 12)
    masks = losses.training_masks(config, evidence.bootstrap_id, evidence.fold)
    totals = losses.value_weight(evidence.weight, masks, evidence.mask), 12.0

    @jax.jit
    def loss_and_gradient(mask):
        def loss(trained):
            rows = dataclasses.replace(evidence, mask=mask)
            return objective(config, CriticParams(trained, critic.fixed), rows, totals)

        return jax.value_and_grad(loss)(critic.trained)

    whole = loss_and_gradient(evidence.mask)

    @settings(deadline=None, max_examples=20)
    @given(part=st.lists(st.integers(0, 2), min_size=12, max_size=12))
    def check(part):
        parts = [loss_and_gradient(jnp.asarray(np.array(part) == i)) for i in range(3)]
        summed = jax.tree.map(lambda *x: sum(x), *parts)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), whole, summed
        )

    check()


def test_value_loss_is_the_weighted_mean_cross_entropy():
    logits = jax.random.normal(jax.random.key(0), (3, 8))
    target, weight = jnp.array([1.0, 0.25, 0.0]), jnp.array([1.0, 4.0, 0.5])
    boot = jax.random.bernoulli(jax.random.key(1), 0.5, (3, 8))
    mask = jnp.ones(3, bool)
    total = losses.value_weight(weight, boot, mask)
    loss, metrics = losses.value_loss(CONFIG, logits, target, weight, boot, mask, total)
    expected, weights = 0.0, 0.0
    for n in range(3):
        for m in range(8):
            if boot[n, m]:
                p = 1 / (1 + np.exp(-float(logits[n, m])))
                y = float(target[n])
                expected -= float(weight[n]) * (y * np.log(p) + (1 - y) * np.log(1 - p))
                weights += float(weight[n])
    np.testing.assert_allclose(loss, expected / weights, rtol=1e-5)
    np.testing.assert_allclose(metrics["target_mean"], (1 + 4 * 0.25) / 5.5, rtol=1e-6)


@BOTH
def test_nan_in_padding_reaches_neither_loss_nor_gradient(config):
    # Pitfall 13.
    critic = init_critic(config, jax.random.key(0))
    clean = random_evidence(config, 9)
    clean = dataclasses.replace(clean, mask=jnp.arange(9) < 6)

    def poison(x):
        return jnp.where(clean.mask.reshape((9,) + (1,) * (x.ndim - 1)), x, jnp.nan)

    padded = jax.tree.map(lambda x: poison(x) if x.dtype == jnp.float32 else x, clean)

    def loss(arguments):
        trained, evidence = arguments
        return objective(config, CriticParams(trained, critic.fixed), evidence, None, False)

    @jax.jit
    def value_and_grad(evidence):
        value, (trained, rows) = jax.value_and_grad(loss, allow_int=True)(
            (critic.trained, evidence)
        )
        return value, trained, rows.features

    want, got = value_and_grad(clean), value_and_grad(padded)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got[1], want[1]
    )
    np.testing.assert_allclose(got[2][:6], want[2][:6], rtol=1e-4, atol=1e-7)
    assert np.all(np.asarray(got[2][6:]) == 0)


def test_only_an_own_backbone_gets_gradients_from_the_critic():
    critic = init_critic(CONFIG, jax.random.key(0))
    evidence = random_evidence(CONFIG, 6)

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(critic, stop_gradient):
        def loss(hidden):
            rows = dataclasses.replace(evidence, features=hidden)
            return objective(CONFIG, critic, rows, None, stop_gradient)

        return jnp.max(jnp.abs(jax.grad(loss)(evidence.features)))

    assert gradient(critic, True) == 0
    assert gradient(critic, False) > 1e-4
    # Without its trained part only the priors are left, and they pass nothing on.
    priors = CriticParams(jax.tree.map(jnp.zeros_like, critic.trained), critic.fixed)
    assert gradient(priors, False) == 0


def test_targets_outside_the_range_are_clipped_and_counted():
    logits, mask = jnp.zeros((4, 8)), jnp.array([True, True, True, False])
    boot = jnp.ones((4, 8), bool)
    _, metrics = losses.value_loss(
        CONFIG, logits, jnp.array([1.5, 1.0, 0.2, 9.0]), jnp.ones(4), boot, mask, 24.0
    )
    np.testing.assert_allclose(metrics["target_clipped"], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["target_mean"], 2.2 / 3, rtol=1e-6)


def test_states_that_share_an_outcome_share_its_members():
    ids = jnp.array(
        [losses.evidence_id(name) for name in ("7/0.0", "7/0.1", "7/0.0", "7/0.0/2")], jnp.uint32
    )
    config = dataclasses.replace(CONFIG, num_members=64)
    masks = np.asarray(losses.bootstrap_masks(config, ids))
    np.testing.assert_array_equal(masks[0], masks[2])
    assert np.any(masks[0] != masks[1]) and np.any(masks[0] != masks[3])
    np.testing.assert_array_equal(masks, losses.bootstrap_masks(config, ids))
    many = losses.bootstrap_masks(config, jnp.arange(500, dtype=jnp.uint32))
    assert abs(float(jnp.mean(many)) - config.bootstrap_rate) < 0.02
    other_seed = dataclasses.replace(config, bootstrap_seed=1)
    assert np.any(masks != np.asarray(losses.bootstrap_masks(other_seed, ids)))


def test_cost_is_calibrated_where_the_gradient_of_its_bias_vanishes():
    cost, mask = jnp.array([100.0, 500.0, 30.0, jnp.nan]), jnp.array([True, True, True, False])

    def loss(log_cost):
        return losses.cost_loss(CONFIG, log_cost, cost, jnp.ones(4), mask, 3.0)

    fitted = jnp.full(4, jnp.log(630.0 / 3 / CONFIG.cost_scale))
    np.testing.assert_allclose(jax.grad(lambda b: loss(fitted + b)[0])(0.0), 0, atol=1e-6)
    np.testing.assert_allclose(loss(fitted)[1]["cost_ratio"], 1, rtol=1e-5)
    np.testing.assert_allclose(loss(fitted + jnp.log(2.0))[1]["cost_ratio"], 2, rtol=1e-5)


# Replay buffer.


def test_newest_evidence_stays_and_old_evidence_expires():
    def rows(values, weights):
        return make_evidence(np.zeros((len(values), 12)), values, weight=weights)

    buffer = state.init_buffer(4, 12)
    buffer = state.add_evidence(buffer, rows([0.1, 0.2, 0.3], [1, 1, 1]))
    buffer = state.age_buffer(buffer, max_age=2)
    fresh = rows([0.5, 0.6, 0.7], [1, 8, jnp.nan])
    fresh = dataclasses.replace(fresh, mask=jnp.array([True, True, False]))
    buffer = state.add_evidence(buffer, fresh)
    np.testing.assert_allclose(buffer.evidence.target, [0.6, 0.5, 0.1, 0.2])
    assert list(np.asarray(buffer.age)) == [0, 0, 1, 1]
    decayed = state.decayed_evidence(buffer, 0.5)
    np.testing.assert_allclose(decayed.weight, [8, 1, 0.5, 0.5])
    np.testing.assert_allclose(decayed.cost_weight, [1, 1, 0.5, 0.5])
    for valid in ([True, True, True, True], [True, True, False, False], [False] * 4):
        buffer = state.age_buffer(buffer, max_age=2)
        assert list(np.asarray(buffer.evidence.mask)) == valid


def test_an_epoch_visits_every_row_once_and_padding_last():
    mask = jnp.array([True, False, True, True, False, True, False, False])
    index = np.asarray(state.minibatch_indices(jax.random.key(0), mask, 4))
    assert sorted(index.ravel()) == list(range(8))
    assert sorted(index[0]) == [0, 2, 3, 5]
    other = np.asarray(state.minibatch_indices(jax.random.key(1), mask, 4))
    assert np.any(index != other)


# Training.

TRAIN = CriticConfig(feature_dim=16, hidden_dim=32, cost_scale=100.0)
OPTIMIZER = optax.adam(3e-3)


def known_problem(n, seed, shift=0.0):
    """States on a smooth value function, with one 0/1 outcome and a cost each."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, 16))
    features[:, 0] += 3.0 * shift
    features[:, 1] -= 3.0 * shift
    value = 1 / (1 + np.exp(-1.5 * features[:, 2] + 1.5 * features[:, 3]))
    mean_cost = 100.0 * np.exp(0.5 * features[:, 4])
    return features, value, rng.uniform(size=n) < value, rng.poisson(mean_cost)


TRACES = collections.Counter()


@functools.cache
def initial_state():
    @jax.jit
    def init(key):
        return state.init_critic_state(TRAIN, OPTIMIZER, key, capacity=512, posterior_features=8)

    return init(jax.random.key(0))


@functools.cache
def jitted(config):
    """Observe and update of a configuration; counts the traces of the update."""
    update = state.make_critic_update(config, OPTIMIZER, num_epochs=4, minibatch_size=64)

    def traced_update(critic_state, key):
        TRACES[config] += 1
        return update(critic_state, key)

    def observe(critic_state, evidence):
        return state.observe(config, critic_state, evidence)

    return jax.jit(observe), jax.jit(traced_update)


def train(config, evidence, *, steps):
    observe, update = jitted(config)
    start = critic_state = initial_state()
    metrics = None
    for step in range(steps):
        critic_state = observe(critic_state, evidence)
        critic_state, metrics = update(critic_state, jax.random.key(step))
    return start, critic_state, metrics


@pytest.fixture(scope="module")
def trained():
    features, _, outcome, cost = known_problem(512, 0)
    return train(TRAIN, make_evidence(features, outcome, cost=cost), steps=8)


def test_the_critic_learns_a_known_value_function_and_its_cost(trained):
    start, end, metrics = trained
    features, value, _, cost = known_problem(512, 1)

    def errors(critic_state):
        out = apply_critic(TRAIN, critic_state.critic, jnp.asarray(features))
        belief = get_belief(TRAIN, out.value_logits)
        predicted = np.asarray(head.expected_cost(TRAIN, out.log_cost))
        return np.mean((belief.mean - value) ** 2), predicted

    before, _ = errors(start)
    after, predicted = errors(end)
    assert before > 0.05
    assert after < 0.015
    assert abs(predicted.sum() / cost.sum() - 1) < 0.15
    assert np.corrcoef(predicted, cost)[0, 1] > 0.7
    assert metrics["value_loss"] < metrics["value_loss_before"] + 1e-3
    assert int(metrics["evidence_rows"]) == 512


def test_trained_states_are_known_better_than_far_ones(trained):
    start, end, _ = trained

    def variance(critic_state, shift):
        features = jnp.asarray(known_problem(256, 2, shift)[0])
        out = apply_critic(TRAIN, critic_state.critic, features)
        return float(jnp.mean(get_belief(TRAIN, out.value_logits).variance))

    assert variance(end, 0) < 0.5 * variance(start, 0)
    assert variance(end, 1) > 1.3 * variance(end, 0)


def test_the_update_compiles_once_whatever_the_buffer_holds(trained):
    few = make_evidence(*known_problem(512, 3)[:2], mask=np.arange(512) < 70)
    metrics = train(TRAIN, few, steps=1)[2]
    assert int(metrics["evidence_rows"]) == 70
    assert int(metrics["num_updates"]) == 4 * 2
    assert TRACES[TRAIN] == 1


def test_training_never_touches_the_priors(trained):
    start, end, _ = trained
    jax.tree.map(np.testing.assert_array_equal, start.critic.fixed, end.critic.fixed)
    moved = jax.tree.map(
        lambda a, b: bool(jnp.any(a != b)), start.critic.trained, end.critic.trained
    )
    assert all(jax.tree.leaves(moved))


def test_state_is_arrays_only_and_keeps_its_structure(trained):
    start, end, _ = trained
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(end))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), start) == jax.tree.map(
        lambda x: (x.shape, x.dtype), end
    )


def test_observing_shrinks_the_posterior_and_the_same_key_gives_the_same_state():
    evidence = make_evidence(*known_problem(512, 0)[:2])
    start, a, _ = train(TRAIN, evidence, steps=1)
    _, b, _ = train(TRAIN, evidence, steps=1)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jnp.trace(a.posterior.factor @ a.posterior.factor.T) < 0.5 * jnp.trace(
        start.posterior.factor @ start.posterior.factor.T
    )


def test_an_update_without_evidence_moves_nothing():
    critic_state = train(TRAIN, make_evidence(*known_problem(512, 0)[:2]), steps=1)[1]
    emptied = dataclasses.replace(critic_state, buffer=state.age_buffer(critic_state.buffer, -1))
    after, metrics = jitted(TRAIN)[1](emptied, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, after.critic, emptied.critic)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, emptied.opt_state)
    assert int(metrics["num_updates"]) == 0
    assert np.isfinite(float(metrics["value_loss"]))


def test_crossfit_belief_never_sees_its_own_tasks_outcomes():
    config = dataclasses.replace(TRAIN, num_folds=2)
    features, _, outcome, _ = known_problem(512, 0)
    fold = np.arange(512) % 2
    flipped = np.where(fold == 0, 1 - outcome, outcome)
    beliefs = []
    for target in (outcome, flipped):
        end = train(config, make_evidence(features, target, fold=fold), steps=1)[1]
        out = apply_critic(config, end.critic, jnp.asarray(features))
        beliefs.append(get_belief(config, out.value_logits, fold=jnp.asarray(fold)))
    np.testing.assert_array_equal(beliefs[0].mean[fold == 0], beliefs[1].mean[fold == 0])
    assert np.abs(beliefs[0].mean - beliefs[1].mean)[fold == 1].max() > 0.01
    cross = beliefs[0].error_features[fold == 0] @ beliefs[0].error_features[fold == 1].T
    np.testing.assert_array_equal(cross, 0)


def test_an_epoch_of_minibatches_sums_to_the_gradient_of_the_whole_buffer():
    # 21 rows of very unequal weight in minibatches of 8: the last one is not full.
    evidence = random_evidence(CONFIG, 32)
    evidence = dataclasses.replace(
        evidence, mask=jnp.arange(32) < 21, weight=evidence.weight.at[3].set(40.0)
    )
    critic = init_critic(CONFIG, jax.random.key(0))
    sgd = optax.sgd(1e-3)
    buffer = state.ReplayBuffer(evidence, jnp.zeros(32, jnp.int32))
    start = state.CriticState(critic, sgd.init(critic.trained), buffer, None)
    update = state.make_critic_update(CONFIG, sgd, num_epochs=1, minibatch_size=8)
    end, _ = jax.jit(update)(start, jax.random.key(0))

    whole = jax.jit(jax.grad(lambda p: objective(CONFIG, CriticParams(p, critic.fixed), evidence)))(
        critic.trained
    )
    for name in ("value", "cost"):
        moved = critic.trained[name]["w_out"] - end.critic.trained[name]["w_out"]
        np.testing.assert_allclose(
            moved * 8 / 21 / 1e-3, whole[name]["w_out"], rtol=0.02, atol=1e-3
        )


def test_capacity_must_hold_whole_minibatches():
    update = state.make_critic_update(TRAIN, OPTIMIZER, minibatch_size=100)
    with pytest.raises(ValueError, match="capacity 512 must be a multiple"):
        update(initial_state(), jax.random.key(0))


# Calibration.


def test_corrected_error_is_unbiased_where_the_raw_one_is_not():
    rng = np.random.default_rng(0)
    p, k = rng.uniform(size=20000), rng.integers(2, 5, 20000)
    means = rng.binomial(k, p) / k
    perfect = calibration(p, means, k)
    assert abs(perfect["value_mse"]) < 2e-3
    assert np.mean((means - p) ** 2) > 0.04
    assert perfect["calibration_error"] < 0.02
    shifted = calibration(np.clip(p + 0.2, 0, 1), means, k)
    truth = np.mean((np.clip(p + 0.2, 0, 1) - p) ** 2)
    np.testing.assert_allclose(shifted["value_mse"], truth, atol=2e-3)
    assert shifted["calibration_error"] > 0.1


def test_calibration_worked_by_hand():
    report = calibration([0.25, 0.75, 0.8], [0.5, 1.0, 0.0], [2, 4, 1], num_bins=2)
    np.testing.assert_allclose(report["value_mse"], ((0.0625 - 0.25) + 0.0625) / 2)
    assert report["value_mse_states"] == 2
    # Seven single outcomes: 1, 0 against .25; 1, 1, 1, 1 against .75; 0 against .8.
    np.testing.assert_allclose(report["brier"], (0.5625 + 0.0625 + 4 * 0.0625 + 0.64) / 7)
    np.testing.assert_allclose(report["bin_count"], [2, 5])
    np.testing.assert_allclose(report["bin_outcome"], [0.5, 0.8])
    np.testing.assert_allclose(report["bin_value"], [0.25, 0.76])
    np.testing.assert_allclose(report["calibration_error"], (2 * 0.25 + 5 * 0.04) / 7)
    with pytest.raises(ValueError, match="1.5"):
        calibration([1.5], [1.0], [2])
