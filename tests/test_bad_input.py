"""What a person can get wrong: each is said with its value and a way out, before work is lost."""

import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny
from conftest import REPOSITORY

import focus.run.trainer
from focus.engine import GenerateRequest, SamplingParams
from focus.engine.embedded.engine import EmbeddedEngine
from focus.journal import read_json_lines
from focus.learner.checkpoint import Checkpointer
from focus.metrics import read_metrics
from focus.policy import transformer
from focus.run import experiment
from focus.run.assignment import Assignment
from focus.run.steps import EngineMismatch
from focus.run.trainer import Trainer
from focus.train import train


def shrunk(method="focus", **overrides):
    config = tiny.get_config(method)
    config.update_from_flattened_dict(overrides)
    return config


@pytest.mark.parametrize(
    "method, overrides, message",
    [
        ("grpo", {"rollout.group_size": 1}, r"'grpo' .* group_size 1 .* use at least 2"),
        ("focus", {"budget": 19}, r"budget of 19 tokens .* one predicted episode of 20; raise"),
        ("self_credit", {"context.citations": (5, 2)}, r"context\.citations must .* got \(5, 2\)"),
        ("focus", {"credit.estimator": "gae2"}, r"credit\.estimator must be one of .*'gae2'"),
        ("focus", {"branching.rule": "oracle"}, r"rule 'oracle' is unknown; choose one of .*none"),
        ("focus", {"context.manager": "rag"}, r"context\.manager must be one of .*full.*'rag'"),
        ("focus", {"task.name": "chess"}, r"task\.name must be one of .*deep_search.*'chess'"),
        ("focus", {"critic.refine": "global"}, r"refine 'global' is unknown; choose one of"),
        ("focus", {"critic.values_from": "now"}, r"critic\.values_from must be one of .*'now'"),
        ("focus", {"critic.enabled": False}, r"reads the critic's values; set critic\.enabled"),
        ("focus", {"branching.rule": "none"}, r"rule 'none' does not go with base_fraction"),
        ("vineppo", {"branching.rule": "none", "branching.base_fraction": 1.0}, "continuations"),
        ("focus", {"learner.row_length": 64}, r"row_length 64 is shorter than .*max_context 192"),
        ("focus_summarize", {"context.limit": 1}, r"context\.limit=1 has no room for a summary of"),
        ("focus", {"evaluate.num_tasks": 9}, r"num_tasks 9 is more than the 8 held-out tasks"),
        ("focus", {"learner.micro_rows": 3, "mesh.data": 2}, "mesh|devices"),
        ("focus", {"learner.schedule_steps": 2}, r"total_steps > warmup_steps"),
        ("focus", {"warm_start.products": "int4"}, r"products must be None or one of.*'int4'"),
        ("focus", {"rollout.devices": 9}, r"devices must be -1 or lie in.*got 9"),
        ("focus", {"task.world": "/nonexistent.json"}, r"cannot read facts .*nonexistent\.json"),
        ("focus", {"task.world": "mars"}, r"world must be \"real\".*'mars'"),
        ("focus", {"task.num_train": 10**6}, r"num_train=1000000, but the world has only \d+"),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_anything_is_written(
    method, overrides, message, tmp_path
):
    with pytest.raises(ValueError, match=message):
        train(shrunk(method, **overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "text, message",
    [("[{", "cannot read facts"), ("[]", "or an empty one"), ('[{"nam": "X"}]', "bad country")],
)
def test_a_broken_corpus_is_refused(text, message, tmp_path):
    path = tmp_path / "world.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        train(shrunk(**{"task.world": str(path)}), tmp_path / "run")
    assert str(path) in str(error.value)


def test_a_model_smaller_than_its_tokenizer_is_refused(prepare, tmp_path):
    config = shrunk()
    env, start = prepare(config)
    smaller = shrunk(**{"model.vocab_size": 300})
    with pytest.raises(ValueError, match=r"only 300 embeddings; set model\.vocab_size >= 512"):
        Trainer(smaller, env, start)
    # 256 bytes and the special tokens are the least that a tokenizer can have.
    with pytest.raises(ValueError, match="100"):
        train(shrunk(**{"model.vocab_size": 100}), tmp_path)


def test_a_summary_limit_below_the_first_prompt_is_refused(tmp_path):
    limits = {"context.limit": 4, "rollout.max_summary_tokens": 2}
    with pytest.raises(ValueError, match=r"context\.limit is 4; raise context\.limit"):
        train(shrunk("focus_summarize", **limits), tmp_path)


async def test_a_token_outside_the_vocabulary_is_refused():
    model = experiment.model_config(shrunk())
    params = transformer.init_params(model, jax.random.key(0))
    async with EmbeddedEngine(model, params, decode=str, max_running=2, retained=2) as engine:
        for token in (512, -1):
            request = GenerateRequest("r", (1, token), SamplingParams(max_new_tokens=1))
            with pytest.raises(ValueError, match=rf"token id {token} at position 1 is outside"):
                await engine.generate(request)


# Workdirs.


@pytest.fixture
def stopped(prepare, tmp_path):
    """A run of one step of GRPO, which can be gone on with: its config and workdir."""
    config = shrunk("grpo", steps=2)
    prepare(config)
    train(config, tmp_path / "run")
    config.steps = 3
    return config, tmp_path / "run"


def test_a_workdir_of_another_config_is_refused_and_left_alone(stopped):
    config, workdir = stopped
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    config.learner.learning_rate = 0.5
    with pytest.raises(ValueError, match=r"learner\.learning_rate: .* there, 0\.5 here"):
        train(config, workdir)
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on(stopped):
    config, workdir = stopped
    newest = workdir / "checkpoints" / "00000002"
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    message = rf"{re.escape(str(newest))} is damaged .* Delete that directory.* from step 1"
    with pytest.raises(ValueError, match=message):
        train(config, workdir)
    for path in sorted(newest.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    newest.rmdir()
    train(config, workdir)
    assert [record["step"] for record in read_metrics(workdir)] == [0, 1, 2]


def test_a_damaged_warm_start_is_named(prepare, tmp_path, monkeypatch):
    config = shrunk()
    _, start = prepare(config)
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path))
    copy = tmp_path / "warm_start" / start.directory.name
    copy.mkdir(parents=True)
    for file in start.directory.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    params = copy / "params.safetensors"
    params.write_bytes(params.read_bytes()[:1000])
    with pytest.raises(ValueError, match=rf"{re.escape(str(copy))} cannot be read .*delete"):
        train(config, tmp_path / "run")


# Numbers.


def test_a_loss_that_is_nan_stops_the_run_and_loses_nothing(stopped, monkeypatch, finished):
    config, workdir = stopped
    real = Assignment.estimate

    def broken(self, batch):
        credit = real(self, batch)
        return type(credit)(
            advantages=np.full_like(credit.advantages, np.nan),
            segment_advantages=credit.segment_advantages,
            mask=credit.mask,
        )

    with monkeypatch.context() as patch:
        patch.setattr(Assignment, "estimate", broken)
        with pytest.raises(FloatingPointError, match=r"step 2: loss nan"):
            train(config, workdir)
    assert [record["step"] for record in read_metrics(workdir)] == [0, 1]
    assert Checkpointer(workdir).latest_step == 2
    summary = train(config, workdir)
    straight = finished("grpo", steps=3)
    assert summary["success_after"] == straight.summary["success_after"]
    assert summary["generated_tokens"] == straight.summary["generated_tokens"]
    assert summary["replayed"]["rollouts"] > 0


def test_an_engine_that_runs_another_model_stops_the_run(stopped, monkeypatch):
    config, workdir = stopped
    real = focus.run.trainer.make_score_fn

    def another(*args, **options):
        score = real(*args, **options)
        # As of a server whose config.json has other rotary embeddings.
        return lambda params, rows: score(params | {"final_norm": -params["final_norm"]}, rows)

    with monkeypatch.context() as patch:
        patch.setattr(focus.run.trainer, "make_score_fn", another)
        with pytest.raises(EngineMismatch, match=r"on average .* is 1: the engine runs another"):
            train(config, workdir)
    assert Checkpointer(workdir).latest_step == 2
    assert train(config, workdir)["steps"] == 3


def test_a_learning_rate_that_ruins_the_policy_stops_the_run(prepare, tmp_path):
    config = shrunk("grpo", **{"learner.learning_rate": 1e38, "learner.warmup_steps": 0})
    prepare(config)
    with pytest.raises(FloatingPointError, match=r"(step|weights) .*"):
        train(config, tmp_path)
    lines, _ = read_json_lines(tmp_path / "rollouts.jsonl")
    assert all(line["end"] != "failed" for line in lines), "the policy's fault, not the engine's"


# The command line.


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--config=configs/quickstart.py:grop"], "unknown method 'grop': .* did you mean grpo?"),
        (["--config=tests/tiny.py", "--config.budget=5"], "a budget of 5 tokens is smaller"),
        (["--config=tests/tiny.py", "--config.task.name=dep_search"], "did you mean deep_search?"),
        (["--config=tests/tiny.py", "--num_processes=many"], "--num-processes: invalid int"),
    ],
)
def test_the_command_line_says_what_is_wrong_in_one_line(flags, message, tmp_path):
    done = subprocess.run(
        [sys.executable, "scripts/train.py", *flags, f"--workdir={tmp_path / 'run'}"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert re.search(message, said)
    lines = [line for line in said.splitlines() if not line.endswith(" ...")]  # parts of the start
    assert len(lines) == 1, said
    assert not (tmp_path / "run").exists()


def test_the_config_of_a_run_is_all_that_is_needed_to_repeat_it(finished):
    run = finished("grpo", steps=3)
    assert json.loads((run.workdir / "config.json").read_text()) == json.loads(run.config.to_json())
