"""Pictures and pages that an evaluation has written into the report. Does not import torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

NOT_OF_AN_EVALUATION = {"curves.png", "profile.md"}
"""Files that are not sent: drawn from metrics that trackers have already, or written by the profiler."""


@dataclass(frozen=True)
class ReportFile:
    """A picture or a text of the report, read once for all trackers."""

    name: str
    """``report/NAME``, so that it differs from the names of metrics."""
    path: Path
    text: str | None = None
    """None for a picture."""
    image: Image | None = None
    """RGB. None for a text."""

    @property
    def kind(self) -> str:
        """Plural noun for messages."""
        return "texts" if self.image is None else "pictures"


class ReportFiles:
    """Watches the PNG and Markdown files of a report, without those in its folders, which are copies by step."""

    def __init__(self, report: Path) -> None:
        """Treat existing files as known, because an earlier start has sent them."""
        self._report = report
        self._known = self._stamps()

    def take_written(self) -> list[ReportFile]:
        """Return the files written since the last call, by name. One that cannot be read is left out with a warning."""
        stamps = self._stamps()
        written = [path for path, stamp in stamps.items() if self._known.get(path) != stamp]
        self._known = stamps
        read: list[ReportFile] = []
        for path in written:
            try:
                read.append(_read(path))
            except (OSError, ValueError) as error:
                logger.warning("%s could not be read for the trackers: %s", path, error)
        return read

    def _stamps(self) -> dict[Path, tuple[int, int, int]]:
        """Return (mtime in ns, size, inode) of each file. One that differs was rewritten: the mtime alone may not."""
        stamps: dict[Path, tuple[int, int, int]] = {}
        try:
            paths = sorted(self._report.iterdir())
            for path in paths:
                if path.suffix in (".png", ".md") and path.name not in NOT_OF_AN_EVALUATION and path.name[0] != ".":
                    status = path.stat()
                    stamps[path] = status.st_mtime_ns, status.st_size, status.st_ino
        except OSError:
            # Without a report folder, or while it is being deleted, there is nothing to send.
            return stamps
        return stamps


def _read(path: Path) -> ReportFile:
    name = f"report/{path.stem}"
    if path.suffix == ".md":
        return ReportFile(name, path, text=path.read_text(encoding="utf-8"))
    from PIL import Image

    try:
        with Image.open(path) as opened:
            return ReportFile(name, path, image=opened.convert("RGB"))
    except (SyntaxError, Image.DecompressionBombError) as error:
        # Pillow's other errors: for a damaged picture, and for one with more pixels than it opens.
        raise OSError(error) from None
