"""One event of containerd, read alone."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from proxy.backends.runtime.containerd_events import _decoded
from proxy.executor.runtime_ports import RuntimeEvent


def read_event(message: bytes) -> RuntimeEvent | None:
    """Read one envelope.

    Returns:
        None if it is not about a container's own process, or cannot be read.
    """
    try:
        return _decoded(message)
    except DecodeError:
        return None
