"""Adapters of a checkpoint in the files of other programs, as ``accel-train export`` writes them."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from accel_train.launch_files.parents import tied_to_parent
from accel_train.store.exports.peft_layout import CONFIG_FILE, WEIGHTS_STEM
from accel_train.store.manifest import Checkpoint

logger = logging.getLogger(__name__)

_COMPONENT = r"(unet|transformer|text_encoder(_\d)?)/"
FILES = re.compile(
    rf"({_COMPONENT})?{WEIGHTS_STEM}[^/]*\.safetensors(\.index\.json)?|{_COMPONENT}{re.escape(CONFIG_FILE)}"
    r"|pytorch_lora_weights\.safetensors|kohya_lora\.safetensors"
)
"""Files of an export that peft, diffusers, and kohya's scripts read. The other files are those of the checkpoint.

Adapters in a folder of another name are the owner's, and a push leaves them."""
MINUTES = 30
"""Longest time of an export. Adapters take seconds, after imports."""


@contextmanager
def written(checkpoint: Checkpoint) -> Generator[Mapping[str, Path]]:
    """Write the adapters of a verified checkpoint for other programs, and yield the files by their names.

    They hold the EMA if there is one, in fp32, and exist until the end of the block. Yields nothing for a whole model,
    and, with a warning, if the export fails: the checkpoint itself is complete without them.
    """
    if CONFIG_FILE not in checkpoint.manifest["files"]:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="accel-train-") as temporary:
        folder = Path(temporary) / "exported"
        failure = _export(checkpoint.path, folder)
        if failure is not None:
            logger.warning("%s: pushed without files for other programs: %s", checkpoint.path.name, failure)
            yield {}
            return
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        added = files.keys() - checkpoint.manifest["files"].keys()
        yield {name: path for name, path in files.items() if name in added and FILES.fullmatch(name)}


def _export(checkpoint: Path, folder: Path) -> str | None:
    """Export in a process of its own, and return the reason if it fails."""
    # Only the commands know the pipeline that writes these files. A process that pushes needs no torch.
    command = [sys.executable, "-m", "accel_train.cli", "export", str(checkpoint), str(folder)]
    try:
        done = subprocess.run(
            tied_to_parent(command, signal.SIGKILL), capture_output=True, text=True, timeout=60 * MINUTES, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1]
