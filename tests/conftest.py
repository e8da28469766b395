"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# In CI the same examples are tried each time: a red run must mean that something changed.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")
