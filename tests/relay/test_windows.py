"""Flow control under load, both ends strict (the pitfalls that small bodies never show)."""

import random
import struct

import pytest

from proxy.relay.flow import FlowControl
from tests.relay.strict_peer import CREATE, VERSION, WINDOW, Net, Peer, frame, grpc, keep, rewrite, turn_down

LARGE = 205_000
UPLOAD = "/other.Service/Upload"


def decider(rng, share=1.0):
    """Return a handler that rewrites to another length, and refuses or keeps some requests."""

    def decide(session, stream, message):
        if rng.random() > share:
            session.refuse(stream, 9, "no")
        else:
            session.release(stream, message[: rng.randrange(len(message) + 1)] + bytes(rng.randrange(3000)))

    return decide


@pytest.mark.parametrize("consume", [0, 16_000, 32_767])
@pytest.mark.parametrize("decide", [keep, rewrite, None])
def test_64_held_bodies_of_205_kb(consume, decide):
    net = Net(decide, server=Peer(client=False, consume=consume)).run()
    body = random.Random(1).randbytes(LARGE)
    sids = [net.client.call(CREATE, body) for _ in range(64)]
    net.run()
    assert len(net.owner.requests) == 64
    if decide is None:  # all 13 MB wait, then leave in another order
        random.Random(2).shuffle(sids)
        for sid in sids:
            net.session.release(sid, body)
    net.run()
    expected = grpc(body + b"+cpuset") if decide is rewrite else grpc(body)
    for sid in sids:
        assert net.server.streams[sid].body == expected
        net.server.answer(sid, b"id")
    net.run()
    assert len(net.owner.ends) == 64
    net.check_whole()


def test_the_window_for_a_long_body_is_granted_in_one_frame():
    net = Net(keep).run()
    sid = net.client.open(CREATE)
    body = grpc(bytes(LARGE))
    stream = net.client.streams[sid]
    net.client.data(sid, body[:16_384], end=False)
    net.run()
    assert stream.send == 65_535 - 16_384 + len(body)
    net.client.data(sid, body[16_384:])
    net.run()
    assert net.server.streams[sid].body == body
    assert stream.send == 65_535, "nothing more was granted"


def test_the_window_of_a_whole_message_is_granted_before_its_stream_ends():
    net = Net(keep).run()
    sid = net.client.open(CREATE)
    stream = net.client.streams[sid]
    net.client.data(sid, grpc(bytes(1000)), end=False)
    net.run()
    assert stream.send == 65_535, "the client may still send trailers and an empty end"


def test_the_window_for_a_long_body_is_granted_with_its_length():
    net = Net(keep).run()
    sid = net.client.open(CREATE)
    body = grpc(bytes(LARGE))
    stream = net.client.streams[sid]
    net.client.data(sid, body[:5], end=False)
    net.run()
    assert stream.send == 65_535 - 5 + len(body)
    net.client.data(sid, body[5:100_000], end=False)
    net.run()
    assert stream.send == 65_535 - 100_000 + len(body), "it is granted once"
    net.client.data(sid, body[100_000:])
    net.run()
    assert (net.server.streams[sid].body, stream.send) == (body, 65_535)


def test_a_body_that_just_fits_the_streams_window_is_granted_nothing():
    net = Net(keep).run()
    sid = net.client.open(CREATE)
    body = grpc(bytes(65_530))
    net.client.data(sid, body[:16_384], end=False)
    net.run()
    assert net.client.streams[sid].send == 65_535 - 16_384
    net.client.data(sid, body[16_384:])
    net.run()
    assert (net.server.streams[sid].body, net.client.streams[sid].send) == (body, 0)


def test_15_8_mib_rewritten():
    net = Net(rewrite, server=Peer(client=False, consume=16_000)).run()
    body = bytes(16_567_500)
    sid = net.client.call(CREATE, body)
    net.run()
    assert net.server.streams[sid].body == grpc(body + b"+cpuset")
    net.server.answer(sid)
    net.run()
    net.check_whole()


def answer_all(net, rng):
    """Answer complete requests, and reset a few other streams."""
    for sid, stream in list(net.server.streams.items()):
        if stream.reset_received is not None or stream.local_closed:
            continue
        if stream.remote_closed:
            net.server.answer(sid, b"id")
        elif rng.random() < 0.1:
            net.server.reset(sid)


def give_up_some(net, rng, share):
    for sid, stream in list(net.client.streams.items()):
        if rng.random() < share and not stream.over and not stream.reset_sent:
            net.client.reset(sid)


@pytest.mark.parametrize("seed", range(6))
def test_windows_are_complete_after_any_mixture_of_calls(seed):
    rng = random.Random(seed)
    net = Net(
        decider(rng, 0.7),
        rng=rng,
        client=Peer(client=True, rng=rng, fancy=True),
        server=Peer(client=False, rng=rng, fancy=True, consume=rng.choice([0, 5000, 30_000])),
    ).run()
    for _ in range(40):
        net.client.call(rng.choice([CREATE, CREATE, UPLOAD, VERSION]), bytes(rng.randrange(60_000)))
        if rng.random() < 0.5:
            net.step()
        give_up_some(net, rng, 0.05)
        if rng.random() < 0.3:
            answer_all(net, rng)
    net.run()
    answer_all(net, rng)
    net.run()
    give_up_some(net, rng, 1)
    net.run()
    assert {sid for sid, _ in net.owner.ends} == set(net.owner.requests)
    net.check_whole()


def test_hundreds_of_refusals_do_not_shrink_the_window():
    net = Net(turn_down).run()
    for _ in range(300):
        net.client.call(CREATE, bytes(5500))
        net.run()
    assert all(stream.remote_closed for stream in net.client.streams.values())
    assert net.client.send >= 32_768
    net.check_whole()


def test_a_client_stops_its_body_after_a_refusal(monkeypatch):
    from proxy.relay import streams

    monkeypatch.setattr(streams, "HELD_BYTES", 50_000)
    net = Net(keep).run()
    sid = net.client.call(CREATE, bytes(500_000))
    net.run()
    stream = net.client.streams[sid]
    assert stream.headers[0]["grpc-status"] == "8"
    assert stream.reset_received == 0
    assert not net.owner.requests
    net.check_whole()


def test_the_runtimes_initial_window_may_come_behind_its_update():
    net = Net(keep, server=Peer(client=False, initial=1000, consume=None)).run()
    sid = net.client.call(CREATE, bytes(50_000))
    net.run()
    assert len(net.server.streams[sid].body) == 1000
    net.server.take_grant(0, 1 << 20)
    net.run()
    assert len(net.server.streams[sid].body) == 1000
    net.server.announce((4, 1 << 20))
    net.run()
    assert net.server.streams[sid].body == grpc(bytes(50_000))


def test_a_smaller_initial_window_makes_pending_bodies_wait():
    net = Net(keep, server=Peer(client=False, consume=None)).run()
    sid = net.client.call(CREATE, bytes(100_000))
    net.run()
    assert len(net.server.streams[sid].body) == 65535
    net.server.announce((4, 1000))
    net.server.take_grant(0, 1 << 20)
    net.run()
    net.server.take_grant(sid, 64_535)
    net.run()
    assert len(net.server.streams[sid].body) == 65535  # the stream's window is 0 now
    net.server.take_grant(sid, 1)
    net.run()
    assert len(net.server.streams[sid].body) == 65536
    net.server.take_grant(sid, 1 << 20)
    net.run()
    assert net.server.streams[sid].remote_closed


@pytest.mark.parametrize("initial", [100, 10_000])
def test_a_smaller_initial_window_does_not_stop_a_body_that_is_held(initial):
    net = Net(keep).run()
    sid = net.client.open(CREATE)
    body = grpc(bytes(60_000))
    net.client.data(sid, body[:30_000], end=False)
    net.run()
    net.server.announce((4, initial))
    net.run()
    assert net.client.streams[sid].send == initial, "the held bytes are granted back"
    net.client.data(sid, body[30_000:])
    net.run()
    assert net.server.streams[sid].body == body
    net.server.answer(sid)
    net.run()
    net.check_whole()


def test_a_smaller_initial_window_that_suffices_grants_nothing():
    net = Net(keep).run()
    sid = net.client.open(CREATE)
    body = grpc(bytes(40_000))
    net.client.data(sid, body[:30_000], end=False)
    net.run()
    net.server.announce((4, 50_000))
    net.run()
    assert net.client.streams[sid].send == 20_000
    net.client.data(sid, body[30_000:])
    net.run()
    assert net.server.streams[sid].body == body


def test_a_reset_behind_a_smaller_initial_window_comes_last():
    net = Net(keep).run()
    sid = net.client.open(CREATE)
    net.client.data(sid, grpc(bytes(60_000))[:30_000], end=False)
    net.run()
    net.server.announce((4, 100))
    net.server.reset(sid)
    net.run()
    assert net.client.streams[sid].send == 100
    assert net.client.streams[sid].reset_received == 8


def test_an_initial_window_of_zero_is_opened_by_the_first_grant():
    net = Net(keep, server=Peer(client=False, initial=0)).run()
    sid = net.client.call(CREATE, bytes(3000))
    net.run()
    assert not net.owner.requests
    net.server.take_grant(sid, 1000)
    net.run()
    assert net.owner.requests
    assert net.server.streams[sid].body == grpc(bytes(3000))


@pytest.mark.parametrize("largest", [16_384, 20_000, 1 << 20])
def test_frames_are_as_long_as_the_runtime_allows(largest):
    server = Peer(client=False, max_frame=largest, initial=1 << 21)
    net = Net(rewrite, server=server).run()
    server.take_grant(0, 1 << 21)
    net.run()
    sid = net.client.call(CREATE, bytes(300_000))
    net.run()
    assert server.streams[sid].body == grpc(bytes(300_000) + b"+cpuset")


def test_a_shrunken_frame_size_is_obeyed_at_once():
    server = Peer(client=False, max_frame=1 << 20)
    net = Net(server=server).run()
    sid = net.client.call(CREATE, bytes(40_000))
    net.run()
    server.announce((5, 16_384))
    net.run()
    assert server.my_frame == 16_384
    net.session.release(sid)
    net.run()
    assert server.streams[sid].body == grpc(bytes(40_000))


@pytest.mark.parametrize(("key", "value"), [(4, 1 << 20), (5, 1 << 20)])
def test_a_wider_runtime_window_is_used_after_the_clients_ack(key, value):
    """grpc's C core refuses a frame of the new size that comes before it."""
    server = Peer(client=False, consume=None)
    net = Net(server=server).run()
    server.take_grant(0, 1 << 20)
    net.run()
    sid = net.client.call(CREATE, bytes(100_000))
    net.run()
    server.announce((key, value))
    net.session.from_server(server.take())  # the client has not read it yet
    net.session.release(sid)
    server.receive(b"".join(net.session.to_server()))  # strict: as before
    assert len(server.streams[sid].body) == 65535
    net.run()
    server.take_grant(sid, 1 << 20)
    net.run()
    assert server.streams[sid].body == grpc(bytes(100_000))


def test_of_several_settings_under_way_the_smallest_holds():
    flow = FlowControl()
    assert flow.on_server_settings([(4, 100_000), (5, 50_000), (5, 60_000)]) == 0
    assert flow.on_server_settings([(4, 1000)]) == -64_535
    assert flow.largest_frame == 16_384
    assert flow.on_settings_ack() == 0
    assert (flow.initial_window, flow.largest_frame) == (1000, 60_000)
    assert flow.on_server_settings([(5, 20_000)]) == 0
    assert flow.largest_frame == 20_000
    assert flow.on_settings_ack() == 0
    assert flow.on_server_settings([(4, 5000)]) == 0
    assert [flow.on_settings_ack(), flow.on_settings_ack()] == [0, 4000]
    assert flow.on_settings_ack() == 0  # an additional acknowledgement changes nothing


@pytest.mark.parametrize("end", [b"the end", b""])
def test_a_passing_upload_waits_for_the_window_of_a_released_body(end):
    server = Peer(client=False, consume=None, initial=1 << 20)
    net = Net(server=server).run()
    held = net.client.call(CREATE, bytes(60_000))
    upload = net.client.open(UPLOAD)
    net.run()
    net.session.release(held)
    net.run()
    net.client.data(upload, bytes(30_000), end=False)
    net.run()
    assert len(server.streams[upload].body) == 5530  # exactly the remaining window of the runtime
    assert net.session.unsent
    net.client.data(upload, end)
    net.run()
    assert not server.streams[upload].remote_closed
    net.run()
    server.take_grant(0, server.eaten or 60_005)
    net.run()
    server.consume = 0
    server.take_grant(0, 40_000)
    net.run()
    assert server.streams[upload].body == bytes(30_000) + end
    assert server.streams[upload].remote_closed
    assert not net.session.unsent


@pytest.mark.parametrize("how", ["client", "goaway"])
def test_a_waiting_upload_that_ends_returns_its_window(how):
    server = Peer(client=False, consume=None, initial=1 << 20)
    net = Net(server=server).run()
    held = net.client.call(CREATE, bytes(60_000))
    upload = net.client.open(UPLOAD)
    net.run()
    net.session.release(held)
    net.run()
    net.client.data(upload, bytes(30_000), end=False)
    net.run()
    if how == "client":
        net.client.reset(upload)
    else:
        server.out += frame(7, 0, 0, struct.pack(">II", held, 0))
    net.run()
    assert not net.session.unsent
    assert net.session._streams.flow.waiting == 0
    server.take_grant(0, 60_005 + 5530)
    net.run()
    assert net.client.send == server.recv == 65535


def test_padding_counts_in_both_windows():
    net = Net(keep).run()
    sid = net.client.open(CREATE)
    body = grpc(bytes(100_000))
    for start in range(0, len(body), 200):
        piece = body[start : start + 200]
        payload = b"\xff" + piece + bytes(255)
        stream = net.client.streams[sid]
        assert net.client.send >= len(payload)
        assert stream.send >= len(payload)
        stream.send -= len(payload)
        net.client.send -= len(payload)
        net.client.out += frame(0, 8 | (start + 200 >= len(body)), sid, payload)
        net.run()
    net.client.streams[sid].local_closed = True
    assert net.server.streams[sid].body == body
    net.server.answer(sid)
    net.run()
    net.check_whole()


def test_padding_of_a_waiting_upload_is_returned():
    server = Peer(client=False, consume=None)
    net = Net(server=server).run()
    held = net.client.call(CREATE, bytes(65_000))
    upload = net.client.open(UPLOAD)
    net.run()
    net.session.release(held)
    net.run()
    payload = b"\xc8" + bytes(1000) + bytes(200)
    net.client.out += frame(0, 8, upload, payload)
    net.client.send -= len(payload)
    net.client.streams[upload].send -= len(payload)
    net.run()
    assert net.client.streams[upload].send == 65535 - 1000
    server.take_grant(0, 65_005)
    net.run()
    assert len(server.streams[upload].body) == 1000
    assert net.client.send == server.recv


def test_data_of_an_upload_that_the_runtime_has_reset_returns_only_the_connections_window():
    server = Peer(client=False, consume=None)
    net = Net(server=server).run()
    held = net.client.call(CREATE, bytes(65_000))
    upload = net.client.open(UPLOAD)
    net.run()
    net.session.release(held)
    net.run()
    assert net.session._streams.flow.server_window == 530
    net.client.out += frame(0, 8, upload, payload := b"\xc8" + bytes(1000) + bytes(200))
    net.client.send -= len(payload)
    server.reset(upload)
    net.session.from_server(server.take())
    net.run()  # the client's strict end takes no update for the stream
    server.take_grant(0, 65_005)
    net.run()
    assert not server.streams[upload].body
    assert net.client.send == server.recv == 65535


def waiting_upload(*, table=4096):
    """A net in which 30,000 bytes of an upload wait for the connection's window."""
    server = Peer(client=False, consume=None)
    net = Net(server=server).run()
    if table != 4096:
        server.announce((1, table))
    held = net.client.call(CREATE, bytes(65_000))
    upload = net.client.open(UPLOAD)
    net.run()
    net.session.release(held)
    net.client.data(upload, bytes(30_000), end=False)
    net.run()
    assert net.session._streams.flow.waiting == 30_000 - 530
    return net, server, upload


@pytest.mark.parametrize("more", [(), ((1, 100),), ((4, 900), (5, 16_384)), ((4, 2000),), ((4, 65_535),)])
def test_the_ack_of_a_smaller_initial_window_waits_behind_data_that_waits(more):
    net, server, upload = waiting_upload()
    server.announce((4, 1000))
    if more:
        server.announce(*more)
    net.run()
    assert len(server.unacked) == 1 + bool(more)
    other = net.client.call(VERSION, b"v")  # its header does not wait
    net.run()
    assert other in server.streams
    server.take_grant(0, 65_005)
    net.run()
    assert len(server.streams[upload].body) == 30_000  # the strict end has the larger window until the ack
    assert not server.unacked
    assert server.my_initial == dict(more).get(4, 1000)


def test_acks_wait_in_order_until_one_allows_more_than_the_runtime_knows_of():
    """The window of the last one is then larger than any that the waiting data was sent within."""
    net, server, upload = waiting_upload()
    for window in (1000, 60_000, 2000):
        server.announce((4, window))
    net.run()
    assert len(server.unacked) == 3
    server.announce((4, 70_000))
    net.run()
    assert not server.unacked
    assert server.my_initial == 70_000
    server.take_grant(0, 65_005)
    net.run()
    assert len(server.streams[upload].body) == 30_000


@pytest.mark.parametrize("larger", [(4, 70_000), (5, 20_000), (1, 5000)])
def test_an_ack_that_allows_something_larger_does_not_wait(larger):
    net, server, _ = waiting_upload()
    server.announce((4, 1000))
    net.run()
    assert server.unacked
    server.announce(larger)
    net.run()
    assert not server.unacked
    net, server, _ = waiting_upload(table=100)
    server.announce(*([(4, 1000), larger] if larger[0] != 4 else [larger, (4, 70_000)]))
    net.run()
    assert not server.unacked


@pytest.mark.parametrize("how", ["client", "runtime", "goaway"])
def test_an_ack_waits_no_longer_than_the_data_before_it(how):
    net, server, upload = waiting_upload()
    server.announce((4, 1000))
    net.run()
    assert server.unacked
    if how == "client":
        net.client.reset(upload)
    elif how == "runtime":
        server.reset(upload)
    else:
        server.out += frame(7, 0, 0, struct.pack(">II", upload - 2, 0))
    net.run()
    assert not server.unacked


def test_window_updates_pass_unchanged_while_no_body_is_held():
    net = Net(rewrite, server=Peer(client=False, consume=None)).run()
    sid = net.client.open(UPLOAD)
    net.client.data(sid, bytes(20_000), end=False)
    net.run()
    update = frame(WINDOW, 0, 0, struct.pack(">I", 20_000))
    net.session.from_server(update)
    (out,) = net.session.to_client()
    assert out is update


def test_a_small_call_causes_no_frame_to_the_client():
    net = Net(keep).run()
    net.client.call(CREATE, bytes(5500))
    net.session.from_client(net.client.take())
    assert net.session.to_client() == []


def test_a_body_of_one_frame_waits_for_the_connections_window():
    server = Peer(client=False, consume=None)
    net = Net(server=server).run()
    first, second = net.client.call(CREATE, bytes(60_000)), net.client.call(CREATE, bytes(10_000))
    net.run()
    net.session.release(first)
    net.session.release(second)
    net.run()
    assert len(server.streams[second].body) == 5530
    server.take_grant(0, 60_000)
    net.run()
    assert server.streams[second].body == grpc(bytes(10_000))
