"""The facts that hooks receive about CRI messages, as the daemon derives them from the bytes."""

from __future__ import annotations

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri.config_fields import PackedMessage, unread_pod_facts
from proxy.frontends.cri.hook_view import CriHookView
from proxy.frontends.hook_bridge.object_cache import ObjectCache
from proxy.hooks.facts import ContainerFacts, PodFacts
from proxy.model.workload import Pod


def container_facts(body: bytes) -> ContainerFacts:
    """Return the facts of a container for its CreateContainerRequest."""
    return CriHookView("CreateContainer", body).container()


def pod_facts(pod: Pod, config: bytes | pb.PodSandboxConfig, handler: str = "") -> PodFacts:
    """Return the facts of a pod for its configuration."""
    if isinstance(config, bytes):
        return unread_pod_facts(pod, PackedMessage(pb.PodSandboxConfig, config), handler)
    return unread_pod_facts(pod, PackedMessage(pb.PodSandboxConfig, b"", config), handler)


def remember_pod(cache: ObjectCache, pod: Pod, config: pb.PodSandboxConfig, handler: str = "") -> None:
    """Remember a sandbox that was created with a configuration."""
    body = pb.RunPodSandboxRequest(config=config, runtime_handler=handler).SerializeToString()
    cache.add_pod(pod.sandbox_id, CriHookView("RunPodSandbox", body).sandbox(pod)[0])


def remember(cache: ObjectCache, container_id: str, body: bytes) -> None:
    """Remember a container that was created by a CreateContainerRequest."""
    cache.add_container(container_id, CriHookView("CreateContainer", body).remembered())
