"""Scales of the critic's error covariance, fitted to the evidence of recent steps.

An ensemble says where the critic knows less, and rarely how much less: its members see the same
few outcomes. What its values really miss shows in the residuals of branches and siblings, whose
outcomes it had not learnt from. Two residuals of independent outcomes have as expected product
the covariance of the errors at their states, noise and all else gone, so scales of a structured
covariance (`focus.credit.structure`) are a non-negative regression of products on what two
states share. This project's rule.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from focus.credit.structure import CovarianceScales
from focus.types import Array

# Values of rho that are tried. The gram matrix of each is kept.
RHOS = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95)
# Ensemble, task, episode and state: what is assumed without evidence, and give or take what.
PRIOR_MEAN = (1.0, 0.15, 0.1, 0.1)
PRIOR_STD = (1.0, 0.15, 0.1, 0.1)
PRIOR_RHO, PRIOR_RHO_STD = 0.8, 0.25
# The parts that scale with the spread never claim more of it than this.
MOST_OF_SPREAD = 0.9
# Products are weighed as if no spread were smaller: one surprise where V is all but sure would
# outweigh everything else.
_LEAST_SPREAD = 0.05
# Share of the spread that a residual's own error is assumed to have when products are weighted.
_WEIGHT_SHARE = 0.3
_SUBSETS = 2**4


def prior_scales() -> CovarianceScales:
    """What is assumed before any evidence."""
    return CovarianceScales(*map(jnp.float32, (*PRIOR_MEAN, PRIOR_RHO)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """Outcomes held against values from before they were learnt; n rows, one a state.

    The outcomes of base rollouts stand at their s_0, one row each (`is_base`): further on along
    the same rollout an outcome is no longer independent of what led there.

    Attributes:
      value: [n] critic mean V.
      mean: [n] mean of the outcomes.
      count: [n] number of outcomes k.
      outcome_variance: [n] their unbiased sample variance, read where k >= 2; for outcomes 0
        and 1 see `binary_variance`.
      spread: [n] variance of one outcome around V.
      ensemble: [n, D] error features of ensemble or posterior.
      task: [n] int32.
      rollout: [n] int32 rollout of the task that the state lies on.
      position: [n] int32 its place along the rollout.
      is_base: [n] bool, the outcome of the rollout itself.
      mask: [n] bool, rows that exist; the others may hold anything.
    """

    value: Array
    mean: Array
    count: Array
    outcome_variance: Array
    spread: Array
    ensemble: Array
    task: Array
    rollout: Array
    position: Array
    is_base: Array
    mask: Array


def binary_variance(mean: Array, count: Array) -> Array:
    """Unbiased sample variance of k outcomes 0 and 1 with this mean; 0 where k < 2."""
    return jnp.where(count > 1, mean * (1 - mean) * count / jnp.maximum(count - 1, 1), 0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CovarianceFit:
    """Sums over pairs of residuals, of recent steps; what a checkpoint holds.

    Attributes:
      gram: [len(RHOS), 4, 4] of what pairs share, in the order of `PRIOR_MEAN`.
      moment: [len(RHOS), 4] of that with their products.
      pairs: [] weight of all pairs.
    """

    gram: Array
    moment: Array
    pairs: Array


def init_fit() -> CovarianceFit:
    """No evidence: `fitted_scales` gives `prior_scales`."""
    return CovarianceFit(
        gram=jnp.zeros((len(RHOS), 4, 4)), moment=jnp.zeros((len(RHOS), 4)), pairs=jnp.zeros(())
    )


def update_fit(
    fit: CovarianceFit, residuals: Residuals, *, retention: float = 0.9
) -> CovarianceFit:
    """Forgets a little, then adds the pairs of a step.

    The product of residuals of states i and j is divided by what its standard deviation would
    be, s_i s_j with `s^2 = max(spread, .05) (.3 + .7 / k)`. Pairs of a task share its error: n of
    them say less than n times as much, so each is weighted by 1 / (1 + .3 (n - 1)) for either
    state (Kish's design effect). A state with k >= 2 outcomes is paired with itself, its noise
    taken off by the sample variance.

    Args:
      fit: before.
      residuals: of one step.
      retention: share of the old sums that is kept.

    Returns:
      CovarianceFit.
    """
    r = residuals
    mask = r.mask & (r.count > 0)

    def there(x, fill=0.0):
        return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - 1)), x, fill)

    count = there(r.count, 1).astype(jnp.float32)
    scale = 1.0 / jnp.sqrt(_WEIGHT_SHARE + (1 - _WEIGHT_SHARE) / count)
    scale /= jnp.sqrt(jnp.maximum(there(r.spread, 1.0), _LEAST_SPREAD))
    residual = scale * (there(r.mean) - there(r.value))
    features = scale[:, None] * there(r.ensemble)
    root = scale * jnp.sqrt(there(r.spread))

    same_task = (r.task[:, None] == r.task[None]) & mask[:, None] & mask[None]
    size = jnp.sum(same_task, axis=1)
    weight = jnp.where(mask, 1.0 / (1.0 + _WEIGHT_SHARE * (jnp.maximum(size, 1) - 1)), 0.0)
    same_rollout = same_task & (r.rollout[:, None] == r.rollout[None])
    starts = r.position == 0
    one_state = same_rollout & (r.position[:, None] == r.position[None])
    one_state |= same_task & starts[:, None] & starts[None]
    apart = jnp.abs(r.position[:, None] - r.position[None])
    apart = jnp.where(same_rollout, apart, r.position[:, None] + r.position[None])
    # A rollout's own outcome and what branches of it found are not independent.
    entangled = same_rollout & (r.is_base[:, None] | r.is_base[None])
    upper = jnp.triu(jnp.ones((mask.size, mask.size), bool), 1)
    paired = jnp.where(upper & ~entangled, weight[:, None] * weight[None], 0.0)
    product = residual[:, None] * residual[None]

    itself = jnp.eye(mask.size, dtype=bool)
    repeated = mask & (count >= 2)
    noise = jnp.where(repeated, jnp.where(mask, r.outcome_variance, 0.0), 0.0) / count
    squares = jnp.square(residual) - jnp.square(scale) * noise
    paired = jnp.where(itself, jnp.where(repeated, weight / 2.0, 0.0)[:, None], paired)
    product = jnp.where(itself, squares[:, None], product)

    both = jnp.where(same_task, root[:, None] * root[None], 0.0)
    ensemble = features @ features.T
    state = jnp.where(one_state, both, 0.0)

    def sums(rho):
        episode = both * rho ** apart.astype(jnp.float32)
        shared = jnp.stack([ensemble, both, episode, state])
        return (
            jnp.einsum("aij,ij,bij->ab", shared, paired, shared),
            jnp.einsum("aij,ij,ij->a", shared, paired, product),
        )

    gram, moment = jax.lax.map(sums, jnp.array(RHOS))
    return CovarianceFit(
        gram=retention * fit.gram + gram,
        moment=retention * fit.moment + moment,
        pairs=retention * fit.pairs + jnp.sum(paired),
    )


def fitted_scales(fit: CovarianceFit) -> CovarianceScales:
    """Scales that explain the products best, drawn towards what is assumed without evidence.

    For every rho, non-negative least squares by trying all sets of parts that are not 0, with a
    ridge of 1 / PRIOR_STD^2 around PRIOR_MEAN (products of standardised residuals vary by about
    1, so this is the mode under a Gaussian prior); then the rho of the least loss, with a prior
    of its own.

    Args:
      fit: sums of recent steps.

    Returns:
      CovarianceScales.
    """
    ridge = 1.0 / jnp.square(jnp.array(PRIOR_STD))
    gram = fit.gram + jnp.diag(ridge)
    moment = fit.moment + ridge * jnp.array(PRIOR_MEAN)
    kept = (jnp.arange(_SUBSETS)[:, None] >> jnp.arange(4)) & 1 == 1

    def best_of(gram, moment):
        def solve(used):
            system = jnp.where(
                used[:, None] & used[None], gram, jnp.diag(jnp.where(used, 0.0, 1.0))
            )
            theta = jnp.linalg.solve(system, jnp.where(used, moment, 0.0))
            loss = theta @ gram @ theta - 2.0 * moment @ theta
            return jnp.where(jnp.all(theta >= 0), loss, jnp.inf), theta

        losses, thetas = jax.vmap(solve)(kept)
        best = jnp.argmin(losses)  # the empty set is always feasible
        return losses[best], thetas[best]

    losses, thetas = jax.vmap(best_of)(gram, moment)
    rhos = jnp.array(RHOS)
    chosen = jnp.argmin(losses + jnp.square((rhos - PRIOR_RHO) / PRIOR_RHO_STD))
    ensemble, *shares = thetas[chosen]
    task, episode, state = jnp.stack(shares) * jnp.minimum(
        1.0, MOST_OF_SPREAD / jnp.maximum(sum(shares), 1e-6)
    )
    return CovarianceScales(ensemble, task, episode, state, rhos[chosen])
