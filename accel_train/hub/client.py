"""Client of huggingface_hub, with a time limit on a silent Hub, and the check before training that it may push."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accel_train import __version__
from accel_train.config import UsageError
from accel_train.hub.options import HubConfig
from accel_train.hub.retry import GaveUpError, retried

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

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


def check_repository(config: HubConfig) -> None:
    """Create the repository if it does not exist and check write access. Main process, before training.

    Makes three requests of at most 30 s each. Raises ``UsageError`` for a missing token, a token without write
    permission, or an unreachable Hub, while no training time is lost. The answers 429 and 5xx only log a warning,
    because such trouble is temporary.
    """
    if config.repo_id is None:
        return
    repo_id = config.repo_id
    try:
        retried(lambda: _try_repository(repo_id, config.private), attempts=3, longest_wait=10.0)
        return
    except GaveUpError as error:
        problem = error.problem
    option = f"hub.repo_id: {config.repo_id}"
    if problem.status is None:
        raise UsageError(
            f"{option}: the Hub at {hub_api().endpoint} cannot be reached ({problem.reason}); give this machine "
            "access to it (HF_HUB_OFFLINE unset, HF_ENDPOINT or HTTPS_PROXY where one is needed), or leave "
            "hub.repo_id out and push by hand later: accel-train checkpoints push RUN"
        )
    # The Hub has answered, and the answer will be the same in an hour.
    if not problem.retry:
        raise UsageError(
            f"{option}: the Hub refuses the request (status {problem.status}: {problem.reason}); give a token that "
            "may create and write this repository in HF_TOKEN, or another hub.repo_id"
        )
    logger.warning("%s: the Hub has problems (%s); checkpoints wait in the queue", option, problem.reason)


def _try_repository(repo_id: str, private: bool) -> None:
    from huggingface_hub import get_token

    if get_token() is None:
        raise UsageError(
            f"hub.repo_id: {repo_id} needs a token, but none was found; set HF_TOKEN or run `hf auth login`, or leave "
            "hub.repo_id out to push nothing"
        )
    with limited_silence(30.0):
        api = hub_api()
        api.whoami()
        # Created first: the permissions of a repository that does not exist cannot be queried.
        api.create_repo(repo_id, private=private, exist_ok=True)
        api.auth_check(repo_id, write=True)
