"""The critic as a run uses it: beliefs about states, and learning from a step's evidence.

Functions are compiled once; the critic's state goes in and comes out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from focus.critic import head
from focus.critic.posterior import posterior_belief, project_features
from focus.critic.state import (
    CriticState,
    Evidence,
    ReplayBuffer,
    init_critic_state,
    make_critic_update,
    observe,
)
from focus.learner import hosts
from focus.learner.packing import PackedRows, Rows
from focus.learner.scoring import Scores
from focus.learner.state import TrainState
from focus.types import StateBelief

State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class CriticOptions:
    """How a critic learns; what it is says `CriticConfig`.

    Attributes:
      learning_rate: of AdamW.
      epochs: passes over the replay buffer in a step.
      minibatch_size: rows of an optimiser step.
      capacity: rows of the replay buffer, a multiple of `minibatch_size`.
      replay_steps: steps after which evidence is dropped.
      age_decay: factor on a row's weight per step of age.
      uncertainty: "ensemble", or "posterior" over a last linear layer.
      posterior_features: width of that layer.
      posterior_retention: share of the posterior's evidence that is kept per step.
    """

    learning_rate: float = 1e-3
    epochs: int = 4
    minibatch_size: int = 256
    capacity: int = 2048
    replay_steps: int = 4
    age_decay: float = 0.8
    uncertainty: str = "ensemble"
    posterior_features: int = 64
    posterior_retention: float = 0.9


class CriticReader:
    """What every critic does with hidden states, wherever they come from.

    Its state is any dataclass with the fields `critic` (heads) and `posterior`.

    Args:
      config: what the critic is.
      mesh: where its state lies, on every device.
    """

    def __init__(self, config: head.CriticConfig, mesh: Mesh):
        self.config, self._mesh = config, mesh
        self._belief = jax.jit(self._belief_of)
        self._fit = jax.jit(head.fit_standardisation)

    def fit_standardisation(self, state: State, hidden: np.ndarray, mask: np.ndarray) -> State:
        """Sets the features' centre and scale, once, from the first states that are seen.

        Args:
          state: as from `init`.
          hidden: [B, S + 1, H].
          mask: [B, S + 1] bool, states that exist.
        """
        states = hosts.concatenate((hidden.reshape(-1, hidden.shape[-1]), mask.reshape(-1)))
        critic = self._fit(hosts.local(state.critic), *jax.device_put(states))
        return dataclasses.replace(state, critic=hosts.replicate(critic, self._mesh))

    def replicate(self, tree: Any) -> Any:
        """Arrays that lie, whole, on every device."""
        return hosts.replicate(tree, self._mesh)

    def belief(
        self, state: State, hidden: np.ndarray, fold: np.ndarray | None = None
    ) -> StateBelief:
        """What the critic believes of states.

        Args:
          state: the critic.
          hidden: [B, S + 1, H] hidden states, see `features`.
          fold: [B] int32 fold of each trajectory's task: read by the members that never train
            on it. None: all members.
        """
        if fold is not None:
            fold = np.broadcast_to(fold[:, None], hidden.shape[:2])
        states = jax.device_put((hidden, fold))
        critic, posterior = hosts.local((state.critic, state.posterior))
        return StateBelief(**jax.device_get(self._belief(critic, posterior, *states)))

    def _belief_of(self, critic, posterior, hidden, fold) -> dict[str, Any]:
        output = head.apply_critic(self.config, critic, hidden)
        belief = head.belief(self.config, output.value_logits, fold=fold)
        if posterior is not None:
            phi = project_features(posterior, head.standardised_features(critic, hidden))
            belief = posterior_belief(belief, posterior, phi)
        return {
            "mean": belief.mean,
            "error_features": belief.error_features,
            "variance": belief.variance,
            "noise_var": belief.noise_variance,
            "cost": head.expected_cost(self.config, output.log_cost),
        }


class CriticLearner(CriticReader):
    """A critic that reads the policy's hidden states; compiled functions over a `CriticState`.

    Args:
      config: what the critic is.
      options: how it learns.
      score: `(params, rows) -> Scores`, the policy's forward pass.
      mesh: see `CriticReader`.

    Attributes:
      update: compiled; `(state, key) -> (state, metrics)` of `make_critic_update`.
    """

    def __init__(
        self,
        config: head.CriticConfig,
        options: CriticOptions,
        score: Callable[[Any, Rows], Scores],
        *,
        mesh: Mesh,
    ):
        super().__init__(config, mesh)
        self.options = options
        self._optimizer = optax.adamw(options.learning_rate, weight_decay=1e-3)
        self._score = score
        self._observe = jax.jit(
            functools.partial(
                observe,
                config,
                max_age=options.replay_steps,
                retention=options.posterior_retention,
            )
        )
        self.update = jax.jit(
            make_critic_update(
                config,
                self._optimizer,
                num_epochs=options.epochs,
                minibatch_size=options.minibatch_size,
                age_decay=options.age_decay,
            )
        )

    def init(self, key: jax.Array, params: Any) -> CriticState:
        """A critic before its first evidence. `key` is consumed; `params` are not its own."""
        del params
        posterior = self.options.uncertainty == "posterior"
        return init_critic_state(
            self.config,
            self._optimizer,
            key,
            capacity=self.options.capacity,
            posterior_features=self.options.posterior_features if posterior else None,
        )

    def features(self, state: TrainState, rows: Rows, scores: Scores | None = None) -> np.ndarray:
        """Hidden states at states of packed rows: the policy's.

        Args:
          state: with the policy that is read.
          rows: packed rows.
          scores: the policy's of these rows, where they are at hand.

        Returns:
          [R, P, H].
        """
        scores = scores or self._score(state.params, rows)
        return scores.state_hidden

    def pretrain(
        self, state: CriticState, evidence: Evidence, key: jax.Array, *, epochs: int
    ) -> CriticState:
        """Learns from evidence that was there before the first step, and keeps none of it.

        It is not replayed later: it may be another policy's, and what it taught stays in the
        parameters for as long as newer evidence does not contradict it.

        Args:
          state: as from `init`.
          evidence: n rows (NumPy), the same in all processes.
          key: consumed.
          epochs: passes over it.

        Raises:
          FloatingPointError: the loss is not finite.
        """
        size = self.options.minibatch_size
        padding = -len(evidence.mask) % size
        evidence = jax.tree.map(
            lambda x: np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)), evidence
        )
        masked = jax.device_put((evidence.features, evidence.mask))
        critic = self._fit(hosts.local(state.critic), *masked)
        buffer = ReplayBuffer(evidence, np.zeros(len(evidence.mask), np.int32))
        update = jax.jit(
            make_critic_update(self.config, self._optimizer, num_epochs=epochs, minibatch_size=size)
        )
        everything = dataclasses.replace(
            hosts.local(state), critic=critic, buffer=jax.device_put(buffer)
        )
        new, metrics = update(everything, key)
        if not np.isfinite(jax.device_get(metrics["value_loss"])):
            raise FloatingPointError(
                "critic: the loss is not finite on what it is pretrained on; lower "
                "critic.learning_rate"
            )
        new = dataclasses.replace(new, buffer=hosts.local(state.buffer))
        return hosts.replicate(new, self._mesh)

    def learn(
        self,
        state: CriticState,
        evidence: Evidence,
        key: jax.Array,
        *,
        packed: PackedRows,
        index: np.ndarray,
    ) -> tuple[CriticState, dict[str, float]]:
        """Adds a step's evidence to what is remembered, and trains on all of it.

        Args:
          state: before.
          evidence: of the step.
          key: consumed.
          packed: rows that hold the states; not read, nor is `index`.
          index: [n, 2] trajectory and state of each row of evidence.

        Returns:
          State and metrics.

        Raises:
          FloatingPointError: the loss is not finite; the state is left as it was.
        """
        del packed, index
        everything = jax.device_put(hosts.concatenate(evidence))
        new, metrics = self.update(self._observe(hosts.local(state), everything), key)
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not np.isfinite(metrics["value_loss"]):
            raise FloatingPointError(
                f"critic: loss {metrics['value_loss']} is not finite; lower critic.learning_rate"
            )
        return hosts.replicate(new, self._mesh), metrics
