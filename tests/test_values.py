"""A step's values: nobody's baseline knows his own outcome, and everybody's knows the others'."""

import dataclasses

import jax
import numpy as np
import pytest
from rollout_fakes import make_agent
from test_controller import BRANCHING, score, signals_of, step

from focus.credit.structure import CovarianceScales
from focus.critic.confidence import init_confidence
from focus.critic.covariance import Residuals, fitted_scales, update_fit
from focus.learner.packing import pack_trajectories
from focus.learner.scoring import Scores
from focus.learner.signals import LOG_RATIO_DISCOUNT, policy_signals
from focus.rollout import StepConfig
from focus.rollout.values import refine_values
from focus.run.valuation import _add, misses_of, residuals_of
from focus.types import RolloutTree

SCALES = CovarianceScales(*map(np.float32, (1.0, 0.2, 0.1, 0.1, 0.8)))
CONFIG = StepConfig(budget=800, **(BRANCHING | {"rule": "uniform"}), siblings=True)


@pytest.fixture(scope="module")
def collected():
    found = step(CONFIG, make_agent())
    base = tuple(
        t if t.outcome is not None else dataclasses.replace(t, outcome=0.0, end="terminal")
        for t in found.tree.base
    )
    assert len(found.tree.branches) > 5
    return dataclasses.replace(found, tree=RolloutTree(base, found.tree.branches))


def belief_of(collected, scales=SCALES):
    belief = score(collected.tree.trajectories, noise_var=0.25)
    belief.mean[:] = 0.3 + 0.4 * belief.mean
    return dataclasses.replace(belief, scales=scales)


def values_of(collected, belief, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return refine_values(collected, belief, config, max_context=4096)


def flipped(collected, index):
    """The step with the outcome of one trajectory turned round, as evidence too."""
    everything = list(collected.tree.trajectories)
    trajectory = everything[index]
    everything[index] = dataclasses.replace(trajectory, outcome=1.0 - trajectory.outcome)
    base = len(collected.tree.base)
    tree = RolloutTree(tuple(everything[:base]), tuple(everything[base:]))
    beliefs = collected.beliefs
    if trajectory.parent is not None:
        parent = next(b for b, t in enumerate(tree.base) if t.id == trajectory.parent)
        total = beliefs.branch_sum.copy()
        total[beliefs.row(parent, trajectory.parent_state)] += 1.0 - 2.0 * trajectory.outcome
        beliefs = dataclasses.replace(beliefs, branch_sum=total)
    return dataclasses.replace(collected, tree=tree, beliefs=beliefs)


@pytest.mark.parametrize("scales", [SCALES, None], ids=["fitted", "ensemble"])
def test_an_outcome_moves_the_values_of_all_but_its_own_trajectory(collected, scales):
    belief = belief_of(collected, scales)
    before = values_of(collected, belief)
    base = len(collected.tree.base)
    moved = []
    for index in (0, 1, base, base + 1):
        after = values_of(flipped(collected, index), belief)
        own = slice(0, len(collected.tree.trajectories[index].segments))
        np.testing.assert_allclose(after.refined[index, own], before.refined[index, own], atol=1e-4)
        moved.append(np.nanmax(np.abs(after.refined - before.refined)))
    assert min(moved) > 0.01


@pytest.mark.parametrize("scales", [SCALES, None], ids=["fitted", "ensemble"])
def test_the_first_state_of_a_branch_is_known_as_well_as_its_siblings_made_it(collected, scales):
    belief = belief_of(collected, scales)
    values = values_of(collected, belief)
    base = len(collected.tree.base)
    places = [(b.parent, b.parent_state) for b in collected.tree.branches]
    several = [b for b, p in enumerate(places, start=base) if places.count(p) > 1]
    assert several
    for b in several:
        assert values.refined_variance[b, 0] < 0.95 * values.variance[b, 0]
    if scales is not None:
        # Later states know less of it, and still something; neighbours share what is left.
        length = len(collected.tree.trajectories[several[0]].segments)
        assert values.refined_variance[several[0], length - 1] < values.variance[several[0], 0]
        if length > 1:
            assert values.covariance[several[0], 0] > 0
    else:
        assert not values.covariance[several].any()


def test_without_branches_siblings_still_refine(collected):
    alone = dataclasses.replace(
        collected, tree=RolloutTree(collected.tree.base), beliefs=None, branch_stats=()
    )
    belief = belief_of(alone)
    values = values_of(alone, belief)
    assert np.nanmax(np.abs(values.refined - values.mean)) > 0.02
    off = values_of(alone, belief, siblings=False)
    np.testing.assert_allclose(off.refined, off.mean, atol=1e-6)
    np.testing.assert_allclose(off.refined_variance, off.variance, atol=1e-6)
    assert np.isnan(values.baseline).all()


def test_an_untrusted_critic_is_replaced_by_other_rollouts(collected):
    belief = belief_of(collected)
    values = refine_values(collected, belief, CONFIG, max_context=4096, trusted=False)
    base = collected.tree.base
    for b, trajectory in enumerate(base):
        siblings = [t.outcome for i, t in enumerate(base)
                    if t.group_id == trajectory.group_id and i != b]  # fmt: skip
        others = siblings or [t.outcome for i, t in enumerate(base) if i != b]
        assert values.baseline[b] == pytest.approx(np.mean(others), abs=1e-6)
    assert np.isfinite(values.baseline[: len(collected.tree.trajectories)]).all()


# --- what a step says of the critic --------------------------------------------------------------


def test_residuals_are_branched_states_and_the_starts_of_rollouts(collected):
    belief = belief_of(collected)
    rows = residuals_of(collected, belief)
    base, branches = collected.tree.base, collected.tree.branches
    assert rows["is_base"].sum() == len(base)
    places = {(b.parent, b.parent_state) for b in branches if b.outcome is not None}
    assert (~rows["is_base"]).sum() == len(places)
    assert rows["count"][~rows["is_base"]].sum() == sum(b.outcome is not None for b in branches)
    for i in np.flatnonzero(~rows["is_base"])[:5]:
        parent = base[rows["rollout"][i]]
        own = [b.outcome for b in branches
               if (b.parent, b.parent_state) == (parent.id, rows["position"][i])]  # fmt: skip
        assert rows["mean"][i] == pytest.approx(np.mean(own))
        if len(own) > 1:
            assert rows["outcome_variance"][i] == pytest.approx(np.var(own, ddof=1))
        at = rows["rollout"][i], rows["position"][i]
        assert rows["value"][i] == np.float32(belief.mean[at])
    same = [base[b].task_id for b in rows["rollout"]]
    for i in range(len(same)):
        np.testing.assert_array_equal(
            rows["task"] == rows["task"][i], [name == same[i] for name in same]
        )


def test_a_step_without_rollouts_says_nothing(collected):
    empty = dataclasses.replace(collected, tree=RolloutTree(()), beliefs=None)
    belief = belief_of(collected)
    assert len(residuals_of(empty, belief)["mask"]) == 0
    assert len(misses_of(empty, belief)["mask"]) == 0


def test_outcomes_widen_or_narrow_the_covariance_of_the_next_step(collected):
    """A critic that is right on the spot, and one that is wrong by .4 at every state."""
    found, update = [], jax.jit(update_fit)
    for error in (0.0, 0.4):
        belief = belief_of(collected)
        rows = residuals_of(collected, belief)
        noisy = rows["mean"] if error else np.round(rows["mean"])
        rows["value"] = np.where(error, np.abs(noisy - 0.4), rows["mean"]).astype(np.float32)
        fit = init_confidence().covariance
        for _ in range(10):
            fit = update(fit, Residuals(**rows))
        scales = fitted_scales(fit)
        found.append(float(scales.task + scales.episode + scales.state))
    assert found[0] < 0.2 < 0.35 < found[1]


def test_confidence_takes_in_both_statistics(collected):
    belief = belief_of(collected)
    new = _add(init_confidence(), residuals_of(collected, belief), misses_of(collected, belief))
    assert float(new.covariance.pairs) > 0
    played = sum(bool(t.segments) for t in collected.tree.base)
    assert float(new.gate.weight[0]) == pytest.approx(played, rel=1e-4)


# --- what the policy says of segments ------------------------------------------------------------


def test_signals_are_sums_and_means_over_the_tokens_of_each_segment(collected):
    base = collected.tree.base
    packed = pack_trajectories(base, row_length=256, max_nodes=64, max_states=128)
    rng = np.random.default_rng(0)
    shape = packed.rows.tokens.shape
    logp, entropy, norm = (
        -rng.exponential(0.3, shape),
        rng.uniform(size=shape),
        rng.uniform(size=shape),
    )
    scores = Scores(logp, entropy, norm, None)
    size = len(base), max(len(t.states) for t in base)
    got = policy_signals(base, packed, scores, size)
    by_row = {n: packed.to_trajectories(x) for n, x in zip("len", (logp, entropy, norm))}
    for b, trajectory in enumerate(base):
        start = 0
        behaviour = np.array(
            [x for s in trajectory.segments for g in s.generations for x in g.logp]
        )
        for j, segment in enumerate(trajectory.segments):
            own = slice(start, start + segment.num_tokens)
            np.testing.assert_allclose(got.score_norm[b, j], by_row["n"][b, own].sum(), rtol=1e-5)
            np.testing.assert_allclose(got.entropy[b, j], by_row["e"][b, own].mean(), rtol=1e-5)
            np.testing.assert_allclose(got.nll[b, j], -by_row["l"][b, own].mean(), rtol=1e-5)
            assert got.uncertain[b, j] == np.sum(np.exp(by_row["l"][b, own]) < 0.9)
            ratio = by_row["l"][b, start : len(behaviour)] - behaviour[start:]
            discounted = ratio @ LOG_RATIO_DISCOUNT ** np.arange(len(ratio))
            np.testing.assert_allclose(got.log_ratio[b, j], discounted, atol=1e-4)
            start = own.stop
        assert not got.score_norm[b, len(trajectory.segments) :].any()
    assert signals_of(base).score_norm.shape == size
