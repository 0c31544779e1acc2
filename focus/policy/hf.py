"""Hugging Face directories: the name under which users import `focus.formats.hf`."""

from focus.formats.hf import (
    load_checkpoint,
    read_config,
    save_checkpoint,
    save_tokenizer,
)

__all__ = ["load_checkpoint", "read_config", "save_checkpoint", "save_tokenizer"]
