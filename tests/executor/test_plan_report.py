"""The report of an observed node, for a simulated node."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from proxy.executor import kernel_view
from proxy.executor.plan_report import plan_report
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.observe.plan_report_text import render_plan_report

TWO = {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000}


async def runs(world: Any, sandbox: str, **resources: int) -> str:
    """Run a container; if its request names no CPUs, it has all."""
    container_id = await world.create(sandbox, **resources)
    world.runtime.specs[container_id] = world.runtime.specs[container_id] or "0-15"
    await world.start(container_id)
    return container_id


def by_pod(page: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {pod["pod"]: {**pod, **pod["containers"][0]} for pod in page["pods"]}


def test_an_observed_node(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        await runs(world, await world.pod("ls", "LS"))
        await runs(world, await world.pod("lse", "LSE", "", "2-3", quota=200_000), **TWO)
        await runs(world, await world.pod("rival", "LSE", "", "3-4"), **TWO)
        await world.sync.once()
        page = await plan_report(world.executor)
        assert page["mode"] == "observe"
        assert page["sums"] == {
            "containers": 3,
            "applied": 0,
            "unchanged": 0,
            "pins": 1,
            "moves": 2,
            "drift": 0,
            "cfs_quotas": 2,
            "memory_nodes": 1,
            "rejections": 1,
        }
        rows = by_pod(page)
        lse = rows["ns/lse"]
        assert (lse["change"], lse["cpus"], lse["desired_cpus"]) == ("pin", "0-15", "2-3")
        assert (lse["removes_cfs_quota"], lse["cfs_quota_us"]) == (True, 200_000)
        assert (rows["ns/ls"]["change"], rows["ns/ls"]["desired_cpus"]) == ("move", "0-1,4-15")
        (rejection,) = page["rejections"]
        assert (rejection["pod"], rejection["exists"], rejection["reason"]) == ("ns/rival", True, "CPUsInUse")
        assert [line for line in world.log if line.startswith(("kernel", "quota"))] == [], (
            "the report writes nothing"
        )

    run_scenario(scenario, mode=NodeMode.OBSERVE)


@pytest.mark.parametrize("drifts", [False, True])
def test_the_report_of_a_node_where_the_plan_is_applied(run_scenario: Any, *, drifts: bool) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        await world.run(await world.pod("lse", "LSE", "", "2-3"), **TWO)
        await world.quiet()
        if drifts:
            world.cgroups.sets[ls] = CpuSet.parse("0-15")
        page = await plan_report(world.executor)
        sums = page["sums"]
        assert (sums["applied"], sums["drift"], sums["unchanged"]) == (2, int(drifts), 2 - drifts)
        assert (sums["pins"], sums["moves"], sums["cfs_quotas"], sums["rejections"]) == (0, 0, 0, 0)
        assert by_pod(page)["ns/ls"]["change"] == ("drift" if drifts else "")

    run_scenario(scenario)


def test_a_kernel_that_never_answered_has_no_age(run_scenario: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_view, "WAIT_S", 0.01)

    async def scenario(world: Any) -> None:
        ls = await runs(world, await world.pod("ls", "LS"))
        gate, read = threading.Event(), world.cgroups.read

        def stuck(path: str) -> Any:
            gate.wait(60)
            return read(path)

        world.cgroups.read = stuck
        try:
            page = await plan_report(world.executor)
        finally:
            gate.set()
        assert page["kernel"] == {"age_s": None, "not_read": 1}
        assert "No changes detected so far." in render_plan_report(page)
        await world.until(lambda: ls in world.executor.kernel_view.last.cpusets)
        world.now += 7.0
        world.cgroups.read = read
        assert (await plan_report(world.executor))["kernel"] == {"age_s": 0.0, "not_read": 0}

    run_scenario(scenario, mode=NodeMode.OBSERVE)


def test_a_container_without_a_cgroup_is_counted_as_not_read(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        ls = await runs(world, await world.pod("ls", "LS"))
        world.cgroups.end(ls)
        page = await plan_report(world.executor)
        assert page["kernel"]["not_read"] == 1
        assert (page["sums"]["unchanged"], by_pod(page)["ns/ls"]["cpus"]) == (0, "")

    run_scenario(scenario, mode=NodeMode.OBSERVE)
