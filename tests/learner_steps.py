"""What the learner does with random rollouts, for tests that compare meshes and processes."""

import dataclasses

import jax
import numpy as np
from random_trajectories import make_forest

from focus.learner import sharding
from focus.learner.batches import credit_batch
from focus.learner.critic_evidence import make_evidence
from focus.learner.packing import pack_trajectories


def named(tree):
    """Arrays by their path."""
    return {sharding.path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def forest(seed=0, bases=6, branches=6):
    """Rollouts with ids of their own, that end well or badly by their first token."""

    def renamed(name):
        return name and f"{seed}-{name}"

    return [
        dataclasses.replace(
            t,
            id=renamed(t.id),
            parent=renamed(t.parent),
            outcome=float(t.states[0].prompt_ids[0] % 2),
        )
        for t in make_forest(seed, bases, branches)
    ]


def pack(trajectories, *, rows_multiple=2, share_prefixes=True):
    return pack_trajectories(
        trajectories,
        row_length=32,
        max_nodes=6,
        max_states=12,
        rows_multiple=rows_multiple,
        share_prefixes=share_prefixes,
    )


def evidence_of(trajectories, hidden, mean=None, *, size=128):
    """What outcomes and branches say of states whose hidden states are [B, S + 1, H]."""
    rows, states = hidden.shape[:2]
    batch = credit_batch(
        trajectories, num_segments=states - 1, num_tokens=64, num_rows=rows, num_continuations=8
    )
    return make_evidence(
        trajectories,
        batch,
        hidden,
        np.zeros((rows, states), np.float32) if mean is None else mean,
        size=size,
        num_folds=1,
        truncation="bootstrap",
        discount=1.0,
        lambda_=1.0,
    )


def born(critic, mesh, params):
    """A critic's first state, every array made in its place."""
    key = jax.random.key(1)
    shapes = jax.eval_shape(critic.init, key, params)
    places = sharding.shardings_of({"critic": shapes}, mesh)["critic"]
    return jax.jit(critic.init, out_shardings=places)(key, params)
