"""Execution of docs/notebook.ipynb; `python -m tests.docs.notebook` writes its outputs into the file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def executed(file: Path, folder: Path) -> nbformat.NotebookNode:
    """Return the notebook with the outputs of its cells, executed in `folder`.

    Raises:
        CellExecutionError: a cell raised an exception.
    """
    notebook = nbformat.read(file, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    settings = {"kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
    return NotebookClient(notebook, timeout=300, resources=resources, **settings).execute()


def main() -> None:
    """Write the outputs of all cells, without the output of libraries on stderr."""
    with tempfile.TemporaryDirectory() as scratch:
        notebook = executed(NOTEBOOK, Path(scratch))
    for cell in notebook.cells:
        cell.metadata = {}
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
