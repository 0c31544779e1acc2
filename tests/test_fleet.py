"""Routing, circuits and versions of a fleet, under a clock that the tests turn."""

from __future__ import annotations

import asyncio
import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.engine.protocol import (
    EngineError,
    FinishReason,
    FleetDead,
    GenerateRequest,
    SamplingParams,
)
from focus.engine.servers.fleet import Fleet, Limits
from focus.engine.servers.parts import Parts
from focus.engine.wire import BadReply, from_payload, from_reply, to_payload

URLS = tuple(f"http://host{i}:1" for i in range(4))
ABORTED = FinishReason("abort")
LIMITS = Limits(break_after=3, break_s=2.0, dead_after_s=60.0)


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self):
        return self.now


def make_fleet(count=4, **options):
    clock = Clock()
    fleet = Fleet(URLS[:count], LIMITS, now=clock, **options)
    for worker in fleet.workers.values():
        fleet.answered(worker, "v1", ["v1"])
    return fleet, clock


def send(fleet, session, exclude=()):
    worker = fleet.choose(session, exclude)
    worker.in_flight += 1
    return worker


# --- routing -------------------------------------------------------------------------------------


def test_a_session_stays_where_its_prefix_is():
    fleet, _ = make_fleet()
    homes = {f"s{i}": send(fleet, f"s{i}") for i in range(40)}
    for _ in range(3):
        for session, home in homes.items():
            assert fleet.choose(session) is home
    assert fleet.moves == 0


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 60), workers=st.integers(1, 4))
def test_new_sessions_are_shared_out_evenly(count, workers):
    fleet, _ = make_fleet(workers)
    loads = collections.Counter(send(fleet, f"s{i}").url for i in range(count))
    assert max(loads.values()) - min(loads[url] for url in URLS[:workers]) <= 1


def test_equally_loaded_workers_are_taken_in_an_order_of_the_sessions_own():
    fleet, _ = make_fleet()
    first = collections.Counter(fleet.choose(f"s{i}").url for i in range(400))
    assert min(first.values()) > 60 and len(first) == 4
    other, _ = make_fleet()
    assert all(fleet.choose(f"s{i}").url == other.choose(f"s{i}").url for i in range(50))


def test_a_session_leaves_an_overloaded_worker_and_stays_where_it_went():
    fleet, _ = make_fleet(2)
    home = send(fleet, "s")
    home.in_flight = 40
    other = fleet.choose("s")
    assert other is not home and fleet.moves == 1
    home.in_flight = 0
    assert fleet.choose("s") is other
    # A little more than the others is no reason to compute a prefix again.
    other.in_flight = 30
    assert fleet.choose("s") is other


def test_a_session_leaves_a_worker_that_is_not_fit():
    fleet, _ = make_fleet(3)
    home = send(fleet, "s")
    fleet.distrust(home, "serves something else")
    second = fleet.choose("s")
    assert second is not home
    fleet.failed(second, EngineError("gone"), refused=True)
    assert fleet.choose("s") not in (home, second)


def test_excluded_workers_are_taken_if_there_is_no_other():
    fleet, _ = make_fleet(2)
    first, second = fleet.workers.values()
    assert fleet.choose("s", [first]) is second
    fleet.distrust(second, "stale")
    assert fleet.choose("s", [first]) is first


@pytest.mark.parametrize(
    ("urls", "message"),
    [((), "at least one worker"), (("http://a:1", "http://a:1/"), "every worker once")],
)
def test_a_fleet_of_nobody_or_of_somebody_twice_is_refused(urls, message):
    with pytest.raises(ValueError, match=message):
        Fleet(urls)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(pause_mode="in_place"), "pause_mode must be"),
        (dict(attempts=0), "attempts must be >= 1, got 0"),
        (dict(dead_after_s=0.0), "dead_after_s must be > 0, got 0.0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Limits(**options)


# --- circuits ------------------------------------------------------------------------------------


def test_a_circuit_opens_after_failures_in_a_row_and_stays_open_longer_each_time():
    fleet, clock = make_fleet(1)
    (worker,) = fleet.workers.values()
    for _ in range(2):
        fleet.failed(worker, EngineError("500"))
        fleet.succeeded(worker)
    assert worker.fit  # not in a row
    for pause_s in (2.0, 4.0, 8.0, 16.0, 16.0):
        lost = worker.lost
        for _ in range(3):
            assert worker.fit and not lost.is_set()
            fleet.failed(worker, EngineError("500"))
        assert not worker.fit and lost.is_set()
        clock.now += pause_s - 0.01
        assert not fleet.is_due(worker)
        clock.now += 0.02
        assert fleet.is_due(worker)
        fleet.answered(worker, "v1", ["v1"])
        assert "was away" in worker.state  # and may have been started anew meanwhile
        fleet.end_update(worker, "v1", None)
    fleet.succeeded(worker)
    fleet.failed(worker, EngineError("nobody listens"), refused=True)  # at once, and short again
    assert not worker.fit
    clock.now += 2.01
    assert fleet.is_due(worker)


def test_requests_that_fail_open_a_circuit_whatever_the_probes_say():
    fleet, _ = make_fleet(1)
    (worker,) = fleet.workers.values()
    for _ in range(2):
        fleet.failed(worker, EngineError("500"))
        fleet.answered(worker, "v1", ["v1"])
    assert worker.fit
    fleet.failed(worker, EngineError("500"))
    assert not worker.fit and worker.state == "500"


def test_the_fleet_is_dead_when_nobody_has_been_fit_for_long_enough():
    async def main():
        fleet, clock = make_fleet(2)
        first, second = fleet.workers.values()
        clock.now = 1000.0
        assert fleet.seconds_to_live() == float("inf")
        fleet.failed(first, EngineError("gone"), refused=True)
        fleet.distrust(second, "stale")
        clock.now += 59.0
        # A repair that goes on is no sign of life; one that succeeds is.
        fleet.begin_update(second)
        assert fleet.seconds_to_live() == 1.0
        fleet.end_update(second, "v1", "no such file")
        assert fleet.seconds_to_live() == 1.0
        clock.now += 2.0
        with pytest.raises(FleetDead, match="60 s .*gone.*no such file.*start servers"):
            await fleet.wait()
        fleet.end_update(second, "v1", None)
        assert fleet.seconds_to_live() == float("inf") and fleet.fit == [second]

    asyncio.run(main())


def test_nobody_is_dead_who_was_never_asked():
    clock = Clock()
    fleet = Fleet(["http://a"], LIMITS, now=clock)
    (worker,) = fleet.workers.values()
    clock.now += 1000.0  # the event loop was busy with something else
    assert fleet.seconds_to_live() == LIMITS.probe_timeout_s
    fleet.silent(worker, EngineError("refused"))
    assert fleet.seconds_to_live() < 0


def test_repairs_that_fail_are_tried_less_and_less_often():
    fleet, clock = make_fleet(1)
    (worker,) = fleet.workers.values()
    fleet.distrust(worker, "stale")
    assert fleet.needs_repair(worker)
    for pause_s in (2.0, 4.0, 8.0, 16.0, 16.0):
        fleet.begin_update(worker)
        assert not fleet.needs_repair(worker)
        fleet.end_update(worker, "v1", "no such file")
        clock.now += pause_s - 0.01
        assert not fleet.needs_repair(worker)
        clock.now += 0.02
        assert fleet.needs_repair(worker)


def test_a_worker_is_stale_by_its_version_or_after_it_was_away():
    fleet, _ = make_fleet(1)
    (worker,) = fleet.workers.values()
    fleet.answered(worker, "v0", ["v1", "v2"])
    assert worker.state == "serves weights 'v0', not v1 or v2"
    fleet.answered(worker, "v1", ["v1", "v2"])
    assert not worker.fit  # only an update helps
    fleet.end_update(worker, "v2", None)
    assert worker.fit
    fleet.failed(worker, EngineError("refused"), refused=True)
    fleet.answered(worker, "v2", ["v2"])
    assert "was away" in worker.state


# --- one completion out of several ---------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["v1", "v2"])), min_size=1))
def test_parts_never_ask_for_more_than_is_left_and_their_spans_cover_the_whole(cuts):
    request = GenerateRequest("r", (1, 2), SamplingParams(max_new_tokens=9, ignore_eos=True))
    parts, said, labels = Parts(request, lambda ids: ""), [], []
    for count, version in cuts:
        if parts.finished:
            break
        asked = parts.ask(f"{len(said)}")
        assert asked.input_ids == request.input_ids + tuple(said)
        assert asked.sampling.max_new_tokens == 9 - len(said) == parts.left
        new = list(range(len(said), len(said) + min(count, parts.left)))
        said += new
        labels += [version] * len(new)
        body = reply(asked, new, [{"version": version, "start": 0, "end": len(new)}], "abort")
        parts.add(from_reply(body, asked, vocab_size=50, current=["v1", "v2"]))
    result = parts.result(None if parts.finished else ABORTED)
    assert list(result.output_ids) == said and len(result.output_logp) == len(said)
    assert [v for v, start, end in result.weight_versions for _ in range(start, end)] == labels
    assert all(a[0] != b[0] for a, b in zip(result.weight_versions, result.weight_versions[1:]))
    assert parts.finished == (len(said) == 9)


STOP = 9
WORDS = {2: "find", 3: " it", 4: "</", 5: "call>", 6: " junk", 7: " more", STOP: ""}


def ended(output, finish, *, stop=(), versions=None):
    """The completion of a server that says `output` in one or several parts."""
    sampling = SamplingParams(max_new_tokens=9, stop=stop, stop_token_ids=(STOP,))
    request = GenerateRequest("r", (1, 2), sampling)
    parts = Parts(request, lambda ids: "".join(WORDS.get(i, f"<{i}>") for i in ids))
    pieces = output if isinstance(output[0], list) else [output]
    for i, piece in enumerate(pieces):
        asked = parts.ask(f"part{i}")
        body = reply(asked, piece, versions)
        last = i + 1 == len(pieces)
        body["meta_info"]["finish_reason"] = finish if last else {"type": "abort"}
        current = ["v1"] if versions is None else ["v1", "v2"]
        parts.add(from_reply(body, asked, vocab_size=50, current=current))
    return parts.result(ABORTED), parts.dropped


@pytest.mark.parametrize(
    ("output", "finish", "kept", "matched"),
    [
        ([2, 3, 4, 5, 6, 7], {"type": "stop", "matched": "</call>"}, [2, 3, 4, 5], "</call>"),
        ([2, 3, 4, 5, 6, 7], {"type": "length"}, [2, 3, 4, 5], "</call>"),
        ([2, 3, 4, 5, 6, 7], {"type": "abort"}, [2, 3, 4, 5], "</call>"),
        ([[2, 3, 4], [5, 6, 7]], {"type": "length"}, [2, 3, 4, 5], "</call>"),
        ([2, 4, 5, STOP, 7], {"type": "stop", "matched": STOP}, [2, 4, 5], "</call>"),
        ([2, STOP, 4, 5], {"type": "stop", "matched": "</call>"}, [2, STOP], STOP),
        ([1, STOP, 5], {"type": "stop", "matched": STOP}, [1, STOP], STOP),
        ([1, STOP, 5], {"type": "length"}, [1, STOP], STOP),
        ([1, STOP, 5, STOP], {"type": "stop", "matched": STOP}, [1, STOP], STOP),
        ([[1, 3], [STOP, 5]], {"type": "abort"}, [1, 3, STOP], STOP),
        ([1, STOP], {"type": "stop", "matched": None}, [1, STOP], STOP),
        ([1, 20, 5], {"type": "stop", "matched": 20}, [1, 20], 20),  # one that the server knows
        ([1, 20], {"type": "stop", "matched": 20}, [1, 20], 20),
    ],
)
def test_a_completion_ends_at_its_first_stop_whatever_the_server_says(
    output, finish, kept, matched
):
    """Pitfall 43."""
    result, dropped = ended(output, finish, stop=("</call>",))
    flat = output if not isinstance(output[0], list) else sum(output, [])
    assert list(result.output_ids) == kept and len(result.output_logp) == len(kept)
    assert (result.finish_reason.type, result.finish_reason.matched) == ("stop", matched)
    assert dropped == len(flat) - len(kept)
    assert result.weight_versions == (("v1", 0, len(kept)),)
    assert "</call>" not in result.text and "junk" not in result.text


def test_spans_end_with_the_completion():
    spans = [{"version": "v1", "start": 0, "end": 1}, {"version": "v2", "start": 1, "end": 3}]
    result, _ = ended([1, STOP, 5], {"type": "length"}, versions=spans)
    assert result.weight_versions == (("v1", 0, 1), ("v2", 1, 2))
    result, _ = ended([STOP, 1, 5], {"type": "length"}, versions=spans)
    assert result.weight_versions == (("v1", 0, 1),)


@pytest.mark.parametrize(
    "finish",
    [{"type": "stop"}, {"type": "stop", "matched": None}, {"type": "stop", "matched": STOP}],
)
def test_an_end_of_turn_that_the_server_took_away_is_noticed(finish):
    with pytest.raises(BadReply, match="stopped at nothing|stopped by token 9, which it lacks"):
        ended([1, 3], finish, stop=("</call>",))
    if finish.get("matched") is None:
        with pytest.raises(BadReply, match=r"none is of \[9\], and no stop string .* trains on it"):
            ended([[1, 3], [2]], finish)


def reply(request, output, spans=None, kind="length", version="v1"):
    return {
        "text": "",
        "output_ids": list(output),
        "meta_info": {
            "id": request.rid,
            "finish_reason": {"type": kind, "length": len(output)},
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(output),
            "cached_tokens": 0,
            "weight_version": version,
            "weight_versions": spans,
            "output_token_logprobs": [[-0.5, token, None] for token in output],
        },
    }


REQUEST = GenerateRequest("r", (1, 2), SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("output_ids"), "lacks or garbles 'output_ids'"),
        (lambda b: b.update(output_ids="abc"), "list of token ids"),
        (lambda b: b["output_ids"].__setitem__(0, 50), "outside the vocabulary of 50"),
        (lambda b: b["output_ids"].__setitem__(0, 7), "other ids than output_ids"),
        (lambda b: b["meta_info"].update(id="other"), "of request 'other'"),
        (lambda b: b["meta_info"].update(completion_tokens=2), "completion_tokens 2"),
        (lambda b: b["meta_info"].update(prompt_tokens=3), "read as 3"),
        (lambda b: b["meta_info"].update(cached_tokens=3), "cached_tokens 3"),
        (lambda b: b["meta_info"].update(cached_tokens=None), "cached_tokens None"),
        (lambda b: b["meta_info"]["output_token_logprobs"].pop(), "2 log-probs"),
        (lambda b: b["meta_info"]["output_token_logprobs"][0].__setitem__(0, None), "garbles"),
        (lambda b: b["meta_info"]["output_token_logprobs"][0].__setitem__(0, 0.5), "none"),
        (
            lambda b: b["meta_info"]["output_token_logprobs"][0].__setitem__(0, float("nan")),
            "a log-prob that is none",
        ),
        (lambda b: b["meta_info"].pop("weight_version"), "'weight_version'"),
        (lambda b: b["meta_info"].update(weight_version=None), "no text"),
        (
            lambda b: b["meta_info"].update(
                weight_versions=[{"version": "v1", "start": 0, "end": 2}]
            ),
            "do not cover 3 tokens",
        ),
        (
            lambda b: b["meta_info"].update(
                weight_versions=[
                    {"version": "v1", "start": 0, "end": 2},
                    {"version": "v2", "start": 1, "end": 3},
                ]
            ),
            "do not cover",
        ),
        (lambda b: b["meta_info"].update(finish_reason={"type": "bored"}), "'bored'"),
        (lambda b: b["meta_info"].update(finish_reason=None), "garbles"),
        (
            lambda b: b["meta_info"].update(finish_reason={"type": "stop", "matched": 9}),
            "stopped by token 9",
        ),
        (
            lambda b: b["meta_info"].update(finish_reason={"type": "stop", "matched": "x"}),
            "was not asked",
        ),
    ],
)
def test_a_reply_that_contradicts_itself_is_not_believed(change, message):
    body = reply(REQUEST, [3, 4, 5])
    from_reply(body, REQUEST, vocab_size=50, current=["v1"])
    change(body)
    with pytest.raises(BadReply, match=message):
        from_reply(body, REQUEST, vocab_size=50, current=["v1"])


@pytest.mark.parametrize("body", [None, [], "text", 3, {}])
def test_a_reply_that_is_something_else_is_not_believed(body):
    with pytest.raises(BadReply):
        from_reply(body, REQUEST, vocab_size=50, current=["v1"])


def test_without_spans_tokens_across_a_change_of_weights_belong_to_nobody():
    body = reply(REQUEST, [3, 4, 5])
    with pytest.raises(BadReply, match="which tokens are whose; use pause_mode='abort'"):
        from_reply(body, REQUEST, vocab_size=50, current=["v1", "v2"])
    result = from_reply(body, REQUEST, vocab_size=50, current=["v1", "v1"])
    assert result.weight_versions == (("v1", 0, 3),)


@settings(deadline=None, max_examples=30)
@given(
    st.builds(
        SamplingParams,
        max_new_tokens=st.integers(1, 99),
        temperature=st.floats(0, 2),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(1, 50),
        stop=st.lists(st.text(min_size=1), max_size=2).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        ignore_eos=st.booleans(),
    )
)
def test_a_request_is_the_same_behind_the_wire(sampling):
    request = GenerateRequest("r", (1, 2, 3), sampling, seed=7)
    assert from_payload(to_payload(request), rid="other") == request


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.update(lora="x"), r"unknown fields \{'lora': 'x'\}"),
        (lambda b: b.update(stream=True), "stream can only be False"),
        (lambda b: b["sampling_params"].update(n=2), "n can only be 1"),
        (lambda b: b["sampling_params"].update(repetition_penalty=1.1), "can only be 1.0"),
        (lambda b: b["sampling_params"].update(regex="a*"), r"unknown sampling_params \['regex'\]"),
        (lambda b: b["sampling_params"].update(temperature=-1), "temperature must be >= 0"),
        (lambda b: b["sampling_params"].update(top_k=0), "top_k must be -1"),
        (lambda b: b.update(input_ids="text"), "list of token ids"),
        (lambda b: b["sampling_params"].update(max_new_tokens=[1]), "wrong type"),
    ],
)
def test_our_own_server_refuses_what_it_would_have_to_ignore(change, message):
    body = to_payload(REQUEST)
    change(body)
    with pytest.raises(ValueError, match=message):
        from_payload(body, rid="r")


def test_our_own_server_takes_what_a_router_fills_in():
    body = to_payload(REQUEST) | {"model": None, "no_logs": False, "log_metrics": True}
    assert from_payload(body | {"return_hidden_states": False}, rid="r") == REQUEST
    with pytest.raises(ValueError, match="unknown fields {'return_hidden_states': True}"):
        from_payload(body | {"return_hidden_states": True}, rid="r")
