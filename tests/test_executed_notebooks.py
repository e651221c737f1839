"""The notebooks of the pages: they run from top to bottom, and what is committed of their output is small."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import notebooks
from tests.distributed.launching import environment

MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|tmp|usr|opt|work|Users|private|var|mnt|content)/")
MAX_BYTES = 120_000

every_notebook = pytest.mark.parametrize("path", sorted(notebooks.FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)


def cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def written(path: Path) -> str:
    """All text of the outputs, without pictures."""
    texts: list[str] = []
    for cell in cells(path):
        for output in cell["outputs"]:
            texts.append("".join(output.get("text", "")))
            data = output.get("data", {})
            texts += ["".join(text) for kind, text in data.items() if kind.startswith("text/")]
    return "\n".join(texts)


def pictures(path: Path) -> int:
    return sum("image/png" in output.get("data", {}) for cell in cells(path) for output in cell["outputs"])


def test_all_are_executed() -> None:
    assert {path.stem for path in notebooks.FOLDER.glob("*.ipynb")} == {*notebooks.IN_ORDER}


@every_notebook
def test_what_is_committed_is_small_and_of_no_machine(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    assert not MACHINE_PATH.search(written(path)), written(path)
    assert not [output for cell in cells(path) for output in cell["outputs"] if output["output_type"] == "error"]


@every_notebook
def test_what_is_committed_was_executed_from_top_to_bottom(path: Path) -> None:
    assert [cell["execution_count"] for cell in cells(path)] == [*range(1, len(cells(path)) + 1)]
    assert pictures(path) == 1


@pytest.mark.slow
def test_they_run_from_top_to_bottom(tmp_path: Path) -> None:
    """A kernel of Jupyter for each, two processes among what it starts."""
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason="pip install -e '.[dev]'")
    command = [sys.executable, "-m", "tests.notebooks", "--to", str(tmp_path)]
    done = subprocess.run(
        command, cwd=notebooks.ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=3600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "apart by less than 1e-4: True" in written(tmp_path / "train.ipynb")
    assert "the run and its repetition: the same bits" in written(tmp_path / "open_a_run.ipynb")
    for name in notebooks.IN_ORDER:
        executed = tmp_path / f"{name}.ipynb"
        assert not MACHINE_PATH.search(written(executed)), written(executed)
        assert pictures(executed) == 1
