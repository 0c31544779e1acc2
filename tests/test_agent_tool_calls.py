"""The turn loop with a model's own format: its chat template, its tool calls, its stop string."""

import asyncio
import dataclasses
import json
import random

import pytest
from rollout_fakes import CountTo, FakeEngine, check_tokens
from test_chat_templates import END, PAD, TOKENIZER, TOOLS

from focus.chat.template_chat import TemplateChat
from focus.chat.tool_calls import CLOSE, FORMATS, ToolCall, render
from focus.context import Full
from focus.engine import SamplingParams
from focus.rollout import Agent, Rollout, UnlimitedAccount, play
from focus.rollout.tool_environment import ToolCalls
from focus.tasks import scripted
from focus.tasks.deep_search import make_deep_search

ENV = make_deep_search(world="fictional", seed=0, num_countries=12, hops=(1, 2), num_train=8)
CHAT = TemplateChat(TOKENIZER, TOOLS, pad_token=PAD, variables={"tools": list(ENV.tools())})


def run(texts, *, format="hermes", stop=(CLOSE,), env=ENV):
    queue = list(texts)
    engine = FakeEngine(policy=lambda request: queue.pop(0), chat=CHAT, max_context=10**6)
    agent = Agent(
        env=ToolCalls(env, format),
        contexts=Full(CHAT),
        chat=CHAT,
        engine=engine,
        sampling=SamplingParams(max_new_tokens=400, stop=stop),
    )
    task = env.tasks("train")[0]
    return asyncio.run(
        play(agent, agent.start(task), Rollout("0/0.0", task.id, 0), UnlimitedAccount())
    )


def solution(format):
    """The scripted agent's calls on the first task, in the layout of `format`."""
    task = ENV.tasks("train")[0]
    agent = scripted.ScriptedAgent(random.Random(0), scripted.NO_ERRORS)
    agent.reset(task.prompt)
    state, observation, calls, results = ENV.reset(task), "", [], []
    parameter = {"search": "query", "open": "doc", "answer": "text"}
    while not results or not results[-1].done:
        name, _, argument = agent.act(observation).splitlines()[-1].partition("(")
        calls.append(render([ToolCall(name, {parameter[name]: argument[:-1]})], format))
        results.append(ENV.call(state, name, {parameter[name]: argument[:-1]}))
        state, observation = results[-1].state, results[-1].observation
    return calls, results


@pytest.mark.parametrize("stop", [(CLOSE,), ()])
@pytest.mark.parametrize("format", FORMATS)
def test_an_episode_of_tool_calls_is_solved_and_is_the_whole_template(format, stop):
    calls, results = solution(format)
    trajectory = run([f"I call. {call} and more" for call in calls], format=format, stop=stop)
    assert (trajectory.end, trajectory.outcome) == ("terminal", 1.0)
    assert [s.observation for s in trajectory.segments] == [r.observation for r in results]
    check_tokens(trajectory)
    messages = [{"role": "user", "content": ENV.tasks("train")[0].prompt}]
    for j, (segment, call) in enumerate(zip(trajectory.segments, calls)):
        prompt = CHAT.encode_messages(messages, generation_prompt=True)
        assert trajectory.states[j].prompt_ids == prompt
        (generation,) = segment.generations
        if stop:  # the closing tag is the last thing that was sampled, and it is trained
            assert CHAT.decode(generation.output_ids).endswith(CLOSE)
            assert generation.output_ids[-1] != CHAT.end_of_turn_id
            assert segment.text == f"I call. {call}"
        else:
            assert generation.output_ids[-1] == CHAT.end_of_turn_id
        messages += [
            {"role": "assistant", "content": segment.text},
            {"role": "tool", "content": segment.observation},
        ]
    shown = TOKENIZER.decode(list(trajectory.states[0].prompt_ids), skip_special_tokens=False)
    for tool in ENV.tools():
        assert json.dumps(tool, ensure_ascii=False) in shown
    assert f"<tool_response>\n{results[0].observation}\n</tool_response>{END}" in TOKENIZER.decode(
        list(trajectory.states[1].prompt_ids), skip_special_tokens=False
    )


def test_a_stop_string_that_is_no_tag_is_no_part_of_the_action():
    calls, _ = solution("hermes")
    trajectory = run([f"{call}\nObservation: made up" for call in calls], stop=("\nObs",))
    assert trajectory.outcome == 1.0
    assert [s.text for s in trajectory.segments] == calls


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("search(Abad)", "write one <tool_call> a turn, not 0"),
        ("", "write one <tool_call> a turn, not 0"),
        (render([ToolCall("search", {"query": "x"})] * 2, "hermes"), "not 2"),
        ("<tool_call>\n{", "not JSON"),
        ('<tool_call>\n{"name": "search", "arguments": {"query": "x"}}', "not closed"),
        (render([ToolCall("fly", {})], "hermes"), "use search"),
        ("<think>" + render([ToolCall("search", {"query": "x"})], "hermes"), "not 0"),
    ],
)
def test_what_cannot_be_read_costs_its_turn_and_says_why(action, reason):
    env = ToolCalls(ENV, "hermes")
    state = env.reset(env.tasks("train")[0])
    result = env.step(state, action)
    assert reason in result.observation and result.observation.startswith("error: ")
    assert (result.state.turn, result.done) == (1, False)


def test_thinking_about_a_call_is_not_calling():
    call, other = (render([ToolCall("search", {"query": q})], "hermes") for q in ("x", "Abad"))
    env = ToolCalls(ENV, "hermes")
    state = env.reset(env.tasks("train")[0])
    assert env.step(state, f"<think>{call}</think>{other}") == env.step(state, other)
    # A template may have opened the thinking in the prompt.
    assert env.step(state, f"or {call}?</think>\n\n{other}") == env.step(state, other)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_searched_for_may_be_a_tag(format):
    env = ToolCalls(ENV, format)
    state = env.reset(env.tasks("train")[0])
    text = render([ToolCall("search", {"query": "</think> Abad"})], format)
    result = env.step(state, f"<think>hm</think>{text}")
    assert result == ENV.call(state, "search", {"query": "</think> Abad"})
    assert result.info["argument"] == "</think> Abad"


def test_everything_but_the_action_is_the_environments_own():
    env = ToolCalls(ENV, "qwen")
    assert (env.name, env.max_turns, env.branchable) == (ENV.name, ENV.max_turns, True)
    assert env.tasks("train") == ENV.tasks("train") and env.tools() == ENV.tools()
    state = env.reset(env.tasks("train")[0])
    assert env.state_key(state) == dataclasses.astuple(state)


def test_environments_without_tools_and_unknown_formats_are_refused():
    with pytest.raises(ValueError, match="'count_to' has no tools .*chat.tool_calls=''"):
        ToolCalls(CountTo(), "hermes")
    with pytest.raises(ValueError, match="unknown tool-call format 'xml'"):
        ToolCalls(ENV, "xml")
