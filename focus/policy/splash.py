"""Flash attention for TPUs: the splash kernels of JAX's own Pallas library.

They know causal masks and documents side by side, and skip what is hidden. Prefix trees they do
not know: rows for them hold whole sequences (`share_prefixes=False` in packing), every node a
document.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

from focus.policy.placement import ROWS, axis_size

Array = jax.Array

BLOCK = 1024
COMPUTE_BLOCK = 512
LANES = 128  # the kernels' unit: rows are a multiple of it


def _divisor(length: int, most: int) -> int:
    """The largest multiple of `LANES` up to `most` that divides a row."""
    return next(n for n in range(most, 0, -LANES) if length % n == 0)


def splash_attention(
    q: Array, k: Array, v: Array, *, node_id: Array | None, scale: float, interpret: bool = False
) -> Array:
    """Causal attention inside documents.

    Args:
      q: [B, L, heads, head_dim]; L a multiple of `LANES`.
      k: [B, kv_heads, L, head_dim].
      v: [B, kv_heads, L, head_dim].
      node_id: [B, L] int32 document of each token, -1 for padding; None: one.
      scale: multiplies the logits.
      interpret: runs without a TPU, for tests.

    Returns:
      [B, L, heads, head_dim] in the dtype of `q`.

    Raises:
      ValueError: L is no multiple of `LANES`.
    """
    batch, length, heads, _ = q.shape
    if length % LANES:
        raise ValueError(
            f"attention='splash' wants rows of a multiple of {LANES} tokens, got {length}; change "
            "learner.row_length, or use 'blockwise'"
        )
    block = _divisor(length, BLOCK)
    compute = _divisor(block, COMPUTE_BLOCK)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        block_q_dq=block,
        block_kv_dq=block,
    )
    # The kernel's tables are NumPy arrays of the mask's shape: made once, not traced.
    with jax.ensure_compile_time_eval():
        causal = masks.CausalMask((length, length))
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([causal] * (heads // axis_size("tensor"))),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
    if node_id is None:
        node_id = jnp.zeros((batch, length), jnp.int32)

    def local(q, k, v, document):
        ids = kernels.SegmentIds(document, document)
        return jax.vmap(kernel)(q.transpose(0, 2, 1, 3) * scale, k, v, ids).transpose(0, 2, 1, 3)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return local(q, k, v, node_id)
    queries, keys = PartitionSpec(ROWS, None, "tensor"), PartitionSpec(ROWS, "tensor")
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(queries, keys, keys, PartitionSpec(ROWS)),
        out_specs=queries,
        check_vma=False,
    )(q, k, v, node_id)
