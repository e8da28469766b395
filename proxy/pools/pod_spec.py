"""A Pod object of Kubernetes, from JSON or YAML, converted to the resources of its containers.

Theory. The API server fills in defaults and validates a Pod before kubelet gets it. A file has not passed
through it, so both are done here; neither changes an object from the API server.

- A missing request is set to the limit, resource by resource.
- A request above its limit is rejected. A resource that cannot be overcommitted (huge pages, devices) needs a
  limit, and a request of the same size.
- Missing requests of the pod itself are set to the peak of its containers' requests
  (``peak_request``), or to the limits if there are none.
- The QoS class counts CPU and memory above zero, of the pod itself if it has resources of its own, otherwise
  of all containers. A pod without requests is BestEffort. A pod is Guaranteed if every container has both
  limits, and all sums of requests are equal to those of limits. Any other pod is Burstable. Ephemeral
  containers have no resources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from proxy.model.errors import InputError
from proxy.model.requests import (
    HUGE_PAGES,
    MEMORY,
    ContainerKind,
    ContainerResources,
    PodRequests,
    peak_request,
)
from proxy.model.workload import KubeQos
from proxy.pools import pod_fields
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.pools.pod_fields import (
    CPU,
    FieldError,
    below,
    read_amounts,
    read_list,
    read_object,
    read_text,
)

CONFIG_HASH = "kubernetes.io/config.hash"
"""Annotation of static pods: the uid that kubelet gave them, and uses over the CRI."""

Amounts = Mapping[str, int]


class PodSpec(Struct, frozen=True):
    """The fields of a Pod object that matter for placement.

    Attributes:
        uid: ``metadata.uid``; empty if the object has none (a manifest).
        namespace: ``metadata.namespace``; ``default`` if there is none.
        name, labels, annotations: As in ``metadata``.
        qos: Kubernetes' QoS class.
        requests: What the containers request.
        overhead: ``spec.overhead``, units as in ``ContainerResources``.
    """

    uid: str
    namespace: str
    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    qos: KubeQos
    requests: PodRequests
    overhead: Amounts


def pod_spec(raw: object, where: str = "", *, listed: bool = False) -> PodSpec:
    """Read a Pod object of core/v1.

    Args:
        raw: The object, as a JSON or YAML reader gives it.
        where: Where it comes from, for messages, as ``in pod.yaml``; if empty, the pod's name is used.
        listed: Whether kubelet delivered it. If so, ``kind`` may be missing, as in lists, and
            ``status.qosClass`` is used.

    Raises:
        InputError: It is not a Pod, or a field has a wrong value; the message names the field.
    """
    try:
        return _pod(read_object(raw, ""), listed=listed)
    except FieldError as error:
        subject = " ".join(filter(None, ("the pod", where or _pod_name(raw))))
        raise InputError(f"cannot read {subject}: {error}") from None


def _pod_name(raw: object) -> str:
    """Return a name for an object that may be a pod, for a message."""
    metadata = raw.get("metadata") if isinstance(raw, Mapping) else None
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return pod_fields.shown(name).strip("'") if isinstance(name, str) else ""


def _pod(raw: Mapping[str, Any], *, listed: bool) -> PodSpec:
    for field, expected in (("apiVersion", "v1"), ("kind", "Pod")):
        actual = read_text(raw.get(field), field)
        if actual != expected and not (listed and not actual):
            raise FieldError(
                field, f"{pod_fields.shown(actual)} is not {expected!r}" if actual else "is missing"
            )
    metadata = read_object(raw.get("metadata"), "metadata")
    spec = read_object(raw.get("spec"), "spec")
    uid = read_text(metadata.get("uid"), "metadata.uid")
    containers = _containers(spec)
    requests, limits = _own(spec.get("resources"), containers)
    status = read_object(raw.get("status"), "status")
    reported = read_text(status.get("qosClass"), "status.qosClass") if listed else ""
    qos = KubeQos(reported) if reported in tuple(KubeQos) else _qos(containers, requests, limits)
    return PodSpec(
        uid,
        pod_fields.read_name(metadata.get("namespace") or "default", "metadata.namespace"),
        pod_fields.read_name(metadata.get("name"), "metadata.name", dots=True),
        pod_fields.read_texts(metadata.get("labels"), "metadata.labels"),
        pod_fields.read_texts(metadata.get("annotations"), "metadata.annotations"),
        qos,
        PodRequests(uid, containers, qos is KubeQos.GUARANTEED, requests or None, pod_level_limits=limits),
        read_amounts(spec.get("overhead"), "spec.overhead"),
    )


def _containers(spec: Mapping[str, Any]) -> tuple[ContainerResources, ...]:
    init = [
        _requests(raw, f"spec.initContainers[{i}]", init=True)
        for i, raw in enumerate(read_list(spec.get("initContainers"), "spec.initContainers"))
    ]
    apps = [
        _requests(raw, f"spec.containers[{i}]", init=False)
        for i, raw in enumerate(read_list(spec.get("containers"), "spec.containers"))
    ]
    if not apps:
        raise FieldError("spec.containers", "a pod needs at least one container")
    names: set[str] = set()
    for i, container in enumerate((*init, *apps)):
        at = f"spec.initContainers[{i}]" if i < len(init) else f"spec.containers[{i - len(init)}]"
        if container.name in names:
            raise FieldError(f"{at}.name", f"{container.name!r} is taken by another container of the pod")
        names.add(container.name)
    return (*init, *apps)


def _requests(value: object, at: str, *, init: bool) -> ContainerResources:
    raw = read_object(value, at)
    restart = read_text(raw.get("restartPolicy"), f"{at}.restartPolicy")
    requests, limits = _resources(raw.get("resources"), f"{at}.resources")
    kind = (
        ContainerKind.APP
        if not init
        else ContainerKind.SIDECAR
        if restart == "Always"
        else ContainerKind.INIT
    )
    return ContainerResources(pod_fields.read_name(raw.get("name"), f"{at}.name"), kind, requests, limits)


def _resources(value: object, at: str) -> tuple[Amounts, Amounts]:
    raw = read_object(value, at)
    limits = read_amounts(raw.get("limits"), f"{at}.limits")
    requests = {**limits, **read_amounts(raw.get("requests"), f"{at}.requests")}
    for name, amount in requests.items():
        _compare(below(f"{at}.requests", name), amount, limits.get(name), divisible=_divisible(name))
    return requests, limits


def _compare(at: str, request: int, limit: int | None, *, divisible: bool) -> None:
    """Check a request against its limit, as the API server does."""
    if divisible and limit is not None and request > limit:
        raise FieldError(at, "is above its limit")
    if not divisible and limit is None:
        raise FieldError(at, "needs a limit of the same size, because it cannot be overcommitted")
    if not divisible and request != limit:
        raise FieldError(at, "differs from its limit, but cannot be overcommitted")


def _divisible(name: str) -> bool:
    """Return whether a resource can be overcommitted: Kubernetes' own ones, but not huge pages."""
    return ("/" not in name or "kubernetes.io/" in name) and not name.startswith(HUGE_PAGES)


def _own(value: object, containers: Sequence[ContainerResources]) -> tuple[Amounts, Amounts]:
    """Read the requests and limits of the pod itself."""
    at = "spec.resources"
    raw = read_object(value, at)
    limits = read_amounts(raw.get("limits"), f"{at}.limits")
    requests = read_amounts(raw.get("requests"), f"{at}.requests")
    for part, amounts in (("limits", limits), ("requests", requests)):
        for name in amounts:
            if name not in (CPU, MEMORY) and not name.startswith(HUGE_PAGES):
                raise FieldError(
                    below(f"{at}.{part}", name), "a pod itself has only cpu, memory and huge pages"
                )
    if limits:
        needs = peak_request(containers, lambda container: container.requests)
        requests = {**limits, **{n: v for n, v in needs.items() if n in (CPU, MEMORY)}, **requests}
    for name, amount in requests.items():
        _compare(below(f"{at}.requests", name), amount, limits.get(name), divisible=_divisible(name))
    return requests, limits


def counted_by_scheduler(spec: PodSpec) -> dict[str, int]:
    """Return the amounts that a scheduler subtracts from a node, by resource.

    It is Kubernetes' sum over the containers; what the pod itself requests (``spec.resources``) replaces it,
    and the overhead of its runtime class is added.
    """
    needs = requested_by(spec)
    for resource, amount in spec.overhead.items():
        needs[resource] = needs.get(resource, 0) + amount
    return needs


def requested_by(spec: PodSpec) -> dict[str, int]:
    """Return what a pod requests, by resource, without the overhead of its runtime class."""
    requests = spec.requests
    return {
        **peak_request(requests.containers, lambda container: container.requests),
        **(requests.pod_level_requests or {}),
    }


def without_named_cpus(spec: PodSpec) -> PodSpec:
    """Return a pod without the CPUs that a scheduler has named for it: they are of one node, and one pod."""
    annotations = {key: value for key, value in spec.annotations.items() if key != RESOURCE_STATUS}
    return spec if len(annotations) == len(spec.annotations) else replace(spec, annotations=annotations)


def _qos(
    containers: Sequence[ContainerResources], pod_level_requests: Amounts, pod_level_limits: Amounts
) -> KubeQos:
    """Return the QoS class by the rule of Kubernetes."""
    pod_level = [(pod_level_requests, pod_level_limits)] if pod_level_requests else []
    sources = pod_level or [(c.requests, c.limits) for c in containers]
    requests = _sums(requested for requested, _ in sources)
    limits = _sums(limit for _, limit in sources)
    if not requests and not limits:
        return KubeQos.BEST_EFFORT
    limited = all(limit.get(CPU, 0) > 0 and limit.get(MEMORY, 0) > 0 for _, limit in sources)
    return KubeQos.GUARANTEED if limited and requests == limits else KubeQos.BURSTABLE


def _sums(lists: Iterable[Amounts]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for amounts in lists:
        for name in (CPU, MEMORY):
            if amounts.get(name, 0) > 0:
                sums[name] = sums.get(name, 0) + amounts[name]
    return sums
