"""Device hints, in container and in pod scope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.allocation.devices.hints import container_device_hints, pod_device_hints
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.model.idset import Mask
from tests.conformance import hints
from tests.conformance.cases import Case, Outcome, Topologies
from tests.conformance.pods import first_app, pod


def device(raw: Mapping[str, Any]) -> RegisteredDevice:
    """Read a device of the vectors."""
    nodes = raw.get("numa")
    return RegisteredDevice(raw["id"], None if nodes is None else Mask(nodes))


def check(case: Case, _: Topologies) -> Outcome:
    state, requests, nodes = _state(case), pod(case), Mask(case.value("numa_nodes", list))
    expected = hints.shown(hints.answer(case.value("expected", dict)))
    got = {}
    for scope in case.value("scopes", list):
        if scope == "pod":
            found = pod_device_hints(state, requests, nodes)
        else:
            found = container_device_hints(state, requests, first_app(requests), nodes)
        reported = hints.shown(found)
        got[scope] = {resource: reported.get(resource, "no answer") for resource in expected}
    return Outcome(dict.fromkeys(got, expected), got)


def _state(case: Case) -> DeviceState:
    state = DeviceState()
    for resource, devices in case.value("devices", dict).items():
        state = state.register(resource, map(device, devices or ()))
    for uid, containers in case.optional("allocated", dict, {}).items():
        for name, resources in (containers or {}).items():
            for resource, ids in (resources or {}).items():
                state = state.give(uid, name, resource, frozenset(ids or ()))
    return state
