"""kubelet's own table of device allocations, through a daemon: requests in, the device files of creates out.

The hint of a case is where the CPUs of the container are: a scheduler names them.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from proxy.allocation.devices.state import RegisteredDevice
from proxy.engine.device_book import DeviceRecord
from proxy.engine.node_events import DevicesChanged, DevicesImported
from proxy.model.devices import AllocateAnswer
from proxy.model.idset import Mask
from proxy.model.requests import ContainerResources, PodRequests
from tests.conformance.runner import OWN, SHARED
from tests.executor.test_device_grants import Kubelet, PlayedPlugins, paths

RESOURCE = "vendor/dev"
CPUS = {(0,): "0-1", (1,): "4-5", (0, 1): "0,4"}
"""Two CPUs by NUMA nodes; node 0 of the machine has 0-3,8-11, node 1 the others."""
TWO = {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000}
FILES = [folder / "device_alloc.json" for folder in (OWN, SHARED.parent)]
CASES = [case for file in FILES if file.is_file() for case in json.loads(file.read_text())["cases"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_devices_come_from_the_nodes_of_kubelets_table(live: Any, case: Any) -> None:
    devices = {
        each["id"]: RegisteredDevice(each["id"], None if each["numa"] is None else Mask(each["numa"]))
        for each in case["devices"]
    }
    amounts = {"cpu": 2000, "memory": 1 << 20}
    ask = ContainerResources("c", requests=amounts, limits={**amounts, RESOURCE: case["request"]})
    kubelet = Kubelet(ask)
    kubelet.asks = lambda uid, *_: (PodRequests(uid, (ask,)), "kubelet's /pods")  # type: ignore[method-assign]

    async def story(w: Any) -> None:
        w.executor.store.handle(DevicesChanged(RESOURCE, devices))
        await w.pod("o")
        taken = {"c": {RESOURCE: DeviceRecord(tuple(case["allocated"]), AllocateAnswer())}}
        w.executor.store.handle(DevicesImported(RESOURCE, {"o": taken}, every=False))
        nodes = case["hint"]["affinity"]
        sandbox = (
            await w.pod("a", "LSE", cpus=CPUS[tuple(nodes)]) if nodes else await w.pod("a", kube="burstable")
        )
        call = await w.begin(sandbox, memory_limit_in_bytes=1 << 20, **TWO)
        given = [devices[path.removeprefix("/dev/")] for path in paths(call)]
        assert len(given) == case["request"]
        count = Counter(str(next(iter(device.nodes))) for device in given if device.nodes)
        assert count == case["expected_count_per_numa"]

    live(story, sources=(kubelet, None), plugins=PlayedPlugins())
