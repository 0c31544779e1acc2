"""What training asks of a language model, and scoring packed rows with it.

Rows go through the model in micro-batches of one fixed shape, so nothing compiles twice.

Where adapters are trained (`focus.policy.lora`), `params` are these alone, and the weights below
them are `frozen`: an argument of every compiled function that is neither donated nor copied, and
that no gradient is computed for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from focus.learner import hosts, sharding
from focus.learner.packing import Rows, take_rows
from focus.policy import lora, rounded
from focus.policy import model as models
from focus.policy.logprobs import chunked_logprobs, token_scores, wanted_first
from focus.types import Array

Params = Any


@dataclasses.dataclass(frozen=True)
class PolicyModel:
    """The two functions that training needs of a language model.

    Attributes:
      hidden: `(params, rows) -> [R, L, H]` final hidden states of packed rows.
      unembedding: `params -> [V, H]`.
      shares_prefixes: whether rows may be prefix trees, see `check_rows`.
      logprob_chunk: tokens of a row whose logits exist at a time; None chooses by size.
    """

    hidden: Callable[[Params, Rows], Array]
    unembedding: Callable[[Params], Array]
    shares_prefixes: bool = True
    logprob_chunk: int | None = None


def policy_model(
    config: models.Config, *, products: str | None = None, logprob_chunk: int | None = None
) -> PolicyModel:
    """A `PolicyModel` of any family.

    Args:
      config: shape of the model.
      products: format that operands of products with weights are rounded to, see
        `focus.policy.rounded`; None leaves them in the dtype of the model.
      logprob_chunk: see `PolicyModel`.

    Raises:
      ValueError: no such format.
    """
    shares_prefixes = models.shares_prefixes(config)
    if products is not None:
        rounded.check_format(products)

    def hidden(params: Params, rows: Rows) -> Array:
        if products is not None:
            params = rounded.attach(params, products)
        return models.hidden_states(
            config,
            params,
            rows.tokens,
            positions=rows.positions,
            node_id=rows.node_id,
            visible_until=rows.visible_until if shares_prefixes else None,
        )

    return PolicyModel(
        hidden, lambda params: models.unembedding(config, params), shares_prefixes, logprob_chunk
    )


def check_rows(model: PolicyModel, rows: Rows) -> None:
    """Checks that a model can read rows.

    Args:
      model: the model.
      rows: packed rows (NumPy).

    Raises:
      ValueError: a row is a prefix tree, and the model knows only documents side by side.
    """
    if model.shares_prefixes:
        return
    nodes = rows.visible_until.shape[1]
    between = (rows.visible_until != 0) & ~np.eye(nodes, dtype=bool)
    if between.any():
        raise ValueError(
            f"row {between.any(axis=(1, 2)).argmax()} is a prefix tree, and this model (recurrent, "
            "or with attention='splash') knows only documents side by side; pack with "
            "share_prefixes=False"
        )


def complete(params: Params, frozen: Params | None) -> Params:
    """What the model reads: the parameters, or the adapters that they are on a frozen base."""
    return params if frozen is None else lora.attach(frozen, params)


def take_positions(hidden: Array, index: Array) -> Array:
    """[R, L, H] at [R, n] row indices is [R, n, H]; an index of -1 gives what stands at 0."""
    return jnp.take_along_axis(hidden, jnp.maximum(index, 0)[..., None], axis=1)


def row_logprobs(
    model: PolicyModel,
    params: Params,
    rows: Rows,
    hidden: Array,
    wanted: Array | None,
    temperature: float = 1.0,
) -> tuple[Array, Array]:
    """Log-probability of tokens of packed rows given the path that leads to each.

    Most of a row is what the policy has read. Its tokens would be multiplied with the whole
    vocabulary for nothing, so those that are wanted are brought together first.

    Args:
      model: the model.
      params: its parameters.
      rows: packed rows.
      hidden: `model.hidden(params, rows)`.
      wanted: [R, L] bool, tokens that have one before them; None: all that do, and what is said of
        the others means nothing.
      temperature: see `chunked_logprobs`.

    Returns:
      `(logp [R, L], entropy [R, L])` of the distribution that the token was drawn from; 0 where
      nothing is wanted.
    """
    return _row_statistics(chunked_logprobs, model, params, rows, hidden, wanted, temperature)


def row_scores(
    model: PolicyModel, params: Params, rows: Rows, hidden: Array, wanted: Array, temperature: float
) -> tuple[Array, Array, Array]:
    """`row_logprobs` and score norms, `(logp, entropy, score_norm)`; not differentiable.

    See `focus.policy.logprobs.token_scores`.
    """
    return _row_statistics(token_scores, model, params, rows, hidden, wanted, temperature)


def _row_statistics(statistics, model, params, rows, hidden, wanted, temperature):
    unembedding = model.unembedding(params)
    settings = {"temperature": temperature, "chunk": model.logprob_chunk}
    if wanted is None:
        before = take_positions(hidden, rows.parent)
        return statistics(before, unembedding, rows.tokens, **settings)
    order = wanted_first(wanted)
    parent, tokens, sorted_wanted = (
        jnp.take_along_axis(x, order, axis=1) for x in (rows.parent, rows.tokens, wanted)
    )
    found = statistics(
        take_positions(hidden, parent), unembedding, tokens, wanted=sorted_wanted, **settings
    )
    back = jnp.argsort(order, axis=1)
    return tuple(jnp.take_along_axis(x, back, axis=1) for x in found)


@dataclasses.dataclass(frozen=True)
class Scores:
    """What one forward pass says of packed rows; NumPy arrays.

    Attributes:
      logp: [R, L] log-probs under the trainer of generated tokens; 0 elsewhere.
      entropy: [R, L] entropies of the same.
      score_norm: [R, L] `1 - sum_a pi(a)^2` of the same.
      state_hidden: [R, P, H] hidden states at states: the critic's features.
    """

    logp: np.ndarray
    entropy: np.ndarray
    score_norm: np.ndarray
    state_hidden: np.ndarray


def jit_score(model: PolicyModel, *, mesh: Mesh, temperature: float = 1.0) -> Callable[..., Any]:
    """The compiled part of scoring.

    Returns:
      `(params, micro-batch, frozen=None) -> (logp, entropy, score_norm, state_hidden)`.
    """

    def forward(params, rows, frozen=None):
        params = complete(params, frozen)
        hidden = model.hidden(params, rows)
        found = row_scores(model, params, rows, hidden, rows.generated_mask, temperature)
        return *found, take_positions(hidden, rows.state_pos)

    forward = sharding.on_mesh(forward, mesh)
    return jax.jit(forward, out_shardings=NamedSharding(mesh, PartitionSpec()))


def make_score_fn(
    model: PolicyModel,
    *,
    mesh: Mesh,
    micro_rows: int,
    temperature: float = 1.0,
    frozen: Params | None = None,
) -> Callable[[Params, Rows], Scores]:
    """A function that scores any number of packed rows, compiled once per row shape.

    Args:
      model: the model.
      mesh: rows are spread over its axes data and fsdp.
      micro_rows: rows that go through the model at a time; a multiple of data * fsdp.
      temperature: that of the rollouts, so that old and behaviour log-probs are comparable.
      frozen: base of the adapters that `params` are, or None.

    Returns:
      `score(params, rows) -> Scores`.
    """
    forward = jit_score(model, mesh=mesh, temperature=temperature)
    own = sharding.rows_of_process(mesh, micro_rows)

    def score(params: Params, rows: Rows) -> Scores:
        check_rows(model, rows)
        parts = []
        most = max(hosts.gather(rows.num_rows))
        for index in blocks(np.arange(rows.num_rows), len(own), most):
            micro = sharding.shard_rows(take_rows(rows, index, len(own)), mesh)
            parts.append((len(index), forward(params, micro, frozen)))
        # One read at the end: the device never waits for the host between micro-batches.
        parts = [[x[own[:count]] for x in jax.device_get(part)] for count, part in parts]
        return Scores(*(np.concatenate(x) for x in zip(*parts)))

    return score


def blocks(index: np.ndarray, size: int, most: int) -> Iterator[np.ndarray]:
    """Consecutive parts of at most `size`, as many as `most` indices make; the last may be empty.

    All processes of a run need equally many, because each part is a program on the whole mesh.
    """
    for start in range(0, most, size):
        yield index[start : start + size]
