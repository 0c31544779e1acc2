"""Checkpoints and the journal: what survives a kill, a full disk and a change of config."""

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.journal import Interrupted, Journal, JsonLines, keep_json_lines, read_json_lines
from focus.learner.checkpoint import Checkpointer, CheckpointError, open_workdir
from focus.types import Generation, Segment, State, Trajectory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Training:
    params: dict
    opt_state: tuple
    key: jax.Array


def make_state(value=0.0):
    params = {
        "w": jnp.full((8, 4), float(value)),
        "layers": {"b": jnp.full(3, value, jnp.bfloat16)},
    }
    return Training(params, optax.adam(1e-3).init(params), jax.random.key(int(value)))


def assert_equal(one, two):
    def same(a, b):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype

    jax.tree.map(same, one, two)


def save_steps(workdir, scores, **options):
    checkpointer = Checkpointer(workdir, **options)
    for step, score in scores.items():
        metrics = {} if score is None else {"heldout/success": score}
        checkpointer.save(step, make_state(step), host={"at": step}, metrics=metrics)
    return checkpointer


def test_state_and_host_come_back_as_they_were(tmp_path):
    host = {"task_order": [3, 1, 2], "ledger": {"base": 12}, "attempt": 0, "note": None}
    Checkpointer(tmp_path).save(7, make_state(2.0), host=host, metrics={"critic/error": 0.1})
    target = jax.eval_shape(lambda: make_state(0.0))
    restored = Checkpointer(tmp_path).restore(target)
    assert restored.step == 7
    assert restored.host == host
    assert restored.metrics == {"critic/error": 0.1}
    assert_equal(restored.state, make_state(2.0))
    assert isinstance(restored.state, Training)


RESHARD = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from focus.learner.checkpoint import Checkpointer

auto = (jax.sharding.AxisType.Auto,) * 2
mesh = lambda shape: jax.make_mesh(shape, ("data", "fsdp"), axis_types=auto)
values = np.arange(64.0, dtype=np.float32).reshape(16, 4)
saved = jax.device_put(values, NamedSharding(mesh((1, 8)), P("fsdp", None)))
Checkpointer(sys.argv[1]).save(1, {"w": saved, "step": jnp.int32(5)}, host={})
wanted = NamedSharding(mesh((2, 4)), P("data", "fsdp"))
target = {
    "w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=wanted),
    "step": jax.ShapeDtypeStruct((), jnp.int32),
}
state = Checkpointer(sys.argv[1]).restore(target).state
assert state["w"].sharding == wanted, state["w"].sharding
assert {shard.data.shape for shard in state["w"].addressable_shards} == {(8, 1)}
np.testing.assert_array_equal(state["w"], values)
assert int(state["step"]) == 5
"""


def run_python(source, *arguments, **environment):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd(), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        stdout=subprocess.PIPE,
        env=environment,
    )


def test_arrays_land_in_the_shardings_of_the_target(tmp_path):
    """Saved on eight devices in one mesh, restored into another."""
    flags = "--xla_force_host_platform_device_count=8"
    process = run_python(RESHARD, tmp_path, XLA_FLAGS=flags)
    process.communicate(timeout=120)
    assert process.returncode == 0


def test_the_newest_and_the_best_are_kept(tmp_path):
    scores = {1: 0.2, 2: 0.9, 3: 0.1, 4: None, 5: 0.9, 6: float("nan"), 7: 0.3, 8: 0.4}
    checkpointer = save_steps(tmp_path, scores, keep_last=2, keep_best=2)
    assert checkpointer.steps == (2, 5, 7, 8)
    assert (checkpointer.latest_step, checkpointer.best_step) == (8, 5)
    target = make_state()
    for which, step in (("latest", 8), ("best", 5), (2, 2)):
        restored = checkpointer.restore(target, step=which)
        assert (restored.step, restored.host) == (step, {"at": step})
        assert_equal(restored.state, make_state(step))
    assert save_steps(tmp_path / "b", scores, keep_last=1, keep_best=0).steps == (8,)


def test_a_history_given_up_is_replaced_by_the_one_that_goes_on(tmp_path):
    save_steps(tmp_path, {2: 0.1, 4: 0.9, 6: 0.2}, keep_last=3)
    checkpointer = Checkpointer(tmp_path, keep_last=3)
    checkpointer.restore(make_state(), step=2)
    checkpointer.save(4, make_state(40), host={"at": "again"})
    assert checkpointer.steps == (2, 4)  # 6, and the old 4 with its 0.9, belong to the other one
    assert checkpointer.best_step == 2
    assert checkpointer.restore(make_state()).host == {"at": "again"}


def test_steps_must_grow_and_foreign_checkpoints_are_not_overwritten(tmp_path):
    checkpointer = save_steps(tmp_path, {3: 0.1})
    with pytest.raises(ValueError, match="cannot save step 3 after step 3"):
        checkpointer.save(3, make_state(), host={})
    with pytest.raises(ValueError, match="up to step 3, but this run started without restoring"):
        Checkpointer(tmp_path).save(1, make_state(), host={})
    assert checkpointer.steps == (3,)


SAVE_AND_DIE = """
import os, signal, sys
import jax.numpy as jnp
from focus.learner import checkpoint

checkpointer = checkpoint.Checkpointer(sys.argv[1], keep_last=1, keep_best=0)
state = lambda step: {"w": jnp.full((400, 500), float(step))}
checkpointer.save(1, state(1), host={"at": 1})
where = sys.argv[2]
die = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
if where == "arrays written":
    checkpoint._checksums = die
elif where == "not committed":
    checkpoint.write_atomically = die
elif where == "old not removed":
    checkpoint.shutil.rmtree = die
print("ready", flush=True)
step = 2
while True:
    checkpointer.save(step, state(step), host={"at": step})
    step += 1
"""


def run_until_killed(workdir, where):
    process = run_python(SAVE_AND_DIE, workdir, where)
    assert process.stdout.readline() == b"ready\n"
    if where == "arrays half written":
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:  # until orbax's temporary directory is there
            if list(Path(workdir).glob("checkpoints/*/state*tmp*")):
                break
        process.kill()
    process.wait(timeout=120)
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "where", ["arrays half written", "arrays written", "not committed", "old not removed"]
)
def test_kill_9_during_a_save_leaves_a_usable_checkpoint(tmp_path, where):
    run_until_killed(tmp_path, where)
    checkpointer = Checkpointer(tmp_path, keep_last=1, keep_best=0)
    assert checkpointer.unfinished or where == "arrays half written"  # may have just finished
    target = {"w": jax.ShapeDtypeStruct((400, 500), jnp.float32)}
    restored = checkpointer.restore(target)
    expected = {"arrays written": 1, "not committed": 1, "old not removed": 2}
    assert restored.step == expected.get(where, restored.step)
    assert restored.host == {"at": restored.step}
    np.testing.assert_array_equal(restored.state["w"], float(restored.step))
    checkpointer.save(1000, restored.state, host={})  # and the run goes on
    assert [d.name for d in (tmp_path / "checkpoints").iterdir()] == ["00001000"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_every_kind_of_damage_is_found_and_the_way_out_works(tmp_path, damage):
    save_steps(tmp_path, {1: 0.1, 2: 0.2}, keep_last=2)
    broken = tmp_path / "checkpoints" / "00000002"
    backup = tmp_path / "backup"
    shutil.copytree(broken, backup)
    files = [f for f in backup.rglob("*") if f.is_file() and f.stat().st_size]
    assert any("/d/" in str(f) for f in files)  # the array data itself is among them
    for original in files:
        if damage == "remove" and original.name == "checkpoint.json":
            continue  # then it is no checkpoint at all
        file = broken / original.relative_to(backup)
        data = original.read_bytes()
        middle = len(data) // 2
        if damage == "flip":
            file.write_bytes(data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :])
        elif damage == "truncate":
            file.write_bytes(data[:middle])
        else:
            file.unlink()
        with pytest.raises(
            CheckpointError,
            match=r"00000002 is damaged \(.*Delete that directory. .* resumes from step 1",
        ):
            Checkpointer(tmp_path).restore(make_state(), step=2)
        assert Checkpointer(tmp_path).restore(make_state(), step=1).step == 1
        file.write_bytes(data)
    assert Checkpointer(tmp_path).restore(make_state()).step == 2
    shutil.rmtree(broken)
    assert Checkpointer(tmp_path).restore(make_state()).step == 1


def test_a_target_of_other_arrays_is_refused_with_both_sides(tmp_path):
    checkpointer = save_steps(tmp_path, {1: None})
    target = make_state()
    target.params["w"] = jnp.zeros((8, 5))
    target.params["extra"] = jnp.zeros(2)
    target.params["layers"]["b"] = jnp.zeros(3)  # another dtype would be cast silently
    with pytest.raises(CheckpointError) as error:
        checkpointer.restore(target)
    for line in (
        "params.w: 'float32[8, 4]' there, 'float32[8, 5]' here",
        "params.extra: '(absent)' there, 'float32[2]' here",
        "params.layers.b: 'bfloat16[3]' there, 'float32[3]' here",
    ):
        assert line in str(error.value)


def test_missing_checkpoints_and_bad_options_are_named(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest_step is None and checkpointer.best_step is None
    with pytest.raises(CheckpointError, match=r"there are no checkpoints in .*deleted"):
        checkpointer.restore(make_state())
    save_steps(tmp_path, {1: None})
    with pytest.raises(CheckpointError, match=r"no checkpoint 'best' .*\[1\], none .*success"):
        checkpointer.restore(make_state(), step="best")
    with pytest.raises(CheckpointError, match=r"no checkpoint 9 .* steps \[1\]"):
        checkpointer.restore(make_state(), step=9)
    with pytest.raises(ValueError, match="keep_last must be >= 1 .* got 0"):
        Checkpointer(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match="state.lr is a float; .* put other values into host"):
        Checkpointer(tmp_path / "new").save(1, {"lr": 0.1}, host={})
    with pytest.raises(ValueError, match="host is not JSON .* .tolist()"):
        Checkpointer(tmp_path / "new").save(1, make_state(), host={"order": np.arange(3)})


def test_a_workdir_belongs_to_one_config(tmp_path):
    config = {"steps": 100, "learner": {"lr": 1e-3, "betas": (0.9, 0.95)}, "logging": {"every": 1}}
    workdir = open_workdir(tmp_path / "run", config)
    before = (workdir / "config.json").read_text()
    open_workdir(workdir, config)  # tuples and lists are one thing
    other = {"steps": 200, "learner": {"lr": 2e-3, "clip": 1.0}, "logging": {"every": 5}}
    with pytest.raises(ValueError) as error:
        open_workdir(workdir, other, may_differ=("steps", "logging"))
    message = str(error.value)
    assert "learner.lr: 0.001 there, 0.002 here" in message
    assert "learner.betas: [0.9, 0.95] there, '(absent)' here" in message
    assert "learner.clip: '(absent)' there, 1.0 here" in message
    assert "steps" not in message and "logging" not in message
    assert "use another workdir" in message
    assert (workdir / "config.json").read_text() == before  # a refused config leaves no trace
    longer = config | {"steps": 200, "logging": {"every": 5}}
    open_workdir(workdir, longer, may_differ=("steps", "logging"))
    assert json.loads((workdir / "config.json").read_text())["steps"] == 200
    with pytest.raises(ValueError, match="steps: 200 there, 100 here"):
        open_workdir(workdir, config, may_differ=("step", "logging"))  # no prefix of a word


# The journal.


def rollout(trajectory_id, *kinds_and_lengths, parent=None, **changes):
    segments = tuple(
        Segment(
            generations=(
                Generation(kind, (1, 2), (5,) * n, (-0.5,) * n, "stop", ((f"v{i // 2}", 0, n),)),
            ),
            text="",
            observation="",
        )
        for i, (kind, n) in enumerate(kinds_and_lengths)
    )
    states = (State(None, None, (1, 2), 0),) * (len(segments) + 1)
    fields = {"outcome": 1.0, "success": True, "end": "terminal", **changes}
    return Trajectory(
        trajectory_id, "train/7", 0, states, segments, parent=parent, parent_state=None, **fields
    )


def test_the_journal_names_every_finished_rollout(tmp_path):
    journal = Journal(tmp_path)
    journal.append(0, rollout("0/1.0", ("act", 3), ("summary", 4), ("act", 2)))
    journal.append(0, rollout("0/1.0/1.0", ("act", 6), parent="0/1.0"))
    failed = {"outcome": None, "success": False, "end": "failed", "error": "server is gone"}
    journal.append(1, rollout("1/0.0", **failed))
    records, torn = read_json_lines(tmp_path / "rollouts.jsonl")  # flushed without close
    assert torn == 0
    assert [r["tokens"] for r in records] == [
        {"base": 5, "summary": 4},
        {"branch": 6, "summary": 0},
        {"base": 0, "summary": 0},
    ]
    assert records[0] == {
        "step": 0,
        "attempt": 0,
        "id": "0/1.0",
        "task": "train/7",
        "end": "terminal",
        "outcome": 1.0,
        "success": True,
        "tokens": {"base": 5, "summary": 4},
        "versions": [["v0", 0, 7], ["v1", 7, 9]],
        "error": None,
    }
    assert (records[2]["outcome"], records[2]["error"]) == (None, "server is gone")


def test_interrupted_work_is_counted_once_over_several_resumes(tmp_path):
    def attempt(*steps):
        journal = Journal(tmp_path)
        for step in steps:
            journal.append(step, rollout(f"{step}/0.0", ("act", 10 + step)))
        journal.close()
        return journal.attempt

    first = attempt(0, 1, 2, 3)  # its checkpoint is at step 2
    journal = Journal(tmp_path)
    assert journal.interrupted(2, saved_by=first) == Interrupted(2, 12 + 13)
    journal.append(2, rollout("2/0.0", ("act", 5)))
    assert journal.interrupted(2, saved_by=first) == Interrupted(2, 25)  # own work is not lost
    journal.close()
    second = journal.attempt
    assert second == first + 1
    # The second attempt died before its first checkpoint: both attempts' work is lost.
    assert Journal(tmp_path).interrupted(2, saved_by=first) == Interrupted(3, 30)
    # It saved step 3 before it died: the first attempt's losses are in that checkpoint.
    assert Journal(tmp_path).interrupted(3, saved_by=second) == Interrupted(0, 0)


@settings(deadline=None, max_examples=30)
@given(cut=st.integers(0, 200))
def test_a_file_cut_anywhere_loses_only_the_line_that_was_cut(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("lines") / "file.jsonl"
    lines = JsonLines(path)
    sizes = []
    for i in range(8):
        lines.append({"i": i, "text": "ü" * i})
        sizes.append(path.stat().st_size)
    lines.close()
    cut = min(cut, sizes[-1])
    os.truncate(path, cut)
    whole = [i for i, size in enumerate(sizes) if size <= cut]
    torn = int(cut not in (0, *sizes))
    records, found = read_json_lines(path)
    assert ([r["i"] for r in records], found) == (whole, torn)
    lines = JsonLines(path)
    assert lines.torn == torn
    lines.append({"i": "next"})
    lines.close()
    records, found = read_json_lines(path)
    assert ([r["i"] for r in records], found) == ([*whole, "next"], 0)


@contextlib.contextmanager
def file_size_limit(num_bytes):
    """Stands in for a full disk: the kernel writes a part, then fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_during_a_save_leaves_the_older_checkpoint(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    state = {"w": jax.random.normal(jax.random.key(0), (100, 100))}
    checkpointer.save(1, state, host={})
    with file_size_limit(2_000):
        with pytest.raises(CheckpointError, match=r"could not be written \(.* from step 1"):
            checkpointer.save(2, state, host={})
    assert checkpointer.steps == (1,)
    checkpointer.save(2, state, host={})  # there is room again
    assert checkpointer.steps == (1, 2)
    assert_equal(checkpointer.restore(state).state, state)


def test_a_full_disk_is_an_error_with_a_way_out_and_leaves_whole_lines(tmp_path):
    lines = JsonLines(tmp_path / "file.jsonl")
    lines.append({"i": 0})
    with file_size_limit(lines.path.stat().st_size + 20):
        with pytest.raises(OSError, match=r"cannot append to .*file.jsonl .* start the same"):
            lines.append({"i": 1, "text": "x" * 100})
    assert read_json_lines(lines.path) == ([{"i": 0}], 0)
    lines.append({"i": 1})
    assert read_json_lines(lines.path) == ([{"i": 0}, {"i": 1}], 0)
    lines.close()


def test_a_line_changed_from_outside_is_named(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text('{"i": 0}\n{"i": \n{"i": 2}\n')
    with pytest.raises(ValueError, match=r"file.jsonl, line 2 is not JSON"):
        read_json_lines(path)
    with pytest.raises(ValueError, match="line 2"):
        keep_json_lines(path, lambda record: True)
