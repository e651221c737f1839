"""The Hub in trouble, and processes killed while they push: training continues, nothing is lost or pushed twice."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.checkpoints.run import Run
from accel_train.hub.client import check_repository
from accel_train.hub.download import download
from accel_train.hub.options import HubConfig
from accel_train.hub.pusher import HubStatus, Pusher, push_the_rest
from accel_train.hub.queue import HubQueue
from accel_train.store import commit, manifest, retention
from accel_train.store.run_file import write_run
from tests.hub.test_hub import contents, make_checkpoint
from tests.hub_server import Fault, HubServer, serving
from tests.waiting import until

REPO = "org/model"
CONFIG = HubConfig(repo_id=REPO, finish_minutes=5)
NAME = "checkpoint_00000001"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with serving(monkeypatch, tmp_path / "hf_home") as served:
        check_repository(CONFIG)
        yield served


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    write_run(run, {"run_id": "abc123"})
    return run


def train(run: Path, *steps: int, config: HubConfig = CONFIG) -> HubStatus:
    """A training process that saves at ``steps`` and ends."""
    pusher = Pusher(run, config, is_main=True)
    for step in steps:
        pusher.offer(make_checkpoint(run, step))
    return pusher.finish()


def pending(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())["hub"]


def events(run: Path, event: str) -> list[dict[str, Any]]:
    lines = (run / "hub" / "log.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == event]


def row(number: str, name: str, injected: str, outcome: str, *values: Any, slow: bool = False) -> Any:
    fault = pytest.mark.fault(number, injected=injected, outcome=outcome)
    return pytest.param(*values, id=name, marks=[fault, *([pytest.mark.slow] if slow else [])])


AGAIN = "retried with backoff; one commit; training is not affected"


@pytest.mark.parametrize(
    ("fault", "tries"),
    [
        row("F55", "500", "the Hub answers 500 twice", AGAIN, Fault("commit", 500, count=2), 3),
        # Behind "cut", which fails in the same place.
        row("F55", "503", "503 while files are uploaded", AGAIN, Fault("lfs_put", 503), 1, slow=True),
        row("F55", "412", "412: another commit came between", AGAIN, Fault("commit", 412), 2),
        row(
            "F55", "dropped", "connection closed before the commit is applied", AGAIN, Fault("commit", "drop_before"), 2
        ),
        row("F55", "cut", "connection closed in the middle of an upload", AGAIN, Fault("lfs_put", "cut"), 1),
        row("F55", "branch", "500 when the branch of the step is made", AGAIN, Fault("branch", 500), 1),
    ],
)
def test_trouble_is_tried_again(server: HubServer, run: Path, fault: Fault, tries: int) -> None:
    server.faults = [fault]
    status = train(run, 1)
    assert fault.count == 0, "the fault was never met"
    assert (status.code, status.pushed) == (0, (NAME,))
    assert len(server.times("commit")) == tries
    assert len(server.titles(REPO)) == 1
    assert pending(run) == {"repo_id": REPO, "pending": [], "failed": {}}
    assert server.repositories[REPO].branches["step-00000001"] == server.repositories[REPO].branches["main"]


def test_what_a_last_start_left_is_pushed_by_one_that_has_nothing_to_train(server: HubServer, run: Path) -> None:
    """Asked to stop in the last step, a run leaves ``push: last`` to the next start, which finds it finished."""
    last = replace(CONFIG, push="last")
    pusher, checkpoint = Pusher(run, last, is_main=True), make_checkpoint(run, 1)
    pusher.offer(checkpoint)
    assert pusher.finish(preempted=True).pushed == ()
    for _ in range(2):
        status = push_the_rest(run, checkpoint, last, None, "min")
        assert (status.code, status.pushed) == (0, (NAME,))
    assert len(server.titles(REPO)) == 1


def test_what_owed_its_evaluation_is_pushed_with_its_metrics(server: HubServer, run: Path) -> None:
    """Asked to stop in the last evaluation, a run leaves that and ``push: last`` to the next start."""
    last = replace(CONFIG, push="last")
    checkpoint = make_checkpoint(run, 1)
    opened = Run(run, "abc123", checkpoint, "", {})
    opened.owe_evaluation(1)
    opened.add_owed_evaluation({"loss": 0.5}, CheckpointConfig(best_metric="loss"), last)
    pushed = json.loads(server.files(REPO, "step-00000001")["manifest.json"])
    assert pushed["metrics"] == {"loss": 0.5}
    assert commit.verify(checkpoint.path).manifest["metrics"] == pushed["metrics"]
    assert json.loads((run / "run.json").read_text())["owes_evaluation"] is None
    assert pending(run)["pending"] == []


@pytest.mark.fault("F55", injected="429 with Retry-After", outcome="no request before the time it names; then pushed")
def test_retry_after_is_kept(server: HubServer, run: Path) -> None:
    server.faults = [Fault("commit", 429, headers={"Retry-After": "2"})]
    assert train(run, 1).code == 0
    first, second = server.times("commit")
    assert second - first >= 2  # 0.05 s would be the backoff


@pytest.mark.fault(
    "F55", injected="no answer in time, and the commit applied after that", outcome="retried; one commit"
)
def test_a_silent_hub_counts_as_lost(server: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_HUB_TIMEOUT_SECONDS", "2")
    server.faults = [silent := Fault("commit", "held")]
    assert train(run, 1).code == 0
    assert len(server.times("commit")) >= 2
    assert any("ReadTimeout" in event["reason"] for event in events(run, "retry"))
    silent.release.set()  # the first one arrives now, and finds main moved on
    until(lambda: silent.answered.is_set())
    assert len(server.titles(REPO)) == 1


REFUSED = "not retried; reason kept; hub status 1"


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        row("F55", "401", "401: the token expired", f"{REFUSED}; the next start tries again", 401, {}),
        # Refused by the same code as 401.
        row("F55", "403", "403: no write right", f"{REFUSED}; the next start tries again", 403, {}, slow=True),
        row("F55", "413", "413: too large", REFUSED, 413, {}, slow=True),
    ],
)
def test_a_refusal_is_kept_and_not_repeated(
    server: HubServer, run: Path, caplog: pytest.LogCaptureFixture, status: int, headers: dict[str, str]
) -> None:
    server.faults = [Fault("commit", status, headers=headers)]
    ended = train(run, 1)
    assert (ended.code, ended.waiting, list(ended.failed)) == (1, (), [NAME])
    assert str(status) in ended.failed[NAME]
    assert len(server.times("commit")) == 1
    assert pending(run)["failed"] == dict(ended.failed)
    assert f"resume with: accel-train checkpoints push {shlex.quote(str(run))}" in caplog.text
    # The next one goes. One that is too large is refused whoever pushes it, so it is still shown.
    is_final = status == 413
    assert train(run, 2).code == int(is_final)
    assert [t.split()[1] for t in server.titles(REPO)] == ["1", "2"][is_final:]


@pytest.mark.fault(
    "F55",
    injected="no DNS while training runs, until after its end",
    outcome="pending in run.json; hub status 1; the summary has the command; the next start pushes",
)
def test_no_network_leaves_a_queue_that_the_next_start_empties(
    server: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    pusher = Pusher(run, HubConfig(repo_id=REPO, finish_minutes=0.01), is_main=True)
    for step in (1, 2):
        pusher.offer(make_checkpoint(run, step))
    until(lambda: (run / "hub" / "log.jsonl").exists() and len(events(run, "retry")) > 1)
    until(lambda: pusher.busy() == {"checkpoint_00000002"})  # the older gave way
    ended = pusher.finish()
    assert (ended.code, ended.waiting) == (1, ("checkpoint_00000002",))
    assert pending(run)["pending"] == ["checkpoint_00000002"]
    assert "0 pushed, 1 waiting, 0 failed; hub status 1" in caplog.text
    assert f"accel-train checkpoints push {run}" in caplog.text
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    ended = Pusher(run, CONFIG, is_main=True).finish()
    assert (ended.code, ended.pushed) == (0, ("checkpoint_00000002",))
    assert pending(run)["pending"] == []


@pytest.mark.parametrize(
    "fault",
    [
        row(
            "F56",
            "closed",
            "commit applied, connection closed before the answer",
            "found among the commits by run, step and digest: one commit",
            Fault("commit", "drop_after"),
        ),
        row(
            "F56",
            "500",
            "commit applied, branch request lost the same way",
            "commit found, branch kept: one commit, one branch",
            Fault("branch", "drop_after"),
        ),
    ],
)
def test_an_applied_commit_whose_answer_was_lost_is_not_repeated(server: HubServer, run: Path, fault: Fault) -> None:
    server.faults = [fault]
    (run / "report").mkdir(exist_ok=True)
    # Training continues: a file that is pushed too has changed when the pusher tries again.
    server.before_commit = [lambda _: (run / "report" / "samples.md").write_text("# Newer samples\n")]
    assert train(run, 1).code == 0
    assert fault.count == 0
    assert len(events(run, "retry")) == 1
    assert len(server.times("commit")) == 1
    assert len(server.titles(REPO)) == 1
    assert set(server.repositories[REPO].branches) == {"main", "step-00000001"}


TRAINER = """
import os, sys, time
from pathlib import Path
from accel_train.store import commit
from accel_train.hub.options import HubConfig
from accel_train.hub.pusher import Pusher

run = Path(sys.argv[1])
pusher = Pusher(run, HubConfig(repo_id="org/model"), is_main=True)
pusher.offer(commit.verify(run / "checkpoints" / "checkpoint_00000001"))
os.fork()  # like a worker that loads data: it keeps the pusher's pipe open when the trainer is gone
time.sleep(1800)
"""


def pusher_of(trainer: int) -> psutil.Process:
    found = [p for p in psutil.Process(trainer).children() if "accel_train.hub.worker" in p.cmdline()]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("endpoint", "kind", "commits"),
    [
        row(
            "F57",
            "upload",
            "SIGKILL of the trainer during an upload",
            "its pusher ends with it; the next start pushes; one commit",
            "lfs_put",
            "held",
            1,
            slow=True,  # the pusher alone is killed during an upload below
        ),
        row(
            "F57",
            "applied",
            "SIGKILL of the trainer while the answer to an applied commit is awaited",
            "the next start finds the commit; one commit",
            "commit",
            "held_after",
            1,
        ),
    ],
)
def test_killed_while_pushing(
    server: HubServer, run: Path, tmp_path: Path, endpoint: str, kind: str, commits: int
) -> None:
    checkpoint = make_checkpoint(run, 1)
    before = contents(checkpoint.path)
    server.faults = [held := Fault(endpoint, kind)]
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(run)])
    try:
        until(lambda: server.times(endpoint))
        until(lambda: kind == "held" or server.titles(REPO))
        worker = pusher_of(trainer.pid)
        forked = [p for p in psutil.Process(trainer.pid).children() if p != worker]
        assert len(forked) == 1
    finally:
        trainer.kill()
        trainer.wait()
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    held.release.set()
    forked[0].kill()
    (run / "report").mkdir(exist_ok=True)
    (run / "report" / "samples.md").write_text("# Newer samples\n")
    assert HubQueue(run).names() == {NAME}
    assert contents(checkpoint.path) == before
    ended = Pusher(run, CONFIG, is_main=True).finish()
    assert (ended.code, ended.pushed) == (0, (NAME,))
    assert len(server.titles(REPO)) == commits
    assert len(server.times("commit")) == commits
    assert commit.verify(download("org/model@1", tmp_path / "there")).step == 1


@pytest.mark.fault(
    "F57", injected="SIGKILL of the pusher alone", outcome="training is not affected; pushed again from the queue"
)
def test_the_pusher_killed_alone(server: HubServer, run: Path) -> None:
    server.faults = [held := Fault("lfs_put", "held")]
    pusher = Pusher(run, CONFIG, is_main=True)
    pusher.offer(make_checkpoint(run, 1))
    until(lambda: server.times("lfs_put"))
    os.kill(pusher_of(os.getpid()).pid, signal.SIGKILL)
    held.release.set()
    pusher.offer(make_checkpoint(run, 2))
    ended = pusher.finish()
    assert (ended.code, ended.waiting) == (0, ())
    assert [t.split()[1] for t in server.titles(REPO)] == ["2"]  # the older gave way


@pytest.mark.fault(
    "F57", injected="retention asked to delete what is being uploaded", outcome="kept until it is pushed, then deleted"
)
def test_retention_keeps_what_is_being_pushed(server: HubServer, run: Path) -> None:
    keep = CheckpointConfig(keep_last=1)
    server.faults = [held := Fault("lfs_put", "held")]
    pusher = Pusher(run, CONFIG, is_main=True)
    pusher.offer(make_checkpoint(run, 1))
    until(lambda: server.times("lfs_put"))
    make_checkpoint(run, 2)
    retention.prune(run / "checkpoints", keep, 2, pusher.busy(), {})
    assert [step for step, _ in manifest.committed(run / "checkpoints")] == [1, 2]
    held.release.set()
    assert pusher.finish().pushed == (NAME,)
    retention.prune(run / "checkpoints", keep, 2, pusher.busy(), {})
    assert [step for step, _ in manifest.committed(run / "checkpoints")] == [2]
