"""The kernel's cpusets, as the status reads them."""

from __future__ import annotations

import asyncio
import errno
import threading
from typing import Any

import pytest

import proxy.executor.kernel_view as module
from proxy.api.cri import api_pb2 as pb
from proxy.executor.status_data import node_page
from proxy.model.errors import CgroupError
from proxy.model.freshness import STALE_S
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode


def row(world: Any, container_id: str) -> Any:
    (found,) = [c for c in node_page(world.executor)["containers"] if c["id"] == container_id]
    return found


def check(world: Any, name: str) -> Any:
    (found,) = [c for c in node_page(world.executor)["checks"] if c["name"] == name]
    return found


def test_the_status_shows_the_kernels_sets_and_the_plan(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
        assert row(world, ls)["cpus"] == "", "the kernel was not read yet"
        await world.executor.kernel_view.refresh()
        assert (row(world, ls)["cpus"], row(world, ls)["desired_cpus"], row(world, ls)["differs"]) == (
            "4-15",
            "4-15",
            False,
        )
        assert check(world, "cpusets")["ok"]
        world.cgroups.sets[ls] = CpuSet.parse("0-15")
        await world.executor.kernel_view.refresh()
        assert (row(world, ls)["cpus"], row(world, ls)["desired_cpus"], row(world, ls)["differs"]) == (
            "0-15",
            "4-15",
            True,
        )
        assert check(world, "cpusets")["reason"] == "1 container without the desired cpuset: ns/ls/c"
        (owner,) = node_page(world.executor)["exclusive"]
        assert (owner["cpus"], owner["also_used_by"]) == ("0-3", ["ns/ls/c"])
        pools = node_page(world.executor)["pools"]
        assert pools["containers"]["shared"] == {"count": 1, "in_effect": 0}
        world.executor.cpuset_writer._paths.clear()
        world.cgroups.end(lse)
        await world.executor.kernel_view.refresh()
        assert row(world, lse)["cpus"] == "", "it has no cgroup"

    run_scenario(scenario)


def owned(world: Any) -> str:
    """Return the CPUs of the only owner, according to the status."""
    (owner,) = node_page(world.executor)["exclusive"]
    return str(owner["cpus"])


def test_an_owner_without_a_cgroup_has_the_cpus_that_all_other_containers_have_left(
    run_scenario: Any,
) -> None:
    async def scenario(world: Any) -> None:
        await world.create(await world.pod("lse", "LSE", "", "0-3"))
        assert owned(world) == "", "the kernel was not read"
        await world.executor.kernel_view.refresh()
        assert owned(world) == "0-3"
        world.now += STALE_S
        assert owned(world) == "0-3"
        world.now += 0.1
        assert owned(world) == "", "the reading is too old"

    run_scenario(scenario)


def test_the_status_shows_no_cpus_for_an_owner_with_an_unreadable_cpuset(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        await world.executor.kernel_view.refresh()
        assert owned(world) == "0-3"

        def broken(path: str) -> Any:
            raise CgroupError(f"cannot read {path}: gone", errno.ENOENT)

        world.cgroups.read = broken
        await world.executor.kernel_view.refresh()
        assert owned(world) == ""

    run_scenario(scenario)


def test_a_reading_that_took_too_long_shows_no_cpus_for_an_owner(
    run_scenario: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        await world.run(await world.pod("ls", "LS"))
        await world.create(await world.pod("lse", "LSE", "", "0-3"))
        await world.executor.kernel_view.refresh()
        assert owned(world) == "0-3"
        monkeypatch.setattr(module, "READ_S", -1.0)
        await world.executor.kernel_view.refresh()
        assert owned(world) == "", "the container that was not read may still use the CPUs"

    run_scenario(scenario)


def test_a_container_with_other_cpus_is_not_counted_in_its_pool_while_it_starts(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.run(await world.pod("ls", "LS"))
        web = await world.create(await world.pod("web", "LS"))
        call = await world.call("StartContainer", pb.StartContainerRequest(container_id=web))
        while row(world, web)["cpus"] != "0-7":
            world.cgroups.sets[web] = CpuSet.parse("0-7")
            await world.executor.kernel_view.refresh()
        page = node_page(world.executor)
        assert not row(world, web)["differs"], "a call is in flight"
        assert page["pools"]["containers"]["shared"] == {"count": 2, "in_effect": 1}
        world.wire.finished(call, 0)

    run_scenario(scenario)


def test_a_call_that_got_no_answer_hides_no_other_cpus(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        web = await world.run(await world.pod("web", "LS"))
        call = world.executor.inflight_calls.track(web, CpuSet.parse("0-15"))
        world.cgroups.sets[web] = CpuSet.parse("0-7")
        await world.executor.kernel_view.refresh()
        assert not row(world, web)["differs"], "a call is in flight"
        world.executor.call_tracker.mark_orphaned(call)
        world.cgroups.sets[web] = CpuSet.parse("0-7")
        await world.executor.kernel_view.refresh()
        assert row(world, web)["differs"]
        assert check(world, "cpusets")["reason"] == "1 container without the desired cpuset: ns/web/c"

    run_scenario(scenario)


def test_a_container_that_is_only_observed_is_not_counted_in_its_pool(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        world.cgroups.sets[ls] = CpuSet.parse("0-15")
        await world.executor.kernel_view.refresh()
        assert row(world, ls)["cpus"] == row(world, ls)["desired_cpus"] == "0-15"
        assert node_page(world.executor)["pools"]["containers"]["shared"] == {"count": 1, "in_effect": 0}

    run_scenario(scenario, mode=NodeMode.OBSERVE)


def test_no_set_is_in_effect_in_observe_mode(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
        world.cgroups.sets.update({ls: CpuSet.parse("0-15"), lse: CpuSet.parse("0-15")})
        await world.executor.kernel_view.refresh()
        page = node_page(world.executor)
        assert [c["cpus"] for c in page["containers"]] == ["0-15", "0-15"]
        assert {c["desired_cpus"] for c in page["containers"]} == {"0-3", "4-15"}
        assert not any(c["applied"] or c["cfs_quota"] for c in page["containers"])
        assert [(o["cpus"], o["desired_cpus"], o["applied"]) for o in page["exclusive"]] == [
            ("", "0-3", False)
        ]
        assert check(world, "cpusets")["ok"], "nothing is desired"

    run_scenario(scenario, mode=NodeMode.OBSERVE)


def test_a_kernel_that_hangs_delays_the_status_and_nothing_else(run_scenario: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.05)

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        await world.executor.kernel_view.refresh()
        gate, read = threading.Event(), world.cgroups.read

        def stuck(path: str) -> Any:
            gate.wait(60)
            return read(path)

        world.cgroups.read = stuck
        before = world.executor.kernel_view.last
        try:
            async with asyncio.timeout(30):
                await world.executor.kernel_view.refresh()
                await world.executor.kernel_view.refresh()
            assert world.executor.kernel_view.last is before
            assert row(world, ls)["cpus"] == "0-15", "the last reading is shown"
            assert node_page(world.executor)["kernel"]["age_s"] is not None
        finally:
            gate.set()
        await world.until(lambda: world.executor.kernel_view.last is not before)

    run_scenario(scenario)


@pytest.mark.parametrize("limit", [-1.0])
def test_a_reading_of_the_kernel_ends_in_time(run_scenario: Any, monkeypatch: Any, limit: float) -> None:
    monkeypatch.setattr(module, "READ_S", limit)

    async def scenario(world: Any) -> None:
        await world.run(await world.pod("ls", "LS"))
        await world.executor.kernel_view.refresh()
        assert node_page(world.executor)["kernel"]["not_read"] == 1
        assert node_page(world.executor)["containers"][0]["cpus"] == ""

    run_scenario(scenario)


def test_a_quota_that_another_program_wrote_is_not_off(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        two = {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000}
        lsr = await world.run(await world.pod("lsr", "LSR", "", "2-3"), **two)
        await world.executor.kernel_view.refresh()
        assert row(world, lsr)["cfs_quota"] == "off"
        (quota,) = node_page(world.executor)["quotas"]
        assert (quota["was"], quota["now"]) == (200_000, -1)
        path = world.cpu.find("/kubepods/podlsr", lsr)
        world.cpu.quotas[path] = 50_000
        await world.executor.kernel_view.refresh()
        assert row(world, lsr)["cfs_quota"] == ""
        (quota,) = node_page(world.executor)["quotas"]
        assert (quota["was"], quota["now"]) == (200_000, 50_000)
        del world.cpu.quotas[path]
        await world.executor.kernel_view.refresh()
        assert row(world, lsr)["cfs_quota"] == "", "it could not be read"

    run_scenario(scenario)
