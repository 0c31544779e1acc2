"""Batches with every channel filled, for tests that run all estimators of the registry."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from focus.credit import ESTIMATORS
from focus.types import CreditBatch

NAMES = tuple(name for name, spec in ESTIMATORS.items() if spec.kind == "estimator")

# Channels by what their padding is: absent segments, states, tokens.
SEGMENT_FLOATS = ("segment_reward", "score", "q", "q2", "expert_score", "segment_entropy",
                  "probe_delta", "dist_goal", "mc_return", "do_return", "emb",
                  "propensity", "m1", "m0")  # fmt: skip
SEGMENT_INTS = ("state_key", "next_state_key", "action_key", "match_class", "intent", "cluster",
                "node_of_segment")  # fmt: skip
SEGMENT_BOOLS = ("valid", "is_call", "is_answer", "is_summary", "cited", "mc_mask", "do_mask",
                 "do_valid")  # fmt: skip
STATE_FLOATS = ("value", "value_variance", "v2")
TOKEN_FLOATS = ("behaviour_logp", "ref_logp", "teacher_logp", "priv_logp", "entropy", "token_value")


def full_batch(seed, rows=8, width=4, per_segment=2, num_groups=2) -> CreditBatch:
    """Ragged rows with all channels; what stands in the padding is 0, False or -1."""
    rng = np.random.default_rng(seed)

    def uniform(*shape):
        return rng.uniform(0.05, 0.95, shape).astype(np.float32)

    def ids(high, *shape):
        return rng.integers(0, high, shape).astype(np.int32)

    def flags(*shape):
        return rng.uniform(size=shape) < 0.6

    segments = rng.integers(1, width + 1, rows)
    segment_mask = np.arange(width) < segments[:, None]
    token_segment = np.repeat(np.where(segment_mask, np.arange(width), -1), per_segment, axis=1)
    token_segment = token_segment.astype(np.int32)
    tokens = token_segment.shape[1]
    # A root for each group, two nodes below it, a leaf for each row.
    group = np.arange(rows) % num_groups
    middle = num_groups + 2 * group + np.arange(rows) // num_groups % 2
    first_leaf = 3 * num_groups
    parent = np.concatenate([[-1] * num_groups, np.arange(2 * num_groups) // 2, middle])
    node = np.where(np.arange(width) == 0, middle[:, None], first_leaf + np.arange(rows)[:, None])
    fork = np.arange(rows) >= 2 * num_groups
    outcome = ids(2, rows).astype(np.float32)
    near = uniform(rows * width, rows * width)
    batch = CreditBatch(
        group_id=(group * 1000).astype(np.int32),
        outcome=outcome,
        success=outcome == 1,
        row_mask=np.ones(rows, bool),
        segment_mask=segment_mask,
        segment_reward=np.zeros((rows, width), np.float32),
        token_segment=token_segment,
        token_mask=token_segment >= 0,
        behaviour_logp=-uniform(rows, tokens),
        truncated=np.zeros(rows, bool),
        value=uniform(rows, width + 1),
        value_variance=uniform(rows, width + 1) / 10,
        mc_return=ids(2, rows, width, 3).astype(np.float32),
        mc_mask=flags(rows, width, 3),
        ref_logp=-uniform(rows, tokens),
        teacher_logp=-uniform(rows, tokens),
        priv_logp=-uniform(rows, tokens),
        entropy=uniform(rows, tokens),
        token_value=uniform(rows, tokens),
        copied=fork[:, None] & (token_segment == 0),
        segment_id=token_segment // 2,
        prefix_key=np.cumsum(ids(2, rows, tokens + 1), axis=1, dtype=np.int32)
        + 100 * group[:, None].astype(np.int32),
        score=uniform(rows, width),
        valid=flags(rows, width),
        q=uniform(rows, width),
        q2=uniform(rows, width),
        v2=uniform(rows, width + 1),
        expert_score=uniform(rows, width),
        segment_entropy=uniform(rows, width),
        is_call=np.arange(width) < segments[:, None] - 1,
        is_answer=np.arange(width) == segments[:, None] - 1,
        is_summary=np.zeros((rows, width), bool),
        summary_mask=np.zeros((rows, tokens), bool),
        probe_delta=uniform(rows, width) - 0.5,
        cited=flags(rows, width),
        dist_goal=np.where(flags(rows, width), ids(4, rows, width), np.inf).astype(np.float32),
        state_key=ids(3, rows, width),
        next_state_key=ids(3, rows, width),
        action_key=ids(2, rows, width),
        match_class=ids(3, rows, width),
        intent=ids(3, rows, width),
        cluster=ids(2, rows, width, 2),
        edge=rng.integers(0, 3, (rows, width, width)).astype(np.int8),
        sim=(near + near.T) / 2,
        emb=uniform(rows, width, 3),
        match=np.eye(rows * width, dtype=bool),
        do_return=ids(2, rows, width, 2, 3).astype(np.float32),
        do_mask=flags(rows, width, 2, 3),
        do_valid=flags(rows, width, 2),
        propensity=uniform(rows, width, 2),
        m1=uniform(rows, width, 2),
        m0=uniform(rows, width, 2),
        parent=parent.astype(np.int32),
        leaf_traj=np.where(np.arange(len(parent)) < first_leaf, -1,
                           np.arange(len(parent)) - first_leaf).astype(np.int32),
        node_entropy=uniform(len(parent)),
        tree_id=np.concatenate([np.arange(num_groups), np.arange(2 * num_groups) // 2, group])
        .astype(np.int32),
        node_of_segment=node.astype(np.int32),
        parent_traj=np.where(fork, group, -1).astype(np.int32),
        fork_segment=np.where(fork, 1, -1).astype(np.int32),
        fork_token=np.where(fork, per_segment, -1).astype(np.int32),
        pivot_segment=np.zeros(rows, np.int32),
        coalition=uniform(rows, 2 ** ((width + 1) // 2)),
        cut=np.tile(np.arange(0, tokens, 2, dtype=np.int32), (rows, 1)),
        cut_value=uniform(rows, (tokens + 1) // 2),
        cut_mask=flags(rows, (tokens + 1) // 2),
        hist_score=ids(2, 5).astype(np.float32),
        hist_group=np.array([0, 0, 1000, 1000, -1], np.int32),
        is_revisit=flags(rows),
        progress=np.float32(0.25),
    )  # fmt: skip
    return jax.tree.map(jnp.asarray, fill_padding(batch, 0.0, -1, False))


def fill_padding(batch: CreditBatch, number, integer, flag) -> CreditBatch:
    """The batch with `number`, `integer` and `flag` wherever nothing is to be read."""
    rows, width = batch.segment_mask.shape
    segments = np.asarray(batch.segment_mask & batch.row_mask[:, None])
    tokens = np.asarray(batch.token_mask & batch.row_mask[:, None])
    # A row ends in the state after its last segment.
    states = np.arange(width + 1) <= np.where(segments, np.arange(1, width + 1), 0).max(1)[:, None]
    states &= np.asarray(batch.row_mask)[:, None]

    def fill(names, kept, value):
        filled = {}
        for name in names:
            x = np.asarray(getattr(batch, name))
            there = kept.reshape(kept.shape + (1,) * (x.ndim - kept.ndim))
            filled[name] = np.where(there, x, np.asarray(value).astype(x.dtype))
        return filled

    flat = segments.ravel()
    pairs = flat[:, None] & flat
    changes = {
        **fill(SEGMENT_FLOATS, segments, number),
        **fill(SEGMENT_INTS, segments, integer),
        **fill(SEGMENT_BOOLS, segments, flag),
        **fill(STATE_FLOATS, states, number),
        **fill(TOKEN_FLOATS, tokens, number),
        **fill(("summary_mask",), tokens, flag),
        **fill(("outcome",), np.asarray(batch.row_mask), number),
        **fill(("coalition", "cut_value"), np.asarray(batch.row_mask), number),
        **fill(("sim",), pairs, number),
        **fill(("match",), pairs, flag),
        **fill(("hist_score",), np.asarray(batch.hist_group >= 0), number),
        **fill(("edge",), segments[:, :, None] & segments[:, None, :], 1 if flag else 0),
    }
    # Continuations that were not sampled, cut points without a value.
    for values, mask in (("mc_return", "mc_mask"), ("do_return", "do_mask")):
        kept = np.asarray(getattr(batch, mask)) & segments.reshape(
            rows, width, *[1] * (getattr(batch, mask).ndim - 2)
        )
        changes[mask] = kept
        changes[values] = np.where(kept, changes[values], number).astype(np.float32)
    changes["cut_value"] = np.where(batch.cut_mask, changes["cut_value"], number)
    return dataclasses.replace(
        batch, **{k: v.astype(np.asarray(getattr(batch, k)).dtype) for k, v in changes.items()}
    )
