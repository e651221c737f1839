"""Datasets of the Hub by name, configuration and revision, as ``owner/name:configuration@revision``."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.config import UsageError, expand_path

logger = logging.getLogger(__name__)
HUB_ID = re.compile(
    r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<configuration>[\w.-]+))?(@(?P<revision>[\w.-]+(/[\w.-]+)*))?", re.ASCII
)

COMMIT = re.compile("[0-9a-f]{40}")


class HubId(NamedTuple):
    """A dataset of the Hub as options name it."""

    name: str
    """``owner/name``, or ``name`` alone."""
    configuration: str | None
    """None: the only one."""
    revision: str | None
    """Branch, tag or commit. None: the newest."""


def parse_hub_id(path: str) -> HubId | None:
    """Return the parts of ``owner/name:configuration@revision``, or None for a text that cannot be one."""
    found = HUB_ID.fullmatch(path)
    return None if found is None else HubId(**found.groupdict())


def is_hub_id(path: str, endings: tuple[str, ...]) -> bool:
    """Return True for an id that is no path here and has none of the ``endings``."""
    # `lexists`, because a dangling link is a lost file and no id.
    if os.path.lexists(expand_path(path)):
        return False
    # A misspelt file name must not become a request to the Hub.
    return parse_hub_id(path) is not None and not path.endswith(endings)


def load_hub_dataset(path: str, split: str, option: str = "--data.path", wanted: str = "a file") -> Any:
    """Load a dataset of the Hub from its data files only, and log the commit that was read.

    ``wanted`` names what may be given instead. Raises ``UsageError`` that begins with the path, because most such paths
    are misspelt.
    """
    import datasets

    asked = parse_hub_id(path)
    assert asked is not None, path
    name, configuration, revision = asked
    if revision is None:
        # It may be a misspelt path, and without a network the Hub's client tries again for half a minute.
        logger.info("%s %s: no such file or folder here, so the Hub is asked for a dataset of this name", option, path)
    try:
        commit = _commit_of_revision(name, revision)
        # A dataset in memory would not reveal its commit.
        loaded: Any = datasets.load_dataset(name, configuration, split=split, revision=commit, keep_in_memory=False)
        last = commit_of(loaded)
        # Without a network, `datasets` takes the commit that it has read last, whatever was requested.
        if commit is not None and last != commit:
            loaded = _cached(name, loaded.info, commit, split)
    except Exception as error:
        # Name, network, permission, split or script: the user can fix all of them.
        raise UsageError(
            f"{option} {path!r}, split {split!r}: no such file or folder, and the hub answered "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}. Give {wanted}, or a hub id (owner/name, "
            "owner/name:configuration or owner/name@revision) whose data are plain files (datasets that need a script "
            "are refused); without a network, the dataset must be in the cache of `datasets`, and its revision must "
            "be a commit."
        ) from None
    if loaded is None:
        raise UsageError(
            f"{option} {path!r}: commit {commit} is required, but without the Hub `datasets` returns what its cache "
            f"read last, {last}. Start once where the Hub can be reached, and the cache will have it."
        )
    found = commit_of(loaded)
    if found is not None and revision != found:
        pinned = f"{path.partition('@')[0]}@{found}"
        logger.info("%s %s: to read the same commit in later runs, give %s %s", option, path, option, pinned)
    return loaded


def _cached(name: str, last: Any, commit: str, split: str) -> Any:
    """Return another commit than the ``last`` one read from the cache of `datasets`. None if it is not cached."""
    from datasets.packaged_modules.cache.cache import Cache

    cache: Any = Cache
    made = cache(
        repo_id=name,
        dataset_name=name.rpartition("/")[2],
        config_name=last.config_name,
        version=str(last.version),
        hash=commit,
    )
    return made.as_dataset(split) if Path(made.cache_dir).is_dir() else None


def commit_of(dataset: Any) -> str | None:
    """Return the commit of the Hub that a loaded dataset was read from. None for others, such as one in memory."""
    files = getattr(dataset, "cache_files", None) or []
    # `datasets` names the folder of a prepared dataset after its commit.
    names = {Path(entry["filename"]).parent.name for entry in files}
    found = names.pop() if len(names) == 1 else ""
    return found if COMMIT.fullmatch(found) else None


def _commit_of_revision(name: str, revision: str | None) -> str | None:
    """Ask the Hub for the commit of a branch or tag. None: the newest, which `datasets` looks up itself."""
    if revision is None or COMMIT.fullmatch(revision):
        return revision
    from datasets import config
    from huggingface_hub import HfApi

    return HfApi(endpoint=config.HF_ENDPOINT).dataset_info(name, revision=revision).sha
