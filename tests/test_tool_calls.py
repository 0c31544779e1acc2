"""Tool calls: what is written is read back, and no text of a policy breaks the reader."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.chat.tool_calls import (
    FORMATS,
    Malformed,
    ToolCall,
    parse,
    parse_spoken,
    render,
    render_responses,
)

each_format = pytest.mark.parametrize("format", FORMATS)

# Text that tempts a reader: the tags of both formats, JSON, newlines at both ends.
TAGS = ("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=p>\n")
pieces = st.sampled_from([*TAGS, "</parameter>", "\n", " ", '"', "\\", "{", '{"name": "a"}'])
tempting = st.lists(pieces | st.text(max_size=5), max_size=6).map("".join)
names = st.text("abc_-. 1é", min_size=1, max_size=8).filter(lambda s: s == s.strip())
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tempting, inner, max_size=3),
    max_leaves=6,
)


def written(text):
    """Whether the qwen format, which has no escapes, can write a value."""
    return not any(tag in text for tag in ("tool_call>", "</function>", "</parameter>"))


json_calls = st.builds(ToolCall, names, st.dictionaries(tempting, json_values | tempting))
text_calls = st.builds(ToolCall, names, st.dictionaries(names, tempting.filter(written)))


@settings(deadline=None, max_examples=30)
@given(calls=st.lists(json_calls, max_size=3), around=st.text("ab \n<>", max_size=9))
def test_hermes_reads_what_it_writes(calls, around):
    text = around + render(calls, "hermes") + around
    assert parse(text, "hermes") == calls
    # Readers that look for the closing tag first find as many.
    assert text.count("</tool_call>") == len(calls)


@settings(deadline=None, max_examples=30)
@given(calls=st.lists(text_calls, max_size=3), around=st.text("ab \n<>", max_size=9))
def test_qwen_reads_what_it_writes(calls, around):
    assert parse(around + render(calls, "qwen") + around, "qwen") == calls


@settings(deadline=None, max_examples=30)
@given(value=json_values.filter(lambda value: written(json.dumps(value))))
def test_qwen_writes_other_values_as_json(value):
    (call,) = parse(render([ToolCall("f", {"x": value})], "qwen"), "qwen")
    assert json.loads(call.arguments["x"]) == value


@each_format
@settings(deadline=None, max_examples=30)
@given(text=tempting)
def test_no_text_raises_and_every_piece_is_in_the_text(format, text):
    found = parse(text, format)
    assert len(found) <= text.count("<tool_call>")
    assert all(call.reason and call.text in text for call in found if isinstance(call, Malformed))
    if found and isinstance(found[-1], ToolCall):
        assert parse(render(found[-1:], "hermes"), "hermes") == found[-1:]


@each_format
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_cut_call_is_malformed_and_never_a_shorter_call(format, data):
    text = render([ToolCall("open", {"page": "3", "why": "a\nb"})], format)
    cut = text[: data.draw(st.integers(len("<tool_call>"), len(text) - 1))]
    (call,) = parse(cut, format)
    assert isinstance(call, Malformed)
    assert call.text == cut


def test_layouts_are_those_that_models_know():
    calls = [ToolCall("open", {"page": 3, "why": "é <b>"}), ToolCall("stop", {})]
    assert render(calls, "hermes") == (
        '<tool_call>\n{"name": "open", "arguments": {"page": 3, "why": "é <b>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    )
    assert render(calls, "qwen") == (
        "<tool_call>\n<function=open>\n<parameter=page>\n3\n</parameter>\n"
        "<parameter=why>\né <b>\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    )


@each_format
def test_responses_are_one_message(format):
    assert render_responses(["a {}", "b\n"], format) == (
        "<tool_response>\na {}\n</tool_response>\n<tool_response>\nb\n\n</tool_response>"
    )
    assert render_responses([], format) == ""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("search(x)", "not JSON: Expecting value at character 0"),
        ("", "not JSON"),
        ("[1]", "a JSON object, got a list"),
        ('{"name": "f"}', """the keys "name" and "arguments", got 'name'"""),
        ('{"name": "f", "arguments": {}, "id": 1}', "'id'"),
        ('{"name": "", "arguments": {}}', "name must be a string"),
        ('{"name": 7, "arguments": {}}', "got 7"),
        ('{"name": "f", "arguments": "{}"}', "arguments must be a JSON object, got a string"),
        ('{"name": "f", "arguments": null}', "got null"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "stands twice"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is no JSON number"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "not JSON"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "not JSON"),
        ('{"name": "f", "arguments": ' + '{"a":' * 100_000, "nested too deeply"),
        ('{"name": "f", "arguments": {}} and more', "must follow the call, found 'and more"),
    ],
)
def test_hermes_says_what_is_wrong(body, reason):
    good = ToolCall("g", {})
    text = f"<tool_call>{body}</tool_call>" + render([good], "hermes")
    bad, after = parse(text, "hermes")
    assert reason in bad.reason
    assert bad.text == f"<tool_call>{body}</tool_call>"
    assert after == good  # one bad call does not take the next one with it


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "f", "arguments": {}}', "<function=name> must follow"),
        ("<function=f>", "<parameter=name> or </function> must follow"),
        ("<function=f><parameter=a>1</function>", "'a' is not closed"),
        ("<function=f>\n1\n</function>", "<parameter=name> or </function> must follow"),
        (
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "'a' stands twice",
        ),
        ("<function=f></function> and more", "must follow the call"),
    ],
)
def test_qwen_says_what_is_wrong(body, reason):
    (bad,) = parse(f"<tool_call>{body}</tool_call>", "qwen")
    assert reason in bad.reason


def test_a_call_that_is_never_closed_ends_where_the_next_begins():
    good = render([ToolCall("g", {})], "hermes")
    bad, after = parse('<tool_call>{"name": "f", "arguments": {}}\n' + good, "hermes")
    assert bad.text == '<tool_call>{"name": "f", "arguments": {}}\n'
    assert after == ToolCall("g", {})


def test_qwen_keeps_newlines_of_values():
    code = "\n  def f():\n    return 1\n"
    (call,) = parse(render([ToolCall("run", {"code": code})], "qwen"), "qwen")
    assert call.arguments["code"] == code


def call_of(text, format):
    return ToolCall("search", {"query": text}), render(
        [ToolCall("search", {"query": text})], format
    )


@each_format
@pytest.mark.parametrize(
    "argument",
    ["</think>", "<think>", "<think>x</think>", "a </think> b <think>", "</think></think>"],
)
def test_tags_of_thinking_inside_an_argument_are_its_text(format, argument):
    """Pitfall 40."""
    call, text = call_of(argument, format)
    thought = render([ToolCall("search", {"query": "other"})], format)
    assert parse_spoken(text, format) == [call]
    assert parse_spoken(f"<think>{thought}</think>{text}", format) == [call]
    assert parse_spoken(f"so {thought}?</think>{text}", format) == [call]
    assert parse_spoken(f"{text}\n<think>{thought}</think>", format) == [call]
    assert parse_spoken(f"{text}<think>{thought}", format) == [call]
    assert parse_spoken(f"{text}{text}", format) == [call, call]


@each_format
def test_a_call_inside_of_thinking_is_none(format):
    call, text = call_of("x", format)
    _, tagged = call_of("</think>", format)
    for thinking in (
        f"<think>{text}",
        f"<think>{text}</think>",
        f"{text}</think>",
        f"{tagged}</think>",
    ):
        assert parse_spoken(thinking, format) == []
    assert parse_spoken(f"<think>a</think><think>{text}</think>{text}", format) == [call]
    assert parse_spoken(f"<think>{tagged}</think>{text}", format) == [call]
    # A call that cannot be read hides no tag: this is a thought about how calls are written.
    assert parse_spoken(f"I open with <tool_call> then.</think>{text}", format) == [call]
    (bad,) = parse_spoken("<tool_call>{ <think>", format)
    assert isinstance(bad, Malformed)


@each_format
@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "x", "CALL"]),
        max_size=7,
    )
)
def test_spoken_calls_are_some_of_all_and_all_without_thinking(format, pieces):
    _, text = call_of("y", format)
    whole = "".join(text if piece == "CALL" else piece for piece in pieces)
    spoken, everything = parse_spoken(whole, format), parse(whole, format)
    assert len(spoken) <= len(everything)
    if "think>" not in whole:
        assert spoken == everything
    opened, ended = pieces[:1] == ["<think>"], pieces[-1:] == ["</think>"]
    if (opened and "</think>" not in pieces) or (ended and "<think>" not in pieces):
        assert spoken == []


def test_errors_name_the_value_and_the_way_out():
    with pytest.raises(ValueError, match="unknown tool-call format 'xml'; formats are"):
        parse("", "xml")
    with pytest.raises(ValueError, match="unknown tool-call format 'xml'"):
        render([], "xml")
    with pytest.raises(ValueError, match="unknown tool-call format 'xml'"):
        render_responses([], "xml")
    with pytest.raises(ValueError, match=r"argument 'a' of 'f' holds .* use the hermes format"):
        render([ToolCall("f", {"a": "x</parameter>"})], "qwen")
    with pytest.raises(ValueError, match="cannot write the name 'f>'"):
        render([ToolCall("f>", {})], "qwen")
    with pytest.raises(ValueError, match="is no JSON value"):
        render([ToolCall("f", {"a": {1}})], "hermes")
    with pytest.raises(ValueError):
        render([ToolCall("f", {"a": float("nan")})], "hermes")
