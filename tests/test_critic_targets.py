"""Laws of the critic's targets: what each state learns, and how much each outcome weighs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.critic.targets import branch_targets, cost_targets, trajectory_targets

VALUES = jnp.array([0.5, 0.6, 0.8, 0.3])
NO_REWARD = jnp.zeros(3)
ALL = jnp.ones(3, bool)
NAN = jnp.nan


def test_monte_carlo_targets_are_the_outcome_and_weigh_one_together():
    targets = trajectory_targets(VALUES, NO_REWARD, jnp.array(1.0), ALL)
    np.testing.assert_allclose(targets.target, [1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(targets.weight, [1 / 3] * 3, rtol=1e-6)


def test_td_lambda_targets_worked_by_hand():
    targets = trajectory_targets(
        VALUES, jnp.array([0.1, 0.0, 0.0]), jnp.array(1.0), ALL, lambda_=0.5, discount=0.9
    )
    last = 1.0
    middle = 0.9 * (0.5 * 0.8 + 0.5 * last)
    first = 0.1 + 0.9 * (0.5 * 0.6 + 0.5 * middle)
    np.testing.assert_allclose(targets.target, [first, middle, last], rtol=1e-6)


@pytest.mark.parametrize(
    ("truncation", "target", "weight"),
    [("bootstrap", 0.3, 1 / 3), ("fail", 0.0, 1 / 3), ("mask", 0.0, 0.0)],
)
def test_a_cut_trajectory_bootstraps_fails_or_teaches_nothing(truncation, target, weight):
    targets = trajectory_targets(
        VALUES, NO_REWARD, jnp.array(0.0), ALL, truncated=True, truncation=truncation
    )
    np.testing.assert_allclose(targets.target, [target] * 3, rtol=1e-6)
    np.testing.assert_allclose(targets.weight, [weight] * 3, rtol=1e-6)
    assert np.all(np.asarray(targets.mask) == (weight > 0))


def test_bootstrap_reads_the_cut_states_value_instead_of_the_outcome():
    for outcome in (0.0, 1.0, NAN):
        targets = trajectory_targets(VALUES, NO_REWARD, jnp.array(outcome), ALL, truncated=True)
        np.testing.assert_allclose(targets.target, [0.3] * 3, rtol=1e-6)


@pytest.mark.parametrize("truncation", ["bootstrap", "fail", "mask"])
def test_no_score_is_not_a_score_of_zero(truncation):
    # Pitfalls 9 and 28: a technical failure teaches nothing.
    targets = trajectory_targets(VALUES, NO_REWARD, jnp.array(NAN), ALL, truncation=truncation)
    assert not np.any(targets.mask)
    assert np.all(np.asarray(targets.weight) == 0)
    assert np.all(np.asarray(targets.target) == 0)
    cut = trajectory_targets(
        VALUES, NO_REWARD, jnp.array(NAN), ALL, truncated=True, truncation="fail"
    )
    assert not np.any(cut.mask)


def test_a_branch_leaves_its_first_state_to_the_branch_mean():
    targets = trajectory_targets(VALUES, NO_REWARD, jnp.array(1.0), ALL, is_branch=True)
    np.testing.assert_allclose(targets.weight, [0, 0.5, 0.5])
    assert list(np.asarray(targets.mask)) == [False, True, True]
    one_segment = trajectory_targets(
        VALUES, NO_REWARD, jnp.array(1.0), jnp.array([True, False, False]), is_branch=True
    )
    assert not np.any(one_segment.mask)


def test_branched_state_learns_the_mean_of_k_and_weighs_k():
    returns = jnp.array([[1.0, 0.0, 1.0, NAN], [NAN, NAN, NAN, NAN], [0.0, NAN, NAN, NAN]])
    targets = branch_targets(returns, jnp.isfinite(returns))
    np.testing.assert_allclose(targets.target, [2 / 3, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(targets.weight, [3, 0, 1])
    assert list(np.asarray(targets.mask)) == [True, False, True]


def test_cost_is_what_remains_to_be_generated():
    targets = cost_targets(jnp.array([5, 7, 2, 99]), jnp.array([True, True, True, False]))
    np.testing.assert_allclose(targets.target, [14, 9, 2, 0])
    np.testing.assert_allclose(targets.weight, [1, 1, 1, 0])
    assert not np.any(cost_targets(jnp.array([5, 7]), jnp.ones(2, bool), censored=True).mask)


@settings(deadline=None, max_examples=25)
@given(
    mask=st.lists(st.booleans(), min_size=6, max_size=6).filter(any),
    outcome=st.sampled_from([0.0, 0.25, 1.0]),
    truncated=st.booleans(),
    lambda_=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 1000),
)
def test_masked_with_nan_equals_filtered(mask, outcome, truncated, lambda_, seed):
    rng = np.random.default_rng(seed)
    mask = np.array(mask)
    values, rewards = rng.uniform(size=7), rng.uniform(size=6) / 10
    last = np.flatnonzero(mask)[-1]
    padded_values = np.where(np.append(mask, False), values, np.nan)
    padded_values[last + 1] = values[last + 1]
    padded = trajectory_targets(
        jnp.asarray(padded_values),
        jnp.asarray(np.where(mask, rewards, np.nan)),
        jnp.asarray(outcome),
        jnp.asarray(mask),
        truncated=truncated,
        lambda_=lambda_,
    )
    # Slow reference: the recursion, one segment after the other.
    kept = np.flatnonzero(mask)
    expected, following = {}, values[last + 1] if truncated else 0.0
    after = following
    for j in kept[::-1]:
        score = outcome if j == last and not truncated else 0.0
        following = rewards[j] + score + (1 - lambda_) * after + lambda_ * following
        expected[j], after = following, values[j]
    np.testing.assert_allclose(
        np.asarray(padded.target), [expected.get(j, 0.0) for j in range(6)], atol=1e-5
    )
    np.testing.assert_allclose(np.sum(padded.weight), 1.0, rtol=1e-6)


def test_batches_by_vmap_with_per_row_truncation():
    targets = jax.vmap(lambda o, m, t: trajectory_targets(VALUES, NO_REWARD, o, m, truncated=t))(
        jnp.array([1.0, 0.0, NAN]),
        jnp.array([[True, True, False], [True] * 3, [True] * 3]),
        jnp.array([False, True, False]),
    )
    np.testing.assert_allclose(targets.target, [[1, 1, 0], [0.3, 0.3, 0.3], [0, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(targets.weight.sum(1), [1, 1, 0], rtol=1e-6)


def test_unknown_truncation_is_refused():
    with pytest.raises(ValueError, match="'drop'"):
        trajectory_targets(VALUES, NO_REWARD, jnp.array(1.0), ALL, truncation="drop")
