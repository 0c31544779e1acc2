"""How far a critic is to be believed: what its recent misses say, kept beside the critic."""

from __future__ import annotations

import dataclasses

import jax

from focus.critic.covariance import CovarianceFit, init_fit
from focus.critic.trust import TrustGate, init_gate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Confidence:
    """Running statistics of a critic's misses; arrays only, what a checkpoint holds.

    Attributes:
      covariance: of the errors at states, see `focus.critic.covariance`.
      gate: whether the critic explains outcomes at all, see `focus.critic.trust`.
    """

    covariance: CovarianceFit
    gate: TrustGate


def init_confidence() -> Confidence:
    """Before any evidence."""
    return Confidence(init_fit(), init_gate())
