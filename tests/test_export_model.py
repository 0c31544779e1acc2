"""A trained policy leaves the house: another library reads it and says the same."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from conftest import REPOSITORY

from focus.formats import hf
from focus.policy import model as models
from focus.run.restored import restore_run


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory):
    """A run, its best checkpoint, and the directory that the script makes of it."""
    run = finished("focus", steps=6)
    out = tmp_path_factory.mktemp("export") / "model"
    export(run.workdir, out, "--step=best")
    return run, restore_run(run.workdir, "best"), out


def export(workdir, out, *flags):
    command = [sys.executable, "scripts/export_model.py", f"--workdir={workdir}", f"--out={out}"]
    done = subprocess.run([*command, *flags], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def greedy(restored, prompt, count):
    """Most probable tokens after a prompt, by the trained parameters and nothing else."""
    ids = list(prompt)
    model = restored.trainer.model
    for _ in range(count):
        hidden = models.hidden_states(model, restored.state.params, jnp.asarray([ids]))
        logits = models.unembed(model, restored.state.params, hidden[:, -1])
        ids.append(int(np.argmax(logits[0])))
        if ids[-1] in restored.trainer.start.chat.stop_token_ids:
            break
    return ids[len(prompt) :]


def test_the_trained_policy_is_written_and_not_the_one_before_training(exported):
    run, restored, out = exported
    _, params = hf.load_checkpoint(out)
    trained = jax.tree.leaves(restored.state.params)
    for ours, theirs in zip(trained, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    start = jax.tree.leaves(restored.trainer.start.params)
    assert any(np.any(np.asarray(a) != b) for a, b in zip(trained, start, strict=True))
    before = out.parent / "before"
    said = export(run.workdir, before, f"--step={run.config.steps}")
    assert f"weights after {run.config.steps} training steps" in said


def test_transformers_generates_the_same_greedy_tokens_and_stops_where_we_stop(exported):
    _, restored, out = exported
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    chat, trainer = restored.trainer.start.chat, restored.trainer
    stopped = 0
    for task in trainer.heldout_tasks[:4]:
        prompt = trainer.eval_agent.start(task).prompt_ids
        expected = greedy(restored, prompt, 12)
        found = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert found[0, len(prompt) :].tolist() == expected
        stopped += expected[-1] in chat.stop_token_ids
    assert stopped, "no turn ended by itself: the test has not seen the end-of-turn token"


def test_its_chat_template_says_what_the_agent_says(exported):
    _, restored, out = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    chat, env = restored.trainer.start.chat, restored.trainer.env
    messages = [
        {"role": "system", "content": env.system_prompt()},
        {"role": "user", "content": "capital of Chile?"},
        {"role": "assistant", "content": "search(Chile)"},
        {"role": "tool", "content": "1 Chile: country\n2 New Chile: club"},
    ]
    for generation_prompt in (False, True):
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=generation_prompt, tokenize=True, return_dict=False
        )
        assert tuple(ids) == chat.encode_messages(messages, generation_prompt=generation_prompt)
    assert tokenizer.eos_token_id == chat.end_of_turn_id
    assert tokenizer.pad_token_id == chat.pad_id
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == list(chat.stop_token_ids)


@pytest.mark.parametrize(
    "flags, said",
    [
        ((), "one of the arguments --config --workdir is required"),
        (("--workdir=nowhere",), "no run in nowhere"),
    ],
)
def test_what_cannot_be_written_is_said_in_a_line(tmp_path, flags, said):
    command = [sys.executable, "scripts/export_model.py", f"--out={tmp_path / 'x'}", *flags]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert said in done.stdout + done.stderr
    assert not (tmp_path / "x").exists()


def test_adapters_are_merged_into_what_is_exported(finished, tmp_path):
    run = finished("grpo", **{"learner.lora.rank": 2})
    export(run.workdir, tmp_path / "model")
    restored = restore_run(run.workdir)
    _, params = hf.load_checkpoint(tmp_path / "model")
    merged = restored.trainer.rollout_params(restored.state)
    start = restored.trainer.start.params
    changed = 0
    for ours, theirs, before in zip(*map(jax.tree.leaves, (merged, params, start)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        changed += np.any(np.asarray(theirs) != before)
    assert changed, "the adapters have not moved the model"
