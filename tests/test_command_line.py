"""Configs on the command line: what is read, and what is said of mistakes, in one line each."""

import json
import subprocess
import sys

import pytest
from conftest import REPOSITORY

from focus.run import command_line, ranges
from focus.run.command_line import ConfigError, Parser, read_comments, read_config, set_keys

QUICKSTART = str(REPOSITORY / "configs" / "quickstart.py")


def parse(*args, required=False):
    parser = Parser("Does something.")
    parser.add_config("the run")
    parser.add_argument("--workdir", required=required)
    parser.add_argument("--num-processes", type=int)
    parser.prog = "script.py"
    return parser.parse_args(args)


def said(capsys, *args, required=False):
    """The one line that a mistake is answered with."""
    with pytest.raises(SystemExit) as error:
        parse(*args, required=required)
    assert error.value.code == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("script.py: "), err
    return err


# What is read.


def test_keys_are_set_to_values_of_their_kind():
    options = parse(
        "--config.budget=1_000",
        "--config",
        f"{QUICKSTART}:grpo",
        "--config.learner.learning_rate=3",
        "--config.credit.options=a=1 b=2",
        "--config.rollout.engine",
        "embedded",
        "--config.rollout.top_k",
        "-1",
    )
    config = options.config
    assert (config.budget, config.learner.learning_rate) == (1000, 3.0)
    assert isinstance(config.learner.learning_rate, float)
    assert config.credit.options == "a=1 b=2" and config.credit.estimator == "grpo"
    assert options.config_name == f"{QUICKSTART}:grpo"
    assert options.overrides["budget"] == 1000 and options.overrides["rollout.top_k"] == -1
    assert config.is_locked


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--config.critic.enabled=false"], False),
        (["--config.critic.enabled"], True),
        (["--noconfig.critic.enabled"], False),
        (["--config.critic.enabled", "True"], True),
        (["--config.critic.enabled=0"], False),
    ],
)
def test_switches(flags, value):
    assert parse(f"--config={QUICKSTART}", *flags).config.critic.enabled is value


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--config.branching.ks=(1, 2)"], "branching.ks", (1, 2)),
        (["--config.branching.ks=[3]"], "branching.ks", (3,)),
        (["--config.branching.ks=3"], "branching.ks", (3,)),
        (["--config.rollout.urls=http://a:1", "--config.rollout.urls=http://b:2"],
         "rollout.urls", ("http://a:1", "http://b:2")),
        (["--config.rollout.stop=('a', 'b')"], "rollout.stop", ("a", "b")),
        (["--config.learner.importance_range=()"], "learner.importance_range", ()),
        (["--config.learner.lora.targets=q_proj"], "learner.lora.targets", ("q_proj",)),
    ],
)  # fmt: skip
def test_tuples(flags, key, value):
    section, _, name = key.rpartition(".")
    config = parse(f"--config={QUICKSTART}", *flags).config
    for part in section.split("."):
        config = config[part]
    assert config[name] == value


@pytest.mark.parametrize(
    "key", ["learner.importance_cap", "warm_start.seed", "warm_start.products"]
)
def test_optional_keys_take_none(key):
    """Pitfall 45."""
    section, name = key.split(".")
    config = parse(f"--config={QUICKSTART}", f"--config.{key}=None").config
    assert config[section][name] is None
    assert json.loads(config.to_json())[section][name] is None
    # And from None back to what they are otherwise.
    back = {"learner.importance_cap": ("3.5", 3.5), "warm_start.seed": ("4", 4)}
    text, value = back.get(key, ("bfloat16", "bfloat16"))
    set_keys(config, [(key, text)])
    assert config[section][name] == value


def test_every_other_key_refuses_none():
    config = read_config(QUICKSTART)
    for key, value in ranges.leaves(config):
        if not ranges.optional(key):
            with pytest.raises(ConfigError, match="cannot be None") as error:
                set_keys(config, [(key, "None")])
            assert repr(value) in str(error.value)


def test_flags_are_read_in_both_spellings():
    for flag in ("--num-processes=2", "--num_processes=2"):
        assert parse(f"--config={QUICKSTART}", flag).num_processes == 2
    assert parse(f"--config={QUICKSTART}", "--num_processes", "3").num_processes == 3


def test_the_flags_of_a_config_give_it_again():
    options = parse(f"--config={QUICKSTART}:ppo", "--config.branching.ks=4", "--config.seed=2")
    again = parse(*command_line.as_flags(options))
    assert again.config == options.config


# Mistakes.


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.credit.lambda=.9", "credit.lambda: no such key; did you mean credit.lambda_?"),
        ("--config.budgett=1", "budgett: no such key; did you mean budget?"),
        ("--config.lerner.learning_rate=1", "did you mean learner.learning_rate"),
        ("--config.learning_rate=1", "learner.learning_rate or warm_start.learning_rate"),
        ("--config.importance_kap=1", "did you mean learner.importance_cap?"),
        ("--config.qqq=1", "qqq: no such key; --helpconfig lists them"),
        ("--config.budget=many", "budget takes a whole number, got 'many'"),
        ("--config.budget=1.5", "budget takes a whole number, got '1.5'"),
        ("--config.learner.clip_low=low", "clip_low takes a number, got 'low'"),
        ("--config.critic.enabled=maybe", "takes true or false, got 'maybe'"),
        ("--config.budget", "takes a value: --config.budget=VALUE"),
        ("--config.mesh=1", "mesh is a section: set one of its keys, as mesh."),
        ("--workdri=x", "--workdri=x; did you mean --workdir?"),
        ("more", "unrecognized arguments: more"),
        ("--num-processes=many", "--num-processes: invalid int value: 'many'"),
    ],
)
def test_a_mistake_is_said_in_one_line_with_the_nearest_name(flag, message, capsys):
    assert message in said(capsys, f"--config={QUICKSTART}", flag)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("configs/quikstart.py", "no file 'configs/quikstart.py'; did you mean configs/quickstart"),
        ("config/quickstart.py", "did you mean configs/quickstart.py?"),
        ("/none/at/all.py", "no file '/none/at/all.py'"),
        (
            "configs/quickstart.py:grop",
            "unknown method 'grop': choose one of .*; did you mean grpo?",
        ),
        ("configs/tpu_pod.py:qwen3_9b", "unknown preset 'qwen3_9b'.*did you mean qwen3_\\w*8?b"),
        ("README.md", "README.md, line \\d+: SyntaxError"),
        ("setup.py", "setup.py"),
    ],
)
def test_a_file_or_variant_that_is_not_there(name, message, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    import re

    assert re.search(message, said(capsys, f"--config={name}"))


@pytest.mark.parametrize(
    ("source", "variant", "message"),
    [
        (
            "def get_config():\n    return 1 / 0\n",
            "",
            "line 2: ZeroDivisionError: division by zero",
        ),
        ("def get_config():\n    return 1 / 0\n", ":x", "takes no variant"),
        ("def get_config(x):\n    pass\n", "", "wants a variant"),
        ("def get_config():\n    return {}\n", "", "returned no ConfigDict"),
        ("import nothing_of_that_name\n", "", "line 1: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "", "line 1: SystemExit: 3"),
        ("x = 1\n", "", "has no function get_config()"),
    ],
)
def test_a_config_file_that_fails(source, variant, message, capsys, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(source)
    line = said(capsys, f"--config={path}{variant}")
    assert message in line and str(path) in line


def test_flags_that_are_missing(capsys):
    assert "required: --config, --workdir" in said(capsys, required=True)


# What there is.


def test_every_key_is_listed_with_its_value_and_what_it_means(capsys):
    with pytest.raises(SystemExit) as error:
        parse("--helpconfig", f"--config={QUICKSTART}:grpo", "--config.seed=3", required=True)
    assert error.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    config = read_config(f"{QUICKSTART}:grpo")
    assert [line.split(" = ")[0].strip() for line in lines[1:]] == [
        key for key, _ in ranges.leaves(config)
    ]
    (seed,) = (line for line in lines if line.startswith("  seed = "))
    assert seed.startswith("  seed = 3")
    (budget,) = (line for line in lines if line.startswith("  budget = 3000"))
    assert "tokens that the policy may generate" in budget
    (estimator,) = (line for line in lines if line.startswith("  credit.estimator"))
    assert "= 'grpo'" in estimator


def test_a_comment_above_a_key_belongs_to_it():
    comments = read_comments(command_line._default_config())
    assert "the policy compacts" in comments["context.manager"]
    assert "shown" not in comments.get("context.limit", "")


def test_help_and_mistakes_need_no_device():
    program = (
        "import sys; from focus.run.command_line import Parser; p = Parser('x'); p.add_config('x');"
        f"p.parse_args(['--config={QUICKSTART}', '--config.seed=1']); print('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    assert done.stdout == "False\n"
