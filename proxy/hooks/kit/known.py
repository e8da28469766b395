"""The former names of ``proxy.hooks.kit.container_tracker``, for one release.

Copies of a shipped hook on nodes import them.
"""

from proxy.hooks.kit.container_tracker import ContainerTracker as Known
from proxy.hooks.kit.container_tracker import Member

__all__ = ["Known", "Member"]
