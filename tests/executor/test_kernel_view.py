"""Reading what the kernel has, for the status."""

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


def row(w: Any, container_id: str) -> Any:
    (found,) = [c for c in node_page(w.executor)["containers"] if c["id"] == container_id]
    return found


def check(w: Any, name: str) -> Any:
    (found,) = [c for c in node_page(w.executor)["checks"] if c["name"] == name]
    return found


def test_the_kernels_sets_are_shown_and_the_plan_beside_them(live: Any) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        lse = await w.run(await w.pod("lse", "LSE", "", "0-3"))
        assert row(w, ls)["cpus"] == "", "nothing was read yet"
        await w.executor.kernel_view.refresh()
        assert (row(w, ls)["cpus"], row(w, ls)["desired_cpus"], row(w, ls)["differs"]) == (
            "4-15",
            "4-15",
            False,
        )
        assert check(w, "cpusets")["ok"]
        w.cgroups.sets[ls] = CpuSet.parse("0-15")
        await w.executor.kernel_view.refresh()
        assert (row(w, ls)["cpus"], row(w, ls)["desired_cpus"], row(w, ls)["differs"]) == (
            "0-15",
            "4-15",
            True,
        )
        assert check(w, "cpusets")["reason"] == "1 container without the desired cpuset: ns/ls/c"
        (owner,) = node_page(w.executor)["exclusive"]
        assert (owner["cpus"], owner["also_used_by"]) == ("0-3", ["ns/ls/c"])
        pools = node_page(w.executor)["pools"]
        assert pools["containers"]["shared"] == {"count": 1, "in_effect": 0}
        w.executor.enforcer._paths.clear()
        w.cgroups.end(lse)
        await w.executor.kernel_view.refresh()
        assert row(w, lse)["cpus"] == "", "it has no cgroup"

    live(day)


def owned(w: Any) -> str:
    """Return the CPUs that the only owner has, by the status."""
    (owner,) = node_page(w.executor)["exclusive"]
    return str(owner["cpus"])


def test_an_owner_without_a_cgroup_has_what_all_others_have_left(live: Any) -> None:
    async def day(w: Any) -> None:
        await w.create(await w.pod("lse", "LSE", "", "0-3"))
        assert owned(w) == "", "nothing was read"
        await w.executor.kernel_view.refresh()
        assert owned(w) == "0-3"
        w.now += STALE_S
        assert owned(w) == "0-3"
        w.now += 0.1
        assert owned(w) == "", "the reading is too old"

    live(day)


def test_an_owner_of_which_the_cpuset_cannot_be_read_has_nothing_by_the_status(live: Any) -> None:
    async def day(w: Any) -> None:
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        await w.executor.kernel_view.refresh()
        assert owned(w) == "0-3"

        def broken(path: str) -> Any:
            raise CgroupError(f"cannot read {path}: gone", errno.ENOENT)

        w.cgroups.read = broken
        await w.executor.kernel_view.refresh()
        assert owned(w) == ""

    live(day)


def test_an_owner_has_nothing_by_a_reading_that_took_too_long(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def day(w: Any) -> None:
        await w.run(await w.pod("ls", "LS"))
        await w.create(await w.pod("lse", "LSE", "", "0-3"))
        await w.executor.kernel_view.refresh()
        assert owned(w) == "0-3"
        monkeypatch.setattr(module, "READ_S", -1.0)
        await w.executor.kernel_view.refresh()
        assert owned(w) == "", "the container that was not read may still use the CPUs"

    live(day)


def test_a_container_with_other_cpus_is_not_counted_in_its_pool_while_it_starts(live: Any) -> None:
    async def day(w: Any) -> None:
        await w.run(await w.pod("ls", "LS"))
        web = await w.create(await w.pod("web", "LS"))
        call = await w.call("StartContainer", pb.StartContainerRequest(container_id=web))
        while row(w, web)["cpus"] != "0-7":
            w.cgroups.sets[web] = CpuSet.parse("0-7")
            await w.executor.kernel_view.refresh()
        page = node_page(w.executor)
        assert not row(w, web)["differs"], "a call is in flight"
        assert page["pools"]["containers"]["shared"] == {"count": 2, "in_effect": 1}
        w.wire.finished(call, 0)

    live(day)


def test_a_container_that_is_only_observed_is_not_counted_in_its_pool(live: Any) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        w.cgroups.sets[ls] = CpuSet.parse("0-15")
        await w.executor.kernel_view.refresh()
        assert row(w, ls)["cpus"] == row(w, ls)["desired_cpus"] == "0-15"
        assert node_page(w.executor)["pools"]["containers"]["shared"] == {"count": 1, "in_effect": 0}

    live(day, mode=NodeMode.OBSERVE)


def test_nothing_is_in_effect_in_observe(live: Any) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        lse = await w.run(await w.pod("lse", "LSE", "", "0-3"))
        w.cgroups.sets.update({ls: CpuSet.parse("0-15"), lse: CpuSet.parse("0-15")})
        await w.executor.kernel_view.refresh()
        page = node_page(w.executor)
        assert [c["cpus"] for c in page["containers"]] == ["0-15", "0-15"]
        assert {c["desired_cpus"] for c in page["containers"]} == {"0-3", "4-15"}
        assert not any(c["applied"] or c["cfs_quota"] for c in page["containers"])
        assert [(o["cpus"], o["desired_cpus"], o["applied"]) for o in page["exclusive"]] == [
            ("", "0-3", False)
        ]
        assert check(w, "cpusets")["ok"], "nothing is desired"

    live(day, mode=NodeMode.OBSERVE)


def test_a_kernel_that_hangs_delays_the_status_and_nothing_else(live: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.05)

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        await w.executor.kernel_view.refresh()
        gate, read = threading.Event(), w.cgroups.read

        def stuck(path: str) -> Any:
            gate.wait(60)
            return read(path)

        w.cgroups.read = stuck
        before = w.executor.kernel_view.last
        try:
            async with asyncio.timeout(5):
                await w.executor.kernel_view.refresh()
                await w.executor.kernel_view.refresh()
            assert w.executor.kernel_view.last is before
            assert row(w, ls)["cpus"] == "0-15", "the last reading is shown"
            assert node_page(w.executor)["kernel"]["age_s"] is not None
        finally:
            gate.set()
        await w.until(lambda: w.executor.kernel_view.last is not before)

    live(day)


@pytest.mark.parametrize("limit", [-1.0])
def test_a_reading_ends_in_time(live: Any, monkeypatch: Any, limit: float) -> None:
    monkeypatch.setattr(module, "READ_S", limit)

    async def day(w: Any) -> None:
        await w.run(await w.pod("ls", "LS"))
        await w.executor.kernel_view.refresh()
        assert node_page(w.executor)["kernel"]["not_read"] == 1
        assert node_page(w.executor)["containers"][0]["cpus"] == ""

    live(day)


def test_a_quota_that_another_program_wrote_is_not_off(live: Any) -> None:
    async def day(w: Any) -> None:
        two = {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000}
        lsr = await w.run(await w.pod("lsr", "LSR", "", "2-3"), **two)
        await w.executor.kernel_view.refresh()
        assert row(w, lsr)["cfs_quota"] == "off"
        (quota,) = node_page(w.executor)["quotas"]
        assert (quota["was"], quota["now"]) == (200_000, -1)
        path = w.cpu.find("/kubepods/podlsr", lsr)
        w.cpu.quotas[path] = 50_000
        await w.executor.kernel_view.refresh()
        assert row(w, lsr)["cfs_quota"] == ""
        (quota,) = node_page(w.executor)["quotas"]
        assert (quota["was"], quota["now"]) == (200_000, 50_000)
        del w.cpu.quotas[path]
        await w.executor.kernel_view.refresh()
        assert row(w, lsr)["cfs_quota"] == "", "it could not be read"

    live(day)
