"""The laboratory's loop: what a step plays and pays for, what it learns from, and laws of runs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from focus.branching.budget import Ledger
from focus.credit import estimate
from focus.lab import critic, exact
from focus.lab.arms import ARMS, Arm
from focus.lab.loop import (
    collect_rollouts,
    core_batch,
    credit_batch,
    gradient,
    init_learner,
    learn_from,
    make_run,
    policy_of,
    sizes_of,
    train_step,
)
from focus.lab.play import play
from focus.lab.worlds import make_world

WORLDS = {
    "chain": ("fork_chain", dict(tasks=6, length=6, forks=2, rows=5, actions=3, p0=0.6)),
    "search": ("tool_search", dict(tasks=3, hops=2, length=7, rows=4)),
    "compaction": ("compaction", dict(tasks=3, spans=3, span_length=2, rows=4, noise=0.5)),
    "grid": ("grid_trap", dict(tasks=5, size=4, length=8, slip=0.5, noise=0.5)),
}
BUDGET = {"chain": 60, "search": 500, "compaction": 300, "grid": 90}
TRUST = (("lambda_mode", "trust"),)


def arm(name, **options):
    small = dict(critic_warmup=0)
    if ARMS[name].group_size > 1:
        small |= dict(group_size=2)
    if ARMS[name].branches:
        small |= dict(base_fraction=0.5, max_picks=12)
    return dataclasses.replace(ARMS[name], **{**small, **options})


@functools.cache
def make(case, seed=0):
    name, options = WORLDS[case]
    return jax.jit(lambda seed: make_world(name, seed=seed, **options))(seed)


@functools.cache
def steps_of(case, method, seeds=24):
    """Rollouts of one step in each of many worlds, by a critic that has seen some: NumPy."""
    name, options = WORLDS[case]
    sizes = sizes_of(make(case), method, BUDGET[case])

    def one(seed):
        world = make_world(name, seed=seed, **options)
        policy = policy_of(world, jnp.zeros_like(world.logits))
        key = jax.random.key(seed)
        warm = dataclasses.replace(method, critic_warmup=30)
        learner = init_learner(world, warm, sizes, 1, *jax.random.split(key))
        tasks = learner.order[: sizes.groups]
        played = collect_rollouts(
            world, policy, learner.counts, method, sizes, tasks, method.base_fraction, key
        )
        return world, policy, played, credit_batch(world, policy, method, played)

    found = jax.jit(jax.vmap(one))(jnp.arange(seeds, dtype=jnp.uint32))
    return sizes, jax.tree.map(np.asarray, found)


@functools.cache
def compiled(case, method):
    run = make_run(*WORLDS[case], method, steps=STEPS, tokens_per_step=BUDGET[case])
    return jax.jit(jax.vmap(run))


def histories(case, method, seeds, learning_rate):
    seeds = jnp.asarray(seeds, jnp.uint32)
    return compiled(case, method)(seeds, jnp.full(seeds.shape, learning_rate))


# Learns from returns, and its critic forgets nothing.
STILL = arm("ppo", hparams=(("lambda_", 1.0),), kept=1.0)
ADAM = arm("focus", optimizer="adam", normalise="running", critic_warmup=20)
STEPS = 40


# --- what a step plays ---------------------------------------------------------------------------

PLAYED = [
    ("search", arm("focus_k4")),
    ("grid", arm("vineppo", base_fraction=0.3)),
    ("compaction", arm("grpo")),
    ("chain", arm("focus_alive")),
]


def name_of(value):
    return value.name if isinstance(value, Arm) else value


@pytest.mark.parametrize("case, method", PLAYED, ids=name_of)
def test_budget_is_never_passed(case, method):
    sizes, (_, _, played, _) = steps_of(case, method)
    cost = np.where(played.rows, played.episodes.tokens.sum(axis=2), 0)
    for base, branch in zip(cost[:, : sizes.base], cost[:, sizes.base :], strict=True):
        ledger = Ledger(base=int(base.sum()), branch=int(branch.sum()))
        assert ledger.remaining(BUDGET[case]) >= 0  # raises where it was passed
        assert ledger.base <= method.base_fraction * BUDGET[case]
        assert ledger.base > 0
    assert cost.sum(axis=1).mean() > 0.8 * BUDGET[case]  # and most of it is used


@pytest.mark.parametrize("case, method", PLAYED, ids=name_of)
def test_rows_are_episodes_of_the_world(case, method):
    sizes, (world, _, played, _) = steps_of(case, method)
    e, (runs, _, turns) = played.episodes, played.episodes.mask.shape
    run = np.arange(runs)[:, None, None]
    at = run, np.minimum(e.layer[..., :-1], turns - 1), e.state[..., :-1], e.action
    mask = e.mask & played.rows[..., None]
    np.testing.assert_array_equal(np.where(mask, world.tokens[at], 0), e.tokens)
    # Turns follow each other without a gap, until the world says that it is over.
    assert np.all(mask[..., 1:] <= mask[..., :-1])
    length = mask.sum(axis=2)
    steps = np.arange(turns)
    ended = mask & (steps == length[..., None] - 1)
    successors, probable = world.next_state[at], world.prob[at] > 0
    goes = mask & ~ended
    leads = (successors == e.state[..., 1:, None]) & ~world.done[at] & probable
    assert np.all(leads.any(axis=3)[goes])
    assert np.all((world.done[at] & probable).any(axis=3)[ended])
    assert np.all(e.layer[..., 1:][goes] == e.layer[..., :-1][goes] + 1)
    assert np.all((e.outcome == 0) | (e.outcome == 1))


@pytest.mark.parametrize("case, method", [p for p in PLAYED if p[1].branches], ids=name_of)
def test_branches_leave_states_of_rollouts_that_were_played(case, method):
    sizes, (_, _, played, batch) = steps_of(case, method)
    e, base = played.episodes, sizes.base
    some = 0
    for run in range(len(played.rows)):
        seen = set()
        for branch in np.flatnonzero(played.rows[run, base:]):
            parent, segment = played.parent[run, branch], played.segment[run, branch]
            assert played.rows[run, parent] and e.mask[run, parent, segment]
            row = base + branch
            assert e.layer[run, row, 0] == e.layer[run, parent, segment]
            assert e.state[run, row, 0] == e.state[run, parent, segment]
            assert e.task[run, row] == e.task[run, parent]
            assert played.group[run, row] == played.group[run, parent]
            place = parent, segment, played.index[run, branch]
            assert place not in seen and place[2] < method.max_per_state
            seen.add(place)
            assert batch.mc_mask[run][place]
            assert batch.mc_return[run][place] == e.outcome[run, row]
        assert batch.mc_mask[run].sum() == len(seen)
        some += len(seen)
    assert some > len(played.rows)


def test_states_that_can_be_seen_to_be_lost_are_left_out():
    sizes, (_, _, played, _) = steps_of("chain", arm("focus_alive"))
    mask = played.episodes.mask & played.rows[..., None]
    lost = mask & (played.episodes.state[..., :-1] % 2 == 1)  # every other state of a layer
    assert np.any(lost[:, : sizes.base])
    assert not np.any(lost[:, sizes.base :, 0])


def test_refined_values_are_the_critic_and_the_branches():
    """Local fusion and leaving one out, written down again."""
    sizes, (_, _, played, batch) = steps_of("chain", arm("focus_alive"))
    base = sizes.base
    for run in range(6):
        count = batch.mc_mask[run].sum(axis=2)
        total = np.where(batch.mc_mask[run], batch.mc_return[run], 0).sum(axis=2)
        for row, turn in zip(*np.nonzero(played.exists[run]), strict=True):
            mean = played.mean[run, row, turn]
            n, outcomes = count[row, turn], total[row, turn]
            noise = max(mean * (1 - mean), 0.01)
            after = played.variance[run, row, turn]
            before = after if n == 0 else 1 / (1 / after - n / noise)
            gain = before / (before + noise / max(n, 1)) if n else 0.0
            expected = mean + gain * (outcomes / max(n, 1) - mean)
            np.testing.assert_allclose(played.values[run, row, turn], expected, atol=1e-4)
            # Every branch from here is held against the others, never against itself.
            here = (played.parent[run] == row) & (played.segment[run] == turn)
            for branch in np.flatnonzero(here & played.rows[run, base:]):
                own = played.episodes.outcome[run, base + branch]
                others = n - 1
                gain = before / (before + noise / others) if others else 0.0
                alone = mean + gain * ((outcomes - own) / max(others, 1) - mean)
                found = played.values[run, base + branch, 0]
                np.testing.assert_allclose(found, alone, atol=1e-4)
    assert np.any(batch.mc_mask)


# --- what a step learns --------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", ["none", "rms"])
@pytest.mark.parametrize("trained", [True, False])
def test_an_update_is_the_gradient_of_what_the_estimator_says(normalise, trained):
    """One compiled update against its parts, put together again in NumPy."""
    played_by = arm("focus_alive", hparams=TRUST)
    method = dataclasses.replace(played_by, normalise=normalise, train_on_branches=trained)
    sizes, everything = steps_of("chain", arm("focus_alive"))
    world, policy, played, _ = jax.tree.map(lambda x: jnp.asarray(x[2]), everything)
    start = init_learner(world, method, sizes, 4, *jax.random.split(jax.random.key(0)))
    after, advantages, mask = jax.jit(
        lambda learner: learn_from(world, method, sizes, learner, played, 0.5)
    )(start)
    batch = credit_batch(world, policy, method, played)
    credit = estimate(method.estimator, batch, **dict(method.hparams))
    e, push, squares, number = played.episodes, np.zeros(policy.shape), 0.0, 0
    for row in np.flatnonzero(played.rows):
        if row >= sizes.base and not trained:
            assert not np.any(mask[row]) and not np.any(advantages[row])
            continue
        for j in np.flatnonzero(e.mask[row]):
            assert bool(mask[row, j])
            advantage, tokens = float(credit.advantages[row, j]), int(e.tokens[row, j])
            np.testing.assert_allclose(advantages[row, j], advantage, atol=1e-6)
            look = int(world.policy_row[e.layer[row, j], e.state[row, j]])
            score = -np.asarray(policy[look])
            score[e.action[row, j]] += 1
            push[look] += advantage * tokens * score
            squares += advantage**2 * tokens
            number += tokens
    scale = np.sqrt(squares / number) if normalise == "rms" else 1.0
    expected = 0.5 * push / scale * policy.shape[0] / BUDGET["chain"]
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(after.weights, expected, atol=2e-5)
    states = int(np.sum(np.asarray(e.mask) & np.asarray(played.rows)[:, None]))
    assert int(jnp.sum(after.counts.seen)) == int(jnp.sum(after.counts.look)) == states
    assert int(after.place) == int(jnp.sum(played.rows[: sizes.base]))


def test_without_branches_and_with_lambda_1_focus_is_ppo():
    focus = dataclasses.replace(STILL, estimator="focus", refine="none")
    left, right = (histories("chain", a, range(6), 3.0) for a in (STILL, focus))
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert np.ptp(left.success) > 0


def test_groups_see_one_task_and_rollouts_of_none_are_compared():
    sizes, (_, _, played, _) = steps_of("compaction", arm("grpo"))
    task = played.episodes.task.reshape(len(played.rows), -1, 2)
    assert sizes.base == 2 * sizes.groups and np.all(task[..., 0] == task[..., 1])
    rows = played.rows.reshape(task.shape)
    np.testing.assert_array_equal(rows[..., 0], rows[..., 1])


def test_tasks_come_in_epochs():
    """Every task is played once before any is played again."""
    world, method = make("chain"), arm("ppo")
    sizes = sizes_of(world, method, 2 * 6)
    assert sizes.base == 2
    learner = init_learner(world, method, sizes, 6, *jax.random.split(jax.random.key(1)))
    step = jax.jit(lambda learner, key: train_step(world, method, sizes, learner, 0.0, key)[0])
    places = []
    for i in range(6):
        places += [int(x) for x in learner.order[learner.place : learner.place + 2]]
        learner = step(learner, jax.random.key(i))
    assert sorted(places[:6]) == sorted(places[6:]) == list(range(6))


# --- runs ----------------------------------------------------------------------------------------


def test_runs_do_not_know_of_each_other_and_nothing_compiles_again():
    together, again = (histories("chain", ADAM, range(6), 0.3) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, together, again)
    other = histories("chain", ADAM, [3, 60, 61, 62, 63, 64], 0.3)
    for field in dataclasses.fields(together):
        ours, theirs = getattr(together, field.name), getattr(other, field.name)
        np.testing.assert_allclose(ours[3], theirs[0], atol=1e-5, err_msg=field.name)
    assert np.ptp(np.asarray(other.success)[:, -1]) > 0  # seeds are different worlds
    assert compiled("chain", ADAM)._cache_size() == 1


def test_a_run_by_itself_is_the_same_run():
    together = histories("chain", STILL, range(6), 3.0)
    run = make_run(*WORLDS["chain"], STILL, steps=STEPS, tokens_per_step=BUDGET["chain"])
    alone = jax.jit(run)(4, 3.0)
    np.testing.assert_allclose(alone.success, together.success[4], atol=1e-5)
    np.testing.assert_array_equal(alone.tokens, together.tokens[4])


@pytest.mark.parametrize("method, rate", [(STILL, 3.0), (ADAM, 0.3)], ids=name_of)
def test_learning_raises_success_within_the_budget(method, rate):
    h = jax.tree.map(np.asarray, histories("chain", method, range(6), rate))
    assert np.mean(h.success[:, -1]) > np.mean(h.success[:, 0]) + 0.2
    assert np.all((h.success >= 0) & (h.success <= 1)) and h.success.shape == (6, STEPS + 1)
    assert np.all(h.tokens <= BUDGET["chain"]) and np.all(h.tokens > 0)
    assert np.all(h.dose <= h.tokens) and np.mean(h.dose) > 0
    assert np.all(h.branch_tokens < h.tokens) and np.any(h.branch_tokens > 0) == method.branches
    assert np.all(h.base_fraction == np.float32(method.base_fraction))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(h))


@pytest.mark.parametrize("name", sorted(ARMS))
def test_every_arm_has_what_its_estimator_and_rule_read(name):
    run = make_run(*WORLDS["chain"], arm(name), steps=2, tokens_per_step=BUDGET["chain"])
    h = jax.eval_shape(run, jnp.uint32(0), jnp.float32(1.0))
    assert h.success.shape == (3,) and h.tokens.shape == (2,)


def test_the_critic_finds_the_values_of_a_policy_that_stands_still():
    h = histories("chain", STILL, range(6), 0.0)
    assert np.ptp(np.asarray(h.success), axis=1).max() < 1e-6
    error = np.mean(h.critic_error, axis=0)
    assert error[-5:].mean() < 0.25 * error[:2].mean()

    world = make("chain")
    policy = policy_of(world, jnp.zeros_like(world.logits))
    task = jnp.arange(6000) % world.num_tasks
    key, every = jax.random.key(0), jnp.ones(task.size, bool)
    rows = play(world, policy, task, jnp.zeros_like(task), world.start[task], every, key)
    counts = critic.learn(critic.init_counts(world), world, rows, kept=1.0)
    layer, state = jnp.meshgrid(jnp.arange(6), jnp.arange(world.num_states), indexing="ij")
    mean, variance = critic.belief(counts, world, layer, state, look_weight=1.0, weight=2.0)
    true = exact.seen_values(world, policy)
    often = np.asarray(counts.seen.sum(-1)[world.seen] > 300)
    residual = (mean - true.v[world.seen]) / jnp.sqrt(variance + 1e-9)
    assert often.sum() > 30
    assert np.abs(np.asarray(mean - true.v[world.seen]))[often].max() < 0.08
    assert 0.3 < np.mean(np.square(residual[often & (np.asarray(mean) > 0.01)])) < 2.0


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_with_true_values_the_gradient_points_along_the_exact_one(lambda_):
    world = make("chain")
    policy = policy_of(world, jnp.zeros_like(world.logits))
    task = jnp.arange(6000) % world.num_tasks
    key, every = jax.random.key(3), jnp.ones(task.size, bool)
    rows = play(world, policy, task, jnp.zeros_like(task), world.start[task], every, key)
    true = exact.values(world, policy)
    batch = core_batch(world, policy, rows, task, every)
    batch = dataclasses.replace(batch, value=true.v[rows.layer, rows.state])
    credit = estimate("focus", batch, lambda_=lambda_)
    found = np.asarray(gradient(world, policy, rows, credit.advantages, credit.mask)) / task.size
    expected = np.asarray(exact.policy_gradient(world, policy))
    cosine = np.sum(found * expected) / np.linalg.norm(found) / np.linalg.norm(expected)
    assert cosine > 0.97
    np.testing.assert_allclose(np.linalg.norm(found), np.linalg.norm(expected), rtol=0.15)


# --- what is refused -----------------------------------------------------------------------------


def test_impossible_arms_and_budgets_are_refused():
    with pytest.raises(ValueError, match="rule='nowhere'"):
        Arm("mine", "focus", rule="nowhere")
    with pytest.raises(ValueError, match="vineppo reads continuations"):
        Arm("mine", "vineppo")
    with pytest.raises(ValueError, match="base_fraction=1.5"):
        Arm("mine", "focus", base_fraction=1.5)
    with pytest.raises(ValueError, match="ks="):
        Arm("mine", "focus", ks=())
    name, options = WORLDS["chain"]
    with pytest.raises(ValueError, match="do not hold a group of 8"):
        make_run(name, options, ARMS["grpo"], steps=2, tokens_per_step=40)
    with pytest.raises(ValueError, match="steps must be >= 1"):
        make_run(name, options, ARMS["ppo"], steps=0, tokens_per_step=40)
    with pytest.raises(ValueError, match="no world"):
        make_run("nowhere", {}, ARMS["ppo"], steps=2, tokens_per_step=40)
