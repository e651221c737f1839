"""Options of pushing to the Hub, and their check."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from accel_train.config import PositiveFloat, PositiveInt, UsageError, refuse_without_effect

LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass(frozen=True)
class HubConfig:
    """Selection of the checkpoints to push, and their repository. The token is read from HF_TOKEN or `hf auth login`,
    never from an option."""

    repo_id: str | None = None
    """Repository, as organisation/name. It is created if it does not exist. None pushes nothing."""
    push: Literal["every", "best", "last"] = "every"
    """every: each `push_every`-th committed checkpoint. best: each new best checkpoint by checkpoints.best_metric.
    last: the last checkpoint, at the end of training."""
    push_every: PositiveInt = 1
    """With `push: every`, push every n-th committed checkpoint. If uploads are slower than saves, older waiting
    checkpoints are dropped in favour of the newest."""
    include_state: bool = False
    """Push the optimizer state as well (about twice the weights), so that another machine can resume from the Hub."""
    private: bool = True
    """Create the repository as private."""
    revisions: Literal["branch", "tag"] = "branch"
    """Name each pushed step by a branch or a tag, such as step-00001200. main always has the newest pushed one."""
    license: str | None = None
    """Licence of the weights in the card, by the Hub's name for it, such as apache-2.0. None: the card names none."""
    finish_minutes: PositiveFloat = 10.0
    """Longest wait for unfinished pushes at the end of training. After it they stay in the queue."""

    def __post_init__(self) -> None:
        if self.repo_id is not None:
            _check_repo_id(self.repo_id)
        if self.license is not None and not LICENSE.fullmatch(self.license):
            raise UsageError(
                f"hub.license: {self.license!r} is not the name of a licence on the Hub, which consists of lower-case "
                "letters, digits, '.' and '-'; give one as in apache-2.0, mit, cc-by-4.0, or other"
            )

    def notices(self) -> list[str]:
        """Return a line about options that only a push by hand reads, because the run itself pushes nothing."""
        names = ("include_state", "private", "revisions", "license", "finish_minutes")
        given = [name for name in names if getattr(self, name) != getattr(HubConfig, name)]
        if self.repo_id is not None or not given:
            return []
        values = ", ".join(f"hub.{name}: {str(getattr(self, name)).lower()}" for name in given)
        return [
            f"{values}: this run pushes nothing, because hub.repo_id is not set; `accel-train checkpoints push` "
            "follows these options when a checkpoint is pushed by hand"
        ]


def refuse_choice_of_pushes(config: HubConfig, best_metric: str | None, *, saves_state: bool = True) -> None:
    """Raise ``UsageError`` for ``push: best`` without a metric to compare by, and for options without effect.

    ``saves_state`` is False if the checkpoints of the run have no optimizer state, which then cannot be pushed. This is
    for pushes during a run. Any checkpoint can be pushed by hand, whatever these options choose.
    """
    if config.repo_id is None:
        because = "without hub.repo_id, because nothing is pushed"
        instead = "give --hub.repo_id ORGANISATION/NAME"
        refuse_without_effect(config, "hub", ["push", "push_every"], because, instead)
        return
    if config.push == "best" and best_metric is None:
        raise UsageError(
            "hub.push: best needs a metric to compare by; set checkpoints.best_metric, or hub.push every or last"
        )
    if config.push != "every":
        because = f"with hub.push: {config.push}"
        refuse_without_effect(config, "hub", ["push_every"], because, "give --hub.push every")
    if not saves_state:
        because = "with checkpoints.save_state: false, which saves no optimizer state"
        refuse_without_effect(config, "hub", ["include_state"], because)


def _check_repo_id(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    problem = ""
    try:
        validate_repo_id(repo_id)
        # The library also accepts a bare name, which would belong to whoever owns the token.
        if repo_id.count("/") != 1:
            problem = "the organisation or user is missing"
    except HFValidationError as error:
        problem = str(error)
    if problem:
        raise UsageError(
            f"hub.repo_id: {repo_id!r} is not ORGANISATION/NAME with letters, digits, '-', '_' and '.' ({problem}); "
            "write it as in my-name/my-model, or leave it out to push nothing"
        )
