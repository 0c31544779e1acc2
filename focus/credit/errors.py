"""How the critic's errors go together: a covariance over states that is never written out.

The error of V at a state is a sum of independent parts: one that any two states may share (from
an ensemble or a posterior over features), one that states of a block share (rollouts of a task),
and one of the state alone. Each part is an inner product of features, so that conditioning on an
outcome maps features to features, and a belief over thousands of states is a few thin arrays.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from focus.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ErrorFeatures:
    """Features whose inner products are the covariance of the errors of V.

        Cov(s, s') = shared(s) . shared(s') + [same block] local(s) . local(s') + [s = s'] own(s)

    Rows of a block are consecutive and blocks are equally large: G blocks of n rows are S = G n
    states, block g holds rows g n to (g + 1) n - 1. A plain [S, D] array stands for `shared`
    alone wherever error features are taken, and comes back as one (`as_errors`).

    Attributes:
      shared: [S, D].
      local: [G, n, E].
      own: [S] variance, >= 0.
    """

    shared: Array
    local: Array
    own: Array

    @property
    def block_size(self) -> int:
        """n."""
        return self.local.shape[1]

    @property
    def local_rows(self) -> Array:
        """`local` as [S, E]."""
        return self.local.reshape(self.shared.shape[0], self.local.shape[2])


def as_errors(features: Array | ErrorFeatures) -> ErrorFeatures:
    """A plain [S, D] array as `ErrorFeatures` without local and own parts.

    Raises:
      ValueError: blocks do not make up the states.
    """
    if isinstance(features, ErrorFeatures):
        states, blocks = features.shared.shape[0], features.local.shape[0]
        if blocks * features.block_size != states or features.own.shape != (states,):
            raise ValueError(
                f"local features {features.local.shape} are {blocks} blocks of "
                f"{features.block_size} states and own is {features.own.shape}; shared has "
                f"{states} states"
            )
        return jax.tree.map(jnp.asarray, features)
    features = jnp.asarray(features)
    return ErrorFeatures(
        shared=features,
        local=jnp.zeros((features.shape[0], 1, 0), features.dtype),
        own=jnp.zeros(features.shape[:1], features.dtype),
    )


def like(features: Array | ErrorFeatures, errors: ErrorFeatures) -> Array | ErrorFeatures:
    """`errors` in the form that `features` had."""
    return errors if isinstance(features, ErrorFeatures) else errors.shared


def masked(features: Array | ErrorFeatures, mask: Array) -> Array | ErrorFeatures:
    """Features that are 0, and so certain, where `mask` [S] is False."""
    errors = as_errors(features)
    kept = ErrorFeatures(
        shared=jnp.where(mask[:, None], errors.shared, 0.0),
        local=jnp.where(mask.reshape(errors.local.shape[:2])[..., None], errors.local, 0.0),
        own=jnp.where(mask, errors.own, 0.0),
    )
    return like(features, kept)


def variances(features: Array | ErrorFeatures) -> Array:
    """tau2(s) = Cov(s, s), [S]."""
    errors = as_errors(features)
    local = jnp.sum(jnp.square(errors.local), axis=2).reshape(-1)
    return jnp.sum(jnp.square(errors.shared), axis=1) + local + errors.own


def covariances(features: Array | ErrorFeatures, index: Array | int) -> Array:
    """Cov(s, index) of all states with one, [S]."""
    errors = as_errors(features)
    size = errors.block_size
    block, row = index // size, index % size
    there = errors.local[block] @ errors.local[block, row]
    there = there.at[row].add(errors.own[index])
    covariance = (errors.shared @ errors.shared[index]).reshape(-1, size)
    return covariance.at[block].add(there).reshape(-1)


def pair_covariances(features: Array | ErrorFeatures, left: Array, right: Array) -> Array:
    """Cov(left_i, right_i) of pairs of states.

    Args:
      features: error features.
      left, right: [N] int32 rows.

    Returns:
      [N].
    """
    errors = as_errors(features)
    rows, size = errors.local_rows, errors.block_size
    shared = jnp.sum(errors.shared[left] * errors.shared[right], axis=1)
    local = jnp.sum(rows[left] * rows[right], axis=1)
    covariance = shared + jnp.where(left // size == right // size, local, 0.0)
    return covariance + jnp.where(left == right, errors.own[left], 0.0)


def weighted_covariance(features: Array | ErrorFeatures, weight: Array) -> Array:
    """How much the errors of all states move with the error at each state.

        q(s) = sum_{s'} w(s') Cov(s', s)^2

    Args:
      features: error features.
      weight: [S].

    Returns:
      [S] q.
    """
    errors = as_errors(features)
    shared = errors.shared
    second_moment = jnp.einsum("sd,s,se->de", shared, weight, shared)
    q = jnp.einsum("sd,de,se->s", shared, second_moment, shared)
    # What a block adds to the squares: (a + b)^2 = a^2 + b (2 a + b), one block at a time.
    size = errors.block_size
    blocks = shared.reshape(*errors.local.shape[:2], shared.shape[1])
    between = jnp.einsum("gid,gjd->gij", blocks, blocks)
    inside = jnp.einsum("gie,gje->gij", errors.local, errors.local)
    inside += jnp.eye(size, dtype=shared.dtype) * errors.own.reshape(-1, size)[:, None]
    extra = jnp.einsum("gij,gj->gi", inside * (2.0 * between + inside), weight.reshape(-1, size))
    return q + extra.reshape(-1)


def influence(features: Array | ErrorFeatures, amount: Array) -> Array:
    """h(s) = sum_{s'} Cov(s, s') amount(s'), [S], without the matrix."""
    errors = as_errors(features)
    by_block = amount.reshape(-1, errors.block_size)
    pooled = jnp.einsum("gne,gn->ge", errors.local, by_block)
    local = jnp.einsum("gne,ge->gn", errors.local, pooled).reshape(-1)
    return errors.shared @ (amount @ errors.shared) + local + errors.own * amount


def condition(
    features: Array | ErrorFeatures, index: Array | int, noise_var: Array | float
) -> Array | ErrorFeatures:
    """Error features after one noisy observation of the value at one state.

    Parts are eliminated from the inside out, and each adds its variance at `index` to the noise
    that the next one is observed with: n_0 = noise_var, n_1 = n_0 + own, n_2 = n_1 + |local|^2.
    The innermost part shrinks by itself; what it explains is taken off the outer features. For
    features alone, with u = e(index) and noise n:

        e'(s) = e(s) - a (e(s) . u) u,
        a = b / (1 + sqrt(1 - b |u|^2)),   b = 1 / (|u|^2 + n)

    `a` solves `2 a - a^2 |u|^2 = b`, so inner products of e' equal
    `Cov(s, s') - Cov(s, index) Cov(index, s') / (tau2(index) + noise_var)` exactly.

    Args:
      features: error features.
      index: the observed state.
      noise_var: variance of the observation, > 0; noise2 / k for the mean of k continuations.

    Returns:
      The same kind of features.
    """
    errors = as_errors(features)
    shared, local, own = errors.shared, errors.local, errors.own
    size = errors.block_size
    block, row = index // size, index % size
    e_u, b_u = shared[index], local[block, row]

    noise_local = noise_var + own[index]
    kept = noise_var / noise_local
    own = own.at[index].multiply(kept)
    shared = shared.at[index].multiply(kept)
    there = local[block].at[row].multiply(kept)

    noise_shared = noise_local + jnp.sum(jnp.square(b_u))
    pull = (there @ b_u) / noise_shared
    start = block * size
    shared_there = jax.lax.dynamic_slice_in_dim(shared, start, size) - jnp.outer(pull, e_u)
    shared = jax.lax.dynamic_update_slice_in_dim(shared, shared_there, start, 0)
    local = local.at[block].set(_shrink(there, b_u, noise_local))
    return like(features, ErrorFeatures(_shrink(shared, e_u, noise_shared), local, own))


def _shrink(rows: Array, direction: Array, noise_var: Array | float) -> Array:
    """`condition` for one part: rows [N, D] after its observation along `direction` [D]."""
    precision = 1.0 / (jnp.sum(jnp.square(direction)) + noise_var)
    scale = precision / (1.0 + jnp.sqrt(noise_var * precision))
    return rows - scale * jnp.outer(rows @ direction, direction)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Posterior:
    """A belief after all of a step's evidence; `posterior` makes it.

    Attributes:
      errors: error features of the observed states' pool, after.
      shift: [S] by how much the values move; V* before clipping is V + shift.
      local_root: [G, E, E] lower Cholesky factor of each block's information.
      local_pull: [G, E, D] whitened cross-information of a block's features with the shared ones.
      local_shift: [G, E] whitened surprise of each block.
      shared_root: [D, D] lower Cholesky factor of what is left of the shared information.
      shared_shift: [D] its whitened surprise.
    """

    errors: ErrorFeatures
    shift: Array
    local_root: Array
    local_pull: Array
    local_shift: Array
    shared_root: Array
    shared_shift: Array


class Query(NamedTuple):
    """States outside of the pool, with what they share with it, after the evidence.

    Attributes:
      shift: [N] by how much their values move.
      shared: [N, D] and local: [N, E], whose inner products with rows of the pool's features
        (local: of the same block) are posterior covariances.
      variance: [N] posterior variance, the state's own included.
    """

    shift: Array
    shared: Array
    local: Array
    variance: Array


def _whiten(root: Array, vectors: Array) -> Array:
    """Rows x of `vectors` [..., N, E] mapped to root^-1 x; nothing to do without features."""
    if not root.shape[-1]:
        return vectors
    solved = jax.scipy.linalg.solve_triangular(root, jnp.swapaxes(vectors, -1, -2), lower=True)
    return jnp.swapaxes(solved, -1, -2)


def _cholesky_of(information: Array) -> Array:
    """Lower factor of `I + information`; its pivots are >= 1."""
    size = information.shape[-1]
    if not size:
        return information
    return jnp.linalg.cholesky(information + jnp.eye(size, dtype=information.dtype))


def posterior(
    features: Array | ErrorFeatures, precision: Array, surprise: Array | None = None
) -> Posterior:
    """Conditions on the evidence of all states at once, in the dimensions of the features.

    The information form, part by part from the inside out: own variances turn precisions into
    p / (1 + p own); blocks are independent of each other given the shared part, so each is
    solved alone and what it explains is taken off the shared features. With plain features e
    this is

        Lambda = I + sum_b p_b e(b) e(b)^T = L L^T,   e'(s) = L^-1 e(s)

    Args:
      features: error features; 0 for states that do not exist.
      precision: [S] of each state's evidence, k / noise2; 0 where there is none.
      surprise: [S] mean outcome minus V where there is evidence, finite; 0s when None.

    Returns:
      Posterior.
    """
    errors = as_errors(features)
    shared, local, own = errors.shared, errors.local, errors.own
    size = errors.block_size
    surprise = jnp.zeros_like(precision) if surprise is None else surprise
    kept = 1.0 / (1.0 + precision * own)
    outer = precision * kept
    blocks = shared.reshape(*local.shape[:2], shared.shape[1])
    by_block = outer.reshape(-1, size)

    local_root = _cholesky_of(jnp.einsum("gne,gn,gnf->gef", local, by_block, local))
    whitened = _whiten(local_root, local)
    local_pull = jnp.einsum("gne,gn,gnd->ged", whitened, by_block, blocks)
    local_shift = jnp.einsum("gne,gn->ge", whitened, (outer * surprise).reshape(-1, size))

    information = jnp.einsum("sd,s,se->de", shared, outer, shared)
    information -= jnp.einsum("ged,gef->df", local_pull, local_pull)
    shared_root = _cholesky_of(information)
    pulled = (outer * surprise) @ shared - jnp.einsum("ged,ge->d", local_pull, local_shift)
    shared_shift = _whiten(shared_root, pulled[None])[0]

    left = blocks - jnp.einsum("gne,ged->gnd", whitened, local_pull)
    after = kept[:, None] * _whiten(shared_root, left.reshape(shared.shape))
    local_after = kept.reshape(-1, size)[..., None] * whitened
    by_own = (1.0 - kept) * surprise
    shift = after @ shared_shift + jnp.einsum("gne,ge->gn", local_after, local_shift).reshape(-1)
    return Posterior(
        errors=ErrorFeatures(after, local_after, own * kept),
        shift=shift + by_own,
        local_root=local_root,
        local_pull=local_pull,
        local_shift=local_shift,
        shared_root=shared_root,
        shared_shift=shared_shift,
    )


def posterior_at(belief: Posterior, shared: Array, local: Array, own: Array, block: Array) -> Query:
    """What the evidence says of states that are not in the pool and have none of their own.

    Args:
      belief: after the evidence.
      shared: [N, D], local: [N, E], own: [N]: error features of the states, before.
      block: [N] int32, the block that `local` belongs to.

    Returns:
      Query.
    """
    whitened = _whiten(belief.local_root[block], local[:, None])[:, 0]
    left = shared - jnp.einsum("ne,ned->nd", whitened, belief.local_pull[block])
    after = _whiten(belief.shared_root, left)
    shift = after @ belief.shared_shift + jnp.sum(whitened * belief.local_shift[block], axis=1)
    variance = jnp.sum(jnp.square(after), axis=1) + jnp.sum(jnp.square(whitened), axis=1) + own
    return Query(shift, after, whitened, variance)


def room(noise_var: Array, variance: Array) -> Array:
    """noise2 - tau2 of a counted outcome; positive, whatever rounding does to the difference."""
    return jnp.maximum(noise_var - variance, 1e-4 * noise_var)


def without_outcome(
    value: Array,
    variance: Array,
    covariance: Array,
    outcome: Array,
    value_there: Array,
    variance_there: Array,
    noise_var: Array,
) -> tuple[Array, Array]:
    """Takes one outcome out of a belief again: an exact downdate of rank one.

        mu_-(s) = mu(s) - Cov(s, u) (y - mu(u)) / (noise2 - tau2(u))
        tau2_-(s) = tau2(s) + Cov(s, u)^2 / (noise2 - tau2(u))

    for an outcome y that was counted at state u. What a trajectory's own outcome has taught must
    not reach its baselines, and everything else may. Elementwise.

    Args:
      value: mu(s) with the outcome, not clipped.
      variance: tau2(s) with it.
      covariance: posterior Cov(s, u) with it.
      outcome: y.
      value_there: mu(u), variance_there: tau2(u), with it.
      noise_var: variance of the outcome given u, as it was counted; above tau2(u), since the
        outcome alone brings the variance below that.

    Returns:
      (value, variance) without the outcome.
    """
    gain = covariance / room(noise_var, variance_there)
    return value - gain * (outcome - value_there), variance + gain * covariance
