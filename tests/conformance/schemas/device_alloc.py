"""How many devices come from each NUMA node under a hint."""

from __future__ import annotations

from collections import Counter

from proxy.allocation.devices.allocate import allocate
from proxy.allocation.devices.state import DeviceState
from proxy.model.requests import ContainerResources, PodRequests
from tests.conformance.cases import Case, Outcome, Topologies
from tests.conformance.hints import hint
from tests.conformance.schemas.device_hints import device


def check(case: Case, _: Topologies) -> Outcome:
    devices = {d.id: d for d in map(device, case.value("devices", list))}
    state = DeviceState().register("r", devices.values())
    state = state.give("other", "other", "r", frozenset(case.optional("allocated", list, [])))
    pod = PodRequests("pod", (ContainerResources("c", limits={"r": case.value("request", int)}),))
    given = allocate(state, pod, "c", hint(case.optional("hint", dict)))
    nodes = (devices[i].nodes for i in given.devices["r"])
    got = Counter(str(each.first()) for each in nodes if each)
    return Outcome({k: n for k, n in case.value("expected_count_per_numa", dict).items() if n}, dict(got))
