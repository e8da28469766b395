"""Random calls of a peer, some of which fail, and of a CRI client: owned CPUs are never shared."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from proxy.api.cri import api_pb2 as cri
from proxy.demo.client import CriClient, DemoPod
from proxy.engine.invariants import violations
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos

STEPS = 40
FAILING = ("RunPodSandbox", "CreateContainer", "StartContainer", "StopContainer", "UpdateContainerResources")
FAILURES = (grpc.RpcError, RuntimeCallError, UnavailableError)


class RandomClients:
    """Clients that make random calls: by a peer, by the CRI proxy, and by both."""

    def __init__(self, node: Any, seed: int) -> None:
        self.node = node
        self.dice = random.Random(seed)
        self.cri_only = CriClient(str(node.directory / "cri.sock"))
        self.both = node.peer_of(node.directory / "cri.sock")
        self.running: list[tuple[Any, Any]] = []
        self.number = 0

    def spec(self) -> DemoPod:
        self.number += 1
        name, kind = f"p{self.number}", self.dice.randrange(5)
        if kind == 0:
            first = self.dice.randrange(1, 14)
            return DemoPod(name, "LSE", KubeQos.GUARANTEED, cpuset=f"{first}-{first + 1}", cpus=2)
        if kind == 1:
            return DemoPod(name, "", KubeQos.GUARANTEED, cpus=self.dice.randrange(1, 4))
        if kind == 2:
            return DemoPod(name, "BE", KubeQos.BEST_EFFORT)
        return DemoPod(name, self.dice.choice(["LS", ""]))

    def step(self) -> None:
        client = self.dice.choice([self.node.peer, self.node.peer, self.both, self.cri_only])
        if self.dice.random() < 0.25:
            self.node.runtime.fail_next(self.dice.choice(FAILING), "not now")
        act = self.dice.random()
        with contextlib.suppress(*FAILURES):
            if act < 0.6 or not self.running:
                pod = client.run_pod(self.spec())
                client.create(pod)
                self.running.append((client, pod))
                if self.dice.random() < 0.9:
                    client.start(pod.container_id)
                return
            client, pod = self.dice.choice(self.running)
            if act < 0.7:
                client.update(pod.container_id, cri.LinuxContainerResources(cpuset_cpus="0-15"))
            elif act < 0.8:
                self.node.runtime.exit(pod.container_id)
            else:
                self.running.remove((client, pod))
                with contextlib.suppress(*FAILURES, KeyError):
                    client.stop(pod.container_id)
                client.end_pod(pod)

    def close(self) -> None:
        self.cri_only.close()
        self.both.close()


def misplaced(node: Any) -> list[str]:
    """Broken invariants, and the containers whose cgroup has CPUs that another container owns."""
    state, bad = node.executor.state, violations(node.executor.state)
    for container in state.containers.values():
        cpus = CpuSet.parse(node.cpus(container.id) or "")
        owned = CpuSet()
        for owner in state.containers.values():
            if owner.placement.exclusive and owner.owner != container.owner and owner.phase != "exited":
                owned |= owner.placement.exclusive
        hard = container.placement.pool != "be"  # LSR's are shared with BE
        if hard and cpus & owned:
            bad.append(f"{container.ref} runs on {cpus & owned}")
    return bad


@pytest.mark.parametrize("seed", range(2))
def test_owned_cpus_have_one_owner(run_scenario: Callable[..., None], in_thread: Any, seed: int) -> None:
    async def scenario(node: Any) -> None:
        clients = RandomClients(node, seed)
        for _ in range(STEPS):
            await in_thread(clients.step)
            assert not misplaced(node)
        await node.until(lambda: not misplaced(node))

        def reconciled() -> bool:
            in_runtime = {i for i, c in node.runtime.containers.items() if c.state == cri.CONTAINER_RUNNING}
            in_daemon = {c.id for c in node.executor.state.containers.values() if c.phase == "running"}
            return in_runtime == in_daemon

        await node.until(reconciled)
        await node.until(lambda: not misplaced(node))
        for container in list(node.executor.state.containers.values()):
            if container.phase == "running":
                expected = str(node.executor.state.desired_cpus(container))
                await node.until(
                    lambda container_id=container.id, expected=expected: node.cpus(container_id) == expected
                )
        clients.close()

    run_scenario(scenario)
