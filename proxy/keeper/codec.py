"""Pods and containers as plain data for the ledger, and back.

Sets are stored as Linux lists, so that a person can read the journal. What cannot be read back (a field of a
later version, a hand edit) gives None, and the caller rebuilds the record from the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.model.idset import CpuSet, IdSet, Mask
from proxy.model.workload import Container, Pod


def _encode(value: Any) -> Any:
    if isinstance(value, IdSet):
        return str(value)
    raise NotImplementedError(f"cannot store a {type(value).__name__}")


def _decode(kind: type, value: Any) -> Any:
    if kind in (CpuSet, Mask):
        return kind.parse(value)
    raise NotImplementedError(f"cannot read a {kind.__name__}")


def dump(value: Pod | Container) -> dict[str, object]:
    """Give a record as plain data."""
    data: dict[str, object] = msgspec.to_builtins(value, enc_hook=_encode)
    return data


def load_container(data: Mapping[str, object]) -> Container | None:
    """Read a container; None where the data is not one."""
    try:
        return msgspec.convert(data, Container, dec_hook=_decode)
    except (msgspec.ValidationError, ValueError, TypeError, AttributeError):
        return None


def load_pod(data: Mapping[str, object]) -> Pod | None:
    """Read a pod; None where the data is not one."""
    try:
        return msgspec.convert(data, Pod, dec_hook=_decode)
    except (msgspec.ValidationError, ValueError, TypeError, AttributeError):
        return None
