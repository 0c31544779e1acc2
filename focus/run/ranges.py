"""The range of every number in a config, in one table; what lies outside is refused before work.

A range says what a number can mean, not what is wise. Numbers that only go together with others
(a batch that a mesh can divide, a prompt that fits into a context) are checked where they meet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

_MOST_SEED = 2**31 - 1  # what every random number generator in use takes


@dataclasses.dataclass(frozen=True)
class Range:
    """What one number may be.

    Attributes:
      low: least value.
      high: largest value; None for no bound.
      above: whether `low` itself is too little.
      whole: whether it counts something.
      special: values outside that mean something of their own, with what they mean.
      optional: whether it may be None, and what None means.
      count: how many numbers a tuple of them holds, (fewest, most); None for a single number.
      empty: whether the tuple may also be empty, and what that means.
    """

    low: float = -math.inf
    high: float | None = None
    above: bool = False
    whole: bool = False
    special: Mapping[float, str] = dataclasses.field(default_factory=dict)
    optional: str = ""
    count: tuple[int, float] | None = None
    empty: str = ""

    def fits(self, value: Any) -> bool:
        """Whether a config's value is in the range."""
        if value is None:
            return bool(self.optional)
        if self.count is None:
            return self._fits_one(value)
        if not isinstance(value, tuple | list):
            return False
        fewest, most = self.count
        if not value and self.empty:
            return True
        return fewest <= len(value) <= most and all(map(self._fits_one, value))

    def _fits_one(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if value in self.special:
            return True
        if not math.isfinite(value) or (self.whole and value != int(value)):
            return False
        low_enough = self.high is None or value <= self.high
        return low_enough and (value > self.low if self.above else value >= self.low)

    def __str__(self) -> str:
        number = "a whole number" if self.whole else "a number"
        if self.high is not None:
            opening, low = "(" if self.above else "[", _short(self.low)
            number += f" in {opening}{low}, {_short(self.high)}]"
        elif self.low > -math.inf:
            number += f" {'>' if self.above else '>='} {_short(self.low)}"
        if self.count is not None:
            fewest, most = self.count
            many = f"{fewest}" if fewest == most else f"{fewest} or more"
            number = f"a tuple of {many}, each {number}"
        others = [f"{_short(value)} ({what})" for value, what in self.special.items()]
        others += [f"() ({self.empty})"] if self.empty else []
        others += [f"None ({self.optional})"] if self.optional else []
        return ", or ".join([number, *others])


def _short(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e6 else str(value)


def whole(low: int, high: int | None = None, **options: Any) -> Range:
    """A count from `low` on."""
    return Range(low, high, whole=True, **options)


def real(low: float = -math.inf, high: float | None = None, **options: Any) -> Range:
    """A finite number from `low` on."""
    return Range(low, high, **options)


_COUNT = whole(1)
_SHARE = real(0, 1)
_POSITIVE = real(0, above=True)
_NOT_NEGATIVE = real(0)
_SEED = whole(0, _MOST_SEED)
_ANY_NUMBER = (1, math.inf)
_SIZES = whole(1, count=_ANY_NUMBER)
_OR_NO_LIMIT = {math.inf: "no limit"}

# key -> range. Sections that depend on what is chosen are below.
RANGES: dict[str, Range] = {
    "seed": _SEED,
    "steps": _COUNT,
    "budget": _COUNT,
    "model.vocab_size": _COUNT,
    "model.d_model": _COUNT,
    "model.num_layers": _COUNT,
    "model.num_heads": _COUNT,
    "model.num_kv_heads": _COUNT,
    "model.head_dim": _COUNT,
    "model.d_ff": _COUNT,
    "model.max_context": whole(2),
    "model.rope_theta": _POSITIVE,
    "model.rms_eps": _POSITIVE,
    "model.scan_unroll": _COUNT,
    "model.full_attention_interval": _COUNT,
    "model.rotary_fraction": real(0, 1, above=True),
    "model.linear_num_key_heads": _COUNT,
    "model.linear_num_value_heads": _COUNT,
    "model.linear_key_dim": _COUNT,
    "model.linear_value_dim": _COUNT,
    "model.conv_width": _COUNT,
    "warm_start.seed": whole(0, _MOST_SEED, optional="the run's"),
    "warm_start.episodes": _COUNT,
    "warm_start.error_scale": _NOT_NEGATIVE,
    "warm_start.worlds": _COUNT,
    "warm_start.real_fraction": _SHARE,
    "warm_start.steps": _COUNT,
    "warm_start.batch_rows": _COUNT,
    "warm_start.row_length": whole(2),
    "warm_start.learning_rate": _POSITIVE,
    "warm_start.observation_weight": _NOT_NEGATIVE,
    "rollout.async_depth": whole(0),
    "rollout.devices": whole(1, special={-1: "all"}),
    "rollout.max_running": _COUNT,
    "rollout.retained": whole(0),
    "rollout.decode_steps": _COUNT,
    "rollout.cache_buckets": _SIZES,
    "rollout.prefill_buckets": _SIZES,
    "rollout.batch_buckets": _SIZES,
    "rollout.temperature": _POSITIVE,  # what is trained has to be sampled
    "rollout.top_p": real(0, 1, above=True),
    "rollout.top_k": whole(1, special={-1: "all"}),
    "rollout.max_turn_tokens": _COUNT,
    "rollout.max_summary_tokens": _COUNT,
    "rollout.episode_tokens": real(1),
    "rollout.group_size": _COUNT,
    "rollout.attempts": _COUNT,
    "rollout.timeout_s": _POSITIVE,
    "rollout.proceed_fraction": real(0, 1, above=True),
    "rollout.max_logp_difference": real(0, above=True, special=_OR_NO_LIMIT),
    "rollout.dead_after_s": _POSITIVE,
    "rollout.tools.attempts": _COUNT,
    "rollout.tools.backoff_s": _NOT_NEGATIVE,
    "rollout.tools.timeout_s": _POSITIVE,
    "rollout.tools.at_once": _COUNT,
    "context.limit": _COUNT,
    "context.citations": whole(1, count=(2, 2)),
    "branching.base_fraction": real(0, 1, above=True),
    "branching.rounds": _COUNT,
    "branching.ks": _SIZES,
    "branching.max_per_state": _COUNT,
    "critic.backbone_learning_rate": _POSITIVE,
    "critic.members": whole(8),  # fewer give no usable variance
    "critic.width": _COUNT,
    "critic.prior_scale": _NOT_NEGATIVE,
    "critic.learning_rate": _POSITIVE,
    "critic.epochs": _COUNT,
    "critic.capacity": _COUNT,
    "critic.evidence_bucket": _COUNT,
    "critic.replay_steps": _COUNT,
    "critic.pretrain_episodes": whole(0),
    "critic.pretrain_epochs": _COUNT,
    "critic.warmup_steps": whole(0),
    "critic.lambda_": _SHARE,
    "credit.discount": _SHARE,
    "credit.lambda_": _SHARE,
    "credit.branch_weight": _NOT_NEGATIVE,
    "learner.learning_rate": _NOT_NEGATIVE,
    "learner.schedule_steps": _COUNT,
    "learner.warmup_steps": whole(0),
    "learner.weight_decay": _NOT_NEGATIVE,
    "learner.max_grad_norm": real(0, above=True, special=_OR_NO_LIMIT),
    "learner.clip_low": real(0, 1, above=True),
    "learner.clip_high": _POSITIVE,
    "learner.importance_cap": real(0, above=True, optional="no bound"),
    "learner.importance_range": real(0, count=(2, 2), empty="keeps all"),
    "learner.kl_coefficient": _NOT_NEGATIVE,
    "learner.entropy_coefficient": real(),  # negative: entropy costs
    "learner.minibatches": _COUNT,
    "learner.epochs": _COUNT,
    "learner.micro_rows": _COUNT,
    "learner.row_length": whole(2),
    "learner.logprob_chunk": whole(0),
    "learner.max_nodes": _COUNT,
    "learner.max_states": _COUNT,
    "learner.row_buckets": _SIZES,
    "learner.state_bucket": _COUNT,
    "learner.lora.rank": whole(0),
    "learner.lora.alpha": _POSITIVE,
    "mesh.data": whole(1, special={-1: "what is left"}),
    "mesh.fsdp": whole(1, special={-1: "what is left"}),
    "mesh.tensor": whole(1, special={-1: "what is left"}),
    "mesh.sequence": whole(1, special={-1: "what is left"}),
    "evaluate.every": whole(0),
    "evaluate.num_tasks": _COUNT,
    "evaluate.temperature": _NOT_NEGATIVE,
    "checkpoint.every": _COUNT,
    "checkpoint.keep_last": _COUNT,
    "checkpoint.keep_best": whole(0),
    "log.tree_tasks": whole(0),
}

# task.name -> key -> range. Tasks that are not here check their own options.
TASK_RANGES: dict[str, dict[str, Range]] = {
    "deep_search": {
        "task.seed": _SEED,
        "task.num_countries": _COUNT,
        "task.hops": whole(1, count=(2, 2)),
        "task.max_turns": _COUNT,
        "task.num_train": _COUNT,
        "task.num_heldout": _COUNT,
        "task.snippet_words": _COUNT,
        "task.lookalikes": whole(1, 4),
    },
}

# Keys without a number that may be None as well, and what None means.
OPTIONAL = {"warm_start.products": "nothing is rounded"}


def optional(key: str) -> str:
    """What None means as the value of a key; "" if it may not be None."""
    return RANGES[key].optional if key in RANGES else OPTIONAL.get(key, "")


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of a config with their values, those of its sections as "section.key"."""
    for name, value in config.items():
        if isinstance(value, Mapping) or hasattr(value, "items"):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def check(config: Mapping[str, Any]) -> None:
    """Checks every number of a config that has a range.

    Raises:
      ValueError: names the key, its value and its range.
    """
    table = RANGES | TASK_RANGES.get(config["task"]["name"], {})
    for key, value in leaves(config):
        if key in table and not table[key].fits(value):
            raise ValueError(f"{key} must be {table[key]}, got {value!r}")
