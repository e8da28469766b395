"""A small CRI client, and functions that read the CPUs of a container from the kernel.

It has only the methods that the tests call. It uses the project's own messages (fields that they do not
declare are set as bytes). The service name is a parameter: ``runtime.v1`` and ``runtime.v1alpha2`` have the
same messages.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

os.environ.setdefault(
    "GRPC_ENABLE_FORK_SUPPORT", "false"
)  # child processes of the tests use no gRPC channel of this process

import grpc

from proxy.api.cri import api_pb2 as pb
from proxy.model.idset import CpuSet, Mask

RpcError = grpc.RpcError
IMAGE = "localhost/busybox:1"
STATUS = "scheduling.koordinator.sh/resource-status"
PATIENCE_S = float(os.environ.get("TOPOPROXY_PATIENCE_S") or 30)
"""The default timeout of a call; a virtual machine on a busy host needs more."""
CREATED, RUNNING, EXITED = range(3)

# NamespaceOption { network (1) = NODE (2), pid (2) = CONTAINER (1) }, for pods and for containers
HOST_NETWORK = b"\x08\x02\x10\x01"
OWN_NETWORK = b"\x10\x01"
AS_GIVEN = b"\x92\x01"
"""The key of ImageSpec.user_specified_image (18)."""
MOUNTS = b"\x3a"
"""The key of ContainerConfig.mounts (7)."""


def code(error: RpcError) -> grpc.StatusCode:
    """Return the status code of a call that failed."""
    return error.code()  # type: ignore[attr-defined, no-any-return]


UNTIL_PROCEED = "until [ -e /go ]; do sleep 0.1; done"
"""A shell command that waits in a container until the test calls ``Cri.proceed``."""


def security(key: int, host_network: bool) -> bytes:
    """Make the security_context (2) of a pod (its namespace_options are 1) or of a container (3)."""
    options = HOST_NETWORK if host_network else OWN_NETWORK
    context = bytes([key << 3 | 2, len(options)]) + options
    return b"\x12" + bytes([len(context)]) + context


def requests_of(annotations: Mapping[str, str]) -> dict[str, int]:
    """Return the CPU resources of a pod whose annotation names CPUs; an empty dict for other pods."""
    try:
        count = len(CpuSet.parse(json.loads(annotations.get(STATUS, "{}"))["cpuset"]))
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
    return {"cpu_period": 100_000, "cpu_shares": 1024 * count, "cpu_quota": 100_000 * count} if count else {}


class Cri:
    """One connection to a CRI socket. Use as a context manager, or close it.

    Args:
        socket: Path of the unix socket.
        cgroup: The prefix of every pod's ``cgroup_parent``.
        service: The prefix of the names of the services.
    """

    def __init__(self, socket: Path, cgroup: str, service: str = "runtime.v1") -> None:
        self._cgroup = cgroup
        self._service = service
        # Without a pool of its own, a second channel to the same path may share a broken connection.
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.min_reconnect_backoff_ms", int(PATIENCE_S * 1000)),  # how long one attempt may take
            ("grpc.enable_http_proxy", 0),
        ]
        self.channel = grpc.insecure_channel(f"unix://{socket}", options=options)
        self._configs: dict[str, Any] = {}

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def method(self, name: str, answer: str = "") -> grpc.UnaryUnaryMultiCallable[Any, Any]:
        """Return the callable of a method of the runtime service."""
        return self.channel.unary_unary(
            f"/{self._service}.RuntimeService/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=getattr(pb, answer or f"{name}Response").FromString,
        )

    def execute(self, container: str, *command: str) -> None:
        """Run a command in a container: ExecSyncRequest { container_id (1), cmd (2) }."""
        fields = [(b"\x0a", container), *((b"\x12", word) for word in command)]
        request = b"".join(tag + bytes([len(text)]) + text.encode() for tag, text in fields)
        method: Any = self.channel.unary_unary(f"/{self._service}.RuntimeService/ExecSync")
        method(request, timeout=PATIENCE_S)

    def proceed(self, container: str) -> None:
        """Let a container continue that waits in ``UNTIL_PROCEED``."""
        self.execute(container, "touch", "/go")

    def call(self, name: str, timeout: float = PATIENCE_S, **fields: Any) -> Any:
        """Call a method of the runtime service; the fields are those of its request."""
        return self.method(name)(getattr(pb, f"{name}Request")(**fields), timeout=timeout)

    def version(self, timeout: float = 5) -> Any:
        return self.call("Version", timeout)

    def has_image(self, name: str) -> bool:
        """Return whether an image exists (``image`` is field 1 of ImageStatusRequest and of its response)."""
        spec = pb.ImageSpec(image=name).SerializeToString()
        image_status = self.channel.unary_unary(f"/{self._service}.ImageService/ImageStatus")
        return image_status(b"\x0a" + bytes([len(spec)]) + spec, timeout=5).startswith(b"\x0a")

    def pull(self, name: str) -> None:
        """Pull an image (PullImageRequest.image is field 1)."""
        spec = pb.ImageSpec(image=name).SerializeToString()
        method: Any = self.channel.unary_unary(f"/{self._service}.ImageService/PullImage")
        method(b"\x0a" + bytes([len(spec)]) + spec, timeout=PATIENCE_S)

    # Pods.

    def pod_config(
        self,
        name: str,
        *,
        uid: str = "",
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        cgroup_parent: str = "",
        host_network: bool = True,
        attempt: int = 0,
        resources: Mapping[str, int] | None = None,
        namespace: str = "default",
    ) -> Any:
        """Return a PodSandboxConfig like kubelet's; the default cgroup parent is that of a Guaranteed pod.

        ``resources`` are fields of LinuxContainerResources: the sum over the pod's containers. By default a
        pod whose annotation names CPUs requests that number of CPUs.
        """
        resources = resources or requests_of(annotations or {})
        uid = uid or f"uid-{name}"
        parent = cgroup_parent or f"/kubepods/pod{uid}"
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=name, uid=uid, namespace=namespace, attempt=attempt),
            labels={
                "io.kubernetes.pod.name": name,
                "io.kubernetes.pod.uid": uid,
                "io.kubernetes.pod.namespace": namespace,
                **(labels or {}),
            },
            annotations=dict(annotations or {}),
            linux=pb.LinuxPodSandboxConfig(cgroup_parent=self._cgroup + parent),
        )
        if resources:
            config.linux.resources.CopyFrom(pb.LinuxContainerResources(**resources))
        config.linux.MergeFromString(security(1, host_network))
        return config

    def run_pod(self, name: str, **options: Any) -> str:
        """Run a sandbox (options of ``pod_config``); returns its id."""
        config = self.pod_config(name, **options)
        pod: str = self.call("RunPodSandbox", config=config).pod_sandbox_id
        self._configs[pod] = config
        return pod

    def stop_pod(self, pod: str) -> None:
        self.call("StopPodSandbox", pod_sandbox_id=pod)

    def remove_pod(self, pod: str) -> None:
        self.call("RemovePodSandbox", pod_sandbox_id=pod)
        self._configs.pop(pod, None)

    def list_pods(self, timeout: float = PATIENCE_S) -> list[Any]:
        return list(self.call("ListPodSandbox", timeout).items)

    def adopt(self, other: Cri) -> None:
        """Copy the pod configs of another client (a create must repeat the config of its pod)."""
        self._configs.update(other._configs)

    # Containers.

    def create_request(
        self,
        pod: str,
        name: str = "main",
        *,
        image: str = IMAGE,
        command: Sequence[str] = ("sleep", "3600"),
        attempt: int = 0,
        device: str = "",
        cdi: Sequence[str] = (),
        mounts: Mapping[str, str] | None = None,
        huge_pages: Mapping[str, int] | None = None,
        **resources: Any,
    ) -> Any:
        """Make a CreateContainerRequest.

        Args:
            pod: The sandbox's id.
            name: The container's name.
            image: The container's image.
            command: The container's command.
            attempt: As in ContainerMetadata.
            device: The device file of the host that the request names.
            cdi: The CDI devices that the request names.
            mounts: Path in the container to path on the host.
            huge_pages: Page size (``2MB``) to limit in bytes.
            resources: Fields of LinuxContainerResources.
        """
        pages = (huge_pages or {}).items()
        resources["hugepage_limits"] = [pb.HugepageLimit(page_size=size, limit=n) for size, n in pages]
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=name, attempt=attempt),
            image=pb.ImageSpec(image=image),
            command=command,
            devices=[pb.Device(host_path=device, container_path=device, permissions="rwm")] if device else [],
            CDI_devices=[pb.CDIDevice(name=name) for name in cdi],
            labels={"io.kubernetes.container.name": name},
            linux=pb.LinuxContainerConfig(resources=pb.LinuxContainerResources(**resources)),
        )
        config.image.MergeFromString(AS_GIVEN + bytes([len(image)]) + image.encode())
        host_network = security(1, True) in self._configs[pod].linux.SerializeToString()
        config.linux.MergeFromString(security(3, host_network))
        for to, path in (mounts or {}).items():
            mount = pb.Mount(container_path=to, host_path=path).SerializeToString()
            config.MergeFromString(MOUNTS + bytes([len(mount)]) + mount)
        return pb.CreateContainerRequest(pod_sandbox_id=pod, config=config, sandbox_config=self._configs[pod])

    def create(self, pod: str, name: str = "main", timeout: float = PATIENCE_S, **options: Any) -> str:
        """Create a container (options of ``create_request``); returns its id."""
        request = self.create_request(pod, name, **options)
        container: str = self.method("CreateContainer")(request, timeout=timeout).container_id
        return container

    def start(self, container: str) -> None:
        self.call("StartContainer", container_id=container)

    def run(self, pod: str, name: str = "main", **options: Any) -> str:
        """Create and start a container; returns its id."""
        container = self.create(pod, name, **options)
        self.start(container)
        return container

    def stop(self, container: str, grace: int = 0) -> None:
        """Stop a container; it is killed after ``grace`` seconds."""
        self.method("StopContainer")(
            pb.StopContainerRequest(container_id=container, timeout=grace), timeout=PATIENCE_S
        )

    def remove(self, container: str) -> None:
        self.call("RemoveContainer", container_id=container)

    def update(self, container: str, **resources: Any) -> None:
        """UpdateContainerResources with just these fields of LinuxContainerResources."""
        linux = pb.LinuxContainerResources(**resources)
        self.call("UpdateContainerResources", container_id=container, linux=linux)

    def status(self, container: str, verbose: bool = False) -> Any:
        return self.call("ContainerStatus", container_id=container, verbose=verbose)

    def list(self) -> list[Any]:
        return list(self.call("ListContainers").containers)

    def events(self, timeout: float = PATIENCE_S) -> Iterator[Any]:
        """Stream of container events (UNIMPLEMENTED before containerd 1.7)."""
        stream = self.channel.unary_stream(
            f"/{self._service}.RuntimeService/GetContainerEvents",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=pb.ContainerEventResponse.FromString,
        )
        yield from stream(pb.GetEventsRequest(), timeout=timeout)


# What the kernel reports.


@dataclass(frozen=True)
class Cpuset:
    """A container's cpuset: as written, as in effect, and as the affinity of its tasks."""

    cpus: CpuSet
    mems: Mask
    effective: CpuSet
    tasks: frozenset[CpuSet]


def cpuset_root() -> Path:
    """The hierarchy with the cpuset controller."""
    v1 = Path("/sys/fs/cgroup/cpuset")
    return v1 if v1.is_dir() else Path("/sys/fs/cgroup")


def is_v2() -> bool:
    """Return whether the machine's cpuset controller is that of cgroup v2."""
    return (cpuset_root() / "cgroup.controllers").exists()


def cgroup_of(container: str, root: Path | None = None) -> Path | None:
    """Find a container's cgroup in a hierarchy (default: the cpuset one), None if it has none."""
    for directory, below, _ in os.walk(root or cpuset_root()):
        for name in (container, f"crio-{container}"):
            if name in below:
                return Path(directory) / name
    return None


def cpuset_of(container: str) -> Cpuset:
    """Read a running container's cpuset from the kernel.

    Raises:
        FileNotFoundError: It has no cgroup.
    """
    directory = cgroup_of(container)
    if directory is None:
        raise FileNotFoundError(f"container {container[:12]} has no cgroup")
    effective = "cpuset.cpus.effective" if is_v2() else "cpuset.effective_cpus"
    return Cpuset(
        CpuSet.parse((directory / "cpuset.cpus").read_text()),
        Mask.parse((directory / "cpuset.mems").read_text()),
        CpuSet.parse((directory / effective).read_text()),
        affinities(directory),
    )


def affinities(directory: Path) -> frozenset[CpuSet]:
    """Return the affinities that the processes of a cgroup have, without those that end meanwhile."""
    found = set()
    for pid in (directory / "cgroup.procs").read_text().split():
        # ESRCH: the process ends between open and read. A shell's `sleep` in a loop lives for 0.1 s.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = Path(f"/proc/{pid}/status").read_text()
            found.add(CpuSet.parse(status.partition("Cpus_allowed_list:")[2].split(None, 1)[0]))
    return frozenset(found)


def online() -> CpuSet:
    """The CPUs that the machine's root cpuset offers."""
    name = "cpuset.cpus.effective" if is_v2() else "cpuset.effective_cpus"
    try:
        return CpuSet.parse((cpuset_root() / name).read_text())
    except OSError:  # no cpuset controller: pytest must still collect the tests to skip them
        return CpuSet(range(os.cpu_count() or 1))
