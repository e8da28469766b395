"""Messages of the CRI and of Koordinator's hook protocol as the files write them, and facts made of them.

A message is an object with the protocol's names of fields; null, ``{}`` and a missing one are the same.
Values of environments are texts, though they are bytes in the CRI.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from proxy.api.cri import api_pb2 as cri
from proxy.api.koordinator import hook_pb2 as hook
from proxy.frontends.cri import messages
from proxy.frontends.hook_bridge.facts import existing_facts, remembered_pod_facts
from proxy.frontends.hook_bridge.object_cache import ObjectCache
from proxy.frontends.hookserver.messages import (
    SandboxReply,
    container_reply,
    pod_echo,
    pod_of,
    request_of,
)
from proxy.hooks.facts import ContainerFacts, PodFacts
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import ANY_MACHINE
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.pools import facts
from tests.conformance.cases import BadCaseError
from tests.testkit.changed_copy import changed_copy
from tests.testkit.hook_facts import container_facts, pod_facts

_M = TypeVar("_M", bound=Message)


def message(kind: type[_M], raw: object) -> _M:
    """Read a message; further fields in one of the CRI are ignored, because we declare only some of them.

    Raises:
        BadCaseError: It is not a message.
    """
    lenient = kind.DESCRIPTOR.file.name == cri.DESCRIPTOR.name
    try:
        return ParseDict(_with_bytes(raw or {}), kind(), ignore_unknown_fields=lenient)
    except (ParseError, AttributeError, TypeError, ValueError) as error:
        raise BadCaseError(f"it has an unusable {kind.__name__}: {error}") from None


def shown(one: Message) -> dict[str, Any]:
    """Write a message so that it can be compared: only the fields that are not empty."""
    plain: dict[str, Any] = _lean(MessageToDict(one, preserving_proto_field_name=True))
    return plain


def _lean(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: lean for key, entry in value.items() if (lean := _lean(entry)) not in ({}, [])}


def _with_bytes(raw: Any, key: str = "") -> Any:
    """Write values of environments as JSON writes bytes, and leave out what is null in a list."""
    if isinstance(raw, dict):
        return {name: _with_bytes(value, name) for name, value in raw.items()}
    if isinstance(raw, list):
        entries = [_with_bytes(entry) for entry in raw if entry is not None]
        return [_encoded(entry) for entry in entries] if key == "envs" else entries
    return raw


def _encoded(entry: Mapping[str, str]) -> dict[str, str]:
    return {**entry, "value": base64.b64encode((entry.get("value") or "").encode()).decode()}


def _pod_of(config: cri.PodSandboxConfig, sandbox_id: str = "") -> Pod:
    return messages.pod_of(cri.SandboxFacts.FromString(config.SerializeToString()), sandbox_id)


def _request_of(resources: cri.LinuxContainerResources) -> Request:
    return messages.request_of(cri.ResourceFacts.FromString(resources.SerializeToString()))


def facts_of_entry(entry: hook.ContainerResourceHookRequest) -> tuple[PodFacts, ContainerFacts]:
    """Make facts of a container from the request that a server got."""
    view = container_reply(entry)
    return view.pod(_pod_of_entry(entry)), view.container()


def _pod_of_entry(entry: hook.ContainerResourceHookRequest) -> Pod:
    return pod_of(entry, "", entry.pod_meta.attempt, ANY_MACHINE)


def create_facts(config: cri.PodSandboxConfig, body: bytes) -> tuple[PodFacts, ContainerFacts]:
    """Make facts of a CreateContainerRequest and of its pod."""
    return pod_facts(_pod_of(config), config), container_facts(body)


def remembered_pod(entry: hook.PodSandboxHookRequest, sandbox_id: str, lookup: str) -> PodFacts | None:
    """Store a sandbox, and return the one of that name."""
    memory, view = ObjectCache(), SandboxReply(entry, pod_echo(entry))
    pod = changed_copy(view.read(ANY_MACHINE), sandbox_id=lookup)
    memory.add_pod(sandbox_id, view.sandbox(pod)[0])
    known = memory.pod(lookup)
    return None if known is None else remembered_pod_facts(pod, known)


def remembered_container(
    entry: hook.ContainerResourceHookRequest, container_id: str, lookup: str
) -> tuple[PodFacts, ContainerFacts] | None:
    """Store a container, and return the one of that name."""
    memory, view, meta = ObjectCache(), container_reply(entry), entry.container_meta
    memory.add_container(container_id, view.remembered())
    known = memory.container(lookup)
    if known is None:
        return None
    pod, request = _pod_of_entry(entry), request_of(entry.container_resources)
    placement = Placement(Pool.SHARED, CpuSet(), Mask())
    one = Container(lookup, meta.name, pod, request, placement, Phase.CREATED, meta.attempt)
    return view.pod(pod), existing_facts(one, known)


def sandbox_row(entry: hook.PodSandboxHookRequest, sandbox_id: str) -> cri.PodSandbox:
    """Return the row of the runtime's list for a sandbox of which an entry was stored."""
    row = cri.PodSandbox(
        id=sandbox_id,
        labels=entry.labels,
        annotations=entry.annotations,
        runtime_handler=entry.runtime_handler,
    )
    row.metadata.ParseFromString(entry.pod_meta.SerializeToString())  # the same fields in both protocols
    return row


def listed_pod(sandbox: cri.PodSandbox, memory: ObjectCache) -> PodFacts:
    """Learn of a sandbox from the runtime's list."""
    memory.add_listed([sandbox], [])
    meta = sandbox.metadata
    name = (sandbox.id, meta.uid, meta.namespace, meta.name, meta.attempt)
    pod = facts.pod_facts(*name, sandbox.labels, sandbox.annotations, "")
    return remembered_pod_facts(pod, memory.pod(sandbox.id))


def listed_container(sandbox: cri.PodSandbox, row: cri.Container) -> tuple[PodFacts, ContainerFacts]:
    """Learn of a container and its sandbox from the runtime's lists."""
    memory = ObjectCache()
    pod = listed_pod(sandbox, memory)
    memory.add_listed([], [row])
    placement = Placement(Pool.SHARED, CpuSet(), Mask())
    of = facts.pod_facts(sandbox.id, pod.uid, pod.namespace, pod.name, 0, pod.labels, pod.annotations, "")
    nothing = _request_of(cri.LinuxContainerResources())
    meta = row.metadata
    one = Container(row.id, meta.name, of, nothing, placement, Phase.RUNNING, meta.attempt)
    return pod, existing_facts(one, memory.container(row.id))
