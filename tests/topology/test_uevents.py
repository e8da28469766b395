"""The kernel's own word of hardware that comes and goes."""

from __future__ import annotations

import errno
import select
import socket
from pathlib import Path

import pytest

from proxy.topology import uevents
from proxy.topology.uevents import Uevents, concerns, listen

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
def test_what_matters(first: bytes, matters: bool) -> None:
    assert concerns(first + b"\0ACTION=x\0SEQNUM=1") is matters


def test_the_kernel_reports_without_delay() -> None:
    reported, lack = listen()
    if reported is None:
        pytest.skip(lack)
    try:
        while reported.changed():
            pass
        assert not reported.changed()
        try:
            CPU.write_text("online")  # the kernel says it again, and nothing else happens
        except OSError as error:
            pytest.skip(f"cannot have the kernel send an event: {error}")
        assert select.select([reported], [], [], 10)[0]
        assert reported.changed()
    finally:
        reported.close()


class Lost:
    """A socket on which more came than could wait."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)

    def recv(self, size: int) -> bytes:
        if not self.errors:
            raise BlockingIOError
        raise OSError(self.errors.pop(), "made")


def test_what_is_lost_may_have_mattered(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = Uevents.__new__(Uevents)
    monkeypatch.setattr(reported, "_socket", Lost(errno.ENOBUFS), raising=False)
    assert reported.changed()
    assert not reported.changed()
    monkeypatch.setattr(reported, "_socket", Lost(errno.EBADF), raising=False)
    with pytest.raises(OSError, match="made"):
        reported.changed()


def test_listening_may_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(uevents.socket, "socket", refuse)
    reported, lack = listen()
    assert reported is None
    assert lack == "cannot listen to the kernel's uevents: Address family not supported by protocol"
