"""OwnerTracker of CPUs, as events describe them."""

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
    made: OwnerTracker[str] = OwnerTracker(settings)
    made.handle(PostCreateContainer(POD, ONE, OWN))
    return made


def pools(**owned: str) -> PoolsChanged:
    sets = {name: cpus(text) for name, text in owned.items()}
    total = CpuSet(cpu for one in sets.values() for cpu in one)
    return PoolsChanged(Pools(), Pools(owned=total, owners={k: v for k, v in sets.items() if k != "other"}))


def test_an_owner_comes_and_goes() -> None:
    for end in (PostStopContainer(POD, ONE, OWN), PostRemoveContainer(POD, ONE)):
        known = owners()
        assert known.all() == ((cpus("2-3"), "quiet"),)
        known.handle(end)
        assert known.all() == ()


def test_a_container_without_cpus_or_wishes_is_not_kept() -> None:
    known = owners()
    known.handle(PostCreateContainer(PodFacts(), changed_copy(ONE, id="two"), OWN))
    known.handle(PostStartContainer(POD, ONE, samples.SHARED))
    assert known.all() == ()


def test_cpus_follow_the_pools() -> None:
    known = owners()
    known.handle(pools(one="2-5"))
    assert known.cpus() == cpus("2-5")
    known.handle(pools(other="5-6"))
    assert known.cpus() == cpus("5"), "not named: no more than what is owned at all"
    known.handle(pools(one="2-3"))
    assert known.cpus() == cpus("2-3")
    assert known.cpus(lambda settings, own: own - cpus("2") if settings == "quiet" else own) == cpus("3")


def test_all_that_exists_takes_the_place_of_all_before() -> None:
    known = owners()
    two = changed_copy(ONE, id="two")
    ended = changed_copy(ONE, id="three", phase="exited")
    known.handle(
        Synchronize(samples.machine(), Pools(), (), tuple(Running(POD, one, OWN) for one in (two, ended)))
    )
    assert known.online == CpuSet(range(16))
    assert known.all() == ((cpus("2-3"), "quiet"),)
    known.handle(PostRemoveContainer(POD, two))
    assert known.all() == ()
    known.handle(MachineChanged(samples.machine("before"), samples.machine("after")))
    assert known.online == CpuSet(range(12))
