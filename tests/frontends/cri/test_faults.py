"""An unexpected exception at each place of a link: that link ends, and other links are not affected."""

import asyncio
import socket

import pytest

from proxy.frontends.cri.link import Link, RelayContext
from proxy.relay.body_budget import BodyBudget
from tests.frontends.cri.attacks import CREATE, PREFACE, SETTINGS, VERSION, call, frame, open_stream
from tests.testkit.captured_log import report
from tests.testkit.waiting import until


class Decider:
    """Holds every call."""

    def __init__(self):
        self.calls, self.ends, self.raises = [], [], set()

    def request(self, call):
        self.calls.append(call)

    def anomaly(self, path, kind):
        if "unusual" in self.raises:
            raise MemoryError

    def response(self, call, message):
        pass

    def finished(self, call, status):
        self.ends.append(call)
        if "finished" in self.raises:
            raise MemoryError


class Setup:
    """Two links on real sockets, with one call held on each; the first one is to fail."""

    def __init__(self):
        self.decider, self.lines, self.faults, self.gone = Decider(), [], [], []
        self.budget = BodyBudget()
        context = RelayContext(
            self.decider,
            {CREATE.decode()}.__contains__,
            self.gone.append,
            report(self.lines),
            self.faults.append,
            budget=self.budget,
        )
        self.ends = []
        # The first body is the larger one: without memory, the largest held body is dropped first.
        self.link, self.client, self.server = self.joined(context, 6000)
        self.other, self.other_client, self.other_server = self.joined(context, 5000)

    def joined(self, context, size):
        link = Link(context)
        client, near_client = socket.socketpair()
        server, near_server = socket.socketpair()
        for end in (client, server, near_client, near_server):
            end.setblocking(False)
        self.ends += [client, server]
        link.server.attach(near_server)
        link.client.attach(near_client)
        client.send(PREFACE + frame(SETTINGS, 0, 0) + call(1, CREATE, b"c" * size))
        server.send(frame(SETTINGS, 0, 0))
        return link, client, server

    async def started(self):
        await until(lambda: len(self.decider.calls) == 2)
        assert self.budget.total == 6005 + 5005
        for end in self.ends:
            drain(end)

    async def check_ended(self):
        await until(lambda: self.link.closed and self.budget.total == 5005)
        assert not self.link.client.attached
        assert not self.link.server.attached
        assert self.gone == [self.link]
        assert [type(fault) for fault in self.faults][:1] == [MemoryError]
        assert any("ended a connection because of an internal error" in line for line in self.lines)
        assert self.budget.total == 5005
        assert drain(self.client)[1]
        assert drain(self.server)[1]
        (done, waiting) = self.decider.calls if self.decider.calls[0].done else self.decider.calls[::-1]
        assert self.decider.ends == [done]
        waiting.release()
        await asyncio.sleep(0.02)
        data, ended = drain(self.other_server)
        assert b"c" * 5000 in data
        assert not ended
        turns = await turns_of_the_loop(0.1)
        assert turns < 20, "the event loop is never idle"

    def close(self):
        for link in (self.link, self.other):
            link.lost()
        for end in self.ends:
            end.close()


def drain(end):
    """Return all received bytes, and whether the peer has closed."""
    data = b""
    try:
        while piece := end.recv(1 << 20):
            data += piece
    except BlockingIOError:
        return data, False
    except ConnectionError:
        return data, True
    return data, True


async def turns_of_the_loop(seconds):
    """Return the number of polls of an idle event loop."""
    loop, count = asyncio.get_running_loop(), 0
    select = loop._selector.select

    def counted(timeout=None):
        nonlocal count
        count += 1
        return select(timeout)

    loop._selector.select = counted
    try:
        await asyncio.sleep(seconds)
    finally:
        loop._selector.select = select
    return count


def fails(*_):
    raise MemoryError("no memory")


def in_recv(setup):
    setup.link.client._recv = fails
    setup.client.send(b"\0")


def in_recv_from_the_runtime(setup):
    setup.link.server._recv = fails
    setup.server.send(b"\0")


def in_feed(setup):
    setup.link._session._requests.handlers[6] = fails
    setup.client.send(frame(6, 0, 0, bytes(8)))


def in_feed_from_the_runtime(setup):
    setup.link._session._responses.handlers[6] = fails
    setup.server.send(frame(6, 0, 0, bytes(8)))


def in_fetching_what_is_to_be_sent(setup):
    setup.link._session.to_server = fails
    setup.client.send(open_stream(3, VERSION))


def in_sending(setup):
    setup.link.server._send = fails
    setup.client.send(open_stream(3, VERSION))


def in_sending_later(setup):
    setup.link.client.write([bytes(8 << 20)])
    setup.link.client._send = fails
    setup.client.recv(1 << 20)


def in_a_report_of_an_anomaly(setup):
    setup.decider.raises.add("unusual")
    setup.client.send(open_stream(3, CREATE, 5))


def in_a_release(setup):
    setup.link._session._streams._send_at_once = fails
    call_of(setup).release()


def in_a_refusal(setup):
    setup.link.client._send = fails
    call_of(setup).refuse(9, "no")


def in_the_end_of_the_client(setup):
    setup.link._session._streams.undecided = fails
    setup.client.shutdown(socket.SHUT_WR)


def in_a_goaway(setup):
    setup.link._session._responses.inject = fails
    setup.link.goaway()


def in_the_end(setup):
    setup.link._session._streams.forget = fails
    setup.server.close()
    setup.server, near = socket.socketpair()
    setup.ends.append(setup.server)
    setup.server.setblocking(False)
    near.close()


def in_a_report_of_what_the_peer_did(setup):
    def fail_with_detail(message, **keys):
        if "cannot continue" in message:
            fails()
        setup.lines.append(message)

    setup.link._report_problem = fail_with_detail
    setup.client.send(frame(8, 0, 0, bytes(4)))


def call_of(setup):
    return next(call for call in setup.decider.calls if call._link is setup.link)


PLACES = [
    in_recv,
    in_recv_from_the_runtime,
    in_feed,
    in_feed_from_the_runtime,
    in_fetching_what_is_to_be_sent,
    in_sending,
    in_sending_later,
    in_a_report_of_an_anomaly,
    in_a_refusal,
    in_the_end_of_the_client,
    in_a_goaway,
    in_the_end,
    in_a_report_of_what_the_peer_did,
]


@pytest.fixture(autouse=True)
def methods_can_be_replaced(monkeypatch):
    """Let methods of slotted parts be replaced in one object."""
    import proxy.relay.session as session

    for name in ("Streams", "Responses", "Requests"):
        part = getattr(session, name)
        monkeypatch.setattr(session, name, type(name, (part,), {}))


@pytest.mark.parametrize("place", [*PLACES, in_a_release], ids=lambda place: place.__name__)
def test_a_fault_ends_its_link_alone(place):
    async def scenario():
        setup = Setup()
        try:
            await setup.started()
            place(setup)
            await setup.check_ended()
        finally:
            setup.close()
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_an_error_at_the_end_of_a_call_does_not_keep_the_link():
    async def scenario():
        setup = Setup()
        try:
            await setup.started()
            setup.decider.raises.add("finished")
            setup.client.close()
            setup.server.close()
            await asyncio.sleep(0.05)
            assert setup.link.closed
            assert setup.budget.total == 5005
            assert [line for line in setup.lines if 'step="record the answer"' in line]
        finally:
            setup.close()
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_read_without_memory_drops_the_largest_body_and_reads_less():
    async def scenario():
        setup = Setup()
        try:
            await setup.started()
            setup.client.send(open_stream(3, CREATE) + frame(0, 0, 3, bytes(9000)))
            await asyncio.sleep(0.02)
            real = setup.other.client._recv
            setup.other.client._recv = lambda size: fails() if size > 4096 else real(size)
            setup.other_client.send(call(3, VERSION, b"v" * 10_000))
            await asyncio.sleep(0.05)
            assert b"v" * 10_000 in drain(setup.other_server)[0]
            assert not setup.link.closed
            assert b"grpc-status\x018" in drain(setup.client)[0]
            assert setup.budget.total < 9000
            assert not setup.faults
        finally:
            setup.close()
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), 120))
