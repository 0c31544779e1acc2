"""What branched states say of themselves: who moved their values, and by how much."""

import dataclasses

import numpy as np
import pytest

from focus.credit.errors import ErrorFeatures
from focus.rollout.branched import MOST_PULLS, branched_states, influence
from focus.rollout.step import StepConfig
from focus.types import Segment, State, Trajectory


@dataclasses.dataclass(frozen=True)
class Pool:
    """The part of `StateBeliefs` that is asked, with its covariance written out."""

    prior_covariance: np.ndarray
    features: object  # whose inner products are that covariance after the evidence
    mean: np.ndarray
    noise_var: np.ndarray
    branch_count: np.ndarray
    branch_mean: np.ndarray
    index: np.ndarray
    cost: np.ndarray

    def posterior(self):
        return self.features, self.noise_var

    def prior(self):
        return np.diag(self.prior_covariance), self.noise_var

    def refine(self, mode):
        """The Gaussian update by its formula, over the states that have outcomes."""
        seen = np.flatnonzero(self.branch_count)
        noise = np.diag(self.noise_var[seen] / self.branch_count[seen])
        covariance = self.prior_covariance
        if mode == "local":
            covariance = np.diag(np.diag(covariance))
        gain = covariance[:, seen] @ np.linalg.inv(covariance[np.ix_(seen, seen)] + noise)
        if mode == "none":
            gain = np.zeros_like(gain)
        after = covariance - gain @ covariance[seen]
        return self.mean + gain @ (self.branch_mean - self.mean)[seen], np.diag(after)


def make_pool(seed, *, structured, size=24, block=4):
    rng = np.random.default_rng(seed)
    shared, local = rng.normal(0, 0.15, (size, 3)), rng.normal(0, 0.2, (size, 2))
    own = rng.uniform(0.0, 0.02, size)
    blocks = np.arange(size) // block
    covariance = shared @ shared.T
    if structured:
        covariance = covariance + (blocks[:, None] == blocks) * (local @ local.T) + np.diag(own)
    count = np.where(rng.random(size) < 0.6, rng.integers(1, 5, size), 0)
    noise = rng.uniform(0.05, 0.25, size)
    seen = np.flatnonzero(count)
    inside = covariance[np.ix_(seen, seen)] + np.diag(noise[seen] / count[seen])
    after = covariance - covariance[:, seen] @ np.linalg.inv(inside) @ covariance[seen]
    root = np.linalg.cholesky(after + 1e-12 * np.eye(size))
    features = root
    if structured:
        nothing = np.zeros((size // block, block, 1))
        features = ErrorFeatures(shared=root, local=nothing, own=np.zeros(size))
    return Pool(
        covariance,
        features,
        rng.uniform(0.3, 0.7, size),
        noise,
        count,
        np.where(count, rng.random(size), 0.0),
        np.stack([blocks, np.arange(size) % block], axis=1),
        np.full(size, 10.0),
    )


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("mode", ["none", "local", "joint"])
def test_influences_take_a_refined_value_apart(mode, structured):
    """V* is V and what each branched state has said, weighed; nothing is left over."""
    pool = make_pool(1, structured=structured)
    rows = np.flatnonzero(pool.branch_count)
    found = influence(pool, rows, mode)
    refined, variance = pool.refine(mode)
    surprise = (pool.branch_mean - pool.mean)[rows]
    np.testing.assert_allclose(pool.mean[rows] + found @ surprise, refined[rows], atol=1e-8)
    own = variance[rows] * pool.branch_count[rows] / pool.noise_var[rows]
    np.testing.assert_allclose(np.diag(found), 0 * own if mode == "none" else own, atol=1e-8)
    assert np.any(found - np.diag(np.diag(found))) == (mode == "joint")
    assert influence(pool, [], mode).shape == (0, 0)


def test_states_of_a_block_and_a_state_itself_share_more():
    """Local features count inside of a block, own variances for a state alone."""
    pool = make_pool(2, structured=False)
    rng = np.random.default_rng(0)
    features = ErrorFeatures(
        shared=rng.normal(size=(24, 2)),
        local=rng.normal(size=(6, 4, 3)),
        own=rng.uniform(0.1, 0.2, 24),
    )
    found = influence(dataclasses.replace(pool, features=features), [0, 3, 4], "joint")
    local = features.local.reshape(24, 3)
    for i, row in enumerate((0, 3, 4)):
        for j, other in enumerate((0, 3, 4)):
            covariance = features.shared[row] @ features.shared[other]
            covariance += (row // 4 == other // 4) * (local[row] @ local[other])
            covariance += (row == other) * features.own[row]
            precision = pool.branch_count[other] / pool.noise_var[other]
            assert found[i, j] == pytest.approx(covariance * precision)


def test_a_branched_state_names_those_that_moved_it():
    pool = make_pool(3, structured=False)
    states = tuple(State(None, None, (1,), j) for j in range(4))
    segments = (Segment((), "", ""),) * 3
    base = [
        Trajectory(f"0/{i}.0", f"t{i}", i, states, segments, 1.0, True, "terminal")
        for i in range(6)
    ]
    rows = np.repeat(np.arange(24), pool.branch_count).tolist()
    branches = [dataclasses.replace(base[0], id=f"b{i}", parent="0/0.0", parent_state=0)
                for i in range(len(rows))]  # fmt: skip
    stats = branched_states(
        StepConfig(budget=100), base, pool, rows, branches, [True] * len(rows), np.zeros(24)
    )
    seen = np.flatnonzero(pool.branch_count)
    weights = influence(pool, seen, "joint")
    surprise = (pool.branch_mean - pool.mean)[seen]
    places = {(s.trajectory, s.state): i for i, s in enumerate(stats)}
    assert len(stats) == len(seen) == len(places)
    for i, stat in enumerate(stats):
        assert stat.weight == pytest.approx(weights[i, i])
        assert stat.shift == pytest.approx(weights[i] @ surprise, abs=1e-8)
        named = [places[trajectory, state] for trajectory, state, _ in stat.pulls]
        parts = np.abs(weights[i] * surprise)
        assert len(named) == MOST_PULLS and i not in named
        others = np.delete(parts, i)
        np.testing.assert_allclose(parts[named], np.sort(others)[::-1][:MOST_PULLS])
        for j, (_, _, pull) in zip(named, stat.pulls):
            assert pull == pytest.approx(weights[i, j] * surprise[j], abs=1e-5)
