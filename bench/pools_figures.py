"""Measures how long pools take to become right again: a section of ``make bench``, or by itself

    .venv/bin/python bench/pools_figures.py

A machine of 512 CPUs with a thousand containers of all classes. An owner, or a container that owns nothing,
starts or ends: the next state with its pools is made, and the containers with other CPUs are found. The time
is the CPU time of this process, as in ``place_figures.py``. Three counts are shown next to it: the containers
that are named, those with a set that really changes, and the kernel writes that follow. Only changed sets may
become steps, so the three numbers must be equal.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from place_figures import Timed, machine, sampled
from place_merge import bare_loop
from table import number, render

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.container_create import place
from proxy.engine.node import Node
from proxy.engine.placement import moves
from proxy.engine.state import NodeState
from proxy.executor.cpuset_writer import CpusetWriter
from proxy.executor.kernel_ports import CpusetValue
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.workload import Container, KubeQos, Phase, Pod, QosClass, Request
from tests.testkit.changed_copy import changed_copy

HEAD = (
    "pools after a change, in this process",
    *("p50", "p99", "p50 in loops", "bar", "named", "changed", "written"),
)
BAR_MS = 2.0
"""Limits in milliseconds, of median and 99th percentile."""
CONTAINERS = 1000
GUARANTEED, BURSTABLE, BEST_EFFORT = KubeQos.GUARANTEED, KubeQos.BURSTABLE, KubeQos.BEST_EFFORT
SYSTEM_CPUS = CpuSet(range(2))
WHOLE = Request(2048, 200_000, 100_000)
PART_OF_A_CPU = Request(512, 50_000, 100_000)


@dataclass(frozen=True, slots=True)
class MeasuredChange(Timed):
    """One row: the event, the time to decide it (milliseconds), and the consequences.

    Attributes:
        named: How many containers must move.
        changed: How many have another set afterwards.
        written: How many kernel writes it takes.
    """

    named: int
    changed: int
    written: int
    bar: float | None = BAR_MS

    @property
    def missed(self) -> bool:
        late = self.bar is not None and self.p99 >= self.bar
        return late or not self.named == self.changed == self.written


class CountingCgroups:
    """Cgroups as numbers; counts what is written."""

    version = 2

    def __init__(self, state: NodeState) -> None:
        self.sets = {c.id: state.desired_cpus(c) for c in state.containers.values()}
        self.writes = 0

    def find(self, parent: str, container_id: str) -> str | None:
        return container_id if container_id in self.sets else None

    def read(self, path: str) -> CpusetValue:
        return CpusetValue(self.sets[path], Mask((0,)), self.sets[path], Mask((0,)))

    def write_all(
        self,
        paths: Sequence[str],
        cpus: CpuSet,
        known: CpuSet | None = None,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> list[bool | None]:
        return [None] * len(paths)

    def write(self, path: str, cpus: CpuSet | None, mems: Mask | None, *, inner: bool = True) -> bool:
        if cpus is None or self.sets[path] == cpus:
            return False
        self.sets[path] = cpus
        self.writes += 1
        return True


def bench_pod(
    number: int,
    qos: QosClass = QosClass.NONE,
    kube: KubeQos = BURSTABLE,
    cpus: str = "",
    nodes: Mask | None = None,
) -> Pod:
    return Pod(
        f"s{number}",
        f"u{number}",
        "bench",
        f"p{number}",
        qos=qos,
        kube_qos=kube,
        cpuset=CpuSet.parse(cpus) or None,
        nodes=nodes,
    )


def owner_cpus(number: int) -> str:
    """CPUs for the owner with a number: both threads of a core, spread over the machine."""
    core = 8 + number * 3
    return f"{core},{core + 256}"


def all_pods() -> Iterator[tuple[Pod, Request]]:
    """Return pods of all classes, as many as there are containers: 51 of them own CPUs."""
    for i in range(17):
        yield bench_pod(i, QosClass.LSE, GUARANTEED, owner_cpus(i)), WHOLE
        yield bench_pod(100 + i, QosClass.LSR, GUARANTEED, owner_cpus(20 + i)), WHOLE
        yield bench_pod(200 + i, QosClass.NONE, GUARANTEED), WHOLE
    sharing = (
        (QosClass.LS, BURSTABLE, False),
        (QosClass.LS, BURSTABLE, True),
        (QosClass.BE, BEST_EFFORT, False),
        (QosClass.NONE, BURSTABLE, False),
        (QosClass.BE, BEST_EFFORT, True),
        (QosClass.NONE, BEST_EFFORT, False),
        (QosClass.NONE, GUARANTEED, False),
        (QosClass.SYSTEM, BURSTABLE, False),
    )
    for i in range(CONTAINERS - 51):
        qos, kube, bound = sharing[i % len(sharing)]
        yield bench_pod(1000 + i, qos, kube, nodes=Mask((i // 8 % 8,)) if bound else None), PART_OF_A_CPU


def full_node() -> NodeState:
    """Return a machine of 512 CPUs on 8 nodes with a thousand running containers."""
    known = machine(8, 32, 2)
    state = NodeState.empty(Node(known, CpuTopology.of(known), static=True, system=SYSTEM_CPUS))
    for pod, request in all_pods():
        state, _ = with_container(state, pod, request)
    return state


def with_container(
    state: NodeState, pod: Pod, request: Request, name: str = "c"
) -> tuple[NodeState, Container]:
    """Return the state with one more running container, and the container."""
    plan = place(state.with_pod(pod), pod, name, 0, request, f"{name}-{pod.uid}")
    if plan.container is None:
        raise RuntimeError(f"cannot fill the machine: {plan.verdict.message}")
    container = plan.container.in_phase(Phase.RUNNING)
    return plan.state.changed(put=(container,)), container


def change(
    what: str, before: NodeState, after: Callable[[], NodeState], bar: float | None = BAR_MS
) -> MeasuredChange:
    """Measure one change, and count its consequences."""
    kernel: Any = CountingCgroups(before)
    state = after()
    shrink, grow = moves(before, state)
    there = [(c, state.containers.get(c.id)) for c in before.containers.values()]
    changed = {
        new.id
        for old, new in there
        if new is not None and before.desired_cpus(old) != state.desired_cpus(new)
    }
    if changed != {*shrink, *grow}:
        raise RuntimeError(f"{what}: others are named than those whose set changes")
    CpusetWriter(kernel, lambda: state).write([*shrink, *grow])
    samples = sampled(lambda: moves(before, after()))
    return MeasuredChange(what, samples, len(shrink) + len(grow), len(changed), kernel.writes, bar)


def calls() -> Iterator[MeasuredChange]:
    """Measure the cost of kubelet's calls."""
    state = full_node()
    new, late = owner_cpus(60), 5000
    comers = (
        ("an LSE pod", bench_pod(late, QosClass.LSE, GUARANTEED, new), WHOLE),
        ("an LSR pod", bench_pod(late, QosClass.LSR, GUARANTEED, new), WHOLE),
        ("a Guaranteed pod with whole CPUs", bench_pod(late, QosClass.NONE, GUARANTEED), WHOLE),
        ("another container of an LSE pod", bench_pod(0, QosClass.LSE, GUARANTEED, owner_cpus(0)), WHOLE),
        ("an LS pod bound to a NUMA node", bench_pod(late, QosClass.LS, nodes=Mask((3,))), PART_OF_A_CPU),
        ("an LS pod", bench_pod(late, QosClass.LS), PART_OF_A_CPU),
        ("a BE pod", bench_pod(late, QosClass.BE, BEST_EFFORT), PART_OF_A_CPU),
        ("a SYSTEM pod", bench_pod(late, QosClass.SYSTEM), PART_OF_A_CPU),
    )
    for what, pod, request in comers:
        after, container = with_container(state, pod, request, "late")
        come = partial(state.changed, put=(container,))
        yield change(f"{what} comes", state, come)
        yield change(f"{what} goes", after, partial(after.changed, drop=(container.id,)))


def other_events() -> Iterator[MeasuredChange]:
    """Measure the cost of events other than kubelet's calls; all but the first two are rare."""
    state = full_node()
    some = state.pools.be & CpuSet(range(200))
    yield change("BE is suppressed to fewer CPUs", state, partial(state.with_be_limit, some))
    held = {"elsewhere": {"main": CpuSet.parse(owner_cpus(61))}}
    yield change("kubelet's CPU manager gives CPUs away", state, partial(state.with_kubelet_cpus, held))
    fewer = offline(state.node.machine, CpuSet((101, 357)))
    yield change("two CPUs go offline", state, partial(state.with_machine, fewer), None)
    pods, there = state.pods.values(), state.containers.values()
    yield change("the daemon starts again", state, partial(NodeState.of, state.node, pods, there), None)


def offline(known: Machine, gone: CpuSet) -> Machine:
    """Return the machine without some CPUs."""
    nodes = tuple(changed_copy(node, cpus=node.cpus - gone) for node in known.nodes)
    cpus = tuple(cpu for cpu in known.cpus if cpu.id not in gone)
    return changed_copy(known, cpus=cpus, nodes=nodes)


def measure() -> list[MeasuredChange]:
    """Measure everything."""
    return [*calls(), *other_events()]


def rows(changes: list[MeasuredChange], loop: float) -> list[list[str]]:
    """The table's rows."""
    return [
        [
            f"512 CPUs, {CONTAINERS} containers: {c.what}",
            number(c.p50, "ms"),
            number(c.p99, "ms"),
            number(c.p50 / loop),
            (f"{c.bar:g} ms" if c.bar else "") + (" MISSED" if c.missed else ""),
            str(c.named),
            str(c.changed),
            str(c.written),
        ]
        for c in changes
    ]


def main() -> int:
    loop = statistics.median(sampled(bare_loop, 15))
    changes = measure()
    print(render(HEAD, rows(changes, loop)))
    print(f"\nbare loop of 1,000,000 steps: {loop:.1f} ms")
    return int(any(one.missed for one in changes))


if __name__ == "__main__":
    sys.exit(main())
