"""Message bodies of realistic size and shape, and the calls that carry them.

Mounts are not declared in our .proto files, so they are unknown fields, like those from a real kubelet.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.api.cri import api_pb2 as pb

SERVICE = b"/runtime.v1.RuntimeService/"
SMALL_ENVS, LARGE_ENVS, HUGE_ENVS = 115, 6_000, 420_000
BIG_ANSWER = 15 << 20


def identifier(number: int) -> str:
    """A container id: 64 hex digits."""
    return f"{number:08x}" + "9be107d2" * 7


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _mounts(number: int, count: int) -> bytes:
    """``count`` mounts as field ``number``."""
    volumes = f"/var/lib/kubelet/pods/{identifier(7)[:36]}/volumes/kubernetes.io~projected"
    one = (_field(1, b"/data/%d" % i) + _field(2, f"{volumes}/data-{i}".encode()) for i in range(count))
    return b"".join(_field(number, mount) for mount in one)


def labels(number: int) -> dict[str, str]:
    """The labels that kubelet writes on every container."""
    return {
        "io.kubernetes.container.name": f"worker-{number % 3}",
        "io.kubernetes.pod.name": f"service-{number:05d}-6c8d9f7b5c-q{number % 997:03d}",
        "io.kubernetes.pod.namespace": "shop-front",
        "io.kubernetes.pod.uid": f"{number:08x}-7a11-4c22-9d33-fedcba987654",
    }


def container(number: int) -> pb.Container:
    return pb.Container(
        id=identifier(number),
        pod_sandbox_id=identifier(number + 700_000),
        metadata=pb.ContainerMetadata(name=f"worker-{number % 3}"),
        image=pb.ImageSpec(image="images.example/worker:2.4"),
        image_ref="sha256:" + identifier(number % 40),
        state=pb.CONTAINER_RUNNING,
        created_at=1_750_000_000_000_000_000 + number,
        labels=labels(number),
        annotations={
            "io.kubernetes.container.hash": "5d41402a",
            "io.kubernetes.container.restartCount": "0",
        },
    )


def container_list(count: int) -> bytes:
    """A ListContainersResponse: 54 kB for 100, 540 kB for 1000."""
    return pb.ListContainersResponse(containers=[container(i) for i in range(count)]).SerializeToString()


def container_status(container_id: str) -> bytes:
    """A ContainerStatusResponse of about 1.1 kB."""
    status = pb.ContainerStatus(
        id=container_id,
        metadata=pb.ContainerMetadata(name="worker-0"),
        state=pb.CONTAINER_RUNNING,
        created_at=1_750_000_000_000_000_000,
        started_at=1_750_000_000_100_000_000,
        image=pb.ImageSpec(image="images.example/worker:2.4"),
        image_ref="sha256:" + identifier(1),
        labels=labels(1),
        log_path="/var/log/pods/shop-front_service/worker-0/0.log",
    )
    status.MergeFromString(_mounts(14, 6))
    return pb.ContainerStatusResponse(status=status).SerializeToString()


def create_request(envs: int, number: int = 1) -> bytes:
    """A CreateContainerRequest of a Burstable pod; 115 environment variables make 5.5 kB."""
    config = pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="worker-0"),
        image=pb.ImageSpec(image="sha256:" + identifier(1)),
        command=["/bin/worker", "--listen=:8443", "--v=2"],
        labels=labels(number),
        annotations={
            "io.kubernetes.container.hash": "5d41402a",
            "io.kubernetes.container.ports": '[{"name":"web","containerPort":8443,"protocol":"TCP"}]',
        },
        log_path="worker-0/0.log",
        linux=pb.LinuxContainerConfig(
            resources=pb.LinuxContainerResources(
                cpu_period=100_000,
                cpu_quota=250_000,
                cpu_shares=1_024,
                memory_limit_in_bytes=2 << 30,
                oom_score_adj=900,
            )
        ),
    )
    config.envs.extend(
        pb.KeyValue(key=f"BACKEND_{i:03d}_HOST", value=f"10.97.{i // 256}.{i % 256}".encode())
        for i in range(envs)
    )
    config.MergeFromString(_mounts(7, 8))
    sandbox = pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(
            name=labels(number)["io.kubernetes.pod.name"],
            uid=labels(number)["io.kubernetes.pod.uid"],
            namespace="shop-front",
        ),
        hostname="service",
        labels=labels(number),
        linux=pb.LinuxPodSandboxConfig(
            cgroup_parent=f"/kubepods/burstable/pod{labels(number)['io.kubernetes.pod.uid']}"
        ),
    )
    request = pb.CreateContainerRequest(
        pod_sandbox_id=identifier(number + 700_000), config=config, sandbox_config=sandbox
    )
    return request.SerializeToString()


def sandbox_list(number: int = 1) -> bytes:
    """A ListPodSandboxResponse with the sandbox that ``create_request`` names."""
    names = labels(number)
    sandbox = pb.PodSandbox(
        id=identifier(number + 700_000),
        metadata=pb.PodSandboxMetadata(
            name=names["io.kubernetes.pod.name"], uid=names["io.kubernetes.pod.uid"], namespace="shop-front"
        ),
        state=pb.SANDBOX_READY,
        created_at=1_750_000_000_000_000_000,
        labels=names,
    )
    return pb.ListPodSandboxResponse(items=[sandbox]).SerializeToString()


def version_answer() -> bytes:
    return pb.VersionResponse(
        version="0.1.0", runtime_name="bench", runtime_version="v1.0.0", runtime_api_version="v1"
    ).SerializeToString()


def status_answer() -> bytes:
    conditions = [pb.RuntimeCondition(type=kind, status=True) for kind in ("RuntimeReady", "NetworkReady")]
    return pb.StatusResponse(status=pb.RuntimeStatus(conditions=conditions)).SerializeToString()


def big_answer(size: int) -> bytes:
    """A ContainerStatusResponse that carries ``size`` bytes of verbose information."""
    return pb.ContainerStatusResponse(info={"x": "x" * size}).SerializeToString()


def _list_request(count: int) -> bytes:
    chosen = pb.ContainerFilter(label_selector={"n": str(count)})
    return pb.ListContainersRequest(filter=chosen).SerializeToString()


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of call.

    Attributes:
        path: As in ``:path``.
        body: The request, unframed.
        expect: Bytes that every answer must contain (empty: not checked).
        least: The least size of an answer in bytes.
    """

    path: bytes
    body: bytes
    expect: bytes = b""
    least: int = 0


def call(name: str, expect: bytes = b"") -> Call:
    """Build the call of that name; KeyError if there is none."""
    build = {
        "Version": lambda: Call(SERVICE + b"Version", b"", b"bench"),
        "ContainerStatus": lambda: Call(
            SERVICE + b"ContainerStatus",
            pb.ContainerStatusRequest(container_id=identifier(7)).SerializeToString(),
            least=1_000,
        ),
        "List100": lambda: Call(SERVICE + b"ListContainers", _list_request(100), least=50_000),
        "List1000": lambda: Call(SERVICE + b"ListContainers", _list_request(1000), least=500_000),
        "Create": lambda: Call(SERVICE + b"CreateContainer", create_request(SMALL_ENVS), b"|115|"),
        "Create205k": lambda: Call(SERVICE + b"CreateContainer", create_request(LARGE_ENVS), b"|6000|"),
        "Create15M": lambda: Call(SERVICE + b"CreateContainer", create_request(HUGE_ENVS), b"|420000|"),
        "Update": lambda: Call(
            SERVICE + b"UpdateContainerResources",
            pb.UpdateContainerResourcesRequest(
                container_id=identifier(7),
                linux=pb.LinuxContainerResources(cpu_period=100_000, cpu_quota=150_000),
            ).SerializeToString(),
        ),
        "Answer15M": lambda: Call(
            SERVICE + b"ContainerStatus",
            pb.ContainerStatusRequest(container_id=f"big:{BIG_ANSWER}").SerializeToString(),
            least=BIG_ANSWER,
        ),
    }[name]()
    return Call(build.path, build.body, expect or build.expect, build.least)


CALLS = (
    "Version",
    "ContainerStatus",
    "List100",
    "List1000",
    "Create",
    "Create205k",
    "Create15M",
    "Update",
    "Answer15M",
)
