"""Check this export of an adapter: its files, and those of its base. Needs Python alone.

    python verify.py            # the files of this folder
    python verify.py BASE       # and the weights of the base, a folder, or the one of its pipeline

Compares the sha256 of every file with pipeline.json. Exit code 0: all is as it was exported, and as it was trained on;
1: something differs.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parent
DENOISERS = ("unet", "transformer")
"""Folders in a pipeline of diffusers."""


def main(arguments: Sequence[str]) -> int:
    """Compare the files, print what was found and return the exit code."""
    described: dict[str, Any] = json.loads((DIRECTORY / "pipeline.json").read_text("utf-8"))
    changed = other_files(DIRECTORY, described["files"])
    if changed:
        print(f"FAILED: changed since the export, or missing: {', '.join(changed)}")
        return 1
    print(f"{len(described['files'])} files have the sha256 of the export")
    base = described["base"]
    recorded = {name: facts["sha256"] for name, facts in base.get("files", {}).items()}
    if not arguments:
        print(f"verified: this adapter is as it was exported; its base, {base.get('source')}, was not compared")
        return 0
    if not recorded:
        print("FAILED: the export does not name the files of its base")
        return 1
    base_folder = Path(arguments[0])
    # If only the denoiser has adapters, its files are recorded relative to its folder, but users have the pipeline's.
    folders = [base_folder, *(base_folder / name for name in DENOISERS)]
    others = [other_files(folder, recorded) for folder in folders]
    if all(others):
        print(f"FAILED: {arguments[0]} is another base than {base['source']}, or incomplete: {', '.join(others[0])}")
        return 1
    print(f"verified: this adapter is as it was exported, and {arguments[0]} has the weights that it was trained on")
    return 0


def other_files(folder: Path, digests: dict[str, str]) -> list[str]:
    """List the files whose sha256 is not the given one."""
    found: list[str] = []
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file() or sha256(path) != digest:
            found.append(name)
    return found


def sha256(path: Path) -> str:
    """Hash a file, piece by piece: a base may be larger than the memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
