"""All backends of attention give the numbers of the plain one, whoever sees whom."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_program

from focus.policy import attention, blockwise
from focus.policy.blockwise import allgather_attention, blockwise_attention
from focus.policy.splash import splash_attention

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3


def draw(seed, batch, length, width=WIDTH):
    rng = np.random.default_rng(seed)
    shapes = [(batch, length, HEADS, width), *[(batch, KV_HEADS, length, width)] * 2]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def random_tree(seed, length, max_nodes=4):
    """Nodes one behind the other, each hanging on an earlier one or on none, then padding."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(1, length, max_nodes))
    node_id = np.searchsorted(cuts, np.arange(length), side="right")
    node_id[node_id == max_nodes] = -1
    starts = [0, *cuts[:-1]]
    visible = np.zeros((max_nodes, max_nodes), np.int32)
    for node in range(max_nodes):
        visible[node, node] = length
        parent = rng.integers(-1, node) if node else -1
        if parent >= 0 and starts[node] > starts[parent]:
            visible[node] = np.maximum(visible[node], visible[parent])
            visible[node, parent] = rng.integers(starts[parent] + 1, starts[node] + 1)
    return node_id.astype(np.int32), visible


def with_gradients(attend, q, k, v):
    weights = jnp.asarray(np.random.default_rng(9).normal(size=q.shape), jnp.float32)

    def loss(q, k, v):
        out = attend(q, k, v)
        return jnp.sum(weights * out), out

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)


def assert_same(got, want):
    np.testing.assert_allclose(got[1], want[1], atol=1e-5)
    for a, b in zip(got[0], want[0]):
        np.testing.assert_allclose(a, b, atol=1e-4)


@given(seed=st.integers(0, 999), length=st.sampled_from([21, 40]), block=st.sampled_from([8, 16]))
@settings(deadline=None, max_examples=12)
def test_blockwise_equals_plain_on_random_trees(seed, length, block):
    trees = [random_tree(seed + i, length) for i in range(2)]
    node_id, visible = (jnp.asarray(np.stack(x)) for x in zip(*trees))
    q, k, v = draw(seed, 2, length)

    def by_blocks(q, k, v):
        return blockwise_attention(
            q, k, v, node_id=node_id, visible_until=visible, scale=SCALE, block=block
        )

    plain = attention.row_attention("plain", (2, length), node_id, visible, SCALE)
    assert_same(with_gradients(by_blocks, q, k, v), with_gradients(plain, q, k, v))


@pytest.mark.parametrize("backend", ["plain", "blockwise"])
def test_nodes_without_visibility_see_themselves_only(backend):
    node_id = jnp.asarray(np.repeat([0, 1, 2, -1], [9, 4, 16, 8])[None].repeat(2, 0), jnp.int32)
    visible = jnp.broadcast_to(jnp.eye(3, dtype=jnp.int32) * 37, (2, 3, 3))
    q, k, v = draw(2, 2, 37)
    tree = attention.row_attention("plain", (2, 37), node_id, visible, SCALE)
    alone = attention.row_attention(backend, (2, 37), node_id, None, SCALE)
    assert_same(with_gradients(alone, q, k, v), with_gradients(tree, q, k, v))


def test_causal_rows_need_no_description():
    q, k, v = draw(0, 2, 37)
    plain, blocks = (
        attention.row_attention(name, (2, 37), None, None, SCALE) for name in ("plain", "blockwise")
    )
    assert_same(with_gradients(blocks, q, k, v), with_gradients(plain, q, k, v))
    # and no token sees a later one
    changed = blocks(q, k.at[:, :, 20:].add(1.0), v.at[:, :, 20:].add(1.0))
    np.testing.assert_array_equal(changed[:, :20], blocks(q, k, v)[:, :20])


def test_blockwise_memory_does_not_grow_with_the_square_of_the_length():
    def temporaries(backend, length):
        q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in draw(0, 1, length))
        attend = attention.row_attention(backend, (1, length), None, None, SCALE)
        gradient = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v).sum(), argnums=(0, 1, 2)))
        return gradient.lower(q, k, v).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("blockwise", 4096) < 3 * temporaries("blockwise", 2048)
    assert temporaries("blockwise", 4096) < temporaries("plain", 4096) / 8


@pytest.mark.parametrize("length", [256, 384])  # 384 is no multiple of 256, a block of it is
def test_splash_equals_plain_on_documents_with_gradients(length):
    q, k, v = draw(1, 2, length, width=128)
    borders = [100, 60, 40, length - 200]
    node_id = jnp.asarray(np.repeat([[0, 1, 2, -1], [0, 1, 1, 1]], borders, axis=1), jnp.int32)
    plain = attention.row_attention("plain", (2, length), node_id, None, SCALE)

    def kernels(q, k, v):
        return splash_attention(q, k, v, node_id=node_id, scale=SCALE, interpret=True)

    def real(attend):
        """Without padding, which sees itself in one backend and its like in the other."""
        return lambda q, k, v: jnp.where((node_id >= 0)[..., None, None], attend(q, k, v), 0.0)

    got, want = (with_gradients(real(attend), q, k, v) for attend in (kernels, plain))
    assert_same(got, want)
    # What stands at padding reaches no other token.
    at = (node_id < 0)[:, None, :, None]
    changed = kernels(q, jnp.where(at, k + 1.0, k), jnp.where(at, v + 1.0, v))
    np.testing.assert_array_equal(changed[0, :200], kernels(q, k, v)[0, :200])


def test_splash_without_documents_is_causal():
    q, k, v = draw(2, 1, 128, width=128)
    plain = attention.row_attention("plain", (1, 128), None, None, SCALE)
    got = splash_attention(q, k, v, node_id=None, scale=SCALE, interpret=True)
    np.testing.assert_allclose(got, plain(q, k, v), atol=1e-5)


def test_rows_are_cut_into_few_even_blocks():
    assert blockwise._even(521, 512) == 261  # a prime number of tokens: two blocks
    assert blockwise._even(1024, 512) == 512 and blockwise._even(7, 512) == 7
    for length in range(1, 70):
        block = blockwise._even(length, 16)
        assert block <= 16 and -(-length // block) == -(-length // 16)


MESHES = """
import jax, numpy as np, jax.numpy as jnp
from focus.learner import sharding
from test_attention import SCALE, assert_same, draw, random_tree, with_gradients
from focus.policy import attention
from focus.policy.blockwise import allgather_attention

length = 56  # a device's share of a row may be 7 tokens, and a block must not shrink to 1
trees = [random_tree(i, length) for i in range(4)]
node_id, visible = (jnp.asarray(np.stack(x)) for x in zip(*trees))
q, k, v = draw(0, 4, length)
plain = attention.row_attention("plain", (4, length), node_id, visible, SCALE)
want = with_gradients(plain, q, k, v)
for shape in ((1, 1, 1, 8), (2, 1, 1, 4), (1, 2, 2, 2)):
    mesh = sharding.make_mesh(*shape)
    spread = attention.row_attention("allgather", (4, length), node_id, visible, SCALE)
    with jax.set_mesh(mesh):
        assert_same(with_gradients(spread, q, k, v), want)
        documents = attention.row_attention("allgather", (4, length), node_id, None, SCALE)
        alone = attention.row_attention("plain", (4, length), node_id, None, SCALE)
        assert_same(with_gradients(documents, q, k, v), with_gradients(alone, q, k, v))
        small = lambda q, k, v: allgather_attention(
            q, k, v, node_id=node_id, visible_until=visible, scale=SCALE, block=4)
        assert_same(with_gradients(small, q, k, v), want)
    print("same on", shape)
"""


def test_rows_cut_up_over_a_mesh_equal_whole_ones():
    assert run_program(MESHES).count("same on") == 3


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="attention must be one of plain.*got 'flash'"):
        attention.row_attention("flash", (1, 8), None, None, 1.0)
    with pytest.raises(ValueError, match="give node_id as well"):
        attention.row_attention("plain", (1, 8), None, jnp.zeros((1, 1, 1), int), 1.0)
    node_id, visible = jnp.zeros((1, 128), int), jnp.full((1, 1, 1), 128)
    with pytest.raises(ValueError, match="'splash' knows documents .* share_prefixes=False"):
        attention.row_attention("splash", (1, 128), node_id, visible, 1.0)
    with pytest.raises(ValueError, match="a multiple of 128 tokens, got 200"):
        splash_attention(*draw(0, 1, 200), node_id=None, scale=1.0, interpret=True)
    with pytest.raises(ValueError, match="needs a mesh with the axis 'sequence'"):
        allgather_attention(*draw(0, 1, 8), node_id=None, visible_until=None, scale=1.0)
