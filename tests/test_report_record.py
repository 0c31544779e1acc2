"""What a run writes for its report, and that it is read again."""

import json

import numpy as np
import pytest
from report_runs import SUMMARY_IDS, SUMMARY_TEXT, decode, make_evaluation, make_step, make_workdir

from focus.report.earned import teaching
from focus.report.record import read_run, record_trees, write_branches, write_trees
from focus.report.transcripts import ENDINGS, ending, record_evaluation


def test_records_turn_nan_into_null_and_keep_the_most_telling_tasks():
    tree, tasks, arrays, advantages = make_step(np.random.default_rng(2), 3)
    arrays["values"][:] = np.nan
    records = record_trees(
        tree, tasks, segment_advantages=advantages, max_tasks=2, max_chars=20, **arrays
    )
    json.dumps(records, allow_nan=False)
    assert len(records) == 2
    members = {t.id for t in tree.trajectories if t.task_id in {r["task_id"] for r in records}}
    assert {t["id"] for r in records for t in r["trajectories"]} == members
    assert all(s["value"] is None for r in records for t in r["trajectories"] for s in t["states"])
    assert "characters left out]" in records[0]["question"]
    with pytest.raises(ValueError, match="segment_advantages has shape"):
        record_trees(tree, tasks, segment_advantages=advantages[:, :1], max_tasks=1, **arrays)
    with pytest.raises(ValueError, match="no task"):
        record_trees(tree, [], segment_advantages=advantages, max_tasks=1, **arrays)


def test_summaries_are_decoded_and_only_counted_without_a_decoder():
    tree, tasks, arrays, advantages = make_step(np.random.default_rng(5), 0, num_tasks=8)
    arguments = dict(segment_advantages=advantages, max_tasks=8, **arrays)

    def segments(**kwargs):
        records = record_trees(tree, tasks, **arguments, **kwargs)
        return [s for r in records for t in r["trajectories"] for s in t["segments"]]

    decoded, counted = segments(decode=decode), segments()
    assert any(s["summary_tokens"] for s in decoded)
    for with_text, without in zip(decoded, counted, strict=True):
        has_summary = with_text["summary_tokens"] == len(SUMMARY_IDS)
        assert with_text["summary"] == (SUMMARY_TEXT if has_summary else None)
        assert without == with_text | {"summary": None}


def test_a_resumed_run_replaces_the_steps_it_plays_again(tmp_path):
    def rows(step, mark):
        return [{"step": step, "mark": mark}] * 2

    for step in range(4):
        write_branches(tmp_path, step, rows(step, "old"))
        write_trees(tmp_path, step, [{"task_id": "old", "trajectories": []}])
    with open(tmp_path / "branches.jsonl", "a") as file:
        file.write('{"step": 4, "ma')  # a process killed in the middle of a write
    for step in (2, 3):
        write_branches(tmp_path, step, rows(step, "new"))
        write_trees(tmp_path, step, [{"task_id": "new", "trajectories": []}])
    run = read_run(tmp_path)
    expected = [(0, "old")] * 2 + [(1, "old")] * 2 + [(2, "new")] * 2 + [(3, "new")] * 2
    assert [(row["step"], row["mark"]) for row in run.branches] == expected
    assert [record["task_id"] for record in run.trees] == ["old", "old", "new", "new"]
    assert not [path for path in tmp_path.rglob(".*")], "temporary files stay behind"


def test_the_tasks_that_teach_most_are_recorded_whatever_their_place():
    rng = np.random.default_rng(11)
    tree, tasks, arrays, advantages = make_step(rng, 0, num_tasks=8, branched=False)
    everything = record_trees(tree, tasks, segment_advantages=advantages, max_tasks=8, **arrays)
    scores = {record["task_id"]: teaching(record) for record in everything}
    kept = record_trees(tree, tasks, segment_advantages=advantages, max_tasks=3, **arrays)
    assert kept == everything[:3]
    assert [scores[r["task_id"]] for r in kept] == sorted(scores.values(), reverse=True)[:3]
    places = [[task.id for task in tasks].index(r["task_id"]) for r in kept]
    assert places != [0, 1, 2], "the draw has to tell first tasks from telling ones"
    # The same of reversed tasks: what is kept depends on what happened.
    again = record_trees(tree, tasks[::-1], segment_advantages=advantages, max_tasks=3, **arrays)
    assert again == kept


def test_what_was_trained_with_stands_beside_what_the_estimator_gave():
    tree, tasks, arrays, advantages = make_step(np.random.default_rng(2), 0)
    trained = advantages * 3
    trained[:, 0] = np.nan
    records = record_trees(
        tree,
        tasks,
        segment_advantages=advantages,
        trained_advantages=trained,
        max_tasks=9,
        **arrays,
    )
    row = {t.id: b for b, t in enumerate(tree.trajectories)}
    for record in records:
        for t in record["trajectories"]:
            for j, segment in enumerate(t["segments"]):
                wanted = (
                    None if j == 0 else pytest.approx(3 * advantages[row[t["id"]], j], abs=1e-5)
                )
                assert segment["trained"] == wanted
                assert segment["advantage"] == pytest.approx(advantages[row[t["id"]], j], abs=1e-5)
    with pytest.raises(ValueError, match="trained"):
        record_trees(
            tree,
            tasks,
            segment_advantages=advantages,
            trained_advantages=trained[:1],
            max_tasks=1,
            **arrays,
        )


def test_an_evaluation_counts_every_task_and_writes_down_the_first():
    trajectories, tasks = make_evaluation(np.random.default_rng(3), 0.5, num_tasks=200)
    records = record_evaluation(trajectories[::-1], tasks, max_transcripts=5)
    json.dumps(records, allow_nan=False)
    assert [r["task_id"] for r in records] == [t.id for t in tasks]
    assert [r["segments"] is not None for r in records] == [True] * 5 + [False] * 195
    by_id = {t.task_id: t for t in trajectories}
    for record, task in zip(records, tasks):
        trajectory = by_id[task.id]
        assert record["hops"] == task.data["hops"] and record["gold"] == task.data["answer"]
        assert record["ending"] == ending(trajectory) in ENDINGS
        assert (record["ending"] == "solved") == trajectory.success
        assert record["turns"] == len(trajectory.segments)
    found = {r["ending"] for r in records}
    assert {"solved", "wrong", "turn_limit", "cut", "error"} <= found
    with pytest.raises(ValueError, match="no trajectory of task"):
        record_evaluation(trajectories[1:], tasks)


@pytest.mark.parametrize("name", ["metrics.jsonl", "branches.jsonl"])
def test_a_line_that_is_being_written_is_not_read_yet(tmp_path, name):
    make_workdir(tmp_path)
    path = tmp_path / name
    before = read_run(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 6, "valu')
    assert read_run(tmp_path) == before
    # A whole line without its line break is one that was written.
    path.write_bytes(whole.rstrip(b"\n"))
    assert read_run(tmp_path) == before
