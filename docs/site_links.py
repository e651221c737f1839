"""Hooks of MkDocs (``mkdocs.yml``): pages of the repository's root on the site, and links that leave ``docs/``.

The pages are written for readers of the repository, where ``../tests/x.py`` leads somewhere. On the site, links to the
Markdown files in ``ROOT_PAGES`` become links to their pages, and links to other files become links to ``repo_url``, or
the bare text where ``mkdocs.yml`` names none. A link to a file that does not exist is a warning, which ``--strict``
refuses.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/cluster/README.md": "clusters.md",
}
"""File of the repository -> page of the site."""
_SOURCES = {page: source for source, page in ROOT_PAGES.items()}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
logger = logging.getLogger("mkdocs.hooks.site_links")


def on_config(config: Any) -> Any:
    """Give headings the anchors that GitHub gives them, so that links work in both places."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = _anchor
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite links outside fences."""
    place = page.file.src_uri
    source = _SOURCES.get(place, f"docs/{place}")
    parts = _FENCE.split(markdown)
    # Every second part is a fence.
    for index in range(0, len(parts), 2):
        parts[index] = _LINK.sub(lambda found: _rewritten(found, source, config.repo_url), parts[index])
    return "".join(parts)


def _rewritten(found: re.Match[str], source: str, repo_url: str | None) -> str:
    image, text, target = found.groups()
    if re.match(r"[a-z]+:|#", target):
        return found[0]
    path, _, anchor = target.partition("#")
    anchor = f"#{anchor}" if anchor else ""
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / file).exists():
        logger.warning("%s links to %s, which does not exist", source, target)
    if file in ROOT_PAGES:
        return f"{image}[{text}]({ROOT_PAGES[file]}{anchor})"
    if file.startswith("docs/"):
        return f"{image}[{text}]({file.removeprefix('docs/')}{anchor})"
    if repo_url:
        return f"{image}[{text}]({repo_url.rstrip('/')}/blob/main/{file}{anchor})"
    return text


def _anchor(heading: str, separator: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)
