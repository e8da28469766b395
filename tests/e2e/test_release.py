"""Leaving a real containerd: what containers have then is what one has that was never ours."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bed import CGROUPS, Bed, wait_for
from cri import Cri, cgroup_of, cpuset_of, online
from daemon import KINDS, PROGRAM, Daemon, Node

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
    word = (path / ("cpu.max" if V2 else "cpu.cfs_quota_us")).read_text().split()[0]
    return -1 if word == "max" else int(word)


def spec(bed: Bed, container: str) -> dict[str, Any]:
    """The CPU part of what the runtime has saved."""
    with bed.client() as direct:
        document = json.loads(direct.status(container, verbose=True).info["info"])
    saved = document["runtimeSpec"]["linux"]["resources"]["cpu"]
    return {key: saved.get(key) for key in ("cpus", "mems", "quota", "period", "shares")}


def alike(bed: Bed, ours: str, direct: str) -> None:
    """Kernel and saved spec of one that was ours are those of one that never was."""
    has, without = cpuset_of(ours), cpuset_of(direct)
    assert (has.cpus, has.effective, has.mems) == (without.cpus, without.effective, without.mems)
    assert quota(ours) == quota(direct)
    saved, never = spec(bed, ours), spec(bed, direct)
    # An update cannot take a set out of a saved spec: what the one inherits, the other has by name.
    saved["cpus"], never["cpus"] = (each["cpus"] or str(without.effective) for each in (saved, never))
    saved["mems"], never["mems"] = (each["mems"] or str(without.mems) for each in (saved, never))
    assert saved == never


class Scenario:
    """An owner, a container that shares, a BE pod, one that names CPUs, and one that is not started."""

    def __init__(self, bed: Bed, daemon: Daemon, client: Cri, direct: Cri) -> None:
        self.bed, self.daemon, self.direct = bed, daemon, direct
        self.node = node = Node(bed, daemon, client)
        pod = node.pod("lsr", LAST, name="db")
        (self.db_group,) = CPU.glob(f"{bed.cgroup.strip('/')}/**/pod-db")
        (self.db_group / ("cpu.max" if V2 else "cpu.cfs_quota_us")).write_text(str(POD_QUOTA))
        self.ids = {
            "owner": node.run(pod, **LIMITED),
            "shares": node.run(node.pod("burstable", name="web"), **LIMITED),
            "be": node.spawn("be"),
            "names": node.run(node.pod("burstable", name="named"), **LIMITED, cpuset_cpus="0"),
        }
        self.unborn = node.create(node.pod("burstable", name="later"), **LIMITED)
        rest = online() - LAST
        assert cpuset_of(self.ids["owner"]).cpus == LAST
        assert cpuset_of(self.ids["shares"]).cpus == rest
        assert quota(self.ids["owner"]) == quota_at(self.db_group) == -1
        ledger = daemon.directory / "state/ledger.jsonl"  # a sharing container is written a moment later
        wait_for("the ledger", lambda: f"c/{self.unborn}" in ledger.read_text())

    def check(self) -> None:
        """Every container is as it would be without us."""
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
            alike(self.bed, self.ids[kind], container)
        assert quota_at(self.db_group) == POD_QUOTA
        with self.daemon.bed.client() as client:
            client.start(self.unborn)
        alike(self.bed, self.unborn, made["shares"])
        for container in (*self.ids.values(), self.unborn):
            before = cpuset_of(container)
            direct.update(container, cpu_shares=512)
            assert cpuset_of(container) == before  # what is saved agrees
        assert quota(self.ids["owner"]) == LIMITED["cpu_quota"]


@pytest.fixture
def make(bed: Bed, proxies: Callable[..., Daemon]) -> Iterator[Callable[..., Scenario]]:
    clients: list[Cri] = []

    def scenario(**config: object) -> Scenario:
        daemon = proxies(**config)
        clients.extend((daemon.client(), bed.client()))
        return Scenario(bed, daemon, *clients[-2:])

    yield scenario
    for client in clients:
        client.close()
    bed.clear()


def release(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, with the daemon's own settings."""
    return subprocess.run(
        [
            *(PROGRAM, "release", "--config", daemon.directory / "config.yaml"),
            *("--listen", f"unix://{daemon.socket}", "--runtime", f"unix://{daemon.bed.socket}"),
            *("--state-dir", daemon.directory / "state", *words),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_online_and_back(make: Callable[..., Scenario]) -> None:
    scenario = make()
    done = release(scenario.daemon)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("released: 5 containers")
    assert scenario.daemon.status()["mode"] == "released"
    scenario.check()
    # It only relays: an owner that comes owns nothing; a restart changes that as little.
    late = scenario.node.cri.run(
        scenario.node.pod("lse", LAST, name="late"), command=["sleep", "3600"], **LIMITED
    )
    scenario.daemon.restart()
    wait_for("the comparison", lambda: scenario.daemon.status()["ready"])
    assert scenario.daemon.status()["mode"] == "released"
    scenario.daemon.compared()
    assert {cpuset_of(c).cpus for c in (late, scenario.ids["shares"], scenario.ids["owner"])} == {online()}
    assert release(scenario.daemon, "--offline").returncode == 75
    done = release(scenario.daemon, "--undo")
    assert (done.returncode, done.stdout) == (0, "containers are placed again\n"), done.stderr
    wait_for("the owner", lambda: cpuset_of(scenario.ids["owner"]).cpus == LAST)
    wait_for("the others", lambda: cpuset_of(scenario.ids["shares"]).cpus == online() - LAST)
    wait_for("its quota to go", lambda: quota(scenario.ids["owner"]) == quota_at(scenario.db_group) == -1)
    assert release(scenario.daemon, "--undo").returncode == 65


def test_offline(make: Callable[..., Scenario]) -> None:
    scenario = make()
    scenario.daemon.kill9()
    done = release(scenario.daemon)
    assert done.returncode == 69
    assert "--offline" in done.stderr
    done = release(scenario.daemon, "--offline")
    assert done.returncode == 0, done.stderr
    scenario.check()
    scenario.daemon.start()
    wait_for("the comparison", lambda: scenario.daemon.status()["ready"])
    assert scenario.daemon.status()["mode"] == "released"
    assert cpuset_of(scenario.ids["owner"]).cpus == online()


def test_killed_in_the_middle(make: Callable[..., Scenario]) -> None:
    scenario = make(settle={"perSecond": 1})
    with subprocess.Popen(
        [
            *(PROGRAM, "release", "--config", scenario.daemon.directory / "config.yaml"),
            *("--listen", f"unix://{scenario.daemon.socket}"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        wait_for("the first", lambda: scenario.daemon.status().get("release", {}).get("updated", 0) >= 1)
        assert scenario.daemon.status()["mode"] == "releasing"
        scenario.daemon.kill9()
        command.communicate(timeout=60)
        assert command.returncode == 69
    scenario.daemon.start()
    wait_for("the rest", lambda: scenario.daemon.status()["mode"] == "released")
    scenario.check()


def test_at_a_stop(make: Callable[..., Scenario]) -> None:
    scenario = make(releaseAtStop=True)
    assert scenario.daemon.stop() == 0
    scenario.check()
    scenario.daemon.start()
    wait_for("the comparison", lambda: scenario.daemon.status()["ready"])
    assert scenario.daemon.status()["mode"] == "enforce"
    wait_for("the owner", lambda: cpuset_of(scenario.ids["owner"]).cpus == LAST)


def test_observing_has_nothing_to_give(make: Callable[..., Daemon], proxies: Callable[..., Daemon]) -> None:
    daemon = proxies(mode="observe")
    done = release(daemon)
    assert done.returncode == 0
    assert "there is nothing to release: in observe mode no container is moved" in done.stdout


def held(container: str) -> set[CpuSet]:
    """What the groups of a BE container have: its own, its pod's and all in it, and that of its class."""
    own = cgroup_of(container)
    assert own is not None
    pod = own.parent
    groups = (own, pod, pod.parent, *(path for path in pod.iterdir() if path.is_dir()))
    return {CpuSet.parse((path / "cpuset.cpus").read_text()) for path in groups}


def test_groups_above_be_containers_too(
    bed: Bed, proxies: Callable[..., Daemon], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(bed.clear)
    daemon = proxies(koordinator={"beCpuset": "erase"}, beSuppress={"mode": "cfs-quota", "period": "100ms"})
    with daemon.client() as client, bed.client() as direct:
        node = Node(bed, daemon, client)
        container = node.run(node.pod("be"))
        node.run(node.pod("lse", LAST))
        assert held(container) == {online() - LAST}
        (above,) = CPU.glob(f"{bed.cgroup.strip('/')}/kubepods/besteffort")
        wait_for("the quota of BE pods", lambda: quota_at(above) != -1)
        done = release(daemon)
        assert done.returncode == 0, done.stderr
        assert held(container) == {online()}
        assert quota_at(above) == -1
        pod = direct.run_pod("plain", cgroup_parent="/kubepods/besteffort/pod-plain")
        plain = direct.run(pod, **KINDS["be"].resources)
        alike(bed, container, plain)
        daemon.compared(1)
        assert (held(container), quota_at(above)) == ({online()}, -1)


def test_sandboxes_are_where_they_would_be(make: Callable[..., Scenario]) -> None:
    scenario = make()
    sandboxes = [pod.id for pod in scenario.direct.list_pods()]
    wait_for("a comparison", lambda: scenario.daemon.status()["ready"])
    assert release(scenario.daemon).returncode == 0
    assert {cpuset_of(sandbox).cpus for sandbox in sandboxes} == {online()}
