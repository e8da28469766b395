"""The scenario of a release, and of memory nodes, in a virtual machine with several NUMA nodes.

An owner's memory is on its nodes; another program's write is detected, and repaired unless that would move
memory. After a release every container equals one that was never managed; after an undo owners have their
CPUs.

python3 vm_release.py cgroupfs|systemd
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from cri import Cri, is_v2
from vm_guest import ALL, DIRECTORY, LONG_S, NODES, RUNTIME, GuestDaemon, node_cpus, place_in, step, wait
from vm_pools import KINDS, GuestNode
from vm_quota import group as cpu_group
from vm_quota import limit, quota

from proxy.model.idset import CpuSet, Mask

MIB = 1 << 20
SIZE_MIB = 24
HOLD = ["sh", "-c", f"dd if=/dev/zero bs={SIZE_MIB}M count=1 | sleep 36000"]
POD_US = 500_000
ALL_NODES = Mask(int(path.name[4:]) for path in NODES.glob("node[0-9]*"))
FAR = max(ALL_NODES)
OWN = CpuSet(list(node_cpus(FAR))[:4])


def memory(daemon: GuestDaemon, ref: str) -> dict[str, Any]:
    """Return the row of a container in ``status --memory``; node numbers are strings in JSON."""
    rows = json.loads(daemon.cli("status", "--memory", "--json").stdout)["containers"]
    return next(row for row in rows if row["ref"].endswith(ref))


def mems(node: GuestNode) -> Mask:
    return place_in(node.group("lse")).mems


def memory_nodes(node: GuestNode, daemon: GuestDaemon) -> None:
    """Containers have memory on their nodes; writes by other programs move it on v2 only."""
    wait("its memory", lambda: memory(daemon, "lse/main")["anon"].get(str(FAR), 0) > SIZE_MIB * MIB / 2)
    found = memory(daemon, "lse/main")
    assert (found["decided"], found["nodes"], found["migrates"]) == (str(FAR), str(FAR), is_v2()), found
    assert found["outside"] == 0, found
    step(f"{found['anon'][str(FAR)] // MIB} MiB are on node {FAR}, none elsewhere")

    (node.group("lse") / "cpuset.mems").write_text("0")
    if not is_v2():
        wait("its nodes to be repaired", lambda: mems(node) == Mask([FAR]))
        assert memory(daemon, "lse/main")["outside"] == 0
        step("another program bound it to node 0: no page moved, and its nodes are repaired")
        return

    wait("its nodes to be added again", lambda: mems(node) == Mask([0, FAR]))
    wait(
        "the problem to be reported",
        lambda: any("memory of nodes" in p["what"] for p in daemon.status()["problems"]),
    )
    (reported,) = (p["what"] for p in daemon.status()["problems"] if "memory of nodes" in p["what"])
    there = memory(daemon, "lse/main")["outside"]
    assert there > SIZE_MIB * MIB / 2, memory(daemon, "lse/main")
    step(f"another program bound it to node 0: {reported}")
    node.cri.update(node.ids["lse"], cpu_shares=512)
    assert mems(node) == Mask([0, FAR])
    assert memory(daemon, "lse/main")["outside"] >= there / 2
    step("an update does not narrow the nodes either")


def spec(direct: Cri, container: str) -> str:
    document = json.loads(direct.status(container, verbose=True).info["info"])
    cpu = document["runtimeSpec"]["linux"]["resources"]["cpu"]
    return f"{cpu.get('cpus') or ALL} {cpu.get('mems') or ALL_NODES} {cpu.get('quota')}"


def release_and_compare(node: GuestNode, daemon: GuestDaemon, top: Any) -> None:
    """Release, and compare every container with one that was created directly at the runtime."""
    done = daemon.cli("release", "--config", str(DIRECTORY / "config.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    step(done.stdout.splitlines()[0])
    with Cri(RUNTIME, "") as direct:
        for kind in ("lse", "ls", "be", "burstable", "whole"):
            what = KINDS[kind]
            parts = ["kubepods", *filter(None, [what.parent]), f"podplain{kind}"]
            parent = f"{'-'.join(parts)}.slice" if node.driver == "systemd" else "/" + "/".join(parts)
            pod = direct.run_pod(f"plain-{kind}", cgroup_parent=parent)
            plain = direct.create(pod, timeout=LONG_S, **what.resources)
            direct.start(plain)
            node.ids[f"plain-{kind}"] = plain

            def same(kind: str = kind) -> bool:
                ours, without = node.place(kind), node.place(f"plain-{kind}")
                return (ours.effective, ours.tasks, ours.mems) == (
                    without.effective,
                    without.tasks,
                    without.mems,
                )

            assert same(), (kind, node.place(kind), node.place(f"plain-{kind}"))
            assert quota(cpu_group(node.ids[kind])) == quota(cpu_group(plain))
            assert spec(direct, node.ids[kind]) == spec(direct, plain), kind
        assert quota(top) == POD_US
        direct.update(node.ids["lse"], cpu_shares=512)
        if node.driver == "systemd":
            subprocess.run(["systemctl", "daemon-reload"], check=True)
        for kind in ("lse", "ls", "be", "burstable", "whole"):
            assert node.place(kind).effective == ALL, (kind, node.place(kind))
        step("every container equals one that was never managed, and this persists")


def main() -> None:
    daemon, node = GuestDaemon(), GuestNode(sys.argv[1])
    pod = node.pod("lse", OWN)
    top = cpu_group("podlse")
    limit(top, POD_US)
    node.ids["lse"] = node.cri.create(pod, timeout=LONG_S, command=HOLD, **KINDS["lse"].resources)
    node.cri.start(node.ids["lse"])
    for kind in ("ls", "be", "burstable", "whole"):
        node.run(kind)
    node.check(("lse",), OWN, Mask([FAR]), limit=LONG_S)
    memory_nodes(node, daemon)
    release_and_compare(node, daemon, top)
    done = daemon.cli("release", "--undo", "--config", str(DIRECTORY / "config.yaml"))
    assert done.returncode == 0, done.stderr
    wait("the owner to have its CPUs", lambda: node.place("lse").effective == OWN)
    wait("other containers to leave them", lambda: node.place("ls").effective.isdisjoint(OWN))
    step("undone: the owner has its CPUs again")
    print("all is given back", flush=True)


if __name__ == "__main__":
    main()
