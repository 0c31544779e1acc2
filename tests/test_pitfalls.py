"""Faults that public trainers had, by number, and the test that each must pass.

Those that were found by trying public reports here are in `test_pitfalls_found_here.py`.

Where a fault could come back at more than one place, more than one test is named; those without
a file are below.

 #  | fault                                                   | test
----|---------------------------------------------------------|-----------------------------------
  1 | an outcome behind an observation does not reach actions | test_td.py::test_pitfall_1_outcome_after_an_observation_reaches_earlier_actions_once_discounted
  1 | ... in a whole estimator                                | test_pitfalls_1_and_2_hold_with_observation_tokens_between_turns
  2 | advantages decay or bootstrap at absent steps           | test_td.py::test_pitfall_2_absent_steps_neither_decay_nor_bootstrap
  2 | ... in a whole estimator                                | test_pitfalls_1_and_2_hold_with_observation_tokens_between_turns
  3 | groups are keyed by rollout                             | test_pitfall_3_groups_are_keyed_by_task_through_the_whole_path
  4 | only one step of a trajectory gets its scalar           | test_td.py::test_pitfall_4_every_token_of_every_segment_carries_its_own_scalar
  4 | ... from trajectories to packed rows                    | test_pitfall_4_every_token_of_packed_rows_carries_its_own_steps_scalar
  5 | a baseline by turn index is biased                      | test_estimators.py::test_pitfall_5_gradient_is_the_enumerated_one_when_the_policy_chooses_when_to_stop
  6 | text that a tool printed is scored                      | test_deep_search.py::test_text_that_a_tool_printed_is_never_scored
  7 | a zero-length response moves its peers                  | test_estimators.py::test_pitfalls_7_and_9_rows_that_cannot_score_change_nobody
  7 | ... from trajectories                                   | test_pitfalls_7_and_9_an_empty_and_an_unscored_rollout_leave_their_group_alone
  8 | a group of one with a group-relative method             | test_controller.py::test_methods_and_budgets_that_cannot_work_are_refused_before_any_work
  8 | ... in the config of a run                              | test_pitfall_8_a_group_of_one_is_an_error_of_the_config
  9 | no score counts as a score of 0                         | test_pitfalls_7_and_9_an_empty_and_an_unscored_rollout_leave_their_group_alone
 10 | truncation is inferred from padded width                | test_td.py::test_pitfall_10_truncation_is_a_flag_and_padded_width_is_not
 10 | ... from how a rollout ended                            | test_pitfall_10_how_a_rollout_ended_decides_and_its_width_does_not
 11 | the mean over tokens depends on the split               | test_pitfall_11_policy_and_critic_losses_are_1_75_for_every_split
 11 | ... with a model, and over devices                      | test_update.py::test_gradients_do_not_depend_on_micro_batches
 11 | ... with a model, and over devices                      | test_sharding.py::test_one_device_and_eight_give_the_same_losses_and_gradients
 12 | an extreme log-ratio overflows                          | test_losses.py::test_an_extreme_log_ratio_is_finite
 13 | NaN under a mask leaks                                  | test_estimators.py::test_pitfall_13_masked_nan_stays_out_of_mean_and_gradient
 13 | ... in the losses                                       | test_losses.py::test_what_is_masked_may_be_nan
 13 | ... in the critic                                       | test_critic.py::test_nan_in_padding_reaches_neither_loss_nor_gradient
 15 | a KL coefficient changes no gradient                    | test_losses.py::test_a_kl_coefficient_changes_the_gradient
 16 | the real end of turn is masked like a pad               | test_packing.py::test_the_real_end_of_turn_token_is_trained_and_pads_are_not
 17 | chunked log-probs differ                                | test_logprobs.py::test_chunks_change_neither_values_nor_gradients
 17 | ... or hold all logits at once                          | test_logprobs.py::test_memory_does_not_grow_with_tokens_times_vocabulary
 18 | rollout temperature reaches the critic                  | test_pitfall_18_temperature_changes_logprobs_and_never_values
 19 | the newline behind the end of turn is lost              | test_tokens.py::test_turn_by_turn_ids_equal_the_whole_chat
 19 | ... in ChatML, letter by letter                         | test_tokens.py::test_chatml_has_the_newline_after_the_end_of_turn
 20 | trained ids are not the sampled ones                    | test_agent.py::test_trained_ids_are_the_sampled_ids_of_a_tokenizer_that_is_no_bijection
 20 | ... in packed rows                                      | test_packing.py::test_every_generated_token_and_every_state_is_stored_once
 21 | the cap of a turn cuts the merged trajectory            | test_agent.py::test_the_cap_of_a_turn_is_per_turn_and_the_finish_reason_decides
 21 | ... on its way into the loss                            | test_pitfall_21_the_cap_of_a_turn_does_not_cut_what_is_trained
 22 | a shared prefix is trained once a branch                | test_packing.py::test_a_shared_prefix_is_stored_once_and_repeated_only_across_rows
 22 | ... in gradients                                        | test_packing.py::test_packed_rows_mean_the_same_as_separate_sequences
 23 | a resume asks for more than is left                     | test_budget.py::test_pitfall_23_after_an_abort_the_resume_may_ask_for_what_is_left
 23 | ... in the turn loop                                    | test_agent.py::test_an_aborted_generation_resumes_with_what_is_left_and_records_its_versions
 30 | unsafe inputs of `where` leak into gradients            | test_estimators.py::test_gradients_are_finite_with_nan_under_the_masks
 30 | one valid token gives NaN in whitening                  | test_estimators.py::test_pitfall_30_whitening_one_or_no_token_is_finite_with_its_gradient
 30 | an estimator whitens silently                           | test_estimators.py::test_pitfall_30_no_estimator_whitens
 30 | ... over the tasks of a batch                           | test_pitfall_30_a_task_gets_the_same_credit_whatever_else_is_in_the_batch
"""  # noqa: E501

import asyncio
import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pitfall_table
import pytest
from random_trajectories import VOCAB, make_forest, make_trajectory
from rollout_fakes import CHAT, FakeEngine, make_agent

from configs import quickstart
from focus.credit import ESTIMATORS, estimate
from focus.critic import head
from focus.critic import losses as critic_losses
from focus.learner import losses, scoring, sharding
from focus.learner.batches import credit_batch
from focus.learner.packing import pack_trajectories
from focus.policy import transformer
from focus.rollout import Rollout, UnlimitedAccount, play
from focus.run import experiment
from focus.types import CreditBatch, Generation, Segment, State, Trajectory

REQUIRED = {1, 2, 3, 4, *range(7, 14), *range(15, 24), 30}


def test_every_fault_has_a_test_that_exists():
    pitfall_table.check(__doc__, __file__, required=REQUIRED)


# --- helpers -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(name, hparams, batch):
    return estimate(name, batch, **dict(hparams))


def run(name, batch, **hparams):
    """`estimate`, compiled once per name, setting and shape; NumPy arrays."""
    return jax.device_get(_run(name, tuple(sorted(hparams.items())), batch))


def rollout(id_, outcome, lengths=(2, 1), *, end="terminal", task=0, **changes):
    """A trajectory whose turns have the given numbers of tokens, two observed tokens between."""
    ids, states, segments = (1, 2), [], []
    for turn, length in enumerate(lengths):
        states.append(State(None, None, ids, turn))
        said = tuple(range(3, 3 + length))
        logp = (-1.0,) * length
        segments.append(Segment((Generation("act", ids, said, logp, "stop"),), "", ""))
        ids = ids + said + (14, 15)
    states.append(State(None, None, () if end == "terminal" else ids, len(lengths)))
    return Trajectory(
        id_,
        f"task {task}",
        task,
        tuple(states),
        tuple(segments),
        outcome,
        outcome == 1,
        end,
        **changes,
    )


def to_batch(trajectories, *, tokens=16, segments=4, **options) -> CreditBatch:
    """The arrays of some trajectories, with room to spare."""
    return credit_batch(
        trajectories, num_segments=segments, num_tokens=tokens, num_rows=12, **options
    )


def pack(trajectories, row_length=64, max_states=16):
    return pack_trajectories(
        trajectories, row_length=row_length, max_nodes=8, max_states=max_states
    )


# --- credit and masks ----------------------------------------------------------------------------


def interleaved(mask, rewards, values) -> CreditBatch:
    """One row with a segment and two tokens per step; a step that is masked is an observation."""
    mask = np.array([mask], bool)
    segments = np.where(mask, np.arange(mask.shape[1], dtype=np.int32), -1)
    outcome = np.array([rewards[-1]], np.float32)
    return CreditBatch(
        group_id=np.zeros(1, np.int32),
        outcome=outcome,
        success=outcome == 1,
        row_mask=np.ones(1, bool),
        segment_mask=mask,
        segment_reward=np.where(mask, 0.0, np.nan).astype(np.float32),
        token_segment=np.repeat(segments, 2, axis=1),
        token_mask=np.repeat(mask, 2, axis=1),
        behaviour_logp=np.zeros((1, 2 * mask.shape[1]), np.float32),
        truncated=np.zeros(1, bool),
        value=np.array([[*values, 7.0]], np.float32),
    )


@pytest.mark.parametrize("name", ["focus", "ppo"])
def test_pitfalls_1_and_2_hold_with_observation_tokens_between_turns(name):
    batch = interleaved([1, 0, 1], [0, 0, 1], [0, 0, 0])
    credit = run(name, batch, discount=0.5, lambda_=1.0)
    np.testing.assert_allclose(credit.targets["value"], [[0.5, 0, 1]])
    np.testing.assert_allclose(credit.advantages, [[0.5, 0.5, 0, 0, 1, 1]])
    np.testing.assert_array_equal(credit.mask, batch.token_mask)

    batch = interleaved([1, 1, 0, 1], [0, 0, 0, 1], [0.5, 0.5, 9, 0.5])
    credit = run(name, batch, discount=0.5, lambda_=0.5)
    np.testing.assert_allclose(credit.segment_advantages, [[-0.28125, -0.125, 0, 0.5]])


def test_pitfall_3_groups_are_keyed_by_task_through_the_whole_path():
    """Four rollouts of one task; another task's rollouts, and turns, form no groups of theirs."""
    outcomes = [1.0, 0.0, 1.0, 0.0]
    lengths = [(2, 1), (1, 1, 1), (3,), (1, 2)]
    task = [rollout(f"0/0.{i}", o, n) for i, (o, n) in enumerate(zip(outcomes, lengths))]
    other = [rollout(f"0/1.{i}", 1.0, task=1) for i in range(3)]
    rows = [task[0], other[0], task[1], task[2], other[1], task[3], other[2]]
    mine = [0, 2, 3, 5]
    for name, size in (("dr_grpo", 0.5), ("grpo", 0.8660254)):
        credit = run(name, batch := to_batch(rows))
        sign = np.array([1, -1, 1, -1])[:, None]
        np.testing.assert_allclose(
            credit.advantages[mine, :], size * sign * batch.token_mask[mine], atol=2e-6
        )
        np.testing.assert_array_equal(credit.advantages[[1, 4, 6]], 0)


def test_pitfall_4_every_token_of_packed_rows_carries_its_own_steps_scalar():
    forest = make_forest(4, bases=4, branches=5)
    packed = pack(forest)
    batch = to_batch(forest, tokens=64, segments=8)
    # A value of j * 10 + row: with lambda 0 each segment has a scalar of its own.
    width = batch.segment_mask.shape[1] + 1
    value = np.arange(width) ** 2 * 10.0 + np.arange(len(batch.row_mask))[:, None]
    batch = dataclasses.replace(batch, value=value.astype(np.float32))
    credit = run("focus", batch, lambda_=0.0)
    on_rows = packed.to_rows(credit.advantages)
    back = packed.to_trajectories(on_rows, batch.token_mask.shape)
    for b, trajectory in enumerate(forest):
        scalars = credit.segment_advantages[b, : len(trajectory.segments)]
        assert len(set(scalars.tolist())) == len(scalars) and np.all(scalars != 0)
        expected = np.repeat(scalars, [s.num_tokens for s in trajectory.segments])
        np.testing.assert_array_equal(back[b, : len(expected)], expected)
    np.testing.assert_array_equal(on_rows != 0, packed.rows.generated_mask)


@pytest.mark.parametrize("name, size", [("dr_grpo", 0.5), ("grpo", 0.8660254)])
def test_pitfalls_7_and_9_an_empty_and_an_unscored_rollout_leave_their_group_alone(name, size):
    """No tokens at all, no score, a technical failure: None is not 0, and none of them counts."""
    peers = [rollout(f"{i}", o) for i, o in enumerate([1.0, 0.0, 1.0, 0.0])]
    extra = [
        rollout("empty", 0.0, lengths=(0,)),
        rollout("no turn", 0.0, lengths=()),
        rollout("unscored", None),
        rollout("cut", None, end="budget"),
        rollout("failed", 0.0, end="failed", error="the server is gone"),
    ]
    credit = run(name, to_batch(peers + extra))
    expected = np.array([size, -size, size, -size])
    np.testing.assert_allclose(credit.segment_advantages[:4, 0], expected, atol=2e-6)
    assert credit.mask[:4].any(axis=1).all() and not credit.mask[4:].any()
    assert not credit.advantages[4:].any() and not credit.segment_advantages[4:].any()
    # A real 0 does count.
    more = run(name, to_batch([*peers, rollout("lost", 0.0)]))
    assert abs(float(more.segment_advantages[0, 0]) - size) > 0.05


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "opo", "gigpo", "tempo"])
def test_pitfall_8_a_group_of_one_is_an_error_of_the_config(estimator):
    config = quickstart.get_config("grpo")
    config.credit.estimator = estimator
    experiment.validate(config)
    config.rollout.group_size = 1
    with pytest.raises(ValueError, match=f"'{estimator}'.*group_size 1.*at least 2"):
        experiment.validate(config)


@pytest.mark.parametrize("width", [6, 12])
def test_pitfall_10_how_a_rollout_ended_decides_and_its_width_does_not(width):
    """Both fill a batch of width 6, or neither a batch of width 12; only one was cut."""
    ended = rollout("ended", 0.0, lengths=(3, 3))
    cut = rollout("cut", 0.0, lengths=(3, 3), end="context_limit")
    value = np.array([[0.25, 0.5, 0.75]] * 2)
    batch = to_batch([ended, cut], tokens=width, segments=2, value=value)
    np.testing.assert_array_equal(batch.truncated[:2], [False, True])
    credit = run("focus", batch, lambda_=1.0)
    np.testing.assert_allclose(credit.segment_advantages[0], [-0.25, -0.5])
    np.testing.assert_allclose(credit.segment_advantages[1], [0.5, 0.25])


# --- loss and numerics ---------------------------------------------------------------------------

WHOLE = [[[0, 1, 2, 3]]]
SPLITS = WHOLE + [[[0], [1, 2, 3]], [[0, 1], [2, 3]], [[3], [0, 2], [1]], [[0], [1], [2], [3]]]


@pytest.mark.parametrize("split", SPLITS)
def test_pitfall_11_policy_and_critic_losses_are_1_75_for_every_split(split):
    """Token losses [4] and [1, 1, 1]: the mean over tokens is 7 / 4, the mean of means 2.5."""
    sizes, part_masks = np.array([4.0, 1.0, 1.0, 1.0]), np.zeros((len(split), 4), bool)
    for part, members in zip(part_masks, split):
        part[members] = True
    zeros = jnp.zeros(4)
    config = losses.PolicyLossConfig(importance_cap=None)
    critic = head.CriticConfig(feature_dim=4, num_members=8)
    logits = jnp.log(jnp.expm1(sizes))[:, None] * jnp.ones((1, 8))  # softplus gives the sizes back
    everyone, boot = jnp.ones(4, bool), jnp.ones((4, 8), bool)
    total = critic_losses.value_weight(jnp.ones(4), boot, everyone)

    def policy(mask):
        # At ratio 1 a token's loss is minus its advantage.
        return losses.policy_loss(
            zeros, zeros, zeros, -jnp.asarray(sizes), mask, denominator=4.0, config=config
        )[0]

    def value(mask):
        return critic_losses.value_loss(critic, logits, zeros, jnp.ones(4), boot, mask, total)[0]

    # As micro-batches that are added, and as devices that each hold their part.
    for loss in (policy, value):
        parts = [float(loss(jnp.asarray(mask))) for mask in part_masks]
        np.testing.assert_allclose(sum(parts), 1.75, rtol=1e-6)
        over_devices = jax.vmap(
            lambda mask, f=loss: jax.lax.psum(f(mask), "data"), axis_name="data"
        )(jnp.asarray(part_masks))
        np.testing.assert_allclose(over_devices, 1.75, rtol=1e-6)


MODEL_CONFIG = transformer.ModelConfig(
    vocab_size=VOCAB,
    d_model=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=24,
    max_context=128,
)


def test_pitfall_18_temperature_changes_logprobs_and_never_values():
    model = scoring.policy_model(MODEL_CONFIG)
    params = transformer.init_params(MODEL_CONFIG, jax.random.key(0))
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    rows = pack([make_trajectory(random.Random(0), "b", turns=3)]).rows
    critic_config = head.CriticConfig(feature_dim=16, num_members=8, hidden_dim=8)
    critic = head.init_critic(critic_config, jax.random.key(1))

    def at(temperature):
        score = scoring.make_score_fn(model, mesh=mesh, micro_rows=1, temperature=temperature)
        scores = score(params, rows)
        output = head.apply_critic(critic_config, critic, scores.state_hidden)
        belief = head.belief(critic_config, output.value_logits)
        return scores, jax.device_get((belief.mean, belief.error_features, output.log_cost))

    (cold, cold_values), (hot, hot_values) = at(0.25), at(4.0)
    there = rows.generated_mask
    assert np.abs(cold.logp - hot.logp)[there].min() > 1e-4
    np.testing.assert_array_equal(cold.state_hidden, hot.state_hidden)
    jax.tree.map(np.testing.assert_array_equal, cold_values, hot_values)
    assert np.ptp(cold_values[0][rows.state_pos >= 0]) > 0


# --- tokens --------------------------------------------------------------------------------------


def test_pitfall_21_the_cap_of_a_turn_does_not_cut_what_is_trained():
    """Five turns of three tokens under a cap of three: fifteen tokens in the loss."""
    said = CHAT.encode_text("add 1 and then some")
    assert len(said) > 3
    agent = make_agent(FakeEngine(policy=lambda request: said), cap=3)
    task = agent.env.tasks("train")[0]
    trajectory = asyncio.run(
        play(agent, agent.start(task), Rollout("0/0.0", task.id, 0), UnlimitedAccount())
    )
    assert [s.num_tokens for s in trajectory.segments] == [3] * 5
    rows = pack([trajectory], row_length=512).rows
    batch = to_batch([trajectory], segments=5)
    np.testing.assert_array_equal(rows.tokens[rows.generated_mask], said[:3] * 5)
    assert batch.token_mask.sum() == 15
    np.testing.assert_array_equal(batch.token_segment[0, :15], np.repeat(np.arange(5), 3))
    credit = run("focus", dataclasses.replace(batch, value=np.full((12, 6), 0.5, np.float32)))
    assert credit.mask.sum() == 15


# --- traps of pure functions ---------------------------------------------------------------------


# Of the core channels, which this test makes; REINFORCE++ normalises over the batch by definition.
CORE = {"outcome", "segment_reward", "truncated", "group_id", "value", "mc_return", "mc_mask"}
ALONE = sorted(n for n, s in ESTIMATORS.items() if CORE >= set(s.inputs) and "reinforce" not in n)


@pytest.mark.parametrize("name", ALONE)
def test_pitfall_30_a_task_gets_the_same_credit_whatever_else_is_in_the_batch(name):
    """Statistics over the batch, whatever they are called, would show here."""
    first = [rollout(f"a{i}", o) for i, o in enumerate([1.0, 0.0, 0.0, 1.0])]
    second = [rollout(f"b{i}", o, task=1) for i, o in enumerate([1.0, 1.0, 0.0])]
    rng = np.random.default_rng(0)
    channels = {
        "value": rng.uniform(size=(12, 5)).astype(np.float32),
        "value_variance": rng.uniform(size=(12, 5)).astype(np.float32),
        "mc_return": rng.integers(0, 2, (12, 4, 3)).astype(np.float32),
        "mc_mask": np.ones((12, 4, 3), bool),
    }
    together, alone = (
        run(name, dataclasses.replace(to_batch(rows), **channels))
        for rows in (first + second, first)
    )
    assert np.any(alone.advantages != 0)
    np.testing.assert_allclose(together.advantages[:4], alone.advantages[:4], atol=1e-6)
