"""The scenario of the topology manager, in a virtual machine of 2 sockets with 2 NUMA nodes of 8 CPUs each.

CPUs 0-1 are reserved, memory is counted, a network card is on node 3. Under ``restricted`` each pod is placed
on one node, until a pod fits only across nodes: it is rejected, and placed under ``best-effort``. With scope
``pod`` the containers of a pod share a node.

    python3 vm_topology.py cgroupfs|systemd
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cri import Cri, cpuset_root
from vm_guest import (
    ALL,
    LONG_S,
    SOCKET,
    GuestDaemon,
    Place,
    core_of,
    group_of,
    node_cpus,
    place_in,
    refusal,
    step,
    wait,
)

from proxy.model.idset import CpuSet, Mask

MIB = 1 << 20
RESERVED = CpuSet([0, 1])
TOPOLOGY = "TopologyAffinityError: Resources cannot be allocated with Topology locality"
CDI = Path("/etc/cdi/made.json")
SETTINGS = {
    "reservedSystemCPUs": str(RESERVED),
    "topologyManagerPolicy": "restricted",
    "memoryManagerPolicy": "Static",
    "reservedMemory": [{"numaNode": 0, "limits": {"memory": "64Mi"}}],
}


def whole_cpus(cpus: int, memory: int = 32 * MIB) -> dict[str, Any]:
    """Return the resources that kubelet requests for a Guaranteed container with whole CPUs."""
    quota = {"cpu_period": 100_000, "cpu_quota": cpus * 100_000}
    return {**quota, "cpu_shares": cpus * 1024, "memory_limit_in_bytes": memory}


def nodes_of(cpus: CpuSet) -> Mask:
    """Return the NUMA nodes of CPUs from sysfs."""
    return Mask([node for node in range(4) if not node_cpus(node).isdisjoint(cpus)])


@dataclass
class TopologyNode:
    """A client of the daemon in the role of kubelet.

    Attributes:
        ids: The ids of containers by ``pod/container``.
    """

    driver: str
    daemon: GuestDaemon
    cri: Cri = field(default_factory=lambda: Cri(SOCKET, ""))
    ids: dict[str, str] = field(default_factory=dict)
    pods: dict[str, str] = field(default_factory=dict)

    def pod(self, name: str, total: Mapping[str, int] | None = None) -> str:
        parent = f"kubepods-pod{name}.slice" if self.driver == "systemd" else f"/kubepods/pod{name}"
        self.pods[name] = self.cri.run_pod(name, cgroup_parent=parent, resources=total)
        return self.pods[name]

    def run(self, pod: str, name: str, cpus: int, **more: Any) -> Place:
        """Create and start a container in a pod, which is created if necessary; returns its place."""
        if pod not in self.pods:
            self.pod(pod)
        container = self.cri.create(self.pods[pod], name, timeout=LONG_S, **(whole_cpus(cpus) | more))
        self.cri.start(container)
        self.ids[f"{pod}/{name}"] = container
        place = self.place(f"{pod}/{name}")
        assert place.is_at(place.cpus, place.mems), f"{pod}/{name}: {place}"
        assert len(place.cpus) == cpus, f"{pod}/{name}: {place}"
        assert place.cpus.isdisjoint(RESERVED), f"{pod}/{name}: {place}"
        return place

    def place(self, name: str) -> Place:
        return place_in(group_of(self.ids[name]))

    def snapshot(self) -> dict[str, Place]:
        return {name: self.place(name) for name in self.ids}

    def remove(self, *names: str) -> None:
        for name in names:
            pod = self.pods.pop(name)
            self.cri.stop_pod(pod)
            self.cri.remove_pod(pod)
            self.ids = {key: value for key, value in self.ids.items() if not key.startswith(f"{name}/")}

    def restart(self, *, crash: bool = False, **settings: object) -> None:
        """Restart the daemon, optionally with other settings."""
        before = self.snapshot()
        if crash:
            self.daemon.kill9()
        else:
            assert self.daemon.stop() == 0
        if settings:
            self.daemon.configure(**{**SETTINGS, **settings})
        self.daemon.start()
        wait("the daemon to be ready", lambda: bool(self.daemon.status()["ready"]))
        configs, self.cri = self.cri, Cri(SOCKET, "")
        self.cri.adopt(configs)
        configs.close()
        assert self.snapshot() == before, "a restart moves no container"

    def groups(self) -> set[str]:
        """Return the cgroups of all pods."""
        return {str(path) for path in cpuset_root().rglob("*pod*") if path.is_dir()}

    def check_refused(self, pod: str, cpus: int, *, whole_pod: bool = False) -> str:
        """Check that a pod is rejected and that this changes no state; returns the message."""
        if not whole_pod:
            self.pod(pod)
        before, groups, state = self.snapshot(), self.groups(), self.daemon.status()
        if whole_pod:
            status, message = refusal(lambda: self.pod(pod, whole_cpus(cpus)))
        else:
            status, message = refusal(
                lambda: self.cri.create(self.pods[pod], timeout=LONG_S, **whole_cpus(cpus))
            )
        assert status is grpc.StatusCode.FAILED_PRECONDITION, (status, message)
        after = self.daemon.status()
        assert (self.snapshot(), self.groups()) == (before, groups)
        for key in ("pools", "exclusive", "containers", "memory"):
            assert after[key] == state[key], key
        rejections, others = problems(after)
        assert others == problems(state)[1]
        assert [one for one in rejections if f"pod=default/{pod} " in one], (pod, rejections)
        return message


def problems(status: Any) -> tuple[list[str], list[str]]:
    """Return the rejections and the other problems of a status."""
    messages = [problem["what"] for problem in status["problems"]]
    rejections = [one for one in messages if one.startswith("rejected a ")]
    return rejections, [one for one in messages if one not in rejections]


def one_node_each(node: TopologyNode) -> None:
    """Pods of 6 CPUs, restricted: each on one node, with memory of that node."""
    taken = Mask()
    for name in ("a", "b", "c", "d"):
        place = node.run(name, "main", 6, memory_limit_in_bytes=64 * MIB)
        home = nodes_of(place.cpus)
        assert len(home) == 1, f"{name}: {place}"
        assert place.mems == home, f"{name}: {place}"
        assert home.isdisjoint(taken), f"{name}: {place}"
        taken |= home
        if home != Mask([0]):
            assert all(core_of(cpu) <= place.cpus for cpu in place.cpus), f"{name}: not whole cores: {place}"
        assert f"with CPUs {place.cpus} of its own and memory of node {home}." in node.daemon.explain(name)
    step(f"one node each: {', '.join(f'{n} {p.cpus} mems {p.mems}' for n, p in node.snapshot().items())}")


def across_nodes(node: TopologyNode) -> None:
    """A pod that fits only across nodes is rejected under restricted, and placed under best-effort."""
    message = node.check_refused("wide", 4)
    assert message.startswith(TOPOLOGY), message
    step(f"restricted rejects: {message}")
    explanation = node.daemon.explain("wide")
    assert "Rejected with TopologyAffinityError (gRPC status 9, FAILED_PRECONDITION)." in explanation, (
        explanation
    )
    node.restart(topologyManagerPolicy="single-numa-node")
    assert node.daemon.cli("explain", "wide").returncode == 1, "rejections are not kept over a restart"
    node.remove("wide")
    assert node.check_refused("wide", 4).startswith(TOPOLOGY)
    step("single-numa-node rejects the pod too")
    node.restart(topologyManagerPolicy="best-effort")
    place = node.run("wide", "main", 4)
    homes = nodes_of(place.cpus)
    assert len(homes) == 2, place
    # As in kubelet: no two nodes are left for its memory, so node 0 is chosen, which has no CPU left.
    assert place.mems == Mask([0]), place
    step(f"best-effort places the pod on {place.cpus}, nodes {homes}, memory of {place.mems}")
    assert "Policy best-effort" in node.daemon.explain("wide")
    node.restart(crash=True)
    step("kill -9: the placement is unchanged")


def a_card_decides_the_node(node: TopologyNode) -> None:
    """A pod with a network card of node 3 gets CPUs and memory there; the card is a mount or a CDI device."""
    cards = [
        path.name
        for path in Path("/sys/class/net").iterdir()
        for directory in path.resolve().parents
        if (directory / "numa_node").exists() and (directory / "numa_node").read_text().strip() == "3"
    ]
    assert cards, [path.resolve() for path in Path("/sys/class/net").iterdir()]
    card = cards[0]
    CDI.parent.mkdir(exist_ok=True)
    device = {"name": "one", "containerEdits": {"netDevices": [{"hostInterfaceName": card}]}}
    CDI.write_text(json.dumps({"cdiVersion": "1.1.0", "kind": "made.example/nic", "devices": [device]}))
    requests: dict[str, dict[str, Any]] = {
        "mount": {"mounts": {"/card": f"/sys/class/net/{card}"}},
        "cdi": {"cdi": ["made.example/nic=one"]},
    }
    for name, request in requests.items():
        place = node.run(name, "main", 4, **request)
        assert (nodes_of(place.cpus), place.mems) == (Mask([3]), Mask([3])), f"{name}: {place}"
        explanation = node.daemon.explain(name)
        assert "numa_node of " in explanation, explanation
        step(f"by {name}: {card} is on node 3, and the pod has CPUs {place.cpus}, memory of {place.mems}")
    node.remove(*requests)


def pods_as_a_whole(node: TopologyNode) -> None:
    """Scope pod: two containers of a pod are on one node, even if each alone would be elsewhere."""
    for name, parts in {"pair": (4, 2), "twin": (2, 4)}.items():
        node.pod(name, whole_cpus(sum(parts), 64 * MIB))
        places = [node.run(name, f"c{i}", cpus) for i, cpus in enumerate(parts)]
        homes = {nodes_of(place.cpus) for place in places}
        assert len(homes) == 1, places
        assert all(place.mems == nodes_of(place.cpus) for place in places), places
        assert len(homes.pop()) == 1, places
        step(f"{name}: {' and '.join(f'{p.cpus} mems {p.mems}' for p in places)}")
    assert nodes_of(node.place("pair/c0").cpus) != nodes_of(node.place("twin/c0").cpus)

    # Under restricted all resources must be on the same nodes, so the memory must also need two nodes.
    node.pod("big", whole_cpus(14, 600 * MIB))
    places = [node.run("big", f"c{i}", 7, memory_limit_in_bytes=300 * MIB) for i in range(2)]
    homes = nodes_of(places[0].cpus | places[1].cpus)
    assert len(homes) == 2, places
    step(f"a pod of 14: {places[0].cpus} and {places[1].cpus}, nodes {homes}")

    message = node.check_refused("late", 4, whole_pod=True)
    assert message.startswith(TOPOLOGY), message
    step(f"a sandbox is rejected: {message}")
    explanation = node.daemon.explain("default/late")
    assert "Pod default/late was rejected" in explanation, explanation
    assert "for the pod" in explanation, explanation
    node.restart(crash=True)
    node.remove("twin")
    node.pod("late", whole_cpus(4))
    place = node.run("late", "main", 4)
    assert len(nodes_of(place.cpus)) == 1, place
    step(f"with enough free CPUs the pod is placed: {place.cpus} mems {place.mems}")


def main() -> None:
    subprocess.run(["modprobe", "virtio_net"], check=False)
    step(f"CPUs {ALL}, nodes {' '.join(str(node_cpus(n)) for n in range(4))}")
    node = TopologyNode(sys.argv[1], GuestDaemon(**SETTINGS))
    one_node_each(node)
    across_nodes(node)
    node.remove("a", "b", "c", "d", "wide")
    node.restart(topologyManagerPolicy="restricted")
    a_card_decides_the_node(node)
    node.restart(topologyManagerScope="pod", topologyManagerPolicy="restricted")
    pods_as_a_whole(node)
    node.remove(*node.pods)
    (free,) = {str(table["resources"]["memory"]["given"]) for table in node.daemon.status()["memory"]}
    assert free == "0"
    assert node.daemon.status()["exclusive"] == []
    assert node.daemon.stop() == 0
    step("all is given back")


if __name__ == "__main__":
    main()
