"""Products with rounded operands: what is rounded, in which pass, and that nothing else is."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, make_params
from random_trajectories import make_forest

from focus.learner import scoring
from focus.learner.packing import pack_trajectories
from focus.policy import rounded
from focus.policy.layers import project


def rows_of(config):
    return pack_trajectories(
        make_forest(0, 5, 5),
        row_length=32,
        max_nodes=6,
        max_states=12,
        rows_multiple=2,
        share_prefixes=scoring.policy_model(config).shares_prefixes,
    ).rows


def to_bfloat16(x):
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))


def rounded_where(chosen, params):
    return jax.tree_util.tree_map_with_path(
        lambda path, x: to_bfloat16(x) if chosen(path[-1].key) else x, params
    )


def test_operands_of_all_three_products_are_rounded_and_sums_are_not():
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=s).astype(np.float32) for s in ((3, 5, 64), (64, 7), (3, 5, 7)))

    def loss(x, w):
        return jnp.sum(g * project(x, rounded.RoundedWeight(w, "bfloat16")))

    out = project(jnp.asarray(x), rounded.RoundedWeight(jnp.asarray(w), "bfloat16"))
    g_x, g_w = jax.grad(loss, argnums=(0, 1))(x, w)
    x16, w16, g16 = to_bfloat16(x), to_bfloat16(w), to_bfloat16(g)
    for got in (out, g_x, g_w):
        assert got.dtype == jnp.float32
    np.testing.assert_allclose(out, x16 @ w16, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(g_x, g16 @ w16.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        g_w, x16.reshape(-1, 64).T @ g16.reshape(-1, 7), rtol=1e-5, atol=1e-5
    )
    assert np.abs(out - x @ w).max() > 1e-3  # what is not rounded would be nearer


@pytest.mark.parametrize("family", ("qwen3", "qwen2", "qwen3_5"))
def test_every_projection_of_a_model_is_rounded_and_the_rest_is_close(family):
    config = FAMILIES[family]
    params, rows = make_params(config), rows_of(config)
    exact, short = (scoring.policy_model(config, products=p).hidden for p in (None, "bfloat16"))
    real = rows.node_id >= 0
    difference = np.abs(exact(params, rows) - short(params, rows))[real].mean()
    assert 1e-4 < difference < 0.1
    # Rounding twice is rounding once: projections that are rounded before change nothing, all
    # other parameters would.
    once = rounded_where(lambda name: "_proj" in name, params)
    np.testing.assert_array_equal(short(once, rows)[real], short(params, rows)[real])
    others = rounded_where(lambda name: "_proj" not in name, params)
    assert np.abs(short(others, rows) - short(params, rows))[real].max() > 1e-4


def test_the_gradient_points_where_the_exact_one_does():
    config = FAMILIES["qwen3"]
    params, rows = make_params(config), rows_of(config)
    real = (rows.node_id >= 0)[..., None]

    def gradient(products):
        hidden = scoring.policy_model(config, products=products).hidden
        grads = jax.grad(lambda p: jnp.sum(jnp.where(real, hidden(p, rows), 0) ** 3))
        return jax.flatten_util.ravel_pytree(grads(params))[0]

    exact, short = gradient(None), gradient("bfloat16")
    cosine = exact @ short / jnp.linalg.norm(exact) / jnp.linalg.norm(short)
    assert 0.999 < cosine < 1 - 1e-7


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(ValueError, match="products must be None or one of bfloat16.*'int8'"):
        scoring.policy_model(FAMILIES["qwen3"], products="int8")
    weight = rounded.RoundedWeight(jnp.ones((4, 4)), "bfloat16")
    with pytest.raises(ValueError, match="computes in bfloat16 already"):
        project(jnp.ones((2, 4), jnp.bfloat16), weight)
