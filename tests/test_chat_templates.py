"""Chat templates: turn by turn equals the whole, or the template is refused."""

import datetime
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.chat.template_chat import TemplateChat, load_chat
from focus.chat.tokens import CHATML, Chat, train_tokenizer
from focus.chat.tool_calls import ToolCall, render
from focus.context import Full, Summarize

PAD, START, END = CHATML.special_tokens
CORPUS = [f"system user assistant tool look({n}) open({n})\n\nthe answer is\n" for n in range(50)]
TOKENIZER = train_tokenizer(CORPUS, vocab_size=290, special_tokens=CHATML.special_tokens)
TOKENIZER.add_tokens(["<think>", "</think>", "<tool_call>"])  # tokens that text may give

# As SmolLM2: every message alike, and a system message where there is none.
PLAIN = """
{%- for m in messages -%}
  {%- if loop.first and m['role'] != 'system' -%}
    {{ '<|im_start|>system\nYou help.<|im_end|>\n' }}
  {%- endif -%}
  {{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# As Qwen2.5: tools in the system message, answers of tools in messages of the user.
TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
    {{- '# Tools\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in m.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# As Qwen3: thinking is kept only after the last question.
STRIPS = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- elif loop.last and '</think>' not in content %}
            {%- set content = '<think>\n\n</think>\n\n' + content %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# As Llama 3: everything is trimmed.
TRIMS = PLAIN.replace("m['content']", "m['content'] | trim")
# As Qwen3.5: the generation prompt opens the thinking, past outputs have none before a question.
OPENS = STRIPS.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")


def make(template, **options):
    return TemplateChat(TOKENIZER, template, pad_token=PAD, **options)


WEATHER = {"name": "weather", "parameters": {"type": "object", "description": "for <b>é</b>"}}
CHATS = {
    "plain": make(PLAIN),
    "tools": make(TOOLS),
    "tools_given": make(TOOLS, variables={"tools": [WEATHER]}),
    "trims": make(TRIMS),
    "strips": make(STRIPS, keep_thinking=True),
    "opens": make(OPENS, keep_thinking=True),
}
each_chat = pytest.mark.parametrize("name", sorted(CHATS))

# Text that tempts: special tokens, tags, private characters, whitespace at both ends.
pieces = st.sampled_from([PAD, START, END, "<think>", "</think>", "\n", " ", "\ue000", "look(1)"])
any_text = st.lists(pieces | st.text(max_size=6), max_size=5).map("".join)
# An output keeps its own whitespace, which a template may trim; see the test of it.
outputs = any_text.map(str.strip)
thoughts = st.sampled_from(["", "<think>\nso\n</think>\n\n"])
turns = st.lists(
    st.tuples(st.tuples(thoughts, outputs).map("".join).map(str.strip), any_text, st.booleans()),
    max_size=3,
)


def points(chat, system, user, turns):
    """Every point of an episode: ids turn by turn, messages, whether the policy speaks next."""
    ids = chat.encode_start(system, user)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    yield ids, messages, True
    for output, text, from_tool in turns:
        ids += (*chat.encode_text(output), chat.end_of_turn_id)
        messages = [*messages, {"role": "assistant", "content": output}]
        yield ids, messages, False
        ids += (chat.encode_observation if from_tool else chat.encode_user)(text, closed=True)
        messages = [*messages, {"role": "tool" if from_tool else "user", "content": text}]
        yield ids, messages, True


def play(chat, system, user, turns):
    """Ids turn by turn, and the messages of the whole."""
    return list(points(chat, system, user, turns))[-1][:2]


@each_chat
@settings(deadline=None, max_examples=20)
@given(system=any_text, user=any_text, turns=turns)
def test_turn_by_turn_ids_equal_the_whole_template(name, system, user, turns):
    chat = CHATS[name]
    for ids, messages, speaks in points(chat, system, user, turns):
        # The newline behind an output is no token of the policy: it comes with what follows.
        newline = () if speaks else chat.encode_text("\n")
        assert chat.encode_messages(messages, generation_prompt=speaks) == ids + newline


# What the policy may write where a template lays out thinking by itself.
THOUGHT = "<think>\nso\n</think>\n\n"
EPISODES = [
    ("", "who?", []),
    ("be brief", "\ncapital of 7?", [("look(1)", "a\n\n", True)]),
    ("", "who?", [("It is b.", "Sure?", False), ("Yes.", "", True), ("look(2)", "\nc", True)]),
]


@pytest.mark.parametrize("name", sorted(set(CHATS) - {"strips", "opens"}))
@pytest.mark.parametrize("episode", range(len(EPISODES)))
def test_ids_are_those_that_transformers_gives_the_whole_conversation(name, episode):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")
    chat = CHATS[name]
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER, chat_template=chat._template_source
    )
    for ids, messages, speaks in points(chat, *EPISODES[episode]):
        whole = theirs.apply_chat_template(
            messages,
            tools=chat._variables.get("tools"),
            add_generation_prompt=speaks,
            return_dict=False,
        )
        assert list(ids) == whole if speaks else [*ids, *chat.encode_text("\n")] == whole


@pytest.mark.parametrize("name", ["strips", "opens"])
def test_kept_thinking_is_the_plain_encoding_of_what_was_said(name):
    chat = CHATS[name]
    opened = "<|im_start|>assistant\n" + ("<think>\n" if name == "opens" else "")
    text = "<|im_start|>user\nwho?<|im_end|>\n" + opened
    turns = [(f"{THOUGHT}look(1)", "a", True), ("Yes.", "Sure?", False)]
    for (ids, _, speaks), (said, heard, tool) in zip(
        points(chat, "", "who?", turns), [("", "", None), *(turn for turn in turns for _ in "ab")]
    ):
        if tool is not None and not speaks:
            text += f"{said}<|im_end|>"
        elif tool is not None:
            text += f"\n<|im_start|>{'tool' if tool else 'user'}\n{heard}<|im_end|>\n{opened}"
        assert list(ids) == TOKENIZER.encode(text, add_special_tokens=False).ids


@each_chat
@settings(deadline=None, max_examples=20)
@given(text=any_text)
def test_text_from_outside_never_becomes_a_special_token(name, text):
    chat = CHATS[name]
    special = {TOKENIZER.token_to_id(token) for token in CHATML.special_tokens}

    def special_in(ids):
        return [i for i in ids if i in special]

    for encode in (chat.encode_observation, chat.encode_user):
        assert special_in(encode(text, closed=True)) == special_in(encode("x", closed=True))
    assert special_in(chat.encode_start("x" + text, text)) == special_in(
        chat.encode_start("x", "x")
    )
    # Nothing is lost: the tokens of a special token's spelling say it.
    shown = TOKENIZER.decode(list(chat.encode_user(text, closed=True)), skip_special_tokens=False)
    assert text.strip() in shown


def test_plain_chatml_gives_the_ids_of_the_built_in_format():
    ours = Chat(TOKENIZER, CHATML)
    turns = [("look(1)", f"a{END}\n", True), ("It is b.", "Sure?", False)]
    assert play(CHATS["plain"], "brief", "who?", turns) == play(ours, "brief", "who?", turns)
    assert CHATS["plain"].stop_token_ids == ours.stop_token_ids
    assert CHATS["plain"].pad_id == ours.pad_id
    assert CHATS["plain"].vocab_size == ours.vocab_size


def test_templates_say_what_only_they_know():
    assert (
        CHATS["plain"]
        .render([{"role": "user", "content": "q"}])
        .startswith("<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nq")
    )
    tool = [{"role": "user", "content": "q"}, {"role": "tool", "content": "o"}]
    assert (
        CHATS["tools"]
        .render(tool)
        .endswith("<|im_start|>user\n<tool_response>\no\n</tool_response><|im_end|>\n")
    )
    assert json.dumps(WEATHER, ensure_ascii=False) in CHATS["tools_given"].render(tool)


@each_chat
def test_an_output_cut_by_length_is_closed_for_the_policy(name):
    chat = CHATS[name]
    for encode in (chat.encode_observation, chat.encode_user):
        closed = encode("text", closed=True)
        assert encode("text", closed=False) == (chat.end_of_turn_id, *closed)
        assert closed[0] != chat.end_of_turn_id


@each_chat
def test_context_managers_build_the_whole_template(name):
    chat = CHATS[name]
    output = (*chat.encode_text("look(1)"), chat.end_of_turn_id)
    full = Full(chat)
    context = full.observe(full.start("sys", "q"), output, "a")
    messages = [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "look(1)"},
        {"role": "tool", "content": "a"},
    ]
    assert context.prompt_ids == chat.encode_messages(messages, generation_prompt=True)
    summaries = Summarize(chat, limit=500, summary_tokens=8, instruction="Sum up.")
    asked = [{"role": "assistant", "content": ""}, {"role": "user", "content": "Sum up."}]
    assert summaries.summary_prompt(context) == chat.encode_messages(
        messages + asked, generation_prompt=True
    )


def test_sampled_ids_are_kept_where_the_tokenizer_would_choose_others():
    chat = CHATS["strips"]
    spelled = tuple(i for c in "look" for i in chat.encode_text(c))
    assert spelled != chat.encode_text("look")
    context = Full(chat).observe(Full(chat).start("", "q"), spelled, "a")
    start = chat.encode_start("", "q")
    assert context.prompt_ids == start + spelled + chat.encode_observation("a", closed=False)


def test_a_template_that_strips_thinking_is_refused_unless_it_is_kept():
    with pytest.raises(ValueError, match="strips or rewrites the thinking .* keep_thinking=True"):
        make(STRIPS)
    chat = CHATS["strips"]
    thought = "<think>\nso\n</think>\n\nIt is b."
    _, messages = play(chat, "", "who?", [(thought, "Sure?", False)])
    assert thought in chat.render(messages)
    # An output that ends a conversation gets no thought that it did not have.
    last = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert chat.render(last) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )


def test_a_trimming_template_trims_messages_but_keeps_what_was_sampled():
    chat = CHATS["trims"]
    assert chat.encode_user(" x\n", closed=True) == chat.encode_user("x", closed=True)
    context = Full(chat).observe(
        Full(chat).start("", "q"), (*chat.encode_text("a\n"), chat.end_of_turn_id), "o"
    )
    assert "a\n<|im_end|>" in TOKENIZER.decode(list(context.prompt_ids), skip_special_tokens=False)


NUMBERS = PLAIN.replace("m['role'] + '\n'", "m['role'] + (loop.index | string) + '\n'")
COUNTS = PLAIN.replace("{%- for", "{{- messages | length }}{%- for", 1)
NO_TOOL = PLAIN.replace(
    "{%- if loop.first",
    "{%- if m.role == 'tool' %}{{ raise_exception('only user and assistant') }}{% endif -%}"
    "{%- if loop.first",
    1,
)
DROPS_TOOL = PLAIN.replace("for m in messages", "for m in messages if m.role != 'tool'")
NO_END = PLAIN.replace("+ '<|im_end|>' +", "+ '</s>' +")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (COUNTS, r"cannot be spoken turn by turn: .*rewrites what stood before output 0"),
        (NUMBERS, r"cannot be spoken turn by turn"),
        (OPENS, r"cannot be spoken turn by turn: .*; keep_thinking=True helps"),
        (NO_TOOL, r"\['user', 'assistant', 'tool'\]: only user and assistant; .*observation_role"),
        (DROPS_TOOL, r"leaves out 'nothing here'; .*observation_role"),
        (NO_END, r"must close an output with a special token .*</s>"),
        ("{{ messages[0].content.no.such }}", "chat template fails"),
        ("{% for m in %}", "cannot read the chat template"),
        ("{{ messages.append(1) }}", "chat template fails"),  # the sandbox
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template fails"),
    ],
)
def test_templates_that_fail_the_probe_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        make(template)


def test_kept_thinking_does_not_excuse_a_layout_that_depends_on_the_past():
    with pytest.raises(ValueError, match="an output is followed by"):
        make(NUMBERS, keep_thinking=True)


def test_templates_without_tools_take_answers_as_messages_of_the_user():
    chat = make(NO_TOOL, observation_role="user")
    assert chat.encode_observation("x", closed=True) == chat.encode_user("x", closed=True)


def test_a_tokenizer_whose_special_tokens_take_whitespace_is_refused():
    tokenizer = tokenizers.Tokenizer.from_str(TOKENIZER.to_str())
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["rstrip"] = token["content"] == END
    greedy = tokenizers.Tokenizer.from_str(json.dumps(spec))
    with pytest.raises(ValueError, match="in another way than message by message"):
        TemplateChat(greedy, PLAIN, pad_token=PAD)


def test_hermes_calls_are_those_of_a_template_with_tool_calls():
    calls = [ToolCall("open", {"page": 3, "why": "é <b>"}), ToolCall("stop", {})]
    template = make(TOOLS)._template
    fields = [{"name": c.name, "arguments": c.arguments} for c in calls]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": fields}]
    assert render(calls, "hermes") in template.render(messages=messages)


def test_helpers_of_templates():
    now = datetime.datetime(2031, 5, 6)
    head = "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{% generation %}!{% endgeneration %}"
    chat = make(head + PLAIN, now=now, variables={"bos_token": END})
    assert chat.render([{"role": "user", "content": "q"}]).startswith(END + "06 May 2031!")
    assert chat.encode_start("", "q")[0] == chat.end_of_turn_id


@each_chat
def test_a_saved_directory_speaks_the_same_ids(name, tmp_path):
    chat = CHATS[name]
    chat.save(tmp_path)
    loaded = TemplateChat.load(
        tmp_path,
        keep_thinking=name in ("strips", "opens"),
        variables={"tools": [WEATHER]} if name == "tools_given" else None,
    )
    turns = [("look(1)", f"a{END}", True), ("It is b.", "Sure?", False)]
    assert play(loaded, "s", "u", turns) == play(chat, "s", "u", turns)


def test_the_stop_tokens_of_a_model_end_an_output_too(tmp_path):
    make(PLAIN).save(tmp_path)
    path = tmp_path / "generation_config.json"
    end, pad = (TOKENIZER.token_to_id(token) for token in (END, PAD))
    assert TemplateChat.load(tmp_path).stop_token_ids == (end,)
    for eos, stops in ((pad, (end, pad)), ([pad, end, 5], (end, pad, 5)), (None, (end,))):
        path.write_text(json.dumps({"eos_token_id": eos}))
        chat = TemplateChat.load(tmp_path)
        assert chat.stop_token_ids == stops and chat.end_of_turn_id == end
        chat.save(tmp_path / "again")
        assert TemplateChat.load(tmp_path / "again").stop_token_ids == stops
    # The turn is closed behind another one: what follows is as after an end of turn.
    context = Full(chat).observe(Full(chat).start("", "q"), (pad,), "o")
    assert context.prompt_ids[-len(chat.encode_observation("o", closed=False)) :][0] == end
    path.write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match="eos_token_id in .* must be a token id or a list .*</s>"):
        TemplateChat.load(tmp_path)
    path.write_text('{"eos_token_id": [2, 900]}')
    with pytest.raises(ValueError, match=r"stop token ids \[900\] are none of .* different models"):
        TemplateChat.load(tmp_path)


def test_tags_of_tool_calls_are_text_even_as_special_tokens():
    tokenizer = tokenizers.Tokenizer.from_str(TOKENIZER.to_str())
    tags = ["<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens([*tags, "<|im_sep|>"])
    chat = TemplateChat(tokenizer, PLAIN, pad_token=PAD)
    ids = [tokenizer.token_to_id(t) for t in (PAD, tags[0], "<|im_sep|>", tags[1], END)]
    assert (
        chat.decode([*chat.encode_text("a"), *ids, *chat.encode_text("b")])
        == "a" + "".join(tags) + "b"
    )


def test_tools_that_a_layout_cannot_show_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"no place for tools .* all 1; .* set chat\.tool_calls=''"
    ):
        make(PLAIN, variables={"tools": [WEATHER]})
    Chat(TOKENIZER, CHATML).save(tmp_path)
    with pytest.raises(ValueError, match="chat format 'chatml' of .* has no place for tools"):
        load_chat(tmp_path, variables={"tools": [WEATHER]})


def test_a_directory_says_by_its_files_which_chat_it_is(tmp_path):
    make(TOOLS).save(tmp_path)
    chat = load_chat(tmp_path, variables={"tools": [WEATHER]})
    assert chat.encode_start("", "q") == CHATS["tools_given"].encode_start("", "q")
    (tmp_path / "chat_format.json").write_text('{"name": "compact"}')
    with pytest.raises(ValueError, match="lacks .* of chat format 'compact'"):
        load_chat(tmp_path)
    (tmp_path / "chat_format.json").write_text('{"name": "chatml"}')
    assert isinstance(load_chat(tmp_path, variables={"tools": None}), Chat)


def test_templates_of_tokenizer_configs(tmp_path):
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    config = {"pad_token": {"content": PAD, "special": True}, "bos_token": None}
    for template in (
        PLAIN,
        [{"name": "rag", "template": ""}, {"name": "default", "template": PLAIN}],
    ):
        config["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        chat = TemplateChat.load(tmp_path)
        assert chat.encode_start("", "q") == CHATS["plain"].encode_start("", "q")
    (tmp_path / "chat_template.jinja").write_text(TOOLS)  # the newer place wins
    chat = TemplateChat.load(tmp_path)
    assert chat.encode_start("", "q") == CHATS["tools"].encode_start("", "q")


def test_errors_name_the_value_and_the_way_out(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer.json in"):
        TemplateChat.load(tmp_path)
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="names no pad_token; give one by pad_token="):
        TemplateChat.load(tmp_path)
    with pytest.raises(ValueError, match="no chat template in .*a base model has none"):
        TemplateChat.load(tmp_path, pad_token=PAD)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read .*tokenizer_config.json"):
        TemplateChat.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        TemplateChat.load(tmp_path)
    with pytest.raises(ValueError, match="pad token '<x>' is no special token"):
        TemplateChat(TOKENIZER, PLAIN, pad_token="<x>")
    with pytest.raises(ValueError, match="name another pad_token, e.g. one of .*endoftext"):
        TemplateChat(TOKENIZER, PLAIN, pad_token=END)
    with pytest.raises(ValueError, match="writes the pad token .* itself"):
        make("{{ bos_token }}" + PLAIN, variables={"bos_token": PAD})
    with pytest.raises(ValueError, match="observation_role must be one of .* got 'critic'"):
        make(PLAIN, observation_role="critic")
    with pytest.raises(ValueError, match="unknown role 'critic'"):
        CHATS["plain"].encode_messages([{"role": "critic", "content": ""}])
