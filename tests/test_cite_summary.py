"""Self-Credit end to end: citations in contexts, in the turn loop, in batches, in a run."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fakes import CHAT, CountTo, FakeEngine, check_tokens, make_agent

from focus.context import CiteSummary, ContextManager
from focus.learner.citations import citation_channels, match_classes
from focus.metrics import read_metrics
from focus.rollout import Rollout, TokenAccount, UnlimitedAccount, play
from focus.run import imitation
from focus.tasks import scripted
from focus.tasks.deep_search import make_deep_search
from focus.types import Segment, State, Trajectory

END = CHAT.end_of_turn_id
ASKED = "sum up"


def manager(**options):
    return CiteSummary(
        CHAT, **{"limit": 10**6, "instruction": ASKED, "summary_tokens": 40} | options
    )


def after(contexts, turns, first=None):
    context = contexts.start("", "count") if first is None else first
    for _ in range(turns):
        context = contexts.observe(context, (*CHAT.encode_text("add 1"), END), "total")
    return context


# The context manager.


def test_turns_are_numbered_in_what_the_tools_say():
    contexts = manager()
    assert isinstance(contexts, ContextManager) and contexts.closing
    messages = [{"role": "user", "content": "count"}]
    for turn in (1, 2):
        messages += [
            {"role": "assistant", "content": "add 1"},
            {"role": "tool", "content": f"[{turn}] total"},
        ]
    context = after(contexts, 2)
    assert context.prompt_ids == CHAT.encode_messages(messages, generation_prompt=True)


@pytest.mark.parametrize(
    ("summary", "cited"),
    [
        ("notes\nturns: 4, 6", (3, 5)),
        ("notes\n turns: 6,4 \n", (3, 5)),
        ("turns: 5, 4, 4", (3, 4)),
        ("turns: 4, 5\nturns: 6, 7, 8", (5, 6, 7)),
        ("notes\nturns: 4, 5, 6, 7, 8", (3, 4, 5, 6, 7)),
        ("notes\nturns: 4, 5, 6, 7, 8, 9", ()),  # too many
        ("notes\nturns: 4", ()),  # too few
        ("notes\nturns: 4, 4", ()),
        ("notes\nturns:", ()),
        ("notes\nturns: none", ()),
        ("notes\nturns: 4, 10", ()),  # not taken yet
        ("notes\nturns: 3, 4", ()),  # of the span before
        ("notes\nturns: 0, 4", ()),
        ("notes\nturns: 4, -5", ()),
        ("turns: 4, 5\nnotes", ()),  # not the last line
        ("I cite turns: 4, 5", ()),
        ("", ()),
    ],
)
def test_a_citation_is_two_to_five_turns_of_the_span_in_the_last_line(summary, cited):
    contexts = manager()
    context = after(contexts, 3)
    context = contexts.compact(context, "notes\nturns: 1, 2")
    context = after(contexts, 6, context)
    assert contexts.citations(context, summary) == cited


def test_a_short_span_may_cite_all_that_it_has():
    contexts = manager()
    assert contexts.citations(after(contexts, 1), "turns: 1") == (0,)
    assert contexts.citations(after(contexts, 1), "notes") == ()
    assert manager(citations=(3, 4)).citations(after(contexts, 2), "turns: 1, 2") == (0, 1)


def test_the_next_span_sees_notes_without_the_citation():
    contexts = manager()
    context = contexts.compact(after(contexts, 3), "total 3\nturns: 1, 3")
    assert (context.span, context.turn, context.first_turn) == (1, 3, 3)
    text = CHAT.decode(context.prompt_ids)
    assert "total 3" in text and "turns" not in text
    assert context.prompt_ids == CHAT.encode_start("", "count\nNotes so far: total 3")


@given(
    turns=st.integers(1, 9),
    first=st.integers(0, 8),
    sources=st.sets(st.integers(0, 12), max_size=9),
    bounds=st.tuples(st.integers(1, 4), st.integers(4, 6)),
)
@settings(deadline=None, max_examples=30)
def test_a_phrased_citation_is_valid_and_prefers_sources(turns, first, sources, bounds):
    contexts = manager(citations=bounds)
    context = after(contexts, first)
    context = contexts.compact(context, "x") if first else context
    context = after(contexts, turns, context)
    cited = set(contexts.citations(context, contexts.phrase(context, "notes", tuple(sources))))
    span = set(range(first, first + turns))
    assert cited and cited <= span
    useful = sources & span
    assert cited <= useful if len(useful) >= bounds[0] else useful <= cited
    assert len(cited & useful) == min(len(useful), bounds[1])


def test_bounds_that_make_no_sense_are_refused():
    for citations in ((0, 5), (4, 3), (2,)):
        with pytest.raises(ValueError, match=r"context\.citations must be .* got \(\d"):
            manager(citations=citations)
    with pytest.raises(ValueError, match="context.limit must be >= 1"):
        manager(limit=0)


# The turn loop.


def run(*, acts, summaries, account=None, env=None, max_context=4096, **options):
    acts, summaries = list(acts), list(summaries)

    def policy(request):
        asked = CHAT.decode(request.input_ids).endswith(ASKED)
        return (summaries if asked else acts).pop(0)

    engine = FakeEngine(policy=policy, max_context=max_context)
    options = {"limit": 10**6, "instruction": ASKED, "summary_tokens": 40} | options
    agent = make_agent(engine, env=env or CountTo(max_turns=9), context="cite_summary", **options)
    task = agent.env.tasks("train")[1]  # count to 3
    trajectory = asyncio.run(
        play(agent, agent.start(task), Rollout("0/0.0", task.id, 0), account or UnlimitedAccount())
    )
    assert not acts and not summaries
    check_tokens(trajectory)
    assert trajectory.num_tokens == engine.generated
    return trajectory


def test_a_finished_episode_is_summarised_for_its_citation():
    trajectory = run(acts=["add 1", "add 2", "stop"], summaries=["done\nturns: 1, 2"])
    assert (trajectory.end, trajectory.outcome, trajectory.success) == ("terminal", 1.0, True)
    act, summary = trajectory.segments[-1].generations
    assert (act.kind, summary.kind) == ("act", "summary")
    assert [s.cites for s in trajectory.segments] == [None, None, (0, 1)]
    assert trajectory.states[-1].prompt_ids == ()
    plain = run(acts=["add 1", "add 2", "stop"], summaries=[], closing=False)
    assert [len(s.generations) for s in plain.segments] == [1, 1, 1] and plain.outcome == 1.0


@pytest.mark.parametrize("summary", ["done", "done\nturns: 9, 1", "turns:", "turns: 1"])
def test_a_last_summary_without_a_citation_costs_the_outcome(summary):
    trajectory = run(acts=["add 1", "add 2", "stop"], summaries=[summary])
    assert (trajectory.end, trajectory.outcome, trajectory.success) == ("format", 0.0, False)
    assert trajectory.segments[-1].cites == () and not trajectory.truncated
    assert len(trajectory.segments[-1].generations) == 2  # trained like any other


def test_a_summary_on_the_way_without_a_citation_ends_the_rollout():
    trajectory = run(acts=["add 1"], summaries=["total 1"], limit=25)
    assert (trajectory.end, trajectory.outcome) == ("format", 0.0)
    assert len(trajectory.segments) == 1 and trajectory.states[-1].prompt_ids == ()
    assert trajectory.states[-1].span == 0


def test_spans_cite_their_own_turns():
    trajectory = run(
        acts=["add 1", "add 2", "stop"],
        summaries=["total 1\nturns: 1", "total 3\nturns: 2", "done\nturns: 3"],
        limit=25,
    )
    assert (trajectory.end, trajectory.outcome) == ("terminal", 1.0)
    assert [s.cites for s in trajectory.segments] == [(0,), (1,), (2,)]
    assert [s.span for s in trajectory.states] == [0, 1, 2, 2]


def test_a_failure_cites_too_and_its_end_stays_what_it_was():
    env = CountTo(max_turns=2)
    trajectory = run(acts=["add 1", "add 1"], summaries=["turns: 1, 2"], env=env)
    assert (trajectory.end, trajectory.outcome, trajectory.truncated) == ("turn_limit", 0.0, False)
    assert trajectory.segments[-1].cites == (0, 1)
    assert not trajectory.states[-1].prompt_ids


@pytest.mark.parametrize("left", [0, 3])
def test_what_cuts_the_last_summary_takes_no_outcome_away(left):
    acts = ["add 1", "add 2", "stop"]
    paid = sum(len(CHAT.encode_text(act)) + 1 for act in acts)
    said = ["done\nturns: 1, 2"] if left else []
    trajectory = run(acts=acts, summaries=said, account=TokenAccount(paid + left))
    assert (trajectory.end, trajectory.outcome) == ("terminal", 1.0)
    assert trajectory.segments[-1].cites is None and trajectory.num_tokens == paid + left


def test_a_summary_cut_by_its_cap_has_no_last_line():
    said = "a long story of many words\nturns: 1, 2"
    trajectory = run(acts=["add 1", "add 2", "stop"], summaries=[said], summary_tokens=8)
    assert (trajectory.end, trajectory.outcome) == ("format", 0.0)


# Matching.


def turn(**info):
    return Segment((), "", "", info=info)


def rollout(name, *segments, group=0, end="terminal", first=0):
    states = tuple(State(None, None, (), first + j) for j in range(len(segments) + 1))
    return Trajectory(name, "t", group, states, segments, 1.0, True, end)


def classes(*trajectories):
    return match_classes(trajectories, (len(trajectories), 4))


def test_searches_match_by_their_documents_and_pages_by_their_id():
    five = tuple("abcde")
    got = classes(
        rollout("0", turn(documents=five), turn(opened="a"), turn(tool="answer")),
        # 4 of 6 are common, then 3 of 5 (the border), then 3 of 6.
        rollout("1", turn(documents=tuple("abcdf")), turn(opened="a"), turn(documents=())),
        rollout("2", turn(documents=tuple("abc")), turn(opened="b"), turn(documents=tuple("axyz"))),
        rollout("3", turn(documents=five), turn(opened="a"), group=1),
    )
    assert got[0, 0] == got[1, 0] == got[2, 0] >= 0
    assert got[0, 1] == got[1, 1] != got[2, 1] >= 0
    assert len({got[0, 0], got[0, 1], got[2, 1], got[2, 2], got[3, 0], got[3, 1]}) == 6
    assert (got[[0, 1], 2] == -1).all() and (got[:, 3] == -1).all()
    assert sorted(set(got[got >= 0])) == list(range(6))


def test_classes_are_closed_over_chains_of_matches():
    chain = [turn(documents=tuple(range(i, i + 8))) for i in (0, 1, 2, 3)]
    apart = classes(rollout("0", chain[0], chain[3]))  # 5 of 11 are common
    assert apart[0, 0] != apart[0, 1]
    assert len(set(classes(rollout("0", *chain))[0])) == 1


documents = st.lists(st.integers(0, 5), max_size=4, unique=True).map(tuple)
infos = st.one_of(
    st.builds(dict, documents=documents), st.builds(dict, opened=st.sampled_from("ab")), st.just({})
)


def slow_match(one, other):
    if "opened" in one and "opened" in other:
        return one["opened"] == other["opened"]
    a, b = set(one.get("documents", ())), set(other.get("documents", ()))
    return bool(a and b) and 5 * len(a & b) >= 3 * len(a | b)


@given(rows=st.lists(st.lists(infos, min_size=1, max_size=4), min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_classes_are_those_of_a_slow_search(rows):
    trajectories = [rollout(str(b), *(turn(**i) for i in row)) for b, row in enumerate(rows)]
    got = classes(*trajectories)
    places = [(b, j, info) for b, row in enumerate(rows) for j, info in enumerate(row)]
    for b, j, info in places:
        reached, new = [], [(b, j, info)] if slow_match(info, info) else []
        while new:
            reached += new
            new = [
                p
                for p in places
                if p not in reached and any(slow_match(p[2], q[2]) for q in reached)
            ]
        same = {(x, y) for x, y in zip(*np.nonzero(got == got[b, j]))} if got[b, j] >= 0 else set()
        assert same == {(x, y) for x, y, _ in reached}


def test_channels_say_who_cites_what():
    trajectory = run(
        acts=["add 1", "add 2", "stop"], summaries=["x\nturns: 1, 2", "y\nturns: 3"], limit=40
    )
    failed = run(acts=["add 1", "stop"], summaries=["nothing"])
    got = citation_channels([trajectory, failed], (3, 4), 60)
    np.testing.assert_array_equal(got["cited"], [[1, 1, 1, 0], [0] * 4, [0] * 4])
    lengths = [(g.kind, len(g.output_ids)) for s in trajectory.segments for g in s.generations]
    mask = np.repeat([kind == "summary" for kind, _ in lengths], [n for _, n in lengths])
    np.testing.assert_array_equal(got["summary_mask"][0, : len(mask)], mask)
    assert not got["summary_mask"][0, len(mask) :].any() and not got["summary_mask"][2].any()
    assert mask.any() and not mask.all()


def test_a_branch_cites_its_parents_turns_in_vain():
    segment = Segment((), "", "", cites=(1, 3))
    branch = rollout("b", turn(), segment, first=2)
    got = citation_channels([branch], (1, 4), 4)["cited"]
    np.testing.assert_array_equal(got, [[False, True, False, False]])


# Demonstrations.


@pytest.fixture(scope="module")
def env():
    return make_deep_search(world="fictional", seed=0, num_countries=12, hops=(1, 3), num_train=40)


def test_demonstrations_cite_where_they_read_what_they_know(env):
    agent = scripted.ScriptedAgent(random.Random(0), scripted.NO_ERRORS)
    for task in env.tasks("train"):
        d = scripted.demonstrate(env, task, agent)
        assert d.outcome == 1.0
        for known, sources in enumerate(d.sources):
            assert list(sources) == sorted(set(sources))
            assert all(0 <= turn < known for turn in sources)
        # The answer is in what the last source said.
        assert task.data["answer"] in d.observations[d.sources[-1][-1]]


def test_demonstrated_summaries_keep_the_format(env):
    agent = scripted.ScriptedAgent(random.Random(0), scripted.ErrorRates())
    summaries = 0
    for task in env.tasks("train")[:20]:
        d = scripted.demonstrate(env, task, agent)
        contexts = CiteSummary(CHAT, limit=260, instruction=ASKED)
        trajectory = imitation.to_trajectory(d, "0", CHAT, contexts)
        check_tokens(trajectory)
        cites = [s.cites for s in trajectory.segments]
        assert all(c is None or c for c in cites) and cites[-1]
        summaries += sum(c is not None for c in cites)
    assert summaries > 20  # the limit bites


# A run.


@pytest.mark.slow
def test_a_run_weighs_turns_by_what_its_summaries_cite(finished):
    run = finished("self_credit", steps=3)
    citations = run.summary["citations"]
    assert 0 < citations["valid"] <= citations["asked"]
    records = read_metrics(run.workdir)
    assert all(0 <= record["citations/valid"] <= 1 for record in records)
    assert sum(record["tokens/summary"] for record in records) > 0
    assert finished("focus", steps=6).summary["citations"] == {"asked": 0, "valid": 0}
