"""Requests of intercepted methods that are not one plain gRPC message."""

import pytest

from proxy.engine.node_events import ModeChanged
from proxy.model.grpc_status import GrpcStatus
from proxy.model.mode import NodeMode
from proxy.relay.events import RequestAnomaly
from proxy.telemetry import metrics

SERVICE = "/runtime.v1.RuntimeService/"


@pytest.mark.parametrize("kind", RequestAnomaly)
def test_it_is_counted_reported_and_followed_by_a_reconcile(run_scenario, kind):
    async def scenario(world):
        world.executor.reconcile_requested.clear()
        world.wire.anomaly(f"{SERVICE}StopContainer", kind)
        assert world.executor.telemetry.value(metrics.CALLS_MALFORMED) == 1
        assert f'a request is not one plain message method=StopContainer reason="{kind}"' in world.logged
        assert world.executor.reconcile_requested.is_set()

    run_scenario(scenario)


@pytest.mark.parametrize("kind", RequestAnomaly)
@pytest.mark.parametrize("path", [f"{SERVICE}CreateContainer", f"{SERVICE[1:]}CreateContainer"])
def test_a_create_that_cannot_be_read_and_might_be_executed_is_refused(run_scenario, kind, path):
    async def scenario(world):
        refusal = world.wire.anomaly(path, kind)
        if kind in (RequestAnomaly.COMPRESSED, RequestAnomaly.TRAILERS):
            assert refusal == (GrpcStatus.UNIMPLEMENTED, f"cannot place the container: the request {kind}")
        else:
            assert refusal is None
        assert world.wire.anomaly(f"{SERVICE}UpdateContainerResources", kind) is None

    run_scenario(scenario)


def test_nothing_is_refused_in_observe_mode_or_on_a_released_node(run_scenario):
    async def scenario(world):
        assert world.wire.anomaly(f"{SERVICE}CreateContainer", RequestAnomaly.COMPRESSED) is None

    async def released(world):
        world.executor.store.handle(ModeChanged(NodeMode.RELEASED))
        assert world.wire.anomaly(f"{SERVICE}CreateContainer", RequestAnomaly.COMPRESSED) is None

    run_scenario(scenario, mode=NodeMode.OBSERVE)
    run_scenario(released)


def test_an_answer_that_cannot_be_read_leads_to_a_reconcile(run_scenario):
    async def scenario(world):
        sandbox = await world.pod("a")
        call = await world.begin(sandbox)
        world.executor.reconcile_requested.clear()
        world.wire.response(call, b"\x0a\xff")
        assert world.executor.reconcile_requested.is_set()
        assert any("cannot decode an answer" in line for line in world.logged)
        world.wire.finished(call, 0)

    run_scenario(scenario)


def test_refusals_of_one_container_are_not_written_again_and_again(run_scenario):
    async def scenario(world):
        owner = await world.pod("a", "LSR", cpus="2-3")
        await world.run(owner)
        other = await world.pod("b", "LSR", cpus="2-3")
        for _ in range(1000):
            call = await world.begin(other)
            assert call.refused is not None
            world.wire.finished(call, None)
        lines = [line for line in world.logged if line.startswith("rejected ")]
        assert 1 <= len(lines) <= 5
        assert world.executor.telemetry.value(metrics.CREATES_REFUSED) == 1000

    run_scenario(scenario)


def test_warnings_that_a_client_can_cause_are_not_written_again_and_again(run_scenario):
    async def scenario(world):
        for number in range(2000):
            world.executor.telemetry.problem("cannot continue a connection", err=f"reason {number}")
            world.executor.telemetry.problem("a fault", pod=f"ns/pod-{number}")
        assert len(world.logged) < 300

    run_scenario(scenario)
