"""Faults that public reports of other trainers led to in this one, and the test of each kind.

Those without a file are below.

 #  | fault                                                   | test
----|---------------------------------------------------------|-----------------------------------
 31 | the task's own turn limit bootstraps like a cut         | test_pitfall_31_the_tasks_turn_limit_is_an_outcome_for_every_method
 31 | ... from the turn loop                                  | test_agent.py::test_the_turn_limit_ends_the_task_whoever_enforces_it
 32 | sampled from a part of what the loss differentiates     | test_pitfall_32_what_is_trained_is_sampled_from_the_whole_distribution
 33 | vectors decay, because they are stacked                 | test_update.py::test_pitfall_33_vectors_do_not_decay_whatever_their_rank_in_the_stack
 33 | ... and adapters do                                     | test_update.py::test_pitfall_33_adapters_are_matrices
 34 | a scale of 0 makes credit of 1e6                        | test_pitfall_34_a_scale_of_0_has_a_floor_in_the_units_of_the_data
 35 | a rollout that nothing was compared with teaches        | test_pitfall_35_one_scored_rollout_of_a_group_teaches_nothing
 37 | a field of config.json is read over                     | test_hf.py::test_pitfall_37_what_changes_the_function_and_is_not_understood_is_refused
 37 | ... in the hybrid family                                | test_hf.py::test_pitfall_37_holds_of_the_hybrid_family
 37 | ... beside tied embeddings                              | test_hf.py::test_missing_extra_and_tied_tensors
 38 | older weights without a correction, and nobody says so  | test_pitfall_38_old_weights_without_a_correction_are_said_once_at_the_start
 42 | the chunked delta rule cancels for similar keys         | test_gated_delta_structured.py::test_chunks_are_as_exact_as_steps_however_alike_the_keys_are
 42 | ... the worst case                                      | test_gated_delta_structured.py::test_one_key_and_one_value_again_and_again_are_recalled_exactly
 42 | ... in a model                                          | test_gated_delta_structured.py::test_a_model_reads_a_text_that_repeats_itself_as_it_would_write_it
 46 | rejected tokens stay in the denominator unsaid          | test_update.py::test_pitfall_46_rejected_tokens_count_or_leave_as_the_config_says
 47 | momentum moves what nobody has an opinion about         | test_update.py::test_pitfall_47_a_minibatch_without_an_opinion_takes_no_step
"""  # noqa: E501

import dataclasses

import numpy as np
import pitfall_table
import pytest
from credit_batches import full_batch
from test_pitfalls import rollout, run, to_batch

from configs import quickstart
from focus.credit import ESTIMATORS, primitives
from focus.run import experiment

REQUIRED = {31, 32, 33, 34, 35, 37, 38, 42, 46, 47}


def test_every_fault_has_a_test_that_exists():
    pitfall_table.check(__doc__, __file__, required=REQUIRED)


@pytest.mark.parametrize("name", ["focus", "ppo", "grpo", "rloo"])
def test_pitfall_31_the_tasks_turn_limit_is_an_outcome_for_every_method(name):
    """A rollout at the limit is one that ended there without a score; one that we cut is not."""
    rows = [rollout("won", 1.0, lengths=(3, 3))]
    value = np.array([[0.25, 0.5, 0.75]] * 2)

    def credit(end):
        lost = rollout("lost", 0.0, lengths=(3, 3), end=end)
        return run(name, to_batch([*rows, lost], segments=2, value=value))

    ended, limited, cut = (credit(end) for end in ("terminal", "turn_limit", "context_limit"))
    np.testing.assert_array_equal(limited.advantages, ended.advantages)
    np.testing.assert_array_equal(limited.mask, ended.mask)
    if name in ("focus", "ppo"):
        assert np.any(cut.advantages != ended.advantages)  # bootstraps
        np.testing.assert_array_equal(limited.targets["value"], ended.targets["value"])


@pytest.mark.parametrize(
    "key, value", [("top_p", 0.8), ("top_k", 2), ("temperature", 0.0), ("temperature", -1.0)]
)
def test_pitfall_32_what_is_trained_is_sampled_from_the_whole_distribution(key, value):
    """p = [.5, .3, .2] cut to [.625, .375, 0] has E grad log p = [.125, .075, -.2], and not 0.

    Renormalising would need the set that each token was sampled from, T x V bits that servers do
    not send, held fixed while the parameters move: refused.
    """
    config = quickstart.get_config()
    experiment.validate(config)
    config.rollout[key] = value
    with pytest.raises(ValueError, match=f"rollout.{key}"):
        experiment.validate(config)


GROUPS = {
    "one of three": [1.0, 0, 0],
    "one of eight": [0, 0, 1.0, 0, 0, 0, 0, 0],
    "half": [1.0, 1, 0, 0],
    "all alike": [0.3] * 5,
    "all 1": [1.0] * 4,
}


@pytest.mark.parametrize("scale", ["std", "mad"])
@pytest.mark.parametrize("center", ["mean", "loo", "median", "none"])
@pytest.mark.parametrize("unit", [1e-2, 1.0, 1e4])
def test_pitfall_34_a_scale_of_0_has_a_floor_in_the_units_of_the_data(center, scale, unit):
    """The median absolute deviation of [1, 0, 0] is 0, and 1 / 1e-6 is no advantage."""
    for x in GROUPS.values():
        x = np.array(x, np.float32) * unit
        zeros, kept = np.zeros(len(x), np.int32), np.ones(len(x), bool)
        options = {"center": center, "scale": scale, "eps": 0.0}
        got = np.asarray(primitives.group_normalise(x, zeros, kept, **options))
        assert np.abs(got).max() <= 3 * np.sqrt(len(x)), (x, got)
        assert np.any(got != 0) == (center == "none" or np.ptp(x) > 0)
        again = primitives.group_normalise(x * 8, zeros, kept, **options)
        np.testing.assert_allclose(again, got, rtol=1e-5)  # whatever the unit of the rewards
    got = primitives.group_normalise(
        np.array([1.0, 0, 0], np.float32), np.zeros(3, int), np.ones(3, bool),
        center="median", scale="mad",
    )  # fmt: skip
    np.testing.assert_allclose(got, [3.4641, 0, 0], rtol=1e-4)  # 1 / (.57735 / 2)


# The others with two rows a group read a judge, or an earlier step, besides.
COMPARES_OUTCOMES = sorted(
    name
    for name, spec in ESTIMATORS.items()
    if spec.kind == "estimator" and spec.min_group_size >= 2
    if not {"score", "probe_delta", "hist_score", "mc_return", "ref_logp"} & set(spec.inputs)
)


@pytest.mark.parametrize("name", COMPARES_OUTCOMES)
def test_pitfall_35_one_scored_rollout_of_a_group_teaches_nothing(name):
    """Of eight members one has an outcome, the others failed technically."""
    batch, only = full_batch(0, num_groups=1), np.arange(8) == 0
    outcome = np.where(only, 0.7, np.nan).astype(np.float32)
    alone = dataclasses.replace(batch, outcome=outcome, row_mask=only)
    assert not np.any(run(name, alone).advantages)
    assert name in ("pivoarl", "cbpo") or np.any(run(name, batch).advantages)


def test_pitfall_38_old_weights_without_a_correction_are_said_once_at_the_start():
    config = quickstart.get_config()
    assert experiment.notices(config) == ()
    config.rollout.async_depth = 1
    assert experiment.notices(config) == ()
    config.learner.importance_cap = None
    experiment.validate(config)
    (remark,) = experiment.notices(config)
    assert "rollout.async_depth=1" in remark and "learner.importance_cap" in remark
    config.learner.importance_range = (0.5, 2.0)
    assert experiment.notices(config) == ()
