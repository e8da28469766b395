"""The scenario of a machine that changes: CPUs go offline under load, SMT is disabled, memory is unplugged.

2 sockets with a NUMA node of 4 cores each, 16 CPUs, and a third node that has only memory and can be
unplugged. CPUs 0-1 are reserved, and CPU 1 is for class SYSTEM: it is offline while SMT is off. The daemon
reconciles every ten minutes here, so it reacts only to reports of the kernel. Each placement is also checked
from inside the container.

    python3 vm_changes.py cgroupfs|systemd
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cri import Cri, is_v2
from vm_guest import ALL, LONG_S, NODES, SOCKET, Daemon, Place, as_seen, core_of, node_cpus, step, wait
from vm_pools import BATCH, KINDS, SHARED, Node

from proxy.model.idset import CpuSet, Mask

PLUGGED = 2
HOME = Mask([0, 1])
WITH_ALL = Mask([0, 1, PLUGGED])
CPUS = Path("/sys/devices/system/cpu")
SMT = CPUS / "smt/control"
MEMORY = Path("/sys/devices/system/memory")
DIRECTORY = NODES / f"node{PLUGGED}"
RESERVED, SYSTEM = CpuSet([0, 1]), CpuSet([1])
SETTINGS = {
    "reconcilePeriod": "600s",
    "reservedSystemCPUs": str(RESERVED),
    "koordinator": {"systemCPUs": str(SYSTEM), "systemCPUsExclusive": False},
}
COUNTED = ("machine_events", "machine_changes", "stand_ins")
LS = KINDS["ls"].resources
BUSY = ("sh", "-c", "while :; do :; done")


def here() -> CpuSet:
    return CpuSet.parse((CPUS / "online").read_text())


def settled(node: Node, what: str, *checks: Callable[[], bool]) -> None:
    """Wait until all checks hold, and print how long it took; no task may be on offline CPUs."""
    begin = time.monotonic()
    for check in checks:
        wait(what, check)
    wait("tasks to be in their groups", lambda: all(place.tasks for place in node.snapshot().values()))
    took = time.monotonic() - begin
    for name, place in node.snapshot().items():
        assert place.effective <= here(), (name, place)
        assert all(cpus <= here() for cpus in place.tasks), (name, place)
    step(f"{what}: after {took:.1f} s")


def is_at(node: Node, names: tuple[str, ...], cpus: CpuSet) -> Callable[[], bool]:
    return lambda: all(node.place(name).effective == cpus == node.place(name).cpus for name in names)


def is_as(node: Node, before: Mapping[str, Place]) -> Callable[[], bool]:
    """Return a check whether all containers have their former places; other places are printed once."""
    printed: dict[str, Place | None] = {}

    def check() -> bool:
        now = node.snapshot()
        for name, place in before.items():
            found = now.get(name)
            if found != printed.get(name, place):
                printed[name] = found
                step(f"{name} was at {place}, and is at {found}")
        return before.items() <= now.items()

    return check


def as_program(node: Node, name: str) -> tuple[CpuSet, Mask]:
    return as_seen(node.cri, node.ids[name])


def short(daemon: Daemon) -> dict[str, Any]:
    """Return the containers that have fewer CPUs than they own, by pod."""
    return {entry["container"].split("/")[1]: entry for entry in daemon.status()["short"]}


def calm(node: Node, kind: str, name: str, **more: Any) -> None:
    """Run a container with resources of its own."""
    pod = node.pod(kind, name=name)
    node.ids[name] = node.cri.create(pod, timeout=LONG_S, **KINDS[kind].resources | more)
    node.cri.start(node.ids[name])


def busy(node: Node, kind: str, name: str) -> None:
    """Run a container with one busy loop: a single host thread emulates all CPUs."""
    calm(node, kind, name, command=BUSY)


def cpu_goes(node: Node, daemon: Daemon) -> None:
    """A CPU of an owner and a shared CPU go offline under load, and online again."""
    before = node.snapshot()
    own, lse = before["whole"].cpus, before["lse"].cpus | before["odd"].cpus
    rest = ALL - own - lse
    gone = CpuSet([max(own), max(rest)])
    for cpu in gone:
        (CPUS / f"cpu{cpu}/online").write_text("0")
    settled(
        node,
        f"CPUs {gone} went offline under load",
        lambda: len(node.place("whole").effective) == len(own),
        lambda: is_at(node, (*SHARED, "load"), ALL - lse - gone - own - node.place("whole").cpus)(),
    )
    now = node.place("whole").cpus
    (other,) = now - own
    assert now & own == own - gone, now
    assert other in node_cpus(0) or other in node_cpus(1)
    assert as_program(node, "whole")[0] == now
    assert as_program(node, "load")[0] == rest - gone - now
    lost = own & gone
    assert short(daemon)["whole"]["instead"] == str(other), daemon.status()["short"]
    reported = daemon.explain("whole")
    assert f"its CPU {lost} is offline: it runs on {now}, with CPU {other} in its place" in reported, reported
    step(f"the owner has {now}, CPU {other} in place of {lost}, and it is reported")
    for cpu in gone:
        (CPUS / f"cpu{cpu}/online").write_text("1")
    settled(node, "the CPUs are online again", is_as(node, before))
    assert as_program(node, "whole")[0] == own
    wait("no container to lack CPUs", lambda: not short(daemon))


def smt_goes(node: Node, daemon: Daemon) -> None:
    """SMT off: one thread of each core is left, and the daemon is killed meanwhile."""
    before = node.snapshot()
    own, lse, odd = before["whole"].cpus, before["lse"].cpus, before["odd"].cpus
    begin = time.monotonic()
    SMT.write_text("off")
    step(f"SMT is off after {time.monotonic() - begin:.1f} s: CPUs {here()}")
    assert len(here()) == len(ALL) // 2
    assert odd.isdisjoint(here()), "the only CPU of this owner is offline"
    settled(
        node,
        "SMT is off",
        lambda: len(node.place("whole").effective) == len(own),
        lambda: is_at(node, ("lse",), lse & here())(),
        lambda: is_at(node, (*SHARED, "load", "odd", "system"), here() - lse - node.place("whole").cpus)(),
        lambda: is_at(node, BATCH, here() - lse - node.place("whole").cpus)(),
    )
    now = node.place("whole").cpus
    assert all(core_of(cpu) == CpuSet([cpu]) for cpu in now), "each core has one thread"
    assert set(short(daemon)) == {"whole", "lse", "odd"}, daemon.status()["short"]
    assert as_program(node, "odd")[0] == here() - lse - now, "an owner without online CPUs shares"
    assert as_program(node, "lse")[0] == lse & here()
    step(f"whole has {now}, LSE {lse & here()} of {lse}, and the owner without online CPUs shares")
    one = {"cpu_period": 100_000, "cpu_quota": 100_000, "cpu_shares": 1024}
    calm(node, "whole", "late", **one)
    late = node.place("late").cpus
    assert len(late) == 1, late
    assert late <= here() - now - lse, late
    node.check(("odd", *SHARED), here() - now - lse - late, limit=LONG_S)
    node.cri.stop(node.ids.pop("late"))
    node.check(("odd", *SHARED), here() - now - lse, limit=LONG_S)

    during = node.snapshot()
    killed_and_started(node, daemon)
    settled(node, "killed and started meanwhile", is_as(node, during))
    assert set(short(daemon)) == {"whole", "lse", "odd"}
    ledger_is_ours(daemon)
    SMT.write_text("on")
    settled(node, "SMT is on again", is_as(node, before))
    assert as_program(node, "odd")[0] == odd
    wait("no container to lack CPUs", lambda: not short(daemon))


def killed_and_started(node: Node, daemon: Daemon) -> None:
    """Kill and restart the daemon; its counters are printed before."""
    counters = daemon.status()["counters"]
    step(f"counted: { {name: counters.get(name, 0) for name in COUNTED} }")
    daemon.kill9()
    daemon.start()
    node.cri, configs = Cri(SOCKET, ""), node.cri
    node.cri.adopt(configs)
    wait("the daemon to be ready", lambda: bool(daemon.status()["ready"]))


def ledger_is_ours(daemon: Daemon) -> None:
    """Check that the daemon accepts its ledger although the machine has changed."""
    problems = [problem["what"] for problem in daemon.status()["problems"]]
    assert not any("aside" in problem for problem in problems), problems


def blocks(state: str) -> None:
    """Switch all memory of the plugged node."""
    for block in DIRECTORY.glob("memory[0-9]*"):
        wait(f"{block.name} to be {state}", lambda block=block: switched(block / "state", state))


def switched(file: Path, state: str) -> bool:
    with suppress(OSError):  # memory that cannot be migrated at once is tried again
        file.write_text(state)
        return True
    return False


def with_memory() -> Mask:
    return Mask.parse((NODES / "has_memory").read_text())


def mems_are(node: Node, **wanted: Mask) -> Callable[[], bool]:
    return lambda: all(node.place(name).mems == mems for name, mems in wanted.items())


def memory_goes(node: Node, daemon: Daemon) -> None:
    """The memory of a node: offline, online again, and taken out."""
    assert with_memory() == WITH_ALL
    calm(node, "ls", "near", cpuset_mems="0,2")
    # "far" cannot start while it is there: its memory is all movable, and the kernel puts no tables there.
    late = {
        name: node.cri.create(node.pod("ls", name=name), timeout=LONG_S, **LS | more)
        for name, more in (("far", {"cpuset_mems": "2"}), ("waits", {}))
    }
    assert mems_are(node, near=Mask([0, 2]), ls=WITH_ALL)()
    assert as_program(node, "near")[1] == Mask([0, 2])
    blocks("offline")
    assert with_memory() == HOME
    gone = mems_are(node, near=Mask([0]), ls=HOME, load=HOME)
    settled(node, f"memory of node {PLUGGED} went", gone)
    assert as_program(node, "near")[1] == Mask([0])
    for name, container in late.items():
        node.cri.start(container)
        node.ids[name] = container
        assert as_program(node, name)[1] == HOME
    step("the container that was created before starts")
    node.cri.update(node.ids["near"], cpu_shares=300)
    node.cri.update(node.ids["far"], cpu_shares=300, cpuset_mems="2")
    settled(node, "updates pass", gone, mems_are(node, far=HOME))

    blocks("online_movable")
    assert with_memory() == WITH_ALL
    settled(
        node,
        "the memory is online again",
        mems_are(node, ls=WITH_ALL, load=WITH_ALL, waits=WITH_ALL),
        lambda: Mask([PLUGGED]) <= node.place("far").mems and Mask([PLUGGED]) <= node.place("near").mems,
    )
    assert as_program(node, "ls")[1] == WITH_ALL

    (device,) = [path for path in Path("/sys/bus/acpi/devices").glob("PNP0C80*") if ejects(path)]
    step(f"{device.name} is ejected")
    wait("the node to vanish", lambda: not DIRECTORY.exists())
    settled(node, f"{device.name} was ejected", mems_are(node, near=Mask([0]), far=HOME, ls=HOME))
    assert as_program(node, "far")[1] == HOME
    killed_and_started(node, daemon)
    ledger_is_ours(daemon)
    settled(node, "killed and started without the node", mems_are(node, near=Mask([0]), far=HOME, ls=HOME))


def ejects(device: Path) -> bool:
    """Eject a memory device; most devices of this kind are empty slots."""
    with suppress(OSError):
        (device / "eject").write_text("1")
        return True
    return False


def main() -> None:
    step(f"cgroup v{2 if is_v2() else 1}, CPUs {ALL}, memory of nodes {with_memory()}")
    daemon = Daemon(**SETTINGS)
    node = Node(sys.argv[1])
    for kind in (*SHARED, *BATCH, "system"):
        node.run(kind)
    last = max(node_cpus(1))
    node.run("lse", core_of(min(node_cpus(1))))
    node.run("lse", core_of(last) - CpuSet([min(core_of(last))]), "odd")
    busy(node, "whole", "whole")
    busy(node, "burstable", "load")
    node.check(("system",), SYSTEM)
    owned = [node.place(name).cpus for name in ("lse", "odd", "whole")]
    node.check((*SHARED, "load"), ALL - owned[0] - owned[1] - owned[2])
    cpu_goes(node, daemon)
    smt_goes(node, daemon)
    memory_goes(node, daemon)
    assert daemon.status()["violations"] == []
    for name in ("lse", "odd", "whole"):
        node.cri.stop(node.ids.pop(name))
    node.check((*SHARED, *BATCH), ALL, limit=LONG_S)
    assert daemon.stop() == 0
    step("all is given back")


if __name__ == "__main__":
    main()
