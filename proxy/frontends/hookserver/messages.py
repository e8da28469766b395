"""Koordinator's hook messages: answers, and the values that are read from them.

An answer repeats the request, with the decision: if a server left a field out, the peer would erase it
(Koordinator v1.8.0 pkg/runtimeproxy/resexecutor/cri/utils.go, updateResource: cpusets are always replaced, an
``oom_score_adj`` of 0 counts). Changes for which the protocol has no field, such as mounts, are not passed
on, and are reported. A key of a map cannot be removed either, because the peer adds the maps that it gets to
its own.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, TypeVar

from google.protobuf.message import Message
from msgspec import Struct, structs

from proxy.allocation.memory.request import SIZES_LIMIT, huge_pages
from proxy.api.koordinator import hook_pb2 as pb
from proxy.frontends.hook_bridge.facts import hook_pod_facts
from proxy.frontends.hook_bridge.object_cache import CONTAINER_BYTES, PackedTexts, RememberedContainer
from proxy.frontends.hook_bridge.resources import NO_RESOURCES, merged, resources_of
from proxy.hooks.answers import CLEAR, LEAVE, Adjustment
from proxy.hooks.facts import ContainerFacts, PodFacts, Resources
from proxy.hooks.remote.convert import PROTOCOL_NUMBERS, put_texts
from proxy.model.idset import CpuSet, Mask, plausible
from proxy.model.machine import Bounds
from proxy.model.workload import Pod, Request
from proxy.pools.facts import pod_facts

_M = TypeVar("_M", bound=Message)


class SandboxReply(Struct, frozen=True):
    """The answer about a sandbox so far; its messages are never changed.

    It is also what hooks see (``proxy.frontends.hook_bridge.view.HookView``).

    Attributes:
        request: The request.
        answer: The answer.
        unsupported: Fields that hooks want to change and that the answer cannot change.
    """

    request: pb.PodSandboxHookRequest
    answer: pb.PodSandboxHookResponse
    unsupported: tuple[str, ...] = ()

    def read(self, bounds: Bounds) -> Pod:
        """Read the pod, with the fields that hooks have set; ``bounds`` as for ``UndecidedCall.sandbox``."""
        requested, answer = self.request, self.answer
        total = requested.resources if requested.HasField("resources") else None
        pod = (
            requested.pod_meta,
            requested.pod_meta.attempt,
            answer.labels,
            answer.annotations,
            answer.cgroup_parent,
        )
        return _pod("", *pod, bounds, total)

    def sandbox(self, pod: Pod) -> tuple[PodFacts, Resources]:
        """Read the pod, and the sum of its containers' requests."""
        labels, annotations = dict(self.answer.labels), dict(self.answer.annotations)
        facts = hook_pod_facts(pod, labels, annotations, self.request.runtime_handler)
        return facts, resources_of(self.request.resources)

    def adjusted(self, adjustment: Adjustment) -> SandboxReply:
        """Return the answer with the changes of hooks."""
        if not adjustment:
            return self
        answer, parent = _copy(self.answer), adjustment.cgroup_parent
        _set(answer.labels, adjustment.labels)
        _set(answer.annotations, adjustment.annotations)
        if parent is not LEAVE:
            answer.cgroup_parent = "" if parent is CLEAR else parent
        unsupported = _unsupported_keys("labels", adjustment.labels, answer.labels)
        unsupported += _unsupported_keys("annotations", adjustment.annotations, answer.annotations)
        return SandboxReply(self.request, answer, (*self.unsupported, *unsupported))


class ContainerReply(Struct, frozen=True):
    """The answer about a container so far; its messages are never changed.

    It is also what hooks see (``proxy.frontends.hook_bridge.view.HookView``).

    Attributes:
        request: The request.
        answer: The answer.
        resources: The client's request, changed by hooks.
        unsupported: Fields that hooks want to change and that the answer cannot change.
    """

    request: pb.ContainerResourceHookRequest
    answer: pb.ContainerResourceHookResponse
    resources: pb.LinuxContainerResources
    unsupported: tuple[str, ...] = ()

    # -- the view of hooks --------------------------------------------------------------------------------

    def pod(self, pod: Pod) -> PodFacts:
        """Read the pod."""
        return hook_pod_facts(pod, dict(self.request.pod_labels), dict(self.request.pod_annotations))

    def container(self) -> ContainerFacts:
        """Read the container."""
        answer, meta = self.answer, self.request.container_meta
        return ContainerFacts(
            name=meta.name,
            attempt=meta.attempt,
            annotations=dict(answer.container_annotations),
            envs=dict(answer.container_envs),
            resources=resources_of(self.resources),
        )

    def update(self) -> tuple[Resources, Mapping[str, str]]:
        """Read the requested resources, and the annotations."""
        return resources_of(self.resources), dict(self.answer.container_annotations)

    def remembered(self) -> RememberedContainer:
        """Return the data to keep of a create."""
        seen = self.container()
        texts = PackedTexts.of(CONTAINER_BYTES, seen.labels, seen.annotations, seen.envs)
        return RememberedContainer(
            seen.image, texts, merged(NO_RESOURCES, seen.resources), includes_create=True
        )

    def adjusted(self, adjustment: Adjustment) -> ContainerReply:
        """Return the answer with those changes of hooks for which it has fields."""
        if not adjustment:
            return self
        answer, requested = _copy(self.answer), _copy(self.resources)
        _set(answer.container_annotations, adjustment.annotations)
        _set(answer.container_envs, adjustment.envs)
        for resources in (requested, answer.container_resources):
            _adjust(resources, adjustment)
        unsupported = [name for name in ("mounts", "devices", "labels") if getattr(adjustment, name)]
        unsupported += _unsupported_keys("envs", adjustment.envs, answer.container_envs)
        unsupported += _unsupported_keys("annotations", adjustment.annotations, answer.container_annotations)
        unsupported += _unsupported_keys("unified", adjustment.unified, answer.container_resources.unified)
        return ContainerReply(self.request, answer, requested, (*self.unsupported, *unsupported))

    # -- decisions ----------------------------------------------------------------------------------------

    def placed(self, cpus: CpuSet | None, mems: Mask | None, quota: int) -> ContainerReply:
        """Return the answer with a decision; as ``UndecidedCall.place``."""
        answer = _copy(self.answer)
        resources = answer.container_resources
        if resources.cpuset_cpus != (text := str(cpus) if cpus else ""):
            resources.cpuset_cpus = text
        if mems:
            resources.cpuset_mems = str(mems)
        if quota:
            resources.cpu_quota = quota
        return structs.replace(self, answer=answer)

    def with_parent(self, parent: str) -> ContainerReply:
        """Return the answer with another cgroup of the pod."""
        answer = _copy(self.answer)
        answer.pod_cgroup_parent = parent
        return structs.replace(self, answer=answer)


def pod_echo(request: pb.PodSandboxHookRequest) -> pb.PodSandboxHookResponse:
    """Return the answer that changes nothing."""
    answer = pb.PodSandboxHookResponse(cgroup_parent=request.cgroup_parent)
    answer.labels.update(request.labels)
    answer.annotations.update(request.annotations)
    if request.HasField("resources"):
        answer.resources.CopyFrom(request.resources)
    return answer


def container_echo(request: pb.ContainerResourceHookRequest) -> pb.ContainerResourceHookResponse:
    """Return the answer that changes nothing."""
    answer = pb.ContainerResourceHookResponse(pod_cgroup_parent=request.pod_cgroup_parent)
    answer.container_annotations.update(request.container_annotations)
    answer.container_envs.update(request.container_envs)
    if request.HasField("container_resources"):
        answer.container_resources.CopyFrom(request.container_resources)
    return answer


def container_reply(request: pb.ContainerResourceHookRequest) -> ContainerReply:
    """Begin an answer about a create or a start."""
    return ContainerReply(request, container_echo(request), request.container_resources)


def update_reply(request: pb.ContainerResourceHookRequest, *, is_client_quota: bool) -> ContainerReply:
    """Begin an answer about an update.

    The peer sends every value that was ever set, so the cpusets in the request may be ours or the client's
    (updateResourceByUpdateContainerResourceRequest in the same file). They are left out of the requested
    resources: nothing depends on them, and they must not count as the client's request.

    Args:
        request: The request.
        is_client_quota: Whether a quota of -1 is the client's own; otherwise it is topoproxy's answer, and
            left out too.
    """
    resources = _copy(request.container_resources)
    resources.cpuset_cpus = resources.cpuset_mems = ""
    if resources.cpu_quota < 0 and not is_client_quota:
        resources.cpu_quota = 0
    return ContainerReply(request, container_echo(request), resources)


# -- values -------------------------------------------------------------------------------------------------


def pod_of(request: pb.ContainerResourceHookRequest, sandbox_id: str, attempt: int, bounds: Bounds) -> Pod:
    """Read the pod of a container; the request contains its uid, but never its sandbox."""
    total = request.pod_resources if request.HasField("pod_resources") else None
    pod = request.pod_meta, attempt, request.pod_labels, request.pod_annotations, request.pod_cgroup_parent
    return _pod(sandbox_id, *pod, bounds, total)


def _pod(
    sandbox_id: str,
    meta: pb.PodSandboxMetadata,
    attempt: int,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    parent: str,
    bounds: Bounds,
    total: pb.LinuxContainerResources | None,
) -> Pod:
    name = meta.uid, meta.namespace, meta.name
    pod = pod_facts(sandbox_id, *name, attempt, labels, annotations, parent, bounds)
    return pod if pod.cpuset is None or total is None else structs.replace(pod, total=total_of(total))


def total_of(resources: pb.LinuxContainerResources) -> Request:
    """Read the sum of the requests of a pod's containers."""
    return Request(resources.cpu_shares, resources.cpu_quota, resources.cpu_period)


def request_of(resources: pb.LinuxContainerResources) -> Request:
    """Read the requested resources."""
    pages = resources.hugepage_limits[:SIZES_LIMIT]
    return Request(
        resources.cpu_shares,
        resources.cpu_quota,
        resources.cpu_period,
        resources.memory_limit_in_bytes,
        plausible(resources.cpuset_cpus),
        plausible(resources.cpuset_mems),
        huge_pages((entry.page_size, entry.limit) for entry in pages),
    )


def _copy(message: _M) -> _M:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _values(wanted: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in wanted.items() if value is not CLEAR}


def _set(into: MutableMapping[str, str], wanted: Mapping[str, Any]) -> None:
    put_texts(into, {}, _values(wanted))


def _unsupported_keys(name: str, wanted: Mapping[str, Any], answered: Mapping[str, str]) -> list[str]:
    """Return the keys of a map whose values in the answer differ from those that hooks set."""
    values = dict(answered) if wanted else {}
    return [f"{name}[{key}]" for key, value in wanted.items() if values.get(key, CLEAR) != value]


def _adjust(resources: pb.LinuxContainerResources, adjustment: Adjustment) -> None:
    """Set the fields of hooks; for CPUs and memory nodes, only clear those of the client."""
    for field, name in PROTOCOL_NUMBERS.items():
        if (value := getattr(adjustment, field)) is not LEAVE:
            setattr(resources, name, 0 if value is CLEAR else value)
    if adjustment.cpus is CLEAR:
        resources.cpuset_cpus = ""
    if adjustment.mems is CLEAR:
        resources.cpuset_mems = ""
    _set(resources.unified, adjustment.unified)
