"""Baselines on tokens: worked numbers and laws."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_estimators import make_batch, run

from focus.credit import estimate, token_level

f32 = np.float32


def check(got, want):
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_reinforce_pp():
    batch = make_batch([1, 0], num_segments=[3, 2], tokens_per_segment=1)
    got = run("reinforce_pp", batch).advantages
    check(got, [[0.730297] * 3, [-1.095445, -1.095445, 0]])
    batch = make_batch([1, 0, 0, 0], num_segments=[1] * 4, tokens_per_segment=1)
    got = run("reinforce_pp_baseline", batch).advantages[:, 0]
    check(got, [1.5, -0.5, -0.5, -0.5])


def test_dapo():
    penalty = token_level.overlong_penalty(jnp.array([15, 18, 20]), max_length=20, buffer=4)
    check(penalty, [0, -0.5, -1])
    batch = make_batch([1, 0, 1, 1], group_id=np.array([0, 0, 1, 1], np.int32))
    np.testing.assert_array_equal(run("dapo", batch).aux["kept"], [1, 1, 0, 0])
    with pytest.raises(ValueError, match="buffer=0"):
        token_level.overlong_penalty(jnp.array([15]), max_length=20, buffer=0)


def test_gspo():
    logp, ones = f32([[0.1, 0.3]]), np.ones((1, 2), f32)
    got = token_level.gspo_objective(logp, 0 * logp, ones, ones > 0)
    check(got, 1.0004)
    check(token_level.gspo_objective(logp, 0 * logp, ones, ones > 0, clip_high=1.0), 1.221403)
    with pytest.raises(ValueError, match="gspo is a loss"):
        estimate("gspo", make_batch([1, 0]))


def test_ppo_token_steps_over_observations():
    hparams = {"lambda_": 0.9, "whiten": False}
    batch = make_batch(
        [1], num_segments=[1], tokens_per_segment=3, token_value=f32([[0.2, 0.4, 0.6]])
    )
    check(run("ppo_token", batch, **hparams).advantages[0], [0.704, 0.56, 0.4])
    batch = make_batch(
        [1], num_segments=[1], tokens_per_segment=4,
        token_value=f32([[0.2, np.nan, 0.4, 0.6]]), token_mask=np.array([[1, 0, 1, 1]], bool),
    )  # fmt: skip
    credit = run("ppo_token", batch, **hparams)
    check(credit.advantages[0], [0.704, 0, 0.56, 0.4])
    check(credit.targets["token_value"][0], [0.904, 0, 0.96, 1])


def test_bilevel_gae():
    batch = make_batch([1], token_value=f32([[0.2, 0.3, 0.4, 0.5]]))
    credit = estimate(
        "bilevel_gae", batch, lambda_=0.5, segment_lambda=0.5, segment_discount=1.0, whiten=False
    )
    check(credit.advantages[0], [0.325, 0.45, 0.35, 0.5])
    check(credit.targets["token_value"][0], [0.525, 0.75, 0.75, 1])


def test_opo_weights_by_length():
    batch = make_batch([1, 0], num_segments=[3, 1], tokens_per_segment=1)
    check(run("opo", batch).advantages[:, 0], [0.25, -0.75])
