"""Context managers: pure, token in, token out, and a compaction opens a new span."""

import pytest
from rollout_fakes import CHAT

from focus.chat.tokens import COMPACT
from focus.context import CONTEXT_MANAGERS, ContextManager

END = CHAT.end_of_turn_id


def said(text):
    return (*CHAT.encode_text(text), END)


def managers():
    return [CONTEXT_MANAGERS["full"](CHAT), CONTEXT_MANAGERS["summarize"](CHAT, limit=100)]


@pytest.mark.parametrize("manager", managers())
def test_prompts_turn_by_turn_equal_the_whole_template(manager):
    assert isinstance(manager, ContextManager)
    context = manager.start("be brief", "count to 3")
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "count to 3"},
    ]
    for action, answer in (("add 1", "total 1"), ("add 2", "total 3")):
        before = context
        context = manager.observe(before, said(action), answer)
        assert manager.observe(before, said(action), answer) == context  # pure
        assert context.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
        messages += [
            {"role": "assistant", "content": action},
            {"role": "tool", "content": answer},
        ]
    assert context.prompt_ids == CHAT.encode_messages(messages, generation_prompt=True)
    assert context.span == 0


@pytest.mark.parametrize("manager", managers())
def test_an_output_that_did_not_end_its_message_is_closed_in_the_context_only(manager):
    start = manager.start("", "count to 3")
    sampled = CHAT.encode_text("add 1")  # cut by length, or ended by a stop string
    cut = manager.observe(start, sampled, "total 1").prompt_ids
    whole = manager.observe(start, (*sampled, END), "total 1").prompt_ids
    assert cut == whole  # exactly one end-of-turn token, sampled or put in
    nothing = manager.observe(start, (), "total 0").prompt_ids
    assert nothing[len(start.prompt_ids)] == END


def test_full_never_compacts():
    manager = CONTEXT_MANAGERS["full"](CHAT)
    context = manager.start("", "count to 3")
    for _ in range(50):
        context = manager.observe(context, said("add 1"), "total 1")
    assert not manager.needs_compaction(context)
    with pytest.raises(RuntimeError, match="summarize"):
        manager.compact(context, "notes")


def test_a_compaction_keeps_question_and_summary_and_opens_a_span():
    manager = CONTEXT_MANAGERS["summarize"](
        CHAT, limit=40, summary_tokens=8, instruction="sum up", heading="notes:"
    )
    start = manager.start("be brief", "count to 3")
    context = manager.observe(start, said("add 1"), "total 1")
    assert not manager.needs_compaction(start)
    while not manager.needs_compaction(context):
        context = manager.observe(context, said("add 1"), "total 1")
    assert len(context.prompt_ids) > 40
    request = manager.summary_prompt(context)
    assert request[: len(context.prompt_ids)] == context.prompt_ids
    assert "sum up" in CHAT.decode(request[len(context.prompt_ids) :])

    compacted = manager.compact(context, "total is <|end|> 1")
    assert (context.span, compacted.span) == (0, 1)
    assert compacted.prompt_ids == CHAT.encode_messages(
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "count to 3\nnotes: total is <|end|> 1"},
        ],
        generation_prompt=True,
    )
    # What the policy wrote cannot close the user's message: start and end are the only turns.
    assert compacted.prompt_ids.count(END) == start.prompt_ids.count(END)
    # A second compaction starts from the question again, not from the first summary.
    again = manager.compact(manager.observe(compacted, said("add 2"), "total 3"), "total is 3")
    assert "total is 3" in CHAT.decode(again.prompt_ids)
    assert COMPACT.end_of_turn not in CHAT.decode(again.prompt_ids)
    assert again.span == 2


def test_limits_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match=r"limit must be >= 1 token, got 0"):
        CONTEXT_MANAGERS["summarize"](CHAT, limit=0)
    manager = CONTEXT_MANAGERS["summarize"](CHAT, limit=5)
    with pytest.raises(ValueError, match=r"context\.limit is 5; raise"):
        manager.start("", "a question that is longer than five tokens")
