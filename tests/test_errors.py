"""Structured covariances against dense Gaussian conditioning in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_branching import dense_condition
from test_refine import WIDE, dense_joint

from focus.branching.acquisition import StateFeatures
from focus.branching.plan import plan as plan_eagerly
from focus.credit import errors, refine
from focus.credit.errors import ErrorFeatures

PROPERTY = settings(deadline=None, max_examples=15)
EER = "expected_error_reduction"
refine_values = jax.jit(refine.refine_values, static_argnames=("mode", "value_range"))
plan = jax.jit(plan_eagerly, static_argnames=("rule", "ks", "max_picks", "max_per_state"))
condition = jax.jit(errors.condition)
posterior = jax.jit(errors.posterior)


def structured(seed, blocks=3, size=4, shared=3, local=5, scale=0.3):
    rng = np.random.default_rng(seed)
    return ErrorFeatures(
        shared=(rng.normal(size=(blocks * size, shared)) * scale).astype(np.float32),
        local=(rng.normal(size=(blocks, size, local)) * scale).astype(np.float32),
        own=rng.uniform(0, scale**2, blocks * size).astype(np.float32),
    )


def dense(features):
    """[S, S] in float64, entry by entry."""
    f = jax.tree.map(lambda x: np.asarray(x, np.float64), features)
    size = f.block_size
    covariance = f.shared @ f.shared.T
    for g, local in enumerate(f.local):
        covariance[g * size : (g + 1) * size, g * size : (g + 1) * size] += local @ local.T
    return covariance + np.diag(f.own)


def problem(seed, states=12):
    rng = np.random.default_rng(seed + 1)
    count = rng.integers(1, 5, states) * (rng.uniform(size=states) < 0.5)
    count[3] = 2
    return (
        rng.uniform(size=states).astype(np.float32),
        rng.uniform(0.05, 0.25, states).astype(np.float32),
        rng.uniform(size=states).astype(np.float32),
        count,
    )


@PROPERTY
@given(st.integers(0, 2**31))
def test_reading_a_covariance_equals_the_dense_one(seed):
    features = structured(seed)
    covariance = dense(features)
    weight = np.random.default_rng(seed).uniform(size=12).astype(np.float32)
    np.testing.assert_allclose(errors.variances(features), np.diag(covariance), rtol=1e-5)
    for index in (0, 5, 11):
        np.testing.assert_allclose(
            errors.covariances(features, index), covariance[:, index], atol=1e-6
        )
    left, right = np.random.default_rng(seed).integers(0, 12, (2, 20))
    np.testing.assert_allclose(
        errors.pair_covariances(features, left, right), covariance[left, right], atol=1e-6
    )
    np.testing.assert_allclose(
        errors.weighted_covariance(features, weight), np.square(covariance) @ weight, rtol=1e-4
    )
    np.testing.assert_allclose(
        errors.influence(features, weight), covariance @ weight, rtol=1e-4, atol=1e-6
    )


@PROPERTY
@given(st.integers(0, 2**31))
def test_conditioning_on_one_observation_after_another_equals_the_dense_formula(seed):
    rng = np.random.default_rng(seed)
    features = structured(seed)
    covariance = dense(features)
    # Some states more than once, and one observation that is nearly exact.
    for s, noise in zip(rng.integers(0, 12, 8), [*rng.uniform(0.01, 1, 7), 1e-4]):
        features = condition(features, s, noise)
        covariance = dense_condition(covariance, s, noise)
    np.testing.assert_allclose(dense(features), covariance, atol=2e-5)


@PROPERTY
@given(st.integers(0, 2**31))
def test_joint_refinement_equals_the_dense_formula(seed):
    features = structured(seed)
    mean, noise_var, branch_mean, count = problem(seed)
    refined, variance = refine_values(
        mean, features, noise_var, branch_mean, count, mode="joint", value_range=WIDE
    )
    root = np.linalg.cholesky(dense(features) + 1e-12 * np.eye(12))
    expected, left = dense_joint(*(np.asarray(x, np.float64) for x in (mean, root)), noise_var,
                                 branch_mean, count)  # fmt: skip
    np.testing.assert_allclose(refined, expected, atol=2e-4)
    np.testing.assert_allclose(variance, left, atol=2e-5)
    after = refine.posterior_features(features, noise_var, count)
    np.testing.assert_allclose(np.diag(dense(after)), left, atol=2e-5)
    step = features
    for b in np.flatnonzero(count):
        step = condition(step, b, noise_var[b] / count[b])
    np.testing.assert_allclose(dense(step), dense(after), atol=2e-5)


def test_a_plain_array_is_the_shared_part_alone():
    features = structured(3)
    bare = ErrorFeatures(features.shared, features.local * 0, features.own * 0)
    mean, noise_var, branch_mean, count = problem(3)
    args = noise_var, branch_mean, count
    for mode in refine.REFINE_MODES:
        for got, want in zip(
            refine_values(mean, bare, *args, mode=mode),
            refine_values(mean, features.shared, *args, mode=mode),
        ):
            np.testing.assert_allclose(got, want, atol=1e-6)
    assert isinstance(refine.posterior_features(features.shared, noise_var, count), jax.Array)


def pool_of(features, seed, **fields):
    rng = np.random.default_rng(seed)
    states = features.shared.shape[0]
    defaults = {
        "mean": rng.uniform(size=states),
        "noise_var": rng.uniform(0.05, 0.25, states),
        "cost": rng.uniform(20, 200, states),
        "weight": rng.dirichlet(np.ones(states)),
        "mask": rng.uniform(size=states) < 0.8,
    }
    arrays = {k: jnp.asarray(v) for k, v in {**defaults, **fields}.items()}
    return StateFeatures(error_features=features, **arrays)


@pytest.mark.parametrize("ks", [(1, 2, 4), (3,)])
@pytest.mark.parametrize("seed", range(3))
def test_the_greedy_plan_is_the_exhaustive_one(seed, ks):
    features = structured(seed)
    pool = pool_of(features, seed)
    got = plan(pool, 3000, rule=EER, ks=ks, max_picks=60)
    mask = np.asarray(pool.mask)
    noise, cost, weight = (
        np.asarray(x, np.float64) for x in (pool.noise_var, pool.cost, pool.weight)
    )
    # States that may not be branched are out of the pool, and out of what is gained.
    covariance = dense(features) * np.outer(mask, mask)
    start, left, order, count = np.diag(covariance), 3000.0, [], np.zeros(12, int)
    while True:
        best, choice = 1e-12, None
        for s in np.flatnonzero(mask):
            for k in ks:
                if k * cost[s] > left:
                    continue
                after = dense_condition(covariance, s, noise[s] / k)
                density = (weight * mask) @ (np.diag(covariance) - np.diag(after)) / (k * cost[s])
                if density > best:
                    best, choice = density, (s, k, after)
        if choice is None:
            break
        s, k, covariance = choice
        count[s] += k
        left -= k * cost[s]
        order.append(s)
    assert len(order) > 4
    np.testing.assert_array_equal(got.count, count)
    np.testing.assert_array_equal(got.order[: len(order)], order)
    gain = (weight * mask) @ (start - np.diag(covariance))
    np.testing.assert_allclose(got.gain, gain, rtol=1e-3)


def test_plans_of_many_seeds_at_once_are_the_plans_of_each():
    pools = [pool_of(structured(seed), seed) for seed in range(3)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *pools)
    got = jax.jit(jax.vmap(functools.partial(plan_eagerly, budget=900, rule=EER, ks=(1, 2))))(
        together
    )
    for i, pool in enumerate(pools):
        np.testing.assert_array_equal(got.count[i], plan(pool, 900, rule=EER, ks=(1, 2)).count)


@PROPERTY
@given(st.integers(0, 2**31), st.sampled_from(["joint", "local"]))
def test_a_trajectorys_own_outcome_is_left_out_exactly(seed, mode):
    """Against a refinement of each row's states by all evidence but that row's."""
    rng = np.random.default_rng(seed)
    rollouts, states = 4, 3  # two tasks of two rollouts of three states; s_0 is state 0
    features = structured(seed, blocks=2, size=6)
    mean, noise_var, branch_mean, count = problem(seed)
    first = np.arange(rollouts) * states
    outcome = rng.integers(0, 2, rollouts).astype(np.float32)
    scored = np.array([True, True, True, False])
    total, with_own = branch_mean * count, count.copy()
    total[first] += outcome * scored
    with_own[first] += scored
    of_state = np.repeat(np.arange(rollouts), states)
    got = refine_values(
        mean, features, noise_var, total / np.maximum(with_own, 1), with_own, mode=mode,
        value_range=WIDE, own_state=np.where(scored, first, -1)[of_state],
        own_outcome=np.where(scored, outcome, np.nan)[of_state],
    )  # fmt: skip
    for i in range(rollouts):
        alone_total, alone = total.copy(), with_own.copy()
        alone_total[first[i]] -= outcome[i] * scored[i]
        alone[first[i]] -= scored[i]
        want = refine_values(
            mean, features, noise_var, alone_total / np.maximum(alone, 1), alone, mode=mode,
            value_range=WIDE,
        )  # fmt: skip
        for a, b in zip(got, want):
            np.testing.assert_allclose(a[of_state == i], b[of_state == i], atol=1e-4)


def test_states_outside_of_the_pool_are_refined_like_those_inside():
    features = structured(5, size=5)
    states = features.shared.shape[0]
    mean, noise_var, branch_mean, count = problem(5, states)
    count[[4, 9]] = 0  # the last state of two blocks has no evidence of its own
    precision = np.where(count > 0, count / noise_var, 0)
    surprise = np.where(count > 0, branch_mean - mean, 0)
    whole = posterior(features, precision, surprise)
    rows = np.array([4, 9])
    query = errors.posterior_at(
        whole, features.shared[rows], features.local_rows[rows], features.own[rows], rows // 5
    )
    np.testing.assert_allclose(query.shift, whole.shift[rows], atol=1e-5)
    np.testing.assert_allclose(query.variance, errors.variances(whole.errors)[rows], atol=1e-6)
    shared = np.sum(query.shared[0] * whole.errors.shared[0])
    local = np.sum(query.local[0] * whole.errors.local[0, 0])
    np.testing.assert_allclose(shared + local, dense(whole.errors)[4, 0], atol=1e-6)


@pytest.mark.parametrize("mode", refine.REFINE_MODES)
def test_padding_may_hold_nan_and_gradients_stay_finite(mode):
    features = structured(7)
    mean, noise_var, branch_mean, count = problem(7)
    mask = np.arange(12) % 4 != 3
    hole = jnp.where(mask, 1.0, jnp.nan)
    holed = ErrorFeatures(
        features.shared * hole[:, None],
        features.local * hole.reshape(3, 4)[..., None],
        features.own * hole,
    )
    args = noise_var, branch_mean, np.where(mask, count, 0)
    want = refine_values(mean, errors.masked(features, mask), *args, mode=mode)
    got = refine_values(mean * hole, holed, *args, mode=mode, mask=mask)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a[mask], b[mask], atol=1e-6)
        np.testing.assert_array_equal(a[~mask], 0)

    def loss(features):
        return sum(x.sum() for x in refine_values(mean, features, *args, mode=mode, mask=mask))

    for grad in jax.tree.leaves(jax.grad(loss)(holed)):
        assert np.all(np.isfinite(grad))


def test_equal_states_and_extreme_scales_stay_exact():
    """All states of a block alike, and parts that differ in size by a factor of a thousand."""
    features = ErrorFeatures(
        shared=np.full((8, 2), 0.01, np.float32),
        local=np.full((2, 4, 3), 0.3, np.float32),
        own=np.full(8, 1e-4, np.float32),
    )
    mean, noise_var = np.full(8, 0.5, np.float32), np.full(8, 0.01, np.float32)
    count = np.array([8, 8, 0, 0, 8, 0, 0, 0])
    args = mean, noise_var, np.array([1, 1, 0, 0, 0, 0, 0, 0], np.float32), count
    refined, variance = refine_values(mean, features, *args[1:], mode="joint", value_range=WIDE)
    root = np.linalg.cholesky(dense(features))
    expected, left = dense_joint(mean, root, *args[1:])
    np.testing.assert_allclose(refined, expected, atol=1e-4)
    np.testing.assert_allclose(variance, left, atol=1e-6)
    assert refined[2] > 0.95 and refined[5] < 0.05


def test_blocks_have_to_make_up_the_states():
    features = structured(0)
    broken = dataclasses.replace(features, own=features.own[:-1])
    with pytest.raises(ValueError, match=r"3 blocks of 4 states and own is \(11,\).*12"):
        errors.variances(broken)
    mean, noise_var, branch_mean, count = problem(0)
    with pytest.raises(ValueError, match="own_state and own_outcome go together"):
        refine.refine_values(
            mean, features, noise_var, branch_mean, count, mode="joint", own_state=count
        )


def test_of_the_spread_of_an_outcome_what_the_critic_does_not_know_is_no_noise():
    got = refine.outcome_noise(jnp.array([0.25, 0.25, 0.01]), jnp.array([0.05, 0.24, 0.0]))
    np.testing.assert_allclose(got, [0.2, 0.025, 0.01], rtol=1e-6)
