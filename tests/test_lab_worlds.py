"""Worlds of the laboratory: what they are made of, and what playing them gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from focus.lab import exact
from focus.lab.worlds import WORLDS, check, make_world, reset, step, world_options

# Every world, small, in the forms that differ in more than a number.
SMALL = {
    "chain": ("fork_chain", dict(tasks=3, length=6, forks=2, rows=5)),
    "chain_late": ("fork_chain", dict(tasks=3, length=8, forks=3, rows=5, delay=3)),
    "chain_never": ("fork_chain", dict(tasks=2, length=6, forks=3, rows=4, delay=99)),
}


@functools.cache
def builder(name, **options):
    return jax.jit(lambda seed: make_world(name, seed=seed, **options))


@functools.cache
def small(case, seed=0):
    name, options = SMALL[case]
    return builder(name, **options)(seed)


@functools.partial(jax.jit, static_argnums=2)
def play(world, policy, episodes, seed=0):
    """[T, episodes] states, and whether they were still played, and [episodes] outcomes."""
    key, task_key = jax.random.split(jax.random.key(seed))
    task = jax.random.randint(task_key, (episodes,), 0, world.num_tasks)

    def turn(carry, t):
        state, alive, outcome, key = carry
        key, act_key, step_key = jax.random.split(key, 3)
        action = jax.random.categorical(act_key, jnp.log(policy)[world.policy_row[t, state]])
        after, success, done = step(world, t, state, action, step_key)
        return (after, alive & ~done, outcome + success * alive, key), (state, alive)

    first = reset(world, key, task)
    carry = (first, jnp.ones(episodes, bool), jnp.zeros(episodes), key)
    (_, _, outcome, _), (states, alive) = jax.lax.scan(turn, carry, jnp.arange(world.num_layers))
    return states, alive, outcome


def initial(world):
    return jax.nn.softmax(world.logits)


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("seed", [0, 2])
def test_worlds_are_worlds(case, seed):
    world = small(case, seed)
    check(world)
    options = dict(world.options)
    assert world.name == SMALL[case][0] and SMALL[case][1].items() <= options.items()
    assert set(options) == set(world_options(world.name))
    assert world.next_state.dtype == world.seen.dtype == world.policy_row.dtype == jnp.int32
    assert world.prob.dtype == world.reward.dtype == world.logits.dtype == jnp.float32


@pytest.mark.parametrize("case", SMALL)
def test_seeds_are_a_batch_axis(case):
    name, options = SMALL[case]
    batch = jax.jit(jax.vmap(lambda s: make_world(name, seed=s, **options)))(jnp.arange(3))
    for seed in (0, 2):
        one, of_batch = small(case, seed), jax.tree.map(lambda x, s=seed: x[s], batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, of_batch)
    assert np.ptp(np.asarray(batch.logits), axis=0).max() > 0.1


@pytest.mark.parametrize("case", SMALL)
def test_playing_gives_the_exact_success_and_the_exact_visits(case):
    world = small(case)
    policy = initial(world)
    episodes = 20_000
    state, alive, outcome = map(np.asarray, play(world, policy, episodes))
    expected = float(exact.success(world, policy))
    assert abs(outcome.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / episodes)
    visits = np.zeros((world.num_layers, world.num_states))
    layer = np.broadcast_to(np.arange(world.num_layers)[:, None], state.shape)
    np.add.at(visits, (layer[alive], state[alive]), 1 / episodes)
    np.testing.assert_allclose(visits, exact.occupancy(world, policy), atol=5 / np.sqrt(episodes))


def losing_turns(world, task):
    """{turn: wrong actions} at which an episode of the task that is not lost can be lost."""
    state = int(world.start[task])
    ways = np.asarray(world.next_state[:, state, :, 0])
    return {
        t: np.flatnonzero(ways[t] != state)
        for t in range(world.num_layers)
        if (ways[t] != state).any()
    }


def test_a_chain_is_lost_by_a_wrong_action_at_a_fork_and_only_there():
    world = builder("fork_chain", tasks=4, length=9, forks=3, rows=6, noise=0.9)(3)
    right = {}
    for task in range(4):
        turns = losing_turns(world, task)
        assert len(turns) == 3 and max(turns) < 6
        for t, wrong in turns.items():
            assert len(wrong) == 3
            (good,) = set(range(4)) - set(wrong.tolist())
            # A row has one right action, wherever it stands.
            assert right.setdefault(int(world.policy_row[t, world.start[task]]), good) == good
    always_right = np.full(world.logits.shape, 0.25)
    for row, action in right.items():
        always_right[row] = np.eye(4)[action]
    np.testing.assert_allclose(exact.success(world, jnp.asarray(always_right)), 0.9, rtol=1e-6)


@pytest.mark.parametrize("delay, late", [(1, 1), (3, 3), (99, None)])
def test_a_loss_is_seen_after_its_delay(delay, late):
    world = builder("fork_chain", tasks=1, length=9, forks=2, rows=6, delay=delay)(1)
    world = jax.tree.map(np.asarray, world)
    at, wrong = next(iter(losing_turns(world, 0).items()))
    state = alive = int(world.start[0])
    for t in range(world.num_layers):
        looks_alive = int(world.seen[t, state]) == int(world.seen[t, alive])
        assert looks_alive == (late is None or t < at + late)
        # The policy never sees it: its rows are those of the turn.
        assert world.policy_row[t, state] == world.policy_row[t, alive]
        state = int(world.next_state[t, state, wrong[0] if t == at else 0, 0])
    assert world.reward[-1, state].max() == 0


@pytest.mark.parametrize(
    "options, start",
    [
        (dict(), 0.05),
        (dict(length=20, forks=6, rows=40, tasks=12, p0=0.5), 0.014),
        (dict(length=20, forks=5, rows=40, tasks=12, p0=0.6), 0.07),
        (dict(length=20, forks=5, rows=40, tasks=12, p0=0.68, delay=3), 0.13),
        (dict(length=8, forks=4, rows=40, tasks=12, p0=0.8), 0.37),
    ],
)
def test_chains_start_where_their_docstring_says(options, start):
    def success(seed):
        world = make_world("fork_chain", seed=seed, **options)
        return exact.success(world, initial(world))

    found = jax.jit(jax.vmap(success))(jnp.arange(40))
    assert abs(found.mean() - start) < 0.05 * start


def test_unknown_worlds_and_options_are_refused_by_name():
    with pytest.raises(ValueError, match="no world 'fork_chian'.*'fork_chain'"):
        make_world("fork_chian")
    with pytest.raises(ValueError, match="no option 'lenght'.*'length'"):
        make_world("fork_chain", lenght=3)


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("fork_chain", dict(length=8, forks=6), r"forks=6 must be a whole number in \[0, 5\]"),
        ("fork_chain", dict(length=3), "length=3 .* at least 4"),
        ("fork_chain", dict(delay=0), "delay=0 .* at least 1"),
        ("fork_chain", dict(tasks=True), "tasks=True"),
        ("fork_chain", dict(actions=1), "actions=1"),
        ("fork_chain", dict(noise=1.5), r"noise=1.5 must be a number in \[0, 1\]"),
        ("fork_chain", dict(p0=1.0), r"p0=1.0 must be a number in \(0, 1\)"),
        ("fork_chain", dict(p0=float("nan")), "p0=nan"),
    ],
)
def test_options_out_of_range_are_refused(name, options, said):
    with pytest.raises(ValueError, match=f"{name}: {said}"):
        make_world(name, **options)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda w: dict(prob=w.prob * 0.9), "prob that does not sum to 1"),
        (lambda w: dict(reward=w.reward.at[0, 1, 2, 0].set(1.0)), r"goes on.*\(0, 1, 2, 0\)"),
        (lambda w: dict(done=w.done.at[-1].set(False)), "goes on|does not end"),
        (lambda w: dict(next_state=w.next_state + 99), r"next_state outside \[0, 6\)"),
        (lambda w: dict(seen=w.seen - 1), "seen outside"),
        (lambda w: dict(tokens=w.tokens * 0), "less than one token"),
        (lambda w: dict(boundary=w.boundary[1:]), "boundary has shape"),
        (lambda w: dict(features=jnp.ones((3, 2))), "features has shape"),
        (lambda w: dict(logits=w.logits / 0), "not finite"),
    ],
)
def test_what_is_no_world_is_refused(change, said):
    world = small("chain")
    with pytest.raises(ValueError, match=f"fork_chain: .*{said}"):
        check(dataclasses.replace(world, **change(world)))


def test_the_registry_lists_every_world_tested_here():
    assert {name for name, _ in SMALL.values()} == set(WORLDS)
