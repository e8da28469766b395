"""The provider of memory: bound memory, charges and releases, and shortfalls."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.memory.state import MemoryRejectedError, initial, node_memory
from proxy.allocation.providers.memory import MemoryProvider
from proxy.allocation.providers.provider import ProviderRequest, Serves
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.explanation import Shortfall
from proxy.model.grants import Block, Grants, Share
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import Scope
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, Request, SetAside
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MIB = 1 << 20
MACHINE = regular_machine(2, 1, 4, 2, mem_bytes_per_node=100 * MIB)  # node 0: 0-3,8-11; node 1: 4-7,12-15
PROVIDER = MemoryProvider(MACHINE, initial(node_memory(MACHINE), {0: {"memory": 10 * MIB}}))
VIEW = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE)))
ANY = TopologyHint(None, preferred=False)


def request(mib: int, *, guaranteed: bool = True, scope: Scope = Scope.CONTAINER) -> ProviderRequest:
    amounts = {"memory": mib * MIB} if mib else {}
    pod_requests = PodRequests(
        "u",
        (
            ContainerResources("i", ContainerKind.INIT, amounts, amounts),
            ContainerResources("c", ContainerKind.APP, amounts, amounts),
        ),
        guaranteed,
    )
    return ProviderRequest(
        Pod("s", "u", "ns", "p", requests=pod_requests), pod_requests, "c", Request(), scope
    )


def test_the_memory_provider_serves_guaranteed_pods_and_accounts_for_them() -> None:
    assert (PROVIDER.name, PROVIDER.serves, PROVIDER.accounts) == ("memory", Serves.GUARANTEED, True)
    assert PROVIDER.wants(request(500)), "even if no NUMA node can hold it"
    assert not PROVIDER.wants(request(0))
    assert not PROVIDER.wants(request(5, guaranteed=False))


def test_bound_memory_is_neither_hinted_at_nor_granted() -> None:
    wanted = request(60)
    named = changed_copy(wanted, cri_resources=Request(cpuset_mems="0"))
    together = SetAside(None, True, CpuSet(), (Block(Mask([0]), "memory", 5),))
    whole = changed_copy(wanted, pod=changed_copy(wanted.pod, reserved_for_pod=together))
    for each in (named, whole):
        provider = PROVIDER.prepare(VIEW, each)
        assert (provider.bound, provider.hints(each), provider.explain_shortfall(each, 0)) == (True, None, ())
        assert provider.allocate(each, ANY, Grants()).grants == Grants()
        too_much = changed_copy(each, requests=request(500).requests)
        assert provider.explain_shortfall(too_much, 0) == (), "the shortfall is not on this NUMA node"
    free = PROVIDER.prepare(VIEW, wanted)
    assert not free.bound
    assert list(free.hints(wanted) or ()) == ["memory"]


@pytest.mark.parametrize("scope", list(Scope))
def test_without_a_hint_memory_follows_the_cpus_if_it_fits_there(scope: Scope) -> None:
    near_one = Grants(MACHINE.nodes[1].cpus)
    done = PROVIDER.allocate(request(60, scope=scope), ANY, near_one)
    assert done.grants == changed_copy(near_one, blocks=(Block(Mask([1]), "memory", 60 * MIB),))
    again = done.provider.allocate(changed_copy(request(60), name="i"), ANY, near_one)
    assert again.grants.blocks == (Block(Mask([0]), "memory", 60 * MIB),)
    assert again.steps[0].startswith("not on the nodes 1 of its CPUs: [memorymanager]")
    apart = changed_copy(PROVIDER, follow_cpus=False).allocate(request(60), ANY, near_one)
    assert apart.grants.blocks == (Block(Mask([0]), "memory", 60 * MIB),)
    with pytest.raises(MemoryRejectedError):
        PROVIDER.allocate(request(500), ANY, near_one)


def test_charged_memory_is_released_when_the_container_is_removed() -> None:
    pod = request(60).pod
    placement = Placement(Pool.SHARED, CpuSet(), Mask([0]), blocks=(Block(Mask([0]), "memory", 60 * MIB),))
    container = Container("id", "c", pod, Request(), placement, Phase.RUNNING)
    charged = PROVIDER.account({"s": pod}, {"id": container}, (), (container,))
    assert charged.state.nodes[0].table("memory").free == 30 * MIB
    assert charged.explain_shortfall(request(60), 0) == (Shortfall("memory", Mask([0]), 60 * MIB, 30 * MIB),)
    assert charged.explain_shortfall(request(60), 1) == ()
    together = changed_copy(request(60, scope=Scope.POD), name="")
    assert charged.explain_shortfall(together, 0) == (Shortfall("memory", Mask([0]), 60 * MIB, 30 * MIB),)
    assert charged.explain_shortfall(request(101), 1) is None, "it could never hold that"
    assert charged.explain_shortfall(request(60), 7) is None, "no such NUMA node"
    assert charged.account({"s": pod}, {}, (), (container,)).state == PROVIDER.state
    assert PROVIDER.account({}, {}, (), ()) is PROVIDER


def test_an_init_container_releases_only_memory() -> None:
    share = Share("other", "x", 1)
    granted = Grants(CpuSet([1]), (Block(Mask([0]), "memory", 5),), (("gpu", ("a",)),), (share,))
    assert PROVIDER.release(granted) == changed_copy(granted, blocks=())
    bare = Grants(CpuSet([1]))
    assert PROVIDER.release(bare) is bare


def test_an_init_container_holds_memory_that_later_containers_have_not_taken_over() -> None:
    first = PROVIDER.allocate(changed_copy(request(60), name="i"), ANY, Grants())
    second = first.provider.allocate(request(60), TopologyHint(Mask([0]), True), Grants())
    left = second.provider.holds(request(60), "i", first.grants)
    assert [block.size for block in left.blocks] == [0]
    assert second.provider.holds(request(60), "c", second.grants) == second.grants
    assert second.provider.holds(request(60), "x", first.grants).blocks == ()


def test_only_memory_that_is_bound_is_adopted() -> None:
    pod = Pod("s", "u", "ns", "p", kube_qos=KubeQos.GUARANTEED)
    resources = Request(memory_limit=5 * MIB, huge_pages=(("hugepages-2Mi", 0),))

    def adopted(pod: Pod, mems: int) -> tuple[Block, ...]:
        return PROVIDER.adopt(pod, resources, Mask.from_bits(mems), Grants(), running=True).blocks

    assert adopted(pod, 0b01) == (Block(Mask([0]), "memory", 5 * MIB),)
    assert adopted(pod, 0b11) == (), "it may use all nodes"
    assert adopted(changed_copy(pod, kube_qos=KubeQos.BURSTABLE), 0b01) == ()


def test_a_restarted_container_that_has_moved_keeps_its_recorded_memory() -> None:
    pod = Pod("s", "u", "ns", "p", kube_qos=KubeQos.GUARANTEED)
    had = Grants(blocks=(Block(Mask([0]), "memory", 5 * MIB),))
    resources = Request(memory_limit=9 * MIB)
    assert PROVIDER.adopt(pod, resources, Mask([1]), had, running=False) is had
    moved = PROVIDER.adopt(pod, resources, Mask([1]), had, running=True)
    assert moved.blocks == (Block(Mask([1]), "memory", 9 * MIB),)
    stopped = PROVIDER.adopt(pod, resources, Mask([1]), Grants(), running=False)
    assert stopped.blocks == moved.blocks, "nothing is recorded"
    everywhere = PROVIDER.adopt(pod, resources, Mask([0, 1]), had, running=True)
    assert everywhere.blocks == ()
    bare = Grants(CpuSet([1]))
    assert PROVIDER.adopt(pod, resources, Mask([0, 1]), bare, running=True) is bare


def test_the_only_node_of_a_machine_is_bound_as_well() -> None:
    machine = regular_machine(1, 1, 4, 2, mem_bytes_per_node=100 * MIB)
    provider = MemoryProvider(machine, initial(node_memory(machine), {0: {"memory": 10 * MIB}}))
    pod = Pod("s", "u", "ns", "p", kube_qos=KubeQos.GUARANTEED)
    adopted = provider.adopt(pod, Request(memory_limit=5), Mask([0]), Grants(), running=True)
    assert adopted.blocks == (Block(Mask([0]), "memory", 5),)


def test_the_hints_of_a_pod_are_those_of_its_sum() -> None:
    def masks(wanted: ProviderRequest) -> list[str]:
        hints = (PROVIDER.hints(wanted) or {})["memory"]
        return [str(hint.affinity) for hint in hints or ()]

    two = PodRequests("u", (ContainerResources("c", requests={"memory": 60 * MIB}),) * 2)
    assert masks(changed_copy(request(60), requests=two)) == ["0", "1", "0-1"]
    assert masks(changed_copy(request(60, scope=Scope.POD), requests=two)) == ["0-1"]


def earlier(mib: int, name: str = "c", attempt: int = 0, node: int = 0) -> Container:
    blocks = (Block(Mask([node]), "memory", mib * MIB),) if mib else ()
    placement = Placement(Pool.SHARED, CpuSet(), Mask([node]), blocks=blocks)
    key = f"{name}-{attempt}"
    return Container(key, name, request(60).pod, Request(), placement, Phase.EXITED, attempt)


@pytest.mark.parametrize(
    ("containers", "more", "held"),
    [
        ([earlier(60)], {}, 60),
        ([earlier(50)], {}, None),
        ([earlier(50, attempt=0), earlier(60, attempt=1, node=1)], {}, 60),
        ([earlier(60, attempt=0), earlier(50, attempt=1, node=1)], {}, None),
        ([earlier(60, "i")], {}, None),
        ([earlier(50)], {"scope": Scope.POD}, 50),
        ([earlier(50)], {"cri_resources": Request(cpuset_mems="0")}, 50),
    ],
)
def test_a_container_that_was_resized_does_not_keep_its_memory(
    containers: list[Container], more: dict[str, object], held: int | None
) -> None:
    wanted = changed_copy(request(60), **more)
    state = NodeState.of(VIEW.node, [wanted.pod], containers)
    memory = PROVIDER.account({"s": wanted.pod}, {c.id: c for c in containers}, (), containers)
    prepared = memory.prepare(state, wanted)
    blocks = prepared.state.blocks("u", "c")
    assert (sum(block.size for block in blocks) // MIB if blocks else None) == held
    if held is None and containers[0].name == "c":
        assert prepared.state == PROVIDER.state, "what it held is free again"


def test_a_shortfall_is_that_of_the_container_or_in_scope_pod_of_the_sum() -> None:
    app = ContainerResources("c", requests={"memory": 50 * MIB})
    two = PodRequests("u", (app, changed_copy(app, name="d")))
    alone = changed_copy(request(50), requests=two)
    together = changed_copy(alone, scope=Scope.POD)
    whole = changed_copy(alone, name="")
    assert [PROVIDER.explain_shortfall(each, 0) for each in (alone, together, whole)] == [(), None, None]
    assert [PROVIDER.explain_shortfall(each, 1) for each in (alone, together, whole)] == [(), (), ()]


def test_a_node_that_has_just_enough_is_not_short() -> None:
    assert PROVIDER.explain_shortfall(request(90), 0) == ()
    assert PROVIDER.explain_shortfall(request(91), 0) is None
    pod, used = request(60).pod, earlier(60)
    charged = PROVIDER.account({"s": pod}, {used.id: used}, (), (used,))
    found = [charged.explain_shortfall(request(mib), 0) for mib in (30, 31)]
    assert found == [(), (Shortfall("memory", Mask([0]), 31 * MIB, 30 * MIB),)]
