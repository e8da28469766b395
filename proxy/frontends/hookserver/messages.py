"""Koordinator's hook messages: values that are decided on, and answers.

An answer is the request again, with what has been decided: a server that leaves something out would have the
peer erase it (Koordinator v1.8.0 pkg/runtimeproxy/resexecutor/cri/utils.go, updateResource: cpusets are
always replaced, an ``oom_score_adj`` of 0 counts).
"""

from __future__ import annotations

from msgspec import Struct, structs

from proxy.allocation.memory.page_sizes import SIZES_LIMIT, huge_pages
from proxy.api.koordinator import hook_pb2 as pb
from proxy.calls.held_call import NO_DEVICES
from proxy.controller.ports import DeviceFacts
from proxy.model.idset import CpuSet, Mask, plausible
from proxy.model.machine import Bounds
from proxy.model.workload import Pod, Request
from proxy.pools.facts import pod_facts


class ContainerReply(Struct, frozen=True):
    """The answer about a container so far; its messages are never changed.

    Attributes:
        message: The answer.
        asked: What the client asks for in resources, changed by hooks.
        lost: Fields that hooks want to change and that the answer has no place for.
    """

    message: pb.ContainerResourceHookResponse
    asked: pb.LinuxContainerResources
    lost: tuple[str, ...] = ()


def pod_echo(asked: pb.PodSandboxHookRequest) -> pb.PodSandboxHookResponse:
    """Answer that nothing is to be changed."""
    answer = pb.PodSandboxHookResponse(cgroup_parent=asked.cgroup_parent)
    answer.labels.update(asked.labels)
    answer.annotations.update(asked.annotations)
    if asked.HasField("resources"):
        answer.resources.CopyFrom(asked.resources)
    return answer


def container_echo(asked: pb.ContainerResourceHookRequest) -> pb.ContainerResourceHookResponse:
    """Answer that nothing is to be changed."""
    answer = pb.ContainerResourceHookResponse(pod_cgroup_parent=asked.pod_cgroup_parent)
    answer.container_annotations.update(asked.container_annotations)
    answer.container_envs.update(asked.container_envs)
    if asked.HasField("container_resources"):
        answer.container_resources.CopyFrom(asked.container_resources)
    return answer


def container_reply(asked: pb.ContainerResourceHookRequest) -> ContainerReply:
    """Begin an answer about a create."""
    return ContainerReply(container_echo(asked), asked.container_resources)


def update_reply(asked: pb.ContainerResourceHookRequest, *, quota: bool) -> ContainerReply:
    """Begin an answer about an update.

    The peer sends everything that was ever set, so the sets in it are as likely ours as the client's
    (updateResourceByUpdateContainerResourceRequest in the same file). They are left out of what is asked for:
    nothing depends on them, and they must not count as the client's request.

    Args:
        asked: The request.
        quota: Whether a quota of -1 is the client's own; else it is an answer of ours, and left out too.
    """
    resources = pb.LinuxContainerResources()
    resources.CopyFrom(asked.container_resources)
    resources.cpuset_cpus = resources.cpuset_mems = ""
    if resources.cpu_quota < 0 and not quota:
        resources.cpu_quota = 0
    return ContainerReply(container_echo(asked), resources)


def placed(reply: ContainerReply, cpus: CpuSet | None, mems: Mask | None, quota: int) -> ContainerReply:
    """Return an answer with a decision; as ``HeldCall.place``."""
    answer = pb.ContainerResourceHookResponse()
    answer.CopyFrom(reply.message)
    resources = answer.container_resources
    values: list[tuple[str, str | int]] = [("cpuset_cpus", str(cpus) if cpus else "")]
    if mems:
        values.append(("cpuset_mems", str(mems)))
    if quota:
        values.append(("cpu_quota", quota))
    for name, value in values:
        if getattr(resources, name) != value:
            setattr(resources, name, value)
    return structs.replace(reply, message=answer)


def with_parent(reply: ContainerReply, parent: str) -> ContainerReply:
    """Return an answer that names another cgroup of the pod."""
    answer = pb.ContainerResourceHookResponse()
    answer.CopyFrom(reply.message)
    answer.pod_cgroup_parent = parent
    return structs.replace(reply, message=answer)


# -- values -------------------------------------------------------------------------------------------------


def sandbox_pod(asked: pb.PodSandboxHookRequest, answer: pb.PodSandboxHookResponse, bounds: Bounds) -> Pod:
    """Read the pod of a sandbox that is to be created.

    Args:
        asked: The request.
        answer: The answer so far, with what hooks have set.
        bounds: CPUs and NUMA nodes that annotations may name.
    """
    meta = asked.pod_meta
    pod = pod_facts(
        "",
        meta.uid,
        meta.namespace,
        meta.name,
        meta.attempt,
        answer.labels,
        answer.annotations,
        answer.cgroup_parent,
        bounds,
    )
    return _with_total(pod, asked.resources) if asked.HasField("resources") else pod


def request_of(resources: pb.LinuxContainerResources) -> Request:
    """Read what is asked for."""
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


class KoordinatorCreateRequest:
    """A create; see ``proxy.calls.held_call.CreateRequest``."""

    def __init__(
        self,
        asked: pb.ContainerResourceHookRequest,
        resources: pb.LinuxContainerResources,
        sandbox_id: str,
        sandbox_attempt: int,
    ) -> None:
        """Read a create.

        Args:
            asked: The request; it names the pod by its uid, and never its attempt.
            resources: What it asks for, changed by hooks.
            sandbox_id: The pod's sandbox.
            sandbox_attempt: The sandbox's attempt.
        """
        self.sandbox_id = sandbox_id
        self.name = asked.container_meta.name
        self.attempt = asked.container_meta.attempt
        self.resources = request_of(resources)
        self._asked = asked
        self._sandbox_attempt = sandbox_attempt

    def pod(self, bounds: Bounds) -> Pod:
        """Read the pod."""
        asked, meta = self._asked, self._asked.pod_meta
        pod = pod_facts(
            self.sandbox_id,
            meta.uid,
            meta.namespace,
            meta.name,
            self._sandbox_attempt,
            asked.pod_labels,
            asked.pod_annotations,
            asked.pod_cgroup_parent,
            bounds,
        )
        return _with_total(pod, asked.pod_resources) if asked.HasField("pod_resources") else pod

    def pod_total(self) -> Request | None:
        """Read what the containers of the pod ask for together."""
        return _total(self._asked.pod_resources) if self._asked.HasField("pod_resources") else None

    def devices(self) -> DeviceFacts:
        """Return no devices: the protocol does not carry them."""
        return NO_DEVICES


def _total(resources: pb.LinuxContainerResources) -> Request:
    return Request(resources.cpu_shares, resources.cpu_quota, resources.cpu_period)


def _with_total(pod: Pod, resources: pb.LinuxContainerResources) -> Pod:
    return pod if pod.cpuset is None else structs.replace(pod, total=_total(resources))
