"""The scenario of cpusets that last, on cgroup v2 with systemd and a runc that sends wrong cpusets.

systemd's properties must match the kernel: neither a reload nor a change of another property moves a
container, whether the daemon runs or not. The daemon repairs properties that runc or another program has set.

    python3 vm_unit_properties.py systemd
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from cri import Cri
from vm_crash import OTHER_KINDS, OWN, OverlapWatch
from vm_guest import ALL, LONG_S, SOCKET, GuestDaemon, place_in, step, wait
from vm_pools import GuestNode

from proxy.model.idset import CpuSet, Mask

REST = ALL - OWN
EMULATION_FACTOR = 25.0
"""Seconds under emulation for one second on real hardware."""


class Movements:
    """A thread that checks continuously whether a container moves."""

    def __init__(self, node: GuestNode, names: tuple[str, ...]) -> None:
        self._groups = {name: node.group(name) for name in names}
        self._before = {name: place_in(directory) for name, directory in self._groups.items()}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.samples, self.seen = 0, dict[str, str]()

    def _sample(self) -> None:
        while not self._over.is_set():
            for name, directory in self._groups.items():
                now = place_in(directory)
                if now != self._before[name]:
                    self.seen.setdefault(name, f"{now.cpus}, in effect {now.effective}")
            self.samples += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        time.sleep(2)  # systemd writes after it has answered
        self._over.set()
        self._thread.join()


def systemctl(*args: str) -> str:
    return subprocess.run(["systemctl", *args], check=True, capture_output=True, text=True).stdout.strip()


def unit_cpus(directory: Path, name: str = "AllowedCPUs") -> str:
    """Return a property of a container's unit, which systemd would write."""
    return systemctl("show", "--value", "-p", name, directory.name).replace(" ", ",")


def check_lasting_cpus(node: GuestNode, name: str, cpus: CpuSet) -> None:
    """Check that a container has these CPUs, and that its unit has the same."""
    node.check((name,), cpus, limit=LONG_S)
    wait(f"the unit of {name}", lambda: CpuSet.parse(unit_cpus(node.group(name))) == cpus)


def check_no_moves(node: GuestNode, cause: str, *command: str) -> None:
    with Movements(node, ("lse", *OTHER_KINDS)) as movements:
        systemctl(*command)
    assert not movements.seen, movements.seen
    step(f"{cause}: no container has moved, in {movements.samples} samples")


def check_runc_is_repaired(daemon: GuestDaemon, node: GuestNode) -> None:
    """An update through the daemon: runc sends systemd a set with its bytes reversed."""
    before = daemon.status()["counters"]
    for name in ("ls", "be", "lse"):
        node.cri.update(node.ids[name], cpu_shares=300)
    for name in ("ls", "be"):
        check_lasting_cpus(node, name, REST)
    check_lasting_cpus(node, "lse", OWN)
    status = daemon.status()
    repaired = status["counters"]["units_repaired"] - before.get("units_repaired", 0)
    problems = [p for p in map(str, status["problems"]) if "sends wrong CPUs to systemd" in p]
    assert repaired >= 3, (before, status["counters"])
    assert len(problems) == 1, status["problems"]
    step(f"{repaired} updates came with reversed sets: units are right, and it is reported once")


def check_other_programs_are_repaired(node: GuestNode) -> None:
    """Another program changes the CPUs of a unit: the daemon repairs the file and the property."""
    directory, begin = node.group("ls"), time.monotonic()
    systemctl("set-property", "--runtime", directory.name, f"AllowedCPUs={ALL}")
    wait("the file to be repaired", lambda: place_in(directory).cpus == REST)
    took = time.monotonic() - begin
    check_lasting_cpus(node, "ls", REST)
    step(f"AllowedCPUs of a container was set by another program: repaired after {took:.1f} s")


def property_stays_unseen(daemon: GuestDaemon, directory: Path) -> bool:
    """Set a property while the daemon is suspended, and return whether the daemon has left it alone.

    The daemon does not read a unit whose file is right, except when it compares all units after its start.
    """
    daemon.process.send_signal(signal.SIGSTOP)
    systemctl("set-property", "--runtime", directory.name, f"AllowedCPUs={ALL}")
    wait("systemd to write it", lambda: place_in(directory).cpus == ALL)
    (directory / "cpuset.cpus").write_text(str(REST))
    daemon.process.send_signal(signal.SIGCONT)
    before = daemon.status()["counters"]["passes"]
    wait("a reconcile", lambda: daemon.status()["counters"]["passes"] > before)
    return CpuSet.parse(unit_cpus(directory)) == ALL


def reload_is_repaired(daemon: GuestDaemon, node: GuestNode) -> None:
    """A reload applies a property that another program set while the daemon was suspended."""
    directory = node.group("ls")
    wait("a property that the daemon leaves alone", lambda: property_stays_unseen(daemon, directory))
    changes, end = list[float](), time.monotonic() + 30

    def look() -> None:
        for cpus in (ALL, REST):
            while place_in(directory).cpus != cpus and time.monotonic() < end:
                pass
            changes.append(time.monotonic())

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    systemctl("daemon-reload")
    looker.join(LONG_S)
    check_lasting_cpus(node, "ls", REST)
    was_seen = changes[0] < end
    seen = f"after {changes[1] - changes[0]:.2f} s" if was_seen else "before it was observed"
    assert not was_seen or changes[1] - changes[0] < EMULATION_FACTOR, changes
    step(f"a reload that applied another cpuset was repaired {seen}")


def main() -> None:
    daemon, node = GuestDaemon(), GuestNode(sys.argv[1])
    for kind in OTHER_KINDS:
        node.run(kind)
    node.run("lse", OWN)
    watch = OverlapWatch(node)
    watch.owner(node.group("lse"))
    for name in OTHER_KINDS:
        check_lasting_cpus(node, name, REST)
    check_lasting_cpus(node, "lse", OWN)
    assert Mask.parse(unit_cpus(node.group("lse"), "AllowedMemoryNodes")) == Mask([1])
    step("the properties of all units match the kernel")
    check_no_moves(node, "daemon-reload", "daemon-reload")
    weight = ("set-property", "--runtime", node.group("ls").name, "CPUWeight=50")
    check_no_moves(node, "a change of another property", *weight)
    check_runc_is_repaired(daemon, node)
    check_no_moves(node, "daemon-reload after runc's updates", "daemon-reload")
    wait("both reloads to be counted", lambda: daemon.status()["counters"].get("systemd_reloads") == 2)
    node.run("ls", name="late")
    check_lasting_cpus(node, "late", REST)
    step("a container was started beside the owner")
    daemon.kill9()
    check_no_moves(node, "daemon-reload while the daemon is dead", "daemon-reload")
    daemon.start()
    old, node.cri = node.cri, Cri(SOCKET, "")
    node.cri.adopt(old)
    old.close()
    wait("the daemon to be ready", lambda: bool(daemon.status()["ready"]))
    check_other_programs_are_repaired(node)
    reload_is_repaired(daemon, node)
    watch.end()
    # The watch may see another program's cpuset until it is repaired.
    seen = {overlap for overlap in watch.overlaps if node.group("ls").name not in overlap}
    assert not seen, watch.overlaps
    step(f"in {watch.samples} samples no other container was seen on an owner's CPUs")
    node.cri.stop(node.ids.pop("lse"))
    for name in (*OTHER_KINDS, "late"):
        check_lasting_cpus(node, name, ALL)
    assert daemon.stop() == 0
    node.check(OTHER_KINDS, ALL)
    step("all is given back")


if __name__ == "__main__":
    main()
