"""From a config to the parts of a run, with everything checked before work is spent."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_collections
from jax.sharding import Mesh

from focus.context import CONTEXT_MANAGERS, ContextManager
from focus.credit.registry import ESTIMATORS, check_hparams
from focus.critic.head import CriticConfig
from focus.engines import ENGINES, PUSHES
from focus.learner import hosts
from focus.learner.backbone import BackboneCritic, BackboneOptions
from focus.learner.channels import read_channels
from focus.learner.critic import CriticLearner, CriticOptions
from focus.learner.losses import PolicyLossConfig
from focus.learner.scoring import PolicyModel
from focus.learner.state import OptimizerConfig
from focus.learner.update import UpdateConfig
from focus.policy import hf, tool_calls
from focus.policy import model as models
from focus.policy.chat import TemplateChat, load_chat
from focus.policy.lora import LoraConfig, adapter_axes, adapter_shapes
from focus.policy.rounded import check_format
from focus.policy.tokens import Chat
from focus.rollout import (
    Agent,
    Engine,
    RetryPolicy,
    SamplingParams,
    StepConfig,
    validate_step,
)
from focus.rollout.embedded import num_devices
from focus.rollout.staleness import MIXED_VERSIONS
from focus.rollout.step import NO_BRANCHES
from focus.rollout.tools import ToolCalls
from focus.tasks.base import Environment
from focus.tasks.deep_search import make_deep_search

# name -> factory(**options)
TASKS = {"deep_search": make_deep_search}

# What a resumed run may change: how long it goes on, and what is written down.
MAY_DIFFER = (
    "steps",
    "cache_dir",
    "rollout.max_logp_difference",
    "evaluate.every",
    "checkpoint",
    "log",
)

# Sizes and counts. Those of a model come from `model.path` where there is one.
_AT_LEAST_ONE = (
    "task.max_turns",
    *(f"model.{size}" for size in ("vocab_size", "d_model", "num_layers", "num_heads")),
    *(f"model.{size}" for size in ("num_kv_heads", "head_dim", "d_ff", "max_context")),
    "rollout.episode_tokens",
    "learner.row_length",
)

VALUES_FROM = ("before", "crossfit", "after")
UNCERTAINTIES = ("ensemble", "posterior")
BACKBONES = ("policy", "own")
ON_FAILURE = ("wait", "proceed")


def _choose(name: str, value: str, choices) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def validate(config: ml_collections.ConfigDict, *, has_servers: bool = True) -> None:
    """Checks what can be known without building anything.

    Args:
      config: of the run.
      has_servers: False for a plan, which may be made before there are servers to name, and on a
        machine with other devices.

    Raises:
      ValueError: names the key, its value, and what would be right.
    """
    c = config
    _choose("task.name", c.task.name, TASKS)
    _choose("rollout.engine", c.rollout.engine, ENGINES)
    _choose("rollout.push", c.rollout.push, PUSHES)
    _choose("rollout.mixed_versions", c.rollout.mixed_versions, MIXED_VERSIONS)
    _choose("rollout.on_failure", c.rollout.on_failure, ON_FAILURE)
    _choose("context.manager", c.context.manager, CONTEXT_MANAGERS)
    _choose("credit.estimator", c.credit.estimator, ESTIMATORS)
    _choose("critic.values_from", c.critic.values_from, VALUES_FROM)
    _choose("critic.uncertainty", c.critic.uncertainty, UNCERTAINTIES)
    _choose("critic.backbone", c.critic.backbone, BACKBONES)
    if c.critic.backbone == "own" and c.critic.values_from == "crossfit":
        raise ValueError(
            "critic.values_from='crossfit' needs critic.backbone='policy', got 'own': members that "
            "never train on a task would share a backbone that does; use values_from='before'"
        )
    if calls := _tool_calls(c):
        _choose("chat.tool_calls", calls, tool_calls.FORMATS)
        if c.task.to_dict().get("instructions"):
            raise ValueError(
                f"task.instructions explains calls as plain text, and chat.tool_calls={calls!r} "
                "wants them in that format; set task.instructions=False, or chat.tool_calls=''"
            )
    for key in _AT_LEAST_ONE:
        part, name = key.split(".")
        if (value := c[part].get(name, 1)) < 1:
            raise ValueError(f"{key} must be >= 1, got {value}")
    for axis, size in c.mesh.items():
        if size < 1 and size != -1:
            raise ValueError(f"mesh.{axis} must be >= 1, or -1 for what is left; got {size}")
    if c.steps < 1:
        raise ValueError(f"steps must be >= 1, got {c.steps}")
    if c.evaluate.every < 0 or c.checkpoint.every < 1:
        raise ValueError(
            f"evaluate.every={c.evaluate.every} and checkpoint.every={c.checkpoint.every} are "
            "numbers of steps, at least 0 (no evaluation on the way) and at least 1"
        )
    make_contexts(c, None)  # refuses limits and citations that cannot be
    model, lora = model_config(c), lora_config(c)
    if lora is not None:
        adapter_shapes(model, lora)  # refuses what this model cannot have
    if c.rollout.temperature <= 0 or c.rollout.top_p != 1 or c.rollout.top_k != -1:
        raise ValueError(
            f"rollout.temperature={c.rollout.temperature}, rollout.top_p={c.rollout.top_p} and "
            f"rollout.top_k={c.rollout.top_k}: what is trained has to be sampled from the whole "
            "distribution that the loss differentiates, temperature > 0, top_p=1 and top_k=-1. "
            "Tokens that were cut away would need each token's kept set, held fixed in the loss, "
            "and their gradient is not 0 on average without it; lower the temperature instead"
        )
    if c.rollout.async_depth < 0:
        raise ValueError(f"rollout.async_depth must be >= 0, got {c.rollout.async_depth}")
    if has_servers and (c.rollout.engine == "sglang") != bool(c.rollout.urls):
        raise ValueError(
            f"rollout.engine={c.rollout.engine!r} does not go with rollout.urls={c.rollout.urls}: "
            "sglang needs the URL of every server, the embedded engine is in this process"
        )
    served = c.rollout.engine == "sglang" or not has_servers
    if c.rollout.push == "adapter" and not (lora and served):
        raise ValueError(
            f"rollout.push='adapter' does not go with learner.lora.rank={c.learner.lora.rank} and "
            f"rollout.engine={c.rollout.engine!r}: it is for servers of a run that trains "
            "adapters; set learner.lora.rank and rollout.engine='sglang', or rollout.push='weights'"
        )
    if c.rollout.engine == "embedded" and has_servers:
        num_devices(c.rollout.devices, c.rollout.max_running)
    loss_config(c)
    update_config(c)
    if c.learner.logprob_chunk < 0:
        raise ValueError(
            f"learner.logprob_chunk must be >= 0 (0 chooses by size), got {c.learner.logprob_chunk}"
        )
    if "warm_start" in c and c.warm_start.products is not None:
        check_format(c.warm_start.products)
    if c.model.max_context > c.learner.row_length:
        raise ValueError(
            f"learner.row_length {c.learner.row_length} is shorter than model.max_context "
            f"{c.model.max_context}; make it at least as long"
        )
    plans_with_value = c.branching.rule not in (NO_BRANCHES, "uniform", "random")
    if plans_with_value and not c.critic.enabled:
        raise ValueError(f"{c.branching.rule} reads the critic's values; set critic.enabled=True")
    estimator_channels(c)
    share = c.budget // hosts.count()
    if hosts.count() > 1 and share < c.rollout.episode_tokens:
        raise ValueError(
            f"budget={c.budget} shared by {hosts.count()} processes leaves {share} tokens each, "
            f"less than one predicted episode of {c.rollout.episode_tokens}; raise the budget or "
            "use fewer processes"
        )
    validate_step(
        step_config(c),
        estimator=c.credit.estimator,
        episode_tokens=c.rollout.episode_tokens,
    )


def remarks(c: ml_collections.ConfigDict) -> list[str]:
    """What is allowed and should be known before a run: sentences, said once at its start."""
    if c.rollout.async_depth and not loss_config(c).corrects:
        return [
            f"rollout.async_depth={c.rollout.async_depth} plays rollouts with weights that are "
            "older than those that are trained, and nothing corrects for it: set "
            "learner.importance_cap or learner.importance_range"
        ]
    return []


def estimator_hparams(c: ml_collections.ConfigDict) -> dict[str, Any]:
    """Hyperparameters of the run's estimator that differ from its own defaults.

    `credit.discount`, `lambda_`, `lambda_mode` and `truncation` are those of "focus" and "ppo".
    The others keep the defaults of their papers; `credit.options`, "name=value ..." with Python
    literals or words as values, overrides those of any.

    Raises:
      ValueError: an option without a value, or one that is given twice.
    """
    takes = ESTIMATORS[c.credit.estimator].hparams
    hparams: dict[str, Any] = {}
    if "truncation" in takes:
        shared = ("discount", "lambda_", "lambda_mode", "truncation")
        hparams = {name: c.credit[name] for name in shared if name in takes}
    if "fork_rows" in takes:
        hparams["fork_rows"] = "suffix"  # a branch holds what it played itself
    options: dict[str, Any] = {}
    for option in c.credit.options.split():
        name, equals, value = option.partition("=")
        if not (name and equals and value):
            raise ValueError(f"credit.options={c.credit.options!r}: write {option!r} as name=value")
        if name in options:
            raise ValueError(f"credit.options={c.credit.options!r} gives {name} twice")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            options[name] = value  # a word
    return hparams | options


def estimator_channels(c: ml_collections.ConfigDict) -> frozenset[str]:
    """Channels that the run's estimator reads.

    Raises:
      ValueError: the run does not produce one of them, or an option is wrong.
    """
    there = {
        "critic": c.critic.enabled,
        "branches": c.branching.rule != NO_BRANCHES,
        "citations": c.context.manager == "cite_summary",
    }
    parts = [part for part, is_there in there.items() if is_there]
    if (kind := ESTIMATORS[c.credit.estimator].kind) != "estimator":
        raise ValueError(
            f"credit.estimator: {c.credit.estimator} is a {kind} and gives no advantages; "
            "`python -m focus.credit` lists the estimators"
        )
    check_hparams(c.credit.estimator, hparams := estimator_hparams(c), user="credit.options: ")
    return read_channels(c.credit.estimator, hparams, parts)


def step_config(c: ml_collections.ConfigDict) -> StepConfig:
    """How a step spends its budget."""
    return StepConfig(
        budget=c.budget,
        group_size=c.rollout.group_size,
        base_fraction=c.branching.base_fraction,
        rule=c.branching.rule,
        rounds=c.branching.rounds,
        ks=tuple(c.branching.ks),
        max_per_state=c.branching.max_per_state,
        refine=c.critic.refine,
        concurrency=c.rollout.max_running,
        state_bucket=c.learner.state_bucket,
        proceed_fraction=(
            c.rollout.proceed_fraction if c.rollout.on_failure == "proceed" else None
        ),
    )


def make_env(c: ml_collections.ConfigDict) -> Environment:
    """The environment of `config.task`."""
    options = c.task.to_dict()
    env = TASKS[options.pop("name")](**options)
    return ToolCalls(env, _tool_calls(c)) if _tool_calls(c) else env


def _tool_calls(c: ml_collections.ConfigDict) -> str:
    """Format of tool calls; "" if the environment reads plain text."""
    return c.chat.tool_calls if c.model.get("path") else ""


def read_chat(c: ml_collections.ConfigDict, env: Environment) -> Chat | TemplateChat:
    """The chat of the model in `model.path`, in which the environment's tools are explained.

    Raises:
      ValueError: it cannot be read, spoken turn by turn or read by the model's embeddings.
    """
    chat = load_chat(
        c.model.path,
        pad_token=c.chat.pad_token or None,
        observation_role=c.chat.observation_role,
        keep_thinking=c.chat.keep_thinking,
        variables={"tools": list(env.tools())} if _tool_calls(c) else None,
    )
    chat.check_model(model_config(c).vocab_size)
    return chat


def model_config(c: ml_collections.ConfigDict) -> models.Config:
    """Shape of the policy; `model.family` is "dense" where it is not given.

    With `model.path` the directory says what the model is, and the config how it is run.
    """
    options = c.model.to_dict()
    options.pop("chat_format", None)
    path = options.pop("path", "")
    if path:
        model = hf.read_config(path)
        if options["max_context"] > model.max_context:
            raise ValueError(
                f"model.max_context {options['max_context']} is more than the "
                f"{model.max_context} that the model in {path} was made for; lower it"
            )
        return dataclasses.replace(model, **options)
    return models.make_config(options.pop("family", "dense"), **options)


def lora_config(c: ml_collections.ConfigDict) -> LoraConfig | None:
    """The adapters that are trained; None: all parameters of the policy are.

    Raises:
      ValueError: a rank below 0, or no targets.
    """
    options = c.learner.lora.to_dict()
    if not options["rank"]:
        return None
    targets = options.pop("targets")
    return LoraConfig(**options, targets=(targets,) if isinstance(targets, str) else tuple(targets))


def trained_axes(c: ml_collections.ConfigDict) -> Any:
    """Names of the axes of all that is trained: the policy's parameters, or its adapters."""
    model, lora = model_config(c), lora_config(c)
    return models.logical_axes(model) if lora is None else adapter_axes(model, lora)


def make_contexts(
    c: ml_collections.ConfigDict, chat: Chat | TemplateChat | None, *, closing: bool = True
) -> ContextManager:
    """The context manager of `config.context`.

    Args:
      c: the config.
      chat: encodes messages; None where the manager only has to be possible.
      closing: whether a manager that cites asks for a last summary, which only credit reads.
    """
    options: dict[str, Any] = {}
    if c.context.manager != "full":
        options |= {"limit": c.context.limit, "summary_tokens": c.rollout.max_summary_tokens}
    if c.context.manager == "cite_summary":
        options |= {"citations": tuple(c.context.citations), "closing": closing}
    return CONTEXT_MANAGERS[c.context.manager](chat, **options)


def make_agent(
    c: ml_collections.ConfigDict,
    env: Environment,
    chat: Chat | TemplateChat,
    engine: Engine,
    *,
    temperature: float,
    run_seed: int,
    retry: RetryPolicy,
    closing: bool = True,
) -> Agent:
    """The player of tasks; `retry` is what it does when the engine fails.

    `closing` is that of `make_contexts`.
    """
    return Agent(
        env=env,
        contexts=make_contexts(c, chat, closing=closing),
        chat=chat,
        engine=engine,
        sampling=SamplingParams(
            max_new_tokens=c.rollout.max_turn_tokens,
            temperature=temperature,
            top_p=c.rollout.top_p,
            top_k=c.rollout.top_k,
            stop=tuple(c.rollout.stop),
        ),
        retry=retry,
        run_seed=run_seed,
    )


def make_critic(
    c: ml_collections.ConfigDict,
    model: models.Config,
    policy: PolicyModel,
    params: Any,
    *,
    score: Callable | None,
    mesh: Mesh,
) -> CriticLearner | BackboneCritic:
    """The critic of `config.critic`.

    Args:
      c: of the run.
      model: shape of the policy.
      policy: its functions.
      params: its first parameters; a backbone of the critic's own starts from them.
      score: as from `make_score_fn`; None where no features are computed.
      mesh: the mesh.
    """
    shape = critic_config(c, model)
    if c.critic.backbone == "own":
        return BackboneCritic(shape, backbone_options(c), policy, params, mesh=mesh)
    return CriticLearner(shape, critic_options(c), score, mesh=mesh)


def critic_config(c: ml_collections.ConfigDict, model: models.Config) -> CriticConfig:
    """Shape of the critic of a policy."""
    return CriticConfig(
        feature_dim=model.d_model,
        num_members=c.critic.members,
        hidden_dim=c.critic.width,
        prior_scale=c.critic.prior_scale,
        value=c.critic.value,
        cost_scale=float(c.rollout.episode_tokens),
        num_folds=2 if c.critic.values_from == "crossfit" else 1,
        bootstrap_seed=c.seed,
    )


def critic_options(c: ml_collections.ConfigDict) -> CriticOptions:
    """How a critic that reads the policy's hidden states learns."""
    return CriticOptions(
        learning_rate=c.critic.learning_rate,
        epochs=c.critic.epochs,
        capacity=c.critic.capacity,
        replay_steps=c.critic.replay_steps,
        uncertainty=c.critic.uncertainty,
    )


def backbone_options(c: ml_collections.ConfigDict) -> BackboneOptions:
    """How a critic with a backbone of its own learns."""
    return BackboneOptions(
        learning_rate=c.critic.learning_rate,
        backbone_learning_rate=c.critic.backbone_learning_rate,
        epochs=c.critic.epochs,
        minibatches=c.learner.minibatches,
        micro_rows=c.learner.micro_rows,
        uncertainty=c.critic.uncertainty,
    )


def optimizer_config(c: ml_collections.ConfigDict) -> OptimizerConfig:
    """The policy's optimiser; its schedule counts optimiser steps, the config's training steps."""
    idle_steps = c.critic.warmup_steps if c.critic.enabled else 0
    training_steps = c.learner.schedule_steps - idle_steps
    return OptimizerConfig(
        learning_rate=c.learner.learning_rate,
        schedule=c.learner.schedule,
        total_steps=training_steps * c.learner.minibatches * c.learner.epochs,
        warmup_steps=c.learner.warmup_steps,
        weight_decay=c.learner.weight_decay,
        max_grad_norm=c.learner.max_grad_norm,
    )


def _pair(values) -> tuple[float, float] | None:
    """A config's (low, high); an empty one is None."""
    return tuple(values) or None


def loss_config(c: ml_collections.ConfigDict) -> PolicyLossConfig:
    """The policy's loss."""
    return PolicyLossConfig(
        clip_low=c.learner.clip_low,
        clip_high=c.learner.clip_high,
        importance_level=c.learner.importance_level,
        importance_cap=c.learner.importance_cap,
        importance_range=_pair(c.learner.importance_range),
        importance_rejected=c.learner.importance_rejected,
        kl_coefficient=c.learner.kl_coefficient,
        entropy_coefficient=c.learner.entropy_coefficient,
    )


def update_config(c: ml_collections.ConfigDict) -> UpdateConfig:
    """How a step's rows are split into optimiser steps."""
    return UpdateConfig(
        micro_rows=c.learner.micro_rows,
        minibatches=c.learner.minibatches,
        epochs=c.learner.epochs,
        temperature=c.rollout.temperature,
        seed=c.seed,
    )


def cache_dir(c: ml_collections.ConfigDict) -> Path:
    """Where warm starts are kept: `config.cache_dir`, $FOCUS_CACHE or ~/.cache/focus."""
    chosen = c.cache_dir or os.environ.get("FOCUS_CACHE") or Path.home() / ".cache" / "focus"
    return Path(chosen)
