"""Drift on a simulated kernel: detected, attributed, repaired, counted and reported."""

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
from tests.executor.cleared_cpus import cleared
from tests.executor.played_writes import PlayedWrites

if TYPE_CHECKING:
    import pytest

ALL = CpuSet.parse("0-15")


def with_reported_writes(world: Any, room: int = 1000) -> PlayedWrites:
    """Simulate a kernel that reports writes."""
    writes = PlayedWrites(world.cgroups.sets, room)
    drift(world).watch.writes, drift(world).watch.refused = writes, ""
    drift(world).watch.start()
    return writes


def drift(world: Any) -> Drift:
    found: Drift = world.executor.drift
    return found


async def two(world: Any) -> tuple[str, str]:
    """Run a container that shares CPUs and one that owns 0-3."""
    ls = await world.run(await world.pod("ls", "LS"))
    return ls, await world.run(await world.pod("lse", "LSE", "", "0-3"))


def write_as_another_program(
    world: Any, writes: PlayedWrites | None, container: str, cpus: str = "0-15"
) -> None:
    """Write a container's set as another program."""
    world.cgroups.sets[container] = CpuSet.parse(cpus)
    if writes is not None:
        writes.write(container)


def counted(world: Any) -> dict[str, int]:
    return {
        name.removeprefix("drift_by_"): n
        for name, n in world.executor.telemetry.registry.page().items()
        if "drift_by_" in name and n
    }


async def done(world: Any, repaired: int) -> None:
    """Wait until this many sets have been repaired and reported."""
    await world.until(
        lambda: (
            world.executor.telemetry.value(metrics.CPUSETS_REPAIRED)
            == sum(counted(world).values())
            == repaired
        )
    )
    await world.quiet()


def lines(world: Any, text: str) -> list[str]:
    return [line for line in world.logged if text in line]


def test_a_reported_write_is_repaired_without_a_reconcile(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls, lse = await two(world)
        assert writes.watched() == {ls, lse}
        passes = world.executor.telemetry.value(metrics.RECONCILES)
        write_as_another_program(world, writes, ls, "0-7")
        await done(world, 1)
        assert world.on(ls) == "4-15"
        assert world.executor.telemetry.value(metrics.RECONCILES) == passes
        assert lines(world, "drift: ") == [
            "drift: another program wrote a cpuset: put back pod=ns/ls container=c containerID=s-ls-c-1 cpus=4-15 found=0-7"  # noqa: E501
        ]
        assert counted(world) == {"unknown": 1}

    run_scenario(scenario)


def test_our_own_writes_are_not_drift_and_cause_no_more(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        write = world.cgroups.write

        def writing(path: str, *args: Any, **more: Any) -> bool:
            changed: bool = write(path, *args, **more)
            writes.write(path)  # the kernel reports all writes, ours among them
            return changed

        world.cgroups.write = writing
        ls, lse = await two(world)
        await world.stop(lse)
        await asyncio.sleep(0.1)
        written = world.executor.telemetry.value(metrics.CPUSETS_WRITTEN)
        write_as_another_program(
            world, writes, ls, world.on(ls)
        )  # and another program writes the correct set
        await asyncio.sleep(0.1)
        assert world.executor.telemetry.value(metrics.CPUSETS_WRITTEN) == written
        assert world.executor.telemetry.value(metrics.CPUSETS_REPAIRED) == 0
        assert lines(world, "drift") == []

    run_scenario(scenario)


def test_the_set_of_a_call_in_flight_is_checked_after_its_answer(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls, _ = await two(world)
        call = world.executor.inflight_calls.track(ls, CpuSet.parse("4-15"))
        write_as_another_program(world, writes, ls)
        await asyncio.sleep(0.1)
        await world.quiet()
        assert world.on(ls) == "0-15"
        world.call_tracker.completed(call, call.carries)
        await world.until(lambda: world.on(ls) == "4-15")

    run_scenario(scenario)


def test_each_passed_update_is_checked_and_attributed_to_its_sender(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        ls, _ = await two(world)
        update = world.runtime.limit

        def otherwise(container: str, quota: int) -> None:
            update(container, quota)
            world.cgroups.sets[container] = ALL  # the runtime writes another set

        world.runtime.limit = otherwise
        forwarded = await world.update(ls, cpu_shares=5)
        assert forwarded.cpuset_cpus == "4-15"
        await done(world, 1)
        assert world.on(ls) == "4-15"
        assert counted(world) == {"kubelet": 1}

    run_scenario(scenario)


def test_a_suspected_container_is_compared_at_once(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls, lse = await two(world)
        for container in (ls, lse):
            write_as_another_program(world, None, container, "0-7")
        drift(world).compare_soon("systemd")
        await done(world, 2)
        assert (world.on(ls), world.on(lse)) == ("4-15", "0-3")
        assert counted(world) == {"systemd": 2}
        write_as_another_program(world, None, ls, "0-7")
        drift(world).compare_soon("runc", [ls, "absent"])
        await done(world, 3)
        world.now += 60
        write_as_another_program(world, None, ls, "0-7")
        drift(world).compare_soon("unknown")
        await done(world, 4)
        assert counted(world) == {"systemd": 2, "runc": 1, "unknown": 1}, (
            "an old update does not explain a write"
        )

    run_scenario(scenario)


def test_an_update_at_the_runtimes_socket_is_attributed_and_corrected(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        runtime_sync = world.make_runtime_sync()
        task = asyncio.create_task(runtime_sync.run())
        writes = with_reported_writes(world)
        ls, _ = await two(world)
        await world.until(lambda: world.executor.state.runtime.saved.get(ls) == CpuSet.parse("4-15"))
        world.runtime.specs[ls] = "0-7"
        world.runtime.details[ls] = RuntimeDetail(cpuset_cpus="0-7")
        write_as_another_program(world, writes, ls, "0-7")
        await done(world, 1)
        await world.until(lambda: world.runtime.specs[ls] == "4-15")
        assert counted(world) == {"runc": 1}
        assert lines(world, "probably=runc")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        runtime_sync.close()

    run_scenario(scenario, settle_per_second=1000)


def test_a_runtime_that_stores_an_update_after_the_write_is_queried_once_more(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribution, "STORED_S", 0.2)

    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls, _ = await two(world)
        queried: list[str] = []
        answers = iter(["4-15", "0-7"])  # the second update is stored by then

        def detail(container_id: str) -> RuntimeDetail:
            queried.append(container_id)
            return RuntimeDetail(cpuset_cpus=next(answers))

        monkeypatch.setattr(world.runtime, "detail", detail)
        write_as_another_program(world, writes, ls, "0-7")
        await done(world, 1)
        await world.until(lambda: counted(world))
        assert (counted(world), queried) == ({"runc": 1}, [ls, ls])
        assert world.executor.state.runtime.saved.get(ls) == CpuSet.parse("0-7")
        assert ls in world.executor.state.runtime.awaiting_sync

    run_scenario(scenario)


def test_a_container_that_was_just_checked_is_checked_again_later(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribution, "PAUSE_S", 0.01)

    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls, _ = await two(world)
        write_as_another_program(world, writes, ls, "0-14")
        await done(world, 1)
        world.runtime.details[ls] = RuntimeDetail(cpuset_cpus="0-7")
        write_as_another_program(world, writes, ls, "0-7")
        await done(world, 2)
        assert world.executor.state.runtime.saved.get(ls) != CpuSet.parse("0-7"), "it has just been queried"
        world.now += attribution.AGAIN_S
        await world.until(lambda: world.executor.state.runtime.saved.get(ls) == CpuSet.parse("0-7"))
        assert ls in world.executor.state.runtime.awaiting_sync

    run_scenario(scenario)


def test_a_container_that_is_gone_does_not_keep_others_from_being_queried(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ids = [await world.run(await world.pod(name, "LS")) for name in ("one", "two", "three")]
        await two(world)
        world.runtime.details[ids[1]] = RuntimeDetail(cpuset_cpus="of another kind")
        world.runtime.details[ids[2]] = RuntimeDetail(cpuset_cpus="0-7")
        del world.runtime.containers[ids[0]]  # the daemon does not know that yet
        for container_id in ids:
            write_as_another_program(world, writes, container_id, "0-7")
        await done(world, 3)
        assert world.executor.state.runtime.saved.get(ids[2]) == CpuSet.parse("0-7")
        assert counted(world) == {"runc": 1, "unknown": 2}

    run_scenario(scenario)


def test_containers_are_queried_later_if_the_runtime_does_not_answer(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribution, "PAUSE_S", 0.01)

    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls, _ = await two(world)
        world.runtime.down = True
        world.runtime.details[ls] = RuntimeDetail(cpuset_cpus="0-7")
        write_as_another_program(world, writes, ls, "0-7")
        await done(world, 1)
        world.runtime.down = False
        await world.until(lambda: world.executor.state.runtime.saved.get(ls) == CpuSet.parse("0-7"))
        assert ls in world.executor.state.runtime.awaiting_sync

    run_scenario(scenario)


def test_an_unavailable_runtime_does_not_delay_repairs(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls, _ = await two(world)
        world.runtime.down = True
        write_as_another_program(world, writes, ls, "0-7")
        await done(world, 1)
        assert counted(world) == {"unknown": 1}

    run_scenario(scenario)


def test_a_write_of_kubelets_default_set_is_attributed_to_kubelet(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls, _ = await two(world)
        world.executor.store.handle(KubeletCpusRead(CpuManager("static", default=CpuSet.parse("0-13")), {}))
        write_as_another_program(world, writes, ls, "0-13")
        await done(world, 1)
        world.executor.store.handle(KubeletCpusRead(CpuManager("none", default=CpuSet.parse("0-13")), {}))
        write_as_another_program(world, writes, ls, "0-13")
        await done(world, 2)
        assert counted(world) == {"kubelet": 1, "unknown": 1}

    run_scenario(scenario)


def test_an_overflow_of_kernel_events_compares_all_containers(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls, lse = await two(world)
        world.cgroups.sets[lse] = ALL
        writes.flooded = True
        writes.write(ls)
        await done(world, 1)
        assert world.on(lse) == "0-3"
        assert world.executor.telemetry.value(metrics.CPUSET_WATCH_OVERFLOWS) == 1

    run_scenario(scenario)


def test_unwatched_containers_are_compared_by_timer_and_reported_once(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        with_reported_writes(world, room=1)
        drift(world).start()
        ls, lse = await two(world)
        await world.sync.once()
        await world.sync.once()
        write_as_another_program(world, None, lse, "0-7")
        write_as_another_program(world, None, ls, "0-7")
        await done(world, 2)
        assert (world.on(ls), world.on(lse)) == ("4-15", "0-3")
        assert len(lines(world, "cannot watch cpusets")) == 1
        assert drift(world).page()["watched"] == 1
        assert "too many" in str(drift(world).page()["not_watched"])

    run_scenario(scenario, reconcile_period=0.4)


def test_a_removed_container_is_no_longer_watched(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls, lse = await two(world)
        await world.stop(lse)
        await world.sync.once()
        assert writes.watched() == {ls}
        assert drift(world).page()["watched"] == 1
        world.executor.store.handle(ModeChanged(NodeMode.RELEASED))  # released
        write_as_another_program(world, writes, ls)
        await asyncio.sleep(0.1)
        await world.quiet()
        assert world.on(ls) == "0-15"

    run_scenario(scenario)


def test_ancestors_are_watched_if_they_limit_the_effect(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        world.cgroups.version = 2
        world.cgroups.find = lambda parent, i: (
            f"kube/pod/{i}" if f"kube/pod/{i}" in world.cgroups.sets else None
        )
        pod = await world.pod("ls", "LS")
        container = await world.create(pod)
        path = f"kube/pod/{container}"
        world.cgroups.sets |= {path: ALL, "kube": ALL, "kube/pod": ALL}
        writes = with_reported_writes(world)
        await world.start(container)
        world.cgroups.sets.pop(container)
        await world.until(lambda: writes.watched() == {path, "kube", "kube/pod"})
        world.cgroups.sets[path] = CpuSet.parse("0-1")
        writes.write("kube")
        await done(world, 1)
        assert world.cgroups.sets[path] == ALL

    run_scenario(scenario)


# -- write conflicts --------------------------------------------------------------------------------------


def test_a_write_before_a_reconcile_begins_to_watch_is_repaired_in_it(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        ls, _ = await two(world)
        with_reported_writes(world)
        cpuset_writer = world.executor.cpuset_writer
        cpuset_writer._paths.clear()  # as after a start: the cgroups are found in the first reconcile
        write_all = cpuset_writer.write_all

        def interrupted(leave: Any = ()) -> Any:
            done = write_all(leave)
            write_as_another_program(world, None, ls)
            return done

        cpuset_writer.write_all = interrupted
        await world.sync.once()
        assert world.on(ls) == "4-15"

    run_scenario(scenario)


async def conflict(world: Any, writes: PlayedWrites, container: str, cpus: str = "0-15") -> None:
    """Write repeatedly until it counts as a conflict."""
    before = world.executor.telemetry.value(metrics.CPUSETS_REPAIRED)
    for times in range(1, 4):
        write_as_another_program(world, writes, container, cpus)
        await done(world, before + times)
    await world.until(lambda: drift(world).conflicting())


def test_a_write_conflict_is_reported_and_repaired_ever_more_rarely(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls = await world.run(await world.pod("ls", "LS"))
        await conflict(world, writes, ls, "0-3")
        assert lines(
            world,
            "another program keeps writing the cpuset of a container pod=ns/ls container=c"
            " containerID=s-ls-c-1 cpus=0-15 found=0-3 times=3 seconds=0.1",
        )
        assert len(lines(world, "drift: ")) == 2, "the third is reported as a conflict"
        assert [line for line in world.logged if 'putBack="less and less often" advice=' in line]
        assert world.executor.telemetry.value(metrics.WRITE_CONFLICTS) == 1
        repaired = 3
        for gap in (0.5, 1, 2, 4, 8, 16, 32, LONGEST_S, LONGEST_S):
            write_as_another_program(world, writes, ls, "0-3")
            world.now += gap - 0.25
            await world.executor.writes.write_now([ls])
            assert world.on(ls) == "0-3", "a repair is not due yet"
            world.now += 0.25
            await world.executor.writes.write_now([ls])
            repaired += 1
            await done(world, repaired)
            assert world.on(ls) == "0-15"
        assert writes.watched() == set(), "the writes of a busy program are not watched"
        page = drift(world).page()["writeConflicts"]
        assert isinstance(page, list)
        assert [(one["container"], one["times"], one["found"]) for one in page] == [("ns/ls/c", 12, "0-3")]
        world.now += QUIET_S
        await world.until(lambda: not drift(world).conflicting())
        await world.until(lambda: writes.watched() == {ls})
        assert lines(world, "drift: no other program writes the cpuset any more pod=ns/ls container=c")
        write_as_another_program(world, writes, ls, "0-3")
        await done(world, repaired + 1)
        assert world.on(ls) == "0-15"

    run_scenario(scenario)


def test_a_container_on_owned_cpus_is_repaired_each_second(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls, lse = await two(world)
        for container, cpus, right in ((ls, "0-15", "4-15"), (lse, "0-2", "0-3")):
            await conflict(world, writes, container, cpus)
            for _ in range(10):
                write_as_another_program(world, writes, container, cpus)
                world.now += 1
                await world.executor.writes.write_now([container])
                assert world.on(container) == right
            which, pace = (
                f"cpus={right} found={cpus} ",
                'putBack="each second, as exclusive CPUs are at stake"',
            )
            assert [line for line in world.logged if which in line and pace in line]
        write_as_another_program(world, writes, ls, "4-5")  # those have no owner
        world.now += 1
        await world.executor.writes.write_now([ls])
        assert world.on(ls) == "4-5"

    run_scenario(scenario)


def test_a_reconcile_respects_the_pace_of_a_conflict_and_a_barrier_does_not(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls = await world.run(await world.pod("ls", "LS"))
        other = await world.run(await world.pod("other", "LS"))
        await conflict(world, writes, ls, "4-7")
        world.cgroups.sets[ls] = world.cgroups.sets[other] = CpuSet.parse("4-7")
        await world.sync.once()
        assert (world.on(ls), world.on(other)) == ("4-7", "0-15")
        assert (await cleared(world, CpuSet.parse("0-1"))).is_committed
        assert world.on(ls) == "0-15"

    run_scenario(scenario)


def test_a_new_owner_gets_other_cpus_than_contested_ones(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls = await world.run(await world.pod("ls", "LS"))
        await world.run(await world.pod("lse", "LSE", "", "8-9"))
        await conflict(world, writes, ls, "0-3,10")
        sandbox = await world.pod("own", kube="guaranteed", total={"cpu_shares": 2048})
        own = await world.run(
            sandbox, cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000, memory_limit_in_bytes=1
        )
        owned = world.executor.state.containers[own].placement.exclusive
        assert owned
        assert not owned & CpuSet.parse("0-3,10")
        assert world.executor.telemetry.value(metrics.CREATES_ON_OTHER_CPUS) in (0, 1)

    run_scenario(scenario)


def test_a_pod_with_contested_named_cpus_is_refused(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        ls = await world.run(await world.pod("ls", "LS"))
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        await conflict(world, writes, ls, "0-15")
        call = await world.begin(await world.pod("next", "LSE", "", "4-5"))
        assert call.refused is not None
        assert "another program keeps writing the cpuset of ns/ls/c" in call.refused[1]
        world.wire.finished(call, None)
        world.now += QUIET_S
        await world.until(lambda: not drift(world).conflicting())
        await world.run(await world.pod("again", "LSE", "", "4-5"))
        assert world.on(ls) == "6-15"

    run_scenario(scenario)


def test_a_comparison_that_outlives_its_reconcile_is_recorded(run_scenario: Callable[..., None]) -> None:
    """At a stop, the reconcile under way is cancelled; what its kernel job writes is recorded."""

    async def scenario(world: Any) -> None:
        ls, _ = await two(world)
        write_as_another_program(world, None, ls)
        with world.cgroups.lock:
            reconcile = asyncio.create_task(world.sync.once())
            while not world.executor.kernel.running_s():
                await asyncio.sleep(0.001)
            reconcile.cancel()
            await asyncio.wait((reconcile,))
            assert reconcile.cancelled()
        while world.on(ls) != "4-15" or world.executor.kernel.running_s():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        assert world.executor.telemetry.value(metrics.CPUSETS_REPAIRED) == 1
        assert ls in world.executor.state.runtime.awaiting_sync, "the runtime is to be sent its CPUs"

    run_scenario(scenario)
