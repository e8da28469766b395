"""Converts records to CRI (container runtime interface) messages."""

from __future__ import annotations

from proxy.api.cri import api_pb2 as pb
from proxy.demo.runtime_records import ContainerRecord, PodRecord, oci


def pod_state(pod: PodRecord) -> pb.PodSandboxState:
    """READY until it is stopped."""
    return pb.SANDBOX_READY if pod.ready else pb.SANDBOX_NOTREADY


def pod_status(pod: PodRecord) -> pb.PodSandboxStatus:
    """For PodSandboxStatus and for events."""
    return pb.PodSandboxStatus(
        id=pod.id, metadata=pod.config.metadata, state=pod_state(pod), created_at=pod.created_at,
        labels=pod.config.labels, annotations=pod.config.annotations,
    )  # fmt: skip


def container_status(one: ContainerRecord) -> pb.ContainerStatus:
    """For ContainerStatus and for events."""
    return pb.ContainerStatus(
        id=one.id, metadata=one.config.metadata, state=one.state, created_at=one.created_at,
        started_at=one.started_at, finished_at=one.finished_at, exit_code=one.exit_code, reason=one.reason,
        image=one.config.image, image_ref=one.config.image.image, labels=one.config.labels,
        annotations=one.config.annotations, log_path=one.config.log_path,
        resources=pb.ContainerResources(linux=one.resources),
    )  # fmt: skip


def verbose(one: ContainerRecord) -> dict[str, object]:
    """The ``info`` of a container in containerd, as far as it is used."""
    linux = {"cgroupsPath": one.cgroups_path, "resources": oci(one.resources)}
    return {
        "sandboxID": one.pod_id,
        "pid": one.pid,
        "removing": False,
        "runtimeType": "io.containerd.runc.v2",
        "runtimeSpec": {"ociVersion": "1.0.2", "linux": linux},
    }


def pod_item(pod: PodRecord) -> pb.PodSandbox:
    """For ListPodSandbox."""
    return pb.PodSandbox(
        id=pod.id, metadata=pod.config.metadata, state=pod_state(pod), created_at=pod.created_at,
        labels=pod.config.labels, annotations=pod.config.annotations,
    )  # fmt: skip


def pod_matches(pod: PodRecord, wanted: pb.PodSandboxFilter) -> bool:
    """Return whether a filter lets a pod through; ids may be given by their beginning."""
    return (
        pod.id.startswith(wanted.id)
        and (not wanted.HasField("state") or wanted.state.state == pod_state(pod))
        and dict(wanted.label_selector).items() <= dict(pod.config.labels).items()
    )


def container_item(one: ContainerRecord) -> pb.Container:
    """For ListContainers."""
    return pb.Container(
        id=one.id, pod_sandbox_id=one.pod_id, metadata=one.config.metadata, image=one.config.image,
        image_ref=one.config.image.image, state=one.state, created_at=one.created_at,
        labels=one.config.labels, annotations=one.config.annotations,
    )  # fmt: skip


def container_matches(one: ContainerRecord, wanted: pb.ContainerFilter) -> bool:
    """Return whether a filter lets a container through; ids may be given by their beginning."""
    return (
        one.id.startswith(wanted.id)
        and one.pod_id.startswith(wanted.pod_sandbox_id)
        and (not wanted.HasField("state") or wanted.state.state == one.state)
        and dict(wanted.label_selector).items() <= dict(one.config.labels).items()
    )
