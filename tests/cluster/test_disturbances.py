"""What is published while clocks are wrong, watches are stale, and others write the same objects."""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.agent.object_writer import WRITE_BURST
from proxy.agent.watcher import SILENCE_S
from proxy.model.idset import CpuSet
from tests.cluster.agent_process import (
    NUMATOPOLOGY,
    bound_token,
    condition,
    events,
    running_agent,
    wait_until_quiet,
    writes,
)
from tests.cluster.api_client import ApiError
from tests.cluster.control_plane import ControlPlane
from tests.cluster.imitated_node import FREE, ImitatedNode, fresh_cluster, on_imitated_node, owner
from tests.cluster.silent_relay import SilentRelay
from tests.cluster.wrong_clock import WrongClock
from tests.testkit.waiting import wait_until

APPLY = "application/apply-patch+yaml"
OUTAGE_S = float(os.environ.get("TOPOPROXY_OUTAGE_S") or 10)
NODE_STATUS = "/api/v1/nodes/n1/status"


@pytest.fixture
def cluster(plane: ControlPlane) -> Iterator[ControlPlane]:
    with fresh_cluster(plane):
        yield plane


def foreign_apply(cluster: ControlPlane, path: str, value: Any) -> None:
    """Apply fields with force, as another field manager."""
    cluster.request("PATCH", f"{path}?fieldManager=other&force=true", value, APPLY)


def numatopology(free: str, **labels: str) -> Any:
    return {
        "apiVersion": "nodeinfo.volcano.sh/v1alpha1",
        "kind": "Numatopology",
        "metadata": {"name": "n1", "labels": labels},
        "spec": {"numares": {"cpu": {"allocatable": free}}},
    }


def is_refused(cluster: ControlPlane, token: str) -> bool:
    try:
        cluster.request("GET", "/api/v1/nodes/n1", token=token)
    except ApiError as error:
        return error.status == 401
    return False


def end(node: ImitatedNode, container: str) -> None:
    with node.daemon_node.client() as client:
        client.stop(container)
        client.remove(container)


def test_fields_that_another_manager_takes_by_force_are_taken_back(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        wait_until_quiet(cluster, 1)
        for _ in range(2):
            foreign_apply(cluster, NUMATOPOLOGY, numatopology("0-99", theirs="stays"))
            wait_until(lambda: node.free() == FREE, 15)
        found = cluster.get(NUMATOPOLOGY) or {}
        assert found["metadata"]["labels"] == {"theirs": "stays"}
        before = writes(cluster)
        for _ in range(20):
            foreign_apply(cluster, NUMATOPOLOGY, numatopology("0-99", theirs="stays"))
            time.sleep(0.5)  # the other program writes twice a second
        ours = writes(cluster) - before - 20
        assert ours <= 7, "at growing intervals"
        assert "another program keeps writing an object of this agent" in node.agent.log.read_text()

    on_imitated_node(cluster, test)


def test_a_condition_that_another_manager_writes_is_taken_back(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        wait_until_quiet(cluster, 1)
        since = condition(cluster)["lastTransitionTime"]
        theirs = {"type": "TopologyPlacement", "status": "False", "reason": "Theirs", "message": "theirs"}
        value = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
        foreign_apply(cluster, NODE_STATUS, {**value, "status": {"conditions": [theirs]}})
        wait_until(lambda: condition(cluster)["reason"] == "Enforcing", 15)
        assert condition(cluster)["status"] == "True"
        assert condition(cluster)["lastTransitionTime"] >= since
        wait_until_quiet(cluster, 1)
        cluster.merge(NODE_STATUS, {"status": {"conditions": None}})
        wait_until(lambda: condition(cluster), 15)

    on_imitated_node(cluster, test)


def test_a_watch_that_is_too_old_is_replaced_by_a_list(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        seen = (cluster.get(NUMATOPOLOGY) or {})["metadata"]["resourceVersion"]
        node.agent.process.send_signal(signal.SIGSTOP)
        cluster.stop_api()
        cluster.start_api()
        for number in range(3):
            cluster.merge(NUMATOPOLOGY, numatopology(f"0-{90 + number}"))
        cluster.compact()
        cluster.stop_api()
        cluster.start_api()
        collection = NUMATOPOLOGY.rpartition("/")[0]
        wait_until(lambda: node.free() == "0-92")
        path = f"{collection}?watch=1&timeoutSeconds=1&resourceVersion={seen}"
        assert "too old resource version" in cluster.request("GET", path, raw=True)
        node.agent.process.send_signal(signal.SIGCONT)
        seconds = wait_until(lambda: node.free() == FREE, 20)
        print(f"right {seconds:.1f} s after a watch was too old")
        container = node.launch(owner())
        left = str(CpuSet.parse(FREE) - CpuSet.parse(node.daemon_node.cpus(container)))
        wait_until(lambda: node.free() == left, 10)

    on_imitated_node(cluster, test)


@pytest.mark.timeout(300)
def test_connections_that_carry_nothing_more_are_given_up(cluster: ControlPlane) -> None:
    relay = SilentRelay(cluster.port)

    def test(node: ImitatedNode) -> None:
        relay.silence()
        silent = time.monotonic()
        container = node.launch(owner())
        assert time.monotonic() - silent < 2, "no call waits for the API server"
        left = str(CpuSet.parse(FREE) - CpuSet.parse(node.daemon_node.cpus(container)))
        seconds = wait_until(lambda: node.free() == left, 20)
        print(f"current {seconds:.1f} s after the connections had gone silent")
        wait_until_quiet(cluster, 2)
        cluster.merge(NUMATOPOLOGY, numatopology("0-99"))
        wait_until(lambda: node.free() == left, SILENCE_S + 20)
        print(f"a foreign write was noticed {time.monotonic() - silent:.0f} s after that")

    try:
        on_imitated_node(cluster, test, server=relay.server)
    finally:
        relay.close()


@pytest.mark.parametrize("ahead", [600, -600])
def test_a_clock_that_is_wrong_and_steps(cluster: ControlPlane, tmp_path: Path, ahead: int) -> None:
    clock = WrongClock(tmp_path)
    clock.set(ahead)

    def of_clock(reported: str, offset: int) -> None:
        at = datetime.datetime.fromisoformat(reported).timestamp()
        assert abs(at - time.time() - offset) < 60, "the clock is not wrong: the test shows nothing"

    def test(node: ImitatedNode) -> None:
        of_clock(condition(cluster)["lastTransitionTime"], ahead)
        for offset in (ahead, -ahead, 0):
            clock.set(offset)
            container = node.launch(owner(f"o{offset % 7}"))
            left = str(CpuSet.parse(FREE) - CpuSet.parse(node.daemon_node.cpus(container)))
            wait_until(lambda left=left: node.free() == left, 5)
            end(node, container)
            wait_until(lambda: node.free() == FREE, 5)
        wait_until(lambda: len(events(cluster)) == 3)
        for each, offset in zip(
            sorted(events(cluster), key=lambda e: e["metadata"]["creationTimestamp"]),
            (ahead, -ahead, 0),
            strict=True,
        ):
            of_clock(each["lastTimestamp"], offset)
        wait_until_quiet(cluster, 4, 10)  # a wrong clock writes nothing

    on_imitated_node(cluster, test, environment=clock.environment)


@pytest.mark.timeout(300 + 2 * OUTAGE_S)
def test_an_outage_delays_no_call(cluster: ControlPlane) -> None:
    def churn(node: ImitatedNode, seconds: float) -> list[float]:
        """Return the seconds that it took to launch each of the owners that come and go."""
        took, stop = [], time.monotonic() + seconds
        while time.monotonic() < stop:
            with node.daemon_node.client() as client:
                began = time.monotonic()
                started = client.launch(owner(f"o{len(took)}"))
                took.append(time.monotonic() - began)
                time.sleep(0.3)
                client.end_pod(started)
        return sorted(took)

    def test(node: ImitatedNode) -> None:
        before = churn(node, min(OUTAGE_S, 60))
        memory, cpu = node.agent.rss_kb, node.agent.cpu_s
        cluster.stop_api()
        try:
            during = churn(node, OUTAGE_S)
            left = str(CpuSet.parse(FREE) - CpuSet.parse(node.daemon_node.cpus(node.launch(owner("held")))))
            cpu = node.agent.cpu_s - cpu
        finally:
            cluster.start_api()
        seconds = wait_until(lambda: node.free() == left)
        print(f"processor time of the agent in it: {cpu:.1f} s")
        print(f"an outage of {OUTAGE_S:g} s; the object was right {seconds:.2f} s after it")
        print(f"resident memory of the agent: {memory} kB before it, {node.agent.rss_kb} kB after it")
        for word, took in (("with", before), ("without", during)):
            p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
            print(
                f"{word} API server: {len(took)} pods, p50 {p50:.3f} s, p99 {p99:.3f} s, max {took[-1]:.3f} s"
            )
        assert during[len(during) // 2] < 2 * before[len(before) // 2] + 0.05, "calls wait for the API server"
        assert during[-1] < before[-1] + 2, "no call waits for the API server"
        assert seconds < 5

    on_imitated_node(cluster, test)


def test_two_agents_under_churn_agree(cluster: ControlPlane) -> None:
    def test(node: ImitatedNode) -> None:
        with running_agent(cluster, node.daemon_node.directory):
            wait_until_quiet(cluster, 1)
            before, began = writes(cluster, events=True), time.monotonic()
            for number in range(8):
                held = node.launch(owner(f"o{number}"))
                time.sleep(0.6)
                if number < 7:
                    end(node, held)
            left = str(CpuSet.parse(FREE) - CpuSet.parse(node.daemon_node.cpus(held)))
            wait_until(lambda: node.free() == left, 10)
            lasted = time.monotonic() - began
            assert writes(cluster, events=True) - before <= 2 * (WRITE_BURST + lasted + 1)
            wait_until(lambda: len(events(cluster)) == 8, 40)
            placed = [each["involvedObject"]["name"] for each in events(cluster)]
            assert sorted(placed) == [f"o{number}" for number in range(8)], "an Event is one object"
            wait_until_quiet(cluster, 5)  # agents that agree write nothing
            assert node.free() == left
        assert node.free() == left

    on_imitated_node(cluster, test)


def test_a_token_file_that_is_wrong_for_a_while(cluster: ControlPlane, tmp_path: Path) -> None:
    """The agent has the service account of its pod, as kubelet mounts it."""
    account = tmp_path / "account"
    account.mkdir()
    shutil.copy(cluster.directory / "certs/apiserver.crt", account / "ca.crt")
    (account / "namespace").write_text("topoproxy-system")
    token = account / "token"
    token.write_text(bound_token(cluster))

    def test(node: ImitatedNode) -> None:
        was_good = token.read_text()
        token.write_text("invalid")
        cluster.delete("/api/v1/namespaces/topoproxy-system/pods/agent-n1?gracePeriodSeconds=0")
        # The API server remembers for ten seconds that a token is good.
        wait_until(lambda: is_refused(cluster, was_good), 30)
        container = node.launch(owner())
        wait_until(lambda: "Unauthorized" in node.agent.log.read_text(), 30)
        assert node.free() == FREE
        token.write_text(bound_token(cluster))
        left = str(CpuSet.parse(FREE) - CpuSet.parse(node.daemon_node.cpus(container)))
        seconds = wait_until(lambda: node.free() == left, 30)
        print(f"current {seconds:.1f} s after the token was good again")

    on_imitated_node(cluster, test, account=account)
