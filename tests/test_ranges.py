"""Pitfall 36: every number of a config has a range, in one table, checked before any work."""

import dataclasses
import json
import math
import runpy

import ml_collections
import pytest
import tiny
from conftest import REPOSITORY

from focus.policy.qwen3_5 import Qwen3_5Config
from focus.policy.transformer import ModelConfig
from focus.run import experiment, ranges
from focus.run.ranges import RANGES, TASK_RANGES, leaves, real, whole
from focus.train import train

TABLE = RANGES | TASK_RANGES["deep_search"]


def configs():
    """Every config file of the repository, in every variant."""
    for path in sorted((REPOSITORY / "configs").glob("[a-z]*.py")):
        module = runpy.run_path(str(path))
        variants = module.get("METHODS") or module.get("PRESETS") or (None,)
        for variant in variants:
            yield module["get_config"](*([] if variant is None else [variant]))


def is_number(value):
    if isinstance(value, tuple | list):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def test_every_number_of_every_config_is_in_the_table_and_in_its_range():
    seen = set()
    for config in configs():
        ranges.check(config)
        for key, value in leaves(config):
            assert key in TABLE or not is_number(value), f"{key} = {value!r} has no range"
            seen.add(key)
    fields = (f for c in (ModelConfig, Qwen3_5Config) for f in dataclasses.fields(c))
    sizes = {f"model.{f.name}" for f in fields if f.type in ("int", "float")}
    assert sizes <= TABLE.keys()
    assert TABLE.keys() <= seen | sizes, TABLE.keys() - seen - sizes
    assert ranges.OPTIONAL.keys() <= seen


def wrong(key):
    """Values just outside of a range, and such as no range has."""
    r = TABLE[key]
    ways = [math.nan, True, "many", -math.inf, 1j]
    if r.low > -math.inf:
        ways.append(r.low if r.above else r.low - (1 if r.whole else 1e-9))
    if r.high is not None:
        ways.append(r.high + 1)
    ways += [] if math.inf in r.special else [math.inf]
    ways += [1.5] if r.whole else []
    ways = [value for value in ways if value not in r.special]
    if r.count is not None:
        right = (int(r.low),) if r.whole else (r.low,)
        ways = [(value,) * r.count[0] for value in ways] + [right * (r.count[0] - 1), right[0]]
    return ways + ([] if r.optional else [None])


@pytest.mark.parametrize("key", TABLE)
def test_what_is_just_outside_of_a_range_is_refused_with_key_value_and_range(key):
    config = {"task": {"name": "deep_search"}}
    section, _, name = key.rpartition(".")
    inner = config
    for part in section.split(".") if section else ():
        inner = inner.setdefault(part, {})
    for value in wrong(key):
        inner[name] = value
        with pytest.raises(ValueError) as error:
            ranges.check(config)
        assert str(error.value) == f"{key} must be {TABLE[key]}, got {value!r}"
    for value in (*TABLE[key].special, *(() if not TABLE[key].optional else (None,))):
        inner[name] = value
        ranges.check(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.temperature", -1.0),
        ("rollout.temperature", 0.0),
        ("rollout.top_p", 0.0),
        ("rollout.max_turn_tokens", 0),
        ("learner.learning_rate", -1.0),
        ("learner.learning_rate", math.nan),
        ("learner.warmup_steps", -3),
        ("learner.entropy_coefficient", math.nan),
        ("learner.weight_decay", -1.0),
        ("learner.importance_range", (0.5,)),
        ("critic.members", 0),
        ("evaluate.num_tasks", 0),
        ("budget", 0),
        ("steps", 0),
        ("evaluate.every", -1),
        ("checkpoint.every", 0),
    ],
)
def test_a_run_with_a_number_out_of_range_is_refused_before_anything_is_written(
    key, value, tmp_path
):
    config = tiny.get_config()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=f"^{key} must be a"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_config_that_was_read_from_json_is_in_its_ranges_too():
    config = tiny.get_config()
    read = ml_collections.ConfigDict(json.loads(config.to_json()))
    assert isinstance(read.branching.ks, list)
    ranges.check(read)


def test_ranges_say_what_they_are():
    assert str(whole(1)) == "a whole number >= 1"
    assert str(whole(1, 4)) == "a whole number in [1, 4]"
    assert str(real(0, 1, above=True)) == "a number in (0, 1]"
    assert str(whole(1, special={-1: "all"})) == "a whole number >= 1, or -1 (all)"
    assert str(real(0, above=True, optional="no bound")) == "a number > 0, or None (no bound)"
    assert str(real(0, count=(2, 2), empty="keeps all")) == (
        "a tuple of 2, each a number >= 0, or () (keeps all)"
    )


def test_a_task_of_ones_own_checks_its_own_numbers():
    config = {"task": {"name": "mine", "seed": "any word", "lookalikes": -3}, "steps": 1}
    ranges.check(config)
    with pytest.raises(ValueError, match="steps"):
        ranges.check(config | {"steps": 0})


@pytest.mark.parametrize(
    "key", ["learner.importance_cap", "warm_start.seed", "warm_start.products"]
)
def test_optional_keys_may_be_none(key):
    assert ranges.optional(key) and not ranges.optional("budget") and not ranges.optional("method")
    config = tiny.get_config()
    config.update_from_flattened_dict({key: None})
    experiment.validate(config)
