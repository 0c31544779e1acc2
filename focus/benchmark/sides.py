"""The sides of the comparison: how each library does the same work.

Every side is tuned as its users would: ours spreads rows over two devices that a CPU is made to
look like, packs rollouts into rows with each shared prefix once, and keeps keys and values between
the turns of an agent. transformers runs on all cores with its default (fused) attention and fused
AdamW; sequences are sorted by length, and a micro-batch is padded to its longest; turns are
generated in batches of waiting agents, padded on the left, until the longest of a batch has ended,
and no keys survive a turn. tunix (`PeftTrainer`, full parameters, update only) does not pack: the
batch is padded to its longest sequence.

Whatever is timed also says what it found (`Timed.found`), so that work that is not the same
cannot be compared.

Run as a program, it measures one side: `python -m focus.benchmark.sides SIDE DIRECTORY WORK`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from focus.benchmark.work import ROLLOUT_TOKENS, Play, Work, trajectories

LEARNING_RATE = 1e-4
MICRO_BATCH = 8  # sequences of a padded micro-batch


@dataclasses.dataclass(frozen=True)
class Timed:
    """What is timed, and what it found.

    Attributes:
      repeat: does the work once more and returns when it is done.
      found: name -> numbers that other sides must find, too; asked for after the last repetition.
    """

    repeat: Callable[[], None]
    found: Callable[[], dict[str, list[float]]]


def written_tokens(plays: list[Play]) -> int:
    """Tokens that the policy wrote: what a side is paid for."""
    return sum(len(turn.written) for play in plays for turn in play.turns)


def padded_batch(
    plays: list[Play], index: np.ndarray, length: int | None = None
) -> dict[str, np.ndarray]:
    """Some rollouts as rows of their own, padded at the end.

    Args:
      plays: all rollouts.
      index: which of them.
      length: of the rows; None for the longest of them.

    Returns:
      `tokens`, `present` and `written` (those that are trained), each [len(index), length].
    """
    sequences = [plays[i].sequence() for i in index]
    length = length or max(len(tokens) for tokens, _ in sequences)
    shape = len(index), length
    tokens, present, written = (
        np.zeros(shape, np.int64),
        np.zeros(shape, bool),
        np.zeros(shape, bool),
    )
    for row, (sequence, mask) in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
        present[row, : len(sequence)] = True
        written[row, : len(sequence)] = mask
    return {"tokens": tokens, "present": present, "written": written}


def by_length(plays: list[Play], size: int) -> list[np.ndarray]:
    """Indices in parts of at most `size`, of sequences of like length."""
    order = np.argsort([len(play.sequence()[0]) for play in plays], kind="stable")
    return [order[start : start + size] for start in range(0, len(order), size)]


# --- ours ----------------------------------------------------------------------------------------


def ours(directory: Path, work: Work) -> Timed:
    """This project."""
    from focus.formats import hf

    config, params = hf.load_checkpoint(directory)
    if config.num_layers <= 4:  # as configs/quickstart.py does: a loop costs more than it saves
        config = dataclasses.replace(config, scan_unroll=config.num_layers)
    plays = work.draw(config.vocab_size)
    if work.task == "decode":
        return _decode_ours(config, params, plays, work)
    from focus.learner import packing, scoring, sharding, state
    from focus.learner import update as updates

    dense = work.shape == "dense"
    micro_rows = work.rows if dense else 4
    packed = packing.pack_trajectories(
        trajectories(plays),
        row_length=work.length if dense else 512,
        max_nodes=1 if dense else 32,
        max_states=2 if dense else 64,
        rows_multiple=1,
    )
    rows, mesh, model = packed.rows, sharding.make_mesh(), scoring.policy_model(config)
    if work.task == "score":
        score = scoring.make_score_fn(model, mesh=mesh, micro_rows=micro_rows)
        last = []

        def rescore() -> None:
            last[:] = [score(params, rows)]

        def scores() -> dict[str, list[float]]:
            logp = packed.to_trajectories(last[0].logp)
            counts = [sum(len(turn.written) for turn in play.turns) for play in plays]
            return {"logp": np.concatenate([x[:n] for x, n in zip(logp, counts)]).tolist()}

        return Timed(rescore, scores)
    optimizer = state.make_optimizer(state.OptimizerConfig(learning_rate=LEARNING_RATE))
    train, shardings = sharding.init_sharded(lambda: state.init_state(params, optimizer), mesh=mesh)
    update = updates.make_supervised_update(
        model,
        optimizer,
        updates.UpdateConfig(micro_rows=micro_rows),
        mesh=mesh,
        shardings=shardings,
    )
    mask = rows.generated_mask
    batch = updates.SupervisedBatch(rows, mask, np.ones(mask.shape, np.float32))
    box, found = [train], {"loss": [], "grad_norm": []}

    def step() -> None:
        box[0], metrics = update(box[0], batch)
        for name, values in found.items():
            values.append(metrics[name])

    return Timed(step, lambda: found)


def _decode_ours(config, params, plays: list[Play], work: Work) -> Timed:
    from focus.engine.embedded.engine import EmbeddedEngine
    from focus.engine.protocol import GenerateRequest, SamplingParams

    if work.shape == "dense":
        length = work.length + work.new_tokens + 1
        shapes = {
            "cache_length": length,
            "cache_buckets": (length,),
            "prefill_buckets": (work.length,),
            "batch_buckets": (work.in_flight,),
            "decode_steps": work.new_tokens,  # all requests end at the same time
            "retained": 0,
        }
    else:
        shapes = {
            "cache_length": ROLLOUT_TOKENS + 20,
            "cache_buckets": (96, 192, 288, 384),
            "prefill_buckets": (48,),
            "batch_buckets": (16, 32, 64),
            "retained": len(plays),
            "decode_steps": 8,
        }
    engine = EmbeddedEngine(
        config, params, decode=str, devices=-1, max_running=work.in_flight, **shapes
    )
    count = iter(range(10**9))

    async def write(prompt: tuple[int, ...], new: int, seed: int, temperature: float = 1.0):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=new, ignore_eos=True)
        request = GenerateRequest(f"{next(count)}", prompt, sampling, seed=seed)
        output = (await engine.generate(request)).output_ids
        assert len(output) == new
        return output

    async def play_all() -> None:
        engine.flush_cache()  # the repetition before has written the same
        states: list[list[tuple[int, ...]]] = [[] for _ in plays]
        ended = [asyncio.Event() for _ in plays]

        async def play(index: int, this: Play) -> None:
            prompt = this.prompt
            if this.parent is not None:
                await ended[this.parent].wait()
                prompt = states[this.parent][this.parent_turn]
            for number, turn in enumerate(this.turns):
                states[index].append(prompt)
                seed = index * 100 + number
                prompt += await write(prompt, len(turn.written), seed) + turn.read
            ended[index].set()

        await asyncio.gather(*(play(i, p) for i, p in enumerate(plays)))

    async def greedy() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(write(p.prompt, 1, 0, 0.0) for p in plays))

    return Timed(
        lambda: asyncio.run(play_all()),
        lambda: {"greedy": [float(ids[0]) for ids in asyncio.run(greedy())]},
    )


# --- Hugging Face transformers -------------------------------------------------------------------


def hf(directory: Path, work: Work) -> Timed:
    """transformers and torch, in eager mode on all cores."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            f"--against hf needs torch and transformers ({error}); pip install -e '.[dev]'"
        ) from error
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    plays = work.draw(model.config.vocab_size)
    if work.task == "decode":
        return _decode_hf(torch, model, plays, work)
    size = work.rows if work.shape == "dense" else MICRO_BATCH
    parts = by_length(plays, size)
    batches = [
        {name: torch.tensor(x) for name, x in padded_batch(plays, part).items()} for part in parts
    ]

    def logprobs(batch) -> torch.Tensor:
        """[B, L - 1] of each token but the first."""
        mask = None if work.shape == "dense" else batch["present"].long()
        logits = model(batch["tokens"], attention_mask=mask, use_cache=False).logits[:, :-1]
        targets = batch["tokens"][:, 1:]
        nll = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none"
        )
        return -nll.reshape(targets.shape)

    if work.task == "score":
        logp: dict[int, list[float]] = {}

        def rescore() -> None:
            with torch.no_grad():
                for part, batch in zip(parts, batches):
                    for i, row, kept in zip(part, logprobs(batch), batch["written"][:, 1:]):
                        logp[int(i)] = row[kept].tolist()

        return Timed(rescore, lambda: {"logp": [x for i in sorted(logp) for x in logp[i]]})
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    total, found = written_tokens(plays), {"loss": [], "grad_norm": []}

    def step() -> None:
        optimizer.zero_grad()
        value = 0.0
        for batch in batches:
            loss = -(logprobs(batch) * batch["written"][:, 1:]).sum() / total
            loss.backward()
            value += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found["loss"].append(value)
        found["grad_norm"].append(float(norm))

    return Timed(step, lambda: found)


def _decode_hf(torch, model, plays: list[Play], work: Work) -> Timed:
    def generate(prompts: list[tuple[int, ...]], new: int, sample: bool) -> np.ndarray:
        """[len(prompts), new] tokens."""
        longest = max(map(len, prompts))
        tokens = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = prompt
        index = np.arange(longest) >= longest - np.array([[len(p)] for p in prompts])
        with torch.no_grad():
            out = model.generate(
                torch.tensor(tokens),
                attention_mask=torch.tensor(index.astype(np.int64)),
                do_sample=sample,
                top_k=0 if sample else None,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )
        return out[:, longest:].numpy()

    def play_all() -> None:
        states: list[list[tuple[int, ...]]] = [[] for _ in plays]
        bases = [i for i, play in enumerate(plays) if play.parent is None]
        for group in (bases, [i for i in range(len(plays)) if i not in set(bases)]):
            prompts = {}
            for i in group:
                parent = plays[i].parent
                prompts[i] = (
                    plays[i].prompt if parent is None else states[parent][plays[i].parent_turn]
                )
            while prompts:
                waiting = sorted(prompts, key=lambda i: len(prompts[i]))[: work.in_flight]
                turns = {i: plays[i].turns[len(states[i])] for i in waiting}
                new = max(len(turn.written) for turn in turns.values())
                output = generate([prompts[i] for i in waiting], new, sample=True)
                for i, ids in zip(waiting, output.tolist()):
                    states[i].append(prompts[i])
                    prompts[i] += tuple(ids[: len(turns[i].written)]) + turns[i].read
                    if len(states[i]) == len(plays[i].turns):
                        del prompts[i]

    def found() -> dict[str, list[float]]:
        first = [generate([play.prompt], 1, sample=False)[0, 0] for play in plays]
        return {"greedy": [float(token) for token in first]}

    return Timed(play_all, found)


# --- tunix ---------------------------------------------------------------------------------------


def tunix(directory: Path, work: Work) -> Timed:
    """tunix: its Qwen3 model and `PeftTrainer`'s compiled step, all parameters trained."""
    try:
        from tunix.models.qwen3 import model as qwen3
        from tunix.models.qwen3 import params as qwen3_params
        from tunix.sft import peft_trainer
    except ImportError as error:
        raise ValueError(
            f"--against tunix needs google-tunix ({error}); install it in an environment of its "
            "own beside jax (it pins older versions of what the dev extra has) and name that "
            "interpreter with --python"
        ) from error
    import jax.numpy as jnp
    import optax

    described = json.loads((directory / "config.json").read_text())
    theta = described.get("rope_theta") or described.get("rope_parameters", {}).get("rope_theta")
    if work.task != "update":
        raise ValueError(f"tunix is measured at update only, not at {work.task!r}")
    if described["model_type"] != "qwen3" or theta != 1e6:
        raise ValueError(
            f"tunix computes rotary embeddings with theta 1e6 whatever the config says; "
            f"{described['model_type']} with theta {theta} would be another model. Use --size tiny"
        )
    config = qwen3.ModelConfig(
        num_layers=described["num_hidden_layers"],
        vocab_size=described["vocab_size"],
        embed_dim=described["hidden_size"],
        hidden_dim=described["intermediate_size"],
        num_heads=described["num_attention_heads"],
        head_dim=described["head_dim"],
        num_kv_heads=described["num_key_value_heads"],
        rope_theta=int(theta),
        norm_eps=described["rms_norm_eps"],
        use_tied_embedding=described["tie_word_embeddings"],
    )
    model = qwen3_params.create_model_from_safe_tensors(str(directory), config, dtype=jnp.float32)
    plays = work.draw(config.vocab_size)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(LEARNING_RATE, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0),
    )
    trainer = peft_trainer.PeftTrainer(
        model, optimizer, peft_trainer.TrainingConfig(eval_every_n_steps=10**9)
    )

    def model_input(batch) -> dict[str, object]:
        tokens, present = batch["tokens"], batch["present"]
        causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        return {
            "input_tokens": tokens,
            "input_mask": batch["written"],
            "positions": jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
            "attention_mask": causal & present[:, None, :],
        }

    trainer.with_gen_model_input_fn(model_input)
    train_step, _ = trainer.jit_train_and_eval_step()
    batch = padded_batch(plays, np.arange(len(plays)))
    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    found = {"loss": [], "grad_norm": []}

    def step() -> None:
        loss, _, norm = train_step(batch)
        found["loss"].append(float(loss))
        found["grad_norm"].append(float(norm))

    return Timed(step, lambda: found)


SIDES = {"ours": ours, "hf": hf, "tunix": tunix}


def measure(side: str, directory: Path, work: Work) -> dict:
    """Tokens per second of each repetition after a first one, and what was found."""
    timed = SIDES[side](directory, work)
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    tokens = written_tokens(work.draw(vocab_size))
    timed.repeat()  # compiles
    rates = []
    for _ in range(work.repeats):
        began = time.perf_counter()
        timed.repeat()
        rates.append(tokens / (time.perf_counter() - began))
    return {"rates": rates, "found": timed.found()}


if __name__ == "__main__":
    _side, _directory, _work = sys.argv[1:]
    print(json.dumps(measure(_side, Path(_directory), Work(**json.loads(_work)))))
