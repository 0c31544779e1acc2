"""The league's figures against what they are defined as, and estimators whose quality is known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from focus.lab import exact
from focus.lab.league import Sample, add_batch, no_sums, read_sums
from focus.lab.worlds import make_world, reset, step

WORLD = make_world("fork_chain", tasks=3, length=6, forks=2, rows=4, actions=3, delay=1, seed=3)
POLICY = jax.nn.softmax(WORLD.logits)
T, N, A = WORLD.next_state.shape[:3]
TRUE = exact.values(WORLD, POLICY)
GRADIENT = exact.policy_gradient(WORLD, POLICY)


def episodes(key, rows):
    """Tasks, states, actions and outcomes of `rows` episodes, [B], [B, T], [B, T], [B]."""
    task_key, key = jax.random.split(key)
    task = jax.random.randint(task_key, (rows,), 0, WORLD.num_tasks)

    def turn(carry, t):
        state, key = carry
        key, action_key, step_key = jax.random.split(key, 3)
        logits = jnp.log(POLICY)[WORLD.policy_row[t, state]]
        action = jax.random.categorical(action_key, logits)
        following, outcome, _ = step(WORLD, t, state, action, step_key)
        return (following, key), (state, action, outcome)

    _, (state, action, outcome) = jax.lax.scan(
        turn, (reset(WORLD, key, task), key), jnp.arange(WORLD.num_layers)
    )
    return task, state.T, action.T, outcome[-1]


def oracle(task, state, action, outcome, truth):
    return truth


def monte_carlo(task, state, action, outcome, truth):
    """Unbiased: the outcome against the exact value of the state it was played from."""
    return outcome[:, None] - TRUE.v[jnp.arange(T), state]


def whole_row(task, state, action, outcome, truth):
    """Every turn gets the row's outcome, against the value of the task."""
    return jnp.broadcast_to((outcome - TRUE.v[0, WORLD.start[task]])[:, None], state.shape)


def ten_times(*args):
    return 10 * monte_carlo(*args)


def constant(task, state, *args):
    return jnp.full(state.shape, 0.3)


def silent(task, state, *args):
    return jnp.zeros(state.shape)


CREDITS = (oracle, monte_carlo, whole_row, ten_times, constant, silent)
BATCHES = 800


def samples(key, rows=8):
    """One batch, as each of `CREDITS` judges it."""
    task, state, action, outcome = episodes(key, rows)
    t = jnp.arange(T)
    truth = TRUE.a[t, state, action]
    return [
        Sample(
            estimate=credit(task, state, action, outcome, truth),
            truth=truth,
            weight=jnp.ones(state.shape),
            state_action=(t * N + state) * A + action,
            policy_row=WORLD.policy_row[t, state],
            action=action,
            tokens=jnp.float32(state.size),
        )
        for credit in CREDITS
    ]


@pytest.fixture(scope="module")
def measured():
    """Credit -> what many batches say of it."""

    @jax.jit
    def run(keys):
        def body(sums, key):
            batch = samples(key)
            return [add_batch(s, b, POLICY, GRADIENT) for s, b in zip(sums, batch)], None

        start = [no_sums(T * N * A, POLICY) for _ in CREDITS]
        sums, _ = jax.lax.scan(body, start, keys)
        return [read_sums(s) for s in sums]

    found = run(jax.random.split(jax.random.key(0), BATCHES))
    return {c: {k: float(v) for k, v in f.items()} for c, f in zip(CREDITS, found)}


def test_the_oracle_agrees_with_itself_and_has_no_bias(measured):
    found = measured[oracle]
    assert found["correlation"] == pytest.approx(1, abs=1e-5)
    assert found["sign_agreement"] == 1
    assert found["squared_bias"] == found["squared_error"] == 0
    assert found["tokens"] == 8 * T


def test_monte_carlo_is_unbiased_and_noisy(measured):
    """Var[outcome | s, a] = q (1 - q) is all that it errs by."""
    found = measured[monte_carlo]
    here = np.asarray(exact.occupancy(WORLD, POLICY))[..., None] * POLICY[WORLD.policy_row]
    wanted = float(np.sum(here * TRUE.q * (1 - TRUE.q)) / np.sum(here))
    assert abs(found["squared_bias"]) < 0.02 * wanted
    assert found["squared_error"] == pytest.approx(wanted, rel=0.1)
    assert 0.3 < found["correlation"] < 0.9


def test_credit_of_the_whole_row_is_biased_by_what_went_before(measured):
    """E[estimate | s, a] = q(s, a) - v(start), which is off by v(s) - v(start)."""
    found = measured[whole_row]
    here = np.asarray(exact.occupancy(WORLD, POLICY))
    task = np.arange(N) // (N // WORLD.num_tasks)
    shift = np.asarray(TRUE.v)[:-1] - np.asarray(TRUE.v)[0, np.asarray(WORLD.start)[task]]
    wanted = np.sum(here * shift**2) / np.sum(here)
    assert found["squared_bias"] == pytest.approx(wanted, rel=0.25) and wanted > 0.01
    assert found["correlation"] < measured[monte_carlo]["correlation"]


@pytest.mark.parametrize("credit", [oracle, monte_carlo, whole_row])
def test_expected_gradients_are_true_ones(measured, credit):
    """All three are policy gradients: a baseline that ignores the action changes no expectation."""
    found = measured[credit]
    norm = 8 * float(jnp.linalg.norm(GRADIENT))  # eight episodes a batch
    assert found["along"] == pytest.approx(norm, rel=0.15)
    assert found["squared_gradient"] == pytest.approx(norm**2, rel=0.3)
    assert found["along"] / np.sqrt(found["squared_gradient"]) == pytest.approx(1, abs=0.08)


def test_less_noise_is_more_signal(measured):
    ratio = {c: measured[c]["squared_along"] / measured[c]["noise"] for c in CREDITS[:3]}
    assert ratio[oracle] > ratio[monte_carlo] > ratio[whole_row] > 0


def test_a_scale_moves_neither_correlation_nor_signal_to_noise(measured):
    one, ten = measured[monte_carlo], measured[ten_times]
    for name in ("correlation", "sign_agreement"):
        assert ten[name] == pytest.approx(one[name], rel=1e-4)
    for name in ("squared_along", "noise", "squared_gradient"):
        assert ten[name] == pytest.approx(100 * one[name], rel=1e-3)


def test_credit_that_never_varies_has_no_correlation(measured):
    assert measured[constant]["correlation"] == 0
    assert measured[silent]["sign_agreement"] == 0.5
    assert measured[silent]["noise"] == 0


def test_sums_are_what_a_slow_loop_finds():
    keys = jax.random.split(jax.random.key(5), 4)
    batches = [jax.jit(samples)(key)[1] for key in keys]
    # Some segments are left out, as those of padding rows are: what stands there must not count.
    masks = [jax.random.bernoulli(key, 0.7, b.weight.shape) for key, b in zip(keys, batches)]
    batches = [
        dataclasses.replace(
            b,
            weight=jnp.where(m, 2.0, 0.0),
            estimate=jnp.where(m, b.estimate, jnp.nan),
            truth=jnp.where(m, b.truth, jnp.nan),
        )
        for b, m in zip(batches, masks)
    ]
    sums = no_sums(T * N * A, POLICY)
    for batch in batches:
        sums = jax.jit(add_batch)(sums, batch, POLICY, GRADIENT)
    found = {name: float(value) for name, value in read_sums(sums).items()}

    pi, direction = np.asarray(POLICY), np.asarray(GRADIENT) / np.linalg.norm(GRADIENT)
    e, t, where, gradients = [], [], [], []
    for number, batch in enumerate(batches):
        g = np.zeros(pi.shape)
        for b, s in np.argwhere(np.asarray(batch.weight) > 0):
            e.append(float(batch.estimate[b, s]))
            t.append(float(batch.truth[b, s]))
            where.append((int(batch.state_action[b, s]), number))
            row, action = int(batch.policy_row[b, s]), int(batch.action[b, s])
            g[row] += 2.0 * e[-1] * (np.eye(A)[action] - pi[row])
        gradients.append(g)
    e, t, cells = np.array(e), np.array(t), np.array([w[0] for w in where])
    batch_of = np.array([w[1] for w in where])
    assert found["correlation"] == pytest.approx(np.corrcoef(e, t)[0, 1], abs=1e-4)
    decided = np.abs(t) > 1e-6
    agrees = np.where(e == 0, 0.5, np.sign(e) == np.sign(t))
    assert found["sign_agreement"] == pytest.approx(np.mean(agrees[decided]))
    bias, weights, errors = [], [], []
    for cell in set(cells):
        here = cells == cell
        products = [
            x * y
            for x, i in zip((e - t)[here], batch_of[here])
            for y, j in zip((e - t)[here], batch_of[here])
            if i != j
        ]
        if products:
            bias.append(np.mean(products))
            weights.append(np.sum(here))
            errors.append(np.sum((e - t)[here] ** 2))
    assert found["squared_bias"] == pytest.approx(np.average(bias, weights=weights), abs=1e-5)
    assert found["squared_error"] == pytest.approx(np.sum(errors) / np.sum(weights), rel=1e-4)
    pairs = [(g, h) for i, g in enumerate(gradients) for j, h in enumerate(gradients) if i != j]
    squared = np.mean([np.sum(g * h) for g, h in pairs])
    assert found["squared_gradient"] == pytest.approx(squared, rel=1e-3, abs=1e-5)
    along = [np.sum(g * direction) for g in gradients]
    assert found["along"] == pytest.approx(np.mean(along), rel=1e-4)
    wanted = np.mean([a * b for i, a in enumerate(along) for j, b in enumerate(along) if i != j])
    assert found["squared_along"] == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    norms = np.mean([np.sum(g**2) for g in gradients])
    assert found["noise"] == pytest.approx(norms - squared, rel=1e-3)
