"""Schedulers of other projects read our objects: their pods fit on the nodes, and placed pods count.

Three nodes have two NUMA nodes each with 8 CPUs, of which 2 stay in the shared pool. By its 15 allocatable
CPUs a node has room for three pods of 4 CPUs; if the CPUs of a pod must be on one NUMA node, for two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proxy.demo.client import NAMESPACE, QOS_LABEL
from tests.cluster.conftest import DEPLOY
from tests.cluster.control_plane import ControlPlane
from tests.cluster.reader_nodes import NAMES, ImitatedNodes, on_nodes
from tests.cluster.scheduler_programs import (
    GROUP,
    POLICY,
    SchedulerProgram,
    group_pod,
    koordinator,
    reader_skip_reason,
    topology_match,
    volcano,
)
from tests.cluster.upstream_crds import crd
from tests.testkit.waiting import wait_until

SETTLED_S = 4.0
Create = Callable[[str, int], None]


@contextmanager
def control_plane(directory: Path, crds: str, program: str) -> Iterator[ControlPlane]:
    """Start a control plane with the CRDs of a reader; skips the test if the reader cannot be run."""
    if reason := reader_skip_reason(program):
        pytest.skip(reason)
    found = crd(crds)
    plane = ControlPlane(directory)
    try:
        plane.start_api()
        for manifest in sorted(found.glob("*.yaml")) if found.is_dir() else (found,):
            plane.install(manifest)
        for name in ("rbac.yaml", "node-restriction.yaml"):
            plane.install(DEPLOY / name)
        plane.create(
            "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        )
        yield plane
    finally:
        plane.close()


def published(plane: ControlPlane, collection: str) -> bool:
    """Return whether each node has an object."""
    return all(plane.get(f"{collection}/{name}") for name in NAMES)


def without_objects(nodes: ImitatedNodes, create: Create) -> None:
    """The scheduler counts CPUs alone: it binds pods that their nodes must reject."""
    names = [f"a{number}" for number in range(9)]
    for name in names:
        create(name, 4)
    nodes.until_placed(*names)
    print(f"without objects: {nodes.figures()}")
    assert sum(bool(each.rejected) for each in nodes.placed.values()) == 3


def two_bursts(nodes: ImitatedNodes, create: Create) -> None:
    """Bind a pod that fits, then one that fits next to it, and then one in the place of an ended pod."""
    for number in range(9):
        create(f"a{number}", 4)
    first = nodes.until(lambda: len(nodes.placed) >= 6)
    nodes.for_seconds(SETTLED_S)
    print(f"first burst: {nodes.figures()} of 9, {first:.1f} s")
    check(nodes, 6)
    create("wide", 3)
    names = [f"b{number}" for number in range(6)]
    for name in names:
        create(name, 2)
    second = nodes.until_placed(*names)
    nodes.for_seconds(SETTLED_S)
    print(f"second burst: {nodes.figures()}, {second:.1f} s")
    check(nodes, 12)
    assert "wide" not in nodes.placed
    nodes.plane.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/wide?gracePeriodSeconds=0")
    ended = next(name for name in nodes.placed if name.startswith("a"))
    freed = nodes.end(ended)
    before = set(nodes.placed)
    seconds = nodes.until(lambda: set(nodes.placed) - before)
    (name,) = set(nodes.placed) - before
    print(f"{name} took the place of {ended} after {seconds:.1f} s")
    assert nodes.placed[name].node == freed
    check(nodes, 12)


def check(nodes: ImitatedNodes, count: int) -> None:
    """No pod is rejected; each is on one NUMA node, and on the CPUs that the scheduler chose if it did."""
    assert [each.rejected for each in nodes.placed.values() if each.rejected] == []
    assert len(nodes.placed) == count
    for name, each in nodes.placed.items():
        assert each.aligned, (name, str(each.cpus))
        assert each.annotated in ("", str(each.cpus)), name


def beside_choices_of_nodes(
    reader: SchedulerProgram, nodes: ImitatedNodes, bound: Callable[[ImitatedNodes, str, int], None]
) -> None:
    """CPUs that nodes have chosen for pods without a class are not chosen by Koordinator's scheduler.

    That scheduler counts these CPUs twice in their zone, by the pod's NUMA nodes and by our object: each node
    has room for two more pods of 2 CPUs, and the scheduler binds one.
    """
    collection = "/apis/topology.node.k8s.io/v1alpha1/noderesourcetopologies"
    wait_until(lambda: published(nodes.plane, collection), 60)
    with reader.running():
        chosen = [f"n{number}" for number in range(3)]
        for name in chosen:
            nodes.pod(name, 4, "koord-scheduler")
        nodes.until_placed(*chosen)
        nodes.for_seconds(SETTLED_S)
        names = [f"s{number}" for number in range(3)]
        for name in names:
            bound(nodes, name, 4)
        nodes.until_placed(*names)
        check(nodes, 6)
        for number in range(3, 9):
            bound(nodes, f"s{number}", 2)
        nodes.for_seconds(SETTLED_S)
        print(f"beside choices of the nodes: {nodes.figures()}")
        check(nodes, 9)


def test_node_resource_topology_match_with_its_cache(tmp_path: Path) -> None:
    with control_plane(tmp_path, "topology", "nrt-scheduler") as plane:
        reader = topology_match(plane, "-v=4", "--pod-max-in-unschedulable-pods-duration=5s", resync_s=1)

        def test(nodes: ImitatedNodes, bursts: Callable[[ImitatedNodes, Create], None]) -> None:
            with reader.program.running():
                bursts(nodes, lambda name, cpus: nodes.pod(name, cpus, reader.name))

        def with_objects(nodes: ImitatedNodes) -> None:
            wait_until(
                lambda: published(plane, "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"), 60
            )
            test(nodes, two_bursts)
            log = reader.program.log.read_text()
            resynced = [line for line in log.splitlines() if 'reason="resynced"' in line]
            assert {f'node="{name}"' for name in NAMES} <= {
                word for line in resynced for word in line.split()
            }

        on_nodes(plane, lambda nodes: test(nodes, without_objects), agents=False)
        on_nodes(plane, with_objects)


def test_volcano_with_numa_aware(tmp_path: Path) -> None:
    with control_plane(tmp_path, "all of volcano", "volcano-scheduler") as plane:
        reader = volcano(plane, "--schedule-period=500ms", "-v=4")

        def create(nodes: ImitatedNodes, name: str, cpus: int, **annotations: str) -> None:
            group_pod(plane, NAMESPACE, name)
            nodes.pod(name, cpus, reader.name, annotations={GROUP: name, **annotations})

        def without(nodes: ImitatedNodes) -> None:
            with reader.program.running():
                without_objects(nodes, lambda name, cpus: create(nodes, name, cpus))

        def with_objects(nodes: ImitatedNodes) -> None:
            wait_until(lambda: published(plane, "/apis/nodeinfo.volcano.sh/v1alpha1/numatopologies"), 60)
            with reader.program.running():
                two_bursts(nodes, lambda name, cpus: create(nodes, name, cpus, **POLICY))

        on_nodes(plane, without, agents=False)
        on_nodes(plane, with_objects)


def test_koord_scheduler_binds_only_pods_that_fit_once_objects_are_published(tmp_path: Path) -> None:
    with control_plane(tmp_path, "all of koordinator", "koord-scheduler") as plane:
        reader = koordinator(plane, "-v=4")

        def bound(nodes: ImitatedNodes, name: str, cpus: int) -> None:
            """Create a pod whose CPUs the scheduler chooses."""
            number = int(name[1:]) if name[1:].isdigit() else 0
            labels = {QOS_LABEL: "LSE" if number % 2 else "LSR"}
            annotations, priority = reader.fields["annotations"], reader.fields["priorityClassName"]
            nodes.pod(name, cpus, reader.name, priority=priority, labels=labels, annotations=annotations)

        def without(nodes: ImitatedNodes) -> None:
            with reader.program.running():
                without_objects(nodes, lambda name, cpus: nodes.pod(name, cpus, reader.name))

        def with_objects(nodes: ImitatedNodes) -> None:
            wait_until(
                lambda: published(plane, "/apis/topology.node.k8s.io/v1alpha1/noderesourcetopologies"), 60
            )
            with reader.program.running():
                two_bursts(nodes, lambda name, cpus: bound(nodes, name, cpus))
                assert all(each.annotated for each in nodes.placed.values())

        on_nodes(plane, without, agents=False)
        on_nodes(plane, with_objects)
        on_nodes(plane, lambda nodes: beside_choices_of_nodes(reader.program, nodes, bound))
