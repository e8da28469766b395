"""``topoproxy release`` on a real containerd: released containers equal those that were never managed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cri import Cri, cgroup_of, cpuset_of, online
from daemon import KINDS, PROGRAM, DaemonProcess, ModeledNode
from private_runtime import CGROUPS, PrivateRuntime, wait_for

from proxy.model.idset import CpuSet

pytestmark = pytest.mark.e2e

V2 = (CGROUPS / "cgroup.controllers").exists()
CPU = next((CGROUPS / name for name in ("cpu", "cpu,cpuacct") if (CGROUPS / name).is_dir()), CGROUPS)
LIMITED = {"cpu_period": 100_000, "cpu_quota": 60_000, "cpu_shares": 1024}
LAST = CpuSet([max(online())])
POD_QUOTA = 100_000


def quota(container: str) -> int:
    path = cgroup_of(container, CPU)
    assert path is not None
    return quota_at(path)


def quota_at(path: Path) -> int:
    value = (path / ("cpu.max" if V2 else "cpu.cfs_quota_us")).read_text().split()[0]
    return -1 if value == "max" else int(value)


def spec(runtime: PrivateRuntime, container: str) -> dict[str, Any]:
    """Return the CPU resources of the runtime's saved spec."""
    with runtime.client() as direct:
        document = json.loads(direct.status(container, verbose=True).info["info"])
    saved = document["runtimeSpec"]["linux"]["resources"]["cpu"]
    return {key: saved.get(key) for key in ("cpus", "mems", "quota", "period", "shares")}


def check_equal(runtime: PrivateRuntime, ours: str, direct: str) -> None:
    """Check that a released container and one that was never managed are equal in kernel and saved spec."""
    released, unmanaged = cpuset_of(ours), cpuset_of(direct)
    assert (released.cpus, released.effective, released.mems) == (
        unmanaged.cpus,
        unmanaged.effective,
        unmanaged.mems,
    )
    assert quota(ours) == quota(direct)
    saved, plain = spec(runtime, ours), spec(runtime, direct)
    # An update cannot remove a cpuset from a saved spec: one has it explicitly, the other inherits it.
    saved["cpus"], plain["cpus"] = (each["cpus"] or str(unmanaged.effective) for each in (saved, plain))
    saved["mems"], plain["mems"] = (each["mems"] or str(unmanaged.mems) for each in (saved, plain))
    assert saved == plain


class ReleaseScenario:
    """An owner, a sharer, a BE container, one whose request names CPUs, and one that is not started."""

    def __init__(self, runtime: PrivateRuntime, daemon: DaemonProcess, client: Cri, direct: Cri) -> None:
        self.runtime, self.daemon, self.direct = runtime, daemon, direct
        self.node = node = ModeledNode(runtime, daemon, client)
        pod = node.pod("lsr", LAST, name="db")
        (self.db_group,) = CPU.glob(f"{runtime.cgroup.strip('/')}/**/pod-db")
        (self.db_group / ("cpu.max" if V2 else "cpu.cfs_quota_us")).write_text(str(POD_QUOTA))
        self.ids = {
            "owner": node.run(pod, **LIMITED),
            "shares": node.run(node.pod("burstable", name="web"), **LIMITED),
            "be": node.spawn("be"),
            "names": node.run(node.pod("burstable", name="named"), **LIMITED, cpuset_cpus="0"),
        }
        self.created = node.create(node.pod("burstable", name="later"), **LIMITED)
        rest = online() - LAST
        assert cpuset_of(self.ids["owner"]).cpus == LAST
        assert cpuset_of(self.ids["shares"]).cpus == rest
        assert quota(self.ids["owner"]) == quota_at(self.db_group) == -1
        ledger = daemon.directory / "state/ledger.jsonl"  # the record of a sharing container is written later
        wait_for("the ledger", lambda: f"c/{self.created}" in ledger.read_text())

    def check(self) -> None:
        """Check that every container is as if it had never been managed."""
        direct, made = self.direct, {}
        for kind, parent, resources in (
            ("owner", "/kubepods", LIMITED),
            ("shares", "/kubepods/burstable", LIMITED),
            ("be", "/kubepods/besteffort", KINDS["be"].resources),
            ("names", "/kubepods/burstable", {**LIMITED, "cpuset_cpus": "0"}),
        ):
            pod = direct.run_pod(f"plain-{kind}", cgroup_parent=f"{parent}/pod-plain-{kind}")
            made[kind] = direct.run(pod, **resources)
        for kind, container in made.items():
            check_equal(self.runtime, self.ids[kind], container)
        assert quota_at(self.db_group) == POD_QUOTA
        with self.daemon.runtime.client() as client:
            client.start(self.created)
        check_equal(self.runtime, self.created, made["shares"])
        for container in (*self.ids.values(), self.created):
            before = cpuset_of(container)
            direct.update(container, cpu_shares=512)
            assert cpuset_of(container) == before  # the saved spec has the same values
        assert quota(self.ids["owner"]) == LIMITED["cpu_quota"]


@pytest.fixture
def start_scenario(
    runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess]
) -> Iterator[Callable[..., ReleaseScenario]]:
    clients: list[Cri] = []

    def scenario(**config: object) -> ReleaseScenario:
        daemon = start_daemon(**config)
        clients.extend((daemon.client(), runtime.client()))
        return ReleaseScenario(runtime, daemon, *clients[-2:])

    yield scenario
    for client in clients:
        client.close()
    runtime.clear()


def release(daemon: DaemonProcess, *args: str) -> subprocess.CompletedProcess[str]:
    """Run ``topoproxy release`` for the daemon; with ``--offline`` also with the daemon's settings."""
    command = [PROGRAM, "release", "--config", daemon.directory / "config.yaml"]
    command += ["--listen", f"unix://{daemon.socket}", *args]
    if "--offline" in args:
        command += ["--runtime", f"unix://{daemon.runtime.socket}", "--state-dir", daemon.directory / "state"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


def test_an_online_release_and_its_undo(start_scenario: Callable[..., ReleaseScenario]) -> None:
    scenario = start_scenario()
    done = release(scenario.daemon)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("released: 5 containers")
    assert scenario.daemon.status()["mode"] == "released"
    scenario.check()
    # The daemon only forwards calls: a new LSE pod owns nothing, also after a restart.
    late = scenario.node.cri.run(
        scenario.node.pod("lse", LAST, name="late"), command=["sleep", "3600"], **LIMITED
    )
    scenario.daemon.restart()
    wait_for("the daemon to be ready", lambda: scenario.daemon.status()["ready"])
    assert scenario.daemon.status()["mode"] == "released"
    scenario.daemon.wait_for_reconciles()
    assert {cpuset_of(c).cpus for c in (late, scenario.ids["shares"], scenario.ids["owner"])} == {online()}
    assert release(scenario.daemon, "--offline").returncode == 75
    done = release(scenario.daemon, "--undo")
    assert (done.returncode, done.stdout) == (0, "containers are placed again\n"), done.stderr
    wait_for("the owner to have its CPUs", lambda: cpuset_of(scenario.ids["owner"]).cpus == LAST)
    wait_for("other containers to leave", lambda: cpuset_of(scenario.ids["shares"]).cpus == online() - LAST)
    wait_for(
        "the owner's quota to be removed",
        lambda: quota(scenario.ids["owner"]) == quota_at(scenario.db_group) == -1,
    )
    assert release(scenario.daemon, "--undo").returncode == 65


def test_an_offline_release(start_scenario: Callable[..., ReleaseScenario]) -> None:
    scenario = start_scenario()
    scenario.daemon.kill9()
    done = release(scenario.daemon)
    assert done.returncode == 69
    assert "--offline" in done.stderr
    done = release(scenario.daemon, "--offline")
    assert done.returncode == 0, done.stderr
    scenario.check()
    scenario.daemon.start()
    wait_for("the daemon to be ready", lambda: scenario.daemon.status()["ready"])
    assert scenario.daemon.status()["mode"] == "released"
    assert cpuset_of(scenario.ids["owner"]).cpus == online()


def test_a_release_continues_after_a_kill_of_the_daemon(
    start_scenario: Callable[..., ReleaseScenario],
) -> None:
    scenario = start_scenario(settle={"perSecond": 1})
    with subprocess.Popen(
        [
            *(PROGRAM, "release", "--config", scenario.daemon.directory / "config.yaml"),
            *("--listen", f"unix://{scenario.daemon.socket}"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        wait_for(
            "the first update", lambda: scenario.daemon.status().get("release", {}).get("updated", 0) >= 1
        )
        assert scenario.daemon.status()["mode"] == "releasing"
        scenario.daemon.kill9()
        command.communicate(timeout=60)
        assert command.returncode == 69
    scenario.daemon.start()
    wait_for("the release to be complete", lambda: scenario.daemon.status()["mode"] == "released")
    scenario.check()


def test_containers_are_released_at_a_stop_if_configured(
    start_scenario: Callable[..., ReleaseScenario],
) -> None:
    scenario = start_scenario(releaseAtStop=True)
    assert scenario.daemon.stop() == 0
    scenario.check()
    scenario.daemon.start()
    wait_for("the daemon to be ready", lambda: scenario.daemon.status()["ready"])
    assert scenario.daemon.status()["mode"] == "enforce"
    wait_for("the owner to have its CPUs", lambda: cpuset_of(scenario.ids["owner"]).cpus == LAST)


def test_a_release_in_observe_mode_does_nothing(
    start_scenario: Callable[..., DaemonProcess], start_daemon: Callable[..., DaemonProcess]
) -> None:
    daemon = start_daemon(mode="observe")
    done = release(daemon)
    assert done.returncode == 0
    assert "there is nothing to release: in observe mode no container is moved" in done.stdout


def group_cpus(container: str) -> set[CpuSet]:
    """Return the CPUs of the cgroups of a BE container: its own, those of its pod, and that of its class."""
    own = cgroup_of(container)
    assert own is not None
    pod = own.parent
    groups = (own, pod, pod.parent, *(path for path in pod.iterdir() if path.is_dir()))
    return {CpuSet.parse((path / "cpuset.cpus").read_text()) for path in groups}


def test_parent_cgroups_of_be_containers_are_released_too(
    runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(runtime.clear)
    daemon = start_daemon(
        koordinator={"beCpuset": "erase"}, beSuppress={"mode": "cfs-quota", "period": "100ms"}
    )
    with daemon.client() as client, runtime.client() as direct:
        node = ModeledNode(runtime, daemon, client)
        container = node.run(node.pod("be"))
        node.run(node.pod("lse", LAST))
        assert group_cpus(container) == {online() - LAST}
        (above,) = CPU.glob(f"{runtime.cgroup.strip('/')}/kubepods/besteffort")
        wait_for("the quota of BE pods", lambda: quota_at(above) != -1)
        done = release(daemon)
        assert done.returncode == 0, done.stderr
        assert group_cpus(container) == {online()}
        assert quota_at(above) == -1
        pod = direct.run_pod("plain", cgroup_parent="/kubepods/besteffort/pod-plain")
        plain = direct.run(pod, **KINDS["be"].resources)
        check_equal(runtime, container, plain)
        daemon.wait_for_reconciles(1)
        assert (group_cpus(container), quota_at(above)) == ({online()}, -1)


def test_sandboxes_have_all_cpus_after_a_release(start_scenario: Callable[..., ReleaseScenario]) -> None:
    scenario = start_scenario()
    sandboxes = [pod.id for pod in scenario.direct.list_pods()]
    wait_for("the daemon to be ready", lambda: scenario.daemon.status()["ready"])
    assert release(scenario.daemon).returncode == 0
    assert {cpuset_of(sandbox).cpus for sandbox in sandboxes} == {online()}
