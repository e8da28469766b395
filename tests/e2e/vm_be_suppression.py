"""The scenario of ``test_vm.py`` about BE suppression by CPUs: real counters, real load, 32 CPUs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cri import cpuset_root, is_v2
from vm_guest import ALL, LONG_S, GuestDaemon, core_of, node_cpus, step, wait
from vm_pools import GuestNode

from proxy.model.idset import CpuSet

LOOPS = 5
BUSY = ("sh", "-c", " & ".join(["while :; do :; done"] * LOOPS))
BE_KINDS = ("be", "besteffort")
SETTINGS = {"mode": "cpuset", "threshold": 60, "period": "1s"}
BUDGET_CPUS = len(ALL) * 60 // 100
CPU_V1 = Path("/sys/fs/cgroup/cpu")
OWN = CpuSet(list(node_cpus(3))[:4])


def be_cpus(node: GuestNode) -> CpuSet:
    """Return the CPUs of BE containers, empty while they differ; none of them may be an owner's."""
    found = {name: node.place(name).cpus for name in BE_KINDS}
    for cpus in found.values():
        assert cpus, "a container without CPUs"
        assert not cpus & OWN, f"BE runs on an LSE pod's CPUs: {found}"
    return found["be"] if found["be"] == found["besteffort"] else CpuSet()


def wait_for_be_cpus(node: GuestNode, most: int, least: int = 2) -> CpuSet:
    """Wait until BE has ``least`` to ``most`` CPUs; returns them."""
    seen: list[CpuSet] = [CpuSet()]

    def is_narrow() -> bool:
        seen[0] = be_cpus(node)
        return least <= len(seen[0]) <= most

    wait(f"BE to have {least} to {most} CPUs", is_narrow, 2 * LONG_S)
    return seen[0]


def check_beside_load(node: GuestNode) -> None:
    """A pod that keeps some CPUs busy starts and ends."""
    idle = wait_for_be_cpus(node, BUDGET_CPUS, BUDGET_CPUS - 8)
    step(f"an idle node leaves {len(idle)} of {len(ALL)} CPUs to BE: {idle}")
    whole = [cpu for cpu in idle if core_of(cpu) <= idle]
    assert len(whole) >= len(idle) - 1, f"not in whole cores: {idle}"
    assert all(idle & node_cpus(n) for n in range(4)), f"not on all NUMA nodes: {idle}"
    pod = node.pod("burstable", name="load")
    busy = node.cri.create(pod, timeout=LONG_S, command=BUSY, cpu_shares=1024)
    node.cri.start(busy)
    fewer = wait_for_be_cpus(node, len(idle) - LOOPS + 1)
    step(f"beside {LOOPS} busy CPUs there are {len(fewer)}: {fewer}")
    node.check(("ls",), ALL - OWN)
    node.check(("lse",), OWN)
    node.cri.stop(busy)
    again = wait_for_be_cpus(node, BUDGET_CPUS, len(fewer) + 3)
    step(f"then {len(again)} again: {again}")


def check_output(daemon: GuestDaemon) -> None:
    """Check the output of ``status`` and ``explain``."""
    page = daemon.cli("status").stdout
    print(page[page.index("BE suppression") :].partition("\n\n")[0], flush=True)
    assert "BE is suppressed: it runs on" in daemon.explain("be")
    assert "suppressed" not in daemon.explain("ls")
    problems = [problem["what"] for problem in daemon.status()["problems"]]
    # The disk's runc sends wrong CPUs to systemd.
    assert not [
        what for what in problems if not what.startswith("the runtime sends wrong CPUs to systemd")
    ], problems


def steps_up() -> list[int]:
    """Return by how many CPUs BE grew, for each increase in the daemon's log."""
    log = Path("/out/proxy.log").read_text()
    pairs = re.findall(
        r'changed what BE pods have now="CPUs ([\d,-]+)" before="CPUs ([\d,-]+)" reason="the budget', log
    )
    sizes = [(len(CpuSet.parse(now)), len(CpuSet.parse(was))) for now, was in pairs]
    return [now - was for now, was in sizes if now > was]


def quota(node: GuestNode) -> int:
    """The CFS quota of the group above all BE pods; -1 for none."""
    directory = node.group("be").parent.parent
    assert "besteffort" in directory.name, directory
    if is_v2():
        value = (directory / "cpu.max").read_text().split()[0]
        return -1 if value == "max" else int(value)
    return int((CPU_V1 / directory.relative_to(cpuset_root()) / "cpu.cfs_quota_us").read_text())


def by_quota(daemon: GuestDaemon, node: GuestNode) -> None:
    """Suppression by a quota, which remains after a kill until the next start."""
    assert daemon.stop() == 0
    daemon.configure(beSuppress={**SETTINGS, "mode": "cfs-quota"})
    daemon.start()
    wait("a quota", lambda: BUDGET_CPUS - 8 < quota(node) / 100_000 < BUDGET_CPUS + 1)
    node.check(BE_KINDS, ALL - OWN)
    step(f"BE pods together have {quota(node) / 100_000:.2f} CPUs by quota")
    daemon.kill9()
    assert quota(node) > 0
    daemon.configure()
    daemon.start()
    wait("the quota to be removed", lambda: quota(node) == -1)
    assert daemon.stop() == 0


def main() -> None:
    daemon, node = GuestDaemon(beSuppress=SETTINGS, log={"level": "debug"}), GuestNode(sys.argv[1])
    node.run("lse", OWN)
    for kind in (*BE_KINDS, "ls"):
        node.run(kind)
    check_beside_load(node)
    check_output(daemon)
    grown = steps_up()
    assert grown, Path("/out/proxy.log").read_text()[-2000:]
    assert max(grown) <= -(-len(ALL) // 10), f"more than a tenth of the CPUs at once: {grown}"
    node.run("be", name="late")
    wait("a late container to have the same CPUs", lambda: node.place("late").cpus == be_cpus(node))
    daemon.kill9()
    assert len(be_cpus(node)) <= BUDGET_CPUS
    daemon.configure()
    daemon.start()
    node.check(BE_KINDS, ALL - OWN, limit=LONG_S)
    step("killed, and started with suppression switched off: BE has the whole pool")
    by_quota(daemon, node)
    daemon.configure(beSuppress=SETTINGS)
    daemon.start()
    wait_for_be_cpus(node, BUDGET_CPUS)
    assert daemon.stop() == 0
    node.check(BE_KINDS, ALL - OWN)
    step("all is given back")


if __name__ == "__main__":
    main()
