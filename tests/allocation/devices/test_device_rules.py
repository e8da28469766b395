"""The device manager rule by rule: devices that count, the order of choice, and the release of devices."""

from __future__ import annotations

import pytest

from proxy.allocation.devices.allocate import (
    DeviceRejectedError,
    PreferenceMissing,
    QueryPreference,
    _Taking,
    allocate,
    answered_preference,
)
from proxy.allocation.devices.hints import container_device_hints, family, pod_device_hints
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.allocation.hint_family import Family
from proxy.model.devices import AllocateAnswer
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from tests.oracles.device_manager import unregistered, without_container, without_pod

NODES = Mask([0, 1, 2])
R, S = "vendor/dev", "vendor/other"
OPEN = TopologyHint(None, preferred=False)


def devices(**places: int) -> list[RegisteredDevice]:
    """Devices by name and node; a node below 0: none known."""
    return [RegisteredDevice(name, None if node < 0 else Mask([node])) for name, node in places.items()]


def pod(*counts: int, init: int = 0) -> PodRequests:
    """A pod of containers c0, c1 and so on, the first ``init`` of them init containers."""
    kinds = [ContainerKind.INIT if i < init else ContainerKind.APP for i in range(len(counts))]
    return PodRequests(
        "p", tuple(ContainerResources(f"c{i}", kinds[i], limits={R: n}) for i, n in enumerate(counts))
    )


def near(*ids: int) -> TopologyHint:
    return TopologyHint(Mask(ids), preferred=True)


def reported(hints: object) -> list[tuple[str, bool]]:
    assert isinstance(hints, tuple)
    return [(str(h.affinity), h.preferred) for h in hints]


def test_hints_depend_only_on_devices_that_the_container_holds() -> None:
    state = DeviceState().register(R, devices(a=0, b=1, c=2))
    state = state.give("p", "c0", R, frozenset("a")).give("p", "c1", R, frozenset("b"))
    both = pod(1, 1, init=1)
    expected = [("1", True), ("0-1", False), ("1-2", False), ("0-2", False)]
    assert reported(container_device_hints(state, both, "c1", NODES)[R]) == expected, (
        "devices of c0 do not matter"
    )
    fewer = PodRequests("p", (both.containers[0], ContainerResources("c1", limits={R: 0})))
    assert container_device_hints(state, fewer, "c1", NODES)[R] == (), (
        "it holds more devices than it requests"
    )
    new = container_device_hints(state, both, "c0", NODES)[R]
    assert reported(new)[0] == ("0", True)


def test_an_allocation_without_a_known_preference_raises_the_query_for_it() -> None:
    with pytest.raises(PreferenceMissing, match=r"^which 2 of vendor/gpu are preferred\?$") as missing:
        answered_preference("c", "vendor/gpu", None, ["a", "b", "z"], ["a"], 2)
    assert missing.value.query == QueryPreference(
        "c", "vendor/gpu", frozenset({"a", "b", "z"}), frozenset({"a"}), 2
    )
    assert answered_preference("c", "vendor/gpu", ("z", "a"), ["a", "z"], [], 1) == ("z", "a")


def test_reusable_devices_must_be_near_to_the_hinted_nodes() -> None:
    state = DeviceState().register(R, [*devices(a=0, b=1, c=1, z=-1), RegisteredDevice("n", Mask())])
    held = state.give("p", "c0", R, frozenset("a"))
    assert reported(container_device_hints(held, pod(1, 1, init=1), "c1", NODES)[R]) == [
        ("0", True),
        ("0-1", False),
    ]
    assert reported(container_device_hints(held, pod(1, 2, init=1), "c1", NODES)[R]) == [("0-1", False)], (
        "node 1 alone would be enough, but a is to be reused"
    )
    untold = state.give("p", "c0", R, frozenset("z"))
    assert reported(container_device_hints(untold, pod(1, 2, init=1), "c1", NODES)[R])[0] == ("1", True)
    nowhere = state.give("p", "c0", R, frozenset("n"))
    assert container_device_hints(nowhere, pod(1, 2, init=1), "c1", NODES)[R] == (), (
        "no reported node is near"
    )
    gone = held.register(R, devices(b=1, c=1))
    assert reported(container_device_hints(gone, pod(1, 2, init=1), "c1", NODES)[R]) == [("1", True)]


def test_only_nodes_with_devices_count() -> None:
    far = {d.id: d for d in devices(a=7)}
    assert family(far, 1, NODES, frozenset("a")).nodes == (0, 1, 2), "none of them is on the machine"
    mixed = {d.id: d for d in devices(a=7, b=2)}
    found = family(mixed, 1, NODES, frozenset("ab"))
    assert (found.nodes, found.size) == ((2,), 1)
    assert family(mixed, 3, NODES, frozenset("ab")).size == 1, "no number of nodes would be enough"
    untold = {d.id: d for d in devices(a=2, b=-1)}
    assert family(untold, 1, NODES, frozenset("ab")).nodes == (2,)
    wide = {d.id: d for d in devices(a=0, b=1, c=2)}
    assert family(wide, 9, NODES, frozenset("abc")).size == 3
    assert family(wide, 2, NODES, frozenset("abx")).size == 2
    assert isinstance(family(wide, 0, NODES, frozenset()), Family)
    assert family(wide, 0, NODES, frozenset()).size == 1


def test_hints_of_a_pod_with_two_containers_that_share_no_device() -> None:
    state = DeviceState().register(R, devices(a=0, b=1)).register(S, devices(x=-1))
    requests = PodRequests(
        "p",
        (ContainerResources("c0", limits={R: 1, S: 1}), ContainerResources("c1", limits={R: 1, "cpu": 9})),
    )
    hints = pod_device_hints(state, requests, NODES)
    assert hints == {R: (TopologyHint(Mask([0, 1]), True),), S: None}
    assert pod_device_hints(state.give("q", "c", S, frozenset("x")), requests, NODES)[S] is None
    assert state.has_topology(R)
    assert not state.has_topology(S)
    assert not state.has_topology("vendor/unknown")


def test_released_devices_are_free_and_leave_no_empty_entry() -> None:
    state = DeviceState().register(R, devices(a=0, b=0)).register(S, devices(x=0))
    full = state.give("p", "c", R, frozenset("a")).give("p", "c", S, frozenset("x"))
    full = full.give("p", "d", R, frozenset("b")).give("q", "c", R, frozenset())
    assert full.of_container("p", "c", R) == {"a"}
    assert full.of_container("p", "c", S) == {"x"}
    assert [full.of_pod(*each) for each in (("p", R), ("p", S), ("z", R))] == [set("ab"), {"x"}, set()]
    assert [full.in_use(R), full.in_use(S), full.available(R)] == [set("ab"), {"x"}, set()]
    one = without_container(full, "p", "c")
    assert [one.in_use(R), one.in_use(S)] == [{"b"}, set()]
    assert set(one.held) == {"p", "q"}
    assert set(without_container(one, "p", "d").held) == {"q"}, "no empty entry stays"
    assert set(without_pod(full, "p").held) == {"q"}
    assert full.release_pod("p") == without_pod(full, "p")
    assert unregistered(full, S).healthy(S) == set()
    assert S in unregistered(full, S).registered


def test_devices_of_init_containers_are_reusable_unless_kept() -> None:
    state = DeviceState().register(R, devices(a=0, b=0, c=0, d=1))
    state = state.give("p", "c0", R, frozenset("ab")).give("p", "c1", R, frozenset("bd"))
    state = state.give("p", "c2", R, frozenset("d"))
    assert state.reusable(pod(2, 2, 1, init=2), R) == set("ab")
    assert state.reusable(pod(2, 2, 1, init=1), R) == {"a"}


def test_reusable_devices_near_to_the_nodes_come_first() -> None:
    state = DeviceState().register(R, devices(a=0, b=1, c=1, d=1)).give("p", "c0", R, frozenset("ab"))
    requests = pod(2, 1, init=1)
    one = allocate(state, requests, "c1", near(1))
    assert (one.devices[R], one.reasons) == (("b",), ("vendor/dev: b: taken over from init containers",))
    two = allocate(state, pod(2, 2, init=1), "c1", near(1))
    assert two.devices[R] == ("a", "b"), "then other reusable devices, before new ones"
    three = allocate(state, pod(2, 3, init=1), "c1", near(1))
    assert three.reasons == (
        "vendor/dev: b, a: taken over from init containers",
        "vendor/dev: c: near NUMA node 1",
    )
    gone = state.register(R, devices(b=1, c=1))
    assert allocate(gone, pod(2, 2, init=1), "c1", near(1)).devices[R] == ("a", "b")


def test_reasons_of_each_step() -> None:
    state = DeviceState().register(R, devices(a=0, b=1, c=2, d=-1))
    assert allocate(state, pod(4), "c0", near(1)).reasons == (
        "vendor/dev: b: near NUMA node 1",
        "vendor/dev: a, c: near others than NUMA node 1",
        "vendor/dev: d: any will do",
    )
    assert allocate(state, pod(1), "c0", near(0, 1)).reasons == ("vendor/dev: a: near NUMA nodes 0-1",)
    assert allocate(state, pod(2), "c0", OPEN).reasons == ("vendor/dev: a, b: any will do",)
    held = allocate(state, pod(2), "c0", OPEN).state
    assert allocate(held, pod(2), "c0", OPEN).reasons == ("vendor/dev: it holds its devices already",)
    none = allocate(state, pod(0), "c0", OPEN)
    assert (none.reasons, none.devices, none.state) == ((), {R: ()}, state)


def test_a_preference_counts_in_its_place() -> None:
    state = DeviceState().register(R, devices(a=0, b=0, c=0, d=1, e=1))

    def take(count: int, *preference: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        result = allocate(state, pod(count), "c0", near(0), {R: lambda *_: preference, S: lambda *_: "bc"})
        return result.devices[R], tuple(reason.partition(": ")[2] for reason in result.reasons)

    reason = "the plugin prefers them among those near the nodes decided on"
    assert take(2, "c", "d") == (("a", "c"), (f"c: {reason}", "a: near NUMA node 0"))
    assert take(2, "c", "b", "a") == (("a", "b"), (f"a, b: {reason}",)), "by id"
    assert take(4, "e") == (
        ("a", "b", "c", "e"),
        ("a, b, c: near NUMA node 0", "e: the plugin prefers them"),
    )
    assert take(5, "e")[1][1:] == ("e: the plugin prefers them", "d: near others than NUMA node 0")
    assert take(3, "e") == (("a", "b", "c"), ("a, b, c: near NUMA node 0",))


def test_two_resources_of_one_container() -> None:
    state = DeviceState().register(R, devices(a=0)).register(S, devices(x=0, y=1))
    requests = PodRequests("p", (ContainerResources("c", limits={"cpu": 1, R: 1, S: 1}),))
    result = allocate(state, requests, "c", near(1))
    assert result.devices == {R: ("a",), S: ("y",)}
    assert result.state.held == {"p": {"c": {R: {"a"}, S: {"y"}}}}
    with pytest.raises(DeviceRejectedError, match=r"unavailable for vendor/dev. Requested: 1, Available: 0"):
        allocate(result.state, PodRequests("q", requests.containers), "c", near(1))
    with pytest.raises(KeyError):
        allocate(state, requests, "d", OPEN)


def test_taking_many_devices_compares_each_of_them_once() -> None:
    compared = 0

    class Id(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    taking = _Taking(1000)
    assert not taking.take([Id(number) for number in range(500)], "first")
    assert taking.take([Id(number) for number in range(1000)], "then")
    assert sorted(map(int, taking.taken)) == list(range(1000))
    assert compared < 5000


def test_a_withdrawn_resource_stays_with_its_holders() -> None:
    state = (
        DeviceState().register(R, devices(a=0)).register(S, devices(x=0)).give("p", "c", R, frozenset("a"))
    )
    without = state.withdraw(R)
    assert (without.healthy(R), without.healthy(S), without.held) == (set(), {"x"}, state.held)
    assert without.withdraw(R) is without
    assert set(without.registered) == {S}


def test_devices_are_reserved_until_the_plugin_has_answered() -> None:
    state = DeviceState().give("p", "c", R, frozenset("ba")).give("p", "c", S, frozenset("x"))
    state = state.give("p", "d", S, frozenset("y")).give("p", "c", "vendor/none", frozenset())
    assert state.unanswered("p", "c") == {R: ("a", "b"), S: ("x",)}
    assert state.unanswered("p", "d") == {S: ("y",)}
    assert state.unanswered("p", "z") == state.unanswered("z", "c") == {}
    first, second = AllocateAnswer(envs={"N": "1"}), AllocateAnswer(envs={"N": "2"})
    state = state.answered("p", "c", {R: first, "vendor/unheld": second})
    assert state.answers_of("p", "c") == {R: first}, "only answers for what it holds"
    assert state.unanswered("p", "c") == {S: ("x",)}
    state = state.answered("p", "d", {S: second}).answered("p", "c", {S: second})
    assert (state.answers_of("p", "c"), state.answers_of("p", "d")) == ({R: first, S: second}, {S: second})
    assert state.unanswered("p", "c") == {}
    assert state.answered("z", "c", {R: first}).answers_of("z", "c") == {}
    assert state.release_pod("p").answers_of("p", "c") == {}
    other = state.give("q", "c", R, frozenset("a")).answered("q", "c", {R: second}).release_pod("p")
    assert other.answers_of("q", "c") == {R: second}
    assert other.release_pod("p") is other


def test_devices_without_an_answer_are_released_alone() -> None:
    state = DeviceState().give("p", "c", R, frozenset("a")).give("p", "c", S, frozenset("x"))
    state = state.give("p", "d", S, frozenset("y"))
    assert state.release_unanswered("p", "c", ()) is state
    assert state.release_unanswered("p", "c", [R]).held == {"p": {"c": {S: {"x"}}, "d": {S: {"y"}}}}
    alone = state.release_unanswered("p", "c", [R, S])
    assert alone.held == {"p": {"d": {S: {"y"}}}}, "no empty entry stays"
    two = alone.give("q", "c", R, frozenset("a"))
    assert two.release_unanswered("p", "d", [S]).held == {"q": {"c": {R: {"a"}}}}
