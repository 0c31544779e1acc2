"""Refined values against dense Gaussian conditioning in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.branching.plan import condition
from focus.credit import refine

PROPERTY = settings(deadline=None, max_examples=25)
refine_values = jax.jit(refine.refine_values, static_argnames=("mode", "value_range"))
WIDE = (-10.0, 10.0)


def dense_joint(mean, features, noise_var, branch_mean, branch_count):
    """The S x S formula: V + Cov(., B) (Cov(B, B) + diag(noise2 / k))^-1 (m - V(B))."""
    covariance = features @ features.T
    b = np.flatnonzero(branch_count)
    if len(b) == 0:
        return mean, np.diag(covariance)
    gain = covariance[:, b] @ np.linalg.inv(
        covariance[np.ix_(b, b)] + np.diag(noise_var[b] / branch_count[b])
    )
    return mean + gain @ (branch_mean[b] - mean[b]), np.diag(covariance - gain @ covariance[b])


def problem(seed, states=7, dims=4):
    rng = np.random.default_rng(seed)
    return (
        rng.uniform(size=states),
        rng.normal(size=(states, dims)) * 0.3,
        rng.uniform(0.05, 0.25, states),
        rng.uniform(size=states),
        rng.integers(0, 4, states) * (rng.uniform(size=states) < 0.6),
    )


@PROPERTY
@given(st.integers(0, 2**31))
def test_joint_equals_dense_conditioning(seed):
    args = problem(seed)
    refined, variance = refine_values(*args, mode="joint", value_range=WIDE)
    expected, expected_variance = dense_joint(*args)
    np.testing.assert_allclose(refined, expected, atol=1e-4)
    np.testing.assert_allclose(variance, expected_variance, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_local_is_the_precision_weighted_mean_at_branched_states_only(seed):
    mean, features, noise_var, branch_mean, count = problem(seed)
    refined, variance = refine_values(
        mean, features, noise_var, branch_mean, count, mode="local", value_range=WIDE
    )
    tau2 = np.sum(features**2, axis=1)
    precision = 1 / tau2 + count / noise_var
    np.testing.assert_allclose(variance, 1 / precision, rtol=1e-4)
    np.testing.assert_allclose(
        refined, (mean / tau2 + count / noise_var * branch_mean) / precision, rtol=1e-4
    )


def test_joint_reduces_to_local_when_states_are_independent():
    mean, _, noise_var, branch_mean, count = problem(1, states=5)
    args = (mean, np.diag([0.1, 0.2, 0.3, 0.4, 0.5]), noise_var, branch_mean, count)
    for joint, local in zip(refine_values(*args, mode="joint"), refine_values(*args, mode="local")):
        np.testing.assert_allclose(joint, local, atol=1e-6)


def test_joint_moves_a_state_that_was_not_branched_and_local_does_not():
    features = jnp.array([[0.4, 0.0], [0.4, 0.0], [0.0, 0.4]])
    args = (jnp.full(3, 0.5), features, jnp.full(3, 0.1), jnp.ones(3), jnp.array([4, 0, 0]))
    joint, _ = refine_values(*args, mode="joint")
    local, _ = refine_values(*args, mode="local")
    assert joint[1] > 0.6 and float(joint[1]) == pytest.approx(float(joint[0]), abs=1e-6)
    np.testing.assert_allclose(joint[2], 0.5)
    np.testing.assert_allclose(local[1:], 0.5)


@pytest.mark.parametrize("mode", ["local", "joint"])
def test_many_continuations_replace_the_critic_by_their_mean(mode):
    mean, features, noise_var, branch_mean, _ = problem(2, states=3)
    count = np.array([10**6, 0, 10**6])
    refined, variance = refine_values(
        mean, features, noise_var, branch_mean, count, mode=mode, value_range=WIDE
    )
    np.testing.assert_allclose(refined[::2], branch_mean[::2], atol=1e-3)
    assert np.all(variance[::2] < 1e-3)


@pytest.mark.parametrize("mode", refine.REFINE_MODES)
def test_without_branches_nothing_changes(mode):
    mean, features, noise_var, _, _ = problem(3)
    refined, variance = refine_values(
        mean, features, noise_var, np.full(7, np.nan), np.zeros(7, int), mode=mode
    )
    np.testing.assert_allclose(refined, mean, rtol=1e-6)
    np.testing.assert_allclose(variance, np.sum(features**2, axis=1), rtol=1e-5)


def test_mode_none_ignores_branches():
    args = problem(4)
    refined, _ = refine_values(*args, mode="none")
    np.testing.assert_allclose(refined, args[0], rtol=1e-6)


def test_branches_one_at_a_time_equal_all_at_once():
    mean, features, noise_var, branch_mean, count = problem(8)
    at_once, variance = refine_values(
        mean, features, noise_var, branch_mean, count, mode="joint", value_range=WIDE
    )
    batch_features = refine.posterior_features(features, noise_var, count)
    step_mean, step_features = mean, jnp.asarray(features, jnp.float32)
    assert np.count_nonzero(count) >= 3
    for b in np.flatnonzero(count):
        only = np.where(np.arange(7) == b, count, 0)
        step_mean, _ = refine_values(
            step_mean, step_features, noise_var, branch_mean, only, mode="joint", value_range=WIDE
        )
        step_features = condition(step_features, b, noise_var[b] / count[b])
    np.testing.assert_allclose(step_mean, at_once, atol=1e-5)
    np.testing.assert_allclose(jnp.sum(step_features**2, axis=1), variance, atol=1e-5)
    np.testing.assert_allclose(
        step_features @ step_features.T, batch_features @ batch_features.T, atol=1e-5
    )


@pytest.mark.parametrize("mode", refine.REFINE_MODES)
def test_padding_may_hold_nan_and_changes_neither_values_nor_gradients(mode):
    args = problem(6)
    padded = [np.pad(np.asarray(a, float), [(0, 2)] + [(0, 0)] * (a.ndim - 1),
                     constant_values=np.nan) for a in args]  # fmt: skip
    mask = np.arange(9) < 7
    expected = refine_values(*args, mode=mode)
    for got, want in zip(refine_values(*padded, mode=mode, mask=mask), expected):
        np.testing.assert_allclose(got[:7], want, atol=1e-6)
        np.testing.assert_array_equal(got[7:], 0)

    def loss(mean, features):
        return sum(
            x.sum() for x in refine_values(mean, features, *padded[2:], mode=mode, mask=mask)
        )

    for grad in jax.grad(loss, argnums=(0, 1))(jnp.asarray(padded[0]), jnp.asarray(padded[1])):
        assert np.all(np.isfinite(grad)) and np.any(grad != 0)


def test_refined_values_stay_in_the_reward_range():
    args = (jnp.array([0.1, 0.9]), jnp.array([[0.5], [-0.5]]), jnp.full(2, 0.01))
    refined, _ = refine_values(*args, jnp.zeros(2), jnp.array([8, 0]), mode="joint")
    np.testing.assert_allclose(refined[0], 0.0, atol=5e-3)
    raised, _ = refine_values(*args, jnp.ones(2), jnp.array([0, 8]), mode="joint")
    assert raised[0] >= 0
    wide, _ = refine_values(*args, jnp.ones(2), jnp.array([8, 0]), mode="joint", value_range=WIDE)
    clipped, _ = refine_values(*args, jnp.ones(2), jnp.array([8, 0]), mode="joint")
    assert wide[1] < 0.1 and np.all((clipped >= 0) & (clipped <= 1))
    over = refine_values(*args, jnp.full(2, 3.0), jnp.array([8, 0]), mode="joint")[0]
    assert over[0] == 1.0 and over[1] == 0.0


def test_noise_free_outcomes_stay_finite():
    mean, features, _, branch_mean, count = problem(7)
    for x in refine_values(mean, features, np.zeros(7), branch_mean, count, mode="joint"):
        assert np.all(np.isfinite(x))


def test_bernoulli_noise_is_exact_for_two_valued_outcomes_and_floored():
    np.testing.assert_allclose(refine.bernoulli_noise_var(jnp.array([0.5, 0.1])), [0.25, 0.09])
    assert float(refine.bernoulli_noise_var(jnp.array(1.0), floor=0.02)) == pytest.approx(0.02)
    outcomes = np.array([-1.0, 3.0, 3.0, 3.0])
    got = refine.bernoulli_noise_var(jnp.array(outcomes.mean()), value_range=(-1.0, 3.0))
    assert float(got) == pytest.approx(outcomes.var())


def test_an_unknown_mode_is_refused_by_name():
    with pytest.raises(ValueError, match="'both'.*joint"):
        refine.refine_values(*problem(0), mode="both")


@given(
    st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6),
    st.floats(0.05, 0.95),
    st.floats(0.001, 0.2),
)
@settings(deadline=None, max_examples=30)
def test_left_out_outcome_never_moves_its_own_baseline(outcomes, mean, variance):
    noise = mean * (1 - mean)
    for own in range(len(outcomes)):
        siblings = outcomes[:own] + outcomes[own + 1 :]
        value = refine.leave_one_out_values(
            jnp.float32(mean),
            jnp.float32(variance),
            jnp.float32(noise),
            jnp.float32(sum(siblings)),
            jnp.float32(len(siblings)),
        )
        # The local refinement of a state that only the siblings were sampled from.
        expected, _ = refine.refine_values(
            jnp.array([mean]),
            jnp.array([[variance**0.5]]),
            jnp.array([noise]),
            jnp.array([np.mean(siblings) if siblings else 0.0]),
            jnp.array([len(siblings)]),
            mode="local",
        )
        np.testing.assert_allclose(value, expected[0], atol=1e-5)
