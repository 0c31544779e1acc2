"""Credit assignment: outcomes and values in, advantages out. Pure functions of arrays."""

from focus.credit.refine import bernoulli_noise_var, posterior_features, refine_values
from focus.credit.registry import ESTIMATORS, estimate
from focus.credit.spec import EstimatorSpec
from focus.credit.td import (
    segment_advantages,
    segments_to_tokens,
    td_lambda_advantages,
    td_lambda_returns,
    trust_lambda,
)

__all__ = [
    "ESTIMATORS",
    "EstimatorSpec",
    "bernoulli_noise_var",
    "estimate",
    "posterior_features",
    "refine_values",
    "segment_advantages",
    "segments_to_tokens",
    "td_lambda_advantages",
    "td_lambda_returns",
    "trust_lambda",
]
