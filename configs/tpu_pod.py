"""Full-size policies on TPU slices, with rows of 16K tokens.

    python scripts/compile_tpu.py --config configs/tpu_pod.py:qwen3_8b --topology v5p:4x4x4

The argument names the policy: qwen3_8b or qwen3_32b. Parameters and optimiser moments are float32
and cut over the whole slice; matrix products, activations and gathered weights are bfloat16.
"""

import ml_collections

from configs import quickstart

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
}


def get_config(model: str = "qwen3_8b") -> ml_collections.ConfigDict:
    """The configuration of `model`; keys that are not set here are those of the quickstart."""
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}: choose one of {', '.join(MODELS)}")
    c = quickstart.get_config("focus")
    c.budget = 2_000_000
    c.task.max_turns = 30
    c.model = ml_collections.ConfigDict(
        MODELS[model]
        | {
            "max_context": 16384,
            "dtype": "bfloat16",
            "remat": "full",
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
    c.learner.update(
        learning_rate=1e-6,
        warmup_steps=10,
        minibatches=2,
        micro_rows=64,
        row_length=16384,
        max_nodes=32,
        max_states=128,
    )
    c.mesh.update(data=1, fsdp=-1, tensor=1, sequence=1)
    return c
