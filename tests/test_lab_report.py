"""What cells say, and the page that shows it."""

import csv
import dataclasses
import html.parser
import io
import json
import re

import numpy as np
import pytest
from scipy import stats

from focus.lab import analysis, statistics
from focus.lab.specs import WorldSpec
from focus.lab.sweep import CellResult, Sweep
from focus.report import lab

STEPS, SEEDS = 5, 12
ARMS = {"grpo": 0.2, "ppo": 0.4, "focus": 0.6, "<b>odd & long</b>": 0.1}
POINTS = {
    f"T={horizon} start={start} delay={delay}": {"horizon": horizon, "start": start, "delay": delay}
    for horizon in (10, 20)
    for start in (0.05, 0.2)
    for delay in (1, 4)
}


def result(world, arm, gain, *, points=(), at_border=False):
    """A cell whose success rises from .1 by `gain`, with noise that all arms of a world share."""
    rng = np.random.default_rng(len(world))
    noise = rng.normal(0, 0.05, (SEEDS, 1))
    success = 0.1 + noise + gain * np.linspace(0, 1, STEPS + 1)
    curves = {
        "success": success.astype(np.float32),
        "tokens": np.full((SEEDS, STEPS), 100, np.int32),
        "dose": np.full((SEEDS, STEPS), 50 if arm == "grpo" else 100, np.int32),
    }
    branched = np.arange(1, STEPS + 1) * 10 * (arm == "focus")
    curves["branch_tokens"] = np.broadcast_to(branched, (SEEDS, STEPS))
    for name, value in (("error_reduction", 2.0), ("expected_reduction", 3.0)):
        curves[name] = np.where(branched, value * np.arange(STEPS), 0.0) + np.zeros((SEEDS, 1))
    curves["residual_variance"] = np.ones((SEEDS, STEPS))
    rates = (1.0, 3.0, 10.0)
    sweep = Sweep(rates, (0.1, 0.2, 0.3) if at_border else (0.1, 0.3, 0.2), 2 if at_border else 1)
    return CellResult(WorldSpec("fork_chain", (("length", 9),), world), arm, sweep, curves, 1.0)


def table(worlds=("long", "late")):
    return analysis.Table(
        [
            result(world, arm, gain, at_border=arm == "ppo")
            for world in worlds
            for arm, gain in ARMS.items()
        ]
    )


# --- analysis ------------------------------------------------------------------------------------


def test_comparisons_are_paired_and_cover_every_world():
    found = analysis.pairs(table(), "focus")
    assert [(r["world"], r["theirs"]) for r in found[:3]] == [
        ("long", "grpo"),
        ("long", "ppo"),
        ("long", "<b>odd & long</b>"),
    ]
    assert [r["world"] for r in found[-3:]] == [None] * 3
    for row in found:
        # The noise is a seed's and both arms have it: nothing is uncertain about the difference.
        wanted = (0.6 - ARMS[row["theirs"]]) / 2
        assert row["difference"] == pytest.approx(wanted, abs=1e-6)
        assert row["difference_high"] - row["difference_low"] < 1e-6
        assert 0.5 < row["improvement"] <= 1


def test_the_curve_has_students_band_and_counts_tokens():
    (row,) = [r for r in analysis.curves(table()) if (r["world"], r["arm"]) == ("long", "ppo")]
    assert row["tokens"] == [0, 100, 200, 300, 400, 500]
    success = table()["long", "ppo"].curves["success"].astype(float)[:, 2]
    low, high = stats.t.interval(0.95, SEEDS - 1, success.mean(), stats.sem(success))
    assert (row["low"][2], row["high"][2]) == pytest.approx((low, high))


def test_an_arm_is_compared_as_far_as_the_smallest_dose():
    """GRPO trains on half as many tokens: at its dose the others are half as far."""
    rows = {r["arm"]: r for r in analysis.cells(table()) if r["world"] == "long"}
    start = table()["long", "grpo"].curves["success"][:, 0].mean()
    assert rows["grpo"]["dose"] == rows["focus"]["dose"] == 250
    assert rows["focus"]["dose_tokens"] == 500 and rows["focus"]["tokens"] == 500
    assert rows["grpo"]["dose_auc"] == pytest.approx(start + 0.2 / 2, abs=1e-6)
    assert rows["focus"]["dose_auc"] == pytest.approx(start + 0.6 / 4, abs=1e-6)
    assert rows["focus"]["auc"] == pytest.approx(start + 0.6 / 2, abs=1e-6)
    assert rows["ppo"]["at_border"] and not rows["focus"]["at_border"]


def test_a_profile_is_that_of_all_runs():
    found = analysis.profiles(table())
    scores = table().scores("focus").ravel()
    at = found["thresholds"].index(0.4)
    assert found["arms"]["focus"]["share"][at] == pytest.approx(np.mean(scores > 0.4))
    for row in found["arms"].values():
        assert np.all(np.array(row["low"]) <= np.array(row["share"]) + 1e-9)
        assert np.all(np.array(row["share"]) <= np.array(row["high"]) + 1e-9)


def test_the_fall_of_the_error_is_weighted_by_what_branches_cost():
    rows = analysis.error_reduction(table(), {"focus": "random"})
    assert [(r["world"], r["arm"], r["rule"]) for r in rows] == [
        ("long", "focus", "random"),
        ("late", "focus", "random"),
    ]
    steps = np.arange(STEPS)
    wanted = np.sum((steps + 1) * 2.0 * steps) / np.sum(steps + 1)
    assert rows[0]["reduction"] == pytest.approx(wanted)
    assert rows[0]["expected"] == pytest.approx(1.5 * wanted)
    assert rows[0]["residual_variance"] == pytest.approx(1)


@pytest.mark.parametrize(
    "text, holds, surely",
    [
        ("focus / grpo >= 1.4 in long", True, True),
        ("focus / grpo >= 3 in long", False, False),
        ("focus - ppo >= 0.05 in late", True, True),
        ("ppo - focus >= -0.2 in late", True, True),
        ("ppo - focus >= -0.01 in late", False, False),
        ("focus - <b>odd & long</b> >= 0.2 in late", True, True),
    ],
)
def test_claims_are_judged(text, holds, surely):
    claim = analysis.read_claim(text, ["long", "late"], list(ARMS))
    (row,) = analysis.judge(claim, table())
    assert (row["holds"], row["surely"]) == (holds, surely)
    both = table().scores(claim.ours, [claim.world]), table().scores(claim.theirs, [claim.world])
    sign = {"-": statistics.mean_difference, "/": statistics.mean_ratio}[claim.sign]
    assert row["value"] == pytest.approx(float(sign(*both)))


def test_a_claim_of_no_world_is_judged_in_every_world():
    claim = analysis.read_claim("focus - ppo >= 0", ["long", "late"], list(ARMS))
    assert [row["world"] for row in analysis.judge(claim, table())] == ["long", "late"]


def test_better_needs_an_interval_that_says_so():
    """An estimate above the bound is not enough where the interval holds no difference."""
    rng = np.random.default_rng(0)
    cells = [
        dataclasses.replace(
            result("long", arm, 0.0),
            curves={
                **result("long", arm, 0.0).curves,
                "success": rng.normal(mean, 0.3, (SEEDS, STEPS + 1)),
            },
        )
        for arm, mean in (("a", 0.5), ("b", 0.45))
    ]
    claim = analysis.read_claim("a - b >= 0.001", ["long"], ["a", "b"])
    (row,) = analysis.judge(claim, analysis.Table(cells))
    assert row["value"] >= 0.001 and row["value_low"] < 0 and not row["holds"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("focus > grpo", "write 'ARM - ARM >= x'"),
        ("focus / grpo >= three", "write 'ARM - ARM >= x'"),
        ("focus / gpro >= 3", "arm 'gpro' is none of grpo, ppo"),
        ("focus / grpo >= 3 in short", "world 'short' is none of long, late"),
    ],
)
def test_claims_about_nothing_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        analysis.read_claim(text, ["long", "late"], list(ARMS))


def regime_table():
    return analysis.Table(
        [
            result(world, arm, ARMS[arm] * (1 if point["delay"] == 1 else -1))
            for world, point in POINTS.items()
            for arm in ("grpo", "ppo", "focus")
        ]
    )


def test_the_regime_map_takes_the_better_baseline():
    found = analysis.regime(regime_table(), POINTS, "focus", ["grpo", "ppo"], "grpo")
    assert len(found) == 8
    for row in found:
        assert row["best_baseline"] == ("ppo" if row["delay"] == 1 else "grpo")
        assert row["gain"] == pytest.approx(0.1 if row["delay"] == 1 else -0.2, abs=1e-6)
        assert row["selected"] == pytest.approx(0.2 if row["delay"] == 1 else -0.2, abs=1e-6)
        assert row["start_success"] == pytest.approx(0.1, abs=0.05)


# --- the page ------------------------------------------------------------------------------------


def league_row(world, estimator, quality):
    values = {
        "correlation": quality,
        "sign_agreement": quality,
        "bias": 1 - quality,
        "variance": 1 - quality,
        "cosine": quality,
        "snr": quality**2,
    }
    spread = {
        f"{k}_{end}": v + d for k, v in values.items() for end, d in (("low", -0.1), ("high", 0.1))
    }
    return {"world": world, "estimator": estimator, "missing": "", **values, **spread}


MISSING = {"estimator": "scar", "missing": "coalition: score every subset of text spans"}
LEAGUE = {
    "rows": [
        league_row("long", "scar", 0.9),
        *(
            league_row(w, e, q)
            for w in ("long", "late")
            for e, q in (("focus", 0.8), ("grpo", 0.2))
        ),
        {"world": "late", **MISSING},
    ],
    "overall": [
        {"worlds": worlds, **league_row(None, estimator, quality)}
        for estimator, quality, worlds in (("focus", 0.8, 2), ("grpo", 0.2, 2), ("scar", 0.9, 1))
    ],
}


def said(cells, points=()):
    """An analysis as `focus.laboratory` puts it together."""
    return {
        "worlds": cells.worlds,
        "arms": cells.arms,
        "points": list(points),
        "cells": analysis.cells(cells),
        "curves": analysis.curves(cells),
        "sweeps": analysis.sweeps(cells),
        "aggregates": analysis.aggregates(cells),
        "pairs": analysis.pairs(cells, "focus"),
        "profiles": analysis.profiles(cells),
        "regime": analysis.regime(cells, points, "focus", ["grpo", "ppo"], "grpo")
        if points
        else [],
        "rules": analysis.error_reduction(cells, {"focus": "expected_error_reduction"}),
        "claims": analysis.judge(
            analysis.read_claim("focus - ppo >= 0.05", cells.worlds, cells.arms), cells
        ),
    }


RESULT = {"seeds": SEEDS, "steps": STEPS, "tokens_per_step": 100}


class Page(html.parser.HTMLParser):
    """Tags that are opened, and text; fails on tags that do not nest."""

    VOID = {"meta", "link", "br", "circle", "path", "rect", "polyline", "polygon", "line"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.ids = [], [], [], set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids |= {value for name, value in attrs if name == "id"}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def page():
    cells = table()
    return lab.render([RESULT] * len(ARMS) * 2, said(cells), LEAGUE, {"seed": 0}, title="run <1>")


def test_the_page_is_whole_and_asks_for_nothing(page):
    found = Page(page)
    assert {"claims", "results", "curves", "comparison", "rules", "sweeps", "league"} <= found.ids
    assert not re.search(r"""(src|href)=["']?https?:""", page)
    assert "<b>odd" not in page and "run <1>" not in page
    assert "NaN" not in page and ">nan" not in page
    text = "".join(found.texts)
    for words in ("<b>odd & long</b>", "run <1>", "focus - ppo >= 0.05", "coalition"):
        assert words in text


def test_every_figure_has_its_numbers_as_csv(page):
    found = Page(page)
    figures = [f for _, _, parts in lab.sections(said(table())) for f in parts]
    assert found.tags.count("svg") == found.tags.count("figure") == len(figures) > 6
    for figure in figures:
        text = lab.as_csv(figure.columns, figure.rows)
        rows = list(csv.reader(io.StringIO(text)))
        assert tuple(rows[0]) == figure.columns and len(rows) == len(figure.rows) + 1 > 1
        assert {len(row) for row in rows} == {len(figure.columns)}
        assert rows[1][0] in "".join(found.texts)


def test_a_curve_in_the_csv_is_the_curve():
    figure = lab.sections(said(table()))[0][2][0]
    wanted = [r for r in analysis.curves(table()) if r["world"] == "long"]
    rows = [row for row in figure.rows if row[0] == "focus"]
    (curve,) = [r for r in wanted if r["arm"] == "focus"]
    assert [row[3] for row in rows] == curve["success"]
    assert [row[2] for row in rows] == curve["tokens"]


def test_the_regime_map_has_a_cell_for_every_point():
    parts = {anchor: figures for anchor, _, figures in lab.sections(said(regime_table(), POINTS))}
    assert "curves" not in parts and "sweeps" not in parts  # the map shows them
    assert len(parts["regime"]) == 4  # two delays, two comparisons
    for figure in parts["regime"]:
        assert len(figure.rows) == 4 and figure.chart.svg.count("<rect") == 4
        better = ' class="s1 fill"' in figure.chart.svg
        assert better == ("at the next state" in figure.chart.title)


def test_the_league_says_what_is_missing_and_has_its_csv():
    overall, long, late = lab.league_tables(LEAGUE["rows"], LEAGUE["overall"])
    assert [row["estimator"] for row in long["rows"]] == ["scar", "focus", "grpo"]
    assert [row["estimator"] for row in late["rows"]] == ["focus", "grpo"]
    assert late["missing"] == [("scar", "coalition: score every subset of text spans")]
    assert [row["worlds"] for row in overall["rows"]] == [2, 2, 1]
    (first, *_) = csv.DictReader(io.StringIO(late["csv"]))
    assert first["estimator"] == "focus" and float(first["snr_low"]) == pytest.approx(0.54)
    (alone,) = lab.league_tables([league_row("long", "grpo", 0.2)], [])
    assert alone["world"] == "long"


def test_an_experiment_may_be_a_league_alone():
    nothing = {k: [] for k in said(table())} | {"profiles": {}}
    found = Page(lab.render([], nothing, LEAGUE, {}, title="league"))
    assert "league" in found.ids and "results" not in found.ids


def test_the_report_is_built_from_files(tmp_path):
    with pytest.raises(ValueError, match=r"results\.json cannot be read .* run scripts/lab\.py"):
        lab.build_lab_report(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps([RESULT]))
    (tmp_path / "analysis.json").write_text("{")
    with pytest.raises(ValueError, match=r"analysis\.json is not JSON"):
        lab.build_lab_report(tmp_path)
    (tmp_path / "analysis.json").write_text(json.dumps(said(table())))
    path = lab.build_lab_report(tmp_path)
    assert path == tmp_path / "lab.html" and tmp_path.name in path.read_text()


def test_the_house_style_is_shared():
    assert "--s1:" in lab.house_style() and ".legend" in lab.house_style()
