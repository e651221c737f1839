"""A Hub on the loopback: the API as ``huggingface_hub`` calls it, in memory, with faults on demand.

Repositories with commits, branches and tags, large files through LFS, the commit of newline-delimited JSON, listing,
download with ranges. Names and status codes are those of the Hub; what it does not need is not there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

from tests.waiting import PATIENCE_SECONDS

WRITER, READER = "hf_writerWriterWriter", "hf_readerReaderReader"
REPOSITORY = r"/api/(models/|(?=datasets/))(?P<repo>(datasets/)?[^/]+/[^/]+)"
"""A model, ``owner/name`` in `HubServer.repositories`, or ``datasets/owner/name``."""
PAGE = 3
"""Commits per page: small, so that paging is tested too."""


@dataclass
class Fault:
    """What happens instead of the next ``count`` answers of an endpoint."""

    endpoint: str
    """Name of the handler: commit, preupload, lfs_batch, lfs_put, commits, whoami, create, ..."""
    kind: int | str
    """A status, or drop_before, drop_after, cut (half an upload), held, held_after (applied, then no answer)."""
    count: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    release: threading.Event = field(default_factory=threading.Event)
    """What is held continues when this is set."""
    answered: threading.Event = field(default_factory=threading.Event)
    """Whether what was held has been applied since."""


@dataclass
class Commit:
    oid: str
    title: str
    message: str
    parent: str | None
    files: dict[str, bytes]


@dataclass
class Repository:
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def resolve(self, revision: str) -> Commit | None:
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        return self.commits.get(oid)

    def history(self, revision: str) -> list[Commit]:
        """Newest first."""
        found, commit = [], self.resolve(revision)
        while commit is not None:
            found.append(commit)
            commit = self.commits.get(commit.parent or "")
        return found

    def add(self, branch: str, title: str, message: str, files: dict[str, bytes]) -> Commit:
        parent = self.branches.get(branch)
        oid = hashlib.sha1(f"{branch}{title}{parent}{time.monotonic_ns()}".encode()).hexdigest()
        self.commits[oid] = Commit(oid, title, message, parent, files)
        self.branches[branch] = oid
        return self.commits[oid]


class HubServer:
    """Starts at once; ``close`` ends it. State may be read by tests at any time."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[float, str, str]] = []
        """Time (monotonic), endpoint, authorization of every request."""
        self.before_commit: list[Callable[[Repository], object]] = []
        """Run once each, just before a commit is applied: another writer, a file that training writes anew."""
        self.lock = threading.RLock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def titles(self, repo: str, revision: str = "main") -> list[str]:
        """Titles of the commits after the first, oldest first."""
        return [c.title for c in reversed(self.repositories[repo].history(revision))][1:]

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        found = self.repositories[repo].resolve(revision)
        assert found is not None, revision
        return found.files

    def times(self, endpoint: str) -> list[float]:
        return [when for when, name, _ in self.requests if name == endpoint]

    def take_fault(self, endpoint: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.endpoint == endpoint and fault.count > 0:
                    fault.count -= 1
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients are killed in these tests."""


Answer = tuple[int, Any]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: 40 ms each time otherwise
    server: _Server

    ROUTES = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/auth-check(?P<write>/write)?", "auth_check"),
        ("GET", REPOSITORY + r"(/revision/(?P<revision>[^/]+))?", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/refs", "refs"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/commits/(?P<revision>[^/]+)", "commits"),
        ("GET", REPOSITORY + r"/tree/(?P<revision>[^/]+)(/(?P<path>.*))?", "tree"),
        ("POST", REPOSITORY + r"/paths-info/(?P<revision>[^/]+)", "paths_info"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<name>[^/]+)", "branch"),
        ("DELETE", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<name>[^/]+)", "delete_branch"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/tag/(?P<revision>[^/]+)", "tag"),
        ("DELETE", r"/api/models/(?P<repo>[^/]+/[^/]+)/tag/(?P<name>[^/]+)", "delete_tag"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_put"),
        ("POST", r"/lfs/verify", "lfs_verify"),
        ("HEAD", r"/(?P<repo>(datasets/)?[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
        ("GET", r"/(?P<repo>(datasets/)?[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def log_message(self, format: str, *args: Any) -> None: ...

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _serve(self) -> None:
        url = urlsplit(self.path)
        for method, pattern, name in self.ROUTES:
            match = re.fullmatch(pattern, url.path)
            if method == self.command and match:
                arguments = {k: unquote(v) for k, v in match.groupdict().items() if v is not None}
                return self._answer(name, arguments, {k: v[0] for k, v in parse_qs(url.query).items()})
        self._body()
        return self._send(404, {"error": f"no such endpoint: {self.command} {url.path}"})

    def _answer(self, name: str, arguments: dict[str, str], query: dict[str, str]) -> None:
        hub = self.server.hub
        with hub.lock:
            hub.requests.append((time.monotonic(), name, self.headers.get("Authorization", "")))
        fault = hub.take_fault(name)
        kind = fault.kind if fault else None
        if kind == "cut":
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            return self._close()
        body = self._body()
        if kind == "drop_before":
            return self._close()
        if isinstance(kind, int):
            assert fault is not None
            return self._send(kind, {"error": f"injected {kind}"}, fault.headers)
        if kind == "held":
            assert fault is not None
            fault.release.wait(PATIENCE_SECONDS)
        with hub.lock:
            status, value = self._call(name, arguments, query, body)
        if fault is not None:
            fault.answered.set()
        if kind == "drop_after":
            return self._close()
        if kind == "held_after":
            assert fault is not None
            fault.release.wait(PATIENCE_SECONDS)
        if isinstance(value, tuple):
            return self._send(status, value[0], value[1])
        return self._send(status, value)

    def _call(self, name: str, arguments: dict[str, str], query: dict[str, str], body: bytes) -> Any:
        repo = arguments.pop("repo", None)
        if name not in ("lfs_put", "resolve", "validate"):
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if token not in (WRITER, READER):
                return 401, ({"error": "Invalid credentials"}, {"X-Error-Message": "Invalid credentials"})
            writes = self.command in ("POST", "DELETE") or "write" in arguments
            if token == READER and writes:
                return 403, {"error": "You don't have the rights to write"}
        if repo is not None:
            if repo not in self.server.hub.repositories:
                return 404, ({"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            found = self.server.hub.repositories[repo]
            if (
                "revision" in arguments
                and name not in ("commit", "preupload")
                and not found.resolve(arguments["revision"])
            ):
                return 404, ({"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            return getattr(self, f"_{name}")(found, body, query=query, repo_id=repo, **arguments)
        return getattr(self, f"_{name}")(body, **arguments)

    # ----------------------------------------------------------------------------------------------- without repository
    def _whoami(self, body: bytes) -> Answer:
        return 200, {"type": "user", "name": "org", "auth": {"accessToken": {"role": "write"}}}

    def _create(self, body: bytes) -> Answer:
        asked, hub = json.loads(body), self.server.hub
        name = f"{asked['organization']}/{asked['name']}"
        if name in hub.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}
        hub.repositories[name] = Repository(asked.get("visibility") == "private")
        hub.repositories[name].add("main", "initial commit", "", {".gitattributes": b"*.safetensors filter=lfs\n"})
        return 200, {"url": f"{hub.url}/{name}"}

    def _validate(self, body: bytes) -> Answer:
        match = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
        valid = match is not None and isinstance(yaml.safe_load(match[1]), dict)
        return (200, {"errors": [], "warnings": []}) if valid else (400, {"errors": [{"message": "no metadata"}]})

    def _lfs_put(self, body: bytes, oid: str) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "sha256 differs"}
        self.server.hub.large[oid] = body
        return 200, {}

    def _lfs_verify(self, body: bytes) -> Answer:
        asked = json.loads(body)
        there = self.server.hub.large.get(asked["oid"])
        return (200, {}) if there is not None and len(there) == asked["size"] else (404, {"error": "not there"})

    # -------------------------------------------------------------------------------------------------- of a repository
    def _auth_check(self, repo: Repository, body: bytes, **_: Any) -> Answer:
        return 200, {}

    def _info(self, repo: Repository, body: bytes, repo_id: str, revision: str = "main", **_: Any) -> Answer:
        found = repo.resolve(revision)
        assert found is not None
        return 200, {"id": repo_id, "sha": found.oid, "siblings": [{"rfilename": n} for n in found.files]}

    def _refs(self, repo: Repository, body: bytes, **_: Any) -> Answer:
        def listed(refs: dict[str, str], kind: str) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": oid} for n, oid in refs.items()]

        return 200, {"branches": listed(repo.branches, "heads"), "tags": listed(repo.tags, "tags"), "converts": []}

    def _commits(self, repo: Repository, body: bytes, query: dict[str, str], revision: str, **_: Any) -> Any:
        history, page = repo.history(revision), int(query.get("p", 0))
        listed = [
            {"id": c.oid, "title": c.title, "message": c.message, "authors": [{"user": "org"}], "date": _date()}
            for c in history[page * PAGE : (page + 1) * PAGE]
        ]
        following = f"{self.server.hub.url}{urlsplit(self.path).path}?p={page + 1}"
        more = {"Link": f'<{following}>; rel="next"'} if len(history) > (page + 1) * PAGE else {}
        return 200, (listed, more)

    def _tree(self, repo: Repository, body: bytes, revision: str, path: str = "", **_: Any) -> Any:
        found = repo.resolve(revision)
        assert found is not None
        listed = [_described(n, c) for n, c in found.files.items() if not path or n.startswith(f"{path}/")]
        if path and not listed:
            return 404, ({"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        return 200, listed

    def _paths_info(self, repo: Repository, body: bytes, revision: str, **_: Any) -> Answer:
        found = repo.resolve(revision)
        assert found is not None
        return 200, [_described(n, found.files[n]) for n in json.loads(body)["paths"] if n in found.files]

    def _preupload(self, repo: Repository, body: bytes, revision: str, **_: Any) -> Answer:
        found = repo.resolve(revision)
        there = found.files if found else {}
        answers = []
        for file in json.loads(body)["files"]:
            large = file["path"].endswith((".safetensors", ".png")) or file["size"] > 10_000_000
            answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if file["path"] in there:
                content = there[file["path"]]
                answer["oid"] = hashlib.sha256(content).hexdigest() if large else _blob(content)
            answers.append(answer)
        return 200, {"files": answers}

    def _lfs_batch(self, repo: Repository, body: bytes, **_: Any) -> Answer:
        hub, objects = self.server.hub, []
        for wanted in json.loads(body)["objects"]:
            upload = {"href": f"{hub.url}/lfs/{wanted['oid']}?X-Amz-Signature=secretsignature"}
            actions = {"upload": upload, "verify": {"href": f"{hub.url}/lfs/verify"}}
            objects.append(wanted | ({} if wanted["oid"] in hub.large else {"actions": actions}))
        return 200, {"transfer": "basic", "objects": objects}

    def _commit(self, repo: Repository, body: bytes, revision: str, repo_id: str, **_: Any) -> Answer:
        lines = [json.loads(line) for line in body.splitlines()]
        header = lines[0]["value"]
        while self.server.hub.before_commit:
            self.server.hub.before_commit.pop()(repo)
        if header.get("parentCommit", repo.branches[revision]) != repo.branches[revision]:
            return 412, {"error": "A commit has happened since. Please refresh and try again."}
        files = dict(repo.commits[repo.branches[revision]].files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                if files.pop(value["path"], None) is None:
                    return 400, {"error": f"{value['path']} is not there"}
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.server.hub.large:
                    return 400, {"error": f"{value['path']} was not uploaded"}
                files[value["path"]] = self.server.hub.large[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        made = repo.add(revision, header["summary"], header["description"], files)
        return 200, {"commitUrl": f"{self.server.hub.url}/{repo_id}/commit/{made.oid}", "commitOid": made.oid}

    def _branch(self, repo: Repository, body: bytes, name: str, **_: Any) -> Answer:
        if name in repo.branches:
            return 409, {"error": "Reference already exists"}
        repo.branches[name] = json.loads(body or b"{}").get("startingPoint", repo.branches["main"])
        return 200, {}

    def _delete_branch(self, repo: Repository, body: bytes, name: str, **_: Any) -> Answer:
        return (200, {}) if repo.branches.pop(name, None) else (404, {"error": "no such branch"})

    def _tag(self, repo: Repository, body: bytes, revision: str, **_: Any) -> Answer:
        name, found = json.loads(body)["tag"], repo.resolve(revision)
        assert found is not None
        if name in repo.tags:
            return 409, {"error": "Tag reference exists already"}
        repo.tags[name] = found.oid
        return 200, {}

    def _delete_tag(self, repo: Repository, body: bytes, name: str, **_: Any) -> Answer:
        return (200, {}) if repo.tags.pop(name, None) else (404, {"error": "no such tag"})

    def _resolve(self, repo: Repository, body: bytes, revision: str, path: str, **_: Any) -> Any:
        found = repo.resolve(revision)
        assert found is not None
        if path not in found.files:
            return 404, ({"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        content = found.files[path]
        large = path.endswith((".safetensors", ".png"))
        etag = hashlib.sha256(content).hexdigest() if large else _blob(content)
        headers = {"X-Repo-Commit": found.oid, "ETag": f'"{etag}"', "Content-Type": "application/octet-stream"}
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return 206, (content[start:], headers)
        return 200, (content, headers)

    # --------------------------------------------------------------------------------------------------------- plumbing
    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for key, text in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _close(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def _described(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": _blob(content)}


def _blob(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _date() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[HubServer]:
    """A server that this process and its children take for the Hub, with a token that may write."""
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils._http import close_session

    hub = HubServer()
    for name, value in {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": WRITER,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "ACCEL_TRAIN_HUB_BACKOFF_SECONDS": "0.05",
        "ACCEL_TRAIN_HUB_TIMEOUT_SECONDS": "120",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_OIDC_RESOURCE", "NO_PROXY", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, constant in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
    }.items():
        monkeypatch.setattr(constants, name, constant)
    # The functions of the package, called by peft and diffusers, share one client made at the import.
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    close_session()
    try:
        yield hub
    finally:
        close_session()
        hub.close()


@contextmanager
def serving_repository(monkeypatch: pytest.MonkeyPatch, home: Path, repository: str) -> Iterator[HubServer]:
    """The same with an empty repository."""
    from huggingface_hub import HfApi

    with serving(monkeypatch, home) as hub:
        HfApi(endpoint=hub.url).create_repo(repository)
        yield hub
