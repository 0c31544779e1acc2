"""One training step's rollouts under a token budget: base, then branches where they teach most.

    base rollouts -> critic's belief -> R rounds of (plan, branch, update the belief)

One account pays for everything. Base rollouts are launched for their share of the budget by
predicted cost; what they leave, or use beyond their share, is what the branches get or lose, so
no base rollout is cut while the step has tokens left. Nothing here decides by the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from focus.branching.budget import Ledger
from focus.branching.plan import Plan
from focus.rollout.agent import Agent, Rollout, play, request_seed
from focus.rollout.belief import StateBeliefs, StateScores, make_beliefs
from focus.rollout.pool import Pool, TokenAccount
from focus.rollout.step import NO_BRANCHES, EpisodeCost, StepConfig
from focus.tasks.base import Task
from focus.types import Generation, RolloutTree, Trajectory

# The learner's forward pass: base trajectories in, the critic's belief about their states out.
Scorer = Callable[[Sequence[Trajectory]], StateScores]


@dataclasses.dataclass(frozen=True)
class BranchedState:
    """What branching one state has brought.

    Attributes:
      trajectory: id of the base rollout.
      task_id: its task.
      state: index of the state.
      turn: environment turns before it.
      value: critic mean before the branches.
      std: its epistemic standard deviation.
      refined: value after all branches of the step.
      refined_std: what is left of the deviation.
      started: continuations played.
      count: those with an outcome.
      mean: their mean outcome, None if there is none.
      cost_predicted: tokens that one continuation was predicted to generate.
      cost_actual: mean tokens of those with an outcome, None if there is none.
    """

    trajectory: str
    task_id: str
    state: int
    turn: int
    value: float
    std: float
    refined: float
    refined_std: float
    started: int
    count: int
    mean: float | None
    cost_predicted: float
    cost_actual: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Collected:
    """All that a step's rollouts brought.

    Attributes:
      tree: base rollouts and branches. Branches that got no token at all are left out.
      ledger: tokens by purpose; seconds in "rollout", "score" and "controller", the last being
        the time spent choosing.
      beliefs: states of the base rollouts with all evidence; None without branches.
      plans: one per round.
      branch_stats: one entry per branched state.
      episode_cost: prediction for the next step.
      num_tasks: how many of the tasks were played; the next step goes on after them.
      technical_failures: rollouts that ended "failed". They are in the tree (base) or not, but
        have no outcome.
      recomputed_share: of the prefixes that branches share with their parents, the part that
        the engine had to compute again; 0 without branches.
    """

    # asyncio prints the result of a finished run's task to itself; a step is too long for that.
    tree: RolloutTree = dataclasses.field(repr=False)
    ledger: Ledger
    beliefs: StateBeliefs | None = dataclasses.field(repr=False)
    plans: tuple[Plan, ...] = dataclasses.field(repr=False)
    branch_stats: tuple[BranchedState, ...] = dataclasses.field(repr=False)
    episode_cost: EpisodeCost
    num_tasks: int
    technical_failures: int
    recomputed_share: float


async def collect(
    config: StepConfig,
    agent: Agent,
    tasks: Sequence[Task],
    *,
    step: int,
    episode_cost: EpisodeCost,
    scorer: Scorer | None = None,
    on_finished: Callable[[Trajectory], None] | None = None,
    process: int = 0,
    num_processes: int = 1,
) -> Collected:
    """Plays one step.

    Args:
      config: budget and how to spend it.
      agent: plays.
      tasks: tasks to play in this order, as many as the budget pays for.
      step: part of every trajectory's id, "<step>/<task>.<member>".
      episode_cost: predicted cost of a base episode.
      scorer: the critic's forward pass; called once, after the base rollouts. Not needed
        without branches.
      on_finished: called with every trajectory when it ends, e.g. to write a journal.
      process: of several processes that play one step with tasks of their own; this one's groups
        are numbered `process`, `process + num_processes` ..., so that no two share a number.
      num_processes: how many there are.

    Returns:
      `Collected`; `ledger.spent <= config.budget` always.

    Raises:
      ValueError: no tasks; branches without a scorer or in an environment that cannot branch.
    """
    branching = config.rule != NO_BRANCHES
    if not tasks:
        raise ValueError("no tasks were given to collect; pass at least one")
    if branching and scorer is None:
        raise ValueError(f"rule {config.rule!r} needs a scorer; pass the critic's forward pass")
    if branching and not agent.env.branchable:
        raise ValueError(
            f"environment {agent.env.name!r} cannot continue a state twice; use rule 'none' and "
            "base_fraction 1"
        )
    clock = Stopwatch()
    account = TokenAccount(config.budget)
    with clock.phase("rollout"):
        numbers = range(process, process + num_processes * len(tasks), num_processes)
        base = await _play_base(
            config, agent, tasks, numbers, account, step, episode_cost, on_finished
        )

    branched = _Branched()
    if branching:
        with clock.phase("score"):
            scores = scorer(base)
        branched = await _branch(config, agent, account, base, scores, step, clock, on_finished)
    kept = tuple(branch for branch in branched.branches if branch.segments)
    return Collected(
        tree=RolloutTree(base, kept),
        ledger=ledger_of(base, kept, clock.seconds),
        beliefs=branched.beliefs,
        plans=branched.plans,
        branch_stats=branched.stats,
        episode_cost=episode_cost.updated(base),
        num_tasks=len({trajectory.group_id for trajectory in base}),
        technical_failures=sum(t.end == "failed" for t in (*base, *branched.branches)),
        recomputed_share=_recomputed_share(kept),
    )


async def _play_base(
    config: StepConfig,
    agent: Agent,
    tasks: Sequence[Task],
    numbers: Sequence[int],
    account: TokenAccount,
    step: int,
    episode_cost: EpisodeCost,
    on_finished: Callable[[Trajectory], None] | None,
) -> tuple[Trajectory, ...]:
    """Launches whole groups as long as their predicted cost fits into the base share.

    A group in flight stands for its predicted cost, or for what its finished members have used
    if that is more; only a group that is done stands for its real cost. (Short episodes end
    first: booking each at its real cost as it ends would launch too much.)
    """
    share = math.floor(config.base_fraction * config.budget)
    group_cost = config.group_size * episode_cost.tokens * config.cost_margin
    used: list[float] = []
    running: list[int] = []

    def projected() -> float:
        return sum(max(u, group_cost) if r else u for u, r in zip(used, running, strict=True))

    def launch() -> None:
        # The first group always: a step without rollouts would teach nothing.
        while len(used) < len(tasks) and (not used or projected() + group_cost <= share):
            group, task = numbers[len(used)], tasks[len(used)]
            state = agent.start(task)
            for member in range(config.group_size):
                rollout = Rollout(f"{step}/{group}.{member}", task.id, group)
                pool.submit(functools.partial(play, agent, state, rollout, account))
            used.append(0)
            running.append(config.group_size)

    def finished(trajectory: Trajectory) -> None:
        if on_finished is not None:
            on_finished(trajectory)
        # A dead engine fails for free: without a price it would be given every task there is.
        cost = episode_cost.tokens if trajectory.end == "failed" else 0
        launched = numbers.index(trajectory.group_id)
        used[launched] += max(trajectory.num_tokens, cost)
        running[launched] -= 1
        launch()

    pool = Pool(config.concurrency, finished)
    launch()
    return tuple(await pool.join())


@dataclasses.dataclass(frozen=True)
class _Branched:
    """What the rounds brought; nothing, without branches."""

    beliefs: StateBeliefs | None = None
    plans: tuple[Plan, ...] = ()
    branches: tuple[Trajectory, ...] = ()
    stats: tuple[BranchedState, ...] = ()


async def _branch(
    config: StepConfig,
    agent: Agent,
    account: TokenAccount,
    base: Sequence[Trajectory],
    scores: StateScores,
    step: int,
    clock: Stopwatch,
    on_finished: Callable[[Trajectory], None] | None,
) -> _Branched:
    """Plans, branches and updates the belief, round after round."""
    with clock.phase("controller"):
        beliefs = make_beliefs(
            base,
            scores,
            env_branchable=agent.env.branchable,
            max_context=agent.engine.info().max_context,
            smallest_bucket=config.state_bucket,
        )
        started = np.zeros_like(beliefs.branch_count)
    plans: list[Plan] = []
    rows: list[int] = []
    branches: list[Trajectory] = []
    for round_ in range(config.rounds):
        with clock.phase("controller"):
            plan = beliefs.plan(
                account.budget.available // (config.rounds - round_),
                rule=config.rule,
                ks=config.ks,
                max_picks=config.max_picks,
                max_per_state=config.max_per_state,
                sampled_count=started,
                seed=request_seed(agent.run_seed, f"{step}/plan", round_),
                value_range=config.value_range,
            )
            new_rows = np.repeat(np.arange(plan.count.size), plan.count).tolist()
        with clock.phase("rollout"):
            new = await _play_branches(
                config, agent, base, beliefs, new_rows, started, account, on_finished
            )
        with clock.phase("controller"):
            beliefs = beliefs.observe(new_rows, [branch.outcome for branch in new])
        started = started + plan.count
        plans.append(plan)
        rows += new_rows
        branches += new
    with clock.phase("controller"):
        stats = _branch_stats(config, base, beliefs, rows, branches)
    return _Branched(beliefs, tuple(plans), tuple(branches), stats)


async def _play_branches(
    config: StepConfig,
    agent: Agent,
    base: Sequence[Trajectory],
    beliefs: StateBeliefs,
    rows: Sequence[int],
    started: np.ndarray,
    account: TokenAccount,
    on_finished: Callable[[Trajectory], None] | None,
) -> list[Trajectory]:
    """Continues from the state of each row; a row that occurs k times is continued k times."""
    pool = Pool(config.concurrency, on_finished)
    member = started.copy()
    for row in rows:
        trajectory_index, state_index = beliefs.index[row]
        parent = base[trajectory_index]
        rollout = Rollout(
            id=f"{parent.id}/{state_index}.{member[row]}",
            task_id=parent.task_id,
            group_id=parent.group_id,
            parent=parent.id,
            parent_state=int(state_index),
        )
        member[row] += 1
        state = parent.states[state_index]
        pool.submit(functools.partial(play, agent, state, rollout, account))
    return await pool.join()


def ledger_of(
    base: Sequence[Trajectory], branches: Sequence[Trajectory], seconds: dict[str, float]
) -> Ledger:
    """The ledger of rollouts, read off their tokens: see `focus.branching.Ledger`.

    What stands between an output and the next prompt of its span is observation: the tool's
    answer with its markers, and the request for a summary. A request that was aborted and
    resumed counts its prompt once.
    """
    columns = dict.fromkeys(("base", "branch", "summary", "observation", "prefill", "cached"), 0)
    for column, trajectories in (("base", base), ("branch", branches)):
        for trajectory in trajectories:
            generations = [g for segment in trajectory.segments for g in segment.generations]
            for generation in generations:
                purpose = "summary" if generation.kind == "summary" else column
                columns[purpose] += len(generation.output_ids)
                columns["cached"] += generation.cached_tokens
                columns["prefill"] += len(generation.prompt_ids) - generation.cached_tokens
            columns["observation"] += _observation_tokens(trajectory, generations)
    return Ledger(**columns, seconds=seconds)


def _observation_tokens(trajectory: Trajectory, generations: Sequence[Generation]) -> int:
    prompts = [(g.span, len(g.prompt_ids)) for g in generations]
    last = trajectory.states[-1]
    prompts.append((last.span, len(last.prompt_ids)))
    tokens = 0
    for generation, (span, length) in zip(generations, prompts[1:], strict=True):
        read = len(generation.prompt_ids) + len(generation.output_ids)
        if span == generation.span and length:
            tokens += length - read
    return tokens


def _recomputed_share(branches: Sequence[Trajectory]) -> float:
    """sum(prompt - 1 - cached) / sum(prompt - 1) over the first requests of branches.

    Minus one because the last prompt token must be computed to sample at all.
    """
    first = [branch.segments[0].generations[0] for branch in branches]
    shared = sum(len(g.prompt_ids) - 1 for g in first)
    recomputed = shared - sum(g.cached_tokens for g in first)
    return recomputed / shared if shared else 0.0


def _branch_stats(
    config: StepConfig,
    base: Sequence[Trajectory],
    beliefs: StateBeliefs,
    rows: Sequence[int],
    branches: Sequence[Trajectory],
) -> tuple[BranchedState, ...]:
    refined, variance = beliefs.refine(config.refine, config.value_range)
    prior_std = np.linalg.norm(beliefs.error_features, axis=1)
    of_row: dict[int, list[Trajectory]] = {}
    for row, branch in zip(rows, branches, strict=True):
        of_row.setdefault(row, []).append(branch)
    stats = []
    for row, members in sorted(of_row.items()):
        trajectory_index, state_index = (int(i) for i in beliefs.index[row])
        scored = [branch for branch in members if branch.outcome is not None]
        parent = base[trajectory_index]
        stats.append(
            BranchedState(
                trajectory=parent.id,
                task_id=parent.task_id,
                state=state_index,
                turn=parent.states[state_index].turn,
                value=float(beliefs.mean[row]),
                std=float(prior_std[row]),
                refined=float(refined[row]),
                refined_std=float(np.sqrt(variance[row])),
                started=len(members),
                count=len(scored),
                mean=float(np.mean([b.outcome for b in scored])) if scored else None,
                cost_predicted=float(beliefs.cost[row]),
                cost_actual=float(np.mean([b.num_tokens for b in scored])) if scored else None,
            )
        )
    return tuple(stats)


class Stopwatch:
    """Wall seconds by phase; measured, never decided by."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
