"""Random conversations of two peers through the relay, without sockets.

Hostile rounds: frames in any order, valid, unusual and broken, from both sides, while another connection that
shares the room for bodies makes honest calls. Odd rounds: two strict peers (``tests/relay/strict_peer.py``)
make honest calls together with unusual ones that the protocol allows, on one connection.

Properties: nothing but RelayError leaves a session; windows and held bytes never go below 0 and add up; every
request ends once; no more bytes are held than were received; honest calls and their answers arrive unchanged.
"""

from __future__ import annotations

import random
import struct
from typing import Any

from proxy.relay.body_budget import BodyBudget
from proxy.relay.events import RelayError, RequestAnomaly
from proxy.relay.session import Session
from proxy.relay.streams import ARRIVING
from tests.fuzz import wires
from tests.fuzz.outcome import Outcome
from tests.relay import strict_peer as strict

STEPS = 150
ROOM = 60_000
INTERCEPTED = frozenset((wires.CREATE, wires.STOP, wires.CREATE[1:]))


def one(rng: random.Random, outcome: Outcome) -> None:
    """Run one round."""
    (Hostile(rng, outcome) if rng.random() < 0.7 else Odd(rng, outcome)).run()


class Decider:
    """Decides at random, now or later, and checks the behaviour of the session."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.session: Session
        self.received_requests: dict[int, int] = {}
        self.over: set[int] = set()
        self.waiting: list[int] = []
        self.unusuals = self.crowded = 0

    def request(self, stream: int, path: str, message: bytes) -> None:
        assert path in INTERCEPTED
        assert stream not in self.received_requests, "requested twice"
        self.received_requests[stream] = len(message)
        if self.rng.random() < 0.5:
            self.decide(stream)
        else:
            self.waiting.append(stream)

    def decide(self, stream: int) -> None:
        how = self.rng.random()
        if how < 0.4:
            self.session.release(stream, bytes(self.rng.choice([0, 30, 3000, 40_000])))
        elif how < 0.7:
            self.session.release(stream)
        else:
            self.session.refuse(stream, 9, "no" * self.rng.choice([1, 3000]))

    def decide_some(self) -> None:
        self.rng.shuffle(self.waiting)
        for _ in range(self.rng.randrange(len(self.waiting) + 1)):
            self.decide(self.waiting.pop())

    def anomaly(self, path: str, kind: RequestAnomaly) -> tuple[int, str] | None:
        assert path in INTERCEPTED
        self.unusuals += 1
        refused = kind in (RequestAnomaly.COMPRESSED, RequestAnomaly.TRAILERS) and self.rng.random() < 0.5
        return (12, f"it {kind}") if refused else None

    def refused_for_memory(self, path: str, message: str) -> None:
        self.crowded += 1

    def response(self, stream: int, message: bytes) -> None:
        assert stream in self.received_requests
        assert stream not in self.over, "an answer to a call that has ended"

    def finished(self, stream: int, status: int | None) -> None:
        assert stream in self.received_requests, "the end of a call that was never passed on for a decision"
        assert stream not in self.over, "ended twice"
        self.over.add(stream)


class Honest:
    """A connection of a client that makes only valid calls."""

    def __init__(self, budget: BodyBudget) -> None:
        self.net = strict.Net(strict.rewrite)
        streams = self.net.session._streams
        streams.budget.holders.discard(streams)
        streams.budget = budget
        budget.holders.add(streams)
        self.net.run()

    def call(self, rng: random.Random) -> None:
        body, net = bytes(rng.choice([10, 5000])), self.net
        stream = net.client.call(strict.CREATE, body)
        net.run()
        assert net.server.streams[stream].body == strict.grpc(body + b"+cpuset"), (
            "an honest call was affected"
        )
        net.server.answer(stream, b"id")
        net.run()
        assert net.owner.responses[stream] == b"id"
        assert net.owner.ends[-1] == (stream, 0)


class Hostile:
    """Peers that send arbitrary frames."""

    def __init__(self, rng: random.Random, outcome: Outcome) -> None:
        self.rng, self.outcome = rng, outcome
        self.budget = BodyBudget(ROOM)
        self.honest = Honest(self.budget)
        self.deciders = [Decider(rng) for _ in range(2)]
        self.sessions = [Session(decider, INTERCEPTED.__contains__, self.budget) for decider in self.deciders]
        self.came = [0, 0]
        self.streams = [1, 1]
        for decider, session in zip(self.deciders, self.sessions, strict=True):
            decider.session = session
        self.alive = [True, True]

    def run(self) -> None:
        for number in range(2):
            self.feed(number, wires.PREFACE + wires.frame(wires.SETTINGS, 0, 0), client=True)
            self.feed(number, wires.frame(wires.SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20)), client=False)
        for _ in range(STEPS):
            number = self.rng.randrange(2)
            if self.alive[number]:
                self.step(number)
            if self.rng.random() < 0.03:
                self.honest.call(self.rng)
            if not any(self.alive):
                break
        self.honest.call(self.rng)
        for number in range(2):
            self.end(number)
        assert self.budget.total == self.honest.net.session._streams.held == 0
        assert not self.budget.arriving
        self.outcome.count("requests", sum(len(decider.received_requests) for decider in self.deciders))
        self.outcome.count("unusual", sum(decider.unusuals for decider in self.deciders))
        self.outcome.count("crowded out", sum(decider.crowded for decider in self.deciders))

    def step(self, number: int) -> None:
        rng, session = self.rng, self.sessions[number]
        client = rng.random() < 0.7
        what = self.bytes(number, client=client)
        for piece in wires.cut(rng, what) if rng.random() < 0.3 else [what]:
            if self.alive[number]:
                self.feed(number, piece, client=client)
        if self.alive[number] and rng.random() < 0.3:
            self.guarded(number, self.deciders[number].decide_some)
        if rng.random() < 0.01:
            session.goaway()
        if self.alive[number] and rng.random() < 0.005:
            session.client_closed()

    def bytes(self, number: int, *, client: bool) -> bytes:
        """Return bytes to read from one side."""
        rng, newest = self.rng, self.streams[number]
        streams = self.sessions[number]._streams
        stream = max(1, newest - 2 * rng.choice([0, 0, 0, 1, 1, 2, 5]))
        how = rng.random()
        if how < 0.006:
            return wires.rare(rng, stream)
        if how < 0.15:
            return wires.control(rng, stream)
        if not client:
            end = rng.random() < 0.2
            answer = how < 0.6
            return (
                wires.headers(rng, stream, answer=True)
                if answer
                else wires.data(rng, stream, 16_384, end=end)
            )
        if how < 0.5:
            self.streams[number] = newest + 2
            return wires.headers(rng, newest + 2, answer=False)
        arriving = [s.id for s in streams.tracked.values() if s.phase == ARRIVING]
        if arriving and rng.random() < 0.9:
            stream = rng.choice(arriving)
        elif stream in streams.tracked and rng.random() < 0.98:
            return wires.control(rng, stream)  # DATA after the end of a stream ends the connection
        return wires.data(rng, stream, max(0, streams.flow.client_window), end=rng.random() < 0.4)

    def guarded(self, number: int, work: Any) -> None:
        try:
            self.outcome.timed(work)
        except RelayError as error:
            self.outcome.count(f"ended: {str(error).partition(':')[0]}")
            self.sessions[number].end_with_goaway(error.code, client=self.rng.random() < 0.5)
            self.end(number)
            return
        self.check(number)

    def feed(self, number: int, data: bytes, *, client: bool) -> None:
        self.came[number] += len(data)
        session = self.sessions[number]
        self.guarded(number, lambda: (session.from_client if client else session.from_server)(data))

    def check(self, number: int) -> None:
        session = self.sessions[number]
        streams = session._streams
        flow = streams.flow
        assert flow.client_window >= 0
        assert flow.server_window >= 0
        assert flow.waiting >= 0
        sizes = [stream.size for stream in streams.tracked.values()]
        assert min(sizes, default=0) >= 0
        assert streams.held == sum(sizes)
        assert self.budget.total == sum(s._streams.held for s in [*self.sessions, self.honest.net.session])
        grown = sum(40_005 for s in self.sessions for t in s._streams.tracked.values() if t.remaining)
        assert self.budget.total <= ROOM + grown  # decisions make bodies longer
        kept = sum(len(w._rest) + len(w._block or b"") for w in (session._requests, session._responses))
        assert kept <= self.came[number]
        for item in flow.queue.values():
            assert len(item.chunks) <= 3 + item.remaining // 1024
        for _ in range(2):
            session.to_client(), session.to_server()

    def end(self, number: int) -> None:
        if self.alive[number]:
            self.alive[number] = False
            session, decider = self.sessions[number], self.deciders[number]
            session.lost()
            assert decider.over == set(decider.received_requests), "a request has not ended"
            session.to_client(), session.to_server()
            session.break_cycles()


class Odd:
    """Two strict peers; honest and unusual calls on the same connection."""

    def __init__(self, rng: random.Random, outcome: Outcome) -> None:
        self.rng, self.outcome = rng, outcome
        self.net = strict.Net(
            self.decide,
            rng=rng,
            client=strict.Peer(client=True, rng=rng, fancy=True),
            server=strict.Peer(client=False, rng=rng, fancy=True, consume=rng.choice([0, 5000, 30_000])),
        )
        self.net.owner.turn_away = self.turn_away
        self.honest: dict[int, bytes] = {}
        self.odd: list[int] = []

    def decide(self, session: Session, stream: int, message: bytes) -> None:
        if stream in self.honest or self.rng.random() < 0.6:
            session.release(stream, message + b"+cpuset")
        else:
            session.refuse(stream, 9, "no")

    def turn_away(self, path: str, kind: RequestAnomaly) -> tuple[int, str] | None:
        return (12, "odd") if kind in (RequestAnomaly.COMPRESSED, RequestAnomaly.TRAILERS) else None

    def run(self) -> None:
        self.net.run()
        for _ in range(40):
            self.outcome.timed(self.step)
        self.net.run()
        self.answer()
        self.net.run()
        net = self.net
        for stream, body in self.honest.items():
            assert net.server.streams[stream].body == strict.grpc(body + b"+cpuset")
            assert net.owner.responses[stream] == b"id"
            assert (stream, 0) in net.owner.ends
            assert net.client.streams[stream].remote_closed
        for stream, there in net.client.streams.items():
            if stream in self.odd and not there.over and not there.reset_sent:
                net.client.reset(stream)
        net.run()
        assert {stream for stream, _ in net.owner.ends} == set(net.owner.requests)
        net.check_whole()
        self.outcome.count("honest calls beside odd ones", len(self.honest))

    def step(self) -> None:
        rng, net = self.rng, self.net
        if rng.random() < 0.4:
            body = bytes(rng.choice([0, 10, 5000, 60_000]))
            stream = net.client.open(strict.CREATE)
            self.honest[stream] = body
            net.client.data(stream, strict.grpc(body))
        else:
            self.begin_something_odd()
        if rng.random() < 0.3:
            net.client.out += self.between_frames()
        if rng.random() < 0.05:
            net.client.announce((3, 100), *rng.choice([(), ((4, 40_000),), ((1, 100),)]))
        if rng.random() < 0.5:
            net.step()
        if rng.random() < 0.3:
            self.answer()

    def begin_something_odd(self) -> None:
        rng, client = self.rng, self.net.client
        stream = client.open(rng.choice([strict.CREATE, strict.CREATE, strict.VERSION]))
        self.odd.append(stream)
        whole = strict.grpc(bytes(rng.choice([0, 30, 9000])))
        kind = rng.randrange(7)
        if kind < 4:
            odd = [
                b"",
                whole[:-1],
                strict.grpc(b"zip", compressed=1),
                whole + rng.choice([b"!", whole, bytes(9000)]),
            ]
            client.data(stream, odd[kind])
        elif kind == 4:
            client.data(stream, whole, end=False)
        elif kind == 5:
            client.data(stream, whole, end=False)
            client.reset(stream)
        else:
            client.data(stream, whole)
            client.data(stream, b"")

    def between_frames(self) -> bytes:
        rng = self.rng
        held = [s for s in self.odd if not self.net.client.streams[s].local_closed]
        empty = strict.frame(strict.DATA, 0, rng.choice(held)) if held else b""
        return rng.choice(
            [
                empty * rng.choice([1, 20]),
                strict.frame(strict.PRIORITY, 0, 1, bytes(5)),
                strict.frame(strict.PING, 0, 0, bytes(8)),
                strict.frame(0xBE, 3, 0, b"unknown"),
            ]
        )

    def answer(self) -> None:
        for stream, there in list(self.net.server.streams.items()):
            if there.remote_closed and not there.local_closed and there.reset_received is None:
                self.net.server.answer(stream, b"id")


__all__ = ["one"]
