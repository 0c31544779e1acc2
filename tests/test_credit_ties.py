"""Exact ties are worth exactly nothing, whatever rounding does and in whatever units rewards are.

A comparison that rounding decides differs by a unit in the last place. Divided by its own spread
that would be an advantage of 1, and a token that is kept for nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from credit_batches import NAMES, full_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.credit import estimate, primitives


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(name, hparams, batch):
    return estimate(name, batch, **dict(hparams))


def run(name, batch, **hparams):
    """`estimate`, compiled once per name and setting."""
    return _run(name, tuple(sorted(hparams.items())), batch)


# These sum scores that somebody gave, and compare nothing.
SUMS_SCORES = {"spa_rl", "scar", "step_agent"}
# Where values are those of an undiscounted return, and states are matched exactly.
OPTIONS = {
    "focus": {"discount": 1.0},
    "ppo": {"discount": 1.0},
    "bilevel_gae": {"segment_discount": 1.0},
    "archer": {"discount": 1.0},
    "proxmo": {"temperature": 1e-3},
    "spo_tree": {"scale": "std", "drop_zero": False},
}


def tied_batch(seed, unit):
    """Rows of any length that all end with the same return, and everything that follows from it.

    A state is what is left to do, so that visits of it stand anywhere in a row.
    """
    rng = np.random.default_rng(seed)
    batch = full_batch(seed, width=7)
    number = np.float32(rng.uniform(0.1, 1.0) * unit)
    mask = np.asarray(batch.segment_mask)
    left = np.where(mask, mask[:, ::-1].cumsum(axis=1)[:, ::-1], -1).astype(np.int32)

    def constant(name, value=number):
        x = np.asarray(getattr(batch, name))
        return np.full(x.shape, value, x.dtype)

    channels = {name: constant(name) for name in (
        "outcome", "value", "token_value", "q", "q2", "v2", "mc_return", "do_return", "cut_value",
        "hist_score",
    )} | {name: constant(name, 0) for name in ("score", "probe_delta")}  # fmt: skip
    key = left.ravel()
    channels |= {
        "success": np.full(len(mask), rng.uniform() < 0.5),
        "state_key": left,
        "next_state_key": np.where(mask, left - 1, -1),
        "dist_goal": left.astype(np.float32),
        "sim": (key[:, None] == key).astype(np.float32),
        "ref_logp": batch.behaviour_logp,
        "teacher_logp": batch.behaviour_logp,
        "priv_logp": batch.behaviour_logp,
    }
    return dataclasses.replace(batch, **{k: jnp.asarray(v) for k, v in channels.items()})


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SUMS_SCORES])
def test_what_is_equal_gets_exactly_nothing(name):
    @given(st.integers(0, 2**31), st.floats(-3, 4))
    @settings(deadline=None, max_examples=12)
    def holds(seed, exponent):
        batch = tied_batch(seed, 10.0**exponent)
        advantages = np.asarray(run(name, batch, **OPTIONS.get(name, {})).advantages)
        assert not advantages.any(), np.abs(advantages).max()

    holds()


def tree_batch(leaves, parent):
    """Rows of two segments, one for each leaf of a tree; the first leads to the leaf's parent."""
    leaves, parent = np.asarray(leaves, np.float32), np.asarray(parent, np.int32)
    inner = len(parent) - len(leaves)
    batch = full_batch(0, rows=len(leaves), width=2, num_groups=1)
    two = np.ones((len(leaves), 2), bool)
    at = np.arange(len(parent))
    return dataclasses.replace(
        batch,
        outcome=jnp.asarray(leaves),
        segment_mask=jnp.asarray(two),
        token_segment=jnp.tile(jnp.array([0, 0, 1, 1], jnp.int32), (len(leaves), 1)),
        token_mask=jnp.ones((len(leaves), 4), bool),
        segment_reward=jnp.zeros(two.shape),
        parent=jnp.asarray(parent),
        leaf_traj=jnp.asarray(np.where(at < inner, -1, at - inner), jnp.int32),
        node_of_segment=jnp.asarray(np.stack([parent[inner:], at[inner:]], 1), jnp.int32),
        copied=jnp.zeros((len(leaves), 4), bool),
    )


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize(
    "leaves, parent",
    [
        ([0.1] * 3, [-1, 0, 0, 0]),
        ([1.0] * 11, [-1, 0, 0, *[1] * 10, 2]),
        ([0.7] * 13, [-1, 0, 0, *[1] * 10, *[2] * 3]),
    ],
)
def test_spo_tree_drops_edges_between_equal_values(scale, leaves, parent):
    credit = run("spo_tree", tree_batch(leaves, parent), scale=scale)
    assert not np.any(credit.advantages) and not np.any(credit.mask)


def test_spo_tree_drops_the_edges_of_a_branch_whose_leaves_agree():
    """Leaves of .7 under one node, .3 under its sibling: only the edges to the two are worth."""
    credit = run("spo_tree", tree_batch([0.7] * 3 + [0.3], [-1, 0, 0, 1, 1, 1, 2]), scale="std")
    np.testing.assert_allclose(credit.segment_advantages[:3], [[1, 0]] * 3, rtol=1e-4)
    assert not np.any(credit.segment_advantages[:, 1])
    np.testing.assert_array_equal(credit.mask, [[True, True, False, False]] * 4)


def keyed_batch(outcome, lengths, width=8, **keys):
    """Rows of one group with given lengths; other channels as `full_batch` has them."""
    batch = full_batch(0, rows=len(outcome), width=width, num_groups=1)
    mask = np.arange(width) < np.asarray(lengths)[:, None]
    segment = np.repeat(np.where(mask, np.arange(width), -1), 2, axis=1).astype(np.int32)
    return dataclasses.replace(
        batch,
        outcome=jnp.asarray(outcome, jnp.float32),
        success=jnp.asarray(outcome, jnp.float32) > 0,
        segment_mask=jnp.asarray(mask),
        segment_reward=jnp.zeros(mask.shape),
        token_segment=jnp.asarray(segment),
        token_mask=jnp.asarray(segment >= 0),
        **{name: jnp.asarray(np.where(mask, key, -1), jnp.int32) for name, key in keys.items()},
    )


@pytest.mark.parametrize("name", ["gigpo", "pgpo"])
def test_visits_of_a_state_are_equal_wherever_they_stand_in_a_row(name):
    lengths, position = np.array([6, 7]), np.arange(8)
    shared = position == lengths[:, None] - 6
    own = 100 + 10 * np.arange(2)[:, None] + position
    batch = keyed_batch([10, 10], lengths, state_key=np.where(shared, 1, own))
    assert not np.any(run(name, batch).advantages)


@pytest.mark.parametrize("outcome", [10.0, 100.0, 1e-3])
def test_gagpo_finds_nothing_where_values_explain_the_return(outcome):
    batch = keyed_batch([outcome, outcome], [6, 6], state_key=np.arange(16).reshape(2, 8))
    assert not np.any(run("gagpo", batch).advantages)


def test_g2po_has_one_value_for_one_state():
    batch = keyed_batch(
        [100, 0, 0], [1, 1, 1], state_key=np.zeros((3, 8)), next_state_key=np.zeros((3, 8))
    )
    plain = run("grpo", batch).segment_advantages[:, 0]
    np.testing.assert_array_equal(run("g2po", batch).segment_advantages[:, 0], plain)
    x = np.array([0.3, 0.7, 0.1], np.float32)
    value = primitives.value_by_key(x, np.zeros(3, np.int32), np.ones(3, bool))
    assert len(np.unique(value)) == 1
    np.testing.assert_allclose(value, x.mean(), rtol=1e-6)


def test_cbpo_does_not_standardise_the_rounding_of_equal_spreads():
    outcome = np.array([0, 0, 100, 100, 100, 0, 0, 100], np.float32)
    parent = np.array([-1, -1, -1, -1, 0, 1, 2, 3], np.int32)
    batch = full_batch(0, num_groups=1)
    batch = dataclasses.replace(
        batch,
        outcome=jnp.asarray(outcome),
        parent_traj=jnp.asarray(parent),
        fork_segment=jnp.asarray(np.where(parent < 0, -1, 1), jnp.int32),
    )
    forks = (parent == 0) | (parent == 2)  # those whose outcome differs from their parent's
    batch = dataclasses.replace(batch, parent_traj=jnp.where(jnp.asarray(forks), parent, -1))
    np.testing.assert_array_equal(run("cbpo", batch).aux["z"], 0.0)


def test_differences_that_are_more_than_rounding_stay():
    """A millionth of what is subtracted is still a difference."""
    zeros, kept = np.zeros(3, np.int32), np.ones(3, bool)
    x = np.array([1.0, 1.0, 1.0 + 4e-6], np.float32)
    got = primitives.group_normalise(x, zeros, kept, eps=0.0)
    np.testing.assert_allclose(got, [-0.57735, -0.57735, 1.154701], rtol=0.1)
    assert not np.any(primitives.group_normalise(x, zeros, kept, size=np.full(3, 1e4)))
