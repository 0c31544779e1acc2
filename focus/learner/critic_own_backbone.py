"""A critic with a transformer of its own.

It starts as a copy of the policy's and is trained together with the heads, so it can learn what
the policy has no use for. Its hidden states move with every update: nothing is replayed, a
step's own rows are read `epochs` times. Otherwise it is used like the critic of
`focus.learner.critic_on_policy`, which reads the policy's hidden states.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from focus.critic import head
from focus.critic.losses import training_masks, value_weight
from focus.critic.posterior import Posterior, init_posterior
from focus.critic.state import Evidence, condition_posterior, critic_objective
from focus.learner import hosts, sharding
from focus.learner.critic_on_policy import CriticReader
from focus.learner.packing import PackedRows, Rows, take_rows
from focus.learner.scoring import PolicyModel, Scores, blocks, check_rows, take_positions
from focus.learner.state import OptimizerConfig, TrainState, make_optimizer
from focus.types import Array


@dataclasses.dataclass(frozen=True)
class BackboneOptions:
    """How a critic with its own backbone learns.

    Attributes:
      learning_rate: of the heads' AdamW.
      backbone_learning_rate: of the backbone's; a pretrained model wants less than its heads.
      epochs: passes over a step's rows.
      minibatches: optimiser steps per pass; fewer where there are fewer rows.
      micro_rows: rows that go through the model at a time; a multiple of data * fsdp.
      uncertainty: "ensemble", or "posterior" over a last linear layer.
      posterior_features: width of that layer.
      posterior_retention: share of the posterior's evidence that is kept per step.
    """

    learning_rate: float = 1e-3
    backbone_learning_rate: float = 1e-3
    epochs: int = 4
    minibatches: int = 1
    micro_rows: int = 8
    uncertainty: str = "ensemble"
    posterior_features: int = 64
    posterior_retention: float = 0.9


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BackboneCriticState:
    """Everything about the critic that a checkpoint must hold; arrays only.

    Attributes:
      critic: the heads: parameters and priors.
      backbone: parameters of the transformer.
      opt_state: optimiser state of both.
      posterior: last-layer belief, None where the ensemble is the only source of uncertainty.
    """

    critic: head.CriticParams
    backbone: Any
    opt_state: Any
    posterior: Posterior | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvidenceRows:
    """Packed rows with what there is to learn at their states (NumPy).

    Attributes:
      rows: R' packed rows.
      evidence: arrays [R', E]; in place of hidden states `features` holds the row index at
        which to read them.
    """

    rows: Rows
    evidence: Evidence


def evidence_rows(
    packed: PackedRows, evidence: Evidence, index: np.ndarray, width: int
) -> EvidenceRows:
    """Puts every piece of evidence beside the row that holds its state.

    Any number of outcomes can meet at one state (a group's rollouts share their first). A row
    with more evidence than `width` is repeated with what is left, so shapes stay fixed; a row
    with none is left out.

    Args:
      packed: the step's rows.
      evidence: n rows of evidence, some of them padding.
      index: [n, 2] trajectory and state of each.
      width: E.

    Returns:
      EvidenceRows.

    Raises:
      ValueError: evidence about a state that is in no row.
    """
    exists = np.flatnonzero(evidence.mask)
    slots = np.stack(np.indices(packed.rows.state_pos.shape), axis=-1)
    shape = np.maximum((packed.num_trajectories, packed.num_states), index.max(axis=0) + 1)
    places = packed.states_to_trajectories(slots, tuple(shape), -1)[tuple(index[exists].T)]
    if (places < 0).any():
        b, j = index[exists][(places < 0).any(axis=-1)][0]
        raise ValueError(f"evidence about state {j} of trajectory {b}, which is in no packed row")
    by_row = np.argsort(places[:, 0], kind="stable")
    row, slot = places[by_row].T
    copy, column = np.divmod(np.arange(len(row)) - np.searchsorted(row, row), width)
    chosen, new_row = np.unique(np.stack([row, copy], axis=1), axis=0, return_inverse=True)
    new_row = new_row.reshape(-1)  # NumPy 2.0 alone keeps the axis

    def lay_out(values: np.ndarray) -> np.ndarray:
        out = np.zeros((len(chosen), width), values.dtype)
        out[new_row, column] = values
        return out

    evidence = dataclasses.replace(evidence, features=np.zeros(len(evidence.mask), np.int32))
    laid_out = jax.tree.map(lambda x: lay_out(np.asarray(x)[exists][by_row]), evidence)
    position = lay_out(packed.rows.state_pos[row, slot])
    return EvidenceRows(
        rows=take_rows(packed.rows, chosen[:, 0], len(chosen)),
        evidence=dataclasses.replace(laid_out, features=position),
    )


class BackboneCritic(CriticReader):
    """Compiled functions over a `BackboneCriticState`.

    Args:
      config: what the heads are.
      options: how heads and backbone learn.
      model: the transformer; its `hidden` is read.
      params: of the policy, or their shapes.
      mesh: rows are spread over its axes data and fsdp, the backbone lies like the policy.

    Attributes:
      accumulate: compiled; adds the gradient of a micro-batch of `EvidenceRows`.
    """

    def __init__(
        self,
        config: head.CriticConfig,
        options: BackboneOptions,
        model: PolicyModel,
        params: Any,
        *,
        mesh: Mesh,
    ):
        super().__init__(config, mesh)
        self.options = options
        self._model = model
        self._own = sharding.rows_of_process(mesh, options.micro_rows)
        self._optimizer = optax.partition(
            {
                "heads": optax.adamw(options.learning_rate, weight_decay=1e-3),
                "backbone": make_optimizer(OptimizerConfig(options.backbone_learning_rate)),
            },
            {"heads": "heads", "backbone": "backbone"},
        )
        shapes = jax.eval_shape(self.init, jax.random.key(0), params)
        places = sharding.shardings_of({"critic": shapes}, mesh)["critic"]
        trained, opt_state = _trained(places), places.opt_state
        replicated = NamedSharding(mesh, PartitionSpec())
        self._hidden = jax.jit(sharding.on_mesh(self._hidden_of, mesh), out_shardings=replicated)
        self._judge = jax.jit(self._judgement)
        self._condition = jax.jit(
            functools.partial(condition_posterior, config, retention=options.posterior_retention)
        )
        self._copy = jax.jit(
            lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=(trained, opt_state)
        )
        self._zeros = jax.jit(
            lambda tree: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), tree),
            out_shardings=trained,
        )
        self.accumulate = jax.jit(
            sharding.on_mesh(self._add_gradient, mesh),
            donate_argnums=2,
            out_shardings=(trained, replicated),
        )
        self._norm = jax.jit(optax.global_norm)
        self._apply = jax.jit(
            self._optimizer_step, donate_argnums=(0, 1), out_shardings=(trained, opt_state)
        )

    def init(self, key: jax.Array, params: Any) -> BackboneCriticState:
        """A critic before its first evidence, its backbone a copy of the policy.

        Args:
          key: consumed.
          params: of the policy.
        """
        critic_key, posterior_key = jax.random.split(key)
        critic = head.init_critic(self.config, critic_key)
        # It predicts no words. A copy, because the policy's update donates its own arrays.
        backbone = {name: leaf for name, leaf in params.items() if name != "lm_head"}
        backbone = jax.tree.map(jnp.copy, backbone)
        posterior = None
        if self.options.uncertainty == "posterior":
            posterior = init_posterior(
                posterior_key, self.config.feature_dim, self.options.posterior_features
            )
        opt_state = self._optimizer.init({"heads": critic.trained, "backbone": backbone})
        return BackboneCriticState(critic, backbone, opt_state, posterior)

    def fit_standardisation(
        self, state: BackboneCriticState, hidden: np.ndarray, mask: np.ndarray
    ) -> BackboneCriticState:
        """Leaves centre and scale at 0 and 1: they would not fit a backbone that moves.

        Directions in which the first states hardly differ get a small scale. As soon as training
        moves the backbone along them, heads and fixed priors would be driven far off by it; it
        can learn to spread its states itself.

        Args:
          state: as from `init`.
          hidden: not read.
          mask: not read.
        """
        del hidden, mask
        return state

    def features(self, state: TrainState, rows: Rows, scores: Scores | None = None) -> np.ndarray:
        """Hidden states at states of packed rows: the backbone's.

        Args:
          state: whose critic is read.
          rows: packed rows.
          scores: not read.

        Returns:
          [R, P, H].
        """
        del scores
        return self._read(state.critic.backbone, rows)

    def learn(
        self,
        state: BackboneCriticState,
        evidence: Evidence,
        key: jax.Array,
        *,
        packed: PackedRows,
        index: np.ndarray,
    ) -> tuple[BackboneCriticState, dict[str, float]]:
        """Trains heads and backbone on a step's rows.

        A minibatch of rows divides by the weight that one has on average and not by its own, so
        each gradient is an unbiased estimate of that of the step's weighted mean loss, and the
        split into micro-batches is invisible.

        Args:
          state: before.
          evidence: of the step, with hidden states of this backbone.
          key: consumed.
          packed: rows that hold the states.
          index: [n, 2] trajectory and state of each row of evidence.

        Returns:
          State and metrics: those of the losses over the step's evidence after the update,
          `value_loss_before`, mean `grad_norm`, `num_updates` and `evidence_rows`.

        Raises:
          FloatingPointError: a loss or gradient is not finite; the state is left as it was.
        """
        width = 2 * packed.rows.state_pos.shape[1]  # a state's own outcome, and its branches'
        batch = evidence_rows(packed, evidence, index, width)
        everything = hosts.concatenate(evidence)
        before = self._judged(state.critic, everything)
        posterior = state.posterior
        if posterior is not None:
            posterior = self._conditioned(state.critic, posterior, everything)
        trained, opt_state = self._copy((_trained(state), state.opt_state))
        norms = []
        sizes = hosts.gather(batch.rows.num_rows)
        for rows, share in self._minibatches(sum(sizes), key):
            weights = hosts.replicate(
                jax.device_put(
                    [np.float32(share * before[f"{name}_weight"]) for name in ("value", "cost")]
                ),
                self._mesh,
            )
            gradient, parts = self._zeros(trained), []
            rows, most = hosts.shares(rows, sizes)
            for block in blocks(rows, len(self._own), most):
                micro = sharding.shard_rows(_take(batch, block, len(self._own)), self._mesh)
                gradient, part = self.accumulate(
                    trained, state.critic.fixed, gradient, micro, weights
                )
                parts.append(part)
            norm = float(jax.device_get(self._norm(gradient)))
            self._check(float(sum(jax.device_get(parts))), norm)
            norms.append(norm)
            if norm > 0:  # momentum must not move an idle critic
                trained, opt_state = self._apply(trained, opt_state, gradient)
        critic = head.CriticParams(trained["heads"], state.critic.fixed)
        hidden = packed.states_to_trajectories(self._read(trained["backbone"], packed.rows))
        now = np.where(evidence.mask[:, None], hidden[tuple(index.T)], 0.0)
        everything = dataclasses.replace(everything, features=hosts.concatenate(now))
        after = self._judged(critic, everything)
        self._check(after["value_loss"], 0.0)
        metrics = {name: x for name, x in after.items() if not name.endswith("_weight")}
        metrics |= {
            "value_loss_before": before["value_loss"],
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "num_updates": float(np.count_nonzero(norms)),
            "evidence_rows": float(np.sum(everything.mask)),
        }
        return BackboneCriticState(critic, trained["backbone"], opt_state, posterior), metrics

    def _minibatches(self, num_rows: int, key: jax.Array) -> Iterator[tuple[np.ndarray, float]]:
        """Rows of each optimiser step, and their share of all rows."""
        # On the host: their number changes with every step, and shapes would with it.
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        for _ in range(self.options.epochs):
            order = rng.permutation(num_rows)
            for rows in np.array_split(order, self.options.minibatches):
                if len(rows):
                    yield rows, len(rows) / num_rows

    def _read(self, backbone: Any, rows: Rows) -> np.ndarray:
        check_rows(self._model, rows)
        parts = []
        most = max(hosts.gather(rows.num_rows))
        for block in blocks(np.arange(rows.num_rows), len(self._own), most):
            micro = sharding.shard_rows(take_rows(rows, block, len(self._own)), self._mesh)
            parts.append((len(block), self._hidden(backbone, micro)))
        return np.concatenate([jax.device_get(x)[self._own[:count]] for count, x in parts])

    def _judged(self, critic: head.CriticParams, evidence: Evidence) -> dict[str, float]:
        metrics = jax.device_get(self._judge(hosts.local(critic), jax.device_put(evidence)))
        return {name: float(x) for name, x in metrics.items()}

    def _conditioned(self, critic, posterior: Posterior, evidence: Evidence) -> Posterior:
        critic, posterior = hosts.local((critic, posterior))
        new = self._condition(critic, posterior, jax.device_put(evidence))
        return hosts.replicate(new, self._mesh)

    def _check(self, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"critic: loss {loss}, gradient norm {norm}; its state was not replaced. Lower "
                "critic.learning_rate or critic.backbone_learning_rate"
            )

    # Compiled.

    def _hidden_of(self, backbone, rows):
        return take_positions(self._model.hidden(backbone, rows), rows.state_pos)

    def _judgement(self, critic, evidence):
        masks = training_masks(self.config, evidence.bootstrap_id, evidence.fold)
        weights = {
            "value_weight": value_weight(evidence.weight, masks, evidence.mask),
            "cost_weight": jnp.sum(jnp.where(evidence.mask, evidence.cost_weight, 0.0)),
        }
        _, metrics = critic_objective(self.config, critic, evidence, masks, *weights.values())
        return metrics | weights

    def _loss(self, trained, fixed, batch: EvidenceRows, weights: list[Array]) -> Array:
        hidden = self._model.hidden(trained["backbone"], batch.rows)
        hidden = take_positions(hidden, batch.evidence.features)
        evidence = jax.tree.map(lambda x: x.reshape(-1), batch.evidence)
        evidence = dataclasses.replace(evidence, features=hidden.reshape(-1, hidden.shape[-1]))
        masks = training_masks(self.config, evidence.bootstrap_id, evidence.fold)
        critic = head.CriticParams(trained["heads"], fixed)
        loss, _ = critic_objective(
            self.config, critic, evidence, masks, *weights, stop_gradient=False
        )
        return loss

    def _add_gradient(self, trained, fixed, gradient, batch, weights):
        loss, new = jax.value_and_grad(self._loss)(trained, fixed, batch, weights)
        return jax.tree.map(jnp.add, gradient, new), loss

    def _optimizer_step(self, trained, opt_state, gradient):
        updates, opt_state = self._optimizer.update(gradient, opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state


def _trained(state: BackboneCriticState) -> dict[str, Any]:
    """What the optimiser sees."""
    return {"heads": state.critic.trained, "backbone": state.backbone}


def _take(batch: EvidenceRows, index: np.ndarray, num_rows: int) -> EvidenceRows:
    """The rows at `index`, followed by empty ones up to `num_rows`."""
    padding = [(0, num_rows - len(index)), (0, 0)]
    return EvidenceRows(
        rows=take_rows(batch.rows, index, num_rows),
        evidence=jax.tree.map(lambda x: np.pad(x[index], padding), batch.evidence),
    )
