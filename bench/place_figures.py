"""Measures the decision about a container's placement: a section of ``make bench``, or by itself

    .venv/bin/python bench/place_figures.py

Everything runs in this process, without a runtime. Milliseconds depend on the machine; the ratio is to a bare
loop of a million steps in the same run. A decision is all that a CreateContainer needs: the hints of all
providers, their merge, the allocation, the containers to move, and the record that explains it. It waits for
nothing, so its CPU time is measured: other processes on the machine do not count.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from place_merge import bare_loop, hints
from table import number, render

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import RegisteredDevice
from proxy.allocation.merge import merge
from proxy.engine.container_create import Plan, place
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Cpu, Machine, NumaNode
from proxy.model.options import TopologyPolicy
from proxy.model.requests import ContainerResources, PodRequests
from proxy.model.workload import Phase, Pod, Request

HEAD = ("deciding, in this process", "p50", "p99", "p50 in loops", "bar")
ROUNDS = 200
GIB = 1 << 30
MERGE_BARS = {2: 2.0, 3: 3.0, 4: 5.0}
RUNNING = (10, 100, 300, 1000)
OWNERS = 50
"""The most containers that own CPUs (8 each) on a full machine."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A timed action, and its samples in milliseconds."""

    what: str
    samples: tuple[float, ...]

    @property
    def p50(self) -> float:
        return statistics.median(self.samples)

    @property
    def p99(self) -> float:
        return sorted(self.samples)[int(len(self.samples) * 0.99)]


@dataclass(frozen=True, slots=True)
class Figure(Timed):
    """One row, and the limits of its median and 99th percentile."""

    bar: float | None = None
    late_bar: float | None = None

    @property
    def missed(self) -> bool:
        late = self.late_bar is not None and self.p99 >= self.late_bar
        return late or (self.bar is not None and self.p50 >= self.bar)


def sampled(work: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, ...]:
    work()
    found = []
    for _ in range(rounds):
        begun = time.thread_time()
        work()
        found.append((time.thread_time() - begun) * 1e3)
    return tuple(found)


def merges() -> Iterator[Figure]:
    whole, full = Mask(range(8)), range(1, 9)
    for count, bar in MERGE_BARS.items():
        lists = [hints(8, full, preferred=1 + i % 2) for i in range(count)]
        yield Figure(
            f"merge, 8 nodes x 255 hints, {count} resources", sampled(partial(merge, lists, whole)), bar
        )


def machine(nodes: int, cores: int, threads: int, empty: int = 0) -> Machine:
    """Build nodes of one package each, and ``empty`` ones without CPUs, some with memory."""
    total = nodes * cores
    cpus = tuple(
        Cpu(c, c % total, c % total // cores * cores, numa=c % total // cores) for c in range(total * threads)
    )
    every = nodes + empty
    numa = tuple(
        NumaNode(
            node,
            CpuSet(c.id for c in cpus if c.numa == node),
            512 * GIB if node < nodes else 186 * GIB if (node - nodes) % 8 == 0 else 0,
            distance=tuple(10 if node == other else 40 for other in range(every)),
        )
        for node in range(every)
    )
    online = CpuSet(range(total * threads))
    return Machine(cpus, numa, online, online)


def pod(number: int) -> Pod:
    return Pod(f"s{number}", f"u{number}", "bench", f"p{number}")


def whole(cpus: int, memory: int) -> Request:
    return Request(cpus * 1024, cpus * 100_000, 100_000, memory)


def many_nodes(policy: TopologyPolicy, *, far: bool) -> tuple[str, Callable[[], Plan], bool]:
    """A machine with 2 nodes with CPUs and 34 without; 8 GPUs near the CPUs, or each on a node of its own."""
    known = machine(2, 72, 1, empty=34)
    gpus = (RegisteredDevice(f"gpu-{i}", Mask((2 + 4 * i if far else i // 4,))) for i in range(8))
    node = Node(
        known,
        CpuTopology.of(known),
        static=True,
        policy=policy,
        reserved_memory={0: {"memory": GIB}},
        devices={"nvidia.com/gpu": {gpu.id: gpu for gpu in gpus}},
    )
    return _gpu_case(node, policy, far=far)


def _gpu_case(node: Node, policy: TopologyPolicy, *, far: bool) -> tuple[str, Callable[[], Plan], bool]:
    amounts = {"cpu": 16_000, "memory": 64 * GIB, "nvidia.com/gpu": 4}
    pod_requests = PodRequests("u0", (ContainerResources("c", requests=amounts, limits=amounts),))
    guest = Pod("s0", "u0", "bench", "p0", requests=pod_requests)
    state = NodeState.empty(node).with_pod(guest)
    work = partial(place, state, guest, "c", 0, whole(16, 64 * GIB), "token")
    return f"36 nodes, CPU + memory + 4 GPUs{' far off' if far else ''}, {policy}", work, not far


def running(count: int) -> NodeState:
    """A machine of 512 CPUs on 8 NUMA nodes with this many containers, every sixth with exclusive CPUs."""
    known = machine(8, 32, 2)
    node = Node(
        known,
        CpuTopology.of(known),
        static=True,
        policy=TopologyPolicy.RESTRICTED,
        reserved_memory={0: {"memory": GIB}},
    )
    state = NodeState.empty(node)
    owners = 0
    for i in range(count):
        owns = i % 6 == 0 and owners < OWNERS
        owners += owns
        guest = pod(i)
        request = whole(8, 8 * GIB) if owns else Request(512, 50_000, 100_000, 0)
        plan = place(state.with_pod(guest), guest, "c", 0, request, f"c{i}")
        if plan.container is None:
            raise RuntimeError(f"cannot fill the machine: {plan.verdict.message}")
        state = plan.state.changed(put=(plan.container.in_phase(Phase.RUNNING),))
    return state


def decisions() -> Iterator[Figure]:
    for policy in (TopologyPolicy.RESTRICTED, TopologyPolicy.SINGLE_NUMA_NODE):
        for far in (False, True):
            what, work, fits = many_nodes(policy, far=far)
            if work().verdict.admitted != fits:
                raise RuntimeError(f"{what}: {work().verdict}")
            yield Figure(f"{what}{'' if fits else ' (refused)'}", sampled(work), 20.0)
    guest = pod(5000)
    for count in RUNNING:
        state = running(count).with_pod(guest)
        work = partial(place, state, guest, "c", 0, whole(8, 8 * GIB), "token")
        bars = (1.0, 3.0) if count <= 300 else (3.0, None)
        yield Figure(f"512 CPUs, 8 nodes, {count} containers running, 8 CPUs wanted", sampled(work), *bars)


def rows(figures: list[Figure], loop: float) -> list[list[str]]:
    """The table's rows."""
    return [
        [
            f.what,
            number(f.p50, "ms"),
            number(f.p99, "ms"),
            number(f.p50 / loop),
            " / ".join(f"{bar:g} ms" for bar in (f.bar, f.late_bar) if bar) + (" MISSED" if f.missed else ""),
        ]
        for f in figures
    ]


def measure() -> tuple[list[Figure], float]:
    """Measure everything, with the bare loop in milliseconds."""
    figures = [*merges(), *decisions()]
    return figures, statistics.median(sampled(bare_loop, 15))


def main() -> int:
    figures, loop = measure()
    print(render(HEAD, rows(figures, loop)))
    print(f"\nbare loop of 1,000,000 steps: {loop:.1f} ms")
    return int(any(figure.missed for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
