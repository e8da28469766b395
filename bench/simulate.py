"""How long a simulation takes: ``.venv/bin/python bench/simulate.py [PODS [MACHINES]]``.

10,000 pods arrive at 100 machines of 128 CPUs (two sockets, four NUMA nodes, two threads a core, four GPUs)
under ``restricted`` and ``static`` with memory counted by node. The bar is 60 seconds; seconds depend on the
machine, so the ratio to a bare loop of a million steps in the same run is printed too.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from place_merge import bare_loop, millis

from proxy.allocation.devices.state import RegisteredDevice
from proxy.config import parse
from proxy.model.idset import Mask
from proxy.pools.pod_spec import pod_spec
from proxy.simulate.machines import NamedMachine, copies
from proxy.simulate.pods import SimulatedPod, pod_template_of
from proxy.simulate.simulation import SimulationRules, simulate, simulated_nodes_of
from proxy.simulate.summary import find
from proxy.topology.regular_machine import regular_machine

BAR = 60.0
CONFIG = """
cpuManagerPolicy: static
topologyManagerPolicy: restricted
memoryManagerPolicy: Static
reservedSystemCPUs: 0,64
reservedMemory: [{numaNode: 0, limits: {memory: 1Gi}}]
"""
GPU = "example.com/gpu"
MIX: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("web", 8, {"requests": {"cpu": "250m", "memory": "256Mi"}}),
    ("batch", 4, {}),
    ("api", 4, {"limits": {"cpu": "1500m", "memory": "1Gi"}}),
    ("db", 2, {"limits": {"cpu": 4, "memory": "8Gi"}}),
    ("cache", 1, {"limits": {"cpu": 2, "memory": "16Gi"}}),
    ("train", 1, {"limits": {"cpu": 6, "memory": "24Gi", GPU: 1}}),
)
"""Name, share of the pods, resources."""


def simulated_pods(count: int) -> list[SimulatedPod]:
    """Repeat the mix until there are enough pods."""
    pod_templates = []
    for name, share, resources in MIX:
        containers = [{"name": "main", "resources": resources}]
        raw = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"containers": containers},
        }
        pod_templates += [(name, pod_template_of(pod_spec(raw)))] * share
    return [
        pod_templates[i % len(pod_templates)][1].copy(f"{pod_templates[i % len(pod_templates)][0]}-{i}", i)
        for i in range(count)
    ]


def main() -> int:
    numbers = [int(text) for text in sys.argv[1:3]]
    pods, count = [*numbers, *(10_000, 100)[len(numbers) :]]
    loop = millis(bare_loop) / 1e3
    machines = copies([NamedMachine("m", regular_machine(2, 2, 16, 2))], count)
    rules = SimulationRules(
        {GPU: {f"gpu{i}": RegisteredDevice(f"gpu{i}", Mask([i])) for i in range(4)}}, max_pods=0
    )
    config = parse(CONFIG, "bench")
    start = time.perf_counter()
    played = simulate(config, simulated_nodes_of(config, machines, rules), simulated_pods(pods), rules)
    summary = find(played).summary
    took = time.perf_counter() - start
    print(f"bare loop of 1,000,000 steps: {loop * 1e3:.1f} ms")
    print(f"{pods} pods on {count} machines: {took:.2f} s, {pods / took:.0f} pods/s, {took / loop:.0f} loops")
    print(f"placed {summary.placed} (together {summary.together}, spread {summary.spread}, ", end="")
    print(f"sharing {summary.sharing})")
    print(f"refused {dict(Counter(summary.rejected))}, unschedulable {dict(summary.unschedulable)}")
    late = took >= BAR and (pods, count) == (10_000, 100)
    print(f"bar {BAR:.0f} s for 10000 pods on 100 machines: {'MISSED' if late else 'ok'}")
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
