"""The critic: an ensemble of small heads on the policy's hidden states.

Each member is an MLP plus a *randomised prior*, a second MLP that is drawn once and never
trained. Where members were trained on data they agree, elsewhere their priors keep them apart,
so their disagreement is an estimate of how little the critic knows. A further MLP predicts what
a continuation from the state will cost, in tokens.

The Flax module is split once into a graph definition and two trees of arrays, `trained` and
`fixed`. Everything else sees those trees and pure functions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from focus.types import Array

# Log-rates of the cost head are clipped here before `exp`: e^8 scales is far beyond any budget.
_MAX_LOG_COST = 8.0
# Bins that lie beyond each end of the value range; 3 x 0.75 bins of smoothing need 2.25.
_MARGIN_BINS = 3


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """What a critic is; hashable, closed over by jitted functions.

    Attributes:
      feature_dim: H, hidden width of the policy.
      num_members: M >= 8; fewer give a variance estimate that is mostly noise.
      hidden_dim: width of each member's one hidden layer.
      prior_scale: scale of the fixed prior that is added to a member's logit. At 1 the values
        of untrained members differ by about 0.2.
      value: "bernoulli" (sigmoid of a logit, outcomes in [0, 1]) or "hl_gauss" (categorical
        over bins, any bounded reward).
      value_range: lowest and highest reward.
      num_bins: bins of "hl_gauss", a margin of 3 beyond each end of the range included.
      noise_floor: smallest variance of one outcome given the state.
      cost_scale: tokens per unit of the cost head; near the typical cost of a continuation.
      cost_loss_weight: weight of the cost loss beside the value loss. Their heads share no
        parameters, so it matters only for a backbone that is trained with them.
      bootstrap_rate: probability that a member trains on a given outcome. At 1/2 the masks
        match the classical bootstrap's weights in mean and variance ("double or nothing").
      bootstrap_seed: which masks.
      num_folds: 1, or for cross-fitting the number of folds that members and tasks are
        divided into; each fold keeps at least 4 members.
    """

    feature_dim: int
    num_members: int = 8
    hidden_dim: int = 64
    prior_scale: float = 1.0
    value: Literal["bernoulli", "hl_gauss"] = "bernoulli"
    value_range: tuple[float, float] = (0.0, 1.0)
    num_bins: int = 51
    noise_floor: float = 0.01
    cost_scale: float = 256.0
    cost_loss_weight: float = 1.0
    bootstrap_rate: float = 0.5
    bootstrap_seed: int = 0
    num_folds: int = 1

    def __post_init__(self):
        low, high = self.value_range
        if self.num_members < 8:
            raise ValueError(
                f"num_members must be >= 8 for a usable variance estimate, got {self.num_members}"
            )
        if self.value not in ("bernoulli", "hl_gauss"):
            raise ValueError(f"value must be 'bernoulli' or 'hl_gauss', got {self.value!r}")
        if not low < high:
            raise ValueError(f"value_range must be (low, high) with low < high, got {(low, high)}")
        if self.value == "bernoulli" and (low, high) != (0.0, 1.0):
            raise ValueError(
                f"a bernoulli critic has value_range (0, 1), got {(low, high)}; "
                "use value='hl_gauss' for other bounded rewards"
            )
        if self.num_bins < 2 * _MARGIN_BINS + 2:
            raise ValueError(f"num_bins must be >= {2 * _MARGIN_BINS + 2}, got {self.num_bins}")
        if not 0 < self.bootstrap_rate <= 1:
            raise ValueError(f"bootstrap_rate must be in (0, 1], got {self.bootstrap_rate}")
        if self.num_folds < 1 or self.num_members % self.num_folds:
            raise ValueError(
                f"num_folds must divide num_members {self.num_members}, got {self.num_folds}"
            )
        if self.num_members // self.num_folds < 4:
            raise ValueError(
                f"{self.num_members} members in {self.num_folds} folds leave fewer than 4 a fold; "
                "raise num_members"
            )
        if self.noise_floor <= 0:
            raise ValueError(f"noise_floor must be > 0, got {self.noise_floor}")
        if self.cost_scale <= 0:
            raise ValueError(f"cost_scale must be > 0 tokens, got {self.cost_scale}")

    @property
    def num_logits(self) -> int:
        """Logits per member."""
        return self.num_bins if self.value == "hl_gauss" else 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CriticParams:
    """Arrays of a critic.

    Attributes:
      trained: nested dict; what the optimiser sees.
      fixed: nested dict; prior networks and feature standardisation.
    """

    trained: Any
    fixed: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CriticOutput:
    """What the heads say of some states.

    Attributes:
      value_logits: [..., M], or [..., M, bins] for "hl_gauss".
      log_cost: [...] log of the expected tokens over `cost_scale`.
    """

    value_logits: Array
    log_cost: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Belief:
    """What the critic believes of the value of some states, jointly.

    Attributes:
      mean: [...] V(s).
      error_features: [..., D] with e(s) . e(s') = Cov[V(s), V(s')].
      variance: [...] epistemic variance, |e(s)|^2.
      noise_variance: [...] variance of one outcome given the state.
    """

    mean: Array
    error_features: Array
    variance: Array
    noise_variance: Array


class Fixed(nnx.Variable):
    """An array that is part of the function and is never trained."""


class StackedMlp(nnx.Module):
    """M independent two-layer MLPs with stacked parameters."""

    def __init__(self, kind, num_members, in_dim, hidden_dim, out_dim, out_gain, rngs):
        def kernel(fan_in, fan_out, gain):
            scale = gain / math.sqrt(fan_in)
            shape = (num_members, fan_in, fan_out)
            return kind(scale * jax.random.normal(rngs.params(), shape))

        # sqrt(2) keeps the scale of the signal through the rectified hidden layer.
        self.w_in = kernel(in_dim, hidden_dim, math.sqrt(2.0))
        # Random offsets give priors, too, a value at the origin and kinks away from it.
        self.b_in = kind(0.1 * jax.random.normal(rngs.params(), (num_members, hidden_dim)))
        self.w_out = kernel(hidden_dim, out_dim, out_gain)
        self.b_out = kind(jnp.zeros((num_members, out_dim)))

    def __call__(self, x):
        """Every member's outputs; [..., H] -> [..., M, outputs]."""
        hidden = jnp.einsum("...h,mhf->...mf", x, self.w_in[...]) + self.b_in[...]
        return (
            jnp.einsum("...mf,mfo->...mo", jax.nn.gelu(hidden), self.w_out[...]) + self.b_out[...]
        )


class CriticHead(nnx.Module):
    """Standardised features -> M value logits and one log-cost."""

    def __init__(self, config: CriticConfig, rngs: nnx.Rngs):
        c = config
        self.config = config
        # A small last layer: at first members differ by their priors and by nothing else.
        self.value = StackedMlp(
            nnx.Param, c.num_members, c.feature_dim, c.hidden_dim, c.num_logits, 0.1, rngs
        )
        self.prior = StackedMlp(Fixed, c.num_members, c.feature_dim, c.hidden_dim, 1, 1.5, rngs)
        self.cost = StackedMlp(nnx.Param, 1, c.feature_dim, c.hidden_dim, 1, 0.1, rngs)
        self.centre = Fixed(jnp.zeros((c.feature_dim,)))
        self.scale = Fixed(jnp.ones((c.feature_dim,)))

    def __call__(self, features):
        """All heads on hidden states; [..., H] -> CriticOutput."""
        x = standardise(features, self.centre[...], self.scale[...])
        prior = self.config.prior_scale * self.prior(x)
        if self.config.value == "hl_gauss":
            # A tilt across the bins. The factor 3 makes `prior_scale` move the value of a
            # uniform categorical as far as it moves the value of a Bernoulli at 1/2.
            centres = bin_centres(self.config)
            low, high = self.config.value_range
            prior = prior * (3.0 * (centres - (low + high) / 2) / (high - low))
        # A backbone that is trained with the head must not learn to cancel the priors.
        logits = self.value(x) + jax.lax.stop_gradient(prior)
        if self.config.value == "bernoulli":
            logits = logits[..., 0]
        return CriticOutput(value_logits=logits, log_cost=self.cost(x)[..., 0, 0])


@functools.cache
def _graphdef(config: CriticConfig):
    head = nnx.eval_shape(lambda: CriticHead(config, nnx.Rngs(0)))
    return nnx.split(head, nnx.Param, Fixed)[0]


def init_critic(config: CriticConfig, key: Array) -> CriticParams:
    """Draws a critic: trained parameters and fixed priors.

    Args:
      config: what the critic is.
      key: consumed.

    Returns:
      Arrays in plain nested dicts.
    """
    head = CriticHead(config, nnx.Rngs(key))
    _, trained, fixed = nnx.split(head, nnx.Param, Fixed)
    return CriticParams(nnx.to_pure_dict(trained), nnx.to_pure_dict(fixed))


def apply_critic(
    config: CriticConfig, critic: CriticParams, features: Array, *, stop_gradient: bool = True
) -> CriticOutput:
    """Evaluates every head on hidden states.

    Args:
      config: what the critic is.
      critic: its arrays.
      features: [..., H] hidden states at the positions of states.
      stop_gradient: whether the hidden states are constants. False only for a critic that
        trains its own backbone.

    Returns:
      Logits of the members and log-costs.
    """
    chex.assert_axis_dimension(features, -1, config.feature_dim)
    features = features.astype(jnp.float32)
    if stop_gradient:
        features = jax.lax.stop_gradient(features)
    return nnx.merge(_graphdef(config), critic.trained, critic.fixed)(features)


def standardise(features: Array, centre: Array, scale: Array) -> Array:
    """Layer norm without parameters, then a fixed affine map.

    Layer norm makes features indifferent to the scale of the residual stream, which drifts as
    the policy trains, and needs no running statistics that could differ between a replayed
    state and a fresh one. It leaves the large component that all states share (they are read
    at the same few tokens), so a fixed centre and scale, set once, remove that.

    Args:
      features: [..., H].
      centre: [H].
      scale: [H].

    Returns:
      [..., H].
    """
    mean = jnp.mean(features, axis=-1, keepdims=True)
    variance = jnp.var(features, axis=-1, keepdims=True)
    return ((features - mean) * jax.lax.rsqrt(variance + 1e-6) - centre) / scale


def fit_standardisation(critic: CriticParams, features: Array, mask: Array) -> CriticParams:
    """Sets the fixed centre and scale from the states of a first batch.

    Once, before training: it changes the priors as functions of the hidden state.

    Args:
      critic: a critic as drawn.
      features: [n, H] hidden states.
      mask: [n] bool, which rows exist; at least two.

    Returns:
      The critic with its standardisation set.
    """
    features = jnp.where(mask[:, None], features.astype(jnp.float32), 0.0)
    normed = standardise(features, jnp.zeros(features.shape[-1]), jnp.ones(features.shape[-1]))
    count = jnp.maximum(jnp.sum(mask), 1)
    centre = jnp.sum(jnp.where(mask[:, None], normed, 0.0), axis=0) / count
    deviation = jnp.where(mask[:, None], normed - centre, 0.0)
    variance = jnp.sum(deviation**2, axis=0) / count
    # A direction that never varied here must not explode when it varies later.
    scale = jnp.sqrt(jnp.maximum(variance, jnp.maximum(0.01 * jnp.mean(variance), 1e-6)))
    return CriticParams(critic.trained, {**critic.fixed, "centre": centre, "scale": scale})


def standardised_features(critic: CriticParams, features: Array) -> Array:
    """The features as the heads see them, for `posterior.project_features`; [..., H]."""
    features = jax.lax.stop_gradient(features.astype(jnp.float32))
    return standardise(features, critic.fixed["centre"], critic.fixed["scale"])


def bin_edges(config: CriticConfig) -> Array:
    """Edges of the categorical's bins, [bins + 1]; the range plus a margin at each end.

    Without the margin a target at an end would lose half of its smoothing and its mean would
    move inwards.
    """
    low, high = config.value_range
    margin = _MARGIN_BINS * (high - low) / (config.num_bins - 2 * _MARGIN_BINS)
    return jnp.linspace(low - margin, high + margin, config.num_bins + 1)


def bin_centres(config: CriticConfig) -> Array:
    """Centres of the categorical's bins, [bins]."""
    edges = bin_edges(config)
    return (edges[:-1] + edges[1:]) / 2


def smoothing_std(config: CriticConfig) -> float:
    """Standard deviation of the Gaussian that smooths an HL-Gauss target: 3/4 of a bin."""
    low, high = config.value_range
    return 0.75 * (high - low) / (config.num_bins - 2 * _MARGIN_BINS)


def member_values(config: CriticConfig, value_logits: Array) -> Array:
    """Value of each state according to each member.

    Args:
      config: what the critic is.
      value_logits: [..., M] or [..., M, bins].

    Returns:
      [..., M], inside the value range.
    """
    if config.value == "bernoulli":
        return jax.nn.sigmoid(value_logits)
    values = jax.nn.softmax(value_logits, axis=-1) @ bin_centres(config)
    return jnp.clip(values, *config.value_range)


def member_folds(config: CriticConfig) -> Array:
    """The fold of each member, [M] int32: the tasks it never trains on."""
    return jnp.arange(config.num_members) % config.num_folds


def belief(config: CriticConfig, value_logits: Array, *, fold: Array | None = None) -> Belief:
    """Mean, covariance and outcome noise from the members' logits.

        V = mean_m V_m,   e_m = (V_m - V) / sqrt(M - 1),   tau2 = |e|^2

    so that e(s) . e(s') is the members' sample covariance. The noise of one outcome is
    V (1 - V) for "bernoulli"; for "hl_gauss" the members' mean variance without the smoothing,
    at most (V - low)(high - V), which no outcome in the range can exceed.

    Args:
      config: what the critic is.
      value_logits: [..., M] or [..., M, bins].
      fold: [...] int32, fold of each state's task: only members that never trained on it are
        read, M / num_folds in place of M, and states of different folds are uncorrelated.
        None: all members.

    Returns:
      Belief with D = M error features.
    """
    values = member_values(config, value_logits)
    chex.assert_axis_dimension(values, -1, config.num_members)
    if fold is None:
        used = jnp.ones(values.shape, bool)
        count = config.num_members
    else:
        used = member_folds(config) == fold[..., None]
        count = config.num_members // config.num_folds

    def member_mean(x):
        return jnp.sum(jnp.where(used, x, 0.0), axis=-1) / count

    mean = member_mean(values)
    errors = jnp.where(used, values - mean[..., None], 0.0) / math.sqrt(count - 1)
    low, high = config.value_range
    noise = (mean - low) * (high - mean)
    if config.value == "hl_gauss":
        probs, centres = jax.nn.softmax(value_logits, axis=-1), bin_centres(config)
        spread = probs @ centres**2 - (probs @ centres) ** 2
        noise = jnp.minimum(member_mean(spread) - smoothing_std(config) ** 2, noise)
    return Belief(
        mean=mean,
        error_features=errors,
        variance=jnp.sum(errors**2, axis=-1),
        noise_variance=jnp.maximum(noise, config.noise_floor),
    )


def expected_cost(config: CriticConfig, log_cost: Array) -> Array:
    """Tokens that one continuation from the state is expected to generate; [...] > 0."""
    return config.cost_scale * jnp.exp(jnp.clip(log_cost, -_MAX_LOG_COST, _MAX_LOG_COST))
