"""The turn loop: from any state to the end of the episode, token in, token out.

`play` knows nothing of groups, critics or branches. A base rollout starts at a task's first
state, a branch at a state of another trajectory; both are the same call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Protocol

from focus.chat import tool_calls
from focus.context.base import Context, ContextManager
from focus.engine.protocol import Engine, EngineError, FleetDead, GenerateRequest, SamplingParams
from focus.rollout.pool import Account, Patience, RetryPolicy, generate_with_retries
from focus.rollout.tools import ToolError, Tools, ToolUse
from focus.tasks.base import Environment, StepResult, Task
from focus.types import Generation, GenerationKind, Segment, State, Trajectory, TrajectoryEnd


class ChatDecoder(Protocol):
    """The part of `focus.chat.tokens.Chat` that the loop needs."""

    stop_token_ids: tuple[int, ...]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""


@dataclasses.dataclass(frozen=True)
class Agent:
    """All that stays the same from one rollout to the next.

    Attributes:
      env: the task's environment.
      contexts: what the policy sees of an episode.
      chat: turns output ids into text; the environment reads text.
      engine: where tokens come from.
      sampling: how to sample; `max_new_tokens` is the cap of one turn. The chat's stop tokens
        are added.
      retry: what to do when the engine fails.
      tools: calls the environment.
      patience: how long the step that plays now waits for what has failed.
      tool_use: what the calls of the step that plays now have cost.
      run_seed: with a trajectory's id it fixes every seed of that trajectory.
    """

    env: Environment
    contexts: ContextManager
    chat: ChatDecoder
    engine: Engine
    sampling: SamplingParams
    retry: RetryPolicy = RetryPolicy()
    tools: Tools = dataclasses.field(default_factory=Tools)
    patience: Patience = dataclasses.field(default_factory=Patience)
    tool_use: ToolUse = dataclasses.field(default_factory=ToolUse)
    run_seed: int = 0

    def before(self, task: Task) -> State:
        """The first state of a task as the policy sees it, without the environment's part."""
        context = self.contexts.start(self.env.system_prompt(), task.prompt)
        return State(None, context, context.prompt_ids, turn=0)

    def start(self, task: Task) -> State:
        """The first state of a task, made at once; where that may wait, see `EpisodeStart`."""
        return dataclasses.replace(self.before(task), env=self.env.reset(task))


class EpisodeStart:
    """The first state of a task: made when the first play asks for it, and shared by its group.

    Args:
      agent: the player.
      task: what is played.
    """

    def __init__(self, agent: Agent, task: Task):
        self._agent, self._task = agent, task
        self._state: State | None = None
        self._error: ToolError | None = None
        self._lock = asyncio.Lock()

    @property
    def before(self) -> State:
        """See `Agent.before`."""
        return self._agent.before(self._task)

    async def get(self, rollout_id: str) -> State:
        """The state.

        Raises:
          ToolError: the environment could not be reset; the same for the whole group.
        """
        async with self._lock:
            if self._error is not None:
                raise ToolError(str(self._error))
            if self._state is None:
                agent = self._agent
                try:
                    env = await agent.tools.reset(
                        agent.env,
                        self._task,
                        of=f"rollout {rollout_id}",
                        patience=agent.patience,
                        use=agent.tool_use,
                    )
                except ToolError as error:
                    self._error = error
                    raise
                self._state = dataclasses.replace(self.before, env=env)
            return self._state


@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
    """Which trajectory a play makes; see `Trajectory` for the fields.

    `session` routes requests that share prefixes to one server: the id of the base rollout.
    """

    id: str
    task_id: str
    group_id: int
    parent: str | None = None
    parent_state: int | None = None

    @property
    def session(self) -> str:
        """The base rollout's id; branches leave base rollouts."""
        return self.id if self.parent is None else self.parent


def request_seed(run_seed: int, trajectory_id: str, generation: int, part: int = 0) -> int:
    """A seed that depends on what is sampled, never on when.

    Args:
      run_seed: seed of the run.
      trajectory_id: unique in the run.
      generation: index of the generation in its trajectory.
      part: how often it was aborted and resumed. A resume must not draw the same numbers.

    Returns:
      An integer in [0, 2^31), the same in every process.
    """
    text = f"{run_seed}|{trajectory_id}|{generation}|{part}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1


@dataclasses.dataclass(slots=True)
class _Sample:
    """A generation in the making: the parts between aborts, joined.

    `cut` says why the episode cannot go on from here, None if it can.
    """

    output_ids: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)
    weight_versions: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    cached_tokens: int | None = None
    finish_reason: str = "abort"
    stop_string: str | None = None
    cut: TrajectoryEnd | None = None
    error: str | None = None

    def generations(
        self, kind: GenerationKind, prompt_ids: tuple[int, ...], span: int
    ) -> tuple[Generation, ...]:
        """The record, or nothing if not a single request was answered with a token."""
        if self.cut is not None and not self.output_ids:
            return ()
        return (
            Generation(
                kind=kind,
                prompt_ids=prompt_ids,
                output_ids=tuple(self.output_ids),
                logp=tuple(self.logp),
                finish_reason=self.finish_reason,
                weight_versions=tuple(self.weight_versions),
                cached_tokens=self.cached_tokens or 0,
                span=span,
            ),
        )


class _Sampler:
    """Samples the generations of one trajectory, one after the other."""

    def __init__(self, agent: Agent, rollout: Rollout, account: Account):
        self._agent = agent
        self._rollout = rollout
        self._account = account
        self._max_context = agent.engine.info().max_context
        self._generation = -1

    async def sample(self, prompt_ids: tuple[int, ...], cap: int) -> _Sample:
        """One generation of at most `cap` tokens, of what the account grants, of the room.

        The grant is held until the generation is over, so a resume after an abort asks for what
        is left of it and no more.
        """
        self._generation += 1
        sample = _Sample()
        want = min(cap, self._max_context - len(prompt_ids))
        if want < 1:
            sample.cut = "context_limit"
            return sample
        granted = await self._account.reserve(want)
        if granted == 0:
            sample.cut = "budget"
            return sample
        try:
            await self._complete(sample, prompt_ids, granted)
        except FleetDead:
            raise
        except EngineError as error:
            sample.cut, sample.error = "failed", str(error)
        finally:
            self._account.settle(granted, len(sample.output_ids))
        if sample.finish_reason == "length" and granted < want:
            sample.cut = "budget"
        return sample

    async def _complete(self, sample: _Sample, prompt_ids: tuple[int, ...], granted: int) -> None:
        """Asks until the generation is over: a request that is aborted is resumed."""
        agent, rollout = self._agent, self._rollout
        stop_token_ids = tuple(
            dict.fromkeys(agent.sampling.stop_token_ids + agent.chat.stop_token_ids)
        )
        part, fruitless = 0, 0
        while sample.finish_reason == "abort":
            left = granted - len(sample.output_ids)
            if left == 0:
                sample.finish_reason = "length"
                return
            request = GenerateRequest(
                rid=f"{rollout.id}:{self._generation}.{part}",
                input_ids=prompt_ids + tuple(sample.output_ids),
                sampling=dataclasses.replace(
                    agent.sampling, max_new_tokens=left, stop_token_ids=stop_token_ids
                ),
                seed=request_seed(agent.run_seed, rollout.id, self._generation, part),
                session=rollout.session,
            )
            with agent.tool_use.sampling():
                result = await generate_with_retries(
                    agent.engine, request, agent.retry, agent.patience
                )
            offset = len(sample.output_ids)
            sample.output_ids += result.output_ids
            sample.logp += result.output_logp
            sample.weight_versions += [
                (version, start + offset, end + offset)
                for version, start, end in result.weight_versions
            ]
            if sample.cached_tokens is None:
                sample.cached_tokens = result.cached_tokens
            sample.finish_reason = result.finish_reason.type
            if isinstance(result.finish_reason.matched, str):
                sample.stop_string = result.finish_reason.matched
            part += 1
            fruitless = 0 if result.output_ids else fruitless + 1
            if sample.finish_reason == "abort" and fruitless >= agent.retry.attempts:
                raise EngineError(
                    f"request {request.rid} was aborted {fruitless} times without a token"
                )


async def play(
    agent: Agent, start: State | EpisodeStart, rollout: Rollout, account: Account
) -> Trajectory:
    """Plays one episode from a state to its end.

    Why it ends, and what its outcome is then:

        terminal       the environment ended it             the environment's outcome
        turn_limit     `env.max_turns` turns were taken     the environment's, else 0
        context_limit  the next prompt has no room          0
        format         a summary broke its format           0
        budget         the account granted too little       None
        failed         engine or tool failed for good       None

    A generation that the budget or a failure cut in the middle is kept, since its tokens were
    paid, but never acted on. Then the last state's prompt ends with its last token. Except after
    `terminal`, `turn_limit` and `format`, which end the task or fail it, the last state says where
    the trajectory was cut: its `prompt_ids` are set.

    Args:
      agent: environment, context manager, engine.
      start: where to start; the first state of a task, or any state of another trajectory.
      rollout: ids of the trajectory to make.
      account: pays for every token.

    Returns:
      The trajectory.

    Raises:
      FleetDead: nobody answers any more, so that no rollout can end.
    """
    sampler = _Sampler(agent, rollout, account)
    states: list[State] = []
    segments: list[Segment] = []

    def finish(end: TrajectoryEnd, outcome: float | None, error: str | None = None):
        return Trajectory(
            id=rollout.id,
            task_id=rollout.task_id,
            group_id=rollout.group_id,
            states=tuple(states),
            segments=tuple(segments),
            outcome=outcome,
            success=outcome is not None and outcome >= 1.0,
            end=end,
            parent=rollout.parent,
            parent_state=rollout.parent_state,
            error=error,
        )

    try:
        states.append(start if isinstance(start, State) else await start.get(rollout.id))
    except ToolError as error:
        return unplayed(start, rollout, str(error))
    while True:
        state = states[-1]
        of = f"rollout {rollout.id}, turn {state.turn}"
        act = await sampler.sample(state.prompt_ids, agent.sampling.max_new_tokens)
        generations = act.generations("act", state.prompt_ids, state.span)
        text = _action_text(agent.chat, act)
        if act.cut is not None:
            if generations:
                segments.append(Segment(generations, text, observation=""))
                states.append(_cut_state(state, state.prompt_ids, act))
            return finish(act.cut, _outcome_of_cut(act.cut), act.error)

        try:
            step = await agent.tools.step(
                agent.env,
                state.env,
                text,
                of=of,
                patience=agent.patience,
                use=agent.tool_use,
            )
            arrival, cites = _arrive(agent, state, act, step, of), None
        except ToolError as error:
            segments.append(Segment(generations, text, observation=""))
            states.append(_cut_state(state, state.prompt_ids, act))
            return finish("failed", None, str(error))
        context = arrival.state.context
        if agent.contexts.closing if arrival.end else agent.contexts.needs_compaction(context):
            arrival, summary, cites = await _summarise(agent, sampler, arrival)
            generations += summary
        segments.append(Segment(generations, text, step.observation, step.reward, step.info, cites))
        states.append(arrival.state)
        if arrival.end is not None:
            return finish(arrival.end, arrival.outcome, arrival.error)


def unplayed(start: EpisodeStart, rollout: Rollout, why: str) -> Trajectory:
    """A rollout that failed before its first turn."""
    return Trajectory(
        id=rollout.id,
        task_id=rollout.task_id,
        group_id=rollout.group_id,
        states=(start.before,),
        segments=(),
        outcome=None,
        success=False,
        end="failed",
        error=why,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Arrival:
    """Where a turn has led: to the next state, or to the end."""

    state: State
    end: TrajectoryEnd | None = None
    outcome: float | None = None
    error: str | None = None


def _arrive(agent: Agent, state: State, act: _Sample, step: StepResult, of: str) -> _Arrival:
    """What a turn that was acted on leads to, before any summary.

    Raises:
      ToolError: what the environment has answered cannot be put before the policy.
    """
    try:
        context = agent.contexts.observe(state.context, act.output_ids, step.observation)
    except ValueError as error:
        raise ToolError(f"{of}: the answer of {agent.env.name} cannot be shown: {error}") from error
    after = State(step.state, context, context.prompt_ids, state.turn + 1, context.span)
    at_limit = step.info.get("turn_limit") or (not step.done and after.turn >= agent.env.max_turns)
    if not (at_limit or step.done):
        return _Arrival(after)
    ended = dataclasses.replace(after, prompt_ids=())  # nothing is read any more
    if at_limit:
        return _Arrival(ended, "turn_limit", step.outcome or 0.0)
    return _Arrival(ended, "terminal", step.outcome)


async def _summarise(
    agent: Agent, sampler: _Sampler, arrival: _Arrival
) -> tuple[_Arrival, tuple[Generation, ...], tuple[int, ...] | None]:
    """Asks for a summary: to go on from, or of an episode that is over.

    The latter decides nothing unless it breaks its format; what cuts it ends no episode.

    Returns:
      Where it has led, the generation, and the turns that it cites.
    """
    state, over = arrival.state, arrival.end is not None
    prompt_ids = agent.contexts.summary_prompt(state.context)
    sample = await sampler.sample(prompt_ids, agent.contexts.summary_tokens)
    generations = sample.generations("summary", prompt_ids, state.context.span)
    cites = None
    if sample.cut is None:
        text = agent.chat.decode(sample.output_ids)
        cites = agent.contexts.citations(state.context, text)
    if cites == ():
        state = dataclasses.replace(state, prompt_ids=())
        return _Arrival(state, "format", 0.0), generations, cites
    if sample.cut is None and not over:
        context: Context = agent.contexts.compact(state.context, text)
        state = dataclasses.replace(
            state, context=context, prompt_ids=context.prompt_ids, span=context.span
        )
    elif sample.output_ids and not over:
        state = _cut_state(state, prompt_ids, sample)
    if sample.cut is not None and not over:
        outcome = _outcome_of_cut(sample.cut)
        return _Arrival(state, sample.cut, outcome, sample.error), generations, cites
    return dataclasses.replace(arrival, state=state), generations, cites


def _action_text(chat: ChatDecoder, act: _Sample) -> str:
    """The action as the environment reads it.

    Decoded as a whole, since a resume may split a character, and without the stop string; one
    that closes a tool call is part of the call.
    """
    text = chat.decode(act.output_ids)
    if act.stop_string in (None, tool_calls.CLOSE) or act.stop_string not in text:
        return text
    return text[: text.rfind(act.stop_string)]


def _cut_state(state: State, prompt_ids: tuple[int, ...], sample: _Sample) -> State:
    """Where a generation was cut: the same state, after the tokens that it did get."""
    return dataclasses.replace(state, prompt_ids=prompt_ids + tuple(sample.output_ids))


def _outcome_of_cut(end: TrajectoryEnd) -> float | None:
    """A context that ran full is the policy's failure; the other cuts say nothing about it."""
    return 0.0 if end == "context_limit" else None
