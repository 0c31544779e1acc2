"""Variances held against fresh outcomes, what refinement delivers, and when not to trust."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from focus.credit import refine
from focus.critic import trust
from focus.critic.calibration import error_reduction, standardised_residuals


def beliefs(seed, states=4000, claimed=1.0):
    """States whose errors have `1 / claimed` times the variance that the belief says."""
    rng = np.random.default_rng(seed)
    value = rng.uniform(0.4, 0.6, states)
    true = np.clip(value + rng.normal(size=states) * 0.15, 0, 1)
    tau2 = np.full(states, 0.15**2 * claimed)
    count = rng.integers(1, 5, states)
    outcomes = (rng.uniform(size=(states, 4)) < true[:, None]).astype(float)
    outcomes[np.arange(4) >= count[:, None]] = np.nan
    return value, tau2, value * (1 - value) - 0.15**2, outcomes, count, true


@pytest.mark.parametrize("claimed, low, high", [(1.0, 0.95, 1.05), (0.2, 1.1, 1.4), (5.0, 0, 0.8)])
def test_residuals_show_whether_variances_are_right(claimed, low, high):
    value, tau2, noise, outcomes, count, _ = beliefs(0, claimed=claimed)
    got = standardised_residuals(value, tau2, noise, np.nanmean(outcomes, axis=1), count)
    assert low < got["residual_variance"] < high
    assert abs(got["residual_mean"]) < 0.1 and got["residual_states"] == 4000


def test_residuals_by_hand():
    got = standardised_residuals([0.5, 0.2], [0.05, 0.0], [0.2, 0.16], [1.0, 0.2], [4, 1])
    assert got["residual_variance"] == pytest.approx(0.5 * 0.25 / 0.1)
    assert got["residual_mean"] == pytest.approx(0.5 * 0.5 / 0.1**0.5)
    empty = standardised_residuals([], [], [], [], [])
    assert np.isnan(empty["residual_variance"]) and empty["residual_states"] == 0
    with pytest.raises(ValueError, match="count 0"):
        standardised_residuals([0.5], [0.1], [0.2], [0.0], [0])
    with pytest.raises(ValueError, match=r"\[n\]"):
        standardised_residuals([0.5], [0.1, 0.1], [0.2], [0.0], [1])


@pytest.mark.parametrize("claimed", [1.0, 0.2, 5.0])
def test_realised_error_reduction_is_the_true_one_and_expected_only_if_calibrated(claimed):
    value, tau2, noise, outcomes, count, true = beliefs(1, states=20_000, claimed=claimed)
    mean = np.nanmean(outcomes, axis=1)
    gain = tau2 / (tau2 + noise / count)
    refined, left = value + gain * (mean - value), (1 - gain) * tau2
    got = error_reduction(value, tau2, refined, left, noise, outcomes)
    # The value without one outcome, computed afresh and held against the truth.
    others = count - 1
    total = np.nansum(outcomes, axis=1)[:, None] - outcomes
    part = (tau2 / (tau2 + noise / np.maximum(others, 1)))[:, None]
    alone = value[:, None] + np.where(others > 0, 1.0, 0.0)[:, None] * part * (
        total / np.maximum(others, 1)[:, None] - value[:, None]
    )
    fall = np.nanmean(
        np.where(np.isfinite(outcomes), 1.0, np.nan)
        * ((true - value)[:, None] ** 2 - (true[:, None] - alone) ** 2),
        axis=1,
    ).mean()
    assert got["error_reduction"] == pytest.approx(fall, abs=2.5e-3)
    if claimed == 1.0:
        assert got["error_reduction"] == pytest.approx(got["error_reduction_expected"], abs=3e-3)
    if claimed == 5.0:
        assert got["error_reduction"] < got["error_reduction_expected"] / 3


def test_leaving_one_out_agrees_with_the_refinement_that_counted_it():
    outcomes = np.array([[1.0, 0.0, 1.0], [1.0, np.nan, np.nan]])
    value, tau2, noise = np.array([0.4, 0.3]), np.array([0.05, 0.02]), np.array([0.2, 0.19])
    count, total = np.array([3, 1]), np.array([2.0, 1.0])
    gain = tau2 / (tau2 + noise / count)
    got = error_reduction(
        value, tau2, value + gain * (total / count - value), (1 - gain) * tau2, noise, outcomes
    )
    realised = []
    for row, y in ((0, 1.0), (0, 0.0), (0, 1.0), (1, 1.0)):
        alone = refine.leave_one_out_values(
            value[row], tau2[row], noise[row], total[row] - y, count[row] - 1
        )
        realised.append((y - value[row]) ** 2 - (y - float(alone)) ** 2)
    assert got["error_reduction"] == pytest.approx((np.mean(realised[:3]) + realised[3]) / 2)
    with pytest.raises(ValueError, match="an outcome each"):
        error_reduction(value, tau2, value, tau2, noise, np.array([[1.0], [np.nan]]))


# --- the gate ------------------------------------------------------------------------------------


def outcomes_of(seed, n=400):
    rng = np.random.default_rng(seed)
    p = rng.uniform(size=n).astype(np.float32)
    return p, (rng.uniform(size=n) < p).astype(np.float32)


def test_a_critic_that_knows_is_trusted_and_one_that_guesses_is_not():
    p, y = outcomes_of(0)
    ones, there = jnp.ones(y.shape), jnp.ones(y.shape, bool)
    known = trust.update_gate(trust.init_gate(), p, y, ones, there)
    guess = trust.update_gate(trust.init_gate(), np.roll(p, 1), y, ones, there)
    expected = 1 - np.mean((y - p) ** 2) / np.var(y)
    np.testing.assert_allclose(trust.explained_variance(known), expected, rtol=1e-3)
    assert trust.trusted(known)[0] and not trust.trusted(guess)[0]
    assert not trust.trusted(trust.init_gate())[0]


def test_classes_are_judged_alone_once_they_have_enough_outcomes():
    p, y = outcomes_of(1)
    kind = np.arange(y.size) % 2
    value = np.where(kind == 0, p, np.roll(p, 2)).astype(np.float32)
    ones, there = jnp.ones(y.shape), jnp.ones(y.shape, bool)
    gate = trust.update_gate(trust.init_gate(3), value, y, ones, there, kind)
    overall = trust.update_gate(trust.init_gate(1), value, y, ones, there)
    np.testing.assert_array_equal(
        trust.trusted(gate), [True, False, bool(trust.trusted(overall)[0])]
    )


def test_old_outcomes_fade_and_padding_does_not_count():
    p, y = outcomes_of(2)
    ones, there = np.ones(y.size, np.float32), np.ones(y.size, bool)
    gate = trust.update_gate(trust.init_gate(), np.roll(p, 1), y, ones, there)
    for _ in range(20):
        gate = trust.update_gate(gate, p, y, ones, there, retention=0.8)
    assert trust.trusted(gate)[0]
    padded = [np.append(x, np.nan).astype(np.float32) for x in (p, y, ones)]
    got = trust.update_gate(trust.init_gate(), *padded, np.append(there, False))
    want = trust.update_gate(trust.init_gate(), p, y, ones, there)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_equal_outcomes_are_no_reason_for_trust():
    ones, there = jnp.ones(50), jnp.ones(50, bool)
    gate = trust.update_gate(trust.init_gate(), jnp.full(50, 0.5), ones, ones, there)
    assert trust.explained_variance(gate)[0] == 0 and not trust.trusted(gate)[0]
