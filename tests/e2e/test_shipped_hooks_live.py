"""The shipped hooks on a real containerd: their effects in containers and in the kernel."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from container_process import environment, inside
from cri import Cri, cgroup_of, online
from daemon import CPUSET_ANNOTATION, QOS_LABEL, DaemonProcess
from private_runtime import CGROUPS, PrivateRuntime, wait_for

from proxy.model.idset import CpuSet

pytestmark = pytest.mark.e2e

SHIPPED = Path(__file__).parents[2] / "hooks"
ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
UID = "0f9a3c52-6f0f-4c43-9d0e-3f6d5a1c7e11"
LIMITED: dict[str, Any] = {"cpu_period": 100_000, "cpu_quota": 100_000, "cpu_shares": 1024}
CPU = next((CGROUPS / name for name in ("cpu", "cpu,cpuacct") if (CGROUPS / name).is_dir()), CGROUPS)


class ShippedHooksNode:
    """A daemon with shipped hooks, and a client of it."""

    def __init__(self, daemon: DaemonProcess, cri: Cri, directory: Path) -> None:
        self.daemon = daemon
        self.cri = cri
        self.directory = directory

    def pod(self, name: str, uid: str, qos: str, annotations: dict[str, str] | None = None) -> str:
        own = {CPUSET_ANNOTATION: json.dumps({"cpuset": str(LAST)})} if qos in ("LSE", "LSR") else {}
        return self.cri.run_pod(
            name,
            uid=uid,
            labels={QOS_LABEL: qos},
            annotations={**own, **(annotations or {})},
            cgroup_parent=f"/kubepods/pod{uid}",
        )


def cpus_file(container: str) -> dict[str, str]:
    lines = inside(container, "/run/topoproxy/cpus").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.fixture
def start_node(
    runtime: PrivateRuntime, tmp_path: Path, start_daemon: Callable[..., DaemonProcess]
) -> Iterator[Callable[..., ShippedHooksNode]]:
    """Start a daemon whose hook directory has links to some of the shipped hooks."""
    clients: list[Cri] = []

    def make(*names: str, settings: dict[str, object] | None = None, **config: object) -> ShippedHooksNode:
        directory = tmp_path / "hooks.d"
        directory.mkdir()
        for name in names:
            (directory / f"{name}.py").symlink_to(SHIPPED / f"{name}.py")
        hooks = {
            "directory": str(directory),
            "vendorDirectory": str(tmp_path / "none"),
            "serverDirectory": "",
            "timeout": "5s",
            "settings": {name: {"config": keys} for name, keys in (settings or {}).items()},
        }
        daemon = start_daemon(hooks=hooks, **config)
        clients.append(daemon.client())
        return ShippedHooksNode(daemon, clients[-1], tmp_path)

    yield make
    for client in clients:
        client.close()
    runtime.clear()


def test_the_file_with_a_containers_cpus_follows_their_changes(
    start_node: Callable[..., ShippedHooksNode], tmp_path: Path
) -> None:
    root = tmp_path / "cpus"
    node = start_node("30-cpus-file", settings={"30-cpus-file": {"root": str(root), "which": "all"}})
    sharer = node.cri.run(node.pod("web", "uid-web", "LS"))
    assert environment(sharer)["SHARED_CPUS"] == str(ALL) == cpus_file(sharer)["SHARED_CPUS"]
    with pytest.raises(OSError, match="Read-only file system"):
        inside(sharer, "/run/topoproxy/cpus").write_text("lies")

    pod = node.pod("db", UID, "LSE")
    owner = node.cri.run(pod)
    assert environment(owner)["EXCLUSIVE_CPUS"] == str(LAST) == cpus_file(owner)["EXCLUSIVE_CPUS"]
    assert cpus_file(owner)["SHARED_CPUS"] == ""
    wait_for("the sharer's file to follow", lambda: cpus_file(sharer)["SHARED_CPUS"] == str(REST))
    assert environment(sharer)["SHARED_CPUS"] == str(ALL), "the environment keeps the CPUs of the create"

    node.cri.stop(owner)
    node.cri.remove(owner)
    wait_for("the sharer's file to list all CPUs again", lambda: cpus_file(sharer)["SHARED_CPUS"] == str(ALL))
    wait_for("the owner's directory to be removed", lambda: not (root / UID).exists())
    node.daemon.restart()
    wait_for("the file after a restart", lambda: cpus_file(sharer)["SHARED_CPUS"] == str(ALL))


def test_an_annotation_removes_the_quota_of_one_pod_only(start_node: Callable[..., ShippedHooksNode]) -> None:
    file, none = (
        ("cpu.max", "max") if (CGROUPS / "cgroup.controllers").exists() else ("cpu.cfs_quota_us", "-1")
    )

    def quota(group: Path | None) -> str:
        assert group is not None
        return (group / file).read_text().split()[0]

    settings = {"20-quota-off": {"annotation": "example.com/quota=off"}}
    node = start_node("20-quota-off", settings=settings, koordinator={"keepCFSQuota": "always"})
    other_uid = UID.replace("0f9a", "1f9a")
    chosen = node.pod("db", UID, "LSE", {"example.com/quota": "off"})
    (path,) = CPU.glob(f"{node.cri._cgroup.strip('/')}/**/pod{UID}")
    (path / file).write_text("100000")
    free = node.cri.run(chosen, **LIMITED)
    assert (quota(cgroup_of(free, CPU)), quota(path)) == (none, none)
    node.cri.update(free, **LIMITED)
    assert quota(cgroup_of(free, CPU)) == none
    node.cri.stop(free)
    node.cri.remove(free)

    held = node.cri.run(node.pod("db2", other_uid, "LSE"), **LIMITED)
    assert quota(cgroup_of(held, CPU)) == "100000"


def test_interrupts_leave_an_owners_cpus_and_are_restored(
    start_node: Callable[..., ShippedHooksNode], tmp_path: Path
) -> None:
    irq = tmp_path / "proc/irq/9/smp_affinity_list"  # a copy: the test must not change the host's interrupts
    irq.parent.mkdir(parents=True)
    irq.write_text(f"{ALL}\n")
    mask = tmp_path / "proc/irq/default_smp_affinity"
    mask.write_text(f"{ALL.bits:x}\n")
    keys = {"proc": str(tmp_path / "proc"), "state": str(tmp_path / "irqs.json")}
    node = start_node("40-irq-affinity", settings={"40-irq-affinity": keys})
    owner = node.cri.run(node.pod("db", UID, "LSE"))
    wait_for("interrupts to leave", lambda: irq.read_text().strip() == str(REST))
    node.daemon.restart()
    wait_for("interrupts to leave again", lambda: irq.read_text().strip() == str(REST))
    node.cri.channel.close()
    with node.daemon.client() as cri:
        cri.stop(owner)
        wait_for("interrupts to be restored", lambda: irq.read_text().strip() == str(ALL))


def test_crio_annotations_work_on_containerd_and_changes_are_logged(
    start_node: Callable[..., ShippedHooksNode], tmp_path: Path
) -> None:
    keys = {name: str(tmp_path / name) for name in ("proc", "sysfs", "irq_state", "power_state")}
    node = start_node(
        "50-crio-annotations",
        "90-differ",
        settings={"50-crio-annotations": keys},
        koordinator={"keepCFSQuota": "always"},
    )
    annotations = {"cpu-quota.crio.io": "disable", "irq-load-balancing.crio.io": "housekeeping"}
    owner = node.cri.run(node.pod("db", UID, "LSE", annotations), **LIMITED)
    assert environment(owner)["OPENSHIFT_HOUSEKEEPING_CPUS"] == str(LAST)
    line = next(
        line for line in node.daemon.log.read_text().splitlines() if "hooks changed a request" in line
    )
    assert "default/db" in line
    assert "50-crio-annotations: cpu_quota 100000 -> -1, envs[OPENSHIFT_HOUSEKEEPING_CPUS]" in line
    assert "HOUSEKEEPING_CPUS] " not in line, "only the names of variables are logged"
