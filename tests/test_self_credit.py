"""Self-Credit: worked numbers, both ways of matching, and its laws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_estimators import make_batch

from focus.credit import baselines, self_credit

CLASSES = np.array([[0, 1, 2, -1], [0, 3, -1, -1], [4, 1, -1, -1], [4, 5, -1, -1]], np.int32)
CITED = np.array([[1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0]], bool)
WEIGHT = np.array([[2.5, 1, 1, 1.5], [2.5, 1.5, 1, 1.5], [1.5, 1, 1, 1], [1.5, 1, 1, 1]])


def worked(**channels):
    flat = CLASSES.ravel()
    match = (flat[:, None] == flat) & (flat[:, None] >= 0)
    defaults = {"cited": CITED, "match_class": CLASSES, "match": match, "progress": np.float32(0)}
    return make_batch([1, 1, 0, 0], num_segments=[4] * 4, **{**defaults, **channels})


def run(batch, **hparams):
    return jax.jit(lambda b: self_credit.self_credit(b, ddof=0, **hparams))(batch)


@pytest.mark.parametrize("matching", ["class", "pairs"])
def test_worked_numbers(matching):
    got = run(worked(), matching=matching)
    np.testing.assert_allclose(got.aux["weight"], WEIGHT, atol=2e-5)
    sign = np.array([1, 1, -1, -1])[:, None]
    np.testing.assert_allclose(got.segment_advantages, WEIGHT * sign, atol=2e-5)


@pytest.mark.parametrize("matching", ["class", "pairs"])
def test_not_counting_oneself_leaves_one_citer(matching):
    got = run(worked(), matching=matching, count_self=False).aux["weight"]
    np.testing.assert_allclose(got[:, 0], [1.5, 1.5, 1, 1])


def test_failure_weight_is_annealed():
    got = run(worked(progress=np.float32(0.5))).aux["weight"]
    np.testing.assert_allclose(got[2:, 0], 1.25)


def test_answers_of_successes_count_as_cited():
    answer = np.tile([False, False, True, False], (4, 1))
    got = run(worked(is_answer=answer)).aux["weight"]
    np.testing.assert_allclose(got[:, 2], [1.5, 1.5, 1, 1])


def test_summaries_of_successes_count_as_cited_whatever_their_turn_does():
    batch = worked()
    summary = np.asarray(batch.token_mask) & (np.arange(batch.token_mask.shape[1]) % 2 == 1)
    got = run(dataclasses.replace(batch, summary_mask=summary)).advantages
    plain, weighted = baselines.grpo(batch, ddof=0).advantages, run(batch).advantages
    factor = np.where(batch.success, 1.5, 1.0)[:, None]
    np.testing.assert_allclose(got, np.where(summary, plain * factor, weighted), atol=1e-6)
    assert not np.allclose(got, weighted)


def test_nothing_cited_is_grpo_and_equal_groups_are_zero():
    batch = dataclasses.replace(worked(), cited=jnp.zeros((4, 4), bool))
    np.testing.assert_array_equal(run(batch).advantages, baselines.grpo(batch, ddof=0).advantages)
    batch = dataclasses.replace(worked(), outcome=jnp.ones(4), success=jnp.ones(4, bool))
    assert not np.any(run(batch).advantages)


def test_conserving_keeps_the_sum():
    batch = worked()
    got = run(batch, conserve=True).advantages.sum(1)
    np.testing.assert_allclose(got, baselines.grpo(batch, ddof=0).advantages.sum(1), atol=1e-4)


def test_repeated_citations_of_one_row_count_once():
    classes = np.array([[0, 0], [1, 2]], np.int32)
    batch = make_batch(
        [1, 0], cited=np.ones((2, 2), bool), match_class=classes, progress=np.float32(0)
    )
    np.testing.assert_allclose(run(batch).aux["weight"][0], [1.5, 1.5])
