"""From a config to the parts of a run, with everything checked before work is spent."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
from pathlib import Path
from typing import Any

import ml_collections
from jax.sharding import Mesh

from focus.branching.acquisition import RULES
from focus.chat import tool_calls
from focus.chat.template_chat import TemplateChat, load_chat
from focus.chat.tokens import Chat
from focus.context import CONTEXT_MANAGERS, ContextManager
from focus.credit.registry import ESTIMATORS, check_hparams
from focus.engine import Engine, SamplingParams
from focus.engine.embedded.engine import num_devices
from focus.formats import hf
from focus.learner import hosts, sharding
from focus.learner.signals import read_channels
from focus.policy import model as models
from focus.policy.lora import LoraConfig, adapter_axes, adapter_shapes
from focus.policy.rounded import check_format
from focus.rollout import Agent, RetryPolicy, StepConfig, ToolLimits, Tools, validate_step
from focus.rollout.belief import WEIGHTS
from focus.rollout.staleness import MIXED_VERSIONS
from focus.rollout.step import NO_BRANCHES
from focus.rollout.tool_environment import ToolCalls
from focus.run import learning, ranges
from focus.run.backends import ENGINES, PUSHES
from focus.run.spelling import did_you_mean
from focus.tasks.base import Environment, Task
from focus.tasks.registry import TASKS, task_options

# What a resumed run may change: how long it goes on, and what is written down.
MAY_DIFFER = (
    "steps",
    "cache_dir",
    "plugins",  # where they lie; what they say may not: focus.run.plugins
    "rollout.max_logp_difference",
    "rollout.tools",
    "evaluate.every",
    "checkpoint",
    "log",
)

VALUES_FROM = ("before", "crossfit", "after")
UNCERTAINTIES = ("ensemble", "posterior")
BACKBONES = ("policy", "own")
COVARIANCES = ("fitted", "ensemble")
# Rules that a run without a critic may use.
WITHOUT_VALUES = ("uniform", "random", "policy_entropy", "at2po", "appo", "carl", "spo")
# Channels of acquisition rules that nothing in a run fills.
UNFILLED = {"score": "a process reward model or judge"}
ON_FAILURE = ("wait", "proceed")


def _choose(name: str, value: str, choices) -> None:
    if value not in choices:
        hint = did_you_mean(value, choices)
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}{hint}")


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
    task_options(c.task.to_dict())
    ranges.check(c)
    _choose("rollout.engine", c.rollout.engine, ENGINES)
    _choose("rollout.push", c.rollout.push, PUSHES)
    _choose("rollout.mixed_versions", c.rollout.mixed_versions, MIXED_VERSIONS)
    _choose("rollout.on_failure", c.rollout.on_failure, ON_FAILURE)
    _choose("context.manager", c.context.manager, CONTEXT_MANAGERS)
    _choose("credit.estimator", c.credit.estimator, ESTIMATORS)
    _choose("critic.values_from", c.critic.values_from, VALUES_FROM)
    _choose("critic.uncertainty", c.critic.uncertainty, UNCERTAINTIES)
    _choose("critic.backbone", c.critic.backbone, BACKBONES)
    _choose("critic.covariance", c.critic.covariance, COVARIANCES)
    _choose("branching.weight", c.branching.weight, WEIGHTS)
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
    _check_contexts(c)
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
    learning.loss_config(c)
    learning.update_config(c)
    learning.optimizer_config(c)
    if c.critic.enabled:
        learning.critic_config(c, model)
    if has_servers:
        make_mesh(c, model)
    if "warm_start" in c and c.warm_start.products is not None:
        check_format(c.warm_start.products)
    if c.model.max_context > c.learner.row_length:
        raise ValueError(
            f"learner.row_length {c.learner.row_length} is shorter than model.max_context "
            f"{c.model.max_context}; make it at least as long"
        )
    rule = RULES.get(c.branching.rule)
    for channel in () if rule is None else rule.channels:
        if channel in UNFILLED:
            raise ValueError(
                f"branching.rule={c.branching.rule!r} reads {channel!r} of {UNFILLED[channel]}, "
                "which a run has not; choose another rule"
            )
    if c.critic.enabled and c.critic.pretrain_episodes:
        _check_pretraining(c)
    plans_with_value = c.branching.rule not in (NO_BRANCHES, *WITHOUT_VALUES)
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
    tool_limits(c)
    validate_step(
        step_config(c),
        estimator=c.credit.estimator,
        episode_tokens=c.rollout.episode_tokens,
    )


def notices(c: ml_collections.ConfigDict) -> tuple[str, ...]:
    """What is allowed, and should not go unsaid when a run starts."""
    found = []
    if c.rollout.async_depth and not learning.loss_config(c).corrects:
        found.append(
            f"rollout.async_depth={c.rollout.async_depth} trains on tokens of older weights, and "
            "nothing corrects for it: learner.importance_cap and learner.importance_range are off"
        )
    return tuple(found)


def _check_contexts(c: ml_collections.ConfigDict) -> None:
    """Refuses limits and citations that cannot be."""
    contexts = make_contexts(c, None)
    limit = getattr(contexts, "limit", None)
    if limit is not None and limit <= contexts.summary_tokens:
        raise ValueError(
            f"context.limit={limit} has no room for a summary of rollout.max_summary_tokens="
            f"{contexts.summary_tokens} and the question: every turn would be summarised again; "
            "raise the limit, or shorten summaries"
        )


def heldout_tasks(c: ml_collections.ConfigDict, env: Environment) -> tuple[Task, ...]:
    """The tasks that evaluations play.

    Raises:
      ValueError: there are not so many, or none to train on.
    """
    tasks = env.tasks("heldout")
    if c.evaluate.num_tasks > len(tasks):
        raise ValueError(
            f"evaluate.num_tasks {c.evaluate.num_tasks} is more than the {len(tasks)} held-out "
            f"tasks of {env.name}; ask for at most that many"
        )
    if not env.tasks("train"):
        raise ValueError(f"{env.name} has no tasks to train on")
    return tasks[: c.evaluate.num_tasks]


def _check_pretraining(c: ml_collections.ConfigDict) -> None:
    """Whether there is something to pretrain a critic on, and it can be.

    Raises:
      ValueError: there is not, or it cannot.
    """
    if "warm_start" not in c or c.model.get("path"):
        raise ValueError(
            f"critic.pretrain_episodes={c.critic.pretrain_episodes} reads episodes of the warm "
            "start, and this run has none; set critic.pretrain_episodes=0 (and "
            "critic.warmup_steps=3)"
        )
    if c.critic.backbone == "own":
        raise ValueError(
            "critic.backbone='own' cannot be pretrained on hidden states of the policy; set "
            "critic.pretrain_episodes=0 (and critic.warmup_steps=3)"
        )


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


def step_config(c: ml_collections.ConfigDict, *, max_turns: int | None = None) -> StepConfig:
    """How a step spends its budget; `max_turns` of an episode fixes the shapes of plans."""
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
        max_states=None if max_turns is None else max_turns + 1,
        weight=c.branching.weight,
        siblings=c.critic.siblings,
        proceed_fraction=(
            c.rollout.proceed_fraction if c.rollout.on_failure == "proceed" else None
        ),
    )


def tool_limits(c: ml_collections.ConfigDict) -> ToolLimits:
    """What calls of the environment may take."""
    return ToolLimits(**c.rollout.tools.to_dict())


def make_env(c: ml_collections.ConfigDict) -> Environment:
    """The environment of `config.task`."""
    env = TASKS[c.task.name](**task_options(c.task.to_dict()))
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


def make_mesh(c: ml_collections.ConfigDict, model: models.Config) -> Mesh:
    """The devices of `config.mesh`.

    Raises:
      ValueError: there are not so many, or rows and heads cannot be spread over them.
    """
    mesh = sharding.make_mesh(**c.mesh.to_dict())
    sharding.check_mesh(
        mesh,
        micro_rows=c.learner.micro_rows,
        row_length=c.learner.row_length,
        attention=model.attention,
        num_kv_heads=model.num_kv_heads,
    )
    return mesh


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
    manager = CONTEXT_MANAGERS[c.context.manager]
    return manager(chat, **context_options(c, closing=closing))


def context_options(c: ml_collections.ConfigDict, *, closing: bool = True) -> dict[str, Any]:
    """Those options of context managers that the run's one takes."""
    options = {
        "limit": c.context.limit,
        "summary_tokens": c.rollout.max_summary_tokens,
        "citations": tuple(c.context.citations),
        "closing": closing,
    }
    takes = inspect.signature(CONTEXT_MANAGERS[c.context.manager]).parameters
    return {name: value for name, value in options.items() if name in takes}


def make_agent(
    c: ml_collections.ConfigDict,
    env: Environment,
    chat: Chat | TemplateChat,
    engine: Engine,
    *,
    temperature: float,
    run_seed: int,
    retry: RetryPolicy,
    tools: Tools,
    closing: bool = True,
) -> Agent:
    """The player of tasks; `retry` is what it does when the engine fails.

    `tools` calls the environment; `closing` is that of `make_contexts`.
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
        tools=tools,
        run_seed=run_seed,
    )


def cache_dir(c: ml_collections.ConfigDict) -> Path:
    """Where warm starts are kept: `config.cache_dir`, $FOCUS_CACHE or ~/.cache/focus."""
    chosen = c.cache_dir or os.environ.get("FOCUS_CACHE") or Path.home() / ".cache" / "focus"
    return Path(chosen)
