"""Log-probabilities of tokens, and entropies, without the array of all logits.

The logits of a batch are the largest array of a language model's training step: tokens x
vocabulary in float32, several times over once the softmax is differentiated. Here they exist
for one chunk of tokens at a time, forward and backward, and a chunk that nobody asks about is
left out: of what an agent's policy reads, it has written a small part.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from focus.policy import model as models
from focus.policy.placement import ROWS, axis_size, constrain

Array = jax.Array

# Logits alive at a time on one device. Smaller chunks pay for the loop, and for one more pass over
# the gradient of the unembedding. Larger ones leave the caches of a CPU: 16 MiB of float32.
# Accelerators, which compute in bfloat16, want matrices of a thousand rows: 1 GiB.
LOGITS_PER_CHUNK = {"float32": 2**22, "bfloat16": 2**28}
# Where chunks can be left out, rows are cut finer, down to products that are still worth a call.
CHUNKS_TO_SKIP = 8
TOKENS_PER_CHUNK = {"float32": 128, "bfloat16": 1024}


def default_chunk(
    rows: int, length: int, vocab_size: int, dtype: str = "float32", *, skips: bool = False
) -> int:
    """Tokens per row and chunk such that few logits are alive at a time on one device.

    A row that needs n chunks is cut evenly, so that little of the last one is padding.

    Args:
      rows: product of the leading axes.
      length: tokens of a row that one device has.
      vocab_size: V.
      dtype: that of the hidden states; 2^22 logits in float32, 2^28 in bfloat16.
      skips: whether chunks may turn out to be unwanted: up to `CHUNKS_TO_SKIP` a row then, of at
        least 128 tokens over all rows in float32, 1024 in bfloat16.

    Returns:
      A number in [1, length].
    """
    rows, vocab_size = -(-rows // axis_size(ROWS)), -(-vocab_size // axis_size("tensor"))
    known = dtype if dtype in LOGITS_PER_CHUNK else "float32"
    most = max(1, LOGITS_PER_CHUNK[known] // (rows * vocab_size))
    if skips:
        least = -(-TOKENS_PER_CHUNK[known] // rows)
        most = min(most, max(least, -(-length // CHUNKS_TO_SKIP)))
    chunks = max(1, -(-length // most))
    return max(1, -(-length // chunks))


def wanted_first(wanted: Array) -> Array:
    """Order of tokens in which `chunked_logprobs` can leave out most.

    Args:
      wanted: [R, T] bool.

    Returns:
      [R, T] int32 row indices: wanted tokens to the front, on a mesh to that of each device's
      share of the row, otherwise in the order that they have.
    """
    shares = axis_size("sequence")
    chex.assert_is_divisible(wanted.shape[1], shares)
    length = wanted.shape[1] // shares
    rows = wanted.shape[0]
    order = jnp.argsort(~wanted.reshape(rows, shares, length), axis=2, stable=True)
    start = length * jnp.arange(shares, dtype=order.dtype)
    return (order + start[:, None]).reshape(wanted.shape)


def chunked_logprobs(
    hidden: Array,
    unembedding: Array,
    targets: Array,
    *,
    wanted: Array | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Array, Array]:
    """Log-probability of each target and entropy of each distribution.

    `z = h W^T / temperature`, `logp = z[target] - logsumexp(z)`,
    `entropy = logsumexp(z) - sum softmax(z) z`.

    Both are differentiable in `hidden` and `unembedding`; the backward pass computes the logits
    again, chunk by chunk. The gradient of the entropy costs no further product.

    Args:
      hidden: [..., T, H]. On a mesh the leading axes are spread over data and fsdp, and T, a
        multiple of its size, over sequence; chunks are cut out of each device's share of T.
      unembedding: [V, H]; on a mesh V is spread over tensor.
      targets: [..., T] int32 in [0, V).
      wanted: [..., T] bool, tokens whose numbers are asked for; None: all. Chunks without any cost
        nothing, which is worth most where `wanted_first` has brought them together. What stands
        beside a wanted token has to be finite all the same.
      temperature: divides the logits. 0 means greedy sampling and is scored on raw logits, as
        rollout engines do.
      chunk: tokens of a row that a device treats at a time; None chooses by size.

    Returns:
      `(logp [..., T], entropy [..., T])` in float32; 0 where nothing is wanted.

    Raises:
      ValueError: a chunk without tokens.
    """
    return _over_chunks(_logprobs, 2, hidden, unembedding, targets, wanted, temperature, chunk)


def _over_chunks(score, outputs, hidden, unembedding, targets, wanted, temperature, chunk):
    """Lays tokens out in chunks for `score`; its `outputs` numbers a token, as `targets` lie."""
    chex.assert_equal_shape_prefix([hidden, targets], targets.ndim)
    chex.assert_rank(hidden, targets.ndim + 1)
    if wanted is not None:
        chex.assert_equal_shape([wanted, targets])
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be >= 1 token, or None to choose by size; got {chunk}")
    if not targets.size:
        return (jnp.zeros(targets.shape),) * outputs
    width = hidden.shape[-1]
    shares = axis_size("sequence")
    chex.assert_is_divisible(targets.shape[-1], shares)
    length = targets.shape[-1] // shares
    # The parts of a row get an axis of their own: every device cuts chunks out of what it has.
    by_share = hidden.reshape(-1, shares, length, width)
    rows = by_share.shape[0]
    if chunk is None:
        chunk = default_chunk(
            rows, length, unembedding.shape[0], hidden.dtype.name, skips=wanted is not None
        )
    scale = 1.0 / temperature if temperature > 0 else 1.0
    chunk = min(chunk, length)
    asked = None
    if wanted is not None:
        asked = _split(wanted.reshape(by_share.shape[:-1]), chunk).any(axis=(1, 2, 3))
    targets_by_share = targets.reshape(by_share.shape[:-1])
    found = score(scale, chunk, by_share, unembedding, targets_by_share, asked)
    found = tuple(x.reshape(targets.shape) for x in found)
    if wanted is None:
        return found
    return tuple(jnp.where(wanted, x, 0.0) for x in found)


def token_scores(
    hidden: Array,
    unembedding: Array,
    targets: Array,
    *,
    wanted: Array | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Array, Array, Array]:
    """`chunked_logprobs`, and how far each token can move the policy; not differentiable.

    The score norm `1 - sum_a pi(a)^2` is the expected squared norm of the gradient of log pi(a)
    with respect to the logits: 0 where the policy has made up its mind.

    Args:
      hidden, unembedding, targets, wanted, temperature, chunk: see `chunked_logprobs`.

    Returns:
      `(logp, entropy, score_norm)`, each [..., T] in float32; 0 where nothing is wanted.

    Raises:
      ValueError: a chunk without tokens.
    """
    with_norm = functools.partial(_scored, with_norm=True)
    return _over_chunks(with_norm, 3, hidden, unembedding, targets, wanted, temperature, chunk)


def _split(x: Array, chunk: int) -> Array:
    """[B, S, T, ...] to [chunks, B, S, chunk, ...], zeros behind the end of each share of a row."""
    rows, shares, length, *rest = x.shape
    chunks = -(-length // chunk)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, chunks * chunk - length)] + [(0, 0)] * len(rest))
    x = jnp.moveaxis(x.reshape(rows, shares, chunks, chunk, *rest), 2, 0)
    return constrain(x, None, ROWS, "sequence", *(None,) * (x.ndim - 3))


def _join(x: Array, length: int) -> Array:
    """Inverse of `_split`."""
    x = jnp.moveaxis(x, 0, 2)
    x = x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :length]
    return constrain(x, ROWS, "sequence", *(None,) * (x.ndim - 2))


def _scaled_logits(scale: float, hidden: Array, unembedding: Array) -> Array:
    logits = scale * jnp.einsum(
        "bsth,vh->bstv", hidden, unembedding, preferred_element_type=jnp.float32
    )
    return constrain(logits, ROWS, "sequence", None, "tensor")


def _is_target(logits: Array, targets: Array) -> Array:
    # A comparison, not a gather: it stays local when the vocabulary is sharded.
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 3) == targets[..., None]


def _scan(one_chunk, carry, asked, inputs):
    """`lax.scan` over chunks that gives zeros for those with `asked` [chunks] False; None: all."""

    def skip(carry, chunk):
        _, outputs = jax.eval_shape(one_chunk, carry, chunk)
        return carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outputs)

    def body(carry, asked_and_chunk):
        asked, chunk = asked_and_chunk
        if asked is None:
            return one_chunk(carry, chunk)
        return jax.lax.cond(asked, one_chunk, skip, carry, chunk)

    return jax.lax.scan(body, carry, (asked, inputs))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _logprobs(scale, chunk, hidden, unembedding, targets, asked):
    return _forward(scale, chunk, hidden, unembedding, targets, asked)[0]


def _scored(scale, chunk, hidden, unembedding, targets, asked, *, with_norm):
    return _forward(scale, chunk, hidden, unembedding, targets, asked, with_norm=with_norm)[0]


def _forward(scale, chunk, hidden, unembedding, targets, asked, *, with_norm=False):
    # Gathered once and not once per chunk; in here, so that its gradient is never gathered.
    matrix = constrain(unembedding.astype(hidden.dtype), "tensor", None)

    def one_chunk(carry, inputs):
        h, y = inputs
        logits = _scaled_logits(scale, h, matrix)
        top = jnp.max(logits, axis=-1)
        weights = jnp.exp(logits - top[..., None])
        total = jnp.sum(weights, axis=-1)
        log_total = top + jnp.log(total)
        at_target = jnp.sum(jnp.where(_is_target(logits, y), logits, 0.0), axis=-1)
        entropy = log_total - jnp.sum(weights * logits, axis=-1) / total
        outputs = at_target - log_total, entropy, log_total
        if with_norm:
            outputs += (1.0 - jnp.sum(jnp.square(weights), axis=-1) / jnp.square(total),)
        return carry, outputs

    _, outputs = _scan(one_chunk, None, asked, (_split(hidden, chunk), _split(targets, chunk)))
    logp, entropy, log_total, *norm = (_join(x, hidden.shape[2]) for x in outputs)
    return (logp, entropy, *norm), (hidden, matrix, targets, asked, log_total, entropy)


def _logprobs_fwd(scale, chunk, *primals):
    found, kept = _forward(scale, chunk, *jax.tree.map(lambda primal: primal.value, primals))
    unembedding = primals[1]
    # Nothing for a frozen one; otherwise an array, because a dtype alone cannot be kept.
    like = jnp.zeros((0,), unembedding.value.dtype) if unembedding.perturbed else None
    return found, (like, *kept)


def _logprobs_bwd(scale, chunk, residuals, cotangents):
    like, hidden, matrix, targets, asked, log_total, entropy = residuals
    frozen = like is None

    def one_chunk(grad_matrix, inputs):
        h, y, lse, ent, g_logp, g_entropy = inputs
        logp = _scaled_logits(scale, h, matrix) - lse[..., None]
        # d logp / dz = onehot - p and d entropy / dz = -p (log p + entropy).
        pull = g_logp[..., None] + g_entropy[..., None] * (logp + ent[..., None])
        g_logits = jnp.where(_is_target(logp, y), g_logp[..., None], 0.0) - jnp.exp(logp) * pull
        g_logits = (scale * g_logits).astype(h.dtype)
        g_hidden = jnp.einsum("bstv,vh->bsth", g_logits, matrix)
        if not frozen:
            grad_matrix += jnp.einsum(
                "rbstv,rbsth->rsvh", by_device(g_logits, "tensor"), by_device(h, None),
                preferred_element_type=jnp.float32,
            )  # fmt: skip
        return grad_matrix, g_hidden

    def by_device(x, width_axis):
        """[B, S, t, width] to [parts of the rows, B of one part, S, t, width]."""
        x = x.reshape(shares[0], -1, *x.shape[1:])
        return constrain(x, ROWS, None, "sequence", None, width_axis)

    # Every device adds up its own tokens, and what it has is summed once and not once per chunk.
    parts = axis_size(ROWS)
    shares = parts if hidden.shape[0] % parts == 0 else 1, hidden.shape[1]
    grad_matrix = None
    if not frozen:
        zeros = jnp.zeros((*shares, *matrix.shape), jnp.float32)
        grad_matrix = constrain(zeros, ROWS, "sequence", "tensor", None)
    cotangents = map(_instantiated, cotangents)
    per_token = (hidden, targets, log_total, entropy, *cotangents)
    inputs = tuple(_split(x, chunk) for x in per_token)
    grad_matrix, g_hidden = _scan(one_chunk, grad_matrix, asked, inputs)
    if frozen:
        return _join(g_hidden, hidden.shape[2]), None, None, None
    grad_matrix = constrain(grad_matrix.sum(axis=(0, 1)), "tensor", "fsdp")
    # Before the backward pass goes on, so that no device keeps the whole sum until its end.
    grad_matrix, g_hidden = jax.lax.optimization_barrier((grad_matrix, g_hidden))
    return _join(g_hidden, hidden.shape[2]), grad_matrix.astype(like.dtype), None, None


def _instantiated(cotangent: Array | SymbolicZero) -> Array:
    """Cotangents of what nothing depends on are no arrays."""
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


_logprobs.defvjp(_logprobs_fwd, _logprobs_bwd, symbolic_zeros=True)


def token_logprobs(
    config: models.Config,
    params: models.Params,
    tokens: Array,
    *,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    temperature: float = 1.0,
) -> Array:
    """Log-probability of each token given those before it in its sequence.

    Args:
      config: shape of the model.
      params: parameters of the model.
      tokens: [B, L] int32.
      segment_ids: [B, L] int32 in [0, L), one id per packed sequence, contiguous; -1 for
        padding. None: one sequence a row.
      positions: [B, L] int32 rotary positions; None counts from 0 in every sequence.
      temperature: see `chunked_logprobs`.

    Returns:
      [B, L] float32; 0 at padding and at the first token of a sequence, which nothing precedes.
    """
    length = tokens.shape[1]
    node_id = segment_ids
    if segment_ids is None:
        segment_ids = jnp.zeros_like(tokens)
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    follows = (segment_ids == previous) & (segment_ids >= 0)
    if positions is None:
        index = jnp.arange(length)
        positions = index - jax.lax.cummax(jnp.where(follows, 0, index), axis=1)
    hidden = models.hidden_states(config, params, tokens, positions=positions, node_id=node_id)
    before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    unembedding = models.unembedding(config, params)
    logp, _ = chunked_logprobs(before, unembedding, tokens, temperature=temperature)
    return jnp.where(follows, logp, 0.0)
