"""Plugins made with the kit, registered with the stand-in for a device manager."""

from __future__ import annotations

import doctest
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from proxy.device_kit import testing
from proxy.device_kit.api import AllocateAnswer, DeviceMount, DeviceNode, DevicePlugin, PluginDevice
from proxy.device_kit.service import PluginService
from proxy.device_kit.testing import DeviceManager, running
from proxy.logs import telemetry
from tests.testkit.waiting import wait_until

CARD = "example.com/card"


class Cards(DevicePlugin):
    """Two cards; one may become unhealthy, and the list may fail."""

    resource = CARD
    period_s = 0.05

    def __init__(self) -> None:
        self.ill: set[str] = set()
        self.broken = False
        self.calls: list[tuple[str, Sequence[str]]] = []

    def devices(self) -> Iterator[PluginDevice]:
        if self.broken:
            raise OSError("the bus is gone")
        for node, name in enumerate(("card0", "card1")):
            yield PluginDevice(name, name not in self.ill, (node,))

    def allocate(self, ids: Sequence[str]) -> AllocateAnswer:
        self.calls.append(("allocate", ids))
        if len(ids) > 1:
            raise ValueError("one card a container")
        return AllocateAnswer(
            {"CARD": ids[0]},
            {"example.com/card": ids[0]},
            (DeviceMount("/lib/card", "/card/lib", read_only=True),),
            (DeviceNode(f"/dev/{ids[0]}", "/dev/card"), DeviceNode("/dev/ctl", "/dev/ctl", "r")),
            ("example.com/card=0",),
        )


class Choosy(Cards):
    """Prefers the last devices, and prepares them before a start."""

    def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        rest = [name for name in sorted(available, reverse=True) if name not in must_include]
        return [*must_include, *rest][:size]

    def pre_start(self, ids: Sequence[str]) -> None:
        self.calls.append(("pre_start", ids))


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[DeviceManager]:
    with DeviceManager(tmp_path) as made:
        yield made


def test_the_example_of_the_testing_module_works() -> None:
    came = doctest.testmod(testing)
    assert came.attempted > 5
    assert came.failed == 0


def test_a_manager_sees_devices_with_their_nodes_and_what_a_container_needs(
    manager: DeviceManager, tmp_path: Path
) -> None:
    with running(Cards(), tmp_path):
        devices = manager.wait_for(CARD, healthy=2)
        assert devices == {
            "card0": PluginDevice("card0", numa=(0,)),
            "card1": PluginDevice("card1", numa=(1,)),
        }
        assert manager.allocate(CARD, ["card1"]) == AllocateAnswer(
            {"CARD": "card1"},
            {"example.com/card": "card1"},
            (DeviceMount("/lib/card", "/card/lib", read_only=True),),
            (DeviceNode("/dev/card1", "/dev/card", "rw"), DeviceNode("/dev/ctl", "/dev/ctl", "r")),
            ("example.com/card=0",),
        )


def test_optional_methods_are_called_if_the_author_defines_them(
    manager: DeviceManager, tmp_path: Path
) -> None:
    with running(Cards(), tmp_path):
        manager.wait_for(CARD, healthy=2)
        assert manager.preferred(CARD, ["card0", "card1"]) == ()
        assert not manager.pre_start(CARD, ["card0"])
    choosy = Choosy()
    manager.restart()
    with running(choosy, tmp_path):
        manager.wait_for(CARD, healthy=2)
        assert manager.preferred(CARD, ["card0", "card1"]) == ("card1",)
        assert manager.preferred(CARD, ["card0", "card1"], ["card0"], 2) == ("card0", "card1")
        assert manager.pre_start(CARD, ["card0"])
        assert choosy.calls == [("pre_start", ("card0",))]


def test_health_follows_the_author_and_a_list_that_fails_makes_all_unhealthy(
    manager: DeviceManager, tmp_path: Path
) -> None:
    plugin = Cards()
    with running(plugin, tmp_path):
        manager.wait_for(CARD, healthy=2)
        plugin.ill = {"card1"}
        assert not manager.wait_for(CARD, healthy=1)["card1"].healthy
        plugin.broken = True
        assert manager.wait_for(CARD, healthy=0).keys() == {"card0", "card1"}
        plugin.broken, plugin.ill = False, set()
        manager.wait_for(CARD, healthy=2)


def test_what_the_author_raises_is_an_error_of_that_call_alone(
    manager: DeviceManager, tmp_path: Path
) -> None:
    plugin = Cards()
    with running(plugin, tmp_path):
        manager.wait_for(CARD, healthy=2)
        with pytest.raises(
            AssertionError, match=r"device plugin of example\.com/card: ValueError: one card a"
        ):
            manager.allocate(CARD, ["card0", "card1"])
        assert manager.allocate(CARD, ["card0"]).envs == {"CARD": "card0"}


def test_unknown_and_unhealthy_devices_are_refused_without_the_author(
    manager: DeviceManager, tmp_path: Path
) -> None:
    plugin = Cards()
    plugin.ill = {"card1"}
    with running(plugin, tmp_path):
        manager.wait_for(CARD, healthy=1)
        for name, why in (("card1", "it is unhealthy"), ("card9", "there is no such device")):
            with pytest.raises(AssertionError, match=f"cannot give device {name}: {why}"):
                manager.allocate(CARD, [name])
        assert plugin.calls == []


def test_a_plugin_registers_again_with_a_manager_that_was_restarted(
    manager: DeviceManager, tmp_path: Path
) -> None:
    with running(Cards(), tmp_path):
        manager.wait_for(CARD, healthy=2)
        for _ in range(3):
            manager.restart()
            manager.wait_for(CARD, healthy=2)
        assert manager.allocate(CARD, ["card0"]).envs == {"CARD": "card0"}
    assert manager.registrations == [CARD] * 4


def test_a_plugin_that_starts_before_its_manager_registers_when_that_is_there(tmp_path: Path) -> None:
    with running(Cards(), tmp_path):
        wait_until((tmp_path / "example.com_card.sock").exists)
        with DeviceManager(tmp_path) as manager:
            manager.wait_for(CARD, healthy=2)


def test_the_socket_of_a_plugin_that_was_killed_is_taken_over(manager: DeviceManager, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "example.com_card.sock"))
    with running(Cards(), tmp_path):
        manager.wait_for(CARD, healthy=2)
        assert manager.allocate(CARD, ["card0"]).envs == {"CARD": "card0"}


def test_a_manager_that_stays_but_loses_its_stream_is_registered_with_again(
    manager: DeviceManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.device_kit.serving.UNWATCHED_S", 0.3)
    with running(Cards(), tmp_path):
        manager.wait_for(CARD, healthy=2)
        manager._channels[CARD].close()
        wait_until(lambda: len(manager.registrations) == 2)
        manager.wait_for(CARD, healthy=2)
        assert manager.allocate(CARD, ["card1"]).envs == {"CARD": "card1"}


def test_a_plugin_that_is_refused_tries_again(manager: DeviceManager, tmp_path: Path) -> None:
    manager.refusal = "kubelet manages it"
    with running(Cards(), tmp_path):
        wait_until((tmp_path / "example.com_card.sock").exists)
        time.sleep(0.2)
        assert manager.registrations == []
        manager.refusal = ""
        manager.wait_for(CARD, healthy=2)


def test_the_socket_is_gone_after_the_end_and_only_root_may_use_it_before(
    manager: DeviceManager, tmp_path: Path
) -> None:
    path = tmp_path / "example.com_card.sock"
    with running(Cards(), tmp_path):
        manager.wait_for(CARD, healthy=2)
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_two_devices_of_one_id_are_a_fault_of_the_list() -> None:
    class Twins(Cards):
        def devices(self) -> Iterator[PluginDevice]:
            yield PluginDevice("same")
            yield PluginDevice("same")

    reported = telemetry()
    PluginService(Twins(), reported).refresh()
    (problem,) = reported.problems()
    assert problem["message"] == "cannot list devices"
    assert "an id of its own" in str(problem)


@pytest.mark.parametrize("numa", [0, 1, ("1",), (True,), (-1,), (1 << 70,), None, "0"])
def test_nodes_that_are_no_tuple_of_numbers_are_a_fault_of_the_list(numa: Any) -> None:
    class Careless(Cards):
        def devices(self) -> Iterator[PluginDevice]:
            yield PluginDevice("card", numa=numa)

    reported = telemetry()
    PluginService(Careless(), reported).refresh()
    (problem,) = reported.problems()
    assert problem["message"] == "cannot list devices"
    assert "device 'card'" in str(problem)


def test_what_is_no_device_is_a_fault_of_the_list() -> None:
    class Names(Cards):
        def devices(self) -> Iterator[Any]:
            yield "card"

    reported = telemetry()
    PluginService(Names(), reported).refresh()
    assert "must return PluginDevice objects, not 'card'" in str(reported.problems())


def test_a_list_of_a_thousand_devices_is_sent_once_if_nothing_changes(
    manager: DeviceManager, tmp_path: Path
) -> None:
    class Many(Cards):
        rounds = 0

        def devices(self) -> Iterator[PluginDevice]:
            self.rounds += 1
            for number in range(1000):
                yield PluginDevice(f"device-{number}", numa=(number % 8,))

    plugin, versions = Many(), set()
    server = testing.PluginServer(plugin, tmp_path, telemetry(), tick_s=0.05)
    server.start()
    try:
        manager.wait_for(CARD, healthy=1000)
        wait_until(lambda: plugin.rounds > 3)
        versions.add(server._service._version)
    finally:
        server.stop()
    assert versions == {1}


def test_a_manager_that_leaves_a_registration_unanswered_does_not_delay_the_end(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as manager:
        manager.bind(str(tmp_path / "kubelet.sock"))
        manager.listen()
        server = testing.PluginServer(Cards(), tmp_path, telemetry(), tick_s=0.05)
        server.start()
        manager.settimeout(10)
        connection, _ = manager.accept()
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < 10
        assert not (tmp_path / "example.com_card.sock").exists()
        connection.close()


def test_a_devices_method_that_hangs_keeps_neither_calls_nor_the_end_waiting(
    manager: DeviceManager, tmp_path: Path
) -> None:
    class Stuck(Cards):
        free = threading.Event()
        listed = False

        def devices(self) -> Iterator[PluginDevice]:
            if self.listed:
                self.free.wait(30)
            self.listed = True
            return super().devices()

    plugin = Stuck()
    begun = time.monotonic()
    with running(plugin, tmp_path):
        manager.wait_for(CARD, healthy=2)
        assert manager.allocate(CARD, ["card0"]).envs == {"CARD": "card0"}
    assert time.monotonic() - begun < 15
    plugin.free.set()


def test_a_missing_directory_is_named_with_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "device-plugins"
    reporter = telemetry()

    def reported(text: str) -> bool:
        return any(text in str(problem["what"]) for problem in reporter.problems())

    for ours in (False, True):
        if ours:
            monkeypatch.setattr("proxy.device_kit.serving.DIRECTORY", directory)
        hint = " (the daemon makes it when devicePlugins.enabled is true)" if ours else ""
        server = testing.PluginServer(Cards(), directory, reporter, tick_s=0.05)
        server.start()
        try:
            expected = f"cannot listen in {directory}: there is no such directory{hint}"
            wait_until(partial(reported, expected))
        finally:
            server.stop()
