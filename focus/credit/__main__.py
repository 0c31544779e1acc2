"""Prints the credit library as a table: `python -m focus.credit`."""

from __future__ import annotations

from focus.credit.registry import ESTIMATORS

COLUMNS = (
    "name", "kind", "family", "granularity", "evidence", "extra cost", "inputs", "reference",
)  # fmt: skip


def library_table() -> str:
    """One line per method of the library, columns aligned."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    for name, spec in ESTIMATORS.items():
        inputs = ", ".join(spec.inputs)
        lines.append((
            name, spec.kind, spec.family, spec.granularity, spec.evidence, spec.cost, inputs,
            spec.reference,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines)]
    rows = ("  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in lines)
    return "\n".join((*rows, f"{len(ESTIMATORS)} methods"))


if __name__ == "__main__":
    print(library_table())
