"""The whole method in a world: one training step is one pure function, and a run is a scan over it.

What a step does is what `focus.run.steps` does, with the same functions: `branching.plan`,
`credit.refine`, `credit.estimate`. What is different is what they stand on: a table in place of a
language model, counts in place of a critic's head, and exact values to hold everything against.
Seeds are independent worlds and runs; batch with `jax.vmap`, compile once with `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from focus.branching.features import StateFeatures, cut_points, state_weights
from focus.branching.plan import plan
from focus.credit import estimate
from focus.credit.errors import ErrorFeatures, pair_covariances, posterior
from focus.credit.refine import bernoulli_noise_var, leave_one_out_values, refine_values
from focus.lab import critic, exact
from focus.lab.arms import Arm
from focus.lab.play import Episodes, launched, play, take_state
from focus.lab.world import World, draw_bits
from focus.lab.worlds import make_world
from focus.types import Array, CreditBatch

# Rows that are laid out beyond what the first policy's mean episode asks for.
SPARE_ROWS = 1.35
# Share of its old value that a running mean keeps in a step.
RUNNING = 0.9


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """What a run was like. Fields that a method has no use for are 0 throughout.

    Attributes:
      success: [steps + 1] exact success of the policy, before the first step and after each.
      tokens: [steps] generated.
      branch_tokens: [steps] of them, by branches.
      dose: [steps] tokens that carried an advantage other than 0.
      critic_error: [steps] mean squared error of V over the states of base rollouts, against
        exact values that know all of the state.
      refined_error: [steps] the same of V*.
      error_reduction: [steps] fall of the weighted squared error by refinement, times 1,000, per
        token of branches.
      expected_reduction: [steps] what the belief expected of the same.
      residual_variance: [steps] mean squared standardised residual of branch means; 1 if the
        variances are honest.
      settled: [steps] share of the branches' tokens from states whose exact value is within .01
        of 0 or 1, where no action decides anything any more.
      correlation: [steps] of advantages with true ones, over all tokens that are trained.
      base_fraction: [steps] of the budget, that base rollouts were launched for.
    """

    success: Array
    tokens: Array
    branch_tokens: Array
    dose: Array
    critic_error: Array
    refined_error: Array
    error_reduction: Array
    expected_reduction: Array
    residual_variance: Array
    settled: Array
    correlation: Array
    base_fraction: Array


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static shapes of an arm in a world.

    Attributes:
      groups: of base rollouts that are laid out.
      base: rows of base rollouts.
      branch: rows of branches.
      budget: tokens of a step.
      most_from: [T + 1] most tokens that an episode can generate from a layer on.
    """

    groups: int
    base: int
    branch: int
    budget: int
    most_from: tuple[int, ...]


@jax.jit
def _mean_tokens(world: World) -> Array:
    """Of an episode of the first policy."""
    policy = jax.nn.softmax(world.logits)
    flow = exact.occupancy(world, policy)[..., None] * policy[world.policy_row]
    return jnp.sum(flow * world.tokens)


def any_world(name: str, options: Mapping[str, Any]) -> World:
    """A world to take shapes from: seed 0, drawn by one compiled program."""
    return jax.jit(functools.partial(make_world, name, **options))()


def sizes_of(world: World, arm: Arm, tokens_per_step: int) -> Sizes:
    """Shapes that hold what an arm may do with its budget in a world.

    Args:
      world: any of the worlds that are run; they differ by their seed.
      arm: the method.
      tokens_per_step: budget of a step.

    Raises:
      ValueError: the share of base rollouts does not hold one group of the longest episodes.
    """
    by_layer = np.asarray(world.tokens).max(axis=(1, 2))
    most_from = tuple(int(x) for x in np.append(np.cumsum(by_layer[::-1])[::-1], 0))
    base_budget = int(arm.base_fraction * tokens_per_step)
    if arm.group_size * most_from[0] > base_budget:
        raise ValueError(
            f"arm {arm.name}: {base_budget} tokens for base rollouts do not hold a group of "
            f"{arm.group_size} episodes of up to {most_from[0]} tokens in {world.name}; raise "
            "tokens_per_step or base_fraction, or lower group_size"
        )
    mean = float(_mean_tokens(world))
    exactly = mean > most_from[0] - 1e-3  # episodes of one length only
    rows = base_budget / mean if exactly else SPARE_ROWS * base_budget / mean
    groups = max(1, math.floor(rows / arm.group_size + (0.001 if exactly else 1)))
    branch = arm.max_picks * max(arm.ks) if arm.branches else 0
    return Sizes(groups, groups * arm.group_size, branch, tokens_per_step, most_from)


def policy_of(world: World, weights: Array) -> Array:
    """[R, A] probabilities of the policy that has learned `weights`."""
    push = weights if world.policy_features is None else world.policy_features @ weights
    return jax.nn.softmax(world.logits + push, axis=-1)


def states_of(episodes: Episodes) -> tuple[Array, Array]:
    """Layer and state [B, S] in which each segment begins."""
    return episodes.layer[:, :-1], episodes.state[:, :-1]


def action_probs(world: World, policy: Array, episodes: Episodes) -> Array:
    """[B, S, A] probabilities that each action was drawn from."""
    return policy[take_state(world.policy_row, *states_of(episodes))]


def _join(base: Episodes, branches: Episodes | None) -> Episodes:
    if branches is None:
        return base
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), base, branches)


def core_batch(
    world: World, policy: Array, episodes: Episodes, group: Array, rows: Array
) -> CreditBatch:
    """The channels that every method reads; each action is one segment of one token.

    Args:
      world: one world.
      policy: [R, A] that played them.
      episodes: of B rows.
      group: [B] int32 of each row.
      rows: [B] bool, rows that were played.
    """
    probs = action_probs(world, policy, episodes)
    logp = jnp.log(jnp.take_along_axis(probs, episodes.action[..., None], axis=-1)[..., 0])
    mask = episodes.mask
    segments = jnp.arange(mask.shape[1], dtype=jnp.int32)
    return CreditBatch(
        group_id=group,
        outcome=episodes.outcome,
        success=episodes.outcome > 0.5,
        row_mask=rows,
        segment_mask=mask,
        segment_reward=jnp.zeros(mask.shape),
        token_segment=jnp.where(mask, segments, -1),
        token_mask=mask,
        behaviour_logp=jnp.where(mask, logp, 0.0),
        truncated=jnp.zeros(rows.shape, bool),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What a step has played and what it believes of it. Base rows first, then branches.

    Attributes:
      episodes: B rows.
      rows: [B] bool, rows that were played.
      group: [B] int32.
      parent: [M] int32 base row that a branch left; segment: [M] where; index: [M] which of the
        continuations from there.
      values: [B, S + 1] refined; variance: [B, S + 1]; covariance: [B, S] see `CreditBatch`.
      mean: [base, S] the critic's values of the states of base rollouts, before any branch.
      exists: [base, S] bool.
      weight: [base, S] of an error there, sums to 1.
      expected: expected fall of the weighted variance by the branches.
      residual: [2] sum of squared standardised residuals of branch means, and their number.
    """

    episodes: Episodes
    rows: Array
    group: Array
    parent: Array
    segment: Array
    index: Array
    values: Array
    variance: Array
    covariance: Array
    mean: Array
    exists: Array
    weight: Array
    expected: Array
    residual: Array


def collect_rollouts(
    world: World,
    policy: Array,
    counts: critic.Counts,
    arm: Arm,
    sizes: Sizes,
    tasks: Array,
    base_fraction: Array | float,
    key: Array,
) -> Rollouts:
    """Plays a step's base rollouts and branches, and refines the values of their states.

    Args:
      world: one world.
      policy: [R, A] probabilities.
      counts: of the critic, from before the step.
      arm: the method.
      sizes: of the arm in this world.
      tasks: [groups] int32.
      base_fraction: of the budget.
      key: consumed.
    """
    base_key, plan_key, branch_key = jax.random.split(key, 3)
    most_from = jnp.asarray(sizes.most_from, jnp.int32)
    task = jnp.repeat(tasks, arm.group_size)
    start = world.start[task]
    every = jnp.ones(sizes.base, bool)
    base = play(world, policy, task, jnp.zeros_like(task), start, every, base_key)
    base_budget = jnp.floor(base_fraction * sizes.budget).astype(jnp.int32)
    base_rows = launched(base.cost, most_from[:1], base_budget, arm.group_size)
    base = base.keep(base_rows)
    group = jnp.repeat(jnp.arange(sizes.groups, dtype=jnp.int32), arm.group_size)
    turns = world.num_layers
    probs = action_probs(world, policy, base)
    norm = jnp.where(base.mask, 1.0 - jnp.sum(jnp.square(probs), axis=-1), 0.0)
    amount = norm * base.tokens if arm.weights == "score_norm" else base.tokens.astype(jnp.float32)
    weight = jax.vmap(state_weights)(amount, base.mask)[:, :turns]
    weight = jnp.where(base.mask, weight, 0.0)
    weight /= jnp.maximum(jnp.sum(weight), 1e-9)

    def believe(episodes):
        return critic.belief(
            counts, world, *states_of(episodes), look_weight=arm.look_weight, weight=arm.weight
        )

    mean, tau2 = believe(base)
    noise = bernoulli_noise_var(mean)
    exists = base.mask.reshape(-1)
    local = jnp.sqrt(arm.task_share * tau2).reshape(sizes.groups, arm.group_size * turns, 1)
    errors = ErrorFeatures(
        shared=jnp.zeros((exists.size, 0)),
        local=jnp.where(exists.reshape(local.shape[:2])[..., None], local, 0.0),
        own=jnp.where(exists, ((1.0 - arm.task_share) * tau2).reshape(-1), 0.0),
    )
    none = jnp.zeros(0, jnp.int32)
    count, total = jnp.zeros((2, exists.size))
    branches, branch_rows = None, jnp.zeros(0, bool)
    parent = segment = index = none
    residual, expected = jnp.zeros(2), jnp.zeros(())
    if arm.branches:
        features = _features(
            world, arm, base, base_rows, mean, errors, noise, weight, norm, probs, most_from
        )
        left = sizes.budget - jnp.sum(base.cost)
        picked = plan(
            features, left, rule=arm.rule, ks=arm.ks, max_picks=arm.max_picks, key=plan_key,
            max_per_state=arm.max_per_state,
        )  # fmt: skip
        ends = jnp.cumsum(picked.count)
        number = jnp.arange(sizes.branch, dtype=jnp.int32)
        source = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
        wanted = number < ends[-1]
        source = jnp.where(wanted, source, 0)
        index = number - (ends[source] - picked.count[source])
        parent, segment = source // turns, source % turns
        layer, state = base.layer[parent, segment], base.state[parent, segment]
        branches = play(world, policy, task[parent], layer, state, wanted, branch_key)
        branch_rows = wanted & launched(branches.cost, most_from[layer], left)
        branches = branches.keep(branch_rows)
        played = branch_rows.astype(jnp.float32)
        count = count.at[source].add(played)
        total = total.at[source].add(played * branches.outcome)
        # What the branches taught, and what they were expected to.
        branched = count > 0
        surprise = jnp.where(branched, total / jnp.maximum(count, 1) - mean.reshape(-1), 0.0)
        spread = tau2.reshape(-1) + noise.reshape(-1) / jnp.maximum(count, 1)
        residual = jnp.stack(
            [jnp.sum(jnp.where(branched, jnp.square(surprise) / spread, 0.0)), jnp.sum(branched)]
        )
        expected = picked.gain
    refined, left_variance = refine_values(
        mean.reshape(-1), errors, noise.reshape(-1), total / jnp.maximum(count, 1), count,
        mode=arm.refine, mask=exists,
    )  # fmt: skip
    refined, left_variance = refined.reshape(mean.shape), left_variance.reshape(mean.shape)
    covariance = _covariance(arm, errors, noise, count, mean.shape)
    if arm.siblings and arm.group_size > 1:
        refined = refined.at[:, 0].set(_siblings(base, base_rows, refined, left_variance, group))

    values, variances, covariances = refined, left_variance, covariance
    if branches is not None:
        first = (parent, segment)
        own = jnp.where(branch_rows, branches.outcome, 0.0)
        others = count.reshape(mean.shape)[first] - branch_rows
        value, variance = believe(branches)
        value = value.at[:, 0].set(
            leave_one_out_values(
                mean[first], tau2[first], noise[first], total.reshape(mean.shape)[first] - own,
                others,
            )
        )  # fmt: skip
        gain = tau2[first] / (tau2[first] + noise[first] / jnp.maximum(others, 1))
        fused = jnp.where(others > 0, (1.0 - gain) * tau2[first], tau2[first])
        variance = variance.at[:, 0].set(fused)
        values = jnp.concatenate([values, value])
        shared = arm.task_share * jnp.sqrt(variance * jnp.roll(variance, -1, axis=1))
        variances = jnp.concatenate([variances, variance])
        covariances = jnp.concatenate([covariances, shared])
    episodes = _join(base, branches)
    played = episodes.mask
    end = ((0, 0), (0, 1))
    return Rollouts(
        episodes=episodes,
        rows=jnp.concatenate([base_rows, branch_rows]),
        group=jnp.concatenate([group, group[parent]]),
        parent=parent,
        segment=segment,
        index=index,
        values=jnp.pad(jnp.where(played, values, 0.0), end),
        variance=jnp.pad(jnp.where(played, variances, 0.0), end),
        covariance=jnp.where(played, covariances, 0.0),
        mean=mean,
        exists=base.mask,
        weight=weight,
        expected=expected,
        residual=residual,
    )


def _covariance(arm, errors, noise, count, shape) -> Array:
    """[base, S] covariance of the errors of V* at both ends of each segment."""
    rows = jnp.arange(count.size)
    after = errors
    if arm.refine == "joint" and arm.task_share > 0:
        precision = jnp.where(count > 0, count / noise.reshape(-1), 0.0)
        after = posterior(errors, precision).errors
    elif arm.task_share == 0:
        return jnp.zeros(shape)
    pairs = pair_covariances(after, rows, jnp.minimum(rows + 1, count.size - 1))
    return pairs.reshape(shape).at[:, -1].set(0.0)


def _siblings(base, rows, refined, variance, group) -> Array:
    """[base] values of first states that know what the task's other rollouts came to."""
    won, size = jnp.where(rows, base.outcome, 0.0), rows.size
    number = jax.ops.segment_sum(rows.astype(jnp.float32), group, size)[group] - rows
    others = jax.ops.segment_sum(won, group, size)[group] - won
    first = refined[:, 0]
    return leave_one_out_values(first, variance[:, 0], bernoulli_noise_var(first), others, number)


def _features(
    world, arm, base, base_rows, mean, errors, noise, weight, norm, probs, most_from
) -> StateFeatures:
    """The pool of a step: all states of its base rollouts."""
    turns = world.num_layers
    branchable = base.mask & base_rows[:, None]
    if arm.alive_only:
        branchable &= _may_succeed(world)[take_state(world.seen, *states_of(base))]
    # Tokens to go from each turn on, of the rollouts that got there; never above the most.
    after = jnp.flip(jnp.cumsum(jnp.flip(base.tokens, 1), axis=1), 1)
    at_turn = jnp.sum(after, axis=0) / jnp.maximum(jnp.sum(base.mask, axis=0), 1)
    cost = jnp.broadcast_to(jnp.minimum(at_turn, most_from[:turns]), mean.shape)
    logp = jnp.log(jnp.maximum(probs, 1e-30))
    taken = jnp.take_along_axis(logp, base.action[..., None], axis=-1)[..., 0]
    goes_on = jnp.pad(base.mask[:, 1:], ((0, 0), (0, 1)))
    row = jnp.arange(mean.size, dtype=jnp.int32).reshape(mean.shape)
    uncertain = (base.mask & (taken < math.log(0.9))).astype(jnp.int32)
    flat = {
        "mean": mean,
        "noise_var": noise,
        "cost": cost,
        "weight": weight,
        "mask": branchable,
        "entropy": -jnp.sum(probs * logp, axis=-1),
        "score_norm": norm,
        "next_state": jnp.where(goes_on, row + 1, -1),
        "nll": -taken,
        "log_ratio": jnp.zeros(mean.shape),  # the policy that plays is the one that is trained
        "rollout": row // turns,
        "cut": jax.vmap(cut_points)(uncertain, base.mask)[:, :turns],
    }
    return StateFeatures(error_features=errors, **{k: x.reshape(-1) for k, x in flat.items()})


def _may_succeed(world: World) -> Array:
    """[num_seen] bool: not everything that looks like this is lost."""
    open_ = jnp.isfinite(exact.goal_distance(world)[:-1])
    return jnp.zeros(world.num_seen, bool).at[world.seen].max(open_)


def credit_batch(world: World, policy: Array, arm: Arm, played: Rollouts) -> CreditBatch:
    """What the arm's estimator reads of a step's rollouts."""
    batch = core_batch(world, policy, played.episodes, played.group, played.rows)
    rows = played.rows
    if not arm.train_on_branches:
        rows &= jnp.arange(rows.size) < played.mean.shape[0]
    batch = dataclasses.replace(batch, row_mask=rows)
    if arm.reads_values:
        batch = dataclasses.replace(
            batch,
            value=played.values,
            value_variance=played.variance,
            value_covariance=played.covariance if arm.task_share > 0 else None,
        )
    if arm.branches:
        base = played.mean.shape[0]
        shape = (rows.size, world.num_layers, arm.max_per_state)
        outcome = played.episodes.outcome[base:]
        where = (played.parent, played.segment, played.index)
        there = played.rows[base:]
        batch = dataclasses.replace(
            batch,
            mc_return=jnp.zeros(shape).at[where].add(jnp.where(there, outcome, 0.0)),
            mc_mask=jnp.zeros(shape, bool).at[where].max(there),
        )
    return batch


def gradient(
    world: World, policy: Array, episodes: Episodes, advantages: Array, mask: Array
) -> Array:
    """[R, A] gradient of the sum over tokens of `advantage log pi(action)` in the logits."""
    row = take_state(world.policy_row, *states_of(episodes))
    score = jax.nn.one_hot(episodes.action, policy.shape[-1]) - policy[row]
    push = jnp.where(mask, advantages * episodes.tokens, 0.0)
    return jnp.zeros_like(policy).at[row].add(push[..., None] * score)


def _correlation(x: Array, y: Array, mask: Array) -> Array:
    n = jnp.maximum(jnp.sum(mask), 1)
    x, y = (jnp.where(mask, z - jnp.sum(jnp.where(mask, z, 0.0)) / n, 0.0) for z in (x, y))
    spread = jnp.sum(x * x) * jnp.sum(y * y)
    return jnp.where(spread > 1e-20, jnp.sum(x * y) / jnp.sqrt(jnp.maximum(spread, 1e-20)), 0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Learner:
    """What a run carries from step to step.

    Attributes:
      weights: of the policy, added to the world's logits; [R, A], or [P, A] for a linear policy.
      opt_state: of the optimiser.
      counts: of the critic.
      order: [.] int32 tasks in the order in which they are played.
      place: in that order.
      scale: running root mean square of advantages, 0 before the first step.
    """

    weights: Array
    opt_state: Any
    counts: critic.Counts
    order: Array
    place: Array
    scale: Array


def make_optimizer(arm: Arm) -> optax.GradientTransformation:
    """Turns gradients into steps, of a learning rate of 1, uphill."""
    return {"sgd": optax.identity, "adam": optax.scale_by_adam}[arm.optimizer]()


def init_learner(
    world: World, arm: Arm, sizes: Sizes, steps: int, order_key: Array, warm_key: Array
) -> Learner:
    """A policy that has learned nothing, and a critic that may have seen demonstrations.

    Args:
      world: one world.
      arm: the method.
      sizes: of the arm in this world.
      steps: that are to be trained; tasks come in shuffled epochs.
      order_key: of the epochs, consumed.
      warm_key: of the demonstrations, consumed.
    """
    epochs = -(-steps * sizes.groups // world.num_tasks) + 1
    order = jnp.argsort(draw_bits(order_key, epochs, world.num_tasks), axis=1).reshape(-1)
    rows, features = world.logits.shape[0], world.policy_features
    weights = jnp.zeros((rows if features is None else features.shape[1], world.num_actions))
    counts = critic.init_counts(world)
    if arm.critic_warmup:
        task = jnp.arange(arm.critic_warmup, dtype=jnp.int32) % world.num_tasks
        shown = play(
            world, policy_of(world, weights), task, jnp.zeros_like(task), world.start[task],
            jnp.ones(task.size, bool), warm_key,
        )  # fmt: skip
        counts = critic.learn(counts, world, shown, kept=1.0)
    opt_state = make_optimizer(arm).init(weights)
    return Learner(weights, opt_state, counts, order.astype(jnp.int32), jnp.int32(0), jnp.zeros(()))


def learn_from(
    world: World, arm: Arm, sizes: Sizes, learner: Learner, played: Rollouts,
    learning_rate: Array | float,
) -> tuple[Learner, Array, Array]:  # fmt: skip
    """Credit for what a step has played, and the updates of policy and critic by it.

    Args:
      world: one world.
      arm: the method.
      sizes: of the arm in this world.
      learner: before; its policy has played.
      played: base rollouts and branches.
      learning_rate: of the policy.

    Returns:
      The learner after, advantages [B, S], and bool [B, S], which of them the policy learned from.
    """
    policy = policy_of(world, learner.weights)
    credit = estimate(arm.estimator, credit_batch(world, policy, arm, played), **dict(arm.hparams))
    mask = credit.mask & played.episodes.mask
    advantages = jnp.where(mask, credit.advantages, 0.0)
    number = jnp.sum(mask * played.episodes.tokens)
    square = jnp.sum(jnp.square(advantages) * played.episodes.tokens)
    now = jnp.sqrt(square / jnp.maximum(number, 1))
    scale = learner.scale
    scale = jnp.where(scale > 0, RUNNING * scale + (1 - RUNNING) * now, now)
    divisor = {"none": 1.0, "rms": now, "running": scale}[arm.normalise]
    push = gradient(world, policy, played.episodes, advantages, mask)
    push = push / jnp.maximum(divisor, 1e-6) * (policy.shape[0] / sizes.budget)
    if world.policy_features is not None:
        push = world.policy_features.T @ push
    update, opt_state = make_optimizer(arm).update(push, learner.opt_state)
    base = played.mean.shape[0]
    after = Learner(
        weights=learner.weights + learning_rate * update,
        opt_state=opt_state,
        counts=critic.learn(learner.counts, world, played.episodes, kept=arm.kept),
        order=learner.order,
        place=learner.place + jnp.sum(played.rows[:base]) // arm.group_size,
        scale=scale,
    )
    return after, advantages, mask


def train_step(
    world: World, arm: Arm, sizes: Sizes, learner: Learner, learning_rate: Array | float, key: Array
) -> tuple[Learner, dict[str, Array]]:
    """One step of the method: rollouts, branches, credit, policy, critic.

    Args:
      world: one world.
      arm: the method.
      sizes: of the arm in this world.
      learner: before.
      learning_rate: of the policy.
      key: consumed.

    Returns:
      The learner after, and what is noted of the step: fields of `History`.
    """
    policy = policy_of(world, learner.weights)
    truth = exact.values(world, policy)
    tasks = jax.lax.dynamic_slice(learner.order, (learner.place,), (sizes.groups,))
    played = collect_rollouts(
        world, policy, learner.counts, arm, sizes, tasks, arm.base_fraction, key
    )
    after, advantages, mask = learn_from(world, arm, sizes, learner, played, learning_rate)
    record = _note(world, truth, played, advantages, mask)
    return after, record | {"base_fraction": jnp.float32(arm.base_fraction)}


def make_run(
    world_name: str,
    world_options: Mapping[str, Any],
    arm: Arm,
    *,
    steps: int,
    tokens_per_step: int,
) -> Callable[[Array | int, Array | float], History]:
    """A whole training run as a pure function of its seed and learning rate.

    Args:
      world_name: key of `WORLDS`.
      world_options: of its builder, without `seed`.
      arm: the method.
      steps: training steps.
      tokens_per_step: that the policy may generate in a step; never passed.

    Returns:
      `run(seed, learning_rate) -> History`.

    Raises:
      ValueError: unknown world or options, or a budget that holds no group of rollouts.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}")
    sizes = sizes_of(any_world(world_name, world_options), arm, tokens_per_step)

    def run(seed, learning_rate):
        world = make_world(world_name, seed=seed, **world_options)
        key = jax.random.fold_in(jax.random.key(jnp.asarray(seed, jnp.uint32)), 1)
        order_key, warm_key, key = jax.random.split(key, 3)

        def step(learner, key):
            return train_step(world, arm, sizes, learner, learning_rate, key)

        start = init_learner(world, arm, sizes, steps, order_key, warm_key)
        end, records = jax.lax.scan(step, start, jax.random.split(key, steps))
        last = exact.success(world, policy_of(world, end.weights))
        return History(success=jnp.append(records.pop("success"), last), **records)

    return run


def _note(
    world: World, truth: exact.ExactValues, played: Rollouts, advantages: Array, mask: Array
) -> dict[str, Array]:
    """What is noted of a step, before its update."""
    episodes = played.episodes
    layer, state = states_of(episodes)
    base = played.mean.shape[0]
    spent = jnp.sum(jnp.where(played.rows, episodes.cost, 0))
    costs = jnp.where(played.rows, episodes.cost, 0)[base:]
    branch = jnp.sum(costs)
    value = take_state(truth.v, layer, state)[:base]
    left = value[played.parent, played.segment]
    idle = jnp.sum(jnp.where(jnp.abs(left - 0.5) > 0.49, costs, 0))
    number = jnp.maximum(jnp.sum(played.exists), 1)

    def squares(estimate):
        return jnp.where(played.exists, jnp.square(estimate - value), 0.0)

    before, after = squares(played.mean), squares(played.values[:base, :-1])
    fall = jnp.sum(played.weight * (before - after))
    per_token = 1000.0 / jnp.maximum(branch, 1)
    true_advantages = truth.a[jnp.minimum(layer, world.num_layers - 1), state, episodes.action]
    return {
        "success": jnp.mean(truth.v[0, world.start]),
        "tokens": spent,
        "branch_tokens": branch,
        "dose": jnp.sum(jnp.where(mask & (advantages != 0), episodes.tokens, 0)),
        "critic_error": jnp.sum(before) / number,
        "refined_error": jnp.sum(after) / number,
        "error_reduction": jnp.where(branch > 0, fall * per_token, 0.0),
        "expected_reduction": jnp.where(branch > 0, played.expected * per_token, 0.0),
        "residual_variance": played.residual[0] / jnp.maximum(played.residual[1], 1.0),
        "settled": idle / jnp.maximum(branch, 1),
        "correlation": _correlation(advantages, true_advantages, mask),
    }
