"""Speed of updating, scoring and decoding, beside Hugging Face transformers on the same work.

Both sides run the same model with the same weights on the same tokens, in processes of their own
that take turns, so that what else the machine does hits both. Compilation and a first round are
not counted. Reported are medians of tokens per second, and the median of the ratios of
neighbouring rounds.

    update   one AdamW step on rows of tokens, float32, gradients clipped
    score    log-probabilities of the tokens of the same rows
    decode   new tokens of a batch of requests at temperature 1, prefill included
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import rich.console
import rich.progress
import rich.table

from focus.learner import sharding
from focus.learner.packing import empty_rows
from focus.learner.state import OptimizerConfig, init_state, make_optimizer
from focus.learner.update import (
    SupervisedBatch,
    UpdateConfig,
    make_score_fn,
    make_supervised_update,
    policy_model,
)
from focus.policy import hf
from focus.policy import model as models
from focus.policy.transformer import ModelConfig
from focus.rollout.embedded import EmbeddedEngine
from focus.rollout.engine import GenerateRequest, SamplingParams

TASKS = ("update", "score", "decode")
SIZES = {
    "tiny": ModelConfig(
        vocab_size=768,
        d_model=192,
        num_layers=2,
        num_heads=6,
        num_kv_heads=6,
        head_dim=32,
        d_ff=512,
        max_context=512,
    ),
    "smollm2": ModelConfig(
        vocab_size=49152,
        d_model=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        d_ff=1536,
        max_context=512,
        rope_theta=1e5,
        qk_norm=False,
    ),
}
LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Work:
    """How much of what.

    Attributes:
      task: one of `TASKS`.
      rows: rows of an update, or requests in flight.
      length: tokens of a row, or of a prompt.
      new_tokens: of a request.
      repeats: timed repetitions in a process.
    """

    task: str
    rows: int
    length: int
    new_tokens: int = 64
    repeats: int = 3

    def __post_init__(self):
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}; got {self.task!r}")
        for name in ("rows", "length", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    @property
    def tokens(self) -> int:
        """Tokens that one repetition is worth."""
        return self.rows * (self.new_tokens if self.task == "decode" else self.length)

    def draw(self, vocab_size: int) -> np.ndarray:
        """[rows, length] random tokens, the same for both sides."""
        return np.random.default_rng(0).integers(0, vocab_size, (self.rows, self.length))


def _timed(repeat: Callable[[], None], work: Work) -> Iterator[float]:
    """Tokens per second of each repetition after a first one that is not counted."""
    repeat()
    for _ in range(work.repeats):
        began = time.perf_counter()
        repeat()
        yield work.tokens / (time.perf_counter() - began)


def run_ours(directory: Path, work: Work) -> Iterator[float]:
    """Tokens per second of this project, repetition by repetition."""
    config, params = hf.load_checkpoint(directory)
    tokens = work.draw(config.vocab_size)
    if work.task == "decode":
        yield from _timed(_decode_ours(config, params, tokens, work), work)
        return
    rows = empty_rows(work.rows, work.length, 1, 1)
    index = np.broadcast_to(np.arange(work.length, dtype=np.int32), tokens.shape)
    rows = dataclasses.replace(
        rows,
        tokens=tokens.astype(np.int32),
        positions=np.array(index),
        parent=np.array(index - 1),
        node_id=np.zeros_like(rows.node_id),
        visible_until=np.full_like(rows.visible_until, work.length),
    )
    mesh = sharding.make_mesh()
    if work.task == "score":
        score = make_score_fn(policy_model(config), mesh=mesh, micro_rows=work.rows)
        yield from _timed(lambda: score(params, rows), work)
        return
    optimizer = make_optimizer(OptimizerConfig(learning_rate=LEARNING_RATE))
    state, shardings = sharding.init_sharded(lambda: init_state(params, optimizer), mesh=mesh)
    update = make_supervised_update(
        policy_model(config),
        optimizer,
        UpdateConfig(micro_rows=work.rows),
        mesh=mesh,
        shardings=shardings,
    )
    mask = rows.parent >= 0
    batch = SupervisedBatch(rows, mask, np.ones(mask.shape, np.float32))
    box = [state]

    def step() -> None:
        box[0], _ = update(box[0], batch)

    yield from _timed(step, work)


def _decode_ours(config, params, tokens: np.ndarray, work: Work) -> Callable[[], None]:
    length = work.length + work.new_tokens + 1
    engine = EmbeddedEngine(
        config,
        params,
        decode=str,
        max_running=work.rows,
        retained=0,
        cache_length=length,
        cache_buckets=(length,),
        prefill_buckets=(work.length,),
        batch_buckets=(work.rows,),
    )
    sampling = SamplingParams(max_new_tokens=work.new_tokens, ignore_eos=True)
    count = iter(range(10**9))

    async def main() -> None:
        requests = [
            GenerateRequest(f"{next(count)}", tuple(row), sampling, seed=i)
            for i, row in enumerate(tokens.tolist())
        ]
        results = await asyncio.gather(*map(engine.generate, requests))
        assert all(len(r.output_ids) == work.new_tokens for r in results)

    return lambda: asyncio.run(main())


def run_hf(directory: Path, work: Work) -> Iterator[float]:
    """Tokens per second of transformers and torch."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            f"--against hf needs torch and transformers ({error}); pip install -e '.[dev]'"
        ) from error
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.tensor(work.draw(model.config.vocab_size))
    if work.task == "update":
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

        def repeat() -> None:
            optimizer.zero_grad()
            model(tokens, labels=tokens, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    elif work.task == "score":

        def repeat() -> None:
            with torch.no_grad():
                logits = model(tokens, use_cache=False).logits[:, :-1]
                torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])

    else:

        def repeat() -> None:
            with torch.no_grad():
                out = model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    do_sample=True,
                    top_k=0,
                    min_new_tokens=work.new_tokens,
                    max_new_tokens=work.new_tokens,
                    pad_token_id=0,
                )
            assert out.shape[1] == work.length + work.new_tokens

    yield from _timed(repeat, work)


SIDES = {"ours": run_ours, "hf": run_hf}


def _measure(side: str, directory: Path, work: Work) -> list[float]:
    """One side in a process of its own."""
    command = [sys.executable, "-m", "focus.benchmark", side, str(directory)]
    done = subprocess.run(
        [*command, json.dumps(dataclasses.asdict(work))], capture_output=True, text=True
    )
    if done.returncode:
        raise ValueError(f"{side} failed: {done.stderr.strip().splitlines()[-1]}")
    return [float(line) for line in done.stdout.split()]


def compare(
    work: Work,
    *,
    size: str = "tiny",
    model_path: str | None = None,
    against: str | None = None,
    rounds: int = 3,
) -> dict:
    """Measures ours, and the other side where one is named, in turn.

    Args:
      work: what to do.
      size: one of `SIZES`, with random weights; not read with `model_path`.
      model_path: Hugging Face directory.
      against: "hf" or None.
      rounds: processes of each side.

    Returns:
      Figures for JSON: per side all rates and their median, and `ratio`.

    Raises:
      ValueError: an unknown name, or a side that fails.
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}; got {size!r}")
    sides = ["ours"] + ([against] if against else [])
    for side in sides:
        if side not in SIDES:
            raise ValueError(f"--against must be one of {', '.join(SIDES)}; got {side!r}")
    rates: dict[str, list[list[float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(model_path) if model_path else Path(scratch) / "model"
        if not model_path:
            params = models.init_params(SIZES[size], jax.random.key(0))
            hf.save_checkpoint(directory, SIZES[size], params, dtype="float32")
        console = rich.console.Console(stderr=True)
        order = [(r, side) for r in range(rounds) for side in sides]
        for _, side in rich.progress.track(order, description=work.task, console=console):
            rates[side].append(_measure(side, directory, work))
    figures: dict = {"work": dataclasses.asdict(work), "model": model_path or size}
    for side, parts in rates.items():
        figures[side] = {
            "tokens_per_second": statistics.median(x for part in parts for x in part),
            "all": parts,
        }
    if against:
        pairs = zip(rates["ours"], rates[against])
        ratios = [statistics.median(a) / statistics.median(b) for a, b in pairs]
        figures["ratio"] = statistics.median(ratios)
        figures["ratios"] = ratios
    return figures


def table(figures: dict) -> rich.table.Table:
    """What `compare` found."""
    work = figures["work"]
    out = rich.table.Table(
        title=f"{work['task']}, {figures['model']}, {work['rows']} x {work['length']} tokens"
    )
    for column in ("side", "tokens/s", "ratio"):
        out.add_column(column, justify="left" if column == "side" else "right")
    for side in SIDES:
        if side in figures:
            ratio = f"{figures['ratio']:.2f}" if side == "ours" and "ratio" in figures else ""
            out.add_row(side, f"{figures[side]['tokens_per_second']:,.0f}", ratio)
    return out


if __name__ == "__main__":
    _side, _directory, _work = sys.argv[1:]
    for _rate in SIDES[_side](Path(_directory), Work(**json.loads(_work))):
        print(_rate, flush=True)
