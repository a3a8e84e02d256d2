"""docs/tutorial/notebook.ipynb runs from its first cell to its last."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorial" / "notebook.ipynb"


# Five sweeps, each on a Ray of its own.
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_notebook_of_the_tutorial_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.get("name") == "stdout"]
    shown = [output.data.get("text/html", "") for output in outputs if "data" in output]
    assert any("Speed-up from 1 worker to 2 workers" in text for text in shown)
    assert any("OMP_NUM_THREADS" in text for text in shown), "the comparison names what differs"
    assert any("time.perf_counter_ns" in text for text in shown)
