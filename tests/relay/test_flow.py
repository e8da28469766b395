import pytest

from proxy.relay.events import RelayError
from proxy.relay.flow import AHEAD_BYTES, STREAM_AHEAD_BYTES, FlowControl, Outgoing, joined
from proxy.relay.frames import INITIAL_WINDOW_SIZE, LARGEST_WINDOW


def item(stream, size, window=65535, *, end=True, passing=False):
    out = Outgoing(stream, window, passing=passing)
    out.add(bytes([stream]) * size)
    out.end = end
    return out


def sent(flow):
    """(stream, flags, size) of the frames that leave."""
    pieces, _ = flow.pump()
    return [
        (int.from_bytes(head[5:9], "big"), head[4], len(piece))
        for head, piece in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def test_bodies_leave_in_frames_that_the_runtime_allows():
    flow = FlowControl()
    flow.enqueue(item(1, 40_000))
    assert sent(flow) == [(1, 0, 16384), (1, 0, 16384), (1, 1, 7232)]
    assert flow.server_window == 65535 - 40_000
    flow.largest_frame = 20_000
    flow.enqueue(item(3, 20_001))
    assert sent(flow) == [(3, 0, 20_000), (3, 1, 1)]


def test_a_stream_without_window_does_not_stop_others():
    flow = FlowControl()
    flow.enqueue(blocked := item(1, 100, window=30))
    flow.enqueue(item(3, 100))
    assert sent(flow) == [(1, 0, 30), (3, 1, 100)]
    assert list(flow.queue) == [1]
    blocked.window += 1000
    assert sent(flow) == [(1, 1, 70)]
    assert blocked.sent
    assert not flow.queue


def test_an_exhausted_connection_window_stops_all_streams():
    flow = FlowControl()
    flow.server_window = 10
    flow.enqueue(item(1, 100))
    flow.enqueue(item(3, 100))
    assert sent(flow) == [(1, 0, 10)]
    assert sent(flow) == []
    flow.on_server_window(100)
    assert sent(flow) == [(1, 1, 90), (3, 0, 10)]


def test_the_last_byte_of_the_connection_window_is_used():
    flow = FlowControl()
    flow.server_window = 101
    flow.enqueue(item(1, 100))
    flow.enqueue(item(3, 100))
    assert sent(flow) == [(1, 1, 100), (3, 0, 1)]
    assert flow.server_window == 0


def test_a_negative_stream_window_waits_until_it_is_positive():
    flow = FlowControl()
    flow.enqueue(out := item(1, 5, window=-10))
    assert sent(flow) == []
    out.window += 12
    assert sent(flow) == [(1, 0, 2)]


def test_an_end_without_bytes_needs_no_window():
    flow = FlowControl()
    flow.enqueue(item(1, 0, window=0))
    assert sent(flow) == [(1, 1, 0)]


def test_held_data_is_granted_back_when_half_of_the_window_is_gone():
    flow = FlowControl()
    flow.add_received(32_767)
    assert flow.take_due_grant() == 0
    flow.add_received(1)
    assert flow.take_due_grant() == 32_768
    assert flow.client_window == 65535


def test_a_long_message_is_granted_at_once_and_the_connection_is_widened_once():
    flow = FlowControl()
    assert flow.grant_ahead(30_000) == 0, "it fits the stream's window"
    assert flow.take_grant() == 0
    assert flow.grant_ahead(205_005) == 205_005
    assert flow.take_due_grant() == AHEAD_BYTES, "the client has less than half of it"
    assert flow.grant_ahead(16 << 20) == STREAM_AHEAD_BYTES
    assert flow.take_grant() == 0
    assert flow.client_window == flow.server_window + AHEAD_BYTES
    flow.add_received(32_767 + AHEAD_BYTES // 2)
    assert flow.take_due_grant() == 0, "it has half of it"
    flow.add_received(1)
    assert flow.take_due_grant() == 32_768 + AHEAD_BYTES // 2


def test_no_window_is_widened_beyond_what_the_protocol_allows():
    flow = FlowControl()
    flow.on_server_settings([(INITIAL_WINDOW_SIZE, LARGEST_WINDOW)])
    assert flow.grant_ahead(205_005) == 0, "the runtime may have announced more than is acknowledged"
    flow.ahead = AHEAD_BYTES
    flow.on_server_window(LARGEST_WINDOW - flow.server_window)
    flow.take_grant()
    assert flow.client_window == LARGEST_WINDOW


def test_a_sent_body_is_a_debt_that_updates_repay():
    flow = FlowControl()
    flow.add_received(60_000)
    assert flow.take_due_grant() == 60_000
    flow.enqueue(item(1, 60_010))
    sent(flow)
    flow.on_server_window(50_000)
    assert flow.take_grant() == 0
    flow.add_received(20_000)
    flow.on_server_window(10_010)
    assert flow.take_grant() == 20_000
    assert flow.client_window == flow.server_window == 65535


def test_waiting_data_of_passing_streams_is_not_granted_back():
    flow = FlowControl()
    flow.server_window = 0
    flow.add_received(40_000)
    flow.waiting = 40_000
    flow.enqueue(item(1, 40_000, passing=True, end=False))
    assert flow.take_due_grant() == 0
    flow.on_server_window(50_000)
    assert flow.take_due_grant() == 0  # 50,000 - 40,000 is less than the 25,535 that the client has
    flow.on_server_window(50_000)
    assert len(sent(flow)) == 3
    assert flow.waiting == 0
    assert flow.take_grant() == 60_000 - 25_535
    flow.enqueue(item(1, 70_000, passing=True))
    flow.waiting = 70_000
    sent(flow)
    flow.drop(1)
    assert flow.waiting == 0


def test_impossible_flow_control_updates_are_refused():
    flow = FlowControl()
    with pytest.raises(RelayError):
        flow.add_received(65_536)
    flow = FlowControl()
    flow.on_server_window((1 << 31) - 65_536)
    with pytest.raises(RelayError):
        flow.on_server_window(1)


def test_bytes_are_taken_across_pieces():
    out = Outgoing(1)
    for piece in (b"abc", b"", b"defg", b"h"):
        out.add(piece)
    assert [out.take(2), out.take(3), out.take(3)] == [b"ab", b"cde", b"fgh"]
    assert out.remaining == 0


def test_small_pieces_are_gathered_and_large_ones_are_not_copied():
    out, large = Outgoing(1), bytes(4096)
    for piece in (b"first", large, b"a", b"b", large[:-1], large):
        out.add(piece)
    assert [len(chunk) for chunk in out.chunks] == [5, 4096, 2 + 4095, 4096]
    assert out.chunks[1] is large
    assert out.chunks[3] is large


def test_large_messages_are_not_copied_for_their_prefix():
    message = bytes(70_000)
    assert joined(b"p", message)[1] is message
    assert joined(b"p", b"m") == (b"pm",)
