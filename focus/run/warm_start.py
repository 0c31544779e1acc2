"""Where training starts: a policy that imitates a scripted, error-prone agent.

Made once and kept under a hash of everything that determines it: the parts of the config that
matter, the source of the modules that make it, and the versions of the libraries.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
import rich.progress
import safetensors.numpy

from focus.chat.template_chat import TemplateChat
from focus.chat.tokens import CHAT_FORMATS, Chat, train_tokenizer
from focus.context import ContextManager, cite_summary, summarize
from focus.formats import hf
from focus.learner import hosts, packing, sharding
from focus.learner.scoring import policy_model
from focus.learner.state import OptimizerConfig, init_state, make_optimizer
from focus.learner.update import SupervisedBatch, UpdateConfig, make_supervised_update
from focus.policy import model as models
from focus.run import experiment
from focus.tasks import scripted
from focus.tasks.base import Environment
from focus.tasks.deep_search import DeepSearch
from focus.types import Generation, Segment, State, Trajectory

# Whatever these say decides what a warm start is; a change of theirs makes a new one.
_SOURCES = (
    "run/warm_start.py",
    "context/base.py",
    "context/cite_summary.py",
    "context/full.py",
    "context/summarize.py",
    "learner/losses.py",
    "learner/packing.py",
    "learner/scoring.py",
    "learner/update.py",
    "learner/state.py",
    "policy/attention.py",
    "policy/blockwise.py",
    "policy/gated_delta.py",
    "policy/layers.py",
    "policy/logprobs.py",
    "policy/model.py",
    "policy/placement.py",
    "policy/qwen3_5.py",
    "policy/rounded.py",
    "chat/tokens.py",
    "policy/transformer.py",
    "tasks/deep_search.py",
    "tasks/facts.py",
    "tasks/scripted.py",
    "tasks/world.py",
)
_LIBRARIES = ("jax", "numpy", "optax", "tokenizers", "countryinfo", "bm25s")


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """What a run begins with.

    Attributes:
      chat: tokenizer and chat format, or chat template.
      params: parameters of the policy (NumPy).
      directory: where it is kept.
      made: whether it was made now; False if it was there.
    """

    chat: Chat | TemplateChat
    params: Any
    directory: Path
    made: bool

    def checksum(self) -> int:
        """CRC-32 of the parameters."""
        return functools.reduce(
            lambda crc, leaf: zlib.crc32(np.ascontiguousarray(leaf), crc),
            jax.tree.leaves(self.params),
            0,
        )


def fingerprint(config: ml_collections.ConfigDict) -> str:
    """Hash of everything that determines a warm start."""
    parts = {name: config[name].to_dict() for name in ("task", "model", "warm_start", "context")}
    parts["rows"] = [config.learner.max_nodes, config.learner.max_states]
    if config.context.manager != "full":
        parts["summary_tokens"] = config.rollout.max_summary_tokens
    parts["seed"] = config.seed if config.warm_start.seed is None else config.warm_start.seed
    parts["versions"] = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for name in _SOURCES:
        digest.update((Path(__file__).parent.parent / name).read_bytes())
    return digest.hexdigest()[:16]


def load_or_make(config: ml_collections.ConfigDict, env: Environment) -> WarmStart:
    """The warm start of a config, from the cache if it is there; or the model of `model.path`.

    Args:
      config: of the run.
      env: the environment to be learnt.

    Returns:
      WarmStart.

    Raises:
      ValueError: the task has no scripted agent, or files are missing or damaged.
    """
    if config.model.get("path"):
        return _from_directory(config, env)
    directory = experiment.cache_dir(config) / "warm_start" / fingerprint(config)
    if all(hosts.gather(directory.is_dir())):  # else all processes make it together
        chat, params = _read(directory, config)
        return WarmStart(chat, params, directory, made=False)
    if not isinstance(env, DeepSearch):
        raise ValueError(
            f"task {env.name!r} has no scripted agent to imitate; start from a checkpoint"
        )
    chat, params = make(config, env)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Written under another name first: a killed run must not leave half a warm start.
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".partial-"))
    chat.save(partial)
    safetensors.numpy.save_file(_flat(params), partial / "params.safetensors")
    try:
        os.rename(partial, directory)
    except OSError:  # another run or process was faster; both made the same
        shutil.rmtree(partial)
    return WarmStart(chat, params, directory, made=True)


def _from_directory(config: ml_collections.ConfigDict, env: Environment) -> WarmStart:
    path = Path(config.model.path)
    chat = experiment.read_chat(config, env)
    _, params = hf.load_checkpoint(path)  # float32, whatever is computed in
    return WarmStart(chat, jax.device_get(params), path, made=False)


def make(config: ml_collections.ConfigDict, env: DeepSearch) -> tuple[Chat, Any]:
    """Plays the scripted agent, trains a tokenizer on its episodes and a policy to imitate it.

    Most episodes are played in invented worlds, where names have to be copied from what was
    read because no fact can be known.

    Returns:
      Chat and parameters (NumPy).
    """
    w = config.warm_start
    seed = config.seed if w.seed is None else w.seed
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
    shares = [w.real_fraction] + [(1 - w.real_fraction) / w.worlds] * w.worlds
    demonstrations = list(
        scripted.demonstrations(
            [env, *worlds],
            w.episodes,
            seed,
            weights=shares,
            error_rates=scripted.ErrorRates().scaled(w.error_scale),
        )
    )
    chat_format = CHAT_FORMATS[config.model.chat_format]
    tokenizer = train_tokenizer(
        _texts(demonstrations, cites=config.context.manager == "cite_summary"),
        vocab_size=config.model.vocab_size,
        special_tokens=chat_format.special_tokens,
    )
    chat = Chat(tokenizer, chat_format)
    contexts = experiment.make_contexts(config, chat)
    trajectories = [
        to_trajectory(demonstration, str(i), chat, contexts)
        for i, demonstration in enumerate(demonstrations)
    ]
    # Long episodes are those that go in circles; none of the right ones is lost.
    trajectories = [t for t in trajectories if _longest(t) <= w.row_length]
    batches = _batches(config, trajectories, seed)
    params = _imitate(config, batches, seed)
    return chat, params


def to_trajectory(
    demonstration: scripted.Demonstration, name: str, chat: Chat, contexts: ContextManager
) -> Trajectory:
    """A demonstration as the tokens that the agent loop would have made of it.

    Args:
      demonstration: one episode.
      name: id of the trajectory.
      chat: encodes the actions.
      contexts: decides what the policy sees, and when it has to summarise.

    Returns:
      A trajectory without environment states; log-probs are 0.
    """

    def generation(kind, prompt_ids, text, span):
        output_ids = chat.encode_text(text) + (chat.end_of_turn_id,)
        return Generation(kind, prompt_ids, output_ids, (0.0,) * len(output_ids), "stop", span=span)

    d = demonstration
    context = contexts.start("", d.task.prompt)
    states = [State(None, None, context.prompt_ids, 0)]
    segments = []
    for turn, (action, observation) in enumerate(zip(d.actions, d.observations)):
        generations = [generation("act", context.prompt_ids, action, context.span)]
        context = contexts.observe(context, generations[0].output_ids, observation)
        last = turn + 1 == len(d.actions)
        cites = None
        if contexts.closing if last else contexts.needs_compaction(context):
            known = turn if last else turn + 1
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


def _longest(trajectory: Trajectory) -> int:
    """Tokens of the longest sequence that the policy reads and writes."""
    generations = (g for segment in trajectory.segments for g in segment.generations)
    return max(len(g.prompt_ids) + len(g.output_ids) for g in generations)


def _texts(demonstrations: Sequence[scripted.Demonstration], *, cites: bool) -> Iterator[str]:
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


def _imitate(config, batches: Iterator[SupervisedBatch], seed: int) -> Any:
    w = config.warm_start
    model = experiment.model_config(config)
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    optimizer = make_optimizer(
        OptimizerConfig(
            learning_rate=w.learning_rate,
            schedule="cosine",
            warmup_steps=min(20, w.steps // 2),
            total_steps=w.steps,
            weight_decay=0.01,
        )
    )

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
    columns = (
        rich.progress.TextColumn("warm start"),
        rich.progress.BarColumn(bar_width=20),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("loss {task.fields[loss]:.3f}"),
        rich.progress.TimeRemainingColumn(),
    )
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=w.steps, loss=float("nan"))
        for step in range(w.steps):
            state, metrics = update(state, next(batches))
            bar.update(task, advance=1, loss=metrics["loss"])
            if not console.is_terminal and (step + 1) % max(w.steps // 5, 1) == 0:
                console.print(f"warm start {step + 1}/{w.steps}  loss {metrics['loss']:.3f}")
    return jax.device_get(hosts.local(state.params))


def _flat(params: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {sharding.path_name(path): np.asarray(leaf) for path, leaf in leaves}


def _read(directory: Path, config: ml_collections.ConfigDict) -> tuple[Chat, Any]:
    try:
        flat = safetensors.numpy.load_file(directory / "params.safetensors")
        chat = Chat.load(directory)
    except Exception as error:
        raise ValueError(
            f"the warm start in {directory} cannot be read ({error}); delete that directory and "
            "it is made again"
        ) from error
    shapes = models.param_shapes(experiment.model_config(config))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(
        shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    return chat, treedef.unflatten([flat[sharding.path_name(path)] for path, _ in leaves])
