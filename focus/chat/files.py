"""What the small files of a Hugging Face directory say of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from focus.chat.tokens import CHAT_FORMATS, ROLES, ChatFormat

# Names of `tokenizer_config.json` that templates may read as variables.
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; {} without one.

    Raises:
      ValueError: the file holds something else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"cannot read {path} ({error}); restore it or export it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def read_template(directory: Path, config: Mapping[str, Any]) -> str:
    """The chat template of a directory.

    Args:
      directory: of the model; its `chat_template.jinja` is the newer place, and wins.
      config: its `tokenizer_config.json`, where a template may stand too.

    Raises:
      ValueError: there is none.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"no chat template in {directory}: neither chat_template.jinja nor a default one in "
            "tokenizer_config.json; a base model has none: write the name of a layout, one of "
            f'{sorted(CHAT_FORMATS)}, into chat_format.json there, as {{"name": "chatml"}}'
        )
    return template


def template_of(layout: ChatFormat) -> str:
    """One of our layouts as a chat template of Hugging Face.

    A template cannot keep a message's text from becoming special tokens; see `Chat`.
    """
    starts = {role: layout.markers[role] + layout.headers[role] for role in ROLES}
    close = json.dumps(layout.end_of_turn + layout.separator)
    return (
        f"{{% set starts = {json.dumps(starts)} %}}"
        "{% for message in messages %}"
        f"{{{{ starts[message['role']] + message['content'] + {close} }}}}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ starts['assistant'] }}{% endif %}"
    )


def read_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens that `tokenizer_config.json` names, by name."""
    tokens = {name: config.get(name) for name in TOKEN_NAMES}
    texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in tokens.items()}
    return {name: text for name, text in texts.items() if text is not None}


def read_stop_token_ids(directory: Path) -> tuple[int, ...]:
    """`eos_token_id` of `generation_config.json`, one id or several; () without it.

    Raises:
      ValueError: it is neither.
    """
    path = directory / "generation_config.json"
    ids = read_object(path).get("eos_token_id")
    if ids is None:
        return ()
    ids = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"eos_token_id in {path} must be a token id or a list of them, got {ids}")
    return tuple(ids)
