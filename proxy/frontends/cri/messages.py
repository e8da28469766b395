"""CRI messages: read as values of the model; and a cpuset, or an owner's CFS quota, written into them.

A request is changed without decoding and encoding it. A protobuf parser merges a singular message that occurs
twice, field by field, and the later field wins. So a second, tiny ``config`` (or ``linux``) that is appended
to the request overrides only the fields that it contains. Every other field, known to us or not, stays
unchanged, byte for byte.

Field numbers (CRI v1 and v1alpha2 alike): CreateContainerRequest.config 2, ContainerConfig.linux 15,
LinuxContainerConfig.resources 1; UpdateContainerResourcesRequest.linux 2; in LinuxContainerResources
cpu_quota is 2 (int64), cpuset_cpus 6 and cpuset_mems 7.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError
from msgspec import structs

from proxy.allocation.memory.request import SIZE_LENGTH_LIMIT, SIZES_LIMIT, huge_pages
from proxy.api.cri import api_pb2 as pb
from proxy.executor.ports import DeviceFacts
from proxy.model.idset import CpuSet, Mask, plausible
from proxy.model.machine import ANY_MACHINE, Bounds
from proxy.model.workload import Pod, Request
from proxy.pools.facts import POD_KEYS, pod_facts
from proxy.topology.device_files import device_file, device_path
from proxy.wire.protobuf import WantedKeys, decode_name, decode_text, encode_field, encode_varint

_LIMIT_KEY = b"\x10"  # the key of HugepageLimit.limit; a limit of 0 is not on the wire
_POD_KEYS = WantedKeys(POD_KEYS)


def pod_of(config: pb.SandboxFacts, sandbox_id: str = "", bounds: Bounds = ANY_MACHINE) -> Pod:
    """Read a pod from its sandbox configuration.

    Args:
        config: The configuration.
        sandbox_id: The runtime's id of the sandbox; empty while it is being created.
        bounds: The CPUs and NUMA nodes that its annotations may name.
    """
    meta = config.metadata
    pod = pod_facts(
        sandbox_id,
        decode_text(meta.uid),
        decode_text(meta.namespace),
        decode_text(meta.name),
        meta.attempt,
        _POD_KEYS.all_entries(config.labels),
        _POD_KEYS.wanted_entries(config.annotations),
        decode_text(config.linux.cgroup_parent),
        bounds,
    )
    total = None if pod.cpuset is None else _pod_total(config)
    return pod if total is None else structs.replace(pod, total=total)


def _pod_total(config: pb.SandboxFacts) -> Request | None:
    """Read the sum of the requests of a pod's containers; None if the configuration does not contain it."""
    if not config.linux.HasField("resources"):
        return None
    total = config.linux.resources
    return Request(total.cpu_shares, total.cpu_quota, total.cpu_period)


def request_of(resources: pb.ResourceFacts) -> Request:
    """Read the request of a container."""
    cpus, mems, pages = resources.cpuset_cpus, resources.cpuset_mems, resources.hugepage_limits
    return Request(
        resources.cpu_shares,
        resources.cpu_quota,
        resources.cpu_period,
        resources.memory_limit_in_bytes,
        plausible(decode_text(cpus)) if cpus else "",
        plausible(decode_text(mems)) if mems else "",
        _huge_pages(pages[:]) if pages else (),
    )


class CriCreateRequest:
    """A CreateContainerRequest; see ``proxy.calls.undecided_call.CreateRequest``."""

    __slots__ = ("_message", "attempt", "name", "resources", "sandbox_id")

    def __init__(self, body: bytes) -> None:
        """Decode a request.

        Raises:
            DecodeError: It cannot be decoded.
        """
        message = self._message = pb.CreateContainerFacts.FromString(body)
        config = message.config
        meta = config.metadata
        self.sandbox_id = decode_text(message.pod_sandbox_id)
        self.name = decode_text(meta.name)
        self.attempt = meta.attempt
        self.resources = request_of(config.linux.resources)

    def pod(self, bounds: Bounds) -> Pod:
        """Read the pod."""
        return pod_of(self._sandbox(), self.sandbox_id, bounds)

    def pod_total(self) -> Request | None:
        """Read the sum of the requests of the pod's containers."""
        return _pod_total(self._sandbox())

    def devices(self) -> DeviceFacts:
        """Read the devices that the request gives to the container."""
        return device_facts_of(self._message.config)

    def _sandbox(self) -> pb.SandboxFacts:
        pieces = self._message.sandbox_config
        return pb.SandboxFacts.FromString(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def _huge_pages(limits: Sequence[bytes]) -> tuple[tuple[str, int], ...]:
    """Read limits on huge pages; kubelet sends a limit of 0 for each size that is not requested."""
    entries = (pb.HugepageFacts.FromString(raw) for raw in limits[:SIZES_LIMIT] if _LIMIT_KEY in raw)
    return huge_pages((decode_text(entry.page_size[:SIZE_LENGTH_LIMIT]), entry.limit) for entry in entries)


_Entry = TypeVar("_Entry", pb.PathFacts, pb.Entry, pb.CDIDeviceFacts)

_NO_DEVICES = DeviceFacts()
_CDI_KEY = b"cdi.k8s.io/"
_HOST_PATH = re.compile(rb"\x12.{1,2}/(?:dev|sys)/", re.DOTALL)
"""A host path in the bytes of a mount: field 2, its length (one byte or two), its beginning."""
_MOST_DEVICES = 1024
_LONGEST_NAME = 4096
"""Characters of a path or a name of a device; Linux accepts no longer path."""


def device_facts_of(config: pb.ContainerFacts) -> DeviceFacts:
    """Read the devices that a container gets, in the order of the request, each once.

    kubelet's device manager and its plugins decide on them. The request carries only the result: device
    files, CDI names (a field, with older plugins annotations ``cdi.k8s.io/...``), and mounts. Most
    containers have none of these, so an entry is decoded only if its bytes can matter. The host's path of a
    mount counts: nearly every container has a mount at ``/dev/termination-log``, from a directory of kubelet.

    Entries that cannot be decoded are left out, and so are names that are not UTF-8 and paths that say
    nothing about a device's location (``/dev/null``, ``/dev`` itself).
    """
    devices, names = config.devices, config.CDI_devices
    # A slice and a join are one call each; iterating costs three times that.
    in_mounts = _HOST_PATH.search(b"".join(config.mounts[:])) is not None
    in_annotations = _CDI_KEY in b"".join(config.annotations[:])
    if not (devices or names or in_mounts or in_annotations):
        return _NO_DEVICES
    cdi = [decode_name(entry.name) for entry in _decoded(pb.CDIDeviceFacts, names)]
    if in_annotations:
        for entry in _decoded(pb.Entry, config.annotations):
            if entry.key.startswith(_CDI_KEY):
                cdi += (name.strip() for name in decode_name(entry.value).split(","))
    mounts = config.mounts if in_mounts else ()
    return DeviceFacts(
        _distinct(device_file(decode_name(entry.host_path)) for entry in _decoded(pb.PathFacts, devices)),
        _distinct(cdi),
        _distinct(device_path(decode_name(entry.host_path)) for entry in _decoded(pb.PathFacts, mounts)),
    )


def _decoded(kind: type[_Entry], entries: Iterable[bytes]) -> Iterator[_Entry]:
    for entry in entries:
        try:
            yield kind.FromString(entry)
        except DecodeError:
            continue


def _distinct(values: Iterable[str | None]) -> tuple[str, ...]:
    """Return each value once, without empty and overlong ones; a list of thousands is truncated."""
    found = dict.fromkeys(value for value in values if value and len(value) <= _LONGEST_NAME)
    return tuple(found)[:_MOST_DEVICES]


_CACHED_SUFFIXES = 256
_create_suffixes: dict[tuple[int, int, int], bytes] = {}


def _resources(cpus: CpuSet | None, mems: Mask | None, quota: int) -> bytes:
    assert cpus is None or cpus, "an empty set means all CPUs to a runtime"
    body = encode_field(6, str(cpus).encode() if cpus else b"")
    if mems:
        body += encode_field(7, str(mems).encode())
    # A negative int64 is encoded as the 64 bits of its two's complement.
    return body + bytes((2 << 3,)) + encode_varint(quota % (1 << 64)) if quota else body


def create_suffix(cpus: CpuSet | None, mems: Mask | None, quota: int = 0) -> bytes:
    """Return the bytes to append to a CreateContainerRequest.

    Args:
        cpus: The CPUs; None to erase those that the request names.
        mems: The memory nodes; None to leave them.
        quota: The CFS quota, -1 for none; 0 to leave it.
    """
    key = (cpus.bits if cpus is not None else -1, mems.bits if mems is not None else 0, quota)
    known = _create_suffixes.get(key)
    if known is None:
        if len(_create_suffixes) >= _CACHED_SUFFIXES:
            _create_suffixes.clear()
        known = _create_suffixes[key] = encode_field(
            2, encode_field(15, encode_field(1, _resources(cpus, mems, quota)))
        )
    return known


def cgroup_parent_suffix(parent: str) -> bytes:
    """Return the bytes that name another cgroup of the pod at the end of a CreateContainerRequest.

    The field is ``sandbox_config.linux.cgroup_parent``: 3, 8, 1.
    """
    return encode_field(3, encode_field(8, encode_field(1, parent.encode())))


@functools.lru_cache(maxsize=256)
def update_suffix(cpus: CpuSet | None, mems: Mask | None, quota: int = 0) -> bytes:
    """Return the bytes to append to an UpdateContainerResourcesRequest; as ``create_suffix``."""
    return encode_field(2, _resources(cpus, mems, quota))
