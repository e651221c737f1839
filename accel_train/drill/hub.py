"""A Hub on the loopback interface, which accepts the check before training and then disappears."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_accelTrainDrill"
REPOSITORY = "accel-train/drill"


class VanishingHub:
    """Hub that answers the requests of a run's start. After ``vanish`` its port is closed."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._is_there = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of a run that uses it."""
        port = self._server.server_address[1]
        return {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}

    def vanish(self) -> None:
        """Close the port."""
        if self._is_there:
            self._is_there = False
            self._server.shutdown()
            # The listening socket itself: from here on a connection is refused.
            self._server.server_close()


@contextmanager
def vanishing_hub() -> Generator[VanishingHub]:
    """Yield a Hub, and close its port at the end if it has not vanished before."""
    hub = VanishingHub()
    try:
        yield hub
    finally:
        hub.vanish()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/whoami-v2":
            user = {"type": "user", "name": "accel-train", "auth": {"accessToken": {"role": "write"}}}
            self._send(200, user)
        elif self.path == "/api/repos/create":
            self._send(200, {"url": f"http://{self.headers.get('Host')}/{REPOSITORY}"})
        elif f"/{REPOSITORY}/auth-check" in self.path:
            self._send(200, {})
        else:
            self._send(404, {"error": f"accel-train drill: {self.path} is not on this Hub"})

    do_POST = do_HEAD = do_GET

    def _send(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        # An open connection would outlive the port.
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
