"""The turn loop: token in, token out; every way to end; aborts, failures, the token account."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fakes import CHAT, CountTo, FakeEngine, check_tokens, greedy, make_agent

from focus.branching import BudgetExceeded
from focus.engine import EngineError, GenerateRequest, SamplingParams
from focus.rollout import (
    Pool,
    RetryPolicy,
    Rollout,
    TokenAccount,
    UnlimitedAccount,
    generate_with_retries,
    play,
    request_seed,
)

END = CHAT.end_of_turn_id


def tokens(text):
    return (*CHAT.encode_text(text), END)


def run(agent, *, account=None, state=None, rollout=None, task=1):
    task = agent.env.tasks("train")[task]
    return asyncio.run(
        play(
            agent,
            state or agent.start(task),
            rollout or Rollout("0/0.0", task.id, 0),
            account or UnlimitedAccount(),
        )
    )


def saying(*texts):
    """A policy that says one text after another, the last for ever."""
    queue = list(texts)
    return lambda request: queue.pop(0) if len(queue) > 1 else queue[0]


@pytest.mark.parametrize("context", [{"context": "full"}, {"context": "summarize", "limit": 60}])
@pytest.mark.parametrize("seed", range(6))
def test_token_in_token_out(context, seed):
    engine = FakeEngine(fault=lambda request, attempt: ("abort", 2) if not attempt else None)
    trajectory = run(make_agent(engine, seed=seed, **context))
    check_tokens(trajectory)
    assert trajectory.end in ("terminal", "turn_limit")
    assert trajectory.num_tokens == engine.generated


def test_trained_ids_are_the_sampled_ids_of_a_tokenizer_that_is_no_bijection():
    spelled = tuple(CHAT.encode_text(c)[0] for c in "stop") + (END,)
    assert spelled != tokens("stop") and CHAT.decode(spelled) == "stop"
    trajectory = run(make_agent(FakeEngine(policy=lambda request: spelled)))
    assert trajectory.segments[0].generations[0].output_ids == spelled
    assert trajectory.segments[0].text == "stop" and trajectory.end == "terminal"


def test_what_a_tool_printed_is_never_an_action_nor_a_special_token():
    env = CountTo()
    trajectory = run(make_agent(FakeEngine(policy=saying("add 1", "add 2", "stop")), env=env))
    assert env.actions == ["add 1", "add 2", "stop"]  # the tool printed "stop" twice
    assert (trajectory.outcome, trajectory.success) == (1.0, True)
    # The only end-of-turn tokens are the messages' own: user, and (action, tool) twice.
    assert trajectory.states[2].prompt_ids.count(END) == 1 + 2 * 2
    assert trajectory.segments[0].reward == 0.125
    assert trajectory.states[-1].prompt_ids == () and trajectory.states[0].prompt_ids


def test_playing_from_a_middle_state_replays_the_rest():
    whole = run(make_agent(FakeEngine(policy=greedy)))
    assert len(whole.segments) > 2
    for j, state in enumerate(whole.states[:-1]):
        branch = Rollout("0/0.0/j.0", whole.task_id, 0, parent=whole.id, parent_state=j)
        rest = run(make_agent(FakeEngine(policy=greedy)), state=state, rollout=branch)
        assert rest.states == whole.states[j:] and rest.states[0] is state
        assert [s.text for s in rest.segments] == [s.text for s in whole.segments[j:]]
        assert (rest.outcome, rest.end) == (whole.outcome, whole.end)
        assert (rest.parent, rest.parent_state) == (whole.id, j)


def test_a_compaction_boundary_is_a_state_and_its_summary_belongs_to_the_segment_it_closes():
    def policy(request):
        asked = CHAT.decode(request.input_ids).endswith("sum up")
        return "notes: total 1 so far" if asked else "add 1"

    engine = FakeEngine(policy=policy)
    agent = make_agent(
        engine, context="summarize", limit=50, summary_tokens=4, instruction="sum up"
    )
    trajectory = run(agent)
    check_tokens(trajectory)
    summarised = [j for j, s in enumerate(trajectory.segments) if len(s.generations) == 2]
    assert summarised and len(summarised) < len(trajectory.segments)
    for j in summarised:
        act, summary = trajectory.segments[j].generations
        before, after = trajectory.states[j], trajectory.states[j + 1]
        assert (act.kind, summary.kind) == ("act", "summary")
        assert (before.span, after.span) == (summary.span, summary.span + 1)
        assert summary.output_ids == tokens("notes: total 1 so far")[:4]
        assert summary.finish_reason == "length"  # a summary cut by its cap is used as it is
        assert CHAT.decode(summary.output_ids).strip() in CHAT.decode(after.prompt_ids)
        assert trajectory.segments[j].num_tokens == len(act.output_ids) + 4
        # The boundary can be continued like any other state.
        rest = run(agent, state=after, rollout=Rollout("b", "t", 0, trajectory.id, j + 1))
        assert rest.states[0] is after and rest.segments[0].generations[0].span == after.span


def test_the_cap_of_a_turn_is_per_turn_and_the_finish_reason_decides():
    engine = FakeEngine(policy=saying("add 1 and then some", "add 2", "stop"))
    cap = len(tokens("add 2"))
    trajectory = run(make_agent(engine, cap=cap))
    first, second, third = (s.generations[0] for s in trajectory.segments)
    assert [r.sampling.max_new_tokens for r in engine.requests] == [cap] * 3
    assert trajectory.num_tokens > cap
    # Both are as wide as the cap; only one was cut.
    assert len(first.output_ids) == len(second.output_ids) == cap
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")
    assert END not in first.output_ids and second.output_ids[-1] == END  # trained, not padding
    assert third.finish_reason == "stop"


def test_an_aborted_generation_resumes_with_what_is_left_and_records_its_versions():
    said = CHAT.encode_text("add 1 and more")[:10]
    assert len(said) == 10

    def policy(request):
        return said[len(request.input_ids) - prompt :]  # goes on where it was

    def fault(request, attempt):
        if len(engine.requests) == 1:
            return ("abort", 6)
        engine.version = "v1"
        return None

    engine = FakeEngine(policy=policy, fault=fault)
    agent = make_agent(engine, cap=10)
    prompt = len(agent.start(agent.env.tasks("train")[0]).prompt_ids)
    account = TokenAccount(10)
    trajectory = run(agent, account=account, task=0)
    first, resume = engine.requests
    assert (first.sampling.max_new_tokens, resume.sampling.max_new_tokens) == (10, 4)
    assert resume.input_ids == first.input_ids + said[:6]
    assert resume.seed != first.seed and resume.session == first.session == "0/0.0"
    generation = trajectory.segments[0].generations[0]
    assert generation.output_ids == said
    assert generation.prompt_ids == first.input_ids
    assert generation.weight_versions == (("v0", 0, 6), ("v1", 6, 10))
    assert generation.cached_tokens == prompt // 2
    assert account.budget.spent == 10 and trajectory.end == "budget"


def test_a_budget_cut_has_no_outcome_is_not_acted_on_and_says_where_it_was_cut():
    env = CountTo()
    account = TokenAccount(len(tokens("add 1")) + 1)
    trajectory = run(
        make_agent(FakeEngine(policy=saying("add 1", "stop")), env=env), account=account
    )
    assert (trajectory.end, trajectory.outcome, trajectory.success) == ("budget", None, False)
    assert trajectory.truncated and env.actions == ["add 1"]
    cut = trajectory.segments[-1].generations[0]
    assert cut.output_ids == tokens("stop")[:1] and cut.finish_reason == "length"
    assert trajectory.states[-1].prompt_ids == cut.prompt_ids + cut.output_ids
    assert account.budget.spent == account.budget.total == trajectory.num_tokens
    check_tokens(trajectory)


def test_nothing_left_ends_the_episode_where_it_stands():
    engine = FakeEngine(policy=saying("add 1"))
    nothing = run(make_agent(engine), account=TokenAccount(0))
    assert (nothing.end, nothing.outcome, nothing.segments) == ("budget", None, ())
    assert nothing.states[-1].prompt_ids and not engine.requests
    once = run(make_agent(engine), account=TokenAccount(len(tokens("add 1"))))
    assert (once.end, len(once.segments), len(once.states)) == ("budget", 1, 2)
    assert once.states[-1].prompt_ids


def test_a_summary_that_the_budget_cuts_keeps_its_tokens():
    account = TokenAccount(len(tokens("add 1")) + 2)
    agent = make_agent(
        FakeEngine(policy=saying("add 1")), context="summarize", limit=20, summary_tokens=9
    )
    trajectory = run(agent, account=account)
    assert (trajectory.end, trajectory.outcome) == ("budget", None)
    act, summary = trajectory.segments[0].generations
    assert len(summary.output_ids) == 2 and trajectory.states[1].span == 0
    assert trajectory.states[1].prompt_ids == summary.prompt_ids + summary.output_ids
    check_tokens(trajectory)


@pytest.mark.parametrize("ends_itself", [True, False])
def test_the_turn_limit_ends_the_task_whoever_enforces_it(ends_itself):
    env = CountTo(max_turns=3, ends_itself=ends_itself)
    trajectory = run(make_agent(FakeEngine(policy=saying("add 1")), env=env))
    assert (trajectory.end, trajectory.outcome) == ("turn_limit", 0.0)
    assert not trajectory.truncated and len(trajectory.segments) == 3
    last = trajectory.states[-1]
    assert (last.prompt_ids, last.turn) == ((), 3)  # nobody goes on from there


def test_the_context_limit_ends_an_episode_that_is_never_compacted():
    engine = FakeEngine(policy=saying("add 1"), max_context=80)
    agent = make_agent(engine, env=CountTo(max_turns=50))
    trajectory = run(agent)
    assert (trajectory.end, trajectory.outcome) == ("context_limit", 0.0)
    assert len(trajectory.states[-1].prompt_ids) >= 80
    # The last turns ask for what room there is, not for the cap.
    for request in engine.requests:
        room = 80 - len(request.input_ids)
        assert request.sampling.max_new_tokens == min(32, room)
    compacting = make_agent(
        FakeEngine(policy=saying("add 1"), max_context=110),
        env=CountTo(max_turns=9),
        context="summarize",
        limit=50,
        summary_tokens=6,
        instruction="sum up",
    )
    assert run(compacting).end == "turn_limit"


def test_a_failing_engine_is_retried_and_the_retry_changes_nothing():
    flaky = FakeEngine(fault=lambda request, attempt: "fail" if attempt < 2 else None)
    trajectory = run(make_agent(flaky))
    assert trajectory == run(make_agent(FakeEngine()))
    rids = [request.rid for request in flaky.requests]
    assert len(set(rids)) == len(rids) and len(rids) == 3 * len(trajectory.segments)


def test_a_failure_for_good_keeps_the_segments_and_is_no_zero():
    def fault(request, attempt):
        return "fail" if len(engine.requests) > 2 else None

    engine = FakeEngine(policy=saying("add 1"), fault=fault)
    account = TokenAccount(1000)
    trajectory = run(make_agent(engine), account=account)
    assert (trajectory.end, trajectory.outcome) == ("failed", None)
    assert "failed 3 times" in trajectory.error and "server is gone" in trajectory.error
    assert len(trajectory.segments) == 2 and trajectory.states[-1].prompt_ids
    assert (account.budget.reserved, account.budget.spent) == (0, trajectory.num_tokens)


def test_a_failure_after_an_abort_keeps_the_tokens_that_were_paid():
    engine = FakeEngine(
        policy=saying("add 1"),
        fault=lambda request, attempt: ("abort", 2) if len(engine.requests) == 1 else "fail",
    )
    account = TokenAccount(100)
    trajectory = run(make_agent(engine), account=account)
    assert trajectory.end == "failed" and trajectory.num_tokens == account.budget.spent == 2
    check_tokens(trajectory)


def test_aborts_without_progress_are_a_failure_and_a_hang_is_a_timeout():
    stuck = FakeEngine(fault=lambda request, attempt: ("abort", 0))
    trajectory = run(make_agent(stuck))
    assert trajectory.end == "failed" and "without a token" in trajectory.error

    hanging = FakeEngine(fault=lambda request, attempt: "hang")
    retry = RetryPolicy(attempts=2, backoff_s=0.0, timeout_s=0.02)
    trajectory = run(make_agent(hanging, retry=retry))
    assert trajectory.end == "failed" and "no answer within 0.02 s" in trajectory.error
    assert hanging.aborted == [request.rid for request in hanging.requests]
    assert len(hanging.aborted) == 2


def test_a_stop_string_is_no_part_of_the_action():
    class StopString(FakeEngine):
        async def generate(self, request):
            result = await super().generate(request)
            finish = result.finish_reason.__class__("stop", matched="!")
            return result.__class__(**{**vars(result), "finish_reason": finish})

    env = CountTo()
    run(make_agent(StopString(policy=lambda request: CHAT.encode_text("stop!")), env=env))
    assert env.actions == ["stop"]


def test_a_request_that_cannot_be_served_ends_its_rollout_and_is_not_tried_again():
    """Pitfall 39: a 400 of the server for one request is no end of the step."""

    class Refusing(FakeEngine):
        async def generate(self, request):
            self.requests.append(request)
            raise ValueError("token id 9999 is outside the vocabulary")

    engine, account = Refusing(), TokenAccount(100)
    trajectory = run(make_agent(engine), account=account)
    assert (trajectory.end, trajectory.outcome) == ("failed", None)
    assert "request 0/0.0:0.0 cannot be served: token id 9999" in trajectory.error
    assert len(engine.requests) == 1 and account.budget.reserved == 0


def test_seeds_depend_on_what_is_sampled_only():
    # These numbers may change only together with a note that old runs cannot be reproduced.
    assert request_seed(0, "0/0.0", 0) == 2016392229
    assert request_seed(0, "0/0.0", 1) == 220925546
    seeds = {
        request_seed(run_seed, name, generation, part)
        for run_seed in range(3)
        for name in ("1/1.1", "11/1", "1/1.1/2.0")
        for generation in range(10)
        for part in range(2)
    }
    assert len(seeds) == 3 * 3 * 10 * 2 and 0 <= min(seeds) and max(seeds) < 2**31


def test_the_account_waits_for_tokens_that_may_come_back_and_serves_in_order():
    async def scenario():
        account, log = TokenAccount(10), []

        async def ask(name, want):
            granted = await account.reserve(want)
            log.append((name, granted))
            return granted

        first = await ask("a", 8)
        waiting = [asyncio.create_task(ask(*request)) for request in (("b", 5), ("c", 1))]
        await asyncio.sleep(0)
        assert log == [("a", 8)]  # 2 are free, but 8 may come back; c waits behind b
        account.settle(first, 3)  # 7 are free
        await asyncio.gather(*waiting)
        assert log[1:] == [("b", 5), ("c", 1)]
        last = asyncio.create_task(ask("d", 4))
        gone = asyncio.create_task(ask("e", 1))
        await asyncio.sleep(0)
        gone.cancel()
        account.settle(5, 5)
        account.settle(1, 1)
        assert await last == 1  # nobody is left to wait for
        account.settle(1, 1)
        assert await account.reserve(3) == 0
        assert account.budget.spent == 10 and account.budget.reserved == 0

    asyncio.run(scenario())


def test_a_cancelled_grant_goes_back():
    async def scenario():
        account = TokenAccount(4)
        held = await account.reserve(4)
        waiting = asyncio.create_task(account.reserve(4))
        await asyncio.sleep(0)
        account.settle(held, 0)  # grants to `waiting`, which is cancelled before it runs
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert account.budget.reserved == 0 and await account.reserve(4) == 4

    asyncio.run(scenario())


def test_an_engine_that_generates_more_than_granted_is_caught():
    class Greedy(FakeEngine):
        async def generate(self, request):
            sampling = SamplingParams(max_new_tokens=request.sampling.max_new_tokens + 1)
            return await super().generate(GenerateRequest(request.rid, request.input_ids, sampling))

    with pytest.raises(BudgetExceeded, match="granted 3 tokens generated 4"):
        run(make_agent(Greedy(policy=lambda request: [7] * 50), cap=3), account=TokenAccount(9))


@settings(deadline=None, max_examples=30)
@given(
    total=st.integers(0, 120),
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=20),
    faults=st.lists(st.sampled_from([None, None, "fail", ("abort", 0), ("abort", 3)]), min_size=1),
    plays=st.integers(1, 6),
    concurrency=st.integers(1, 4),
)
def test_no_engine_makes_the_account_pass_its_total(total, lengths, faults, plays, concurrency):
    def policy(request):
        return [9] * lengths[request.seed % len(lengths)]

    def fault(request, attempt):
        return faults[(request.seed + attempt) % len(faults)]

    engine = FakeEngine(policy=policy, fault=fault)
    agent = make_agent(engine, cap=10, context="summarize", limit=60, summary_tokens=7)
    account = TokenAccount(total)

    async def scenario():
        pool = Pool(concurrency)
        for i in range(plays):
            state = agent.start(agent.env.tasks("train")[i])
            pool.submit(
                lambda i=i, state=state: play(agent, state, Rollout(f"{i}", "t", 0), account)
            )
        return await pool.join()

    trajectories = asyncio.run(scenario())
    spent = sum(trajectory.num_tokens for trajectory in trajectories)
    assert spent == engine.generated == account.budget.spent <= total
    assert account.budget.reserved == 0
    for trajectory in trajectories:
        check_tokens(trajectory)
        assert (trajectory.outcome is None) == (trajectory.end in ("budget", "failed"))


def test_the_pool_bounds_keeps_order_and_takes_more_while_it_runs():
    async def scenario():
        running, most, finished = 0, 0, []

        def job(number, waits):
            async def run():
                nonlocal running, most
                running += 1
                most = max(most, running)
                for _ in range(waits):
                    await asyncio.sleep(0)
                running -= 1
                return number

            return run

        def on_finished(number):
            finished.append(number)
            if number == 1:
                pool.submit(job(99, 1))

        pool = Pool(2, on_finished)
        for number, waits in enumerate((9, 1, 5, 1)):
            pool.submit(job(number, waits))
        assert await pool.join() == [0, 1, 2, 3, 99]
        assert most == 2 and sorted(finished) == [0, 1, 2, 3, 99] and finished[0] == 1

    asyncio.run(scenario())


def test_an_unexpected_error_stops_the_pool_at_once():
    async def scenario():
        cancelled = []

        async def waits():
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        async def breaks():
            await asyncio.sleep(0)
            raise KeyError("a bug")

        pool = Pool(4)
        pool.submit(waits)
        pool.submit(breaks)
        with pytest.raises(KeyError, match="a bug"):
            await pool.join()
        assert cancelled == [True]

    asyncio.run(scenario())


def test_retries_give_up_with_the_last_reason():
    engine = FakeEngine(fault=lambda request, attempt: "fail")
    request = GenerateRequest("r", (1, 2), SamplingParams(max_new_tokens=4))
    policy = RetryPolicy(attempts=4, backoff_s=0.0)
    with pytest.raises(EngineError, match="failed 4 times, at last: the server is gone"):
        asyncio.run(generate_with_retries(engine, request, policy))
    assert len(engine.requests) == 4
    assert np.all([r.seed == 0 for r in engine.requests])
    with pytest.raises(ValueError, match="attempts must be >= 1, got 0"):
        RetryPolicy(attempts=0)
