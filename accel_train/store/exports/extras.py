"""Files that a recipe adds to a checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from accel_train.config import UsageError
from accel_train.store.exports.pickles import holds_pickle
from accel_train.store.manifest import is_safe_name

logger = logging.getLogger(__name__)

_OWN_FILES = re.compile(
    r"(model|ema)(-\d+-of-\d+)?\.safetensors|(model|ema)\.safetensors\.index\.json|trainer_state\.json|manifest\.json"
    "|optimizer/.*"
)
"""Files that a save writes itself, by their names in the checkpoint."""


def extra_files(directory: Path, write_extras: Callable[[Path], None]) -> list[str]:
    """Call ``write_extras(directory)`` and return the names of its files, without those that no checkpoint may hold.

    Raises whatever it raises, with a note that names it, and ``UsageError`` for a file that a save writes itself.
    """
    try:
        write_extras(directory)
    except Exception as error:
        error.add_note(
            "raised in write_extras(directory), which writes the further files of each checkpoint and is tried before "
            "the first step"
        )
        raise
    names = _without_refused(directory)
    for name in names:
        if _OWN_FILES.fullmatch(name):
            raise UsageError(
                f"write_extras: it has written {name}, which every save writes itself; a name of its own is required: "
                "rename the file, or put it into a folder assets"
            )
    return names


def _without_refused(directory: Path) -> list[str]:
    """Delete the files of a recipe that no checkpoint may hold, with warnings. Returns the names of the others.

    Without such a file all else is saved, so a file that the recipe writes in a wrong format loses no training.
    """
    names: list[str] = []
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        reason = None
        if not is_safe_name(name):
            # No reader would accept the manifest.
            reason = "which is not a valid file name in one; rename it"
        elif holds_pickle(path):
            reason = (
                "a pickle, and reading one runs the program in it; in write_extras, write tensors with "
                "safetensors.torch.save_file, and the rest as JSON"
            )
        if reason is None:
            names.append(name)
            continue
        logger.warning("left out of the checkpoint: %a, %s", name, reason)
        path.unlink()
    return names
