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
from vm_guest import ALL, DIRECTORY, LONG_S, SOCKET, GuestDaemon, node_cpus, place_in, step, wait
from vm_partitions import partition_row, partition_type, read_file
from vm_pools import KINDS, GuestNode
from vm_quota import limit, quota
from vm_unit_properties import systemctl

from proxy.model.idset import CpuSet, Mask

HOOKS = Path("/etc/topoproxy/hooks.d")
LOG = Path("/out/proxy.log")
MIB = 1 << 20
MEMORY_HIGH, HIGHER_MEMORY_HIGH = 48 * MIB, 64 * MIB
QUOTA_US = 300_000
SHIPPED = ("20-quota-off", "30-cpus-file", "50-crio-annotations")
WRITTEN = Path("/run/topoproxy/hooks/cpus")
NEAR, FAR = node_cpus(0), node_cpus(1)
OWN = CpuSet([*list(NEAR)[-2:], *list(FAR)[-2:]])
"""The CPUs of an owner, on two nodes; a hook narrows it to those of the second node."""
NARROWED = OWN & FAR
OTHER_OWN = CpuSet(list(NEAR)[:2])
"""The CPUs of another owner; a hook places its pod in another cgroup."""
BE_CPUS = CpuSet(list(NEAR)[2:4])
SETTINGS: dict[str, object] = {
    "koordinator": {"keepCFSQuota": "always"},
    "hooks": {"timeout": "20s", "settings": {"20-quota-off": {"config": {"classes": ["LSE"]}}}},
}
NARROW_HOOK = f"""
    def pre_create_container(event):
        if event.pod.name.startswith("web"):
            return api.Adjustment(cpus=api.CpuSet.parse("{FAR}"))
        if event.pod.name == "db":
            return api.Adjustment(cpus=api.CpuSet.parse("{NARROWED}"), mems=api.Mask([1]))
"""
CGROUP_FILES_HOOK = f"""
    known = {{}}

    def pre_create_container(event):
        if event.pod.name.startswith("web"):
            return api.Adjustment(unified={{"memory.high": "{MEMORY_HIGH}", "cpu.weight": "33"}})

    def synchronize(event):
        known.update((each.pod.name, each.container.id) for each in event.containers)

    def post_update_container_resources(event):
        if event.pod.name == "db":
            update = api.Update(
                cpu_shares=256,
                cpus=api.CpuSet.parse("{BE_CPUS}"),
                unified={{"memory.high": "{HIGHER_MEMORY_HIGH}"}},
            )
            return api.Adjustment(updates={{known["be"]: update}})
"""
GIVE_AWAY_HOOK = f"""
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
class GuestHookNode(GuestNode):
    """A node whose pods have kubelet's cgroup parents, with their uids."""

    uids: dict[str, str] = field(default_factory=dict)

    def run_pod(
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

    def run_container(self, kind: str, name: str, pod: str) -> None:
        """Create and start the container of a pod."""
        container = self.cri.create(pod, timeout=LONG_S, **KINDS[kind].resources)
        self.cri.start(container)
        self.ids[name] = container

    def reconnect(self) -> None:
        """Connect to the restarted daemon."""
        old, self.cri = self.cri, Cri(SOCKET, "")
        self.cri.adopt(old)
        old.close()


def put_hook(name: str, text: str) -> None:
    """Write a hook file atomically, as a bootstrap script does."""
    HOOKS.mkdir(parents=True, exist_ok=True)
    draft = HOOKS / f".{name}.new"
    draft.write_text("from proxy.hooks import api\nAPI_VERSION = 1\n" + textwrap.dedent(text))
    draft.replace(HOOKS / f"{name}.py")


def hook_states(daemon: GuestDaemon) -> dict[str, str]:
    reported: dict[str, Any] = daemon.status().get("hooks") or {}
    return {hook["name"]: hook["state"] for hook in reported.get("hooks", [])}


def wait_until_in_use(daemon: GuestDaemon, *names: str) -> None:
    """Wait until exactly these hooks are in use."""
    wanted = dict.fromkeys(names, "running")
    took = wait(f"hooks {', '.join(names) or 'to go'}", lambda: hook_states(daemon) == wanted)
    step(f"in use after {took:.1f} s: {', '.join(names) or 'no hooks'}")


def check_no_hook_errors(daemon: GuestDaemon) -> None:
    """Check that no hook has reported an error."""
    hooks = daemon.status()["hooks"]["hooks"]
    assert [hook["last_error"] for hook in hooks if hook["last_error"]] == [], hooks


def shared_is_narrowed(daemon: GuestDaemon, node: GuestHookNode) -> None:
    """A hook that was added at run time narrows a sharer and sets cgroup files."""
    put_hook("10-narrow", NARROW_HOOK)
    put_hook("11-knobs", CGROUP_FILES_HOOK)
    for name in ("quota-off", "cpus-file", "crio-annotations"):
        done = daemon.cli("hooks", "enable", name, "--config", str(DIRECTORY / "config.yaml"))
        assert done.returncode == 0, done.stdout + done.stderr
    wait_until_in_use(daemon, "10-narrow", "11-knobs", *SHIPPED)
    node.run_container("ls", "web", node.run_pod("ls", "web"))
    node.check(("web",), FAR)
    check_cgroup_files(node)
    step(f"a container that shares is on {FAR}; memory.high and cpu.weight are the hook's")
    explanation = daemon.explain("default/web")
    assert f"Narrowed to CPUs {FAR} by hook 10-narrow" in explanation, explanation


def check_cgroup_files(node: GuestHookNode) -> None:
    found = read_file(node.group("web"), "memory.high"), read_file(node.group("web"), "cpu.weight")
    assert found == (str(MEMORY_HIGH), "33"), found


def owner_is_narrowed(daemon: GuestDaemon, node: GuestHookNode) -> Path:
    """An owner has fewer CPUs and memory nodes, and no quota, nor has its pod; returns the pod's cgroup."""
    pod = node.run_pod("lse", "db", OWN, ANNOTATIONS)
    ends = (f"pod{node.uids['db']}", f"pod{node.uids['db'].replace('-', '_')}.slice")
    top = next(path for path in Path("/sys/fs/cgroup").rglob("kubepods*/*") if path.name.endswith(ends))
    limit(top, QUOTA_US)
    node.run_container("lse", "db", pod)
    check_owner(node)
    assert (quota(node.group("db")), quota(top)) == (-1, -1)
    assert quota(node.group("web")) == KINDS["ls"].limit * 100
    step(f"an owner of {OWN} uses {NARROWED} and the memory of node 1; no quota, nor has its pod")
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


def check_owner(node: GuestHookNode) -> None:
    node.check(("db",), NARROWED, Mask([1]))
    assert read_file(node.group("db"), "cpuset.mems") == "1"


def check_owners_file(node: GuestHookNode) -> None:
    """Check that the owner's file lists its CPUs, even after changes of the pools."""
    (file,) = (WRITTEN / node.uids["db"]).glob("*/cpus")
    wanted = {f"EXCLUSIVE_CPUS={NARROWED}", "SHARED_CPUS=", "MEMORY_NODES=1"}
    wait("the owner's file to name its CPUs", lambda: wanted <= set(file.read_text().splitlines()))


def interrupts_on(cpus: CpuSet) -> set[str]:
    """Return the interrupts that may be delivered to these CPUs."""
    files = Path("/proc/irq").glob("*/smp_affinity_list")
    return {file.parent.name for file in files if CpuSet.parse(file.read_text()) & cpus}


def others_are_changed(daemon: GuestDaemon, node: GuestHookNode, top: Path) -> None:
    """An update of one container restores no quota, and a hook changes another container with it."""
    limit(top, QUOTA_US)
    node.cri.update(node.ids["db"], cpu_quota=150_000, cpu_period=100_000)
    assert quota(node.group("db")) == -1
    check_owner(node)
    batch = node.group("be")
    wait("the other container's weight", lambda: read_file(batch, "cpu.weight") == WEIGHT)
    wait(
        "the other container's memory.high",
        lambda: read_file(batch, "memory.high") == str(HIGHER_MEMORY_HIGH),
    )
    node.check(("be",), BE_CPUS, limit=LONG_S)
    wait("the pod's quota to be off", lambda: quota(top) == -1)
    check_owners_file(node)
    step("an update changed nothing of the owner; a hook changed another container with it")
    check_no_hook_errors(daemon)


def check_all(daemon: GuestDaemon, node: GuestHookNode) -> None:
    """Check for ten seconds that all containers have the values of the hooks."""
    end = time.monotonic() + 10
    while True:
        check_owner(node)
        node.check(("web",), FAR - OWN)
        node.check(("plain",), ALL - OWN)
        node.check(("be",), BE_CPUS)
        assert read_file(node.group("be"), "cpu.weight") == WEIGHT
        assert read_file(node.group("be"), "memory.high") == str(HIGHER_MEMORY_HIGH)
        check_cgroup_files(node)
        if time.monotonic() > end:
            break
        time.sleep(1)
    assert daemon.status()["violations"] == []


def changes_last(daemon: GuestDaemon, node: GuestHookNode, top: Path) -> None:
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
        check_cgroup_files(node)
        step("daemon-reload while the daemon is down: the owner keeps its CPUs")
    daemon.configure(**SETTINGS, apply={"partitions": "isolated"})
    daemon.start()
    node.reconnect()
    wait_until_in_use(daemon, "10-narrow", "11-knobs", *SHIPPED)
    wait("the daemon to be ready", lambda: bool(daemon.status()["ready"]))
    check_all(daemon, node)
    step("killed and started again: all as before")


def narrowed_owner_has_partition(daemon: GuestDaemon, node: GuestHookNode) -> None:
    """The partition of a narrowed owner has the narrowed CPUs; older kernels reject partitions."""
    if not (node.group("db") / "cpuset.cpus.exclusive").exists():
        wait("the kernel's reason", lambda: "6.7" in partition_row(daemon, "db/main")["reason"])
        assert partition_type(node.group("db")) == "member"
    else:
        wait("the partition", lambda: partition_type(node.group("db")) == "isolated")
    check_owner(node)
    step(f"partition of the narrowed owner: {partition_row(daemon, 'db/main')}")


def pod_in_another_cgroup(daemon: GuestDaemon, node: GuestHookNode) -> None:
    """A hook places a pod in another cgroup; the daemon finds its container there, also after a crash."""
    slices = node.driver == "systemd"
    parent = "elsewhere-podmoved.slice" if slices else "/elsewhere/podmoved"
    text = f"""
        def pre_run_pod_sandbox(event):
            return api.Adjustment(cgroup_parent="{parent}") if event.pod.name == "moved" else None
    """
    for name in ("10-narrow", "11-knobs"):
        (HOOKS / f"{name}.py").unlink()
    put_hook("12-elsewhere", text)
    wait_until_in_use(daemon, "12-elsewhere", *SHIPPED)
    pod = node.run_pod("lsr", "moved", OTHER_OWN)
    node.run_container("lsr", "moved", pod)
    directory = Path("/sys/fs/cgroup/elsewhere.slice" if slices else "/sys/fs/cgroup") / parent.strip("/")
    assert node.group("moved").parent == directory, node.group("moved")
    node.check(("moved",), OTHER_OWN, Mask([0]))
    node.check(("plain",), ALL - OWN - OTHER_OWN, limit=LONG_S)
    assert quota(node.group("moved")) == KINDS["lsr"].limit * 100, "the hook does not change this class"
    check_owners_file(node)
    step(f"a pod that a hook placed in {parent} owns {OTHER_OWN}")
    daemon.kill9()
    if slices:
        systemctl("daemon-reload")
    daemon.start()
    node.reconnect()
    second = node.cri.create(pod, "second", timeout=LONG_S, **KINDS["lsr"].resources)
    node.cri.start(second)
    node.ids["second"] = second
    assert node.group("second").parent == directory, "the cgroup is the same after a crash"
    node.check(("moved", "second"), OTHER_OWN, Mask([0]), LONG_S)
    step("so does another container of the pod, after a crash")


def hooks_are_removed(daemon: GuestDaemon, node: GuestHookNode, interrupts: set[str]) -> None:
    """A removed hook does not affect new containers; a narrowed container stays narrowed."""
    pod = node.run_pod("ls", "web-2")
    (HOOKS / "12-elsewhere.py").unlink()
    for name in SHIPPED:
        (HOOKS / f"{name}.py").unlink()
    wait_until_in_use(daemon)
    wait("interrupts to be restored", lambda: interrupts_on(NARROWED) >= interrupts)
    node.run_container("ls", "web-2", pod)
    node.check(("web-2",), ALL - OWN - OTHER_OWN)
    assert read_file(node.group("web-2"), "memory.high") == "max"
    node.check(("web",), FAR - OWN)
    check_cgroup_files(node)
    check_owner(node)
    step("hooks are removed: new containers are not changed, the others stay narrowed")
    for name in ("db", "moved", "second"):
        node.cri.stop(node.ids.pop(name))
    node.check(("plain", "web-2"), ALL, limit=LONG_S)
    node.check(("web",), FAR, limit=LONG_S)
    node.check(("be",), BE_CPUS)
    step("owners have ended: other containers have their CPUs again")


def owned_cpus_are_given_away(daemon: GuestDaemon, node: GuestHookNode) -> None:
    """A hook gives an owner's CPUs to other containers, even BE ones, if the configuration permits it."""
    settings: dict[str, Any] = {"koordinator": {"keepCFSQuota": "always", "beCpuset": "erase"}}

    def again(**hooks: object) -> None:
        assert daemon.stop() == 0
        daemon.configure(**settings, hooks={"timeout": "20s", **hooks})
        daemon.start()
        node.reconnect()
        wait("the daemon to be ready", lambda: bool(daemon.status()["ready"]))

    again(ownedCPUs=True)
    put_hook("10-gives", GIVE_AWAY_HOOK)
    wait_until_in_use(daemon, "10-gives")
    node.run_container("lse", "db-2", node.run_pod("lse", "db-2", OWN))
    for kind, name in (("be", "be-2"), ("ls", "guest"), ("be", "batch")):
        node.run_container(kind, name, node.run_pod(kind, name))
        assert node.place(name).effective == (ALL - OWN if name == "be-2" else OWN), node.place(name)
    node.check(("guest", "batch", "db-2"), OWN, limit=LONG_S)
    check_no_hook_errors(daemon)
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
    daemon, node = GuestDaemon(**SETTINGS), GuestHookNode(sys.argv[1])
    for kind, name in (("ls", "plain"), ("be", "be")):
        node.run_container(kind, name, node.run_pod(kind, name))
    node.check(("plain", "be"), ALL)
    shared_is_narrowed(daemon, node)
    node.check(("plain", "be"), ALL)
    interrupts = interrupts_on(NARROWED)
    top = owner_is_narrowed(daemon, node)
    wait("interrupts to leave", lambda: interrupts_on(NARROWED) < interrupts)
    step(f"interrupts that could go to its CPUs: {len(interrupts)}, and now {len(interrupts_on(NARROWED))}")
    others_are_changed(daemon, node, top)
    changes_last(daemon, node, top)
    narrowed_owner_has_partition(daemon, node)
    pod_in_another_cgroup(daemon, node)
    hooks_are_removed(daemon, node, interrupts)
    owned_cpus_are_given_away(daemon, node)
    assert place_in(node.group("be")).cpus == BE_CPUS
    assert daemon.stop() == 0
    node.check(("plain", "web-2"), ALL)
    step("all is given back")


if __name__ == "__main__":
    main()
