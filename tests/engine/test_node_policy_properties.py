"""Any policies in any order: owners keep their CPUs, and no container is left without CPUs."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.node_policy import read_node_policy
from proxy.engine.node_policy_applied import apply_node_policy
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import NodeBindPolicy, NumaPolicy
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.options import TopologyOptions
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.pools.node_keys import BIND_POLICY, NUMA_POLICY, RESERVATION, SYSTEM_QOS
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(2, 1, 2, 2)
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
CPUS = st.sets(st.integers(0, 9), max_size=9).map(lambda ids: str(CpuSet(ids)))
METAS = st.builds(
    lambda reserved, count, system, alone, bind, policy: NodeMeta(
        labels={BIND_POLICY[0]: bind, NUMA_POLICY[0]: policy},
        annotations={
            RESERVATION: json.dumps({"reservedCPUs": reserved, "resources": {"cpu": count}}),
            SYSTEM_QOS: json.dumps({"cpuset": system, "cpusetExclusive": alone}),
        },
    ),
    CPUS,
    st.integers(0, 9),
    CPUS,
    st.booleans(),
    st.sampled_from([*NodeBindPolicy, "None", "bad"]),
    st.sampled_from([*NumaPolicy, "None", "bad"]),
)
KUBELETS = st.builds(
    CpuManager,
    st.sampled_from(["", "none", "static"]),
    topology_policy=st.sampled_from(["", "none", "restricted", "odd"]),
    topology_scope=st.sampled_from(["", "pod", "container"]),
)


def owner(number: int, cpu: int, qos: QosClass) -> Container:
    pod = Pod(f"s-{number}", f"u{number}", "ns", f"p{number}", qos=qos)
    placement = Placement(Pool.OWN, CpuSet((cpu,)), Mask((0,)), excludes_be=qos is QosClass.LSE)
    return Container(f"o{number}", "c", pod, Request(), placement, Phase.RUNNING, owner=f"u{number}/c")


def sharer(pool: Pool) -> Container:
    placement = Placement(pool, CpuSet(), Mask((0,)))
    return Container(
        pool.value, "c", Pod(pool.value, pool.value, "ns", pool.value), Request(), placement, Phase.RUNNING
    )


@given(
    st.sets(st.integers(0, 7), max_size=7),
    st.lists(st.tuples(METAS | st.none(), KUBELETS | st.none()), min_size=1, max_size=4),
)
def test_changed_rules_keep_owners_and_shared_cpus(
    owned: set[int], reported: list[tuple[NodeMeta, CpuManager]]
) -> None:
    owners = [owner(i, cpu, QosClass.LSE if i % 2 else QosClass.LSR) for i, cpu in enumerate(sorted(owned))]
    there = [*owners, *(sharer(pool) for pool in (Pool.SHARED, Pool.BE, Pool.SYSTEM))]
    state = NodeState.of(NODE, [c.pod for c in there], there)
    policy = read_node_policy(NODE, MACHINE, None, None)
    for meta, kubelet in reported:
        before = policy
        wanted = read_node_policy(NODE, MACHINE, meta, kubelet)
        done = apply_node_policy(state, wanted, before, TopologyOptions())
        again = apply_node_policy(done.state, wanted, done.policy, TopologyOptions())
        assert again.state is done.state, "a second application changes nothing"
        state, policy = done.state, done.policy
        assert state.pools.shared
        assert violations(state) == []
        assert {key: held.cpus for key, held in state.owners.items()} == {
            c.owner: c.placement.exclusive for c in owners
        }
        node = state.node
        assert (node.node_reservation, node.system) == (policy.reservation.value, policy.system.value)
        kept = node.node_reservation | node.system if node.system_cpus_exclusive else node.node_reservation
        assert state.pools.shared.isdisjoint(kept)
        for new, requested, old in (
            (policy.reservation, wanted.reservation, before.reservation),
            (policy.system, wanted.system, before.system),
        ):
            assert new.value == requested.value or (new.value == old.value and new.problem)
