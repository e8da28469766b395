"""No CFS quota for containers that own CPUs, chosen by class or by an annotation of their pod.

A quota throttles a container that owns CPUs although no other container may use these CPUs. topoproxy itself
lifts the quota of all containers that own CPUs, and restores it when they own none any more
(``koordinator.keepCFSQuota: never``, the default). Use this hook if that is too much or too coarse: with
``keepCFSQuota: always`` (or ``several-containers``) all containers keep the quota except those that are
chosen here.

A container is chosen if it owns CPUs, its class is one of ``classes``, and its pod has ``annotation``, if
that is set. The quota is removed at the create and stays off at kubelet's later updates. The pod's cgroup has
a quota as well, the sum of its containers' quotas. It would throttle the container just the same, so it is
removed before the container starts (``pod: false`` leaves it). It stays off until the pod ends. Under systemd
on cgroup v2, a daemon-reload restores it until the container's next update or start.

Containers that exist when this hook is enabled keep their quota until they are created again, or updated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from proxy.hooks.api import (
    Adjustment,
    Configure,
    Decision,
    PodFacts,
    PostUpdateContainerResources,
    PreCreateContainer,
    PreStartContainer,
    PreUpdateContainerResources,
)
from proxy.hooks.kit.groups import open_quota
from proxy.logs import log
from proxy.model.errors import HookError

API_VERSION = 1


@dataclass(frozen=True)
class Settings:
    """The containers whose quota is lifted."""

    classes: tuple[str, ...] = field(
        default=("LSE", "LSR", "Guaranteed"),
        metadata={"help": "QoS classes; pods without one by Kubernetes' class. Empty: all that own CPUs."},
    )
    annotation: str = field(
        default="",
        metadata={"help": "Only pods with this annotation: example.com/quota=off, or any value. Empty: all."},
    )
    pod: bool = field(default=True, metadata={"help": "Take the quota off the pod's cgroup, too."})
    cgroup_root: str = field(
        default="/sys/fs/cgroup", metadata={"help": "Where cgroups are mounted: cgroupRoot of topoproxy."}
    )


_settings = Settings()


def configure(event: Configure) -> None:
    """Take the settings."""
    global _settings
    _settings = event.settings


def pre_create_container(event: PreCreateContainer) -> Adjustment | None:
    """Create the container without a quota."""
    if not _chosen(event.pod, event.decision) or event.container.resources.cpu_quota < 1:
        return None
    return Adjustment(cpu_quota=-1)


def pre_start_container(event: PreStartContainer) -> None:
    """Remove the quota of the pod's cgroup."""
    _remove_pod_quota(event.pod, event.decision)


def pre_update_container_resources(event: PreUpdateContainerResources) -> Adjustment | None:
    """Keep the quota off when kubelet sets one."""
    if not _chosen(event.pod, event.decision) or event.asked.cpu_quota < 1:
        return None
    return Adjustment(cpu_quota=-1)


def post_update_container_resources(event: PostUpdateContainerResources) -> None:
    """Remove the quota of the pod's cgroup again, because a resize sets it."""
    _remove_pod_quota(event.pod, event.decision)


def _remove_pod_quota(pod: PodFacts, decision: Decision) -> None:
    """Remove the quota of the pod's cgroup; if that fails, the containers' own quotas are still off."""
    if not _settings.pod or not _chosen(pod, decision):
        return
    try:
        open_quota(Path(_settings.cgroup_root), pod)
    except HookError as error:
        log.say_once(
            ("20-quota-off", str(error)), "warning", "cannot take off a pod's quota", pod=pod.ref, err=error
        )


def _chosen(pod: PodFacts, decision: Decision) -> bool:
    """Return whether a container should have no quota, but the engine leaves it one."""
    if not decision.own or decision.unlimited:
        return False
    if _settings.classes and (pod.qos or pod.kube_qos) not in _settings.classes:
        return False
    key, equals, value = _settings.annotation.partition("=")
    if not key:
        return True
    return key in pod.annotations and (not equals or pod.annotations[key] == value)
