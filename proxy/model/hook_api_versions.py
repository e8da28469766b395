"""The versions of the API of hook files (``proxy.hooks.api``)."""

from __future__ import annotations

SUPPORTED = (1,)
"""Versions of this API that a hook file may set as ``API_VERSION``."""
