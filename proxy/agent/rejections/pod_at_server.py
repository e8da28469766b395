"""What a Pod object says about whether the pod may be ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from proxy.allocation.cpu_request import CPU, MILLI
from proxy.allocation.pod_requests import peak_request
from proxy.backends.kubelet.pod_spec import pod_spec
from proxy.model.errors import InputError

_MIRROR = "kubernetes.io/config.mirror"
"""Annotation of the objects that kubelet makes for static pods."""


class PodAtServer(Struct, frozen=True):
    """What the API server says of a rejected pod.

    Attributes:
        controller: Kind and uid of its controller; None where it has none.
        ends: It is being deleted, or its phase is final.
        is_static: kubelet has it from a file.
        priority_class: Of the pod.
        has_run: One of its containers has started at some time.
        cpus: Whole CPUs that it requests.
    """

    controller: tuple[str, str] | None = None
    ends: bool = False
    is_static: bool = False
    priority_class: str = ""
    has_run: bool = False
    cpus: int = 0


def pod_at_server(item: Mapping[str, Any]) -> PodAtServer:
    """Read a Pod object of the API server."""
    metadata, spec, status = (item.get(part) or {} for part in ("metadata", "spec", "status"))
    owners = [each for each in metadata.get("ownerReferences") or () if isinstance(each, Mapping)]
    controller = next((each for each in owners if each.get("controller")), None)
    return PodAtServer(
        None if controller is None else (str(controller.get("kind")), str(controller.get("uid"))),
        ends=bool(metadata.get("deletionTimestamp")) or status.get("phase") in ("Succeeded", "Failed"),
        is_static=_MIRROR in (metadata.get("annotations") or {})
        or any(o.get("kind") == "Node" for o in owners),
        priority_class=str(spec.get("priorityClassName") or ""),
        has_run=any(map(_has_run, _statuses(status))),
        cpus=_cpus(item),
    )


def _statuses(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for part in ("initContainerStatuses", "containerStatuses"):
        yield from (each for each in status.get(part) or () if isinstance(each, Mapping))


def _has_run(status: Mapping[str, Any]) -> bool:
    state = status.get("state") or {}
    return bool(
        status.get("restartCount") or status.get("lastState") or state.keys() & {"running", "terminated"}
    )


def _cpus(item: Mapping[str, Any]) -> int:
    try:
        ask = pod_spec(item, listed=True).ask
    except InputError:
        return 0
    peak = peak_request(ask.containers, lambda each: {CPU: each.requests.get(CPU, 0)}).get(CPU, 0)
    return (peak if ask.own is None else ask.own.get(CPU, peak)) // MILLI
