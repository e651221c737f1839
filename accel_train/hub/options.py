"""What is pushed to the Hub, and whether the Hub will have it: asked before training, while nothing is lost."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from accel_train.config import PositiveFloat, PositiveInt, UsageError
from accel_train.hub.queue import Entry, Reason
from accel_train.hub.repository import hub_api, limited_silence
from accel_train.hub.retry import GaveUpError, retried
from accel_train.store.commit import Checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubConfig:
    """Which checkpoints go to the Hub, and where. The token comes from HF_TOKEN or `hf auth login`, never from here."""

    repo_id: str | None = None
    """Repository, as organisation/name. None pushes nothing. It is created if it is not there."""
    push: Literal["every", "best", "last"] = "every"
    """every: each `push_every`-th committed checkpoint. best: each that is the best so far by
    checkpoints.best_metric. last: the last one, at the end of training."""
    push_every: PositiveInt = 1
    """With push every: push each so many-th committed checkpoint. When the upload is slower than the saves, waiting
    ones give way to the newest."""
    include_state: bool = False
    """Push the optimizer state as well (about twice the weights), so that another machine can resume from the Hub."""
    private: bool = True
    """Whether a repository that is created is private."""
    revisions: Literal["branch", "tag"] = "branch"
    """What names each step, as step-00001200. main always carries the newest pushed."""
    finish_minutes: PositiveFloat = 10.0
    """How long the end of training waits for what is not pushed yet. It stays in the queue after that."""

    def __post_init__(self) -> None:
        if self.repo_id is not None:
            _check_repo_id(self.repo_id)


def refuse_without_metric(config: HubConfig, best_metric: str | None) -> None:
    """Refuse ``push: best`` where nothing says what is better."""
    if config.repo_id is not None and config.push == "best" and best_metric is None:
        raise UsageError(
            "hub.push: best needs a figure to compare by; set checkpoints.best_metric, or hub.push every or last"
        )


def _check_repo_id(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
        problem = None if repo_id.count("/") == 1 else "the organisation or user is missing"
    except HFValidationError as error:
        problem = str(error)
    if problem:
        raise UsageError(
            f"hub.repo_id: {repo_id!r} is not ORGANISATION/NAME with letters, digits, '-', '_' and '.' ({problem}); "
            "write it as in my-name/my-model, or leave it out to push nothing"
        )


def new_entry(checkpoint: Checkpoint, config: HubConfig, reason: Reason) -> Entry:
    """What the queue keeps of a checkpoint and of the options at that time. ``repo_id`` must be set."""
    assert config.repo_id is not None
    return Entry(
        checkpoint.path.name,
        checkpoint.step,
        str(checkpoint.manifest.get("run_id") or "unknown"),
        config.repo_id,
        include_state=config.include_state,
        private=config.private,
        revisions=config.revisions,
        reason=reason,
    )


def check_repository(config: HubConfig) -> None:
    """Create the repository if it is not there and see that the token may write to it. Main process, before training.

    Three requests, each of at most 30 s. Raises ``UsageError`` where there is no token, no right to write, or no way
    to the Hub: said once, while nothing is lost. A Hub that answers but is in trouble (429, 5xx) is a warning: it
    comes back.
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
            f"{option}: the Hub at {hub_api().endpoint} cannot be reached ({problem.reason}); give this machine a way "
            "there (HF_HUB_OFFLINE unset, HF_ENDPOINT or HTTPS_PROXY where one is needed), or leave hub.repo_id out "
            "and push by hand later: accel-train checkpoints push RUN"
        )
    if not problem.retry:
        raise UsageError(
            f"{option}: the Hub refuses (status {problem.status}: {problem.reason}); give a token that may create and "
            "write this repository in HF_TOKEN, or another hub.repo_id"
        )
    logger.warning("%s: the Hub is in trouble (%s); checkpoints wait in the queue", option, problem.reason)


def _try_repository(repo_id: str, private: bool) -> None:
    from huggingface_hub import get_token

    if get_token() is None:
        raise UsageError(
            f"hub.repo_id: {repo_id} needs a token and none was found; set HF_TOKEN or run `hf auth login`, or leave "
            "hub.repo_id out to push nothing"
        )
    with limited_silence(30.0):
        api = hub_api()
        api.whoami()
        api.create_repo(repo_id, private=private, exist_ok=True)
        api.auth_check(repo_id, write=True)
