"""From logits to one token and its log-probability, a pure function of one slot; `jax.vmap` it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

_BLOCK = 256  # tokens of a block of the vocabulary


def seed_words(seed: int) -> tuple[int, int]:
    """High and low 32 bits of a seed, the raw data of its `jax.random.key`."""
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def token_key(words: Array, index: Array) -> Array:
    """Key of token `index` of a completion: `fold_in(key(seed), index)`.

    Args:
      words: [2] uint32 from `seed_words`.
      index: scalar int32 position in the completion.
    """
    return jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), index)


def support(logp: Array, top_p: Array, top_k: Array) -> Array:
    """Tokens that top-p and top-k leave, both measured on the full distribution.

    A token is kept when fewer than `top_k` tokens, of mass below `top_p`, are likelier than it;
    equal tokens are ranked by id. The likeliest token always stays.

    Args:
      logp: [V] log-probabilities.
      top_p: scalar in (0, 1]; 1 keeps all.
      top_k: scalar int32 >= 1.

    Returns:
      [V] bool.
    """
    order = jnp.argsort(-logp, stable=True)
    p = jnp.exp(logp[order])
    # At top_p = 1 rounding in the cumulative sum must not drop the tail.
    inside = (jnp.cumsum(p) - p < top_p) | (top_p >= 1)
    kept = inside & (jnp.arange(logp.shape[0]) < top_k)
    return jnp.zeros_like(kept).at[order].set(kept, unique_indices=True)


def invert(p: Array, uniform: Array) -> Array:
    """The token at which the running sum of `p`, in order of id, passes `uniform * sum(p)`.

    The sum runs over blocks first and inside one block then: a running sum over a whole
    vocabulary costs more than the product that made the logits.

    Args:
      p: [blocks, tokens of a block] >= 0, not all 0; need not sum to 1.
      uniform: scalar in [0, 1).

    Returns:
      Scalar int32 index into `p.ravel()`; never a token of probability 0.
    """
    total = p.sum(axis=1)
    # The parallel sum may round an empty block, or token, above its neighbour: never take one.
    upto = jnp.where(total > 0, jnp.cumsum(total), 0.0)
    target = uniform * jnp.max(upto)
    block = jnp.argmax(upto > target)
    mass = jnp.where(p[block] > 0, jnp.cumsum(p[block]), 0.0)
    # What the two sums round differently must not push the target past the block's last token.
    rest = jnp.minimum(target - (upto[block] - total[block]), jnp.max(mass) * (1 - 2**-20))
    return block * p.shape[1] + jnp.argmax(mass > rest)


def sample(
    logits: Array,
    key: Array,
    temperature: Array,
    top_p: Array,
    top_k: Array,
    *,
    filtered: bool,
) -> tuple[Array, Array]:
    """Draws a token by inverting the distribution function at one uniform number.

    One number a slot instead of one a vocabulary entry: on a CPU Gumbel noise would take a
    third of the decoding time of a small model. The number is compared in order of token id
    whether or not the support is cut, so `filtered` never changes a request that cuts nothing.

    Args:
      logits: [V] float32.
      key: a `jax.random.key`, consumed.
      temperature: scalar; 0 takes the largest logit.
      top_p: scalar in (0, 1].
      top_k: scalar int32 >= 1.
      filtered: static; False skips the sort, valid when `top_p` and `top_k` keep everything.

    Returns:
      `(token, logp)`: `logp = log_softmax(logits / temperature)[token]` over the full
      vocabulary, raw logits at temperature 0.
    """
    greedy = temperature == 0
    size = logits.shape[0]
    padded = jnp.pad(logits, (0, -size % _BLOCK), constant_values=-jnp.inf)
    blocks = padded.reshape(-1, _BLOCK) / jnp.where(greedy, 1.0, temperature)
    peaks = blocks.max(axis=1)
    shifted = blocks - peaks.max()
    p = jnp.exp(shifted)
    log_total = jnp.log(jnp.sum(p.sum(axis=1)))
    if filtered:
        kept = support(shifted.ravel()[:size] - log_total, top_p, top_k)
        p = jnp.where(jnp.pad(kept, (0, -size % _BLOCK)).reshape(p.shape), p, 0.0)
    likeliest = jnp.argmax(peaks) * _BLOCK + jnp.argmax(blocks[jnp.argmax(peaks)])
    drawn = invert(p, jax.random.uniform(key))
    token = jnp.where(greedy, likeliest, drawn).astype(jnp.int32)
    return token, shifted.ravel()[token] - log_total
