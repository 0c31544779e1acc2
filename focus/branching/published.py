"""Where published methods branch, as scores of states; the acquisition rules of `RULES`.

The papers decide about tokens, nodes or turns of their own trees; here all of them choose among
the states of a step's base rollouts, under the same budget and with the same continuations.
What had to be moved from tokens to states, and what was not found, is said with each. Scores are
the papers', not divided by cost: only `expected_error_reduction`, `variance_reduction` and
`policy_improvement` know about tokens. None of the papers' figures was checked here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from focus.branching.controllers import at2po_scores
from focus.branching.features import StateFeatures, clean, require_channels
from focus.types import Array


def _ranked(pool: StateFeatures, score: Array) -> Array:
    return jnp.where(pool.mask, score, -jnp.inf)


def bernoulli(features: StateFeatures, key: Array | None = None) -> Array:
    """Variance of a 0/1 outcome at the critic's value.

        score(s) = V(s) (1 - V(s))

    The difficulty weight of prompt selection (e.g. VSPO, arXiv:2512.07478), at states. What it
    does not ask is whether anyone doubts V. Outcomes in [0, 1].

    Args:
      features: the pool.
      key: unused.

    Returns:
      [S], -inf for absent states.
    """
    del key
    pool = clean(features)
    return _ranked(pool, pool.mean * (1.0 - pool.mean))


def policy_entropy(features: StateFeatures, key: Array | None = None) -> Array:
    """Mean token entropy of the segment that left the state.

        score(s) = H(s)

    What entropy-guided trees (e.g. ARPO, arXiv:2507.19849) share.

    Args:
      features: the pool with `entropy`.
      key: unused.

    Returns:
      [S], -inf for absent states.

    Raises:
      ValueError: no `entropy`.
    """
    del key
    require_channels(features, "policy_entropy", "entropy")
    pool = clean(features)
    return _ranked(pool, pool.entropy)


def mixed_outcome(features: StateFeatures, key: Array | None = None, *, count: int = 4) -> Array:
    """Probability that continuations from a state do not all end alike.

        score(s) = 1 - V^k - (1 - V)^k

    A group of equal outcomes teaches a group-relative method nothing (DAPO, arXiv:2503.14476,
    samples such groups again). Outcomes 0 or 1.

    Args:
      features: the pool.
      key: unused.
      count: k.

    Returns:
      [S], -inf for absent states.
    """
    del key
    pool = clean(features)
    value = jnp.clip(pool.mean, 0.0, 1.0)
    return _ranked(pool, 1.0 - value**count - (1.0 - value) ** count)


def at2po(features: StateFeatures, key: Array | None = None) -> Array:
    """AT2PO's score of a node (arXiv:2601.04767).

        score(s) = H(s) - .05 branches(s)

    Evidence: code. The method branches the six best nodes in each of two iterations: rounds.

    Args:
      features: the pool with `entropy` and `branch_count`.
      key: unused.

    Returns:
      [S], -inf for absent states.

    Raises:
      ValueError: no `entropy` or `branch_count`.
    """
    del key
    require_channels(features, "at2po", "entropy", "branch_count")
    pool = clean(features)
    return _ranked(pool, at2po_scores(pool.entropy, pool.branch_count))


def _standardised_by(x: Array, group: Array, mask: Array) -> Array:
    """z-scores within groups (population statistics); 0 where a group does not vary."""
    size = x.shape[0]
    group = jnp.where(mask, group, size)

    def mean(y):
        total = jax.ops.segment_sum(jnp.where(mask, y, 0.0), group, size + 1)
        count = jax.ops.segment_sum(mask.astype(y.dtype), group, size + 1)
        return (total / jnp.maximum(count, 1))[group]

    centred = x - mean(x)
    variance = mean(jnp.square(centred))
    varies = variance > 1e-12
    return jnp.where(varies, centred / jnp.sqrt(jnp.where(varies, variance, 1.0)), 0.0)


def appo(features: StateFeatures, key: Array | None = None) -> Array:
    """APPO's branching score (arXiv:2606.12384), at states in the place of tokens.

        score(s) = z(H) z(Omega), states with both z > 0 before all others

    with z over the states of a rollout and Omega the clipped exponential of the discounted
    future log-ratio of current policy to rollout policy. Evidence: code, for tokens. In a strictly
    on-policy loop the ratio is 1 everywhere, and the rule has nothing to go by.

    Args:
      features: the pool with `entropy`, `log_ratio` (before the exponential) and `rollout`.
      key: unused.

    Returns:
      [S], -inf for absent states.

    Raises:
      ValueError: a channel is missing.
    """
    del key
    require_channels(features, "appo", "entropy", "log_ratio", "rollout")
    pool = clean(features)
    omega = jnp.clip(jnp.exp(pool.log_ratio), 0.8, 1.2)
    entropy = _standardised_by(pool.entropy, pool.rollout, pool.mask)
    likelihood = _standardised_by(omega, pool.rollout, pool.mask)
    raw = entropy * likelihood
    first = (entropy > 0) & (likelihood > 0)
    # The strict candidates before all others, whatever the size of a product of two negatives.
    return _ranked(pool, jnp.where(first, 1.0, 0.0) + jnp.tanh(raw) / 4.0)


def patr(features: StateFeatures, key: Array | None = None) -> Array:
    """PATR branches where the process score is best (arXiv:2607.15610).

        score(s) = process score(s)

    Evidence: reconstructed; its stopping of rollouts with low scores is `controllers.patr_choice`.

    Args:
      features: the pool with `score`.
      key: unused.

    Returns:
      [S], -inf for absent states.

    Raises:
      ValueError: no `score`.
    """
    del key
    require_channels(features, "patr", "score")
    pool = clean(features)
    return _ranked(pool, pool.score)


def carl(features: StateFeatures, key: Array | None = None) -> Array:
    """CARL expands the state of the largest uncertainty per visit (arXiv:2512.04949).

        score(s) = h(s) / n(s)

    with h the length-normalised negative log-prob of the actions sampled there (here of the
    base rollout's), and n the visits, which grow with every pick. Evidence: paper.

    Args:
      features: the pool with `nll` and `branch_count`.
      key: unused.

    Returns:
      [S], -inf for absent states.

    Raises:
      ValueError: no `nll` or `branch_count`.
    """
    del key
    require_channels(features, "carl", "nll", "branch_count")
    pool = clean(features)
    return _ranked(pool, pool.nll / (1.0 + pool.branch_count))


def trace(features: StateFeatures, key: Array | None = None) -> Array:
    """TRACE continues prefixes that most likely give mixed outcomes (arXiv:2606.11119).

        score(s) = V (1 - V)^n + (1 - V) V^n

    the probability that one more continuation is the first to differ from the n there are, the
    base rollout's among them: the fall of the probability of a group without contrast. Evidence:
    reconstructed from the abstract (anchors "most likely to yield mixed terminal rewards" by a
    shared predictor of success, here the critic; its allocation between tasks is not done).

    Args:
      features: the pool with `branch_count`.
      key: unused.

    Returns:
      [S], -inf for absent states.

    Raises:
      ValueError: no `branch_count`.
    """
    del key
    require_channels(features, "trace", "branch_count")
    pool = clean(features)
    value = jnp.clip(pool.mean, 0.0, 1.0)
    seen = 1.0 + pool.branch_count
    return _ranked(pool, value * (1.0 - value) ** seen + (1.0 - value) * value**seen)


def golden_order(mask: Array) -> Array:
    """[S] fraction of rank times the golden ratio: prefixes of its order are evenly spread."""
    rank = (jnp.cumsum(mask) - 1).astype(jnp.uint32)
    golden = jnp.uint32(2654435769)  # 2^32 / golden ratio: the fraction in exact integers
    return (rank * golden).astype(jnp.float32) / 2.0**32


def spo(features: StateFeatures, key: Array | None = None) -> Array:
    """SPO-chain samples continuations at its cut points alone (arXiv:2505.23564).

    Every fifth uncertain token is one (`features.cut_points`); where not all fit, an even
    thinning of them as for `uniform`. Evidence: code, for tokens.

    Args:
      features: the pool with `cut`.
      key: unused.

    Returns:
      [S], -inf for absent states and those that are no cut points.

    Raises:
      ValueError: no `cut`.
    """
    del key
    require_channels(features, "spo", "cut")
    pool = clean(features)
    cut = pool.mask & pool.cut.astype(bool)
    return jnp.where(cut, -golden_order(cut), -jnp.inf)
