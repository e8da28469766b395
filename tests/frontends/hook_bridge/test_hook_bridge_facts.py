from __future__ import annotations

import dataclasses
import pickle
import threading

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.api.cri import api_pb2 as pb
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.frontends.cri.hook_view import CriHookView
from proxy.frontends.cri.messages import create_suffix
from proxy.frontends.hook_bridge.facts import (
    decision_of,
    existing_facts,
    hook_pools,
    remembered_pod_facts,
)
from proxy.frontends.hook_bridge.lazy_collections import LazyMap
from proxy.frontends.hook_bridge.object_cache import ObjectCache
from proxy.frontends.hook_bridge.resources import merged, recorded, resources_of
from proxy.hooks.facts import ContainerFacts, Device, Mount, PodFacts, Pools, Resources
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.topology.regular_machine import regular_machine
from proxy.wire.protobuf import encode_field
from tests.testkit.changed_copy import changed_copy
from tests.testkit.hook_facts import container_facts, pod_facts, remember, remember_pod

MACHINE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
POD = Pod("s1", "u1", "ns", "web", 2, QosClass.LS, KubeQos.BURSTABLE, "/kubepods/burstable/podu1")
CONFIG = pb.PodSandboxConfig(labels={"app": "web"}, annotations={"note": "x"})
ALL = Mask((0, 1))

PLAIN = ContainerFacts(
    "",
    "app",
    3,
    "creating",
    "sha256:0123",
    {"l": "1"},
    {"a": "2"},
    {},
    ("/bin/app",),
    ("-v", "--all"),
    (Mount("/data", "/srv", readonly=True, propagation="bidirectional"), Mount("/old", "/srv/old")),
    (Device("/dev/a", "/dev/b", "r"),),
    ("vendor.com/gpu=0",),
    Resources(0, -1, 0, 0, 8192, -997, "", "", {"2MB": 4096}, {"memory.high": "max"}),
)
"""The resources of ``request``, as hooks receive them."""


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def request() -> pb.CreateContainerRequest:
    message = pb.CreateContainerRequest(pod_sandbox_id="s1", sandbox_config=CONFIG)
    config = message.config
    config.metadata.name, config.metadata.attempt = "app", 3
    config.image.image = "sha256:0123"
    config.command.append("/bin/app")
    config.args.extend(("-v", "--all"))
    config.labels["l"] = "1"
    config.annotations["a"] = "2"
    config.mounts.add(container_path="/data", host_path="/srv", readonly=True, propagation=2)
    config.mounts.add(container_path="/old", host_path="/srv/old", propagation=-1)
    config.devices.add(container_path="/dev/a", host_path="/dev/b", permissions="r")
    config.CDI_devices.add(name="vendor.com/gpu=0")
    resources = config.linux.resources
    resources.cpu_quota, resources.oom_score_adj, resources.memory_swap_limit_in_bytes = -1, -997, 8192
    resources.hugepage_limits.add(page_size="2MB", limit=4096)
    resources.unified["memory.high"] = "max"
    return message


def container_of(key: str, placement: Placement, phase: Phase = Phase.RUNNING) -> Container:
    return Container(key, "app", POD, Request(), placement, phase, owner=f"u1/{key}")


def own(text: str, **more: object) -> Placement:
    return Placement(Pool.OWN, cpus(text), ALL, ("chosen",), **more)


# -- pods and containers of requests ------------------------------------------------------------------------


def test_the_pod_of_a_create_is_read_from_all_pieces_of_its_configuration():
    more = pb.CreateContainerRequest(sandbox_config=pb.PodSandboxConfig(labels={"tier": "front"}))
    body = pb.CreateContainerRequest(pod_sandbox_id="s1", sandbox_config=CONFIG).SerializeToString()
    pod = CriHookView("CreateContainer", body + more.SerializeToString()).pod(POD)
    assert (pod.name, pod.labels) == ("web", {"app": "web", "tier": "front"})
    assert pod.annotations == {"note": "x"}
    odd = pb.CreateContainerPieces(sandbox_config=[b"\xff\xff"]).SerializeToString()
    assert CriHookView("CreateContainer", odd).pod(POD).labels == {}


def test_a_pods_facts_do_not_depend_on_their_source() -> None:
    maps = {"app": "web"}, {"note": "x"}
    expected = PodFacts("s1", "u1", "ns", "web", 2, "LS", "Burstable", "kata", POD.cgroup_parent, *maps)
    memory = ObjectCache()
    remember_pod(memory, POD, CONFIG, "kata")
    for config in (CONFIG, CONFIG.SerializeToString()):
        assert pod_facts(POD, config, "kata") == expected
    assert remembered_pod_facts(POD, memory.pod("s1")) == expected, "the handler is remembered, too"
    assert remembered_pod_facts(POD, None) == changed_copy(
        expected, runtime_handler="", labels={}, annotations={}
    )
    assert type(pod_facts(POD, CONFIG).qos) is str


def test_labels_are_not_read_before_their_use() -> None:
    """Unreadable labels are no failure of a hook: the runtime will refuse them."""
    reported = pod_facts(POD, b"\xff\xff")
    assert isinstance(reported.labels, LazyMap)
    assert (reported.labels, reported.annotations) == ({}, {})


def test_a_containers_facts_are_those_of_its_request() -> None:
    reported = container_facts(request().SerializeToString())
    assert reported == PLAIN


def test_the_image_is_the_one_that_the_user_named() -> None:
    message = request()
    message.config.image.user_specified_image = "nginx:1.25"
    assert container_facts(message.SerializeToString()).image == "nginx:1.25"


def test_variables_keep_order_and_bytes_and_the_last_duplicate_wins() -> None:
    message = request()
    for name, value in (("Z", b"1"), ("A", b"\xff\xfe!"), ("Z", b"2"), ("M", "ü".encode())):
        message.config.envs.add(key=name, value=value)
    reported = container_facts(message.SerializeToString()).envs
    assert [*reported.items()] == [("Z", "2"), ("A", "\udcff\udcfe!"), ("M", "ü")]


def test_facts_of_a_create_include_appended_fields() -> None:
    body = request().SerializeToString() + create_suffix(cpus("0-3"), None)
    assert container_facts(body).resources.cpuset_cpus == "0-3"
    assert container_facts(body).resources.oom_score_adj == -997


def test_an_invalid_create_has_empty_facts() -> None:
    assert container_facts(b"\xff\xff\xff") == ContainerFacts()


def test_facts_of_a_create_are_of_the_public_class_and_frozen() -> None:
    reported, plain = container_facts(request().SerializeToString()), PLAIN
    assert isinstance(reported, ContainerFacts)
    assert (reported == plain, plain == reported, reported.__eq__(1)) == (True, True, NotImplemented)
    assert reported != changed_copy(plain, name="other")
    assert repr(container_facts(request().SerializeToString())) == repr(plain)
    assert changed_copy(container_facts(request().SerializeToString()), name="other").image == "sha256:0123"
    again = pickle.loads(pickle.dumps(container_facts(request().SerializeToString())))
    assert (type(again), again) == (ContainerFacts, plain)
    with pytest.raises(AttributeError, match="nosuch"):
        _ = reported.nosuch  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        reported.name = "other"  # type: ignore[misc]


def test_threads_may_read_the_same_request() -> None:
    message = request()
    for number in range(500):
        message.config.envs.add(key=f"NAME_{number}", value=b"%d" % number)
    reported = container_facts(message.SerializeToString())
    found: list[tuple[object, ...]] = []
    gate = threading.Barrier(8)

    def read_facts() -> None:
        gate.wait(30)
        found.append(
            (dict(reported.envs), tuple(reported.mounts), dict(reported.labels), tuple(reported.args))
        )

    threads = [threading.Thread(target=read_facts) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert all(each == found[0] for each in found)
    assert len(reported.envs) == 500


# -- containers that exist ----------------------------------------------------------------------------------


def test_a_forgotten_container_is_described_from_the_ledger() -> None:
    requested = Request(1024, 200_000, 100_000, 1 << 30, "0-3", "0", (("hugepages-2Mi", 4 << 20),))
    container = changed_copy(container_of("c1", own("0-1")), request=requested, attempt=4)
    reported = existing_facts(container, None)
    resources = Resources(100_000, 200_000, 1024, 1 << 30, 0, 0, "0-3", "0", {"2MB": 4 << 20})
    assert reported == ContainerFacts("c1", "app", 4, "running", resources=resources)


def test_a_container_that_is_being_created_has_no_id() -> None:
    assert existing_facts(container_of("token", own("0-1"), Phase.CREATING), None).id == ""


def test_a_remembered_containers_facts_are_those_of_its_create() -> None:
    memory = ObjectCache()
    remember(memory, "c1", request().SerializeToString())
    container = changed_copy(container_of("c1", own("0-1")), request=Request(memory_limit=4096))
    reported = existing_facts(container, memory.container("c1"))
    made = container_facts(request().SerializeToString())
    assert reported == changed_copy(made, id="c1", phase="running", attempt=0)


def test_updates_take_precedence_over_the_ledger() -> None:
    memory = ObjectCache()
    memory.add_listed((), [pb.Container(id="c1", labels={"l": "1"}, image=pb.ImageSpec(image="i"))])
    memory.update_container("c1", Resources(cpu_shares=512, oom_score_adj=5))
    container = changed_copy(container_of("c1", own("0-1")), request=Request(1024, memory_limit=4096))
    reported = existing_facts(container, memory.container("c1"))
    assert reported.resources == Resources(cpu_shares=512, memory_limit=4096, oom_score_adj=5)
    assert (reported.labels, reported.image, reported.envs) == ({"l": "1"}, "i", {})


def test_page_sizes_are_spelled_as_requests_do() -> None:
    pages = (("hugepages-1Gi", 1), ("hugepages-64Ki", 2), ("memory", 3))
    assert recorded(Request(huge_pages=pages)).hugepage_limits == {"1GB": 1, "64KB": 2}


# -- resources over several calls ---------------------------------------------------------------------------


def test_an_update_changes_only_its_own_fields() -> None:
    before = Resources(1, 2, 3, 4, 5, 6, "7", "8", {"2MB": 9}, {"a": "1", "b": "2"})
    assert merged(before, Resources()) == before
    update = Resources(11, -1, 13, -1, -1, -1, "1", "0", {"1GB": 1}, {"b": "3"})
    pages, unified = {"2MB": 9, "1GB": 1}, {"a": "1", "b": "3"}
    assert merged(before, update) == changed_copy(update, hugepage_limits=pages, unified=unified)


def test_an_oom_score_that_an_update_does_not_set_is_kept() -> None:
    """Koordinator treats 0 as a value, so that each answer of a hook resets it."""
    update = resources_of(pb.LinuxContainerResources(cpu_shares=2))
    assert merged(Resources(oom_score_adj=-997), update).oom_score_adj == -997


# -- decisions and pools ------------------------------------------------------------------------------------


def test_the_decision_of_an_owner() -> None:
    container = container_of("c1", own("0-1", cfs_quota_off=True))
    decision = decision_of(NodeState.of(NODE, [POD], [container]), container)
    assert (decision.pool, decision.reasons, decision.unlimited) == ("own", ("chosen",), True)
    assert decision.cpus == decision.own == decision.allowed == cpus("0-1")
    assert decision.mems == decision.allowed_mems == ALL


def test_a_container_that_shares_owns_nothing_and_may_use_its_pool() -> None:
    owner, sharer = (
        container_of("c1", own("0-1")),
        container_of("c2", Placement(Pool.SHARED, CpuSet(), Mask((1,)))),
    )
    state = NodeState.of(NODE, [POD], [owner, sharer])
    decision = decision_of(state, sharer)
    assert (decision.pool, decision.own) == ("shared", CpuSet())
    assert decision.cpus == decision.allowed == cpus("2-15")
    assert (decision.mems, decision.allowed_mems) == (Mask((1,)), ALL)


def test_an_owner_whose_cpus_are_offline_owns_nothing_of_the_pool() -> None:
    container = container_of("c1", own("20-21"))
    decision = decision_of(NodeState.of(NODE, [POD], [container]), container)
    assert (decision.cpus, decision.own) == (MACHINE.online, CpuSet())


def test_replacement_cpus_are_owned() -> None:
    container = container_of("c1", own("1,21", replacement=cpus("5")))
    state = NodeState.of(NODE, [POD], [container])
    decision = decision_of(state, container)
    assert decision.own == decision.cpus == cpus("1,5")
    assert hook_pools(state).owners == {"c1": cpus("1,5")}, "21 is offline"


def test_hooks_may_choose_owned_cpus_if_the_configuration_allows_it() -> None:
    node = changed_copy(NODE, reserved=cpus("15"), node_reservation=cpus("14"))
    owner, sharer = container_of("c1", own("0-1")), container_of("c2", Placement(Pool.SHARED, CpuSet(), ALL))
    state = NodeState.of(node, [POD], [owner, sharer])
    assert decision_of(state, sharer).allowed == cpus("2-13,15")
    assert decision_of(state, sharer, owned_cpus=True).allowed == cpus("0-13,15"), (
        "it may keep its present CPUs"
    )
    assert decision_of(state, owner, owned_cpus=True).allowed == cpus("0-13")


def test_an_observed_container_has_the_cpus_of_its_request() -> None:
    owner = container_of("c1", own("0-1"))
    pinned = changed_copy(container_of("c2", own("4-5")), request=Request(cpuset_cpus="4-5"))
    state = changed_copy(NodeState.of(NODE, [POD], [owner, pinned]), mode=NodeMode.OBSERVE)
    decision = decision_of(state, owner)
    assert (decision.pool, decision.cpus, decision.own) == ("shared", MACHINE.online, CpuSet())
    assert (decision.unlimited, decision.reasons) == (False, ("the plan is not applied to its pod",))
    assert decision_of(state, pinned).cpus == cpus("4-5")
    assert (hook_pools(state).owned, hook_pools(state).owners) == (CpuSet(), {})


def test_a_container_that_was_narrowed_by_hooks_may_be_widened_again() -> None:
    container = container_of("c1", own("0-3", hook_cpus=cpus("2-3")))
    decision = decision_of(NodeState.of(NODE, [POD], [container]), container)
    assert decision.cpus == decision.own == cpus("2-3")
    assert decision.allowed == cpus("0-3")
    pools = hook_pools(NodeState.of(NODE, [POD], [container]))
    assert (pools.owners, pools.owned) == ({"c1": cpus("2-3")}, cpus("0-3")), "the rest has no other owner"


def test_hooks_may_choose_only_within_the_placed_memory_nodes() -> None:
    placement = Placement(Pool.SHARED, CpuSet(), Mask((1,)), blocks=(Block(Mask((1,)), "memory", 4096),))
    container = container_of("c1", placement)
    assert decision_of(NodeState.of(NODE, [POD], [container]), container).allowed_mems == Mask((1,))


def test_memory_nodes_that_the_engine_does_not_set_are_none() -> None:
    container = container_of("c1", Placement(Pool.SHARED, CpuSet(), Mask()))
    decision = decision_of(NodeState.of(NODE, [POD], [container]), container)
    assert (decision.mems, decision.allowed_mems) == (None, ALL)


def test_the_pools_of_a_state_are_described() -> None:
    containers = [
        container_of("c1", changed_copy(own("0-1"), excludes_be=True)),
        container_of("c2", own("4")),
        container_of("token", own("5"), Phase.CREATING),
        container_of("gone", own("6"), Phase.EXITED),
        container_of("c3", Placement(Pool.SHARED, CpuSet(), ALL)),
    ]
    state = NodeState.of(NODE, [POD], containers)
    owners = {"c1": cpus("0-1"), "c2": cpus("4")}
    assert hook_pools(state) == Pools(cpus("2-3,6-15"), cpus("2-15"), cpus("0-1,4-5"), owners)
    assert hook_pools(state.with_be_limit(cpus("8-9"))).be == cpus("8-9")


def test_unknown_fields_are_ignored() -> None:
    body = (
        request().SerializeToString() + encode_field(2, encode_field(13, b"new")) + encode_field(9, b"newer")
    )
    assert container_facts(body).name == "app"
