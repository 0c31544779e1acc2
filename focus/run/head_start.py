"""What the critic may know before the first step: how the scripted agent's episodes ended.

The warm start has imitated these episodes; their outcomes are as good as rollouts' to learn from
what a state is worth, and cost no generated token. They are another policy's, though a close
one's: where that matters, the misses of the first steps say so (`focus.critic.covariance`).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
import safetensors.numpy

from focus.critic.losses import evidence_id
from focus.learner import hosts, packing, sharding
from focus.learner.scoring import make_score_fn, policy_model
from focus.policy import model as models
from focus.run import experiment, imitation
from focus.run.warm_start import WarmStart
from focus.tasks.base import Environment
from focus.terminal import Start
from focus.types import Trajectory

# Rollouts that are packed at a time: packing is quadratic.
_CHUNK = 256


def load_or_make(
    config: ml_collections.ConfigDict, env: Environment, warm: WarmStart, start: Start
) -> dict[str, np.ndarray]:
    """Evidence of `critic.pretrain_episodes` episodes, from beside the warm start if it is there.

    Those of the task's own world come first: the invented ones that the warm start is mixed with
    fill up what is missing.

    Args:
      config: of the run.
      env: the environment to be learnt.
      warm: tokenizer and policy.
      start: is told how far it is.

    Returns:
      See `state_evidence`.

    Raises:
      ValueError: what is kept cannot be read.
    """
    kept = warm.directory / f"evidence-{_fingerprint(config)}.safetensors"
    if all(hosts.gather(kept.is_file())):
        try:
            return safetensors.numpy.load_file(kept)
        except Exception as error:
            raise ValueError(
                f"{kept} cannot be read ({error}); delete it and it is made again"
            ) from error
    start.update("playing demonstrations again", milestone=True)
    own = {task.prompt for task in env.tasks("train")}
    demonstrations = list(imitation.demonstrations_of(config, env))
    order = sorted(
        range(len(demonstrations)), key=lambda i: demonstrations[i].task.prompt not in own
    )
    contexts = experiment.make_contexts(config, warm.chat)
    trajectories: list[Trajectory] = []
    for i in order:
        trajectory = imitation.to_trajectory(
            demonstrations[i], str(i), warm.chat, contexts, env.system_prompt()
        )
        if imitation.longest(trajectory) <= config.learner.row_length:
            trajectories.append(trajectory)
        if len(trajectories) == config.critic.pretrain_episodes:
            break
    start.update(f"reading the policy at the states of {len(trajectories)} episodes")
    evidence = state_evidence(config, trajectories, warm.params)
    if hosts.is_first():
        # Written under another name first: a killed run must not leave half of it.
        handle, partial = tempfile.mkstemp(dir=warm.directory, prefix=".partial-")
        os.close(handle)
        safetensors.numpy.save_file(evidence, partial)
        os.replace(partial, kept)
    return evidence


def _fingerprint(config: ml_collections.ConfigDict) -> str:
    """Hash of what the evidence depends on besides its warm start."""
    c = config.learner
    parts = [config.critic.pretrain_episodes, c.row_length, c.max_nodes, c.max_states]
    digest = hashlib.sha256(json.dumps(parts).encode())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:16]


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
