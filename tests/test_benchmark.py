"""The benchmark's work is one and the same for every side, and sides that differ are refused."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from focus.benchmark import compare, sides
from focus.benchmark.work import ROLLOUT_TOKENS, SIZES, TASKS, Play, Turn, Work, trajectories
from focus.formats import hf
from focus.learner.packing import pack_trajectories
from focus.policy import model as models

ROOT = Path(__file__).parent.parent
SMALL = dataclasses.replace(
    SIZES["tiny"], vocab_size=64, d_model=32, num_heads=2, num_kv_heads=2, d_ff=48
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    hf.save_checkpoint(path, SMALL, models.init_params(SMALL, jax.random.key(0)), dtype="float32")
    return path


@pytest.mark.parametrize("task", TASKS)
def test_the_same_work_is_drawn_again(task):
    work = Work(task, "rollouts", rows=5)
    plays = work.draw(50)
    assert plays == work.draw(50)
    assert [p.parent for p in plays[:5]] == [None] * 5 and len(plays) > 5
    assert (
        max(len(p.sequence()[0]) for p in Work(task, "rollouts", rows=300).draw(50))
        <= ROLLOUT_TOKENS
    )


def test_a_branch_begins_with_what_its_parent_had_there():
    plays = Work("update", "rollouts", rows=8).draw(50)
    for play in plays[8:]:
        assert play.prompt == plays[play.parent].contexts()[play.parent_turn]


def test_written_tokens_are_where_the_policy_wrote():
    play = Play((1, 2), (Turn((3, 4), (5,)), Turn((6,), (7, 8))))
    tokens, written = play.sequence()
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert written.tolist() == [False, False, True, True, False, True]
    assert sides.written_tokens([play, play]) == 6


@pytest.mark.parametrize("shape", ["dense", "rollouts"])
def test_packed_and_padded_rows_train_the_same_tokens(shape):
    work = Work("update", shape, rows=6, length=40)
    plays = work.draw(50)
    packed = pack_trajectories(trajectories(plays), row_length=512, max_nodes=32, max_states=64)
    parts = sides.by_length(plays, 4)
    batches = [sides.padded_batch(plays, part) for part in parts]
    total = sides.written_tokens(plays)
    assert packed.rows.generated_mask.sum() == total
    assert sum(batch["written"].sum() for batch in batches) == total
    ours = packed.to_trajectories(packed.rows.tokens)
    for part, batch in zip(parts, batches):
        assert not (batch["written"] & ~batch["present"]).any()
        for i, tokens, written in zip(part, batch["tokens"], batch["written"]):
            np.testing.assert_array_equal(ours[i][: written.sum()], tokens[written])


def test_padded_batches_are_no_longer_than_they_need_to_be():
    plays = Work("update", "rollouts", rows=9).draw(50)
    for part in sides.by_length(plays, 8):
        assert sides.padded_batch(plays, part)["present"][:, -1].any()


def test_a_difference_is_refused():
    assert compare.difference({"loss": [2.0, 100.0]}, {"loss": [2.0, 100.01]}) < 1e-3
    with pytest.raises(ValueError, match="differ by 0.01 in loss"):
        compare.difference({"loss": [1.0]}, {"loss": [0.99]})
    with pytest.raises(ValueError, match="differ by nan"):
        compare.difference({"loss": [float("nan")]}, {"loss": [1.0]})
    with pytest.raises(ValueError, match="different things"):
        compare.difference({"loss": [1.0]}, {"loss": [1.0, 1.0]})


@pytest.mark.parametrize("task", TASKS)
def test_our_side_does_rollouts(directory, task):
    result = sides.measure("ours", directory, Work(task, "rollouts", rows=2, repeats=1))
    assert len(result["rates"]) == 1 and result["rates"][0] > 0
    total = sides.written_tokens(Work(task, "rollouts", rows=2).draw(SMALL.vocab_size))
    sizes = {"update": 2, "score": total, "decode": len(Work(task, "rollouts", rows=2).draw(64))}
    assert all(len(values) == sizes[task] for values in result["found"].values())
    assert np.isfinite([x for values in result["found"].values() for x in values]).all()


@pytest.mark.parametrize("shape", ["dense", "rollouts"])
@pytest.mark.parametrize("task", TASKS)
def test_transformers_finds_what_we_find(directory, task, shape):
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason="the other side of the benchmark: the dev extra")
    work = Work(task, shape, rows=3, length=24, new_tokens=5, repeats=1)
    found = [sides.measure(side, directory, work)["found"] for side in ("ours", "hf")]
    assert compare.difference(*found) < 1e-3


def test_tunix_finds_what_we_find(directory):
    if importlib.util.find_spec("tunix") is None:
        pytest.skip("google-tunix is not installed: the tunix extra")
    work = Work("update", "rollouts", rows=3, repeats=1)
    found = [sides.measure(side, directory, work)["found"] for side in ("ours", "tunix")]
    assert compare.difference(*found) < 1e-3


def test_a_side_that_fails_says_why(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="ours failed: .*config"):
        compare.compare(Work("score", rows=1, length=8), model_path=str(tmp_path), rounds=1)


def test_the_program_measures_one_side(directory):
    work = json.dumps({"task": "score", "rows": 2, "length": 8, "repeats": 2})
    done = subprocess.run(
        [sys.executable, "-m", "focus.benchmark.sides", "ours", str(directory), work],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["rates"]) == 2 and len(result["found"]["logp"]) == 14


def figures(ratio=2.0, task="update", shape="dense"):
    rates = {"tokens_per_second": 1000.0, "all": [[1000.0]]}
    work = dataclasses.asdict(Work(task, shape))
    out = {"work": work, "model": "tiny", "against": "hf", "ours": rates, "hf": rates}
    return out | {"ratio": ratio, "ratios": [ratio], "difference": 1e-6, "load": 1.0}


def test_a_report_keeps_one_line_per_comparison(tmp_path):
    path = tmp_path / "docs" / "benchmarks.md"
    compare.write_report(path, figures(1.25), "machine A")
    compare.write_report(path, figures(3.0, shape="rollouts"), "machine A")
    compare.write_report(path, figures(1.75), "machine B")
    compare.write_report(path, figures(1.5), "machine A")
    text = path.read_text()
    assert text.count("| update | dense | tiny | hf |") == 2
    assert "| 1.25 |" not in text and "| 1.50 |" in text and "| 3.00 |" in text
    assert text.index("## machine A") < text.index("| 1.50 |") < text.index("## machine B")
    assert text.count("# Benchmarks\n") == 1


def test_a_report_wants_two_sides(tmp_path):
    with pytest.raises(ValueError, match="--against"):
        compare.write_report(tmp_path / "x.md", {"ours": {}})


def test_the_machine_is_described():
    assert f"jax {jax.__version__}" in compare.machine() and " cores" in compare.machine()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "train"}, "task must be one of"),
        ({"task": "score", "shape": "ragged"}, "shape must be one of"),
        ({"task": "score", "rows": 0}, "rows must be >= 1"),
        ({"task": "score", "length": 1}, "length must be >= 2"),
    ],
)
def test_work_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Work(**options)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="size must be one of"):
        compare.compare(Work("score"), size="huge")
    with pytest.raises(ValueError, match="--against must be one of"):
        compare.compare(Work("score"), against="other")
    with pytest.raises(ValueError, match="rounds must be >= 1"):
        compare.compare(Work("score"), rounds=0)
