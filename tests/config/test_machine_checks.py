"""Settings checked against a machine."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from proxy.config import Config, check_against, parse
from proxy.config.machine_checks import check_start, memory_misfits, partly_reserved_cores, usable_memory
from proxy.model.errors import ConfigError
from proxy.model.idset import CpuSet
from proxy.model.machine import Cpu, HugePages, Machine, NumaNode
from proxy.topology.regular_machine import regular_machine

MACHINE = Machine(
    cpus=tuple(Cpu(i, i, 0) for i in (0, 1, 3)),
    nodes=(NumaNode(0, CpuSet((0, 1, 3))),),
    present=CpuSet(range(4)),
    possible=CpuSet(range(8)),
)
GI = 1 << 30
STATIC = "cpuManagerPolicy: static\ncpuManagerPolicyOptions: "
MEMORY = "memoryManagerPolicy: Static\nreservedMemory: "


@pytest.mark.parametrize("cpus", ["", "0", "0-1", "3"])
def test_reserved_cpus_that_fit_the_machine_are_accepted(cpus: str) -> None:
    check_against(parse(f"reservedSystemCPUs: '{cpus}'", "f.yaml"), MACHINE)


@pytest.mark.parametrize(
    ("cpus", "message"),
    [
        ("0-3", r"reservedSystemCPUs: CPU 2 is offline \(online: 0-1,3\)"),
        ("2,7-8", "there are no CPUs 7-8"),
        ("0-1,3", "all CPUs are reserved; none are left for containers"),
    ],
)
def test_reserved_cpus_that_do_not_fit_the_machine_are_refused(cpus: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)^cannot use the configuration f\.yaml: .*{message}"):
        check_against(parse(f"reservedSystemCPUs: '{cpus}'", "f.yaml"), MACHINE)


def unfit(text: str, machine: Machine) -> str:
    with pytest.raises(ConfigError) as caught:
        check_against(parse(text, "f.yaml"), machine)
    return str(caught.value).removeprefix("cannot use the configuration f.yaml: ")


def test_an_amount_of_cpus_leaves_one() -> None:
    check_against(parse("kubeReserved: {cpu: 1.5}\nsystemReserved: {cpu: 0.5}", "f"), MACHINE)
    assert unfit("kubeReserved: {cpu: 1.5}\nsystemReserved: {cpu: 0.6}", MACHINE) == (
        "kubeReserved and systemReserved: they reserve 3 of 3 CPUs; "
        "none are left for containers (online: 0-1,3)"
    )
    check_against(parse("kubeReserved: {cpu: 9}\nreservedSystemCPUs: 0", "f"), MACHINE)


def nodes(count: int, distance: bool = True) -> Machine:
    return replace(
        MACHINE,
        nodes=tuple(
            NumaNode(i, CpuSet(), 4 * GI, {2048: HugePages(512)}, (10,) * count if distance else ())
            for i in range(count)
        ),
    )


NODES = replace(
    nodes(2),
    nodes=(
        NumaNode(0, CpuSet([0, 1, 2, 3]), 8 << 30, None, (10, 20)),
        NumaNode(1, CpuSet(), 0, None, (20, 10)),
    ),
    extra={"numa": {"possible": "0-2"}},
)


def test_options_against_the_machine() -> None:
    sockets = replace(nodes(1), cpus=(Cpu(0, 0, 0), Cpu(1, 1, 1)))
    text = STATIC + "{align-by-socket: true}"
    check_against(parse(text, "f"), nodes(1))
    assert unfit(text, sockets) == (
        "cpuManagerPolicyOptions: align-by-socket needs at least as many NUMA nodes as sockets, "
        "this machine has 2 sockets and 1 NUMA nodes"
    )
    near = "topologyManagerPolicyOptions: {prefer-closest-numa-nodes: true}\n"
    check_against(parse(near, "f"), nodes(2, distance=False))
    check_against(parse(near + "topologyManagerPolicy: best-effort", "f"), nodes(2))
    assert unfit(near + "topologyManagerPolicy: best-effort", nodes(2, distance=False)).startswith(
        "topologyManagerPolicyOptions: prefer-closest-numa-nodes needs the distances between all NUMA nodes"
    )
    limit = "topologyManagerPolicyOptions: {max-allowable-numa-nodes: 8}\ntopologyManagerPolicy: restricted"
    check_against(parse(limit, "f"), nodes(8))
    check_against(parse("topologyManagerPolicy: restricted", "f"), nodes(9))
    assert unfit(limit, nodes(9)) == (
        "topologyManagerPolicy restricted: this machine has 9 NUMA nodes, max-allowable-numa-nodes is 8"
    )


def test_reserved_memory_fits_the_nodes() -> None:
    fits = MEMORY + "[{numaNode: 0, limits: {memory: 3Gi, hugepages-2Mi: 1Gi}}]"
    check_against(parse(fits, "f"), nodes(1))
    check_against(parse(MEMORY + "[{numaNode: 0, limits: {memory: 9Gi}}]", "f"), MACHINE)  # size not reported
    check_against(parse("reservedMemory: [{numaNode: 5, limits: {memory: 1}}]", "f"), nodes(1))  # not used
    assert unfit(MEMORY + "[{numaNode: 0, limits: {memory: 3073Mi}}]", nodes(1)) == (
        "reservedMemory: NUMA node 0 cannot keep 3073Mi of memory, it has 3Gi besides its huge pages"
    )
    assert unfit(MEMORY + "[{numaNode: 0, limits: {memory: 1, hugepages-1Gi: 1Gi}}]", nodes(1)) == (
        "reservedMemory: NUMA node 0 cannot keep 1Gi of hugepages-1Gi, it has 0"
    )
    assert unfit(MEMORY + "[{numaNode: 2, limits: {memory: 1}}]", nodes(2)) == (
        "reservedMemory: there is no NUMA node 2 (there are: 0, 1)"
    )


def test_all_errors_are_reported_together() -> None:
    text = MEMORY + "[{numaNode: 1, limits: {memory: 1}}]\nreservedSystemCPUs: 9"
    assert unfit(text, nodes(1)).splitlines() == [
        "2 problems:",
        "  reservedSystemCPUs: there is no CPU 9 (online: 0-1,3)",
        "  reservedMemory: there is no NUMA node 1 (there are: 0)",
    ]


def test_usable_memory_excludes_huge_pages() -> None:
    node = NumaNode(0, CpuSet(), 4 * GI, {2048: HugePages(512), 1048576: HugePages(1), 64: HugePages(0)})
    assert usable_memory(node) == {
        "memory": 2 * GI,
        "hugepages-2Mi": GI,
        "hugepages-1Gi": GI,
        "hugepages-64Ki": 0,
    }
    assert usable_memory(NumaNode(0, CpuSet())) == {}
    assert usable_memory(NumaNode(0, CpuSet(), 0)) == {"memory": 0}
    assert memory_misfits({0: {"memory": -5}}, {0: {"memory": 1}})[0].endswith(
        "it has 0 besides its huge pages"
    )
    assert memory_misfits({}, Config().reserved_memory) == []


def test_reserved_cpus_exist_and_leave_some_cpus() -> None:
    check_against(parse("koordinator: {reservedCPUs: 0, systemCPUs: 1}", "f"), MACHINE)
    everything = "koordinator: {reservedCPUs: 0-1, systemCPUs: 3, systemCPUsExclusive: %s}"
    check_against(parse(everything % "false", "f"), MACHINE)
    assert unfit(everything % "true", MACHINE) == (
        "koordinator: all CPUs are reserved; none are left for containers (online: 0-1,3)"
    )
    assert unfit("koordinator: {reservedCPUs: 2, systemCPUs: '7'}", MACHINE).splitlines() == [
        "2 problems:",
        "  koordinator.systemCPUs: CPU 7 is not online here (online: 0-1,3)",
        "  koordinator.reservedCPUs: CPU 2 is not online here (online: 0-1,3)",
    ]
    strict = (
        STATIC + "{strict-cpu-reservation: true}\nreservedSystemCPUs: 0-1\nkoordinator: {reservedCPUs: '3'}"
    )
    assert "all CPUs are reserved" in unfit(strict, MACHINE)


@pytest.mark.parametrize(
    ("text", "machine", "reported"),
    [
        ("reservedSystemCPUs: 0,2", MACHINE, "reservedSystemCPUs: CPU 2 is offline (online: 0-1,3)"),
        ("koordinator: {systemCPUs: 2}", MACHINE, "koordinator.systemCPUs: CPU 2 is not online here"),
        (
            "reservedSystemCPUs: 0-1,3",
            MACHINE,
            "reservedSystemCPUs: all CPUs are reserved; none are left for containers while CPU 2 is offline",
        ),
        (
            "koordinator: {systemCPUs: '2,4'}",
            replace(MACHINE, present=CpuSet([0, 1, 2, 3, 4])),
            "koordinator.systemCPUs: CPUs 2,4 are not online here",
        ),
        (MEMORY + "[{numaNode: 1, limits: {memory: 1Gi}}]", NODES, "NUMA node 1 cannot keep 1Gi of memory"),
        (MEMORY + "[{numaNode: 2, limits: {memory: 1Gi}}]", NODES, "there is no NUMA node 2"),
    ],
)
def test_a_daemon_starts_while_parts_of_the_machine_are_offline(
    text: str, machine: Machine, reported: str
) -> None:
    config = parse(text, "f.yaml")
    (away,) = check_start(config, machine)
    assert reported in away
    assert away.endswith(": this takes effect when it is back online")
    with pytest.raises(ConfigError, match=re.escape(reported)):
        check_against(config, machine)


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        ("reservedSystemCPUs: 0,9", MACHINE),
        ("reservedSystemCPUs: 0-3", MACHINE),
        ("koordinator: {systemCPUs: 9}", MACHINE),
        (MEMORY + "[{numaNode: 0, limits: {memory: 99Gi}}]", NODES),
        (MEMORY + "[{numaNode: 7, limits: {memory: 1Gi}}]", NODES),
    ],
)
def test_a_daemon_does_not_start_with_parts_that_never_existed(text: str, machine: Machine) -> None:
    with pytest.raises(ConfigError):
        check_start(parse(text, "f.yaml"), machine)


def test_possible_nodes_that_cannot_be_read_are_ignored() -> None:
    machine = replace(NODES, extra={"numa": {"possible": "0-x"}})
    check_start(parse(MEMORY + "[{numaNode: 0, limits: {memory: 1Gi}}]", "f"), machine)
    with pytest.raises(ConfigError, match="there is no NUMA node 2"):
        check_start(parse(MEMORY + "[{numaNode: 2, limits: {memory: 1Gi}}]", "f"), machine)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (
            "reservedSystemCPUs: 0",
            "reservedSystemCPUs: it reserves a part of some cores, and their other threads (CPU 4)",
        ),
        ("reservedSystemCPUs: '0,5'", "their other threads (CPUs 1,4) do not count as free"),
        ("reservedSystemCPUs: '0,4'", ""),
        (
            "kubeReserved: {cpu: 500m}",
            "systemReserved: they reserve 1 CPU, and a core has 2: the rest of a core",
        ),
        ("kubeReserved: {cpu: 2}\nsystemReserved: {cpu: 1}", "they reserve 3 CPUs"),
        ("kubeReserved: {cpu: 2}", ""),
        ("", ""),
    ],
)
def test_a_core_that_is_reserved_in_part_is_named(text: str, lost: str) -> None:
    machine = regular_machine(1, 1, 4, 2)
    with_option = parse(f"{STATIC}{{full-pcpus-only: true}}\n{text}\n", "f.yaml")
    found = partly_reserved_cores(with_option, machine)
    assert lost in found
    assert bool(found) is bool(lost)
    assert partly_reserved_cores(with_option, regular_machine(1, 1, 8, 1)) == ""
    assert partly_reserved_cores(parse(f"cpuManagerPolicy: static\n{text}\n", "f.yaml"), machine) == ""


def test_device_plugins_without_a_source_of_pods_are_named() -> None:
    machine = NODES
    text = "devicePlugins: {enabled: true}\n"
    (message,) = check_start(parse(text, "f.yaml"), machine)
    assert message.startswith("devicePlugins.enabled: no container gets devices")
    for source in (
        "kubelet: {podsApi: /p}",
        "kubelet: {pods: 'https://127.0.0.1:10250'}",
        "clusterFacts: {directory: /d}",
    ):
        assert check_start(parse(f"{text}{source}\n", "f.yaml"), machine) == []
    assert check_start(parse("devicePlugins: {enabled: false}\n", "f.yaml"), machine) == []
