"""Laws of TD(lambda) over one trajectory, and a slow loop to compare with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.credit import td

PROPERTY = settings(deadline=None, max_examples=25)
segment_advantages = jax.jit(td.segment_advantages)


def slow_segment_advantages(values, rewards, mask, discount, lambda_, truncated):
    """Filters the absent segments out, then runs the recursion as a loop."""
    kept = np.flatnonzero(mask)
    out = np.zeros(len(rewards))
    if len(kept) == 0:
        return out
    states = [values[j] for j in kept] + [values[kept[-1] + 1] if truncated else 0.0]
    lambda_ = np.broadcast_to(lambda_, rewards.shape)
    trace = 0.0
    for i in reversed(range(len(kept))):
        delta = rewards[kept[i]] + discount * states[i + 1] - states[i]
        trace = delta + discount * lambda_[kept[i]] * trace
        out[kept[i]] = trace
    return out


def random_steps(seed, length=6):
    rng = np.random.default_rng(seed)
    v = rng.normal(size=length + 1)
    return v[:-1], rng.normal(size=length), rng.uniform(0.5, 1, length), v[1:]


@PROPERTY
@given(
    st.integers(0, 2**31),
    st.lists(st.booleans(), min_size=7, max_size=7),
    st.booleans(),
    st.floats(0, 1),
)
def test_segment_advantages_equal_the_filtered_loop_for_any_mask(seed, mask, truncated, discount):
    rng = np.random.default_rng(seed)
    mask = np.array(mask)
    values, rewards, lambda_ = rng.normal(size=8), rng.normal(size=7), rng.uniform(size=7)
    expected = slow_segment_advantages(values, rewards, mask, discount, lambda_, truncated)
    # What stands under the mask is never read; neither is the end state unless truncated.
    read = np.append(mask, False)
    if truncated and mask.any():
        read[np.flatnonzero(mask)[-1] + 1] = True
    got = segment_advantages(
        np.where(read, values, np.nan),
        np.where(mask, rewards, np.nan),
        mask,
        discount=discount,
        lambda_=np.where(mask, lambda_, np.nan),
        truncated=truncated,
    )
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_lambda_one_is_monte_carlo_and_lambda_zero_is_one_step():
    v_tm1, r, discount, v = random_steps(0)
    monte_carlo, following = np.zeros(6), v[-1]
    for i in reversed(range(6)):
        following = monte_carlo[i] = r[i] + discount[i] * following
    np.testing.assert_allclose(
        td.td_lambda_returns(r, discount, v, 1.0), monte_carlo, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        td.td_lambda_returns(r, discount, v, 0.0), r + discount * v, rtol=1e-5, atol=1e-6
    )


def test_returns_minus_values_equal_summed_differences_when_values_agree():
    v_tm1, r, discount, v = random_steps(1)
    lambda_ = np.linspace(0, 1, 6)
    np.testing.assert_allclose(
        td.td_lambda_returns(r, discount, v, lambda_) - v_tm1,
        td.td_lambda_advantages(v_tm1, r, discount, v, lambda_),
        atol=1e-5,
    )


def test_discount_zero_cuts_two_episodes_apart():
    v_tm1, r, discount, v = random_steps(2)
    discount[2] = 0.0
    whole = td.td_lambda_advantages(v_tm1, r, discount, v, 0.9)
    first = td.td_lambda_advantages(v_tm1[:3], r[:3], discount[:3], v[:3], 0.9)
    second = td.td_lambda_advantages(v_tm1[3:], r[3:], discount[3:], v[3:], 0.9)
    np.testing.assert_allclose(whole, np.concatenate([first, second]), atol=1e-6)


def test_pitfall_1_outcome_after_an_observation_reaches_earlier_actions_once_discounted():
    got = segment_advantages(
        jnp.zeros(4), jnp.array([0.0, 0, 1]), jnp.array([True, False, True]),
        discount=0.5, lambda_=1.0,
    )  # fmt: skip
    np.testing.assert_allclose(got, [0.5, 0, 1])


def test_pitfall_2_absent_steps_neither_decay_nor_bootstrap():
    got = segment_advantages(
        jnp.array([0.5, 0.5, 9, 0.5, 7]), jnp.array([0.0, 0, 0, 1]),
        jnp.array([True, True, False, True]), discount=0.5, lambda_=0.5,
    )  # fmt: skip
    np.testing.assert_allclose(got, [-0.28125, -0.125, 0, 0.5])


def test_worked_numbers_of_generalised_advantages():
    values = jnp.array([0.2, 0.4, 0.6, 0])
    got = segment_advantages(values, jnp.array([0.0, 0, 1]), jnp.ones(3, bool), lambda_=0.9)
    np.testing.assert_allclose(got, [0.704, 0.56, 0.4], atol=1e-6)
    got = segment_advantages(
        jnp.array([0.3, 0.5, 0]), jnp.array([0.0, 1]), jnp.ones(2, bool), lambda_=0.5
    )
    np.testing.assert_allclose(got, [0.45, 0.5], atol=1e-6)


@pytest.mark.parametrize("padding", [0, 3])
def test_pitfall_10_truncation_is_a_flag_and_padded_width_is_not(padding):
    values = np.pad([0.2, 0.4, 0.6], (0, padding), constant_values=np.nan)
    rewards = np.pad([0.0, 0.0], (0, padding), constant_values=np.nan)
    mask = np.pad([True, True], (0, padding))
    ended = segment_advantages(values, rewards, mask, lambda_=0.5, truncated=False)
    cut = segment_advantages(values, rewards, mask, lambda_=0.5, truncated=True)
    np.testing.assert_allclose(ended[:2], [0.2 - 0.5 * 0.4, -0.4], atol=1e-6)
    np.testing.assert_allclose(cut[:2], [0.2 + 0.5 * 0.2, 0.2], atol=1e-6)


def test_at_lambda_one_advantages_telescope_to_outcome_minus_first_value():
    values = jnp.array([0.3, 0.9, 0.1, 5.0])
    got = segment_advantages(values, jnp.array([0.0, 0, 1]), jnp.ones(3, bool), lambda_=1.0)
    np.testing.assert_allclose(got, 1 - values[:3], atol=1e-6)


def test_gradient_is_finite_and_zero_under_the_mask():
    mask = jnp.array([True, False, True, False])
    values = jnp.array([0.1, jnp.nan, 0.2, jnp.nan, jnp.nan])
    rewards = jnp.where(mask, 1.0, jnp.nan)
    grads = jax.grad(lambda v, r: segment_advantages(v, r, mask).sum(), argnums=(0, 1))(
        values, rewards
    )
    for grad in grads:
        assert np.all(np.isfinite(grad))
    assert grads[0][1] == 0 and grads[0][2] != 0
    np.testing.assert_array_equal(grads[1] != 0, mask)


def test_trust_is_one_minus_lambda_and_falls_with_the_variance_of_the_next_state():
    mask = jnp.array([True, False, True, True, False])
    variance = jnp.array([9.0, jnp.nan, 0.25, 0.0, jnp.nan, 4.0])
    noise = jnp.array([9.0, jnp.nan, 0.25, 0.25, jnp.nan, 4.0])
    # Segment 0 is followed by state 2, segment 2 by state 3 (known exactly), segment 3 by nothing.
    np.testing.assert_allclose(td.trust_lambda(variance, noise, mask), [0.5, 1, 0, 1, 1])
    lambdas = [float(td.trust_lambda(v, noise, mask)[0]) for v in (variance, variance * 4)]
    assert lambdas[0] < lambdas[1] < 1


def noisy_chains(rng, task, episode, rho, state, steps=8, rows=4000):
    """Values known up to correlated errors, the true ones, and outcomes; and the covariances."""
    known = np.cumsum(rng.normal(size=(rows, steps)) * 0.1, axis=1)
    fading = [rng.normal(size=rows)]
    for _ in range(steps - 1):
        fading.append(rho * fading[-1] + np.sqrt(1 - rho**2) * rng.normal(size=rows))
    true = known + np.sqrt(task) * rng.normal(size=(rows, 1))
    true += np.sqrt(episode) * np.stack(fading, axis=1)
    true += np.sqrt(state) * rng.normal(size=true.shape)
    outcome = true[:, -1] + np.sqrt(0.1) * rng.normal(size=rows)
    tau2, shared = task + episode + state, task + episode * rho
    noise = 0.1 + (0.01 + 2 * (tau2 - shared)) * np.arange(steps - 1, -1, -1)
    return known, true, outcome, tau2, shared, noise


@pytest.mark.parametrize(
    "parts",
    [(0.06, 0.0, 0.8, 0.0), (0.0, 0.0, 0.8, 0.03), (0.05, 0.0, 0.8, 0.01),
     (0.02, 0.04, 0.8, 0.005), (0.05, 0.05, 0.6, 0.01)],
)  # fmt: skip
def test_trust_finds_more_of_the_advantages_than_any_fixed_lambda(parts):
    known, true, outcome, tau2, shared, noise = noisy_chains(np.random.default_rng(0), *parts)
    steps = known.shape[1]
    mask = jnp.ones(steps, bool)
    rewards = np.zeros(known.shape)
    rewards[:, -1] = outcome
    values = np.pad(known, [(0, 0), (0, 1)])

    def found(lambda_):
        rows = jax.vmap(lambda v, r: segment_advantages(v, r, mask, lambda_=lambda_))
        advantages = rows(jnp.float32(values), jnp.float32(rewards))[:, :-1]
        return np.corrcoef(np.ravel(advantages), np.ravel(np.diff(true, axis=1)))[0, 1]

    variance, covariance = jnp.full(steps + 1, tau2), jnp.full(steps, shared)
    noise_var = jnp.append(jnp.float32(noise), 1.0)
    trust = found(td.trust_lambda(variance, noise_var, mask, covariance))
    fixed = max(found(x) for x in (0.0, 0.1, 0.3, 0.5, 0.8, 0.95, 1.0))
    assert trust > fixed - 0.01
    assert trust > found(0.95) + 0.04
    assert trust > found(td.trust_lambda(variance, noise_var, mask)) - 1e-3


def test_an_error_that_two_states_share_is_no_reason_to_wait_for_the_outcome():
    mask, noise = jnp.ones(3, bool), jnp.full(4, 0.2)
    variance = jnp.array([0.1, 0.1, 0.1, 9.0])
    got = td.trust_lambda(variance, noise, mask, jnp.array([0.1, 0.04, 5.0]))
    np.testing.assert_allclose(got, [0, 0.2, 1], atol=1e-6)
    alone = td.trust_lambda(variance, noise, mask)
    np.testing.assert_allclose(
        td.trust_lambda(variance, noise, mask, jnp.zeros(3)), alone, rtol=1e-6
    )


def test_a_known_state_carries_the_bootstrap_and_an_unknown_one_the_outcome():
    mask, rewards = jnp.ones(2, bool), jnp.array([0.0, 1.0])
    values, noise = jnp.array([0.5, 0.7, 0.0]), jnp.full(3, 0.2)
    for variance, expected in ((0.0, 0.7 - 0.5), (1e9, 1 - 0.5)):
        lambda_ = td.trust_lambda(jnp.full(3, variance), noise, mask)
        got = segment_advantages(values, rewards, mask, lambda_=lambda_)
        np.testing.assert_allclose(got[0], expected, atol=1e-6)


def test_pitfall_4_every_token_of_every_segment_carries_its_own_scalar():
    got = td.segments_to_tokens(jnp.array([1.5, -2.0, jnp.nan]), jnp.array([0, -1, 1, 1, 0, -1]))
    np.testing.assert_array_equal(got, [1.5, 0, -2, -2, 1.5, 0])


def test_vmap_over_rows_equals_rows_one_by_one():
    rng = np.random.default_rng(3)
    values, rewards = rng.normal(size=(4, 6)), rng.normal(size=(4, 5))
    mask, cut = rng.uniform(size=(4, 5)) < 0.7, np.array([True, False, True, False])
    batched = jax.vmap(lambda v, r, m, c: td.segment_advantages(v, r, m, truncated=c))(
        values, rewards, mask, cut
    )
    for row in range(4):
        alone = td.segment_advantages(values[row], rewards[row], mask[row], truncated=cut[row])
        np.testing.assert_allclose(batched[row], alone, atol=1e-6)
