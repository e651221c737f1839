"""Client of huggingface_hub, with a time limit on a silent Hub."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accel_train import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi


SILENCE_VARIABLE = "ACCEL_TRAIN_HUB_TIMEOUT_SECONDS"
SILENCE_SECONDS = 300.0
"""Longest silence of the Hub before a request counts as lost. A commit of many files may take minutes to answer."""


def hub_api() -> HfApi:
    """Build the client. It reads the token from ``HF_TOKEN`` or ``hf auth login`` at each request."""
    from huggingface_hub import HfApi

    return HfApi(library_name="accel_train", library_version=__version__)


def limit_silence() -> None:
    """Set a timeout on every request of this process. The client of ``huggingface_hub`` has none by default."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def build_client() -> Any:
        client = default_client_factory()
        client.timeout = _silence_seconds()
        return client

    # A factory, because huggingface_hub builds new clients, in a forked child for example.
    set_client_factory(build_client)


@contextmanager
def limited_silence(longest_seconds: float) -> Generator[None, None, None]:
    """Set the timeout for the requests inside the ``with`` block only. Other requests of the process keep theirs."""
    from huggingface_hub import get_session

    session: Any = get_session()
    before = session.timeout
    session.timeout = min(longest_seconds, _silence_seconds())
    try:
        yield
    finally:
        session.timeout = before


def _silence_seconds() -> float:
    return float(os.environ.get(SILENCE_VARIABLE, SILENCE_SECONDS))
