"""The compiled parts of a run.

A `Trainer` is made once from a config. It holds functions and fixed shapes; everything that
changes is in the `TrainState` that goes in and comes out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from focus.engine import Engine
from focus.learner import hosts, packing, sharding
from focus.learner.adapters import Adapters
from focus.learner.compilations import compilations
from focus.learner.scoring import make_score_fn, policy_model
from focus.learner.state import TrainState, init_state, make_optimizer
from focus.learner.update import make_policy_update
from focus.policy import model as models
from focus.rollout import EpisodeCost, Freshness, Tools
from focus.run import experiment, learning
from focus.run.assignment import Assignment
from focus.run.backends import ENGINES
from focus.run.task_order import TaskOrder
from focus.run.valuation import Valuation
from focus.run.warm_start import WarmStart
from focus.tasks.base import Environment
from focus.types import Array, Trajectory


class Trainer:
    """Compiled functions of a run, and the engine and agents that play.

    Args:
      config: of the run, validated.
      env: the environment.
      start: tokenizer and initial parameters.

    Raises:
      ValueError: sizes that do not fit together.
    """

    def __init__(self, config: ml_collections.ConfigDict, env: Environment, start: WarmStart):
        self.config, self.env, self.start = config, env, start
        self.model = model = experiment.model_config(config)
        start.chat.check_model(model.vocab_size)
        self.num_parameters = models.num_params(model)
        self.step_config = experiment.step_config(config, max_turns=env.max_turns)
        self.episode_cost = EpisodeCost(float(config.rollout.episode_tokens))
        self.mesh = experiment.make_mesh(config, model)
        self._optimizer = make_optimizer(
            learning.optimizer_config(config), experiment.trained_axes(config)
        )
        policy = policy_model(model, logprob_chunk=config.learner.logprob_chunk or None)
        self.adapters = self._make_adapters()
        frozen = None if self.adapters is None else self.adapters.frozen
        self.score = make_score_fn(
            policy,
            mesh=self.mesh,
            micro_rows=config.learner.micro_rows,
            temperature=config.rollout.temperature,
            frozen=frozen,
        )
        critic = None
        if config.critic.enabled:
            critic = learning.make_critic(
                config, model, policy, start.params, score=self.score, mesh=self.mesh
            )
        self._init_critic = None if critic is None else critic.init
        self.state_shardings = sharding.shardings_of(
            jax.eval_shape(self._init, start.params), self.mesh
        )
        self.update = make_policy_update(
            policy,
            self._optimizer,
            learning.loss_config(config),
            learning.update_config(config),
            mesh=self.mesh,
            shardings=self.state_shardings,
            frozen=frozen,
        )
        self.backend = ENGINES[config.rollout.engine](config, model, start.chat, start.params)
        make_agent = functools.partial(
            experiment.make_agent,
            config,
            env,
            start.chat,
            self.engine,
            retry=self.backend.retry,
            tools=Tools(experiment.tool_limits(config)),
        )
        self.agent = make_agent(temperature=config.rollout.temperature, run_seed=config.seed)
        # Held-out tasks are played with the same random numbers in every run and at every step.
        self.eval_agent = make_agent(
            temperature=config.evaluate.temperature, run_seed=0, closing=False
        )
        self.valuation = Valuation(
            config,
            critic,
            self.step_config,
            self.pack,
            self.score,
            max_turns=env.max_turns,
            max_context=self.engine.info().max_context,
        )
        self.assignment = Assignment(config, env, self.agent)
        self._train_tasks = env.tasks("train")
        self.heldout_tasks = experiment.heldout_tasks(config, env)

    @property
    def compilations(self) -> int:
        """Programs that this process has compiled."""
        return compilations()

    def rollout_params(self, state: TrainState) -> Any:
        """The parameters that the engine is to sample with, adapters merged or, where they are
        pushed apart from their base, attached."""
        if self.adapters is None:
            return state.params
        apart = self.config.rollout.push == "adapter"
        return self.adapters.attach(state) if apart else self.adapters.merge(state)

    def save_adapter(self, path: Path, state: TrainState) -> None:
        """Writes the adapters in the layout of PEFT; nothing where all parameters are trained."""
        if self.adapters is not None:
            self.adapters.save(path, state, self.config.model.get("path") or None)

    @property
    def engine(self) -> Engine:
        """Where rollouts are sampled."""
        return self.backend.engine

    def task_order(self, cursor: int = 0, owed: Sequence[int] = ()) -> TaskOrder:
        """The order of training tasks, from a place on; see `TaskOrder`."""
        return TaskOrder(self._train_tasks, self.config.seed, cursor=cursor, owed=owed)

    def screen(self, step: int) -> Freshness:
        """What is not trained on in a step."""
        c = self.config.rollout
        return Freshness(step, max_lag=c.async_depth, mixed=c.mixed_versions)

    def init_state(self) -> TrainState:
        """The state before the first step, born sharded."""
        return jax.jit(self._init, out_shardings=self.state_shardings)(self.start.params)

    def _init(self, params: Any) -> TrainState:
        critic = None
        if self._init_critic is not None:
            critic = self._init_critic(jax.random.key(self.config.seed), params)
        params, checksum = self._trained(params)
        return init_state(params, self._optimizer, critic, checksum)

    def _trained(self, params: Any) -> tuple[Any, Array | None]:
        """What is trained of the policy, before the first step, and the checksum of the rest."""
        if self.adapters is None:
            return params, None
        return self.adapters.init(jax.random.key(self.config.seed))

    def _make_adapters(self) -> Adapters | None:
        setting = experiment.lora_config(self.config)
        if setting is None:
            return None
        start = self.start
        return Adapters(self.model, setting, start.params, start.checksum(), mesh=self.mesh)

    def pack(self, trajectories: Sequence[Trajectory]) -> packing.PackedRows:
        """Trajectories to rows, every shared prefix once where the model allows it."""
        c = self.config.learner
        return packing.pack_trajectories(
            trajectories,
            row_length=c.row_length,
            max_nodes=c.max_nodes,
            max_states=c.max_states,
            rows_multiple=c.micro_rows // hosts.count(),
            share_prefixes=models.shares_prefixes(self.model),
        )

    def reference_logp(self, packed: packing.PackedRows) -> np.ndarray:
        """[R, L] log-probs under the warm start: a forward pass over all rows."""
        return self.score(self._reference_params, packed.rows).logp

    @functools.cached_property
    def _reference_params(self) -> Any:
        trained = jax.jit(
            lambda params: self._trained(params)[0], out_shardings=self.state_shardings.params
        )
        return trained(self.start.params)
