"""Tools that are slow or broken: what they cost, and whom (pitfalls 39 and 41)."""

import asyncio
import logging
import threading
import time

import pytest
from rollout_fakes import CHAT, CountTo, FakeEngine, check_tokens, make_agent, sampled

from focus.evaluate import evaluate
from focus.rollout import (
    AllRolloutsFailed,
    EpisodeCost,
    EpisodeStart,
    Pool,
    RetryPolicy,
    Rollout,
    StepConfig,
    StepPlay,
    TokenAccount,
    ToolLimits,
    Tools,
    UnlimitedAccount,
    play,
)

QUICK = dict(backoff_s=0.0)


def agent_of(env, engine=None, **limits):
    agent = make_agent(engine or FakeEngine(policy=sampled), env=env)
    return agent.__class__(**(vars(agent) | {"tools": Tools(ToolLimits(**(QUICK | limits)))}))


def play_all(agent, count, *, account=None):
    """Trajectories of `count` plays at once, and the seconds that they took."""

    async def scenario():
        pool = Pool(count)
        for i in range(count):
            task = agent.env.tasks("train")[i % 38]
            rollout = Rollout(f"0/{i}.0", task.id, i)
            start = EpisodeStart(agent, task)
            pool.submit(lambda start=start, rollout=rollout: play(agent, start, rollout, paid))
        started = time.perf_counter()
        return await pool.join(), time.perf_counter() - started

    paid = account or UnlimitedAccount()
    return asyncio.run(scenario())


class Broken(CountTo):
    """Fails where `fault(action, tries)` says so."""

    def __init__(self, fault, **options):
        super().__init__(**options)
        self.fault, self.tries = fault, {}

    def step(self, state, action):
        key = (state, action)
        self.tries[key] = self.tries.get(key, 0) + 1
        error = self.fault(action, self.tries[key])
        if isinstance(error, BaseException):
            raise error
        return super().step(state, action) if error is None else error


class Waiting(CountTo):
    """Takes a while, in a thread."""

    blocking = True

    def __init__(self, seconds, **options):
        super().__init__(**options)
        self.seconds, self.now, self.most, self.lock = seconds, 0, 0, threading.Lock()

    def step(self, state, action):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1
        return super().step(state, action)


class WaitingAsync(Waiting):
    """Takes a while, as a coroutine."""

    blocking = False

    async def step(self, state, action):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.seconds)
        self.now -= 1
        return CountTo.step(self, state, action)


# Broken tools.


@pytest.mark.parametrize(
    "error", [TimeoutError("timed out"), ConnectionRefusedError(111, "refused"), KeyError("x")]
)
def test_a_call_that_raises_once_is_tried_again_and_changes_nothing(error):
    env = Broken(lambda action, tries: error if tries == 1 else None)
    (trajectory,), _ = play_all(agent_of(env), 1)
    assert trajectory == play_all(agent_of(CountTo()), 1)[0][0]
    assert set(env.tries.values()) == {2}


def test_a_call_that_raises_for_good_ends_its_own_rollout_alone():
    def policy(request):
        return "add 9" if request.session == "0/3.0" else sampled(request)

    def fault(action, tries):
        return ConnectionError("no route") if action == "add 9" else None

    agent = agent_of(Broken(fault), FakeEngine(policy=policy), attempts=2)
    account = TokenAccount(10_000)
    trajectories, _ = play_all(agent, 8, account=account)
    healthy, _ = play_all(agent_of(CountTo(), FakeEngine(policy=policy)), 8)
    assert [i for i in range(8) if trajectories[i] != healthy[i]] == [3]
    lost = trajectories[3]
    assert (lost.end, lost.outcome, lost.success) == ("failed", None, False)
    assert lost.error == (
        "rollout 0/3.0, turn 0: count_to.step('add 9') failed 2 times, at last: "
        "ConnectionError: no route"
    )
    # What it has written is paid and kept; the state is that in which it wrote.
    check_tokens(lost)
    assert lost.num_tokens == len(CHAT.encode_text("add 9")) + 1
    assert account.budget.reserved == 0
    assert account.budget.spent == sum(t.num_tokens for t in trajectories)
    assert agent.tool_use.faults == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "a StepResult was due"),
        ("stop", "a StepResult was due, not str"),
        ((1, b"bytes", 0.0), "observation must be text, not bytes"),
        ((1, "", float("nan")), "reward nan and outcome None must be finite"),
        (SystemExit(1), "SystemExit"),
        (StopIteration(), "StopIteration"),
    ],
)
@pytest.mark.parametrize("blocking", [False, True])
def test_an_answer_that_is_none_is_a_failed_call(answer, why, blocking):
    from focus.tasks.base import StepResult

    if isinstance(answer, SystemExit) and not blocking:
        pytest.skip("on the event loop it ends the process, as anywhere")
    answer = StepResult(*answer) if isinstance(answer, tuple) else answer
    env = Broken(lambda action, tries: "None" if answer is None else answer)
    env.blocking = blocking
    (trajectory,), _ = play_all(agent_of(env), 1)
    assert trajectory.end == "failed" and why in trajectory.error


def test_a_task_that_cannot_be_set_up_fails_its_group_and_no_other():
    resets = []

    class Env(CountTo):
        def reset(self, task):
            resets.append(task.id)
            if task.id == "train/3":
                raise OSError("no sandbox")
            return super().reset(task)

    agent = agent_of(Env(), attempts=2)
    config = StepConfig(budget=400, group_size=4)
    step = StepPlay(config, agent, 5, EpisodeCost(15.0, weight=10.0))
    base = asyncio.run(step.base(iter(agent.env.tasks("train"))))
    lost = [t for t in base.trajectories if t.end == "failed"]
    assert {t.task_id for t in lost} == {"train/3"} and len(lost) == 4
    assert all(not t.segments and t.states[0].prompt_ids for t in lost)
    assert "rollout 5/1.0: count_to.reset(train/3) failed 2 times" in lost[0].error
    assert resets.count("train/3") == 2  # once for the whole group, tried twice
    assert all(resets.count(task) == 1 for task in set(resets) - {"train/3"})


def test_lost_rollouts_are_counted_and_branches_leave_the_others():
    env = Broken(lambda action, tries: OSError("gone") if action == "add 2 or so" else None)
    config = StepConfig(
        budget=900, group_size=2, base_fraction=0.5, rule="uniform", ks=(1, 2), rounds=1
    )
    agent = agent_of(env)
    step = StepPlay(config, agent, 0, EpisodeCost(15.0, weight=10.0))

    async def scenario():
        from focus.rollout import uninformed_scores

        return await step.branch(await step.base(iter(env.tasks("train"))), uninformed_scores)

    collected = asyncio.run(scenario())
    lost = [t for t in collected.tree.trajectories if t.end == "failed"]
    assert 0 < len(lost) == collected.technical_failures < len(collected.tree.trajectories)
    assert collected.tool_use.faults == 3 * len(lost)
    assert collected.tree.branches
    assert not {b.parent for b in collected.tree.branches} & {t.id for t in lost}
    assert collected.ledger.seconds["tools"] >= 0 and collected.ledger.seconds["rollout"] > 0


def test_where_nothing_comes_back_from_a_full_house_the_rest_is_not_played():
    engine = FakeEngine(policy=sampled)
    env = Broken(lambda action, tries: OSError("gone"))
    config = StepConfig(budget=3000, group_size=2, concurrency=6)
    step = StepPlay(config, agent_of(env, engine), 0, EpisodeCost(15.0, weight=10.0))
    base = asyncio.run(step.base(iter(env.tasks("train"))))
    assert {t.end for t in base.trajectories} == {"failed"} and len(base.trajectories) == 2 * 38
    played = [t for t in base.trajectories if t.segments]
    assert 6 <= len(played) < 12
    assert base.trajectories[-1].error == "not played, since all rollouts before it failed"
    assert step.tool_use.calls < 12 * 4


def test_an_evaluation_without_a_result_says_whose_call_failed_first():
    agent = agent_of(Broken(lambda action, tries: OSError("index is gone")))
    with pytest.raises(AllRolloutsFailed) as error:
        asyncio.run(evaluate(agent, agent.env.tasks("heldout")[:5], name="heldout", concurrency=2))
    assert str(error.value).startswith("none of 5 held-out rollouts has an outcome; the first: ")
    assert "rollout heldout/0.0, turn 0: count_to.step(" in str(error.value)
    assert "OSError: index is gone" in str(error.value)


# Slow tools.


def one_turn(request):
    return "stop"


@pytest.mark.parametrize("kind", [Waiting, WaitingAsync])
def test_sixty_four_rollouts_with_a_slow_tool_take_about_as_long_as_one(kind):
    env = kind(0.2)
    agent = agent_of(env, FakeEngine(policy=one_turn))
    trajectories, seconds = play_all(agent, 64)
    assert all(t.end == "terminal" for t in trajectories)
    assert env.most == 64
    assert seconds < 0.6  # 12.8 one after the other
    assert 0.19 < agent.tool_use.seconds <= seconds
    assert agent.tool_use.calls == 2 * 64  # as many resets


@pytest.mark.parametrize("kind", [Waiting, WaitingAsync])
def test_never_more_calls_at_once_than_allowed(kind):
    env = kind(0.02)
    trajectories, _ = play_all(agent_of(env, FakeEngine(policy=one_turn), at_once=3), 12)
    assert env.most == 3 and all(t.end == "terminal" for t in trajectories)


@pytest.mark.parametrize("kind", [Waiting, WaitingAsync])
def test_a_call_that_hangs_is_a_failure_in_time_and_the_others_go_on(kind):
    class Env(kind):
        def __init__(self):
            super().__init__(0.0)
            self.free = threading.Event()

        if kind is Waiting:

            def step(self, state, action):
                if state[0] == 3:
                    self.free.wait(20)
                return super().step(state, action)

        else:

            async def step(self, state, action):
                if state[0] == 3:
                    await asyncio.sleep(20)
                return await super().step(state, action)

    env = Env()
    agent = agent_of(env, FakeEngine(policy=one_turn), attempts=2, timeout_s=0.1)
    trajectories, seconds = play_all(agent, 4)
    env.free.set()
    assert [t.end for t in trajectories] == ["terminal", "failed", "terminal", "terminal"]
    assert "turn 0: count_to.step('stop') failed 2 times" in trajectories[1].error
    assert "no answer within 0.1 s" in trajectories[1].error
    assert seconds < 2 and agent.tool_use.faults == 2


def test_threads_that_never_end_are_bounded_and_said():
    class Env(CountTo):
        blocking = True
        free = threading.Event()

        def step(self, state, action):
            self.free.wait(20)
            raise OSError

    before = threading.active_count()
    agent = agent_of(Env(), FakeEngine(policy=one_turn), attempts=4, timeout_s=0.02, at_once=2)
    trajectories, _ = play_all(agent, 6)
    assert threading.active_count() <= before + 4
    assert all(t.end == "failed" for t in trajectories)
    assert "those that ran out of time never end" in trajectories[-1].error
    Env.free.set()


def test_a_step_that_goes_on_without_the_failed_gives_up_on_tools_too():
    env = Broken(lambda action, tries: OSError("gone") if action == "stop" else None)
    agent = agent_of(env, FakeEngine(policy=sampled), attempts=3, backoff_s=600.0)
    agent = agent.__class__(**(vars(agent) | {"retry": RetryPolicy(attempts=3, backoff_s=600.0)}))
    config = StepConfig(budget=500, group_size=1, proceed_fraction=0.2)
    step = StepPlay(config, agent, 3, EpisodeCost(15.0, weight=10.0))

    async def scenario():
        async with asyncio.timeout(20):
            return await step.base(iter(env.tasks("train")))

    base = asyncio.run(scenario())
    ends = {t.end for t in base.trajectories}
    assert "failed" in ends and len(ends) > 1
    assert set(env.tries.values()) == {1}


def test_time_that_others_were_sampled_in_is_not_lost_to_tools():
    class Sampling(FakeEngine):
        async def generate(self, request):
            result = await super().generate(request)
            await asyncio.sleep(0.3 if request.session == "0/0.0" else 0.0)
            return result

    env = WaitingAsync(0.1)
    agent = agent_of(env, Sampling(policy=one_turn))
    _, seconds = play_all(agent, 2)
    # The second rollout's call ran while the first was sampled; the first's own call did not.
    assert 0.09 < agent.tool_use.seconds < 0.2 < seconds


def test_a_slow_environment_that_does_not_say_so_is_said_once(caplog):
    class Env(CountTo):
        def step(self, state, action):
            time.sleep(0.06)
            return super().step(state, action)

    with caplog.at_level(logging.WARNING):
        agent = agent_of(Env(), FakeEngine(policy=one_turn))
        play_all(agent, 20)
        play_all(agent_of(CountTo(), FakeEngine(policy=one_turn)), 20)
    (record,) = caplog.records
    assert "'count_to' holds up all rollouts for 6" in record.getMessage()
    assert "blocking = True" in record.getMessage()
    assert agent.tool_use.seconds > 20 * 0.06  # a call on the loop is lost time, whatever else runs


def test_an_environment_in_this_process_is_called_at_once():
    """No hop: the engine sees the requests in the order that it always did."""
    order, threads = [], set()

    class Env(CountTo):
        def step(self, state, action):
            order.append(state[0])
            threads.add(threading.current_thread())
            return super().step(state, action)

    agent = agent_of(Env(), FakeEngine(policy=one_turn))
    first, _ = play_all(agent, 12)
    assert threads == {threading.main_thread()}
    assert play_all(agent_of(Env(), FakeEngine(policy=one_turn)), 12)[0] == first
    assert order[:12] == order[12:]


def test_limits_are_named():
    for name, value in (("attempts", 0), ("at_once", 0), ("timeout_s", 0.0), ("backoff_s", -1.0)):
        with pytest.raises(ValueError, match=rf"rollout\.tools\.{name} must be .*got {value}"):
            ToolLimits(**{name: value})
