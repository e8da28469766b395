"""The scenario of devices that topoproxy assigns, in a virtual machine of 2 sockets with 2 NUMA nodes each.

A device plugin reports two devices on each node. Under ``single-numa-node`` pods of four CPUs and two
devices get both on one node. The next pod is rejected until devices are free again. An unhealthy device is
not allocated. The daemon and the plugin are killed meanwhile: every container keeps its devices, and no
device is allocated twice.

    python3 vm_devices.py cgroupfs|systemd
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vm_guest import DIRECTORY, GuestDaemon, group_of, page_of, step, wait
from vm_topology import SETTINGS, TOPOLOGY, TopologyNode, nodes_of

RESOURCE = "example.com/card"
FACTS, PLUGIN, SOCKETS = DIRECTORY / "cluster", DIRECTORY / "plugin", DIRECTORY / "device-plugins"
ADMIN = DIRECTORY / "admin.sock"
DEVICES = {f"card{number}": number // 2 for number in range(8)}
"""The NUMA node of each device."""
TOPOPROXY_SETTINGS = {
    **SETTINGS,
    "topologyManagerPolicy": "single-numa-node",
    "clusterFacts": {"directory": str(FACTS)},
    "devicePlugins": {"enabled": True, "socketDirectory": str(SOCKETS), "timeout": "60s"},
}


@dataclass
class GuestPluginProcess:
    """The plugin of ``file_plugin.py``."""

    process: subprocess.Popen[bytes] | None = None

    def device(self, name: str, health: str) -> None:
        draft = PLUGIN / name
        draft.write_text(f"{health} {DEVICES[name]}")
        draft.rename(PLUGIN / "devices" / name)

    def start(self) -> None:
        line = [sys.executable, "file_plugin.py", str(PLUGIN), str(SOCKETS), RESOURCE]
        with Path("/out/plugin.log").open("ab") as log:  # not a pipe: nothing reads the output of the plugin
            self.process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill9(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)


@dataclass
class PodsFile:
    """The pods file that a cluster agent would write."""

    items: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, cpus: int, cards: int) -> None:
        limits = {"cpu": str(cpus), "memory": "32Mi", RESOURCE: str(cards)}
        container = {"name": "main", "resources": {"requests": limits, "limits": limits}}
        metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
        status = {"qosClass": "Guaranteed"}
        self.items.append({"metadata": metadata, "spec": {"containers": [container]}, "status": status})
        page = {
            "schema": "topoproxy-cluster-facts/1",
            "kind": "pods",
            "node": "guest",
            "readAt": time.time(),
            "resourceVersion": str(len(self.items)),
            "items": self.items,
        }
        draft = FACTS / "draft"
        draft.write_text(json.dumps(page))
        draft.rename(FACTS / "pods.json")


def holders() -> dict[str, list[str]]:
    """Return the containers that hold each device, as the daemon reports them."""
    page: Any = page_of(ADMIN, "/devices")
    return {each["id"]: each["containers"] for each in page["managed"]}


def healthy() -> int:
    page: Any = page_of(ADMIN, "/devices/capacity")
    return sum(int(each["allocatable"]) for each in page["resources"] if each["name"] == RESOURCE)


def cards_of(node: TopologyNode, pod: str) -> set[str]:
    """Return the devices in a container's environment."""
    procs, found = group_of(node.ids[f"{pod}/main"]) / "cgroup.procs", set[str]()

    def is_there() -> bool:
        """Return whether the process already runs the container's program, with its environment."""
        environ = Path(f"/proc/{procs.read_text().split()[0]}/environ").read_text()
        for entry in environ.split("\0"):
            if entry.startswith("DEVICES="):
                found.update(entry.removeprefix("DEVICES=").split(","))
        return bool(found)

    wait("the container's environment", is_there)
    return found


def run(node: TopologyNode, pods_file: PodsFile, pod: str, cards: int = 2) -> None:
    """Run a pod, and check that its CPUs, memory and devices are on one NUMA node."""
    pods_file.add(pod, 4, cards)
    place = node.run(pod, "main", 4)
    given = cards_of(node, pod)
    homes = nodes_of(place.cpus)
    assert len(homes) == 1, f"{pod}: {place}"
    assert place.mems == homes, f"{pod}: {place}"
    assert len(given) == cards, f"{pod}: {given}"
    assert {DEVICES[card] for card in given} == set(homes), f"{pod}: {place}, {given}"
    held = {card for card, containers in holders().items() if containers == [f"default/{pod}/main"]}
    assert held == given, f"{pod}: {held}, {given}"
    step(f"{pod}: CPUs {place.cpus}, memory of {place.mems}, {' '.join(sorted(given))}")


def main() -> None:
    FACTS.mkdir(parents=True)
    (PLUGIN / "devices").mkdir(parents=True)
    (PLUGIN / "library").mkdir()
    plugin, pods_file = GuestPluginProcess(), PodsFile()
    for name in DEVICES:
        plugin.device(name, "healthy")
    node = TopologyNode(sys.argv[1], GuestDaemon(**TOPOPROXY_SETTINGS))
    plugin.start()
    wait("eight devices", lambda: healthy() == len(DEVICES))
    for pod in ("a", "b", "c", "d"):
        run(node, pods_file, pod)
    before = holders()

    pods_file.add("late", 2, 2)
    message = node.check_refused("late", 2)
    assert message.startswith(TOPOLOGY) or "unavailable" in message, message
    assert holders() == before
    step(f"no devices are left: {message}")

    node.restart(crash=True, **TOPOPROXY_SETTINGS)
    plugin.kill9()
    plugin.start()
    wait("eight devices again", lambda: healthy() == len(DEVICES))
    assert holders() == before
    assert all(cards_of(node, pod) for pod in ("a", "b", "c", "d"))
    step("daemon and plugin were killed: every container keeps its devices")

    freed = sorted(cards_of(node, "b"))
    node.remove("b", "late")
    wait("free devices", lambda: all(not holders()[card] for card in freed))
    plugin.device(freed[0], "unhealthy")
    wait("an unhealthy device", lambda: healthy() == len(DEVICES) - 1)
    pods_file.add("two", 4, 2)
    step(f"one of two is unhealthy: {node.check_refused('two', 4)}")
    run(node, pods_file, "one", 1)
    assert cards_of(node, "one") == {freed[1]}
    plugin.device(freed[0], "healthy")
    wait("eight devices at last", lambda: healthy() == len(DEVICES))
    node.remove("one", "two")
    run(node, pods_file, "again")
    assert cards_of(node, "again") == set(freed)

    node.remove(*node.pods)
    wait("all devices to be free", lambda: not any(holders().values()))
    assert node.daemon.status()["exclusive"] == []
    plugin.kill9()
    assert node.daemon.stop() == 0
    step("all is given back")


if __name__ == "__main__":
    main()
