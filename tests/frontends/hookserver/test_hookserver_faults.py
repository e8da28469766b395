"""Faults between a peer and the hook server: failed calls, lost clients, a hanging runtime, bad messages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from proxy.api.cri import api_pb2 as cri
from proxy.api.koordinator import hook_pb2 as pb
from proxy.demo.client import CallRefused, CriClient, DemoPod
from proxy.engine.node_events import ModeChanged
from proxy.frontends.hookserver import pending_calls
from proxy.frontends.hookserver.foreign_call import ForeignCall
from proxy.frontends.hookserver.server import HookServer
from proxy.frontends.hookserver.servicer import RuntimeLookup
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.mode import NodeMode
from proxy.model.workload import KubeQos, Phase
from proxy.telemetry import metrics
from tests.testkit.captured_log import telemetry

LSE = DemoPod("lse", "LSE", cpuset="2-3", cpus=2)
SLOW = "cpuManagerPolicy: static\nreconcilePeriod: 1h\n"


def container_request(**more: Any) -> pb.ContainerResourceHookRequest:
    request = pb.ContainerResourceHookRequest(pod_cgroup_parent="/kubepods/burstable/podx")
    request.pod_meta.name, request.pod_meta.uid, request.pod_meta.namespace = "p", "no-such-uid", "ns"
    request.container_meta.name = "main"
    request.container_meta.id = more.get("container_id", "")
    request.container_resources.cpuset_cpus = "0-7"
    request.container_resources.cpu_shares = 77
    request.pod_labels.update(more.get("labels", {}))
    return request


def code(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    rpc_error: Any = error.value
    status: grpc.StatusCode = rpc_error.code()
    return status


# -- calls that fail at the runtime ---------------------------------------------------------------------


def test_a_repeated_create_after_a_failure_makes_one_container(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        ls = await in_thread(node.peer.launch, DemoPod("ls", "LS"))
        pod = await in_thread(node.peer.run_pod, LSE)
        node.runtime.fail_next_create()
        with pytest.raises(RuntimeCallError, match="no space left"):
            await in_thread(node.peer.create, pod)
        pod.attempts = iter((0,))  # kubelet retries with the same attempt
        created = await in_thread(node.peer.create, pod)
        await in_thread(node.peer.start, created)
        assert set(node.executor.state.containers) == {ls.container_id, created}
        assert (node.cpus(created), node.cpus(ls.container_id)) == ("2-3", "0-1,4-15")
        assert node.executor.telemetry.value(metrics.CREATES_PLACED) == 2

    run_scenario(scenario)


def test_a_failed_create_without_a_retry_is_abandoned(
    run_scenario: Callable[..., None], in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_calls, "CREATE_TIMEOUT_S", 0.0)

    async def scenario(node: Any) -> None:
        ls = await in_thread(node.peer.launch, DemoPod("ls", "LS"))
        pod = await in_thread(node.peer.run_pod, LSE)
        node.runtime.fail_next_create()
        with pytest.raises(RuntimeCallError):
            await in_thread(node.peer.create, pod)
        await node.until(lambda: node.cpus(ls.container_id) == "0-15")
        assert set(node.executor.state.containers) == {ls.container_id}

    run_scenario(scenario)


def test_a_failed_sandbox_releases_its_reserved_cpus(
    run_scenario: Callable[..., None], in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_calls, "POD_TIMEOUT_S", 0.0)

    async def scenario(node: Any) -> None:
        await in_thread(node.peer.hooks.call_stage, "PreRunPodSandbox", pod_request(**TWO_CPUS))
        (pod,) = node.executor.state.pods.values()
        assert len(pod.reserved_for_pod.cpus) == 2
        await node.until(lambda: not node.executor.state.pods)
        assert not node.pending.pods

    run_scenario(scenario, RESERVES_FOR_POD)


def pod_request(**resources: int) -> pb.PodSandboxHookRequest:
    request = pb.PodSandboxHookRequest(cgroup_parent="/kubepods/podu")
    request.pod_meta.name, request.pod_meta.uid, request.pod_meta.namespace = "p", "u", "ns"
    for name, value in resources.items():
        setattr(request.resources, name, value)
    return request


TWO_CPUS: dict[str, Any] = {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000}
RESERVES_FOR_POD = SLOW + "topologyManagerPolicy: best-effort\ntopologyManagerScope: pod\n"


def test_a_repeated_sandbox_request_keeps_the_reserved_cpus(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        for _ in range(3):
            await in_thread(node.peer.hooks.call_stage, "PreRunPodSandbox", pod_request(**TWO_CPUS))
            (pod,) = node.executor.state.pods.values()
            assert str(pod.reserved_for_pod.cpus) == "0,8"
        assert len(node.executor.state.runtime.arriving_sandboxes) == 1

    run_scenario(scenario, RESERVES_FOR_POD)


def test_a_sandbox_reported_by_hook_and_by_cri_is_one_pod(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        config = cri.PodSandboxConfig(linux=cri.LinuxPodSandboxConfig(cgroup_parent="/kubepods/podu"))
        config.metadata.name, config.metadata.uid, config.metadata.namespace = "p", "u", "ns"
        config.linux.resources.CopyFrom(cri.LinuxContainerResources(**TWO_CPUS))
        await in_thread(node.peer.hooks.call_stage, "PreRunPodSandbox", pod_request(**TWO_CPUS))
        with CriClient(str(node.directory / "cri.sock")) as client:
            request = cri.RunPodSandboxRequest(config=config)
            made = (await in_thread(client.call, "RunPodSandbox", request)).pod_sandbox_id
            assert str(node.executor.state.pods[made].reserved_for_pod.cpus) == "0,8"
            await node.until(lambda: set(node.executor.state.pods) == {made})
            # Requested again while the old sandbox exists: the old one is not mistaken for the new one.
            await in_thread(node.peer.hooks.call_stage, "PreRunPodSandbox", pod_request(**TWO_CPUS))
            await node.pending.check()
            assert len(node.executor.state.runtime.arriving_sandboxes) == 1
            await in_thread(client.end_pod, made)
            config.metadata.attempt = 1
            again = (await in_thread(node.peer.call, "RunPodSandbox", request)).pod_sandbox_id
            await node.until(lambda: set(node.executor.state.pods) == {again})
            assert str(node.executor.state.pods[again].reserved_for_pod.cpus) == "0,8"
        assert not node.executor.state.runtime.arriving_sandboxes

    run_scenario(scenario, RESERVES_FOR_POD)


def test_a_failed_start_leaves_the_container_created_with_its_cpus(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        pod = await in_thread(node.peer.run_pod, LSE)
        created = await in_thread(node.peer.create, pod)
        node.runtime.fail_next("StartContainer", "no such file")
        with pytest.raises(RuntimeCallError, match="no such file"):
            await in_thread(node.peer.start, created)
        await node.until(lambda: not node.executor.state.inflight.of(created))
        assert node.executor.state.containers[created].phase is Phase.CREATED
        await in_thread(node.peer.start, created)
        assert node.cpus(created) == "2-3"

    run_scenario(scenario)


def test_a_failed_stop_keeps_the_containers_cpus(run_scenario: Callable[..., None], in_thread: Any) -> None:
    async def scenario(node: Any) -> None:
        lse = await in_thread(node.peer.launch, LSE)
        node.runtime.fail_next("StopContainer", "it will not end")
        with pytest.raises(RuntimeCallError):
            await in_thread(node.peer.stop, lse.container_id)
        node.runtime.fail_next("StopPodSandbox", "it will not end")
        with pytest.raises(RuntimeCallError):
            await in_thread(node.peer.end_pod, lse)
        assert node.owners() == ["2-3"]
        assert node.executor.state.containers[lse.container_id].phase is Phase.RUNNING

    run_scenario(scenario)


def test_a_start_without_post_start_call_is_found_in_the_list(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        node.peer.skips.add("PostStartContainer")
        lse = await in_thread(node.peer.launch, LSE)
        await node.until(lambda: not node.executor.state.inflight.of(lse.container_id))
        assert node.executor.state.containers[lse.container_id].phase is Phase.RUNNING

    run_scenario(scenario, SLOW)


def test_a_peer_that_calls_only_before_creates_is_enough(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        node.peer.skips.update(
            ("PreRunPodSandbox", "PreStartContainer", "PostStartContainer", "PostStopContainer")
        )
        ls = await in_thread(node.peer.launch, DemoPod("ls", "LS"))
        lse = await in_thread(node.peer.launch, LSE)
        assert (node.cpus(lse.container_id), node.cpus(ls.container_id)) == ("2-3", "0-1,4-15")
        ids = {ls.container_id, lse.container_id}
        await node.until(lambda: set(node.executor.state.containers) == ids)
        await in_thread(node.peer.stop, lse.container_id)
        await node.until(lambda: node.cpus(ls.container_id) == "0-15")

    run_scenario(scenario)


# -- invalid messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage",
    ["PreStartContainer", "PostStartContainer", "PreUpdateContainerResources", "PostStopContainer"],
)
@pytest.mark.parametrize("container_id", ["", "unknown", "x" * 5000])
def test_unknown_containers_are_not_changed(
    run_scenario: Callable[..., None], in_thread: Any, stage: str, container_id: str
) -> None:
    async def scenario(node: Any) -> None:
        request = container_request(container_id=container_id)
        answer = await in_thread(node.peer.hooks.call_stage, stage, request)
        assert answer.container_resources == request.container_resources
        assert not node.executor.state.containers
        assert not node.pending.starts

    run_scenario(scenario)


def test_a_pod_that_the_runtime_does_not_know_is_not_placed(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        request = container_request()
        answer = await in_thread(node.peer.hooks.call_stage, "PreCreateContainer", request)
        assert answer.container_resources == request.container_resources
        strict = container_request(labels={"koordinator.sh/qosClass": "LSE"})
        with pytest.raises(grpc.RpcError) as refused:
            await in_thread(node.peer.hooks.call_stage, "PreCreateContainer", strict)
        assert code(refused) is grpc.StatusCode.UNAVAILABLE
        assert not node.executor.state.containers
        assert any("does not know its sandbox" in p["what"] for p in node.executor.telemetry.problems())

    run_scenario(scenario)


def test_garbage_is_refused_and_the_next_request_is_answered(
    run_scenario: Callable[..., None], in_thread: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(node: Any) -> None:
        for stage in ("PreRunPodSandbox", "PreCreateContainer", "PreUpdateContainerResources"):
            for junk in (b"\xff" * 40, b"\x0a\xff", b"\x0a\x03\x0a\x01\xff"):
                with pytest.raises(grpc.RpcError) as refused:
                    await in_thread(node.peer.hooks.call_stage, stage, junk)
                assert code(refused) is grpc.StatusCode.INVALID_ARGUMENT
        assert node.executor.telemetry.value(metrics.REQUESTS_UNDECODABLE) == 9
        assert node.executor.telemetry.value(metrics.HOOK_SERVER_REQUESTS_REFUSED) == 9
        assert not caplog.records, "gRPC logs a traceback for what it cannot decode"
        await in_thread(node.peer.hooks.call_stage, "PreRunPodSandbox", b"")
        await in_thread(node.peer.hooks.call_stage, "PostStopPodSandbox", b"")
        with pytest.raises(grpc.RpcError) as unknown:
            await in_thread(node.peer.hooks.call_stage, "PreRemoveRunPodSandbox", b"")
        assert code(unknown) is grpc.StatusCode.UNIMPLEMENTED
        lse = await in_thread(node.peer.launch, LSE)
        assert node.cpus(lse.container_id) == "2-3"

    run_scenario(scenario)


# -- a runtime that does not answer, and clients that do not wait ----------------------------------------


def test_a_hanging_runtime_does_not_block_a_call_for_ever(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        ls = await in_thread(node.peer.launch, DemoPod("ls", "LS"))
        pod = await in_thread(node.peer.run_pod, LSE)
        done = threading.Event()
        undo = node.runtime.before("ListPodSandbox", lambda _: done.wait(60))
        with pytest.raises(grpc.RpcError) as refused:
            await in_thread(node.peer.create, pod)  # an owner is refused rather than run on any CPU
        assert code(refused) is grpc.StatusCode.UNAVAILABLE
        done.set()
        undo()
        pod.attempts = iter((0,))
        created = await in_thread(node.peer.create, pod)
        await in_thread(node.peer.start, created)
        assert (node.cpus(created), node.cpus(ls.container_id)) == ("2-3", "0-1,4-15")

    run_scenario(scenario, SLOW + "callTimeout: 500ms\n")


def test_a_call_ends_only_once() -> None:
    ended: list[int | None] = []

    async def scenario() -> None:
        wire: Any = SimpleNamespace(
            request=lambda call: call.lost(), finished=lambda call, status: ended.append(status)
        )
        call = ForeignCall(wire, "StartContainer", b"")
        waits = asyncio.create_task(call.decide())
        await asyncio.sleep(0)
        call.ended(0)
        call.refuse(2, "too late")
        call.release()
        assert (ended, call.done, waits.done()) == ([None], True, False)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)

    asyncio.run(scenario())


@pytest.mark.parametrize("decide", [lambda call: call.release(), lambda call: call.refuse(2, "no")])
def test_a_call_that_is_cancelled_and_decided_in_one_turn_is_lost(
    decide: Callable[[ForeignCall], None],
) -> None:
    ended: list[int | None] = []

    async def scenario() -> None:
        wire: Any = SimpleNamespace(
            request=lambda call: None, finished=lambda call, status: ended.append(status)
        )
        call = ForeignCall(wire, "CreateContainer", b"")
        waits = asyncio.create_task(call.decide())
        await asyncio.sleep(0)
        waits.cancel()
        decide(call)
        await asyncio.gather(waits, return_exceptions=True)
        assert ended == [None]

    asyncio.run(scenario())


def test_the_oldest_pending_calls_are_dropped_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "MOST_PENDING", 2)
    lost: list[str] = []
    calls = pending_calls.CallTable[str](10.0, lambda: 0.0)
    for name in ("a", "b", "b", "c"):
        call: Any = SimpleNamespace(lost=lambda name=name: lost.append(name))
        calls.add(name, call)
    assert lost == ["b", "a"]
    assert ("b" in calls, "c" in calls) == (True, True)


def test_a_failed_list_requests_an_early_reconcile() -> None:
    async def fails(*_: Any) -> None:
        raise UnavailableError("cannot reach it")

    reported: list[str] = []
    executor: Any = SimpleNamespace(
        telemetry=telemetry(reported),
        reconcile_requested=asyncio.Event(),
        runtime=SimpleNamespace(list_containers=None),
        call_tracker=SimpleNamespace(lookups=SimpleNamespace(run=fails)),
    )
    nothing: Any = None
    assert asyncio.run(RuntimeLookup(executor, nothing).list_container("c")) is None
    assert reported == ['cannot list what the runtime has err="cannot reach it"']
    assert executor.reconcile_requested.is_set()


def test_a_create_past_its_deadline_reserves_no_cpus(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        ls = await in_thread(node.peer.launch, DemoPod("ls", "LS"))
        pod = await in_thread(node.peer.run_pod, LSE)
        reservations = node.executor.reservations
        create, begun = reservations.create, asyncio.Event()

        async def slow(container: Any, client: Any) -> Any:
            begun.set()
            await asyncio.sleep(60)
            return await create(container, client)

        reservations.create = slow
        call_stage = node.peer.hooks.call_stage
        node.peer.hooks.call_stage = lambda stage, request: call_stage(stage, request, 1.0)
        with pytest.raises(grpc.RpcError) as late:
            await in_thread(node.peer.create, pod)
        assert code(late) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert begun.is_set()
        reservations.create, node.peer.hooks.call_stage = create, call_stage
        await node.until(lambda: not node.executor.state.owners)
        await node.until(lambda: node.cpus(ls.container_id) == "0-15")
        pod.attempts = iter((0,))
        await in_thread(node.peer.create, pod)
        assert node.owners() == ["2-3"]

    run_scenario(scenario)


class _CancelledFirst:
    """The context of a call that its client has cancelled before a callback is registered."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def add_callback(self, callback: Callable[[], None]) -> bool:
        deadline = time.monotonic() + 60
        while self._context.is_active() and time.monotonic() < deadline:
            time.sleep(0.005)
        return bool(self._context.add_callback(callback))


def _register_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the callback of a PreCreateContainer call until the client has cancelled it."""
    thread = HookServer._thread_handler

    def late(self: HookServer, name: str, kind: type[Any], answer: Any) -> Any:
        call_stage = thread(self, name, kind, answer)
        if name != "PreCreateContainerHook":
            return call_stage
        return lambda request, context: call_stage(request, _CancelledFirst(context))

    monkeypatch.setattr(HookServer, "_thread_handler", late)


@pytest.mark.parametrize("late", [False, True], ids=["after-the-callback", "before-the-callback"])
def test_a_create_of_a_cancelled_client_reserves_no_cpus(
    run_scenario: Callable[..., None], in_thread: Any, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    if late:
        _register_late(monkeypatch)

    async def scenario(node: Any) -> None:
        pod = await in_thread(node.peer.run_pod, LSE)
        create, begun, ended = node.executor.reservations.create, asyncio.Event(), asyncio.Event()

        async def slow(container: Any, client: Any) -> Any:
            begun.set()
            await ended.wait()
            return await create(container, client)

        node.executor.reservations.create = slow
        request = container_request()
        request.pod_meta.uid, request.pod_meta.name = pod.config.metadata.uid, "lse"
        request.pod_meta.namespace = pod.config.metadata.namespace
        request.container_resources.cpu_shares, request.container_resources.cpu_quota = 2048, 200_000
        calling = node.peer.hooks.start_stage("PreCreateContainer", request)
        await node.until(lambda: begun.is_set() or calling.done())
        assert begun.is_set(), (calling, node.executor.telemetry.problems())
        assert node.owners() == ["2-3"]
        calling.cancel()
        await node.until(lambda: not node.executor.state.owners)
        ended.set()

    run_scenario(scenario)


def test_a_recreated_sandbox_is_the_same_pod(run_scenario: Callable[..., None], in_thread: Any) -> None:
    async def scenario(node: Any) -> None:
        pod = await in_thread(node.peer.launch, DemoPod("ls", "LS"))
        with CriClient(str(node.directory / "runtime.sock")) as direct:
            stop = cri.StopPodSandboxRequest(pod_sandbox_id=pod.pod_id)
            await in_thread(direct.call, "StopPodSandbox", stop)
        assert pod.pod_id in node.executor.state.pods  # the daemon has had no report of the stop
        pod.config.metadata.attempt = 1
        request = cri.RunPodSandboxRequest(config=pod.config)
        pod.pod_id = (await in_thread(node.peer.call, "RunPodSandbox", request)).pod_sandbox_id
        created = await in_thread(node.peer.create, pod)
        await in_thread(node.peer.start, created)
        assert node.executor.state.containers[created].pod.sandbox_id == pod.pod_id
        assert not node.pending.creates

    run_scenario(scenario, SLOW)


def test_many_concurrent_pods_are_all_answered(run_scenario: Callable[..., None], in_thread: Any) -> None:
    async def scenario(node: Any) -> None:
        started = time.monotonic()
        pods = await asyncio.gather(
            *(
                in_thread(node.peer.launch, DemoPod(f"p{i}", "LSR", KubeQos.GUARANTEED, cpus=1))
                for i in range(7)
            ),
            *(in_thread(node.peer.launch, DemoPod(f"q{i}", "LS")) for i in range(7)),
        )
        assert time.monotonic() - started < 60
        own = [node.cpus(p.container_id) for p in pods[:7]]
        assert len(set(own)) == 7
        await node.until(
            lambda: all(node.cpus(p.container_id) == str(node.executor.state.pools.shared) for p in pods[7:])
        )

    run_scenario(scenario)


# -- the same call by the hook protocol and by CRI -------------------------------------------------------


@pytest.mark.parametrize("spec", [LSE, DemoPod("ls", "LS"), DemoPod("g", "", KubeQos.GUARANTEED, cpus=2)])
@pytest.mark.parametrize("scope", ["container", "pod"])
def test_a_create_by_hook_and_by_cri_is_one_placement(
    node: Any, run_scenario: Callable[..., None], in_thread: Any, spec: DemoPod, scope: str
) -> None:
    async def scenario(node: Any) -> None:
        other = await in_thread(node.peer.launch, DemoPod("other", "LS"))
        peer = type(node.peer)(node.directory / "cri.sock", node.socket)
        pod = await in_thread(peer.run_pod, spec)
        created = await in_thread(peer.create, pod)
        containers = node.executor.state.containers
        assert set(containers) == {other.container_id, created}
        quota = 100_000 * spec.cpus
        assert containers[created].request.cpu_quota == quota  # the client's, not the response to the peer
        assert containers[created].request.cpuset_cpus == ""
        await in_thread(peer.start, created)
        await node.until(lambda: not node.executor.state.inflight.of(created))
        assert containers.keys() == node.executor.state.containers.keys()
        assert node.executor.state.containers[created].phase is Phase.RUNNING
        assert node.cpus(created) == str(node.executor.state.desired_cpus(containers[created]))
        assert set(node.executor.state.pods) == {other.pod_id, pod.pod_id}
        await node.until(lambda: not node.pending.creates)
        assert node.executor.telemetry.value(metrics.CREATES_PLACED) == 2
        await in_thread(peer.stop, created)
        assert not node.executor.state.owners
        peer.close()

    run_scenario(
        scenario, f"cpuManagerPolicy: static\nreconcilePeriod: 200ms\ntopologyManagerScope: {scope}\n"
    )


def test_a_start_by_cri_after_a_create_by_hook_settles_it(
    run_scenario: Callable[..., None], in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_calls, "CREATE_TIMEOUT_S", 1e6)

    async def scenario(node: Any) -> None:
        ls = await in_thread(node.peer.launch, DemoPod("ls", "LS"))
        pod = await in_thread(node.peer.run_pod, LSE)
        created = await in_thread(node.peer.create, pod)
        with CriClient(str(node.directory / "cri.sock")) as client:
            await in_thread(client.start, created)
        assert (node.cpus(created), node.cpus(ls.container_id)) == ("2-3", "0-1,4-15")
        ids = {ls.container_id, created}
        await node.until(lambda: set(node.executor.state.containers) == ids)
        assert (node.cpus(created), node.cpus(ls.container_id)) == ("2-3", "0-1,4-15")

    run_scenario(scenario)


# -- restarts, errors and modes of the daemon ------------------------------------------------------------


def test_a_daemon_restart_between_create_and_start_keeps_the_cpus(node: Any, in_thread: Any) -> None:
    text = "cpuManagerPolicy: static\nreconcilePeriod: 200ms\n"

    async def run() -> None:
        await node.start(text)
        ls = await in_thread(node.peer.launch, DemoPod("ls", "LS"))
        pod = await in_thread(node.peer.run_pod, LSE)
        created = await in_thread(node.peer.create, pod)
        peer = node.peer
        await node.serving.stop()
        await node.daemon.stop()
        assert not node.socket.exists()
        await node.start(text)
        node.peer.close()
        node.peer = peer
        await in_thread(node.peer.start, created)
        assert (node.cpus(created), node.cpus(ls.container_id)) == ("2-3", "0-1,4-15")
        assert node.executor.state.containers[created].phase is Phase.RUNNING
        await node.stop()

    asyncio.run(run())


def test_a_daemon_restart_during_a_create_keeps_the_cpus(node: Any, in_thread: Any) -> None:
    text = "cpuManagerPolicy: static\nreconcilePeriod: 200ms\n"

    async def run() -> None:
        await node.start(text)
        pod = await in_thread(node.peer.run_pod, LSE)
        at_runtime, go_on = threading.Event(), threading.Event()

        def wait(_: object) -> None:
            at_runtime.set()
            go_on.wait(60)

        undo = node.runtime.before("CreateContainer", wait)
        job = asyncio.ensure_future(in_thread(node.peer.create, pod))
        await in_thread(at_runtime.wait, 60)
        peer = node.peer
        await node.serving.stop()
        await node.daemon.stop()
        go_on.set()
        undo()
        created = await job
        await node.start(text)
        node.peer.close()
        node.peer = peer
        await in_thread(node.peer.start, created)
        assert node.cpus(created) == "2-3"
        assert set(node.executor.state.containers) == {created}
        await node.stop()

    asyncio.run(run())


def test_an_internal_error_fails_strict_calls_and_lets_others_pass(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        def broken(*_: object) -> None:
            raise ZeroDivisionError("ours")

        node.serving.servicer.pending.creates.add = broken
        ls = await in_thread(node.peer.launch, DemoPod("ls", "LS"))
        await node.until(lambda: node.cpus(ls.container_id) == "0-15")
        pod = await in_thread(node.peer.run_pod, LSE)
        with pytest.raises(grpc.RpcError) as refused:
            await in_thread(node.peer.create, pod)
        assert code(refused) is grpc.StatusCode.INTERNAL
        assert "ZeroDivisionError" in str(refused.value)
        await node.until(lambda: not node.executor.state.owners)  # no CPUs stay reserved for it

    run_scenario(scenario, faults=True)


def test_a_released_node_is_not_changed(run_scenario: Callable[..., None], in_thread: Any) -> None:
    async def scenario(node: Any) -> None:
        node.executor.store.handle(ModeChanged(NodeMode.RELEASED))
        lse = await in_thread(node.peer.launch, LSE)
        assert node.saved(lse.container_id).cpuset_cpus == ""
        assert not node.pending.creates
        strict = container_request(labels={"koordinator.sh/qosClass": "LSE"})
        answer = await in_thread(node.peer.hooks.call_stage, "PreCreateContainer", strict)
        assert answer.container_resources == strict.container_resources

    run_scenario(scenario, SLOW)


def test_calls_pass_unchanged_in_observe_mode(run_scenario: Callable[..., None], in_thread: Any) -> None:
    async def scenario(node: Any) -> None:
        lse = await in_thread(node.peer.launch, LSE)
        assert node.saved(lse.container_id).cpuset_cpus == ""
        await node.until(lambda: lse.container_id in node.executor.state.containers)

    run_scenario(scenario, "mode: observe\nreconcilePeriod: 200ms\n")


def test_a_refused_list_lets_a_non_strict_create_pass(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        def refuse(_: object) -> None:
            raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, "not you")

        node.runtime.before("ListPodSandbox", refuse)
        pod = await in_thread(node.peer.run_pod, DemoPod("ls", "LS"))
        created = await in_thread(
            node.peer.create, pod
        )  # not decided, and not strict: it continues unchanged
        assert node.saved(created).cpuset_cpus == ""

    run_scenario(scenario, SLOW)
