import pytest

from proxy.relay.events import RelayError
from proxy.relay.flow import AHEAD_BYTES, STREAM_AHEAD_BYTES, FlowControl, Outgoing, joined
from proxy.relay.frames import INITIAL_WINDOW_SIZE, LARGEST_WINDOW


def item(stream, size, window=65535, *, end=True, passing=False):
    out = Outgoing(stream, window, passing=passing)
    out.add(bytes([stream]) * size)
    out.end = end
    return out


def sent(books):
    """(stream, flags, size) of the frames that leave."""
    pieces, _ = books.pump()
    return [
        (int.from_bytes(head[5:9], "big"), head[4], len(piece))
        for head, piece in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def test_bodies_leave_in_frames_that_the_runtime_allows():
    books = FlowControl()
    books.enqueue(item(1, 40_000))
    assert sent(books) == [(1, 0, 16384), (1, 0, 16384), (1, 1, 7232)]
    assert books.server == 65535 - 40_000
    books.largest = 20_000
    books.enqueue(item(3, 20_001))
    assert sent(books) == [(3, 0, 20_000), (3, 1, 1)]


def test_a_stream_without_window_does_not_stop_others():
    books = FlowControl()
    books.enqueue(blocked := item(1, 100, window=30))
    books.enqueue(item(3, 100))
    assert sent(books) == [(1, 0, 30), (3, 1, 100)]
    assert list(books.queue) == [1]
    blocked.window += 1000
    assert sent(books) == [(1, 1, 70)]
    assert blocked.sent
    assert not books.queue


def test_the_connection_window_stops_everything():
    books = FlowControl()
    books.server = 10
    books.enqueue(item(1, 100))
    books.enqueue(item(3, 100))
    assert sent(books) == [(1, 0, 10)]
    assert sent(books) == []
    books.widened(100)
    assert sent(books) == [(1, 1, 90), (3, 0, 10)]


def test_the_last_byte_of_the_connection_window_is_used():
    books = FlowControl()
    books.server = 101
    books.enqueue(item(1, 100))
    books.enqueue(item(3, 100))
    assert sent(books) == [(1, 1, 100), (3, 0, 1)]
    assert books.server == 0


def test_a_negative_stream_window_waits_until_it_is_positive():
    books = FlowControl()
    books.enqueue(out := item(1, 5, window=-10))
    assert sent(books) == []
    out.window += 12
    assert sent(books) == [(1, 0, 2)]


def test_an_end_without_bytes_needs_no_window():
    books = FlowControl()
    books.enqueue(item(1, 0, window=0))
    assert sent(books) == [(1, 1, 0)]


def test_held_data_is_granted_back_when_half_of_the_window_is_gone():
    books = FlowControl()
    books.arrived(32_767)
    assert books.due() == 0
    books.arrived(1)
    assert books.due() == 32_768
    assert books.client == 65535


def test_a_long_message_is_granted_at_once_and_the_connection_is_widened_once():
    books = FlowControl()
    assert books.advance(30_000) == 0, "it fits the stream's window"
    assert books.grant() == 0
    assert books.advance(205_005) == 205_005
    assert books.due() == AHEAD_BYTES, "the client has less than half of it"
    assert books.advance(16 << 20) == STREAM_AHEAD_BYTES
    assert books.grant() == 0
    assert books.client == books.server + AHEAD_BYTES


def test_no_window_is_widened_beyond_what_the_protocol_allows():
    books = FlowControl()
    books.announced([(INITIAL_WINDOW_SIZE, LARGEST_WINDOW)])
    assert books.advance(205_005) == 0, "the runtime may have announced more than is acknowledged"
    books.ahead = AHEAD_BYTES
    books.widened(LARGEST_WINDOW - books.server)
    books.grant()
    assert books.client == LARGEST_WINDOW


def test_a_sent_body_is_a_debt_that_updates_repay():
    books = FlowControl()
    books.arrived(60_000)
    assert books.due() == 60_000
    books.enqueue(item(1, 60_010))
    sent(books)
    books.widened(50_000)
    assert books.grant() == 0
    books.arrived(20_000)
    books.widened(10_010)
    assert books.grant() == 20_000
    assert books.client == books.server == 65535


def test_waiting_data_of_passing_streams_is_not_granted_back():
    books = FlowControl()
    books.server = 0
    books.arrived(40_000)
    books.waiting = 40_000
    books.enqueue(item(1, 40_000, passing=True, end=False))
    assert books.due() == 0
    books.widened(50_000)
    assert books.due() == 0  # 50,000 - 40,000 is less than the 25,535 that the client has
    books.widened(50_000)
    assert len(sent(books)) == 3
    assert books.waiting == 0
    assert books.grant() == 60_000 - 25_535
    books.enqueue(item(1, 70_000, passing=True))
    books.waiting = 70_000
    sent(books)
    books.drop(1)
    assert books.waiting == 0


def test_the_books_refuse_what_cannot_be():
    books = FlowControl()
    with pytest.raises(RelayError):
        books.arrived(65_536)
    books = FlowControl()
    books.widened((1 << 31) - 65_536)
    with pytest.raises(RelayError):
        books.widened(1)


def test_bytes_are_taken_across_pieces():
    out = Outgoing(1)
    for piece in (b"abc", b"", b"defg", b"h"):
        out.add(piece)
    assert [out.take(2), out.take(3), out.take(3)] == [b"ab", b"cde", b"fgh"]
    assert out.left == 0


def test_large_messages_are_not_copied_for_their_prefix():
    message = bytes(70_000)
    assert joined(b"p", message)[1] is message
    assert joined(b"p", b"m") == (b"pm",)
