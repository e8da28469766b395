"""From CRI messages to our values."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from proxy.cri.pb import api_pb2 as pb
from proxy.model.workload import Pod, Request
from proxy.place.memory.state import page_resource
from proxy.pools.facts import pod_facts

_LIMIT = b"\x10"  # the key of HugepageLimit.limit; a limit of 0 is not on the wire
_PAGE_SIZE = re.compile(r"([1-9][0-9]{0,8})([KMGT])i?B", re.ASCII)
_KIB = {"K": 1, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30}


def pod_of(config: pb.PodSandboxConfig, sandbox_id: str = "") -> Pod:
    """Read a pod from its sandbox configuration."""
    meta = config.metadata
    return pod_facts(
        sandbox_id,
        meta.uid,
        meta.namespace,
        meta.name,
        meta.attempt,
        config.labels,
        config.annotations,
        config.linux.cgroup_parent,
    )


def request_of(resources: pb.LinuxContainerResources | pb.ResourceFacts) -> Request:
    """Read what a container asks for."""
    pages = resources.hugepage_limits
    return Request(
        resources.cpu_shares,
        resources.cpu_quota,
        resources.cpu_period,
        resources.memory_limit_in_bytes,
        resources.cpuset_cpus,
        resources.cpuset_mems,
        _huge_pages(pages[:]) if pages else (),
    )


def total_of(config: pb.PodSandboxConfig) -> Request:
    """Read what the containers of a pod ask for together (reference F: sums, without overhead)."""
    return request_of(config.linux.resources)


def _huge_pages(limits: Sequence[pb.HugepageLimit | bytes]) -> tuple[tuple[str, int], ...]:
    """Read limits on huge pages; kubelet sends one of 0 for each size that is not asked for."""
    found: dict[str, int] = {}
    for entry in limits:
        if isinstance(entry, bytes):
            if _LIMIT not in entry:
                continue
            entry = pb.HugepageLimit.FromString(entry)
        if entry.limit and (name := _page_resource(entry.page_size)):
            found[name] = entry.limit
    return tuple(sorted(found.items())) if found else ()


@functools.lru_cache(maxsize=64)
def _page_resource(page_size: str) -> str:
    """Give the resource for a size as cgroup files spell it: ``2MB`` are 2 MiB; empty for what is no size."""
    match = _PAGE_SIZE.fullmatch(page_size)
    return page_resource(int(match[1]) * _KIB[match[2]]) if match else ""
