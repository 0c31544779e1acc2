"""Every notebook runs from top to bottom, and none carries outputs of an earlier run."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").rglob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_outputs_are_not_committed(path):
    _, code = read(path)
    assert code
    for cell in code:
        assert not cell.outputs and cell.execution_count is None, (
            f"{path.name} has outputs at: {cell.source[:60]!r}; strip them before a commit"
        )


@each_notebook
def test_a_notebook_runs_without_a_warning_and_draws(path, monkeypatch):
    """In a kernel of its own, with this Python; an error of a cell is an error here."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook, code = read(path)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    for cell in code:
        assert cell.execution_count is not None
        assert not [output.text for output in cell.outputs if output.get("name") == "stderr"]
    drawn = [o for cell in code for o in cell.outputs if "image/png" in o.get("data", {})]
    assert drawn
