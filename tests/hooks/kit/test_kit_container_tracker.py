"""The CPUs of containers, followed from event to event."""

from __future__ import annotations

import pytest

from proxy.hooks import samples, testing
from proxy.hooks.events import PoolsChanged
from proxy.hooks.facts import Decision, Pools
from proxy.hooks.kit.container_tracker import ContainerTracker
from proxy.model.idset import CpuSet

POD = testing.pod(uid="u")
POOLS = Pools(shared=CpuSet(range(8)), be=CpuSet(range(4, 8)))


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def synchronized_tracker(**pools: Pools) -> ContainerTracker:
    tracker = ContainerTracker()
    tracker.handle(testing.event("synchronize", containers=(), pods=(), pools=pools.get("pools", POOLS)))
    return tracker


def enter(
    there: ContainerTracker, decision: Decision, one: str = "c1", point: str = "post_create_container"
) -> int:
    container = samples.existing(testing.container(name=one), one)
    return len(there.handle(testing.event(point, pod=POD, container=container, decision=decision)))


def after(there: ContainerTracker, **pools: object) -> dict[str, tuple[str, str]]:
    before = {one.name: one for one in there.of_pod("u")}
    changed = there.handle(PoolsChanged(POOLS, Pools(**pools)))  # type: ignore[arg-type]
    assert changed == [one for one in there.of_pod("u") if before[one.name] != one]
    return {one.name: (str(one.cpus), str(one.own)) for one in there.of_pod("u")}


def test_facts_about_a_container_itself_take_precedence() -> None:
    there = synchronized_tracker()
    assert enter(there, testing.decision("shared", "0-7")) == 1
    assert enter(there, testing.decision("shared", "0-7"), point="post_start_container") == 0
    assert enter(there, testing.decision("own", "2-3"), point="post_update_container_resources") == 1
    (one,) = there.of_pod("u")
    assert (one.cpus, one.own, one.pool, one.uid, one.name) == (cpus("2-3"), cpus("2-3"), "own", "u", "c1")


def test_a_container_with_a_whole_pool_keeps_the_whole_pool() -> None:
    there = synchronized_tracker()
    enter(there, testing.decision("shared", "0-7"))
    enter(there, testing.decision("be", "4-7"), "c2")
    assert after(there, shared=cpus("0-5,9"), be=cpus("5")) == {"c1": ("0-5,9", ""), "c2": ("5", "")}


def test_a_container_with_a_part_of_its_pool_keeps_the_remaining_part_or_gets_all() -> None:
    there = synchronized_tracker()
    enter(there, testing.decision("shared", "0-3"))
    assert after(there, shared=cpus("2-7"))["c1"] == ("2-3", "")
    assert after(there, shared=cpus("4-7"))["c1"] == ("4-7", "")
    assert after(there, shared=cpus("0-7"))["c1"] == ("0-3", "")


def test_owners_are_identified_by_their_id() -> None:
    there = synchronized_tracker()
    own = testing.decision("own", "0-3", own=cpus("0-1"))
    enter(there, own)
    assert after(there, owners={"c1": cpus("5")}, owned=cpus("5"))["c1"] == ("2-3,5", "5")
    assert after(there, owned=cpus("5"))["c1"] == ("2-3,5", "5"), "not named: older than its create"


def test_an_owner_whose_cpus_are_offline_shares_until_they_return() -> None:
    there = synchronized_tracker()
    enter(there, testing.decision("own", "0-1"))
    pools = {"shared": cpus("4-7"), "owned": cpus("0-1")}
    assert after(there, owners={"c1": CpuSet()}, **pools)["c1"] == ("4-7", "")
    assert after(there, owners={"c1": cpus("0-1")}, **pools)["c1"] == ("0-1", "0-1")


def test_before_the_pools_are_known_every_container_has_all() -> None:
    there = ContainerTracker()
    enter(there, testing.decision("shared", "0-3"))
    assert after(there, shared=cpus("0-1,6-7"))["c1"] == ("0-1,6-7", "")


@pytest.mark.parametrize("end", ["post_stop_container", "post_remove_container"])
def test_each_end_is_reported_once(end: str) -> None:
    there = synchronized_tracker()
    enter(there, testing.decision())
    gone = testing.event(end, pod=POD, container=samples.existing(container_id="c1"))
    assert [one.name for one in there.handle(gone)] == ["c1"]
    assert there.handle(gone) == []
    assert there.of_pod("u") == []


def test_synchronize_replaces_all_tracked_containers() -> None:
    there = synchronized_tracker()
    enter(there, testing.decision())
    ended = testing.running("c3", container=testing.container(id="c3", phase="exited"))
    two = testing.running("c2", pod=testing.pod(uid=""))
    assert len(there.handle(testing.event("synchronize", containers=(ended, two)))) == 1
    assert there.of_pod("u") == []
    assert there.of_pod("") == [], "no uid is no pod"
