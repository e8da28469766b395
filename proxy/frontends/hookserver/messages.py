"""Conversion between Koordinator's hook messages and the CRI's.

A hook request becomes the CRI request that it was made from, as far as it carries that. An answer is the
request again, with what was changed in the CRI request since: a server that leaves something out would have
the peer erase it (Koordinator v1.8.0 pkg/runtimeproxy/resexecutor/cri/utils.go, updateResource: cpusets are
always replaced, an ``oom_score_adj`` of 0 counts). Resources have the same fields and numbers in both
protocols, so fields that we do not know stay.

What the protocol has no field for, such as mounts, stays behind, and is named. A key of a map cannot be taken
away either, since the peer adds the maps that it gets to those that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Final

from proxy.api.cri import api_pb2 as cri
from proxy.api.koordinator import hook_pb2 as pb

NUMBERS: Final = (
    "cpu_period",
    "cpu_quota",
    "cpu_shares",
    "memory_limit_in_bytes",
    "oom_score_adj",
    "cpuset_cpus",
    "cpuset_mems",
    "memory_swap_limit_in_bytes",
)
"""Fields of resources that are one value."""


def run_request(asked: pb.PodSandboxHookRequest) -> cri.RunPodSandboxRequest:
    """Make a RunPodSandbox of what is asked before one."""
    request = cri.RunPodSandboxRequest(runtime_handler=asked.runtime_handler)
    config = request.config
    _pod(config, asked.pod_meta, asked.labels, asked.annotations, asked.cgroup_parent)
    for name in ("overhead", "resources"):
        if asked.HasField(name):
            getattr(config.linux, name).ParseFromString(getattr(asked, name).SerializeToString())
    return request


def create_request(
    asked: pb.ContainerResourceHookRequest, sandbox_id: str, attempt: int
) -> cri.CreateContainerRequest:
    """Make a CreateContainer of what is asked before one.

    Args:
        asked: What is asked; it names the pod by its uid, and never its attempt.
        sandbox_id: The pod's sandbox.
        attempt: The sandbox's attempt.
    """
    request = cri.CreateContainerRequest(pod_sandbox_id=sandbox_id)
    config, pod = request.config, request.sandbox_config
    config.metadata.name = asked.container_meta.name
    config.metadata.attempt = asked.container_meta.attempt
    config.annotations.update(asked.container_annotations)
    for key, value in asked.container_envs.items():
        config.envs.add(key=key, value=value.encode())
    config.linux.resources.ParseFromString(asked.container_resources.SerializeToString())
    _pod(pod, asked.pod_meta, asked.pod_labels, asked.pod_annotations, asked.pod_cgroup_parent)
    pod.metadata.attempt = attempt
    if asked.HasField("pod_resources"):
        pod.linux.resources.ParseFromString(asked.pod_resources.SerializeToString())
    return request


def update_request(
    asked: pb.ContainerResourceHookRequest, *, quota: bool
) -> cri.UpdateContainerResourcesRequest:
    """Make an UpdateContainerResources of what is asked before one.

    The peer sends everything that was ever set, so the sets in it are as likely ours as the client's
    (updateResourceByUpdateContainerResourceRequest in the same file). They are left out: nothing depends on
    them, and they must not count as the client's request.

    Args:
        asked: What is asked.
        quota: Whether a quota of -1 is the client's own; else it is an answer of ours, and left out too.
    """
    request = cri.UpdateContainerResourcesRequest(container_id=asked.container_meta.id)
    request.annotations.update(asked.container_annotations)
    request.linux.ParseFromString(asked.container_resources.SerializeToString())
    request.linux.cpuset_cpus = request.linux.cpuset_mems = ""
    if request.linux.cpu_quota < 0 and not quota:
        request.linux.cpu_quota = 0
    return request


def _pod(
    config: cri.PodSandboxConfig,
    meta: pb.PodSandboxMetadata,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    cgroup_parent: str,
) -> None:
    config.metadata.ParseFromString(meta.SerializeToString())  # the same fields in both protocols
    config.labels.update(labels)
    config.annotations.update(annotations)
    config.linux.cgroup_parent = cgroup_parent


def pod_echo(asked: pb.PodSandboxHookRequest) -> pb.PodSandboxHookResponse:
    """Answer that nothing is to be otherwise."""
    answer = pb.PodSandboxHookResponse(cgroup_parent=asked.cgroup_parent)
    answer.labels.update(asked.labels)
    answer.annotations.update(asked.annotations)
    if asked.HasField("resources"):
        answer.resources.CopyFrom(asked.resources)
    return answer


def container_echo(asked: pb.ContainerResourceHookRequest) -> pb.ContainerResourceHookResponse:
    """Answer that nothing is to be otherwise."""
    answer = pb.ContainerResourceHookResponse(pod_cgroup_parent=asked.pod_cgroup_parent)
    answer.container_annotations.update(asked.container_annotations)
    answer.container_envs.update(asked.container_envs)
    if asked.HasField("container_resources"):
        answer.container_resources.CopyFrom(asked.container_resources)
    return answer


def run_answer(asked: pb.PodSandboxHookRequest, sent: bytes, body: bytes) -> pb.PodSandboxHookResponse:
    """Answer with what was changed in a RunPodSandbox, from ``sent`` to ``body``."""
    old, new = (cri.RunPodSandboxRequest.FromString(each).config for each in (sent, body))
    answer = pod_echo(asked)
    _changes(answer.labels, old.labels, new.labels)
    _changes(answer.annotations, old.annotations, new.annotations)
    if new.linux.cgroup_parent != old.linux.cgroup_parent:
        answer.cgroup_parent = new.linux.cgroup_parent
    return answer


def create_answer(
    asked: pb.ContainerResourceHookRequest, sent: bytes, body: bytes
) -> tuple[pb.ContainerResourceHookResponse, list[str]]:
    """Answer with what was changed in a CreateContainer, from ``sent`` to ``body``.

    Returns:
        The answer, and the names of changed fields that it has no place for.
    """
    before, after = (cri.CreateContainerRequest.FromString(each) for each in (sent, body))
    old, new = before.config, after.config
    answer = container_echo(asked)
    if (parent := after.sandbox_config.linux.cgroup_parent) != before.sandbox_config.linux.cgroup_parent:
        answer.pod_cgroup_parent = parent
    _changes(answer.container_annotations, old.annotations, new.annotations)
    lost = [name for name in ("mounts", "devices", "labels", "CDI_devices") if getattr(new, name)]
    envs = {entry.key: entry.value for entry in old.envs}
    for entry in new.envs:
        if envs.get(entry.key) != entry.value:
            try:
                answer.container_envs[entry.key] = entry.value.decode()
            except UnicodeDecodeError:
                lost.append(f"envs[{entry.key}]")
    _resources(answer, old.linux.resources, new.linux.resources)
    return answer, lost


def update_answer(
    asked: pb.ContainerResourceHookRequest, sent: bytes, body: bytes
) -> pb.ContainerResourceHookResponse:
    """Answer with what was changed in an UpdateContainerResources, from ``sent`` to ``body``."""
    old, new = (cri.UpdateContainerResourcesRequest.FromString(each) for each in (sent, body))
    answer = container_echo(asked)
    if body != sent:  # it was decided, and no set may mean to erase the one in the request
        answer.container_resources.cpuset_cpus = new.linux.cpuset_cpus
    _changes(answer.container_annotations, old.annotations, new.annotations)
    _resources(answer, old.linux, new.linux)
    return answer


def _resources(
    answer: pb.ContainerResourceHookResponse,
    old: cri.LinuxContainerResources,
    new: cri.LinuxContainerResources,
) -> None:
    for name in NUMBERS:
        if getattr(new, name) != getattr(old, name):
            setattr(answer.container_resources, name, getattr(new, name))
    if new.unified != old.unified:
        _changes(answer.container_resources.unified, old.unified, new.unified)


def _changes(into: MutableMapping[str, str], old: Mapping[str, str], new: Mapping[str, str]) -> None:
    for key, value in new.items():
        if old.get(key) != value:
            into[key] = value
