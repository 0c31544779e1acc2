"""How many chips and GPU servers a step of a run wants, where its time goes, and which side waits.

A step generates B tokens (`config.budget`) on GPU servers and then scores, fits the critic and
updates the policy on TPU chips. With P parameters, k bytes of keys and values a token, o tokens
that are read per token that is generated, and c tokens of context on average:

    decode     one token for each of b sequences takes the longer of reading weights and caches,
               (2 P + b c k) / (G beta e_m), and of arithmetic, b f(c) / (G F e_f), on a server of
               G GPUs with peak F and memory bandwidth beta. b is the least of what the memory left
               by the weights holds, (0.9 G M - 2 P) / (2 c k), since contexts grow to 2 c; of
               `rollout.max_running`; and of a server's share of the rollouts that are played at
               the same time, B / (rollout.episode_tokens (1 + branching.rounds)), because a round
               of branches begins when the one before it is over
    prefill    B o f(c) / (G F e_f): every observation is read once, prefixes are cached
    score      T h_score / (C F e_f) and collectives, on C chips; T = B (1 + o) / p tokens of packed
               rows of which a share p is not padding, h FLOPs a token as executed
    update     epochs x the same with h_train, and optimiser steps
               in both T is rounded up to whole micro-batches, in an update of each minibatch
    critic     with a backbone of its own as much as epochs of updates of all weights and a scoring
               pass; with the policy's hidden states the heads alone: 6 FLOPs a weight and row of
               the replay buffer, on each chip
    push       2 P bytes written to storage, and read by all servers at the same time; with
               `rollout.push="adapter"` float32 adapters alone, 4 bytes a number

e_m and e_f are the shares of bandwidth and peak that kernels reach: assumptions, see `Assumptions`.
Times and memory of the learner are those of `focus.tpu.estimate`; with a report of
`scripts/compile_tpu.py` traffic and collectives are the compiler's. Tools take no time here, nor do
adapters on servers, of whose products a rank of 32 makes a hundredth of the base's.

Played one after the other, a step takes the sum. If rollouts of the next step are played while
the learner works, it takes the longer of the two sides, and the other waits. More chips are faster
until a step's rows no longer fill their micro-batches; `search` tries the slices of a chip and
`choose` takes the fastest step among those that are not much dearer than the cheapest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections
import rich.box
import rich.console
import rich.measure
import rich.table

from focus.policy import lora
from focus.policy import model as models
from focus.run import experiment
from focus.tpu import estimate, flops
from focus.tpu.chips import Chip, Gpu, parse_topology
from focus.tpu.estimate import Layout, Seconds

# Of a chip's memory; the rest is what formulas do not know.
USABLE_MEMORY = 0.9


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
      max_servers: most servers that a plan may ask for.
    """

    observation_ratio: float = 1.5
    packing_efficiency: float = 0.85
    flops_share: float = 0.6
    memory_share: float = 0.6
    storage_bytes_per_s: float = 2e9
    gpus_per_server: int = 8
    max_servers: int = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where the time of a step goes.

    Attributes:
      layout: the learner's chips and how it lies on them.
      peak_bytes: what a chip holds at most, by formula.
      servers: of GPUs.
      gpus: of all servers.
      row_tokens: T, tokens in packed rows, padding included.
      batch: b, sequences that a server decodes together.
      seconds: by phase: decode, prefill, score, critic, update, push.
    """

    layout: Layout
    peak_bytes: float
    servers: int
    gpus: int
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
    def device_s(self) -> float:
        """What a step costs: seconds times chips and GPUs."""
        return self.overlapped_s * (self.layout.slice_.num_chips + self.gpus)

    @property
    def waits(self) -> tuple[str, float]:
        """The side that waits when both overlap, and for what share of the step."""
        side = "servers" if self.rollout_s < self.learner_s else "chips"
        return side, 1 - min(self.rollout_s, self.learner_s) / self.overlapped_s


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a server holds and a push moves: bfloat16."""
    return 2 * models.num_params(model)


def push_bytes(config: ml_collections.ConfigDict) -> int:
    """Bytes that a step sends to servers: weights, or adapters for a base that is there."""
    model, adapters = experiment.model_config(config), experiment.lora_config(config)
    if config.rollout.push == "adapter":
        if adapters is None:
            raise ValueError(
                "rollout.push='adapter' needs learner.lora.rank >= 1, got 0; set "
                "rollout.push='weights'"
            )
        return 4 * lora.num_adapter_params(model, adapters)
    return weight_bytes(model)


def kv_bytes(model: Any) -> int:
    """Bytes of keys and values of one token in bfloat16; memories of fixed size are left out."""
    return 4 * flops.attention_layers(model) * model.num_kv_heads * model.head_dim


def row_tokens(config: ml_collections.ConfigDict, assumptions: Assumptions) -> float:
    """T, tokens of a step's packed rows."""
    read_and_written = config.budget * (1 + assumptions.observation_ratio)
    return read_and_written / assumptions.packing_efficiency


def _reported(
    config: ml_collections.ConfigDict,
    report: Mapping[str, Any],
    layout: Layout,
    flops_share: float,
) -> dict[str, Seconds]:
    """Time of one run of each program of a compile report."""
    if report["topology"] != layout.slice_.name:
        raise ValueError(
            f"the report is of {report['topology']} and the plan of {layout.slice_.name}; compile "
            "for the same topology"
        )
    adapters = experiment.lora_config(config)
    planned = adapters and lora.num_adapter_params(experiment.model_config(config), adapters)
    compiled = report.get("num_adapter_params")
    if planned != compiled:
        one, other = (
            f"adapters of {numbers} numbers" if numbers else "all weights"
            for numbers in (compiled, planned)
        )
        raise ValueError(
            f"the report is of a run that trains {one} and the plan of one that trains {other}; "
            "compile with the same learner.lora"
        )
    times = {name: program["time"] for name, program in report["programs"].items()}
    needed = {"gradient", "optimizer", "score"}
    if estimate.has_own_backbone(config):
        needed.add("critic")
    missing = needed - set(times)
    if missing:
        raise ValueError(
            f"the report lacks {', '.join(sorted(missing))}; compile the plan's config, without "
            "--programs"
        )
    model, tokens = experiment.model_config(config), layout.micro_rows * config.learner.row_length
    facts = [
        ("parameters", report["num_params"], models.num_params(model)),
        ("mesh.fsdp", report["mesh"]["fsdp"], layout.fsdp),
        ("mesh.tensor", report["mesh"]["tensor"], layout.tensor),
        ("tokens of a micro-batch", report["programs"]["gradient"]["tokens"], tokens),
    ]
    if config.critic.enabled and "critic" in times:
        own = tokens if estimate.has_own_backbone(config) else 0
        facts.append(("tokens of the critic's", report["programs"]["critic"]["tokens"], own))
    for what, compiled, planned in facts:
        if compiled != planned:
            raise ValueError(
                f"{what}: {compiled} in the report and {planned} in the plan; compile the plan's "
                "config for the plan's topology"
            )
    return {
        name: Seconds(max(t["compute_s"] / flops_share, t["memory_s"]), t["collective_s"])
        for name, t in times.items()
    }


def learner_seconds(
    config: ml_collections.ConfigDict,
    layout: Layout,
    tokens: float,
    flops_share: float,
    report: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Seconds of scoring, critic and update.

    Args:
      config: of the run; its own mesh and micro-batch are not read.
      layout: of the learner.
      tokens: T.
      flops_share: e_f.
      report: of `focus.tpu.report.report` for this layout; None for the formulas.

    Returns:
      By phase.

    Raises:
      ValueError: the report is of other chips or adapters, or lacks a program.
    """
    model, c = experiment.model_config(config), config.learner
    if report is None:
        runs = estimate.run_seconds(config, layout, flops_share)
    else:
        runs = _reported(config, report, layout, flops_share)
    micro_tokens, minibatches = layout.micro_rows * c.row_length, c.minibatches
    scored = math.ceil(tokens / micro_tokens)
    trained = minibatches * math.ceil(tokens / minibatches / micro_tokens)
    score = scored * runs["score"].total
    epoch = trained * runs["gradient"].total + minibatches * runs["optimizer"].total
    seconds = {"score": score, "critic": 0.0, "update": c.epochs * epoch}
    if estimate.has_own_backbone(config):
        step = estimate.optimizer_seconds(
            layout.slice_.chip, estimate.trained_per_chip(model, layout)
        )
        epoch = trained * runs["critic"].total + minibatches * step
        seconds["critic"] = config.critic.epochs * epoch + score
    elif config.critic.enabled:
        weights = (config.critic.members + 1) * config.critic.width * model.d_model
        passes = 6 * weights * config.critic.epochs * config.critic.capacity
        seconds["critic"] = passes / (layout.slice_.chip.flops_per_s * flops_share)
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
    fits = math.floor(room / (2 * context * kv_bytes(model)))
    if fits < 1:
        raise ValueError(
            f"{gpus} x {gpu.name} hold {0.9 * gpus * gpu.hbm_bytes / 1e9:.0f} GB, the weights take "
            f"{weight_bytes(model) / 1e9:.0f} GB and leave no room for a context of "
            f"{2 * context:.0f} tokens; use more GPUs per server"
        )
    rounds = 0 if config.branching.rule == "none" else config.branching.rounds
    rollouts = max(1.0, config.budget / config.rollout.episode_tokens / (1 + rounds))
    batch = min(fits, config.rollout.max_running, math.ceil(rollouts / servers))
    token = flops.forward_flops(model, context).total
    arithmetic = batch * token / (gpus * gpu.flops_per_s * a.flops_share)
    reading = weight_bytes(model) + batch * context * kv_bytes(model)
    reading_s = reading / (gpus * gpu.hbm_bytes_per_s * a.memory_share)
    decode = config.budget / min(rollouts, servers * batch) * max(arithmetic, reading_s)
    prompt = config.budget * a.observation_ratio * token
    prefill = prompt / (servers * gpus * gpu.flops_per_s * a.flops_share)
    return {"decode": decode, "prefill": prefill}, batch


def _fewest_servers(
    config: ml_collections.ConfigDict, gpu: Gpu, learner_s: float, assumptions: Assumptions
) -> int:
    """With which the chips do not wait; where no number does it, which is nearly as good as any."""
    counts = range(1, assumptions.max_servers + 1)
    seconds = [
        sum(rollout_seconds(config, gpu, servers, assumptions)[0].values()) for servers in counts
    ]
    enough = max(learner_s, 1.1 * min(seconds))
    return next(servers for servers, s in zip(counts, seconds) if s <= enough)


def make_plan(
    config: ml_collections.ConfigDict,
    layout: Layout,
    gpu: Gpu,
    *,
    servers: int | None = None,
    assumptions: Assumptions = Assumptions(),
    report: Mapping[str, Any] | None = None,
) -> Plan:
    """The time of a step, by phase.

    Args:
      config: of the run; its own mesh and micro-batch are not read.
      layout: of the learner.
      gpu: kind of the servers' GPUs.
      servers: number of servers; None for the fewest with which the chips do not wait.
      assumptions: see there.
      report: see `learner_seconds`.

    Returns:
      The plan.

    Raises:
      ValueError: too few chips or GPUs to hold the model.
    """
    slice_, peak = layout.slice_, estimate.peak_bytes(config, layout)
    if report is not None:
        peak = max(program["peak_bytes"] for program in report["programs"].values())
    elif peak > USABLE_MEMORY * slice_.chip.hbm_bytes:
        parts = estimate.memory_bytes(config, layout)
        most = max(parts, key=parts.get)
        raise ValueError(
            f"{slice_.name} ({layout.mesh}, {layout.micro_rows} rows) needs {peak / 2**30:.0f} GiB "
            f"a chip, {parts[most] / 2**30:.0f} of them for {most}, and has "
            f"{USABLE_MEMORY * slice_.chip.hbm_bytes / 2**30:.0f}; use more chips, "
            "model.remat='full', or fewer rows to a chip"
        )
    tokens = row_tokens(config, assumptions)
    learner = learner_seconds(config, layout, tokens, assumptions.flops_share, report)
    one_way = push_bytes(config) / assumptions.storage_bytes_per_s
    learner["push"] = 2 * one_way
    if servers is None:
        servers = _fewest_servers(config, gpu, sum(learner.values()), assumptions)
    rollout, batch = rollout_seconds(config, gpu, servers, assumptions)
    gpus = servers * assumptions.gpus_per_server
    return Plan(layout, peak, servers, gpus, tokens, batch, rollout | learner)


def search(
    config: ml_collections.ConfigDict,
    chip: Chip,
    gpu: Gpu,
    *,
    servers: int | None = None,
    assumptions: Assumptions = Assumptions(),
) -> list[Plan]:
    """The fastest layout on every slice of a chip that can hold the run, smallest slice first.

    Args:
      config: of the run; its own mesh and micro-batch are not read.
      chip: kind of the learner's chips.
      gpu: see `make_plan`, and so are the others.
      servers: see there.
      assumptions: see there.

    Returns:
      A plan for each slice.

    Raises:
      ValueError: no slice holds the run, or no server.
    """
    rollout_seconds(config, gpu, 1, assumptions)
    best, refused = [], None
    for shape in chip.slices:
        slice_ = parse_topology(f"{chip.name}:{shape}")
        plans = []
        for layout in estimate.layouts(config, slice_):
            try:
                plans.append(
                    make_plan(config, layout, gpu, servers=servers, assumptions=assumptions)
                )
            except ValueError as error:
                refused = error
        if plans:
            best.append(min(plans, key=lambda p: (p.learner_s, p.peak_bytes)))
    if not best:
        raise ValueError(
            f"no slice of {chip.name} holds the run. The last that was tried: {refused}"
        )
    return best


def choose(plans: Iterable[Plan], extra_cost: float) -> Plan:
    """The fastest step among those that are not much dearer than the cheapest.

    Args:
      plans: as from `search`.
      extra_cost: 0.25 lets a step cost a quarter more chip- and GPU-seconds than the cheapest.

    Returns:
      One of them.
    """
    plans = list(plans)
    limit = (1 + extra_cost) * min(plan.device_s for plan in plans)
    return min((p for p in plans if p.device_s <= limit), key=lambda p: p.overlapped_s)


def _waiting(plan: Plan) -> str:
    side, share = plan.waits
    return f"{side} {share:.0%}"


def show_search(
    plans: Iterable[Plan], chosen: Plan, budget: int, gpu: Gpu, console: rich.console.Console
) -> None:
    """Prints a table of slices; the chosen one is marked."""
    chip = chosen.layout.slice_.chip
    table = rich.table.Table(
        title=f"A step of {budget:,} generated tokens on {chip.name} and servers of {gpu.name}",
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in ("", "slice", "mesh"):
        table.add_column(column, no_wrap=True)
    for column in ("rows", "HBM", "servers", "rollouts s", "learner s", "step s", "device s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("who waits", no_wrap=True)
    for plan in plans:
        table.add_row(
            "->" if plan is chosen else "",
            plan.layout.slice_.name,
            plan.layout.mesh,
            str(plan.layout.micro_rows),
            f"{plan.peak_bytes / chip.hbm_bytes:.0%}",
            str(plan.servers),
            f"{plan.rollout_s:,.0f}",
            f"{plan.learner_s:,.0f}",
            f"{plan.overlapped_s:,.0f}",
            f"{plan.device_s:,.0f}",
            _waiting(plan),
        )
    # Never narrower than its words: a terminal that is breaks lines and cuts no words off.
    wide = console.options.update(max_width=1000)
    needed = rich.measure.Measurement.get(console, wide, table).maximum
    console.width = max(needed, console.width)
    console.print(table)


def show(plan: Plan, budget: int, gpu: Gpu, console: rich.console.Console) -> None:
    """Prints where the time of a plan goes."""
    slice_ = plan.layout.slice_
    table = rich.table.Table(
        title=f"A step of {budget:,} generated tokens: {slice_.name} ({plan.layout.mesh}, "
        f"{plan.layout.micro_rows} rows), {plan.servers} servers of {gpu.name}",
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
        f"{plan.row_tokens:,.0f} tokens in packed rows; {plan.batch} sequences a server; "
        f"{plan.peak_bytes / 2**30:.0f} of {slice_.chip.hbm_bytes / 2**30:.0f} GiB a chip. "
        f"One side after the other {plan.serial_s:,.0f} s a step; overlapped "
        f"{plan.overlapped_s:,.0f} s, and the {side} wait {share:.0%} of it.",
        highlight=False,
    )
