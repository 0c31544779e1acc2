"""The engines that promise to be interchangeable, each with what it takes to check its answers.

`embedded` samples in this process, `served` is the same behind our own server, `fake` makes its
tokens up, `sglang` is the unmodified server of that name on this machine's CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from aiohttp import web
from fake_server import EOS, VOCAB, FakeServer, fake_greedy, logp_of, text_of

from focus.chat.tokens import COMPACT, Chat, train_tokenizer
from focus.engine.protocol import Engine
from focus.engine.servers.fleet import Limits
from focus.engine.servers.serve import Service, open_engine
from focus.engine.servers.sglang import SGLangEngine
from focus.formats import hf
from focus.policy import token_logprobs, transformer

ROOT = Path(__file__).parent.parent
# The shape of `tiny.py`, whose runs these servers can therefore serve, as a Qwen3.
MODEL = transformer.ModelConfig(
    vocab_size=512,
    d_model=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    d_ff=64,
    max_context=192,
    qk_norm=True,
)
# The environment as it was before a fixture moved the cache: SGLang is installed once for all.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
# A server on a busy machine may take its time.
PATIENT = Limits(
    request_timeout_s=300.0,
    control_timeout_s=120.0,
    probe_timeout_s=120.0,
    probe_every_s=0.1,
    backoff_s=0.05,
    break_s=0.1,
)


@dataclasses.dataclass
class Backend:
    """An engine, and the truth about it.

    Attributes:
      engine: what is tested.
      vocab_size: ids it has.
      max_context: longest prompt plus completion.
      text_of: what its ids read.
      eos: a token that ends a completion unless ignored; None if there is none.
      paths: directory of each version.
      logp: (prompt, output, temperature, version) -> log-prob of each output token.
      greedy: (prompt, count, version) -> most likely continuation.
      workers: base URLs of servers.
    """

    engine: Engine
    vocab_size: int
    max_context: int
    text_of: Callable
    eos: int | None
    paths: dict[str, str]
    logp: Callable
    greedy: Callable
    workers: tuple[str, ...] = ()


# A small Qwen3, written by our exporter.


@functools.cache
def chat() -> Chat:
    texts = ["add 1", "add 2", "stop", "the total is 12345", "notes: total"] * 20
    tokenizer = train_tokenizer(texts, vocab_size=279, special_tokens=COMPACT.special_tokens)
    return Chat(tokenizer, COMPACT)


@functools.cache
def params(version: str) -> Any:
    """Twice the usual size: a model that has preferences, so that mistakes show. It prefers
    tokens that are readable on their own, so that there are strings to stop at."""
    drawn = transformer.init_params(MODEL, jax.random.key(int(version[1:])))
    readable = [chat().decode([i]) for i in range(MODEL.vocab_size)]
    readable = np.array([text.isascii() and text.isprintable() and bool(text) for text in readable])
    drawn["embed"] = drawn["embed"] * np.where(readable, 1.0, 0.2)[:, None].astype(np.float32)
    return jax.tree.map(lambda p: 2 * p, drawn)


def export(root: Path, versions=("v0", "v1", "v2")) -> dict[str, str]:
    """Directories of several versions of the model."""
    for version in versions:
        hf.save_checkpoint(root / version, MODEL, params(version), dtype="float32")
        hf.save_tokenizer(root / version, chat())
    return {version: str(root / version) for version in versions}


@functools.partial(jax.jit, static_argnums=(2,))
def _logp(weights, tokens, temperature):
    return token_logprobs(MODEL, weights, tokens, temperature=temperature)


@jax.jit
def _logits(weights, tokens):
    hidden = transformer.hidden_states(MODEL, weights, tokens)
    return transformer.unembed(MODEL, weights, hidden)


def model_logp(prompt, output, temperature, version):
    """What the trainer makes of an output: [len(output)] float32."""
    tokens = np.zeros((1, MODEL.max_context), np.int32)
    tokens[0, : len(prompt) + len(output)] = (*prompt, *output)
    logp = _logp(params(version), tokens, float(temperature))
    return np.asarray(logp)[0, len(prompt) : len(prompt) + len(output)]


def model_greedy(prompt, count, version):
    """The most likely continuation, by the naive loop."""
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, MODEL.max_context), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(_logits(params(version), padded)[0, len(tokens) - 1])))
    return tuple(tokens[len(prompt) :])


def fake_logp(prompt, output, temperature, version):
    """The fake model's log-probs."""
    ids, logp = list(prompt), []
    for token in output:
        logp.append(logp_of(version, ids, token, temperature))
        ids.append(token)
    return np.array(logp, np.float32)


def client(urls, *, limits=PATIENT, router_url=None, **overrides) -> SGLangEngine:
    """A client of servers of the small model."""
    options = dict(vocab_size=MODEL.vocab_size, max_context=MODEL.max_context, decode=chat().decode)
    return SGLangEngine(urls, router_url=router_url, limits=limits, **(options | overrides))


@functools.cache
def _engine(path: str):
    return open_engine(path, weight_version="v0", max_running=8)[0]


@contextlib.asynccontextmanager
async def embedded(paths):
    """The engine itself; compiled once for all tests."""
    yield _model_backend(_engine(paths["v0"]), paths)


@contextlib.asynccontextmanager
async def our_server(paths):
    """URL of the same engine behind HTTP, in this process."""
    service = Service(_engine(paths["v0"]), model_path=paths["v0"], decode=chat().decode)
    runner = web.AppRunner(service.application(), shutdown_timeout=0.01, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def served(paths):
    """A client of it."""
    async with our_server(paths) as url, client([url]) as engine:
        yield _model_backend(engine, paths, (url,))


@contextlib.asynccontextmanager
async def fake(paths):
    """The server that makes its tokens up."""
    async with FakeServer(version="v0", max_context=MODEL.max_context, token_s=0.001) as server:
        options = dict(vocab_size=VOCAB, decode=text_of, eos_token_ids=(EOS,))
        async with client([server.url], **options) as engine:
            yield Backend(
                engine=engine,
                vocab_size=VOCAB,
                max_context=MODEL.max_context,
                text_of=text_of,
                eos=EOS,
                paths=paths,
                logp=fake_logp,
                greedy=fake_greedy,
                workers=(server.url,),
            )


@contextlib.asynccontextmanager
async def sglang(paths, urls=(), router_url=None):
    """The real one, which has been started before."""
    async with client(urls, router_url=router_url) as engine:
        yield _model_backend(engine, paths, tuple(urls))


def _model_backend(engine, paths, workers=()):
    return Backend(
        engine=engine,
        vocab_size=MODEL.vocab_size,
        max_context=MODEL.max_context,
        text_of=chat().decode,
        eos=None,
        paths=paths,
        logp=model_logp,
        greedy=model_greedy,
        workers=workers,
    )


# Processes.


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass
class ServerProcess:
    """A server program. `start` and `kill` as often as wanted; the port stays."""

    command: list[str]
    log: Path
    port: int = dataclasses.field(default_factory=free_port)
    process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *extra: str) -> None:
        """Starts it, with a process group of its own."""
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*self.command, "--port", str(self.port), *extra],
                cwd=ROOT,
                env=ENVIRONMENT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, path: str = "/health", timeout_s: float = 900.0) -> None:
        """Until it answers."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError, urllib.error.URLError):
                with urllib.request.urlopen(self.url + path, timeout=30):
                    return
            time.sleep(0.2)
        tail = self.log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{self.command} does not answer at {self.url}{path}:\n{tail}")

    def signal(self, number: int) -> None:
        """Sends a signal to it and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """kill -9, the whole group."""
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()


def serve_process(model_path: str, log: Path, version: str = "v0") -> ServerProcess:
    """Our own server as a program."""
    program = [sys.executable, "-m", "focus.engine.servers.serve", "--model-path", model_path]
    return ServerProcess([*program, "--weight-version", version, "--skip-server-warmup"], log)


def sglang_process(
    model_path: str, log: Path, version: str = "v0", flags: tuple[str, ...] = ()
) -> ServerProcess:
    """The real one; its environment is made if it is not there."""
    program = ["bash", str(ROOT / "scripts" / "sglang_cpu.sh"), "server"]
    sizes = ["--context-length", str(MODEL.max_context + 8), "--model-path", model_path]
    return ServerProcess([*program, *sizes, "--weight-version", version, *flags], log)


def router_process(workers, log: Path) -> ServerProcess:
    """The real router in front of workers."""
    program = ["bash", str(ROOT / "scripts" / "sglang_cpu.sh"), "router"]
    program += ["--prometheus-port", str(free_port())]  # else one router a machine
    return ServerProcess([*program, "--policy", "cache_aware", "--worker-urls", *workers], log)


@dataclasses.dataclass
class RealFleet:
    """Servers that are up, and the directories of the weights they may load."""

    workers: list[ServerProcess]
    router: ServerProcess
    paths: dict[str, str]

    @property
    def urls(self) -> list[str]:
        return [worker.url for worker in self.workers]


@contextlib.contextmanager
def real_fleet(root: Path):
    """Two workers and a router, started together; their logs are in `root`."""
    paths = export(root)
    workers = [sglang_process(paths["v0"], root / f"worker-{i}.log") for i in range(2)]
    router = router_process([worker.url for worker in workers], root / "router.log")
    install = ["bash", ROOT / "scripts" / "sglang_cpu.sh", "install"]
    subprocess.run(install, check=True, env=ENVIRONMENT)
    try:
        for process in (*workers, router):
            process.start()
        for process in (*workers, router):
            process.wait()
        yield RealFleet(workers, router, paths)
    finally:
        for process in (router, *workers):
            process.kill()
