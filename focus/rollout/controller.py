"""One training step's rollouts under a token budget: base, then branches where they teach most.

    base rollouts -> critic's belief -> R rounds of (plan, branch, update the belief)

One account pays for everything. Base rollouts are launched for their share of the budget by
predicted cost; what they leave, or use beyond their share, is what the branches get or lose, so
no base rollout is cut while the step has tokens left. Nothing here decides by the clock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from focus.branching.budget import Ledger
from focus.branching.plan import Plan
from focus.rollout.accounting import Stopwatch, ledger_of, recomputed_share
from focus.rollout.agent import Agent, EpisodeStart, Rollout, play, request_seed, unplayed
from focus.rollout.belief import StateBeliefs, make_beliefs
from focus.rollout.pool import Patience, Pool, Slots, TokenAccount
from focus.rollout.step import NO_BRANCHES, EpisodeCost, StepConfig
from focus.rollout.tools import ToolUse
from focus.tasks.base import Task
from focus.types import RolloutTree, StateBelief, Trajectory

# The learner's forward pass: base trajectories in, the critic's belief about their states out.
Scorer = Callable[[Sequence[Trajectory]], StateBelief]
# Why a trajectory is not to be trained on, None if it is.
Screen = Callable[[Trajectory], str | None]

# Most tasks of one step, whatever they cost: those that cost nothing would never end.
MOST_GROUPS = 256


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
      noise_var: variance of one outcome given the state, as the plan assumed it.
      shift: by how much all evidence moves the value, before it is clipped to its range.
      outcomes: of the continuations.
      gain: predicted reduction of the weighted epistemic variance, see `predicted_gains`.
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
    noise_var: float | None = None
    gain: float | None = None
    shift: float | None = None
    outcomes: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class BaseRollouts:
    """A step's base rollouts, and what they have left to spend.

    Attributes:
      trajectories: all of them, in order of groups.
      tasks: one of each group, in the same order.
      account: pays for the branches too.
      seconds: wall time from the first launch to the last end.
      tool_s: of these, those in which they waited for tools alone, see `ToolUse`.
    """

    trajectories: tuple[Trajectory, ...] = dataclasses.field(repr=False)
    tasks: tuple[Task, ...] = dataclasses.field(repr=False)
    account: TokenAccount
    seconds: float
    tool_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Collected:
    """All that a step's rollouts brought.

    Attributes:
      tree: base rollouts and branches. Branches that got no token at all are left out.
      ledger: tokens by purpose; seconds in "rollout", "tools" (waiting for them alone), "score"
        and "controller", the last being the time spent choosing.
      beliefs: states of the base rollouts with all evidence; None without branches.
      plans: one per round.
      branch_stats: one entry per branched state.
      episode_cost: prediction for the next step.
      tasks: those that were played, one of each group; the next step goes on after them.
      technical_failures: rollouts that ended "failed". They are in the tree (base) or not, but
        have no outcome.
      tool_use: calls of the environment.
      recomputed_share: of the prefixes that branches share with their parents, the part that
        the engine had to compute again; 0 without branches.
      dropped: rollouts that were paid for and are not in the tree, see `Screen`.
    """

    # asyncio prints the result of a finished run's task to itself; a step is too long for that.
    tree: RolloutTree = dataclasses.field(repr=False)
    ledger: Ledger
    beliefs: StateBeliefs | None = dataclasses.field(repr=False)
    plans: tuple[Plan, ...] = dataclasses.field(repr=False)
    branch_stats: tuple[BranchedState, ...] = dataclasses.field(repr=False)
    episode_cost: EpisodeCost
    tasks: tuple[Task, ...] = dataclasses.field(repr=False)
    technical_failures: int
    tool_use: ToolUse
    recomputed_share: float
    dropped: tuple[Trajectory, ...] = dataclasses.field(repr=False, default=())

    @property
    def num_tasks(self) -> int:
        """How many of the tasks were played."""
        return len(self.tasks)


async def collect(
    config: StepConfig,
    agent: Agent,
    tasks: Iterable[Task],
    *,
    step: int,
    episode_cost: EpisodeCost,
    scorer: Scorer | None = None,
    on_finished: Callable[[Trajectory], None] | None = None,
    process: int = 0,
    num_processes: int = 1,
) -> Collected:
    """Plays one step: see `StepPlay`, of which these are the fields.

    Args:
      tasks: tasks to play in this order, as many as the budget pays for.
      scorer: see `StepPlay.branch`.

    Returns:
      `Collected`; `ledger.spent <= config.budget` always.

    Raises:
      ValueError: no tasks; branches without a scorer or in an environment that cannot branch.
    """
    play_of_step = StepPlay(
        config, agent, step, episode_cost, on_finished, process=process, num_processes=num_processes
    )
    play_of_step.check(scorer)
    return await play_of_step.branch(await play_of_step.base(tasks), scorer)


@dataclasses.dataclass(frozen=True)
class StepPlay:
    """What the rollouts of one step have in common.

    Attributes:
      config: budget and how to spend it.
      agent: plays.
      step: part of every trajectory's id, "<step>/<task>.<member>".
      episode_cost: predicted cost of a base episode.
      on_finished: called with every trajectory when it ends, e.g. to write a journal.
      screen: says which trajectories are not to be trained on.
      slots: where plays find a place, if several steps share it; None: `config.concurrency`.
      process: of several processes that play one step with tasks of their own; this one's groups
        are numbered `process`, `process + num_processes` ..., so that no two share a number.
      num_processes: how many there are.
      tool_use: what its calls of the environment have cost so far.
    """

    config: StepConfig
    agent: Agent
    step: int
    episode_cost: EpisodeCost
    on_finished: Callable[[Trajectory], None] | None = None
    screen: Screen = lambda trajectory: None
    slots: Slots | None = None
    process: int = 0
    num_processes: int = 1
    tool_use: ToolUse = dataclasses.field(default_factory=ToolUse)

    def check(self, scorer: Scorer | None) -> None:
        """Checks that the step can branch if it is meant to.

        Raises:
          ValueError: it cannot.
        """
        if self.config.rule == NO_BRANCHES:
            return
        if scorer is None:
            raise ValueError(
                f"rule {self.config.rule!r} needs a scorer; pass the critic's forward pass"
            )
        if not self.agent.env.branchable:
            raise ValueError(
                f"environment {self.agent.env.name!r} cannot continue a state twice; use rule "
                "'none' and base_fraction 1"
            )

    async def base(self, tasks: Iterable[Task]) -> BaseRollouts:
        """Launches whole groups as long as their predicted cost fits into the base share.

        A group in flight stands for its predicted cost, or for what its finished members have
        used if that is more; only a group that is done stands for its real cost. (Short episodes
        end first: booking each at its real cost as it ends would launch too much.)

        Every group that was launched is waited for, however long it takes. Where nothing but
        technical failures came back from a full house, the others fail unplayed.

        Args:
          tasks: played in this order; one is drawn when its group is launched.

        Returns:
          `BaseRollouts`.

        Raises:
          ValueError: no tasks.
        """
        config, cost = self.config, self.episode_cost.tokens
        share = math.floor(config.base_fraction * config.budget)
        group_cost = config.group_size * cost * config.cost_margin
        patience = Patience(config.proceed_fraction)
        account = TokenAccount(config.budget, patience.waiting)
        agent = dataclasses.replace(self.agent, patience=patience, tool_use=self.tool_use)
        left = itertools.islice(tasks, MOST_GROUPS)
        played: list[Task] = []
        used: list[float] = []
        running: list[int] = []
        failed, well = 0, 0

        def projected() -> float:
            return sum(max(u, group_cost) if r else u for u, r in zip(used, running, strict=True))

        async def play_unless_hopeless(start: EpisodeStart, rollout: Rollout) -> Trajectory:
            if failed >= config.concurrency and not well:
                return unplayed(start, rollout, "not played, since all rollouts before it failed")
            return await play(agent, start, rollout, account)

        def launch() -> None:
            # The first group always: a step without rollouts would teach nothing.
            while not used or projected() + group_cost <= share:
                task = next(left, None)
                if task is None:
                    return
                group = self.process + self.num_processes * len(played)
                start = EpisodeStart(agent, task)
                patience.launched(config.group_size)
                for member in range(config.group_size):
                    rollout = Rollout(f"{self.step}/{group}.{member}", task.id, group)
                    pool.submit(functools.partial(play_unless_hopeless, start, rollout))
                played.append(task)
                used.append(0)
                running.append(config.group_size)

        def finished(trajectory: Trajectory) -> None:
            nonlocal failed, well
            if self.on_finished is not None:
                self.on_finished(trajectory)
            failed += trajectory.end == "failed"
            well += trajectory.end != "failed"
            # A dead engine fails for free: without a price it would be given every task there is.
            price = cost if trajectory.end == "failed" else 0
            group = (trajectory.group_id - self.process) // self.num_processes
            used[group] += max(trajectory.num_tokens, price)
            running[group] -= 1
            launch()
            patience.ended(trajectory)

        clock = Stopwatch()
        with clock.phase("rollout"):
            pool = Pool(self.slots or Slots(config.concurrency), finished, step=self.step)
            launch()
            if not played:
                raise ValueError("a step was given no tasks; pass at least one")
            trajectories = tuple(await pool.join())
        return BaseRollouts(
            trajectories,
            tuple(played),
            account,
            clock.seconds["rollout"],
            tool_s=self.tool_use.seconds,
        )

    async def branch(
        self, base: BaseRollouts, scorer: Scorer | None = None, *, waited_s: float | None = None
    ) -> Collected:
        """Spends what the base rollouts have left where it teaches most.

        A rollout that the screen refuses is paid for and left out: it is not branched, and as a
        branch it is no evidence.

        Args:
          base: the step's base rollouts.
          scorer: the critic's forward pass; called once, in a thread, so that other steps'
            rollouts go on meanwhile. Not needed without branches.
          waited_s: seconds that were waited for `base`, where it was played meanwhile.

        Returns:
          `Collected`.

        Raises:
          ValueError: branches without a scorer or in an environment that cannot branch.
        """
        self.check(scorer)
        clock = Stopwatch()
        clock.seconds["rollout"] = waited_s = base.seconds if waited_s is None else waited_s
        kept_base = tuple(t for t in base.trajectories if self.screen(t) is None)
        branched = _Branched()
        if self.config.rule != NO_BRANCHES and kept_base:
            with clock.phase("score"):
                scores = await asyncio.to_thread(scorer, kept_base)
            branched = await _branch(self, base.account, kept_base, scores, clock)
        branches = tuple(branch for branch in branched.branches if branch.segments)
        kept = tuple(branch for branch in branches if self.screen(branch) is None)
        everything = (*base.trajectories, *branched.branches)
        # Base rollouts that were played while the learner worked count as far as it had to wait.
        waited_share = waited_s / max(base.seconds, waited_s, 1e-9)
        tool_s = self.tool_use.seconds - (1 - waited_share) * base.tool_s
        clock.seconds["tools"] = min(tool_s, clock.seconds["rollout"])
        clock.seconds["rollout"] -= clock.seconds["tools"]
        dropped = tuple(t for t in everything if t.segments and self.screen(t) is not None)
        return Collected(
            tree=RolloutTree(kept_base, kept),
            ledger=ledger_of(base.trajectories, branches, clock.seconds, dropped=dropped),
            beliefs=branched.beliefs,
            plans=branched.plans,
            branch_stats=branched.stats,
            episode_cost=self.episode_cost.updated(base.trajectories),
            tasks=base.tasks,
            technical_failures=sum(t.end == "failed" for t in everything),
            tool_use=self.tool_use,
            recomputed_share=recomputed_share(kept),
            dropped=dropped,
        )


@dataclasses.dataclass(frozen=True)
class _Branched:
    """What the rounds brought; nothing, without branches."""

    beliefs: StateBeliefs | None = None
    plans: tuple[Plan, ...] = ()
    branches: tuple[Trajectory, ...] = ()
    stats: tuple[BranchedState, ...] = ()


async def _branch(
    step: StepPlay,
    account: TokenAccount,
    base: Sequence[Trajectory],
    scores: StateBelief,
    clock: Stopwatch,
) -> _Branched:
    """Plans, branches and updates the belief, round after round."""
    config, agent = step.config, step.agent
    with clock.phase("controller"):
        beliefs = make_beliefs(
            base,
            scores,
            env_branchable=agent.env.branchable,
            max_context=agent.engine.info().max_context,
            smallest_bucket=config.state_bucket,
            rollouts=config.group_size,
            states=config.max_states,
            weight=config.weight,
            siblings=config.siblings,
        )
        started = np.zeros_like(beliefs.branch_count)
        gains = np.zeros(beliefs.branch_count.shape)
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
                seed=request_seed(agent.run_seed, f"{step.step}/plan", round_),
                value_range=config.value_range,
            )
            gains += beliefs.predicted_gains(plan, config.value_range)
            new_rows = np.repeat(np.arange(plan.count.size), plan.count).tolist()
        with clock.phase("rollout"):
            new = await _play_round(step, account, base, beliefs, new_rows, started)
        with clock.phase("controller"):
            outcomes = [None if step.screen(branch) else branch.outcome for branch in new]
            beliefs = beliefs.observe(new_rows, outcomes)
        started = started + plan.count
        plans.append(plan)
        rows += new_rows
        branches += new
    with clock.phase("controller"):
        stats = _branch_stats(step, base, beliefs, rows, branches, gains)
    return _Branched(beliefs, tuple(plans), tuple(branches), stats)


async def _play_round(
    step: StepPlay,
    account: TokenAccount,
    base: Sequence[Trajectory],
    beliefs: StateBeliefs,
    rows: Sequence[int],
    started: np.ndarray,
) -> list[Trajectory]:
    """Continues from the state of each row; a row that occurs k times is continued k times."""
    patience = Patience(step.config.proceed_fraction)
    patience.launched(len(rows))
    agent = dataclasses.replace(step.agent, patience=patience, tool_use=step.tool_use)

    def finished(trajectory: Trajectory) -> None:
        if step.on_finished is not None:
            step.on_finished(trajectory)
        patience.ended(trajectory)

    pool = Pool(step.slots or Slots(step.config.concurrency), finished, step=step.step)
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


def _branch_stats(
    step: StepPlay,
    base: Sequence[Trajectory],
    beliefs: StateBeliefs,
    rows: Sequence[int],
    branches: Sequence[Trajectory],
    gains: np.ndarray,
) -> tuple[BranchedState, ...]:
    refined, variance = beliefs.refine(step.config.refine)
    prior_variance, noise_var = beliefs.prior()
    of_row: dict[int, list[Trajectory]] = {}
    for row, branch in zip(rows, branches, strict=True):
        of_row.setdefault(row, []).append(branch)
    stats = []
    for row, members in sorted(of_row.items()):
        trajectory_index, state_index = (int(i) for i in beliefs.index[row])
        scored = [b for b in members if b.outcome is not None and not step.screen(b)]
        parent = base[trajectory_index]
        stats.append(
            BranchedState(
                trajectory=parent.id,
                task_id=parent.task_id,
                state=state_index,
                turn=parent.states[state_index].turn,
                value=float(beliefs.mean[row]),
                std=float(np.sqrt(prior_variance[row])),
                refined=float(np.clip(refined[row], *step.config.value_range)),
                refined_std=float(np.sqrt(variance[row])),
                started=len(members),
                count=len(scored),
                mean=float(np.mean([b.outcome for b in scored])) if scored else None,
                cost_predicted=float(beliefs.cost[row]),
                cost_actual=float(np.mean([b.num_tokens for b in scored])) if scored else None,
                noise_var=float(noise_var[row]),
                gain=float(gains[row]),
                shift=float(refined[row] - beliefs.mean[row]),
                outcomes=tuple(float(b.outcome) for b in scored),
            )
        )
    return tuple(stats)
