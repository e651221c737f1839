"""Notebooks of the pages, executed: ``python -m tests.notebooks`` runs them and writes their outputs.

    python -m tests.notebooks                       # docs/notebooks, with new outputs
    python -m tests.notebooks --to DIRECTORY        # executed copies, the pages stay as they are

Needs nbclient and ipykernel: ``pip install -e '.[dev]'``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
IN_ORDER = ("train", "open_a_run")
"""The second opens the run of the first."""


def execute(destination: Path) -> None:
    """Execute the notebooks one after the other in an empty directory. Raises the error of a cell that fails."""
    import nbclient
    import nbformat

    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory(prefix="accel-train-notebooks-") as folder:
        for name in IN_ORDER:
            notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
            client = nbclient.NotebookClient(
                notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": folder}}
            )
            client.execute(env=environment)
            for cell in notebook.cells:
                # When each cell ran, and with which Python, are of no use to a reader.
                cell.metadata.pop("execution", None)
            notebook.metadata["language_info"] = {"name": "python"}
            nbformat.write(notebook, destination / f"{name}.ipynb")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=FOLDER)
    execute(parser.parse_args(argv).to)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
