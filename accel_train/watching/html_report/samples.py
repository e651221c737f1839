"""Samples of a run as HTML: the pages and pictures of its recipe in ``report/``."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from accel_train.store.names import files_of_steps
from accel_train.watching.html_report.markup import details

LARGEST_BYTES = 8 << 20
"""Size above which a picture is named but not embedded, so that the page can still be opened on a phone."""
DRAWN_ANEW = "curves.png"
EARLIER_LISTED = 20
"""Maximum number of earlier evaluations in the page."""


def samples_html(report: Path) -> list[str]:
    """Return the Markdown pages, those of earlier evaluations folded away, then the embedded pictures.

    Empty if the run has neither.
    """
    parts: list[str] = []
    # Sorted, because a directory has no order. Hidden files are left out, as in a shell.
    for path in sorted(report.glob("[!.]*.md")):
        parts += [*_page_html(path), *_earlier_html(path.with_suffix(""))]
    for path in sorted(report.glob("[!.]*.png")):
        # The report draws its own curves.
        if path.name != DRAWN_ANEW:
            parts.append(_picture_html(path))
    return parts


def _earlier_html(folder: Path) -> list[str]:
    """Return the pages of earlier evaluations, newest first. The latest is left out: it is the page itself."""
    earlier = list(files_of_steps(folder, ".md").items())[:-1]
    listed = earlier[-EARLIER_LISTED:]
    parts: list[str] = []
    if len(listed) < len(earlier):
        parts.append(
            f"<p>Of {len(earlier)} earlier evaluations the last {len(listed)}; all are in report/{escape(folder.name)}."
            "</p>"
        )
    for step, path in reversed(listed):
        parts += details(f"After step {step:,}", _page_html(path))
    return parts


def _page_html(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        # The rest of the report is still useful.
        text = f"{path.name} cannot be read ({error})"
    return ['<div class="samples">', *markdown_html(text), "</div>"]


def markdown_html(text: str) -> list[str]:
    """Convert headings, list items and paragraphs. Anything else stays text, since samples may hold any characters."""
    parts: list[str] = []
    in_list = False
    for line in text.splitlines():
        is_item = line.startswith("- ")
        if is_item != in_list:
            tag = "<ul>" if is_item else "</ul>"
            parts.append(tag)
            in_list = is_item
        if is_item:
            parts.append(f"<li>{_sample_html(line[2:])}</li>")
        elif line.startswith("#"):
            parts.append(f"<h4>{escape(line.lstrip('#').strip())}</h4>")
        elif line.strip():
            parts.append(f"<p>{_sample_html(line)}</p>")
    if in_list:
        parts.append("</ul>")
    return parts


def _sample_html(line: str) -> str:
    """Set a quoted sample apart from the words before it."""
    before, quote, sample = line.partition("> ")
    if not quote:
        return escape(line)
    # Undoes the escaping by `metrics.recorder.quoted`. In this order, since `&amp;lt;` stands for `&lt;`.
    text = sample.replace("&lt;", "<").replace("&amp;", "&")
    return f"{escape(before)}<q>{escape(text)}</q>"


def _picture_html(path: Path) -> str:
    name = escape(path.name)
    try:
        size = path.stat().st_size
        if size > LARGEST_BYTES:
            return f"<p>{name} has {size / 2**20:.0f} MiB and is not embedded.</p>"
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        return f"<p>{name} cannot be read ({escape(str(error))}).</p>"
    return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"><figcaption>{name}</figcaption></figure>'
