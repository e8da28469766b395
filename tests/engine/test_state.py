from __future__ import annotations

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.container_create import place
from proxy.engine.node import Node
from proxy.engine.owners import spare_shared_cpus
from proxy.engine.placement import moves
from proxy.engine.state import NodeState
from proxy.model.defects import InputDefect
from proxy.model.idset import CpuSet, Mask
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15
TOPOLOGY = CpuTopology.of(MACHINE)
NODE = Node(MACHINE, TOPOLOGY, static=True)
POD, OTHER = (Pod(f"s-{uid}", uid, "ns", uid) for uid in ("a", "b"))
ALL = Mask((0, 1))


def owning(key: str, owner: str, cpus: str, phase: Phase = Phase.RUNNING, **more: object) -> Container:
    placement = Placement(Pool.OWN, CpuSet.parse(cpus), ALL, excludes_be=bool(more.pop("hard", True)))
    fields = {"pod": POD, "attempt": 0} | more
    return Container(key, "c", request=Request(), placement=placement, phase=phase, owner=owner, **fields)


def sharing(key: str) -> Container:
    return Container(key, "c", POD, Request(), Placement(Pool.SHARED, CpuSet(), ALL), Phase.RUNNING)


def test_a_node_by_default_allocates_no_cpus_and_memory_follows_cpus() -> None:
    node = Node(MACHINE, TOPOLOGY)
    state = NodeState.empty(node)
    assert place(state, POD, "c", 0, Request(cpu_shares=512), "x").container.placement.pool is Pool.SHARED
    whole = Request(cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)
    plan = place(state, POD, "c", 0, whole, "x")
    assert plan.container.placement.pool is Pool.SHARED
    lse = changed_copy(POD, qos=QosClass.LSE, cpuset=CpuSet.parse("4"))
    assert place(state, lse, "c", 0, whole, "x").container.placement.mems == Mask((1,))
    assert node == Node(MACHINE, TOPOLOGY), "cached values are not compared"
    assert "pool_placements" not in repr(node)


def test_a_container_that_no_longer_owns_cpus_releases_them() -> None:
    state = NodeState.of(NODE, (), [owning("x", "a/c", "0-1")])
    assert state.pools.shared == CpuSet.parse("2-15")
    for after in (state.changed(put=[sharing("x")]), state.with_container("", sharing("x"))):
        assert (after.pools.shared, after.owners) == (MACHINE.online, {})


def test_the_token_of_a_container_is_replaced_by_its_id() -> None:
    state = NodeState.of(NODE, (), [sharing("token")])
    assert set(state.with_container("token", sharing("x")).containers) == {"x"}
    state = NodeState.of(NODE, (), [sharing("token"), owning("x", "a/c", "0-1")])
    renamed = state.with_container("token", sharing("x"))
    assert set(renamed.containers) == {"x"}
    assert renamed.pools.shared == MACHINE.online


def test_an_ended_init_container_keeps_its_cpus_until_a_container_of_the_pod_follows() -> None:
    kinds = (
        ("i", ContainerKind.INIT),
        ("j", ContainerKind.INIT),
        ("a", ContainerKind.APP),
        ("b", ContainerKind.APP),
    )
    requests = PodRequests(
        "as kubelet has it", tuple(ContainerResources(name, kind, {}, {}) for name, kind in kinds)
    )
    pod = changed_copy(POD, requests=requests)
    ended = {
        name: changed_copy(owning(name, f"a/{name}", cpus, Phase.EXITED, pod=pod), name=name)
        for name, cpus in (("i", "0"),)
    }

    def ended_owners(*others: str) -> list[str]:
        running = [changed_copy(owning(name, f"a/{name}", "2-3", pod=pod), name=name) for name in others]
        return [c.name for c in NodeState.of(NODE, [pod], [*ended.values(), *running]).ended_owners()]

    assert ended_owners() == ["i"]
    assert ended_owners("j") == ["i"], "the pod is not past its init containers"
    assert ended_owners("a") == []
    ended["a"] = changed_copy(owning("x", "a/a", "1", Phase.EXITED, pod=pod), name="a")
    assert ended_owners("b") == ["a"], "the other container does not start again"


def test_pods_are_added_and_removed() -> None:
    state = NodeState.empty(NODE).with_pod(POD).with_pod(OTHER)
    assert dict(state.pods) == {"s-a": POD, "s-b": OTHER}
    assert dict(state.without_pod("s-a").pods) == {"s-b": OTHER}
    state = state.changed(put=[sharing("x"), changed_copy(sharing("y"), pod=OTHER)])
    assert [c.id for c in state.in_sandbox("s-a")] == ["x"]


def test_an_owner_is_hard_if_one_of_its_containers_is() -> None:
    hard, soft = owning("x", "a", "0"), owning("y", "a", "1", hard=False)
    for containers in ([hard, soft], [soft, hard]):
        state = NodeState.of(NODE, (), containers)
        assert (state.owners["a"].cpus, state.owners["a"].excludes_be) == (CpuSet.parse("0-1"), True)
    alike = changed_copy(soft, id="z")
    assert not NodeState.of(NODE, (), [soft, alike]).owners["a"].excludes_be


def test_annotated_and_returning_cpus_count_as_promised() -> None:
    named = changed_copy(OTHER, cpuset=CpuSet.parse("4-5"))
    containers = [
        owning("1", "a/c", "0-1", Phase.EXITED),
        changed_copy(owning("2", "a/d", "2", Phase.RUNNING), name="d"),
        owning("3", "gone/c", "3", Phase.EXITED, pod=Pod("s-gone", "gone", "ns", "gone")),
        changed_copy(sharing("4"), phase=Phase.EXITED),
    ]
    state = NodeState.of(NODE, [POD, named], containers)
    assert state.promised_cpus("x/c") == CpuSet.parse("0-1,4-5")
    assert state.promised_cpus("a/c") == CpuSet.parse("4-5")
    assert state.promised_cpus("b") == CpuSet.parse("0-1")
    batch = changed_copy(named, qos=QosClass.BE)
    faulty = changed_copy(named, defects=(InputDefect("resource-spec is no good", decisive=True),))
    for pod in (batch, faulty):
        assert not NodeState.of(NODE, [pod], []).promised_cpus("x/c"), (
            "it does not own what its annotation names"
        )


def test_a_container_that_exists_again_does_not_come_back_to_its_earlier_cpus() -> None:
    ended = owning("1", "a/c", "0-3", Phase.EXITED)
    for again in (owning("2", "a/c", "0-1", attempt=1), sharing("2")):
        state = NodeState.of(NODE, [POD, OTHER], [ended, again])
        assert not state.promised_cpus("b/c")
        assert spare_shared_cpus(state, OTHER) == state.pools.shared
        assert state.changed(drop=["2"]).promised_cpus("b/c") == CpuSet.parse("0-3")


def test_the_previous_cpus_of_an_owner_are_those_of_its_last_attempt() -> None:
    ended = [
        owning("1", "a/c", "0-1", Phase.EXITED, attempt=1),
        owning("2", "a/c", "2-3", Phase.EXITED, attempt=2),
        owning("3", "b/c", "4-5", Phase.EXITED, attempt=3),
    ]
    state = NodeState.of(NODE, [POD], ended)
    assert state.last_cpus("a/c") == CpuSet.parse("2-3")
    assert state.last_cpus("x/c") == CpuSet()
    assert state.changed(put=[owning("4", "a/c", "6-7")]).last_cpus("a/c") == CpuSet.parse("6-7")


def test_kube_classes_without_a_label_share_by_class() -> None:
    be = changed_copy(POD, kube_qos=KubeQos.BEST_EFFORT)
    plan = place(NodeState.of(NODE, (), [owning("x", "b", "0-1", hard=False)]), be, "c", 0, Request(), "t")
    assert plan.state.desired_cpus(plan.container) == MACHINE.online, (
        "BE may borrow CPUs of owners that are not hard"
    )


def narrowed(key: str, within: str, pool: Pool = Pool.SHARED) -> Container:
    placement = Placement(pool, CpuSet(), ALL, pool_cpus_limit=CpuSet.parse(within))
    return Container(key, key, POD, Request(), placement, Phase.RUNNING)


def test_a_container_bound_to_a_node_follows_only_its_part_of_the_pool() -> None:
    state = NodeState.of(NODE, (), [narrowed("x", "4-7,12-15"), sharing("y")])
    assert state.desired_cpus(state.containers["x"]) == CpuSet.parse("4-7,12-15")
    elsewhere = state.changed(put=[owning("o", "b/c", "0-1")])
    assert moves(state, elsewhere) == (("y",), ()), "changes on another node do not affect it"
    here = elsewhere.changed(put=[owning("p", "d/c", "4-5")])
    assert here.desired_cpus(here.containers["x"]) == CpuSet.parse("6-7,12-15")
    assert moves(elsewhere, here) == (("x", "y"), ())
    assert moves(here, elsewhere) == ((), ("x", "y"))
    full = here.changed(put=[owning("q", "e/c", "6-7,12-15")])
    assert full.desired_cpus(full.containers["x"]) == full.pools.shared == CpuSet.parse("2-3,8-11")


def test_system_pods_have_cpus_of_their_own_while_the_node_keeps_some() -> None:
    node = Node(
        MACHINE, TOPOLOGY, static=True, system=CpuSet.parse("0,8"), node_reservation=CpuSet.parse("1")
    )
    state = NodeState.of(node, (), [narrowed("s", "0-15", Pool.SYSTEM), sharing("y")])
    assert state.desired_cpus(state.containers["s"]) == CpuSet.parse("0,8")
    assert state.desired_cpus(state.containers["y"]) == CpuSet.parse("2-7,9-15")
    assert node.cpu.reserved == CpuSet.parse("0-1,8"), "no container gets the reserved CPUs"
    open_to_all = NodeState.of(changed_copy(node, system_cpus_exclusive=False), (), [sharing("y")])
    assert open_to_all.pools.shared == CpuSet.parse("0,2-15")
    without = NodeState.of(NODE, (), [narrowed("s", "0-15", Pool.SYSTEM)])
    assert without.desired_cpus(without.containers["s"]) == MACHINE.online


def test_owned_system_cpus_are_exclusive() -> None:
    node = Node(MACHINE, TOPOLOGY, static=True, system=CpuSet.parse("0,8"))
    system = narrowed("s", "0-15", Pool.SYSTEM)
    state = NodeState.of(node, (), [system, owning("o", "b/c", "0")])
    assert state.desired_cpus(system) == CpuSet.parse("8")
    assert moves(NodeState.of(node, (), [system]), state) == (("s",), ())
    state = state.changed(put=[owning("p", "d/c", "8")])
    assert state.desired_cpus(system) == state.pools.shared


def test_a_pod_bound_to_a_node_follows_the_online_cpus_of_the_node() -> None:
    bound = Container(
        "x",
        "x",
        POD,
        Request(),
        Placement(Pool.SHARED, CpuSet(), ALL, pool_numa_limit=Mask((0,))),
        Phase.RUNNING,
    )
    state = NodeState.of(NODE, (), [bound, sharing("y")])
    assert state.desired_cpus(bound) == CpuSet.parse("0-3,8-11")
    few = state.with_machine(changed_copy(MACHINE, cpus=tuple(c for c in MACHINE.cpus if c.id > 3)))
    assert few.desired_cpus(bound) == CpuSet.parse("8-11")
    gone = state.with_machine(changed_copy(MACHINE, cpus=tuple(c for c in MACHINE.cpus if c.numa == 1)))
    assert gone.desired_cpus(bound) == gone.pools.shared == CpuSet.parse("4-7,12-15")
    assert gone.with_machine(MACHINE).desired_cpus(bound) == CpuSet.parse("0-3,8-11"), (
        "it is on the CPUs of its node again"
    )


def without(text: str) -> Node:
    """The node with some CPUs offline."""
    gone = CpuSet.parse(text)
    nodes = tuple(changed_copy(n, cpus=n.cpus - gone) for n in MACHINE.nodes)
    cpus = tuple(c for c in MACHINE.cpus if c.id not in gone)
    return changed_copy(NODE, machine=changed_copy(MACHINE, cpus=cpus, nodes=nodes))


def test_an_owner_whose_cpus_are_offline_shares_until_they_return() -> None:
    x, y, z = owning("x", "a/c", "0-1"), owning("y", "b/c", "2-3"), sharing("z")
    state = NodeState.of(NODE, (), [x, y, z])
    fewer = state.with_node(without("0-1"))
    assert fewer.desired_cpus(x) == fewer.pools.shared == CpuSet.parse("4-15")
    assert moves(state, fewer) == (("x",), ()), "a container moves although the pools did not change"
    late = owning("w", "d/c", "4")
    assert moves(fewer, fewer.changed(put=[late])) == (("x", "z"), ())
    assert moves(fewer, state) == (("x",), ())
    part = state.with_node(without("1"))
    assert part.desired_cpus(x) == CpuSet.parse("0")
    assert moves(part, part.changed(drop=["y"])) == ((), ("z",))


def test_a_container_that_is_bound_elsewhere_does_not_move() -> None:
    bound = Placement(Pool.SHARED, CpuSet(), ALL, pool_numa_limit=Mask((1,)))
    near, far = (changed_copy(sharing(key), placement=bound) for key in ("near", "far"))
    far = changed_copy(far, placement=changed_copy(bound, pool_numa_limit=Mask((0,))))
    named = changed_copy(
        sharing("named"), placement=Placement(Pool.BE, CpuSet(), ALL, pool_cpus_limit=CpuSet((0,)))
    )
    state = NodeState.of(NODE, (), [near, far, named, sharing("z")])
    after = state.changed(put=[owning("x", "a/c", "4-5")])
    assert moves(state, after) == (("near", "z"), ())
    assert moves(after, state) == ((), ("near", "z"))


def test_one_container_known_to_kubelet_alone_causes_a_recount() -> None:
    held = {POD.uid: {"c": CpuSet.parse("4-5")}}
    state = NodeState.of(NODE, [POD, OTHER], [], held)
    assert state.pools.shared.isdisjoint(CpuSet.parse("4-5"))
    here = Container("1", "c", POD, Request(), Placement(Pool.SHARED, CpuSet(), Mask((0,))), Phase.RUNNING)
    after = state.changed(put=[here, changed_copy(here, id="2", pod=OTHER)])
    assert CpuSet.parse("4-5") <= after.pools.shared
