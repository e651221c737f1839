"""Parts of messages."""

from __future__ import annotations

from hashlib import sha256

from accel_train.wording import shown


def test_a_fingerprint_is_shown_by_its_first_digits() -> None:
    """Two of 64 digits in one message are what nobody reads."""
    digest = sha256(b"rows").hexdigest()
    assert shown(digest) == repr(digest[:12])
    assert [shown(value) for value in ("a" * 12, 0.1, None)] == [repr("a" * 12), "0.1", "None"]
