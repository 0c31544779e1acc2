"""Measures the embedded engine on this machine: speed, reuse of prefixes, compilations.

    python scripts/benchmark_engine.py --agents 64

Three loads on a random model of the quickstart's shape (0.9 million parameters), all of them warm:
  decode    one long completion an agent, no prefix shared
  turns     agents that write a short turn, read a long observation, and go on
  branches  short continuations from random turns of those agents
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time

import jax
import numpy as np

from focus.engine.embedded.engine import EmbeddedEngine
from focus.engine.protocol import GenerateRequest, SamplingParams
from focus.learner import sharding
from focus.policy import model as models
from focus.policy import transformer

MODEL = transformer.ModelConfig(
    vocab_size=768,
    d_model=192,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    d_ff=512,
    max_context=384,
)


class Load:
    """Requests with random observations between them."""

    def __init__(self, engine: EmbeddedEngine, seed: int):
        self._engine = engine
        self._random = np.random.default_rng(seed)
        self._count = 0
        self.states: list[tuple[int, ...]] = []

    def tokens(self, count: int) -> tuple[int, ...]:
        """Random tokens, as a prompt or an observation."""
        return tuple(self._random.integers(0, MODEL.vocab_size, count).tolist())

    async def say(self, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Generates exactly `count` tokens."""
        self._count += 1
        sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
        request = GenerateRequest(f"{self._count}", prompt, sampling, seed=self._count)
        return (await self._engine.generate(request)).output_ids

    async def play(self, prompt: tuple[int, ...], turns: int, words: int, observed: int) -> None:
        """Turns of `words` tokens, each followed by `observed` tokens."""
        for _ in range(turns):
            self.states.append(prompt)
            prompt += await self.say(prompt, words) + self.tokens(observed)


def measure(engine: EmbeddedEngine, name: str, make_plays) -> str:
    """Runs plays together; one row of the table."""

    async def main():
        await asyncio.gather(*make_plays())

    before, compiled, began = engine.stats, engine.compilations, time.perf_counter()
    asyncio.run(main())
    seconds = time.perf_counter() - began
    spent = {
        field.name: getattr(engine.stats, field.name) - getattr(before, field.name)
        for field in dataclasses.fields(before)
    }
    generated, prompt = spent["generated_tokens"], spent["prompt_tokens"]
    return (
        f"{name:10}{generated:10,}{generated / seconds:12,.0f}"
        f"{(generated + prompt - spent['cached_tokens']) / seconds:14,.0f}"
        f"{spent['cached_tokens'] / prompt:10.1%}{engine.compilations - compiled:10}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, default=64, help="requests in flight, and slots")
    parser.add_argument("--turns", type=int, default=5, help="turns of an agent")
    parser.add_argument("--words", type=int, default=12, help="tokens of a turn")
    parser.add_argument("--observed", type=int, default=50, help="tokens of an observation")
    parser.add_argument("--branches", type=int, default=128, help="continuations to play")
    parser.add_argument("--decode-steps", type=int, default=16, help="tokens of a decode call")
    parser.add_argument(
        "--cpu-devices", type=int, default=2, help="what a CPU is made to look like"
    )
    options = parser.parse_args()
    sharding.split_cpu(options.cpu_devices)

    engine = EmbeddedEngine(
        MODEL,
        transformer.init_params(MODEL, jax.random.key(0)),
        decode=str,
        devices=-1,
        max_running=options.agents,
        decode_steps=options.decode_steps,
    )
    began = time.perf_counter()
    programs = engine.warmup(filtered=False)
    print(
        f"{models.num_params(MODEL):,} parameters, "
        f"cache {engine.cache_bytes / 2**20:.0f} MiB, "
        f"{programs} programs compiled in {time.perf_counter() - began:.0f} s"
    )
    load = Load(engine, seed=0)
    turns = options.turns, options.words, options.observed
    print(
        f"{'load':10}{'generated':>10}{'generated/s':>12}{'+ computed/s':>14}{'reused':>10}"
        f"{'compiled':>10}"
    )
    for _ in range(options.agents):
        load.states.append(load.tokens(8))
    starts = list(load.states)
    print(measure(engine, "decode", lambda: [load.say(p, 116) for p in starts]))
    load.states.clear()
    starts = [load.tokens(options.observed) for _ in range(options.agents)]
    print(measure(engine, "turns", lambda: [load.play(p, *turns) for p in starts]))
    chosen = np.random.default_rng(1).integers(0, len(load.states), options.branches)
    states = [load.states[i] for i in chosen]
    print(measure(engine, "branches", lambda: [load.say(p, options.words) for p in states]))


if __name__ == "__main__":
    main()
