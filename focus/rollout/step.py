"""What a step may spend, and what one episode is expected to cost. Checked before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from focus.branching.acquisition import RULES
from focus.credit.refine import REFINE_MODES, RefineMode
from focus.credit.registry import ESTIMATORS
from focus.types import Trajectory

NO_BRANCHES = "none"


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """How a step spends its tokens.

    Attributes:
      budget: tokens that the policy may generate in one step.
      group_size: base rollouts per task.
      base_fraction: share of the budget that base rollouts are launched for; 1 = no branches.
      rule: key of `focus.branching.RULES`, or "none".
      rounds: how often to plan. Round r of R plans with what is left / (R - r).
      ks: numbers of continuations that one pick may add.
      max_per_state: most continuations of one state; None for no limit.
      max_picks: most picks of one round.
      refine: how branch statistics fuse critic and branches.
      value_range: range of outcomes.
      concurrency: most episodes that are played at once.
      cost_margin: factor on the predicted cost of a group before it is launched. Above 1,
        because a prediction that is too low cuts rollouts short and one that is too high only
        launches the last groups a little later.
      state_bucket: states are padded to about this times a power of two.
      max_states: most states of a rollout; None for as many as there are, which compiles again
        whenever that changes.
      weight: how much an error at a state matters, see `belief.make_beliefs`.
      siblings: whether rollouts of one task are evidence about each other's values.
      proceed_fraction: once this share of the rollouts has ended well, those whose engine has
        failed are given up; None: they have all their attempts.
    """

    budget: int
    group_size: int = 1
    base_fraction: float = 1.0
    rule: str = NO_BRANCHES
    rounds: int = 2
    ks: tuple[int, ...] = (1, 2, 4, 8)
    max_per_state: int | None = None
    max_picks: int = 256
    refine: RefineMode = "joint"
    value_range: tuple[float, float] = (0.0, 1.0)
    concurrency: int = 64
    cost_margin: float = 1.1
    state_bucket: int = 256
    max_states: int | None = None
    weight: Literal["score_norm", "tokens"] = "tokens"
    siblings: bool = False
    proceed_fraction: float | None = None

    def __post_init__(self):
        positive = ("budget", "group_size", "rounds", "max_picks", "concurrency", "state_bucket")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.base_fraction <= 1:
            raise ValueError(
                f"base_fraction must be in (0, 1], got {self.base_fraction}; branches leave base "
                "rollouts, so there must be some"
            )
        if self.cost_margin < 1:
            raise ValueError(f"cost_margin must be >= 1, got {self.cost_margin}")
        if self.rule != NO_BRANCHES and self.rule not in RULES:
            raise ValueError(
                f"acquisition rule {self.rule!r} is unknown; choose one of "
                f"{[NO_BRANCHES, *sorted(RULES)]}"
            )
        if (self.rule == NO_BRANCHES) != (self.base_fraction == 1):
            raise ValueError(
                f"rule {self.rule!r} does not go with base_fraction {self.base_fraction}: without "
                "branches use rule 'none' and base_fraction 1, with branches a rule of "
                f"{sorted(RULES)} and base_fraction < 1"
            )
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"ks must hold at least one number, all >= 1, got {self.ks}")
        if self.max_per_state is not None and self.max_per_state < min(self.ks):
            raise ValueError(
                f"max_per_state {self.max_per_state} is below the smallest of ks {self.ks}, so "
                "no state could be branched; raise it or use None"
            )
        if self.weight not in ("score_norm", "tokens"):
            raise ValueError(f"weight must be 'score_norm' or 'tokens', got {self.weight!r}")
        if self.refine not in REFINE_MODES:
            raise ValueError(f"refine {self.refine!r} is unknown; choose one of {REFINE_MODES}")


@dataclasses.dataclass(frozen=True)
class EpisodeCost:
    """Running mean of the tokens that one base episode generates.

    Attributes:
      tokens: the mean; what the configuration expects before the first step.
      weight: episodes that it stands for.
    """

    tokens: float
    weight: float = 1.0

    def __post_init__(self):
        if not (self.tokens > 0 and self.weight > 0):
            raise ValueError(
                f"an episode's cost must be > 0 tokens with weight > 0, got {self.tokens} with "
                f"{self.weight}"
            )

    def updated(self, trajectories: Sequence[Trajectory], *, memory: float = 0.8) -> EpisodeCost:
        """Adds a step's base rollouts.

        One that the budget cut has told a lower bound only. It counts double (this project's
        rule), so that a prediction far too low, under which none ends, corrects itself.

        Args:
          trajectories: base rollouts; technical failures are left out.
          memory: factor on the old weight, because the policy moves.
        """
        costs = [
            trajectory.num_tokens * (2 if trajectory.end == "budget" else 1)
            for trajectory in trajectories
            if trajectory.end != "failed"
        ]
        old = memory * self.weight
        weight = old + len(costs)
        tokens = (old * self.tokens + sum(costs)) / weight
        return EpisodeCost(max(tokens, 1.0), weight)


def validate_step(config: StepConfig, *, estimator: str, episode_tokens: float) -> None:
    """Checks what only shows when budget, estimator and task come together. Call at start.

    Args:
      config: of the step.
      estimator: key of `focus.credit.ESTIMATORS`.
      episode_tokens: predicted cost of one episode.

    Raises:
      ValueError: unknown estimator; groups too small for it; continuations that it needs and no
        rule makes; a budget below one predicted episode.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator {estimator!r} is unknown; choose one of {sorted(ESTIMATORS)}")
    spec = ESTIMATORS[estimator]
    if config.group_size < spec.min_group_size:
        raise ValueError(
            f"estimator {estimator!r} compares rollouts of one task: group_size "
            f"{config.group_size} gives it nothing to compare; use at least {spec.min_group_size}"
        )
    if "mc_return" in spec.inputs and config.rule == NO_BRANCHES:
        raise ValueError(
            f"estimator {estimator!r} needs continuations, but rule is 'none'; set a rule of "
            f"{sorted(RULES)} and base_fraction < 1"
        )
    if config.budget < episode_tokens:
        raise ValueError(
            f"a budget of {config.budget} tokens is smaller than one predicted episode of "
            f"{episode_tokens:.0f}; raise the budget or shorten episodes (turns, tokens per turn)"
        )
