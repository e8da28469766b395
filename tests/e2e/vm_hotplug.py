"""The scenario of a machine that changes: CPUs go offline under load, SMT is disabled, memory is unplugged.

2 sockets with a NUMA node of 4 cores each, 16 CPUs, and a third node that has only memory and can be
unplugged. CPUs 0-1 are reserved, and CPU 1 is for class SYSTEM: it is offline while SMT is off. The daemon
reconciles every ten minutes here, so it reacts only to reports of the kernel. Each placement is also checked
from inside the container.

    python3 vm_hotplug.py cgroupfs|systemd
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cri import Cri, is_v2
from vm_guest import (
    ALL,
    LONG_S,
    NODES,
    SOCKET,
    GuestDaemon,
    Place,
    core_of,
    node_cpus,
    seen_in_container,
    step,
    wait,
)
from vm_pools import BE_KINDS, KINDS, SHARED_KINDS, GuestNode

from proxy.model.idset import CpuSet, Mask

PLUGGED_NODE = 2
FIXED_NODES = Mask([0, 1])
ALL_NODES = Mask([0, 1, PLUGGED_NODE])
CPUS = Path("/sys/devices/system/cpu")
SMT = CPUS / "smt/control"
MEMORY = Path("/sys/devices/system/memory")
DIRECTORY = NODES / f"node{PLUGGED_NODE}"
RESERVED, SYSTEM = CpuSet([0, 1]), CpuSet([1])
SETTINGS = {
    "reconcilePeriod": "600s",
    "reservedSystemCPUs": str(RESERVED),
    "koordinator": {"systemCPUs": str(SYSTEM), "systemCPUsExclusive": False},
}
COUNTED = ("machine_events", "machine_changes", "stand_ins")
LS_RESOURCES = KINDS["ls"].resources
BUSY = ("sh", "-c", "while :; do :; done")


def online_cpus() -> CpuSet:
    return CpuSet.parse((CPUS / "online").read_text())


def wait_for_checks(node: GuestNode, what: str, *checks: Callable[[], bool]) -> None:
    """Wait until all checks hold, and print how long it took; no task may be on offline CPUs."""
    begin = time.monotonic()
    for check in checks:
        wait(what, check)
    wait("tasks to be in their groups", lambda: all(place.tasks for place in node.snapshot().values()))
    took = time.monotonic() - begin
    for name, place in node.snapshot().items():
        assert place.effective <= online_cpus(), (name, place)
        assert all(cpus <= online_cpus() for cpus in place.tasks), (name, place)
    step(f"{what}: after {took:.1f} s")


def is_at(node: GuestNode, names: tuple[str, ...], cpus: CpuSet) -> Callable[[], bool]:
    return lambda: all(node.place(name).effective == cpus == node.place(name).cpus for name in names)


def is_as_before(node: GuestNode, before: Mapping[str, Place]) -> Callable[[], bool]:
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


def seen_by_program(node: GuestNode, name: str) -> tuple[CpuSet, Mask]:
    return seen_in_container(node.cri, node.ids[name])


def short_containers(daemon: GuestDaemon) -> dict[str, Any]:
    """Return the containers that have fewer CPUs than they own, by pod."""
    return {entry["container"].split("/")[1]: entry for entry in daemon.status()["short"]}


def run_container(node: GuestNode, kind: str, name: str, **more: Any) -> None:
    """Run a container with resources of its own."""
    pod = node.pod(kind, name=name)
    node.ids[name] = node.cri.create(pod, timeout=LONG_S, **KINDS[kind].resources | more)
    node.cri.start(node.ids[name])


def run_busy_container(node: GuestNode, kind: str, name: str) -> None:
    """Run a container with one busy loop: a single host thread emulates all CPUs."""
    run_container(node, kind, name, command=BUSY)


def cpus_go_offline(node: GuestNode, daemon: GuestDaemon) -> None:
    """A CPU of an owner and a shared CPU go offline under load, and online again."""
    before = node.snapshot()
    own, lse = before["whole"].cpus, before["lse"].cpus | before["odd"].cpus
    rest = ALL - own - lse
    gone = CpuSet([max(own), max(rest)])
    for cpu in gone:
        (CPUS / f"cpu{cpu}/online").write_text("0")
    wait_for_checks(
        node,
        f"CPUs {gone} went offline under load",
        lambda: len(node.place("whole").effective) == len(own),
        lambda: is_at(node, (*SHARED_KINDS, "load"), ALL - lse - gone - own - node.place("whole").cpus)(),
    )
    now = node.place("whole").cpus
    (other,) = now - own
    assert now & own == own - gone, now
    assert other in node_cpus(0) or other in node_cpus(1)
    assert seen_by_program(node, "whole")[0] == now
    assert seen_by_program(node, "load")[0] == rest - gone - now
    lost = own & gone
    assert short_containers(daemon)["whole"]["instead"] == str(other), daemon.status()["short"]
    reported = daemon.explain("whole")
    assert f"its CPU {lost} is offline: it runs on {now}, with CPU {other} in its place" in reported, reported
    step(f"the owner has {now}, CPU {other} in place of {lost}, and it is reported")
    for cpu in gone:
        (CPUS / f"cpu{cpu}/online").write_text("1")
    wait_for_checks(node, "the CPUs are online again", is_as_before(node, before))
    assert seen_by_program(node, "whole")[0] == own
    wait("no container to lack CPUs", lambda: not short_containers(daemon))


def smt_is_disabled(node: GuestNode, daemon: GuestDaemon) -> None:
    """SMT off: one thread of each core is left, and the daemon is killed meanwhile."""
    before = node.snapshot()
    own, lse, odd = before["whole"].cpus, before["lse"].cpus, before["odd"].cpus
    begin = time.monotonic()
    SMT.write_text("off")
    step(f"SMT is off after {time.monotonic() - begin:.1f} s: CPUs {online_cpus()}")
    assert len(online_cpus()) == len(ALL) // 2
    assert odd.isdisjoint(online_cpus()), "the only CPU of this owner is offline"
    wait_for_checks(
        node,
        "SMT is off",
        lambda: len(node.place("whole").effective) == len(own),
        lambda: is_at(node, ("lse",), lse & online_cpus())(),
        lambda: is_at(
            node, (*SHARED_KINDS, "load", "odd", "system"), online_cpus() - lse - node.place("whole").cpus
        )(),
        lambda: is_at(node, BE_KINDS, online_cpus() - lse - node.place("whole").cpus)(),
    )
    now = node.place("whole").cpus
    assert all(core_of(cpu) == CpuSet([cpu]) for cpu in now), "each core has one thread"
    assert set(short_containers(daemon)) == {"whole", "lse", "odd"}, daemon.status()["short"]
    assert seen_by_program(node, "odd")[0] == online_cpus() - lse - now, "an owner without online CPUs shares"
    assert seen_by_program(node, "lse")[0] == lse & online_cpus()
    step(f"whole has {now}, LSE {lse & online_cpus()} of {lse}, and the owner without online CPUs shares")
    one = {"cpu_period": 100_000, "cpu_quota": 100_000, "cpu_shares": 1024}
    run_container(node, "whole", "late", **one)
    late = node.place("late").cpus
    assert len(late) == 1, late
    assert late <= online_cpus() - now - lse, late
    node.check(("odd", *SHARED_KINDS), online_cpus() - now - lse - late, limit=LONG_S)
    node.cri.stop(node.ids.pop("late"))
    node.check(("odd", *SHARED_KINDS), online_cpus() - now - lse, limit=LONG_S)

    during = node.snapshot()
    kill_and_start(node, daemon)
    wait_for_checks(node, "killed and started meanwhile", is_as_before(node, during))
    assert set(short_containers(daemon)) == {"whole", "lse", "odd"}
    check_ledger_accepted(daemon)
    SMT.write_text("on")
    wait_for_checks(node, "SMT is on again", is_as_before(node, before))
    assert seen_by_program(node, "odd")[0] == odd
    wait("no container to lack CPUs", lambda: not short_containers(daemon))


def kill_and_start(node: GuestNode, daemon: GuestDaemon) -> None:
    """Kill and restart the daemon; its counters are printed before."""
    counters = daemon.status()["counters"]
    step(f"counted: { {name: counters.get(name, 0) for name in COUNTED} }")
    daemon.kill9()
    daemon.start()
    node.cri, configs = Cri(SOCKET, ""), node.cri
    node.cri.adopt(configs)
    wait("the daemon to be ready", lambda: bool(daemon.status()["ready"]))


def check_ledger_accepted(daemon: GuestDaemon) -> None:
    """Check that the daemon accepts its ledger although the machine has changed."""
    problems = [problem["what"] for problem in daemon.status()["problems"]]
    assert not any("aside" in problem for problem in problems), problems


def switch_memory_blocks(state: str) -> None:
    """Switch all memory of the plugged node."""
    for block in DIRECTORY.glob("memory[0-9]*"):
        wait(f"{block.name} to be {state}", lambda block=block: switch_block(block / "state", state))


def switch_block(file: Path, state: str) -> bool:
    with suppress(OSError):  # memory that cannot be migrated at once is tried again
        file.write_text(state)
        return True
    return False


def nodes_with_memory() -> Mask:
    return Mask.parse((NODES / "has_memory").read_text())


def mems_are(node: GuestNode, **wanted: Mask) -> Callable[[], bool]:
    return lambda: all(node.place(name).mems == mems for name, mems in wanted.items())


def memory_is_unplugged(node: GuestNode, daemon: GuestDaemon) -> None:
    """The memory of a node: offline, online again, and taken out."""
    assert nodes_with_memory() == ALL_NODES
    run_container(node, "ls", "near", cpuset_mems="0,2")
    # "far" cannot start while it is there: its memory is all movable, and the kernel puts no tables there.
    late = {
        name: node.cri.create(node.pod("ls", name=name), timeout=LONG_S, **LS_RESOURCES | more)
        for name, more in (("far", {"cpuset_mems": "2"}), ("waits", {}))
    }
    assert mems_are(node, near=Mask([0, 2]), ls=ALL_NODES)()
    assert seen_by_program(node, "near")[1] == Mask([0, 2])
    switch_memory_blocks("offline")
    assert nodes_with_memory() == FIXED_NODES
    gone = mems_are(node, near=Mask([0]), ls=FIXED_NODES, load=FIXED_NODES)
    wait_for_checks(node, f"memory of node {PLUGGED_NODE} went", gone)
    assert seen_by_program(node, "near")[1] == Mask([0])
    for name, container in late.items():
        node.cri.start(container)
        node.ids[name] = container
        assert seen_by_program(node, name)[1] == FIXED_NODES
    step("the container that was created before starts")
    node.cri.update(node.ids["near"], cpu_shares=300)
    node.cri.update(node.ids["far"], cpu_shares=300, cpuset_mems="2")
    wait_for_checks(node, "updates pass", gone, mems_are(node, far=FIXED_NODES))

    switch_memory_blocks("online_movable")
    assert nodes_with_memory() == ALL_NODES
    wait_for_checks(
        node,
        "the memory is online again",
        mems_are(node, ls=ALL_NODES, load=ALL_NODES, waits=ALL_NODES),
        lambda: (
            Mask([PLUGGED_NODE]) <= node.place("far").mems and Mask([PLUGGED_NODE]) <= node.place("near").mems
        ),
    )
    assert seen_by_program(node, "ls")[1] == ALL_NODES

    (device,) = [path for path in Path("/sys/bus/acpi/devices").glob("PNP0C80*") if eject(path)]
    step(f"{device.name} is ejected")
    wait("the node to vanish", lambda: not DIRECTORY.exists())
    wait_for_checks(
        node, f"{device.name} was ejected", mems_are(node, near=Mask([0]), far=FIXED_NODES, ls=FIXED_NODES)
    )
    assert seen_by_program(node, "far")[1] == FIXED_NODES
    kill_and_start(node, daemon)
    check_ledger_accepted(daemon)
    wait_for_checks(
        node,
        "killed and started without the node",
        mems_are(node, near=Mask([0]), far=FIXED_NODES, ls=FIXED_NODES),
    )


def eject(device: Path) -> bool:
    """Eject a memory device; most devices of this kind are empty slots."""
    with suppress(OSError):
        (device / "eject").write_text("1")
        return True
    return False


def main() -> None:
    step(f"cgroup v{2 if is_v2() else 1}, CPUs {ALL}, memory of nodes {nodes_with_memory()}")
    daemon = GuestDaemon(**SETTINGS)
    node = GuestNode(sys.argv[1])
    for kind in (*SHARED_KINDS, *BE_KINDS, "system"):
        node.run(kind)
    last = max(node_cpus(1))
    node.run("lse", core_of(min(node_cpus(1))))
    node.run("lse", core_of(last) - CpuSet([min(core_of(last))]), "odd")
    run_busy_container(node, "whole", "whole")
    run_busy_container(node, "burstable", "load")
    node.check(("system",), SYSTEM)
    owned = [node.place(name).cpus for name in ("lse", "odd", "whole")]
    node.check((*SHARED_KINDS, "load"), ALL - owned[0] - owned[1] - owned[2])
    cpus_go_offline(node, daemon)
    smt_is_disabled(node, daemon)
    memory_is_unplugged(node, daemon)
    assert daemon.status()["violations"] == []
    for name in ("lse", "odd", "whole"):
        node.cri.stop(node.ids.pop(name))
    node.check((*SHARED_KINDS, *BE_KINDS), ALL, limit=LONG_S)
    assert daemon.stop() == 0
    step("all is given back")


if __name__ == "__main__":
    main()
