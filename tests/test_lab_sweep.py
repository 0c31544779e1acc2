"""Sweeps and cells of the laboratory: borders, seeds, resuming, refused settings."""

import dataclasses
import functools
import itertools
import os
import shutil

import lab_fakes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from focus.lab import statistics
from focus.lab.jobs import num_workers, run_jobs
from focus.lab.specs import WorldSpec, read_arm, read_world, slug
from focus.lab.sweep import (
    Cell,
    Settings,
    area,
    best_of,
    find_learning_rate,
    result_row,
)

SETTINGS = Settings(
    steps=4,
    tokens_per_step=10,
    seeds=12,
    sweep_seeds=3,
    learning_rates=(0.3, 1.0, 3.0),
    widenings=2,
    chunk=5,
    seed=0,
)
WORLD = WorldSpec("easy", (("bonus", 0.1),), "easy bonus=0.1")


def cell(workdir, arm="fast", make_run=lab_fakes.make_run, **settings):
    return Cell(
        WORLD,
        lab_fakes.ARMS[arm],
        dataclasses.replace(SETTINGS, **settings),
        workdir,
        make_run,
    )


def quiet(share, text):
    assert 0 <= share <= 1


# --- learning rates ------------------------------------------------------------------------------


def hump(best):
    return lambda rates: [-((np.log(rate) - np.log(best)) ** 2) for rate in rates]


def test_a_best_rate_inside_the_grid_adds_none():
    found = find_learning_rate(hump(1.1), (0.1, 1.0, 10.0), 5)
    assert found.learning_rates == (0.1, 1.0, 10.0)
    assert found.learning_rate == 1.0 and not found.at_border


@pytest.mark.parametrize(
    "best, rates",
    [
        (90.0, (0.1, 1.0, 10.0, 100.0, 1000.0)),
        (0.002, (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)),
    ],
)
def test_a_grid_is_widened_until_the_best_is_inside(best, rates):
    found = find_learning_rate(hump(best), (0.1, 1.0, 10.0), 5)
    assert found.learning_rates == rates and not found.at_border


def test_a_best_rate_that_stays_at_the_border_is_said():
    found = find_learning_rate(lambda rates: list(rates), (1.0, 2.0), 3)
    assert found.learning_rates == (1.0, 2.0, 4.0, 8.0, 16.0)
    assert found.at_border and found.learning_rate == 16.0
    assert find_learning_rate(hump(9.0), (1.0, 3.0), 0).at_border


def test_of_equal_rates_the_middle_is_taken_and_nothing_is_added():
    found = find_learning_rate(lambda rates: [0.5] * len(rates), (0.1, 1.0, 10.0), 3)
    assert found.learning_rate == 1.0 and len(found.learning_rates) == 3


def test_one_rate_is_no_sweep():
    found = find_learning_rate(lambda rates: list(rates), (1.0,), 3)
    assert found.learning_rates == (1.0,) and not found.at_border


@given(st.dictionaries(st.floats(1e-4, 1e4), st.floats(0, 1), min_size=1, max_size=8))
def test_no_tried_rate_is_better_than_the_one_taken(auc):
    sweep = best_of(auc)
    assert auc[sweep.learning_rate] == max(auc.values())
    assert list(sweep.learning_rates) == sorted(auc)
    assert sweep.auc == tuple(auc[rate] for rate in sweep.learning_rates)


# --- cells ---------------------------------------------------------------------------------------


def test_a_cell_runs_what_the_loop_runs(tmp_path):
    """Chunks, padding and the store change nothing: the slow loop finds the same."""
    job = cell(tmp_path)
    assert not job.finished
    job(quiet)
    assert job.finished
    result, s = job.read(), SETTINGS
    run = lab_fakes.make_run("easy", {"bonus": 0.1}, job.arm, steps=4, tokens_per_step=10)
    wanted = np.stack([run(np.uint32(seed), 3.0).success for seed in range(12)])
    np.testing.assert_allclose(result.curves["success"], wanted, rtol=1e-6)
    assert result.curves["tokens"].shape == (12, 4)
    # Best at the grid's upper end, 3; the rate that was added is worse.
    assert result.sweep.learning_rates == (0.3, 1.0, 3.0, 9.0)
    assert result.sweep.learning_rate == 3.0 and not result.sweep.at_border
    tuned = [run(np.uint32(500_000 + seed), 1.0).success for seed in range(3)]
    assert result.sweep.auc[1] == pytest.approx(np.mean(tuned))

    row = result_row(result, s)
    assert list(row) == [
        *("world", "world_options", "arm", "learning_rate", "seeds", "tokens_per_step", "steps"),
        *("auc", "auc_low", "auc_high", "final", "dose_tokens"),
    ]
    interval = statistics.interval(statistics.mean, wanted.mean(axis=1))
    assert row["auc"] == pytest.approx(wanted.mean())
    assert (row["auc_low"], row["auc_high"]) == pytest.approx((interval.low, interval.high))
    assert row["final"] == pytest.approx(wanted[:, -1].mean())
    assert row["dose_tokens"] == pytest.approx(4 * 10 * 0.2)
    assert row["world"] == "easy" and row["world_options"] == {"bonus": 0.1}
    assert (row["arm"], row["learning_rate"], row["seeds"]) == ("fast", 3.0, 12)


def test_the_size_of_a_chunk_changes_nothing(tmp_path):
    results = []
    for chunk in (1, 4, 64):
        job = cell(tmp_path / str(chunk), chunk=chunk)
        job(quiet)
        results.append(job.read())
    for result in results[1:]:
        assert result.sweep == results[0].sweep
        np.testing.assert_allclose(result.curves["success"], results[0].curves["success"])


@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_killed_cell_goes_on_where_it_was(tmp_path, after):
    """Sweep of 9 runs in 2 chunks, an added rate in 1, evaluation of 12 in 3."""
    straight = cell(tmp_path / "straight")
    straight(quiet)

    class Killed(Exception):
        pass

    count = itertools.count(1)

    def note(share, text):
        if next(count) > after:
            raise Killed

    resumed = cell(tmp_path / "resumed")
    with pytest.raises(Killed):
        resumed(note)
    assert not resumed.finished
    with pytest.raises(ValueError, match="has not finished"):
        resumed.read()
    texts = []
    resumed(lambda share, text: texts.append(text))
    # The first round of the sweep was kept if all of its chunks had come.
    assert ("learning rate 0.3, 1, 3" in texts) == (after < 2)
    assert ("learning rate 9" in texts) == (after < 3)
    a, b = straight.read(), resumed.read()
    assert a.sweep == b.sweep
    for name in a.curves:
        np.testing.assert_array_equal(a.curves[name], b.curves[name])


def test_a_finished_cell_is_not_run_again(tmp_path):
    cell(tmp_path)(quiet)

    def refuse(*args, **kwargs):
        raise AssertionError

    cell(tmp_path, make_run=refuse)(quiet)


@pytest.mark.parametrize("change", [{"seeds": 13}, {"steps": 5}, {"seed": 1}])
def test_a_cell_of_other_settings_is_refused(tmp_path, change):
    cell(tmp_path)(quiet)
    with pytest.raises(ValueError, match="was computed for another .* delete that directory"):
        cell(tmp_path, **change)(quiet)


def test_a_label_that_means_something_else_is_refused(tmp_path):
    cell(tmp_path)(quiet)
    other = dataclasses.replace(lab_fakes.ARMS["fast"], speed=0.3)
    with pytest.raises(ValueError, match="another 'easy bonus=0.1' or 'fast'"):
        Cell(WORLD, other, SETTINGS, tmp_path, lab_fakes.make_run).claim()


def test_a_damaged_cell_is_named_and_can_be_computed_anew(tmp_path):
    job = cell(tmp_path)
    job(quiet)
    path = job.directory / "runs.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"runs\.npz is damaged .* delete its directory"):
        job.read()
    shutil.rmtree(job.directory)
    job(quiet)
    assert job.read().sweep.learning_rate == 3.0
    (job.directory / "sweep.json").write_text("{")
    with pytest.raises(ValueError, match=r"sweep\.json is damaged .* delete it"):
        job.read()


def test_shifted_seeds_are_others_and_arms_share_them(tmp_path):
    shifted = dataclasses.replace(SETTINGS, seed=1)
    seeds = [
        *SETTINGS.evaluation_seeds,
        *SETTINGS.tuning_seeds,
        *shifted.evaluation_seeds,
        *shifted.tuning_seeds,
    ]
    assert len({int(seed) for seed in seeds}) == len(seeds)
    a, b = cell(tmp_path / "a"), cell(tmp_path / "b", seed=1)
    a(quiet)
    b(quiet)
    assert not np.any(a.read().scores == b.read().scores)
    # Paired: what a seed does to one arm it does to another.
    slow = cell(tmp_path / "a", "slow")
    slow(quiet)
    gap = a.read().curves["success"] - slow.read().curves["success"]
    np.testing.assert_allclose(gap, np.broadcast_to(gap[0], gap.shape), atol=1e-6)


def test_a_single_rate_is_taken_as_it_is(tmp_path):
    job = cell(tmp_path, learning_rates=(1.0,))
    job(quiet)
    result = job.read()
    assert result.sweep.learning_rates == (1.0,) and np.isnan(result.sweep.auc[0])
    assert not result.sweep.at_border


def test_a_success_that_is_not_a_number_is_said_with_its_seed(tmp_path):
    def broken(*args, **kwargs):
        run = lab_fakes.make_run(*args, **kwargs)

        return lambda seed, rate: dataclasses.replace(
            run(seed, rate), success=np.nan * run(seed, rate).success
        )

    with pytest.raises(FloatingPointError, match="success is nan after 0 steps with seed 500000"):
        cell(tmp_path, make_run=broken)(quiet)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"seeds": 1}, "seeds must be >= 2, got 1: an interval needs two"),
        ({"sweep_seeds": 0}, "sweep_seeds must be >= 1, got 0"),
        ({"learning_rates": ()}, "an arm whose sweep never ran"),
        ({"learning_rates": (1.0, 0.5)}, "positive and ascending"),
        ({"learning_rates": (0.0, 0.5)}, "positive and ascending"),
        ({"chunk": 0}, "chunk must be >= 1, got 0"),
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"widenings": -1}, "widenings must be >= 0, got -1"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"seed": 5000}, "seed must be <= 4293"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SETTINGS, **settings)


def test_the_area_counts_the_start():
    assert area(np.array([0.0, 1.0])) == 0.5


# --- names ---------------------------------------------------------------------------------------


def test_worlds_and_arms_are_read_from_text():
    assert read_world("easy length=7", lab_fakes.WORLDS) == WorldSpec(
        "easy", (("length", 7),), "easy length=7"
    )
    assert read_world("long: easy  length=9 bonus=.5", lab_fakes.WORLDS) == WorldSpec(
        "easy", (("length", 9), ("bonus", 0.5)), "long"
    )
    assert read_arm("fast", lab_fakes.ARMS) == lab_fakes.ARMS["fast"]
    assert read_arm("mine: slow speed=.3 rule=uniform", lab_fakes.ARMS) == lab_fakes.FakeArm(
        "mine", 1.0, 0.3, "uniform"
    )


@pytest.mark.parametrize(
    "read, text, message",
    [
        (read_world, "esay", "world 'esay' is unknown; choose one of easy"),
        (read_world, "easy size=3", r"world easy has no option size; it has \['bonus', 'length'\]"),
        (read_world, "easy seed=3", "no option seed"),
        (read_world, "easy length", "write 'length' as name=value"),
        (read_world, "easy length=1 length=2", "gives length twice"),
        (read_world, "long:", "names no world"),
        (read_world, "", "names no world"),
        (read_arm, "grop", "arm 'grop' is unknown; choose one of edge, fast, slow"),
        (
            read_arm,
            "fast rate=3",
            r"arm fast has no field rate; it has \['best', 'rule', 'speed'\]",
        ),
        (read_arm, "fast name=x", "no field name"),
    ],
)
def test_text_that_names_nothing_is_refused(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text, lab_fakes.WORLDS if read is read_world else lab_fakes.ARMS)


def test_labels_become_names_of_directories():
    labels = [
        "focus",
        "fork_chain length=40",
        "fork_chain_length=40",
        "a/b",
        "a_b",
        "../x",
        "x" * 99,
    ]
    slugs = [slug(label) for label in labels]
    assert len(set(slugs)) == len(slugs) and slugs[0] == "focus"
    assert not any("/" in s or s.startswith(".") for s in slugs)


# --- jobs ----------------------------------------------------------------------------------------


def write_cores(path, note):
    """A job that says which cores it has."""
    note(0.5, "half")
    path.write_text(repr(sorted(os.sched_getaffinity(0))))


def fail(note):
    raise ValueError("this job cannot work")


def die(note):
    os._exit(1)


def set_up(directory):
    """What a worker does before its first job."""
    (directory / f"setup-{os.getpid()}").touch()


@pytest.mark.parametrize("workers", [1, 2])
def test_jobs_run_here_or_in_processes(tmp_path, workers):
    jobs = [functools.partial(write_cores, tmp_path / str(i)) for i in range(3)]
    notes = []
    setup = functools.partial(set_up, tmp_path)
    run_jobs(jobs, workers=workers, notify=lambda *note: notes.append(note), setup=setup)
    assert {path.name for path in tmp_path.glob("?")} == {"0", "1", "2"}
    assert bool(list(tmp_path.glob("setup-*"))) == (workers > 1)
    for index in range(3):
        assert [n[1:] for n in notes if n[0] == index] == [(0.5, "half"), (1.0, "")]


def test_cells_in_processes_find_the_same(tmp_path):
    here, there = (
        [cell(tmp_path / where, arm) for arm in ("slow", "fast")] for where in ("here", "there")
    )
    run_jobs(here, notify=lambda *note: None)
    run_jobs(there, workers=2, notify=lambda *note: None)
    for a, b in zip(here, there):
        np.testing.assert_array_equal(a.read().curves["success"], b.read().curves["success"])


@pytest.mark.parametrize("workers", [1, 2])
def test_the_error_of_a_job_is_raised(workers):
    with pytest.raises(ValueError, match="this job cannot work"):
        run_jobs([fail, fail], workers=workers, notify=lambda *note: None)


def test_a_worker_that_was_killed_is_said():
    with pytest.raises(RuntimeError, match="a worker was killed.* goes on"):
        run_jobs([die, die], workers=2, notify=lambda *note: None)


def test_there_are_no_more_workers_than_jobs():
    assert num_workers(8, 3) <= 3
    assert num_workers(0, 99) >= 1
    assert num_workers(4, 0) == 1
    with pytest.raises(ValueError, match="workers must be >= 0"):
        num_workers(-1, 3)
