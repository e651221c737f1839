"""Roles of messages: ShareGPT's names for them, and notices about unknown roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_train.wording import did_you_mean, nearest, shortened

LEARNED = "assistant"
ROLES = (LEARNED, "user", "system", "developer", "tool", "function", "ipython")
"""Roles that chat templates write. Most also write any other role, which is learned only if they mark it."""
SPEAKERS = {"human": "user", "gpt": LEARNED}
"""Roles by ShareGPT's names, where they differ."""
SHOWN = 5
LONGEST = 40
"""Most characters of a role in a message for the user: a text field may have been mistaken for a role."""


def unknown(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the role of each message that has none of ``ROLES``, cut to what a notice can show."""
    return [message["role"][:LONGEST] for message in messages if message["role"] not in ROLES]


def notices(counts: Mapping[str, int], *, marked: bool) -> list[str]:
    """Return a notice about messages of unknown roles, counted by role.

    ``marked`` is True if the chat template marks what is learned, which may be any role.
    """
    if not counts:
        return []
    known = ", ".join(role for role in ROLES if role != LEARNED)
    found = [f"{role!r}{did_you_mean(_meant(role))}: {count:,}" for role, count in sorted(counts.items())]
    roles = shortened(found, SHOWN)
    if marked:
        return [
            f"messages of unknown roles: {roles}. They are learned where the chat template marks them "
            f"({{% generation %}}), which `accel-train data rows` shows; known roles are {LEARNED}, {known}"
        ]
    return [
        f"messages of unknown roles, which are read and never learned: {roles}. Only the role {LEARNED!r} is learned; "
        f"other known roles are {known}"
    ]


def nothing_learned(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the fault of a chat without an answer, with the roles that it has."""
    roles = [*dict.fromkeys(str(message["role"])[:LONGEST] for message in messages)]
    fault = f"no message has the role {LEARNED!r}, so there is nothing to learn; its roles are "
    fault += shortened([repr(role) for role in roles], SHOWN)
    # Both, because a role may happen to have one of the names.
    if SPEAKERS.keys() <= {*roles}:
        return f"{fault}, ShareGPT's names: write 'user' and 'assistant', or its 'conversations' of 'from' and 'value'"
    meant = [role for role in roles if _meant(role) == LEARNED]
    return f"{fault}; write {LEARNED!r} instead of {meant[0]!r}" if meant else fault


def _meant(role: str) -> str | None:
    return SPEAKERS.get(role) or nearest(role, ROLES)
