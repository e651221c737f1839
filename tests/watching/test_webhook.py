"""``accel-train monitor --webhook``: each event once, to a server on loopback that may fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from accel_train import cli
from accel_train.config import UsageError
from accel_train.watching.monitor import LAST_TRIES, monitor
from accel_train.watching.webhook import Webhook
from tests.watching.run_directory import RunDirectory
from tests.watching.test_monitor import look


class Channel:
    """What a server was sent, and the status that it answers with."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.status = 200
        self.asked = 0
        self.failures = 0
        """Requests that are answered with something else than HTTP, from the first on."""
        channel = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                channel.asked += 1
                if channel.asked <= channel.failures:
                    # As a service does that does not speak HTTP.
                    self.wfile.write(b"220 mail.example ESMTP\r\n")
                    return
                if channel.status == 200:
                    channel.got.append(json.loads(body))
                self.send_response(channel.status)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/services/secret"
        self.thread = threading.Thread(target=self.server.serve_forever)

    @property
    def events(self) -> list[str]:
        return [message["event"] for message in self.got]


@pytest.fixture
def channel() -> Generator[Channel]:
    found = Channel()
    found.thread.start()
    yield found
    found.server.shutdown()
    found.thread.join()
    found.server.server_close()


def test_an_end_and_each_alert_are_sent_once(tmp_path: Path, channel: Channel) -> None:
    run, webhook = RunDirectory(tmp_path / "run"), Webhook(channel.address)
    run.steps(1, 3)
    webhook.tell([look(run)])
    assert channel.got == []
    run.train(4, loss=float("nan"))
    for step in (5, 6, 7):
        webhook.tell([look(run)])
        run.train(step)
    assert channel.events == ["non_finite"]
    assert channel.got[0]["text"] == channel.got[0]["content"]
    assert channel.got[0]["text"].startswith("run: non finite at step 4: loss is")
    assert channel.got[0]["run"] == str(run.path)
    run.add("end", 7, reason="stopped")
    for _ in range(2):
        webhook.tell([look(run)])
    assert channel.events == ["non_finite", "stopped"]
    assert channel.got[1]["text"] == "run: stopped at step 7 of 100"


def test_an_alert_that_comes_back_is_sent_again(tmp_path: Path, channel: Channel) -> None:
    run, webhook = RunDirectory(tmp_path / "run"), Webhook(channel.address)
    run.steps(1, 3)
    for seconds in (1.0, 1e6, 2e6, 1.0, 1e6):  # silent, longer silent, heard of again
        webhook.tell([look(run, after=seconds)])
    assert channel.events == ["silent", "silent"]


def test_what_was_not_taken_is_sent_later(tmp_path: Path, channel: Channel, capsys: pytest.CaptureFixture[str]) -> None:
    run, webhook = RunDirectory(tmp_path / "run"), Webhook(channel.address)
    run.add("end", 100, reason="finished")
    channel.status = 503
    for _ in range(3):
        webhook.tell([look(run)])
    said = capsys.readouterr().err
    assert said.count("--webhook: 127.0.0.1 did not accept a message (HTTP Error 503") == 1
    assert "secret" not in said
    channel.status = 200
    for _ in range(3):
        webhook.tell([look(run)])
    assert channel.events == ["finished"]


def test_another_alert_of_the_same_kind_is_sent_too(tmp_path: Path, channel: Channel) -> None:
    run, webhook = RunDirectory(tmp_path / "run"), Webhook(channel.address)
    for step in (1, 2):
        run.add("warning", step, message=f"process {step} is slow")
        for _ in range(2):
            webhook.tell([look(run)])
    texts = [message["text"] for message in channel.got]
    assert texts == [f"run: warning at step {step}: process {step} is slow" for step in (1, 2)]


def test_the_last_message_is_sent_again_after_the_end(
    tmp_path: Path, channel: Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.file.write_text("")
    run.add("end", 5, reason="finished")
    channel.failures = 2
    assert monitor([str(run.path)], every=0.001, webhook=channel.address) == 0
    assert (channel.asked, channel.events) == (3, ["finished"])
    # Its length is nowhere in its files.
    assert channel.got[0]["text"] == "run: finished at step 5"
    assert capsys.readouterr().err.count("127.0.0.1 did not accept a message (220 mail.example") == 1


def test_a_channel_that_is_gone_does_not_keep_the_monitor(tmp_path: Path, channel: Channel) -> None:
    run = RunDirectory(tmp_path / "run")
    run.add("end", 100, reason="finished")
    channel.status = 404
    assert monitor([str(run.path)], every=0.001, webhook=channel.address) == 0
    assert channel.asked == 1 + LAST_TRIES


def test_the_command_sends_and_keeps_its_exit_code(tmp_path: Path, channel: Channel) -> None:
    good, bad = RunDirectory(tmp_path / "good"), RunDirectory(tmp_path / "bad")
    good.add("end", 100, reason="finished")
    bad.add("end", 7, reason="error", error="ValueError: no")
    assert cli._main(["monitor", str(good.path), str(bad.path), "--webhook", channel.address]) == 3
    assert sorted(channel.events) == ["crashed", "finished"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"webhook": "hooks.slack.com/services"}, "begins with http:// or https://"),
        ({"webhook": "file:///etc/passwd"}, "is not an address"),
        ({"webhook": "http://localhost:abc/x"}, "a port that is a number"),
        ({"webhook": "http://localhost:70000/x"}, "a port that is a number"),
        ({"webhook": "http://host/a b"}, "no space"),
        ({"webhook": "http://[bad/x"}, "is not an address"),
        ({"webhook": "http://:80/x"}, "with a host"),
        ({"webhook": "http://x", "once": True}, "with --once and --json each call would send the same again"),
        ({"webhook": "http://x", "as_json": True}, "leave them out"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        monitor([str(RunDirectory(tmp_path / "run").path)], **arguments)
