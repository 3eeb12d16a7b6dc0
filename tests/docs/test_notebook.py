"""examples/compare.ipynb: runs from a clean kernel, on a tiny model instead of its own; its file has no outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from repository import REPO

NOTEBOOK = REPO / "examples" / "compare.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_from_a_clean_kernel(tiny: Path, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    shorter = {
        '"recipes/quickstart.yaml"': f'"{tiny / "recipe.yaml"}"',
        'Path("runs/notebook")': f'Path("{tmp_path / "runs"}")',
        "ROUNDS = 6": "ROUNDS = 2",
    }
    for cell in notebook.cells:
        for long, short in shorter.items():
            cell.source = cell.source.replace(long, short)
    assert all(any(short in cell.source for cell in notebook.cells) for short in shorter.values())
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    printed = "".join(output.get("text", "") for output in outputs)
    assert "localadam: best accuracy" in printed
    assert "IProgress" not in printed
    assert (tmp_path / "runs" / "report" / "report.html").is_file()


def test_the_file_has_no_outputs() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert '"outputs": []' in text
    assert '"execution_count": null' in text
    assert '"output_type"' not in text
