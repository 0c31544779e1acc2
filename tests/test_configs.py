"""What each config file sets, held against a record; and that it sets no key nobody knows.

A value here is part of an experiment whose numbers are published (docs/quickstart.md, docs/tpu).
Change `tests/configs.json` only on purpose, with what the new value did to them:

    python tests/test_configs.py
"""

import json
from pathlib import Path

import ml_collections
import pytest
import tiny

from configs import default, quickstart, quickstart_sglang, smollm2, tpu_pod
from focus.run import experiment

RECORD = Path(__file__).with_name("configs.json")
FILES = {
    "default": (default, default.METHODS),
    "quickstart": (quickstart, default.METHODS),
    "quickstart_sglang": (quickstart_sglang, default.METHODS),
    "smollm2": (smollm2, default.METHODS),
    "tpu_pod": (tpu_pod, tuple(tpu_pod.PRESETS)),
}


def flat(config):
    """Values by dotted key, as JSON has them."""
    found = {}
    for key, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            found |= {f"{key}.{inner}": x for inner, x in flat(value).items()}
        else:
            found[key] = list(value) if isinstance(value, tuple) else value
    return found


def record():
    """`default:focus` as it is; of every other variant, what it has otherwise."""
    base = flat(default.get_config())
    variants = {}
    for name, (module, arguments) in FILES.items():
        for argument in arguments:
            values = flat(module.get_config(argument))
            differs = {k: v for k, v in values.items() if k not in base or base[k] != v}
            missing = sorted(base.keys() - values.keys())
            variants[f"{name}:{argument}"] = {"sets": differs, "lacks": missing}
    variants["default:focus"] = {"sets": base, "lacks": []}
    return variants


@pytest.mark.parametrize("variant", [f"{n}:{a}" for n, (_, args) in FILES.items() for a in args])
def test_values_are_those_of_the_record(variant):
    assert record()[variant] == json.loads(RECORD.read_text())[variant], (
        "a published experiment becomes another one; if that is meant: python tests/test_configs.py"
    )


@pytest.mark.parametrize("name", FILES)
def test_no_file_sets_a_key_that_default_does_not_know(name):
    module, arguments = FILES[name]
    known = set(flat(default.get_config())) | set(flat(default.get_config(start="directory")))
    for argument in arguments:
        keys = set(flat(module.get_config(argument)))
        if name == "tpu_pod":  # whole models of other families
            keys = {key for key in keys if not key.startswith("model.")}
        assert keys <= known


@pytest.mark.parametrize("method", default.METHODS)
def test_the_defaults_are_a_run_by_themselves(method):
    experiment.validate(default.get_config(method))


@pytest.mark.parametrize("config", [default, tiny], ids=["default", "tiny"])
def test_an_unknown_method_is_answered_with_those_there_are(config):
    with pytest.raises(ValueError, match="unknown method 'grop': choose one of focus, .*grpo"):
        config.get_config("grop")
    with pytest.raises(ValueError, match="unknown start 'nothing': choose one of warm_start"):
        default.get_config(start="nothing")


def test_every_key_of_default_is_set_where_it_can_be_read():
    """One line a key, in one place: what `grep` finds is all that there is."""
    lines = Path(default.__file__).read_text().splitlines()
    for start in default.STARTS:
        for key in flat(default.get_config(start=start)):
            assert any(line.strip().startswith(f"c.{key} = ") for line in lines), key


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1, sort_keys=True) + "\n")
