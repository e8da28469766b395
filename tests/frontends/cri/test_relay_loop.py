"""The daemon's event loop: watched sockets are called at once, and do not delay asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from proxy.frontends.cri import relay_loop
from proxy.frontends.cri.busy_poll import WaitHistory
from proxy.frontends.cri.relay_loop import RelayLoop

LIMIT_S = 60
_busy_poll_s = 0.0


@pytest.fixture
def pairs() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Yield a factory of pairs of non-blocking sockets."""
    with contextlib.ExitStack() as ends:

        def pair() -> tuple[socket.socket, socket.socket]:
            made = socket.socketpair()
            for end in made:
                end.setblocking(False)
                ends.enter_context(end)
            return made

        yield pair


@pytest.fixture(autouse=True, params=[0.0, 0.0002], ids=["sleeps", "polls"])
def busy_poll_s(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with a loop that sleeps at once and with one that polls first."""
    global _busy_poll_s
    _busy_poll_s = request.param
    yield
    _busy_poll_s = 0.0


def run_scenario(scenario: Callable[[RelayLoop], Any], may_poll: Callable[[], bool] = lambda: True) -> Any:
    async def run() -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, RelayLoop)
        async with asyncio.timeout(LIMIT_S):
            return await scenario(loop)

    with asyncio.Runner(loop_factory=partial(RelayLoop, _busy_poll_s, may_poll)) as runner:
        return runner.run(run())


def echo(loop: RelayLoop, one: socket.socket, other: socket.socket) -> list[int]:
    """Make two sockets answer each other without end; returns the count of answers."""
    count = [0]

    def answer(end: socket.socket) -> None:
        count[0] += 1
        end.send(end.recv(8))

    loop.watch(one.fileno(), lambda: answer(one), None)
    loop.watch(other.fileno(), lambda: answer(other), None)
    one.send(b"on")
    return count


def quiet(loop: RelayLoop, *ends: socket.socket) -> None:
    for end in ends:
        loop.watch(end.fileno(), None, None)


@pytest.mark.parametrize("threads_idle", [True, False])
def test_waits_after_messages_may_poll_and_those_after_work_never(
    pairs, monkeypatch: pytest.MonkeyPatch, threads_idle: bool
) -> None:
    one, other = pairs()
    waits: list[tuple[float | None, float]] = []

    class RecordedHistory(WaitHistory):
        __slots__ = ()

        def wait(self, poll, timeout, limit):
            waits.append((timeout, limit))
            return super().wait(poll, timeout, limit)

    monkeypatch.setattr(relay_loop, "WaitHistory", RecordedHistory)

    async def scenario(loop: RelayLoop) -> None:
        done = loop.create_future()
        answers = 0

        def answer(end: socket.socket) -> None:
            nonlocal answers
            answers += 1
            if answers == 20:
                loop.call_soon(done.set_result, None)
                return
            end.send(end.recv(8))

        loop.watch(one.fileno(), lambda: answer(one), None)
        loop.watch(other.fileno(), lambda: answer(other), None)
        one.send(b"on")
        await done
        quiet(loop, one, other)
        waits.append((0, 0))
        await asyncio.sleep(0.001)

    run_scenario(scenario, lambda: threads_idle)
    polling = [_busy_poll_s] * 19 if _busy_poll_s and threads_idle else []
    assert [limit for _, limit in waits] == [*polling, 0]


def test_timers_and_tasks_run_while_watched_sockets_are_always_ready(pairs):
    one, other = pairs()

    async def scenario(loop: RelayLoop) -> int:
        count = echo(loop, one, other)
        for _ in range(5):
            await asyncio.sleep(0.01)
        quiet(loop, one, other)
        return count[0]

    assert run_scenario(scenario) > 5


def test_calls_from_other_threads_run_while_watched_sockets_are_always_ready(pairs):
    one, other = pairs()

    async def scenario(loop: RelayLoop) -> None:
        echo(loop, one, other)
        future = loop.create_future()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(future.set_result, None))
        thread.start()
        await future
        thread.join()
        quiet(loop, one, other)

    run_scenario(scenario)


def test_other_descriptors_are_read_while_watched_sockets_are_always_ready(pairs):
    (one, other), (near, far) = pairs(), pairs()

    async def scenario(loop: RelayLoop) -> bytes:
        echo(loop, one, other)
        far.send(b"plain")
        received = await loop.sock_recv(near, 8)
        quiet(loop, one, other)
        return received

    assert run_scenario(scenario) == b"plain"


def test_a_scheduled_call_runs_before_the_next_poll(pairs):
    one, other = pairs()
    events = []

    async def scenario(loop: RelayLoop) -> None:
        done = loop.create_future()

        def readable() -> None:
            events.append("read")
            if events.count("read") == 2:
                quiet(loop, one)
                done.set_result(None)
            else:
                loop.call_soon(events.append, "soon")

        loop.watch(one.fileno(), readable, None)
        other.send(b"unread")  # so the socket stays ready
        await done

    run_scenario(scenario)
    assert events == ["read", "soon", "read"]


def test_a_timer_that_a_function_sets_is_kept(pairs):
    one, other = pairs()

    async def scenario(loop: RelayLoop) -> None:
        done = loop.create_future()

        def readable() -> None:
            one.recv(8)
            loop.call_later(0.01, done.set_result, None)

        loop.watch(one.fileno(), readable, None)
        other.send(b"x")
        await done
        quiet(loop, one)

    run_scenario(scenario)


def test_a_function_may_stop_the_loop(pairs):
    one, other = pairs()
    loop = RelayLoop()
    try:
        loop.watch(one.fileno(), loop.stop, None)
        other.send(b"unread")
        guard = threading.Timer(LIMIT_S, loop.call_soon_threadsafe, (loop.stop,))
        guard.start()
        loop.run_forever()
        assert guard.is_alive(), "it ran until the guard stopped it"
        guard.cancel()
        guard.join()
        quiet(loop, one)
    finally:
        loop.close()


def test_a_socket_is_not_called_after_another_one_has_ended_its_watch(pairs):
    (one, far), (two, away) = pairs(), pairs()
    calls = []

    async def scenario(loop: RelayLoop) -> None:
        def readable(name: str) -> None:
            calls.append(name)
            quiet(loop, one, two)

        loop.watch(one.fileno(), lambda: readable("one"), None)
        loop.watch(two.fileno(), lambda: readable("two"), None)
        far.send(b"x")
        away.send(b"x")
        await asyncio.sleep(0.05)

    run_scenario(scenario)
    assert len(calls) == 1


@pytest.mark.parametrize("ends_the_watch", [True, False])
def test_a_socket_can_be_read_and_written(pairs, ends_the_watch):
    one, other = pairs()
    calls = []

    async def scenario(loop: RelayLoop) -> None:
        done = loop.create_future()

        def readable() -> None:
            calls.append("read")
            one.recv(8)
            if ends_the_watch:
                quiet(loop, one)
                loop.call_later(0.02, done.set_result, None)

        def writable() -> None:
            calls.append("write")
            quiet(loop, one)
            done.set_result(None)

        other.send(b"x")
        loop.watch(one.fileno(), readable, writable)
        await done

    run_scenario(scenario)
    assert calls == (["read"] if ends_the_watch else ["read", "write"])


def test_the_functions_of_a_socket_can_be_replaced(pairs):
    one, other = pairs()
    calls = []

    async def scenario(loop: RelayLoop) -> None:
        done = loop.create_future()

        def now() -> None:
            calls.append("now")
            quiet(loop, one)
            done.set_result(None)

        loop.watch(one.fileno(), lambda: calls.append("before"), None)
        loop.watch(one.fileno(), now, None)
        other.send(b"x")
        await done

    run_scenario(scenario)
    assert calls == ["now"]


def test_an_error_of_a_function_is_reported_and_the_loop_continues(pairs):
    (one, other), (two, away) = pairs(), pairs()
    reported = []

    async def scenario(loop: RelayLoop) -> bytes:
        loop.set_exception_handler(lambda _, context: reported.append(context))
        done = loop.create_future()

        def broken() -> None:
            if len(reported) == 3:
                quiet(loop, one)
            raise ValueError("broken")

        loop.watch(one.fileno(), broken, None)
        loop.watch(two.fileno(), lambda: (quiet(loop, two), done.set_result(two.recv(8))), None)
        other.send(b"unread")
        away.send(b"read")
        received = await done
        await asyncio.sleep(0.02)
        return received

    assert run_scenario(scenario) == b"read"
    assert [str(context["exception"]) for context in reported] == ["broken"] * 4


def test_a_socket_without_functions_is_not_watched_even_if_its_peer_has_closed(pairs):
    one, other = pairs()

    async def scenario(loop: RelayLoop) -> int:
        calls = []
        loop.watch(one.fileno(), lambda: calls.append("read"), None)
        quiet(loop, one)
        quiet(loop, one)
        other.close()
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1

        waits = [loop.call_later(0.01 * i, turn) for i in range(3)]
        await asyncio.sleep(0.05)
        assert not calls
        assert all(wait.when() < loop.time() for wait in waits)
        return turns

    assert run_scenario(scenario) == 3
