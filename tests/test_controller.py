"""The controller: a step's tokens, never one more; branches return to their parents' states."""

import asyncio
import dataclasses
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fakes import CHAT, CountTo, FakeEngine, check_tokens, make_agent, sampled

from focus.branching import RULES
from focus.credit.structure import CovarianceScales
from focus.rollout import (
    EpisodeCost,
    StepConfig,
    collect,
    make_beliefs,
    validate_step,
)
from focus.rollout import belief as belief_module
from focus.rollout.accounting import reuse_by_kind
from focus.types import Generation, PolicySignals, StateBelief

END = CHAT.end_of_turn_id
EER = "expected_error_reduction"
BRANCHING = dict(base_fraction=0.5, rule=EER, ks=(1, 2), group_size=2, state_bucket=256)


def score(trajectories, *, cost=12.0, noise_var=0.2):
    """A critic with opinions and correlated errors; as wide for any number of states."""
    shape = (len(trajectories), max(len(t.states) for t in trajectories))
    rng = np.random.default_rng(0)
    mean, errors = rng.uniform(size=shape), 0.3 * rng.normal(size=(*shape, 4))
    return StateBelief(
        mean=mean,
        error_features=errors,
        variance=np.sum(errors**2, axis=-1),
        noise_var=np.full(shape, noise_var),
        cost=np.full(shape, cost),
    )


def score_independent(trajectories):
    """As `score`, with independent errors and outcomes that settle a state at once."""
    scores = score(trajectories, noise_var=1e-4)
    errors = np.zeros((*scores.mean.shape, 128))
    rows = [(b, j) for b, t in enumerate(trajectories) for j in range(len(t.states))]
    for row, (b, j) in enumerate(rows):
        errors[b, j, row] = 0.4
    return dataclasses.replace(scores, error_features=errors)


def step(config, agent, *, scorer=score, episode_tokens=15.0, num_tasks=38, number=3, **kwargs):
    return asyncio.run(
        collect(
            config,
            agent,
            agent.env.tasks("train")[:num_tasks],
            step=number,
            episode_cost=EpisodeCost(episode_tokens, weight=10.0),
            scorer=scorer,
            **kwargs,
        )
    )


def spent(collected):
    return sum(t.num_tokens for t in collected.tree.trajectories)


def test_without_branches_whole_groups_spend_the_budget():
    config = StepConfig(budget=600, group_size=4)
    engine = FakeEngine()
    collected = step(config, make_agent(engine), scorer=None)
    tree = collected.tree
    assert tree.branches == () and collected.beliefs is None and collected.plans == ()
    assert collected.ledger.spent == spent(collected) == engine.generated <= 600
    assert collected.ledger.branch == 0 and 600 - spent(collected) < 2 * 4 * 15 * 1.1
    # Results in order of launching, whole groups, ids that say where they belong.
    ids = [t.id for t in tree.base]
    assert ids == [f"3/{g}.{m}" for g in range(collected.num_tasks) for m in range(4)]
    assert all(t.task_id == f"train/{t.group_id + 2}" for t in tree.base)
    assert len({(t.group_id, t.segments[0].text) for t in tree.base}) > collected.num_tasks


def test_groups_are_launched_later_when_the_first_were_cheaper_than_predicted():
    config = StepConfig(budget=600, group_size=2)
    cheap = make_agent(FakeEngine(policy=lambda request: "stop"))
    collected = step(config, cheap, scorer=None, episode_tokens=60.0)
    at_start = 600 // (2 * 60 * 1.1)
    assert collected.num_tasks > 4 * at_start
    assert collected.episode_cost.tokens < 60 / 4


def test_a_base_share_that_was_predicted_too_low_takes_from_the_branches_and_cuts_nothing():
    config = StepConfig(budget=400, **BRANCHING)
    collected = step(config, make_agent(), episode_tokens=12.0)
    assert collected.ledger.base > 200
    assert all(t.end != "budget" for t in collected.tree.base)
    assert spent(collected) <= 400


def test_branches_return_to_their_parents_states():
    config = StepConfig(budget=800, **(BRANCHING | {"rule": "uniform"}))
    collected = step(config, make_agent())
    parents = {t.id: t for t in collected.tree.base}
    branches = collected.tree.branches
    assert len(branches) > 5 and len({b.id for b in branches}) == len(branches)
    for branch in branches:
        parent = parents[branch.parent]
        assert branch.states[0] is parent.states[branch.parent_state]
        assert branch.id.rsplit(".", 1)[0] == f"{parent.id}/{branch.parent_state}"
        assert (branch.task_id, branch.group_id) == (parent.task_id, parent.group_id)
        assert branch.segments[0].generations[0].prompt_ids == branch.states[0].prompt_ids
        check_tokens(branch)
    firsts = {(b.parent, b.parent_state, b.segments[0].text) for b in branches}
    assert len(firsts) > len({pair[:2] for pair in firsts})  # continuations differ
    # Continuations of one state count up, over all rounds.
    for stat in collected.branch_stats:
        own = [b for b in branches if (b.parent, b.parent_state) == (stat.trajectory, stat.state)]
        assert [b.id for b in own] == [
            f"{stat.trajectory}/{stat.state}.{m}" for m in range(stat.started)
        ]
        assert stat.mean == np.mean([b.outcome for b in own])
        assert stat.cost_actual == np.mean([b.num_tokens for b in own])
        assert stat.refined_std < stat.std


def test_a_step_is_the_same_twice():
    config = StepConfig(budget=700, **BRANCHING)
    first, second = step(config, make_agent()), step(config, make_agent())
    assert first.tree == second.tree
    for a, b in zip(first.plans, second.plans, strict=True):
        np.testing.assert_array_equal(a.order, b.order)
    assert step(config, make_agent(seed=1)).tree != first.tree


def test_a_rollout_does_not_depend_on_those_that_run_beside_it():
    config = StepConfig(budget=700, **BRANCHING)
    many = {t.id: t for t in step(config, make_agent()).tree.base}
    few = step(dataclasses.replace(config, concurrency=2), make_agent()).tree.base
    shared = [t for t in few if t.id in many]
    assert len(shared) > 5
    assert all(t == many[t.id] for t in shared)


@pytest.mark.parametrize("rule", [EER, "uniform", "random"])
def test_rounds_are_bounded_and_plan_with_their_part_of_what_is_left(rule):
    config = StepConfig(budget=900, rounds=3, **(BRANCHING | {"rule": rule}))
    lefts = []
    original = belief_module.StateBeliefs.plan

    def spy(self, budget, **kwargs):
        lefts.append(budget)
        return original(self, budget, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(belief_module.StateBeliefs, "plan", spy)
        collected = step(config, make_agent())
    assert len(lefts) == len(collected.plans) == 3
    left = 900 - collected.ledger.base
    assert lefts[0] == left // 3
    for plan, budget in zip(collected.plans, lefts, strict=True):
        assert plan.expected_cost <= budget
    planned = sum(int(plan.count.sum()) for plan in collected.plans)
    assert planned >= len(collected.tree.branches) > 0


def test_the_second_round_does_not_pay_again_for_what_is_known():
    # One continuation settles a state, and there are too many states for one round.
    config = StepConfig(budget=700, **(BRANCHING | {"ks": (1,)}))
    collected = step(config, make_agent(), scorer=score_independent)
    first, second = (np.flatnonzero(plan.count) for plan in collected.plans)
    assert len(first) and len(second) and not set(first) & set(second)


def test_max_per_state_holds_over_rounds():
    config = StepConfig(
        budget=6000,
        base_fraction=0.03,
        rule="uniform",
        ks=(1, 2),
        max_per_state=3,
        rounds=3,
        group_size=2,
        state_bucket=256,
    )
    collected = step(config, make_agent())
    assert {stat.started for stat in collected.branch_stats} == {3}
    branchable = int(collected.beliefs.branchable.sum())
    assert len(collected.branch_stats) == branchable


def test_a_branch_without_an_outcome_is_no_evidence():
    def fault(request, attempt):
        return "fail" if request.rid.count("/") == 2 and request.seed % 2 else None

    config = StepConfig(budget=800, **BRANCHING)
    collected = step(config, make_agent(FakeEngine(fault=fault)))
    failed = [b for b in collected.tree.branches if b.outcome is None]
    assert failed and collected.technical_failures >= len(failed)
    started = sum(int(plan.count.sum()) for plan in collected.plans)
    counted = int(collected.beliefs.branch_count.sum())
    assert counted == started - collected.technical_failures
    assert counted == sum(stat.count for stat in collected.branch_stats)
    total = sum(b.outcome for b in collected.tree.branches if b.outcome is not None)
    assert collected.beliefs.branch_sum.sum() == total
    for stat in collected.branch_stats:
        assert (stat.mean is None) == (stat.count == 0)
        assert stat.count <= stat.started


def test_a_base_rollout_that_failed_is_counted_and_never_branched():
    def fault(request, attempt):
        return "fail" if request.rid.startswith("3/0.1:2") else None

    policy = lambda request: "add 1" if request.rid.count("/") == 1 else sampled(request)  # noqa: E731
    config = StepConfig(budget=800, **BRANCHING)
    collected = step(config, make_agent(FakeEngine(policy=policy, fault=fault)))
    failed = [t for t in collected.tree.base if t.end == "failed"]
    assert [t.id for t in failed] == ["3/0.1"] and collected.technical_failures == 1
    assert failed[0].outcome is None and len(failed[0].segments) == 2
    assert "3/0.1" not in {branch.parent for branch in collected.tree.branches}
    rows = collected.beliefs.index[:, 0] == 1
    assert not collected.beliefs.exists[: len(rows)][rows].any()


def test_every_finished_rollout_is_reported_once_and_kept():
    seen = []
    config = StepConfig(budget=500, **BRANCHING)
    collected = step(config, make_agent(), on_finished=seen.append)
    assert len({t.id for t in seen}) == len(seen)
    kept = {t.id for t in collected.tree.trajectories}
    assert kept == {t.id for t in seen if t.segments}
    assert all(t.end == "budget" for t in seen if t.id not in kept)


def test_the_ledger_counts_by_purpose():
    def policy(request):
        asked = CHAT.decode(request.input_ids).endswith("sum up")
        return "notes: total" if asked else ("add 1", "add 2", "stop")[request.seed % 3]

    engine = FakeEngine(policy=policy)
    agent = make_agent(
        engine, context="summarize", limit=45, summary_tokens=9, instruction="sum up"
    )
    config = StepConfig(budget=900, **BRANCHING)
    collected = step(config, agent, episode_tokens=25.0)
    ledger, tree = collected.ledger, collected.tree
    by_kind = {"base": 0, "branch": 0, "summary": 0}
    observation = 0
    for trajectory in tree.trajectories:
        purpose = "base" if trajectory.parent is None else "branch"
        for j, segment in enumerate(trajectory.segments):
            act, *rest = segment.generations
            by_kind[purpose] += len(act.output_ids)
            by_kind["summary"] += sum(len(g.output_ids) for g in rest)
            closed = act.output_ids[-1:] == (END,)
            ended = not trajectory.states[j + 1].prompt_ids
            acted = trajectory.end != "budget" or j + 1 < len(trajectory.segments)
            if not ended and acted:
                observation += len(CHAT.encode_observation(segment.observation, closed=closed))
            if rest:
                observation += len(CHAT.encode_user("sum up", closed=False))
    assert by_kind["summary"] > 0
    assert {name: getattr(ledger, name) for name in by_kind} == by_kind
    assert ledger.observation == observation
    prompts = [len(request.input_ids) for request in engine.requests]
    assert ledger.prefill + ledger.cached == sum(prompts)
    assert ledger.cached == sum(n // 2 for n in prompts)
    first = [b.segments[0].generations[0] for b in tree.branches]
    recomputed = sum(len(g.prompt_ids) - 1 - g.cached_tokens for g in first)
    assert collected.recomputed_share == recomputed / sum(len(g.prompt_ids) - 1 for g in first)
    assert set(ledger.seconds) == {"rollout", "tools", "score", "controller"}


@settings(deadline=None, max_examples=30)
@given(
    budget=st.integers(1, 400),
    lengths=st.lists(st.integers(0, 14), min_size=1, max_size=12),
    faults=st.lists(st.sampled_from([None, None, "fail", ("abort", 2)]), min_size=1, max_size=5),
    rule=st.sampled_from([EER, "uniform", "random", "none"]),
    predicted=st.integers(1, 60),
    cost=st.floats(0.1, 50.0),
    concurrency=st.integers(1, 8),
)
def test_no_step_passes_its_budget(budget, lengths, faults, rule, predicted, cost, concurrency):
    engine = FakeEngine(
        policy=lambda request: [9] * lengths[request.seed % len(lengths)] or "stop",
        fault=lambda request, attempt: faults[(request.seed + attempt) % len(faults)],
    )
    agent = make_agent(engine, cap=12, context="summarize", limit=60, summary_tokens=5)
    config = StepConfig(
        budget=budget,
        group_size=2,
        base_fraction=1.0 if rule == "none" else 0.4,
        rule=rule,
        ks=(1, 2),
        concurrency=concurrency,
        state_bucket=256,
    )
    collected = step(
        config, agent, scorer=lambda t: score(t, cost=cost), episode_tokens=float(predicted)
    )
    assert engine.generated == spent(collected) == collected.ledger.spent <= budget
    assert len(collected.tree.base) == 2 * collected.num_tasks > 0


def test_the_predicted_cost_follows_what_episodes_cost_and_escapes_from_far_too_low():
    config = StepConfig(budget=300, group_size=2)
    verbose = make_agent(FakeEngine(policy=lambda request: "add 1 and on and on"), cap=64)
    cost, cut = EpisodeCost(1.0), []
    for number in range(12):
        collected = step(config, verbose, scorer=None, number=number, episode_tokens=cost.tokens)
        cost = collected.episode_cost
        cut.append(np.mean([t.end == "budget" for t in collected.tree.base]))
    episode = 5 * (len(CHAT.encode_text("add 1 and on and on")) + 1)
    assert cut[0] > 0.9 and cut[-1] == 0
    assert abs(cost.tokens / episode - 1) < 0.5
    with pytest.raises(ValueError, match="> 0 tokens"):
        EpisodeCost(0.0)


def one_base(**kwargs):
    collected = step(StepConfig(budget=200, group_size=2), make_agent(**kwargs), scorer=None)
    return collected.tree.base


def test_beliefs_lay_out_states_with_their_weights():
    base = one_base()
    scores = score(base)
    # Nothing is known of terminal states and padding; it must not matter what stands there.
    for b, trajectory in enumerate(base):
        scores.mean[b, len(trajectory.states) :] = np.nan
        if trajectory.end == "terminal":
            scores.error_features[b, len(trajectory.states) - 1] = np.nan
    beliefs = make_beliefs(base, scores, env_branchable=True, max_context=4096, smallest_bucket=16)
    tasks, rollouts, states = beliefs.grid
    assert len(beliefs.mean) == tasks * rollouts * states and rollouts == 2
    assert np.isfinite(beliefs.error_features).all()
    assert beliefs.weight.sum() == pytest.approx(1.0)
    total = sum(
        len(g.output_ids) * (2 if j + 1 < len(t.segments) or t.end != "terminal" else 1)
        for t in base
        for j, s in enumerate(t.segments)
        for g in s.generations
    )
    rows = np.flatnonzero(beliefs.index[:, 0] >= 0)
    assert len(rows) == sum(len(t.states) for t in base)
    for row in rows:
        b, j = beliefs.index[row]
        trajectory = base[b]
        touching = sum(s.num_tokens for s in trajectory.segments[max(j - 1, 0) : j + 1])
        terminal = j == len(trajectory.segments) and trajectory.end == "terminal"
        assert row == beliefs.row(b, j) and row % states == j
        # Rollouts of a task lie in one block, and no others.
        task = [i for i, t in enumerate(base) if t.group_id == trajectory.group_id]
        assert {beliefs.row(i, 0) // (rollouts * states) for i in task} == {
            row // (rollouts * states)
        }
        assert beliefs.exists[row] == (not terminal)
        assert beliefs.branchable[row] == (j < len(trajectory.segments))
        assert beliefs.weight[row] == pytest.approx(0 if terminal else touching / total)
        follows = j + 1 < len(trajectory.states) and beliefs.exists[row + 1]
        assert beliefs.signals["next_state"][row] == (row + 1 if follows and not terminal else -1)
    values = np.arange(len(beliefs.mean), dtype=np.float32)
    ragged = beliefs.to_trajectories(values, fill=-1.0)
    for row in rows:
        assert ragged[tuple(beliefs.index[row])] == (row if beliefs.exists[row] else -1.0)
    assert not beliefs.exists[beliefs.index[:, 0] < 0].any()
    no_room = make_beliefs(base, scores, env_branchable=True, max_context=1)
    assert not no_room.branchable.any() and no_room.exists.any()
    assert not make_beliefs(base, scores, env_branchable=False, max_context=99).branchable.any()


def signals_of(base, seed=0):
    shape = (len(base), max(len(t.states) for t in base))
    rng = np.random.default_rng(seed)
    there = np.arange(shape[1]) < np.array([[len(t.segments)] for t in base])
    names = (f.name for f in dataclasses.fields(PolicySignals))
    return PolicySignals(**{n: (rng.uniform(1, 9, shape) * there).astype("f4") for n in names})


def test_weights_by_score_norm_and_the_channels_of_rules():
    base = one_base()
    scores = dataclasses.replace(score(base), signals=signals_of(base))
    beliefs = make_beliefs(
        base, scores, env_branchable=True, max_context=4096, smallest_bucket=16,
        weight="score_norm",
    )  # fmt: skip
    norm = scores.signals.score_norm
    for b, trajectory in enumerate(base):
        for j in range(len(trajectory.segments)):
            row = beliefs.row(b, j)
            touching = norm[b, j] + (norm[b, j - 1] if j else 0)
            ratio = touching / beliefs.weight[row]
            assert ratio == pytest.approx(norm[0, 0] / beliefs.weight[beliefs.row(0, 0)], rel=1e-4)
            for name in ("score_norm", "entropy", "nll", "log_ratio"):
                assert beliefs.signals[name][row] == getattr(scores.signals, name)[b, j]
            uncertain = scores.signals.uncertain[b].astype(int)
            before, now = uncertain[: max(j - 1, 0)].sum() // 5, uncertain[:j].sum() // 5
            assert beliefs.signals["cut"][row] == (j == 0 or now > before)
    with pytest.raises(ValueError, match="'score_norm' reads the policy's score norms"):
        make_beliefs(base, score(base), env_branchable=True, max_context=99, weight="score_norm")
    with pytest.raises(ValueError, match="'length' is unknown"):
        make_beliefs(base, score(base), env_branchable=True, max_context=99, weight="length")
    with pytest.raises(ValueError, match="2 rollouts of one task .* do not fit"):
        make_beliefs(base, score(base), env_branchable=True, max_context=99, rollouts=1)


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"patr"}))
def test_every_rule_spends_the_budget_of_a_step(rule):
    def scorer(base):
        return dataclasses.replace(score(base), signals=signals_of(base))

    config = StepConfig(budget=500, **(BRANCHING | {"rule": rule}), weight="score_norm")
    collected = step(config, make_agent(), scorer=scorer)
    assert len(collected.tree.branches) > 3 and spent(collected) <= 500


def test_siblings_are_evidence_about_the_state_that_they_share_and_never_about_themselves():
    config = StepConfig(budget=400, group_size=2)
    base = [
        t if t.outcome is not None else dataclasses.replace(t, outcome=0.0, end="terminal")
        for t in step(config, make_agent(), scorer=None).tree.base
    ]
    scores = score(base)
    scores.mean[:, 0], scores.error_features[:, 0] = 0.5, 0.3
    beliefs = make_beliefs(
        base, scores, env_branchable=True, max_context=4096, smallest_bucket=16, siblings=True
    )
    assert beliefs.base_count.sum() == len(base)
    values, _ = beliefs.values("joint")
    for b, trajectory in enumerate(base):
        changed = list(base)
        changed[b] = dataclasses.replace(trajectory, outcome=1.0 - trajectory.outcome)
        other = make_beliefs(
            changed, scores, env_branchable=True, max_context=4096, smallest_bucket=16,
            siblings=True,
        )  # fmt: skip
        moved, _ = other.values("joint")
        own = slice(beliefs.row(b, 0), beliefs.row(b, 0) + len(trajectory.states))
        np.testing.assert_allclose(moved.value[own], values.value[own], atol=1e-5)
        assert np.abs(np.asarray(moved.value - values.value)).max() > 1e-3
    alone = make_beliefs(base, scores, env_branchable=True, max_context=4096, smallest_bucket=16)
    np.testing.assert_allclose(alone.values("joint")[0].value[alone.exists],
                               alone.mean[alone.exists], atol=1e-6)  # fmt: skip
    # What is planned with counts all of them: the start has been sampled already.
    before, after = (x.features((0.0, 1.0)).error_features for x in (alone, beliefs))
    row = beliefs.row(0, 0)
    assert np.square(after[row]).sum() < 0.8 * np.square(before[row]).sum()


def test_bad_scores_are_named():
    base = one_base()
    scores = score(base)
    scores.noise_var[1, 0] = np.inf
    with pytest.raises(ValueError, match=r"noise_var of state 0 of trajectory 3/0\.1"):
        make_beliefs(base, scores, env_branchable=True, max_context=4096)
    with pytest.raises(ValueError, match="do not cover"):
        make_beliefs(base, score(base[:1]), env_branchable=True, max_context=4096)


def test_outcomes_refine_values_and_narrow_the_belief():
    base = one_base()
    beliefs = make_beliefs(
        base, score(base), env_branchable=True, max_context=4096, smallest_bucket=64
    )
    rows = np.flatnonzero(beliefs.exists)[[0, 2, 3]]
    after = beliefs.observe([rows[0], *rows], [1.0, 0.0, 1.0, None])
    assert beliefs.branch_count.sum() == 0  # the old belief is untouched
    np.testing.assert_array_equal(after.branch_count[rows], [2, 1, 0])
    np.testing.assert_array_equal(after.branch_mean[rows], [0.5, 1, 0])
    refined, variance = after.refine("joint", (0.0, 1.0))
    branched, exists = rows[:2], after.exists
    errors = after.error_features.astype(np.float64)
    covariance = errors @ errors.T
    noise = np.diag(after.noise_var[branched] / after.branch_count[branched])
    gain = covariance[:, branched] @ np.linalg.inv(covariance[np.ix_(branched, branched)] + noise)
    want = after.mean + gain @ ([0.5, 1.0] - after.mean[branched])
    want_variance = np.diag(covariance - gain @ covariance[branched])
    np.testing.assert_allclose(refined[exists], np.clip(want, 0, 1)[exists], rtol=1e-4)
    np.testing.assert_allclose(variance[exists], want_variance[exists], rtol=1e-3, atol=1e-6)
    features = after.features((0.0, 1.0))
    tau2 = np.square(np.asarray(features.error_features)).sum(axis=1)
    np.testing.assert_allclose(tau2, variance, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.asarray(features.mean), refined, rtol=1e-5)
    np.testing.assert_allclose(after.prior()[0], np.diag(covariance), rtol=1e-4, atol=1e-6)


def test_a_fitted_covariance_adds_what_tasks_and_states_do_not_share_with_the_ensemble():
    base = one_base()
    scales = CovarianceScales(*map(np.float32, (2.0, 0.2, 0.1, 0.1, 0.8)))
    scores = dataclasses.replace(score(base, noise_var=0.25), scales=scales)
    beliefs = make_beliefs(base, scores, env_branchable=True, max_context=4096, smallest_bucket=16)
    variance, noise_var = beliefs.prior()
    there = beliefs.exists
    claimed = np.square(beliefs.error_features).sum(axis=1)
    np.testing.assert_allclose(variance[there], (2 * claimed + 0.4 * 0.25)[there], rtol=1e-4)
    np.testing.assert_allclose(
        noise_var[there], np.maximum(0.25 - variance, 0.025)[there], rtol=1e-4
    )
    first, second = beliefs.row(0, 0), beliefs.row(1, 1)
    assert base[0].group_id == base[1].group_id != base[2].group_id
    seen = beliefs.observe([first] * 8, [1.0] * 8)
    refined, _ = seen.refine("joint")
    plain = dataclasses.replace(seen, scales=None).refine("joint")[0]
    # More of the first state's surprise reaches its task's states than the ensemble lets through.
    moved, before = refined - seen.mean, plain - seen.mean
    assert abs(moved[first]) > abs(before[first])
    assert abs(moved[second]) > 0.1 * abs(moved[first])


def test_steps_of_different_sizes_compile_once():
    agent = make_agent()
    config = StepConfig(budget=500, **BRANCHING)
    step(config, agent)
    programs = [belief_module._plan, belief_module._refine, belief_module._after]
    before = [program._cache_size() for program in programs]
    for budget in (300, 650, 420):
        step(dataclasses.replace(config, budget=budget), agent)
    assert [program._cache_size() for program in programs] == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 0}, "budget must be >= 1, got 0"),
        ({"base_fraction": 0.0}, "base_fraction must be in"),
        ({"rule": "entropy_of_everything"}, "'entropy_of_everything' is unknown; choose one of"),
        ({"rule": "none"}, "rule 'none' does not go with base_fraction 0.5"),
        ({"base_fraction": 1.0}, "does not go with base_fraction 1.0"),
        ({"ks": ()}, "ks must hold"),
        ({"ks": (4,), "max_per_state": 2}, "max_per_state 2 is below"),
        ({"refine": "magic"}, "refine 'magic' is unknown"),
        ({"cost_margin": 0.9}, "cost_margin must be >= 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        StepConfig(**({"budget": 500, **BRANCHING} | change))


@pytest.mark.parametrize(
    ("config", "estimator", "message"),
    [
        (StepConfig(500, group_size=1), "grpo", "group_size 1 gives it nothing to compare"),
        (StepConfig(500, group_size=4), "vineppo", "needs continuations, but rule is 'none'"),
        (StepConfig(500, group_size=4), "magic", "'magic' is unknown; choose one of"),
        (StepConfig(50, group_size=4), "grpo", "smaller than one predicted episode of 100"),
    ],
)
def test_methods_and_budgets_that_cannot_work_are_refused_before_any_work(
    config, estimator, message
):
    with pytest.raises(ValueError, match=message):
        validate_step(config, estimator=estimator, episode_tokens=100.0)
    validate_step(StepConfig(500, group_size=4), estimator="grpo", episode_tokens=100.0)


def test_branches_need_a_critic_and_an_environment_that_branches():
    config = StepConfig(budget=500, **BRANCHING)
    engine = FakeEngine()
    with pytest.raises(ValueError, match="needs a scorer"):
        step(config, make_agent(engine), scorer=None)
    env = CountTo()
    env.branchable = False
    with pytest.raises(ValueError, match="'count_to' cannot continue a state twice"):
        step(config, make_agent(engine, env=env))
    with pytest.raises(ValueError, match="no tasks"):
        step(config, make_agent(engine), num_tasks=0)
    assert not engine.requests


def test_reuse_of_prefixes_is_counted_by_kind_of_request():
    def trajectory(*requests):
        generations = (
            Generation("act", (0,) * length, (1,), (-1.0,), "stop", cached_tokens=cached)
            for length, cached in requests
        )
        segments = [types.SimpleNamespace(generations=(g,)) for g in generations]
        return types.SimpleNamespace(segments=segments)

    base = [trajectory((11, 4), (21, 20), (31, 31)), trajectory((11, 10))]
    branches = [trajectory((21, 19), (41, 30)), trajectory()]
    counts = reuse_by_kind(base, branches)
    assert counts == {
        "start/prompt": 20,
        "start/cached": 14,
        "turn/prompt": 90,
        "turn/cached": 80,
        "branch/prompt": 20,
        "branch/cached": 19,
    }
    assert counts + counts == {name: 2 * count for name, count in counts.items()}
