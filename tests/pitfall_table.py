"""The tables at the head of `test_pitfalls*.py`: every fault has a test, and the test exists."""

import ast
import re
from pathlib import Path


def check(doc, file, *, required):
    """Fails unless a table names existing tests for the required faults, and all of its own.

    Args:
      doc: docstring with rows `number | fault | test`.
      file: the module's path; a test without a file is there.
      required: numbers of faults that must be in the table.
    """
    cells = [line.split("|") for line in doc.splitlines() if re.match(r"\s*\d+ +\|", line)]
    rows = [(int(number), test.strip()) for number, _, test in cells]
    assert not set(required) - {number for number, _ in rows}
    own, folder = Path(file).name, Path(file).parent
    named = {test if "::" in test else f"{own}::{test}" for _, test in rows}
    there = set()
    for name in {own, *(test.split("::")[0] for test in named)}:
        tree = ast.parse((folder / name).read_text())
        there |= {f"{name}::{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not named - there
    here = {test for test in there if test.startswith(f"{own}::test_pitfall")}
    assert here <= named, "a test of this file is missing in the table"
