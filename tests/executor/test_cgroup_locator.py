"""Containers with groups that cannot be found by name: the runtime is asked, once."""

from __future__ import annotations

from typing import Any

from proxy.executor.codec import load_container
from proxy.executor.kernel_ports import Located
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.telemetry import metrics


class Places:
    """Finds by the pid that the runtime reported."""

    def __init__(self, **paths: str) -> None:
        self.paths = paths
        self.asked: list[str] = []

    def locate(self, container_id: str, detail: RuntimeDetail) -> Located:
        self.asked.append(container_id)
        path = self.paths.get(container_id, "")
        return Located(path, "" if path else f"its first process {detail.pid} has no cgroup")

    def remember(self, container_id: str, path: str, parent: str = "") -> None:
        self.paths[container_id] = path


def hide(w: Any, container_id: str, path: str) -> Places:
    """The group is elsewhere, under a name that says nothing."""
    w.cgroups.sets[path] = w.cgroups.sets.pop(container_id)
    w.executor.enforcer._paths.clear()
    w.runtime.details[container_id] = RuntimeDetail(pid=7)
    w.executor.cgroup_locator.places = Places(**{container_id: path})
    return w.executor.cgroup_locator.places


def test_a_container_that_is_found_is_moved_and_not_searched_again(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        places = hide(w, ls, "odd")
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        await w.sync.once()
        assert w.on("odd") == "4-15"
        assert w.executor.telemetry.value(metrics.CGROUPS_LOCATED) == 1
        await w.executor.journal.flush()
        stored = load_container(w.ledger.entries[f"c/{ls}"])
        assert stored is not None
        assert stored.cgroup == "odd", "the ledger knows it"
        await w.run(await w.pod("two", "LSE", "", "4-5"))
        assert w.on("odd") == "6-15", "before the owner started, without a question"
        await w.sync.once()
        assert places.asked == [ls]
        places.paths.clear()
        w.executor.cgroup_locator.recall()
        assert places.paths == {ls: "odd"}, "as after a start"
        assert w.executor.telemetry.problems() == []
        w.cgroups.sets[ls] = w.cgroups.sets.pop("odd")

    live(day)


def test_a_group_that_is_gone_is_searched_again(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        hide(w, ls, "odd")
        await w.sync.once()
        w.cgroups.sets["odder"] = w.cgroups.sets.pop("odd")
        w.executor.cgroup_locator.places.paths[ls] = "odder"
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        for _ in range(2):
            await w.sync.once()
        assert w.on("odder") == "4-15"
        w.cgroups.sets[ls] = w.cgroups.sets.pop("odder")

    live(day)


def test_a_container_without_a_group_is_reported_once_with_the_reason(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        places = hide(w, ls, "odd")
        places.paths.clear()
        for _ in range(70):
            await w.sync.once()
        (problem,) = w.executor.telemetry.problems()
        assert problem["what"] == (
            "cannot find the cgroup of a container: its CPUs are not controlled"
            ' pod=ns/ls container=c containerID=s-ls-c-1 err="its first process 7 has no cgroup"'
        )
        assert len(places.asked) == 1 + 2, "once, and then now and then"

    live(day)


def test_a_runtime_without_an_answer_does_no_harm(live) -> None:
    async def day(w: Any) -> None:
        ids = [await w.run(await w.pod(f"p{n}", "LS")) for n in range(4)]
        places = hide(w, ids[0], "odd")
        for i in ids[1:]:
            del w.cgroups.sets[i]
        errors = [RuntimeCallError("cannot ask: gone", 5), *[UnavailableError("cannot ask: silent")] * 2]
        asked: list[str] = []

        def detail(container_id: str) -> RuntimeDetail:
            asked.append(container_id)
            raise errors[len(asked) - 1]

        w.runtime.detail = detail
        await w.sync.once()
        assert len(asked) == 3, "a container that is silent twice is not asked any more"
        assert places.asked == []
        assert w.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 0

    live(day)


def test_only_those_that_run_are_asked_for(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        places = hide(w, ls, "odd")
        w.runtime.containers.pop(ls)
        await w.sync.once()
        assert places.asked == []

    live(day)


def test_the_driver_is_the_runtimes_word_or_shows_in_the_parents(live) -> None:
    async def day(w: Any) -> None:
        where = w.executor.cgroup_locator
        assert where.page(1) == {"version": 1, "driver": "cgroupfs", "driver_from": "the runtime"}
        w.runtime.cgroup_driver = lambda: ""
        w.sync.connected = False
        await w.sync.once()
        assert where.page(2) == {"version": 2, "driver": "", "driver_from": ""}
        await w.pod("a")
        expected = {"version": 1, "driver": "cgroupfs", "driver_from": "the pods' cgroup parents"}
        assert where.page(1) == expected

        def broken() -> str:
            raise RuntimeCallError("cannot read the cgroup driver of the runtime: no", 13)

        w.runtime.cgroup_driver = broken
        w.sync.connected = False
        await w.sync.once()
        assert w.sync.connected
        assert where.page(1) == expected

    live(day)
