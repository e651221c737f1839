"""What is said to the Hub: one commit per checkpoint, a branch or tag per step, and the way back.

``huggingface_hub`` does the talking: uploads through Xet or LFS, the commit, downloads. Here is what it leaves open:
which files, what they replace, and no second commit where the answer to the first was lost.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_train import __version__
from accel_train.hub.client import hub_api
from accel_train.hub.errors import NotPushableError
from accel_train.hub.model_card import build_card
from accel_train.hub.queue import Entry
from accel_train.store import atomic_files, commit, run_file
from accel_train.store import manifest as manifests
from accel_train.store.manifest import Checkpoint
from accel_train.store.names import CONFIG_FILE, REPORT
from accel_train.store.retention import STATE_FILES

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, GitCommitInfo, HfApi

OURS = re.compile(
    r"(model|ema)(-\d+-of-\d+)?\.safetensors|(model|ema)\.safetensors\.index\.json|optimizer/.+|assets/.+"
    rf"|trainer_state\.json|{re.escape(CONFIG_FILE)}|{REPORT}/.+"
)
"""What an earlier push may have left: deleted where this one does not have it. Other files of the owner stay."""

TITLE = re.compile(r"step (?P<step>\d+) of run (?P<run>\S+) \((?P<digest>[0-9a-f]{12})\)")
"""Titles of our commits. The digest is of the files that belong to the checkpoint, so it tells two attempts apart."""


def revision_name(step: int) -> str:
    """Branch or tag of a step: ``step-00001200``."""
    return f"step-{step:08d}"


def push_checkpoint(path: Path, entry: Entry, run: Path) -> dict[str, str]:
    """Push a checkpoint as one commit and name it by its step; returns ``repo_id``, ``revision``, ``commit``, ``url``.

    Safe to call again after any failure: a commit that was applied is found by its title, whatever became of the
    answer, and a commit made meanwhile by another makes this one fail (412) rather than overwrite it. Raises
    ``NotPushableError`` for a checkpoint that does not verify, and whatever ``huggingface_hub`` raises.
    """
    manifest, _ = pushed_manifest(path, entry.include_state)
    place = _Place(hub_api(), entry, _digest(manifest))
    oid = place.find(place.main)
    if oid is None:
        branch, commits = place.branch()
        oid = place.find(commits) or place.commit(path, run, branch, commits)
    url = f"{place.api.endpoint}/{entry.repo_id}/commit/{oid}"
    return {"repo_id": entry.repo_id, "revision": place.name(oid), "commit": oid, "url": url}


def pushed_manifest(path: Path, include_state: bool) -> tuple[bytes, list[str]]:
    """The manifest to push and the files that it lists: without the optimizer's unless ``include_state``.

    Whole, it is pushed byte for byte; cut, it says ``state: false``. Either verifies against what is pushed with it.
    """
    try:
        manifest, raw = manifests.read_with_text(path)
    except ValueError as error:
        raise NotPushableError(str(error)) from None
    kept = {k: v for k, v in manifest["files"].items() if include_state or not k.startswith(STATE_FILES)}
    if len(kept) == len(manifest["files"]):
        return raw, list(kept)
    return atomic_files.to_json(manifests.sealed(manifest | {"state": False, "files": kept})).encode(), list(kept)


def _digest(manifest: bytes) -> str:
    files = manifests.parse(manifest)["files"]
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]


class _Place:
    """Where in the repository one checkpoint goes. Lives for one attempt."""

    def __init__(self, api: HfApi, entry: Entry, digest: str) -> None:
        self.api = api
        self.entry = entry
        self.title = f"step {entry.step} of run {entry.run_id} ({digest})"
        # Asked first because it is not tried again inside huggingface_hub: no network is known, and said, at once.
        self._refs = api.list_repo_refs(entry.repo_id)
        self.main = api.list_repo_commits(entry.repo_id)
        step = revision_name(entry.step)
        self._names = (step, f"{step}-{entry.run_id}", f"{step}-{entry.run_id}-{digest}")

    def find(self, commits: Sequence[GitCommitInfo]) -> str | None:
        """The commit of this very checkpoint, if it is there already."""
        return next((found.commit_id for found in commits if found.title == self.title), None)

    def branch(self) -> tuple[str | None, list[GitCommitInfo]]:
        """``main`` (None) with its commits; for a step older than what main has, a branch of its own: main advances."""
        newest = next((match for match in map(_parse_title, self.main) if match), None)
        if newest is None or newest["run"] != self.entry.run_id or int(newest["step"]) <= self.entry.step:
            return None, self.main
        branches, tags = self._targets()
        for name in self._names:
            if name in tags or (name in branches and not self._is_ours(name, branches[name])):
                continue
            self.api.create_branch(self.entry.repo_id, branch=name, revision=self.main[0].commit_id, exist_ok=True)
            return name, self.api.list_repo_commits(self.entry.repo_id, revision=name)
        return None, self.main

    def commit(self, path: Path, run: Path, branch: str | None, commits: Sequence[GitCommitInfo]) -> str:
        """Verify, upload and commit on top of ``commits``; returns the id."""
        try:
            checkpoint = commit.verify(path)
        except ValueError as error:
            raise NotPushableError(str(error)) from None
        head = commits[0].commit_id if commits else None
        there = self.api.list_repo_files(self.entry.repo_id, revision=head) if head else []
        state = "With" if self.entry.include_state else "Without"
        made = self.api.create_commit(
            self.entry.repo_id,
            _operations(checkpoint, self.entry, run, there, branch or self._free_name() or "main"),
            commit_message=self.title,
            commit_description=f"{state} optimizer state. Written by accel_train {__version__}.",
            revision=branch,
            parent_commit=head,
        )
        return made.oid

    def name(self, oid: str) -> str:
        """Point the branch or tag of the step at ``oid``; returns its name, or ``oid`` where every name is taken."""
        api, repo = self.api, self.entry.repo_id
        self._refs = api.list_repo_refs(repo)
        branches, tags = self._targets()
        name = self._free_name(oid)
        if name is None or oid in (branches.get(name), tags.get(name)):
            return name or oid
        if name in tags:
            api.delete_tag(repo, tag=name)
        elif name in branches:
            api.delete_branch(repo, branch=name)
        if self.entry.revisions == "tag":
            api.create_tag(repo, tag=name, revision=oid, exist_ok=True)
        else:
            api.create_branch(repo, branch=name, revision=oid, exist_ok=True)
        return name

    def _free_name(self, oid: str | None = None) -> str | None:
        """The first of our names that is free, or at ``oid``, or ours to replace.

        What another run or a person put under a name is left alone. What this run put there before, training the step
        again after going back, is replaced where main still has it.
        """
        branches, tags = self._targets()
        in_main = {found.commit_id for found in self.main}
        for name in self._names:
            there = branches.get(name) or tags.get(name)
            if there in (None, oid) or (there in in_main and self._is_ours(name, str(there))):
                return name
        return None

    def _targets(self) -> tuple[dict[str, str], dict[str, str]]:
        """Commits of the branches and of the tags, by name."""
        branches, tags = self._refs.branches, self._refs.tags
        return {ref.name: ref.target_commit for ref in branches}, {ref.name: ref.target_commit for ref in tags}

    def _is_ours(self, name: str, target: str) -> bool:
        known = [found for found in self.main if found.commit_id == target]
        head = known or self.api.list_repo_commits(self.entry.repo_id, revision=name)[:1]
        match = _parse_title(head[0]) if head else None
        return match is not None and match["run"] == self.entry.run_id


def _parse_title(commit_info: GitCommitInfo) -> re.Match[str] | None:
    return TITLE.fullmatch(commit_info.title)


def _operations(
    checkpoint: Checkpoint, entry: Entry, run: Path, there: Sequence[str], revision: str
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """What the commit adds, and what it deletes of the files ``there``. ``revision`` is how the card names it."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    manifest, names = pushed_manifest(checkpoint.path, entry.include_state)
    adds = [CommitOperationAdd(name, checkpoint.file(name)) for name in names]
    for add in adds:  # verified a moment ago: no second reading for the hash
        add.upload_info.sha256 = bytes.fromhex(checkpoint.manifest["files"][add.path_in_repo]["sha256"])
    texts = {"manifest.json": manifest}
    for name in _files_of_run(run):  # read once: training writes them anew at any time
        if name not in names:
            texts[name] = (run / name).read_bytes()
    texts["README.md"] = build_card(checkpoint, texts, entry.repo_id, revision, _loads_with(run)).encode()
    adds += [CommitOperationAdd(name, content) for name, content in texts.items()]
    new = {add.path_in_repo for add in adds}
    return [*adds, *(CommitOperationDelete(name) for name in there if OURS.fullmatch(name) and name not in new)]


def _files_of_run(run: Path) -> list[str]:
    """Its config and its whole report, but for files that are being written. They change with time, so the manifest
    does not list them."""
    report = [path for path in sorted((run / REPORT).rglob("*")) if not path.name.startswith(".")]
    return [str(path.relative_to(run)) for path in (run / CONFIG_FILE, *report) if path.is_file()]


def _loads_with(run: Path) -> str | None:
    """The class that the recipe declared; None where no run.json says it."""
    try:
        return run_file.load(run).get("loads_with")
    except (OSError, ValueError):
        return None
