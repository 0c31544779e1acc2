"""Plans against dense Gaussian conditioning in float64, and the rules of every plan."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.branching import acquisition, cut_points, features, published, state_weights
from focus.branching.acquisition import RULES
from focus.branching.features import StateFeatures
from focus.branching.plan import condition
from focus.branching.plan import plan as plan_eagerly

PROPERTY = settings(deadline=None, max_examples=25)
EER = "expected_error_reduction"
plan = jax.jit(plan_eagerly, static_argnames=("rule", "ks", "max_picks", "max_per_state"))
rule_plan = functools.partial(plan, key=jax.random.key(0))


def make_features(seed, states=8, dims=3, scale=0.4, **fields):
    rng = np.random.default_rng(seed)
    defaults = {
        "mean": rng.uniform(size=states),
        "error_features": rng.normal(size=(states, dims)) * scale,
        "noise_var": rng.uniform(0.05, 0.25, states),
        "cost": rng.uniform(20, 200, states),
        "weight": rng.dirichlet(np.ones(states)),
        "mask": np.ones(states, bool),
        "score_norm": rng.uniform(1, 9, states),
        "next_state": np.where(np.arange(states) % 4 == 3, -1, np.arange(states) + 1),
        "entropy": rng.uniform(0, 2, states),
        "nll": rng.uniform(0, 2, states),
        "log_ratio": rng.normal(size=states) * 0.1,
        "rollout": np.arange(states) // 4,
        "score": rng.uniform(size=states),
        "cut": np.ones(states, bool),
    }
    arrays = {**defaults, **fields}
    kinds = {"mask": bool, "cut": bool, "next_state": jnp.int32, "rollout": jnp.int32}
    return StateFeatures(
        **{k: jnp.asarray(v, kinds.get(k, jnp.float32)) for k, v in arrays.items() if v is not None}
    )


def as_float64(features):
    channels = {f.name: getattr(features, f.name) for f in dataclasses.fields(features)}
    return {k: np.asarray(v, np.float64) for k, v in channels.items() if v is not None}


def dense_condition(covariance, s, noise):
    return covariance - np.outer(covariance[:, s], covariance[s]) / (covariance[s, s] + noise)


def dense_greedy(features, budget, ks, max_picks=10**9, cap=10**9):
    """Every (s, k) tried at every pick, on the S x S covariance."""
    f = as_float64(features)
    covariance = f["error_features"] @ f["error_features"].T
    count, left, order = np.zeros(len(f["mean"]), int), float(budget), []
    while len(order) < max_picks:
        best, choice = 0.0, None
        for s in np.flatnonzero(f["mask"]):
            for k in ks:
                price = k * f["cost"][s]
                if price > left or count[s] + k > cap:
                    continue
                after = dense_condition(covariance, s, f["noise_var"][s] / k)
                density = f["weight"] @ (np.diag(covariance) - np.diag(after)) / price
                if density > best:
                    best, choice = density, (s, k, price, after)
        if choice is None:
            break
        s, k, price, covariance = choice
        count[s] += k
        left -= price
        order.append(s)
    return count, order, budget - left, covariance


# --- expected error reduction --------------------------------------------------------------------


@pytest.mark.parametrize("ks", [(1, 2, 4), (3,)])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_equals_exhaustive_search_on_the_dense_covariance(seed, ks):
    features = make_features(seed)
    got = rule_plan(features, 1500, rule=EER, ks=ks, max_picks=40)
    count, order, spent, covariance = dense_greedy(features, 1500, ks)
    assert len(order) > 4
    np.testing.assert_array_equal(got.count, count)
    np.testing.assert_array_equal(
        got.order, np.pad(order, (0, 40 - len(order)), constant_values=-1)
    )
    np.testing.assert_allclose(got.expected_cost, spent, rtol=1e-5)
    f = as_float64(features)
    fall = np.sum(f["error_features"] ** 2, axis=1) - np.diag(covariance)
    np.testing.assert_allclose(got.gain, f["weight"] @ fall, rtol=1e-4)


@PROPERTY
@given(st.integers(0, 2**31))
def test_conditioned_features_have_the_posterior_covariance(seed):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(6, 3)).astype(np.float32)
    covariance = features.astype(np.float64) @ features.T
    for s, noise in zip(rng.integers(0, 6, 4), rng.uniform(0.01, 1, 4)):
        features = condition(features, s, noise)
        covariance = dense_condition(covariance, s, noise)
    np.testing.assert_allclose(features @ features.T, covariance, atol=1e-4)


def test_many_picks_do_not_drift_from_the_dense_covariance():
    features = make_features(1, states=12, dims=5)
    got = rule_plan(features, 15_000, rule=EER, ks=(1,), max_picks=500)
    count, order, _, covariance = dense_greedy(features, 15_000, (1,))
    assert 200 < len(order) < 500
    np.testing.assert_allclose(got.count, count, atol=1)
    f = as_float64(features)
    fall = np.sum(f["error_features"] ** 2, axis=1) - np.diag(covariance)
    np.testing.assert_allclose(got.gain, f["weight"] @ fall, rtol=1e-4)


def test_without_epistemic_variance_nothing_is_worth_a_branch():
    features = make_features(0, error_features=np.zeros((8, 3)))
    got = rule_plan(features, 10_000, rule=EER)
    assert int(got.count.sum()) == 0 and float(got.gain) == 0 and np.all(got.order == -1)


def test_independent_states_reduce_to_their_own_variance():
    tau2 = np.array([0.01, 0.16, 0.04, 0.09])
    features = make_features(
        0, states=4, error_features=np.diag(np.sqrt(tau2)), noise_var=np.full(4, 0.1),
        cost=np.full(4, 10), weight=np.full(4, 0.25),
    )  # fmt: skip
    np.testing.assert_allclose(
        acquisition.expected_error_reduction(features),
        0.25 * tau2**2 / (tau2 + 0.1) / 10,
        rtol=1e-5,
    )
    got = rule_plan(features, 40, rule=EER, ks=(1,), max_per_state=1)
    np.testing.assert_array_equal(got.order[:4], np.argsort(-tau2))


def test_a_state_whose_error_is_shared_beats_an_equally_uncertain_lone_one():
    features = make_features(
        0, states=4, error_features=[[0, 0.3], [0.3, 0], [0.3, 0], [0.3, 0]],
        noise_var=np.full(4, 0.1), cost=np.full(4, 10), weight=np.full(4, 0.25),
    )  # fmt: skip
    assert int(rule_plan(features, 10, rule=EER, ks=(1,)).order[0]) == 1


@pytest.mark.parametrize("field, winner", [("weight", 2), ("cost", 0)])
def test_the_heavier_and_the_cheaper_state_win(field, winner):
    equal = {
        "error_features": np.eye(3) * 0.3, "noise_var": np.full(3, 0.1),
        "cost": np.full(3, 10.0), "weight": np.full(3, 1 / 3),
    }  # fmt: skip
    features = make_features(0, states=3, **{**equal, field: equal[field] * [1, 2, 3]})
    assert int(rule_plan(features, 30, rule=EER, ks=(1,)).order[0]) == winner


def test_smallest_k_leads_and_larger_ones_serve_when_picks_are_few():
    features = make_features(2)
    fine = rule_plan(features, 1500, rule=EER, ks=(1, 2, 4), max_picks=40)
    alone = rule_plan(features, 1500, rule=EER, ks=(1,), max_picks=40)
    np.testing.assert_array_equal(fine.count, alone.count)
    coarse = rule_plan(features, 1500, rule=EER, ks=(4,), max_picks=40)
    assert float(coarse.gain) <= float(fine.gain)


# --- uniform and random --------------------------------------------------------------------------


def test_uniform_branches_every_state_when_all_fit():
    features = make_features(3, cost=np.full(8, 10))
    got = rule_plan(features, 8 * 4 * 10, rule="uniform", ks=(4,))
    np.testing.assert_array_equal(got.count, 4)
    assert float(got.expected_cost) == 320


@pytest.mark.parametrize("chosen", [40, 80, 133])
def test_uniform_thins_evenly_and_locks_on_to_no_turn(chosen):
    turns, rows = 8, 40
    features = make_features(3, states=turns * rows, cost=np.full(turns * rows, 10))
    got = rule_plan(features, chosen * 2 * 10, rule="uniform", ks=(2,))
    picked = np.flatnonzero(got.count)
    assert len(picked) == chosen and set(np.asarray(got.count)) == {0, 2}
    gaps = np.diff(np.append(picked, picked[0] + turns * rows))
    assert gaps.max() <= 2.7 * turns * rows / chosen and len(set(gaps)) <= 4
    per_turn = np.bincount(picked % turns, minlength=turns)
    assert per_turn.min() >= 0.4 * chosen / turns and per_turn.max() <= 1.6 * chosen / turns


def test_uniform_passes_over_what_does_not_fit_whole():
    features = make_features(3, states=3, cost=np.array([10, 1000, 10]))
    got = rule_plan(features, 100, rule="uniform", ks=(1, 4))
    np.testing.assert_array_equal(got.count, [4, 0, 4])


def test_random_gives_every_state_the_same_chance():
    features = make_features(4, states=5, cost=np.full(5, 10), mask=[1, 1, 0, 1, 1])
    keys = jax.random.split(jax.random.key(0), 800)
    counts = jax.vmap(lambda k: plan(features, 20, rule="random", ks=(1,), key=k).count)(keys)
    np.testing.assert_allclose(counts.mean(axis=0), [0.5, 0.5, 0, 0.5, 0.5], atol=0.08)


# --- rules that hold for every plan --------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@PROPERTY
@given(st.integers(0, 2**31), st.floats(0, 4000), st.sampled_from([None, 3]))
def test_no_plan_passes_the_budget_or_the_cap_or_touches_padding(rule, seed, budget, cap):
    rng = np.random.default_rng(seed)
    mask, existing = rng.uniform(size=8) < 0.7, rng.integers(0, 4, 8)
    features = make_features(seed, mask=mask)
    got = rule_plan(
        features, budget, rule=rule, ks=(1, 2, 4), max_picks=16, existing_count=existing,
        max_per_state=cap,
    )  # fmt: skip
    count = np.asarray(got.count)
    assert np.all(count >= 0) and not np.any(count[~mask])
    cost = count @ np.asarray(features.cost, np.float64)
    assert cost <= budget * (1 + 1e-6)
    np.testing.assert_allclose(got.expected_cost, cost, rtol=1e-5)
    if cap is not None:
        assert np.all((count + existing <= cap) | (count == 0))
    picks = np.asarray(got.order)
    assert set(picks[picks >= 0]) == set(np.flatnonzero(count))
    used = np.sum(picks >= 0)
    assert np.all(picks[used:] == -1) and float(got.gain) >= -1e-6


@pytest.mark.parametrize("rule", RULES)
def test_padding_may_hold_nan_and_changes_no_plan(rule):
    features = make_features(5)
    padded = StateFeatures(**{
        f.name: jnp.pad(x, [(0, 3)] + [(0, 0)] * (x.ndim - 1),
                        constant_values=jnp.nan if x.dtype == jnp.float32 else 0)
        for f in dataclasses.fields(features) if (x := getattr(features, f.name)) is not None
    })  # fmt: skip
    got = rule_plan(padded, 900, rule=rule, ks=(1, 2))
    assert np.all(got.count[8:] == 0) and np.isfinite(float(got.gain)) and got.count.sum() > 0
    if rule != "random":  # draws depend on the shape
        want = rule_plan(features, 900, rule=rule, ks=(1, 2))
        np.testing.assert_array_equal(got.count[:8], want.count)
        np.testing.assert_allclose(got.gain, want.gain, rtol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_scores_and_plans_with_one_signature(rule):
    features = make_features(6, mask=np.arange(8) != 2, branch_count=np.zeros(8))
    scores = RULES[rule].scores(features, jax.random.key(1))
    assert scores.shape == (8,) and scores[2] == -np.inf
    assert np.all(np.isfinite(np.delete(np.asarray(scores), 2)))
    got = rule_plan(features, 10**6, rule=rule, max_picks=5)
    assert got.count.shape == (8,) and got.count.dtype == jnp.int32 and got.order.shape == (5,)
    assert np.sum(got.order >= 0) == 5 and 0 < np.count_nonzero(got.count) <= 5
    first = int(rule_plan(features, 2000, rule=rule, ks=(1,), key=jax.random.key(1)).order[0])
    assert first == int(np.argmax(scores))


def test_error_reduction_gains_most_at_the_same_budget():
    gains = {rule: [] for rule in (EER, "uniform", "random")}
    for seed in range(5):
        features = make_features(seed, states=20, dims=4)
        for rule in (EER, "uniform", "random"):
            gains[rule].append(float(rule_plan(features, 1000, rule=rule, ks=(1,)).gain))
    assert np.all(np.array(gains[EER]) > gains["uniform"])
    assert np.all(np.array(gains[EER]) > gains["random"])


def test_a_second_round_with_the_posterior_continues_the_first():
    from focus.credit.refine import posterior_features

    features = make_features(7, cost=np.full(8, 100))
    whole = rule_plan(features, 1000, rule=EER, ks=(1,))
    first = rule_plan(features, 400, rule=EER, ks=(1,))
    after = posterior_features(features.error_features, features.noise_var, first.count)
    second = rule_plan(
        dataclasses.replace(features, error_features=after), 600, rule=EER, ks=(1,),
        existing_count=first.count,
    )  # fmt: skip
    np.testing.assert_array_equal(first.count + second.count, whole.count)
    assert float(first.gain + second.gain) == pytest.approx(float(whole.gain), rel=1e-4)


def test_bad_arguments_are_refused_with_the_way_out():
    features = make_features(0)
    for match, arguments in (
        ("'greedy' is unknown.*'uniform'", {"rule": "greedy"}),
        ("ks=.*>= 1", {"rule": EER, "ks": (0, 1)}),
        ("ks=.*>= 1", {"rule": EER, "ks": ()}),
        ("max_picks must be >= 1, got 0", {"rule": EER, "max_picks": 0}),
        ("max_per_state must be >= 1 or None", {"rule": EER, "max_per_state": 0}),
        ("random rule needs key", {"rule": "random"}),
    ):
        with pytest.raises(ValueError, match=match):
            plan_eagerly(features, 100, **arguments)


def test_budgets_rounds_and_pools_of_one_size_compile_once():
    traces = []

    @jax.jit
    def traced(features, budget, existing):
        traces.append(None)
        return plan_eagerly(features, budget, rule=EER, max_picks=4, existing_count=existing)

    for seed, budget in ((0, 100), (1, 5000), (2, 0)):
        traced(make_features(seed), budget, jnp.full(8, seed))
    assert len(traces) == 1


# --- rules of others, and what they read ---------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_without_its_channel_names_it_and_who_fills_it(rule):
    for name in RULES[rule].channels:
        bare = make_features(0, **{name: None})
        if name == "branch_count":
            with pytest.raises(ValueError, match=f"{rule}.*branch_count.*existing_count"):
                RULES[rule].scores(bare, None)
            assert int(plan_eagerly(bare, 500, rule=rule, ks=(1,)).count.sum()) > 0
        else:
            with pytest.raises(ValueError, match=f"'{rule}' needs the channel '{name}'.*None"):
                plan_eagerly(bare, 100, rule=rule)
    bare = make_features(0, **dict.fromkeys(set(features.CHANNELS) - set(RULES[rule].channels)))
    if "branch_count" not in RULES[rule].channels:
        assert np.all(np.isfinite(RULES[rule].scores(bare, jax.random.key(0))))


def test_scores_of_published_rules_by_hand():
    pool = make_features(
        0, states=3, mean=[0.5, 0.1, 1.0], entropy=[1, 1.02, 0.5], branch_count=[0, 1, 0],
        nll=[0.8, 1.2, 0.5], score=[0.9, 0.2, 0.6],
    )  # fmt: skip
    np.testing.assert_allclose(published.bernoulli(pool), [0.25, 0.09, 0], atol=1e-7)
    np.testing.assert_allclose(published.mixed_outcome(pool, count=2), [0.5, 0.18, 0], atol=1e-6)
    np.testing.assert_allclose(published.at2po(pool), [1, 0.97, 0.5])
    np.testing.assert_allclose(published.carl(pool), [0.8, 0.6, 0.5])
    np.testing.assert_allclose(published.policy_entropy(pool), [1, 1.02, 0.5])
    np.testing.assert_allclose(published.patr(pool), [0.9, 0.2, 0.6])
    np.testing.assert_allclose(
        published.trace(pool), [0.5, 0.1 * 0.9**2 + 0.9 * 0.1**2, 0], atol=1e-6
    )


def test_trace_sums_to_the_probability_of_a_mixed_group():
    pool = make_features(0, states=2, mean=[0.3, 0.8])
    total = sum(
        published.trace(dataclasses.replace(pool, branch_count=jnp.full(2, n))) for n in range(3)
    )
    np.testing.assert_allclose(total, published.mixed_outcome(pool, count=4), rtol=1e-5)


def test_appo_puts_states_with_two_positive_scores_first():
    pool = make_features(
        0, states=6, rollout=[0, 0, 0, 0, 1, 1], mask=[1, 1, 1, 1, 1, 0],
        entropy=[2, 0.5, 0.5, 1, 7, np.nan], log_ratio=[0.1, -0.1, -0.1, 0.05, 0.1, np.nan],
    )  # fmt: skip
    scores = np.asarray(published.appo(pool))
    assert np.argmax(scores) == 0 and scores[0] > 1 and scores[5] == -np.inf
    # Two negatives multiply to a positive product, and still come behind.
    assert 0 < scores[1] < 1
    entropy, omega = np.array([2, 0.5, 0.5, 1]), np.exp([0.1, -0.1, -0.1, 0.05])
    z = (entropy - entropy.mean()) / entropy.std(), (omega - omega.mean()) / omega.std()
    np.testing.assert_allclose(np.arctanh(4 * (scores[:4] % 1)), np.prod(z, axis=0), atol=1e-4)


def test_carl_goes_back_to_a_state_as_long_as_it_is_ahead():
    pool = make_features(0, states=2, nll=[1.0, 0.3], cost=[10, 10])
    got = plan(pool, 50, rule="carl", ks=(1, 4))
    np.testing.assert_array_equal(got.order[:5], [0, 0, 0, 1, 0])
    again = plan(pool, 20, rule="carl", ks=(1,), existing_count=jnp.array([9, 0]))
    np.testing.assert_array_equal(again.count, [0, 2])
    full = plan(pool, 50, rule="carl", ks=(1,), max_per_state=2)
    np.testing.assert_array_equal(full.count, [2, 2])


def test_spo_samples_at_cut_points_alone():
    got = cut_points(jnp.array([3, 1, 2, 0, 9, 7]), jnp.array([1, 1, 1, 1, 1, 0], bool))
    np.testing.assert_array_equal(got, [1, 0, 0, 1, 0, 1, 0])
    pool = make_features(0, cut=np.arange(8) % 3 == 0)
    planned = plan(pool, 1e6, rule="spo", ks=(2,))
    np.testing.assert_array_equal(planned.count, [2, 0, 0, 2, 0, 0, 2, 0])
    with pytest.raises(ValueError, match="every must be >= 1"):
        cut_points(jnp.zeros(2), jnp.ones(2, bool), every=0)


def test_variance_reduction_is_error_reduction_of_independent_errors():
    pool = make_features(3)
    tau2 = np.sum(np.square(as_float64(pool)["error_features"]), axis=1)
    alone = dataclasses.replace(pool, error_features=jnp.diag(jnp.sqrt(jnp.float32(tau2))))
    np.testing.assert_allclose(
        acquisition.variance_reduction(pool), acquisition.expected_error_reduction(alone), rtol=1e-4
    )
    np.testing.assert_allclose(acquisition.epistemic(pool), tau2, rtol=1e-5)
    got = rule_plan(pool, 1500, rule="variance_reduction", ks=(1, 2), max_picks=40)
    want = rule_plan(alone, 1500, rule=EER, ks=(1, 2), max_picks=40)
    np.testing.assert_array_equal(got.count, want.count)


def slow_improvement(pool):
    f = as_float64(pool)
    covariance = f["error_features"] @ f["error_features"].T
    scores = np.full(len(f["mean"]), -np.inf)
    for s in np.flatnonzero(f["mask"]):
        total, here = 0.0, s
        while here >= 0:
            after = int(f["next_state"][here])
            if after >= 0:
                step = (f["mean"][after] - f["mean"][here]) ** 2 + covariance[after, after]
                step += covariance[here, here] - 2 * covariance[here, after]
            else:
                step = f["noise_var"][here] + covariance[here, here]
            total += f["score_norm"][here] * step if f["mask"][here] else 0.0
            here = after
        scores[s] = total / f["cost"][s]
    return scores


@pytest.mark.parametrize("seed", range(3))
def test_policy_improvement_equals_a_walk_along_the_rollout(seed):
    pool = make_features(seed, states=12)
    np.testing.assert_allclose(
        acquisition.policy_improvement(pool), slow_improvement(pool), rtol=1e-4
    )
    ended = np.asarray(pool.next_state) < 0  # the state before an end may have no room to branch
    part = dataclasses.replace(pool, mask=~jnp.asarray(ended))
    scores = np.asarray(acquisition.policy_improvement(part))
    np.testing.assert_allclose(scores, slow_improvement(part), rtol=1e-4)


def test_what_is_settled_teaches_the_policy_nothing():
    chain = {
        "next_state": [1, 2, -1], "score_norm": [5, 5, 5], "cost": [30, 20, 10],
        "error_features": np.zeros((3, 2)),
    }  # fmt: skip
    lost = make_features(0, states=3, mean=np.zeros(3), noise_var=np.zeros(3), **chain)
    np.testing.assert_allclose(acquisition.policy_improvement(lost), 0, atol=1e-6)
    undecided = make_features(0, states=3, mean=[0.5, 0.9, 0.9], noise_var=np.zeros(3), **chain)
    scores = np.asarray(acquisition.policy_improvement(undecided))
    assert np.argmax(scores) == 0  # before the step that decides
    sure = make_features(
        0, states=3, mean=[0.5, 0.9, 0.9], noise_var=np.zeros(3), **{**chain, "score_norm": [0] * 3}
    )
    np.testing.assert_allclose(acquisition.policy_improvement(sure), 0, atol=1e-6)


def test_weights_count_the_two_segments_that_touch_a_state():
    mask = jnp.array([True, True, True, False])
    amount = jnp.array([1.0, 2.0, 4.0, jnp.nan])
    np.testing.assert_array_equal(state_weights(amount, mask), [1, 3, 6, 4, 0])
