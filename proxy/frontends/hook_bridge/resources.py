"""Requested CPUs and memory: from messages, from the ledger, and merged over several calls.

In a request, 0 or an empty text leaves a field unset; the runtime then keeps its value. So the request of a
container is the content of its create, changed by each update. Koordinator keeps the same record (Koordinator
v1.8.0 pkg/runtimeproxy/resexecutor/cri/utils.go, updateResourceByUpdateContainerResourceRequest). But it
takes only values above 0 from an update, so a limit can never be lifted by -1, and it treats an
``oom_score_adj`` that was never set as 0 (updateResource).
"""

from __future__ import annotations

import re
from dataclasses import fields

from proxy.api.cri import api_pb2 as pb
from proxy.api.koordinator import hook_pb2 as hook_pb
from proxy.frontends.hook_bridge.lazy_collections import LazyMap
from proxy.hooks.facts import Resources
from proxy.model.workload import Request

NO_RESOURCES = Resources()
_SCALARS = tuple(each.name for each in fields(Resources))[:-2]
"""All fields except the two maps."""
_PAGES = re.compile(r"hugepages-([0-9]+)([KMGT])i")


def resources_of(message: pb.LinuxContainerResources | hook_pb.LinuxContainerResources) -> Resources:
    """Read a request; huge pages and unified are read at the first access."""
    return Resources(
        message.cpu_period,
        message.cpu_quota,
        message.cpu_shares,
        message.memory_limit_in_bytes,
        message.memory_swap_limit_in_bytes,
        message.oom_score_adj,
        message.cpuset_cpus,
        message.cpuset_mems,
        LazyMap(_page_limits, message) if message.hugepage_limits else {},
        LazyMap(_unified, message) if message.unified else {},
    )


def recorded(request: Request) -> Resources:
    """Return the ledger's record of a container's request: all but oom_score_adj, swap and unified."""
    pages = {name: size for resource, size in request.huge_pages if (name := _page_size(resource))}
    return Resources(
        cpu_period=request.cpu_period,
        cpu_quota=request.cpu_quota,
        cpu_shares=request.cpu_shares,
        memory_limit=request.memory_limit,
        cpuset_cpus=request.cpuset_cpus,
        cpuset_mems=request.cpuset_mems,
        hugepage_limits=pages,
    )


def merged(before: Resources, update: Resources) -> Resources:
    """Return the request after an update: the fields that the update sets, and the previous other fields."""
    pages, unified = (
        {**before.hugepage_limits, **update.hugepage_limits},
        {**before.unified, **update.unified},
    )
    scalars = {name: getattr(update, name) or getattr(before, name) for name in _SCALARS}
    return Resources(**scalars, hugepage_limits=pages, unified=unified)


def _page_limits(message: pb.LinuxContainerResources | hook_pb.LinuxContainerResources) -> dict[str, int]:
    return {entry.page_size: entry.limit for entry in message.hugepage_limits}


def _unified(message: pb.LinuxContainerResources | hook_pb.LinuxContainerResources) -> dict[str, str]:
    return dict(message.unified)


def _page_size(resource: str) -> str:
    """Write a size as cgroup files do: ``2MB`` for ``hugepages-2Mi``; empty for a text that is no size."""
    match = _PAGES.fullmatch(resource)
    return f"{match[1]}{match[2]}B" if match else ""
