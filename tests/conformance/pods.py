"""Pods as the files write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from tests.conformance.cases import BadCaseError, Case

MANAGED = "PodLevelResourceManagers"
"""The gate with which requests of a pod itself are served."""


def pod(case: Case) -> PodRequests:
    """Return the pod of a case, under the gates of the case.

    Raises:
        BadCaseError: There is none, or it is not written as the files write pods.
    """
    raw = case.value("pod", dict)
    try:
        own = raw.get("resources")
        init = [
            _ask(c, ContainerKind.SIDECAR if c.get("restartable") else ContainerKind.INIT)
            for c in raw.get("init") or ()
        ]
        return PodRequests(
            raw.get("uid") or "",
            (*init, *(_ask(c, ContainerKind.APP) for c in raw.get("containers") or ())),
            guaranteed=(raw.get("qos_with_pod_level_resources") or raw.get("qos")) == "Guaranteed",
            pod_level_requests=None if own is None else _amounts(own.get("requests")),
            are_pod_level_requests_managed=MANAGED in case.optional("gates", list, []),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadCaseError(f"it has an unusable 'pod': {error!r}") from None


def first_app(requests: PodRequests) -> str:
    """Return the name of the first app container.

    Raises:
        BadCaseError: The pod has none.
    """
    if not (apps := requests.of_kinds(ContainerKind.APP)):
        raise BadCaseError("its pod has no app container")
    return apps[0].name


def _ask(raw: Mapping[str, Any], kind: ContainerKind) -> ContainerResources:
    return ContainerResources(raw["name"], kind, _amounts(raw.get("requests")), _amounts(raw.get("limits")))


def _amounts(raw: Mapping[str, float] | None) -> dict[str, int]:
    return {name: round(n * 1000) if name == "cpu" else int(n) for name, n in (raw or {}).items()}
