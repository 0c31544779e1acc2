"""Gaussian belief over a last linear layer: the other source of error features.

The value is modelled around the critic's mean as V(s) + w . phi(s) with w ~ N(0, Sigma). Outcomes
shrink Sigma in the directions of the states they were seen at. Because the policy, and with it
the meaning of a hidden state, keeps moving, evidence is forgotten exponentially, back towards the
initial uncertainty and never below it.
"""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

from focus.critic.head import Belief
from focus.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Posterior:
    """Zero-mean Gaussian over the weights of the last layer.

    Attributes:
      projection: [H, D - 1] fixed random projection of standardised hidden states.
      precision: [D, D] inverse covariance.
      factor: [D, D] matrix L with L L^T = covariance. Kept beside the precision so that
        reading a belief is one matrix product: a triangular solve inside a sharded
        computation is slow and has been seen to hang.
      prior_variance: [] variance of the value at any state before evidence.
    """

    projection: Array
    precision: Array
    factor: Array
    prior_variance: Array


def init_posterior(
    key: Array, feature_dim: int, num_features: int = 64, prior_variance: float = 0.1
) -> Posterior:
    """A belief without evidence: every state has the same variance.

    Args:
      key: consumed.
      feature_dim: H.
      num_features: D, bias included.
      prior_variance: epistemic variance of V(s) before evidence; at most 1/4 can be meant for
        values in [0, 1].

    Returns:
      Posterior with covariance `prior_variance` I, for features of unit norm.

    Raises:
      ValueError: no room for a feature beside the bias, or a variance that is not positive.
    """
    if num_features < 2:
        raise ValueError(f"num_features must be >= 2 (one is the bias), got {num_features}")
    if prior_variance <= 0:
        raise ValueError(f"prior_variance must be > 0, got {prior_variance}")
    projection = jax.random.normal(key, (feature_dim, num_features - 1)) / math.sqrt(feature_dim)
    identity = jnp.eye(num_features)
    return Posterior(
        projection=projection,
        precision=identity / prior_variance,
        factor=identity * math.sqrt(prior_variance),
        prior_variance=jnp.asarray(prior_variance, jnp.float32),
    )


def project_features(posterior: Posterior, standardised: Array) -> Array:
    """Features phi of the last layer: random projection and a bias, scaled to unit norm.

    Args:
      posterior: whose projection is used.
      standardised: [..., H], see `head.standardised_features`.

    Returns:
      [..., D] with |phi| = 1.
    """
    projected = standardised @ posterior.projection
    phi = jnp.concatenate([projected, jnp.ones_like(projected[..., :1])], axis=-1)
    return phi / jnp.linalg.norm(phi, axis=-1, keepdims=True)


def update_posterior(
    posterior: Posterior,
    phi: Array,
    noise_variance: Array,
    weight: Array,
    mask: Array,
    *,
    retention: float = 1.0,
) -> Posterior:
    """Forgets a little, then conditions on new outcomes.

        P <- rho P + (1 - rho) I / prior_variance + sum_i weight_i / noise_i phi_i phi_i^T

    Bayesian linear regression at rho = 1. Forgetting towards the prior instead of towards zero
    precision is this project's rule: it keeps the variance of unvisited directions bounded.

    Args:
      posterior: the belief before.
      phi: [n, D] features.
      noise_variance: [n] variance of one outcome at the state.
      weight: [n] outcomes that row i stands for: k for a mean of k, below 1 where one outcome
        is shared between states.
      mask: [n] bool, which rows exist; the others may hold anything.
      retention: rho in [0, 1], share of old evidence that is kept.

    Returns:
      The belief after.
    """
    chex.assert_rank([phi, noise_variance, weight, mask], [2, 1, 1, 1])
    phi = jnp.where(mask[:, None], phi, 0.0)
    scale = jnp.where(mask, weight, 0.0) / jnp.where(mask, noise_variance, 1.0)
    identity = jnp.eye(phi.shape[-1])
    precision = (
        retention * posterior.precision
        + (1.0 - retention) * identity / posterior.prior_variance
        + jnp.einsum("nd,n,ne->de", phi, scale, phi)
    )
    lower = jnp.linalg.cholesky((precision + precision.T) / 2)
    # P = C C^T, so covariance = C^-T C^-1 and L = C^-T.
    inverse = jax.scipy.linalg.solve_triangular(lower, identity, lower=True)
    return dataclasses.replace(posterior, precision=precision, factor=inverse.T)


def error_features(posterior: Posterior, phi: Array) -> Array:
    """Vectors e = L^T phi, so that e(s) . e(s') = phi(s)^T Sigma phi(s'); [..., D] -> [..., D]."""
    return phi @ posterior.factor


def posterior_belief(critic_belief: Belief, posterior: Posterior, phi: Array) -> Belief:
    """The critic's belief with this posterior's covariance in place of the ensemble's.

    Args:
      critic_belief: from `head.belief`, over states [...].
      posterior: covariance of the error of its mean.
      phi: [..., D] features of the same states.

    Returns:
      Belief with the critic's mean and noise.
    """
    errors = error_features(posterior, phi)
    return dataclasses.replace(
        critic_belief, error_features=errors, variance=jnp.sum(errors**2, axis=-1)
    )
