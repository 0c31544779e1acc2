"""Where rollouts are sampled, as the learner sees it: an engine, and how weights get there.

One class for each value of `rollout.engine`; the loops know `Backend` only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ml_collections

from focus.chat.tokens import Chat
from focus.engine import Engine, FleetDead
from focus.engine.embedded.engine import EmbeddedEngine
from focus.engine.servers.fleet import Limits
from focus.engine.servers.sglang import SGLangEngine
from focus.learner import hosts
from focus.learner.publish import AdapterPublisher, Publisher
from focus.policy import model as models
from focus.rollout import RetryPolicy
from focus.run.stopping import StopRequested, unless_asked
from focus.types import version_name

# Makes the engine sample from parameters; the second argument counts finished training steps.
Push = Callable[[Any, int], Awaitable[None]]
T = TypeVar("T")


class Backend(Protocol):
    """An engine and the learner's dealings with it.

    Attributes:
      engine: what rollouts talk to; entered and left by who makes the backend.
      retry: what to do when it fails.
    """

    engine: Engine
    retry: RetryPolicy

    def publisher(self, workdir: Path) -> Push:
        """How weights get to the engine in this process's part of a run."""

    def warmup(self) -> None:
        """Compiles what requests will need."""

    def forget(self) -> None:
        """Drops what other requests have left in the engine, where that could change results."""

    def metrics(self) -> dict[str, float]:
        """Running totals to be logged."""


class Embedded:
    """The engine in this process; weights are handed over in memory.

    Args:
      config: of the run.
      model: shape of the policy.
      chat: its tokenizer.
      params: first parameters.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, model: models.Config, chat: Chat, params: Any
    ):
        c = config.rollout
        self._filtered = c.top_p < 1 or c.top_k != -1
        self.retry = RetryPolicy(attempts=c.attempts, timeout_s=c.timeout_s)
        self.engine = EmbeddedEngine(
            model,
            params,
            decode=chat.decode,
            eos_token_ids=chat.stop_token_ids,
            **embedded_sizes(c),
        )

    def publisher(self, workdir: Path) -> Push:
        """Weights die with the process, so the step is name enough."""
        del workdir

        async def push(params: Any, step: int) -> None:
            await self.engine.set_params(hosts.local(params), version_name(step))

        return push

    def warmup(self) -> None:
        """Compiles every program of the engine."""
        self.engine.warmup(filtered=self._filtered)

    def forget(self) -> None:
        """Prefixes that an evaluation leaves would be gone after a resume: the next step would
        compute others, and a resumed run would not equal an unbroken one."""
        self.engine.flush_cache()

    def metrics(self) -> dict[str, float]:
        """None beyond what a step's ledger says."""
        return {}


def embedded_sizes(rollout: ml_collections.ConfigDict) -> dict[str, Any]:
    """Arguments of `EmbeddedEngine` that say how much it plays at once, and in which shapes."""
    return {
        "devices": rollout.devices,
        "max_running": rollout.max_running,
        "retained": rollout.retained,
        "cache_buckets": tuple(rollout.cache_buckets),
        "prefill_buckets": tuple(rollout.prefill_buckets),
        "batch_buckets": tuple(rollout.batch_buckets),
        "decode_steps": rollout.decode_steps,
    }


class Servers:
    """SGLang servers, or what speaks like them; weights go through `workdir/weights`.

    Args:
      config: of the run.
      model: shape of the policy.
      chat: its tokenizer.
      params: not needed; servers get theirs with the first push.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, model: models.Config, chat: Chat, params: Any
    ):
        del params
        c = config.rollout
        self._model, self._dtype = model, c.weights_dtype
        self._publish = AdapterPublisher if c.push == "adapter" else Publisher
        # The client tries again by itself and waits for servers that are away. A request that it
        # gives up has one more chance, unless the step goes on without it.
        patience_s = c.attempts * c.timeout_s + c.dead_after_s
        self.retry = RetryPolicy(attempts=2, timeout_s=2 * patience_s)
        self.engine = SGLangEngine(
            tuple(c.urls),
            router_url=c.router_url or None,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            decode=chat.decode,
            eos_token_ids=chat.stop_token_ids,
            max_running=c.max_running,
            limits=Limits(
                attempts=c.attempts,
                request_timeout_s=c.timeout_s,
                dead_after_s=c.dead_after_s,
            ),
            pushes=hosts.is_first(),
        )

    def publisher(self, workdir: Path) -> Push:
        """Servers outlive the process, and may hold a version 0 already: names say whose it is."""
        run = hosts.gather(secrets.token_hex(4))[0]
        return self._publish(
            workdir / "weights", self._model, self.engine, dtype=self._dtype, run=run
        )

    def warmup(self) -> None:
        """Servers warm themselves up."""

    def forget(self) -> None:
        """What servers keep changes no result beyond rounding, and their timing is not ours."""

    def metrics(self) -> dict[str, float]:
        """How the servers are doing."""
        states = self.engine.states().values()
        totals = dataclasses.asdict(self.engine.stats)
        return {
            "servers/all": len(states),
            "servers/fit": sum(state == "fit" for state in states),
            **{f"servers/{name}": total for name, total in totals.items()},
        }


# rollout.engine -> backend(config, model, chat, params)
ENGINES = {"embedded": Embedded, "sglang": Servers}
# What servers are given in every step: a whole model, or the adapter of one that they have.
PUSHES = ("weights", "adapter")


async def alive_everywhere(rollouts: Awaitable[T]) -> T:
    """Waits for rollouts; ends in all processes if the engines of one are dead, or if one is asked
    to stop.

    Raises:
      FleetDead, StopRequested: in every process, so that all can save the run together.
    """
    result, reason = None, None
    try:
        result = await unless_asked(rollouts)
    except (FleetDead, StopRequested) as error:
        reason = error
    reasons = [r for r in await asyncio.to_thread(hosts.gather, reason) if r is not None]
    if reasons:
        raise reasons[0]
    return result
