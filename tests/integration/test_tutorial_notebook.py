"""docs/tutorial/notebook.ipynb runs from its first cell to its last."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorial" / "notebook.ipynb"


def test_the_notebook_of_the_tutorial_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.get("name") == "stdout"]
    shown = [output.data.get("text/html", "") for output in outputs if "data" in output]
    assert any("Speed-up from 1 worker to 2 workers" in text for text in shown)
    assert any("OMP_NUM_THREADS" in text for text in shown), "the comparison names what differs"
    assert any("time.perf_counter_ns" in text for text in shown)
