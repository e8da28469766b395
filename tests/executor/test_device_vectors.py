"""kubelet's tables of device hints and allocations, through a daemon: requests in, records and creates out.

The hint of an allocation is where the CPUs of the container are: a scheduler names them.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from proxy.allocation.devices.state import RegisteredDevice
from proxy.allocation.merge_record import IMPOSSIBLE, NO_PREFERENCE
from proxy.engine.held_devices import DeviceRecord
from proxy.engine.node_events import DevicesChanged, DevicesImported
from proxy.model.devices import AllocateAnswer
from proxy.model.idset import Mask
from proxy.model.options import TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from tests.conformance.runner import OWN, SHARED
from tests.executor.test_device_grants import Kubelet, PlayedPlugins, paths

RESOURCE = "vendor/dev"
CPUS = {(0,): "0-1", (1,): "4-5", (0, 1): "0,4"}
"""Two CPUs by NUMA nodes; node 0 of the machine has 0-3,8-11, node 1 the others."""
TWO = {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000}


def cases(name: str) -> list[Any]:
    """Read the cases of this repository, and additional ones."""
    files = [directory / name for directory in (OWN, SHARED.parent)]
    return [case for file in files if file.is_file() for case in json.loads(file.read_text())["cases"]]


def registered(devices: Any) -> dict[str, RegisteredDevice]:
    """Read the devices of a resource."""
    return {
        each["id"]: RegisteredDevice(each["id"], None if each["numa"] is None else Mask(each["numa"]))
        for each in devices
    }


HINTS = [
    case
    for case in cases("device_hints.json")
    if case["numa_nodes"] == [0, 1] and "container" in case["scopes"]
]


@pytest.mark.parametrize("case", cases("device_alloc.json"), ids=lambda case: case["name"])
def test_devices_come_from_the_nodes_of_kubelets_table(run_scenario: Any, case: Any) -> None:
    devices = registered(case["devices"])
    amounts = {"cpu": 2000, "memory": 1 << 20}
    container = ContainerResources("c", requests=amounts, limits={**amounts, RESOURCE: case["request"]})
    kubelet = Kubelet(container)
    kubelet.pod_requests = lambda uid, *_: (PodRequests(uid, (container,)), "kubelet's /pods")  # type: ignore[method-assign]

    async def scenario(world: Any) -> None:
        world.executor.store.handle(DevicesChanged(RESOURCE, devices))
        await world.pod("o")
        taken = {"c": {RESOURCE: DeviceRecord(tuple(case["allocated"]), AllocateAnswer())}}
        world.executor.store.handle(DevicesImported(RESOURCE, {"o": taken}, every=False))
        nodes = case["hint"]["affinity"]
        sandbox = (
            await world.pod("a", "LSE", cpus=CPUS[tuple(nodes)])
            if nodes
            else await world.pod("a", kube="burstable")
        )
        call = await world.begin(sandbox, memory_limit_in_bytes=1 << 20, **TWO)
        given = [devices[path.removeprefix("/dev/")] for path in paths(call)]
        assert len(given) == case["request"]
        count = Counter(str(next(iter(device.nodes))) for device in given if device.nodes)
        assert count == case["expected_count_per_numa"]

    run_scenario(scenario, sources=(kubelet, None), plugins=PlayedPlugins())


@pytest.mark.parametrize("case", HINTS, ids=lambda case: case["name"])
def test_hints_are_those_of_kubelets_table(run_scenario: Any, case: Any) -> None:
    kinds = [(ContainerKind.INIT, each) for each in case["pod"].get("init", ())]
    kinds += [(ContainerKind.APP, each) for each in case["pod"]["containers"]]
    requested = [
        ContainerResources(
            each["name"], ContainerKind.SIDECAR if each.get("restartable") else kind, limits=each["limits"]
        )
        for kind, each in kinds
    ]
    uid, name = case["pod"]["uid"], case["pod"]["containers"][0]["name"]

    async def scenario(world: Any) -> None:
        for resource, devices in case["devices"].items():
            world.executor.store.handle(DevicesChanged(resource, registered(devices)))
        for key in {uid, *case["allocated"]}:
            await world.pod(key, kube="burstable")
        for key, containers in case["allocated"].items():
            for container, held in containers.items():
                for resource, ids in held.items():
                    pods = {key: {container: {resource: DeviceRecord(tuple(ids), AllocateAnswer())}}}
                    world.executor.store.handle(DevicesImported(resource, pods, every=False))
        await world.begin(f"s-{uid}", name)
        found = world.executor.history.find(uid)
        answers = {a.resource: a for record in found for a in record.explanation.answers}
        for resource, expected in case["expected"].items():
            answer = answers[resource]
            if not expected:
                assert answer.nothing == (NO_PREFERENCE if expected is None else IMPOSSIBLE)
                continue
            reported = {(tuple(hint.affinity or ()), hint.preferred) for hint in answer.hints}
            assert reported == {(tuple(hint["affinity"]), hint["preferred"]) for hint in expected}

    rules = {"policy": TopologyPolicy.BEST_EFFORT}
    run_scenario(scenario, sources=(Kubelet(*requested), None), plugins=PlayedPlugins(), rules=rules)
