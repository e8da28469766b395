"""Containers whose groups cannot be found by name: the runtime is queried once."""

from __future__ import annotations

from typing import Any

from proxy.executor.kernel_ports import CgroupLocation
from proxy.executor.ledger_codec import load_container
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.telemetry import metrics


class PidLocator:
    """Finds groups by the pid that the runtime reports."""

    def __init__(self, **paths: str) -> None:
        self.paths = paths
        self.queried: list[str] = []

    def locate(self, container_id: str, detail: RuntimeDetail) -> CgroupLocation:
        self.queried.append(container_id)
        path = self.paths.get(container_id, "")
        return CgroupLocation(path, "" if path else f"its first process {detail.pid} has no cgroup")

    def remember(self, container_id: str, path: str, parent: str = "") -> None:
        self.paths[container_id] = path


def move_group(world: Any, container_id: str, path: str) -> PidLocator:
    """Move the group to a path that is unrelated to the container's id."""
    world.cgroups.sets[path] = world.cgroups.sets.pop(container_id)
    world.executor.cpuset_writer._paths.clear()
    world.runtime.details[container_id] = RuntimeDetail(pid=7)
    world.executor.cgroup_locator.places = PidLocator(**{container_id: path})
    return world.executor.cgroup_locator.places


def test_a_container_whose_cgroup_is_found_is_moved_and_not_searched_again(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        places = move_group(world, ls, "odd")
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        await world.sync.once()
        assert world.on("odd") == "4-15"
        assert world.executor.telemetry.value(metrics.CGROUPS_LOCATED) == 1
        await world.executor.ledger_writer.flush()
        stored = load_container(world.ledger.entries[f"c/{ls}"])
        assert stored is not None
        assert stored.cgroup == "odd", "the ledger holds the path"
        await world.run(await world.pod("two", "LSE", "", "4-5"))
        assert world.on("odd") == "6-15", "moved before the owner started, without a query"
        await world.sync.once()
        assert places.queried == [ls]
        places.paths.clear()
        world.executor.cgroup_locator.remember_recorded_paths()
        assert places.paths == {ls: "odd"}, "as after a start"
        assert world.executor.telemetry.problems() == []
        world.cgroups.sets[ls] = world.cgroups.sets.pop("odd")

    run_scenario(scenario)


def test_a_removed_group_is_searched_again(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        move_group(world, ls, "odd")
        await world.sync.once()
        world.cgroups.sets["odder"] = world.cgroups.sets.pop("odd")
        world.executor.cgroup_locator.places.paths[ls] = "odder"
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        for _ in range(2):
            await world.sync.once()
        assert world.on("odder") == "4-15"
        world.cgroups.sets[ls] = world.cgroups.sets.pop("odder")

    run_scenario(scenario)


def test_a_container_without_a_group_is_reported_once_with_the_reason(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        places = move_group(world, ls, "odd")
        places.paths.clear()
        for _ in range(70):
            await world.sync.once()
        (problem,) = world.executor.telemetry.problems()
        assert problem["what"] == (
            "cannot find the cgroup of a container: its CPUs are not controlled"
            ' pod=ns/ls container=c containerID=s-ls-c-1 err="its first process 7 has no cgroup"'
        )
        assert len(places.queried) == 1 + 2, "once, and then rarely"

    run_scenario(scenario)


def test_a_runtime_that_does_not_answer_causes_no_fault(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ids = [await world.run(await world.pod(f"p{n}", "LS")) for n in range(4)]
        places = move_group(world, ids[0], "odd")
        for i in ids[1:]:
            del world.cgroups.sets[i]
        errors = [RuntimeCallError("cannot ask: gone", 5), *[UnavailableError("cannot ask: silent")] * 2]
        queried: list[str] = []

        def detail(container_id: str) -> RuntimeDetail:
            queried.append(container_id)
            raise errors[len(queried) - 1]

        world.runtime.detail = detail
        await world.sync.once()
        assert len(queried) == 3, "after two calls without an answer the runtime is not queried any more"
        assert places.queried == []
        assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 0

    run_scenario(scenario)


def test_only_running_containers_are_located(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        places = move_group(world, ls, "odd")
        world.runtime.containers.pop(ls)
        await world.sync.once()
        assert places.queried == []

    run_scenario(scenario)


def test_the_driver_is_reported_by_the_runtime_or_derived_from_cgroup_parents(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        where = world.executor.cgroup_locator
        assert where.page(1) == {"version": 1, "driver": "cgroupfs", "driver_from": "the runtime"}
        world.runtime.cgroup_driver = lambda: ""
        world.sync.connected = False
        await world.sync.once()
        assert where.page(2) == {"version": 2, "driver": "", "driver_from": ""}
        await world.pod("a")
        expected = {"version": 1, "driver": "cgroupfs", "driver_from": "the pods' cgroup parents"}
        assert where.page(1) == expected

        def broken() -> str:
            raise RuntimeCallError("cannot read the cgroup driver of the runtime: no", 13)

        world.runtime.cgroup_driver = broken
        world.sync.connected = False
        await world.sync.once()
        assert world.sync.connected
        assert where.page(1) == expected

    run_scenario(scenario)
