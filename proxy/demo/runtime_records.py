"""The stand-in runtime's records of pods and containers.

The saved spec of a container follows containerd: UpdateContainerResources merges the fields that the request
sets into the saved ones, and sends the whole merged spec, not the request, to runc.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from proxy.api.cri import api_pb2 as pb

Resources = pb.LinuxContainerResources


def new_id() -> str:
    """Make an id as containerd's: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def merged_resources(
    saved: pb.LinuxContainerResources, request: pb.LinuxContainerResources
) -> pb.LinuxContainerResources:
    """Merge a request into the saved resources; zero and empty fields change nothing."""
    merged = Resources()
    merged.CopyFrom(saved)
    merged.MergeFrom(request)
    return merged


def oci_resources(saved: Resources) -> dict[str, dict[str, int | str]]:
    """Return resources as ``linux.resources`` of the OCI runtime spec, which leaves unset fields out."""
    cpu: dict[str, int | str] = {
        "shares": saved.cpu_shares,
        "quota": saved.cpu_quota,
        "period": saved.cpu_period,
        "cpus": saved.cpuset_cpus,
        "mems": saved.cpuset_mems,
    }
    memory: dict[str, int | str] = (
        {"limit": saved.memory_limit_in_bytes} if saved.memory_limit_in_bytes else {}
    )
    return {"cpu": {key: value for key, value in cpu.items() if value}, "memory": memory}


@dataclass(slots=True)
class PodRecord:
    """One sandbox.

    Attributes:
        config: The PodSandboxConfig unchanged.
        cgroup: The pause container's cgroup; empty once the sandbox is stopped.
        created_at: Nanoseconds since the epoch.
    """

    id: str
    config: pb.PodSandboxConfig
    cgroup: str
    created_at: int
    pid: int
    ready: bool = True

    @property
    def parent(self) -> str:
        """``cgroup_parent`` as the client gave it."""
        return self.config.linux.cgroup_parent


@dataclass(slots=True)
class ContainerRecord:
    """One container.

    Attributes:
        config: The ContainerConfig unchanged.
        cgroup: Path in the tree that the container has, or will have once it is started.
        cgroups_path: The same as ``linux.cgroupsPath`` of the OCI spec.
        exit_code: Only meaningful in state EXITED.
    """

    id: str
    pod_id: str
    config: pb.ContainerConfig
    resources: Resources
    cgroup: str
    cgroups_path: str
    created_at: int
    state: pb.ContainerState = pb.CONTAINER_CREATED
    pid: int = 0
    started_at: int = 0
    finished_at: int = 0
    exit_code: int = 0
    reason: str = ""

    @property
    def name(self) -> str:
        """The container's name in its pod."""
        return self.config.metadata.name


def cgroup_names(parent: str, container_id: str) -> tuple[str, str]:
    """Name a container's cgroup as containerd does.

    A parent that ends in ``.slice`` is a systemd slice: runc gets the name as ``slice:prefix:id``, and has
    systemd make a scope below the expanded slice. Without a parent it is ``/k8s.io/<id>``.

    Returns:
        ``(path below the hierarchy's root, linux.cgroupsPath)``.
    """
    base = parent.rstrip("/").rpartition("/")[2]
    if base.endswith(".slice"):
        scope = f"cri-containerd-{container_id}.scope"
        return f"{_slice_path(base)}/{scope}", f"{base}:cri-containerd:{container_id}"
    path = f"{parent.strip('/') or 'k8s.io'}/{container_id}"
    return path, f"/{path}"


def _slice_path(name: str) -> str:
    """Return the path of a slice: ``a-b.slice`` is below ``a.slice`` (systemd.slice(5))."""
    parts = name.removesuffix(".slice").split("-")
    return "/".join("-".join(parts[: i + 1]) + ".slice" for i in range(len(parts)))
