"""Pretrained files of a model, by reference: a checkpoint then holds only what training changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.config import UsageError

THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class PretrainedBase:
    """Files with the weights of a pretrained model."""

    source: str
    """Hub id or path, as given by the user."""
    directory: Path
    files: tuple[str, ...]
    """Names in ``directory`` of everything that the frozen parameters are read from."""
    revision: str | None = None
    """Commit on the Hub."""

    def reference(self) -> dict[str, Any]:
        """Return the source, the revision, and the size and sha256 of each file. Reads every byte, in threads.

        Raises ``UsageError`` for a file that is not there.
        """
        missing = [name for name in self.files if not (self.directory / name).is_file()]
        if missing or not self.files:
            raise UsageError(
                f"the base {self.source}: {self.directory} holds no {missing[0] if missing else 'weights'}; download "
                "it again, or give the model's source as it was"
            )
        with ThreadPoolExecutor(THREADS) as pool:
            facts = list(pool.map(self._facts, self.files))
        return {"source": self.source, "revision": self.revision, "files": dict(zip(self.files, facts, strict=True))}

    def _facts(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": path.stat().st_size, "sha256": digest}


def refuse_other_base(recorded: Mapping[str, Any], current: Mapping[str, Any] | None, checkpoint: Path) -> None:
    """Raise ``UsageError`` unless ``current`` has the very files that the checkpoint's frozen parameters are in.

    Where they lie may differ: only names and contents count.
    """
    named = f"{checkpoint}: its frozen weights are those of {_describe(recorded)}"
    if current is None:
        raise UsageError(f"{named}, and this model was built without a base; build it from that base")
    expected = recorded["files"]
    found = current["files"]
    changed = [name for name in expected if name in found and found[name]["sha256"] != expected[name]["sha256"]]
    absent = [name for name in expected if name not in found]
    if not changed and not absent:
        return
    if absent:
        difference = f"has no {absent[0]}"
    else:
        name = changed[0]
        difference = f"has another {name} (sha256 {found[name]['sha256'][:12]}, not {expected[name]['sha256'][:12]})"
    raise UsageError(
        f"{named}, and {_describe(current)} {difference}; give the base that it was trained on, or start a new run "
        "from another"
    )


def _describe(reference: Mapping[str, Any]) -> str:
    revision = reference.get("revision")
    return str(reference["source"]) + (f" at revision {revision}" if revision else "")
