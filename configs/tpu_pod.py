"""Full-size policies on TPU slices, with rows of 16K tokens.

    python scripts/compile_tpu.py --config configs/tpu_pod.py:qwen3_5_9b --topology v5p:4x4x4

The argument names the policy and, where it matters, the chips that it is laid out for: see
`PRESETS`. Parameters and optimiser moments are float32 and cut over the whole slice; matrix
products, activations and gathered weights are bfloat16.
"""

import runpy
from pathlib import Path

import ml_collections

# By its path, as config files themselves are read: `configs` is no installed package.
_DEFAULT = runpy.run_path(str(Path(__file__).with_name("default.py")))

# Shapes as in the models' config.json.
MODELS = {
    "qwen3_8b": {
        "vocab_size": 151936,
        "d_model": 4096,
        "num_layers": 36,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 12288,
        "rope_theta": 1e6,
        "qk_norm": True,
        "tie_embeddings": False,
    },
    "qwen3_32b": {
        "vocab_size": 151936,
        "d_model": 5120,
        "num_layers": 64,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 25600,
        "rope_theta": 1e6,
        "qk_norm": True,
        "tie_embeddings": False,
    },
    "qwen3_5_9b": {
        "family": "hybrid",
        "vocab_size": 248320,
        "d_model": 4096,
        "num_layers": 32,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 256,
        "d_ff": 12288,
        "rope_theta": 1e7,
        "tie_embeddings": False,
        "full_attention_interval": 4,
        "rotary_fraction": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_dim": 128,
        "linear_value_dim": 128,
        "conv_width": 4,
    },
}

# name -> (model, slice, rows of a micro-batch, what the backward pass finds ready, tokens of a row
# whose logits exist at a time; 0 chooses by size)
PRESETS = {
    "qwen3_8b": ("qwen3_8b", "v5p:4x4x4", 64, "full", 0),
    "qwen3_32b": ("qwen3_32b", "v5p:4x4x8", 128, "full", 0),
    "qwen3_5_9b": ("qwen3_5_9b", "v5p:4x4x4", 64, "full", 0),
    "qwen3_5_9b_v5e": ("qwen3_5_9b", "v5e:8x8", 64, "chunks", 512),  # 16 GB a chip
}


def get_config(preset: str = "qwen3_5_9b") -> ml_collections.ConfigDict:
    """The configuration of `preset`; keys that are not set here are those of default.py."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}")
    model, _, micro_rows, remat, logprob_chunk = PRESETS[preset]
    c = _DEFAULT["get_config"]("focus")
    c.steps = c.learner.schedule_steps = 70
    c.budget = 2_000_000
    c.task.max_turns = 30
    c.model = ml_collections.ConfigDict(
        MODELS[model]
        | {
            "max_context": 16384,
            "dtype": "bfloat16",
            "remat": remat,
            "attention": "splash",
            "scan_unroll": 1,
            "chat_format": "qwen",
        }
    )
    c.rollout.update(
        max_running=512,
        max_turn_tokens=1024,
        max_summary_tokens=1024,
        episode_tokens=6000,
        group_size=4,
    )
    c.context.limit = 12288
    c.branching.update(rounds=2, max_per_state=4)
    c.critic.update(width=512, capacity=8192, learning_rate=3e-4, evidence_bucket=4096)
    c.critic.update(pretrain_episodes=0, warmup_steps=3)  # a pretrained model has no warm start
    c.learner.update(
        learning_rate=1e-6,
        warmup_steps=10,
        minibatches=2,
        micro_rows=micro_rows,
        row_length=16384,
        logprob_chunk=logprob_chunk,
        max_nodes=32,
        max_states=128,
    )
    c.mesh.update(data=1, fsdp=-1, tensor=1, sequence=1)
    return c
