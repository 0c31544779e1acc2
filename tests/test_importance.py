"""Importance weights of tokens that other weights, or another program, have sampled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.learner import losses
from focus.learner.losses import PolicyLossConfig, importance_weights, policy_loss

OFF = PolicyLossConfig(importance_cap=None)
CONFIGS = {
    "truncated": PolicyLossConfig(importance_cap=1.5),
    "masked": PolicyLossConfig(importance_cap=None, importance_range=(0.5, 2.0)),
    "both": PolicyLossConfig(importance_cap=1.5, importance_range=(0.5, 2.0)),
    "sequence": PolicyLossConfig(importance_level="sequence", importance_cap=1.5),
    "geometric": PolicyLossConfig(
        importance_level="geometric", importance_cap=None, importance_range=(0.9, 1.1)
    ),
}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def example(seed=0, shape=(4, 9), gap=0.5):
    rng = np.random.default_rng(seed)
    old = -rng.random(shape)
    return dict(
        logp=old + 0.1 * rng.normal(size=shape),
        old_logp=old,
        behaviour_logp=old + gap * rng.normal(size=shape),
        advantages=rng.normal(size=shape),
        mask=rng.random(shape) < 0.7,
    )


def log_ratio(arrays, config):
    """What the trainer hands to the loss."""
    if config.importance_level == "token":
        return None
    return losses.sequence_log_ratio(
        jnp.asarray(arrays["old_logp"]),
        jnp.asarray(arrays["behaviour_logp"]),
        jnp.asarray(arrays["mask"]),
        config.importance_level,
    )


def loss_and_grad(arrays, config):
    rest = {k: jnp.asarray(v) for k, v in arrays.items() if k != "logp"}

    def loss(logp):
        return policy_loss(
            logp,
            **rest,
            denominator=rest["mask"].sum(),
            config=config,
            importance_log_ratio=log_ratio(arrays, config),
        )

    (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(arrays["logp"]))
    return value, grad, losses.mean_metrics(metrics)


def slow_weights(arrays, config):
    """A loop over trajectories and tokens, straight from the definitions."""
    weights = np.zeros(arrays["mask"].shape)
    for b, mask in enumerate(arrays["mask"]):
        gaps = [arrays["old_logp"][b, i] - arrays["behaviour_logp"][b, i] for i in range(len(mask))]
        product, count = 1.0, 0
        for i in np.flatnonzero(mask):
            product, count = product * np.exp(gaps[i]), count + 1
        for i in np.flatnonzero(mask):
            ratio = {
                "token": np.exp(gaps[i]),
                "sequence": product,
                "geometric": product ** (1 / count),
            }[config.importance_level]
            weight = ratio
            if config.importance_cap is not None:
                weight = min(weight, config.importance_cap)
            if config.importance_range is not None:
                low, high = config.importance_range
                weight = weight if low <= ratio <= high else 0.0
            weights[b, i] = weight
    return weights


@each
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 999), gap=st.sampled_from([0.05, 0.5]))
def test_weights_equal_a_loop_over_tokens(config, seed, gap):
    arrays = example(seed, gap=gap)
    ratios = log_ratio(arrays, config)
    if ratios is None:
        ratios = jnp.asarray(arrays["old_logp"] - arrays["behaviour_logp"])
    weights, metrics = importance_weights(ratios, jnp.asarray(arrays["mask"]), config)
    mask, want = arrays["mask"], slow_weights(arrays, config)
    np.testing.assert_allclose(np.where(mask, weights, 0.0), want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["importance_weight"], want.sum(), rtol=1e-4)
    if config.importance_cap is not None:
        assert weights.max() <= config.importance_cap * (1 + 1e-6)
    if config.importance_range is not None:
        assert metrics["importance_masked"] == np.sum(mask & (want == 0))


@each
def test_a_gradient_is_weighted_token_by_token(config):
    arrays = example(1)
    _, plain, _ = loss_and_grad(arrays, OFF)
    _, weighted, _ = loss_and_grad(arrays, config)
    np.testing.assert_allclose(weighted, plain * slow_weights(arrays, config), rtol=1e-4, atol=1e-6)
    assert np.abs(weighted - plain).max() > 1e-3


@each
def test_on_policy_nothing_is_corrected(config):
    arrays = example(2) | {"behaviour_logp": example(2)["old_logp"]}
    value, grad, metrics = loss_and_grad(arrays, config)
    want = loss_and_grad(arrays, OFF)
    np.testing.assert_array_equal(value, want[0])
    np.testing.assert_array_equal(grad, want[1])
    for name in ("importance_ratio", "importance_weight", "importance_ess"):
        assert metrics[name] == pytest.approx(1.0), name
    assert metrics.get("importance_masked", 0) == metrics.get("importance_capped", 0) == 0


def test_one_bad_token_costs_itself_or_its_whole_trajectory():
    arrays = example(3) | {"mask": np.ones((4, 9), bool)}
    arrays["behaviour_logp"] = arrays["old_logp"].copy()
    arrays["behaviour_logp"][2, 5] -= 1.0  # a ratio of e
    for level, lost in (("token", [(2, 5)]), ("sequence", [(2, i) for i in range(9)])):
        config = PolicyLossConfig(
            importance_level=level, importance_cap=None, importance_range=(0.5, 2.0)
        )
        _, grad, metrics = loss_and_grad(arrays, config)
        assert [tuple(i) for i in np.argwhere(grad == 0)] == lost
        assert metrics["importance_masked"] == pytest.approx(len(lost) / 36)
    # Its share of the mean over nine tokens lies within the range.
    config = PolicyLossConfig(
        importance_level="geometric", importance_cap=None, importance_range=(0.5, 2.0)
    )
    _, grad, metrics = loss_and_grad(arrays, config)
    assert metrics["importance_masked"] == 0 and (np.asarray(grad) != 0).all()
    assert metrics["importance_ratio"] == pytest.approx((27 + 9 * np.exp(1 / 9)) / 36)


def test_the_denominator_counts_masked_tokens():
    """Dropping one of two tokens halves nothing but its own part."""
    arrays = dict(
        logp=np.zeros((1, 2)),
        old_logp=np.zeros((1, 2)),
        behaviour_logp=np.array([[0.0, -3.0]]),
        advantages=np.ones((1, 2)),
        mask=np.ones((1, 2), bool),
    )
    _, grad, _ = loss_and_grad(arrays, CONFIGS["masked"])
    np.testing.assert_allclose(grad, [[-0.5, 0.0]])


def test_the_effective_sample_size_is_that_of_the_weights():
    arrays = example(4)
    weights = slow_weights(arrays, CONFIGS["truncated"])[arrays["mask"]]
    *_, metrics = loss_and_grad(arrays, CONFIGS["truncated"])
    want = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert 0 < metrics["importance_ess"] < 1
    assert metrics["importance_ess"] == pytest.approx(want, rel=1e-4)
    assert "importance_square" not in metrics


@each
def test_extreme_ratios_and_masked_nans_stay_finite(config):
    arrays = example(5)
    arrays["mask"][0, :2] = True
    arrays["behaviour_logp"][0, :2] = [-1000.0, 1000.0]
    for name in ("logp", "old_logp", "behaviour_logp", "advantages"):
        arrays[name] = np.where(arrays["mask"], arrays[name], np.nan)
    value, grad, metrics = loss_and_grad(arrays, config)
    assert np.isfinite(value) and np.isfinite(grad).all()
    assert all(np.isfinite(x) for x in metrics.values())


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="importance_level must be one of .*'turn'"):
        PolicyLossConfig(importance_level="turn")
    for bad in ((1.1, 2.0), (0.5, 0.9), (-1.0, 2.0)):
        with pytest.raises(ValueError, match="must hold 1"):
            PolicyLossConfig(importance_range=bad)
    arrays = {k: jnp.asarray(v) for k, v in example().items()}
    with pytest.raises(ValueError, match="sequence_log_ratio"):
        policy_loss(**arrays, denominator=1, config=CONFIGS["sequence"])
    with pytest.raises(ValueError, match="'token'"):
        losses.sequence_log_ratio(arrays["logp"], arrays["logp"], arrays["mask"], "token")
