"""The scenario of the pools, in a virtual machine with several NUMA nodes.

Owners have the CPUs of an annotation or CPUs that the daemon picks, and memory of their nodes. Other
containers leave these CPUs before an owner starts. Updates, crashes and systemd do not change that.

    python3 vm_pools.py cgroupfs|systemd
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from cri import Cri, is_v2
from vm_guest import (
    ALL,
    LONG_S,
    NODES,
    RECONCILE_PERIOD_S,
    RUNTIME,
    SOCKET,
    GuestDaemon,
    Place,
    core_of,
    group_of,
    node_cpus,
    place_in,
    refused,
    step,
    wait,
)

from proxy.model.idset import CpuSet, Mask


@dataclass(frozen=True)
class GuestPodKind:
    """Koordinator's label, kubelet's cgroup parent, and the CPU request and limit in milli-CPUs."""

    label: str
    parent: str
    request: int
    limit: int

    @property
    def resources(self) -> dict[str, int]:
        found = {"cpu_period": 100_000, "cpu_shares": max(2, self.request * 1024 // 1000)}
        return found | ({"cpu_quota": self.limit * 100} if self.limit else {})


KINDS = {
    "lse": GuestPodKind("LSE", "", 4000, 4000),
    "lsr": GuestPodKind("LSR", "", 2000, 2000),
    "whole": GuestPodKind("", "", 4000, 4000),
    "ls": GuestPodKind("LS", "burstable", 500, 800),
    "part": GuestPodKind("", "", 500, 500),
    "burstable": GuestPodKind("", "burstable", 1000, 2000),
    "system": GuestPodKind("SYSTEM", "burstable", 200, 500),
    "be": GuestPodKind("BE", "besteffort", 0, 0),
    "besteffort": GuestPodKind("", "besteffort", 0, 0),
}
SHARED_KINDS, BE_KINDS = ("ls", "part", "burstable"), ("be", "besteffort")


@dataclass
class GuestNode:
    """A client of the daemon in the role of kubelet.

    Attributes:
        ids: The ids of containers by the names of their pods.
    """

    driver: str
    cri: Cri = field(default_factory=lambda: Cri(SOCKET, ""))
    ids: dict[str, str] = field(default_factory=dict)
    _groups: dict[str, Path] = field(default_factory=dict)

    def pod(self, kind: str, cpus: CpuSet | None = None, name: str = "") -> str:
        what, name = KINDS[kind], name or kind
        parts = ["kubepods", *filter(None, [what.parent]), f"pod{name}"]
        parent = f"{'-'.join(parts)}.slice" if self.driver == "systemd" else "/" + "/".join(parts)
        status = {"scheduling.koordinator.sh/resource-status": json.dumps({"cpuset": str(cpus)})}
        return self.cri.run_pod(
            name,
            labels={"koordinator.sh/qosClass": what.label} if what.label else {},
            annotations=status if cpus else {},
            cgroup_parent=parent,
            namespace="kube-system" if what.label == "SYSTEM" else "default",
        )

    def run(self, kind: str, cpus: CpuSet | None = None, name: str = "") -> None:
        pod = self.pod(kind, cpus, name)
        container = self.cri.create(pod, timeout=LONG_S, **KINDS[kind].resources)
        self.cri.start(container)
        self.ids[name or kind] = container

    def place(self, name: str) -> Place:
        return place_in(self.group(name))

    def group(self, name: str) -> Path:
        container = self.ids[name]
        if container not in self._groups:
            self._groups[container] = group_of(container)
        return self._groups[container]

    def check(self, names: tuple[str, ...], cpus: CpuSet, mems: Mask | None = None, limit: float = 0) -> None:
        """Check that containers have these CPUs and memory nodes, within the time limit."""
        for name in names:
            with suppress(AssertionError):
                wait(name, lambda name=name: self.place(name).is_at(cpus, mems), limit)
            found = self.place(name)
            assert found.is_at(cpus, mems), f"{name}: {found}, expected CPUs {cpus}, memory {mems}"

    def sandboxes(self) -> dict[str, CpuSet]:
        """Return the CPUs of the sandbox of each container's pod: the sibling of the container's cgroup."""
        found: dict[str, CpuSet] = {}
        for name in self.ids:
            own = self.group(name)
            for other in own.parent.iterdir():
                if other.is_dir() and other != own:
                    found[name] = place_in(other).effective
        return found

    def check_sandboxes(self, shared: CpuSet, be: CpuSet, limit: float = 0) -> None:
        """Check that sandboxes are within the pools of their pods; those of owners within the shared pool."""

        def kept() -> bool:
            found = self.sandboxes()
            assert found.keys() == self.ids.keys()
            return all(cpus <= (be if name in BE_KINDS else shared) for name, cpus in found.items())

        with suppress(AssertionError):
            wait("sandboxes", kept, limit)
        assert kept(), self.sandboxes()

    def snapshot(self) -> dict[str, Place]:
        return {name: self.place(name) for name in self.ids}


@contextmanager
def frozen_runtime() -> Iterator[None]:
    """Suspend the runtime (SIGSTOP) within the block, so that it receives nothing."""
    pid = int(subprocess.check_output(["pidof", RUNTIME.stem], text=True).split()[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def owners_on_nodes(node: GuestNode) -> None:
    """LSE on a far node, LSR, and whole CPUs that the daemon picks; other containers leave before."""
    far = max(int(p.name[4:]) for p in NODES.glob("node[0-9]*") if node_cpus(int(p.name[4:])))
    named = CpuSet(list(node_cpus(far))[:4])
    pod = node.pod("lse", named)
    with frozen_runtime():
        request = node.cri.create_request(pod, **KINDS["lse"].resources)
        call = node.cri.method("CreateContainer").future(request, timeout=LONG_S)
        node.check((*SHARED_KINDS, *BE_KINDS), ALL - named, limit=LONG_S)
        assert not call.done()
    node.ids["lse"] = call.result().container_id
    node.cri.start(node.ids["lse"])
    node.check(("lse",), named, Mask([far]))
    step(f"LSE is on {named}, memory of node {far}; other containers had left before")

    lent = CpuSet(list(node_cpus(1))[:2])
    node.run("lsr", lent)
    node.check(("lsr",), lent, Mask([1]))
    node.check(SHARED_KINDS, ALL - named - lent)
    node.check(BE_KINDS, ALL - named)
    step(f"LSR is on {lent}, and BE may borrow them")

    node.run("whole")
    found = node.place("whole")
    (home,) = [i for i in range(far + 1) if found.cpus <= node_cpus(i)]
    assert len(found.cpus) == 4, found
    assert all(core_of(cpu) <= found.cpus for cpu in found.cpus), f"not whole cores: {found}"
    assert found.mems == Mask([home]), found
    assert found.cpus.isdisjoint(named | lent), found
    node.check(SHARED_KINDS, ALL - named - lent - found.cpus)
    node.check(BE_KINDS, ALL - named - found.cpus)
    step(f"a whole-CPU container is on {found.cpus}, node {home}, in whole cores")
    # The sandboxes of owners were created last; the daemon reconciles them at the next owner.
    node.check_sandboxes(ALL - named - lent - found.cpus, ALL - named - found.cpus, LONG_S)
    step(f"sandboxes are within the pools: {', '.join(sorted(map(str, set(node.sandboxes().values()))))}")

    assert refused(lambda: node.run("lse", named, "clash")) is grpc.StatusCode.FAILED_PRECONDITION
    beyond = CpuSet([max(ALL) + 8])
    assert refused(lambda: node.run("lse", beyond, "absent")) is grpc.StatusCode.INVALID_ARGUMENT


def updates_and_crash(node: GuestNode, daemon: GuestDaemon) -> None:
    """Updates of kubelet, a crash, and writes while the daemon is down do not change the placement."""
    before = node.snapshot()
    node.cri.update(node.ids["ls"], cpuset_cpus=str(ALL))
    node.cri.update(node.ids["lse"], cpu_quota=200_000, cpu_period=100_000)
    node.cri.update(node.ids["whole"], cpuset_cpus="0-1", cpuset_mems="0")
    wait("updates to change nothing", lambda: node.snapshot() == before, 10 * RECONCILE_PERIOD_S)
    daemon.kill9()
    assert node.snapshot() == before
    (node.group("be") / "cpuset.cpus").write_text(str(ALL))
    if is_v2():  # the container's own file is unchanged, but its effective CPUs are fewer
        (node.group("ls").parent / "cpuset.cpus").write_text("0-3")
        assert node.place("ls").effective == CpuSet(range(4)), node.place("ls")
    daemon.start()
    node.cri.close()
    configs = node.cri
    node.cri = Cri(SOCKET, "")
    node.cri.adopt(configs)
    took = wait("everything to be as before the crash", lambda: node.snapshot() == before)
    step(f"killed, cpusets changed from outside, started again: all as before after {took:.1f} s")


def systemd_writes_back(node: GuestNode) -> None:
    """A daemon-reload makes systemd write the cpusets that runc sent; old versions send wrong ones."""
    before = node.snapshot()
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    moved = [name for name, place in node.snapshot().items() if place != before[name]]
    took = wait(
        "systemd's values to be repaired", lambda: node.snapshot() == before, RECONCILE_PERIOD_S + LONG_S
    )
    owned = node.place("lse").cpus | node.place("whole").cpus
    node.check_sandboxes(ALL - owned - node.place("lsr").cpus, ALL - owned, RECONCILE_PERIOD_S + LONG_S)
    step(f"daemon-reload moved {', '.join(moved) or 'no container'}; all as before after {took:.1f} s")


def v2_controllers() -> str:
    """Describe v2's controllers on a hybrid machine; they include those that v1 may not have."""
    unified = Path("/sys/fs/cgroup/unified/cgroup.controllers")
    if not unified.exists():
        return ""
    found = ["blkio" if name == "io" else name for name in unified.read_text().split()]
    options = (option.partition("cgroup_no_v1=")[2] for option in Path("/proc/cmdline").read_text().split())
    disabled = {name for option in options for name in option.split(",") if name}
    assert disabled <= {*found}, (disabled, found)
    return f" (v2 beside it has {', '.join(found) or 'no controllers'})"


def main() -> None:
    step(f"cgroup v{2 if is_v2() else 1}{v2_controllers()}, CPUs {ALL}")
    daemon, node = GuestDaemon(), GuestNode(sys.argv[1])
    for kind in (*SHARED_KINDS, *BE_KINDS):
        node.run(kind)
    node.check((*SHARED_KINDS, *BE_KINDS), ALL)
    owners_on_nodes(node)
    updates_and_crash(node, daemon)
    if node.driver == "systemd":
        systemd_writes_back(node)
    for name in ("lse", "lsr", "whole"):
        node.cri.stop(node.ids.pop(name))
    node.check((*SHARED_KINDS, *BE_KINDS), ALL, limit=LONG_S)
    wait(
        "sandboxes to have all CPUs again",
        lambda: set(node.sandboxes().values()) == {ALL},
        RECONCILE_PERIOD_S + LONG_S,
    )
    assert daemon.stop() == 0
    node.check((*SHARED_KINDS, *BE_KINDS), ALL)
    step("all is given back")


if __name__ == "__main__":
    main()
