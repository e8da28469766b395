"""The ends of a link, on real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from proxy.frontends.cri import pipe
from proxy.frontends.cri.pipe import HIGH_WATER, READ_BYTES, Pipe, PipeCallbacks
from proxy.frontends.cri.relay_loop import RelayLoop

if TYPE_CHECKING:
    import pytest


class Joined:
    """Two pipes connected as in a link: each writes what the other reads; tests use the far ends."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.left, near_left = socket.socketpair()
        self.right, near_right = socket.socketpair()
        for end in (self.left, self.right, near_left, near_right):
            end.setblocking(False)
        self.short = 0
        self.a = Pipe(
            lambda d: self.b.write([d]), lambda: self._said("a ended"), lambda: self._said("a lost"),
            PipeCallbacks(lambda e: self._failed(self.a, e), self._no_memory),
        )  # fmt: skip
        self.b = Pipe(
            lambda d: self.a.write([d]), lambda: self._said("b ended"), lambda: self._said("b lost"),
            PipeCallbacks(lambda e: self._failed(self.b, e), self._no_memory),
        )  # fmt: skip
        self.a.other, self.b.other = self.b, self.a
        self.a.attach(near_left)
        self.b.attach(near_right)

    def _failed(self, end: Pipe, error: Exception) -> None:
        self._said(f"{'a' if end is self.a else 'b'} failed: {error}")
        end.abort()

    def _no_memory(self) -> None:
        self.short += 1

    def _said(self, what: str) -> None:
        self.events.append(what)

    def shut(self) -> None:
        for end in (self.a, self.b):
            end.close()
            end._finish()  # do not wait for a peer that does not read
        for end in (self.left, self.right):
            end.close()


def run_scenario(scenario: Callable[[Joined], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        joined = Joined()
        try:
            await scenario(joined)
        finally:
            joined.shut()
            await asyncio.sleep(0)

    for loop_factory in (RelayLoop, asyncio.SelectorEventLoop):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(asyncio.wait_for(run(), 60))


async def exactly(end: socket.socket, size: int) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < size:
        piece = await loop.sock_recv(end, min(1 << 20, size - len(received)))
        assert piece, "it ended early"
        received += piece
    return received


def test_bytes_pass_in_both_directions_in_order() -> None:
    async def scenario(j: Joined) -> None:
        loop = asyncio.get_running_loop()
        for size in (1, 100, 300_000):
            data = bytes(i * 7 & 0xFF for i in range(size))
            sending = asyncio.create_task(loop.sock_sendall(j.left, data))
            assert await exactly(j.right, size) == data
            await sending
            sending = asyncio.create_task(loop.sock_sendall(j.right, data))
            assert await exactly(j.left, size) == data
            await sending

    run_scenario(scenario)


def test_a_peer_that_does_not_read_pauses_reads_from_the_other_peer() -> None:
    async def scenario(j: Joined) -> None:
        loop = asyncio.get_running_loop()
        data = bytes(range(256)) * (40 << 12)  # 40 MiB
        sending = asyncio.create_task(loop.sock_sendall(j.left, data))
        worst = 0
        while worst <= HIGH_WATER:  # pytest's time limit ends an endless loop
            await asyncio.sleep(0.005)
            worst = max(worst, j.b.waiting)
        for _ in range(20):
            await asyncio.sleep(0.005)
            worst = max(worst, j.b.waiting)
        assert worst <= HIGH_WATER + 2 * READ_BYTES
        assert not sending.done(), "40 MiB do not fit anywhere"
        assert await exactly(j.right, len(data)) == data
        await sending
        assert j.b.waiting == 0
        await loop.sock_sendall(j.left, b"on")  # reading continues
        assert await exactly(j.right, 2) == b"on"

    run_scenario(scenario)


def test_an_end_of_file_passes_after_pending_bytes() -> None:
    async def scenario(j: Joined) -> None:
        loop = asyncio.get_running_loop()
        data = b"x" * (2 << 20)
        j.b.write([data[: 1 << 20], data[1 << 20 :]])
        j.b.end()
        j.b.end()
        assert await exactly(j.right, len(data)) == data
        assert await loop.sock_recv(j.right, 1) == b""
        await loop.sock_sendall(j.right, b"still")  # the other direction is open
        assert await exactly(j.left, 5) == b"still"

    run_scenario(scenario)


def test_bytes_after_an_end_of_file_do_not_break_the_other_direction() -> None:
    """After the client's end the session may still grant window to the runtime."""

    async def scenario(j: Joined) -> None:
        j.b.end()
        j.b.write([b"window"])
        await asyncio.sleep(0.02)
        assert j.events == []
        await asyncio.get_running_loop().sock_sendall(j.right, b"answer")
        assert await exactly(j.left, 6) == b"answer"

    run_scenario(scenario)


def test_the_end_of_file_of_a_peer_is_reported_once_and_writing_continues() -> None:
    async def scenario(j: Joined) -> None:
        j.left.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0.05)
        assert j.events == ["a ended"]
        j.a.write([b"answer"])
        assert await exactly(j.left, 6) == b"answer"
        j.a.resume()
        await asyncio.sleep(0.02)
        assert j.events == ["a ended"], "there are no more bytes to read"

    run_scenario(scenario)


def test_close_sends_pending_bytes_first() -> None:
    async def scenario(j: Joined) -> None:
        data = b"y" * (3 << 20)
        j.b.write([data])
        j.b.close()
        j.b.close()
        assert j.b.attached
        assert await exactly(j.right, len(data)) == data
        assert await asyncio.get_running_loop().sock_recv(j.right, 1) == b""
        assert not j.b.attached
        j.b.write([b"late"])  # has no effect after close

    run_scenario(scenario)


def test_close_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "LINGER_S", 0.05)

    async def scenario(j: Joined) -> None:
        j.b.write([b"z" * (3 << 20)])
        j.b.close()
        await asyncio.sleep(0.2)
        assert not j.b.attached
        assert j.b.waiting == 0

    run_scenario(scenario)


def test_a_closed_peer_is_reported_outside_of_the_write() -> None:
    async def scenario(j: Joined) -> None:
        j.right.close()
        j.b.pause()
        j.b.write([b"x"])
        assert j.events == []
        await asyncio.sleep(0.02)
        assert j.events == ["b lost"]

    run_scenario(scenario)


def test_a_peer_that_closes_with_pending_bytes_ends_a_close_at_once() -> None:
    async def scenario(j: Joined) -> None:
        j.b.write([b"x" * (3 << 20)])
        j.b.close()
        assert j.b.attached, "the bytes wait"
        j.right.close()
        await asyncio.sleep(0.05)
        assert not j.b.attached, "epoll would report the socket for as long as it is open"

    run_scenario(scenario)


def test_a_peer_that_closes_with_pending_bytes_is_reported() -> None:
    async def scenario(j: Joined) -> None:
        j.b.write([b"x" * (3 << 20)])
        j.b.pause()
        j.right.close()
        await asyncio.sleep(0.05)
        assert "b lost" in j.events

    run_scenario(scenario)
