"""The gated delta rule: a linear attention whose memory forgets, and corrects what it stored.

For every head, with a memory S [K, V] that is empty where a document begins,

    S_t = a_t S_{t-1} + k_t d_t^T,    d_t = b_t (v_t - a_t S_{t-1}^T k_t),    o_t = S_t^T q_t

where `a_t = exp(log_decay_t)` and `b_t = beta_t` (Yang, Kautz and Hatamizadeh, Gated Delta
Networks, arXiv:2412.06464). Three forms that agree: `delta_step` token by token for decoding,
`chunked_delta_rule` in matrix products for training and prefill, and the definition above in the
tests. Documents are told apart by ids, so that packed rows equal separate ones.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

Array = jax.Array

CHUNK = 64
_BLOCK = 32  # rows of a triangular matrix that are inverted at once
# exp(-40) = 4e-18 of a memory is nothing beside what is stored next. Sums of decays over a chunk
# stay small enough for their differences to be exact to 1e-4, and are finite.
_LEAST_LOG_DECAY = -40.0


def l2_normalise(x: Array, eps: float = 1e-6) -> Array:
    """`x / sqrt(|x|^2 + eps)` over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)


def causal_conv(x: Array, weight: Array, document: Array, window: Array) -> Array:
    """Depthwise causal convolution that stops at the borders of documents.

        y_t[c] = sum_i weight[c, W - 1 - i] x_{t-i}[c]   over i with document_{t-i} = document_t

    Args:
      x: [B, L, C].
      weight: [C, W].
      document: [B, L] int32 document of each token. Tokens of document 0 see the window.
      window: [B, W - 1, C] inputs before the first token; zeros where nothing precedes.

    Returns:
      [B, L, C].
    """
    length, width = x.shape[1], weight.shape[1]
    before = jnp.zeros((x.shape[0], width - 1), document.dtype)
    padded = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    documents = jnp.concatenate([before, document], axis=1)
    total = x * weight[:, width - 1].astype(x.dtype)
    for i in range(1, width):
        at = slice(width - 1 - i, width - 1 - i + length)
        same = (documents[:, at] == document)[..., None]
        shifted = jnp.where(same, padded[:, at], 0.0)
        total += shifted * weight[:, width - 1 - i].astype(x.dtype)
    return total


def inverse_blocks(size: int) -> tuple[int, int]:
    """Rows of the parts that `unit_lower_inverse` begins with, and their number: powers of two."""
    block = 1
    while block < min(size, _BLOCK):
        block *= 2
    count = 1
    while count * block < size:
        count *= 2
    return block, count


@jax.custom_jvp
def unit_lower_inverse(lower: Array) -> Array:
    """`(I + lower)^-1` of strictly lower triangular matrices, from the inverses of parts.

        [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]

    in blocks of 1, 2, 4 ... rows. No term is larger than what it stands for: where `lower` holds
    the products of keys of a delta rule, every inverse of a part is one of fewer tokens, and its
    entries are at most 1. (A power series in `lower` has terms of 1e18 for 64 equal keys, and
    cancels.) The gradient is that of an inverse, two products.

    Products are of full precision on every backend: they are a few thousandths of a model's, and
    what is rounded here is rounded for all later tokens of a chunk.

    Args:
      lower: [..., C, C], zero on and above the diagonal.

    Returns:
      [..., C, C].
    """
    *lead, size, _ = lower.shape
    block, count = inverse_blocks(size)
    padding = count * block - size
    padded = jnp.pad(lower, [(0, 0)] * len(lead) + [(0, padding)] * 2)

    def parts(block, row, column, step):  # blocks at (row, column), (row + step, column + step) ...
        cut = [
            padded[..., i * block : (i + 1) * block, j * block : (j + 1) * block]
            for i, j in zip(range(row, count, step), range(column, count, step))
        ]
        return jnp.stack(cut, axis=-3)

    inverse = _small_inverse(parts(block, 0, 0, 1))
    while count > 1:
        first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        beside = -_product(second, _product(parts(block, 1, 0, 2), first))
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([beside, second], axis=-1)], axis=-2)
        block, count = 2 * block, count // 2
    return inverse[..., 0, :size, :size]


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals, tangents):
    inverse = unit_lower_inverse(*primals)
    return inverse, -_product(inverse, _product(tangents[0], inverse))


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _small_inverse(lower: Array) -> Array:
    """The same in whole matrices, since slices of a few rows cost more than they save.

    With the inverse X of the blocks on the diagonal and M the blocks beside them, `X - X M X`.
    """
    index = jnp.arange(lower.shape[-1])
    eye = jnp.eye(lower.shape[-1], dtype=lower.dtype)
    inverse, block = jnp.broadcast_to(eye, lower.shape), 1
    while block < lower.shape[-1]:
        at = index // block
        beside = jnp.where((at[:, None] == at + 1) & (at % 2 == 0), lower, 0.0)
        if block == 1:
            inverse = inverse - beside
        else:
            inverse = inverse - _product(inverse, _product(beside, inverse))
        block *= 2
    return inverse


def delta_step(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, memory: Array
) -> tuple[Array, Array]:
    """One token.

    Args:
      q: [B, H, K].
      k: [B, H, K].
      v: [B, H, V].
      log_decay: [B, H], at most 0.
      beta: [B, H] in [0, 1].
      memory: [B, H, K, V] float32.

    Returns:
      `(output [B, H, V], memory)`.
    """
    memory = memory * jnp.exp(log_decay)[..., None, None]
    stored = jnp.einsum("bhkv,bhk->bhv", memory, k)
    correction = beta[..., None] * (v - stored)
    memory = memory + k[..., :, None] * correction[..., None, :]
    return jnp.einsum("bhkv,bhk->bhv", memory, q), memory


def chunked_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    document: Array,
    memory: Array,
    *,
    chunk: int = CHUNK,
    remat: bool = False,
) -> tuple[Array, Array]:
    """Whole rows, a chunk of tokens at a time; memory in the length is linear.

    Inside a chunk the corrections d solve a unit lower triangular system; between chunks only
    the memory travels. Documents may begin anywhere in a chunk.

    Args:
      q: [B, H, L, K] float32, scaled.
      k: [B, H, L, K] float32.
      v: [B, H, L, V] float32.
      log_decay: [B, H, L] float32, at most 0.
      beta: [B, H, L] float32; 0 at padding.
      document: [B, L] int32 document of each token, contiguous. Tokens of document 0 continue
        `memory`; those of any other id begin with an empty one.
      memory: [B, H, K, V] float32 before the first token.
      chunk: tokens of a chunk.
      remat: whether the backward pass computes each chunk again; else all that chunks compute is
        kept, some twenty times the size of a memory for each.

    Returns:
      `(output [B, H, L, V], memory after the last token)`.
    """
    batch, heads, length, _ = k.shape
    chex.assert_shape([log_decay, beta], (batch, heads, length))
    chex.assert_shape(document, (batch, length))
    padding = -length % chunk
    count = (length + padding) // chunk

    def split(x, mode="constant"):  # [B, H, L, ...] -> [chunks, B, H, C, ...]
        x = jnp.pad(x, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 3), mode=mode)
        return jnp.moveaxis(x.reshape(batch, x.shape[1], count, chunk, *x.shape[3:]), 2, 0)

    index = jnp.arange(chunk)
    earlier, upto = index[:, None] > index[None, :], index[:, None] >= index[None, :]

    def one_chunk(carry, inputs):
        memory, current = carry
        q, k, v, log_decay, beta, document = inputs
        document = document[:, 0]
        same = (document[:, :, None] == document[:, None, :])[:, None]
        continues = (document == current[:, None])[:, None]
        total = jnp.cumsum(jnp.maximum(log_decay, _LEAST_LOG_DECAY), axis=-1)
        # Only decays between tokens of one document are used, and those are at most 0; the
        # inner `where` keeps the others from overflowing, backward too.
        gap = total[..., :, None] - total[..., None, :]
        decay = jnp.exp(jnp.where(same & upto, gap, 0.0))
        from_memory = jnp.where(continues, jnp.exp(total), 0.0)[..., None]
        inverse = unit_lower_inverse(
            jnp.where(same & earlier, beta[..., None] * decay * (k @ k.mT), 0.0)
        )
        correction = inverse @ (beta[..., None] * (v - from_memory * (k @ memory)))
        scores = jnp.where(same & upto, decay * (q @ k.mT), 0.0)
        output = from_memory * (q @ memory) + scores @ correction
        last = jnp.where(same[..., -1:, :].mT, decay[..., -1:, :].mT, 0.0)
        memory = from_memory[..., -1:, :] * memory + (k * last).mT @ correction
        return (memory, document[:, -1]), output

    if remat:
        one_chunk = jax.checkpoint(one_chunk, prevent_cse=False)  # the scan keeps them apart
    start = (memory, jnp.zeros((batch,), document.dtype))
    # Padding prolongs the last document without writing to its memory.
    inputs = (*map(split, (q, k, v, log_decay, beta)), split(document[:, None], "edge"))
    (memory, _), output = jax.lax.scan(one_chunk, start, inputs)
    output = jnp.moveaxis(output, 0, 2).reshape(batch, heads, count * chunk, -1)
    return output[:, :, :length], memory
