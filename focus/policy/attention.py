"""Attention over packed rows and over a key-value cache, with one description of who sees whom.

A packed row holds one or more *prefix trees*: a trunk (a base trajectory) and continuations
that left it at some point. Every token belongs to a node of its row, and

    visible_until[n, m] = row index up to which tokens of node n may look into node m
                          (0: not at all; its own node: no limit)

so token i sees token j exactly when `j <= i` and `j < visible_until[node[i], node[j]]`. Packing
of unrelated sequences is the special case of a diagonal matrix, a causal model that of one node.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from focus.policy.blockwise import allgather_attention, blockwise_attention
from focus.policy.splash import splash_attention

Array = jax.Array

# plain: one array of all pairs, fastest for short rows. blockwise: memory linear in the length.
# allgather: blockwise, for rows that are cut up over the mesh. splash: kernels for TPUs.
BACKENDS = ("plain", "blockwise", "allgather", "splash")
# These know documents side by side, and no prefix trees.
DOCUMENTS_ONLY = ("splash",)

_MASKED = -1e30  # finite: a row of padding must give numbers, not NaN


def tree_mask(node_id: Array, visible_until: Array) -> Array:
    """Who sees whom in a packed row.

    Args:
      node_id: [L] int32 node of each token, -1 for padding.
      visible_until: [N, N] int32, see the module docstring.

    Returns:
      [L, L] bool, entry (i, j) True where token i attends to token j. Padding attends to
      itself only, which keeps its softmax finite.
    """
    index = jnp.arange(node_id.shape[0])
    safe = jnp.maximum(node_id, 0)
    limit = visible_until[safe][:, safe]
    valid = (node_id >= 0)[:, None] & (node_id >= 0)[None, :]
    sees = (index[None, :] <= index[:, None]) & (index[None, :] < limit) & valid
    return sees | (index[None, :] == index[:, None])


def document_mask(node_id: Array) -> Array:
    """`tree_mask` where every node sees itself only: [L] to [L, L] bool."""
    index = jnp.arange(node_id.shape[0])
    same = (node_id[:, None] == node_id[None, :]) & (node_id >= 0)[:, None]
    return (same & (index[None, :] <= index[:, None])) | (index[None, :] == index[:, None])


def check_backend(name: str) -> None:
    """Raises ValueError for a backend that does not exist."""
    if name not in BACKENDS:
        raise ValueError(f"attention must be one of {', '.join(BACKENDS)}; got {name!r}")


def row_attention(
    backend: str,
    shape: tuple[int, int],
    node_id: Array | None,
    visible_until: Array | None,
    scale: float,
) -> Callable[[Array, Array, Array], Array]:
    """Attention over whole rows, prepared once for all layers.

    Args:
      backend: one of `BACKENDS`.
      shape: (B, L).
      node_id: [B, L] int32, see the module docstring; None: one node a row.
      visible_until: [B, N, N] int32, see there; None: every node sees itself only.
      scale: multiplies the logits.

    Returns:
      `attend(q [B, L, heads, head_dim], k, v [B, kv_heads, L, head_dim])` ->
      [B, L, heads, head_dim].

    Raises:
      ValueError: unknown backend, `visible_until` without `node_id`, or with a backend that does
        not know it.
    """
    check_backend(backend)
    if visible_until is not None and backend in DOCUMENTS_ONLY:
        raise ValueError(
            f"attention={backend!r} knows documents side by side (node_id) and no prefix trees: "
            "leave visible_until out and pack with share_prefixes=False, or use 'blockwise'"
        )
    if node_id is None and visible_until is not None:
        raise ValueError("visible_until says which nodes see each other: give node_id as well")
    if backend == "splash":
        return lambda q, k, v: splash_attention(q, k, v, node_id=node_id, scale=scale)
    if backend in ("blockwise", "allgather"):
        by_blocks = blockwise_attention if backend == "blockwise" else allgather_attention
        return lambda q, k, v: by_blocks(
            q, k, v, node_id=node_id, visible_until=visible_until, scale=scale
        )
    if node_id is None:
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((shape[1],) * 2, bool)), (*shape, shape[1]))
    elif visible_until is None:
        mask = jax.vmap(document_mask)(node_id)
    else:
        mask = jax.vmap(tree_mask)(node_id, visible_until)
    return lambda q, k, v: _attend_rows(q, k, v, mask, scale)


def plain_block(length: int) -> int:
    """Queries that "plain" takes at a time: at most four blocks a row, of 64 tokens or more."""
    parts = next(n for n in (4, 3, 2, 1) if length % n == 0 and (n == 1 or length // n >= 64))
    return length // parts


def _attend_rows(q: Array, k: Array, v: Array, mask: Array, scale: float) -> Array:
    """`attend` over whole rows: no query is multiplied with keys that all lie behind its block."""
    block = plain_block(q.shape[1])

    def attend_block(start: int) -> Array:
        end = start + block
        return attend(
            q[:, start:end], k[:, :, :end], v[:, :, :end], mask[:, start:end, :end], scale
        )

    return jnp.concatenate([attend_block(i) for i in range(0, q.shape[1], block)], axis=1)


def attend(q: Array, k: Array, v: Array, mask: Array, scale: float) -> Array:
    """Grouped-query attention with softmax in float32.

    The heads that share a key head are laid along the query axis, so that the two products are
    plain batched matrix products; on CPUs this is about 1.5 times as fast as a five-axis einsum.

    Args:
      q: [B, Lq, heads, head_dim].
      k: [B, kv_heads, Lk, head_dim].
      v: [B, kv_heads, Lk, head_dim].
      mask: [B, Lq, Lk] bool, True where attention is allowed.
      scale: multiplies the logits.

    Returns:
      [B, Lq, heads, head_dim] in the dtype of `q`.
    """
    batch, len_q, heads, head_dim = q.shape
    kv_heads, len_k = k.shape[1], k.shape[2]
    group = heads // kv_heads
    q = q.reshape(batch, len_q, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch * kv_heads, group * len_q, head_dim)
    k = k.reshape(batch * kv_heads, len_k, head_dim)
    v = v.reshape(batch * kv_heads, len_k, head_dim)
    logits = jnp.einsum("bqd,bkd->bqk", q * scale, k, preferred_element_type=jnp.float32)
    logits = logits.reshape(batch, kv_heads, group, len_q, len_k)
    logits = jnp.where(mask[:, None, None], logits, _MASKED)
    # Normalising after the second product divides head_dim numbers a query instead of len_k.
    largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - largest)
    total = weights.sum(axis=-1).reshape(batch * kv_heads, group * len_q, 1)
    weights = weights.astype(v.dtype).reshape(batch * kv_heads, group * len_q, len_k)
    out = jnp.einsum("bqk,bkd->bqd", weights, v, preferred_element_type=jnp.float32) / total
    out = out.astype(q.dtype)
    out = out.reshape(batch, kv_heads, group, len_q, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, len_q, heads, head_dim)
