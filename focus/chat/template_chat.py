"""Chats of published models: the tokenizer and the chat template of a Hugging Face directory.

`TemplateChat` does what `focus.chat.tokens.Chat` does, but its layout is a jinja2 template. A
template describes a whole conversation; an agent grows one turn by turn and never takes back
what was read. The two agree only if the template appends: what it says of the first n messages
must be a prefix of what it says of n + 1. That is checked when the chat is made, with every
kind of turn an episode can have, and a template that rewrites its past is refused.

The rules of `focus.chat.tokens` hold here too: sampled ids are kept, and text from outside
never becomes a special token.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from focus.chat import files as chat_files
from focus.chat import tool_calls
from focus.chat.jinja import compile_template
from focus.chat.tokens import ROLES, Chat, Message, TextCodec, read_tokenizer


def load_chat(directory: str | Path, **options: Any) -> Chat | TemplateChat:
    """The chat of a model directory: our layout if it names one, else its chat template.

    Args:
      directory: with `chat_format.json` it is read by `Chat.load`, else by `TemplateChat.load`.
      **options: of `TemplateChat.load`.

    Raises:
      ValueError: files are missing or cannot be read, the chat refuses them, or tools are to be
        shown in a layout that has no place for them.
    """
    directory = Path(directory)
    if not (directory / "chat_format.json").is_file():
        return TemplateChat.load(directory, **options)
    chat = Chat.load(directory)
    if (options.get("variables") or {}).get("tools"):
        raise ValueError(
            f"chat format {chat.format.name!r} of {directory} has no place for tools; set "
            "chat.tool_calls='' and let the system message explain them"
        )
    return chat


class TemplateChat(TextCodec):
    """A tokenizer and a chat template: ids for everything that the policy did not write."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: str,
        *,
        pad_token: str,
        variables: Mapping[str, Any] | None = None,
        observation_role: str = "tool",
        keep_thinking: bool = False,
        stop_token_ids: Sequence[int] = (),
        now: datetime.datetime | None = None,
    ):
        r"""Checks that the template can be spoken turn by turn.

        Ids that are built turn by turn equal the ids of the whole template, with one thing left
        to the policy: a template that trims its outputs cannot take back whitespace at their
        ends, since what was sampled is kept.

        Args:
          tokenizer: copied; later changes to it have no effect here.
          template: jinja2 source, run in a sandbox.
          pad_token: special token that fills rows; never part of a message.
          variables: what the template reads besides messages, e.g. `bos_token`, `tools` (JSON
            schemas), `enable_thinking`.
          observation_role: role of a tool's answer in the template; "user" for templates that
            know no tools.
          keep_thinking: show the template a stand-in for each output, so that it can neither
            strip thinking from earlier ones nor lay it out anew. For templates such as that of
            Qwen3, whose thinking must stay because it was read when later turns were sampled.
          stop_token_ids: end an output besides the template's end of turn. The end of turn is put
            in behind them.
          now: what `strftime_now` tells the template, in every conversation; None is now.

        Attributes:
          vocab_size, pad_id, end_of_turn_id, stop_token_ids: as of `focus.chat.tokens.Chat`.

        Raises:
          ValueError: the template cannot be read, closes an output with no special token, does
            not append, or leaves out the tools of `variables`; a token is missing; pad and end
            of turn are one token.
        """
        super().__init__(tokenizer)
        if observation_role not in ROLES:
            raise ValueError(f"observation_role must be one of {ROLES}, got {observation_role!r}")
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}
        tags = (tool_calls.OPEN, tool_calls.CLOSE)
        self._silent = {i for token, i in self._special.items() if token not in tags}
        if pad_token not in self._special:
            raise ValueError(
                f"pad token {pad_token!r} is no special token of this tokenizer; name one of "
                f"{list(self._special)[:20]}"
            )
        self._pad_token = pad_token
        self._template_source = template
        self._template = compile_template(template, now or datetime.datetime.now().astimezone())
        self._variables = dict(variables or {})
        self._observation_role = observation_role
        self._keep_thinking = keep_thinking
        longest_first = sorted(self._special, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, longest_first)))
        self._end_of_turn = self._find_end_of_turn()
        self.pad_id = self._special[pad_token]
        self.end_of_turn_id = self._special[self._end_of_turn]
        beyond = [i for i in stop_token_ids if not 0 <= i < self.vocab_size]
        if beyond:
            raise ValueError(
                f"stop token ids {beyond} are none of this tokenizer's {self.vocab_size}; "
                "tokenizer.json and generation_config.json are of different models"
            )
        self.stop_token_ids = tuple(dict.fromkeys((self.end_of_turn_id, *stop_token_ids)))
        if self.pad_id == self.end_of_turn_id:
            free = [token for token in self._special if token != pad_token]
            raise ValueError(
                f"pad and end of turn are both {pad_token!r}; masking padding would also mask the "
                f"real end of turn: name another pad_token, e.g. one of {free[:20]}"
            )
        self._probe()
        if self.pad_id in self.encode_start("Be brief.", "Who leads?"):
            raise ValueError(
                f"the chat template writes the pad token {pad_token!r} itself; masking padding "
                "would also mask it: name another pad_token, a special token that is not used"
            )
        self._check_tools()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; the tags of tool calls are text in any case."""
        spoken = [i for i in ids if i not in self._silent]
        return self._tokenizer.decode(spoken, skip_special_tokens=False)

    def encode_messages(
        self, messages: Sequence[Message], *, generation_prompt: bool = False
    ) -> tuple[int, ...]:
        """Ids of a whole chat, as the template lays it out; text never gives special tokens.

        Outputs are encoded on their own, as they were sampled after a generation prompt.

        Args:
          messages: `{"role": ..., "content": ...}` in order.
          generation_prompt: whether to open an assistant message at the end.

        Raises:
          ValueError: unknown role, or the template refuses or rewrites these messages.
        """
        hidden = self._hide(messages)
        parts = self._parts(hidden, hidden.messages, generation_prompt)
        return tuple(i for part in parts for i in self._encode(hidden, part))

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """The chat as one string, special tokens included (for people)."""
        hidden = self._hide(messages)
        return hidden.show("".join(self._parts(hidden, hidden.messages, generation_prompt)))

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer, the template and the small files that `load` reads.

        Options of this object that Hugging Face knows no file for (`keep_thinking`, ...) are the
        run's config to keep.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(self._template_source, encoding="utf-8")
        names = {n: self._variables[n] for n in chat_files.TOKEN_NAMES if n in self._variables}
        names["pad_token"] = self._pad_token
        (directory / "tokenizer_config.json").write_text(
            json.dumps(names, indent=2) + "\n", encoding="utf-8"
        )
        ids = {"eos_token_id": list(self.stop_token_ids), "pad_token_id": self.pad_id}
        (directory / "generation_config.json").write_text(
            json.dumps(ids, indent=2) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(
        cls, directory: str | Path, *, pad_token: str | None = None, **options: Any
    ) -> TemplateChat:
        """Reads tokenizer and template of a model directory.

        Args:
          directory: holds `tokenizer.json`, `tokenizer_config.json` and, if the template is not
            in the latter, `chat_template.jinja`. An output also ends at the `eos_token_id` of
            `generation_config.json`.
          pad_token: None takes that of `tokenizer_config.json`.
          **options: of the constructor; `variables` are added to the directory's own.

        Raises:
          ValueError: a file is missing or cannot be read, or the constructor refuses.
        """
        directory = Path(directory)
        tokenizer = read_tokenizer(directory)
        config = chat_files.read_object(directory / "tokenizer_config.json")
        variables: dict[str, Any] = chat_files.read_tokens(config)
        pad_token = pad_token or variables.get("pad_token")
        if pad_token is None:
            raise ValueError(f"{directory} names no pad_token; give one by pad_token=...")
        variables |= options.pop("variables", None) or {}
        options.setdefault("stop_token_ids", chat_files.read_stop_token_ids(directory))
        template = chat_files.read_template(directory, config)
        return cls(tokenizer, template, pad_token=pad_token, variables=variables, **options)

    def _between(self, role: str, text: str, closed: bool) -> tuple[int, ...]:
        hidden = self._hide([{"role": role, "content": text}])
        ids = self._encode(hidden, self._after_output(hidden, hidden.messages, True))
        return ids[1:] if closed else ids

    def _hide(self, messages: Iterable[Message]) -> _Hidden:
        for message in messages:
            if message["role"] not in ROLES:
                raise ValueError(f"unknown role {message['role']!r}; roles are {ROLES}")
        roles = {role: role for role in ROLES} | {"tool": self._observation_role}
        plain = [{"role": roles[m["role"]], "content": m["content"]} for m in messages]
        return _Hidden.of(plain, self._any_special, tuple(self._special))

    def _parts(
        self, hidden: _Hidden, messages: Sequence[Message], generation_prompt: bool
    ) -> list[str]:
        """The text of a chat, cut in front of every output."""
        outputs = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self._keep_thinking:
            return self._kept_parts(hidden, messages, outputs, generation_prompt)
        text = self._run(messages, generation_prompt)
        cuts = [0]
        for i in outputs:
            prompt = self._run(messages[:i], True)
            if not text.startswith(prompt):
                raise ValueError(
                    f"the template rewrites what stood before output {outputs.index(i)}: it was "
                    f"sampled after {_tail(hidden.show(prompt))}, but the whole conversation has "
                    f"{_around(hidden.show(text), hidden.show(prompt))}"
                )
            cuts.append(len(prompt))
        return [text[a:b] for a, b in itertools.pairwise((*cuts, len(text)))]

    def _kept_parts(
        self,
        hidden: _Hidden,
        messages: Sequence[Message],
        outputs: Sequence[int],
        generation_prompt: bool,
    ) -> list[str]:
        ends = (*outputs[1:], len(messages))
        first = outputs[0] if outputs else len(messages)
        parts = [self._run(messages[:first], bool(outputs) or generation_prompt)]
        for i, end in zip(outputs, ends):
            opens = end < len(messages) or generation_prompt
            after = self._after_output(hidden, messages[i + 1 : end], opens)
            parts.append(messages[i]["content"] + after)
        return parts

    def _after_output(
        self, hidden: _Hidden, messages: Sequence[Message], generation_prompt: bool
    ) -> str:
        """What follows an output: its end of turn, `messages`, and a generation prompt."""
        before = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": hidden.output},
        ]
        text = self._run([*before, *messages], generation_prompt)
        _, found, after = text.rpartition(hidden.output)
        if not found or not after.startswith(self._end_of_turn):
            raise ValueError(
                "the template leaves out or changes an output of the policy, or what closes it, "
                f"when {[m['role'] for m in messages]} follow: {_tail(hidden.show(text))}"
            )
        return after

    def _run(self, messages: Sequence[Message], generation_prompt: bool, **variables: Any) -> str:
        try:
            return self._template.render(
                **(self._variables | variables),
                messages=[dict(message) for message in messages],
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # a template is a program: it may fail in any way
            roles = [message["role"] for message in messages]
            raise ValueError(
                f"the chat template fails on messages with roles {roles}: {error}; if it knows "
                'no role "tool", set observation_role="user"'
            ) from error

    def _encode(self, hidden: _Hidden, text: str) -> tuple[int, ...]:
        """Ids of a template's text, whose own special tokens are special and no others."""
        ids: list[int] = []
        at = 0
        for match in self._any_special.finditer(text):
            ids += self.encode_text(hidden.show(text[at : match.start()]))
            ids.append(self._special[match[0]])
            at = match.end()
        return (*ids, *self.encode_text(hidden.show(text[at:])))

    def _find_end_of_turn(self) -> str:
        hidden = self._hide([])
        question = {"role": "user", "content": "?"}
        text = self._run([question, {"role": "assistant", "content": hidden.output}], False)
        _, found, after = text.rpartition(hidden.output)
        end = self._any_special.match(after)
        if not found or end is None:
            raise ValueError(
                "the chat template must close an output with a special token that the policy can "
                f"sample, got {_tail(hidden.show(text))} after the output; special are "
                f"{list(self._special)[:20]}"
            )
        return end[0]

    # Construction checks.

    def _probe(self) -> None:
        """Compares turn by turn with the whole, in conversations of every kind of turn.

        Raises:
          ValueError: they differ.
        """
        # Reads special tokens in a text as such, as any other reader of the template would.
        plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        try:
            self._compare(_PROBE, plain)
        except ValueError as error:
            hint = (
                "" if self._keep_thinking else "; keep_thinking=True helps if only outputs differ"
            )
            raise ValueError(
                f"this chat template cannot be spoken turn by turn: {error}{hint}"
            ) from None
        try:
            self._compare(_THINKING_PROBE, plain)
        except ValueError as error:
            raise ValueError(
                "this chat template strips or rewrites the thinking of earlier outputs, as that of "
                "Qwen3 does, so that later turns would be trained in a context other than the one "
                f"they were sampled in; set keep_thinking=True to keep what was sampled. {error}"
            ) from None

    def _compare(self, turns: Sequence[tuple[str, str, str]], plain: tokenizers.Tokenizer) -> None:
        for system in ("", "Be brief."):
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": "Who leads?"})
            ids = self.encode_start(system, "Who leads?")
            self._compare_whole(messages, ids, plain)
            for output, role, text in turns:
                encode = self.encode_user if role == "user" else self.encode_observation
                ids += (*self.encode_text(output), self.end_of_turn_id)
                ids += encode(text, closed=True)
                messages += [
                    {"role": "assistant", "content": output},
                    {"role": role, "content": text},
                ]
                self._compare_whole(messages, ids, plain)

    def _compare_whole(
        self, messages: Sequence[Message], ids: tuple[int, ...], plain: tokenizers.Tokenizer
    ) -> None:
        whole = self.encode_messages(messages, generation_prompt=True)
        text = self.render(messages, generation_prompt=True)
        if whole != ids:
            raise ValueError(
                f"turn by turn it gives {self._spell(ids)}, the whole template {self._spell(whole)}"
            )
        if tuple(plain.encode(text, add_special_tokens=False).ids) != ids:
            raise ValueError(
                f"the tokenizer encodes {text!r} as one text in another way than message by "
                "message; use a tokenizer whose special tokens take no whitespace with them"
            )
        lost = [m["content"] for m in messages if m["content"] not in text]
        if lost:
            raise ValueError(
                f'the template leaves out {lost[0]!r}; if it knows no role "tool", set '
                'observation_role="user"'
            )
        if self._keep_thinking:
            self._check_same_after(messages)

    def _check_same_after(self, messages: Sequence[Message]) -> None:
        """What follows an output may not depend on what came before it."""
        hidden = self._hide(messages)
        shown = [
            m | {"content": hidden.output} if m["role"] == "assistant" else m
            for m in hidden.messages
        ]
        before, found, after = self._run(shown, True).rpartition(hidden.output)
        if not found:
            return  # no output yet
        expected = self._after_output(hidden, shown[-1:], True)
        if after != expected:
            raise ValueError(
                f"after {_tail(hidden.show(before))} an output is followed by "
                f"{hidden.show(after)!r}, but at the start of a conversation by "
                f"{hidden.show(expected)!r}"
            )

    def _check_tools(self) -> None:
        question = [{"role": "user", "content": "Who leads?"}]
        tools = self._variables.get("tools")
        if tools and self._run(question, True) == self._run(question, True, tools=None):
            raise ValueError(
                f"the chat template has no place for tools and leaves out all {len(tools)}; give "
                "another template, or set chat.tool_calls='' and explain them in the system message"
            )

    def _spell(self, ids: Sequence[int]) -> str:
        return _tail(self._tokenizer.decode(list(ids), skip_special_tokens=False))


# What an episode may hold: output, role of what follows it, its text. An output is empty where a
# summary was asked for in its place.
_PROBE = (
    ("look(1)", "tool", "nothing here"),
    ("look(2)", "tool", "a name"),
    ("", "user", "Sum up."),
    ("It is Ann.", "user", "Sure?"),
    ("Yes.", "tool", "right"),
)
_THINKING_PROBE = (
    ("<think>\nFirst one.\n</think>\n\nlook(1)", "tool", "nothing here"),
    ("<think>\nThen two.\n</think>\n\nlook(2)", "tool", "a name"),
    ("<think>\nAnn?\n</think>\n\nIt is Ann.", "user", "Sure?"),
    ("Yes.", "tool", "right"),
)


@dataclasses.dataclass(frozen=True)
class _Hidden:
    """Messages whose text shows a template no special token, and how to undo that.

    A template must see the real text, which it may trim or test, and yet its own special tokens
    must be told from those that a tool printed. So the latter are written as `mark number mark`.

    Attributes:
      messages: with hidden special tokens.
      mark: character that stands nowhere in the messages.
      output: another one; stands for an output.
      special: tokens by number.
    """

    messages: list[dict[str, str]]
    mark: str
    output: str
    special: tuple[str, ...]

    @classmethod
    def of(
        cls, messages: Sequence[Message], any_special: re.Pattern[str], special: tuple[str, ...]
    ) -> _Hidden:
        used = set().union(*(message["content"] for message in messages))
        # From the first of Unicode's private characters on: they are no whitespace.
        free = (chr(i) for i in itertools.count(0xE000) if chr(i) not in used)
        mark, output = next(free), next(free)

        def hide(text: str) -> str:
            return any_special.sub(lambda m: f"{mark}{special.index(m[0])}{mark}", text)

        shown = [{"role": m["role"], "content": hide(m["content"])} for m in messages]
        return cls(shown, mark, output, special)

    def show(self, text: str) -> str:
        return re.sub(
            f"{self.mark}([0-9]+){self.mark}", lambda m: self.special[int(m[1])], text
        ).replace(self.output, "...")


def _tail(text: str) -> str:
    return repr(text[-200:])


def _around(text: str, prefix: str) -> str:
    """The place where `text` stops to agree with `prefix`."""
    same = next((i for i, (a, b) in enumerate(zip(text, prefix)) if a != b), len(text))
    return repr(text[max(0, same - 60) : same + 60])
