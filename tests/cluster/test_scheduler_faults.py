"""Faults in a burst under the real kube-scheduler: no CPU is promised twice, and all pods are bound."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from proxy.extender.process import EXIT_LEASE_LOST
from proxy.scheduler.assumed_pods import LOST_S
from tests.cluster.extender_process import SCHEDULER, ExtenderProcess, extender_config
from tests.cluster.scheduling_cluster import SchedulingCluster
from tests.cluster.silent_relay import SilentRelay
from tests.cluster.wrong_clock import WrongClock
from tests.scheduler.objects import pod

T = TypeVar("T")
PART = 0.6
"""The part of all CPUs that pods may request and fit in any order."""
LSR_EVERY = 3


def until(holds: Callable[[], T], seconds: float = 30.0) -> T:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def burst(
    scheduling: SchedulingCluster, fault: Callable[[], None], part: float = PART, scheduler: str = SCHEDULER
) -> int:
    """Create pods, and cause a fault once some are bound; returns how many pods there are."""
    sizes = scheduling.pod_sizes(part)
    half = len(sizes) // 2
    scheduling.fleet.create_pods("a", sizes[:half], scheduler, lsr_every=LSR_EVERY)
    until(lambda: scheduling.fleet.decided_count >= half // 4)
    fault()
    scheduling.fleet.create_pods("b", sizes[half:], scheduler, lsr_every=LSR_EVERY)
    return len(sizes)


def until_serving(extender: ExtenderProcess) -> None:
    """Wait until the extender is ready; start it again if it has ended, as kubelet does."""

    def serves() -> bool:
        assert extender.process is not None
        if extender.process.poll() is not None:
            extender.start(wait=False)
        return extender.is_ready()

    until(serves, 60)


def test_an_extender_that_is_killed(scheduling: SchedulingCluster) -> None:
    def fault() -> None:
        scheduling.extender.kill()
        time.sleep(1)
        scheduling.extender.start(wait=False)  # serves after the lease of the one that was killed

    scheduling.until_all_run(burst(scheduling, fault))


def test_an_api_server_that_is_killed(scheduling: SchedulingCluster) -> None:
    def fault() -> None:
        scheduling.plane.stop_api()
        time.sleep(1)
        scheduling.plane.start_api()

    count = burst(scheduling, fault)
    until_serving(scheduling.extender)
    # A bind whose answer was lost with the API server counts until LOST_S.
    scheduling.until_all_run(count, quiet_s=LOST_S + 15)


def test_objects_that_are_five_seconds_old(scheduling: SchedulingCluster) -> None:
    scheduling.fleet.delay_s = 5.0
    try:
        scheduling.until_all_run(burst(scheduling, lambda: None))
    finally:
        scheduling.fleet.delay_s = 1.0


def test_nodes_that_vanish_between_filter_and_bind(scheduling: SchedulingCluster) -> None:
    raw = pod("between", 2)
    request = {"Pod": raw, "Nodes": None, "NodeNames": ["f0", "f1"]}

    def fits() -> list[str]:
        # In a burst, the answer may be an error: whether the pod fits depends on the order of pending pods.
        answer = json.loads(scheduling.extender.get("/filter", trusted=True, body=request))
        return answer.get("NodeNames") or []

    def fault() -> None:
        before = until(fits)
        for name in ("f0", "f1"):
            scheduling.plane.delete(f"/api/v1/nodes/{name}")
        until(lambda: not fits())
        metadata = raw["metadata"]
        named = {"PodName": "between", "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"]}
        reported = scheduling.extender.get("/bind", trusted=True, body={**named, "Node": before[0]})
        assert f"cannot bind {metadata['namespace']}/between to {before[0]}" in reported

    try:
        scheduling.until_all_run(burst(scheduling, fault, 0.5))
    finally:
        for name in ("f0", "f1"):
            if scheduling.plane.get(f"/api/v1/nodes/{name}") is None:
                scheduling.fleet.create_node(name)


def test_a_clock_that_is_ten_minutes_ahead_and_is_set_right(
    scheduling: SchedulingCluster, tmp_path: Path
) -> None:
    clock = WrongClock(tmp_path)
    clock.set(600)
    scheduling.extender.stop()
    scheduling.extender.start(environment=clock.environment)
    try:
        scheduling.until_all_run(burst(scheduling, lambda: clock.set(0)))
    finally:
        scheduling.extender.stop()
        scheduling.extender.start()


def test_a_lease_that_moves_while_its_holder_is_paused(scheduling: SchedulingCluster, tmp_path: Path) -> None:
    """The other replica's clock is ten minutes ahead: by that clock, each renewal is long past."""
    first, second = scheduling.extender, ExtenderProcess(scheduling.plane)
    clock, relay = WrongClock(tmp_path), SilentRelay(first.port)
    clock.set(600)
    config = extender_config(first, urlPrefix=relay.server)
    scheduling.plane.start_scheduler(**{**config, "profiles": [{"schedulerName": "by-relay"}]})
    second.start(wait=False, environment=clock.environment)
    try:
        until(lambda: second.answers("/livez"))
        time.sleep(2)
        assert first.is_ready()
        assert "another replica holds the lease" in second.get("/readyz")
        assert first.process is not None

        def fault() -> None:
            first.process.send_signal(signal.SIGSTOP)
            second.until_ready(40)
            relay.forward_to(second.port)
            first.process.send_signal(signal.SIGCONT)

        count = burst(scheduling, fault, scheduler="by-relay")
        assert first.process.wait(20) == EXIT_LEASE_LOST, "it ends rather than bind without the lease"
        scheduling.until_all_run(count)
    finally:
        second.stop()
        first.kill()
        first.start()
        relay.close()
