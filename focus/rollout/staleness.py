"""Which rollouts are fresh enough to be trained on, and what the others have cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from focus.types import Trajectory, version_step

MIXED_VERSIONS = ("keep", "drop")


@dataclasses.dataclass(frozen=True)
class Freshness:
    """A `Screen` of the controller: what a step is not trained on.

    A rollout during which the weights changed is *mixed*: its tokens know their own versions, so
    it can be trained on. Dropping such rollouts drops long ones first.

    Attributes:
      step: the step that trains: its weights are those after `step` steps.
      max_lag: most training steps that the weights of a token may be behind.
      mixed: whether mixed rollouts are kept or dropped.
    """

    step: int
    max_lag: int = 0
    mixed: str = "keep"

    def __post_init__(self):
        if self.mixed not in MIXED_VERSIONS:
            raise ValueError(
                f"rollout.mixed_versions must be one of {', '.join(MIXED_VERSIONS)}; got "
                f"{self.mixed!r}"
            )

    def __call__(self, trajectory: Trajectory) -> str | None:
        """Why it is dropped: "stale" or "mixed"; None if it is kept."""
        spans = trajectory.weight_versions
        if any(self.step - version_step(version) > self.max_lag for version, _, _ in spans):
            return "stale"
        if self.mixed == "drop" and len({version for version, _, _ in spans}) > 1:
            return "mixed"
        return None


@dataclasses.dataclass(frozen=True)
class Versions:
    """Whose weights a step's tokens came from; those of several processes add.

    Attributes:
      tokens: tokens of the tree by training steps that their weights are behind.
      mixed: rollouts of the tree during which the weights changed.
      dropped: rollouts that are not in the tree, by reason.
      dropped_tokens: their tokens.
    """

    tokens: dict[int, int]
    mixed: int
    dropped: dict[str, int]
    dropped_tokens: int

    @classmethod
    def of(
        cls, kept: Sequence[Trajectory], dropped: Sequence[Trajectory], screen: Freshness
    ) -> Versions:
        """Those of the rollouts of a step.

        Args:
          kept: rollouts of the tree.
          dropped: those that `screen` has refused.
          screen: of the step.
        """
        tokens: dict[int, int] = {}
        for trajectory in kept:
            for version, start, end in trajectory.weight_versions:
                lag = screen.step - version_step(version)
                tokens[lag] = tokens.get(lag, 0) + end - start
        reasons = [screen(trajectory) for trajectory in dropped]
        return cls(
            tokens=tokens,
            mixed=sum(len({v for v, _, _ in t.weight_versions}) > 1 for t in kept),
            dropped={reason: reasons.count(reason) for reason in set(reasons)},
            dropped_tokens=sum(t.num_tokens for t in dropped),
        )

    def __add__(self, other: Versions) -> Versions:
        return Versions(
            _sum(self.tokens, other.tokens),
            self.mixed + other.mixed,
            _sum(self.dropped, other.dropped),
            self.dropped_tokens + other.dropped_tokens,
        )

    def to_dict(self) -> dict[str, float]:
        """Flat metrics; a mean lag of 0 where there is no token."""
        count = sum(self.tokens.values())
        return {
            "staleness/mean": sum(lag * n for lag, n in self.tokens.items()) / max(count, 1),
            "staleness/max": max(self.tokens, default=0),
            "staleness/mixed": self.mixed,
            "staleness/dropped_stale": self.dropped.get("stale", 0),
            "staleness/dropped_mixed": self.dropped.get("mixed", 0),
            "staleness/dropped_tokens": self.dropped_tokens,
        }


def _sum(one: dict, other: dict) -> dict:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}
