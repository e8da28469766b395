"""Read a verbose ContainerStatus answer.

The status itself carries resources since CRI of 1.25, where the runtime fills them in (containerd 1.7).
Beyond that containerd and CRI-O put a JSON document under ``info["info"]`` whose ``runtimeSpec`` is the OCI
specification as it is saved, and whose ``pid`` is the container's first process. Its layout is not specified,
so whatever is missing, of another type, or not JSON counts as unknown.
"""

from __future__ import annotations

import json

from proxy.api.cri import api_pb2 as pb
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.model.idset import plausible
from proxy.wire.protobuf import entry_of, text

_TOO_LARGE = 1 << 64
"""Numbers of the OCI specification have 64 bits."""


def parse_detail(answer: pb.DetailFacts) -> RuntimeDetail:
    """Return the cgroup and the resources of a status answer; never raises."""
    document = _document(answer)
    linux = _get(document, "runtimeSpec", "linux")
    cgroups_path = _text(_get(linux, "cgroupsPath"))
    pid = _number(_get(document, "pid"))
    status = answer.status
    if status.resources.HasField("linux"):
        reported = status.resources.linux
        return RuntimeDetail(
            cgroups_path=cgroups_path,
            cpu_shares=reported.cpu_shares,
            cpu_quota=reported.cpu_quota,
            cpu_period=reported.cpu_period,
            memory_limit=reported.memory_limit_in_bytes,
            cpuset_cpus=plausible(text(reported.cpuset_cpus)),
            cpuset_mems=plausible(text(reported.cpuset_mems)),
            pid=pid,
        )
    cpu = _get(linux, "resources", "cpu")
    return RuntimeDetail(
        cgroups_path=cgroups_path,
        cpu_shares=_number(_get(cpu, "shares")),
        cpu_quota=_number(_get(cpu, "quota")),
        cpu_period=_number(_get(cpu, "period")),
        memory_limit=_number(_get(linux, "resources", "memory", "limit")),
        cpuset_cpus=plausible(_text(_get(cpu, "cpus"))),
        cpuset_mems=plausible(_text(_get(cpu, "mems"))),
        pid=pid,
    )


def _document(answer: pb.DetailFacts) -> object:
    """Read the JSON document. Bytes that are not UTF-8 cost the text that they are in and nothing else."""
    found = b""
    for raw in answer.info:
        entry = entry_of(raw)
        if entry is not None and entry.key == b"info":
            found = entry.value
    try:
        return json.loads(found.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def _get(value: object, *keys: str) -> object:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= _TOO_LARGE:
        return 0
    return value
