"""Limits on the age of what was read from the kernel."""

from __future__ import annotations

from typing import Final

STALE_S: Final = 5.0
"""Seconds after which a reading does not say any more what the kernel has now."""
