"""The state and the endpoint in the journal of an attach: its only two files that the daemon reads."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "attach"
BEGUN, CHANGING, ATTACHED = "begun", "changing", "attached"


def directory_of(state: Path) -> Path:
    """Return the directory of the journal in topoproxy's state directory."""
    old = state / f"{NAME}.old"
    return state / NAME if os.path.exists(state / NAME) or not os.path.exists(old) else old  # noqa: PTH110


def attached_endpoint(state: Path) -> str:
    """Return the endpoint that a complete attach has set, or an empty text; blocks on the disk.

    Args:
        state: topoproxy's state directory.
    """
    directory = directory_of(state)
    try:
        stage, endpoint = ((directory / name).read_text().strip() for name in ("state", "endpoint"))
    except (OSError, ValueError):
        return ""
    return endpoint if stage == ATTACHED else ""
