"""Chats as token ids, token in, token out.

What an engine sampled is what is trained on: `Chat` encodes only the text *around* the policy's
outputs (system message, question, tool answers, the next generation prompt) and never encodes
an output again. A tokenizer is no bijection, so a round trip through text could give ids that
nobody sampled.

Two rules hold for every message that comes from outside:

  * its text never becomes a special token: a tool that prints "<|end|>" prints ordinary tokens;
  * pad, end of turn and the role markers are tokens of their own, so that masking padding can
    never mask a real end of turn.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, str]  # {"role": one of ROLES, "content": text}


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """How a message is laid out: `marker header content end_of_turn separator`.

    Attributes:
      name: what `Chat.save` writes down and configs refer to.
      markers: special token that opens a message, by role.
      headers: ordinary text between the marker and the content, by role.
      end_of_turn: special token that closes a message; the policy samples it to stop.
      separator: ordinary text between `end_of_turn` and the next message.
      pad: special token that fills rows; never part of a message.
    """

    name: str
    markers: Mapping[str, str]
    headers: Mapping[str, str]
    end_of_turn: str
    separator: str
    pad: str

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """All special tokens, pad first, each once."""
        return tuple(dict.fromkeys((self.pad, *self.markers.values(), self.end_of_turn)))


CHATML = ChatFormat(
    name="chatml",
    markers={role: "<|im_start|>" for role in ROLES},
    headers={role: f"{role}\n" for role in ROLES},
    end_of_turn="<|im_end|>",
    separator="\n",
    pad="<|endoftext|>",
)

# Three tokens of overhead between two turns of the policy, for models with tiny contexts.
COMPACT = ChatFormat(
    name="compact",
    markers={role: f"<|{role}|>" for role in ROLES},
    headers={role: "" for role in ROLES},
    end_of_turn="<|end|>",
    separator="",
    pad="<|pad|>",
)

CHAT_FORMATS = {chat_format.name: chat_format for chat_format in (CHATML, COMPACT)}


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, special_tokens: Sequence[str]
) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE on `texts`; digits stay single tokens. Deterministic.

    Args:
      texts: training corpus.
      vocab_size: number of ids, special tokens and the 256 bytes included.
      special_tokens: get the ids 0, 1, ... in this order, e.g. `COMPACT.special_tokens`.

    Returns:
      A tokenizer with exactly `vocab_size` ids.

    Raises:
      ValueError: `vocab_size` cannot hold the bytes, or is more than the corpus can fill.
    """
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size {vocab_size} cannot hold 256 bytes and {len(special_tokens)} special "
            f"tokens; use at least {smallest}"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the texts fill only {tokenizer.get_vocab_size()} of vocab_size {vocab_size} ids; "
            "give more text or a smaller vocab_size"
        )
    return tokenizer


def read_tokenizer(directory: str | Path) -> tokenizers.Tokenizer:
    """Reads the `tokenizer.json` of a directory.

    Raises:
      ValueError: the file is missing or cannot be read.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"no tokenizer.json in {directory}; give a directory that Chat.save or a model "
            "export has written"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"cannot read {path} ({error}); restore it or export it again") from error


class TextCodec:
    """What every chat shares, whatever lays its messages out.

    A layout adds `encode_messages` (a whole chat) and `_between` (what follows an output).
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        # The copy reads special tokens in text as ordinary characters; ids of special tokens
        # are only ever put in by name.
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1

    def check_model(self, model_vocab_size: int) -> None:
        """Checks that every id of the tokenizer has an embedding.

        Models may have more rows than the tokenizer has ids (padded for even sharding).

        Raises:
          ValueError: the model has fewer rows.
        """
        if model_vocab_size < self.vocab_size:
            raise ValueError(
                f"the tokenizer gives ids up to {self.vocab_size - 1}, but the model has only "
                f"{model_vocab_size} embeddings; set model.vocab_size >= {self.vocab_size} or "
                "load the tokenizer that belongs to the weights"
            )

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of ordinary text: special tokens in it are spelled out, nothing is added."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_start(self, system: str, user: str) -> tuple[int, ...]:
        """First prompt of an episode, ready for the policy's first token.

        Args:
          system: system message, "" for none.
          user: the task.
        """
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": user})
        return self.encode_messages(messages, generation_prompt=True)

    def encode_observation(self, text: str, *, closed: bool) -> tuple[int, ...]:
        """What follows the policy's output: a tool's answer and the next generation prompt.

        Args:
          text: what the tool printed.
          closed: whether the output ended with the end-of-turn token. If it was cut by its
            length, the token is put in here (as context; it was not sampled).

        Returns:
          Everything between the policy's last output token and its next one.
        """
        return self._between("tool", text, closed)

    def encode_user(self, text: str, *, closed: bool) -> tuple[int, ...]:
        """As `encode_observation`, for a user's message (e.g. the request for a summary)."""
        return self._between("user", text, closed)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class Chat(TextCodec):
    """A tokenizer and a chat format: ids for everything that the policy did not write."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, format: ChatFormat = CHATML):
        """Checks that the tokenizer can speak the format.

        Args:
          tokenizer: copied; later changes to it have no effect here.
          format: layout of messages.

        Attributes:
          vocab_size: the tokenizer's largest id + 1.
          pad_id: fills rows; never part of a message.
          end_of_turn_id: closes every message; sampled by the policy, and trained.
          stop_token_ids: what a request for a turn should stop at.

        Raises:
          ValueError: a special token of the format is missing or could be written by text, or
            pad and end of turn are one token.
        """
        super().__init__(tokenizer)
        self.format = format
        special = {token: tokenizer.token_to_id(token) for token in format.special_tokens}
        missing = [token for token, token_id in special.items() if token_id is None]
        if missing:
            raise ValueError(
                f"the tokenizer lacks {missing} of chat format {format.name!r}; train it with "
                f"special_tokens={list(format.special_tokens)} or choose another of "
                f"{sorted(CHAT_FORMATS)}"
            )
        writable = [t for t, token_id in special.items() if token_id in self.encode_text(t)]
        if writable:
            raise ValueError(
                f"plain text could inject {writable}: the tokenizer does not mark them as "
                'special; set "special": true for them in tokenizer.json'
            )
        self.pad_id = special[format.pad]
        self.end_of_turn_id = special[format.end_of_turn]
        if self.pad_id == self.end_of_turn_id:
            raise ValueError(
                f"pad and end of turn are both {format.pad!r} in chat format {format.name!r}; "
                "masking padding would also mask the real end of turn: name another pad token"
            )
        self.stop_token_ids = (self.end_of_turn_id,)
        self._marker_ids = {role: special[format.markers[role]] for role in ROLES}
        self._separator_ids = self.encode_text(format.separator)
        self._generation_prompt = self._open("assistant")

    def encode_messages(
        self, messages: Sequence[Message], *, generation_prompt: bool = False
    ) -> tuple[int, ...]:
        """Ids of a whole chat: `render` encoded, except that text never gives special tokens.

        Ids built turn by turn equal these if every output is the tokenizer's own encoding of
        its text followed by the end-of-turn token.

        Args:
          messages: `{"role": ..., "content": ...}` in order.
          generation_prompt: whether to open an assistant message at the end.

        Raises:
          ValueError: unknown role.
        """
        ids: list[int] = []
        for message in messages:
            ids += self._message(message["role"], message["content"])
        if generation_prompt:
            ids += self._generation_prompt
        return tuple(ids)

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """The chat as one string, special tokens included (for people)."""
        f = self.format
        text = "".join(
            f.markers[m["role"]] + f.headers[m["role"]] + m["content"] + f.end_of_turn + f.separator
            for m in messages
        )
        if generation_prompt:
            text += f.markers["assistant"] + f.headers["assistant"]
        return text

    def save(self, directory: str | Path) -> None:
        """Writes `tokenizer.json` and `chat_format.json` into `directory`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_format.json").write_text(json.dumps({"name": self.format.name}) + "\n")

    @classmethod
    def load(cls, directory: str | Path, format: ChatFormat | None = None) -> Chat:
        """Reads what `save` wrote, or the `tokenizer.json` of a model directory.

        Args:
          directory: holds `tokenizer.json`.
          format: layout; None reads `chat_format.json`.

        Raises:
          ValueError: a file is missing or names an unknown format.
        """
        directory = Path(directory)
        tokenizer = read_tokenizer(directory)
        if format is None:
            path = directory / "chat_format.json"
            if not path.is_file():
                raise ValueError(
                    f"no chat_format.json in {directory}; name the chat format, one of "
                    f"{sorted(CHAT_FORMATS)}"
                )
            name = json.loads(path.read_text())["name"]
            if name not in CHAT_FORMATS:
                raise ValueError(
                    f"unknown chat format {name!r} in {path}; known: {sorted(CHAT_FORMATS)}"
                )
            format = CHAT_FORMATS[name]
        return cls(tokenizer, format)

    def _open(self, role: str, content: str = "") -> tuple[int, ...]:
        """Marker, header and content. Header and content are encoded as one text."""
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; roles are {ROLES}")
        return (self._marker_ids[role], *self.encode_text(self.format.headers[role] + content))

    def _message(self, role: str, content: str) -> tuple[int, ...]:
        if role == "assistant":
            # The policy was prompted with the header's own ids: its text cannot merge with it.
            ids = self._generation_prompt + self.encode_text(content)
        else:
            ids = self._open(role, content)
        return (*ids, self.end_of_turn_id, *self._separator_ids)

    def _between(self, role: str, text: str, closed: bool) -> tuple[int, ...]:
        close = () if closed else (self.end_of_turn_id,)
        message = self._message(role, text)
        return (*close, *self._separator_ids, *message, *self._generation_prompt)
