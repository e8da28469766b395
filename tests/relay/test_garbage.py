"""Hostile bytes: a connection ends with RelayError or continues, and memory stays bounded."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.relay.directions import MOST_EMPTY
from proxy.relay.events import RelayError
from proxy.relay.frames import LARGEST_BLOCK
from proxy.relay.session import Session
from tests.relay.strict_peer import CREATE, PREFACE, VERSION, Net, Owner, frame, keep
from tests.relay.strict_peer import settings as settings_frame

frame_bytes = st.builds(
    frame,
    st.integers(0, 11),
    st.integers(0, 255),
    st.sampled_from([0, 1, 2, 3, 5, 7, 0x7FFFFFFF, 0x80000001]),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [b"\x83\x86\x44\x2a" + CREATE.encode(), b"\x83\x86\x44\x23" + VERSION.encode(), bytes(4)]
        ),
        st.integers(1, 1 << 31).map(lambda number: number.to_bytes(4, "big")),
    ),
)
turns = st.lists(st.tuples(st.booleans(), st.one_of(frame_bytes, st.binary(max_size=30))), max_size=30)


def size_of(session):
    """Return the number of bytes that the session keeps."""
    streams = session._streams
    walkers = session._requests, session._responses
    return streams.held + sum(len(w._rest) + len(w._block or b"") for w in walkers)


@settings(max_examples=400, deadline=None)
@given(turns, st.sampled_from(["keep", "wait", "refuse"]))
def test_garbage_ends_the_connection_or_passes(conversation, how):
    def decide(session, stream, message):
        if how == "keep":
            session.release(stream)
        elif how == "refuse":
            session.refuse(stream, 9, "no")

    owner = Owner(decide)
    session = owner.session = Session(owner, frozenset((CREATE,)).__contains__)
    session.from_client(PREFACE + settings_frame())
    session.from_server(settings_frame())
    total = 0
    try:
        for client, data in conversation:
            total += len(data)
            (session.from_client if client else session.from_server)(data)
            session.to_server()
            session.to_client()
            assert size_of(session) <= total
    except RelayError as error:
        assert str(error).startswith("cannot ")  # noqa: PT017
    session.lost()
    assert sorted(stream for stream, _ in owner.ends) == sorted(owner.requests)
    assert session._streams.held == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.booleans())
def test_flipped_bytes_in_a_good_conversation(seed, client):
    rng = random.Random(seed)
    net = Net(keep).run()
    sid = net.client.call(CREATE, b"config" * 50)
    net.client.call(VERSION, b"")
    net.run()
    net.server.answer(sid, b"id")
    data = bytearray(net.server.take())
    if client:
        net.client.call(CREATE, b"config" * 50)
        data = bytearray(net.client.take())
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    with contextlib.suppress(RelayError):
        (net.session.from_client if client else net.session.from_server)(bytes(data))
    net.session.lost()
    assert {stream for stream, _ in net.owner.ends} == set(net.owner.requests)


def test_an_endless_header_is_cut_off():
    session = Session(Owner(), frozenset((CREATE,)).__contains__)
    session.from_client(PREFACE + settings_frame())
    session.from_client(frame(1, 0, 1, b"\x83"))
    piece = frame(9, 0, 1, bytes(16_384))
    most = 0
    try:
        for _ in range(2000):
            session.from_client(piece)
            session.to_server()
            most = max(most, size_of(session))
    except RelayError:
        pass
    else:
        raise AssertionError("it was never cut off")
    assert most <= LARGEST_BLOCK


def test_empty_continuations_cost_no_memory():
    session = Session(Owner(), frozenset((CREATE,)).__contains__)
    session.from_client(PREFACE + settings_frame() + frame(1, 0, 1, b"\x83"))
    session.from_client(frame(9, 0, 1) * MOST_EMPTY)
    assert len(session._requests._block) <= 1
    with pytest.raises(RelayError, match="empty frames"):
        session.from_client(frame(9, 0, 1))


def test_unacknowledged_settings_are_bounded():
    session = Session(Owner(), frozenset((CREATE,)).__contains__)
    session.from_client(PREFACE)
    try:
        for _ in range(5000):
            session.from_client(settings_frame())
    except RelayError:
        return
    raise AssertionError("it was never cut off")


def test_state_of_streams_that_ended_early_is_dropped():
    net = Net(lambda session, stream, message: session.refuse(stream, 9, "no")).run()
    for _ in range(1500):
        net.client.call(CREATE, b"")
        net.step()
    net.run()
    assert len(net.session._streams.dead) <= 1024
    assert net.session.open_streams == 0
