"""Primitives against slow loops on ragged arrays with NaN under the masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.credit import primitives

PROPERTY = settings(deadline=None, max_examples=15)
SEEDS = st.integers(0, 2**31)


def ragged(seed, shape=(3, 6)):
    rng = np.random.default_rng(seed)
    mask = rng.uniform(size=shape) < 0.7
    x, v = rng.normal(size=(2, *shape)).astype(np.float32)
    key = rng.choice([-1, 0, 3, 10**6], size=shape).astype(np.int32)
    return rng, mask, np.where(mask, x, np.nan), np.where(mask, v, np.nan), key


@PROPERTY
@given(SEEDS)
def test_masked_gae_equals_a_loop_over_what_is_there(seed):
    rng, mask, r, v, _ = ragged(seed)
    reset = rng.uniform(size=mask.shape) < 0.3
    got = primitives.masked_gae(v, r, mask, discount=0.9, lambda_=0.8, reset=reset)
    to_go = primitives.reward_to_go(r, mask, discount=0.9)
    want, want_to_go = np.zeros_like(mask, float), np.zeros_like(mask, float)
    for row in range(len(mask)):
        after, carry, total = 0.0, 0.0, 0.0
        for t in np.flatnonzero(mask[row])[::-1]:
            if reset[row, t]:
                after, carry = 0.0, 0.0
            carry = r[row, t] + 0.9 * after - v[row, t] + 0.72 * carry
            total = r[row, t] + 0.9 * total
            after, want[row, t], want_to_go[row, t] = v[row, t], carry, total
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(to_go, want_to_go, atol=1e-5)


@PROPERTY
@given(SEEDS)
def test_medians_and_values_by_key_equal_a_loop(seed):
    _, mask, x, _, key = ragged(seed)
    median, mad = primitives.group_median(x, key, mask), primitives.group_mad(x, key, mask)
    value, known = primitives.lookup_by_key(key, x, key, mask)

    def lower(y):
        return np.sort(y)[(len(y) - 1) // 2]

    for at in np.ndindex(x.shape):
        members = x[mask & (key == key[at])] if key[at] >= 0 else []
        assert bool(known[at]) == (len(members) > 0)
        if len(members):
            np.testing.assert_allclose(value[at], members.mean(), atol=1e-5)
        if len(members) and mask[at]:
            np.testing.assert_allclose(median[at], lower(members), atol=1e-6)
            np.testing.assert_allclose(mad[at], lower(abs(members - lower(members))), atol=1e-6)
        else:
            assert median[at] == mad[at] == 0


def test_tree_backup_rules():
    parent, leaf = jnp.array([-1, 0, 0, 1, 1, 2]), jnp.arange(6) >= 3
    value = jnp.array([jnp.nan, jnp.nan, jnp.nan, 1.0, 0.0, 0.0])
    entropy = jnp.array([0.0, 0, 0, jnp.log(3.0), 0, 0])
    for rule, want in (
        ("child_mean", [0.25, 0.5, 0]),
        ("leaf_mean", [1 / 3, 0.5, 0]),
        ("child_softmax", [0.375, 0.75, 0]),
    ):
        got, known = primitives.tree_backup(value, leaf, parent, rule=rule, entropy=entropy)
        np.testing.assert_allclose(got[:3], want, atol=1e-6)
        assert known.all()


def test_kernel_baseline_worked_numbers():
    sim = jnp.array([[1, 0.9, 0], [0.9, 1, 0], [0, 0, 1]])
    got = primitives.kernel_baseline(
        jnp.array([1, 0, 0.5]),
        sim.__getitem__,
        jnp.zeros(3, int),
        jnp.ones(3, bool),
        temperature=0.1,
    )
    np.testing.assert_allclose(got, [0.268949, -0.268949, 0], atol=2e-5)


def test_softmin_reweight_and_squash():
    weights = primitives.softmin_weights(
        jnp.array([0.8, -0.6, 0.4]), jnp.ones(3, bool), temperature=0.1
    )
    np.testing.assert_allclose(weights, [1e-6, 0.999954, 4.5e-5], atol=1e-6)
    count, mask = jnp.array([2, 4, 2]), jnp.ones(3, bool)
    got = primitives.reweight(jnp.ones(3), jnp.array([2.0, 1, 1]), count, mask, conserve=True)
    np.testing.assert_allclose(got, [1.6, 0.8, 0.8], atol=1e-6)
    assert abs(float(primitives.squash(jnp.float32(99), 1.1)) - 1.1) < 1e-6


def test_gradients_of_the_recurrence_stay_finite_under_the_mask():
    mask = jnp.array([True, False, True])

    def total(r):
        return primitives.reward_to_go(r, mask, discount=0.5).sum()

    grad = jax.grad(total)(jnp.array([1, jnp.nan, 2]))
    np.testing.assert_allclose(grad, [1, 0, 1.5])


@PROPERTY
@given(SEEDS)
def test_joint_keys_and_means_of_others_equal_a_loop(seed):
    rng, mask, x, _, key = ragged(seed)
    other = rng.choice([-1, 4, 7], size=key.shape).astype(np.int32)
    joint = np.asarray(primitives.joint_key(key, other))
    for a in np.ndindex(key.shape):
        assert (joint[a] < 0) == (key[a] < 0 or other[a] < 0)
        assert joint[a] < key.size
        for b in np.ndindex(key.shape):
            same = key[a] == key[b] and other[a] == other[b]
            assert joint[a] < 0 or joint[b] < 0 or (joint[a] == joint[b]) == same
    got = primitives.mean_of_others(x, key, mask)
    for at in np.ndindex(key.shape):
        others = mask & (key == key[at])
        others[at] = False
        alone = key[at] < 0 or not mask[at] or not others.any()
        np.testing.assert_allclose(got[at], 0 if alone else x[others].mean(), atol=1e-5)


@PROPERTY
@given(SEEDS, st.sampled_from(["child_mean", "leaf_mean", "child_softmax"]))
def test_tree_backup_equals_a_recursion(seed, rule):
    rng = np.random.default_rng(seed)
    size = 12
    parent = np.array([-1, *(rng.integers(-1, i) for i in range(1, size))], np.int32)
    children = [np.flatnonzero(parent == i) for i in range(size)]
    leaf = np.array([not len(c) for c in children]) & (rng.uniform(size=size) < 0.8)
    value = np.where(leaf, rng.normal(size=size), np.nan).astype(np.float32)
    entropy = rng.uniform(size=size).astype(np.float32)

    def leaves(node):
        return [value[node]] if leaf[node] else [v for c in children[node] for v in leaves(c)]

    def slow(node):
        below = [c for c in children[node] if leaves(c)]
        if leaf[node] or not below:
            return value[node] if leaf[node] else 0.0
        if rule == "leaf_mean":
            return np.mean(leaves(node))
        weight = np.exp(entropy[below]) if rule == "child_softmax" else np.ones(len(below))
        return np.average([slow(c) for c in below], weights=weight)

    got, known = primitives.tree_backup(value, leaf, parent, rule=rule, entropy=entropy)
    np.testing.assert_allclose(got, [slow(i) for i in range(size)], atol=1e-5)
    np.testing.assert_array_equal(known, [bool(leaves(i)) for i in range(size)])


@PROPERTY
@given(SEEDS)
def test_kernel_baseline_equals_a_loop(seed):
    rng, mask, x, _, key = (y[0] if i else y for i, y in enumerate(ragged(seed, (1, 9))))
    sim = rng.uniform(size=(9, 9)).astype(np.float32)
    got = primitives.kernel_baseline(x, jnp.asarray(sim).__getitem__, key, mask, temperature=0.5)
    for i in range(9):
        peers = np.flatnonzero(mask & (key == key[i]))
        if not mask[i] or key[i] < 0:
            assert got[i] == 0
            continue
        weight = np.exp(sim[i, peers] / 0.5)
        np.testing.assert_allclose(got[i], x[i] - weight @ x[peers] / weight.sum(), atol=1e-5)


@PROPERTY
@given(SEEDS)
def test_tokens_and_segments_equal_a_loop(seed):
    rng = np.random.default_rng(seed)
    segment = np.sort(rng.integers(-1, 4, (3, 8)), axis=1).astype(np.int32)
    mask = (segment >= 0) & (rng.uniform(size=segment.shape) < 0.7)
    x = np.where(mask, rng.normal(size=segment.shape), np.nan).astype(np.float32)
    values, exists = rng.normal(size=(3, 4)).astype(np.float32), rng.uniform(size=(3, 4)) < 0.7
    total = primitives.reduce_by_segment(x, segment, mask, 4)
    mean = primitives.reduce_by_segment(x, segment, mask, 4, rule="mean")
    last = primitives.last_token(segment, mask, 4)
    read = primitives.at_last_token(x, segment, mask, 4)
    spread = primitives.broadcast_to_tokens(values, segment)
    put = primitives.put_on_last_token(values, exists, segment, mask)
    ends = primitives.last_segment(exists)
    want_put = np.zeros(segment.shape)
    for row, j in np.ndindex(3, 4):
        inside = np.flatnonzero(mask[row] & (segment[row] == j))
        before = np.flatnonzero(mask[row] & (segment[row] <= j))
        np.testing.assert_allclose(total[row, j], x[row, inside].sum(), atol=1e-5)
        np.testing.assert_allclose(mean[row, j], x[row, inside].mean() if len(inside) else 0,
                                   atol=1e-5)  # fmt: skip
        assert last[row, j] == (before[-1] if len(before) else -1)
        np.testing.assert_allclose(read[row, j], x[row, before[-1]] if len(before) else 0)
        assert ends[row, j] == (exists[row, j] and not exists[row, j + 1 :].any())
        if exists[row, j] and len(before):
            want_put[row, before[-1]] += values[row, j]
    np.testing.assert_allclose(put, want_put, atol=1e-5)
    for row, t in np.ndindex(segment.shape):
        assert spread[row, t] == (values[row, segment[row, t]] if segment[row, t] >= 0 else 0)


@PROPERTY
@given(SEEDS)
def test_shaping_equals_a_loop(seed):
    rng, mask, x, weight, _ = ragged(seed)
    weight, count = np.where(mask, np.abs(weight), np.nan), rng.integers(1, 5, mask.shape)
    soft = primitives.softmin_weights(x, mask, temperature=0.3)
    kept = primitives.reweight(x, weight, count, mask, conserve=True)
    free = primitives.reweight(x, weight, count, mask)
    following = primitives.next_value(x, mask)
    for row in range(len(mask)):
        there = np.flatnonzero(mask[row])
        e, n, w = np.exp(-x[row, there] / 0.3), count[row, there], weight[row, there]
        np.testing.assert_allclose(soft[row, there], e / e.sum(), atol=1e-5)
        np.testing.assert_allclose(free[row, there], x[row, there] * w, atol=1e-5)
        scale = n.sum() / (n * w).sum() if len(there) else 0
        np.testing.assert_allclose(kept[row, there], x[row, there] * w * scale, atol=1e-4)
        for t in range(mask.shape[1]):
            later = there[there > t]
            assert following[row, t] == (x[row, later[0]] if len(later) else 0)
    for y in (soft, kept, free):
        assert not np.any(np.asarray(y)[~mask])
    mixed = (
        primitives.mix(jnp.float32(1), jnp.float32(3), 0.25),
        primitives.mix(jnp.float32(1), jnp.float32(3), 0.25, rule="add"),
    )
    np.testing.assert_allclose(mixed, [1.5, 1.75])


@PROPERTY
@given(SEEDS)
def test_gae_and_lambda_returns_agree_with_rlax(seed):
    rlax = pytest.importorskip(
        "rlax", reason="a second opinion, in the dev extra", exc_type=ImportError
    )
    from focus.credit import td

    rng = np.random.default_rng(seed)
    r, v, discount, lambda_ = rng.uniform(size=(4, 6)).astype(np.float32)
    v_t = np.append(v[1:], np.float32(0.3))
    expected = rlax.lambda_returns(r, discount, v_t, lambda_)
    np.testing.assert_allclose(td.td_lambda_returns(r, discount, v_t, lambda_), expected, atol=1e-5)
    expected = rlax.truncated_generalized_advantage_estimation(r, discount, 0.7, np.append(v, 0.3))
    got = td.td_lambda_advantages(v, r, discount, v_t, 0.7)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    ended = discount.copy()
    ended[-1] = 0.0
    expected = rlax.truncated_generalized_advantage_estimation(r, ended, 0.7, np.append(v, 0.3))
    got = primitives.masked_gae(v, r, np.ones(6, bool), discount=discount, lambda_=0.7)
    np.testing.assert_allclose(got, expected, atol=1e-5)
