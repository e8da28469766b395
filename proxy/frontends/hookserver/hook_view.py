"""Koordinator's messages as our own hooks see them; only where there are hooks.

What the protocol has no field for, such as mounts, is not passed on, and is named. A key of a map cannot be
removed either, since the peer adds the maps that it gets to those that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from proxy.api.koordinator import hook_pb2 as pb
from proxy.frontends.hook_bridge.facts import pod_facts
from proxy.frontends.hook_bridge.object_cache import RememberedContainer, remembered
from proxy.frontends.hook_bridge.resources import resources_of
from proxy.frontends.hookserver.messages import ContainerReply
from proxy.hooks.answers import CLEAR, LEAVE, Adjustment
from proxy.hooks.facts import ContainerFacts, PodFacts, Resources
from proxy.hooks.remote.convert import NUMBERS
from proxy.model.workload import Pod


class SandboxHookView:
    """A RunPodSandbox; see ``proxy.frontends.hook_bridge.view.HookView``."""

    def __init__(self, asked: pb.PodSandboxHookRequest, answer: pb.PodSandboxHookResponse) -> None:
        self._asked = asked
        self._answer = answer

    def sandbox(self, pod: Pod) -> tuple[PodFacts, Resources]:
        """Read the pod, and what its containers ask for together."""
        answer = self._answer
        facts = pod_facts(pod, dict(answer.labels), dict(answer.annotations), self._asked.runtime_handler)
        return facts, resources_of(self._asked.resources)

    def adjusted(self, adjustment: Adjustment) -> pb.PodSandboxHookResponse:
        """Return the answer with what hooks want."""
        answer = pb.PodSandboxHookResponse()
        answer.CopyFrom(self._answer)
        _set_all(answer.labels, adjustment.labels)
        _set_all(answer.annotations, adjustment.annotations)
        if adjustment.cgroup_parent is not LEAVE:
            answer.cgroup_parent = "" if adjustment.cgroup_parent is CLEAR else adjustment.cgroup_parent
        return answer if answer != self._answer else self._answer


class ContainerHookView:
    """A CreateContainer or an UpdateContainerResources; see ``HookView``."""

    def __init__(self, asked: pb.ContainerResourceHookRequest, reply: ContainerReply) -> None:
        self._asked = asked
        self._reply = reply

    def pod(self, pod: Pod) -> PodFacts:
        """Read the pod."""
        return pod_facts(pod, dict(self._asked.pod_labels), dict(self._asked.pod_annotations))

    def container(self) -> ContainerFacts:
        """Read the container."""
        answer, meta = self._reply.message, self._asked.container_meta
        return ContainerFacts(
            name=meta.name,
            attempt=meta.attempt,
            annotations=dict(answer.container_annotations),
            envs=dict(answer.container_envs),
            resources=resources_of(self._reply.asked),
        )

    def update(self) -> tuple[Resources, Mapping[str, str]]:
        """Read what is asked for, and the annotations."""
        return resources_of(self._reply.asked), dict(self._reply.message.container_annotations)

    def adjusted(self, adjustment: Adjustment) -> ContainerReply:
        """Return the answer with what hooks want, as far as it has fields for that."""
        if not adjustment:
            return self._reply
        answer, asked = pb.ContainerResourceHookResponse(), pb.LinuxContainerResources()
        answer.CopyFrom(self._reply.message)
        asked.CopyFrom(self._reply.asked)
        _set_all(answer.container_annotations, adjustment.annotations)
        lost = [name for name in ("mounts", "devices", "labels") if _sets(getattr(adjustment, name))]
        lost += (f"envs[{name}]" for name in _set_all(answer.container_envs, adjustment.envs))
        for resources in (asked, answer.container_resources):
            _adjust(resources, adjustment)
        return ContainerReply(answer, asked, (*self._reply.lost, *lost))

    def remembered(self) -> RememberedContainer:
        """Return what is kept of a create."""
        return remembered(self.container())


def _adjust(resources: pb.LinuxContainerResources, adjustment: Adjustment) -> None:
    """Set what hooks want; of CPUs and memory nodes only that those of the client do not count."""
    for ours, theirs in NUMBERS.items():
        if (value := getattr(adjustment, ours)) is not LEAVE:
            setattr(resources, theirs, 0 if value is CLEAR else value)
    if adjustment.cpus is CLEAR:
        resources.cpuset_cpus = ""
    if adjustment.mems is CLEAR:
        resources.cpuset_mems = ""
    _set_all(resources.unified, adjustment.unified)


def _sets(wanted: Mapping[str, Any]) -> bool:
    return any(value is not CLEAR for value in wanted.values())


def _set_all(into: MutableMapping[str, str], wanted: Mapping[str, Any]) -> list[str]:
    """Set what is wanted in a map; returns the keys whose values are no text."""
    lost = []
    for key, value in wanted.items():
        if value is not CLEAR:
            try:
                into[key] = value
            except UnicodeEncodeError:
                lost.append(key)
    return lost
