"""Optional channels of the credit batch that a run fills from its own rollouts.

`read_channels` says what an estimator reads of a run's batches, before anything is played, or
that the run does not produce it; `fill` makes just that. What needs a teacher, a judge, a reward
model or a store over steps is not made here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from focus.credit import ESTIMATORS, estimate
from focus.credit.channels import CHANNEL_PRODUCERS
from focus.learner.citations import citation_channels
from focus.learner.packing import PackedRows
from focus.learner.scoring import Scores
from focus.types import CreditBatch, PolicySignals, Trajectory

# Parts of a run that not every run has.
Part = Literal["critic", "branches", "citations"]

EMBEDDING_SIZE = 512
# Actions are compared by their first word, first two, first three, and as a whole.
CLUSTER_SCOPES = (1, 2, 3, None)


@dataclasses.dataclass(frozen=True)
class Source:
    """What the channels of a step are made from.

    Attributes:
      trajectories: base rollouts, then branches: the first rows of `batch`.
      batch: the core channels, and continuations where there are any; NumPy.
      state_key: what identifies an environment state among those of its task.
      packed: the rows that `entropy` and `ref_logp` are laid out on.
      entropy: [R, L] of the distribution that each token was drawn from, nats.
      ref_logp: function that scores the rows with the reference parameters, [R, L].
      progress: share of training done.
    """

    trajectories: Sequence[Trajectory]
    batch: CreditBatch
    state_key: Callable[[Any], Any]
    packed: PackedRows
    entropy: np.ndarray
    ref_logp: Callable[[], np.ndarray]
    progress: float


def _keys(source: Source, keys_of: Callable[[Trajectory], Sequence[Any]]) -> np.ndarray:
    """[B, S] ids of what `keys_of` says about the segments of a trajectory, dense in the batch."""
    ids, out = {}, np.full(source.batch.segment_mask.shape, -1, np.int32)
    for b, trajectory in enumerate(source.trajectories):
        keys = [(trajectory.group_id, key) for key in keys_of(trajectory)]
        out[b, : len(keys)] = [ids.setdefault(key, len(ids)) for key in keys]
    return out


def _states(source: Source) -> dict[str, np.ndarray]:
    """A state before and after a segment; the one after the end is a state like any other."""
    ids, shape = {}, source.batch.segment_mask.shape
    out = np.full((shape[0], shape[1] + 1), -1, np.int32)
    for b, trajectory in enumerate(source.trajectories):
        for j, state in enumerate(trajectory.states):
            key = trajectory.group_id, source.state_key(state.env)
            out[b, j] = ids.setdefault(key, len(ids))
    following = np.where(source.batch.segment_mask, out[:, 1:], -1)
    return {
        "state_key": np.where(source.batch.segment_mask, out[:, :-1], -1),
        "next_state_key": following,
    }


def _actions(source: Source) -> dict[str, np.ndarray]:
    def first_words(trajectory, count):
        return [tuple(s.text.split()[:count]) for s in trajectory.segments]

    clusters = [
        _keys(source, functools.partial(first_words, count=count)) for count in CLUSTER_SCOPES
    ]
    return {"action_key": clusters[-1], "cluster": np.stack(clusters, axis=2)}


def _kinds(source: Source) -> dict[str, np.ndarray]:
    names = ("valid", "is_call", "is_answer", "is_summary")
    out = {name: np.zeros(source.batch.segment_mask.shape, bool) for name in names}
    for b, trajectory in enumerate(source.trajectories):
        for j, segment in enumerate(trajectory.segments):
            tool = segment.info.get("tool")
            out["valid"][b, j] = tool is not None and not segment.info.get("error")
            out["is_answer"][b, j] = tool == "answer"
            out["is_call"][b, j] = tool not in (None, "answer")
            out["is_summary"][b, j] = any(g.kind == "summary" for g in segment.generations)
    return out


def _prefixes(source: Source) -> dict[str, np.ndarray]:
    """Ids of all that a token was conditioned on; a branch goes on from its parent's."""
    rows, tokens = source.batch.token_mask.shape
    out = np.full((rows, tokens + 1), -1, np.int32)
    nodes: dict[Any, int] = {}
    at_state: dict[tuple[str, int], int] = {}

    def child(node, edge):
        return nodes.setdefault((node, edge), len(nodes))

    for b, trajectory in enumerate(source.trajectories):
        place, node = 0, at_state.get((trajectory.parent, trajectory.parent_state))
        if node is None:
            node = child(-1, ("group", trajectory.group_id))
        at_state[trajectory.id, 0] = node
        for j, segment in enumerate(trajectory.segments):
            for generation in segment.generations:
                node = child(node, ("prompt", generation.prompt_ids))
                for token in generation.output_ids:
                    out[b, place] = node
                    place, node = place + 1, child(node, token)
            at_state[trajectory.id, j + 1] = node
        out[b, place] = node
    return {"prefix_key": out}


def _embeddings(source: Source) -> dict[str, np.ndarray]:
    """TF-IDF over the tokens of what the policy read, hashed to `EMBEDDING_SIZE` columns."""
    rows, segments = source.batch.segment_mask.shape
    counts = np.zeros((rows, segments, EMBEDDING_SIZE), np.float32)
    for b, trajectory in enumerate(source.trajectories):
        for j in range(len(trajectory.segments)):
            ids = np.asarray(trajectory.states[j].prompt_ids, np.int64)
            np.add.at(counts[b, j], ids % EMBEDDING_SIZE, 1.0)
    documents = max(int(source.batch.segment_mask.sum()), 1)
    seen = (counts > 0).sum(axis=(0, 1))
    return {"emb": counts * np.log((1 + documents) / (1 + seen)).astype(np.float32)}


def _scores(source: Source) -> dict[str, np.ndarray]:
    mask, segment = source.batch.token_mask, source.batch.token_segment
    entropy = source.packed.to_trajectories(source.entropy, mask.shape)
    total = np.zeros(source.batch.segment_mask.shape, np.float32)
    count = np.zeros_like(total)
    row, place = np.nonzero(mask & (segment >= 0))
    np.add.at(total, (row, segment[row, place]), entropy[row, place])
    np.add.at(count, (row, segment[row, place]), 1.0)
    return {"entropy": entropy, "segment_entropy": total / np.maximum(count, 1)}


def _reference(source: Source) -> dict[str, np.ndarray]:
    logp = source.packed.to_trajectories(source.ref_logp(), source.batch.token_mask.shape)
    return {"ref_logp": logp}


def _trees(source: Source) -> dict[str, np.ndarray]:
    """A tree a task: the root, one node a segment, and a leaf of its own for every row.

    A branch hangs from the node that led to the state it left. Where a tree goes on below the
    segment that ends a row, the leaf keeps the row's outcome apart from the others'.
    """
    rows, width = source.batch.segment_mask.shape
    size = rows * (width + 2)
    parent, leaf, tree = (np.full(size, -1, np.int32) for _ in range(3))
    entropy = np.zeros(size, np.float32)
    node_of_segment = np.full((rows, width), -1, np.int32)
    segment_entropy = _scores(source)["segment_entropy"]
    count, roots = 0, {}
    at_state: dict[tuple[str, int], int] = {}

    def add(above, group):
        nonlocal count
        parent[count], tree[count] = above, group
        count += 1
        return count - 1

    for b, trajectory in enumerate(source.trajectories):
        group = trajectory.group_id
        if group not in roots:
            roots[group] = add(-1, group)
        node = at_state.get((trajectory.parent, trajectory.parent_state), roots[group])
        at_state[trajectory.id, 0] = node
        for j in range(len(trajectory.segments)):
            node = node_of_segment[b, j] = add(node, group)
            entropy[node] = segment_entropy[b, j]
            at_state[trajectory.id, j + 1] = node
        leaf[add(node, group)] = b
    return {
        "parent": parent,
        "leaf_traj": leaf,
        "tree_id": tree,
        "node_entropy": entropy,
        "node_of_segment": node_of_segment,
    }


def _forks(source: Source) -> dict[str, np.ndarray]:
    """The row that a branch left, and the segment of that row that it replaces."""
    parent = np.full(source.batch.group_id.shape, -1, np.int32)
    segment = np.full_like(parent, -1)
    row_of = {trajectory.id: b for b, trajectory in enumerate(source.trajectories)}
    for b, trajectory in enumerate(source.trajectories):
        if trajectory.parent in row_of:
            parent[b], segment[b] = row_of[trajectory.parent], trajectory.parent_state
    return {"parent_traj": parent, "fork_segment": segment}


def _cuts(source: Source) -> dict[str, np.ndarray]:
    """Cut points at the states between segments, valued by the continuations from there."""
    batch = source.batch
    first = np.zeros(batch.segment_mask.shape, np.int32)
    for b, trajectory in enumerate(source.trajectories):
        lengths = [segment.num_tokens for segment in trajectory.segments]
        first[b, : len(lengths)] = np.cumsum(lengths) - lengths
    known = batch.segment_mask & batch.mc_mask.any(axis=2)
    total = np.where(batch.mc_mask, batch.mc_return, 0.0).sum(axis=2)
    return {
        "cut": first,
        "cut_value": (total / np.maximum(batch.mc_mask.sum(axis=2), 1)).astype(np.float32),
        "cut_mask": known,
    }


def _progress(source: Source) -> dict[str, np.ndarray]:
    return {"progress": np.float32(source.progress)}


def _citations(source: Source) -> dict[str, np.ndarray]:
    batch = source.batch
    shape, tokens = batch.segment_mask.shape, batch.token_mask.shape[1]
    return citation_channels(source.trajectories, shape, tokens)


# What APPO discounts future log-ratios by, per token; and what SPO calls a sure token.
LOG_RATIO_DISCOUNT = 0.99
SURE_PROBABILITY = 0.9


def policy_signals(
    trajectories: Sequence[Trajectory],
    packed: PackedRows,
    scores: Scores,
    shape: tuple[int, int],
) -> PolicySignals:
    """What the scoring pass says of segments, for acquisition rules.

    Args:
      trajectories: the packed ones, in order.
      packed: their rows.
      scores: the policy's of these rows.
      shape: (B, N) of the result.
    """
    names = ("logp", "entropy", "score_norm")
    logp, entropy, norm = (packed.to_trajectories(getattr(scores, name)) for name in names)
    out = PolicySignals(*[np.zeros(shape, np.float32) for _ in dataclasses.fields(PolicySignals)])
    for b, trajectory in enumerate(trajectories):
        generations = [g for segment in trajectory.segments for g in segment.generations]
        behaviour = np.array([x for g in generations for x in g.logp], np.float32)
        difference = logp[b, : behaviour.size] - behaviour
        future = np.zeros(behaviour.size + 1, np.float32)
        for i in range(behaviour.size - 1, -1, -1):
            future[i] = difference[i] + LOG_RATIO_DISCOUNT * future[i + 1]
        start = 0
        for j, segment in enumerate(trajectory.segments):
            tokens = slice(start, start + segment.num_tokens)
            if segment.num_tokens:
                out.score_norm[b, j] = norm[b, tokens].sum()
                out.entropy[b, j] = entropy[b, tokens].mean()
                out.nll[b, j] = -logp[b, tokens].mean()
                out.uncertain[b, j] = np.sum(logp[b, tokens] < np.log(SURE_PROBABILITY))
            out.log_ratio[b, j] = future[start]
            start = tokens.stop
    return out


@dataclasses.dataclass(frozen=True)
class Producer:
    """A function that makes channels: name -> axes by name, and dtype.

    `needs` is the part of a run without which there is nothing to make them from.
    """

    fn: Callable[[Source], dict[str, np.ndarray]]
    channels: Mapping[str, tuple[str, Any]]
    needs: Part | None = None


PRODUCERS = (
    Producer(_states, dict.fromkeys(("state_key", "next_state_key"), ("B S", np.int32))),
    Producer(_actions, {"action_key": ("B S", np.int32), "cluster": ("B S scopes", np.int32)}),
    Producer(_kinds, dict.fromkeys(("valid", "is_call", "is_answer", "is_summary"), ("B S", bool))),
    Producer(_prefixes, {"prefix_key": ("B L+1", np.int32)}),
    Producer(_embeddings, {"emb": ("B S D", np.float32)}),
    Producer(_scores, {"entropy": ("B L", np.float32), "segment_entropy": ("B S", np.float32)}),
    Producer(_reference, {"ref_logp": ("B L", np.float32)}),
    Producer(
        _trees,
        {
            **dict.fromkeys(("parent", "leaf_traj", "tree_id"), ("M", np.int32)),
            "node_of_segment": ("B S", np.int32),
            "node_entropy": ("M", np.float32),
        },
    ),
    Producer(
        _cuts,
        {"cut": ("B S", np.int32), "cut_value": ("B S", np.float32), "cut_mask": ("B S", bool)},
        needs="branches",
    ),
    Producer(
        _forks,
        dict.fromkeys(("parent_traj", "fork_segment"), ("B", np.int32)),
        needs="branches",
    ),
    Producer(_progress, {"progress": ("", np.float32)}),
    Producer(
        _citations,
        {
            "cited": ("B S", bool),
            "match_class": ("B S", np.int32),
            "summary_mask": ("B L", bool),
        },
        needs="citations",
    ),
)
# Made elsewhere in a run: by the critic, and by the branches themselves.
_MADE_ELSEWHERE: dict[Part, dict[str, tuple[str, Any]]] = {
    "critic": {
        **dict.fromkeys(("value", "value_variance"), ("B S+1", np.float32)),
        "value_covariance": ("B S", np.float32),
        "baseline": ("B", np.float32),
    },
    "branches": {"mc_return": ("B S K", np.float32), "mc_mask": ("B S K", bool)},
}
_CORE = {
    **dict.fromkeys(("group_id",), ("B", np.int32)),
    **dict.fromkeys(("outcome",), ("B", np.float32)),
    **dict.fromkeys(("success", "row_mask", "truncated"), ("B", bool)),
    "segment_mask": ("B S", bool),
    "segment_reward": ("B S", np.float32),
    "token_segment": ("B L", np.int32),
    "token_mask": ("B L", bool),
    "behaviour_logp": ("B L", np.float32),
}


def available(parts: Collection[Part]) -> dict[str, tuple[str, Any]]:
    """Optional channels that a run with these parts can fill: name -> axes and dtype."""
    made: dict[str, tuple[str, Any]] = {}
    for producer in PRODUCERS:
        if producer.needs is None or producer.needs in parts:
            made |= producer.channels
    for part in parts:
        made |= _MADE_ELSEWHERE.get(part, {})
    return made


def read_channels(name: str, hparams: Mapping[str, Any], parts: Collection[Part]) -> frozenset[str]:
    """What an estimator reads of the batches of a run; tried on shapes, without rollouts.

    Args:
      name: key of `ESTIMATORS`.
      hparams: overrides of its hyperparameters.
      parts: of the run.

    Returns:
      Names of channels.

    Raises:
      ValueError: it reads what the run does not produce (each such channel is named, with who
        would produce it), or a hyperparameter is wrong.
    """
    can = available(parts)
    missing = [c for c in ESTIMATORS[name].inputs if c not in _CORE and c not in can]
    if missing:
        reasons = "; ".join(f"{c}: {CHANNEL_PRODUCERS[c]}" for c in missing)
        raise ValueError(
            f"credit.estimator={name!r} reads {', '.join(missing)}, which this run does not "
            f"produce ({reasons})"
        )
    sizes = {"B": 2, "S": 2, "S+1": 3, "L": 2, "L+1": 3, "M": 4, "K": 2, "D": 2, "scopes": 2}
    batch = CreditBatch(
        **{
            channel: jax.ShapeDtypeStruct(tuple(sizes[a] for a in axes.split()), dtype)
            for channel, (axes, dtype) in {**_CORE, **can}.items()
        }
    )
    program = jax.make_jaxpr(functools.partial(estimate, name, **hparams))(batch).jaxpr
    used = {id(x) for equation in program.eqns for x in equation.invars}
    used |= {id(x) for x in program.outvars}
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(batch))
    return frozenset(p[0].name for p, x in zip(paths, program.invars) if id(x) in used)


def fill(names: Collection[str], source: Source) -> CreditBatch:
    """The batch of `source` with those of the channels `names` filled that `PRODUCERS` make."""
    made: dict[str, np.ndarray] = {}
    for producer in PRODUCERS:
        if set(producer.channels) & set(names):
            made |= producer.fn(source)
    return dataclasses.replace(source.batch, **{c: x for c, x in made.items() if c in names})
