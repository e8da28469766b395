"""Device hints, in container and in pod scope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.model.asks import Kind
from proxy.model.idset import Mask
from proxy.place.devices.hints import container_hints, pod_hints
from proxy.place.devices.state import Device, DeviceState
from tests.conformance import memory
from tests.conformance.cases import Case, Outcome, Topologies


def device(raw: Mapping[str, Any]) -> Device:
    """Read a device of the vectors."""
    return Device(raw["id"], None if raw["numa"] is None else Mask(raw["numa"]))


def check(case: Case, _: Topologies) -> Outcome:
    state, pod, nodes = _state(case), memory.pod(case), Mask(case.value("numa_nodes", list))
    expected = memory.hints_shown(memory.hints(case.value("expected", dict)))
    got = {}
    for scope in case.value("scopes", list):
        if scope == "pod":
            answer = pod_hints(state, pod, nodes)
        else:
            answer = container_hints(state, pod, pod.of(Kind.APP)[0].name, nodes)
        shown = memory.hints_shown(answer)
        got[scope] = {resource: shown.get(resource, "no answer") for resource in expected}
    return Outcome(dict.fromkeys(got, expected), got)


def _state(case: Case) -> DeviceState:
    state = DeviceState()
    for resource, devices in case.value("devices", dict).items():
        state = state.register(resource, map(device, devices))
    for uid, containers in case.value("allocated", dict).items():
        for name, resources in containers.items():
            for resource, ids in resources.items():
                state = state.give(uid, name, resource, frozenset(ids))
    return state
