"""Owners of CPUs, tracked by events."""

from __future__ import annotations

from proxy.hooks import samples
from proxy.hooks.events import (
    MachineChanged,
    PoolsChanged,
    PostCreateContainer,
    PostRemoveContainer,
    PostStartContainer,
    PostStopContainer,
    Synchronize,
)
from proxy.hooks.facts import Decision, PodFacts, Pools, Running
from proxy.hooks.kit.owners import OwnerTracker
from proxy.model.idset import CpuSet
from tests.testkit.changed_copy import changed_copy


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def settings(pod: PodFacts) -> str | None:
    return pod.annotations.get("settings")


POD = PodFacts(annotations={"settings": "quiet"})
OWN = Decision(pool="own", cpus=cpus("2-3"), own=cpus("2-3"))
ONE = changed_copy(samples.existing(), id="one")


def owners() -> OwnerTracker[str]:
    tracker: OwnerTracker[str] = OwnerTracker(settings)
    tracker.handle(PostCreateContainer(POD, ONE, OWN))
    return tracker


def pools(**owned: str) -> PoolsChanged:
    sets = {name: cpus(text) for name, text in owned.items()}
    total = CpuSet(cpu for one in sets.values() for cpu in one)
    return PoolsChanged(Pools(), Pools(owned=total, owners={k: v for k, v in sets.items() if k != "other"}))


def test_an_owner_is_tracked_until_its_end() -> None:
    for end in (PostStopContainer(POD, ONE, OWN), PostRemoveContainer(POD, ONE)):
        tracked = owners()
        assert tracked.all() == ((cpus("2-3"), "quiet"),)
        tracked.handle(end)
        assert tracked.all() == ()


def test_a_container_without_cpus_or_settings_is_not_tracked() -> None:
    tracked = owners()
    tracked.handle(PostCreateContainer(PodFacts(), changed_copy(ONE, id="two"), OWN))
    tracked.handle(PostStartContainer(POD, ONE, samples.SHARED))
    assert tracked.all() == ()


def test_cpus_follow_the_pools() -> None:
    tracked = owners()
    tracked.handle(pools(one="2-5"))
    assert tracked.cpus() == cpus("2-5")
    tracked.handle(pools(other="5-6"))
    assert tracked.cpus() == cpus("5"), "an owner that is not named keeps only CPUs that are still owned"
    tracked.handle(pools(one="2-3"))
    assert tracked.cpus() == cpus("2-3")
    assert tracked.cpus(lambda settings, own: own - cpus("2") if settings == "quiet" else own) == cpus("3")


def test_synchronize_replaces_all_tracked_owners() -> None:
    tracked = owners()
    two = changed_copy(ONE, id="two")
    ended = changed_copy(ONE, id="three", phase="exited")
    tracked.handle(
        Synchronize(samples.machine(), Pools(), (), tuple(Running(POD, one, OWN) for one in (two, ended)))
    )
    assert tracked.online == CpuSet(range(16))
    assert tracked.all() == ((cpus("2-3"), "quiet"),)
    tracked.handle(PostRemoveContainer(POD, two))
    assert tracked.all() == ()
    tracked.handle(MachineChanged(samples.machine("before"), samples.machine("after")))
    assert tracked.online == CpuSet(range(12))
