"""Errors of the Hub: a reason without secrets, and the decision for or against another attempt."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from accel_train.config import UsageError
from accel_train.store.strict_json import UnreadableError

RETRIED = (408, 409, 412, 425, 429)
"""Retried in addition to 5xx: timeouts, concurrent commits and rate limits.

After a concurrent commit (409, 412) the next attempt reads the commits again.
"""

ADVICE = {
    401: "; the token is missing, expired or wrong: set HF_TOKEN",
    403: "; the token may not write there: give one with write permission",
    404: "; the repository is not there, or the token may not see it",
    413: "; the Hub does not accept a commit of this size",
}


class HubError(RuntimeError):
    """The Hub could not be reached, or it refused. Local files are unharmed."""


class DownloadError(HubError, UsageError):
    """A checkpoint did not come from the Hub. The text has the remedy, so a command ends with exit code 2."""


class NotPushableError(ValueError):
    """The checkpoint is gone, damaged or without the optimizer state to push. Another attempt will not help."""


class StateMissingError(NotPushableError):
    """The checkpoint has no optimizer state, and the push is to include it. Without it the checkpoint can be pushed."""


@dataclass(frozen=True)
class Problem:
    """An error of the Hub in one line, with the decision for or against a retry."""

    reason: str
    """One line without secrets."""
    retry: bool
    retry_after_seconds: float = 0.0
    """Shortest wait requested by the Hub."""
    status: int | None = None
    """HTTP status, None without a response."""
    of_checkpoint: bool = False
    """True if a file of the checkpoint cannot be read now. Other checkpoints can still be pushed."""


def describe(error: BaseException) -> Problem:
    """Classify an error of a push or download.

    If an HTTP response is anywhere in the chain of causes, its status decides. Without one the network, or the disk,
    is assumed to be down for a while. ``ValueError`` and the like are not retried, because they would recur.
    """
    response = _find_response(error)
    if response is None:
        would_recur = isinstance(error, (ValueError, TypeError, LookupError, AttributeError))
        unreadable = isinstance(error, UnreadableError)
        retry = (unreadable or not would_recur or _not_json(error)) and not _is_switched_off(error)
        return Problem(redact(f"{type(error).__name__}: {error}"), retry, of_checkpoint=unreadable)
    status = int(response.status_code)
    advice = ADVICE.get(status, "")
    if _has_repository(error):
        advice = ""
    reason = redact(f"{error}{advice}")
    if status in RETRIED or status >= 500:
        return Problem(reason, True, _requested_wait(response.headers), status)
    return Problem(reason, False, 0.0, status)


def redact(text: str) -> str:
    """Return one line of at most 600 characters without tokens and without the signed part of URLs."""
    from huggingface_hub import get_token

    try:
        token = get_token()
    except Exception:
        # In some environments it asks a server. If that fails, no token was used either.
        token = None
    text = " ".join(text.split())
    if token:
        text = text.replace(token, "hf_...")
    text = re.sub(r"hf_\w{4,}", "hf_...", text)
    text = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1?...", text)
    return text[:600]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        # Some errors of huggingface_hub have no response, but were raised from one that has.
        error = error.__cause__ or error.__context__


def _find_response(error: BaseException) -> Any:
    """Return the first HTTP response in the chain of causes, or None."""
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        if isinstance(getattr(response, "status_code", None), int):
            return response
    return None


def _is_switched_off(error: BaseException) -> bool:
    """Return True if HF_HUB_OFFLINE kept the request from being sent."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return any(isinstance(cause, OfflineModeIsEnabled) for cause in _chain(error))


def _has_repository(error: BaseException) -> bool:
    """Return True if the Hub answered that a repository lacks a file or a revision."""
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    return any(isinstance(cause, (EntryNotFoundError, RevisionNotFoundError)) for cause in _chain(error))


def _not_json(error: BaseException) -> bool:
    """Return True if a proxy or a login page seems to have answered instead of the Hub."""
    return any(isinstance(cause, json.JSONDecodeError) for cause in _chain(error))


def _requested_wait(headers: Mapping[str, str]) -> float:
    """Return the seconds of ``Retry-After`` (a number or a date) or of the Hub's own ``RateLimit``, 0 without both."""
    from huggingface_hub.utils import parse_ratelimit_headers

    retry_after = headers.get("Retry-After", "").strip()
    if retry_after.isdigit():
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
        return max(0.0, date.timestamp() - time.time())
    except ValueError:  # no date, or no such header
        limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    return 0.0
