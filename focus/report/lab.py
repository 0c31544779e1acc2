"""One self-contained HTML page per experiment of the laboratory, from its result files alone."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from focus.journal import write_atomically
from focus.report.lab_figures import (
    Figure,
    error_reduction,
    improvement,
    interquartile_means,
    learning_curves,
    learning_rates,
    profile,
    regime_maps,
)

REPORT_FILE = "lab.html"
_HERE = Path(__file__).parent

# Columns of the league: key, heading, what it says, digits.
LEAGUE_COLUMNS = (
    ("correlation", "correlation", "of estimated and true advantages of segments", 2),
    (
        "sign_agreement",
        "sign",
        "share of segments whose credit has the true sign; 0 counts half",
        2,
    ),
    ("bias", "bias", "root mean square of E[estimate | state, action] - true advantage", 3),
    ("variance", "variance", "of the estimate, given state and action", 3),
    ("cosine", "cosine", "of the expected and the true policy gradient", 2),
    ("snr", "signal / noise", "of the policy gradient along the true one, per 1,000 tokens", 3),
)


def build_lab_report(workdir: str | Path, out: str | Path | None = None) -> Path:
    """Writes the report of a finished experiment.

    Args:
      workdir: with `results.json` and `analysis.json`, and `league.json` if there was a league;
        see `focus.laboratory.run`.
      out: file to write, `workdir/lab.html` by default.

    Returns:
      The path of the page.

    Raises:
      ValueError: a file is missing or not JSON.
    """
    workdir = Path(workdir)
    results = _read(workdir / "results.json")
    analysis = _read(workdir / "analysis.json")
    league = {"rows": [], "overall": []}
    if (workdir / "league.json").is_file():
        league = _read(workdir / "league.json")
    config = _read(workdir / "config.json") if (workdir / "config.json").is_file() else {}
    path = Path(out) if out is not None else workdir / REPORT_FILE
    write_atomically(path, render(results, analysis, league, config, title=workdir.name))
    return path


def render(
    results: Sequence[Mapping[str, Any]],
    analysis: Mapping[str, Any],
    league: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    title: str,
) -> str:
    """The page as text.

    Args:
      results: rows of `results.json`, in the order of `analysis["cells"]`.
      analysis: of `focus.lab.analysis`.
      league: `league.json`, rows of every world and those over all of them.
      config: shown as it is.
      title: of the page.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["csv"] = lambda figure: as_csv(figure.columns, figure.rows)
    environment.filters["number"] = lambda x: "" if x is None else f"{x:,.4g}"
    environment.filters["count"] = lambda x: f"{x:,.0f}"
    return environment.get_template("lab.html.j2").render(
        title=title,
        style=house_style(),
        results=results,
        analysis=analysis,
        sections=sections(analysis),
        league=league_tables(league["rows"], league["overall"]),
        columns=LEAGUE_COLUMNS,
        config=json.dumps(config, indent=1, sort_keys=True),
    )


def sections(analysis: Mapping[str, Any]) -> list[tuple[str, str, list[Figure]]]:
    """Anchor, heading and figures of each part of the page; a part without figures is left out."""
    parts = [
        ("curves", "Learning curves", learning_curves(analysis)),
        (
            "comparison",
            "Comparison over worlds",
            [*interquartile_means(analysis), *improvement(analysis), *profile(analysis)],
        ),
        ("regime", "Where branching pays", regime_maps(analysis)),
        ("rules", "What branches teach the critic", error_reduction(analysis)),
        ("sweeps", "Learning rates", learning_rates(analysis)),
    ]
    return [part for part in parts if part[2]]


def league_tables(
    rows: Sequence[Mapping[str, Any]], overall: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The league over all worlds, if there are several, then in each; in the order of the rows.

    Args:
      rows: of every world; an estimator that it cannot feed has `missing`.
      overall: of every estimator over the worlds.
    """
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    tables = []
    for world in [*([None] if len(worlds) > 1 else []), *worlds]:
        here = overall if world is None else [row for row in rows if row["world"] == world]
        fed = [row for row in here if not row["missing"]]
        columns = [name for name in fed[0] if name != "missing"] if fed else []
        tables.append(
            {
                "world": world,
                "rows": fed,
                "missing": [(row["estimator"], row["missing"]) for row in here if row["missing"]],
                "csv": as_csv(columns, ([row[name] for name in columns] for row in fed)),
            }
        )
    return tables


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The numbers behind a figure or a table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def house_style() -> str:
    """The style sheet of all reports, which is kept in the template of a run's."""
    template = (_HERE / "template.html.j2").read_text(encoding="utf-8")
    found = re.search(r"<style>\n(.*?)</style>", template, re.DOTALL)
    if found is None:
        raise ValueError("template.html.j2 has no <style> to share")
    return found[1]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); run scripts/lab.py first") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); run scripts/lab.py again") from error
