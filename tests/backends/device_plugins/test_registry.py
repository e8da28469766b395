"""Device plugins as real gRPC servers: valid ones, and ones that hang, flood, restart or send bad data."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.allocation.devices.state import RegisteredDevice
from proxy.api.kubelet import deviceplugin_pb2 as pb
from proxy.backends.device_plugins import endpoint, messages, registry
from proxy.backends.device_plugins.registry import DevicePluginRegistry
from proxy.executor.device_ports import DevicePluginError
from proxy.model.backoff import Backoff
from proxy.model.idset import Mask
from proxy.telemetry import metrics
from proxy.telemetry.port import Telemetry
from tests.testkit.captured_log import CapturedLog
from tests.testkit.device_plugin import ScriptedPlugin, allocated, device
from tests.testkit.waiting import until

NAME = "example.com/dev"
ALL = frozenset({"a", "b"})


class Node:
    """The side of the executor: it records the events that it receives."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[Any] = []
        self.faults: list[BaseException] = []
        self.telemetry = Telemetry(CapturedLog(), time.monotonic)
        self.store = SimpleNamespace(handle=self._handle)
        self.state = SimpleNamespace(devices=SimpleNamespace(registered={}))
        self.plugins: list[ScriptedPlugin] = []
        self.registry: Any = None

    def _handle(self, event: Any) -> None:
        self.events.append(event)
        self.state.devices.registered.pop(event.resource, None)
        if event.devices is not None:
            self.state.devices.registered[event.resource] = event.devices

    def report_internal_error(self, error: BaseException) -> None:
        self.faults.append(error)

    restarted = report_internal_error

    def plugin(self, *devices: pb.Device, **more: str) -> ScriptedPlugin:
        made = ScriptedPlugin(self.directory, devices or (device("a", 0), device("b", 1)), **more)
        self.plugins.append(made)
        return made.start()

    @property
    def devices(self) -> Any:
        """The devices as they were last reported."""
        return self.events[-1].devices if self.events else None

    @property
    def healthy(self) -> frozenset[str]:
        return frozenset(name for name, each in (self.devices or {}).items() if each.healthy)

    def row(self, resource: str = NAME) -> dict[str, Any]:
        return next((row for row in self.registry.page() if row["resource"] == resource), {})

    async def serve(self, plugin: ScriptedPlugin) -> None:
        """Register a plugin, and wait for its devices."""
        await self.registry.register(plugin.resource, plugin.path)
        await until(lambda: self.row(plugin.resource)["state"] == "serving")

    async def refused(self, call: Coroutine[Any, Any, Any]) -> str:
        with pytest.raises(DevicePluginError) as caught:
            await call
        return caught.value.message


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(endpoint, "RECONNECT_BACKOFF", Backoff(0.05, 0.2))
    monkeypatch.setattr(endpoint, "PROBE_BACKOFF", Backoff(0.1, 0.2))
    with tempfile.TemporaryDirectory(prefix="tp-") as directory:
        made = Node(Path(directory))
        yield made
        for plugin in made.plugins:
            plugin.stop()
        assert made.faults == []


def play(
    node: Node, scenario: Callable[[], Coroutine[Any, Any, None]], timeout: float = 5.0, grace: float = 60.0
) -> None:
    async def whole() -> None:
        context: Any = node
        node.registry = DevicePluginRegistry(context, timeout, grace)
        try:
            await scenario()
        finally:
            node.registry.close()

    asyncio.run(whole())


def test_devices_are_reported_once_for_each_change(node: Node) -> None:
    plugin = node.plugin(device("a", 0), device("b", 1, healthy=False))

    async def scenario() -> None:
        await node.serve(plugin)
        a, b = RegisteredDevice("a", Mask((0,))), RegisteredDevice("b", Mask((1,)), healthy=False)
        assert [event.devices for event in node.events] == [{"a": a, "b": b}]
        assert node.events[0].resource == NAME
        plugin.update(device("b", 1, healthy=False), device("a", 0))
        await until(lambda: node.telemetry.value(metrics.DEVICE_LISTS) == 2)
        plugin.update(device("a", 0))
        await until(lambda: len(node.events) > 1)
        assert [event.devices for event in node.events[1:]] == [{"a": a}]
        assert node.row()["devices"] == node.row()["healthy"] == 1

    play(node, scenario)


def test_calls_pass_requests_and_responses(node: Node) -> None:
    plugin = node.plugin()
    plugin.options = lambda: pb.DevicePluginOptions(
        pre_start_required=True, get_preferred_allocation_available=True
    )
    prepared: list[list[str]] = []
    plugin.pre_start = prepared.append
    requests: list[Any] = []

    def prefer(request: Any) -> pb.PreferredAllocationResponse:
        requests.append(request)
        one = pb.ContainerPreferredAllocationResponse(deviceIDs=["b"])
        return pb.PreferredAllocationResponse(container_responses=[one])

    plugin.prefer = prefer

    async def scenario() -> None:
        await node.serve(plugin)
        calls = node.registry
        assert calls.offers_preference(NAME)
        assert calls.needs_pre_start(NAME)
        assert await calls.preferred(NAME, ALL, frozenset(), 1) == ("b",)
        assert requests[0].allocation_size == 1
        answer = await calls.allocate(NAME, ("a", "b"))
        assert answer.envs == {"DEVICES": "a,b"}
        assert [each.host_path for each in answer.devices] == ["/dev/a", "/dev/b"]
        await calls.pre_start(NAME, ("a",))
        assert prepared == [["a"]]

    play(node, scenario)


def test_a_resource_of_an_earlier_run_needs_its_plugin_before_a_start(node: Node) -> None:
    async def scenario() -> None:
        calls = node.registry
        node.state.devices.registered = {NAME: {}}
        assert calls.needs_pre_start(NAME), "the value is unknown before the plugin is back"
        assert "no device plugin has registered it" in await node.refused(calls.pre_start(NAME, ("a",)))
        await node.serve(node.plugin())
        assert not calls.needs_pre_start(NAME), "the plugin does not request it"

    play(node, scenario)


def test_a_resource_that_no_plugin_has_registered(node: Node) -> None:
    async def scenario() -> None:
        calls = node.registry
        assert not calls.offers_preference(NAME)
        assert not calls.needs_pre_start(NAME)
        assert await calls.preferred(NAME, ALL, frozenset(), 1) == ()
        for call in (calls.allocate(NAME, ("a",)), calls.pre_start(NAME, ("a",))):
            assert "no device plugin has registered it" in await node.refused(call)

    play(node, scenario)


def test_devices_are_unhealthy_at_once_when_a_plugin_vanishes_and_withdrawn_after_the_grace(
    node: Node,
) -> None:
    plugin = node.plugin()

    async def scenario() -> None:
        await node.serve(plugin)
        await asyncio.to_thread(plugin.stop)
        await until(lambda: node.healthy == frozenset(), 1.0)
        assert node.devices.keys() == ALL
        assert node.row()["state"] == "down"
        assert "does not serve" in str(node.telemetry.problems())
        message = await node.refused(node.registry.allocate(NAME, ("a",)))
        assert str(plugin.path) in message
        await until(lambda: node.devices is None)
        assert node.registry.page() == []
        assert node.telemetry.problems() == []
        await asyncio.to_thread(plugin.start)
        await node.serve(plugin)
        assert node.healthy == ALL

    play(node, scenario, grace=1.0)


def test_a_restarted_plugin_serves_again_without_registering(node: Node) -> None:
    plugin = node.plugin()

    async def scenario() -> None:
        await node.serve(plugin)
        for _ in range(3):
            await asyncio.to_thread(plugin.stop)
            await until(lambda: node.healthy == frozenset())
            await asyncio.to_thread(plugin.start)
            await until(lambda: node.healthy == ALL)
        assert node.row()["registered"] == 1
        assert (await node.registry.allocate(NAME, ("a",))).envs == {"DEVICES": "a"}

    play(node, scenario)


def test_a_registration_replaces_the_one_before_it(node: Node) -> None:
    old, new = node.plugin(), node.plugin(device("c"), name="new.sock")

    async def scenario() -> None:
        await node.serve(old)
        await node.serve(new)
        await until(lambda: node.healthy == {"c"})
        before = len(node.events)
        await asyncio.to_thread(old.stop)
        await asyncio.sleep(0.3)
        assert len(node.events) == before
        assert node.row()["socket"] == str(new.path)
        assert node.row()["registered"] == 2

    play(node, scenario)


def test_a_plugin_that_hangs_is_isolated_and_comes_back_when_it_answers(node: Node) -> None:
    plugin = node.plugin()

    async def scenario() -> None:
        await node.serve(plugin)
        plugin.hanging.clear()
        began = asyncio.get_running_loop().time()
        for _ in range(3):
            assert "no answer within 0.3 s" in await node.refused(node.registry.allocate(NAME, ("a",)))
        assert asyncio.get_running_loop().time() - began < 3
        assert node.row()["state"] == "isolated"
        assert node.healthy == frozenset()
        assert node.telemetry.value(metrics.DEVICE_PLUGINS_ISOLATED) == 1
        message = await node.refused(node.registry.allocate(NAME, ("a",)))
        assert "3 calls in a row had no usable answer" in message
        await asyncio.sleep(0.7)  # probes that are not answered
        assert node.row()["state"] == "isolated"
        plugin.hanging.set()
        await until(lambda: node.healthy == ALL)
        assert (await node.registry.allocate(NAME, ("a",))).envs == {"DEVICES": "a"}
        assert node.telemetry.problems() == []

    play(node, scenario, timeout=0.3)


def test_calls_that_end_with_a_replaced_plugin_do_not_isolate_it(node: Node) -> None:
    hangs, successor = node.plugin(), node.plugin(name="successor.sock")

    async def scenario() -> None:
        await node.serve(hangs)
        hangs.hanging.clear()
        calls = [asyncio.create_task(node.refused(node.registry.allocate(NAME, ("a",)))) for _ in range(3)]
        await until(lambda: node.telemetry.value(metrics.DEVICE_PLUGIN_CALLS, method="Allocate") == 3)
        await node.serve(successor)
        await asyncio.gather(*calls)
        assert node.telemetry.value(metrics.DEVICE_PLUGINS_ISOLATED) == 0
        running = {str(task.get_coro()) for task in asyncio.all_tasks()}
        assert not any("_probe" in name for name in running)
        hangs.hanging.set()

    play(node, scenario)


def test_an_isolated_plugin_is_withdrawn_after_the_grace_and_comes_back(node: Node) -> None:
    plugin = node.plugin()

    async def scenario() -> None:
        await node.serve(plugin)
        plugin.hanging.clear()
        await asyncio.gather(
            *(node.refused(node.registry.allocate(NAME, ("a",))) for _ in range(5)),
        )
        await until(lambda: node.devices is None)
        assert node.row()["withdrawn"]
        plugin.hanging.set()
        await until(lambda: node.healthy == ALL)
        assert not node.row()["withdrawn"]

    play(node, scenario, timeout=0.2, grace=0.5)


def test_a_plugin_that_ends_after_its_resource_was_withdrawn_is_dropped(node: Node) -> None:
    plugin = node.plugin()

    async def scenario() -> None:
        await node.serve(plugin)
        plugin.hanging.clear()
        await asyncio.gather(*(node.refused(node.registry.allocate(NAME, ("a",))) for _ in range(5)))
        await until(lambda: node.devices is None)
        assert node.row()["state"] == "isolated"
        await asyncio.to_thread(plugin.stop)
        await until(lambda: node.registry.page() == [])
        assert node.telemetry.problems() == []

    play(node, scenario, timeout=0.2, grace=0.5)


def test_a_resource_of_an_earlier_run_is_withdrawn_although_its_plugin_has_never_listed(node: Node) -> None:
    silent = node.plugin(name="silent.sock")
    never = threading.Event()
    silent._list = lambda _, context: iter(lambda: never.wait(30) and None, None)  # type: ignore[method-assign]
    silent.start()
    node.state.devices.registered[NAME] = {}

    async def scenario() -> None:
        await node.registry.register(NAME, silent.path)
        never.set()
        await asyncio.to_thread(silent.stop)
        await until(lambda: node.registry.page() == [])
        assert [event.devices for event in node.events] == [None]

    play(node, scenario, grace=0.5)


def test_a_resource_of_an_earlier_run_can_be_withdrawn_for_a_reason(node: Node) -> None:
    node.state.devices.registered[NAME] = {}

    async def scenario() -> None:
        await node.registry.withdraw(NAME, "kubelet manages it too")
        assert [event.devices for event in node.events] == [None]

    play(node, scenario)


def test_error_responses_do_not_isolate_a_plugin(node: Node) -> None:
    plugin = node.plugin()

    def refuse(ids: list[str]) -> Any:
        raise RuntimeError("invalid allocation request with unhealthy device")

    plugin.allocate = refuse

    async def scenario() -> None:
        await node.serve(plugin)
        for _ in range(5):
            assert "with unhealthy device (UNKNOWN)" in await node.refused(
                node.registry.allocate(NAME, ("a",))
            )
        assert node.row()["state"] == "serving"

    play(node, scenario)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (pb.AllocateResponse(), "answers for 0 containers"),
        (pb.AllocateResponse(container_responses=[pb.ContainerAllocateResponse()] * 2), "for 2 containers"),
        (b"\xff", "cannot be decoded as AllocateResponse"),
        (allocated("x" * 300_000), "bytes"),
        (allocated(*("x" * 100_000 + str(i) for i in range(50))), "more than 4194304 bytes"),
    ],
)
def test_a_plugin_that_lies_in_its_answers(node: Node, answer: Any, message: str) -> None:
    plugin = node.plugin()
    plugin.allocate = lambda ids: answer

    async def scenario() -> None:
        await node.serve(plugin)
        for _ in range(3):
            assert message in await node.refused(node.registry.allocate(NAME, ("a",)))
        assert node.row()["state"] == "isolated"

    play(node, scenario)


def test_a_plugin_with_an_invalid_list_is_down_until_the_list_is_valid(node: Node) -> None:
    plugin = node.plugin()

    async def scenario() -> None:
        await node.serve(plugin)
        plugin.update(device("a", 0), device("a", 1))
        await until(lambda: node.row()["state"] == "down")
        assert node.healthy == frozenset()
        assert "twice, with different values" in node.row()["reason"]
        plugin.update(device("a", 0), device("b", 1))
        await until(lambda: node.healthy == ALL)

    play(node, scenario)


def test_a_flood_of_lists_is_coalesced(node: Node) -> None:
    plugin = node.plugin()

    async def scenario() -> None:
        await node.serve(plugin)
        for number in range(2000):
            plugin.update(device(f"flood-{number}"))
        plugin.update(device("last"))
        gaps: list[float] = []

        async def turns() -> None:
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - began)

        turning = asyncio.create_task(turns())
        began = time.monotonic()
        await until(lambda: node.healthy == {"last"})
        turning.cancel()
        assert len(node.events) <= 3 + (time.monotonic() - began) / endpoint.LIST_GAP_S
        assert node.telemetry.value(metrics.DEVICE_LISTS) == 2002
        assert sorted(gaps)[len(gaps) // 2] < 0.1

    play(node, scenario)


def test_unusable_preferences_are_not_requested_again_soon(node: Node) -> None:
    plugin = node.plugin()
    plugin.options = lambda: pb.DevicePluginOptions(get_preferred_allocation_available=True)
    one = pb.ContainerPreferredAllocationResponse(deviceIDs=["not offered"])
    plugin.prefer = lambda request: pb.PreferredAllocationResponse(container_responses=[one])

    async def scenario() -> None:
        await node.serve(plugin)
        for _ in range(5):
            assert await node.registry.preferred(NAME, ALL, frozenset(), 1) == ()
        assert plugin.calls.count("GetPreferredAllocation") == 1
        assert node.row()["state"] == "serving"

    play(node, scenario)


def test_a_plugin_that_does_not_answer_cannot_register(node: Node) -> None:
    plugin = node.plugin()
    plugin.hanging.clear()

    async def scenario() -> None:
        first = asyncio.create_task(node.refused(node.registry.register(NAME, plugin.path)))
        await until(lambda: plugin.calls)
        assert "under way" in await node.refused(node.registry.register(NAME, plugin.path))
        assert "no answer within 0.3 s" in await first
        missing = plugin.path.with_name("missing.sock")
        assert "UNAVAILABLE" in await node.refused(node.registry.register("example.com/other", missing))
        assert node.registry.page() == []
        assert node.events == []

    play(node, scenario, timeout=0.3)


def test_a_plugin_that_registers_again_and_again_is_slowed_down(node: Node) -> None:
    plugin = node.plugin()

    async def scenario() -> None:
        for _ in range(6):
            await node.registry.register(NAME, plugin.path)
        message = await node.refused(node.registry.register(NAME, plugin.path))
        assert "registered too often" in message

    play(node, scenario)


def test_the_number_of_resources_is_limited(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RESOURCES_LIMIT", 2)
    plugin = node.plugin()

    async def scenario() -> None:
        for name in ("example.com/a", "example.com/b"):
            await node.registry.register(name, plugin.path)
        message = await node.refused(node.registry.register("example.com/c", plugin.path))
        assert "2 resources already" in message
        await node.registry.register("example.com/a", plugin.path)
        for number in range(20):
            assert "2 resources already" in await node.refused(
                node.registry.register(f"example.com/{number}", plugin.path)
            )
        assert len(node.registry._pauses) <= 2 * registry.RESOURCES_LIMIT + 1

    play(node, scenario)


def test_a_call_waits_for_the_list_of_a_plugin_that_registers_again(node: Node) -> None:
    plugin, again = node.plugin(), node.plugin(name="again.sock")
    gate, lists = threading.Event(), again._list

    def late(request: bytes, context: Any) -> Iterator[bytes]:
        gate.wait(30)
        yield from lists(request, context)

    again._list = late  # type: ignore[method-assign]
    again.start()

    async def scenario() -> None:
        await node.serve(plugin)
        await node.registry.register(NAME, again.path)
        assert node.healthy == ALL
        call = asyncio.create_task(node.registry.allocate(NAME, ("a",)))
        await asyncio.sleep(0.1)
        assert node.row()["state"] == "connecting"
        assert not call.done()
        assert "Allocate" not in again.calls
        gate.set()
        assert await call == messages.read_allocation(allocated("a").SerializeToString())
        assert again.calls[-1] == "Allocate"

    play(node, scenario)


def test_a_call_does_not_wait_longer_for_a_list_than_for_an_answer(node: Node) -> None:
    silent = node.plugin(name="silent.sock")
    never = threading.Event()
    silent._list = lambda _, context: iter(lambda: never.wait(30) and None, None)  # type: ignore[method-assign]
    silent.start()

    async def scenario() -> None:
        await node.registry.register(NAME, silent.path)
        message = await node.refused(node.registry.allocate(NAME, ("a",)))
        never.set()
        assert "it has listed no devices within 0.3 s" in message
        assert "Allocate" not in silent.calls

    play(node, scenario, timeout=0.3)


def test_a_plugin_that_never_lists_has_no_devices_and_those_before_it_are_unhealthy(node: Node) -> None:
    plugin, silent = node.plugin(), node.plugin(name="silent.sock")
    never = threading.Event()
    silent._list = lambda _, context: iter(lambda: never.wait(30) and None, None)  # type: ignore[method-assign]
    silent.start()

    async def scenario() -> None:
        await node.serve(plugin)
        await node.registry.register(NAME, silent.path)
        await until(lambda: node.healthy == frozenset())
        assert node.row()["state"] == "connecting"
        assert "listed no devices within 0.3 s" in node.row()["reason"]
        never.set()

    play(node, scenario, timeout=0.3)


def test_a_cancelled_call_is_cancelled_at_the_plugin(node: Node) -> None:
    plugin = node.plugin()
    ended = threading.Event()
    server_side = plugin._method

    def method(name: str, answer: Any) -> Any:
        inner = server_side(name, answer)

        def watched(content: bytes, context: Any) -> bytes:
            if name == "Allocate":
                context.add_callback(ended.set)
            return inner(content, context)

        return watched

    plugin._method = method  # type: ignore[method-assign]
    plugin.start()

    async def scenario() -> None:
        await node.serve(plugin)
        plugin.hanging.clear()
        call = asyncio.create_task(node.registry.allocate(NAME, ("a",)))
        await until(lambda: "Allocate" in plugin.calls)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(ended.wait, 10)
        assert node.row()["state"] == "serving"

    play(node, scenario)


def test_a_resource_that_is_withdrawn_for_a_reason_can_be_registered_again(node: Node) -> None:
    plugin = node.plugin()

    async def scenario() -> None:
        await node.serve(plugin)
        await node.registry.withdraw(NAME, "kubelet manages it too")
        assert node.devices is None
        assert node.registry.page() == []
        await node.registry.withdraw(NAME, "again")
        await asyncio.sleep(0.3)
        assert len(node.events) == 2
        await node.serve(plugin)
        assert node.healthy == ALL

    play(node, scenario)


def test_a_registration_that_is_under_way_at_the_end_is_refused(node: Node) -> None:
    plugin = node.plugin()
    plugin.hanging.clear()

    async def scenario() -> None:
        register = asyncio.create_task(node.refused(node.registry.register(NAME, plugin.path)))
        await until(lambda: plugin.calls)
        node.registry.close()
        plugin.hanging.set()
        assert "the daemon stops" in await register
        assert node.registry.page() == []

    play(node, scenario)
