"""Errors of the Hub: which are worth another try, when, and one line of why, without secrets."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

RETRIED = (408, 409, 412, 425, 429)
"""Beside 5xx: too slow, two commits at once (the next look at the commits settles it), too many requests."""

ADVICE = {
    401: "; the token is missing, expired or wrong: set HF_TOKEN",
    403: "; the token may not write there: give one with write permission",
    404: "; the repository is not there, or the token may not see it",
    413: "; the Hub takes no commit of this size",
}


class HubError(RuntimeError):
    """The Hub could not be reached or refused. What is on the disk is unharmed."""


class NotPushableError(ValueError):
    """The checkpoint is gone or damaged. Another try will not help."""


@dataclass(frozen=True)
class Problem:
    """What went wrong with the Hub, and whether another try can help."""

    reason: str
    """One line without secrets."""
    retry: bool
    retry_after_seconds: float = 0.0
    """The Hub asked for no request before that."""
    status: int | None = None
    """HTTP status, None where no answer came."""


def describe(error: BaseException) -> Problem:
    """Whether another try can help, and one line of why not. Every error of a push ends here.

    Answers of the Hub are judged by their status, whatever they are wrapped in; without an answer it is the network,
    which comes back. What Python calls a wrong value will be wrong the next time too.
    """
    response = next((r for r in map(_response, _chain(error)) if r is not None), None)
    if response is None:
        wrong = isinstance(error, (ValueError, TypeError, LookupError, AttributeError))
        return Problem(redact(f"{type(error).__name__}: {error}"), retry=not wrong or _not_json(error))
    status = int(response.status_code)
    advice = ADVICE.get(status, "")
    retry = status in RETRIED or status >= 500
    return Problem(redact(f"{error}{advice}"), retry, _wait_asked(response.headers) if retry else 0.0, status)


def redact(text: str) -> str:
    """One line of at most 600 characters without tokens and without the signed part of addresses."""
    from huggingface_hub import get_token

    try:
        token = get_token()
    except Exception:  # it asks a server in some set-ups; then no token was used either
        token = None
    text = " ".join(text.split())
    text = text.replace(token, "hf_...") if token else text
    return re.sub(r"(https?://[^\s?]+)\?\S+", r"\1?...", re.sub(r"hf_\w{4,}", "hf_...", text))[:600]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _response(error: BaseException) -> Any:
    response = getattr(error, "response", None)
    return response if isinstance(getattr(response, "status_code", None), int) else None


def _not_json(error: BaseException) -> bool:
    """A proxy or a login page answered instead of the Hub."""
    return any(isinstance(one, json.JSONDecodeError) for one in _chain(error))


def _wait_asked(headers: Mapping[str, str]) -> float:
    """Seconds of ``Retry-After`` (a number or a date) or of the Hub's own ``RateLimit``; 0 where it asks for none."""
    from huggingface_hub.utils import parse_ratelimit_headers

    asked = headers.get("Retry-After", "").strip()
    if asked.isdigit():
        return float(asked)
    try:
        return max(0.0, parsedate_to_datetime(asked).timestamp() - time.time())
    except ValueError:
        limit = parse_ratelimit_headers(headers)
        return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else 0.0
