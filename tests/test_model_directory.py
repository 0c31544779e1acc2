"""Runs that start from a model directory: its chat, its stop tokens, its errors."""

import json

import jax
import ml_collections
import pytest
import tiny
from test_chat_templates import OPENS, PAD, STRIPS, TOKENIZER, TOOLS

from configs import smollm2
from focus.chat.template_chat import TemplateChat
from focus.chat.tokens import CHATML, Chat
from focus.formats import hf
from focus.policy import transformer
from focus.rollout import RetryPolicy, Tools
from focus.run import experiment
from focus.run.warm_start import load_or_make
from focus.train import train

MODEL = transformer.ModelConfig(
    vocab_size=304,  # more rows than the tokenizer has ids
    d_model=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=32,
    max_context=4096,
    rope_theta=1e4,
)


@pytest.fixture
def directory(tmp_path):
    """A model that knows nothing, whose template has a place for tools."""
    path = tmp_path / "model"
    params = transformer.init_params(MODEL, jax.random.key(0))
    hf.save_checkpoint(path, MODEL, params, dtype="float32")
    TemplateChat(TOKENIZER, TOOLS, pad_token=PAD).save(path)
    return path


def make_config(directory, **overrides):
    config = tiny.get_config("ppo")  # a critic has opinions even where all rollouts fail
    del config.warm_start
    config.model = ml_collections.ConfigDict(
        {"path": str(directory), "max_context": 1536, "dtype": "float32"}
    )
    config.chat = smollm2.get_config().chat.copy_and_resolve_references()
    config.steps = 1
    config.budget = 120
    config.rollout.update(
        max_running=4, retained=4, cache_buckets=(1536,), prefill_buckets=(256,), batch_buckets=(4,)
    )
    config.learner.update(row_length=1536, micro_rows=1, max_nodes=16, max_states=16)
    config.evaluate.update(every=1, num_tasks=2)
    config.critic.update(pretrain_episodes=0, warmup_steps=0)  # no episodes to learn from
    config.update_from_flattened_dict(overrides)
    return config


CALLS = {"chat.tool_calls": "hermes", "rollout.stop": ("</tool_call>",)}


@pytest.mark.slow
def test_a_run_speaks_the_template_of_the_directory_and_shows_it_the_tools(directory, tmp_path):
    config = make_config(directory, **CALLS)
    summary = train(config, tmp_path / "run")
    assert summary["technical_failures"] == 0 and summary["dose"]["optimizer_steps"] > 0
    env = experiment.make_env(config)
    chat = load_or_make(config, env).chat
    assert chat.encode_start("", "q") == chat.encode_messages(
        [{"role": "user", "content": "q"}], generation_prompt=True
    )
    shown = chat.render([{"role": "user", "content": "q"}])
    assert all(json.dumps(tool) in shown for tool in env.tools())


def test_the_start_of_a_run_is_that_of_the_files(directory):
    config = make_config(directory, **CALLS)
    (directory / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    env = experiment.make_env(config)
    start = load_or_make(config, env)
    assert start.chat.stop_token_ids == (start.chat.end_of_turn_id, 0)
    agent = experiment.make_agent(
        config,
        env,
        start.chat,
        None,
        temperature=1.0,
        run_seed=0,
        tools=Tools(experiment.tool_limits(config)),
        retry=RetryPolicy(),
    )
    assert agent.sampling.stop == ("</tool_call>",)
    first = agent.start(env.tasks("train")[0])
    assert "<tool_call>" not in start.chat.decode(first.prompt_ids)
    # A directory with our own layout is read as such, and has no place for tools.
    Chat(TOKENIZER, CHATML).save(directory)
    plain = make_config(directory, **{"task.instructions": True})
    start = load_or_make(plain, experiment.make_env(plain))
    assert isinstance(start.chat, Chat) and start.chat.format is CHATML


def damage(directory, name, content=None):
    path = directory / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)


@pytest.mark.parametrize(
    ("files", "overrides", "message"),
    [
        ({"tokenizer.json": None}, {}, "no tokenizer.json in"),
        ({"chat_template.jinja": None}, {}, "no chat template in .*chat_format.json"),
        ({"tokenizer_config.json": "{}"}, {}, "names no pad_token"),
        ({"chat_template.jinja": STRIPS}, {}, "strips or rewrites the thinking"),
        ({"chat_template.jinja": OPENS}, {}, "cannot be spoken turn by turn"),
        ({"chat_template.jinja": STRIPS}, CALLS | {"chat.keep_thinking": True}, "place for tools"),
        ({"generation_config.json": '{"eos_token_id": 4000}'}, {}, r"stop token ids \[4000\]"),
        ({"chat_format.json": '{"name": "chatml"}'}, CALLS, "has no place for tools"),
        ({}, {"model.vocab_size": 200}, "ids up to 292, but the model has only 200 embeddings"),
        ({}, {"chat.tool_calls": "xml"}, "chat.tool_calls must be one of hermes, qwen; got 'xml'"),
        ({}, CALLS | {"task.instructions": True}, "task.instructions explains calls as plain"),
    ],
)
def test_a_directory_that_cannot_be_spoken_is_refused_before_weights_are_read(
    directory, files, overrides, message, tmp_path, monkeypatch
):
    for name, content in files.items():
        damage(directory, name, content)
    monkeypatch.setattr(hf, "load_checkpoint", None)  # nothing gets that far
    with pytest.raises(ValueError, match=message):
        train(make_config(directory, **overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()
