"""What Self-Credit reads of a step: who cites which turn, and which turns did the same thing.

Environments say what a turn did by the facts "documents" (ids that a search listed) and "opened"
(id of a page) of `Segment.info`. Two turns of one task match if both searched and their documents
have a Jaccard index of at least `MIN_JACCARD`, or if both opened the same page. That relation is
not transitive; classes are its connected components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from focus.types import Trajectory

MIN_JACCARD = 0.6


def citation_channels(
    trajectories: Sequence[Trajectory], shape: tuple[int, int], num_tokens: int
) -> dict[str, np.ndarray]:
    """Channels of a `CreditBatch`.

    A branch may cite turns that its parent took; those are no segments of its own.

    Args:
      trajectories: rows, in order.
      shape: B, S of the batch.
      num_tokens: L of the batch.

    Returns:
      `cited` [B, S] bool; `match_class` [B, S] int32, -1 where nothing can match; `summary_mask`
      [B, L] bool.
    """
    cited = np.zeros(shape, bool)
    summary_mask = np.zeros((shape[0], num_tokens), bool)
    for b, trajectory in enumerate(trajectories):
        segments, first = trajectory.segments, trajectory.states[0].turn
        turns = {turn for segment in segments for turn in segment.cites or ()}
        for turn in turns:
            if first <= turn < first + len(segments):
                cited[b, turn - first] = True
        kinds = [g.kind == "summary" for s in segments for g in s.generations for _ in g.output_ids]
        summary_mask[b, : len(kinds)] = kinds
    return {
        "cited": cited,
        "match_class": match_classes(trajectories, shape),
        "summary_mask": summary_mask,
    }


def match_classes(trajectories: Sequence[Trajectory], shape: tuple[int, int]) -> np.ndarray:
    """[B, S] int32 ids of classes, compact within the batch; -1 for turns that match nothing.

    Args:
      trajectories: rows, in order.
      shape: B, S of the batch.
    """
    classes = np.full(shape, -1, np.int32)
    of_group: dict[int, list[tuple[int, int, Mapping[str, Any]]]] = {}
    for b, trajectory in enumerate(trajectories):
        places = of_group.setdefault(trajectory.group_id, [])
        places += [(b, j, segment.info) for j, segment in enumerate(trajectory.segments)]
    known = 0
    for places in of_group.values():
        for kind in ("documents", "opened"):
            found = [place for place in places if place[2].get(kind)]
            if not found:
                continue
            rows, columns, infos = zip(*found)
            labels = _components(_matches(infos, kind))
            classes[list(rows), list(columns)] = known + labels
            known += int(labels.max()) + 1
    return classes


def _matches(infos: Sequence[Mapping[str, Any]], kind: str) -> np.ndarray:
    """[N, N] bool: pairs that did the same thing. A turn matches itself."""
    if kind == "opened":
        _, page = np.unique([str(info["opened"]) for info in infos], return_inverse=True)
        return page[:, None] == page[None, :]
    documents = {d: i for i, d in enumerate(sorted({d for i in infos for d in i["documents"]}))}
    listed = np.zeros((len(infos), len(documents)))
    for n, info in enumerate(infos):
        listed[n, [documents[d] for d in info["documents"]]] = 1
    common, size = listed @ listed.T, listed.sum(1)
    return common >= MIN_JACCARD * (size[:, None] + size[None, :] - common)


def _components(matches: np.ndarray) -> np.ndarray:
    """[N] int: connected components of a symmetric relation that holds on the diagonal."""
    labels = np.arange(len(matches))
    while True:
        least = np.where(matches, labels[None, :], len(labels)).min(1)
        if (least == labels).all():
            return np.unique(labels, return_inverse=True)[1]
        labels = least
