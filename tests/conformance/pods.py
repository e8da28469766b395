"""Pods as the files write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.model.requests import Ask, Kind, PodAsk
from tests.conformance.cases import BadCaseError, Case

MANAGED = "PodLevelResourceManagers"
"""The gate with which requests of a pod itself are served."""


def pod(case: Case) -> PodAsk:
    """Give the pod of a case, under the gates of the case.

    Raises:
        BadCaseError: There is none, or it is not written as the files write pods.
    """
    raw = case.value("pod", dict)
    try:
        own = raw.get("resources")
        init = [_ask(c, Kind.SIDECAR if c.get("restartable") else Kind.INIT) for c in raw.get("init") or ()]
        return PodAsk(
            raw.get("uid") or "",
            (*init, *(_ask(c, Kind.APP) for c in raw.get("containers") or ())),
            guaranteed=(raw.get("qos_with_pod_level_resources") or raw.get("qos")) == "Guaranteed",
            own=None if own is None else _amounts(own.get("requests")),
            own_managed=MANAGED in case.optional("gates", list, []),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadCaseError(f"it has an unusable 'pod': {error!r}") from None


def first_app(asked: PodAsk) -> str:
    """Give the name of the first app container.

    Raises:
        BadCaseError: The pod has none.
    """
    if not (apps := asked.of(Kind.APP)):
        raise BadCaseError("its pod has no app container")
    return apps[0].name


def _ask(raw: Mapping[str, Any], kind: Kind) -> Ask:
    return Ask(raw["name"], kind, _amounts(raw.get("requests")), _amounts(raw.get("limits")))


def _amounts(raw: Mapping[str, float] | None) -> dict[str, int]:
    return {name: round(n * 1000) if name == "cpu" else int(n) for name, n in (raw or {}).items()}
