"""An odd machine: NUMA nodes without memory and without CPUs, isolated CPUs, CPUs that go offline.

2 sockets with 2 NUMA nodes of 2 cores each, and 16 CPUs. Node 2 has CPUs and no memory, node 4 has memory
and no CPUs, CPUs 12-13 of node 3 are isolated, and a network card is on node 3. Each placement is also
checked from inside the container.

    python3 vm_odd_machine.py cgroupfs|systemd
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vm_guest import ALL, LONG_S, GuestDaemon, core_of, node_cpus, seen_in_container, step, wait
from vm_pools import BE_KINDS, SHARED_KINDS, GuestNode
from vm_topology import MIB, SETTINGS, TOPOLOGY, TopologyNode

from proxy.model.idset import CpuSet, Mask

NODE_WITHOUT_MEMORY, MEMORY_ONLY_NODE, CARD_NODE = 2, 4, 3
WITH_MEMORY = Mask([0, 1, 3, MEMORY_ONLY_NODE])
ISOLATED = CpuSet([12, 13])
CPUS = Path("/sys/devices/system/cpu")
BUSY = ("sh", "-c", "while :; do :; done & while :; do :; done & wait")
PAGES = 8
HUGE = Path(f"/sys/devices/system/node/node{CARD_NODE}/hugepages/hugepages-2048kB/nr_hugepages")
CDI = Path("/etc/cdi/made.json")


def check_topology(daemon: GuestDaemon) -> None:
    """Check the topology that the daemon reads."""
    facts: dict[str, Any] = json.loads(daemon.cli("topology", "--json").stdout)
    numa = facts["numa"]
    found = {key: numa[key] for key in ("online", "has_cpu", "has_memory", "memory_only", "cpu_only")}
    step(f"NUMA nodes: {found}, isolated CPUs {facts['cpus']['isolated']}")
    assert (found["online"], found["has_cpu"], found["has_memory"]) == ("0-4", "0-3", "0-1,3-4")
    assert (numa["memory_only"], numa["cpu_only"]) == ([MEMORY_ONLY_NODE], [NODE_WITHOUT_MEMORY])
    assert facts["cpus"]["isolated"] == str(ISOLATED)
    assert numa["nodes"][0]["distance"] == [10, 12, 21, 21, 32]


def check_seen_in_container(node: GuestNode | TopologyNode, container: str, cpus: CpuSet, mems: Mask) -> None:
    """Check that a program in a container has these CPUs and memory nodes."""
    assert seen_in_container(node.cri, container) == (cpus, mems), (
        seen_in_container(node.cri, container),
        cpus,
        mems,
    )


def node_without_memory(node: GuestNode) -> None:
    """An owner has memory of the nearest node that has some; an owner of isolated CPUs is on them."""
    own = node_cpus(NODE_WITHOUT_MEMORY)
    node.run("lse", own)
    node.check(("lse",), own, Mask([3]))
    check_seen_in_container(node, node.ids["lse"], own, Mask([3]))
    step(f"LSE has {own} of node {NODE_WITHOUT_MEMORY}, which has no memory, and memory of node 3")
    node.run("lsr", ISOLATED)
    node.check(("lsr",), ISOLATED, Mask([3]))
    check_seen_in_container(node, node.ids["lsr"], ISOLATED, Mask([3]))
    step(f"LSR has the isolated CPUs {ISOLATED}")
    node.check(SHARED_KINDS, ALL - own - ISOLATED)
    node.check(BE_KINDS, ALL - own)
    check_seen_in_container(node, node.ids["burstable"], ALL - own - ISOLATED, WITH_MEMORY)


@contextmanager
def offline(cpus: CpuSet) -> Iterator[None]:
    """Set CPUs offline within the block."""
    for cpu in cpus:
        (CPUS / f"cpu{cpu}/online").write_text("0")
    try:
        yield
    finally:
        for cpu in cpus:
            (CPUS / f"cpu{cpu}/online").write_text("1")


def cpus_go_away(node: GuestNode) -> None:
    """A CPU of an owner and a shared CPU go offline under load; another CPU replaces the owned one."""
    pod = node.pod("whole", name="busy")
    two = {"cpu_period": 100_000, "cpu_quota": 200_000, "cpu_shares": 2048}
    node.ids["busy"] = node.cri.create(pod, timeout=LONG_S, command=BUSY, **two)
    node.cri.start(node.ids["busy"])
    own = node.place("busy").cpus
    assert len(own) == 2, own
    load = node.cri.create(node.pod("burstable", name="load"), timeout=LONG_S, command=BUSY, cpu_shares=512)
    node.cri.start(load)
    node.ids["load"] = load
    before = node.snapshot()
    rest = ALL - before["lse"].cpus - before["lsr"].cpus - own
    node.check((*SHARED_KINDS, "load"), rest)
    gone = CpuSet([max(own), max(rest)])
    with offline(gone):
        here = CpuSet.parse((CPUS / "online").read_text())
        assert here == ALL - gone
        wait("another CPU to replace the offline one", lambda: len(node.place("busy").effective - gone) == 2)
        now = node.place("busy").effective
        assert own - gone <= now, (own, now)
        assert now - own <= rest - gone, (now, rest)
        left = rest - gone - now
        node.check(("busy",), now, limit=LONG_S)
        node.check((*SHARED_KINDS, "load"), left, limit=LONG_S)
        check_seen_in_container(node, node.ids["busy"], now, before["busy"].mems)
        check_seen_in_container(node, load, left, WITH_MEMORY)
        late = ALL - before["lse"].cpus - own - gone - now
        node.run("be", name="late")
        node.check(("late",), late)
        step(f"CPUs {gone} went offline under load: the owner has {now}, other containers {left}")
    took = wait("all to be as before", lambda: before.items() <= node.snapshot().items())
    check_seen_in_container(node, node.ids["busy"], own, before["busy"].mems)
    step(f"the CPUs are online, and all places are as before after {took:.1f} s")
    for name in ("busy", "load", "late"):
        node.cri.stop(node.ids.pop(name))


def a_packet_pod(node: TopologyNode) -> None:
    """Exclusive CPUs, memory, huge pages and a network card of one node, as a packet processor needs them."""
    (card,) = {
        path.name
        for path in Path("/sys/class/net").iterdir()
        for directory in path.resolve().parents
        if (directory / "numa_node").exists()
        and (directory / "numa_node").read_text().strip() == str(CARD_NODE)
    }
    CDI.parent.mkdir(exist_ok=True)
    device = {"name": "one", "containerEdits": {"netDevices": [{"hostInterfaceName": card}]}}
    CDI.write_text(json.dumps({"cdiVersion": "1.1.0", "kind": "made.example/nic", "devices": [device]}))
    place = node.run("packets", "main", 2, cdi=["made.example/nic=one"], huge_pages={"2MB": PAGES * 2 * MIB})
    assert place.cpus <= node_cpus(CARD_NODE), place
    assert place.mems == Mask([CARD_NODE]), place
    assert all(core_of(cpu) <= place.cpus for cpu in place.cpus), f"not whole cores: {place}"
    check_seen_in_container(node, node.ids["packets/main"], place.cpus, place.mems)
    explanation = node.daemon.explain("packets")
    assert "numa_node of " in explanation, explanation
    step(f"packets: {card} is on node {CARD_NODE}, and so are CPUs {place.cpus}, its memory and huge pages")


def strict_pods(node: TopologyNode) -> None:
    """Under restricted no pod gets CPUs of a node without memory; under best-effort it does."""
    for name, cpus in (("a", 4), ("b", 2)):
        place = node.run(name, "main", cpus)
        (home,) = place.mems
        assert home in (0, 1, CARD_NODE), place
        assert place.cpus <= node_cpus(home), place
        check_seen_in_container(node, node.ids[f"{name}/main"], place.cpus, place.mems)
        step(f"{name}: {place.cpus}, memory of {place.mems}")
    message = node.check_refused("far", 4)
    assert message.startswith(TOPOLOGY), message
    step(f"4 CPUs are only on node {NODE_WITHOUT_MEMORY}, which has no memory: {message}")
    node.restart(topologyManagerPolicy="best-effort")
    place = node.run("far", "main", 4)
    assert place.mems <= WITH_MEMORY, place
    assert place.mems, place
    check_seen_in_container(node, node.ids["far/main"], place.cpus, place.mems)
    step(f"best-effort places it on {place.cpus}, memory of {place.mems}")


def main() -> None:
    subprocess.run(["modprobe", "virtio_net"], check=False)
    step(f"CPUs {ALL}, nodes {' '.join(str(node_cpus(n)) for n in range(5))}")
    daemon, node = GuestDaemon(), GuestNode(sys.argv[1])
    check_topology(daemon)
    for kind in (*SHARED_KINDS, *BE_KINDS):
        node.run(kind)
    node.check((*SHARED_KINDS, *BE_KINDS), ALL)
    node_without_memory(node)
    cpus_go_away(node)
    for pod in node.cri.list_pods():
        node.cri.stop_pod(pod.id)
        node.cri.remove_pod(pod.id)
    assert daemon.stop() == 0
    step("now with the memory manager and policy restricted")

    HUGE.write_text(str(PAGES))
    assert int(HUGE.read_text()) == PAGES
    daemon.configure(**SETTINGS)
    daemon.start()
    strict = TopologyNode(sys.argv[1], daemon)
    a_packet_pod(strict)
    strict_pods(strict)
    strict.remove(*strict.pods)
    assert daemon.status()["exclusive"] == []
    assert daemon.stop() == 0
    step("all is given back")


if __name__ == "__main__":
    main()
