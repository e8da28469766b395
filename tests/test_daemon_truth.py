"""Every CPU set that an output reports as in effect matches the cgroup files: whole daemons, random pods.

In each mode pods start and end. After each step every output is read, and the cgroup files before and after
it: if the files did not change in between, the outputs must agree with them.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.admin.client import query_admin
from proxy.admin.status_text import render as render_status
from proxy.daemon import Daemon
from proxy.demo.client import DemoPod, StartedPod
from proxy.engine.enforcement import applies_to, counts
from proxy.model.errors import RuntimeCallError, TopoproxyError
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos
from proxy.observe.explain_text import read_records, render
from proxy.observe.plan_report_text import render_plan_report
from tests.reload.node import FileNode
from tests.testkit.captured_log import CapturedLog
from tests.testkit.daemon import MACHINE, DaemonNode, run, temporary_node
from tests.testkit.waiting import until

KINDS = (
    DemoPod("ls", "LS"),
    DemoPod("be", "BE", KubeQos.BEST_EFFORT),
    DemoPod("burstable"),
    DemoPod("lse", "LSE", cpuset="2-3"),
    DemoPod("lsr", "LSR", cpuset="4-5"),
    DemoPod("rival", "LSE", cpuset="3-4"),
    DemoPod("owner", kube_qos=KubeQos.GUARANTEED, cpus=2),
    DemoPod("wide", kube_qos=KubeQos.GUARANTEED, cpus=13),
)
STEPS = 12
DONE = re.compile(r"\b(was|were) (admitted|refused|given|put)\b|\b(left|kept) CPU|\bowns CPU|\bhad to move")
DONE_BY_LOG = {
    "placed",
    "rejected a container",
    "rejected a pod",
    "reserved CPUs and memory for a pod",
    "adopted a container",
}
"""Log messages about what was done."""
IN_EFFECT = ("owners", "owned_cpus", "containers", "pool_cpus", "pool_node_cpus", "memory_bytes")
DONE_COUNTERS = ("creates_placed", "creates_refused", "pods_refused", "cpusets_written", "owners_moved")
WOULD_COUNTERS = ("creates_would_place", "creates_would_refuse", "containers_would_move")
NAMED = CpuSet.parse(",".join(kind.cpuset for kind in KINDS if kind.cpuset))
SAMPLE = re.compile(r"^(topoproxy_[a-z_]+)(\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


class Outputs:
    """All outputs of a daemon about its containers, read at one time.

    Attributes:
        status, report, plan: The pages.
        explained: The page of each pod.
        metrics: The samples by name and labels.
        is_of_one_time: Whether the daemon had the same containers before and after the reads.
    """

    def __init__(self, node: DaemonNode, pods: list[str]) -> None:
        """Read all outputs; blocks."""
        at = node.directory / "admin.sock"
        self.status: Any = query_admin(at, "/status", 30)
        self.report: Any = query_admin(at, "/report", 30)
        self.plan: Any = query_admin(at, "/observe/report", 30)
        self.explained: dict[str, Any] = {
            pod: query_admin(at, "/explain", 30, {"query": pod}) for pod in pods
        }
        text = str(query_admin(at, "/metrics", 30))
        again: Any = query_admin(at, "/status", 30)
        self.is_consistent = self.status["containers"] == again["containers"]
        self.metrics = {(name, labels): float(value) for name, labels, value in SAMPLE.findall(text)}

    def metric(self, name: str) -> float:
        """Return the sum of all series of a metric."""
        return sum(value for (family, _), value in self.metrics.items() if family == f"topoproxy_{name}")


class RandomNode:
    """A node on which random pods are created and removed, and the values in its cgroup files."""

    def __init__(self, node: DaemonNode, daemon: Daemon, seed: int) -> None:
        self.node = node
        self.daemon = daemon
        self.random = random.Random(seed)
        self.pods: dict[str, StartedPod] = {}
        self.number = 0

    def kernel(self) -> dict[str, str]:
        """Read the CPUs in effect of the containers that have a cgroup, by id."""
        cgroups, ids = self.node.cgroups, [pod.container_id for pod in self.pods.values()]
        paths = {each: path for each in ids if (path := cgroups.find("", each))}
        return {each: str(cgroups.read(path).effective_cpus) for each, path in paths.items()}

    def step(self) -> None:
        """Start or end a pod; blocks."""
        with self.node.client() as client:
            if self.pods and self.random.random() < 0.3:
                client.end_pod(self.pods.pop(self.random.choice(sorted(self.pods))))
                return
            kind = self.random.choice(KINDS)
            self.number += 1
            name = f"{kind.name}-{self.number}"
            pod = DemoPod(name, kind.qos, kind.kube_qos, kind.cpuset, kind.cpus)
            try:
                self.pods[name] = client.launch(pod)
            except (RuntimeCallError, TopoproxyError):
                return  # refused

    def writes(self) -> list[int]:
        """Return the time of the last write of each cpuset: a value may be changed and restored."""
        return [path.stat().st_mtime_ns for path in sorted(self.node.cgroups.root.rglob("cpuset.cpus"))]

    async def outputs(self) -> tuple[dict[str, str], Outputs]:
        """Read files and outputs while the files do not change."""
        for _ in range(200):
            writes, before = self.writes(), self.kernel()
            outputs = await asyncio.to_thread(Outputs, self.node, sorted(self.pods))
            if writes == self.writes() and outputs.is_consistent:
                return before, outputs
        raise AssertionError("the cgroups change all the time")


def check_status(kernel: dict[str, str], page: Any) -> None:
    for row in page["containers"]:
        assert row["cpus"] in ("", kernel.get(row["id"])), row
    text = render_status(page, 200)
    for row in page["containers"]:
        if row["id"] in kernel and row["cpus"]:
            (line,) = [
                line for line in text.splitlines() if line.startswith(row["ref"]) and row["id"][:13] in line
            ]
            assert kernel[row["id"]] in line.split(), line
    of_owner: dict[str, str] = {}
    for row in page["containers"]:
        if row["pool"] == "own" and row["id"] in kernel:
            of_owner[row["ref"].rpartition("/")[0]] = kernel[row["id"]]
    for owner in page["exclusive"]:
        if owner["cpus"] and not owner["also_used_by"]:
            mine = CpuSet.parse(owner["cpus"])
            assert of_owner.get(owner["pod"], owner["cpus"]) == owner["cpus"], owner
            rows = [r for r in page["containers"] if r["ref"].rpartition("/")[0] != owner["pod"]]
            sharers = [r for r in rows if owner["hard"] or r["pool"] != "be"]
            for row in sharers:
                assert mine.isdisjoint(CpuSet.parse(kernel.get(row["id"], ""))), (owner, row)


def check_plan(kernel: dict[str, str], page: Any, mode: str) -> None:
    sums, text = page["sums"], render_plan_report(page, 200, everything=True)
    rows = [(pod, row) for pod in page["pods"] for row in pod["containers"]]
    assert page["mode"] == mode or mode in ("staged", "reloaded")
    for pod, row in rows:
        assert row["cpus"] == kernel.get(row["id"], ""), row
        assert (row["change"] == "") == (row["cpus"] in ("", row["desired_cpus"])), row
        assert row["change"] == "" or (row["change"] == "drift") is pod["applied"], row
        assert re.search(rf" {re.escape(pod['pod'])}/{row['container']} .* {row['cpus'] or '[?]'} ", text), (
            text
        )
    changes = [row["change"] for _, row in rows]
    for name, change in (("pins", "pin"), ("moves", "move"), ("drift", "drift")):
        assert sums[name] == changes.count(change)
    assert sums["applied"] == sum(pod["applied"] for pod, _ in rows)
    assert mode == "staged" or sums["applied"] == (len(rows) if page["mode"] == "enforce" else 0)
    assert mode != "enforce" or sums["rejections"] == 0


def check_report(kernel: dict[str, str], page: Any, status: Any, mode: str) -> None:
    notes = {key.partition("/")[2]: json.loads(text) for key, text in page["metadata"]["annotations"].items()}
    shared = CpuSet.parse(",".join(pool["cpuset"] for pool in notes["cpu-shared-pools"]))
    allocs = {each["uid"]: each["cpuset"] for each in notes["pod-cpu-allocs"] or ()}
    rows = [row for row in status["containers"] if row["id"] in kernel]
    if mode in ("observe", "released"):
        assert (shared, allocs) == (MACHINE.online, {})
    for row in rows:
        has = CpuSet.parse(kernel[row["id"]])
        if row["pod_uid"] in allocs:
            assert CpuSet.parse(allocs[row["pod_uid"]]) == has
        elif not row["applied"]:
            assert has == MACHINE.online, row
        elif row["pool"] == "shared":
            # The annotation of a pod that was rejected counts, as Koordinator has it; an owner that is only
            # observed leaves the pool all the same.
            assert row["desired_cpus"] == kernel[row["id"]], row
            assert shared <= has or not all(row["applied"] for row in rows), row
            assert (has - shared) <= NAMED, row


def check_explained(kernel: dict[str, str], pages: dict[str, Any], mode: str) -> None:
    for page in pages.values():
        for record in page["records"]:
            decision, now = record["decision"], record.get("now", "")
            assert decision["applied"] or mode != "enforce"
            in_effect = (
                decision["applied"] and decision["pool"] == "own" and record["id"] in kernel and not now
            )
            assert not in_effect or kernel[record["id"]] == decision["cpus"], record
        for record in read_records(page):
            text = " ".join(render([record], 1000).split())
            assert record.decision.applied or not DONE.search(text), text


def check_metrics(outputs: Outputs, mode: str) -> None:
    run_scenario = [row for row in outputs.status["containers"] if row["phase"] != "exited"]
    applied = sum(row["applied"] for row in run_scenario)
    assert outputs.metric("containers") == applied
    assert outputs.metric("planned_containers") == len(run_scenario) - applied
    owners = [row for row in outputs.status["exclusive"] if row["applied"]]
    assert outputs.metric("owners") == len(owners)
    planned = [name for name, value in outputs.metrics.items() if "_planned_" in name[0] and value]
    effective = [name for name in IN_EFFECT if outputs.metric(name)]
    done = [name for name in DONE_COUNTERS if outputs.metric(f"{name}_total")]
    would = [name for name in WOULD_COUNTERS if outputs.metric(f"{name}_total")]
    if mode == "enforce":
        assert (planned, would) == ([], [])
    elif mode in ("observe", "released"):
        assert effective == []
        assert mode != "observe" or done == []


def check(kernel: dict[str, str], outputs: Outputs, mode: str) -> None:
    check_status(kernel, outputs.status)
    check_plan(kernel, outputs.plan, mode)
    check_report(kernel, outputs.report, outputs.status, mode)
    check_explained(kernel, outputs.explained, mode)
    check_metrics(outputs, mode)


@pytest.fixture
def node(seed: int) -> Iterator[FileNode]:
    with temporary_node(lambda directory: FileNode(directory, version=1 + seed % 2)) as made:
        yield made


SETTINGS = {
    "observe": "mode: observe\n",
    "enforce": "mode: enforce\n",
    "released": "mode: enforce\n",
    "reloaded": "mode: observe\n",
    "staged": "mode: enforce\nenforce: {percent: 50}\n",
}
RULES = "cpuManagerPolicy: static\nreconcilePeriod: 200ms\n"
RELOADS = {STEPS // 3: "mode: enforce\nenforce: {stepPeriod: 100ms}\n", 2 * STEPS // 3: "mode: observe\n"}
"""Step to the configuration that is reloaded at that step."""


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("mode", sorted(SETTINGS))
def test_sets_reported_as_in_effect_match_the_cgroups(node: FileNode, mode: str, seed: int) -> None:
    daemon = node.from_file(f"{SETTINGS[mode]}{RULES}")
    random_node, written, log = RandomNode(node, daemon, seed), 0, CapturedLog()

    async def whole() -> None:
        nonlocal written
        daemon.executor.telemetry._sink = log
        for number in range(STEPS):
            if mode == "released" and number == STEPS // 2:
                await asyncio.to_thread(
                    query_admin, node.directory / "admin.sock", "/release/start", 30, {}, act=True
                )
                await until(lambda: daemon.executor.store.mode.value == "released")
            if mode == "reloaded" and number in RELOADS:
                await node.reload(daemon, f"{RELOADS[number]}{RULES}")
            await asyncio.to_thread(random_node.step)
            now = "enforce" if mode == "released" and number < STEPS // 2 else mode
            await until_kernel_matches(random_node, now)
            kernel, outputs = await random_node.outputs()
            check(kernel, outputs, now)
            written += any(CpuSet.parse(cpus) != MACHINE.online for cpus in kernel.values())

    run(daemon, whole, reconciled=True)
    if mode in ("staged", "reloaded"):
        return  # the scenario decides whether the plan is applied to an owner
    assert (written > 0) == (mode != "observe")
    logged = [each for each in DONE_BY_LOG if any(line.startswith(f"{each} pod=") for line in log.lines)]
    assert bool(logged) == (mode != "observe"), logged


async def until_kernel_matches(random_node: RandomNode, mode: str) -> None:
    """Wait until the kernel matches the state: after the response to a removal, pools grow."""
    executor = random_node.daemon.executor

    def matches() -> bool:
        state, kernel = executor.state, random_node.kernel()
        there = [c for c in state.containers.values() if c.id in kernel and applies_to(state, c.pod)]
        left = counts(state)
        changing = left.to_apply or left.to_give_back or left.moving
        return not changing and all(kernel[c.id] == str(state.desired_cpus(c)) for c in there)

    if mode != "released":
        await until(matches)
