"""Rollouts: the agent loop, and the controller that spends a step's tokens."""

from focus.rollout.accounting import Stopwatch, ledger_of
from focus.rollout.agent import Agent, EpisodeStart, Rollout, play, request_seed
from focus.rollout.ahead import RolloutsAhead
from focus.rollout.belief import StateBeliefs, make_beliefs, uninformed_scores
from focus.rollout.controller import (
    BaseRollouts,
    BranchedState,
    Collected,
    StepPlay,
    collect,
)
from focus.rollout.pool import (
    Patience,
    Pool,
    RetryPolicy,
    Slots,
    TokenAccount,
    UnlimitedAccount,
    generate_with_retries,
)
from focus.rollout.staleness import Freshness, Versions
from focus.rollout.step import EpisodeCost, StepConfig, validate_step
from focus.rollout.tally import AllRolloutsFailed, Tally
from focus.rollout.tools import ToolError, ToolLimits, Tools, ToolUse

__all__ = [
    "Agent",
    "AllRolloutsFailed",
    "BaseRollouts",
    "BranchedState",
    "Collected",
    "EpisodeCost",
    "Freshness",
    "Patience",
    "Pool",
    "RetryPolicy",
    "Rollout",
    "RolloutsAhead",
    "Slots",
    "EpisodeStart",
    "StateBeliefs",
    "StepConfig",
    "StepPlay",
    "Stopwatch",
    "Tally",
    "TokenAccount",
    "ToolError",
    "ToolLimits",
    "ToolUse",
    "Tools",
    "UnlimitedAccount",
    "Versions",
    "collect",
    "generate_with_retries",
    "ledger_of",
    "make_beliefs",
    "play",
    "request_seed",
    "uninformed_scores",
    "validate_step",
]
