"""From CRI messages to our values."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

from proxy.allocation.memory.state import page_resource
from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri.lenient_text import Keys, text
from proxy.model.idset import plausible
from proxy.model.machine import ANY_MACHINE, Bounds
from proxy.model.workload import Pod, Request
from proxy.pools.facts import POD_KEYS, pod_facts

_LIMIT = b"\x10"  # the key of HugepageLimit.limit; a limit of 0 is not on the wire
_PAGE_SIZE = re.compile(r"([1-9][0-9]{0,8})([KMGT])i?B", re.ASCII)
_POD = Keys(POD_KEYS)
_KIB = {"K": 1, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30}


_MOST_SIZES = 64
"""Sizes of pages; no architecture has more than a dozen."""
_LONGEST_SIZE = 16
"""Characters of the size of a page."""


def pod_of(config: pb.SandboxFacts, sandbox_id: str = "", bounds: Bounds = ANY_MACHINE) -> Pod:
    """Read a pod from its sandbox configuration.

    Args:
        config: The configuration.
        sandbox_id: The runtime's id of the sandbox; empty while it is being made.
        bounds: CPUs and NUMA nodes that its annotations may name.
    """
    meta = config.metadata
    pod = pod_facts(
        sandbox_id,
        text(meta.uid),
        text(meta.namespace),
        text(meta.name),
        meta.attempt,
        _POD.of(config.labels),
        _POD.of(config.annotations),
        text(config.linux.cgroup_parent),
        bounds,
    )
    return pod if pod.cpuset is None else with_total(pod, config)


def with_total(pod: Pod, config: pb.SandboxFacts) -> Pod:
    """Give a pod with what its containers request together, where its sandbox's configuration says that."""
    if not config.linux.HasField("resources"):
        return pod
    total = config.linux.resources
    return dataclasses.replace(pod, total=Request(total.cpu_shares, total.cpu_quota, total.cpu_period))


def request_of(resources: pb.ResourceFacts) -> Request:
    """Read what a container asks for."""
    cpus, mems, pages = resources.cpuset_cpus, resources.cpuset_mems, resources.hugepage_limits
    return Request(
        resources.cpu_shares,
        resources.cpu_quota,
        resources.cpu_period,
        resources.memory_limit_in_bytes,
        plausible(text(cpus)) if cpus else "",
        plausible(text(mems)) if mems else "",
        _huge_pages(pages[:]) if pages else (),
    )


def total_of(config: pb.SandboxFacts) -> Request:
    """Read what the containers of a pod ask for together (sums, without overhead)."""
    return request_of(config.linux.resources)


def _huge_pages(limits: Sequence[bytes]) -> tuple[tuple[str, int], ...]:
    """Read limits on huge pages; kubelet sends one of 0 for each size that is not asked for."""
    found: dict[str, int] = {}
    for raw in limits[:_MOST_SIZES]:
        if _LIMIT not in raw:
            continue
        entry = pb.HugepageFacts.FromString(raw)
        size = entry.page_size
        if entry.limit and len(size) <= _LONGEST_SIZE and (name := _page_resource(text(size))):
            found[name] = entry.limit
    return tuple(sorted(found.items())) if found else ()


@functools.lru_cache(maxsize=64)
def _page_resource(page_size: str) -> str:
    """Give the resource for a size as cgroup files spell it: ``2MB`` are 2 MiB; empty for what is no size."""
    match = _PAGE_SIZE.fullmatch(page_size)
    return page_resource(int(match[1]) * _KIB[match[2]]) if match else ""
