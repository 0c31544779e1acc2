"""Rules that every estimator of the registry keeps, whatever it computes."""

import dataclasses
import functools
import inspect
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from credit_batches import NAMES, fill_padding, full_batch

from focus.credit import ESTIMATORS, channels, estimate
from focus.types import CreditBatch

each_estimator = pytest.mark.parametrize("name", NAMES)
run = jax.jit(estimate, static_argnums=0)

# What a group of equal outcomes gives exactly nothing. Discounts of 1 make every way through a
# row worth the same; the others learn from evaluators, which may differ where outcomes agree.
NOTHING_TO_COMPARE = {
    "grpo": {}, "dr_grpo": {}, "rloo": {}, "reinforce_pp_baseline": {}, "opo": {}, "dapo": {},
    "grpo_lambda": {}, "tempo": {}, "spro": {"beta": 0.0}, "gigpo": {"discount": 1.0},
    "proxmo": {"discount": 1.0}, "pgpo": {"discount": 1.0}, "a3": {}, "g2po": {"discount": 1.0},
    "gagpo": {"discount": 1.0, "lambda_": 1.0}, "spo_tree": {}, "at2po": {}, "pivoarl": {},
    "cbpo": {}, "craft": {}, "hpo": {}, "iapo": {}, "self_credit": {},
}  # fmt: skip


def assert_sound(credit, batch):
    """Finite, inside its own mask, no token that is not the policy's."""
    assert jax.tree.all(jax.tree.map(lambda x: bool(np.all(np.isfinite(x))), credit))
    allowed = np.asarray(batch.token_mask & batch.row_mask[:, None])
    assert credit.advantages.shape == credit.mask.shape == batch.token_mask.shape
    assert credit.segment_advantages.shape == batch.segment_mask.shape
    assert not np.any(np.asarray(credit.mask) & ~allowed)
    assert not np.any(np.asarray(credit.advantages)[~np.asarray(credit.mask)])
    absent = ~np.asarray(batch.segment_mask & batch.row_mask[:, None])
    assert not np.any(np.asarray(credit.segment_advantages)[absent])


def assert_same(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


@functools.lru_cache
def plain(name):
    return run(name, full_batch(0))


@each_estimator
def test_something_is_learned_and_compiling_changes_nothing(name):
    batch = full_batch(0)
    assert_sound(plain(name), batch)
    assert np.any(plain(name).advantages != 0)
    assert_same(plain(name), estimate(name, batch))


@each_estimator
def test_what_stands_in_the_padding_is_never_read(name):
    batch = full_batch(0)
    batch = dataclasses.replace(batch, row_mask=batch.row_mask.at[-3:].set(False))
    clean = fill_padding(batch, 0.0, -1, False)
    poisoned = fill_padding(batch, np.nan, 0, True)
    got = run(name, poisoned)
    assert_sound(got, poisoned)
    assert_same(got, run(name, clean))


@each_estimator
def test_no_rows_no_segments_or_no_tokens_are_no_credit(name):
    batch = full_batch(1)
    for empty in (
        {"row_mask": jnp.zeros_like(batch.row_mask)},
        {"segment_mask": jnp.zeros_like(batch.segment_mask)},
        {"token_mask": jnp.zeros_like(batch.token_mask)},
    ):
        nothing = fill_padding(dataclasses.replace(batch, **empty), np.nan, 0, True)
        credit = run(name, jax.tree.map(jnp.asarray, nothing))
        assert_sound(credit, nothing)
        assert not np.any(credit.mask) and not np.any(credit.advantages)


@each_estimator
def test_segments_without_tokens_are_defined(name):
    """The policy said nothing in the second segment: its tokens are all an observation's."""
    batch = full_batch(2)
    silent = batch.token_segment == 1
    batch = dataclasses.replace(
        batch,
        token_mask=batch.token_mask & ~silent,
        token_segment=jnp.where(silent, -1, batch.token_segment),
    )
    credit = run(name, batch)
    assert_sound(credit, batch)
    assert not np.any(credit.mask & silent)


@each_estimator
def test_rows_alone_with_their_tasks_are_defined(name):
    batch = full_batch(3)
    rows = jnp.arange(len(batch.group_id), dtype=jnp.int32)
    assert_sound(run(name, dataclasses.replace(batch, group_id=rows)), batch)


@each_estimator
def test_groups_of_equal_outcomes(name):
    batch = full_batch(4)
    for outcome in (0.0, 1.0):
        equal = dataclasses.replace(
            batch,
            outcome=jnp.full_like(batch.outcome, outcome),
            success=jnp.full_like(batch.success, outcome == 1),
        )
        credit = run(name, equal)
        assert_sound(credit, equal)
    if name in NOTHING_TO_COMPARE:
        hparams = NOTHING_TO_COMPARE[name]
        credit = jax.jit(functools.partial(estimate, name, **hparams))(equal)
        np.testing.assert_allclose(credit.advantages, 0, atol=1e-6)


def test_what_compares_outcomes_is_said_to_need_a_group():
    for name in NOTHING_TO_COMPARE:
        if name not in ("spo_tree", "at2po"):  # trees bring their own siblings
            assert ESTIMATORS[name].min_group_size == 2, name


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_docstrings_say_the_formula_the_paper_and_how_it_is_known(name):
    spec = ESTIMATORS[name]
    text = inspect.getdoc(spec.fn)
    words = " ".join(text.split())
    assert re.search(r"^ {4,}\S.*=", text, re.MULTILINE), "no formula"
    assert re.search(r"arXiv:\d{4}\.\d{5}|no arXiv number", words)
    assert f"Evidence: {spec.evidence}" in words


OPTIONAL = {f.name for f in dataclasses.fields(CreditBatch) if f.default is None}


@each_estimator
def test_a_missing_channel_is_named_with_its_producer(name):
    batch = full_batch(0)
    for channel in OPTIONAL.intersection(ESTIMATORS[name].inputs):
        producer = channels.CHANNEL_PRODUCERS[channel]
        with pytest.raises(ValueError, match=f"{name}.* {channel}.*{re.escape(producer)}"):
            estimate(name, dataclasses.replace(batch, **{channel: None}))


@each_estimator
def test_the_inputs_that_are_declared_are_all_that_is_read(name):
    """Without any other channel it runs; what a setting adds is asked for by that setting."""
    needed = set(ESTIMATORS[name].inputs)
    needed |= {"proxmo": {"emb"}, "self_credit": {"match_class"}, "step_agent": {"ref_logp"}}.get(
        name, set()
    )
    batch = dataclasses.replace(full_batch(0), **dict.fromkeys(OPTIONAL - needed))
    credit = jax.eval_shape(functools.partial(estimate, name), batch)
    assert credit.advantages.shape == batch.token_mask.shape


def test_every_optional_channel_has_a_producer():
    assert OPTIONAL == set(channels.CHANNEL_PRODUCERS)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_docstring_says_how_the_method_is_known(name):
    spec = ESTIMATORS[name]
    assert spec.fn.__doc__ and "Args:" in spec.fn.__doc__ and "Returns:" in spec.fn.__doc__
    for paper in re.findall(r"arXiv:\d{4}\.\d{5}", spec.reference):
        source = inspect.getsource(sys.modules[spec.fn.__module__])
        assert paper in source
