"""A run's directory as training leaves it, made in milliseconds, and a page taken apart."""

import html.parser
import json
import math
from pathlib import Path

import numpy as np

from focus.report import (
    record_evaluation,
    record_trees,
    write_branches,
    write_evaluation,
    write_trees,
)
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
            noise_var=0.2,
            gain=float(0.002 + 0.01 * rng.random()),
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


def trained(advantages):
    """Normalised by a scale; every seventh segment is left out, every third the wrong way."""
    out = advantages / 0.4
    out.ravel()[::3] *= -1
    out.ravel()[::7] = np.nan
    return out


def make_evaluation(rng, chance, num_tasks=40):
    """Trajectories and tasks of an evaluation: fewer hops, more success."""
    tasks = [
        Task(f"heldout/{i:03d}", f"question {i}?", {"answer": str(rng.choice(WORDS)), "hops": hops})
        for i, hops in enumerate(rng.integers(2, 5, num_tasks).tolist())
    ]
    trajectories = [
        make_trajectory(rng, f"h/{i}.0", t.id, i, solve=chance + 0.15 * (3 - t.data["hops"]))
        for i, t in enumerate(tasks)
    ]
    return trajectories, tasks


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
                tree,
                tasks,
                segment_advantages=advantages,
                trained_advantages=trained(advantages),
                max_tasks=2,
                decode=decode,
                **arrays,
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
    for row in rows:
        if "heldout/success" in row:
            trajectories, played = make_evaluation(
                np.random.default_rng(1000 * seed + row["step"]), row["heldout/success"]
            )
            write_evaluation(workdir, row["step"] + 1, record_evaluation(trajectories, played))
    config = {"method": "focus" if branched else "grpo", "seed": seed, "steps": num_steps}
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
    """Tags of a page, its text, which `details` lies in which, and elements of interest.

    Attributes:
      tags, attributes: of all elements, in order.
      text: pieces of text.
      parents: rollout -> the rollout that it lies in.
      turns: id of a turn -> its text.
      tables: title of a figure -> its CSV.
      verdicts: text of each verdict.
    """

    _figure = None
    VOID = {"meta", "link", "input", "br", "img"}

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.text, self.parents = [], [], [], {}
        self.turns, self.tables, self.verdicts = {}, {}, []
        self._open: list[tuple[str, str | None]] = []
        self._sinks: list[tuple[int, list[str]]] = []  # depth and pieces of what is collected
        self.feed(page)
        assert not self._open, f"unclosed tags: {self._open}"

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.attributes.append(attrs)
        if "rollout" in (attrs.get("class") or "").split():
            self.parents[attrs["id"]] = next((i for _, i in reversed(self._open) if i), None)
        classes = (attrs.get("class") or "").split()
        if tag == "li" and "segment" in classes:
            self._collect(self.turns, attrs["id"])
        if tag == "details" and "data" in classes:
            self._figure = attrs["data-name"]
        if tag == "pre" and self._figure is not None:
            self._collect(self.tables, self._figure)
            self._figure = None
        if tag == "span" and "answer" in classes:
            self.verdicts.append(classes[1])
        if tag not in self.VOID:
            is_rollout = attrs.get("id") if attrs.get("id", "") in self.parents else None
            self._open.append((tag, is_rollout))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))

    def handle_endtag(self, tag):
        opened, _ = self._open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"
        self._sinks = [sink for sink in self._sinks if sink[0] < len(self._open)]

    def handle_data(self, data):
        self.text.append(data)
        for _, pieces in self._sinks:
            pieces.append(data)

    def _collect(self, where, name):
        assert name not in where, f"{name} is there twice"
        where[name] = []
        self._sinks.append((len(self._open), where[name]))
