"""Chats as ids: turn by turn equals the whole, and tools cannot speak in the policy's place."""

import dataclasses

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.chat.tokens import CHAT_FORMATS, CHATML, COMPACT, Chat, train_tokenizer

CORPUS = [
    f"capital of country {n}? search(Santiago) open({n}) answer(Peso)\nsystem user assistant tool\n"
    for n in range(50)
] + ["Größe 12.5, naïve café; a  b   c\n\n\tdef f(x): return x\n"]


def make_tokenizer(chat_format, vocab_size=300):
    special_tokens = chat_format.special_tokens
    return train_tokenizer(CORPUS, vocab_size=vocab_size, special_tokens=special_tokens)


TOKENIZERS = {name: make_tokenizer(chat_format) for name, chat_format in CHAT_FORMATS.items()}
CHATS = {name: Chat(TOKENIZERS[name], chat_format) for name, chat_format in CHAT_FORMATS.items()}
each_format = pytest.mark.parametrize("name", sorted(CHATS))

# Text that tempts a tokenizer: markers, newlines at both ends, any unicode.
pieces = st.sampled_from([*COMPACT.special_tokens, *CHATML.special_tokens, "\n", " ", "open(1)"])
any_text = st.lists(pieces | st.text(max_size=6), max_size=5).map("".join)


def messages_of(system, user, turns):
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    for action, observation in turns:
        messages.append({"role": "assistant", "content": action})
        messages.append({"role": "tool", "content": observation})
    return messages


@each_format
@settings(deadline=None, max_examples=30)
@given(system=any_text, user=any_text, turns=st.lists(st.tuples(any_text, any_text), max_size=3))
def test_turn_by_turn_ids_equal_the_whole_chat(name, system, user, turns):
    chat = CHATS[name]
    ids = chat.encode_start(system, user)
    for action, observation in turns:
        ids += (*chat.encode_text(action), chat.end_of_turn_id)
        ids += chat.encode_observation(observation, closed=True)
    whole = chat.encode_messages(messages_of(system, user, turns), generation_prompt=True)
    assert ids == whole


@each_format
def test_whole_chat_equals_the_plain_encoding_of_its_template(name):
    chat = CHATS[name]
    messages = messages_of("be brief", "\ncapital of 7?", [("open(1)", "a\n\n"), ("answer(b)", "")])
    rendered = chat.render(messages, generation_prompt=True)
    assert list(chat.encode_messages(messages, generation_prompt=True)) == (
        TOKENIZERS[name].encode(rendered, add_special_tokens=False).ids
    )


def test_chatml_has_the_newline_after_the_end_of_turn():
    """Pitfall 19."""
    chat = CHATS["chatml"]
    assert chat.render(messages_of("", "q", [("a", "o")]), generation_prompt=True) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>tool\no<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.decode(chat.encode_observation("o", closed=True)[:1]) == "\n"


@each_format
@pytest.mark.parametrize("encode", ["encode_observation", "encode_user"])
def test_an_output_cut_by_length_is_closed_for_the_policy(name, encode):
    chat = CHATS[name]
    closed = getattr(chat, encode)("text", closed=True)
    assert getattr(chat, encode)("text", closed=False) == (chat.end_of_turn_id, *closed)
    assert closed[0] != chat.end_of_turn_id


@each_format
@settings(deadline=None, max_examples=30)
@given(text=any_text)
def test_text_from_outside_never_becomes_a_special_token(name, text):
    chat = CHATS[name]
    special = {TOKENIZERS[name].token_to_id(token) for token in chat.format.special_tokens}
    assert not special & set(chat.encode_text(text))
    empty = chat.encode_observation("", closed=True)
    ids = chat.encode_observation(text, closed=True)
    assert [i for i in ids if i in special] == [i for i in empty if i in special]
    assert chat.decode(chat.encode_text(text)) == text  # byte level: nothing is lost


def test_a_second_tokenization_would_change_sampled_ids():
    """Pitfall 20: why outputs are never re-encoded, and that decoding them loses nothing."""
    chat = CHATS["compact"]
    spelled = tuple(i for c in "search" for i in chat.encode_text(c))
    assert chat.decode(spelled) == "search"
    assert chat.encode_text("search") != spelled


@each_format
def test_pad_and_end_of_turn_are_two_tokens_and_end_of_turn_stops(name):
    """Pitfall 16."""
    chat = CHATS[name]
    assert chat.pad_id != chat.end_of_turn_id
    assert chat.stop_token_ids == (chat.end_of_turn_id,)
    messages = messages_of("s", "u", [("a", "o")])
    assert chat.pad_id not in chat.encode_messages(messages, generation_prompt=True)
    shared = dataclasses.replace(chat.format, pad=chat.format.end_of_turn)
    with pytest.raises(ValueError, match="name another pad token"):
        Chat(TOKENIZERS[name], shared)


def test_compact_spends_three_tokens_between_turns():
    chat = CHATS["compact"]
    observation = chat.encode_observation("open(1)", closed=True)
    assert len(observation) == len(chat.encode_text("open(1)")) + 3


def test_special_tokens_are_skipped_in_decoded_text():
    chat = CHATS["compact"]
    assert chat.decode((*chat.encode_text("answer(x)"), chat.end_of_turn_id)) == "answer(x)"


def test_training_is_deterministic_and_exact_in_size():
    tokenizer = make_tokenizer(COMPACT)
    assert tokenizer.to_str() == TOKENIZERS["compact"].to_str()
    assert Chat(tokenizer, COMPACT).vocab_size == 300
    assert [tokenizer.token_to_id(t) for t in COMPACT.special_tokens] == list(range(6))
    assert len(CHATS["compact"].encode_text("12345")) == 5  # digits stay single tokens


@each_format
def test_a_saved_chat_speaks_the_same_ids(name, tmp_path):
    chat = CHATS[name]
    chat.save(tmp_path)
    loaded = Chat.load(tmp_path)
    assert loaded.format == chat.format
    messages = messages_of("sys", "<|end|> naïve", [("a", "<|im_end|>")])
    assert loaded.encode_messages(messages) == chat.encode_messages(messages)


def test_errors_name_the_value_and_the_way_out(tmp_path):
    chat = CHATS["compact"]
    with pytest.raises(ValueError, match="vocab_size 200 .* at least 262"):
        make_tokenizer(COMPACT, vocab_size=200)
    with pytest.raises(ValueError, match="of vocab_size 90000 ids; give more text"):
        make_tokenizer(COMPACT, vocab_size=90_000)
    with pytest.raises(ValueError, match=r"lacks .*im_start.* 'chatml'"):
        Chat(TOKENIZERS["compact"], CHATML)
    with pytest.raises(ValueError, match="only 256 embeddings; set model.vocab_size >= 300"):
        chat.check_model(256)
    chat.check_model(300)
    chat.check_model(512)
    with pytest.raises(ValueError, match="unknown role 'critic'"):
        chat.encode_messages([{"role": "critic", "content": ""}])
    with pytest.raises(ValueError, match="no tokenizer.json in"):
        Chat.load(tmp_path)
    chat.save(tmp_path)
    (tmp_path / "chat_format.json").write_text('{"name": "morse"}')
    with pytest.raises(ValueError, match="unknown chat format 'morse'"):
        Chat.load(tmp_path)
    (tmp_path / "chat_format.json").unlink()
    with pytest.raises(ValueError, match="name the chat format, one of"):
        Chat.load(tmp_path)
    assert Chat.load(tmp_path, COMPACT).vocab_size == 300
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read .*tokenizer.json"):
        Chat.load(tmp_path, COMPACT)


def test_markers_that_text_could_write_are_refused():
    loose = tokenizers.Tokenizer(tokenizers.models.BPE())
    loose.add_tokens(list(COMPACT.special_tokens))  # added, but not as special tokens
    with pytest.raises(ValueError, match="plain text could inject"):
        Chat(loose, COMPACT)
