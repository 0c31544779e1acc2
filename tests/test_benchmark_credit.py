"""The benchmark of estimators: what it measures, and memory that grows with the inputs."""

import jax
import numpy as np
import pytest
import rich.console

from focus.benchmark import credit as benchmark
from focus.credit import ESTIMATORS

SMALL = benchmark.Size(rows=32, segments=4, tokens=16)


@pytest.mark.parametrize("name", benchmark.names())
def test_random_inputs_are_as_planned(name):
    planned, made = benchmark.abstract_batch(name, SMALL), benchmark.random_batch(name, SMALL)
    assert jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), planned) == jax.tree.map(
        lambda x: (x.shape, x.dtype), made
    )
    for channel in ESTIMATORS[name].inputs:
        assert getattr(made, channel) is not None
    if made.parent is not None:
        nodes = np.arange(len(made.parent))
        assert np.all(made.parent < nodes)
        assert sorted(made.leaf_traj[made.leaf_traj >= 0]) == list(range(SMALL.rows))
        for row, path in enumerate(made.node_of_segment):
            np.testing.assert_array_equal(made.parent[path[1:]], path[:-1])
            (leaf,) = np.flatnonzero(made.leaf_traj == row)
            assert made.parent[leaf] == path[-1]
        if made.tree_id is not None:
            np.testing.assert_array_equal(made.tree_id[path], made.tree_id[made.parent[path[0]]])


def test_a_measurement_has_times_and_bytes_and_a_plan_bytes_alone():
    ran = benchmark.measure("grpo", SMALL, repeats=2)
    assert ran["seconds"] > 0 and ran["copy_seconds"] > 0
    assert ran["ratio"] == pytest.approx(ran["seconds"] / ran["copy_seconds"])
    # What an estimator is given, less what the compiler sees that it does not read.
    given = sum(x.nbytes for x in jax.tree.leaves(benchmark.random_batch("grpo", SMALL)))
    assert 0 < ran["input_bytes"] <= given
    planned = benchmark.measure("grpo", SMALL, plan_only=True)
    assert "seconds" not in planned
    assert planned["temporary_bytes"] == ran["temporary_bytes"]
    console = rich.console.Console(width=200, record=True, file=open("/dev/null", "w"))
    slow = {**ran, "name": "slow", "ratio": 21.0}
    console.print(benchmark.table([ran | {"ratio": 19.0}, slow, planned], SMALL))
    fast_line, slow_line, plan_line = console.export_text().splitlines()[-4:-1]
    assert "above 20" in slow_line and "above 20" not in fast_line + plan_line


@pytest.mark.parametrize("name", ["grpo", "tempo", "craft", "bilevel_gae", "cbpo", "a3"])
def test_memory_grows_with_the_inputs(name):
    """Four times the rows: about four times the bytes, nothing of the order of their square."""
    few, many = (
        benchmark.measure(name, benchmark.Size(rows, 8, 256), plan_only=True) for rows in (64, 256)
    )
    for what in ("input_bytes", "temporary_bytes"):
        assert many[what] <= 5 * few[what]


def test_names_and_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="no estimators: gspo"):
        benchmark.names(["gspo"])
    with pytest.raises(ValueError, match="a token for every segment"):
        benchmark.Size(rows=2, segments=8, tokens=4)
