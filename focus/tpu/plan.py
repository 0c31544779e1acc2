"""How many chips and GPU servers a step of a run wants, where its time goes, and which side waits.

A step generates B tokens (`config.budget`) on GPU servers and then scores, fits the critic and
updates the policy on TPU chips. With P parameters, k bytes of keys and values a token, o tokens
that are read per token that is generated, and c tokens of context on average:

    decode     one token for each of b sequences takes the longer of reading weights and caches,
               (2 P + b c k) / (G beta e_m), and of arithmetic, b f(c) / (G F e_f), on a server of
               G GPUs with peak F and memory bandwidth beta; b is what the memory left by the
               weights holds, min(max_running, (0.9 G M - 2 P) / (2 c k)): contexts grow to 2 c
    prefill    B o f(c) / (G F e_f): every observation is read once, prefixes are cached
    score      T h_score / (C F e_f) on C chips; T = B (1 + o) / p tokens of packed rows of which
               a share p is not padding, h FLOPs a token as executed (`focus.tpu.flops`)
    update     epochs x T h_train / (C F e_f)
               in both T is rounded up to whole micro-batches, in an update of each minibatch
    critic     epochs x T h_train with a backbone of its own; with the policy's hidden states the
               heads alone: 6 FLOPs a weight and row of the replay buffer, on each chip
    push       2 P bytes written to storage, and read by all servers at the same time

e_m and e_f are the shares of bandwidth and peak that kernels reach: assumptions, see `Assumptions`;
with a report of `scripts/compile_tpu.py` the learner's times are the report's instead.

Played one after the other, a step takes the sum. If rollouts of the next step are played while
the learner works, it takes the longer of the two sides, and the other waits. The optimiser state
has to fit: 16 bytes a parameter (float32 weights, two moments, gradient), 28 with a critic that
has a backbone of its own, and half of the memory is left to activations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import ml_collections
import rich.console
import rich.table

from focus import experiment
from focus.policy import model as models
from focus.tpu import flops
from focus.tpu.chips import Chip, Gpu


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What a plan rests on besides the config and the data sheets.

    Attributes:
      observation_ratio: o, tokens that the agent reads per token that it generates.
      packing_efficiency: p, share of packed rows that is not padding.
      flops_share: e_f, of the peak that matrix products reach.
      memory_share: e_m, of the memory bandwidth that decoding reaches.
      storage_bytes_per_s: of the directory that weights are pushed through, one way.
      gpus_per_server: G.
    """

    observation_ratio: float = 1.5
    packing_efficiency: float = 0.85
    flops_share: float = 0.6
    memory_share: float = 0.6
    storage_bytes_per_s: float = 2e9
    gpus_per_server: int = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where the time of a step goes.

    Attributes:
      chips: C.
      servers: of GPUs.
      row_tokens: T, tokens in packed rows, padding included.
      batch: b, sequences that a server decodes together.
      seconds: by phase: decode, prefill, score, critic, update, push.
    """

    chips: int
    servers: int
    row_tokens: float
    batch: int
    seconds: Mapping[str, float]

    @property
    def rollout_s(self) -> float:
        """Seconds in which the GPUs work."""
        return self.seconds["decode"] + self.seconds["prefill"]

    @property
    def learner_s(self) -> float:
        """Seconds in which the chips work, weights on their way included."""
        return sum(self.seconds.values()) - self.rollout_s

    @property
    def serial_s(self) -> float:
        """A step, one side after the other."""
        return self.rollout_s + self.learner_s

    @property
    def overlapped_s(self) -> float:
        """A step while the next one's rollouts are played."""
        return max(self.rollout_s, self.learner_s)

    @property
    def waits(self) -> tuple[str, float]:
        """The side that waits when both overlap, and for what share of the step."""
        side = "servers" if self.rollout_s < self.learner_s else "chips"
        return side, 1 - min(self.rollout_s, self.learner_s) / self.overlapped_s


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a server holds and a push moves: bfloat16."""
    return 2 * models.num_params(model)


def kv_bytes(model: Any) -> int:
    """Bytes of keys and values of one token in bfloat16."""
    return 4 * model.num_layers * model.num_kv_heads * model.head_dim


def row_tokens(config: ml_collections.ConfigDict, assumptions: Assumptions) -> float:
    """T, tokens of a step's packed rows."""
    read_and_written = config.budget * (1 + assumptions.observation_ratio)
    return read_and_written / assumptions.packing_efficiency


def learner_seconds(
    config: ml_collections.ConfigDict,
    chip: Chip,
    chips: int,
    tokens: float,
    flops_share: float,
    report: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Seconds of scoring, critic and update.

    Args:
      config: of the run.
      chip: the kind.
      chips: C.
      tokens: T.
      flops_share: e_f.
      report: of `focus.tpu.report.report` for these chips; None for the formulas.

    Returns:
      By phase.

    Raises:
      ValueError: the report is of another number of chips.
    """
    model, c = experiment.model_config(config), config.learner
    rate = chips * chip.flops_per_s * flops_share
    micro_tokens = c.micro_rows * c.row_length
    scored = math.ceil(tokens / micro_tokens)
    trained = c.epochs * c.minibatches * math.ceil(tokens / c.minibatches / micro_tokens)
    score = scored * micro_tokens * flops.score_flops(model, c.row_length)[1] / rate
    update = trained * micro_tokens * flops.train_flops(model, c.row_length)[1] / rate
    if report is not None:
        if report["chips"] != chips:
            raise ValueError(
                f"the report is of {report['chips']} chips and the plan of {chips}; compile for "
                "the same topology"
            )
        per_run = {name: p["time"]["total_s"] for name, p in report["programs"].items()}
        score = scored * per_run["score"]
        update = trained * per_run["gradient"] + c.epochs * c.minibatches * per_run["optimizer"]
    seconds = {"score": score, "critic": 0.0, "update": update}
    if config.critic.enabled and config.critic.backbone == "own":
        seconds["critic"] = config.critic.epochs / c.epochs * update + score
    elif config.critic.enabled:
        weights = (config.critic.members + 1) * config.critic.width * model.d_model
        passes = 6 * weights * config.critic.epochs * config.critic.capacity
        seconds["critic"] = passes / (chip.flops_per_s * flops_share)
    return seconds


def rollout_seconds(
    config: ml_collections.ConfigDict, gpu: Gpu, servers: int, assumptions: Assumptions
) -> tuple[dict[str, float], int]:
    """Seconds of decoding and prefill, and the sequences that a server decodes together.

    Raises:
      ValueError: the weights leave no room for a single sequence.
    """
    a, model = assumptions, experiment.model_config(config)
    context = model.max_context / 2
    gpus = a.gpus_per_server
    room = 0.9 * gpus * gpu.hbm_bytes - weight_bytes(model)
    batch = int(min(config.rollout.max_running, room / (2 * context * kv_bytes(model))))
    if batch < 1:
        raise ValueError(
            f"{gpus} x {gpu.name} hold {0.9 * gpus * gpu.hbm_bytes / 1e9:.0f} GB, the weights take "
            f"{weight_bytes(model) / 1e9:.0f} GB and leave no room for a context of "
            f"{2 * context:.0f} tokens; use more GPUs per server"
        )
    token = flops.forward_flops(model, context).total
    arithmetic = batch * token / (gpus * gpu.flops_per_s * a.flops_share)
    reading = weight_bytes(model) + batch * context * kv_bytes(model)
    reading_s = reading / (gpus * gpu.hbm_bytes_per_s * a.memory_share)
    decode = config.budget / (servers * batch) * max(arithmetic, reading_s)
    prompt = config.budget * a.observation_ratio * token
    prefill = prompt / (servers * gpus * gpu.flops_per_s * a.flops_share)
    return {"decode": decode, "prefill": prefill}, batch


def fewest_chips(config: ml_collections.ConfigDict, chip: Chip) -> int:
    """Chips whose memory holds the state of training twice over."""
    own = config.critic.enabled and config.critic.backbone == "own"
    state = (28 if own else 16) * models.num_params(experiment.model_config(config))
    return math.ceil(2 * state / chip.hbm_bytes)


def make_plan(
    config: ml_collections.ConfigDict,
    chip: Chip,
    gpu: Gpu,
    *,
    chips: int,
    servers: int | None = None,
    assumptions: Assumptions = Assumptions(),
    report: Mapping[str, Any] | None = None,
) -> Plan:
    """The time of a step, by phase.

    Args:
      config: of the run.
      chip: kind of the learner's chips.
      gpu: kind of the servers' GPUs.
      chips: C.
      servers: number of servers; None for the fewest with which the chips never wait.
      assumptions: see there.
      report: see `learner_seconds`.

    Returns:
      The plan.

    Raises:
      ValueError: too few chips or GPUs to hold the model.
    """
    fewest = fewest_chips(config, chip)
    if chips < fewest:
        raise ValueError(
            f"{chips} x {chip.name} cannot hold the state of training and its activations; use at "
            f"least {fewest}"
        )
    tokens = row_tokens(config, assumptions)
    share = assumptions.flops_share
    learner = learner_seconds(config, chip, chips, tokens, share, report)
    one_way = weight_bytes(experiment.model_config(config)) / assumptions.storage_bytes_per_s
    learner["push"] = 2 * one_way
    if servers is None:
        alone, _ = rollout_seconds(config, gpu, 1, assumptions)
        servers = math.ceil(sum(alone.values()) / sum(learner.values()))
    rollout, batch = rollout_seconds(config, gpu, servers, assumptions)
    return Plan(chips, servers, tokens, batch, rollout | learner)


def show(plan: Plan, budget: int, chip: Chip, gpu: Gpu, console: rich.console.Console) -> None:
    """Prints a plan."""
    table = rich.table.Table(
        title=f"A step of {budget:,} generated tokens: {plan.chips} x {chip.name}, "
        f"{plan.servers} servers of {gpu.name}",
        title_justify="left",
    )
    table.add_column("phase")
    table.add_column("on")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for phase, seconds in plan.seconds.items():
        where = "GPUs" if phase in ("decode", "prefill") else "chips"
        table.add_row(phase, where, f"{seconds:,.1f}", f"{seconds / plan.serial_s:.0%}")
    console.print(table)
    side, share = plan.waits
    console.print(
        f"{plan.row_tokens:,.0f} tokens in packed rows; {plan.batch} sequences a server. One side "
        f"after the other {plan.serial_s:,.0f} s a step; overlapped {plan.overlapped_s:,.0f} s, "
        f"and the {side} wait {share:.0%} of it.",
        highlight=False,
    )
