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
from proxy.frontends.cri import decode
from proxy.frontends.cri.hook_bridge.facts import container_facts, existing_facts, pod_facts
from proxy.frontends.cri.hook_bridge.object_cache import ObjectCache
from proxy.frontends.hookserver.messages import create_request, run_request
from proxy.hooks.facts import ContainerFacts, PodFacts
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.pools import facts
from tests.conformance.cases import BadCaseError

_M = TypeVar("_M", bound=Message)


def message(kind: type[_M], raw: object) -> _M:
    """Read a message; of the CRI's we declare a part, so other fields of these do not matter.

    Raises:
        BadCaseError: It is none.
    """
    lenient = kind.DESCRIPTOR.file.name == cri.DESCRIPTOR.name
    try:
        return ParseDict(_with_bytes(raw or {}), kind(), ignore_unknown_fields=lenient)
    except (ParseError, AttributeError, TypeError, ValueError) as error:
        raise BadCaseError(f"it has an unusable {kind.__name__}: {error}") from None


def shown(one: Message) -> dict[str, Any]:
    """Write a message so that it can be compared: only what is not empty."""
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
    return decode.pod_of(cri.SandboxFacts.FromString(config.SerializeToString()), sandbox_id)


def _request_of(resources: cri.LinuxContainerResources) -> Request:
    return decode.request_of(cri.ResourceFacts.FromString(resources.SerializeToString()))


def told_container(entry: hook.ContainerResourceHookRequest) -> tuple[PodFacts, ContainerFacts]:
    """Make facts of a container of what a server was told."""
    request = create_request(entry, "", entry.pod_meta.attempt)
    return create_facts(request.sandbox_config, request.SerializeToString())


def create_facts(config: cri.PodSandboxConfig, body: bytes) -> tuple[PodFacts, ContainerFacts]:
    """Make facts of a CreateContainerRequest and of its pod."""
    return pod_facts(_pod_of(config), config), container_facts(body)


def remembered_pod(entry: hook.PodSandboxHookRequest, sandbox_id: str, lookup: str) -> PodFacts | None:
    """Have a sandbox remembered, and give the one of that name."""
    memory, request = ObjectCache(), run_request(entry)
    memory.ran(sandbox_id, request.config, request.runtime_handler)
    known = memory.pod(lookup)
    return None if known is None else pod_facts(_pod_of(request.config, lookup), known)


def remembered_container(
    entry: hook.ContainerResourceHookRequest, container_id: str, lookup: str
) -> tuple[PodFacts, ContainerFacts] | None:
    """Have a container remembered, and give the one of that name."""
    memory, request = ObjectCache(), create_request(entry, "", entry.pod_meta.attempt)
    memory.created(container_id, request.SerializeToString())
    known = memory.container(lookup)
    if known is None:
        return None
    pod = _pod_of(request.sandbox_config)
    meta, asked = request.config.metadata, _request_of(request.config.linux.resources)
    placement = Placement(Pool.SHARED, CpuSet(), Mask())
    one = Container(lookup, meta.name, pod, asked, placement, Phase.CREATED, meta.attempt)
    return pod_facts(pod, request.sandbox_config), existing_facts(one, known)


def sandbox_row(entry: hook.PodSandboxHookRequest, sandbox_id: str) -> cri.PodSandbox:
    """Give the row of the runtime's list for a sandbox of which an entry was stored."""
    config = run_request(entry).config
    return cri.PodSandbox(
        id=sandbox_id,
        metadata=config.metadata,
        labels=config.labels,
        annotations=config.annotations,
        runtime_handler=entry.runtime_handler,
    )


def listed_pod(sandbox: cri.PodSandbox, memory: ObjectCache) -> PodFacts:
    """Learn of a sandbox from the runtime's list."""
    memory.listed([sandbox], [])
    meta = sandbox.metadata
    name = (sandbox.id, meta.uid, meta.namespace, meta.name, meta.attempt)
    pod = facts.pod_facts(*name, sandbox.labels, sandbox.annotations, "")
    return pod_facts(pod, memory.pod(sandbox.id))


def listed_container(sandbox: cri.PodSandbox, row: cri.Container) -> tuple[PodFacts, ContainerFacts]:
    """Learn of a container and its sandbox from the runtime's lists."""
    memory = ObjectCache()
    pod = listed_pod(sandbox, memory)
    memory.listed([], [row])
    placement = Placement(Pool.SHARED, CpuSet(), Mask())
    of = facts.pod_facts(sandbox.id, pod.uid, pod.namespace, pod.name, 0, pod.labels, pod.annotations, "")
    nothing = _request_of(cri.LinuxContainerResources())
    meta = row.metadata
    one = Container(row.id, meta.name, of, nothing, placement, Phase.RUNNING, meta.attempt)
    return pod, existing_facts(one, memory.container(row.id))
