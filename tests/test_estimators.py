"""Estimators: worked numbers, laws, and the rules that all of them share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.credit import ESTIMATORS, baselines, estimate, primitives
from focus.types import CreditBatch

PROPERTY = settings(deadline=None, max_examples=25)
GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo")
SEGMENTAL = ("focus", "ppo", "vineppo")
# What needs no channel beyond those of `random_batch`; the others are in files of their own.
BASELINES = (*SEGMENTAL, *GROUP_RELATIVE)
group_statistics = jax.jit(primitives.group_statistics, static_argnames="ddof")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(name, hparams, batch):
    return estimate(name, batch, **dict(hparams))


def run(name, batch, **hparams):
    """`estimate`, compiled once per name, setting and shape."""
    return _run(name, tuple(sorted(hparams.items())), batch)


def make_batch(outcome, *, num_segments=None, tokens_per_segment=2, width=None, **channels):
    """Rows with the given numbers of segments, two tokens each, padded to `width` segments."""
    outcome = np.asarray(outcome, np.float32)
    rows = len(outcome)
    num_segments = np.full(rows, 2) if num_segments is None else np.asarray(num_segments)
    width = num_segments.max() if width is None else width
    segment_mask = np.arange(width) < num_segments[:, None]
    token_segment = np.repeat(
        np.where(segment_mask, np.arange(width), -1), tokens_per_segment, axis=1
    )
    defaults = {
        "group_id": np.zeros(rows, np.int32),
        "outcome": outcome,
        "success": outcome == 1,
        "row_mask": np.ones(rows, bool),
        "segment_mask": segment_mask,
        "segment_reward": np.zeros((rows, width), np.float32),
        "token_segment": token_segment.astype(np.int32),
        "token_mask": token_segment >= 0,
        "behaviour_logp": np.zeros(token_segment.shape, np.float32),
        "truncated": np.zeros(rows, bool),
    }
    return CreditBatch(**jax.tree.map(jnp.asarray, {**defaults, **channels}))


def random_batch(seed, rows=8, width=4):
    """Every channel filled, ragged rows, two groups, some rows truncated."""
    rng = np.random.default_rng(seed)
    return make_batch(
        rng.integers(0, 2, rows),
        num_segments=rng.integers(1, width + 1, rows),
        width=width,
        group_id=np.arange(rows, dtype=np.int32) % 2 * 1000,
        truncated=rng.uniform(size=rows) < 0.3,
        value=rng.uniform(size=(rows, width + 1)).astype(np.float32),
        value_variance=rng.uniform(0, 0.1, (rows, width + 1)).astype(np.float32),
        mc_return=rng.integers(0, 2, (rows, width, 3)).astype(np.float32),
        mc_mask=rng.uniform(size=(rows, width, 3)) < 0.6,
    )


# --- worked numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, hparams, outcome, expected",
    [
        ("grpo", {}, [1, 0, 0, 0, 1], [1.5, -0.5, -0.5, -0.5, 0]),
        ("grpo", {"singleton": "keep"}, [1, 0, 0, 0, 1], [1.5, -0.5, -0.5, -0.5, 1]),
        ("grpo", {"ddof": 0}, [1, 0, 0, 0, 0], [1.7320508, *[-0.5773503] * 3, 0]),
        ("grpo", {}, [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]),
        ("dr_grpo", {}, [1, 0, 0, 0, 1], [0.75, -0.25, -0.25, -0.25, 0]),
        ("rloo", {}, [1, 0, 0, 0, 1], [1, -1 / 3, -1 / 3, -1 / 3, 0]),
        ("rloo", {"singleton": "keep"}, [1, 0, 0, 0, 1], [1, -1 / 3, -1 / 3, -1 / 3, 1]),
        # Pitfall 3: with and without the standard deviation.
        ("dr_grpo", {}, [1, 0, 1, 0, 0], [0.5, -0.5, 0.5, -0.5, 0]),
        ("grpo", {}, [1, 0, 1, 0, 0], [0.8660254, -0.8660254, 0.8660254, -0.8660254, 0]),
    ],
)
def test_group_relative_worked_numbers(name, hparams, outcome, expected):
    """A group of four, and a row that is alone with its task."""
    batch = make_batch(outcome, group_id=np.array([7, 7, 7, 7, 3], np.int32))
    credit = run(name, batch, **hparams)
    expected = np.array(expected)[:, None]
    np.testing.assert_allclose(credit.segment_advantages, np.tile(expected, 2), atol=2e-5)
    np.testing.assert_allclose(credit.advantages, np.tile(expected, 4), atol=2e-5)


@pytest.mark.parametrize("outcome, expected", [(1, [0.25, 0.5, 0]), (0, [0.25, 0.5, -1])])
def test_vineppo_worked_numbers(outcome, expected):
    mc_return = np.array([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]], np.float32)
    credit = run(
        "vineppo",
        make_batch([outcome], num_segments=[3], mc_return=mc_return, mc_mask=mc_return >= 0),
    )
    np.testing.assert_allclose(credit.segment_advantages[0], expected, atol=1e-6)


def test_turn_level_gae_worked_numbers():
    batch = make_batch([1], value=np.array([[0.3, 0.5, 7.0]], np.float32))
    credit = run("ppo", batch, lambda_=0.5)
    np.testing.assert_allclose(credit.segment_advantages[0], [0.45, 0.5], atol=1e-6)
    np.testing.assert_allclose(credit.targets["value"][0], [0.75, 1.0], atol=1e-6)
    np.testing.assert_allclose(credit.advantages[0], [0.45, 0.45, 0.5, 0.5], atol=1e-6)


def test_whitening_worked_numbers():
    mask = np.array([[1, 1, 1], [1, 1, 0]], bool)
    x = np.where(mask, np.array([[1.0], [0.0]]), np.nan)
    got = primitives.masked_whiten(x, mask)
    np.testing.assert_allclose(got[0], [0.730297] * 3, atol=2e-5)
    np.testing.assert_allclose(got[1], [-1.095445, -1.095445, 0], atol=2e-5)


# --- laws of single estimators -------------------------------------------------------------------


@PROPERTY
@given(st.integers(0, 2**31))
def test_group_relative_laws(seed):
    batch = random_batch(seed)
    by_name = {
        name: np.asarray(run(name, batch).segment_advantages[:, 0]) for name in GROUP_RELATIVE
    }
    group = np.asarray(batch.group_id)
    for g in np.unique(group):
        members = group == g
        np.testing.assert_allclose(by_name["grpo"][members].sum(), 0, atol=1e-4)
        np.testing.assert_allclose(by_name["dr_grpo"][members].sum(), 0, atol=1e-5)
        n = members.sum()
        np.testing.assert_allclose(
            by_name["rloo"][members], n / (n - 1) * by_name["dr_grpo"][members], atol=1e-5
        )


def test_groups_of_equal_outcomes_get_exactly_nothing_whatever_rounding_does():
    """A rounding error of 1e-8 over a spread of 0 + eps would be an advantage of .01."""
    outcome = np.random.default_rng(0).uniform(size=30).repeat(7)
    batch = make_batch(outcome, group_id=np.arange(30, dtype=np.int32).repeat(7))
    assert not np.any(run("grpo", batch).advantages)


@PROPERTY
@given(st.integers(0, 2**31))
def test_vineppo_adds_up_to_outcome_minus_first_value(seed):
    credit = run("vineppo", batch := random_batch(seed))
    np.testing.assert_allclose(
        credit.segment_advantages.sum(axis=1), batch.outcome - credit.aux["value"][:, 0], atol=1e-5
    )


def test_vineppo_fills_unsampled_states_from_behind():
    mc_return = np.array([[[0.25], [np.nan], [0.75], [np.nan], [np.nan]]], np.float32)
    batch = make_batch([1], num_segments=[5], mc_return=mc_return, mc_mask=~np.isnan(mc_return))
    credit = run("vineppo", batch)
    np.testing.assert_allclose(credit.aux["value"][0], [0.25, 0.75, 0.75, 1, 1])
    np.testing.assert_allclose(credit.segment_advantages[0], [0.5, 0, 0.25, 0, 0])
    merged = run("vineppo", batch, gaps="merge")
    np.testing.assert_allclose(merged.segment_advantages[0], [0.5, 0.5, 0.25, 0.25, 0.25])
    late = dataclasses.replace(batch, mc_mask=batch.mc_mask.at[0, 0, 0].set(False))
    np.testing.assert_allclose(
        run("vineppo", late, gaps="merge").segment_advantages[0], [0, 0, 0.25, 0.25, 0.25]
    )


def test_focus_with_fixed_lambda_is_ppo_over_the_same_values():
    batch = random_batch(0)
    hparams = {"lambda_": 0.7, "discount": 0.9, "truncation": "fail"}
    focus, ppo = run("focus", batch, **hparams), run("ppo", batch, **hparams)
    np.testing.assert_array_equal(focus.advantages, ppo.advantages)
    assert np.any(focus.advantages != run("focus", batch).advantages)


def test_focus_trust_mode_reads_the_variance_of_the_next_state():
    value = np.array([[0.5, 0.8, 0.3]], np.float32)
    for variance, first in ((0.0, 0.8 - 0.5), (1e9, 1 - 0.5)):
        batch = make_batch([1], value=value, value_variance=np.full((1, 3), variance, np.float32))
        credit = run("focus", batch, lambda_mode="trust")
        np.testing.assert_allclose(credit.segment_advantages[0], [first, 0.2], atol=1e-6)


def test_focus_trust_mode_takes_out_what_both_states_share():
    value = np.array([[0.5, 0.8, 0.3]], np.float32)
    variance = np.full((1, 3), 0.1, np.float32)
    for shared, lambda_ in ((0.1, 0.0), (0.06, 0.04 / 0.16)):
        batch = make_batch(
            [1], value=value, value_variance=variance,
            value_covariance=np.full((1, 2), shared, np.float32),
        )  # fmt: skip
        credit = run("focus", batch, lambda_mode="trust")
        np.testing.assert_allclose(credit.aux["lambda"][0], [lambda_, 1], atol=1e-6)
        np.testing.assert_allclose(
            credit.segment_advantages[0], [0.3 + lambda_ * 0.2, 0.2], atol=1e-6
        )


def test_where_the_critic_is_not_trusted_focus_is_the_outcome_against_other_rollouts():
    batch = random_batch(2)
    shape = batch.outcome.shape
    baseline = jnp.where(jnp.arange(shape[0]) % 2 == 0, 0.3, jnp.nan)
    gated = run("focus", dataclasses.replace(batch, baseline=baseline), lambda_=0.5)
    plain = run("focus", batch, lambda_=0.5)
    constant = jnp.full_like(batch.value, 0.3)
    simple = run("focus", dataclasses.replace(batch, value=constant), lambda_=1.0)
    np.testing.assert_array_equal(gated.advantages[1::2], plain.advantages[1::2])
    np.testing.assert_allclose(gated.advantages[::2], simple.advantages[::2], atol=1e-6)
    assert np.any(gated.advantages[::2] != plain.advantages[::2])


def test_the_fallback_counts_other_base_rollouts_of_the_task_or_else_all_others():
    outcome = np.array([1, 0, 0, 1, 0, np.nan], np.float32)
    group = np.array([0, 0, 0, 1, 0, 2], np.int32)
    is_base = np.array([1, 1, 1, 1, 0, 1], bool)
    got = baselines.fallback_baseline(outcome, group, is_base, np.isfinite(outcome))
    # A branch (row 4) counts for nobody and is held against all base rollouts of its task.
    np.testing.assert_allclose(got, [0, 0.5, 0.5, 1 / 3, 1 / 3, 0.5])
    alone = baselines.fallback_baseline(outcome[:1], group[:1], is_base[:1], is_base[:1])
    np.testing.assert_allclose(alone, [0.5])


@pytest.mark.parametrize("name", SEGMENTAL)
def test_pitfall_5_gradient_is_the_enumerated_one_when_the_policy_chooses_when_to_stop(name):
    """Turn 1: stop (outcome .4) or go on; turn 2: win (outcome 1) or lose (outcome 0)."""
    logits = jnp.array([0.3, -0.8])  # of going on, of winning

    def probabilities(logits):
        go, win = jax.nn.sigmoid(logits)
        return jnp.array([1 - go, go * win, go * (1 - win)])

    outcome = np.array([0.4, 1.0, 0.0], np.float32)
    value_1 = float(jax.nn.sigmoid(logits[1]))
    value_0 = float(probabilities(logits) @ outcome)
    values = np.array([[value_0, 99, 99], [value_0, value_1, 99], [value_0, value_1, 99]])
    mc_return = np.repeat(values[:, :2, None], 2, axis=2)
    batch = make_batch(
        outcome, num_segments=[1, 2, 2], tokens_per_segment=1,
        value=values.astype(np.float32), mc_return=mc_return, mc_mask=np.ones((3, 2, 2), bool),
    )  # fmt: skip

    def logp(logits):
        go, win = jax.nn.log_sigmoid(logits)
        stop, lose = jax.nn.log_sigmoid(-logits)
        return jnp.array([[stop, 0.0], [go, win], [go, lose]])

    advantages, weight = run(name, batch).advantages, probabilities(logits)
    estimated = jax.grad(lambda x: jnp.sum(weight[:, None] * advantages * logp(x)))(logits)
    enumerated = jax.grad(lambda x: probabilities(x) @ outcome)(logits)
    np.testing.assert_allclose(estimated, enumerated, atol=1e-6)


# --- rules that all estimators share -------------------------------------------------------------


@pytest.mark.parametrize("name", BASELINES)
def test_pitfalls_7_and_9_rows_that_cannot_score_change_nobody(name):
    """A row without a score, a padding row, a row without tokens: all NaN, all ignored."""
    batch = random_batch(3)
    # The reference: the last three rows play, but in a group of their own.
    alone = dataclasses.replace(batch, group_id=batch.group_id.at[5:].set(77))
    expected = run(name, alone)
    out, empty = jnp.arange(8) >= 5, jnp.arange(8) == 7
    poisoned = {
        field: jnp.where(out.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)
        for field in ("outcome", "segment_reward", "value", "value_variance", "mc_return")
        if (x := getattr(batch, field)) is not None
    }
    batch = dataclasses.replace(
        batch,
        **poisoned,
        row_mask=~out | empty,
        token_mask=batch.token_mask & ~empty[:, None],
        truncated=batch.truncated & ~out,
    )
    got = run(name, batch)
    np.testing.assert_allclose(got.advantages[:5], expected.advantages[:5], atol=1e-6)
    assert not np.any(got.advantages[5:]) and not np.any(got.segment_advantages[5:])
    assert not np.any(got.mask[5:])
    assert jax.tree.all(jax.tree.map(lambda x: bool(np.all(np.isfinite(x))), got))


@pytest.mark.parametrize("name", BASELINES)
def test_permuting_rows_permutes_and_padding_changes_nothing(name):
    batch = random_batch(5)
    expected = run(name, batch)
    order = np.array([4, 2, 0, 7, 5, 1, 6, 3])
    permuted = run(name, jax.tree.map(lambda x: x[order], batch))
    np.testing.assert_allclose(permuted.advantages, expected.advantages[order], atol=1e-6)

    def widen(x, amount, fill):
        return jnp.pad(x, [(0, 0), (0, amount)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)

    fills = {"segment_mask": False, "segment_reward": np.nan, "value": np.nan,
             "value_variance": np.nan, "mc_return": np.nan, "mc_mask": False}  # fmt: skip
    tokens = {"token_segment": -1, "token_mask": False, "behaviour_logp": np.nan}
    padded = dataclasses.replace(
        batch,
        **{k: widen(getattr(batch, k), 2, v) for k, v in fills.items()},
        **{k: widen(getattr(batch, k), 3, v) for k, v in tokens.items()},
    )
    got = run(name, padded)
    np.testing.assert_allclose(got.advantages[:, :-3], expected.advantages, atol=1e-6)
    assert not np.any(got.mask[:, -3:]) and not np.any(got.segment_advantages[:, -2:])
    np.testing.assert_array_equal(got.mask[:, :-3], expected.mask)


@pytest.mark.parametrize("name", BASELINES)
def test_tokens_carry_their_segment_and_observations_are_not_trained(name):
    batch = random_batch(6)
    observed = jnp.zeros_like(batch.token_mask).at[:, 1].set(True)
    batch = dataclasses.replace(
        batch,
        token_mask=batch.token_mask & ~observed,
        token_segment=jnp.where(observed, -1, batch.token_segment),
    )
    credit, batch = jax.tree.map(np.asarray, (run(name, batch), batch))
    for row, token in np.ndindex(batch.token_mask.shape):
        segment = batch.token_segment[row, token]
        expected = credit.segment_advantages[row, segment] if batch.token_mask[row, token] else 0
        assert credit.advantages[row, token] == expected
    np.testing.assert_array_equal(credit.mask, batch.token_mask)


@pytest.mark.parametrize("name", BASELINES)
def test_gradients_are_finite_with_nan_under_the_masks(name):
    batch = random_batch(7)
    row_mask = batch.row_mask.at[0].set(False)
    batch = dataclasses.replace(
        batch,
        row_mask=row_mask,
        outcome=jnp.where(row_mask, batch.outcome, jnp.nan),
        value=batch.value.at[0].set(jnp.nan),
        mc_return=jnp.where(batch.mc_mask, batch.mc_return, jnp.nan),
        segment_reward=jnp.where(batch.segment_mask, 0.0, jnp.nan),
    )

    def loss(floats):
        weights = jnp.arange(batch.token_mask.size).reshape(batch.token_mask.shape)
        return jnp.sum(weights * run(name, dataclasses.replace(batch, **floats)).advantages)

    names = ("outcome", "value", "mc_return", "segment_reward")
    grads = jax.grad(loss)({k: getattr(batch, k) for k in names})
    assert all(np.all(np.isfinite(g)) for g in grads.values())
    assert np.any(grads["outcome"] != 0)


def test_truncation_bootstraps_fails_or_leaves_the_loss():
    value = np.array([[0.2, 0.4, 0.6], [0.2, 0.4, 0.6]], np.float32)
    batch = make_batch([np.nan, 1.0], value=value, truncated=np.array([True, False]))
    finished = [0.8, 0.6]
    for truncation, cut, kept in (
        ("bootstrap", [0.4, 0.2], True),
        ("fail", [-0.2, -0.4], True),
        ("mask", [0, 0], False),
    ):
        credit = run("focus", batch, lambda_=1.0, truncation=truncation)
        np.testing.assert_allclose(credit.segment_advantages, [cut, finished], atol=1e-6)
        assert bool(credit.mask[0].all()) == bool(credit.mask[0].any()) == kept
        assert credit.mask[1].all()
    scored = dataclasses.replace(batch, outcome=jnp.array([0.5, 1.0]))
    credit = run("focus", scored, lambda_=1.0, truncation="fail")
    np.testing.assert_allclose(credit.segment_advantages[0], [0.3, 0.1], atol=1e-6)
    # The value where it was cut already stands for the outcome: counting both would count twice.
    credit = run("focus", scored, lambda_=1.0, truncation="bootstrap")
    np.testing.assert_allclose(credit.segment_advantages[0], [0.4, 0.2], atol=1e-6)


@pytest.mark.parametrize("name", (*GROUP_RELATIVE, "vineppo"))
def test_a_truncated_row_without_outcome_stays_out_of_what_cannot_bootstrap(name):
    batch = random_batch(8)
    cut = jnp.arange(8) == 2
    batch = dataclasses.replace(
        batch, truncated=cut, outcome=jnp.where(cut, jnp.nan, batch.outcome)
    )
    without = dataclasses.replace(batch, row_mask=~cut)
    np.testing.assert_array_equal(run(name, batch).advantages, run(name, without).advantages)
    assert not np.any(run(name, batch).mask[2])


def test_segment_rewards_count_in_every_estimator():
    for name in BASELINES:
        batch = random_batch(9)
        batch = dataclasses.replace(
            batch, truncated=jnp.zeros(8, bool), mc_mask=jnp.ones_like(batch.mc_mask)
        )
        rewarded = dataclasses.replace(batch, segment_reward=batch.segment_reward.at[1, 0].set(1.0))
        change = run(name, rewarded).advantages[1, 0] - run(name, batch).advantages[1, 0]
        assert change > 0.1, name


# --- primitives ----------------------------------------------------------------------------------


@PROPERTY
@given(st.integers(0, 2**31), st.sampled_from([0, 1]))
def test_group_statistics_equal_a_loop_for_any_integer_keys(seed, ddof):
    rng = np.random.default_rng(seed)
    key = rng.choice([-1, 0, 3, 10**6], size=(3, 5)).astype(np.int32)
    mask, x = rng.uniform(size=(3, 5)) < 0.7, rng.normal(size=(3, 5)).astype(np.float32)
    got = group_statistics(np.where(mask, x, np.nan), key, mask, ddof=ddof)
    got = jax.tree.map(np.asarray, got)
    for index in np.ndindex(x.shape):
        members = x[mask & (key == key[index])]
        if key[index] < 0 or not mask[index]:
            assert all(field[index] == 0 for field in got)
            continue
        std = members.std(ddof=ddof) if len(members) > ddof else 0.0
        expected = (len(members), members.mean(), std, x[index] - members.mean())
        for field, want in zip(got, expected):
            np.testing.assert_allclose(field[index], want, atol=1e-5)


@pytest.mark.parametrize("center, scale", [("mean", "std"), ("loo", "none"), ("none", "std")])
def test_group_normalise_vmaps_and_has_finite_gradients_in_degenerate_groups(center, scale):
    x = jnp.array([[1.0, 1.0, 5.0, jnp.nan], [1.0, 2.0, 2.0, jnp.nan]])
    key, mask = jnp.array([0, 0, 1, 1]), jnp.array([True, True, True, False])

    @jax.jit
    def normalise(x):
        return primitives.group_normalise(x, key, mask, center=center, scale=scale)

    for row, got in zip(x, jax.vmap(normalise)(x)):
        np.testing.assert_allclose(got, normalise(row), rtol=1e-6)
        assert np.all(np.isfinite(jax.grad(lambda r: normalise(r)[:2].sum())(row)))
        np.testing.assert_array_equal(got[2:], 0)


def test_pitfall_13_masked_nan_stays_out_of_mean_and_gradient():
    x, mask = jnp.array([1, 2, jnp.nan, 4]), jnp.array([True, False, False, True])
    value, grad = jax.value_and_grad(primitives.masked_mean)(x, mask)
    assert float(value) == 2.5
    np.testing.assert_array_equal(grad, [0.5, 0, 0, 0.5])
    assert float(primitives.masked_mean(x, jnp.zeros(4, bool))) == 0


@pytest.mark.parametrize("kept", [0, 1])
def test_pitfall_30_whitening_one_or_no_token_is_finite_with_its_gradient(kept):
    x, mask = jnp.array([3.0, jnp.nan, jnp.nan]), jnp.arange(3) < kept
    np.testing.assert_array_equal(primitives.masked_whiten(x, mask), 0)
    assert np.all(np.isfinite(jax.grad(lambda x: primitives.masked_whiten(x, mask)[0])(x)))


def test_pitfall_30_no_estimator_whitens():
    """Twice the reward, twice the advantage: whatever divides by a spread would break this."""
    batch = random_batch(10)
    for name in set(BASELINES) - {"grpo"}:
        doubled = dataclasses.replace(
            batch, outcome=2 * batch.outcome, value=2 * batch.value, mc_return=2 * batch.mc_return
        )
        np.testing.assert_allclose(
            run(name, doubled).advantages, 2 * run(name, batch).advantages, atol=1e-5
        )


# --- registry ------------------------------------------------------------------------------------


def test_a_missing_channel_is_named_with_who_produces_it():
    batch = make_batch([1, 0])
    for name in ("focus", "ppo"):
        with pytest.raises(ValueError, match=rf"{name}.*value.*critic\.enabled"):
            estimate(name, batch)
    with pytest.raises(ValueError, match="mc_return.*continuations"):
        estimate("vineppo", batch)
    with pytest.raises(ValueError, match="value_variance.*error features"):
        estimate("focus", dataclasses.replace(batch, value=jnp.zeros((2, 3))), lambda_mode="trust")


def test_unknown_names_are_refused_with_the_valid_ones():
    batch = random_batch(0)
    with pytest.raises(ValueError, match="'gpro'.*'grpo'"):
        estimate("gpro", batch)
    with pytest.raises(ValueError, match="rloo has no hyperparameter lam.*singleton"):
        estimate("rloo", batch, lam=0.9)
    with pytest.raises(ValueError, match="grpo: eps='small' must be a number; the default is"):
        estimate("grpo", batch, eps="small")
    with pytest.raises(ValueError, match="must be a number"):
        estimate("grpo", batch, eps=jnp.array(True))


def test_hyperparameters_may_be_arrays_and_traced():
    batch = random_batch(0)
    want = estimate("grpo", batch, ddof=0, eps=0.5).advantages
    for ddof in (np.int64(0), np.array(0), jnp.int32(0)):
        got = estimate("grpo", batch, ddof=ddof, eps=np.float32(0.5)).advantages
        np.testing.assert_allclose(got, want, atol=1e-6)
    traced = jax.jit(lambda ddof, eps: estimate("grpo", batch, ddof=ddof, eps=eps).advantages)
    np.testing.assert_allclose(traced(0, 0.5), want, atol=1e-6)


def test_unknown_names_of_settings_are_refused():
    batch = random_batch(0)
    for hparam in ("truncation", "lambda_mode"):
        with pytest.raises(ValueError, match=f"{hparam}='sometimes'"):
            estimate("focus", batch, **{hparam: "sometimes"})
    with pytest.raises(ValueError, match="gaps='bridge'.*merge"):
        estimate("vineppo", batch, gaps="bridge")
    with pytest.raises(ValueError, match="singleton='drop'.*keep"):
        estimate("grpo", batch, singleton="drop")


def test_specs_declare_what_the_functions_take():
    import inspect

    for name, spec in ESTIMATORS.items():
        if spec.kind != "estimator":
            continue
        signature = inspect.signature(spec.fn).parameters
        defaults = {k: p.default for k, p in signature.items() if k != "batch"}
        assert defaults == dict(spec.hparams), name
        assert set(spec.inputs) <= {f.name for f in dataclasses.fields(CreditBatch)}
        if name in BASELINES:
            assert (spec.min_group_size > 1) == (name in GROUP_RELATIVE)  # pitfall 8
