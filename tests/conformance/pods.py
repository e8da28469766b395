"""Pods as the files write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.model.asks import Ask, Kind, PodAsk
from tests.conformance.cases import Case

MANAGED = "PodLevelResourceManagers"
"""The gate with which requests of a pod itself are served."""


def pod(case: Case) -> PodAsk:
    """Give the pod of a case, under the gates of the case."""
    raw = case.value("pod", dict)
    own = raw.get("resources")
    init = [_ask(c, Kind.SIDECAR if c.get("restartable") else Kind.INIT) for c in raw["init"]]
    return PodAsk(
        raw["uid"],
        (*init, *(_ask(c, Kind.APP) for c in raw["containers"])),
        guaranteed=raw.get("qos_with_pod_level_resources", raw["qos"]) == "Guaranteed",
        own=None if own is None else _amounts(own.get("requests", {})),
        own_managed=MANAGED in case.fields.get("gates", ()),
    )


def _ask(raw: Mapping[str, Any], kind: Kind) -> Ask:
    return Ask(raw["name"], kind, _amounts(raw.get("requests", {})), _amounts(raw.get("limits", {})))


def _amounts(raw: Mapping[str, float]) -> dict[str, int]:
    return {name: round(value * 1000) if name == "cpu" else int(value) for name, value in raw.items()}
