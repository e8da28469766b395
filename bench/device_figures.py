"""Measures the decision about a container with devices: a command by itself

    .venv/bin/python bench/device_figures.py

A machine of 8 NUMA nodes, with 64 devices that are near to one each, and half of them taken. A Guaranteed pod
requests 8 CPUs and 4 devices under ``single-numa-node``: hints of both, their merge, the choice of devices
and CPUs, and the state with them. As a reference, a sharing container without devices is decided on the same
node with and without devices. All times are CPU times.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from msgspec import structs
from table import number, render

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.engine.container_events import CreateRequested
from proxy.engine.handle import handle
from proxy.engine.node import Node
from proxy.engine.node_events import DevicesChanged
from proxy.engine.pod_events import PodLearned
from proxy.engine.state import NodeState
from proxy.model.idset import Mask
from proxy.model.options import TopologyPolicy
from proxy.model.requests import ContainerResources, PodRequests
from proxy.model.workload import KubeQos, Pod, Request
from proxy.topology.regular_machine import regular_machine

NUMA_NODES, DEVICES, TAKEN = 8, 64, 32
BAR_MS, BAR_US = 2.0, 20.0
ROUNDS = 500
RESOURCE = "example.com/nic"
CPUS = Request(8192, 800_000, 100_000)
HEAD = ("a decision with devices", "p50", "p99", "bar")


def pod(uid: str, devices: int, kube: KubeQos) -> Pod:
    """Return a pod of one container."""
    amounts = {"cpu": 8000, "memory": 1} if kube is KubeQos.GUARANTEED else {}
    limits = {**amounts, **({RESOURCE: devices} if devices else {})}
    pod_requests = PodRequests(uid, (ContainerResources("c", requests=amounts, limits=limits),))
    return Pod(f"s-{uid}", uid, "ns", uid, kube_qos=kube, requests=pod_requests)


def node() -> NodeState:
    """Return the machine without devices."""
    machine = regular_machine(NUMA_NODES, 1, 16, 2)
    rules = Node(machine, CpuTopology.of(machine), static=True, policy=TopologyPolicy.SINGLE_NUMA_NODE)
    return NodeState.empty(rules)


def with_devices(state: NodeState) -> NodeState:
    """Return the machine with devices, half of them held by pods."""
    nodes = (RegisteredDevice(f"nic{i:02}", Mask((i % NUMA_NODES,))) for i in range(DEVICES))
    state, _ = handle(state, DevicesChanged(RESOURCE, {device.id: device for device in nodes}))
    for number_of in range(TAKEN):
        state, _ = arrived(state, pod(f"held{number_of}", 1, KubeQos.BURSTABLE), Request())
    return state


def arrived(state: NodeState, known: Pod, request: Request) -> tuple[NodeState, float]:
    """Decide a container; returns the new state and the milliseconds of the decision."""
    state, _ = handle(state, PodLearned(known))
    begun = time.thread_time()  # other processes of the machine do not count
    after, _ = handle(state, CreateRequested(known, "c", 0, request, f"{known.uid}/c"))
    took = (time.thread_time() - begun) * 1000
    assert f"{known.uid}/c" in after.containers, "it is placed"
    return after, took


def measure(state: NodeState, known: Pod, request: Request) -> tuple[float, float]:
    """Return p50 and p99 of a decision in milliseconds."""
    took = sorted(arrived(state, known, request)[1] for _ in range(ROUNDS))
    return statistics.median(took), took[int(len(took) * 0.99)]


def main() -> int:
    full = with_devices(node())
    plain = structs.replace(full, devices=DeviceState())
    sharing = pod("sharing", 0, KubeQos.BURSTABLE)
    owner = measure(full, pod("owner", 4, KubeQos.GUARANTEED), CPUS)
    on_full, on_plain = measure(full, sharing, Request()), measure(plain, sharing, Request())
    more_us = 1000 * (on_full[0] - on_plain[0])
    late, expensive = owner[0] > BAR_MS, more_us > BAR_US
    rows = [
        (
            f"8 CPUs and 4 of {DEVICES} devices on {NUMA_NODES} NUMA nodes",
            *(f"{number(each)} ms" for each in owner),
            f"{BAR_MS} ms" + (" MISSED" if late else ""),
        ),
        (
            f"a sharing container: {more_us:.1f} us more than on a node without devices",
            *(f"{number(each)} ms" for each in on_full),
            f"{BAR_US:.0f} us more" + (" MISSED" if expensive else ""),
        ),
    ]
    print(render(HEAD, rows))
    return int(late or expensive)


if __name__ == "__main__":
    raise SystemExit(main())
