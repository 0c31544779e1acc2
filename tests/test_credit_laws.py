"""Laws that tie estimators to one another, on random ragged batches with every channel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from credit_batches import full_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.credit import estimate, primitives

LAW = settings(deadline=None, max_examples=8)
SEEDS = st.integers(0, 2**31)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(name, hparams, batch):
    return estimate(name, batch, **dict(hparams))


def run(name, batch, **hparams):
    """`estimate`, compiled once per name and setting."""
    return _run(name, tuple(sorted(hparams.items())), batch)


def with_channels(batch, **channels):
    channels = {
        k: jnp.asarray(v, getattr(batch, k).dtype if getattr(batch, k) is not None else None)
        for k, v in channels.items()
    }
    return dataclasses.replace(batch, **channels)


def close(got, expected, atol=2e-5):
    np.testing.assert_allclose(got, expected, atol=atol)


def unique_keys(batch):
    return jnp.arange(batch.segment_mask.size, dtype=jnp.int32).reshape(batch.segment_mask.shape)


def at_segment_ends(batch):
    """`token_value` at the last token of each segment, as `value` [B, S + 1]."""
    read = primitives.at_last_token(
        batch.token_value, batch.token_segment, batch.token_mask, batch.segment_mask.shape[1]
    )
    return jnp.pad(read, ((0, 0), (0, 1)))


# Each is another way to write the first estimator: (name, hparams), (name, hparams), channels.
REDUCTIONS = {
    "gigpo without repeated states": (
        ("gigpo", {}), ("grpo", {}), lambda b: {"state_key": unique_keys(b)},
    ),
    "g2po without repeated states": (
        ("g2po", {}), ("grpo", {}), lambda b: {"state_key": unique_keys(b)},
    ),
    "tempo without shared prefixes": (
        ("tempo", {}), ("grpo", {"ddof": 0}),
        lambda b: {"prefix_key": jnp.arange(b.prefix_key.size).reshape(b.prefix_key.shape)},
    ),
    "tigpo without a graph or revisits": (
        ("tigpo", {}), ("grpo", {}),
        lambda b: {"dist_goal": jnp.full_like(b.dist_goal, jnp.inf),
                   "is_revisit": jnp.zeros_like(b.is_revisit)},
    ),
    "grpo_lambda without traces or floor": (
        ("grpo_lambda", {"lambda_": 0.0, "negative_floor": -1e9}), ("grpo", {}), None,
    ),
    "spro without log-ratios": (("spro", {"beta": 0.0}), ("grpo", {}), None),
    "critic_search without the judge": (
        ("critic_search", {"weight": 0.0}), ("grpo", {}), None,
    ),
    "swe_trace without the rubric": (("swe_trace", {"outcome_weight": 1.0}), ("grpo", {}), None),
    "cvt_rl without interventions": (("cvt_rl", {"weight": 0.0}), ("grpo", {}), None),
    "cbpo without branches": (
        ("cbpo", {}), ("grpo", {"ddof": 0}),
        lambda b: {"parent_traj": jnp.full_like(b.parent_traj, -1),
                   "fork_segment": jnp.full_like(b.fork_segment, -1),
                   "copied": jnp.zeros_like(b.copied)},
    ),
    "pivoarl without retries": (
        ("pivoarl", {}), ("dr_grpo", {}),
        lambda b: {"parent_traj": jnp.full_like(b.parent_traj, -1),
                   "fork_segment": jnp.full_like(b.fork_segment, -1),
                   "copied": jnp.zeros_like(b.copied)},
    ),
    "iapo without edges": (("iapo", {}), ("grpo", {}), lambda b: {"edge": jnp.zeros_like(b.edge)}),
    "self_credit without citations": (
        ("self_credit", {}), ("grpo", {}),
        lambda b: {"cited": jnp.zeros_like(b.cited), "is_answer": jnp.zeros_like(b.is_answer)},
    ),
    "dapo with flat groups and any length": (
        ("dapo", {"drop_flat_groups": False}), ("grpo", {}), None,
    ),
    "hygae of tokens alone": (
        ("hygae", {"weight": 0.0}), ("ppo_token", {"whiten": False}), None,
    ),
    "hygae of segments alone": (
        ("hygae", {"weight": 1.0}), ("ppo", {}), lambda b: {"value": at_segment_ends(b)},
    ),
    "ppo_token without values": (
        ("ppo_token", {"lambda_": 1.0, "whiten": False}), ("reinforce_pp", {"whiten": False}),
        lambda b: {"token_value": jnp.zeros_like(b.token_value)},
    ),
    "sapo with the critic's values": (
        ("sapo_2608_19842", {"whiten": False}), ("ppo", {}), None,
    ),
    "spo_chain cut at every state": (
        ("spo_chain", {"prob_threshold": 1.0}), ("vineppo", {}),
        lambda b: {"mc_mask": jnp.ones_like(b.mc_mask),
                   "cut": jnp.broadcast_to(jnp.arange(b.segment_mask.shape[1]) * 2,
                                           b.segment_mask.shape),
                   "cut_value": b.mc_return.mean(axis=2), "cut_mask": b.segment_mask},
    ),
}  # fmt: skip


@pytest.mark.parametrize("law", REDUCTIONS)
def test_one_estimator_is_a_limit_of_another(law):
    (name, hparams), (other, others), channels = REDUCTIONS[law]
    for seed in range(3):
        batch = full_batch(seed)
        if channels is not None:
            batch = with_channels(batch, **channels(batch))
        close(run(name, batch, **hparams).advantages, run(other, batch, **others).advantages)


@LAW
@given(SEEDS)
def test_proxmo_with_a_hard_kernel_and_no_weights_is_gigpo(seed):
    batch = full_batch(seed)
    key = jnp.where(batch.segment_mask, batch.state_key, -1).ravel()
    batch = with_channels(batch, sim=(key[:, None] == key) * 1.0)
    got = run("proxmo", batch, weight_range=0.0, temperature=1e-3)
    close(got.advantages, run("gigpo", batch, mode="mean_norm").advantages, atol=1e-4)


@LAW
@given(SEEDS)
def test_differences_of_potentials_telescope(seed):
    batch = full_batch(seed)
    pgpo = run("pgpo", batch, discount=1.0)
    close(pgpo.aux["delta"].sum(1), batch.outcome - pgpo.aux["potential"][:, 0])
    scar = run("scar", batch)
    close(scar.aux["shapley"].sum(1), batch.coalition[:, -1] - batch.coalition[:, 0])
    prm = run("agent_prm", batch, lambda_=1.0).segment_advantages
    close(prm, jnp.where(batch.segment_mask, batch.outcome[:, None] - batch.q, 0.0))
    tree = run("spo_tree", batch, drop_zero=False)
    leaf = tree.aux["node_value"][6:]
    close(tree.segment_advantages[:, 0] + jnp.where(batch.segment_mask[:, 1],
          tree.segment_advantages[:, 1], leaf - tree.aux["node_value"][batch.parent[6:]]),
          leaf - tree.aux["node_value"][batch.group_id // 1000])  # fmt: skip


@LAW
@given(SEEDS)
def test_the_last_token_of_a_segment_carries_the_segments_own_advantage(seed):
    batch = full_batch(seed)
    got = run("bilevel_gae", batch, whiten=False).advantages
    turn = run("ppo", with_channels(batch, value=at_segment_ends(batch)), discount=0.95)
    last = primitives.at_last_token(got, batch.token_segment, batch.token_mask, 4)
    close(jnp.where(batch.segment_mask, last, 0.0), turn.segment_advantages)


@LAW
@given(SEEDS)
def test_sums_over_a_group_or_a_state_are_zero(seed):
    batch = full_batch(seed)

    def per(key, advantages):
        return [
            float(jnp.sum(jnp.where((key == k) & batch.segment_mask, advantages, 0.0)))
            for k in np.unique(key)
        ]

    group = jnp.broadcast_to(batch.group_id[:, None], batch.segment_mask.shape)
    for name in ("hpo", "vis_critic", "gagpo"):
        close(per(group, run(name, batch).segment_advantages), 0.0, atol=1e-4)
    close(per(group * 10 + batch.state_key, run("pro_cua", batch).segment_advantages), 0, atol=1e-4)
    close(run("at2po", batch, backup="leaf_mean").aux["node_value"][:2], 0.0)


@LAW
@given(SEEDS)
def test_weights_keep_signs_and_the_token_total(seed):
    batch = full_batch(seed)
    plain = run("grpo", batch).advantages
    for name, hparams in (("iapo", {}), ("self_credit", {"conserve": True})):
        got = run(name, batch, **hparams).advantages
        close(got.sum(1), plain.sum(1), atol=1e-4)
        np.testing.assert_array_equal(np.sign(got), np.sign(plain))
    np.testing.assert_array_equal(np.sign(run("self_credit", batch).advantages), np.sign(plain))


@LAW
@given(SEEDS)
def test_corrections_are_bounded(seed):
    batch = full_batch(seed)
    batch = with_channels(batch, copied=jnp.zeros_like(batch.copied))
    assert float(jnp.max(jnp.abs(run("a3", batch, bound=1.1).advantages))) <= 1.1 + 1e-6
    base = run("grpo", batch, ddof=0).advantages
    # Branches carry their own corrected advantage alone.
    own = batch.parent_traj >= 0
    got = run("cbpo", batch)
    change = jnp.where(own[:, None] & got.mask, got.advantages - base, 0.0)
    assert bool(jnp.all(jnp.abs(change) <= 0.2 * jnp.abs(base) / 2 + 1e-5))
    still = run("cbpo", batch, eta=0.0)
    close(jnp.where(own[:, None] & still.mask, still.advantages - base, 0.0), 0.0)


@LAW
@given(SEEDS)
def test_evaluators_without_an_opinion_say_nothing(seed):
    batch = full_batch(seed)
    even = with_channels(batch, teacher_logp=batch.behaviour_logp + 0.3)
    close(run("craft", even).advantages, 0.0)
    agreed = with_channels(batch, priv_logp=batch.ref_logp)
    close(run("sweet_rl", agreed).advantages, 0.0)
    neither = with_channels(
        batch, is_call=jnp.zeros_like(batch.is_call), is_answer=jnp.zeros_like(batch.is_answer)
    )
    close(run("taco", neither).advantages, 0.0)
    coin = with_channels(batch, expert_score=jnp.full_like(batch.expert_score, 0.5))
    expected = jnp.where(batch.segment_mask, batch.outcome[:, None], 0.0)
    close(run("step_agent", coin, form="irl").segment_advantages, expected)


@LAW
@given(SEEDS)
def test_pure_lies_between_the_mean_and_the_minimum(seed):
    batch = full_batch(seed)
    plain = {"baseline": "none", "outcome_coef": 0.0}
    mask, score = np.asarray(batch.segment_mask), np.asarray(batch.score)
    lowest = np.where(mask, score, np.inf).min(1)
    mean = np.where(mask, score, 0).sum(1) / mask.sum(1)
    for hparams, expected in (
        ({"temperature": 1e6}, mean),
        ({"temperature": 1e-4}, lowest),
        ({"form": "min"}, lowest),
    ):
        close(run("pure", batch, **plain, **hparams).segment_advantages[:, 0], expected, atol=1e-4)


@LAW
@given(SEEDS)
def test_lengths_that_agree_leave_opo_nothing_to_weigh(seed):
    batch = full_batch(seed)
    rows, tokens = batch.token_mask.shape
    even = with_channels(
        batch,
        segment_mask=jnp.ones_like(batch.segment_mask),
        token_mask=jnp.ones_like(batch.token_mask),
        token_segment=jnp.broadcast_to(jnp.arange(tokens) // 2, (rows, tokens)),
    )
    close(run("opo", even).advantages, run("dr_grpo", even).advantages)
