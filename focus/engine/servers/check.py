"""Is a fleet of servers fit for training? Asked before a run, not found out during one.

Everything a run relies on is tried once: that all workers answer and serve one model of one
version, that contexts fit, that their log-probs are the trainer's, that weights can be changed
under running requests, and that branches find their prefixes. Weights are put back afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from focus.engine.protocol import EngineError, GenerateRequest, GenerateResult, SamplingParams
from focus.engine.servers.connection import Connection
from focus.engine.servers.fleet import Limits
from focus.engine.servers.sglang import SGLangEngine
from focus.formats import hf
from focus.policy import token_logprobs

_TEMPERATURES = (1.0, 0.6)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was tried.

    Attributes:
      name: what.
      fit: whether training can rely on it.
      text: what was found.
    """

    name: str
    fit: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked of the servers.

    Attributes:
      requests: at once.
      prompt_tokens: of each.
      new_tokens: of each.
    """

    requests: int = 16
    prompt_tokens: int = 64
    new_tokens: int = 64


async def check_fleet(
    urls: Sequence[str],
    model_path: str | Path,
    *,
    router_url: str | None = None,
    max_context: int | None = None,
    tolerance: float = 1e-4,
    load: Load | None = None,
    limits: Limits | None = None,
    on_finding: Callable[[Finding], None] | None = None,
) -> list[Finding]:
    """Tries everything that a run relies on, in this order; what needs an answer stops at none.

    Args:
      urls: of the workers.
      model_path: directory with the weights to train, which all of them see under this path.
      router_url: of the router in front of them.
      max_context: of the run; None for the model's.
      tolerance: most that a log-prob may differ from the trainer's float32: 1e-4 for servers in
        float32, more for bfloat16.
      load: how much to ask for.
      limits: patience.
      on_finding: called with each finding as it is made.

    Returns:
      The findings; the fleet is fit if all of them are.

    Raises:
      ValueError: `model_path` holds no model.
    """
    config, params = hf.load_checkpoint(model_path)
    limits, load = limits or Limits(dead_after_s=60.0), load or Load()
    max_context = max_context or config.max_context
    if load.prompt_tokens + load.new_tokens > max_context:
        half = max_context // 2
        load = dataclasses.replace(load, prompt_tokens=half, new_tokens=half)
    findings: list[Finding] = []
    checker = _Checker(urls, str(Path(model_path).resolve()), config, params, load, tolerance)
    engine = SGLangEngine(
        urls,
        router_url=router_url,
        vocab_size=config.vocab_size,
        max_context=max_context,
        decode=lambda ids: " ".join(map(str, ids)),
        limits=limits,
    )

    async def tried(name: str, attempt: Awaitable[tuple[bool, str]]) -> bool:
        try:
            finding = Finding(name, *await attempt)
        except (EngineError, ValueError) as error:
            finding = Finding(name, False, str(error))
        findings.append(finding)
        if on_finding is not None:
            on_finding(finding)
        return finding.fit

    async with aiohttp.ClientSession() as session, engine:
        if not await tried("workers", checker.workers(engine)):
            return findings
        connections = [Connection(url.rstrip("/"), session, 60.0) for url in urls]
        if not await tried("model", checker.model(connections)):
            return findings
        before = [await connection.model_info() for connection in connections]
        try:
            if await tried("weights", checker.weights(engine)):
                await tried("log-probs", checker.logprobs(engine))
                await tried("prefixes", checker.prefixes(engine))
                await tried("throughput", checker.throughput(engine))
        finally:
            await tried("restored", checker.restored(engine, connections, before))
    return findings


class _Checker:
    def __init__(
        self,
        urls: Sequence[str],
        path: str,
        config: Any,
        params: Any,
        load: Load,
        tolerance: float,
    ):
        self._urls, self._path = urls, path
        self._config, self._params = config, params
        self._load, self._tolerance = load, tolerance
        self._random = np.random.default_rng(0)
        self._count = 0

    async def workers(self, engine: SGLangEngine) -> tuple[bool, str]:
        """All answer and generate, and have room for the run's contexts."""
        await engine.ready()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30.0):
                while set(engine.states().values()) != {"fit"}:
                    await asyncio.sleep(0.2)
        ill = {url: state for url, state in engine.states().items() if state != "fit"}
        fit = len(self._urls) - len(ill)
        return not ill, f"{fit} of {len(self._urls)} are fit" + "".join(
            f"; {url}: {state}" for url, state in ill.items()
        )

    async def model(self, connections: Sequence[Connection]) -> tuple[bool, str]:
        """All serve the same model, and it is the one to be trained."""
        infos = [await connection.model_info() for connection in connections]
        versions = sorted({str(info.get("weight_version")) for info in infos})
        paths = sorted({str(info.get("model_path")) for info in infos})
        if len(versions) > 1:
            return False, f"workers serve different weights: {versions}"
        for path in paths:
            if (Path(path) / "config.json").is_file() and self._same_shape(path) is False:
                return False, f"{path} is another model than {self._path}"
        return True, f"version {versions[0]} of {', '.join(paths)}"

    def _same_shape(self, path: str) -> bool:
        return hf.read_config(path) == hf.read_config(self._path)

    async def weights(self, engine: SGLangEngine) -> tuple[bool, str]:
        """Pause, update and continue under running requests; their tokens say whose they are."""
        running = [asyncio.create_task(engine.generate(r)) for r in self._requests(1.0)]
        await asyncio.sleep(0)
        began = time.monotonic()
        try:
            await engine.load_weights(self._path, "check")
            seconds = time.monotonic() - began
        finally:
            await asyncio.wait(running)
        results = [task.result() for task in running]
        versions = set(engine.versions().values())
        if versions != {"check"}:
            return False, f"after an update the workers serve {sorted(map(str, versions))}"
        spans = sum(len(result.weight_versions) > 1 for result in results)
        return True, f"changed in {seconds:.1f} s; {spans} of {len(results)} requests went on"

    async def logprobs(self, engine: SGLangEngine) -> tuple[bool, str]:
        """What servers say of their tokens is what the trainer says."""
        differences = []
        for temperature in _TEMPERATURES:
            requests = self._requests(temperature)
            results = await asyncio.gather(*(engine.generate(r) for r in requests))
            for request, result in zip(requests, results, strict=True):
                differences.append(self._difference(request, result, temperature))
        worst, mean = np.max(np.concatenate(differences)), np.mean(np.concatenate(differences))
        text = f"differ by {mean:.1e} in the mean and {worst:.1e} at most"
        if worst < self._tolerance:
            return True, text
        return False, f"{text}, more than {self._tolerance:g}: another dtype, or other weights"

    def _difference(
        self, request: GenerateRequest, result: GenerateResult, temperature: float
    ) -> np.ndarray:
        tokens = np.zeros((1, self._load.prompt_tokens + self._load.new_tokens), np.int32)
        prompt, output = request.input_ids, result.output_ids
        tokens[0, : len(prompt) + len(output)] = prompt + output
        logp = token_logprobs(self._config, self._params, tokens, temperature=temperature)
        ours = np.asarray(logp)[0, len(prompt) : len(prompt) + len(output)]
        return np.abs(ours - np.array(result.output_logp))

    async def prefixes(self, engine: SGLangEngine) -> tuple[bool, str]:
        """A branch reuses what its parent has computed."""
        requests = self._requests(1.0, sessions=True)
        results = await asyncio.gather(*(engine.generate(r) for r in requests))
        shared, reused = 0, 0
        for request, result in zip(requests, results, strict=True):
            # A state in the middle of what was said, and something else after it.
            prompt = request.input_ids + result.output_ids[: len(result.output_ids) // 2]
            (branch,) = self._requests(1.0, count=1)
            branch = dataclasses.replace(
                branch, input_ids=prompt + branch.input_ids[:4], session=request.session
            )
            shared += len(prompt)
            reused += min((await engine.generate(branch)).cached_tokens, len(prompt))
        recomputed = 1 - reused / shared
        return recomputed <= 0.05, f"{recomputed:.1%} of the tokens shared by branches recomputed"

    async def throughput(self, engine: SGLangEngine) -> tuple[bool, str]:
        """Tokens a second; never a reason to refuse."""
        began = time.monotonic()
        results = await asyncio.gather(*(engine.generate(r) for r in self._requests(1.0)))
        rate = sum(r.completion_tokens for r in results) / (time.monotonic() - began)
        return True, f"{rate:,.0f} tokens/s with {len(results)} requests at once"

    async def restored(
        self, engine: SGLangEngine, connections: Sequence[Connection], before: Sequence[dict]
    ) -> tuple[bool, str]:
        """The weights that were there before the check."""
        path, version = before[0]["model_path"], before[0]["weight_version"]
        await engine.load_weights(path, version)
        after = [await connection.model_info() for connection in connections]
        served = {info.get("weight_version") for info in after}
        return served == {version}, f"version {version} of {path}"

    def _requests(
        self, temperature: float, count: int | None = None, *, sessions: bool = False
    ) -> list[GenerateRequest]:
        """Random prompts; every id of the vocabulary may occur in them."""
        requests = []
        sampling = SamplingParams(
            max_new_tokens=self._load.new_tokens, temperature=temperature, ignore_eos=True
        )
        for _ in range(self._load.requests if count is None else count):
            self._count += 1
            ids = self._random.integers(0, self._config.vocab_size, self._load.prompt_tokens)
            session = f"check-{self._count}" if sessions else ""
            requests.append(
                GenerateRequest(
                    f"check-{self._count}",
                    tuple(ids.tolist()),
                    sampling,
                    seed=self._count,
                    session=session,
                )
            )
        return requests
