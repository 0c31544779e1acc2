"""Text around the model: tokenizers, chat layouts, tool calls."""
