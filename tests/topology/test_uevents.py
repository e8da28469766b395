"""The kernel's events about hardware that is added or removed."""

from __future__ import annotations

import errno
import select
import socket
from pathlib import Path

import pytest

from proxy.topology import uevents
from proxy.topology.uevents import Uevents, is_about_cpu_or_memory, subscribe_to_uevents

CPU = Path("/sys/devices/system/cpu/cpu0/uevent")


@pytest.mark.parametrize(
    ("first", "matters"),
    [
        (b"offline@/devices/system/cpu/cpu3", True),
        (b"online@/devices/system/memory/memory32", True),
        (b"remove@/devices/system/node/node2", True),
        (b"add@/devices/system/cpu/cpu64", True),
        (b"change@/devices/system/cpu/cpu3", False),
        (b"add@/devices/virtual/net/veth0", False),
        (b"online@/devices/system/cpufreq/policy0", False),
        (b"libudev\0", False),
        (b"", False),
    ],
)
def test_relevant_events_are_recognized(first: bytes, matters: bool) -> None:
    assert is_about_cpu_or_memory(first + b"\0ACTION=x\0SEQNUM=1") is matters


def test_the_kernel_reports_without_delay() -> None:
    reported, lack = subscribe_to_uevents()
    if reported is None:
        pytest.skip(lack)
    try:
        while reported.read_changes():
            pass
        assert not reported.read_changes()
        try:
            CPU.write_text("online")  # the kernel repeats the event, and nothing else changes
        except OSError as error:
            pytest.skip(f"cannot have the kernel send an event: {error}")
        assert select.select([reported], [], [], 10)[0]
        assert reported.read_changes()
    finally:
        reported.close()


class Lost:
    """A socket whose receive queue has overflowed."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)

    def recv(self, size: int) -> bytes:
        if not self.errors:
            raise BlockingIOError
        raise OSError(self.errors.pop(), "made")


def test_lost_events_count_as_relevant(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = Uevents.__new__(Uevents)
    monkeypatch.setattr(reported, "_socket", Lost(errno.ENOBUFS), raising=False)
    assert reported.read_changes()
    assert not reported.read_changes()
    monkeypatch.setattr(reported, "_socket", Lost(errno.EBADF), raising=False)
    with pytest.raises(OSError, match="made"):
        reported.read_changes()


def test_a_forbidden_socket_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(uevents.socket, "socket", refuse)
    reported, lack = subscribe_to_uevents()
    assert reported is None
    assert lack == "cannot listen to the kernel's uevents: Address family not supported by protocol"
