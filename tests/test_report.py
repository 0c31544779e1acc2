"""The run report: complete, self-contained, safe with hostile text, honest about gaps."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import HOSTILE, Outline, decode, make_step, make_workdir

from focus.report import branch_figures, figures, trees
from focus.report.earned import teaching
from focus.report.html import build_report, render
from focus.report.intervals import wilson_interval
from focus.report.ledger import ledger
from focus.report.record import read_run, record_trees, write_trees
from focus.report.svg import round_ticks
from focus.tasks.base import Task
from focus.types import Generation, RolloutTree, Segment, State, Trajectory


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return make_workdir(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(workdir):
    return build_report(workdir).read_text(encoding="utf-8")


def test_every_recorded_trajectory_is_in_the_page_below_its_parent(workdir, page):
    outline = Outline(page)
    text = "".join(outline.text)
    recorded = [t for record in read_run(workdir).trees for t in record["trajectories"]]
    assert len(recorded) > 20 and any(t["parent"] for t in recorded)
    assert outline.parents == {t["id"]: t["parent"] for t in recorded}
    for trajectory in recorded:
        for segment in trajectory["segments"]:
            assert segment["text"] in text and segment["observation"] in text
            assert segment["summary"] is None or segment["summary"] in text
    for record in read_run(workdir).trees:
        assert record["question"] in text and record["gold"] in text


def signed(number):
    return f"{number:+.3f}".replace("-", "−")


def test_every_turn_tells_what_it_earned_beside_what_it_was_trained_with(workdir, page):
    turns = Outline(page).turns
    expected = {}
    for record in read_run(workdir).trees:
        for t in record["trajectories"]:
            for j, segment in enumerate(t["segments"]):
                after = t["states"][j + 1]["refined"]
                if j == len(t["segments"]) - 1 and t["outcome"] is not None:
                    after = t["outcome"]
                expected[f"{t['id']}:{j}"] = after - t["states"][j]["refined"], segment["trained"]
    assert turns.keys() == expected.keys()
    assert {trained is None for _, trained in expected.values()} == {True, False}
    for name, (earned, trained) in expected.items():
        text = " ".join("".join(turns[name]).split())
        assert text.startswith(f"earned {signed(earned)}"), (name, text)
        said = "not trained on" if trained is None else f"trained with A {signed(trained)}"
        assert said in text
    # The one with the largest change of each rollout, and no other.
    marked = {name for name, text in turns.items() if "turning point" in "".join(text)}
    for trajectory in {name.rsplit(":", 1)[0] for name in turns}:
        own = {n: abs(e) for n, (e, _) in expected.items() if n.rsplit(":", 1)[0] == trajectory}
        assert [n for n in own if n in marked] == [max(own, key=own.get)]


def test_colours_filters_and_links_are_there_for_the_script(page):
    outline = Outline(page)
    ids = {a["id"] for a in outline.attributes if "id" in a}
    assert {"colouring", "only", "order", "search", "verdict", "step", "count"} <= ids
    links = {a["href"][1:] for a in outline.attributes if a.get("class") == "anchor"}
    assert links == outline.turns.keys() <= ids
    targets = {a["href"][1:] for a in outline.attributes if a.get("href", "").startswith("#")}
    assert targets <= ids
    shaded = [a["style"] for a in outline.attributes if "shade" in (a.get("class") or "").split()]
    assert shaded and all(re.fullmatch(r"--e:[^;]+;--t:[^;]+", style) for style in shaded)
    rollouts = [a for a in outline.attributes if (a.get("class") or "").startswith("rollout ")]
    for name in ("branches", "against", "troubled"):
        assert {a[f"data-{name}"] == "0" for a in rollouts} == {True, False}, name


def test_figures_have_their_numbers_as_a_table(workdir, page):
    metrics = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    tables = {
        name: list(csv.DictReader("".join(text).splitlines()))
        for name, text in Outline(page).tables.items()
    }
    assert len(tables) == page.count("<figure>") > 14
    norms = [(float(r["training step"]), float(r["norm"])) for r in tables["Gradient norm"]]
    assert norms == [(m["step"], pytest.approx(m["policy/grad_norm"], rel=1e-5)) for m in metrics]
    bars = [r for r in tables["Generation budget by kind"] if r["series"] == "branches"]
    heights = [float(r["tokens per step, to"]) - float(r["tokens per step"]) for r in bars]
    assert heights == pytest.approx([m["tokens/branch"] for m in metrics], rel=1e-3)


def test_text_of_tools_cannot_become_markup(tmp_path):
    tree, tasks, arrays, advantages = make_step(np.random.default_rng(1), 0)
    act = Generation("act", (1,), (2,), (-1.0,), "stop")
    summary = Generation("summary", (1,), (9,), (-1.0,), "stop")
    segment = Segment((act, summary), HOSTILE, HOSTILE * 5)
    state = State(None, None, (1,), 0)
    hostile = Trajectory(
        HOSTILE, "t", 0, (state, state), (segment,), None, False, "failed", error=HOSTILE
    )
    ones = np.ones((1, 2))
    records = record_trees(
        RolloutTree((hostile,)),
        {"t": Task("t", HOSTILE, {"gold": HOSTILE})},
        values=ones,
        stds=ones,
        refined=ones,
        refined_stds=ones,
        segment_advantages=ones[:, :1],
        max_tasks=1,
        decode=decode,
    )
    write_trees(tmp_path, 0, records)
    (tmp_path / "config.json").write_text(json.dumps({"method": HOSTILE, HOSTILE: HOSTILE}))
    outline = Outline(build_report(tmp_path).read_text())
    assert outline.tags.count("script") == 1 and "img" not in outline.tags
    assert not any(name.startswith("on") for attrs in outline.attributes for name in attrs)
    # question, gold, action, observation twice (its preview is shorter), summary, error, config
    assert "".join(outline.text).count("<script>alert('x')</script>") >= 10


def test_page_asks_for_nothing_outside_itself(page):
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|XMLHttp", page)
    for attrs in Outline(page).attributes:
        assert "src" not in attrs
        assert attrs.get("href", "#").startswith(("#", "data:,"))


@pytest.mark.parametrize(
    "missing, said",
    [
        ("metrics.jsonl", "This run wrote no metrics.jsonl."),
        ("branches.jsonl", "no branched states were recorded."),
        ("trees", "This run recorded no trajectory trees."),
        ("summary.json", "This run wrote no summary.json."),
        ("config.json", "This run wrote no config.json."),
    ],
)
def test_a_missing_part_is_left_out_and_named(workdir, page, tmp_path, missing, said):
    shutil.copytree(workdir, tmp_path / "run")
    target = tmp_path / "run" / missing
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    partial = build_report(tmp_path / "run").read_text()
    assert said in partial and said not in page
    Outline(partial)


def test_header_and_ledger_show_the_summary(workdir, page):
    summary = json.loads((workdir / "summary.json").read_text())
    text = "".join(Outline(page).text)
    half = 100 * 1.96 * summary["success_std_error"]
    assert "focus on deep_search" in text and "jax 0.10.2" in text
    assert "26.0 → 64.0 %" in text
    assert f"95 % interval: {64 - half:.1f} to {64 + half:.1f} %" in text
    assert f"{sum(summary['wall_s'].values()) / 60:.1f} min" in text
    (health,) = [rows for name, rows in ledger(read_run(workdir)) if name == "Health"]
    assert {label: value for label, value, _, _ in health} == {
        "controller's share of the time of a step": "2.1 %",
        "branch prefix computed again": "4.3 %",
        "packing efficiency": "82.0 %",
        "recompilations after warm-up": "0",
        "technical failures": "3",
        "rollouts played again after a resume": "17",
        "tokens of rollouts played again": "1,234",
    }
    (seconds,) = [rows for name, rows in ledger(read_run(workdir)) if name == "Wall seconds"]
    assert len(seconds) == len(summary["wall_s"])


def test_header_falls_back_on_metrics_without_a_summary(workdir, tmp_path):
    shutil.copytree(workdir, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    metrics = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").open()]
    seconds = sum(v for row in metrics for k, v in row.items() if k.startswith("time/"))
    text = "".join(Outline(build_report(tmp_path / "run").read_text()).text)
    assert "focus on deep_search" in text and f"{seconds / 60:.1f} min" in text
    # The first evaluation of the metrics is not the policy before training.
    assert "64.0 %" in text and "→ 64.0" not in text


def test_a_report_of_a_run_that_goes_on_says_how_far_it_is(workdir, tmp_path):
    shutil.copytree(workdir, tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"steps": 20}))
    # The summary is of an earlier end: the run was resumed with more steps.
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        row = {"step": 6, "heldout/success": 0.7, "heldout/std_error": 0.03}
        file.write(json.dumps(row) + "\n" + '{"step": 7, "tokens/ba')
    text = "".join(Outline(build_report(tmp_path / "run").read_text()).text)
    assert "not finished: 7 of 20 steps so far" in text
    assert "26.0 → 70.0 %" in text
    finished = "".join(Outline(build_report(workdir).read_text()).text)
    assert "not finished" not in finished


def test_a_run_recorded_before_there_was_so_much_to_record_is_still_read(workdir, tmp_path):
    """Trees without what was trained with, branches without gains, no evaluations."""
    old = tmp_path / "run"
    shutil.copytree(workdir, old, ignore=shutil.ignore_patterns("evaluations"))
    for path in (old / "trees").iterdir():
        content = json.loads(path.read_text())
        for record in content["tasks"]:
            del record["hops"]
            for t in record["trajectories"]:
                for segment in t["segments"]:
                    del segment["trained"], segment["error"]
        path.write_text(json.dumps(content))
    rows = [json.loads(line) for line in (old / "branches.jsonl").open()]
    for row in rows:
        del row["gain"], row["noise_var"]
    (old / "branches.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outline = Outline(build_report(old).read_text())
    text = "".join(outline.text)
    assert "no evaluation was recorded" in text and "chosen for were not recorded" in text
    segments = {
        f"{t['id']}:{j}": segment["advantage"]
        for record in read_run(workdir).trees
        for t in record["trajectories"]
        for j, segment in enumerate(t["segments"])
    }
    assert outline.turns.keys() == segments.keys()
    for name, advantage in segments.items():
        turn = " ".join("".join(outline.turns[name]).split())
        assert f"A {signed(advantage)}" in turn and "trained" not in turn


def test_heldout_episodes_are_counted_by_hops_and_ending_and_can_be_read(workdir, page):
    run = read_run(workdir)
    outline = Outline(page)
    tables = {n: list(csv.DictReader("".join(t).splitlines())) for n, t in outline.tables.items()}
    last = run.evaluations[-1]
    for hops in (2, 3, 4):
        tasks = [t for t in last["tasks"] if t["hops"] == hops and t["outcome"] is not None]
        share = sum(t["ending"] == "solved" for t in tasks) / len(tasks)
        rows = tables["Held-out success by hops"]
        own = [r for r in rows if r["series"] == f"{hops} hops, {len(tasks)} tasks"]
        assert float(own[-1]["finished training steps"]) == last["step"]
        assert float(own[-1]["success rate"]) == pytest.approx(share, rel=1e-5)
    endings = [r["text"] for r in tables["How held-out episodes ended"]]
    for kind, said in (("solved", "solved"), ("wrong", "ended with a wrong answer")):
        number = sum(t["ending"] == kind for t in last["tasks"])
        assert f"step {last['step']}: {number} of {len(last['tasks'])} {said}" in endings
    text = "".join(outline.text)
    for task in last["tasks"]:
        for segment in task["segments"] or ():
            assert segment["text"] in text and segment["observation"] in text


def test_learning_curve_starts_before_training_and_has_error_bars():
    metrics = [
        {"step": 0, "tokens/cumulative": 100},
        {"step": 1, "tokens/cumulative": 220, "heldout/success": 0.5, "heldout/std_error": 0.05},
    ]
    for chart, end in (
        (figures.success_by_step(metrics, 0.2), "finished training steps 2"),
        (figures.success_by_tokens(metrics, 0.2), "generated tokens, cumulative 220"),
    ):
        start = end.rsplit(" ", 1)[0] + " 0"
        assert re.findall(r"<title>(.*?)</title>", chart.svg) == [
            f"{start}: held-out 0.200",
            f"{end}: held-out 0.500 [0.402, 0.598]",
        ]
        # The bar reaches from 0.402 to 0.598 on the axis: its length against the dots' distance.
        (bar,) = re.findall(r'<path class="s2 stroke" d="M\S+ (\S+?)V(\S+?)M', chart.svg)
        dots = [float(y) for y in re.findall(r'<circle [^>]*cy="(\S+?)"', chart.svg)]
        length = (float(bar[0]) - float(bar[1])) / (dots[0] - dots[1])
        assert length == pytest.approx(2 * 1.96 * 0.05 / 0.3, abs=0.01)


def test_every_recorded_phase_is_drawn_even_one_without_a_label():
    rows = [{"step": 0, "time/rollout": 2.0}, {"step": 1, "time/new_phase": 1.0, "time/push": 0.5}]
    chart = figures.wall_time(rows)
    assert [label for _, _, label in chart.legend] == [
        "rollouts",
        "weights to the engine",
        "new phase",
    ]
    assert len({css for css, _, _ in chart.legend}) == 3
    assert len(set(figures.PHASE_COLOURS)) >= 10


def test_a_method_without_branches_says_so_once(tmp_path):
    text = build_report(make_workdir(tmp_path, num_steps=3, branched=False)).read_text()
    assert text.count("this method sampled no branches") == 1
    assert "Where continuations went" not in text
    assert "Success by step" in text and "generated: base rollouts" in text


@pytest.mark.parametrize("num_steps", [1, 2, 130])
def test_runs_of_any_length_give_finite_drawings(tmp_path, num_steps):
    workdir = make_workdir(
        tmp_path, num_steps=num_steps, record_every=50, num_tasks=2, group_size=2
    )
    page = build_report(workdir).read_text()
    assert not re.search(r'="[^"]*\b(nan|inf|None)\b[^"]*"', page)
    assert page.count("<svg viewBox") > 10


@pytest.mark.parametrize("name", ["metrics.jsonl", "branches.jsonl"])
def test_a_corrupt_line_is_named_by_file_and_line(workdir, tmp_path, name):
    shutil.copytree(workdir, tmp_path / "run")
    path = tmp_path / "run" / name
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:25]
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"{name}, line 3: not JSON"):
        build_report(tmp_path / "run")


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to report"):
        build_report(tmp_path)
    script = Path(__file__).parents[1] / "scripts" / "report.py"
    command = [sys.executable, str(script), "--workdir", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": "."})
    assert done.returncode == 2 and "no run directory" in done.stderr


def test_page_stays_under_its_size_limit_and_keeps_what_teaches_most(workdir, page):
    run = read_run(workdir)
    limit = len(page.encode()) * 4 // 5
    small = render(run, max_bytes=limit)
    assert len(small.encode()) <= limit
    shown = re.findall(r"· task (train/\S+) ·", small)
    recorded = [record["task_id"] for record in trees.ranked(run.trees)]
    assert 0 < len(shown) < len(recorded)
    assert set(shown) == set(recorded[: len(shown)])
    # The best of every step come first; none of them goes before the second of any.
    steps = {record["step"] for record in run.trees}
    for record in trees.ranked(run.trees)[: len(steps)]:
        others = [teaching(r) for r in run.trees if r["step"] == record["step"]]
        assert teaching(record) == max(others)
    assert f"{len(recorded) - len(shown)} of {len(recorded)} recorded trees are left out" in small
    assert "left out to keep" not in page
    steps_shown = [int(s) for s in re.findall(r'<details class="task" data-step="(\d+)"', page)]
    assert steps_shown == sorted(steps_shown, reverse=True), "the newest come first"


@given(st.floats(1e-3, 10.0), st.floats(0.01, 10.0))
@settings(deadline=None, max_examples=30)
def test_advantage_colours_are_symmetric_and_saturate(advantage, limit):
    def opacity(a):
        return float(trees.advantage_colour(a, limit).rstrip(")").split(",")[-1])

    assert opacity(advantage) == opacity(-advantage) <= trees.MAX_OPACITY
    assert opacity(limit) == opacity(5 * limit) == trees.MAX_OPACITY
    assert trees.advantage_colour(limit, limit) != trees.advantage_colour(-limit, limit)
    assert trees.advantage_colour(0.0, limit) == trees.advantage_colour(None, limit)


def test_calibration_figure_matches_a_slow_reference():
    rng = np.random.default_rng(3)
    rows = [
        {"step": 0, "turn": 0, "value": v, "std": 0.1, "refined": v, "mean": m / 4, "count": 4}
        for v, m in zip(rng.random(200).round(3), rng.integers(0, 5, 200))
    ]
    chart = branch_figures.calibration_chart(rows, "value", "", "s1", "")
    drawn = set(re.findall(r"value (\S+), outcome (\S+) \[.*?, n = (\d+)<", chart.svg))
    expected = set()
    for b in range(10):
        inside = [r for r in rows if min(int(r["value"] * 10), 9) == b]
        value = sum(r["value"] for r in inside) / len(inside)
        outcome = sum(r["mean"] for r in inside) / len(inside)
        expected.add((f"{value:.2f}", f"{outcome:.2f}", str(4 * len(inside))))
    assert drawn == expected


def test_uncertainty_figure_recovers_the_true_error_from_noisy_branches():
    """With k = 2 the raw squared error is far above the truth; the corrected one is not."""
    rng = np.random.default_rng(4)
    rows = []
    for _ in range(20_000):
        std = rng.choice([0.05, 0.2])
        chance = rng.uniform(0.3, 0.7)
        value = chance + std * rng.choice([-1, 1])
        rows.append({"value": value, "std": std, "mean": rng.binomial(2, chance) / 2, "count": 2})
    chart = branch_figures.uncertainty_chart(rows)
    points = re.findall(r"variance (\S+), error (\S+),", chart.svg)
    for variance, error in points:
        assert abs(float(error) - float(variance)) < 0.02, points


@given(st.integers(1, 500), st.floats(0, 1))
@settings(deadline=None, max_examples=30)
def test_wilson_interval_holds_the_share_and_shrinks_with_data(count, share):
    low, high = wilson_interval(share, count)
    wider = wilson_interval(share, count / 2)
    assert 0 <= low <= share + 1e-9 and share - 1e-9 <= high <= 1
    assert high - low <= wider[1] - wider[0] + 1e-12


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
@settings(deadline=None, max_examples=30)
def test_ticks_lie_inside_the_axis(low, width):
    ticks = round_ticks(low, low + width)
    assert 2 <= len(ticks) <= 11
    assert all(low - 0.01 * width <= t <= low + 1.01 * width for t in ticks)


def test_page_runs_in_a_browser_without_errors(workdir, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium on this machine")
    path = build_report(workdir, tmp_path / "page.html")
    switches = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --enable-logging=stderr"
    ).split()
    done = subprocess.run(
        [browser, *switches, f"--user-data-dir={tmp_path}/profile", "--dump-dom",
         f"file://{path}#open"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    rollouts = done.stdout.count('class="rollout rollout"')
    assert rollouts and f"{rollouts} of {rollouts} rollouts" in done.stdout
    details = re.findall(r'<details class="(?:task"|rollout)[^>]*>', done.stdout)
    assert details and all(" open" in tag for tag in details)


def test_a_summary_stands_beside_the_turns_that_it_replaced(workdir, page):
    turns, seen = Outline(page).turns, 0
    for record in read_run(workdir).trees:
        for t in record["trajectories"]:
            start = 0
            for j, segment in enumerate(t["segments"]):
                if segment["summary"] is None:
                    continue
                seen += 1
                text = "".join(turns[f"{t['id']}:{j}"])
                replaced = text[text.index("what it replaced") :]
                first, last = t["states"][start]["turn"], t["states"][j]["turn"]
                assert f"turns {first} to {last}" in replaced
                for place, other in enumerate(t["segments"]):
                    inside = start <= place <= j
                    assert (f"> {other['text']}\n{other['observation']}" in replaced) == inside
                start = j + 1
    assert seen > 2
