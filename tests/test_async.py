"""Rollouts while the learner works: who starts when, what is kept, and what nobody may lose."""

import asyncio
import dataclasses
import itertools
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fakes import FakeEngine, make_agent, pick
from test_controller import BRANCHING, score

from focus.engine import EngineError
from focus.rollout import (
    EpisodeCost,
    Freshness,
    Patience,
    RetryPolicy,
    RolloutsAhead,
    Slots,
    StepConfig,
    StepPlay,
    Versions,
    generate_with_retries,
)
from focus.run.task_order import TaskOrder


async def passes(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


# When base rollouts start.


class Run:
    """A learner and an engine that are nothing but their versions."""

    def __init__(self, *, first, steps, depth):
        self.version = first
        self.started, self.in_flight = {}, []
        self.ahead = RolloutsAhead(self.play, depth=depth, end=steps)
        self.first, self.steps = first, steps

    async def play(self, step):
        assert step not in self.started
        self.started[step] = self.version
        return types.SimpleNamespace(step=step)

    async def train(self):
        async with self.ahead:
            for step in range(self.first, self.steps):
                base, waited_s = await self.ahead.take(step)
                assert base.step == step and waited_s >= 0
                self.ahead.learn(step)
                await passes()
                self.in_flight.append(len(self.ahead.in_flight))
                self.version = step + 1  # the push


@settings(deadline=None, max_examples=30)
@given(depth=st.integers(0, 4), first=st.integers(0, 6), steps=st.integers(1, 9))
def test_no_rollout_starts_with_weights_older_than_the_depth_nor_beyond_the_end(
    depth, first, steps
):
    """And after a resume, `first` > 0, there are neither more in flight nor fewer."""
    run = Run(first=first, steps=first + steps, depth=depth)
    asyncio.run(run.train())
    assert sorted(run.started) == list(range(first, first + steps))
    for step, version in run.started.items():
        # Those of the first steps are as fresh as can be: there was nothing older.
        assert version == max(step - depth, first if step - first > 0 else step)
    assert run.in_flight == [min(depth, steps - 1 - i) for i in range(steps)]


async def test_what_is_in_flight_at_the_end_is_cancelled_and_an_error_comes_with_its_step():
    async def play(step):
        if step == 1:
            raise EngineError("gone")
        await asyncio.sleep(3600)

    async with RolloutsAhead(play, depth=2, end=9) as ahead:
        ahead.learn(0)
        await passes()
        assert ahead.in_flight == (1, 2)
        with pytest.raises(EngineError, match="gone"):
            await ahead.take(1)
    assert ahead.in_flight == () and len(asyncio.all_tasks()) == 1


def test_a_negative_depth_is_refused():
    with pytest.raises(ValueError, match="async_depth must be >= 0, got -1"):
        RolloutsAhead(None, depth=-1, end=1)


async def test_slots_serve_the_oldest_step_first_and_bound_all_steps_together():
    slots, order, running, most = Slots(2), [], 0, 0

    async def work(step):
        nonlocal running, most
        async with slots.held(step):
            order.append(step)
            running += 1
            most = max(most, running)
            await passes(2)
            running -= 1

    tasks = [asyncio.create_task(work(step)) for step in (5, 5, 5, 5, 4)]
    await passes(1)
    tasks += [asyncio.create_task(work(step)) for step in (3, 4)]
    waiting = asyncio.create_task(work(2))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(*tasks)
    assert order == [5, 5, 3, 4, 4, 5, 5] and most == 2
    async with slots.held(), slots.held():  # nothing has leaked
        pass


# A step's rollouts when weights change meanwhile.


def step_play(engine, config, **options):
    return StepPlay(config, make_agent(engine), 3, EpisodeCost(15.0, weight=10.0), **options)


async def play_through(play, scorer=score):
    tasks = play.agent.env.tasks("train")
    return await play.branch(await play.base(iter(tasks)), scorer)


def changing(engine, after):
    """A policy under which the engine's weights go from v2 to v3 after some requests."""
    count = itertools.count()

    def policy(request):
        engine.version = "v2" if next(count) < after else "v3"
        return pick(request.seed, options=("add 1", "add 2", "stop"))

    engine.policy = policy
    return engine


@pytest.mark.parametrize("mixed", ["keep", "drop"])
async def test_mixed_rollouts_are_kept_or_dropped_and_paid_for_in_any_case(mixed):
    engine = changing(FakeEngine(), after=12)
    screen = Freshness(3, max_lag=1, mixed=mixed)
    finished = []
    play = step_play(
        engine, StepConfig(budget=700, **BRANCHING), screen=screen, on_finished=finished.append
    )
    collected = await play_through(play)
    is_mixed = {t.id for t in finished if len(t.weight_versions) > 1}
    assert len(is_mixed) > 2
    kept = {t.id for t in collected.tree.trajectories}
    dropped = {t.id for t in collected.dropped}
    assert dropped == (is_mixed if mixed == "drop" else set())
    assert kept == {t.id for t in finished if t.segments} - dropped
    assert not {t.parent for t in collected.tree.branches} & dropped
    assert collected.ledger.spent == engine.generated
    assert collected.ledger.discarded == sum(t.num_tokens for t in collected.dropped)
    assert len(collected.tasks) == len({t.group_id for t in finished})

    versions = Versions.of(collected.tree.trajectories, collected.dropped, screen)
    assert versions.mixed == (len(is_mixed) if mixed == "keep" else 0)
    assert versions.dropped == ({"mixed": len(is_mixed)} if mixed == "drop" else {})
    assert sum(versions.tokens.values()) + versions.dropped_tokens == engine.generated
    assert set(versions.tokens) == {0, 1}
    twice = (versions + versions).to_dict()
    assert twice["staleness/mean"] == versions.to_dict()["staleness/mean"]
    assert twice["staleness/mixed"] == 2 * versions.mixed


async def test_stale_rollouts_are_dropped_and_as_branches_no_evidence():
    """A server that has missed an update answers with weights of long ago."""
    engine = FakeEngine()

    def policy(request):
        is_branch = request.rid.count("/") == 2
        engine.version = "v1" if is_branch and request.seed % 2 else "v3"
        return pick(request.seed, options=("add 1", "add 2", "stop"))

    engine.policy = policy
    config = StepConfig(budget=800, **BRANCHING)
    collected = await play_through(step_play(engine, config, screen=Freshness(3, max_lag=1)))
    assert len(collected.dropped) > 2
    assert all(t.parent and "v1" in str(t.weight_versions) for t in collected.dropped)
    assert all("v1" not in str(t.weight_versions) for t in collected.tree.trajectories)
    assert int(collected.beliefs.branch_count.sum()) == len(collected.tree.branches)
    assert sum(s.count for s in collected.branch_stats) == len(collected.tree.branches)
    started = sum(s.started for s in collected.branch_stats)
    assert started == len(collected.tree.branches) + len(collected.dropped)
    assert collected.ledger.spent == engine.generated


async def test_a_step_of_which_nothing_is_kept_has_no_branches():
    engine = FakeEngine(version="v1")
    config = StepConfig(budget=300, **BRANCHING)
    collected = await play_through(step_play(engine, config, screen=Freshness(3)), scorer=score)
    assert collected.tree.trajectories == () and collected.beliefs is None
    assert collected.ledger.discarded == collected.ledger.spent == engine.generated > 0


def test_a_screen_knows_what_it_is_asked():
    with pytest.raises(ValueError, match="keep, drop; got 'mix'"):
        Freshness(3, mixed="mix")


async def test_long_tasks_are_in_their_step_however_long_they_take():
    """The step is not made of what is finished first."""
    release = asyncio.Event()

    class Slow(FakeEngine):
        async def generate(self, request):
            if request.rid.startswith("3/0."):  # every turn of the first group
                await release.wait()
            return await super().generate(request)

    play = step_play(Slow(), StepConfig(budget=400, **BRANCHING))
    task = asyncio.create_task(play.base(iter(play.agent.env.tasks("train"))))
    await passes(2000)
    assert not task.done()
    release.set()
    base = await task
    assert {t.group_id for t in base.trajectories} == set(range(len(base.tasks)))
    assert [t.id for t in base.trajectories][:2] == ["3/0.0", "3/0.1"]
    assert all(t.outcome is not None for t in base.trajectories[:2])


# Rollouts whose engine has failed.


def broken(request, attempt):
    """Every fifth trajectory's server is gone."""
    return "fail" if int(request.session.split(".")[0].split("/")[1]) % 5 == 0 else None


@pytest.mark.parametrize(
    ("fraction", "options"),
    [
        (None, BRANCHING | {"budget": 900}),
        (0.5, BRANCHING | {"budget": 900}),
        # All for base rollouts: what has failed holds tokens that the others wait for.
        (0.5, {"budget": 500}),
    ],
)
async def test_a_step_waits_for_failed_requests_or_proceeds_without_them(fraction, options):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)
        await asyncio.sleep(0)

    engine = FakeEngine(fault=broken)
    config = StepConfig(proceed_fraction=fraction, **(options | {"group_size": 1}))
    agent = make_agent(engine, retry=RetryPolicy(attempts=4, backoff_s=30.0, timeout_s=600.0))
    play = StepPlay(config, agent, 3, EpisodeCost(15.0, weight=10.0))
    with pytest.MonkeyPatch.context() as patch:
        if fraction is None:  # only here the backoff is slept through
            patch.setattr("focus.rollout.pool.asyncio", _with(sleep))
        async with asyncio.timeout(20):
            base = await play.base(iter(agent.env.tasks("train")))
    failed = [t for t in base.trajectories if t.end == "failed"]
    assert failed and all(t.outcome is None for t in failed)
    assert {t.group_id % 5 for t in failed} == {0}
    assert all(t.end != "failed" for t in base.trajectories if t.group_id % 5)
    tries = [engine.attempts[key] for key in engine.attempts if _group(key[0]) % 5 == 0]
    if fraction is None:
        assert set(tries) == {4} and waits.count(120.0) == len(failed)
    else:
        assert set(tries) <= {1, 2}


def _with(sleep):
    module = types.SimpleNamespace(**vars(asyncio))
    module.sleep = sleep
    return module


def _group(session):
    return int(session.split(".")[0].split("/")[1])


async def test_patience_ends_a_second_try_that_hangs_but_not_a_first():
    engine = FakeEngine(fault=lambda request, attempt: "hang" if attempt else "fail")
    patience = Patience(0.5)
    patience.launched(2)
    agent = make_agent(engine)
    request = dataclasses.replace(_request(agent), rid="3/0.0:0.0")
    policy = RetryPolicy(attempts=3, backoff_s=0.001, timeout_s=600.0)
    task = asyncio.create_task(generate_with_retries(engine, request, policy, patience))
    await asyncio.sleep(0.05)
    assert not task.done() and len(engine.requests) == 2
    patience.ended(types.SimpleNamespace(end="failed"))
    await asyncio.sleep(0.01)
    assert not task.done() and not patience.over
    patience.ended(types.SimpleNamespace(end="terminal"))
    with pytest.raises(EngineError, match="failed 2 times"):
        await task
    assert engine.aborted == ["3/0.0:0.0~1"]

    engine = FakeEngine(fault=lambda request, attempt: "hang")
    first = asyncio.create_task(generate_with_retries(engine, request, policy, patience))
    await asyncio.sleep(0.05)
    assert not first.done()
    first.cancel()


def _request(agent):
    from focus.engine import GenerateRequest

    state = agent.start(agent.env.tasks("train")[0])
    return GenerateRequest("", state.prompt_ids, agent.sampling)


@pytest.mark.parametrize("fraction", [0.0, 1.5, -1.0])
def test_a_fraction_is_a_fraction(fraction):
    with pytest.raises(ValueError, match="proceed_fraction must be in"):
        Patience(fraction)


# Which task is next.


TASKS = tuple(range(7))  # stand for tasks; epochs are short


@settings(deadline=None, max_examples=30)
@given(
    draws=st.lists(st.integers(0, 2), max_size=40),
    settled=st.integers(0, 2),
    seed=st.integers(0, 3),
)
def test_a_resumed_run_plays_every_task_that_was_not_settled_once(draws, settled, seed):
    """Three steps draw in any order; some are settled, then the run is saved and goes on."""
    order = TaskOrder(TASKS, seed)
    streams = [order.draw(step) for step in range(3)]
    of_step = {step: [] for step in range(3)}
    for step in draws:
        of_step[step].append(next(streams[step]))
    for step in range(3):
        next(streams[step])  # each has played something
    for step in range(settled):
        order.settle(step, order.drawn)
    places = {step: order._of_step.get(step) for step in range(settled, 3)}
    resumed = TaskOrder(TASKS, seed, cursor=order.cursor, owed=order.owed)
    again = resumed.draw(settled)
    expected = sorted(p for drawn in places.values() for p in drawn if p < order.cursor)
    total = order.drawn if settled else 0
    assert order.cursor == total
    played = [next(again) for _ in range(len(expected) + 5)]
    want = [order.at(p) for p in (*expected, *range(order.cursor, order.cursor + 5))]
    assert played == want


def test_an_epoch_is_a_permutation_and_steps_in_flight_share_no_place():
    order = TaskOrder(TASKS, 0)
    one, other = order.draw(0), order.draw(1)
    played = [next(one if i % 3 else other) for i in range(21)]
    assert all(sorted(played[i : i + 7]) == list(TASKS) for i in (0, 7, 14))
    assert played[:7] != played[7:14]
    assert order.cursor == 0 and order.owed == []  # nothing is settled: all is drawn again
    order.settle(0, order.drawn)
    assert order.cursor == 21 and order.owed == list(range(0, 21, 3))
    order.settle(1, order.drawn)
    assert order.owed == []
    np.testing.assert_array_equal([order.at(p) for p in range(21)], played)
