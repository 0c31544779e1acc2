"""Every estimator under `jax.vmap` and `jax.grad`, at the smallest shape and with NaN padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from credit_batches import NAMES, SEGMENT_FLOATS, STATE_FLOATS, TOKEN_FLOATS, fill_padding
from credit_batches import full_batch as make_full

from focus.credit import ESTIMATORS, estimate

each_estimator = pytest.mark.parametrize("name", NAMES)
FLOATS = {*SEGMENT_FLOATS, *STATE_FLOATS, *TOKEN_FLOATS, "outcome", "cut_value", "coalition"}


@each_estimator
def test_rows_of_one_segment_and_one_token_batch_with_vmap(name):
    batches = [make_full(seed, rows=3, width=1, per_segment=1, num_groups=1) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    got = jax.jit(jax.vmap(lambda batch: estimate(name, batch)))(stacked)
    for i, batch in enumerate(batches):
        expected = estimate(name, batch)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert np.all(np.isfinite(b))
            np.testing.assert_allclose(a[i], b, atol=2e-5)


@each_estimator
def test_gradients_are_finite_and_stay_off_the_padding(name):
    batch = make_full(5)
    batch = dataclasses.replace(batch, row_mask=batch.row_mask.at[-3:].set(False))
    batch = jax.tree.map(jnp.asarray, fill_padding(batch, np.nan, 0, True))
    inputs = {k: getattr(batch, k) for k in FLOATS.intersection(ESTIMATORS[name].inputs)}

    def loss(inputs):
        credit = estimate(name, dataclasses.replace(batch, **inputs))
        weights = 1.0 + jnp.arange(credit.advantages.size).reshape(credit.advantages.shape)
        return jnp.sum(weights * credit.advantages)

    for channel, gradient in jax.jit(jax.grad(loss))(inputs).items():
        assert np.all(np.isfinite(gradient)), channel
        assert not np.any(np.asarray(gradient)[np.isnan(inputs[channel])]), channel
