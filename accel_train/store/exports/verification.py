"""Verify the files of an export against the sha256 written with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_train.config import UsageError
from accel_train.store import strict_json
from accel_train.store.commit import hash_file

MAX_DESCRIPTION_BYTES = 16 << 20
EXPORTED_OPTIONS = "experiment.json"
"""Options of the run. In every export, even if the recipe describes no model in config.json."""


def verify_export(directory: Path, proofs: Sequence[str]) -> None:
    """Compare the files of an export with their hashes, listed in the files named ``proofs``. Raises ``UsageError``.

    A folder of another program has no such list, and passes.
    """
    for name in proofs:
        path = directory / name
        if not path.is_file():
            continue
        try:
            files: dict[str, Any] = strict_json.read_object(path, MAX_DESCRIPTION_BYTES).get("files", {})
            wrong = [name for name, digest in files.items() if _sha256(directory, name) != digest]
        except (AttributeError, ValueError) as error:
            raise UsageError(f"{path}: cannot be read ({error}); export the model again") from None
        if wrong:
            raise UsageError(
                f"{directory}: {', '.join(sorted(wrong))} changed since the export; export the model again"
            )


def _sha256(directory: Path, name: str) -> str | None:
    path = directory / name
    # The list is as untrusted as the files: it must not lead to files outside the folder.
    if ".." in Path(name).parts or not path.is_file():
        return None
    return hash_file(path)
