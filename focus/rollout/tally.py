"""What a step's rollouts come to, small enough to be sent around and added up."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from focus.branching.budget import Ledger
from focus.engine.protocol import EngineError
from focus.rollout.accounting import reuse_by_kind
from focus.rollout.controller import BranchedState, Collected
from focus.rollout.staleness import Freshness, Versions
from focus.types import Trajectory


class AllRolloutsFailed(EngineError):
    """Nothing comes back any more, though every request and call was tried again.

    Args:
      what: which rollouts failed.
      errors: why, in their order; the first is said.
    """

    def __init__(self, what: str, errors: Iterable[str | None] = ()):
        first = next((error for error in errors if error), None)
        super().__init__(what if first is None else f"{what}; the first: {first}")


@dataclasses.dataclass(frozen=True)
class Episode:
    """A base rollout without its tokens.

    Attributes:
      outcome: None if it has none.
      success: whether the task was solved.
      end: see `Trajectory`.
      num_tokens: tokens that the policy generated.
      num_segments: turns.
      error: what failed, see `Trajectory`.
    """

    outcome: float | None
    success: bool
    end: str
    num_tokens: int
    num_segments: int
    error: str | None = None

    @classmethod
    def of(cls, trajectory: Trajectory) -> Episode:
        """That of a trajectory."""
        return cls(
            trajectory.outcome,
            trajectory.success,
            trajectory.end,
            trajectory.num_tokens,
            len(trajectory.segments),
            trajectory.error,
        )


@dataclasses.dataclass(frozen=True)
class Tally:
    """Totals of a step; those of several processes add.

    Attributes:
      ledger: tokens by purpose, no seconds.
      base: the base rollouts.
      branches: number of branches.
      cut: rollouts that the budget ended.
      num_tasks: tasks that were played.
      technical_failures: see `Collected`.
      tool_calls: calls of the environment.
      tool_faults: those of them that failed, whether or not they were tried again.
      branch_stats: one entry per branched state.
      citations_asked: summaries that had to cite turns and were not cut.
      citations_valid: those of them that did.
      recomputed_shares: see `Collected`; one entry per process that branched.
      reuse: see `reuse_by_kind`.
      versions: whose weights the tokens came from.
    """

    ledger: Ledger
    base: tuple[Episode, ...]
    branches: int
    cut: int
    num_tasks: int
    technical_failures: int
    tool_calls: int
    tool_faults: int
    branch_stats: tuple[BranchedState, ...]
    citations_asked: int
    citations_valid: int
    recomputed_shares: tuple[float, ...]
    reuse: collections.Counter[str]
    versions: Versions

    @classmethod
    def of(cls, collected: Collected, screen: Freshness) -> Tally:
        """That of one process's rollouts, which `screen` has screened."""
        tree = collected.tree
        cites = [s.cites for t in tree.trajectories for s in t.segments if s.cites is not None]
        return cls(
            ledger=dataclasses.replace(collected.ledger, seconds={}),
            base=tuple(map(Episode.of, tree.base)),
            branches=len(tree.branches),
            cut=sum(t.end == "budget" for t in tree.trajectories),
            num_tasks=collected.num_tasks,
            technical_failures=collected.technical_failures,
            tool_calls=collected.tool_use.calls,
            tool_faults=collected.tool_use.faults,
            branch_stats=collected.branch_stats,
            citations_asked=len(cites),
            citations_valid=sum(map(bool, cites)),
            recomputed_shares=(collected.recomputed_share,) if tree.branches else (),
            reuse=reuse_by_kind(tree.base, tree.branches),
            versions=Versions.of(tree.trajectories, collected.dropped, screen),
        )

    def __add__(self, other: Tally) -> Tally:
        names = (field.name for field in dataclasses.fields(self))
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def all_failed(self) -> bool:
        """Whether not one base rollout came back."""
        return bool(self.base) and all(episode.end == "failed" for episode in self.base)

    @property
    def valid_citations(self) -> float | None:
        """Share of the summaries that had to cite turns and did; None if none had to."""
        return self.citations_valid / self.citations_asked if self.citations_asked else None

    @property
    def cached_shares(self) -> dict[str, float]:
        """Share of the prompts' tokens that was reused, by kind of request that there was."""
        counted = (name for name, count in self.reuse.items() if count)
        kinds = (name.removesuffix("/prompt") for name in counted if name.endswith("/prompt"))
        return {kind: self.reuse[f"{kind}/cached"] / self.reuse[f"{kind}/prompt"] for kind in kinds}

    @property
    def recomputed_share(self) -> float:
        """Mean over processes; 0 without branches."""
        return sum(self.recomputed_shares) / max(len(self.recomputed_shares), 1)
