"""What a create request shows of devices.

Kubelet's device manager and its plugins decide which devices a container gets; the request carries only the
outcome: device files, CDI names (as a field, from older plugins as annotations ``cdi.k8s.io/...``), and
mounts. Most containers have none of these, so what is looked at first are the bytes: an entry
is decoded only when something in them can matter. It is the host's path that counts: nearly every container
has a mount at ``/dev/termination-log``, from a directory of kubelet's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError

from proxy.api.cri import api_pb2 as pb
from proxy.executor.ports import DeviceFacts
from proxy.topology.device_files import device_file, worth_a_look
from proxy.wire.lenient_text import identity

_Entry = TypeVar("_Entry", pb.PathFacts, pb.Entry, pb.CDIDeviceFacts)

_NOTHING = DeviceFacts()
_CDI_KEY = b"cdi.k8s.io/"
_HOST_PATH = re.compile(rb"\x12.{1,2}/(?:dev|sys)/", re.DOTALL)
"""A host path in the bytes of a mount: field 2, its length (one byte or two), its beginning."""
_MOST = 1024
_LONGEST = 4096
"""Characters of a path or a name of a device; Linux takes no longer path."""


def given_of(config: pb.ContainerFacts) -> DeviceFacts:
    """Read what a container is given of devices; in the order of the request, each once.

    Entries that cannot be decoded are left out, and so are names that are not UTF-8 and paths that say
    nothing about a place (``/dev/null``, ``/dev`` itself).
    """
    devices, names = config.devices, config.CDI_devices
    # A slice and a join are one call each; iterating costs three times that.
    in_mounts = _HOST_PATH.search(b"".join(config.mounts[:])) is not None
    in_annotations = _CDI_KEY in b"".join(config.annotations[:])
    if not (devices or names or in_mounts or in_annotations):
        return _NOTHING
    cdi = [identity(entry.name) for entry in _decoded(pb.CDIDeviceFacts, names)]
    if in_annotations:
        for entry in _decoded(pb.Entry, config.annotations):
            if entry.key.startswith(_CDI_KEY):
                cdi += (name.strip() for name in identity(entry.value).split(","))
    mounts = config.mounts if in_mounts else ()
    return DeviceFacts(
        _once(device_file(identity(entry.host_path)) for entry in _decoded(pb.PathFacts, devices)),
        _once(cdi),
        _once(worth_a_look(identity(entry.host_path)) for entry in _decoded(pb.PathFacts, mounts)),
    )


def _decoded(kind: type[_Entry], entries: Iterable[bytes]) -> Iterator[_Entry]:
    for entry in entries:
        try:
            yield kind.FromString(entry)
        except DecodeError:
            continue


def _once(values: Iterable[str | None]) -> tuple[str, ...]:
    """Give each value once, without empty and overlong ones; a request of thousands is cut."""
    found = dict.fromkeys(value for value in values if value and len(value) <= _LONGEST)
    return tuple(found)[:_MOST]
