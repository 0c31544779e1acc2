"""The run report: complete, self-contained, safe with hostile text, honest about gaps."""

import html
import html.parser
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.report import branch_figures, figures, trees
from focus.report.html import build_report, ledger, render
from focus.report.intervals import wilson_interval
from focus.report.record import read_run, record_trees, write_branches, write_trees
from focus.report.svg import round_ticks
from focus.rollout.controller import BranchedState
from focus.tasks.base import Task
from focus.types import Generation, RolloutTree, Segment, State, Trajectory

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)> & \"quoted\" </details></pre>"
SUMMARY_IDS = tuple(range(7000, 7018))
SUMMARY_TEXT = "Santiago is the capital of Chile; the currency is open."
WORDS = "Chile capital Santiago currency Peso borders Peru Bolivia region South America".split()


def make_trajectory(rng, ident, task_id, group, *, parent=None, start=0, solve=0.4, max_turns=7):
    """A trajectory with turns, observations, now and then a summary or a cut."""
    num_segments = int(rng.integers(1, max_turns - start)) if start < max_turns - 1 else 1
    states, segments, span = [], [], 0
    prompt = tuple(range(60 + 30 * start))
    for j in range(num_segments + 1):
        states.append(State(None, None, prompt, start + j, span))
        if j == num_segments:
            break
        act = tuple(range(int(rng.integers(4, 14))))
        generations = [Generation("act", prompt, act, (-0.5,) * len(act), "stop", span=span)]
        query = " ".join(rng.choice(WORDS, 2))
        observation = "\n".join(
            f"{i} {rng.choice(WORDS)}: {' '.join(rng.choice(WORDS, 4))}" for i in range(1, 6)
        )
        text, info = f'search("{query}")', {"tool": "search"}
        if j % 2:
            text, observation = f"open({j})", " ".join(rng.choice(WORDS, 30))
        prompt = prompt + act + tuple(range(30))
        if j == num_segments - 1:
            text, observation = f'answer("{rng.choice(WORDS)}")', ""
        elif rng.random() < 0.08:
            logp = (-0.4,) * len(SUMMARY_IDS)
            generations.append(Generation("summary", prompt, SUMMARY_IDS, logp, "stop"))
            prompt, span = tuple(range(90)), span + 1
        segments.append(Segment(tuple(generations), text, observation, info=info))
    draw = rng.random()
    end, outcome, error = "terminal", float(draw < solve), None
    if draw > 0.97:
        end, outcome, error = "failed", None, "EngineError: the server closed the connection"
    elif draw > 0.9:
        end, outcome = "budget", None
    elif draw > 0.85:
        end = "turn_limit"
    return Trajectory(
        id=ident,
        task_id=task_id,
        group_id=group,
        states=tuple(states),
        segments=tuple(segments),
        outcome=outcome,
        success=outcome == 1.0,
        end=end,
        parent=None if parent is None else parent.id,
        parent_state=None if parent is None else start - parent.states[0].turn,
        error=error,
    )


def decode(ids):
    """Knows summaries only: actions are not to be decoded here."""
    return {SUMMARY_IDS: SUMMARY_TEXT, (9,): HOSTILE}[tuple(ids)]


def branch_rows(tree, step, arrays, rng):
    """Rows of `branches.jsonl`, one per branched state."""
    members = {}
    for branch in tree.branches:
        members.setdefault((branch.parent, branch.parent_state), []).append(branch)
    index = {t.id: i for i, t in enumerate(tree.trajectories)}
    rows = []
    for (parent, state), branches in members.items():
        at = index[parent], state
        scored = [b for b in branches if b.outcome is not None]
        stat = BranchedState(
            trajectory=parent,
            task_id=branches[0].task_id,
            state=state,
            turn=tree.trajectories[at[0]].states[state].turn,
            value=float(arrays["values"][at]),
            std=float(arrays["stds"][at]),
            refined=float(arrays["refined"][at]),
            refined_std=float(arrays["refined_stds"][at]),
            started=len(branches),
            count=len(scored),
            mean=float(np.mean([b.outcome for b in scored])) if scored else None,
            cost_predicted=float(40 + 10 * rng.random()),
            cost_actual=float(np.mean([b.num_tokens for b in scored])) if scored else None,
        )
        rows.append({"step": step, **stat.to_dict()})
    return rows


def make_step(rng, step, *, num_tasks=4, group_size=4, branched=True, progress=0.5):
    """A step's tree, its tasks and arrays as the training loop would hand them over.

    Every base state has a true success chance; its critic value errs from it by about the
    standard deviation it states, its branches are drawn from it and refine it.
    """
    tasks, base, branches = [], [], []
    for group in range(num_tasks):
        gold = str(rng.choice(WORDS))
        question = f"currency of the country whose capital is {rng.choice(WORDS)}?"
        task = Task(f"train/{step:04d}{group}", question, {"gold": gold})
        tasks.append(task)
        for member in range(group_size):
            ident = f"{step}/{group}.{member}"
            solve = 0.2 + 0.5 * progress
            base.append(make_trajectory(rng, ident, task.id, group, solve=solve))

    def branch(parent, state, member, chance):
        return make_trajectory(
            rng,
            f"{parent.id}/{state}.{member}",
            parent.task_id,
            parent.group_id,
            parent=parent,
            start=state + parent.states[0].turn,
            solve=0.85 * chance,
        )

    chances = {t.id: rng.beta(2, 3 - 1.5 * progress, len(t.states)) for t in base}
    counts = {}
    for index in rng.choice(len(base), len(base) // 2 if branched else 0, replace=False):
        parent = base[index]
        state, count = int(rng.integers(0, len(parent.segments))), int(rng.choice([1, 2, 4]))
        counts[parent.id, state] = count
        branches += [branch(parent, state, m, chances[parent.id][state]) for m in range(count)]
    if branched:
        branches.append(branch(branches[0], 0, 0, 0.5))

    tree = RolloutTree(tuple(base), tuple(branches))
    shape = len(tree.trajectories), max(len(t.states) for t in tree.trajectories)
    values, stds, refined, refined_stds = (np.full(shape, np.nan) for _ in range(4))
    advantages = np.full((shape[0], shape[1] - 1), np.nan)
    for row, t in enumerate(tree.trajectories):
        num_states = len(t.states)
        chance = chances.get(t.id, rng.beta(2, 2, num_states))
        std = 0.04 + 0.2 * rng.random(num_states)
        value = np.clip(chance + std * rng.normal(size=num_states), 0.01, 0.99)
        values[row, :num_states], stds[row, :num_states] = value, std
        refined[row, :num_states], refined_stds[row, :num_states] = value, std
        for state in range(num_states):
            if (t.id, state) in counts:
                outcomes = [
                    b.success for b in branches if (b.parent, b.parent_state) == (t.id, state)
                ]
                weight = std[state] ** 2 / (std[state] ** 2 + 0.2 / len(outcomes))
                refined[row, state] += weight * (np.mean(outcomes) - value[state])
                refined_stds[row, state] *= math.sqrt(1 - weight)
        refined[row, num_states - 1] = t.outcome or 0.0
        advantages[row, : num_states - 1] = np.diff(refined[row, :num_states])
    arrays = {"values": values, "stds": stds, "refined": refined, "refined_stds": refined_stds}
    return tree, tasks, arrays, advantages


def make_workdir(workdir, *, num_steps=6, record_every=2, branched=True, seed=0, **sizes) -> Path:
    """Writes what a training run leaves behind."""
    workdir.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    lines, cumulative = [], 0
    for step in range(num_steps):
        progress = step / max(num_steps - 1, 1)
        tree, tasks, arrays, advantages = make_step(
            rng, step, branched=branched, progress=progress, **sizes
        )
        if branched:
            write_branches(workdir, step, branch_rows(tree, step, arrays, rng))
        if step % record_every == 0 or step == num_steps - 1:
            records = record_trees(
                tree, tasks, segment_advantages=advantages, max_tasks=2, decode=decode, **arrays
            )
            write_trees(workdir, step, records)
        base, branch, summary = 3900 + 300 * rng.random(), 3500 + 300 * rng.random(), 180.0
        if not branched:
            base, branch, summary = 7600 + 300 * rng.random(), 0, 180.0
        cumulative += int(base + branch + summary)
        row = {
            "step": step,
            "train/success": float(np.clip(0.25 + 0.4 * progress + rng.normal(0, 0.05), 0, 1)),
            "tokens/base": int(base),
            "tokens/summary": int(summary),
            "tokens/observation": 5200,
            "tokens/prefill": 21000,
            "tokens/cached": 18000,
            "tokens/cumulative": cumulative,
            "budget": 8192,
            "policy/loss": -0.01,
            "policy/grad_norm": float(0.5 + 0.2 * rng.random()),
            "policy/entropy": float(1.2 - 0.5 * progress),
            "policy/clip_fraction": float(0.02 + 0.01 * rng.random()),
            "logp_difference/mean": 2e-6,
            "logp_difference/max": 3e-5,
            "time/rollout": float(3.5 + rng.random()),
            "time/score": 0.6,
            "time/critic": 0.2,
            "time/credit": 0.01,
            "time/update": 1.9,
            "time/push": 0.3,
            "time/record": 0.02,
            "dose/tokens": 7400,
            "dose/steps": 4,
            "packing_efficiency": 0.82,
        }
        if branched:
            row |= {
                "tokens/branch": int(branch),
                "time/controller": 0.15,
                "critic/error": float(0.06 * (1 - 0.7 * progress) + rng.normal(0, 0.012)),
                "critic/brier": float(0.22 - 0.05 * progress),
            }
        if step % 10 == 0 or step == num_steps - 1:
            row["heldout/success"] = float(0.3 + 0.34 * progress)
            row["heldout/std_error"] = 0.034
            row["time/evaluate"] = 2.0
        lines.append(json.dumps(row))
    (workdir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rows = [json.loads(line) for line in lines]

    def total(key):
        return sum(row.get(key, 0) for row in rows)

    phases = sorted({key[5:] for row in rows for key in row if key.startswith("time/")})
    config = {"method": "focus" if branched else "grpo", "seed": seed}
    config["task"] = {"name": "deep_search", "hops": [2, 4]}
    config["learner"] = {"learning_rate": 3e-4, "row_length": 512, "schedule": None}
    summary = {
        "method": config["method"],
        "seed": seed,
        "task": "deep_search",
        "versions": {"jax": "0.10.2", "flax": "0.12.8", "python": "3.11"},
        "steps": num_steps,
        "success_before": 0.26,
        "success_after": 0.64,
        "success_std_error": 0.034,
        "budget_per_step": 8192,
        "max_step_tokens": 8100,
        "generated_tokens": {k: total(f"tokens/{k}") for k in ("base", "branch", "summary")},
        "other_tokens": {k: total(f"tokens/{k}") for k in ("observation", "prefill", "cached")},
        "replayed": {"rollouts": 17, "tokens": 1234},
        "dose": {"tokens": total("dose/tokens"), "optimizer_steps": total("dose/steps")},
        "wall_s": {phase: total(f"time/{phase}") for phase in phases}
        | {"checkpoint": 1.5, "compile": 40.0, "warm_start": 100.0},
        "controller_share": 0.021,
        "prefix_recomputed_share": 0.043,
        "packing_efficiency": 0.82,
        "recompilations_after_warmup": 0,
        "technical_failures": 3,
        "num_parameters": 1_234_567,
        "report": "report.html",
    }
    (workdir / "config.json").write_text(json.dumps(config))
    (workdir / "summary.json").write_text(json.dumps(summary))
    return workdir


class Outline(html.parser.HTMLParser):
    """Tags of a page, the visible text, and which `details` lies in which."""

    VOID = {"meta", "link", "input", "br", "img"}

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.text, self.parents = [], [], [], {}
        self._open: list[tuple[str, str | None]] = []
        self.feed(page)
        assert not self._open, f"unclosed tags: {self._open}"

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.attributes.append(attrs)
        if "rollout" in (attrs.get("class") or "").split():
            self.parents[attrs["id"]] = next((i for _, i in reversed(self._open) if i), None)
        if tag not in self.VOID:
            is_rollout = attrs.get("id") if attrs.get("id", "") in self.parents else None
            self._open.append((tag, is_rollout))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))

    def handle_endtag(self, tag):
        opened, _ = self._open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data):
        self.text.append(data)


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
            assert f"A {segment['advantage']:+.3f}".replace("-", "−") in text
            assert segment["summary"] is None or segment["summary"] in text
    for record in read_run(workdir).trees:
        assert record["question"] in text and record["gold"] in text


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


def test_page_stays_under_its_size_limit_by_dropping_trees_evenly(workdir, page):
    run = read_run(workdir)
    limit = len(page.encode()) * 2 // 3
    small = render(run, max_bytes=limit)
    assert len(small.encode()) <= limit
    shown = re.findall(r'class="task" data-step="(\d+)"', small)
    recorded = [str(record["step"]) for record in run.trees]
    assert 2 <= len(shown) < len(recorded)
    assert (shown[0], shown[-1]) == (recorded[0], recorded[-1])
    assert f"{len(recorded) - len(shown)} of {len(recorded)} recorded trees are left out" in small
    assert "left out to keep" not in page


@given(st.floats(1e-3, 10.0), st.floats(0.01, 10.0))
@settings(deadline=None, max_examples=30)
def test_advantage_colours_are_symmetric_and_saturate(advantage, limit):
    def opacity(a):
        return float(trees.advantage_colour(a, limit).rstrip(")").split(",")[-1])

    assert opacity(advantage) == opacity(-advantage) <= trees.MAX_OPACITY
    assert opacity(limit) == opacity(5 * limit) == trees.MAX_OPACITY
    assert trees.advantage_colour(limit, limit) != trees.advantage_colour(-limit, limit)
    assert trees.advantage_colour(0.0, limit) == trees.advantage_colour(None, limit)


def test_records_turn_nan_into_null_and_keep_the_first_tasks():
    tree, tasks, arrays, advantages = make_step(np.random.default_rng(2), 3)
    arrays["values"][:] = np.nan
    records = record_trees(
        tree, tasks, segment_advantages=advantages, max_tasks=2, max_chars=20, **arrays
    )
    json.dumps(records, allow_nan=False)
    assert [r["task_id"] for r in records] == [t.id for t in tasks[:2]]
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
    details = re.findall(r'<details class="(?:task|rollout)[^>]*>', done.stdout)
    assert details and all(" open" in tag for tag in details)
