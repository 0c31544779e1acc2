"""What the critic may know before the first step: how the scripted agent's episodes ended.

The warm start has imitated these episodes; their outcomes are as good as rollouts' to learn from
what a state is worth, and cost no generated token. They are another policy's, though a close
one's: where that matters, the misses of the first steps say so (`focus.critic.covariance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_collections
import numpy as np

from focus.critic.losses import evidence_id
from focus.learner import hosts, packing, sharding
from focus.learner.scoring import make_score_fn, policy_model
from focus.policy import model as models
from focus.run import experiment
from focus.types import Trajectory

# Rollouts that are packed at a time: packing is quadratic.
_CHUNK = 256


def state_evidence(
    config: ml_collections.ConfigDict, trajectories: Sequence[Trajectory], params: Any
) -> dict[str, np.ndarray]:
    """Hidden states of a policy at the states of episodes, and what became of each.

    Args:
      config: of the run.
      trajectories: with outcomes; of all processes the same.
      params: of the policy (NumPy).

    Returns:
      Arrays over n states: `features` [n, H]; `outcome`; `segments_left`, 1 before the last;
      `share`, 1 over the states that have the outcome in common; `cost`, tokens to the end;
      `episode` and `task`, uint32 ids by name.
    """
    model, c = experiment.model_config(config), config.learner
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    score = make_score_fn(
        policy_model(model, logprob_chunk=c.logprob_chunk or None),
        mesh=mesh,
        micro_rows=c.micro_rows,
        temperature=config.rollout.temperature,
    )
    on_mesh = hosts.replicate(params, mesh)
    parts = []
    for i in range(0, len(trajectories), _CHUNK):
        own = hosts.deal(trajectories[i : i + _CHUNK])
        packed = packing.pack_trajectories(
            own,
            row_length=c.row_length,
            max_nodes=c.max_nodes,
            max_states=c.max_states,
            rows_multiple=c.micro_rows // hosts.count(),
            share_prefixes=models.shares_prefixes(model),
        )
        hidden = packed.states_to_trajectories(score(on_mesh, packed.rows).state_hidden)
        parts.append(hosts.concatenate(_columns(own, hidden)))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    there = joined.pop("there")
    return {name: column[there] for name, column in joined.items()}


def _columns(trajectories: Sequence[Trajectory], hidden: np.ndarray) -> dict[str, np.ndarray]:
    rows = []
    for b, trajectory in enumerate(trajectories):
        tokens = np.array([segment.num_tokens for segment in trajectory.segments])
        count, left = len(tokens), np.cumsum(tokens[::-1])[::-1]
        ids = evidence_id(trajectory.id), evidence_id(trajectory.task_id)
        rows += [(b, j, trajectory.outcome, count - j, 1 / count, left[j], *ids)
                 for j in range(count)]  # fmt: skip
    b, j, *columns = zip(*rows)
    kinds = (np.float32, np.int32, np.float32, np.float32, np.uint32, np.uint32)
    names = ("outcome", "segments_left", "share", "cost", "episode", "task")
    return {
        "features": hidden[np.array(b), np.array(j)],
        **{name: np.array(x, kind) for name, x, kind in zip(names, columns, kinds)},
        "there": np.ones(len(rows), bool),
    }
