"""Push a checkpoint as one commit of a Hub repository, with a branch or tag per step.

``huggingface_hub`` does the uploads through Xet or LFS, and the commit. This module chooses the files to add and to
delete, and makes no second commit if the response to the first was lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train import __version__
from accel_train.hub import other_programs
from accel_train.hub.client import hub_api
from accel_train.hub.errors import HubError, NotPushableError, StateMissingError
from accel_train.hub.model_card import CardFacts, build_card
from accel_train.hub.queue import Entry, HubQueue
from accel_train.metrics.panels import labels_of
from accel_train.metrics.progress import Labels
from accel_train.pipeline import ADAPTER_DESCRIPTION
from accel_train.store import atomic_files, commit, run_file, strict_json
from accel_train.store import manifest as manifests
from accel_train.store.manifest import Checkpoint
from accel_train.store.names import CONFIG_FILE, METRICS_FILE, REPORT
from accel_train.store.retention import STATE_FILES
from accel_train.store.strict_json import UnreadableError

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, GitCommitInfo, HfApi

OURS = re.compile(
    r"(model|ema)(-\d+-of-\d+)?\.safetensors|(model|ema)\.safetensors\.index\.json|optimizer/.+|assets/.+"
    rf"|trainer_state\.json|{re.escape(CONFIG_FILE)}|{REPORT}/.+"
)
"""Files of earlier pushes, deleted if the new push lacks them. Other files of the owner stay."""

TITLE = re.compile(r"step (?P<step>\d+) of run (?P<run>\S+) \((?P<digest>[0-9a-f]{12})\)")
"""Titles of our commits. The digest covers the files of the checkpoint, so it tells two versions of a step apart."""


def revision_name(step: int) -> str:
    """Return the branch or tag of a step, such as ``step-00001200``."""
    return f"step-{step:08d}"


def push_checkpoint(path: Path, entry: Entry, run: Path) -> dict[str, str]:
    """Push a checkpoint as one commit and point a branch or tag at it.

    Returns ``repo_id``, ``revision``, ``commit`` and ``url``. Safe to call again after any failure: an applied commit
    is found by its title even if its response was lost. A concurrent commit makes this one fail (412) and is not
    overwritten. A repository that does not exist is created, unless the run has pushed to it before. Raises
    ``NotPushableError`` for a checkpoint that fails verification, ``HubError`` for a repository that was deleted, and
    the errors of ``huggingface_hub``.
    """
    manifest, _ = pushed_manifest(path, entry.include_state)
    place = _open_place(entry, _digest(manifest), run)
    # Looked up before any upload: if only the response was lost, nothing is left to do.
    oid = place.find(place.main)
    if oid is None:
        # The step may have been committed on a branch of its own before the response was lost.
        branch, commits = place.branch()
        oid = place.find(commits)
        if oid is None:
            oid = place.commit(path, run, branch, commits)
    url = f"{place.api.endpoint}/{entry.repo_id}/commit/{oid}"
    return {"repo_id": entry.repo_id, "revision": place.name(oid), "commit": oid, "url": url}


def pushed_manifest(path: Path, include_state: bool) -> tuple[bytes, list[str]]:
    """Return the manifest to push and the names of its files.

    Without optimizer state the manifest is rewritten with ``state: false``. Otherwise it is returned byte for byte.
    Both verify against the pushed files. Raises ``NotPushableError``, also for a missing state, which would otherwise
    be noticed only at a resume from the Hub. Raises ``UnreadableError`` for a manifest that cannot be read now.
    """
    try:
        manifest, raw = manifests.read_with_text(path)
    except UnreadableError:
        raise
    except ValueError as error:
        raise NotPushableError(str(error)) from None
    if include_state and not manifest.get("state", True):
        raise StateMissingError(
            f"hub.include_state: true: {path} has no optimizer state: it was saved without, or retention has stripped "
            "it; push it without --include_state, or a checkpoint that has its state"
        )
    files = manifest["files"]
    kept = {name: facts for name, facts in files.items() if include_state or not name.startswith(STATE_FILES)}
    if len(kept) == len(files):
        return raw, list(kept)
    reduced = manifests.sealed(manifest | {"state": False, "files": kept})
    return atomic_files.to_json(reduced).encode(), list(kept)


def _digest(manifest: bytes) -> str:
    # Covers the files alone: metrics may join a manifest later, and it is still the same checkpoint.
    files = manifests.parse(manifest)["files"]
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]


def _open_place(entry: Entry, digest: str, run: Path) -> _Place:
    from huggingface_hub.errors import RepositoryNotFoundError

    api = hub_api()
    try:
        return _Place(api, entry, digest)
    except RepositoryNotFoundError as error:
        pushed = HubQueue(run).pushed().values()
        if any(record.get("repo_id") == entry.repo_id for record in pushed):
            # Its owner may have deleted it on purpose.
            raise HubError(
                f"404: {entry.repo_id} has been deleted or renamed since an earlier push of this run, or the token may "
                "not see it any more; `accel-train checkpoints push` and the next start create it again"
            ) from error
    # The check before training creates it, but not while the Hub answers with 503.
    api.create_repo(entry.repo_id, private=entry.private, exist_ok=True)
    return _Place(api, entry, digest)


class _Place:
    """Place of one checkpoint in the repository, for one attempt to push it."""

    def __init__(self, api: HfApi, entry: Entry, digest: str) -> None:
        self.api = api
        self.entry = entry
        self.title = f"step {entry.step} of run {entry.run_id} ({digest})"
        # This request comes first because huggingface_hub does not retry it: a missing network is reported at once.
        self._refs = api.list_repo_refs(entry.repo_id)
        self.main = api.list_repo_commits(entry.repo_id)
        step = revision_name(entry.step)
        # The longer ones are for a step whose name another run, or another version of this step, has taken.
        self._names = (step, f"{step}-{entry.run_id}", f"{step}-{entry.run_id}-{digest}")
        self._unfinished = f"unfinished-{step}-{entry.run_id}"
        """Branch of a commit beside main until the step's own name points at it."""

    def find(self, commits: Sequence[GitCommitInfo]) -> str | None:
        """Return the id of the commit of exactly this checkpoint, if there is one."""
        for found in commits:
            if found.title == self.title:
                return found.commit_id
        return None

    def branch(self) -> tuple[str | None, list[GitCommitInfo]]:
        """Return the branch to commit on and its commits. None stands for ``main``.

        A step older than the newest on main gets a branch of its own, because main never goes back. Until the commit
        this branch does not have the step's name: it begins at another checkpoint of main, and the upload may take
        hours or be refused.
        """
        newest = next((match for match in map(_parse_title, self.main) if match), None)
        # Another run on main is followed, not replaced: its commits stay in the history.
        if newest is None or newest["run"] != self.entry.run_id or int(newest["step"]) <= self.entry.step:
            return None, self.main
        branches, _ = self._targets()
        for name in self._names:
            if name in branches and self._step_of_ours(name, branches[name]) == self.entry.step:
                return name, self.api.list_repo_commits(self.entry.repo_id, revision=name)
        name = self._unfinished
        self.api.create_branch(self.entry.repo_id, branch=name, revision=self.main[0].commit_id, exist_ok=True)
        return name, self.api.list_repo_commits(self.entry.repo_id, revision=name)

    def commit(self, path: Path, run: Path, branch: str | None, commits: Sequence[GitCommitInfo]) -> str:
        """Verify and upload the checkpoint, commit it on top of ``commits`` and return the id of the commit."""
        try:
            # It may have been damaged while it waited in the queue.
            checkpoint = commit.verify(path)
        except UnreadableError:
            raise
        except ValueError as error:
            raise NotPushableError(str(error)) from None
        head = None
        existing: list[str] = []
        if commits:
            head = commits[0].commit_id
            existing = self.api.list_repo_files(self.entry.repo_id, revision=head)
        # For the text of the card only. After the commit `name` decides, by the names taken by then.
        revision = self._free_name() or "main"
        if branch in self._names:
            revision = branch
        state = "With" if self.entry.include_state else "Without"
        with other_programs.written(checkpoint) as others:
            created = self.api.create_commit(
                self.entry.repo_id,
                _operations(checkpoint, self.entry, run, existing, revision, others),
                commit_message=self.title,
                commit_description=f"{state} optimizer state. Written by accel_train {__version__}.",
                revision=branch,
                parent_commit=head,  # the Hub answers 412 if somebody else has committed since
            )
        return created.oid

    def name(self, oid: str) -> str:
        """Point the branch or tag of the step at ``oid`` and return its name, or ``oid`` if all names are taken."""
        api = self.api
        repo = self.entry.repo_id
        # Asked for again: `branch` may have made one, and another process may have pushed meanwhile.
        self._refs = api.list_repo_refs(repo)
        branches, tags = self._targets()
        name = self._free_name(oid)
        if name is None:
            return oid
        is_beside_main = branches.get(self._unfinished) == oid
        if oid not in (branches.get(name), tags.get(name)):
            self._point(name, oid, as_tag=self.entry.revisions == "tag" and not is_beside_main)
        if is_beside_main:
            # Deleted last, because until now no other branch held the commit.
            api.delete_branch(repo, branch=self._unfinished)
        return name

    def _point(self, name: str, oid: str, as_tag: bool) -> None:
        """Create the branch or tag ``name`` at the commit ``oid``. Replaces an existing one of this name."""
        api = self.api
        repo = self.entry.repo_id
        branches, tags = self._targets()
        if name in tags:
            # The Hub has no call that moves a tag or a branch.
            api.delete_tag(repo, tag=name)
        elif name in branches:
            api.delete_branch(repo, branch=name)
        if as_tag:
            api.create_tag(repo, tag=name, revision=oid, exist_ok=True)
        else:
            api.create_branch(repo, branch=name, revision=oid, exist_ok=True)

    def _free_name(self, oid: str | None = None) -> str | None:
        """Return the first candidate name: unused, pointing at ``oid``, or replaceable.

        Names used by another run or a person are left alone. A run that went back and trained the step again moves the
        name from its earlier commit, if main still has that.
        """
        branches, tags = self._targets()
        in_main = {found.commit_id for found in self.main}
        for name in self._names:
            target = branches.get(name) or tags.get(name)
            if target is None or target == oid:
                return name
            if target in in_main and self._step_of_ours(name, target) is not None:
                return name
        return None

    def _targets(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the commit ids of the branches and of the tags, by name."""
        branches = {ref.name: ref.target_commit for ref in self._refs.branches}
        tags = {ref.name: ref.target_commit for ref in self._refs.tags}
        return branches, tags

    def _step_of_ours(self, name: str, target: str) -> int | None:
        """Return the step of the commit ``target`` of a branch or tag, or None if this run did not make it."""
        # Commits of main are known already and cost no request.
        head = [found for found in self.main if found.commit_id == target]
        if not head:
            head = self.api.list_repo_commits(self.entry.repo_id, revision=name)[:1]
        if not head:
            return None
        match = _parse_title(head[0])
        if match is None or match["run"] != self.entry.run_id:
            return None
        return int(match["step"])


def _parse_title(commit_info: GitCommitInfo) -> re.Match[str] | None:
    return TITLE.fullmatch(commit_info.title)


def _operations(
    checkpoint: Checkpoint,
    entry: Entry,
    run: Path,
    existing: Sequence[str],
    revision: str,
    others: Mapping[str, Path],
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """List the additions of the commit, and its deletions among the ``existing`` files.

    ``revision`` is the name of the commit in the model card. ``others`` are files for other programs, by name.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    manifest, names = pushed_manifest(checkpoint.path, entry.include_state)
    adds = [CommitOperationAdd(name, checkpoint.file(name)) for name in names]
    # The files were verified a moment ago, so they are not read again for the hash.
    facts = checkpoint.manifest["files"]
    for add in adds:
        add.upload_info.sha256 = bytes.fromhex(facts[add.path_in_repo]["sha256"])
    texts = {"manifest.json": manifest}
    # Read once, because training may replace these files at any time: the card and the push must agree.
    for name in _files_of_run(run):
        if name not in names:
            texts[name] = (run / name).read_bytes()
    card = CardFacts(entry.repo_id, revision, _loads_with(run), entry.license, *_last_start(run), others=tuple(others))
    texts["README.md"] = build_card(checkpoint, texts, card, _description(checkpoint)).encode()
    adds += [CommitOperationAdd(name, content) for name, content in texts.items()]
    # The manifest does not list them, as it seals what was saved.
    adds += [CommitOperationAdd(name, path) for name, path in others.items()]
    added = {add.path_in_repo for add in adds}
    # Otherwise a model that was pushed in two files and now has one would be there in both forms.
    ours = [name for name in existing if OURS.fullmatch(name) or other_programs.FILES.fullmatch(name)]
    obsolete = [name for name in ours if name not in added]
    return [*adds, *(CommitOperationDelete(name) for name in obsolete)]


def _files_of_run(run: Path) -> list[str]:
    """List the config and the report of the run, except for files being written and for pickles.

    They change over time, so the manifest does not list them.
    """
    # Hidden names are those of files that are being written. The Hub warns of every pickle, and a snapshot of the
    # memory has the paths of this machine in it.
    files = sorted((run / REPORT).rglob("*"))
    report = [path for path in files if not path.name.startswith(".") and path.suffix != ".pickle"]
    return [str(path.relative_to(run)) for path in (run / CONFIG_FILE, *report) if path.is_file()]


def _loads_with(run: Path) -> str | None:
    """Return the class declared by the recipe, or None without a readable ``run.json``."""
    try:
        return run_file.load(run).get("loads_with")
    except (OSError, ValueError):
        return None


def _description(checkpoint: Checkpoint) -> Any:
    """Return config.json of the checkpoint, or ``ADAPTER_DESCRIPTION`` of adapters. None without a readable one."""
    for name in ("config.json", ADAPTER_DESCRIPTION):
        with contextlib.suppress(OSError, ValueError):
            return strict_json.read(checkpoint.file(name))
    return None


def _last_start(run: Path) -> tuple[str | None, Labels]:
    """Return the command of the run's last start, or None, and the labels of its metrics, empty if unreadable."""
    environment: Any = {}
    try:
        with (run / METRICS_FILE).open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith('{"event": "environment"'):
                    # No break: each start writes a line, and the last one counts.
                    environment = json.loads(line)
    except (OSError, ValueError):
        return None, Labels()
    command = environment.get("command")
    return command if isinstance(command, str) else None, labels_of([environment])
