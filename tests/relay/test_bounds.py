"""The bounds on the cost of a connection: headers, frames without content, held bodies, streams."""

import struct
import tracemalloc

import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

from proxy.relay import streams
from proxy.relay.body_budget import BodyBudget
from proxy.relay.directions import MOST_EMPTY, MOST_STREAMS
from proxy.relay.events import ENHANCE_YOUR_CALM, RelayError
from proxy.relay.flow import AHEAD_BYTES, STREAM_AHEAD_BYTES
from proxy.relay.frames import LARGEST_BLOCK
from proxy.relay.headers import LONGEST_TEXT, MAX_TABLE_SIZE, HpackTracker
from proxy.relay.session import Session
from tests.relay.strict_peer import (
    CONTINUATION,
    CREATE,
    DATA,
    HEADERS,
    PREFACE,
    RST,
    Net,
    Owner,
    Peer,
    frame,
    frames,
    grpc,
    rewrite,
    settings,
)  # fmt: skip

CALM = ENHANCE_YOUR_CALM
EIGHT_A = bytes.fromhex("18c6318c63")  # Huffman coded


def begun(budget=None, **pairs):
    owner = Owner()
    session = owner.session = Session(owner, frozenset((CREATE,)).__contains__, budget)
    session.from_client(PREFACE + settings())
    session.from_server(settings((4, 1 << 30), *pairs.items()))
    session.from_server(frame(8, 0, 0, struct.pack(">I", 1 << 30)))
    session.from_client(frame(4, 1, 0))
    session.to_client(), session.to_server()
    return session, owner


def opened(stream, path=CREATE):
    return frame(HEADERS, 4, stream, b"\x83\x86\x04" + bytes([len(path)]) + path.encode())


def number(value):
    out, value = bytearray(), value - 127
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def test_the_limits_are_those_of_the_architecture_page():
    assert (LARGEST_BLOCK, MOST_STREAMS, MOST_EMPTY) == (262_144, 16_384, 1000)
    assert (streams.HELD_BYTES, BodyBudget().limit) == (67_108_864, 268_435_456)
    assert (AHEAD_BYTES, STREAM_AHEAD_BYTES, MAX_TABLE_SIZE, LONGEST_TEXT) == (
        262_144,
        1_048_576,
        1_048_576,
        1024,
    )


@pytest.mark.parametrize("client", [True, False])
@pytest.mark.parametrize("how", ["one frame", "a frame in parts", "pieces"])
def test_a_header_block_above_the_limit_is_not_decoded(monkeypatch, client, how):
    session, _ = begun()
    reader = session._requests if client else session._responses
    reader.largest_frame = 1 << 24
    feed = session.from_client if client else session.from_server
    monkeypatch.setattr("proxy.relay.headers.HpackTracker.feed", lambda *_: pytest.fail("it was decoded"))
    block = bytes(LARGEST_BLOCK + 1)
    if how == "pieces":
        feed(frame(HEADERS, 0, 1, block[:1000]))
        feed(frame(CONTINUATION, 0, 1, block[1000:-1]))
        last = frame(CONTINUATION, 4, 1, b"\0")
    else:
        last = frame(HEADERS, 4, 1, block)
    with pytest.raises(RelayError, match="longer than") as error:
        feed(last[:9] if how == "a frame in parts" else last)
    assert error.value.code == CALM


def test_a_body_may_be_longer_than_a_header_block():
    session, owner = begun()
    session._requests.largest_frame = 1 << 24
    session.from_client(opened(1))
    data = frame(DATA, 1, 1, grpc(bytes(LARGEST_BLOCK + 1)))
    session.from_client(data[:11])
    session.from_client(data[11:])
    assert not owner.odd


def test_a_header_block_of_just_the_limit_passes():
    session, _ = begun()
    size = LARGEST_BLOCK - (3 + 4 + len(number(LARGEST_BLOCK - 10)))
    block = b"\x83\x86\x84\x00\x01x\x7f" + number(size) + bytes(size)
    assert len(block) == LARGEST_BLOCK
    session._requests.largest_frame = 1 << 24
    data = frame(HEADERS, 5, 1, block)
    session.from_client(data)
    assert b"".join(session.to_server()) == data


def test_a_long_value_of_the_wanted_field_is_not_decoded(monkeypatch):
    monkeypatch.setattr("proxy.relay.huffman.decode", lambda raw: pytest.fail("it was decoded"))
    session, owner = begun()
    coded = EIGHT_A * (LONGEST_TEXT // len(EIGHT_A) + 1)
    session.from_client(frame(HEADERS, 4, 1, b"\x83\x86\x04\xff" + number(len(coded)) + coded))
    session.from_client(frame(HEADERS, 4, 3, b"\x83\x86\x00\xff" + number(len(coded)) + coded + b"\x01x"))
    assert session.open_streams == 2
    assert not owner.odd


def test_the_longest_value_that_is_decoded():
    coded = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(b"a" * 1638)
    assert len(coded) == LONGEST_TEXT
    tracker = HpackTracker(b":path", {4: "/"})
    assert tracker.feed(b"\x04\xff" + number(len(coded)) + coded) == "a" * 1638


def test_the_same_field_many_times_in_one_block_ends_the_connection():
    encoder = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)
    paths = [encoder.encode(b"/a" * 20 + b"%d" % n) for n in range(20)]
    block = b"".join(b"\x04" + bytes([0x80 | len(path)]) + path for path in paths)
    session, _ = begun()
    with pytest.raises(RelayError, match="repeats one field too often") as error:
        session.from_client(frame(HEADERS, 5, 1, b"\x83\x86" + block))
    assert error.value.code == CALM


def test_eight_values_of_the_same_field_in_one_block_pass():
    encoder = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)

    def block(count, text):
        paths = [encoder.encode(b"/%b%d" % (text, n)) for n in range(count)]
        return b"".join(b"\x04" + bytes([0x80 | len(path)]) + path for path in paths)

    session, _ = begun()
    session.from_client(frame(HEADERS, 5, 1, b"\x83\x86" + block(8, b"a")))
    session.from_client(frame(HEADERS, 5, 3, b"\x83\x86" + block(16, b"a")[: len(block(8, b"a"))] * 2))
    session.from_client(frame(HEADERS, 5, 5, b"\x83\x86" + block(8, b"b")))
    assert session.open_streams == 3, "the limit is per block"
    with pytest.raises(RelayError, match="repeats one field too often"):
        session.from_client(frame(HEADERS, 5, 7, b"\x83\x86" + block(9, b"c")))


def test_a_connection_closed_because_of_its_client_reports_the_cause():
    session, _ = begun()
    with pytest.raises(RelayError) as error:
        session.from_client(frame(HEADERS, 0, 7, b"\x83") + frame(CONTINUATION, 0, 7) * 2000)
    session.end_with_goaway(error.value.code, client=True)
    session.lost()
    assert session.to_client() == [frame(7, 0, 0, struct.pack(">II", 0, CALM))]


def test_a_connection_that_ends_for_the_runtime_has_no_stream_of_it():
    session, _ = begun()
    session.from_client(opened(7) + frame(DATA, 1, 7, grpc(b"config")))
    session.to_server()
    session.end_with_goaway(CALM, client=False)
    session.lost()
    assert session.to_server()[-1] == frame(7, 0, 0, struct.pack(">II", 0, CALM))


FAREWELL = frame(7, 0, 0, struct.pack(">II", 0, CALM))


@pytest.mark.parametrize("client", [True, False])
@pytest.mark.parametrize(
    ("before", "sent"),
    [
        (b"", []),
        (settings(), [FAREWELL]),
        (settings() + frame(DATA, 0, 1, bytes(100))[:50], []),
        (settings() + frame(HEADERS, 0, 1, b"\x83"), []),
        (settings() + frame(HEADERS, 0, 1, b"\x83")[:5], [FAREWELL]),
    ],
    ids=["nothing", "settings", "inside DATA", "inside a header", "inside a frame that waits"],
)
def test_a_goaway_is_sent_only_at_a_frame_boundary(client, before, sent):
    session = Session(Owner(), frozenset().__contains__)
    session.from_client(PREFACE)
    (session.from_server if client else session.from_client)(before)
    take = session.to_client if client else session.to_server
    take()
    session.end_with_goaway(CALM, client=client)
    assert take() == sent


def test_empty_data_of_a_held_stream_is_dropped_and_counted():
    net = Net(rewrite).run()
    sid = net.client.open(CREATE)
    for piece in (b"", *(grpc(b"config")[at : at + 1] for at in range(11))):
        net.client.data(sid, piece, end=False)
        net.client.out += frame(DATA, 0, sid) * (MOST_EMPTY // 2)
        net.run()
    net.client.data(sid, b"")
    net.run()
    assert net.server.streams[sid].body == grpc(b"config+cpuset")
    sid = net.client.open(CREATE)
    net.client.out += frame(DATA, 0, sid) * (MOST_EMPTY + 1)
    with pytest.raises(RelayError, match="empty frames") as error:
        net.run()
    assert error.value.code == CALM


def test_empty_data_of_many_calls_is_not_counted_together():
    net = Net(rewrite).run()
    for _ in range(3):
        sid = net.client.open(CREATE)
        net.client.out += frame(DATA, 0, sid) * (MOST_EMPTY // 2)
        net.client.data(sid, grpc(b"config"))
        net.run()
        assert net.server.streams[sid].body == grpc(b"config+cpuset")


def test_empty_data_after_a_refusal_is_counted_too():
    net = Net(lambda session, stream, message: None).run()
    net.owner.turn_away = lambda path, kind: (12, "no")
    sid = net.client.open(CREATE)
    net.client.data(sid, grpc(b"zip", compressed=1))
    net.run()
    net.client.out += frame(DATA, 0, sid) * (MOST_EMPTY + 1)
    with pytest.raises(RelayError, match="empty frames"):
        net.run()


def kept_by(work):
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [1, 2, 100, 5000])
def test_a_body_costs_as_many_bytes_as_have_arrived(size):
    session, _ = begun()
    count = 100_000 // size
    session.from_client(opened(1))
    piece = frame(DATA, 0, 1, bytes(size))

    def come():
        for _ in range(count):
            session.from_client(piece)
            session.to_client(), session.to_server()

    assert kept_by(come) < 100_000 * 1.3 + 20_000


@pytest.mark.parametrize("client", [True, False])
def test_an_incomplete_header_or_frame_costs_as_many_bytes_as_have_arrived(client):
    session, _ = begun()
    feed = session.from_client if client else session.from_server
    reader = session._requests if client else session._responses
    reader.largest_frame = 1 << 20
    piece = frame(CONTINUATION, 0, 1, b"xy")

    def block():
        feed(frame(HEADERS, 0, 1, b"\x83"))
        for _ in range(100_000):
            feed(piece)
            session.to_client(), session.to_server()

    assert kept_by(block) < 300_000

    def part():
        feed(struct.pack(">IBI", 200_000 << 8 | CONTINUATION, 0, 1))
        for _ in range(30_000):
            feed(b"x")

    assert kept_by(part) < 60_000
    assert type(reader._rest) is bytearray, "pieces are appended to one buffer, not joined each time"


def test_data_that_waits_for_window_costs_as_many_bytes_as_have_arrived():
    server = Peer(client=False, consume=None)
    net = Net(server=server).run()
    held = net.client.call(CREATE, bytes(60_000))
    upload = net.client.open("/other.Service/Upload")
    net.run()
    net.session.release(held)  # this uses up the runtime's window
    net.run()

    def come():
        for _ in range(30_000):
            net.session.from_client(frame(DATA, 0, upload, b"x"))
            net.session.to_client(), net.session.to_server()

    assert kept_by(come) < 60_000
    assert net.session._streams.flow.queue[upload].remaining > 20_000


def test_streams_of_a_connection_are_bounded():
    session, _ = begun()
    for stream in range(1, 2 * MOST_STREAMS + 1, 2):
        session.from_client(opened(stream))
    with pytest.raises(RelayError, match="streams") as error:
        session.from_client(opened(2 * MOST_STREAMS + 1))
    assert error.value.code == CALM
    assert session.open_streams == MOST_STREAMS + 1


def test_a_client_allows_the_runtime_a_larger_header_table_and_nothing_else_does():
    session, _ = begun()
    session.from_client(settings((3, 100_000), (1, 8192)))
    session.from_server(frame(4, 1, 0))
    assert session._responses.tracker.cap == 8192


# -- the budget of all connections --------------------------------------------------------------------------


def full(budget, count, size):
    """Connections with a body each that never ends."""
    sessions = []
    for _ in range(count):
        session, owner = begun(budget)
        sessions.append((session, owner))
        session.from_client(opened(1))
        for _ in range(size // 10_000):
            session.from_client(frame(DATA, 0, 1, bytes(10_000)))
    return sessions


def test_a_closed_connection_releases_its_memory_budget():
    budget = BodyBudget()
    session, _ = begun(budget)
    session.from_client(opened(1) + frame(DATA, 0, 1, bytes(10_000)))
    assert budget.total == 10_000
    session.break_cycles()
    assert (budget.total, budget.arriving) == (0, {})


def test_the_oldest_incomplete_body_is_refused_first():
    budget = BodyBudget(100_000)
    sessions = full(budget, 10, 10_000)
    assert budget.total == 100_000
    late, owner = begun(budget)
    late.from_client(opened(1) + frame(DATA, 1, 1, grpc(bytes(14_000))))
    assert owner.requests == {1: (CREATE, bytes(14_000))}
    assert [bool(owner.crowded) for _, owner in sessions] == [True, True] + [False] * 8
    assert b"grpc-status\x018" in b"".join(sessions[0][0].to_client())
    assert budget.total == 80_000 + 14_005
    for session, _ in [*sessions, (late, owner)]:
        session.lost()
    assert budget.total == 0
    assert not budget.arriving


def test_the_connection_with_the_largest_bodies_is_refused_first():
    budget = BodyBudget(100_000)
    heavy, owner = begun(budget)
    for stream in range(1, 13, 2):
        heavy.from_client(opened(stream) + frame(DATA, 1, stream, grpc(bytes(15_000))))
    light, other = begun(budget)
    light.from_client(opened(1) + frame(DATA, 0, 1, grpc(bytes(16_000))[:15_000]))
    light.from_client(frame(DATA, 1, 1, bytes(1005)))
    assert other.requests == {1: (CREATE, bytes(16_000))}
    assert len(owner.crowded) == 1
    assert len(owner.ends) == 1
    assert budget.total <= budget.limit


def test_a_connection_that_uses_the_whole_budget_is_refused_itself():
    budget = BodyBudget(50_000)
    session, owner = begun(budget)
    for stream in range(1, 21, 2):
        session.from_client(opened(stream) + frame(DATA, 1, stream, grpc(bytes(15_000))))
    assert budget.total <= 50_000
    assert len(owner.crowded) == 7


def test_a_body_that_exceeds_the_budget_itself_is_neither_read_nor_sent():
    budget = BodyBudget(50_000)
    session, owner = begun(budget)
    for stream, size in ((1, 15_000), (3, 15_000), (5, 16_000)):
        session.from_client(opened(stream) + frame(DATA, 1, stream, grpc(bytes(size))))
    session.to_server()
    session.from_client(opened(7) + frame(DATA, 1, 7, grpc(bytes(16_300))))
    assert set(owner.requests) == {1, 3, 5}
    assert len(owner.crowded) == 1
    assert owner.odd == []
    assert [kind for kind, _, _, _ in frames(b"".join(session.to_server()))] == [HEADERS, RST]
    assert budget.total == 46_015


def test_a_connection_may_hold_as_much_as_its_limit(monkeypatch):
    monkeypatch.setattr(streams, "HELD_BYTES", 20_000)
    session, owner = begun()
    body = grpc(bytes(19_995))
    session.from_client(opened(1) + frame(DATA, 0, 1, body[:10_000]) + frame(DATA, 1, 1, body[10_000:]))
    assert owner.requests == {1: (CREATE, bytes(19_995))}
    assert owner.crowded == []


def test_a_body_in_one_frame_counts_for_its_connection_too(monkeypatch):
    monkeypatch.setattr(streams, "HELD_BYTES", 25_000)
    session, owner = begun()
    for stream in (1, 3):
        session.from_client(opened(stream) + frame(DATA, 1, stream, grpc(bytes(15_000))))
    assert list(owner.requests) == [1]
    assert len(owner.crowded) == 1
    assert owner.odd == [], "a refused request is not read"


@pytest.mark.parametrize("message", [b"", b"config"])
def test_a_body_in_one_frame_counts_only_while_it_waits(message):
    budget = BodyBudget()
    session, owner = begun(budget)
    counted = []
    owner.decide = lambda *_: counted.append(budget.total)
    body = grpc(message)
    session.from_client(opened(1) + frame(DATA, 1, 1, body))
    session.from_client(opened(3) + frame(DATA, 0, 3, body) + frame(DATA, 1, 3))
    assert counted == [0, 2 * len(body)]
    session.release(1)
    session.release(3)
    assert budget.total == 0


@pytest.mark.parametrize("size", [10, 20_000])
def test_a_body_that_grows_by_a_suffix_releases_its_memory_budget(size):
    budget = BodyBudget()
    session, _ = begun(budget)
    body = grpc(bytes(size))
    half = len(body) // 2
    session.from_client(opened(1) + frame(DATA, 0, 1, body[:half]))
    session.from_client(frame(DATA, 1, 1, body[half:]))
    assert budget.total == len(body)
    session.release(1, None, b"+cpuset")
    assert budget.total == 0


def test_a_body_that_is_counted_nowhere_else_is_refused_itself():
    """The budget may suffice: the newest stream may not be counted for its connection yet."""
    crowded = []

    class Uncounted:
        held = 0

        def largest(self):
            return None

        def refuse_for_memory(self, stream, cause):
            crowded.append((stream, cause))

    budget = BodyBudget(0)
    budget.total = 1
    newest = object()
    assert budget.make_room(Uncounted(), newest) is False
    assert crowded == [(newest, "more than 0 MiB wait on all connections")]


def test_the_largest_body_is_refused_for_lack_of_memory():
    budget = BodyBudget()
    small, large = full(budget, 1, 20_000)[0], full(budget, 1, 50_000)[0]
    assert budget.refuse_largest()
    assert not small[1].crowded
    assert large[1].crowded
    assert budget.refuse_largest()
    assert not budget.refuse_largest()
    assert budget.total == 0


def test_a_refusal_without_memory_behind_the_last_header_is_left_out():
    budget = BodyBudget(30_000)
    session, owner = begun(budget)
    session.from_client(opened(1) + frame(DATA, 0, 1, bytes(10_000)))
    session.from_server(frame(HEADERS, 1, 1, b"\x88"))  # its block is open
    session.to_client()
    for _, other in full(budget, 1, 30_000):
        assert not other.crowded
    assert owner.crowded
    session.from_server(frame(CONTINUATION, 4, 1, b"\x00\x0bgrpc-status\x010"))
    sent = b"".join(session.to_client())
    assert sent.count(b"grpc-status") == 1
    assert session.open_streams == 0
