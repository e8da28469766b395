"""A stand-in for systemd on a unix socket, which uses real D-Bus messages."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jeepney.low_level import HeaderFields, Message, Parser
from jeepney.wrappers import DBusAddress, new_error, new_method_return, new_signal

from proxy.backends.systemd.dbus import DbusConnection
from proxy.backends.systemd.units import SystemdUnits, mask_bytes, object_path, systemd_sockets
from proxy.executor.systemd.ports import SystemdEvent, UnitSets
from proxy.model.backoff import Backoff
from proxy.model.errors import CgroupError, UnavailableError
from proxy.model.idset import CpuSet, Mask
from tests.testkit.waiting import wait_until

NAME = "org.freedesktop.systemd1"
SCOPE = "cri-containerd-ab12.scope"
LONG_S = 30.0


class PlayedSystemd:
    """Answers as systemd at a socket, with properties by object path."""

    def __init__(self, path: Path) -> None:
        self.properties: dict[str, dict[str, bytes]] = {object_path(SCOPE): {}}
        self.calls: list[str] = []
        self.silent = self.rude = False
        self.answer: tuple[str | None, tuple[Any, ...]] | None = None
        """Signature and body of the answer to Get, instead of a property."""
        self.connections: list[socket.socket] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._over = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._over:
            with suppress(OSError):
                connection, _ = self._server.accept()
                self.connections.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            login = b""
            while not login.endswith(b"\r\n"):
                login += connection.recv(100)
            assert login == b"\0AUTH EXTERNAL " + str(os.geteuid()).encode().hex().encode() + b"\r\n"
            if self.rude:
                connection.sendall(b"REJECTED EXTERNAL\r\n")
                connection.close()
                return
            connection.sendall(b"OK 0123456789abcdef0123456789abcdef\r\n")
            assert connection.recv(7, socket.MSG_WAITALL) == b"BEGIN\r\n"
            parser, serial = Parser(), 0
            while data := connection.recv(4096):
                for message in parser.feed(data):
                    if not self.silent:
                        serial += 1
                        connection.sendall(self._answer(message).serialise(serial))

    def _answer(self, message: Message) -> Message:
        member = message.header.fields[HeaderFields.member]
        self.calls.append(member)
        if member == "Get":
            kind, name = message.body
            path = message.header.fields[HeaderFields.path]
            if self.answer is not None:
                return new_method_return(message, *self.answer)
            assert kind == f"{NAME}.{'Slice' if path.endswith('_2eslice') else 'Scope'}"
            return new_method_return(message, "v", (("ay", self.properties.get(path, {}).get(name, b"")),))
        if member == "SetUnitProperties":
            unit, runtime, values = message.body
            assert runtime is True
            if object_path(unit) not in self.properties:
                return new_error(message, f"{NAME}.NoSuchUnit", "s", (f"Unit {unit} not found.",))
            for name, (signature, value) in values:
                assert signature == "ay"
                self.properties[object_path(unit)][name] = bytes(value)
            return new_method_return(message)
        assert member in ("Hello", "AddMatch", "Subscribe")
        return new_method_return(message, "s", (":1.7",)) if member == "Hello" else new_method_return(message)

    def send(self, member: str, signature: str = "", body: tuple[Any, ...] = ()) -> None:
        """Send a signal to all connections."""
        emitter = DBusAddress("/org/freedesktop/systemd1", interface=f"{NAME}.Manager")
        for connection in self.connections:
            with suppress(OSError):
                connection.sendall(new_signal(emitter, member, signature, body).serialise(7000))

    def end(self) -> None:
        """Close every connection."""
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.connections.clear()

    def close(self) -> None:
        self._over = True
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.end()
        for thread in self._threads:
            thread.join(LONG_S)


@pytest.fixture
def address(tmp_path: Path) -> Path:
    return tmp_path / "private"


@pytest.fixture
def systemd(address: Path) -> Iterator[PlayedSystemd]:
    played = PlayedSystemd(address)
    yield played
    played.close()


@pytest.fixture
def reloads() -> list[SystemdEvent]:
    return []


@pytest.fixture
def units(systemd: PlayedSystemd, address: Path, reloads: list[SystemdEvent]) -> Iterator[SystemdUnits]:
    made = SystemdUnits(lambda: [str(address)], LONG_S)
    made.watch(reloads.append)
    yield made
    made.close()


def test_masks_are_little_endian() -> None:
    assert mask_bytes(CpuSet.parse("0-1,20-23")) == b"\x03\x00\xf0"
    assert mask_bytes(CpuSet()) == b""


def test_paths_of_units_are_escaped() -> None:
    assert object_path("1a-b.scope") == "/org/freedesktop/systemd1/unit/_31a_2db_2escope"
    assert object_path("é.slice").endswith("/_c3_a9_2eslice")


def test_properties_that_were_set_are_read(systemd: PlayedSystemd, units: SystemdUnits) -> None:
    assert units.read(SCOPE) == UnitSets(CpuSet(), Mask())
    units.set(SCOPE, CpuSet.parse("8-11"), Mask.parse("1"))
    assert systemd.properties[object_path(SCOPE)] == {
        "AllowedCPUs": b"\x00\x0f",
        "AllowedMemoryNodes": b"\x02",
    }
    assert units.read(SCOPE) == UnitSets(CpuSet.parse("8-11"), Mask.parse("1"))
    units.set(SCOPE, CpuSet(), None)
    assert units.read(SCOPE) == UnitSets(CpuSet(), Mask.parse("1"))


def test_a_set_call_returns_after_the_files_are_written(systemd: PlayedSystemd, units: SystemdUnits) -> None:
    """systemd writes the files before it handles another call."""
    units.set(SCOPE, CpuSet.parse("1"), None)
    assert systemd.calls[-2:] == ["SetUnitProperties", "Get"]


def test_slices_are_queried_with_the_slice_interface(systemd: PlayedSystemd, units: SystemdUnits) -> None:
    systemd.properties[object_path("kubepods.slice")] = {"AllowedCPUs": b"\xff"}
    assert units.read("kubepods.slice").cpus == CpuSet.parse("0-7")


@pytest.mark.parametrize(
    ("signature", "body", "cause"),
    [
        (None, (), "does not answer with one value"),
        ("su", ("x", 1), "does not answer with one value"),
        ("s", ("ay",), "does not answer with one value"),
        ("v", (("s", "x"),), r"answers with another type \(s\)"),
    ],
)
def test_an_answer_of_another_form_is_an_error(
    systemd: PlayedSystemd, units: SystemdUnits, signature: str | None, body: tuple[Any, ...], cause: str
) -> None:
    systemd.answer = signature, body
    with pytest.raises(CgroupError, match=f"cannot read AllowedCPUs of {SCOPE}: systemd {cause}"):
        units.read(SCOPE)


def test_a_unit_that_is_not_there(units: SystemdUnits) -> None:
    with pytest.raises(CgroupError, match=r"cannot SetUnitProperties at systemd: .*not found") as caught:
        units.set("cri-containerd-gone.scope", CpuSet.parse("1"), None)
    assert caught.value.errno == 2


def test_reloads_are_reported_when_they_are_over(
    systemd: PlayedSystemd, units: SystemdUnits, reloads: list[SystemdEvent]
) -> None:
    wait_until(lambda: reloads == [SystemdEvent.CONNECTED])
    systemd.send("UnitNew", "so", ("a.scope", "/a"))
    systemd.send("Reloading", "b", (True,))
    systemd.send("Reloading", "b", (False,))
    wait_until(lambda: SystemdEvent.RELOADED in reloads)
    assert units.read(SCOPE).cpus == CpuSet()
    assert reloads == [SystemdEvent.CONNECTED, SystemdEvent.RELOADED]


def test_the_client_reconnects(
    systemd: PlayedSystemd, units: SystemdUnits, reloads: list[SystemdEvent]
) -> None:
    wait_until(lambda: reloads == [SystemdEvent.CONNECTED])
    systemd.end()
    wait_until(lambda: reloads == [SystemdEvent.CONNECTED, SystemdEvent.LOST, SystemdEvent.CONNECTED])
    assert units.read(SCOPE).cpus == CpuSet()


def test_invalid_bytes_end_only_the_connection(
    systemd: PlayedSystemd, units: SystemdUnits, reloads: list[SystemdEvent]
) -> None:
    wait_until(lambda: reloads == [SystemdEvent.CONNECTED])
    systemd.connections[0].sendall(b"l\x02" + bytes(14) + b"no D-Bus" * 9)
    wait_until(lambda: reloads[1:] == [SystemdEvent.LOST, SystemdEvent.CONNECTED])
    assert units.read(SCOPE).cpus == CpuSet()


def test_a_message_that_is_too_long_is_refused(
    systemd: PlayedSystemd, units: SystemdUnits, reloads: list[SystemdEvent]
) -> None:
    wait_until(lambda: reloads == [SystemdEvent.CONNECTED])
    systemd.connections[0].sendall(b"l\x04\x01\x01" + b"\xff\xff\xff\x0f" + bytes(8))
    wait_until(lambda: SystemdEvent.LOST in reloads)


def test_a_systemd_that_does_not_answer_is_reported(systemd: PlayedSystemd, address: Path) -> None:
    units = SystemdUnits(lambda: [str(address)], 0.3)
    with pytest.raises(UnavailableError, match="not connected yet"):
        units.read(SCOPE)
    received: list[SystemdEvent] = []
    units.watch(received.append)
    wait_until(lambda: received)
    systemd.silent = True
    with pytest.raises(UnavailableError, match=r"no answer within 0\.3 s"):
        units.read(SCOPE)
    units.close()
    with pytest.raises(UnavailableError):
        units.read(SCOPE)


def test_a_refused_login_is_reported(systemd: PlayedSystemd, address: Path) -> None:
    systemd.rude = True
    units = SystemdUnits(lambda: [str(address)], 2.0)
    units.watch(lambda _: None)
    wait_until(
        lambda: len(systemd.connections) > 1
    )  # so the client has noticed that the first login was refused
    with pytest.raises(UnavailableError, match=r"cannot connect to .*private: .*REJECTED"):
        units.read(SCOPE)
    units.close()


def test_a_connection_that_is_closed_at_once_is_retried_ever_more_rarely(
    systemd: PlayedSystemd, address: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = SystemdUnits(lambda: [str(address)], LONG_S)
    pauses: list[float] = []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return units._closing.is_set()

    monkeypatch.setattr(units._closing, "wait", wait)
    monkeypatch.setattr("proxy.backends.systemd.units._PAUSES", Backoff(0.1, 10.0, steady=LONG_S))
    units.watch(lambda reloads: systemd.end() if reloads is SystemdEvent.CONNECTED else None)
    wait_until(lambda: len(pauses) > 9)
    units.close()
    assert pauses[:9] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_a_connection_that_ends_while_it_is_reported_is_reported_as_lost(
    systemd: PlayedSystemd, address: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd hangs up at once beyond its number of connections; the subscriber may notice that late."""
    received: list[SystemdEvent] = []
    subscribe = SystemdUnits._subscribe

    def subscribe_late(units: SystemdUnits, connection: DbusConnection, *rest: Any) -> None:
        systemd.end()
        wait_until(lambda: connection._closed)
        # The reader must wait for this function: nothing shows that it does, only that it does not go on.
        time.sleep(0.05)
        subscribe(units, connection, *rest)

    monkeypatch.setattr(SystemdUnits, "_subscribe", subscribe_late)
    units = SystemdUnits(lambda: [str(address)], LONG_S)
    units.watch(received.append)
    wait_until(lambda: len(received) > 3)
    units.close()
    assert received[:4] == [SystemdEvent.CONNECTED, SystemdEvent.LOST] * 2


def test_the_client_connects_once_there_is_a_descriptor_again(
    systemd: PlayedSystemd, address: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = socket.socket, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def limited(*args: Any, **kwargs: Any) -> socket.socket:
        if failures:
            raise failures.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(socket, "socket", limited)
    with pytest.raises(UnavailableError, match=r"cannot connect to .*private: Too many open files"):
        DbusConnection(str(address), LONG_S)
    failures.append(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    units = SystemdUnits(lambda: [str(address)], LONG_S)
    units.watch(lambda _: None)
    assert units.read(SCOPE).cpus == CpuSet()
    assert not failures
    units.close()


def test_the_client_reconnects_after_an_internal_error(
    systemd: PlayedSystemd, address: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.backends.systemd.units._PAUSES", Backoff(0.1, 0.1))
    received: list[SystemdEvent] = []
    failures = [RuntimeError("can't start new thread")]

    def addresses() -> list[str]:
        if failures:
            raise failures.pop()
        return [str(address)]

    def fail_at_reloads(event: SystemdEvent) -> None:
        received.append(event)
        if event is SystemdEvent.RELOADED:
            raise ValueError("an internal error")

    units = SystemdUnits(addresses, LONG_S)
    units.watch(fail_at_reloads)
    wait_until(lambda: "can't start new thread" in units._disconnected_because)
    wait_until(lambda: received == [SystemdEvent.CONNECTED])
    systemd.send("Reloading", "b", (False,))
    wait_until(lambda: received[2:] == [SystemdEvent.LOST, SystemdEvent.CONNECTED])
    assert units.read(SCOPE).cpus == CpuSet()
    units.close()


def test_the_next_socket_is_tried(systemd: PlayedSystemd, address: Path, tmp_path: Path) -> None:
    units = SystemdUnits(lambda: [str(tmp_path / "absent"), str(address)], LONG_S)
    units.watch(lambda _: None)
    assert units.read(SCOPE).cpus == CpuSet()
    units.close()


def test_the_client_subscribes_to_signals_on_a_bus(tmp_path: Path) -> None:
    path = tmp_path / "system_bus_socket"
    played = PlayedSystemd(path)
    units = SystemdUnits(lambda: [str(path)], LONG_S)
    units.watch(lambda _: None)
    units.set(SCOPE, CpuSet.parse("3"), None)
    assert played.calls[:3] == ["Hello", "AddMatch", "Subscribe"]
    units.close()
    played.close()


def test_a_bus_that_does_not_answer_is_reported_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.backends.systemd.units._PAUSES", Backoff(LONG_S, LONG_S))
    path = tmp_path / "system_bus_socket"
    played = PlayedSystemd(path)
    played.silent = True
    units = SystemdUnits(lambda: [str(path)], 1.0)
    units.watch(lambda _: None)
    wait_until(lambda: "no answer" in units._disconnected_because)
    with pytest.raises(UnavailableError, match=r"cannot query systemd: .*no answer within 1 s"):
        units.read(SCOPE)
    units.close()
    played.close()


def test_the_socket_depends_on_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run/systemd/private", "run/dbus/system_bus_socket"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    private, bus = systemd_sockets(tmp_path)
    assert private.endswith("private")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert systemd_sockets(tmp_path) == [bus]


def test_calls_of_many_threads(systemd: PlayedSystemd, units: SystemdUnits) -> None:
    names = [f"cri-containerd-{n}.scope" for n in range(8)]
    for number, name in enumerate(names):
        systemd.properties[object_path(name)] = {"AllowedCPUs": bytes([1 << number])}
    wrong: list[int] = []

    def read(number: int) -> None:
        found = {units.read(names[number]).cpus for _ in range(20)}
        if found != {CpuSet([number])}:
            wrong.append(number)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not wrong
