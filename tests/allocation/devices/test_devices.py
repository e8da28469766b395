"""The device manager: hints against the plainly written rules, choices under a hint, and the holders."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.devices.allocate import DeviceRejectedError, allocate
from proxy.allocation.devices.hints import container_device_hints, pod_device_hints
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.allocation.hint_family import Family
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from tests.oracles.device_manager import unregistered, without_container, without_pod

OPEN = TopologyHint(None, preferred=False)
NODES = Mask([0, 1, 3])
R = "vendor/dev"

PLACES = st.none() | st.sets(st.sampled_from([0, 1, 3, 6]), max_size=2).map(Mask)
DEVICES = st.lists(st.tuples(PLACES, st.booleans()), max_size=6).map(
    lambda all_: [RegisteredDevice(f"d{i}", nodes, healthy) for i, (nodes, healthy) in enumerate(all_)]
)


def resources(count: int, name: str = "c", kind: ContainerKind = ContainerKind.APP) -> ContainerResources:
    return ContainerResources(name, kind, limits={R: count, "cpu": 1000})


def pod(*containers: ContainerResources, uid: str = "p") -> PodRequests:
    return PodRequests(uid, containers)


def plain(
    devices: Sequence[RegisteredDevice], count: int, available: frozenset[str], reusable: frozenset[str]
) -> list[TopologyHint]:
    """kubernetes v1.36 pkg/kubelet/cm/devicemanager/topology_hints.go, step by step."""
    named = sorted({n for d in devices for n in d.nodes or ()} & set(NODES)) or sorted(NODES)
    least, found = len(named), []
    for size in range(1, len(named) + 1):
        for taken in itertools.combinations(named, size):
            near = {d.id for d in devices if set(d.nodes or ()) & set(taken)}
            if len(near) >= count:
                least = min(least, size)
            reported = {d.id for d in devices if d.id in reusable and d.nodes is not None}
            if reported <= near and len(reported) + len(near & available) >= count:
                found.append(Mask(taken))
    return [TopologyHint(mask, len(mask) == least) for mask in found]


@given(DEVICES, st.integers(0, 4), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_hints_match_the_plain_rules(
    devices: list[RegisteredDevice], count: int, others: set[int], init: set[int]
) -> None:
    ids = [d.id for d in devices]
    reusable = frozenset(ids[i] for i in init if i < len(ids))
    taken = frozenset(ids[i] for i in others if i < len(ids)) - reusable
    state = DeviceState().register(R, devices).give("other", "c", R, taken).give("p", "i", R, reusable)
    both = pod(resources(0, "i", ContainerKind.INIT), resources(count))
    hints = container_device_hints(state, both, "c", NODES)
    assert set(hints) == {R}, "only registered resources have hints"
    available = frozenset(d.id for d in devices if d.healthy) - taken - reusable
    if not any(d.nodes for d in devices):
        assert hints[R] is None
    elif len(available | reusable) < count:
        assert hints[R] == ()
    else:
        assert list(hints[R] or ()) == plain(devices, count, available, reusable)


def test_hints_cover_held_resources() -> None:
    state = DeviceState().register(
        R, [RegisteredDevice("a", Mask([0])), RegisteredDevice("b", Mask([1]), healthy=False)]
    )
    state = state.give("p", "c", R, frozenset("b"))
    expected = (TopologyHint(Mask([1]), True), TopologyHint(Mask([0, 1]), False))
    assert container_device_hints(state, pod(resources(1)), "c", NODES) == {R: expected}
    assert pod_device_hints(state, pod(resources(1)), NODES) == {R: expected}
    assert container_device_hints(state, pod(resources(2)), "c", NODES) == {R: ()}
    assert pod_device_hints(state, pod(resources(1), resources(1, "x")), NODES) == {R: ()}


def test_a_pods_devices_are_not_reused_in_pod_scope() -> None:
    state = DeviceState().register(R, [RegisteredDevice("a", Mask([0]))])
    both = pod(resources(1, "i", ContainerKind.INIT), resources(1))
    assert pod_device_hints(state, both, NODES) == {R: (TopologyHint(Mask([0]), True),)}, (
        "the containers run one after the other"
    )
    state = state.give("q", "c", R, frozenset("a"))
    assert pod_device_hints(state, both, NODES) == {R: ()}


def test_a_node_near_all_devices_is_the_first_hint_among_64_nodes() -> None:
    devices = [RegisteredDevice(f"d{i:02}", Mask([i // 2, 63])) for i in range(80)]
    hints = container_device_hints(
        DeviceState().register(R, devices), pod(resources(3)), "c", Mask(range(64))
    )[R]
    assert isinstance(hints, Family)
    assert hints[0] == TopologyHint(Mask([63]), True)


@given(DEVICES, st.integers(1, 4), st.none() | st.sets(st.sampled_from([0, 1, 3]), min_size=1).map(Mask))
def test_aligned_devices_come_first(devices: list[RegisteredDevice], count: int, mask: Mask | None) -> None:
    state = DeviceState().register(R, devices)
    healthy = [d for d in devices if d.healthy]
    if len(healthy) < count:
        with pytest.raises(DeviceRejectedError):
            allocate(state, pod(resources(count)), "c", TopologyHint(mask, False))
        return
    granted = allocate(state, pod(resources(count)), "c", TopologyHint(mask, False))
    ids = granted.devices[R]
    assert len(set(ids)) == count

    def rank(device: RegisteredDevice) -> int:
        if mask is None or not device.nodes:
            return 2 if mask is not None else 0
        return 1 if device.nodes.isdisjoint(mask) else 0

    chosen = [d for d in healthy if d.id in ids]
    assert sorted(map(rank, chosen)) == sorted(map(rank, healthy))[:count]
    assert granted.state.available(R) == {d.id for d in healthy} - set(ids)
    assert without_pod(granted.state, "p") == state


def test_devices_of_init_containers_pass_to_later_containers() -> None:
    state = DeviceState().register(
        R, [RegisteredDevice(i, Mask([n])) for i, n in zip("abcd", (0, 0, 1, 1), strict=True)]
    )
    containers = (
        resources(2, "i", ContainerKind.INIT),
        resources(1, "s", ContainerKind.SIDECAR),
        resources(2, "j", ContainerKind.INIT),
        resources(2),
    )
    whole, held = pod(*containers), []
    for each, node in zip(containers, (0, 1, 0, 1), strict=True):
        done = allocate(state, whole, each.name, TopologyHint(Mask([node]), preferred=True))
        state = done.state
        held.append("".join(done.devices[R]))
    assert held == ["ab", "a", "bc", "bc"], "devices of the sidecar are not reused"
    assert state.in_use(R) == set("abc")
    assert without_container(without_container(state, "p", "i"), "p", "j").in_use(R) == set("abc"), (
        "other containers still hold them"
    )
    assert "taken over from init containers" in done.reasons[0]


def test_a_plugin_may_prefer_devices() -> None:
    queries: list[tuple[Sequence[str], Sequence[str], int]] = []

    def prefer(ids: Sequence[str], must: Sequence[str], count: int) -> list[str]:
        queries.append((ids, must, count))
        return ["d", "z", "a"]

    places = zip("abcd", ([0], [0], [0], [1]), strict=True)
    state = DeviceState().register(R, [RegisteredDevice(i, Mask(n)) for i, n in places])
    near = TopologyHint(Mask([0]), preferred=True)
    one = allocate(state, pod(resources(1)), "c", near, {R: prefer})
    assert (one.devices[R], queries.pop()) == (("a",), (("a", "b", "c"), (), 1)), (
        "only among the aligned devices"
    )
    three = allocate(state, pod(resources(3)), "c", near, {R: prefer})
    assert (three.devices[R], queries) == (("a", "b", "c"), []), "there is no choice"
    state = state.register(
        R, [RegisteredDevice(i, Mask(n)) for i, n in zip("abcd", ([0], [1], [1], [1]), strict=True)]
    )
    two = allocate(state, pod(resources(2)), "c", near, {R: prefer})
    assert (two.devices[R], queries.pop()) == (("a", "d"), (("a", "b", "c", "d"), ("a",), 2))
    blind = allocate(state, pod(resources(1)), "c", OPEN, {R: lambda *_: []})
    assert blind.devices[R] == ("a",)


def test_held_devices_stay_with_the_container() -> None:
    state = DeviceState().register(R, [RegisteredDevice("a"), RegisteredDevice("b")])
    first = allocate(state, pod(resources(1)), "c", OPEN)
    again = allocate(first.state, pod(resources(1)), "c", OPEN)
    assert (again.state, again.devices) == (first.state, first.devices)
    assert allocate(state, pod(resources(0)), "c", OPEN) == allocate(
        state, pod(resources(0), resources(1, "x")), "c", OPEN
    )
    assert allocate(state, pod(ContainerResources("c", limits={"other/dev": 1})), "c", OPEN).devices == {}


@pytest.mark.parametrize(
    ("devices", "count", "message"),
    [
        (
            [RegisteredDevice("a")],
            2,
            "requested number of devices unavailable for vendor/dev. Requested: 2, Available: 1",
        ),
        ([], 1, "no healthy devices present; cannot allocate unhealthy devices vendor/dev"),
        ([RegisteredDevice("a", healthy=False)], 1, "no healthy devices present"),
    ],
)
def test_allocations_without_enough_devices_are_refused(
    devices: list[RegisteredDevice], count: int, message: str
) -> None:
    with pytest.raises(DeviceRejectedError) as refused:
        allocate(DeviceState().register(R, devices), pod(resources(count)), "c", OPEN)
    assert str(refused.value).startswith(message)


def test_allocations_that_contradict_held_devices_are_refused() -> None:
    state = (
        DeviceState()
        .register(R, [RegisteredDevice("a"), RegisteredDevice("b")])
        .give("p", "c", R, frozenset("a"))
    )
    with pytest.raises(
        DeviceRejectedError, match=r'pod "p" container "c" changed request for .* from 1 to 2'
    ):
        allocate(state, pod(resources(2)), "c", OPEN)
    sick = state.register(R, [RegisteredDevice("a", healthy=False), RegisteredDevice("b")])
    with pytest.raises(
        DeviceRejectedError, match="previously allocated devices are no longer healthy; cannot"
    ):
        allocate(sick, pod(resources(1)), "c", OPEN)
    with pytest.raises(DeviceRejectedError, match="no healthy devices present"):
        allocate(unregistered(state, R), pod(resources(1)), "c", OPEN)
    with pytest.raises(DeviceRejectedError, match="cannot allocate unregistered device vendor/dev"):
        allocate(DeviceState({}, state.held), pod(resources(1)), "c", OPEN)


def test_only_the_unanswered_devices_of_one_container_are_released() -> None:
    state = (
        DeviceState()
        .register(R, [RegisteredDevice(name) for name in "abcd"])
        .give("p", "c", R, frozenset("a"))
        .give("p", "d", R, frozenset("b"))
        .give("other", "c", R, frozenset("c"))
    )
    after = state.release_unanswered("p", "c", {R})
    assert after.held == {"p": {"d": {R: frozenset("b")}}, "other": {"c": {R: frozenset("c")}}}
    assert after.release_unanswered("p", "d", {R}).held == {"other": {"c": {R: frozenset("c")}}}
    assert state.release_unanswered("p", "c", ()) is state
