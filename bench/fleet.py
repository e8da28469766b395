"""How long a fleet simulation takes: ``.venv/bin/python bench/fleet.py [NODES [PODS [PERCENTAGE]]]``.

100,000 pods arrive at 5,000 nodes of 64 CPUs on four NUMA nodes, under both schedulers. The bar is ten
minutes on two cores; seconds depend on the machine, so the ratio to a bare loop of a million steps in the
same run is printed too. With the extender no pod may be rejected, and each pod must be on one NUMA node if it
can.

PERCENTAGE is ``percentageOfNodesToScore`` of both schedulers. Without it the stock scheduler has its default
(0: 10 % of 5,000 nodes), and the one with the extender looks at all nodes.
"""

from __future__ import annotations

import resource
import sys
import time

from place_merge import bare_loop, millis

from proxy.simulate.documents import documents
from proxy.simulate.fleet.figures import figures_of, fleet_lines, time_lines
from proxy.simulate.fleet.fleet_simulation import FleetSettings, fleet_of, simulate_fleet

BAR = 600.0
FLEET = """
kind: Fleet
nodes:
- {{count: {nodes}, numaNodes: 4, cpus: 64, memory: 512Gi}}
pods:
- {{name: small, share: 6, resources: {{limits: {{cpu: 2, memory: 4Gi}}}}}}
- {{name: middle, share: 3, resources: {{limits: {{cpu: 4, memory: 8Gi}}}}}}
- {{name: large, share: 1, resources: {{limits: {{cpu: 9, memory: 16Gi}}}}}}
- {{name: web, share: 2, resources: {{requests: {{cpu: 500m, memory: 1Gi}}}}}}
count: {pods}
"""


def main() -> int:
    numbers = [int(text) for text in sys.argv[1:4]]
    nodes, pods = [*numbers[:2], *(5000, 100_000)[len(numbers) :]]
    loop = millis(bare_loop) / 1e3
    began, used = time.perf_counter(), time.process_time()
    settings = (
        FleetSettings(percentage=numbers[2], extended_percentage=numbers[2])
        if numbers[2:]
        else FleetSettings()
    )
    fleet = fleet_of(documents(FLEET.format(nodes=nodes, pods=pods).encode(), "bench"), (), settings)
    done = simulate_fleet(fleet, settings)
    took, used = time.perf_counter() - began, time.process_time() - used
    print("\n".join([*fleet_lines(done), *time_lines(done)]))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{took:.1f} s ({used:.1f} s of one CPU, {used / loop:.0f} bare loops), {memory:.0f} MiB")
    extended = figures_of(done.runs[-1])
    wrong = (
        bool(extended.rejected) or extended.pods_on_one_numa_node != extended.pods_possible_on_one_numa_node
    )
    print(f"with extender: none rejected, all on one NUMA node that can be: {'NO' if wrong else 'yes'}")
    late = took >= BAR and (nodes, pods) == (5000, 100_000)
    print(f"bar {BAR:.0f} s for 5,000 nodes and 100,000 pods: {'MISSED' if late else 'ok'}")
    return int(late or wrong)


if __name__ == "__main__":
    sys.exit(main())
