"""TD(lambda) for one trajectory: returns, advantages, and segments between states.

Everything here sees a single trajectory with its time axis first; batch with `jax.vmap`.
The time index follows the usual convention: `v_tm1[i]` is the value of the state before step
i, `r_t[i]` and `discount_t[i]` belong to the step, `v_t[i]` is the value of the state after it.
`discount_t[i] = 0` ends an episode; there is no separate flag.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from focus.types import Array


def td_lambda_returns(r_t: Array, discount_t: Array, v_t: Array, lambda_: Array | float) -> Array:
    """Mixes bootstrapped and sampled returns with weight `lambda_`.

        G_t = r_t + discount_t ((1 - lambda_t) v_t + lambda_t G_{t+1}),   G_T = v_{T-1}

    The last step always bootstraps from `v_t[T - 1]`; set its discount to 0 when the episode
    ended there.

    Reference: Sutton & Barto, Reinforcement Learning (2018), chapter 12.

    Args:
      r_t: [T] reward of each step.
      discount_t: [T] discount of each step.
      v_t: [T] value of the state after each step.
      lambda_: scalar or [T] mixing weight in [0, 1].

    Returns:
      [T] lambda-returns.
    """
    chex.assert_rank([r_t, discount_t, v_t], 1)
    chex.assert_equal_shape([r_t, discount_t, v_t])
    lambda_t = jnp.ones_like(discount_t) * lambda_

    def step(following, x):
        r, discount, v, lam = x
        current = r + discount * ((1 - lam) * v + lam * following)
        return current, current

    _, returns = jax.lax.scan(step, v_t[-1], (r_t, discount_t, v_t, lambda_t), reverse=True)
    return returns


def td_lambda_advantages(
    v_tm1: Array, r_t: Array, discount_t: Array, v_t: Array, lambda_: Array | float
) -> Array:
    """Sums temporal differences, discounted by `discount_t * lambda_`.

        delta_t = r_t + discount_t v_t - v_tm1
        A_t     = delta_t + discount_t lambda_t A_{t+1},   A_T = 0

    When `v_t[i] == v_tm1[i + 1]` this equals `td_lambda_returns(...) - v_tm1`.

    Reference: Schulman et al., Generalized Advantage Estimation (arXiv:1506.02438).

    Args:
      v_tm1: [T] value of the state before each step.
      r_t: [T] reward of each step.
      discount_t: [T] discount of each step.
      v_t: [T] value of the state after each step.
      lambda_: scalar or [T]; entry i weighs what follows the state after step i.

    Returns:
      [T] advantages.
    """
    chex.assert_rank([v_tm1, r_t, discount_t, v_t], 1)
    chex.assert_equal_shape([v_tm1, r_t, discount_t, v_t])
    delta_t = r_t + discount_t * v_t - v_tm1
    decay_t = discount_t * lambda_

    def step(following, x):
        delta, decay = x
        current = delta + decay * following
        return current, current

    _, advantages = jax.lax.scan(step, jnp.zeros_like(delta_t[0]), (delta_t, decay_t), reverse=True)
    return advantages


def following_state(mask: Array) -> tuple[Array, Array]:
    """Finds, for each segment, the state that comes after it when absent segments are skipped.

    The state after a valid segment is the one before the next valid segment; after the last
    valid segment it is the one at the next index, where the trajectory ended.

    Args:
      mask: [S] bool, True for segments that exist; False may stand anywhere.

    Returns:
      index: [S] int32 into the S + 1 states. Absent segments hold a valid index too.
      is_last: [S] bool, True on the last valid segment only.
    """
    chex.assert_rank(mask, 1)
    num_segments = mask.shape[0]
    position = jnp.arange(num_segments, dtype=jnp.int32)
    first_valid_from = jax.lax.cummin(jnp.where(mask, position, num_segments), reverse=True)
    index = jnp.append(first_valid_from[1:], jnp.int32(num_segments))
    last_valid = jnp.max(jnp.where(mask, position, -1))
    return jnp.where(index < num_segments, index, last_valid + 1), position == last_valid


def segment_advantages(
    values: Array,
    rewards: Array,
    mask: Array,
    *,
    discount: Array | float = 1.0,
    lambda_: Array | float = 0.95,
    truncated: Array | bool = False,
) -> Array:
    """Scores the segments between the states of one trajectory.

        delta_j = r_j + discount V(s_j') - V(s_j)
        A_j     = delta_j + discount lambda_j A_j'

    where the prime is the next valid segment and its state (see `following_state`). Absent
    segments neither discount nor decay: masked equals filtered. After the last valid segment
    the value is 0, unless the trajectory was cut there: then it is V of the state it was cut at.

    Args:
      values: [S + 1] value of the state before each segment, and where the trajectory ended.
      rewards: [S] reward of each segment, the outcome included.
      mask: [S] bool, segments that exist. What stands elsewhere is never read, NaN included.
      discount: scalar or [S], per segment (not per token).
      lambda_: scalar or [S]; entry j weighs what follows the state after segment j.
      truncated: scalar bool; True bootstraps from the state where the trajectory was cut.

    Returns:
      [S] advantages, 0 on absent segments.
    """
    chex.assert_rank([values, rewards, mask], 1)
    chex.assert_equal_shape([rewards, mask])
    chex.assert_shape(values, (rewards.shape[0] + 1,))
    after, is_last = following_state(mask)
    ended = is_last & ~jnp.asarray(truncated, bool)
    # An absent segment becomes the identity of the recursion: delta 0, decay 1.
    advantages = td_lambda_advantages(
        v_tm1=jnp.where(mask, values[:-1], 0.0),
        r_t=jnp.where(mask, rewards, 0.0),
        discount_t=jnp.where(mask, discount, 1.0),
        v_t=jnp.where(mask & ~ended, values[after], 0.0),
        lambda_=jnp.where(mask, lambda_, 1.0),
    )
    return jnp.where(mask, advantages, 0.0)


def trust_lambda(
    variance: Array, noise_var: Array, mask: Array, covariance: Array | None = None
) -> Array:
    """Chooses lambda per segment from how well the value after it is known.

        lambda_j = (tau2(s_j') - Cov(s_j, s_j')) / (tau2(s_j') + noise2(s_j')), at least 0

    This project's rule. The advantage of segment j is V(s_j') - V(s_j), the difference of two
    values that are known up to correlated errors. Given the row's own outcome y, its posterior
    mean is

        V*(s_j') - V*(s_j) + lambda_j (y - V*(s_j'))

    with the lambda above: of all linear mixtures the one that correlates best with the truth. So
    a value known exactly carries the bootstrap (lambda 0) and an unknown one passes the outcome
    through, as far as its error is its own: an error that both states share, as states of one
    task do, drops out of the difference, and the outcome would only add noise to it.

    Args:
      variance: [S + 1] epistemic variance of each state's value.
      noise_var: [S + 1] variance of one outcome given the state, > 0.
      mask: [S] bool, segments that exist.
      covariance: [S] of the errors at the state before each segment and the state after it;
        None: they have nothing in common, tau2 / (tau2 + noise2).

    Returns:
      [S] lambda, 1 on absent segments and on the last valid one, where nothing follows.
    """
    chex.assert_rank([variance, noise_var, mask], 1)
    chex.assert_shape([variance, noise_var], (mask.shape[0] + 1,))
    after, is_last = following_state(mask)
    used = mask & ~is_last
    epistemic = jnp.where(used, variance[after], 1.0)
    noise = jnp.where(used, noise_var[after], 1.0)
    own = epistemic
    if covariance is not None:
        chex.assert_equal_shape([covariance, mask])
        own = jnp.clip(epistemic - jnp.where(used, covariance, 0.0), 0.0, epistemic + noise)
    return jnp.where(used, own / (epistemic + noise), 1.0)


def segments_to_tokens(segment_values: Array, token_segment: Array) -> Array:
    """Gives each token the value of its segment.

    Args:
      segment_values: [S] one value per segment.
      token_segment: [L] int32 segment of each token, -1 where the policy generated nothing.

    Returns:
      [L] values, 0 where `token_segment` is -1.
    """
    chex.assert_rank([segment_values, token_segment], 1)
    inside = token_segment >= 0
    outside = jnp.zeros((), segment_values.dtype)
    return jnp.where(inside, segment_values[jnp.where(inside, token_segment, 0)], outside)
