"""From CRI messages to our values."""

from __future__ import annotations

from proxy.cri.pb import api_pb2 as pb
from proxy.model.workload import Pod, Request
from proxy.pools.facts import pod_facts


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


def request_of(resources: pb.LinuxContainerResources) -> Request:
    """Read what a container asks for."""
    return Request(
        resources.cpu_shares,
        resources.cpu_quota,
        resources.cpu_period,
        resources.memory_limit_in_bytes,
        resources.cpuset_cpus,
        resources.cpuset_mems,
    )
