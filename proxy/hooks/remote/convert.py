"""Requests to a hook server: the engine's facts as messages of Koordinator's protocol.

Servers answer with everything that they received, with some changes, so they receive what will be in effect,
not what the client requests: the CPUs and nodes that the engine has chosen, the quota that the engine lifts,
and the fields that previous hooks have set. For an update they receive the sum of all earlier requests with
the update applied.

The protocol's maps hold only text. Other values (an environment variable may be any bytes) are not sent, and
stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, TypeAlias

from proxy.api.koordinator import hook_pb2 as pb
from proxy.hooks.answers import CLEAR, LEAVE, NOTHING, Adjustment
from proxy.hooks.events import (
    PostStartContainer,
    PostStopContainer,
    PostStopPodSandbox,
    PreCreateContainer,
    PreRunPodSandbox,
    PreStartContainer,
    PreUpdateContainerResources,
)
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts, Resources
from proxy.hooks.remote.merge import merge_update

SandboxEvent: TypeAlias = PreRunPodSandbox | PostStopPodSandbox
ContainerEvent: TypeAlias = (
    PreCreateContainer
    | PreStartContainer
    | PostStartContainer
    | PostStopContainer
    | PreUpdateContainerResources
)

PROTOCOL_NUMBERS = {
    "cpu_period": "cpu_period",
    "cpu_quota": "cpu_quota",
    "cpu_shares": "cpu_shares",
    "memory_limit": "memory_limit_in_bytes",
    "memory_swap_limit": "memory_swap_limit_in_bytes",
    "oom_score_adj": "oom_score_adj",
}
"""Numeric fields of resources: our name to the protocol's."""


def sandbox_request(event: SandboxEvent, so_far: Adjustment = NOTHING) -> pb.PodSandboxHookRequest:
    """Make the request for a sandbox.

    Args:
        event: The event.
        so_far: The fields that previous hooks have set.
    """
    pod = event.pod
    request = pb.PodSandboxHookRequest(runtime_handler=pod.runtime_handler)
    _identify(request.pod_meta, pod)
    put_texts(request.labels, pod.labels, so_far.labels)
    put_texts(request.annotations, pod.annotations, so_far.annotations)
    parent = so_far.cgroup_parent
    request.cgroup_parent = pod.cgroup_parent if parent is LEAVE else "" if parent is CLEAR else parent
    if isinstance(event, PreRunPodSandbox) and event.resources != Resources():
        request.resources.CopyFrom(resources_message(event.resources))
    return request


def container_request(event: ContainerEvent, so_far: Adjustment = NOTHING) -> pb.ContainerResourceHookRequest:
    """Make the request for a container.

    Args:
        event: The event.
        so_far: The fields that previous hooks have set.
    """
    pod, container = event.pod, event.container
    request = pb.ContainerResourceHookRequest(pod_cgroup_parent=pod.cgroup_parent)
    _identify(request.pod_meta, pod)
    _name(request.container_meta, container)
    put_texts(request.pod_labels, pod.labels)
    put_texts(request.pod_annotations, pod.annotations)
    put_texts(request.container_annotations, container.annotations)
    resources = resources_message(container.resources)
    if isinstance(event, PreUpdateContainerResources):
        put_texts(request.container_annotations, event.asked_annotations)
        merged = merge_update(resources, resources_message(event.asked))
        assert merged is not None
        resources = merged
    put_texts(request.container_annotations, {}, so_far.annotations)
    put_texts(request.container_envs, container.envs, so_far.envs)
    _decided(resources, event.decision)
    _adjusted(resources, so_far)
    request.container_resources.CopyFrom(resources)
    return request


def resources_message(resources: Resources) -> pb.LinuxContainerResources:
    """Return resources as the message of the protocol."""
    message = pb.LinuxContainerResources(cpuset_cpus=resources.cpuset_cpus, cpuset_mems=resources.cpuset_mems)
    for field, name in PROTOCOL_NUMBERS.items():
        setattr(message, name, getattr(resources, field))
    for size, limit in resources.hugepage_limits.items():
        message.hugepage_limits.add(page_size=size, limit=limit)
    put_texts(message.unified, resources.unified)
    return message


def put_texts(
    into: MutableMapping[str, str], values: Mapping[str, str], changes: Mapping[str, Any] | None = None
) -> None:
    """Put texts, changed as hooks have set, into a message's map; leave out values that are not text."""
    try:
        into.update(values)
    except UnicodeEncodeError:
        into.update({key: value for key, value in values.items() if _is_text(key) and _is_text(value)})
    for key, value in (changes or {}).items():
        if value is CLEAR:
            into.pop(key, None)
        elif _is_text(key) and _is_text(value):
            into[key] = value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _identify(meta: pb.PodSandboxMetadata, pod: PodFacts) -> None:
    meta.name, meta.uid, meta.namespace, meta.attempt = pod.name, pod.uid, pod.namespace, pod.attempt


def _name(meta: pb.ContainerMetadata, container: ContainerFacts) -> None:
    meta.name, meta.attempt, meta.id = container.name, container.attempt, container.id


def _decided(resources: pb.LinuxContainerResources, decision: Decision) -> None:
    """Insert the engine's decision; a field that the engine does not set keeps the client's value."""
    if decision.cpus:
        resources.cpuset_cpus = str(decision.cpus)
    if decision.mems is not None:
        resources.cpuset_mems = str(decision.mems)
    if decision.unlimited:
        resources.cpu_quota = -1


def _adjusted(resources: pb.LinuxContainerResources, so_far: Adjustment) -> None:
    """Apply the fields that previous hooks have set; a cleared field is treated as never set."""
    for field, name in PROTOCOL_NUMBERS.items():
        if (value := getattr(so_far, field)) is not LEAVE:
            setattr(resources, name, 0 if value is CLEAR else value)
    if so_far.cpus is not LEAVE:
        resources.cpuset_cpus = "" if so_far.cpus is CLEAR else str(so_far.cpus)
    if so_far.mems is not LEAVE:
        resources.cpuset_mems = "" if so_far.mems is CLEAR else str(so_far.mems)
    put_texts(resources.unified, {}, so_far.unified)
