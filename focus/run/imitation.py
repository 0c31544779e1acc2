"""How a warm start is made: a policy that imitates demonstrations of a task.

All of it decides what comes out: `focus.run.warm_start` names what is kept after this module's
source, and after the programs that `programs` describes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
import optax

from focus.chat.tokens import CHAT_FORMATS, Chat, train_tokenizer
from focus.context import ContextManager, cite_summary, summarize
from focus.learner import hosts, packing, sharding
from focus.learner.scoring import policy_model
from focus.learner.state import OptimizerConfig, init_state, make_optimizer
from focus.learner.update import (
    SupervisedBatch,
    UpdateConfig,
    make_supervised_loss,
    make_supervised_update,
)
from focus.policy import model as models
from focus.run import experiment
from focus.tasks import scripted
from focus.tasks.base import Demonstration, Environment
from focus.tasks.deep_search import DeepSearch
from focus.terminal import Start
from focus.types import Generation, Segment, State, Trajectory


def make(config: ml_collections.ConfigDict, env: Environment, start: Start) -> tuple[Chat, Any]:
    """Plays demonstrations, trains a tokenizer on them and a policy to imitate them.

    Args:
      config: of the run.
      env: `DeepSearch`, or a `DemonstratedEnvironment`.
      start: is told how far it is.

    Returns:
      Chat and parameters (NumPy).

    Raises:
      ValueError: there is nothing to imitate.
    """
    w = config.warm_start
    start.update(f"playing {w.episodes} demonstrations", milestone=True)
    demonstrations = list(demonstrations_of(config, env))
    if not demonstrations:
        raise ValueError(
            f"task {env.name!r} gave no demonstrations; warm_start.episodes must be > 0"
        )
    chat_format = CHAT_FORMATS[config.model.chat_format]
    start.update("training a tokenizer")
    tokenizer = train_tokenizer(
        _texts(demonstrations, env.system_prompt(), cites=config.context.manager == "cite_summary"),
        vocab_size=config.model.vocab_size,
        special_tokens=chat_format.special_tokens,
    )
    chat = Chat(tokenizer, chat_format)
    contexts = experiment.make_contexts(config, chat)
    start.update("encoding demonstrations")
    trajectories = [
        to_trajectory(demonstration, str(i), chat, contexts, env.system_prompt())
        for i, demonstration in enumerate(demonstrations)
    ]
    # Long episodes are those that go in circles; none of the right ones is lost.
    trajectories = [t for t in trajectories if longest(t) <= w.row_length]
    start.update("packing them into rows")
    batches = _batches(config, trajectories, seed_of(config))
    params = _imitate(config, batches, seed_of(config), start)
    return chat, params


def seed_of(config: ml_collections.ConfigDict) -> int:
    """The seed of the warm start: `warm_start.seed`, or the run's."""
    return config.seed if config.warm_start.seed is None else config.warm_start.seed


def demonstrations_of(
    config: ml_collections.ConfigDict, env: Environment
) -> Iterable[Demonstration]:
    """Episodes of the task's scripted player.

    Those of deep search are mostly played in invented worlds, where names have to be copied from
    what was read because no fact can be known.
    """
    w, seed = config.warm_start, seed_of(config)
    if not isinstance(env, DeepSearch):
        return env.demonstrations(w.episodes, seed)
    worlds = scripted.invented_envs(
        w.worlds,
        seed,
        world=w.world,
        provinces=config.task.provinces,
        lookalikes=config.task.lookalikes,
        hops=tuple(config.task.hops),
        max_turns=config.task.max_turns,
        snippet_words=config.task.snippet_words,
    )
    return scripted.demonstrations(
        [env, *worlds],
        w.episodes,
        seed,
        weights=[w.real_fraction] + [(1 - w.real_fraction) / w.worlds] * w.worlds,
        error_rates=scripted.ErrorRates().scaled(w.error_scale),
    )


def to_trajectory(
    demonstration: Demonstration,
    name: str,
    chat: Chat,
    contexts: ContextManager,
    system: str = "",
) -> Trajectory:
    """A demonstration as the tokens that the agent loop would have made of it.

    Args:
      demonstration: one episode.
      name: id of the trajectory.
      chat: encodes the actions.
      contexts: decides what the policy sees, and when it has to summarise.
      system: the environment's system message.

    Returns:
      A trajectory without environment states; log-probs are 0.

    Raises:
      ValueError: a context has to be compacted, and there are no notes.
    """

    def generation(kind, prompt_ids, text, span):
        output_ids = chat.encode_text(text) + (chat.end_of_turn_id,)
        return Generation(kind, prompt_ids, output_ids, (0.0,) * len(output_ids), "stop", span=span)

    d = demonstration
    context = contexts.start(system, d.task.prompt)
    states = [State(None, None, context.prompt_ids, 0)]
    segments = []
    for turn, (action, observation) in enumerate(zip(d.actions, d.observations)):
        generations = [generation("act", context.prompt_ids, action, context.span)]
        context = contexts.observe(context, generations[0].output_ids, observation)
        last = turn + 1 == len(d.actions)
        cites = None
        if contexts.closing if last else contexts.needs_compaction(context):
            known = turn if last else turn + 1
            if not d.notes:
                raise ValueError(
                    f"demonstrations of task {d.task.id} have no notes to summarise with, and "
                    "context.manager compacts; use context.manager='full', or let the task's "
                    "demonstrations write notes"
                )
            summary = contexts.phrase(context, d.notes[known], d.sources[known])
            prompt_ids = contexts.summary_prompt(context)
            generations.append(generation("summary", prompt_ids, summary, context.span))
            cites = contexts.citations(context, summary)
            context = context if last else contexts.compact(context, summary)
        segments.append(Segment(tuple(generations), action, observation, cites=cites))
        prompt_ids = () if last else context.prompt_ids
        states.append(State(None, None, prompt_ids, turn + 1, context.span))
    return Trajectory(
        id=name,
        task_id=d.task.id,
        group_id=0,
        states=tuple(states),
        segments=tuple(segments),
        outcome=d.outcome,
        success=d.outcome == 1.0,
        end="terminal",
    )


def longest(trajectory: Trajectory) -> int:
    """Tokens of the longest sequence that the policy reads and writes."""
    generations = (g for segment in trajectory.segments for g in segment.generations)
    return max(len(g.prompt_ids) + len(g.output_ids) for g in generations)


def _texts(demonstrations: Sequence[Demonstration], system: str, *, cites: bool) -> Iterator[str]:
    if system:
        yield system
    for d in demonstrations:
        yield d.task.prompt
        yield from d.actions
        yield from d.observations
        yield from d.notes
        if cites:
            yield cite_summary.EXAMPLE
    yield from (summarize.INSTRUCTION, summarize.HEADING)
    if cites:
        yield cite_summary.INSTRUCTION


def _batches(config, trajectories, seed: int) -> Iterator[SupervisedBatch]:
    """Endless minibatches. Episodes are packed some hundred at a time: packing is quadratic."""
    w, chunk = config.warm_start, 256
    parts = [
        packing.pack_trajectories(
            trajectories[i : i + chunk],
            row_length=w.row_length,
            max_nodes=config.learner.max_nodes,
            max_states=config.learner.max_states,
            share_prefixes=models.shares_prefixes(experiment.model_config(config)),
        ).rows
        for i in range(0, len(trajectories), chunk)
    ]
    rows = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(rows.num_rows)
        for i in range(0, len(order) - w.batch_rows + 1, w.batch_rows):
            own = hosts.deal(order[i : i + w.batch_rows])
            batch = packing.take_rows(rows, np.array(own), len(own))
            weights = np.where(batch.generated_mask, 1.0, w.observation_weight)
            yield SupervisedBatch(batch, batch.parent >= 0, weights.astype(np.float32))


def _optimizer(config: ml_collections.ConfigDict) -> optax.GradientTransformation:
    w = config.warm_start
    return make_optimizer(
        OptimizerConfig(
            learning_rate=w.learning_rate,
            schedule="cosine",
            warmup_steps=min(20, w.steps // 2),
            total_steps=w.steps,
            weight_decay=0.01,
        ),
        models.logical_axes(experiment.model_config(config)),
    )


def _imitate(config, batches: Iterator[SupervisedBatch], seed: int, start: Start) -> Any:
    w = config.warm_start
    model = experiment.model_config(config)
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    optimizer = _optimizer(config)

    def init(key):
        return init_state(models.init_params(model, key), optimizer)

    state, shardings = sharding.init_sharded(init, jax.random.key(seed), mesh=mesh)
    update = make_supervised_update(
        policy_model(model, products=w.products),
        optimizer,
        UpdateConfig(micro_rows=w.batch_rows, seed=seed),
        mesh=mesh,
        shardings=shardings,
        most_tokens=True,
    )
    start.update("compiling the update")
    for step in range(w.steps):
        state, metrics = update(state, next(batches))
        start.update(
            f"{step + 1}/{w.steps}  loss {metrics['loss']:.3f}",
            milestone=(step + 1) % max(w.steps // 5, 1) == 0,
        )
    return jax.device_get(hosts.local(state.params))


def programs(config: ml_collections.ConfigDict) -> str:
    """What devices compute for a warm start, as text that names no file, mesh or machine.

    First parameters, the gradient of a micro-batch and the optimiser step, as JAX traces them
    from shapes: a change of the code that leaves them as they are leaves the text as it is.
    """
    w, model, optimizer = config.warm_start, experiment.model_config(config), _optimizer(config)
    loss = make_supervised_loss(policy_model(model, products=w.products), most_tokens=True)
    rows = packing.empty_rows(
        w.batch_rows, w.row_length, config.learner.max_nodes, config.learner.max_states
    )
    tokens = np.zeros(rows.tokens.shape, np.float32)
    batch = SupervisedBatch(rows, tokens.astype(bool), tokens)

    def init(key):
        return init_state(models.init_params(model, key), optimizer)

    def step(state, batch, denominator):
        value_of = jax.value_and_grad(loss, has_aux=True)
        (value, metrics), gradient = value_of(state.params, batch, denominator)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        return value, metrics, optax.apply_updates(state.params, updates), opt_state

    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(init, key)
    traced = jax.make_jaxpr(init)(key), jax.make_jaxpr(step)(state, batch, np.float32(1))
    # Functions within are printed with their addresses.
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(map(str, traced)))
