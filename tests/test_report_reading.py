"""What a report says of a run in words: credit earned, reasons, verdicts, names."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import make_workdir

from configs import quickstart
from focus.branching.acquisition import StateFeatures
from focus.branching.plan import plan
from focus.branching.prediction import predicted_gains
from focus.metrics import run_name
from focus.report import verdict
from focus.report.earned import against_branches, earned_changes, turning_point
from focus.report.reasons import choice, reason, sentence
from focus.report.record import Run, read_run


def trajectory(values, outcome, rewards=None):
    rewards = rewards or [0.0] * (len(values) - 1)
    return {
        "states": [{"refined": value} for value in values],
        "segments": [{"reward": reward} for reward in rewards],
        "outcome": outcome,
    }


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9), st.floats(0, 1))
@settings(deadline=None, max_examples=50)
def test_what_turns_earned_adds_up_to_the_outcome_less_the_first_value(values, outcome):
    changes = earned_changes(trajectory(values, outcome))
    assert len(changes) == len(values) - 1
    assert sum(changes) == pytest.approx(outcome - values[0], abs=1e-9)
    place = turning_point(changes)
    if place is not None:
        assert abs(changes[place]) == max(map(abs, changes))


def test_an_end_without_outcome_counts_with_its_value_and_unknown_values_with_none():
    assert earned_changes(trajectory([0.2, 0.7, 0.5], None)) == pytest.approx([0.5, -0.2])
    assert earned_changes(trajectory([0.2, None, 0.5], 1.0)) == [None, None]
    assert earned_changes(trajectory([0.2, 0.5], 1.0, [0.25])) == pytest.approx([1.05])
    assert turning_point([None, None]) is None and turning_point([]) is None
    assert turning_point([0.0, 0.3, -0.3]) == 1, "the first of equals"


def test_credit_against_branches_needs_a_branch_a_change_and_two_signs():
    assert against_branches(0.4, -0.1, branched=True)
    assert not against_branches(0.4, 0.1, branched=True)
    assert not against_branches(0.4, -0.1, branched=False)
    assert not against_branches(0.04, -0.1, branched=True), "too small to tell"
    assert not against_branches(None, -0.1, branched=True)
    assert not against_branches(0.4, None, branched=True)


def row(**changes):
    base = {
        "step": 0, "trajectory": "0/0.0", "state": 1, "turn": 1, "value": 0.5, "std": 0.2,
        "refined": 0.75, "refined_std": 0.1, "started": 4, "count": 4, "mean": 1.0,
        "cost_predicted": 40.0, "cost_actual": 50.0, "noise_var": 0.16, "gain": 0.02,
    }  # fmt: skip
    return base | changes


def test_reasons_are_the_arithmetic_of_the_refinement():
    why = reason(row())
    # tau2 = noise2 / k = .04: half the weight, halfway between critic and branches.
    assert why.weight == pytest.approx(0.5) and why.alone == pytest.approx(0.75)
    assert why.pull == pytest.approx(0.0)
    assert why.surprise == pytest.approx(0.5 / np.sqrt(0.08))
    assert why.predicted == pytest.approx(0.02 / (4 * 40))
    assert why.came == pytest.approx(0.02 * 0.25 / 0.08 / (4 * 50))
    text = sentence(row())
    assert "weigh 50 %" in text and "would give 0.75" in text and "pull" not in text
    assert "pull it by −0.44" in sentence(row(refined=0.31))
    assert sentence(row(refined=0.98)) is None, "no difference, nothing to explain"
    assert "of its 1 branch:" in sentence(row(count=1, mean=0.0))


def test_rows_of_older_runs_have_reasons_without_a_prediction():
    old = {k: v for k, v in row().items() if k not in ("gain", "noise_var")}
    why = reason(old)
    assert why.weight == pytest.approx(0.04 / (0.04 + 0.25 / 4))
    assert why.predicted is None and choice(old) is None
    assert reason(row(count=0, mean=None)) is None and sentence(row(count=0, mean=None)) is None
    floored = reason(old | {"value": 0.0, "std": 0.1})
    assert floored.weight == pytest.approx(0.01 / (0.01 + 0.01 / 4))


@pytest.mark.parametrize("seed", range(4))
def test_predicted_gains_of_states_add_up_to_that_of_their_plan(seed):
    rng = np.random.default_rng(seed)
    states, width = 24, 5
    errors = 0.3 * rng.normal(size=(states, width))
    noise, weight = rng.uniform(0.05, 0.25, states), rng.dirichlet(np.ones(states))
    features = StateFeatures(
        mean=jnp.full(states, 0.5),
        error_features=jnp.asarray(errors),
        noise_var=jnp.asarray(noise),
        cost=jnp.asarray(rng.uniform(5, 30, states)),
        weight=jnp.asarray(weight),
        mask=jnp.ones(states, bool),
    )
    made = plan(
        features, 300.0, rule="expected_error_reduction", ks=(1, 2, 4), max_picks=16,
        existing_count=jnp.zeros(states, jnp.int32), max_per_state=8,
    )  # fmt: skip
    gains = np.asarray(predicted_gains(features, made.count, made.order))
    assert np.all((gains > 0) == (np.asarray(made.count) > 0))
    assert gains.sum() == pytest.approx(float(made.gain), rel=1e-3)
    # Slow reference of the sum: the Gaussian posterior over all states at once.
    covariance = errors @ errors.T
    branched = np.flatnonzero(made.count)
    cross = covariance[:, branched]
    inside = covariance[np.ix_(branched, branched)]
    inside = inside + np.diag(noise[branched] / np.asarray(made.count)[branched])
    reduction = np.einsum("sb,bc,sc->s", cross, np.linalg.inv(inside), cross)
    assert gains.sum() == pytest.approx(weight @ reduction, rel=1e-4)


def simulated(*, skill, overconfidence=1.0, states=6000, seed=0):
    """Branches of a critic that knows `skill` of the values' variance."""
    rng = np.random.default_rng(seed)
    truth = rng.uniform(0.1, 0.9, states)
    value = np.clip(0.5 + skill * (truth - 0.5), 0, 1)
    error_std = np.sqrt(np.mean((truth - value) ** 2))
    mean = rng.binomial(4, truth) / 4
    return tuple(
        row(
            step=i // 100, trajectory=str(i), value=value[i], mean=mean[i],
            std=error_std / overconfidence, noise_var=float(truth[i] * (1 - truth[i])),
        )
        for i in range(states)
    )  # fmt: skip


def answers(run):
    return {v.question: v for v in verdict.verdicts(run)}


def test_verdicts_tell_a_good_critic_from_a_constant_and_honest_variances_from_bold_ones(tmp_path):
    good = answers(Run(tmp_path, branches=simulated(skill=0.8)))
    poor = answers(Run(tmp_path, branches=simulated(skill=-0.6, overconfidence=3)))
    better, honest = "Is the critic better than a constant?", "Are its variances honest?"
    assert good[better].answer == "yes" and good[honest].answer == "yes"
    assert good["Did branches pay?"].answer == "yes"
    assert poor[better].answer == "no" and poor[honest].answer == "no"
    explained = float(good[better].number.removeprefix("R² "))
    assert explained == pytest.approx(0.96, abs=0.05), "1 - (1 - skill)^2 of the variance"
    none = answers(Run(tmp_path, metrics=({"step": 0},)))
    assert {v.answer for v in none.values()} == {"unknown"}
    assert all(v.number == "" and v.sentence for v in none.values())


def test_the_verdict_on_learning_is_that_of_the_metrics(tmp_path):
    metrics = (
        {"step": 4, "heldout/success": 0.4, "heldout/std_error": 0.03},
        {"step": 9, "heldout/success": 0.6, "heldout/std_error": 0.03},
    )
    learned = verdict.learned(Run(tmp_path, metrics=metrics, summary={"success_before": 0.2}))
    assert learned.answer == "yes" and learned.number == "+40.0"
    assert "after 10 steps is 60.0 %, 20.0 % before training" in learned.sentence
    assert f"± {100 * 1.96 * np.sqrt(2) * 0.03:.1f} points" in learned.sentence
    since = verdict.learned(Run(tmp_path, metrics=metrics))
    assert since.number == "+20.0" and "after step 5" in since.sentence
    worse = [dict(metrics[0]), dict(metrics[1], **{"heldout/success": 0.1})]
    assert verdict.learned(Run(tmp_path, metrics=tuple(worse))).answer == "no"
    same = [dict(metrics[0]), dict(metrics[1], **{"heldout/success": 0.42})]
    assert verdict.learned(Run(tmp_path, metrics=tuple(same))).answer == "unclear"


def test_credit_that_follows_the_values_is_heard_and_noise_is_not(tmp_path):
    run = read_run(make_workdir(tmp_path, num_steps=12, record_every=1))
    segments = [s for r in run.trees for t in r["trajectories"] for s in t["segments"]]
    for segment in segments:
        segment["trained"] = 3 * segment["advantage"]
    heard = verdict.credit(run)
    assert heard.answer == "yes" and float(heard.number.removeprefix("r ")) > 0.5
    assert f"Over {len(segments):,} turns" in heard.sentence
    rng = np.random.default_rng(0)
    for segment in segments:
        segment["trained"] = float(rng.normal())
    assert verdict.credit(run).answer == "no"
    assert verdict.credit(dataclasses.replace(run, trees=())).answer == "unknown"


@pytest.mark.parametrize(
    "method, estimator, rule, manager, name",
    [
        ("grpo", "gigpo", "none", "full", "gigpo"),
        ("grpo", "grpo", "none", "full", "grpo"),
        ("focus", "focus", "expected_error_reduction", "full", "focus"),
        ("focus", "focus", "random", "full", "focus, random branches"),
        ("focus", "focus", "none", "full", "focus, no branches"),
        ("grpo", "grpo", "none", "summarize", "grpo, summarize"),
        ("mine", "gigpo", "none", "full", "mine: gigpo"),
    ],
)
def test_a_run_is_called_after_what_it_ran(method, estimator, rule, manager, name):
    config = {
        "method": method,
        "credit": {"estimator": estimator},
        "branching": {"rule": rule},
        "context": {"manager": manager},
    }
    assert run_name(config) == name
    assert run_name({"method": method}) == method
    assert run_name({}) is None


def test_usual_names_are_those_of_the_shipped_methods():
    for method in quickstart.METHODS:
        assert run_name(quickstart.get_config(method).to_dict()) == method


def test_without_branches_the_critic_is_held_against_outcomes_it_had_not_seen(tmp_path):
    def run(error):
        metrics = tuple(
            {
                "step": i,
                "critic/outcome_error": error + 0.01 * (i % 3),
                "critic/constant_error": 0.2,
            }
            for i in range(20)
        )
        return verdict.critic(Run(tmp_path, metrics=metrics))

    good, poor = run(0.1), run(0.25)
    assert good.answer == "yes" and poor.answer == "no"
    mean = np.mean([0.1 + 0.01 * (i % 3) for i in range(10, 20)])
    assert good.number == f"R² {1 - mean / 0.2:.2f}"
    assert "Over the last 10 steps" in good.sentence
