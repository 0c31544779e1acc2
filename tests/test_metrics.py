"""Metrics: one line a step whatever happens, and what people see of them."""

import io
import json
import re
import struct
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from tensorboardX.proto import event_pb2

from configs import default
from focus.metrics import (
    METHODS,
    MetricsWriter,
    ProgressBar,
    check_writers,
    read_metrics,
    run_name,
    summary_lines,
    wandb_options,
)


def steps_of(workdir):
    return [record["step"] for record in read_metrics(workdir)]


def test_a_line_is_on_disk_when_write_returns(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"loss": jnp.float32(0.5), "tokens/base": np.int64(7), "done": True})
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record == {"step": 0, "loss": 0.5, "tokens/base": 7, "done": 1}
    assert isinstance(record["tokens/base"], int)


def test_values_that_are_not_finite_are_null_and_named(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"b": float("inf"), "a": jnp.nan, "c": 1.0, "not measured": None})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    expected = {"step": 0, "b": None, "a": None, "c": 1.0, "not measured": None}
    assert json.loads(text) == expected | {"nonfinite": ["a", "b"]}


def test_a_resume_cuts_the_steps_it_will_run_again(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(6):
            writer.write(step, {"loss": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # killed in a line
    with MetricsWriter(tmp_path, start_step=4) as writer:
        assert writer.removed == 2
        assert steps_of(tmp_path) == [0, 1, 2, 3]
        writer.write(4, {"loss": 2.0})
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]
    with MetricsWriter(tmp_path) as writer:  # no checkpoint: from the start
        assert writer.removed == 5
    assert steps_of(tmp_path) == []


def test_a_step_is_written_once_and_values_are_numbers(tmp_path):
    writer = MetricsWriter(tmp_path, start_step=3)
    with pytest.raises(ValueError, match="step 2 is not after step 2"):
        writer.write(2, {})
    writer.write(3, {"loss": 0.1})
    with pytest.raises(ValueError, match="step 3 is not after step 3; write each step once"):
        writer.write(3, {"loss": 0.1})
    for value in ("high", jnp.ones(2), [1.0]):
        with pytest.raises(ValueError, match="metric 'loss' is .* not a number; reduce it"):
            writer.write(4, {"loss": value})
    assert steps_of(tmp_path) == [3]


def tensorboard_scalars(directory):
    """(step, tag) -> value, from the records of the event files."""
    found = {}
    for file in sorted(directory.iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                found[event.step, value.tag] = value.simple_value
    return found


def test_tensorboard_gets_the_same_numbers(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(0, {"loss": 0.5, "tokens/base": 7, "heldout/success": None})
        writer.write(1, {"loss": 0.25})
    assert tensorboard_scalars(tmp_path / "tensorboard") == {
        (0, "loss"): 0.5,
        (0, "tokens/base"): 7.0,
        (1, "loss"): 0.25,
    }


def test_wandb_continues_one_run_over_a_resume(tmp_path, monkeypatch):
    calls = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: (
        calls.append(("init", options))
        or types.SimpleNamespace(
            log=lambda metrics, step: calls.append(("log", step, metrics)),
            finish=lambda: calls.append(("finish",)),
        )
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for start in (0, 1):
        with MetricsWriter(tmp_path, start_step=start, wandb={"mode": "offline"}) as writer:
            writer.write(start, {"loss": 0.5, "heldout/success": None})
    inits = [call[1] for call in calls if call[0] == "init"]
    assert inits[0] == inits[1]
    assert inits[0]["mode"] == "offline" and inits[0]["resume"] == "allow" and inits[0]["id"]
    assert [c for c in calls if c[0] != "init"] == [
        ("log", 0, {"loss": 0.5}),
        ("finish",),
        ("log", 1, {"loss": 0.5}),
        ("finish",),
    ]


@pytest.mark.parametrize(
    ("package", "option", "extra"),
    [("tensorboardX", {"tensorboard": True}, "tensorboard"), ("wandb", {"wandb": {}}, "wandb")],
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, package, option, extra):
    monkeypatch.setitem(sys.modules, package, None)
    MetricsWriter(tmp_path).close()  # not needed, not imported
    with pytest.raises(ImportError, match=rf"{package}.*pip install -e '\.\[{extra}\]'"):
        MetricsWriter(tmp_path, **option)


def test_what_wandb_lacks_is_said_before_a_run(monkeypatch):
    def no_key():
        raise RuntimeError("No API key configured. Use `wandb login` to log in.")

    fake = types.ModuleType("wandb")
    fake.login = no_key
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ValueError, match="log.wandb='lab': No API key .* Set WANDB_API_KEY, or"):
        check_writers({"tensorboard": False, "wandb": "lab"})
    check_writers({"tensorboard": False, "wandb": ""})
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_writers({"tensorboard": True, "wandb": "lab"})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="needs the package wandb"):
        check_writers({"tensorboard": False, "wandb": "lab"})


def test_wandb_is_told_the_config_and_what_the_run_is_called():
    config = default.get_config("grpo")
    config.credit.estimator, config.log.wandb, config.seed = "gigpo", "lab", 3
    options = wandb_options(config.to_dict())
    assert (options["project"], options["name"]) == ("lab", "gigpo, seed 3")
    assert options["config"] == config.to_dict()


@pytest.mark.parametrize("method", default.METHODS)
def test_a_method_as_it_is_configured_is_called_by_its_name(method):
    assert run_name(default.get_config(method).to_dict()) == method
    assert set(METHODS) == set(default.METHODS)


@pytest.mark.parametrize(
    "method, changes, name",
    [
        ("grpo", {"credit.estimator": "gigpo"}, "gigpo"),
        ("focus", {"branching.rule": "random"}, "focus, random branches"),
        ("focus", {"branching.rule": "none"}, "focus, no branches"),
        ("focus", {"credit.estimator": "cbpo"}, "cbpo, expected error reduction branches"),
        ("grpo", {"context.manager": "summarize"}, "grpo, summarize"),
        ("self_credit", {"context.manager": "full"}, "self_credit, full context"),
        ("focus_summarize", {"context.manager": "full"}, "focus"),
        ("grpo", {"method": "mine"}, "mine: grpo"),
        ("grpo", {"method": "mine", "credit.estimator": "mine"}, "mine"),
    ],
)
def test_a_run_is_called_after_what_it_ran(method, changes, name):
    config = default.get_config(method)
    config.update_from_flattened_dict(changes)
    assert run_name(config.to_dict()) == name


METRICS = {
    "train/success": 0.25,
    "critic/error": 0.0412,
    "tokens/base": 3100,
    "tokens/branch": 1_900_000,
    "tokens/summary": 40,
}


def shown(num_steps, *, terminal, start_step=0, every=10, seconds_a_step=2.0, width=160):
    output = io.StringIO()
    console = rich.console.Console(file=output, force_terminal=terminal, width=width)
    now = [0.0]
    bar = ProgressBar(
        num_steps,
        start_step=start_step,
        title="gigpo",
        every=every,
        console=console,
        clock=lambda: now[0],
    )
    with bar:
        for step in range(start_step, num_steps):
            now[0] += seconds_a_step
            bar.update(step, METRICS | ({"heldout/success": 0.3} if step == start_step else {}))
    return output.getvalue()


def test_without_a_terminal_there_is_one_plain_line_every_few_steps():
    text = shown(25, terminal=False)
    assert "\x1b" not in text and "\r" not in text
    assert [line.split("  ")[1] for line in text.splitlines()] == [
        "step 10/25",
        "step 20/25",
        "step 25/25",
    ]
    assert text.splitlines()[0] == (
        "gigpo  step 10/25  0:30 left  success 25.0%  held-out 30.0%  critic error 0.0412  "
        "tokens base 3.1k branch 1.9M summary 40"
    )


def test_time_left_after_a_resume_counts_only_the_steps_it_ran():
    lines = shown(20, terminal=False, start_step=15, every=1, seconds_a_step=1000.0).splitlines()
    assert lines[0].startswith("gigpo  step 16/20  1:06:40 left")
    assert lines[-1].startswith("gigpo  step 20/20  0:00 left")


def test_on_a_terminal_one_line_is_redrawn():
    text = shown(3, terminal=True)
    assert "step 3/3" in text and "critic error 0.0412" in text
    assert "\x1b" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_on_a_narrow_terminal_the_end_of_the_line_is_what_is_cut(width):
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(3, terminal=True, width=width))
    lines = [line for line in re.split(r"[\r\n]+", lines) if line]
    assert max(map(len, lines)) <= width
    assert any("gigpo  step 3/3  0:00 left" in line for line in lines)


def test_a_summary_is_six_lines():
    summary = {
        "name": "gigpo",
        "task": "deep_search",
        "seed": 3,
        "steps": 70,
        "success_before": 0.245,
        "success_after": 0.57,
        "success_std_error": 0.035,
        "generated_tokens": {"base": 120_000, "branch": 80_000, "summary": 0},
        "dose": {"tokens": 150_000, "optimizer_steps": 201},
        "replayed": {"rollouts": 0, "tokens": 0},
        "wall_s": {"ahead": 900.0, "push": 0.2, "rollout": 130.0, "warm_start": 215.4},
        "technical_failures": 0,
        "recompilations_after_warmup": 0,
        "report": "runs/gigpo/report.html",
    }
    assert summary_lines(summary) == [
        "gigpo on deep_search, seed 3: 70 steps",
        "success   0.245 before, 0.570 after (held-out tasks, standard error 0.035)",
        "tokens    200,000 generated (120,000 base, 80,000 branch), 150,000 trained in 201 "
        "optimiser steps",
        "time      5:46 (warm start 3:35, rollout 2:10)",
        "trouble   none",
        "report    runs/gigpo/report.html; all figures: runs/gigpo/summary.json",
    ]
    summary |= {"technical_failures": 2, "replayed": {"rollouts": 7, "tokens": 99}}
    assert summary_lines(summary)[4] == (
        "trouble   2 rollouts without an outcome, 7 rollouts played again after a stop"
    )
