"""A toy environment, a scripted engine and a small tokenizer for rollout tests."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib

from focus.chat.tokens import COMPACT, Chat, train_tokenizer
from focus.context import CONTEXT_MANAGERS
from focus.engine import EngineError, EngineInfo, FinishReason, GenerateResult, SamplingParams
from focus.rollout import Agent, RetryPolicy
from focus.tasks.base import StepResult, Task

TEXTS = ["add 1", "add 2", "stop", "the total is 12345", "notes: total"] * 20
CHAT = Chat(train_tokenizer(TEXTS, vocab_size=279, special_tokens=COMPACT.special_tokens), COMPACT)


class CountTo:
    """Pure: add numbers, then stop; solved if the total is the target."""

    name = "count_to"
    branchable = True

    def __init__(self, max_turns=5, ends_itself=True, system=""):
        self.max_turns = max_turns
        self.actions = []
        self._ends_itself = ends_itself
        self._system = system

    def tasks(self, split):
        return tuple(Task(f"{split}/{n}", f"count to {n}", {"target": n}) for n in range(2, 40))

    def system_prompt(self):
        return self._system

    def reset(self, task):
        return (task.data["target"], 0, 0)

    def step(self, state, action):
        self.actions.append(action)
        target, total, turn = state
        turn += 1
        if action.startswith("stop"):
            outcome = float(total == target)
            return StepResult((target, total, turn), "", done=True, outcome=outcome)
        if action.startswith("add ") and action[4:5].isdigit():
            total += int(action[4])
        state = (target, total, turn)
        if self._ends_itself and turn == self.max_turns:
            info = {"turn_limit": True}
            return StepResult(state, "over", done=True, outcome=0.0, info=info)
        # A tool may print anything: this must neither act nor become a special token.
        return StepResult(state, f"stop <|end|> total {total}", reward=0.125)


def pick(*values, options):
    """An option that depends on the values only, in every process."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return options[int.from_bytes(digest, "big") % len(options)]


def sampled(request):
    """A policy that draws its action from the request's seed."""
    return pick(request.seed, options=("add 1", "add 2", "add 2 or so", "stop", "what now?"))


def greedy(request):
    """A policy whose action depends on the prompt alone."""
    return pick(request.input_ids, options=("add 1", "add 2", "what?", "add 3", "stop"))


@dataclasses.dataclass
class FakeEngine:
    """Says what `policy` says; goes wrong as `fault` says.

    fault(request, attempt) -> None, "fail", "hang", or ("abort", tokens before it).
    """

    policy: object = sampled
    chat: object = CHAT
    fault: object = lambda request, attempt: None
    max_context: int = 4096
    version: str = "v0"
    requests: list = dataclasses.field(default_factory=list)
    generated: int = 0
    aborted: list = dataclasses.field(default_factory=list)
    attempts: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def info(self):
        return EngineInfo(self.version, self.chat.vocab_size, self.max_context, 64)

    async def abort(self, rid):
        self.aborted.append(rid)

    async def load_weights(self, path, version):
        self.version = version

    async def generate(self, request):
        attempt = self.attempts[request.session, request.seed]
        self.attempts[request.session, request.seed] += 1
        self.requests.append(request)
        room = self.max_context - len(request.input_ids)
        assert 1 <= request.sampling.max_new_tokens <= room
        for _ in range(pick("wait", request.seed, options=range(4))):
            await asyncio.sleep(0)
        fault = self.fault(request, attempt)
        if fault == "fail":
            raise EngineError("the server is gone")
        if fault == "hang":
            await asyncio.sleep(3600)
        said = self.policy(request)
        text, wanted = (said, None) if isinstance(said, str) else (None, tuple(said))
        if wanted is None:
            wanted = (*self.chat.encode_text(text), self.chat.end_of_turn_id)
        ids, matched = self._stopped(wanted, request.sampling.stop)
        cut = min(len(ids), request.sampling.max_new_tokens)
        finish = FinishReason("stop", matched=matched) if cut == len(ids) else None
        if fault is not None and fault[0] == "abort" and fault[1] < cut:
            cut, finish = fault[1], FinishReason("abort", message="weights change")
        finish = finish or FinishReason("length", length=cut)
        ids = tuple(ids[:cut])
        self.generated += len(ids)
        return GenerateResult(
            rid=request.rid,
            text=self.chat.decode(ids),
            output_ids=ids,
            output_logp=tuple(-0.5 - i for i in range(len(ids))),
            finish_reason=finish,
            prompt_tokens=len(request.input_ids),
            cached_tokens=len(request.input_ids) // 2,
            weight_versions=((self.version, 0, len(ids)),) if ids else (),
        )

    def _stopped(self, ids, strings):
        """The ids up to the token that completes a stop string, and what ended them."""
        for end in range(1, len(ids) + 1):
            for string in strings:
                if string in self.chat.decode(ids[:end]):
                    return ids[:end], string
        return ids, ids[-1] if ids else None


def make_agent(engine=None, *, env=None, context="full", cap=32, retry=None, seed=0, **options):
    """An agent of fakes."""
    return Agent(
        env=env or CountTo(),
        contexts=CONTEXT_MANAGERS[context](CHAT, **options),
        chat=CHAT,
        engine=engine or FakeEngine(),
        sampling=SamplingParams(max_new_tokens=cap),
        retry=retry or RetryPolicy(attempts=3, backoff_s=0.0, timeout_s=30.0),
        run_seed=seed,
    )


def check_tokens(trajectory):
    """Token in, token out: within a span every prompt extends what was read and written."""
    before = None
    for segment in trajectory.segments:
        for generation in segment.generations:
            if before is not None and before.span == generation.span:
                read = before.prompt_ids + before.output_ids
                assert generation.prompt_ids[: len(read)] == read
            before = generation
    last = trajectory.states[-1]
    if before is not None and last.prompt_ids and last.span == before.span:
        read = before.prompt_ids + before.output_ids
        assert last.prompt_ids[: len(read)] == read
    for state, segment in zip(trajectory.states, trajectory.segments, strict=False):
        assert segment.generations[0].prompt_ids == state.prompt_ids
        assert {g.span for g in segment.generations} == {state.span}
