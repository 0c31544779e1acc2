"""Exact values against enumeration, and the laws they obey."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from focus.lab import exact
from focus.lab.worlds import make_world

# Few enough states and turns that every episode can be listed.
TINY = {
    "chain": ("fork_chain", dict(tasks=2, length=5, forks=2, actions=2, rows=3)),
    "chain_late": ("fork_chain", dict(tasks=2, length=6, forks=3, actions=2, rows=3, delay=2)),
    "chain_never": ("fork_chain", dict(tasks=2, length=5, forks=2, actions=2, rows=3, delay=9)),
    "noisy": ("noisy_forks", dict(tasks=2, length=5, forks=2, actions=2, rows=3, delay=2)),
    "grid": ("grid_trap", dict(tasks=2, size=3, length=4, slip=0.3)),
    "search": ("tool_search", dict(tasks=1, hops=2, length=4, queries=2, rows=2)),
    "search_seen": (
        "tool_search",
        dict(tasks=1, hops=2, length=4, queries=2, rows=2, visible=True),
    ),
    "compaction": (
        "compaction",
        dict(tasks=2, spans=2, span_length=2, actions=2, rows=2, visible=False),
    ),
}


@functools.cache
def tiny(case):
    name, options = TINY[case]
    return jax.jit(lambda seed: make_world(name, seed=seed, **options))(5)


values, occupancy, seen_values, success, policy_gradient = map(
    jax.jit,
    (exact.values, exact.occupancy, exact.seen_values, exact.success, exact.policy_gradient),
)


def some_policy(world, seed=0):
    return jax.nn.softmax(
        world.logits + jax.random.normal(jax.random.key(seed), world.logits.shape)
    )


def episodes_from(world, policy, t, state):
    """Every way on from a state: (probability, [(t, state, action)], probability of success)."""
    w = {name: np.asarray(getattr(world, name), np.float64) for name in ("prob", "reward")}
    for action, chosen in enumerate(policy[world.policy_row[t, state]]):
        for k in range(world.prob.shape[-1]):
            here = (t, state, action, k)
            p = float(chosen) * w["prob"][here]
            if p == 0:
                continue
            step = [(t, state, action)]
            if world.done[here]:
                yield p, step, w["reward"][here]
                continue
            for rest, path, outcome in episodes_from(
                world, policy, t + 1, int(world.next_state[here])
            ):
                yield p * rest, step + path, outcome


@functools.cache
def enumerated(case):
    """Visits [T, N, A] of a random task, and the sum of outcomes after each of them."""
    world = jax.tree.map(np.asarray, tiny(case))
    policy = np.asarray(some_policy(tiny(case)), np.float64)
    shape = world.tokens.shape
    visits, gained, total = np.zeros(shape), np.zeros(shape), 0.0
    for start in world.start:
        for p, path, outcome in episodes_from(world, policy, 0, int(start)):
            total += p * outcome / len(world.start)
            for where in path:
                visits[where] += p / len(world.start)
                gained[where] += p * outcome / len(world.start)
    return visits, gained, total


@pytest.mark.parametrize("case", TINY)
def test_values_and_visits_equal_those_of_all_episodes(case):
    world = tiny(case)
    policy = some_policy(world)
    visits, gained, total = enumerated(case)
    found = values(world, policy)
    np.testing.assert_allclose(success(world, policy), total, rtol=1e-5)
    np.testing.assert_allclose(occupancy(world, policy), visits.sum(-1), atol=1e-6)
    reached = visits > 0
    assert reached.any(axis=(1, 2)).all()
    np.testing.assert_allclose(found.q[reached], (gained / visits.clip(1e-30))[reached], atol=1e-5)
    states = reached.any(-1)
    v = gained.sum(-1) / visits.sum(-1).clip(1e-30)
    np.testing.assert_allclose(found.v[:-1][states], v[states], atol=1e-5)
    np.testing.assert_array_equal(found.v[-1], 0)


@pytest.mark.parametrize("case", TINY)
def test_seen_values_are_expectations_over_the_hidden_states(case):
    world = tiny(case)
    visits, gained, _ = enumerated(case)
    found = seen_values(world, some_policy(world))
    weight = np.zeros((world.num_seen, world.num_actions))
    outcome = np.zeros_like(weight)
    np.add.at(weight, np.asarray(world.seen), visits)
    np.add.at(outcome, np.asarray(world.seen), gained)
    np.testing.assert_allclose(found.weight, weight.sum(-1), atol=1e-6)
    v = outcome.sum(-1) / weight.sum(-1).clip(1e-30)
    q = outcome / weight.clip(1e-30)
    np.testing.assert_allclose(found.v, v, atol=1e-5)
    np.testing.assert_allclose(found.q, q, atol=1e-5)
    np.testing.assert_allclose(found.a, np.where(weight > 0, q - v[:, None], 0), atol=1e-5)


@pytest.mark.parametrize("case", TINY)
def test_laws_of_values(case):
    world = tiny(case)
    policy = some_policy(world, seed=3)
    v, q, a = (np.asarray(x) for x in jax.tree.leaves(values(world, policy)))
    pi = np.asarray(policy)[world.policy_row]
    np.testing.assert_allclose((pi * a).sum(-1), 0, atol=1e-6)
    np.testing.assert_allclose((pi * q).sum(-1), v[:-1], atol=1e-6)
    assert v.min() >= 0 and v.max() <= 1 + 1e-6
    layer = np.arange(world.num_layers)[:, None, None, None]
    after = np.where(world.done, 0, v[layer + 1, world.next_state])
    np.testing.assert_allclose((world.prob * (world.reward + after)).sum(-1), q, atol=1e-6)
    here = np.asarray(occupancy(world, policy))
    ended = ((here[..., None] * pi)[..., None] * np.where(world.done, world.prob, 0)).sum((1, 2, 3))
    np.testing.assert_allclose(here.sum(1) + np.cumsum(ended) - ended, 1, atol=1e-5)
    np.testing.assert_allclose(ended.sum(), 1, atol=1e-5)


@pytest.mark.parametrize("case", TINY)
def test_goal_distance_is_the_shortest_of_all_ways(case):
    world = jax.tree.map(np.asarray, tiny(case))
    distance = np.asarray(exact.goal_distance(tiny(case)))
    even = np.full(world.logits.shape, 1 / world.num_actions)
    for start in world.start:
        ways = [len(path) for _, path, outcome in episodes_from(world, even, 0, start) if outcome]
        assert distance[0, start] == min(ways, default=np.inf)
    assert np.isinf(distance[-1]).all()
    v = np.asarray(values(world, even).v)
    np.testing.assert_array_equal(v[:-1] > 0, np.isfinite(distance[:-1]))


@pytest.mark.parametrize("case", TINY)
def test_the_policy_gradient_is_that_of_success(case):
    world = tiny(case)
    logits = world.logits + 0.5
    found = policy_gradient(world, jax.nn.softmax(logits))
    expected = jax.grad(lambda x: success(world, jax.nn.softmax(x)))(logits)
    assert np.abs(expected).max() > 1e-4
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_seeds_are_a_batch_axis():
    def found(seed):
        world = make_world("fork_chain", seed=seed, tasks=3, length=7, forks=3, rows=4, delay=2)
        policy = jax.nn.softmax(world.logits)
        functions = (exact.values, exact.success, exact.occupancy, exact.seen_values)
        return [f(world, policy) for f in (*functions, exact.policy_gradient)]

    batch, one = jax.jit(jax.vmap(found))(jnp.arange(3)), jax.jit(found)
    for seed in range(3):
        of_batch = jax.tree.map(lambda x, s=seed: x[s], batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one(seed), of_batch)


def test_a_policy_of_another_world_is_refused():
    world = tiny("chain")
    with pytest.raises(AssertionError, match="shape"):
        exact.success(world, jnp.full((2, 2), 0.5))


def test_what_is_not_seen_lies_between_what_it_hides():
    """A lost episode and one that is not look the same until the loss is seen."""
    world = make_world("fork_chain", tasks=1, length=8, forks=3, actions=2, rows=3, delay=99)
    policy = some_policy(world)
    seen, exact_values = seen_values(world, policy), values(world, policy)
    alive = int(world.start[0])
    last = int(world.seen[-1, alive])
    here = occupancy(world, policy)[-1]
    assert 0 < here[alive] < 1
    np.testing.assert_allclose(seen.v[last], here[alive] * exact_values.v[-2, alive], rtol=1e-5)
    np.testing.assert_allclose(exact_values.v[-2, alive], 0.95, rtol=1e-6)
