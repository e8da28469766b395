"""The author of a pod cannot take CPUs from a node with the default configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.demo.client import CriClient, DemoPod
from proxy.model.errors import RuntimeCallError
from proxy.model.workload import KubeQos
from proxy.topology.regular_machine import regular_machine
from tests.testkit.daemon import DaemonNode, run, temporary_node

MACHINE = regular_machine(2, 1, 8, 2)  # 32 CPUs
KEPT = 'reservedSystemCPUs: "1"\nkoordinator: {reservedCPUs: "0", systemCPUs: 2-3}\n'
TENTH = 102
"""CPU shares of a request of 100m."""


class Node(DaemonNode):
    """A node whose daemon has one client, which runs in a thread."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, MACHINE)
        self.running: Any = None

    def run_scenario(self, text: str, scenario: Callable[[CriClient], None]) -> None:
        """Run a daemon with this configuration, and the client in a thread."""
        self.running = self.daemon(text)

        def work() -> None:
            with self.client() as client:
                scenario(client)

        run(self.running, lambda: asyncio.to_thread(work))


@pytest.fixture
def node() -> Iterator[Node]:
    with temporary_node(Node) as made:
        yield made


def refused(client: CriClient, spec: DemoPod) -> str:
    try:
        client.launch(spec)
    except RuntimeCallError as error:
        return str(error)
    return ""


CLAIMS = {
    "nearly all CPUs without a label": DemoPod("taker", "", KubeQos.BEST_EFFORT, "0-30", shares=TENTH),
    "CPUs that nothing keeps": DemoPod("taker", "", KubeQos.BEST_EFFORT, "4-30", shares=TENTH),
    "reserved CPUs by label LSE": DemoPod("taker", "LSE", KubeQos.BURSTABLE, "0-5", shares=TENTH),
    "the CPUs of the node's agents": DemoPod("taker", "SYSTEM", shares=TENTH),
}  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_of_more_cpus_than_the_request_is_rejected(node: Node, claim: str) -> None:
    """Pods that a scheduler has bound to CPUs get them although the claim was first."""

    def scenario(client: CriClient) -> None:
        shared = client.launch(DemoPod("web", "LS", shares=512)).container_id
        before = node.cpus(shared)
        assert before == "1,4-31"
        message = refused(client, CLAIMS[claim])
        assert "cannot place demo/taker" in message
        assert node.cpus(shared) == before
        bound = DemoPod("trading", "LSR", KubeQos.BURSTABLE, "4-15", cpus=12, shares=12 * 1024)
        assert node.cpus(client.launch(bound).container_id) == "4-15"
        whole = DemoPod("db", kube_qos=KubeQos.GUARANTEED, cpus=4)
        assert len(node.cpus(client.launch(whole).container_id)) > 0
        assert node.running.parts.pages.status()["violations"] == []

    node.run_scenario(f"cpuManagerPolicy: static\n{KEPT}", scenario)


def test_a_rejection_names_no_other_pod(node: Node) -> None:
    def scenario(client: CriClient) -> None:
        client.launch(DemoPod("secret", "LSE", cpuset="10-11", cpus=2))
        message = refused(client, DemoPod("mine", "LSR", cpuset="10-12", cpus=3))
        assert "CPUs 10-11 are owned by" in message
        assert "secret" not in message
        reported = node.running.parts.pages.explain({"query": "demo/mine"})["records"][-1]["decision"][
            "verdict"
        ]
        assert "demo/secret" in reported["message"]

    node.run_scenario("", scenario)


def test_owners_leave_the_shared_pool_its_floor(node: Node) -> None:
    """The author requests all CPUs of the node; the node keeps the floor of the shared pool."""

    def scenario(client: CriClient) -> None:
        assert "AdmissionSharedFloor" in _reason(node, client, DemoPod("all", "LSR", cpuset="0-30", cpus=31))
        assert "AdmissionSharedFloor" in _reason(node, client, DemoPod("most", "LSR", cpuset="0-29", cpus=30))
        client.launch(DemoPod("much", "LSR", cpuset="0-6,16-22", cpus=14))
        pools = node.running.parts.pages.status()["pools"]
        assert pools["shared"] == "7-15,23-31"

    node.run_scenario("", scenario)


def _reason(node: Node, client: CriClient, spec: DemoPod) -> str:
    assert refused(client, spec)
    reason: str = node.running.parts.pages.explain({"query": f"demo/{spec.name}"})["records"][-1]["decision"][
        "verdict"
    ]["reason"]
    return reason
