"""The policy for a node changes while the daemon runs: a Node object in a file, and kubelet's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from proxy.backends.kubelet.node_file import NodeFile
from proxy.engine.node_events import KubeletCpusRead
from proxy.model.admission import AdmissionRules, Namespaces
from proxy.model.kubelet import CpuManager
from proxy.model.label_selector import LabelSelector
from proxy.telemetry import metrics
from tests.testkit.cri import TWO_CPUS

BIND = "node.koordinator.sh/cpu-bind-policy"
RESERVATION = "node.koordinator.sh/reservation"
SYSTEM = "node.koordinator.sh/system-qos-resource"


class NodeObjectFile:
    """A Node object in a file that the executor reads."""

    def __init__(self, world: Any, directory: Path) -> None:
        self.world = world
        self.path = directory / "node.json"
        file = NodeFile(self.path, lambda seconds: None)
        world.executor.node_policy._source = file

    async def publish(self, labels: Any = None, **annotations: Any) -> None:
        texts = {key: json.dumps(value) for key, value in annotations.items()}
        keyed = {{"reservation": RESERVATION, "system": SYSTEM}[key]: text for key, text in texts.items()}
        self.path.write_text(json.dumps({"metadata": {"labels": labels or {}, "annotations": keyed}}))
        await self.follow()

    async def follow(self) -> None:
        await self.world.sync.once()
        await self.world.quiet()

    def value(self, name: str) -> dict[str, Any]:
        values = self.world.executor.node_policy.page()["values"]
        return next(each for each in values if each["name"] == name)


def problems_of(world: Any) -> list[str]:
    return [problem["what"] for problem in world.executor.telemetry.problems()]


def test_pools_follow_a_reservation_that_changes(run_scenario, tmp_path: Path) -> None:
    async def scenario(world: Any) -> None:
        node = NodeObjectFile(world, tmp_path)
        ls = await world.run(await world.pod("ls", "LS"))
        lse = await world.run(await world.pod("lse", "LSE", "", "2-3"))
        system = await world.run(await world.pod("sys", "SYSTEM"))
        assert (world.on(ls), world.on(system)) == ("0-1,4-15", "0-1,4-15")
        await node.publish(reservation={"reservedCPUs": "0,2"}, system={"cpuset": "15"})
        assert (world.on(ls), world.on(lse), world.on(system)) == ("1,4-14", "2-3", "15"), (
            "owners keep their CPUs"
        )
        assert any(
            "CPUs 2 are kept back now, and ns/lse/c owns them: it keeps them until it ends" in what
            for what in problems_of(world)
        )
        assert node.value("reservedCPUs") == {
            "name": "reservedCPUs",
            "value": "0,2",
            "source": f"annotation {RESERVATION} of the Node object",
            "problem": "",
        }
        world.check()
        await world.stop(lse)
        assert world.on(ls) == "1,3-14", "the pools get the CPUs that are not reserved"
        await node.publish()
        assert (world.on(ls), world.on(system)) == ("0-15", "0-15")
        assert world.executor.telemetry.value(metrics.NODE_POLICY_CHANGES) == 2
        assert any(
            line.startswith('the policy of the node changed values="reservedCPUs 0,2 (')
            for line in world.logged
        )
        world.check()

    run_scenario(scenario)


def test_a_reservation_that_leaves_no_shared_cpu_waits_for_owners_to_end(
    run_scenario, tmp_path: Path
) -> None:
    async def scenario(world: Any) -> None:
        node = NodeObjectFile(world, tmp_path)
        ls = await world.run(await world.pod("ls", "LS"))
        lse = await world.run(await world.pod("lse", "LSE", "", "0-7"))
        await node.publish(reservation={"reservedCPUs": "8-15"})
        assert world.on(ls) == "8-15"
        assert "they would leave the shared pool empty" in node.value("reservedCPUs")["problem"]
        assert any("cannot keep CPUs 8-15 back" in what for what in problems_of(world))
        await world.stop(lse)
        await node.follow()
        assert world.on(ls) == "0-7"
        assert node.value("reservedCPUs")["problem"] == ""
        assert problems_of(world) == []
        world.check()

    run_scenario(scenario)


def test_an_unreadable_policy_changes_nothing(run_scenario, tmp_path: Path) -> None:
    async def scenario(world: Any) -> None:
        node = NodeObjectFile(world, tmp_path)
        await node.follow()
        assert any("there is no such file" in what for what in problems_of(world))
        assert world.executor.node_policy.page()["read"] is False
        ls = await world.run(await world.pod("ls", "LS"))
        await node.publish(reservation={"reservedCPUs": "0"})
        assert world.on(ls) == "1-15"
        assert problems_of(world) == [], "the policy is present now"
        node.path.write_text('{"metadata": {"anno')
        await node.follow()
        assert world.on(ls) == "1-15"
        assert any("its last content stays in effect" in what for what in problems_of(world))
        await node.publish(reservation={"reservedCPUs": "0-"})
        assert world.on(ls) == "0-15", "an invalid list counts as absent"
        (left,) = problems_of(world)
        assert f"annotation {RESERVATION}: " in left

    run_scenario(scenario)


def test_a_label_takes_precedence_over_kubelet(run_scenario, tmp_path: Path) -> None:
    async def scenario(world: Any) -> None:
        node = NodeObjectFile(world, tmp_path)
        manager = CpuManager("static", {"full-pcpus-only": "true"}, sources={"options": "configz"})
        world.executor.store.handle(KubeletCpusRead(manager, {}))
        await node.publish()
        assert node.value("cpuBindPolicy")["source"] == "kubelet's full-pcpus-only (configz)"
        odd = await world.begin(
            await world.pod("odd"), **{**TWO_CPUS, "cpu_shares": 1024, "cpu_quota": 100_000}
        )
        assert odd.refused is not None, "no whole core is free"
        await node.publish({BIND: "SpreadByPCPUs"})
        assert node.value("cpuBindPolicy")["source"] == f"label {BIND} of the Node object"
        spread = await world.run(await world.pod("spread"), **TWO_CPUS)
        machine = world.machine
        assert len({machine.by_id[cpu].core for cpu in world.cgroups.sets[spread]}) == 2

    run_scenario(scenario)


def test_a_step_of_a_takeover_leaves_the_namespaces_that_were_selected_at_the_start(run_scenario) -> None:
    owners = Namespaces(selector=LabelSelector((("cpus", "exclusive"),)), selected=frozenset(("ns",)))

    async def scenario(world: Any) -> None:
        world.executor.node_policy.apply()
        assert world.on(await world.run(await world.pod("lse", "LSE", "", "2-3"))) == "2-3"

    run_scenario(scenario, rules={"admission": AdmissionRules(owners=owners)})


def test_a_fault_of_the_source_affects_only_its_feature(run_scenario, tmp_path: Path) -> None:
    class Broken:
        source = "nowhere"
        problem = ""

        def read(self) -> None:
            raise RuntimeError("oops")

        def close(self) -> None:
            pass

    async def scenario(world: Any) -> None:
        world.executor.node_policy._source = Broken()
        passes = world.executor.telemetry.value(metrics.RECONCILES)
        await world.sync.once()
        await world.quiet()
        assert world.executor.telemetry.value(metrics.RECONCILES) == passes + 1
        assert any("RuntimeError: oops" in what for what in problems_of(world))

    run_scenario(scenario)


def test_sharing_containers_follow_new_rules_without_a_reconcile(run_scenario, tmp_path: Path) -> None:
    async def scenario(world: Any) -> None:
        node = NodeObjectFile(world, tmp_path)
        ls = await world.run(await world.pod("ls", "LS"))
        passes = world.executor.telemetry.value(metrics.RECONCILES)
        node.path.write_text(
            json.dumps({"metadata": {"annotations": {RESERVATION: json.dumps({"reservedCPUs": "0,2"})}}})
        )
        await world.executor.node_policy.refresh(world.executor.kernel)
        await world.quiet()
        assert world.on(ls) == "1,3-15"
        assert world.executor.telemetry.value(metrics.RECONCILES) == passes

    run_scenario(scenario)
