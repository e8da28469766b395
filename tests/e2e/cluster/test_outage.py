"""The API server is killed under churn: the node continues, and the objects are correct after its restart.

TOPOPROXY_OUTAGE_S is the length of the outage in seconds. Calls during it are compared with calls before it.
"""

from __future__ import annotations

import os
import time

import pytest
from cri import cpuset_of, online
from joined_node import NODE, JoinedNode, container, is_free, pod_spec, until

from tests.cluster.agent_process import condition, free_cpus

LASTS_S = float(os.environ.get("TOPOPROXY_OUTAGE_S") or 30)
RIGHT_S = 5.0
CALLS = ("run_podsandbox", "create_container", "start_container", "stop_container", "stop_podsandbox")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(480 + 3 * LASTS_S)]


def start_owner(node: JoinedNode, name: str) -> str:
    """Start a static pod that owns a CPU; returns the id of its container."""
    node.kubelet.add_static_pod(name, pod_spec(container("1")))
    found: str = until(f"{name} to run", lambda: node.by_name(f"{name}-{NODE}"))
    owned = cpuset_of(found)
    assert (len(owned.cpus), owned.effective) == (1, owned.cpus)
    return found


def churn(node: JoinedNode, prefix: str, seconds: float) -> None:
    """Start and remove owners, one after the other."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        name = f"{prefix}{number}"
        start_owner(node, name)
        node.kubelet.remove_static_pod(name)
        until(f"{name} to end", lambda name=name: not node.by_name(f"{name}-{NODE}"))
        number += 1


def test_an_outage_delays_no_call_and_the_objects_are_right_soon_after(joined_node: JoinedNode) -> None:
    with joined_node.agent() as agent:
        idle = until("the free CPUs", lambda: free_cpus(joined_node.plane))
        started = joined_node.kubelet.calls()
        churn(joined_node, "before", min(LASTS_S, 60))
        until("the object to list the same CPUs as initially", lambda: free_cpus(joined_node.plane) == idle)
        memory, before = agent.rss_kb, joined_node.kubelet.calls()
        joined_node.plane.stop_api()
        try:
            churn(joined_node, "during", LASTS_S)
            held = cpuset_of(start_owner(joined_node, "held")).cpus
            during = joined_node.kubelet.calls()
        finally:
            joined_node.plane.start_api()
        back = time.monotonic()
        until("the object", lambda: is_free(joined_node, online() - held))
        right = time.monotonic() - back
        print(f"\nan outage of {LASTS_S:g} s; the object was correct {right:.2f} s after it")
        print(f"resident memory of the agent: {memory} kB before it, {agent.rss_kb} kB after it")
        for kind in CALLS:
            with_api, without = before.since(started, kind), during.since(before, kind)
            print(
                f"{kind}: {with_api[0]} calls, mean {with_api[1]:.3f} s, all within {with_api[2]:g} s; "
                f"without API server {without[0]}, {without[1]:.3f} s, {without[2]:g} s"
            )
            assert without[0] > 0
            assert without[1] < 2 * with_api[1] + 0.1, f"{kind} waits for the API server"
            assert during.errors.get(kind, 0) == before.errors.get(kind, 0)
        assert right < RIGHT_S
        until("the mirror pod", lambda: joined_node.plane.get(f"/api/v1/namespaces/demo/pods/held-{NODE}"))
        assert condition(joined_node.plane)["reason"] == "Enforcing"
        joined_node.kubelet.remove_static_pod("held")
        until("the CPU to be free again", lambda: free_cpus(joined_node.plane) == idle)
    # Controllers, scheduler and kubelet connect again after pauses of up to half a minute each. The tests
    # after this one expect that they have.
    joined_node.deploy("after", pod_spec(container("1")))
    joined_node.running("after", limit=180)
