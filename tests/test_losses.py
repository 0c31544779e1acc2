"""Laws of the policy loss and the faults that public trainers had with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.learner import losses
from focus.learner.losses import PolicyLossConfig, policy_loss, supervised_loss

PLAIN = PolicyLossConfig()


def example(seed=0, shape=(3, 5)):
    rng = np.random.default_rng(seed)
    old = -rng.random(shape)
    return dict(
        logp=old + 0.3 * rng.normal(size=shape),
        old_logp=old,
        behaviour_logp=old + 0.3 * rng.normal(size=shape),
        advantages=rng.normal(size=shape),
        mask=rng.random(shape) < 0.7,
    )


def value_and_grad(arrays, config=PLAIN, **kwargs):
    rest = {k: jnp.asarray(v) for k, v in arrays.items() if k != "logp"}
    kwargs.setdefault("denominator", rest["mask"].sum())

    return _value_and_grad(jnp.asarray(arrays["logp"]), rest, kwargs, config)


@functools.partial(jax.jit, static_argnums=3)
def _value_and_grad(logp, rest, kwargs, config):
    return jax.value_and_grad(lambda x: policy_loss(x, **rest, config=config, **kwargs)[0])(logp)


def slow_loss(arrays, config):
    """A loop over tokens, straight from the definition."""
    total, count = 0.0, 0
    for i in np.argwhere(arrays["mask"]):
        logp, old, behaviour, a = (
            arrays[k][tuple(i)] for k in ("logp", "old_logp", "behaviour_logp", "advantages")
        )
        ratio = np.exp(logp - old)
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        token = -min(a * ratio, a * clipped)
        if config.dual_clip is not None and a < 0:
            token = min(token, -config.dual_clip * a)
        if config.importance_cap is not None:
            token *= min(np.exp(old - behaviour), config.importance_cap)
        total, count = total + token, count + 1
    return total / count


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 999),
    dual_clip=st.sampled_from([None, 1.05]),
    cap=st.sampled_from([None, 0.9, 1.2]),
)
def test_loss_equals_a_loop_over_tokens(seed, dual_clip, cap):
    config = PolicyLossConfig(clip_low=0.1, clip_high=0.3, dual_clip=dual_clip, importance_cap=cap)
    arrays = example(seed)
    if arrays["mask"].any():
        value, _ = value_and_grad(arrays, config)
        np.testing.assert_allclose(value, slow_loss(arrays, config), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("split", [[(0, 2)], [(0, 1), (1, 2)]])
def test_token_mean_is_the_same_for_every_split(split):
    """Pitfall 11: token losses [4] and [1, 1, 1] give 1.75."""
    logp = jnp.array([[-4.0, 0, 0], [-1.0, -1.0, -1.0]])
    mask = jnp.array([[True, False, False], [True, True, True]])
    ones = jnp.ones_like(logp)
    total = sum(
        supervised_loss(logp[a:b], ones[a:b], mask[a:b], denominator=mask.sum())[0]
        for a, b in split
    )
    np.testing.assert_allclose(total, 1.75)


def test_an_extreme_log_ratio_is_finite():
    """Pitfall 12: both signs of the advantage, loss and gradient, KL terms included."""
    for sign in (1.0, -1.0):
        for gap in (1000.0, -1000.0):
            arrays = dict(
                logp=np.array([gap]),
                old_logp=np.zeros(1),
                behaviour_logp=np.array([-gap]),
                advantages=np.array([sign]),
                mask=np.array([True]),
            )
            config = PolicyLossConfig(kl_coefficient=0.1)
            value, grad = value_and_grad(arrays, config, ref_logp=jnp.array([-gap]))
            assert np.isfinite(value) and np.isfinite(grad).all()


def test_what_is_masked_may_be_nan():
    """Pitfalls 13 and 30, for every input at once, entropy and reference included."""
    x, mask = jnp.array([1, 2, jnp.nan, 4]), jnp.array([True, False, False, True])
    np.testing.assert_allclose(losses.masked_mean(x, mask), 2.5)
    np.testing.assert_allclose(jax.grad(losses.masked_mean)(x, mask), [0.5, 0, 0, 0.5])
    assert losses.masked_mean(x, jnp.zeros(4, bool)) == 0

    arrays = example(1)
    clean = {k: v if k == "mask" else np.where(arrays["mask"], v, 0.0) for k, v in arrays.items()}
    poison = {
        k: v if k == "mask" else np.where(arrays["mask"], v, np.nan) for k, v in arrays.items()
    }
    config = PolicyLossConfig(kl_coefficient=0.1, entropy_coefficient=0.1)
    got = value_and_grad(poison, config, entropy=poison["old_logp"], ref_logp=poison["old_logp"])
    want = value_and_grad(clean, config, entropy=clean["old_logp"], ref_logp=clean["old_logp"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)
    assert np.isfinite(got[1]).all() and (np.asarray(got[1])[~arrays["mask"]] == 0).all()


def test_a_kl_coefficient_changes_the_gradient():
    """Pitfall 15; with no other force the gradient pulls log-probs towards the reference."""
    arrays = example(2) | {"mask": np.ones((3, 5), bool)}
    reference = jnp.asarray(arrays["old_logp"])
    without = value_and_grad(arrays, PLAIN, ref_logp=reference)[1]
    with_kl = value_and_grad(arrays, PolicyLossConfig(kl_coefficient=0.5), ref_logp=reference)[1]
    assert np.abs(with_kl - without).max() > 1e-3
    gap = arrays["logp"] - arrays["old_logp"]
    np.testing.assert_array_equal(np.sign(with_kl - without), np.sign(gap))


def test_an_entropy_bonus_rewards_entropy():
    arrays, config = example(3), PolicyLossConfig(entropy_coefficient=0.1)
    low, high = (value_and_grad(arrays, config, entropy=jnp.full((3, 5), e))[0] for e in (1.0, 2.0))
    np.testing.assert_allclose(low - high, 0.1, rtol=1e-4)


def test_on_policy_gradient_is_minus_the_advantage():
    arrays = example(4)
    arrays |= {"logp": arrays["old_logp"], "behaviour_logp": arrays["old_logp"]}
    _, grad = value_and_grad(arrays)
    want = np.where(arrays["mask"], -arrays["advantages"], 0.0) / arrays["mask"].sum()
    np.testing.assert_allclose(grad, want, atol=1e-6)


def test_the_importance_weight_is_capped_and_carries_no_gradient():
    one = dict(old_logp=np.zeros(1), advantages=np.ones(1), mask=np.array([True]), logp=np.zeros(1))
    for gap, weight in ((0.5, np.exp(0.5)), (5.0, 2.0), (-0.5, np.exp(-0.5))):
        value, grad = value_and_grad(one | {"behaviour_logp": np.array([-gap])})
        np.testing.assert_allclose((value, grad[0]), (-weight, -weight), rtol=1e-5)
    rest = dict(denominator=jnp.float32(1), config=PLAIN)
    through_old = jax.grad(
        lambda old, behaviour: policy_loss(
            old, old, behaviour, jnp.ones(1), jnp.array([True]), **rest
        )[0].sum(),
        argnums=1,
    )
    assert through_old(jnp.zeros(1), jnp.full(1, 0.3)) == 0


def test_metrics_of_parts_merge_to_those_of_the_whole():
    arrays = {k: jnp.asarray(v) for k, v in example(5, (4, 5)).items()}

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def metrics(a, b):
        part = {k: v[a:b] for k, v in arrays.items()}
        return policy_loss(**part, denominator=1.0, config=PLAIN, entropy=part["old_logp"])[1]

    merged = losses.merge_metrics(metrics(0, 1), metrics(1, 4))
    want = losses.mean_metrics(metrics(0, 4))
    got = losses.mean_metrics(merged)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, err_msg=name)
    ratio = np.exp(arrays["logp"] - arrays["old_logp"])
    np.testing.assert_allclose(want["ratio_max"], ratio[arrays["mask"]].max(), rtol=1e-5)
    kept = np.asarray(arrays["advantages"])[arrays["mask"]] > 0
    ratio = np.asarray(ratio[arrays["mask"]])
    clipped = np.where(kept, ratio > 1.28, ratio < 0.8)
    np.testing.assert_allclose(want["clip_fraction"], clipped.mean(), rtol=1e-5)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="clip_low must be in"):
        PolicyLossConfig(clip_low=1.5)
    with pytest.raises(ValueError, match="dual_clip must be > 1 or None, got 0.5"):
        PolicyLossConfig(dual_clip=0.5)
    with pytest.raises(ValueError, match="needs ref_logp"):
        value_and_grad(example(), PolicyLossConfig(kl_coefficient=0.1))
    with pytest.raises(ValueError, match="needs entropy"):
        value_and_grad(example(), PolicyLossConfig(entropy_coefficient=0.1))
