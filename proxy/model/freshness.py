"""Limits on the age of values that were read from the kernel."""

from __future__ import annotations

from typing import Final

STALE_S: Final = 5.0
"""Seconds after which a value read from the kernel counts as outdated."""
