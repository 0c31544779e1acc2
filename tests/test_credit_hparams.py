"""Hyperparameters of estimators: traced numbers, ranges, and flags that select a program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from credit_batches import NAMES, full_batch

from focus.credit import ESTIMATORS, estimate
from focus.credit.hparams import RANGES


def numbers(name):
    """Its hyperparameters that are numbers, with a value at which what they weigh is read."""
    values = {}
    for key, default in ESTIMATORS[name].hparams.items():
        if isinstance(default, float) or (type(default) is int and key != "iterations"):
            values[key] = default or 1
    return values


@pytest.mark.parametrize("name", [name for name in NAMES if numbers(name)])
def test_every_number_may_be_traced(name):
    """One program for a sweep: all numbers at once, traced without being compiled."""
    batch, values = full_batch(0), numbers(name)
    shapes = jax.eval_shape(
        lambda hparams: estimate(name, batch, **hparams),
        jax.tree.map(jnp.asarray, values),
    )
    assert shapes.advantages.shape == batch.token_mask.shape


@pytest.mark.parametrize(
    "name, sweep",
    [
        ("reinforce_pp", {"kl_coef": [0.0, 0.3]}),
        ("grpo_lambda", {"lambda_": [0.5, 0.9]}),
        ("iapo", {"highest": [1.25, 2.0]}),
        ("dapo", {"max_length": [0, 6], "buffer": [1, 4]}),
        ("sapo_2608_19842", {"invalid_penalty": [0.0, 0.5]}),
    ],
)
def test_a_sweep_in_one_program_gives_what_each_value_gives_alone(name, sweep):
    batch = full_batch(1)

    def advantages(hparams):
        return estimate(name, batch, **hparams).advantages

    together = jax.jit(jax.vmap(advantages))({k: jnp.array(v) for k, v in sweep.items()})
    for i, got in enumerate(together):
        alone = advantages({key: values[i] for key, values in sweep.items()})
        np.testing.assert_allclose(got, alone, atol=1e-5)
    assert np.any(together[0] != together[1])


@pytest.mark.parametrize(
    "name, key, value, message",
    [
        ("pure", "temperature", 0.0, r"pure: temperature=0.0 must be in \(0, inf\)"),
        ("craft", "temperature", -1.0, "temperature=-1.0"),
        ("cbpo", "phi", 0.0, "phi=0.0"),
        ("a3", "bound", 0, "bound=0"),
        ("grpo", "ddof", 5, r"ddof=5 must be in \[0, 1\]"),
        ("grpo", "eps", -1.0, "eps=-1.0"),
        ("focus", "discount", 1.5, r"discount=1.5 must be in \[0, 1\]"),
        ("focus", "lambda_", -0.1, "lambda_"),
        ("focus", "lambda_", float("nan"), "lambda_=nan"),
        ("gigpo", "step_weight", float("inf"), "step_weight=inf must be finite"),
        ("grpo_lambda", "lambda_", np.array([0.5, 1.5]), "lambda_"),
        ("iapo", "lowest", 3.0, "lowest=3.0 must be > 0 and at most highest=2.0"),
        ("dapo", "max_length", -2, "max_length"),
        ("hpo", "iterations", 0, "iterations"),
    ],
)
def test_nonsense_is_refused_by_name(name, key, value, message):
    with pytest.raises(ValueError, match=message):
        estimate(name, full_batch(0), **{key: value})


def test_defaults_are_in_range_and_every_range_belongs_to_somebody():
    keys = {key for spec in ESTIMATORS.values() for key in spec.hparams}
    assert set(RANGES) <= keys | {"segment_lambda"}
    for name in NAMES:
        estimate_with_defaults = dict(ESTIMATORS[name].hparams)
        jax.eval_shape(
            lambda b, n=name, h=estimate_with_defaults: estimate(n, b, **h), full_batch(0)
        )


@pytest.mark.parametrize("name", NAMES)
def test_inputs_say_all_that_the_defaults_need(name):
    batch, spec = full_batch(0), ESTIMATORS[name]
    optional = {f.name for f in dataclasses.fields(batch) if f.default is None}
    others = optional - {*spec.inputs, *spec.default_inputs}
    bare = dataclasses.replace(batch, **dict.fromkeys(others))
    jax.eval_shape(lambda b: estimate(name, b), bare)


def test_a_traced_flag_is_refused_by_name():
    def whitened(flag):
        return estimate("reinforce_pp", full_batch(0), whiten=flag).advantages

    with pytest.raises(ValueError, match="reinforce_pp: whiten=.* mark it as static"):
        jax.jit(whitened)(True)


# --- numbers at the edges ------------------------------------------------------------------------


def small(rows, tokens, group=None, **channels):
    """One segment a row, as many tokens as `tokens` says."""
    batch = full_batch(0, rows=rows, width=1, per_segment=max(tokens), num_groups=1)
    mask = np.arange(max(tokens)) < np.array(tokens)[:, None]
    return dataclasses.replace(
        batch,
        token_mask=jnp.asarray(mask),
        token_segment=jnp.asarray(np.where(mask, 0, -1), jnp.int32),
        segment_reward=jnp.zeros((rows, 1)),
        **{name: jnp.asarray(value) for name, value in channels.items()},
    )


def test_crafts_softmax_has_a_maximum_of_its_own_for_every_row():
    outcome = np.array([0.0, 1, -1], np.float32)
    gap = np.array([[0.0], [5], [-5]], np.float32)
    batch = small(3, [1] * 3, outcome=outcome, behaviour_logp=np.zeros((3, 1), np.float32),
                  teacher_logp=gap)  # fmt: skip
    got = estimate("craft", batch, temperature=0.05, eps=0.0).advantages
    np.testing.assert_allclose(got[:, 0], [1, 0.5, 0.5], atol=1e-5)


@pytest.mark.parametrize("padding", [-1, 3])
def test_tempo_reads_no_prefix_behind_a_rows_last_token(padding):
    keys = np.array([[0, 1, padding], [0, 2, 3]], np.int32)
    batch = small(2, [1, 2], outcome=np.array([1.0, 0], np.float32), prefix_key=keys)
    got = estimate("tempo", batch, eps=0.0).advantages
    np.testing.assert_allclose(got, [[2, 0], [-2, -1]], atol=1e-6)


def test_scars_spans_may_stand_in_any_order_and_be_empty():
    coalition = np.array([[0, 0.4, 0.6, 1.0]], np.float32)  # phi [.4, .6]
    common = dict(outcome=np.zeros(1, np.float32), coalition=coalition)

    def advantages(spans):
        batch = small(1, [len(spans)], segment_id=np.array([spans], np.int32), **common)
        return estimate("scar", batch).advantages[0]

    np.testing.assert_allclose(advantages([1, 0]), [1.0, 0.4], atol=1e-6)
    np.testing.assert_allclose(advantages([0, 1, 0]), [1.0, 1.0, 0.4], atol=1e-6)
    np.testing.assert_allclose(advantages([1, 1]), [1.0, 1.0], atol=1e-6)  # the first is empty
    np.testing.assert_allclose(advantages([0, -1]), [1.0, 0.6], atol=1e-6)  # the second is


def test_a3_says_what_a_state_with_one_action_supports():
    """Two rows take one action in the first state, two actions in the second."""
    batch = full_batch(0, rows=2, width=2, num_groups=1)
    batch = dataclasses.replace(
        batch,
        outcome=jnp.array([1.0, 0.0]),
        segment_mask=jnp.ones((2, 2), bool),
        segment_reward=jnp.zeros((2, 2)),
        state_key=jnp.array([[0, 1], [0, 1]], jnp.int32),
        action_key=jnp.array([[0, 0], [0, 1]], jnp.int32),
    )
    last, single = 0.5 / 1.1, 2 / 2.1  # shrunk gain, support of the single action
    for rule, support in (("support", single + 0.9 / 1.1), ("none", 0.9 / 1.1)):
        tree = estimate("a3", batch, single_action=rule).aux["tree"]
        want = support / (support + 0.1) * 0.9 * last
        np.testing.assert_allclose(tree[:, 0], [want, -want], rtol=1e-5)
