"""What is pushed to the Hub, and whether the Hub will have it: asked before training, while nothing is lost."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from accel_train.config import PositiveFloat, PositiveInt, UsageError

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
