"""Exact attention with memory linear in the length of a row.

Pairs of blocks of queries and keys are visited one after the other with a running softmax
(Rabe and Staats, arXiv:2112.05682; Dao et al., FlashAttention, arXiv:2205.14135). Kept for the
backward pass are the outputs and one log-sum-exp per query; weights are computed again.

`allgather_attention` is the same for rows whose tokens are cut up over the mesh axis "sequence":
queries stay where they are, keys and values are gathered (and their gradients scattered), so that
a device holds the keys of whole rows, but of one layer and nothing that is quadratic. Devices with
late tokens work more than those with early ones; the longest decides.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from focus.policy.placement import ROWS

Array = jax.Array

_MASKED = -1e30
BLOCK = 512


def blockwise_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    node_id: Array | None,
    visible_until: Array | None,
    scale: float,
    block: int = BLOCK,
) -> Array:
    """Causal, packed or prefix-tree attention, block by block.

    Args:
      q: [B, L, heads, head_dim].
      k: [B, kv_heads, L, head_dim].
      v: [B, kv_heads, L, head_dim].
      node_id: [B, L] int32 and
      visible_until: [B, N, N] int32, see `focus.policy.attention.row_attention`.
      scale: multiplies the logits.
      block: most tokens of a block; rows are cut evenly.

    Returns:
      [B, L, heads, head_dim] in the dtype of `q`; softmax in float32.
    """
    batch, length = q.shape[:2]
    block = _even(length, block)
    if node_id is None:
        node_id = jnp.zeros((batch, length), jnp.int32)
    nodes = _pad_nodes(node_id, block)
    padded = (_pad(x, block) for x in (q.transpose(0, 2, 1, 3), k, v))
    out = _attention(scale, block, *padded, nodes, nodes, visible_until, None)
    return out[:, :, :length].transpose(0, 2, 1, 3)


def allgather_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    node_id: Array | None,
    visible_until: Array | None,
    scale: float,
    block: int = BLOCK,
) -> Array:
    """`blockwise_attention` of rows that are cut up over the ambient mesh's axis "sequence".

    Args:
      q: see `blockwise_attention`, and so are the others.
      k: heads are spread over "tensor", rows over "data" and "fsdp".
      v: as `k`.
      node_id: see there.
      visible_until: see there.
      scale: see there.
      block: most tokens of a block.

    Returns:
      [B, L, heads, head_dim], cut up like `q`.

    Raises:
      ValueError: there is no mesh with an axis "sequence".
    """
    mesh = jax.sharding.get_abstract_mesh()
    if "sequence" not in mesh.axis_names:
        raise ValueError(
            "attention='allgather' needs a mesh with the axis 'sequence' (jax.set_mesh); there is "
            f"{mesh.axis_names or 'none'}. Use 'blockwise' on one device"
        )
    batch, length = q.shape[:2]
    share = length // mesh.shape["sequence"]
    block = _even(share, block)
    if node_id is None:
        node_id = jnp.zeros((batch, length), jnp.int32)

    def local(q, k, v, node_id, *trees):
        def gather(x, axis):
            return jax.lax.all_gather(x, "sequence", axis=axis, tiled=True)

        offset = jax.lax.axis_index("sequence") * share
        q = _pad(q.transpose(0, 2, 1, 3), block)
        keys = (_pad(gather(x, 2), block) for x in (k, v))
        nodes = _pad_nodes(node_id, block), _pad_nodes(gather(node_id, 1), block)
        out = _attention(scale, block, q, *keys, *nodes, *(trees or (None,)), offset)
        return out[:, :, :share].transpose(0, 2, 1, 3)

    trees = () if visible_until is None else (visible_until,)
    queries = PartitionSpec(ROWS, "sequence", "tensor")
    keys = PartitionSpec(ROWS, "tensor", "sequence")
    nodes = PartitionSpec(ROWS, "sequence")
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(queries, keys, keys, nodes, *[PartitionSpec(ROWS)] * len(trees)),
        out_specs=queries,
        check_vma=False,
    )(q, k, v, node_id, *trees)


def _even(length: int, most: int) -> int:
    """Tokens of a block when a row is cut into as few blocks as `most` allows, evenly."""
    return -(-length // -(-length // most))


def _pad(x: Array, block: int) -> Array:
    """[B, heads, L, D] with zeros behind the end, up to whole blocks."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block), (0, 0)))


def _pad_nodes(node_id: Array, block: int) -> Array:
    """[B, L] with padding behind the end, up to whole blocks."""
    return jnp.pad(node_id, ((0, 0), (0, -node_id.shape[1] % block)), constant_values=-1)


def _visit_pairs(visit, carry, num_queries: int, num_keys: int, block: int, offset: Array | None):
    """Scans `visit(carry, i, j)` over the pairs of blocks that a causal mask does not hide.

    Row by row. Where the first query is, `offset`, may be known at run time only: then hidden
    pairs are passed over one by one.
    """
    pairs = np.array(
        [(i, j) for i in range(num_queries) for j in range(i + 1 if offset is None else num_keys)],
        np.int32,
    )

    def step(carry, pair):
        i, j = pair
        if offset is None:
            return visit(carry, i, j), None
        seen = j * block < offset + (i + 1) * block
        return jax.lax.cond(seen, lambda c: visit(c, i, j), lambda c: c, carry), None

    return jax.lax.scan(step, carry, tuple(pairs.T))[0]


def _mask(
    query_node: Array,
    key_node: Array,
    visible_until: Array,
    i: Array,
    j: Array,
    block: int,
    offset: Array | None,
) -> Array:
    """[B, 1, block, block] bool: who sees whom between two blocks, as in `tree_mask`."""
    index = jnp.arange(block)
    query, key = (0 if offset is None else offset) + i * block + index, j * block + index
    query_node = jax.lax.dynamic_slice_in_dim(query_node, i * block, block, axis=1)
    key_node = jax.lax.dynamic_slice_in_dim(key_node, j * block, block, axis=1)

    def limits(visible, a, b):
        return visible[jnp.maximum(a, 0)][:, jnp.maximum(b, 0)]

    valid = (query_node >= 0)[:, :, None] & (key_node >= 0)[:, None, :]
    if visible_until is None:
        open_ = query_node[:, :, None] == key_node[:, None, :]
    else:
        open_ = key < jax.vmap(limits)(visible_until, query_node, key_node)
    sees = (key <= query[:, None]) & open_ & valid
    return (sees | (key == query[:, None]))[:, None]


def _logits(scale: float, q: Array, k: Array, mask: Array) -> Array:
    """[B, heads, block, block] float32; heads that share a key head are not copied."""
    batch, heads, block, head_dim = q.shape
    kv_heads = k.shape[1]
    q = (q * scale).reshape(batch, kv_heads, -1, head_dim)
    logits = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
    return jnp.where(mask, logits.reshape(batch, heads, block, block), _MASKED)


def _to_keys(weights: Array, x: Array, kv_heads: int) -> Array:
    """Sum over queries and over the heads that share a key head: [B, kv_heads, block, D]."""
    batch, _, block, width = x.shape
    weights = weights.astype(x.dtype).reshape(batch, kv_heads, -1, weights.shape[-1])
    x = x.reshape(batch, kv_heads, -1, width)
    return jnp.einsum("bhqk,bhqd->bhkd", weights, x, preferred_element_type=jnp.float32)


def _to_queries(weights: Array, x: Array) -> Array:
    """Sum over keys: [B, heads, block, D]."""
    batch, heads, block, _ = weights.shape
    weights = weights.astype(x.dtype).reshape(batch, x.shape[1], -1, block)
    out = jnp.einsum("bhqk,bhkd->bhqd", weights, x, preferred_element_type=jnp.float32)
    return out.reshape(batch, heads, block, -1)


def _take(x: Array, i: Array, block: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=2)


def _put(x: Array, new: Array, i: Array, block: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), i * block, axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(scale, block, q, k, v, query_node, key_node, visible_until, offset):
    return _forward(scale, block, q, k, v, query_node, key_node, visible_until, offset)[0]


def _forward(scale, block, q, k, v, query_node, key_node, visible_until, offset):
    batch, heads, length, head_dim = q.shape

    def visit(carry, i, j):
        out, log_total, running = carry
        largest, total, mixed = jax.tree.map(
            lambda new, old: jnp.where(j == 0, new, old),
            empty,
            running,
        )
        mask = _mask(query_node, key_node, visible_until, i, j, block, offset)
        logits = _logits(scale, _take(q, i, block), _take(k, j, block), mask)
        new_largest = jnp.maximum(largest, logits.max(axis=-1, keepdims=True))
        # A query that sees nothing yet has only masked logits: their weights must be 0, not 1.
        weights = jnp.where(mask, jnp.exp(logits - new_largest), 0.0)
        shrink = jnp.exp(largest - new_largest)
        total = total * shrink + weights.sum(axis=-1, keepdims=True)
        mixed = mixed * shrink + _to_queries(weights, _take(v, j, block))
        # Written at every pair of a query block; the last, on the diagonal, is complete.
        safe = jnp.where(total > 0, total, 1.0)
        out = _put(out, mixed / safe, i, block)
        log_total = _put(log_total, new_largest + jnp.log(safe), i, block)
        return out, log_total, (new_largest, total, mixed)

    shape = (batch, heads, block)
    empty = (
        jnp.full((*shape, 1), _MASKED, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    start = (jnp.zeros_like(q), jnp.zeros((batch, heads, length, 1), jnp.float32), empty)
    out, log_total, _ = _visit_pairs(
        visit, start, length // block, k.shape[2] // block, block, offset
    )
    return out, (q, k, v, query_node, key_node, visible_until, offset, out, log_total)


def _backward(scale, block, residuals, g_out):
    q, k, v, query_node, key_node, visible_until, offset, out, log_total = residuals
    kv_heads = k.shape[1]
    product = (out.astype(jnp.float32) * g_out.astype(jnp.float32)).sum(axis=-1, keepdims=True)

    def visit(carry, i, j):
        g_q, g_k, g_v = carry
        q_i, k_j, v_j = _take(q, i, block), _take(k, j, block), _take(v, j, block)
        g_i = _take(g_out, i, block)
        mask = _mask(query_node, key_node, visible_until, i, j, block, offset)
        weights = jnp.exp(_logits(scale, q_i, k_j, mask) - _take(log_total, i, block))
        weights = jnp.where(mask, weights, 0.0)
        batch, heads, _, width = g_i.shape
        g_weights = jnp.einsum(
            "bhqd,bhkd->bhqk",
            g_i.reshape(batch, kv_heads, -1, width),
            v_j,
            preferred_element_type=jnp.float32,
        ).reshape(weights.shape)
        g_logits = scale * weights * (g_weights - _take(product, i, block))
        g_q = _put(g_q, _take(g_q, i, block) + _to_queries(g_logits, k_j), i, block)
        g_k = _put(g_k, _take(g_k, j, block) + _to_keys(g_logits, q_i, kv_heads), j, block)
        g_v = _put(g_v, _take(g_v, j, block) + _to_keys(weights, g_i, kv_heads), j, block)

        return g_q, g_k, g_v

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    grads = _visit_pairs(visit, start, q.shape[2] // block, k.shape[2] // block, block, offset)
    return (*(g.astype(x.dtype) for g, x in zip(grads, (q, k, v))), None, None, None, None)


_attention.defvjp(_forward, _backward)
