"""What rollouts have cost: tokens by purpose, read off their records, and wall time by phase."""

from __future__ import annotations

import collections
import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence

from focus.branching.budget import Ledger
from focus.types import Generation, Trajectory


def ledger_of(
    base: Sequence[Trajectory],
    branches: Sequence[Trajectory],
    seconds: dict[str, float],
    *,
    dropped: Sequence[Trajectory] = (),
) -> Ledger:
    """The ledger of rollouts, read off their tokens: see `focus.branching.Ledger`.

    What stands between an output and the next prompt of its span is observation: the tool's
    answer with its markers, and the request for a summary. A request that was aborted and
    resumed counts its prompt once. `dropped` are those of them whose tokens no tree keeps.
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
    return Ledger(**columns, discarded=sum(t.num_tokens for t in dropped), seconds=seconds)


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


def recomputed_share(branches: Sequence[Trajectory]) -> float:
    """sum(prompt - 1 - cached) / sum(prompt - 1) over the first requests of branches.

    Minus one because the last prompt token must be computed to sample at all.
    """
    first = [branch.segments[0].generations[0] for branch in branches]
    shared = sum(len(g.prompt_ids) - 1 for g in first)
    recomputed = shared - sum(g.cached_tokens for g in first)
    return recomputed / shared if shared else 0.0


def reuse_by_kind(
    base: Sequence[Trajectory], branches: Sequence[Trajectory]
) -> collections.Counter[str]:
    """Prompt tokens, and how many of them the engine had already, by kind of request.

    A "start" is the first request of a base rollout, a "branch" that of a branch, a "turn" any
    later one. The last token of a prompt is left out: it must be computed to sample at all.

    Returns:
      Counts "<kind>/prompt" and "<kind>/cached"; those of several processes add.
    """
    counts: collections.Counter[str] = collections.Counter()
    for first, trajectories in (("start", base), ("branch", branches)):
        for trajectory in trajectories:
            generations = (g for segment in trajectory.segments for g in segment.generations)
            for kind, g in zip(itertools.chain([first], itertools.repeat("turn")), generations):
                counts[f"{kind}/prompt"] += len(g.prompt_ids) - 1
                counts[f"{kind}/cached"] += min(g.cached_tokens, len(g.prompt_ids) - 1)
    return counts


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
