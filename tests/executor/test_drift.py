"""Drift with a kernel in memory: found, attributed, repaired, counted and reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proxy.engine.node_events import KubeletCpusRead, ModeChanged
from proxy.engine.write_conflicts import LONGEST_S, QUIET_S
from proxy.executor.drift import attribution
from proxy.executor.drift.detection import Drift
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager
from proxy.model.mode import NodeMode
from proxy.telemetry import metrics
from tests.executor.played_writes import PlayedWrites

if TYPE_CHECKING:
    import pytest

ALL = CpuSet.parse("0-15")


def reporting(w: Any, room: int = 1000) -> PlayedWrites:
    """Have a kernel that reports writes."""
    writes = PlayedWrites(w.cgroups.sets, room)
    drift(w).watch.writes, drift(w).watch.refused = writes, ""
    drift(w).watch.start()
    return writes


def drift(w: Any) -> Drift:
    found: Drift = w.executor.drift
    return found


async def two(w: Any) -> tuple[str, str]:
    """A container that shares and one that owns 0-3."""
    ls = await w.run(await w.pod("ls", "LS"))
    return ls, await w.run(await w.pod("lse", "LSE", "", "0-3"))


def scribble(w: Any, writes: PlayedWrites | None, container: str, cpus: str = "0-15") -> None:
    """Another program writes a container's set."""
    w.cgroups.sets[container] = CpuSet.parse(cpus)
    if writes is not None:
        writes.write(container)


def counted(w: Any) -> dict[str, int]:
    return {
        name.removeprefix("drift_by_"): n
        for name, n in w.executor.telemetry.registry.page().items()
        if "drift_by_" in name and n
    }


async def done(w: Any, repaired: int) -> None:
    """Wait until so many have been repaired, and reported."""
    await w.until(
        lambda: w.executor.telemetry.value(metrics.CPUSETS_REPAIRED) == sum(counted(w).values()) == repaired
    )
    await w.quiet()


def lines(w: Any, words: str) -> list[str]:
    return [line for line in w.logged if words in line]


def test_a_reported_write_is_repaired_without_a_reconcile(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        ls, lse = await two(w)
        assert writes.watched() == {ls, lse}
        passes = w.executor.telemetry.value(metrics.RECONCILES)
        scribble(w, writes, ls, "0-7")
        await done(w, 1)
        assert w.on(ls) == "4-15"
        assert w.executor.telemetry.value(metrics.RECONCILES) == passes
        assert lines(w, "drift: ") == [
            "drift: another program wrote a cpuset: put back pod=ns/ls container=c containerID=s-ls-c-1 cpus=4-15 found=0-7"  # noqa: E501
        ]
        assert counted(w) == {"unknown": 1}

    live(day)


def test_our_own_writes_are_not_drift_and_cause_no_more(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        write = w.cgroups.write

        def writing(path: str, *args: Any, **more: Any) -> bool:
            changed: bool = write(path, *args, **more)
            writes.write(path)  # the kernel reports all writes, ours among them
            return changed

        w.cgroups.write = writing
        ls, lse = await two(w)
        await w.stop(lse)
        await asyncio.sleep(0.1)
        written = w.executor.telemetry.value(metrics.CPUSETS_WRITTEN)
        scribble(w, writes, ls, w.on(ls))  # and another program writes what is right
        await asyncio.sleep(0.1)
        assert w.executor.telemetry.value(metrics.CPUSETS_WRITTEN) == written
        assert w.executor.telemetry.value(metrics.CPUSETS_REPAIRED) == 0
        assert lines(w, "drift") == []

    live(day)


def test_the_set_of_a_call_in_flight_is_checked_after_its_answer(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        ls, _ = await two(w)
        flight = w.executor.calls.depart(ls, CpuSet.parse("4-15"))
        scribble(w, writes, ls)
        await asyncio.sleep(0.1)
        await w.quiet()
        assert w.on(ls) == "0-15"
        w.start_update.landed(flight, flight.carries)
        await w.until(lambda: w.on(ls) == "4-15")

    live(day)


def test_each_passed_update_is_checked_and_attributed_to_its_sender(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls, _ = await two(w)
        update = w.runtime.limit

        def otherwise(container: str, quota: int) -> None:
            update(container, quota)
            w.cgroups.sets[container] = ALL  # the runtime makes something else of it

        w.runtime.limit = otherwise
        got = await w.update(ls, cpu_shares=5)
        assert got.cpuset_cpus == "4-15"
        await done(w, 1)
        assert w.on(ls) == "4-15"
        assert counted(w) == {"kubelet": 1}

    live(day)


def test_a_suspected_container_is_compared_at_once(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls, lse = await two(w)
        for container in (ls, lse):
            scribble(w, None, container, "0-7")
        drift(w).suspect("systemd")
        await done(w, 2)
        assert (w.on(ls), w.on(lse)) == ("4-15", "0-3")
        assert counted(w) == {"systemd": 2}
        scribble(w, None, ls, "0-7")
        drift(w).suspect("runc", [ls, "absent"])
        await done(w, 3)
        w.now += 60
        scribble(w, None, ls, "0-7")
        drift(w).suspect("unknown")
        await done(w, 4)
        assert counted(w) == {"systemd": 2, "runc": 1, "unknown": 1}, "what was long ago explains nothing"

    live(day)


def test_an_update_at_the_runtimes_socket_is_attributed_and_corrected(
    live: Callable[..., None],
) -> None:
    async def day(w: Any) -> None:
        settler = w.make_settler()
        task = asyncio.create_task(settler.run())
        writes = reporting(w)
        ls, _ = await two(w)
        await w.until(lambda: w.executor.state.runtime.saved.get(ls) == CpuSet.parse("4-15"))
        w.runtime.specs[ls] = "0-7"
        w.runtime.details[ls] = RuntimeDetail(cpuset_cpus="0-7")
        scribble(w, writes, ls, "0-7")
        await done(w, 1)
        await w.until(lambda: w.runtime.specs[ls] == "4-15")
        assert counted(w) == {"runc": 1}
        assert lines(w, "probably=runc")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        settler.close()

    live(day, settle_per_second=1000)


def test_a_runtime_that_stores_an_update_after_the_write_is_asked_once_more(
    live: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribution, "STORED_S", 0.2)

    async def day(w: Any) -> None:
        writes = reporting(w)
        ls, _ = await two(w)
        asked: list[str] = []
        answers = iter(["4-15", "0-7"])  # the second is stored by then

        def detail(container_id: str) -> RuntimeDetail:
            asked.append(container_id)
            return RuntimeDetail(cpuset_cpus=next(answers))

        monkeypatch.setattr(w.runtime, "detail", detail)
        scribble(w, writes, ls, "0-7")
        await done(w, 1)
        await w.until(lambda: counted(w))
        assert (counted(w), asked) == ({"runc": 1}, [ls, ls])
        assert w.executor.state.runtime.saved.get(ls) == CpuSet.parse("0-7")
        assert ls in w.executor.state.runtime.unsettled

    live(day)


def test_a_container_that_was_just_checked_is_checked_again_later(
    live: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribution, "PAUSE_S", 0.01)

    async def day(w: Any) -> None:
        writes = reporting(w)
        ls, _ = await two(w)
        scribble(w, writes, ls, "0-14")
        await done(w, 1)
        w.runtime.details[ls] = RuntimeDetail(cpuset_cpus="0-7")
        scribble(w, writes, ls, "0-7")
        await done(w, 2)
        assert w.executor.state.runtime.saved.get(ls) != CpuSet.parse("0-7"), "it was asked about just now"
        w.now += attribution.AGAIN_S
        await w.until(lambda: w.executor.state.runtime.saved.get(ls) == CpuSet.parse("0-7"))
        assert ls in w.executor.state.runtime.unsettled

    live(day)


def test_a_runtime_that_is_away_holds_up_nothing(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        ls, _ = await two(w)
        w.runtime.down = True
        scribble(w, writes, ls, "0-7")
        await done(w, 1)
        assert counted(w) == {"unknown": 1}

    live(day)


def test_kubelets_default_is_kubelets(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        ls, _ = await two(w)
        w.executor.store.handle(KubeletCpusRead(CpuManager("static", default=CpuSet.parse("0-13")), {}))
        scribble(w, writes, ls, "0-13")
        await done(w, 1)
        w.executor.store.handle(KubeletCpusRead(CpuManager("none", default=CpuSet.parse("0-13")), {}))
        scribble(w, writes, ls, "0-13")
        await done(w, 2)
        assert counted(w) == {"kubelet": 1, "unknown": 1}

    live(day)


def test_what_cannot_wait_in_the_kernel_has_everything_compared(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        ls, lse = await two(w)
        w.cgroups.sets[lse] = ALL
        writes.flooded = True
        writes.write(ls)
        await done(w, 1)
        assert w.on(lse) == "0-3"
        assert w.executor.telemetry.value(metrics.CPUSET_WATCH_OVERFLOWS) == 1

    live(day)


def test_unwatched_containers_are_compared_by_timer_and_reported_once(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        reporting(w, room=1)
        drift(w).start()
        ls, lse = await two(w)
        await w.sync.once()
        await w.sync.once()
        scribble(w, None, lse, "0-7")
        scribble(w, None, ls, "0-7")
        await done(w, 2)
        assert (w.on(ls), w.on(lse)) == ("4-15", "0-3")
        assert len(lines(w, "cannot watch cpusets")) == 1
        assert drift(w).page()["watched"] == 1
        assert "too many" in str(drift(w).page()["not_watched"])

    live(day, reconcile_period=0.4)


def test_a_container_that_has_gone_is_no_longer_watched(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        ls, lse = await two(w)
        await w.stop(lse)
        await w.sync.once()
        assert writes.watched() == {ls}
        assert drift(w).page()["watched"] == 1
        w.executor.store.handle(ModeChanged(NodeMode.RELEASED))  # released
        scribble(w, writes, ls)
        await asyncio.sleep(0.1)
        await w.quiet()
        assert w.on(ls) == "0-15"

    live(day)


def test_ancestors_are_watched_where_they_limit_the_effect(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        w.cgroups.version = 2
        w.cgroups.find = lambda parent, i: f"kube/pod/{i}" if f"kube/pod/{i}" in w.cgroups.sets else None
        pod = await w.pod("ls", "LS")
        container = await w.create(pod)
        path = f"kube/pod/{container}"
        w.cgroups.sets |= {path: ALL, "kube": ALL, "kube/pod": ALL}
        writes = reporting(w)
        await w.start(container)
        w.cgroups.sets.pop(container)
        await w.until(lambda: writes.watched() == {path, "kube", "kube/pod"})
        w.cgroups.sets[path] = CpuSet.parse("0-1")
        writes.write("kube")
        await done(w, 1)
        assert w.cgroups.sets[path] == ALL

    live(day)


# -- write conflicts --------------------------------------------------------------------------------------


async def conflict(w: Any, writes: PlayedWrites, container: str, cpus: str = "0-15") -> None:
    """Write until it is a conflict."""
    before = w.executor.telemetry.value(metrics.CPUSETS_REPAIRED)
    for times in range(1, 4):
        scribble(w, writes, container, cpus)
        await done(w, before + times)
    await w.until(lambda: drift(w).fought())


def test_a_write_conflict_is_reported_and_repaired_ever_more_rarely(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        ls = await w.run(await w.pod("ls", "LS"))
        await conflict(w, writes, ls, "0-3")
        assert lines(
            w,
            "another program keeps writing the cpuset of a container pod=ns/ls container=c"
            " containerID=s-ls-c-1 cpus=0-15 found=0-3 times=3 seconds=0.1",
        )
        assert len(lines(w, "drift: ")) == 2, "the third is reported as a conflict"
        assert [line for line in w.logged if 'putBack="less and less often" advice=' in line]
        assert w.executor.telemetry.value(metrics.WRITE_CONFLICTS) == 1
        repaired = 3
        for gap in (0.5, 1, 2, 4, 8, 16, 32, LONGEST_S, LONGEST_S):
            scribble(w, writes, ls, "0-3")
            w.now += gap - 0.25
            await w.executor.writes.follow([ls])
            assert w.on(ls) == "0-3", "not due"
            w.now += 0.25
            await w.executor.writes.follow([ls])
            repaired += 1
            await done(w, repaired)
            assert w.on(ls) == "0-15"
        assert writes.watched() == set(), "the writes of a busy program are not watched"
        page = drift(w).page()["writeConflicts"]
        assert isinstance(page, list)
        assert [(one["container"], one["times"], one["found"]) for one in page] == [("ns/ls/c", 12, "0-3")]
        w.now += QUIET_S
        await w.until(lambda: not drift(w).fought())
        await w.until(lambda: writes.watched() == {ls})
        assert lines(w, "drift: no other program writes the cpuset any more pod=ns/ls container=c")
        scribble(w, writes, ls, "0-3")
        await done(w, repaired + 1)
        assert w.on(ls) == "0-15"

    live(day)


def test_a_container_on_owned_cpus_is_repaired_each_second(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        ls, lse = await two(w)
        for container, cpus, right in ((ls, "0-15", "4-15"), (lse, "0-2", "0-3")):
            await conflict(w, writes, container, cpus)
            for _ in range(10):
                scribble(w, writes, container, cpus)
                w.now += 1
                await w.executor.writes.follow([container])
                assert w.on(container) == right
            which, pace = (
                f"cpus={right} found={cpus} ",
                'putBack="each second, as exclusive CPUs are at stake"',
            )
            assert [line for line in w.logged if which in line and pace in line]
        scribble(w, writes, ls, "4-5")  # those have no owner
        w.now += 1
        await w.executor.writes.follow([ls])
        assert w.on(ls) == "4-5"

    live(day)


def test_a_comparison_keeps_to_the_pace_of_a_conflict_and_a_barrier_does_not(
    live: Callable[..., None],
) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        ls = await w.run(await w.pod("ls", "LS"))
        other = await w.run(await w.pod("other", "LS"))
        await conflict(w, writes, ls, "4-7")
        w.cgroups.sets[ls] = w.cgroups.sets[other] = CpuSet.parse("4-7")
        await w.sync.once()
        assert (w.on(ls), w.on(other)) == ("4-7", "0-15")
        assert (await w.executor.reservations.clear(CpuSet.parse("0-1"))).is_committed
        assert w.on(ls) == "0-15"

    live(day)


def test_a_new_owner_gets_other_cpus_than_contested_ones(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        ls = await w.run(await w.pod("ls", "LS"))
        await w.run(await w.pod("lse", "LSE", "", "8-9"))
        await conflict(w, writes, ls, "0-3,10")
        sandbox = await w.pod("own", kube="guaranteed", total={"cpu_shares": 2048})
        own = await w.run(
            sandbox, cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000, memory_limit_in_bytes=1
        )
        owned = w.executor.state.containers[own].placement.exclusive
        assert owned
        assert not owned & CpuSet.parse("0-3,10")
        assert w.executor.telemetry.value(metrics.CREATES_ON_OTHER_CPUS) in (0, 1)

    live(day)


def test_a_pod_with_contested_named_cpus_is_refused(
    live: Callable[..., None],
) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        ls = await w.run(await w.pod("ls", "LS"))
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        await conflict(w, writes, ls, "0-15")
        call = await w.begin(await w.pod("next", "LSE", "", "4-5"))
        assert call.refused is not None
        assert "another program keeps writing the cpuset of ns/ls/c" in call.refused[1]
        w.wire.finished(call, None)
        w.now += QUIET_S
        await w.until(lambda: not drift(w).fought())
        await w.run(await w.pod("again", "LSE", "", "4-5"))
        assert w.on(ls) == "6-15"

    live(day)
