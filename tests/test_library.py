"""The credit library in a terminal: its table, one method of it, and a reader who has enough."""

import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY

from configs import quickstart
from focus import library
from focus.credit import ESTIMATORS
from focus.run import experiment


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_table_fits_and_has_every_method(width):
    lines = library.table(width)
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[1 : len(ESTIMATORS) + 1]] == list(ESTIMATORS)
    assert ("reference" in lines[0]) == (width >= 110)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("width", [80, 120])
def test_what_is_said_of_a_method_fits_and_has_its_options(name, width):
    lines = library.details(name, width)
    assert max(map(len, lines)) <= width
    for key, default in ESTIMATORS[name].hparams.items():
        assert f"  {key}={default!r}" in lines


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_is_said_to_train_does_and_the_rest_says_what_it_lacks(name):
    """The command that is printed is a config that a run takes."""
    spec = ESTIMATORS[name]
    text = " ".join(library.details(name, 200)).replace("\\", "")
    if library.wants(spec) is None:
        assert library.trains(spec).startswith("no: ") and "scripts/train.py" not in text
        if spec.kind == "estimator":
            config = quickstart.get_config()
            config.credit.estimator, config.rollout.group_size = name, 8
            with pytest.raises(ValueError, match="does not produce"):
                experiment.validate(config)
        return
    config = quickstart.get_config(text.split("quickstart.py:")[1].split()[0])
    config.credit.estimator = name
    for flag in text.split("--config.")[1:]:
        key, value = flag.strip().split("=", 1)
        section, key = key.split(".")
        config[section][key] = type(config[section][key])(value)
    experiment.validate(config)


def run(arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "focus.credit", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
    )


def test_the_command_answers_and_names_the_nearest_method():
    done = run(["gigop"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "no method 'gigop': did you mean gigpo or tigpo or gagpo?\n"
    assert library.main(["--help"]) == 0 and library.main(["gigpo", "grpo"]) == 2


def test_a_reader_who_has_enough_is_no_error():
    """As `python -m focus.credit | head`: the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "focus.credit"],
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
