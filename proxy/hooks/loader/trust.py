"""The error of a hook file that another user than root could have written (``proxy.permissions``)."""

from __future__ import annotations

from proxy.model.errors import HookError


class UntrustedError(HookError):
    """Another user than root could have written it."""
