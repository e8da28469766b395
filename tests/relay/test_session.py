"""Whole calls through a session between two strict peers."""

import random
import struct

import pytest

from proxy.relay.events import RelayError, RequestAnomaly
from proxy.relay.frames import ACK, GOAWAY_PING
from proxy.relay.session import Session
from tests.relay.strict_peer import (
    CREATE,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    RST,
    SETTINGS,
    VERSION,
    WINDOW,
    Net,
    Owner,
    Peer,
    frame,
    frames,
    grpc,
    keep,
    rewrite,
    settings,
    turn_down,
)  # fmt: skip


def started(decide=None, **options):
    return Net(decide, **options).run()


def test_an_intercepted_call_is_rewritten_answered_and_reported():
    net = started(rewrite)
    sid = net.client.call(CREATE, b"config", [("x-probe", "p"), ("grpc-timeout", "5S")])
    net.run()
    assert net.server.streams[sid].body == grpc(b"config+cpuset")
    assert net.server.streams[sid].headers[0]["x-probe"] == "p"
    assert net.server.streams[sid].remote_closed
    net.server.answer(sid, b"id-1")
    net.run()
    assert net.client.streams[sid].body == grpc(b"id-1")
    assert net.client.streams[sid].headers[1]["grpc-status"] == "0"
    assert net.server.streams[sid].reset_received is None, "its request has been sent"
    assert net.owner.requests == {sid: (CREATE, b"config")}
    assert net.owner.responses == {sid: b"id-1"}
    assert net.owner.ends == [(sid, 0)]
    net.check_whole()


def test_an_uninteresting_call_leaves_as_the_same_objects():
    net = started()
    sid = net.client.call(VERSION, b"v" * 500)
    data = net.client.take()
    net.session.from_client(data)
    (out,) = net.session.to_server()
    assert out is data
    net.server.receive(out)
    net.server.answer(sid, b"a" * 500)
    data = net.server.take()
    net.session.from_server(data)
    (out,) = net.session.to_client()
    assert out is data
    assert not net.owner.requests


def test_a_large_answer_leaves_as_it_was_read_even_cut_inside_frames():
    net = started()
    sid = net.client.call(VERSION, b"")
    net.run()
    net.server.headers(sid, [(":status", "200")])
    net.server.data(sid, grpc(bytes(40000)), end=False)
    data = net.server.take()
    pieces = [data[:1000], data[1000:20000], data[20000:20500], data[20500:]]
    for piece in pieces:
        net.session.from_server(piece)
        (out,) = net.session.to_client()
        assert out is piece


def test_frames_that_pass_leave_as_they_were_read():
    net = started(server=Peer(client=False, consume=None))
    arriving, answered, given_up = (net.client.open(CREATE) for _ in range(3))
    net.client.call(VERSION, bytes(100))
    net.run()
    net.server.headers(answered, [(":status", "200")])
    net.server.data(answered, grpc(b"early"), end=False)
    net.server.reset(given_up)
    for stream, increment in ((0, 105), (arriving, 7)):
        net.server.take_grant(stream, increment)
    for part in [net.server.out[:-26], net.server.out[-26:-13], net.server.out[-13:]]:
        data = frame(PING, 0, 0, bytes(8)) + bytes(part)
        net.session.from_server(data)
        (out,) = net.session.to_client()
        assert out is data


def test_headers_go_at_once_and_the_body_waits():
    net = started()
    sid = net.client.call(CREATE, b"config")
    net.run()
    assert net.server.streams[sid].headers
    assert not net.server.streams[sid].body
    net.session.release(sid)
    net.run()
    assert net.server.streams[sid].body == grpc(b"config")
    net.session.release(sid, b"again")  # too late: no effect
    net.session.refuse(sid, 9, "late")
    net.session.release(999)
    net.run()
    assert not net.client.streams[sid].headers
    assert net.server.streams[sid].body == grpc(b"config")


@pytest.mark.parametrize("message", [b"", b"x", bytes(range(256)) * 300])
def test_release_without_a_message_forwards_the_original_byte_for_byte(message):
    net = started(keep)
    sid = net.client.call(CREATE, message)
    net.run()
    assert net.server.streams[sid].body == grpc(message)
    assert net.owner.requests[sid] == (CREATE, message)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", RequestAnomaly.EMPTY),
        (b"\0\0\0", RequestAnomaly.CUT),
        (grpc(b"zip", compressed=1), RequestAnomaly.COMPRESSED),
        (grpc(b"abc")[:-1], RequestAnomaly.CUT),
    ],
)
def test_a_body_without_a_plain_message_passes_untouched_and_is_reported(body, kind):
    net = started(rewrite)
    sid = net.client.open(CREATE)
    net.client.data(sid, body)
    net.run()
    assert net.owner.odd == [(CREATE, kind)]
    assert net.server.streams[sid].body == body
    assert net.server.streams[sid].remote_closed
    net.server.answer(sid, b"id")
    net.run()
    assert (net.owner.requests, net.owner.responses, net.owner.ends) == ({}, {}, [])
    net.check_whole()


@pytest.mark.parametrize("rest", [grpc(b"b"), b"!", b"!" * 300_000, grpc(b"b") * 3])
@pytest.mark.parametrize("decide", [keep, rewrite])
def test_the_first_of_several_messages_is_decided_on(rest, decide):
    net = started(decide)
    sid = net.client.open(CREATE)
    net.client.data(sid, grpc(b"abc") + rest)
    net.run()
    assert net.owner.odd == [(CREATE, RequestAnomaly.MORE)]
    assert net.owner.requests == {sid: (CREATE, b"abc")}
    first = b"abc+cpuset" if decide is rewrite else b"abc"
    assert net.server.streams[sid].body == grpc(first) + rest
    assert net.server.streams[sid].remote_closed
    net.server.answer(sid, b"id")
    net.run()
    assert net.owner.ends == [(sid, 0)]
    net.check_whole()


@pytest.mark.parametrize("body", [grpc(b"zip", compressed=1), b""])
def test_a_body_without_a_plain_message_may_be_refused(body):
    net = started(rewrite)
    net.owner.turn_away = lambda path, kind: (12, f"it {kind}")
    sid = net.client.open(CREATE)
    net.client.data(sid, body)
    net.run()
    assert net.client.streams[sid].headers[0]["grpc-status"] == "12"
    assert net.server.streams[sid].reset_received == 8
    assert not net.server.streams[sid].body
    assert (net.owner.requests, net.owner.ends) == ({}, [])
    net.check_whole()


def test_an_empty_message_that_comes_in_pieces_is_decided_on():
    net = started(rewrite)
    sid = net.client.open(CREATE)
    for piece in (grpc(b"")[:2], grpc(b"")[2:]):
        net.client.data(sid, piece, end=False)
        net.run()
    net.client.data(sid, b"")
    net.run()
    assert net.owner.requests == {sid: (CREATE, b"")}
    assert not net.owner.odd
    assert net.server.streams[sid].body == grpc(b"+cpuset")


def test_a_message_whose_stream_never_ends_is_reported_at_its_end():
    net = started(rewrite)
    whole, part = net.client.open(CREATE), net.client.open(CREATE)
    net.client.data(whole, grpc(b"abc"), end=False)
    net.client.data(part, grpc(b"abc")[:-1], end=False)
    net.run()
    net.client.reset(whole)
    net.client.reset(part)
    net.run()
    assert net.owner.odd == [(CREATE, RequestAnomaly.UNENDED)]
    assert not net.server.streams[whole].body
    net.check_whole()


def test_headers_that_end_the_stream_pass():
    net = started(rewrite)
    sid = net.client.open(CREATE, end=True)
    net.run()
    assert net.server.streams[sid].remote_closed
    assert not net.owner.requests
    assert net.owner.odd == [(CREATE, RequestAnomaly.EMPTY)]


def test_a_refusal_is_a_grpc_status_and_a_reset_upstream():
    net = started(turn_down)
    sid = net.client.call(CREATE, b"config" * 1000)
    net.run()
    stream = net.client.streams[sid]
    assert stream.headers == [
        {
            ":status": "200",
            "content-type": "application/grpc",
            "grpc-status": "9",
            "grpc-message": "no budget: 100%25 of node 0 is owned, %C3%A9",
        }
    ]
    assert stream.remote_closed
    assert net.server.streams[sid].reset_received == 8
    assert not net.server.streams[sid].body
    assert net.owner.ends == [(sid, None)]
    net.check_whole()


def test_a_refusal_changes_no_header_table():
    net = started(turn_down)
    for number in range(3):
        sid = net.client.call(VERSION, b"")
        net.run()
        net.server.headers(sid, [(":status", "200"), ("x-many", "0123456789" * (number + 1))])
        net.server.headers(sid, [("grpc-status", "0"), ("x-other", "abc")], end=True)
        net.client.call(CREATE, b"config")
        net.run()
        assert net.client.streams[sid].headers[0]["x-many"] == "0123456789" * (number + 1)


def test_a_long_refusal_message_is_cut():
    net = started(lambda session, stream, message: session.refuse(stream, 3, "é" * 100_000))
    sid = net.client.call(CREATE, b"")
    net.run()
    text = net.client.streams[sid].headers[0]["grpc-message"]
    assert 4096 - len("%C3%A9") < len(text) <= 4096


def test_a_refusal_after_the_runtime_opened_its_answer_is_trailers_only():
    net = started()
    sid = net.client.call(CREATE, b"config")
    net.run()
    net.server.headers(sid, [(":status", "200"), ("x-early", "1")])
    net.run()
    net.session.refuse(sid, 9, "no")
    net.run()
    opening, trailers = net.client.streams[sid].headers
    assert opening["x-early"] == "1"
    assert trailers == {"grpc-status": "9", "grpc-message": "no"}


@pytest.mark.parametrize("others", [(), ((4, 70_000),)])
def test_a_refusal_announces_a_smaller_table_before_the_runtime(others):
    net = Net(turn_down)
    net.client.announce((1, 0), *others)
    net.run()
    assert net.client.decoder.max_allowed_table_size == 0  # acknowledged: from now on the decoder insists
    first = net.client.call(CREATE, b"")
    second = net.client.call(CREATE, b"")
    net.run()
    assert net.client.streams[first].headers[0]["grpc-status"] == "9"
    assert net.client.streams[second].headers[0]["grpc-status"] == "9"
    third = net.client.call(VERSION, b"")
    net.run()
    net.server.answer(third, b"v")
    net.run()
    assert net.client.streams[third].headers[-1]["grpc-status"] == "0"


@pytest.mark.parametrize("size", [4096, 100])
def test_a_refusal_announces_no_table_that_the_runtime_has_announced(size):
    net = Net(turn_down)
    if size != 4096:
        net.client.announce((1, size))
    other = net.client.call(VERSION, b"")
    net.run()
    net.server.answer(other)
    net.run()
    sid = net.client.call(CREATE, b"")
    net.session.from_client(net.client.take())
    sent = frames(b"".join(net.session.to_client()))
    (block,) = [payload for kind, _, stream, payload in sent if kind == HEADERS and stream == sid]
    assert block[0] == 0x88, "a status, not a size of the table (RFC 7541, 6.3)"


def test_late_frames_of_the_runtime_for_a_refused_call_are_dropped():
    net = started()
    sid = net.client.call(CREATE, b"config")
    net.run()
    net.server.headers(sid, [(":status", "200"), ("x-late", "enters the table")])
    net.server.data(sid, grpc(b"late" * 100), end=False)
    net.server.headers(sid, [("grpc-status", "13"), ("x-late-too", "1")], end=True)
    late = net.server.take()
    before = net.server.send
    net.session.refuse(sid, 9, "no")
    net.drain()
    net.session.from_server(late)
    net.run()
    stream = net.client.streams[sid]
    assert not stream.body  # dropped, and the runtime has its window back
    assert net.server.send == before + 405
    assert stream.late_headers == 2  # needed by the header table, legal after a reset
    assert net.owner.ends == [(sid, None)]
    other = net.client.call(VERSION, b"")
    net.run()
    net.server.headers(other, [(":status", "200"), ("x-late", "enters the table")])
    net.server.headers(other, [("grpc-status", "0"), ("x-late-too", "1")], end=True)
    net.run()
    assert net.client.streams[other].headers[0]["x-late"] == "enters the table"


def test_the_end_of_a_refused_call_returns_no_window():
    """No update of zero bytes to the runtime, which would end the connection, and none to an ended stream."""
    net = started()
    sid = net.client.open(CREATE)
    net.client.data(sid, grpc(b"config"), end=False)
    net.run()
    net.session.refuse(sid, 9, "no")
    net.drain()
    net.session.from_server(frame(0, 1, sid))
    assert [bytes(piece[3:4]) for piece in net.session.to_server()] == [b"\x03"], "only the reset"
    net.session.to_client()
    net.session.from_client(frame(0, 1, sid, bytes(16_000)))
    net.session.from_client(b"")
    updates = [piece for piece in net.session.to_client() if bytes(piece[3:4]) == b"\x08"]
    assert [bytes(piece[5:9]) for piece in updates] in ([], [bytes(4)]), "only for the connection"


def test_a_frame_that_is_held_leaves_nothing_to_send():
    net = started()
    sid = net.client.open(CREATE)
    net.run()
    net.session.from_client(frame(0, 0, sid, grpc(b"config")[:8]))
    assert net.session.to_server() == []


@pytest.mark.parametrize("status", [0, 5, 14])
def test_trailers_only_answers_are_read(status):
    net = started(keep)
    sid = net.client.call(CREATE, b"config")
    net.run()
    net.server.answer(sid, status=status, opening=False)
    net.run()
    assert net.owner.ends == [(sid, status)]
    assert not net.owner.responses


@pytest.mark.parametrize(
    "fields",
    [[], *([("grpc-status", text)] for text in ("many", "", "٣", "1234567890"))],
)
def test_an_answer_without_a_readable_status_counts_as_none(fields):
    net = started(keep)
    sid = net.client.call(CREATE, b"config")
    net.run()
    net.server.headers(sid, [(":status", "200"), *fields], end=True)
    net.run()
    assert net.owner.ends == [(sid, None)]


def test_an_answer_that_ends_with_data_has_no_status():
    net = started(keep)
    sid = net.client.call(CREATE, b"config")
    net.run()
    net.server.headers(sid, [(":status", "502")])
    net.server.data(sid, b"<html>", end=True)
    net.run()
    assert net.client.streams[sid].body == b"<html>"
    assert net.owner.ends == [(sid, None)]
    assert net.session.open_streams == 0


@pytest.mark.parametrize("size", [0, 1, 4, 5, 1000, 100_000])
def test_answers_are_read_from_however_many_frames(size):
    net = started(keep, client=Peer(client=True, initial=1 << 20), rng=random.Random(size))
    net.server.fancy = True
    net.client.take_grant(0, 1 << 20)
    net.run()
    sid = net.client.call(CREATE, b"config")
    net.run()
    net.server.answer(sid, bytes(size))
    net.run()
    assert net.owner.responses == {sid: bytes(size)}
    assert net.client.streams[sid].body == grpc(bytes(size))


def test_an_answer_above_the_limit_and_a_compressed_one_pass_unread():
    net = started(keep, client=Peer(client=True, initial=4 << 20))
    net.client.take_grant(0, 8 << 20)
    net.run()
    big, packed, limit = (net.client.call(CREATE, text) for text in (b"1", b"2", b"3"))
    net.run()
    net.server.answer(limit, bytes(1 << 20))
    net.run()
    assert net.owner.responses.pop(limit) == bytes(1 << 20)
    net.server.answer(big, bytes((1 << 20) + 1))
    net.server.headers(packed, [(":status", "200")])
    net.server.data(packed, grpc(b"zip", compressed=1), end=False)
    net.server.headers(packed, [("grpc-status", "0")], end=True)
    net.run()
    assert len(net.client.streams[big].body) == (1 << 20) + 6
    assert net.client.streams[packed].body == grpc(b"zip", compressed=1)
    assert not net.owner.responses
    assert net.owner.ends == [(limit, 0), (big, 0), (packed, 0)]


# -- early ends in every state ----------------------------------------------------------------------------

STATES = ["opened", "arriving", "waiting", "sending", "sent"]


def in_state(state, **options):
    """A connection with one intercepted stream in a state, and the id of the stream."""
    server = Peer(client=False, consume=None if state == "sending" else 0)
    net = started(server=server, **options)
    sid = net.client.open(CREATE)
    body = grpc(bytes(100_000))
    if state == "arriving":
        net.client.data(sid, body[:70_000], end=False)
    elif state != "opened":
        net.client.data(sid, body)
    net.run()
    if state in ("sending", "sent"):
        net.session.release(sid)
        net.run()
        assert net.server.streams[sid].remote_closed == (state == "sent")
    return net, sid


def settle(net, sid):
    """Check that an ended call leaves no state: another call works, and windows are complete."""
    net.run()
    net.session.release(sid)
    net.session.refuse(sid, 1, "x")
    net.run()
    assert net.owner.ends == ([(sid, None)] if sid in net.owner.requests else [])
    net.server.consume = 0
    net.server.take_grant(0, net.server.eaten + 65535 - net.server.recv)
    net.server.eaten = 0
    net.run()
    other = net.client.call(CREATE, bytes(200_000))
    net.run()
    net.session.release(other)
    net.run()
    assert net.server.streams[other].body == grpc(bytes(200_000))
    net.server.answer(other, b"id")
    net.run()
    assert net.owner.ends[-1] == (other, 0)
    net.check_whole()
    assert net.session.open_streams == 0


@pytest.mark.parametrize("state", STATES)
def test_the_client_resets(state):
    net, sid = in_state(state)
    net.client.reset(sid)
    settle(net, sid)
    assert net.server.streams[sid].reset_received == 8


@pytest.mark.parametrize("state", STATES)
def test_the_runtime_resets(state):
    net, sid = in_state(state)
    net.server.reset(sid, 7)
    net.run()
    if not net.client.streams[sid].local_closed:
        net.client.reset(sid)
    settle(net, sid)
    assert net.client.streams[sid].reset_received == 7
    assert net.server.streams[sid].reset_received is None


@pytest.mark.parametrize("answered", [False, True])
def test_data_under_way_at_a_reset_of_the_runtime_returns_no_window_of_its_stream(answered):
    net, sid = in_state("arriving")
    if answered:
        net.server.answer(sid, status=8, opening=False)
        net.run()
    net.server.reset(sid, 0)
    net.client.data(sid, bytes(40_000), end=False)  # it was sent before the client sees the reset
    net.session.from_server(net.server.take())
    net.session.from_client(net.client.take())
    sent = [(kind, on) for kind, _, on, _ in frames(b"".join(net.session.to_client()))]
    assert (RST, sid) in sent
    assert (WINDOW, sid) not in sent


def test_data_under_way_at_a_reset_of_a_waiting_upload_returns_no_window_of_its_stream():
    net = started()
    large = net.client.call(CREATE, bytes(60_000))
    net.run()
    net.session.release(large)
    passing = net.client.open(VERSION)
    net.client.data(passing, bytes(16_000), end=False)
    net.session.from_client(net.client.take())
    assert net.session.unsent
    net.session.from_server(frame(RST, 0, passing, struct.pack(">I", 8)))
    net.client.data(passing, bytes(1000), end=False)
    net.session.from_client(net.client.take())
    sent = [(kind, on) for kind, _, on, _ in frames(b"".join(net.session.to_client()))]
    assert (RST, passing) in sent
    assert (WINDOW, passing) not in sent


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("then", ["stops", "continues"])
def test_the_runtime_answers_early(state, then):
    net, sid = in_state(state)
    net.server.answer(sid, status=8, opening=False)
    net.run()
    assert net.client.streams[sid].headers[0]["grpc-status"] == "8"
    if not net.client.streams[sid].local_closed:
        if then == "stops":
            net.client.reset(sid)
        else:
            net.client.data(sid, bytes(300_000))  # it is dropped, and the client never waits for it
            net.run()
            assert net.client.streams[sid].local_closed
    if sid in net.owner.requests:
        assert net.owner.ends == [(sid, 8)]
        net.owner.ends[:] = [(sid, None)]
    settle(net, sid)
    if state != "sent":
        assert net.server.streams[sid].reset_received == 8


@pytest.mark.parametrize("state", STATES)
def test_the_runtime_goes_away(state):
    net, sid = in_state(state)
    net.server.out += frame(GOAWAY, 0, 0, struct.pack(">II", sid - 1, 0))
    net.run()
    assert net.client.goaway == sid - 1
    assert net.owner.ends == ([(sid, None)] if sid in net.owner.requests else [])
    assert net.session.open_streams == 0
    late = net.client.open(CREATE)  # was on its way already
    net.client.data(late, grpc(bytes(160_000)))
    net.run()
    assert net.client.streams[late].local_closed, "the client never waits for it"
    assert late not in net.owner.requests
    assert not net.server.streams[late].body
    net.session.release(sid)
    net.run()
    assert net.session._streams.held == 0
    assert net.client.send >= min(32_768, net.server.recv)


def test_a_goaway_leaves_the_streams_that_it_names():
    net = started()
    kept, _ = net.client.open(VERSION), net.client.open(VERSION)
    net.run()
    net.session.from_server(frame(GOAWAY, 0, 0, struct.pack(">II", kept, 0)))
    assert net.session.open_streams == 1


def test_window_freed_by_a_goaway_is_granted_to_the_client():
    net = started()
    sid = net.client.open(CREATE)
    net.client.data(sid, bytes(30_000), end=False)
    net.run()
    assert net.client.send == 35_535
    net.server.out += frame(GOAWAY, 0, 0, struct.pack(">II", 0, 0))
    net.run()
    assert net.client.send == 65_535


def test_a_goaway_that_names_no_end_changes_nothing():
    net, sid = in_state("waiting")
    net.server.out += frame(GOAWAY, 0, 0, struct.pack(">II", (1 << 31) - 1, 0))
    net.run()
    net.session.release(sid)
    net.run()
    net.server.answer(sid, b"id")
    net.run()
    assert net.owner.ends == [(sid, 0)]


@pytest.mark.parametrize("state", STATES)
def test_a_lost_connection_ends_every_call_once(state):
    net, sid = in_state(state)
    net.session.lost()
    net.session.lost()
    net.session.release(sid)
    assert net.owner.ends == ([(sid, None)] if sid in net.owner.requests else [])
    assert net.session.open_streams == 0
    assert not net.session.unsent


def test_an_upload_that_waits_for_the_runtimes_window_ends_with_its_connection():
    net = Net(server=Peer(client=False, consume=None)).run()
    held, upload = net.client.call(CREATE, bytes(60_000)), net.client.open("/other.Service/Upload")
    net.run()
    net.session.release(held)  # this uses up the runtime's window
    net.client.data(upload, bytes(10_000), end=False)
    net.run()
    flow = net.session._streams.flow
    assert flow.queue
    net.session.lost()
    assert not flow.queue


def test_a_client_that_closes_ends_its_held_calls():
    net = started()
    sids = [net.client.call(CREATE, b"c") for _ in range(3)]
    half = net.client.open(CREATE)
    net.client.data(half, b"\0\0", end=False)
    net.run()
    net.session.release(sids[0])
    net.session.client_closed()
    net.drain()
    assert sorted(net.owner.ends) == [(sids[1], None), (sids[2], None)]
    assert net.server.streams[sids[1]].reset_received == 8
    net.server.answer(sids[0], b"id")
    net.run()
    assert net.owner.ends[-1] == (sids[0], 0)


def test_calls_may_be_ended_and_released_from_within_each_other():
    net = started()
    first, second, third = (net.client.call(CREATE, b"c%d" % number) for number in range(3))
    net.run()
    net.owner.finished = lambda stream, status: (
        (net.session.release(second), net.session.refuse(third, 9, "no")) if stream == first else None
    )
    net.client.reset(first)
    net.run()
    assert net.server.streams[second].body == grpc(b"c1")
    assert net.client.streams[third].headers[0]["grpc-status"] == "9"


# -- frames outside of calls ------------------------------------------------------------------------------


def test_client_trailers_pass_behind_the_untouched_body():
    net = started(rewrite)
    sid = net.client.open(CREATE)
    net.client.data(sid, grpc(b"config"), end=False)
    net.run()
    net.client.headers(sid, [("x-trailer", "1")], end=True)
    net.run()
    assert net.server.streams[sid].body == grpc(b"config")
    assert net.server.streams[sid].headers[1] == {"x-trailer": "1"}
    assert not net.owner.requests
    net.server.answer(sid, b"id")
    net.run()
    assert net.server.streams[sid].reset_received is None, "the session does not hold the stream any more"
    assert net.owner.odd == [(CREATE, RequestAnomaly.TRAILERS)]
    net.check_whole()


def test_client_trailers_that_cannot_wait_end_the_connection():
    net = started(rewrite)
    sid = net.client.open(CREATE)
    net.client.data(sid, grpc(bytes(100_000)), end=False)
    net.run()
    net.client.headers(sid, [("x-trailer", "1")], end=True)
    with pytest.raises(RelayError, match="trailers"):
        net.run()


def test_ping_priority_and_unknown_frames_pass_both_ways():
    net = started()
    strange = frame(0x42, 0xFF, 7, b"strange"), frame(2, 0, 1, b"\0\0\0\0\1"), frame(0x0C, 0, 0, b"")
    net.client.out += b"".join(strange) + frame(PING, 0, 0, b"12345678")
    net.server.out += b"".join(strange) + frame(PING, 0, 0, b"abcdefgh")
    net.run()
    for peer, ping in ((net.server, b"12345678"), (net.client, b"abcdefgh")):
        kinds = [(kind, payload) for kind, flags, _, payload in peer.events if not (kind == PING and flags)]
        assert kinds == [(0x42, b"strange"), (2, b"\0\0\0\0\1"), (0x0C, b""), (PING, ping)]


def test_frames_of_the_session_are_never_inserted_into_a_frame_or_a_header():
    net = started()
    waiting = net.client.call(CREATE, b"config")
    other = net.client.open(VERSION)
    net.run()
    net.client.data(other, bytes(1000))
    data = net.client.take()
    net.session.from_client(data[:500])  # inside DATA that passes
    net.session.release(waiting, b"new")
    out = net.session.to_server()
    assert [len(piece) for piece in out] == [500]
    net.server.receive(out[0])
    net.session.from_client(data[500:])
    net.drain()
    assert net.server.streams[waiting].body == grpc(b"new")

    waiting = net.client.call(CREATE, b"config")
    net.run()
    third = net.client.next
    net.client.open(VERSION, [("x-long", "&" * 20000)])  # HEADERS and CONTINUATION
    data = net.client.take()
    cut = 9 + int.from_bytes(data[:3], "big") + 3
    net.session.from_client(data[:cut])
    net.session.release(waiting, b"newer")
    net.drain()
    assert not net.server.streams[waiting].body
    net.session.from_client(data[cut:])
    net.drain()
    assert net.server.streams[waiting].body == grpc(b"newer")
    assert net.server.streams[third].headers


def test_frames_of_the_session_wait_for_the_last_part_of_a_long_header():
    net = started()
    waiting = net.client.call(CREATE, b"config")
    net.run()
    net.client.open(VERSION, [("x-long", "&" * 45_000)])
    data = net.client.take()
    parts = [frame(*part) for part in frames(data)]
    assert [part[3] for part in parts] == [HEADERS, 9, 9, 9]
    net.session.from_client(parts[0])
    net.session.release(waiting, b"new")
    for part in parts:
        if part is not parts[0]:
            net.session.from_client(part)
        out = net.session.to_server()
        assert b"".join(out).startswith(part)
        assert (len(b"".join(out)) > len(part)) is (part is parts[-1])


def test_a_pushed_stream_keeps_the_header_table_right():
    net = started(keep)
    sid = net.client.call(CREATE, b"c")
    net.run()
    block = net.server.encoder.encode([(":path", "/pushed"), ("x-pushed", "1")])
    push = frame(5, 4, sid, struct.pack(">I", 2) + block)
    net.session.from_server(push)
    assert net.session.to_client() == [push]
    net.client.decoder.decode(block)
    net.server.answer(sid, b"id")
    net.run()
    assert net.owner.ends == [(sid, 0)]


def test_a_body_that_would_exceed_the_memory_limit_is_refused(monkeypatch):
    from proxy.relay import streams

    monkeypatch.setattr(streams, "HELD_BYTES", 360_000)
    net = started()
    first = net.client.call(CREATE, bytes(200_000))
    net.run()
    second = net.client.call(CREATE, bytes(200_000))
    third = net.client.call(CREATE, bytes(50_000))
    net.run()
    assert net.client.streams[second].headers[0]["grpc-status"] == "8"
    assert "CreateContainer" in net.client.streams[second].headers[0]["grpc-message"]
    assert set(net.owner.requests) == {first, third}
    assert net.owner.odd == [], "a refused request is not read"
    for sid in (first, third):
        net.session.release(sid)
        net.run()
        net.server.answer(sid)
    net.run()
    net.check_whole()


def test_a_stream_that_is_refused_within_its_body_is_granted_no_window():
    net = started()
    net.session._streams.budget.limit = 100_000
    sid = net.client.call(CREATE, bytes(300_000))
    net.run()  # strict: nothing follows a reset
    assert net.client.streams[sid].headers[0]["grpc-status"] == "8"
    assert net.owner.crowded


def test_a_body_counts_against_the_memory_limit_until_it_has_left(monkeypatch):
    from proxy.relay import streams

    monkeypatch.setattr(streams, "HELD_BYTES", 250_000)
    net = started(server=Peer(client=False, consume=None))
    first = net.client.call(CREATE, bytes(200_000))
    net.run()
    net.session.release(first)
    refused = net.client.call(CREATE, bytes(200_000))
    net.run()
    assert net.client.streams[refused].headers[0]["grpc-status"] == "8", "the first body finds no window"
    net.server.take_grant(0, 200_000)
    net.server.take_grant(first, 200_000)
    net.run()
    assert net.server.streams[first].remote_closed
    taken = net.client.call(CREATE, bytes(200_000))
    net.run()
    assert taken in net.owner.requests, "the first body was forwarded, although it is not answered"


def test_an_acknowledgement_of_nothing_passes():
    net = started()
    unexpected = frame(SETTINGS, 1, 0)
    net.session.from_server(unexpected)
    assert net.session.to_client() == [unexpected]


def test_the_session_sends_no_frame_to_the_client_before_the_runtimes_settings():
    net = Net(turn_down)
    sid = net.client.call(CREATE, bytes(40_000))
    net.session.from_client(net.client.take())
    assert net.session.to_client() == []
    net.run()
    assert net.client.streams[sid].headers[0]["grpc-status"] == "9"


def test_goaway_of_the_session_waits_for_the_runtimes_settings():
    session = Session(Owner(), frozenset().__contains__)
    session.goaway()
    assert session.to_client() == []
    session.from_server(settings())
    session.goaway()
    assert frames(b"".join(session.to_client()))[1:] == [
        (GOAWAY, 0, 0, struct.pack(">II", (1 << 31) - 1, 0)),
        (PING, 0, 0, GOAWAY_PING),
    ]


def test_goaway_of_the_session_names_no_later_stream_than_the_runtimes():
    net = started(keep)
    sid = net.client.open(VERSION)
    net.server.out += frame(GOAWAY, 0, 0, struct.pack(">II", sid, 0))
    net.run()
    net.client.open(VERSION)
    net.run()
    net.session.goaway()
    net.session.end_with_goaway(1, client=True)
    sent = frames(b"".join(net.session.to_client()))
    assert [(kind, payload) for kind, _, _, payload in sent if kind == GOAWAY] == [
        (GOAWAY, struct.pack(">II", sid, 0)),
        (GOAWAY, struct.pack(">II", sid, 1)),
    ]


def test_nothing_is_sent_on_a_passing_stream_after_a_reset():
    net = started()
    large = net.client.call(CREATE, bytes(60_000))
    net.run()  # the client has window again for what is held
    net.session.release(large)
    passing = net.client.open(VERSION)
    net.client.data(passing, bytes(16_000), end=False)
    net.session.from_client(net.client.take())
    net.session.to_server()
    assert net.session.unsent, "the runtime has not granted window yet"
    net.session.from_server(frame(RST, 0, passing, struct.pack(">I", 8)))
    net.session.from_server(frame(WINDOW, 0, 0, struct.pack(">I", 60_005)))
    assert b"".join(net.session.to_server()) == b""
    assert not net.session.unsent
    assert net.session._streams.flow.waiting == 0
    granted = [
        payload for kind, _, sid, payload in frames(b"".join(net.session.to_client())) if kind == WINDOW
    ]
    assert granted, "the client may send on other streams what it can no longer send on this one"


def test_the_session_records_that_a_client_has_acknowledged_its_goaway():
    net = started(keep)
    before = net.client.call(CREATE, b"")
    net.run()
    net.session.goaway()
    assert not net.session.saw_goaway
    net.run()
    assert net.session.saw_goaway
    assert net.session.intercepted() == [CREATE]
    assert not [event for event in net.server.events if event[0] == PING], "the answer comes from the session"
    net.session.from_client(frame(PING, ACK, 0, b"another1"))
    assert b"another1" in b"".join(net.session.to_server())
    net.session.release(before)


def test_a_ping_of_the_client_with_the_sessions_content_passes():
    """The client has not seen the GOAWAY yet: its ping is not an answer, and must be answered."""
    net = started()
    net.session.goaway()
    ping = frame(PING, 0, 0, GOAWAY_PING)
    net.session.from_client(ping)
    assert b"".join(net.session.to_server()) == ping
    assert not net.session.saw_goaway


def test_open_streams_are_counted():
    net = started(keep)
    sids = [net.client.call(path, b"") for path in (VERSION, CREATE, VERSION, VERSION)]
    net.run()
    assert net.session.open_streams == 4
    net.server.answer(sids[0])
    net.server.answer(sids[1])
    net.server.reset(sids[2])
    net.client.reset(sids[3])
    net.run()
    assert net.session.open_streams == 0


def test_a_passing_answer_that_ends_with_data_closes_its_stream():
    net = started()
    sid = net.client.call(VERSION, b"")
    net.run()
    net.server.headers(sid, [(":status", "502")])
    net.server.data(sid, b"<html>", end=True)
    net.run()
    assert net.session.open_streams == 0


def test_a_passing_answer_that_has_more_to_come_leaves_its_stream_open():
    net = started()
    sid = net.client.call(VERSION, b"")
    net.run()
    net.server.headers(sid, [(":status", "200")])
    net.server.data(sid, b"part", end=False)
    net.run()
    assert net.session.open_streams == 1


def test_only_the_first_header_of_a_stream_determines_its_method():
    net = started()
    sid = net.client.open(VERSION)
    net.client.headers(sid, [(":path", CREATE)])
    net.client.data(sid, grpc(b"config"))
    net.run()
    assert not net.owner.requests
    assert net.server.streams[sid].body == grpc(b"config")


@pytest.mark.parametrize("how", ["release", "refuse"])
def test_a_decision_within_the_runtimes_last_header_is_too_late(how):
    net = started()
    sid = net.client.call(CREATE, b"config")
    net.run()
    block = net.server.encoder.encode([(":status", "200"), ("grpc-status", "8")])
    net.session.from_server(frame(HEADERS, 1, sid, block[:1]))
    if how == "release":
        net.session.release(sid)
    else:
        net.session.refuse(sid, 9, "no")
    net.session.from_server(frame(9, 4, sid, block[1:]))
    net.run()
    assert net.client.streams[sid].headers == [{":status": "200", "grpc-status": "8"}]
    assert net.owner.ends == [(sid, 8)]
    assert not net.server.streams[sid].body
    assert net.server.streams[sid].reset_received == 8


def test_late_frames_for_a_call_that_was_refused_too_late_are_dropped():
    net = started()
    sid = net.client.open(CREATE)
    net.client.data(sid, grpc(b"config"), end=False)
    net.run()
    block = net.server.encoder.encode([(":status", "200"), ("grpc-status", "8")])
    net.session.from_server(frame(HEADERS, 1, sid, block[:1]))
    net.session.refuse(sid, 9, "no")
    net.session.from_server(frame(9, 4, sid, block[1:]))
    net.session.from_client(frame(DATA, 0, sid, b"more"))
    sent = b"".join(bytes(piece) for piece in net.session.to_server())
    assert b"more" not in sent
    assert sent.endswith(frame(RST, 0, sid, (8).to_bytes(4, "big")))


# -- misbehaviour -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        frame(CONTINUATION := 9, 4, 1, b"x"),
        frame(HEADERS, 0, 1, b"\x83") + frame(PING, 0, 0, bytes(8)),
        frame(HEADERS, 0, 1, b"\x83") + frame(CONTINUATION, 4, 3, b"\x86"),
        frame(HEADERS, 4, 0, b"\x83"),
        frame(HEADERS, 4, 1, b"\xbe"),
        frame(HEADERS, 4, 1, b"\x80"),
        frame(HEADERS, 4, 1, b"\x00\x7f"),
        frame(HEADERS, 4 | 8, 1, b"\x05abc"),
        frame(HEADERS, 4 | 0x20, 1, b"\0\0\0"),
        frame(DATA, 0, 0, b"x"),
        frame(DATA, 0, 1, bytes(16385)),
        frame(0x42, 0, 1, bytes(16385)),
        frame(SETTINGS, 0, 1),
        frame(SETTINGS, 0, 0, b"12345"),
        frame(SETTINGS, 1, 0, bytes(6)),
        settings((4, 1 << 31)),
        settings((5, 16383)),
        settings((5, 1 << 24)),
        frame(WINDOW, 0, 0, bytes(4)),
        frame(WINDOW, 0, 1, bytes(4)),
        frame(WINDOW, 0, 1, bytes(5)),
        frame(RST, 0, 1, bytes(3)),
        frame(RST, 0, 0, bytes(4)),
        frame(GOAWAY, 0, 0, bytes(7)),
        frame(5, 4, 1, bytes(8)),
        frame(5, 4, 1, b"\0\0\0\x02\x83"),
        (0xFFFFFF << 8).to_bytes(4, "big") + b"\0\0\0\0\1",
    ],
)
def test_a_client_that_breaks_the_protocol_ends_its_connection(data):
    session = Session(Owner(), frozenset((CREATE,)).__contains__)
    if not data.startswith(b"GET"):
        session.from_client(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings())
    with pytest.raises(RelayError, match="cannot"):
        session.from_client(data)
    session.lost()


def test_data_behind_the_end_of_a_held_stream_is_an_error():
    net, sid = in_state("waiting")
    with pytest.raises(RelayError):
        net.session.from_client(frame(DATA, 0, sid, b"x"))
    net, sid = in_state("waiting")
    with pytest.raises(RelayError):
        net.session.from_client(frame(HEADERS, 5, sid, b"\x83"))


def test_a_client_that_overruns_the_connection_window_is_stopped():
    net = started()
    sid = net.client.open(VERSION)
    net.run()
    with pytest.raises(RelayError, match="exceeded"):
        net.session.from_client(frame(DATA, 0, sid, bytes(16384)) * 5)


@pytest.mark.parametrize(
    "data",
    [
        frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff"),
        frame(WINDOW, 0, 1, b"\x7f\xff\xff\xff"),
        frame(HEADERS, 4, 1, b"\x3f\xe2\x1f"),  # a table of 4097 bytes, which is not allowed
    ],
)
def test_a_runtime_that_breaks_the_protocol_ends_the_connection(data):
    net = started()
    net.client.call(CREATE, b"c")
    net.run()
    with pytest.raises(RelayError):
        net.session.from_server(data)


def test_a_window_that_settings_make_too_wide_ends_the_connection():
    net = started()
    net.client.call(CREATE, b"c")
    net.run()
    net.session.from_server(frame(WINDOW, 0, 1, b"\x7f\xff\x00\x00") + settings((4, 1 << 30)))
    with pytest.raises(RelayError, match="2\\^31"):
        net.session.from_client(frame(SETTINGS, 1, 0))


@pytest.mark.parametrize("side", ["from_client", "from_server"])
def test_settings_without_acknowledgement_are_bounded(side):
    send = getattr(started().session, side)
    send(settings((4, 1)) * 1024)
    with pytest.raises(RelayError, match="acknowledged"):
        send(settings((4, 1)))


def test_no_frame_of_the_session_is_inserted_into_a_header_that_arrives_in_pieces():
    net, waiting = in_state("waiting")
    sid = waiting + 2
    header = frame(1, 0, sid, b"\x00\x06x-long\x7f\xa1\x1e") + frame(9, 0, sid, b"v" * 2000)
    last = frame(9, 4, sid, b"v" * 2000)
    net.session.to_server()
    net.session.from_client(header[:1000])
    net.session.release(waiting, b"new")
    net.session.from_client(header[1000:] + last[:500])
    net.session.from_client(last[500:])
    sent = b"".join(net.session.to_server())
    assert sent.startswith(header + last)
    assert grpc(b"new") in sent[len(header + last) :]


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_suffix_ends_the_message(size):
    net = started(lambda session, stream, message: session.release(stream, None, b"+cpuset"))
    sid = net.client.call(CREATE, bytes(size))
    net.run()
    assert net.server.streams[sid].body == grpc(bytes(size) + b"+cpuset")
    net.server.answer(sid)
    net.run()
    net.check_whole()
