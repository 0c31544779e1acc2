"""Scales of the critic's errors: recovered where they are known, and worth something."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from focus.credit import errors, refine, structure
from focus.credit.structure import CovarianceScales
from focus.critic import covariance
from focus.critic.covariance import Residuals

TASKS, ROLLOUTS, STATES, DIMS = 24, 2, 6, 4
GRID = (TASKS, ROLLOUTS, STATES)
update_fit = jax.jit(covariance.update_fit)
fitted_scales = jax.jit(covariance.fitted_scales)
structured_errors = jax.jit(structure.structured_errors)
refine_pool = jax.jit(refine.refine_pool, static_argnames=("states", "mode"))
refine_branches = jax.jit(structure.refine_branches, static_argnames=("rollouts", "states"))
refine_values = jax.jit(refine.refine_values, static_argnames=("mode", "value_range"))


def scales(ensemble=1.0, task=0.0, episode=0.0, state=0.0, rho=0.8):
    return CovarianceScales(*map(jnp.float32, (ensemble, task, episode, state, rho)))


def distance(i, j):
    """Along the tree of a task's rollouts: (rollout, position) twice."""
    return abs(i[1] - j[1]) if i[0] == j[0] else i[1] + j[1]


def dense_structure(s, spread):
    """[R N, R N] of one task, entry by entry."""
    places = [(i, j) for i in range(spread.shape[0]) for j in range(spread.shape[1])]
    root = np.sqrt(spread.reshape(-1))
    return np.array([
        [root[a] * root[b] * float(s.task + s.episode * s.rho ** distance(p, q)
                                   + s.state * (distance(p, q) == 0))
         for b, q in enumerate(places)] for a, p in enumerate(places)
    ])  # fmt: skip


def draw_step(rng, truth, share=0.3, k=(2, 4, 6), base=True):
    """A step in which errors of V have the covariance of `truth`.

    Returns V, ensemble features, spread, what the values truly are [S], outcomes of branches
    (mean [S], count [S]), and base outcomes [G, R].
    """
    value = rng.uniform(0.4, 0.6, GRID).astype(np.float32)
    value[..., 0] = value[:, :1, 0]
    ensemble = rng.normal(size=(*GRID, DIMS)).astype(np.float32) * 0.05
    ensemble[:, :, 0] = ensemble[:, :1, 0]  # one state, one prompt
    spread = value * (1 - value)
    features = structured_errors(truth, ensemble, spread)
    z = rng.normal(size=DIMS)
    w = rng.normal(size=(TASKS, features.local.shape[2]))
    error = np.asarray(features.shared) @ z
    error += np.einsum("gne,ge->gn", features.local, w).reshape(-1)
    error += np.sqrt(features.own) * rng.normal(size=error.shape)
    true = np.clip(value.reshape(-1) + error, 0, 1)
    count = rng.choice(k, true.size) * (rng.uniform(size=true.size) < share)
    mean = rng.binomial(count, true) / np.maximum(count, 1)
    outcome = rng.binomial(1, true.reshape(GRID)[..., 0]) if base else None
    return value.reshape(-1), ensemble, spread.reshape(-1), true, mean, count, outcome


def residuals_of(step):
    value, ensemble, spread, _, mean, count, outcome = step
    task, rollout, position = (x.reshape(-1) for x in np.indices(GRID))
    first = position == 0
    own = np.zeros(first.size, np.float32)
    own[first] = outcome.reshape(-1)

    def both(branches, base):
        return jnp.concatenate([jnp.asarray(branches), jnp.asarray(base)])

    return Residuals(
        value=both(value, value),
        mean=both(mean, own),
        count=both(count, first.astype(int)),
        outcome_variance=both(covariance.binary_variance(mean, count), own * 0),
        spread=both(spread, spread),
        ensemble=both(*[ensemble.reshape(-1, DIMS)] * 2),
        task=both(task, task),
        rollout=both(rollout, rollout),
        position=both(position, position),
        is_base=both(first & False, first),
        mask=both(count > 0, first),
    )


@functools.cache
def fit_to(truth, steps=25, seed=0, retention=1.0):
    truth = scales(**dict(truth))
    rng, fit = np.random.default_rng(seed), covariance.init_fit()
    for _ in range(steps):
        fit = update_fit(fit, residuals_of(draw_step(rng, truth)), retention=retention)
    return fit, fitted_scales(fit)


# Errors of a standard deviation of at most .2, so that few values have to be clipped.
WORLDS = {
    "task": {"ensemble": 1.0, "task": 0.12, "episode": 0.01, "state": 0.01},
    "episode": {"ensemble": 1.0, "task": 0.01, "episode": 0.12, "state": 0.01, "rho": 0.8},
    "state": {"ensemble": 0.5, "task": 0.02, "episode": 0.01, "state": 0.12},
    "ensemble": {"ensemble": 3.5, "task": 0.0, "episode": 0.0, "state": 0.0},
    "all": {"ensemble": 2.0, "task": 0.05, "episode": 0.05, "state": 0.05, "rho": 0.7},
}


def test_features_have_the_covariance_that_is_written_down():
    s = scales(2.0, 0.2, 0.3, 0.1, 0.7)
    rng = np.random.default_rng(0)
    spread = rng.uniform(0.05, 0.25, (2, 3, 4)).astype(np.float32)
    ensemble = rng.normal(size=(2, 3, 4, 2)).astype(np.float32)
    features = structure.structured_errors(s, ensemble, spread)
    flat = ensemble.reshape(-1, 2)
    expected = 2.0 * flat @ flat.T
    for g in range(2):
        expected[g * 12 :][:12, g * 12 :][:, :12] += dense_structure(s, spread[g])
    got = np.stack([errors.covariances(features, i) for i in range(24)])
    # s_0 is one state for all rollouts of a task, so its own error is shared there.
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_states_of_a_branch_fade_from_where_it_left():
    s = scales(1.5, 0.2, 0.3, 0.1, 0.7)
    rng = np.random.default_rng(1)
    spread = rng.uniform(0.05, 0.25, (2, 2, 5)).astype(np.float32)
    ensemble = rng.normal(size=(2, 2, 5, 2)).astype(np.float32)
    pool = structure.structured_errors(s, ensemble, spread)
    row, depth = np.array([7, 12]), np.array([1, 3])  # rollout 1 state 2, and task 1's state 2
    own_ensemble, own_spread = rng.normal(size=(2, 2)), np.array([0.2, 0.1])
    shared, local, own, block = structure.branch_errors(
        s, own_ensemble, own_spread, row, depth, rollouts=2, states=5
    )
    np.testing.assert_array_equal(block, [0, 1])
    for q in range(2):
        total = np.sum(shared[q] ** 2) + np.sum(local[q] ** 2) + own[q]
        claimed = 1.5 * np.sum(own_ensemble[q] ** 2)
        np.testing.assert_allclose(total, claimed + own_spread[q] * 0.6, rtol=1e-5)
        for other in range(10):
            there = (other // 5, other % 5), ((row[q] % 10) // 5, row[q] % 5)
            apart = distance(*there) + depth[q]
            expected = np.sqrt(own_spread[q] * spread[block[q]].reshape(-1)[other]) * (
                0.2 + 0.3 * 0.7**apart
            )
            np.testing.assert_allclose(local[q] @ pool.local[block[q], other], expected, rtol=1e-4)


@pytest.mark.parametrize("world", WORLDS)
def test_known_scales_are_recovered(world):
    truth = WORLDS[world]
    _, found = fit_to(tuple(truth.items()))
    for name in ("task", "episode", "state"):
        assert abs(float(getattr(found, name)) - truth[name]) < 0.05, (world, name, found)
    assert float(found.ensemble) == pytest.approx(truth["ensemble"], rel=0.25, abs=0.35)
    total = sum(float(getattr(found, n)) for n in ("task", "episode", "state"))
    assert total == pytest.approx(sum(truth[n] for n in ("task", "episode", "state")), abs=0.03)
    if truth["episode"] > 0.1:
        assert abs(float(found.rho) - truth["rho"]) <= 0.2


@pytest.mark.parametrize("world", WORLDS)
def test_standardised_residuals_of_fresh_branches_have_variance_one(world):
    truth = WORLDS[world]
    _, found = fit_to(tuple(truth.items()), steps=10, seed=3, retention=0.9)
    rng, squares, before = np.random.default_rng(7), [], []
    for _ in range(10):
        value, ensemble, spread, _, mean, count, _ = draw_step(rng, scales(**truth))
        for fitted, into in ((found, squares), (structure.ensemble_scales(), before)):
            tau2 = errors.variances(structured_errors(fitted, ensemble, spread.reshape(GRID)))
            noise = refine.outcome_noise(spread, tau2)
            there = count > 0
            predicted = (tau2 + noise / np.maximum(count, 1))[there]
            into.append(np.mean((mean - value)[there] ** 2 / predicted))
    assert 0.8 < np.mean(squares) < 1.25, np.mean(squares)
    assert abs(np.mean(squares) - 1) < abs(np.mean(before) - 1)


@pytest.mark.parametrize("world", ["task", "episode", "state", "all"])
def test_refinement_decreases_the_squared_error_where_the_model_holds(world):
    truth = WORLDS[world]
    _, found = fit_to(tuple(truth.items()), steps=10, seed=5, retention=0.9)
    rng, gained, promised, by_ensemble = np.random.default_rng(11), [], [], []
    for _ in range(10):
        value, ensemble, spread, true, mean, count, _ = draw_step(rng, scales(**truth))
        for fitted in (found, structure.ensemble_scales()):
            features = structured_errors(fitted, ensemble, spread.reshape(GRID))
            tau2 = errors.variances(features)
            noise = refine.outcome_noise(spread, tau2)
            refined, variance = refine_values(value, features, noise, mean, count, mode="joint")
            gain = np.mean((true - value) ** 2 - (true - refined) ** 2)
            if fitted is found:
                gained.append(gain)
                promised.append(np.mean(tau2 - variance))
            else:
                by_ensemble.append(gain)
    assert np.mean(gained) > max(0.0, np.mean(by_ensemble))
    assert np.mean(gained) == pytest.approx(np.mean(promised), rel=0.35)


def test_agreeing_outcomes_draw_a_value_as_far_as_the_covariance_says():
    s = scales(1.0, 0.15, 0.1, 0.1)
    ensemble, spread = jnp.zeros((1, 1, 3, 1)), jnp.full((1, 1, 3), 0.25)
    features = structure.structured_errors(s, ensemble, spread)
    tau2 = errors.variances(features)
    noise = refine.outcome_noise(spread.reshape(-1), tau2)
    value, mean = jnp.full(3, 0.5), jnp.ones(3)
    previous = 0.5
    for k in (1, 2, 4, 16):
        count = jnp.array([0, k, 0])
        refined, _ = refine_values(value, features, noise, mean, count, mode="joint")
        expected = 0.5 + 0.5 * tau2[1] / (tau2[1] + noise[1] / k)
        assert float(refined[1]) == pytest.approx(float(expected), abs=1e-5)
        assert previous < float(refined[1])
        assert 0.5 < float(refined[0]) < float(refined[1])
        previous = float(refined[1])
    assert previous > 0.9


def test_without_evidence_the_prior_stands_and_little_evidence_moves_it_little():
    prior = jax.tree.leaves(covariance.prior_scales())
    np.testing.assert_allclose(jax.tree.leaves(fitted_scales(covariance.init_fit())), prior)
    step = residuals_of(draw_step(np.random.default_rng(0), scales(**WORLDS["state"]), share=0.02))
    found = fitted_scales(update_fit(covariance.init_fit(), step))
    np.testing.assert_allclose(jax.tree.leaves(found)[1:4], prior[1:4], atol=0.08)


def test_old_steps_are_forgotten():
    truth = WORLDS["task"]
    fit, _ = fit_to(tuple(truth.items()), retention=0.9)
    rng = np.random.default_rng(1)
    for _ in range(25):
        fit = update_fit(fit, residuals_of(draw_step(rng, scales(**WORLDS["state"]))))
    found = fitted_scales(fit)
    assert float(found.task) < 0.05 and float(found.state) > 0.08


def test_padding_may_hold_nan_and_order_does_not_matter():
    step = residuals_of(draw_step(np.random.default_rng(2), scales(**WORLDS["all"])))
    want = update_fit(covariance.init_fit(), step)

    def pad(x):
        fill = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0
        return jnp.pad(x, [(0, 7)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)

    order = np.random.default_rng(3).permutation(step.mask.size + 7)
    padded = jax.tree.map(lambda x: pad(x)[order], step)
    got = update_fit(covariance.init_fit(), padded)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-3)


def test_a_rollouts_own_outcome_is_not_paired_with_what_its_branches_found():
    step = residuals_of(draw_step(np.random.default_rng(4), scales(**WORLDS["all"])))
    one = np.asarray(step.task) == 0
    one &= np.asarray(step.rollout) == 0
    one &= np.asarray(step.is_base) | (np.cumsum(one & ~np.asarray(step.is_base)) == 1)
    alone = jax.tree.map(lambda x: x[one], step)
    fit = update_fit(covariance.init_fit(), jax.tree.map(lambda x: x, alone))
    branch = alone.count[~np.asarray(alone.is_base)]
    # What is left is the branched state paired with itself, if it has two outcomes.
    assert float(fit.pairs) <= 0.5 * np.sum(np.asarray(branch) >= 2) + 1e-6


# --- a step's values -----------------------------------------------------------------------------


def dense_tree(s, spread, ensemble, branch_row, branch_spread, branch_ensemble):
    """[S + Q N', ...] covariance of a pool and all states of branches, entry by entry."""
    tasks, rollouts, states = spread.shape
    places = [(g, i, j, None, 0) for g in range(tasks) for i in range(rollouts)
              for j in range(states)]  # fmt: skip
    flat, features = list(spread.reshape(-1)), list(ensemble.reshape(-1, ensemble.shape[-1]))
    for q, row in enumerate(branch_row):
        g, i, j = np.unravel_index(row, spread.shape)
        for t in range(branch_spread.shape[1]):
            places.append((g, i, j, q, t))
            flat.append(branch_spread[q, t])
            features.append(branch_ensemble[q, t])
    size, out = len(places), np.zeros((len(places), len(places)))
    for a, (ga, ia, ja, qa, ta) in enumerate(places):
        for b, (gb, ib, jb, qb, tb) in enumerate(places):
            out[a, b] = float(s.ensemble) * features[a] @ features[b]
            if ga != gb:
                continue
            if qa == qb and qa is not None:
                apart = abs(ta - tb)
            else:
                apart = distance((ia, ja), (ib, jb)) + ta + tb
            same = apart == 0
            out[a, b] += np.sqrt(flat[a] * flat[b]) * float(
                s.task + s.episode * s.rho**apart + s.state * same
            )
    assert size == len(flat)
    return out


@pytest.mark.parametrize("seed", range(2))
def test_values_of_a_step_equal_dense_conditioning_without_each_ones_own_outcome(seed):
    s, rng = scales(1.5, 0.2, 0.25, 0.1, 0.7), np.random.default_rng(seed)
    grid, length = (2, 2, 3), 3
    size = int(np.prod(grid))
    spread = rng.uniform(0.1, 0.25, grid).astype(np.float32)
    ensemble = rng.normal(size=(*grid, 2)).astype(np.float32) * 0.1
    ensemble[:, :, 0], spread[:, :, 0] = ensemble[:, :1, 0], spread[:, :1, 0]
    row = np.array([1, 1, 4, 10, 6])  # two siblings at row 1, a branch at an s_0
    q_spread = rng.uniform(0.1, 0.25, (5, length)).astype(np.float32)
    q_ensemble = rng.normal(size=(5, length, 2)).astype(np.float32) * 0.1
    q_spread[:, 0], q_ensemble[:, 0] = spread.reshape(-1)[row], ensemble.reshape(-1, 2)[row]
    mean, q_mean = rng.uniform(size=size), rng.uniform(size=(5, length))
    q_mean[:, 0] = mean[row]
    y = np.array([1.0, 0.0, 1.0, np.nan, 1.0])
    base_y = np.array([1.0, 0.0, np.nan, 1.0])
    noise = np.full(size, 0.15)
    total, count = np.zeros(size), np.zeros(size, int)
    first = np.arange(4) * 3
    observed = [(r, v, ("branch", q)) for q, (r, v) in enumerate(zip(row, y)) if v == v]
    observed += [(first[i], v, ("base", i)) for i, v in enumerate(base_y) if v == v]
    for r, v, _ in observed:
        total[r] += v
        count[r] += 1
    features = structure.structured_errors(s, ensemble, spread)
    own = np.repeat(np.where(np.isfinite(base_y), first, -1), 3)
    values, belief = refine_pool(
        mean, features, noise, total / np.maximum(count, 1), count, np.ones(size, bool), states=3,
        own_state=own, own_outcome=np.repeat(base_y, 3),
    )  # fmt: skip
    branches = refine_branches(
        s, belief, q_mean, q_ensemble, q_spread, row, y, noise[row], np.ones((5, length), bool),
        rollouts=2, states=3,
    )  # fmt: skip
    prior = dense_tree(s, spread, ensemble, row, q_spread, q_ensemble)
    everything = np.concatenate([mean, q_mean.reshape(-1)])

    def without(name):
        seen = [(r, v) for r, v, who in observed if who != name]
        at, outcome = np.array([r for r, _ in seen]), np.array([v for _, v in seen])
        gain = prior[:, at] @ np.linalg.inv(prior[np.ix_(at, at)] + np.diag(noise[at]))
        return everything + gain @ (outcome - everything[at]), prior - gain @ prior[at]

    for i in range(4):
        mu, sigma = without(("base", i))
        rows = np.arange(3 * i, 3 * i + 3)
        np.testing.assert_allclose(values.value[rows], mu[rows], atol=1e-4)
        np.testing.assert_allclose(values.variance[rows], np.diag(sigma)[rows], atol=1e-5)
        np.testing.assert_allclose(
            values.covariance[rows], [sigma[rows[0], rows[1]], sigma[rows[1], rows[2]], 0],
            atol=1e-5,
        )  # fmt: skip
    for q in range(5):
        mu, sigma = without(("branch", q))
        rows = size + length * q + np.arange(length)
        np.testing.assert_allclose(branches.value[q], mu[rows], atol=1e-4)
        np.testing.assert_allclose(branches.variance[q], np.diag(sigma)[rows], atol=1e-5)
        np.testing.assert_allclose(
            branches.covariance[q], [sigma[rows[0], rows[1]], sigma[rows[1], rows[2]], 0],
            atol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize("mode", refine.REFINE_MODES)
def test_covariances_of_neighbours_stay_inside_a_rollout_and_within_bounds(mode):
    rng = np.random.default_rng(0)
    value, ensemble, spread, _, mean, count, outcome = draw_step(rng, scales(**WORLDS["all"]))
    features = structured_errors(scales(**WORLDS["all"]), ensemble, spread.reshape(GRID))
    noise = refine.outcome_noise(spread, errors.variances(features))
    first = np.arange(TASKS * ROLLOUTS) * STATES
    total, with_own = mean * count, count.copy()
    total[first] += outcome.reshape(-1)
    with_own[first] += 1
    mask = np.arange(value.size) % STATES < STATES - 1
    got, _ = refine_pool(
        value, features, noise, total / np.maximum(with_own, 1), with_own, mask, states=STATES,
        mode=mode, own_state=np.repeat(first, STATES),
        own_outcome=np.repeat(outcome.reshape(-1), STATES).astype(np.float32),
    )  # fmt: skip
    # The last row of a rollout does not exist, so the one before it is its last state.
    assert np.all(got.covariance[STATES - 2 :: STATES] == 0)
    inside = (np.arange(value.size) % STATES < STATES - 2)[:-1]
    bound = np.sqrt(got.variance[:-1] * got.variance[1:])[inside]
    assert np.all(np.abs(got.covariance[:-1][inside]) <= bound + 1e-6)
    assert np.mean(got.covariance[:-1][inside] / bound) > 0.3
    with pytest.raises(ValueError, match="'both'.*joint"):
        refine.refine_pool(value, features, noise, mean, count, mask, states=STATES, mode="both")
