"""File formats of models: Hugging Face directories, PEFT adapters, GGUF."""
