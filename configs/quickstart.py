"""Train a one-million-parameter search agent on a laptop, in less than ten minutes.

The agent answers two- to four-hop questions about countries by calling a search engine. It is
warm-started on episodes of an error-prone scripted agent and then trained from outcomes alone.

    python scripts/train.py --config configs/quickstart.py --workdir runs/focus
    python scripts/train.py --config configs/quickstart.py:grpo --workdir runs/grpo

Expected on two cores: eight to nine minutes in all, of which three and a half are the warm start
(once, then kept) and four to five are training; held-out success from 0.24 to 0.57, give or take
the 0.05 by which runs differ (see docs/quickstart.md). self_credit imitates for longer and ends
lower.

The argument names the method, as in configs/default.py, where every key is explained.
"""

import runpy
from pathlib import Path

import ml_collections

# By its path, as config files themselves are read: `configs` is no installed package.
_DEFAULT = runpy.run_path(str(Path(__file__).with_name("default.py")))

METHODS = _DEFAULT["METHODS"]


def get_config(method: str = "focus") -> ml_collections.ConfigDict:
    """The configuration of `method`; keys that are not set here are those of default.py."""
    c = _DEFAULT["get_config"](method)
    c.steps = c.learner.schedule_steps = 70
    c.model.update(
        vocab_size=768,
        d_model=192,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        d_ff=512,
        scan_unroll=2,
    )
    c.rollout.update(max_running=64, max_turn_tokens=32, max_summary_tokens=32, episode_tokens=60)
    c.context.limit = 140
    c.learner.learning_rate = 5e-4
    if method == "self_credit":
        c.context.limit = 220  # most episodes close with their one summary, long ones have two
        c.rollout.max_summary_tokens = 48
        c.warm_start.steps = 3000  # notes and citations are to be learnt beside everything else
    return c
