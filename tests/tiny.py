"""The quickstart, shrunk until a run takes seconds: same code paths, another size.

It is a config file like any other: `python scripts/train.py --config tests/tiny.py:focus ...`.
"""

import ml_collections

from configs import quickstart

METHODS = quickstart.METHODS


def get_config(method: str = "focus") -> ml_collections.ConfigDict:
    """The quickstart's config of `method` with small sizes; what it does is untouched."""
    c = quickstart.get_config(method)
    c.steps = 3
    c.budget = 400
    c.task.update(
        world="fictional",
        num_countries=12,
        hops=(1, 1),
        max_turns=4,
        num_train=12,  # steps play about four tasks each, so runs cross borders of epochs
        num_heldout=8,
    )
    c.model.update(
        vocab_size=512,
        d_model=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        d_ff=64,
        max_context=192,
        scan_unroll=1,
    )
    c.warm_start.update(
        episodes=300,
        worlds=1,
        world="fictional",
        real_fraction=0.8,
        steps=200,  # enough to solve half of the tasks: without luck there is nothing to credit
        batch_rows=8,
        row_length=192,
        learning_rate=4e-3,
    )
    c.rollout.update(
        devices=1,
        max_running=8,
        retained=24,
        cache_buckets=(96, 192),
        batch_buckets=(8,),
        max_turn_tokens=16,
        max_summary_tokens=12,
        episode_tokens=20,
        group_size=min(c.rollout.group_size, 2),
    )
    c.context.limit = 40
    if method == "self_credit":
        # Summaries of spans of two turns, in a format that a policy of this size can learn.
        c.context.update(limit=56, citations=(1, 5))
        c.warm_start.steps = 600
        c.rollout.update(max_summary_tokens=32, group_size=4)
    c.critic.update(capacity=512, evidence_bucket=256, pretrain_episodes=100, pretrain_epochs=2)
    c.learner.update(micro_rows=4, row_length=192, row_buckets=(32, 64, 128, 256), state_bucket=64)
    c.evaluate.update(every=3, num_tasks=8)
    c.checkpoint.every = 1
    return c
