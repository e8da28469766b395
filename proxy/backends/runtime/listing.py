"""Read the runtime's lists entry by entry, so that one entry that cannot be read costs only itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError

from proxy.api.cri import api_pb2 as pb
from proxy.executor.runtime_ports import SOURCE, Listed, RuntimeContainer, RuntimePod
from proxy.model.errors import RuntimeCallError
from proxy.model.grpc_status import GrpcStatus
from proxy.pools.facts import POD_KEYS
from proxy.wire.protobuf import Keys, identity, text

_Entry = TypeVar("_Entry")

_KEYS = Keys((*POD_KEYS, SOURCE))
_STATES = {number: name.removeprefix("CONTAINER_") for name, number in pb.ContainerState.items()}
_FIRST = 0x0A
"""The key of field 1, a string: the id, which encoders write first."""


def entries_of(
    raw: bytes, what: str, read: Callable[[bytes], _Entry | None], unread: Callable[[str], None]
) -> Listed[_Entry]:
    """Read a list.

    Args:
        raw: The runtime's answer.
        what: What an entry is, for people.
        read: Reads an entry. It raises DecodeError where the entry is not a message, and returns None where
            the entry is about something that no call can name.
        unread: Called with a sentence about each entry that is left out.

    Raises:
        RuntimeCallError: The answer cannot even be split into entries.
    """
    try:
        pieces = pb.ListEntries.FromString(raw).entries
    except DecodeError as error:
        message = f"cannot read the runtime's list of {what} entries: {error}"
        unread(message)
        raise RuntimeCallError(message, GrpcStatus.INTERNAL) from None
    found, lacking = list[_Entry](), set[str]()
    for piece in pieces:
        try:
            entry = read(piece)
        except DecodeError as error:
            known = _id_of(piece)
            lacking.add(known)
            unread(f"cannot read {what} {known!r} of the runtime's list: {error}")
            continue
        if entry is None:
            unread(f"cannot use a {what} of the runtime's list: its id is not UTF-8")
        else:
            found.append(entry)
    return Listed(found, lacking)


def read_sandbox(raw: bytes) -> RuntimePod | None:
    """Read a sandbox, with its labels and the annotations that count."""
    item = pb.ListedSandbox.FromString(raw)
    sandbox_id, meta = identity(item.id), item.metadata
    if not sandbox_id:
        return None
    return RuntimePod(
        id=sandbox_id,
        uid=text(meta.uid),
        namespace=text(meta.namespace),
        name=text(meta.name),
        attempt=meta.attempt,
        ready=item.state == pb.SANDBOX_READY,
        labels=_KEYS.and_others(item.labels),
        annotations=_KEYS.of(item.annotations),
    )


def read_container(raw: bytes) -> RuntimeContainer | None:
    """Read a container."""
    item = pb.ListedContainer.FromString(raw)
    container_id, meta = identity(item.id), item.metadata
    if not container_id:
        return None
    return RuntimeContainer(
        id=container_id,
        sandbox_id=text(item.pod_sandbox_id),
        name=text(meta.name),
        attempt=meta.attempt,
        state=_STATES.get(item.state, "UNKNOWN"),
    )


def _id_of(raw: bytes) -> str:
    """Read the id of an entry that cannot be decoded; empty where it is not at the entry's beginning."""
    if len(raw) < 2 or raw[0] != _FIRST or raw[1] > 0x7F or len(raw) < 2 + raw[1]:
        return ""
    return identity(raw[2 : 2 + raw[1]])
