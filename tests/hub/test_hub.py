"""Pushing to the Hub and loading back, against a server on the loopback that speaks the Hub's API."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file

from accel_train import load
from accel_train.checkpoints import fetch
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.config import UsageError
from accel_train.hub import download as download_module
from accel_train.hub import pusher as hub
from accel_train.hub import retry
from accel_train.hub.client import check_repository
from accel_train.hub.download import download, download_manifest, download_once
from accel_train.hub.errors import HubError, Problem, describe, redact
from accel_train.hub.model_card import CardFacts, build_card
from accel_train.hub.options import HubConfig
from accel_train.hub.push_now import push_now
from accel_train.hub.pusher import Pusher
from accel_train.hub.queue import Entry, HubQueue
from accel_train.hub.repository import push_checkpoint
from accel_train.hub.worker import push_one
from accel_train.loading import find
from accel_train.store import atomic_files, commit, retention, strict_json
from accel_train.store.manifest import Checkpoint
from accel_train.store.run_file import write_run
from recipes import causal_lm, mmdit, pde
from tests.hub_server import READER, WRITER, Fault, HubServer, Repository, serving
from tests.waiting import until

REPO = "org/model"
CONFIG = HubConfig(repo_id=REPO, finish_minutes=5)

# huggingface_hub uploads large files in a way that its HTTP client calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with serving(monkeypatch, tmp_path / "hf_home") as served:
        yield served


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with what a run leaves beside its checkpoints."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    write_run(run, {"run_id": "abc123"})
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "report").mkdir()
    (run / "report" / "curves.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4)
    (run / "report" / "samples.md").write_text("# Samples\n\n- a text\n")
    (run / "report" / ".half.tmp").write_text("written at this moment")
    (run / "report" / "evaluation.json").write_text(json.dumps({"step": 1200, "loss": 1.5}))
    return run


def make_checkpoint(run: Path, step: int, run_id: str = "abc123", size: int = 256, **manifest: Any) -> Checkpoint:
    """A committed checkpoint with real safetensors files, optimizer state and everything else that is pushed."""
    directory = run / "checkpoints"
    temporary = directory / commit.temporary_name(step, atomic_files.new_nonce())
    (temporary / "optimizer").mkdir(parents=True)
    (temporary / "assets").mkdir()
    weights = np.random.default_rng(step).standard_normal(size, dtype=np.float32)
    for scale, name in enumerate(("model", "ema", "optimizer/exp_avg"), 1):
        save_file({"layer.weight": weights * scale}, temporary / f"{name}.safetensors")
    (temporary / "config.json").write_text('{"width": 4}')
    (temporary / "assets" / "tokenizer.json").write_text('{"vocab": ["a"]}')
    (temporary / "optimizer" / "index.json").write_text('{"step": 1, "state": {}}')
    (temporary / "trainer_state.json").write_text('{"step": 1}')
    files = {
        path.relative_to(temporary).as_posix(): commit.seal_file(path)
        for path in sorted(temporary.rglob("*"))
        if path.is_file()
    }
    facts = {"accel_train": "0.1.0", "run_id": run_id, "step": step, "state": True}
    final = directory / commit.checkpoint_name(step)
    commit.commit(temporary, final, facts | {"metrics": {}} | manifest | {"files": files})
    return commit.verify(final)


def entry_of(checkpoint: Checkpoint, **changes: Any) -> Entry:
    run_id = str(checkpoint.manifest["run_id"])
    return replace(Entry(checkpoint.path.name, checkpoint.step, run_id, REPO), **changes)


def push(checkpoint: Checkpoint, **changes: Any) -> dict[str, str]:
    check_repository(CONFIG)
    return push_checkpoint(checkpoint.path, entry_of(checkpoint, **changes), checkpoint.path.parents[1])


def contents(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


# ------------------------------------------------------------------------------------------------------ before training
@pytest.mark.parametrize("repo_id", ["model", "org/name/more", "org/na me", "org/", "", "-org/model", "org/model.git"])
def test_a_malformed_repository_is_refused(repo_id: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"hub.repo_id: {repo_id!r} is not ORGANISATION/NAME")):
        HubConfig(repo_id=repo_id)


def test_a_repository_is_created_once_and_private(server: HubServer) -> None:
    check_repository(CONFIG)
    check_repository(CONFIG)
    assert server.repositories[REPO].private
    check_repository(HubConfig(repo_id="org/open", private=False))
    assert not server.repositories["org/open"].private
    check_repository(HubConfig())  # off: not a request
    assert len(server.times("whoami")) == 3


def test_a_token_that_is_missing_wrong_or_may_not_write_is_said(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="needs a token, but none was found; set HF_TOKEN"):
        check_repository(CONFIG)
    monkeypatch.setenv("HF_TOKEN", "hf_expiredExpired")
    with pytest.raises(
        UsageError, match=r"hub\.repo_id: org/model: the Hub refuses the request \(status 401"
    ) as refused:
        check_repository(CONFIG)
    assert "hf_expired" not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(UsageError, match=r"refuses the request \(status 403.*token that may create and write"):
        check_repository(CONFIG)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    check_repository(CONFIG)
    monkeypatch.setenv("HF_TOKEN", READER)  # the repository is there and may be read, which is not enough
    with pytest.raises(UsageError, match=r"refuses the request \(status 403"):
        check_repository(CONFIG)


def test_no_way_to_the_hub_is_said(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    with pytest.raises(UsageError, match=r"the Hub at http://hub\.invalid cannot be reached"):
        check_repository(CONFIG)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE unset"):
        check_repository(CONFIG)


def test_a_hub_in_trouble_does_not_stop_training(server: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    server.faults = [Fault("whoami", 503, count=2)]
    check_repository(CONFIG)  # came back
    assert not caplog.records
    server.faults = [Fault("whoami", 503, count=9)]
    check_repository(CONFIG)
    assert "checkpoints wait in the queue" in caplog.text


# ------------------------------------------------------------------------------------------------------- what is pushed
def test_weights_only_round_trip(server: HubServer, run: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(run, 1200, metrics={"loss": 1.25})
    (run / "report" / "memory_snapshot.pickle").write_bytes(b"stays here")
    where = push(checkpoint)
    assert where["revision"] == "step-00001200"
    pushed = server.files(REPO)
    assert pushed == server.files(REPO, "step-00001200")
    extras = {"README.md", "config.yaml", ".gitattributes"}
    extras |= {"report/curves.png", "report/samples.md", "report/evaluation.json"}
    listed = {"model.safetensors", "ema.safetensors", "config.json", "assets/tokenizer.json"}
    assert set(pushed) == listed | {"manifest.json"} | extras
    assert server.large.keys() >= {checkpoint.manifest["files"]["model.safetensors"]["sha256"]}  # went as LFS
    manifest = json.loads(pushed["manifest.json"])
    assert manifest["state"] is False
    assert set(manifest["files"]) == listed

    back = download("org/model@1200", tmp_path / "there")
    assert back.name == "checkpoint_00001200"
    assert commit.verify(back).manifest["metrics"] == {"loss": 1.25}
    original = contents(checkpoint.path)
    assert {k: v for k, v in contents(back).items() if k != "manifest.json"} == {k: original[k] for k in listed}
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["checkpoint_00001200"]


def test_with_state_everything_comes_back_byte_for_byte(server: HubServer, run: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(run, 1200)
    push(checkpoint, include_state=True)
    for spec in ("hub:org/model@1200", "org/model@step-00001200", "org/model"):
        assert download_manifest(spec) == checkpoint.manifest
        back = download(spec, tmp_path / spec.replace("/", "_"))
        assert contents(back) == contents(checkpoint.path)
    assert (back.stat().st_mode ^ (run / "checkpoints").stat().st_mode) & 0o777 == 0


def test_what_an_earlier_push_left_goes_and_what_people_added_stays(server: HubServer, run: Path) -> None:
    push(make_checkpoint(run, 1), include_state=True)
    repository = server.repositories[REPO]
    repository.add(
        "main", "by hand", "", server.files(REPO) | {"LICENSE": b"mine", "model-00001-of-00002.safetensors": b""}
    )
    (run / "report" / "samples.md").unlink()
    push(make_checkpoint(run, 2))
    left = set(server.files(REPO))
    assert "LICENSE" in left
    assert not left & {"report/samples.md", "model-00001-of-00002.safetensors", "optimizer/exp_avg.safetensors"}
    assert "report/samples.md" in server.files(REPO, "step-00000001")
    manifest = json.loads(server.files(REPO)["manifest.json"])
    assert manifest["step"] == 2


def test_pushed_again_is_no_second_commit(server: HubServer, run: Path) -> None:
    checkpoint = make_checkpoint(run, 5)
    first = push(checkpoint)
    for step in (6, 7, 8, 9):
        push(make_checkpoint(run, step))
    (run / "report" / "samples.md").write_text(
        "# New samples\n"
    )  # else huggingface_hub itself sees that nothing is new
    assert push(checkpoint) == first  # found on the second page of the commits
    assert len(server.titles(REPO)) == 5


def test_main_only_advances(server: HubServer, run: Path, tmp_path: Path) -> None:
    old, new = make_checkpoint(run, 600), make_checkpoint(run, 1200)
    push(new)
    assert push(old)["revision"] == "step-00000600"
    assert json.loads(server.files(REPO)["manifest.json"])["step"] == 1200
    assert commit.verify(download("org/model@600", tmp_path / "there")).step == 600
    push(old, include_state=True)  # the same step with more: on top of its own branch
    assert len(server.titles(REPO, "step-00000600")) == 3
    assert len(server.titles(REPO)) == 1


@pytest.mark.parametrize("fault", [Fault("commit", 413), Fault("commit", "drop_before"), Fault("commit", "drop_after")])
def test_the_name_of_a_step_never_leads_to_another_one(
    server: HubServer, run: Path, tmp_path: Path, fault: Fault
) -> None:
    """A run that went back pushes a step older than main's, and the commit is refused or its answer is lost."""
    push(make_checkpoint(run, 200))
    branches = server.repositories[REPO].branches
    back = make_checkpoint(run, 150)
    during: list[set[str]] = []
    server.before_commit = [lambda repo: during.append(set(repo.branches))]
    server.faults = [replace(fault)]
    with pytest.raises(Exception, match=r"413|disconnected"):
        push(back)
    assert "step-00000150" not in branches
    with pytest.raises(UsageError, match="no revision step-00000150"):
        download("org/model@150", tmp_path / "there")
    server.faults = []
    assert push(back)["revision"] == push(back)["revision"] == "step-00000150"  # a second time: what was killed
    assert commit.verify(download("org/model@150", tmp_path / "there")).step == 150
    assert b'revision="step-00000150"' in server.files(REPO, "step-00000150")["README.md"]
    assert set(branches) == {"main", "step-00000150", "step-00000200"}
    assert len(server.titles(REPO, "step-00000150")) == 2
    assert "step-00000150" not in during[0]


def test_killed_before_the_branch_of_an_older_step_is_tidied_up(
    server: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(make_checkpoint(run, 200))
    back = make_checkpoint(run, 150)
    for endpoint in ("branch", "delete_branch"):
        server.faults = [Fault(endpoint, 500, count=9)]
        with pytest.raises(Exception, match="500"):
            push(back)
    server.faults = []
    push(back)
    assert set(server.repositories[REPO].branches) == {"main", "step-00000150", "step-00000200"}
    assert len(server.titles(REPO, "step-00000150")) == 2


def test_the_name_of_a_step_that_leads_to_another_one_is_refused_and_mended(
    server: HubServer, run: Path, tmp_path: Path
) -> None:
    """As somebody may leave it: anyone with access moves a branch."""
    push(make_checkpoint(run, 200), include_state=True)
    repository = server.repositories[REPO]
    for name in ("step-00000150", "step-00000150-other9"):
        repository.branches[name] = repository.branches["main"]
    for spec in ("org/model@150", "org/model@step-00000150", "hub:org/model@step-00000150-other9"):
        with pytest.raises(UsageError, match=r"at step-00000150\S* holds step 200, not 150: .*push step 150 again"):
            download(spec, tmp_path / "there")
        with pytest.raises(UsageError, match="holds step 200, not 150"):
            download_manifest(spec)
    assert list((tmp_path / "there").iterdir()) == []
    push(make_checkpoint(run, 150))
    assert download_manifest("org/model@150")["step"] == 150
    assert len(server.titles(REPO)) == 1


def test_tags(server: HubServer, run: Path, tmp_path: Path) -> None:
    where = push(make_checkpoint(run, 7), revisions="tag")
    assert server.repositories[REPO].tags == {"step-00000007": where["commit"]}
    assert set(server.repositories[REPO].branches) == {"main"}
    assert download("org/model@7", tmp_path / "there").name == "checkpoint_00000007"


@pytest.mark.parametrize("revisions", ["branch", "tag"])
def test_a_step_trained_again_replaces_its_name_and_another_run_does_not(
    server: HubServer, run: Path, tmp_path: Path, revisions: str
) -> None:
    push(make_checkpoint(run, 10), revisions=revisions)
    commit.remove(run / "checkpoints" / "checkpoint_00000010")
    again = push(make_checkpoint(run, 10, size=300), revisions=revisions)
    assert again["revision"] == "step-00000010"
    assert server.repositories[REPO].resolve("step-00000010").oid == again["commit"]  # type: ignore[union-attr]
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    foreign = push(make_checkpoint(other, 10, run_id="other9"), revisions=revisions)
    assert foreign["revision"] == "step-00000010-other9"
    assert b'revision="step-00000010-other9"' in server.files(REPO)["README.md"]
    assert server.repositories[REPO].resolve("step-00000010").oid == again["commit"]  # type: ignore[union-attr]
    older = push(make_checkpoint(other, 4, run_id="other9"), revisions=revisions)
    assert older["revision"] == "step-00000004"


def test_a_commit_of_another_meanwhile_is_not_overwritten(server: HubServer, run: Path) -> None:
    check_repository(CONFIG)
    server.before_commit = [
        lambda repo: repo.add("main", "someone else", "", repo.commits[repo.branches["main"]].files)
    ]
    config = replace(CONFIG, finish_minutes=5)
    assert len(push_now(make_checkpoint(run, 3).path, config)) == 1
    assert server.titles(REPO)[0] == "someone else"
    assert re.fullmatch(r"step 3 of run abc123 \([0-9a-f]{12}\)", server.titles(REPO)[1])
    assert len(server.times("commit")) == 2


# ------------------------------------------------------------------------------------------------------- what is queued
@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pusher process that pushes nothing, so that the queue can be looked at."""

    def start(run: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE)

    monkeypatch.setattr(hub, "_start_worker", start)


def offered(run: Path, config: HubConfig, *checkpoints: Checkpoint, **options: Any) -> list[str]:
    """Offer them in one start of training; returns what waits afterwards."""
    pusher = Pusher(run, config, is_main=True, **options)
    for checkpoint in checkpoints:
        pusher.offer(checkpoint)
    pusher.close()
    return sorted(name.removeprefix("checkpoint_0000000") for name in pusher.busy())


@pytest.mark.usefixtures("sleeping")
def test_every_nth_is_counted_over_restarts(run: Path) -> None:
    config = replace(CONFIG, push_every=2)
    points = [make_checkpoint(run, step) for step in range(1, 6)]
    assert offered(run, config, *points[:3]) == ["2"]
    assert offered(run, config, points[2]) == ["2"]  # the one resumed from: offered before, not counted twice
    assert offered(run, config, points[3]) == ["2", "4"]
    assert offered(run, config, points[4]) == ["2", "4"]
    assert offered(run, config, make_checkpoint(run, 6, run_id="new")) == ["2", "4"]  # another run counts from 0


@pytest.mark.usefixtures("sleeping")
@pytest.mark.parametrize(("mode", "best"), [("min", ["1", "3"]), ("max", ["1", "2", "5"])])
def test_best_is_the_best_so_far_over_restarts(run: Path, mode: Any, best: list[str]) -> None:
    config = replace(CONFIG, push="best")
    figures = [2.0, 3.0, 1.0, None, 4.0]
    points = [make_checkpoint(run, step, metrics={"loss": f} if f else {}) for step, f in enumerate(figures, 1)]
    offered(run, config, *points[:2], best_metric="loss", best_mode=mode)
    assert offered(run, config, *points[2:], best_metric="loss", best_mode=mode) == best
    assert offered(run, config, make_checkpoint(run, 9), best_metric="loss", best_mode=mode) == best  # no figure
    with pytest.raises(UsageError, match=r"set checkpoints\.best_metric"):
        Pusher(run, config, is_main=True)


@pytest.mark.usefixtures("sleeping")
def test_off_or_not_the_main_process_nothing_happens(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    point = make_checkpoint(run, 1)
    for pusher in (Pusher(run, CONFIG, is_main=False), Pusher(run, HubConfig(), is_main=True)):
        pusher.offer(point)
        assert pusher.busy() == set()
        assert pusher.finish().code == 0
    assert not (run / "hub").exists()
    HubQueue(run).add(entry_of(point))
    caplog.clear()
    Pusher(run, HubConfig(), is_main=True)
    assert f"resume with: accel-train checkpoints push {shlex.quote(str(run))}" in caplog.text


def test_the_queue_gives_way_to_the_newest_but_keeps_best_and_hand(run: Path) -> None:
    queue = HubQueue(run)
    for step, reason in ((10, "every"), (20, "hand"), (30, "best"), (40, "every"), (50, "every")):
        queue.add(Entry(f"checkpoint_{step:08d}", step, "abc123", REPO, reason=reason))  # type: ignore[arg-type]
    order = []
    while (entry := queue.next()) is not None:
        order.append(entry.step)
        queue.done(entry, {})
    assert order == [20, 30, 50]
    events = [json.loads(line) for line in (run / "hub" / "log.jsonl").read_text().splitlines()]
    coalesced = [e["checkpoint"] for e in events if e["event"] == "coalesced"]
    assert coalesced == ["checkpoint_00000010", "checkpoint_00000040"]
    assert "behind: checkpoint_00000050 is newer" in events[0]["reason"]


def test_a_newer_entry_for_another_repository_replaces_nothing(run: Path) -> None:
    queue = HubQueue(run)
    for step, repo_id in ((10, REPO), (20, "me/other"), (30, "me/other")):
        queue.add(Entry(f"checkpoint_{step:08d}", step, "abc123", repo_id))
    order = []
    while (entry := queue.next()) is not None:
        order.append(entry.step)
        queue.done(entry, {})
    assert order == [10, 30]


def test_a_line_of_the_log_that_is_being_written_is_read_once_it_is_whole(run: Path) -> None:
    queue = HubQueue(run)
    queue.log("pushed", checkpoint="one")
    log = run / "hub" / "log.jsonl"
    with log.open("a") as file:
        file.write('{"event": "fai')
    events, end = queue.events(0)
    assert [event["event"] for event in events] == ["pushed"]
    with log.open("a") as file:
        file.write('led"}\n')
    events, end = queue.events(end)
    assert [event["event"] for event in events] == ["failed"]
    assert end == queue.log_size()


@pytest.mark.fault(
    "R1",
    injected="files of the Hub's queue cut, changed by a bit, of wrong types, nested deeply; a directory, a FIFO, a "
    "link in their place",
    outcome="set aside, with the reason; the others are pushed",
)
def test_a_damaged_queue_file_does_not_block_the_others(run: Path) -> None:
    queue = HubQueue(run)
    queue.add(entry_of(make_checkpoint(run, 2)))
    sound = (run / "hub" / "queue" / "checkpoint_00000002.json").read_text()
    own = json.loads(sound)
    found: dict[str, str | dict[str, Any]] = {
        "cut": sound[:50],
        "a bit": sound.replace('"step": 2', '"step": 3'),
        "without its hash": json.dumps({key: value for key, value in own.items() if key != strict_json.SEAL}),
        "another": {"checkpoint": "checkpoint_00000002"},
        "type": {"step": "2"},
        "huge": {"step": 10**30},
        "repository": {"repo_id": 7},
        "reason": {"reason": "whim"},
        "deep": "[" * 100_000,
        "twice": sound.replace('"step": 2', '"step": 2, "step": 2'),
        "lacking": json.dumps(strict_json.sealed({"step": 3})),
    }
    damaged = {f"checkpoint_{step:08d}" for step in range(10, 10 + len(found) + 3)}
    for name, text in zip(sorted(damaged), found.values(), strict=False):
        if isinstance(text, str):
            content = text.replace("checkpoint_00000002", name)
        else:
            content = json.dumps(strict_json.sealed(own | {"checkpoint": name} | text))
        (run / "hub" / "queue" / f"{name}.json").write_text(content)
    directory, fifo, link = (run / "hub" / "queue" / f"{name}.json" for name in sorted(damaged)[-3:])
    directory.mkdir()
    os.mkfifo(fifo)
    link.symlink_to("/nowhere")
    assert [entry.step for entry in queue.entries()] == [2]
    assert queue.names() == {"checkpoint_00000002"}
    assert set(queue.failed()) == damaged
    assert all("cannot be read" in reason for reason in queue.failed().values())
    assert len(list((run / "hub" / "queue").glob("*.aside-*"))) == len(damaged)
    queue.retry_failed()
    assert queue.names() == {"checkpoint_00000002"}


def test_a_push_that_succeeds_ends_an_earlier_failure_and_order_is_by_step(run: Path) -> None:
    queue = HubQueue(run)
    for step in (100_000_000, 99_999_999):  # in the order of the names the longer comes first
        entry = Entry(f"checkpoint_{step:08d}", step, "abc123", REPO, reason="hand")
        queue.add(entry)
        queue.fail(entry, "refused")
        queue.add(entry)
        queue._write("failed", entry.checkpoint, {"reason": "refused"})  # as left by a crash
    assert [entry.step for entry in queue.entries()] == [99_999_999, 100_000_000]
    for entry in queue.entries():
        queue.done(entry, {})
    assert queue.failed() == {}


@pytest.mark.parametrize("act", ["done", "fail", "retry"])
def test_a_crash_at_any_instant_loses_no_entry(run: Path, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    """It waits, has failed or was pushed, whichever of the queue's files was written last."""

    entry = entry_of(make_checkpoint(run, 1))
    queue = HubQueue(run)
    left = [0]

    def counted(act: Any) -> Any:
        def changed(*given: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return act(*given, **options)

        return changed

    acts = {"done": lambda: queue.done(entry, {}), "fail": lambda: queue.fail(entry, "no"), "retry": queue.retry_failed}
    for changes in itertools.count():
        queue.add(entry)
        if act == "retry":
            queue.fail(entry, "refused")
        left[0] = changes
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(atomic_files, "replace_json", counted(atomic_files.replace_json))
            patch.setattr(Path, "unlink", counted(Path.unlink))
            acts[act]()
        assert {*queue.names(), *queue.failed(), *queue.pushed()} == {entry.checkpoint}, f"after {changes} changes"
        shutil.rmtree(queue.directory)
        if left[0] >= 0:
            break
    assert changes > 1


def test_a_queue_file_that_cannot_be_read_now_waits_on(run: Path) -> None:
    queue = HubQueue(run)
    for step in (1, 2):
        queue.add(entry_of(make_checkpoint(run, step)))
    file = run / "hub" / "queue" / "checkpoint_00000001.json"
    saved = file.read_text()
    file.unlink()
    file.symlink_to("/proc/self/mem")  # reads fail with EIO, as on a failing disk
    assert [entry.step for entry in queue.entries()] == [2]
    assert (queue.names(), queue.failed()) == ({"checkpoint_00000001", "checkpoint_00000002"}, {})
    file.unlink()
    file.write_text(saved)
    assert [entry.step for entry in queue.entries()] == [1, 2]


@pytest.mark.usefixtures("sleeping")
def test_the_best_so_far_is_not_forgotten_while_its_record_cannot_be_read(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best = replace(CONFIG, push="best")
    assert offered(run, best, make_checkpoint(run, 1, metrics={"loss": 1.0}), best_metric="loss") == ["1"]
    record = run / "hub" / "offers.json"
    saved = record.read_text()
    record.unlink()
    record.symlink_to("/proc/self/mem")  # reads fail with EIO, as on a failing disk
    pusher = Pusher(run, best, is_main=True, best_metric="loss")
    worse = make_checkpoint(run, 2, metrics={"loss": 2.0})
    pusher.offer(worse)
    assert "hub: UnreadableError: Input/output error" in caplog.text
    record.unlink()
    record.write_text(saved)
    pusher.offer(worse)
    pusher.offer(make_checkpoint(run, 3, metrics={"loss": 0.5}))
    pusher.close()
    assert pusher.busy() == {"checkpoint_00000001", "checkpoint_00000003"}


def test_other_files_of_the_queue_may_be_damaged(run: Path) -> None:
    queue = HubQueue(run)
    queue.save_offers({"run_id": "abc123", "committed": 4, "last": "checkpoint_00000004", "best": 1.5})
    assert queue.offers("abc123")["committed"] == 4
    file = run / "hub" / "offers.json"
    file.write_text(file.read_text().replace('"committed": 4', '"committed": 5'))
    assert queue.offers("abc123") == {"run_id": "abc123", "committed": 0}
    (run / "hub" / "pushed").mkdir()
    os.mkfifo(run / "hub" / "pushed" / "checkpoint_00000004.json")
    assert queue.pushed() == {"checkpoint_00000004": {}}
    (run / "hub" / "log.jsonl").write_text('NaN\n{"event": "pushed"}\n' + "[" * 100_000 + "\n")
    assert queue.events(0)[0] == [{"event": "pushed"}]


@pytest.mark.usefixtures("sleeping")
def test_offering_never_raises(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run / "hub").write_text("in the way")
    pusher = Pusher(run, replace(CONFIG, finish_minutes=0.01), is_main=True)
    pusher.offer(make_checkpoint(run, 1))
    assert "hub: " in caplog.text
    pusher.finish()


# ------------------------------------------------------------------------------------------------------ beside the loop
def test_training_pushes_in_the_background(server: HubServer, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check_repository(CONFIG)
    pusher = Pusher(run, CONFIG, is_main=True)
    for step in (1, 2):
        server.faults = [held := Fault("lfs_put", "held")]
        pusher.offer(make_checkpoint(run, step))  # returns though the Hub does not answer
        held.release.set()
        until(lambda: not pusher.busy())
    pusher.offer(make_checkpoint(run, 3))
    status = pusher.finish()
    assert (status.code, status.waiting, dict(status.failed)) == (0, (), {})
    assert status.pushed == ("checkpoint_00000001", "checkpoint_00000002", "checkpoint_00000003")
    assert [t.split()[1] for t in server.titles(REPO)] == ["1", "2", "3"]
    assert set(server.repositories[REPO].branches) == {"main", "step-00000001", "step-00000002", "step-00000003"}
    assert "3 pushed, 0 waiting, 0 failed; hub status 0" in caplog.text
    assert f"hub: pushed checkpoint_00000001: {server.url}/org/model/commit/" in caplog.text
    assert json.loads((run / "run.json").read_text())["hub"] == {"repo_id": REPO, "pending": [], "failed": {}}
    assert (run / "hub" / "worker.log").read_text() == ""


def test_a_repository_that_the_first_check_could_not_create_is_created_by_a_push(
    server: HubServer, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults = [Fault("whoami", 503, count=3)]
    check_repository(CONFIG)
    assert "checkpoints wait in the queue" in caplog.text
    pusher = Pusher(run, CONFIG, is_main=True)
    for step in (1, 2):
        pusher.offer(make_checkpoint(run, step))
        until(lambda: not pusher.busy())
    assert pusher.finish().pushed == ("checkpoint_00000001", "checkpoint_00000002")
    assert server.repositories[REPO].private
    assert len(server.times("create")) == 1


def test_a_repository_deleted_meanwhile_is_not_created_by_a_push(server: HubServer, run: Path) -> None:
    check_repository(CONFIG)
    queue = HubQueue(run)
    for step in (1, 2):
        queue.add(entry_of(make_checkpoint(run, step)))
    assert push_one(queue, queue.entries()[0]) is None
    del server.repositories[REPO]
    problem = push_one(queue, queue.entries()[0])
    assert problem is not None
    assert (problem.retry, problem.status) == (False, 404)
    assert "org/model has been deleted or renamed since an earlier push" in queue.failed()["checkpoint_00000002"]
    assert server.repositories == {}
    check_repository(CONFIG)  # the next start asks for the repository once more
    assert set(Pusher(run, CONFIG, is_main=True).finish().pushed) == {"checkpoint_00000001", "checkpoint_00000002"}


def test_a_token_without_rights_fails_a_push_to_a_new_repository(
    server: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", READER)
    queue = HubQueue(run)
    queue.add(entry_of(make_checkpoint(run, 1)))
    problem = push_one(queue, queue.entries()[0])
    assert problem is not None
    assert (problem.retry, problem.status) == (False, 403)
    assert "give one with write permission" in queue.failed()["checkpoint_00000001"]
    assert len(server.times("create")) == 1


@pytest.mark.usefixtures("sleeping")
def test_the_next_start_queues_again_what_was_refused(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not a damaged file, a commit that is too large, a checkpoint that is gone or one for another repository."""
    caplog.set_level(logging.INFO)
    queue = HubQueue(run)
    for step, status in enumerate((401, 403, 404, 413, None, 404, 404), 1):
        changes = {"repo_id": "org/other"} if step == 6 else {}
        queue.add(entry_of(make_checkpoint(run, step), **changes))
        queue.fail(queue.entries()[0], f"status {status}", status)
    shutil.rmtree(run / "checkpoints" / "checkpoint_00000007")
    assert offered(run, CONFIG) == ["1", "2", "3"]
    assert {entry.reason for entry in queue.entries()} == {"hand"}  # no newer one replaces them
    assert sorted(queue.failed()) == [f"checkpoint_0000000{step}" for step in (4, 5, 6, 7)]
    waiting = ", ".join(f"checkpoint_0000000{step}" for step in (1, 2, 3))
    assert f"hub: {waiting} left by the last start will be pushed to org/model" in caplog.text


def test_the_status_counts_what_went_to_another_repository_apart(
    server: HubServer, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    check_repository(CONFIG)
    pusher = Pusher(run, CONFIG, is_main=True)
    pusher.offer(make_checkpoint(run, 1))
    pusher.finish()
    HubQueue(run).add(entry_of(make_checkpoint(run, 2)))  # killed before it was pushed
    other = replace(CONFIG, repo_id="org/second")
    check_repository(other)
    pusher = Pusher(run, other, is_main=True)
    assert "hub: checkpoint_00000002 left by the last start will be pushed to org/model" in caplog.text
    pusher.offer(make_checkpoint(run, 3))
    pusher.finish()
    assert "hub: org/second: 1 pushed (and 2 to org/model), 0 waiting, 0 failed; hub status 0" in caplog.text


def test_last_is_pushed_at_the_end_and_not_at_a_preemption(server: HubServer, run: Path) -> None:
    check_repository(CONFIG)
    config = replace(CONFIG, push="last")
    pusher = Pusher(run, config, is_main=True)
    pusher.offer(make_checkpoint(run, 1))
    asked = len(server.requests)
    assert pusher.finish(preempted=True).pushed == ()
    assert len(server.requests) == asked
    pusher = Pusher(run, config, is_main=True)
    pusher.offer(make_checkpoint(run, 1))
    pusher.offer(make_checkpoint(run, 2))
    assert pusher.finish().pushed == ("checkpoint_00000002",)


def test_a_stop_ends_the_waiting_for_the_last_push(server: HubServer, run: Path) -> None:
    check_repository(CONFIG)
    server.faults = [held := Fault("lfs_put", "held")]  # no answer comes before the end of this test
    pusher = Pusher(run, CONFIG, is_main=True)
    pusher.offer(make_checkpoint(run, 1))
    status = pusher.finish(asked_to_stop=lambda: bool(server.times("lfs_put")))
    held.release.set()
    assert pusher.broken_off
    assert status.waiting == ("checkpoint_00000001",)
    again = Pusher(run, CONFIG, is_main=True)
    assert again.finish().pushed == ("checkpoint_00000001",)
    assert not again.broken_off


def test_behind_the_newest_goes_and_the_log_says_so(
    server: HubServer, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    check_repository(CONFIG)
    server.faults = [held := Fault("lfs_put", "held")]
    pusher = Pusher(run, CONFIG, is_main=True)
    pusher.offer(make_checkpoint(run, 1))
    until(lambda: server.times("lfs_put"))
    for step in (2, 3, 4):
        pusher.offer(make_checkpoint(run, step))
    held.release.set()
    assert pusher.finish().code == 0
    assert [t.split()[1] for t in server.titles(REPO)] == ["1", "4"]
    assert "hub: coalesced checkpoint_00000002: behind: checkpoint_00000004 is newer" in caplog.text


def test_a_checkpoint_that_is_gone_or_damaged_has_failed(
    server: HubServer, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_repository(CONFIG)
    queue = HubQueue(run)
    damaged, gone, good = (make_checkpoint(run, step) for step in (1, 2, 3))
    for point in (damaged, gone, good):
        queue.add(entry_of(point, reason="hand"))
    (damaged.path / "model.safetensors").write_bytes(b"damaged")
    commit.remove(gone.path)
    status = Pusher(run, CONFIG, is_main=True).finish()
    assert status.pushed == ("checkpoint_00000003",)
    assert (status.code, status.waiting, list(status.failed)) == (1, (), [damaged.path.name, gone.path.name])
    assert "7 bytes, the manifest says" in status.failed[damaged.path.name]
    assert "checkpoint_00000002 no longer exists" in status.failed[gone.path.name]
    assert "1 pushed, 0 waiting, 2 failed; hub status 1" in caplog.text
    assert json.loads((run / "run.json").read_text())["hub"]["failed"] == dict(status.failed)
    with pytest.raises(HubError, match=r"0 pushed, 2 not: .*7 bytes, the manifest says"):
        push_now(run, HubConfig())
    assert queue.failed() == {}


@pytest.mark.parametrize("part", ["directory", "manifest", "weights"])
def test_a_checkpoint_that_cannot_be_read_now_waits(
    part: str, server: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_repository(CONFIG)
    queue = HubQueue(run)
    checkpoint = make_checkpoint(run, 1)
    entry = entry_of(checkpoint)
    queue.add(entry)
    look = Path.stat

    def fail(path: Any, *_: Any, **named: Any) -> Any:
        if path == checkpoint.path or part == "weights":
            raise OSError(errno.EIO, "Input/output error")
        return look(path, **named)

    manifest = checkpoint.file("manifest.json")
    content = manifest.read_bytes()
    with monkeypatch.context() as patch:
        if part == "manifest":
            manifest.unlink()
            manifest.symlink_to("/proc/self/mem")  # reads fail with EIO, as on a failing disk
        elif part == "directory":
            patch.setattr(Path, "stat", fail)
        else:
            patch.setattr(hashlib, "file_digest", fail)
        problem = push_one(queue, entry)
    assert problem is not None
    assert problem.retry
    assert "Input/output error" in problem.reason
    assert (queue.names(), queue.failed()) == ({entry.checkpoint}, {})
    manifest.unlink()
    manifest.write_bytes(content)
    assert push_one(queue, entry) is None
    assert list(queue.pushed()) == [entry.checkpoint]


def test_others_do_not_wait_for_a_checkpoint_that_cannot_be_read(
    server: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_HUB_BACKOFF_SECONDS", "0")
    check_repository(CONFIG)
    queue = HubQueue(run)
    for step in (1, 2, 3):
        checkpoint = make_checkpoint(run, step)
        queue.add(entry_of(checkpoint, reason="best"))
        if step < 3:
            checkpoint.file("manifest.json").unlink()
            checkpoint.file("manifest.json").symlink_to("/proc/self/mem")
    pusher = Pusher(run, CONFIG, is_main=True)
    status = pusher.finish(asked_to_stop=lambda: len(queue.names()) == 2)
    assert status.pushed == ("checkpoint_00000003",)
    assert status.waiting == ("checkpoint_00000001", "checkpoint_00000002")
    assert status.failed == {}


def test_the_last_checkpoint_damaged_before_its_push_is_no_success(server: HubServer, run: Path) -> None:
    check_repository(CONFIG)
    pusher = Pusher(run, replace(CONFIG, push="last"), is_main=True)
    last = make_checkpoint(run, 1)
    pusher.offer(last)
    (last.path / "model.safetensors").write_bytes(b"damaged")
    status = pusher.finish()
    assert (status.code, status.pushed, list(status.failed)) == (1, (), [last.path.name])


def test_the_token_is_written_nowhere(server: HubServer, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    check_repository(CONFIG)
    leak = {"X-Error-Message": f"Illegal header value b'Bearer {WRITER}'"}
    server.faults = [Fault("commit", 500, headers=leak), Fault("lfs_put", 500), Fault("commits", 403, 0, leak)]
    pusher = Pusher(run, CONFIG, is_main=True)
    pusher.offer(make_checkpoint(run, 1))
    assert pusher.finish().code == 0
    server.faults[2].count = 1
    pusher = Pusher(run, CONFIG, is_main=True)
    pusher.offer(make_checkpoint(run, 2))
    assert pusher.finish().code == 1
    written = contents(run / "hub")
    assert b"Illegal header value" in written["log.jsonl"]
    everything = b"".join(written.values()) + b"".join(contents(run).values()) + caplog.text.encode()
    everything += b"".join(server.files(REPO).values())
    assert WRITER.encode() not in everything
    assert b"secretsignature" not in everything


def test_the_pusher_is_light() -> None:
    """It starts beside a job that needs its memory: no torch, and the file formats' own packages alone."""
    code = "import sys, accel_train.hub.worker, accel_train.hub.repository as r; r.hub_api(); "
    code += "from huggingface_hub import ModelCardData; print({'torch', 'numpy', 'accelerate'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


# -------------------------------------------------------------------------------------------------------------- by hand
def test_by_hand_pushes_what_waits_and_what_was_refused(server: HubServer, run: Path) -> None:
    queue = HubQueue(run)
    for step in (1, 2, 3):
        queue.add(entry_of(make_checkpoint(run, step)))
    queue.fail(queue.entries()[0], "no right to write")
    urls = push_now(run, HubConfig())  # where to is in the queue
    assert len(urls) == 3
    assert all(url.startswith(f"{server.url}/org/model/commit/") for url in urls)
    assert queue.names() == set()
    assert queue.failed() == {}
    assert set(queue.pushed()) == {f"checkpoint_0000000{n}" for n in (1, 2, 3)}
    assert [t.split()[1] for t in server.titles(REPO)] == ["1", "2", "3"]


def test_by_hand_with_nothing_waiting_pushes_the_newest(server: HubServer, run: Path) -> None:
    make_checkpoint(run, 1)
    make_checkpoint(run, 2)
    assert len(push_now(run, CONFIG)) == 1
    assert [t.split()[1] for t in server.titles(REPO)] == ["2"]
    with pytest.raises(UsageError, match=r"the target is unknown.*give hub\.repo_id"):
        push_now(run, HubConfig())


def test_by_hand_what_cannot_be_pushed_is_said(server: HubServer, run: Path, tmp_path: Path) -> None:
    check_repository(CONFIG)
    with pytest.raises(UsageError, match="neither a run nor a checkpoint"):
        push_now(tmp_path, CONFIG)
    with pytest.raises(UsageError, match="has no checkpoint to push"):
        push_now(run, CONFIG)
    point = make_checkpoint(run, 1)
    (point.path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="only a checkpoint that verifies is pushed"):
        push_now(point.path, CONFIG)
    good = make_checkpoint(run, 2)
    HubQueue(run).add(entry_of(good))
    server.faults = [Fault("commits", 404, count=2, headers={"X-Error-Code": "RepoNotFound"})]
    with pytest.raises(HubError, match=r"0 pushed, 1 not: checkpoint_00000002 to org/model: .*repository is not there"):
        push_now(run, CONFIG)
    assert HubQueue(run).names() == {"checkpoint_00000002"}
    with HubQueue(run).pushing(), pytest.raises(UsageError, match=f"being pushed by process {os.getpid()}"):
        push_now(run, CONFIG)
    server.faults = [Fault("commit", 503, count=99)]
    with pytest.raises(HubError, match="503"):
        push_now(good.path, replace(CONFIG, finish_minutes=0.001))


@pytest.mark.parametrize("names", [("checkpoints", "checkpoint_00000001"), ()])
def test_by_hand_what_is_being_pushed_is_kept_by_retention(
    server: HubServer, run: Path, names: tuple[str, ...]
) -> None:
    """A checkpoint by its directory, and the newest of a run whose queue is empty."""
    point = make_checkpoint(run, 1)
    check_repository(CONFIG)
    seen: list[str | None] = []

    def train_on(_: object) -> None:
        with HubQueue(run).pushing() as holder:
            seen.append(holder)
        make_checkpoint(run, 2)
        done = retention.prune(run / "checkpoints", CheckpointConfig(keep_last=1), 2, HubQueue(run).names(), {})
        seen.append(done.reasons.get("checkpoint_00000001"))

    server.before_commit = [train_on]
    assert len(push_now(run.joinpath(*names), CONFIG)) == 1
    assert seen == [f"process {os.getpid()} on {socket.gethostname()}", "being pushed"]
    assert point.path.is_dir()
    assert HubQueue(run).names() == set()


def test_by_hand_what_the_hub_does_not_take_stays_in_the_queue(server: HubServer, run: Path) -> None:
    point = make_checkpoint(run, 1)
    check_repository(CONFIG)
    server.faults = [Fault("commit", 413)]
    with pytest.raises(HubError, match="413"):
        push_now(point.path, CONFIG)
    assert HubQueue(run).names() == {"checkpoint_00000001"}
    assert len(push_now(run, HubConfig())) == 1


def test_by_hand_beside_another_push_of_the_run_it_is_queued(server: HubServer, run: Path) -> None:
    point = make_checkpoint(run, 1)
    queue = HubQueue(run)
    with queue.pushing():
        with pytest.raises(HubError, match=f"is queued: process {os.getpid()} on .*takes it next; .*push {run}"):
            push_now(point.path, CONFIG)
        assert [entry.reason for entry in queue.entries()] == ["hand"]
        with pytest.raises(UsageError, match="is in the queue of process"):
            push_now(point.path, replace(CONFIG, repo_id="org/other"))
        assert [entry.repo_id for entry in queue.entries()] == [REPO]
    assert server.titles(REPO) == []


def test_a_state_that_is_not_there_is_not_pushed_as_if_it_were(server: HubServer, run: Path) -> None:
    point = make_checkpoint(run, 1)
    check_repository(CONFIG)
    queue = HubQueue(run)
    with_state = replace(CONFIG, include_state=True)

    def strip_between_attempts(repo: Repository) -> None:
        retention.strip_state(point.path)
        repo.add("main", "someone else", "", {})

    server.before_commit = [strip_between_attempts]
    refusal = r"hub\.include_state: true: .*has no optimizer state.*push it without"
    for place in (point.path, point.path, run):  # stripped during the first push, and before the others
        with pytest.raises(UsageError, match=refusal):
            push_now(place, with_state)
        assert queue.names() == set()
    queue.add(entry_of(point))
    with pytest.raises(HubError, match=f"0 pushed, 1 not: {refusal}"):
        push_now(run, with_state)
    assert [entry.include_state for entry in queue.entries()] == [False]
    assert server.titles(REPO) == ["someone else"]
    assert len(push_now(run, HubConfig())) == 1


# --------------------------------------------------------------------------------------------------------- loading back
@pytest.mark.parametrize("spec", ["model", "org/model@", "org/model@a b", "hub:", "a/b/c@3", "hub:hub:org/model"])
def test_a_malformed_source_is_refused(tmp_path: Path, spec: str) -> None:
    with pytest.raises(UsageError, match="is not ORGANISATION/NAME or ORGANISATION/NAME@STEP"):
        download(spec, tmp_path)


def test_a_revision_that_is_not_there_lists_those_that_are(server: HubServer, run: Path, tmp_path: Path) -> None:
    push(make_checkpoint(run, 1200))
    with pytest.raises(UsageError, match="no revision step-00001300; it has main, step-00001200; name one"):
        download("org/model@1300", tmp_path / "there")
    with pytest.raises(UsageError, match=r"org/other cannot be read.*repository is not there"):
        download("org/other@1200", tmp_path / "there")
    server.repositories[REPO].add("main", "another", "", {"model.safetensors": b""})
    with pytest.raises(UsageError, match=r"was not pushed by accel_train.*hf download org/model --revision") as refused:
        download("org/model", tmp_path / "there")
    assert "repository is not there" not in str(refused.value)
    assert list((tmp_path / "there").iterdir()) == []


def test_weights_on_the_hub_start_a_run_as_the_message_says(
    server: HubServer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import snapshot_download

    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    push(make_checkpoint(run, 1200))
    with pytest.raises(UsageError, match=r"without optimizer state, .*--init_from hub:org/model@1200 starts a new run"):
        fetch.fetch("hub:org/model@1200", tmp_path / "there")
    downloaded, _ = fetch.find_weights("hub:org/model@1200")
    folder = snapshot_download("org/model", revision="step-00001200", local_dir=tmp_path / "folder")
    found, _ = fetch.find_weights(folder)
    for place in (downloaded, found):
        assert place is not None
        assert commit.verify(place).step == 1200


def test_a_download_that_does_not_verify_leaves_nothing(server: HubServer, run: Path, tmp_path: Path) -> None:
    push(make_checkpoint(run, 1))
    files = server.files(REPO)
    server.repositories[REPO].add(
        "main", "damaged", "", files | {"model.safetensors": files["model.safetensors"][::-1]}
    )
    with pytest.raises(HubError, match=r"model\.safetensors has changed since it was written"):
        download("org/model", tmp_path / "there")
    outside = json.loads(files["manifest.json"])
    outside["files"]["../../escaped"] = outside["files"]["config.json"]
    hostile = json.dumps(strict_json.sealed(outside)).encode()
    server.repositories[REPO].add("main", "hostile", "", files | {"manifest.json": hostile})
    with pytest.raises(UsageError, match=r"\.\./\.\./escaped', which is not a valid file name in a checkpoint"):
        download("org/model", tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


def test_a_power_loss_after_a_download_leaves_all_of_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder is flushed before the rename, and the folder above after it."""
    checkpoint = make_checkpoint(run, 1)
    temporary = run / "there" / commit.temporary_name(0, "abc")
    temporary.parent.mkdir()
    checkpoint.path.rename(temporary)
    paths = {temporary, *temporary.rglob("*")}
    before: set[Path] = set()
    after: set[Path] = set()
    real_fsync, real_rename = os.fsync, os.rename
    flushed = [before]

    def fsync(descriptor: int) -> None:
        flushed[-1].add(Path(f"/proc/self/fd/{descriptor}").readlink())
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        flushed.append(after)
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    final = download_module._settle(temporary, temporary.parent, "org/model")
    assert commit.verify(final).step == 1
    assert before >= paths
    assert after == {temporary.parent}


def test_a_download_goes_on_through_trouble(server: HubServer, run: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(run, 1)
    push(checkpoint, include_state=True)
    server.faults = [Fault("info", 503), Fault("info", "drop_before"), Fault("resolve", "drop_before")]
    assert contents(download("org/model", tmp_path / "there")) == contents(checkpoint.path)
    server.faults = [Fault("info", 500, count=99)]
    with pytest.raises(HubError, match=r"could not be downloaded.*500.*try again later"):
        download("org/model", tmp_path / "there")


def test_a_hub_out_of_reach_is_said_with_the_remedy(
    server: HubServer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a ``HubError`` to Python, as ``load`` documents, and as a usage error at the end of a command."""
    from huggingface_hub import constants

    from accel_train.domains.images.pipelines.loading import BaseConfig
    from accel_train.domains.images.trained_mmdit import finding

    push(make_checkpoint(run, 1), include_state=True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    source = "hub:org/model@1"
    remedy = r"org/model could not be downloaded from http://hub\.invalid: .*HF_ENDPOINT or .*hf download org/model"
    for asked in (
        lambda: load(source),
        lambda: finding.find(BaseConfig(source=source)),
        lambda: fetch.fetch(source, tmp_path / "there"),
        lambda: fetch.read_manifest(source),
    ):
        with pytest.raises(HubError, match=remedy) as refused:
            asked()
        assert isinstance(refused.value, UsageError)
    assert list((tmp_path / "there").iterdir()) == []


def test_what_was_downloaded_is_used_without_a_network(
    server: HubServer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    for step in (1, 2):
        push(make_checkpoint(run, step))
    first, newest = (download_once(spec, tmp_path) for spec in ("org/model@1", "org/model"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    # Waits would show that it was tried again, and a real one takes seconds.
    monkeypatch.setenv("ACCEL_TRAIN_HUB_BACKOFF_SECONDS", "1e9")
    assert download_once("hub:org/model@step-00000001", tmp_path) == first
    assert download_once("org/model", tmp_path) == newest
    assert "the earlier download is used, because the Hub cannot be reached" in caplog.text
    with pytest.raises(HubError, match=r"hf download org/model --revision step-00000003 --local-dir FOLDER"):
        download_once("org/model@3", tmp_path)
    (newest / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE unset.*hf download org/model --local-dir"):
        download_once("org/model", tmp_path)


def test_an_earlier_download_shortens_the_wait_for_the_hub(server: HubServer, run: Path, tmp_path: Path) -> None:
    push(make_checkpoint(run, 1))
    found = download_once("org/model", tmp_path)
    server.faults = [fault := Fault("info", 503, count=5)]
    assert download_once("org/model", tmp_path) == found
    assert fault.count == 3  # two attempts, where there are five without a copy
    shutil.rmtree(found)
    fault.count = 4
    assert download_once("org/model", tmp_path) == found


def test_a_read_only_cache_gives_what_is_in_it(
    server: HubServer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    for step in (1, 2):
        push(make_checkpoint(run, step))
    # Not in `tmp_path`, whose parent another user may not enter.
    root = Path(tempfile.mkdtemp())
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(root / "cache"))
    found = find("hub:org/model@1")
    for folder in (*root.rglob("*"), root):
        if folder.is_dir():
            folder.chmod(0o555)
    # Tests may run as root, whom no permission stops. Both ids, because `os.access` asks for the real one.
    users = os.getresuid()
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 0)
    try:
        assert find("hub:org/model@1") == found
        pinned = f"org/model@{server.repositories[REPO].branches['step-00000001']}"
        assert download_module.at_commit("org/model@1") == pinned
        with pytest.raises(UsageError, match=r"^ACCEL_TRAIN_CACHE: .*cache: cannot be written.*set ACCEL_TRAIN_CACHE"):
            find("hub:org/model")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert find("hub:org/model@1") == found
    finally:
        os.setresuid(*users)
        for folder in (root, *root.rglob("*")):
            folder.chmod(0o755)
        shutil.rmtree(root)


def _fails(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_branch_is_read_at_one_commit(
    server: HubServer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    push(make_checkpoint(run, 1))
    pinned = download_module.at_commit("org/model", tmp_path)
    assert pinned == f"org/model@{server.repositories[REPO].branches['main']}"
    first = download_once(pinned, tmp_path)
    push(make_checkpoint(run, 2))
    assert download_once(pinned, tmp_path) == first
    assert download_once("org/model", tmp_path) != first
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("ACCEL_TRAIN_HUB_BACKOFF_SECONDS", "1e9")
    assert download_once(pinned, tmp_path) == first
    assert download_module.at_commit("org/model", tmp_path) not in ("org/model", pinned)
    # Whole perhaps, once its disk is back.
    weights = first / "model.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", _fails)
        with pytest.raises(HubError):
            download_once(pinned, tmp_path)
    assert weights.is_file()


def test_of_two_downloads_at_a_time_the_first_stays(
    server: HubServer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(make_checkpoint(run, 1))
    rename = os.rename

    def rename_after_another(source: Path, target: Path) -> None:
        if target == tmp_path / "there" / "checkpoint_00000001":
            shutil.copytree(source, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_after_another)
    found = download("org/model", tmp_path / "there")
    assert commit.verify(found).step == 1
    assert list((tmp_path / "there").iterdir()) == [found]


def test_what_is_there_is_kept_or_the_download_refused(server: HubServer, run: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(run, 1)
    push(checkpoint)
    assert download("org/model", run / "checkpoints") == checkpoint.path  # the whole one stays, with its state
    assert (checkpoint.path / "trainer_state.json").exists()
    commit.remove(checkpoint.path)
    make_checkpoint(run, 1, size=300)
    with pytest.raises(UsageError, match="exists and differs from org/model"):
        download("org/model", run / "checkpoints")
    (checkpoint.path / "config.json").unlink()
    with pytest.raises(UsageError, match="delete that one first"):
        download("org/model", run / "checkpoints")


def test_from_pretrained_loads_what_was_pushed(server: HubServer, run: Path) -> None:
    import torch

    from accel_train.domains.models.mmdit import MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
    from accel_train.options.tree import to_tree

    torch.manual_seed(0)
    shape = MultimodalMMDiTConfig(MMDiTConfig(width=32, depth=1, heads=2), 11, 4, 8)
    model = MultimodalMMDiT(shape)
    checkpoint = make_checkpoint(run, 1)
    loads_with = mmdit.Config(max_steps=1).run_options().loads_with
    write_run(run, {"run_id": "abc123", "loads_with": loads_with})
    model.save_pretrained(checkpoint.path)
    (checkpoint.path / "config.json").write_text(json.dumps(to_tree(shape)))
    changed = {name: commit.seal_file(checkpoint.path / name) for name in ("model.safetensors", "config.json")}
    commit.rewrite_manifest(checkpoint.path, {"files": checkpoint.manifest["files"] | changed})
    push(commit.verify(checkpoint.path))
    card = server.files(REPO)["README.md"].decode()
    assert 'MultimodalMMDiT.from_pretrained("org/model", revision="step-00000001")' in card
    loaded = MultimodalMMDiT.from_pretrained(REPO, revision="step-00000001")
    for (name, expected), found in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(expected, found), name


# ------------------------------------------------------------------------------------------------------------- the card
def test_the_card_has_figures_curve_samples_and_code(server: HubServer, run: Path) -> None:
    options = {"optimizer.lr": 0.1, "data.note": "a | b\nc"}
    push(make_checkpoint(run, 1200, metrics={"heldout/loss": 1.25}, experiment=options, samples_seen=4800))
    text = server.files(REPO)["README.md"].decode()
    card = ModelCard(text)
    assert card.data.library_name == "accel_train"
    assert card.data.license is None
    assert [(r.metric_type, r.metric_value) for r in card.data.eval_results or []] == [("heldout/loss", 1.25)]
    for part in (
        "| heldout/loss | 1.25 |",
        "## Curves\n\n![Curves](report/curves.png)",
        "- a text",
        'load_file(hf_hub_download("org/model", name, revision="step-00001200"))',
        "| `optimizer.lr` | `0.1` |",
        r"| `data.note` | `a \| b c` |",
        "| Samples seen | 4800 |",
        "| Optimizer state | not included |",
    ):
        assert part in text, part


def test_the_card_loads_with_the_class_that_the_recipe_declared_and_shows_its_report(tmp_path: Path) -> None:
    loads_with = pde.Config(max_steps=1).run_options().loads_with
    texts = {"report/truth_and_error.png": b"", "report/numbers.json": b"{}", "other.png": b""}
    texts |= {"report/samples/step_00000007.md": b"words", "report/pictures/step_00000007.png": b""}
    texts["report/evaluation.json"] = b'{"step": 7}'
    # Of an evaluation on other data.
    texts |= {"report/other_data/fields.png": b"", "report/other_data/evaluation.json": b'{"step": 7, "nll": 2.0}'}
    text = build_card(Checkpoint(tmp_path, 7, {}), texts, CardFacts(REPO, "step-00000007", loads_with))
    assert "from accel_train.domains.pde.transformer import PdeTransformer\n" in text
    assert 'PdeTransformer.from_pretrained("org/model", revision="step-00000007")' in text
    assert "## Truth and error\n\n![Truth and error](report/truth_and_error.png)" in text
    assert "numbers.json" not in text
    assert "other.png" not in text
    assert "step_00000007.png" not in text
    assert "other_data" not in text
    assert "nll" not in text
    assert "words" not in text
    assert "from_pretrained" not in build_card(Checkpoint(tmp_path, 7, {}), texts, CardFacts(REPO, "step-00000007"))


@pytest.mark.parametrize(
    ("step", "shown", "hidden"),
    [
        (30, ["## Samples\n\nof 30", "## Pictures\n\n![Pictures](report/pictures.png)", "## Fields\n"], ["step_"]),
        (
            20,
            ["## Samples\n\nof 20", "![Pictures](report/pictures/00000020.png)", "## Fields of the run at step 30\n"],
            ["of 30", "pictures.png"],
        ),
        (
            10,
            ["## Samples of the run at step 30\n\nof 30", "## Pictures of the run at step 30\n", "## Curves\n"],
            ["of 20"],
        ),
    ],
)
def test_the_card_of_an_earlier_step_shows_its_own_samples(
    step: int, shown: list[str], hidden: list[str], tmp_path: Path
) -> None:
    texts = {f"report/{name}.png": b"" for name in ("curves", "pictures", "fields")}
    texts |= {"report/evaluation.json": b'{"step": 30}', "report/samples.md": b"of 30", "config.yaml": b""}
    texts |= {f"report/samples/step_{number:08d}.md": f"of {number}".encode() for number in (20, 30)}
    texts |= {f"report/pictures/{number:08d}.png": b"" for number in (20, 30)}
    card = build_card(Checkpoint(tmp_path, step, {}), texts, CardFacts(REPO, "main"))
    for part in shown:
        assert part in card
    for part in hidden:
        assert part not in card
    del texts["report/evaluation.json"]
    assert "Fields" not in build_card(Checkpoint(tmp_path, step, {}), texts, CardFacts(REPO, "main"))


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ("/home/x/recipes/causal_lm.py demo --seed 7", "python recipes/causal_lm.py demo --seed 7"),
        ("'/home/x y/recipes/lora.py' --data.path 'a b'", "python recipes/lora.py --data.path 'a b'"),
        (
            "lora.py --data.path '/home/x y/a b' --init_from=~/r@best",
            "python lora.py --data.path 'a b' --init_from=r@best",
        ),
        ("mine.py", "python mine.py"),
        ("/venv/bin/train --seed 7", "train --seed 7"),
    ],
)
def test_the_command_names_no_folder_of_the_machine(tmp_path: Path, recorded: str, shown: str) -> None:
    checkpoint = Checkpoint(tmp_path, 7, {"epoch": 0.01897608222968966})
    card = build_card(checkpoint, {}, CardFacts(REPO, "main", command=recorded))
    assert f"```bash\n{shown}\n```" in card
    assert "| Epoch | 0.01898 |" in card


def test_options_and_metrics_of_the_card_name_no_folder_of_the_machine(tmp_path: Path) -> None:
    options = {"data.path": "/home/x y/rows.jsonl", "data.more": ["~/a/b.txt", "org/name"], "log.log_every": 5}
    options |= {
        "data.mix": [{"path": "/srv/c.txt", "weight": 0.5}],
        "init_from": "hub:org/name@1",
        "base.source": "runs/a",
    }
    checkpoint = Checkpoint(tmp_path, 7, {"experiment": options, "metrics": {"loss": 1.0}})
    described = {"card": {"measured_on": "held-out texts of /home/x/rows.jsonl, org/name, ./here/a.txt"}}
    card = build_card(checkpoint, {}, CardFacts(REPO, "main"), described)
    for option, shown in {
        "data.path": "rows.jsonl",
        "data.more": "['b.txt', 'org/name']",
        "log.log_every": "5",
        "data.mix": "[{'path': 'c.txt', 'weight': 0.5}]",
        "init_from": "hub:org/name@1",
        "base.source": "runs/a",
    }.items():
        assert f"| `{option}` | `{shown}` |" in card
    assert "name: held-out texts of rows.jsonl, org/name, ./here/a.txt\n" in card


@pytest.mark.parametrize("command", ["", "'"])
def test_a_command_that_is_not_one_is_left_out(tmp_path: Path, command: str) -> None:
    card = build_card(Checkpoint(tmp_path, 7, {}), {}, CardFacts(REPO, "main", command=command))
    assert "How it was trained" not in card


def test_the_card_publishes_neither_baselines_nor_counts_as_results(server: HubServer, run: Path) -> None:
    from accel_train.domains.pde.scores import LABELS

    environment = {"event": "environment", "labels": asdict(LABELS)}
    (run / "metrics.jsonl").write_text(json.dumps(environment) + "\n")
    metrics = {"heat_nrmse": 0.5, "heat_linear_fit_nrmse": 0.25, "heat_persistence_nrmse": 0.75}
    push(make_checkpoint(run, 1200, metrics=metrics | {"heat_evaluated_samples": 8}))
    card = ModelCard(server.files(REPO)["README.md"].decode())
    assert card.data.metrics == ["heat_nrmse"]
    assert [result.metric_type for result in card.data.eval_results or []] == ["heat_nrmse"]
    for line in (
        "| heat_nrmse | 0.5 |",
        "| heat_linear_fit_nrmse (baseline) | 0.25 |",
        "| heat_persistence_nrmse (baseline) | 0.75 |",
        "| heat_evaluated_samples | 8 |",
    ):
        assert line in card.text, line


@pytest.mark.parametrize(
    ("recipe", "baselines"),
    [
        (causal_lm, ["unigram_perplexity"]),
        (mmdit, ["unigram_nll", "t2l_ridge_cosine", "l2t_log_linear_nll", "l2t_log_linear_gain"]),
        (pde, ["heat_persistence_nrmse", "heat_training_mean_nrmse", "heat_linear_fit_nrmse_channel0"]),
    ],
)
def test_a_recipe_declares_its_baselines(recipe: Any, baselines: list[str]) -> None:
    labels = recipe.Config.recipe.labels
    assert all(labels.is_baseline(name) for name in baselines)
    for name in ("perplexity", "l2t_nll", "l2t_nll_shuffled", "unconditional_nll", "heat_nrmse", "mean_nrmse"):
        assert not labels.is_baseline(name), name


def test_the_code_of_the_card_loads_the_averaged_weights(server: HubServer, run: Path) -> None:
    """The weights that the figures are of."""
    from tests.trained import text_run

    trained = text_run(run.parent / "trained") / "checkpoints" / "checkpoint_00000003"
    weights = load_file(trained / "model.safetensors")
    averaged = {name: tensor / 2 for name, tensor in weights.items() if "norm" not in name}
    assert len(averaged) < len(weights)
    save_torch_file(averaged, trained / "ema.safetensors")
    manifest = dict(commit.verify(trained).manifest)
    files = manifest["files"] | {"ema.safetensors": commit.seal_file(trained / "ema.safetensors")}
    commit.rewrite_manifest(trained, manifest | {"files": files})
    loads_with = mmdit.Config(max_steps=1).run_options().loads_with
    write_run(run.parent / "trained", {"run_id": "abc", "loads_with": loads_with})
    push(commit.verify(trained))
    card = server.files(REPO)["README.md"].decode()
    assert "The figures are of the EMA weights, `ema.safetensors`." in card
    by_class, alone = re.findall(r"```python\n(from [^`]*hf_hub_download\n.*?)\n```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(by_class, names)
    found = names["model"].state_dict()
    exec(alone, names)
    expected = weights | averaged
    for read in (found, names["weights"]):
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("manifest", "texts"),
    [
        ({}, {}),
        ({"metrics": {"a": float("nan"), "b": "text", "c": None}, "files": {}}, {"report/evaluation.json": b"{"}),
        ({"metrics": [1], "experiment": [], "files": {"model.safetensors": {}}}, {"report/samples.md": b"\xff\xfe"}),
        ({"metrics": {}}, {"report/evaluation.json": b"[1]", "manifest.json": b""}),
    ],
)
def test_the_card_survives_what_is_missing(tmp_path: Path, manifest: Any, texts: dict[str, bytes]) -> None:
    text = build_card(Checkpoint(tmp_path, 7, manifest), texts, CardFacts(REPO, "step-00000007"), manifest.get("files"))
    assert ModelCard(text).data.eval_results is None
    assert "| Step | 7 |" in text


def test_the_card_says_how_to_use_the_model_and_under_which_licence(
    server: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.trained import text_run

    trained = text_run(run.parent / "trained") / "checkpoints" / "checkpoint_00000003"
    command = "recipes/mmdit.py demo --seed 7"
    (run.parent / "trained" / "metrics.jsonl").write_text(
        '{"event": "environment", "command": "an earlier start"}\n{"event": "train", "command": "no"}\n'
        + json.dumps({"event": "environment", "command": command})
        + "\n{torn"
    )
    checkpoint = commit.verify(trained)
    commit.rewrite_manifest(trained, dict(checkpoint.manifest) | {"metrics": {"l2t_nll": 2.5}})
    push(commit.verify(trained), license="apache-2.0")
    card = ModelCard(server.files(REPO)["README.md"].decode())
    assert card.data.license == "apache-2.0"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.datasets == ["org/texts"]
    assert card.data.metrics == ["l2t_nll"]
    results = card.data.eval_results or []
    assert [(r.dataset_name, r.metric_value) for r in results] == [("held-out texts of org/texts", 2.5)]
    assert f"```bash\npython {command}\n```" in card.text
    lines = re.findall(r"```python\n(from accel_train import load\n.*?)\n```", card.text, re.DOTALL)[0].splitlines()
    assert lines[1] == 'pipeline = load("hub:org/model@step-00000003")'
    assert len(lines) == 3
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(run.parent / "cache"))
    exec("\n".join(lines), {})
    assert re.fullmatch(r"\['.*'\]\n", capsys.readouterr().out)  # what the third line prints


def test_the_card_of_a_model_of_pictures_draws_one(
    server: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from PIL import Image

    from tests.trained import picture_run

    trained = picture_run(run.parent / "trained", side=16) / "checkpoints" / "checkpoint_00000003"
    checkpoint = commit.verify(trained)
    commit.rewrite_manifest(trained, dict(checkpoint.manifest) | {"metrics": {"t2l_error": 0.5}})
    push(commit.verify(trained))
    card = ModelCard(server.files(REPO)["README.md"].decode())
    assert card.data.pipeline_tag == "text-to-image"
    results = card.data.eval_results or []
    assert [result.dataset_name for result in results] == ["held-out pictures of emoji"]
    (lines,) = re.findall(r"```python\n(from accel_train import load\n.*?)\n```", card.text, re.DOTALL)
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(run.parent / "cache"))
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    with Image.open("heart.png") as drawn:
        assert drawn.size == (16, 16)


@pytest.mark.parametrize("name", ["Apache 2.0", "MIT", "", "a\nb"])
def test_a_licence_that_the_hub_has_no_name_for_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"hub\.license: .*give one as in apache-2\.0"):
        HubConfig(license=name)


# --------------------------------------------------------------------------------------------------------------- errors
class Answered(OSError):
    """What ``huggingface_hub`` raises has the answer in ``response``."""

    def __init__(self, status: int, **headers: str) -> None:
        # That of version 2, or of version 1.
        client = importlib.import_module("httpx2" if importlib.util.find_spec("httpx2") else "httpx")
        super().__init__(f"status {status}")
        self.response = client.Response(status, headers={k.replace("_", "-"): v for k, v in headers.items()})


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 408, 409, 412, 413, 422, 425, 429, 500, 502, 503, 504])
def test_which_answers_are_worth_another_try(status: int) -> None:
    retry = status not in (400, 401, 402, 403, 404, 413, 422)
    wrapped = RuntimeError("Error while uploading 'model.safetensors' to the Hub.")
    wrapped.__cause__ = Answered(status)
    for error in (Answered(status), wrapped):
        problem = describe(error)
        assert (problem.status, problem.retry) == (status, retry)


def test_without_an_answer_the_network_comes_back_and_a_wrong_value_does_not() -> None:
    assert describe(ConnectionError("name resolution")).retry
    assert describe(TimeoutError()).retry
    assert describe(json.JSONDecodeError("a login page", "<html>", 0)).retry
    assert not describe(ValueError("LFS batch API returned errors")).retry
    assert not describe(TypeError("a bug")).retry


def test_the_wait_that_the_hub_asks_for_is_kept() -> None:
    assert describe(Answered(429, Retry_After="7")).retry_after_seconds == 7
    soon = (datetime.now(UTC) + timedelta(hours=1)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    assert 3000 < describe(Answered(503, Retry_After=soon)).retry_after_seconds <= 3600
    assert describe(Answered(429, RateLimit='"api";r=0;t=55')).retry_after_seconds == 55
    assert describe(Answered(429, RateLimit='"api";r=3;t=55')).retry_after_seconds == 0
    assert describe(Answered(503, Retry_After="soon")).retry_after_seconds == 0


LONGEST = SimpleNamespace(SystemRandom=lambda: SimpleNamespace(uniform=lambda low, high: high))
"""In place of `random`: every wait is as long as it can be."""


def test_waits_double_up_to_five_minutes_and_are_never_shorter_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(retry.BACKOFF_VARIABLE, raising=False)
    monkeypatch.setattr(retry, "random", LONGEST)
    waits = [retry.backoff_seconds(failures, Problem("busy", True)) for failures in (1, 2, 8, 9, 2000)]
    assert waits == [2, 4, 256, 300, 300]
    asked = [retry.backoff_seconds(failures, Problem("busy", True, 7.0)) for failures in (1, 3)]
    assert asked == [7, 8]
    assert retry.backoff_seconds(1, Problem("busy", True, 1000.0)) == 1000


def test_no_wait_ends_after_the_time_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    def call() -> None:
        calls.append(clock.now)
        raise ConnectionError("no way")

    calls: list[float] = []
    monkeypatch.delenv(retry.BACKOFF_VARIABLE, raising=False)
    monkeypatch.setattr(retry, "random", LONGEST)
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    with pytest.raises(retry.GaveUpError, match="no way"):
        retry.retried(call, seconds=10.0)
    assert calls == [100, 102, 106]  # the next wait would be 8 seconds
    calls.clear()
    with pytest.raises(retry.GaveUpError, match="no way"):
        retry.retried(call, attempts=4, longest_wait=3.0)
    assert calls == [106, 108, 111, 114]
    calls.clear()
    monkeypatch.setattr(retry, "describe", lambda error: Problem("no way", True, 1000.0))
    with pytest.raises(retry.GaveUpError, match="no way"):
        retry.retried(call, attempts=2)
    assert calls == [114, 1114]  # an earlier attempt would be refused again


def test_secrets_do_not_leave_in_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-token-of-another-form")
    text = redact("PUT https://s3/x?X-Amz-Signature=abc 'Bearer hf_abcDEF123'\n a-token-of-another-form")
    assert text == "PUT https://s3/x?... 'Bearer hf_...' hf_..."
