"""Kills during calls: the daemon is killed in each phase of a container's life, and containerd once.

Containerd is suspended to prolong a phase. After each kill no container may share an owner's CPUs, and a
retry of the call, as kubelet does it, must succeed.

    python3 vm_crash.py cgroupfs|systemd
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import grpc
from cri import CREATED, EXITED, RUNNING, Cri
from vm_guest import (
    ALL,
    LONG_S,
    RUNTIME,
    SOCKET,
    GuestDaemon,
    node_cpus,
    place_in,
    seen_in_container,
    step,
    wait,
)
from vm_pools import BE_KINDS, KINDS, SHARED_KINDS, GuestNode, frozen_runtime

from proxy.api.cri import api_pb2 as pb
from proxy.model.idset import CpuSet, Mask

OTHER_KINDS = (*SHARED_KINDS, *BE_KINDS)
OWN = CpuSet(list(node_cpus(1))[:4])


class OverlapWatch:
    """A thread that checks continuously whether another container runs on an owner's CPUs."""

    def __init__(self, node: GuestNode) -> None:
        self._groups = [node.group(name) for name in OTHER_KINDS]
        self._owner: Path | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.samples, self.overlaps = 0, dict[str, float]()
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(0.05):
            owner = self._owner
            if owner is None:
                continue
            with suppress(OSError):
                own = place_in(owner)  # if a limit is set, a wrong set in the file has no effect
                for directory in self._groups:
                    found = place_in(directory)
                    both = own.effective & reduce(or_, found.tasks, found.effective)
                    if both and own.tasks and self._owner is owner:
                        self.overlaps.setdefault(f"{directory.name} runs on {both}", time.monotonic())
                self.samples += 1

    def owner(self, directory: Path | None) -> None:
        """Set the cgroup of the owner to watch; None for none."""
        self._owner = directory

    def end(self) -> None:
        self._over.set()
        self._thread.join()


class CrashScenario:
    """The daemon, its client, and a client of the runtime's own socket."""

    def __init__(self, driver: str) -> None:
        self.daemon, self.node, self.direct = GuestDaemon(), GuestNode(driver), Cri(RUNTIME, "")

    def restart_daemon(self) -> None:
        """Restart the killed daemon, with a new client."""
        self.daemon.start()
        old, self.node.cri = self.node.cri, Cri(SOCKET, "")
        self.node.cri.adopt(old)
        old.close()
        wait("the daemon to be ready", lambda: bool(self.daemon.status()["ready"]))

    def kill_during(self, call: Callable[[], grpc.Future], when: Callable[[], object]) -> None:
        """Send a call to a frozen runtime, kill the daemon at a moment, and start it again.

        Args:
            call: Sends it.
            when: Returns at the moment at which the daemon must be killed.
        """
        with frozen_runtime():
            future = call()
            when()
            assert not future.done()
            self.daemon.kill9()
        with suppress(grpc.RpcError):
            future.result()
        self.restart_daemon()

    def states(self, pod: str) -> dict[str, int]:
        """Containers of a pod at the runtime, by id."""
        return {c.id: c.state for c in self.direct.list() if c.pod_sandbox_id == pod}

    def start_as_kubelet(self, pod: str, attempt: int) -> str:
        """Act like kubelet: use the existing container or create one, start it, and return its id."""
        node = self.node
        for container, state in self.states(pod).items():
            if state == RUNNING:
                return container
            with suppress(grpc.RpcError):
                if state == CREATED:
                    node.cri.start(container)
                    return container
            node.cri.remove(container)
        container = node.cri.create(pod, attempt=attempt, timeout=LONG_S, **KINDS["lse"].resources)
        node.cri.start(container)
        return container

    def check_owner(self, container: str) -> None:
        """Check that a container has its CPUs exclusively: in kernel, container and status."""
        self.node.ids["lse"] = container
        self.node.check(("lse",), OWN, Mask([1]), limit=LONG_S)
        self.node.check(OTHER_KINDS, ALL - OWN, limit=LONG_S)
        assert seen_in_container(self.node.cri, container) == (OWN, Mask([1]))
        (row,) = self.daemon.status()["exclusive"]
        assert str(OWN) in str(row), row

    def end_owner(self) -> None:
        """The owner ends, and all containers may use its CPUs."""
        self.node.cri.stop(self.node.ids.pop("lse"))
        self.node.check(OTHER_KINDS, ALL, limit=LONG_S)
        assert self.daemon.status()["exclusive"] == []


def create(scenario: CrashScenario, pod: str) -> grpc.Future:
    request = scenario.node.cri.create_request(pod, **KINDS["lse"].resources)
    return scenario.node.cri.method("CreateContainer").future(request, timeout=LONG_S)


def after(seconds: float) -> Callable[[], None]:
    """Return a function that waits: nothing shows that a call has arrived at a suspended runtime."""
    return lambda: time.sleep(seconds)


def method(scenario: CrashScenario, name: str, **fields: Any) -> grpc.Future:
    return scenario.node.cri.method(name).future(getattr(pb, f"{name}Request")(**fields), timeout=LONG_S)


def in_a_create(scenario: CrashScenario, watch: OverlapWatch) -> None:
    """Killed at three times during a create; the runtime may create the container or not."""
    moments = {
        "at once": after(0.05),
        "a moment after": after(0.3),
        "when others had left": lambda: scenario.node.check(OTHER_KINDS, ALL - OWN, limit=LONG_S),
    }
    for number, (moment, when) in enumerate(moments.items()):
        pod = scenario.node.pod("lse", OWN, f"create{number}")
        scenario.kill_during(lambda pod=pod: create(scenario, pod), when)
        found = sorted(scenario.states(pod).values())
        container = scenario.start_as_kubelet(pod, 1)
        scenario.check_owner(container)
        watch.owner(scenario.node.group("lse"))
        made = "it was made" if found else "nothing was made"
        step(f"killed in a create, {moment} ({made}): after a retry it owns {OWN}")
        watch.owner(None)
        scenario.end_owner()


def around_a_start(scenario: CrashScenario, watch: OverlapWatch) -> None:
    """Killed between create and start, and while the start is under way."""
    node = scenario.node
    pod = node.pod("lse", OWN, "between")
    container = node.cri.create(pod, timeout=LONG_S, **KINDS["lse"].resources)
    scenario.daemon.kill9()
    scenario.restart_daemon()
    node.check(OTHER_KINDS, ALL - OWN, limit=LONG_S)
    node.cri.start(container)
    scenario.check_owner(container)
    watch.owner(node.group("lse"))
    step("killed between create and start: started after that, owns its CPUs")
    watch.owner(None)
    scenario.end_owner()

    pod = node.pod("lse", OWN, "start")
    container = node.cri.create(pod, timeout=LONG_S, **KINDS["lse"].resources)
    scenario.kill_during(lambda: method(scenario, "StartContainer", container_id=container), after(2))
    found = scenario.states(pod)[container]  # a runtime may abandon a start whose client has disconnected
    container = scenario.start_as_kubelet(pod, 1)
    scenario.check_owner(container)
    watch.owner(node.group("lse"))
    came = {RUNNING: "was started", CREATED: "was not started", EXITED: "was abandoned"}[found]
    step(f"killed in a start (it {came}): after a retry the container runs and owns its CPUs")


def in_an_update(scenario: CrashScenario) -> None:
    """Killed while an update is under way, which names all CPUs."""
    node, all_cpus = scenario.node, str(ALL)
    before = node.snapshot()
    linux = {"cpuset_cpus": all_cpus, "cpu_shares": 512}
    scenario.kill_during(
        lambda: method(scenario, "UpdateContainerResources", container_id=node.ids["ls"], linux=linux),
        after(2),
    )
    took = wait("all to be as before", lambda: node.snapshot() == before)
    step(f"killed in an update that names all CPUs: all as before after {took:.1f} s")


def containerd_ends(scenario: CrashScenario, driver: str) -> None:
    """The runtime is killed: containers keep their CPUs; after its restart pods are placed as before."""
    node = scenario.node
    before = node.snapshot()
    pids = subprocess.check_output(["pidof", "containerd"], text=True).split()
    subprocess.run(["kill", "-9", *pids], check=True)
    step("containerd is killed")
    assert node.snapshot() == before
    if driver == "systemd":
        subprocess.run(["systemctl", "restart", "containerd"], check=True)
    else:
        with Path("/out/containerd.log").open("a") as log:
            subprocess.Popen(["containerd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def answers() -> bool:
        with suppress(grpc.RpcError):
            return bool(node.cri.list())
        return False

    step(f"containerd answers through the daemon after {wait('containerd', answers):.1f} s")
    assert node.snapshot() == before
    node.run("lsr", CpuSet([max(ALL)]))
    node.check(("lsr",), CpuSet([max(ALL)]))
    node.check(SHARED_KINDS, ALL - OWN - CpuSet([max(ALL)]), limit=LONG_S)
    node.cri.stop(node.ids.pop("lsr"))
    node.check(OTHER_KINDS, ALL - OWN, limit=LONG_S)
    step("a pod came and went on the new containerd")


def in_a_stop(scenario: CrashScenario) -> None:
    """Killed while the owner is being stopped: its CPUs are released."""
    container = scenario.node.ids.pop("lse")
    scenario.kill_during(lambda: method(scenario, "StopContainer", container_id=container), after(2))

    def ended() -> bool:
        (state,) = [c.state for c in scenario.direct.list() if c.id == container]
        if state != EXITED:
            scenario.node.cri.stop(container)
        return bool(state == EXITED)

    wait("the owner to end", ended)
    scenario.node.check(OTHER_KINDS, ALL, limit=LONG_S)
    step("killed in a stop: the CPUs are released")


def main() -> None:
    scenario = CrashScenario(sys.argv[1])
    for kind in OTHER_KINDS:
        scenario.node.run(kind)
    scenario.node.check(OTHER_KINDS, ALL)
    watch = OverlapWatch(scenario.node)
    in_a_create(scenario, watch)
    around_a_start(scenario, watch)
    in_an_update(scenario)
    containerd_ends(scenario, sys.argv[1])
    if sys.argv[1] == "systemd":
        before = scenario.node.snapshot()
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        took = wait("systemd's values to be repaired", lambda: scenario.node.snapshot() == before)
        step(f"daemon-reload: all as before after {took:.1f} s")
    watch.end()
    assert not watch.overlaps, watch.overlaps
    step(f"in {watch.samples} samples {watch.overlaps or 'no container'} was seen on an owner's CPUs")
    in_a_stop(scenario)
    problems = [p for p in scenario.daemon.status()["problems"] if "runc before 1.1.6" not in str(p)]
    assert not problems, problems
    assert scenario.daemon.stop() == 0
    scenario.node.check(OTHER_KINDS, ALL)
    step("all is given back")


if __name__ == "__main__":
    main()
