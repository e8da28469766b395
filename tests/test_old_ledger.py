"""A daemon that starts with the ledger of an older version: it adopts every record and loses none.

The ledgers and the rest of their nodes were written by commit b3705ac; see old_ledgers/b3705ac/README.md.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.backends.ledger import read_entries
from proxy.daemon import Daemon
from proxy.demo.runtime import StandInRuntime
from proxy.demo.runtime_records import ContainerRecord, PodRecord
from proxy.engine.state import NodeState
from proxy.executor.ledger_codec import dump
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy
from tests.testkit.daemon import DaemonNode, join_left_threads, run
from tests.testkit.waiting import until

OLD = Path(__file__).parent / "old_ledgers/b3705ac"
WHOLE = regular_machine(2, 1, 8, 2)
IN_FLIGHT = "i/"


class OldNode(DaemonNode):
    """A node in the state that the daemon of the older version has written.

    Attributes:
        before: The records of its ledger.
    """

    def __init__(self, base: Path, name: str) -> None:
        rest: Any = json.loads((OLD / f"{name}.json").read_text())
        root, state, hooks, kubelet = (base / each for each in ("cgroup", "state", "hooks.d", "kubelet"))
        for path, text in rest["cgroup"].items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        super().__init__(base, machine_with(CpuSet.parse(rest["online"])), rest["version"])
        self.cgroups = FakeCgroups.open(root)
        self.runtime = StandInRuntime(base / "runtime.sock", self.cgroups)
        service: Any = self.runtime._service
        service._pids = itertools.count(100_000)
        service.pods = {each["id"]: pod_record(each) for each in rest["pods"]}
        service.containers = {each["id"]: container_record(each) for each in rest["containers"]}
        for directory in (state, hooks, kubelet):
            directory.mkdir(mode=0o700)
        (state / "ledger.jsonl").write_bytes((OLD / f"{name}.jsonl").read_bytes())
        (state / "ledger.jsonl").chmod(0o600)
        (hooks / "50-old.py").write_text(rest["hook"])
        for file, text in rest.get("kubelet", {}).items():
            (kubelet / file).write_text(text)
        (base / "proc").mkdir()
        (base / "proc/stat").write_text("cpu  1 1 1 1 1 1 1 1 0 0\n")
        self.settings = (
            f"{rest['settings']}\nreconcilePeriod: 200ms\nprocfsRoot: {base}/proc\ncgroupRoot: {root}\n"
            f"hooks: {{folder: {hooks}, vendorFolder: {base}/none, serverFolder: {base}/none,"
            " ownedCPUs: true}\n" + (f"kubelet: {{stateDir: {kubelet}}}\n" if "kubelet" in rest else "")
        )
        self.before = self.ledger()

    def ledger(self) -> dict[str, Mapping[str, Any]]:
        """Read the ledger as a daemon does."""
        return read_entries(self.directory / "state", self.machine.fingerprint)

    def in_flight(self) -> dict[str, Mapping[str, Any]]:
        """Return the creates that were in flight."""
        return {key: record for key, record in self.before.items() if key.startswith(IN_FLIGHT)}

    def sets(self) -> dict[str, CpuSet]:
        """Return the CPUs of all containers that have a cgroup."""
        return {key: CpuSet.parse(cpus) for key in self.runtime.containers if (cpus := self.cpus(key))}

    async def end(self, pod: str) -> None:
        """Stop and remove a pod."""
        (sandbox,) = (key for key, each in self.runtime.pods.items() if each.config.metadata.name == pod)

        def work() -> None:
            with self.client() as client:
                client.end_pod(sandbox)

        await asyncio.to_thread(work)


def machine_with(online: CpuSet) -> Machine:
    """Return the machine with only some of its CPUs online."""
    nodes = tuple(changed_copy(node, cpus=node.cpus & online) for node in WHOLE.nodes)
    cpus = tuple(cpu for cpu in WHOLE.cpus if cpu.id in online)
    return changed_copy(WHOLE, cpus=cpus, nodes=nodes)


def pod_record(data: Mapping[str, Any]) -> PodRecord:
    return PodRecord(**{**data, "config": pb.PodSandboxConfig.FromString(base64.b64decode(data["config"]))})


def container_record(data: Mapping[str, Any]) -> ContainerRecord:
    messages = {"config": pb.ContainerConfig, "resources": pb.LinuxContainerResources}
    read = {key: kind.FromString(base64.b64decode(data[key])) for key, kind in messages.items()}
    return ContainerRecord(**{**data, **read})


@contextmanager
def old_node(name: str) -> Iterator[OldNode]:
    with tempfile.TemporaryDirectory(prefix="tp-") as base:
        node = OldNode(Path(base), name)
        try:
            with node.runtime.start():
                yield node
        finally:
            join_left_threads()


def missing(old: object, new: object) -> object:
    """Return the fields that a record has lost; None if it has all fields of the old one."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lost = {key: missing(value, new.get(key)) for key, value in old.items()}
        return {key: value for key, value in lost.items() if value is not None} or None
    return None if old == new else (old, new)


def lost(node: OldNode, daemon: Daemon) -> dict[str, object]:
    """Return the pods and containers of the old ledger that the daemon does not know, or not completely."""
    assert daemon.executor is not None
    state, found = daemon.executor.state, {}
    for key, record in node.before.items():
        kind, _, name = key.partition("/")
        value = {"p": state.pods, "c": state.containers}.get(kind, {name: None}).get(name)
        if kind in "pc" and (away := missing(record, value and dump(value))):
            found[key] = away
    return found


def ledger_problems(daemon: Daemon) -> list[str]:
    """Return the problems with the ledger that the daemon reports."""
    assert daemon.executor is not None
    reported = [str(problem["what"]) for problem in daemon.executor.telemetry.problems()]
    return [what for what in reported if "ledger" in what or "record" in what]


def violations(daemon: Daemon) -> object:
    assert daemon.parts.pages is not None
    return daemon.parts.pages.status()["violations"]


@pytest.mark.parametrize("name", ["running", "suppressed", "released", "taken_over"])
def test_all_records_are_adopted_and_written_in_the_new_format(name: str) -> None:
    with old_node(name) as node:
        assert node.before
        cpusets, daemon = node.sets(), node.daemon()
        reserved = CpuSet.parse(",".join(each["placement"]["own"] for each in node.in_flight().values()))
        abandoned = CpuSet(cpu for cpu in reserved if not any(cpu in cpus for cpus in cpusets.values()))

        async def scenario() -> None:
            assert lost(node, daemon) == {}
            await asyncio.sleep(1)  # several reconciles run
            assert lost(node, daemon) == {}
            assert (ledger_problems(daemon), violations(daemon)) == ([], [])
            # Shared containers get the CPUs of failed creates some seconds later, so possibly already now.
            assert {key: cpus - abandoned for key, cpus in node.sets().items()} == cpusets

        run(daemon, scenario, reconciled=True)
        after = node.ledger()
        assert {key for key in node.before if not key.startswith((IN_FLIGHT, "b/"))} <= set(after)
        assert [path.name for path in (node.directory / "state").glob("*.bad*")] == []
        again = node.daemon()

        async def second() -> None:
            assert lost(node, again) == {}

        run(again, second, reconciled=True)


def test_the_ledger_has_each_kind_of_record() -> None:
    """The other tests cover only the kinds of records that the old ledgers hold."""
    entries: dict[str, Mapping[str, Any]] = {}
    for name in ("running", "suppressed", "released", "taken_over"):
        with old_node(name) as node:
            entries.update(node.before)
    assert {key.partition("/")[0] for key in entries} == {"p", "c", "i", "q", "qc", "x", "b", "r", "t"}
    pods = {key for each in entries.values() if "sandbox_id" in each for key in each}
    placements = {key for each in entries.values() if "placement" in each for key in each["placement"]}
    assert pods >= {"aligned", "apart", "aside", "bind_required", "bind_preferred", "chosen", "exclusive"}
    assert pods >= {"faults", "nodes", "reparented", "wish_nodes", "wish_policy"}
    assert placements >= {"beyond", "blocks", "hard", "instead", "mems", "narrowed", "nodes", "own", "pool"}
    assert placements >= {"unlimited", "within"}


def test_a_create_in_flight_keeps_its_cpus_if_the_runtime_made_the_container() -> None:
    """Of two creates in flight, the runtime has created the container of one."""
    with old_node("running") as node:
        assert sorted(each["placement"]["own"] for each in node.in_flight().values()) == ["26-27", "28-29"]
        daemon = node.daemon()

        def state() -> NodeState:
            assert daemon.executor is not None
            return daemon.executor.state

        async def scenario() -> None:
            assert CpuSet.parse("26-27") in {owner.cpus for owner in state().owners.values()}
            await until(lambda: state().pools.shared >= CpuSet.parse("28-29"))
            assert CpuSet.parse("26-27") in {owner.cpus for owner in state().owners.values()}

        run(daemon, scenario, reconciled=True)
        after = node.ledger()
        assert not [key for key in after if key.startswith(IN_FLIGHT)]
        assert "26-27" in [each["placement"]["own"] for key, each in after.items() if key.startswith("c/")]


def test_quotas_and_partitions_end_with_their_owners() -> None:
    with old_node("running") as node:
        (owner,) = (key for key, each in node.before.items() if key[0] == "x" and each["cpus"] == "6,22")
        path = node.before[owner]["path"]
        pod, _, container = path.removeprefix("kubepods/pod").partition("/")
        assert (node.directory / "cgroup" / path / "cpuset.cpus.partition").read_text().strip() == "isolated"
        assert {f"q/{pod}", f"qc/{container}"} <= node.before.keys()
        daemon = node.daemon()

        async def scenario() -> None:
            await node.end("chosen")
            gone = {owner, f"q/{pod}", f"qc/{container}", f"c/{container}"}
            await until(lambda: not gone & node.ledger().keys())
            shared = CpuSet.parse((node.directory / "cgroup/cpuset.cpus.effective").read_text())
            assert shared >= CpuSet.parse("6,22")

        run(daemon, scenario, reconciled=True)


def test_the_quota_of_be_pods_is_removed_at_the_end() -> None:
    with old_node("suppressed") as node:
        quota = node.directory / "cgroup/kubepods/besteffort/cpu.cfs_quota_us"
        assert int(quota.read_text()) > 0
        node.settings = node.settings.replace("beSuppress: {mode: cfs-quota", 'beSuppress: {mode: "off"')
        daemon = node.daemon()

        async def scenario() -> None:
            await until(lambda: int(quota.read_text()) == -1)

        run(daemon, scenario, reconciled=True)
        assert "b/suppress" not in node.ledger()


def test_a_released_node_stays_released() -> None:
    with old_node("released") as node:
        daemon = node.daemon()

        async def scenario() -> None:
            assert daemon.parts.pages is not None
            assert daemon.parts.pages.status()["mode"] == "released"

        run(daemon, scenario, reconciled=True)
        assert node.ledger()["r/release"] == node.before["r/release"]


def test_a_takeover_continues() -> None:
    with old_node("taken_over") as node:
        daemon = node.daemon()

        async def scenario() -> None:
            assert daemon.parts.takeover is not None
            await asyncio.sleep(0.5)
            record = daemon.parts.takeover.get().record
            old = node.before["t/takeover"]
            assert (record.stage.value, record.began) == ("started", old["began"])
            assert daemon.executor is not None
            owned = sorted(str(owner.cpus) for owner in daemon.executor.state.owners.values())
            assert owned == ["1-2", "3,19"]

        run(daemon, scenario, reconciled=True)
        assert missing(node.before["t/takeover"], node.ledger()["t/takeover"]) is None
