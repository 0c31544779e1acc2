"""Worlds of the laboratory: what they are made of, and what playing them gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from focus.lab import exact
from focus.lab.worlds import (
    ANSWER,
    CALL,
    SUMMARY,
    WORLDS,
    check,
    make_world,
    reset,
    step,
    world_options,
)

# Every world, small, in the forms that differ in more than a number.
SMALL = {
    "chain": ("fork_chain", dict(tasks=3, length=6, forks=2, rows=5)),
    "chain_late": ("fork_chain", dict(tasks=3, length=8, forks=3, rows=5, delay=3)),
    "chain_never": ("fork_chain", dict(tasks=2, length=6, forks=3, rows=4, delay=99)),
    "noisy": ("noisy_forks", dict(tasks=3, length=8, forks=3, rows=5, delay=2, width=4)),
    "grid": ("grid_trap", dict(tasks=5, size=4, length=12, slip=0.5, noise=0.5)),
    "grid_firm": ("grid_trap", dict(tasks=5, size=5, length=12, slip=0)),
    "search": ("tool_search", dict(tasks=3, hops=2, length=7, rows=4)),
    "search_seen": ("tool_search", dict(tasks=3, hops=2, length=7, rows=4, visible=True)),
    "compaction": ("compaction", dict(tasks=3, spans=3, span_length=2, rows=4, noise=0.5)),
    "compaction_hidden": ("compaction", dict(tasks=3, spans=2, rows=4, visible=False)),
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
    key = jax.random.key(seed)
    task = jnp.arange(episodes) % world.num_tasks

    def turn(carry, t):
        state, alive, outcome, key = carry
        key, act_key, step_key = jax.random.split(key, 3)
        below = jnp.cumsum(policy[world.policy_row[t, state]], axis=-1)[:, :-1]
        action = jnp.sum(below <= jax.random.uniform(act_key, (episodes, 1)), axis=-1)
        after, success, done = step(world, t, state, action, step_key)
        return (after, alive & ~done, outcome + success * alive, key), (state, alive)

    first = reset(world, key, task)
    carry = (first, jnp.ones(episodes, bool), jnp.zeros(episodes), key)
    (_, _, outcome, _), (states, alive) = jax.lax.scan(turn, carry, jnp.arange(world.num_layers))
    return states, alive, outcome


def initial(world):
    return jax.nn.softmax(world.logits)


success, values, seen_values = map(jax.jit, (exact.success, exact.values, exact.seen_values))


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
    episodes = 12_000
    state, alive, outcome = map(np.asarray, play(world, policy, episodes))
    expected = float(success(world, policy))
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
    np.testing.assert_allclose(success(world, jnp.asarray(always_right)), 0.9, rtol=1e-6)


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
        (dict(length=8, forks=4, rows=40, tasks=12, p0=0.8), 0.37),
    ],
)
def test_chains_start_where_their_docstring_says(options, start):
    def of_seed(seed):
        world = make_world("fork_chain", seed=seed, **options)
        return exact.success(world, initial(world))

    found = jax.jit(jax.vmap(of_seed))(jnp.arange(40))
    assert abs(found.mean() - start) < 0.05 * start


def test_noisy_forks_without_noise_are_fork_chains():
    same = dict(tasks=3, length=8, forks=3, rows=5, delay=2, p0=0.6)
    chain = builder("fork_chain", **same)(4)
    noisy = builder("noisy_forks", hazard=1.0, slip=0.0, **same)(4)
    policy = initial(chain)
    np.testing.assert_allclose(initial(noisy), policy, atol=1e-6)
    for a, b in zip(jax.tree.leaves(values(chain, policy)), jax.tree.leaves(values(noisy, policy))):
        np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_array_equal(chain.seen, noisy.seen)


def test_chance_at_noisy_forks():
    world = builder("noisy_forks", tasks=4, length=9, forks=3, rows=6, hazard=0.6, slip=0.1)(0)
    alive = world.start[0]
    lost = np.asarray(world.prob[:, alive, :, 1])
    at_forks = lost[lost.max(-1) > 0]
    assert len(at_forks) == 3
    np.testing.assert_allclose(np.sort(at_forks), [[0.1, 0.6, 0.6, 0.6]] * 3, rtol=1e-6)
    assert np.all(world.prob[:, alive + 1, :, 0] == world.prob[:, alive, :, 0])
    assert np.all(world.next_state[:, alive + 1] == alive + 1)


@pytest.mark.parametrize("overlap", [0.0, 0.6, 1.0])
def test_features_overlap_as_much_as_asked(overlap):
    world = builder("noisy_forks", tasks=40, length=8, rows=5, forks=2, width=50, overlap=overlap)(
        0
    )
    x = np.array(world.features).reshape(8, 40, 2, 50)
    x /= np.linalg.norm(x, axis=-1, keepdims=True)

    def cosine(a, b):
        return np.mean(np.sum(a * b, axis=-1))

    # Seen by the critic as such: a state of turn t is feature row `seen`.
    assert int(world.seen[3, world.start[2]]) == (3 * 40 + 2) * 2
    assert abs(cosine(x[1:], x[:-1]) - overlap) < 0.03
    assert abs(cosine(x[:, :, 0], x[:, :, 1]) - overlap) < 0.03
    assert abs(cosine(x[2:], x[:-2]) - overlap**2) < 0.03
    assert abs(cosine(x[:, 1:], x[:, :-1])) < 0.1
    rows = np.asarray(world.policy_features)
    np.testing.assert_allclose(rows @ rows.T, overlap + (1 - overlap) * np.eye(5), atol=1e-6)


def test_the_grid_has_one_way_through_its_trap():
    size, length = 5, 14
    world = builder("grid_trap", tasks=6, size=size, length=length, slip=0, noise=0.9)(3)
    after = np.asarray(world.next_state[0, :, :, 0])
    traps = np.flatnonzero((after == np.arange(size * size)[:, None]).all(1))
    assert len(traps) == size - 1 and set(traps % size) == {2}
    (goal,) = set(after[np.asarray(world.done[0, :, :, 0])].tolist())
    assert goal % size == size - 1 and set(np.asarray(world.start) % size) == {0}
    v = np.asarray(values(world, initial(world)).v)
    assert np.all(v[:, traps] == 0)
    # Following the most probable actions of a firm policy is the shortest way.
    gap = (set(range(2, size * size, size)) - set(traps.tolist())).pop() // size
    distance = np.asarray(exact.goal_distance(world))[0, world.start]
    rows = np.asarray(world.start) // size
    np.testing.assert_array_equal(distance, abs(rows - gap) + abs(gap - goal // size) + size - 1)
    sure = builder("grid_trap", tasks=6, size=size, length=length, slip=0, noise=0.9, p0=0.9999)(3)
    found = success(sure, initial(sure))
    np.testing.assert_allclose(found, 0.9, atol=0.01)


def test_moves_of_the_grid_go_astray_to_both_sides():
    world = builder("grid_trap", tasks=2, size=5, length=3, slip=0.2)(0)
    corner, inside = 0, 6
    moves = {0: -5, 1: 1, 2: 5, 3: -1}
    for action, move in moves.items():
        odds = np.zeros(25)
        np.add.at(odds, world.next_state[0, inside, action], world.prob[0, inside, action])
        assert odds[inside + move] == np.float32(0.8) and odds[inside - move] == 0
        assert np.count_nonzero(odds == np.float32(0.1)) == 2
    assert world.next_state[0, corner, 0, 0] == world.next_state[0, corner, 3, 0] == corner


def right_policy(world):
    """Deterministic, the initial policy's most probable actions; sure only where p0 is near 1."""
    return jax.nn.one_hot(jnp.argmax(world.logits, -1), world.num_actions)


SEARCH = dict(tasks=3, hops=3, length=5, queries=3, rows=4, p0=0.999, guess=0.2)


def test_searching_well_finds_every_link_unless_misled():
    world = builder("tool_search", miss=0.0, mislead=0.1, noise=0.9, **SEARCH)(2)
    np.testing.assert_allclose(success(world, right_policy(world)), 0.9 * 0.9**3, rtol=1e-5)
    # With five turns, four searches and an answer, one miss can be made up for.
    world = builder("tool_search", miss=0.25, mislead=0.0, noise=0.9, **SEARCH)(2)
    expected = 0.9 * (0.75**3 + 3 * 0.25 * 0.75**3)
    np.testing.assert_allclose(success(world, right_policy(world)), expected, rtol=1e-5)


@pytest.mark.parametrize("action, expected", [(4, 0.95 * 0.2**3), (3, 0.0)])
def test_answers_too_early_are_guesses_and_no_answer_fails(action, expected):
    world = builder("tool_search", **SEARCH)(2)
    policy = jax.nn.one_hot(jnp.full(5, action), 5)
    np.testing.assert_allclose(success(world, policy), expected, rtol=1e-5)


def test_a_tempting_page_misleads_and_a_check_undoes_it():
    world = builder("tool_search", miss=0.0, mislead=0.0, detect=0.6, **SEARCH)(2)
    world = jax.tree.map(np.asarray, world)
    start = int(world.start[1])
    apt = int(np.argmax(world.logits[world.policy_row[0, start]]))

    def likely(t, state, action):
        k = int(np.argmax(world.prob[t, state, action]))
        return int(world.next_state[t, state, action, k]), world.prob[t, state, action, k]

    after = {query: likely(0, start, query)[0] for query in range(3)}
    (tempting,) = (q for q in range(3) if q != apt and after[q] != start)
    right, misled = after[apt], after[tempting]
    assert right != misled and world.seen[1, right] == world.seen[1, misled]
    # Apt queries go on from a wrong link as they do from a right one.
    apt = int(np.argmax(world.logits[world.policy_row[1, right]]))
    later = likely(1, misled, apt)[0]
    assert world.seen[2, later] == world.seen[2, likely(1, right, apt)[0]]
    assert world.reward[:, [misled, later]].max() == 0 < world.reward[1, right].max()
    back, odds = likely(2, later, 3)
    assert back == start and odds == np.float32(0.6)
    assert likely(1, right, 3) == (right, 1)
    assert world.tokens[0, start].tolist() == [3, 3, 3, 2, 1]
    assert world.kind[0, start].tolist() == [CALL] * 4 + [ANSWER]


def test_a_privileged_critic_sees_more():
    hidden, shown = (builder("tool_search", visible=v, **SEARCH)(2) for v in (False, True))
    policy = jnp.full(hidden.logits.shape, 0.2)

    def spread(world):
        seen = seen_values(world, policy)
        return float(jnp.sum(seen.weight * seen.v**2)), float(jnp.sum(seen.weight * seen.v))

    assert spread(shown)[0] > 1.05 * spread(hidden)[0]
    np.testing.assert_allclose(spread(shown)[1], spread(hidden)[1], rtol=1e-5)


COMPACTION = dict(tasks=3, spans=3, span_length=2, rows=4, find=0.6, guess=0.25, noise=0.9)


def test_compaction_keeps_what_was_found_or_not():
    world = builder("compaction", p0=0.9999, **COMPACTION)(1)
    found = 1 - 0.4**2
    expected = 0.9 * (found + (1 - found) * 0.25) ** 3
    np.testing.assert_allclose(success(world, right_policy(world)), expected, rtol=1e-5)
    # Work as before, but every summary keeps the wrong thing.
    rows = jnp.arange(8)[:, None] >= 4
    wrong = jnp.where(rows, jnp.roll(right_policy(world), 1, axis=-1), right_policy(world))
    expected = 0.9 * 0.25**2 * (found + (1 - found) * 0.25)
    np.testing.assert_allclose(success(world, wrong), expected, rtol=1e-5)


def test_summaries_decide_and_boundaries_lie_behind_them():
    world = builder("compaction", **COMPACTION)(1)
    is_summary = np.asarray(world.kind == SUMMARY).all((1, 2))
    assert is_summary.tolist() == [False, False, True] * 2 + [False, False]
    np.testing.assert_array_equal(world.boundary[1:], np.repeat(is_summary[:-1, None], 18, 1))
    assert not world.boundary[0].any()
    np.testing.assert_array_equal(world.tokens[:, 0, 0], np.where(is_summary, 4, 1))
    policy = initial(world)
    a, here = values(world, policy).a, exact.occupancy(world, policy)
    decided = np.asarray(jnp.sum(here[..., None] * policy[world.policy_row] * a**2, (1, 2)))
    assert decided[2] > 3 * decided[:2].max() and decided[5] > 3 * decided[3:5].max()


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
        ("noisy_forks", dict(overlap=1.1), "overlap=1.1"),
        ("noisy_forks", dict(forks=18), r"forks=18 must be a whole number in \[0, 17\]"),
        ("noisy_forks", dict(width=0), "width=0"),
        ("grid_trap", dict(size=2), "size=2 .* at least 3"),
        ("grid_trap", dict(slip=-0.1), "slip=-0.1"),
        ("tool_search", dict(queries=1), "queries=1 .* at least 2"),
        ("tool_search", dict(visible=1), "visible=1 must be True or False"),
        ("tool_search", dict(detect="often"), "detect='often'"),
        ("compaction", dict(spans=1), "spans=1 .* at least 2"),
        ("compaction", dict(guess=2), "guess=2"),
        ("compaction", dict(seed=1.5), "seed=1.5 must be a whole number"),
        ("grid_trap", dict(seed=-1), "seed=-1 .* in"),
        ("fork_chain", dict(seed=jnp.float32(1)), "seed of float32"),
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
