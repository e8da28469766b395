"""The merge rules of Koordinator's runtime proxy: an answer into its request, an update into earlier ones.

Pure functions on messages that return new ones; the rules are those of Koordinator v1.8.0
pkg/runtimeproxy/resexecutor/cri (updateResource in utils.go, UpdateRequest in pod.go and container.go). The
protocol has no field presence, so each field has its own rule for "not set". Some of these rules do harm;
``handlers``, which has the request, decides which part of an answer becomes an adjustment.

| field | an answer | an update of kubelet's |
|---|---|---|
| cpu_period, cpu_shares, both memory limits | counts if above 0 | counts if above 0 |
| cpu_quota | counts if not 0 (-1: no limit) | counts if not 0 |
| oom_score_adj | counts if -1000 to 1000, thus also a 0 that was never set | never |
| cpuset_cpus, cpuset_mems | always count, empty ones too | count if not empty |
| unified, annotations, labels | entries are added or replaced, none is removed | the same |
| hugepage_limits | never | never |
| cgroup parent | counts if not empty | |
| environment | replaces the whole environment, if not empty | |
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

from proxy.api.koordinator import hook_pb2 as pb
from proxy.model.errors import HookError

Request: TypeAlias = pb.PodSandboxHookRequest | pb.ContainerResourceHookRequest
Response: TypeAlias = pb.PodSandboxHookResponse | pb.ContainerResourceHookResponse
Resources: TypeAlias = pb.LinuxContainerResources

_POSITIVE = ("cpu_period", "cpu_shares", "memory_limit_in_bytes", "memory_swap_limit_in_bytes")
_OOM = range(-1000, 1001)

_M = TypeVar("_M", pb.PodSandboxHookRequest, pb.ContainerResourceHookRequest, Resources)


def merge_answer(sent: Request, answer: Response) -> Request:
    """Return a request with the answer of a server merged into it.

    Args:
        sent: The request that the server received.
        answer: The server's answer.

    Raises:
        HookError: The answer is not of the type that answers the request.
    """
    match sent, answer:
        case pb.PodSandboxHookRequest(), pb.PodSandboxHookResponse():
            return _sandbox(sent, answer)
        case pb.ContainerResourceHookRequest(), pb.ContainerResourceHookResponse():
            return _container(sent, answer)
        case _:
            kinds = type(answer).__name__, type(sent).__name__
            raise HookError(
                "cannot use the answer of a hook server: a {} does not answer a {}".format(*kinds)
            )


def merge_resources(had: Resources | None, answer: Resources | None) -> Resources | None:
    """Merge the resources of an answer; if the request or the answer has none, return the request's."""
    if had is None or answer is None:
        return had
    after = _positive(had, answer)
    if answer.oom_score_adj in _OOM:
        after.oom_score_adj = answer.oom_score_adj
    after.cpuset_cpus, after.cpuset_mems = answer.cpuset_cpus, answer.cpuset_mems
    return after


def merge_update(had: Resources | None, requested: Resources | None) -> Resources | None:
    """Merge an update's resources into the earlier ones; if one of the two is None, return the earlier."""
    if had is None or requested is None:
        return had
    after = _positive(had, requested)
    after.cpuset_cpus = requested.cpuset_cpus or had.cpuset_cpus
    after.cpuset_mems = requested.cpuset_mems or had.cpuset_mems
    return after


def _sandbox(sent: pb.PodSandboxHookRequest, answer: pb.PodSandboxHookResponse) -> pb.PodSandboxHookRequest:
    after = _copy(sent)
    after.labels.update(answer.labels)
    after.annotations.update(answer.annotations)
    after.cgroup_parent = answer.cgroup_parent or sent.cgroup_parent
    return after


def _container(
    sent: pb.ContainerResourceHookRequest, answer: pb.ContainerResourceHookResponse
) -> pb.ContainerResourceHookRequest:
    after = _copy(sent)
    after.container_annotations.update(answer.container_annotations)
    after.pod_cgroup_parent = answer.pod_cgroup_parent or sent.pod_cgroup_parent
    if answer.container_envs:
        after.container_envs.clear()
        after.container_envs.update(answer.container_envs)
    if sent.HasField("container_resources") and answer.HasField("container_resources"):
        merged = merge_resources(sent.container_resources, answer.container_resources)
        assert merged is not None
        after.container_resources.CopyFrom(merged)
    return after


def _positive(had: Resources, answer: Resources) -> Resources:
    """Apply the fields for which only the value decides whether they count."""
    after = _copy(had)
    for name in _POSITIVE:
        if (value := getattr(answer, name)) > 0:
            setattr(after, name, value)
    if answer.cpu_quota:
        after.cpu_quota = answer.cpu_quota
    after.unified.update(answer.unified)
    return after


def _copy(message: _M) -> _M:
    new = type(message)()
    new.CopyFrom(message)
    return new
