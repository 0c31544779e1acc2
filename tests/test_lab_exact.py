"""Exact values against enumeration, and the laws they obey."""

import dataclasses
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
    "compaction": (
        "compaction",
        dict(tasks=2, spans=2, span_length=2, actions=2, rows=2, visible=False),
    ),
    # `tiny` takes task and turn from what the critic sees; the policy's rows still tell.
    "coarse": ("fork_chain", dict(tasks=2, length=5, forks=2, actions=2, rows=3)),
}


@functools.cache
def tiny(case):
    name, options = TINY[case]
    world = jax.jit(lambda seed: make_world(name, seed=seed, **options))(5)
    if case == "coarse":
        world = dataclasses.replace(world, seen=world.seen % 2, num_seen=2)
    return world


@jax.jit
def everything(world, policy):
    """All that the module finds, compiled once for each world."""
    return {
        "values": exact.values(world, policy),
        "success": exact.success(world, policy),
        "occupancy": exact.occupancy(world, policy),
        "seen": exact.seen_values(world, policy),
        "gradient": exact.policy_gradient(world, policy),
        "distance": exact.goal_distance(world),
        "gradient_by_jax": jax.grad(lambda x: exact.success(world, jax.nn.softmax(x)))(
            jnp.log(policy)
        ),
    }


def some_policy(world):
    noise = np.random.default_rng(0).normal(size=world.logits.shape)
    return jax.nn.softmax(world.logits + noise)


@functools.cache
def found(case):
    return everything(tiny(case), some_policy(tiny(case)))


def episodes_from(world, policy, t, state):
    """Every way on from a state: (probability, [(t, state, action)], probability of success)."""
    for action, chosen in enumerate(policy[world.policy_row[t, state]]):
        for k in range(world.prob.shape[-1]):
            here = (t, state, action, k)
            p = float(chosen) * float(world.prob[here])
            if p == 0:
                continue
            step = [(t, state, action)]
            if world.done[here]:
                yield p, step, float(world.reward[here])
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
    visits, gained, total = enumerated(case)
    exact_values = found(case)["values"]
    np.testing.assert_allclose(found(case)["success"], total, rtol=1e-5)
    np.testing.assert_allclose(found(case)["occupancy"], visits.sum(-1), atol=1e-6)
    reached = visits > 0
    assert reached.any(axis=(1, 2)).all()
    q = gained / visits.clip(1e-30)
    np.testing.assert_allclose(exact_values.q[reached], q[reached], atol=1e-5)
    states = reached.any(-1)
    v = gained.sum(-1) / visits.sum(-1).clip(1e-30)
    np.testing.assert_allclose(exact_values.v[:-1][states], v[states], atol=1e-5)
    np.testing.assert_array_equal(exact_values.v[-1], 0)


@pytest.mark.parametrize("case", TINY)
def test_seen_values_are_expectations_over_the_hidden_states(case):
    world, seen = tiny(case), found(case)["seen"]
    visits, gained, _ = enumerated(case)
    weight = np.zeros((world.num_seen, world.num_actions))
    outcome = np.zeros_like(weight)
    np.add.at(weight, np.asarray(world.seen), visits)
    np.add.at(outcome, np.asarray(world.seen), gained)
    np.testing.assert_allclose(seen.weight, weight.sum(-1), atol=1e-6)
    v = outcome.sum(-1) / weight.sum(-1).clip(1e-30)
    q = outcome / weight.clip(1e-30)
    np.testing.assert_allclose(seen.v, v, atol=1e-5)
    np.testing.assert_allclose(seen.q, q, atol=1e-5)
    np.testing.assert_allclose(seen.a, np.where(weight > 0, q - v[:, None], 0), atol=1e-5)


@pytest.mark.parametrize("case", TINY)
def test_laws_of_values(case):
    world = jax.tree.map(np.asarray, tiny(case))
    v, q, a = (np.asarray(x) for x in jax.tree.leaves(found(case)["values"]))
    pi = np.asarray(some_policy(world))[world.policy_row]
    np.testing.assert_allclose((pi * a).sum(-1), 0, atol=1e-6)
    np.testing.assert_allclose((pi * q).sum(-1), v[:-1], atol=1e-6)
    assert v.min() >= 0 and v.max() <= 1 + 1e-6
    layer = np.arange(world.num_layers)[:, None, None, None]
    after = np.where(world.done, 0, v[layer + 1, world.next_state])
    np.testing.assert_allclose((world.prob * (world.reward + after)).sum(-1), q, atol=1e-6)
    here = np.asarray(found(case)["occupancy"])
    ended = ((here[..., None] * pi)[..., None] * np.where(world.done, world.prob, 0)).sum((1, 2, 3))
    np.testing.assert_allclose(here.sum(1) + np.cumsum(ended) - ended, 1, atol=1e-5)
    np.testing.assert_allclose(ended.sum(), 1, atol=1e-5)


@pytest.mark.parametrize("case", TINY)
def test_goal_distance_is_the_shortest_of_all_ways(case):
    world = jax.tree.map(np.asarray, tiny(case))
    distance = np.asarray(found(case)["distance"])
    even = np.full(world.logits.shape, 1 / world.num_actions)
    for start in world.start:
        ways = [len(path) for _, path, outcome in episodes_from(world, even, 0, start) if outcome]
        assert distance[0, start] == min(ways, default=np.inf)
    assert np.isinf(distance[-1]).all()
    v = np.asarray(found(case)["values"].v)
    np.testing.assert_array_equal(v > 0, np.isfinite(distance))


@pytest.mark.parametrize("case", TINY)
def test_the_policy_gradient_is_that_of_success(case):
    expected = found(case)["gradient_by_jax"]
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found(case)["gradient"], expected, atol=1e-6)


def test_seeds_are_a_batch_axis():
    def of_seed(seed):
        world = make_world("fork_chain", seed=seed, **TINY["chain"][1])
        return everything(world, jax.nn.softmax(world.logits))

    batch, one = jax.jit(jax.vmap(of_seed))(jnp.arange(3)), jax.jit(of_seed)
    for seed in range(3):
        of_batch = jax.tree.map(lambda x, s=seed: x[s], batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one(seed), of_batch)


def test_a_policy_of_another_world_is_refused():
    world = tiny("chain")
    with pytest.raises(AssertionError, match="shape"):
        exact.success(world, jnp.full((2, 2), 0.5))


def test_what_is_not_seen_lies_between_what_it_hides():
    """A lost episode and one that is not look the same if the loss is never seen."""
    world = tiny("chain_never")
    seen, v = found("chain_never")["seen"], found("chain_never")["values"].v
    alive = int(world.start[0])
    np.testing.assert_allclose(v[-2, [alive, alive + 1]], [0.95, 0], rtol=1e-6)
    here = found("chain_never")["occupancy"][-1]
    share = here[alive] / (here[alive] + here[alive + 1])
    assert 0 < share < 1
    np.testing.assert_allclose(seen.v[world.seen[-1, alive]], share * 0.95, rtol=1e-5)
