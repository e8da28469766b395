"""Normalizes paths in a container as the runtimes do."""

from __future__ import annotations

import posixpath


def container_path(path: str) -> str:
    """Return a path as the runtimes spell it: absolute, and without parts that change nothing."""
    return "/" + posixpath.normpath(path).lstrip("/")
