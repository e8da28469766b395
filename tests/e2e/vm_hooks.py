"""The scenario of hooks, in a virtual machine with cgroup v2 and either driver.

Changes of hooks to CPUs, memory nodes, weights, quotas, files of cgroup v2 and a pod's cgroup must be in
effect in the kernel, and persist over updates, reloads of systemd and kills of the daemon.

python3 vm_hooks.py cgroupfs|systemd
"""

from __future__ import annotations

import sys
import textwrap
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cri import Cri
from vm_guest import ALL, DIRECTORY, LONG_S, SOCKET, Daemon, node_cpus, place_in, step, wait
from vm_lasting import systemctl
from vm_partitions import kinds, read, row
from vm_pools import KINDS, Node
from vm_quota import limit, quota

from proxy.model.idset import CpuSet, Mask

HOOKS = Path("/etc/topoproxy/hooks.d")
LOG = Path("/out/proxy.log")
MIB = 1 << 20
HIGH, HIGHER = 48 * MIB, 64 * MIB
HAS_US = 300_000
SHIPPED = ("20-quota-off", "30-cpus-file", "50-crio-annotations")
WRITTEN = Path("/run/topoproxy/hooks/cpus")
NEAR, FAR = node_cpus(0), node_cpus(1)
OWN = CpuSet([*list(NEAR)[-2:], *list(FAR)[-2:]])
"""The CPUs of an owner, on two nodes; a hook narrows it to those of the second node."""
KEPT = OWN & FAR
ELSE = CpuSet(list(NEAR)[:2])
"""The CPUs of another owner; a hook places its pod in another cgroup."""
BATCH = CpuSet(list(NEAR)[2:4])
SETTINGS: dict[str, object] = {
    "koordinator": {"keepCFSQuota": "always"},
    "hooks": {"timeout": "20s", "settings": {"20-quota-off": {"config": {"classes": ["LSE"]}}}},
}
NARROW = f"""
    def pre_create_container(event):
        if event.pod.name.startswith("web"):
            return api.Adjustment(cpus=api.CpuSet.parse("{FAR}"))
        if event.pod.name == "db":
            return api.Adjustment(cpus=api.CpuSet.parse("{KEPT}"), mems=api.Mask([1]))
"""
KNOBS = f"""
    known = {{}}

    def pre_create_container(event):
        if event.pod.name.startswith("web"):
            return api.Adjustment(unified={{"memory.high": "{HIGH}", "cpu.weight": "33"}})

    def synchronize(event):
        known.update((each.pod.name, each.container.id) for each in event.containers)

    def post_update_container_resources(event):
        if event.pod.name == "db":
            update = api.Update(
                cpu_shares=256, cpus=api.CpuSet.parse("{BATCH}"), unified={{"memory.high": "{HIGHER}"}}
            )
            return api.Adjustment(updates={{known["be"]: update}})
"""
GIVES = f"""
    def pre_create_container(event):
        if event.pod.name in ("guest", "batch"):
            return api.Adjustment(cpus=api.CpuSet.parse("{OWN}"))
"""
WEIGHT = str(1 + (256 - 2) * 9999 // 262142)
"""The cpu.weight of 256 shares."""
ANNOTATIONS = {
    "cpu-load-balancing.crio.io": "disable",
    "irq-load-balancing.crio.io": "disable",
    "cpu-freq-governor.crio.io": "performance",
}


@dataclass
class HookedNode(Node):
    """A node whose pods have kubelet's cgroup parents, with their uids."""

    uids: dict[str, str] = field(default_factory=dict)

    def make(
        self, kind: str, name: str, cpus: CpuSet | None = None, annotations: dict[str, str] | None = None
    ) -> str:
        uid = self.uids.setdefault(name, str(uuid.uuid5(uuid.NAMESPACE_OID, name)))
        what, slices = KINDS[kind], self.driver == "systemd"
        parts = ["kubepods", *filter(None, [what.parent]), f"pod{uid.replace('-', '_') if slices else uid}"]
        status = {"scheduling.koordinator.sh/resource-status": f'{{"cpuset": "{cpus}"}}'} if cpus else {}
        return self.cri.run_pod(
            name,
            uid=uid,
            labels={"koordinator.sh/qosClass": what.label} if what.label else {},
            annotations=status | (annotations or {}),
            cgroup_parent=f"{'-'.join(parts)}.slice" if slices else "/" + "/".join(parts),
        )

    def begin(self, kind: str, name: str, pod: str) -> None:
        """Create and start the container of a pod."""
        container = self.cri.create(pod, timeout=LONG_S, **KINDS[kind].resources)
        self.cri.start(container)
        self.ids[name] = container

    def refresh(self) -> None:
        """Connect to the restarted daemon."""
        old, self.cri = self.cri, Cri(SOCKET, "")
        self.cri.adopt(old)
        old.close()


def put(name: str, text: str) -> None:
    """Write a hook file atomically, as a bootstrap script does."""
    HOOKS.mkdir(parents=True, exist_ok=True)
    draft = HOOKS / f".{name}.new"
    draft.write_text("from proxy.hooks import api\nAPI_VERSION = 1\n" + textwrap.dedent(text))
    draft.replace(HOOKS / f"{name}.py")


def states(daemon: Daemon) -> dict[str, str]:
    reported: dict[str, Any] = daemon.status().get("hooks") or {}
    return {hook["name"]: hook["state"] for hook in reported.get("hooks", [])}


def in_use(daemon: Daemon, *names: str) -> None:
    """Wait until exactly these hooks are in use."""
    wanted = dict.fromkeys(names, "running")
    took = wait(f"hooks {', '.join(names) or 'to go'}", lambda: states(daemon) == wanted)
    step(f"in use after {took:.1f} s: {', '.join(names) or 'no hooks'}")


def healthy(daemon: Daemon) -> None:
    """Check that no hook has reported an error."""
    hooks = daemon.status()["hooks"]["hooks"]
    assert [hook["last_error"] for hook in hooks if hook["last_error"]] == [], hooks


def shared_is_narrowed(daemon: Daemon, node: HookedNode) -> None:
    """A hook that was added at run time narrows a sharer and sets cgroup files."""
    put("10-narrow", NARROW)
    put("11-knobs", KNOBS)
    for name in ("quota-off", "cpus-file", "crio-annotations"):
        done = daemon.cli("hooks", "enable", name, "--config", str(DIRECTORY / "config.yaml"))
        assert done.returncode == 0, done.stdout + done.stderr
    in_use(daemon, "10-narrow", "11-knobs", *SHIPPED)
    node.begin("ls", "web", node.make("ls", "web"))
    node.check(("web",), FAR)
    knobs(node)
    step(f"a container that shares is on {FAR}; memory.high and cpu.weight are the hook's")
    explanation = daemon.explain("default/web")
    assert f"Narrowed to CPUs {FAR} by hook 10-narrow" in explanation, explanation


def knobs(node: HookedNode) -> None:
    found = read(node.group("web"), "memory.high"), read(node.group("web"), "cpu.weight")
    assert found == (str(HIGH), "33"), found


def owner_is_narrowed(daemon: Daemon, node: HookedNode) -> Path:
    """An owner has fewer CPUs and memory nodes, and no quota, nor has its pod; returns the pod's cgroup."""
    pod = node.make("lse", "db", OWN, ANNOTATIONS)
    ends = (f"pod{node.uids['db']}", f"pod{node.uids['db'].replace('-', '_')}.slice")
    top = next(path for path in Path("/sys/fs/cgroup").rglob("kubepods*/*") if path.name.endswith(ends))
    limit(top, HAS_US)
    node.begin("lse", "db", pod)
    check_owner(node)
    assert (quota(node.group("db")), quota(top)) == (-1, -1)
    assert quota(node.group("web")) == KINDS["ls"].limit * 100
    step(f"an owner of {OWN} uses {KEPT} and the memory of node 1; no quota, nor has its pod")
    node.check(("web",), FAR - OWN, limit=LONG_S)
    node.check(("be", "plain"), ALL - OWN, limit=LONG_S)
    step("no other container has CPUs of the owner")
    warnings = (
        "out of load balancing on cgroup v2",
        "apply.partitions: isolated",
        "cannot set the governor performance",
    )
    wait("the warnings about annotations", lambda: all(warning in LOG.read_text() for warning in warnings))
    lines = [line for line in LOG.read_text().splitlines() if "cannot follow an annotation" in line]
    for line in lines:
        step(line)
    return top


def check_owner(node: HookedNode) -> None:
    node.check(("db",), KEPT, Mask([1]))
    assert read(node.group("db"), "cpuset.mems") == "1"


def check_owners_file(node: HookedNode) -> None:
    """Check that the owner's file lists its CPUs, even after changes of the pools."""
    (file,) = (WRITTEN / node.uids["db"]).glob("*/cpus")
    wanted = {f"EXCLUSIVE_CPUS={KEPT}", "SHARED_CPUS=", "MEMORY_NODES=1"}
    wait("the owner's file to name its CPUs", lambda: wanted <= set(file.read_text().splitlines()))


def interrupts_on(cpus: CpuSet) -> set[str]:
    """Return the interrupts that may be delivered to these CPUs."""
    files = Path("/proc/irq").glob("*/smp_affinity_list")
    return {file.parent.name for file in files if CpuSet.parse(file.read_text()) & cpus}


def others_are_changed(daemon: Daemon, node: HookedNode, top: Path) -> None:
    """An update of one container restores no quota, and a hook changes another container with it."""
    limit(top, HAS_US)
    node.cri.update(node.ids["db"], cpu_quota=150_000, cpu_period=100_000)
    assert quota(node.group("db")) == -1
    check_owner(node)
    batch = node.group("be")
    wait("the other container's weight", lambda: read(batch, "cpu.weight") == WEIGHT)
    wait("the other container's memory.high", lambda: read(batch, "memory.high") == str(HIGHER))
    node.check(("be",), BATCH, limit=LONG_S)
    wait("the pod's quota to be off", lambda: quota(top) == -1)
    check_owners_file(node)
    step("an update changed nothing of the owner; a hook changed another container with it")
    healthy(daemon)


def check_all(daemon: Daemon, node: HookedNode) -> None:
    """Check for ten seconds that all containers have the values of the hooks."""
    end = time.monotonic() + 10
    while True:
        check_owner(node)
        node.check(("web",), FAR - OWN)
        node.check(("plain",), ALL - OWN)
        node.check(("be",), BATCH)
        assert read(node.group("be"), "cpu.weight") == WEIGHT
        assert read(node.group("be"), "memory.high") == str(HIGHER)
        knobs(node)
        if time.monotonic() > end:
            break
        time.sleep(1)
    assert daemon.status()["violations"] == []


def lasts(daemon: Daemon, node: HookedNode, top: Path) -> None:
    """Neither a reload of systemd nor a crash of the daemon changes anything."""
    if node.driver == "systemd":
        systemctl("daemon-reload")
        check_all(daemon, node)
        step(f"daemon-reload: all as before, but for the pod's quota, which is {quota(top)}")
        assert quota(node.group("db")) == -1
    daemon.kill9()
    if node.driver == "systemd":
        systemctl("daemon-reload")
        check_owner(node)
        knobs(node)
        step("daemon-reload while the daemon is down: the owner keeps its CPUs")
    daemon.configure(**SETTINGS, apply={"partitions": "isolated"})
    daemon.start()
    node.refresh()
    in_use(daemon, "10-narrow", "11-knobs", *SHIPPED)
    wait("the daemon to be ready", lambda: bool(daemon.status()["ready"]))
    check_all(daemon, node)
    step("killed and started again: all as before")


def partition(daemon: Daemon, node: HookedNode) -> None:
    """The partition of a narrowed owner has the narrowed CPUs; older kernels reject partitions."""
    if not (node.group("db") / "cpuset.cpus.exclusive").exists():
        wait("the kernel's reason", lambda: "6.7" in row(daemon, "db/main")["reason"])
        assert kinds(node.group("db")) == "member"
    else:
        wait("the partition", lambda: kinds(node.group("db")) == "isolated")
    check_owner(node)
    step(f"partition of the narrowed owner: {row(daemon, 'db/main')}")


def elsewhere(daemon: Daemon, node: HookedNode) -> None:
    """A hook places a pod in another cgroup; the daemon finds its container there, also after a crash."""
    slices = node.driver == "systemd"
    parent = "elsewhere-podmoved.slice" if slices else "/elsewhere/podmoved"
    text = f"""
        def pre_run_pod_sandbox(event):
            return api.Adjustment(cgroup_parent="{parent}") if event.pod.name == "moved" else None
    """
    for name in ("10-narrow", "11-knobs"):
        (HOOKS / f"{name}.py").unlink()
    put("12-elsewhere", text)
    in_use(daemon, "12-elsewhere", *SHIPPED)
    pod = node.make("lsr", "moved", ELSE)
    node.begin("lsr", "moved", pod)
    directory = Path("/sys/fs/cgroup/elsewhere.slice" if slices else "/sys/fs/cgroup") / parent.strip("/")
    assert node.group("moved").parent == directory, node.group("moved")
    node.check(("moved",), ELSE, Mask([0]))
    node.check(("plain",), ALL - OWN - ELSE, limit=LONG_S)
    assert quota(node.group("moved")) == KINDS["lsr"].limit * 100, "the hook does not change this class"
    check_owners_file(node)
    step(f"a pod that a hook placed in {parent} owns {ELSE}")
    daemon.kill9()
    if slices:
        systemctl("daemon-reload")
    daemon.start()
    node.refresh()
    second = node.cri.create(pod, "second", timeout=LONG_S, **KINDS["lsr"].resources)
    node.cri.start(second)
    node.ids["second"] = second
    assert node.group("second").parent == directory, "the cgroup is the same after a crash"
    node.check(("moved", "second"), ELSE, Mask([0]), LONG_S)
    step("so does another container of the pod, after a crash")


def without(daemon: Daemon, node: HookedNode, interrupts: set[str]) -> None:
    """A removed hook does not affect new containers; a narrowed container stays narrowed."""
    pod = node.make("ls", "web-2")
    (HOOKS / "12-elsewhere.py").unlink()
    for name in SHIPPED:
        (HOOKS / f"{name}.py").unlink()
    in_use(daemon)
    wait("interrupts to be restored", lambda: interrupts_on(KEPT) >= interrupts)
    node.begin("ls", "web-2", pod)
    node.check(("web-2",), ALL - OWN - ELSE)
    assert read(node.group("web-2"), "memory.high") == "max"
    node.check(("web",), FAR - OWN)
    knobs(node)
    check_owner(node)
    step("hooks are removed: new containers are not changed, the others stay narrowed")
    for name in ("db", "moved", "second"):
        node.cri.stop(node.ids.pop(name))
    node.check(("plain", "web-2"), ALL, limit=LONG_S)
    node.check(("web",), FAR, limit=LONG_S)
    node.check(("be",), BATCH)
    step("owners have ended: other containers have their CPUs again")


def given_away(daemon: Daemon, node: HookedNode) -> None:
    """A hook gives an owner's CPUs to other containers, even BE ones, if the configuration permits it."""
    settings: dict[str, Any] = {"koordinator": {"keepCFSQuota": "always", "beCpuset": "erase"}}

    def again(**hooks: object) -> None:
        assert daemon.stop() == 0
        daemon.configure(**settings, hooks={"timeout": "20s", **hooks})
        daemon.start()
        node.refresh()
        wait("the daemon to be ready", lambda: bool(daemon.status()["ready"]))

    again(ownedCPUs=True)
    put("10-gives", GIVES)
    in_use(daemon, "10-gives")
    node.begin("lse", "db-2", node.make("lse", "db-2", OWN))
    for kind, name in (("be", "be-2"), ("ls", "guest"), ("be", "batch")):
        node.begin(kind, name, node.make(kind, name))
        assert node.place(name).effective == (ALL - OWN if name == "be-2" else OWN), node.place(name)
    node.check(("guest", "batch", "db-2"), OWN, limit=LONG_S)
    healthy(daemon)
    step(f"a hook lets other containers run on {OWN}, which a container owns")
    if node.driver == "systemd":
        systemctl("daemon-reload")
        node.check(("guest", "batch", "db-2"), OWN, limit=LONG_S)
    again()
    node.check(("guest", "batch", "be-2"), ALL - OWN, limit=LONG_S)
    node.check(("db-2",), OWN)
    assert daemon.status()["violations"] == []
    step("the hook may no longer do so: the owner has its CPUs exclusively")
    node.cri.stop(node.ids.pop("db-2"))
    node.check(("plain", "web-2", "be-2"), ALL, limit=LONG_S)


def main() -> None:
    assert not HOOKS.exists()
    daemon, node = Daemon(**SETTINGS), HookedNode(sys.argv[1])
    for kind, name in (("ls", "plain"), ("be", "be")):
        node.begin(kind, name, node.make(kind, name))
    node.check(("plain", "be"), ALL)
    shared_is_narrowed(daemon, node)
    node.check(("plain", "be"), ALL)
    interrupts = interrupts_on(KEPT)
    top = owner_is_narrowed(daemon, node)
    wait("interrupts to leave", lambda: interrupts_on(KEPT) < interrupts)
    step(f"interrupts that could go to its CPUs: {len(interrupts)}, and now {len(interrupts_on(KEPT))}")
    others_are_changed(daemon, node, top)
    lasts(daemon, node, top)
    partition(daemon, node)
    elsewhere(daemon, node)
    without(daemon, node, interrupts)
    given_away(daemon, node)
    assert place_in(node.group("be")).cpus == BATCH
    assert daemon.stop() == 0
    node.check(("plain", "web-2"), ALL)
    step("all is given back")


if __name__ == "__main__":
    main()
