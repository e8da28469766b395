"""Device plugins: allocations for creates, failures, conflicts with hooks, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from proxy.allocation.devices.state import RegisteredDevice
from proxy.api.cri import api_pb2 as pb
from proxy.engine.held_devices import DeviceRecord
from proxy.engine.node_events import DevicesChanged, DevicesImported
from proxy.engine.pod_events import SandboxStopped
from proxy.executor.device_ports import DevicePluginError
from proxy.executor.ledger_recovery import ANSWER_LOST, LOST
from proxy.frontends.hook_bridge.bridge import _conflict
from proxy.hooks.answers import CLEAR, Adjustment
from proxy.hooks.facts import Device, Mount
from proxy.hooks.hook import Outcome
from proxy.model.devices import AllocateAnswer, DeviceField, DeviceNode
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.telemetry import metrics
from tests.testkit.cri import TWO_CPUS

NIC, GPU = "example.com/nic", "example.com/gpu"
NICS = {f"nic{i}": RegisteredDevice(f"nic{i}", Mask((i // 2,))) for i in range(4)}


class PlayedPlugins:
    """Device plugins: ``fail`` is raised by Allocate, ``gate`` holds it."""

    def __init__(self, *, prefers: tuple[str, ...] | None = None, pre_start: bool = False) -> None:
        self.prefers = prefers
        self.pre_starts = pre_start
        self.log: list[tuple[str, tuple[str, ...]]] = []
        self.fail: Exception | None = None
        self.fail_start: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.during: Callable[[], None] = lambda: None
        self.extra: dict[str, str] = {}

    def offers_preference(self, resource: str) -> bool:
        return self.prefers is not None

    def needs_pre_start(self, resource: str) -> bool:
        return self.pre_starts

    async def preferred(
        self, resource: str, available: frozenset[str], must_include: frozenset[str], size: int
    ) -> tuple[str, ...]:
        self.log.append(("prefer", tuple(sorted(available))))
        self.during()
        assert self.prefers is not None
        return self.prefers

    async def allocate(self, resource: str, ids: tuple[str, ...]) -> AllocateAnswer:
        self.log.append(("allocate", ids))
        await self.gate.wait()
        self.during()
        if self.fail is not None:
            raise self.fail
        nodes = tuple(DeviceNode(f"/dev/{i}", f"/dev/{i}", "rw") for i in ids)
        return AllocateAnswer({"NICS": ",".join(ids), **self.extra}, devices=nodes)

    async def pre_start(self, resource: str, ids: tuple[str, ...]) -> None:
        self.log.append(("start", ids))
        if self.fail_start is not None:
            raise self.fail_start


class Kubelet:
    """A simulated kubelet, in which each pod requests devices."""

    knows_pods, knows_devices = True, False

    def __init__(self, *containers: ContainerResources) -> None:
        self.answer = containers
        self.queries = 0

    def pod_requests(self, uid: str, namespace: str, name: str) -> Any:
        self.queries += 1
        return PodRequests(uid, self.answer, guaranteed=False), "kubelet's /pods"

    def devices(self, namespace: str, pod: str, container: str) -> Any:
        return None

    def allocatable(self) -> Any:
        return {}

    def close(self) -> None:
        pass


def nic_request(
    count: int = 1, name: str = "c", kind: ContainerKind = ContainerKind.APP
) -> ContainerResources:
    return ContainerResources(name, kind, limits={NIC: count} if count else {})


def sources(*containers: ContainerResources) -> Any:
    return Kubelet(*(containers or (nic_request(),))), None


def register(world: Any, devices: Any = NICS) -> None:
    world.executor.store.handle(DevicesChanged(NIC, devices))


def held(world: Any, uid: str = "a", name: str = "c") -> set[str]:
    return set(world.executor.state.devices.of_container(uid, name, NIC))


def sent(call: Any) -> pb.ContainerConfig:
    assert call.sent is not None, call.refused
    return pb.CreateContainerRequest.FromString(call.sent).config


def paths(call: Any) -> list[str]:
    return [device.host_path for device in sent(call).devices]


def test_a_create_gets_the_devices_that_its_plugin_returns(run_scenario: Any) -> None:
    plugins = PlayedPlugins(prefers=("nic3", "nic2"), pre_start=True)

    async def scenario(world: Any) -> None:
        register(world)
        sandbox = await world.pod("a", kube="burstable")
        call = await world.begin(sandbox)
        assert paths(call) == ["/dev/nic2", "/dev/nic3"]
        assert [(env.key, env.value) for env in sent(call).envs] == [("NICS", b"nic2,nic3")]
        ids = ("nic2", "nic3")
        assert plugins.log == [("prefer", tuple(NICS)), ("allocate", ids), ("start", ids)]
        forwarded = world.log.index("forward CreateContainer")
        assert "ledger +d/" in world.log[:forwarded], (
            "the devices are in the ledger before the call is forwarded"
        )
        world.finish(call, "x")
        again = await world.begin(sandbox)
        assert paths(again) == paths(call), "a restarted container gets the same devices"
        assert plugins.log[3:] == [("start", ids)], "the answer to Allocate is kept"
        world.finish(again, "y")
        found = world.executor.history.find("a")
        assert any(f"{NIC}=nic2" in record.explanation.devices for record in found)
        await world.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=sandbox))

    run_scenario(scenario, sources=sources(nic_request(2)), plugins=plugins)


def test_other_containers_are_not_held_up(run_scenario: Any) -> None:
    plugins = PlayedPlugins()
    kubelet = sources(nic_request(0))

    async def scenario(world: Any) -> None:
        sandbox = await world.pod("a", kube="burstable")
        call = await world.begin(sandbox)
        assert call.sent is not None
        assert kubelet[0].queries == 0, "nothing is registered, so kubelet is not queried"
        register(world)
        other = await world.pod("b", kube="burstable")
        call = await world.begin(other)
        assert not sent(call).devices
        assert kubelet[0].queries == 1
        assert plugins.log == []

    run_scenario(scenario, sources=kubelet, plugins=plugins)


@pytest.mark.parametrize("error", [DevicePluginError(NIC, "it hangs"), ZeroDivisionError("a fault of ours")])
def test_a_plugin_that_fails_refuses_only_the_create(run_scenario: Any, error: Exception) -> None:
    plugins = PlayedPlugins()

    async def scenario(world: Any) -> None:
        register(world)
        sandbox = await world.pod("a", kube="burstable")
        plugins.fail = error
        call = await world.begin(sandbox)
        assert call.refused is not None
        assert call.refused[1].startswith("UnexpectedAdmissionError: Allocate failed due to ")
        assert "ns/a/c" in call.refused[1]
        world.wire.finished(call, None)
        assert held(world) == set()
        assert not world.executor.state.containers
        (record,) = world.executor.history.find("a")
        assert (record.exists, record.explanation.verdict.reason) == (False, "UnexpectedAdmissionError")
        plugins.fail = None
        assert paths(await world.begin(sandbox)) == ["/dev/nic0"], "the next attempt"
        world.logged.clear()

    run_scenario(scenario, sources=sources(), plugins=plugins)


def test_a_start_that_is_refused_keeps_the_devices(run_scenario: Any) -> None:
    plugins = PlayedPlugins(pre_start=True)

    async def scenario(world: Any) -> None:
        register(world)
        sandbox = await world.pod("a", kube="burstable")
        plugins.fail_start = DevicePluginError(NIC, "no power")
        call = await world.begin(sandbox)
        assert call.refused is not None
        assert "no power" in call.refused[1]
        world.wire.finished(call, None)
        assert held(world) == {"nic0"}
        plugins.fail_start = None
        assert paths(await world.begin(sandbox)) == ["/dev/nic0"]
        assert [what for what, _ in plugins.log] == ["allocate", "start", "start"]

    run_scenario(scenario, sources=sources(), plugins=plugins)


def test_concurrent_creates_and_a_repeated_create_get_one_allocate_each(run_scenario: Any) -> None:
    plugins = PlayedPlugins()

    async def scenario(world: Any) -> None:
        register(world)
        one, two = await world.pod("a", kube="burstable"), await world.pod("b", kube="burstable")
        plugins.gate.clear()
        calls = [asyncio.ensure_future(world.begin(sandbox)) for sandbox in (one, two, one)]
        await world.until(lambda: len(plugins.log) == 2)
        assert held(world, "a").isdisjoint(held(world, "b"))
        plugins.gate.set()
        first, other, again = await asyncio.gather(*calls)
        assert paths(first) == paths(again) != paths(other)
        assert len(plugins.log) == 2, "one Allocate for a container, however often it is requested"

    run_scenario(scenario, sources=sources(), plugins=plugins)


def test_a_sandbox_stopped_during_an_allocate_holds_no_devices(run_scenario: Any) -> None:
    plugins = PlayedPlugins()

    async def scenario(world: Any) -> None:
        register(world)
        sandbox = await world.pod("a", kube="burstable")
        plugins.during = lambda: world.executor.sandboxes.stopped(sandbox)
        call = await world.begin(sandbox)
        assert call.refused is not None
        assert world.executor.state.devices.held == {}
        world.wire.finished(call, None)

    run_scenario(scenario, sources=sources(), plugins=plugins)


def test_a_new_sandbox_during_an_allocate_for_the_old_one_gets_other_devices(run_scenario: Any) -> None:
    plugins = PlayedPlugins(pre_start=True)

    async def scenario(world: Any) -> None:
        register(world)
        one = await world.pod("a", kube="burstable")
        plugins.gate.clear()
        first = asyncio.ensure_future(world.begin(one))
        await world.until(lambda: len(plugins.log) == 1)
        world.executor.sandboxes.stopped(one)
        two = await world.pod("b", kube="burstable")
        second = asyncio.ensure_future(world.begin(two))
        await world.until(lambda: len(plugins.log) == 2)
        new = await world.pod("a", kube="burstable", sandbox="a2")
        third = asyncio.ensure_future(world.begin(new))
        await world.until(lambda: held(world))
        assert (held(world), held(world, "b")) == ({"nic1"}, {"nic0"})
        plugins.gate.set()
        calls = await asyncio.gather(first, second, third)
        assert calls[0].refused is not None
        assert [paths(call) for call in calls[1:]] == [["/dev/nic0"], ["/dev/nic1"]]
        assert [ids for what, ids in plugins.log if what == "allocate"] == [("nic0",), ("nic0",), ("nic1",)]
        starts = sorted(ids for what, ids in plugins.log if what == "start")
        assert starts == [("nic0",), ("nic1",)], "no device is prepared for a refused create"

    run_scenario(scenario, sources=sources(), plugins=plugins)


def test_a_client_that_disconnects_during_an_allocate(run_scenario: Any) -> None:
    plugins = PlayedPlugins()

    async def scenario(world: Any) -> None:
        register(world)
        sandbox = await world.pod("a", kube="burstable")
        plugins.gate.clear()
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox)
        request.config.metadata.name = "c"
        call = world.played("CreateContainer", request)
        world.wire.request(call)
        await world.until(lambda: plugins.log)
        call.done = True
        world.wire.finished(call, None)
        plugins.gate.set()
        await world.until(lambda: world.executor.state.devices.answers_of("a", "c"))
        assert call.sent is None
        assert paths(await world.begin(sandbox)) == ["/dev/nic0"]
        assert len(plugins.log) == 1

    run_scenario(scenario, sources=sources(), plugins=plugins)


def test_a_conflict_with_the_request_refuses_the_create(run_scenario: Any) -> None:
    plugins = PlayedPlugins()
    plugins.extra = {"HOME": "/nic"}

    async def scenario(world: Any) -> None:
        register(world)
        sandbox = await world.pod("a", kube="burstable")
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox)
        request.config.metadata.name = "c"
        request.config.envs.add(key="HOME", value=b"/root")
        call = await world.call("CreateContainer", request)
        assert call.refused is not None
        expected = f"the request and the device plugin of {NIC} set envs[HOME] differently"
        assert expected in call.refused[1]
        world.wire.finished(call, None)

    run_scenario(scenario, sources=sources(), plugins=plugins)


def test_owners_of_cpus_get_devices_near_to_them(run_scenario: Any) -> None:
    plugins = PlayedPlugins()
    rules = {"policy": TopologyPolicy.SINGLE_NUMA_NODE}
    amounts = {"cpu": 2000, "memory": 1 << 20}
    whole = ContainerResources("c", requests=amounts, limits={**amounts, NIC: 1})

    async def scenario(world: Any) -> None:
        node1 = {i: device for i, device in NICS.items() if device.nodes == Mask((1,))}
        register(world, node1)
        sandbox = await world.pod("a")
        call = await world.begin(sandbox, memory_limit_in_bytes=1 << 20, **TWO_CPUS)
        assert sent(call).linux.resources.cpuset_cpus == "4,12"
        assert paths(call) == ["/dev/nic2"]

    kubelet = sources(whole)
    kubelet[0].pod_requests = lambda *_: (PodRequests("a", (whole,)), "kubelet's /pods")
    run_scenario(scenario, sources=kubelet, plugins=plugins, rules=rules)


def test_scope_pod_allocates_for_all_containers_at_once(run_scenario: Any) -> None:
    plugins = PlayedPlugins(prefers=("nic1",))
    rules = {"policy": TopologyPolicy.RESTRICTED, "scope": Scope.POD}

    async def scenario(world: Any) -> None:
        register(world)
        sandbox = await world.pod("a", kube="burstable")
        assert [held(world, "a", name) for name in "cd"] == [{"nic1"}, {"nic0"}]
        assert plugins.log == [("prefer", ("nic0", "nic1"))]
        assert paths(await world.begin(sandbox, "d")) == ["/dev/nic0"]

    run_scenario(
        scenario, sources=sources(nic_request(1, "c"), nic_request(1, "d")), plugins=plugins, rules=rules
    )


def test_a_client_that_disconnects_while_a_plugin_is_queried(run_scenario: Any) -> None:
    plugins = PlayedPlugins(prefers=("nic0", "nic1", "nic2"))
    rules = {"policy": TopologyPolicy.RESTRICTED, "scope": Scope.POD}

    async def scenario(world: Any) -> None:
        register(world)
        request = pb.RunPodSandboxRequest()
        request.config.metadata.MergeFrom(pb.PodSandboxMetadata(name="a", uid="a", namespace="ns"))
        request.config.linux.cgroup_parent = "/kubepods/burstable/poda"
        call = world.played("RunPodSandbox", request)

        def disconnect() -> None:
            call.done = True
            world.wire.finished(call, None)

        plugins.during = disconnect
        world.wire.request(call)
        await world.until(lambda: plugins.log)
        plugins.during = lambda: None
        await asyncio.sleep(0)  # the decision follows in the turn after the plugin's answer
        await world.until(lambda: not world.executor.state.runtime.arriving_sandboxes)
        assert call.sent is None
        assert world.executor.state.devices.held == {}
        assert world.executor.state.pods == {}
        again = await world.begin_pod("a", kube="burstable")
        assert again.refused is None

    run_scenario(scenario, sources=sources(nic_request(3)), plugins=plugins, rules=rules)


class KubeletDevices:
    """The content of kubelet's checkpoint."""

    def __init__(self, pods: Any) -> None:
        self.pods = pods

    def read(self, resource: str) -> Any:
        if isinstance(self.pods, Exception):
            raise self.pods
        return self.pods


def test_a_resource_is_taken_over_from_kubelet(run_scenario: Any) -> None:
    plugins = PlayedPlugins()
    answer = AllocateAnswer({"NICS": "nic0"})
    kept = {"c": {NIC: DeviceRecord(("nic0",), answer)}, "d": {NIC: DeviceRecord(("nic1",))}}

    async def scenario(world: Any) -> None:
        one = await world.pod("a", kube="burstable")
        await world.create(one)
        grants = world.executor.device_grants
        await grants.take_over(NIC)
        assert world.executor.state.devices.held == {}, "kubelet has not reported its devices"
        grants._kubelet = KubeletDevices(DevicePluginError(NIC, "it cannot be read"))
        with pytest.raises(DevicePluginError, match="cannot be read"):
            await grants.take_over(NIC)
        grants._kubelet = KubeletDevices({"a": kept, "gone": kept})
        await grants.take_over(NIC)
        register(world)
        assert world.executor.state.devices.in_use(NIC) == {"nic0"}, (
            "an entry without an answer does not count"
        )
        grants._kubelet = KubeletDevices({"a": {"c": {NIC: DeviceRecord(("nic3",), answer)}}})
        await grants.take_over(NIC)
        assert held(world) == {"nic0"}, "a resource is taken over once"
        two = await world.pod("b", kube="burstable")
        assert paths(await world.begin(two)) == ["/dev/nic1"]
        again = await world.begin(one)
        assert [(env.key, env.value) for env in sent(again).envs] == [("NICS", b"nic0")]
        assert len(plugins.log) == 1, "kubelet has called the plugin for the restarted container"

    run_scenario(scenario, sources=sources(), plugins=plugins)


def test_a_resource_is_taken_over_before_the_pods_are_known(run_scenario: Any) -> None:
    kept = {"c": {NIC: DeviceRecord(("nic0",), AllocateAnswer())}}

    async def scenario(world: Any) -> None:
        world.executor.device_grants._kubelet = KubeletDevices({"gone": kept})
        await world.executor.device_grants.take_over(NIC)
        register(world)
        assert held(world, "gone") == {"nic0"}
        await world.sync.once()
        assert world.executor.state.devices.held == {}

    run_scenario(scenario, sources=sources(), plugins=PlayedPlugins(), reconciled=False)


_PLUGIN = "the device plugin of x/nic"
_FIELDS = {
    "envs[A]": DeviceField(_PLUGIN, ("1",)),
    "annotations[a]": DeviceField(_PLUGIN, ("1",)),
    "devices[/dev/a]": DeviceField(_PLUGIN, ("/dev/nic0", "rw")),
    "mounts[/m]": DeviceField(_PLUGIN, ("/sys/nic", True)),
}


def conflict(name: str, key: str, value: object) -> str:
    adjustment = Adjustment(cpus=CpuSet.parse("1"), **{name: {key: value}})
    return _conflict(_FIELDS, Outcome(adjustment, {"cpus": "other", f"{name}[{key}]": "tuner"}))


@pytest.mark.parametrize(
    ("name", "key", "value", "spelled"),
    [
        ("envs", "A", "2", "A"),
        ("envs", "A", CLEAR, "A"),
        ("annotations", "a", "2", "a"),
        ("devices", "/./dev/a/", Device("/dev/a", "/dev/nic1"), "/dev/a"),
        ("devices", "/dev/a", Device("/dev/a", "/dev/nic0", "r"), "/dev/a"),
        ("mounts", "/m/", Mount("/m", "/sys/nic"), "/m"),
        ("mounts", "/m", Mount("/m", "/sys/nic", readonly=True, propagation="bidirectional"), "/m"),
        ("mounts", "/m", CLEAR, "/m"),
    ],
)
def test_a_hook_and_a_plugin_that_set_a_field_differently_conflict(
    name: str, key: str, value: object, spelled: str
) -> None:
    expected = f"hook tuner and the device plugin of x/nic set {name}[{spelled}] differently"
    assert conflict(name, key, value) == expected


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("envs", "B", "2"),
        ("envs", "A", "1"),
        ("annotations", "a", "1"),
        ("devices", "/dev/a/", Device("/dev/a/", "/dev/nic0")),
        ("mounts", "/m", Mount("/m", "/sys/nic", readonly=True)),
    ],
)
def test_a_hook_that_sets_what_a_plugin_sets_is_no_conflict(name: str, key: str, value: object) -> None:
    assert conflict(name, key, value) == ""


@pytest.mark.parametrize(("record", "expected"), [({"answer": 5}, ANSWER_LOST), ({"ids": 5}, LOST)])
def test_a_damaged_record_is_reported_after_a_restart(
    run_scenario: Any, record: dict[str, object], expected: str
) -> None:
    async def scenario(world: Any) -> None:
        register(world)
        await world.create(await world.pod("a", kube="burstable"))
        await world.executor.ledger_writer.flush()
        await world.executor.close()
        world.ledger.entries["d/a"] = {"c": {NIC: {**world.ledger.entries["d/a"]["c"][NIC], **record}}}
        world.boot()
        await world.sync.once()
        register(world)
        call = await world.begin(await world.pod("b", kube="burstable"))
        assert paths(call) == ["/dev/nic0" if expected == LOST else "/dev/nic1"]
        (problem,) = world.executor.telemetry.problems()
        assert (problem["keys"]["record"], problem["keys"]["err"]) == ("d/a", expected)

    run_scenario(scenario, sources=sources(), plugins=PlayedPlugins())


def test_devices_are_kept_over_a_restart_of_the_daemon(run_scenario: Any) -> None:
    plugins = PlayedPlugins()

    async def scenario(world: Any) -> None:
        register(world)
        one = await world.pod("a", kube="burstable")
        await world.create(one)
        await world.executor.ledger_writer.flush()
        await world.executor.close()
        world.boot()
        await world.sync.once()
        assert held(world) == {"nic0"}
        two = await world.pod("b", kube="burstable")
        refused = await world.begin(two)
        assert refused.refused is not None
        assert "no healthy devices present" in refused.refused[1], "its plugin has not registered again"
        world.wire.finished(refused, None)
        register(world)
        assert paths(await world.begin(two)) == ["/dev/nic1"]
        again = await world.begin(one)
        assert paths(again) == ["/dev/nic0"]
        assert [what for what, _ in plugins.log].count("allocate") == 2

    run_scenario(scenario, sources=sources(), plugins=plugins)


def test_held_devices_are_granted_again_without_kubelet_and_without_a_resource(
    run_scenario: Any,
) -> None:
    plugins, kubelet = PlayedPlugins(), sources()

    async def scenario(world: Any) -> None:
        register(world)
        one = await world.pod("a", kube="burstable")
        await world.create(one)
        register(world, None)
        for answer in (kubelet[0].pod_requests, lambda *_: None):
            kubelet[0].pod_requests, queries = answer, kubelet[0].queries
            await world.executor.ledger_writer.flush()
            await world.executor.close()
            world.boot()
            await world.sync.once()
            again = await world.begin(one)
            assert paths(again) == ["/dev/nic0"]
            world.finish(again, f"again-{queries}")
        assert kubelet[0].queries == 2, "before it stopped answering: also when no resource is registered"
        assert len(plugins.log) == 1

    run_scenario(scenario, sources=kubelet, plugins=plugins)


def create_of(uid: str) -> pb.CreateContainerRequest:
    request = pb.CreateContainerRequest(pod_sandbox_id=f"s-{uid}")
    request.config.metadata.name = "c"
    request.sandbox_config.metadata.uid = uid
    request.sandbox_config.metadata.name = uid
    request.sandbox_config.metadata.namespace = "ns"
    return request


def test_a_pod_that_holds_devices_is_not_released_before_the_first_reconcile(run_scenario: Any) -> None:
    kept = {"c": {NIC: DeviceRecord(("nic0",), AllocateAnswer())}}

    async def scenario(world: Any) -> None:
        world.executor.store.handle(DevicesImported(NIC, {"a": kept}, every=True))
        call = await world.call("CreateContainer", create_of("a"))
        assert call.refused == (
            14,
            "cannot place the container: the node is not reconciled with the runtime yet",
        )
        assert (await world.call("CreateContainer", create_of("b"))).refused is None, (
            "the pod holds no device"
        )

    run_scenario(scenario, sources=sources(), plugins=PlayedPlugins(), reconciled=False, call_timeout=0.2)


def test_a_pod_that_holds_devices_is_not_released_by_an_internal_fault(
    run_scenario: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        register(world)
        one, two = await world.pod("a", kube="burstable"), await world.pod("b", kube="burstable")
        await world.create(one)
        monkeypatch.setattr(world.executor.creates, "place_or_query", lambda *_: 1 / 0)
        call = await world.begin(one)
        assert call.refused is not None
        assert "internal error: ZeroDivisionError" in call.refused[1]
        world.wire.finished(call, None)
        assert (await world.begin(two)).refused is None, "the pod holds no device"
        world.logged.clear()

    run_scenario(scenario, sources=sources(), plugins=PlayedPlugins())


def test_a_request_that_devices_cannot_be_added_to_is_refused(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        register(world)
        sandbox = await world.pod("a", kube="burstable")
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox)
        request.config.metadata.name = "c"
        call = world.played("CreateContainer", request)

        def undecodable(_: Any) -> Any:
            raise call.decode_errors[0]("Error parsing message")

        call.add_devices = undecodable
        world.wire.request(call)
        await call.over.wait()
        assert call.refused is not None
        assert "Allocate failed due to Error parsing message" in call.refused[1]
        world.wire.finished(call, None)

    run_scenario(scenario, sources=sources(), plugins=PlayedPlugins())


@pytest.mark.parametrize("refuses", [False, True])
def test_a_pod_that_kubelet_does_not_report_is_a_problem(run_scenario: Any, *, refuses: bool) -> None:
    kubelet, plugins = sources(), PlayedPlugins()

    async def scenario(world: Any) -> None:
        def problems() -> list[Any]:
            found = world.executor.telemetry.problems()
            return [each["what"] for each in found if "requests devices" in str(each["what"])]

        answer, kubelet[0].pod_requests = kubelet[0].pod_requests, lambda *_: None
        one = await world.pod("a", kube="burstable")
        call = await world.begin(one)
        assert (call.refused, problems()) == (None, []), "nothing is registered"
        register(world)
        call = await world.begin(one)
        assert len(problems()) == 1
        if refuses:
            expected = "cannot place ns/a/c: kubelet has not given its pod, and it may ask for devices"
            assert call.refused == (14, expected)
        else:
            assert paths(call) == []
        world.wire.finished(call, None)
        kubelet[0].pod_requests = answer
        assert paths(await world.begin(one)) == ["/dev/nic0"]
        assert problems() == []
        kubelet[0].pod_requests = lambda *_: None
        two = await world.pod("b", kube="burstable")
        world.wire.finished(await world.begin(two), None)
        assert len(problems()) == 1
        world.executor.sandboxes.stopped(two)
        kubelet[0].pod_requests = answer
        world.wire.finished(await world.begin(await world.pod("d", kube="burstable")), None)
        assert problems() == [], "its pod is gone"
        world.logged.clear()

    run_scenario(scenario, sources=kubelet, plugins=plugins, refuse_on_error=refuses)


def test_a_create_whose_sandbox_was_stopped_while_a_plugin_answered_is_rejected(run_scenario: Any) -> None:
    plugins = PlayedPlugins()

    async def scenario(world: Any) -> None:
        register(world)
        sandbox = await world.pod("a", kube="burstable")
        plugins.during = lambda: world.executor.store.handle(SandboxStopped(sandbox))
        call = await world.begin(sandbox)
        assert call.refused is not None
        assert "they were released with its sandbox" in call.refused[1]
        world.wire.finished(call, None)
        assert world.executor.state.containers == {}, "the runtime never received the call"
        assert world.executor.telemetry.value(metrics.CREATES_REFUSED) == 1
        world.logged.clear()

    run_scenario(scenario, sources=sources(), plugins=plugins)
